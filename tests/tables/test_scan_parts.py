"""The compiled products of column-major parts: the numbers of a table, and bounds that hold for any rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientDifferenceQuery, GradientQuery, LossQuery, RecursiveMomentumQuery
from quietgrad.tables.scanned import RowBlock
from quietgrad.tables.table import Table


def part(X: Any) -> Any:
    return np.asfortranarray(np.asarray(X, dtype=np.float32))


@pytest.mark.parametrize("features", [2, 3, 4, 7, 33])
@pytest.mark.parametrize(
    "loss",
    [
        qg.objectives.Logistic(intercept=True, row_bound=1.5, rows="clip"),
        qg.objectives.Huber(0.7, intercept=True),
        qg.objectives.Hinge(0.5, row_bound=2.0, rows="normalize"),
        qg.objectives.Multinomial(2, intercept=True),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_column_major_part_sums_as_a_table(loss: Any, features: int) -> None:
    rng = np.random.default_rng(features)
    X = rng.standard_normal((2500, features)).astype(np.float32)
    X[:5] *= 1e6
    X[5:9] = 0.0
    y = rng.integers(0, 2, len(X))
    table, laid = loss.prepare((X, y)), loss.prepare(RowBlock(part(X), y))
    np.testing.assert_allclose(laid.norms, table.norms, rtol=1e-12)
    a, b = rng.standard_normal((2, table.dim))
    for query in (
        GradientQuery(a, 0.5),
        GradientDifferenceQuery(a, b, 0.3),
        RecursiveMomentumQuery(a, b, 0.3, 1.0, 0.5),
        LossQuery(a, 3.0),
    ):
        sums = [np.zeros(query.dim(table)) for _ in range(2)]
        for out, records in zip(sums, (table, laid), strict=True):
            query.sum_into(loss, Batch(records, None), out)
        np.testing.assert_allclose(sums[1], sums[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_one_record_of_any_size_is_bounded_in_a_part(size: float) -> None:
    """Both signs, with and without an intercept, beside others that nearly cancel it."""
    rng = np.random.default_rng(0)
    for intercept in (False, True):
        loss = qg.objectives.Logistic(intercept=intercept)
        for _ in range(20):
            X = rng.standard_normal((40, 6)).astype(np.float32)
            with np.errstate(over="ignore"):
                row = (rng.standard_normal(6) * size).astype(np.float32)
            row = np.where(np.isfinite(row), row, np.float32(3e38))
            other = np.concatenate([X, row[None]])
            theta = rng.standard_normal(6 + intercept) * 10.0 ** rng.integers(-3, 4)
            sums = []
            for rows in (X, other):
                records = loss.prepare(RowBlock(part(rows), (np.arange(len(rows)) % 2).astype(float)))
                out = np.zeros(records.dim)
                with np.errstate(all="ignore"):
                    GradientQuery(theta, 0.25).sum_into(loss, Batch(records, None), out)
                sums.append(out)
            # Adding the record to the others' sum rounds in the last digits of that sum.
            assert np.linalg.norm(sums[1] - sums[0]) <= 0.25 * (1 + 1e-9) + 1e-12 * np.linalg.norm(sums[0])


def test_an_infinite_entry_counts_as_nothing() -> None:
    X = np.ones((9, 3), dtype=np.float32)
    X[4, 1] = np.inf
    loss = qg.objectives.Logistic()
    records = Table(part(X), np.ones(9))
    out = np.zeros(3)
    with np.errstate(all="ignore"):
        loss.add(Batch(records, None), (np.ones(3),), GradientQuery(np.ones(3), 1.0).rule, out)
    assert not np.isnan(out[[0, 2]]).any()
