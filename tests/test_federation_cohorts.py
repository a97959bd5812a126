"""Rounds that ask only some parties: right on average, priced as if all were asked, and refused if made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.federation import FederatedPlan, Party, Shape, federate
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.secure_roles import invitation, invite_parties, invited_by
from quietgrad.federation.simulation import assemble, simulate, train
from quietgrad.federation.transport.in_process import InProcess
from quietgrad.federation.wire import Message, decode, encode
from quietgrad.objectives.tables.losses import Logistic
from quietgrad.secure.channel import FrameType
from quietgrad.secure.graph import GRAPHS_PER_RELEASE
from quietgrad.secure.identity import DropoutError, ProtocolError, SurvivorAttestation, pack_members
from quietgrad.secure.masking import MaskingServer
from tests.faults import Fault, faulty
from tests.test_federate_plan import TEXT

ALGORITHM = qg.DPGD(steps=4, learning_rate=1.0)
BUDGET = qg.Budget(2.0, 1e-5)
ALL: list[dict[str, Any]] = [
    {"trust": "curator"},
    {"trust": "local"},
    *({"trust": "secure", "secure": secure} for secure in ("masks", "servers", "mpc")),
]


def label(settings: dict[str, Any]) -> str:
    return str(settings.get("secure") or settings["trust"])


def twins(m: int = 8) -> list[Party]:
    """Parties with the same records: whoever is asked, the mean is the same."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 3))
    return [Party(X, (X[:, 0] > 0.0) * 1.0) for _ in range(m)]


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_a_cohort_stands_for_everybody(settings: dict[str, Any]) -> None:
    everybody = simulate(ALGORITHM, Logistic(), twins(), budget=None)
    some = simulate(ALGORITHM, Logistic(), twins(), budget=None, cohort=3, **settings)
    np.testing.assert_allclose(some.params, everybody.params, atol=1e-8)
    assert some.details["cohort"] == 3


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_private_runs_with_cohorts_cost_what_all_rounds_cost(settings: dict[str, Any]) -> None:
    """Who is asked is known to all: no amplification, the same ε as if every party were in every round."""

    def plan(**more: Any) -> FederatedPlan:
        return federate(
            ALGORITHM, Logistic(), names=[f"p{j}" for j in range(8)], sizes=[20] * 8, shape=Shape(3, 3),
            budget=BUDGET, noise_multiplier=3.0, **settings, **more,
        )  # fmt: skip

    assert plan(cohort=3).epsilon() == pytest.approx(plan().epsilon(), rel=1e-9)
    result = simulate(ALGORITHM, Logistic(), twins(), budget=BUDGET, cohort=3, quorum=3, seed=1, **settings)
    assert result.privacy.releases["gradient"] == 4


def test_noise_of_a_cohort_is_planned_for_the_cohort() -> None:
    plan = federate(
        ALGORITHM, Logistic(), names=[f"p{j}" for j in range(50)], sizes=[20] * 50, shape=Shape(3, 3),
        budget=BUDGET, trust="secure", secure="masks", cohort=10, quorum=8, colluders=2,
    )  # fmt: skip
    terms = plan.terms(3)
    assert (terms.parties, terms.honest, terms.colluders) == (10, 6, 2)
    again = FederatedPlan.from_json(plan.to_json())
    assert (again.cohort, again.digest) == (10, plan.digest)
    assert "cohorts: 10 of 50" in plan.explain()
    assert "masks: all hold shares of all, 7 open a secret; the coordinator must be" in plan.explain()


def test_a_plan_of_many_states_its_neighbours_and_their_probabilities() -> None:
    plan = federate(
        ALGORITHM, Logistic(), names=[f"p{j}" for j in range(300)], sizes=[20] * 300, shape=Shape(3, 3),
        budget=BUDGET, trust="secure", secure="masks", quorum=270,
    )  # fmt: skip
    graph, words = plan.terms(3).graph, plan.explain()
    assert f"each party draws {graph.neighbours} holders of her shares ({graph.threshold} open a secret)" in words
    assert f"privacy fails with probability 2^{np.log2(graph.failure):.1f} per drawing (in δ)" in words
    assert plan.slack >= 4 * GRAPHS_PER_RELEASE * graph.failure
    plan.proves()


def test_cohorts_are_uniform() -> None:
    """4000 draws of 3 of 8: every party in 3/8 of them within 5 standard errors (false alarm 5e-6 for eight)."""
    plan, _ = assemble(ALGORITHM, Logistic(), twins(), budget=None, cohort=3)
    times = np.zeros(8)
    for t in range(4000):
        chosen = invite_parties(plan, b"k" * 32, t)
        assert len(set(chosen)) == 3
        times[[plan.index(name) for name in chosen]] += 1
    assert np.abs(times / 4000 - 3 / 8).max() < 5 * (3 / 8 * 5 / 8 / 4000) ** 0.5


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_parties_of_a_cohort_may_be_away(settings: dict[str, Any]) -> None:
    away = [Fault(f"party-{j}", "leave", 0, last=10**6) for j in (1, 2)]
    result = simulate(
        ALGORITHM, Logistic(), twins(8), budget=None, cohort=6, quorum=4, transport=faulty(away), seed=1, **settings
    )
    everybody = simulate(ALGORITHM, Logistic(), twins(), budget=None)
    np.testing.assert_allclose(result.params, everybody.params, atol=1e-8)
    gone = [Fault(f"party-{j}", "leave", 0 if j < 4 else 1, last=10**6) for j in range(1, 7)]
    with pytest.raises(DropoutError, match="continue the run"):
        simulate(
            ALGORITHM, Logistic(), twins(8), budget=None, cohort=6, quorum=5, transport=faulty(gone), **settings
        )


def hello(plan: FederatedPlan, run: str, epoch: int = 0, **fields: Any) -> bytearray:
    words = {"run": run, "dim": 3, "epoch": f"{epoch:032x}", **fields}
    return encode(Message("hello", words))


@pytest.mark.parametrize(
    "cohort",
    [None, [0, 1], [0, 1, 2, 3], [0, 0, 1], [1, 0, 2], [0, 1, 8], [-1, 0, 1], [0, 1, True], "012", [1, 2, 3]],
)
def test_a_party_refuses_a_cohort_that_was_not_agreed_on(cohort: Any) -> None:
    plan, federation = assemble(
        ALGORITHM, Logistic(), twins(), budget=BUDGET, trust="secure", secure="masks", cohort=3
    )
    party = federation.handlers["party-1"]
    party(encode(Message("open", {"run": "r", "plan": plan.digest})))
    good = decode(bytes(party(hello(plan, "r", **invitation(plan, plan.names[:3])))))
    assert good.kind == "hello"
    fields = {} if cohort is None else {"cohort": cohort}
    reply = decode(bytes(party(hello(plan, "r", **fields))))
    assert reply.kind == "refused"
    assert "coordinator" in reply.fields["reason"]


def test_a_coordinator_cannot_ask_for_new_neighbours_until_it_likes_them() -> None:
    """Each set-up draws neighbours; δ pays for eight drawings per release, and a party makes no more."""
    plan, federation = assemble(ALGORITHM, Logistic(), twins(), budget=BUDGET, trust="secure", secure="masks")
    party = federation.handlers["party-1"]
    party(encode(Message("open", {"run": "r", "plan": plan.digest})))
    kinds = [decode(bytes(party(hello(plan, "r", t)))).kind for t in range(GRAPHS_PER_RELEASE * 4 + 1)]
    assert kinds == ["hello"] * GRAPHS_PER_RELEASE * 4 + ["refused"]


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"cohort": 9}, "cohort=9"), ({"cohort": -1}, "cohort=-1"), ({"cohort": 3, "quorum": 4}, "quorum=4")],
)
def test_impossible_cohorts_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(ALGORITHM, Logistic(), twins(), budget=None, **settings)


def test_records_that_are_used_once_need_everybody() -> None:
    oracle = qg.AdaptiveSpider(batch_size=20, difference_batch_size=4, kappa=0.3)
    algorithm = qg.PerturbedSGD(oracle=oracle, chi=0.05, learning_rate=0.2)
    with pytest.raises(ValueError, match="used once"):
        simulate(algorithm, Logistic(row_bound=3.0, rows="clip"), twins(), budget=None, cohort=3)


def test_a_plan_file_may_have_cohorts() -> None:
    assert parse_plan(TEXT.replace("[federation]", "[federation]\ncohort = 2", 1)).plan.cohort == 2


def test_a_server_of_shares_takes_the_same_list() -> None:
    plan, federation = assemble(
        ALGORITHM, Logistic(), twins(), budget=BUDGET, trust="secure", secure="servers", cohort=3
    )
    reply = decode(bytes(federation.handlers["server-1"](hello(plan, "r", cohort=[0, 0, 1]))))
    assert reply.kind == "refused"
    with pytest.raises(ProtocolError, match="3 different parties"):
        invited_by(plan, {"cohort": [5]})


def test_beginning_anew_does_not_hide_two_lists_of_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the parties are told another list, the round is called lost, new keys are made: it is found out."""
    signed = MaskingServer.survivors
    lied: list[int] = []

    def equivocating(self: MaskingServer, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        questions = signed(self, t, frames)
        if lied:
            return questions
        lied.append(t)
        packed = pack_members(tuple(range(7)), 8)
        other = packed + SurvivorAttestation.signed(self._identity, self.context, t, packed).signature
        return {i: self._seal(i, FrameType.SURVIVORS, t, other) if i < 4 else q for i, q in questions.items()}

    monkeypatch.setattr(MaskingServer, "survivors", equivocating)
    told: list[str] = []
    settings: dict[str, Any] = {"budget": BUDGET, "trust": "secure", "secure": "masks", "quorum": 6, "spare": 2}
    plan, federation = assemble(ALGORITHM, Logistic(), twins(), **settings)
    curator = FederatedCurator(
        Logistic(), InProcess(federation.handlers), identity=federation.identity, roster=federation.roster,
        tell=told.append,
    )  # fmt: skip
    with pytest.raises(DropoutError):
        train(ALGORITHM, curator, plan, np.zeros(3))
    assert any("signed two lists of survivors of round 0" in words for words in told)


@pytest.mark.parametrize(("secure", "hellos"), [("servers", 2), ("mpc", 3)])
def test_a_party_is_sent_the_servers_hellos_only(secure: Any, hellos: int) -> None:
    plan, federation = assemble(ALGORITHM, Logistic(), twins(), budget=None, trust="secure", secure=secure)
    sent: dict[str, int] = {}

    def recorded(name: str) -> Any:
        def handle(data: Any) -> Any:
            message = decode(bytes(data))
            if message.kind == "meet":
                sent[name] = len(message.arrays)
            return federation.handlers[name](data)

        return handle

    transport = InProcess({name: recorded(name) for name in federation.handlers})
    train(ALGORITHM, FederatedCurator(Logistic(), transport), plan, np.zeros(3))
    assert {name: sent[name] for name in plan.names} == dict.fromkeys(plan.names, hellos)
    assert {sent[name] for name in plan.servers} == {8 + hellos}
