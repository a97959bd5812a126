"""Products of matrices in one fixed order of additions. Importing this imports numba."""

from __future__ import annotations

from numba import njit

from quietgrad.features.frozen import Rows

_ROWS, _DEEP, _WIDE = 32, 64, 1024  # of a piece of a product: what is read again stays in the caches


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def add_products(rows: Rows, matrix: Rows, out: Rows) -> None:
    """out += rows·matrix, each number added up in the order of the matrix's rows.

    A library's product rounds a row by its place among others, on some machines also in blocks of one size. Here
    all rows take the same course, so one record more changes no bit of another's features.
    """
    for top in range(0, len(rows), _ROWS):
        for left in range(0, matrix.shape[1], _WIDE):
            for deep in range(0, len(matrix), _DEEP):
                for i in range(top, min(len(rows), top + _ROWS)):
                    total = out[i, left : left + _WIDE]
                    for k in range(deep, min(len(matrix), deep + _DEEP)):
                        factor, part = rows[i, k], matrix[k, left : left + _WIDE]
                        for j in range(len(total)):
                            total[j] += factor * part[j]
