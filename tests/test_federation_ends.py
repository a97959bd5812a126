"""Killed with -9 at every step of the end, as real processes: nothing is asked again, nothing is paid twice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.federation.plan_file import read_plan
from quietgrad.privacy.ledger import Ledger
from tests.killed import COORDINATOR, KILLED, PARTY
from tests.test_federate_network import TWO, ended, folder, start, two

__all__ = ["folder", "start"]  # fixtures of the other file
STEPS = 3
PLAN = TWO.replace("steps = 300", f"steps = {STEPS}")


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


@pytest.mark.usefixtures("folder")
def test_a_coordinator_whose_model_everybody_has_waits_for_nobody(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """And everybody can say where the run is."""
    words = two(Path(), PLAN)
    running = [start(*each) for each in words.values()]
    outcomes = [ended(process) for process in running]
    assert [code for code, *_ in outcomes] == [0, 0, 0], outcomes
    for _, _, err in outcomes:
        assert f"round {STEPS} of {STEPS} [████████████████████] ε = 1" in err
    again = start(*words["server"][:-1], "100000")
    code, _, err = ended(again)
    assert (code, "nobody is asked anything" in err, "round" in err) == (0, True, False), err
    for home in ("model", "a", "b"):
        capfd.readouterr()
        assert main(["federate", "status", home, "--json"]) == 0
        said = json.loads(capfd.readouterr().out)
        assert (said["rounds"], said["of"], said["words"]) == (STEPS, STEPS, "the run is complete")
    assert main(["federate", "status", "nowhere"]) == 1
