"""Samplers: the secret side of sampling, from a keyed stream to record positions.

Batch i depends on the key and on i alone, so a resumed run draws the batches it would have drawn. Batches are
drawn a few hundred at a time; asking for one is then a look-up. A sampler belongs to one thread.

Samplers for tables beyond memory keep only the stream's key: the part of row r in a release is a keyed function of
r. A billion rows cost no memory, and the sample does not depend on how many threads or machines read the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import BudgetError, ExhaustedError
from quietgrad.core.noise.rng import SecureStream, inversion_table

Indices = npt.NDArray[np.int64]

_MOST_RECORDS = 2**31 - 1  # positions and batch numbers share a 64-bit word in the kernel
_MOST_AHEAD = 256  # batches drawn at a time
_WORDS_AHEAD = 1 << 16  # and about this many records, half a megabyte
_FRACTION_BITS = 192
_TAIL_BITS = 72
_STRETCH = 1 << 18  # rows of a table beyond memory that are looked at together


class Sampler(Protocol):
    """Draws the batch of each release; what it returns is secret."""

    def batch(self, i: int) -> Indices | None:
        """Return the record positions of release ``i``; ``None`` means all records."""
        ...


class Everyone:
    """Every batch is all records."""

    def batch(self, i: int) -> Indices | None:
        return None


def binomial_table(n: int, rate: float) -> tuple[int, npt.NDArray[np.uint64]]:
    """Return the law of Binomial(n, rate): its lowest value and the thresholds of :func:`inversion_table`.

    By exact integer recurrence from the mode. Sizes rarer than 2⁻⁷² of the mode's are left out and each probability
    is right to 2⁻⁶⁴: for n = 10⁶ and rate 0.01 the total variation is below 10⁻¹⁵.

    >>> lowest, thresholds = binomial_table(2, 0.5)
    >>> lowest, (thresholds / 2.0**64).tolist()
    (0, [0.25, 0.75])
    """
    _check_records(n)
    hit, out_of = rate.as_integer_ratio()
    miss = out_of - hit
    mode = min(n, (n + 1) * hit // out_of)
    cut = _FRACTION_BITS - _TAIL_BITS
    above, below = [1 << _FRACTION_BITS], [1 << _FRACTION_BITS]
    for k in range(mode, n):
        above.append(above[-1] * (n - k) * hit // ((k + 1) * miss))
        if not above[-1] >> cut:
            break
    for k in range(mode, 0, -1):
        below.append(below[-1] * k * miss // ((n - k + 1) * hit))
        if not below[-1] >> cut:
            break
    return mode - len(below) + 1, inversion_table(below[:0:-1] + above)


class SubsetSampler:
    """Uniformly random subsets of n records, of a fixed size or of sizes drawn from a table.

    A binomial size followed by a uniformly random subset of that size is exactly Poisson sampling.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> sampler = SubsetSampler(100, 5, SecureStream(seed_key(0), "batches"))
    >>> len(set(sampler.batch(7).tolist())), sampler.batch(7).tolist() == sampler.batch(7).tolist()
    (5, True)
    """

    def __init__(
        self,
        n_records: int,
        expected: float,
        stream: SecureStream,
        sizes: tuple[int, npt.NDArray[np.uint64]] | None = None,
    ) -> None:
        from quietgrad.core.compiled import draw_subsets

        _check_records(n_records)
        self._draw_subsets = draw_subsets
        self._n = n_records
        self._ahead = max(1, min(_MOST_AHEAD, _WORDS_AHEAD // math.ceil(max(1.0, expected))))
        self._expected = expected
        self._sizes = sizes
        self._stream = stream
        self._first = 0
        self._batches: list[Indices] = []

    def batch(self, i: int) -> Indices:
        """Return the record positions of release ``i`` (read-only; possibly none)."""
        row = i - self._first
        if not 0 <= row < len(self._batches):
            block, row = divmod(i, self._ahead)
            self._batches = self._draw(block)
            self._first = block * self._ahead
        return self._batches[row]

    def _draw(self, block: int) -> list[Indices]:
        starts = np.zeros(self._ahead + 1, np.int64)
        if self._sizes is None:
            starts[1:] = int(self._expected)
        else:
            lowest, thresholds = self._sizes
            drawn = self._stream.uint64(2 * block, self._ahead)
            starts[1:] = lowest + np.searchsorted(thresholds, drawn, side="right")
        np.cumsum(starts, out=starts)
        words = self._stream.uint64(2 * block + 1, int(starts[-1]))
        records = np.empty(words.size, np.int64)  # new memory: batches handed out earlier stay as they are
        self._draw_subsets(words, starts, self._n, records)
        records.flags.writeable = False
        if self._sizes is None:
            return list(records.reshape(self._ahead, -1))
        return [records[first:last] for first, last in pairwise(starts.tolist())]


def permuted_slots(n: int, stream: SecureStream) -> Indices:
    """Return a secret permutation of n slots: the slot of each record.

    Random words are sorted, so every order is as likely as any other. For records that keep their places parallel
    composition would hold for any assignment. But people are numbered by their first records, so that other
    people's records move them, and only a law that does not know numbers is the same for both tables.
    """
    _check_records(n)
    slots = np.empty(n, np.int64)
    slots[np.argsort(stream.uint64(0, n), kind="stable")] = np.arange(n)
    return slots


def hashed_slots(record_ids: npt.ArrayLike, n: int, stream: SecureStream, block: int = 0) -> Indices:
    """Return for each record a slot of n, drawn on its own by a keyed hash of its id, anew for each ``block``.

    Removing a record leaves the law of all other slots as it was, which a permutation would not. (That is so
    for any distinct ids, positions included, because the slots are independent of each other.)
    """
    return _scaled(stream.at(block, record_ids), n)


def _scaled(word: npt.NDArray[np.uint64], n: int) -> Indices:
    """⌊word·n / 2⁶⁴⌋: uniform words become uniform slots, each with a probability of 1/n to a factor 1 ± n·2⁻⁶⁴."""
    _check_records(n)
    high, low, m = word >> np.uint64(32), word & np.uint64(0xFFFFFFFF), np.uint64(n)
    return ((high * m + ((low * m) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


class CohortSampler:
    """Cohorts in turn: batch i is all of cohort i mod b.

    >>> sampler = CohortSampler(np.array([1, 0, 1]), 2)
    >>> sampler.batch(0).tolist(), sampler.batch(3).tolist()
    ([1], [0, 2])
    """

    def __init__(self, cohort_of: Indices, cohorts: int) -> None:
        order = np.argsort(cohort_of, kind="stable")
        edges = np.searchsorted(cohort_of[order], np.arange(cohorts + 1))
        self._members = [order[first:last] for first, last in pairwise(edges.tolist())]

    def batch(self, i: int) -> Indices:
        return self._members[i % len(self._members)]


class AllocationSampler:
    """Epochs of random allocation: batch i is all records that drew step i mod T in epoch ⌊i/T⌋.

    Epoch e has block e of the stream, one word for each record, whatever its content. Removing a record leaves the
    law of all others' draws as it was.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> sampler = AllocationSampler(1000, 4, SecureStream(seed_key(0), "batches"))
    >>> epoch = [sampler.batch(i) for i in range(4, 8)]
    >>> sorted(np.concatenate(epoch).tolist()) == list(range(1000))
    True
    """

    def __init__(self, n_records: int, steps: int, stream: SecureStream) -> None:
        _check_records(n_records)
        self._n, self._steps, self._stream = n_records, steps, stream
        self._epoch = -1
        self._turns: CohortSampler

    def batch(self, i: int) -> Indices:
        epoch = i // self._steps
        if epoch != self._epoch:
            self._turns = CohortSampler(_scaled(self._stream.uint64(epoch, self._n), self._steps), self._steps)
            self._epoch = epoch
        return self._turns.batch(i)


def drawn(words: npt.NDArray[np.uint64], rate: float) -> npt.NDArray[np.bool_]:
    """Return which uniform words draw their record: each with probability ``rate``, rounded down to 2⁻⁶⁴."""
    threshold = int(rate * 2.0**64)  # exact
    return words < np.uint64(threshold) if threshold < 2**64 else np.ones(words.shape, bool)


class BernoulliSubsampler:
    """Thin the batches of another sampler by a coin: record r stays in release i by a keyed function.

    Cohorts are read from block 0 of the stream; release i has block i + 1.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> whole = CohortSampler(np.zeros(1000, np.int64), 1)
    >>> sampler = BernoulliSubsampler(whole, 0.1, SecureStream(seed_key(0), "batches"))
    >>> 50 < len(sampler.batch(3)) < 150, sampler.batch(3).tolist() == sampler.batch(4).tolist()
    (True, False)
    """

    def __init__(self, turns: Sampler, rate: float, stream: SecureStream) -> None:
        self._turns, self._rate, self._stream = turns, rate, stream

    def batch(self, i: int) -> Indices:
        members = self._turns.batch(i)
        assert members is not None, "cohorts are lists of records"
        return members[drawn(self._stream.at(i + 1, members), self._rate)]


class SlotSampler:
    """Slots handed out in order, each once; refuses when there are not enough left.

    >>> sampler = SlotSampler(np.array([2, 0, 1]), n_slots=3)
    >>> sampler.take(2).tolist(), sampler.left
    ([1, 2], 1)
    """

    def __init__(self, slots: Indices, n_slots: int, batch_size: int = 1) -> None:
        self._n_slots, self._batch_size = n_slots, batch_size
        self.position = 0
        if len(slots) == n_slots and np.bincount(slots, minlength=n_slots).max() == 1:
            self._slots = np.arange(n_slots)  # a permutation is inverted, which is much quicker than sorted
            self._by_slot = np.empty(n_slots, np.int64)
            self._by_slot[slots] = self._slots
        else:
            self._by_slot = np.argsort(slots, kind="stable")
            self._slots = slots[self._by_slot]

    def _between(self, first: int, last: int) -> Indices:
        """The records of slots first … last − 1."""
        start, end = np.searchsorted(self._slots, (first, last))
        return self._by_slot[start:end]

    @property
    def left(self) -> int:
        """The number of slots not handed out yet."""
        return self._n_slots - self.position

    def take(self, count: int) -> Indices:
        """Return the records of the next ``count`` slots, or raise :class:`ExhaustedError`, taking none."""
        if count < 1:
            raise ValueError(f"count={count!r}: must be ≥ 1.")
        if count > self.left:
            raise ExhaustedError(
                f"{count} fresh records asked for, {self.left} of {self._n_slots} left: every record may be used "
                "once. Stop here, or plan fewer or smaller batches."
            )
        self.position += count
        return self._between(self.position - count, self.position)

    def batch(self, i: int) -> Indices:
        """Return the records of slots i·b … (i+1)·b − 1; slots before them are given up, never used again."""
        self.skip_to(i * self._batch_size)
        return self.take(self._batch_size)

    def skip_to(self, position: int) -> None:
        """Continue at slot ``position``, for a resumed run; going back is refused."""
        if position < self.position:
            raise BudgetError(
                f"slot {position} was already handed out (now at {self.position}): a record may be used once."
            )
        self.position = position


def _check_records(n: int) -> None:
    if not 0 <= n <= _MOST_RECORDS:
        raise ValueError(f"{n} records: must be between 0 and 2^31 − 1.")


class RowScan:
    """Batches of rows that are not listed: row r is in release i if the keyed function ``holds(i, [r])`` is true.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> stream = SecureStream(seed_key(0), "batches")
    >>> sampler = RowScan(100, lambda i, rows: hashed_slots(rows, 3, stream) == i)
    >>> sorted(np.concatenate([sampler.batch(i) for i in range(3)]).tolist()) == list(range(100))
    True
    """

    def __init__(self, n_records: int, holds: Callable[[int, Indices], npt.NDArray[np.bool_]]) -> None:
        self._n, self._holds = n_records, holds

    def batch(self, i: int) -> Indices:
        taken = [np.zeros(0, np.int64)]
        for start in range(0, self._n, _STRETCH):
            rows = np.arange(start, min(start + _STRETCH, self._n), dtype=np.int64)
            taken.append(rows[self._holds(i, rows)])
        return np.concatenate(taken)


class SinglePassScan(SlotSampler):
    """Slots of rows that are not listed: a row's slot is a keyed hash of its number.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> sampler = SinglePassScan(100, 100, 50, SecureStream(seed_key(0), "fresh"))
    >>> sorted([*sampler.take(50), *sampler.take(50)]) == list(range(100)), sampler.left
    (True, 0)
    """

    def __init__(self, n_records: int, n_slots: int, batch_size: int, stream: SecureStream) -> None:
        super().__init__(np.zeros(0, np.int64), n_slots, batch_size)
        self._n, self._stream = n_records, stream

    def _between(self, first: int, last: int) -> Indices:
        def between(_: int, rows: Indices) -> npt.NDArray[np.bool_]:
            slots = hashed_slots(rows, self._n_slots, self._stream)
            return (slots >= first) & (slots < last)

        return RowScan(self._n, between).batch(0)
