"""Predictions of models: for each record by itself, and for the records of a scan block by block."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils import _safe_indexing

from quietgrad.core.errors import DataError
from quietgrad.estimators.validation import ScanTable, is_scan
from quietgrad.tables.table import Array, Floats, Matrix, rows_in


def predict_row_independent(model: object, verb: str, X: object, width: int | None) -> Floats:
    """Return ``model.verb`` of every record, ``width`` numbers or one, each answer from that record alone.

    A score bounds what one person moves by the cell that the person falls into, so no record may move another one's
    answer. This library's models answer by arithmetic of one row (:func:`row_products`). Any other model is asked
    about one record at a time: a step that standardises or ranks the rows it is given then sees one, and no product
    of matrices rounds differently for another number of rows. Models of scikit-learn keep nothing of what they are
    asked; any other one is copied for each record. How many numbers an answer has is public. An answer of another
    form, and a record that the model cannot answer about, are NaN, since an error would tell that there is one.
    """
    if isinstance(model, AskedOnce):
        return model.answers(verb, X, width)
    if _is_ours(model):
        return np.asarray(getattr(model, verb)(X), dtype=np.float64)
    copied: Callable[[Any], Any] = (lambda one: one) if _keeps_nothing(model) else deepcopy
    answers = np.full((rows_in(X), 1 if width is None else width), np.nan)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # one about a value would tell of the record that has it
        for row in range(len(answers)):
            with suppress(Exception):  # foreign code: its message may show a record
                answered = np.ravel(np.asarray(getattr(copied(model), verb)(_safe_indexing(X, [row])))[0])
                if answered.shape == answers[row].shape:
                    answers[row] = answered.astype(np.float64)
    return answers[:, 0] if width is None else answers


class AskedOnce:
    """A model whose answers about the same rows are kept, since one record at a time is slow."""

    def __init__(self, model: object) -> None:
        self._model = model
        self._known: dict[str, tuple[object, Floats]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def answers(self, verb: str, X: object, width: int | None) -> Floats:
        """Return the answers of :func:`predict_row_independent` for these rows, and keep them."""
        rows, found = self._known.get(verb, (None, None))
        if found is None or rows is not X:
            found = predict_row_independent(self._model, verb, X, width)
            self._known[verb] = X, found
        return found


def row_products(X: Matrix, weights: Floats) -> Floats:
    """X·W, each row's products rounded in the same way whatever other rows there are.

    A product of two matrices is cut into tiles by their shapes: one record more can change the last digit of every
    score, and where two scores tie every prediction.
    """
    if not isinstance(X, np.ndarray):  # sparse rows are summed one by one
        return np.asarray(X @ weights)
    X, columns = np.asarray(X, dtype=np.float64), np.ascontiguousarray(weights.T)
    out = np.empty((len(X), len(columns)))
    block = max(1, 2**18 // max(1, columns.size))
    for start in range(0, len(X), block):
        rows = X[start : start + block]
        out[start : start + block] = (rows[:, None, :] * columns[None]).sum(axis=2)
    return out


def _is_ours(model: object) -> bool:
    """Whether this library's code alone answers: a search answers by whatever model it chose."""
    ours = type(model).__module__.partition(".")[0] == "quietgrad"
    best = getattr(model, "best_estimator_", None)
    return ours and (best is None or _is_ours(best))


def _keeps_nothing(model: Any) -> bool:
    """Whether a model is made of scikit-learn's parts alone, without a user's functions."""
    parts = [model, *(model.get_params(deep=True).values() if hasattr(model, "get_params") else ())]
    homes = {type(part).__module__.partition(".")[0] for part in parts if part is model or hasattr(part, "fit")}
    return homes <= {"sklearn", "quietgrad"} and not any(callable(part) for part in parts)


def predict_to(model: Any, scan: object, path: str | Path) -> int:
    """Write ``model``'s predictions for all records of ``scan``, block by block; how many they are."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    if not is_scan(scan):
        raise ValueError("predict_to: takes a scan; use predict for arrays.")
    plain = nameless(model, scan)

    def answers(X: Array) -> dict[str, Any]:
        found = {"prediction": np.asarray(plain.predict(X))}
        if hasattr(plain, "predict_proba"):
            chances = plain.predict_proba(X)
            if chances.shape[1] == 2:
                found[f"probability_of_{plain.classes_[1]}"] = chances[:, 1]
            else:
                found["probability"] = chances.max(axis=1)
        return found

    target = Path(path)
    if target.suffix not in (".csv", ".parquet", ".pq"):
        raise ValueError(f"{target.name}: predictions of a scan are written as .csv or .parquet.")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    rows, writer = 0, None
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    try:
        for X, _ in scan.blocks():
            part = pa.table(answers(X))
            if writer is None:
                kind = csv.CSVWriter if target.suffix == ".csv" else pq.ParquetWriter
                writer = kind(str(unfinished), part.schema)
            writer.write_table(part)
            rows += part.num_rows
        if writer is not None:
            writer.close()
        unfinished.replace(target)
    except BaseException:
        if writer is not None:
            writer.close()
        unfinished.unlink(missing_ok=True)
        raise
    return rows


def nameless(model: Any, scan: ScanTable) -> Any:
    """The model for blocks of ``scan``, which carry no names: they are compared here, once."""
    plain = copy(model)
    known = list(vars(plain).pop("feature_names_in_", ()))
    width = vars(plain).get("n_features_in_", scan.features)
    if scan.features != width or (known and known != list(scan.feature_names)):
        raise DataError(f"{scan.name}: has other columns than the table the model was fitted on.")
    return plain
