"""Which private scores are worth stating: every number is judged by its own error."""

from __future__ import annotations

import math
from typing import Literal, get_args

ScoreName = Literal["accuracy", "auc", "log_loss", "r2", "rmse", "mae"]
SCORE_NAMES: tuple[ScoreName, ...] = get_args(ScoreName)
TOO_NOISY = 0.1
"""The largest standard error of a share (accuracy, AUC, R², a cell of a confusion) that is stated."""
_LARGEST_PART = 0.5  # of a loss or a distance, which has no scale of its own


def is_too_noisy(name: str, value: float, error: float) -> bool:
    """Whether a score says so little that stating it would mislead.

    Shares may be off by a tenth; a log loss, RMSE or mean error by half of itself.

    >>> is_too_noisy("auc", 0.0, 0.2289), is_too_noisy("accuracy", 0.9, 0.01), is_too_noisy("rmse", 12.0, 9.0)
    (True, False, True)
    """
    if not (math.isfinite(value) and math.isfinite(error)):
        return True
    return error > (_LARGEST_PART * value if name in ("log_loss", "rmse", "mae") else TOO_NOISY)


def score_text(value: float | None, error: float | None, digits: str = ".4f") -> str:
    """A score with its error, or, without a value, that it is too noisy to be stated.

    >>> score_text(0.875, 0.0125), score_text(None, 0.2289), score_text(None, None)
    ('0.8750 ± 0.0125', 'too noisy to state (± 0.23)', 'too noisy to state')
    """
    if value is not None:
        return f"{value:{digits}} ± {error:{digits}}"
    return "too noisy to state" if error is None else f"too noisy to state (± {error:.2g})"
