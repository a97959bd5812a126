"""Frames of raw columns, encoded by the public schema of the run that they are predicted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize
from quietgrad.data.drafting import named_columns
from quietgrad.data.schema import Schema, read_schema

_SUFFIXES = ".toml", ".json"


def schema_of_run(folder: str | Path) -> Schema | None:
    """The schema that a run keeps beside its model; ``None`` for a run without one."""
    files = [Path(folder) / f"schema{suffix}" for suffix in _SUFFIXES]
    return next((read_schema(file) for file in files if file.exists()), None)


def encode_raw_frame(X: Any, schema: Schema | None) -> Any:
    """A frame that has the schema's columns as features, each row by itself; anything else as it is.

    A frame without these columns whose columns are the features was encoded before and stays. Labels, ids and
    other columns are left out. Give encoded rows of a schema of numbers alone, whose features are named like its
    columns, as an array.

    Raises:
        DataError: columns of the schema are missing, or hold what the schema does not allow.
    """
    names = getattr(X, "column_names", None) or getattr(X, "columns", None)  # Arrow's ``columns`` are the cells
    if schema is None or names is None:
        return X
    given = [str(name) for name in names]
    absent = [column for column in schema.columns if column not in given]
    if absent and set(schema.feature_names) <= set(given):
        return X
    if absent:
        raise DataError(f"X: {missing_columns(absent, given)}. The run's schema says what its model takes.")
    from quietgrad.data.scanning import scan  # loads pyarrow

    blocks = [rows for rows, _ in scan(X, schema=schema, labelled=False).blocks()]
    rows = np.ascontiguousarray(np.concatenate(blocks))
    columns = dict(zip(schema.feature_names, rows.T, strict=True))
    if type(X).__module__.partition(".")[0] == "polars":
        return type(X)(columns)
    import pandas as pd  # for scikit-learn, a frame of any other library becomes one of pandas

    return pd.DataFrame(columns)


def missing_columns(absent: list[str], given: list[str]) -> str:
    """Which columns a table lacks and which it has, by name alone.

    >>> missing_columns(["sex"], ["age", "income"])
    "has no column 'sex'; it has columns 'age', 'income'"
    """
    return f"has no {named_columns(absent)}; it has {named_columns([sanitize(name) for name in given], most=20)}"
