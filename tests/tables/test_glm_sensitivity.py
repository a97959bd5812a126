"""No record moves a noise-free release by more than its query's bound, whatever it holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import (
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    LossQuery,
    RecursiveMomentumQuery,
)
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import Hinge, Huber, Logistic, Multinomial, Squared
from quietgrad.tables.table import Affine
from quietgrad.tables.whitening import FeatureMean, MeanSquares
from tests.probes.records import every_query, neighbouring_tables, probe_sensitivity

Floats = npt.NDArray[np.float64]
D = 4
OBJECTIVES: list[LinearObjective] = [
    Logistic(),
    Multinomial(3, intercept=True),
    Huber(1e3, intercept=True),
    Squared(),
    Hinge(1e-3),
]
HUGE = st.sampled_from([0.0, 1e-300, 1e-8, 1.0, -1.0, 3.7, 1e8, -1e8, 1e100, 1e154, -1e200, 1e300, 1.7e308])
NUMBERS = st.one_of(HUGE, st.floats(-10, 10))


def released(objective: LinearObjective, query: Any, X: Floats, y: Floats, as_batch: bool) -> Floats:
    matrix = sparse.csr_array(X) if as_batch and len(X) % 2 else X
    records = objective.prepare((matrix, y))
    out = np.zeros(query.dim(records))
    query.sum_into(objective, Batch(records, np.arange(len(X)) if as_batch else None), out)
    return out


def queries(theta: Floats, previous: Floats) -> list[Any]:
    return [
        GradientQuery(theta, 0.7),
        GradientDifferenceQuery(theta, previous, 0.3),
        RecursiveMomentumQuery(theta, previous, 0.1, 1.0, 0.2),
        JointMomentumQuery(theta, previous, 0.1, 0.5),
        LossQuery(theta, 2.0),
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, len(OBJECTIVES) - 1),
    st.lists(NUMBERS, min_size=3 * D, max_size=3 * D),
    st.lists(NUMBERS, min_size=2 * 15, max_size=2 * 15),
    st.lists(st.integers(0, 1), min_size=3, max_size=3),
    st.booleans(),
)
def test_a_single_record_never_exceeds_the_bound(
    which: int, rows: list[float], points: list[float], labels: list[int], as_batch: bool
) -> None:
    """A batch of one shows each record's own contribution exactly, free of the rounding of others."""
    objective = OBJECTIVES[which]
    X, y = np.array(rows).reshape(3, D), np.array(labels, dtype=float)
    dim = objective.prepare((X, y)).dim
    theta, previous = np.array(points[:dim]), np.array(points[15 : 15 + dim])
    for query in queries(theta, previous):
        for i in range(3):
            contribution = released(objective, query, X[i : i + 1], y[i : i + 1], as_batch)
            assert np.isfinite(contribution).all()
            assert math.hypot(*contribution) <= query.bound * (1 + 1e-9)


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_neighbours_by_brute_force(objective: LinearObjective, layout: Any, relation: Relation) -> None:
    """With intercepts and sparse rows, which the probe of every loss leaves out."""
    pairs = neighbouring_tables(objective, relation, features=D)
    laid_out = (((layout(X), y), (layout(X2), y2)) for (X, y), (X2, y2) in pairs)
    finding = probe_sensitivity(objective, laid_out, every_query, relation)
    assert finding.verdict == "pass", finding


@pytest.mark.parametrize("as_batch", [False, True])
def test_the_bound_is_attained(as_batch: bool) -> None:
    """The other side: a clip tighter than it needs to be would also be a defect."""
    X, y = np.array([[50.0, 0.0, 0.0, 0.0]]), np.array([1.0])
    theta, previous = np.array([-1.0, 0, 0, 0]), np.array([1.0, 0, 0, 0])
    for query in queries(theta, previous):
        got = released(Logistic(), query, X, y, as_batch)
        assert np.linalg.norm(got) == pytest.approx(query.bound, rel=1e-9)


@pytest.mark.parametrize("as_batch", [False, True])
@pytest.mark.parametrize("objective", [Logistic(), Multinomial(2), Squared()])
def test_the_exact_clip_boundary(objective: LinearObjective, as_batch: bool) -> None:
    """A gradient of length exactly C keeps its length to the documented slack."""
    X, y = np.array([[1.0, 0.0]]), np.array([1.0])
    dim = objective.prepare((X, y)).dim
    length = {1: 1.0, 2: math.sqrt(0.5)}[objective.outputs] * (0.5 if isinstance(objective, Logistic) else 1.0)
    got = released(objective, GradientQuery(np.zeros(dim), length), X, y, as_batch)
    assert length * (1 - 1e-11) <= np.linalg.norm(got) <= length


BROKEN: list[tuple[LinearObjective, list[float], list[float]]] = [
    (Squared(), [1e150, 0.0], [1e300, 0.0]),  # an infinite residual
    (Logistic(intercept=True, intercept_scale=1e10), [1e150, 0.0], [1e300, 0.0, -1e308]),  # ∞ − ∞
    (Logistic(), [1e300, -1e300], [1e300, 1e300]),  # an infinite norm
    (Multinomial(2), [1e300, -1e300], [1e300, 0.0, 1e300, 0.0]),
]


@pytest.mark.parametrize("as_batch", [False, True])
@pytest.mark.parametrize(("objective", "row", "point"), BROKEN)
def test_a_broken_contribution_counts_as_zero(
    objective: LinearObjective, row: list[float], point: list[float], as_batch: bool
) -> None:
    """It is not an error, which would tell on the record, and leaves the others' sum as it was."""
    X, query = np.array([row, [1.0, 2.0]]), GradientQuery(np.array(point), 1.0)
    both = released(objective, query, X, np.array([1.0, 1.0]), as_batch)
    alone = released(objective, query, X[1:], np.array([1.0]), as_batch)
    np.testing.assert_array_equal(both, alone)
    assert np.isfinite(alone).all()


@pytest.mark.parametrize("as_batch", [False, True])
def test_centring_close_to_a_huge_mean_keeps_the_bound(as_batch: bool) -> None:
    """x ≈ m at 10⁸: the centred norm cancels, in the norm and in the sum, and must not be taken too small."""
    rng = np.random.default_rng(0)
    for exponent in range(-12, 3):
        mean = 1e8 * rng.normal(size=D)
        X = mean + 10.0**exponent * rng.normal(size=(1, D))
        objective = Squared(intercept=True, intercept_scale=1e-6, transform=Affine(mean, np.full(D, 1e3)))
        for layout in (X, sparse.csr_array(X)):
            records = objective.prepare((layout, np.array([1e12])))
            out = np.zeros(records.dim)
            GradientQuery(np.zeros(D + 1), 1.0).sum_into(
                objective, Batch(records, np.array([0]) if as_batch else None), out
            )
            assert np.linalg.norm(out) <= 1 + 1e-9


@pytest.mark.parametrize("as_batch", [False, True])
def test_tiny_steps_keep_the_difference_clip(as_batch: bool) -> None:
    rng = np.random.default_rng(4)
    X, y = 1e6 * rng.normal(size=(1, D)), np.array([1.0])
    for exponent in range(-17, -5):
        theta = 1e-6 * rng.normal(size=D)
        query = GradientDifferenceQuery(theta, theta * (1 + 10.0**exponent), 1e-9)
        assert np.linalg.norm(released(Logistic(), query, X, y, as_batch)) <= 1e-9 * (1 + 1e-9)


FEATURES = [FeatureMean(0.8), MeanSquares(0.8)]


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=D, max_size=D), st.booleans(), st.sampled_from(FEATURES))
def test_feature_sums_respect_their_bound(row: list[float], as_batch: bool, query: Any) -> None:
    got = released(Squared(), query, np.array([row]), np.zeros(1), as_batch)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got) <= query.bound * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=2 * D, max_size=2 * D))
def test_squares_are_closer_together(rows: list[float]) -> None:
    pair = np.array(rows).reshape(2, D)
    query = MeanSquares(1.3, relation=Relation.REPLACE_ONE)
    one, two = (released(Squared(), query, row[None], np.zeros(1), False) for row in pair)
    assert np.linalg.norm(one - two) <= 2 * query.bound * (1 + 1e-9)
    assert 2 * query.bound == pytest.approx(math.sqrt(2) * 1.3)


def test_a_bound_of_squares_is_attained_and_refuses_samples() -> None:
    query = MeanSquares(1.0, relation=Relation.REPLACE_ONE)
    one, two = (released(Squared(), query, 5.0 * row[None], np.zeros(1), False) for row in np.eye(D)[:2])
    assert np.linalg.norm(one - two) == pytest.approx(2 * query.bound)
    with pytest.raises(ValueError, match="FullBatch"):
        released(Squared(), query, np.eye(D), np.zeros(D), True)


@pytest.mark.parametrize("as_batch", [False, True])
def test_feature_sums_equal_the_naive_ones(as_batch: bool) -> None:
    rng = np.random.default_rng(8)
    X = rng.normal(size=(9, D)) * (rng.random((9, D)) < 0.7)
    for query, v in zip(FEATURES, (X, X**2), strict=True):
        expected = sum(row * min(1.0, 0.8 / np.linalg.norm(row)) for row in v)
        np.testing.assert_allclose(released(Squared(), query, X, np.zeros(9), as_batch), expected, atol=1e-10)


@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_array])
def test_whitening_equals_mixed_features_and_keeps_the_bound(layout: Any) -> None:
    """S(x−m) with a symmetric matrix S: the naive sum on mixed rows, and x ≈ m at 10⁸ for the bound."""
    rng = np.random.default_rng(6)
    half = rng.normal(size=(D, D))
    S, mean, X = half + half.T, rng.normal(size=D), rng.normal(size=(7, D))
    theta, y = rng.normal(size=D), rng.normal(size=7)
    mixed, plain = Squared(transform=Affine(mean, S)), Squared()
    got, expected = np.zeros(D), np.zeros(D)
    GradientQuery(theta, 0.5).sum_into(mixed, Batch(mixed.prepare((layout(X), y)), None), got)
    GradientQuery(theta, 0.5).sum_into(plain, Batch(plain.prepare(((X - mean) @ S, y)), None), expected)
    np.testing.assert_allclose(got, expected, atol=1e-10)
    for exponent in range(-12, 3):
        far = 1e8 * rng.normal(size=D)
        objective = Squared(transform=Affine(far, S))
        records = objective.prepare((layout(far + 10.0**exponent * rng.normal(size=(1, D))), np.array([1e12])))
        out = np.zeros(D)
        GradientQuery(np.zeros(D), 1.0).sum_into(objective, Batch(records, None), out)
        assert np.linalg.norm(out) <= 1 + 1e-9
    some, got, expected = np.array([4, 0]), np.zeros(D), np.zeros(D)
    GradientQuery(theta, 0.5).sum_into(mixed, Batch(mixed.prepare((layout(X), y)), some), got)
    GradientQuery(theta, 0.5).sum_into(plain, Batch(plain.prepare(((X - mean) @ S, y)), some), expected)
    np.testing.assert_allclose(got, expected, atol=1e-10)
