"""Audits of clients: a party as the canary, told from one round's noisy sum of clipped updates.

The canary's records drive its local training far beyond the clip, along one axis, so its contribution is as long as
any can be, and its bit says that it was beyond. The attacker projects the released vector on that contribution,
which loses nothing under Gaussian noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.assurance.audit.report import AuditFinding, AuditReport
from quietgrad.assurance.audit.running import PrivacyClaim, attack_profile
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.plans.schedule import Plan, Schedule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.methods.fedavg import UPDATE, FedAvg
from quietgrad.objectives import Logistic
from quietgrad.tables.parties import PartyLevelObjective
from quietgrad.tables.privacy_units import RecordsWithIds
from quietgrad.tables.queries.local_update import LocalUpdateQuery

Floats = npt.NDArray[np.float64]
_ALPHA = 1e-6
_DIM = 2


def party_data(size: int, sign: float) -> RecordsWithIds:
    """Two parties: the canary of ``size`` records, none if ``sign`` is 0, and one whose training moves nothing."""
    records = size if sign else 0
    X = np.zeros((records + 3, _DIM))
    X[:records, 0] = 1e3
    y = np.concatenate([np.full(records, sign > 0, float), np.zeros(3)])
    return RecordsWithIds((X, y), np.repeat([0, 1], [records, 3]) if records else np.ones(3, int))


def attack_party(
    method: FedAvg,
    runs: int,
    *,
    relation: Relation = Relation.ADD_REMOVE,
    noise_multiplier: float = 0.8,
    size: int = 5,
    ask: Callable[[LocalUpdateQuery], Any] = lambda query: query,
    objective: Callable[[Any], Any] = PartyLevelObjective,
    claim: Plan | None = None,
) -> AuditFinding:
    """Tell from one round whether a party of ``size`` records takes part in a run.

    Args:
        method: of one round, and its samples.
        runs: rounds of each world, each a new sample.
        ask: the query that is released; a test puts a broken one here.
        objective: the objective that answers it; a test puts a broken one here.
        claim: the plan of one round whose profile is attacked; that of the method unless given.

    >>> attack_party(FedAvg(rounds=1, sampling="poisson", sample=0.5, clip=1.0), 400).verdict != "violation"
    True
    """
    once = claim or round_plan(method, relation, noise_multiplier)
    planned = round_plan(method, relation, noise_multiplier)
    many = replace(planned, schedule=Schedule((replace(planned.schedule.slots[0], count=runs),)))
    query = method.query(np.zeros(_DIM), method.clip)
    contribution: Floats = np.array([query.clip, 0.0, -query.bit])[: _DIM + (query.share > 0.0)]
    axis = contribution / np.linalg.norm(contribution)
    scores: list[Floats] = []
    for sign in (1.0, 0.0 if relation is Relation.ADD_REMOVE else -1.0):
        holder = CentralCurator(objective(Logistic()), party_data(size, sign), account="audit")
        session = holder.open(many)
        scores.append(np.array([float(session.release(UPDATE, ask(query)) @ axis) for _ in range(runs)]))
    what = f"a party of {size} records, {method.sampling}, {relation}"
    return attack_profile((scores[0], scores[1]), PrivacyClaim(once), what, _ALPHA)


def round_plan(method: FedAvg, relation: Relation, noise_multiplier: float) -> Plan:
    """The plan of one round of two parties."""
    schedule = replace(method, rounds=1).schedule(2).under(relation)
    budget = Budget(6.0, 1e-5, relation)
    return Plan("fedavg", {}, schedule, 2, budget, noise_multiplier, unit=PrivacyUnit.PARTY)


def audit_clients(runs: int) -> Iterator[AuditReport]:
    """A party as the canary, with fixed and adaptive clip, drawn and undrawn, under both relations."""
    for relation in Relation:
        started = time.perf_counter()
        full = FedAvg(rounds=1, local_steps=1, sampling="full", clip=1.0)
        drawn = replace(full, sampling="poisson", sample=0.5)
        methods = (full, drawn, replace(drawn, clip_quantile=0.5, clip_share=0.5))
        findings = [attack_party(method, max(400, runs // 2), relation=relation) for method in methods]
        plan = round_plan(drawn, relation, 0.8)
        yield AuditReport.of("clients", plan, findings, runs=runs, started=started)
