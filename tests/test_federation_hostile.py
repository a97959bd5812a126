"""Real processes against a member who does not keep to the rules: a coordinator, a party, a clock."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.federation.plan_file import parse_plan, read_plan
from quietgrad.privacy.ledger import Ledger
from tests.hostile_members import HostileCoordinator, lying_party
from tests.test_federate_network import ROOT, TWO, ended, folder, spent_in, start, two

__all__ = ["folder", "start"]  # fixtures of the other file
STEPS = 25
PLAN = TWO.replace("steps = 300", f"steps = {STEPS}").replace('trust = "curator"', 'trust = "local"')


@pytest.mark.usefixtures("folder")
def test_coordinator_who_wants_more_than_was_approved(start: Any) -> None:
    """300 releases are tried where 25 (and 3 spare) were approved, and every way around the plan's noise."""
    words = two(Path(), PLAN)
    file = read_plan("plan.toml")
    louder = parse_plan(PLAN.replace("epsilon = 1.0", "epsilon = 50.0")).plan
    silent = parse_plan(
        PLAN.replace("spare = 3", "private = false").replace("[budget]\nepsilon = 1.0\ndelta = 1e-5\n", "")
    ).plan
    hostile, party = HostileCoordinator(file, Path("keys")), start(*words["b"])
    for other in (louder, silent):  # two plans, and a plan without noise
        assert "not the one that was approved" in hostile.say("open", run="r0", plan=other.digest).fields["reason"]
    given = 0
    for k in range(12):
        hostile.say("open", run=f"r{k}")
        given += hostile.releases(f"r{k}", 0, STEPS)
    assert given == STEPS
    tricks: list[dict[str, Any]] = [{"clip": 9.0}, {"rho": 1e9}, {"draw": 0}, {"round": 3}]
    for fields in tricks:
        assert hostile.ask("r0", **{"t": STEPS, **fields}).kind == "refused"
    given += hostile.releases("r0", STEPS, STEPS)
    assert given == STEPS + 3
    hostile.say("close", run="r0", reason="steps", data_dependent=False)
    assert hostile.say("open", run="r99").fields["code"] == "plan"
    hostile.finish("thank you")
    code, _, err = ended(party)
    assert (code, "what the plan costs stays charged" in err) == (1, True)
    assert spent_in(Path("b"), "default", 1e-5) == pytest.approx(file.plan.epsilon(), rel=1e-6)
    # An operator who starts it again in its folder continues that run, and approves no other.
    hostile, party = HostileCoordinator(file, Path("keys")), start(*words["b"])
    assert "one run was approved here" in hostile.say("open", run="r100").fields["reason"]
    assert hostile.ask("r0", 99).kind == "refused"
    hostile.finish("bye")
    assert ended(party)[0] == 1
    assert len(Ledger("b/ledger.jsonl").book().held) == 1


@pytest.mark.usefixtures("folder")
def test_second_process_of_a_party_and_a_stale_plan_are_refused(start: Any) -> None:
    words = two(Path(), PLAN)
    file = read_plan("plan.toml")
    hostile, party = HostileCoordinator(file, Path("keys")), start(*words["b"])
    assert hostile.say("open", run="r0").kind == "ready"
    code, _, err = ended(start(*words["b"]))
    assert (code, "another process answers for b" in err) == (1, True)
    hostile.finish("aborted: gave up")
    code, _, err = ended(party)
    assert (code, "nothing was asked, so nothing is charged" in err) == (1, True)
    assert Ledger("b/ledger.jsonl").book().counted("default") == []
    stale = HostileCoordinator(file, Path("keys"), agreement="0" * 64)
    code, _, err = ended(start(*words["b"]))
    assert (code, "compare the digests" in err) == (1, True)
    stale.finish("bye")


@pytest.mark.usefixtures("folder")
def test_party_who_lies_is_named_and_learns_nothing(start: Any) -> None:
    words = two(Path(), PLAN.replace("spare = 3", "spare = 1"))
    file = read_plan("plan.toml")
    server, honest = start(*words["server"]), start(*words["b"])
    liar = lying_party(file, Path("keys"))
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(liar.run()))
    thread.start()
    code, _, err = ended(server)
    assert (code, "a: round 1 was lost (a vector has a NaN or an infinity)" in err) == (1, True), err
    thread.join(60.0)
    assert said[0].startswith("aborted: a:")
    assert ended(honest)[0] == 1
    assert spent_in(Path("b"), "default", 1e-5) == pytest.approx(file.plan.epsilon(), rel=1e-6)


@pytest.mark.usefixtures("folder")
def test_plan_without_noise_runs_and_says_so_everywhere(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = PLAN.replace('trust = "local"', 'trust = "secure"\nsecure = "masks"\nprivate = false')
    words = two(Path(), text.replace("[budget]\nepsilon = 1.0\ndelta = 1e-5\n", ""))
    capfd.readouterr()
    assert main(["federate", "show", "plan.toml"]) == 0
    shown = capfd.readouterr().out
    assert "NOT PRIVATE" in shown
    assert "times that of a trusted curator" not in shown
    assert main(["federate", *words["b"], "--cap-epsilon", "1"]) == 1
    assert "no cap can hold" in capfd.readouterr().err
    running = [start(*words[name]) for name in ("server", "a", "b")]
    for process in running:
        code, out, err = ended(process)
        assert code == 0, err
        assert "NOT PRIVATE" in out
        assert "NOT PRIVATE" in err
    for name in ("model", "a", "b"):
        privacy = json.loads((Path(name) / "result.json").read_text())["privacy"]
        assert (privacy["is_private"], privacy["epsilon"]) == (False, None)
        assert privacy["adversary"].startswith("nobody: NOT PRIVATE")
        assert not (Path(name) / "ledger.jsonl").exists()
    np.testing.assert_array_equal(qg.load("a").params, qg.load("model").params)


@pytest.mark.usefixtures("folder")
def test_clocks_that_jump_by_days_change_no_deadline(start: Any) -> None:
    words = two(Path(), PLAN)
    running = [start(*words[name], program=[str(ROOT / "tests" / "jumping.py")]) for name in ("server", "a", "b")]
    for process in running:
        code, _, err = ended(process)
        assert code == 0, err
    assert qg.load("model").privacy.releases == {"gradient": STEPS}
