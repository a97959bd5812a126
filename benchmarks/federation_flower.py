"""A round of stock Flower 1.41: five parties on loopback. Ours, on Flower too, are in ``federation_network.py``.

    python benchmarks/federation_flower.py BIN_FOLDER_OF_A_VENV_WITH_FLOWER [--dimensions 123 …]

Flower pins what conflicts with ours, so it needs an environment of its own: a SuperLink, five SuperNodes, and a
ServerApp that sends one vector of float64 to five ClientApps and waits for theirs. It runs without TLS here, which
flatters it, and its clients only return what they were sent. Dimensions that are not measured again stay as they
are in the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "federation_flower.json"
PARTIES = 5
WARM_UP, ROUNDS = 1, 7
DIMENSIONS = (123, 26_010, 1_000_000)
SECONDS = 400.0  # to give up, not to measure

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "rounds"
version = "1.0.0"
description = "rounds"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "rounds.server_app:app"
clientapp = "rounds.client_app:app"
"""
SERVER = """
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < {parties}:
        time.sleep(0.5)
    rows = []
    for _ in range({rounds}):
        begun = time.time()
        content = RecordDict({{"theta": ArrayRecord({{"theta": Array(np.zeros({d}))}})}})
        nodes = grid.get_node_ids()
        asks = [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=n) for n in nodes]
        replies = list(grid.send_and_receive(asks))
        rows.append([time.time() - begun, len(replies)])
        json.dump(rows, open({out!r}, "w"))
"""
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    return Message(content=message.content, reply_to=message)
"""


def flower(bin_folder: Path, folder: Path, d: int) -> list[float]:
    """Seconds of each round after the warm-up, in which Flower also unpacks the app."""
    out = folder / "rows.json"
    app = folder / "app"
    (app / "rounds").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "rounds" / "__init__.py").touch()
    (app / "rounds" / "server_app.py").write_text(
        SERVER.format(parties=PARTIES, rounds=WARM_UP + ROUNDS, d=d, out=str(out))
    )
    (app / "rounds" / "client_app.py").write_text(CLIENT)
    home = folder / "home"
    home.mkdir()
    port, *nodes = _free_ports(1 + PARTIES)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
    }  # fmt: skip
    log = (folder / "flower.log").open("wb")
    quiet: dict[str, Any] = {"env": environment, "cwd": app, "stdout": log, "stderr": log}
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *words: str) -> None:
        command: list[Path | str] = [bin_folder / program, "--insecure", *words]
        started.append(subprocess.Popen(command, **quiet))

    start("flower-superlink", "--disable-runtime-dependency-installation", "--port", str(port))
    try:
        _listening(port, started)
        for node in nodes:
            start("flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(node))
        subprocess.run([bin_folder / "flwr", "run", ".", "local"], check=True, timeout=120, **quiet)
        limit = time.monotonic() + SECONDS
        rows: list[list[float]] = []
        while len(rows) < WARM_UP + ROUNDS and time.monotonic() < limit:
            time.sleep(1.0)
            with contextlib.suppress(OSError, ValueError):
                rows = json.loads(out.read_text())
        if len(rows) < WARM_UP + ROUNDS or any(replies != PARTIES for _, replies in rows):
            raise RuntimeError(f"Flower's rounds so far: {rows}; {(folder / 'flower.log').read_text()[-3000:]}")
        return [seconds for seconds, _ in rows[WARM_UP:]]
    finally:
        for process in reversed(started):
            for pid in (*_started_by(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        log.close()


def _started_by(parent: int) -> list[int]:
    """The processes that a process started, and theirs."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found += [*_started_by(int(pid)), int(pid)]
    return found


def _free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [int(each.getsockname()[1]) for each in sockets]


def _listening(port: int, started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until somebody listens."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        if any(process.poll() is not None for process in started):
            raise RuntimeError("Flower's SuperLink ended at once")
        time.sleep(0.2)


def main() -> None:
    """Measure all and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_folder", type=Path)
    parser.add_argument("--dimensions", type=int, nargs="+", choices=DIMENSIONS, default=DIMENSIONS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    bin_folder = options.bin_folder.resolve()
    said = subprocess.run([bin_folder / "flwr", "--version"], capture_output=True, text=True, check=True)
    kept = json.loads(options.out.read_text()).get("rows", []) if options.out.exists() else []
    rows = {row["d"]: row for row in kept}
    for d in options.dimensions:
        with tempfile.TemporaryDirectory() as folder:
            theirs = flower(bin_folder, Path(folder), d)
        rows[d] = {
            "d": d, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "flower_seconds": [round(seconds, 2) for seconds in theirs],
            "seconds_per_round": {"flower, no TLS": round(statistics.median(theirs), 3)},
        }  # fmt: skip
        print(rows[d], flush=True)
        ordered = [rows[d] for d in DIMENSIONS if d in rows]
        save(options.out, {"parties": PARTIES, "flower": said.stdout.strip(), "rows": ordered})


if __name__ == "__main__":
    main()
