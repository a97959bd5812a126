"""A run that was trained with a schema predicts for frames as the file has them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.data.schema import read_schema, without_comments
from quietgrad.estimators import from_run, to_run

SCHEMA = """# drafted: 7 cells are words
[label]
column = "ill"
kind = "yes/no"

[columns."age"]
kind = "whole number"
bounds = [0, 100]

[columns."sex"]
kind = "category"
categories = ["f", "#m"]  # "two" of them

[columns."seen"]
kind = "date"
format = ["%Y-%m-%d", "%d.%m.%Y"]
unreadable = "gap"
missing = "indicator"
bounds = ["2020-01-01", "2023-12-31"]
"""


def write(folder: Path, rows: int = 3000) -> Path:
    rng = np.random.default_rng(3)
    with (folder / "people.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "sex", "seen", "ill"])
        for k in range(rows):
            age, day = int(rng.integers(18, 95)), f"{1 + k % 28:02d}"
            seen = "31.31.2020" if k == 5 else f"2021-03-{day}" if k % 3 else f"{day}.03.2021"
            ill = rng.random() < (0.85 if age > 55 else 0.15)
            out.writerow([age, "f" if k % 2 else "#m", seen, "yes" if ill else "no"])
    (folder / "schema.toml").write_text(SCHEMA)
    return folder / "people.csv"


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    options = ["--epsilon", "2", "--delta", "1e-6", "--ledger", "ledger.jsonl", "--out", "run", "--quiet"]
    assert main(["train", "people.csv", "--schema", "schema.toml", *options]) == 0
    return tmp_path / "run"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_raw_frame_is_encoded_by_the_schema_of_the_run(trained: Path, library: str, capsys: Any) -> None:
    pytest.importorskip(library)
    import pandas as pd

    frame: Any = pd.read_csv("people.csv")
    if library == "polars":
        import polars as pl

        frame = pl.from_pandas(frame)
    elif library == "pyarrow":
        import pyarrow as pa

        frame = pa.Table.from_pandas(frame)
    model = from_run(trained)
    predicted = model.predict(frame)
    capsys.readouterr()
    assert main(["predict", "run", "people.csv"]) == 0
    written = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(",")[0] for line in written] == predicted.tolist()
    assert model.predict_proba(frame).shape == (3000, 2)


def test_a_missing_column_is_named_with_those_that_are_there(trained: Path) -> None:
    import pandas as pd

    frame = pd.read_csv("people.csv").drop(columns="sex")
    with pytest.raises(DataError, match="has no column 'sex'; it has columns 'age', 'seen', 'ill'"):
        from_run(trained).predict(frame)


def test_another_delimiter_is_told(trained: Path, capsys: Any) -> None:
    text = Path("people.csv").read_text().replace(",", ";")
    Path("other.csv").write_text(text)
    assert main(["predict", "run", "other.csv"]) == 1
    assert "delimiter = ';'" in capsys.readouterr().err


def test_a_run_keeps_its_schema_without_comments(trained: Path) -> None:
    """Comments of a draft tell of cells, and the folder of a run is published."""
    text = (trained / "schema.toml").read_text()
    assert "drafted" not in text
    assert "two" not in text
    assert read_schema(trained / "schema.toml") == read_schema("schema.toml")


@pytest.mark.parametrize(
    "text", [SCHEMA, 'a = """\n# no comment\n"""\n', 'a = \'x#y\' # z\nb = "\\"#"', "broken ["]
)
def test_comments_are_left_out_only_where_nothing_else_changes(text: str) -> None:
    import tomllib

    plain = without_comments(text.encode()).decode()
    try:
        assert tomllib.loads(plain) == tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        assert plain == text


def test_a_pipeline_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with pytest.raises(ValueError, match=r"Pipeline: is not saved as a run.*pipeline\[-1\]"):
        to_run(make_pipeline(StandardScaler()), tmp_path / "run")
