"""FedAvg among parties: turns, secret samples and the coordinator's draws behind every kind of trust."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.certificates.rebuilt_plan import _of_party
from quietgrad.cli import main
from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.accounting.events import Gaussian, PoissonSampled, repeated
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import CoordinatorSampled
from quietgrad.federation import Clients, Party, simulate
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.exchange import Exchange
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.simulation import InProcess, assemble
from quietgrad.methods.fedavg import FedAvg
from quietgrad.objectives import Logistic
from tests.federation.test_network import ended, folder, plan_text, spent_in, start

__all__ = ["folder", "start"]

M, N = 6, 15
RNG = np.random.default_rng(0)
X = RNG.standard_normal((M * N, 3))
Y = (X @ [1.0, -1.0, 0.5] > 0) * 1.0
CLIENTS = Clients(X, Y, party=np.repeat(np.arange(M), N))
BUDGET = qg.Budget(8.0, 1e-2)
TURNS = FedAvg(rounds=6, sample=1 / 3, local_rate=0.5)
TRUSTS: list[dict[str, Any]] = [
    {"trust": "curator", "quorum": M - 1}, {"trust": "secure", "secure": "masks"},
    {"trust": "secure", "secure": "servers"}, {"trust": "secure", "secure": "mpc"}, {"trust": "local"},
]  # fmt: skip


@pytest.mark.parametrize("trust", TRUSTS, ids=lambda t: t.get("secure", t["trust"]))
@pytest.mark.parametrize("method", [
    TURNS, FedAvg(rounds=4, sampling="self", sample=0.5), FedAvg(rounds=4, sampling="coordinator", most_rounds=2),
    FedAvg(rounds=4, sampling="full", clip_quantile=0.5),
], ids=["turns", "self", "coordinator", "adaptive"])  # fmt: skip
def test_clients_train_behind_every_kind_of_trust(method: FedAvg, trust: dict[str, Any]) -> None:
    if method is TURNS and trust.get("secure") == "mpc":  # which draws integers alone
        method = replace(method, noise="independent")
    result = simulate(method, Logistic(), CLIENTS, budget=BUDGET, **trust)
    assert result.privacy.unit is PrivacyUnit.PARTY
    assert result.privacy.is_private
    assert result.n_public == M
    assert result.privacy.epsilon is not None
    assert 7.0 < result.privacy.epsilon <= 8.0


def test_messages_and_one_curator_make_the_same_model() -> None:
    method = FedAvg(rounds=3, sampling="full", local_batch_size=99, clip=0.2, server_momentum=0.5)
    one = simulate(method, Logistic(), CLIENTS, budget=None)
    many = simulate(method, Logistic(), list(CLIENTS), budget=None, quorum=M - 1)
    assert "n_parties" in one.details
    assert "n_parties" not in many.details
    assert one.params == pytest.approx(many.params, abs=1e-12)


def test_parties_take_turns_by_their_places_in_the_roster() -> None:
    plan, federation = assemble(TURNS, Logistic(), list(CLIENTS), budget=None)
    assert isinstance(plan, FederatedPlan)
    turns = [plan.schedule["update"].sampling.at_party(plan.sizes, j) for j in range(M)]
    assert [turn.turn for turn in turns] == [0, 1, 2, 0, 1, 2]  # type: ignore[union-attr]
    federation.close()


def test_correlated_noise_is_the_default_of_turns_and_pays_for_all_rounds_at_once() -> None:
    plan = _plan(TURNS, trust="secure", secure="masks")
    assert events.Gaussian(plan.noise_multiplier) in _parts(plan.event)
    assert plan.schedule["update"].mechanism.kind == "correlated"


def _parts(event: Any) -> list[Any]:
    return list(event.parts) if isinstance(event, events.Composed) else [event]


def _plan(method: FedAvg, **settings: Any) -> FederatedPlan:
    return federate(
        method, Logistic(), names=[f"p{j}" for j in range(M)], sizes=[N] * M, shape=Shape(3, 3),
        **{"budget": BUDGET, **settings},
    )  # fmt: skip


def test_a_plan_says_both_statements_and_is_read_back() -> None:
    plan = _plan(FedAvg(rounds=9, sampling="coordinator", most_rounds=3), trust="secure", secure="masks")
    text = plan.explain()
    assert "two statements" in text
    assert "3 times at most" in text
    assert FederatedPlan.from_json(json.loads(json.dumps(plan.to_json(), default=list))).digest == plan.digest
    trusted = _plan(FedAvg(rounds=9, sampling="coordinator", most_rounds=3))
    assert "two statements" not in trusted.explain()
    assert trusted.noise_multiplier < plan.noise_multiplier


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": FedAvg(sampling="poisson"), "trust": "local"}, "no trusted curator draws"),
        ({"method": TURNS, "weights": "equal", "trust": "local"}, None),
        ({"method": TURNS, "weights": [1, 2, 1, 1, 1, 1], "trust": "local"}, "each counts once"),
        (
            {
                "method": FedAvg(sampling="coordinator", most_rounds=2),
                "budget": qg.Budget(8.0, 1e-2, qg.Relation.REPLACE_ONE),
            },
            "under add-remove",
        ),
        ({"method": TURNS, "unit": "person", "parties_per_person": 1}, "privacy unit is a party"),
    ],
)
def test_a_plan_without_a_proof_is_refused(settings: dict[str, Any], words: str | None) -> None:
    method, rest = settings["method"], {key: value for key, value in settings.items() if key != "method"}
    if words is None:
        assert _plan(method, **rest).sizes == (1,) * M
        return
    with pytest.raises(ValueError, match=words):
        _plan(method, **rest)


def test_a_coordinator_waits_longer_than_parties_take_to_answer() -> None:
    method = FedAvg(rounds=2, sampling="self", answer_seconds=30.0)
    plan, federation = assemble(method, Logistic(), list(CLIENTS), budget=BUDGET, trust="local")
    with pytest.raises(ValueError, match="answer_seconds"):
        FederatedCurator(Logistic(), Exchange(InProcess(federation.handlers), timeout=20.0)).open(plan)
    federation.close()


def test_every_partys_ledger_is_charged_for_the_party(tmp_path: Any) -> None:
    parties = [
        Party(X[j::M], Y[j::M], name=f"p{j}", ledger=tmp_path / f"{j}.jsonl", account="us") for j in range(M)
    ]
    simulate(FedAvg(rounds=3, sampling="coordinator", most_rounds=2), Logistic(), parties, budget=BUDGET,
             trust="secure", secure="masks")  # fmt: skip
    for j in range(M):
        book = Ledger(tmp_path / f"{j}.jsonl").book()
        assert book.units("us") == (PrivacyUnit.PARTY,)


def test_undrawn_parties_bring_their_share_of_the_noise() -> None:
    """No party is ever drawn, and the sums have the noise all the same: the mean of 360 squares."""
    method = FedAvg(rounds=120, sampling="self", sample=1e-9, clip=1.0)
    plan, federation = assemble(
        method, Logistic(), list(CLIENTS), budget=BUDGET, trust="secure", secure="masks", noise_multiplier=2.0
    )
    session = FederatedCurator(
        Logistic(), InProcess(federation.handlers), identity=federation.identity, roster=federation.roster
    ).open(plan)
    sums = np.array([session.release("update", method.query(np.zeros(3), 1.0)) for _ in range(120)])
    session.close("steps")
    federation.close()
    assert np.mean(sums**2) == pytest.approx(4.0 * plan.variance_factor, rel=0.33)  # ±4.4 standard errors


def test_many_clients_are_simulated_at_once() -> None:
    n = 20_000
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n, 4))
    clients = Clients(x, (x[:, 0] > 0) * 1.0, party=np.arange(n) // 2)
    result = simulate(FedAvg(rounds=3, sample=0.05), Logistic(), clients, budget=qg.Budget(2.0, 1e-5))
    assert result.n_public == n // 2


PLAN = """
[federation]
name = "clients"
trust = "secure"
secure = "masks"
[coordinator]
address = "127.0.0.1:7443"
[data]
features = 3
[objective]
name = "logistic"
[algorithm]
name = "fedavg"
rounds = 4
{sampling}
sample = 0.5
clip_quantile = 0.5
[budget]
epsilon = 8.0
delta = 1e-2
"""


DRAWN = {
    "self": 'sampling = "self"\nanswer_seconds = 0.5',
    "coordinator": 'sampling = "coordinator"\nmost_rounds = 2',
}


@pytest.mark.parametrize("sampling", DRAWN)
def test_processes_over_tls_draw_parties_and_certify_what_they_spent(
    sampling: str, folder: Any, start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    parties = "".join(f'[[party]]\nname = "p{j}"\nrecords = {N}\n' for j in range(3))
    (folder / "plan.toml").write_text(plan_text(PLAN.replace("{sampling}", DRAWN[sampling]) + parties))
    for j in range(3):
        np.savez(folder / f"p{j}.npz", X=X[j::M], y=Y[j::M])
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    server = start("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--json")
    members = [
        start("party", "plan.toml", "--keys", f"keys/p{j}", "--data", f"p{j}.npz", "--out", f"p{j}",
              "--account", "us", "--json")
        for j in range(3)
    ]  # fmt: skip
    code, out, err = ended(server)
    assert (code, err) == (0, "")
    privacy = json.loads(out)["privacy"]
    assert privacy["unit"] == "party"
    assert any(note.startswith("one record of a party: (") for note in privacy["notes"])
    for j, member in enumerate(members):
        assert ended(member)[0] == 0
        assert spent_in(folder / f"p{j}", "us", 1e-2) == pytest.approx(privacy["epsilon"], rel=1e-6)
    assert not qg.load(folder / "model").privacy.refuted
    assert main(["certificate", "model"]) == 0
    capfd.readouterr()
    assert main(["verify", "model/certificate.json"]) == 0


@pytest.mark.parametrize(("trust", "knows"), [("secure", True), ("curator", False)])
def test_a_checker_derives_the_event_against_a_coordinator_that_draws(trust: str, knows: bool) -> None:
    """Against it nothing is amplified: a claim of secret samples does not follow from such a plan."""
    slot = Slot("update", CoordinatorSampled(0.5, 2), 4)
    federation = {"trust": trust, "parties_per_person": None, "sizes": [N, N, N]}
    schedule, times = _of_party(Schedule((slot,)), federation, 0, 1)
    known, secret = repeated(Gaussian(1.0), 2), repeated(PoissonSampled(0.5, Gaussian(1.0)), 4)
    assert times == 1
    assert schedule.event(1.0, qg.Relation.ADD_REMOVE) == (known if knows else secret)
