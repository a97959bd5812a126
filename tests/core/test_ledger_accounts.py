"""One account for one group of people: spellings that mean the same, names that are refused, old ledgers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietgrad import DPGD, minimize
from quietgrad.assurance.report.ledger_page import spent_without_account, write_ledger_page
from quietgrad.cli import main as cli
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.accounting.events import Gaussian, Repeated
from quietgrad.core.errors import BudgetError, LedgerWarning
from quietgrad.core.ledger.chain import Chain
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import LONGEST, canonical_account_name, check_account_name, unnamed
from quietgrad.objectives import Logistic

PROMISE: dict[str, Any] = {"delta": 1e-5, "relation": "add-remove"}
SPELLINGS = ["patients", "patients ", "Patients", " PATIENTS\t", "\uff30atients", "patient\u017f"]
RUN = Gaussian(4.0)


def epsilon(count: int) -> float:
    return account(Repeated(RUN, count), **PROMISE)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_cap_holds_for_every_spelling(ledger: Ledger, spelling: str) -> None:
    ledger.set_cap("patients", Budget(1.01 * epsilon(1), 1e-5))
    ledger.reserve("patients", RUN, run="a", **PROMISE)
    with pytest.raises(BudgetError, match="account 'patients': this run would exceed the cap"):
        ledger.reserve(spelling, RUN, run="b", **PROMISE)
    with pytest.raises(BudgetError):
        ledger.check_cap(spelling, Cost(RUN, 1e-5, Relation.ADD_REMOVE))
    assert ledger.cap(spelling) == ledger.cap("patients")
    assert ledger.spent(spelling, **PROMISE).epsilon == epsilon(1)


def test_all_spellings_compose_and_the_first_is_shown(ledger: Ledger) -> None:
    paid = [ledger.reserve(name, RUN, run=str(i), **PROMISE) for i, name in enumerate(["Patients", *SPELLINGS])]
    assert {each.account for each in paid} == {"Patients"}
    assert ledger.book().accounts() == ledger.verify().accounts == ("Patients",)
    assert ledger.spent("patients", **PROMISE).epsilon == pytest.approx(epsilon(7))
    ledger.reserve("patients", RUN, run="x", fingerprint="one", **PROMISE)
    with pytest.warns(LedgerWarning, match="account 'Patients' was used with another table"):
        ledger.reserve("PATIENTS", RUN, run="y", fingerprint="two", **PROMISE)


def test_tables_without_an_account_are_also_stated_together(ledger: Ledger, tmp_path: Path) -> None:
    """They may be copies of one table, sorted or cleaned, which no fingerprint can tell."""
    ledger.reserve("patients", RUN, run="p", **PROMISE)
    ledger.reserve(unnamed("a" * 64), RUN, run="1", **PROMISE)
    assert spent_without_account(ledger, ledger.book()) is None
    ledger.reserve(unnamed("b" * 64), RUN, run="2", **PROMISE)
    words = f"2 tables have no named account.*together cost: ε = {epsilon(2):.4g} at δ = 1e-05 \\(add-remove\\)"
    assert re.search(words, str(spent_without_account(ledger, ledger.book())))
    page = write_ledger_page(ledger, tmp_path / "ledger.html").read_text()
    assert re.search(words, page)


def test_the_page_names_a_run_by_its_folder_and_explains_its_marks(ledger: Ledger, tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(400, 2))
    budget = Budget(1.0, 1e-5)
    result = minimize(Logistic(), (X, X[:, 0] > 0), DPGD(steps=2), budget=budget, ledger=ledger.path, account="p")
    replace(result, data={"name": "people.csv"}).save(tmp_path / "runs" / "first fit")
    (tmp_path / "runs" / "first fit" / "run.json").write_text(json.dumps({"ledger": str(ledger.path)}))
    page = write_ledger_page(ledger, tmp_path / "ledger.html", [tmp_path / "runs"]).read_text()
    assert "first fit, people.csv<br>" in page
    assert "a certificate was made of this run" not in page
    assert cli(["certificate", str(tmp_path / "runs" / "first fit"), "-o", str(tmp_path / "c.json")]) == 0
    page = write_ledger_page(ledger, tmp_path / "ledger.html", [tmp_path / "runs"]).read_text()
    assert page.count("a certificate was made of this run") == 1
    assert "another program ran it" not in page


def test_a_run_that_names_no_account_says_how_it_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    X = np.random.default_rng(0).normal(size=(400, 2))
    for name, says in (("default", True), ("patients", False)):
        result = minimize(Logistic(), (X, X[:, 0] > 0), DPGD(steps=2), budget=Budget(1.0, 1e-5), account=name)
        assert any("no account was named" in note for note in result.privacy.notes) is says


def test_one_table_under_two_spellings_is_no_second_account(ledger: Ledger) -> None:
    ledger.reserve("patients", RUN, run="x", fingerprint="one", **PROMISE)
    ledger.reserve("Patients", RUN, run="y", fingerprint="one", **PROMISE)  # warnings are errors here


def old_ledger(path: Path, *lines: tuple[str, dict[str, Any]]) -> Ledger:
    """As it was written when every spelling was an account of its own."""
    with Chain(path).writing() as writer:
        for kind, body in lines:
            writer.append(kind, body)
    return Ledger(path)


def old_reserve(name: str, run: str) -> tuple[str, dict[str, Any]]:
    rest = {"delta": 1e-5, "relation": "add-remove", "cap": None, "note": "", "fingerprint": None, "warnings": []}
    return "reserve", {"id": run, "account": name, "run": run, "event": RUN.to_json(), **rest}


def old_cap(name: str, epsilon: float) -> tuple[str, dict[str, Any]]:
    return "cap", {"account": name, **Budget(epsilon, 1e-5).to_json()}


def test_old_ledgers_open_and_their_spellings_are_the_same_people(tmp_path: Path) -> None:
    names = ["patients", "patients ", "Patients", "pat\u200bients", "a/b"]
    ledger = old_ledger(tmp_path / "old.jsonl", *(old_reserve(name, str(i)) for i, name in enumerate(names)))
    assert ledger.verify().ok
    assert ledger.verify().accounts == ("patients", "a/b")
    assert ledger.spent("patients", **PROMISE).epsilon == pytest.approx(epsilon(4))
    assert ledger.spent("a/b", **PROMISE).epsilon == epsilon(1)  # what is there can be asked about and closed
    ledger.close("4", reason="done")
    assert ledger.verify().ok


def test_old_caps_of_two_spellings_both_hold_until_one_is_set_for_all(tmp_path: Path) -> None:
    small, large = 1.01 * epsilon(1), 1.01 * epsilon(3)
    for caps in (
        [old_cap("patients", small), old_cap("Patients", large)],
        [old_cap("Patients", large), old_cap("patients", small)],
    ):
        path = tmp_path / f"{caps[0][1]['account']}.jsonl"
        ledger = old_ledger(path, *caps, old_reserve("patients", "a"))
        with pytest.raises(BudgetError):
            ledger.reserve("Patients", RUN, run="b", **PROMISE)
        ledger.set_cap("PATIENTS", Budget(large, 1e-5))
        ledger.reserve("Patients", RUN, run="b", **PROMISE)
        assert Ledger(path).book().caps_of("patients") == (Budget(large, 1e-5),)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "not empty"),
        (" \t", "not empty"),
        (None, "not empty"),
        (7, "not empty"),
        ("pat\nients", "cannot be seen"),
        ("pat\u200bients", "cannot be seen"),
        ("\u202estneitap", "cannot be seen"),
        ("pat\x00ients", "cannot be seen"),
        ("\ud800", "cannot be seen"),
        ("people/2024", "name the people"),
        ("..\\people", "name the people"),
        ("p" * (LONGEST + 1), "at most 120"),
    ],
)
def test_names_that_cannot_be_told_apart_or_read_are_refused(ledger: Ledger, name: Any, message: str) -> None:
    for use in (
        lambda: ledger.reserve(name, RUN, run="a", **PROMISE),
        lambda: ledger.set_cap(name, Budget(1.0, 1e-5)),
        lambda: ledger.check_cap(name, Cost(RUN, 1e-5, Relation.ADD_REMOVE)),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert not ledger.path.exists()


@given(st.text())
def test_identity_is_the_same_again_and_ignores_case_and_spaces(name: str) -> None:
    assert canonical_account_name(canonical_account_name(name)) == canonical_account_name(name)
    assert canonical_account_name(f"  {name}\n") == canonical_account_name(name)
    assert canonical_account_name(name.casefold()) == canonical_account_name(name)


@given(st.text(min_size=1, max_size=LONGEST))
def test_a_name_that_is_accepted_has_an_identity(name: str) -> None:
    try:
        shown = check_account_name(name)
    except ValueError:
        return
    assert canonical_account_name(shown) == canonical_account_name(name) != ""
