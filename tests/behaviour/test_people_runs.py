"""Runs on people with several records: what is counted, charged, stated, resumed and refused."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.curator import CentralCurator
from quietgrad.tables.privacy_units import PersonRefused, RecordsWithIds, UnitGrouping, UserLevelObjective

LOSS = qg.objectives.Logistic(row_bound=4.0, rows="clip")
BUDGET = qg.Budget(1.0, 1e-5)


def visits(people: int = 300, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(people) + 7000, rng.integers(1, 8, people))
    X = rng.normal(size=(len(ids), 3))
    order = rng.permutation(len(ids))
    return X[order], (X[order, 0] > 0) * 1.0, ids[order]


def test_n_is_the_number_of_people_and_the_statement_says_so(tmp_path: Path) -> None:
    X, y, numbers = visits()
    ids, book = [f"patient {i}" for i in numbers], tmp_path / "ledger.jsonl"
    settings: dict[str, Any] = {"budget": BUDGET, "person": ids, "ledger": book, "n_public": 300}
    result = qg.minimize(LOSS, (X, y), qg.DPSGD(steps=20, batch_size=30), **settings)
    assert result.n_public == 300
    assert result.privacy.unit == "person"
    assert "per person" in str(result.privacy)
    assert "each person enters a batch with probability 0.1" in result.privacy.sampling
    assert any("the mean of all their records" in note for note in result.privacy.notes)
    (held,) = Ledger(book).book().held.values()
    assert held.reservation.unit == "person"
    folder = result.save(tmp_path / "run")
    assert qg.load(folder).privacy == result.privacy
    words = json.dumps(result.to_json())
    assert not re.search(rf"\b{len(X)}\b(?![.e])", re.sub(r"-?\d+\.\d+(e-?\d+)?", "", words))  # rows are not public
    assert "patient" not in words
    assert "patient" not in book.read_text()


def test_one_record_each_is_the_run_on_rows() -> None:
    X, y, _ = visits()
    ids = np.random.default_rng(1).permutation(len(X))
    method = qg.DPSRM(steps=15, batch_size=40)
    rows = qg.minimize(LOSS, (X, y), method, budget=BUDGET, seed=3)
    people = qg.minimize(LOSS, (X, y), method, budget=BUDGET, seed=3, person=ids)
    assert np.array_equal(rows.params, people.params)


def test_units_do_not_mix_on_an_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y, ids = visits()
    book, method = tmp_path / "ledger.jsonl", qg.DPGD(steps=3)
    qg.minimize(LOSS, (X, y), method, budget=BUDGET, ledger=book, account="rows")
    qg.minimize(LOSS, (X, y), method, budget=BUDGET, ledger=book, account="visits", person=ids)
    before = len(Ledger(book).entries())
    for account, person in (("rows", ids), ("visits", None)):
        with pytest.raises(BudgetError, match="do not add up"):
            qg.minimize(LOSS, (X, y), method, budget=BUDGET, ledger=book, account=account, person=person)
    assert len(Ledger(book).entries()) == before
    from quietgrad.cli import main

    assert main(["ledger", "show", str(book), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["account"]: row["unit"] for row in told["accounts"]} == {"rows": "record", "visits": "person"}


def test_a_plan_for_records_does_not_open_on_people() -> None:
    X, y, ids = visits()
    curator = CentralCurator(UserLevelObjective(LOSS), RecordsWithIds((X, y), ids))
    with pytest.raises(DataError, match="the plan counts a record as one"):
        curator.open(qg.plan(qg.DPGD(steps=3), n=300, budget=BUDGET))
    plan = qg.plan(qg.DPGD(steps=3), n=300, budget=BUDGET, unit="person")
    assert "n = 300 people" in plan.explain()
    assert "a person more or less moves it by at most C" in plan.explain()
    session = curator.open(plan)
    with pytest.raises(DataError, match="privacy unit cannot change"):
        session.reread(LOSS, (X, y))


def test_a_run_on_people_resumes_bit_for_bit_and_with_the_same_settings_only(tmp_path: Path) -> None:
    X, y, ids = visits()
    method, folder, book = qg.DPSGD(steps=12, batch_size=30), tmp_path / "run", tmp_path / "ledger.jsonl"
    settings: dict[str, Any] = {"person": ids, "records_per_person": 2, "ledger": book, "folder": folder}
    kept: dict[str, Any] = {"checkpoint_seconds": 0.0, "n_public": 300}

    def stop(progress: qg.Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qg.minimize(LOSS, (X, y), method, budget=BUDGET, callback=stop, **kept, **settings)
    wrong: list[dict[str, Any]] = [{"person": None, "records_per_person": None}, {"records_per_person": 3}]
    for change in wrong:
        with pytest.raises(DataError, match="started with another person= or party="):
            qg.resume(LOSS, (X, y), method, **{**settings, **change})
    result = qg.resume(LOSS, (X, y), method, **settings)
    assert result.privacy.unit == "person"
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon <= 1.0  # charged once: the sums were the same, chosen records included
    assert len(Ledger(book).book().held) == 1


@pytest.mark.parametrize("method", [
    qg.OutputPerturbation(steps=20), qg.WhitenedGD(steps=3, row_bound=4.0, inference_share=0.2),
], ids=lambda m: m.name)  # fmt: skip
def test_methods_that_bound_means_refuse_sums_before_anything_is_reserved(method: Any, tmp_path: Path) -> None:
    X, y, ids = visits()
    budget = qg.Budget(1.0, 1e-5, Relation.REPLACE_ONE)
    loss = qg.objectives.Logistic(row_bound=4.0, rows="clip", regularizer=qg.objectives.L2(0.1))
    if method.name == "output-perturbation":
        assert qg.minimize(loss, (X, y), method, budget=budget, person=ids).n_public == 300
    book = tmp_path / "ledger.jsonl"
    for settings in ({"combine": "sum"}, {"records_per_person": 2}):
        with pytest.raises(PersonRefused, match="bounded for the mean of all"):
            qg.minimize(loss, (X, y), method, budget=budget, person=ids, ledger=book, **settings)
    assert not book.exists()


def test_bad_ids_cost_nothing_and_are_not_shown(tmp_path: Path) -> None:
    X, y, ids = visits()
    book = tmp_path / "ledger.jsonl"
    bad: list[Any] = [
        ids[:-1], [None, *ids[1:]], [[i] for i in ids], "patient", [*ids[:-1], "7001"],
    ]  # fmt: skip
    for person in bad:
        with pytest.raises(DataError, match=r"^person: ") as error:
            qg.minimize(LOSS, (X, y), qg.DPGD(steps=3), budget=BUDGET, ledger=book, person=person)
        assert "700" not in str(error.value)
    for settings in ({"combine": "median"}, {"records_per_person": 0}, {"records_per_person": True}):
        with pytest.raises(ValueError, match="must be"):
            qg.minimize(LOSS, (X, y), qg.DPGD(steps=3), budget=BUDGET, ledger=book, person=ids, **settings)
    with pytest.raises(ValueError, match="give person="):
        qg.minimize(LOSS, (X, y), qg.DPGD(steps=3), budget=BUDGET, ledger=book, combine="sum")
    hill = qg.objectives.landscape("strict-saddle", d=5)
    with pytest.raises(PersonRefused):
        qg.minimize(hill, 100, qg.DPGD(steps=3), budget=BUDGET, ledger=book, person=np.arange(100))
    assert not book.exists()


# --- estimators -------------------------------------------------------------------------------------------------


def test_estimators_by_person() -> None:
    pandas = pytest.importorskip("pandas")
    from quietgrad.estimators import (
        PrivateAdditiveClassifier,
        PrivateLogisticRegression,
        PrivateSearch,
        private_score,
    )

    X, y, ids = visits(3000)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"]).assign(patient=ids)
    model = PrivateLogisticRegression(epsilon=2.0, account="people here", n_public=3000).fit(
        frame, y, person="patient"
    )
    assert model.result_.n_public == 3000
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    assert model.privacy_.unit == "person"
    assert model.score(frame, y) == model.score(frame[["a", "b", "c"]], y) > 0.9
    assert "People(" not in repr(vars(model))
    assert b"starts" not in pickle.dumps(model)
    same = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], account="people here").fit(X, y, person=ids)
    assert same.privacy_.unit == "person"
    with pytest.raises(DataError, match="names no column of X"):
        PrivateLogisticRegression().fit(frame, y, person="doctor")
    with pytest.raises(ValueError, match="standard errors need combine='mean'"):
        PrivateLogisticRegression(classes=[0, 1], inference=True).fit(X, y, person=ids, combine="sum")
    gam = PrivateAdditiveClassifier(epsilon=2.0, classes=[0, 1], account="people here").fit(
        frame, y, person="patient"
    )
    assert gam.privacy_.unit == "person"
    assert gam.score(frame, y) > 0.8
    search = PrivateSearch(
        PrivateLogisticRegression(classes=[0, 1], row_bound=4.0), {"regularization": [0.0, 0.1]}, epsilon=4.0,
        mean_rounds=2.0, account="people here",
    ).fit(frame, y, person="patient")  # fmt: skip
    assert search.privacy_.unit == "person"
    score = private_score(model, frame, y, person="patient", epsilon=2.0, account="people here")
    assert score.privacy.unit == "person"
    assert score.accuracy is not None
    assert abs(score.accuracy[0] - model.score(frame, y)) < 0.1


def test_metadata_routing_takes_people_through_pipelines_and_folds() -> None:
    import sklearn
    from sklearn.model_selection import GroupKFold, cross_validate
    from sklearn.pipeline import make_pipeline

    from quietgrad.estimators import PrivateLogisticRegression

    X, y, ids = visits(2000)
    with sklearn.config_context(enable_metadata_routing=True):
        model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=4.0, account="routed")
        model.set_fit_request(person=True)
        piped = make_pipeline(model).fit(X, y, person=ids)
        assert piped[-1].privacy_.unit == "person"
        found = cross_validate(
            make_pipeline(model), X, y, cv=GroupKFold(2), params={"person": ids, "groups": ids},
            return_estimator=True,
        )  # fmt: skip
    assert {fitted[-1].privacy_.unit for fitted in found["estimator"]} == {"person"}
    assert all(abs(fitted[-1].result_.n_public - 1000) < 100 for fitted in found["estimator"])


# --- the command line ---------------------------------------------------------------------------------------------


def test_train_evaluate_and_predict_by_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quietgrad.cli import main

    X, y, ids = visits(1500)
    file = tmp_path / "visits.csv"
    lines = [f"{a:.6f},{b:.6f},{c:.6f},p-{i},{int(t)}" for (a, b, c), i, t in zip(X, ids, y, strict=True)]
    file.write_text("\n".join(["a,b,c,patient,y", *lines]) + "\n")
    out = tmp_path / "run"
    told = ["train", str(file), "--person", "patient", "--epsilon", "2", "--out", str(out), "--quiet"]
    told += ["--n-public", "1500"]
    assert main(told) == 0
    said = json.loads((out / "result.json").read_text())
    assert said["privacy"]["unit"] == "person"
    assert said["data"]["n_public"] == 1500
    assert said["details"]["model"]["feature_names"] == ["a", "b", "c"]
    page = (out / "report.html").read_text()
    assert "one person, with all their records" in page
    assert "One person is one record" not in page
    assert main(["evaluate", str(out), str(file), "--epsilon", "2"]) == 1  # they were trained on
    assert main(["evaluate", str(out), str(file), "--epsilon", "2", "--training-people"]) == 0
    assert json.loads((out / "evaluation.json").read_text())["privacy"]["unit"] == "person"
    assert main(["predict", str(out), str(file), "--json"]) == 0
    bare = tmp_path / "new.csv"
    bare.write_text("a,b,c\n0.1,0.2,0.3\n")
    assert main(["predict", str(out), str(bare), "--json"]) == 0
    # A statement that claims people where records were charged is refuted.
    said["privacy"]["unit"] = "record"
    (out / "result.json").write_text(json.dumps(said))
    from quietgrad.methods.result import problems_of

    assert any("has the run about a person" in why for why in problems_of(qg.load(out), out, out / "ledger.jsonl"))
    assert main(["train", str(file), "--person", "doctor", "--epsilon", "1", "--out", str(tmp_path / "x")]) == 1
    assert main(["train", "--person", "patient", "--epsilon", "1", "--out", str(tmp_path / "x")])  # the demo's
    assert not (tmp_path / "x" / "ledger.jsonl").exists()
    capsys.readouterr()
    assert main(["plan", "dp-gd", "--n", "1500", "--people", "--epsilon", "1"]) == 0
    assert "1500 people" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["string", "category"])
def test_ids_of_a_parquet_file_may_be_texts(kind: str, tmp_path: Path) -> None:
    import pandas as pd

    from quietgrad.data import load

    frame = pd.DataFrame({"id": ["b ", "a", "b", "c"], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]})
    frame.astype({"id": kind}).to_parquet(tmp_path / "visits.parquet")
    found = load(tmp_path / "visits.parquet", label="y", person="id").person
    assert found is not None
    assert found.tolist() == ["b", "a", "b", "c"]
    frame.loc[1, "id"] = None
    frame.astype({"id": kind}).to_parquet(tmp_path / "gap.parquet")
    with pytest.raises(DataError, match="a record has no id"):
        UnitGrouping.of(load(tmp_path / "gap.parquet", label="y", person="id").person)


def test_a_search_that_knows_no_bound_for_a_sum_charges_nothing(tmp_path: Path) -> None:
    from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch
    from quietgrad.methods.whitened_gd import WhitenedGD

    X, y, ids = visits()
    method = WhitenedGD(steps=3, row_bound=4.0, inference_share=0.3)
    model = PrivateLogisticRegression(classes=[0, 1], algorithm=method)
    search = PrivateSearch(model, {"regularization": [0.0, 0.1]}, epsilon=4.0, ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(PersonRefused, match="mean of all of a person's records"):
        search.fit(X, y, person=ids, combine="sum")
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("sampling", ["single-pass", "turns"])
@pytest.mark.parametrize("by_person", [True, False])
def test_a_pass_that_is_resumed_in_another_order_is_charged_again(
    sampling: Any, by_person: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was used has the place of one who was not: no sum is replayed right after a checkpoint, and ε of one
    pass would be stated of people who were used twice.
    """
    X, y, ids = visits(120)
    method = qg.DPSGD(steps=6, batch_size=20, sampling=sampling, cohorts=6 if sampling == "turns" else None)
    step = qg.DPSGD.step

    def interrupted(self: Any, state: Any, door: Any) -> Any:
        if state.step == 3:
            raise KeyboardInterrupt
        return step(self, state, door)

    spent = {}
    for name in ("same", "shuffled"):
        order = np.arange(len(ids)) if name == "same" else np.random.default_rng(1).permutation(len(ids))
        kept: dict[str, Any] = {"folder": tmp_path / name, "checkpoint_seconds": 0.0}
        with monkeypatch.context() as patch:
            patch.setattr(qg.DPSGD, "step", interrupted)
            n, whose = (120, ids) if by_person else (len(ids), None)
            with pytest.raises(KeyboardInterrupt):
                qg.minimize(LOSS, (X, y), method, budget=BUDGET, person=whose, n_public=n, **kept)
        whose = ids[order] if by_person else None
        spent[name] = qg.resume(LOSS, (X[order], y[order]), method, person=whose, **kept).privacy
    epsilons = {name: privacy.epsilon or 0.0 for name, privacy in spent.items()}
    assert epsilons["same"] <= 1.0
    assert epsilons["shuffled"] > 1.3
    assert "charged again" in spent["shuffled"].notes[0]
