"""The ledger's rules: what is reserved, what may be given back, what a cap refuses, what is warned about."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietgrad.cli import main
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.events import (
    ZCDP,
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    MaxOverParties,
    Parallel,
    PoissonSampled,
    Pure,
    Repeated,
    TotalVariationSlack,
)
from quietgrad.core.errors import BudgetError, LedgerError, LedgerWarning, UnprovableError
from quietgrad.core.ledger.chain import Chain
from quietgrad.core.ledger.fingerprints import is_of_table
from quietgrad.core.ledger.ledger import Ledger, Reservation, fingerprint
from quietgrad.core.ledger.state import compose_events, is_part, may_give_back

DELTA = 1e-5
PROMISE: dict[str, Any] = {"delta": DELTA, "relation": "add-remove"}
STEP = PoissonSampled(0.01, Gaussian(1.1))
FIRST = PoissonSampled(0.04, Gaussian(1.1))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("QUIETGRAD_STATE", str(folder))
    return folder


def epsilon(event: Event, relation: str = "add-remove") -> float:
    return account(event, delta=DELTA, relation=relation)


def spent(ledger: Ledger, name: str = "people", relation: str = "add-remove") -> float:
    return ledger.spent(name, delta=DELTA, relation=relation).epsilon


def test_reserve_writes_the_whole_cost_and_can_be_found_again(ledger: Ledger) -> None:
    plan = Composed((FIRST, Repeated(STEP, 100)))
    paid = ledger.reserve("people", plan, run="r1", note="first try", **PROMISE)
    assert (paid.account, paid.run, paid.event, paid.delta) == ("people", "r1", plan, DELTA)
    assert paid.relation is Relation.ADD_REMOVE
    assert paid.epsilon == epsilon(plan)
    again = Ledger(ledger.path)
    found = again.find("r1")
    assert found is not None
    assert (found.reservation, found.state, found.counts) == (paid, "open", plan)
    assert again.find("other") is None
    assert again.entries()[-1].body["note"] == "first try"
    assert spent(again) == epsilon(plan)


def test_a_run_without_a_name_is_called_after_its_reservation(ledger: Ledger) -> None:
    paid = ledger.reserve("people", STEP, run="", **PROMISE)
    assert paid.run == paid.id
    assert ledger.find("") is None


def test_entries_of_one_account_compose_and_accounts_are_different_people(ledger: Ledger) -> None:
    for run in "abc":
        ledger.reserve("people", Gaussian(4.0), run=run, **PROMISE)
    ledger.reserve("others", Gaussian(3.0), run="d", **PROMISE)
    assert spent(ledger) == pytest.approx(epsilon(Repeated(Gaussian(4.0), 3)), rel=1e-12)
    assert spent(ledger, "others") == epsilon(Gaussian(3.0))
    proof = ledger.spent("nobody", **PROMISE)
    assert (proof.epsilon, proof.delta, proof.relation) == (0.0, DELTA, Relation.ADD_REMOVE)


def test_reserving_without_a_cap_loads_no_accountant(ledger: Ledger) -> None:
    script = f"""
import sys
from quietgrad.core.accounting.events import Gaussian
from quietgrad.core.ledger.ledger import Ledger
ledger = Ledger({str(ledger.path)!r})
paid = ledger.reserve("people", Gaussian(2.0), run="r", delta=1e-5, relation="replace-one")
ledger.close(paid.id, reason="done")
print([name for name in ("scipy", "dp_accounting", "cryptography", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Closing


def test_a_crash_counts_in_full_and_a_plain_close_too(ledger: Ledger) -> None:
    plan = Repeated(Gaussian(9.0), 50)
    crashed = ledger.reserve("crashed", plan, run="a", **PROMISE)
    closed = ledger.reserve("closed", plan, run="b", **PROMISE)
    assert ledger.close(closed.id, reason="finished") == plan
    assert spent(ledger, "crashed") == spent(ledger, "closed") == epsilon(plan)
    for run, paid, state in (("a", crashed, "open"), ("b", closed, "closed")):
        found = ledger.find(run)
        assert found is not None
        assert (found.reservation, found.state) == (paid, state)


def test_only_a_stop_that_did_not_look_at_the_data_gives_back(ledger: Ledger) -> None:
    plan, half = Repeated(Gaussian(9.0), 50), Repeated(Gaussian(9.0), 25)
    looked = ledger.reserve("looked", plan, run="a", **PROMISE)
    blind = ledger.reserve("blind", plan, run="b", **PROMISE)
    assert ledger.close(looked.id, spent_event=half, reason="small gradient", data_dependent=True) == plan
    assert ledger.close(blind.id, spent_event=half, reason="time is up", data_dependent=False) == half
    assert spent(ledger, "looked") == epsilon(plan)
    assert spent(ledger, "blind") == epsilon(half)
    assert ledger.entries()[-1].body["data_dependent"] is False


def test_a_zcdp_filter_gives_back_under_any_stopping_rule(ledger: Ledger) -> None:
    paid = ledger.reserve("people", ZCDP(0.5, Relation.ADD_REMOVE), run="a", **PROMISE)
    less = ZCDP(0.125, Relation.ADD_REMOVE)
    assert ledger.close(paid.id, spent_event=less, reason="second-order stop", data_dependent=True) == less
    assert spent(ledger) == epsilon(less)


@pytest.mark.parametrize(
    "other", [Gaussian(50.0), Repeated(STEP, 101), Repeated(PoissonSampled(0.001, Gaussian(1.1)), 5)]
)
def test_what_was_not_reserved_cannot_be_the_charge(ledger: Ledger, other: Event) -> None:
    plan = Repeated(STEP, 100)
    paid = ledger.reserve("people", plan, run="a", **PROMISE)
    with pytest.raises(ValueError, match="is not a part of the reserved"):
        ledger.close(paid.id, spent_event=other, reason="stop", data_dependent=False)
    assert ledger.book().open(paid.id).reservation == paid
    assert ledger.book().counted("people") == [plan]


def test_cancel_gives_everything_back_and_closed_is_closed(ledger: Ledger) -> None:
    paid = ledger.reserve("people", STEP, run="a", **PROMISE)
    ledger.cancel(paid.id, reason="the key could not be written")
    assert spent(ledger) == 0.0
    for again in (lambda: ledger.cancel(paid.id, reason=""), lambda: ledger.close(paid.id, reason="")):
        with pytest.raises(LedgerError, match="already cancelled"):
            again()
    with pytest.raises(LedgerError, match="'0' is unknown"):
        ledger.close("0", reason="")
    assert ledger.verify().entries == 3


def test_find_prefers_the_open_reservation_and_forgets_cancelled_ones(ledger: Ledger) -> None:
    first = ledger.reserve("people", STEP, run="a", fingerprint="t1", **PROMISE)
    ledger.close(first.id, reason="done")
    second = ledger.reserve("people", FIRST, run="a", fingerprint="t1", **PROMISE)
    third = ledger.reserve("people", STEP, run="a", fingerprint="t1", **PROMISE)

    def found() -> tuple[Reservation, str]:
        held = ledger.find("a")
        assert held is not None
        assert held.fingerprint is not None
        assert is_of_table(held.fingerprint, "t1")
        return held.reservation, held.state

    assert found() == (third, "open")
    ledger.cancel(third.id, reason="nothing left")
    assert found() == (second, "open")
    ledger.close(second.id, reason="done")
    assert found() == (second, "closed")


def test_closing_again_alike_writes_nothing_and_otherwise_is_refused(ledger: Ledger) -> None:
    plan, half = Repeated(STEP, 100), Repeated(STEP, 50)
    full = ledger.reserve("people", plan, run="a", **PROMISE)
    part = ledger.reserve("people", plan, run="b", **PROMISE)
    ledger.close(full.id, reason="finished")
    ledger.close(part.id, spent_event=half, reason="time is up", data_dependent=False)
    before = ledger.path.read_bytes()
    again = Ledger(ledger.path)
    assert again.close(full.id, spent_event=half, reason="looked", data_dependent=True) == plan
    assert again.close(part.id, spent_event=half, reason="time is up", data_dependent=False) == half
    with pytest.raises(LedgerError, match="already closed with another cost"):  # charged in full: no refund
        ledger.close(full.id, spent_event=half, reason="time is up", data_dependent=False)
    for more in (None, Repeated(STEP, 51)):  # more was released than is booked: said, not swallowed
        with pytest.raises(LedgerError, match="already closed with another cost"):
            ledger.close(part.id, spent_event=more, reason="?", data_dependent=False)
    with pytest.raises(LedgerError, match="already closed, so it counts"):
        ledger.cancel(full.id, reason="")
    assert ledger.path.read_bytes() == before


def test_parts() -> None:
    plan = Composed((FIRST, Repeated(STEP, 100), TotalVariationSlack(1e-9)))
    assert is_part(plan, plan)
    assert is_part(Composed((FIRST, Repeated(STEP, 3), TotalVariationSlack(1e-9))), plan)
    assert is_part(Composed((FIRST, STEP, TotalVariationSlack(1e-9))), plan)
    assert is_part(Composed((Composed((FIRST, STEP)), TotalVariationSlack(1e-9))), plan)
    assert not is_part(Composed((FIRST, Repeated(STEP, 3))), plan)  # slack may not be dropped
    assert not is_part(Composed((Repeated(STEP, 3), FIRST, TotalVariationSlack(1e-9))), plan)
    assert is_part(Repeated(STEP, 40), Repeated(Repeated(STEP, 50), 3))
    assert is_part(FIRST, Composed((FIRST, STEP)))
    assert is_part(
        MaxOverParties((STEP, Repeated(STEP, 2))), MaxOverParties((Repeated(STEP, 4), Repeated(STEP, 4)))
    )
    assert not is_part(MaxOverParties((STEP,)), MaxOverParties((STEP, STEP)))
    assert is_part(Parallel((STEP, STEP)), Parallel((STEP, Repeated(STEP, 2))))
    assert is_part(STEP, Parallel((FIRST, Repeated(STEP, 2))))
    assert not is_part(Parallel((FIRST, FIRST)), Parallel((FIRST, STEP)))
    assert not is_part(MaxOverParties((STEP, STEP)), Parallel((STEP, Repeated(STEP, 2))))
    assert is_part(ZCDP(0.1, Relation.ADD_REMOVE), ZCDP(0.2, Relation.ADD_REMOVE))
    assert not is_part(ZCDP(0.3, Relation.ADD_REMOVE), ZCDP(0.2, Relation.ADD_REMOVE))
    assert not is_part(ZCDP(0.1, Relation.REPLACE_ONE), ZCDP(0.2, Relation.ADD_REMOVE))
    assert not is_part(Pure(0.1, Relation.ADD_REMOVE), Pure(0.2, Relation.ADD_REMOVE))
    assert not may_give_back(STEP, Repeated(STEP, 2), data_dependent=True)


gaussians = st.sampled_from([5.0, 8.0, 13.0]).map(Gaussian)
plans = st.recursive(
    gaussians,
    lambda inner: (
        st.builds(Repeated, inner, st.integers(1, 4))
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: Composed(tuple(parts)))
    ),
    max_leaves=5,
)


@given(spent_event=plans, reserved=plans)
def test_a_part_never_costs_more(spent_event: Event, reserved: Event) -> None:
    """For compositions of Gaussians the exact cost is Σ 1/z²; a part's cost is at most the whole's."""
    if is_part(spent_event, reserved):
        assert _mu_squared(spent_event) <= _mu_squared(reserved) * (1 + 1e-12)


@given(st.lists(plans, min_size=1, max_size=5))
def test_the_total_costs_what_its_parts_cost(parts: list[Event]) -> None:
    together = compose_events(parts)
    assert together is not None
    assert _mu_squared(together) == pytest.approx(sum(map(_mu_squared, parts)), rel=1e-12)


def _mu_squared(event: Event) -> float:
    if isinstance(event, Repeated):
        return event.count * _mu_squared(event.inner)
    if isinstance(event, Composed):
        return sum(map(_mu_squared, event.parts))
    assert isinstance(event, Gaussian)
    return event.noise_multiplier**-2


def test_slack_of_all_entries_counts(ledger: Ledger) -> None:
    plan = Composed((Gaussian(5.0), TotalVariationSlack(1e-7)))
    for _ in range(3):
        ledger.reserve("people", plan, run="r", **PROMISE)
    assert spent(ledger) == epsilon(Composed((Repeated(Gaussian(5.0), 3), TotalVariationSlack(3e-7))))
    assert spent(ledger) > epsilon(Repeated(Gaussian(5.0), 3))


def test_many_equal_parallel_runs_stay_provable(ledger: Ledger) -> None:
    plan = Parallel((Gaussian(20.0), Pure(0.05, Relation.ADD_REMOVE)))
    for _ in range(12):
        ledger.reserve("people", plan, run="r", **PROMISE)
    assert spent(ledger) >= epsilon(Repeated(Gaussian(20.0), 12))


# Caps


def test_a_cap_refuses_before_anything_is_written(ledger: Ledger) -> None:
    ledger.set_cap("people", Budget(0.9, DELTA))
    assert ledger.cap("people") == Budget(0.9, DELTA)
    assert ledger.cap("others") is None
    first = ledger.reserve("people", Gaussian(6.0), run="a", **PROMISE)
    before = ledger.path.read_bytes()
    with pytest.raises(BudgetError) as refusal:
        ledger.reserve("people", Gaussian(5.0), run="b", **PROMISE)
    together = epsilon(Composed((Gaussian(6.0), Gaussian(5.0))))
    assert together > 0.9
    message = str(refusal.value)
    for said in (
        "'people'",
        "Cap: ε=0.9 ",
        f"Spent: ε={first.epsilon:.4g}.",
        f"run: ε={epsilon(Gaussian(5.0)):.4g}.",
    ):
        assert said in message
    assert f"Together: ε={together:.4g}." in message
    assert ledger.path.read_bytes() == before
    ledger.reserve("others", Gaussian(5.0), run="b", **PROMISE)  # another account is not concerned


def test_both_the_ledgers_cap_and_the_callers_hold(ledger: Ledger) -> None:
    ledger.set_cap("people", Budget(0.1, DELTA))
    with pytest.raises(BudgetError, match=r"Cap: ε=0\.1 "):
        ledger.reserve("people", Gaussian(6.0), run="a", cap=Budget(5.0, DELTA), **PROMISE)
    ledger.set_cap("people", Budget(5.0, DELTA))
    with pytest.raises(BudgetError, match=r"Cap: ε=0\.2 "):
        ledger.reserve("people", Gaussian(6.0), run="a", cap=Budget(0.2, DELTA), **PROMISE)
    ledger.reserve("people", Gaussian(6.0), run="a", cap=Budget(5.0, DELTA), **PROMISE)
    assert Budget.from_json(ledger.entries()[-1].body["cap"]) == Budget(5.0, DELTA)


def test_entries_are_accounted_anew_under_the_caps_relation(ledger: Ledger) -> None:
    """A Gaussian's ε under replace-one is that of half the noise: the cap must see it, whatever was asked."""
    event = Gaussian(6.0)
    between = (epsilon(event) + epsilon(event, "replace-one")) / 2
    with pytest.raises(BudgetError, match="replace-one"):
        ledger.reserve("people", event, run="a", cap=Budget(between, DELTA, Relation.REPLACE_ONE), **PROMISE)
    ledger.reserve("people", event, run="a", cap=Budget(between, DELTA), **PROMISE)
    assert spent(ledger, relation="replace-one") == epsilon(event, "replace-one")


def test_what_the_caps_relation_cannot_prove_is_refused(ledger: Ledger) -> None:
    event = Repeated(FixedSizeSampled(1000, 10, Gaussian(5.0)), 10)
    with pytest.raises(BudgetError, match="stated under add-remove"):
        ledger.reserve("people", event, delta=DELTA, relation="replace-one", run="a", cap=Budget(9.0, DELTA))
    assert ledger.entries()[-1].kind == "open"
    ledger.reserve("people", event, delta=DELTA, relation="replace-one", run="a")
    with pytest.raises(UnprovableError):
        spent(ledger)


# Fingerprints


def test_fingerprints_are_keyed_and_the_key_is_private(state: Path) -> None:
    one = fingerprint([b"table", memoryview(b" of people")])
    assert len(one) == 64
    assert one == fingerprint([b"table of people"])
    assert one != fingerprint([b"table of people!"])
    key = state / "fingerprint.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert os.listdir(state) == ["fingerprint.key"]
    key.unlink()
    assert one != fingerprint([b"table of people"])


def test_a_bad_key_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fingerprint([b""])
    key = state / "fingerprint.key"
    key.chmod(0o644)
    with pytest.raises(LedgerError, match="chmod 600"):
        fingerprint([b""])
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(LedgerError, match="must hold 32 bytes, has 5"):
        fingerprint([b""])
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "file"))
    with pytest.raises(LedgerError, match="set QUIETGRAD_STATE"):
        fingerprint([b""])


def test_processes_that_make_the_key_together_agree(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is first between our look and our write: its key counts."""
    real = os.link
    theirs = b"k" * 32

    def late(source: str, target: str) -> None:
        Path(target).write_bytes(theirs)
        Path(target).chmod(0o600)
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    fingerprint([b"x"])
    assert (state / "fingerprint.key").read_bytes() == theirs
    assert os.listdir(state) == ["fingerprint.key"]


def charge(ledger: Ledger, name: str, table: str) -> Reservation:
    return ledger.reserve(name, Gaussian(5.0), run="r", fingerprint=table, **PROMISE)


def test_mixed_up_tables_and_accounts_only_warn_and_only_once(ledger: Ledger) -> None:
    charge(ledger, "people", "t1")
    charge(ledger, "people", "t1")
    with pytest.warns(LedgerWarning, match="account 'people' was used with another table"):
        charge(ledger, "people", "t2")
    with pytest.warns(LedgerWarning, match="charged to account 'people' before, now to 'copy'"):
        charge(ledger, "copy", "t1")
    charge(ledger, "people", "t2")
    charge(ledger, "copy", "t1")
    ledger.reserve("people", Gaussian(5.0), run="r", **PROMISE)
    assert len(ledger.book().of("people")) == 5


def test_a_line_names_no_other_account_and_the_owner_is_warned_again(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    charge(ledger, "people", "t1")
    with pytest.warns(LedgerWarning) as first:
        charge(ledger, "people", "t2")
    with pytest.warns(LedgerWarning) as second:
        charge(ledger, "copy", "t1")
    given = [*first, *second]
    line = ledger.entries()[-1].body
    assert "people" not in json.dumps(line)
    # What a line holds has one length and looks alike, whether it warned or not.
    shapes = {tuple((key, len(str(entry.body[key]))) for key in ("fingerprint", "table", "part"))
              for entry in ledger.entries()[1:]}  # fmt: skip
    assert len(shapes) == 1
    again = [text for name in ("people", "copy") for texts in ledger.book().past_warnings(name).values()
             for text in texts]  # fmt: skip
    assert [f"{ledger.path.name}: {text}" for text in again] == [str(each.message) for each in given]
    assert main(["ledger", "show", str(ledger.path), "--account", "copy"]) == 0
    assert "charged to account 'people' before" in " ".join(capsys.readouterr().out.split())
    # Another machine's key opens nothing, and guesses nothing.
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "elsewhere"))
    assert ledger.book().past_warnings("copy") == {}
    fingerprint([b"a key is made"])
    assert ledger.book().past_warnings("copy") == {}


def test_a_fold_is_expected_to_differ_when_warnings_are_shown_again(ledger: Ledger) -> None:
    charge(ledger, "people", "t1")
    ledger.reserve("people", Gaussian(5.0), run="r", fingerprint="t2", part=True, **PROMISE)
    assert ledger.book().past_warnings("people") == {}


def test_where_warnings_are_errors_nothing_is_spent(ledger: Ledger) -> None:
    charge(ledger, "people", "t1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LedgerWarning):
            charge(ledger, "people", "t2")
    assert len(ledger.book().held) == 1


# Bad input


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"account": ""}, ValueError, "account=''"),
        ({"account": 3}, ValueError, "account=3"),
        ({"run": None}, ValueError, "run=None"),
        ({"event": 1.0}, TypeError, "event=1.0"),
        ({"delta": 0.0}, ValueError, "delta=0.0"),
        ({"delta": float("nan")}, ValueError, "delta=nan"),
        ({"relation": "zero-out"}, ValueError, "relation='zero-out'"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(
    ledger: Ledger, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"account": "people", "event": STEP, "run": "r", **PROMISE, **changed}
    with pytest.raises(error, match=message):
        ledger.reserve(**given)
    assert not ledger.path.exists()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("reserve", {"account": "people"}),
        (
            "reserve",
            {"id": "1", "account": "p", "run": "r", "event": {"event": "?"}, "delta": 0.1, "relation": "x"},
        ),
        ("close", {"id": "7", "reason": "", "gives_back_all_but": None}),
        ("cap", {"account": "people", "epsilon": -1.0, "delta": 0.1, "relation": "add-remove"}),
        ("from the future", {}),
    ],
)
def test_a_chained_line_that_makes_no_sense_is_refused(ledger: Ledger, kind: str, body: dict[str, Any]) -> None:
    ledger.reserve("people", STEP, run="r", **PROMISE)
    with Chain(ledger.path).writing() as writer:
        writer.append(kind, body)
    report = Ledger(ledger.path).verify()
    assert not report.ok
    assert report.problems[0].startswith(f"line 3 ({kind}) makes no sense")
    assert len(ledger.entries()) == 3  # the lines can still be looked at
    with pytest.raises(LedgerError, match="line 3"):
        ledger.book()
    with pytest.raises(LedgerError, match="line 3"):
        ledger.reserve("people", STEP, run="r", **PROMISE)


def test_a_doubled_reservation_makes_no_sense(ledger: Ledger) -> None:
    ledger.reserve("people", STEP, run="r", **PROMISE)
    with Chain(ledger.path).writing() as writer:
        writer.append("reserve", writer.entries[1].body)
    assert "already there" in ledger.verify().problems[0]
