"""Canaries in query space: a record that contributes as much as each query allows, whatever the query is.

Some methods ask for more than gradients: histograms, moments, Hessians, norms. No single record is as bad as can
be for all of them, but the promise is that none could be worse than the bounds add up to; so here the record's
contribution to every release is dictated, a whole bound along the first axis, on top of a real sum over real
records. The auditor knows that sum and takes it away again: what is left is noise, and the canary. Whether the
queries keep their bounds is a question for brute force (:func:`every_bound`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.replicas import (
    CuratorFactory,
    Game,
    RecordingSession,
    Tick,
    Views,
    _key,
    as_numbers,
    silent,
    spread,
)
from quietgrad.audit.report import AuditFinding
from quietgrad.objectives.base import Batch, Query
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Relation
from quietgrad.sampling import SinglePass
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]


@dataclass
class Planted:
    """A query with one more contribution: ``pull`` bounds along the first axis."""

    query: Query
    pull: float
    rest: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def bound(self) -> float:
        """As the query's."""
        return self.query.bound

    def dim(self, records: Any) -> int:
        """As the query's."""
        return self.query.dim(records)

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        """Add what the records contribute, remember it, and add the canary."""
        self.query.sum_into(objective, batch, out)
        self.rest = as_numbers(out)
        out[0] += self.pull * self.query.bound


class Planting(RecordingSession):
    """A session that adds a canary to every sum, and hears what is left when the rest is taken away."""

    pull = 0.0
    only: tuple[str, ...] = ()
    """The slots that the canary is in, if not in all: on disjoint records it is in one."""
    every = 1
    """How many releases apart its turns are."""

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        return super().first_below(slot, [Planted(query, self._pull(slot)) for query in queries], threshold)

    def _pull(self, slot: str) -> float:
        in_turn = self._session.used[slot] % self.every == 0
        return self.pull if in_turn and (not self.only or slot in self.only) else 0.0

    def release(self, slot: str, query: Query, **more: Any) -> Vector:
        asked = Planted(query, self._pull(slot))
        answer = self._session.release(slot, asked, **more)
        if query.bound > 0.0 and asked.rest.size:
            self.heard.append(((as_numbers(answer) - asked.rest)[:1] / query.bound)[None])
            self.slots.append(slot)
        return answer


@dataclass(frozen=True)
class QueryGame:
    """Both worlds have the same small table; the canary is planted at the door.

    Args:
        objective, data: what the algorithm is run on.
        relation: under add-remove the canary is absent in the second world, under replace-one it is mirrored.
    """

    n: int
    relation: Relation
    objective: Any
    data: Any
    dim: int = 1
    gaussian: bool = True
    only: tuple[str, ...] = ()
    every: int = 1

    def world(self, which: int, runs: int) -> tuple[Any, Any]:
        """(objective, data), the same in both."""
        return self.objective, self.data

    def pull(self, which: int) -> float:
        """What the canary contributes, in bounds."""
        return 1.0 if which == 0 else 0.0 if self.relation is Relation.ADD_REMOVE else -1.0

    def collect(
        self,
        algorithm: Any,
        plan: Plan,
        which: int,
        runs: int,
        curator: CuratorFactory,
        seed: int | None,
        tick: Tick = silent,
    ) -> Views:
        """What left the door in ``runs`` runs, one after the other through one door; models are not compared."""
        heard: list[Floats] = []
        slots: list[str] = []
        # Neither a single pass over the records nor noise of several releases can be shared by two runs.
        once = any(isinstance(s.sampling, SinglePass) or s.mechanism.together for s in plan.schedule.slots)
        for number in range(runs):
            if once or number == 0:
                holder = curator(self.objective, self.data, _key(seed, which, number))
                session = holder.open(plan if once else spread(plan, self, rounds=runs))
                rho = session.rho_left
            session.rho_left = rho
            ear = Planting(session, number=number)
            ear.pull, ear.only, ear.every = self.pull(which), self.only, self.every
            state = algorithm.init(np.array(holder.initial()))
            while not state.done:
                state = algorithm.step(state, ear)
            heard.append(np.concatenate(ear.heard, axis=1)[0])
            slots = max(slots, ear.slots, key=len)
            tick(1)
        transcript = np.full((runs, len(slots)), np.nan)
        for row, numbers in zip(transcript, heard, strict=True):
            row[: len(numbers)] = numbers
        return Views(transcript, np.zeros((runs, 1)), slots, True, compared=False)


def table_game(
    n: int, relation: Relation, features: int = 2, only: tuple[str, ...] = (), every: int = 1
) -> QueryGame:
    """A small table in the unit ball for methods that need features."""
    from quietgrad.objectives import Logistic

    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (n, features))
    y = (X[:, 0] > 0).astype(float)
    return QueryGame(n, relation, Logistic(row_bound=1.0), (X, y), only=only, every=every)


def query_game(algorithm: Any, n: int, relation: Relation) -> Game | None:
    """The game for a registered algorithm that is attacked in query space, else ``None``."""
    from quietgrad.algorithms.registry import ALGORITHMS

    entry = ALGORITHMS.get(getattr(algorithm, "name", ""))
    spaces = {example.space for example in entry.attacks} if entry is not None else set()
    return table_game(n, relation) if spaces == {"queries"} else None


def every_bound(*, seed: int = 0) -> Iterator[AuditFinding]:
    """Brute force over neighbours for every query that is no sum of gradients: does it keep its bound?"""
    from quietgrad.audit.neighbours import neighbouring_tables
    from quietgrad.audit.probes import probe_sensitivity
    from quietgrad.objectives import L2, Logistic, Squared

    for name, make in _queries().items():
        for relation, loss in itertools.product(Relation, (Logistic, Squared)):
            objective = loss(regularizer=L2(0.1), row_bound=2.0, rows="clip")

            def queries(records: Any, make: Any = make, relation: Relation = relation) -> Iterator[Query]:
                rng = np.random.default_rng(seed)
                for scale in (0.0, 0.3, 5.0):
                    yield make(scale * rng.standard_normal(records.dim), relation)

            tables = neighbouring_tables(objective, relation, draws=1)
            what = f"{name}, {loss.__name__}, {relation}"
            yield probe_sensitivity(objective, tables, queries, relation, what, whole=True)


def _queries() -> dict[str, Callable[[Any, Relation], Query]]:
    from quietgrad.objectives.queries.second_order import Excess, GradientNorm, LeastEigenvalue, PackedHessian
    from quietgrad.objectives.tables.features import FeatureMean
    from quietgrad.objectives.tables.whitening import (
        RowNormHistogram,
        SecondMomentMatrix,
        WhitenedGradient,
        Whitening,
    )

    def whitened(x: Any, relation: Relation) -> Query:
        rng = np.random.default_rng(7)
        A = rng.standard_normal((len(x), len(x)))
        return WhitenedGradient(
            x, 0.5, Whitening.from_moments(0.1 * A[0], A @ A.T, floor=0.1, column=0.0, outputs=1)
        )

    return {
        "feature mean": lambda x, relation: FeatureMean(1.5),
        "second moments": lambda x, relation: SecondMomentMatrix(1.5, relation),
        "row norms": lambda x, relation: RowNormHistogram(),
        "whitened gradient": whitened,
        "gradient norm": lambda x, relation: GradientNorm(x, 0.5, 5.0),
        "least eigenvalue": lambda x, relation: LeastEigenvalue(x, 0.2, 5.0),
        "excess": lambda x, relation: Excess(x, 0.1, 1.0, 0.5, 0.2, 5.0),
        "Hessian": lambda x, relation: PackedHessian(x, 0.2, rank=1),
        "Hessian as printed": lambda x, relation: PackedHessian(x, 0.2, isometric=False),
    }
