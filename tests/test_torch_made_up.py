"""A module is tried on examples of both signs, of every size, with other whole numbers, and in large batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.objectives.base import Batch, Rule
from quietgrad.objectives.networks.module import ModuleObjective

ce = nn.CrossEntropyLoss(reduction="none")


def total(objective: ModuleObjective, data: object, rows: range) -> Tensor:
    records = objective.prepare(data)
    theta = objective.initial(records)
    out = torch.zeros_like(theta, dtype=torch.float64)
    objective.add(Batch(records, np.array(rows), bytes(range(32))), (theta,), Rule.gradient(1.0), out)
    return out


def labels(n: int) -> Tensor:
    return torch.arange(n) % 2


class Sorted(nn.Module):
    """Sorts its examples by length, as recurrent layers ask for, and puts them back."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(6, 6), nn.Linear(6, 2), nn.Dropout(dropout)

    def forward(self, x: Tensor, length: Tensor) -> Any:
        order = torch.argsort(length, descending=True, stable=True)
        return self.b(self.dropout(self.a(x[order]))[torch.argsort(order)])


def ordered(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    lengths = torch.arange(n) % 40 + 5
    lengths[[0, n - 1, (n - 1) // 2]] = 25  # the records that shapes are taken from do not show an order
    return (torch.randn(n, 6) * torch.where(torch.arange(n) % 2 == 0, 30.0, 0.3)[:, None], lengths), labels(n)


def test_examples_that_a_module_reorders_keep_their_own_norms() -> None:
    (x, lengths), y = ordered(60)
    objective = ModuleObjective(Sorted(), ce)
    shorter = lengths.clone()
    shorter[3] = 1
    whole = total(objective, ((x, lengths), y), range(60))
    assert float((whole - total(objective, ((x, shorter), y), range(60))).norm()) <= 2.0
    apart = sum(total(objective, ((x, lengths), y), range(i, i + 1)) for i in range(60))
    assert float((whole - apart).norm()) <= 1e-4


def test_masks_that_an_order_of_the_batch_hands_out_are_refused() -> None:
    with pytest.raises(ValueError, match="another example of the batch is exchanged"):
        ModuleObjective(Sorted(0.05), ce).prepare(ordered(60))


class Negatives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(x - nn.functional.relu(-x).mean(0))


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Any:
        z = self.words(tokens).mean(1)
        return self.head(z - z.amax(0))


class Capacity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        room = torch.zeros(len(x), 1)
        room[:32] = 1.0
        return self.head(x) * room


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Negatives(), torch.ones(20, 5)),
        (Largest(), torch.full((20, 4), 3)),  # equal tokens: an order is seen on others only
        (Capacity(), torch.ones(20, 5)),
    ],
    ids=["negatives", "tokens", "capacity"],
)
def test_mixing_that_tame_examples_hide_is_refused(module: nn.Module, x: Tensor) -> None:
    with pytest.raises(ValueError, match="mixes"):
        ModuleObjective(module, ce).prepare((x, torch.ones(20, dtype=torch.int64)))


class Skipping(nn.Module):
    """Leaves an example out of a layer, for a reason that no made-up example has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        rows = (x[:, 0] != 77.0).nonzero()[:, 0]
        return self.head(x.index_add(0, rows, self.a(x[rows])))


def test_a_layer_that_gets_other_rows_than_the_records_is_summed_record_by_record() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 5), labels(40)
    x[::7, 0] = 77.0
    objective = ModuleObjective(Skipping(), ce)
    together = total(objective, (x, y), range(40))
    assert all(way.units is not None for way in objective.engine._ways.values())
    apart = sum(total(objective, (x, y), range(i, i + 1)) for i in range(40))
    assert float((together - apart).norm()) <= 1e-4


class Attention(nn.Module):
    """Attention with dropout on (heads · examples) maps, heads or examples in front."""

    def __init__(self, heads_first: bool, p: float) -> None:
        super().__init__()
        self.q, self.v, self.out, self.p = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2), p
        self.heads_first = heads_first

    def forward(self, x: Tensor) -> Any:
        examples, length, _ = x.shape

        def heads(t: Tensor) -> Any:
            order = (2, 0, 1, 3) if self.heads_first else (0, 2, 1, 3)
            return t.view(examples, length, 2, 4).permute(order).reshape(2 * examples, length, 4)

        q, v = heads(self.q(x)), heads(self.v(x))
        maps = nn.functional.dropout((q @ heads(x).transpose(1, 2)).softmax(-1), self.p, self.training)
        shape = (2, examples) if self.heads_first else (examples, 2)
        h = (maps @ v).view(*shape, length, 4).permute((1, 2, 0, 3) if self.heads_first else (0, 2, 1, 3))
        return self.out(h.reshape(examples, length, 8).mean(1))


@pytest.mark.parametrize(("p", "length"), [(0.01, 2), (0.05, 1)])
def test_a_mask_of_heads_first_is_each_record_s_own(p: float, length: int) -> None:
    torch.manual_seed(0)
    data = torch.randn(60, length, 8) * 3, labels(60)
    objective = ModuleObjective(Attention(True, p), ce)
    assert float((total(objective, data, range(60)) - total(objective, data, range(59))).norm()) <= 1.0


def test_a_mask_of_examples_first_is_drawn_for_the_whole_batch() -> None:
    torch.manual_seed(0)
    data = torch.randn(60, 2, 8) * 3, labels(60)
    objective = ModuleObjective(Attention(False, 0.05), ce)
    assert float((total(objective, data, range(60)) - total(objective, data, range(59))).norm()) <= 1.0
    assert all(way.units is not None for way in objective.engine._ways.values())
