"""How a model's per-example gradients are computed, part by part, and what each part costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.objectives.networks.checks import refuse_mixing_layers
from quietgrad.objectives.networks.collector import Collector
from quietgrad.objectives.networks.contributions import Combination
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.networks.tape import Batch, Call, LossFunction, Unit, batch_length
from quietgrad.objectives.networks.ways import Way

__all__ = ["Explanation", "Part", "explain"]


@dataclass(frozen=True)
class Part:
    """A layer, or the operations that use some parameters: how its gradients are computed, and at what price.

    ``how`` is "kernel", "fallback" or "refused"; ``time`` and ``memory`` are shares of the whole step's.
    """

    name: str
    kind: str
    how: str
    why: str
    parameters: int
    time: float
    memory: float


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; printed, it is a table."""

    parts: tuple[Part, ...]
    passes: float  # share of the time that the forward and backward pass themselves take
    examples: int

    @property
    def fallbacks(self) -> tuple[Part, ...]:
        """Parts without a kernel."""
        return tuple(part for part in self.parts if part.how == "fallback")

    @property
    def refused(self) -> tuple[Part, ...]:
        """Parts with which the model cannot be trained privately."""
        return tuple(part for part in self.parts if part.how == "refused")

    def __str__(self) -> str:
        width = max(len(part.name) for part in self.parts)
        lines = [f"{'unit':{width}}  {'by':8}  {'time':>5}  {'memory':>6}  {'parameters':>10}  what"]
        for part in self.parts:
            said = f"{part.kind}: {part.why}" if part.why else part.kind
            shares = f"{part.time:5.0%}  {part.memory:6.0%}  {part.parameters:10,}"
            lines.append(f"{part.name:{width}}  {part.how:8}  {shares}  {said}")
        if not self.refused:
            lines.append(f"forward and backward pass: {self.passes:.0%} of the time, with {self.examples} examples")
        return "\n".join(lines)


def explain(model: nn.Module, batch: tuple[Batch, Batch], loss_fn: LossFunction) -> Explanation:
    """Per unit of the model: kernel, fallback or refused, why, and its share of a step's time and memory.

    Args:
        model: as it is to be trained, in training mode.
        batch: (x, y) with as many examples as a step has; real records are timed, and nothing of them is shown.
        loss_fn: loss_fn(output, y) → one loss per example.

    The shares are measured once: they tell what dominates, and vary by some per cent.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.PReLU(8), nn.Linear(8, 2))
    >>> found = explain(model, (torch.randn(6, 4), torch.randint(2, (6,))), nn.CrossEntropyLoss(reduction="none"))
    >>> [(part.name, part.how, part.why) for part in found.parts]
    [('0', 'kernel', ''), ('1', 'fallback', 'PReLU has no kernel'), ('2', 'kernel', '')]
    """
    refused = _refused_layers(model)
    if refused:
        return Explanation(refused, 0.0, batch_length(batch[0]))
    try:
        engine = PerExampleEngine(model, loss_fn)
        way = engine.way(*batch)
    except (ValueError, RuntimeError, TypeError) as error:
        part = Part("(the model)", type(model).__name__, "refused", str(error), _size(model), 0.0, 0.0)
        return Explanation((part,), 0.0, batch_length(batch[0]))
    if way.plan is None:
        how = "vmap of the whole model" if way.vectorised else "one example at a time"
        part = Part("(the model)", how, "fallback", way.why, engine.dim, 1.0, 1.0)
        return Explanation((part,), 0.0, batch_length(batch[0]))
    return _timed(engine, way, batch)


def _refused_layers(model: nn.Module) -> tuple[Part, ...]:
    parts = []
    for name, layer in model.named_modules():
        if next(layer.children(), None) is None:
            try:
                refuse_mixing_layers(layer)
            except ValueError as error:
                why = str(error).split(") ", 1)[-1]
                parts.append(
                    Part(name or "(the model)", type(layer).__name__, "refused", why, _size(layer), 0.0, 0.0)
                )
    return tuple(parts)


class _Timing(Collector):
    """Notes how long each unit's contributions take."""

    spent: defaultdict[Unit, float]

    def _receive(self, call: Call, params: Mapping[str, Tensor]) -> None:
        began = time.perf_counter()
        super()._receive(call, params)
        self.spent[call.unit] += time.perf_counter() - began


@torch.no_grad()
def _timed(engine: PerExampleEngine, way: Way, batch: tuple[Batch, Batch]) -> Explanation:
    assert way.plan is not None
    theta = engine.flatten(dict(engine.module.named_parameters()))
    examples = batch_length(batch[0])
    keys = RecordKeys.of(None, np.arange(examples))
    mix = Combination(gradient=True, change=False)
    for _ in range(2):  # the first one warms up
        collector = _Timing(way.network, way.plan, mix, way.space, way._drawing(keys, theta.device))
        collector.spent = defaultdict(float)
        began = time.perf_counter()
        pieces = collector.collect(theta, None, *batch)
        passes = time.perf_counter() - began - sum(collector.spent.values())
        total = torch.zeros_like(theta, dtype=torch.float64)
        by_slot: dict[int, float] = {}
        held: dict[int, int] = {}
        for where, piece in pieces:
            began = time.perf_counter()
            weights = piece.squared_norms().isfinite().double()
            piece.add_weighted(weights, total[where])
            by_slot[where.start] = time.perf_counter() - began
            held[where.start] = piece.held()
    whole = passes + sum(collector.spent.values()) + sum(by_slot.values())
    memory = sum(held.values())
    rows: dict[tuple[str, str, str, str], list[Any]] = {}
    seen: set[int] = set()
    for unit in way.plan.units:
        spent, size, parameters = collector.spent[unit], 0, 0
        for slot in unit.slots.values():
            if slot.start not in seen:  # a parameter that several units use counts with the first
                seen.add(slot.start)
                spent += by_slot.get(slot.start, 0.0)
                size += held.get(slot.start, 0)
                parameters += slot.stop - slot.start
        kind = type(unit.module).__name__ if unit.module is not None else "operation"
        how = "kernel" if unit.kernel is not None or not unit.why else "fallback"
        row = rows.setdefault((unit.name, kind, how, unit.why), [0.0, 0, 0])
        for k, value in enumerate((spent, size, parameters)):
            row[k] += value
    parts = tuple(
        Part(*key, parameters, spent / whole, size / max(1, memory))
        for key, (spent, size, parameters) in rows.items()
    )
    return Explanation(parts, passes / whole, examples)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
