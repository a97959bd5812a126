"""Answers of a model that rest on one row each: what a bound on one person's share of a score needs.

A score bounds what one person moves by the one cell that the person falls into. That holds only if nobody moves
anybody else's answer, and a model may be anybody's code: a step that standardises the rows it is given, or ranks
them, lets one record move them all. So a model is asked again about the same rows in other company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import _safe_indexing

from quietgrad.errors import DataError
from quietgrad.privacy.rng import SecureStream, fresh_key

_SPLITS = 8  # two rows are in one half every time with probability 2⁻⁸
_ALONE = 16
_DEPENDS = (
    "X: the model's answer for a record depends on the other records it is asked about (a step that standardises, "
    "ranks or fills by the rows it is given, or one that draws at random), so one record could move every score. "
    "Score a model that answers row by row: fit such steps on public numbers first."
)


def row_by_row(ask: Callable[[Any], Any], X: Any) -> npt.NDArray[Any]:
    """``ask(X)``, if each row is answered so in other company and order too, and alone.

    Rows are split in two secretly and at random, eight times, and each half is asked about in another order;
    sixteen rows are asked about alone. Rounding may differ: matrix products of other shapes round differently.

    Raises:
        DataError: an answer was another one; nothing was reserved.

    >>> row_by_row(lambda rows: 2.0 * rows[:, 0], np.array([[1.0], [2.0]])).tolist()
    [2.0, 4.0]
    >>> row_by_row(lambda rows: rows[:, 0] - rows.mean(), np.array([[1.0], [2.0]]))
    Traceback (most recent call last):
    quietgrad.errors.DataError: X: the model's answer for a record depends on the other records it is asked ...
    """
    whole = np.asarray(ask(X))
    n = len(whole)
    secret = SecureStream(fresh_key(), "row by row").uint64(0, n)
    order = np.argsort(secret)
    halves = [
        order[(secret[order] >> np.uint64(k)) & np.uint64(1) == side] for k in range(_SPLITS) for side in (0, 1)
    ]
    for rows in (*halves, *order[:_ALONE, None]) if n > 1 else ():
        if not len(rows):
            continue
        part = _safe_indexing(X, rows)
        try:
            again = np.asarray(ask(part))
        except Exception:  # what it says may show a record
            raise DataError(_DEPENDS) from None
        if not _same(whole[rows], again):
            raise DataError(_DEPENDS)
    return whole


def _same(first: npt.NDArray[Any], again: npt.NDArray[Any]) -> bool:
    """Equal, but for rounding: of single precision where the model computes so."""
    if first.shape != again.shape:
        return False
    if first.dtype.kind != "f":
        return bool((first == again).all())
    near = 1e-3 if first.dtype.itemsize < 8 else 1e-7
    return bool(np.isclose(first, again, rtol=near, atol=near * 1e-2, equal_nan=True).all())
