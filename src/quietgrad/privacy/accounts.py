"""Names of accounts: which spellings mean the same people, and which names are refused.

An account is a group of people by the user's word, and a cap per spelling is no cap. So names are compared by
:func:`identity`, which only ever brings spellings together: too much is then charged, never too little.
"""

from __future__ import annotations

import re
import unicodedata

DEFAULT = "default"  # the account of whoever names none
NAMELESS = (DEFAULT, "held-out")  # accounts that nobody named: what front ends say if they are not told
_UNNAMED = re.compile(r"[a-z ]+ [0-9a-f]{16}")
LONGEST = 120  # characters; a name is a label in tables and messages

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn")  # controls, formats (zero-width, direction marks), what is no character


def identity(name: str) -> str:
    """What two spellings of one account have in common: no case, no width, no spaces around, nothing invisible.

    >>> identity("Patients ") == identity("patients") == identity("Ｐatients")
    True
    """
    # Folding case can undo a normal form and the other way round, so both are repeated until nothing moves.
    before, folded = None, name
    while folded != before:
        before = folded
        visible = (c for c in folded if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
        folded = " ".join(unicodedata.normalize("NFKC", "".join(visible)).casefold().split())
    return folded


def checked(name: object) -> str:
    """Return the name as it is shown, without spaces around; ``ValueError`` says what is wrong with it.

    >>> checked(" patients ")
    'patients'
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"account={name!r}: must be a name that is not empty.")
    shown = name.strip()
    if len(shown) > LONGEST:
        raise ValueError(f"account={shown[:20]!r}…: has {len(shown)} characters; use at most {LONGEST}.")
    if any(unicodedata.category(c) in _INVISIBLE for c in shown):
        raise ValueError(f"account={shown!r}: holds characters that cannot be seen; use letters, digits and signs.")
    if "/" in shown or "\\" in shown or not identity(shown):
        raise ValueError(f"account={shown!r}: name the people, not a file; leave out / and \\.")
    return shown


def unnamed(what: str, mark: str) -> str:
    """The account of a table, a stream or a federation in a project's ledger, where nobody named the people.

    >>> unnamed("table", "3f9ab0c41d6e7a520011")
    'table 3f9ab0c41d6e7a52'
    """
    return f"{what} {mark[:16]}"


def same(name: str, other: str | None) -> bool:
    """Whether lines under ``name`` are those of the account that a run was charged to as ``other``.

    >>> same("Patients", "patients"), same("table 3f9ab0c41d6e7a52", "default"), same("patients", "default")
    (True, True, False)
    """
    if other is None:
        return False
    return identity(name) == identity(other) or (
        identity(other) in NAMELESS and _UNNAMED.fullmatch(name) is not None
    )
