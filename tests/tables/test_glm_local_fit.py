"""Stability of whole fits: never above Δ on brute-force neighbours, attained where theory says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import Hinge, Huber, Logistic, Multinomial, Squared
from quietgrad.tables.queries.local_fit import LocalFit, local_fit
from quietgrad.tables.regularizers import L2, Nonconvex

Floats = npt.NDArray[np.float64]


def fitted(objective: LinearObjective, query: LocalFit, X: Floats, y: Floats) -> Floats:
    records = objective.prepare((X, y))
    out = np.zeros(records.dim)
    query.sum_into(objective, Batch(records, None), out)
    return out


CASES: list[tuple[Any, float]] = [
    (Logistic, 0.0),
    (Logistic, 0.2),
    (lambda **o: Huber(0.5, **o), 0.0),
    (lambda **o: Huber(0.5, **o), 0.5),
    (lambda **o: Hinge(0.4, **o), 0.1),
    (lambda **o: Multinomial(3, **o), 0.1),
]


@pytest.mark.parametrize(("make", "mu"), CASES)
@pytest.mark.parametrize("intercept", [False, True])
def test_neighbours_stay_within_the_stability_bound(make: Any, mu: float, intercept: bool) -> None:
    objective = make(regularizer=L2(mu), row_bound=1.5, rows="clip", intercept=intercept)
    constants = objective.constants()
    rng = np.random.default_rng(9)
    n = 8
    for steps in (1, 3, 40):
        step_size = 2.0 / (mu + constants.smoothness)
        query = local_fit(objective, n, steps, step_size)
        assert query.bound == query.sensitivity / 2
        for size in (n, 2) * 6:  # the union of all parties, or the share of a small one
            X = rng.normal(size=(size, 3)) * 10.0 ** rng.integers(-1, 3)
            y = rng.integers(0, 2, size).astype(float)
            X2, y2 = X.copy(), y.copy()
            X2[0], y2[0] = (-X[0], y[0]) if rng.random() < 0.5 else (1e6 * rng.normal(size=3), 1 - y[0])
            moved = fitted(objective, query, X, y) - fitted(objective, query, X2, y2)
            assert np.linalg.norm(moved) <= query.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_the_bound_is_attained_by_linear_losses(mu: float) -> None:
    """Huber with far targets is linear where the iterates live: Δ is met, so no smaller one is true."""
    objective = Huber(1.0, regularizer=L2(mu), row_bound=1.0)
    n, steps = 10, 25
    query = local_fit(objective, n, steps, step_size=0.5)
    X, y = np.full((n, 1), 1.0), np.full(n, 1e6)
    y2 = y.copy()
    y2[0] = -1e6
    moved = fitted(objective, query, X, y) - fitted(objective, query, X, y2)
    assert np.linalg.norm(moved) == pytest.approx(query.sensitivity, rel=1e-9)
    expected = 2 * 0.5 * steps / n if mu == 0 else 2 / (n * mu) * (1 - (1 - 0.5 * mu) ** steps)
    assert query.sensitivity == pytest.approx(expected, rel=1e-12)


def test_a_step_beyond_the_bound_would_be_unstable_and_is_refused() -> None:
    objective = Logistic(regularizer=L2(0.1), row_bound=2.0)
    largest = 2.0 / (0.1 + 1.0 + 0.1)
    local_fit(objective, 10, 5, largest)
    with pytest.raises(ValueError, match="step_size"):
        local_fit(objective, 10, 5, largest * (1 + 1e-9))


def test_a_free_intercept_removes_strong_convexity() -> None:
    tied, free = (
        local_fit(Logistic(regularizer=L2(0.5, unpenalized=k), row_bound=1.0, intercept=True), 10, 100, 1.0)
        for k in (0, 1)
    )
    assert tied.sensitivity < free.sensitivity


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Logistic(regularizer=Nonconvex(0.1), row_bound=1.0), "not convex"),
        (Squared(row_bound=1.0), "unbounded"),
        (Logistic(), "row_bound=None"),
    ],
)
def test_objectives_without_a_bound_are_refused(objective: LinearObjective, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_fit(objective, 10, 5, 0.1)


@pytest.mark.parametrize(("n", "steps", "step_size"), [(0, 1, 0.1), (1, 0, 0.1), (1, 1, 0.0), (1, 1, np.nan)])
def test_bad_numbers_are_refused(n: int, steps: int, step_size: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        local_fit(Logistic(row_bound=1.0), n, steps, step_size)


def test_the_table_must_enforce_the_bound() -> None:
    objective = Logistic(row_bound=1.0)
    query = local_fit(objective, 2, 5, 0.1)
    X, y = np.eye(2), np.array([0.0, 1.0])
    for loose in (Logistic(), Logistic(row_bound=3.0)):
        with pytest.raises(DataError, match="not bounded"):
            fitted(loose, query, X, y)
    with pytest.raises(ValueError, match="FullBatch"):
        query.sum_into(objective, Batch(objective.prepare((X, y)), np.array([0])), np.zeros(2))
