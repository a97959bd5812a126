"""A table made ready for linear models: laid out once, never copied, with everything else about a row virtual.

A model sees the row x̃ᵢ = (aᵢ · s∘(xᵢ−m), c). The raw xᵢ stay as they were given (dense or CSR, float32 or
float64); the public shift m and scale s, the row's shortening aᵢ and the constant intercept column c are applied
inside the arithmetic. A centred sparse table therefore stays sparse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

NOT_FINITE = (
    "X: contains NaN or infinite values. Drop those rows, or fill them with public constants, not with "
    "statistics of these data. No privacy budget was spent."
)
Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]
Which = slice | Array
"""Positions of rows, or a slice of them."""
Matrix: TypeAlias = "Array | csr_array[Any]"
_BLOCK = 1 << 18  # numbers checked at a time: temporaries stay small and in the cache


def rows_in(X: Any) -> int:
    """The number of records of an array, a frame or a list."""
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def lay_out(X: object) -> Any:
    """Return ``X`` as C-contiguous float32/float64, or as CSR without duplicates, without a copy if it is one.

    Raises:
        DataError: not a numeric matrix, no rows, no columns, NaN or infinite values.
    """
    table: Any = X
    is_sparse = hasattr(table, "tocsr")
    table = table.tocsr() if is_sparse else numbers_of(table, "X")
    if table.ndim != 2:
        raise DataError(f"X: has {table.ndim} dimension(s), must have 2. Reshape to (records, features).")
    for count, what in zip(table.shape, ("records", "features"), strict=True):
        if count == 0:
            raise DataError(f"X: has no {what}.")
    dtype = table.dtype
    if dtype.kind not in "buif":
        raise DataError(f"X: has values of type {dtype.name}, must be numbers. Encode categories first.")
    if dtype not in (np.float32, np.float64):
        dtype = np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)  # float32 holds small integers exactly
    if is_sparse:
        table = csr_around(table.data.astype(dtype, copy=False), table.indices, table.indptr, table.shape)
        if not np.isfinite(table.data).all():
            raise DataError(NOT_FINITE)
        if not table.has_canonical_format:  # a duplicated entry would make a row longer than its computed norm
            table = table.copy()
            table.sum_duplicates()
        return table
    table = np.ascontiguousarray(table, dtype=dtype)
    for start in range(0, len(table), step := max(1, _BLOCK // table.shape[1])):
        if not np.isfinite(table[start : start + step]).all():
            raise DataError(NOT_FINITE)
    return table


def numbers_of(values: object, what: str) -> Array:
    """``values`` as an array of numbers; an error names columns and how many rows, never what a cell holds.

    numpy's own errors quote the cell they failed at, so nothing is converted before every cell is known to be a
    number; nor is a text type named, whose width is the length of the longest cell.
    """
    try:
        cells = _cells(values)
    except (TypeError, ValueError):
        raise DataError(f"{what}: rows of different lengths. Pass one row per record, all equally long.") from None
    if cells.dtype.kind in "buif":
        return cells
    _refuse(values, cells, what, lambda cell: not isinstance(cell, Real))
    try:
        return cells.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{what}: holds numbers that are no float64. Rescale them first.") from None


def _cells(values: object) -> Array:
    array = np.asarray(values)
    return array if array.dtype.kind in "buifc" else np.asarray(values, dtype=object)


def refuse_text(values: object, what: str) -> None:
    """Raise DataError as :func:`numbers_of` does if a cell is text or a list; other checks would quote it."""
    if hasattr(values, "tocsr"):
        return
    try:
        cells = _cells(values)
    except (TypeError, ValueError):
        return  # not a table at all, which is said without looking at cells
    if cells.dtype.kind == "c":  # scikit-learn would print the array
        raise DataError(f"{what}: Complex data not supported; give real numbers.")
    if cells.dtype.kind not in "buif":
        text = (str, bytes, list, tuple, set, np.ndarray)
        _refuse(values, cells, what, lambda cell: isinstance(cell, text))


def _refuse(values: object, cells: Array, what: str, is_wrong: Callable[[object], bool]) -> None:
    """Raise if a cell is wrong; the message names the first column with such cells and counts its rows."""
    wrong = np.asarray(np.frompyfunc(is_wrong, 1, 1)(cells), dtype=bool)
    if not wrong.any():
        return
    bad = np.flatnonzero(wrong.any(axis=0)) if cells.ndim == 2 else np.zeros(1, dtype=np.int64)
    count = int(wrong[:, bad[0]].sum() if cells.ndim == 2 else wrong.sum())
    rows = f"{count} rows are" if count > 1 else "1 row is"
    if cells.ndim != 2:
        raise DataError(f"{what}: must be one number per record and {rows} not. Encode them as numbers first.")
    names = getattr(values, "column_names", None)  # an Arrow table's ``columns`` are the cells themselves
    if not isinstance(names, list):
        names = list(getattr(values, "columns", range(cells.shape[1])))
    more = f" (and {len(bad) - 1} more columns)" if len(bad) > 1 else ""
    raise DataError(
        f"{what}: column {names[bad[0]]!r}{more} must be numbers and {rows} not. "
        "Encode categories, or fill what is missing, first."
    )


def csr_around(data: Array, indices: Array, indptr: Array, shape: tuple[int, int]) -> Any:
    """A CSR matrix around these very arrays: scipy's constructor may convert, and so copy, 64-bit indices."""
    import scipy.sparse as sparse

    matrix = sparse.csr_array(shape, dtype=data.dtype)
    matrix.data, matrix.indices, matrix.indptr = data, indices, indptr
    return matrix


Packed = tuple[Any, ...]
"""What the compiled kernels read of a table: see :attr:`Table.packed`."""
Rows = Literal["clip", "normalize"]
Targets = npt.NDArray[Any]
"""One float64 number or int64 class code per record."""

_EPS = float(np.finfo(np.float64).eps)
_TINY = 1e-290  # squares below 1e-308 lose their digits; this much per feature covers what they were
_NO_FLOATS: Floats = np.zeros(0)


@dataclass(frozen=True, eq=False)
class Affine:
    """The public feature transform x ↦ s∘(x−m), or x ↦ S(x−m) with a symmetric matrix S in place of s.

    A matrix whitens correlated features. It is applied to sums and weights, never to the table.
    """

    shift: Floats
    scale: Floats

    def __post_init__(self) -> None:
        for name, given, dimensions in (("shift", self.shift, (1,)), ("scale", self.scale, (1, 2))):
            value = np.array(given, dtype=np.float64)
            if value.ndim not in dimensions or not np.isfinite(value).all():
                raise ValueError(f"{name}: must be a vector of finite numbers, one per feature.")
            object.__setattr__(self, name, value)
        if any(size != self.shift.size for size in self.scale.shape):
            raise ValueError(
                f"shift has {self.shift.size} numbers and scale {self.scale.shape[0]}: one per feature."
            )
        if self.is_matrix and not np.array_equal(self.scale, self.scale.T):
            raise ValueError("scale: as a matrix it must be symmetric.")

    @property
    def is_matrix(self) -> bool:
        """Whether features are mixed, not only scaled."""
        return self.scale.ndim == 2

    def apply(self, matrix: Floats) -> Floats:
        """S times ``matrix``, one row per feature."""
        return self.scale @ matrix if self.is_matrix else self.scale[:, None] * matrix


class Table:
    """Validated records (X, y) with their row norms; what a linear objective's ``prepare`` returns.

    Args:
        X: a matrix as :func:`~quietgrad.tables.table.lay_out` returns it.
        y: one float64 target or int64 class code per record, or ``None`` for features alone.
        outputs: numbers a linear model computes per record: 1, or the number of classes.
        intercept: the value of the virtual constant column; 0 for none.
        transform: a public shift and scale of the features.
        row_bound: a public bound R on ‖aᵢ·s∘(xᵢ−m)‖, the intercept not included.
        rows: ``"clip"`` shortens a row that is longer than R, every one alike; ``"normalize"`` brings every row to
            length R exactly.
        sample_weights: what each record counts, in [0, 1]; ``None`` if all count 1. A record is clipped after it is
            weighted, so a weight moves no bound.
    """

    def __init__(
        self,
        X: Matrix,
        y: Targets | None,
        *,
        outputs: int = 1,
        intercept: float = 0.0,
        transform: Affine | None = None,
        row_bound: float | None = None,
        rows: Rows = "clip",
        sample_weights: Floats | None = None,
    ) -> None:
        self.X: Any = X
        self.y = y
        self.sample_weights = sample_weights
        self.outputs = outputs
        self.intercept = intercept
        self.transform = transform
        self.row_bound = row_bound
        self.normalizes = rows == "normalize"
        self._view: tuple[object, Table] | None = None
        self.features = int(X.shape[1])
        self.dim = (self.features + (intercept != 0.0)) * outputs
        """Number of parameters: (features + intercept) × outputs."""
        self.is_sparse = not isinstance(X, np.ndarray)
        if transform is not None and transform.shift.size != self.features:
            raise DataError(
                f"transform: has {transform.shift.size} numbers, must have one per feature ({self.features})."
            )
        # A bound shortens rows by their lengths; without one, nobody may ask for the lengths of these rows.
        self.factors = _NO_FLOATS if row_bound is None else self._shortening(self._feature_norms(), rows)

    @cached_property
    def norms(self) -> Floats:
        """Upper bounds on the lengths of the rows x̃ᵢ, intercept included; computed when first asked for."""
        lengths = self._feature_norms()
        if self.factors.size:
            with np.errstate(invalid="ignore"):
                lengths *= self.factors
            lengths[np.isnan(lengths)] = 0.0  # a row too long for float64 is shortened to nothing
        # Squares of lengths are finite where lengths are, and their slack covers this rounding; hypot takes longer
        # than the sum of a row.
        return np.sqrt(lengths * lengths + self.intercept * self.intercept) if self.intercept else lengths

    def by(self, transform: Affine, norms: Floats) -> Table:
        """The same rows by a public transform, with the ``norms`` that were computed for them before."""
        other = copy(self)
        for name in ("packed", "_sparse_blocks"):
            vars(other).pop(name, None)
        other.transform, other._view = transform, None
        other.norms = norms
        return other

    def __len__(self) -> int:
        return int(self.X.shape[0])

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Arrays that hold the features: the matrix, or pointers, indices and values of a sparse one."""
        return (self.X.indptr, self.X.indices, self.X.data) if self.is_sparse else (self.X,)

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything a sum over these records depends on, as bytes: a resumed run checks that nothing changed."""
        yield f"{self.X.shape} {self.outputs} {self.intercept} {self.row_bound}".encode()
        for array in (*self._arrays, self.y, self.norms, self.factors, self.sample_weights):
            if array is not None:
                yield f"{array.dtype} {array.shape}".encode()
                yield np.ascontiguousarray(array).data.cast("B") if array.size else b""

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features as bytes, whatever an objective makes of them: a ledger knows the table by it."""
        yield f"{self.X.shape} {self.X.dtype}".encode()
        for array in self._arrays:
            yield np.ascontiguousarray(array).data.cast("B") if array.size else b""

    @property
    def mixes(self) -> bool:
        """Whether a matrix mixes the features, which only sums in blocks can follow."""
        return self.transform is not None and self.transform.is_matrix

    @cached_property
    def packed(self) -> Packed:
        """Arguments of the compiled kernels: rows, y, norms, factors, shift, scale, intercept.

        Read-only views throughout: one compiled version then serves every caller's arrays.
        """
        shift = self.transform.shift if self.transform else _NO_FLOATS
        scale = self.transform.scale if self.transform else _NO_FLOATS
        per_row = (frozen(a) for a in (self.y, self.norms, self.factors, shift, scale))
        return (tuple(frozen(a) for a in self._arrays), *per_row, float(self.intercept))

    def view(self, by: object, make: Callable[[], Table]) -> Table:
        """Return the rows as the public map ``by`` shows them. They are kept until another map is asked for."""
        if self._view is None or self._view[0] is not by:
            self._view = by, make()
        return self._view[1]

    def show(self, by: object, seen: Table) -> None:
        """Let ``seen`` be what the public map ``by`` shows of these rows."""
        self._view = by, seen

    def shown(self, by: object) -> Table:
        """Return the table as the public map ``by`` shows it, which is the last map that was asked for."""
        assert self._view is not None
        assert self._view[0] is by
        return self._view[1]

    def arranged(self, order: Array) -> Table:
        """The same records in another order, copied once."""
        other = copy(self)
        for name in ("packed", "_sparse_blocks"):
            vars(other).pop(name, None)
        other.X, other._view = self.X[order], None
        other.y = None if self.y is None else self.y[order]
        other.sample_weights = None if self.sample_weights is None else self.sample_weights[order]
        other.norms = self.norms[order]
        other.factors = self.factors[order] if self.factors.size else self.factors
        return other

    def blocks(self, indices: Array | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (which rows, their raw features): all records, or those at ``indices``, a few MB at a time.

        Dense blocks are float64; a block is valid until the next one is asked for.
        """
        count = len(self) if indices is None else len(indices)
        if indices is None and self.is_sparse:
            yield from self._sparse_blocks
            return
        convert = not self.is_sparse and self.X.dtype != np.float64
        order: Any = "F" if convert and self.X.flags.f_contiguous else "C"  # a copy between orders is slow
        # What is copied of a part of a scan stays in the processor's cache.
        step = max(64, _BLOCK // 2 // self.features) if order == "F" else max(1, _BLOCK // self.features)
        buffer = np.empty((min(step, count), self.features), order=order) if convert else _NO_FLOATS
        for start in range(0, count, step):
            which = slice(start, min(start + step, count)) if indices is None else indices[start : start + step]
            block = self.X[which]
            if convert:
                buffer[: len(block)] = block
                block = buffer[: len(block)]
            yield which, block

    @cached_property
    def _sparse_blocks(self) -> list[tuple[slice, Any]]:
        X, count = self.X, len(self)
        blocks, start = [], 0
        while start < count:
            stop = int(np.searchsorted(X.indptr, X.indptr[start] + _BLOCK, side="right")) - 1
            stop = min(max(stop, start + 1), count)
            if start == 0 and stop == count:
                return [(slice(0, count), X)]
            low, high = X.indptr[start], X.indptr[stop]
            pointers = X.indptr[start : stop + 1] - low
            shape = (stop - start, int(X.shape[1]))
            blocks.append((slice(start, stop), csr_around(X.data[low:high], X.indices[low:high], pointers, shape)))
            start = stop
        return blocks

    @np.errstate(over="ignore", invalid="ignore")
    def _feature_norms(self) -> Floats:
        """Upper bounds on ‖s∘(xᵢ−m)‖, tight to rounding.

        Rounding up matters: a norm computed too small lets a record exceed its clip. Squares of centred rows
        are off by up to eps·(‖s∘x‖² + ‖s∘m‖²), whether they cancel here or in the gradient sum, so that much is
        added; it also covers the rounding of rᵢxᵢ − rᵢm when xᵢ is close to m. A matrix S counts by ‖S‖². A row so
        short that its square underflows would pass as one of norm 0, whatever its residual; ``_TINY`` keeps every
        norm above that.
        """
        norms = np.empty(len(self))
        slack, least = (32 + self.features) * _EPS, self.features * _TINY
        transform = self.transform
        if transform is not None and transform.is_matrix and not self.is_sparse and self.X.flags.fnc:
            slack *= float(np.linalg.norm(transform.scale, 2)) ** 2
            self._mixed_columns(transform, slack, least, norms)
        elif transform is not None and transform.is_matrix:
            slack *= float(np.linalg.norm(transform.scale, 2)) ** 2
            shift_square = float(transform.shift @ transform.shift)
            step = max(1, _BLOCK // self.features)
            for start in range(0, len(self), step):
                block = self.X[start : start + step]
                dense = np.asarray(block.todense() if self.is_sparse else block, dtype=np.float64)
                raw = np.einsum("ij,ij->i", dense, dense)
                moved = (dense - transform.shift) @ transform.scale
                squares = np.einsum("ij,ij->i", moved, moved)
                norms[start : start + step] = np.sqrt(squares + slack * (raw + shift_square) + least)
        elif transform is None and not self.is_sparse and self.X.flags.fnc:  # column-major
            # A part of a scan, read once for every release: its norms must not cost more than its sum.
            from quietgrad.tables.kernels import row_squares

            raw = row_squares(frozen(self.X.T))
            norms[:] = np.sqrt(raw + slack * raw + least)
        else:
            shift = None if transform is None else transform.shift
            weights = np.ones(self.features) if transform is None else transform.scale * transform.scale
            shift_square = 0.0 if shift is None else float(weights @ (shift * shift))
            for which, block in self.blocks():
                raw = _row_sums(block, weights, None)
                squares = raw if shift is None else _row_sums(block, weights, shift) + shift_square
                norms[which] = np.sqrt(np.maximum(squares, 0.0) + slack * (raw + shift_square) + least)
        norms[np.isnan(norms)] = math.inf
        return norms

    def _mixed_columns(self, transform: Affine, slack: float, least: float, norms: Floats) -> None:
        """The same of a part of a scan by a matrix, some rows at a time and always in the same memory."""
        from quietgrad.tables.kernels import row_squares

        columns = self.X.T
        raw = row_squares(frozen(columns))
        raw += float(transform.shift @ transform.shift)
        step = max(64, _BLOCK // 2 // self.features)
        moved, mixed = (np.empty((self.features, min(step, len(self)))) for _ in range(2))
        for start in range(0, len(self), step):
            part = columns[:, start : start + step]
            at, to = moved[:, : part.shape[1]], mixed[:, : part.shape[1]]
            np.subtract(part, transform.shift[:, None], out=at)
            np.matmul(transform.scale, at, out=to)
            np.multiply(to, to, out=to)
            norms[start : start + step] = to.sum(axis=0)
        norms += slack * raw
        norms += least
        np.sqrt(norms, out=norms)

    def _shortening(self, lengths: Floats, rows: Rows) -> Floats:
        bound = self.row_bound
        if bound is None:
            return _NO_FLOATS
        if rows == "normalize":
            with np.errstate(divide="ignore"):
                return np.where(lengths > 0.0, bound / lengths, 1.0)
        if not (lengths > bound).any():
            return _NO_FLOATS
        return np.minimum(1.0, bound / np.maximum(lengths, bound))


def _row_sums(block: Matrix, weights: Floats, shift: Floats | None) -> Floats:
    """Σⱼ wⱼxⱼ², or Σⱼ wⱼ((xⱼ−mⱼ)² − mⱼ²), which vanishes where xⱼ = 0 and so keeps a sparse row sparse."""
    if isinstance(block, np.ndarray):
        return np.asarray((block * (block if shift is None else block - 2.0 * shift)) @ weights)
    values = block.data.astype(np.float64)
    values *= values if shift is None else values - 2.0 * shift[block.indices]
    return np.asarray(csr_around(values, block.indices, block.indptr, block.shape) @ weights)


def frozen(array: Targets | None) -> npt.NDArray[Any]:
    """A read-only view: one compiled version then serves every caller's arrays."""
    view = (_NO_FLOATS if array is None else array).view()
    view.flags.writeable = False
    return view
