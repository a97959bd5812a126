"""Revoked members: what the owner of a folder of keys decides, and the one list that the coordinator hands out.

    revoked.json       members that the owner of this folder revoked
    revocations.json   members on lists that the coordinator signed and handed out

A coordinator signs its own list and sends it whenever a run opens or keys are made. A member that gets one keeps it
and, from then on, refuses every secure sum that a listed member takes part in. Names are only ever added: a shorter
or an older list changes nothing, so replaying one is useless. Readmitting a member takes new keys. What the owner
revoked itself weighs more: a party or server then takes part in no plan that lists the member.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quietgrad.core.errors import DataError
from quietgrad.core.files import check_path_name, read_json, write_atomically
from quietgrad.federation.secure.identity import Identity, ProtocolError, is_signed

COORDINATOR = "coordinator"
FILE, LIST = "revoked.json", "revocations.json"
_DOMAIN = b"quietgrad revocations 1\0"
_LARGEST = 1 << 20  # bytes
_REASON = 200  # characters


def revoke(folder: str | Path, name: str, reason: str) -> dict[str, str]:
    """Add ``name`` to the members that the owner of ``folder`` revokes; returns all of them with the reasons."""
    reasons = own_revoked(folder)
    today = datetime.datetime.now(datetime.UTC).date()
    reasons[check_path_name("member", name)] = f"{today}: {reason}"
    _write(Path(folder) / FILE, reasons)
    return reasons


def own_revoked(folder: str | Path) -> dict[str, str]:
    """By name, why the owner of ``folder`` revoked members."""
    return _read(Path(folder) / FILE)


def revoked(folder: str | Path) -> dict[str, str]:
    """By name, why members are revoked in ``folder``: by its owner, or on the coordinator's list."""
    return {**_read(Path(folder) / LIST), **own_revoked(folder)}


def check_none_revoked(folder: str | Path, names: tuple[str, ...]) -> None:
    """Raise ``DataError`` if the owner of ``folder`` revoked one of ``names``."""
    reasons = own_revoked(folder)
    if listed := [name for name in names if name in reasons]:
        why = f"{listed[0]!r} is revoked here ({reasons[listed[0]]})"
        raise DataError(f"the plan lists a member, and {why}: agree on a plan without it.")


class Revocations:
    """The revoked members as one member knows them, read anew whenever they are needed.

    Args:
        folder: its folder of keys; in memory only if ``None``.
        publics: the public identities of all members.
        identity: signs what this member hands out, if it is the coordinator.
    """

    def __init__(
        self,
        folder: Path | None = None,
        publics: Mapping[str, bytes] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._folder, self._publics, self._identity = folder, dict(publics or {}), identity

    def __call__(self) -> dict[str, str]:
        return {} if self._folder is None else revoked(self._folder)

    def handed_out(self) -> dict[str, Any]:
        """Fields of a message with the coordinator's list, signed; none if no member is revoked."""
        if self._folder is None or self._identity is None or not (reasons := own_revoked(self._folder)):
            return {}
        listed = {name: reason[:_REASON] for name, reason in reasons.items() if name in self._publics}
        return {"revocations": {"revoked": listed, "signature": self._identity.sign(self._signed(listed)).hex()}}

    def take(self, fields: Mapping[str, Any]) -> None:
        """Keep the list in the fields of a coordinator's message, if there is one; a false one is refused."""
        if self._folder is None or "revocations" not in fields:
            return
        try:
            packed = fields["revocations"]
            listed = dict(packed["revoked"].items())
            texts = all(isinstance(text, str) for each in listed.items() for text in each)
            good = texts and COORDINATOR not in listed and listed.keys() <= self._publics.keys()
            signature = bytes.fromhex(packed["signature"])
            if not good or not is_signed(self._publics[COORDINATOR], signature, self._signed(listed)):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            why = "hands out a list of revoked members that it did not sign, or of others than the members"
            raise ProtocolError(COORDINATOR, why) from None
        before = _read(self._folder / LIST)
        if new := {name: reason[:_REASON] for name, reason in listed.items() if name not in before}:
            _write(self._folder / LIST, {**before, **new})

    def _signed(self, listed: Mapping[str, str]) -> bytes:
        """Return the bytes that the coordinator signs: the list, and the members of its federation."""
        members = {name: key.hex() for name, key in self._publics.items()}
        return _DOMAIN + json.dumps([members, dict(listed)], sort_keys=True).encode()


def _read(path: Path) -> dict[str, str]:
    """A list; one that cannot be read is refused, not ignored."""
    try:
        return {str(name): str(reason) for name, reason in read_json(path, most=_LARGEST).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError):
        raise DataError(f"{path}: cannot be read as the list of revoked members; repair or restore it.") from None


def _write(path: Path, listed: Mapping[str, str]) -> None:
    write_atomically(path, (json.dumps(listed, indent=2) + "\n").encode())
