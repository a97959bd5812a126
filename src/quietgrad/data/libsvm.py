"""LIBSVM text (`label index:value …`), read into CSR without scikit-learn."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError

if TYPE_CHECKING:
    from scipy import sparse

Floats: TypeAlias = npt.NDArray[np.float64]
_BLOCK = 1 << 22
# Possessive: a line matches in one way or in none, so a hostile line costs no more than its length.
_LINE = re.compile(rb"[ \t]*+[^\s:]++(?:[ \t]++\d{1,18}+:[^\s:]++)*+[ \t\r]*+")
MOST_FEATURES = 1 << 24
"""The largest index that decides d when ``n_features`` is not declared: a model has one number for each."""


def parse_libsvm(
    content: bytes,
    n_features: int | None = None,
    dtype: npt.DTypeLike = np.float64,
    name: str = "libsvm",
) -> tuple[sparse.csr_matrix[Any], npt.NDArray[np.float64]]:
    """Parse LIBSVM text into a CSR matrix and raw labels; indices start at 1.

    Without `n_features` the largest index seen decides d, which depends on the records: declare it for
    private data. Such an index may be at most 2²⁴, or one typing error would ask for a model of gigabytes.

    >>> X, y = parse_libsvm(b"+1 1:0.5 3:1\\n-1 2:2\\n")
    >>> X.toarray().tolist(), y.tolist()
    ([[0.5, 0.0, 1.0], [0.0, 2.0, 0.0]], [1.0, -1.0])
    """
    from scipy import sparse

    rows = 0
    parts: list[tuple[Floats, Floats, npt.NDArray[np.int64]]] = []
    for block in _blocks(content):
        parts.append(_parse_block(block, rows, n_features, name))
        rows += len(parts[-1][0])
    if not rows:
        raise DataError(f"{name}: the file holds no rows.")
    labels, entries, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    del parts
    columns = entries[:, 0].astype(np.int64)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    width = n_features if n_features is not None else int(columns.max(initial=-1)) + 1
    # scipy takes the narrowest index type that holds the shape and the number of entries.
    kind = np.int32 if max(width, len(columns)) <= np.iinfo(np.int32).max else np.int64
    matrix = sparse.csr_matrix(
        (entries[:, 1].astype(dtype), columns.astype(kind), indptr.astype(kind)), shape=(rows, width)
    )
    matrix.check_format(full_check=True)
    return matrix, labels


def _blocks(content: bytes) -> Iterator[bytes]:
    """Whole lines, a few megabytes at a time: Python's objects for all lines would dwarf the numbers in them."""
    at = 0
    while at < len(content):
        end = content.find(b"\n", at + _BLOCK)
        end = len(content) if end < 0 else end + 1
        yield content[at:end]
        at = end


def _parse_block(
    content: bytes, before: int, n_features: int | None, name: str
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Labels, (column, value) pairs and the number of pairs in each row; ``before`` rows came earlier."""
    if b"#" in content:
        content = re.sub(rb"#[^\n]*", b"", content)
    lines = [line for line in content.split(b"\n") if line.strip()]
    for number, line in enumerate(lines, start=before + 1):
        if _LINE.fullmatch(line) is None:
            raise DataError(f"{name}: row {number} is not 'label index:value …'. Was the file cut short?")
    counts = np.fromiter((line.count(b":") for line in lines), np.int64, len(lines))
    numbers = _all_numbers(b"\n".join(lines).replace(b":", b" "), len(lines) + 2 * int(counts.sum()), name)
    if not lines:
        return np.empty(0), np.empty((0, 2)), counts
    starts = np.concatenate(([0], np.cumsum(2 * counts + 1)[:-1]))
    pairs = np.ones(len(numbers), dtype=bool)
    pairs[starts] = False
    entries = numbers[pairs].reshape(-1, 2)
    # Floats hold whole numbers up to 2⁵³, and every d that is allowed is far below: nothing wraps around.
    entries[:, 0] = np.minimum(entries[:, 0], 2.0**53) - 1.0
    _check_columns(entries[:, 0].astype(np.int64), counts, n_features, name)
    return numbers[starts], entries, counts


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
    if n_features is None and columns.max() >= MOST_FEATURES:
        raise DataError(f"{name}: a feature index exceeds {MOST_FEATURES}. If that is meant, declare n_features.")
