"""Sampling schemes: all records, secret samples, single passes, and cohorts that take turns."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.rng import SecureStream
from quietgrad.sampling.samplers import (
    AllocationSampler,
    BernoulliSubsampler,
    CohortSampler,
    Everyone,
    KeyedPoissonSampler,
    RowScan,
    Sampler,
    SlotSampler,
    SlotScan,
    SubsetSampler,
    binomial_table,
    hashed_slots,
    permuted_slots,
)

if TYPE_CHECKING:
    from quietgrad.privacy.banded import BandedToeplitzNoise
    from quietgrad.privacy.correlated import CorrelatedNoise

KINDS: dict[str, type[Sampling]] = {}


class Sampling(ABC):
    """Base of all sampling schemes; a frozen value that can be written as JSON and read back.

    Other rooms ask a scheme by its methods, never for its class: a new scheme is one class here and its sampler.
    """

    kind: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]] = ()  # of a dataclass: its fields
    in_turns: ClassVar[bool] = False
    """Whether cohorts of records take turns."""
    counts_exactly: ClassVar[bool] = False
    """Whether batches are drawn of an exact, public number of records."""
    only_central: ClassVar[str] = ""
    """Why parties cannot draw such samples together; empty if they can."""

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        KINDS[kind] = cls

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> Sampling:
        """Return the scheme for batches of about ``batch_size`` of ``n_public`` records, in turns of cohorts."""
        raise TypeError(f"{cls.kind}: is not made from the size of a batch.")

    @abstractmethod
    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return the event of ``steps`` releases, each ``inner`` on a fresh batch."""

    @abstractmethod
    def expected_batch(self, n_public: int) -> float:
        """Return the public number that sums are divided by."""

    @abstractmethod
    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler over ``n_records`` records that draws from ``stream``."""

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler over ``n_records`` records that keeps no list of them: for tables beyond memory."""
        return self.sampler(n_records, stream)

    def by_id(self, record_ids: npt.ArrayLike, stream: SecureStream) -> Sampler:
        """Return the sampler over records named by ids; where records draw on their own, it goes by the ids alone.

        With one key any split of such records among several curators then gives the same union.
        """
        return self.sampler(len(np.asarray(record_ids)), stream)

    @abstractmethod
    def describe(self) -> str:
        """Return one line for people."""

    @property
    def fresh(self) -> int:
        """How many records a release uses up, which take part in no other; 0 where all records come back."""
        return 0

    @property
    def pass_size(self) -> int:
        """How many records there are to use up; 0 where all records come back."""
        return 0

    @property
    def probability(self) -> float:
        """The chance with which a record is drawn for a release; 1 if nothing about that is secret."""
        return 1.0

    @property
    def by_place(self) -> bool:
        """Whether how often a record takes part goes by its place among the others."""
        return self.participation(1) is not None

    def check_count(self, count: int) -> None:  # noqa: B027 most schemes serve any number
        """Raise ValueError if there are not records enough for ``count`` releases."""

    def check_whole(self, count: int) -> None:  # noqa: B027 most schemes may stop anywhere
        """Raise ValueError if a run should not end after ``count`` releases, some of them paid for in vain."""

    def sized(self, n: int) -> Sampling:
        """Return the same scheme over ``n`` records."""
        return self

    def local_batches(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the fixed batch of each party with ``sizes`` records; ``None`` if all draw by the one rule."""
        return None

    def at_party(self, sizes: tuple[int, ...], party: int) -> Sampling | None:
        """Return what one party draws; ``None`` if its share of a batch is no record."""
        return self

    def known_to(self, parties: int) -> Sampling:
        """Return what draws anything of a person whom so many parties know, each drawing on its own."""
        return self

    def correlated_noise(self, count: int) -> CorrelatedNoise:
        """Return noise correlated over ``count`` releases that suits how often records take part."""
        from quietgrad.privacy.correlated import BufferedToeplitzNoise

        # Where participation is not certain, a slot refuses any: then it is made for one.
        return BufferedToeplitzNoise.made(count, *(self.participation(count) or (1, count)))

    def participation(self, count: int) -> tuple[int, int] | None:
        """Return (k, b) if in ``count`` releases every record takes part at most k times, at least b apart.

        ``None`` if that is drawn, and so never certain.
        """
        return None

    def times(self, count: int) -> int:
        """Return how many of :meth:`event`'s samples ``count`` releases are: as many, unless several share one."""
        return count

    def under(self, relation: Relation) -> Sampling:
        """Return the scheme that gives the same event when neighbours are those of ``relation``."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the scheme as plain JSON values, with its kind under ``"sampling"``."""
        fields = {name: getattr(self, name) for name in self.__match_args__}
        return {"sampling": self.kind, **{k: str(v) if isinstance(v, Relation) else v for k, v in fields.items()}}


def from_json(data: dict[str, Any]) -> Sampling:
    """Rebuild a sampling scheme from :meth:`Sampling.to_json`.

    >>> from_json(Poisson(0.01).to_json())
    Poisson(rate=0.01)
    """
    try:
        kind = KINDS[data["sampling"]]
        fields = {name: data[name] for name in kind.__match_args__}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a sampling scheme: {data!r} ({error!r})") from None
    return kind(**fields)


def batch_of(n_public: int, batch_size: int | None) -> int:
    """Return ``batch_size`` if it can be one of n records."""
    if batch_size is None or not 1 <= batch_size <= n_public:
        raise ValueError(f"batch_size={batch_size}: must be between 1 and n={n_public}.")
    return batch_size


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a whole number ≥ 1.")


def _check_batch(n: int, batch_size: int) -> None:
    _check_count("n", n)
    _check_count("batch_size", batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size={batch_size}: must be ≤ n={n}.")


def _check_records(scheme: Sampling, n_records: int, n: int) -> None:
    if n_records != n:
        name = type(scheme).__name__
        raise ValueError(f"{n_records} records: {name} was declared for n={n}. Declare the true n.")


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
        return events.repeated(inner, steps)

    def expected_batch(self, n_public: int) -> float:
        return float(n_public)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        return Everyone()

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
        one = inner if self.rate == 1.0 else events.PoissonSampled(self.rate, inner)
        return events.repeated(one, steps)

    def expected_batch(self, n_public: int) -> float:
        return self.rate * n_public

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that draws the batch's size, then a subset of that size."""
        if self.rate == 1.0:
            return Everyone()
        return SubsetSampler(n_records, self.rate * n_records, stream, binomial_table(n_records, self.rate))

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that decides row by row, by a keyed function of the row's number."""
        if self.rate == 1.0:
            return Everyone()
        threshold = np.uint64(int(self.rate * 2.0**64))  # exact; P(word < threshold) is the rate to 2⁻⁶⁴
        return RowScan(n_records, lambda i, rows: stream.at(i, rows) < threshold)

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
        _check_count("steps_per_epoch", self.steps_per_epoch)

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
        one = inner if self.steps_per_epoch == 1 else events.AllocationSampled(self.steps_per_epoch, inner)
        return events.repeated(one, self.times(steps))

    def expected_batch(self, n_public: int) -> float:
        return n_public / self.steps_per_epoch

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        steps = self.steps_per_epoch
        return Everyone() if steps == 1 else AllocationSampler(n_records, steps, stream)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that looks a row's release up by a keyed function of the epoch and the row's number."""
        steps = self.steps_per_epoch
        if steps == 1:
            return Everyone()
        return RowScan(n_records, lambda i, rows: hashed_slots(rows, steps, stream, i // steps) == i % steps)

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
        _check_batch(self.n, self.batch_size)

    @property
    def probability(self) -> float:
        return self.batch_size / self.n

    def sized(self, n: int) -> FixedSize:
        return dataclasses.replace(self, n=n)

    @lru_cache  # noqa: B019 every party of a plan asks for all of them
    def local_batches(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return batches proportional to ``sizes`` that sum to ``batch_size``; small parties may get 0.

        By largest remainders, never above a party's own number of records.

        >>> FixedSize(100, 10).local_batches((70, 20, 10)), FixedSize(100, 2).local_batches((50, 30, 20))
        ((7, 2, 1), (1, 1, 0))
        """
        records = sum(sizes)
        exact = [self.batch_size * size / records for size in sizes]
        given = [min(int(share), size) for share, size in zip(exact, sizes, strict=True)]
        order = sorted(range(len(sizes)), key=lambda j: given[j] - exact[j])
        for j in order[: self.batch_size - sum(given)]:
            given[j] += 1
        return tuple(given)

    def at_party(self, sizes: tuple[int, ...], party: int) -> FixedSize | None:
        batch = self.local_batches(sizes)[party]
        return FixedSize(sizes[party], batch) if batch else None

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> FixedSize:
        return cls(n_public, batch_of(n_public, batch_size))

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        one = inner if self.batch_size == self.n else events.FixedSizeSampled(self.n, self.batch_size, inner)
        return events.repeated(one, steps)

    def expected_batch(self, n_public: int) -> float:
        return float(self.batch_size)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        _check_records(self, n_records, self.n)
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
        _check_batch(self.n, self.batch_size)
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
        return dataclasses.replace(self, n=n)

    def check_count(self, count: int) -> None:
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
        if self.relation is Relation.ADD_REMOVE:
            return SlotSampler(hashed_slots(np.arange(n_records), self.n, stream), self.n, self.batch_size)
        _check_records(self, n_records, self.n)
        return SlotSampler(permuted_slots(self.n, stream), self.n, self.batch_size)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler whose records draw their slots each on its own, under either relation.

        Under replace-one that is as sound as a permutation: a slot goes by the record's place, whatever it holds.
        """
        if self.relation is Relation.REPLACE_ONE:
            _check_records(self, n_records, self.n)
        return SlotScan(n_records, self.n, self.batch_size, stream)

    def participation(self, count: int) -> tuple[int, int]:
        return 1, count

    def under(self, relation: Relation) -> SinglePass:
        """Return the same pass with slots by permutation (replace-one) or by hash (add-remove)."""
        return dataclasses.replace(self, relation=relation)

    def describe(self) -> str:
        return f"single pass: {self.n} slots, {self.batch_size} per batch, no record twice ({self.relation})"


@dataclass(frozen=True)
class CyclicCohorts(Sampling, kind="turns"):
    """Cohorts that take turns: every record belongs to one of b ``cohorts``; release t asks all of number t mod b.

    Nothing is claimed for secrecy: who is in which cohort may be guessed. What the proof needs is that a record's
    turns do not depend on other people. Under replace-one a record's cohort goes by its place, which the record
    that replaces it inherits, and cohorts are of equal size. Under add-remove places move when a record is removed,
    so every record draws its cohort on its own, by a keyed hash; of places this is sound because the key is secret
    (the cohorts of the others then have the same law with and without the record), and cohorts that are to be
    *published* must go by ids that stay with the people. A cohort is never capped or filled up from another:
    sums are divided by the public n ÷ cohorts, whatever its size is.

    A record takes part once in each round of turns, ``cohorts`` releases apart. Independent noise gains nothing
    from that and is priced for every round; noise that is correlated over the releases does
    (:class:`~quietgrad.privacy.correlated.BufferedToeplitzNoise`).

    >>> CyclicCohorts(16).participation(64), CyclicCohorts(16).event(events.Gaussian(2.0), steps=64).count
    ((4, 16), 4)
    """

    cohorts: int
    relation: Relation = Relation.REPLACE_ONE
    in_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_count("cohorts", self.cohorts)
        object.__setattr__(self, "relation", Relation.parse(self.relation))
        if self.cohorts < 2:
            raise ValueError(f"cohorts={self.cohorts}: must be ≥ 2; one cohort is the full batch.")

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> CyclicCohorts:
        """Return the turns of ``cohorts``; a batch is then n ÷ cohorts, whatever is given for it."""
        made = cls(cohorts or 0)
        if made.cohorts > n_public:
            raise ValueError(f"cohorts={cohorts}: must be at most n={n_public}.")
        return made

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return ``inner`` as often as one cohort has its turn."""
        return events.repeated(inner, -(-steps // self.cohorts))

    def participation(self, count: int) -> tuple[int, int]:
        return -(-count // self.cohorts), self.cohorts

    def expected_batch(self, n_public: int) -> float:
        return n_public / self.cohorts

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler whose batch i is the cohort i mod cohorts."""
        if self.relation is Relation.ADD_REMOVE:
            return self.by_id(np.arange(n_records), stream)
        return CohortSampler(permuted_slots(n_records, stream) % self.cohorts, self.cohorts)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler whose records draw their cohorts each on its own, under either relation."""
        b = self.cohorts
        return RowScan(n_records, lambda i, rows: hashed_slots(rows, b, stream) == i % b)

    def by_id(self, record_ids: npt.ArrayLike, stream: SecureStream) -> Sampler:
        return CohortSampler(hashed_slots(record_ids, self.cohorts, stream), self.cohorts)

    def under(self, relation: Relation) -> CyclicCohorts:
        """Return the same turns with cohorts by place (replace-one) or by hash (add-remove)."""
        return dataclasses.replace(self, relation=relation)

    def describe(self) -> str:
        return f"turns: {self.cohorts} cohorts, one after the other, every record in one of them ({self.relation})"


@dataclass(frozen=True)
class CyclicPoisson(Sampling, kind="poisson-turns"):
    """Cohorts that take turns, and of the one whose turn it is each record enters with probability ``rate``.

    Cohorts as in :class:`CyclicCohorts`; coins are secret and each record's own. The rate is that within a cohort:
    cohorts × wanted batch ÷ declared n. A record has one coin in each round of turns, ``cohorts`` releases apart,
    which is what noise in as many bands needs (:class:`~quietgrad.privacy.banded.BandedToeplitzNoise`).

    >>> CyclicPoisson(4, 0.1).participation(10), CyclicPoisson(4, 0.1).expected_batch(1000)
    ((3, 4), 25.0)
    >>> CyclicPoisson(4, 0.1).event(events.Gaussian(2.0), steps=8)
    Repeated(inner=PoissonSampled(rate=0.1, inner=Gaussian(noise_multiplier=2.0)), count=2)
    """

    cohorts: int
    rate: float
    relation: Relation = Relation.REPLACE_ONE
    in_turns: ClassVar[bool] = True
    only_central: ClassVar[str] = (
        "sampling='poisson-turns': is for one curator; parties take turns by sampling='turns'."
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "relation", self._turns.relation)
        Poisson(self.rate)  # checks it

    def correlated_noise(self, count: int) -> BandedToeplitzNoise:
        """Return noise in as many bands as there are cohorts."""
        from quietgrad.privacy.banded import BandedToeplitzNoise

        return BandedToeplitzNoise.made(count, self.cohorts)

    @property
    def _turns(self) -> CyclicCohorts:
        return CyclicCohorts(self.cohorts, self.relation)

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> Sampling:
        """Return samples of ``batch_size`` of a cohort; without a batch size all of it."""
        turns = CyclicCohorts.of(n_public, None, cohorts)
        if batch_size is None:
            return turns
        if not 1 <= batch_size * turns.cohorts <= n_public:
            raise ValueError(
                f"batch_size={batch_size}, cohorts={cohorts}: a cohort has about n ÷ cohorts = "
                f"{n_public / turns.cohorts:.4g} records; take smaller batches or fewer cohorts."
            )
        return cls(turns.cohorts, turns.cohorts * batch_size / n_public)

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return a Poisson-sampled ``inner`` as often as one cohort has its turn."""
        return self._turns.event(Poisson(self.rate).event(inner), steps)

    def participation(self, count: int) -> tuple[int, int]:
        """Return (⌈count ÷ cohorts⌉, cohorts): more is not possible, whatever the coins say."""
        return self._turns.participation(count)

    def expected_batch(self, n_public: int) -> float:
        return self.rate * self._turns.expected_batch(n_public)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler whose batch i is of the cohort i mod cohorts, by a keyed coin of each member."""
        return BernoulliSubsampler(self._turns.sampler(n_records, stream), self.rate, stream)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the same for tables beyond memory: cohorts are looked up as they are needed."""
        return BernoulliSubsampler(self._turns.scanning(n_records, stream), self.rate, stream)

    def under(self, relation: Relation) -> CyclicPoisson:
        """Return the same with cohorts by place (replace-one) or by hash (add-remove)."""
        return dataclasses.replace(self, relation=relation)

    def describe(self) -> str:
        return (
            f"Poisson samples in turns: {self.cohorts} cohorts, one after the other, each record of it with "
            f"probability {self.rate:g} ({self.relation})"
        )
