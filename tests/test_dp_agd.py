"""DP-AGD: its choice of a step length is that of the regularised risk; it is for one curator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import quietgrad as qg
from quietgrad.federation import deal, simulate
from quietgrad.objectives import L2, Logistic


def table(n: int = 2000, d: int = 5) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.0, 1.0, (n, d)) / np.sqrt(d)
    return X, (X.sum(1) + 0.2 * rng.standard_normal(n) > 0).astype(int)


def excess(objective: Any, data: Any, params: Any) -> float:
    records = objective.prepare(data)
    least = minimize(  # type: ignore[call-overload]
        lambda w: (objective.risk(records, w), objective.risk_gradient(records, w)),
        np.zeros(len(params)), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10},
    )  # fmt: skip
    return float(objective.risk(records, params) - least.fun)


@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_the_regulariser_counts_in_the_choice(strength: float) -> None:
    """Scores without n·r leave the excess at about strength·0.8 here; the grid's spacing leaves 0.005."""
    objective, data = Logistic(regularizer=L2(strength)), table()
    run = qg.minimize(objective, data, qg.DPAGD(), budget=qg.Budget(20.0, 1e-5), seed=1)
    assert excess(objective, data, run.params) < 0.02


def test_parties_are_refused() -> None:
    objective, (X, y) = Logistic(), table(n=200)
    with pytest.raises(ValueError, match="one curator"):
        simulate(qg.DPAGD(max_steps=6), objective, deal(X, y, 4), budget=qg.Budget(1.0, 1e-5))


@pytest.mark.parametrize("common", [0.0, 1e18])
def test_a_large_common_offset_does_not_swallow_the_scores(common: float) -> None:
    """In float64 1e18 + 2000·ln 2 is 1e18 for all candidates: rounding, not a bounded loss, would decide."""
    from quietgrad.curators.central import CentralCurator
    from quietgrad.objectives.base import LossQuery

    objective, data = Logistic(), table()
    best = qg.minimize(objective, data, qg.GD(steps=200, learning_rate=4.0), budget=None).params
    plan = qg.plan(qg.DPAGD(max_steps=4), n=2000, budget=qg.Budget(50.0, 1e-5))
    door = CentralCurator(objective, data, seed=0).open(plan)
    queries = [LossQuery(np.zeros(5), 3.0), LossQuery(best, 3.0)]
    assert door.choose("length", queries, rho=door.rho_left / 2, offsets=[common, common]) == 1
