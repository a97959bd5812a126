"""What becomes of a federation when something breaks: every cell ends in a model or in a clear abort.

    python benchmarks/federation_faults.py [--only WORD]

Two parties and a coordinator as processes, 200 rounds, 6 spare ones, 3 s to answer. In the middle of the run party
b reaches the coordinator through a proxy that can cut, damage, repeat or swallow what passes; processes are killed
with -9 or stopped. At the end of the run (3 rounds) processes kill themselves between two of its steps. A hostile
coordinator, and a hostile party, speak with real keys to real processes. A ledger is wrong if it proves less than
the plan costs, or more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.federation.hostile_members import HostileCoordinator, lying_party
from tests.federation.killed import COORDINATOR, PARTY

from benchmarks.federation_trial import SECONDS, STEPS, Proxy, Trial, Window
from benchmarks.record import save
from quietgrad.federation.plan_file import parse_plan, read_plan

RESULT = Path(__file__).parent / "results" / "federation_faults.json"


def _come_back(trial: Trial) -> None:
    trial.kill("b")
    trial.running["b"] = trial.start("b")


def _resume(trial: Trial) -> None:
    trial.kill("server")
    trial.running["server"] = trial.start("server")


def _stop(seconds: float) -> Callable[[Trial], None]:
    def act(trial: Trial) -> None:
        trial.signal("b", signal.SIGSTOP)
        time.sleep(seconds)
        trial.signal("b", signal.SIGCONT)

    return act


def _proxy(mode: str, seconds: float = 0.0) -> Callable[[Trial], None]:
    def act(trial: Trial) -> None:
        trial.proxy.mode = mode
        if seconds:
            time.sleep(seconds)
            trial.proxy.mode = "pass"

    return act


FAULTS: dict[str, tuple[Callable[[Trial], None], str]] = {
    "nothing": (lambda trial: None, "model"),
    "party killed -9, comes back": (_come_back, "model"),
    "party killed -9, stays away": (lambda trial: trial.kill("b"), "abort"),
    "coordinator killed -9, started again": (_resume, "model"),
    "party stopped for 1 s": (_stop(1.0), "model"),
    "party stopped for 5 s (times out)": (_stop(5.0), "model"),
    "connection cut": (_proxy("cut"), "model"),
    "a byte damaged on the wire": (_proxy("damage"), "model"),
    "bytes repeated on the wire": (_proxy("repeat"), "model"),
    "partition for 5 s": (_proxy("swallow", 5.0), "model"),
    "partition that stays": (_proxy("swallow"), "abort"),
}


ENDS: dict[str, tuple[str, Window]] = {
    f"{'coordinator' if who == 'server' else 'party'} killed -9 at the end: {name}": (who, window)
    for who, windows in (("server", COORDINATOR), ("b", PARTY))
    for name, window in windows.items()
}


def middle(act: Callable[[Trial], None]) -> Callable[[Path], dict[str, Any]]:
    """Something happens in the middle of a run."""

    def cell(folder: Path) -> dict[str, Any]:
        trial = Trial(folder).begin("server", "a", "b")
        trial.after(15)
        act(trial)
        return trial.outcome()

    return cell


def end(who: str, window: Window) -> Callable[[Path], dict[str, Any]]:
    """A member kills itself at a step of the end, and is started again; so is whoever is needed for the model."""

    def cell(folder: Path) -> dict[str, Any]:
        trial = Trial(folder, steps=3, armed={who: window}).begin("server", "a", "b")
        trial.running[who].wait(timeout=SECONDS)
        trial.begin(who)
        if who == "b":  # the coordinator may have handed out the model without it: then it does so again
            trial.running["server"].wait(timeout=SECONDS)
            trial.begin("server")
        return trial.outcome()

    return cell


def hostile_coordinator(folder: Path) -> dict[str, Any]:
    """Twelve runs, two other plans, a louder clip, a repeated draw, one round more, and a word about the stop."""
    trial = Trial(folder, steps=25)
    text = (folder / "plan.toml").read_text().replace('trust = "curator"', 'trust = "local"')
    (folder / "plan.toml").write_text(text)
    file = read_plan(folder / "plan.toml")
    trial.proxy = Proxy(file.port)
    hostile = HostileCoordinator(file, folder / "keys")
    trial.begin("b")
    others = (parse_plan(text.replace("epsilon = 1.0", "epsilon = 50.0")), parse_plan(text.replace("= 25", "= 26")))
    opened = sum(hostile.say("open", run="r0", plan=other.plan.digest).kind == "ready" for other in others)
    given = 0
    for k in range(12):
        hostile.say("open", run=f"r{k}")
        given += hostile.releases(f"r{k}", 0, 25)
    tricks: tuple[dict[str, Any], ...] = ({"clip": 9.0}, {"rho": 1e9}, {"draw": 0}, {"round": 3})
    refused = all(hostile.ask("r0", **{"t": 25, **trick}).kind == "refused" for trick in tricks)
    given += hostile.releases("r0", 25, 25)
    hostile.say("close", run="r0", reason="steps", data_dependent=False)
    hostile.finish("bye")
    approved = file.plan.limit("gradient")
    counts = {"releases": given, "approved": approved, "other_plans_opened": opened, "tricks_refused": refused}
    return {**trial.outcome(), **counts, "broken": given > approved or opened > 0 or not refused}


def hostile_party(folder: Path) -> dict[str, Any]:
    """Every vector of party a is no number."""
    trial = Trial(folder, steps=25)
    file = read_plan(folder / "plan.toml")
    trial.begin("server", "b")
    liar = lying_party(file, folder / "keys")
    threading.Thread(target=liar.run, daemon=True).start()
    return trial.outcome()


CELLS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    **{name: (middle(act), expected) for name, (act, expected) in FAULTS.items()},
    **{name: (end(*where), "model") for name, where in ENDS.items()},
    "hostile coordinator": (hostile_coordinator, "abort"),
    "hostile party": (hostile_party, "abort"),
}


def main() -> None:
    """Run every cell and write the JSON; exit code 1 if one ended wrongly."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cells whose name has this in it; others stay as they are")
    chosen = parser.parse_args()
    cells: dict[str, Any] = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    wrong = 0
    for name, (cell, expected) in CELLS.items():
        if chosen.only not in name:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = cell(Path(folder))
        cells[name] = {"expected": expected, **found}
        bad = found["ended"] != expected or found["ledger_under_reports"] or found["ledger_over_reports"]
        bad = bad or found.get("broken", False)
        wrong += bad
        print("WRONG" if bad else "ok   ", name, found, flush=True)
        save(RESULT, {"rounds": STEPS, "cells": cells}, "cryptography")
    os._exit(1 if wrong else 0)  # proxies are still waiting at their doors


if __name__ == "__main__":
    main()
