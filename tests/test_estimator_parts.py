"""Models that learn in parts: what the parts cost together, and what of a model a saved run keeps."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.certificates import issue
from quietgrad.errors import BudgetError, DataError, TooNoisyError
from quietgrad.estimators import (
    PrivateHuberRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateSVC,
    from_run,
    spent,
    to_run,
)
from quietgrad.privacy.accounting import account as price
from quietgrad.privacy.events import Parallel, composed

BOX = [(-1.0, 1.0)] * 2


def rows(n: int = 1500) -> tuple[Any, Any]:
    X = np.random.default_rng(0).uniform(-1, 1, (n, 2))
    return X, (X[:, 0] > 0).astype(int)


def logistic(**given: Any) -> Any:
    return PrivateLogisticRegression(
        **{"classes": [0, 1], "feature_bounds": BOX, "relation": "replace-one", **given}
    )


def test_passes_over_the_same_rows_cost_as_many_fits(tmp_path: Path) -> None:
    X, y = rows()
    model = logistic(account="epochs")
    for _ in range(5):
        model.partial_fit(X, y)
    once = logistic(account="once").fit(X, y).privacy_
    five = price(composed([once.events] * 5), delta=1e-5, relation="replace-one")
    assert five > 2.0
    assert model.privacy_.epsilon == pytest.approx(five) == pytest.approx(spent("epochs", relation="replace-one"))
    assert model.privacy_.account == "epochs"
    assert "fitted in 5 parts of 7500 records together, whose costs add up" in model.privacy_.notes
    capped = logistic(ledger=tmp_path / "l.jsonl", account="p", cap=qg.Budget(1.1, 1e-5, qg.Relation.REPLACE_ONE))
    capped.partial_fit(X, y)
    before = capped.privacy_
    with pytest.raises(BudgetError):
        capped.partial_fit(X, y)
    assert capped.privacy_ is before
    with pytest.raises(TooNoisyError, match="of several parts"):
        model.summary()


def test_a_part_goes_on_from_a_fit_and_a_fit_begins_anew() -> None:
    X, y = rows()
    model = logistic(epsilon=2.0).fit(X, y)
    alone = model.privacy_.epsilon
    model.partial_fit(X[:500], 1 - y[:500])  # three quarters of the average are the fit's
    assert model.score(X, y) > 0.9
    assert model.result_.details["parts"]["records"] == 2000
    assert model.privacy_.epsilon > 1.3 * alone
    assert model.fit(X, y).privacy_.epsilon == pytest.approx(alone)
    model.partial_fit(X, y)
    assert "fitted in 2 parts of 3000 records together, whose costs add up" in model.privacy_.notes


def test_parts_of_different_people_cost_the_worst_of_them_where_it_is_shown_or_promised(tmp_path: Path) -> None:
    X, y = rows()
    ids = np.arange(1500) // 3
    shown = logistic(account="shown").partial_fit(X[:750], y[:750], person=ids[:750])
    copy = pickle.loads(pickle.dumps(shown))
    shown.partial_fit(X[750:], y[750:], person=ids[750:])
    assert isinstance(shown.privacy_.events, Parallel)
    assert shown.privacy_.epsilon == pytest.approx(1.0, rel=1e-2)
    assert any("shown by their ids" in note for note in shown.privacy_.notes)
    # A copy does not know who came: without a promise they may have come before, and it adds up.
    other = pickle.loads(pickle.dumps(copy))
    assert other.partial_fit(X[:750], y[:750], person=ids[:750]).privacy_.epsilon > 1.3
    copy.partial_fit(X[750:], y[750:], person=ids[750:], disjoint=True)
    assert any("the caller's promise" in note for note in copy.privacy_.notes)
    promised = logistic(account="promised")
    for half in (slice(0, 750), slice(750, None)):
        promised.partial_fit(X[half], y[half], disjoint=True)
    assert promised.privacy_.epsilon == pytest.approx(1.0, rel=1e-2)
    assert any("the caller's promise" in note for note in promised.privacy_.notes)
    # The account does not know who is in which part.
    assert spent("promised", relation="replace-one") == pytest.approx(1.464, rel=1e-3)
    loaded = from_run(to_run(promised, tmp_path))
    assert loaded.privacy_.account == "promised"
    assert loaded.partial_fit(X, y, disjoint=True).privacy_.epsilon == pytest.approx(1.0, rel=1e-2)
    assert promised.partial_fit(X, y).privacy_.epsilon > 1.3
    cap = qg.Budget(1.2, 1e-5, qg.Relation.REPLACE_ONE)
    capped = logistic(account="capped", cap=cap, ledger=str(tmp_path / "ledger.jsonl"))
    capped.partial_fit(X[:750], y[:750], person=ids[:750])
    with pytest.raises(BudgetError):
        capped.partial_fit(X[750:], y[750:], person=ids[750:])
    added = logistic().fit(X[:750], y[:750], person=ids[:750])
    added.partial_fit(X[:750], y[:750], person=ids[:750])  # who was in the fit is not kept: it adds up
    assert added.privacy_.epsilon > 1.3
    with pytest.raises(DataError, match="one id per record"):
        logistic().partial_fit(X, y, person=np.stack([ids, ids], axis=1))


def test_a_part_under_another_relation_is_refused_and_a_seeded_one_stays_told() -> None:
    X, y = rows()
    model = logistic(relation="add-remove").fit(X, y)
    with pytest.raises(DataError, match="another relation"):
        model.set_params(relation="replace-one").partial_fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seeded = logistic(random_state=1).fit(X, y)
    seeded.set_params(random_state=None).partial_fit(X, y)
    assert not seeded.privacy_.is_private
    assert "seeded" in str(seeded.privacy_)


LABELS: dict[str, list[Any]] = {
    "numbers": [0, 1], "floats": [0.0, 1.0], "booleans": [False, True], "texts": ["01", "1"],
    "words": ["False", "True"], "three": ["1", "10", "2"],
}  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2], ids=["fit", "partial_fit"])
@pytest.mark.parametrize("kind", [*LABELS, "svc", "huber", "squared", "huber by dp-sgd", "logistic by dp-sgd"])
def test_a_saved_run_predicts_as_the_model_does(kind: str, parts: int, tmp_path: Path) -> None:
    X, y = rows(900)
    targets = 50.0 + 40.0 * X[:, 0]
    labels = np.array(LABELS.get(kind, [0, 1]))[y if kind != "three" else np.arange(900) % 3]
    given: dict[str, Any] = {"feature_bounds": BOX, "epsilon": 5.0}
    method = "dp-sgd" if kind.endswith("dp-sgd") else None
    model: Any
    loss: Any
    if kind.startswith(("huber", "squared")):
        loss = PrivateHuberRegressor if kind.startswith("huber") else PrivateLinearRegression
        model, labels = loss(target_bounds=(0.0, 100.0), algorithm=method, **given), targets
    else:
        loss = PrivateSVC if kind == "svc" else PrivateLogisticRegression
        model = loss(classes=LABELS.get(kind, [0, 1]), algorithm=method, fit_intercept=kind != "booleans", **given)
    model.fit(X, labels)
    if parts == 2:
        model.partial_fit(X[:300], labels[:300][::-1])
    again = from_run(to_run(model, tmp_path / "run"))
    far = 3.0 * X  # beyond the box: what rows and targets are kept in is saved too
    np.testing.assert_allclose(again.coef_, model.coef_, rtol=1e-12)
    np.testing.assert_array_equal(again.predict(far), model.predict(far))
    if hasattr(model, "classes_"):
        assert [(type(c), c) for c in again.classes_.tolist()] == [(type(c), c) for c in model.classes_.tolist()]
    assert again.privacy_ == model.privacy_
    assert not again.privacy_.refuted
    assert again.privacy_.is_private
    if parts == 2:
        with pytest.raises(DataError, match="several parts"):
            issue(tmp_path / "run")


def test_a_run_that_learns_more_adds_up(tmp_path: Path) -> None:
    from quietgrad.report.certificate import certify_run
    from quietgrad.training.result import load, problems_of

    X, y = rows()
    model = from_run(to_run(logistic(account="people").fit(X, y), tmp_path / "one"))
    model.set_params(feature_bounds=BOX).partial_fit(X, y)
    assert model.privacy_.epsilon > 1.3
    assert model.privacy_.account == "people"
    result = load(to_run(model, tmp_path / "two"))
    assert problems_of(result, tmp_path / "two", None) == []
    stated = certify_run(result, None)
    assert {r.name.partition(":")[0] for r in stated.releases} == {"part 1", "part 2"}
