"""Schemes in which cohorts of records take turns, whole or by secret samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.sampling.base import Sampler, Sampling, check_count
from quietgrad.sampling.schemes import Poisson

if TYPE_CHECKING:
    from quietgrad.privacy.correlated import CorrelatedNoise
    from quietgrad.privacy.rng import SecureStream


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
        check_count("cohorts", self.cohorts)
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
        """Return (⌈count ÷ cohorts⌉, cohorts)."""
        return -(-count // self.cohorts), self.cohorts

    def expected_batch(self, n_public: int) -> float:
        return n_public / self.cohorts

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler whose batch i is the cohort i mod cohorts."""
        from quietgrad.sampling.samplers import CohortSampler, permuted_slots

        if self.relation is Relation.ADD_REMOVE:
            return self.by_id(np.arange(n_records), stream)
        return CohortSampler(permuted_slots(n_records, stream) % self.cohorts, self.cohorts)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler whose records draw their cohorts each on its own, under either relation."""
        from quietgrad.sampling.samplers import CohortScan

        return CohortScan(n_records, self.cohorts, stream)

    def by_id(self, record_ids: npt.ArrayLike, stream: SecureStream) -> Sampler:
        """Return the sampler over records named by ids: with one key, any split of them gives the same union."""
        from quietgrad.sampling.samplers import CohortSampler, hashed_slots

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

    def correlated_noise(self, count: int) -> CorrelatedNoise:
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
        from quietgrad.sampling.samplers import BernoulliSubsampler

        return BernoulliSubsampler(self._turns.sampler(n_records, stream), self.rate, stream)

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the same for tables beyond memory: cohorts are looked up as they are needed."""
        from quietgrad.sampling.samplers import BernoulliSubsampler

        return BernoulliSubsampler(self._turns.scanning(n_records, stream), self.rate, stream)

    def under(self, relation: Relation) -> CyclicPoisson:
        """Return the same with cohorts by place (replace-one) or by hash (add-remove)."""
        return dataclasses.replace(self, relation=relation)

    def describe(self) -> str:
        return (
            f"Poisson samples in turns: {self.cohorts} cohorts, one after the other, each record of it with "
            f"probability {self.rate:g} ({self.relation})"
        )
