"""Private ranges of features and targets before a fit, as slots of its plan; and releases of cell sums alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import DataError, TooNoisyError
from quietgrad.core.plans.method import config_of
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.settings import Within, check_fields
from quietgrad.methods.base import Algorithm, State
from quietgrad.tables.histogram_decoding import (
    middle_octave,
    read_counts,
    read_ends,
    read_magnitudes,
    read_octaves,
    read_pieces,
    read_target,
)
from quietgrad.tables.queries.counts import CellSums
from quietgrad.tables.range_queries import (
    FEW_PIECES,
    PIECES,
    FeatureBox,
    MagnitudeHistogram,
    MeanOctaves,
    NoFeatures,
    RangeHistogram,
    TargetMagnitudeHistogram,
    TargetRangeHistogram,
)
from quietgrad.tables.table import Floats

Bounds = tuple[float, float]
Share = Annotated[float, Within(0.0, 0.5)]
_BY_FAR = 0.25
_SEVERAL_SCALES = 8.0  # far end over near end: a declared range of one sign and more than three octaves is wide


@dataclass(frozen=True)
class RangeEstimation:
    """Declared feature ranges, and the budget shares for estimating the missing ones.

    Args:
        features: public (low, high) of each feature, ``None`` where it must be found; ``None`` for all of them.
        target: public (low, high) of the targets.
        ranges: how each feature is given a limit: by a histogram of its own (``"each"``); by one ``"pooled"``
            histogram for all; or by that and each feature's ``"means"`` of octaves. ``"relative"`` narrows wide
            declared ranges all alike, by one histogram of values in units of their limits.
        range_share: part of the squared budget μ² spent on the histograms; 0 for no release.
        offset_share: part of μ² spent on each release of offsets; 0 for no release.
        octave_share: part of μ² spent on mean octaves; 0 for no release.
        target_share: part of μ² spent on the target's range; 0 for no release.
        closer: how often the offsets are estimated, each time within what was found before: a date of a few years
            among seconds since 1970 is found in three releases.
        sparse: rows whose zeros are not stored: no feature is shifted.
        counts: whether targets are counts ≥ 0: their limit and about their mean are found, also below a declared
            limit.
        whole: whether no tail of a feature or target may be cut off, however far: the standard errors that were
            asked for are about the rows as they are.
        whole_target: the same of targets alone: standard errors of clipped features are still about all targets.
        refine: whether wide declared ranges are refined as well: most values may keep to a small part of one.
    """

    features: tuple[Bounds | None, ...] | None = None
    target: Bounds | None = None
    ranges: Literal["each", "means", "pooled", "relative"] = "each"
    range_share: Share = 0.0
    offset_share: Share = 0.0
    octave_share: Share = 0.0
    target_share: Share = 0.0
    closer: Annotated[int, Within(1, 3, whole=True)] = 1
    sparse: bool = False
    refine: bool = False
    whole: bool = False
    whole_target: bool = False
    counts: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.features is not None:
            pairs = tuple(
                None if pair is None else checked_bounds("feature_bounds", pair) for pair in self.features
            )
            object.__setattr__(self, "features", pairs)
        if self.target is not None:
            object.__setattr__(self, "target", checked_bounds("target_bounds", self.target))

    def to_estimate(self, features: int) -> npt.NDArray[np.int64]:
        """Positions of the features whose size is asked for: the undeclared, and with ``refine`` the wide ones."""

        def is_wide(low: float, high: float) -> bool:
            """Whether a declared range is wider than an indicator or than the values of one scale would need."""
            near, far = sorted((abs(low), abs(high)))
            if low <= 0.0 <= high:
                return far > 1.0
            # What narrows all ranges alike could leave one of a single sign without its values.
            return self.ranges != "relative" and far > _SEVERAL_SCALES * near

        declared = self.features if self.features is not None else (None,) * features
        return np.flatnonzero([pair is None or (self.refine and is_wide(*pair)) for pair in declared])

    def shares(self) -> dict[str, float]:
        """The slots that are added, with their shares."""
        half = 0.0 if self.keeps_targets or self.counts else self.target_share / 2.0
        named = {"ranges": self.range_share, **dict.fromkeys(self.offset_slots, self.offset_share)}
        named |= {"octaves": self.octave_share, "targets": self.target_share - half, "target-bins": half}
        return {name: share for name, share in named.items() if share}

    @property
    def keeps_targets(self) -> bool:
        """Whether no target may be cut off."""
        return self.whole or self.whole_target

    @property
    def regression(self) -> bool:
        """Whether targets are numbers."""
        return self.target is not None or self.target_share > 0.0

    @property
    def offset_slots(self) -> tuple[str, ...]:
        """The slots of the releases of offsets, in turn."""
        return tuple("offsets" if k == 0 else f"offsets-{k + 1}" for k in range(self.closer))

    def config(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return config_of(self)


def range_estimation_from_json(given: object) -> RangeEstimation | None:
    """Range estimation as plan files and saved runs hold it."""
    if given is None or isinstance(given, RangeEstimation) or str(given).strip().lower() in ("none", ""):
        return given if isinstance(given, RangeEstimation) else None
    if not isinstance(given, Mapping):
        raise ValueError("look: must be a table of settings such as ranges and range_share, or none.")
    if unknown := sorted(set(map(str, given)) - {f.name for f in fields(RangeEstimation)}):
        raise ValueError(f"look has no setting {', '.join(unknown)}.")
    return RangeEstimation(**given)


def checked_bounds(name: str, pair: object) -> Bounds:
    """(low, high) as floats, low < high, both finite and far from what float64 can hold.

    A public norm, ``{"centre": c, "spread": s}``, stands for three spreads around its centre.
    """
    if isinstance(pair, Mapping):
        if set(pair) != {"centre", "spread"}:
            raise ValueError(f"{name}: a public norm must have a centre and a spread.")
        centre, spread = float(pair["centre"]), float(pair["spread"])
        pair = (centre - 3.0 * spread, centre + 3.0 * spread)
    try:
        low, high = np.asarray(pair, np.float64).tolist()
    except (TypeError, ValueError):
        raise ValueError(f"{name}: each must be a pair (low, high) of numbers.") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high and max(-low, high) < 1e150):
        raise ValueError(f"{name}=({low:g}, {high:g}): must be low < high, both finite and public.")
    return low, high


def relation_of(session: Session) -> Relation:
    """The neighbouring relation of the session's plan."""
    return Relation.ADD_REMOVE if session.plan.budget is None else session.plan.budget.relation


def noise_of(session: Session, slot: str, bound: float) -> float:
    """The deviation of the noise on each number of a release of ``slot``."""
    return session.plan.schedule[slot].multiplier(session.plan.noise_multiplier) * bound


def estimate_box(look: RangeEstimation, session: Session, features: int, relation: Relation) -> dict[str, Any]:
    """Release what is paid for; the box's limits as plain vectors, and what could not be found."""
    declared = look.features if look.features is not None else (None,) * features
    if len(declared) != features:
        raise DataError(f"feature_bounds: has {len(declared)} pairs, must have one per feature ({features}).")
    low = np.array([-1.0 if pair is None else pair[0] for pair in declared])
    high = np.array([1.0 if pair is None else pair[1] for pair in declared])
    to_estimate = look.to_estimate(features)
    hidden = 0
    out: dict[str, Any] = {}
    if len(to_estimate) and look.range_share:
        new_low, new_high, hidden = _found_ranges(
            look, session, relation, to_estimate, low.copy(), high.copy(), out
        )
        known = np.array([pair is not None for pair in declared])
        inner_low, inner_high = np.maximum(low, new_low), np.minimum(high, new_high)
        # Values that lie outside of a declared range of one sign say nothing of where in it the others are.
        keep = known & (inner_low >= inner_high)
        low = np.where(keep, low, np.where(known, inner_low, new_low))
        high = np.where(keep, high, np.where(known, inner_high, new_high))
    if look.sparse:
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    out |= {"low": low, "high": high, "hidden_features": hidden}
    return out | _found_target(look, session, relation)


def _found_ranges(
    look: RangeEstimation,
    session: Session,
    relation: Relation,
    unknown: npt.NDArray[np.int64],
    low: Floats,
    high: Floats,
    out: dict[str, Any],
) -> tuple[Floats, Floats, int]:
    """Fill in the limits of the ``unknown`` features; also return how many do not exceed the noise.

    ``out`` gets the histogram itself, where each feature has its own: a first idea of where values lie.
    """
    declared = np.flatnonzero([pair is not None for pair in look.features or ()])
    reached = np.maximum(-low[unknown], high[unknown]) if look.ranges == "relative" else None
    query = MagnitudeHistogram(unknown, relation, pooled=look.ranges != "each", units=reached)
    counts = query.counts(session.release("ranges", query))
    noise = noise_of(session, "ranges", query.bound)
    # A regression is seldom whitened by a whole matrix: what is scaled too small in it stays so.
    n = None if look.ranges != "each" else session.expected_batch("ranges")
    found = read_magnitudes(counts, noise, n=n, whole=look.whole, sparse=look.sparse, tight=look.regression)
    reach, hidden = found.reach, int((~found.seen).sum())
    if reached is not None:
        narrower = reached * (min(float(reach[0]), 1.0) if found.seen[0] else 1.0)
        low[unknown], high[unknown] = np.maximum(low[unknown], -narrower), np.minimum(high[unknown], narrower)
        return low, high, 0
    if look.ranges == "each":
        out |= {"pilot_at": unknown, "pilot": counts, "pilot_noise": noise}
    if look.refine:  # what does not stand out keeps its declared range
        reach = np.where(found.seen | ~np.isin(unknown, declared), reach, np.inf)
    if look.ranges == "means":
        means = MeanOctaves(unknown, middle_octave(counts))
        n = session.expected_batch("octaves")
        released = session.release("octaves", means) / n
        reach = read_octaves(released, noise_of(session, "octaves", means.bound) / n, means.centre)
    elif look.ranges == "pooled":
        hidden = len(unknown)
    high[unknown], low[unknown] = reach, -reach
    if look.offset_share and look.ranges == "each":
        free = ~np.isin(unknown[found.offsets], declared)
        chosen, near, far = unknown[found.offsets][free], found.low[free], found.high[free]
        asked = len(chosen) > 0
        # One release alone is a noisy one: with few bins each of them holds more.
        count = FEW_PIECES if look.closer == 1 else PIECES
        for again, slot in enumerate(look.offset_slots):
            if not asked:  # released all the same: how many releases a run makes must not follow from the data
                session.release(slot, NoFeatures(relation, count))
                continue
            pieces = RangeHistogram(chosen, near, far, relation, count)
            inner = session.release(slot, pieces).reshape(-1, count)
            nearer, closer = read_pieces(inner, noise_of(session, slot, pieces.bound), near, far)
            # Each release may cut a tail off: a later one is believed only where it narrows the interval by far.
            use = (closer - nearer <= _BY_FAR * (far - near)) | (again == 0)
            near, far = np.where(use, nearer, near), np.where(use, closer, far)
        if asked and not look.sparse:
            low[chosen], high[chosen] = near, far
    return low, high, hidden


def _found_target(look: RangeEstimation, session: Session, relation: Relation) -> dict[str, float]:
    """The limits of the targets, declared or released; of counts, about their mean and their spread besides."""
    charged = "The whole budget of this run was charged, because the stop depends on a release."
    query = TargetMagnitudeHistogram(relation)
    if look.counts:
        found = read_counts(session.release("targets", query), noise_of(session, "targets", query.bound))
        if found is None:
            raise TooNoisyError(f"y: no counts stand out of the noise. Use more records or a larger ε. {charged}")
        most = found.most if look.target is None else min(found.most, look.target[1])
        return {"target_low": 0.0, "target_high": most, "target_unit": found.mean, "target_spread": found.spread}
    limits = look.target
    if limits is None and look.target_share:
        counts = session.release("targets", query)
        limits = read_target(counts, noise_of(session, "targets", query.bound), whole=look.keeps_targets)
        if limits is None:
            raise TooNoisyError(
                "y: no range of the targets stands out of the noise. Pass a public range: target_bounds=(low, "
                f"high). {charged}"
            )
        if not look.keeps_targets:
            pieces = TargetRangeHistogram(*limits, relation)
            counts = session.release("target-bins", pieces)
            noise, everyone = noise_of(session, "target-bins", pieces.bound), session.expected_batch("target-bins")
            limits = read_ends(counts, noise, *limits, everyone)
    return {} if limits is None else {"target_low": limits[0], "target_high": limits[1]}


def box_of(extra: Mapping[str, Any]) -> FeatureBox | None:
    """The box that :func:`estimate_box` found, from a run's state."""
    if "low" not in extra:
        return None
    target = (extra["target_low"], extra["target_high"]) if "target_low" in extra else None
    return FeatureBox(extra["low"], extra["high"], target, extra.get("target_unit"))


@dataclass(frozen=True)
class Ranges(Algorithm):
    """Range estimation, then the releases of ``shares``, which divide the rest; without shares it gets all."""

    look: RangeEstimation
    shares: Mapping[str, float] = field(default_factory=dict)

    name: ClassVar[str] = "ranges"

    def schedule(self, n_public: int) -> Schedule:
        looks, total = self.look.shares(), sum(self.shares.values())
        spent = sum(looks.values())
        if not self.shares:
            looks = {name: share / spent for name, share in looks.items()}
        rest = {name: (1.0 - spent) * share / total for name, share in self.shares.items()}
        slots = [Slot(name, FullBatch(), noise=share**-0.5) for name, share in {**looks, **rest}.items()]
        return Schedule(tuple(slots))

    def step(self, state: State, session: Session) -> State:
        found = estimate_box(self.look, session, len(state.params), relation_of(session))
        state.extra.update(found, feature_range=[found["low"].tolist(), found["high"].tolist()])
        state.step, state.done = 1, True
        return state


@dataclass(frozen=True)
class HistogramRelease(Algorithm):
    """Release the sums of ``cells`` cells, of which a person has one in each of ``groups`` groups."""

    cells: int
    groups: int = 1

    name: ClassVar[str] = "evaluation"

    def schedule(self, n_public: int) -> Schedule:
        return Schedule((Slot("evaluation", FullBatch()),))

    def step(self, state: State, session: Session) -> State:
        query = CellSums(self.cells, self.groups, relation_of(session))
        state.params = session.release("evaluation", query)
        state.extra["noise"] = noise_of(session, "evaluation", query.bound)
        state.step, state.done = 1, True
        return state
