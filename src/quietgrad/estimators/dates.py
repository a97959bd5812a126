"""Dates in tables: one conversion for all models, whatever the unit that a column keeps its dates in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np

from quietgrad.tables.table import Floats

_MOMENTS = (date, timedelta, np.datetime64, np.timedelta64)


def days_since_1970(cells: object) -> Floats:
    """Dates and times as days since 1970 in UTC, durations as days: the same whatever their unit is; gaps are NaN.

    >>> days_since_1970(np.array(["1970-01-02T12:00", "NaT"], dtype="datetime64[ns]")).tolist()
    [1.5, nan]
    """
    given: Any = cells.to_numpy() if hasattr(cells, "to_numpy") else np.asarray(cells)
    if given.dtype.kind == "m":
        return np.asarray(given / np.timedelta64(1, "D"), dtype=np.float64)
    if given.dtype.kind == "O" and hasattr(cells, "to_numpy"):  # pandas' dates with a time zone
        given = cells.to_numpy(dtype="datetime64[us]")
    moments = np.asarray(given, dtype="datetime64[us]")
    return np.where(np.isnat(moments), np.nan, moments.astype(np.int64) / 86_400e6)


def dates_as_days(X: Any) -> Any:
    """The table with columns of dates and durations as :func:`days_since_1970`, and the others as they are."""
    if isinstance(X, np.ndarray):
        return days_since_1970(X) if X.dtype.kind in "mM" else X
    if not hasattr(X, "columns") or np.ndim(getattr(X, "dtypes", 0)) != 1:
        return X
    dated = [name for name, kind in zip(X.columns, X.dtypes, strict=True) if _is_date(kind)]
    if not dated or len(set(X.columns)) < len(X.columns):  # columns of one name are refused elsewhere
        return X
    if hasattr(X, "with_columns"):  # polars
        return X.with_columns(*(type(X[name])(name, days_since_1970(X[name])) for name in dated))
    return X.assign(**{name: days_since_1970(X[name]) for name in dated})


def bounds_in_days(pair: Any) -> Any:
    """A declared (low, high): two dates or durations as days, as those of the column are; all else as it is.

    >>> bounds_in_days(("1970-01-01", "1970-01-31")), bounds_in_days((0, 1))
    ((0.0, 30.0), (0, 1))
    """
    if isinstance(pair, str | Mapping) or not isinstance(pair, Sequence | np.ndarray):
        return pair
    if all(
        isinstance(end, date | timedelta | np.datetime64 | np.timedelta64) or _reads_as_date(end) for end in pair
    ):
        return tuple(float(days_since_1970(np.array([end], dtype=_moment(end)))[0]) for end in pair)
    return pair


def _reads_as_date(end: object) -> bool:
    if not isinstance(end, str):
        return False
    try:
        return datetime.fromisoformat(end) is not None
    except ValueError:
        return False


def _moment(end: object) -> str:
    return "timedelta64[us]" if isinstance(end, timedelta | np.timedelta64) else "datetime64[us]"


def _is_date(kind: object) -> bool:
    """Whether a column's type, of pandas or polars, is one of dates, moments or durations."""
    return str(getattr(kind, "kind", "")) in ("m", "M") or str(kind).startswith(("Date", "Duration"))
