"""A small table and a network for tests of training loops."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def table(n: int = 60, seed: int = 0) -> TensorDataset:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
