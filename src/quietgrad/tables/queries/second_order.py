"""Queries about curvature: how flat a point is, as scalars of one curator or as sums of many parties.

One record moves ‖Σ clip(∇fᵢ)‖ by at most G (triangle inequality) and λ_min(Σ ∇²fᵢ) by at most M (Weyl), so these
scalars need no more noise than a gradient of one coordinate. They are not sums over parties, though: parties
release gradients and whole Hessians (:class:`GradientsAndHessians`), whose noise covers Frobenius norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quietgrad.core.session.contributions import ClippingRule, check_clip
from quietgrad.core.session.objectives import Batch, HasHessian, Objective
from quietgrad.core.vectors import Vector, norm, zeros_like
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.privacy_units import UserLevelObjective
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


def hessian_rank(objective: object, dim: int) -> int:
    """By how much a record's Hessian is longer in Frobenius norm than in spectral norm, squared.

    1 for losses of one linear score: a record's Hessian has rank one, and a person's is a mean of such.
    """
    loss = objective.loss if isinstance(objective, UserLevelObjective) else objective
    return 1 if isinstance(loss, LinearObjective) else dim


@dataclass(frozen=True, slots=True, eq=False)
class GradientsAndHessians:
    """Σ clip_G(∇fᵢ(θ)) and Σ ∇²fᵢ(θ) at each of k points, as one vector.

    A Hessian is packed as its upper triangle with entries off the diagonal times √2, so that the vector is as long
    as the matrix in Frobenius norm. Equal noise on all entries is then noise of the Gaussian orthogonal ensemble.

    Args:
        points: (k, d).
        clip: G.
        smoothness: M, to which a record's Hessian is shortened in spectral norm.
        rank: what :func:`hessian_rank` is at most. Of a loss of which it is more, nothing is summed.
    """

    points: Floats
    clip: float
    smoothness: float
    rank: int

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        check_clip("smoothness", self.smoothness)
        if np.ndim(self.points) != 2 or not self.rank >= 1:
            raise ValueError(f"points and rank={self.rank!r}: must be points as rows, and a rank of at least 1.")

    @property
    def bound(self) -> float:
        """√(k(G² + rM²)): one record is in the gradient and the Hessian at every point."""
        return math.sqrt(len(self.points) * (self.clip**2 + self.rank * self.smoothness**2))

    def dim(self, records: object) -> int:
        """The length of the vector, k(d + d(d+1)/2)."""
        k, d = self.points.shape
        return int(k * (d + d * (d + 1) // 2))

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out += the sums."""
        d = self.points.shape[1]
        if hessian_rank(objective, d) > self.rank:
            raise ValueError(f"rank={self.rank}: a record's Hessian of this loss may have a larger one.")
        rows, columns = np.triu_indices(d)
        weights = np.where(rows == columns, 1.0, math.sqrt(2.0))
        parts = []
        for point in self.points:
            gradient = np.zeros(d)
            objective.add(batch, (point,), ClippingRule.gradient(self.clip), gradient)
            hessian = hessian_total(objective, batch, point, self.smoothness)
            parts += [gradient, hessian[rows, columns] * weights]
        out += np.concatenate(parts)

    def unpack(self, total: Floats) -> list[tuple[Floats, Floats]]:
        """The gradient and the Hessian at each point.

        >>> query = GradientsAndHessians(np.zeros((1, 2)), 1.0, 1.0, 1)
        >>> [(gradient, hessian)] = query.unpack(np.array([5.0, 6.0, 1.0, math.sqrt(2.0), 3.0]))
        >>> gradient.tolist(), hessian.round(9).tolist()
        ([5.0, 6.0], [[1.0, 1.0], [1.0, 3.0]])
        """
        d = self.points.shape[1]
        rows, columns = np.triu_indices(d)
        pairs = []
        for part in np.asarray(total, np.float64).reshape(len(self.points), -1):
            hessian = np.zeros((d, d))
            hessian[rows, columns] = part[d:] / np.where(rows == columns, 1.0, math.sqrt(2.0))
            hessian[columns, rows] = hessian[rows, columns]
            pairs.append((part[:d], hessian))
        return pairs
