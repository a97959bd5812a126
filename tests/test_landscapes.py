"""Landscapes: exact derivatives, known critical points, constants that hold, sums that respect their clip."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quietgrad as qg
from quietgrad.errors import DataError
from quietgrad.objectives.base import (
    Batch,
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    RecursiveMomentumQuery,
)
from quietgrad.objectives.landscapes.base import Landscape, SyntheticRecords, landscape, landscape_names

Floats = npt.NDArray[np.float64]

ALL: dict[str, Landscape] = {
    "strict-saddle": landscape("strict-saddle", d=7, descending=2),
    "matrix-sensing": landscape("matrix-sensing", size=3, rank=2),
    "phase-retrieval": landscape("phase-retrieval", d=5),
    "two-layer": landscape("two-layer", inputs=3, hidden=2),
}
every = pytest.mark.parametrize("land", list(ALL.values()), ids=list(ALL))


def numeric(function: Callable[[Floats], Any], at: Floats, h: float = 1e-5) -> Floats:
    return np.array([(function(at + h * e) - function(at - h * e)) / (2 * h) for e in np.eye(len(at))])


def matrix(product: Callable[[Floats], Floats], dim: int) -> Floats:
    return np.array([product(e) for e in np.eye(dim)])


def somewhere(land: Landscape, seed: int = 1) -> Floats:
    """A point of the domain."""
    x = np.random.default_rng(seed).standard_normal(land.dim)
    x *= 0.25 * land.radius / float(np.linalg.norm(x))
    assert land.inside(x)
    return x


def test_names_and_table_agree() -> None:
    assert set(landscape_names()) == set(ALL) == {land.name for land in ALL.values()}


@every
def test_population_derivatives_are_exact(land: Landscape) -> None:
    x = somewhere(land)
    np.testing.assert_allclose(numeric(land.population_risk, x), land.population_gradient(x), atol=1e-8)
    hessian = matrix(lambda v: land.population_hessian_product(x, v), land.dim)
    np.testing.assert_allclose(numeric(land.population_gradient, x), hessian, atol=1e-8)


@every
def test_empirical_derivatives_are_exact(land: Landscape) -> None:
    x, records = somewhere(land), land.prepare(50)
    np.testing.assert_allclose(
        numeric(lambda y: land.risk(records, y), x), land.risk_gradient(records, x), atol=1e-7
    )
    hessian = matrix(lambda v: land.hessian_product(records, x, v), land.dim)
    np.testing.assert_allclose(numeric(lambda y: land.risk_gradient(records, y), x), hessian, atol=1e-7)
    total = np.zeros((land.dim, land.dim))
    land.add_hessians(Batch(records, None), x, math.inf, total)
    np.testing.assert_allclose(total / 50, hessian, atol=1e-12)
    assert land.loss_sum(Batch(records, None), x, math.inf) >= land.risk(records, x) * 50 - 1e-9


@every
def test_critical_points_are_what_they_are_said_to_be(land: Landscape) -> None:
    saddle, minimum = land.saddle(), land.minimum()
    for point in (saddle, minimum):
        assert land.inside(point)
        np.testing.assert_allclose(land.population_gradient(point), 0.0, atol=1e-14)
    at_saddle = np.linalg.eigvalsh(matrix(lambda v: land.population_hessian_product(saddle, v), land.dim))
    assert at_saddle[0] == pytest.approx(land.saddle_curvature)
    assert land.saddle_curvature < 0.0
    at_minimum = np.linalg.eigvalsh(matrix(lambda v: land.population_hessian_product(minimum, v), land.dim))
    assert at_minimum[0] > -1e-12
    assert land.population_risk(minimum) < land.population_risk(saddle)


@every
def test_records_average_to_the_population(land: Landscape) -> None:
    """Mean gradients of 100 000 records, each coordinate within 5.5 standard errors (false alarm below 1e-6)."""
    x, records = somewhere(land), land.prepare(100_000)
    rows = land._gradients(records, slice(None), x)
    deviation = np.abs(rows.mean(axis=0) - land.population_gradient(x))
    assert (deviation <= 5.5 * rows.std(axis=0) / math.sqrt(100_000) + 1e-12).all()
    assert land.risk(records, x) == pytest.approx(land.population_risk(x), abs=0.1)


@every
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), far=st.floats(0.05, 0.999))
def test_constants_hold_on_the_domain(land: Landscape, seed: int, far: float) -> None:
    rng = np.random.default_rng(seed)
    points = []
    for _ in range(2):
        x = rng.standard_normal(land.dim) * rng.choice([0.05, 1.0], land.dim)
        scale = far * land.radius / float(np.linalg.norm(x))
        while not land.inside(scale * x):
            scale *= 0.9
        points.append(scale * x)
    records, stated = land.prepare(64), land.constants()
    x, y = points
    lengths = np.linalg.norm(land._gradients(records, slice(None), x), axis=1)
    hessians = np.linalg.eigvalsh(land._hessians(records, slice(None), x))
    assert stated.lipschitz is not None
    assert stated.smoothness is not None
    assert stated.hessian_lipschitz is not None
    assert lengths.max() <= stated.lipschitz * (1 + 1e-9)
    assert np.abs(hessians).max() <= stated.smoothness * (1 + 1e-9)
    change = matrix(
        lambda v: land.population_hessian_product(x, v) - land.population_hessian_product(y, v), land.dim
    )
    size = float(np.abs(np.linalg.eigvalsh(change)).max())
    assert size <= stated.hessian_lipschitz * float(np.linalg.norm(x - y)) * (1 + 1e-9) + 1e-12


@every
def test_sums_match_clipping_record_by_record(land: Landscape) -> None:
    rng = np.random.default_rng(3)
    records, x, y = land.prepare(40), somewhere(land, 1), somewhere(land, 2)
    chosen = rng.permutation(40)[:17]

    def clipped(rows: Floats, clip: float) -> Floats:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows * np.minimum(1.0, clip / np.maximum(lengths, 1e-300)))

    for indices in (None, chosen):
        which = slice(None) if indices is None else indices
        now, then = land._gradients(records, which, x), land._gradients(records, which, y)
        clip = float(np.median(np.linalg.norm(now, axis=1)))
        small = float(np.median(np.linalg.norm(now - then, axis=1)))
        expected = {
            "gradients": clipped(now, clip).sum(axis=0),
            "differences": clipped(now - then, small).sum(axis=0),
            "momentum": (0.7 * clipped(now - then, small) + 0.3 * clipped(now, clip)).sum(axis=0),
            "joint": clipped(now - 0.7 * then, clip).sum(axis=0),
        }
        out = {name: np.zeros(land.dim) for name in expected}
        GradientQuery(x, clip).sum_into(land, Batch(records, indices), out["gradients"])
        GradientDifferenceQuery(x, y, small).sum_into(land, Batch(records, indices), out["differences"])
        RecursiveMomentumQuery(x, y, 0.3, clip, small).sum_into(land, Batch(records, indices), out["momentum"])
        JointMomentumQuery(x, y, 0.3, clip).sum_into(land, Batch(records, indices), out["joint"])
        for name, value in expected.items():
            np.testing.assert_allclose(out[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@every
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-6.0, 3.0))
def test_one_record_never_exceeds_the_clip(land: Landscape, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    one = landscape_with_seed(land, seed).prepare(1)
    x, y = (10.0 ** rng.uniform(-3, 3) * rng.standard_normal(land.dim) for _ in range(2))
    clip = 10.0**exponent
    first = np.array([0])
    sums = np.zeros((4, land.dim))
    GradientQuery(x, clip).sum_into(land, Batch(one, first), sums[0])
    GradientDifferenceQuery(x, y, clip).sum_into(land, Batch(one, first), sums[1])
    RecursiveMomentumQuery(x, y, 0.4, clip, clip).sum_into(land, Batch(one, first), sums[2])
    JointMomentumQuery(x, y, 0.4, clip).sum_into(land, Batch(one, first), sums[3])
    assert float(np.linalg.norm(sums, axis=1).max()) <= clip * (1 + 1e-9)
    hessian = np.zeros((land.dim, land.dim))
    land.add_hessians(Batch(one, first), x, clip, hessian)
    assert float(np.abs(np.linalg.eigvalsh(hessian)).max()) <= clip * (1 + 1e-9)


def landscape_with_seed(land: Landscape, seed: int) -> Landscape:
    import dataclasses

    return dataclasses.replace(land, seed=seed)


@every
def test_records_that_are_not_finite_count_as_nothing(land: Landscape) -> None:
    out, records = np.zeros(land.dim), land.prepare(5)
    GradientQuery(np.full(land.dim, 1e200), 1.0).sum_into(land, Batch(records, None), out)
    assert np.isfinite(out).all()
    hessian = np.zeros((land.dim, land.dim))
    land.add_hessians(Batch(records, None), np.full(land.dim, 1e200), 1.0, hessian)
    assert np.isfinite(hessian).all()


def test_a_thousand_dimensions_are_cheap_in_memory() -> None:
    land = landscape("strict-saddle", d=1000)
    records = land.prepare(10_000)
    assert records["kind"].nbytes == 40_000
    out = np.zeros(1000)
    GradientQuery(land.saddle(), 10.0).sum_into(land, Batch(records, np.arange(5000)), out)
    assert float(np.abs(out).sum()) > 0.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: landscape("volcano"), ValueError, "landscape 'volcano': must be one of matrix-sensing"),
        (lambda: landscape("strict-saddle", d=2, descending=3), ValueError, "descending=3"),
        (lambda: landscape("strict-saddle", curvature=-1.0), ValueError, "curvature=-1.0"),
        (lambda: landscape("strict-saddle", curvature_noise=1.0), ValueError, "curvature_noise"),
        (lambda: landscape("phase-retrieval", d=1), ValueError, "d=1: must be ≥ 2"),
        (lambda: landscape("matrix-sensing", size=2, rank=3), ValueError, "rank=3"),
        (lambda: landscape("matrix-sensing", label_noise=-1.0), ValueError, "label_noise=-1.0"),
        (lambda: landscape("two-layer", hidden=0), ValueError, "hidden=0"),
        (lambda: landscape("two-layer", label_noise=math.inf), ValueError, "label_noise=inf"),
        (lambda: ALL["two-layer"].prepare(0), DataError, "data 0: a landscape samples its own records"),
        (lambda: ALL["two-layer"].prepare("a9a"), DataError, "data 'a9a'"),
        (lambda: ALL["two-layer"].prepare(SyntheticRecords({"x": np.zeros(3)}, 99)), DataError, "99 parameters"),
        (lambda: ALL["two-layer"].check_domain(np.full(8, 9.0)), DataError, "outside the domain of two-layer"),
        (lambda: ALL["two-layer"].check_domain(np.zeros(3)), DataError, r"shape \(3,\)"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_start_outside_the_domain_is_refused() -> None:
    land = landscape("strict-saddle", d=3)
    with pytest.raises(DataError, match="outside the domain"):
        qg.minimize(land, 10_000, qg.PerturbedSGD(), budget=qg.Budget(1.0, 1e-5), start=np.array([0.0, 0.6, 0.0]))
