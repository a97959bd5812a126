"""DP-Adam: Adam's step on the noisy mean of clipped gradients; all its moments are post-processing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quietgrad.algorithms.base import FirstOrder, Output, State, check_count, check_range
from quietgrad.algorithms.rates import Rate
from quietgrad.oracles.base import Oracle, SamplingName
from quietgrad.oracles.minibatch import MiniBatch
from quietgrad.vectors import Vector, sqrt


@dataclass(frozen=True)
class DPAdam(FirstOrder):
    """θ ← θ − η_t·m̂/(√v̂ + stabiliser), m and v running moments of the noisy mean gradient.

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
    sampling: SamplingName = "poisson"
    returns: Output = "last"

    name: ClassVar[str] = "dp-adam"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        check_range("beta1", self.beta1, 0.0, 1.0 - 1e-9)
        check_range("beta2", self.beta2, 0.0, 1.0 - 1e-9)
        super().__post_init__()

    def oracle(self) -> Oracle:
        return MiniBatch(self.batch_size, self.clip, self.sampling, self.law())

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        first = (1.0 - self.beta1) * gradient
        second = (1.0 - self.beta2) * (gradient * gradient)
        state.velocity = first if state.velocity is None else self.beta1 * state.velocity + first
        state.second = second if state.second is None else self.beta2 * state.second + second
        t = state.step + 1
        mean = state.velocity * (1.0 / (1.0 - self.beta1**t))
        spread = sqrt(state.second * (1.0 / (1.0 - self.beta2**t))) + self.stabiliser
        return self._rate(state.step, self.steps), mean / spread
