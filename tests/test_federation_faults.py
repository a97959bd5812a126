"""What goes wrong between parties: every fault ends in the right model or a clear abort, never under-charged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.errors import DataError
from quietgrad.federation import Party, deal
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.simulation import assemble, simulate, train
from quietgrad.federation.transport import Bytes
from quietgrad.federation.transport.in_process import Fault, InProcess
from quietgrad.federation.wire import Message, decode, encode
from quietgrad.objectives.tables.glm import Logistic
from quietgrad.privacy import events
from quietgrad.privacy.ledger import Ledger
from quietgrad.secure.faults import DropoutError, ProtocolError

Floats = npt.NDArray[np.float64]
STEPS = 5
ALGORITHM = qg.DPGD(steps=STEPS, learning_rate=1.0)
BUDGET = qg.Budget(1.0, 1e-5)
SECURE: list[dict[str, Any]] = [
    {"trust": "secure", "secure": "masks"},
    {"trust": "secure", "secure": "servers"},
    {"trust": "secure", "secure": "mpc"},
]
ALL: list[dict[str, Any]] = [{"trust": "curator"}, {"trust": "local"}, *SECURE]


def asked(settings: dict[str, Any], t: int) -> int:
    """Which message to a party asks for round ``t``: open comes first, then hello and meet if sums are secure."""
    if settings["trust"] != "secure":
        return 1 + t
    return 4 + 3 * t if settings["secure"] == "masks" else 3 + t


def label(settings: dict[str, Any]) -> str:
    return str(settings.get("secure") or settings["trust"])


def people(m: int = 4) -> list[Party]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    return deal(X, (X[:, 0] > 0.0) * 1.0, m)


def outcome(**settings: Any) -> qg.Result:
    settings = {"budget": None, "seed": 1, **settings}
    parties = settings.pop("parties", None) or people()
    return simulate(ALGORITHM, Logistic(), parties, **settings)


@pytest.fixture(scope="module")
def undisturbed() -> Floats:
    params: Floats = outcome(trust="curator").params
    return params


@pytest.mark.parametrize("kind", ["lose-request", "lose-reply", "delay", "corrupt", "leave"])
@pytest.mark.parametrize("settings", ALL, ids=label)
def test_lost_round_is_asked_again_from_a_spare(settings: dict[str, Any], kind: Any, undisturbed: Floats) -> None:
    fault = Fault("party-2", kind, first=asked(settings, 2), seconds=1e9)
    result = outcome(**settings, spare=2, faults=[fault])
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    assert STEPS < result.privacy.releases["gradient"] <= STEPS + 2
    assert any("party-2" in note for note in result.privacy.notes)


@pytest.mark.parametrize("phase", [-1, 0, 1], ids=["prepare", "submit", "reveal"])
@pytest.mark.parametrize("kind", ["lose-request", "lose-reply", "corrupt"])
def test_masks_lose_a_party_in_any_phase(phase: int, kind: Any, undisturbed: Floats) -> None:
    masks = {"trust": "secure", "secure": "masks"}
    fault = Fault("party-2", kind, first=asked(masks, 2) + phase)
    result = outcome(**masks, spare=1, faults=[fault])
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    # Three of four shares open a sum, so one answer less to the last question loses nothing.
    assert result.privacy.releases["gradient"] == STEPS + (phase < 1)


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_without_spare_rounds_the_run_aborts_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(DropoutError, match=r"party-2.*spare") as caught:
        outcome(**settings, faults=[Fault("party-2", "crash", first=asked(settings, 1))])
    assert caught.value.missing == ["party-2"]  # and not those who could not go on without it


def test_slow_party_is_named_with_its_time() -> None:
    with pytest.raises(DropoutError, match=r"party-3 did not answer within 7 s"):
        outcome(timeout=7.0, faults=[Fault("party-3", "delay", first=2, seconds=7.5)])


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_quorum_completes_rounds_without_the_missing(settings: dict[str, Any]) -> None:
    """Noise is still enough: the plan priced a sum of three parties. The one who left comes back."""
    first = asked(settings, 1)
    quorum = {"quorum": 3, "spare": 1}
    result = outcome(**settings, **quorum, faults=[Fault("party-4", "leave", first, last=first + 1)])
    assert result.privacy.releases["gradient"] <= STEPS + 1
    assert any("party-4" in note for note in result.privacy.notes)
    rejoined = outcome(**settings, **quorum, faults=[Fault("party-4", "leave", first, last=10**6)])
    assert not np.allclose(rejoined.params, result.params, atol=1e-9)


def test_masks_refuse_a_quorum_without_enough_noise() -> None:
    with pytest.raises(ValueError, match="honest"):
        outcome(trust="secure", secure="masks", quorum=1)


def test_duplicated_request_is_answered_once() -> None:
    """The second copy is refused as stale, so the round is lost, and never answered with a second sample."""
    result = outcome(spare=1, faults=[Fault("party-1", "duplicate", first=3)])
    assert any("stale" in note for note in result.privacy.notes)


def test_replayed_answer_is_rejected_by_name() -> None:
    result = outcome(spare=1, faults=[Fault("party-1", "stale", first=3)])
    assert any("party-1 reply is stale or a replay" in note for note in result.privacy.notes)


def liar(change: Callable[[Message], Message]) -> Callable[..., Any]:
    def wrap(handle: Callable[[Bytes], Bytes]) -> Callable[[Bytes], Bytes]:
        def lying(data: Bytes) -> Bytes:
            reply = decode(bytes(handle(data)))
            return encode(change(reply) if reply.kind == "sum" else reply)

        return lying

    return wrap


def with_total(change: Callable[[Floats], Any]) -> Callable[[Message], Message]:
    return lambda reply: Message(reply.kind, reply.fields, {"total": change(reply.arrays["total"])})


LIES: dict[str, tuple[Callable[[Message], Message], str]] = {
    "NaN": (with_total(lambda v: v * np.nan), "NaN"),
    "infinity": (with_total(lambda v: np.full_like(v, np.inf)), "infinity"),
    "too long": (with_total(lambda v: np.append(v, 1.0)), "wrong length"),
    "wrong type": (with_total(lambda v: v.astype(np.float32)), "wrong length or type"),
    "too large": (with_total(lambda v: v * 0.0 + 1e6), "longer than all of its records"),
    "nothing": (lambda reply: Message("sum", reply.fields), "wrong length"),
    "old round": (lambda reply: Message("sum", {**reply.fields, "round": 0}, reply.arrays), "stale"),
    "other run": (lambda reply: Message("sum", {**reply.fields, "run": "x"}, reply.arrays), "stale"),
}


@pytest.mark.parametrize("trust", ["curator", "local"])
@pytest.mark.parametrize("lie", LIES)
def test_bad_vectors_are_rejected_by_name(lie: str, trust: Any) -> None:
    change, reason = LIES[lie]
    plan, federation = assemble(ALGORITHM, Logistic(), people(), budget=BUDGET, trust=trust, seed=1)
    handlers = {**federation.handlers, "party-3": liar(change)(federation.handlers["party-3"])}
    curator = FederatedCurator(Logistic(), InProcess(handlers), seed=1)
    with pytest.raises(DropoutError, match=f"party-3.*{reason}"):
        train(ALGORITHM, curator, plan, np.zeros(3))


def test_ledgers_of_everybody_hold_the_plan_before_the_first_answer(tmp_path: Path) -> None:
    parties = [
        Party(p.X, p.y, name=f"clinic-{i}", ledger=tmp_path / f"{i}.jsonl", account="patients")
        for i, p in enumerate(people(3))
    ]
    ledger = tmp_path / "coordinator.jsonl"
    lost = [Fault("clinic-1", "lose-reply", first=2)]
    result = simulate(
        ALGORITHM, Logistic(), parties, budget=BUDGET, noise_multiplier=9.0, spare=3, faults=lost, ledger=ledger
    )
    # Whether a round is lost is up to a member who has seen releases: spare rounds are not given back.
    assert result.privacy.events == events.gaussian(9.0, STEPS + 3)
    assert result.privacy.releases["gradient"] == STEPS + 1
    for path in (ledger, *(party.ledger for party in parties)):
        book = Ledger(str(path)).book()
        (held,) = book.held.values()
        assert held.reservation.event == events.gaussian(9.0, STEPS + 3)
        assert held.state == "closed"
        account = "default" if path == ledger else "patients"
        assert book.counted(account) == [events.gaussian(9.0, STEPS + 3)]


def test_aborted_run_keeps_the_whole_plan_charged(tmp_path: Path) -> None:
    parties = [Party(p.X, p.y, ledger=tmp_path / f"{i}.jsonl") for i, p in enumerate(people(3))]
    with pytest.raises(DropoutError):
        simulate(
            ALGORITHM, Logistic(), parties, budget=BUDGET, noise_multiplier=9.0, ledger=tmp_path / "c.jsonl",
            faults=[Fault("party-1", "crash", first=3)],
        )  # fmt: skip
    for name in ("c", "0", "1", "2"):
        counted = Ledger(tmp_path / f"{name}.jsonl").book().counted("default")
        assert counted == [events.gaussian(9.0, STEPS)]


def test_cap_of_one_party_stops_the_run_before_anything_is_released(tmp_path: Path) -> None:
    first, *others = people(3)
    careful = Party(first.X, first.y, ledger=tmp_path / "l.jsonl", cap=qg.Budget(0.01, 1e-5))
    with pytest.raises(ProtocolError, match=r"party-1.*cap"):
        simulate(ALGORITHM, Logistic(), [careful, *others], budget=BUDGET, noise_multiplier=9.0)


class Killed(BaseException):
    """As sudden as kill -9 is to the process: nothing gets to clean up."""


def killing(step: int) -> Callable[..., None]:
    def callback(state: Any, session: Any) -> None:
        if state.step == step:
            raise Killed

    return callback


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_killed_coordinator_resumes_from_kept_aggregates(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Floats
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    with pytest.raises(Killed):
        outcome(**settings, folder=tmp_path / "run", callback=killing(3))
    result = outcome(**settings, folder=tmp_path / "run")
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    assert result.privacy.releases["gradient"] == STEPS
    assert not list((tmp_path / "run").iterdir())


def test_resumed_private_run_is_charged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    seen: list[Floats] = []

    def watching(state: Any, session: Any) -> None:
        seen.append(state.params)
        if len(seen) == 3:
            raise Killed

    def run(callback: Any) -> qg.Result:
        parties = [Party(p.X, p.y, ledger=tmp_path / f"{i}.jsonl") for i, p in enumerate(people(3))]
        return simulate(
            ALGORITHM, Logistic(), parties, budget=BUDGET, ledger=tmp_path / "c.jsonl", folder=tmp_path / "run",
            callback=callback, noise_multiplier=9.0,
        )  # fmt: skip

    with pytest.raises(Killed):
        run(watching)
    again: list[Floats] = []
    run(lambda state, session: again.append(state.params))
    assert [p.tolist() for p in again[:3]] == [p.tolist() for p in seen]
    for name in ("c", "0", "1", "2"):
        assert Ledger(tmp_path / f"{name}.jsonl").book().counted("default") == [events.gaussian(9.0, STEPS)]


@pytest.mark.parametrize("spare", [0, 1])
def test_round_cut_by_the_kill_is_paid_from_a_spare(
    spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Floats
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))

    def dying(data: Bytes) -> Bytes:
        if decode(bytes(data)).fields.get("round") == 2:
            raise Killed
        return federation.handlers["party-4"](data)

    plan, federation = assemble(
        ALGORITHM, Logistic(), people(), budget=None, trust="curator", seed=1, spare=spare, folder=tmp_path
    )
    curator = FederatedCurator(
        Logistic(), InProcess({**federation.handlers, "party-4": dying}), seed=1, folder=tmp_path
    )
    with pytest.raises(Killed):
        train(ALGORITHM, curator, plan, np.zeros(3))
    again = FederatedCurator(Logistic(), InProcess(federation.handlers), seed=1, folder=tmp_path)
    if spare == 0:
        with pytest.raises(DropoutError, match="interrupted"):
            train(ALGORITHM, again, plan, np.zeros(3))
        return
    result = train(ALGORITHM, again, plan, np.zeros(3))
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    assert result.privacy.releases["gradient"] == STEPS + 1


def test_kept_run_of_another_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    with pytest.raises(Killed):
        outcome(folder=tmp_path / "run", callback=killing(2))
    with pytest.raises(DataError, match="another plan"):
        outcome(folder=tmp_path / "run", spare=1)


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_restarted_party_rejoins_between_rounds(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Floats
) -> None:
    """A new process in a party's place, with its journal: same reservation, new keys for the secure sums."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    fixed = {"budget": None, "seed": 1, "spare": 3, **settings}
    plan, federation = assemble(ALGORITHM, Logistic(), people(), folder=tmp_path / "a", **fixed)
    transport = InProcess(federation.handlers)
    curator = FederatedCurator(
        Logistic(), transport, seed=1, identity=federation.identity, roster=federation.roster
    )

    def restart(state: Any, session: Any) -> None:
        if state.step == 2:
            transport.replace("party-2", federation.again("party-2"))

    result = train(ALGORITHM, curator, plan, np.zeros(3), callback=restart)
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    assert any("party-2" in note for note in result.privacy.notes)


def test_party_that_forgot_its_fresh_records_is_refused() -> None:
    """Without a journal a restarted party could use a record twice, which a single pass must not."""
    objective = Logistic(row_bound=3.0, rows="clip")
    algorithm = qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(batch_size=20, difference_batch_size=4, kappa=0.3), chi=0.05, learning_rate=0.2
    )
    plan, federation = assemble(algorithm, objective, people(), budget=None, trust="curator", seed=1, spare=2)
    transport = InProcess(federation.handlers)

    def restart(state: Any, session: Any) -> None:
        if state.step == 2:
            transport.replace("party-2", federation.again("party-2"))

    curator = FederatedCurator(objective, transport, seed=1)
    with pytest.raises(ProtocolError, match="party-2: restarted without its journal"):
        train(algorithm, curator, plan, np.zeros(3), callback=restart)


@pytest.mark.parametrize("trust", ["curator", "local"])
def test_no_noise_serves_two_runs(trust: Any) -> None:
    """One curator, the same people, two runs: rounds have the same numbers and must not have the same noise."""
    zeros = [Party(np.zeros((9, 50)), np.zeros(9)) for _ in range(2)]
    plan, federation = assemble(
        qg.DPGD(steps=1), Logistic(), zeros, budget=BUDGET, trust=trust, noise_multiplier=1.0
    )
    transport = InProcess(federation.handlers)
    curator = FederatedCurator(Logistic(), transport)
    first = train(qg.DPGD(steps=1), curator, plan, np.zeros(50)).params
    for name in plan.names:
        transport.replace(name, federation.again(name))
    second = train(qg.DPGD(steps=1), curator, plan, np.zeros(50)).params
    assert not set(first) & set(second)
