"""`quietgrad ledger`: tables for people, JSON for programs; exit codes 0 fine, 1 failed check, 2 bad usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quietgrad.cli import main
from quietgrad.cli.ledger import app, in_words
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.events import (
    Composed,
    FixedSizeSampled,
    Gaussian,
    Parallel,
    Pure,
    RandomNumberOfReleases,
    Repeated,
)
from quietgrad.core.errors import LedgerError
from quietgrad.core.ledger.ledger import Ledger

runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
PLAN = Repeated(Gaussian(9.0), 50)


@pytest.fixture
def file(tmp_path: Path) -> str:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    paid = ledger.reserve("patients", PLAN, delta=1e-5, relation="add-remove", run="first", note="DP-GD")
    half = Repeated(Gaussian(9.0), 25)
    ledger.close(paid.id, spent_event=half, reason="asked to stop", data_dependent=False)
    ledger.reserve("patients", Gaussian(9.0), delta=1e-6, relation="add-remove", run="second")
    gone = ledger.reserve("patients", PLAN, delta=1e-6, relation="add-remove", run="third")
    ledger.cancel(gone.id, reason="no key")
    ledger.set_cap("staff", Budget(2.0, 1e-5, Relation.REPLACE_ONE))
    return str(ledger.path)


def shown(*arguments: str) -> dict[str, Any]:
    result = runner.invoke(app, ["show", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return {row["account"]: row for row in json.loads(result.stdout)["accounts"]}


def test_show_states_what_every_account_spent(file: str) -> None:
    rows = shown(file)
    counted = Repeated(Gaussian(9.0), 26)
    assert rows["patients"]["epsilon"] == account(counted, delta=1e-6, relation="add-remove")
    assert (rows["patients"]["delta"], rows["patients"]["relation"]) == (1e-6, "add-remove")
    assert [run["state"] for run in rows["patients"]["reservations"]] == ["closed", "open", "cancelled"]
    assert rows["patients"]["reservations"][0]["reserved"] == PLAN.to_json()
    assert rows["patients"]["reservations"][2]["counts"] is None
    assert rows["staff"]["epsilon"] == 0.0
    assert rows["staff"]["cap"] == {"epsilon": 2.0, "delta": 1e-5, "relation": "replace-one"}
    at = shown(file, "--account", "Patients ", "--delta", "1e-4")  # by any spelling
    assert list(at) == ["patients"]
    assert at["patients"]["epsilon"] == account(counted, delta=1e-4, relation="add-remove")


def test_show_says_what_cannot_be_proved(file: str) -> None:
    event = FixedSizeSampled(100, 10, Gaussian(5.0))
    Ledger(file).reserve("mixed", event, delta=1e-5, relation="add-remove", run="x")
    assert shown(file, "--account", "mixed")["mixed"]["epsilon"] is None
    result = runner.invoke(app, ["show", file, "--account", "mixed"])
    assert "not provable" in result.stdout


def test_verify(file: str) -> None:
    result = runner.invoke(app, ["verify", file])
    assert result.exit_code == 0
    assert "whole; 7 entries, accounts: patients, staff." in result.stdout
    report = json.loads(runner.invoke(app, ["verify", file, "--json"]).stdout)
    assert report == {
        "file": file,
        "ok": True,
        "entries": 7,
        "problems": [],
        "torn_tail": False,
        "accounts": ["patients", "staff"],
    }
    path = Path(file)
    path.write_bytes(path.read_bytes() + b'{"body":')
    result = runner.invoke(app, ["verify", file])
    assert (result.exit_code, "never finished" in result.stdout) == (0, True)


def test_verify_fails_on_a_cut_or_altered_file(file: str) -> None:
    path = Path(file)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"noise_multiplier":9.0', b'"noise_multiplier":90.0', 1))
    result = runner.invoke(app, ["verify", file])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "line 2 was edited" in result.stderr
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    result = runner.invoke(app, ["verify", file, "--json"])
    assert result.exit_code == 1
    assert "the end was cut" in json.loads(result.stdout)["problems"][0]
    assert isinstance(runner.invoke(app, ["show", file]).exception, LedgerError)
    path.unlink()
    assert runner.invoke(app, ["verify", file]).exit_code == 1


def test_cap_is_written_into_the_ledger(file: str) -> None:
    arguments = ["cap", file, "patients", "--epsilon", "3", "--delta", "1e-6", "--relation", "replace-one"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert "patients: at most ε=3 at δ=1e-06 (replace-one)" in result.stdout
    assert Ledger(file).cap("patients") == Budget(3.0, 1e-6, Relation.REPLACE_ONE)


def test_adopt(file: str) -> None:
    Path(file + ".head").unlink()
    assert runner.invoke(app, ["verify", file]).exit_code == 1
    assert runner.invoke(app, ["adopt", file, "--reason", "new disk"]).exit_code == 0
    assert runner.invoke(app, ["verify", file]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere.jsonl"], "does not exist"),
        (["verify", "nowhere.jsonl"], "does not exist"),
        (["show", "FILE", "--account", "nobody"], "patients, staff"),
        (["show", "FILE", "--delta", "2"], "--delta 2.0"),
        (["cap", "FILE", "patients", "--epsilon", "-1", "--delta", "1e-5"], "--epsilon -1.0"),
        (["cap", "FILE", "patients", "--epsilon", "1", "--delta", "1e-5", "--relation", "x"], "--relation x"),
        (["cap", "FILE", " ", "--epsilon", "1", "--delta", "1e-5"], "--account: must"),
    ],
)
def test_bad_usage(file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", *(file if word == "FILE" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_events_in_words() -> None:
    pure = Pure(0.5, Relation.ADD_REMOVE)
    assert in_words(Composed((Gaussian(2.0), Repeated(pure, 3)))) == (
        "gaussian(noise 2) + 3 × pure(epsilon 0.5, relation add-remove)"
    )
    assert in_words(RandomNumberOfReleases(Gaussian(2.0), ((1, 0.5), (2, 0.5)))) == (
        "random-round(gaussian(noise 2), 1, 0.5, 2, 0.5)"
    )
    assert in_words(Parallel((Gaussian(2.0),) * 5)).endswith("… 5 in all)")


EVIL = '"><script>alert(1)<b>'


def test_page(file: str, tmp_path: Path) -> None:
    """One page: totals against caps, marks of what is conditional or foreign, links, and no markup from names."""
    ledger = Ledger(file)
    ledger.set_cap("patients", Budget(3.0, 1e-6))
    condition = f"if the loader was Poisson {EVIL}"
    claim = ledger.reserve(
        "patients", Gaussian(8.0), delta=1e-6, relation="add-remove", run="claim-1", note=f"opacus 1.5 {EVIL}; x",
        condition=condition,
    )  # fmt: skip
    ledger.close(claim.id, reason="claimed", data_dependent=True)
    ledger.reserve(EVIL.replace("/", ""), Gaussian(9.0), delta=1e-6, relation="add-remove", run=EVIL)
    ledger.certify("first", "0" * 64)
    run = tmp_path / "runs" / "a & b"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"details": {"run": "first"}}))
    (run / "report.html").write_text("")
    (tmp_path / "runs" / "result.json").write_text("[")  # of something else
    target = tmp_path / "deep" / "page.html"
    done = runner.invoke(app, ["page", file, "-o", str(target)])
    assert done.exit_code == 0, done.output
    text = target.read_text()
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    spent = ledger.spent("patients", delta=1e-6, relation="add-remove").epsilon
    for fact in (
        f"ε = {spent:.4g} of 3 ({100 * spent / 3:.0f} %)",
        "1 conditional", "1 of other programs", "1 open",
        "opacus 1.5", "if the loader was Poisson", "certified", "cancelled",
        'href="../runs/a%20%26%20b/report.html"', ledger.head(),
    ):  # fmt: skip
        assert fact in text, fact
    assert (
        f"{account(Repeated(Gaussian(9.0), 25), delta=1e-5, relation='add-remove'):.4g}</td>" in text
    )  # as charged
    assert "ε in all over entries" in text  # all in one minute: by number, not by time
    ledger.set_cap("default", Budget(5.0, 1e-6))
    ledger.reserve("table 3f9ab0c41d6e7a52", Gaussian(9.0), delta=1e-6, relation="add-remove", run="unnamed")
    assert runner.invoke(app, ["page", file, "-o", str(target)]).exit_code == 0
    assert "1 run without a named account" in target.read_text()


def test_page_says_what_is_wrong(file: str, tmp_path: Path) -> None:
    ledger = Ledger(file)
    ledger.set_cap("patients", Budget(0.01, 1e-6))  # below what is spent by now
    ledger.reserve("staff", Gaussian(9.0), delta=1e-6, relation="replace-one", run="n")
    ledger.set_cap("staff", Budget(2.0, 1e-5))  # under which runs of replace-one have no cost
    target = tmp_path / "page.html"
    assert runner.invoke(app, ["page", file, "-o", str(target)]).exit_code == 0
    text = target.read_text()
    assert "above its cap" in text
    assert "no common ε can be proved" in text
    path = Path(file)
    path.write_text(path.read_text().replace("patients", "patience", 1))
    assert isinstance(runner.invoke(app, ["page", file, "-o", str(target)]).exception, LedgerError)
    assert runner.invoke(app, ["page", file, "--runs", str(tmp_path / "no")]).exit_code == 2
