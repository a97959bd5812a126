"""What a case of the brute-force tables is, and the two sums that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.networks.module import ModuleObjective

KEY = bytes(range(32))
N, FEATURES, CLASSES = 100, 6, 3
FAR = N // 2  # the record that is far away
CLIP = 1.0
CROSS = nn.CrossEntropyLoss()
Make = Callable[[], nn.Module]


def table(n: int = N, features: int = FEATURES) -> TensorDataset:
    """Rows of which one is far away."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, features, generator=generator)
    x[FAR % n] *= 1e3
    return TensorDataset(x, torch.arange(n) % CLASSES)


def images(channels: int = 2, side: int = 8, n: int = 24) -> TensorDataset:
    x = torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(1))
    x[FAR % n] *= 1e3
    return TensorDataset(x, torch.arange(n) % CLASSES)


def sequences(length: int = 5, features: int = 4, n: int = 24) -> TensorDataset:
    x = torch.randn(n, length, features, generator=torch.Generator().manual_seed(2))
    x[FAR % n] *= 1e3
    return TensorDataset(x, torch.arange(n) % CLASSES)


def tokens(length: int = 6, words: int = 20, n: int = 40) -> TensorDataset:
    x = torch.randint(1, words, (n, length), generator=torch.Generator().manual_seed(3))
    x[FAR % n] = words - 1
    return TensorDataset(x, torch.arange(n) % CLASSES)


class Texts(Dataset[Any]):
    """Texts of several lengths, one of them long."""

    def __init__(self, n: int = N, words: int = 20, longest: int = 60) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(2, 6, (n,), generator=generator).tolist()
        lengths[FAR % n] = longest
        self.texts = [torch.randint(1, words, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.texts[index], index % CLASSES


@dataclass(frozen=True)
class Case:
    """A model, its loss and its records. ``random``: plain autograd would draw other numbers."""

    model: Make
    data: Callable[[], Any] = table
    loss: Any = CROSS
    random: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 1e-4


def clipped_sum(case: Case, data: Any, rows: Sequence[int], model: nn.Module | None = None) -> Tensor:
    """Σ clip(g_i) of these records as a release makes it, before noise."""
    torch.manual_seed(0)
    objective = ModuleObjective(case.model() if model is None else model, case.loss, **case.settings)
    examples: Any = objective.prepare(data)
    theta = objective.initial(examples)
    out = torch.zeros(len(theta), dtype=torch.float64)
    objective.add(Batch(examples, np.asarray(rows), KEY), (theta,), ClippingRule.gradient(CLIP), out)
    return out


def by_autograd(case: Case, data: Any, rows: Sequence[int]) -> Tensor:
    """The same by plain autograd, one record at a time."""
    torch.manual_seed(0)
    model = case.model().train()
    collate = case.settings.get("collate_fn") or default_collate
    pad = case.settings.get("pad")
    params = [param for param in model.parameters() if param.requires_grad]
    total = torch.zeros(sum(param.numel() for param in params), dtype=torch.float64)
    for row in rows:
        record = collate([data[row]])
        record = record if pad is None else pad.of(record)
        value = loss_of(case.loss, model, record)
        if not value.requires_grad:
            continue
        model.zero_grad()
        value.sum().backward()
        grads = [torch.zeros_like(param) if param.grad is None else param.grad.to_dense() for param in params]
        flat = torch.cat([grad.double().flatten() for grad in grads])
        if flat.isfinite().all():
            total += flat * min(1.0, CLIP / max(float(flat.norm()), 1e-300))
    return total


def loss_of(loss: Any, model: nn.Module, record: Any) -> Tensor:
    if getattr(loss, "of_model", False):
        return loss(model, **record) if isinstance(record, dict) else loss(model, *record)
    return loss(model(*record[:-1]), record[-1])


def of_model(loss: Callable[..., Tensor]) -> Any:
    """Mark a loss that calls the model itself."""
    loss.of_model = True  # type: ignore[attr-defined]
    return loss


def moved(case: Case) -> tuple[float, Tensor, Any]:
    """By how much the far record moves the sum, in units of C; the sum without it, and the records."""
    data = case.data()
    everyone = list(range(len(data)))
    far = FAR % len(data)
    without = [row for row in everyone if row != far]
    whole, rest = clipped_sum(case, data, everyone), clipped_sum(case, data, without)
    return float((whole - rest).norm()) / CLIP, whole, data
