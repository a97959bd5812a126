"""Scores of a whole table and sums over it, a block at a time: BLAS or scipy.sparse, no compiler.

A linear model sees the row x̃ᵢ = (aᵢ·s∘(xᵢ−m), c) of a :class:`~quietgrad.tables.table.Table`; here the
shift, scale, shortening and intercept are applied to weights and sums instead of to rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quietgrad.core.session.clipping import FLAT, Clipping, scale_factors
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch, Indices, Objective, Regularizer, StreamedRecords
from quietgrad.tables.table import Floats, Matrix, Table, Targets, Which, csr_around, frozen

if TYPE_CHECKING:
    from quietgrad.tables.linear import LinearObjective


_ROWS_AT_ONCE = 1 << 19  # numbers: two megabytes of float32

HESSIAN_NUMBERS = 1 << 17
"""Numbers of a part whose rows are copied in float64: the copies stay in the processor's cache."""
_EPS = float(np.finfo(np.float64).eps)
_TINY = 1e-290  # as in the norms of rows: squares that underflow are not 0
_AT_ONCE = 1 << 21  # numbers of people's sums at a time, 16 MB


class Block:
    """Some records: which, their raw features and targets, and the factors that shorten their rows, if any."""

    def __init__(self, records: Table, which: Which, rows: Matrix | ColumnMajor) -> None:
        self.which = which
        self.rows: Any = rows
        self.factors = records.factors[which, None] if records.factors.size else None
        self.y: Targets = np.zeros(0) if records.y is None else records.y[which]
        self.weights = None if records.sample_weights is None else records.sample_weights[which]


@dataclass
class ColumnMajor:
    """Some rows of a column-major float32 table: its products are summed in float64 without a copy in float64.

    A part of a scan is used once and forgotten; to convert it would cost as much as to use it.
    """

    columns: Floats
    first: int
    last: int
    transposed: bool = False

    @property
    def T(self) -> ColumnMajor:
        return replace(self, transposed=not self.transposed)

    def __matmul__(self, other: Floats) -> Floats:
        from quietgrad.tables import kernels

        product = kernels.column_sums if self.transposed else kernels.column_scores
        return np.asarray(product(self.columns, self.first, self.last, np.ascontiguousarray(other[:, 0])))[:, None]

    def toarray(self) -> Floats:
        """A copy of the rows, or of the columns, as a matrix of float64."""
        part = self.columns[:, self.first : self.last]
        return np.array(part if self.transposed else part.T, dtype=np.float64)


def blocks_of(records: Table, indices: Indices | None = None, *, numbers: int = _ROWS_AT_ONCE) -> Iterator[Block]:
    """All records, or those at ``indices``, a few MB at a time; of a part of a scan, about ``numbers`` numbers."""
    X = records.X
    if indices is None and records.outputs == 1 and not records.is_sparse and X.flags.fnc and X.dtype == np.float32:
        columns = frozen(X.T)
        step = max(64, numbers // records.features)
        for start in range(0, len(records), step):
            stop = min(start + step, len(records))
            yield Block(records, slice(start, stop), ColumnMajor(columns, start, stop))
    else:
        yield from (Block(records, which, rows) for which, rows in records.blocks(indices))


class RawCoefficients(NamedTuple):
    """(U, o, k) such that a raw row x with factor a scores a(xU + o) + k."""

    weights: Floats
    offset: Floats
    constant: Floats

    def scores(self, block: Block) -> Floats:
        """θᵀx̃ of each record of the block, (records, outputs)."""
        scores: Floats = block.rows @ self.weights
        scores += self.offset
        if block.factors is not None:
            scores *= block.factors
        scores += self.constant
        return scores


def lift(records: Table, params: Floats) -> RawCoefficients:
    """The parameters as they act on raw rows."""
    if len(params) != records.dim:
        raise ValueError(f"params: has {len(params)} numbers, must have {records.dim} for these records.")
    matrix = params.reshape(-1, records.outputs)
    weights = matrix[: records.features]
    constant = records.intercept * matrix[-1] if records.intercept else np.zeros(records.outputs)
    if records.transform is None:
        return RawCoefficients(weights, np.zeros(records.outputs), constant)
    weights = records.transform.apply(weights)
    return RawCoefficients(weights, -(records.transform.shift @ weights), constant)


class RowSum:
    """Σ rᵢ ⊗ x̃ᵢ, gathered block by block."""

    def __init__(self, records: Table) -> None:
        self._records = records
        self._raw = np.zeros((records.features, records.outputs))
        self._shortened, self._total = np.zeros(records.outputs), np.zeros(records.outputs)

    def add(self, block: Block, residuals: Floats) -> None:
        """Add the block's records with their r, (records, outputs)."""
        self._total += residuals.sum(axis=0)
        if block.factors is not None:
            residuals = residuals * block.factors
        self._shortened += residuals.sum(axis=0)
        self._raw += block.rows.T @ residuals

    def result(self) -> Floats:
        raw, records = self._raw, self._records
        if records.transform is not None:
            raw = records.transform.apply(raw - np.outer(records.transform.shift, self._shortened))
        if records.intercept:
            raw = np.concatenate([raw, records.intercept * self._total[None]])
        return raw.ravel()


class PersonSum:
    """Σ over people of α·clip_A(g − βg′) + γ·clip_B(g), g the mean or sum of a person's rᵢ ⊗ x̃ᵢ; block by block.

    Rows come person by person. What a block holds of one person is a vector of its own, so that no other
    person is touched by what is not finite in it; the last person of a block may go on in the next. Sums of sparse
    rows stay sparse unless a shift or a matrix fills them.
    """

    def __init__(self, records: Table, starts: Indices, mean: bool, rule: ClippingRule) -> None:
        self._records, self._starts, self._mean, self._rule = records, starts, mean, rule
        self._width = records.features + (records.intercept != 0.0)
        self._total = np.zeros(records.outputs * self._width)
        self._fills = records.mixes or (records.transform is not None and bool(records.transform.shift.any()))
        self._at = 0
        self._unfinished: list[Any] = []

    def add(self, block: Block, residuals: Floats, before: Floats | None) -> None:
        """Add the next rows with their r and, if β ≠ 0, r′: both (records, outputs)."""
        _, beta, _, gamma, _ = self._rule.numbers
        kinds = [residuals if before is None else residuals - beta * before]
        if gamma:
            kinds.append(residuals)
        begin, end = self._at, self._at + len(residuals)
        person, last = np.searchsorted(self._starts, begin, "right") - 1, np.searchsorted(self._starts, end)
        step = max(1, _AT_ONCE // self._total.size)
        while person < last:  # a wide person of few rows is not to fill the memory
            until = min(person + step, last)
            edges = np.clip(self._starts[person : until + 1], begin, end) - begin
            sums = [self._combined(block, kind, edges) for kind in kinds]
            # The first person may go on from the block before.
            for k, part in enumerate(self._unfinished):
                sums[k] = _stacked([sums[k][:1] + part, sums[k][1:]], axis=0)
            self._unfinished = []
            if self._starts[until] > end:
                self._unfinished = [total[-1:] for total in sums]
                until -= 1
            self._close([total[: until - person] for total in sums], self._starts[person : until + 1])
            person = until + bool(self._unfinished)
        self._at = end

    def _combined(self, block: Block, residuals: Floats, edges: Indices) -> Any:
        """Σ rᵢ ⊗ x̃ᵢ over the rows between ``edges``: one row per person, (people, outputs × width)."""
        records, count = self._records, len(edges) - 1
        part = slice(int(edges[0]), int(edges[-1]))
        rows, places = block.rows[part], edges - edges[0]
        columns: list[Any] = []
        for c in range(records.outputs):
            r = residuals[part, c]
            shortened = r if block.factors is None else r * block.factors[part, 0]
            raw = csr_around(shortened, np.arange(len(r)), places, (count, len(r))) @ rows
            if not isinstance(raw, np.ndarray) and not self._fills:
                if records.transform is not None:
                    raw.data *= records.transform.scale[raw.indices]
            else:
                raw = raw if isinstance(raw, np.ndarray) else raw.toarray()
                if records.transform is not None:
                    raw = raw - np.outer(np.add.reduceat(shortened, places[:-1]), records.transform.shift)
                    raw = records.transform.apply(raw.T).T
            columns.append(raw)
            if records.intercept:
                columns.append(records.intercept * np.add.reduceat(r, places[:-1])[:, None])
        return _stacked(columns, axis=1)

    def _close(self, sums: Sequence[Any], starts: Indices) -> None:
        """Clip and add people whose rows have all come."""
        alpha, _, first, gamma, second = self._rule.numbers
        shares = 1.0 / np.diff(starts) if self._mean else np.ones(len(starts) - 1)
        for total, weight, clip in zip(sums, (alpha, gamma), (first, second), strict=False):
            squares = (total * total).sum(axis=1) * shares * shares
            lengths = np.sqrt(squares * (1.0 + (40 + total.shape[1]) * _EPS) + total.shape[1] * _TINY)
            if self._rule.clipping == FLAT:
                factors = np.divide(clip, lengths, out=np.ones_like(lengths), where=lengths > clip) * shares
            else:
                factors = scale_factors(self._rule.clipping, lengths, clip) * shares
            if not (finite := np.isfinite(lengths)).all():
                total, factors = total[finite], factors[finite]
            self._total += weight * (factors @ total)

    def result(self) -> Floats:
        return self._total.reshape(self._records.outputs, self._width).T.ravel()


def _stacked(blocks: Sequence[Any], axis: int) -> Any:
    if isinstance(blocks[0], np.ndarray):
        return np.concatenate(blocks, axis=axis)
    from scipy import sparse

    return (sparse.hstack if axis else sparse.vstack)(blocks, format="csr")


def contributions(residuals: Floats, before: Floats | None, norms: Floats, rule: ClippingRule) -> Floats:
    """α·clip_A(r − βr′) + γ·clip_B(r), the clips acting on ‖r‖‖x̃‖; ``before`` is r′, ``None`` if β = 0."""
    alpha, beta, first, gamma, second = rule.numbers
    moved = residuals if before is None else residuals - beta * before
    combined = _clipped(moved, norms, first, rule.clipping)
    if alpha != 1.0:
        combined *= alpha
    if gamma:
        combined += gamma * _clipped(residuals, norms, second, rule.clipping)
    return combined


def _clipped(residuals: Floats, norms: Floats, clip: float, clipping: Clipping) -> Floats:
    """Shorten each row so that ‖r‖·norm ≤ clip; what is not finite becomes zero."""
    lengths = np.abs(residuals[:, 0]) if residuals.shape[1] == 1 else np.linalg.norm(residuals, axis=1)
    lengths *= norms
    if clip == math.inf:  # an evaluation
        clipped = residuals.copy()
    elif clipping != FLAT:
        clipped = residuals * scale_factors(clipping, lengths, clip)[:, None]
    else:
        # 1 exactly for what is short enough; a clip of 0 leaves nothing
        factors = np.maximum(lengths, clip or 1.0)
        clipped = residuals * np.divide(clip, factors, out=factors)[:, None]
    finite = np.isfinite(lengths)
    if not finite.all():
        clipped[~finite] = 0.0
    return clipped


def covers(objective: Objective) -> bool:
    """Whether :func:`hessian_product` knows this objective, and its regulariser states its curvature."""
    from quietgrad.tables.linear import LinearObjective

    return isinstance(objective, LinearObjective) and isinstance(objective.regularizer, Regularizer)


def hessian_product(
    objective: LinearObjective, records: Table | StreamedRecords, params: Floats, vector: Floats
) -> Floats:
    """∇²F(θ)·v of the risk with its regulariser, without forming the Hessian; not private.

    A score moves by tᵢ = x̃ᵢᵀv along v, and the residual r by r′(scoreᵢ)·tᵢ, so ∇²F·v = (1/n)Σ (r′tᵢ) ⊗ x̃ᵢ plus the
    regulariser's part.
    """
    total, everyone = np.zeros(len(params)), Batch(records, None)
    if isinstance(records, Table):
        _add_products(params, vector, objective, everyone, total)
    else:  # a scan, part by part
        records.add(partial(_add_products, params, vector), everyone, total)
    return np.asarray(total / len(records) + objective.regularizer.curvature(params) * vector)


def _add_products(params: Floats, vector: Floats, objective: LinearObjective, batch: Batch, out: Floats) -> None:
    """out += Σ ∇²fᵢ(θ)·v."""
    records: Table = batch.records
    at, along, total = lift(records, params), lift(records, vector), RowSum(records)
    for block in blocks_of(records):
        total.add(block, objective._weighed(objective.bends(at.scores(block), block.y, along.scores(block)), block))
    out += total.result()
