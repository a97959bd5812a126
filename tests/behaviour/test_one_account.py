"""One door, one price, one account: whatever bypassed one of them once has a test here that it no longer can."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import BudgetError, DataError, LedgerError, LedgerWarning, UnprovableError
from quietgrad.core.ledger import log as append_log
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.state import COUNTED
from quietgrad.core.noise import mechanisms
from quietgrad.core.noise.rng import seed_key
from quietgrad.core.plans.schedule import Plan, Slot
from quietgrad.core.plans.schedule import plan as make_plan
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.queries import GradientQuery
from quietgrad.core.session.transcript import Transcript
from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch
from quietgrad.federation import Party, simulate
from tests.methods.common import Killed, dies, objective, problem

Floats = npt.NDArray[np.float64]
BUDGET = qg.Budget(1.0, 1e-5)
N = 300


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


# --- one account ----------------------------------------------------------------------------------------------


def open_run(path: Path, plan: Plan, run: str, **more: Any) -> CentralSession:
    X, y = problem(N)
    return CentralCurator(objective(), (X, y), ledger=path, account="people", run=run, key=seed_key(1)).open(
        plan, **more
    )


def test_a_reservation_pays_for_its_own_plan_only(tmp_path: Path) -> None:
    cheap = qg.plan(qg.DPGD(steps=1), n=N, budget=qg.Budget(0.1, 1e-5))
    dear = qg.plan(qg.DPGD(steps=50), n=N, budget=qg.Budget(50.0, 1e-5))
    ledger = tmp_path / "ledger.jsonl"
    log = Transcript(tmp_path / "transcript", "run", seed_key(1))
    open_run(ledger, cheap, "run", transcript=log)
    log.close()
    again = Transcript(tmp_path / "transcript", "run", seed_key(1), resumed=True)
    with pytest.raises(BudgetError, match="another plan"):
        open_run(ledger, dear, "run", transcript=again)
    again.close()
    # Without the private transcript a name opens nothing: the plan is charged as what it is.
    open_run(ledger, dear, "run")
    assert qg.Ledger(ledger).spent("people", delta=1e-5, relation="add-remove").epsilon > 49.0


@pytest.mark.parametrize("front", ["minimize", "estimator", "party", "torch"])
def test_one_table_under_two_accounts_is_told_everywhere(front: str, tmp_path: Path) -> None:
    X, y = problem(N)
    ledger = tmp_path / "ledger.jsonl"

    def run(account: str) -> None:
        if front == "minimize":
            qg.minimize(objective(), (X, y), qg.DPGD(steps=1), budget=BUDGET, ledger=ledger, account=account)
        elif front == "estimator":
            PrivateLogisticRegression(classes=[0, 1], row_bound=1.0, ledger=ledger, account=account).fit(X, y)
        elif front == "party":
            simulate(qg.DPGD(steps=1), objective(), [Party(X, y, ledger=ledger, account=account)], budget=BUDGET)
        else:
            torch = pytest.importorskip("torch")
            import quietgrad.torch as qt

            model = torch.nn.Linear(X.shape[1], 2)
            loss = torch.nn.CrossEntropyLoss(reduction="none")
            data = (torch.tensor(X, dtype=torch.float32), torch.tensor(y).long())
            algorithm = qg.DPSGD(steps=1, batch_size=10)
            qt.fit(model, loss, data, algorithm, budget=BUDGET, ledger=ledger, account=account, progress=False)

    run("patients")
    with pytest.warns(LedgerWarning, match="charged to account 'patients' before"):
        run("customers")


def test_closing_is_idempotent_and_names_are_not_reused_for_more(tmp_path: Path) -> None:
    account = Account("people", tmp_path / "ledger.jsonl")
    charge = account.reserve(Cost.of(events.Gaussian(2.0), BUDGET), run="r")
    for _ in range(2):
        assert charge.close(events.Gaussian(2.0), reason="done", data_dependent=False) == events.Gaussian(2.0)
    found = account.reopen(Cost.of(events.Gaussian(2.0), BUDGET), run="r")
    assert found is not None
    assert found.paid
    with pytest.raises(BudgetError, match="another plan"):
        account.reopen(Cost.of(events.Gaussian(1.0), BUDGET), run="r")


# --- one mechanism per slot -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism",
    [
        mechanisms.GaussianNoise(),
        mechanisms.L2LaplaceNoise(),
        mechanisms.ExponentialMechanism(),
        mechanisms.AboveThreshold(),
        mechanisms.GaussianPartitionSelection(1e-9),
    ],
)
def test_a_mechanism_is_read_back_and_prices_itself(mechanism: mechanisms.Mechanism) -> None:
    slot = Slot("s", FullBatch(), 3, mechanism=mechanism, fixed=2.0)
    assert Slot.from_json(json.loads(json.dumps(slot.to_json()))) == slot
    assert slot.event(7.0, BUDGET.relation) == slot.event(1.0, BUDGET.relation)  # a fixed look keeps its noise
    for altered in ("gauss", {"kind": "labels"}, {"kind": "gaussian", "scale": 0.1}, None, 3):
        with pytest.raises(ValueError, match="mechanism="):
            mechanisms.from_json(altered)


def test_looks_share_the_plan_the_session_and_the_budget() -> None:
    look = Slot("targets", FullBatch(), fixed=20.0)
    plan = make_plan(qg.DPGD(steps=5), n=N, budget=BUDGET, looks=(look,))
    assert [slot.name for slot in plan.schedule.slots] == ["targets", "gradient"]
    assert plan.epsilon() <= 1.0
    alone = qg.plan(qg.DPGD(steps=5), n=N, budget=BUDGET)
    assert plan.noise_multiplier > alone.noise_multiplier
    with pytest.raises(ValueError, match="cannot share"):
        make_plan(qg.DPAGD(), n=N, budget=BUDGET, looks=(look,))


def test_labels_and_search_scores_leave_through_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they add is what the slot's mechanism adds: without its noise both give exact answers."""
    X, y = problem(4000)
    asked: list[tuple[str, float]] = []
    passing, add = mechanisms._LabelSource.passing, mechanisms._GaussianSource.add

    def seen_passing(self: Any, counts: Floats, release: int, multiplier: float, bound: float) -> Any:
        asked.append(("labels", multiplier))
        return passing(self, counts, release, multiplier, bound)

    def seen_add(self: Any, total: Floats, release: int, multiplier: float, bound: float) -> None:
        asked.append(("sum", multiplier))
        add(self, total, release, multiplier, bound)

    monkeypatch.setattr(mechanisms._LabelSource, "passing", seen_passing)
    monkeypatch.setattr(mechanisms._GaussianSource, "add", seen_add)
    model = PrivateLogisticRegression(epsilon=4.0, row_bound=1.0).fit(X, y)
    assert [what for what, _ in asked[:2]] == ["sum", "labels"]  # the count, and the look
    assert model.privacy_.releases["labels"] == 1
    asked.clear()
    declared = PrivateLogisticRegression(classes=[0, 1], row_bound=1.0, n_public=len(X))
    search = PrivateSearch(declared, {"regularization": [0.0]}, epsilon=4.0, mean_rounds=2.0).fit(X, y)
    event = search.best_estimator_.privacy_.events
    assert isinstance(event, events.RepeatAndSelect)
    assert isinstance(event.inner, events.Gaussian)
    assert ("sum", event.inner.noise_multiplier) in asked  # the score of a round
    assert qg.account(event.inner, delta=1e-5, relation="add-remove") <= 4.0


def test_a_round_that_costs_more_than_its_search_paid_for_is_refused() -> None:
    X, y = problem(N)
    whole = Account().reserve(Cost.of(events.RepeatAndSelect(events.Gaussian(20.0), 5.0), BUDGET))
    plan = qg.plan(qg.DPGD(steps=3), n=N, budget=qg.Budget(8.0, 1e-5))
    with pytest.raises(UnprovableError, match="round of a search"):
        CentralCurator(objective(), (X, y)).open(plan, within=whole)


# --- replay is by content -------------------------------------------------------------------------------------


PLAN = qg.plan(qg.DPGD(steps=6), n=N, budget=BUDGET)


def replaying(
    tmp_path: Path, X: Floats, y: Floats, *, used: int = 0, run: str = "run"
) -> tuple[CentralSession, Transcript]:
    path = tmp_path / "transcript"
    log = Transcript(path, run, seed_key(3), resumed=(tmp_path / "ledger.jsonl").exists())
    curator = CentralCurator(
        objective(), (X, y), ledger=tmp_path / "ledger.jsonl", account="people", run=run, key=seed_key(3)
    )
    return curator.open(PLAN, transcript=log, used={"gradient": used}), log


def ask(door: CentralSession, at: float = 0.0) -> Floats:
    answer = door.release("gradient", GradientQuery(np.full(6, at), 1.0))
    assert isinstance(answer, np.ndarray)
    return answer


def entries(tmp_path: Path) -> int:
    """How often runs were charged, besides for counting their records."""
    held = qg.Ledger(tmp_path / "ledger.jsonl").book().held.values()
    return sum(not each.reservation.run.endswith(COUNTED) for each in held)


def test_the_same_question_again_is_the_same_answer_and_free(tmp_path: Path) -> None:
    X, y = problem(N)
    door, log = replaying(tmp_path, X, y)
    first = [ask(door, at) for at in (0.0, 0.1, 0.2)]
    log.close()  # killed after the third; the checkpoint is of the first
    door, log = replaying(tmp_path, X, y, used=1)
    assert np.array_equal(ask(door, 0.1), first[1])
    assert np.array_equal(ask(door, 0.2), first[2])
    ask(door, 0.3)
    assert door.epochs == entries(tmp_path) == 1
    log.close()


@pytest.mark.parametrize("edit", ["query", "data", "noise scale"])
def test_another_question_gets_fresh_noise_and_a_new_charge(edit: str, tmp_path: Path) -> None:
    X, y = problem(N)
    door, log = replaying(tmp_path, X, y)
    before = [ask(door, at) for at in (0.0, 0.1)]
    log.close()
    changed = X.copy()
    changed[0] *= -1.0
    door, log = replaying(tmp_path, changed if edit == "data" else X, y, used=1)
    clip = 1.0 if edit != "noise scale" else 0.5
    after = np.asarray(door.release("gradient", GradientQuery(np.full(6, 0.1 if edit == "data" else 0.4), clip)))
    # Were the noise the same, the difference would be that of the sums: a few units against noise of tens.
    assert np.abs(after - before[1]).max() > 5.0
    assert door.epochs == entries(tmp_path) == 2
    spent = qg.Ledger(tmp_path / "ledger.jsonl").spent("people", delta=1e-5, relation="add-remove")
    assert spent.epsilon == pytest.approx(
        qg.account(events.composed([PLAN.event, PLAN.event]), delta=1e-5, relation="add-remove")
    )
    log.close()
    # Interrupted once more, the run goes on in its new epoch, and what it released there is replayed for free.
    door, log = replaying(tmp_path, changed if edit == "data" else X, y, used=1)
    again = np.asarray(door.release("gradient", GradientQuery(np.full(6, 0.1 if edit == "data" else 0.4), clip)))
    assert np.array_equal(again, after)
    assert door.epochs == entries(tmp_path) == 2
    closed = door.close("steps")
    assert closed.event == events.Composed((PLAN.event, PLAN.event))
    log.close()


def test_after_a_power_cut_what_is_missing_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = problem(N)
    door, log = replaying(tmp_path, X, y)
    first = [ask(door, at) for at in (0.0, 0.1)]
    log.close()
    path = tmp_path / "transcript"
    opening, one, *_ = path.read_text().splitlines()
    path.write_text("\n".join([opening, one]) + "\n")
    monkeypatch.setattr(append_log, "_boot", lambda: "another start")
    monkeypatch.setattr(append_log, "_NEAR", math.inf)
    door, log = replaying(tmp_path, X, y)
    assert np.array_equal(ask(door, 0.0), first[0])  # known by content
    second = ask(door, 0.1)
    assert not np.array_equal(second, first[1])  # nobody can tell whether it was released
    assert door.epochs == entries(tmp_path) == 2
    log.close()
    for _ in range(3):  # the new epoch is of this start: nothing more is charged for going on
        door, log = replaying(tmp_path, X, y, used=1)
        assert np.array_equal(ask(door, 0.1), second)
        assert door.epochs == entries(tmp_path) == 2
        log.close()


def test_a_transcript_that_is_missing_is_not_an_empty_one(tmp_path: Path) -> None:
    X, y = problem(N)
    door, log = replaying(tmp_path, X, y)
    first = ask(door)
    log.close()
    (tmp_path / "transcript").unlink()
    door, log = replaying(tmp_path, X, y)
    assert not np.array_equal(ask(door), first)  # were it, another question would have got the same noise
    assert door.epochs == entries(tmp_path) == 2
    log.close()


def test_a_filter_keeps_what_a_dead_process_spent(tmp_path: Path) -> None:
    X, y = problem(N)
    algorithm = qg.DPAGD(splits=4)
    options: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl", "folder": tmp_path / "run"}

    def stops(progress: qg.Progress) -> None:
        progress.stop()

    with pytest.raises(Killed):
        qg.minimize(
            objective(), (X, y), algorithm, budget=BUDGET, callback=dies(3), checkpoint_seconds=1e9, **options
        )
    result = qg.resume(objective(), (X, y), algorithm, callback=stops, **options)
    assert result.privacy.epsilon == pytest.approx(1.0, rel=2e-3)
    ledger = qg.Ledger(tmp_path / "ledger.jsonl")
    assert ledger.spent("default", delta=1e-5, relation="add-remove").epsilon == pytest.approx(1.0, rel=2e-3)


def test_the_chosen_model_of_a_search_pays_for_its_later_fits(tmp_path: Path) -> None:
    X, y = problem(2000)
    ledger = tmp_path / "ledger.jsonl"
    model = PrivateLogisticRegression(classes=[0, 1], row_bound=1.0, n_public=len(y))
    search = PrivateSearch(model, {"regularization": [0.0, 0.1]}, epsilon=2.0, ledger=ledger).fit(X, y)
    assert entries(tmp_path) == 1
    search.best_estimator_.fit(X, y)
    assert entries(tmp_path) == 2
    over = Account().reserve(Cost.of(events.RepeatAndSelect(events.Gaussian(20.0), 5.0), BUDGET))
    over.close(None, reason="over", data_dependent=False)
    with pytest.raises(BudgetError, match="is closed"):
        over.part(events.Gaussian(40.0), BUDGET)


def test_threads_share_no_noise() -> None:
    X, y = problem(N)
    door = CentralCurator(objective(), (X, y)).open(qg.plan(qg.DPGD(steps=400), n=N, budget=BUDGET))
    heard: list[Floats] = []

    def listen() -> None:
        heard.extend(ask(door) for _ in range(100))

    threads = [threading.Thread(target=listen) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.tobytes() for answer in heard}) == 400


def test_a_session_does_not_go_back() -> None:
    X, y = problem(N)
    door = CentralCurator(objective(), (X, y)).open(PLAN)
    ask(door)
    with pytest.raises(BudgetError, match="reuse their noise"):
        door.advance({"gradient": 0}, None)


def test_copies_of_a_folder_share_one_transcript(tmp_path: Path) -> None:
    """Whoever resumes two copies of an interrupted run on different tables gets fresh noise and two charges."""
    X, y = problem(N)
    algorithm = qg.DPGD(steps=8)
    options: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl"}
    begun = tmp_path / "run"

    with pytest.raises(Killed):
        qg.minimize(objective(), (X, y), algorithm, budget=BUDGET, folder=begun, callback=dies(4), **options)
    shutil.copytree(begun, tmp_path / "copy")
    changed = X.copy()
    changed[7] = -changed[7]

    with pytest.raises(Killed):
        qg.resume(objective(), (X, y), algorithm, folder=begun, callback=dies(6), **options)
    result = qg.resume(objective(), (changed, y), algorithm, folder=tmp_path / "copy", **options)
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon > 1.2
    assert entries(tmp_path) == 2


def test_two_processes_cannot_hold_one_run(tmp_path: Path) -> None:
    log = Transcript(tmp_path / "transcript", "run", seed_key(3))
    with pytest.raises(DataError, match="another process"):
        Transcript(tmp_path / "transcript", "run", seed_key(3))
    log.close()
    with pytest.raises(LedgerError, match="has begun already"):
        Transcript(tmp_path / "transcript", "run", seed_key(3))
    with pytest.raises(LedgerError, match="another run"):
        Transcript(tmp_path / "transcript", "other", seed_key(3), resumed=True)
    (tmp_path / "transcript").write_text("nonsense\n")
    with pytest.raises(LedgerError, match="altered"):
        Transcript(tmp_path / "transcript", "run", seed_key(3), resumed=True)
    assert ((tmp_path / "transcript").stat().st_mode & 0o077) == 0


def test_resume_with_another_table_is_charged_again_and_says_so(tmp_path: Path) -> None:
    X, y = problem(N)
    algorithm = qg.DPGD(steps=30)

    options: dict[str, Any] = {"folder": tmp_path / "run", "ledger": tmp_path / "ledger.jsonl"}
    with pytest.raises(Killed):
        qg.minimize(
            objective(), (X, y), algorithm, budget=BUDGET, callback=dies(20), checkpoint_seconds=1e9, **options
        )
    changed = X.copy()
    changed[7] = -changed[7]
    told: list[float | None] = []
    result = qg.resume(
        objective(), (changed, y), algorithm, callback=lambda progress: told.append(progress.epsilon), **options
    )
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon > 1.2
    assert told[-1] == pytest.approx(result.privacy.epsilon)  # trackers and bars show what it costs
    assert "charged again" in result.privacy.notes[0]
    assert entries(tmp_path) == 2
    assert not list(KeyFile.directory().iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model.safetensors", "result.json"]


# --- one process ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of newer Pythons
def test_a_forked_child_never_draws_its_parents_noise() -> None:
    X, y = problem(N)
    curator = CentralCurator(objective(), (X, y))
    door = curator.open(PLAN)
    ours = ask(door)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ask(door)
            os.write(write, b"drew the same noise")
        except BudgetError:
            os.write(write, ask(curator.open(PLAN)).tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(read, 4096))
    second = ask(curator.open(PLAN))
    assert theirs.shape == ours.shape
    assert np.abs(theirs - ours).min() > 1e-6
    assert np.abs(theirs - second).min() > 1e-6


def test_doors_are_not_copied() -> None:
    X, y = problem(N)
    curator = CentralCurator(objective(), (X, y))
    for one in (curator, curator.open(PLAN)):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="same noise"):
                copied(one)
