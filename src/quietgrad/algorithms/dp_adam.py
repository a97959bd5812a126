"""DP-Adam: Adam's step on the noisy mean of clipped gradients; all its moments are post-processing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quietgrad.algorithms.base import FirstOrder, Output, State, check_count, check_range
from quietgrad.algorithms.rates import Rate
from quietgrad.curators.base import Session
from quietgrad.oracles.base import Noise, Oracle, SamplingName, noise_multiplier
from quietgrad.oracles.minibatch import MiniBatch
from quietgrad.vectors import Vector, sqrt


@dataclass(frozen=True)
class DPAdam(FirstOrder):
    """θ ← θ − η_t·m̂/(√v̂ + stabiliser), m and v running moments of the noisy mean gradient.

    The noise adds its variance Φ = (zC/b)², a public number, to every coordinate of v̂; where Φ outweighs the
    squared gradients all coordinates are divided by about the same √Φ, and Adam is SGD with momentum.
    ``subtract_noise`` divides by √max(v̂ − Φ, floor·Φ) instead (DP-AdamBC, Tang et al. 2023): post-processing, at
    the same price. The divisor is smaller, so the same learning rate makes longer steps.

    Args:
        subtract_noise: take Φ out of the second moment.
        floor: the least that is left of it, in units of Φ.
        sampling, cohorts, noise: as in :class:`~quietgrad.algorithms.dp_sgd.DPSGD`. Correlated noise is louder in
            each single release, which is what the second moment sees: Adam gains less from it than momentum.

    >>> DPAdam(steps=10, batch_size=20).schedule(100).releases
    10
    """

    steps: int = 1000
    batch_size: int = 256
    learning_rate: float | str | Rate = 0.01
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    stabiliser: float = 1e-8
    subtract_noise: bool = False
    floor: float = 0.1
    sampling: SamplingName = "poisson"
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"

    name: ClassVar[str] = "dp-adam"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        check_range("beta1", self.beta1, 0.0, 1.0 - 1e-9)
        check_range("beta2", self.beta2, 0.0, 1.0 - 1e-9)
        check_range("floor", self.floor, 0.0, math.inf, closed=False)
        super().__post_init__()

    def step(self, state: State, door: Session) -> State:
        if self.subtract_noise and "noise" not in state.memo:
            mean = self.clip / door.expected_batch("gradient")
            state.memo["noise"] = (noise_multiplier(door) * mean) ** 2 if door.plan.is_private else 0.0
        return super().step(state, door)

    def oracle(self) -> Oracle:
        return MiniBatch(self.batch_size, self.clip, self.sampling, self.law(), self.cohorts, self.noise)

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        first = (1.0 - self.beta1) * gradient
        second = (1.0 - self.beta2) * (gradient * gradient)
        state.velocity = first if state.velocity is None else self.beta1 * state.velocity + first
        state.second = second if state.second is None else self.beta2 * state.second + second
        t = state.step + 1
        mean = state.velocity * (1.0 / (1.0 - self.beta1**t))
        square = state.second * (1.0 / (1.0 - self.beta2**t))
        if self.subtract_noise:
            noise = state.memo["noise"]
            square = (square - noise).clip(min=self.floor * noise)
        return self._rate(state.step, self.steps), mean / (sqrt(square) + self.stabiliser)
