"""Private whitening of a linear model's features: the queries it needs and the map back to the raw features.

A mean and a second-moment matrix, released once, give a public transform x ↦ S(x − m) that makes features nearly
uncorrelated and of equal size. Gradient descent on transformed rows then needs tens of steps, not thousands, and
each step's noise is the same in all directions that matter. Nothing but the two releases sees the data, and the
table itself is never changed: the transform acts on sums and weights. Means and moments are those of the raw rows
of a :class:`~quietgrad.tables.table.Table`, before any transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.session.contributions import ClippingRule, check_clip
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import UserLevelObjective, WeightedRows, rows_of
from quietgrad.tables.range_queries import check_everyone, pair_bound
from quietgrad.tables.table import Affine, Array, Floats, Matrix, Table, frozen

__all__ = [
    "CentredMoments", "CentredNormHistogram", "FeatureMean", "RowNormHistogram", "SecondMomentMatrix",
    "WhitenedGradient", "Whitening",
]  # fmt: skip


_EIGHTHS = 48  # of an octave that lengths of centred rows are counted in: six octaves
_LARGEST = 1e75  # its fourth power is finite, so one absurd record cannot turn a sum into NaN


@dataclass(frozen=True)
class FeatureMean:
    """Σ clip_C(xᵢ) of the raw rows: divided by n, a private mean to centre with."""

    clip: float

    power: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        if not (math.isfinite(self.clip) and self.clip > 0.0):
            raise SettingError("{clip}: must be a finite number > 0.", clip=self.clip)

    @property
    def bound(self) -> float:
        return self.clip

    def dim(self, records: Any) -> int:
        return int(records.features)

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        slack = 1.0 + (16 + len(out)) * float(np.finfo(np.float64).eps)
        shared = rows_of(batch)
        if self.power == 1 and _is_column_major(shared.records.X) and shared.indices is None:
            self._add_columns(shared, slack, out)
            return
        for block, counted in shared.blocks():
            values = _mapped(block, self._powers)
            lengths = np.sqrt(np.asarray(_mapped(values, np.square).sum(axis=1)).ravel()) * slack
            factors = (self.clip / np.maximum(lengths, self.clip)) / (1.0 + 1e-12) * counted
            out += values.T @ factors

    def _powers(self, values: Array) -> Array:
        """What is summed of each entry."""
        values = np.clip(values, -_LARGEST, _LARGEST)
        return values if self.power == 1 else values**self.power

    def _add_columns(self, shared: WeightedRows, slack: float, out: Floats) -> None:
        """The same of a part of a scan, whose columns need no copy in float64; float32 is never absurdly large."""
        from quietgrad.tables.kernels import column_sums, row_squares

        columns = frozen(shared.records.X.T)
        lengths = np.sqrt(row_squares(columns)) * slack
        factors = (self.clip / np.maximum(lengths, self.clip)) / (1.0 + 1e-12) * shared.of(slice(None))
        out += column_sums(columns, 0, len(factors), factors)


def _is_column_major(X: Matrix) -> bool:
    """Whether a matrix lies as the parts of a scan do."""
    return isinstance(X, np.ndarray) and X.flags.fnc and X.dtype == np.float32


@dataclass(frozen=True)
class MeanSquares(FeatureMean):
    """Σ clip_C(xᵢ∘xᵢ): the diagonal of the second moments. Squares are never negative, so under replace-one the
    bound is C/√2, whatever the signs of the features.
    """

    relation: Relation = Relation.ADD_REMOVE

    power: ClassVar[int] = 2

    @property
    def bound(self) -> float:
        return pair_bound(self.clip, self.relation)

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        check_everyone(batch, self.relation)
        super().sum_into(objective, batch, out)


def _mapped(block: Matrix, function: Callable[[Array], Array]) -> Any:
    """Apply an entrywise function that keeps 0 at 0."""
    if isinstance(block, np.ndarray):
        return function(block)
    mapped = block.copy()
    mapped.data = function(block.data.astype(np.float64))
    return mapped


@dataclass(frozen=True)
class SecondMomentMatrix:
    """Σ x̄ᵢx̄ᵢᵀ of rows shortened to length R, as its upper triangle with off-diagonal entries times √2.

    In these coordinates the Euclidean norm is the Frobenius norm, and isotropic Gaussian noise is GOE noise: the
    same privacy as independent noise on the entries of the triangle for a √2 smaller spectral norm. One record has
    norm at most R²; two positive semi-definite ones are at most √2·R² apart, so under replace-one the bound is
    R²/√2 instead of R².
    """

    clip: float
    relation: Relation = Relation.ADD_REMOVE

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        check_clip("clip squared", self.clip * self.clip)

    @property
    def bound(self) -> float:
        return pair_bound(self.clip * self.clip, self.relation)

    def dim(self, records: Any) -> int:
        return int(records.features * (records.features + 1) // 2)

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        if batch.indices is not None:
            raise ValueError("the second-moment matrix uses all records: plan it with FullBatch() sampling.")
        shared = rows_of(batch)
        features = shared.records.features
        total = np.zeros((features, features))
        slack = 1.0 + (16 + features) * float(np.finfo(np.float64).eps)
        for block, counted in shared.blocks():
            rows = _shortened(self._seen(block), self.clip / slack, np.sqrt(counted))
            product = rows.T @ rows
            total += product if isinstance(product, np.ndarray) else product.toarray()
        out += self.pack(total)

    def _seen(self, block: Matrix) -> Matrix:
        """The rows whose moments are summed."""
        return block

    @staticmethod
    def pack(matrix: Floats) -> Floats:
        """The upper triangle of a symmetric matrix, off-diagonal entries times √2."""
        weights = np.where(np.eye(len(matrix), dtype=bool), 1.0, math.sqrt(2.0))
        return np.asarray((matrix * weights)[np.triu_indices(len(matrix))])

    @staticmethod
    def unpack(triangle: Floats, features: int) -> Floats:
        """The symmetric matrix of a released triangle."""
        matrix = np.zeros((features, features))
        matrix[np.triu_indices(features)] = triangle
        upper = np.triu(matrix, 1) / math.sqrt(2.0)
        return np.asarray(upper + upper.T + np.diag(np.diag(matrix)))


@dataclass(frozen=True, eq=False)
class CentredMoments(SecondMomentMatrix):
    """Σ c̄ᵢc̄ᵢᵀ of centred rows cᵢ = xᵢ − m, each shortened to length R, packed as the uncentred ones are.

    Sensitivity: m is public or was released before, so cᵢ is a function of record i and of what is known. A record
    adds one matrix c̄c̄ᵀ of rank one with Frobenius norm ‖c̄‖² ≤ R², whatever m is. Two such matrices are at most
    √(‖c̄‖⁴ + ‖c̄'‖⁴ − 2(c̄·c̄')²) ≤ √2·R² apart. These are the bounds of :class:`SecondMomentMatrix`; but centred rows
    are shorter than rows that have a large mean in common, so R, and the noise with R², may be much smaller.
    """

    centre: Floats = field(default_factory=lambda: np.zeros(1))

    def _seen(self, block: Matrix) -> Matrix:
        dense: Array = block if isinstance(block, np.ndarray) else block.toarray()
        return dense - self.centre


def _shortened(block: Matrix, clip: float, weights: Floats) -> Any:
    """Rows cut to length ``clip``, then times their weights."""
    if isinstance(block, np.ndarray):
        lengths = np.sqrt(np.einsum("ij,ij->i", block, block))
        return block * (weights * clip / np.maximum(lengths, clip))[:, None]
    values, counts = block.data.astype(np.float64), np.diff(block.indptr)
    squares = np.zeros(len(counts))
    np.add.at(squares, np.repeat(np.arange(len(counts)), counts), values * values)
    factors = weights * clip / np.maximum(np.sqrt(squares), clip)
    rows = block.copy()
    rows.data = values * np.repeat(factors, counts)
    return rows


@dataclass(frozen=True)
class RowNormHistogram:
    """Counts of row norms between public powers of √2: one record is one count, so the bound is 1."""

    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        return pair_bound(1.0, self.relation)

    @property
    def edges(self) -> Floats:
        """Upper edges of the bins; the last bin is open."""
        return np.exp2(np.arange(-40, 41) / 2.0)

    def dim(self, records: object) -> int:
        return len(self.edges) + 1

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        check_everyone(batch, self.relation)
        shared = rows_of(batch)
        norms = self._norms(shared.records)
        which = slice(None) if shared.indices is None else shared.indices
        bins = np.searchsorted(self.edges, norms[which])
        out += np.bincount(bins, np.broadcast_to(shared.of(which), bins.shape), len(out))

    def _norms(self, records: Any) -> Floats:
        """The lengths that are counted."""
        return Table(records.X, None).norms

    def quantile(self, counts: Floats, fraction: float, noise: float) -> float:
        """The smallest edge that about ``fraction`` of the rows do not exceed, from noisy counts.

        Counts within four deviations of zero are taken as zero, so that noise in far bins is not a long row.
        """
        kept = np.where(counts > 4.0 * noise, counts, 0.0)
        if not kept.any():
            return float(self.edges[int(np.argmax(counts[:-1]))])
        reached = np.searchsorted(np.cumsum(kept), fraction * kept.sum())
        return float(self.edges[min(int(reached), len(self.edges) - 1)])


@dataclass(frozen=True, eq=False)
class CentredNormHistogram(RowNormHistogram):
    """Counts of the lengths of rows centred by a public or released m, in eighths of an octave below ``reach``.

    One record is one count, wherever the edges lie and whatever m is: the bound is that of the row norms.
    """

    centre: Floats = field(default_factory=lambda: np.zeros(1))
    reach: float = 1.0

    @property
    def edges(self) -> Floats:
        """Upper edges of the bins; the last bin is open."""
        return self.reach * np.exp2(np.arange(-_EIGHTHS, 1) / 8.0)

    def _norms(self, records: Any) -> Floats:
        return Table(records.X, None, transform=Affine(self.centre, np.ones(len(self.centre)))).norms


@dataclass(frozen=True, eq=False)
class Whitening:
    """The public map between parameters of whitened and of raw rows.

    With shift m, matrix S and intercept column c: a model (u, β) on S(x−m) is the model w = Su with intercept
    coordinate β − (m·w)/c on x.

    Args:
        transform: m and S.
        column: c, or 0 if the model has no intercept (then m must be 0).
        outputs: scores per record.
        radius: root mean square length of a whitened row, intercept included, as the released moments tell.
    """

    transform: Affine
    column: float
    outputs: int
    radius: float = 1.0

    @classmethod
    def from_moments(
        cls, mean: Floats, second: Floats, *, floor: float, column: float, outputs: int, freedom: float = math.inf
    ) -> Whitening:
        """S = (Σ + τI)^(−1/2) with Σ the (noisy) covariance, negative eigenvalues taken as zero.

        Args:
            mean: m; ignored without an intercept, which would have to take up the shift.
            second: second moments, a matrix or its diagonal.
            floor: least τ, the size of the noise: directions the release cannot tell from noise are not blown up.
            freedom: the most degrees of freedom Σ λ/(λ+τ) that may be left; τ grows until that holds. As τ → ∞,
                descent in whitened coordinates becomes descent in the raw ones.
        """
        shift = mean if column else np.zeros_like(mean)
        vectors = None
        if second.ndim == 1:
            values = second - shift * shift
        else:
            values, vectors = np.linalg.eigh(second - np.outer(shift, shift))
        values = np.maximum(values, 0.0)
        tau = _damping(values, floor, freedom)
        if vectors is None:
            matrix = 1.0 / np.sqrt(values + tau)
        else:
            matrix = (vectors / np.sqrt(values + tau)) @ vectors.T
            matrix = (matrix + matrix.T) * 0.5
        radius = math.sqrt(float((values / (values + tau)).sum()) + column**2)
        return cls(Affine(shift, matrix), column, outputs, radius)

    def to_raw(self, params: Floats) -> Floats:
        """Parameters of the model on raw rows."""
        matrix = params.reshape(-1, self.outputs)
        if not self.column:
            return self.transform.apply(matrix).ravel()
        weights = self.transform.apply(matrix[:-1])
        last = matrix[-1] - self.transform.shift @ weights / self.column
        return np.concatenate([weights, last[None]]).ravel()

    def from_raw(self, params: Floats) -> Floats:
        """Parameters of the model on whitened rows: what :meth:`to_raw` takes apart."""
        matrix, scale = params.reshape(-1, self.outputs), self.transform.scale
        weights = matrix[:-1] if self.column else matrix
        inner = np.linalg.solve(scale, weights) if scale.ndim == 2 else weights / scale[:, None]
        if not self.column:
            return np.asarray(inner.ravel())
        last = matrix[-1] + self.transform.shift @ weights / self.column
        return np.concatenate([inner, last[None]]).ravel()

    def pull_back(self, gradient: Floats) -> Floats:
        """The gradient in whitened coordinates of a function whose gradient on raw parameters is given."""
        matrix = gradient.reshape(-1, self.outputs)
        if not self.column:
            return self.transform.apply(matrix).ravel()
        inner = matrix[:-1] - np.outer(self.transform.shift, matrix[-1]) / self.column
        return np.concatenate([self.transform.apply(inner), matrix[-1:]]).ravel()


def _damping(values: Floats, floor: float, freedom: float) -> float:
    """The smallest τ ≥ ``floor`` with Σ λ/(λ+τ) ≤ ``freedom``, to a part in a million."""

    def left(tau: float) -> float:
        return float((values / (values + tau)).sum())

    if left(floor) <= freedom:
        return floor
    low, high = floor, max(float(values.sum()) / freedom, floor)  # Σ λ/(λ+τ) ≤ Σ λ/τ
    while high > low * (1.0 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if left(middle) > freedom else (low, middle)
    return high


@dataclass(frozen=True, slots=True, eq=False)
class WhitenedGradient:
    """Σ clip_C(∇fᵢ) with respect to whitened parameters."""

    params: Floats
    clip: float
    whitening: Whitening

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)

    @property
    def bound(self) -> float:
        return self.clip

    def dim(self, records: object) -> int:
        return len(self.params)

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        view, records = whitened_view(objective, batch, self.whitening.transform)
        view.add(batch._replace(records=records), (self.params,), ClippingRule.gradient(self.clip), out)


def whitened_view(objective: Any, batch: Batch, transform: Affine) -> tuple[Any, Any]:
    """The objective and the records in whitened coordinates; the records are laid out once for a transform."""
    if isinstance(objective, UserLevelObjective):
        people = batch.records
        view, rows = whitened_view(objective.loss, Batch(people.rows, None), transform)
        return replace(objective, loss=view), people.seen(rows)
    view = replace(objective, transform=transform, row_bound=None, rows="clip")
    return view, batch.records.view(transform, lambda: view.prepare(batch.records))


@dataclass(frozen=True, eq=False)
class WhitenedInformation:
    """Σ h(scoreᵢ)·x̃ᵢx̃ᵢᵀ with respect to whitened parameters, each shortened to a norm of ``clip``; packed.

    Packed as :class:`~quietgrad.tables.whitening.SecondMomentMatrix` is, so that equal noise on all
    entries is noise of the Gaussian orthogonal ensemble. A record's matrix has rank one and no negative eigenvalue:
    two of them are at most √2·clip apart.
    """

    params: Floats
    clip: float
    whitening: Whitening
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        return pair_bound(self.clip, self.relation)

    def dim(self, records: object) -> int:
        return len(self.params) * (len(self.params) + 1) // 2

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        if batch.indices is not None:
            raise ValueError("the information matrix uses all records: plan it with FullBatch() sampling.")
        view, records = whitened_view(objective, batch, self.whitening.transform)
        size = len(self.params)
        total = np.zeros((size, size))
        # Rounding of products over p entries is covered as in the row norms.
        slack = 1.0 + (64 + 4 * size) * float(np.finfo(np.float64).eps)
        view.add_hessians(batch._replace(records=records), self.params, self.clip / slack, total)
        out += np.nan_to_num(SecondMomentMatrix.pack(total))

    def unpack(self, released: Floats) -> Floats:
        """The symmetric matrix of a released triangle."""
        return SecondMomentMatrix.unpack(released, len(self.params))
