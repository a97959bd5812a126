"""What goes wrong between parties: every fault ends in the right model or a clear abort, never under-charged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation import Party
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.exchange import Envelope, Exchange, body
from quietgrad.federation.secure.identity import DropoutError
from quietgrad.federation.simulation import InProcess, assemble, simulate, train
from quietgrad.federation.transport import Bytes
from quietgrad.federation.wire import Message, decode, encode
from quietgrad.tables.losses import Logistic
from tests.federation.faults import Fault, Faulty, faulty
from tests.federation.talk import people

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


def outcome(**settings: Any) -> qg.Result:
    settings = {"budget": None, "seed": 1, **settings}
    parties = settings.pop("parties", None) or people()
    return simulate(settings.pop("algorithm", ALGORITHM), Logistic(), parties, **settings)


@pytest.fixture(scope="module")
def undisturbed() -> Floats:
    params: Floats = outcome(trust="curator").params
    return params


KINDS = ("lose-request", "lose-reply", "delay", "corrupt", "duplicate", "stale", "leave")
SHORT = qg.DPGD(steps=2, learning_rate=1.0)
TURNS = qg.DPSGD(steps=3, sampling="turns", cohorts=2, noise="correlated", learning_rate=0.5)
MATRIX: dict[str, dict[str, Any]] = {
    **{label(each): {**each, "algorithm": SHORT} for each in ALL},
    "correlated, masks": {"trust": "secure", "secure": "masks", "algorithm": TURNS},
    "correlated, servers": {"trust": "secure", "secure": "servers", "algorithm": TURNS},
}


def frames(settings: dict[str, Any], who: str) -> int:
    """How many frames a member gets in an undisturbed run, but for the one that says it is over."""
    sent: dict[str, int] = {}
    counting = InProcess.send

    def count(self: InProcess, asked: Any, seconds: float) -> Any:
        for name in asked:
            sent[name] = sent.get(name, 0) + 1
        return counting(self, asked, seconds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InProcess, "send", count)
        outcome(**settings)
    return sent.get(who, 0) - (who in ("party-2",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", ALL, ids=label)
def test_a_lost_frame_is_sent_again_and_costs_nothing(settings: dict[str, Any], kind: Any) -> None:
    """Without a single spare round: what was asked before is asked again under its number."""
    short = {**settings, "algorithm": SHORT}
    calm = outcome(**short).params
    for first in range(frames(short, "party-2")):
        result = outcome(**short, transport=faulty([Fault("party-2", kind, first=first, seconds=40.0)]))
        np.testing.assert_allclose(result.params, calm, atol=1e-9)
        assert (result.privacy.releases["gradient"], result.details["lost_rounds"]) == (SHORT.steps, 0)


@pytest.mark.parametrize("mode", MATRIX)
def test_an_outage_at_any_point_costs_nothing_but_time(mode: str) -> None:
    """An hour, of a party, and of a server where there is one; no spare rounds, everybody needed."""
    settings = MATRIX[mode]
    calm = outcome(**settings)
    who = ["party-2", *(["server-1"] if settings.get("secure") in ("servers", "mpc") else [])]
    for name in who:
        for first in range(frames(settings, name)):
            result = outcome(**settings, transport=faulty([Fault(name, "outage", first=first, seconds=3600.0)]))
            np.testing.assert_allclose(result.params, calm.params, atol=1e-9)
            assert (result.privacy.releases, result.details["lost_rounds"]) == (calm.privacy.releases, 0)


@pytest.mark.parametrize("kind", ["restart", "restart-after"])
@pytest.mark.parametrize("settings", ALL, ids=label)
def test_a_party_killed_at_any_point_comes_back(
    settings: dict[str, Any], kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute, with its folder. A sum in the open costs nothing more; keys that died with the process cost
    a round if its question had left, and never more than that one."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    secure, short = settings["trust"] == "secure", {**settings, "algorithm": SHORT}
    calm = outcome(**short).params
    for first in range(1, frames(short, "party-2")):
        fault = Fault("party-2", kind, first=first, seconds=60.0)
        result = outcome(**short, spare=int(secure), transport=faulty([fault]), folder=tmp_path / f"{first}")
        np.testing.assert_allclose(result.params, calm, atol=1e-9)
        assert result.privacy.releases["gradient"] <= SHORT.steps + secure


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_who_stays_away_ends_the_run_by_name_with_nothing_asked_of_nobody(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Floats
) -> None:
    """The spare rounds are left as they were, and the run goes on when everybody is back."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    crash = Fault("party-2", "crash", first=asked(settings, 1) + (settings.get("secure") == "masks"))
    with pytest.raises(DropoutError, match=r"party-2.*continue") as caught:
        outcome(**settings, spare=3, transport=faulty([crash]), folder=tmp_path / "run")
    assert caught.value.missing == ["party-2"]  # and not those who could not go on without it
    result = outcome(**settings, spare=3, folder=tmp_path / "run")
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    assert result.privacy.releases["gradient"] <= STEPS + 1


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_quorum_completes_rounds_without_the_missing(settings: dict[str, Any]) -> None:
    """Noise is still enough: the plan priced a sum of three parties. The one who left comes back."""
    first = asked(settings, 1)

    plan, federation = assemble(ALGORITHM, Logistic(), people(), budget=None, seed=1, quorum=3, **settings)
    transport = Faulty(federation.handlers, [Fault("party-4", "outage", first, seconds=30.0)])
    curator = FederatedCurator(
        Logistic(), transport, seed=1, identity=federation.identity, roster=federation.roster
    )

    def slowly(progress: qg.Progress) -> None:
        transport.clock.sleep(10.0)

    result = train(ALGORITHM, curator, plan, np.zeros(3), callback=slowly)
    assert result.privacy.releases["gradient"] == STEPS
    assert any("party-4" in note for note in result.privacy.notes)
    gone = outcome(**settings, quorum=3, transport=faulty([Fault("party-4", "leave", first, last=10**6)]))
    assert gone.privacy.releases["gradient"] == STEPS
    assert not np.allclose(gone.params, result.params, atol=1e-9)


def test_a_quorum_that_could_open_no_sum_is_refused_in_plain_words() -> None:
    """Three of four parties must hold shares to open a secret of masks; servers need none of them."""
    with pytest.raises(ValueError, match="3 of 4 parties to open a sum"):
        outcome(trust="secure", secure="masks", quorum=2)
    assert outcome(trust="secure", secure="servers", quorum=2).privacy.releases["gradient"] == STEPS


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_a_revoked_party_is_left_out_whatever_carries_the_frames(settings: dict[str, Any]) -> None:
    """From the moment its name is on the list: no frame, no model."""
    plan, federation = assemble(ALGORITHM, Logistic(), people(), budget=None, seed=1, quorum=3, **settings)
    shut: dict[str, str] = {}
    transport = InProcess(federation.handlers)
    exchange = Exchange(transport, revoked=lambda: shut)
    curator = FederatedCurator(Logistic(), exchange, seed=1, identity=federation.identity, roster=federation.roster)

    def revoke(progress: qg.Progress) -> None:
        if progress.step == 2:
            shut["party-4"] = "its keys were stolen"

    before = transport._sites["party-4"]
    result = train(ALGORITHM, curator, plan, np.zeros(3), callback=revoke)
    assert result.details["lost_rounds"] == 0  # a quorum completed them all
    assert result.privacy.releases == {"gradient": STEPS}
    assert any("party-4 is revoked" in note for note in result.privacy.notes)
    answered = before.answered
    assert "party-4" not in exchange.finish("over", b"model")
    assert before.answered == answered
    assert not before.over


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
    result = simulate(ALGORITHM, Logistic(), parties, budget=BUDGET, noise_multiplier=9.0, spare=3, ledger=ledger)
    # Whether a round is lost is up to a member who has seen releases: spare rounds are not given back.
    assert result.privacy.events == events.gaussian(9.0, STEPS + 3)
    assert result.privacy.releases["gradient"] == STEPS
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
            transport=faulty([Fault("party-1", "crash", first=3)]),
        )  # fmt: skip
    for name in ("c", "0", "1", "2"):
        counted = Ledger(tmp_path / f"{name}.jsonl").book().counted("default")
        assert counted == [events.gaussian(9.0, STEPS)]


class Killed(BaseException):
    """As sudden as kill -9 is to the process: nothing gets to clean up."""


def killing(step: int) -> Callable[..., None]:
    def callback(progress: qg.Progress) -> None:
        if progress.step == step:
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

    def watching(progress: qg.Progress) -> None:
        seen.append(progress.params)
        if progress.step == 3:
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
    run(lambda progress: again.append(progress.params))
    assert [p.tolist() for p in again[:4]] == [p.tolist() for p in seen]
    for name in ("c", "0", "1", "2"):
        assert Ledger(tmp_path / f"{name}.jsonl").book().counted("default") == [events.gaussian(9.0, STEPS)]


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_a_round_that_the_kill_cut_short(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Floats
) -> None:
    """In the open the same question is asked again, and answered as before; a secure sum pays one round."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))

    def dying(data: Bytes) -> Bytes:
        message = decode(bytes(data))
        if message.kind == "ask" and message.fields["round"] == 3:
            raise Killed
        return federation.handlers["party-4"](data)

    secure = settings["trust"] == "secure"
    spare = int(secure)
    plan, federation = assemble(
        ALGORITHM, Logistic(), people(), budget=None, seed=1, spare=spare, folder=tmp_path, **settings
    )
    known: dict[str, Any] = {"identity": federation.identity, "roster": federation.roster, "folder": tmp_path}
    transport = InProcess({**federation.handlers, "party-4": dying})
    with pytest.raises(Killed):
        train(ALGORITHM, FederatedCurator(Logistic(), transport, seed=1, **known), plan, np.zeros(3))
    again = FederatedCurator(Logistic(), InProcess(federation.handlers), seed=1, **known)
    result = train(ALGORITHM, again, plan, np.zeros(3))
    np.testing.assert_allclose(result.params, undisturbed, atol=1e-9)
    assert STEPS <= result.privacy.releases["gradient"] <= STEPS + spare
    assert not any("stale" in note for note in result.privacy.notes)


def test_kept_run_of_another_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    with pytest.raises(Killed):
        outcome(folder=tmp_path / "run", callback=killing(2))
    with pytest.raises(DataError, match="another plan"):
        outcome(folder=tmp_path / "run", spare=1)


def test_party_that_forgot_its_fresh_records_is_refused() -> None:
    """Without a journal a restarted party could use a record twice, which a single pass must not."""
    objective = Logistic(row_bound=3.0, rows="clip")
    algorithm = qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(batch_size=20, difference_batch_size=4, kappa=0.3), chi=0.05, learning_rate=0.2
    )
    plan, federation = assemble(algorithm, objective, people(), budget=None, trust="curator", seed=1, spare=2)
    transport = InProcess(federation.handlers)

    def restart(progress: qg.Progress) -> None:
        if progress.step == 2:
            transport.replace("party-2", federation.again("party-2"))

    curator = FederatedCurator(objective, transport, seed=1)
    with pytest.raises(DropoutError, match="party-2 restarted without its journal"):
        train(algorithm, curator, plan, np.zeros(3), callback=restart)


@pytest.mark.parametrize("said", [None, "x", {}, True, 1e300])
def test_a_member_that_comes_back_with_nonsense_is_named(said: Any) -> None:
    algorithm = qg.DPSGD(steps=4, batch_size=20, sampling="single-pass")
    plan, federation = assemble(algorithm, Logistic(), people(), budget=None, trust="curator", seed=1)
    opened: list[Bytes] = []

    def lie(data: Bytes) -> Bytes:
        kind = decode(bytes(data)).kind
        if kind == "open":
            opened.append(data)
            if len(opened) > 1:
                return encode(Message("ready", {"round": said}))
        if kind == "ask" and len(opened) == 1:
            return encode(Message("refused", {"code": "stranger"}))
        return federation.handlers["party-1"](data)

    curator = FederatedCurator(Logistic(), InProcess({**federation.handlers, "party-1": lie}), seed=1)
    with pytest.raises(DropoutError, match="party-1 restarted, and says that it is ready"):
        train(algorithm, curator, plan, np.zeros(3))


@pytest.mark.parametrize("lie", ["another question", "a stranger who opens nothing"])
def test_a_member_cannot_keep_the_coordinator_asking(lie: str) -> None:
    """Simulated time stands still while members answer: without a limit this would never end."""
    plan, federation = assemble(ALGORITHM, Logistic(), people(), budget=None, trust="curator", seed=1, quorum=3)
    transport, heard = InProcess(federation.handlers), [0]
    honest = transport._sites["party-1"].answer

    def answer(frame: Bytes) -> Bytes:
        heard[0] += 1
        assert heard[0] < 1000
        kind, envelope = decode(body(frame)).kind if heard[0] > 1 else "", Envelope.of(frame)
        if not kind:
            return honest(frame)
        if lie == "another question":
            return envelope._replace(number=0).around(body(honest(frame)))
        return envelope.around(b"" if kind == "open" else encode(Message("refused", {"code": "stranger"})))

    transport._sites["party-1"].answer = answer  # type: ignore[method-assign]
    result = train(ALGORITHM, FederatedCurator(Logistic(), transport, seed=1), plan, np.zeros(3))
    assert any("party-1" in note for note in result.privacy.notes)


def test_a_server_out_of_step_in_the_noise_is_named() -> None:
    plan, federation = assemble(
        ALGORITHM, Logistic(), people(), budget=qg.Budget(1.0, 1e-5), trust="secure", secure="mpc"
    )

    def never_done(data: Bytes) -> Bytes:
        reply = federation.handlers["server-2"](data)
        done = decode(bytes(data)).kind == "noise" and not decode(bytes(reply)).arrays
        return encode(Message("noise", {}, {"frame": np.zeros(9, np.uint8)})) if done else reply

    transport = InProcess({**federation.handlers, "server-2": never_done})
    curator = FederatedCurator(Logistic(), transport, identity=federation.identity, roster=federation.roster)
    with pytest.raises(DropoutError, match="server-2: round 0 cannot begin: server-2 is out of step"):
        train(ALGORITHM, curator, plan, np.zeros(3))


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
