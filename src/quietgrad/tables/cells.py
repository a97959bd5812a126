"""Cells of a column as numbers: a rule for every cell by itself, whatever the others hold.

A refusal, a warning, or a type that numpy finds for all cells together would tell of the record that causes it, or
would change what the cells of all others are worth: a list of 5, 6 and "2020-01-01" is one of texts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_EPOCH = date(1970, 1, 1)
_FIRST, _LAST = (date.min - _EPOCH).days, (date.max - _EPOCH).days


def as_floats(cells: Any) -> Floats:
    """The cells as float64."""
    return np.asarray(cells, dtype=np.float64)


def cell_numbers(cells: Any, each: Callable[[Any], Floats] = as_floats) -> Floats:
    """The cells as numbers by ``each``, which converts a column; what is no finite number is a gap, NaN.

    >>> cell_numbers([1, "2", "two", None, math.inf]).tolist()
    [1.0, 2.0, nan, nan, nan]
    """
    if not hasattr(cells, "dtype"):  # a list has no type of its own: one cell must not give it one
        cells = np.asarray([*cells, None], dtype=object)[:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            numbers = each(cells)
        except (TypeError, ValueError, OverflowError):
            numbers = np.array([_or_gap(each, cell) for cell in np.asarray(cells, dtype=object)], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _or_gap(each: Callable[[Any], Floats], cell: object) -> float:
    try:
        return float(each([cell])[0])
    except (TypeError, ValueError, OverflowError):
        return math.nan


def day_text(days: float) -> str:
    """Days since 1970 as a date, YYYY-MM-DD; the nearest that there is.

    >>> day_text(17315.4)
    '2017-05-29'
    """
    return (_EPOCH + timedelta(days=min(max(math.floor(days), _FIRST), _LAST))).isoformat()
