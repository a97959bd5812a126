"""Opacus' answers to task.py, and its layers beside ours, in an environment that has both; prints JSON.

Layers: each is a network of its own, with four examples. What is asked is the sum of clipped gradients, held
against the gradients of the examples taken one at a time: "right", "wrong", or "refused" with the error's name.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import task
import torch
import torch.nn.functional as F
from opacus import GradSampleModule, PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from torch import Tensor, nn

CLIP = 0.05  # small enough that every example is clipped


class First(nn.Module):
    """The first of a layer's results (recurrent layers return a pair)."""

    def __init__(self, layer: nn.Module, twice: int = 1) -> None:
        super().__init__()
        self.layer, self.arguments = layer, twice

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(*[x] * self.arguments)
        return found[0] if isinstance(found, tuple) else found


class Tied(nn.Module):
    """One weight used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(x)))


class Loose(nn.Module):
    """A parameter outside of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.scale)


def sequence() -> Tensor:
    return torch.randn(4, 5, 6)


def image(dimensions: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, 4, *[6] * dimensions)


def words() -> Tensor:
    return torch.randint(11, (4, 5))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear": (lambda: nn.Linear(6, 5), sequence),
    "Bilinear": (lambda: First(nn.Bilinear(6, 6, 4), 2), sequence),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), image(1)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), image(2)),
    "Conv3d": (lambda: nn.Conv3d(4, 2, 3), image(3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3), image(2)),
    "Embedding": (lambda: nn.Embedding(11, 6), words),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(11, 6), words),
    "LayerNorm": (lambda: nn.LayerNorm(6), sequence),
    "RMSNorm": (lambda: nn.RMSNorm(6), sequence),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), image(2)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), image(2)),
    "PReLU": (lambda: nn.PReLU(), sequence),
    "RNN": (lambda: First(nn.RNN(6, 5, batch_first=True)), sequence),
    "LSTM": (lambda: First(nn.LSTM(6, 5, 2, batch_first=True)), sequence),
    "GRU": (lambda: First(nn.GRU(6, 5, batch_first=True)), sequence),
    "MultiheadAttention": (lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), 3), sequence),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        sequence,
    ),
    "two layers that share a weight": (Tied, words),
    "a parameter outside of layers": (Loose, sequence),
}


def losses(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output.flatten(1), y.flatten(1), reduction="none").mean(dim=1)


def one_by_one(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Σ of clipped gradients, an example at a time."""
    parameters = list(module.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for i in range(len(x)):
        loss = losses(module(x[i : i + 1]), y[i : i + 1]).sum()
        g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)]).double()
        total += g * min(1.0, CLIP / float(g.norm()))
    return total


def opacus_sum(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    wrapped = GradSampleModule(module, loss_reduction="sum")
    losses(wrapped(x), y).sum().backward()
    rows = torch.cat([p.grad_sample.flatten(1) for p in wrapped.parameters()], dim=1).double()
    return (rows * (CLIP / rows.norm(dim=1)).clamp(max=1.0)[:, None]).sum(dim=0)


def quietgrad_sum(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    import quietgrad.torch as qt

    sums, _ = qt.clipped_gradient_sum(module, losses, (x, y), CLIP)
    return torch.cat([part.flatten() for part in sums.values()]).double()


def layers() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, (build, draw) in LAYERS.items():
        found[name] = {}
        for who, method in (("Opacus", opacus_sum), ("quietgrad", quietgrad_sum)):
            torch.manual_seed(0)
            module, x = build(), draw()
            y = torch.randn_like(module(x).detach().float())
            wanted = one_by_one(module, x, y)
            try:
                got = method(copy.deepcopy(module), x, y)
            except Exception as error:
                found[name][who] = f"refused ({type(error).__name__})"
                continue
            right = got.shape == wanted.shape and float((got - wanted).norm()) < 1e-3 * CLIP
            found[name][who] = "right" if right else "wrong"
    return found


def calibration() -> dict[str, Any]:
    rate, found = task.RUN_BATCH / task.RUN_N, {}
    for name, kind in (("rdp", RDPAccountant), ("prv", PRVAccountant)):

        def noise(name: str = name) -> float:
            return get_noise_multiplier(
                target_epsilon=task.RUN_EPSILON, target_delta=task.DELTA, sample_rate=rate, steps=task.RUN_STEPS,
                accountant=name,
            )  # fmt: skip

        def epsilon(kind: Any = kind) -> float:
            accountant = kind()
            accountant.history = [(task.GIVEN_NOISE, rate, task.RUN_STEPS)]
            return float(accountant.get_epsilon(task.DELTA))

        (z, z_seconds), (e, e_seconds) = task.cpu(noise, 3), task.cpu(epsilon, 3)
        found[name] = {
            "noise_multiplier": z, "cpu_seconds": z_seconds, "epsilon": e, "epsilon_cpu_seconds": e_seconds
        }  # fmt: skip
    return found


def accuracy(table: task.Table) -> dict[str, Any]:
    """DP-SGD through PrivacyEngine, with its own Poisson loader, noise and default accountant."""
    noises: dict[int, float] = {}

    def fit(data: task.Table, rate: float, clip: float) -> task.Model:
        n, d = data.X.shape
        model = nn.Linear(d, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        X, y = torch.from_numpy(data.X).float(), torch.from_numpy(data.y).float()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=n // task.PARTS)
        if n not in noises:
            noises[n] = get_noise_multiplier(
                target_epsilon=task.EPSILON, target_delta=task.DELTA, sample_rate=1 / len(loader),
                steps=task.STEPS, accountant="prv", epsilon_tolerance=1e-3,
            )  # fmt: skip
        private, optimizer, drawn = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=rate), data_loader=loader,
            noise_multiplier=noises[n], max_grad_norm=clip,
        )  # fmt: skip
        taken = 0
        while taken < task.STEPS:
            for rows, labels in drawn:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(private(rows)[:, 0], labels).backward()
                optimizer.step()
                taken += 1
                if taken == task.STEPS:
                    break
        weights, bias = model.weight.detach().numpy()[0], float(model.bias.detach())
        return lambda rows: rows @ weights + bias > 0

    return {"add-remove": {"Opacus DP-SGD": task.searched(fit, table, task.DP_SGD_GRID)}}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {
        "versions": {name: version(name) for name in ("opacus", "torch", "quietgrad", "numpy")},
        "layers": layers(),
        "calibration": calibration(),
        "accuracy": accuracy(task.Table.read(sys.argv[1])),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
