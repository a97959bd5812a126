"""Local training of networks: clients together, by themselves and by plain PyTorch make the same updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quietgrad.core.session.objectives import Batch, NoRegularizer
from quietgrad.objectives import L2
from quietgrad.tables.parties import PartyLevelObjective
from quietgrad.tables.privacy_units import GroupIndex, RecordsWithIds
from quietgrad.tables.queries.local_update import LocalTraining, LocalUpdateQuery
from quietgrad.torch.networks.module import ModuleObjective

SIZES = [12, 3, 25, 12, 1, 9]


def _net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, 2), nn.ReLU(), *extra, nn.Flatten(), nn.Linear(27, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def _data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, GroupIndex]:
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    X = torch.from_numpy(rng.standard_normal((n, 1, 7, 7)).astype(np.float32))
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    return X, torch.from_numpy(rng.integers(0, 3, n)), GroupIndex(None, np.arange(n), starts, True)


def _updates(
    module: nn.Module, training: LocalTraining, data: Any = None, key: bytes | None = None
) -> torch.Tensor:
    X, y, clients = data or _data()
    objective = ModuleObjective(module, nn.CrossEntropyLoss())
    records = objective.prepare((X, y))
    theta = objective.initial(records)
    found: dict[int, torch.Tensor] = {}
    for k in range(len(SIZES)):
        one = GroupIndex(np.array([k]), clients.order, clients.starts, True)
        (row,) = torch.cat(list(objective.local_updates(Batch(records, None, key), one, theta, training)))
        found[k] = row
    alone = torch.stack([found[k] for k in range(len(SIZES))])
    total = torch.cat(list(objective.local_updates(Batch(records, None, key), clients, theta, training)))
    order = sorted(range(len(SIZES)), key=lambda k: min(SIZES[k], training.batch_size))
    assert torch.equal(total, alone[order])  # beside others as by itself, to the last bit
    return alone


@pytest.mark.parametrize("penalty", [NoRegularizer(), L2(0.3)], ids=["plain", "with a penalty"])
def test_clients_train_as_plain_pytorch_does(penalty: Any) -> None:
    training = LocalTraining(4, 0.2, 10, penalty)
    updates = _updates(_net(), training)
    X, y, clients = _data()
    for k, size in enumerate(SIZES):
        net = _net()
        start = torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer = torch.optim.SGD(net.parameters(), 0.2, weight_decay=penalty.smoothness)
        for step in range(4):
            rows = clients.starts[k] + (10 * step + np.arange(min(10, size))) % size
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ours = torch.cat([p.detach().flatten() for p in net.parameters()]) - start
        torch.testing.assert_close(updates[k], ours, atol=2e-5, rtol=1e-4)


def test_a_module_that_draws_trains_in_turn_and_from_the_clients_secret() -> None:
    training = LocalTraining(2, 0.2, 10, NoRegularizer())
    first, again = (_updates(_net(nn.Dropout(0.5)), training, key=bytes(32)) for _ in range(2))
    torch.testing.assert_close(first, again)
    other = _updates(_net(nn.Dropout(0.5)), training, key=bytes([1] * 32))
    assert not torch.allclose(first[2], other[2])


class _Remembers(nn.Module):
    """A layer that adds what it saw before: a leak from client to client if that were kept."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = sum(float(each.sum()) for each in self.seen) if self.seen else 0.0
        self.seen.append(x.detach().clone())
        return x + shift


def test_what_a_module_keeps_of_one_client_is_no_other_clients() -> None:
    training = LocalTraining(2, 0.2, 10, NoRegularizer())
    torch.testing.assert_close(_updates(_net(_Remembers()), training), _updates(_net(), training))


def test_a_client_on_which_the_module_fails_counts_as_zero() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x > 900.0).any()):
                raise RuntimeError("a record's content")
            return x

    X, y, clients = _data()
    X[clients.starts[1]] = 1000.0
    objective = ModuleObjective(nn.Sequential(Fails(), _net()), nn.CrossEntropyLoss())
    records = objective.prepare((X, y))
    theta = objective.initial(records)
    rows = torch.cat(
        list(
            objective.local_updates(
                Batch(records, None), clients, theta, LocalTraining(1, 0.1, 10, NoRegularizer())
            )
        )
    )
    assert int(rows.isnan().any(1).sum()) == 1
    out = torch.zeros(len(theta), dtype=torch.float64)
    LocalUpdateQuery(theta, 1, 0.1, 10, 1.0)._add(rows, out)
    assert bool(out.isfinite().all())


class _Tokens(nn.Module):
    """One weight, and a table of three tokens: a fourth one raises an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.table = nn.Linear(1, 1, bias=False), nn.Embedding(3, 1)
        self.table.weight.requires_grad_(False).zero_()
        nn.init.zeros_(self.line.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.line(x[:, :1]) + self.table(x[:, 1].long())
        return answer


def test_training_that_expands_the_last_bit_is_no_other_clients_doing() -> None:
    """A client on which the module fails ended the pass of 31 others, who then trained, and rounded, alone: 3 C."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 7)) * 300.0, rng.standard_normal((32, 7))
    for _ in range(2):  # gradients cancel, and rounding decides where an update points
        y -= x * (x * y).sum(1, keepdims=True) / (x * x).sum(1, keepdims=True)
    X = torch.stack([torch.from_numpy(x).flatten(), torch.zeros(32 * 7)], 1).float()
    X[-1, 1] = 7.0
    loss = ModuleObjective(_Tokens(), lambda output, y: (output.squeeze(1) - y).square().mean() / 2)
    asked = PartyLevelObjective(loss)
    data = X, torch.from_numpy(y).flatten().float()
    records = asked.prepare(RecordsWithIds(data, np.repeat(np.arange(32), 7)))
    query, sums = LocalUpdateQuery(torch.zeros(1), 10, 0.1, 20, 1.0), []
    for there in (np.arange(31), np.arange(32)):
        sums.append(torch.zeros(1, dtype=torch.float64))
        query.sum_into(asked, Batch(records, there, bytes(32)), sums[-1])
    assert float((sums[0] - sums[1]).abs()) <= query.bound


def test_clients_train_together_to_the_bits_that_each_has_alone() -> None:
    """A layer that expands rounding, and 20 clients in passes of many sizes."""
    torch.manual_seed(0)
    wild = nn.Sequential(*(part for _ in range(20) for part in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 2))
    with torch.no_grad():
        for name, weight in wild.named_parameters():
            weight.mul_(5.0 if name.endswith("weight") else 1.0)
    rng = np.random.default_rng(0)
    objective = ModuleObjective(wild, nn.CrossEntropyLoss())
    data = torch.from_numpy(rng.standard_normal((100, 8)).astype(np.float32)), torch.arange(100) % 2
    records = objective.prepare(data)
    theta, training = objective.initial(records), LocalTraining(5, 0.5, 4, NoRegularizer())
    starts = np.arange(0, 101, 5)

    def updates(chosen: Any) -> torch.Tensor:
        clients = GroupIndex(np.asarray(chosen), np.arange(100), starts, True)
        return torch.cat(list(objective.local_updates(Batch(records, None, bytes(32)), clients, theta, training)))

    together = updates(np.arange(20))
    assert bool(together.isfinite().all())
    for chosen in ([3], [7, 3], [0, 5, 19], list(range(1, 18))):
        assert torch.equal(updates(chosen), together[chosen])
    (sizes,) = objective.client_sizes.values()
    assert any(agreed for (layout, _), agreed in sizes._agreed.items() if layout.size > 1)
