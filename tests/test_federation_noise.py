"""The noise that leaves after aggregation has the claimed scale, from both sides, in every trust setting.

Rows of zeros have zero gradients, so a release is nothing but its noise. With N numbers the variance is known to
√(2/N); the tolerance is five of those, so a right implementation fails once in two million fixed seeds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.errors import DataError
from quietgrad.federation.coordinator import FederatedCurator, FederatedSession
from quietgrad.federation.parties import Party
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.simulation import assemble, simulate
from quietgrad.federation.transport.in_process import InProcess
from quietgrad.objectives.base import Gradient
from quietgrad.objectives.tables.losses import Logistic
from quietgrad.privacy import events

D, ROUNDS = 300, 12
SIZES = (30, 20, 10)
TOLERANCE = 5.0 * math.sqrt(2.0 / (D * ROUNDS))


def open_session(
    algorithm: Any, sizes: tuple[int, ...] = SIZES, seed: int | None = 3, **settings: Any
) -> tuple[FederatedSession, FederatedPlan]:
    parties = [Party(np.zeros((n, D)), np.zeros(n)) for n in sizes]
    settings = {"budget": qg.Budget(1.0, 1e-5), "noise_multiplier": 1.7, **settings}
    plan, people = assemble(algorithm, Logistic(), parties, seed=seed, **settings)
    curator = FederatedCurator(
        Logistic(), InProcess(people.handlers), identity=people.identity, roster=people.roster, seed=seed
    )
    return curator.open(plan), plan


def variance(session: FederatedSession, clip: float) -> float:
    sums = [session.release("gradient", Gradient(np.zeros(D), clip)) for _ in range(ROUNDS)]
    assert len({total.tobytes() for total in sums}) == ROUNDS  # no noise is used twice
    return float(np.mean(np.square(sums)))


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "curator": ({"trust": "curator"}, 1.0),
    "curator, equal weights": ({"trust": "curator", "weights": "equal"}, 2.0**2),  # 60/(3·10) = 2
    "local": ({"trust": "local"}, 3.0),
    "local, equal weights": ({"trust": "local", "weights": "equal"}, (2 / 3) ** 2 + 1.0 + 2.0**2),
    "masks": ({"trust": "secure", "secure": "masks"}, 3 / 2),
    "masks, two colluders": ({"trust": "secure", "secure": "masks", "colluders": 2}, 3.0),
    "masks, equal weights": ({"trust": "secure", "secure": "masks", "weights": "equal"}, 4.0 * 3 / 2),
    "servers": ({"trust": "secure", "secure": "servers"}, 2.0),
    "three servers": ({"trust": "secure", "secure": "servers", "servers": 3}, 3.0),
    "mpc": ({"trust": "secure", "secure": "mpc"}, 1.0026),
}


@pytest.mark.parametrize("name", CASES)
def test_noise_of_a_release_is_as_claimed(name: str) -> None:
    settings, factor = CASES[name]
    session, plan = open_session(qg.DPGD(steps=ROUNDS, clip=0.5), **settings)
    expected = (1.7 * 0.5) ** 2 * factor
    assert variance(session, 0.5) == pytest.approx(expected, rel=TOLERANCE)
    assert plan.variance_factor * plan.largest_factor**2 == pytest.approx(factor, rel=1e-3)


def test_unseeded_noise_has_the_scale_too() -> None:
    session, _ = open_session(qg.DPGD(steps=ROUNDS, clip=0.5), seed=None, trust="secure", secure="masks")
    assert variance(session, 0.5) == pytest.approx((1.7 * 0.5) ** 2 * 1.5, rel=TOLERANCE)


@pytest.mark.parametrize("settings", [{"trust": "local"}, {"trust": "secure", "secure": "masks"}])
def test_noise_follows_the_bound_of_the_query(settings: dict[str, Any]) -> None:
    """SPIDER-like: the clip of a release is free, and its noise is proportional to it."""
    session, plan = open_session(qg.DPGD(steps=ROUNDS, clip=0.5), **settings)
    for templates in plan.templates.values():
        templates[0]["query.clip"] = {"from": 0.0, "to": 0.5}
    assert variance(session, 1e-3) == pytest.approx((1.7e-3) ** 2 * plan.variance_factor, rel=TOLERANCE)


def test_secure_plan_pays_for_discrete_noise() -> None:
    budget = qg.Budget(1.0, 1e-5)
    _, plain = open_session(qg.DPGD(steps=4), trust="curator", noise_multiplier=None, budget=budget)
    _, secure = open_session(qg.DPGD(steps=4), trust="secure", secure="masks", noise_multiplier=None, budget=budget)
    assert isinstance(secure.event, events.Composed)
    assert secure.event.parts[-1] == events.TotalVariationSlack(secure.slack)
    assert secure.slack == pytest.approx(4 * secure.terms(D).slack())
    assert secure.noise_multiplier >= plain.noise_multiplier
    assert secure.epsilon() <= 1.0


def test_spare_rounds_are_paid_beforehand() -> None:
    _, plan = open_session(qg.DPGD(steps=4), spare=2)
    assert plan.event == events.gaussian(1.7, 6)
    assert plan.event_of({"gradient": 5}) == events.gaussian(1.7, 5)
    _, random = open_session(qg.DPGD(steps=4, returns="random"), spare=2)
    assert isinstance(random.event, events.RandomNumberOfReleases)
    assert [rounds for rounds, _ in random.event.law] == [2, 3, 4, 5]


def test_local_noise_is_per_party() -> None:
    _, plan = open_session(qg.DPGD(steps=4), trust="local")
    assert plan.event == events.MaxOverParties((events.gaussian(1.7, 4),) * 3)


def test_fixed_batches_cost_what_the_most_sampled_party_pays() -> None:
    """b_j/n_j differs by rounding, and a party may have no batch at all (b < m)."""
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    algorithm = qg.DPSGD(steps=ROUNDS, batch_size=2, sampling="fixed-size", clip=0.5)
    session, plan = open_session(algorithm, sizes=(30, 20, 4), budget=budget)
    assert plan.schedule.slots[0].sampling.local_batches(plan.sizes) == (1, 1, 0)
    once = [events.fixed_size_gaussian(n, 1, 1.7, ROUNDS) for n in (30, 20)]
    assert plan.event == events.MaxOverParties(tuple(once))
    assert plan.epsilon() == pytest.approx(
        max(qg.account(event, delta=1e-5, relation="replace-one") for event in once), rel=1e-6
    )
    assert variance(session, 0.5) == pytest.approx((1.7 * 0.5) ** 2, rel=TOLERANCE)
    assert "1 of 30, 1 of 20, 0 of 4" in plan.explain()


def test_plan_says_who_is_trusted_and_what_it_costs() -> None:
    _, plan = open_session(qg.DPGD(steps=4), trust="secure", secure="masks", spare=2, weights="equal")
    text = plan.explain()
    for words in ("no member alone (masks)", "1.5 times", "2 spare rounds", "up to 2·C", "party-3 (10)"):
        assert words in text


def test_fixed_batches_need_the_true_sizes() -> None:
    parties = [Party(np.zeros((5, 2)), np.zeros(5), n_public=6)]
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    with pytest.raises(DataError, match="exact"):
        simulate(qg.DPGD(steps=1), Logistic(), parties, budget=budget, noise_multiplier=1.0)


def test_choice_under_secure_sums_is_noisy_and_charged() -> None:
    """Scores leave as one vector of k noisy sums: Δ = √k·B whatever the relation."""
    budget = qg.Budget(1.0, 1e-5)
    parties = [Party(np.ones((40, 1)), np.ones(40)), Party(np.ones((40, 1)), np.ones(40))]
    result = {}
    for trust in ({"trust": "curator"}, {"trust": "local"}, {"trust": "secure", "secure": "masks"}):
        run = simulate(qg.DPAGD(max_steps=3, splits=6), Logistic(), parties, budget=budget, **trust)  # type: ignore[arg-type]
        result[trust["trust"]] = run.privacy
        assert run.privacy.epsilon is not None
        assert 0.0 < run.privacy.epsilon <= 1.0
    assert isinstance(result["curator"].events, events.ZCDP)
    assert isinstance(result["local"].events, events.MaxOverParties)
    assert isinstance(result["secure"].events, events.Composed)
