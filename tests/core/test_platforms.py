"""Systems without what POSIX has: no ``fcntl``, no ``resource``, no flags of ``open``, no local sockets.

A process that lacks them imports quietgrad, trains, and keeps a ledger that an ordinary process can verify. This
is not Windows: files are removed while they are open, and `filelock` has no native lock to use.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quietgrad import Ledger

WITHOUT_POSIX = """
import os, shutil, socket, ssl, subprocess, sys, tempfile, warnings
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "getuid", "geteuid", "fchmod"):
    delattr(os, name)
del socket.AF_UNIX
warnings.filterwarnings("ignore", "only soft file lock")
"""

TRAINED = """
import json
import numpy as np
import quietgrad as qg
from quietgrad.core.ledger.keys import KeyFile

rng = np.random.default_rng(0)
X = rng.normal(size=(400, 3)); X /= np.linalg.norm(X, axis=1, keepdims=True)
y = (X[:, 0] > 0).astype(int)
result = qg.minimize(
    qg.objectives.Logistic(row_bound=1.0), (X, y), qg.DPGD(steps=5), budget=qg.Budget(2.0, 1e-5),
    ledger="ledger.jsonl", account="d", folder="run", n_public=400,
)
KeyFile.create("r"); KeyFile.load("r"); KeyFile.destroy("r")
print(json.dumps({"epsilon": result.privacy.epsilon, "key": KeyFile.exists("r")}))
"""


def _run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def test_a_run_without_posix(tmp_path: Path) -> None:
    said = json.loads(_run(WITHOUT_POSIX + TRAINED, tmp_path))
    assert not said["key"]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.verify().problems == ()
    spent = ledger.spent("d", delta=1e-5, relation="add-remove")
    assert spent.epsilon == pytest.approx(said["epsilon"], rel=1e-6)
    assert 0.0 < said["epsilon"] <= 2.0
    assert not (tmp_path / "ledger.jsonl").read_bytes().count(b"\r")


HELD = """
from pathlib import Path
from quietgrad.core.ledger.log import LockedAppendFile
file = LockedAppendFile(Path("log"), "runs this")
"""


def test_a_lock_beside_the_file_excludes_and_is_released_by_a_killed_process(tmp_path: Path) -> None:
    waiting = "print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_POSIX + HELD + waiting],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        refused = subprocess.run(
            [sys.executable, "-c", WITHOUT_POSIX + HELD], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert "another process runs this in this folder" in refused.stderr
        holder.kill()
    _run(WITHOUT_POSIX + HELD + "file.append(b'line'); file.remove()", tmp_path)
    assert not (tmp_path / "log").exists()
