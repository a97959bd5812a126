"""Rounds between real processes: seconds, CPU and memory over TLS, on NVIDIA FLARE and on Flower, on loopback.

    python benchmarks/federation_network.py [--rows tls:123 flare:1000000 flower:123 …] [--rounds N]

FLARE and Flower are deployments as an institution has them (``tests/federation/flare.py``,
``tests/federation/flower.py``), with TLS and their own authentication; Flower's environment is named by
QUIETGRAD_FLOWER (docs/flower.md). A round is a whole DP-GD step with trust in the curator: query out, clipped sums
of two records per party back, noise drawn, aggregate on the disk and synchronised. Wall times on a machine with
other work are upper bounds; CPU seconds are of all processes together. Memory is the resident size of each process
from round 50 on, as medians over the fifths of that time. Rows that are not measured again stay as they are in the
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.federation.flare import Flare, free_ports
from tests.federation.flower import Flower

from benchmarks.record import save
from quietgrad.federation.approved import FILE
from quietgrad.federation.plan_file import CLASSES, read_plan, write_job

HERE = Path(__file__).parent
RESULT = HERE / "results" / "federation_network.json"
PARTIES = 5
ENGINES, DIMENSIONS = ("tls", "flare", "flower"), (123, 26_010, 1_000_000)
NAMES = tuple(f"p{i}" for i in range(PARTIES))
ROUNDS = {f"{engine}:{d}": 8 if engine == "flower" else 1000 for d in DIMENSIONS for engine in ENGINES}

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


def federate(*words: str | Path, program: Sequence[str] = (), **settings: Any) -> subprocess.Popen[bytes]:
    """Start `quietgrad federate …`, or a program that takes the same words."""
    command = [sys.executable, *(program or ("-m", "quietgrad")), "federate", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "QUIETGRAD_STATE": str(settings.pop("state"))}
    return subprocess.Popen(command, env=environment, **{"stdout": subprocess.DEVNULL, **settings})


def prepare(folder: Path, d: int, steps: int) -> None:
    """Plan, keys and five small tables."""
    text = PLAN.format(port=free_ports(), steps=steps, d=d)
    text += "".join(f'[[party]]\nname = "{name}"\nrecords = 2\n' for name in NAMES)
    (folder / "plan.toml").write_text(text)
    rng = np.random.default_rng(0)
    for name in NAMES:
        np.savez(folder / f"{name}.npz", X=rng.standard_normal((2, d)) / np.sqrt(d), y=np.array([0, 1]))
    assert federate("provision", folder / "plan.toml", "--out", folder / "keys", state=folder / "state").wait() == 0


def approve(folder: Path, name: str, out: str, file: Path) -> None:
    """A member's approval, for an engine."""
    digest = read_plan(folder / "plan.toml").digest
    words = [
        "approve",
        folder / "plan.toml",
        "--keys",
        folder / "keys" / name,
        "--pin",
        digest,
        "--out",
        folder / out,
    ]
    data = [] if name == "coordinator" else ["--data", folder / f"{name}.npz"]
    assert federate(*words, *data, "--file", file, state=folder / "state").wait() == 0


@contextlib.contextmanager
def running(engine: str, folder: Path) -> Iterator[Callable[[], bool]]:
    """A federation on an engine; gives whether it is over."""
    plan, state = folder / "plan.toml", folder / "state"
    with contextlib.ExitStack() as stack:

        def member(kind: str, name: str, out: str, *words: Any) -> subprocess.Popen[bytes]:
            err = stack.enter_context((folder / f"{out}.err").open("wb"))
            process = federate(
                kind, plan, "--keys", folder / "keys" / name, "--out", folder / out, *words, state=state, stderr=err
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        if engine == "flare":
            flare = Flare(folder, NAMES)
            stack.callback(flare.close)
            for name, who, out in (("server", "coordinator", "model"), *zip(NAMES, NAMES, NAMES, strict=True)):
                approve(folder, who, out, flare.kit(name) / "local" / FILE)
                flare.allow(name, CLASSES)
            write_job(read_plan(plan), "flare", folder / "job")
            flare.start()
            job = flare.submit(folder / "job")
            stack.callback(job.wait)
            yield lambda: job.poll() is not None
            return
        listen = {name: ("--listen", folder / f"{name}.sock") if engine == "flower" else () for name in NAMES}
        parties = [member("party", name, name, "--data", folder / f"{name}.npz", *listen[name]) for name in NAMES]
        if engine == "tls":
            server = member("server", "coordinator", "model")
            yield lambda: server.poll() is not None
            return
        approve(folder, "coordinator", "model", folder / "approval.json")
        write_job(read_plan(plan), "flower", folder / "app")
        flower = Flower(folder, Path(os.environ["QUIETGRAD_FLOWER"]), NAMES, folder / "approval.json")
        stack.callback(flower.close)
        flower.start({name: folder / f"{name}.sock" for name in NAMES})
        flower.flwr("run", "app", "here")
        yield lambda: all(party.poll() is not None for party in parties)


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
        prepare(folder, d, steps)
        watch, begun = Watch(folder), time.time()
        try:
            with running(engine, folder) as over:
                marks = _rounds(folder, over)
        finally:
            watch.over.set()
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


def _rounds(folder: Path, over: Callable[[], bool]) -> list[tuple[int, float]]:
    """(rounds answered by a party so far, time), read from its journal as it grows."""
    marks: list[tuple[int, float]] = []
    while not over():
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
    parser.add_argument("--rounds", type=int)
    every = list(ROUNDS)
    parser.add_argument("--rows", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = {f"{row['engine']}:{row['d']}": row for row in kept}
    for name in options.rows:
        engine, _, d = name.partition(":")
        rows[name] = run(engine, int(d), options.rounds or ROUNDS[name])
        print({k: v for k, v in rows[name].items() if k != "memory"}, flush=True)
        ordered = [rows[name] for name in every if name in rows]
        save(RESULT, {"parties": PARTIES, "rows": ordered}, "nvflare", "cryptography")


if __name__ == "__main__":
    main()
