"""Samples of parties: each draws for itself, in secret, or the coordinator draws and knows whom.

Who can see a party's coin decides what the sample is worth. The proofs are in ``docs/clients-proof.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quietgrad.core.accounting import events
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.sampling.samplers import Everyone, Sampler
from quietgrad.core.sampling.schemes import Poisson, Sampling


@dataclass(frozen=True)
class SelfSampled(Poisson, kind="self-sampled"):
    """Every party draws for itself, in secret, with probability ``rate``; undrawn ones hand in a masked zero.

    The price is that of Poisson samples if nothing that can be seen of a party depends on its coin or its records.
    So a party is present before it draws, it trains whatever it draws, and its answer leaves ``seconds`` after it
    was asked. Training that fails, or is not over by then, is a masked zero too: that makes the rate smaller.

    >>> SelfSampled(0.1, 10.0).event(events.Gaussian(1.0), steps=5)
    Repeated(inner=PoissonSampled(rate=0.1, inner=Gaussian(noise_multiplier=1.0)), count=5)
    """

    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seconds, (int, float)) or not 0.0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds!r}: must be a number > 0, after which every party answers.")

    @property
    def answer_after(self) -> float:
        return float(self.seconds)

    def describe(self) -> str:
        return (
            f"secret self-sampling: each record takes part with probability {self.rate:g} by a coin of its own, "
            f"and answers after {self.seconds:g} s whatever it drew"
        )


@dataclass(frozen=True)
class CoordinatorSampled(Poisson, kind="coordinator-sampled"):
    """Parties drawn by the coordinator with probability ``rate``; each takes part ``most_rounds`` times at most.

    Against those who see the models alone, these are Poisson samples: a cap makes participation only rarer. Against
    the coordinator nothing is secret, and it may draw as it likes: what each party enforces is all that counts.

    >>> CoordinatorSampled(0.1, 3).event(events.Gaussian(1.0), steps=5).inner
    PoissonSampled(rate=0.1, inner=Gaussian(noise_multiplier=1.0))
    >>> CoordinatorSampled(0.1, 3).against_coordinator().event(events.Gaussian(1.0), steps=5)
    Repeated(inner=Gaussian(noise_multiplier=1.0), count=3)
    """

    most_rounds: int

    @property
    def coordinator_draws(self) -> int:
        return self.most_rounds

    def against_coordinator(self) -> AtMost:
        return AtMost(self.rate, self.most_rounds)

    def describe(self) -> str:
        return (
            f"drawn by the coordinator: each record takes part with probability {self.rate:g}, "
            f"{self.most_rounds} times at most"
        )


@dataclass(frozen=True)
class AtMost(Sampling, kind="at-most"):
    """Any ``most_rounds`` releases of a run, which nothing hides; nothing is amplified."""

    rate: float
    most_rounds: int

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        return events.repeated(inner, self.times(steps))

    def times(self, count: int) -> int:
        return min(count, self.most_rounds)

    def expected_batch(self, n_public: int) -> float:
        return self.rate * n_public

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        return Everyone()

    def describe(self) -> str:
        return f"each record in at most {self.most_rounds} releases, which are known"
