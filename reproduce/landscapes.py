"""Three more risks with known saddles: matrix sensing, phase retrieval and a small network with symmetric units.

Matrix sensing sees X* = U*U*ᵀ through sᵀX*t with independent sign vectors s and t, so the population risk is
½‖UUᵀ − X*‖² + τ²/2 exactly. Phase retrieval sees (aᵀx*)² with a uniform on the sphere of radius √d. In both every
local minimum is global and every other critical point a saddle.

The network is f(W, v; x, y) = ½(Σ_k v_k tanh(w_k·x) − y)². At the origin the gradient is zero for every record, and
the Hessian couples w_k with v_k through −E[y·x]: its least eigenvalue is −‖E[y·x]‖. Inputs come from a fixed public
design of points, each with the teacher's label ± τ, so population values are exact sums over the design.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule, rounding_safe_clip
from quietgrad.core.session.objectives import BaseObjective, Batch, Indices, LossConstants, NoRegularizer
from quietgrad.tables.landscapes import Floats, SyntheticRecords, shortening
from quietgrad.tables.landscapes import landscape as built_in

_BLOCK = 2**18  # numbers of per-example gradients held at a time


@dataclass(frozen=True)
class Landscape(BaseObjective, ABC):
    """What all landscapes share; subclasses give the population risk, the records and one record's gradient.

    Args:
        seed: of the records that ``prepare(n)`` draws; they are synthetic, so this is no secret.
    """

    seed: int = 0

    name: ClassVar[str]
    regularizer: ClassVar[NoRegularizer] = NoRegularizer()

    # --- the population risk ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def dim(self) -> int:
        """Number of parameters d."""

    @abstractmethod
    def saddle(self) -> Floats:
        """A strict saddle of F."""

    @property
    @abstractmethod
    def saddle_curvature(self) -> float:
        """λ_min(∇²F) at :meth:`saddle`, negative."""

    @abstractmethod
    def minimum(self) -> Floats:
        """A global minimiser of F."""

    @abstractmethod
    def population_risk(self, params: Floats) -> float:
        """F(θ)."""

    @abstractmethod
    def population_gradient(self, params: Floats) -> Floats:
        """∇F(θ)."""

    @abstractmethod
    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        """∇²F(θ)·v."""

    @property
    @abstractmethod
    def radius(self) -> float:
        """The domain is ‖θ‖ ≤ radius unless a landscape says otherwise."""

    @abstractmethod
    def _moduli(self) -> tuple[float, float, float]:
        """G, M (every record) and ρ (of F) on the domain."""

    def constants(self) -> LossConstants:
        """G and M of every record and ρ of the population risk, on the domain."""
        lipschitz, smoothness, curvature = self._constants
        return LossConstants.of(
            self.regularizer,
            row_bound=self.radius,
            lipschitz=lipschitz,
            smoothness=smoothness,
            hessian_lipschitz=curvature,
            convex=False,
        )

    def negative_curvature(self) -> float:
        """That of its saddle, which a statement about curvature has to tell from none."""
        return abs(float(self.saddle_curvature))

    @cached_property
    def _constants(self) -> tuple[float, float, float]:
        return self._moduli()

    def inside(self, params: Floats) -> bool:
        """Whether θ is in the domain that the constants hold on."""
        return bool(np.linalg.norm(params) <= self.radius)

    def check_domain(self, params: Floats) -> None:
        """Raise if θ is outside the domain."""
        if params.shape != (self.dim,):
            raise DataError(f"params of shape {params.shape}: {self.name} has {self.dim} parameters.")
        if not self.inside(params):
            raise DataError(
                f"the point is outside the domain of {self.name} (radius {self.radius:.3g}), where its constants "
                "do not hold. Start inside it."
            )

    # --- records ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _draw(self, n: int, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
        """n records, whose losses have mean F."""

    def prepare(self, data: Any) -> SyntheticRecords:
        """Draw ``data`` records if it is a number; a sample drawn before is taken as it is."""
        if isinstance(data, SyntheticRecords):
            if data.dim != self.dim:
                raise DataError(f"a sample for {data.dim} parameters; {self.name} has {self.dim}.")
            return data
        if isinstance(data, bool) or not isinstance(data, (int, np.integer)) or data < 1:
            given = repr(data) if isinstance(data, (int, str)) else f"of type {type(data).__name__}"
            raise DataError(f"data {given}: a landscape samples its own records; pass how many, a number ≥ 1.")
        return SyntheticRecords(self._draw(int(data), np.random.default_rng(self.seed)), self.dim)

    def initial(self, records: SyntheticRecords) -> Floats:
        """The saddle."""
        return self.saddle()

    @abstractmethod
    def _losses(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        """f of each record, at least 0 where a noisy choice between losses is wanted."""

    @abstractmethod
    def _gradients(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        """∇f of each record, (records, d)."""

    @abstractmethod
    def _hessians(self, records: SyntheticRecords, which: Any, params: Floats) -> Floats:
        """∇²f of each record, (records, d, d)."""

    # --- clipped sums -------------------------------------------------------------------------------------------

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        """out += Σ over the batch of what the rule makes of each record's gradients."""
        alpha, beta, first, gamma, second = rule.numbers
        with np.errstate(over="ignore", invalid="ignore"):
            for which in self._blocks(batch.records, batch.indices, self.dim):
                now = self._gradients(batch.records, which, points[0])
                moved = now - beta * self._gradients(batch.records, which, points[1]) if beta else now
                out += alpha * clipped_sum(moved, first)
                if gamma:
                    out += gamma * clipped_sum(now, second)

    def add_hessians(self, batch: Batch, params: Floats, clip: float, out: Floats) -> None:
        """out += Σ ∇²fᵢ(θ), each shortened to a spectral norm of at most ``clip``; out is (d, d)."""
        with np.errstate(over="ignore", invalid="ignore"):
            for which in self._blocks(batch.records, batch.indices, self.dim**2):
                each = self._hessians(batch.records, which, params)
                each[~np.isfinite(each).all(axis=(1, 2))] = 0.0
                lengths = np.abs(np.linalg.eigvalsh(each)).max(axis=1)
                out += np.einsum("n,nij->ij", shortening(lengths, rounding_safe_clip(clip)), each)

    def _blocks(self, records: SyntheticRecords, indices: Indices | None, width: int) -> Iterator[Any]:
        size = max(1, _BLOCK // width)
        total = len(records) if indices is None else len(indices)
        for first in range(0, total, size):
            last = min(first + size, total)
            yield slice(first, last) if indices is None else indices[first:last]

    def loss_sum(self, batch: Batch, params: Floats, bound: float) -> float:
        """Σ min(max(fᵢ(θ), 0), bound); a loss that is not a number counts as the bound."""
        return math.fsum(
            float(np.fmin(np.maximum(self._losses(batch.records, which, params), 0.0), bound).sum())
            for which in self._blocks(batch.records, batch.indices, self.dim)
        )

    # --- evaluations, not private -------------------------------------------------------------------------------

    def risk(self, records: SyntheticRecords, params: Floats) -> float:
        """The empirical risk."""
        blocks = self._blocks(records, None, self.dim)
        return math.fsum(float(self._losses(records, b, params).sum()) for b in blocks) / len(records)

    def risk_gradient(self, records: SyntheticRecords, params: Floats) -> Floats:
        """The gradient of the empirical risk, unclipped."""
        out = np.zeros(self.dim)
        self.add(Batch(records, None), (params,), ClippingRule.gradient(math.inf), out)
        return out / len(records)

    def hessian_product(self, records: SyntheticRecords, params: Floats, vector: Floats) -> Floats:
        """The empirical Hessian times a vector."""
        out = np.zeros(self.dim)
        for which in self._blocks(records, None, self.dim**2):
            out += np.einsum("nij,j->i", self._hessians(records, which, params), vector)
        return out / len(records)


def clipped_sum(rows: Floats, clip: float) -> Floats:
    """Σ clip_C(row), C as :func:`~quietgrad.core.session.contributions.rounding_safe_clip`; a row that is not
    finite counts as zero.

    >>> clipped_sum(np.array([[3.0, 4.0], [0.0, 0.5], [np.nan, 1.0]]), 1.0).round(9)
    array([0.6, 1.3])
    """
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    factors = shortening(lengths, clip)
    good = np.isfinite(lengths)
    total: Floats = factors @ rows if good.all() else factors[good] @ rows[good]
    return total


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


def landscape(name: str, **settings: Any) -> Any:
    """The landscape of a name: ``strict-saddle`` (d), ``matrix-sensing`` (size, rank), ``phase-retrieval`` (d),
    ``two-layer`` (inputs, hidden).

    >>> landscape("matrix-sensing", size=4, rank=2).dim
    8
    """
    classes: dict[str, Any] = {cls.name: cls for cls in (MatrixSensing, PhaseRetrieval, TwoLayer)}
    return classes[name](**settings) if name in classes else built_in(name, **settings)
