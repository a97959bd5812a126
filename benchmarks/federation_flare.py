"""A round of stock FLARE: its own scatter and gather of a float32 vector, in a deployment of its own.

Used by ``benchmarks/federation_long.py``. The deployment is as FLARE provisions it, with mutual TLS. A client of
``NPTrainer`` adds 1 to the vector that it was sent and keeps a copy on its disk; the server averages. Nothing is
clipped, masked or noisy.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.federation.flare import SERVER, Flare

SECONDS = 900.0  # to give up, not to measure
_STARTED = re.compile(r"^(\S+ \S+?),(\d+) .*Round (\d+) started", re.MULTILINE)


def job(folder: Path, start: Path, rounds: int, parties: int) -> Path:
    """Write a job of these rounds, and one more whose start ends the last."""
    common = "nvflare.app_common"
    server: dict[str, Any] = {
        "format_version": 2,
        "workflows": [{
            "id": "rounds", "path": f"{common}.workflows.scatter_and_gather.ScatterAndGather",
            "args": {
                "min_clients": parties, "num_rounds": rounds + 1, "wait_time_after_min_received": 0,
                "aggregator_id": "sum", "persistor_id": "model", "shareable_generator_id": "share",
                "train_timeout": 0,
            },
        }],
        "components": [
            {"id": "model", "path": f"{common}.np.np_model_persistor.NPModelPersistor",
             "args": {"source_ckpt_file_full_name": str(start)}},
            {"id": "share", "path": f"{common}.shareablegenerators.full_model_shareable_generator."
             "FullModelShareableGenerator"},
            {"id": "sum", "path": f"{common}.aggregators.intime_accumulate_model_aggregator."
             "InTimeAccumulateWeightedAggregator", "args": {"expected_data_kind": "WEIGHTS"}},
        ],
    }  # fmt: skip
    trainer = {"path": f"{common}.np.np_trainer.NPTrainer", "args": {"delta": 1, "sleep_time": 0}}
    client = {"format_version": 2, "executors": [{"tasks": ["train"], "executor": trainer}], "components": []}
    meta = {"name": "rounds", "deploy_map": {"app": ["@ALL"]}, "min_clients": parties}
    config = folder / "stock" / "app" / "config"
    config.mkdir(parents=True)
    for name, content in (("server", server), ("client", client)):
        (config / f"config_fed_{name}.json").write_text(json.dumps(content))
    (folder / "stock" / "meta.json").write_text(json.dumps(meta))
    return folder / "stock"


def starts(log: str) -> dict[int, float]:
    """When each round started, by the server's log.

    >>> starts("2026-01-01 10:00:00,500 - SAG - INFO - Round 3 started.")[3] - starts_at("2026-01-01 10:00:00")
    0.5
    """
    return {int(t): starts_at(when) + int(ms) / 1e3 for when, ms, t in reversed(_STARTED.findall(log))}


def starts_at(when: str) -> float:
    """Seconds of a log's time."""
    return datetime.datetime.strptime(when, "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.UTC).timestamp()


def flare(folder: Path, names: tuple[str, ...], dimension: int, rounds: int) -> list[float]:
    """Seconds of each round, from its start to the start of the next; ``folder/rows.json`` grows with them."""
    start = folder / "start.npy"
    np.save(start, np.zeros(dimension, np.float32))
    deployment = Flare(folder, names)
    try:
        for name in (SERVER, *names):
            deployment.allow(name, ())
        deployment.start()
        submitted: subprocess.Popen[str] = deployment.submit(job(folder, start, rounds, len(names)))
        limit = time.monotonic() + SECONDS
        seconds: list[float] = []
        while len(seconds) < rounds:
            if time.monotonic() > limit or submitted.poll() is not None:
                raise RuntimeError(f"FLARE's rounds so far: {seconds}; {deployment.log(SERVER)[-3000:]}")
            time.sleep(0.3)
            at = [when for _, when in sorted(starts(deployment.log(SERVER)).items())]
            seconds = [later - earlier for earlier, later in itertools.pairwise(at)]
            (folder / "rows.json").write_text(json.dumps(seconds))
        submitted.kill()
        submitted.wait()
        return seconds[:rounds]
    finally:
        deployment.close()
