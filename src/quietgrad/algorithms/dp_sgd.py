"""DP-SGD (Abadi et al. 2016) and its non-private twin: noisy means of clipped gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from quietgrad.algorithms.base import FirstOrder, Output, State, check_count, check_range
from quietgrad.algorithms.rates import Rate
from quietgrad.oracles.base import Noise, Oracle, SamplingName
from quietgrad.oracles.minibatch import MiniBatch
from quietgrad.vectors import Vector


@dataclass(frozen=True)
class DPSGD(FirstOrder):
    """θ ← θ − η_t·m_t with m_t the noisy mean of clipped gradients, or its momentum.

    Args:
        steps: T, the number of updates (and releases).
        batch_size: expected records per step.
        learning_rate: a number or a schedule of :mod:`quietgrad.algorithms.rates`.
        clip: C, the L2 bound on one record's gradient.
        sampling: ``"poisson"`` (default), ``"fixed-size"``, ``"full"``, ``"single-pass"`` (every record once),
            ``"turns"`` (``cohorts`` of records, one after the other; the batch is then n ÷ cohorts), or
            ``"poisson-turns"`` (a Poisson sample of ``batch_size`` of the cohort whose turn it is).
        noise: ``"independent"``, or ``"correlated"`` with a single pass or turns of either kind: noise that later
            releases take back, so that sums of releases have much less of it
            (:mod:`quietgrad.privacy.correlated`, :mod:`quietgrad.privacy.banded`).
        momentum: weight of the past, 0 for none.
        momentum_kind: ``"heavy-ball"`` (m = βm + g) or ``"ema"`` (m = βm + (1−β)g).
        momentum_steps: switch momentum off after so many steps (early momentum at one rate, paper 001).
        returns: ``"last"``, ``"average"`` of the second half, ``"ema"``, or ``"random"`` round.

    >>> DPSGD(steps=100, batch_size=50, learning_rate=0.5).schedule(1000).releases
    100
    """

    steps: int = 1000
    batch_size: int = 256
    learning_rate: float | str | Rate = 0.5
    clip: float = 1.0
    sampling: SamplingName = "poisson"
    momentum: float = 0.0
    momentum_kind: Literal["heavy-ball", "ema"] = "heavy-ball"
    momentum_steps: int | None = None
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"

    name: ClassVar[str] = "dp-sgd"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        check_range("momentum", self.momentum, 0.0, 1.0 - 1e-9)
        super().__post_init__()

    def oracle(self) -> Oracle:
        return MiniBatch(self.batch_size, self.clip, self.sampling, self.law(), self.cohorts, self.noise)

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        size = self._rate(state.step, self.steps)
        on = self.momentum_steps is None or state.step < self.momentum_steps
        if not self.momentum or not on:
            return size, gradient
        fresh = gradient if self.momentum_kind == "heavy-ball" else (1.0 - self.momentum) * gradient
        state.velocity = fresh if state.velocity is None else self.momentum * state.velocity + fresh
        return size, state.velocity


@dataclass(frozen=True)
class SGD(DPSGD):
    """Stochastic gradient descent without clipping or noise: a baseline, **not private**."""

    clip: float = math.inf

    name: ClassVar[str] = "sgd"
    private: ClassVar[bool] = False
