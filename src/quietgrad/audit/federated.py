"""Audits of federations: the same canaries and layers behind a coordinator, its parties and their secure sums.

Everyone is here in one process with the real plan, messages and protocols. The canary belongs to the first party;
what is heard is what the coordinator publishes. Everyone takes part in every round, so releases are exactly
Gaussian. Under secure sums there is more noise than the claim needs, and d′ is smaller by the root of the plan's
variance factor. Where every party adds its own noise the coordinator sees each party's sum: a federation of one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quietgrad.algorithms.base import Algorithm
from quietgrad.audit.canaries import CanaryObjective, CanaryRecords, Pattern
from quietgrad.audit.distinguishers import PrivacyClaim, attack_dprime
from quietgrad.audit.noise_checks import check_noise
from quietgrad.audit.replicas import BlockVector, RecordingSession, Views, walk
from quietgrad.audit.report import AuditReport
from quietgrad.privacy.budget import Budget, Relation

TRUSTS: tuple[tuple[str, str | None], ...] = (
    ("curator", None),
    ("secure", "masks"),
    ("secure", "servers"),
    ("secure", "mpc"),
    ("local", None),
)
"""(trust, secure sum) of every federation that is audited."""

_WIDTH = 2


def _makers() -> dict[str, Callable[[int], Algorithm]]:
    from quietgrad.algorithms.dp_sgd import DPGD, DPSGD, DPAdam
    from quietgrad.algorithms.dp_srm import DPSRM
    from quietgrad.algorithms.stagewise import StagewiseDPSGD

    return {
        "dp-gd": lambda n: DPGD(steps=6),
        "dp-sgd": lambda n: DPSGD(steps=6, batch_size=n, momentum=0.5),
        "dp-srm": lambda n: DPSRM(steps=6, batch_size=n, difference_clip=0.2),
        "dp-adam": lambda n: DPAdam(steps=6, batch_size=n),
        "stagewise": lambda n: StagewiseDPSGD(stages=2, first_steps=1, batch_size=n),
    }


def audit_federations(runs: int) -> Iterator[AuditReport]:
    """Every algorithm of sums × every trust, the relations in turn."""
    relations = itertools.cycle(Relation)
    for make in _makers().values():
        for trust, secure in TRUSTS:
            budget = Budget(6.0, 1e-5, next(relations))
            yield run_federated(make, budget=budget, trust=trust, secure=secure, runs=runs)


def run_federated(
    make: Callable[[int], Algorithm],
    *,
    budget: Budget,
    trust: str = "curator",
    secure: str | None = None,
    runs: int = 2000,
    parties: int | None = None,
    confidence: float = 1.0 - 1e-6,
) -> AuditReport:
    """Audit an algorithm of sums on a federation: noise after aggregation (L0), and d′ of its transcripts (L1).

    Args:
        make: the algorithm for a public n; with its batch size, if it has one, equal to n.
        budget: the promise to every record of every party.
        trust, secure: as in :func:`quietgrad.federation.simulate`.
        runs: runs of each world, made side by side.
        parties: how many; 3, or 1 where every party adds its own noise.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
    >>> run_federated(lambda n: DPGD(steps=3), budget=Budget(6.0, 1e-5), trust="secure", secure="masks").passed
    True
    """
    from quietgrad.training import plan as make_plan

    started = time.perf_counter()
    alpha = (1.0 - confidence) / 4
    parties = parties or (1 if trust == "local" else 3)
    plan = make_plan(make(4), n=4, budget=budget)
    claim = PrivacyClaim(plan)
    if claim.mu is None:
        raise ValueError("a federation is audited with everyone in every round: make(n) must not sample.")

    def heard(pattern: Pattern, which: int | None) -> tuple[Views, float]:
        return _federation(make, budget, plan.noise_multiplier, (trust, secure), pattern, which, runs, parties)

    silent, factor = heard("growing", None)
    width = silent.transcript.shape[1] // _WIDTH
    rows = silent.transcript.reshape(runs, width, _WIDTH).swapaxes(0, 1).reshape(width, -1)
    noises = np.array([plan.schedule[name].noise for name in silent.slots[::_WIDTH]])
    where = trust if secure is None else f"secure sum by {secure}"
    sigma = plan.noise_multiplier * math.sqrt(factor)
    findings = check_noise(rows / noises[:, None], sigma, f"after aggregation, {where}", alpha)
    for pattern in ("growing", "alternating"):
        views = tuple(heard(pattern, which)[0] for which in (0, 1))
        findings.append(attack_dprime((views[0], views[1]), claim, f"{pattern} canary, {where}", alpha))
    return AuditReport(
        algorithm=f"{plan.algorithm}: {where}",
        relation=budget.relation,
        delta=budget.delta,
        epsilon_claimed=claim.epsilon,
        epsilon_lower=max(f.epsilon_lower for f in findings),
        confidence=confidence,
        runs=runs,
        seconds=time.perf_counter() - started,
        findings=tuple(findings),
        notes=(f"parties: {parties}; the published sums carry {factor:.4g} times the claimed variance",),
    )


def _federation(
    make: Callable[[int], Algorithm],
    budget: Budget,
    noise_multiplier: float,
    door: tuple[str, str | None],
    pattern: Pattern,
    which: int | None,
    runs: int,
    parties: int,
) -> tuple[Views, float]:
    """What a federation publishes in one world (``None``: every record silent), and its variance factor."""
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.federation.parties import Party
    from quietgrad.federation.simulation import assemble
    from quietgrad.federation.transport.in_process import InProcess

    first = {None: "silent", 0: "canary", 1: "mirror"}[which]
    gone = which == 1 and budget.relation is Relation.ADD_REMOVE
    attacked = ("silent",) if gone else (first, "silent")
    others = ("silent", "silent") if which is None else ("against", "aside")
    holders = [
        Party(CanaryRecords(roles, runs, _WIDTH), n_public=2 * runs)
        for roles in (attacked, *[others] * (parties - 1))
    ]
    objective: Any = CanaryObjective(pattern)
    algorithm = make(2 * runs * parties)
    plan, federation = assemble(
        algorithm,
        objective,
        holders,
        budget=budget,
        trust=door[0],
        secure=door[1],
        noise_multiplier=noise_multiplier,
    )
    curator = FederatedCurator(
        objective, InProcess(federation.handlers), identity=federation.identity, roster=federation.roster
    )
    session = RecordingSession(curator.open(plan), blocks=runs)
    views = walk(algorithm, session, np.zeros(runs * _WIDTH).view(BlockVector))
    session.close("steps")
    # Every party of a local federation adds the whole noise to its own sum.
    return views, float(parties if door[0] == "local" else plan.variance_factor)
