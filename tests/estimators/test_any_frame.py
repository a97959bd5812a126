"""Frames of any library: whatever hands its columns over by the Arrow C stream is fitted, scored and described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from quietgrad.data import scan
from quietgrad.estimators import PrivateAdditiveClassifier, PrivateLogisticRegression, describe, private_score


class Relation:
    """What DuckDB's relations and ibis' tables are to others: names of columns, and a stream of them."""

    def __init__(self, table: pa.Table) -> None:
        self._table, self.columns, self.shape = table, table.column_names, table.shape

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def people() -> tuple[pa.Table, Any]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.0, 1.0, (3000, 2))
    words = np.where(X[:, 0] > 0, "ill", "well")
    return pa.table({"a": X[:, 0], "b": X[:, 1]}), words


def duckdb(table: pa.Table) -> Any:
    return pytest.importorskip("duckdb").from_arrow(table)


FRAMES: dict[str, Callable[[Any], Any]] = {
    "pyarrow": lambda table: table, "pandas": lambda table: table.to_pandas(), "polars": pl.from_arrow,
    "a stream": Relation, "duckdb": duckdb,
}  # fmt: skip
COLUMNS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray,
    "pandas": pd.Series,
    "pandas string": lambda words: pd.Series(words, dtype="string"),
    "pandas arrow": lambda words: pd.Series(words, dtype=pd.ArrowDtype(pa.string())),
    "polars": lambda words: pl.Series(words.tolist()),
    "polars categorical": lambda words: pl.Series(words.tolist(), dtype=pl.Categorical),
    "pyarrow": lambda words: pa.chunked_array([pa.array(words.tolist())]),
    "pyarrow dictionary": lambda words: pa.chunked_array([pa.array(words.tolist()).dictionary_encode()]),
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateAdditiveClassifier])
def test_a_frame_of_any_library_is_fitted_and_scored(frame: str, kind: Any) -> None:
    table, words = people()
    X = FRAMES[frame](table)
    asked = {"epsilon": 8.0, "classes": ["well", "ill"], "n_public": 3000, "feature_bounds": [(-1, 1), (-1, 1)]}
    model = kind(**asked).fit(X, words)
    assert model.score(X, words) > 0.9
    assert list(model.feature_names_in_) == ["a", "b"]
    score = private_score(model, X, words, epsilon=4.0, n_public=3000)
    assert score.accuracy is not None
    assert score.accuracy[0] > 0.8


@pytest.mark.parametrize("column", COLUMNS)
def test_words_of_any_library_are_targets(column: str) -> None:
    table, words = people()
    model = PrivateLogisticRegression(epsilon=8.0, classes=["well", "ill"], n_public=3000)
    assert model.fit(table, COLUMNS[column](words)).score(table, COLUMNS[column](words)) > 0.9


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_with_its_target_is_scanned_and_described(frame: str) -> None:
    table, words = people()
    whole = FRAMES[frame](table.append_column("y", pa.array(words.tolist())))
    model = PrivateLogisticRegression(epsilon=8.0, classes=["well", "ill"], n_public=3000).fit(whole, "y")
    assert model.score(table.to_pandas(), words) > 0.9
    schema = {"a": {"kind": "number", "bounds": [-1, 1]}, "y": {"kind": "category", "categories": ["ill", "well"]}}
    told = describe(whole, schema, by="y", epsilon=4.0, statistics=("count", "mean"), n_public=3000)
    means = {row["y"]: row["value"] for row in told.rows if row["statistic"] == "mean"}
    assert means["ill"] == pytest.approx(0.5, abs=0.05)


def test_the_index_of_a_frame_is_no_column() -> None:
    """Its own Arrow stream hands it over as one: an id would have become a feature."""
    frame = pd.DataFrame({"a": [0.1, 0.2], "y": [0, 1]}, index=["P1", "P2"])
    assert scan(frame, target="y").feature_names == ("a",)
