"""Bytes on disk: plain, gzip, bzip2 or xz, unpacked within a budget, and the checksum of what is inside."""

from __future__ import annotations

import bz2
import codecs
import hashlib
import lzma
import zlib
from pathlib import Path
from typing import Any

from quietgrad import files
from quietgrad.errors import DataError, boundary

EXPANSION = 256
"""How many times its own size a file may become when it is unpacked; six kilobytes can hold gigabytes."""
SMALL = 16 << 20
"""Bytes that every file may become: short repetitive tables shrink a thousandfold."""
_PIECE = 1 << 20
_STEP = 1 << 9  # a file may have a hundred thousand members of a few bytes each


def budget(size: int) -> int:
    """The most bytes that a file of ``size`` bytes may become in memory.

    >>> budget(6000) == SMALL, budget(1 << 30) == EXPANSION << 30
    (True, True)
    """
    return max(SMALL, EXPANSION * size)


def read_content(path: Path) -> bytes:
    """The unpacked bytes of a file; a cut or damaged archive is refused, and one that unpacks to too much.

    >>> import gzip, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.gz"
    >>> _ = path.write_bytes(gzip.compress(b"1 1:1"))
    >>> read_content(path)
    b'1 1:1'
    """
    try:
        raw = files.read_bytes(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({files.os_error_text(error)}).") from None
    content = unpacked(raw, str(path))
    if content is raw and path.suffix in (".gz", ".bz2", ".xz") and not _is_text(raw[:4096]):
        raise DataError(_DAMAGED.format(path))  # a plain file under such a name is common, bytes of neither are not
    if not content or content.isspace():
        raise DataError(f"{path}: the file is empty.")
    return content


def unpacked(raw: bytes, where: str) -> bytes:
    """The content of gzip, bzip2 or xz bytes; all others are their own content."""
    # The first bytes decide, not the suffix: a renamed file is common.
    if raw.startswith(b"\x1f\x8b"):
        kind: Any = lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)  # noqa: E731
    elif raw.startswith(b"BZh"):
        kind = bz2.BZ2Decompressor
    elif raw.startswith(b"\xfd7zXZ\x00"):
        kind = lambda: lzma.LZMADecompressor(memlimit=64 << 20)  # noqa: E731
    else:
        return raw
    with boundary(_DAMAGED.format(where)):
        return _unpack(raw, kind, budget(len(raw)), where)


_DAMAGED = "{}: the compressed file is cut short or damaged. Fetch or copy it again."


def _is_text(start: bytes) -> bool:
    """Whether bytes could begin a table: UTF-8 (a character may be cut at the end) without controls.

    >>> _is_text("größe".encode()[:4]), _is_text(bytes([31, 7, 200, 9]))
    (True, False)
    """
    words = codecs.getincrementaldecoder("utf-8")("replace").decode(start)
    return not any(character == "\ufffd" or (character < " " and character not in "\t\r\n") for character in words)


def _unpack(raw: bytes, kind: Any, most: int, where: str) -> bytes:
    """Unpack one member after the other, never more than a piece beyond ``most`` bytes."""
    pieces: list[bytes] = []
    size = at = 0
    while at < len(raw):
        if pieces and raw[at] == 0 and not raw[at:].strip(b"\0"):
            break  # tapes and some tools fill the last block with zeros
        unpacker, step = kind(), _STEP
        while not unpacker.eof:
            data = getattr(unpacker, "unconsumed_tail", b"")
            if not data and getattr(unpacker, "needs_input", True):
                data = raw[at : at + step]
                at, step = at + len(data), min(2 * step, _PIECE)
                if not data:
                    raise EOFError
            piece = unpacker.decompress(data, _PIECE)
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise DataError(
                    f"{where}: unpacks to more than {EXPANSION} times its size and {SMALL >> 20} MiB; if that is "
                    "meant, unpack it by hand and load the plain file."
                )
        at -= len(unpacker.unused_data)
    return b"".join(pieces)


def sha256(content: bytes) -> str:
    """Hex SHA-256 of decompressed content, so that .gz, .bz2 and plain copies share one checksum.

    >>> sha256(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(content).hexdigest()
