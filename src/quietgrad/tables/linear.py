"""Objectives whose loss sees a record only through linear scores θᵀx̃ᵢ: their clipped sums are scalar work per row.

The per-example gradient is rᵢ ⊗ x̃ᵢ, with r the derivative of the loss at the scores (one number, or one per
class), so its norm is ‖rᵢ‖‖x̃ᵢ‖ and clipping, differencing and momentum act on rᵢ alone. Index batches go to one
compiled call (:mod:`quietgrad.tables.kernels`); the full batch uses BLAS or scipy.sparse in blocks and
needs no compiler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.session.clipping import FLAT
from quietgrad.core.session.contributions import ClippingRule, Numbers, rounding_safe_clip
from quietgrad.core.session.objectives import (
    BaseObjective,
    Batch,
    Indices,
    LossConstants,
    NoRegularizer,
    Regularizer,
    StreamedRecords,
    add_gradients,
    add_hessians,
)
from quietgrad.tables.full_batch import (
    HESSIAN_NUMBERS,
    Block,
    PersonSum,
    RawCoefficients,
    RowSum,
    blocks_of,
    contributions,
    lift,
)
from quietgrad.tables.local_steps import local_updates, transformed_rows
from quietgrad.tables.privacy_units import GroupIndex, SurveyData
from quietgrad.tables.scanned import RowBlock, Scanned, ScanSource
from quietgrad.tables.table import (
    Affine,
    Floats,
    Matrix,
    Packed,
    Rows,
    Table,
    Targets,
    lay_out,
    numbers_of,
)

if TYPE_CHECKING:
    from quietgrad.tables.queries.local_update import LocalTraining

Task = Literal["binary", "multiclass", "regression"]
_UNCLIPPED = ClippingRule.gradient(math.inf)


@dataclass(frozen=True, kw_only=True)
class LinearObjective(BaseObjective, ABC):
    """Base class of the losses in :mod:`quietgrad.tables.losses`.

    Parameters are the flattened (features [+ 1], outputs) weight matrix, the intercept row last.

    Args:
        regularizer: a public penalty.
        intercept: whether to add a constant column.
        intercept_scale: the value of that column; it counts in every row's norm.
        row_bound: a public bound R on the norm of the transformed features, intercept not included.
        rows: ``"clip"`` shortens rows that are longer than ``row_bound``, ``"normalize"`` brings every row to it.
        transform: a public shift and scale of the features, applied without touching the table.
        class_weights: public weights of the classes, at most 1. A record is clipped after it is weighted.
    """

    regularizer: Regularizer = field(default_factory=NoRegularizer)
    intercept: bool = False
    intercept_scale: float = 1.0
    row_bound: float | None = None
    rows: Rows = "clip"
    transform: Affine | None = None
    class_weights: tuple[float, ...] | None = None

    silent_batches: ClassVar[bool] = True
    """Sums over index batches raise no warnings, whatever the records hold."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.intercept_scale) and self.intercept_scale > 0.0):
            raise ValueError(
                f"intercept_scale={self.intercept_scale!r}: must be a finite number > 0. "
                "For no intercept pass intercept=False."
            )
        if self.row_bound is not None and not (math.isfinite(self.row_bound) and self.row_bound > 0.0):
            raise SettingError(
                "{row_bound}: must be a finite number > 0, or None for no bound.", row_bound=self.row_bound
            )
        if self.rows not in ("clip", "normalize"):
            raise SettingError("{rows}: must be 'clip' or 'normalize'.", rows=self.rows)
        if self.rows == "normalize" and self.row_bound is None:
            raise SettingError("{rows='normalize'}: needs a public row_bound to normalize to.")
        weights = self.class_weights
        if weights is not None and (
            self.task == "regression"
            or len(weights) != max(self.outputs, 2)
            or not 0.0 < min(weights) <= max(weights) <= 1.0
        ):
            raise ValueError("class_weights: must be one number in (0, 1] for each class.")

    # --- what a loss says about itself; nothing about it is written anywhere else ---------------------------------

    task: ClassVar[Task]
    """What its targets are: 0 or 1, class codes, or any finite numbers."""
    number: ClassVar[str | None] = None
    """The field that is the loss's one number h, if it has one."""
    convex: ClassVar[bool] = True
    compiled: ClassVar[bool] = False
    """Whether index batches go to a compiled kernel; other losses are summed in blocks, like the full batch."""
    pace: ClassVar[float | None] = None
    """The usual curvature in the score, where the largest, L, is far from it; full-batch steps are sized by it."""
    log_link: ClassVar[bool] = False
    """Whether exp(score) is the mean of a target ≥ 0, whose unit then moves the intercept alone."""

    @property
    def outputs(self) -> int:
        """Scores per record: 1, or the number of classes."""
        return 1

    @abstractmethod
    def moduli(self) -> tuple[float | None, float | None, float | None]:
        """G, L and ρ for rows of norm 1, ``None`` where there is none; they grow as R, R² and R³."""

    @abstractmethod
    def losses(self, scores: Floats, y: Targets) -> Floats:
        """f of each record, from scores of shape (records, outputs)."""

    @abstractmethod
    def residuals(self, scores: Floats, y: Targets) -> Floats:
        """∂f/∂score, (records, outputs)."""

    @abstractmethod
    def bends(self, scores: Floats, y: Targets, tilts: Floats) -> Floats:
        """∂²f/∂score² applied to ``tilts``, (records, outputs): how residuals move with the scores."""

    def add_indexed(
        self, table: Packed, indices: Indices, params: Floats, previous: Floats, rule: Numbers, out: Floats
    ) -> None:
        """The same sums over an index batch, in one compiled call that checks no length; if it is ``compiled``."""
        raise NotImplementedError

    def constants(self, row_bound: float | None = None) -> LossConstants:
        """The constants of the risk for rows bounded by R, the regulariser's in them.

        Args:
            row_bound: R, on the features; the objective's own if not given. The intercept column is added to it.
        """
        bound = self.row_bound if row_bound is None else row_bound
        if bound is None:
            raise SettingError(
                "{row_bound=None}: constants hold for bounded rows only. Declare a public row_bound."
            )
        full = math.hypot(bound, self.column)
        moduli = self.moduli()
        lipschitz, smoothness, curvature = (
            None if m is None else m * full**k for m, k in zip(moduli, (1, 2, 3), strict=True)
        )
        return LossConstants.of(
            self.regularizer,
            row_bound=full,
            lipschitz=lipschitz,
            smoothness=smoothness,
            hessian_lipschitz=curvature,
            convex=self.convex,
        )

    def negative_curvature(self) -> float | None:
        """Return the regulariser's negative curvature if the loss is convex, whatever the rows."""
        return self.regularizer.weak_convexity if self.convex else super().negative_curvature()

    # --- records --------------------------------------------------------------------------------------------

    @property
    def column(self) -> float:
        """The value of the constant column; 0 without an intercept."""
        return float(self.intercept_scale) if self.intercept else 0.0

    def prepare(self, data: object) -> Table:
        """Validate ``(X, y)``, or a table prepared before, and lay it out for this objective without copying it.

        A :class:`~quietgrad.data.scanning.Scan` is read once, to refuse what cannot be used, and stays where it is.

        Raises:
            DataError: the data cannot be used; the message names the reason and no value.
        """
        X: Any
        y: Any
        data, weights = SurveyData.of(data)
        if isinstance(data, Table):
            X, y, weights = data.X, data.y, data.sample_weights
        elif isinstance(data, RowBlock):
            X, y = data.X, data.y
        elif isinstance(data, ScanSource):
            return cast(Table, Scanned(self, data, (data.features + bool(self.column)) * self.outputs))
        else:
            try:
                X, y = cast(tuple[object, object], data)
            except (TypeError, ValueError):
                raise DataError("data: must be a pair (X, y) of a matrix and its targets.") from None
            X = lay_out(X)
        targets = numbers_of(y, "y")
        if targets.ndim != 1:
            raise DataError(f"y: has {targets.ndim} dimension(s), must be one number per record.")
        if len(targets) != X.shape[0]:
            raise DataError("X and y have different numbers of records.")
        if not np.isfinite(targets).all():
            raise DataError("y: contains NaN or infinite values. Drop those rows. No privacy budget was spent.")
        table = self._table(X, self._coded(targets))
        table.sample_weights = weights
        return table

    def _coded(self, y: Targets) -> npt.NDArray[Any]:
        """Return the targets as the kernels read them. Raise if they do not fit the task."""
        if self.task == "regression":
            return np.ascontiguousarray(y, dtype=np.float64)
        classes = max(self.outputs, 2)
        if not ((y >= 0) & (y < classes) & (y == np.floor(y))).all():
            labels = "0 and 1" if classes == 2 else f"the whole numbers 0 to {classes - 1}"
            raise DataError(f"y: labels must be {labels}. Encode the classes first.")
        return np.ascontiguousarray(y, dtype=np.float64 if self.task == "binary" else np.int64)

    def _table(self, X: Matrix, y: Targets | None) -> Table:
        return Table(
            X,
            y,
            outputs=self.outputs,
            intercept=self.column,
            transform=self.transform,
            row_bound=self.row_bound,
            rows=self.rows,
        )

    def initial(self, records: Table) -> Floats:
        return np.zeros(records.dim)

    # --- clipped sums ---------------------------------------------------------------------------------------

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        """out += Σ over the batch of what the rule makes of each record's gradients."""
        records: Table = batch.records
        if isinstance(records, StreamedRecords):
            records.add(partial(add_gradients, tuple(points), rule), batch, out)
            return
        params, previous = points[0], points[-1]  # one and the same where the rule has β = 0
        indices = batch.indices
        weighed = self.class_weights is not None or records.sample_weights is not None
        in_a_kernel = self.compiled and not weighed and rule.clipping == FLAT
        if indices is not None and in_a_kernel and not records.mixes:
            if not len(params) == len(previous) == len(out) == records.dim:  # the kernels do not check
                raise ValueError(f"params, previous, out: must have {records.dim} numbers for these records.")
            self.add_indexed(records.packed, indices, params, previous, rule.numbers, out)
            return
        if indices is not None and len(indices) and indices.min() < 0:  # numpy would count from the end
            raise IndexError("batch: an index lies outside the table")
        total = RowSum(records)
        with np.errstate(over="ignore", invalid="ignore"):
            at, other = lift(records, params), lift(records, previous) if rule.beta else None
            for block in blocks_of(records, indices):
                residuals = self._residuals(at, block)
                if rule != _UNCLIPPED:
                    before = None if other is None else self._residuals(other, block)
                    residuals = contributions(residuals, before, records.norms[block.which], rule)
                total.add(block, residuals)
            out += total.result()

    def _residuals(self, at: RawCoefficients, block: Block) -> Floats:
        return self._weighed(self.residuals(at.scores(block), block.y), block)

    def record_weights(self, block: Block) -> Floats:
        """Return the weight of each record in a block: that of its class times its own."""
        return self._weighed(np.ones(len(block.y)), block)

    def local_updates(
        self, batch: Batch, clients: GroupIndex, params: Floats, training: LocalTraining
    ) -> Iterator[Floats]:
        """θ_local − θ of clients that train on their own records, some at a time; one row each."""
        return local_updates(self, batch, clients, params, training)

    def _weighed(self, values: Floats, block: Block) -> Floats:
        """Values of records, times the public weights of their classes and their own weights."""
        if self.class_weights is None and block.weights is None:
            return values
        weights = np.ones(len(values)) if block.weights is None else block.weights
        if self.class_weights is not None:
            weights = weights * np.asarray(self.class_weights)[np.asarray(block.y, dtype=np.int64)]
        return np.asarray(values * (weights if values.ndim == 1 else weights[:, None]))

    @np.errstate(over="ignore", invalid="ignore")
    def add_people(
        self, batch: Batch, groups: GroupIndex, points: Sequence[Floats], rule: ClippingRule, out: Floats
    ) -> None:
        """out += Σ over people of what the rule makes of the mean or sum of their records' gradients."""
        records: Table = batch.records
        at, other = lift(records, points[0]), lift(records, points[-1]) if rule.beta else None
        order, starts = groups.flat()
        total = PersonSum(records, starts, groups.mean, rule)
        in_order = len(order) == len(records) and bool((order[1:] > order[:-1]).all())
        if not in_order and len(order) and not 0 <= order.min() <= order.max() < len(records):
            raise IndexError("batch: a person's record lies outside the table")
        for which, rows in records.blocks(None if in_order else order):
            block = Block(records, which, rows)
            total.add(block, self._residuals(at, block), None if other is None else self._residuals(other, block))
        out += total.result()

    @np.errstate(over="ignore", invalid="ignore")
    def row_losses(self, batch: Batch, params: Floats) -> Floats:
        """f of each row of the batch, in its order."""
        at = lift(batch.records, params)
        blocks = blocks_of(batch.records, batch.indices)
        parts = [self._weighed(self.losses(at.scores(block), block.y), block) for block in blocks]
        return np.concatenate([np.zeros(0), *parts])

    @np.errstate(over="ignore", invalid="ignore")
    def add_hessians(
        self, batch: Batch, params: Floats, clip: float, out: Floats, shares: Floats | None = None
    ) -> None:
        """out += Σ h(scoreᵢ)·x̃ᵢx̃ᵢᵀ, each shortened to a norm of at most ``clip``; for losses of one score.

        With ``shares`` the row at position i counts ``shares[i]`` times.
        """
        records: Table = batch.records
        if isinstance(records, StreamedRecords):
            records.add(partial(add_hessians, params, clip), batch, out)
            return
        if self.outputs != 1:
            raise ValueError(
                f"{type(self).__name__}: a summed Hessian is known for landscapes and one-score losses."
            )
        at, limit = lift(records, params), rounding_safe_clip(clip)
        for block in blocks_of(records, batch.indices, numbers=HESSIAN_NUMBERS):
            scores = at.scores(block)
            bends = self._weighed(self.bends(scores, block.y, np.ones_like(scores)), block)
            rows = transformed_rows(records, block)
            squares = (rows * rows).sum(axis=1, keepdims=True)
            finite = np.isfinite(squares)
            if not finite.all():
                rows = np.where(finite, rows, 0.0)  # not in place: a block may be the table; and 0·∞ is not 0
            reach = limit / np.maximum(squares, 1e-300)
            weights = np.clip(np.nan_to_num(bends), -reach, reach)
            if shares is not None:
                weights = weights * shares[block.which, None]
            out += rows.T @ (weights * rows)

    # --- losses and predictions -----------------------------------------------------------------------------

    @np.errstate(over="ignore", invalid="ignore")
    def loss_sum(self, batch: Batch, params: Floats, bound: float) -> float:
        """Σ min(fᵢ(θ), bound), each term in [0, bound]; a loss that is not a number counts as the bound."""
        if isinstance(batch.records, StreamedRecords):
            return batch.records.loss_sum(batch, params, bound)
        at = lift(batch.records, params)
        total = 0.0
        for block in blocks_of(batch.records, batch.indices):
            losses = self._weighed(self.losses(at.scores(block), block.y), block)
            if bound < math.inf:
                losses = np.fmin(np.maximum(losses, 0.0), bound)  # of a NaN and the bound, the bound
            total += float(losses.sum())
        return total

    def decision(self, data: object, params: Floats) -> Floats:
        """The scores θᵀx̃ of a table or of raw features: one per record, or one per record and class."""
        records = data if isinstance(data, Table) else self._table(lay_out(data), None)
        at = lift(records, params)
        scores = np.empty((len(records), self.outputs))
        for block in blocks_of(records):
            scores[block.which] = at.scores(block)
        return scores[:, 0] if self.outputs == 1 else scores

    def predict(self, data: object, params: Floats) -> npt.NDArray[Any]:
        """Predict the class code of each record, or its target in a regression."""
        scores = self.decision(data, params)
        if self.task == "regression":
            return scores
        codes = scores > 0.0 if self.outputs == 1 else scores.argmax(axis=1)
        return np.asarray(codes, dtype=np.int64)

    def coefficients(self, params: Floats) -> tuple[Floats, Floats]:
        """(W, b) with scores x·W + b on the *untransformed* features of any row that was not shortened.

        Shapes (features, outputs) and (outputs,).
        """
        matrix = params.reshape(-1, self.outputs)
        weights = matrix[:-1] if self.column else matrix
        bias = self.column * matrix[-1] if self.column else np.zeros(self.outputs)
        if self.transform is None:
            return weights.copy(), bias
        weights = self.transform.apply(weights)
        return weights, bias - self.transform.shift @ weights
