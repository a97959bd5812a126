"""Samplers for tables beyond memory: row r's part in a release is a keyed function of r, looked up as it is needed.

Nothing is kept of the rows but the stream's key, so a billion of them cost no memory, and the sample is the same
whatever number of threads or machines read the table. All of them go through the rows' numbers a stretch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream
from quietgrad.sampling.samplers import Indices, Slots, hashed_slots

_STRETCH = 1 << 18


def _chosen(n: int, wanted: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]) -> Indices:
    found = [rows[wanted(rows)] for rows in _stretches(n)]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _stretches(n: int) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, n, _STRETCH):
        yield np.arange(start, min(start + _STRETCH, n), dtype=np.int64)


class PoissonScan:
    """Poisson batches: row r is in batch i if a keyed function of (i, r) says so.

    >>> from quietgrad.privacy.rng import seed_key
    >>> sampler = PoissonScan(1000, 0.1, SecureStream(seed_key(0), "batches"))
    >>> 50 < len(sampler.batch(3)) < 150, sampler.batch(3).tolist() == sampler.batch(3).tolist()
    (True, True)
    """

    def __init__(self, n_records: int, rate: float, stream: SecureStream) -> None:
        self._n, self._stream = n_records, stream
        self._threshold = np.uint64(int(rate * 2.0**64))  # exact; P(word < threshold) is the rate to 2⁻⁶⁴

    def batch(self, i: int) -> Indices:
        """Return the rows of release ``i``, in increasing order (possibly none)."""
        return _chosen(self._n, lambda rows: self._stream.at(i, rows) < self._threshold)


class CohortScan:
    """Cohorts in turn, a row's by a keyed hash of its number: batch i is everybody of cohort i mod b."""

    def __init__(self, n_records: int, cohorts: int, stream: SecureStream) -> None:
        self._n, self._cohorts, self._stream = n_records, cohorts, stream

    def batch(self, i: int) -> Indices:
        """Return the rows of release ``i`` (possibly none)."""
        turn = i % self._cohorts
        return _chosen(self._n, lambda rows: hashed_slots(rows, self._cohorts, self._stream) == turn)


class SlotScan(Slots):
    """Slots of rows that are not listed: a row's slot is a keyed hash of its number.

    >>> from quietgrad.privacy.rng import seed_key
    >>> sampler = SlotScan(100, 100, 50, SecureStream(seed_key(0), "fresh"))
    >>> sorted([*sampler.take(50), *sampler.take(50)]) == list(range(100)), sampler.left
    (True, 0)
    """

    def __init__(self, n_records: int, n_slots: int, batch_size: int, stream: SecureStream) -> None:
        super().__init__(n_slots, batch_size)
        self._n, self._stream = n_records, stream

    def _between(self, first: int, last: int) -> Indices:
        def wanted(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
            slots = hashed_slots(rows, self._n_slots, self._stream)
            return (slots >= first) & (slots < last)

        return _chosen(self._n, wanted)
