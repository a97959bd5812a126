"""Whole fits on two tables that differ in one person, release by release.

The second fit is told the answers of the first, so both ask the same questions; every sum without noise may then
differ by no more than the mechanism was told: looks at labels, ranges and targets, moments and gradients alike.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.base import is_regressor

from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session import curator as central
from quietgrad.core.session.session import CentralSession
from quietgrad.core.session.summing import add_batch
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateHuberRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateSVC,
)

PEOPLE = 1500
FITS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "logistic, nothing declared": (PrivateLogisticRegression, {}, {}),
    "logistic, sum": (PrivateLogisticRegression, {"classes": [0, 1]}, {"combine": "sum"}),
    "logistic, standard errors": (
        PrivateLogisticRegression,
        {"classes": [0, 1], "inference": True, "epsilon": 3.0, "feature_bounds": [(-3, 3)] * 4},
        {},
    ),
    "hinge of three classes, at most 3": (PrivateSVC, {"classes": [0, 1, 2]}, {"records_per_person": 3}),
    "least squares": (PrivateLinearRegression, {}, {}),
    "Huber, sum of at most 5": (
        PrivateHuberRegressor,
        {"target_bounds": (-4, 4)},
        {"combine": "sum", "records_per_person": 5},
    ),
    "additive classifier": (PrivateAdditiveClassifier, {"classes": [0, 1]}, {}),
    "additive regressor, sum": (PrivateAdditiveRegressor, {}, {"combine": "sum"}),
}


def world(kind: str, who: int, size: int) -> tuple[Any, Any, Any]:
    """A crowd, and after it one person: number 0 or 1."""
    rng, own = np.random.default_rng(0), np.random.default_rng(99 + who)
    ids = np.repeat(np.arange(PEOPLE), rng.integers(1, 6, PEOPLE))
    X = rng.normal(size=(len(ids), 4))
    extra = np.tile(own.normal(size=4) * 1e3, (size, 1)) if kind == "aligned" else own.normal(size=(size, 4))
    if kind == "mixed":
        extra *= np.exp2(own.integers(-200, 200, (size, 1)).astype(float))
    labels = np.concatenate([X[:, 0] > 0, np.full(size, who)]).astype(int)
    return np.vstack([X, extra]), labels, np.concatenate([ids, np.full(size, PEOPLE)])


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("kind", ["aligned", "mixed"])
def test_no_release_of_a_fit_moves_more_than_it_was_told(
    name: str, relation: Relation, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator, settings, fit = FITS[name]
    fits: list[list[Any]] = []
    true_answer, true_discover = CentralSession._answer, CentralSession.discover

    def answer(self: Any, drawn: Any, query: Any, rho: Any) -> Any:
        exact = np.zeros(query.dim(self._records))
        add_batch(query, self._reading, self._batch(drawn), exact)
        place = len(fits[-1])
        told = true_answer(self, drawn, query, rho) if len(fits) == 1 else fits[0][place][3]
        fits[-1].append((drawn.slot, float(query.bound), exact, np.array(told)))
        return np.array(told)

    def discover(self: Any, slot: str, query: Any) -> Any:
        found = true_discover(self, slot, query)
        fits[-1].append((slot, 1.0, np.zeros(0), found))
        return found if len(fits) == 1 else fits[0][0][3]

    monkeypatch.setattr(CentralSession, "_answer", answer)
    monkeypatch.setattr(CentralSession, "discover", discover)
    monkeypatch.setattr(central, "fresh_key", lambda: b"k" * 32)  # the choices of the others' records are the same
    for who, size in ((0, 500), (1, 3 if relation is Relation.REPLACE_ONE else 0)):
        fits.append([])
        X, y, ids = world(kind, who, size)
        targets = y * 3.0 + X[:, 0].clip(-3, 3) if is_regressor(estimator()) else y
        model = estimator(relation=str(relation), n_public=PEOPLE, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X, targets, person=ids, **fit)
    assert [one[:2] for one in fits[0]] == [other[:2] for other in fits[1]]
    assert len(fits[0]) > 10
    for (_, bound, exact, _), (_, _, other, _) in zip(*fits, strict=True):
        assert np.linalg.norm(exact - other) <= sensitivity_factor(relation) * bound * (1.0 + 1e-9) + 1e-9
