"""A party gives nothing that the plan it approved does not hold, whatever the coordinator says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quietgrad as qg
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.session.queries import GradientDifferenceQuery, GradientQuery, Query, RecursiveMomentumQuery
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.wire import _KINDS, Message, WireError, decode, encode
from quietgrad.methods.output_perturbation import step_size
from quietgrad.tables.losses import Logistic
from quietgrad.tables.queries.local_fit import local_fit
from quietgrad.tables.regularizers import L2
from tests.federation import talk

D, N = 3, 40
OBJECTIVE = Logistic(row_bound=1.0, rows="clip", regularizer=L2(0.1))
BUDGET = qg.Budget(1.0, 1e-5)


def made(algorithm: Any = None, **settings: Any) -> FederatedPlan:
    settings = {"budget": BUDGET, "noise_multiplier": 2.0, **settings}
    return federate(
        algorithm or qg.DPSRM(steps=6, batch_size=10, clip=0.5, difference_clip=0.2, gamma=0.3),
        OBJECTIVE, names=["a", "b"], sizes=[N, N], shape=Shape(D, D), **settings,
    )  # fmt: skip


def party(plan: FederatedPlan) -> PartyCurator:
    rng = np.random.default_rng(0)
    return PartyCurator("a", OBJECTIVE, (rng.normal(size=(N, D)), rng.integers(0, 2, N)), plan, seed=0)


def ask(someone: PartyCurator, query: Query, **fields: Any) -> Message:
    return talk.ask(someone.handle, query, **{"slot": "first", **fields})


FIRST = GradientQuery(np.zeros(D), 0.5)
NEXT = RecursiveMomentumQuery(np.ones(D), np.zeros(D), 0.3, 0.5, 0.2)


OFF_PLAN: dict[str, tuple[Query, dict[str, Any], str]] = {
    "a larger clip": (GradientQuery(np.zeros(D), 0.6), {}, "clip is 0.6"),
    "another kind": (GradientDifferenceQuery(np.ones(D), np.zeros(D), 0.5), {}, "other fields"),
    "another gamma": (replace(NEXT, gamma=0.9), {"slot": "next"}, "gamma is 0.9"),
    "a larger difference clip": (replace(NEXT, difference_clip=5.0), {"slot": "next"}, "difference_clip is 5.0"),
    "a query of another slot": (FIRST, {"slot": "next"}, "other fields"),
    "another length": (GradientQuery(np.zeros(D + 1), 0.5), {}, "not a vector of shape"),
    "a slot that is not planned": (FIRST, {"slot": "hessian"}, "not in the plan"),
    "one too many": (FIRST, {"draw": 1}, "beyond the planned 1"),
}


@pytest.mark.parametrize("name", OFF_PLAN)
def test_off_plan_queries_are_refused(name: str) -> None:
    query, fields, reason = OFF_PLAN[name]
    someone = talk.opened(party(made()))
    reply = ask(someone, query, **fields)
    assert reply.kind == "refused"
    assert reply.fields["code"] == "plan"
    assert reason in reply.fields["reason"]
    assert ask(someone, FIRST).kind == "sum"  # nothing was spent


def test_stale_rounds_and_repeated_draws_are_refused() -> None:
    someone = talk.opened(party(made()))
    assert ask(someone, NEXT, slot="next", round=3, draw=1).kind == "sum"
    for fields, reason in (
        ({"round": 3, "draw": 2}, "stale"),
        ({"round": 2, "draw": 2}, "stale"),
        ({"round": 4, "draw": 1}, "repetition"),
        ({"round": 4, "draw": 0}, "repetition"),
        ({"round": 4, "draw": -1}, "repetition"),
        ({"round": "4", "draw": 2}, "names no round"),
        ({"round": 4, "draw": True}, "without"),
    ):
        reply = ask(someone, NEXT, slot="next", **fields)
        assert reply.kind == "refused", fields
        assert reason in reply.fields["reason"]


def test_other_plans_and_other_runs_are_refused() -> None:
    plan = made()
    someone = party(plan)
    softer = made(noise_multiplier=1.9)
    assert softer.digest != plan.digest
    reply = talk.say(someone.handle, "open", run="r", plan=softer.digest)
    assert reply.fields["code"] == "plan"
    assert "not the one that was approved" in reply.fields["reason"]
    assert ask(someone, FIRST).fields["code"] == "stranger"
    someone = talk.opened(party(plan))
    assert ask(someone, FIRST, run="other").fields["code"] == "stranger"
    assert talk.say(someone.handle, "reveal", run="r").kind == "refused"


def test_sensitivity_of_a_fit_is_proved_by_the_party() -> None:
    plan = made(qg.WeightedAverage(steps=20), budget=qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE))
    fit = local_fit(OBJECTIVE, 2 * N, 20, step_size(None, OBJECTIVE), start=np.zeros(D))
    lie = replace(fit, sensitivity=fit.sensitivity / 10)
    assert ask(talk.opened(party(plan)), fit, slot="model").kind == "sum"
    assert "sensitivity" in ask(talk.opened(party(plan)), lie, slot="model").fields["reason"]
    # Even a plan that was approved with the lie in it does not make the party give in.
    plan.templates["model"][0]["query.sensitivity"] = lie.sensitivity
    reply = ask(talk.opened(party(plan)), lie, slot="model")
    assert reply.fields["code"] == "plan"
    assert "it is" in reply.fields["reason"]


def test_data_of_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match="shape"):
        PartyCurator("a", OBJECTIVE, (np.zeros((N, D + 1)), np.zeros(N)), made())
    with pytest.raises(ValueError, match="not a party"):
        PartyCurator("z", OBJECTIVE, (np.zeros((N, D)), np.zeros(N)), made())


def test_failures_say_nothing_about_records() -> None:
    plan = made()
    someone = talk.opened(party(plan))

    def explode(*args: Any) -> None:
        raise RuntimeError("record 17 has value 3.14")

    someone._samplers["first"] = explode
    reply = ask(someone, FIRST)
    assert reply.kind == "refused"
    assert "17" not in reply.fields["reason"]


@pytest.mark.parametrize(
    "algorithm",
    [
        qg.DPSRM(steps=6, batch_size=10, returns="random"),
        qg.StagewiseDPSGD(stages=2, first_steps=3, batch_size=10),
        qg.WhitenedGD(steps=3),
        qg.DPSGD(steps=4, batch_size=10, sampling="fixed-size"),
    ],
    ids=lambda a: a.name,
)
@pytest.mark.parametrize("trust", [{}, {"trust": "local"}, {"trust": "secure", "secure": "mpc"}])
def test_plan_survives_json(algorithm: Any, trust: dict[str, Any]) -> None:
    relation = "replace-one" if getattr(algorithm, "sampling", "") == "fixed-size" else "add-remove"
    plan = made(algorithm, budget=qg.Budget(1.0, 1e-5, qg.Relation.parse(relation)), spare=1, **trust)
    again = FederatedPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.digest == plan.digest
    assert again.event == plan.event
    assert again.epsilon() == plan.epsilon()


def test_plan_that_does_not_prove_its_budget_is_found_out() -> None:
    made(qg.DPGD(steps=3), noise_multiplier=None).proves()
    with pytest.raises(BudgetError, match="events cost"):
        made(qg.DPGD(steps=3), noise_multiplier=0.1).proves()
    with pytest.raises(BudgetError, match="not private"):
        made(qg.DPGD(steps=3), budget=None, noise_multiplier=None).proves()


MESSAGE = encode(
    Message("ask", {"run": "r", "x": [1, None, "é"]}, {"v": np.arange(5.0), "b": np.arange(3, dtype="u1")})
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8 * len(MESSAGE) - 1))
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(MESSAGE)
    damaged[bit // 8] ^= 1 << (bit % 8)
    try:
        message = decode(damaged)
    except WireError:
        return
    assert encode(message) == MESSAGE  # the bit was padding


def test_names_on_the_wire_are_fixed_texts() -> None:
    """A renamed class must not change what members say, nor the digest of a plan that was approved before."""
    assert set(_KINDS) == {
        "Gradient", "GradientDifference", "RecursiveMomentum", "JointMomentum", "Loss", "LocalFit",
        "FeatureMean", "SecondMomentMatrix", "MeanSquares", "RowNormHistogram",
        "WhitenedGradient", "Whitening", "Affine", "GradientsAndHessians", "LocalUpdate",
        "clipping-flat", "clipping-automatic", "clipping-per-layer",
    }  # fmt: skip
