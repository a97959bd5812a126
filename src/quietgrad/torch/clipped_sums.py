"""Clipped sums without noise, the two sums that every private method is made of, and how a model computes them.

`clipped_gradient_sum` is DP-SGD's, `clipped_difference_sum` SPIDER's and DP-SRM's. Neither is private by itself:
`quietgrad.torch.fit` adds noise and accounting. `explain` says how each parameter's gradients are computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.core.session.clipping import Clipping, ClippingName, read_clipping
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.tables.person_ids import factorize_ids
from quietgrad.tables.privacy_units import Combine, PersonRule
from quietgrad.torch.networks.engine import MATTERS, PerExampleEngine
from quietgrad.torch.networks.randomness import preserved
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import PyTree, mapped, tensors_of
from quietgrad.torch.networks.usable import Errors, LossFunction
from quietgrad.torch.networks.vectors import UnitAssignment

_ENGINES: WeakKeyDictionary[nn.Module, tuple[Any, PerExampleEngine]] = WeakKeyDictionary()


def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[PyTree, PyTree],
    clip: float,
    *,
    clipping: ClippingName | Clipping = "flat",
    person: object = None,
    combine: Combine = "mean",
    errors: Errors = "zero",
) -> tuple[dict[str, Tensor], Tensor]:
    """Return Σ_i clip_C(g_i) by parameter name, and the norms ‖g_i‖ before clipping.

    g_i is the gradient of the loss of record i, a batch of one, by all trainable parameters together, and
    clip_C(g) = g·min(1, C/‖g‖). A record whose norm is not finite counts as zero; so does one on which model or
    loss raise an exception, with a norm that is not a number. With ``person`` what is clipped
    is each person's mean, or sum, of the g_i; a person with a norm that is not finite counts as zero.

    Args:
        model: any module; it is called with one record at a time.
        loss_fn: loss_fn(output, y), or loss_fn(model, x, y), of a batch of one: one number.
        batch: (x, y); x may be a tuple of tensors for a model with several inputs.
        clip: the bound C > 0.
        clipping: ``"flat"``, or another rule as in :class:`quietgrad.DPSGD`.
        person: the id of the person that each record is about; the norms are then those of people, in the order
            of their first records. All records of a person must be in the batch.
        combine: ``"mean"`` if every person counts once, ``"sum"`` if records count.
        errors: ``"raise"`` ends the call at an exception of model or loss: for debugging, on public data.

    How the model is run is found out in the first call and kept with the model.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2)
    >>> sums, norms = clipped_gradient_sum(model, lambda output, y: output.squeeze(1), (x, y), clip=1.0)
    >>> norms, sums["weight"]
    (tensor([5.0000, 0.5000], dtype=torch.float64), tensor([[0.9000, 1.2000]]))
    >>> clipped_gradient_sum(model, lambda output, y: output.squeeze(1), (x, y), 1.0, person=["ann", "ann"])
    ({'weight': tensor([[0.6000, 0.8000]])}, tensor([2.7500], dtype=torch.float64))
    """
    engine = _engine(model, loss_fn, errors)
    theta = engine.flatten(dict(model.named_parameters()))
    return _sum(engine, (theta,), batch, ClippingRule.gradient(clip, read_clipping(clipping)), person, combine)


def clipped_difference_sum(
    model: nn.Module,
    previous_params: Mapping[str, Tensor],
    loss_fn: LossFunction,
    batch: tuple[PyTree, PyTree],
    clip: float,
    *,
    clipping: ClippingName | Clipping = "flat",
    person: object = None,
    combine: Combine = "mean",
) -> tuple[dict[str, Tensor], Tensor]:
    """Return Σ_i clip_C(g_i(now) − g_i(previous)) by parameter name.

    The norms of the differences come with it.

    `previous_params` maps the trainable parameters' names to their values at the previous iterate. Both points see
    the same dropout masks. ``clipping``, ``person`` and ``combine`` as in :func:`clipped_gradient_sum`.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> previous = {"weight": model.weight.detach() - 0.1}
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.zeros(2)
    >>> square = lambda output, y: (output.squeeze(1) - y).square() / 2
    >>> sums, norms = clipped_difference_sum(model, previous, square, (x, y), clip=10.0)
    >>> norms, sums["weight"]
    (tensor([0.1000, 0.4000], dtype=torch.float64), tensor([[0.5000]]))
    """
    engine = _engine(model, loss_fn)
    points = engine.flatten(dict(model.named_parameters())), engine.flatten(previous_params)
    return _sum(engine, points, batch, ClippingRule.difference(clip, read_clipping(clipping)), person, combine)


def _engine(model: nn.Module, loss_fn: LossFunction, errors: Errors = "zero") -> PerExampleEngine:
    trained = tuple(id(p) for p in model.parameters() if p.requires_grad)
    hooked = tuple(bool(m._backward_hooks or m._backward_pre_hooks) for m in model.modules())
    known = _ENGINES.get(model)
    form = trained, hooked, errors
    if known is None or known[0] != form or known[1].loss is not loss_fn:
        known = form, PerExampleEngine(model, loss_fn, raises=errors == "raise")
        _ENGINES[model] = known
    return known[1]


def _sum(
    engine: PerExampleEngine, points: tuple[Tensor, ...], batch: tuple[PyTree, PyTree], rule: ClippingRule,
    person: object, combine: Combine,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    group = batch_group(batch)
    units = None
    if person is not None:
        codes, _ = factorize_ids(person, len(group.rows))
        units = UnitAssignment.numbered(codes, mean=PersonRule(combine).combine == "mean")
    if len(group.rows):  # a program that cannot run at all is no record's fault
        engine.try_out(mapped(group.record, lambda tensor: tensor[:1]))
    out = torch.zeros_like(points[0])
    norms = engine.add(points, [group] if len(group.rows) else [], rule, out, units=units)
    return engine.views(out), norms[:, 0]


def batch_group(batch: tuple[PyTree, PyTree]) -> RecordGroup:
    """A batch of tensors with records first as records, each a batch of one."""
    lengths = {len(tensor) for tensor in tensors_of(batch)}
    if len(lengths) != 1:
        raise DataError(f"the tensors of a batch have lengths {sorted(lengths)}: they must be equal.")
    return RecordGroup(np.arange(lengths.pop()), mapped(tuple(batch), lambda tensor: tensor.unsqueeze(1)))


_ALONE = "one record at a time"
_SLOW, _FEW = 1.6, 32  # plain steps beyond which, and records below which, there is something to say
_LONG = 0.05  # seconds of timing


@dataclass(frozen=True)
class OperationCost:
    """An operation on parameters: how its records' gradients are made, and at what cost.

    ``how`` is "kernel", "copied" (for each record), "one record at a time" or "refused"; ``parameters`` counts the
    trained numbers, ``memory`` those that are written out for each record.
    """

    name: str
    kind: str
    how: str
    why: str = ""
    parameters: int = 0
    memory: int = 0


@dataclass(frozen=True)
class Explanation:
    """Report of :func:`explain`. It prints as a table, or as the reason why there is none."""

    parts: tuple[OperationCost, ...]
    records: int = 0
    plain_seconds: float | None = None
    """Forward and backward pass of the batch as one, by plain autograd; ``None`` if it was not timed."""
    private_seconds: float | None = None
    """The clipped sum of the same batch."""

    @property
    def ratio(self) -> float | None:
        """The time of a clipped sum in units of a plain step's gradient."""
        if self.plain_seconds is None or self.private_seconds is None:
            return None
        return self.private_seconds / self.plain_seconds

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences on what would make the sums faster."""
        said = []
        for part in self.fallbacks:
            if part.how == _ALONE:
                said.append(f"Let all records run at once: {part.why}.")
            else:
                said.append(
                    f"Write {part.name} as a layer of torch.nn, or freeze it: {part.kind} has no kernel, and "
                    f"{part.memory:,} numbers are copied for each record."
                )
        if (self.ratio or 0.0) > _SLOW and not said:
            if self.records < _FEW:
                said.append(f"Give it larger samples: {self.records} records are few for one pass.")
            else:
                said.append("Train fewer numbers: freeze layers, or train adapters (LoRA) on a frozen base.")
        return tuple(said)

    @property
    def fallbacks(self) -> tuple[OperationCost, ...]:
        """Parts without a kernel that are large enough to matter."""
        return tuple(part for part in self.parts if part.how in ("copied", _ALONE))

    @property
    def refused(self) -> tuple[OperationCost, ...]:
        """Parts with which the model cannot be trained privately."""
        return tuple(part for part in self.parts if part.how == "refused")

    def __str__(self) -> str:
        if self.refused:
            return "\n".join(f"refused: {part.why}" for part in self.refused)
        if self.parts and self.parts[0].how == _ALONE:
            return "\n".join([f"{_ALONE}, by plain autograd: {self.parts[0].why}", *self._times()])
        rows = [("parameters", "operation", "how", "numbers", "copied for each record")]
        rows += [(p.name, p.kind, p.how, f"{p.parameters:,}", f"{p.memory:,}") for p in self.parts]
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*table, *self._times()])

    def _times(self) -> list[str]:
        if self.ratio is None or self.plain_seconds is None or self.private_seconds is None:
            return []
        plain, private = 1e3 * self.plain_seconds, 1e3 * self.private_seconds
        lines = [
            f"{self.records} records: {private:.3g} ms for their clipped sum, {plain:.3g} ms for a plain gradient: "
            f"{self.ratio:.2f} times"
        ]
        return lines + [f"faster: {sentence}" for sentence in self.advice]


def explain(model: nn.Module, batch: Any, loss_fn: LossFunction, *, memory_budget: float = 256e6) -> Explanation:
    """Explain how per-example gradients of each parameter are computed.

    The text says how long that takes and what would make it faster.

    The model is run on synthetic records of the same shapes: the values of ``batch`` are not read. Times are of
    this machine as it is now, without noise and update.

    Args:
        batch: (x, y), records first; x may be a tuple of tensors. Of a data set of such pairs, or a loader of one,
            it is the first 32 records, or the loader's batch size.
        loss_fn: as in :func:`quietgrad.torch.fit`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = explain(model, (torch.randn(6, 4), torch.zeros(6, dtype=torch.long)), nn.CrossEntropyLoss())
    >>> [(part.name, part.how) for part in found.parts]
    [('0.weight, 0.bias', 'kernel'), ('2.weight, 2.bias', 'kernel')]
    """
    kind, batch = type(model).__name__, _first_batch(batch)
    try:
        engine = PerExampleEngine(model, loss_fn, memory_budget=memory_budget)
        known = engine.try_out(batch_group(batch).record)
    except (QuietgradError, ValueError) as error:
        return Explanation((OperationCost("", kind, "refused", str(error)),))
    times = _timed(engine, batch_group(batch))
    if known.apart or not known.sites:
        why = known.program.alone or "records answer its questions (.item(), a branch) in their own ways"
        return Explanation((OperationCost("", kind, _ALONE, why, engine.dim, engine.dim),), *times)
    found: dict[tuple[str, ...], OperationCost] = {}
    sizes = {name: slot.stop - slot.start for name, slot in engine.slices.items()}
    counted: set[str] = set()
    for operation, names, copied, kernel in known.sites:
        how = "kernel" if kernel or copied <= MATTERS else "copied"
        why = "" if how == "kernel" else f"{operation} has no kernel: its parameters are copied for each record"
        key = *names, operation, how
        part = found.get(key) or OperationCost(", ".join(names), operation, how, why)
        fresh = part.parameters + sum(sizes[name] for name in set(names) - counted)
        found[key] = replace(part, parameters=fresh, memory=part.memory + copied)
        counted |= set(names)
    missing = [name for name in engine.names if name not in counted]
    if missing:
        names_of = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        size = sum(sizes[name] for name in missing)
        found[()] = OperationCost(names_of, "not used", "kernel", "these records do not use it", size)
    return Explanation(tuple(found.values()), *times)


def _first_batch(data: Any) -> Any:
    """(x, y) as it was given, or of the first records of a data set or of a loader's."""
    collate, count, given = default_collate, 32, data
    if isinstance(data, DataLoader):
        collate, count, data = data.collate_fn, data.batch_size or count, data.dataset
    if isinstance(data, Dataset):
        places: Any = data
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise DataError(f"explain: a {type(data).__name__} has no positions. Give a batch of it, (x, y).")
        given = collate([places[place] for place in range(min(count, len(places)))])
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(
            f"explain: the batch must be (x, y), records first, and it is a {type(given).__name__}. Inputs of "
            "several tensors are ((x1, x2), y)."
        )
    return tuple(given)


def _timed(engine: PerExampleEngine, group: RecordGroup) -> tuple[int, float | None, float | None]:
    """How many records there are, and the seconds of a plain gradient of all and of their clipped sum."""
    count, module = len(group.rows), engine.module
    generator = torch.Generator().manual_seed(0)

    def synthetic(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, generator=generator).to(tensor)
        return torch.zeros_like(tensor)

    records = engine.on_device(mapped(group.record, synthetic))
    whole = mapped(records, lambda tensor: tensor.flatten(0, 1) if tensor.dim() > 1 else tensor)
    trained = [param for param in module.parameters() if param.requires_grad]
    theta = engine.flatten(dict(module.named_parameters()))
    rule, out = ClippingRule.gradient(1.0), torch.zeros_like(theta, dtype=torch.float64)

    def plain() -> None:
        with torch.enable_grad():
            loss: Tensor = engine.loss_of(whole)
            torch.autograd.grad(loss.mean(), trained, allow_unused=True)

    def private() -> None:
        engine.add((theta,), [RecordGroup(group.rows, records)], rule, out)

    seconds: list[float | None] = []
    for step in (plain, private):
        try:
            with preserved():
                step()
                begin, steps = time.perf_counter(), 0
                while steps < 3 or (time.perf_counter() - begin < _LONG and steps < 50):
                    step()
                    steps += 1
                seconds.append((time.perf_counter() - begin) / steps)
        except Exception:  # a model that runs record by record alone has no plain step
            seconds.append(None)
    return count, seconds[0], seconds[1]
