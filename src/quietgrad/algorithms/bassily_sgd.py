"""Private SGD of Bassily, Smith and Thakurta (2014), the baseline of paper 004: noisy steps kept in a ball."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from quietgrad.algorithms.base import FirstOrder, Output, check_count, check_range
from quietgrad.algorithms.rates import Inverse, InverseSqrt, Rate
from quietgrad.oracles.base import Oracle, SamplingName
from quietgrad.oracles.minibatch import MiniBatch
from quietgrad.privacy.budget import Budget
from quietgrad.vectors import Vector, norm


@dataclass(frozen=True)
class BassilySGD(FirstOrder):
    """(n/b)² noisy mini-batch steps, η_t ∝ 1/√t (convex) or 1/(μt) (strongly convex), projected to a ball.

    Args:
        steps: :meth:`for_data` sets (n/b)²; the original has n² steps of one record.
        radius: of the ball around the start that iterates are projected to.
        strong_convexity: μ > 0 makes the rate 1/(μt); otherwise it is learning_rate/√t.
        noise: ``"tight"`` or ``"paper"`` (σ = √(32 log(n/δ) log(1/δ))·L/ε per record).

    >>> BassilySGD.for_data(1000, batch_size=50).steps
    400
    """

    steps: int = 400
    batch_size: int = 200
    learning_rate: float = 0.5
    strong_convexity: float = 0.0
    clip: float = 1.0
    radius: float = 10.0
    sampling: SamplingName = "poisson"
    noise: Literal["tight", "paper"] = "tight"
    returns: Output = "last"

    name: ClassVar[str] = "bassily-sgd"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        check_range("radius", self.radius, 0.0, math.inf, closed=False)
        check_range("strong_convexity", self.strong_convexity, 0.0, math.inf)
        super().__post_init__()

    @classmethod
    def for_data(cls, n: int, *, batch_size: int, **settings: object) -> BassilySGD:
        """The settings for ``n`` records: (n/b)² steps."""
        return cls(steps=max(1, round((n / batch_size) ** 2)), batch_size=batch_size, **settings)  # type: ignore[arg-type]

    def rate(self) -> Rate:
        return Inverse(1.0 / self.strong_convexity) if self.strong_convexity else InverseSqrt(self.learning_rate)

    def oracle(self) -> Oracle:
        return MiniBatch(self.batch_size, self.clip, self.sampling, self.law())

    def project(self, params: Vector) -> Vector:
        length = norm(params)
        return params if length <= self.radius else params * (self.radius / length)

    def paper_noise(self, n_public: int, budget: Budget) -> float | None:
        """σ/C = √(32 log(n/δ) log(1/δ))/ε, on the sum of a batch."""
        if self.noise != "paper":
            return None
        return math.sqrt(32 * math.log(n_public / budget.delta) * math.log(1 / budget.delta)) / budget.epsilon
