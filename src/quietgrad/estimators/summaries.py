"""How sure the coefficients are: standard errors, intervals and p-values that cover sampling and privacy noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from quietgrad.algorithms.whitened_gd import CROWDED
from quietgrad.errors import TooNoisyError

_COLUMNS = ("coef", "std_err", "lower", "upper", "p_value")


class SummaryTable(list[dict[str, Any]]):
    """Rows of a summary where pandas is not installed; prints as a table."""

    def __str__(self) -> str:
        head = f"{'':24}" + "".join(f"{name:>12}" for name in _COLUMNS)
        rows = [f"{row['name']:24.24}" + "".join(f"{row[c]:12.4g}" for c in _COLUMNS) for row in self]
        return "\n".join([head, *rows])


def summarise(model: Any, level: float = 0.95) -> Any:
    """One row per coefficient, the intercept last; a DataFrame if pandas is installed.

    Raises:
        TooNoisyError: the plan of the fit bought no standard errors; the message says what would do.
    """
    if not 0.5 < level < 1.0:
        raise ValueError(f"level={level!r}: must be between 0.5 and 1, such as 0.95.")
    details = model.result_.details
    if details.get("parts", {}).get("count", 1) > 1:
        raise TooNoisyError("no standard errors: they are those of one fit, and this model is of several parts.")
    covariance = details.get("coefficient_covariance")
    if covariance is None:
        raise TooNoisyError(f"no standard errors: {_why(model)}")
    errors = np.sqrt(np.diag(np.asarray(covariance)))
    values = np.ravel(model.coef_)
    names = [str(name) for name in getattr(model, "feature_names_in_", [f"x{j}" for j in range(len(values))])]
    if model.fit_intercept:
        values, names = np.append(values, np.ravel(model.intercept_)[0]), [*names, "(intercept)"]
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


def _why(model: Any) -> str:
    n, p = model.result_.n_public, model.n_features_in_ + 1
    signal = model._signal(n)
    tight = p**1.5 / signal
    if tight > CROWDED:
        needed = math.ceil(n * tight / CROWDED / 100) * 100
        return (
            f"{p - 1} features are too many for n and ε. About {needed} records, or an ε about "
            f"{tight / CROWDED:.1f} times as large, would do."
        )
    return "they were not asked for. Fit with inference=True; that takes half the budget."
