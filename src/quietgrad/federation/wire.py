"""Messages between a coordinator and its parties: a JSON header and raw little-endian arrays, never a pickle.

    magic "QGM" · version (1 byte) · header length (4 bytes) · header CRC-32 (4) · sum of payload words (8) ·
    header (JSON: kind, fields, arrays) · arrays, each padded to 8 bytes

The sums find accidents, such as a flipped bit; forgery is the transport's business (TLS) or that of the sealed
frames of a secure sum, which travel in here as byte arrays. Reading is bounded: nothing is allocated before its
size was checked, and a message that is not exactly as announced is refused.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1
_MAGIC = b"QGM"
_HEAD = struct.Struct("<3sBIIQ4x")  # 24 bytes, so that arrays start on a word
_LARGEST_HEADER = 1 << 20
_HEADER_GRAIN = 256
_DTYPES: dict[str, np.dtype[Any]] = {
    "<f8": np.dtype("<f8"),
    "<f4": np.dtype("<f4"),
    "<i8": np.dtype("<i8"),
    "|u1": np.dtype("u1"),
}
_OVERHEAD = 1 << 16

Array = npt.NDArray[Any]
Bytes = bytes | bytearray | memoryview


class WireError(ValueError):
    """Bytes that are not a message of this version."""


@dataclass(frozen=True)
class Message:
    """What one side says to the other: a kind, public JSON fields, and arrays.

    >>> message = Message("sum", {"round": 3}, {"total": np.array([1.0, 2.0])})
    >>> again = decode(encode(message))
    >>> again.kind, again.fields["round"], again.arrays["total"].tolist()
    ('sum', 3, [1.0, 2.0])
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def blob(self, name: str) -> bytes:
        """The bytes of a byte array, such as a sealed frame."""
        if name not in self.arrays or self.arrays[name].dtype != np.uint8:
            raise WireError(f"message {self.kind!r} has no bytes {name!r}")
        return self.arrays[name].tobytes()


def blobs(frames: Mapping[Any, bytes]) -> dict[str, Array]:
    """Frames as byte arrays of a message, by name."""
    return {str(name): np.frombuffer(frame, np.uint8) for name, frame in frames.items()}


def limit(dimension: int, vectors: int = 4) -> int:
    """The largest message that may be needed for ``vectors`` vectors of a length.

    >>> limit(1000) > 4 * 8000
    True
    """
    return _HEAD.size + _LARGEST_HEADER + _OVERHEAD + 8 * dimension * vectors


def encode(message: Message, into: bytearray | None = None) -> bytearray:
    """The message as bytes; ``into`` is a buffer to use again if it has the right length."""
    arrays, pieces = [], []
    for name, value in message.arrays.items():
        array = np.ascontiguousarray(value)
        kind = array.dtype.newbyteorder("<").str
        if kind not in _DTYPES or array.ndim > 2:
            raise WireError(f"array {name!r} of type {array.dtype} and {array.ndim} dimensions cannot be sent")
        arrays.append([name, kind, list(array.shape)])
        pieces.append(array.astype(kind, copy=False).reshape(-1).view(np.uint8))
    text = json.dumps({"kind": message.kind, "fields": dict(message.fields), "arrays": arrays}).encode()
    text += b" " * (-len(text) % _HEADER_GRAIN)  # a few digits more do not change the message's length
    if len(text) > _LARGEST_HEADER:
        raise WireError(f"header of {len(text)} bytes: at most {_LARGEST_HEADER} are allowed")
    start = _padded(_HEAD.size + len(text))
    size = start + sum(_padded(piece.size) for piece in pieces)
    buffer = into if into is not None and len(into) == size else bytearray(size)
    out = np.frombuffer(buffer, np.uint8)
    out[_HEAD.size : _HEAD.size + len(text)] = np.frombuffer(text, np.uint8)
    at = start
    for piece in pieces:
        out[at : at + piece.size] = piece
        out[at + piece.size : at + _padded(piece.size)] = 0
        at += _padded(piece.size)
    _HEAD.pack_into(buffer, 0, _MAGIC, VERSION, len(text), zlib.crc32(text), _word_sum(out[start:]))
    return buffer


def decode(data: Bytes, *, most: int | None = None) -> Message:
    """Read a message; its arrays are views of ``data`` where that may be written to, else copies.

    Args:
        most: refuse messages of more bytes than this (see :func:`limit`).

    >>> decode(b"nonsense")
    Traceback (most recent call last):
    ...
    quietgrad.federation.wire.WireError: 8 bytes are too few for a message
    """
    if most is not None and len(data) > most:
        raise WireError(f"{len(data)} bytes are more than the {most} that were agreed")
    if len(data) < _HEAD.size:
        raise WireError(f"{len(data)} bytes are too few for a message")
    magic, version, length, crc, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"not a message of version {VERSION}")
    start = _padded(_HEAD.size + length)
    if length > _LARGEST_HEADER or start > len(data) or len(data) % 8:
        raise WireError("header or message length is wrong")
    view = memoryview(data)
    text = view[_HEAD.size : _HEAD.size + length]
    raw = np.frombuffer(view, np.uint8)
    if zlib.crc32(text) != crc or _word_sum(raw[start:]) != checksum:
        raise WireError("was damaged on its way")
    kind, fields, listed = _header(bytes(text))
    arrays: dict[str, Array] = {}
    for name, dtype, shape in listed:
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        if size > len(data) - start:
            raise WireError(f"array {name!r} is longer than the message")
        array = raw[start : start + size].view(_DTYPES[dtype]).reshape(shape)
        arrays[name] = array if array.flags.writeable else array.copy()
        start += _padded(size)
    if start != len(data) or len(arrays) != len(listed):
        raise WireError("message length does not match its arrays")
    return Message(kind, fields, arrays)


def _header(text: bytes) -> tuple[str, dict[str, Any], list[tuple[str, str, list[int]]]]:
    try:
        header = json.loads(str(text, "utf-8"))
        kind, fields, listed = header["kind"], header["fields"], header["arrays"]
        entries = [(name, dtype, shape) for name, dtype, shape in listed]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WireError("header is not understood") from None
    good = isinstance(kind, str) and isinstance(fields, dict)
    for name, dtype, shape in entries:
        good &= isinstance(name, str) and dtype in _DTYPES and isinstance(shape, list) and len(shape) <= 2
        good = good and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    if not good:
        raise WireError("header is not understood")
    return kind, fields, entries


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _word_sum(payload: npt.NDArray[np.uint8]) -> int:
    return int(np.add.reduce(payload.view("<u8"), dtype=np.uint64))
