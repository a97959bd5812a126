"""LIBSVM text (`label index:value …`), read into CSR without scikit-learn."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError

if TYPE_CHECKING:
    from scipy import sparse

_LINE = re.compile(rb"[^\s:]+(?:[ \t]+\d+:[^\s:]+)*[ \t\r]*")


def parse_libsvm(
    content: bytes,
    n_features: int | None = None,
    dtype: npt.DTypeLike = np.float64,
    name: str = "libsvm",
) -> tuple[sparse.csr_matrix[Any], npt.NDArray[np.float64]]:
    """Parse LIBSVM text into a CSR matrix and raw labels; indices start at 1.

    Without `n_features` the largest index seen decides d, which depends on the records: declare it for
    private data.

    >>> X, y = parse_libsvm(b"+1 1:0.5 3:1\\n-1 2:2\\n")
    >>> X.toarray().tolist(), y.tolist()
    ([[0.5, 0.0, 1.0], [0.0, 2.0, 0.0]], [1.0, -1.0])
    """
    from scipy import sparse

    if b"#" in content:
        content = re.sub(rb"#[^\n]*", b"", content)
    lines = [line for line in content.split(b"\n") if line.strip()]
    if not lines:
        raise DataError(f"{name}: the file holds no rows.")
    for number, line in enumerate(lines, start=1):
        if _LINE.fullmatch(line) is None:
            raise DataError(
                f"{name}: row {number} of {len(lines)} is not 'label index:value …'. Was the file cut short?"
            )
    counts = np.fromiter((line.count(b":") for line in lines), np.int64, len(lines))
    numbers = _all_numbers(b"\n".join(lines).replace(b":", b" "), len(lines) + 2 * int(counts.sum()), name)

    starts = np.concatenate(([0], np.cumsum(2 * counts + 1)[:-1]))
    pairs = np.ones(len(numbers), dtype=bool)
    pairs[starts] = False
    entries = numbers[pairs].reshape(-1, 2)
    columns = entries[:, 0].astype(np.int64) - 1
    indptr = np.concatenate(([0], np.cumsum(counts)))
    _check_columns(columns, counts, n_features, name)
    width = n_features if n_features is not None else int(columns.max(initial=-1)) + 1
    matrix = sparse.csr_matrix(
        (entries[:, 1].astype(dtype), columns.astype(np.int32), indptr.astype(np.int32)), shape=(len(lines), width)
    )
    return matrix, numbers[starts]


def _all_numbers(text: bytes, expected: int, name: str) -> npt.NDArray[np.float64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a bad token ends the parse; the count below tells
        try:
            numbers = np.fromstring(text, dtype=np.float64, sep=" ")
        except ValueError:
            numbers = np.empty(0)
    if len(numbers) != expected:
        raise DataError(f"{name}: some labels or values are not numbers; LIBSVM text needs one number for each.")
    return numbers


def _check_columns(
    columns: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], n_features: int | None, name: str
) -> None:
    if len(columns) == 0:
        return
    same_row = np.ones(len(columns) - 1, dtype=bool)
    ends = np.cumsum(counts)[:-1]
    same_row[ends[(ends > 0) & (ends < len(columns))] - 1] = False
    if columns.min() < 0:
        raise DataError(f"{name}: feature indices must start at 1; index 0 was found.")
    if (np.diff(columns)[same_row] <= 0).any():
        raise DataError(f"{name}: feature indices must increase within each row.")
    if n_features is not None and columns.max() >= n_features:
        raise DataError(f"{name}: a feature index exceeds n_features={n_features}.")
