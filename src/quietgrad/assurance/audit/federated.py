"""Audits of federations: the same canaries and layers behind a coordinator, its parties and their secure sums.

All roles run in one process with the real plan, messages and protocols. The canary belongs to the first party; the
attacker sees what the coordinator publishes. All parties take part in every round, so releases are exactly
Gaussian. Secure sums carry more noise than the claim needs, and d′ is smaller by the root of the plan's variance
factor. Where each party adds its own noise the coordinator sees each party's sum: a federation of one.

A person known to two parties is attacked too. Parallel composition does not hold for them, so a plan must either
have noise for both contributions or ensure that there is only one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quietgrad.assurance.audit.canaries import CanaryObjective, CanaryRecords, PatternSession
from quietgrad.assurance.audit.noise_checks import check_noise
from quietgrad.assurance.audit.replicas import BlockVector, Pattern, Views, walk
from quietgrad.assurance.audit.report import AuditFinding, AuditReport
from quietgrad.assurance.audit.running import PrivacyClaim, attack_dprime, attack_profile
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import Objective
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.planning import Party
from quietgrad.federation.simulation import Federation, InProcess, assemble
from quietgrad.methods import plan as make_plan
from quietgrad.methods.base import Algorithm
from quietgrad.methods.dp_sgd import DPGD, DPSGD, DPAdam
from quietgrad.methods.dp_srm import DPSRM
from quietgrad.methods.stagewise import StagewiseDPSGD
from quietgrad.objectives import Logistic

TRUSTS: tuple[tuple[str, str | None], ...] = (
    ("curator", None),
    ("secure", "masks"),
    ("secure", "servers"),
    ("secure", "mpc"),
    ("local", None),
)
"""(trust, secure sum) of every federation that is audited."""

_WIDTH = 2
_MAKERS: tuple[Callable[[int], Algorithm], ...] = (
    lambda n: DPGD(steps=6),
    lambda n: DPSGD(steps=6, batch_size=n, momentum=0.5),
    lambda n: DPSRM(steps=6, batch_size=n, difference_clip=0.2),
    lambda n: DPAdam(steps=6, batch_size=n),
    lambda n: StagewiseDPSGD(stages=2, first_steps=1, batch_size=n),
)


def audit_federations(runs: int) -> Iterator[AuditReport]:
    """Audit every algorithm of sums with every trust, the relations in turn."""
    relations = itertools.cycle(Relation)
    for make, (trust, secure) in itertools.product(_MAKERS, TRUSTS):
        budget = Budget(6.0, 1e-5, next(relations))
        yield run_federated(make, budget=budget, trust=trust, secure=secure, runs=runs)


def run_federated(
    make: Callable[[int], Algorithm],
    *,
    budget: Budget,
    trust: str = "curator",
    secure: str | None = None,
    runs: int = 2000,
) -> AuditReport:
    """Audit an algorithm of sums on a federation: noise after aggregation (L0), and d′ of its transcripts (L1).

    Args:
        make: the algorithm for a public n; with its batch size, if it has one, equal to n.
        budget: the guarantee of every record of every party.
        trust, secure: as in :func:`quietgrad.federation.simulate`.
        runs: runs of each world, made side by side.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> run_federated(lambda n: DPGD(steps=3), budget=Budget(6.0, 1e-5), trust="secure", secure="masks").passed
    True
    """
    started = time.perf_counter()
    alpha = 1e-6 / 4
    parties = 1 if trust == "local" else 3  # each party of a local federation adds the whole noise to its own sum
    plan = make_plan(make(4), n=4, budget=budget)
    claim = PrivacyClaim(plan)
    if claim.mu is None:
        raise ValueError("a federation is audited with everyone in every round: make(n) must not sample.")

    def heard(pattern: Pattern, which: int | None) -> tuple[Views, float]:
        """Return what one world publishes, or with ``None`` a world of silent records, and its variance factor."""
        first = {None: "silent", 0: "canary", 1: "mirror"}[which]
        gone = which == 1 and budget.relation is Relation.ADD_REMOVE
        others = ("silent", "silent") if which is None else ("against", "aside")
        roles = [("silent",) if gone else (first, "silent"), *[others] * (parties - 1)]
        holders = [Party(CanaryRecords(each, runs, _WIDTH), n_public=2 * runs) for each in roles]
        algorithm, objective = make(2 * runs * parties), CanaryObjective(pattern)
        world_plan, session, _ = _opened(
            algorithm, objective, holders, budget=budget, trust=trust, secure=secure,
            noise_multiplier=plan.noise_multiplier,
        )  # fmt: skip
        recording = PatternSession(session, blocks=runs)
        views = walk(algorithm, recording, np.zeros(runs * _WIDTH).view(BlockVector))
        session.close("steps")
        return views, 1.0 if trust == "local" else float(world_plan.variance_factor)

    silent, factor = heard("growing", None)
    width = silent.transcript.shape[1] // _WIDTH
    rows = silent.transcript.reshape(runs, width, _WIDTH).swapaxes(0, 1).reshape(width, -1)
    noises = np.array([plan.schedule[name].noise for name in silent.slots[::_WIDTH]])
    where = trust if secure is None else f"secure sum by {secure}"
    sigma = plan.noise_multiplier * math.sqrt(factor)
    findings = check_noise(rows / noises[:, None], sigma, f"after aggregation, {where}", alpha)
    for pattern in ("growing", "alternating"):
        views = heard(pattern, 0)[0], heard(pattern, 1)[0]
        findings.append(attack_dprime(views, claim, f"{pattern} canary, {where}", alpha))
    notes = (f"parties: {parties}; the published sums carry {factor:.4g} times the claimed variance",)
    return AuditReport.of(f"{plan.algorithm}: {where}", plan, findings, runs=runs, started=started, notes=notes)


def _opened(
    algorithm: Algorithm, objective: Objective, parties: Sequence[Party], **settings: Any
) -> tuple[FederatedPlan, Session, Federation]:
    """A federation in one process, and the session of its coordinator."""
    plan, federation = assemble(algorithm, objective, parties, **settings)
    curator = FederatedCurator(
        objective, InProcess(federation.handlers), identity=federation.identity, roster=federation.roster
    )
    return plan, curator.open(plan), federation


def attack_shared_person(runs: int, *, relation: Relation = Relation.ADD_REMOVE) -> AuditFinding:
    """Tell from one published sum whether a person known to two of three parties is in it.

    >>> attack_shared_person(400).verdict
    'pass'
    """
    scores, query = [], GradientQuery(np.zeros(2), 1.0)
    for sign in (1.0, 0.0 if relation is Relation.ADD_REMOVE else -1.0):
        plan, session, federation = _opened(
            DPGD(steps=runs), Logistic(), [_party(place, sign, relation) for place in range(3)],
            budget=Budget(6.0, 1e-5, relation), unit="person", noise_multiplier=0.8, parties_per_person=2,
        )  # fmt: skip
        scores.append(np.array([float(session.release("gradient", query)[0]) for _ in range(runs)]))
        session.close("steps")
        federation.close()
    once = replace(plan.schedule, slots=(replace(plan.schedule["gradient"], count=1),))
    claim = PrivacyClaim(replace(plan, schedule=once))
    return attack_profile((scores[0], scores[1]), claim, f"a person known to two parties, {relation}", 1e-6)


def _party(place: int, sign: float, relation: Relation) -> Party:
    """Return a party of people without gradients; the first two hold the attacked person, unless sign is 0."""
    rows, ids = np.zeros((6, 2)), [f"{place}-{k // 2}" for k in range(6)]
    if sign and place < 2:
        rows, ids = np.vstack([rows, np.tile([1e3 * sign, 0.0], (7, 1))]), [*ids, *["both"] * 7]
    declared = 4 if relation is Relation.ADD_REMOVE else None  # else the true number is public
    return Party(rows, np.zeros(len(rows)), person=ids, n_public=declared)
