"""Layer L0 over time: hundreds of consecutive releases of every slot, through the real session and across a resume.

A program that forgets its noise at every seventh release, or uses it twice from the thirty-second on, looks sound
to whoever listens six times. These probes listen hundreds of times, to every mechanism and to every slot of every
registered algorithm, and compare what was charged with what was heard.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.mechanisms import (
    BOUND,
    SCALAR,
    AnonymousRecords,
    ConstantQuery,
    EmptyObjective,
    label_count,
    labels_of,
    listener,
)
from quietgrad.audit.noise_checks import check_normals
from quietgrad.audit.replicas import CuratorFactory, as_numbers, central
from quietgrad.audit.report import AuditFinding
from quietgrad.objectives.queries.labels import LabelSet
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.accounting import account
from quietgrad.privacy.banded import BandedToeplitzNoise
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.correlated import BufferedToeplitzNoise
from quietgrad.privacy.events import ZCDP
from quietgrad.privacy.mechanisms import (
    AboveThreshold,
    ExponentialMechanism,
    GaussianNoise,
    GaussianPartitionSelection,
    L2LaplaceNoise,
    Mechanism,
)
from quietgrad.privacy.noise import sigma_for
from quietgrad.privacy.rng import fresh_key, seed_key
from quietgrad.sampling import CyclicCohorts, CyclicPoisson, FixedSize, FullBatch, Poisson, Sampling, SinglePass

Floats = npt.NDArray[np.float64]
RELEASES, WIDTH, WIDE = 256, 64, 512  # of vectors
CHOICES = 2048  # of mechanisms that only choose

MECHANISMS: tuple[Mechanism, ...] = (
    GaussianNoise(),
    BufferedToeplitzNoise.made(RELEASES, 4, RELEASES // 4),
    BandedToeplitzNoise.made(RELEASES, 8),
    L2LaplaceNoise(),
    ExponentialMechanism(),
    AboveThreshold(),
    GaussianPartitionSelection(1e-9),
)
"""One of every kind; a test compares them with those that exist."""


def probe_mechanism(
    mechanism: Mechanism, curator: CuratorFactory = central, *, alpha: float = 1e-6, seed: int | None = None
) -> list[AuditFinding]:
    """Listen to hundreds of releases of one mechanism, half of them after the session was opened again.

    >>> {finding.verdict for finding in probe_mechanism(GaussianNoise(), seed=0)}
    {'pass'}
    """
    # Normals are made in blocks of 2¹⁶: wide releases go beyond the first.
    width = WIDE if isinstance(mechanism, GaussianNoise) else WIDTH
    plan = plan_of(mechanism)
    return probe_slots(plan, curator, f"{mechanism.kind} noise", alpha=alpha, seed=seed, width=width)


def probe_grid(curator: CuratorFactory = central) -> AuditFinding:
    """Whether noise and sum lie on the public grid: a float's last bits would betray the sum.

    >>> probe_grid().verdict
    'pass'
    """
    plan = plan_of(GaussianNoise())
    session = curator(EmptyObjective(), AnonymousRecords(1, WIDTH), fresh_key()).open(plan)
    heard = np.stack([as_numbers(session.release("probe", ConstantQuery(WIDTH, BOUND, 0.1))) for _ in range(8)])
    _, step = sigma_for(plan.noise_multiplier, BOUND, WIDTH)
    off = float(np.abs(heard / step - np.rint(heard / step)).max())
    verdict = "pass" if off == 0.0 else "violation"
    return AuditFinding("L0 grid", "curator", "units off", 0.0, off, verdict)  # type: ignore[arg-type]


def plan_of(mechanism: Mechanism, relation: Relation = Relation.ADD_REMOVE) -> Plan:
    """A plan of one slot with ``mechanism``; a choice stands in a filter, where alone it may."""
    count = _count(mechanism)
    # Half of the samples of a vector are empty: noise must be there all the same.
    sampling: Sampling = Poisson(0.5) if isinstance(mechanism, GaussianNoise) else FullBatch()
    if isinstance(mechanism, BufferedToeplitzNoise):
        sampling = CyclicCohorts(mechanism.separation)
    elif isinstance(mechanism, BandedToeplitzNoise):
        sampling = CyclicPoisson(mechanism.bands, 0.5)
    slot = Slot("probe", sampling, count, mechanism=mechanism)
    schedule = Schedule((slot,), "filter" if isinstance(mechanism, ExponentialMechanism) else "sequential")
    return Plan("probe", {}, schedule.under(relation), 1, Budget(1.0, 1e-5, relation), 2.0)


def probe_algorithm(
    algorithm: Any,
    n: int,
    budget: Budget,
    curator: CuratorFactory = central,
    *,
    alpha: float = 1e-6,
    seed: int | None = None,
) -> list[AuditFinding]:
    """Listen to every slot of an algorithm's plan, each as often as hundreds of steps would."""
    from quietgrad.training import plan as make_plan

    plan = make_plan(algorithm, n=n, budget=budget)
    return probe_slots(lengthened(plan), curator, algorithm.name, alpha=alpha, seed=seed)


def lengthened(plan: Plan) -> Plan:
    """The plan with hundreds of releases in every slot and records enough for them; noise and law stay."""
    counts = [_count(slot.mechanism) for slot in plan.schedule.slots]
    passes = [
        slot.sampling.batch_size * count
        for slot, count in zip(plan.schedule.slots, counts, strict=True)
        if isinstance(slot.sampling, SinglePass)
    ]
    looks = [
        WIDTH * label_count(s, plan)
        for s in plan.schedule.slots
        if isinstance(s.mechanism, GaussianPartitionSelection)
    ]
    n = max(plan.n_public, sum(passes), *looks, 1)
    slots = []
    for slot, count in zip(plan.schedule.slots, counts, strict=True):
        sampling = slot.sampling
        if isinstance(sampling, SinglePass | FixedSize):
            sampling = replace(sampling, n=n)
        held = sampling.participation(count)
        mechanism = slot.mechanism if held is None else slot.mechanism.over(count, *held)
        slots.append(replace(slot, count=count, sampling=sampling, law=None, mechanism=mechanism))
    return replace(plan, schedule=replace(plan.schedule, slots=tuple(slots)), n_public=n)


def probe_slots(
    plan: Plan,
    curator: CuratorFactory = central,
    what: str = "",
    *,
    alpha: float = 1e-6,
    seed: int | None = None,
    width: int = WIDTH,
) -> list[AuditFinding]:
    """Listen to all releases of every slot of ``plan``, and for noise that slots share."""
    key = fresh_key() if seed is None else seed_key(seed)
    slots = plan.schedule.slots
    share = alpha / (len(slots) + 1)
    findings: list[AuditFinding] = []
    vectors = []
    for slot in slots:
        z = np.stack(list(_hear(plan, slot, curator, key, seed, width)))
        findings += check_normals(z, f"{what}, {slot.name!r}" if what else slot.name, share)
        if z.shape[1] == width:
            vectors.append(z)
    if len(vectors) > 1:
        together = check_normals(np.concatenate(vectors), f"{what}, all slots" if what else "all slots", share)
        findings += [f for f in together if f.layer == "L0 freshness"]
    return findings


def _hear(
    plan: Plan, slot: Slot, curator: CuratorFactory, key: bytes, seed: int | None, width: int
) -> Iterator[Floats]:
    """The slot's releases as normals: half through one session, the rest through one that continues it, and some
    through another session of the same curator, which must not begin its noise again."""
    rho = _rho(plan)
    listen = listener(slot, plan, width, rho)
    rng = np.random.default_rng(seed)
    half = slot.count // 2
    holder = _holder(plan, slot, curator, key, width)
    session = holder.open(plan)
    for _ in range(half):
        yield listen(session, rng)
    used, left = session.used, session.rho_left
    session = _holder(plan, slot, curator, key, width).open(plan, used=used, rho_left=left if rho else None)
    for _ in range(slot.count - half):
        yield listen(session, rng)
    session, listen = holder.open(plan), listener(slot, plan, width, rho)
    for _ in range(slot.count // 4):
        yield listen(session, rng)


def _holder(plan: Plan, slot: Slot, curator: CuratorFactory, key: bytes, width: int) -> Any:
    if isinstance(slot.mechanism, GaussianPartitionSelection):
        return curator(_Labelled(), labels_of(slot, plan, width), key)
    return curator(EmptyObjective(), AnonymousRecords(plan.n_public, width), key)


class _Labelled(LabelSet):
    """Labels that are ready as records."""

    def prepare(self, data: Any) -> Any:
        return data


def _rho(plan: Plan) -> float | None:
    """Each release's part of a filter: all releases of all slots together spend it."""
    if plan.schedule.composition != "filter":
        return None
    return plan.event_rho / (plan.schedule.releases + 1)


def _count(mechanism: Mechanism) -> int:
    return CHOICES if isinstance(mechanism, SCALAR) else RELEASES


def probe_charges(
    curator: Any, mechanisms: Iterable[Mechanism] = MECHANISMS, *, releases: int = 41
) -> list[AuditFinding]:
    """What is in the ledger after a session was closed early, against the price of what was heard.

    Args:
        curator: a function of (objective, data, ledger path).
    """
    return [_charged(curator, mechanism, releases) for mechanism in mechanisms]


def _charged(curator: Any, mechanism: Mechanism, releases: int) -> AuditFinding:
    from quietgrad.privacy.ledger import Ledger

    plan = plan_of(mechanism)
    slot = plan.schedule.slots[0]
    assert plan.budget is not None
    rho = _rho(plan)
    listen = listener(slot, plan, WIDTH, rho)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        objective, data = EmptyObjective(), AnonymousRecords(plan.n_public, WIDTH)
        if isinstance(mechanism, GaussianPartitionSelection):
            objective, data = _Labelled(), labels_of(slot, plan, WIDTH)  # type: ignore[assignment]
        session = curator(objective, data, path).open(plan)
        heard = sum(1 for _ in range(releases) if listen(session, rng).size)
        session.close("enough")
        spent = Ledger(path).spent("default", delta=plan.budget.delta, relation=plan.budget.relation).epsilon
    relation = plan.budget.relation
    owed_event = ZCDP(rho * heard, relation) if rho else slot.event(plan.noise_multiplier, relation, heard)
    owed = account(owed_event, delta=plan.budget.delta, relation=relation)
    verdict = "pass" if owed <= spent * (1.0 + 1e-9) else "violation"
    what = f"{heard} releases, {mechanism.kind} noise"
    return AuditFinding("L0 charge", what, "ε", spent, owed, verdict)  # type: ignore[arg-type]
