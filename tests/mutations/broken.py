"""Deliberately broken pieces for the mutation suite; none of these may ever pass an audit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.assurance.audit.canaries import CanaryGame, CanaryObjective, shorten
from quietgrad.assurance.audit.replicas import ReplicaSampling
from quietgrad.core.accounting.events import ZCDP
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.grid import sigma_for
from quietgrad.core.noise.mechanisms import NoiseSource
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.sampling import RandomAllocation
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import Query, RecursiveMomentumQuery
from quietgrad.core.vectors import OwnVector
from quietgrad.objectives import Logistic

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Broken:
    """A curator factory whose sessions are of a broken class, or whose noise is scaled or comes broken."""

    session: type[CentralSession] = CentralSession
    noise: float = 1.0
    source: Callable[[NoiseSource], NoiseSource] | None = None
    only: str | None = None  # the one slot whose source is broken

    def __call__(self, objective: Any, data: Any, key: bytes | None = None, **settings: Any) -> Any:
        return _BrokenCurator(self, objective, data, key=key, **settings)

    def charging(self, objective: Any, data: Any, path: Path) -> Any:
        """The same with a ledger."""
        return _BrokenCurator(self, objective, data, ledger=path)


class _BrokenCurator(CentralCurator):
    def __init__(self, how: Broken, objective: Any, data: Any, **settings: Any) -> None:
        super().__init__(objective, data, **settings)
        self.how = how

    def open(self, plan: Plan, **settings: Any) -> CentralSession:
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * self.how.noise)
        session = super().open(plan, **settings)
        session.__class__ = self.how.session
        session._used = dict.fromkeys(session._used, 0)  # as if it had been of that class from the start
        session.advance(settings.get("used") or {}, settings.get("rho_left"))
        if self.how.source is not None:
            only, change = self.how.only, self.how.source
            session._sources = {
                name: change(source) if only in (None, name) else source
                for name, source in session._sources.items()
            }
        return session


# --- broken noise: what a mechanism's source may do wrong ---------------------------------------------------------


class Altered(NoiseSource):
    """Passes everything on to the real source, under another number or not at all."""

    def __init__(self, inner: NoiseSource) -> None:
        self.inner = inner

    def number(self, release: int) -> int:
        """The number that the real source is asked for."""
        return release

    def silent(self, release: int) -> bool:
        """Whether this release gets no noise."""
        return False

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        if not self.silent(release):
            self.inner.add(total, self.number(release), multiplier, bound)

    def choose(self, scores: Floats, release: int, rho: float, bound: float) -> int:
        if self.silent(release):
            return int(np.argmin(scores))
        return self.inner.choose(scores, self.number(release), rho, bound)

    def first_below(
        self, values: Iterable[tuple[float, float]], threshold: float, release: int, multiplier: float
    ) -> int | None:
        if self.silent(release):
            return next((k for k, (value, _) in enumerate(values) if value <= threshold), None)
        return self.inner.first_below(values, threshold, self.number(release), multiplier)

    def passing(self, counts: Floats, release: int, multiplier: float, bound: float) -> npt.NDArray[np.bool_]:
        if self.silent(release):
            return np.asarray(counts > self.inner._mechanism.threshold(multiplier, bound))  # type: ignore[attr-defined]
        return self.inner.passing(counts, self.number(release), multiplier, bound)


class SilentEverySeventh(Altered):
    """Forgets the noise at every seventh release."""

    def silent(self, release: int) -> bool:
        return release % 7 == 6


class TwiceFromThirtyTwo(Altered):
    """Uses every noise twice, from release 32 on."""

    def number(self, release: int) -> int:
        return release if release < 32 else release & ~1


class SameNoise(Altered):
    """Draws its noise once and keeps using it."""

    def number(self, release: int) -> int:
        return 0


class Quieter(Altered):
    """A tenth of the noise, whatever the plan says."""

    factor = 0.1

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        self.inner.add(total, release, self.factor * multiplier, bound)

    def choose(self, scores: Floats, release: int, rho: float, bound: float) -> int:
        return self.inner.choose(scores, release, rho / self.factor**2, bound)

    def first_below(
        self, values: Iterable[tuple[float, float]], threshold: float, release: int, multiplier: float
    ) -> int | None:
        return self.inner.first_below(values, threshold, release, self.factor * multiplier)

    def passing(self, counts: Floats, release: int, multiplier: float, bound: float) -> npt.NDArray[np.bool_]:
        mechanism, stream = self.inner._mechanism, self.inner._stream  # type: ignore[attr-defined]
        sigma, _ = mechanism.counts_noise(multiplier, bound)
        noisy = counts + self.factor * sigma * stream.normal(release, len(counts))
        return np.asarray(noisy > mechanism.threshold(multiplier, bound))


class OneNumberForAll(Altered):
    """Adds one number of noise to all coordinates."""

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        noise = np.zeros_like(total)
        self.inner.add(noise, release, multiplier, bound)
        total += noise[0]


class UniformNoise(Altered):
    """Noise of the right variance and another law."""

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        rng = np.random.default_rng(release)
        total += multiplier * bound * math.sqrt(3.0) * rng.uniform(-1.0, 1.0, len(total))


class HalfTheCoordinates(Altered):
    """Noise on the first half of the coordinates."""

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        bare = total.copy()
        self.inner.add(total, release, multiplier, bound)
        half = len(total) // 2
        total[half:] = bare[half:]


# --- broken sessions ----------------------------------------------------------------------------------------------


class NoiseThenClip(CentralSession):
    """Clips after the noise, so that the noise is cut down too."""

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        noisy = super().release(slot, query, **more)
        return shorten(noisy[None], query.bound)[0]


class _Realised(CentralSession):
    """Knows how many records the last sample really had, per block."""

    def realised(self, slot: str) -> float:
        batch = self._samplers[slot].batch(self._used[slot] - 1)
        blocks = getattr(self._slots[slot].sampling, "runs", 1)
        return (len(self._records) if batch is None else len(batch)) / blocks


class MeanOfRealisedBatch(_Realised):
    """Divides by the number of records drawn instead of the public constant."""

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        total = super().release(slot, query, **more)
        return total * (self.expected_batch(slot) / max(1.0, self.realised(slot)))


class SkipsEmptyBatch(_Realised):
    """Saves the noise when nobody was drawn."""

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        total = super().release(slot, query, **more)
        return total if self.realised(slot) else total * 0.0


class OneMultiplier(CentralSession):
    """Takes the noise multiplier of differences for the full gradients of SPIDER too."""

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        if slot == "o1":
            self._multipliers[slot] = self._multipliers["o2"]
        return super().release(slot, query, **more)


class FloatNoise(CentralSession):
    """Adds plain float noise to the plain float sum."""

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        begun = self.draw(slot)
        dim = query.dim(self._records)
        out = np.zeros(dim)
        query.sum_into(self.objective, self.batch(begun), out)
        sigma, _ = sigma_for(self._multipliers[slot], query.bound, dim)
        return out + sigma * np.random.default_rng().standard_normal(dim)


class TakesRecordsAgain(CentralSession):
    """Begins the single pass anew with every release."""

    def release(self, slot: str, query: Query, **more: Any) -> OwnVector:
        if self._fresh is not None:
            self._fresh.position = 0  # the sampler itself refuses to hand out a record twice
        self._fresh_at = 0
        return super().release(slot, query, **more)


class BeginsNoiseAnew(CentralSession):
    """Counts on after a resume, but draws its noise from the beginning."""

    def advance(self, used: Any, rho_left: float | None) -> None:
        super().advance(used, rho_left)
        self._offsets = dict(used)

    def _begin(self, slot: str, verb: str) -> Any:
        begun = super()._begin(slot, verb)
        return begun._replace(number=begun.number - getattr(self, "_offsets", {}).get(slot, 0))


class ChargesOneLess(CentralSession):
    """Forgets the last release of every slot when it is closed."""

    def _spent_event(self, data_dependent: bool) -> Any:
        assert self.plan.budget is not None
        if self._filter:
            spent = (self.plan.event_rho - self.rho_left) * (1.0 - 1.0 / max(2, sum(self._used.values())))
            return ZCDP(spent, self.plan.budget.relation)
        return self.plan.event_of({name: count - 1 for name, count in self._used.items()})


class AlwaysTheLastRound(CentralSession):
    """Draws every random round as the longest one."""

    def uniform(self, label: str) -> float:
        return 1.0 - 2.0**-53


class SamplesOnce(CentralSession):
    """Draws one sample and uses it in every release."""

    def _batch(self, drawn: Any) -> Batch:
        return super()._batch(drawn._replace(number=0))


class SamplesMore(CentralSession):
    """Takes more records than it says."""

    def _batch(self, drawn: Any) -> Batch:
        found = super()._batch(drawn)
        if found.indices is None:
            return found
        everyone = np.arange(len(self._records))
        more = np.union1d(found.indices, everyone[(everyone + drawn.number) % 10 == 0])
        return found._replace(indices=more)


class AllocatesOnce(CentralSession):
    """Random allocation with the same steps in every epoch."""

    def _batch(self, drawn: Any) -> Batch:
        sampling = self._slots[drawn.slot].sampling
        if not isinstance(sampling, RandomAllocation):
            return super()._batch(drawn)
        return super()._batch(drawn._replace(number=drawn.number % sampling.steps_per_epoch))


class AllocatesByPlace(CentralSession):
    """Random allocation in which a record's step goes by its place."""

    def _batch(self, drawn: Any) -> Batch:
        found, sampling = super()._batch(drawn), self._slots[drawn.slot].sampling
        if not isinstance(sampling, RandomAllocation):
            return found
        steps = sampling.steps_per_epoch
        return found._replace(indices=np.arange(drawn.number % steps, len(self._records), steps))


class AllocatesTwice(CentralSession):
    """Random allocation in which one record is in two steps of every epoch."""

    def _batch(self, drawn: Any) -> Batch:
        found, sampling = super()._batch(drawn), self._slots[drawn.slot].sampling
        if not isinstance(sampling, RandomAllocation) or drawn.number % sampling.steps_per_epoch > 1:
            return found
        return found._replace(indices=np.union1d(np.asarray(found.indices), [5]))


class ReplaysByName(CentralSession):
    """Takes a release that is asked again for the one that was made, whatever its sum is."""

    def _settled(self, begun: Any, settings: Any, *sums: Any) -> bool:
        return True


class SeparateClips(CanaryObjective):
    """Clips the two gradients of a difference apart, then subtracts."""

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        if not rule.gamma:
            super().add(batch, points, rule, out)
            return
        records, clip = batch.records, rule.second_clip
        now, before = (shorten(self.gradients(records, self.step - k), clip) for k in (0, 1))
        self._add(batch, now - (1.0 - rule.gamma) * before, out)


@dataclass(frozen=True, kw_only=True)
class SeparatelyClippedLogistic(Logistic):
    """The same mistake in a kernel."""

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        if not rule.gamma:
            super().add(batch, points, rule, out)
            return
        before, gradient = np.zeros_like(out), ClippingRule.gradient(rule.second_clip)
        super().add(batch, points[:1], gradient, out)
        super().add(batch, points[1:], gradient, before)
        out -= (1.0 - rule.gamma) * before


@dataclass(frozen=True, kw_only=True)
class InfinityClipped(Logistic):
    """Shortens every record until no coordinate exceeds the clip: a cube, not a ball."""

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        rows = np.arange(len(batch.records)) if batch.indices is None else batch.indices
        for i in rows:
            free = ClippingRule(rule.alpha, rule.beta, 1e30)
            gradient = np.zeros_like(out)
            super().add(Batch(batch.records, np.array([i])), points, free, gradient)
            out += gradient * min(1.0, rule.clip / max(float(np.abs(gradient).max()), 1e-300))


class SwappedClips(RecursiveMomentumQuery):
    """States the sensitivity of Section 6.1 of the DP-SRM paper, where C1 and C2 are exchanged."""

    @property
    def bound(self) -> float:
        return (1.0 - self.gamma) * self.clip + self.gamma * self.difference_clip


class ZeroOutGame(CanaryGame):
    """The second world has a silent record in the canary's place."""

    def roles(self, which: int) -> tuple[str, ...]:
        return ("canary" if which == 0 else "silent",) + ("silent",) * (self.n - 1)


@dataclass(frozen=True)
class ShuffledBlocks(ReplicaSampling, kind="test-shuffled"):
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
            if isinstance(slot.sampling, ReplicaSampling)
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
