"""What becomes of a federation over TLS when something breaks: every cell ends in a model or in a clear abort.

    python benchmarks/federation_faults.py

Two parties and a coordinator as processes, 200 rounds, 6 spare ones, 3 s to answer. Party b reaches the coordinator
through a proxy that can cut, damage, repeat or swallow what passes; processes are killed with -9 or stopped. A
ledger under-reports if it proves less than the rounds that became a model, or less than the plan after an abort.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.federation_network import PLAN, federate, free_ports
from benchmarks.record import save

from quietgrad.federation.toml_plan import read_plan
from quietgrad.privacy.ledger import Ledger

RESULT = Path(__file__).parent / "results" / "federation_faults.json"
STEPS, SECONDS = 200, 120.0


class Proxy:
    """Passes bytes between a party and the coordinator, until told to do otherwise."""

    def __init__(self, port: int) -> None:
        self._to, self.mode = ("127.0.0.1", port), "pass"
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._door.accept()
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                mode = self.mode
                if mode == "swallow":
                    continue
                if mode != "pass":
                    self.mode = "pass"
                if mode == "cut":
                    break
                if mode == "damage":
                    data = data[:-1] + bytes([data[-1] ^ 1])
                other.sendall(data * 2 if mode == "repeat" else data)
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Trial:
    """One federation and what is done to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = free_ports()
        text = PLAN.format(port=port, steps=STEPS, d=20).replace("timeout = 120", "timeout = 3\ngrace = 3")
        text = text.replace("spare = 2", "spare = 6")
        (folder / "plan.toml").write_text(text + "".join(f'[[party]]\nname="{n}"\nrecords=50\n' for n in "ab"))
        rng = np.random.default_rng(0)
        for name in "ab":
            X = rng.standard_normal((50, 20)) / 5.0
            np.savez(folder / f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
        assert self._start("provision", folder / "plan.toml", "--out", folder / "keys").wait() == 0
        self.proxy = Proxy(port)
        self.running = {name: self.start(name) for name in ("server", "a", "b")}

    def _start(self, *words: str | Path) -> subprocess.Popen[bytes]:
        pipe = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return federate(*words, state=self.folder / "state", **pipe)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a member."""
        plan, keys = self.folder / "plan.toml", self.folder / "keys"
        if name == "server":
            return self._start("server", plan, "--keys", keys / "coordinator", "--out", self.folder / "model")
        words = ("--data", self.folder / f"{name}.npz", "--out", self.folder / name, "--patience", "40")
        detour = ("--address", f"127.0.0.1:{self.proxy.port}") if name == "b" else ()
        return self._start("party", plan, "--keys", keys / name, *words, *detour)

    def after(self, rounds: int) -> None:
        """Wait until party b has answered some rounds."""
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit:
            if any(p.read_bytes().count(b"\n") > rounds for p in (self.folder / "b").glob("*.journal")):
                return
            time.sleep(0.005)
        raise TimeoutError("the run did not start")

    def kill(self, name: str) -> None:
        """kill -9."""
        self.running[name].kill()
        self.running[name].wait()

    def outcome(self) -> dict[str, Any]:
        """How it ended, and whether any ledger says too little."""
        said = {}
        for name, process in self.running.items():
            try:
                _, err = process.communicate(timeout=SECONDS)
                last = (err.decode().strip().splitlines() or [""])[-1]
            except subprocess.TimeoutExpired:
                process.kill()
                last = "HUNG"
            said[name] = {"code": process.returncode, "last_line": last[:220] if process.returncode else ""}
        result = self.folder / "model" / "result.json"
        released = json.loads(result.read_text())["privacy"] if result.exists() else None
        plan = read_plan(self.folder / "plan.toml").plan
        spent = {
            name: Ledger(self.folder / name / "ledger.jsonl")
            .spent("default", delta=1e-5, relation="add-remove")
            .epsilon
            for name in "ab"
        }
        least = plan.epsilon() if released is None else plan.epsilon_after({"gradient": STEPS})
        lost = 0 if released is None else released["releases"]["gradient"] - STEPS
        return {
            "ended": "model" if released else "abort",
            "members": said,
            "rounds_lost_and_paid": lost,
            "epsilon_released": None if released is None else round(released["epsilon"], 4),
            "epsilon_in_ledgers": {name: round(value, 4) for name, value in spent.items()},
            "ledger_under_reports": min(spent.values()) < least * 0.999,
        }


def _come_back(trial: Trial) -> None:
    trial.kill("b")
    trial.running["b"] = trial.start("b")


def _resume(trial: Trial) -> None:
    trial.kill("server")
    trial.running["server"] = trial.start("server")


def _stop(seconds: float) -> Callable[[Trial], None]:
    def act(trial: Trial) -> None:
        trial.running["b"].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        trial.running["b"].send_signal(signal.SIGCONT)

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


def main() -> None:
    """Run every cell and write the JSON; exit code 1 if one ended wrongly."""
    argparse.ArgumentParser().parse_args()
    cells, wrong = {}, 0
    for name, (act, expected) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Path(folder))
            trial.after(15)
            act(trial)
            cells[name] = {"expected": expected, **trial.outcome()}
            for process in trial.running.values():
                process.kill()
        cell = cells[name]
        bad = cell["ended"] != expected or cell["ledger_under_reports"]
        wrong += bad
        print("WRONG" if bad else "ok   ", name, cell, flush=True)
        save(RESULT, {"rounds": STEPS, "cells": cells}, "cryptography")
    os._exit(1 if wrong else 0)  # proxies are still waiting at their doors


if __name__ == "__main__":
    main()
