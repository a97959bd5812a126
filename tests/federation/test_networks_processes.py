"""Parties as processes that train a network over TLS: killed with -9, resumed, charged, and what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.cli.federate_roles import approval, coordinate, take_part
from quietgrad.core.ledger.ledger import Ledger
from tests.federation.deployment import PARAMETERS, plan_text, write

ROOT = Path(__file__).parent.parent.parent
SECONDS = 150.0  # to give up, not to measure
TWO = {"a": 60, "b": 50}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "quietgrad", "federate", *words], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> int:
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return int(free.getsockname()[1])
    except OSError:
        pytest.skip("loopback sockets are not permitted here")


def silent(words: str) -> None:
    """Say nothing."""


def serve(ends: dict[str, Any]) -> None:
    mine = approval(Path("plan.toml"), Path("keys/coordinator"), Path("model"))
    ends["coordinator"] = coordinate(mine, wait=SECONDS, patience=SECONDS, tell=silent)


def answer(ends: dict[str, Any]) -> None:
    mine = approval(Path("plan.toml"), Path("keys/a"), Path("a"), data=Path("a.npz"))
    ends["a"] = take_part(mine, silent, patience=SECONDS)


def test_processes_train_a_network_by_masks_and_survive_a_kill(
    folder: Path, start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A party is killed in mid-run and starts again; every ledger ends with the plan's ε, once."""
    text = plan_text(
        TWO, 'trust = "secure"\nsecure = "masks"\nspare = 2', port=free_port(),
        algorithm='name = "dp-srm"\nsteps = 120\nbatch_size = 40',
    )  # fmt: skip
    write(folder, TWO, text)
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    ends: dict[str, Any] = {}
    # Coordinator and one party are threads here: a process of torch's own takes seconds to start.
    threads = [threading.Thread(target=serve, args=(ends,)), threading.Thread(target=answer, args=(ends,))]
    for thread in threads:
        thread.start()

    def party(name: str) -> Any:
        return start(
            "party", "plan.toml", "--keys", f"keys/{name}", "--data", f"{name}.npz", "--out", name, "--json"
        )

    b = party("b")
    limit = time.monotonic() + SECONDS
    while not Path("b/progress.json").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    b.send_signal(signal.SIGKILL)
    b.wait()
    assert not Path("model/result.json").exists()
    b = party("b")
    out, err = b.communicate(timeout=SECONDS)
    assert (b.returncode, err) == (0, ""), out
    for thread in threads:
        thread.join(SECONDS)
    assert ends["a"]["words"] == "the run is complete"
    assert ends["coordinator"].details["lost_rounds"] <= 2
    model = qg.load("model")
    assert model.privacy.is_private
    assert model.params.shape == (PARAMETERS,)
    for name in ("model", *TWO):
        np.testing.assert_array_equal(qg.load(name).params, model.params)
        assert Path(name, "model.safetensors").read_bytes() == Path("model/model.safetensors").read_bytes()
        spent = Ledger(Path(name, "ledger.jsonl")).spent("default", delta=1e-4, relation=qg.Relation.ADD_REMOVE)
        assert spent.epsilon == pytest.approx(model.privacy.epsilon, rel=1e-6)
        assert len(Ledger(Path(name, "ledger.jsonl")).book().held) == 1
    capfd.readouterr()
    assert main(["predict", "a", "held-out.npz", "--json"]) == 1  # the code of a network is run by name only
    assert "--module a/network.py" in capfd.readouterr().err
    assert main(["predict", "a", "held-out.npz", "--module", "a/network.py", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["records"] == 90
    assert said["scores"]["accuracy"] > 0.6
    Path("network.py").write_text("import torch\n")
    assert main(["predict", "a", "held-out.npz", "--module", "network.py"]) == 1
    assert main(["evaluate", "a", "held-out.npz"]) == 1
    for words in (["report", "a"], ["report", "model"], ["card", "a"], ["certificate", "model", "-o", "c.json"]):
        assert main(words) == 0
    capfd.readouterr()
    assert main(["verify", "c.json"]) == 0
    assert "network" in Path("a/MODEL_CARD.md").read_text()
