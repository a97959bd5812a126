"""Tables of coefficients with their standard errors, intervals and p-values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from quietgrad.tables.table import Floats

_COLUMNS = ("coef", "std_err", "lower", "upper", "p_value")
CLIPPED_ERRORS = (
    "standard errors are of features clipped to feature_range_; inference=True asks for those of whole rows"
)


def summary_of(names: Sequence[str], values: Floats, errors: Floats, level: float) -> Any:
    """One row per coefficient: a DataFrame if pandas is installed, else a list of rows that prints as a table."""
    reach = float(ndtri(0.5 + level / 2.0))
    chances = 2.0 * ndtr(-np.abs(values) / np.maximum(errors, 1e-300))
    columns = (values, errors, values - reach * errors, values + reach * errors, chances)
    rows = [
        {"name": name, **dict(zip(_COLUMNS, map(float, row), strict=True))}
        for name, row in zip(names, np.column_stack(columns), strict=True)
    ]
    try:
        import pandas as pd
    except ImportError:
        return SummaryTable(rows)
    return pd.DataFrame(rows).set_index("name")


class SummaryTable(list[dict[str, Any]]):
    """Rows of a summary where pandas is not installed; prints as a table."""

    def __str__(self) -> str:
        head = f"{'':24}" + "".join(f"{name:>12}" for name in _COLUMNS)
        rows = [f"{row['name']:24.24}" + "".join(f"{row[c]:12.4g}" for c in _COLUMNS) for row in self]
        return "\n".join([head, *rows])
