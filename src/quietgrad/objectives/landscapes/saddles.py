"""Two landscapes with strict saddles: a quadratic with quartic walls, and a small network with symmetric units.

*Strict saddle.* F(x) = ½ Σ λᵢxᵢ² + (w/4) Σ_{i<k} xᵢ⁴ with λᵢ = −γ for i < k and 1 beyond. The origin is a strict
saddle of curvature −γ; the minima are (±√(γ/w), …, 0, …), where the Hessian is 2γ and 1. A record adds noise to
curvature and slope,

    f(x; s, σ, j) = ½(1 + a·s) Σ λᵢxᵢ² + (w/4) Σ_{i<k} xᵢ⁴ + ς·σ·x_j,   s, σ = ±1, j uniform,

so records are of 4d kinds: a batch is counted by kind and summed over kinds in O(d).

*Saddle network.* f(W, v; x, y) = ½(Σ_k v_k tanh(w_k·x) − y)². At the origin the gradient is zero for every record,
and the Hessian couples w_k with v_k through −E[y·x]: its least eigenvalue is −‖E[y·x]‖. Inputs come from a fixed
public design of points, each with the teacher's label ± τ, so population values are exact sums over the design.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Batch, ClippingRule, Indices, rounding_safe_clip
from quietgrad.objectives.landscapes.base import Floats, Landscape, SyntheticRecords, _shortening

_SIGNS = np.array([-1.0, 1.0])
_REACH = 1.15  # the domain goes this much beyond the minima, and half as far as they lie in the flat directions


@dataclass(frozen=True)
class StrictSaddle(Landscape):
    """The strict saddle of paper 003's definitions, with everything about it known.

    Domain: |xᵢ| ≤ 1.15·√(γ/w) in the descending directions and a ball of radius ½√(γ/w) in the others.

    Args:
        d: dimension.
        descending: k, the number of directions that lead down.
        curvature: γ.
        wall: w.
        curvature_noise: a.
        slope_noise: ς.

    >>> hill = StrictSaddle(d=3)
    >>> hill.population_risk(hill.minimum()), hill.population_risk(hill.saddle())
    (-0.25, 0.0)
    >>> round(hill.constants().hessian_lipschitz, 3)
    6.9
    """

    d: int = 10
    descending: int = 1
    curvature: float = 1.0
    wall: float = 1.0
    curvature_noise: float = 0.25
    slope_noise: float = 0.5

    name: ClassVar[str] = "strict-saddle"

    def __post_init__(self) -> None:
        if not 1 <= self.descending <= self.d:
            raise ValueError(f"descending={self.descending!r}, d={self.d!r}: must be 1 ≤ descending ≤ d.")
        for name in ("curvature", "wall"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a finite number > 0.")
        if not (0.0 <= self.curvature_noise < 1.0 and 0.0 <= self.slope_noise < math.inf):
            raise ValueError("curvature_noise must be in [0, 1) and slope_noise finite and ≥ 0.")

    @property
    def dim(self) -> int:
        return self.d

    @property
    def radius(self) -> float:
        return math.hypot(_REACH * math.sqrt(self.descending), 0.5) * self._depth

    @property
    def _depth(self) -> float:
        """How far the minima lie along each descending direction."""
        return math.sqrt(self.curvature / self.wall)

    def inside(self, params: Floats) -> bool:
        steep, flat = params[: self.descending], params[self.descending :]
        return bool(np.abs(steep).max() <= _REACH * self._depth and np.linalg.norm(flat) <= 0.5 * self._depth)

    def _moduli(self) -> tuple[float, float, float]:
        a, gamma, wall, far = self.curvature_noise, self.curvature, self.wall, _REACH * self._depth
        # |−γ(1±a)x + wx³| on [0, far] peaks inside at √(γ(1+a)/3w) or at the end.
        turn = math.sqrt(gamma * (1.0 + a) / (3.0 * wall))
        steep = max(2.0 / 3.0 * gamma * (1.0 + a) * turn, wall * far**3 - gamma * (1.0 - a) * far)
        flat = 0.5 * (1.0 + a) * self._depth if self.d > self.descending else 0.0
        lipschitz = math.hypot(steep * math.sqrt(self.descending), flat) + self.slope_noise
        smoothness = max(gamma * (1.0 + a), 3.0 * wall * far**2 - gamma * (1.0 - a))
        if self.d > self.descending:
            smoothness = max(smoothness, 1.0 + a)
        return lipschitz, smoothness, 6.0 * wall * far

    def saddle(self) -> Floats:
        return np.zeros(self.d)

    @property
    def saddle_curvature(self) -> float:
        return -self.curvature

    def minimum(self) -> Floats:
        point = np.zeros(self.d)
        point[: self.descending] = self._depth
        return point

    def population_risk(self, params: Floats) -> float:
        steep = params[: self.descending]
        return 0.5 * float(params @ self._slope(params)) + 0.25 * self.wall * float((steep**4).sum())

    def population_gradient(self, params: Floats) -> Floats:
        return self._slope(params) + self._push(params)

    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        return self._curve(params, 0.0) * vector

    def _slope(self, params: Floats) -> Floats:
        """Λx."""
        out = params.copy()
        out[: self.descending] *= -self.curvature
        return out

    def _push(self, params: Floats) -> Floats:
        """The gradient of the walls."""
        out = np.zeros_like(params)
        out[: self.descending] = self.wall * params[: self.descending] ** 3
        return out

    def _curve(self, params: Floats, sign: float) -> Floats:
        """The diagonal of a record's Hessian; ``sign`` 0 gives the population's."""
        out = self._slope(np.full(self.d, 1.0 + self.curvature_noise * sign))
        out[: self.descending] += 3.0 * self.wall * params[: self.descending] ** 2
        return out

    # --- records by kind ----------------------------------------------------------------------------------------

    def _draw(self, n: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
        return {"kind": rng.integers(0, 4 * self.d, n, dtype=np.int32)}

    def _counts(self, records: SyntheticRecords, indices: Indices | None) -> Floats:
        """How many records of each kind (s, σ, j)."""
        if indices is None:
            if "kind" not in records.totals:
                records.totals["kind"] = self._counts(records, np.arange(len(records)))
            return records.totals["kind"]
        counts = np.bincount(records["kind"][indices], minlength=4 * self.d)
        return counts.reshape(2, 2, self.d).astype(np.float64)

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        alpha, beta, first, gamma, second = rule.numbers
        counts = self._counts(batch.records, batch.indices)
        with np.errstate(over="ignore", invalid="ignore"):
            slope, push = self._slope(points[0]), self._push(points[0])
            if beta:
                moved = slope - beta * self._slope(points[1]), push - beta * self._push(points[1])
            else:
                moved = slope, push
            out += alpha * self._sum(counts, *moved, (1.0 - beta) * self.slope_noise, first)
            if gamma:
                out += gamma * self._sum(counts, slope, push, self.slope_noise, second)

    def _sum(self, counts: Floats, slope: Floats, push: Floats, noise: float, clip: float) -> Floats:
        """Σ over kinds of count · clip((1 + a·s)·slope + push + noise·σ·e_j)."""
        total = np.zeros(self.d)
        for s, by_sign in zip(_SIGNS, counts, strict=True):
            body = (1.0 + self.curvature_noise * s) * slope + push
            if not np.isfinite(body).all():
                continue  # such contributions count as zero
            squares = body * body
            # ‖body‖² without its j-th term, by sums from both ends: subtracting would lose digits.
            rest = np.zeros(self.d)
            rest[1:] += np.cumsum(squares)[:-1]
            rest[:-1] += np.cumsum(squares[::-1])[::-1][1:]
            for sigma, count in zip(_SIGNS, by_sign, strict=True):
                lengths = np.sqrt(rest + (body + sigma * noise) ** 2)
                weights = count * _shortening(lengths, clip)
                total += weights.sum() * body
                total += (sigma * noise) * weights
        return total

    def _losses(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        s, sigma, j = np.unravel_index(records["kind"][which], (2, 2, self.d))
        bend, steep = 0.5 * float(params @ self._slope(params)), params[: self.descending]
        losses: Floats = (1.0 + self.curvature_noise * _SIGNS[s]) * bend
        losses += 0.25 * self.wall * float((steep**4).sum()) + self.slope_noise * _SIGNS[sigma] * params[j]
        return losses

    def _gradients(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        s, sigma, j = np.unravel_index(records["kind"][which], (2, 2, self.d))
        rows: Floats = (1.0 + self.curvature_noise * _SIGNS[s])[:, None] * self._slope(params) + self._push(params)
        rows[np.arange(len(j)), j] += self.slope_noise * _SIGNS[sigma]
        return rows

    def _hessians(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        s = np.unravel_index(records["kind"][which], (2, 2, self.d))[0]
        both = np.stack([np.diag(self._curve(params, sign)) for sign in _SIGNS])
        return both[s]

    def add_hessians(self, batch: Batch, params: Floats, clip: float, out: Floats) -> None:
        counts = self._counts(batch.records, batch.indices).sum(axis=(1, 2))
        for sign, count in zip(_SIGNS, counts, strict=True):
            with np.errstate(over="ignore"):
                diagonal = self._curve(params, sign)
            if np.isfinite(diagonal).all():
                factor = _shortening(np.abs(diagonal).max(keepdims=True), rounding_safe_clip(clip))[0]
                out[np.diag_indices(self.d)] += count * factor * diagonal

    def risk(self, records: SyntheticRecords, params: Floats) -> float:
        counts, steep = self._counts(records, None), params[: self.descending]
        s, sigma, j = (counts.sum(axis=(1, 2)) @ _SIGNS, counts.sum(axis=(0, 2)), counts.sum(axis=0))
        bend = 0.5 * float(params @ self._slope(params)) * (counts.sum() + self.curvature_noise * s)
        wall = 0.25 * self.wall * float((steep**4).sum()) * sigma.sum()
        return float(bend + wall + self.slope_noise * float((_SIGNS @ j) @ params)) / len(records)

    def hessian_product(self, records: SyntheticRecords, params: Floats, vector: Floats) -> Floats:
        tilt = float(self._counts(records, None).sum(axis=(1, 2)) @ _SIGNS) / len(records)
        return self._curve(params, tilt) * vector


_POINTS = 512
_DESIGN = 2024  # seed of the public design and teacher


@dataclass(frozen=True)
class TwoLayer(Landscape):
    """Parameters (W flat, v); a teacher of the same shape reaches the least risk τ²/2. Domain: ‖(W, v)‖ ≤ 4.

    Inputs are unit vectors. On the domain every record has |output − y| ≤ ½R² + Y + τ with Y the largest label,
    since Σ|v_k|‖w_k‖ ≤ ½R².

    >>> net = TwoLayer(inputs=3, hidden=2)
    >>> net.dim, bool(net.saddle_curvature < 0.0)
    (8, True)
    """

    inputs: int = 4
    hidden: int = 3
    label_noise: float = 0.1

    name: ClassVar[str] = "two-layer"

    def __post_init__(self) -> None:
        if self.inputs < 1 or self.hidden < 1:
            raise ValueError(f"inputs={self.inputs!r}, hidden={self.hidden!r}: must be ≥ 1.")
        if not 0.0 <= self.label_noise < math.inf:
            raise ValueError(f"label_noise={self.label_noise!r}: must be a finite number ≥ 0.")

    @property
    def dim(self) -> int:
        return self.hidden * (self.inputs + 1)

    @property
    def radius(self) -> float:
        return 4.0

    @cached_property
    def _design(self) -> tuple[Floats, Floats, Floats]:
        """Points, their labels, and the teacher."""
        rng = np.random.default_rng(_DESIGN)
        x = rng.standard_normal((_POINTS, self.inputs))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        w = rng.standard_normal((self.hidden, self.inputs))
        w *= 1.5 / np.linalg.norm(w, axis=1, keepdims=True)
        teacher = np.concatenate([w.ravel(), np.full(self.hidden, 1.0)])
        teacher *= min(1.0, 0.75 * self.radius / float(np.linalg.norm(teacher)))
        return x, self._parts(x, teacher)[3], teacher

    def _moduli(self) -> tuple[float, float, float]:
        # J = (v_kφ'_k x, φ_k): ‖J‖² ≤ Σ v_k² + Σ w_k² ≤ R². D²out has blocks v_kφ''_k xxᵀ and φ'_k x, |φ''| ≤ 0.77:
        # norm ≤ 0.77R + 1. D³out: v_kφ''' and φ'', |φ'''| ≤ 2: norm ≤ 2R + 3·0.77. ∇³F = 3·J·D²out + e·D³out.
        r = self.radius
        error = 0.5 * r * r + float(np.abs(self._design[1]).max()) + self.label_noise
        second, third = 0.77 * r + 1.0, 2.0 * r + 2.31
        return error * r, r * r + error * second, 3.0 * r * second + (error - self.label_noise) * third

    def saddle(self) -> Floats:
        return np.zeros(self.dim)

    @property
    def saddle_curvature(self) -> float:
        x, y, _ = self._design
        return -float(np.linalg.norm(y @ x)) / _POINTS

    def minimum(self) -> Floats:
        return self._design[2].copy()

    def population_risk(self, params: Floats) -> float:
        x, y, _ = self._design
        return 0.5 * float(((self._parts(x, params)[3] - y) ** 2).mean()) + 0.5 * self.label_noise**2

    def population_gradient(self, params: Floats) -> Floats:
        x, y, _ = self._design
        jacobian, errors = self._jacobian(x, y, params)
        return np.asarray(errors @ jacobian) / _POINTS

    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        x, y, _ = self._design
        return np.asarray(np.einsum("nij,j->i", self._second(x, y, params), vector)) / _POINTS

    def _parts(self, x: Floats, params: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """v, φ(Wx), φ'(Wx) and the outputs."""
        w, v = params[: -self.hidden].reshape(self.hidden, self.inputs), params[-self.hidden :]
        units = np.tanh(x @ w.T)
        return v, units, 1.0 - units**2, units @ v

    def _jacobian(self, x: Floats, y: Floats, params: Floats) -> tuple[Floats, Floats]:
        v, units, slopes, outputs = self._parts(x, params)
        inner = (v * slopes)[:, :, None] * x[:, None, :]
        return np.concatenate([inner.reshape(len(x), -1), units], axis=1), outputs - y

    def _second(self, x: Floats, y: Floats, params: Floats) -> Floats:
        jacobian, errors = self._jacobian(x, y, params)
        v, units, slopes, _ = self._parts(x, params)
        hessians = jacobian[:, :, None] * jacobian[:, None, :]
        bends = errors[:, None] * v * (-2.0 * units * slopes)
        ties = errors[:, None] * slopes
        for k in range(self.hidden):
            rows = slice(k * self.inputs, (k + 1) * self.inputs)
            output = self.hidden * self.inputs + k
            hessians[:, rows, rows] += bends[:, k, None, None] * x[:, :, None] * x[:, None, :]
            hessians[:, rows, output] += ties[:, k, None] * x
            hessians[:, output, rows] += ties[:, k, None] * x
        return np.asarray(hessians)

    def _draw(self, n: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
        x, y, _ = self._design
        point = rng.integers(0, _POINTS, n)
        return {"x": x[point], "y": y[point] + self.label_noise * (2.0 * rng.integers(0, 2, n) - 1.0)}

    def _losses(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        return np.asarray(0.5 * (self._parts(records["x"][which], params)[3] - records["y"][which]) ** 2)

    def _gradients(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        jacobian, errors = self._jacobian(records["x"][which], records["y"][which], params)
        return errors[:, None] * jacobian

    def _hessians(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        return self._second(records["x"][which], records["y"][which], params)
