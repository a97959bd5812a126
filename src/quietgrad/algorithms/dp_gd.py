"""DP-GD (Wang et al. 2017): full-batch gradient descent, whose releases compose exactly as Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quietgrad.algorithms.base import FirstOrder, Output, State, check_range
from quietgrad.algorithms.rates import Rate
from quietgrad.oracles.base import Oracle
from quietgrad.oracles.minibatch import MiniBatch
from quietgrad.vectors import Vector


@dataclass(frozen=True)
class DPGD(FirstOrder):
    """θ ← θ − η_t·(1/n)[Σ clip_C(∇fᵢ(θ)) + N(0, (zC)² I)], with optional heavy-ball momentum.

    T releases of all n records are μ-GDP with μ = √T·Δ/σ exactly: no amplification, no slack.

    >>> DPGD(steps=20).schedule(1000).releases
    20
    """

    steps: int = 30
    learning_rate: float | str | Rate = 2.0
    clip: float = 1.0
    momentum: float = 0.0
    returns: Output = "last"

    name: ClassVar[str] = "dp-gd"

    def __post_init__(self) -> None:
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        check_range("momentum", self.momentum, 0.0, 1.0 - 1e-9)
        super().__post_init__()

    def oracle(self) -> Oracle:
        return MiniBatch(None, self.clip, "full", self.law())

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        if self.momentum:
            gradient = gradient if state.velocity is None else self.momentum * state.velocity + gradient
            state.velocity = gradient
        return self._rate(state.step, self.steps), gradient


@dataclass(frozen=True)
class GD(DPGD):
    """Gradient descent without clipping or noise: a baseline, **not private**."""

    clip: float = math.inf

    name: ClassVar[str] = "gd"
    private: ClassVar[bool] = False
