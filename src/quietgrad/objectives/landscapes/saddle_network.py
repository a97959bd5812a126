"""A two-layer network whose units, all zero, are interchangeable: a symmetric strict saddle.

f(W, v; x, y) = ½(Σ_k v_k tanh(w_k·x) − y)². At the origin the gradient is zero for every record, and the Hessian
couples w_k with v_k through −E[y·x]: its least eigenvalue is −‖E[y·x]‖. Inputs come from a fixed public design of
points, each with the teacher's label ± τ, so population values are exact sums over the design.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.landscapes.base import Floats, Landscape, Sample

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

    def _losses(self, records: Sample, which: Any, params: Floats) -> Floats:
        return np.asarray(0.5 * (self._parts(records["x"][which], params)[3] - records["y"][which]) ** 2)

    def _gradients(self, records: Sample, which: Any, params: Floats) -> Floats:
        jacobian, errors = self._jacobian(records["x"][which], records["y"][which], params)
        return errors[:, None] * jacobian

    def _hessians(self, records: Sample, which: Any, params: Floats) -> Floats:
        return self._second(records["x"][which], records["y"][which], params)
