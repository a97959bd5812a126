"""Labels travel as labels: every model, command and scorer, for classes in any order, as words and as numbers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietgrad.cli import main
from quietgrad.data import Dataset
from quietgrad.data.dataset import encode_labels
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateLogisticRegression,
    PrivateSearch,
    PrivateSVC,
    from_run,
    private_score,
    to_run,
)
from quietgrad.tables.labels import ClassLabels

MIXED = [["nein", "ja"], ["low", "medium", "high"], ["2", "10", "0"]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(n: int, classes: list[Any], seed: int) -> tuple[Any, Any]:
    """Features, and labels that the largest of the first columns decides."""
    X = np.random.default_rng(seed).uniform(-1.0, 1.0, (n, max(3, len(classes))))
    return X, np.array(classes, dtype=object)[X[:, : len(classes)].argmax(axis=1)]


def write(path: Path, X: Any, y: Any) -> str:
    names = [*(f"x{j}" for j in range(X.shape[1])), "label"]
    lines = [",".join([*(f"{v:.4f}" for v in row), str(label)]) for row, label in zip(X, y, strict=True)]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    return str(path)


# --- the one type ---------------------------------------------------------------------------------------------


@given(st.permutations(["no", "yes", "1", "007", "None", "True", "é"]), st.integers(2, 7))
def test_codes_and_labels_are_inverse_in_any_order(names: list[str], k: int) -> None:
    known = ClassLabels.of(names[:k])
    assert known.decode(known.encode(names[:k])).tolist() == names[:k]
    assert known.names == tuple(names[:k])
    assert known.encode(np.array(["nowhere", None], dtype=object)).tolist() == [-1, -1]


@given(st.permutations([0, 1, 2, 10]), st.sampled_from([int, float, str, lambda v: f"{v}.0", np.int8, np.float32]))
def test_numbers_are_one_label_however_they_are_written(values: list[int], written: Any) -> None:
    known = ClassLabels.of(values)
    for cells in ([written(v) for v in values], np.array([written(v) for v in values], dtype=object)):
        assert known.encode(cells).tolist() == [0, 1, 2, 3]
        assert known.agree(np.array(values), np.asarray(cells)).all()


def test_a_label_of_no_class_and_a_gap_agree_with_nothing() -> None:
    import pandas as pd

    known = ClassLabels.of(["None", "nan"])
    gaps = np.array([None, np.nan, pd.NA, pd.NaT, "x", [1]], dtype=object)
    assert known.encode(gaps).tolist() == [-1] * 6
    assert not known.agree(gaps, gaps).any()
    assert known.encode_known(gaps).tolist() == [0] * 6


def test_texts_that_are_one_number_stay_two_classes() -> None:
    assert ClassLabels.of(["7", "007"]).encode(np.array(["007", "7", "7.0"])).tolist() == [1, 0, -1]


@pytest.mark.parametrize(
    "classes", [[1, "1"], [1, 1.0], [True, 1], ["a"], [], ["a", "a"], ["a", None], [0.0, np.nan], [[1, 2], [3, 4]]]
)
def test_classes_that_are_not_two_different_labels_are_refused(classes: list[Any]) -> None:
    with pytest.raises(ValueError, match="two or more different labels"):
        ClassLabels.of(classes)


def test_a_data_set_hands_labels_on_and_not_codes() -> None:
    raw = np.array(["ja", "nein", "vielleicht", "ja"])
    labels = encode_labels("t", raw, classes=("nein", "ja"))
    data = Dataset("t", np.eye(4), labels.y, **labels.facts)
    assert data.targets.tolist() == ["ja", "nein", "nein", "ja"]
    assert data.undeclared == 1
    assert "undeclared" not in repr(data)


# --- every estimator and scorer -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["low", "medium", "high"])))
@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateSVC, PrivateAdditiveClassifier])
def test_the_order_of_classes_changes_no_score(kind: Any, order: tuple[str, ...], tmp_path: Path) -> None:
    X, y = rows(3000, ["low", "medium", "high"], 0)
    model = kind(epsilon=8.0, classes=list(order), feature_bounds=[(-1, 1)] * 3, relation="replace-one").fit(X, y)
    truth = float(np.mean(model.predict(X) == y))
    assert truth > 0.8
    for scored in (model, from_run(to_run(model, tmp_path / "run"))):
        score = private_score(scored, X, y, epsilon=8.0, relation="replace-one", account="others")
        assert score.accuracy is not None
        assert abs(score.accuracy[0] - truth) < 6.0 * score.accuracy[1]
        assert abs(float(np.trace(score.confusion)) - truth) < 0.05
        assert score.classes.tolist() == sorted(order)


class Foreign:
    """Another library's model whose classes are in an order of their own."""

    classes_ = np.array(["medium", "high", "low"])

    def predict_proba(self, X: Any) -> Any:
        scores = np.exp(8.0 * np.asarray(X)[:, [1, 2, 0]])
        return scores / scores.sum(axis=1, keepdims=True)


def test_a_foreign_model_keeps_its_own_order() -> None:
    X, y = rows(600, ["low", "medium", "high"], 1)
    score = private_score(Foreign(), X, y, epsilon=8.0, relation="replace-one")
    assert score.accuracy is not None
    assert score.accuracy[0] > 0.95


@pytest.mark.parametrize("scoring", ["accuracy", "log_loss"])
def test_a_search_scores_labels(scoring: str) -> None:
    X, y = rows(3000, ["nein", "ja"], 2)
    model = PrivateLogisticRegression(classes=["nein", "ja"], feature_bounds=[(-1, 1)] * 3)
    search = PrivateSearch(model, {"regularization": [0.0, 1e-3]}, epsilon=8.0, scoring=scoring, mean_rounds=2.0)
    assert search.fit(X, y).best_score_ > 0.8


class _Frames:
    """The same table in every kind of frame, with labels of every kind of text or category."""

    def __init__(self, n: int = 4000) -> None:
        rng = np.random.default_rng(0)
        self.columns = {"a": rng.uniform(-1, 1, n), "b": rng.uniform(-1, 1, n)}
        self.y = np.where(self.columns["a"] > 0, "ja", "nein")

    def make(self, kind: str) -> Any:
        import pandas as pd
        import polars as pl
        import pyarrow as pa

        words = self.y.tolist()
        made: dict[str, Any] = {
            "polars": lambda: pl.DataFrame({**self.columns, "y": words}),
            "polars categorical": lambda: pl.DataFrame(
                {**self.columns, "y": pl.Series(words).cast(pl.Categorical)}
            ),
            "polars enum": lambda: pl.DataFrame(
                {**self.columns, "y": pl.Series(words).cast(pl.Enum(["nein", "ja"]))}
            ),
            "pyarrow": lambda: pa.table({**self.columns, "y": words}),
            "pyarrow large": lambda: pa.table({**self.columns, "y": pa.array(words, pa.large_string())}),
            "pyarrow view": lambda: pa.table({**self.columns, "y": pa.array(words, pa.string_view())}),
            "pyarrow dictionary": lambda: pa.table({**self.columns, "y": pa.array(words).dictionary_encode()}),
            "pandas object": lambda: pd.DataFrame({**self.columns, "y": pd.Series(words, dtype=object)}),
            "pandas string": lambda: pd.DataFrame({**self.columns, "y": pd.array(words, dtype="string")}),
            "pandas categorical": lambda: pd.DataFrame({**self.columns, "y": pd.Categorical(words)}),
        }
        return made[kind]()


FRAMES = ["polars", "polars categorical", "polars enum", "pyarrow", "pyarrow large", "pyarrow view",
          "pyarrow dictionary", "pandas object", "pandas string", "pandas categorical"]  # fmt: skip


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("declared", [None, ["nein", "ja"]])
@pytest.mark.parametrize("estimator", [PrivateLogisticRegression, PrivateAdditiveClassifier])
def test_a_frame_names_a_target_of_words(kind: str, declared: Any, estimator: Any) -> None:
    frames = _Frames()
    asked = {"epsilon": 4.0, "classes": declared, "feature_bounds": {"a": (-1, 1), "b": (-1, 1)}}
    model = estimator(relation="replace-one", **asked).fit(frames.make(kind), "y")
    import pandas as pd

    assert model.classes_.tolist() == ["ja", "nein"]
    assert float(np.mean(model.predict(pd.DataFrame(frames.columns)) == frames.y)) > 0.9


# --- every command --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("classes", MIXED, ids=",".join)
@pytest.mark.parametrize("model", [None, "linear", "additive", "svc"])
def test_a_run_scores_the_labels_of_its_file(
    folder: Path, model: str | None, classes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Train's held-out score, evaluate, predict and the card, of classes that are not in alphabetical order."""
    X, y = rows(4000, classes, 0)
    data, fresh = write(folder / "t.csv", X, y), write(folder / "new.csv", *rows(2000, classes, 1))
    asked = ["--epsilon", "12", "--relation", "replace-one", "--holdout", "0.4", "--out", "run", "--quiet"]
    named = [] if model is None else ["--model", model]
    assert main(["train", data, "--classes", ",".join(classes), *asked, *named]) == 0
    capsys.readouterr()
    assert main(["predict", "run", fresh, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = [row["label"] for row in csv.DictReader(io.StringIO(Path(fresh).read_text()))]
    truth = float(np.mean(np.array(found["prediction"]) == np.array(labels)))
    assert truth > 0.75
    assert found["scores"]["accuracy"] == pytest.approx(truth)
    metrics = json.loads((folder / "run" / "result.json").read_text())["metrics"]
    assert abs(metrics["test_accuracy"] - truth) < 0.1
    assert main(["card", "run"]) == 0
    card = (folder / "run" / "MODEL_CARD.md").read_text()
    shown = re.search(r"accuracy\W+([0-9.]+) ±", card)
    assert shown is not None
    assert float(shown.group(1)) == pytest.approx(metrics["test_accuracy"], abs=1e-4)
    capsys.readouterr()
    assert main(["evaluate", "run", fresh, "--epsilon", "8", "--relation", "replace-one", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert abs(score["accuracy"][0] - truth) < 0.05
    assert abs(float(np.trace(score["confusion"])) - truth) < 0.1
    assert sorted(score["classes"]) == sorted(classes)


@pytest.mark.parametrize("given", ["0,1", "1,0"])
def test_labels_written_as_floats_are_those_of_whole_classes(
    folder: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = rows(2000, [0, 1], 0)
    data, fresh = write(folder / "t.csv", X, y), write(folder / "new.csv", X, [f"{label}.0" for label in y])
    asked = ["--epsilon", "8", "--relation", "replace-one", "--model", "linear", "--out", "run", "--quiet"]
    assert main(["train", data, "--classes", given, *asked]) == 0
    capsys.readouterr()
    assert main(["predict", "run", fresh, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["accuracy"] > 0.9


def test_a_schema_of_classes_in_any_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y = rows(2000, ["1", "0"], 0)
    data = write(folder / "t.csv", X, y)
    columns = "".join(f"[columns.x{j}]\nbounds = [-1, 1]\n" for j in range(3))
    (folder / "s.toml").write_text(f'[label]\ncolumn = "label"\nclasses = ["1", "0"]\n{columns}')
    for k, named in enumerate(([], ["--model", "additive"], ["--model", "svc"])):
        asked = ["--epsilon", "8", "--relation", "replace-one", "--out", f"run{k}", "--quiet", "--schema", "s.toml"]
        assert main(["train", data, *asked, *named]) == 0
        capsys.readouterr()
        assert main(["predict", f"run{k}", data, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["scores"]["accuracy"] > 0.85
        again = ["--training-people", "--epsilon", "4", "--relation", "replace-one", "--json"]
        assert main(["evaluate", f"run{k}", data, *again]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"][0] > 0.85


# --- what the owner is told -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "told"), [("yes,no", "No label is among"), ("ja,no", "of 600 labels are not")]
)
def test_the_owner_alone_is_told_of_labels_that_are_no_class(
    folder: Path, declared: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal, before the ledger has a line; in no file of the run."""
    X, y = rows(600, ["nein", "ja"], 0)
    asked = ["--epsilon", "1", "--relation", "replace-one", "--model", "linear", "--out", "run"]
    assert main(["train", write(folder / "t.csv", X, y), "--classes", declared, *asked]) == 0
    said = capsys.readouterr()
    assert told in said.err
    assert told not in said.out
    undeclared = str(int(np.sum(~np.isin(y.astype(str), declared.split(",")))))
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != "t.csv"):
        content = path.read_bytes()
        assert b"labels are not" not in content
        assert b"undeclared" not in content
        assert f"{undeclared} of 600".encode() not in content


def test_nothing_is_told_where_every_label_is_a_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y = rows(600, ["nein", "ja"], 0)
    asked = ["--epsilon", "1", "--relation", "replace-one", "--model", "linear", "--out", "run"]
    assert main(["train", write(folder / "t.csv", X, y), "--classes", "nein,ja", *asked]) == 0
    assert "among the classes" not in capsys.readouterr().err


def test_a_scan_tells_its_owner_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y = rows(600, ["nein", "ja"], 0)
    (folder / "parts").mkdir()
    write(folder / "parts" / "a.csv", X, y)
    asked = ["--target", "label", "--classes", "yes,no", "--epsilon", "1", "--n-public", "600", "--out", "run"]
    assert main(["train", str(folder / "parts" / "*.csv"), *asked]) == 0
    assert "No label is among the classes yes, no" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["D", "h", "s", "ms", "us", "ns"])
def test_dates_are_labels_in_any_unit(unit: str) -> None:
    days = np.array(["2021-03-01", "2020-01-01"], dtype="M8[D]")
    for classes in (days, days.tolist(), ["2021-03-01", "2020-01-01"]):
        labels = ClassLabels.of(classes)
        assert labels.encode(days[[1, 0, 1]].astype(f"M8[{unit}]")).tolist() == [1, 0, 1]
        assert labels.encode(np.array(["2022-01-01"], dtype=f"M8[{unit}]")).tolist() == [-1]
