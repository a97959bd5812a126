"""Queries about curvature: how flat a point is, as scalars.

One record moves ‖Σ clip(∇fᵢ)‖ by at most G (triangle inequality) and λ_min(Σ ∇²fᵢ) by at most M (Weyl), so these
scalars need no more noise than a gradient of one coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quietgrad.core.session.queries import Batch, ClippingRule, HasHessian, Objective
from quietgrad.core.vectors import Vector, norm, zeros_like
from quietgrad.tables.table import Floats


def hessian_total(objective: Objective, batch: Batch, params: Vector, clip: float) -> Floats:
    """Σ ∇²fᵢ(θ) over a batch, each shortened to a spectral norm of at most ``clip``; (d, d)."""
    if not isinstance(objective, HasHessian):
        raise ValueError(
            f"{type(objective).__name__}: a summed Hessian is known for landscapes and one-score losses."
        )
    out = np.zeros((len(params), len(params)))
    objective.add_hessians(batch, params, clip, out)
    return out


class _Scalar:
    def dim(self, records: object) -> int:
        return 1


@dataclass(frozen=True, slots=True, eq=False)
class GradientNorm(_Scalar):
    """‖Σ clip_C(∇fᵢ(θ)) + n∇r(θ)‖, n the public number of records the regulariser r counts for."""

    params: Vector
    clip: float
    n: float

    @property
    def bound(self) -> float:
        return self.clip

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        total = zeros_like(self.params)
        objective.add(batch, (self.params,), ClippingRule.gradient(self.clip), total)
        out += norm(total + self.n * objective.regularizer.gradient(self.params))


@dataclass(frozen=True, slots=True, eq=False)
class LeastEigenvalue(_Scalar):
    """λ_min(Σ ∇²fᵢ(θ) + n∇²r(θ)), every record's Hessian shortened to spectral norm M."""

    params: Vector
    smoothness: float
    n: float

    @property
    def bound(self) -> float:
        return self.smoothness

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        total = hessian_total(objective, batch, self.params, self.smoothness)
        if objective.regularizer.smoothness:
            total[np.diag_indices(len(total))] += self.n * objective.regularizer.curvature(self.params)
        out += float(np.linalg.eigvalsh(total)[0])


@dataclass(frozen=True, slots=True, eq=False)
class StationarityGap(_Scalar):
    """How far a point is from second-order stationary: max((‖∇‖ − nα)/G, (−λ_min − n√(ρα))/M), as sums.

    At most 0 exactly where the empirical risk of the batch is α-second-order stationary; one record moves it by at
    most 1, so one noisy comparison judges both conditions.
    """

    params: Vector
    alpha: float
    rho: float
    clip: float
    smoothness: float
    n: float

    @property
    def bound(self) -> float:
        return 1.0

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        slope, curve = np.zeros(1), np.zeros(1)
        GradientNorm(self.params, self.clip, self.n).sum_into(objective, batch, slope)
        LeastEigenvalue(self.params, self.smoothness, self.n).sum_into(objective, batch, curve)
        steep = (float(slope[0]) - self.n * self.alpha) / self.clip
        bent = (-float(curve[0]) - self.n * math.sqrt(self.rho * self.alpha)) / self.smoothness
        out += max(steep, bent)
