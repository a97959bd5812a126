"""Answers of a model that rest on one row each: what a bound on one person's share of a score needs.

A score bounds what one person moves by the one cell that the person falls into. That holds only if nobody moves
anybody else's answer, and a model may be anybody's code: a step that standardises the rows it is given, or ranks
them, lets one record move them all. So a model is asked again about the same rows in other company.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import _safe_indexing

from quietgrad.errors import DataError, QuietgradError
from quietgrad.privacy.rng import SecureStream, fresh_key

_SPLITS = 8  # two rows are in one half every time with probability 2⁻⁸
_ALONE = 16
_DEPENDS = (
    "X: the model's answer for a record depends on the other records it is asked about (a step that standardises, "
    "ranks or fills by the rows it is given, or one that draws at random), so one record could move every score. "
    "Score a model that answers row by row: fit such steps on public numbers first."
)


def row_by_row(model: Any, verb: str, X: Any) -> npt.NDArray[Any]:
    """``model.verb(X)``, if each row is answered so in other company and order too, and alone.

    Rows are split in two secretly and at random, eight times, and each half is asked about in another order;
    sixteen rows are asked about alone. Every question goes to a copy of its own, as the model was: one that adapts
    to the first rows it sees would else answer alike ever after. Rounding may differ: matrix products of other
    shapes round differently. This library's own models answer row by row as they are written: they are asked once.

    Raises:
        DataError: an answer was another one; nothing was reserved.

    >>> class Ranks:
    ...     def predict(self, rows):
    ...         return rows[:, 0] - rows.mean()
    >>> Ranks.__module__ = "somebody_else"
    >>> row_by_row(Ranks(), "predict", np.array([[1.0], [2.0]]))
    Traceback (most recent call last):
    quietgrad.errors.DataError: X: the model's answer for a record depends on the other records it is asked ...
    """
    if _is_ours(model):
        return np.asarray(getattr(model, verb)(X))
    try:
        fresh = deepcopy(model)
    except Exception as error:
        raise DataError(
            f"model: cannot be copied ({type(error).__name__}), so whether it answers row by row cannot be seen."
        ) from None
    n = _safe_len(X)
    secret = SecureStream(fresh_key(), "row by row").uint64(0, n)
    order = np.argsort(secret)
    halves = [
        order[(secret[order] >> np.uint64(k)) & np.uint64(1) == side] for k in range(_SPLITS) for side in (0, 1)
    ]
    whole = _answer(deepcopy(fresh), verb, X)
    for rows in (*halves, *order[:_ALONE, None]):
        if not len(rows):
            continue
        try:
            again = _answer(deepcopy(fresh), verb, _safe_indexing(X, rows))
        except DataError:  # it could answer about all of them
            raise DataError(_DEPENDS) from None
        if not _same(whole[rows], again):
            raise DataError(_DEPENDS)
    return whole


def _is_ours(model: Any) -> bool:
    """Whether this library's code alone answers: a search answers by whatever model it chose."""
    ours = type(model).__module__.partition(".")[0] == "quietgrad"
    return ours and _is_ours(model.best_estimator_) if hasattr(model, "best_estimator_") else ours


def _safe_len(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def _answer(model: Any, verb: str, rows: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(getattr(model, verb)(rows))
    except QuietgradError:
        raise
    except Exception as error:  # anybody's code: what it says may show a record
        raise DataError(
            f"X: the model could not answer ({type(error).__name__}); what it says may quote a cell. Call "
            f"model.{verb} on these rows to see it."
        ) from None


def _same(first: npt.NDArray[Any], again: npt.NDArray[Any]) -> bool:
    """Equal, but for rounding: of single precision where the model computes so."""
    if first.shape != again.shape:
        return False
    if first.dtype.kind != "f":
        return bool((first == again).all())
    near = 1e-3 if first.dtype.itemsize < 8 else 1e-7
    return bool(np.isclose(first, again, rtol=near, atol=near * 1e-2, equal_nan=True).all())
