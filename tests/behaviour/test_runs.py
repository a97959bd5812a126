"""A run is a folder: what it says is sealed, its own ledger pays, and nothing else has to be said again."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.certificates import check, issue
from quietgrad.cli import main
from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.errors import BudgetError, DataError, LedgerError, UnprovableError
from quietgrad.core.ledger import chain
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.ledger import Ledger, project_ledger
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.session import checkpoint
from quietgrad.core.session.kept import FILE, is_kept, open_run
from quietgrad.core.session.session import CentralSession
from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch, from_run, private_score, to_run
from quietgrad.federation import Party, simulate
from quietgrad.objectives import L2, Huber, Logistic
from tests.behaviour.kept_runs import BUDGET, OnceRun, PartyRun, TableRun, World, rows
from tests.methods.common import ROWS, objective, problem

METHODS = [qg.DPGD(steps=6), qg.DPSGD(steps=6, batch_size=20)]


class Killed(Exception):
    """The process dies."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(
    folder: Path, method: Any = METHODS[0], *, after: int = 3, objective: Any = None, **settings: Any
) -> None:
    """A run that died after a few steps."""

    def dies(progress: Any) -> None:
        if progress.step == after:
            raise Killed

    with pytest.raises(Killed):
        qg.minimize(
            objective or Logistic(), rows(0), method, budget=BUDGET, folder=folder, callback=dies,
            checkpoint_seconds=0.0, n_public=60, **settings,
        )  # fmt: skip


def fit(data: int, **settings: Any) -> qg.Result:
    """A run in memory on a table whose number of records is public."""
    return qg.minimize(Logistic(), rows(data), METHODS[0], **{"budget": BUDGET, "n_public": 60, **settings})


# --- what a folder says is sealed -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "change",
    [
        {"plan": {"noise_multiplier": 20.0}},
        {"plan": {"budget": None, "event": None}},
        {"plan": {"n_public": 6000}},
        {"ledger": "elsewhere.jsonl"},
        {"cap": None},
    ],
    ids=str,
)
def test_an_altered_header_is_refused(method: Any, change: dict[str, Any], tmp_path: Path) -> None:
    begun(tmp_path / "run", method)
    path = tmp_path / "run" / FILE
    name, content = checkpoint.load(path, KeyFile.load)
    header = json.loads(content["header"])
    header |= {**change, "plan": {**header["plan"], **change.get("plan", {})}}
    checkpoint.save(path, name, {**content, "header": json.dumps(header)}, bytes(32))
    with pytest.raises(DataError, match="was altered"):
        qg.resume(folder=tmp_path / "run", data=rows(0))


# --- its own ledger pays ----------------------------------------------------------------------------------------


def test_the_ledger_in_the_folder_pays_whoever_resumes(tmp_path: Path) -> None:
    """Two charges of ε = 1 are 1.46 together: the cap of 1.2 refuses the second, though nobody names the ledger."""
    book = tmp_path / "ledger.jsonl"
    begun(tmp_path / "run", ledger=book, account="people", cap=qg.Budget(1.2, 1e-5))
    with pytest.raises(BudgetError, match=r"ε=1\.2"):
        qg.resume(folder=tmp_path / "run", data=rows(1))
    assert Ledger(book).spent("people", delta=1e-5, relation="add-remove").epsilon < 1.0
    result = qg.resume(folder=tmp_path / "run", data=rows(0))
    assert result.privacy.epsilon == pytest.approx(1.0, rel=1e-3)
    assert result.privacy.account == "people"
    assert [entry.kind for entry in Ledger(book).entries()] == ["open", "reserve", "resume", "resume", "close"]


def test_without_its_ledger_nothing_goes_on(tmp_path: Path) -> None:
    book = tmp_path / "ledger.jsonl"
    begun(tmp_path / "run", ledger=book)
    (tmp_path / "moved").mkdir()
    for file in ("ledger.jsonl", "ledger.jsonl.head"):
        shutil.move(tmp_path / file, tmp_path / "moved" / file)
    with pytest.raises(BudgetError, match="does not exist"):
        qg.resume(folder=tmp_path / "run", data=rows(0))
    assert Ledger(tmp_path / "other.jsonl").id
    with pytest.raises(BudgetError, match="another id"):
        qg.resume(folder=tmp_path / "run", data=rows(0), ledger=tmp_path / "other.jsonl")
    qg.resume(folder=tmp_path / "run", data=rows(0), ledger=tmp_path / "moved" / "ledger.jsonl")
    assert len(Ledger(tmp_path / "moved" / "ledger.jsonl").book().held) == 1


@pytest.mark.filterwarnings("ignore::quietgrad.core.errors.LedgerWarning")
@pytest.mark.parametrize("kind", [TableRun, OnceRun])
def test_older_files_that_are_copied_back_pay_again(kind: type[World], tmp_path: Path) -> None:
    """``cp`` of an older checkpoint and transcript, into the same files, three times: no noise is used again."""
    world = kind(tmp_path / "machine")
    world.go(0, kill=4, look=2, saved=True)
    for data in (1, 0, 1):
        time.sleep(0.03)
        assert world.snapshot is not None
        for path, content in world.snapshot.items():
            if not path.name.startswith("ledger"):
                path.write_bytes(content)
        world.go(data, kill=4, saved=True)
    world.go(0)
    world.check()
    assert world.witness.epochs() >= 3


def test_a_party_whose_folder_is_put_back_pays_again(tmp_path: Path) -> None:
    world = PartyRun(tmp_path / "machine")
    world.go(0, kill=5, look=2)
    time.sleep(0.03)
    assert world.snapshot is not None
    for path, content in world.snapshot.items():
        path.write_bytes(content)  # journal, key and ledger, as a backup has them
    world.go(0)
    assert max(world.witness.answers.values()) == 2
    assert world.charges() == 2


# --- nothing else has to be said --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in ROWS if row.algorithm.private][::3], ids=lambda row: row.name)
def test_a_folder_and_data_are_enough(row: Any, tmp_path: Path) -> None:
    data = problem()

    def dies(progress: Any) -> None:
        if progress.step:
            raise Killed

    with pytest.raises(Killed):
        qg.minimize(objective(), data, row.algorithm, budget=row.budget, folder=tmp_path / "run", callback=dies)
    result = qg.resume(folder=tmp_path / "run", data=data)
    assert result.algorithm == row.name
    assert result.privacy.epsilon <= row.budget.epsilon


def test_what_is_given_beside_a_folder_must_agree(tmp_path: Path) -> None:
    book = tmp_path / "ledger.jsonl"
    loss = Huber(regularizer=L2(0.1), row_bound=2.0, threshold=0.5)
    begun(tmp_path / "run", objective=loss, ledger=book, account="people", cap=qg.Budget(5.0, 1e-5))
    for what, given in (
        ("account", {"account": "others"}),
        ("cap", {"cap": qg.Budget(9.0, 1e-5)}),
        ("algorithm", {"algorithm": qg.DPGD(steps=7)}),
        ("objective", {"objective": Huber(threshold=0.7)}),
    ):
        with pytest.raises(DataError, match=f"another {what}"):
            qg.resume(folder=tmp_path / "run", data=rows(0), **given)
    with pytest.raises(ValueError, match="data: must be given"):
        qg.resume(folder=tmp_path / "run")
    with pytest.raises(DataError, match="unfinished table run"):
        open_run(tmp_path / "run", kind="loop")
    again = qg.resume(
        loss, rows(0), METHODS[0], folder=tmp_path / "run", account="people", cap=qg.Budget(5.0, 1e-5), ledger=book
    )
    assert again.privacy.epsilon == pytest.approx(1.0, rel=1e-3)


def test_a_loss_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    class Mine(Logistic):
        pass

    begun(tmp_path / "run", objective=Mine())
    with pytest.raises(DataError, match="give it as objective="):
        qg.resume(folder=tmp_path / "run", data=rows(0))
    assert qg.resume(folder=tmp_path / "run", data=rows(0), objective=Mine()).privacy.is_private


# --- the project's ledger ---------------------------------------------------------------------------------------


def accounts() -> dict[str, int]:
    """How many runs each account of the project's ledger has."""
    book = project_ledger().book()
    return {name: len(book.counted(name)) for name in book.accounts()}


def test_runs_on_one_table_add_up_and_others_do_not(tmp_path: Path) -> None:
    for data in (0, 0, 1):
        fit(data)
    PrivateLogisticRegression(classes=[0, 1], row_bound=2.0, inference=False, relation="replace-one").fit(*rows(0))
    fit(0, seed=1)  # promises nobody anything
    fit(0, budget=None)
    assert sorted(accounts().values()) == [1, 3]
    assert all(name.startswith("table ") for name in accounts())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error")  # yet a ledger that nobody asked for never makes a fit fail
        fit(0, account="patients")
    assert told
    assert accounts()["patients"] == 1


@pytest.mark.parametrize("by_person_first", [False, True])
def test_an_account_has_one_privacy_unit_and_no_name_is_derived(by_person_first: bool) -> None:
    """A cap that ran by person holds by record too: the other unit is refused, not charged under another name."""
    ids = np.arange(60) // 2
    first, second = (ids, None) if by_person_first else (None, ids)
    fit(2, account="patients", person=first)
    with pytest.raises(BudgetError, match="do not add up"):
        fit(2, account="patients", person=second)
    assert set(accounts()) == {"patients"}


def test_a_table_without_an_account_has_one_name_and_no_common_total_of_two_units() -> None:
    ids = np.arange(60) // 2
    fit(2)
    fit(2, person=ids)
    (name,) = accounts()
    with pytest.raises(UnprovableError, match="do not add up"):
        project_ledger().spent(name, delta=1e-5, relation="add-remove")
    for unit in (PrivacyUnit.RECORD, PrivacyUnit.PERSON):
        assert project_ledger().spent(name, delta=1e-5, relation="add-remove", unit=unit).epsilon <= 1.0
    project_ledger().set_cap("default", qg.Budget(5.0, 1e-5))  # one that holds cannot be proved for both
    for person in (None, ids):
        with pytest.raises(BudgetError, match="do not add up"):
            fit(2, person=person)


def test_a_cap_on_default_bounds_all_runs_that_name_no_account() -> None:
    project_ledger().set_cap("default", qg.Budget(1.2, 1e-5))
    fit(0)
    with pytest.raises(BudgetError, match="all runs of 'default' together"):
        fit(0)
    with pytest.raises(BudgetError, match="all runs of 'default' together"):
        fit(1)  # an edited copy of a table is not told from another table
    fit(1, account="other people")
    assert project_ledger().spent("default", delta=1e-5, relation="add-remove").epsilon == pytest.approx(1.0, 0.05)


def test_a_working_folder_that_was_removed_may_belong_to_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LedgerError, match="cannot be used"):
        fit(0)
    fit(0, ledger=tmp_path / "ledger.jsonl")


def test_lines_of_a_ledger_tell_no_durations() -> None:
    fit(0)
    lines = project_ledger().entries()
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", line.time) for line in lines)
    reserved = {line.body["id"]: line.time for line in lines if line.kind == "reserve"}
    assert all(line.time == reserved[line.body["id"]] for line in lines if line.kind in ("close", "cancel"))


def test_a_cap_holds_in_the_projects_ledger(tmp_path: Path) -> None:
    cap = qg.Budget(1.2, 1e-5)
    fit(0, cap=cap)
    with pytest.raises(BudgetError, match="exceed the cap"):
        fit(0, cap=cap)
    fit(1, cap=cap)  # another table, other people


def test_a_project_is_the_folder_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "deep").mkdir(parents=True)
    (tmp_path / "project" / "quietgrad.toml").touch()
    monkeypatch.chdir(tmp_path / "project" / "deep")
    fit(0)
    assert len(Ledger(tmp_path / "project" / "ledger.jsonl").book().held) == 1
    assert not (tmp_path / "state" / "ledger.jsonl").exists()


def test_without_a_place_for_a_project_ledger_a_run_goes_on_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")  # a file, where the folder of the ledger would be
    result = fit(0, folder=tmp_path / "run")
    assert any("none could be made" in note for note in result.privacy.notes)
    assert result.privacy.is_private
    assert qg.load(tmp_path / "run").privacy.epsilon == result.privacy.epsilon
    model = PrivateLogisticRegression(classes=[0, 1], row_bound=2.0, inference=False).fit(*rows(0))
    assert any("none could be made" in note for note in model.privacy_.notes)
    with pytest.raises(LedgerError, match="ledger=PATH"):
        fit(0, cap=qg.Budget(2.0, 1e-5))


@pytest.mark.parametrize("broken", ["not a ledger", "altered", "gone", "lost link", "locked", "full"])
def test_a_project_ledger_that_is_there_pays_or_nothing_is_released(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state" / "ledger.jsonl"
    path.parent.mkdir()
    if broken == "not a ledger":
        path.write_text("my notes\n")
    elif broken == "lost link":
        path.symlink_to(tmp_path / "unmounted" / "ledger.jsonl")
    else:
        fit(0)
        assert project_ledger().path == path
        if broken == "altered":
            path.write_text(path.read_text().replace('"delta":1e-05', '"delta":1e-03'))
        elif broken == "gone":
            path.unlink()
        elif broken == "full":
            monkeypatch.setattr(chain.Writer, "append", Mock(side_effect=LedgerError("cannot write: ENOSPC.")))
    held = path.open() if broken == "locked" else None
    if held is not None:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(project_ledger()._chain, "timeout", 0.05)
    assert not fit(0, budget=None).privacy.is_private  # nothing is charged for it, so no ledger is asked
    monkeypatch.setattr(CentralSession, "release", Mock(side_effect=AssertionError("released")))
    before = path.read_bytes() if path.exists() else None
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"quietgrad ledger verify.*ledger=PATH"):
            fit(0, folder=tmp_path / "run")
    assert before == (path.read_bytes() if path.exists() else None)
    assert not is_kept(tmp_path / "run")
    if held is not None:
        held.close()


def test_two_folders_of_one_table_add_up_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = rows(0, 400)
    np.savez("people.npz", X=X, y=y)
    for name in ("one", "two"):
        assert (
            main(["train", "people.npz", "--algorithm", "dp-gd", "--epsilon", "1", "--out", name, "--quiet"]) == 0
        )
    said = capsys.readouterr().out
    assert "by 2 runs on 'people.npz'" in said
    assert Ledger("one/ledger.jsonl").path == Ledger("two/ledger.jsonl").path
    assert main(["report", "one", "two"]) == 0
    assert (
        main(["train", "people.npz", "--epsilon", "1", "--out", "three", "--ledger", "own.jsonl", "--quiet"]) == 0
    )
    assert "by 1 run on 'people.npz'" in capsys.readouterr().out


def test_every_run_has_a_name_that_its_certificate_finds(tmp_path: Path) -> None:
    qg.minimize(Logistic(), rows(1, 200), METHODS[0], budget=BUDGET, n_public=200)  # another table's line
    X, y = rows(0, 200)
    parties = [Party(X[::2], y[::2]), Party(X[1::2], y[1::2])]
    results = {
        "memory": qg.minimize(Logistic(), (X, y), METHODS[0], budget=BUDGET, n_public=200),
        "federation": simulate(METHODS[0], Logistic(), parties, budget=BUDGET, trust="secure", secure="masks"),
    }
    for name, result in results.items():
        result.save(tmp_path / name)
        document = issue(tmp_path / name)
        assert document.body["ledger"]["run"] == result.details["run"]
        kinds = [line["kind"] for line in document.body["ledger"]["lines"]]
        assert kinds == ["open", "reserve", "close", "certificate"]  # of its account alone, not of other tables
        assert check(document).ok


def test_a_score_on_the_table_that_was_trained_on_is_of_its_account() -> None:
    X, y = rows(0, 400)
    model = PrivateLogisticRegression(classes=[0, 1], row_bound=2.0, inference=False, relation="replace-one")
    private_score(model.fit(X, y), X, y, epsilon=0.5, delta=1e-6, relation="replace-one")
    assert list(accounts().values()) == [2]


# --- what a count and an account pay for ------------------------------------------------------------------------


def test_a_private_count_pays_for_the_one_run_that_was_planned_from_it(tmp_path: Path) -> None:
    """Used again, its run's open entry would pay for two runs; of another account it was not paid for at all."""
    counts: list[Any] = []

    def stops(progress: Any) -> None:
        counts.append(progress.plan)
        if progress.step == 2:
            raise Killed

    settings: dict[str, Any] = {"budget": BUDGET, "account": "a", "ledger": tmp_path / "a.jsonl"}
    with pytest.raises(Killed):
        qg.minimize(Logistic(), rows(0), METHODS[0], callback=stops, **settings)
    used = counts[-1].counted
    for other in ({}, {"account": "b"}, {"ledger": tmp_path / "b.jsonl"}):
        with pytest.raises(ValueError, match="n_public: is a private count"):
            qg.minimize(Logistic(), rows(1), METHODS[0], n_public=used, **{**settings, **other})
    forged = PublicCount(400, used.multiplier, used.gaussian, "never counted")
    with pytest.raises(ValueError, match="n_public: is a private count"):
        qg.minimize(Logistic(), rows(1), METHODS[0], n_public=forged, **settings)


def test_an_account_that_says_its_ledger_is_not_given_another(tmp_path: Path) -> None:
    whose = Account("patients", tmp_path / "own.jsonl")
    with pytest.raises(ValueError, match="leave ledger= and cap= out"):
        fit(0, account=whose, ledger=tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match="leave ledger= and cap= out"):
        fit(0, account=whose, cap=qg.Budget(0.5, 1e-5))


def test_a_name_with_signs_in_it_stays_the_name_of_a_saved_model(tmp_path: Path) -> None:
    X, y = rows(0, 400)
    model = PrivateLogisticRegression(classes=[0, 1], row_bound=2.0, account="cohort; 2021").fit(X, y)
    to_run(model, tmp_path / "run")
    assert from_run(tmp_path / "run").account == "cohort; 2021"


def test_a_search_whose_round_fails_after_a_release_is_charged(tmp_path: Path) -> None:
    class Fails(PrivateLogisticRegression):
        def fit(self, *args: Any, **options: Any) -> Any:
            super().fit(*args, **options)
            if self._within is not None:
                raise Killed
            return self

    X, y = rows(0, 600)
    model = Fails(classes=[0, 1], row_bound=2.0)
    search = PrivateSearch(model, {"regularization": [0.0]}, epsilon=4.0, ledger=tmp_path / "l.jsonl", account="a")
    with pytest.raises(Killed):
        search.fit(X, y)
    states = [held.state for held in qg.Ledger(tmp_path / "l.jsonl").book().held.values()]
    assert "cancelled" not in states


def test_a_head_holds_fast_only_the_lines_that_chain_up_to_it(tmp_path: Path) -> None:
    """Lines that are followed by unknown ones are tied to nothing, whatever head the file names."""
    ledger = tmp_path / "ledger.jsonl"
    fit(0, ledger=ledger, account="first")
    fit(1, ledger=ledger, account="second").save(tmp_path / "run")
    document = issue(tmp_path / "run", whole_ledger=False, ledger=ledger)
    assert any("head" in words for words in check(document).bound_by)
    part = document.body["ledger"]
    seq = int(part["head"].partition("-")[0])
    later = {**part, "head": f"{seq + 3}-{'ab' * 20}"}
    forged = replace(document, body={**document.body, "ledger": later})
    assert not any("head" in words for words in check(forged).bound_by)
