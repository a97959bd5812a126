"""Layer L0 for networks: what one record can move, by brute force, on a zoo of modules.

Given the key of a release a record's contribution must be a function of that record alone. So neighbours are
compared under one key: without a record the others keep their numbers, and a record is exchanged for one that is
huge, zero or overflows. Besides the bound: gradients are autograd's, a replayed query has the same sum to the last
bit, what a loop's own backward pass leaves is what a fit sums, what would mix records sees one, and processes that
hold different things find out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quietgrad.audit.network_people import people_probes
from quietgrad.audit.report import AuditFinding
from quietgrad.audit.zoo import MIXERS, MODELS, Augmented, Plain, loss, table
from quietgrad.objectives.base import Batch, ClippingRule
from quietgrad.objectives.networks.engine import PerExampleEngine, clip_weights
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.objectives.networks.one_record import stacked
from quietgrad.objectives.networks.planning import vectors_by_autograd
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.networks.records import RecordGroup

__all__ = ["network_probes", "probe_agreement", "probe_gradients", "probe_long_sums", "probe_mixing",
           "probe_network", "probe_recorded"]  # fmt: skip

_KEY = bytes(range(32))
_SLACK = 1e-6
_RULES = (
    ClippingRule.gradient(1.0),
    ClippingRule.difference(0.2),
    ClippingRule.momentum(0.3, 1.0, 0.1),
    ClippingRule.joint(0.3, 0.5),
)


def network_probes() -> Iterator[AuditFinding]:
    """All of them."""
    for name in MODELS:
        yield probe_network(name)
    yield probe_network("dropout", micro_batch=3)
    yield probe_network("dropout", processes=2)
    yield probe_network("layers", augmented=True)
    yield probe_long_sums()
    yield from (probe_gradients(name) for name in MODELS)
    yield from (probe_recorded(name) for name in MODELS)
    yield from (probe_mixing(name) for name in MIXERS)
    yield probe_agreement()
    yield from people_probes()


def probe_network(
    name: str, *, micro_batch: int | None = None, processes: int = 1, augmented: bool = False, n: int = 10
) -> AuditFinding:
    """The largest ‖q(D) − q(D′)‖/Δ over neighbours of both relations, rules and points; above 1 is a violation.

    Also whether the same query, asked again after others have drawn, has the same sum bit for bit.
    """
    torch.manual_seed(0)
    objective = ModuleObjective(MODELS[name](), loss, micro_batch=micro_batch)
    what = f"network: {name}" + ", augmented" * augmented + ", 2 processes" * (processes > 1)
    what += f", passes of {micro_batch}" if micro_batch else ""
    return _probed(objective, Augmented if augmented else Plain, what, "L0 sensitivity", processes, n)


def probe_mixing(name: str) -> AuditFinding:
    """The same of models, losses and collate functions that would mix records, or keep something of them."""
    torch.manual_seed(0)
    make, loss_of_one, data, collate = MIXERS[name]
    objective = ModuleObjective(make(), loss_of_one, collate_fn=collate)
    return _probed(objective, data, f"network: {name}", "L0 mixing", 1, 10)


def _probed(objective: ModuleObjective, made: Any, what: str, layer: str, processes: int, n: int) -> AuditFinding:
    x, y = table(n)
    records = objective.prepare(made(x, y))
    theta = objective.initial(records)
    exchanged = []
    for row in _exchanged(x):
        other = x.clone()
        other[n // 3] = row
        exchanged.append(objective.prepare(made(other, y)))
    worst, again = 0.0, True
    for rule, pair in [*((rule, (theta, theta - 0.05)) for rule in _RULES), (_RULES[0], (-3 * theta, theta))]:
        whole = _sum(objective, records, None, pair, rule, processes)
        torch.rand(7)
        again &= torch.equal(whole, _sum(objective, records, None, pair, rule, processes))
        for gone in (0, n - 1):
            less = _sum(objective, records, np.delete(np.arange(n), gone), pair, rule, processes)
            worst = max(worst, _reach(whole, less, rule.bound))
        for others in exchanged:
            worst = max(worst, _reach(whole, _sum(objective, others, None, pair, rule, processes), 2 * rule.bound))
    if not again:
        return AuditFinding("L0 replay", what, "equal bits", 1.0, 0.0, "violation")
    return AuditFinding(layer, what, "Δ", 1.0, worst, "violation" if worst > 1.0 + _SLACK else "pass")


def _exchanged(x: Tensor) -> list[Tensor]:
    """What a record may become: opposite, large, and so large that its gradient overflows."""
    return [-x[0], 1e3 * x[1], torch.full((8,), 1e38)]


def _sum(
    objective: ModuleObjective,
    records: Any,
    indices: Any,
    points: Sequence[Tensor],
    rule: ClippingRule,
    processes: int,
) -> Tensor:
    out = torch.zeros_like(points[0], dtype=torch.float64)
    everyone = np.arange(len(records)) if indices is None else indices
    keys = RecordKeys(_KEY, everyone)
    for rank in range(processes):
        share = everyone[keys.share(rank, processes)] if processes > 1 else indices
        objective.add(Batch(records, share, _KEY), points, rule, out)
    return out


def _reach(a: Tensor, b: Tensor, bound: float) -> float:
    gap = float((a - b).norm())
    return gap / bound if math.isfinite(gap) else math.inf


def probe_long_sums(n: int = 30_000) -> AuditFinding:
    """Whether the bound holds for sums of many passes, where all contributions point the same way."""
    model = torch.nn.Linear(4, 1, bias=False)
    objective = ModuleObjective(model, lambda output, y: output[:, 0], micro_batch=512)
    x = 1.0 + 0.3 * torch.rand(n, 4, generator=torch.Generator().manual_seed(0))
    records = objective.prepare((x, torch.zeros(n)))
    theta = objective.initial(records)
    whole = _sum(objective, records, None, (theta,), _RULES[0], 1)
    worst = 0.0
    for gone in range(6):
        less = _sum(objective, records, np.delete(np.arange(n), gone), (theta,), _RULES[0], 1)
        worst = max(worst, _reach(whole, less, 1.0))
    verdict = "violation" if worst > 1.0 + _SLACK else "pass"
    return AuditFinding("L0 sensitivity", f"network: {n} records", "Δ", 1.0, worst, verdict)  # type: ignore[arg-type]


def probe_gradients(name: str, tolerance: float = 1e-3) -> AuditFinding:
    """The sum of unclipped gradients at other parameters than the module's own, against autograd alone."""
    torch.manual_seed(0)
    objective = ModuleObjective(MODELS[name](), loss)
    records = objective.prepare(table(6))
    theta, engine = 1.5 * objective.initial(records), objective.engine
    keys = RecordKeys(_KEY, np.arange(6))
    (group,) = records.read(keys)
    program = engine.program_of(group.record)
    leaves = {key: value.clone().requires_grad_() for key, value in engine.unflatten(theta).items()}
    wanted = vectors_by_autograd(program, engine.loss_of, leaves, group.record, keys, torch.float64).sum(0)
    made = _sum(objective, records, None, (theta,), ClippingRule.gradient(1e9), 1)
    return _compared("L0 gradients", name, made, wanted, tolerance)


def probe_recorded(name: str, tolerance: float = 1e-4) -> AuditFinding:
    """What a loop's own backward pass leaves of its records, clipped and summed, against a fit's sum."""
    torch.manual_seed(0)
    objective = ModuleObjective(MODELS[name](), loss)
    records = objective.prepare(table(10))
    theta, keys = objective.initial(records), RecordKeys(_KEY, np.arange(10))
    wanted = _sum(objective, records, None, (theta,), _RULES[0], 1)
    (group,) = records.read(keys)
    x, y = group.record
    engine = PerExampleEngine(objective.module)
    recording = engine.record([RecordGroup(group.rows, ((x,), {}))], keys)
    output = stacked(recording.passes, 10)
    torch.autograd.backward(loss(output.flatten(0, 1), y.flatten()).sum())
    found, made = engine.gradients_recorded([recording], 10), torch.zeros_like(wanted)
    found.add_weighted(clip_weights(found.norms(), 1.0, theta.dtype), made)
    return _compared("L0 recorded", name, made, wanted, tolerance)


def _compared(layer: str, name: str, made: Tensor, wanted: Tensor, tolerance: float) -> AuditFinding:
    off = float((made - wanted).norm() / wanted.norm())
    verdict = "pass" if off <= tolerance else "violation"
    return AuditFinding(layer, f"network: {name}", "relative error", tolerance, off, verdict)  # type: ignore[arg-type]


def probe_agreement() -> AuditFinding:
    """Whether the digests by which processes compare what they hold tell other orders and weights apart."""
    from quietgrad.torch.processes import _digests

    torch.manual_seed(0)
    model = MODELS["layers"]()
    x, y = table()

    def digests(*data: Tensor) -> dict[str, str]:
        objective = ModuleObjective(model, loss)
        return _digests(objective, objective.prepare(data), _KEY)

    mine = digests(x, y)
    seen = [digests(x.flip(0), y.flip(0)), digests(x, 1 - y)]
    with torch.no_grad():
        model[2].weight.mul_(2.0)  # type: ignore[index]
        seen.append(digests(x, y))
        model[0].requires_grad_(False).weight.mul_(2.0)  # type: ignore[index]
        seen.append(digests(x, y))
    missed = sum(other == mine for other in seen) + (digests(x, y) != seen[-1])
    verdict = "violation" if missed else "pass"
    return AuditFinding("L0 agreement", "processes", "missed", 0.0, float(missed), verdict)  # type: ignore[arg-type]
