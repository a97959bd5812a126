"""Gradient estimators: mini-batch means, recursive momentum and SPIDER, and the oracles known by name.

*Mini-batch*: the noisy mean of clipped gradients of one sample (DP-SGD, DP-GD).

*Recursive momentum* (paper 000, Algorithm 1): the estimate corrects itself by gradient differences,
v₀ = S₀/b₀ and v_t = (1−γ)v_{t−1} + S_t/b, where S_t is a noisy sum whose terms are
(1−γ) clip_C2(∇fᵢ(θ_t) − ∇fᵢ(θ_{t−1})) + γ clip_C1(∇fᵢ(θ_t)), or with one joint clip
clip_C(∇fᵢ(θ_t) − (1−γ)∇fᵢ(θ_{t−1})).

*SPIDER* (paper 003, Algorithm 2): a full gradient now and then, and gradient differences in between,
ĝ ← O1 = (1/b₁)[Σ clip_G(∇fᵢ(x)) + noise], or ĝ ← ĝ + O2 with O2 = (1/b₂)[Σ clip(∇fᵢ(x) − ∇fᵢ(x′)) + noise].
A difference is clipped to M‖x − x′‖, which is public, so its noise shrinks with the step and its noise multiplier
does not change: every release, O1 or O2, is one Gaussian release of the same multiplier. When two iterates coincide
the difference is zero whatever the data, and nothing is released.

*fresh*: no record is used twice, so by parallel composition the whole run costs one Gaussian release, however many
there are; when the records are used up an :class:`~quietgrad.core.errors.ExhaustedError` says so. *reuse*: Poisson
samples, the numbers of calls capped beforehand, all of them composed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from quietgrad.core import settings
from quietgrad.core.plans.schedule import Law, Slot
from quietgrad.core.sampling import Sampling, SamplingName, SinglePass, sampling_of
from quietgrad.core.session.base import Session
from quietgrad.core.session.queries import (
    LARGEST_CLIP,
    Asked,
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    Query,
    RecursiveMomentumQuery,
    following_clip,
)
from quietgrad.core.settings import Count, Positive
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.oracles.base import (
    Estimate,
    Noise,
    Oracle,
    batch_part,
    constant_of,
    noise_multiplier,
    slot_of,
)
from quietgrad.methods.oracles.error_bounds import EstimateError, chain_error


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

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        sampling = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        return (slot_of("gradient", sampling, steps, self.noise, self.law),)

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        total = session.release("gradient", GradientQuery(params, self.clip))
        total *= 1.0 / session.expected_batch("gradient")
        return Estimate(total, None, 0.0, state.calls + 1)

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        yield "gradient", Asked(GradientQuery(params, self.clip))

    def error(self, session: Session) -> EstimateError:
        """σ ≤ C/√b and r = zC/b; every estimate is a chain of its own."""
        return chain_error(
            (batch_part(session, "gradient", self.clip),),
            noise=noise_multiplier(session),
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
        if state.value is None:
            total = session.release(self._first, GradientQuery(params, self.clip))
            total *= 1.0 / session.expected_batch(self._first)
            return Estimate(total, params, 0.0, 1)
        total = session.release("next", self._query(params, state.previous))
        total *= 1.0 / session.expected_batch("next")
        total += (1.0 - self.gamma) * state.value
        return Estimate(total, params, 0.0, state.calls + 1)

    def _query(self, params: Vector, previous: Vector) -> Query:
        if self.joint_clip:
            return JointMomentumQuery(params, previous, self.gamma, self.difference_clip)
        difference_clip = self.difference_clip
        if self.smoothness is not None:
            difference_clip = following_clip(min(difference_clip, self.smoothness * norm(params - previous)))
        return RecursiveMomentumQuery(params, previous, self.gamma, self.clip, difference_clip)

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        yield self._first, Asked(GradientQuery(params, self.clip))
        varies = {"difference_clip": (0.0, self.difference_clip)}
        adaptive = self.smoothness is not None and not self.joint_clip
        yield "next", Asked(self._query(params, params), varies if adaptive else {})


Regime = Literal["fresh", "reuse"]


@dataclass(frozen=True)
class AdaptiveSpider(Oracle):
    """SPIDER that asks a full query when the drift Σ‖x_t − x_{t−1}‖² since the last one reaches κ.

    Args:
        batch_size: b₁, records of a full query O1 (default n/60).
        difference_batch_size: b₂, records of a difference O2 (default b₁/10).
        clip: G, the bound on one record's gradient (default: the objective's Lipschitz constant).
        smoothness: M; differences are clipped to M‖x − x′‖ (default: the objective's constant).
        difference_clip: a constant that differences are clipped to if that is less.
        regime: ``"fresh"`` (no record twice) or ``"reuse"`` (Poisson samples, capped calls).
        full_queries: cap of O1 calls in the reuse regime (default: a tenth of the steps).
        kappa: κ (default: (G·b₂/(M·b₁))², where the noise gathered by differences equals that of O1).

    >>> oracle = AdaptiveSpider(batch_size=100, difference_batch_size=10, kappa=0.01)
    >>> [(slot.name, slot.count) for slot in oracle.slots(n_public=1000, steps=50)]
    [('o1', 10), ('o2', 50)]
    """

    batch_size: Count | None = None
    difference_batch_size: Count | None = None
    clip: Positive | None = None
    smoothness: Positive | None = None
    difference_clip: Positive | None = None
    regime: Regime = "fresh"
    full_queries: Count | None = None
    kappa: Positive | None = None

    def batches(self, n_public: int) -> tuple[int, int]:
        """(b₁, b₂): as given, else n/60 and a tenth of b₁."""
        full = n_public // 60 if self.batch_size is None else self.batch_size
        if not 1 <= full <= n_public:
            raise ValueError(f"n={n_public}: too small for one full query of batch_size={full or 'n/60'} records.")
        difference = max(1, full // 10) if self.difference_batch_size is None else self.difference_batch_size
        return full, min(difference, n_public)

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        """``o1`` and ``o2``: as many as fresh records allow, or capped calls on Poisson samples."""
        full, difference = self.batches(n_public)
        if self.regime == "fresh":
            samplings: tuple[Sampling, ...] = (SinglePass(n_public, full), SinglePass(n_public, difference))
            counts = (min(steps, n_public // full), min(steps, n_public // difference))
        else:
            samplings = tuple(sampling_of("poisson", n_public, size) for size in (full, difference))
            counts = (min(steps, self.full_queries or math.ceil(steps / 10)), steps)
        return tuple(Slot(*each) for each in zip(("o1", "o2"), samplings, counts, strict=True))

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        """ĝ at ``params``, by O1, O2, or nothing at all if the point has not moved."""
        moved = math.inf if state.value is None else norm(params - state.previous)
        drift = state.drift + moved * moved
        if state.value is None or drift >= self.drift_limit(session):
            total = session.release("o1", GradientQuery(params, self.lipschitz(session)))
            total *= 1.0 / session.expected_batch("o1")
            return Estimate(total, params, 0.0, state.calls + 1)
        if moved == 0.0:
            return state
        bound = self._difference_bound(self.smooth(session) * moved)
        total = session.release("o2", GradientDifferenceQuery(params, state.previous, bound))
        total *= 1.0 / session.expected_batch("o2")
        total += state.value
        return Estimate(total, params, drift, state.calls + 1)

    def _difference_bound(self, bound: float) -> float:
        """M‖x − x′‖, at most ``difference_clip``."""
        return following_clip(min(bound, LARGEST_CLIP if self.difference_clip is None else self.difference_clip))

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """A full query with its clip; differences with the clip that the step gives."""
        yield "o1", Asked(GradientQuery(params, self.lipschitz(session)))
        most = self._difference_bound(LARGEST_CLIP)
        yield "o2", Asked(GradientDifferenceQuery(params, params, most), {"clip": (0.0, most)})

    def lipschitz(self, session: Session) -> float:
        """G: the clip, or the loss's own constant."""
        return constant_of("clip", "lipschitz", self.clip, session)

    def smooth(self, session: Session) -> float:
        """M: as given, or the loss's own constant."""
        return constant_of("smoothness", "record_smoothness", self.smoothness, session)

    def drift_limit(self, session: Session) -> float:
        """κ."""
        if self.kappa is not None:
            return self.kappa
        full, difference = self.batches(session.plan.n_public)
        return (self.lipschitz(session) * difference / (self.smooth(session) * full)) ** 2

    def error(self, session: Session) -> EstimateError:
        """Lemma 7 with its constants: σ² = G²/b₁ + M²κ/b₂ and r² = (zG/b₁)² + (zM/b₂)²κ."""
        drifted = self.smooth(session) * math.sqrt(self.drift_limit(session))
        return chain_error(
            (batch_part(session, "o1", self.lipschitz(session)), batch_part(session, "o2", drifted)),
            noise=noise_multiplier(session),
            chains=session.plan.schedule["o1"].count,
        )


ORACLES: dict[str, type[Oracle]] = {"adaptive-spider": AdaptiveSpider, "mini-batch": MiniBatch}
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
