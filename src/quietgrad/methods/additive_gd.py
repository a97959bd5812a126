"""Additive models in three stages: lines, then the shapes that show in what lines leave over, then pairs.

A part of the budget finds ranges and bins. Full-batch descent on the lines alone comes first, so that a model is
never much worse than a linear one. One release of residuals times waves then says which features bend, one of
residuals times products which pairs act together; whatever does not stand out of noise and sampling is left out.
The rest of the budget fits what is left from where the lines came to. Every release is an un-sampled Gaussian, and
every choice follows from public numbers and earlier releases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from scipy.special import chdtrc

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.session.contributions import following_clip
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.budget_allocation import (
    EASY,
    allocate_range_estimation,
    budget_mu,
    for_table,
    is_crowded,
    range_share_needed,
)
from quietgrad.methods.range_estimation import RangeEstimation, box_of, estimate_box, noise_of, relation_of
from quietgrad.methods.whitened_gd import WhitenedGD
from quietgrad.tables.range_queries import LOWEST, OCTAVES, BoxedQuery, FeatureBins, FeatureBox
from quietgrad.tables.shapes import AdditiveBasis, Expanded, Feature, usual_edges
from quietgrad.tables.table import Affine, Floats
from quietgrad.tables.whitening import WhitenedGradient, Whitening

_LINES = 0.4  # of the steps, and of the budget that trains
_LINES_PREFIX = "lines-"  # of the first descent's slots
_SHAPES, _PAIRS = 0.12, 0.08  # of what range estimation leaves
_LEAST_SIGNAL = 300.0  # below this nμ, shapes of ten columns or fewer are lost in noise: lines alone
_MOST_CELLS = 64
_MOST_PAIRS, _KEPT_PAIRS = 400, 4
_TESTED = 6  # waves of a feature that decide whether it bends
_FEATURE_ALARM, _PAIR_ALARM = 0.5, 0.1  # expected numbers of features and pairs that are kept for nothing
_ASIDE = 1e-3  # scale of columns whose gradient is not asked for
_CLEAR = 0.1  # correlation of a pair with the residual that must be four deviations out of the noise


@dataclass(frozen=True)
class AdditiveGD(Algorithm):
    """Descent on lines, then on lines, shapes and pairs.

    Args:
        features: one per column: its name, and its vocabulary if it is a category; weight 0 for a line alone.
        look: how ranges are estimated.
        bins: of each numeric feature.
        lines: the first descent, which fits straight lines.
        rest: the second descent, which fits shapes; ``None`` for lines alone.
        cell_share: part of μ² for a histogram within the ranges, by which bins are cut.
        pairs: positions of features that act together; ``None`` to find them.
    """

    features: tuple[Feature, ...]
    look: RangeEstimation
    bins: int
    lines: WhitenedGD
    rest: WhitenedGD | None = None
    cell_share: float = 0.0
    pairs: tuple[tuple[int, int], ...] | None = ()

    name: ClassVar[str] = "additive-gd"

    def config(self) -> dict[str, Any]:
        described = {"features": [feature.name for feature in self.features], "bins": self.bins}
        parts = {"look": self.look.config(), "lines": self.lines.config()}
        rest = None if self.rest is None else self.rest.config()
        pairs = "auto" if self.pairs is None else [list(pair) for pair in self.pairs]
        return {**described, **parts, "rest": rest, "cell_share": self.cell_share, "pairs": pairs}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AdditiveGD:
        """The method as its configuration plans it; what is public of the features is not in it."""
        rest, pairs = config["rest"], config["pairs"]
        return cls(
            (),
            RangeEstimation(**config["look"]),
            config["bins"],
            WhitenedGD(**config["lines"]),
            None if rest is None else WhitenedGD(**rest),
            config["cell_share"],
            None if pairs == "auto" else tuple((int(a), int(b)) for a, b in pairs),
        )

    def schedule(self, n_public: int) -> Schedule:
        looks, asked, left = self._shares()
        slots = [Slot(name, FullBatch(), noise=share**-0.5) for name, share in looks.items()]
        if self.rest is None:
            return Schedule((*slots, *_within(self.lines, n_public, _LINES_PREFIX, left)))
        slots += _within(self.lines, n_public, _LINES_PREFIX, _LINES * left)
        slots += [Slot(name, FullBatch(), noise=share**-0.5) for name, share in asked.items()]
        return Schedule((*slots, *_within(self.rest, n_public, "", (1.0 - _LINES) * left)))

    def last_descent(self) -> tuple[WhitenedGD, str, float]:
        """The last descent, what its slots' names begin with in the plan, and its share of μ²."""
        _, _, left = self._shares()
        if self.rest is None:
            return self.lines, _LINES_PREFIX, left
        return self.rest, "", (1.0 - _LINES) * left

    def _shares(self) -> tuple[dict[str, float], dict[str, float], float]:
        """Shares of μ² for ranges and bins, for shapes and pairs, and for both descents together."""
        looks = {**self.look.shares(), **({"cells": self.cell_share} if self.cell_share else {})}
        left = 1.0 - sum(looks.values())
        if self.rest is None:
            return looks, {}, left
        asked = {"shapes": _SHAPES * left, **({"pairs": _PAIRS * left} if self.pairs is None else {})}
        return looks, asked, left - sum(asked.values())

    def step(self, state: State, session: Session) -> State:
        extra, outputs = state.extra, session.objective.outputs
        found = estimate_box(self.look, session, len(self.features), relation_of(session))
        extra.update({name: value for name, value in found.items() if not name.startswith("pilot")})
        frame = box_of(found)
        assert frame is not None
        cut = AdditiveBasis(self._cut(found, frame, session))
        shapes = AdditiveBasis(tuple(replace(feature, weight=0.0) for feature in cut.features))
        start = np.zeros((shapes.columns + 1) * outputs)
        last = self._descend(self.lines, session, _LINES_PREFIX, Expanded(shapes, frame), start)
        line_params = np.asarray(last.params)
        if self.rest is not None:
            lines = _LineFit(shapes, frame, line_params, self.lines.clip)
            kept = self._bent(session, cut, lines)
            pairs = self.pairs if self.pairs is not None else self._acting(session, cut, lines)
            both = AdditiveBasis(kept, pairs)
            start = both.embed(line_params, shapes, outputs)
            crowded = both.columns > EASY or is_crowded(
                session.expected_batch("gradient"), both.columns, session.plan.budget, self.look.regression, 2.0
            )
            rest = replace(self.rest, moments="diagonal" if crowded else "full")
            last, shapes = self._descend(rest, session, "", Expanded(both, frame), start), both
        extra["feature_range"] = [frame.low.tolist(), frame.high.tolist()]
        extra["target_range"] = None if frame.target is None else list(frame.target)
        extra["shape_map"], extra["noise_covariance"] = shapes.to_json(), last.extra["noise_covariance"]
        extra["silent_features"] = last.extra.get("silent_features", 0)
        state.params, state.step, state.done = last.params, 1, True
        return state

    def _descend(self, method: WhitenedGD, session: Session, slots: str, view: Expanded, start: Floats) -> State:
        """All steps of one descent, on the records as ``view`` shows them."""
        state = method.init(start)
        inside: Any = _Stage(session, slots, view)
        while not state.done:
            state = method.step(state, inside)
        return state

    # --- bins ---------------------------------------------------------------------------------------------------

    def _cut(self, found: Mapping[str, Any], frame: FeatureBox, session: Session) -> tuple[Feature, ...]:
        """The features with their ranges and bins."""
        relation = relation_of(session)
        ranged = [
            f if f.values else replace(f, low=float(frame.low[j]), high=float(frame.high[j]))
            for j, f in enumerate(self.features)
        ]
        numeric = np.array([j for j, f in enumerate(ranged) if not f.values and f.weight], dtype=np.int64)
        for j, f in enumerate(ranged):
            if not f.values and not f.weight:  # zero or one
                ranged[j] = replace(f, cuts=(f.low, 0.5 * (f.low + f.high), f.high))
        if not len(numeric):
            return tuple(ranged)
        # Bins may lie in the declared range, else in the one that was found.
        declared = self.look.features or (None,) * len(ranged)
        outer = [declared[j] or (ranged[j].low, ranged[j].high) for j in numeric.tolist()]
        usual = [usual_edges(low, high, self.bins) for low, high in outer]
        if not self.cell_share:
            for j, edges in zip(numeric.tolist(), usual, strict=True):
                ranged[j] = replace(ranged[j], cuts=tuple(edges.tolist()))
            return tuple(ranged)
        sigma = noise_of(session, "cells", FeatureBins(numeric, np.zeros((1, 2)), relation).bound)
        clear = session.expected_batch("cells") / max(sigma, 1e-9)
        cells = int(min(_MOST_CELLS, max(2 * self.bins, clear / 6.0)))
        pilots = {int(j): row for j, row in zip(found.get("pilot_at", ()), found.get("pilot", ()), strict=True)}
        noise = float(found.get("pilot_noise", 0.0))
        edges_of = [
            _cells(low, high, pilots.get(int(j)), noise, cells)
            for j, (low, high) in zip(numeric, outer, strict=True)
        ]
        counts = session.release("cells", FeatureBins(numeric, np.stack(edges_of), relation)).reshape(-1, cells)
        for j, edges, plain, row in zip(numeric.tolist(), edges_of, usual, counts, strict=True):
            cuts, mass = _binned(edges, row, sigma, self.bins)
            spread = _mass(edges, np.maximum(row, 0.0), plain)
            if clear < 6.0 * self.bins and _effective(spread) >= 0.4 * self.bins:
                cuts, mass = plain, spread
            ranged[j] = replace(ranged[j], cuts=tuple(cuts.tolist()), mass=tuple(mass.tolist()))
        return tuple(ranged)

    # --- shapes and pairs ---------------------------------------------------------------------------------------

    def _bent(self, session: Session, cut: AdditiveBasis, lines: _LineFit) -> tuple[Feature, ...]:
        """The features, with waves where they show, weighted by how clearly."""
        groups = [
            slice(part.start + 1, min(part.stop, part.start + 1 + _TESTED))
            for f, part in zip(cut.features, cut.parts(), strict=True)
            if not f.values and f.width > 1
        ]
        sizes = np.zeros(cut.columns)
        for f, part in zip(cut.features, cut.parts(), strict=True):
            if not f.values and f.width > 1:
                sizes[part.start + 1 : part.stop] = f.wave_sizes
        ratios, chances = lines.tested("shapes", session, cut, groups, sizes)
        kept = []
        verdicts = iter(zip(ratios, chances, strict=True))
        for f in cut.features:
            if f.values or f.width == 1:
                kept.append(f)
                continue
            ratio, chance = next(verdicts)
            weight = 1.0 - 1.0 / ratio if chance < _FEATURE_ALARM / len(groups) else 0.0
            kept.append(replace(f, weight=float(max(weight, 0.0))))
        return tuple(kept)

    def _acting(self, session: Session, cut: AdditiveBasis, lines: _LineFit) -> tuple[tuple[int, int], ...]:
        """The pairs of numeric features whose product shows in the residuals, at most four."""
        pairs = tuple(itertools.combinations([j for j, f in enumerate(cut.features) if not f.values], 2))
        products = AdditiveBasis(lines.shapes.features, pairs, functions=1)
        groups = list(products.parts()[len(cut.features) :])
        sizes = np.zeros(products.columns)
        sizes[lines.shapes.columns :] = 1.0 / 16.0
        ratios, chances = lines.tested("pairs", session, products, groups, sizes)
        clear = [k for k in np.argsort(-ratios) if chances[k] < _PAIR_ALARM / len(pairs)]
        return tuple(pairs[k] for k in clear[:_KEPT_PAIRS])


@dataclass(frozen=True, eq=False)
class _LineFit:
    """The fitted lines, whose residuals tell what they leave over."""

    shapes: AdditiveBasis
    frame: FeatureBox
    params: Floats
    clip: float

    def tested(
        self, slot: str, session: Session, shapes: AdditiveBasis, groups: list[slice], sizes: Floats
    ) -> tuple[Floats, Floats]:
        """By group of columns: χ² of its gradient at the lines, by degrees of freedom, and its chance under noise.

        ``sizes`` are mean squares of the columns that are asked about. A record moves a mean by no more than its
        clip, which bounds what sampling alone does; where many groups show less than that, their median does.
        """
        outputs, column = session.objective.outputs, session.objective.column
        radius = math.sqrt(float(sizes.sum()) + column**2)
        clip = following_clip(self.clip * radius)
        scale = np.where(sizes > 0.0, 1.0, _ASIDE)
        whitening = Whitening(Affine(np.zeros(shapes.columns), scale), column, outputs, radius)
        inner = whitening.from_raw(shapes.embed(self.params, self.shapes, outputs))
        query = BoxedQuery(WhitenedGradient(inner, clip, whitening), Expanded(shapes, self.frame))
        n = session.expected_batch(slot)
        gradient = session.release(slot, query).reshape(-1, outputs) / n
        noise = (noise_of(session, slot, clip) / n) ** 2
        residual = (clip / radius) ** 2 if session.objective.task == "regression" else 0.25
        null = noise + residual * np.maximum(sizes, 1e-12) / n
        ratios = np.array([float((gradient[g] ** 2 / null[g, None]).mean()) for g in groups])
        if len(groups) >= 5:
            least = np.array([noise / float(null[g].mean()) for g in groups])
            ratios = ratios / np.clip(np.median(ratios), least, 1.0)
        freedom = np.array([(g.stop - g.start) * outputs for g in groups], dtype=np.float64)
        return ratios, np.asarray(chdtrc(freedom, ratios * freedom))


class _Stage:
    """A session as one descent sees it: its slots by their names in the plan, its records as a view."""

    def __init__(self, session: Session, slots: str, view: Expanded) -> None:
        self._session, self._slots, self._view = session, slots, view
        self.objective, self.regularizer = session.objective, session.regularizer
        plan = session.plan
        self.plan = SimpleNamespace(budget=plan.budget, noise_multiplier=plan.noise_multiplier, schedule=self)

    def __getitem__(self, slot: str) -> Slot:
        return self._session.plan.schedule[self._slots + slot]

    def expected_batch(self, slot: str) -> float:
        """That of the plan."""
        return self._session.expected_batch(self._slots + slot)

    def release(self, slot: str, query: Query) -> OwnVector:
        """The release of the plan."""
        return self._session.release(self._slots + slot, BoxedQuery(query, self._view))


def _within(method: WhitenedGD, n: int, prefix: str, share: float) -> list[Slot]:
    """The slots of a method that has ``share`` of the budget."""
    slots = method.schedule(n).slots
    return [replace(s, name=prefix + s.name, noise=s.noise / math.sqrt(share)) for s in slots]


def _cells(low: float, high: float, pilot: Floats | None, noise: float, cells: int) -> Floats:
    """Edges of cells in [low, high]: half by what a histogram of signs and octaves shows, half the usual ones."""
    fine = usual_edges(low, high, 8 * cells)
    places = np.linspace(0.0, 1.0, len(fine))
    if pilot is not None:
        tops = np.exp2(np.arange(OCTAVES) + float(LOWEST))
        edges = np.concatenate([-tops[::-1], -tops[:1] / 2.0, tops[:1] / 2.0, tops])
        mass = np.concatenate([pilot[1][::-1], [0.0], pilot[0]])
        mass = np.where(mass > 2.5 * noise, mass, 0.0)
        if mass.sum() > 0.0:
            sums = np.concatenate([[0.0], np.cumsum(mass)]) / mass.sum()
            points = np.union1d(fine, edges[(edges > low) & (edges < high)])
            inside = np.interp(points, edges, sums)
            total = max(float(inside[-1] - inside[0]), 1e-12)
            measure = 0.5 * (inside - inside[0]) / total + 0.5 * np.interp(points, fine, places)
            fine, places = points, measure
    return np.interp(np.linspace(0.0, 1.0, cells + 1), places, fine)


def _binned(edges: Floats, counts: Floats, sigma: float, bins: int) -> tuple[Floats, Floats]:
    """Bins made of cells: equal in half the mass and half the occupied cells; and their masses."""
    mass = np.where(counts > 1.5 * sigma, counts, 0.0)
    mass = mass if mass.sum() > 0.0 else np.ones(len(counts))
    measure = 0.5 * mass / mass.sum() + 0.5 * (mass > 0.0) / (mass > 0.0).sum()
    sums = np.concatenate([[0.0], np.cumsum(measure)])
    at = np.unique(np.searchsorted(sums, np.linspace(0.0, 1.0, bins + 1)[1:-1] - 1e-9))
    at = np.unique(np.concatenate([[0], at[(at > 0) & (at < len(counts))], [len(counts)]]))
    cuts = edges[at]
    return cuts, _mass(edges, mass, cuts)


def _mass(edges: Floats, counts: Floats, cuts: Floats) -> Floats:
    """Parts of the records in each bin, evenly spread inside cells."""
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    parts = np.diff(np.interp(cuts, edges, sums))
    return np.asarray(parts / parts.sum()) if parts.sum() > 0.0 else np.full(len(parts), 1.0 / len(parts))


def _effective(mass: Floats) -> float:
    """How many bins hold the records: exp of the entropy."""
    kept = mass[mass > 0.0]
    return math.exp(-float((kept * np.log(kept)).sum()))


def for_shapes(
    n: int,
    features: tuple[Feature, ...],
    *,
    budget: Budget,
    bins: int,
    bounds: tuple[tuple[float, float] | None, ...],
    outputs: int = 1,
    pairs: tuple[tuple[int, int], ...] | None = (),
    regression: bool = False,
    target_bounds: tuple[float, float] | None = None,
) -> AdditiveGD:
    """The additive method for ``n`` records within ``budget``: what a table cannot repay is not bought."""
    mu = budget_mu(budget)
    look = allocate_range_estimation(
        n, len(features), budget=budget, feature_bounds=bounds, regression=regression, target_bounds=target_bounds
    )
    numeric = sum(not feature.values for feature in features)
    needed = range_share_needed(n, max(numeric, 1), mu)
    columns = sum(len(feature.values) or 1 for feature in features)
    shown = for_table(
        n, columns, budget=budget, outputs=outputs, feature_bounds=[(-1.0, 1.0)] * columns, inference=False,
        regression=regression, target_bounds=(-2.0, 2.0) if regression else None, expanded=True,
    )  # fmt: skip
    shown = replace(shown, look=None, bands=True)
    few = n * mu < _LEAST_SIGNAL * max(1.0, math.sqrt(columns / 10.0))
    if (few and not pairs) or not numeric:  # pairs that were named are fitted
        return AdditiveGD(features, look, bins, shown, pairs=())
    count = numeric * (numeric - 1) // 2
    clear = _CLEAR * n * mu * math.sqrt(_PAIRS) > 4.0 * math.sqrt(count)
    if pairs is None and not (0 < count <= _MOST_PAIRS and clear):
        pairs = ()
    first = max(4, round(_LINES * shown.steps))
    return AdditiveGD(
        features,
        look,
        bins,
        replace(shown, steps=first),
        replace(shown, steps=shown.steps - first, moment_share=0.12, mean_share=0.03),
        min(max(needed, 0.02), 0.15) if needed <= 0.3 else 0.0,
        pairs,
    )
