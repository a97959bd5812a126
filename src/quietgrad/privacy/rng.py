"""The random source: a keyed AES-256-CTR stream that can be read anywhere, and normals drawn from it.

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
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

KEY_BYTES = 32

# Words turned into normals at a time: input, output and scratch then stay in the second-level cache.
_CHUNK = 1 << 14
_ZEROS = memoryview(bytes(8 * _CHUNK))
# A probability of fewer than _COARSE steps of 2^-64 gets more bits, from counters no draw itself reaches.
_COARSE, _UPPER = np.uint64(1 << 48), 1 << 63
_BLOCKS = 1 << 64


def fresh_key() -> bytes:
    """Return a new secret key of 32 bytes from the operating system.

    >>> len(fresh_key()), fresh_key() == fresh_key()
    (32, False)
    """
    return os.urandom(KEY_BYTES)


def seed_key(seed: int) -> bytes:
    """Return the key that belongs to a test seed; whoever knows the seed can subtract the noise.

    A run that uses it must report ``is_private: false``.

    >>> seed_key(1) == seed_key(1), seed_key(1) == seed_key(2)
    (True, False)
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed={seed!r}: must be a whole number. For secret noise use fresh_key().")
    return hashlib.sha256(f"quietgrad test seed {int(seed)}".encode()).digest()


def run_key(key: bytes, run: str) -> bytes:
    """A key for one run from a longer-lived one, so that no two runs ever share noise.

    >>> run_key(seed_key(0), "a") == run_key(seed_key(0), "b")
    False
    """
    return SecureStream(key, f"run/{run}").bytes(0, len(key))


class SecureStream:
    """Random numbers addressed by (key, label, block): AES-256 in counter mode.

    The AES key is HMAC-SHA-256(key, label); the counter's upper 64 bits are the block number, its lower 64
    bits count within the block. Reading is stateless and may be done from several threads.

    Args:
        key: the run's 32 secret bytes, from :func:`fresh_key` (or :func:`seed_key` in tests).
        label: what the numbers are for, e.g. ``"noise/next"``; one label per purpose.

    >>> noise = SecureStream(seed_key(7), "noise")
    >>> noise.normal(3, 2).tolist() == noise.normal(3, 2).tolist()
    True
    >>> noise.bytes(0, 8) == noise.bytes(1, 8)
    False
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
        return f"SecureStream(label={self.label!r})"  # never the key

    def bytes(self, block: int, n: int) -> bytes:
        """Return the first ``n`` bytes of ``block``.

        >>> SecureStream(seed_key(0), "a").bytes(0, 4) == SecureStream(seed_key(0), "b").bytes(0, 4)
        False
        """
        out = np.empty(_size("n", n), np.uint8)
        self._fill(block, out)
        return out.tobytes()

    def uint64(self, block: int, size: int) -> npt.NDArray[np.uint64]:
        """Return the first ``size`` 64-bit words of ``block``, each uniform.

        >>> SecureStream(seed_key(0), "a").uint64(0, 3).shape
        (3,)
        """
        out = np.empty(_size("size", size), "<u8")
        self._fill(block, out.view(np.uint8))
        return out.astype(np.uint64, copy=False)

    def at(self, block: int, counters: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Return one 64-bit word for each of the 64-bit ``counters``: a keyed function of (block, counter).

        Counter mode is AES of (block, counter), so this reads the first half of each 16-byte piece of the
        block: ``at(b, [0, 1]) == uint64(b, 4)[::2]``. Sampling by record id rests on it.

        >>> stream = SecureStream(seed_key(0), "a")
        >>> bool((stream.at(5, [0, 1]) == stream.uint64(5, 4)[::2]).all())
        True
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

    def normal(self, block: int, shape: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Return independent N(0, 1) numbers by inversion: no rejection whose duration would tell their size.

        Each takes one 64-bit word: one bit is the sign, the other 63 are k, and the number is ±Φ⁻¹(p) with
        p = (k + ½)·2⁻⁶⁴ in (0, ½), the lower tail, where floats keep p to full relative precision. Of 64
        bits alone the far tail would be porous: beyond 7.6 the possible outputs are further apart than the
        grid they are rounded to, and with 10⁸ draws a hole would be met. So for k < 2⁴⁸ (one draw in
        32768) a second word continues k, and outputs reach 13.

        What is left is float64 rounding. It moves an output by e ≤ 10⁻¹⁵(|x| + ⅕), hence the edges of the
        grid's cells: with σ = s < 2²¹ units (:mod:`quietgrad.privacy.noise`) a cell's probability is off by
        a *factor* within 1 ± η, η = 2e·s ≤ 4.2·10⁻⁹(|x| + ⅕). The factors' logarithms have mean at most η²
        and add up as independent terms do: N numbers cost at most about 5·10⁻⁹·√(2N ln(1/δ')) in ε, except
        with probability δ'. For N = 5·10⁷ and δ' = 10⁻¹² that is 3·10⁻⁴, in the worst case.

        >>> x = SecureStream(seed_key(0), "noise").normal(0, (1000, 3))
        >>> x.shape, bool(abs(x.std() - 1) < 0.1)
        ((1000, 3), True)
        """
        out = np.empty(shape, np.float64)
        for _ in self._normals(block, out.reshape(-1), out.size):
            pass
        return out

    def normal_pieces(self, block: int, size: int) -> Iterator[tuple[slice, npt.NDArray[np.float64]]]:
        """The numbers of ``normal(block, size)`` and where they belong, in memory that the next piece overwrites.

        For vectors as long as a network's, which would otherwise be written out only to be read once.

        >>> stream = SecureStream(seed_key(0), "noise")
        >>> again = np.concatenate([piece.copy() for _, piece in stream.normal_pieces(3, 40000)])
        >>> bool((again == stream.normal(3, 40000)).all())
        True
        """
        return self._normals(block, np.empty(min(_CHUNK, _size("size", size))), size)

    def _normals(
        self, block: int, memory: npt.NDArray[np.float64], size: int
    ) -> Iterator[tuple[slice, npt.NDArray[np.float64]]]:
        """A piece at a time, one after the other in ``memory``, or each at its beginning if there is no more."""
        invert = _inversion(size)
        words = np.empty(min(_CHUNK, size), "<u8")
        sign = np.empty(words.size, np.uint64)
        stream = self._open(block)
        for start in range(0, size, _CHUNK):
            where = slice(start, min(start + _CHUNK, size))
            x = memory[where] if memory.size == size else memory[: where.stop - start]
            u, s = words[: x.size], sign[: x.size]
            stream.update_into(_ZEROS[: 8 * x.size], u.view(np.uint8).data)
            np.left_shift(u, 63, out=s)
            np.right_shift(u, 1, out=u)
            np.add(u.view("<i8"), 0.5, out=x)  # signed: its conversion to float is the fast one
            coarse = np.flatnonzero(u < _COARSE)
            if coarse.size:
                more = self.at(block, coarse.astype(np.uint64) + np.uint64(_UPPER + start))
                x[coarse] = u[coarse] + (more + 0.5) * 2.0**-64
            x *= 2.0**-64
            invert(x)
            bits = x.view(np.uint64)
            bits ^= s
            yield where, x

    def exponential(self, block: int, size: int) -> npt.NDArray[np.float64]:
        """Return independent Exp(1) numbers, both tails to full relative precision.

        One bit chooses the half, 63 bits give p in (0, ½): −ln p in the upper half, −ln(1 − p) in the lower.

        >>> bool((SecureStream(seed_key(0), "a").exponential(0, 1000) > 0).all())
        True
        """
        u = self.uint64(block, size)
        p = ((u >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
        upper = (u & np.uint64(1)).astype(bool)
        return np.where(upper, -np.log(p), -np.log1p(-p))

    def _open(self, block: int) -> CipherContext:
        nonce = _block(block).to_bytes(8, "big") + bytes(8)
        return Cipher(self._aes, modes.CTR(nonce)).encryptor()

    def _fill(self, block: int, out: npt.NDArray[np.uint8]) -> None:
        stream = self._open(block)
        for start in range(0, out.size, len(_ZEROS)):
            piece = out[start : start + len(_ZEROS)]
            stream.update_into(_ZEROS[: piece.size], piece.data)


def inversion_table(weights: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the thresholds by which a uniform 64-bit word chooses k with probability ∝ ``weights[k]``.

    ``np.searchsorted(table, word, side="right")`` is then k. The arithmetic is exact; each probability is
    right to 2⁻⁶⁴, so the total variation is at most len(weights)·2⁻⁶⁵.

    >>> inversion_table([1, 2, 1]).tolist() == [2**62, 3 * 2**62]
    True
    """
    total, below, thresholds = sum(weights), 0, []
    for weight in weights[:-1]:
        below += weight
        # A threshold of 2^64 (nothing left above it) does not fit a word; one less moves 2^-64 of mass.
        thresholds.append(min((below << 64) // total, _BLOCKS - 1))
    return np.array(thresholds, np.uint64)


def _inversion(size: int) -> Callable[[npt.NDArray[np.float64]], object]:
    """Φ⁻¹ in place. Both have the same bits; to load the compiled one is not worth it for a few numbers."""
    if size < _CHUNK:
        from scipy.special import ndtri

        return lambda p: ndtri(p, out=p)
    from quietgrad.privacy.inversion import lower_quantiles

    return lower_quantiles


def _block(block: int) -> int:
    if not 0 <= block < _BLOCKS:
        raise ValueError(f"block={block!r}: must be a whole number in [0, 2^64).")
    return int(block)


def _size(name: str, size: int) -> int:
    if size < 0:
        raise ValueError(f"{name}={size!r}: must be ≥ 0.")
    return int(size)
