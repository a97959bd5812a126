"""Survey weights: a record counts with its weight over the largest that is declared, and ε is the same for all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateHuberRegressor,
    PrivateLogisticRegression,
    describe,
    private_score,
)
from quietgrad.objectives import Logistic, Squared
from quietgrad.tables.privacy_units import (
    PersonRule,
    RecordsWithIds,
    SurveyData,
    UnitGrouping,
    UserLevelObjective,
    survey_weights,
)
from quietgrad.tables.queries.counts import CellSums, Tabulation
from quietgrad.tables.queries.groups import Grouping, GroupSums
from quietgrad.tables.range_queries import MagnitudeHistogram
from quietgrad.tables.whitening import FeatureMean, MeanSquares, SecondMomentMatrix

N = 6000
ODD = [0.0, 0.5, 1.0, 3.0, -2.0, np.nan, np.inf, 1e300]


def rows() -> tuple[Any, Any, Any]:
    """Two strata in which the first feature means the opposite."""
    rng = np.random.default_rng(0)
    X, stratum = rng.uniform(-1.0, 1.0, (N, 2)), rng.random(N) < 0.5
    return X, np.where(stratum, X[:, 0] > 0, X[:, 0] < 0).astype(int), stratum


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateAdditiveClassifier])
@pytest.mark.parametrize("person", [None, np.arange(N) // 2], ids=["records", "people"])
def test_a_model_follows_the_weights(kind: Any, person: Any) -> None:
    X, y, stratum = rows()
    model = kind(
        epsilon=4.0, classes=[0, 1], n_public=N if person is None else N // 2, feature_bounds=[(-1, 1)] * 2
    )
    for weight in (np.where(stratum, 8.0, 1.0), np.where(stratum, 1.0, 8.0)):
        model.fit(X, y, sample_weight=weight, max_weight=8.0, person=person)
        heavy = weight == 8.0
        assert model.score(X[heavy], y[heavy]) > 0.9
        assert model.privacy_.epsilon <= 4.0
        assert any("weight" in note for note in model.privacy_.notes)


@pytest.mark.parametrize("kind", [PrivateHuberRegressor, PrivateAdditiveRegressor])
def test_a_regression_is_of_the_weighted_table(kind: Any) -> None:
    X, _, stratum = rows()
    t, w = 3.0 * X[:, 0] + 5.0 * stratum, np.where(stratum, 8.0, 1.0)
    model = kind(epsilon=8.0, n_public=N, feature_bounds=[(-1, 1)] * 2, target_bounds=(-5, 10))
    model.fit(X, t, sample_weight=w, max_weight=8.0)
    assert model.predict(np.zeros((1, 2)))[0] == pytest.approx(np.average(t, weights=w), abs=0.4)


def test_scores_and_descriptions_are_weighted() -> None:
    X, y, stratum = rows()
    w = np.where(stratum, 8.0, 1.0)
    model = PrivateLogisticRegression(epsilon=8.0, classes=[0, 1], n_public=N).fit(X[stratum], y[stratum])
    plain = private_score(model, X, y, epsilon=8.0, n_public=N)
    heavy = private_score(model, X, y, epsilon=8.0, n_public=N, sample_weight=w, max_weight=8.0)
    assert plain.accuracy is not None
    assert heavy.accuracy is not None
    assert plain.accuracy[0] == pytest.approx(stratum.mean(), abs=0.05)
    assert heavy.accuracy[0] == pytest.approx(w[stratum].sum() / w.sum(), abs=0.05)
    frame = {"s": np.where(stratum, "a", "b"), "x": np.where(stratum, 0.8, 0.2)}
    schema = {"s": {"kind": "category", "categories": ["a", "b"]}, "x": {"kind": "number", "bounds": [0, 1]}}
    weighing: Any = {"epsilon": 8.0, "n_public": N, "sample_weight": w, "max_weight": 8.0}
    told = describe(frame, schema, **weighing).table
    assert told.loc["x", "mean"] == pytest.approx(np.average(frame["x"], weights=w), abs=0.03)
    assert told.loc["x", "count"] == pytest.approx(w.sum(), rel=0.02)
    groups = describe(frame, schema, by="s", statistics=("count", "mean"), **weighing)
    counts = {row["s"]: row for row in groups.rows if row["statistic"] == "count"}
    assert counts["a"]["value"] == pytest.approx(w[stratum].sum(), rel=0.02)
    assert counts["b"]["upper"] - counts["b"]["lower"] > 8.0  # the noise is of the largest weight


def test_the_largest_weight_is_declared() -> None:
    X, y, _ = rows()
    model = PrivateLogisticRegression(classes=[0, 1])
    for given, message in (
        ({"sample_weight": np.ones(N)}, "max_weight"),
        ({"max_weight": 3.0}, "give both"),
        ({"sample_weight": np.ones(N), "max_weight": 0.0}, "max_weight"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X, y, **given)
    with pytest.raises(DataError, match="one number per record"):
        model.fit(X, y, sample_weight=np.ones(3), max_weight=1.0)
    asked = PrivateLogisticRegression(classes=[0, 1], inference=True, n_public=N)
    with pytest.raises(ValueError, match="leave sample_weight out"):
        asked.fit(X, y, sample_weight=np.ones(N), max_weight=1.0)


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("by_person", [False, True], ids=["records", "people"])
def test_no_weight_moves_a_sum_beyond_its_bound(relation: Relation, by_person: bool) -> None:
    """Hostile neighbours: one record (or a person's three) of every odd weight and huge values, against none."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(6, 2))
    size, factor = 3 if by_person else 1, 1.0 if relation is Relation.ADD_REMOVE else 2.0
    queries: list[tuple[Any, Any, Any]] = [
        (Logistic(), FeatureMean(1.5), "table"),
        (Squared(), MeanSquares(1.5, relation=relation), "table"),
        (Logistic(), SecondMomentMatrix(1.5, relation), "table"),
        (Logistic(), MagnitudeHistogram(np.arange(2), relation), "table"),
        (Tabulation(), CellSums(4, 1, relation), "cells"),
        (Grouping(), GroupSums(3, 3, relation), "groups"),
        (Logistic(), None, "table"),
    ]
    for adapter, query, form in queries:
        sums, bound = [], 0.7 if query is None else query.bound
        for weight, scale in [(None, 1.0), *((w, s) for w in ODD for s in (1.0, 1e200))]:
            extra = 0 if weight is None else size
            X = np.vstack([base, np.full((extra, 2), scale)])
            n = len(X)
            weights = survey_weights([1.0, 2.0, 0.5, 1.0, 2.0, 1.0, *[weight] * extra], 2.0, n)
            forms: dict[str, Any] = {
                "table": (X, np.arange(n) % 2),
                "cells": (np.arange(n)[:, None] % 4, None),
                "groups": (np.arange(n) % 3, np.clip(X, -1, 1)),
            }
            assert weights is not None
            data: Any = SurveyData(forms[form], weights)
            asked: Any = adapter
            if by_person:
                people = UnitGrouping.of(np.array([0, 1, 2, 3, 4, 5, *[9] * extra]), PersonRule())
                asked, data = UserLevelObjective(adapter, PersonRule()), RecordsWithIds(data, people)
            records = asked.prepare(data)
            with np.errstate(all="ignore"):
                if query is None:
                    out = np.zeros(2)
                    asked.add(Batch(records, None, bytes(32)), [np.ones(2)], ClippingRule.gradient(0.7), out)
                else:
                    out = np.zeros(query.dim(adapter.prepare(forms[form])))
                    query.sum_into(asked, Batch(records, None, bytes(32)), out)
            sums.append(out)
        absent, *there = sums
        pairs: Any = [(one, absent) for one in there]
        if relation is Relation.REPLACE_ONE:
            pairs = itertools.combinations(there, 2)
        worst = max(float(np.linalg.norm(a - b)) for a, b in pairs)
        assert worst <= factor * bound * (1 + 1e-9), (type(query).__name__, worst)


@pytest.mark.parametrize("cell", ["secret", None, [2.0], math.inf, -1.0])
def test_what_is_no_weight_counts_nothing_and_is_not_shown(cell: Any) -> None:
    assert survey_weights([1.0, cell, "1"], 2.0, 3) == pytest.approx([0.5, 0.0, 0.5])
