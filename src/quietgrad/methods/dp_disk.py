"""DiSK (Zhang et al. 2024, arXiv 2410.03883): DP-SGD whose gradients go through a simplified Kalman filter.

The filter predicts the gradient at θ_t from its last estimate and the curvature along the last step
d = θ_t − θ_{t−1}, and corrects the prediction by a fresh gradient:
g̃_t = (1−κ)(g̃_{t−1} + [∇F(θ_t + γd) − ∇F(θ_t)]/γ) + κ∇F(θ_t). All that depends on a record is one combination of its
gradients at two points, clipped once; the rest is post-processing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quietgrad.core.plans.schedule import Law, Slot
from quietgrad.core.sampling import SamplingName, sampling_of
from quietgrad.core.session.base import Session
from quietgrad.core.session.queries import Asked, GradientQuery, JointMomentumQuery
from quietgrad.core.settings import Count, Positive, PositiveFraction, Within
from quietgrad.core.vectors import Vector
from quietgrad.methods.base import FirstOrder, Output
from quietgrad.methods.learning_rates import LearningRate
from quietgrad.methods.oracles.base import Estimate, Noise, Oracle, slot_of


@dataclass(frozen=True)
class KalmanGradient(Oracle):
    """g̃ ← (1−κ)g̃ + κ·(1/b)[Σ clip_C(a∇fᵢ(θ + γd) − (a−1)∇fᵢ(θ)) + noise], a = (1−κ)/(κγ) ≥ 1.

    The sum that is released is of clip_{C/a}(∇fᵢ(θ + γd) − (1 − 1/a)∇fᵢ(θ)); times a it is the one above.
    """

    batch_size: int
    clip: float
    kappa: float
    lookahead: float
    sampling: SamplingName = "poisson"
    law: Law | None = None
    cohorts: int | None = None
    noise: Noise = "independent"

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        sampling = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        return (slot_of("gradient", sampling, steps, self.noise, self.law),)

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        size = session.expected_batch("gradient")
        if state.value is None:
            total = session.release("gradient", GradientQuery(params, self.clip))
            return Estimate(total * (1.0 / size), params, 0.0, 1)
        ahead = params + self.lookahead * (params - state.previous)
        total = session.release("gradient", self._query(ahead, params)) * (self.kappa * self._weight / size)
        return Estimate(total + (1.0 - self.kappa) * state.value, params, 0.0, state.calls + 1)

    @property
    def _weight(self) -> float:
        return (1.0 - self.kappa) / (self.kappa * self.lookahead)

    def _query(self, ahead: Vector, params: Vector) -> JointMomentumQuery:
        return JointMomentumQuery(ahead, params, min(1.0, 1.0 / self._weight), self.clip / self._weight)

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        yield "gradient", Asked(GradientQuery(params, self.clip))
        yield "gradient", Asked(self._query(params, params))


@dataclass(frozen=True)
class DPDiSK(FirstOrder):
    """DP-SGD on gradients that pass a Kalman filter (DiSK).

    θ ← θ − η_t·g̃_t, g̃ the filtered gradient of :class:`KalmanGradient`.

    Args:
        kappa: κ, the weight of what is fresh; 1 would be DP-SGD.
        lookahead: γ, at most (1−κ)/κ, where one gradient at θ + γd is enough.
        steps, batch_size, learning_rate, clip, sampling, returns, cohorts, noise: as in
            :class:`~quietgrad.methods.dp_sgd.DPSGD`.

    >>> DPDiSK(steps=10, batch_size=20).schedule(100).releases
    10
    """

    steps: Count = 1000
    batch_size: Count = 256
    learning_rate: float | str | LearningRate = 0.5
    clip: Positive = 1.0
    kappa: PositiveFraction = 0.7
    lookahead: float = 0.4
    sampling: SamplingName = "poisson"
    returns: Output = "last"
    cohorts: int | None = None
    noise: Noise = "independent"

    name: ClassVar[str] = "dp-disk"

    def __post_init__(self) -> None:
        super().__post_init__()
        Within(0.0, (1.0 - self.kappa) / self.kappa * (1 + 1e-12), closed=False).check("lookahead", self.lookahead)

    def oracle(self) -> Oracle:
        sizes = (self.batch_size, self.clip, self.kappa, self.lookahead)
        return KalmanGradient(*sizes, self.sampling, self.law(), self.cohorts, self.noise)
