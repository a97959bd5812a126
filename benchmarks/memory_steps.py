"""Peak memory of a whole private step ÷ that of a plain SGD step, each in a process of its own, Opacus beside.

    OMP_NUM_THREADS=1 PYTHONPATH=DIR python benchmarks/memory_steps.py    # DIR: see torch_steps.py

Growth of the peak resident memory (VmHWM) over what is there with model and data, in four steps on batches of about
256 records (ResNet-18: 64). Planning and the trials of sizes of passes are among them. The settings are the
defaults: `memory_budget` bounds what is kept for each record.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.models import MODELS
from tests.torch.zoo import CASES

import quietgrad as qg
from benchmarks.memory_budget import _forget_peak, _status
from benchmarks.torch_steps import algorithm, opacus, plain

STEPS = 4
SHAPES = {
    "mnist-cnn4": ((1, 28, 28), 256), "cnn5": ((3, 32, 32), 256), "resnet20": ((3, 32, 32), 256),
    "torchvision ResNet-18, GroupNorm": ((3, 64, 64), 64), "torchvision ViT": ((3, 64, 64), 256),
}  # fmt: skip
KINDS = ("sgd", "dp-sgd", "dp-srm", "opacus", "opacus-ghost")
Step = Callable[[], None]


def step_of(kind: str, model: nn.Module, x: Tensor, y: Tensor, size: int) -> Step:
    """One step of a kind; private methods prepare themselves when it is made."""
    if kind == "sgd":
        return plain(model, x, y, size)
    if kind.startswith("opacus"):
        return opacus(model, x, y, size, mode="ghost" if kind.endswith("ghost") else "hooks")
    return algorithm(qg.DPSGD if kind == "dp-sgd" else qg.DPSRM, model, x, y, size)


def growth(name: str, kind: str) -> float:
    """Megabytes that a few steps add to this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape, size = SHAPES[name]
    model = MODELS[name]() if name in MODELS else CASES[name](1, 4).model
    small = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    step_of(kind, small, torch.randn(64, 4), torch.zeros(64, dtype=torch.int64), 8)()  # imports, compiled code
    x, y = torch.randn(4 * size, *shape), torch.randint(0, 3, (4 * size,))
    _forget_peak()
    before = _status("VmRSS")
    step = step_of(kind, model, x, y, size)
    for _ in range(STEPS):
        step()
    return _status("VmHWM") - before


def measured(name: str, kind: str) -> float | None:
    """The same, in a process of its own; ``None`` where the peer cannot run the model."""
    command = [sys.executable, __file__, "--of", name, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(name, kind, done.stderr.strip().splitlines()[-1][:120], flush=True)
        return None
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure and write."""
    if sys.argv[1:2] == ["--of"]:
        warnings.simplefilter("ignore")
        print(growth(*sys.argv[2:]))
        return
    from benchmarks.record import save

    kinds = [kind for kind in KINDS if not kind.startswith("opacus") or importlib.util.find_spec("opacus")]
    table: dict[str, Any] = {}
    for name, (_, size) in SHAPES.items():
        peaks = {kind: measured(name, kind) for kind in kinds}
        table[name] = {"batch": size} | {
            kind: None if peak is None else round(peak / (peaks["sgd"] or 1.0), 2) for kind, peak in peaks.items()
        }
        table[name]["sgd_mb"] = round(peaks["sgd"] or 0.0)
        print(name, table[name], flush=True)
    save(Path(__file__).parent / "results" / "memory_steps.json", {"models": table}, "opacus")


if __name__ == "__main__":
    main()
