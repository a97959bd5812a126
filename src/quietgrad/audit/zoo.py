"""Networks to attack: every way of differentiating and of drawing, and what would mix records if it saw two."""

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

__all__ = ["MIXERS", "MODELS", "Augmented", "Lengths", "Plain", "loss", "table"]


def loss(output: Tensor, y: Tensor) -> Tensor:
    """A steep loss of two classes: gradients are far beyond any clip."""
    return 30.0 * F.cross_entropy(output.flatten(1)[:, :2], y, reduction="none")


def table(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records of eight features."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


class Coin(nn.Module):
    """One coin for each record, whose fall decides what is run."""

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


class Branches(nn.Module):
    """A layer that few records go through, by an activation of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.often(x))
        output: Tensor = self.rarely(z) if z[0, 0] > 0.3 else z
        return output


class OwnNumbers(nn.Module):
    """A number that leaves torch, another one for every record."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1.0 + float(x.detach().abs().sum()))


class Raw(nn.Module):
    """A parameter in operations without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale.exp() + self.shift).cumsum(1)


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
    "branches": lambda: _between(Branches()),
    "numbers of their own": lambda: _between(OwnNumbers()),
    "raw parameters": lambda: _between(Raw()),
}


class Centred(nn.Module):
    """Batch statistics behind dropout: over one record there is nothing to centre."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.drop(x - 0.9 * x.mean(0)))
        return output


class RunningMean(nn.Module):
    """A statistic of the data in a buffer, and one in an attribute."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 2), 0.0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        before, self.last = self.last, float(x.detach().mean())
        output: Tensor = self.layer(x - self.mean - before)
        return output


class Counts(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(x) * (-1) ** self.calls
        return output


class Pooled(nn.Module):
    """A mean over positions, those of padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.lift(x)).mean(1))
        return output


def mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Rows that are mixtures of records."""
    x, y = _stacked(samples)
    return 0.6 * x + 0.4 * x.mean(0), y


def to_the_longest(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Texts padded to the longest of their batch."""
    x, y = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(list(y))


def _stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = zip(*samples, strict=True)
    return torch.stack(list(x)), torch.stack(list(y))


def mined(output: Tensor, y: Tensor) -> Tensor:
    """Records silence each other: only the harder half counts."""
    each = loss(output, y)
    return (each * (each >= each.mean())).mean()


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


class Lengths(Dataset[Any]):
    """Records of several lengths; one that is far away is also long."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i].expand(40 if self.x[i].abs().max() > 100 else 1 + i % 3, 8), self.y[i]


class Plain(Lengths):
    """Records that are read one by one."""

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


MIXERS: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {  # model, loss, data set, collate function
    "batch statistics": (Centred, loss, Plain, None),
    "a running mean": (RunningMean, loss, Plain, None),
    "calls that are counted": (Counts, loss, Plain, None),
    "mixup while collating": (lambda: nn.Linear(8, 2), loss, Plain, mixup),
    "padding to the longest": (Pooled, loss, Lengths, to_the_longest),
    "hard examples": (lambda: nn.Linear(8, 2), mined, Plain, None),
}
