"""Sampling schemes: their base, all records, and secret samples. Passes and cohorts are in ``participation.py``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Json, Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.registered import Registered
from quietgrad.core.sampling.samplers import (
    AllocationSampler,
    Everyone,
    RowScan,
    Sampler,
    SubsetSampler,
    binomial_table,
    drawn,
    hashed_slots,
)

if TYPE_CHECKING:
    from quietgrad.core.noise.correlated import CorrelatedNoise

_WHOLE_NUMBERS = ("n", "batch_size", "steps_per_epoch", "cohorts", "most_rounds")

Risk = Literal["population", "records"]
"""Which mean a batch stands for: that of the population all records are drawn from, or that of these records."""


class MeanError(NamedTuple):
    """How a batch's sum ÷ its expected size differs from a mean, for contributions no longer than 1.

    Given all earlier batches, the error is a sum over records with mean zero. ``variance`` bounds its mean square,
    ``longest`` what one record adds to it. Probabilities are at most ``odds`` times those of such a sum.
    """

    variance: float
    longest: float
    risk: Risk | None
    odds: float = 1.0


class Sampling(Registered, ABC, family="sampling"):
    """Base of all sampling schemes; a frozen value that can be written as JSON and read back.

    Other packages ask a scheme by its methods, never for its class: a new scheme is one class and its sampler.
    Fields of one name (``rate``, ``relation``, numbers of records or steps) are checked in one way in all schemes.
    """

    in_turns: ClassVar[bool] = False
    """Whether cohorts of records take turns."""
    counts_exactly: ClassVar[bool] = False
    """Whether batches are drawn of an exact, public number of records."""
    only_central: ClassVar[str] = ""
    """Why parties cannot draw such samples together; empty if they can."""

    def __post_init__(self) -> None:
        for name in self.__match_args__:
            value = vars(self)[name]
            if name == "relation":
                object.__setattr__(self, name, Relation.parse(value))
            elif name == "rate":
                if not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
                    raise SettingError("{rate}: must be in (0, 1]; it is the expected batch ÷ n.", rate=value)
            elif name not in _WHOLE_NUMBERS:
                continue
            elif isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise SettingError(f"{{{name}}}: must be a whole number ≥ 1.", **{name: value})
            elif name == "batch_size" and value > vars(self).get("n", value):
                raise SettingError("{batch_size}: must be ≤ {n}.", batch_size=value, n=vars(self)["n"])

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

    def mean_error(self, n_public: int) -> MeanError | None:
        """Return how a batch's mean differs from the mean it stands for; ``None`` where no bound is proved."""
        return None

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
    def answer_after(self) -> float | None:
        """After how many seconds every party answers, whatever it drew; ``None`` if no party draws in secret."""
        return None

    @property
    def coordinator_draws(self) -> int | None:
        """The most rounds that a party lets the coordinator draw it for; ``None`` if the coordinator draws none."""
        return None

    def against_coordinator(self) -> Sampling:
        """Return the scheme whose cost holds against the coordinator: itself, unless the coordinator draws."""
        return self

    @property
    def by_place(self) -> bool:
        """Whether how often a record takes part goes by its place among the others."""
        return self.participation(1) is not None

    def check_count(self, count: int) -> None:
        """Raise ValueError if there are not records enough for ``count`` releases."""

    def check_whole(self, count: int) -> None:
        """Raise ValueError if a run should not end after ``count`` releases, some of them paid for in vain."""

    def sized(self, n: int) -> Self:
        """Return the same scheme over ``n`` records."""
        return self._changed("n", n)

    def local_batches(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the fixed batch of each party with ``sizes`` records; ``None`` if all draw by the one rule."""
        return None

    def at_party(self, sizes: tuple[int, ...], party: int) -> Sampling | None:
        """Return what one party draws; ``None`` if its share of a batch is no record."""
        return self

    def known_to(self, parties: int) -> Sampling:
        """Return the scheme for a person who is known to so many parties, each of which draws on its own."""
        return self

    def correlated_noise(self, count: int) -> CorrelatedNoise:
        """Return noise correlated over ``count`` releases that suits how often records take part."""
        from quietgrad.core.noise.correlated import BufferedToeplitzNoise

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

    def under(self, relation: Relation) -> Self:
        """Return the scheme that gives the same event when neighbours are those of ``relation``."""
        return self._changed("relation", relation)

    def _changed(self, name: str, value: object) -> Self:
        return type(self)(**{**vars(self), name: value}) if name in self.__match_args__ else self


KINDS: dict[str, type[Sampling]] = Sampling.kinds


def from_json(data: Json) -> Sampling:
    """Rebuild a sampling scheme from its ``to_json``.

    >>> from_json(Poisson(0.01).to_json())
    Poisson(rate=0.01)
    """
    return Sampling.read(data)


def batch_of(n_public: int, batch_size: int | None) -> int:
    """Return ``batch_size`` if it can be one of n records."""
    if batch_size is None or not 1 <= batch_size <= n_public:
        raise SettingError("{batch_size}: must be between 1 and {n}.", batch_size=batch_size, n=n_public)
    return batch_size


def check_records(scheme: Sampling, n_records: int, n: int) -> None:
    """Raise ValueError unless a scheme that was declared for n records is given as many."""
    if n_records != n:
        name = type(scheme).__name__
        raise SettingError(
            f"{name} was declared for {{n}}, and the data hold another number. Declare the true n.", n=n
        )


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

    def mean_error(self, n_public: int) -> MeanError:
        return MeanError(0.0, 0.0, "records")

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
    quietgrad.core.errors.SettingError: rate=1.5: must be in (0, 1]; it is the expected batch ÷ n.
    """

    rate: float

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> Poisson:
        return cls(batch_of(n_public, batch_size) / n_public)

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        one = inner if self.rate == 1.0 else events.PoissonSampled(self.rate, inner)
        return events.repeated(one, steps)

    def expected_batch(self, n_public: int) -> float:
        return self.rate * n_public

    def mean_error(self, n_public: int) -> MeanError:
        """Return the error of (1/qn)ΣBᵢgᵢ, Bᵢ = 1 with probability q: a record adds (Bᵢ − q)gᵢ/qn to it."""
        size, missing = self.expected_batch(n_public), 1.0 - self.rate
        return MeanError(missing / size, (max(self.rate, missing) if missing else 0.0) / size, "records")

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that draws the batch's size, then a subset of that size."""
        if self.rate == 1.0:
            return Everyone()
        return SubsetSampler(n_records, self.rate * n_records, stream, binomial_table(n_records, self.rate))

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that decides row by row, by a keyed function of the row's number."""
        if self.rate == 1.0:
            return Everyone()
        return RowScan(n_records, lambda i, rows: drawn(stream.at(i, rows), self.rate))

    @property
    def probability(self) -> float:
        return self.rate

    def known_to(self, parties: int) -> Poisson:
        """Return the rate at which anything of a person known to k parties is drawn: 1 − (1 − q)ᵏ.

        Given who else is drawn, what k independent draws add is a mixture of shifts of at most k·C, the empty one
        with probability (1 − q)ᵏ. Against no shift, the divergence of such a mixture of Gaussians grows with every
        shift, so it is at most that of one draw of k·C at this rate; the noise is calibrated for k·C.
        """
        if parties == 1 or self.rate == 1.0:
            return self
        return Poisson(min(1.0, -math.expm1(parties * math.log1p(-self.rate))))

    def by_id(self, record_ids: npt.ArrayLike, stream: SecureStream) -> RowScan:
        """Return a sampler that decides by record id, so that any split of the records gives the same union.

        It reads every record's id in every release: slower, for data that several curators hold.
        Ids are whole numbers, each held by one record.

        >>> from quietgrad.core.noise.rng import SecureStream, seed_key
        >>> stream = SecureStream(seed_key(0), "batches")
        >>> whole = Poisson(0.5).by_id([10, 11, 12, 13], stream).batch(0)
        >>> first, second = (Poisson(0.5).by_id(ids, stream).batch(0) for ids in ([10, 11], [12, 13]))
        >>> whole.tolist() == [*first, *(second + 2)]
        True
        """
        ids = np.asarray(record_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"record_ids of shape {ids.shape} and type {ids.dtype}: must be a list of integers.")
        if ids.size and ids.min() < 0:
            raise ValueError(f"record_ids: {ids.min()} is negative; ids must be ≥ 0.")
        if np.unique(ids).size != ids.size:
            raise ValueError("record_ids: two records have the same id; they would always be drawn together.")
        words = ids.astype(np.uint64)
        return RowScan(ids.size, lambda i, rows: drawn(stream.at(i, words[rows]), self.rate))

    def describe(self) -> str:
        return f"Poisson sampling: each record enters a batch with probability {self.rate:g}"


@dataclass(frozen=True)
class RandomAllocation(Sampling, kind="random-allocation"):
    """Every record draws one of the ``steps_per_epoch`` releases of an epoch, anew for each epoch.

    Draws are secret, uniform and each record's own, so that batches have random sizes. Batches of a fixed size, or
    a known order, have no such proof (:mod:`quietgrad.core.accounting.random_allocation`).
    An epoch that was begun is paid for whole. Under replace-one no cost is known.

    >>> RandomAllocation(100).event(events.Gaussian(1.1), steps=200)
    Repeated(inner=AllocationSampled(steps_per_epoch=100, inner=Gaussian(noise_multiplier=1.1)), count=2)
    """

    steps_per_epoch: int
    only_central: ClassVar[str] = (
        "sampling='random-allocation': is for one curator, who draws every record's step of an epoch; "
        "parties draw Poisson samples, by sampling='poisson'."
    )

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
        return AllocationSampler(n_records, self.steps_per_epoch, stream)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler that looks a row's release up by a keyed function of the epoch and the row's number."""
        steps = self.steps_per_epoch
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

    @property
    def probability(self) -> float:
        return self.batch_size / self.n

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

    def mean_error(self, n_public: int) -> MeanError:
        """Return the error of b independent draws.

        A convex function of a sum has no larger mean without replacement than with it (Hoeffding 1963, theorem 4).
        """
        return MeanError(1.0 / self.batch_size, 2.0 / self.batch_size, "records")

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        check_records(self, n_records, self.n)
        return SubsetSampler(n_records, self.batch_size, stream)

    def describe(self) -> str:
        return f"fixed batches: {self.batch_size} of {self.n} records without replacement"
