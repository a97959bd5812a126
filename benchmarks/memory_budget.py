"""Whether `memory_budget` holds: peak memory of clipped sums beside plain SGD, each in a process of its own.

    OMP_NUM_THREADS=1 python benchmarks/memory_budget.py

Models whose per-example gradients would take a gigabyte: an LSTM with a kernel, one without (projections), a table
of tokens tied to the output layer, and convolutions. Growth of the peak resident memory (VmHWM) over what is there
with the model: of plain SGD's forward and backward pass, and of the first sum with a budget of 64 and of 512 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.records import RecordGroup

BATCH, LENGTH, WIDTH, WORDS, BUDGET = 256, 24, 256, 2000, 64e6


class Tokens(nn.Module):
    """Tokens, a recurrent layer, the next token."""

    def __init__(self, cell: nn.RNNBase, out: int, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, WIDTH), cell
        self.head = nn.Linear(out, WORDS if tied else 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.cell(self.embed(x))[0])
        return hidden


class Images(nn.Module):
    """Tokens as an image, and convolutions with many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 128, 3, padding=1)
        self.second = nn.Conv2d(128, WIDTH, 3, padding=1, stride=2)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.second(F.relu(self.first(x.view(len(x), 1, 4, -1) / WORDS))))
        out: Tensor = self.head(z.mean((2, 3)))
        return out[:, None].expand(-1, LENGTH, -1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Tokens(nn.LSTM(WIDTH, WIDTH, batch_first=True), WIDTH),
    "LSTM with projections": lambda: Tokens(nn.LSTM(WIDTH, WIDTH, batch_first=True, proj_size=64), 64),
    "LSTM, tied table": lambda: Tokens(nn.LSTM(WIDTH, WIDTH, batch_first=True), WIDTH, tied=True),
    "convolutions": Images,
}


def loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), y, reduction="none").mean(1)


def growth(name: str, budget: float | None) -> tuple[float, float]:
    """Megabytes that a step adds to this process, and those of its examples' gradients; budget None: plain SGD.

    With a budget the step is the first one: trials on made-up examples are in it.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _step(nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 50)), BUDGET, 8)  # imports and compiled code
    model = MODELS[name]()
    _forget_peak()
    before = _status("VmRSS")
    _step(model, budget, BATCH)
    return _status("VmHWM") - before, 4e-6 * sum(p.numel() for p in model.parameters()) * BATCH


def _step(model: nn.Module, budget: float | None, count: int) -> None:
    x, y = torch.randint(WORDS, (count, LENGTH)), torch.randint(50, (count, LENGTH))
    if budget is None:
        torch.autograd.backward(loss(model(x), y).mean())
        return
    engine = PerExampleEngine(model, loss, memory_budget=budget)
    theta = engine.flatten(dict(model.named_parameters()))
    group = RecordGroup(np.arange(count), (x[:, None], y[:, None]))
    engine.add((theta,), [group], ClippingRule.gradient(1.0), torch.zeros_like(theta, dtype=torch.float64))


def _forget_peak() -> None:
    """The peak is then the present size."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) / 1000
    raise LookupError(field)


def measured(name: str, budget: float | None) -> tuple[float, float]:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--of", name, "none" if budget is None else str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    mb, whole = json.loads(done.stdout.splitlines()[-1])
    return mb, whole


def main() -> None:
    """Measure and write."""
    if sys.argv[1:2] == ["--of"]:
        name, budget = sys.argv[2:]
        print(json.dumps(growth(name, None if budget == "none" else float(budget))))
        return
    from benchmarks.record import save

    table = {}
    for name in MODELS:
        plain, whole = measured(name, None)
        table[name] = {
            "per_example_gradients_mb": round(whole),
            "plain_sgd_mb": round(plain),
            "budget_64_mb": round(measured(name, BUDGET)[0]),
            "budget_512_mb": round(measured(name, 512e6)[0]),
        }
        print(name, table[name], flush=True)
    what = "growth of peak resident memory over one sum of 256 examples' clipped gradients"
    save(Path(__file__).parent / "results" / "memory_budget.json", {"what": what, "batch": BATCH, "models": table})


if __name__ == "__main__":
    main()
