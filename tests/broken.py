"""Deliberately broken pieces for the mutation suite; none of these may ever pass an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.canaries import CanaryGame, CanaryObjective, shorten
from quietgrad.audit.replicas import Replicated
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.objectives import Logistic
from quietgrad.objectives.base import Batch, Query, RecursiveMomentum, Rule
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.ledger import Ledger
from quietgrad.privacy.noise import sigma_for
from quietgrad.privacy.rng import SecureStream
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Broken:
    """A curator factory whose sessions are of a broken class, or whose noise is scaled."""

    session: type[CentralSession] = CentralSession
    noise: float = 1.0

    def __call__(self, objective: Any, data: Any, key: bytes) -> Any:
        return _BrokenCurator(self, objective, data, key)


class _BrokenCurator(CentralCurator):
    def __init__(self, how: Broken, objective: Any, data: Any, key: bytes) -> None:
        super().__init__(objective, data, key=key)
        self.how = how

    def open(self, plan: Plan, **_: Any) -> CentralSession:
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * self.how.noise)
        return self.how.session(plan, self.objective, self.records, self._key)


class NoiseThenClip(CentralSession):
    """Clips after the noise, so that the noise is cut down too."""

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        noisy = super().release(slot, query, rho=rho)
        return shorten(noisy[None], query.bound)[0]


class _Realised(CentralSession):
    """Knows how many records the last sample really had, per block."""

    def realised(self, slot: str) -> float:
        source = self._sources[slot]
        batch = source._sampler.batch(source.used - 1)
        blocks = getattr(source.slot.sampling, "runs", 1)
        return (len(self._records) if batch is None else len(batch)) / blocks


class MeanOfRealisedBatch(_Realised):
    """Divides by the number of records drawn instead of the public constant."""

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        total = super().release(slot, query, rho=rho)
        return total * (self.expected_batch(slot) / max(1.0, self.realised(slot)))


class SkipsEmptyBatch(_Realised):
    """Saves the noise when nobody was drawn."""

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        total = super().release(slot, query, rho=rho)
        return total if self.realised(slot) else total * 0.0


class FloatNoise(CentralSession):
    """Adds plain float noise to the plain float sum."""

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        _, batch = self._take(slot)
        dim = query.dim(self._records)
        out = np.zeros(dim)
        query.sum_into(self.objective, Batch(self._records, batch.indices), out)
        sigma, _ = sigma_for(self.plan.noise_multiplier, query.bound, dim)
        return out + sigma * np.random.default_rng().standard_normal(dim)


class SameNoiseAgain(CentralSession):
    """Draws its noise once and keeps using it."""

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        self._sources[slot].used = 0
        return super().release(slot, query, rho=rho)


class TakesRecordsAgain(CentralSession):
    """Begins the single pass anew with every release."""

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        if self._fresh is not None:
            self._fresh.position = 0
        return super().release(slot, query, rho=rho)


class SeparateClips(CanaryObjective):
    """Clips the two gradients of a difference apart, then subtracts."""

    def add(self, batch: Batch, points: Sequence[Floats], rule: Rule, out: Floats) -> None:
        if not rule.gamma:
            super().add(batch, points, rule, out)
            return
        records, clip = batch.records, rule.second_clip
        now, before = (shorten(self.gradients(records, self.step - k), clip) for k in (0, 1))
        self._add(records, batch.indices, now - (1.0 - rule.gamma) * before, out)


@dataclass(frozen=True, kw_only=True)
class SeparatelyClippedLogistic(Logistic):
    """The same mistake in a kernel."""

    def add(self, batch: Batch, points: Sequence[Floats], rule: Rule, out: Floats) -> None:
        if not rule.gamma:
            super().add(batch, points, rule, out)
            return
        before, gradient = np.zeros_like(out), Rule.gradient(rule.second_clip)
        super().add(batch, points[:1], gradient, out)
        super().add(batch, points[1:], gradient, before)
        out -= (1.0 - rule.gamma) * before


class SwappedClips(RecursiveMomentum):
    """States the sensitivity of Section 6.1 of the DP-SRM paper, where C1 and C2 are exchanged."""

    @property
    def bound(self) -> float:
        return (1.0 - self.gamma) * self.clip + self.gamma * self.difference_clip


class ZeroOutGame(CanaryGame):
    """The second world has a silent record in the canary's place."""

    def roles(self, which: int) -> tuple[str, ...]:
        return ("canary" if which == 0 else "silent",) + ("silent",) * (self.n - 1)


@dataclass(frozen=True)
class ShuffledBlocks(Replicated, kind="test-shuffled"):
    """Claims Poisson's amplification but walks through a shuffled list, one record per release."""

    def sampler(self, n_records: int, stream: SecureStream) -> Any:
        words = stream.uint64(0, n_records).reshape(self.runs, -1)
        return _Walk(np.argsort(words, axis=1))


@dataclass(frozen=True)
class _Walk:
    order: npt.NDArray[np.int64]

    def batch(self, i: int) -> npt.NDArray[np.int64]:
        runs, n = self.order.shape
        here: npt.NDArray[np.int64] = self.order[:, i % n] + n * np.arange(runs)
        return here


class ShufflingCurator(CentralCurator):
    """Opens a Poisson plan with shuffled batches."""

    def __init__(self, objective: Any, data: Any, key: bytes) -> None:
        super().__init__(objective, data, key=key)

    def open(self, plan: Plan, **_: Any) -> CentralSession:
        slots = tuple(
            replace(slot, sampling=ShuffledBlocks(slot.sampling.inner, slot.sampling.runs, slot.sampling.n))
            for slot in plan.schedule.slots
            if isinstance(slot.sampling, Replicated)
        )
        if not slots:  # the noise probe, whose slots are not replicated
            return super().open(plan)
        return super().open(replace(plan, schedule=replace(plan.schedule, slots=slots)))


class ChargesAfterwards(CentralCurator):
    """Writes to the ledger when the run is over."""

    def __init__(self, objective: Any, data: Any, path: Path) -> None:
        super().__init__(objective, data)
        self.path = path

    def open(self, plan: Plan, **_: Any) -> CentralSession:
        session = super().open(plan)
        close = session.close

        def late(reason: str, *, data_dependent: bool = False) -> Any:
            assert plan.budget is not None
            Ledger(self.path).reserve(
                "default", plan.event, delta=plan.budget.delta, relation=plan.budget.relation, run="late"
            )
            return close(reason, data_dependent=data_dependent)

        session.close = late  # type: ignore[method-assign]
        return session
