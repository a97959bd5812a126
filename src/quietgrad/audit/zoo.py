"""Networks to attack: every way of differentiating and of drawing, and models that must be refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

__all__ = ["MIXERS", "MODELS", "Augmented", "loss", "table"]


def loss(output: Tensor, y: Tensor) -> Tensor:
    """A steep loss of two classes: gradients are far beyond any clip."""
    return 30.0 * F.cross_entropy(output.flatten(1)[:, :2], y, reduction="none")


def table(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records of eight features."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


class Coin(nn.Module):
    """One coin for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x if torch.rand(()) < 0.5 else x


class DropConnect(nn.Module):
    """Dropout of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ F.dropout(self.weight, 0.5, self.training)


class Aliased(nn.Module):
    """Registers the weights of its cell a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)
        self.weight, self.bias = self.cell.weight, self.cell.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.cell(torch.tanh(self.cell(x))))


class Checkpointed(nn.Module):
    """Runs again on the way back."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Recurrent(nn.Module):
    """No rule but autograd's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.view(-1, 4, 2))[0][:, -1]
        return output


class Convolutions(nn.Module):
    """Convolution and group norm."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 1)
        self.layers = nn.Sequential(first, nn.GroupNorm(2, 4), nn.Tanh(), last)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x[:, None])[:, 0]
        return output


def _between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 2))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: _between(nn.Tanh()),
    "convolutions": lambda: _between(Convolutions()),
    "dropout": lambda: _between(nn.Dropout(0.5)),
    "dropout of a weight": lambda: _between(DropConnect()),
    "one coin": lambda: _between(Coin()),
    "tied weights": _tied,
    "aliased weights": lambda: _between(Aliased()),
    "checkpointed": lambda: _between(Checkpointed()),
    "checkpointed dropout": lambda: _between(Checkpointed(0.5)),
    "recurrent": lambda: _between(Recurrent()),
}


class Centred(nn.Module):
    """Batch statistics behind dropout, in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.drop(x - x.mean(0) if self.training else x))
        return output


class RunningMean(nn.Module):
    """A raw statistic of the data in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        output: Tensor = self.layer(x)
        return output


def mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Rows that are mixtures of records."""
    x, y = (torch.stack([torch.as_tensor(sample[k]) for sample in samples]) for k in (0, 1))
    return 0.6 * x + 0.4 * x[torch.randperm(len(x))], y


MIXERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "batch statistics": (Centred, None),
    "a running mean": (RunningMean, None),
    "mixup while collating": (lambda: nn.Linear(8, 2), mixup),
}


class Augmented(Dataset[Any]):
    """Draws for each record from torch, numpy and Python, for some more than for others."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i] + torch.randn(8) * random.random()
        for _ in range(i % 3):
            x = x * float(np.random.rand() + 0.5)  # noqa: NPY002
        return x, self.y[i]
