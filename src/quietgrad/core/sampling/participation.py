"""Schemes in which it is certain how often a record takes part: single passes, and cohorts that take turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.sampling.samplers import (
    BernoulliSubsampler,
    CohortSampler,
    RowScan,
    Sampler,
    SinglePassScan,
    SlotSampler,
    hashed_slots,
    permuted_slots,
)
from quietgrad.core.sampling.schemes import MeanError, Poisson, Sampling, batch_of, check_records

if TYPE_CHECKING:
    from quietgrad.core.noise.correlated import BandedToeplitzNoise


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

    @property
    def fresh(self) -> int:
        return self.batch_size

    @property
    def pass_size(self) -> int:
        return self.n

    @property
    def probability(self) -> float:
        return self.batch_size / self.n

    def check_count(self, count: int) -> None:
        if count * self.batch_size > self.n:
            raise SettingError(
                f"{count} steps of {self.batch_size} fresh records are more than {{n}}: in a single pass "
                f"every record is used once. Plan {self.n // self.batch_size} steps, or smaller batches.",
                n=self.n,
            )

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> SinglePass:
        return cls(n_public, batch_of(n_public, batch_size))

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return ``inner`` once, on disjoint records, however many ``steps`` share them."""
        return events.Parallel((inner,))

    def expected_batch(self, n_public: int) -> float:
        return float(self.batch_size)

    def mean_error(self, n_public: int) -> MeanError:
        """Return the error of fresh records: given all earlier ones, independent draws from the population.

        Permuted slots hold exactly b of them, and one adds (g − E g)/b. Slots that records draw on their own hold a
        random number, which depends on the earlier ones. If the number of all records were Poisson with mean n,
        they would be independent Poisson numbers, and one record would add g/b less its share of the mean. That
        number is n with probability above 1/(e√n), so what is claimed of n records fails at most e√n times as
        often. Scans and parties draw slots on their own under either relation; so this is always counted.
        """
        return MeanError(1.0 / self.batch_size, 2.0 / self.batch_size, "population", math.e * math.sqrt(self.n))

    def sampler(self, n_records: int, stream: SecureStream) -> SlotSampler:
        """Return the sampler that hands out slots in order and refuses when they are used up."""
        if self.relation is Relation.ADD_REMOVE:
            return SlotSampler(hashed_slots(np.arange(n_records), self.n, stream), self.n, self.batch_size)
        check_records(self, n_records, self.n)
        return SlotSampler(permuted_slots(self.n, stream), self.n, self.batch_size)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler whose records draw their slots each on its own, under either relation.

        Under replace-one that is as sound as a permutation: a slot goes by the record's place, whatever it holds.
        """
        if self.relation is Relation.REPLACE_ONE:
            check_records(self, n_records, self.n)
        return SinglePassScan(n_records, self.n, self.batch_size, stream)

    def participation(self, count: int) -> tuple[int, int]:
        return 1, count

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
    from that and pays for every round; noise that is correlated over the releases does
    (:class:`~quietgrad.core.noise.correlated.BufferedToeplitzNoise`).

    >>> CyclicCohorts(16).participation(64), CyclicCohorts(16).event(events.Gaussian(2.0), steps=64).count
    ((4, 16), 4)
    """

    cohorts: int
    relation: Relation = Relation.REPLACE_ONE
    in_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cohorts < 2:
            raise SettingError("{cohorts}: must be ≥ 2; one cohort is the full batch.", cohorts=self.cohorts)

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> CyclicCohorts:
        """Return the turns of ``cohorts``; a batch is then n ÷ cohorts, whatever is given for it."""
        participation = cls(cohorts or 0)
        if participation.cohorts > n_public:
            raise SettingError("{cohorts}: must be at most {n}.", cohorts=cohorts, n=n_public)
        return participation

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

    def at_party(self, sizes: tuple[int, ...], party: int) -> Sampling:
        """Return the turn of the party itself, by its place in the public roster, where each is one unit.

        A party that holds nothing keeps its place, so that no other party's turn depends on it.
        """
        if len(sizes) == 1 or max(sizes) > 1:
            return self
        return RosterTurn(self.cohorts, party % self.cohorts)

    def describe(self) -> str:
        return f"turns: {self.cohorts} cohorts, one after the other, every record in one of them ({self.relation})"


@dataclass(frozen=True)
class RosterTurn(Sampling, kind="roster-turn"):
    """All that one party holds, in every release whose number is ``turn`` modulo ``cohorts``.

    >>> RosterTurn(4, 1).sampler(3, SecureStream(bytes(32), "")).batch(2)
    array([], dtype=int64)
    """

    cohorts: int
    turn: int
    in_turns: ClassVar[bool] = True

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        return events.repeated(inner, -(-steps // self.cohorts))

    def participation(self, count: int) -> tuple[int, int]:
        return -(-count // self.cohorts), self.cohorts

    def expected_batch(self, n_public: int) -> float:
        return n_public / self.cohorts

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        return CohortSampler(np.full(n_records, self.turn), self.cohorts)

    def describe(self) -> str:
        return f"every record in release {self.turn} of every {self.cohorts}"


@dataclass(frozen=True)
class CyclicPoisson(Sampling, kind="poisson-turns"):
    """Cohorts that take turns, and of the one whose turn it is each record enters with probability ``rate``.

    Cohorts as in :class:`CyclicCohorts`; coins are secret and each record's own. The rate is that within a cohort:
    cohorts × wanted batch ÷ declared n. A record has one coin in each round of turns, ``cohorts`` releases apart,
    which is what noise in as many bands needs (:class:`~quietgrad.core.noise.correlated.BandedToeplitzNoise`).

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
        super().__post_init__()
        CyclicCohorts(self.cohorts)  # checks that they are several

    def correlated_noise(self, count: int) -> BandedToeplitzNoise:
        """Return noise in as many bands as there are cohorts."""
        from quietgrad.core.noise.correlated import BandedToeplitzNoise

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
            raise SettingError(
                f"{{batch_size}}, {{cohorts}}: a cohort has about n ÷ cohorts = "
                f"{n_public / turns.cohorts:.4g} records; take smaller batches or fewer cohorts.",
                batch_size=batch_size,
                cohorts=cohorts,
            )
        return cls(turns.cohorts, turns.cohorts * batch_size / n_public)

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return a Poisson-sampled ``inner`` as often as one cohort has its turn."""
        return events.repeated(Poisson(self.rate).event(inner), -(-steps // self.cohorts))

    def participation(self, count: int) -> tuple[int, int]:
        """Return (⌈count ÷ cohorts⌉, cohorts): more is not possible, whatever the coins say."""
        return -(-count // self.cohorts), self.cohorts

    def expected_batch(self, n_public: int) -> float:
        return self.rate * (n_public / self.cohorts)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler whose batch i is of the cohort i mod cohorts, by a keyed coin of each member."""
        return BernoulliSubsampler(self._turns.sampler(n_records, stream), self.rate, stream)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the same for tables beyond memory: cohorts are looked up as they are needed."""
        return BernoulliSubsampler(self._turns.scanning(n_records, stream), self.rate, stream)

    def describe(self) -> str:
        return (
            f"Poisson samples in turns: {self.cohorts} cohorts, one after the other, each record of it with "
            f"probability {self.rate:g} ({self.relation})"
        )
