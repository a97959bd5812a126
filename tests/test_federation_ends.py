"""Killed with -9 at every step of the end, as real processes: nothing is asked again, nothing is paid twice."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.federation.toml_plan import read_plan
from quietgrad.privacy.ledger import Ledger
from tests.test_federate_network import ROOT, TWO, ended, folder, start, two

__all__ = ["folder", "start"]  # fixtures of the other file
STEPS = 3
KILLED = str(ROOT / "tests" / "killed.py")
PLAN = TWO.replace("steps = 300", f"steps = {STEPS}")
COORDINATOR = {
    "nobody has heard of the end": ("quietgrad.federation.aggregate_store:AggregateStore.end", "after"),
    "parties have closed, its own ledger has not": ("quietgrad.curators.account:Charge.close", "before"),
    "its ledger is closed and nothing is saved": ("quietgrad.curators.account:Charge.close", "after"),
    "the model is saved and the statement is not": ("quietgrad.training.result:Result.to_json", "before"),
    "all is saved and nothing cleared away": ("quietgrad.training.result:Result.save", "after"),
    "nobody has the model yet": ("quietgrad.federation.transport.tls:TlsServer.finish", "before"),
}  # fmt: skip
PARTY = {
    "its ledger is not closed": ("quietgrad.curators.account:Charge.close", "before"),
    "its ledger is closed and its journal does not say so": ("quietgrad.curators.account:Charge.close", "after"),
    "nobody heard that it closed": ("quietgrad.federation.approval:Approval.close", "after"),
    "it has the model and has not saved it": ("quietgrad.federation.network:save_parting", "before"),
}


def killed(process: subprocess.Popen[str]) -> None:
    code, _, err = ended(process)
    assert code == -9, err


def check(home: Path, model: qg.Result) -> None:
    """What anybody ends with: the model, and one entry that is charged what the plan costs."""
    plan = read_plan("plan.toml").plan
    np.testing.assert_array_equal(qg.load(home).params, model.params)
    (held,) = Ledger(home / "ledger.jsonl").book().held.values()
    assert (held.state, held.counts) == ("closed", plan.event)
    assert model.privacy.releases == {"gradient": STEPS}
    assert not [path.name for path in home.iterdir() if path.suffix in (".journal", ".bin")]


@pytest.mark.usefixtures("folder")
def test_coordinator_killed_at_every_step_of_the_end(start: Any) -> None:
    """Six kills of one run, each at the next window; the seventh process only hands out the model."""
    words = two(Path(), PLAN)
    parties = [start(*words[name]) for name in ("a", "b")]
    for window in COORDINATOR.values():
        killed(start(*words["server"], program=(KILLED, *window)))
    code, _, err = ended(start(*words["server"]))
    assert (code, "round" in err) == (0, False), err
    assert "nobody is asked anything" in err
    for party in parties:
        assert ended(party)[0] == 0
    model = qg.load("model")
    for name in ("model", "a", "b"):
        check(Path(name), model)


@pytest.mark.usefixtures("folder")
def test_party_killed_at_every_step_of_the_end(start: Any) -> None:
    words = two(Path(), PLAN)
    server, other = start(*words["server"]), start(*words["a"])
    for window in PARTY.values():
        killed(start(*words["b"], program=(KILLED, *window)))
    assert [ended(process)[0] for process in (server, other)] == [0, 0]
    again = start(*words["server"][:-1], "5")  # the coordinator hands out what it has
    code, _, err = ended(start(*words["b"]))
    assert (code, ended(again)[0]) == (0, 0), err
    model = qg.load("model")
    for name in ("model", "a", "b"):
        check(Path(name), model)
