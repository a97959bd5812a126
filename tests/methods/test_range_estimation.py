"""Range estimation: which declared ranges are narrowed, and what unasked standard errors leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quietgrad.core.accounting.budget import Budget
from quietgrad.estimators import PrivateLinearRegression, PrivateLogisticRegression
from quietgrad.estimators.summaries import CLIPPED_ERRORS
from quietgrad.methods.budget_allocation import for_table
from quietgrad.methods.range_estimation import RangeEstimation

pytestmark = pytest.mark.filterwarnings("ignore:random_state")


@pytest.mark.parametrize(("pair", "wide"), [
    ((0.003, 300.0), True), ((-300.0, -0.003), True), ((-5.0, 5.0), True), ((0.0, 1.0), False),
    ((18.0, 90.0), False), ((1900.0, 2030.0), False), ((-90.0, -18.0), False),
])  # fmt: skip
def test_declared_ranges_of_several_scales_are_wide(pair: tuple[float, float], wide: bool) -> None:
    assert len(RangeEstimation((pair,), refine=True).to_estimate(1)) == wide


def heavy(seed: int, n: int = 12_000) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.lognormal(0.0, 1.5, (n, 2)), rng.standard_normal((n, 2))])
    score = np.log(X[:, 0]) + X[:, 2]
    return X, (rng.random(n) < 1.0 / (1.0 + np.exp(-score))).astype(int)


def test_a_declared_range_of_one_sign_is_narrowed_to_its_values() -> None:
    X, y = heavy(0)
    bounds = [(0.001, 3000.0), (0.001, 3000.0), (-8.0, 8.0), (-8.0, 8.0)]
    model: Any = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], feature_bounds=bounds, random_state=0)
    model.fit(X, y)
    low, high = model.feature_range_
    assert (high[:2] <= 64.0).all()  # 99.5 % of the values are below 48
    assert (low[:2] == 0.001).all()


def test_values_outside_of_a_declared_range_leave_it_as_it_is() -> None:
    X, y = heavy(1)
    bounds = [(1e4, 1e6), (0.001, 3000.0), (-8.0, 8.0), (-8.0, 8.0)]
    model: Any = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], feature_bounds=bounds, random_state=0)
    model.fit(X, y)
    assert (model.feature_range_[0][0], model.feature_range_[1][0]) == (1e4, 1e6)


def test_errors_that_nobody_asked_for_are_of_clipped_features_and_say_so() -> None:
    X, y = heavy(2)
    bounds = [(0.001, 3000.0)] * 2 + [(-8.0, 8.0)] * 2
    given: dict[str, Any] = {"epsilon": 4.0, "classes": [0, 1], "random_state": 0, "feature_bounds": bounds}
    unasked: Any = PrivateLogisticRegression(**given).fit(X, y)
    without: Any = PrivateLogisticRegression(**given, inference=False).fit(X, y)
    asked: Any = PrivateLogisticRegression(**given, inference=True).fit(X, y)
    assert CLIPPED_ERRORS in unasked.privacy_.notes
    assert CLIPPED_ERRORS not in (*asked.privacy_.notes, *without.privacy_.notes)
    assert (unasked.feature_range_[1][:2] <= 64.0).all()  # narrowed, as without errors
    assert (asked.feature_range_[1][:2] == 3000.0).all()
    assert len(unasked.summary()) == 5


def test_targets_are_not_cut_where_errors_are_bought_unasked() -> None:
    method = for_table(50_000, 4, budget=Budget(1.0, 1e-5), regression=True, inference=None)
    assert method.inference_share
    assert method.look is not None
    assert method.look.keeps_targets
    assert not method.look.whole


def unrelated(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.uniform(2.0, 9.0, (360, 12)), rng.normal(9.9, 0.4, 360)


def test_a_regression_that_cannot_be_learned_is_its_constant() -> None:
    """Targets that no feature tells of, at ε = 0.2 with nμ = 44: noise in twelve directions is taken back."""
    scores = []
    for seed in range(10):
        X, y = unrelated(seed)
        model = PrivateLinearRegression(
            epsilon=0.2,
            feature_bounds=[(0.0, 20.0)] * 12,
            target_bounds=(8.0, 12.0),
            n_public=360,
            random_state=seed,
        ).fit(X, y)
        scores.append(model.score(X, y))
    assert np.mean(scores) > -0.15


def test_a_constant_is_bought_only_where_little_can_be_learned() -> None:
    def share(n: int, **settings: Any) -> float:
        return for_table(n, 10, budget=Budget(1.0, 1e-5), regression=True, **settings).constant_share

    assert share(300)
    assert not share(20_000)
    assert not share(300, intercept=False)
