"""Private evaluation: right on average, honest about its errors, charged, and bounded whatever a record holds."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import log_loss, roc_auc_score

import quietgrad as qg
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.noise.rng import seed_key
from quietgrad.core.session import curator
from quietgrad.core.session.objectives import Batch
from quietgrad.estimators import PrivateLogisticRegression, private_score
from quietgrad.estimators.predicting import predict_row_independent, row_products
from quietgrad.tables.queries.counts import CellSums, Tabulation


class Fixed:
    """A public model: logits (or class scores) are columns of X."""

    def __init__(self, classes: Any) -> None:
        self.classes_ = np.asarray(classes)

    def predict_proba(self, X: Any) -> Any:
        scores = np.asarray(X, dtype=float)
        if len(self.classes_) == 2:
            scores = np.stack([np.zeros(len(scores)), scores[:, 0]], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)


def people(n: int, rng: Any) -> tuple[Any, Any]:
    X = 1.5 * rng.standard_normal((n, 1)) - 0.8
    return X, (rng.random(n) < 1 / (1 + np.exp(-X[:, 0]))).astype(int)


def test_value_and_error_bars_are_honest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The truth of the population lies within two standard errors in most of 120 draws; noise from fixed keys.

    With exact normal errors 95.4 % would; fewer than 86 % (103) has probability below 10⁻⁴ even at 93 % coverage.
    """
    keys = itertools.count()
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path))  # the ledger of other tests would be read every time
    monkeypatch.setattr(curator, "fresh_key", lambda: seed_key(next(keys)))
    rng = np.random.default_rng(0)
    model = PrivateLogisticRegression()  # a model of this library answers for all rows at once
    model.coef_, model.intercept_, model.classes_ = np.ones((1, 1)), np.zeros(1), np.arange(2)
    model.feature_range_, model.n_features_in_ = None, 1
    X, y = people(200_000, rng)
    p = model.predict_proba(X)[:, 1]
    truth = {"accuracy": np.mean((p > 0.5) == y), "auc": roc_auc_score(y, p), "log_loss": log_loss(y, p)}
    inside = dict.fromkeys(truth, 0)
    for _ in range(120):
        chosen = rng.choice(len(y), 2000)
        score: Any = private_score(model, X[chosen], y[chosen], epsilon=0.5)
        for name, value in truth.items():
            estimate, error = getattr(score, name)
            assert 0.0 < error < 0.05
            assert type(estimate) is type(error) is float
            inside[name] += abs(estimate - value) < 2.0 * error
    assert min(inside.values()) >= 103, inside


def test_calibration_and_confusion_add_up() -> None:
    X, y = people(20_000, np.random.default_rng(1))
    score: Any = private_score(Fixed(["no", "yes"]), X, np.array(["no", "yes"])[y], epsilon=1.0)
    assert score.confusion.sum() == pytest.approx(1.0, abs=0.02)
    assert np.trace(score.confusion) == pytest.approx(score.accuracy[0], abs=1e-9)
    for predicted, observed, error, share in score.calibration:
        assert 0.0 < share < 1.0
        assert abs(predicted - observed) < 5.0 * error + 0.03  # a bin is as wide as 2/3 in log-odds


def test_many_classes() -> None:
    rng = np.random.default_rng(2)
    X = 2.0 * rng.standard_normal((12_000, 4))
    model = Fixed(range(4))
    chances = model.predict_proba(X)
    y = (rng.random((12_000, 1)) > chances.cumsum(axis=1)).sum(axis=1)
    score: Any = private_score(model, X, y, epsilon=1.0)
    truth = np.mean(chances.argmax(axis=1) == y)
    assert abs(score.accuracy[0] - truth) < 4 * score.accuracy[1]
    assert abs(score.log_loss[0] - log_loss(y, chances)) < 0.1
    assert score.confusion.shape == (4, 4)


def test_regression_needs_public_bounds_and_finds_r2() -> None:
    rng = np.random.default_rng(3)
    X = rng.standard_normal((10_000, 1))

    class Line:
        def predict(self, X: Any) -> Any:
            return 3.0 * X[:, 0]

    y = 3.0 * X[:, 0] + rng.standard_normal(10_000)
    with pytest.raises(ValueError, match="target_bounds"):
        private_score(Line(), X, y)
    score: Any = private_score(Line(), X, y, epsilon=8.0, target_bounds=(-15.0, 15.0))
    assert abs(score.r2[0] - 0.9) < 4 * score.r2[1] + 0.02
    assert abs(score.rmse[0] - 1.0) < 6 * score.rmse[1] + 0.02


def test_it_is_charged_to_the_held_out_people_and_refusals_are_free(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    X, y = people(2000, np.random.default_rng(4))
    cap = qg.Budget(0.5, 1e-6)
    with pytest.raises(ValueError, match="epsilon"):
        private_score(Fixed([0, 1]), X, y, epsilon=-1.0, ledger=path)
    assert not path.exists()
    private_score(Fixed([0, 1]), X, y, epsilon=0.4, ledger=path, cap=cap)
    with pytest.raises(BudgetError):
        private_score(Fixed([0, 1]), X, y, epsilon=0.4, ledger=path, cap=cap)
    spent = qg.Ledger(path).spent("held-out", delta=1e-6, relation="add-remove")
    assert 0.39 < spent.epsilon <= 0.4


def test_a_model_is_asked_about_one_record_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    X, y = people(2000, np.random.default_rng(6))

    class Standardised(Fixed):
        """One record among these rows moves the answers of all."""

        def predict_proba(self, X: Any) -> Any:
            return super().predict_proba((X - X.mean(axis=0)) / X.std(axis=0))

    class Line:
        """One that does so only where somebody far away is among all the rows."""

        def predict(self, X: Any) -> Any:
            return X[:, 0] if len(X) < 2000 or X[:, 0].max() < 100.0 else -X[:, 0]

    far, bounds = np.vstack([X[1:], [[1e9]]]), (-9.0, 9.0)
    alone = predict_row_independent(Line(), "predict", far, None)
    assert (alone[:-1] == far[:-1, 0]).all()  # whoever else is there
    assert private_score(Line(), far, y, epsilon=0.4, ledger=path, target_bounds=bounds).rmse is not None
    both = [predict_row_independent(Standardised([0, 1]), "predict_proba", rows, 2) for rows in (X, X[1:])]
    assert np.array_equal(both[0][1:], both[1], equal_nan=True)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_person_moves_the_table_further_than_planned(relation: Relation, groups: int) -> None:
    rng = np.random.default_rng(5)
    query = CellSums(12, groups, relation)
    vectors = []
    for _ in range(60):
        cells = rng.integers(-3, 15, (1, groups))
        weights = rng.choice([0.0, 1.0, 0.3, 7.0, -2.0, np.inf, np.nan, 1e308], (1, groups))
        out = np.zeros(12)
        query.sum_into(None, Batch(Tabulation().prepare((cells, weights)), None), out)
        assert np.isfinite(out).all()
        vectors.append(out)
    for i, one in enumerate(vectors):
        if relation is Relation.ADD_REMOVE:
            assert np.linalg.norm(one) <= query.bound * (1 + 1e-9)
        for other in vectors[:i]:
            assert np.linalg.norm(one - other) <= 2.0 * query.bound * (1 + 1e-9)


def test_r2_is_not_told_where_the_variance_of_the_targets_is_noise() -> None:
    """800 people in an interval five times as wide as their targets: R² was 0.85 ± 3·10⁹."""
    rng = np.random.default_rng(5)
    y = 2000.0 + 300.0 * rng.standard_normal(800)

    class Same:
        def predict(self, X: Any) -> Any:
            return X[:, 0]

    score = private_score(Same(), y[:, None], y, epsilon=0.3, target_bounds=(0.0, 6000.0))
    assert score.r2 is None
    assert score.rmse is not None
    assert "R² cannot be estimated" in score.notes[0]
    assert "r2" not in str(score)


def test_products_of_a_row_round_alike_whatever_other_rows_there_are() -> None:
    rng = np.random.default_rng(0)
    for d, k, n in ((1, 1, 3), (7, 1, 50), (100, 10, 121), (33, 3, 5000)):
        X, weights = rng.normal(size=(n, d)), rng.normal(size=(d, k))
        whole = row_products(X, weights)
        assert np.allclose(whole, X @ weights)
        for rows in (slice(0, 1), slice(1, None), slice(None, None, 2), slice(n - 1, None)):
            assert np.array_equal(whole[rows], row_products(X[rows], weights))


def test_a_record_that_a_model_cannot_answer_about_raises_nothing() -> None:
    X = np.random.default_rng(0).normal(size=(300, 2))
    y = (X[:, 0] > 0) * 1
    forest = RandomForestClassifier(3, random_state=0).fit(X, y)
    X[3] = 1e39  # more than its float32 holds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private_score(forest, X, y, epsilon=2.0, n_public=300).accuracy is not None


class AnswersRows:
    """Answers about rows whose first number is above a limit, and raises about all others."""

    classes_ = np.array(["no", "yes"])

    def __init__(self, limit: float, width: int = 2) -> None:
        self.limit, self.width = limit, width

    def predict_proba(self, X: Any) -> Any:
        if X[0, 0] <= self.limit:
            raise RuntimeError("a record")
        return np.full((1, self.width), 1.0 / self.width)


def test_a_model_that_answers_about_no_record_is_scored_as_one_that_answers_about_one() -> None:
    """It was refused at 500 rows and answered at 501 of which one could be answered about."""
    X = np.full((501, 1), -1.0)
    X[500] = 1.0
    y = np.array(["no", "yes"] * 250 + ["yes"])
    for rows in (500, 501):
        score = private_score(AnswersRows(0.0), X[:rows], y[:rows], epsilon=8.0, relation="replace-one")
        assert score.accuracy is not None
        assert score.accuracy[0] < 0.05  # no answer is a wrong one, of either class


def test_no_record_decides_what_form_the_answers_of_others_have() -> None:
    class Widens:
        def predict_proba(self, X: Any) -> Any:
            return np.full((1, 3 if X[0, 0] < 0.0 else 2), 0.25)

    X = np.array([[-1.0], [1.0], [1.0]])
    first, other = (predict_row_independent(Widens(), "predict_proba", rows, 2) for rows in (X, X[1:]))
    assert np.isnan(first[0]).all()
    assert (first[1:] == other).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_no_answer_is_wrong_whatever_the_class_is(classes: int) -> None:
    class Silent:
        classes_ = np.arange(classes)

        def decision_function(self, X: Any) -> Any:
            raise RuntimeError("a record")

    for label in range(classes):
        y = np.full(400, label)
        score = private_score(Silent(), np.zeros((400, 1)), y, epsilon=8.0, relation="replace-one")
        assert score.accuracy is not None
        assert score.accuracy[0] < 0.05


def test_no_answer_of_a_regressor_is_the_farther_end() -> None:
    class Silent:
        def predict(self, X: Any) -> Any:
            raise RuntimeError("a record")

    y = np.tile([1.0, 9.0], 200)
    asked: Any = {"target_bounds": (0.0, 10.0), "epsilon": 8.0, "relation": "replace-one"}
    score = private_score(Silent(), np.zeros((400, 1)), y, **asked)
    assert score.mae is not None
    assert score.mae[0] == pytest.approx(9.0, abs=0.5)


def test_each_number_is_judged_by_its_own_error() -> None:
    """Of one rare class accuracy is known well and AUC not at all: it was printed as 0.0000 ± 0.2289."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 1))
    y = (np.arange(2000) == 7).astype(int)
    score = private_score(Fixed([0, 1]), X - 3.0, y, epsilon=1.0, relation="replace-one")
    assert "accuracy" in score.stated
    assert "auc" in score.too_noisy
    assert "auc too noisy to state" in str(score)
    written = score.to_json()
    assert "auc" not in written
    assert "auc" in written["too_noisy"]
    assert written["accuracy"] == list(score.stated["accuracy"])
    json.dumps(written, allow_nan=False)


def test_a_model_of_other_columns_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    X, y = people(500, np.random.default_rng(3))
    model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=4.0).fit(X, y)
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(DataError, match="has 2 columns, the model was fitted on 1"):
        private_score(model, np.hstack([X, X]), y, ledger=path)
    assert not path.exists()
