"""Counting the records of a table privately, where nobody declared how many they are: the first release of a run.

It is made before the run has a plan, because the plan follows from it, so it has a line of its own in the ledger,
under the run's name. Nothing else of quietgrad learns the exact number but the sums themselves.
"""

from __future__ import annotations

import math

import numpy as np

from quietgrad.curators.account import COUNTED, Account
from quietgrad.plans.counting import COUNT, PublicCount, count_noise, rest_like
from quietgrad.privacy.budget import Budget, PrivacyUnit, Relation
from quietgrad.privacy.rng import fresh_key, seed_key


def public_count(
    records: int,
    *,
    budget: Budget | None,
    declared: int | None,
    gaussian: bool,
    account: Account,
    run: str = "",
    unit: PrivacyUnit = PrivacyUnit.RECORD,
    seed: int | None = None,
) -> PublicCount:
    """The number of records to plan a run for: as declared, exact where it is public, else counted privately.

    Args:
        records: how many there are; a secret under add-remove.
        budget: of the whole run, the count included; ``None`` for a run that is not private.
        declared: the public number, if there is one.
        gaussian: whether the run's other releases are un-sampled Gaussian ones
            (:func:`~quietgrad.plans.counting.plans_gaussian`).
        account, run: who pays for the count, and the name of the run that it begins.
        unit: whom a contribution is about; ``records`` is how many of them there are.
        seed: fixed randomness for tests.
    """
    if declared is not None:
        return PublicCount(declared)
    if budget is None or budget.relation is Relation.REPLACE_ONE:
        return PublicCount(records)
    found = PublicCount(1, count_noise(budget, gaussian=gaussian), gaussian)
    assert found.multiplier is not None
    event = found.event(budget.relation)
    account.check(found.before(rest_like(budget, found), budget.relation), budget, unit)  # else it would be in vain
    name = f"{run}{COUNTED}" if run else ""
    charge = account.reserve(event, budget, run=name, note=COUNT, part=True, unit=unit)
    total = np.array([float(records)])
    key = fresh_key() if seed is None else seed_key(seed)
    found.mechanism.source(key, COUNT, 1).add(total, 0, found.multiplier, 1.0)
    charge.close(event, reason="counted", data_dependent=False)
    # Below its own noise a count says nothing; a number that small would only make shares and steps absurd.
    n = max(round(float(total[0])), math.ceil(found.multiplier), 2)
    return PublicCount(n, found.multiplier, gaussian, run)
