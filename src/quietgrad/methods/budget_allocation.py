"""Which releases a table can repay, and how much of the budget each gets: decided from public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.settings import Within
from quietgrad.methods.range_estimation import Bounds, RangeEstimation
from quietgrad.methods.whitened_gd import CROWDED, NO_ERRORS, WhitenedGD

FREEDOM, HORIZON = 0.1, 0.7  # κ and the distance per unit of signal; settled on held-out rows of many tables
_RELATIVE = 0.05  # share of one histogram that narrows all declared ranges alike
_CHEAP = 0.02  # share at which wide declared ranges are estimated as well
_SPACIOUS = 0.004  # p^1.5/(nμ) below which half the budget buys standard errors unasked
_LITTLE, _CONSTANT = 600.0, 0.15  # nμ below which a regression buys its constant first, and the share for it
_WIDEST = 4096  # features of a matrix of second moments: d²/2 numbers
EASY, _MOST_WORK = 1024, 2e12  # features whose matrix any table can afford; n·d² that a wider one may take
# Many features, settled on Fashion-MNIST (784 pixels, 1792 random features): moments are of centred rows. With many
# classes besides, their matrix is worth more noise; clipping is rare, so the clip is small and the way long.
_MANY_FEATURES, _MANY_CLASSES = 256, 3
_CENTRED, _WIDE_CROWDED = 0.01, 4.0
_WIDE_HORIZON, _WIDE_LONGEST = 4.0 * HORIZON, 512.0


def budget_mu(budget: Budget) -> float:
    """μ of the budget, in units of a record's replacement: how many deviations a whole release moves by."""
    mu = gaussian_mu(budget.epsilon, budget.delta)
    return mu * 2.0 if budget.relation is Relation.ADD_REMOVE else mu


def for_table(
    n: int,
    features: int,
    *,
    budget: Budget,
    outputs: int = 1,
    feature_bounds: Sequence[Bounds | None] | None = None,
    row_bound: float | None = None,
    target_bounds: Bounds | None = None,
    regression: bool = False,
    counts: bool = False,
    sparse: bool = False,
    inference: bool | None = False,
    intercept: bool = True,
    expanded: bool = False,
) -> WhitenedGD:
    """The default method for ``n`` records of ``features`` numbers within ``budget``.

    A release is bought if it should exceed its noise: ranges of each feature, or one for all; the matrix of
    second moments, or its diagonal. What is declared is not bought. Nothing here depends on a record.
    ``inference`` buys a Newton step for standard errors, of rows as they are; ``None`` does where it costs next to
    nothing, of features that are clipped to the ranges found. ``expanded`` columns are several for a feature: what
    was settled for many features is not for them.
    """
    if row_bound is not None:
        Within(0.0, 1e150, closed=False).check("row_bound", row_bound)
    mu = budget_mu(budget)
    tightness = error_tightness(n, features, budget)
    asked = bool(inference)  # errors that nobody asked for must not cost accuracy: they are of clipped features
    if inference is None:
        inference = outputs == 1 and not sparse and row_bound is None and tightness < _SPACIOUS
    elif inference and outputs > 1:
        raise ValueError(f"inference: {NO_ERRORS}.")
    elif inference and tightness > CROWDED:
        more = math.ceil(n * tightness / CROWDED / 100) * 100
        raise ValueError(
            f"inference: {features} features are too many for standard errors at this budget. About {more} "
            f"records, or a budget {tightness / CROWDED:.1f} times as strong, would do."
        )
    look = allocate_range_estimation(
        n, features, budget=budget, feature_bounds=feature_bounds, row_bound=row_bound,
        target_bounds=target_bounds, regression=regression, counts=counts, sparse=sparse, whole=asked,
        whole_target=bool(inference),
    )  # fmt: skip
    centred = features >= _MANY_FEATURES and intercept and not (sparse or expanded or regression or inference)
    wide = centred and outputs >= _MANY_CLASSES
    full = not is_crowded(n, features, budget, regression, _WIDE_CROWDED if wide else None)
    full = full and (wide or features <= EASY)
    wide = wide and full
    # Row norms: the share with which their histogram is useful; none if four times the most would not do.
    needed = (8.0 * math.sqrt(2.0) / (0.4 * n * mu)) ** 2
    norm_share = 0.0 if needed > 4.0 * 0.02 else min(max(needed, 0.005), 0.02)
    # Rows in a declared ball of radius R are scaled by R in every feature: in the frame they have length ≤ 1.
    ball = None if row_bound is None or feature_bounds is not None else 1.0
    mean_share = 0.0 if sparse and not full else 0.03
    moment_share = 0.12 if full else 0.04
    several = 1.0 if outputs < 8 or wide else min(outputs / 4.0, 2.0)  # of many classes, residuals begin near 1
    horizon = _WIDE_HORIZON if wide else HORIZON
    wanted = horizon * n * mu / (features + 1.0) / math.sqrt(max(outputs, 2) / 2.0)
    full = full or bool(inference)
    # A regression's errors grow without end with its noise; below this signal a constant is found first.
    little = regression and intercept and not (counts or sparse or inference) and n * mu < _LITTLE
    return WhitenedGD(
        steps=64 if wide or (outputs >= 8 and wanted > 16.0 * outputs) else 32,
        row_bound=ball,
        mean_share=mean_share,
        moment_share=moment_share,
        norm_share=norm_share,
        moments="full" if full else "diagonal",
        look=look,
        freedom=FREEDOM,
        horizon=horizon,
        inference_share=0.5 if inference else 0.0,
        constant_share=_CONSTANT if little else 0.0,
        centred_share=_CENTRED if centred and full else 0.0,
        longest=_WIDE_LONGEST if wide else None,
        clip=0.8 if inference else 0.4 * several,  # a Newton step needs a start that clipping did not push away
    )


def error_tightness(n: int, features: int, budget: Budget) -> float:
    """p^1.5/(nμ): above :data:`~quietgrad.methods.whitened_gd.CROWDED` no standard errors are sold."""
    return float((features + 1) ** 1.5 / (n * budget_mu(budget)))


def is_crowded(
    n: float, features: int, budget: Budget | None, regression: bool, crowded: float | None = None
) -> bool:
    """Whether noise would dominate a matrix of second moments: d^1.5/(nμ) is beyond a limit.

    ``crowded`` is the limit for large tables; for a regression half of it.
    """
    # A regression's noise is that of its targets' whole range: its matrix must be the clearer for it.
    # Columns of one feature lean on each other, and steps that do not know it overshoot: half of ``crowded``.
    plain = 0.03 if regression else 1.0 if n >= 10_000 else 0.3
    limit = plain if crowded is None else 0.5 * crowded if regression else crowded if n >= 10_000 else plain
    if features > _WIDEST or (features > EASY and n * features**2 > _MOST_WORK):
        return True
    return budget is not None and features**1.5 / (n * budget_mu(budget)) >= limit


def allocate_range_estimation(
    n: int,
    features: int,
    *,
    budget: Budget,
    feature_bounds: Sequence[Bounds | None] | None = None,
    row_bound: float | None = None,
    target_bounds: Bounds | None = None,
    regression: bool = False,
    counts: bool = False,
    sparse: bool = False,
    whole: bool = False,
    whole_target: bool = False,
) -> RangeEstimation:
    """Return a table's declared ranges and the releases that estimate the others, as far as n and ε allow."""
    mu = budget_mu(budget)
    target_share = 0.0
    if regression and (target_bounds is None or counts):
        target_share = min(max(100.0 * (10.0 * math.sqrt(2.0) / (n * mu)) ** 2, 0.03), 0.12)
    if row_bound is not None and feature_bounds is None:
        feature_bounds = ((-row_bound, row_bound),) * features
    declared = None if feature_bounds is None else tuple(feature_bounds)
    estimation = RangeEstimation(
        declared, target_bounds, target_share=target_share, sparse=sparse, refine=True, whole=whole,
        whole_target=whole_target, counts=counts,
    )  # fmt: skip
    wide = len(estimation.to_estimate(features)) if row_bound is None and not whole else 0
    estimation = replace(estimation, refine=False)
    unknown = len(estimation.to_estimate(features))
    if not unknown and (not wide or range_share_needed(n, wide, mu) > _CHEAP):
        # Ranges that are all declared ten times too wide are worse than none: one histogram of all of them tells.
        seen = 2.0 * math.sqrt(2.0 / _RELATIVE) / mu <= 0.2 * n
        pooled = replace(estimation, refine=True, ranges="relative", range_share=_RELATIVE)
        return pooled if wide and len(pooled.to_estimate(features)) and not sparse and seen else estimation
    if range_share_needed(n, max(wide, unknown), mu) <= _CHEAP:
        estimation, unknown = replace(estimation, refine=wide > unknown), max(wide, unknown)
    needed = range_share_needed(n, unknown, mu)
    if needed <= 0.3:
        share = min(max(needed, 0.02), 0.15)
        closer = 3 if needed <= 0.005 else 1  # where they cost next to nothing
        offset = 0.0 if sparse else min(max(needed, 0.01), 0.08)
        return replace(estimation, range_share=share, offset_share=offset, closer=closer)
    share = min(max((10.0 * math.sqrt(2.0) / (n * mu)) ** 2, 0.02), 0.12)
    # Mean octaves of each feature, known to one octave with the share asked for; more than four tell nothing.
    asked = (10.0 * math.sqrt(unknown) / (n * mu)) ** 2
    if sparse or asked / 0.12 > 16.0:
        return replace(estimation, ranges="pooled", range_share=share)
    return replace(estimation, ranges="means", range_share=share, octave_share=min(max(asked, 0.01), 0.12))


def range_share_needed(n: int, features: int, mu: float) -> float:
    """The share with which a bin with four tenths of the records stands eight deviations out of its noise."""
    return (8.0 * math.sqrt(2.0 * features) / (0.4 * n * mu)) ** 2
