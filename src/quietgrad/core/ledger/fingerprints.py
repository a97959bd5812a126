"""Keyed fingerprints of tables, and the forms in which a ledger's line holds one.

A plain hash of a table can be tested against guesses of its content. Fingerprints are HMAC-SHA256 under a random
key that stays in a 0600 file on this machine; another machine's fingerprints cannot be compared with them.

Ledgers and certificates are shown to others, and that two runs saw the same table, to the last record, is a fact
about its records that nothing paid for. So a line holds a fingerprint in two forms that tell others nothing:
*salted*, which is compared with the fingerprint of a table at hand, and *sealed*, which the holder of the key can
open. From opened fingerprints the owner is shown again which accounts share a table; no line names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from quietgrad.core.errors import LedgerError
from quietgrad.core.files import is_shared, write_atomically

_KEY_BYTES = 32
_TAG_DIGITS = 16  # hexadecimal: enough that no other machine's seal opens here


def state_folder() -> Path:
    """The folder of this user's keys and default ledger: ``$QUIETGRAD_STATE`` or ``~/.local/state/quietgrad``."""
    state = os.environ.get("QUIETGRAD_STATE")
    return Path(state) if state else Path.home() / ".local" / "state" / "quietgrad"


def salted(mark: str) -> str:
    """A fingerprint as a line of a ledger holds it: without the mark two lines of one table cannot be linked."""
    salt = os.urandom(8).hex()
    return salt + hashlib.sha256(f"{salt}{mark}".encode()).hexdigest()[:48]


def is_of_table(line: str, mark: str) -> bool:
    """Whether the fingerprint of a line is that of the table with this mark.

    >>> mark = "3f" * 32
    >>> is_of_table(salted(mark), mark), salted(mark) == salted(mark)
    (True, False)
    """
    salted_mark = hashlib.sha256(f"{line[:16]}{mark}".encode()).hexdigest()[:48]
    return line == mark or line[16:] == salted_mark  # lines of earlier versions have the mark itself


def sealed(mark: str, line: str) -> str | None:
    """The digest of a fingerprint, encrypted for the line with this id; ``None`` on a machine without a key.

    The pad is an HMAC of the id, which is random and of one line, so no pad is used twice.
    """
    digest = hashlib.sha256(mark.encode()).digest()
    try:
        key = _seal_key()
    except LedgerError:  # the warning is given now, and cannot be shown again
        return None
    return _padded(key, line, digest).hex() + _tag(key, line, digest)


def unsealed(seal: str, line: str) -> str | None:
    """The digest that :func:`sealed` encrypted; ``None`` if this machine's key did not."""
    try:
        value = bytes.fromhex(seal[:-_TAG_DIGITS])
        if len(value) != _KEY_BYTES or not (state_folder() / "fingerprint.key").exists():
            return None
        key = _seal_key()
    except (LedgerError, OSError, ValueError):
        return None
    digest = _padded(key, line, value)
    return digest.hex() if hmac.compare_digest(_tag(key, line, digest), seal[-_TAG_DIGITS:]) else None


def _seal_key() -> bytes:
    """A key for seals alone, so that no table's fingerprint is ever a pad."""
    return hashlib.sha256(b"seals of fingerprints" + _key(state_folder() / "fingerprint.key")).digest()


def _padded(key: bytes, line: str, value: bytes) -> bytes:
    pad = hmac.digest(key, f"pad {line}".encode(), "sha256")
    return bytes(a ^ b for a, b in zip(value, pad, strict=True))


def _tag(key: bytes, line: str, digest: bytes) -> str:
    return hmac.digest(key, f"tag {line}".encode() + digest, "sha256").hex()[:_TAG_DIGITS]


def fingerprint(chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return HMAC-SHA256 of the concatenated ``chunks`` under this machine's key, as 64 hex digits.

    Put shapes and types into a chunk of their own: only the bytes count, not where a chunk ends.
    """
    mac = hmac.new(_key(state_folder() / "fingerprint.key"), digestmod="sha256")
    for chunk in chunks:
        mac.update(chunk)
    return mac.hexdigest()


def _key(path: Path) -> bytes:
    """Read the key, or make it; processes that start together all end up with the same one."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
            write_atomically(fresh, os.urandom(_KEY_BYTES), private=True)
            with contextlib.suppress(FileExistsError):  # another process was first: its key counts
                os.link(fresh, path)
            fresh.unlink()
        shared = is_shared(path)
        key = path.read_bytes()
    except OSError as error:
        raise LedgerError(
            f"{path}: cannot read or make the fingerprint key ({error.strerror}); "
            "set QUIETGRAD_STATE to a folder that can be written."
        ) from None
    if shared:
        raise LedgerError(f"{path}: other users can read this key; chmod 600 it, or delete it to make a new one.")
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"{path}: must hold {_KEY_BYTES} bytes, has {len(key)}; delete it to make a new key.")
    return key
