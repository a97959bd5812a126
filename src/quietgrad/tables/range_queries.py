"""How large the features and targets are, found privately: noisy histograms of magnitudes, then of plain values.

A value falls into a bin by its sign and its octave ⌈log₂|x|⌉, so that one histogram covers all scales that people
measure in. Rows are brought to length 1 before they are counted: a row with k non-zero entries gives each of their
bins 1/√k. Two such rows have non-negative entries and are at most √2 apart, whatever they hold; zeros are not
counted. A second histogram of equal bins then places the features that are far from zero (years, pressures).

A :class:`FeatureBox` is the public box that rows and targets are kept in and scaled by, declared or released. It is
applied to every record alike, when a model is fitted and when it predicts, so a record's contribution depends on
that record alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.objectives import Batch, Objective
from quietgrad.core.session.queries import Query
from quietgrad.tables.privacy_units import UserLevelRecords, WeightedRows, rows_of
from quietgrad.tables.table import Floats, Matrix, Table, Targets, frozen

LOWEST, HIGHEST = -34, 44
"""Octaves that are distinguished; smaller and larger magnitudes count in the first and the last."""
OCTAVES = HIGHEST - LOWEST + 1
PIECES, FEW_PIECES = 32, 8
"""Equal bins of a second estimate, and of one that finds most of a feature rather than a place within it."""
_SHRINK = 1.0 / (1.0 + 1e-12)  # covers the rounding of 1/√k


def pair_bound(length: float, relation: Relation) -> float:
    """C of contributions without negative entries and of norm ≤ ``length``: two are at most √2·length apart."""
    return length / math.sqrt(2.0) if relation is Relation.REPLACE_ONE else length


def log2_bin(values: Floats) -> npt.NDArray[np.int64]:
    """⌈log₂|x|⌉ − LOWEST, kept within the octaves distinguished; of non-zero values."""
    mantissa, exponent = np.frexp(np.abs(values))
    exponent -= mantissa == 0.5
    return np.asarray(np.clip(exponent, LOWEST, HIGHEST) - LOWEST, dtype=np.int64)


def check_everyone(batch: Batch, relation: Relation) -> None:
    """Refuse a sample where only the distance of two records is bounded, not each of them."""
    if batch.indices is not None and relation is Relation.REPLACE_ONE:
        raise ValueError("a bound on pairs of records needs all of them: plan it with FullBatch() sampling.")


def _everyone(batch: Batch, relation: Relation) -> WeightedRows:
    check_everyone(batch, relation)
    return rows_of(batch)


def _entries(block: Matrix, chosen: npt.NDArray[np.int64]) -> tuple[Any, Any, Any, int]:
    """Row, position among ``chosen`` and value of every non-zero entry, and the number of rows."""
    if isinstance(block, np.ndarray):
        dense = block[:, chosen]
        rows, columns = np.nonzero(np.abs(dense) > 0.0)  # NaN, a gap, is no entry
        return rows, columns, dense[rows, columns], len(dense)
    part: Any = block[:, chosen] if len(chosen) < block.shape[1] else block
    rows = np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))
    kept = part.data != 0.0
    return rows[kept], part.indices[kept], part.data[kept], part.shape[0]


class _UnitCounts:
    """Counts to which a record gives a vector of length 1 at most, without negative entries."""

    relation: Relation

    @property
    def bound(self) -> float:
        return pair_bound(1.0, self.relation)


@dataclass(frozen=True, eq=False)
class MagnitudeHistogram(_UnitCounts):
    """Σ of unit-length rows' counts by feature, sign and octave; with ``pooled`` the features share one histogram.

    Args:
        chosen: positions of the features estimated.
        relation: what a neighbour is.
        pooled: a row gives each octave the part of its non-zero entries that falls there, whatever the feature:
            a vector of sum 1, so no longer than 1.
        units: public numbers that the chosen features are divided by first.
    """

    chosen: npt.NDArray[np.int64]
    relation: Relation = Relation.ADD_REMOVE
    pooled: bool = False
    units: Floats | None = None

    def dim(self, records: object) -> int:
        return (1 if self.pooled else len(self.chosen)) * 2 * OCTAVES

    def counts(self, released: Floats) -> Floats:
        """The released sum as (features or 1, sign, octave); sign 0 is positive."""
        return released.reshape(-1, 2, OCTAVES)

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        for block, counted in _everyone(batch, self.relation).blocks():
            if isinstance(block, np.ndarray) and not self.pooled and self.units is None:
                self._add_dense(block, counted, out)
                continue
            rows, columns, values, count = _entries(block, self.chosen)
            sizes = np.maximum(np.bincount(rows, minlength=count), 1)
            weights = counted * _SHRINK / (sizes if self.pooled else np.sqrt(sizes))
            groups = 0 if self.pooled else columns
            values = values if self.units is None else values / self.units[columns]
            bins = (groups * 2 + (values < 0.0)) * OCTAVES + log2_bin(values)
            out += np.bincount(bins, weights=weights[rows], minlength=len(out))

    def _add_dense(self, block: Floats, counted: Any, out: Floats) -> None:
        """The same of rows without a list of their entries, column by column: a scan's blocks lie so."""
        from quietgrad.tables.kernels import add_magnitudes

        counts = np.broadcast_to(np.asarray(counted, dtype=np.float64) * _SHRINK, len(block))
        columns = frozen(np.asarray(block.T, dtype=np.float64, order="C").view(np.int64))
        add_magnitudes(columns, frozen(self.chosen), frozen(np.ascontiguousarray(counts)), LOWEST, HIGHEST, out)


@dataclass(frozen=True, eq=False)
class MeanOctaves:
    """Σ clip_C of how many octaves each non-zero entry is above a common centre; zeros count as at the centre.

    One number per feature instead of a histogram: a coarser answer that far fewer records can pay for.
    """

    chosen: npt.NDArray[np.int64]
    centre: float

    @property
    def bound(self) -> float:
        return 5.0 * math.sqrt(len(self.chosen))

    def dim(self, records: object) -> int:
        return len(self.chosen)

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        for block, counted in rows_of(batch).blocks():
            rows, columns, values, count = _entries(block, self.chosen)
            above = log2_bin(values) + (LOWEST - self.centre)
            lengths = np.sqrt(np.bincount(rows, weights=above * above, minlength=count)) * (1.0 + 1e-12)
            factors = counted * self.bound / np.maximum(lengths, self.bound)
            out += np.bincount(columns, weights=above * factors[rows], minlength=len(out))


@dataclass(frozen=True, eq=False)
class RangeHistogram(_UnitCounts):
    """Σ of unit-length rows' counts in equal bins of an interval of each feature; values outside have no bin."""

    chosen: npt.NDArray[np.int64]
    low: Floats
    high: Floats
    relation: Relation = Relation.ADD_REMOVE
    pieces: int = PIECES

    def dim(self, records: object) -> int:
        return len(self.chosen) * self.pieces

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        starts = np.arange(len(self.chosen)) * self.pieces
        for block, counted in _everyone(batch, self.relation).blocks():
            part = block[:, self.chosen]
            dense = part if isinstance(part, np.ndarray) else part.toarray()
            bins, inside = _pieces(dense, self.low, self.high, self.pieces)
            counts = counted * _SHRINK / np.sqrt(np.maximum(inside.sum(axis=1), 1))
            weights = inside * counts[:, None]
            out += np.bincount((bins + starts).ravel(), weights=weights.ravel(), minlength=len(out))


@dataclass(frozen=True)
class NoFeatures(_UnitCounts):
    """A sum of zeros in place of counts in bins: where no feature is chosen, a release is noise alone.

    It is 0 for every record and for every table, so it keeps any bound, and no table is read for it.
    """

    relation: Relation = Relation.ADD_REMOVE
    pieces: int = PIECES

    def dim(self, records: object) -> int:
        return self.pieces

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        check_everyone(batch, self.relation)


@dataclass(frozen=True, eq=False)
class FeatureBins:
    """Σ of counts by feature and bin: a row has one bin of each chosen feature, the last ones reaching on for ever.

    Args:
        chosen: positions of the features.
        edges: of the bins, one row per feature.
    """

    chosen: npt.NDArray[np.int64]
    edges: Floats
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        return pair_bound(math.sqrt(len(self.chosen)), self.relation)

    def dim(self, records: object) -> int:
        return len(self.chosen) * (int(self.edges.shape[1]) - 1)

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        parts = out.reshape(len(self.chosen), -1)
        for block, counted in _everyone(batch, self.relation).blocks():
            counts = counted * _SHRINK
            for position, edges, part in zip(self.chosen, self.edges, parts, strict=True):
                column = block[:, position]
                column = column if isinstance(column, np.ndarray) else np.asarray(column.todense()).ravel()
                bins = np.searchsorted(edges[1:-1], column, side="right")
                part += np.bincount(bins, np.broadcast_to(counts, bins.shape), len(part))


def _pieces(
    values: Floats, low: Floats | float, high: Floats | float, pieces: int = PIECES
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Which of the equal bins of [low, high] a value falls in, and whether it does; NaN, a gap, does not."""
    inside = (values >= low) & (values <= high)
    share = np.where(inside, (np.clip(values, low, high) - low) / (high - low), 0.0)
    return np.minimum((share * pieces).astype(np.int64), pieces - 1), inside


@dataclass(frozen=True)
class TargetMagnitudeHistogram(_UnitCounts):
    """Counts of targets by sign and octave, zero apart: one record is one count."""

    relation: Relation = Relation.ADD_REMOVE

    def dim(self, records: object) -> int:
        return 2 * OCTAVES + 1

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        y, weights = _targets(_everyone(batch, self.relation))
        bins = np.where(y == 0.0, len(out) - 1, (y < 0.0) * OCTAVES + log2_bin(y))
        out += np.bincount(bins, weights, len(out))


@dataclass(frozen=True)
class TargetRangeHistogram(_UnitCounts):
    """Counts of targets in equal bins of [low, high]; one record is one count, or none if it lies outside."""

    low: float
    high: float
    relation: Relation = Relation.ADD_REMOVE

    def dim(self, records: object) -> int:
        return PIECES

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        y, weights = _targets(_everyone(batch, self.relation))
        bins, inside = _pieces(y, self.low, self.high)
        out += np.bincount(bins, weights=inside * weights, minlength=PIECES)


def _targets(shared: WeightedRows) -> tuple[Floats, Floats]:
    """Targets and what each counts."""
    records: Table = shared.records
    assert records.y is not None
    which = slice(None) if shared.indices is None else shared.indices
    y = np.asarray(records.y, dtype=np.float64)[which]
    return y, np.broadcast_to(1.0 if shared.shares is None else shared.of(which) * _SHRINK, y.shape)


TARGET_REACH = 2.0
"""Scaled targets are within ± this."""


class RecordMap(ABC):
    """A public map of rows and targets: a query may be asked of the records as it shows them."""

    @abstractmethod
    def apply(self, X: Matrix) -> Any: ...

    @abstractmethod
    def targets(self, y: Targets | None) -> Any: ...

    def features_of(self, records: Table) -> int:
        return records.features

    def of(self, records: Any) -> Any:
        """The table, or the people's table, as it is shown, made once."""
        if isinstance(records, UserLevelRecords):
            return records.seen(self.of(records.rows))

        def moved() -> Table:
            X: Any = self.apply(records.X)
            X = X.astype(np.float32) if isinstance(X, np.ndarray) and records.X.dtype == np.float32 else X
            return Table(
                X,
                self.targets(records.y),
                outputs=records.outputs,
                intercept=records.intercept,
                sample_weights=records.sample_weights,
            )

        return records.view(self, moved)


@dataclass(frozen=True, eq=False)
class FeatureBox(RecordMap):
    """x ↦ (clip(x, low, high) − c)/h per feature; zero stays zero (c = 0) wherever it is in the box.

    Args:
        low: lower ends of the box.
        high: upper ends of the box, above ``low``.
        target: the interval targets are kept in, scaled to ±2; ``None`` leaves them as they are (classes).
        unit: what counts are divided by instead, about their mean.
    """

    low: Floats
    high: Floats
    target: tuple[float, float] | None = None
    unit: float | None = None

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> FeatureBox | None:
        """The frame that a run's result tells of, if its method had one."""
        limits, target = details.get("feature_range"), details.get("target_range")
        if limits is None and (target is None or "model" not in details):
            return None
        if limits is None:  # the targets alone are kept in an interval
            wide = np.full(int(details["model"]["features"]), np.inf)
            limits = (-wide, wide)
        return cls(np.asarray(limits[0]), np.asarray(limits[1]), None if target is None else (target[0], target[1]))

    @property
    def centre(self) -> Floats:
        """c: 0, or the middle of a box that does not hold 0."""
        straddles = (self.low <= 0.0) & (self.high >= 0.0)
        return np.where(straddles, 0.0, 0.5 * (self.low + self.high))

    @property
    def half(self) -> Floats:
        """h: how far the box reaches from c."""
        return np.maximum(self.high - self.centre, self.centre - self.low)

    @property
    def target_centre(self) -> float:
        return 0.0 if self.target is None or self.unit else 0.5 * (self.target[0] + self.target[1])

    @property
    def target_scale(self) -> float:
        """Targets per unit of the scaled ones."""
        if self.unit is not None:
            return self.unit
        return 1.0 if self.target is None else 0.5 * (self.target[1] - self.target[0]) / TARGET_REACH

    def zero_kept(self) -> FeatureBox:
        """This frame for rows whose zeros are not stored: a box that does not hold 0 is widened to do so."""
        return replace(self, low=np.minimum(self.low, 0.0), high=np.maximum(self.high, 0.0))

    def clipped(self, X: Matrix) -> Any:
        """Rows moved into the box, not scaled: what a model with coefficients for raw features is given."""
        if isinstance(X, np.ndarray):
            return np.clip(X, self.low, self.high)
        moved = X.copy()
        moved.data = np.clip(X.data, self.low[X.indices], self.high[X.indices])
        return moved

    def apply(self, X: Matrix) -> Any:
        if isinstance(X, np.ndarray):
            return (np.clip(X, self.low, self.high) - self.centre) / self.half
        moved = self.clipped(X)
        moved.data = moved.data / self.half[X.indices]
        return moved

    def rounded(self, X: Matrix) -> Any:
        """What :meth:`apply` makes of dense rows, rounded to float32 and column-major, in one pass."""
        if not (isinstance(X, np.ndarray) and X.flags.fnc and X.dtype in (np.float32, np.float64)):
            return np.asarray(self.apply(X), dtype=np.float32, order="F")
        from quietgrad.tables.kernels import boxed_columns

        out = np.empty(X.shape[::-1], dtype=np.float32)
        boxed_columns(frozen(X.T), self.low, self.high, self.centre, self.half, out)
        return out.T

    def targets(self, y: Targets | None) -> Any:
        if self.target is None or y is None:
            return y
        return (np.clip(y, *self.target) - self.target_centre) / self.target_scale


@dataclass(frozen=True, eq=False)
class BoxedQuery:
    """A query about the records as a public map shows them; its bound holds for any rows, so for these."""

    query: Query
    map: RecordMap

    @property
    def bound(self) -> float:
        return self.query.bound

    def dim(self, records: Table) -> int:
        return self.query.dim(SimpleNamespace(features=self.map.features_of(records)))

    def sum_into(self, objective: Objective, batch: Batch, out: Floats) -> None:
        self.query.sum_into(objective, batch._replace(records=self.map.of(batch.records)), out)
