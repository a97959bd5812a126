"""Cohorts: rounds that ask only some of the parties, drawn anew for each, while the others may be away.

Everybody learns who was drawn, so ε claims nothing for it: a party is priced as if it were in every round. A
secure sum of a cohort is one of its members alone, with keys of its own; parties in the cohort who do not
answer are dropouts, and the round is complete as long as the plan's quorum is left. ``colluders`` is about all
parties: however the cohort was drawn, at most that many are in it, so a coordinator who draws as it likes gains
nothing against the noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from quietgrad.federation.plan import FederatedPlan
from quietgrad.privacy.rng import SecureStream
from quietgrad.secure.faults import ProtocolError
from quietgrad.secure.identity import Roster

_DRAWINGS = 64


def draw(plan: FederatedPlan, key: bytes, t: int, away: Collection[str] = ()) -> tuple[str, ...]:
    """Who is asked in round t, in the plan's order: everybody, or a uniform cohort drawn from the run's key.

    A cohort without a quorum of parties who are not known to be ``away`` is drawn again, which costs nothing.
    """
    if not plan.cohort:
        return plan.names
    first = _drawn(plan, key, t, "cohort")
    for again in range(1, _DRAWINGS):
        cohort = first if again == 1 else _drawn(plan, key, t, f"cohort/{again}")
        if sum(name not in away for name in cohort) >= plan.quorum:
            return cohort
    return first


def _drawn(plan: FederatedPlan, key: bytes, t: int, label: str) -> tuple[str, ...]:
    order = np.argsort(SecureStream(key, label).uint64(t, len(plan.names)))
    return tuple(plan.names[j] for j in sorted(order[: plan.cohort].tolist()))


def invitation(plan: FederatedPlan, names: Sequence[str]) -> dict[str, Any]:
    """What a set-up message says about who is asked: nothing if everybody is."""
    return {"cohort": [plan.index(name) for name in names]} if plan.cohort else {}


def invited_by(plan: FederatedPlan, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Read :func:`invitation`: as many different parties as were agreed on, in the plan's order."""
    if not plan.cohort:
        return plan.names
    places = fields.get("cohort")
    if (
        not isinstance(places, list)
        or len(places) != plan.cohort
        or not all(type(j) is int for j in places)
        or sorted(set(places)) != places
        or not 0 <= places[0] <= places[-1] < len(plan.names)
    ):
        raise ProtocolError("coordinator", f"must name {plan.cohort} different parties for a round, in order")
    return tuple(plan.names[j] for j in places)


def roster_of(plan: FederatedPlan, everyone: Roster, names: Sequence[str]) -> Roster:
    """Who is who in a round of these parties: they, and the servers or the coordinator."""
    return everyone.only([*names, *everyone.names[len(plan.names) :]]) if plan.cohort else everyone


def rescaling(plan: FederatedPlan, names: Sequence[str]) -> float:
    """What the sum of these parties is multiplied by to stand for everybody's: n ÷ their weighted records.

    All of it is public. 1 without cohorts: there a missing party only makes a step shorter.
    """
    if not plan.cohort:
        return 1.0
    places = [plan.index(name) for name in names]
    here = math.fsum(plan.factors[j] * plan.sizes[j] for j in places)
    return plan.n_public / here if here > 0.0 else 1.0
