"""Features as the kernels want them, without a copy if they are so already: C-contiguous, or CSR."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError

_BLOCK = 1 << 18  # numbers checked at a time: temporaries stay small and in the cache


def lay_out(X: Any) -> Any:
    """Return ``X`` as C-contiguous float32/float64, or as CSR without duplicates, without a copy if it is one.

    Raises:
        DataError: not a numeric matrix, no rows, no columns, NaN or infinity.

    >>> lay_out([[1, 2], [3, 4]]).dtype
    dtype('float64')
    """
    if not isinstance(X, np.ndarray):
        import scipy.sparse as sparse

        if sparse.issparse(X):
            return _lay_out_sparse(X)
    X = numbers_of(X, "X")
    if X.ndim != 2:
        raise DataError(f"X: has {X.ndim} dimension(s), must have 2. Reshape to (records, features).")
    X = np.ascontiguousarray(X, dtype=_float_type(X.dtype))
    _check_shape(X)
    for start in range(0, len(X), step := max(1, _BLOCK // X.shape[1])):
        if not np.isfinite(X[start : start + step]).all():
            raise DataError("X: contains NaN or infinity. Remove or impute such records first.")
    return X


def numbers_of(values: Any, what: str) -> npt.NDArray[Any]:
    """``values`` as an array of numbers; an error names columns and how many rows, never what a cell holds.

    numpy's own errors quote the cell they failed at, so nothing is converted before every cell is known to be a
    number; nor is a text type named, whose width is the length of the longest cell.

    >>> numbers_of([[1, "a secret"], [2, "another"]], "X")
    Traceback (most recent call last):
    quietgrad.errors.DataError: X: column 1 must be numbers and 2 rows are not. Encode categories, or fill ...
    """
    try:
        array = np.asarray(values)
        cells = array if array.dtype.kind in "buif" else np.asarray(values, dtype=object)
    except (TypeError, ValueError):
        raise DataError(f"{what}: rows of different lengths. Pass one row per record, all equally long.") from None
    if cells.dtype.kind in "buif":
        return cells
    _refuse(values, cells, ~_are(Real, cells), what)
    try:
        return cells.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{what}: holds numbers that are no float64. Rescale them first.") from None


def refuse_text(values: Any, what: str) -> None:
    """Raise DataError as :func:`numbers_of` does if a cell is text or a list; other checks would quote it."""
    from scipy import sparse

    if sparse.issparse(values):
        return
    try:
        array = np.asarray(values)
        cells = array if array.dtype.kind in "buif" else np.asarray(values, dtype=object)
    except (TypeError, ValueError):
        return  # not a table at all, which is said without looking at cells
    if array.dtype.kind == "c":  # scikit-learn would print the array
        raise DataError(f"{what}: Complex data not supported; give real numbers.")
    if cells.dtype.kind not in "buif":
        _refuse(values, cells, _are((str, bytes, list, tuple, set, np.ndarray), cells), what)


def _are(kind: Any, cells: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.frompyfunc(lambda cell: isinstance(cell, kind), 1, 1)(cells), dtype=bool)


def _refuse(values: Any, cells: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], what: str) -> None:
    if not wrong.any():
        return
    if cells.ndim != 2:
        raise DataError(
            f"{what}: must be one number per record and {_rows(wrong)} not. Encode them as numbers first."
        )
    first, *others = np.flatnonzero(wrong.any(axis=0))
    columns = _names(values, cells.shape[1])
    more = f" (and {len(others)} more columns)" if others else ""
    raise DataError(
        f"{what}: column {columns[int(first)]!r}{more} must be numbers and {_rows(wrong[:, first])} not. "
        "Encode categories, or fill what is missing, first."
    )


def _names(values: Any, width: int) -> Sequence[Any]:
    """What the columns are called, or their places: an Arrow table's ``columns`` are the cells themselves."""
    if isinstance(names := getattr(values, "column_names", None), list):
        return names
    return list(values.columns) if isinstance(values, _Frame) else range(width)


@runtime_checkable
class _Frame(Protocol):
    """A data frame of any library."""

    @property
    def columns(self) -> Any: ...


def _rows(wrong: npt.NDArray[np.bool_]) -> str:
    count = int(wrong.sum())
    return f"{count} rows are" if count > 1 else "1 row is"


def _lay_out_sparse(X: Any) -> Any:
    X = X.tocsr()
    data = X.data.astype(_float_type(X.data.dtype), copy=False)
    _check_shape(X)
    if not np.isfinite(data).all():
        raise DataError("X: contains NaN or infinity. Remove or impute such records first.")
    X = csr_around(data, X.indices, X.indptr, X.shape)
    if not X.has_canonical_format:  # a duplicated entry would make a row longer than its computed norm
        X = X.copy()
        X.sum_duplicates()
    return X


def csr_around(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
    """A CSR matrix around these very arrays: scipy's constructor may convert, and so copy, 64-bit indices."""
    import scipy.sparse as sparse

    matrix = sparse.csr_array(shape, dtype=data.dtype)
    matrix.data, matrix.indices, matrix.indptr = data, indices, indptr
    return matrix


def csr_rows(X: Any, first: int, stop: int) -> Any:
    """Some rows of a CSR matrix, around its own arrays."""
    low, high = X.indptr[first], X.indptr[stop]
    pointers = X.indptr[first : stop + 1] - low
    return csr_around(X.data[low:high], X.indices[low:high], pointers, (stop - first, int(X.shape[1])))


def _float_type(dtype: np.dtype[Any]) -> type[np.float32] | type[np.float64]:
    if dtype in (np.float32, np.float64):
        return np.float32 if dtype == np.float32 else np.float64
    if dtype.kind in "buif":
        return np.float32 if dtype.itemsize <= 2 else np.float64  # float32 holds small integers exactly
    raise DataError(f"X: has values of type {dtype.name}, must be numbers. Encode categories first.")


def _check_shape(X: Any) -> None:
    if X.shape[0] == 0:
        raise DataError("X: has no records.")
    if X.shape[1] == 0:
        raise DataError("X: has no features.")
