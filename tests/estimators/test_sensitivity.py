"""Every release of the default for tables, asked of adversarial records: none moves it by more than planned.

A real run is made, every query it asks through the door is kept, and each of them is then asked of single records:
huge, tiny, zero, sparse, with explicit zeros, with absurd targets.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse

import quietgrad as qg
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import DataError, TooNoisyError
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import Batch
from quietgrad.methods.additive_gd import for_shapes
from quietgrad.methods.budget_allocation import for_table
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import Logistic, Multinomial, Pinball, PoissonDeviance, Squared
from quietgrad.tables.shapes import Feature

D = 5
SCALES = np.array([1e-6, 1.0, 40.0, 1e5, 1.0])
CASES: list[tuple[str, LinearObjective, dict[str, Any]]] = [
    ("found", Logistic(intercept=True), {}),
    ("declared", Logistic(intercept=True), {"feature_bounds": [(-1, 1)] * (D - 2) + [(-1e6, 1e6), (1900, 2100)]}),
    ("some declared", Logistic(intercept=True), {"feature_bounds": [(-1, 1), None, (0, 99), None, None]}),
    ("ball", Logistic(), {"row_bound": 3.0}),
    ("classes", Multinomial(3, intercept=True), {"outputs": 3}),
    ("targets found", Squared(intercept=True), {"regression": True}),
    ("standard errors", Logistic(intercept=True), {"inference": True}),
    ("errors of squares", Squared(intercept=True), {"inference": True, "regression": True}),
    ("targets declared", Squared(intercept=True), {"regression": True, "target_bounds": (-3.0, 9.0)}),
    ("counts", PoissonDeviance(1e4, intercept=True), {"regression": True, "counts": True}),
    ("quantile", Pinball(0.9, intercept=True), {"regression": True}),
]


def table(n: int, rng: np.random.Generator) -> Any:
    X = rng.standard_normal((n, D)) * SCALES
    X[:, 4] += 2000.0
    X[rng.random((n, D)) < 0.2] = 0.0
    return X


def adversarial(rng: np.random.Generator, count: int) -> Any:
    values = [0.0, 1e-300, -1e-12, 1e-7, 1.0, -1.0, 0.999, 41.0, 2001.0, -2001.0, 1e5, 1e12, -1e30, 1e300, -1.7e308]
    X = rng.choice(values, (count, D))
    X[0], X[1], X[2] = 0.0, 1.7e308, -1.7e308
    X[3] = np.eye(D)[0] * 1e300
    return X


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("rows", ["few", "many"])
@pytest.mark.parametrize(("objective", "options"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_no_record_moves_a_release_further_than_planned(
    objective: LinearObjective, options: dict[str, Any], rows: str, relation: Relation
) -> None:
    if options.get("inference") and rows == "few":
        pytest.skip("standard errors are refused in public for so few records")
    rng = np.random.default_rng(0)
    n = 2000 if rows == "many" else 60
    budget = qg.Budget(6.0, 1e-5, relation)
    labels = (rng.random(n) * (objective.outputs if objective.outputs > 1 else 2)).astype(int)
    y = 300.0 + 50.0 * rng.standard_normal(n) if options.get("regression") else labels
    for is_sparse in (False, True):
        X = table(n, rng)
        algorithm = for_table(n, D, budget=budget, sparse=is_sparse, **options)
        plan = qg.plan(algorithm, n=n, budget=budget)
        curator = CentralCurator(objective, (sparse.csr_array(X) if is_sparse else X, y))
        session = curator.open(plan)
        asked = recorded(session)
        state = algorithm.init(curator.initial())
        with suppress(TooNoisyError):  # few targets: their range is refused after a release that is bounded too
            while not state.done:
                state = algorithm.step(state, session)
        assert {slot for slot, _ in asked} <= {slot.name for slot in plan.schedule.slots}
        check_all(objective, asked, relation, rng, is_sparse)
    if rows == "many":
        assert "gradient" in {slot for slot, _ in asked}


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("rows", ["few", "many"])
@pytest.mark.parametrize(
    "objective", [Logistic(intercept=True), Multinomial(3, intercept=True), Squared(intercept=True)]
)
def test_no_record_moves_an_additive_release_further_than_planned(
    objective: LinearObjective, rows: str, relation: Relation
) -> None:
    rng = np.random.default_rng(1)
    n = 3000 if rows == "many" else 60
    budget = qg.Budget(6.0, 1e-5, relation)
    regression = isinstance(objective, Squared)
    features = (*(Feature(f"x{j}") for j in range(D - 1)), Feature("c", values=("a", "b")))
    X = table(n, rng)
    X[:, -1] = rng.integers(-1, 2, n)
    y = rng.uniform(-3.0, 9.0, n) if regression else rng.integers(0, max(objective.outputs, 2), n)
    algorithm = for_shapes(
        n, features, budget=budget, bins=8, bounds=(*[None] * (D - 2), (0.0, 1e6), (0.0, 1.0)), pairs=None,
        outputs=objective.outputs, regression=regression, target_bounds=(-3.0, 9.0) if regression else None,
    )  # fmt: skip
    curator = CentralCurator(objective, (X, y))
    session = curator.open(qg.plan(algorithm, n=n, budget=budget))
    asked = recorded(session)
    algorithm.step(algorithm.init(curator.initial()), session)
    check_all(objective, asked, relation, rng, False)
    slots = {slot for slot, _ in asked}
    assert slots == {slot.name for slot in session.plan.schedule.slots}
    assert ({"cells", "shapes", "pairs"} <= slots) == (rows == "many")


def recorded(session: Any) -> list[tuple[str, Any]]:
    """The slots and queries that the session is asked from now on."""
    asked, release = [], session.release

    def kept(slot: str, query: Any, **more: Any) -> Any:
        asked.append((slot, query))
        return release(slot, query, **more)

    session.release = kept
    return asked


def check_all(
    objective: LinearObjective, asked: list[tuple[str, Any]], relation: Relation, rng: Any, is_sparse: bool
) -> None:
    count = 12
    X = adversarial(rng, count)
    highest = objective.outputs if objective.outputs > 1 else 2
    y = rng.choice([-1e300, -5.0, 0.0, 299.0, 1e300], count) if objective.task == "regression" else (
        rng.integers(0, highest, count)
    )  # fmt: skip
    y = np.abs(y) if objective.log_link else y
    picked = dict(asked)  # the last of each slot: the gradient far from the start
    picked |= {f"first {slot}": query for slot, query in reversed(asked)}
    for slot, query in picked.items():
        contributions = [single(objective, query, X[i], y[i], is_sparse) for i in range(count)]
        for i, one in enumerate(contributions):
            assert np.isfinite(one).all(), slot
            if relation is Relation.ADD_REMOVE:
                assert np.linalg.norm(one) <= query.bound * (1 + 1e-9), slot
            for other in contributions[:i]:
                assert np.linalg.norm(one - other) <= 2.0 * query.bound * (1 + 1e-9), slot


def single(objective: LinearObjective, query: Any, row: Any, target: Any, is_sparse: bool) -> Any:
    X: Any = row[None]
    if is_sparse:  # explicit zeros and unsorted columns are what a careless pipeline leaves
        X = sparse.csr_array((row[::-1].copy(), np.arange(D)[::-1].copy(), np.array([0, D])), shape=(1, D))
    records = objective.prepare((X, np.array([target])))
    out = np.zeros(query.dim(records))
    with np.errstate(all="ignore"):
        query.sum_into(objective, Batch(records, None), out)
    return out


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_refused_before_anything_is_asked(bad: float) -> None:
    X = np.ones((50, D))
    X[7, 3] = bad
    with pytest.raises(DataError, match="NaN or infinite"):
        CentralCurator(Logistic(), (X, np.zeros(50)))


def test_shares_are_public_and_never_exceed_the_budget() -> None:
    sizes, both = ((30, 300, 5000, 10**6), (1, 20, 500, 20_000), (0.05, 1.0, 8.0)), (False, True)
    for n, d, epsilon, relation, regression, is_sparse in itertools.product(*sizes, Relation, both, both):
        budget = qg.Budget(epsilon, 1e-6, relation)
        plan = for_table(n, d, budget=budget, regression=regression, sparse=is_sparse)
        shares = [slot.count / slot.noise**2 for slot in plan.schedule(n).slots]
        assert sum(shares) == pytest.approx(1.0)
        assert shares[-1] >= 0.2  # a good part of it trains, also beside standard errors


def test_the_plan_costs_what_it_says() -> None:
    budget = qg.Budget(1.0, 1e-5, Relation.REPLACE_ONE)
    plan = qg.plan(for_table(5000, 20, budget=budget, regression=True), n=5000, budget=budget)
    assert 0.999 < plan.epsilon() <= 1.0
    assert plan.proof.accountant == "gaussian-exact"
