"""The plain oracle: the noisy mean of clipped gradients of one sample (DP-SGD, DP-GD)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quietgrad.curators.base import Session
from quietgrad.objectives.base import Gradient
from quietgrad.objectives.queries.asked import Asked
from quietgrad.oracles.base import (
    Error,
    Estimate,
    Noise,
    Oracle,
    SamplingName,
    noise_multiplier,
    sampling_of,
    settings_of,
    slot_of,
)
from quietgrad.plans.schedule import Law, Slot
from quietgrad.vectors import Vector


@dataclass(frozen=True)
class MiniBatch(Oracle):
    """ĝ = (1/b) [Σ clip_C(∇fᵢ(θ)) + N(0, (zC)² I)], b the public expected batch.

    Dividing by the realised size of a Poisson sample would double the sensitivity, and skipping an empty sample
    would reveal it, so neither is done.
    """

    batch_size: int | None
    clip: float = 1.0
    sampling: SamplingName = "poisson"
    law: Law | None = None
    cohorts: int | None = None
    noise: Noise = "independent"

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        sampling = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        return (slot_of("gradient", sampling, steps, self.noise, self.law),)

    def estimate(self, state: Estimate, params: Vector, door: Session) -> Estimate:
        total = door.release("gradient", Gradient(params, self.clip))
        total *= 1.0 / door.expected_batch("gradient")
        return Estimate(total, None, 0.0, state.calls + 1)

    def asks(self, params: Vector, door: Session) -> Iterator[tuple[str, Asked]]:
        yield "gradient", Asked(Gradient(params, self.clip))

    def error(self, door: Session) -> Error:
        """σ ≤ C/√b and r = zC/b."""
        size = door.expected_batch("gradient")
        return Error(self.clip / math.sqrt(size), noise_multiplier(door) * self.clip / size)

    def config(self) -> dict[str, Any]:
        return {"name": type(self).__name__, **settings_of(self)}
