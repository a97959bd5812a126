"""Canaries: records whose contributions the auditor dictates, and the games with and without one.

=================== ==================================================================================
:class:`CanaryGame` gradient space: the auditor sets the canary's per-example gradient at every step
:class:`QueryGame`  query space: the canary adds a whole bound to every sum, whatever the query is
:class:`HuberGame`  tables that differ in one target, for methods that need a convex loss
=================== ==================================================================================

A canary made of data is weak: its gradients are what the loss makes of them. In gradient space they follow a
pattern that saturates every clip. ``growing``: gradient and difference point the same way. ``alternating``: the
gradient turns round at every step, which exposes differences clipped in parts. They depend on the step alone, so
with full batches every release is exactly Gaussian. In query space the auditor subtracts the real sum over real
records, and noise and canary remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse

from quietgrad.assurance.audit.replicas import Game, Pattern, RecordingSession, as_numbers
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.base import Session
from quietgrad.core.session.clipping import FLAT, Clipping, scale_factors
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import BaseObjective, Batch, LossConstants, NoRegularizer, Records
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector
from quietgrad.methods.base import Algorithm
from quietgrad.methods.output_perturbation import OutputPerturbation, WeightedAverage
from quietgrad.methods.registry import ALGORITHMS
from quietgrad.objectives import Huber, Logistic

Floats = npt.NDArray[np.float64]
_HUGE = 1e3  # a gradient far beyond any clip in use, or a target far beyond Huber's threshold


def amplitude(pattern: Pattern, step: int) -> float:
    """The canary's gradient along its axis at a step."""
    if pattern == "growing":
        return _HUGE * (step + 2)
    return _HUGE * (-1.0) ** step if pattern == "alternating" else _HUGE


@dataclass(frozen=True)
class CanaryRecords:
    """The records of ``runs`` blocks: in each the same few, distinguished by their position."""

    roles: tuple[str, ...]
    runs: int
    width: int

    def __len__(self) -> int:
        return self.runs * len(self.roles)

    @property
    def dim(self) -> int:
        """Number of parameters of all blocks."""
        return self.runs * self.width

    def contents(self) -> Iterator[bytes | memoryview]:
        """The roles: nothing else is known of these records."""
        yield repr(self).encode()

    fingerprint_parts = contents


def shorten(rows: Floats, clip: float, clipping: Clipping = FLAT) -> Floats:
    """Scale each row to norm ≤ clip; the reference that every kernel's clipping is compared with."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if clipping != FLAT:
        return np.asarray(rows * scale_factors(clipping, lengths, clip))
    with np.errstate(invalid="ignore"):
        return np.where(lengths > clip, rows * (clip / np.maximum(lengths, 1e-300)), rows)


class CanaryObjective(BaseObjective):
    """An objective in gradient space: roles decide gradients, parameters are ignored.

    ``canary`` pulls along the first axis with the pattern's amplitude, ``mirror`` against it, ``against`` is a
    background record that pulls against it, ``aside`` one that pulls along the second axis; ``silent`` records have
    no gradient. :meth:`tick` moves to the next step; the listener calls it before each release. Where losses are
    asked, for a noisy choice, the canary loses all it can at every other candidate and its mirror at the rest: no
    other loss moves the choice more.
    """

    regularizer = NoRegularizer()
    row_bound = 1.0

    def __init__(self, pattern: Pattern = "growing") -> None:
        self.pattern = pattern
        self.step = -1
        self._asked = 0  # losses since the last release

    def tick(self) -> None:
        """The next release begins."""
        self.step += 1
        self._asked = 0

    def loses(self, candidate: int) -> bool:
        """Whether the canary loses at a candidate of a choice, which the auditor knows; else its mirror does."""
        return candidate % 2 == 1

    def prepare(self, data: CanaryRecords) -> CanaryRecords:
        return data

    def initial(self, records: CanaryRecords) -> Floats:
        return np.zeros(records.dim)

    def constants(self, row_bound: float | None = None) -> LossConstants:
        """None that a proof may lean on: these gradients are adversarial."""
        return LossConstants(1.0, None, None, None, None, 0.0, None)

    def gradients(self, records: CanaryRecords, step: int) -> Floats:
        """One row per role."""
        rows = np.zeros((len(records.roles), records.width))
        pull = amplitude(self.pattern, step) if step >= 0 else 0.0
        for row, role in zip(rows, records.roles, strict=True):
            if role in ("canary", "mirror", "against"):
                row[0] = pull if role == "canary" else -pull
            elif role == "aside":
                row[-1] = _HUGE
        return rows

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        """Add the roles' gradients of this step and the last by the rule; the points are ignored."""
        now = self.gradients(batch.records, self.step)
        moved = now - rule.beta * self.gradients(batch.records, self.step - 1)
        rows = rule.alpha * shorten(moved, rule.clip, rule.clipping)
        rows += rule.gamma * shorten(now, rule.second_clip, rule.clipping)
        self._add(batch, rows, out)

    def _add(self, batch: Batch, rows: Floats, out: Floats) -> None:
        """Add the roles' rows to the block of each run."""
        records: CanaryRecords = batch.records
        blocks = np.asarray(out).reshape(records.runs, records.width)
        if batch.indices is None:
            blocks += rows.sum(axis=0)
        else:
            counts = np.bincount(batch.indices, minlength=len(records)).reshape(records.runs, -1)
            blocks += counts @ rows

    def add_hessians(self, batch: Batch, params: Floats, clip: float, out: Floats) -> None:
        """Add nothing: these gradients are flat."""

    def loss_sum(self, batch: Batch, params: Floats, bound: float) -> float:
        """The losses of one run's records at the next candidate, once for each block."""
        loses = self.loses(self._asked)
        self._asked += 1
        losses = {"canary": bound if loses else 0.0, "mirror": 0.0 if loses else bound}
        records: CanaryRecords = batch.records
        return math.fsum(losses.get(role, 0.0) for role in records.roles) * records.runs

    def risk(self, records: CanaryRecords, params: Floats) -> float:
        return 0.0

    def risk_gradient(self, records: CanaryRecords, params: Floats) -> Floats:
        return np.zeros_like(params)


class PatternSession(RecordingSession):
    """A session in gradient space: every release is the next step of the canary's pattern."""

    def __init__(self, session: Session, **more: Any) -> None:
        super().__init__(session, **more)
        self.objective.step = -1  # a new run begins

    def heard_of(self, chosen: int) -> float:
        return float(self.objective.loses(chosen))  # an auditor knows what its own record makes of a candidate

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> OwnVector:
        self.objective.tick()
        return super().release(slot, query, rho=rho)


@dataclass(frozen=True)
class CanaryGame(Game):
    """World 0 has the canary; world 1 lacks it (add-remove) or has its mirror image instead (replace-one).

    Args:
        n: one run's public number of records.
        relation: what neighbours are.
        pattern: how the canary's gradient moves from step to step.
        background: ordinary records, present in both worlds, that pull against the canary and aside.
        all_records: hold all n records (silent ones too), as fixed-size batches need.
    """

    n: int
    relation: Relation
    pattern: Pattern = "growing"
    background: bool = True
    all_records: bool = False
    dim: int = 2
    objective: Callable[[Pattern], Any] = CanaryObjective

    def roles(self, which: int) -> tuple[str, ...]:
        """The records of one run, the attacked one first."""
        other: tuple[str, ...] = () if self.relation is Relation.ADD_REMOVE else ("mirror",)
        first: tuple[str, ...] = ("canary",) if which == 0 else other
        rest = ("against",) * 3 + ("aside",) if self.background else ()
        silent = ("silent",) * (self.n - len(first) - len(rest) if self.all_records else 0)
        return first + rest + silent

    @property
    def held(self) -> int:
        """Records of one run that are really there."""
        return len(self.roles(0))

    def recording(self, which: int) -> Callable[..., RecordingSession]:
        return PatternSession

    def world(self, which: int, runs: int) -> tuple[Any, CanaryRecords]:
        roles = self.roles(which) or ("silent",)
        return self.objective(self.pattern), CanaryRecords(roles, runs, self.dim)


@dataclass
class CanaryQuery:
    """A query with one more contribution: ``pull`` bounds along the first axis."""

    query: Query
    pull: float
    rest: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def bound(self) -> float:
        """The query's own bound."""
        return self.query.bound

    def dim(self, records: Records) -> int:
        """Return the query's own dimension."""
        return self.query.dim(records)

    def sum_into(self, objective: object, batch: Batch, out: OwnVector) -> None:
        """Add what the records contribute, remember it, and add the canary."""
        self.query.sum_into(objective, batch, out)
        self.rest = as_numbers(out)
        out[0] += self.pull * self.query.bound


class CanarySession(RecordingSession):
    """A session that adds a canary to every sum, and hears what is left when the rest is taken away."""

    compared = False

    def __init__(self, session: Session, *, game: QueryGame, pull: float, **more: Any) -> None:
        super().__init__(session, **more)
        self.game, self.pull = game, pull

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        return super().first_below(slot, [CanaryQuery(query, self._pull(slot)) for query in queries], threshold)

    def _pull(self, slot: str) -> float:
        only, in_turn = self.game.only, self._session.used[slot] % self.game.every == 0
        return self.pull if in_turn and (not only or slot in only) else 0.0

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        asked = CanaryQuery(query, self._pull(slot))
        answer = self._session.release(slot, asked, **more)
        if query.bound > 0.0 and asked.rest.size:
            self._record(slot, ((as_numbers(answer) - asked.rest)[:1] / query.bound)[None])
        return answer


@dataclass(frozen=True)
class QueryGame(Game):
    """Both worlds have the same small table; the session adds the canary to every sum.

    Args:
        objective: the objective that the algorithm is run on.
        data: the table that the algorithm is run on.
        relation: under add-remove the canary is absent in the second world, under replace-one it is mirrored.
        only: the slots that the canary is in, if not in all: on disjoint records it is in one.
        every: how many releases apart its turns are.
    """

    n: int
    relation: Relation
    objective: Any
    data: Any
    dim: int = 1
    only: tuple[str, ...] = ()
    every: int = 1

    separable: ClassVar[bool] = False

    def world(self, which: int, runs: int) -> tuple[Any, Any]:
        return self.objective, self.data

    def recording(self, which: int) -> Callable[..., RecordingSession]:
        pull = 1.0 if which == 0 else 0.0 if self.relation is Relation.ADD_REMOVE else -1.0
        return partial(CanarySession, game=self, pull=pull)


def table_game(n: int, relation: Relation, only: tuple[str, ...] = (), every: int = 1) -> QueryGame:
    """Build a game on a small table in the unit ball, for methods that need features."""
    X = np.random.default_rng(0).uniform(-0.5, 0.5, (n, 2))
    y = (X[:, 0] > 0).astype(float)
    return QueryGame(n, relation, Logistic(row_bound=1.0), (X, y), only=only, every=every)


@dataclass(frozen=True)
class HuberGame(Game):
    """Two tables of n rows that differ in one target, for methods that need a convex loss with real constants.

    Huber's residual is ∓threshold at targets ±1000, so the record's gradient is ±G·u at every point: the linear
    losses that attain the stability bound. All other rows are zero. Blocks are columns of a sparse table.
    """

    n: int
    dim: int = 2

    def world(self, which: int, runs: int) -> tuple[Any, Any]:
        rows, columns = np.arange(runs) * self.n, np.arange(runs) * self.dim
        X = sparse.csr_array((np.ones(runs), (rows, columns)), shape=(runs * self.n, runs * self.dim))
        y = np.zeros(runs * self.n)
        y[rows] = _HUGE if which == 0 else -_HUGE
        return Huber(1.0, row_bound=1.0), (X, y)


def data_game(algorithm: Algorithm, n: int, relation: Relation) -> Game | None:
    """The worlds for an algorithm that cannot be attacked in gradient space, or ``None``."""
    # Stability scales as 1/n: few records stand for any number.
    if isinstance(algorithm, OutputPerturbation):
        return HuberGame(n, dim=1 if algorithm.mechanism == "pure" else 2)
    if isinstance(algorithm, WeightedAverage) and algorithm.method == "one-shot":
        return HuberGame(n)
    entry = ALGORITHMS.get(algorithm.name)
    spaces = set() if entry is None else {example.space for example in entry.attacks}
    return table_game(n, relation) if spaces == {"queries"} else None
