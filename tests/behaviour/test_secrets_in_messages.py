"""Ordinary paths on which something secret decided what is published, or a message quoted a record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.state import run_of
from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch, private_score, to_run
from quietgrad.estimators.predicting import _is_ours, predict_row_independent
from quietgrad.tables.person_ids import factorize_ids

SECRET = "only-of-Ann"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def run(*arguments: object, code: int = 0) -> None:
    assert main([str(a) for a in arguments]) == code


def table(path: Path, n: int, gap: bool = False, flipped: bool = False) -> Path:
    rng = np.random.default_rng(0)
    lines = ["a,b,y"]
    for k in range(n):
        a, b = rng.uniform(-1, 1, 2)
        first = "" if gap and k == 4 else f"{a:.3f}"
        lines.append(f"{first},{b:.3f},{int((a > 0) != flipped)}")
    path.write_text("\n".join(lines) + "\n")
    return path


SCHEMA = {
    "columns": {"a": {"bounds": [-1, 1]}, "b": {"bounds": [-1, 1]}},
    "label": {"column": "y", "classes": ["0", "1"]},
    "drop_incomplete": True,
}


def test_rows_left_out_for_a_gap_are_no_public_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under replace-one n is public: a record that gets a gap would change it."""
    schema, data = tmp_path / "schema.json", table(tmp_path / "t.csv", 60, gap=True)
    schema.write_text(json.dumps(SCHEMA))
    told = ("train", data, "--schema", schema, "--epsilon", 1, "--out", tmp_path / "run")
    run(*told, "--relation", "replace-one", code=1)
    assert "drop_incomplete" in capsys.readouterr().err
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    run(*told, "--relation", "add-remove", "--n-public", 60)
    scanned = qg.data.scan(data, schema=schema)
    with pytest.raises(DataError, match="drop_incomplete"):
        PrivateLogisticRegression(relation="replace-one").fit(scanned)


def test_ids_that_spell_nothing_are_nobody() -> None:
    for word in ("NA", "nan", "None", "<NA>", "null"):
        with pytest.raises(DataError, match="no id"):
            factorize_ids(["anna", word, word])
    assert factorize_ids(["anna", "nan cy"])[1] == 2


def test_a_column_of_an_arrow_table_is_named_and_not_shown() -> None:
    pa = pytest.importorskip("pyarrow")
    frame = pa.table({"age": [1.0, 2.0, 3.0], "word": [SECRET, "b", "c"]})
    with pytest.raises(DataError, match="word") as caught:
        PrivateLogisticRegression().fit(frame, [0, 1, 0])
    assert SECRET not in str(caught.value)


def test_a_report_shows_no_score_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = table(tmp_path / "t.csv", 400), tmp_path / "run"
    run("train", data, "--epsilon", 2, "--row-bound", 2, "--rows", "clip", "--out", out)
    run("evaluate", out, data, "--epsilon", 2, "--training-people", "--ledger", tmp_path / "other.jsonl", code=2)
    run("evaluate", out, data, "--epsilon", 2, "--training-people")
    # These are the people who were trained on, and the project's ledger knows them: both are of one account.
    assert len(qg.Ledger(out / "ledger.jsonl").verify().accounts) == 1
    book = qg.Ledger(out / "ledger.jsonl").book()
    assert len({run_of(held.reservation.run) for held in book.held.values()}) == 2
    run("report", out)
    assert "<h3>on training people" in (out / "report.html").read_text().lower()
    flipped = table(tmp_path / "flipped.csv", 400, flipped=True)
    run("train", flipped, "--epsilon", 2, "--row-bound", 2, "--rows", "clip", "--out", out, "--overwrite")
    run("report", out)
    assert "<h3>on training people" not in (out / "report.html").read_text().lower()


@pytest.mark.parametrize("model", ["linear", "additive"])
def test_people_who_were_trained_on_pay_from_the_account_of_their_run(model: str, tmp_path: Path) -> None:
    """The payer is read from the run's entry in its ledger, whichever model the run is of."""
    data, out, ledger = table(tmp_path / "t.csv", 400), tmp_path / "run", tmp_path / "ledger.jsonl"
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({**SCHEMA, "drop_incomplete": False}))
    run("ledger", "cap", ledger, "patients", "--epsilon", 1.2, "--delta", 1e-5)
    run(
        "train", data, "--schema", schema, "--model", model, "--epsilon", 1, "--n-public", 400, "--ledger", ledger,
        "--account", "patients", "--out", out,
    )  # fmt: skip
    run("evaluate", out, data, "--epsilon", 5, "--training-people", code=1)
    assert qg.Ledger(ledger).verify().accounts == ("patients",)
    run("ledger", "cap", ledger, "patients", "--epsilon", 9, "--delta", 1e-5)
    run("evaluate", out, data, "--epsilon", 5, "--training-people")
    assert qg.Ledger(ledger).verify().accounts == ("patients",)
    ledger.rename(tmp_path / "moved.jsonl")
    run("evaluate", out, data, "--epsilon", 5, "--training-people", code=1)


def test_a_verdict_tells_what_the_run_notes_of_itself(tmp_path: Path) -> None:
    from quietgrad.assurance.certificates import check, issue

    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (100, 2))
    method, budget = qg.DPGD(steps=2), qg.Budget(0.5, 0.1)
    qg.minimize(qg.objectives.Logistic(), (X, (X[:, 0] > 0) * 1.0), method, budget=budget, folder=tmp_path / "run")
    verdict = check(issue(tmp_path / "run"))
    assert any("δ is not below 1/n" in line for line in verdict.not_shown)


def test_an_output_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="returns='lastx'"):
        qg.DPSGD(steps=3, batch_size=5, returns="lastx")  # type: ignore[arg-type]


def test_a_folder_with_a_file_twice_is_refused(tmp_path: Path) -> None:
    """gzip -k, and a copy made in a file manager: everybody would be in the sums twice."""
    pytest.importorskip("pyarrow")
    folder = tmp_path / "people"
    folder.mkdir()
    one = table(folder / "1.csv", 200)
    (folder / "1.csv.gz").write_bytes(gzip.compress(one.read_bytes()))
    with pytest.raises(DataError, match="packed and unpacked"):
        qg.data.scan(folder, target="y")
    (folder / "1.csv.gz").unlink()
    (folder / "1 (copy).csv").write_bytes(one.read_bytes())
    with pytest.raises(DataError, match="twice"):
        PrivateLogisticRegression(classes=[0, 1]).fit(qg.data.scan(folder, target="y"))


class Adapts:
    """Standardises by the first rows it ever sees: asked again it answers alike."""

    classes_ = np.array([0, 1])

    def decision_function(self, X: Any) -> Any:
        self.middle = getattr(self, "middle", X.mean())
        return X[:, 0] - self.middle


class Fails:
    classes_ = np.array([0, 1])

    def decision_function(self, X: Any) -> Any:
        return [float(SECRET) for _ in X]


def test_a_model_is_asked_about_each_record_anew_and_no_answer_is_a_wrong_one() -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (200, 1))
    first, again = (predict_row_independent(Adapts(), "decision_function", rows, None) for rows in (X, X[1:]))
    assert (first[1:] == again).all()  # whoever was asked about before
    score = private_score(Fails(), X, X[:, 0] > 0, epsilon=8.0, relation="replace-one")
    assert score.accuracy is not None
    assert score.accuracy[0] < 0.05


def test_a_score_is_kept_with_its_own_model_only(tmp_path: Path) -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (400, 2))
    y, box = (X[:, 0] > 0).astype(int), [(-1.0, 1.0)] * 2
    good, other = (PrivateLogisticRegression(classes=[0, 1], feature_bounds=box).fit(X, k) for k in (y, 1 - y))
    score = private_score(good, X, y, epsilon=1.0, account="others")
    score.save(to_run(good, tmp_path / "good"))
    with pytest.raises(DataError, match="another model"):
        score.save(to_run(other, tmp_path / "other"))


def test_ids_of_a_text_file_are_texts_wherever_they_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "visits.csv"
    rows = [f"{name},{k / 40},{k % 2}" for k, name in enumerate(["007"] * 20 + ["7"] * 20)]
    path.write_text("\n".join(["id,x,y", *rows]) + "\n")
    with pytest.raises(DataError, match="where the scan is made"):
        PrivateLogisticRegression(classes=[0, 1]).fit(qg.data.scan(path, target="y"), person="id")
    assert qg.data.scan(path, target="y", person="id").people == 2


class Centred(PrivateLogisticRegression):
    """Somebody's own: centres the rows it is asked about."""

    def predict(self, X: Any) -> Any:
        return super().predict(X - X.mean(axis=0))


def test_a_search_scores_models_that_answer_row_by_row() -> None:
    X = np.random.default_rng(0).uniform(-1, 1, (400, 2))
    model = Centred(classes=[0, 1], feature_bounds=[(-1.0, 1.0)] * 2)
    search = PrivateSearch(model, {"regularization": [0.0]}, epsilon=4.0)
    search.fit(X, (X[:, 0] > 0).astype(int))  # each row is centred by itself, and none is told from another
    assert len(set(predict_row_independent(search.best_estimator_, "predict", X, None).tolist())) == 1
    search.best_estimator_ = Adapts()
    assert not _is_ours(search)
