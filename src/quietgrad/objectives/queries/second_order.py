"""Queries about curvature: how flat a point is, as scalars or as a whole noisy Hessian.

One record moves ‖Σ clip(∇fᵢ)‖ by at most G (triangle inequality) and λ_min(Σ ∇²fᵢ) by at most M (Weyl), so these
scalars need no more noise than a gradient of one coordinate. A released Hessian needs noise for its Frobenius norm,
which is up to √d times M; for losses of linear scores, whose Hessians have rank one, it is M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Batch, ClippingRule, HasHessian, Objective, check_clip
from quietgrad.vectors import Vector, norm, zeros_like

Floats = npt.NDArray[np.float64]


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
    def dim(self, records: Any) -> int:
        """One number."""
        return 1


@dataclass(frozen=True, slots=True, eq=False)
class GradientNorm(_Scalar):
    """‖Σ clip_C(∇fᵢ(θ)) + n∇r(θ)‖, n the public number of records the regulariser r counts for."""

    params: Vector
    clip: float
    n: float

    @property
    def bound(self) -> float:
        """C."""
        return self.clip

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out += the norm."""
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
        """M."""
        return self.smoothness

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out += the eigenvalue."""
        out += float(np.linalg.eigvalsh(_risk_hessian(self, objective, batch))[0])


@dataclass(frozen=True, slots=True, eq=False)
class Excess(_Scalar):
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
        """1."""
        return 1.0

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out += the excess."""
        slope, curve = np.zeros(1), np.zeros(1)
        GradientNorm(self.params, self.clip, self.n).sum_into(objective, batch, slope)
        LeastEigenvalue(self.params, self.smoothness, self.n).sum_into(objective, batch, curve)
        steep = (float(slope[0]) - self.n * self.alpha) / self.clip
        bent = (-float(curve[0]) - self.n * math.sqrt(self.rho * self.alpha)) / self.smoothness
        out += max(steep, bent)


@dataclass(frozen=True, slots=True, eq=False)
class PackedHessian:
    """The upper triangle of Σ ∇²fᵢ(θ), row by row.

    With ``isometric`` off-diagonal entries are multiplied by √2, so that the packed vector is as long as the matrix
    in Frobenius norm; equal noise on all its entries is then noise of the Gaussian orthogonal ensemble, √2 less off
    the diagonal than the independent triangle of paper 003's Algorithm 4 at the same privacy. ``rank`` bounds the
    rank of one record's Hessian (default d).
    """

    params: Vector
    smoothness: float
    isometric: bool = True
    rank: int | None = None

    def __post_init__(self) -> None:
        check_clip("smoothness", self.smoothness)

    @property
    def bound(self) -> float:
        """M·√rank, the Frobenius norm of one record's Hessian; its triangle is no longer."""
        return self.smoothness * math.sqrt(len(self.params) if self.rank is None else self.rank)

    def dim(self, records: Any) -> int:
        """d(d+1)/2."""
        d = len(self.params)
        return d * (d + 1) // 2

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out += the packed sum."""
        total = hessian_total(objective, batch, self.params, self.smoothness)
        rows, columns = np.triu_indices(len(self.params))
        packed = total[rows, columns]
        if self.isometric:
            packed[rows != columns] *= math.sqrt(2.0)
        out += packed

    def unpack(self, packed: Floats) -> Floats:
        """The symmetric matrix a packed vector stands for.

        >>> PackedHessian(np.zeros(2), 1.0).unpack(np.array([1.0, math.sqrt(2.0), 3.0])).round(9).tolist()
        [[1.0, 1.0], [1.0, 3.0]]
        """
        d = len(self.params)
        rows, columns = np.triu_indices(d)
        values = np.array(packed)
        if self.isometric:
            values[rows != columns] /= math.sqrt(2.0)
        matrix = np.zeros((d, d))
        matrix[rows, columns] = values
        matrix[columns, rows] = values
        return matrix


def _risk_hessian(query: LeastEigenvalue, objective: Objective, batch: Batch) -> Floats:
    total = hessian_total(objective, batch, query.params, query.smoothness)
    if objective.regularizer.smoothness:
        total[np.diag_indices(len(total))] += query.n * objective.regularizer.curvature(query.params)
    return total
