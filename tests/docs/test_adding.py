"""What CONTRIBUTING.md adds as examples: each diff applies as it is, touches two files at most, and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
TABLE = """
import numpy as np, quietgrad as qg
from quietgrad.methods.registry import entry
from quietgrad.objectives import Logistic
X = np.random.default_rng(0).normal(size=(500, 2))
y = (X[:, 0] > 0) * 1.0
def fit(loss, method):
    return qg.minimize(loss, (X, y), method, budget=qg.Budget(4.0, 1e-5), n_public=500, seed=0)
"""
USES = {
    "LogCosh": "assert fit(qg.objectives.LogCosh(), qg.DPGD(steps=5)).params[0] > 0",
    "Pilot": "method = qg.DPSGD(steps=5, batch_size=100, sampling='pilot')\n"
    "assert 3.9 < qg.plan(method, n=500, budget=qg.Budget(4.0, 1e-5)).epsilon() <= 4.0; fit(Logistic(), method)",
    "DPSignSGD": "assert fit(Logistic(), entry('dp-sign-sgd').make({'steps': 9, 'batch_size': 250})).params[0] > 0",
    "CoordinateNoise": "from quietgrad.core.noise.mechanisms import CoordinateNoise\n"
    "made = fit(Logistic(), qg.DPSGD(steps=9, batch_size=250, noise=CoordinateNoise(2)))\n"
    "assert made.params[0] > 0 == made.params[1] and 3.9 < made.privacy.epsilon <= 4.0",
    "SquareRoot": "method = qg.DPGD(steps=5, clipping='square-root')\n"
    "assert fit(Logistic(), method).params[0] > 0\n"
    "import torch; from torch import nn; import quietgrad.torch as qt\nmodel = nn.Linear(2, 1, bias=False)\n"
    "batch = torch.tensor([[3.0, 4.0]]), torch.zeros(1)\n"
    "sums, _ = qt.clipped_gradient_sum(model, lambda o, y: o[:, 0], batch, 5.0, clipping='square-root')\n"
    "assert abs(float(sums['weight'].norm()) - 5.0 / 2**0.5) < 1e-3",
    "parse_npy": "from quietgrad.data import load\nnp.save('rows.npy', np.column_stack([X, y]))\n"
    "data = load('rows.npy'); assert data.task == 'binary' and data.X.shape == (500, 2)",
    "clipped_mean": "from quietgrad.estimators.clipped_mean import clipped_mean\n"
    "mean, privacy = clipped_mean(X + 1.0, 5.0, budget=qg.Budget(4.0, 1e-5), n_public=500)\n"
    "assert abs(mean - 1.0).max() < 0.3 and 3.9 < privacy.epsilon <= 4.0 and privacy.releases == {'sum': 1}",
    "MailboxTransport": """
from pathlib import Path
from threading import Thread
from quietgrad.federation import Party, simulate
from quietgrad.federation.exchange import Responder
from quietgrad.federation.transport.mailbox import MailboxTransport, serve
def by_mail(federation):
    for name, handler in federation.handlers.items():
        Thread(target=serve, args=(Responder(handler), Path('mail'), name), daemon=True).start()
    return MailboxTransport(Path('mail'), tuple(federation.handlers), 60.0)
parties = [Party(X[k::3], y[k::3]) for k in range(3)]
made = simulate(qg.DPGD(steps=3), Logistic(), parties, budget=qg.Budget(4.0, 1e-5), trust='secure', secure='masks',
                transport=by_mail, start=np.zeros(2))
assert made.params[0] > 0 and 3.9 < made.privacy.epsilon <= 4.0 and not list(Path('mail').iterdir())
""",
    "units": "from quietgrad.cli import main\nassert main(['units']) == 0",
}


@pytest.mark.parametrize("name", USES)
def test_an_addition_is_two_files_at_most_and_works(name: str, tmp_path: Path) -> None:
    (diff,) = [diff for diff in DIFFS if re.search(rf"(?:class|def) {name}\(|/{name}\.py", diff)]
    assert diff.count("diff --git") <= 2
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.nb?"))
    subprocess.run(["git", "apply", "--recount", "-C1", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "QUIETGRAD_STATE": str(tmp_path / "state")}
    code = [sys.executable, "-c", TABLE + USES[name]]
    done = subprocess.run(code, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_diff_is_tried() -> None:
    assert len(DIFFS) == len(USES)


def test_a_class_name_has_one_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leading underscores ignored: a reader who looks a name up finds one class."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    assert not import_module("size").doubles()
