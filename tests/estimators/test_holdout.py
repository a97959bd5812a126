"""Held-out records of a run: neighbouring splits, people who were trained on, and errors known beforehand."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import DataError, DeltaWarning
from quietgrad.data import Dataset, read_schema
from quietgrad.data.drafting import draft_schema
from quietgrad.data.tables import parse_csv
from quietgrad.estimators.holdout import expected_error, hold_out_records, remember_trained, were_trained_on

KEY = "00112233445566778899aabbccddeeff"


def table(n: int, seed: int = 0, person: Any = None) -> Dataset:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 3))
    return Dataset("t", X, (X[:, 0] > 0).astype(int), classes=(0, 1), class_names=("no", "yes"), person=person)


def without(data: Dataset, place: int) -> Dataset:
    kept = np.arange(data.n) != place
    person = None if data.person is None else data.person[kept]
    return replace(data, X=data.X[kept], y=data.y[kept], person=person)


def rows(X: Any) -> set[bytes]:
    return {row.tobytes() for row in np.asarray(X)}


def test_one_record_less_is_one_less_on_its_side_alone() -> None:
    whole = table(300)
    parts = hold_out_records(whole, 0.3, KEY, fixed=False)
    assert 50 < len(parts.X_test) < 130  # type: ignore[arg-type]
    for place in (0, 17, 299):
        fewer = hold_out_records(without(whole, place), 0.3, KEY, fixed=False)
        gone = rows(whole.X[place : place + 1])
        assert rows(parts.X) - rows(fewer.X) | rows(parts.X_test) - rows(fewer.X_test) == gone
        assert rows(fewer.X) <= rows(parts.X)
        assert rows(fewer.X_test) <= rows(parts.X_test)


def test_a_replaced_record_changes_no_size_under_replace_one() -> None:
    whole = table(300)
    X = np.array(whole.X)
    X[7] = 99.0
    for one, other in [(hold_out_records(d, 0.3, KEY, fixed=True) for d in (whole, replace(whole, X=X)))]:
        assert one.n == other.n == 210
        assert len(rows(one.X) ^ rows(other.X)) + len(rows(one.X_test) ^ rows(other.X_test)) == 2


def test_equal_records_have_coins_of_their_own() -> None:
    """All on one side of 500 has a probability below 10⁻³⁰; one more moves none of the others."""
    same = replace(table(500), X=np.ones((500, 2)), y=np.zeros(500))
    parts = hold_out_records(same, 0.3, KEY, fixed=False)
    assert parts.X_test is not None
    assert 100 < len(parts.X_test) < 200
    more = hold_out_records(replace(table(501), X=np.ones((501, 2)), y=np.zeros(501)), 0.3, KEY, fixed=False)
    assert len(more.X) - len(parts.X) in (0, 1)


def test_a_person_is_on_one_side_and_has_no_place_to_be_split_by() -> None:
    with pytest.raises(DataError, match="add-remove"):
        hold_out_records(table(400, person=np.arange(400) // 4), 0.25, KEY, fixed=True)
    parts = hold_out_records(table(400, person=np.arange(400) // 4), 0.25, KEY, fixed=False)
    assert parts.person is not None
    assert parts.person_test is not None
    assert not set(parts.person) & set(parts.person_test)
    assert len(parts.person_test) % 4 == 0


def test_people_who_were_trained_on_are_known_again(tmp_path: Path) -> None:
    whole = table(2000)
    remember_trained(tmp_path, whole)
    assert len((tmp_path / ".trained").read_bytes()) == 32  # says nothing of how many there are
    assert were_trained_on(tmp_path, whole.X, whole.y, None)
    assert were_trained_on(tmp_path, whole.X[1:], whole.y[1:], None)
    assert were_trained_on(tmp_path, whole.X[:1], whole.y[:1], None)
    mixed = np.vstack([np.asarray(whole.X)[:200], np.asarray(table(800, 1).X)])
    assert were_trained_on(tmp_path, mixed, np.concatenate([whole.y[:200], table(800, 1).y]), None)
    new = table(2000, 2)
    assert not were_trained_on(tmp_path, new.X, new.y, None)


def test_equal_records_of_new_people_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Six deviations: over 48 pairs of tables the chance of one false alarm is below 1e-6."""
    for seed in range(48):
        rng = np.random.default_rng(seed)
        width = 1 + seed % 12
        X = (rng.random((1200, width)) < 0.3).astype(float)
        y = rng.integers(0, 2, 1200)
        whole = Dataset("t", X[:800], y[:800], classes=(0, 1))
        remember_trained(tmp_path, whole)
        assert not were_trained_on(tmp_path, X[800:], y[800:], None), seed


def test_with_ids_one_person_in_common_is_enough(tmp_path: Path) -> None:
    whole = table(200, person=np.array([f"p{k // 2}" for k in range(200)], dtype=object))
    remember_trained(tmp_path, whole)
    new = table(50, 3)
    ids = np.array([f"q{k}" for k in range(50)], dtype=object)
    assert not were_trained_on(tmp_path, new.X, new.y, ids)
    ids[3] = "p7"
    assert were_trained_on(tmp_path, new.X, new.y, ids)


@pytest.mark.parametrize(("n", "epsilon"), [(2000, 1.0), (10_000, 0.3)])
def test_the_error_of_a_score_is_known_beforehand(n: int, epsilon: float) -> None:
    from quietgrad.estimators import PrivateLogisticRegression, private_score

    data = table(4000 + n)
    model = PrivateLogisticRegression(epsilon=5.0, classes=[0, 1], row_bound=5.0).fit(data.X[:4000], data.y[:4000])
    score = private_score(model, data.X[4000:], data.y[4000:], epsilon=epsilon, delta=1e-6)
    assert score.accuracy is not None
    told = expected_error(n, Budget(epsilon, 1e-6, Relation.ADD_REMOVE), classes=2)
    assert 0.6 < told / score.accuracy[1] < 4.0  # told for a coin's accuracy, the most uncertain one


def test_a_delta_above_one_in_n_and_bounds_that_clip_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    rng = np.random.default_rng(0)
    lines = [
        f"{a:.3f},{b:.3f},{int(a > 50)}"
        for a, b in zip(rng.uniform(5, 95, 5000), rng.uniform(5, 9, 5000), strict=True)
    ]
    (tmp_path / "t.csv").write_text("age,dose,ill\n" + "\n".join(lines) + "\n")
    columns = "[columns.age]\nbounds = [0, 100]\n[columns.dose]\nbounds = [0, 5]\n"
    (tmp_path / "s.toml").write_text(f'[label]\ncolumn = "ill"\nkind = "yes/no"\n{columns}')
    asked = ["train", str(tmp_path / "t.csv"), "--schema", str(tmp_path / "s.toml"), "--epsilon", "2"]
    assert main([*asked, "--delta", "0.01", "--model", "linear", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "is above 1/n" in said
    assert "declared bounds of dose" in said
    assert "age" not in said


def small_csv(path: Path, classes: tuple[str, str] | None, n: int = 1500, rare: bool = False) -> str:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.0, 1.0, (n, 3))
    yes = np.arange(n) % 500 == 0 if rare else X[:, 0] > 0.0
    y = 2.0 + X[:, 0] if classes is None else np.where(yes, classes[1], classes[0])
    lines = [",".join([*(f"{v:.4f}" for v in row), str(label)]) for row, label in zip(X, y, strict=True)]
    path.write_text("\n".join(["a,b,c,y", *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize("model", ["linear", "additive", "svc", "least-squares"])
def test_exact_scores_of_held_out_rows_are_given_for_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    classes = None if model == "least-squares" else ("nein", "ja")
    told = ["--task", "regression"] if classes is None else ["--classes", ",".join(classes)]
    data = small_csv(tmp_path / "t.csv", classes)
    asked = ["--epsilon", "8", "--relation", "replace-one", "--model", model, "--holdout", "0.3", "--exact-score"]
    if classes is None:
        columns = "".join(f"[columns.{name}]\nbounds = [-1, 1]\n" for name in "abc")
        (tmp_path / "s.toml").write_text(f'[label]\ncolumn = "y"\nbounds = [0, 4]\n{columns}')
        told = ["--schema", str(tmp_path / "s.toml")]
    assert main(["train", data, *told, *asked, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics["private"] is False
    if classes is None:
        assert metrics["test_rmse"] < 0.3
        assert "test rmse" in said
    else:
        assert metrics["test_accuracy"] > 0.9
        assert "test accuracy" in said
    assert "they are data, not private" in said


def test_what_noise_drowns_is_said_so_in_print_result_report_and_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One record in 500 is of the second class: no AUC can be told, and accuracy can."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    data = small_csv(tmp_path / "t.csv", ("no", "yes"), 3000, rare=True)
    asked = ["--classes", "no,yes", "--epsilon", "3", "--relation", "replace-one", "--model", "linear"]
    run = tmp_path / "run"
    assert main(["train", data, *asked, "--holdout", "0.4", "--out", str(run)]) == 0
    assert re.search(r"test auc\s+too noisy to state", capsys.readouterr().out)
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    assert "test_auc" not in metrics
    assert "test_auc" in metrics["too_noisy"]
    assert metrics["test_accuracy"] > 0.9
    assert main(["card", str(run)]) == 0
    capsys.readouterr()
    shown = (
        (run / "MODEL_CARD.md").read_text(),
        (run / "model_card.html").read_text(),
        (run / "report.html").read_text(),
    )
    assert all("too noisy to state" in text for text in shown)
    fresh = small_csv(tmp_path / "new.csv", ("no", "yes"), 2500, rare=True)
    again = ["--epsilon", "1", "--relation", "replace-one", "--training-people"]
    assert main(["evaluate", str(run), fresh, *again]) == 0
    assert re.search(r"auc\s+too noisy to state", capsys.readouterr().out)


def test_a_delta_above_one_in_n_is_said_before_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    data, book = small_csv(tmp_path / "t.csv", ("no", "yes")), tmp_path / "ledger.jsonl"
    asked = ["train", data, "--classes", "no,yes", "--epsilon", "1", "--delta", "0.01", "--ledger", str(book)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeltaWarning)  # stops where it is said
        for named in ([], ["--model", "linear"], ["--model", "additive"]):
            assert main([*asked, "--relation", "replace-one", *named, "--out", str(tmp_path / "run")]) != 0
            assert "δ is not below 1/n" in capsys.readouterr().err
    assert not book.exists() or not qg.Ledger(book).book().held
    with warnings.catch_warnings():
        warnings.simplefilter("always", DeltaWarning)
        assert main([*asked, "--relation", "replace-one", "--out", str(tmp_path / "said"), "--quiet"]) == 0
    assert "Nothing is charged yet" in capsys.readouterr().err
    assert main(["plan", "dp-gd", "--n", "1500", "--epsilon", "1", "--delta", "0.01", "--steps", "5"]) == 0
    assert "caution: δ is not below 1/n" in capsys.readouterr().out


def test_a_schema_tells_all_its_problems_at_once() -> None:
    with pytest.raises(DataError) as refused:
        read_schema(
            {
                "label": {"column": "y", "kind": "category", "classes": []},
                "columns": {
                    "a": {"kind": "category", "categories": []},
                    "b": {"kind": "numbr"},
                    "c": {"kind": "number", "bounds": [1]},
                    "d": {"kind": "date", "bounds": ["2020-01-01"]},
                    "e": {"kind": "number", "missing": "mean"},
                },
            }
        )
    assert all(f"column '{name}'" in str(refused.value) for name in "abcde")
    assert "label" in str(refused.value)


def test_a_draft_tells_problems_and_no_cell(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,y\nsecret1,,1,0\nsecret2,,2,1\nsecret3,4\nsecret4,,3,1\n")
    draft = draft_schema(path)
    assert len(draft.problems) == 2
    assert "secret" not in draft.to_toml() + " ".join(draft.problems)
    with pytest.raises(DataError, match="no column 'z', 'w'"):
        draft_schema(path, label="z", drop=["w"])


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("secret-day", {"kind": "date"}),
        ("secret-number", {"kind": "number", "bounds": [0, 1]}),
        ("1,secret", {"kind": "number", "thousands": ","}),
    ],
)
def test_a_cell_that_is_none_of_its_kind_is_not_shown(cell: str, kind: dict[str, Any]) -> None:
    schema = read_schema({"label": {"column": "y", "kind": "yes/no"}, "columns": {"a": kind}})
    with pytest.raises(DataError, match="column 'a'") as refused:
        parse_csv(f'a,y\n"{cell}",1\n'.encode(), schema)
    assert "secret" not in str(refused.value)


def test_a_score_beyond_the_cap_leaves_the_model_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 2))
    np.savez("people.npz", X=X, y=(X[:, 0] > 0) * 1)
    told = [
        "train",
        "people.npz",
        "--epsilon",
        "1",
        "--row-bound",
        "2",
        "--holdout",
        "0.3",
        "--out",
        "r",
        "--quiet",
    ]
    assert main([*told, "--cap-epsilon", "0.801"]) == 0
    assert "not released: account 'people.npz': this run would exceed the cap" in capsys.readouterr().out
    assert (tmp_path / "r" / "report.html").exists()
