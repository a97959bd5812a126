"""What a session does besides adding noise: charges, order, replays, samples, fresh records. All by counting."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from quietgrad.assurance.audit.canaries import CanaryObjective, CanaryRecords
from quietgrad.assurance.audit.noise_checks import (
    BOUND,
    MECHANISMS,
    WIDTH,
    AnonymousRecords,
    ConstantQuery,
    EmptyObjective,
    check_normals,
    listener,
    plan_of,
    records_for,
    rho_of,
)
from quietgrad.assurance.audit.replicas import CuratorFactory, as_numbers, central
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.events import ZCDP, Event
from quietgrad.core.errors import ExhaustedError, LedgerError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.mechanisms import Mechanism
from quietgrad.core.noise.rng import fresh_key
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import FixedSize, FullBatch, Poisson, RandomAllocation, SinglePass
from quietgrad.core.session.base import Curator
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.core.session.transcript import Transcript
from quietgrad.core.vectors import Vector
from tests.probes import found

Floats = npt.NDArray[np.float64]
_BUDGET = Budget(20.0, 1e-5)


def charging(objective: Any, data: Any, path: Path) -> Curator:
    """The production curator with a ledger."""
    return CentralCurator(objective, data, ledger=path)


def probe_charge(what: str, spent: Path | float, event: Event, budget: Budget) -> AuditFinding:
    """Whether a ledger, or a stated ε, covers the cost of ``event``."""
    at: Any = {"delta": budget.delta, "relation": budget.relation}
    paid = Ledger(spent).spent("default", **at).epsilon if isinstance(spent, Path) else spent
    owed = account(event, **at)
    return found("L0 charge", what, "ε", paid, owed, ok=owed <= paid * (1.0 + 1e-9))


def probe_charges(
    curator: Any = charging, mechanisms: Iterable[Mechanism] = MECHANISMS, *, releases: int = 41
) -> list[AuditFinding]:
    """What is in the ledger after a session was closed early, against the price of what was heard."""
    return [_charged(curator, mechanism, releases) for mechanism in mechanisms]


def _charged(curator: Any, mechanism: Mechanism, releases: int) -> AuditFinding:
    plan = plan_of(mechanism)
    slot, rho, budget = plan.schedule.slots[0], rho_of(plan), plan.budget
    assert budget is not None
    listen, rng = listener(slot, plan, WIDTH), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        session = curator(EmptyObjective(), records_for(slot, plan, WIDTH), path).open(plan)
        heard = sum(1 for _ in range(releases) if listen(session, rng).size)
        session.close("enough")
        made = slot.event(plan.noise_multiplier, budget.relation, heard)
        event = ZCDP(rho * heard, budget.relation) if rho else made
        return probe_charge(f"{heard} releases, {mechanism.kind} noise", path, event, budget)


class _Witness(CanaryObjective):
    """Reads the ledger at the moment the data are first touched."""

    def __init__(self, ledger: Path) -> None:
        super().__init__("constant")
        self.ledger = ledger
        self.reserved = False

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        try:
            self.reserved = bool(Ledger(self.ledger).entries())
        except (LedgerError, FileNotFoundError):
            self.reserved = False


def probe_ledger(curator: Callable[[Any, Any, Path], Curator] = charging) -> AuditFinding:
    """Whether a curator made with (objective, data, ledger) writes its reservation before it sums anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        witness = _Witness(path)
        session = curator(witness, CanaryRecords(("silent",), 1, 2), path).open(
            Plan("probe", {}, Schedule((Slot("gradient", FullBatch(), 1),)), 1, _BUDGET, 5.0)
        )
        session.release("gradient", GradientQuery(np.zeros(2), 1.0))
    kept = witness.reserved
    return found("L0 ledger", "reservation before release", "kept", 1.0, float(kept), ok=kept)


def probe_replay(curator: Callable[..., Any] = CentralCurator, *, alpha: float = 1e-6) -> list[AuditFinding]:
    """Make releases, lose the session, and ask them again: the first half as they were, then something else.

    What is asked as it was must be the same and costs nothing more. What is asked with another sum must carry other
    noise, and be paid for.
    """
    releases, width = 64, 64
    plan = Plan("probe", {}, Schedule((Slot("probe", FullBatch(), releases),)), 1, _BUDGET, 2.0)
    half, moved, key = releases // 2, 3.0 * BOUND, fresh_key()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"

        def ask(values: list[float], *, resumed: bool = False) -> Floats:
            log = Transcript(Path(folder) / "transcript", "run", key, resumed=resumed)
            holder = curator(EmptyObjective(), AnonymousRecords(1, width), ledger=path, run="run", key=key)
            session = holder.open(plan, transcript=log)
            heard = [as_numbers(session.release("probe", ConstantQuery(width, BOUND, v))) for v in values]
            if resumed:
                session.close("steps")
            log.close()
            return np.stack(heard)

        before = ask([0.0] * releases)
        again = ask([0.0] * half + [moved] * half, resumed=True)
        made = plan.schedule.slots[0].event(2.0, _BUDGET.relation, releases + half)
        charge = probe_charge("releases asked again", path, made, _BUDGET)
    same = float(np.abs(again[:half] - before[:half]).max())
    z = np.concatenate([before, again[half:] - moved]) / (2.0 * BOUND)
    replayed = found("L0 replay", "the same again", "change", 0.0, same, ok=same == 0.0)
    return [replayed, *check_normals(z, "sums that changed after a resume", alpha), charge]


@dataclass
class ParticipationQuery:
    """A query that writes down which records were asked."""

    bound: float = 1.0
    present: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def dim(self, records: Any) -> int:
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        indices = np.arange(len(batch.records)) if batch.indices is None else batch.indices
        self.present.append(np.array(indices, np.int64))


def probe_samples(curator: CuratorFactory = central, *, alpha: float = 1e-6) -> list[AuditFinding]:
    """Poisson samples as independent coins of the planned rate, samples of fixed size as sets of that size.

    In random allocation every record is in one step of each epoch, which are independent and uniform.
    """
    releases, records, rate, size, steps = 256, 64, 0.3, 16, 4

    def present(sampling: Any, relation: Relation = Relation.REPLACE_ONE) -> list[npt.NDArray[np.int64]]:
        slot = Slot("probe", sampling, releases)
        plan = Plan("probe", {}, Schedule((slot,)), records, Budget(1.0, 1e-5, relation), 20.0)
        session = curator(EmptyObjective(), AnonymousRecords(records, 1), fresh_key()).open(plan)
        query = ParticipationQuery()
        for _ in range(releases):
            session.release("probe", query)
        return query.present

    taken = np.zeros((releases, records), bool)
    for row, indices in zip(taken, present(Poisson(rate)), strict=True):
        row[indices] = True
    # A coin of probability q, spread over its part of the unit interval, is uniform.
    u = np.random.default_rng().random(taken.shape)
    z = ndtri(np.clip(np.where(taken, u * rate, rate + u * (1.0 - rate)), 1e-15, 1.0 - 1e-15))
    coins = check_normals(z, "who is in a Poisson sample", alpha)
    whole = sum(len(np.unique(i)) == len(i) == size for i in present(FixedSize(records, size)))
    sets = found("L0 sampling", "sets of fixed size", "right", releases, whole, ok=whole == releases)
    allocated = present(RandomAllocation(steps), Relation.ADD_REMOVE)
    epochs = [allocated[first : first + steps] for first in range(0, releases, steps)]
    once = sum(sorted(np.concatenate(epoch).tolist()) == list(range(records)) for epoch in epochs)
    drawn = np.zeros((len(epochs), records))
    for row, epoch in zip(drawn, epochs, strict=True):
        for step, indices in enumerate(epoch):
            row[indices] = step
    u = (drawn + np.random.default_rng().random(drawn.shape)) / steps
    coins += check_normals(ndtri(np.clip(u, 1e-15, 1.0 - 1e-15)), "whose step of an epoch it is", alpha)
    parts = found("L0 sampling", "everybody once an epoch", "right", len(epochs), once, ok=once == len(epochs))
    return [*(coin._replace(layer="L0 sampling") for coin in coins), sets, parts]


class Register(CanaryObjective):
    """Counts the sums that each record was in."""

    def __init__(self, records: int) -> None:
        super().__init__("constant")
        self.uses = np.zeros(records, np.int64)

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        taken = np.arange(len(self.uses)) if batch.indices is None else batch.indices
        np.add.at(self.uses, taken, 1)


def probe_fresh_records(curator: CuratorFactory = central) -> AuditFinding:
    """How often one record was summed in a single pass that two slots share, asked until the session refuses."""
    n = 12
    slots = (Slot("large", SinglePass(n, 3), 9), Slot("small", SinglePass(n, 2), 9))
    plan = Plan("probe", {}, Schedule(slots), n, Budget(1.0, 1e-5, Relation.REPLACE_ONE), 5.0)
    register = Register(n)
    session = curator(register, CanaryRecords(("silent",) * n, 1, 2), fresh_key()).open(plan)
    try:
        for _ in range(9):
            for slot in slots:
                session.release(slot.name, GradientQuery(np.zeros(2), 1.0))
    except ExhaustedError:
        pass
    most = float(register.uses.max())
    return found("L0 reuse", "one fresh record", "uses", 1.0, most, ok=most <= 1.0)
