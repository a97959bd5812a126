"""Gradients of records by plain autograd, with nothing of ours: what the sums of the engine are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import mapped, tensors_of
from quietgrad.torch.networks.vectors import UnitAssignment

KEY = bytes(range(32))


def grouped(*parts: Any) -> list[RecordGroup]:
    """Tensors with records first, such as ``(x, y)``, as records of one shape."""
    count = len(tensors_of(parts)[0])
    return [RecordGroup(np.arange(count), mapped(parts, lambda tensor: tensor.unsqueeze(1)))]


@contextmanager
def at(engine: PerExampleEngine, theta: Tensor) -> Iterator[None]:
    """The module with other parameters."""
    own = dict(engine.module.named_parameters())
    before = {name: own[name].detach().clone() for name in engine.names}
    try:
        with torch.no_grad():
            for name, value in engine.unflatten(theta).items():
                own[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                own[name].copy_(value)


def gradients(engine: PerExampleEngine, theta: Tensor, *parts: Any) -> Tensor:
    """Row i: the gradient of record i, model and loss called with a batch of one; in float64."""
    (group,) = grouped(*parts)
    params = [p for p in engine.module.parameters() if p.requires_grad]
    rows = []
    with at(engine, theta):
        for i in range(len(group.rows)):
            value = engine.loss_of(_row(group.record, i))
            engine.module.zero_grad()
            if value.requires_grad:
                torch.autograd.backward(value.sum())
            each = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
            rows.append(torch.cat([grad.double().flatten() for grad in each]))
    engine.module.zero_grad()
    return torch.stack(rows)


def _row(record: Any, i: int) -> Any:
    return mapped(record, lambda tensor: tensor[i])


def clipped(rows: Tensor, bound: float) -> Tensor:
    weights: Tensor = (bound / rows.norm(dim=1).clamp(min=1e-300)).clamp(max=1.0)
    return rows * weights[:, None]


def ruled(rule: ClippingRule, now: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the rule makes of these rows, added up, and the norms of what it clips."""
    change = now if before is None else now - rule.beta * before
    total = rule.alpha * clipped(change, rule.clip).sum(0)
    norms = [change.norm(dim=1)]
    if rule.gamma:
        total = total + rule.gamma * clipped(now, rule.second_clip).sum(0)
        norms.insert(0, now.norm(dim=1))
    return total, torch.stack(norms, 1)


def summed(
    engine: PerExampleEngine,
    points: tuple[Tensor, ...],
    groups: list[RecordGroup],
    rule: ClippingRule,
    units: UnitAssignment | None = None,
    key: bytes = KEY,
) -> tuple[Tensor, Tensor]:
    """The engine's sum in float64, and its norms."""
    out = torch.zeros_like(points[0], dtype=torch.float64)
    count = sum(len(group.rows) for group in groups)
    return out, engine.add(points, groups, rule, out, RecordSeeds(key, np.arange(count)), units)


def start(engine: PerExampleEngine, apart: float = 0.0) -> Any:
    """The module's parameters, or with ``apart`` those and others this far away."""
    theta = engine.flatten(dict(engine.module.named_parameters()))
    if not apart:
        return theta
    step = torch.randn(len(theta), dtype=theta.dtype, generator=torch.Generator().manual_seed(3))
    return theta, theta + apart * step


def one_at_a_time(module: nn.Module, loss: Any, groups: list[RecordGroup]) -> PerExampleEngine:
    """An engine that runs each record by itself, as it does where vmap cannot."""
    engine = PerExampleEngine(module, loss)
    engine.try_out(groups[0].record).program.alone = "the test asks for it"
    return engine


def in_passes_of(engine: PerExampleEngine, most: int | None) -> None:
    """Let no pass of the engine hold more records, as if the memory budget said so."""
    engine._pass_size = lambda known, mix: most  # type: ignore[method-assign]
