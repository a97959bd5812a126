"""SPIDER: full gradients now and then, gradient differences in between, each kind with noise of its own.

*The estimate* (paper 003, Algorithm 2; DP-SpiderBoost, arXiv 2206.00846; DIFF2, arXiv 2302.03884):
ĝ ← O1 = (1/b₁)[Σ clip_G(∇fᵢ(x)) + noise], or ĝ ← ĝ + O2 with O2 = (1/b₂)[Σ clip(∇fᵢ(x) − ∇fᵢ(x′)) + noise].
A difference is clipped to M‖x − x′‖. That number is public, since x and x′ follow from earlier releases.

*Privacy.* O1 is a Gaussian release of bound G and noise multiplier z₁, O2 one of bound M‖x − x′‖ and multiplier z₂.
The noise of O2 shrinks with the step and its multiplier does not, so what a release costs is known before the run:
K releases of z₁ in the slot ``o1`` and N of z₂ in ``o2``, composed. A restart is a release of ``o1``; a run that
has made K of them is refused one more. When two iterates coincide the difference is zero whatever the data, and
nothing is released.

*fresh*: no record is used twice. A record is then in one release of one slot, so the run costs the dearer of one O1
and one O2, and two multipliers would waste the louder: both are equal. *reuse*: all releases compose.

*The split.* Let releases ask all n records. They cost μ² = K/z₁² + N/z₂² (Gaussian DP, exact). If O1 has the share
s of μ², then z₁ = √(K/s)/μ and z₂ = √(N/(1−s))/μ. After a chain of steps with Σ‖x − x′‖² ≤ κ a coordinate of ĝ has
the noise variance

    (G z₁/n)² + κ(M z₂/n)² = (1/nμ)²·[G²K/s + M²κN/(1−s)],   least at s = G√K ÷ (G√K + M√(κN)),

by Cauchy and Schwarz; there it is (G√K + M√(κN))²/(nμ)². A path of length P in N equal steps and K chains has
κ = P²/(KN), so that with R = G/(M·P)

    s = KR/(1 + KR),   √variance = (G√K + M·P/√K)/(nμ),   least at K = 1/R or, where R ≥ 1, at K = 1.

On samples of rate q a release weighs (q/z)² instead of 1/z² (the central limit of Gaussian DP); that chooses the
split and prices nothing. One multiplier for both kinds is the share s = K/(K + N), far from the least where N ≫ K.

*Correlated differences* (adaptive batches and trees, arXiv 2410.07502). ĝ is a sum of all differences since O1, and
noise that later releases take back makes such sums quieter: its variance grows like log²N instead of N. Differences
then have a constant clip, since noise cancels only if it is scaled alike. Full gradients in between have
independent noise; ``docs/correlated-proof.md`` shows that both compose.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from quietgrad.core.errors import SettingError
from quietgrad.core.noise.correlated import CorrelatedNoise
from quietgrad.core.plans.schedule import Slot
from quietgrad.core.plans.slots import Law
from quietgrad.core.sampling import FullBatch, Sampling, SamplingName, SinglePass, sampling_of
from quietgrad.core.session.base import Session
from quietgrad.core.session.contributions import LARGEST_CLIP, following_clip
from quietgrad.core.session.queries import Asked, GradientDifferenceQuery, GradientQuery
from quietgrad.core.settings import Count, Within
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.oracles.base import Estimate, Noise, Oracle, batch_part, constant_of, slot_of
from quietgrad.methods.oracles.error_bounds import EstimateError, chain_error

Regime = Literal["fresh", "reuse"]
_LEAST_SHARE = 1e-9
Share = Annotated[float, Within(_LEAST_SHARE, 1.0 - _LEAST_SHARE)]
"""A share of the budget that leaves something for either kind of release."""
Finite = Annotated[float, Within(0.0, sys.float_info.max, closed=False)]


def split_for(ratio: float, full_gradients: int = 1) -> float:
    """The share of μ² that full gradients should have, KR/(1 + KR): see the module's text.

    Args:
        ratio: R = G/(M·path).
        full_gradients: K.

    >>> split_for(6.0), split_for(0.25, full_gradients=4)
    (0.8571428571428571, 0.5)
    """
    return full_gradients * ratio / (1.0 + full_gradients * ratio)


def checked_share(share: float, name: str, value: float) -> float:
    """Return a share of the budget that a setting implies; raise if one kind of release would get next to none."""
    if not _LEAST_SHARE <= share <= 1.0 - _LEAST_SHARE:
        raise SettingError(
            f"{{{name}}}: with this clip and smoothness, full gradients get the share {share:.2g} of the budget. "
            "Use a realistic value, or state split.",
            **{name: value},
        )
    return share


def relative_noise(*parts: tuple[float, int, float]) -> list[float]:
    """Noise multipliers that spend given shares of a budget, relative to the first: q√(count/share) each.

    Args:
        parts: for each slot its sampling rate, its releases, and its share.

    >>> relative_noise((1.0, 1, 0.5), (1.0, 100, 0.5))
    [1.0, 10.0]
    """
    sizes = [rate * math.sqrt(count / share) for rate, count, share in parts]
    return [size / sizes[0] for size in sizes]


class SpiderOracle(Oracle):
    """Base class of both SPIDER oracles. They differ in when a full gradient is due, and in their samples."""

    clip: float | None
    smoothness: float | None
    difference_clip: float | None
    noise: Noise

    @abstractmethod
    def due(self, state: Estimate, drift: float, session: Session) -> bool:
        """Whether the next release is a full gradient."""

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        """ĝ at ``params``, by O1, O2, or nothing at all if the point has not moved."""
        moved = math.inf if state.value is None else norm(params - state.previous)
        drift = state.drift + moved * moved
        if state.value is None or self.due(state, drift, session):
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
        """M‖x − x′‖, at most ``difference_clip``; under correlated noise that constant itself."""
        if self.noise != "independent":
            assert self.difference_clip is not None
            return self.difference_clip
        return following_clip(min(bound, LARGEST_CLIP if self.difference_clip is None else self.difference_clip))

    def check_noise(self) -> None:
        """Raise if differences have other noise than independent one and no constant that they are clipped to."""
        if self.noise != "independent" and self.difference_clip is None:
            raise ValueError(
                f"noise={self.noise!r}: noise other than 'independent' needs difference_clip, one constant for all "
                "differences (M × the longest step). Noise of different scales would not cancel."
            )

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """Yield the full query with its clip, and differences with the clip that the step gives."""
        yield "o1", Asked(GradientQuery(params, self.lipschitz(session)))
        if any(slot.name == "o2" for slot in session.plan.schedule.slots):
            most = self._difference_bound(LARGEST_CLIP)
            varies = {"clip": (0.0, most)} if self.noise == "independent" else {}
            yield "o2", Asked(GradientDifferenceQuery(params, params, most), varies)

    def bound_symbols(self) -> Mapping[str, tuple[str, str]]:
        """G of full gradients; M·step, or the constant clip, of differences."""
        given = "the loss's own"
        full = ("G", f"the clip of gradients, {given if self.clip is None else format(self.clip, 'g')}")
        curved = given if self.smoothness is None else format(self.smoothness, "g")
        most = "" if self.difference_clip is None else f", at most {self.difference_clip:g}"
        moved = ("M·step", f"M = {curved} (smoothness) and step = ‖θ − θ′‖ bound a difference{most}")
        if self.noise != "independent":
            moved = ("C2", f"the clip of differences, {self.difference_clip:g}")
        return {"warm": full, "o1": full, "o2": moved}

    def lipschitz(self, session: Session) -> float:
        """G: the clip, or the loss's own constant."""
        return constant_of("clip", "lipschitz", self.clip, session)

    def smooth(self, session: Session) -> float:
        """M: as given, or the loss's own constant."""
        return constant_of("smoothness", "record_smoothness", self.smoothness, session)


@dataclass(frozen=True)
class AdaptiveSpider(SpiderOracle):
    """SPIDER with full gradients when the drift since the last one reaches κ.

    The drift is Σ‖x_t − x_{t−1}‖².

    Args:
        batch_size: b₁, records of a full query O1 (default n/60).
        difference_batch_size: b₂, records of a difference O2 (default b₁/10).
        clip: G, the bound on one record's gradient (default: the objective's Lipschitz constant).
        smoothness: M; differences are clipped to M‖x − x′‖ (default: the objective's constant).
        difference_clip: a constant that differences are clipped to if that is less.
        regime: ``"fresh"`` (no record twice) or ``"reuse"`` (Poisson samples, capped calls).
        full_queries: cap of O1 calls in the reuse regime (default: a tenth of the steps).
        kappa: κ (default: where the noise gathered by differences equals that of O1).
        split: share of the budget for full queries, in the reuse regime. Default: what theory gives for κ, ``clip``
            and ``smoothness`` if all are given, else one half, which is theory's share at the default κ.
        noise: that of the differences; ``"correlated"`` on fresh records, with ``difference_clip``.

    >>> oracle = AdaptiveSpider(batch_size=100, difference_batch_size=10, kappa=0.01)
    >>> [(slot.name, slot.count) for slot in oracle.slots(n_public=1000, steps=50)]
    [('o1', 10), ('o2', 50)]
    """

    batch_size: Count | None = None
    difference_batch_size: Count | None = None
    clip: Finite | None = None
    smoothness: Finite | None = None
    difference_clip: Finite | None = None
    regime: Regime = "fresh"
    full_queries: Count | None = None
    kappa: Finite | None = None
    split: Share | None = None
    noise: Noise = "independent"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_noise()
        if self.regime == "fresh" and self.split is not None:
            raise ValueError(
                f"split={self.split}: on fresh records a record is in one release only, so both kinds have the "
                "same noise multiplier; leave it out, or use regime='reuse'."
            )
        if self.regime == "reuse" and self.noise != "independent":
            raise ValueError("noise='correlated': needs regime='fresh', where a record takes part once.")

    def batches(self, n_public: int) -> tuple[int, int]:
        """(b₁, b₂): as given, else n/60 and a tenth of b₁."""
        full = n_public // 60 if self.batch_size is None else self.batch_size
        if not 1 <= full <= n_public:
            raise SettingError(
                "{n}: too small for one full query of {batch_size} records.", n=n_public, batch_size=full or "n/60"
            )
        difference = max(1, full // 10) if self.difference_batch_size is None else self.difference_batch_size
        return full, min(difference, n_public)

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        """``o1`` and ``o2``: as many as fresh records allow, or capped calls on Poisson samples."""
        sizes = self.batches(n_public)
        full, difference = sizes
        if self.regime == "fresh":
            counts = (min(steps, n_public // full), min(steps, n_public // difference))
            return (
                Slot("o1", SinglePass(n_public, full), counts[0]),
                slot_of("o2", SinglePass(n_public, difference), counts[1], self.noise),
            )
        counts = (min(steps, self.full_queries or math.ceil(steps / 10)), steps)
        samplings = tuple(sampling_of("poisson", n_public, size) for size in sizes)
        share = self._share(*counts)
        rates = [size / n_public for size in sizes]
        relative = relative_noise((rates[0], counts[0], share), (rates[1], counts[1], 1.0 - share))
        return tuple(
            Slot(name, sampling, count, noise)
            for name, sampling, count, noise in zip(("o1", "o2"), samplings, counts, relative, strict=True)
        )

    def _share(self, full: int, differences: int) -> float:
        """s: as given, else G√K ÷ (G√K + M√(κN)) where all of it is known, else ½."""
        if self.split is not None:
            return self.split
        if self.kappa is None or self.clip is None or self.smoothness is None:
            return 0.5
        own = self.clip * math.sqrt(full)
        share = own / (own + self.smoothness * math.sqrt(self.kappa * differences))
        return checked_share(share, "kappa", self.kappa)

    def due(self, state: Estimate, drift: float, session: Session) -> bool:
        """Whether the point has drifted so far that differences would be as noisy as a full query."""
        return drift >= self.drift_limit(session)

    def drift_limit(self, session: Session) -> float:
        """κ: as given, or where the noise that differences gathered equals that of O1, (z₁G·b₂)²/(z₂M·b₁)²."""
        if self.kappa is not None:
            return self.kappa
        full, difference = (session.plan.schedule[name] for name in ("o1", "o2"))
        sizes = [slot.sampling.expected_batch(session.plan.n_public) for slot in (full, difference)]
        louder = (self.lipschitz(session) * full.noise * sizes[1]) / (
            self.smooth(session) * difference.noise * sizes[0]
        )
        return louder * louder

    def error(self, session: Session) -> EstimateError:
        """Lemma 7 with its constants: σ² = G²/b₁ + M²κ/b₂ and r² = (z₁G/b₁)² + (z₂M/b₂)²κ."""
        drifted = self.smooth(session) * math.sqrt(self.drift_limit(session))
        full = batch_part(session, "o1", self.lipschitz(session))
        differences = batch_part(session, "o2", drifted)
        slot, chains = session.plan.schedule["o2"], session.plan.schedule["o1"].count
        if isinstance(slot.mechanism, CorrelatedNoise):
            assert self.difference_clip is not None
            # A chain hears W_j − W_i, W the sums of the noise so far: no louder than twice the loudest sum. Which i
            # and j follows from the data, so the union is over all pairs.
            loudest = slot.mechanism.factor * float(np.linalg.norm(np.cumsum(slot.mechanism.inverse)))
            scale = differences.noise / slot.mechanism.loudness * self.difference_clip / drifted
            differences = differences._replace(noise=2.0 * loudest * scale)
            chains = slot.count**2
        return chain_error((full, differences), chains=chains)


@dataclass(frozen=True, kw_only=True)
class SpiderSettings:
    """The settings that :class:`Spider` and :class:`~quietgrad.methods.dp_spider.DPSpider` share."""

    period: Count | None = None
    clip: Finite | None = None
    smoothness: Finite | None = None
    difference_clip: Finite | None = None
    split: Share | None = None
    path: Finite | None = None
    batch_size: Count | None = None
    difference_batch_size: Count | None = None
    sampling: SamplingName = "full"
    warm_steps: Annotated[int, Within(0, whole=True)] = 0
    warm_share: Share = 0.5
    cohorts: int | None = None
    noise: Noise = "independent"


@dataclass(frozen=True, kw_only=True)
class Spider(SpiderSettings, SpiderOracle):
    """SPIDER with a full gradient every ``period`` steps.

    An optional start uses plain gradients.

    It states no error, because nothing bounds how far a period drifts.

    Args:
        period: steps from one full gradient to the next (default: one full gradient for the whole run).
        clip, smoothness, difference_clip: as in :class:`AdaptiveSpider`.
        split: s, the share of SPIDER's budget for full gradients (default: from ``path``, else one half).
        path: a public bound on Σ‖x − x′‖, the length of the walk.
        batch_size: expected records of O1; all of them with ``sampling="full"``.
        difference_batch_size: expected records of O2; all of them with ``sampling="full"``.
        sampling: of differences, and of full gradients unless differences take turns: then those ask all records.
        warm_steps: number of plain gradients at the beginning.
        warm_share: share of the budget for these gradients.
        cohorts, noise: as in :class:`~quietgrad.methods.dp_sgd.DPSGD`, of the differences.
        law: of the number of differences, if the number of steps is drawn before the run. Full gradients are then
            paid for as if all were asked.

    >>> [(slot.name, slot.count, round(slot.noise, 2)) for slot in Spider(period=50).slots(1000, steps=100)]
    [('o1', 2, 1.0), ('o2', 98, 7.0)]
    """

    law: Law | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_noise()
        if self.path is not None and self.split is None and (self.clip is None or self.smoothness is None):
            raise ValueError("path: gives the split with clip and smoothness; give those too, or split itself.")

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        """``warm`` gradients, then ``o1`` and ``o2``, their multipliers by the shares."""
        left = steps - self.warm_steps
        if left < 1:
            raise SettingError("{warm_steps}: must be below {steps}.", warm_steps=self.warm_steps, steps=steps)
        full, share = -(-left // (self.period or left)), self.share(steps)
        then = sampling_of(self.sampling, n_public, self.difference_batch_size or self.batch_size, self.cohorts)
        # Turns and passes leave no record for a full gradient of its own: it asks all of them.
        own = then.participation(1) is None and self.sampling != "full"
        first: Sampling = sampling_of(self.sampling, n_public, self.batch_size) if own else FullBatch()
        rest = 1.0 - self.warm_share if self.warm_steps else 1.0
        counts, kinds = [full, left - full], [("o1", first, share * rest), ("o2", then, (1.0 - share) * rest)]
        if left == full:  # period 1: every estimate is a full gradient
            counts, kinds = [full], [("o1", first, rest)]
        if self.warm_steps:
            counts, kinds = [self.warm_steps, *counts], [("warm", first, self.warm_share), *kinds]
        slots = [
            slot_of(name, sampling, count, *((self.noise, self.law) if name == "o2" else ("independent",)))
            for count, (name, sampling, _) in zip(counts, kinds, strict=True)
        ]
        weights = [
            # Correlated releases are together one.
            (slot.sampling.probability, 1 if slot.mechanism.together else slot.count, part)
            for slot, (_, _, part) in zip(slots, kinds, strict=True)
        ]
        return tuple(
            replace(slot, noise=noise) for slot, noise in zip(slots, relative_noise(*weights), strict=True)
        )

    def share(self, steps: int) -> float:
        """s: as given, else KR/(1 + KR) with R = G/(M·path), else ½."""
        if self.split is not None:
            return self.split
        if self.path is None or self.clip is None or self.smoothness is None:
            return 0.5
        left = steps - self.warm_steps
        share = split_for(self.clip / self.smoothness / self.path, -(-left // (self.period or left)))
        return checked_share(share, "path", self.path)

    def due(self, state: Estimate, drift: float, session: Session) -> bool:
        """Whether a period is over."""
        return self.period is not None and (state.calls - self.warm_steps) % self.period == 0

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        """A plain gradient at first; then as in every SPIDER."""
        if state.calls < self.warm_steps:
            total = session.release("warm", GradientQuery(params, self.lipschitz(session)))
            total *= 1.0 / session.expected_batch("warm")
            return Estimate(total, None, 0.0, state.calls + 1)
        if state.previous is None:  # the last plain gradient is no part of a chain
            state = Estimate(calls=state.calls)
        return super().estimate(state, params, session)

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        if self.warm_steps:
            yield "warm", Asked(GradientQuery(params, self.lipschitz(session)))
        yield from super().asks(params, session)
