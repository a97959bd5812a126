"""Members who are no longer trusted, by the word of whoever holds a folder of keys.

A revocation is local: it counts for the one in whose folder ``revoked.json`` lies. The coordinator turns the member
away, also one that is connected; a party or a sum server takes part in no plan that lists it. There is no way back
but to provision again, with other keys, under other names or not.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from quietgrad.errors import DataError
from quietgrad.files import check_path_name, read_json, write_atomically

FILE = "revoked.json"


def revoke(folder: str | Path, name: str, reason: str) -> dict[str, str]:
    """Add ``name`` to the revoked members of ``folder``; returns all of them with the reasons.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = revoke(folder, "clinic-2", "its keys were stolen")
    ...     list(revoked(folder))
    ['clinic-2']
    """
    known = revoked(folder)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    known[check_path_name("member", name)] = f"{day}: {reason}"
    write_atomically(Path(folder) / FILE, (json.dumps(known, indent=2) + "\n").encode())
    return known


def revoked(folder: str | Path) -> dict[str, str]:
    """By name, why members are revoked in ``folder``; a list that cannot be read is refused, not ignored."""
    path = Path(folder) / FILE
    try:
        known = read_json(path, most=1 << 20)
        if not isinstance(known, dict):
            raise ValueError
        return {str(name): str(reason) for name, reason in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise DataError(f"{path}: cannot be read as the list of revoked members; mend or restore it.") from None


def check_none_revoked(folder: str | Path, names: tuple[str, ...]) -> None:
    """Refuse to work with a plan that lists a revoked member."""
    known = revoked(folder)
    if listed := [name for name in names if name in known]:
        raise DataError(
            f"the plan lists {listed[0]!r}, which is revoked here ({known[listed[0]]}): agree on a plan without it."
        )
