"""How large the features and targets are, found privately: noisy histograms of magnitudes, then of plain values.

A value falls into a bin by its sign and its octave ⌈log₂|x|⌉, so that one histogram covers all scales that people
measure in. Rows are brought to length 1 before they are counted: a row with k non-zero entries gives each of their
bins 1/√k. Two such rows have non-negative entries and are at most √2 apart, whatever they hold; zeros are not
counted. A second histogram of equal bins then places the features that are far from zero (years, pressures).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Batch
from quietgrad.objectives.privacy_units import WeightedRows, rows_of
from quietgrad.objectives.tables.table import Floats, Table
from quietgrad.privacy.budget import Relation

LOWEST, HIGHEST = -34, 44
"""Octaves that are told apart; smaller and larger magnitudes count in the first and the last."""
OCTAVES = HIGHEST - LOWEST + 1
PIECES, FEW_PIECES = 32, 8
"""Equal bins of a second look, and of one that is to find most of a feature rather than a place within it."""
_SHRINK = 1.0 / (1.0 + 1e-12)  # covers the rounding of 1/√k


def pair_bound(length: float, relation: Relation) -> float:
    """C of contributions without negative entries and of norm ≤ ``length``: two are at most √2·length apart.

    >>> pair_bound(2.0, Relation.ADD_REMOVE), round(pair_bound(2.0, Relation.REPLACE_ONE), 4)
    (2.0, 1.4142)
    """
    return length / math.sqrt(2.0) if relation is Relation.REPLACE_ONE else length


def octave(values: Any) -> npt.NDArray[np.int64]:
    """⌈log₂|x|⌉ − LOWEST, kept within the octaves told apart; of non-zero values.

    >>> (octave(np.array([1.0, 1.5, 2.0, -3.0, 1e300, 1e-300])) + LOWEST).tolist()
    [0, 1, 1, 2, 44, -34]
    """
    mantissa, exponent = np.frexp(np.abs(values))
    exponent = exponent.astype(np.int64) - (mantissa == 0.5)
    return np.asarray(np.clip(exponent, LOWEST, HIGHEST) - LOWEST)


def _everyone(batch: Batch, relation: Relation) -> WeightedRows:
    if batch.indices is not None and relation is Relation.REPLACE_ONE:
        raise ValueError("a bound on pairs of records needs all of them: plan it with FullBatch() sampling.")
    return rows_of(batch)


def _entries(block: Any, chosen: npt.NDArray[np.int64]) -> tuple[Any, Any, Any, int]:
    """Row, position among ``chosen`` and value of every non-zero entry, and the number of rows."""
    if isinstance(block, np.ndarray):
        part = block[:, chosen]
        rows, columns = np.nonzero(part)
        return rows, columns, part[rows, columns], len(part)
    part = block[:, chosen] if len(chosen) < block.shape[1] else block
    rows = np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))
    kept = part.data != 0.0
    return rows[kept], part.indices[kept], part.data[kept], part.shape[0]


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Σ of unit-length rows' counts by feature, sign and octave; with ``pooled`` the features share one histogram.

    Args:
        chosen: positions of the features looked at.
        relation: what a neighbour is.
        pooled: a row gives each octave the part of its non-zero entries that falls there, whatever the feature:
            a vector of sum 1, so no longer than 1.

    >>> from quietgrad.objectives.tables.layout import lay_out
    >>> query = Magnitudes(np.arange(2))
    >>> records = Table(lay_out([[1.0, -4.0], [0.0, 4.0]]), None)
    >>> out = np.zeros(query.dim(records))
    >>> query.sum_into(None, Batch(records, None), out)
    >>> query.counts(out)[1, :, 2 - LOWEST].round(3).tolist()
    [1.0, 0.707]
    """

    chosen: npt.NDArray[np.int64]
    relation: Relation = Relation.ADD_REMOVE
    pooled: bool = False

    @property
    def bound(self) -> float:
        """1, or 1/√2 where only the distance of two records counts."""
        return pair_bound(1.0, self.relation)

    @property
    def _groups(self) -> int:
        return 1 if self.pooled else len(self.chosen)

    def dim(self, records: Any) -> int:
        """Features × signs × octaves."""
        return self._groups * 2 * OCTAVES

    def counts(self, released: Floats) -> Floats:
        """The released sum as (features or 1, sign, octave); sign 0 is positive."""
        return released.reshape(self._groups, 2, OCTAVES)

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the counts."""
        shared = _everyone(batch, self.relation)
        for which, block in shared.records.blocks(shared.indices):
            rows, columns, values, count = _entries(block, self.chosen)
            sizes = np.maximum(np.bincount(rows, minlength=count), 1)
            weights = shared.of(which) * _SHRINK / (sizes if self.pooled else np.sqrt(sizes))
            groups = 0 if self.pooled else columns
            bins = (groups * 2 + (values < 0.0)) * OCTAVES + octave(values)
            out += np.bincount(bins, weights=weights[rows], minlength=len(out))


@dataclass(frozen=True, eq=False)
class MeanOctaves:
    """Σ clip_C of how many octaves each non-zero entry is above a common centre; zeros count as at the centre.

    One number per feature instead of a histogram: a coarser answer that far fewer records can pay for.

    >>> from quietgrad.objectives.tables.layout import lay_out
    >>> query, out = MeanOctaves(np.arange(2), 3.0), np.zeros(2)
    >>> query.sum_into(None, Batch(Table(lay_out([[32.0, 1.0], [8.0, 0.0]]), None), None), out)
    >>> out.round(6).tolist(), round(query.bound, 3)
    ([2.0, -3.0], 7.071)
    """

    chosen: npt.NDArray[np.int64]
    centre: float

    @property
    def bound(self) -> float:
        """Five octaves for each feature."""
        return 5.0 * math.sqrt(len(self.chosen))

    def dim(self, records: Any) -> int:
        """One number per feature."""
        return len(self.chosen)

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the sum."""
        shared = rows_of(batch)
        for which, block in shared.records.blocks(shared.indices):
            rows, columns, values, count = _entries(block, self.chosen)
            above = octave(values) + (LOWEST - self.centre)
            lengths = np.sqrt(np.bincount(rows, weights=above * above, minlength=count)) * (1.0 + 1e-12)
            factors = shared.of(which) * self.bound / np.maximum(lengths, self.bound)
            out += np.bincount(columns, weights=above * factors[rows], minlength=len(out))


@dataclass(frozen=True, eq=False)
class Pieces:
    """Σ of unit-length rows' counts in equal bins of an interval of each chosen feature; no bin for values outside.

    >>> from quietgrad.objectives.tables.layout import lay_out
    >>> query, out = Pieces(np.array([0]), np.array([0.0]), np.array([32.0])), np.zeros(32)
    >>> query.sum_into(None, Batch(Table(lay_out([[2.5], [99.0]]), None), None), out)
    >>> out.round(6)[:4].tolist()
    [0.0, 0.0, 1.0, 0.0]
    """

    chosen: npt.NDArray[np.int64]
    low: Floats
    high: Floats
    relation: Relation = Relation.ADD_REMOVE
    pieces: int = PIECES

    @property
    def bound(self) -> float:
        """1, or 1/√2 where only the distance of two records counts."""
        return pair_bound(1.0, self.relation)

    def dim(self, records: Any) -> int:
        """Features × bins."""
        return len(self.chosen) * self.pieces

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the counts."""
        starts = np.arange(len(self.chosen)) * self.pieces
        shared = _everyone(batch, self.relation)
        for which, block in shared.records.blocks(shared.indices):
            part = block[:, self.chosen]
            dense = part if isinstance(part, np.ndarray) else part.toarray()
            bins, inside = _pieces(dense, self.low, self.high, self.pieces)
            counts = shared.of(which) * _SHRINK / np.sqrt(np.maximum(inside.sum(axis=1), 1))
            weights = inside * counts[:, None]
            out += np.bincount((bins + starts).ravel(), weights=weights.ravel(), minlength=len(out))


@dataclass(frozen=True, eq=False)
class FeatureBins:
    """Σ of counts by feature and bin: a row has one bin of each chosen feature, the last ones reaching on for ever.

    Args:
        chosen: positions of the features.
        edges: of the bins, one row per feature.

    >>> from quietgrad.objectives.tables.layout import lay_out
    >>> query, out = FeatureBins(np.array([0]), np.array([[0.0, 1.0, 2.0]])), np.zeros(2)
    >>> query.sum_into(None, Batch(Table(lay_out([[0.5], [7.0]]), None), None), out)
    >>> out.round(6).tolist(), query.bound
    ([1.0, 1.0], 1.0)
    """

    chosen: npt.NDArray[np.int64]
    edges: Floats
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        """√features, or less where only the distance of two records counts."""
        return pair_bound(math.sqrt(len(self.chosen)), self.relation)

    def dim(self, records: Any) -> int:
        """Features × bins."""
        return len(self.chosen) * (self.edges.shape[1] - 1)

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the counts."""
        shared = _everyone(batch, self.relation)
        parts = out.reshape(len(self.chosen), -1)
        for which, block in shared.records.blocks(shared.indices):
            counts = shared.of(which) * _SHRINK
            for position, edges, part in zip(self.chosen, self.edges, parts, strict=True):
                column = block[:, position]
                column = column if isinstance(column, np.ndarray) else np.asarray(column.todense()).ravel()
                bins = np.searchsorted(edges[1:-1], column, side="right")
                part += np.bincount(bins, np.broadcast_to(counts, bins.shape), len(part))


def _pieces(
    values: Any, low: Any, high: Any, pieces: int = PIECES
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Which of the equal bins of [low, high] a value falls in, and whether it does."""
    inside = (values >= low) & (values <= high)
    share = (np.clip(values, low, high) - low) / (high - low)
    return np.minimum((share * pieces).astype(np.int64), pieces - 1), inside


@dataclass(frozen=True)
class TargetMagnitudes:
    """Counts of targets by sign and octave, zero apart: one record is one count.

    >>> query, out = TargetMagnitudes(), np.zeros(2 * OCTAVES + 1)
    >>> query.sum_into(None, Batch(Table(np.ones((2, 1)), np.array([0.0, 3.0])), None), out)
    >>> out[[-1, 2 - LOWEST]].tolist()
    [1.0, 1.0]
    """

    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        """1, or 1/√2 where only the distance of two records counts."""
        return pair_bound(1.0, self.relation)

    def dim(self, records: Any) -> int:
        """Signs × octaves, and zero."""
        return 2 * OCTAVES + 1

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the counts."""
        y, weights = _targets(_everyone(batch, self.relation))
        bins = np.where(y == 0.0, len(out) - 1, (y < 0.0) * OCTAVES + octave(y))
        out += np.bincount(bins, weights, len(out))


@dataclass(frozen=True)
class TargetPieces:
    """Counts of targets in equal bins of [low, high]; one record is one count, or none if it lies outside."""

    low: float
    high: float
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        """1, or 1/√2 where only the distance of two records counts."""
        return pair_bound(1.0, self.relation)

    def dim(self, records: Any) -> int:
        """One count per bin."""
        return PIECES

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the counts."""
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
