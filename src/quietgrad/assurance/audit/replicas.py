"""Many independent runs as one: the real algorithm and the real curator on a block-diagonal problem.

An audit needs thousands of runs. Put N copies of a small problem side by side: parameters of length N·d, N·k
records, each of which touches only its own block. Sums, clips, white noise and Poisson samples of different blocks
are independent, and algorithms made of coordinate-wise arithmetic keep the blocks apart. So one pass of the
production code through :class:`~quietgrad.core.session.session.CentralSession` *is* N independent runs. Algorithms
that mix coordinates (a norm, a random round) are noticed and run one by one. A :class:`RecordingSession` passes
everything on and writes down what was released.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.noise.rng import SecureStream, fresh_key, seed_key
from quietgrad.core.plans.schedule import Law, Plan
from quietgrad.core.sampling import Sampler, Sampling
from quietgrad.core.session.base import Curator, Session
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import RecordAdapter
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector
from quietgrad.methods.base import Algorithm

Floats = npt.NDArray[np.float64]
Pattern = Literal["growing", "alternating", "constant"]


class NotSeparableError(TypeError):
    """An algorithm computed something across coordinates, so blocks would not be independent runs."""


class BlockVector(np.ndarray[Any, Any]):
    """A flat vector of N blocks that refuses inner products."""

    def dot(self, *_: Any, **__: Any) -> Any:
        raise NotSeparableError


class RecordingSession:
    """A session that writes down every number that is released, in units of the query's bound."""

    compared = True
    """Whether the model that comes out holds the canary, so that models can be distinguished."""

    def __init__(self, session: Session, *, blocks: int = 1, number: int = 0, uniform: float | None = None) -> None:
        self._session = session
        self._uniform = uniform  # what every draw is taken to be, where the auditor fixes it
        self._number = number
        self.blocks = blocks
        self.plan = session.plan
        self.objective = session.objective
        self.regularizer = session.regularizer
        self.heard: list[Floats] = []
        self.slots: list[str] = []

    def uniform(self, label: str) -> float:
        if self._uniform is not None:
            return self._uniform
        self._check_single()  # one draw would be shared by all runs
        return self._session.uniform(f"{label}/{self._number}")

    def heard_of(self, chosen: int) -> float:
        """Return the number that a choice shows an observer."""
        return float(chosen)

    def _check_single(self) -> None:
        if self.blocks > 1:
            raise NotSeparableError

    def _record(self, slot: str, numbers: Floats) -> None:
        self.heard.append(numbers)
        self.slots.append(slot)

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> OwnVector:
        answer = self._session.release(slot, query, rho=rho)
        if query.bound > 0.0:
            self._record(slot, as_numbers(answer).reshape(self.blocks, -1) / query.bound)
        return answer.view(BlockVector) if self.blocks > 1 else answer

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        self._check_single()
        chosen = self._session.choose(slot, queries, rho=rho, offsets=offsets)
        self._record(slot, np.array([[self.heard_of(chosen)]]))
        return chosen

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        self._check_single()
        first = self._session.first_below(slot, queries, threshold)
        self._record(slot, np.array([[-1.0 if first is None else float(first)]]))
        return first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def as_numbers(vector: OwnVector) -> Floats:
    """Copy a numpy or torch vector into a float64 array."""
    plain = vector if isinstance(vector, np.ndarray) else vector.detach().cpu().numpy()
    return np.array(plain, np.float64)


CuratorFactory = Callable[[RecordAdapter, Any, bytes], Curator]
"""(objective, data, key) ↦ the curator that holds the data."""

_MOST_NUMBERS = 2**22  # coordinates of one block-diagonal pass; more runs are made in several passes


@dataclass(frozen=True)
class ReplicaSampling(Sampling, kind="replicated"):
    """``inner`` sampling drawn independently in each of ``runs`` blocks of records; ``n`` is one run's public n."""

    inner: Sampling
    runs: int
    n: int

    def __post_init__(self) -> None:
        """Check nothing: ``inner`` was checked when it was made, and is no number."""

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        return self.inner.event(inner, steps)

    def expected_batch(self, n_public: int) -> float:
        """One run's public divisor, whatever the number of runs."""
        return self.inner.expected_batch(self.n)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """The production sampler, read at a different number for every run."""
        if self.runs == 1 or not (self.inner.counts_exactly or self.inner.fresh):
            return self.inner.sampler(n_records, stream)  # samples and cohorts of disjoint blocks are independent
        return _Strided(self.inner.sampler(n_records // self.runs, stream), self.runs, n_records // self.runs)

    def times(self, count: int) -> int:
        return self.inner.times(count)

    def participation(self, count: int) -> tuple[int, int] | None:
        return self.inner.participation(count)

    def describe(self) -> str:
        return f"{self.runs} independent runs of {self.inner.describe()}"


@dataclass(frozen=True)
class _Strided:
    """Release t of run r is the sampler's batch t·N + r, shifted into the run's block."""

    inner: Sampler
    runs: int
    block: int

    def batch(self, i: int) -> npt.NDArray[np.int64]:
        parts = []
        for r in range(self.runs):
            batch = self.inner.batch(i * self.runs + r)
            parts.append((np.arange(self.block) if batch is None else batch) + r * self.block)
        return np.concatenate(parts)


class Game(ABC):
    """Two neighbouring worlds that an attacker must tell apart, in as many blocks as wanted."""

    n: int
    """One run's public number of records."""
    dim: int
    """One run's number of parameters."""
    pattern: Pattern | None = None
    """How the canary's gradient moves from step to step, where the auditor dictates it."""
    separable: ClassVar[bool] = True
    """Whether runs may be made side by side."""

    @property
    def held(self) -> int:
        """Records of one run that are really there."""
        return self.n

    @abstractmethod
    def world(self, which: int, runs: int) -> tuple[Any, Any]:
        """(objective, data) of ``runs`` blocks of world 0 or 1."""

    def recording(self, which: int) -> Callable[..., RecordingSession]:
        """Return a factory of the session that records a run of world ``which``."""
        return RecordingSession


class Views(NamedTuple):
    """An observer's views: ``transcript`` (runs, releases·d), ``model`` (runs, d), and the slot of each column.

    ``compared`` is false where the models do not hold the canary, so that there is nothing in them to tell apart.
    """

    transcript: Floats
    model: Floats
    slots: list[str]
    looped: bool
    compared: bool = True


def central(objective: RecordAdapter, data: object, key: bytes) -> Curator:
    """Return the production curator of one trusted holder."""
    return CentralCurator(objective, data, key=key, account="audit")


@dataclass(frozen=True)
class Trial:
    """Settings that all runs of an attack share. ``plan`` is one run's plan, whose guarantee is the claim.

    Without ``seed`` every run has fresh secret noise.
    """

    algorithm: Algorithm
    plan: Plan
    game: Game
    curator: CuratorFactory = central
    seed: int | None = None

    @property
    def law(self) -> Law | None:
        """The law of the random round, if the plan has one."""
        laws = [slot.law for slot in self.plan.schedule.slots if slot.law is not None]
        return tuple(sorted((r, p) for r, p in laws[0] if p > 0.0)) if len(laws) == 1 else None

    def collect(self, which: int, runs: int, *, together: bool = True) -> Views:
        """Collect what leaves the session in ``runs`` runs of world ``which``, made side by side where possible.

        A method that stops at a random round R has δ(ε) = E[δ_R(ε)], which holds even if R is published.
        So the auditor draws R for each run, and all runs of one R are made side by side.
        """
        white = all(slot.mechanism.white for slot in self.plan.schedule.slots)
        if not together or not white or not self.game.separable:
            return self._one_by_one(which, runs)
        try:
            if self.law is None:
                return self._side_by_side(which, runs)
            rng = np.random.default_rng(self.seed)
            shares = [p for _, p in self.law]
            middles = np.cumsum(shares) - np.array(shares) / 2  # a draw that gives each round
            parts = [
                self._side_by_side(which, size, k, float(middles[k]))
                for k, size in enumerate(rng.multinomial(runs, shares).tolist())
                if size
            ]
            views = _joined(parts, runs, looped=False)
            order = rng.permutation(runs)  # the first quarter teaches: it must hold all rounds
            return views._replace(transcript=views.transcript[order], model=views.model[order])
        except NotSeparableError:
            return self._one_by_one(which, runs)

    def _side_by_side(self, which: int, runs: int, number: int = 0, uniform: float | None = None) -> Views:
        """Runs in as few passes as fit; ``uniform`` fixes what a random round is drawn with."""
        size, parts = max(1, _MOST_NUMBERS // self.game.dim), []
        for done in range(0, runs, size):
            blocks = min(size, runs - done)
            holder, session = self._open(which, 1000 * number + done, blocks=blocks)
            recording = self.game.recording(which)(session, blocks=blocks, uniform=uniform)
            parts.append(walk(self.algorithm, recording, np.asarray(holder.initial()).view(BlockVector)))
        return _joined(parts, runs, looped=False)

    def _one_by_one(self, which: int, runs: int) -> Views:
        """Runs one after the other, through one session with room for all their releases.

        Sharing the session saves setting up streams for each; noise is addressed by the number of the release, so
        every run's is fresh. Turns, a single pass over the records and noise of several releases cannot be shared:
        there each run opens its own session.
        """
        slots = self.plan.schedule.slots
        # Cohorts, passes, epochs and noise over many releases are of one run.
        once = any(s.sampling.by_place or s.mechanism.together for s in slots)
        recording = self.game.recording(which)
        parts = []
        for number in range(runs):
            if once or number == 0:
                holder, session = self._open(which, number, rounds=1 if once else runs)
                rho, start = session.rho_left, np.asarray(holder.initial())
            session.rho_left = rho
            parts.append(walk(self.algorithm, recording(session, number=number), start))
        return _joined(parts, runs, looped=True)

    def _open(self, which: int, number: int, *, blocks: int = 1, rounds: int = 1) -> tuple[Curator, Any]:
        seed = self.seed
        key = fresh_key() if seed is None else seed_key(2 * (seed * 1_000_003 + number) + which)
        holder = self.curator(*self.game.world(which, blocks), key)
        return holder, holder.open(spread(self.plan, self.game, blocks=blocks, rounds=rounds))


def _joined(parts: list[Views], runs: int, *, looped: bool) -> Views:
    slots = max((part.slots for part in parts), key=len)
    transcript = np.full((runs, len(slots)), np.nan)  # a run that stopped early said nothing more
    row = 0
    for part in parts:
        transcript[row : row + len(part.transcript), : part.transcript.shape[1]] = part.transcript
        row += len(part.transcript)
    return Views(transcript, np.concatenate([part.model for part in parts]), slots, looped, parts[0].compared)


def walk(algorithm: Algorithm, session: RecordingSession, start: OwnVector) -> Views:
    """Run ``algorithm`` once through ``session``."""
    state = algorithm.init(start)
    while not state.done:
        state = algorithm.step(state, session)
    blocks = session.blocks
    heard = np.concatenate(session.heard, axis=1) if session.heard else np.zeros((blocks, 0))
    slots = [slot for slot, part in zip(session.slots, session.heard, strict=True) for _ in range(part.shape[1])]
    model = np.array(algorithm.output(state), np.float64) if session.compared else np.zeros(blocks)
    return Views(heard, model.reshape(blocks, -1), slots, blocks == 1, session.compared)


def spread(plan: Plan, game: Game, *, blocks: int = 1, rounds: int = 1) -> Plan:
    """One run's plan made into that of ``blocks`` runs side by side, ``rounds`` times over; the noise stays."""
    single = any(slot.sampling.fresh for slot in plan.schedule.slots)
    if single and blocks > 1:
        raise NotSeparableError  # a curator shares one pass among all slots
    slots = tuple(
        replace(
            slot,
            sampling=slot.sampling if single else ReplicaSampling(slot.sampling, blocks, plan.n_public),
            count=slot.count * rounds,
        )
        for slot in plan.schedule.slots
    )
    return replace(plan, schedule=replace(plan.schedule, slots=slots), n_public=blocks * game.held)
