"""Gradient estimators: mini-batch means, recursive momentum and SPIDER, and the oracles known by name.

*Mini-batch*: the noisy mean of clipped gradients of one sample (DP-SGD, DP-GD).

*Recursive momentum* (paper 000, Algorithm 1): the estimate corrects itself by gradient differences,
v₀ = S₀/b₀ and v_t = (1−γ)v_{t−1} + S_t/b, where S_t is a noisy sum whose terms are
(1−γ) clip_C2(∇fᵢ(θ_t) − ∇fᵢ(θ_{t−1})) + γ clip_C1(∇fᵢ(θ_t)), or with one joint clip
clip_C(∇fᵢ(θ_t) − (1−γ)∇fᵢ(θ_{t−1})).

*SPIDER* has a module of its own, :mod:`~quietgrad.methods.oracles.spider`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quietgrad import named_settings as settings
from quietgrad.core.errors import SettingError
from quietgrad.core.plans.schedule import Law, Slot
from quietgrad.core.sampling import SamplingName, sampling_of
from quietgrad.core.session.base import Session
from quietgrad.core.session.clipping import FLAT, Clipping, ClippingName, read_clipping
from quietgrad.core.session.contributions import check_clip, following_clip
from quietgrad.core.session.queries import Asked, GradientQuery, JointMomentumQuery, Query, RecursiveMomentumQuery
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule, read_schedule
from quietgrad.methods.oracles.base import (
    Estimate,
    Noise,
    Oracle,
    batch_part,
    slot_of,
)
from quietgrad.methods.oracles.error_bounds import EstimateError, chain_error
from quietgrad.methods.oracles.spider import AdaptiveSpider, Spider


@dataclass(frozen=True)
class MiniBatch(Oracle):
    """ĝ = (1/b) [Σ clip_C(∇fᵢ(θ)) + N(0, (zC)² I)], b the public expected batch.

    Dividing by the realised size of a Poisson sample would double the sensitivity, and skipping an empty sample
    would reveal it, so neither is done.
    """

    batch_size: int | None
    clip: float = 1.0
    sampling: SamplingName = "poisson"
    law: Law | None = None
    cohorts: int | None = None
    noise: Noise = "independent"
    clipping: ClippingName | Clipping = "flat"
    noise_schedule: NoiseSchedule | None = None
    clip_schedule: ClipSchedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in (NoiseSchedule, ClipSchedule):
            schedule = read_schedule(getattr(self, kind.argument), kind)
            object.__setattr__(self, kind.argument, schedule)
            if schedule is None:
                continue
            schedule.config()  # raises if it has no numbers
            if self.noise != "independent":
                raise SettingError(f"{kind.argument}: correlated noise is one release of all steps; leave one out.")
            if self.law is not None:
                raise SettingError(f"{kind.argument}: a random number of steps has no epochs; return the last.")

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        sampling = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        if self.clip_schedule is not None:
            for _, factor in self.clip_schedule.stretches(steps, self._epoch_length(n_public)):
                check_clip("clip", self.clip * factor)
        if self.noise_schedule is None:
            return (slot_of("gradient", sampling, steps, self.noise, self.law),)
        sampling.check_count(steps)  # of all stretches together
        stretches = self.noise_schedule.stretches(steps, self._epoch_length(n_public))
        slots = [slot_of(f"stretch-{k}", sampling, count) for k, (count, _) in enumerate(stretches)]
        return tuple(replace(slot, noise=factor) for slot, (_, factor) in zip(slots, stretches, strict=True))

    def _epoch_length(self, n_public: int) -> int:
        """Steps of an epoch: as many as a loader would make batches."""
        if self.cohorts is not None:
            return self.cohorts
        return 1 if self.batch_size is None else math.ceil(n_public / self.batch_size)

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        plan, slot, clip = session.plan, "gradient", self.clip
        if self.noise_schedule is not None:
            slot = plan.schedule.slot_at(state.calls).name
        if self.clip_schedule is not None:
            clip *= self.clip_schedule.factor(state.calls // self._epoch_length(plan.n_public))
        total = session.release(slot, GradientQuery(params, clip, self._clipping))
        total *= 1.0 / session.expected_batch(slot)
        return Estimate(total, None, 0.0, state.calls + 1)

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        plan, between = session.plan, {}
        if self.clip_schedule is not None:
            stretches = self.clip_schedule.stretches(plan.schedule.releases, self._epoch_length(plan.n_public))
            clips = [self.clip * factor for _, factor in stretches]
            between = {"clip": (min(clips), max(clips))}
        for slot in ("gradient",) if self.noise_schedule is None else (slot.name for slot in plan.schedule.slots):
            yield slot, Asked(GradientQuery(params, self.clip, self._clipping), between)

    @property
    def _clipping(self) -> Clipping:
        return read_clipping(self.clipping)

    def error(self, session: Session) -> EstimateError | None:
        """σ ≤ C/√b and r = zC/b; every estimate is a chain of its own. Rules that are not flat bend gradients."""
        if self._clipping != FLAT or self.noise_schedule is not None or self.clip_schedule is not None:
            return None
        return chain_error(
            (batch_part(session, "gradient", self.clip),),
            chains=session.plan.schedule["gradient"].count,
        )


def first_apart(sampling: str, cohorts: int | None, noise: Noise) -> bool:
    """Whether the first release of recursive momentum has a slot of its own; else it is one of ``next``."""
    return noise == "independent" and cohorts is None and sampling != "random-allocation"


@dataclass(frozen=True)
class RecursiveMomentum(Oracle):
    """The oracle of DP-SRM.

    Args:
        batch_size: b, expected records per step.
        first_batch_size: b₀ of the first step (default: b).
        gamma: γ, the weight of the fresh gradient; 1 is the plain mini-batch.
        clip: C1, the clip of gradients.
        difference_clip: C2, the clip of gradient differences; of the whole combination when ``joint_clip``.
        joint_clip: clip the combination once instead of its two parts.
        smoothness: if given, C2 follows the public step: smoothness × ‖θ_t − θ_{t−1}‖, at most ``difference_clip``.
        first_noise: noise multiplier of the first release relative to the others.
        cohorts, noise: as in :class:`~quietgrad.methods.dp_sgd.DPSGD`. Correlated noise is over all releases,
            the first among them: it is then one of ``next``.
        clipping: as there; the rule is applied to gradients and to differences.
    """

    batch_size: int
    first_batch_size: int | None = None
    gamma: float = 0.1
    clip: float = 1.0
    difference_clip: float = 0.1
    joint_clip: bool = False
    smoothness: float | None = None
    sampling: SamplingName = "poisson"
    first_noise: float = 1.0
    law: Law | None = None
    cohorts: int | None = None
    noise: Noise = "independent"
    clipping: ClippingName | Clipping = "flat"

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        then = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        if self._first == "next":
            if self.first_batch_size not in (None, self.batch_size) or self.first_noise != 1.0:
                raise ValueError(
                    "first_batch_size, first_noise: in turns, under random allocation or correlated noise, the "
                    "first release is like all others; leave both out."
                )
            return (slot_of("next", then, steps, self.noise, self.law),)
        first = sampling_of(self.sampling, n_public, self.first_batch_size or self.batch_size)
        slots = [Slot("first", first, 1, noise=self.first_noise)]
        if steps > 1:
            slots.append(slot_of("next", then, steps - 1, law=self.law))
        return tuple(slots)

    @property
    def _first(self) -> str:
        """The slot of the first release: its own, unless all releases together are one thing."""
        return "first" if first_apart(self.sampling, self.cohorts, self.noise) else "next"

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        if state.value is None or state.previous is None:
            total = session.release(self._first, GradientQuery(params, self.clip, self._clipping))
            total *= 1.0 / session.expected_batch(self._first)
            return Estimate(total, params, 0.0, 1)
        total = session.release("next", self._query(params, state.previous))
        total *= 1.0 / session.expected_batch("next")
        total += (1.0 - self.gamma) * state.value
        return Estimate(total, params, 0.0, state.calls + 1)

    def _query(self, params: Vector, previous: Vector) -> Query:
        if self.joint_clip:
            return JointMomentumQuery(params, previous, self.gamma, self.difference_clip, self._clipping)
        difference_clip = self.difference_clip
        if self.smoothness is not None:
            difference_clip = following_clip(min(difference_clip, self.smoothness * norm(params - previous)))
        return RecursiveMomentumQuery(params, previous, self.gamma, self.clip, difference_clip, self._clipping)

    @property
    def _clipping(self) -> Clipping:
        return read_clipping(self.clipping)

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        yield self._first, Asked(GradientQuery(params, self.clip, self._clipping))
        varies = {"difference_clip": (0.0, self.difference_clip)}
        adaptive = self.smoothness is not None and not self.joint_clip
        yield "next", Asked(self._query(params, params), varies if adaptive else {})


ORACLES: dict[str, type[Oracle]] = {
    "adaptive-spider": AdaptiveSpider,
    "spider": Spider,
    "mini-batch": MiniBatch,
}
"""Each class by its name on the command line and in plan files; the first is the default."""


def oracle_class(name: object, kind: type = object) -> type[Oracle]:
    """The class called ``name``, which results name as Python does; it must be a ``kind``.

    >>> oracle_class("mini-batch") is oracle_class("MiniBatch")
    True
    """
    classes = {**ORACLES, **{cls.__name__: cls for cls in ORACLES.values()}}
    found = classes.get(name) if isinstance(name, str) else None
    if found is None or not issubclass(found, kind):
        wanted = [each for each, cls in ORACLES.items() if issubclass(cls, kind)]
        raise ValueError(f"oracle {name!r}: must be {' or '.join(wanted)} here.")
    return found


def make_oracle(given: object, kind: type = object) -> Oracle:
    """The oracle that a name, or a table of a ``name`` and settings, describes; it must be a ``kind``.

    >>> make_oracle({"name": "adaptive-spider", "kappa": 3.0}).kappa
    3.0
    """
    if not isinstance(given, str | Mapping):
        raise ValueError(f"oracle={given!r}: must be a name, or a table of a name and settings.")
    values = {"name": given} if isinstance(given, str) else dict(given)
    name = values.pop("name", next(iter(ORACLES)))
    made: Oracle = settings.build_dataclass(f"oracle {name}", oracle_class(name, kind), values, hidden=("law",))
    return made
