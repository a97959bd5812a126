"""RRPSGD (paper 004, Algorithm 2): private SGD that stops at a random round, for nonconvex losses.

R is drawn first from P(R = k+1) ∝ 2η_k − βη_k². Only the iterate at R ever leaves, so δ(ε) is the average of
δ_R(ε) over R. The printed noise is a quarter of what its own proof needs and yet four to five times what the
accountant asks for, so the claim is true although the proof is not (``reproduce/output_perturbation.py`` runs it).

``BassilySGD`` is the baseline of paper 004 (Bassily, Smith, Thakurta 2014): noisy steps projected onto a ball.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import SettingError
from quietgrad.core.plans.schedule import plan
from quietgrad.core.sampling import SamplingName
from quietgrad.core.session.objectives import LossConstants
from quietgrad.core.settings import Count, NotNegative, Positive
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.base import FirstOrder, Output, check_known
from quietgrad.methods.learning_rates import Inverse, InverseSqrt, LearningRate
from quietgrad.methods.oracles.base import Oracle
from quietgrad.methods.oracles.gradient_estimators import MiniBatch

_MOST_STEPS = 10**7  # whose random round is averaged over in memory


@dataclass(frozen=True)
class RRPSGD(FirstOrder):
    """Noisy mini-batch descent that stops at a random round (RRPSGD).

    R steps of noisy mini-batch descent, R random; returns the iterate at R and nothing else.

    Args:
        batch_size: records per step; the paper has 1 and n² steps, (n/b)² steps of b records spend as much privacy
            for b times fewer gradients.
        steps: the largest R; :meth:`for_data` sets (n/b)².
        smoothness: β in the law of R (0: R ∝ η).

    >>> RRPSGD.for_data(1000, batch_size=50).steps
    400
    """

    steps: Count = 400
    batch_size: Count = 200
    learning_rate: float | str | LearningRate = 0.5
    clip: Positive = 1.0
    smoothness: NotNegative = 0.0
    sampling: SamplingName = "poisson"
    returns: Literal["random"] = "random"

    name: ClassVar[str] = "rrpsgd"
    first_round: ClassVar[int] = 1  # as printed, w_R after R steps; the proof of Theorem 5 is about R − 1 of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smoothness * max(self._rate(k, self.steps) for k in (0, self.steps - 1)) >= 2.0:
            raise ValueError("learning_rate: must stay below 2/smoothness; else P(R) is not a law.")

    @classmethod
    def for_data(cls, n: int, *, batch_size: int, **settings: Any) -> RRPSGD:
        """The settings for ``n`` records: (n/b)² steps."""
        return cls(steps=max(1, round((n / batch_size) ** 2)), batch_size=batch_size, **settings)

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        initial_gap: float,
        batch_size: int = 1,
        sampling: SamplingName = "poisson",
    ) -> RRPSGD:
        """Theorem 5's settings: (n/b)² steps of η = min{1/β, D_F/(σ√T)} with D_F = √(2·gap/β).

        σ² = 4L²/b + d(zL/b)² is the theorem's bound on E‖G − ∇F‖² with the noise that is really added; the printed
        one has b = 1 and the printed noise. β counts the regulariser, L does not: it cancels between neighbours.

        Args:
            constants: L and β of the loss at its row bound.
            initial_gap: F(w₀) − F* at most, a public number.

        >>> from quietgrad.objectives import Logistic
        >>> unit = Logistic(row_bound=1.0, rows="clip").constants()
        >>> made = RRPSGD.theory(unit, n=1000, dim=5, budget=Budget(1.0, 1e-5), initial_gap=0.7, batch_size=50)
        >>> made.steps, made.smoothness, made.learning_rate < 1 / made.smoothness
        (400, 0.25, True)
        """
        lipschitz, smooth = constants.needed("lipschitz", "smoothness")
        check_known(n, dim, budget, initial_gap=initial_gap, batch_size=batch_size)
        if (n / batch_size) ** 2 > _MOST_STEPS:
            raise SettingError(
                "{batch_size}: the theorem's (n/batch_size)² steps are too many to account for. "
                f"Use batch_size={math.ceil(n / math.sqrt(_MOST_STEPS))} or more.",
                batch_size=batch_size,
            )
        draft = cls.for_data(n, batch_size=batch_size, clip=lipschitz, smoothness=smooth, sampling=sampling,
                             learning_rate=1.0 / smooth)  # fmt: skip
        z = plan(draft, n=n, budget=budget).noise_multiplier
        spread = lipschitz * math.sqrt(4.0 / batch_size + dim * (z / batch_size) ** 2)
        reach = math.sqrt(2.0 * initial_gap / smooth)
        return replace(draft, learning_rate=min(1.0 / smooth, reach / (spread * math.sqrt(draft.steps))))

    def rounds(self) -> Sequence[float]:
        rates = [self.rate()(k, self.steps) for k in range(self.steps)]
        return [2.0 * eta - self.smoothness * eta * eta for eta in rates]

    def oracle(self) -> Oracle:
        return MiniBatch(self.batch_size, self.clip, self.sampling, self.law())


@dataclass(frozen=True)
class BassilySGD(FirstOrder):
    """Noisy SGD for convex losses by Bassily, Smith and Thakurta.

    (n/b)² noisy mini-batch steps, η_t ∝ 1/√t (convex) or 1/(μt) (strongly convex), projected to a ball.

    Args:
        steps: :meth:`for_data` sets (n/b)²; the original has n² steps of one record.
        radius: of the ball around the start that iterates are projected to.
        strong_convexity: μ > 0 makes the rate 1/(μt); otherwise it is learning_rate/√t.

    >>> BassilySGD.for_data(1000, batch_size=50).steps
    400
    """

    steps: Count = 400
    batch_size: Count = 200
    learning_rate: float = 0.5
    strong_convexity: NotNegative = 0.0
    clip: Positive = 1.0
    radius: Positive = 10.0
    sampling: SamplingName = "poisson"
    returns: Output = "last"

    name: ClassVar[str] = "bassily-sgd"

    @classmethod
    def for_data(cls, n: int, *, batch_size: int, **settings: Any) -> BassilySGD:
        """The settings for ``n`` records: (n/b)² steps."""
        return cls(steps=max(1, round((n / batch_size) ** 2)), batch_size=batch_size, **settings)

    def rate(self) -> LearningRate:
        return Inverse(1.0 / self.strong_convexity) if self.strong_convexity else InverseSqrt(self.learning_rate)

    def oracle(self) -> Oracle:
        return MiniBatch(self.batch_size, self.clip, self.sampling, self.law())

    def project(self, params: Vector) -> Vector:
        length = norm(params)
        return params if length <= self.radius else params * (self.radius / length)
