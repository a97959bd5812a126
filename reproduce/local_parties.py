"""Parties that each add their own noise, as one door in one process: Algorithms 3 and 4 of paper 003."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import BudgetError
from quietgrad.core.session.base import SessionCost
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import Vector
from quietgrad.methods import plan, run
from quietgrad.methods.base import Algorithm
from quietgrad.methods.result import Result


class Doors:
    """The doors of parties that each add their own noise, as one: a release is the sum of theirs."""

    def __init__(self, doors: Sequence[CentralSession]) -> None:
        self._doors = doors
        self.plan, self.objective, self.regularizer = doors[0].plan, doors[0].objective, doors[0].regularizer
        self.rho_left = doors[0].rho_left
        self.seeded, self.epochs, self.run = doors[0].seeded, 1, doors[0].run
        self.noise_sources, self.charged = len(doors), ()

    @property
    def used(self) -> dict[str, int]:
        return self._doors[0].used

    def expected_batch(self, slot: str) -> float:
        return sum(door.expected_batch(slot) for door in self._doors)

    def uniform(self, label: str) -> float:
        return self._doors[0].uniform(label)

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        total = self._doors[0].release(slot, query, rho=rho)
        for door in self._doors[1:]:
            total = total + door.release(slot, query, rho=rho)
        return total

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        raise BudgetError("parties with their own noise have no joint choice; release the numbers instead.")

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        raise BudgetError("parties with their own noise have no joint search; parties use Algorithm 4.")

    def close(self, reason: str, *, data_dependent: bool = False) -> SessionCost:
        spent = [door.close(reason, data_dependent=data_dependent) for door in self._doors]
        return spent[0]


def run_on_parties(
    objective: Any,
    parties: Sequence[Any],
    algorithm: Algorithm,
    *,
    budget: Budget | None,
    seed: int | None = None,
    ledgers: Sequence[Any] | None = None,
    start: Vector | None = None,
) -> Result:
    """Run ``algorithm`` on parties that each hold their own records and add their own noise (ICRL-DP).

    With :class:`~reproduce.hessian_selection.HessianSelection` this is Algorithm 4; with perturbed
    SGD on SPIDER it is Algorithm 3, as the recursion of ĝ_{j,t} is linear and the server uses the parties' mean
    only. For experiments; a real federation is a federated curator with local trust. The privacy statement is that
    of every single party.

    Args:
        parties: the records of each party, as the objective takes them, of equal number.
        budget: of each party.
        seed: fixed randomness for tests; not private.
        ledgers: one per party.

    >>> from reproduce.hessian_selection import HessianSelection
    >>> from quietgrad.tables.landscapes import landscape
    >>> hill = landscape("strict-saddle", d=5)
    >>> test = HessianSelection([hill.saddle(), hill.minimum()], alpha=0.03)
    >>> run_on_parties(hill, [10**5] * 4, test, budget=Budget(4.0, 1e-6), seed=0).details["chosen"]
    1
    """
    if not parties:
        raise ValueError("parties: at least one.")
    curators = [
        CentralCurator(
            objective,
            data,
            seed=None if seed is None else seed + j,
            ledger=None if ledgers is None else ledgers[j],
            account=f"party-{j}",
        )
        for j, data in enumerate(parties)
    ]
    sizes = {len(curator.records) for curator in curators}
    if len(sizes) > 1:
        raise ValueError(f"parties of {min(sizes)} to {max(sizes)} records: must be of equal number here.")
    the_plan = plan(algorithm, n=sizes.pop(), budget=budget)
    doors = Doors([curator.open(the_plan) for curator in curators])
    x0 = curators[0].initial() if start is None else start
    return run(algorithm, doors, x0, account="party-0")
