"""The anchor: a digest kept elsewhere tells a ledger that was restored, with its head, from a backup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quietgrad.cli import main
from quietgrad.cli.ledger import app
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import Gaussian
from quietgrad.core.errors import LedgerError
from quietgrad.core.ledger.ledger import Ledger

PROMISE: dict[str, Any] = {"delta": 1e-5, "relation": "add-remove"}
run = CliRunner().invoke


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger.jsonl")
    for name in "abc":
        made.reserve("people", Gaussian(4.0), run=name, **PROMISE)
    return made


def copy(ledger: Ledger, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in (ledger.path, ledger.path.with_name(ledger.path.name + ".head")):
        shutil.copy2(file, folder / file.name)


def restore(ledger: Ledger, folder: Path) -> Ledger:
    for file in folder.iterdir():
        shutil.copy2(file, ledger.path.parent / file.name)
    return Ledger(ledger.path)


@pytest.mark.parametrize(
    ("more", "problem"), [("", "older than the anchor"), ("xyz", "line 5 is not the one anchored")]
)
def test_a_restored_backup_is_whole_by_itself_and_seen_by_the_anchor(
    ledger: Ledger, tmp_path: Path, more: str, problem: str
) -> None:
    """Also if it went on after it was restored."""
    copy(ledger, tmp_path / "backup")
    ledger.reserve("people", Gaussian(1.0), run="d", **PROMISE)
    kept = ledger.head()
    assert ledger.verify(kept).ok
    old = restore(ledger, tmp_path / "backup")
    for name in more:
        old.reserve("people", Gaussian(9.0), run=name, **PROMISE)
    assert old.verify().ok  # both files fit each other: nothing in them can tell
    assert problem in old.verify(kept).problems[0]


def test_a_cut_that_was_adopted_is_seen(ledger: Ledger) -> None:
    kept = ledger.head()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:3]))
    cut = Ledger(ledger.path)
    cut.adopt(reason="the head was lost")
    assert cut.verify().ok
    assert not cut.verify(kept).ok


def test_every_earlier_head_is_a_beginning_of_every_later_ledger(ledger: Ledger) -> None:
    kept = [ledger.head()]
    kept.append(ledger.head())
    paid = ledger.reserve("people", Gaussian(2.0), run="d", **PROMISE)
    kept.append(ledger.head())
    ledger.close(paid.id, reason="done")
    kept.append(ledger.head())
    ledger.set_cap("people", Budget(9.0, 1e-5))
    kept.append(ledger.head())
    assert len(set(kept)) == 4
    assert all(Ledger(ledger.path).verify(head).ok for head in kept)


def test_an_edit_before_the_anchor_fails_with_and_without_it(ledger: Ledger) -> None:
    kept = ledger.head()
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b"people", b"nobody"))
    report = Ledger(ledger.path).verify(kept)
    assert not report.ok
    assert "was edited" in report.problems[0]
    with pytest.raises(LedgerError, match="was edited"):
        Ledger(ledger.path).head()


def test_a_ledger_that_is_gone_is_older_than_any_anchor(ledger: Ledger) -> None:
    kept = ledger.head()
    for file in list(ledger.path.parent.glob("ledger.jsonl*")):
        file.unlink()
    gone = Ledger(ledger.path)
    assert gone.verify().ok  # there was never one, for all it can tell
    assert not gone.verify(kept).ok
    with pytest.raises(LedgerError, match="nothing is written yet"):
        gone.head()


@pytest.mark.parametrize("text", ["", "x", "4", "4-", "4-" + "0" * 39, "4-" + "0" * 41, "0-" + "0" * 40, "-1-aa"])
def test_a_text_that_is_no_head_is_refused(ledger: Ledger, text: str) -> None:
    with pytest.raises(ValueError, match="must be what `quietgrad ledger head` printed"):
        ledger.verify(text)
    assert main(["ledger", "verify", str(ledger.path), "--head", text]) == 2


def test_the_command_line(ledger: Ledger, tmp_path: Path) -> None:
    copy(ledger, tmp_path / "backup")
    first = run(app, ["head", str(ledger.path)]).stdout.strip()
    assert first == ledger.head()
    assert len(first) < 50
    ledger.reserve("people", Gaussian(1.0), run="d", **PROMISE)
    kept = json.loads(run(app, ["head", str(ledger.path), "--json"]).stdout)["head"]
    for head in (first, kept):
        done = run(app, ["verify", str(ledger.path), "--head", head])
        assert (done.exit_code, "whole; 5 entries" in done.stdout) == (0, True)
    restore(ledger, tmp_path / "backup")
    assert run(app, ["verify", str(ledger.path)]).exit_code == 0
    assert run(app, ["verify", str(ledger.path), "--head", first]).exit_code == 0
    seen = run(app, ["verify", str(ledger.path), "--head", kept])
    assert seen.exit_code == 1
    assert "older than the anchor" in seen.output
