"""Bad input to everything that is fitted on tables: one sentence, no record in it, nothing spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import quietgrad as qg
from quietgrad.core.errors import BudgetError
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateHuberRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateScaler,
    PrivateSearch,
    PrivateSVC,
    PublicOneHot,
    private_score,
)
from quietgrad.methods.output_perturbation import OutputPerturbation
from quietgrad.methods.range_estimation import RangeEstimation
from quietgrad.methods.whitened_gd import WhitenedGD

SECRET = "HIV-positive"
N = 60
CLASSIFIERS: dict[str, Any] = {
    "linear": PrivateLogisticRegression(classes=[0, 1]),
    "svc": PrivateSVC(classes=[0, 1]),
    "additive": PrivateAdditiveClassifier(classes=[0, 1]),
    "search": PrivateSearch(PrivateLogisticRegression(classes=[0, 1]), {"regularization": [0.0]}),
}
REGRESSORS: dict[str, Any] = {
    "squares": PrivateLinearRegression(target_bounds=(0, 1)),
    "additive": PrivateAdditiveRegressor(target_bounds=(0, 1)),
    "search": PrivateSearch(PrivateLinearRegression(target_bounds=(0, 1)), {"regularization": [0.0]}),
}
TRANSFORMERS: dict[str, Any] = {"scaler": PrivateScaler(), "one-hot": PublicOneHot()}


def rows() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(rng.standard_normal((N, 3)), columns=["age", "dose", "score"])


def changed(column: str, value: Any, at: int = 7) -> pd.DataFrame:
    table = rows().astype(object)
    table.at[at, column] = value
    return table


TABLES: dict[str, Any] = {
    "text in a cell": changed("dose", SECRET),
    "an object in a cell": changed("dose", {SECRET: 1}),
    "a list in a cell": changed("dose", [1.0, 2.0]),
    "missing": rows().mask(rows().age > 1.5),
    "none in a cell": changed("dose", None),
    "infinite": rows().assign(dose=np.inf),
    "same names": rows().set_axis(["age", "age", "score"], axis=1),
    "one row": rows().head(1),
    "no rows": rows().head(0),
    "no columns": rows()[[]],
    "complex": rows().to_numpy() * 1j,
    "one dimension": rows().age.to_numpy(),
}


def refused(tmp_path: Path, model: Any, X: Any, y: Any, *, with_y: bool = True) -> str:
    """What ``fit`` says; nothing is written to the ledger and no cell is in it."""
    path = tmp_path / "ledger.jsonl"
    model = clone(model)
    if "ledger" in model.get_params():
        model.set_params(ledger=path)
    with pytest.raises((ValueError, TypeError)) as refusal:
        model.fit(X, y) if with_y else model.fit(X)
    said = str(refusal.value)
    assert SECRET not in said
    assert not path.exists()
    return said


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("kind", [*CLASSIFIERS, *TRANSFORMERS])
def test_bad_tables(tmp_path: Path, kind: str, what: str) -> None:
    X = TABLES[what]
    if kind in TRANSFORMERS and what == "one row":
        return  # a transformer may have one record to work on
    model = clone({**CLASSIFIERS, **TRANSFORMERS}[kind])
    if what == "one row":  # under add-remove nobody is told that there is one
        model.set_params(relation="replace-one")
    said = refused(tmp_path, model, X, np.arange(len(X)) % 2, with_y=kind in CLASSIFIERS)
    assert 10 < len(said) < 500
    assert "\n" not in said
    if what in ("a list in a cell", "no columns"):
        assert said.startswith("X:")


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_refusals_say_what_is_wrong_and_not_what_failed(tmp_path: Path, kind: str) -> None:
    X, y = rows(), np.arange(N) % 2
    assert "table" in refused(tmp_path, CLASSIFIERS[kind], None, y)
    if kind != "search":  # which declares its classes: any other label counts as the first of them
        open_set = clone(CLASSIFIERS[kind]).set_params(classes=None)
        assert "one kind" in refused(tmp_path, open_set, X, np.array([0, 1, SECRET] * (N // 3), dtype=object))
    assert "NaN" in refused(tmp_path, CLASSIFIERS[kind], X, np.array([0, 1, None] * (N // 3), dtype=object))
    if kind == "additive":
        assert "whole number" in refused(tmp_path, clone(CLASSIFIERS[kind]).set_params(bins="many"), X, y)
        assert "not one twice" in refused(
            tmp_path, clone(CLASSIFIERS[kind]).set_params(pairs=[("age", "age")]), X, y
        )


HALVES = np.arange(N) % 2
BAD_Y: dict[str, Any] = {
    "missing": np.array([0, 1, None] * (N // 3), dtype=object),
    "NaN": np.where(np.arange(N) == 3, np.nan, HALVES),
    "infinite": np.where(np.arange(N) == 3, np.inf, HALVES),
    "too few": HALVES[:-1],
    "two columns": np.stack([HALVES] * 2, axis=1),
    "complex": HALVES * (1 + 1j),
    "none": None,
}


@pytest.mark.filterwarnings("ignore:.*ranges of the features")
@pytest.mark.parametrize("kind", ["linear", "svc", "additive"])
@pytest.mark.parametrize("y", [np.array([0, 1, SECRET] * (N // 3), dtype=object), np.linspace(0.1, 0.9, N)])
def test_labels_that_are_no_declared_class_count_as_the_first_whatever_they_are(kind: str, y: Any) -> None:
    """Labels of two kinds were refused, and so was a table of which no label is a class: one record decided."""
    model = clone(CLASSIFIERS[kind]).fit(rows(), y)
    assert len(model.classes_) == 2


@pytest.mark.parametrize("what", BAD_Y)
def test_bad_labels_and_targets(tmp_path: Path, what: str) -> None:
    for model in (*CLASSIFIERS.values(), *REGRESSORS.values()):
        refused(tmp_path, model, rows(), BAD_Y[what])


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("linear", {"feature_bounds": {"age": (0, np.inf)}}, "finite"),
        ("linear", {"feature_bounds": {"weight": (0, 1)}}, "not among the columns"),
        ("linear", {"feature_bounds": [(0, 1)]}, "has 1 pairs"),
        ("linear", {"feature_bounds": 3}, "one (low, high) per feature"),
        ("additive", {"feature_bounds": "ab"}, "one (low, high) per feature"),
        ("additive", {"categories": ["age"]}, "must map"),
        ("additive", {"categories": {"age": "xyz"}}, "distinct"),
        ("linear", {"classes": [1]}, "at least two"),
        ("linear", {"classes": ["no", "yes"]}, "texts"),
        ("linear", {"epsilon": 0.0}, "epsilon=0.0"),
        ("linear", {"delta": 1.0}, "delta=1.0"),
        ("linear", {"relation": "nearby"}, "relation='nearby'"),
        ("linear", {"row_bound": -1.0}, "row_bound"),
        ("linear", {"random_state": "x"}, "random_state"),
        ("linear", {"class_weight": {1: -1.0}}, "class_weight"),
        ("linear", {"class_weight": "balanced"}, "public weights"),
        ("linear", {"algorithm": "dp-magic"}, "dp-magic"),
        ("linear", {"feature_bounds": [(2, 1)] * 3}, "low < high"),
        ("linear", {"regularization": "much"}, "must be a number"),
        ("linear", {"algorithm": 3}, "must be a method"),
        ("additive", {"feature_bounds": {"age": (0, np.nan)}}, "finite"),
        ("additive", {"categories": {"job": ["a"]}}, "not among the columns"),
        ("additive", {"categories": {"age": []}}, "at least one"),
        ("additive", {"categories": {"age": ["a", "a"]}}, "distinct"),
        ("additive", {"pairs": [("age", "weight")]}, "two columns"),
        ("additive", {"bins": 1}, "bins=1"),
        ("search", {"param_grid": {"nothing": [1]}}, "nothing"),
        ("search", {"param_grid": {"class_weight": [None, "balanced"]}}, "public weights"),
        ("search", {"param_grid": {"algorithm": ["output-perturbation"]}}, "searched over"),
        ("search", {"param_grid": {"algorithm": [None, OutputPerturbation()]}}, "searched over"),
        ("search", {"param_grid": {"algorithm": ["dp-sgd"]}}, "searched over"),
        ("search", {"param_grid": {"classes": [[0, 1]]}}, "cannot be searched, because they describe public facts"),
        ("search", {"param_grid": {"regularization": 0.1}}, "list of values"),
        ("search", {"param_grid": [{"regularization": [0.1]}]}, "list of values"),
        ("search", {"relation": "add-remove", "epsilon": 2.0, "estimator__n_public": 60}, "40 records"),
        ("search", {"scoring": "auc"}, "scoring"),
    ],
)
def test_bad_settings(tmp_path: Path, model: str, change: dict[str, Any], message: str) -> None:
    said = refused(tmp_path, clone(CLASSIFIERS[model]).set_params(**change), rows(), np.arange(N) % 2)
    assert message in said


def test_a_bad_setting_late_in_a_grid_spends_nothing(tmp_path: Path) -> None:
    search = PrivateSearch(PrivateHuberRegressor(target_bounds=(0, 1)), {"threshold": [1.0, 2.0, -1.0]})
    assert "threshold" in refused(tmp_path, search, rows(), np.full(N, 0.5))
    with pytest.raises(ValueError, match="needs max_weight="):
        CLASSIFIERS["linear"].fit(rows(), np.arange(N) % 2, sample_weight=np.ones(N))


def test_what_fails_before_its_first_release_is_given_back(tmp_path: Path) -> None:
    """Output perturbation needs a bound that the loss does not have; it finds out after the charge."""
    path = tmp_path / "ledger.jsonl"
    model = PrivateLogisticRegression(
        classes=[0, 1], algorithm="output-perturbation", account="given back", relation="replace-one"
    )
    with pytest.raises(ValueError, match="row_bound"):
        clone(model).set_params(ledger=path).fit(rows(), np.arange(N) % 2)
    assert [held.state for held in qg.Ledger(path).book().of("given back")] in ([], ["cancelled"])
    assert qg.Ledger(path).spent("given back", delta=1e-5, relation="replace-one").epsilon == 0.0
    with pytest.raises(ValueError, match="row_bound"):
        model.fit(rows(), np.arange(N) % 2)


def test_a_wrong_vocabulary_counts_for_nothing_and_is_not_quoted() -> None:
    table = rows().assign(job=np.where(rows().age > 0, SECRET, "nurse"))
    model = PrivateAdditiveClassifier(epsilon=8.0, classes=[0, 1], categories={"job": ["doctor"]})
    model.fit(table, np.arange(N) % 2)
    assert SECRET not in str(model.privacy_) + str(model.shape_functions_)
    hot = PublicOneHot({"job": ["doctor"]}).fit(table)
    assert hot.transform(table)[:, 3].sum() == 0.0


def test_predicting_bad_rows_quotes_nothing() -> None:
    models = [CLASSIFIERS[name] for name in ("linear", "additive")]
    for model in (clone(m).set_params(epsilon=8.0).fit(rows(), np.arange(N) % 2) for m in models):
        for bad in (changed("dose", SECRET), rows().assign(dose=np.nan), rows()[["age", "dose"]]):
            with pytest.raises((ValueError, TypeError)) as refusal:
                model.predict(bad)
            assert SECRET not in str(refusal.value)
        with pytest.raises((ValueError, TypeError)) as refusal:
            private_score(model, changed("dose", SECRET), np.arange(N) % 2)
        assert SECRET not in str(refusal.value)


@pytest.mark.filterwarnings("ignore:at this n")
def test_a_cap_set_as_the_docs_do_admits_the_first_fit_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quietgrad.cli.ledger import cap

    monkeypatch.chdir(tmp_path)
    cap(Path("ledger.jsonl"), "patients", epsilon=3.0, delta=1e-6)
    y = np.array(["no", "yes"])[np.arange(N) % 2]
    settings: dict[str, Any] = {"classes": ["no", "yes"], "ledger": "ledger.jsonl", "account": "patients"}
    PrivateLogisticRegression(epsilon=0.5, delta=1e-5, **settings).fit(rows(), y)
    budget = qg.Budget(epsilon=0.5, delta=1e-5)
    data = (rows().to_numpy(), np.arange(N) % 2)
    qg.minimize(qg.objectives.Logistic(), data, qg.DPGD(steps=3), budget=budget, ledger="ledger.jsonl",
                account="patients")  # fmt: skip
    with pytest.raises(BudgetError, match="--relation replace-one"):  # which is not priced under add-remove
        PrivateLogisticRegression(epsilon=0.5, relation="replace-one", **settings).fit(rows(), y)


def test_no_refusal_tells_what_the_records_hold_of_what_was_declared() -> None:
    """A table of one class, an undeclared label, a row above its bound: a neighbour without them is not refused."""
    X, y = rows().to_numpy(), np.arange(N) % 2
    model = PrivateLogisticRegression(epsilon=8.0, classes=[0, 1], row_bound=1.0, n_public=N)
    for labels in (np.zeros(N, dtype=int), np.where(np.arange(N) == 3, 7, y), y):
        assert set(clone(model).fit(1e3 * X, labels).classes_) == {0, 1}
    additive = PrivateAdditiveClassifier(epsilon=8.0, classes=[0, 1], n_public=N)
    additive.fit(rows(), np.where(np.arange(N) == 3, 7, y))
    fitted = clone(model).fit(X, y)
    score = private_score(fitted, X, np.where(np.arange(N) == 3, 7, y), epsilon=8.0, n_public=N)
    assert score.accuracy is not None
    with pytest.raises(ValueError, match="texts"):  # that a column holds numbers is public
        clone(model).set_params(classes=["0", "1"]).fit(X, y)
    one = np.where(np.arange(N) < 0.95 * N, 1, np.arange(N))
    clone(model).set_params(n_public=None).fit(X, y, person=one)


@pytest.mark.parametrize("kept", [False, True])
def test_minimize_gives_back_what_it_did_not_release(tmp_path: Path, kept: bool) -> None:
    """Before the first release the whole entry; a stop that a release decided gives nothing back."""
    folder = tmp_path / "run" if kept else None
    X, budget = np.linspace(-1.0, 1.0, 400)[:, None], qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    blind = WhitenedGD(look=RangeEstimation(range_share=0.05, target_share=0.1), steps=4)
    cases: list[tuple[Any, Any, Any, str]] = [
        (OutputPerturbation(), qg.objectives.Logistic(), X[:, 0] > 0, "cancelled"),
        (blind, qg.objectives.Squared(), np.geomspace(1e-9, 1e9, 400), "closed"),
    ]
    for method, loss, y, state in cases:
        path = tmp_path / f"{state}.jsonl"
        with pytest.raises(ValueError, match=r"row_bound|target_bounds"):
            qg.minimize(loss, (X, y * 1.0), method, budget=budget, ledger=path, folder=folder)
        assert [held.state for held in qg.Ledger(path).book().of("default")] == [state]
        spent_there = qg.Ledger(path).spent("default", delta=1e-5, relation="replace-one").epsilon
        assert spent_there == 0.0 if state == "cancelled" else 0.99 < spent_there <= 1.0
        assert folder is None or not any(folder.iterdir())  # nothing that could be resumed
