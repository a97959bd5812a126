"""Networks under exact probes: a zoo of modules, and what one record or one person can move in each.

Given the key of a release, a record's contribution is a function of that record alone. So neighbours are compared
under one key: without a record the others keep their numbers, and a record is exchanged for one that is huge, zero
or overflows. Besides the bound: gradients are autograd's, a replayed query has the same sum to the last bit, what a
loop's own backward pass leaves is what a fit sums, what would mix records sees one, and processes that hold
different things find out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from quietgrad.assurance.audit.networks import steep_loss as loss
from quietgrad.assurance.audit.networks import steep_table as table
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.session.clipping import FLAT, Automatic, Clipping, PerLayer
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import Combine, PersonRule, RecordsWithIds, UserLevelObjective
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.gradients import vectors_by_autograd
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.one_record import stacked
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup
from tests.probes import found

_KEY = bytes(range(32))
_SLACK = 1e-6
_RULES = (
    ClippingRule.gradient(1.0),
    ClippingRule.difference(0.2),
    ClippingRule.momentum(0.3, 1.0, 0.1),
    ClippingRule.joint(0.3, 0.5),
)


class Augmented(Dataset[Any]):
    """A data set that draws for each record from torch, numpy and Python, for some more than for others."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i] + torch.randn(8) * random.random()
        for _ in range(i % 3):
            x = x * float(np.random.rand() + 0.5)  # noqa: NPY002
        return x, self.y[i]


# --- the zoo ------------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A module of a few parts and a function of them and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 2))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].weight = model[0].weight
    return model


def _aliased() -> nn.Module:
    """Registers the weights of its cell a second time."""
    cell = nn.Linear(8, 8)
    return Apply(
        lambda m, x: torch.tanh(m.cell(torch.tanh(m.cell(x)))), cell=cell, weight=cell.weight, bias=cell.bias
    )


def _checkpointed(dropout: float) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8))
    return Apply(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner)


def _branch(m: Any, x: Tensor) -> Tensor:
    """A layer that few records go through, by an activation of their own."""
    z = torch.tanh(m.often(x))
    return m.rarely(z) if z[0, 0] > 0.3 else z


def _convolutions() -> nn.Module:
    first, last = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 1)
    layers = nn.Sequential(first, nn.GroupNorm(2, 4), nn.Tanh(), last)
    return Apply(lambda m, x: m.layers(x[:, None])[:, 0], layers=layers)


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: _between(nn.Tanh()),
    "convolutions": lambda: _between(_convolutions()),
    "dropout": lambda: _between(nn.Dropout(0.5)),
    "dropout of a weight": lambda: _between(
        Apply(lambda m, x: x @ F.dropout(m.weight, 0.5, m.training), weight=_parameter(torch.eye(8)))
    ),
    "one coin": lambda: _between(Apply(lambda m, x: 3 * x if torch.rand(()) < 0.5 else x)),
    "tied weights": _tied,
    "aliased weights": lambda: _between(_aliased()),
    "checkpointed": lambda: _between(_checkpointed(0.0)),
    "checkpointed dropout": lambda: _between(_checkpointed(0.5)),
    "recurrent": lambda: _between(
        Apply(lambda m, x: m.layer(x.view(-1, 4, 2))[0][:, -1], layer=nn.GRU(2, 8, batch_first=True))
    ),
    "branches": lambda: _between(Apply(_branch, often=nn.Linear(8, 8), rarely=nn.Linear(8, 8))),
    "numbers of their own": lambda: _between(Apply(lambda m, x: x / (1.0 + float(x.detach().abs().sum())))),
    "raw parameters": lambda: _between(
        Apply(
            lambda m, x: torch.tanh(x * m.scale.exp() + m.shift).cumsum(1),
            shift=_parameter(torch.zeros(8)), scale=_parameter(torch.ones(8)),
        )
    ),
}  # fmt: skip


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


def _stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = zip(*samples, strict=True)
    return torch.stack(list(x)), torch.stack(list(y))


def _mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = _stacked(samples)
    return 0.6 * x + 0.4 * x.mean(0), y


def _to_the_longest(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(list(y))


class Plain(Dataset[Any]):
    """Records that are read one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Lengths(Plain):
    """Records of several lengths; one that is far away is also long."""

    def __getitem__(self, i: int) -> Any:
        return self.x[i].expand(40 if self.x[i].abs().max() > 100 else 1 + i % 3, 8), self.y[i]


def _linear() -> nn.Module:
    return nn.Linear(8, 2)


MIXERS: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {  # model, loss, data set, collate function
    "a running mean": (RunningMean, loss, Plain, None),
    "mixup while collating": (_linear, loss, Plain, _mixup),
    "padding to the longest": (
        lambda: Apply(lambda m, x: m.head(torch.tanh(m.lift(x)).mean(1)), lift=nn.Linear(8, 8), head=_linear()),
        loss, Lengths, _to_the_longest,
    ),
}  # fmt: skip

# --- what one record can move -------------------------------------------------------------------------------------


def probe_networks() -> Iterator[AuditFinding]:
    """All of them."""
    for name in MODELS:
        yield probe_network(name)
        yield probe_gradients(name)
        yield probe_recorded(name)
    yield probe_network("dropout", micro_batch=3)
    yield probe_network("dropout", processes=2)
    yield probe_network("layers", augmented=True)
    yield probe_network("layers", clipping=Automatic())
    yield probe_network("tied weights", clipping=PerLayer(within=Automatic()))
    yield probe_long_sums()
    yield from (probe_mixing(name) for name in MIXERS)
    yield probe_agreement()
    yield probe_people("layers", "mean")
    yield probe_people("layers", "sum")
    yield probe_people("convolutions", "mean")
    yield probe_people("dropout", "sum", micro_batch=6)
    yield probe_people("dropout", "sum", processes=2)
    yield probe_people("dropout", "sum", records_per_person=4)
    yield probe_people_drawn()


def probe_network(
    name: str, *, micro_batch: int | None = None, processes: int = 1, augmented: bool = False,
    clipping: Clipping = FLAT,
) -> AuditFinding:  # fmt: skip
    """Neighbours in one record: the largest ‖q(D) − q(D′)‖/Δ, and whether a replay has the same bits."""
    torch.manual_seed(0)
    objective = ModuleObjective(MODELS[name](), loss, micro_batch=micro_batch)
    what = f"network: {name}" + ", augmented" * augmented + ", 2 processes" * (processes > 1)
    what += f", passes of {micro_batch}" if micro_batch else ""
    what += "" if clipping == FLAT else f", {clipping.kind} clipping"
    made = Augmented if augmented else Plain
    return _probe_records(objective, made, what, "L0 sensitivity", processes, clipping=clipping)


def probe_mixing(name: str) -> AuditFinding:
    """The same of models, losses and collate functions that would mix records, or keep something of them."""
    torch.manual_seed(0)
    make, loss_of_one, data, collate = MIXERS[name]
    objective = ModuleObjective(make(), loss_of_one, collate_fn=collate)
    return _probe_records(objective, data, f"network: {name}", "L0 mixing", 1)


def _probe_records(
    objective: ModuleObjective, made: Any, what: str, layer: str, processes: int, n: int = 10,
    clipping: Clipping = FLAT,
) -> AuditFinding:  # fmt: skip
    x, y = table(n)
    others = []
    for row in (-x[0], 1e3 * x[1], torch.full((8,), 1e38), 0 * x[0]):  # opposite, large, overflowing, zero
        other = x.clone()
        other[n // 3] = row
        others.append(objective.prepare(made(other, y)))
    records = objective.prepare(made(x, y))
    theta = objective.initial(records)
    rules = [replace(rule, clipping=clipping) for rule in _RULES]
    asked = [*((rule, (theta, theta - 0.05)) for rule in rules), (rules[0], (-3 * theta, theta))]
    return _worst(objective, records, others, (0, n - 1), asked, processes, layer, what)


def _worst(
    objective: Any,
    records: Any,
    others: Sequence[Any],
    gone: Sequence[int],
    asked: Sequence[tuple[ClippingRule, Any]],
    processes: int,
    layer: str,
    what: str,
) -> AuditFinding:
    """The largest ‖q(D) − q(D′)‖/Δ, with units gone or records exchanged; above 1 is a violation."""
    worst, everybody = 0.0, np.arange(len(records))
    for rule, points in asked:

        def reach(
            held: Any, left: Any, bound: float, whole: Tensor, rule: ClippingRule = rule, at: Any = points
        ) -> float:
            gap = float((whole - _sum(objective, held, left, at, rule, processes)).norm())
            return gap / bound if math.isfinite(gap) else math.inf

        whole = _sum(objective, records, None, points, rule, processes)
        torch.rand(7)
        if not torch.equal(whole, _sum(objective, records, None, points, rule, processes)):
            return found("L0 replay", what, "equal bits", 1.0, 0.0, ok=False)
        worst = max(worst, *(reach(records, np.delete(everybody, place), rule.bound, whole) for place in gone))
        worst = max(worst, *(reach(other, None, 2 * rule.bound, whole) for other in others))
    return found(layer, what, "Δ", 1.0, worst, ok=worst <= 1.0 + _SLACK)


def _sum(
    objective: Any, records: Any, indices: Any, points: Sequence[Tensor], rule: ClippingRule, processes: int
) -> Tensor:
    from quietgrad.torch.loops.distributed import share_of

    out = torch.zeros_like(points[0], dtype=torch.float64)
    batch = Batch(records, indices, _KEY)
    for rank in range(processes):
        objective.add(share_of(batch, rank, processes) if processes > 1 else batch, points, rule, out)
    return out


def probe_long_sums(n: int = 30_000) -> AuditFinding:
    """Whether the bound holds for sums of many passes, where all contributions point the same way."""
    model = nn.Linear(4, 1, bias=False)
    objective = ModuleObjective(model, lambda output, y: output[:, 0], micro_batch=512)
    x = 1.0 + 0.3 * torch.rand(n, 4, generator=torch.Generator().manual_seed(0))
    records = objective.prepare((x, torch.zeros(n)))
    asked = [(_RULES[0], (objective.initial(records),))]
    return _worst(objective, records, [records], range(6), asked, 1, "L0 sensitivity", f"network: {n} records")


def probe_gradients(name: str, tolerance: float = 1e-3) -> AuditFinding:
    """The sum of unclipped gradients at other parameters than the module's own, against autograd alone."""
    torch.manual_seed(0)
    objective = ModuleObjective(MODELS[name](), loss)
    records = objective.prepare(table(6))
    theta, engine = 1.5 * objective.initial(records), objective.engine
    keys = RecordSeeds(_KEY, np.arange(6))
    (group,) = records.read(keys)
    program = engine.try_out(group.record).program
    leaves = {key: value.clone().requires_grad_() for key, value in engine.unflatten(theta).items()}
    wanted = vectors_by_autograd(program, engine.loss_of, leaves, group.record, keys, torch.float64).sum(0)
    made = _sum(objective, records, None, (theta,), ClippingRule.gradient(1e9), 1)
    return _compared("L0 gradients", name, made, wanted, tolerance)


def probe_recorded(name: str, tolerance: float = 1e-4) -> AuditFinding:
    """What a loop's own backward pass leaves of its records, clipped and summed, against a fit's sum."""
    torch.manual_seed(0)
    objective = ModuleObjective(MODELS[name](), loss)
    records = objective.prepare(table(10))
    theta, keys = objective.initial(records), RecordSeeds(_KEY, np.arange(10))
    wanted = _sum(objective, records, None, (theta,), _RULES[0], 1)
    (group,) = records.read(keys)
    x, y = group.record
    engine = PerExampleEngine(objective.module)
    passes = engine.record([RecordGroup(group.rows, ((x,), {}))], keys)
    torch.autograd.backward(loss(stacked(passes, 10).flatten(0, 1), y.flatten()).sum())
    made = torch.zeros_like(wanted)
    engine.add_recorded(passes, 10, None, _RULES[0], made)
    return _compared("L0 recorded", name, made, wanted, tolerance)


def _compared(layer: str, name: str, made: Tensor, wanted: Tensor, tolerance: float) -> AuditFinding:
    off = float((made - wanted).norm() / wanted.norm())
    return found(layer, f"network: {name}", "relative error", tolerance, off, ok=off <= tolerance)


def probe_agreement() -> AuditFinding:
    """Whether the digests by which processes compare what they hold tell other orders and weights apart."""
    from quietgrad.torch.loops.distributed import _digests

    torch.manual_seed(0)
    model: Any = MODELS["layers"]()
    x, y = table()

    def digests(*data: Tensor) -> dict[str, str]:
        objective = ModuleObjective(model, loss)
        return _digests(objective, objective.prepare(data), _KEY)

    mine = digests(x, y)
    seen = [digests(x.flip(0), y.flip(0)), digests(x, 1 - y)]
    with torch.no_grad():
        model[2].weight.mul_(2.0)
        seen.append(digests(x, y))
        model[0].requires_grad_(False).weight.mul_(2.0)
        seen.append(digests(x, y))
    missed = sum(other == mine for other in seen) + (digests(x, y) != seen[-1])
    return found("L0 agreement", "processes", "missed", 0.0, float(missed), ok=not missed)


# --- what one person can move -------------------------------------------------------------------------------------

_SIZES = (1, 7, 500, 90, 2, 3)


def probe_people(
    name: str,
    combine: Combine,
    *,
    micro_batch: int | None = None,
    processes: int = 1,
    records_per_person: int | None = None,
    clipping: Clipping = FLAT,
) -> AuditFinding:
    """Neighbours in one person of 1, 7 or 500 records; passes of few records split people over several."""
    torch.manual_seed(0)
    asked = UserLevelObjective(
        ModuleObjective(MODELS[name](), loss, micro_batch=micro_batch), PersonRule(combine, records_per_person)
    )
    # Everybody's records lie scattered.
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(len(_SIZES)), _SIZES))
    # All alike: records' gradients point the same way, people's as well, and nothing cancels.
    x, y = table(len(ids))[0].abs(), torch.zeros(len(ids), dtype=torch.int64)
    records = asked.prepare(RecordsWithIds((x, y), ids))
    place = {int(ids[row]): person for person, row in enumerate(records.people.order[records.people.starts[:-1]])}
    theta: Any = asked.initial(records)
    others = []
    for person, change in ((2, -x), (1, 1e3 * x), (1, torch.full_like(x, 1e38)), (2, torch.full_like(x, 1e38))):
        other, rows = x.clone(), np.flatnonzero(ids == person)
        rows = rows[:1] if float(change.abs().max()) > 1e30 else rows  # one record that overflows suffices
        other[rows] = change[rows]
        others.append(asked.prepare(RecordsWithIds((other, y), ids)))
    what = f"network: {name}, people by {combine}" + ", 2 processes" * (processes > 1)
    what += f", passes of {micro_batch}" if micro_batch else ""
    what += f", {records_per_person} records each" if records_per_person else ""
    rules = [replace(rule, clipping=clipping) for rule in (_RULES[0], _RULES[2])]
    queries = [(rule, (theta, theta - 0.05)) for rule in rules]
    gone = [place[person] for person in (0, 1, 2)]
    return _worst(asked, records, others, gone, queries, processes, "L0 sensitivity", what)


def probe_people_drawn(steps: int = 30) -> AuditFinding:
    """In how many samples of a custom loop a person is without some of their records."""
    from quietgrad.torch.opacus import make_private

    ids = np.arange(90) // 3
    data = TensorDataset(torch.arange(90.0)[:, None], torch.zeros(90))
    model = nn.Linear(1, 1)
    _, _, loader = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=1.0, person=ids,
        data_loader=DataLoader(data, batch_size=10), noise_multiplier=1.0, epochs=steps // 3,
    )  # fmt: skip
    torn = 0
    for _ in range(steps // 3):
        for x, _ in loader:
            people, counts = np.unique(ids[x.flatten().long().tolist()], return_counts=True)
            torn += bool((counts != 3).any()) or x.shape[0] != 3 * len(people)
    return found("L0 sampling", "custom loop: people", "torn apart", 0.0, float(torn), ok=not torn)
