"""The random source: a keyed AES-256-CTR stream that can be read anywhere.

General-purpose generators (PCG64, Mersenne Twister) can be predicted from their output; noise that protects
people must not be. Here every number is AES-256 applied to (block number, counter) under a key derived from
the run's secret key and the stream's label. There is no state to save or to rewind: the same key, label and
block always give the same numbers, so a resumed run repeats its noise exactly, and numbers of different
labels or blocks are computationally independent. **One (label, block) pair must serve one draw only.**
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

KEY_BYTES = 32

ZEROS = memoryview(bytes(1 << 17))  # what is encrypted, a piece at a time that stays in the second-level cache
_BLOCKS = 1 << 64


def fresh_key() -> bytes:
    """Return a new secret key of 32 bytes from the operating system."""
    return os.urandom(KEY_BYTES)


def seed_key(seed: int) -> bytes:
    """Return the key that belongs to a test seed; a reader who knows the seed can subtract the noise.

    A run that uses it must report ``is_private: false``.

    >>> seed_key(1) == seed_key(1), seed_key(1) == seed_key(2)
    (True, False)
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed={seed!r}: must be a whole number. For secret noise use fresh_key().")
    return hashlib.sha256(f"quietgrad test seed {int(seed)}".encode()).digest()


def run_key(key: bytes, run: str) -> bytes:
    """A key for one run from a longer-lived one, so that no two runs ever share noise."""
    return SecureStream(key, f"run/{run}").bytes(0, len(key))


class SecureStream:
    """Random numbers addressed by (key, label, block): AES-256 in counter mode.

    The AES key is HMAC-SHA-256(key, label); the counter's upper 64 bits are the block number, its lower 64
    bits count within the block. Reading is stateless and may be done from several threads.

    Args:
        key: the run's 32 secret bytes, from :func:`fresh_key` (or :func:`seed_key` in tests).
        label: what the numbers are for, e.g. ``"noise/next"``; one label per purpose.

    It has uniform words and no noise: what draws that is :class:`quietgrad.core.noise.grid.NoiseStream`, which the
    mechanisms alone know.
    """

    __slots__ = ("_aes", "label")

    def __init__(self, key: bytes, label: str) -> None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            given = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ValueError(f"key of {given}: must be 32 bytes. Use fresh_key(), or seed_key(seed) in tests.")
        self.label = label
        message = b"quietgrad stream 1\0" + label.encode()
        self._aes = algorithms.AES(hmac.digest(key, message, "sha256"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(label={self.label!r})"  # never the key

    def bytes(self, block: int, n: int) -> bytes:
        """Return the first ``n`` bytes of ``block``."""
        return self._read(block, n).tobytes()

    def uint64(self, block: int, size: int) -> npt.NDArray[np.uint64]:
        """Return the first ``size`` 64-bit words of ``block``, each uniform."""
        return self._read(block, 8 * size).view("<u8").astype(np.uint64, copy=False)

    def words(self, block: int, size: int, kind: npt.DTypeLike, first: int = 0) -> npt.NDArray[Any]:
        """Return ``size`` uniform words of a little-endian unsigned type, from place ``first`` of ``block`` on.

        ``first`` words must fill whole blocks of AES, 16 bytes: counter mode can begin there.
        """
        width = np.dtype(kind).itemsize
        if first * width % 16:
            raise ValueError(f"first={first}: first × word size ({width} bytes) must be a multiple of 16 bytes.")
        return self._read(block, width * size, first * width // 16).view(kind)

    def at(self, block: int, counters: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Return one 64-bit word for each of the 64-bit ``counters``: a keyed function of (block, counter).

        Counter mode is AES of (block, counter), so this reads the first half of each 16-byte piece of the
        block: ``at(b, [0, 1]) == uint64(b, 4)[::2]``. Sampling by record id rests on it.
        """
        points = np.asarray(counters)
        if points.size and points.dtype.kind not in "iu":
            raise TypeError(f"counters of dtype {points.dtype}: must be whole numbers.")
        if points.dtype.kind == "i" and points.size and points.min() < 0:
            raise ValueError("counters: must be ≥ 0.")
        pairs = np.empty((points.size, 2), ">u8")
        pairs[:, 0] = _block(block)
        pairs[:, 1] = points.ravel()
        # ECB on distinct inputs is the bare keyed permutation, which is what counter mode is made of.
        cipher = Cipher(self._aes, modes.ECB()).encryptor()
        words = np.frombuffer(cipher.update(pairs.tobytes()), "<u8")[::2]
        return words.astype(np.uint64).reshape(points.shape)

    def _open(self, block: int, counter: int = 0) -> CipherContext:
        nonce = _block(block).to_bytes(8, "big") + counter.to_bytes(8, "big")
        return Cipher(self._aes, modes.CTR(nonce)).encryptor()

    def _read(self, block: int, size: int, counter: int = 0) -> npt.NDArray[np.uint8]:
        if size < 0:
            raise ValueError(f"size={size!r}: must be ≥ 0.")
        out = np.empty(size, np.uint8)
        stream = self._open(block, counter)
        for start in range(0, out.size, len(ZEROS)):
            piece = out[start : start + len(ZEROS)]
            stream.update_into(ZEROS[: piece.size], piece.data)
        return out


def inversion_table(weights: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the thresholds by which a uniform 64-bit word chooses k with probability ∝ ``weights[k]``.

    ``np.searchsorted(table, word, side="right")`` is then k. The arithmetic is exact; each probability is
    right to 2⁻⁶⁴, so the total variation is at most len(weights)·2⁻⁶⁵.
    """
    total, below, thresholds = sum(weights), 0, []
    for weight in weights[:-1]:
        below += weight
        # A threshold of 2^64 (nothing left above it) does not fit a word; one less moves 2^-64 of mass.
        thresholds.append(min((below << 64) // total, _BLOCKS - 1))
    return np.array(thresholds, np.uint64)


def _block(block: int) -> int:
    if not 0 <= block < _BLOCKS:
        raise ValueError(f"block={block!r}: must be a whole number in [0, 2^64).")
    return int(block)
