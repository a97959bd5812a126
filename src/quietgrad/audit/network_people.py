"""Layer L0 for networks whose records are people's: what one person can move, with 1, 7 or 500 records.

As in :mod:`quietgrad.audit.networks`, with somebody instead of a record: without them the others keep their
numbers, and their records are exchanged for opposite ones, for huge ones, and for one that overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.audit.report import AuditFinding
from quietgrad.audit.zoo import MODELS, loss, table
from quietgrad.objectives.base import Batch, ClippingRule
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.objectives.privacy_units import Combine, RecordsWithIds, UserLevelObjective

__all__ = ["people_probes", "probe_people", "probe_people_drawn"]

_KEY = bytes(range(32))
_SLACK = 1e-6
_SIZES = (1, 7, 500, 90, 2, 3)
_RULES = (ClippingRule.gradient(1.0), ClippingRule.momentum(0.3, 1.0, 0.1))


def people_probes() -> Iterator[AuditFinding]:
    """All of them."""
    yield probe_people("layers", "mean")
    yield probe_people("layers", "sum")
    yield probe_people("convolutions", "mean")
    yield probe_people("dropout", "sum", micro_batch=6)
    yield probe_people("dropout", "sum", processes=2)
    yield probe_people("dropout", "sum", records_per_person=4)
    yield probe_people_drawn()


def probe_people(
    name: str,
    combine: Combine,
    *,
    micro_batch: int | None = None,
    processes: int = 1,
    records_per_person: int | None = None,
) -> AuditFinding:
    """The largest ‖q(D) − q(D′)‖/Δ over neighbours that differ in a person; above 1 is a violation.

    Passes of few records split people over several. Also whether the same query has the same sum again.
    """
    torch.manual_seed(0)
    asked = UserLevelObjective(
        ModuleObjective(MODELS[name](), loss, micro_batch=micro_batch), combine, records_per_person
    )
    # Everybody's records lie scattered.
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(len(_SIZES)), _SIZES))
    # All alike: records' gradients point the same way, people's as well, and nothing cancels.
    x, y = table(len(ids))[0].abs(), torch.zeros(len(ids), dtype=torch.int64)
    records = asked.prepare(RecordsWithIds((x, y), ids))
    place = {int(ids[row]): person for person, row in enumerate(records.people.order[records.people.starts[:-1]])}
    theta: Any = asked.initial(records)
    others = [asked.prepare(RecordsWithIds((other, y), ids)) for other in _exchanged(x, ids)]
    worst, again = 0.0, True
    for rule in _RULES:
        points = theta, theta - 0.05
        whole = _sum(asked, records, None, points, rule, processes)
        torch.rand(7)
        again &= torch.equal(whole, _sum(asked, records, None, points, rule, processes))
        for gone in (0, 1, 2):
            rest = np.delete(np.arange(len(_SIZES)), place[gone])
            worst = max(worst, _reach(whole, _sum(asked, records, rest, points, rule, processes), rule.bound))
        for other in others:
            worst = max(worst, _reach(whole, _sum(asked, other, None, points, rule, processes), 2 * rule.bound))
    what = f"network: {name}, people by {combine}" + ", 2 processes" * (processes > 1)
    what += f", passes of {micro_batch}" if micro_batch else ""
    what += f", {records_per_person} records each" if records_per_person else ""
    if not again:
        return AuditFinding("L0 replay", what, "equal bits", 1.0, 0.0, "violation")
    return AuditFinding("L0 sensitivity", what, "Δ", 1.0, worst, "violation" if worst > 1.0 + _SLACK else "pass")


def _exchanged(x: Tensor, ids: Any) -> Iterator[Tensor]:
    """What a person's records may become: opposite, large, overflowing in one of them."""
    for person, change in ((2, -x), (1, 1e3 * x), (1, torch.full_like(x, 1e38)), (2, torch.full_like(x, 1e38))):
        other, rows = x.clone(), np.flatnonzero(ids == person)
        rows = rows[:1] if float(change.abs().max()) > 1e30 else rows
        other[rows] = change[rows]
        yield other


def _sum(
    asked: UserLevelObjective,
    records: Any,
    indices: Any,
    points: Sequence[Tensor],
    rule: ClippingRule,
    processes: int,
) -> Tensor:
    from quietgrad.torch.processes import share_of

    out = torch.zeros_like(points[0], dtype=torch.float64)
    batch = Batch(records, indices, _KEY)
    for rank in range(processes):
        asked.add(share_of(batch, rank, processes) if processes > 1 else batch, points, rule, out)
    return out


def _reach(a: Tensor, b: Tensor, bound: float) -> float:
    gap = float((a - b).norm())
    return gap / bound if math.isfinite(gap) else math.inf


def probe_people_drawn(steps: int = 30) -> AuditFinding:
    """In how many samples of an own loop somebody is without some of their records."""
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
    verdict = "violation" if torn else "pass"
    return AuditFinding("L0 sampling", "own loop: people", "torn apart", 0.0, float(torn), verdict)  # type: ignore[arg-type]
