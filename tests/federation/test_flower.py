"""A federation as an app of a Flower deployment: real processes, TLS, node authentication, parties behind sockets.

Needs an environment with Flower and quietgrad, named by ``QUIETGRAD_FLOWER``: its ``bin`` folder (docs/flower.md).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.federation.plan_file import read_plan
from tests.federation.deployment import plan_text, write
from tests.federation.flower import SECONDS, Flower
from tests.federation.talk import toml_plan
from tests.federation.test_network import folder, start

__all__ = ["folder", "start"]  # fixtures of the other file
NAMES = ("clinic-1", "clinic-2", "clinic-3")
SIZES = dict.fromkeys(NAMES, 50)
PLAN = toml_plan(
    SIZES, 'trust = "secure"\nsecure = "masks"', steps=2, features=3,
    coordinator="timeout = 60", delta="1e-4",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif("QUIETGRAD_FLOWER" not in os.environ, reason="names no environment with Flower")
@pytest.mark.parametrize("kind", ["table", "network"])
def test_three_clinics(folder: Path, start: Any, kind: str) -> None:
    if kind == "network":
        write(folder, SIZES, plan_text(SIZES, algorithm='name = "dp-srm"\nsteps = 2\nbatch_size = 40'))
    else:
        (folder / "plan.toml").write_text(PLAN)
        rng = np.random.default_rng(3)
        for name in NAMES:
            X = rng.normal(size=(50, 3))
            np.savez(f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
    digest = read_plan("plan.toml").digest
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    assert main(["federate", "job", "plan.toml", "--engine", "flower", "--out", "app"]) == 0
    approve = ["approve", "plan.toml", "--keys", "keys/coordinator", "--pin", digest, "--out", "model"]
    assert main(["federate", *approve, "--file", "approval.json"]) == 0
    parties = {}
    for name in NAMES:
        words = ("party", "plan.toml", "--keys", f"keys/{name}", "--data", f"{name}.npz", "--out", name)
        parties[name] = start(*words, "--listen", f"{name}.sock", "--json")
    flower = Flower(folder, Path(os.environ["QUIETGRAD_FLOWER"]), NAMES, folder / "approval.json")
    try:
        flower.start({name: folder / f"{name}.sock" for name in NAMES})
        flower.flwr("run", "app", "here")
        for name, process in parties.items():
            _, err = process.communicate(timeout=SECONDS)
            assert (process.returncode, err) == (0, ""), flower.log("link")[-3000:]
            assert not (folder / f"{name}.sock").exists()
        limit = time.monotonic() + 60.0
        while not Path("model/delivered.json").exists() and time.monotonic() < limit:
            time.sleep(0.5)
    finally:
        flower.close()
    model = qg.load("model")
    assert model.privacy.is_private
    assert model.details["lost_rounds"] == 0
    for name in NAMES:
        np.testing.assert_array_equal(qg.load(name).params, model.params)
