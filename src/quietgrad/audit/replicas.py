"""Many independent runs as one: the real algorithm and the real curator on a block-diagonal problem.

An audit needs thousands of runs. Put N copies of a small problem side by side: parameters of length N·d, N·k
records, each of which touches only its own block. Sums, clips, white noise and Poisson samples of different
blocks are independent, and algorithms made of coordinate-wise arithmetic keep the blocks apart; so one pass of the
production code through :class:`~quietgrad.curators.central.CentralSession` *is* N independent runs. Algorithms that
mix coordinates (a norm, a random round) are noticed and run one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.algorithms.base import Algorithm
from quietgrad.curators.base import Curator
from quietgrad.curators.central import CentralCurator
from quietgrad.plans.schedule import Plan
from quietgrad.privacy import events
from quietgrad.privacy.correlated import CorrelatedNoise
from quietgrad.privacy.mechanisms import GaussianNoise
from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.sampling import CyclicCohorts, CyclicPoisson, FullBatch, Poisson, Sampler, Sampling, SinglePass
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]
CuratorFactory = Callable[[Any, Any, bytes], Curator]
"""(objective, data, key) ↦ whoever holds the data."""
Tick = Callable[[int], None]
"""Told how many more runs are done."""

_MOST_NUMBERS = 2**22  # coordinates of one block-diagonal pass; more runs are made in several passes


@dataclass(frozen=True)
class ReplicaSampling(Sampling, kind="replicated"):
    """``inner`` sampling drawn independently in each of ``runs`` blocks of records; ``n`` is one run's public n."""

    inner: Sampling
    runs: int
    n: int

    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """What one run releases: the claim under audit."""
        return self.inner.event(inner, steps)

    def expected_batch(self, n_public: int) -> float:
        """One run's public divisor, whatever the number of runs."""
        return self.inner.expected_batch(self.n)

    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """The production sampler, read at a different number for every run."""
        if self.runs == 1 or isinstance(self.inner, FullBatch | Poisson | CyclicCohorts | CyclicPoisson):
            return self.inner.sampler(n_records, stream)  # samples and cohorts of disjoint blocks are independent
        return _Strided(self.inner.sampler(n_records // self.runs, stream), self.runs, n_records // self.runs)

    def participation(self, count: int) -> tuple[int, int] | None:
        """As in one run."""
        return self.inner.participation(count)

    def describe(self) -> str:
        """Return one line for people."""
        return f"{self.runs} independent runs of {self.inner.describe()}"


class _Strided:
    """Release t of run r is the sampler's batch t·N + r, shifted into the run's block."""

    def __init__(self, inner: Sampler, runs: int, block: int) -> None:
        self.inner, self.runs, self.block = inner, runs, block

    def batch(self, i: int) -> npt.NDArray[np.int64]:
        first = i * self.runs
        parts = [self._one(first + r) + r * self.block for r in range(self.runs)]
        return np.concatenate(parts)

    def _one(self, number: int) -> npt.NDArray[np.int64]:
        batch = self.inner.batch(number)
        return np.arange(self.block) if batch is None else batch


class Game(Protocol):
    """Two neighbouring worlds that an attacker must tell apart, in as many blocks as wanted."""

    @property
    def n(self) -> int:
        """One run's public number of records."""
        ...

    @property
    def dim(self) -> int:
        """One run's number of parameters."""
        ...

    @property
    def gaussian(self) -> bool:
        """Whether transcripts of un-sampled Gaussian releases are jointly Gaussian in both worlds."""
        ...

    def world(self, which: int, runs: int) -> tuple[Any, Any]:
        """(objective, data) of ``runs`` blocks of world 0 or 1."""
        ...


class Views(NamedTuple):
    """What was seen: ``transcript`` (runs, releases·d), ``model`` (runs, d), and the slot of each column.

    ``compared`` is false where the models do not hold the canary, so that there is nothing in them to tell apart.
    """

    transcript: Floats
    model: Floats
    slots: list[str]
    looped: bool
    compared: bool = True


def central(objective: Any, data: Any, key: bytes) -> Curator:
    """The production curator of one trusted holder."""
    return CentralCurator(objective, data, key=key, account="audit")


def silent(runs: int) -> None:
    """Nobody is watching."""


def collect(
    algorithm: Algorithm,
    plan: Plan,
    game: Game,
    which: int,
    runs: int,
    *,
    curator: CuratorFactory = central,
    seed: int | None = None,
    together: bool = True,
    tick: Tick = silent,
) -> Views:
    """Run ``algorithm`` ``runs`` times in world ``which`` of ``game`` and return what left the door.

    ``plan`` is one run's plan: what is claimed. Without ``seed`` every run has fresh secret noise. Runs are made
    side by side where they can be, unless ``together`` is false.
    """
    try:
        gaussian = all(isinstance(slot.mechanism, GaussianNoise | CorrelatedNoise) for slot in plan.schedule.slots)
        if not together or not gaussian:
            raise NotSeparableError  # only Gaussian noise is independent from coordinate to coordinate
        views = collect_blocks(algorithm, plan, game, which, runs, curator=curator, seed=seed)
    except NotSeparableError:
        return _joined(_loop(algorithm, plan, game, which, runs, curator, seed, tick), runs, looped=True)
    tick(runs)
    return views


def collect_blocks(
    algorithm: Algorithm,
    plan: Plan,
    game: Game,
    which: int,
    runs: int,
    *,
    curator: CuratorFactory = central,
    seed: int | None = None,
    uniform: float | None = None,
) -> Views:
    """The same, side by side or not at all; ``uniform`` fixes what a random round is drawn with."""
    size = max(1, _MOST_NUMBERS // game.dim)
    parts = [
        _blocks(algorithm, plan, game, which, min(size, runs - done), curator, _key(seed, which, done), uniform)
        for done in range(0, runs, size)
    ]
    return _joined(parts, runs, looped=False)


def _joined(parts: list[Views], runs: int, *, looped: bool) -> Views:
    slots = max((part.slots for part in parts), key=len)
    transcript = np.full((runs, len(slots)), np.nan)  # a run that stopped early said nothing more
    row = 0
    for part in parts:
        transcript[row : row + len(part.transcript), : part.transcript.shape[1]] = part.transcript
        row += len(part.transcript)
    return Views(transcript, np.concatenate([part.model for part in parts]), slots, looped)


def _key(seed: int | None, which: int, number: int) -> bytes:
    return fresh_key() if seed is None else seed_key(2 * (seed * 1_000_003 + number) + which)


def _blocks(
    algorithm: Algorithm,
    plan: Plan,
    game: Game,
    which: int,
    runs: int,
    curator: CuratorFactory,
    key: bytes,
    uniform: float | None,
) -> Views:
    """``runs`` runs side by side in one pass."""
    objective, data = game.world(which, runs)
    holder = curator(objective, data, key)
    session = holder.open(spread(plan, game, blocks=runs))
    ear = RecordingSession(session, blocks=runs, uniform=uniform)
    return walk(algorithm, ear, np.asarray(holder.initial()).view(BlockVector))


def _loop(
    algorithm: Algorithm,
    plan: Plan,
    game: Game,
    which: int,
    runs: int,
    curator: CuratorFactory,
    seed: int | None,
    tick: Tick,
) -> list[Views]:
    """``runs`` runs one after the other, through one door with room for all their releases.

    Sharing the door saves setting up streams for each; noise is addressed by the number of the release, so every
    run's is fresh. Turns and a single pass over the records cannot be shared: there each run gets its own
    door.
    """
    once = any(slot.sampling.participation(1) is not None for slot in plan.schedule.slots)
    views = []
    for number in range(runs):
        if once or number == 0:
            objective, data = game.world(which, 1)
            holder = curator(objective, data, _key(seed, which, number))
            session = holder.open(spread(plan, game, rounds=1 if once else runs))
            rho, start = session.rho_left, np.asarray(holder.initial())
        session.rho_left = rho
        if hasattr(objective, "rewind"):
            objective.rewind()
        views.append(walk(algorithm, RecordingSession(session, number=number), start))
        tick(1)
    return views


def walk(algorithm: Algorithm, session: RecordingSession, start: Vector) -> Views:
    state = algorithm.init(start)
    while not state.done:
        state = algorithm.step(state, session)
    blocks = session.blocks
    heard = np.concatenate(session.heard, axis=1) if session.heard else np.zeros((blocks, 0))
    slots = [slot for slot, part in zip(session.slots, session.heard, strict=True) for _ in range(part.shape[1])]
    return Views(heard, np.array(algorithm.output(state), np.float64).reshape(blocks, -1), slots, blocks == 1)


def spread(plan: Plan, game: Game, *, blocks: int = 1, rounds: int = 1) -> Plan:
    """One run's plan made into that of ``blocks`` runs side by side, ``rounds`` times over; the noise stays."""
    single = any(isinstance(slot.sampling, SinglePass) for slot in plan.schedule.slots)
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
    held = int(getattr(game, "held", game.n))
    return replace(plan, schedule=replace(plan.schedule, slots=slots), n_public=blocks * held)
