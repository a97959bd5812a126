"""Compiled passes over column-major parts of a scan give what the rows' own arithmetic gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.objectives import Batch
from quietgrad.objectives import Logistic
from quietgrad.tables.range_queries import (
    LOWEST,
    OCTAVES,
    FeatureBox,
    MagnitudeHistogram,
    NoFeatures,
    log2_bin,
)
from quietgrad.tables.table import Affine, Table

RNG = np.random.default_rng(5)
ROWS = 3000
SCALES = 2.0 ** RNG.integers(-40, 50, ROWS)[:, None]
NUMBERS = np.asfortranarray(RNG.standard_normal((ROWS, 5)) * SCALES)
NUMBERS[::7, 1] = 0.0
NUMBERS[::5, 2] = 2.0 ** RNG.integers(-36, 46, len(NUMBERS[::5]))  # ends of octaves
NUMBERS[3, 3], NUMBERS[4, 3], NUMBERS[5, 3] = 5e-324, -0.0, 1.7e308


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_box_is_the_one_of_rows_to_the_last_bit(dtype: Any) -> None:
    box = FeatureBox(np.array([-1.0, 0.0, -3.0, 2.0, -1e9]), np.array([1.0, 5.0, 7.0, 9.0, 1e300]))
    X = np.asfortranarray(np.clip(NUMBERS, -1e30, 1e30).astype(dtype))
    rounded = box.rounded(X)
    assert rounded.flags.f_contiguous
    assert rounded.dtype == np.float32
    expected = np.asarray(box.apply(np.ascontiguousarray(X)), dtype=np.float32)
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(box.rounded(np.ascontiguousarray(X)), expected)


def test_magnitudes_are_counted_by_sign_and_octave() -> None:
    chosen = np.array([0, 3, 2, 1])
    query = MagnitudeHistogram(chosen)
    table = Table(NUMBERS, None)
    out = np.zeros(query.dim(table))
    query.sum_into(None, Batch(table, None), out)
    expected = np.zeros((len(chosen), 2 * OCTAVES))
    for row in NUMBERS[:, chosen]:
        present = np.flatnonzero(row)
        for place in present:
            with np.errstate(all="ignore"):
                octave = int(np.clip(np.ceil(np.log2(abs(row[place]))) - LOWEST, 0, OCTAVES - 1))
            assert octave == int(log2_bin(row[place : place + 1])[0])
            expected[place, octave + (OCTAVES if row[place] < 0.0 else 0)] += 1.0 / np.sqrt(len(present))
    np.testing.assert_allclose(out, expected.ravel(), rtol=1e-9)


def test_one_row_counts_no_more_than_the_bound() -> None:
    query = MagnitudeHistogram(np.arange(5))
    for row in range(0, ROWS, 101):
        out = np.zeros(query.dim(None))
        query.sum_into(None, Batch(Table(np.asfortranarray(NUMBERS[row : row + 1]), None), None), out)
        assert np.linalg.norm(out) <= query.bound


@pytest.mark.parametrize("intercept", [False, True])
def test_hessians_of_a_part_of_a_scan_are_those_of_rows(intercept: bool) -> None:
    """A matrix mixes the columns of a part in place; a table in memory is mixed row by row."""
    rows = RNG.standard_normal((9000, 20)).astype(np.float32)
    mixing = np.eye(20) + 0.05 * np.add.outer(np.arange(20.0), np.arange(20.0)) / 20.0
    loss = Logistic(intercept=intercept, transform=Affine(np.linspace(-1.0, 1.0, 20), mixing))
    y = (rows[:, 0] > 0).astype(np.float64)
    params = RNG.standard_normal(20 + intercept)
    sums = []
    for X in (np.ascontiguousarray(rows), np.asfortranarray(rows)):
        table, out = loss._table(X, y), np.zeros((20 + intercept,) * 2)
        norms = table.norms.copy()
        loss.add_hessians(Batch(table, None), params, 3.0, out)
        sums.append((norms, out))
    np.testing.assert_allclose(sums[1][0], sums[0][0], rtol=1e-9)
    np.testing.assert_allclose(sums[1][1], sums[0][1], rtol=1e-7, atol=1e-9)
    lengths = np.linalg.norm((rows.astype(np.float64) - np.linspace(-1.0, 1.0, 20)) @ mixing, axis=1)
    assert (sums[1][0] >= lengths).all()  # a norm that is too small would let a record exceed its clip


@pytest.mark.parametrize("relation", Relation)
def test_a_release_about_no_feature_sums_nothing(relation: Relation) -> None:
    query = NoFeatures(relation, 8)
    out = np.zeros(query.dim(None))
    query.sum_into(None, Batch(Table(NUMBERS, None), None), out)
    assert not out.any()
