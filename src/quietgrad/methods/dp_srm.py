"""DP-SRM (paper 000, Algorithm 1): descent along a privately estimated recursive momentum.

On a federated curator the same file is DDP-SRM (Algorithm 2). The printed noise of Theorem 4.1 has no feasible
value at the paper's own budgets, and its Section 6.1 swaps C1 and C2; the noise here comes from the accountant and
the sensitivity is that of Remark 4.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.sampling import SamplingName
from quietgrad.core.session.clipping import FLAT, Clipping, ClippingName, read_clipping
from quietgrad.core.session.objectives import LossConstants
from quietgrad.core.settings import Count, NotNegative, Positive, Within
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.base import FirstOrder, Output, State, check_known
from quietgrad.methods.learning_rates import LearningRate
from quietgrad.methods.oracles.base import Noise, Oracle
from quietgrad.methods.oracles.gradient_estimators import RecursiveMomentum, first_apart


@dataclass(frozen=True)
class DPSRM(FirstOrder):
    """Stochastic recursive momentum with clipping and noise (DP-SRM).

    θ ← θ − η_t v_t with v_t = (1−γ)v_{t−1} + (1/b)·(noisy sum of clipped combinations).

    Args:
        steps: T updates; one release ``first`` and T − 1 releases ``next``.
        batch_size: b, expected records of a release.
        first_batch_size: b₀, expected records of the first release (default b).
        first_noise: noise multiplier of the first release relative to the others.
        learning_rate: a number or schedule (practical mode).
        gamma: γ, the weight of the fresh gradient.
        clip: C1, the bound on one record's gradient.
        difference_clip: C2, the bound on one record's gradient difference; default γ·C1/4. The noise of a step is
            proportional to (1−γ)C2 + γC1, so C2 = γC1 (the paper's choice) nearly doubles it.
        joint_clip: one clip C1·γ + C2·(1−γ) on the combination instead of two; never looser.
        smoothness: C2 follows the public step, smoothness × ‖θ_t − θ_{t−1}‖, at most ``difference_clip``.
        clipping, sampling, cohorts, noise: as in :class:`~quietgrad.methods.dp_sgd.DPSGD`.
        mode: ``"practical"``, or ``"theory"`` with η_t = min{ζ/(L‖v_t‖), 1/(2L)}; see :meth:`theory`.
        zeta: ζ, of the theory mode alone.
        returns: ``"last"``, ``"average"``, ``"ema"`` or ``"random"`` (the paper's output rule:
            uniform on θ⁰ … θᵀ⁻¹).

    >>> [(s.name, s.count) for s in DPSRM(steps=1500, batch_size=100).schedule(32561).slots]
    [('first', 1), ('next', 1499)]
    """

    steps: Count = 1000
    batch_size: Count = 256
    learning_rate: float | str | LearningRate = 0.5
    gamma: Annotated[float, Within(0.0, 1.0, closed=False)] = 0.1
    clip: Positive = 1.0
    difference_clip: NotNegative | None = None
    joint_clip: bool = False
    smoothness: float | None = None
    first_batch_size: int | None = None
    first_noise: float = 1.0
    sampling: SamplingName = "poisson"
    mode: Literal["practical", "theory"] = "practical"
    zeta: float | None = None
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"
    clipping: ClippingName | Clipping = "flat"

    name: ClassVar[str] = "dp-srm"

    def __post_init__(self) -> None:
        if self.mode == "theory" and (self.zeta is None or self.smoothness is None):
            raise ValueError(
                "mode='theory' needs zeta and smoothness: build it with DPSRM.theory(constants, ...), "
                "which an objective with bounded rows can supply."
            )
        if self.mode == "theory" and read_clipping(self.clipping) != FLAT:
            raise ValueError("mode='theory': its theorem is about flat clipping; leave clipping out.")
        super().__post_init__()

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        initial_gap: float,
        scale: float = 1.0,
        sampling: SamplingName = "poisson",
    ) -> DPSRM:
        """Theorem 4.4's settings, its unspecified absolute constants all taken as ``scale``.

        T = nε√(L·D_F)/(G√(d log(1/δ))), ζ = √G·(L·D_F·d log(1/δ))^¼/√(nε), b₀ = G²/(ζ²·L·D_F), b = G²/ζ, γ = ζ,
        clips C1 = G and C2 = ζ (a step moves at most ζ/L), output a uniformly random iterate. These make the
        theorem hold and are no way to a good model: steps of ζ/L are so short that on a9a at ε = 0.5 the run ends
        near its start (``docs/methods/papers.md`` has the numbers); tune the practical settings instead.

        Args:
            constants: G and L of the loss at its row bound.
            initial_gap: D_F ≥ F(θ⁰) − min F, a public number.
        """
        g, smooth = constants.needed("lipschitz", "smoothness")
        check_known(n, dim, budget, initial_gap=initial_gap, scale=scale)
        root = math.sqrt(dim * math.log(1.0 / budget.delta))
        ne = n * budget.epsilon
        zeta = scale * math.sqrt(g) * math.sqrt(math.sqrt(smooth * initial_gap) * root) / math.sqrt(ne)
        steps = max(2, round(scale * ne * math.sqrt(smooth * initial_gap) / (g * root)))
        return cls(
            steps=steps,
            batch_size=min(n, max(1, round(scale * g * g / zeta))),
            first_batch_size=min(n, max(1, round(scale * g * g / (zeta * zeta * smooth * initial_gap)))),
            learning_rate=1.0 / (2.0 * smooth),
            gamma=min(1.0, scale * zeta),
            clip=g,
            difference_clip=zeta,
            smoothness=smooth,
            sampling=sampling,
            mode="theory",
            zeta=zeta,
            returns="random",
        )

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
            law=self.law(after=int(first_apart(self.sampling, self.cohorts, self.noise))),
            cohorts=self.cohorts,
            noise=self.noise,
            clipping=self.clipping,
        )

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        size = self._rate(state.step, self.steps)
        if self.mode == "theory" and self.zeta is not None and self.smoothness is not None:
            length = norm(gradient)
            size = min(size, self.zeta / (self.smoothness * length) if length > 0.0 else size)
        return size, gradient


@dataclass(frozen=True)
class STORM(DPSRM):
    """Recursive momentum without noise, a baseline that is **not private**.

    Nothing is clipped (Cutkosky & Orabona 2019).
    """

    clip: Positive = math.inf

    name: ClassVar[str] = "storm"
    private: ClassVar[bool] = False
