"""Weighted averages of parties' models: sensitivity, noise, and what the printed algorithm really costs."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.federation import Party, deal
from quietgrad.federation.simulation import simulate
from quietgrad.tables.losses import Huber, Logistic
from quietgrad.tables.queries.local_fit import local_fit
from quietgrad.tables.regularizers import L2

sys.path.insert(0, str(Path(__file__).parents[2]))
from reproduce.printed_average import printed_average, truth, verdict

Floats = npt.NDArray[np.float64]
BUDGET = qg.Budget(0.25, 1e-3, qg.Relation.REPLACE_ONE)
OBJECTIVE = Logistic(regularizer=L2(0.05), row_bound=1.0, rows="clip")


def table(n: int = 900, d: int = 4) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    return X, (X @ np.arange(1.0, d + 1.0) > 0.0).astype(np.float64)


def fitted(party: Party, steps: int, rate: float) -> Floats:
    records = OBJECTIVE.prepare(party.data)
    params = OBJECTIVE.initial(records)
    for _ in range(steps):
        params = params - rate * OBJECTIVE.risk_gradient(records, params)
    return params


@pytest.mark.parametrize(
    "trust", [{"trust": "curator"}, {"trust": "local"}, {"trust": "secure", "secure": "masks"}]
)
@pytest.mark.parametrize("weights", ["size", "equal", [5.0, 1.0, 2.0]])
def test_one_shot_is_the_weighted_average_of_local_fits(trust: dict[str, Any], weights: Any) -> None:
    parties = deal(*table(), 3, unevenness=4.0)
    algorithm = qg.WeightedAverage(steps=30, learning_rate=1.0)
    got = simulate(algorithm, OBJECTIVE, parties, budget=None, weights=weights, **trust).params
    shares = {"size": [p.size / 900 for p in parties], "equal": [1 / 3] * 3}.get(
        str(weights), [5 / 8, 1 / 8, 2 / 8]
    )
    expected = sum(w * fitted(party, 30, 1.0) for w, party in zip(shares, parties, strict=True))
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_one_replaced_record_moves_the_average_by_at_most_the_bound() -> None:
    """Brute force over the smallest party's records, each replaced by the worst of several others."""
    parties = deal(*table(60), 3, unevenness=5.0)
    n = 60
    fit = local_fit(OBJECTIVE, n, 40, 1.0)
    smallest = min(parties, key=lambda party: party.size)
    before = fitted(smallest, 40, 1.0) * smallest.size / n
    moved = []
    for i in range(smallest.size):
        for row in (-10.0 * smallest.X[i], np.eye(4)[i % 4] * 10.0):
            X, y = smallest.X.copy(), smallest.y.copy()
            X[i], y[i] = row, 1.0 - y[i]
            moved.append(np.linalg.norm(fitted(Party(X, y), 40, 1.0) * smallest.size / n - before))
    assert 0.1 * fit.sensitivity < max(moved) <= fit.sensitivity * (1.0 + 1e-9)


def test_noise_of_a_weighted_average_does_not_depend_on_the_parties() -> None:
    """(iv): Δ = (2G/(nλ))(1−(1−ηλ)ᵀ) whatever m and n_min; unweighted it grows by n/(m·n_min)."""
    fit = local_fit(OBJECTIVE, 900, 50, 1.0)
    assert fit.sensitivity == pytest.approx(2.0 / (900 * 0.05) * (1.0 - 0.95**50))
    for m, u in ((1, 1.0), (3, 4.0), (8, 9.0)):
        parties = deal(*table(), m, unevenness=u)
        spread = []
        for seed in range(40):
            run = simulate(
                qg.WeightedAverage(steps=50, learning_rate=1.0), OBJECTIVE, parties, budget=BUDGET, seed=seed
            )
            spread.append(run.params)
        sigma = run.privacy.noise_multiplier * fit.bound
        # 160 numbers: the standard deviation is known to 5.6 %; five of those.
        assert np.std(np.array(spread) - np.mean(spread, axis=0)) == pytest.approx(sigma, rel=0.28)
    assert run.privacy.epsilon == pytest.approx(0.25, rel=2e-3)


def test_rounds_are_exact_gaussians() -> None:
    run = simulate(
        qg.WeightedAverage(steps=20, method="rounds"), OBJECTIVE, deal(*table(), 3), budget=BUDGET, trust="secure",
        secure="servers",
    )  # fmt: skip
    assert isinstance(run.privacy.events, events.Composed)
    z = run.privacy.noise_multiplier
    assert run.privacy.events.parts[0] == events.gaussian(z, 20)
    mu = math.sqrt(20) * 2.0 / z
    assert qg.account(events.Gaussian(2.0 / mu), delta=1e-3, relation="replace-one") == pytest.approx(
        0.25, rel=2e-3
    )


def test_large_steps_and_wrong_relations_are_refused() -> None:
    parties = deal(*table(), 2)
    with pytest.raises(ValueError, match="2/"):
        simulate(qg.WeightedAverage(steps=3, learning_rate=100.0), OBJECTIVE, parties, budget=BUDGET)
    with pytest.raises(ValueError, match="replace-one"):
        simulate(qg.WeightedAverage(steps=3), OBJECTIVE, parties, budget=qg.Budget(1.0, 1e-3))


def test_centrally_it_is_output_perturbation() -> None:
    ours, known = (
        qg.minimize(Huber(row_bound=1.0, rows="clip"), table(), algorithm, budget=BUDGET, seed=4)
        for algorithm in (qg.WeightedAverage(20, 1.0), qg.OutputPerturbation(20, 1.0))
    )
    np.testing.assert_allclose(ours.params, known.params, atol=1e-12)


# --- as printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "claimed", "m", "observer", "server"),
    [
        (16.0, 0.25, 2, 0.122, 0.186),
        (16.0, 0.25, 8, 0.283, 0.976),
        (16.0, 0.25, 32, 0.646, 5.32),
        (16.0, 1.0, 8, 1.48, 5.32),
        (16.0, 0.05, 32, 0.092, 0.748),
    ],
)
def test_printed_noise_costs_what_was_derived(
    c: float, claimed: float, m: int, observer: float, server: float
) -> None:
    """True ε at δ = 1e-3, T = 1000, equal parties: an observer of linear losses, and the server."""
    n, steps, delta = 45_216, 1000, 1e-3
    sigma = math.sqrt(c * steps * math.log(1.0 / delta)) / (n * claimed)
    told = truth([n // m] * m, [1.0 / m] * m, lipschitz=1.0, steps=steps, sigma=sigma, claimed=claimed)
    seen = told.epsilons(delta)
    assert seen["epsilon_observer_at_least"] == pytest.approx(observer, rel=0.01)
    assert seen["epsilon_server"] == pytest.approx(server, rel=0.01)
    assert seen["epsilon_observer_at_least"] <= seen["epsilon_observer"] <= seen["epsilon_server"]


def test_the_script_says_that_the_claim_is_false() -> None:
    tables = [party.data for party in deal(*table(), 8)]
    _, told = printed_average(qg.WeightedAverage(steps=40), OBJECTIVE, tables, BUDGET)
    assert told.epsilons(BUDGET.delta)["epsilon_server"] > BUDGET.epsilon
    assert verdict(told, BUDGET.delta).startswith("NOT PRIVATE")
    assert isinstance(told.server, events.MaxOverParties)
