"""A federation of two parties as real processes, party b behind a proxy that can misbehave, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.federation.killed import KILLED

from benchmarks.federation_network import PLAN, federate, free_ports
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation.plan_file import read_plan

STEPS, SECONDS = 200, 120.0
Window = tuple[str, str]


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

    def __init__(self, folder: Path, *, steps: int = STEPS, armed: Mapping[str, Window] | None = None) -> None:
        self.folder, self.armed = folder, dict(armed or {})
        port = free_ports()
        text = PLAN.format(port=port, steps=steps, d=20).replace("timeout = 120", "timeout = 3\ngrace = 3")
        text = text.replace("spare = 2", "spare = 6")
        (folder / "plan.toml").write_text(text + "".join(f'[[party]]\nname="{n}"\nrecords=50\n' for n in "ab"))
        rng = np.random.default_rng(0)
        for name in "ab":
            X = rng.standard_normal((50, 20)) / 5.0
            np.savez(folder / f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
        words = ("provision", folder / "plan.toml", "--out", folder / "keys")
        assert self._start("", *words).wait() == 0
        self.proxy = Proxy(port)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, *names: str) -> Trial:
        """Start these members."""
        self.running |= {name: self.start(name) for name in names}
        return self

    def _start(self, name: str, *words: str | Path) -> subprocess.Popen[bytes]:
        pipe: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        window = self.armed.pop(name, None)
        program = () if window is None else (KILLED, *window)
        return federate(*words, state=self.folder / "state", program=program, start_new_session=True, **pipe)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a member."""
        plan, keys = self.folder / "plan.toml", self.folder / "keys"
        if name == "server":
            words: tuple[str | Path, ...] = ("--out", self.folder / "model", "--wait", "60", "--patience", "60")
            return self._start(name, "server", plan, "--keys", keys / "coordinator", *words)
        words = ("--data", self.folder / f"{name}.npz", "--out", self.folder / name, "--patience", "60")
        detour = ("--address", f"127.0.0.1:{self.proxy.port}") if name == "b" else ()
        return self._start(name, "party", plan, "--keys", keys / name, *words, *detour)

    def after(self, rounds: int) -> None:
        """Wait until party b has answered some rounds."""
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit:
            if any(p.read_bytes().count(b"\n") > rounds for p in (self.folder / "b").glob("*.journal")):
                return
            time.sleep(0.005)
        raise TimeoutError("the run did not start")

    def signal(self, name: str, number: int) -> None:
        """To all processes of a member."""
        for pid in _family(self.running[name].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> None:
        """kill -9."""
        self.signal(name, signal.SIGKILL)
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
            if name in self.running
        }
        ratios = [epsilon / plan.epsilon() for epsilon in spent.values()]
        steps = plan.schedule["gradient"].count
        return {
            "ended": "model" if released else "abort",
            "members": said,
            "rounds_lost_and_paid": 0 if released is None else released["releases"]["gradient"] - steps,
            "epsilon_of_the_plan": round(plan.epsilon(), 4),
            "epsilon_in_ledgers": {name: round(value, 4) for name, value in spent.items()},
            "ledger_under_reports": min(ratios) < 0.999,
            "ledger_over_reports": max(ratios) > 1.001,
        }


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found
