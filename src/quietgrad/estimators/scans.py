"""Estimators on tables that stay where they are: what is public of a scan, and predictions that go to a file."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.errors import DataError
from quietgrad.objectives.tables.scanned import ScanSource


def is_scan(X: Any) -> bool:
    """Whether the records are a scan."""
    return isinstance(X, ScanSource)


def refuse_scan(X: Any, what: str) -> None:
    """Raise if records are a scan, where only a table in memory will do."""
    if is_scan(X):
        raise DataError(
            f"X: is a scan, and {what} needs the table in memory; load it, or fit one of the linear or additive "
            "models, which scan."
        )


def scan_if_one(X: Any, y: Any) -> tuple[Any, Any]:
    """A frame that names its target column becomes a scan; everything else stays as it is."""
    if is_scan(X):
        if y is not None:
            raise ValueError("y: a scan knows its target; say it there: scan(..., target=...).")
        return X, None
    if isinstance(y, str):
        from importlib import import_module

        # Readers are no part of an estimator: they are asked for only where a column's name stands for the labels.
        return import_module("quietgrad.data").scan(X, target=y), None
    return X, y


def with_labels(X: Any, y: Any, labels: Callable[[Any], Any] | None) -> Any:
    """What an objective takes: records with ``labels(y)`` for their targets."""
    if is_scan(X):
        return X if labels is None else X.labelled(labels)
    return X, y if labels is None else labels(y)


def coder(X: Any, declared: Any, codes: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """How labels become positions among the ``declared`` classes: by ``codes``, or by a scan's own codes."""
    if not is_scan(X) or X.classes is None:
        return partial(codes, declared)
    return partial(np.take, codes(declared, np.asarray(X.classes)))


def predict_to(model: Any, scan: Any, path: Any) -> int:
    """Write ``model``'s predictions for all records of ``scan``, block by block."""
    if not is_scan(scan):
        raise ValueError("predict_to: takes a scan; use predict for arrays.")
    plain = nameless(model, scan)
    return write_blocks(path, (_answers(plain, X) for X, _ in scan.blocks()))


def nameless(model: Any, scan: Any) -> Any:
    """The model for blocks of ``scan``, which carry no names: they are compared here, once."""
    known = list(getattr(model, "feature_names_in_", ()))
    if scan.features != getattr(model, "n_features_in_", scan.features) or (
        known and known != list(scan.feature_names)
    ):
        raise DataError(f"{scan.name}: has other columns than the table the model was fitted on.")
    plain = copy.copy(model)
    plain.__dict__.pop("feature_names_in_", None)
    return plain


def _answers(model: Any, X: Any) -> dict[str, Any]:
    answers = {"prediction": np.asarray(model.predict(X))}
    if hasattr(model, "predict_proba"):
        chances = model.predict_proba(X)
        if chances.shape[1] == 2:
            answers[f"probability_of_{model.classes_[1]}"] = chances[:, 1]
        else:
            answers["probability"] = chances.max(axis=1)
    return answers


def write_blocks(path: Any, blocks: Any) -> int:
    """Write columns block by block to a csv or parquet file that appears when it is whole; how many rows."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    target = Path(path)
    if target.suffix not in (".csv", ".parquet", ".pq"):
        raise ValueError(f"{target.name}: predictions of a scan are written as .csv or .parquet.")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    rows, writer = 0, None
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    try:
        for block in blocks:
            part = pa.table(block)
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
