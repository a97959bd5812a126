"""A federation as an ordinary job on a FLARE deployment that was there before, with its kits untouched."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.federation.approved import FILE, Approved
from quietgrad.federation.plan_file import CLASSES, read_plan

pytest.importorskip("nvflare")
from tests.federation.flare import Flare
from tests.federation.talk import toml_plan

SITES = ("site-1", "site-2", "site-3")
PLAN = toml_plan(
    dict.fromkeys(SITES, 50), 'trust = "secure"\nsecure = "masks"\nspare = 2', steps=20, features=3,
    coordinator="timeout = 10\ngrace = 2", delta="1e-4",
)  # fmt: skip

QUORUM = PLAN.replace('trust = "secure"\nsecure = "masks"', 'trust = "local"\nquorum = 2')
# Everybody is needed, and there are enough rounds that a kill comes before the last one.
ALL = PLAN.replace('trust = "secure"\nsecure = "masks"', 'trust = "local"').replace("steps = 20", "steps = 200")


@pytest.fixture
def flare(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flare]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(getattr(request, "param", PLAN))
    made = Flare(tmp_path, SITES)
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    assert main(["federate", "job", "plan.toml", "--engine", "flare", "--out", "job"]) == 0
    rng = np.random.default_rng(3)
    for name in ("server", *SITES):
        X = rng.normal(size=(50, 3))
        np.savez(f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
        words = ["approve", "plan.toml", "--pin", read_plan("plan.toml").digest, "--out", f"out/{name}"]
        words += ["--file", str(made.kit(name) / "local" / FILE), "--account", "patients"]
        words += ["--keys", "keys/coordinator"] if name == "server" else ["--keys", f"keys/{name}"]
        assert main(["federate", *words, *([] if name == "server" else ["--data", f"{name}.npz"])]) == 0
        made.allow(name, CLASSES)
    yield made
    made.close()


def test_approval_holds_the_plan_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of the plan file after the approval changes nothing, and an edited approval is noticed."""
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN)
    digest = read_plan("plan.toml").digest
    np.savez("a.npz", X=np.eye(3), y=[0, 1, 0])
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    words = ["federate", "approve", "plan.toml", "--keys", "keys/site-1", "--data", "a.npz", "--pin"]
    assert main([*words, "0" * 64]) == 1
    assert main([*words, digest]) == 0
    assert os.stat(FILE).st_mode & 0o077 == 0
    Path("plan.toml").write_text(PLAN.replace("epsilon = 1.0", "epsilon = 2.9"))
    assert Approved.read(FILE).file.digest == digest
    content = json.loads(Path(FILE).read_text())
    Path(FILE).write_text(
        json.dumps({**content, "plan": content["plan"].replace("epsilon = 1.0", "epsilon = 2.9")})
    )
    with pytest.raises(qg.errors.BudgetError, match="approval"):
        _ = Approved.read(FILE).file


def spent(name: str) -> float:
    ledger = qg.Ledger(f"out/{name}/ledger.jsonl")
    return ledger.spent("patients", delta=1e-4, relation=qg.Relation.ADD_REMOVE).epsilon


@pytest.mark.slow
def test_three_sites(flare: Flare) -> None:
    flare.start()
    assert "COMPLETED" in flare.status(flare.submit(Path("job"))), flare.log("server")[-3000:]
    model = qg.load("out/server")
    assert model.privacy.is_private
    assert model.details["lost_rounds"] == 0
    for name in SITES:
        np.testing.assert_array_equal(qg.load(f"out/{name}").params, model.params)
        assert spent(name) == pytest.approx(model.privacy.epsilon, rel=1e-6)
    assert main(["federate", "status", "out/site-2"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("flare", [QUORUM], indirect=True)
def test_a_revoked_site_is_left_out(flare: Flare) -> None:
    """A quorum of two: one of three is revoked from the beginning."""
    assert main(["federate", "revoke", "site-3", "--keys", "keys/coordinator"]) == 0
    flare.start()
    status = flare.status(flare.submit(Path("job")))
    assert "COMPLETED" in status, flare.log("server")[-3000:]
    assert not Path("out/site-3/model.safetensors").exists()
    assert qg.load("out/server").details["lost_rounds"] == 0  # all were complete, without one site
    assert spent("site-3") == 0.0


@pytest.mark.long
@pytest.mark.parametrize("flare", [ALL], indirect=True)
def test_a_job_that_flare_ended_is_continued_by_submitting_it_again(flare: Flare) -> None:
    """FLARE ends the whole job when a site's process is killed, and nothing is paid twice."""
    flare.start()
    job = flare.submit(Path("job"))
    limit = time.monotonic() + 120.0
    while not Path("out/site-3/progress.json").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(flare.job_process("site-3"), signal.SIGKILL)
    assert "COMPLETED" not in flare.status(job)
    assert not Path("out/server/result.json").exists()
    assert "COMPLETED" in flare.status(flare.submit(Path("job"))), flare.log("server")[-3000:]
    model = qg.load("out/server")
    assert model.privacy.releases["gradient"] == 200
    for name in SITES:
        np.testing.assert_array_equal(qg.load(f"out/{name}").params, model.params)
        assert spent(name) == pytest.approx(model.privacy.epsilon, rel=1e-6)
        assert len(qg.Ledger(f"out/{name}/ledger.jsonl").book().held) == 1
