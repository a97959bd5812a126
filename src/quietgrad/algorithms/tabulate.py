"""One release and nothing else: a noisy table of held-out people, in the shape of an algorithm.

So it is planned, reserved, released and stated like every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.algorithms.table_looks import noise_of
from quietgrad.curators.base import Session
from quietgrad.objectives.queries.evaluation import CellSums
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.budget import Relation
from quietgrad.sampling import FullBatch
from quietgrad.vectors import Vector, copy


@dataclass(frozen=True)
class Tabulate(Algorithm):
    """Release the sums of ``cells`` cells, of which a person has one in each of ``groups`` groups.

    >>> Tabulate(20, 1).schedule(1000).slots[0].name
    'evaluation'
    """

    cells: int
    groups: int = 1

    name: ClassVar[str] = "evaluation"

    def schedule(self, n_public: int) -> Schedule:
        return Schedule((Slot("evaluation", FullBatch()),))

    def init(self, x0: Vector) -> State:
        return State(params=copy(x0))

    def step(self, state: State, door: Session) -> State:
        budget = door.plan.budget
        query = CellSums(self.cells, self.groups, Relation.ADD_REMOVE if budget is None else budget.relation)
        state.params = door.release("evaluation", query)
        state.extra["noise"] = noise_of(door, "evaluation", query.bound)
        state.step, state.done = 1, True
        return state

    def output(self, state: State) -> Vector:
        return state.params
