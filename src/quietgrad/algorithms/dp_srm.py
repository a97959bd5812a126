"""DP-SRM (paper 000, Algorithm 1): descent along a privately estimated recursive momentum.

On a federated curator the same file is DDP-SRM (Algorithm 2). The printed noise of Theorem 4.1 has no feasible
value at the paper's own budgets, and its Section 6.1 swaps C1 and C2; the noise here comes from the accountant and
the sensitivity is that of Remark 4.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quietgrad.algorithms.base import FirstOrder, Output, check_count, check_range
from quietgrad.algorithms.learning_rates import LearningRate
from quietgrad.oracles.base import Noise, Oracle
from quietgrad.oracles.gradient_estimators import RecursiveMomentum, first_apart
from quietgrad.sampling import SamplingName


@dataclass(frozen=True)
class DPSRM(FirstOrder):
    """Stochastic recursive momentum with clipping and noise (DP-SRM).

    θ ← θ − η_t v_t with v_t = (1−γ)v_{t−1} + (1/b)·(noisy sum of clipped combinations).

    Args:
        steps: T updates; one release ``first`` and T − 1 releases ``next``.
        batch_size, first_batch_size: b and b₀ (default b).
        first_noise: noise multiplier of the first release relative to the others.
        learning_rate: a number or a schedule of :mod:`quietgrad.algorithms.learning_rates`.
        gamma: γ, the weight of the fresh gradient.
        clip: C1, the bound on one record's gradient.
        difference_clip: C2, the bound on one record's gradient difference; default γ·C1/4. The noise of a step is
            proportional to (1−γ)C2 + γC1, so C2 = γC1 (the paper's choice) nearly doubles it.
        joint_clip: one clip C1·γ + C2·(1−γ) on the combination instead of two; never looser.
        smoothness: C2 follows the public step, smoothness × ‖θ_t − θ_{t−1}‖, at most ``difference_clip``.
        sampling, cohorts, noise: as in :class:`~quietgrad.algorithms.dp_sgd.DPSGD`.
        returns: ``"last"``, ``"average"``, ``"ema"`` or ``"random"`` (the paper's output rule:
            uniform on θ⁰ … θᵀ⁻¹).

    >>> [(s.name, s.count) for s in DPSRM(steps=1500, batch_size=100).schedule(32561).slots]
    [('first', 1), ('next', 1499)]
    """

    steps: int = 1000
    batch_size: int = 256
    learning_rate: float | str | LearningRate = 0.5
    gamma: float = 0.1
    clip: float = 1.0
    difference_clip: float | None = None
    joint_clip: bool = False
    smoothness: float | None = None
    first_batch_size: int | None = None
    first_noise: float = 1.0
    sampling: SamplingName = "poisson"
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"

    name: ClassVar[str] = "dp-srm"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_range("gamma", self.gamma, 0.0, 1.0, closed=False)
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        if self.difference_clip is not None:
            check_range("difference_clip", self.difference_clip, 0.0, math.inf)
        super().__post_init__()

    def oracle(self) -> Oracle:
        c2 = self.gamma * self.clip / 4.0 if self.difference_clip is None else self.difference_clip
        joint = self.gamma * self.clip + (1.0 - self.gamma) * c2
        if math.isinf(self.clip):
            c2 = joint = math.inf
        return RecursiveMomentum(
            batch_size=self.batch_size,
            first_batch_size=self.first_batch_size,
            gamma=self.gamma,
            clip=self.clip,
            difference_clip=joint if self.joint_clip else c2,
            joint_clip=self.joint_clip,
            smoothness=self.smoothness,
            sampling=self.sampling,
            first_noise=self.first_noise,
            law=self.law(after=int(first_apart(self))),
            cohorts=self.cohorts,
            noise=self.noise,
        )


@dataclass(frozen=True)
class STORM(DPSRM):
    """Recursive momentum without clipping or noise (Cutkosky & Orabona 2019): a baseline, **not private**."""

    clip: float = math.inf

    name: ClassVar[str] = "storm"
    private: ClassVar[bool] = False
