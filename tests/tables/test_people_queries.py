"""Every query of tables and scores bounds a person, or is refused when people have several records.

For each: random people, one of them with adversarial rows, and the same without that person or with another in
their place. The noise-free sums differ by no more than the bound, or twice the bound.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import quietgrad.tables
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session import queries as queries
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import Query
from quietgrad.objectives import L2, Logistic, Squared
from quietgrad.tables import range_queries, whitening
from quietgrad.tables.privacy_units import (
    PersonRefused,
    PersonRule,
    RecordsWithIds,
    UnitGrouping,
    UserLevelObjective,
    rows_of,
)
from quietgrad.tables.queries import second_order
from quietgrad.tables.queries.counts import (
    CellSums,
    LabelCounts,
    LabelSet,
    MeanScore,
    Scoring,
    Tabulation,
)
from quietgrad.tables.queries.groups import GroupSums
from quietgrad.tables.queries.local_fit import LocalFit, local_fit
from quietgrad.tables.queries.local_update import LocalUpdateQuery
from quietgrad.tables.queries.second_order import GradientsAndHessians
from quietgrad.tables.range_queries import BoxedQuery, FeatureBox
from quietgrad.tables.table import Affine
from quietgrad.tables.whitening import WhitenedInformation

D = 3
SLACK = 1.0 + 1e-9
KEY = b"k" * 32
WHITE = whitening.Whitening(Affine(np.full(D, 0.1), np.diag([1.0, 2.0, 0.5])), 0.0, 1)
FRAME = FeatureBox(np.full(D, -2.0), np.full(D, 2.0))
POINT, BEFORE = np.array([0.3, -1.0, 2.0]), np.array([0.1, 0.2, -0.3])

Make = Callable[[Relation], Query]
TABLE: dict[type, Make] = {
    queries.GradientQuery: lambda _: queries.GradientQuery(POINT, 0.3),
    queries.GradientDifferenceQuery: lambda _: queries.GradientDifferenceQuery(POINT, BEFORE, 0.2),
    queries.RecursiveMomentumQuery: lambda _: queries.RecursiveMomentumQuery(POINT, BEFORE, 0.2, 0.4, 0.1),
    queries.JointMomentumQuery: lambda _: queries.JointMomentumQuery(POINT, BEFORE, 0.2, 0.4),
    queries.LossQuery: lambda _: queries.LossQuery(POINT, 0.7),
    second_order.GradientNorm: lambda _: second_order.GradientNorm(POINT, 0.3, 10.0),
    second_order.LeastEigenvalue: lambda _: second_order.LeastEigenvalue(POINT, 0.2, 10.0),
    second_order.StationarityGap: lambda _: second_order.StationarityGap(POINT, 0.1, 1.0, 0.3, 0.2, 10.0),
    whitening.FeatureMean: lambda _: whitening.FeatureMean(1.5),
    whitening.MeanSquares: lambda r: whitening.MeanSquares(1.5, relation=r),
    whitening.SecondMomentMatrix: lambda r: whitening.SecondMomentMatrix(1.5, r),
    whitening.CentredMoments: lambda r: whitening.CentredMoments(1.5, r, np.full(D, 0.3)),
    whitening.RowNormHistogram: whitening.RowNormHistogram,
    whitening.CentredNormHistogram: lambda r: whitening.CentredNormHistogram(r, np.full(D, 0.3), 4.0),
    whitening.WhitenedGradient: lambda _: whitening.WhitenedGradient(POINT, 0.3, WHITE),
    WhitenedInformation: lambda r: WhitenedInformation(POINT, 0.4, WHITE, r),
    range_queries.MagnitudeHistogram: lambda r: range_queries.MagnitudeHistogram(np.arange(D), r),
    range_queries.MeanOctaves: lambda _: range_queries.MeanOctaves(np.arange(D), 1.0),
    range_queries.RangeHistogram: lambda r: range_queries.RangeHistogram(
        np.arange(D), np.full(D, -2.0), np.full(D, 2.0), r
    ),
    range_queries.NoFeatures: range_queries.NoFeatures,
    range_queries.FeatureBins: lambda r: range_queries.FeatureBins(
        np.arange(D), np.tile([-2.0, 0.0, 2.0], (D, 1)), r
    ),
    range_queries.TargetMagnitudeHistogram: range_queries.TargetMagnitudeHistogram,
    range_queries.TargetRangeHistogram: lambda r: range_queries.TargetRangeHistogram(-2.0, 2.0, r),
    BoxedQuery: lambda r: BoxedQuery(whitening.SecondMomentMatrix(1.5, r), FRAME),
}
SCORES: dict[type, Make] = {
    CellSums: lambda r: CellSums(6, 2, r),
    MeanScore: lambda _: MeanScore(lambda X, y: X[:, 0], np.arange(0)),
}
ELSEWHERE: dict[type, str] = {
    LocalFit: "test_a_fit_is_as_stable_as_people_are_many",
    GroupSums: "tests/tables/test_groups.py, in both of its norms",
    LocalUpdateQuery: "tests/tables/test_local_update.py",
    GradientsAndHessians: "probe_second_order; people are refused for it",
}
RELATIONS = [Relation.ADD_REMOVE, Relation.REPLACE_ONE]


def test_every_query_is_tried_here() -> None:
    """A query added later must be added to these tables; until then it is refused, for it is shown no rows."""
    found = set()
    names = [module.name for module in pkgutil.walk_packages(quietgrad.tables.__path__, "quietgrad.tables.")]
    for name in ("quietgrad.core.session.queries", *names):
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            if hasattr(kind, "sum_into") and not kind.__name__.startswith("_") and kind is not Query:
                found.add(kind)
    assert found == {*TABLE, *SCORES, *ELSEWHERE}


def people_of(ids: Any, combine: Any = "mean", most: int | None = None) -> UnitGrouping:
    codes = np.unique(ids, return_inverse=True)[1]
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    return UnitGrouping(np.argsort(codes, kind="stable"), starts, PersonRule(combine, most))


def rows(rng: np.random.Generator, size: int, kind: str) -> Any:
    if kind == "aligned":
        return np.tile(rng.normal(size=D) * 1e3, (size, 1))
    if kind == "huge":
        return rng.normal(size=(size, D)) * 1e200
    if kind == "spread":  # every row in another bin
        return np.exp2(np.arange(size)[:, None] % 60 - 30.0) * rng.choice([-1.0, 1.0], (size, D))
    return rng.normal(size=(size, D))


def worlds(size: int, kind: str, seed: int) -> tuple[Any, Any, Any]:
    """(rows, targets, ids) of a crowd and one person more; the person is that of the seed, or nobody for −1."""
    rng = np.random.default_rng(1)
    ids = np.repeat(np.arange(5), (1, 4, 9, 2, 1))
    X, y = rng.normal(size=(len(ids), D)), rng.integers(0, 2, len(ids)).astype(float)
    own = np.random.default_rng(100 + seed)
    extra = rows(own, size if seed >= 0 else 0, kind)
    more = own.integers(0, 2, len(extra)).astype(float)
    return np.vstack([X, extra]), np.concatenate([y, more]), np.concatenate([ids, np.full(len(extra), 99)])


def answers(make: Callable[[int], tuple[Any, Any, Query]]) -> tuple[list[Any], float]:
    sums, bound = [], 0.0
    for seed in (0, 1, -1):
        asked, records, query = make(seed)
        out = np.zeros(query.dim(records))
        with np.errstate(all="ignore"):
            query.sum_into(asked, Batch(records, None, KEY), out)
        assert np.isfinite(out).all()
        sums.append(out)
        bound = float(query.bound)
    return sums, bound


def held(sums: list[Any], bound: float, relation: Relation) -> None:
    one, other, nobody = sums
    slack = 1e-12 * float(np.linalg.norm(nobody)) + 1e-12
    if relation is Relation.ADD_REMOVE:
        assert np.linalg.norm(one - nobody) <= bound * SLACK + slack
    assert np.linalg.norm(one - other) <= 2.0 * bound * SLACK + slack


CASES = [*itertools.product((1, 7, 500), ("plain", "aligned", "huge", "spread"))]


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("settings", [("mean", None), ("sum", None), ("mean", 3)], ids=str)
def test_a_person_is_bounded_by_every_query_of_tables(kind: type, relation: Relation, settings: Any) -> None:
    combine, most = settings
    loss = (
        Squared()
        if kind in (range_queries.TargetMagnitudeHistogram, range_queries.TargetRangeHistogram)
        else Logistic()
    )
    curved = (second_order.LeastEigenvalue, second_order.StationarityGap, WhitenedInformation)
    for (size, rough), layout in itertools.product(CASES, ("dense", "csr")):

        def make(seed: int, size: int = size, rough: str = rough, layout: str = layout) -> Any:
            X, y, ids = worlds(size, rough, seed)
            asked = UserLevelObjective(loss, PersonRule(combine, most))
            table = X if layout == "dense" else sparse.csr_array(X)
            return (
                asked,
                asked.prepare(RecordsWithIds((table, y), people_of(ids, combine, most))),
                TABLE[kind](relation),
            )

        if combine == "sum" and kind in curved:
            with pytest.raises(PersonRefused, match="not offered with person="):
                answers(make)
            return
        held(*answers(make), relation)


@pytest.mark.parametrize("kind", SCORES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("most", [None, 3])
def test_a_person_is_bounded_by_every_score(kind: type, relation: Relation, most: int | None) -> None:
    for size, rough in CASES:

        def make(seed: int, size: int = size, rough: str = rough) -> Any:
            X, _, ids = worlds(size, rough, seed)
            rng = np.random.default_rng(seed + 5)
            asked = UserLevelObjective(Tabulation() if kind is CellSums else Scoring(), PersonRule("mean", most))
            if kind is CellSums:
                cells = np.stack([rng.integers(0, 3, len(X)), rng.integers(2, 8, len(X))], axis=1)
                cells[:17], weights = 0, np.ones(cells.shape)
                data: Any = (cells, weights * 9.0)
            else:
                data = (X, np.ones(len(X)))
            query: Any = SCORES[kind](relation)
            if kind is not CellSums:
                query = type(query)(*[getattr(query, n) for n in list(vars(query))[:1]], np.arange(len(X)))
            return asked, asked.prepare(RecordsWithIds(data, people_of(ids, "mean", most))), query

        held(*answers(make), relation)


def test_a_person_has_one_label_at_most() -> None:
    """Counts differ in one place by one, however many labels nobody else has."""
    asked = UserLevelObjective(LabelSet())
    for size in (1, 7, 500):
        found = []
        for seed in (0, -1):
            X, _, ids = worlds(size, "plain", seed)
            labels = np.where(ids == 99, np.arange(len(ids)) + 1000, ids)
            records = asked.prepare(RecordsWithIds((X, labels), people_of(ids)))
            query = LabelCounts(Relation.ADD_REMOVE)
            found.append(
                dict(zip(*(part.tolist() for part in query.count(Batch(records, None, KEY))), strict=True))
            )
        there, absent = found
        changed = {k: there.get(k, 0.0) - absent.get(k, 0.0) for k in {*there, *absent}}
        assert sum(v != 0.0 for v in changed.values()) == 1
        assert sum(changed.values()) == 1.0


def test_a_fit_is_as_stable_as_people_are_many() -> None:
    loss = Logistic(row_bound=1.0, rows="clip", regularizer=L2(0.1))
    query = local_fit(loss, n=6, steps=300, step_size=1.0)
    fits = []
    for seed in (0, 1):
        X, y, ids = worlds(500, "aligned", seed)
        asked = UserLevelObjective(loss)
        records, out = asked.prepare(RecordsWithIds((X, y), people_of(ids))), np.zeros(D)
        assert len(records) == 6
        query.sum_into(asked, Batch(records, None), out)
        fits.append(out)
    assert np.linalg.norm(fits[0] - fits[1]) <= query.sensitivity * SLACK
    for combine, most in (("sum", None), ("mean", 2)):
        other: Any = combine
        refused = UserLevelObjective(loss, PersonRule(other, most))
        held_records = refused.prepare(RecordsWithIds((X, y), people_of(ids, other, most)))
        with pytest.raises(PersonRefused, match="not offered with person="):
            query.sum_into(refused, Batch(held_records, None, KEY), np.zeros(D))


class _OfRows:
    """A query that somebody wrote for rows."""

    bound = 1.0

    def dim(self, records: Any) -> int:
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        out += float(len(batch.records.X))


def test_a_query_that_does_not_know_people_is_shown_no_rows() -> None:
    X, y, ids = worlds(7, "plain", 0)
    asked = UserLevelObjective(Logistic())
    records = asked.prepare(RecordsWithIds((X, y), ids))
    with pytest.raises(PersonRefused, match="not offered with person="):
        _OfRows().sum_into(asked, Batch(records, None), np.zeros(1))
    shared = rows_of(Batch(records, np.array([1])))
    assert shared.shares is not None
    assert shared.shares.sum() == pytest.approx(1.0)  # rows of others count nothing, whoever looks at them
