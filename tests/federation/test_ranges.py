"""What may vary in a question is declared, and nothing that is asked within it takes more than was paid for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.session.contributions import LARGEST_CLIP, SMALLEST_CLIP, ClippingRule, following_clip
from quietgrad.federation import Party
from quietgrad.federation.members import SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.simulation import assemble, simulate
from quietgrad.federation.wire import Message, decode, encode, pack
from quietgrad.methods.output_perturbation import step_size
from quietgrad.tables.losses import Logistic
from quietgrad.tables.queries.local_fit import local_fit
from quietgrad.tables.regularizers import L2
from quietgrad.tables.table import Affine
from quietgrad.tables.whitening import FeatureMean, SecondMomentMatrix, WhitenedGradient, Whitening
from tests.federation.questions import Interrogation, pairs
from tests.federation.talk import ask, opened, people, say

D, N = 63, 40
SUBNORMAL = 2e-323  # four of the smallest steps: each of 63 coordinates would be rounded up to one


def whitened(clip: float) -> WhitenedGradient:
    return WhitenedGradient(np.zeros(D), clip, Whitening(Affine(np.zeros(D), np.eye(D)), 0.0, 1, 1.0))


@pytest.mark.parametrize("clip", [SUBNORMAL, 1e-300, SMALLEST_CLIP / 2, LARGEST_CLIP * 2, -1.0, float("nan")])
@pytest.mark.parametrize("make", [ClippingRule.gradient, whitened, FeatureMean, SecondMomentMatrix])
def test_no_query_has_a_clip_that_rounding_would_stretch(make: Any, clip: float) -> None:
    """The same constructor on every path: one table, local noise, secure sums."""
    with pytest.raises(ValueError, match="clip"):
        make(clip)
    assert following_clip(SUBNORMAL) == 0.0


def made(algorithm: Any, objective: Any, d: int = D, **settings: Any) -> FederatedPlan:
    settings = {"budget": qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE), **settings}
    return federate(algorithm, objective, names=["a", "b"], sizes=[N, N], shape=Shape(d, d), **settings)


def test_a_subnormal_clip_is_refused_by_the_party() -> None:
    """ε 1.0 in the ledger and 4.1 true: the coordinator chose a clip of four subnormal steps."""
    plan = made(qg.WhitenedGD(steps=2, row_bound=1.0), Logistic(), trust="local")
    party = opened(PartyCurator("a", Logistic(), (np.ones((N, D)) / 8.0, np.arange(N) % 2), plan, seed=0))
    query = {**pack(whitened(0.5))[0], "clip": SUBNORMAL}
    reply = ask(party.handle, whitened(0.5), query=query)
    assert (reply.kind, reply.fields["code"]) == ("refused", "plan")
    assert ask(party.handle, whitened(0.5)).kind == "sum"


@pytest.mark.parametrize("secure", [{"trust": "curator"}, {"trust": "secure", "secure": "masks"}])
def test_an_adaptive_clip_needs_no_rehearsal(secure: dict[str, Any]) -> None:
    """DP-SRM with smoothness died in mid-run where a made-up answer had given the same clip to the last bit."""
    rng = np.random.default_rng(0)
    for k in range(6):
        settings: dict[str, Any] = {
            "smoothness": float(rng.uniform(0.01, 3.0)),
            "difference_clip": float(rng.uniform(0.05, 2.0)),
        }
        algorithm = qg.DPSRM(steps=12, batch_size=40, learning_rate=float(rng.uniform(0.01, 2.0)), **settings)
        result = simulate(algorithm, Logistic(), people(), budget=qg.Budget(1.0, 1e-5), seed=k, **secure)
        assert result.privacy.releases == {"first": 1, "next": 11}
    plan, _ = assemble(algorithm, Logistic(), people(), budget=qg.Budget(1.0, 1e-5))
    allowed = plan.templates["next"][0]["query.difference_clip"]
    assert allowed == {"from": 0.0, "to": settings["difference_clip"]}


def test_what_an_algorithm_does_not_declare_nobody_is_asked() -> None:
    class Silent(qg.DPGD):
        def asks(self, x0: Any, door: Any) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="does not declare what it asks"):
        made(Silent(steps=2), Logistic())
    with pytest.raises(ValueError, match="one curator"):
        made(qg.WhitenedGD(steps=2, inference_share=0.2), Logistic())


FIT = Logistic(row_bound=1.0, rows="clip", regularizer=L2(0.1))


@pytest.mark.parametrize("trust", [{"trust": "local"}, {"trust": "secure", "secure": "masks"}])
def test_the_start_of_a_fit_is_pinned_by_value(trust: dict[str, Any]) -> None:
    """Alternating ±1.79e308 made one dense record's score inf − inf: the coordinator knew that it was there."""
    fit = local_fit(FIT, 2 * N, 20, step_size(None, FIT), start=np.zeros(4))
    there, not_there = np.full((N, 4), 0.5), np.full((N, 4), 0.5)
    not_there[0] = [0.5, 0.0, 0.0, 0.0]
    starts = (np.array([1.79e308, -1.79e308] * 2), np.full(4, 1e-300), np.ones(4), np.full(4, np.nan))
    said = []
    for X in (there, not_there):
        parties = [Party(X, np.arange(N) % 2) for _ in range(2)]
        budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
        plan, federation = assemble(qg.WeightedAverage(steps=20), FIT, parties, budget=budget, **trust)
        party = federation.again("party-1")
        say(party, "open", run="r", plan=plan.digest)
        for start in starts:
            fields, arrays = pack(fit)
            words = {"run": "r", "round": 0, "slot": "model", "draw": 0, "query": fields}
            reply = say(party, "ask", dict.fromkeys(arrays, start), **words)
            assert (reply.kind, reply.fields["code"]) == ("refused", "plan")
            said.append(reply.fields["reason"])
        reply = ask(party, fit, slot="model")
        assert reply.kind == "sum" or reply.fields["code"] != "plan"  # a masked sum has more to ask for first
    assert said[:4] == said[4:]


@pytest.mark.parametrize("which", list(pairs()), ids=lambda pair: f"{pair[0]}, {pair[1]}")
def test_questions_of_a_hostile_coordinator(which: tuple[str, str]) -> None:
    """40 for every algorithm and loss; 10⁵ in ``benchmarks/federation_questions.py``."""
    rng = np.random.default_rng(len("".join(which)))
    asking = Interrogation(*which, features=7, rng=rng)
    kinds = [asking.ask() for _ in range(40)]
    assert "refused" in kinds


KINDS = ("open", "close", "ask", "hello", "meet", "prepare", "reveal", "receive", "partial", "finish", "noise", "")
GOOD = ("refused", "ready", "hello", "ok", "noise", "frame", "closed", "present")
VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1.5, "", "x", "00" * 16, [], [1], {}, {"a": 1})


@pytest.mark.parametrize("secure", ["servers", "mpc", "masks"])
def test_a_malformed_message_ends_nobody(secure: Any) -> None:
    """Every kind to every member, with fields and arrays that do not fit: a refusal, never an exception."""
    plan, federation = assemble(
        qg.DPGD(steps=2), Logistic(), people(), budget=qg.Budget(1.0, 1e-5), trust="secure", secure=secure
    )
    rng = np.random.default_rng(0)
    hello: dict[str, Any] = {"run": "r", "dim": 3, "epoch": "00" * 16}
    for name, handle in federation.handlers.items():
        say(handle, "open", run="r", plan=plan.digest)
        say(handle, "hello", **hello)
        for kind in KINDS:
            for _ in range(30):
                fields = {
                    key: (good if rng.random() < 0.5 else VALUES[rng.integers(len(VALUES))])
                    for key, good in {**hello, "round": 0, "slot": "gradient", "draw": 0, "query": {}}.items()
                    if rng.random() < 0.9
                }
                arrays = {
                    str(rng.choice(["0", "frame", "deliver", "-1", "x", "99999"])): rng.integers(0, 9, 5, "u1")
                }
                reply = decode(bytes(handle(encode(Message(kind, fields, arrays if rng.random() < 0.5 else {})))))
                assert reply.kind in GOOD, name
    servers = {name for name, member in federation._here.items() if isinstance(member, SumMember)}
    assert servers == set(plan.servers)
