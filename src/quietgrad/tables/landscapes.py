"""A population risk with a known saddle and known minima: where claims about second-order points can be checked.

A landscape is an objective that samples its own records: ``prepare(n)`` draws n of them around a population risk F
whose value, gradient and Hessian are known in closed form, and ``initial`` is a strict saddle of F. Its constants
hold on a stated domain: G and M for every record, ρ for F, which is what the definition of an α-second-order
stationary point takes: ‖∇F‖ ≤ α and ∇²F ≽ −√(ρα).

F(x) = ½ Σ λᵢxᵢ² + (w/4) Σ_{i<k} xᵢ⁴ with λᵢ = −γ for i < k and 1 beyond. The origin is a strict saddle of curvature
−γ; the minima are (±√(γ/w), …, 0, …), where the Hessian is 2γ and 1. A record adds noise to curvature and slope,

    f(x; s, σ, j) = ½(1 + a·s) Σ λᵢxᵢ² + (w/4) Σ_{i<k} xᵢ⁴ + ς·σ·x_j,   s, σ = ±1, j uniform,

so records are of 4d kinds: a batch is counted by kind and summed over kinds in O(d).

>>> hill = landscape("strict-saddle", d=10)
>>> hill.population_gradient(hill.saddle()).any().item(), hill.saddle_curvature
(False, -1.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.session.clipping import FLAT, scale_factors
from quietgrad.core.session.contributions import ClippingRule, rounding_safe_clip
from quietgrad.core.session.objectives import BaseObjective, Batch, Indices, LossConstants, NoRegularizer

Floats = npt.NDArray[np.float64]
_SIGNS = np.array([-1.0, 1.0])
_REACH = 1.15  # the domain goes this much beyond the minima, and half as far as they lie in the flat directions


@dataclass(frozen=True, eq=False)
class SyntheticRecords:
    """Records of a landscape: arrays of equal length, one entry (or row) per record.

    ``totals`` keeps sums over all records that a landscape makes once.
    """

    columns: dict[str, npt.NDArray[Any]]
    dim: int
    totals: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    def contents(self) -> Iterator[bytes | memoryview]:
        """The columns as bytes."""
        for name, column in self.columns.items():
            yield f"{name} {column.dtype} {column.shape}".encode()
            yield np.ascontiguousarray(column).data.cast("B")

    fingerprint_parts = contents


@dataclass(frozen=True)
class StrictSaddle(BaseObjective):
    """The strict saddle of paper 003's definitions, with everything about it known.

    Domain: |xᵢ| ≤ 1.15·√(γ/w) in the descending directions and a ball of radius ½√(γ/w) in the others.

    Args:
        seed: of the records that ``prepare(n)`` draws; they are synthetic, so this is no secret.
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

    seed: int = 0
    d: int = 10
    descending: int = 1
    curvature: float = 1.0
    wall: float = 1.0
    curvature_noise: float = 0.25
    slope_noise: float = 0.5

    name: ClassVar[str] = "strict-saddle"
    regularizer: ClassVar[NoRegularizer] = NoRegularizer()

    def __post_init__(self) -> None:
        if not 1 <= self.descending <= self.d:
            raise ValueError(f"descending={self.descending!r}, d={self.d!r}: must be 1 ≤ descending ≤ d.")
        for name, value in {"curvature": self.curvature, "wall": self.wall}.items():
            if not 0.0 < value < math.inf:
                raise SettingError(f"{{{name}}}: must be a finite number > 0.", **{name: value})
        if not (0.0 <= self.curvature_noise < 1.0 and 0.0 <= self.slope_noise < math.inf):
            raise ValueError("curvature_noise must be in [0, 1) and slope_noise finite and ≥ 0.")

    @property
    def dim(self) -> int:
        return self.d

    @property
    def radius(self) -> float:
        """Radius of a ball around 0 that contains the domain."""
        return math.hypot(_REACH * math.sqrt(self.descending), 0.5) * self._depth

    @property
    def _depth(self) -> float:
        """How far the minima lie along each descending direction."""
        return math.sqrt(self.curvature / self.wall)

    def inside(self, params: Floats) -> bool:
        """Whether x is in the domain that the constants hold on."""
        steep, flat = params[: self.descending], params[self.descending :]
        return bool(np.abs(steep).max() <= _REACH * self._depth and np.linalg.norm(flat) <= 0.5 * self._depth)

    def constants(self) -> LossConstants:
        """G and M of every record and ρ of the population risk, on the domain."""
        a, gamma, wall, far = self.curvature_noise, self.curvature, self.wall, _REACH * self._depth
        # |−γ(1±a)x + wx³| on [0, far] peaks inside at √(γ(1+a)/3w) or at the end.
        turn = math.sqrt(gamma * (1.0 + a) / (3.0 * wall))
        steep = max(2.0 / 3.0 * gamma * (1.0 + a) * turn, wall * far**3 - gamma * (1.0 - a) * far)
        flat = 0.5 * (1.0 + a) * self._depth if self.d > self.descending else 0.0
        smoothness = max(gamma * (1.0 + a), 3.0 * wall * far**2 - gamma * (1.0 - a))
        if self.d > self.descending:
            smoothness = max(smoothness, 1.0 + a)
        return LossConstants.of(
            self.regularizer,
            row_bound=self.radius,
            lipschitz=math.hypot(steep * math.sqrt(self.descending), flat) + self.slope_noise,
            smoothness=smoothness,
            hessian_lipschitz=6.0 * wall * far,
            convex=False,
        )

    def negative_curvature(self) -> float:
        """Return the curvature of the saddle, which a statement about curvature has to tell from none."""
        return self.curvature

    def check_domain(self, params: Floats) -> None:
        """Raise if x is outside the domain."""
        if params.shape != (self.d,):
            raise DataError(f"params of shape {params.shape}: {self.name} has {self.d} parameters.")
        if not self.inside(params):
            raise DataError(
                f"the point is outside the domain of {self.name} (radius {self.radius:.3g}), where its constants "
                "do not hold. Start inside it."
            )

    def saddle(self) -> Floats:
        """The strict saddle of F: the origin."""
        return np.zeros(self.d)

    @property
    def saddle_curvature(self) -> float:
        """λ_min(∇²F) at the saddle: −γ."""
        return -self.curvature

    def minimum(self) -> Floats:
        """A global minimiser of F."""
        point = np.zeros(self.d)
        point[: self.descending] = self._depth
        return point

    def population_risk(self, params: Floats) -> float:
        """F(x)."""
        steep = params[: self.descending]
        return 0.5 * float(params @ self._slope(params)) + 0.25 * self.wall * float((steep**4).sum())

    def population_gradient(self, params: Floats) -> Floats:
        """∇F(x)."""
        return self._slope(params) + self._push(params)

    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        """∇²F(x)·v."""
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

    def prepare(self, data: object) -> SyntheticRecords:
        """Draw ``data`` records if it is a number; a sample drawn before is taken as it is."""
        if isinstance(data, SyntheticRecords):
            if data.dim != self.d:
                raise DataError(f"a sample for {data.dim} parameters; {self.name} has {self.d}.")
            return data
        if isinstance(data, bool) or not isinstance(data, (int, np.integer)) or data < 1:
            given = repr(data) if isinstance(data, (int, str)) else f"of type {type(data).__name__}"
            raise DataError(f"data {given}: a landscape samples its own records; pass how many, a number ≥ 1.")
        rng = np.random.default_rng(self.seed)
        return SyntheticRecords({"kind": rng.integers(0, 4 * self.d, int(data), dtype=np.int32)}, self.d)

    def initial(self, records: SyntheticRecords) -> Floats:
        """The saddle."""
        return self.saddle()

    def _counts(self, records: SyntheticRecords, indices: Indices | None) -> Floats:
        """How many records of each kind (s, σ, j)."""
        if indices is None:
            if "kind" not in records.totals:
                records.totals["kind"] = self._counts(records, np.arange(len(records)))
            return records.totals["kind"]
        counts = np.bincount(records["kind"][indices], minlength=4 * self.d)
        return counts.reshape(2, 2, self.d).astype(np.float64)

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        """out += Σ over the batch of what the rule makes of each record's gradients."""
        alpha, beta, first, gamma, second = rule.numbers
        counts = self._counts(batch.records, batch.indices)
        with np.errstate(over="ignore", invalid="ignore"):
            slope, push = self._slope(points[0]), self._push(points[0])
            if beta:
                moved = slope - beta * self._slope(points[1]), push - beta * self._push(points[1])
            else:
                moved = slope, push
            out += alpha * self._sum(counts, *moved, (1.0 - beta) * self.slope_noise, first, rule)
            if gamma:
                out += gamma * self._sum(counts, slope, push, self.slope_noise, second, rule)

    def _sum(
        self, counts: Floats, slope: Floats, push: Floats, noise: float, clip: float, rule: ClippingRule
    ) -> Floats:
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
                if rule.clipping == FLAT:
                    weights = count * shortening(lengths, clip)
                else:
                    weights = count * scale_factors(rule.clipping, lengths, clip)
                total += weights.sum() * body
                total += (sigma * noise) * weights
        return total

    def loss_sum(self, batch: Batch, params: Floats, bound: float) -> float:
        """Σ min(max(fᵢ(x), 0), bound); a loss that is not a number counts as the bound."""
        kinds = batch.records["kind"] if batch.indices is None else batch.records["kind"][batch.indices]
        s, sigma, j = np.unravel_index(kinds, (2, 2, self.d))
        bend, steep = 0.5 * float(params @ self._slope(params)), params[: self.descending]
        losses = (1.0 + self.curvature_noise * _SIGNS[s]) * bend
        losses += 0.25 * self.wall * float((steep**4).sum()) + self.slope_noise * _SIGNS[sigma] * params[j]
        return float(np.fmin(np.maximum(losses, 0.0), bound).sum())

    def add_hessians(self, batch: Batch, params: Floats, clip: float, out: Floats) -> None:
        """out += Σ ∇²fᵢ(x), each shortened to a spectral norm of at most ``clip``; out is (d, d)."""
        counts = self._counts(batch.records, batch.indices).sum(axis=(1, 2))
        for sign, count in zip(_SIGNS, counts, strict=True):
            with np.errstate(over="ignore"):
                diagonal = self._curve(params, sign)
            if np.isfinite(diagonal).all():
                factor = shortening(np.abs(diagonal).max(keepdims=True), rounding_safe_clip(clip))[0]
                out[np.diag_indices(self.d)] += count * factor * diagonal

    def risk(self, records: SyntheticRecords, params: Floats) -> float:
        """The empirical risk: an evaluation, not private."""
        counts, steep = self._counts(records, None), params[: self.descending]
        s, sigma, j = (counts.sum(axis=(1, 2)) @ _SIGNS, counts.sum(axis=(0, 2)), counts.sum(axis=0))
        bend = 0.5 * float(params @ self._slope(params)) * (counts.sum() + self.curvature_noise * s)
        wall = 0.25 * self.wall * float((steep**4).sum()) * sigma.sum()
        return float(bend + wall + self.slope_noise * float((_SIGNS @ j) @ params)) / len(records)

    def hessian_product(self, records: SyntheticRecords, params: Floats, vector: Floats) -> Floats:
        """The empirical Hessian times a vector."""
        tilt = float(self._counts(records, None).sum(axis=(1, 2)) @ _SIGNS) / len(records)
        return self._curve(params, tilt) * vector


def shortening(lengths: Floats, limit: float) -> Floats:
    """min(1, limit/length)."""
    return np.divide(limit, lengths, out=np.ones_like(lengths), where=lengths > limit)


def landscape(name: str, **settings: Any) -> StrictSaddle:
    """The landscape of a name: ``"strict-saddle"``, with the settings of :class:`StrictSaddle`.

    >>> landscape("strict-saddle", d=4).dim
    4
    """
    if name != StrictSaddle.name:
        raise ValueError(f"landscape {name!r}: must be {StrictSaddle.name!r}.")
    return StrictSaddle(**settings)
