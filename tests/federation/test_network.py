"""A real federation on loopback: five parties and a coordinator as processes, killed with -9, and what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation.plan_file import read_plan
from tests.federation.killed import COORDINATOR, KILLED, PARTY
from tests.federation.talk import toml_plan
from tests.federation.test_plan_file import EXAMPLE, TEXT

ROOT = Path(__file__).parents[2]
SECONDS = 150.0  # to give up, not to measure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Any]:
    """Starts `quietgrad federate …` as a process of its own; all are gone at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, program: Sequence[str] = ("-m", "quietgrad")) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *program, "federate", *words],
            cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def plan_text(text: str) -> str:
    """``text`` with a free port of this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("loopback sockets are not permitted here")
    return text.replace("127.0.0.1:7443", f"127.0.0.1:{port}")


def spent_in(home: Path, account: str, delta: float) -> float:
    return Ledger(home / "ledger.jsonl").spent(account, delta=delta, relation=qg.Relation.ADD_REMOVE).epsilon


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def test_five_hospitals(folder: Path, start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.toml").write_text(plan_text(TEXT))
    subprocess.run([sys.executable, EXAMPLE.parent / "make_data.py", "data"], check=True, cwd=folder)
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    server = start("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--json")
    hospitals = {
        f"hospital-{i}": start(
            "party", "plan.toml", "--keys", f"keys/hospital-{i}", "--data", f"data/hospital-{i}.npz",
            "--out", f"hospital-{i}", "--account", "patients", "--json",
        )
        for i in range(1, 6)
    }  # fmt: skip
    code, out, err = ended(server)
    assert (code, err) == (0, "")
    statement = json.loads(out)
    assert statement["privacy"]["is_private"]
    assert statement["privacy"]["epsilon"] <= 1.0
    assert statement["details"]["lost_rounds"] == 0
    model = qg.load(folder / "model")
    for name, process in hospitals.items():
        code, out, err = ended(process)
        assert (code, err) == (0, "")
        np.testing.assert_array_equal(qg.load(folder / name).params, model.params)
        spent = spent_in(folder / name, "patients", 1e-4)
        assert spent == pytest.approx(statement["privacy"]["epsilon"], rel=1e-6)
        assert not list((folder / name).glob("*.journal"))
    capfd.readouterr()
    assert main(["predict", "hospital-3", "data/held-out.npz", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["scores"]["accuracy"] > 0.8


TWO = toml_plan(
    {"a": 60, "b": 40}, 'trust = "curator"\nspare = 3', steps=300, features=3,
    coordinator='address = "127.0.0.1:7443"\ntimeout = 40\ngrace = 40',
)  # fmt: skip


def two(folder: Path, text: str = TWO) -> dict[str, tuple[str, ...]]:
    """Plan, keys and data of two parties; the words that start each member."""
    (folder / "plan.toml").write_text(plan_text(text))
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    rng = np.random.default_rng(3)
    for name, n in (("a", 60), ("b", 40)):
        X = rng.normal(size=(n, 3))
        np.savez(folder / f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
    return {
        "server": ("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--wait", "40"),
        "a": ("party", "plan.toml", "--keys", "keys/a", "--data", "a.npz", "--out", "a", "--patience", "40"),
        "b": ("party", "plan.toml", "--keys", "keys/b", "--data", "b.npz", "--out", "b", "--patience", "40"),
    }


def kill_after(rounds: int, journals: Path, process: subprocess.Popen[str]) -> None:
    """kill -9 once a party has answered some rounds."""
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        lines = [path.read_bytes().count(b"\n") for path in journals.glob("*.journal")]
        if lines and lines[0] > rounds:
            break
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_party_and_killed_coordinator_come_back(folder: Path, start: Any) -> None:
    words = two(folder)
    running = {name: start(*command) for name, command in words.items()}
    kill_after(10, folder / "b", running["b"])
    running["b"] = start(*words["b"])
    kill_after(60, folder / "a", running["server"])
    running["server"] = start(*words["server"])
    outcomes = {name: ended(process) for name, process in running.items()}
    assert {name: code for name, (code, _, _) in outcomes.items()} == {"server": 0, "a": 0, "b": 0}, outcomes
    assert "continuing the interrupted run" in outcomes["server"][2]
    result = qg.load(folder / "model")
    assert result.privacy.releases["gradient"] == 300  # nothing was lost, and nothing paid again
    assert result.privacy.epsilon is not None
    for name in ("a", "b"):
        np.testing.assert_array_equal(qg.load(folder / name).params, result.params)
        spent = spent_in(folder / name, "default", 1e-5)
        assert spent <= 1.0 + 1e-9
        assert spent >= result.privacy.epsilon * 0.99
    assert Ledger(folder / "b" / "ledger.jsonl").book().accounts() == ("default",)


def test_show_and_simulate(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.toml").write_text(TEXT)
    assert main(["federate", "show", "plan.toml"]) == 0
    assert "to see one party's vector" in capfd.readouterr().out
    assert main(["federate", "show", "plan.toml", "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["digest"]) == 64
    words = "federate simulate breast-cancer --parties 3 --algorithm dp-gd --steps 4 --epsilon 2 --unevenness 2"
    assert main([*words.split(), "--row-bound", "1", "--rows", "normalize", "--out", "sim", "--json"]) == 0
    statement = json.loads(capfd.readouterr().out)
    assert statement["details"]["trust"] == "secure"
    assert statement["privacy"]["epsilon"] <= 2.0
    assert Ledger(folder / "sim" / "parties" / "party-3" / "ledger.jsonl").verify().ok


@pytest.mark.parametrize(
    ("words", "code", "say"),
    [
        ("server none.toml --keys keys", 1, "no plan file"),
        ("server plan.toml --keys keys", 1, "member.json is missing"),
        ("party plan.toml --keys keys --data none.npz --pin " + "0" * 64, 1, "not the approved"),
        ("provision plan.toml --request nobody", 2, "'nobody' is not one of"),
        ("simulate breast-cancer --parties 0 --epsilon 1", 1, "m=0 parties"),
        ("simulate breast-cancer", 2, "--epsilon"),
    ],
)
def test_refusals_are_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str], words: str, code: int, say: str
) -> None:
    (folder / "plan.toml").write_text(TEXT)
    (folder / "keys").mkdir()
    assert main(["federate", *words.split()]) == code
    err = capfd.readouterr().err.strip()
    assert err.startswith("quietgrad federate: ")
    assert err.count("\n") == 0
    assert say in err


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
@pytest.mark.long
def test_coordinator_killed_at_every_step_of_the_end(start: Any) -> None:
    """Six kills of one run, each at the next window; the seventh process only hands out the model."""
    words = two(Path(), PLAN)
    parties = [start(*words[name]) for name in ("a", "b")]
    for window in COORDINATOR.values():
        killed(start(*words["server"], program=(KILLED, *window)))
    code, _, err = ended(start(*words["server"]))
    assert (code, "round" in err) == (0, False), err
    assert "no party is asked again" in err
    for party in parties:
        assert ended(party)[0] == 0
    model = qg.load("model")
    for name in ("model", "a", "b"):
        check(Path(name), model)


@pytest.mark.usefixtures("folder")
@pytest.mark.long
def test_party_killed_at_every_step_of_the_end(start: Any) -> None:
    words = two(Path(), PLAN)
    server, other = start(*words["server"]), start(*words["a"])
    for window in PARTY.values():
        killed(start(*words["b"], program=(KILLED, *window)))
    ends = [ended(process) for process in (start(*words["b"]), server, other)]  # the coordinator waits for it
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    model = qg.load("model")
    for name in ("model", "a", "b"):
        check(Path(name), model)


@pytest.mark.usefixtures("folder")
def test_a_coordinator_whose_model_everybody_has_waits_for_nobody(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sums by two servers, which are processes too; and everybody can say where the run is."""
    words = two(Path(), PLAN.replace('trust = "curator"', 'trust = "secure"\nsecure = "servers"'))
    helpers = [start("server", "plan.toml", "--keys", f"keys/server-{k}", "--wait", "40") for k in (1, 2)]
    outcomes = [ended(process) for process in [*(start(*each) for each in words.values()), *helpers]]
    assert [code for code, *_ in outcomes] == [0] * 5, outcomes
    for _, _, err in outcomes[:3]:
        assert f"round {STEPS} of {STEPS}; ε = 1" in err
    again = start(*words["server"][:-1], "100000")
    code, _, err = ended(again)
    assert (code, "no party is asked again" in err, "round" in err) == (0, True, False), err
    for home in ("model", "a", "b"):
        capfd.readouterr()
        assert main(["federate", "status", home, "--json"]) == 0
        said = json.loads(capfd.readouterr().out)
        assert (said["rounds"], said["of"], said["words"]) == (STEPS, STEPS, "the run is complete")
    assert main(["federate", "status", "nowhere"]) == 1
