"""A CNN on MNIST between processes: five parties over TLS, or three sites of a FLARE deployment, by masks.

    python benchmarks/federation_networks.py            # both; needs MNIST (quietgrad data find mnist)

Of the five processes one party and the coordinator are killed with -9 in mid-run and started again. What is kept:
the accuracy of the model on MNIST's test part, ε in every member's ledger, the rounds that were lost, seconds; and
how far parties of a trusted curator end from one table, with the same samples and noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import quietgrad as qg
from benchmarks.record import ROOT, save
from quietgrad import data
from quietgrad.cli import main as cli
from quietgrad.cli.network_predictions import format_of, network_predictions
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation.approved import FILE
from quietgrad.federation.plan_file import CLASSES, read_plan

RESULT = Path(__file__).parent / "results" / "federation_networks.json"
MODULE = '''"""The CNN of Opacus's MNIST example."""

from torch import nn


def make() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )
'''
METHODS = {
    "dp-srm": 'name = "dp-srm"\nsteps = 150\nbatch_size = 600\nlearning_rate = 0.5\nclip = 1.0\ngamma = 0.2',
    "dp-sgd": 'name = "dp-sgd"\nsteps = 150\nbatch_size = 600\nlearning_rate = 0.5\nclip = 1.0',
}
EPSILON, DELTA, SECONDS = 3.0, 1e-5, 1500.0


def plan_text(method: str, parties: Mapping[str, int], port: int) -> str:
    """A plan of the CNN on parts of MNIST."""
    rows = [
        "[federation]", 'name = "mnist"', 'trust = "secure"', 'secure = "masks"', "spare = 6",
        "[coordinator]", f'address = "127.0.0.1:{port}"', "timeout = 120", "grace = 120",
        "[algorithm]", METHODS[method],
        "[objective]", 'name = "network"', 'module = "cnn.py:make"', "parameters = 26010",
        "[data]", 'form = "images"', "shape = [1, 28, 28]", f"classes = {list(range(10))}",
        "[budget]", f"epsilon = {EPSILON}", f"delta = {DELTA}",
        *(f'[[party]]\nname = "{name}"\nrecords = {n}' for name, n in parties.items()),
    ]  # fmt: skip
    return "\n".join(rows) + "\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def deal(folder: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Write the parties' parts of MNIST, and its test part; the numbers of records by name."""
    found = data.load("mnist")
    assert isinstance(found.X, np.ndarray)
    X, y = np.rint(found.X * (255.0 if found.X.max() <= 1.0 else 1.0)).astype(np.uint8), found.y
    for k, name in enumerate(names):
        part = slice(k, None, len(names))
        np.savez(folder / f"{name}.npz", X=X[part].reshape(-1, 1, 28, 28), y=y[part])
    assert isinstance(found.X_test, np.ndarray)
    scale = 255.0 if found.X_test.max() <= 1.0 else 1.0
    test = np.rint(found.X_test * scale).astype(np.uint8).reshape(-1, 1, 28, 28)
    np.savez(folder / "test.npz", X=test, y=found.y_test)
    (folder / "cnn.py").write_text(MODULE)
    return {name: len(y[k :: len(names)]) for k, name in enumerate(names)}


def outcome(folder: Path, home: str, members: Mapping[str, str], account: str) -> dict[str, Any]:
    """Accuracy, ε in every ledger, lost rounds."""
    model = qg.load(folder / home)
    facts = model.details["model"]
    records = format_of(facts).load(folder / "test.npz")
    _, scores = network_predictions(folder / home, facts, records, folder / home / "cnn.py")
    spent = {}
    for name, own in members.items():
        book = Ledger(folder / own / "ledger.jsonl")
        spent[name] = book.spent(account, delta=DELTA, relation=qg.Relation.ADD_REMOVE).epsilon
        same = (folder / own / "model.safetensors").read_bytes() == (
            folder / home / "model.safetensors"
        ).read_bytes()
        if not same or len(book.book().held) != 1:
            raise AssertionError(f"{name}: another model, or charged more than once")
    return {
        "accuracy": scores["accuracy"], "epsilon": model.privacy.epsilon, "delta": DELTA, "spent": spent,
        "lost_rounds": model.details["lost_rounds"], "noise_multiplier": model.privacy.noise_multiplier,
        "releases": dict(model.privacy.releases), "parameters": len(model.params),
    }  # fmt: skip


def over_tls(method: str) -> dict[str, Any]:
    """Five processes and a coordinator; a party and the coordinator are killed once each."""
    names = tuple(f"hospital-{k}" for k in range(1, 6))
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        folder = Path(home)
        os.environ["QUIETGRAD_STATE"] = str(folder / "state")
        (folder / "plan.toml").write_text(plan_text(method, deal(folder, names), free_port()))
        assert cli(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
        running: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str) -> None:
            words = ["server", "plan.toml", "--keys", "keys/coordinator", "--out", "model"]
            if name != "model":
                words = ["party", "plan.toml", "--keys", f"keys/{name}", "--data", f"{name}.npz", "--out", name]
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            log = (folder / f"{name}.log").open("ab")
            running[name] = subprocess.Popen(
                [sys.executable, "-m", "quietgrad", "federate", *words, "--quiet"], env=environment, stdout=log,
                stderr=log,
            )  # fmt: skip

        def rounds() -> int:
            with contextlib.suppress(OSError, ValueError, KeyError):
                return int(json.loads((folder / "model" / "progress.json").read_text())["rounds"])
            return 0

        begun = time.monotonic()
        for name in ("model", *names):
            start(name)
        for victim, at in (("hospital-3", 30), ("model", 70)):
            while rounds() < at:
                if time.monotonic() - begun > SECONDS or running["model"].poll() is not None:
                    raise TimeoutError((folder / "model.log").read_text()[-2000:])
                time.sleep(0.1)
            running[victim].send_signal(signal.SIGKILL)
            running[victim].wait()
            start(victim)
        for name, process in running.items():
            if process.wait(timeout=SECONDS) != 0:
                raise AssertionError((folder / f"{name}.log").read_text()[-2000:])
        seconds = time.monotonic() - begun
        found = outcome(folder, "model", {"coordinator": "model", **{name: name for name in names}}, "default")
        killed = ["hospital-3 after round 30", "coordinator after round 70"]
        return {"method": method, "parties": len(names), "killed": killed, "seconds": round(seconds, 1), **found}


def on_flare(method: str) -> dict[str, Any]:
    """Three sites of a FLARE deployment with certificates of its own."""
    from tests.federation.flare import Flare

    sites = ("site-1", "site-2", "site-3")
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        folder = Path(home)
        os.environ["QUIETGRAD_STATE"] = str(folder / "state")
        (folder / "plan.toml").write_text(plan_text(method, deal(folder, sites), free_port()))
        flare = Flare(folder, sites)
        try:
            assert cli(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
            assert cli(["federate", "job", "plan.toml", "--engine", "flare", "--out", "job"]) == 0
            for name in ("server", *sites):
                words = ["approve", "plan.toml", "--pin", read_plan("plan.toml").digest, "--out", f"out/{name}"]
                words += ["--file", str(flare.kit(name) / "local" / FILE), "--account", "patients"]
                words += ["--keys", "keys/coordinator"] if name == "server" else ["--keys", f"keys/{name}"]
                assert cli(["federate", *words, *([] if name == "server" else ["--data", f"{name}.npz"])]) == 0
                flare.allow(name, CLASSES)
            flare.start()
            begun = time.monotonic()
            job = flare.submit(Path("job"))
            out, _ = job.communicate(timeout=SECONDS)
            if "COMPLETED" not in out:
                raise AssertionError(flare.log("server")[-3000:])
            seconds = time.monotonic() - begun
            found = outcome(folder, "out/server", {name: f"out/{name}" for name in ("server", *sites)}, "patients")
        finally:
            flare.close()
        return {"method": method, "sites": len(sites), "seconds": round(seconds, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("tls", "flare"))
    asked = parser.parse_args()
    kept: dict[str, Any] = {}
    if RESULT.exists():
        kept = {key: value for key, value in json.loads(RESULT.read_text()).items() if key in ("tls", "flare")}
    if asked.only != "flare":
        kept["tls"] = [over_tls(method) for method in METHODS]
        save(RESULT, kept, "nvflare")
    if asked.only != "tls":
        kept["flare"] = []
        for method in METHODS:
            kept["flare"].append(on_flare(method))
            save(RESULT, kept, "nvflare")


if __name__ == "__main__":
    main()
