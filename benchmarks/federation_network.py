"""Rounds between real processes: seconds, CPU and memory over TLS and on NVIDIA FLARE, five parties on loopback.

    python benchmarks/federation_network.py [--quick] [--rows tls:123 nvflare:1000000 …]

A round is a whole DP-GD step with trust in the curator: query out, clipped sums of two records per party back,
noise drawn, aggregate on the disk and synchronised. Wall times on a machine with other work are upper bounds; CPU
seconds are of all processes together. Memory is the resident size of each process from round 50 on, as medians
over the fifths of that time. Rows that are not measured again stay as they are in the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import save

HERE = Path(__file__).parent
RESULT = HERE / "results" / "federation_network.json"
PARTIES = 5
ENGINES, DIMENSIONS = ("tls", "nvflare"), (123, 26_010, 1_000_000)
ROUNDS = {f"{engine}:{d}": 1000 for d in DIMENSIONS for engine in ENGINES} | {"nvflare:1000000": 600}  # minutes
QUICK = {123: 60, 26_010: 30, 1_000_000: 10}

PLAN = """
[federation]
name = "bench"
trust = "curator"
spare = 2
[coordinator]
address = "127.0.0.1:{port}"
timeout = 120
[algorithm]
name = "dp-gd"
steps = {steps}
learning_rate = 0.01
[objective]
name = "logistic"
[data]
features = {d}
[budget]
epsilon = 1.0
delta = 1e-5
"""


def free_ports() -> int:
    """A port that is free together with the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
        try:
            socket.create_server(("127.0.0.1", port + 1)).close()
        except OSError:
            continue
        return port


def federate(*words: str | Path, program: Sequence[str] = (), **settings: Any) -> subprocess.Popen[bytes]:
    """Start `quietgrad federate …`, or a program that takes the same words."""
    command = [sys.executable, *(program or ("-m", "quietgrad")), "federate", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "QUIETGRAD_STATE": str(settings.pop("state"))}
    return subprocess.Popen(command, env=environment, **settings)


def prepare(folder: Path, d: int, steps: int, engine: str) -> None:
    """Plan, keys and five small tables."""
    text = PLAN.format(port=free_ports(), steps=steps, d=d)
    text += "".join(f'[[party]]\nname = "p{i}"\nrecords = 2\n' for i in range(PARTIES))
    (folder / "plan.toml").write_text(text)
    rng = np.random.default_rng(0)
    for i in range(PARTIES):
        np.savez(folder / f"p{i}.npz", X=rng.standard_normal((2, d)) / np.sqrt(d), y=np.array([0, 1]))
    words = ("provision", folder / "plan.toml", "--out", folder / "keys", "--engine", engine)
    code = federate(*words, state=folder / "state", stdout=subprocess.DEVNULL).wait()
    assert code == 0


class Watch(threading.Thread):
    """Samples the resident memory and CPU of all processes that have the folder in their command line."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.over = str(folder), threading.Event()
        self.samples: list[tuple[float, dict[int, tuple[str, int, float]]]] = []
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.5):
            now = {}
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if self.folder not in words:
                        continue
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                    cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
                    now[int(pid)] = (_role(words), rss, cpu)
                except (OSError, IndexError):
                    continue
            self.samples.append((time.time(), now))

    def between(self, first: float, last: float) -> dict[str, Any]:
        """CPU and memory of every process that lived from one time to the other."""
        inside = [now for t, now in self.samples if first <= t <= last]
        if len(inside) < 2:
            return {}
        whole = [pid for pid in inside[0] if all(pid in now for now in inside)]
        cpu = sum(inside[-1][pid][2] - inside[0][pid][2] for pid in whole)
        memory: dict[str, Any] = {}
        for pid in whole:
            sizes = [now[pid][1] / 2**20 for now in inside]
            parts = [part for part in np.array_split(sizes, 5) if len(part)]
            memory[f"{inside[0][pid][0]} {pid}"] = {
                "fifths_mb": [round(float(np.median(part)), 1) for part in parts],  # vectors come and go
                "most_mb": round(max(sizes), 1),
            }
        growth = max((max(m["fifths_mb"]) / m["fifths_mb"][0] - 1.0 for m in memory.values()), default=0.0)
        return {"cpu_seconds": round(cpu, 3), "memory": memory, "largest_growth": round(growth, 4)}


def _role(words: str) -> str:
    who = re.search(r"keys/([a-z0-9]+)", words)
    kind = re.search(r"(runner_process|worker_process|server_train|client_train|federate (?:server|party))", words)
    return f"{who.group(1) if who else '?'} {kind.group(1) if kind else ''}".strip()


def run(engine: str, d: int, steps: int) -> dict[str, Any]:
    """One federation; what a round costs in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, d, steps, engine)
        watch = Watch(folder)
        plan, state = folder / "plan.toml", folder / "state"
        quiet = {"state": state, "stdout": subprocess.DEVNULL}
        with (folder / "err").open("wb") as err:
            words = ("server", plan, "--keys", folder / "keys" / "coordinator", "--out", folder / "model")
            begun = time.time()
            server = federate(*words, "--engine", engine, stderr=err, **quiet)
            parties = [
                federate(
                    "party", plan, "--keys", folder / "keys" / f"p{i}", "--data", folder / f"p{i}.npz",
                    "--out", folder / f"p{i}", "--engine", engine, stderr=subprocess.DEVNULL, **quiet,
                )
                for i in range(PARTIES)
            ]  # fmt: skip
            try:
                marks = _rounds(folder, server)
                code = server.wait()
            finally:
                watch.over.set()
                for process in (server, *parties):
                    process.terminate()
                    process.wait()
        if code:
            raise RuntimeError((folder / "err").read_text()[-2000:])
        result = json.loads((folder / "model" / "result.json").read_text())
        first = next(t for n, t in marks if n >= min(50, steps // 3))
        n_first = next(n for n, t in marks if t == first)
        n_last, last = max((n, t) for n, t in marks if n <= steps)
        between = watch.between(first, last)
        return {
            "engine": engine, "d": d, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rounds": steps, "lost_rounds": result["details"]["lost_rounds"],
            "seconds_per_round": round((last - first) / max(1, n_last - n_first), 4),
            "cpu_seconds_per_round": round(between.get("cpu_seconds", 0.0) / max(1, n_last - n_first), 4),
            "seconds_to_first_round": round(marks[0][1] - begun, 1), "load": round(os.getloadavg()[0], 1),
            "memory": between.get("memory", {}), "largest_growth": between.get("largest_growth"),
        }  # fmt: skip


def _rounds(folder: Path, server: subprocess.Popen[bytes]) -> list[tuple[int, float]]:
    """(rounds answered by a party so far, time), read from its journal as it grows."""
    marks: list[tuple[int, float]] = []
    while server.poll() is None:
        for journal in (folder / "p0").glob("*.journal"):
            try:
                n = journal.read_bytes().count(b"\n") - 1
            except OSError:
                continue
            if n > 0 and (not marks or n > marks[-1][0]):
                marks.append((n, time.time()))
        time.sleep(0.02)
    return marks


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    every = list(ROUNDS)
    parser.add_argument("--rows", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = {f"{row['engine']}:{row['d']}": row for row in kept}
    for name in options.rows:
        engine, _, d = name.partition(":")
        rows[name] = run(engine, int(d), QUICK[int(d)] if options.quick else ROUNDS[name])
        print({k: v for k, v in rows[name].items() if k != "memory"}, flush=True)
        if not options.quick:
            ordered = [rows[name] for name in every if name in rows]
            save(RESULT, {"parties": PARTIES, "rows": ordered}, "nvflare", "cryptography")


if __name__ == "__main__":
    main()
