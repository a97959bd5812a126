"""A round of stock Flower 1.41 beside a round over our TLS, five parties on loopback, one after the other.

    python benchmarks/federation_flower.py BIN_FOLDER_OF_A_VENV_WITH_FLOWER

Flower pins what conflicts with ours, so it needs an environment of its own. It runs without TLS here, which
flatters it, and its clients only return what they were sent; ours clip, add up, draw noise and write to the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.federation_network import free_ports, run
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "federation_flower.json"
PARTIES, ROUNDS, D = 5, 5, 123

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


def flower(bin_folder: Path, folder: Path) -> list[float]:
    """Seconds of each round."""
    out = folder / "rows.json"
    app = folder / "app"
    (app / "rounds").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "rounds" / "__init__.py").touch()
    (app / "rounds" / "server_app.py").write_text(SERVER.format(parties=PARTIES, rounds=ROUNDS, d=D, out=str(out)))
    (app / "rounds" / "client_app.py").write_text(CLIENT)
    home = folder / "home"
    home.mkdir()
    link = f"127.0.0.1:{free_ports()}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "{link}"\ninsecure = true\n'
    )
    environment = {
        **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
    }  # fmt: skip
    quiet = {"env": environment, "cwd": app, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    port = link.rpartition(":")[2]
    started = [subprocess.Popen([bin_folder / "flower-superlink", "--insecure", "--port", port], **quiet)]
    try:
        time.sleep(15.0)
        for _ in range(PARTIES):
            words = ["--insecure", "--superlink", link, "--port", str(free_ports())]
            started.append(subprocess.Popen([bin_folder / "flower-supernode", *words], **quiet))
        subprocess.run([bin_folder / "flwr", "run", ".", "local"], check=True, timeout=120, **quiet)
        limit = time.monotonic() + 400.0
        rows: list[list[float]] = []
        while len(rows) < ROUNDS and time.monotonic() < limit:
            time.sleep(1.0)
            with contextlib.suppress(OSError, ValueError):
                rows = json.loads(out.read_text())
        assert all(replies == PARTIES for _, replies in rows)
        return [seconds for seconds, _ in rows]
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def main() -> None:
    """Measure both and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = flower(options.bin_folder.resolve(), Path(folder))
    ours = {engine: run(engine, D, 200)["seconds_per_round"] for engine in ("tls", "nvflare")}
    rest = statistics.median(theirs[1:])  # the first round also unpacks the app
    save(
        RESULT,
        {
            "parties": PARTIES, "d": D, "flower_version": "1.41.0", "flower_seconds": [round(s, 2) for s in theirs],
            "seconds_per_round": {"flower, no TLS": round(rest, 3), **ours},
            "flower_over_ours": {engine: round(rest / seconds) for engine, seconds in ours.items()},
            "load": round(os.getloadavg()[0], 1),
        },
        "nvflare",
    )  # fmt: skip
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
