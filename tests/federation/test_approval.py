"""One approval is one run and costs what the plan costs, whatever a coordinator says."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.errors import BudgetError, DataError, LedgerError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.journal import Journal
from quietgrad.federation.party import Draw, PartyCurator, samplers
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.provisioning import provision
from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.simulation import InProcess, assemble, simulate, train
from quietgrad.federation.wire import Message
from quietgrad.tables.losses import Logistic
from tests.federation import talk
from tests.federation.talk import approval
from tests.federation.test_network import TWO

D, N, STEPS = 4, 30, 25
OBJECTIVE = Logistic()
BUDGET = qg.Budget(1.0, 1e-5)
Make = Callable[..., PartyCurator]


def plan_of(algorithm: Any = None, **settings: Any) -> FederatedPlan:
    settings = {"budget": BUDGET, "trust": "local", **settings}
    return federate(
        algorithm or qg.DPGD(steps=STEPS, clip=1.0), OBJECTIVE, names=["a", "b"], sizes=[N, N],
        shape=Shape(D, D), **settings,
    )  # fmt: skip


PLAN = plan_of(spare=2)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes party a, as often as it is started, in a folder or none, always with the same ledger."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    made: list[PartyCurator] = []

    def start(folder: str | None = "a", plan: FederatedPlan = PLAN, **settings: Any) -> PartyCurator:
        home = None if folder is None else tmp_path / folder
        data = (np.zeros((N, D)), np.arange(N) % 2)
        settings = {"ledger": tmp_path / "ledger.jsonl", **settings}
        made.append(PartyCurator("a", OBJECTIVE, data, plan, folder=home, **settings))
        return made[-1]

    yield start
    for party in made:
        party.close()


def say(party: PartyCurator, kind: str, run: str = "r1", **fields: Any) -> Message:
    return talk.say(party.handle, kind, run=run, plan=party.plan.digest, **fields)


def ask(party: PartyCurator, t: int, run: str = "r1") -> Message:
    return talk.ask(party.handle, GradientQuery(np.zeros(D), 1.0), run=run, round=t, draw=t)


def charged(folder: Path) -> list[Any]:
    return Ledger(folder / "ledger.jsonl").book().counted("default")


@pytest.mark.parametrize("folder", ["a", None], ids=["with a folder", "in memory"])
def test_coordinator_that_opens_run_after_run_gets_one(make: Make, folder: str | None, tmp_path: Path) -> None:
    """Twelve runs of 25 rounds are tried, through closes and restarts: what was approved is all that is given."""
    party, answers = make(folder), 0
    for k in range(12):
        reply = say(party, "open", f"run{k}")
        assert k == 0 or "one run was approved here" in reply.fields["reason"]
        answers += sum(ask(party, t, f"run{k}").kind == "sum" for t in range(STEPS))
        say(party, "close", f"run{k}")
        answers += sum(ask(party, t, "run0").kind == "sum" for t in range(STEPS, 2 * STEPS))
        if folder is not None:
            party.close()
            party = make(folder)
            assert say(party, "open", "run0").kind == "closed"
    assert answers == STEPS
    assert charged(tmp_path) == [PLAN.party_event(0, None)]


def test_restarted_party_continues_its_run_under_one_entry(make: Make, tmp_path: Path) -> None:
    party = make()
    say(party, "open")
    assert ask(party, 0).kind == "sum"
    party.close()
    party = make()
    assert ask(party, 1).fields["code"] == "stranger"
    assert say(party, "open", "r2").fields["code"] == "plan"
    assert say(party, "open").fields["round"] == 0
    assert ask(party, 0).kind == "sum"  # the very answer that it gave before
    assert ask(party, 1).kind == "sum"
    assert ask(party, 0).kind == "refused"
    assert len(charged(tmp_path)) == 1


def test_coordinator_cannot_point_at_what_paid_for_another_run(make: Make, tmp_path: Path) -> None:
    """A second approval whose run has the name of the first, and a kill before it is paid."""
    first = make("one")
    say(first, "open")
    ask(first, 0)
    journal = Journal(tmp_path / "two", "a", PLAN.digest)
    journal.bind("r1")
    journal.close()
    second = make("two")
    say(second, "open")
    assert ask(second, 0).kind == "sum"
    assert len(charged(tmp_path)) == 2


def test_second_process_of_a_party_is_refused_by_name(make: Make) -> None:
    party = make()
    with pytest.raises(DataError, match="another process answers for a"):
        make()
    party.close()
    make()


def test_second_coordinator_on_a_folder_is_refused(tmp_path: Path) -> None:
    plan, federation = assemble(
        qg.DPGD(steps=2), OBJECTIVE, people(), budget=None, trust="curator", folder=tmp_path / "parties"
    )
    transport = InProcess(federation.handlers)
    first, second = (FederatedCurator(OBJECTIVE, transport, folder=tmp_path) for _ in range(2))
    session = first.open(plan)
    with pytest.raises(DataError, match="another process coordinates this run"):
        second.open(plan)
    session.store.close()
    federation.close()


def people(n: int = N) -> list[Party]:
    rng = np.random.default_rng(0)
    return [Party(rng.normal(size=(n, D)), np.arange(n) % 2, name=name) for name in ("a", "b")]


def test_two_processes_of_a_party_have_no_noise_in_common(make: Make, tmp_path: Path) -> None:
    """A copied folder gets past the lock: same run, same round, and still the difference is noise.

    The records are zero, so each answer is noise alone; 10⁻⁹ is far below the chance of two equal draws.
    """
    party = make("one")
    say(party, "open")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    twin = make("two")
    say(twin, "open")
    answers = [ask(each, 0).arrays["total"] for each in (party, twin)]
    assert all(np.abs(answer).min() > 0.0 for answer in answers)
    assert not set(answers[0]) & set(answers[1])


def test_fresh_records_stay_used_when_the_keys_folder_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Party a restarts in mid-run and has lost all but its own folder: no record takes part twice.

    Batches of 120 and 40 are shared at random with b; a gets none of one with probability below 10⁻¹².
    """
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    used: list[int] = []

    def watched(plan: FederatedPlan, place: int, *rest: Any) -> dict[str, Draw]:
        def watch(draw: Draw) -> Draw:
            def drawn(number: int) -> Any:
                found = draw(number)
                used.extend([] if place or found is None else found.tolist())
                return found

            return drawn

        return {slot: watch(draw) for slot, draw in samplers(plan, place, *rest).items()}

    monkeypatch.setattr("quietgrad.federation.party.samplers", watched)
    objective = Logistic(row_bound=3.0, rows="clip")
    algorithm = qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(batch_size=120, difference_batch_size=40, kappa=0.3), chi=0.05, learning_rate=0.2
    )
    plan, federation = assemble(
        algorithm, objective, people(300), budget=None, trust="curator", spare=2, folder=tmp_path / "run"
    )
    transport = InProcess(federation.handlers)
    before = 0

    def lose(progress: qg.Progress) -> None:
        nonlocal before
        if progress.step == 3:
            before = len(used)
            shutil.rmtree(tmp_path / "state", ignore_errors=True)
            transport.replace("a", federation.again("a"))

    train(algorithm, FederatedCurator(objective, transport), plan, np.zeros(D), callback=lose)
    federation.close()
    assert 0 < before < len(used)
    assert len(used) == len(set(used))


def test_party_does_not_believe_that_a_stop_was_data_independent(make: Make, tmp_path: Path) -> None:
    party = make()
    say(party, "open")
    for t in range(3):
        ask(party, t)
    assert say(party, "close", reason="steps", data_dependent=False).kind == "closed"
    assert charged(tmp_path) == [PLAN.party_event(0, None)]


@pytest.mark.parametrize("end", ["close", "withdraw", "restart and withdraw"])
def test_run_that_asked_nothing_costs_nothing(make: Make, tmp_path: Path, end: str) -> None:
    party = make()
    say(party, "open")
    assert len(charged(tmp_path)) == 1
    if end == "close":
        say(party, "close")
        assert ask(party, 0).kind == "refused"
    elif end.startswith("restart"):
        party.close()
        party = make()
    assert party.withdraw()
    assert charged(tmp_path) == []
    assert say(party, "open", "r2").kind == "ready"  # the approval was not used


def test_refusal_of_one_party_costs_the_others_nothing(tmp_path: Path) -> None:
    first, second = people()
    poor = Party(first.X, first.y, name="a", ledger=tmp_path / "poor.jsonl", cap=qg.Budget(0.1, 1e-5))
    other = Party(second.X, second.y, name="b", ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(ProtocolError, match=r"a: refuses.*cap"):
        simulate(qg.DPGD(steps=2), OBJECTIVE, [poor, other], budget=BUDGET, folder=tmp_path / "run")
    assert charged(tmp_path) == []
    assert not (tmp_path / "run" / "aggregates.bin").exists()


def test_full_disk_gives_nothing_and_spoils_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    party = make()
    say(party, "open")
    ask(party, 0)
    write = os.write

    def full(file: int, data: bytes) -> int:
        write(file, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("quietgrad.core.ledger.log.os.write", full)
        assert "ENOSPC" in ask(party, 1).fields["reason"]
    assert ask(party, 1).kind == "sum"
    party.close()
    party = make()
    assert say(party, "open").fields["round"] == 1


@pytest.mark.parametrize(
    "text", ["{}\n", "[]\n", "nonsense\n", '{"plan": "x", "run": "r", "entry": "e", "key": "00"}\n']
)
def test_damaged_journal_is_refused(make: Make, tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.journal").write_text(text)
    with pytest.raises(LedgerError, match="what was answered is unknown"):
        make()


def test_default_cap_is_what_the_plan_costs(tmp_path: Path) -> None:
    keys = provision(["coordinator", "a", "b"], tmp_path / "keys", {})[1]

    def approve(folder: str, **settings: Any) -> PartyCurator:
        mine = approval(TWO, keys, tmp_path / folder, ledger=str(tmp_path / "ledger.jsonl"), **settings)
        return mine.party((np.zeros((60, 3)), np.arange(60) % 2))

    party = approve("one")
    assert say(party, "open").kind == "ready"
    party.close()
    with pytest.raises(BudgetError, match="Cap: ε=1 "):
        approve("two")
    approve("two", cap_epsilon=3.0).close()
    Ledger(tmp_path / "ledger.jsonl").set_cap("default", qg.Budget(2.0, 1e-5))
    approve("two").close()  # whoever keeps the ledger has decided
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "result.json").write_text("{}")
    with pytest.raises(DataError, match="holds a finished run"):
        approve("three")


def test_a_party_that_restarts_with_its_records_in_another_order_is_refused_in_a_single_pass(
    make: Make, tmp_path: Path
) -> None:
    """Somebody who was used would have the place of one who was not yet, and be used twice."""
    plan = plan_of(qg.DPSGD(steps=6, batch_size=10, sampling="single-pass"))
    party = make(plan=plan)
    say(party, "open")
    party.close()
    data = np.zeros((N, D)), np.arange(N) % 2
    turned = data[0], data[1][::-1].copy()
    party = PartyCurator("a", OBJECTIVE, turned, plan, folder=tmp_path / "a", ledger=tmp_path / "ledger.jsonl")
    say(party, "open")  # before the first round nothing was used, and any order will do
    assert ask(party, 0).kind == "sum"
    party.close()
    with pytest.raises(DataError, match="the records, or their order"):
        make(plan=plan)
    party = PartyCurator("a", OBJECTIVE, turned, plan, folder=tmp_path / "a", ledger=tmp_path / "ledger.jsonl")
    say(party, "open")
    assert ask(party, 1).kind == "sum"
    party.close()
