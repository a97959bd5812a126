"""Schemes in which every record may be in every batch, or in one: all records, secret samples, single passes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.sampling.base import (
    Indices,
    Sampler,
    Sampling,
    batch_of,
    check_batch,
    check_count,
    proportional_shares,
)

if TYPE_CHECKING:
    from quietgrad.privacy.rng import SecureStream
    from quietgrad.sampling.samplers import KeyedPoissonSampler, SlotSampler


@dataclass(frozen=True)
class FullBatch(Sampling, kind="full"):
    """Every record takes part in every release; nothing is amplified.

    >>> FullBatch().event(events.Gaussian(2.0), steps=3)
    Repeated(inner=Gaussian(noise_multiplier=2.0), count=3)
    """

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> FullBatch:
        return cls()

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return ``inner``, ``steps`` times."""
        return events.repeated(inner, steps)

    def expected_batch(self, n_public: int) -> float:
        return float(n_public)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler whose every batch is ``None``, all records."""
        return _Everyone()

    def describe(self) -> str:
        return "full batch: every record in every release"


@dataclass(frozen=True)
class Poisson(Sampling, kind="poisson"):
    """Every record enters each batch independently with probability ``rate``.

    The rate is chosen without looking at the number of records (under add-remove that number is private):
    rate = wanted batch ÷ declared n_public.

    >>> Poisson(0.01).event(events.Gaussian(1.1), steps=100)
    Repeated(inner=PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1)), count=100)
    >>> Poisson(1.5)
    Traceback (most recent call last):
    ...
    ValueError: rate=1.5: must be in (0, 1]; it is the expected batch ÷ n.
    """

    rate: float

    def __post_init__(self) -> None:
        if not isinstance(self.rate, (int, float)) or not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate={self.rate!r}: must be in (0, 1]; it is the expected batch ÷ n.")

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> Poisson:
        return cls(batch_of(n_public, batch_size) / n_public)

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return ``steps`` Poisson-sampled ``inner``; a rate of 1 samples nothing."""
        one = inner if self.rate == 1.0 else events.PoissonSampled(self.rate, inner)
        return events.repeated(one, steps)

    def expected_batch(self, n_public: int) -> float:
        return self.rate * n_public

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that draws the batch's size, then a subset of that size."""
        from quietgrad.sampling.samplers import SubsetSampler, binomial_table

        if self.rate == 1.0:
            return _Everyone()
        return SubsetSampler(n_records, self.rate * n_records, stream, binomial_table(n_records, self.rate))

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that decides row by row, by a keyed function of the row's number."""
        from quietgrad.sampling.samplers import PoissonScan

        return _Everyone() if self.rate == 1.0 else PoissonScan(n_records, self.rate, stream)

    @property
    def probability(self) -> float:
        return self.rate

    def known_to(self, parties: int) -> Poisson:
        """Return the rate at which anything of a person known to k parties is drawn: 1 − (1 − q)ᵏ.

        Given who else is drawn, what k independent draws add is a mixture of shifts of at most k·C, the empty one
        with probability (1 − q)ᵏ. Against no shift, the divergence of such a mixture of Gaussians grows with every
        shift, so it is at most that of one draw of k·C at this rate; the noise is priced for k·C.
        """
        if parties == 1 or self.rate == 1.0:
            return self
        return Poisson(min(1.0, -math.expm1(parties * math.log1p(-self.rate))))

    def by_id(self, record_ids: npt.ArrayLike, stream: SecureStream) -> KeyedPoissonSampler:
        """Return a sampler that decides by record id, so that any split of the records gives the same union.

        It looks at every record in every release: slower, for data that several curators hold.

        >>> from quietgrad.privacy.rng import SecureStream, seed_key
        >>> stream = SecureStream(seed_key(0), "batches")
        >>> whole = Poisson(0.5).by_id([10, 11, 12, 13], stream).batch(0)
        >>> first, second = (Poisson(0.5).by_id(ids, stream).batch(0) for ids in ([10, 11], [12, 13]))
        >>> whole.tolist() == [*first, *(second + 2)]
        True
        """
        from quietgrad.sampling.samplers import KeyedPoissonSampler

        return KeyedPoissonSampler(record_ids, self.rate, stream)

    def describe(self) -> str:
        return f"Poisson sampling: each record enters a batch with probability {self.rate:g}"


@dataclass(frozen=True)
class RandomAllocation(Sampling, kind="random-allocation"):
    """An epoch as people write it: every record draws one of ``steps_per_epoch`` releases, anew for each epoch.

    Draws are secret, uniform and each record's own, so that batches have random sizes. Batches of a fixed size, or
    a known order, have no such proof (:mod:`quietgrad.privacy.random_allocation`).
    An epoch that was begun is paid for whole. Under replace-one no price is known.

    >>> RandomAllocation(100).event(events.Gaussian(1.1), steps=200)
    Repeated(inner=AllocationSampled(steps_per_epoch=100, inner=Gaussian(noise_multiplier=1.1)), count=2)
    """

    steps_per_epoch: int
    only_central: ClassVar[str] = (
        "sampling='random-allocation': is for one curator, who draws every record's step of an epoch; "
        "parties draw Poisson samples, by sampling='poisson'."
    )

    def __post_init__(self) -> None:
        check_count("steps_per_epoch", self.steps_per_epoch)

    @property
    def probability(self) -> float:
        return 1.0 / self.steps_per_epoch

    @property
    def by_place(self) -> bool:
        """Always: a record's step of an epoch is looked up by its place."""
        return True

    def check_whole(self, count: int) -> None:
        """Raise ValueError if a run would end within an epoch, which is paid for whole."""
        epoch, (whole, rest) = self.steps_per_epoch, divmod(count, self.steps_per_epoch)
        if rest:
            nearest = " or ".join(str(epochs * epoch) for epochs in (whole, whole + 1) if epochs)
            raise ValueError(
                f"{count} steps: random allocation runs whole epochs, here of {epoch} steps (n ÷ batch_size). "
                f"Plan {nearest} steps."
            )

    def times(self, count: int) -> int:
        """Return the number of epochs, one that was begun among them."""
        return -(-count // self.steps_per_epoch)

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> RandomAllocation:
        """Return epochs of as many steps as a loader of such batches has, ⌈n ÷ batch_size⌉."""
        return cls(-(-n_public // batch_of(n_public, batch_size)))

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return the epochs of ``steps`` releases; an epoch of one release samples nothing."""
        one = inner if self.steps_per_epoch == 1 else events.AllocationSampled(self.steps_per_epoch, inner)
        return events.repeated(one, self.times(steps))

    def expected_batch(self, n_public: int) -> float:
        return n_public / self.steps_per_epoch

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that draws all records' releases of an epoch at once."""
        from quietgrad.sampling.samplers import AllocationSampler

        return (
            _Everyone() if self.steps_per_epoch == 1 else AllocationSampler(n_records, self.steps_per_epoch, stream)
        )

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that looks a row's release up by a keyed function of the epoch and the row's number."""
        from quietgrad.sampling.samplers import AllocationScan

        return _Everyone() if self.steps_per_epoch == 1 else AllocationScan(n_records, self.steps_per_epoch, stream)

    def describe(self) -> str:
        return f"random allocation: each record in one secret step of every epoch of {self.steps_per_epoch} steps"


@dataclass(frozen=True)
class FixedSize(Sampling, kind="fixed-size"):
    """``batch_size`` of ``n`` records without replacement, afresh for every release; n is public.

    >>> FixedSize(1000, 10).event(events.Gaussian(3.0))
    FixedSizeSampled(n=1000, batch_size=10, inner=Gaussian(noise_multiplier=3.0))
    """

    n: int
    batch_size: int
    counts_exactly: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_batch(self.n, self.batch_size)

    @property
    def probability(self) -> float:
        return self.batch_size / self.n

    def sized(self, n: int) -> FixedSize:
        """Return the same batches of ``n`` records."""
        return dataclasses.replace(self, n=n)

    def local_batches(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return batches proportional to ``sizes`` that sum to ``batch_size``; small parties may get 0."""
        return proportional_shares(self.batch_size, sizes)

    def at_party(self, sizes: tuple[int, ...], party: int) -> FixedSize | None:
        """Return the party's own fixed batches."""
        batch = self.local_batches(sizes)[party]
        return FixedSize(sizes[party], batch) if batch else None

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> FixedSize:
        return cls(n_public, batch_of(n_public, batch_size))

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return ``steps`` releases of ``inner`` on fixed-size batches; a batch of n samples nothing."""
        one = inner if self.batch_size == self.n else events.FixedSizeSampled(self.n, self.batch_size, inner)
        return events.repeated(one, steps)

    def expected_batch(self, n_public: int) -> float:
        return float(self.batch_size)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler by partial Fisher–Yates."""
        from quietgrad.sampling.samplers import SubsetSampler

        if n_records != self.n:
            raise ValueError(f"{n_records} records: FixedSize was declared for n={self.n}. Declare the true n.")
        return SubsetSampler(n_records, self.batch_size, stream)

    def describe(self) -> str:
        return f"fixed batches: {self.batch_size} of {self.n} records without replacement"


@dataclass(frozen=True)
class SinglePass(Sampling, kind="single-pass"):
    """Fresh records for every release: ``n`` slots, each used at most once, then a refusal.

    Before the run every record is given a slot, in secret and whatever its content. Under replace-one the
    slots are a permutation of the n records (n is public). Under add-remove a permutation would move when a
    record is removed, so each record draws its slot on its own, by a keyed hash of its id; taking k of n
    slots then yields about k records. Either way a record takes part in one release only, so a whole run
    costs as much as its dearest release, adaptively too: parallel composition. ``batch_size`` is the number
    of slots of ``batch(i)``; oracles that need varying numbers use ``take``. All single-pass slots of one
    plan are served from the same n slots.

    >>> SinglePass(1000).event(events.Gaussian(2.0), steps=50)
    Parallel(parts=(Gaussian(noise_multiplier=2.0),))
    """

    n: int
    batch_size: int = 1
    relation: Relation = Relation.REPLACE_ONE

    def __post_init__(self) -> None:
        check_batch(self.n, self.batch_size)
        object.__setattr__(self, "relation", Relation.parse(self.relation))

    @property
    def fresh(self) -> int:
        return self.batch_size

    @property
    def pass_size(self) -> int:
        return self.n

    @property
    def probability(self) -> float:
        return self.batch_size / self.n

    def sized(self, n: int) -> SinglePass:
        """Return a pass over ``n`` records."""
        return dataclasses.replace(self, n=n)

    def check_count(self, count: int) -> None:
        """Raise ValueError if there are not records enough."""
        if count * self.batch_size > self.n:
            raise ValueError(
                f"{count} steps of {self.batch_size} fresh records are more than n={self.n}: in a single pass "
                f"every record is used once. Plan {self.n // self.batch_size} steps, or smaller batches."
            )

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> SinglePass:
        return cls(n_public, batch_of(n_public, batch_size))

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return ``inner`` once, on disjoint records, however many ``steps`` share them."""
        return events.Parallel((inner,))

    def expected_batch(self, n_public: int) -> float:
        return float(self.batch_size)

    def sampler(self, n_records: int, stream: SecureStream) -> SlotSampler:
        """Return the sampler that hands out slots in order and refuses when they are used up."""
        from quietgrad.sampling.samplers import SlotSampler, hashed_slots, permuted_slots

        if self.relation is Relation.ADD_REMOVE:
            return SlotSampler(hashed_slots(np.arange(n_records), self.n, stream), self.n, self.batch_size)
        if n_records != self.n:
            raise ValueError(f"{n_records} records: SinglePass was declared for n={self.n}. Declare the true n.")
        return SlotSampler(permuted_slots(self.n, stream), self.n, self.batch_size)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler whose records draw their slots each on its own, under either relation.

        Under replace-one that is as sound as a permutation: a slot goes by the record's place, whatever it holds.
        """
        from quietgrad.sampling.samplers import SinglePassScan

        if self.relation is Relation.REPLACE_ONE and n_records != self.n:
            raise ValueError(f"{n_records} records: SinglePass was declared for n={self.n}. Declare the true n.")
        return SinglePassScan(n_records, self.n, self.batch_size, stream)

    def participation(self, count: int) -> tuple[int, int]:
        """Return (1, ``count``): once."""
        return 1, count

    def under(self, relation: Relation) -> SinglePass:
        """Return the same pass with slots by permutation (replace-one) or by hash (add-remove)."""
        return dataclasses.replace(self, relation=relation)

    def describe(self) -> str:
        return f"single pass: {self.n} slots, {self.batch_size} per batch, no record twice ({self.relation})"


class _Everyone:
    def batch(self, i: int) -> Indices | None:
        return None
