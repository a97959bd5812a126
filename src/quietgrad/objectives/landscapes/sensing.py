"""Low-rank matrix sensing and phase retrieval: every local minimum is global, every other critical point a saddle.

Matrix sensing sees X* = U*U*ᵀ through sᵀX*t with independent sign vectors s and t, so the population risk is
½‖UUᵀ − X*‖² + τ²/2 exactly. Phase retrieval sees (aᵀx*)² with a uniform on the sphere of radius √d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.landscapes.base import Floats, Landscape, SyntheticRecords


@dataclass(frozen=True)
class MatrixSensing(Landscape):
    """f(U; s, t, ε) = ½(sᵀ(UUᵀ − X*)t − τε)², U of shape (size, rank), X* a projector of that rank.

    The saddle is U = 0 with curvature −2; there every record's gradient vanishes, so only noise can leave it. At
    the minima U*Q, Q a rotation, the Hessian has zero eigenvalues along rotations. Domain: ‖U‖ ≤ 1.5√rank.

    >>> sensing = MatrixSensing(size=3, rank=1)
    >>> sensing.population_risk(sensing.minimum()) == 0.5 * sensing.label_noise**2
    True
    """

    size: int = 5
    rank: int = 2
    label_noise: float = 0.1

    name: ClassVar[str] = "matrix-sensing"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.size:
            raise ValueError(f"size={self.size!r}, rank={self.rank!r}: must be 1 ≤ rank ≤ size.")
        _check_noise(self.label_noise)

    @property
    def dim(self) -> int:
        return self.size * self.rank

    @property
    def radius(self) -> float:
        return 1.5 * math.sqrt(self.rank)

    def _moduli(self) -> tuple[float, float, float]:
        # With B = stᵀ + tsᵀ: ‖B‖ ≤ 2p, |sᵀEt| ≤ p‖E‖, ∇f = rBU, ∇²f = (BU)(BU)ᵀ + rB; F'' moves by 12‖U‖.
        p, far = self.size, self.radius
        residual = p * (far**2 + 1.0) + self.label_noise
        return residual * 2.0 * p * far, (2.0 * p * far) ** 2 + 2.0 * p * residual, 12.0 * far

    def _truth(self) -> Floats:
        return np.eye(self.size, self.rank)

    def saddle(self) -> Floats:
        return np.zeros(self.dim)

    @property
    def saddle_curvature(self) -> float:
        return -2.0

    def minimum(self) -> Floats:
        return self._truth().ravel()

    def _error(self, params: Floats) -> tuple[Floats, Floats]:
        u, truth = params.reshape(self.size, self.rank), self._truth()
        return u, u @ u.T - truth @ truth.T

    def population_risk(self, params: Floats) -> float:
        return 0.5 * float((self._error(params)[1] ** 2).sum()) + 0.5 * self.label_noise**2

    def population_gradient(self, params: Floats) -> Floats:
        u, error = self._error(params)
        return (2.0 * error @ u).ravel()

    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        u, error = self._error(params)
        v = vector.reshape(u.shape)
        return (2.0 * ((v @ u.T + u @ v.T) @ u + error @ v)).ravel()

    def _draw(self, n: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
        s, t = (2.0 * rng.integers(0, 2, (n, self.size)) - 1.0 for _ in range(2))
        return {"s": s, "t": t, "noise": self.label_noise * (2.0 * rng.integers(0, 2, n) - 1.0)}

    def _residuals(self, records: SyntheticRecords, which: Any, params: Floats) -> tuple[Floats, ...]:
        s, t, error = records["s"][which], records["t"][which], self._error(params)[1]
        return s, t, np.einsum("ni,ij,nj->n", s, error, t, optimize=True) - records["noise"][which]

    def _losses(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        return np.asarray(0.5 * self._residuals(records, which, params)[2] ** 2)

    def _gradients(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        s, t, residuals = self._residuals(records, which, params)
        return residuals[:, None] * self._directions(s, t, params)

    def _directions(self, s: Floats, t: Floats, params: Floats) -> Floats:
        """BU of each record, flat."""
        u = params.reshape(self.size, self.rank)
        rows = s[:, :, None] * (t @ u)[:, None, :] + t[:, :, None] * (s @ u)[:, None, :]
        return np.asarray(rows.reshape(len(s), self.dim))

    def _hessians(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        s, t, residuals = self._residuals(records, which, params)
        rows = self._directions(s, t, params)
        outer = s[:, :, None] * t[:, None, :]
        b = residuals[:, None, None] * (outer + outer.transpose(0, 2, 1))
        hessians = rows[:, :, None] * rows[:, None, :]
        # rB acts on each column of U alike: entries ((i, c), (k, c)).
        blocks = hessians.reshape(-1, self.size, self.rank, self.size, self.rank)
        for c in range(self.rank):
            blocks[:, :, c, :, c] += b
        return np.asarray(hessians)


@dataclass(frozen=True)
class PhaseRetrieval(Landscape):
    """f(x; a, ε) = ¼((aᵀx)² − (aᵀx*)² − τε)², x* = e₁.

    With c = d/(d+2) the population risk is (c/4)[3‖x‖⁴ + 3 − 2‖x‖² − 4x₁²] + τ²/4. The saddle is e₂/√3 with
    curvature −2c, like all points of that length orthogonal to x*; the minima are ±x*; the origin is a maximum.
    Domain: ‖x‖ ≤ 1.5.

    >>> retrieval = PhaseRetrieval(d=4)
    >>> bool(abs(retrieval.population_gradient(retrieval.saddle())).max() < 1e-15)
    True
    """

    d: int = 10
    label_noise: float = 0.1

    name: ClassVar[str] = "phase-retrieval"

    def __post_init__(self) -> None:
        if self.d < 2:
            raise ValueError(f"d={self.d!r}: must be ≥ 2; with one coordinate there is no saddle.")
        _check_noise(self.label_noise)

    @property
    def dim(self) -> int:
        return self.d

    @property
    def radius(self) -> float:
        return 1.5

    @property
    def _scale(self) -> float:
        return self.d / (self.d + 2.0)

    def _moduli(self) -> tuple[float, float, float]:
        # |aᵀx| ≤ √d·‖x‖ and |(aᵀx)² − y| ≤ d·max(‖x‖², 1) + τ; F''(x) − F''(x′) is at most 18c‖x‖-Lipschitz.
        far, p = self.radius, self.d
        residual = p * far**2 + self.label_noise
        return residual * p * far, (3.0 * p * far**2 + self.label_noise) * p, 18.0 * self._scale * far

    def saddle(self) -> Floats:
        point = np.zeros(self.d)
        point[1] = 1.0 / math.sqrt(3.0)
        return point

    @property
    def saddle_curvature(self) -> float:
        return -2.0 * self._scale

    def minimum(self) -> Floats:
        return np.asarray(np.eye(1, self.d)[0])

    def population_risk(self, params: Floats) -> float:
        square = float(params @ params)
        bracket = 3.0 * square**2 + 3.0 - 2.0 * square - 4.0 * float(params[0]) ** 2
        return 0.25 * (self._scale * bracket + self.label_noise**2)

    def population_gradient(self, params: Floats) -> Floats:
        out: Floats = (3.0 * float(params @ params) - 1.0) * params
        out[0] -= 2.0 * params[0]
        return self._scale * out

    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        out: Floats = (3.0 * float(params @ params) - 1.0) * vector + 6.0 * float(params @ vector) * params
        out[0] -= 2.0 * vector[0]
        return np.asarray(self._scale * out)

    def _draw(self, n: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
        a = rng.standard_normal((n, self.d))
        a *= math.sqrt(self.d) / np.linalg.norm(a, axis=1, keepdims=True)
        return {"a": a, "y": a[:, 0] ** 2 + self.label_noise * (2.0 * rng.integers(0, 2, n) - 1.0)}

    def _losses(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        return np.asarray(0.25 * ((records["a"][which] @ params) ** 2 - records["y"][which]) ** 2)

    def _gradients(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        a = records["a"][which]
        q = a @ params
        return np.asarray(((q * q - records["y"][which]) * q)[:, None] * a)

    def _hessians(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        a = records["a"][which]
        bend = 3.0 * (a @ params) ** 2 - records["y"][which]
        return np.asarray(bend[:, None, None] * a[:, :, None] * a[:, None, :])


def _check_noise(value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"label_noise={value!r}: must be a finite number ≥ 0.")
