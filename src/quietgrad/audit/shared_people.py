"""One person known to two parties, under attack: a distinguisher who sees every sum that a federation publishes.

The person is beyond the clip at both parties, in one direction. Parallel composition does not hold for them, so a
plan must either have noise for both contributions or see to it that there is only one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quietgrad.audit.distinguishers import PrivacyClaim, attack_profile
from quietgrad.audit.report import AuditFinding
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.parties import Party, matched
from quietgrad.federation.simulation import assemble
from quietgrad.federation.transport.in_process import InProcess
from quietgrad.objectives.base import Gradient
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import fresh_key

Joining = Callable[[Sequence[Party]], tuple[Sequence[Party], dict[str, Any]]]
"""What is done about people in several parties: the parties as they take part, and the plan's settings."""

_MULTIPLIER = 0.8


def priced(parties: Sequence[Party]) -> tuple[Sequence[Party], dict[str, Any]]:
    """Noise for both contributions."""
    return parties, {"parties_per_person": 2}


def kept_once(parties: Sequence[Party]) -> tuple[Sequence[Party], dict[str, Any]]:
    """Ids matched by a keyed hash: one of the two keeps the person."""
    found, matching = matched(parties, fresh_key())
    return found, {"matching": matching}


def attack_shared_person(
    runs: int,
    joining: Joining = priced,
    *,
    relation: Relation = Relation.ADD_REMOVE,
    trust: str = "curator",
    secure: str | None = None,
) -> AuditFinding:
    """Tell from one published sum whether somebody known to two of three parties is in it.

    >>> attack_shared_person(400, kept_once).verdict
    'pass'
    """
    from quietgrad.algorithms.dp_sgd import DPGD
    from quietgrad.objectives import Logistic

    loss, budget, scores = Logistic(), Budget(6.0, 1e-5, relation), []
    claimed = None
    for sign in (1.0, 0.0 if relation is Relation.ADD_REMOVE else -1.0):
        parties, settings = joining([_party(place, sign, relation) for place in range(3)])
        plan, federation = assemble(
            DPGD(steps=runs), loss, parties, budget=budget, trust=trust, secure=secure, unit="person",
            noise_multiplier=_MULTIPLIER, **settings,
        )  # fmt: skip
        slot = plan.schedule["gradient"]
        claimed = replace(plan, schedule=replace(plan.schedule, slots=(replace(slot, count=1),)))
        curator = FederatedCurator(
            loss, InProcess(federation.handlers), identity=federation.identity, roster=federation.roster
        )
        session, query = curator.open(plan), Gradient(np.zeros(2), 1.0)
        scores.append(np.array([float(session.release("gradient", query)[0]) for _ in range(runs)]))
        session.close("steps")
        federation.close()
    assert claimed is not None
    how = trust if secure is None else f"secure sum by {secure}"
    what = f"a person known to two parties, {joining.__name__}, {how}, {relation}"
    return attack_profile((scores[0], scores[1]), PrivacyClaim(claimed), what, 1e-6)


def shared_people_findings(runs: int, relation: Relation) -> Iterator[AuditFinding]:
    """Both ways, where the coordinator adds no more noise than is claimed."""
    for joining in (priced, kept_once):
        yield attack_shared_person(runs, joining, relation=relation)


def _party(place: int, sign: float, relation: Relation) -> Party:
    """A party whose own people say nothing; the first two also know somebody who says much, unless sign is 0."""
    rows, ids = np.zeros((6, 2)), [f"{place}-{k // 2}" for k in range(6)]
    if sign and place < 2:
        rows, ids = np.vstack([rows, np.tile([1e3 * sign, 0.0], (7, 1))]), [*ids, *["both"] * 7]
    declared = 4 if relation is Relation.ADD_REMOVE else None  # else the true number is public
    return Party(rows, np.zeros(len(rows)), person=ids, n_public=declared)
