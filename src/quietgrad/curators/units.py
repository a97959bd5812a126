"""Unit normals for rounds, made many rounds at a time: one call into the stream costs more than a short vector."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream

_BLOCK_NUMBERS = 2**16


class UnitNoise:
    """N(0, 1) numbers addressed by round and length; a round serves one draw only.

    >>> from quietgrad.privacy.rng import seed_key
    >>> noise = UnitNoise(seed_key(0), "noise")
    >>> noise.row(3, 5).tolist() == noise.row(3, 5).tolist(), noise.row(3, 5).tolist() == noise.row(4, 5).tolist()
    (True, False)
    """

    def __init__(self, key: bytes, label: str) -> None:
        self._key, self._label = key, label
        self._streams: dict[int, SecureStream] = {}
        self._kept: dict[int, tuple[int, npt.NDArray[np.float64]]] = {}

    def row(self, t: int, dim: int) -> npt.NDArray[np.float64]:
        """The numbers of round ``t``; lengths do not share words of a stream."""
        rows = max(1, _BLOCK_NUMBERS // dim)
        number, place = divmod(t, rows)
        kept = self._kept.get(dim)
        if kept is None or kept[0] != number:
            if dim not in self._streams:
                self._streams[dim] = SecureStream(self._key, f"{self._label}/{dim}")
            kept = number, self._streams[dim].normal(number, (rows, dim))
            self._kept[dim] = kept
        units: npt.NDArray[np.float64] = kept[1][place]
        return units
