"""Features as the kernels want them, without a copy if they are so already: C-contiguous, or CSR."""

from __future__ import annotations

from typing import Any

import numpy as np

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
        try:
            X = np.asarray(X)
        except ValueError:
            raise DataError("X: rows of different lengths. Pass a matrix with one row per record.") from None
    if X.ndim != 2:
        raise DataError(f"X: has {X.ndim} dimension(s), must have 2. Reshape to (records, features).")
    X = np.ascontiguousarray(X, dtype=_float_type(X.dtype))
    _check_shape(X)
    for start in range(0, len(X), step := max(1, _BLOCK // X.shape[1])):
        if not np.isfinite(X[start : start + step]).all():
            raise DataError("X: contains NaN or infinity. Remove or impute such records first.")
    return X


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
