"""Population risks with known saddles and minima: where claims about second-order points can be checked exactly.

A landscape is an objective that samples its own records: ``prepare(n)`` draws n of them around a population risk F
whose value, gradient and Hessian are known in closed form, and ``initial`` is a strict saddle of F. Its constants
hold on a stated domain: G and M for every record, ρ for F, which is what the definition of an α-second-order
stationary point takes: ‖∇F‖ ≤ α and ∇²F ≽ −√(ρα).

>>> hill = landscape("strict-saddle", d=10)
>>> hill.population_gradient(hill.saddle()).any().item(), hill.saddle_curvature
(False, -1.0)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.objectives.base import (
    BaseObjective,
    Batch,
    ClippingRule,
    Indices,
    LossConstants,
    NoRegularizer,
    rounding_safe_clip,
)

Floats = npt.NDArray[np.float64]

_BLOCK = 2**18  # numbers of per-example gradients held at a time


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

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The same: a sample is made for one landscape."""
        return self.contents()


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
                out += np.einsum("n,nij->ij", _shortening(lengths, rounding_safe_clip(clip)), each)

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
    """Σ clip_C(row), C as :func:`~quietgrad.objectives.base.rounding_safe_clip`; a row that is not finite counts
    as zero.

    >>> clipped_sum(np.array([[3.0, 4.0], [0.0, 0.5], [np.nan, 1.0]]), 1.0).round(9)
    array([0.6, 1.3])
    """
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    factors = _shortening(lengths, clip)
    good = np.isfinite(lengths)
    total: Floats = factors @ rows if good.all() else factors[good] @ rows[good]
    return total


def _shortening(lengths: Floats, limit: float) -> Floats:
    """min(1, limit/length)."""
    return np.divide(limit, lengths, out=np.ones_like(lengths), where=lengths > limit)


def landscape(name: str, **settings: Any) -> Landscape:
    """The landscape of a name: ``strict-saddle`` (d), ``matrix-sensing`` (size, rank), ``phase-retrieval`` (d),
    ``two-layer`` (inputs, hidden).

    >>> landscape("matrix-sensing", size=4, rank=2).dim
    8
    """
    from quietgrad.objectives.landscapes import saddles, sensing

    classes: dict[str, Any] = {
        cls.name: cls
        for cls in (
            saddles.StrictSaddle,
            sensing.MatrixSensing,
            sensing.PhaseRetrieval,
            saddles.TwoLayer,
        )
    }
    if name not in classes:
        raise ValueError(f"landscape {name!r}: must be one of {', '.join(sorted(classes))}.")
    made: Landscape = classes[name](**settings)
    return made


def landscape_names() -> tuple[str, ...]:
    """The names :func:`landscape` takes."""
    return ("strict-saddle", "matrix-sensing", "phase-retrieval", "two-layer")
