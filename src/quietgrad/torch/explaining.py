"""How a model's per-record gradients are computed, part by part, and what each part costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quietgrad.errors import QuietgradError
from quietgrad.objectives.networks.engine import LossFunction, PerExampleEngine
from quietgrad.objectives.networks.gradients import GRADIENT, Collector
from quietgrad.objectives.networks.one_record import Pass
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.torch.clipping import batch_group

__all__ = ["Explanation", "Part", "explain"]

_ALONE = "one record at a time"


@dataclass(frozen=True)
class Part:
    """An operation on parameters: how its records' gradients are made, and at what price.

    ``how`` is "kernel", "copied" (for each record), "one record at a time" or "refused"; ``time`` is a share of the
    whole, ``memory`` numbers that are written out for each record.
    """

    name: str
    kind: str
    how: str
    why: str
    parameters: int
    time: float
    memory: int


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; printed, it is a table."""

    parts: tuple[Part, ...]
    passes: float  # share of the time that the forward and backward pass themselves take
    examples: int

    @property
    def fallbacks(self) -> tuple[Part, ...]:
        """Parts without a kernel that are large enough to matter."""
        return tuple(part for part in self.parts if part.how in ("copied", _ALONE))

    @property
    def refused(self) -> tuple[Part, ...]:
        """Parts with which the model cannot be trained privately."""
        return tuple(part for part in self.parts if part.how == "refused")

    def __str__(self) -> str:
        if self.refused:
            return "\n".join(f"refused: {part.why}" for part in self.refused)
        if self.parts and self.parts[0].how == _ALONE:
            return f"{_ALONE}, by plain autograd: {self.parts[0].why}"
        rows = [("parameters", "operation", "how", "numbers", "time")]
        rows += [(p.name, p.kind, p.how, f"{p.parameters:,}", f"{100 * p.time:.0f} %") for p in self.parts]
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([*lines, f"forward and backward pass: {100 * self.passes:.0f} % of the time"])


def explain(
    model: nn.Module, batch: tuple[Any, Any], loss_fn: LossFunction, *, memory_budget: float = 256e6
) -> Explanation:
    """How each parameter's records' gradients are computed, on a batch (x, y) of a few records.

    Args:
        batch: (x, y), records first; x may be a tuple of tensors.
        loss_fn: as in :func:`quietgrad.torch.fit`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = explain(model, (torch.randn(6, 4), torch.zeros(6, dtype=torch.long)), nn.CrossEntropyLoss())
    >>> [(part.name, part.how) for part in found.parts]
    [('0.weight, 0.bias', 'kernel'), ('2.weight, 2.bias', 'kernel')]
    """
    group = batch_group(batch)
    count = len(group.rows)
    try:
        engine = PerExampleEngine(model, loss_fn, memory_budget=memory_budget)
        engine.try_out(group.record)
    except (QuietgradError, ValueError) as error:
        return Explanation((Part("", type(model).__name__, "refused", str(error), 0, 0.0, 0),), 0.0, count)
    program = engine.program_of(group.record)
    keys = RecordKeys.of(None, np.arange(count))
    theta = engine.flatten(dict(model.named_parameters()))
    done, began = None, time.perf_counter()
    if program.alone is None:
        done = engine.pass_of(theta, group.record, keys)
        passes = time.perf_counter() - began
    if not isinstance(done, Pass):
        why = program.alone or "records answer its questions (.item(), a branch) in their own ways"
        return Explanation((Part("", type(model).__name__, _ALONE, why, engine.dim, 1.0, engine.dim),), 0.0, count)
    return _timed(engine, done, passes, count)


@torch.no_grad()
def _timed(engine: PerExampleEngine, done: Pass, passes: float, count: int) -> Explanation:
    found: dict[tuple[str, str, str], list[Any]] = {}
    slices = list(engine.slices.values())
    sizes: Mapping[str, int] = {name: slot.stop - slot.start for name, slot in engine.slices.items()}
    counted: set[str] = set()
    whole = passes
    for site in done.sites:
        began = time.perf_counter()
        collector = Collector(GRADIENT, engine.space, slices, count)
        collector.begin([site])
        collector.end([site])
        part = collector.gradients()
        part.add_weighted(part.norms().isfinite().double(), torch.zeros(engine.dim, dtype=torch.float64))
        spent = time.perf_counter() - began
        whole += spent
        how = "kernel" if site.kernel is not None or site.copied <= 4096 else "copied"
        row = found.setdefault((", ".join(site.names), site.operation, how), [0, 0.0, 0])
        row[0] += sum(sizes[name] for name in site.names if name not in counted)
        counted |= set(site.names)
        row[1] += spent
        row[2] += site.copied
    parts = []
    for (name, kind, how), (parameters, spent, copied) in found.items():
        why = f"{kind} has no kernel: its parameters are copied for each record" if how == "copied" else ""
        parts.append(Part(name, kind, how, why, parameters, spent / whole, copied))
    missing = [name for name in engine.names if name not in counted]
    if missing:
        names = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        size = sum(sizes[name] for name in missing)
        parts.append(Part(names, "not used", "kernel", "these records do not use it", size, 0.0, 0))
    return Explanation(tuple(parts), passes / whole, count)
