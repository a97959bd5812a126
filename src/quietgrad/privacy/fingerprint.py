"""Keyed fingerprints of tables: they let a ledger warn about mixed-up accounts and tell nobody else anything.

A plain hash of a table can be tested against guesses of its content. These are HMAC-SHA256 under a random key
that stays in a 0600 file on this machine; another machine's fingerprints cannot be compared with them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from quietgrad.errors import LedgerError

_KEY_BYTES = 32


def fingerprint(chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return HMAC-SHA256 of the concatenated ``chunks`` under this machine's key, as 64 hex digits.

    Put shapes and types into a chunk of their own: only the bytes count, not where a chunk ends.

    >>> import tempfile, unittest.mock
    >>> state = tempfile.TemporaryDirectory()
    >>> with unittest.mock.patch.dict(os.environ, QUIETGRAD_STATE=state.name):
    ...     fingerprint([b"rows"]) == fingerprint([b"ro", b"ws"])
    True
    >>> state.cleanup()
    """
    from quietgrad.privacy.keys import KeyFile  # brings the cipher library, which ledgers do not need

    mac = hmac.new(_key(KeyFile.directory().parent / "fingerprint.key"), digestmod="sha256")
    for chunk in chunks:
        mac.update(chunk)
    return mac.hexdigest()


def _key(path: Path) -> bytes:
    """Read the key, or make it; processes that start together all end up with the same one."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, os.urandom(_KEY_BYTES))
                os.fsync(fd)
                with contextlib.suppress(FileExistsError):  # another process was first: its key counts
                    os.link(fresh, path)
            finally:
                os.close(fd)
                fresh.unlink()
        shared = path.stat().st_mode & 0o077
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
