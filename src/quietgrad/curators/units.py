"""Unit normals for rounds, made many rounds at a time: one call into the stream costs more than a short vector."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream

_BLOCK_NUMBERS = 2**16  # large enough to amortise a call, small enough for the cache
_NOTHING: tuple[int, npt.NDArray[np.float64]] = (0, np.empty((0, 0)))


class UnitNoise:
    """N(0, 1) numbers addressed by round and length; a round serves one draw only.

    Args:
        key, label: of the stream they come from.
        rounds: how many there can be, if that is known: a short run draws no more.

    >>> from quietgrad.privacy.rng import seed_key
    >>> noise = UnitNoise(seed_key(0), "noise")
    >>> noise.row(3, 5).tolist() == noise.row(3, 5).tolist(), noise.row(3, 5).tolist() == noise.row(4, 5).tolist()
    (True, False)
    """

    def __init__(self, key: bytes, label: str, rounds: int = _BLOCK_NUMBERS) -> None:
        self._key, self._label, self._rounds = key, label, rounds
        self._kept: dict[
            int, tuple[int, npt.NDArray[np.float64]]
        ] = {}  # by length: first round, its and later rows

    def row(self, t: int, dim: int) -> npt.NDArray[np.float64]:
        """The numbers of round ``t``; lengths do not share words of a stream."""
        first, rows = self._kept.get(dim, _NOTHING)
        if not 0 <= t - first < len(rows):
            first, rows = self._kept[dim] = self._block(t, dim)
        units: npt.NDArray[np.float64] = rows[t - first]
        return units

    def _block(self, t: int, dim: int) -> tuple[int, npt.NDArray[np.float64]]:
        size = max(1, min(_BLOCK_NUMBERS // max(dim, 1), self._rounds))
        number = t // size
        return number * size, SecureStream(self._key, f"{self._label}/{dim}").normal(number, (size, dim))
