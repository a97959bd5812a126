"""scikit-learn's own checks, and what they do not know: budgets, ledgers, clones, looks, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import quietgrad as qg
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.account import run_of
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    PrivateScaler,
    PrivateSearch,
    PublicOneHot,
)

# The checks fit tables of ten to a few hundred rows; at ε = 1 no honest method could find their classes.
LOOSE: dict[str, Any] = {"epsilon": 1e4, "delta": 0.1}
FEW: dict[str, Any] = {"relation": "replace-one"}  # under add-remove a search needs more


RANDOM = "two searches split the records and draw settings at random"
DECLARED = "the classes of a search are declared, and this check brings others"
NOISY = {"check_fit_idempotent": "noise decides whether an empty bin beside an occupied one is in the range"}
BEYOND = {
    "check_fit_idempotent": RANDOM,
    "check_supervised_y_2d": RANDOM,
    "check_regressors_int": RANDOM,
    "check_regressor_data_not_an_array": RANDOM,
    "check_classifier_data_not_an_array": RANDOM,
    "check_classifiers_classes": DECLARED,
    "check_classifiers_train": DECLARED,
    "check_classifiers_regression_target": DECLARED,
    "check_decision_proba_consistency": DECLARED,
}


WEIGHTED = dict.fromkeys(
    (
        "check_all_zero_sample_weights_error", "check_classifiers_one_label_sample_weights",
        "check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data",
        "check_sample_weights_list", "check_sample_weights_not_an_array", "check_sample_weights_not_overwritten",
        "check_sample_weights_pandas_series", "check_sample_weights_shape",
    ),
    "weights are refused without max_weight, their public bound",
)  # fmt: skip


def beyond(estimator: Any) -> dict[str, str]:
    """The checks that cannot hold for it, or not always, with the reason."""
    if isinstance(estimator, PrivateSearch):
        return BEYOND
    return NOISY if isinstance(estimator, PrivateScaler) else WEIGHTED


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [
        PrivateLogisticRegression(**LOOSE),
        PrivateLinearRegression(**LOOSE),
        PrivatePoissonRegressor(**LOOSE),
        PrivateAdditiveClassifier(**LOOSE),
        PrivateAdditiveRegressor(**LOOSE, target_bounds=(-6, 6)),
        PrivateScaler(**LOOSE),
        PublicOneHot(),
        PrivateSearch(PrivateLogisticRegression(classes=[0, 1, 2, 3]), {"regularization": [0.0]}, **LOOSE, **FEW),
    ],
    expected_failed_checks=beyond,
)
@pytest.mark.filterwarnings("ignore:random_state")
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def separable(n: int = 4000, d: int = 4, seed: int = 0) -> tuple[Any, Any]:
    X = np.random.default_rng(seed).standard_normal((n, d))
    return X, (X[:, 0] + 0.5 * X[:, 1] > 0).astype(int)


def test_every_look_is_inside_the_budget() -> None:
    X, y = separable()
    model: Any = PrivateLogisticRegression(epsilon=1.0, delta=1e-6).fit(X, y)
    assert model.privacy_.epsilon is not None
    assert 0.99 < model.privacy_.epsilon <= 1.0
    whole = qg.account(model.privacy_.events, delta=1e-6, relation="add-remove")
    assert whole == pytest.approx(model.privacy_.epsilon, rel=2e-3)
    assert dict(model.privacy_.releases)["count"] == dict(model.privacy_.releases)["labels"] == 1
    assert set(model.classes_) == {0, 1}
    assert model.score(X, y) > 0.9


def test_rare_labels_stay_unknown_and_common_ones_are_found() -> None:
    X, y = separable()
    y[:3] = 7
    assert 7 not in PrivateLogisticRegression(epsilon=1.0, delta=1e-6).fit(X, y).classes_


def test_too_few_records_to_find_classes_is_said() -> None:
    X, y = separable(40)
    with pytest.raises(DataError, match="if the label set is public"):
        PrivateLogisticRegression(epsilon=0.1, delta=1e-6).fit(X, y)


@pytest.mark.filterwarnings("ignore:this fit is part of")
def test_clones_and_folds_are_charged_to_one_account(tmp_path: Path) -> None:
    X, y = separable(2000)
    path = tmp_path / "ledger.jsonl"
    model = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], row_bound=4.0, ledger=path, account="people")
    GridSearchCV(model, {"regularization": [0.0, 0.1]}, cv=3, refit=True).fit(X, y)
    book = qg.Ledger(path)
    assert len({run_of(held.reservation.run) for held in book.book().of("people")}) == 2 * 3 + 1
    assert book.spent("people", delta=1e-5, relation="add-remove").epsilon > 2.0


def test_cap_stops_the_fit_before_anything_is_spent(tmp_path: Path) -> None:
    X, y = separable(1000)
    path = tmp_path / "ledger.jsonl"
    cap = qg.Budget(1.2, 1e-5)
    model = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], row_bound=4.0, ledger=path, cap=cap)
    model.fit(X, y)
    written = path.read_bytes()
    for algorithm in (None, "dp-sgd"):
        with pytest.raises(BudgetError):
            clone(model).set_params(algorithm=algorithm).fit(X, y)
    assert path.read_bytes() == written


def test_pipeline_sparse_and_strings() -> None:
    X, y = separable()
    names = np.array(["no", "yes"])[y]
    model = PrivateLogisticRegression(epsilon=2.0, classes=["no", "yes"], row_bound=4.0)
    piped = make_pipeline(FunctionTransformer(), model).fit(sparse.csr_matrix(X), names)
    assert set(piped.predict(X[:50])) <= {"no", "yes"}
    assert piped.score(X, names) > 0.9


def test_seeded_fits_are_equal_and_not_private() -> None:
    X, y = separable(1000)
    models = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="not private"):
            models.append(PrivateLogisticRegression(classes=[0, 1], row_bound=4.0, random_state=3).fit(X, y))
    assert np.array_equal(models[0].coef_, models[1].coef_)
    assert not models[0].privacy_.is_private


def test_private_search_is_charged_once(tmp_path: Path) -> None:
    X, y = separable(5000)
    path = tmp_path / "ledger.jsonl"
    model = PrivateLogisticRegression(classes=[0, 1], row_bound=4.0)
    # Both settings are good ones: a search of one round, one in ten, may have tried either alone.
    search = PrivateSearch(model, {"regularization": [0.0, 0.1]}, epsilon=4.0, ledger=path).fit(X, y)
    assert search.score(X, y) > 0.85
    assert len({run_of(held.reservation.run) for held in qg.Ledger(path).book().of("default")}) == 1
    assert 3.9 < search.privacy_epsilon_ <= 4.0
    with pytest.raises(DataError, match="declare its classes"):
        PrivateSearch(PrivateLogisticRegression(), {"regularization": [0.0]}).fit(X, y)


def test_a_declared_row_bound_gives_methods_the_constants_of_the_loss() -> None:
    X, y = separable()
    how: dict[str, Any] = {"epsilon": 4.0, "relation": "replace-one", "classes": [0, 1], "row_bound": 4.0}
    model = PrivateLogisticRegression(algorithm="output-perturbation", regularization=0.1, **how).fit(X, y)
    assert model.privacy_.epsilon is not None
    assert 3.9 < model.privacy_.epsilon <= 4.0
    assert model.score(X, y) > 0.8
