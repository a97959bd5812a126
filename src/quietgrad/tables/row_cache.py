"""Rows of a scan that need not be read again: arrays in memory as far as that goes, the rest in a scratch file.

The file loses its name as soon as it is made, so that it ends with the process however that ends, and nobody can
open it. What it holds is encrypted and authenticated by AES-256-GCM under a key that is drawn for this cache and
kept in memory alone: what a disk keeps of a deleted file tells nothing, and bytes that were altered there are not
summed. Every place of the file is written once, and its offset is the nonce, so that no nonce serves twice. A
forked process reads what is there and adds nothing: it would write to the places that its parent writes to, under
the same key. A disk that is full ends the file, not the run: what has no room is read again from its source, and
gives the same numbers.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from quietgrad.core.errors import DataError

Arrays = tuple[npt.NDArray[Any], ...]
_AES_BLOCK = 16
_ALTERED = (
    "scan: the scratch file of rows was altered or cut on the disk. The release was not made; check the disk of "
    "the temporary folder (TMPDIR), then resume the run or start it again."
)


class _Place(NamedTuple):
    """Where a block lies in the file, its size and tag, and dtype and shape of its arrays, one behind the other."""

    offset: int
    size: int
    tag: bytes
    arrays: tuple[tuple[str, tuple[int, ...]], ...]


class RowCache:
    """Lists of blocks by key, each block some arrays; at most ``memory`` bytes of them in memory.

    >>> cache = RowCache(memory=0)
    >>> writer = cache.writer("piece")
    >>> writer.add((np.arange(3.0), np.ones(2)))
    >>> writer.done()
    >>> [block[0].tolist() for block in cache.get("piece")]
    [[0.0, 1.0, 2.0]]
    """

    def __init__(self, memory: int) -> None:
        self._left = memory
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, list[Arrays | _Place]] = {}
        self._key = os.urandom(32)
        self._file: int | None = None
        self._end = 0
        self._full = False

    def __repr__(self) -> str:
        return "RowCache()"

    def __reduce__(self) -> Any:
        raise TypeError("a cache of rows stays in its process.")

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def writer(self, key: Hashable) -> CacheWriter:
        """Takes the blocks of ``key``, one at a time; they are there once it is done."""
        return CacheWriter(self, key)

    def _kept(self, block: Arrays) -> Arrays | _Place | None:
        """The block in memory, or where it lies in the file; ``None`` if there is no room, or after a fork."""
        if os.getpid() != self._process:  # and the lock may be held by a thread that was not forked
            return None
        size = sum(array.nbytes for array in block)
        with self._lock:
            fits = size <= self._left
            if fits:
                self._left -= size
        return block if fits else self._written(block)

    def get(self, key: Hashable) -> Iterator[Arrays]:
        """The blocks of ``key``, one at a time; a block is valid until the next one is asked for."""
        blocks = self._blocks[key]
        # One buffer serves all of them: memory that is new to the process costs more than what is read into it.
        room = _buffer(max((block.size for block in blocks if isinstance(block, _Place)), default=0))
        for block in blocks:
            yield self._read(block, room) if isinstance(block, _Place) else block

    def _written(self, block: Arrays) -> _Place | None:
        """Where the arrays of a block are in the file; ``None`` if it has no room."""
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in block]
        # Each array begins at a multiple of a cipher block, where every number is aligned.
        content = _buffer(sum(_padded(len(part)) for part in parts))
        size = 0
        for part in parts:
            content[size : size + len(part)] = part
            content[size + len(part) : size + _padded(len(part))] = 0
            size += _padded(len(part))
        with self._lock:
            if self._full:
                return None
            if self._file is None:
                self._file = _nameless_file()
                weakref.finalize(self, os.close, self._file)
            offset = self._end
            self._end += max(size, _AES_BLOCK)  # the next block has a nonce of its own, if this one is empty
        sealing = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(offset))).encryptor()
        sealing.update_into(content.data[:size], content.data)
        sealing.finalize()
        try:
            _write_all(self._file, content[:size], offset)
        except OSError:  # the disk is full, or forbids files of this size
            self._full = True
            return None
        return _Place(offset, size, sealing.tag, tuple((array.dtype.str, array.shape) for array in block))

    def _read(self, place: _Place, content: npt.NDArray[np.uint8]) -> Arrays:
        assert self._file is not None
        done = 0
        while done < place.size:
            count = os.preadv(self._file, [content.data[done : place.size]], place.offset + done)
            if not count:
                raise DataError(_ALTERED)
            done += count
        opening = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(place.offset), place.tag)).decryptor()
        opening.update_into(content.data[: place.size], content.data)
        try:
            opening.finalize()
        except InvalidTag:
            raise DataError(_ALTERED) from None
        arrays, at = [], 0
        for dtype, shape in place.arrays:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays.append(content[at : at + size].view(dtype).reshape(shape))
            at += _padded(size)
        return tuple(arrays)


class WorkerRowCache(RowCache):
    """A cache on a worker of a cluster. Only its size travels: what arrives elsewhere is another, empty one.

    >>> import pickle
    >>> cache = WorkerRowCache(100)
    >>> writer = cache.writer("piece")
    >>> writer.add((np.arange(3.0),))
    >>> writer.done()
    >>> "piece" in cache, "piece" in pickle.loads(pickle.dumps(cache))
    (True, False)
    """

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self._memory = memory

    def __reduce__(self) -> Any:
        return WorkerRowCache, (self._memory,)


class CacheWriter:
    """Collects the blocks of one key; where one of them has no room, none is kept."""

    def __init__(self, cache: RowCache, key: Hashable) -> None:
        self._cache, self._key = cache, key
        self._blocks: list[Arrays | _Place] | None = []

    def add(self, block: Arrays) -> None:
        """Keep the next block."""
        if self._blocks is not None:
            kept = self._cache._kept(block)
            if kept is None:
                self._blocks = None
            else:
                self._blocks.append(kept)

    def done(self) -> None:
        """All blocks have come: from now on the cache has them."""
        if self._blocks is not None:
            self._cache._blocks[self._key] = self._blocks


def _nonce(offset: int) -> bytes:
    """The nonce of a place, which is written once: its offset."""
    return offset.to_bytes(12, "big")


def _padded(size: int) -> int:
    """The size, up to a whole number of cipher blocks."""
    return -(-size // _AES_BLOCK) * _AES_BLOCK


def _buffer(size: int) -> npt.NDArray[np.uint8]:
    """Memory for ``size`` bytes and the block less one that a cipher asks for behind them."""
    return np.empty(size + _AES_BLOCK - 1, dtype=np.uint8)


def _nameless_file() -> int:
    """A file of the temporary folder that only this process has; it had a name for a moment, and mode 0600."""
    file, name = tempfile.mkstemp(prefix="quietgrad-scratch-")
    os.unlink(name)
    return file


def _write_all(file: int, content: npt.NDArray[np.uint8], offset: int) -> None:
    rest = content.data
    while rest:
        done = os.pwrite(file, rest, offset)
        rest, offset = rest[done:], offset + done
