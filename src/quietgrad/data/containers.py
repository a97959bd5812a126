"""Bytes on disk: plain, gzip or bzip2, and the checksum of what is inside."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import zlib
from pathlib import Path

from quietgrad.errors import DataError


def read_content(path: Path) -> bytes:
    """The decompressed bytes of a file; a cut or damaged archive is refused.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.gz"
    >>> _ = path.write_bytes(gzip.compress(b"1 1:1"))
    >>> read_content(path)
    b'1 1:1'
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    try:
        # The first bytes decide, not the suffix: a renamed file is common.
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        elif raw.startswith(b"BZh"):
            raw = bz2.decompress(raw)
        elif raw.startswith(b"\xfd7zXZ\x00"):
            raw = lzma.decompress(raw)
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError):
        raise DataError(f"{path}: the compressed file is cut short or damaged. Fetch or copy it again.") from None
    if not raw.strip():
        raise DataError(f"{path}: the file is empty.")
    return raw


def sha256(content: bytes) -> str:
    """Hex SHA-256 of decompressed content, so that .gz, .bz2 and plain copies share one checksum.

    >>> sha256(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(content).hexdigest()
