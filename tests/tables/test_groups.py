"""Sums by groups: what one record or person moves, in both norms that noise is proved for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import PersonRule, RecordsWithIds, UnitGrouping, UserLevelObjective
from quietgrad.tables.queries.counts import CellSums, Tabulation
from quietgrad.tables.queries.groups import Grouping, GroupSums

VALUES = itertools.product((-1.0, 1.0, 0.3, np.nan, -np.inf, 40.0), repeat=2)
CORNERS = [*itertools.product((0, 1, 2, -1, 7), VALUES)]


def summed(query: Any, adapter: Any, data: Any) -> Any:
    out = np.zeros(query.dim(None))
    query.sum_into(adapter, Batch(adapter.prepare(data), None, bytes(32)), out)
    return out


def table(*more: tuple[int, tuple[float, float]]) -> Any:
    rows = [(0, (0.1, -0.7)), (1, (0.9, 0.2)), *more]
    return np.array([group for group, _ in rows]), np.array([values for _, values in rows])


def far(query: Any, first: Any, second: Any) -> tuple[float, float]:
    """The distance of two sums in L2 and in the norm of groups."""
    gap = (first - second).reshape(-1, query.width)
    return float(np.linalg.norm(gap)), float(np.abs(gap).max(axis=1).sum())


def test_a_record_moves_the_sums_by_no_more_than_the_bounds() -> None:
    worst: dict[Any, Any] = {}
    for relation in Relation:
        query, reached = GroupSums(3, 3, relation), [0.0, 0.0]
        pairs: Any = itertools.product(CORNERS, CORNERS if relation is Relation.REPLACE_ONE else [None])
        sums: dict[Any, Any] = {}
        for one, other in pairs:
            for row in (one, other):
                if repr(row) not in sums:
                    sums[repr(row)] = summed(query, Grouping(), table(*([] if row is None else [row])))
            distances = far(query, sums[repr(one)], sums[repr(other)])
            reached = [max(a, b) for a, b in zip(reached, distances, strict=True)]
        factor = 1.0 if relation is Relation.ADD_REMOVE else 2.0
        worst[relation] = [reached[0] / (factor * query.bound), reached[1] / (factor * query.k_norm_bound(3))]
    assert all(x <= 1.0 + 1e-12 for pair in worst.values() for x in pair)
    assert all(x > 0.99 for pair in worst.values() for x in pair)  # and the bounds are reached


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("relation", Relation)
def test_a_person_of_many_records_moves_the_sums_by_no_more(relation: Relation, most: int | None) -> None:
    query, rng = GroupSums(3, 3, relation), np.random.default_rng(0)
    asked, factor = (
        UserLevelObjective(Grouping(), PersonRule("mean", most)),
        1.0 if relation is Relation.ADD_REMOVE else 2.0,
    )
    for size in (1, 3, 7, 300):
        sums = []
        for k in range(3):
            rows = [] if k == 2 else [CORNERS[i] for i in rng.integers(0, len(CORNERS), size)]
            groups, values = table(*rows)
            ids = np.array([0, 1, *[9] * len(rows)])
            people = UnitGrouping.of(ids, PersonRule(records_per_person=most))
            sums.append(summed(query, asked, RecordsWithIds((groups, values), people)))
        pair = (sums[0], sums[2]) if relation is Relation.ADD_REMOVE else (sums[0], sums[1])
        l2, blocks = far(query, *pair)
        assert l2 <= factor * query.bound * (1 + 1e-12)
        assert blocks <= factor * query.k_norm_bound(3) * (1 + 1e-12)


def test_sums_are_exact_so_that_no_other_record_moves_with_one() -> None:
    """Contributions are multiples of 2⁻²⁰: with and without a record the rest of the sum is the same number."""
    rng = np.random.default_rng(0)
    groups, values = rng.integers(0, 3, 5000), rng.uniform(-1.0, 1.0, (5000, 2))
    query = GroupSums(3, 3)
    whole = summed(query, Grouping(), (groups, values))
    without = summed(query, Grouping(), (groups[1:], values[1:]))
    alone = summed(query, Grouping(), (groups[:1], values[:1]))
    assert (whole - without == alone).all()


def test_cells_bound_a_persons_weights_together() -> None:
    """More cells than the query counts, and weights above one: both bounds hold for whatever is given."""
    for relation in Relation:
        query = CellSums(6, 2, relation)
        out = summed(query, Tabulation(), (np.array([[0, 1, 2, 3]]), np.array([[1.0, 9.0, 1.0, 1.0]])))
        assert np.abs(out).sum() <= query.k_norm_bound(1) * (1 + 1e-12)
        assert np.linalg.norm(out) <= np.sqrt(2.0) * (1 + 1e-12)


def test_other_widths_are_refused() -> None:
    assert GroupSums(3, 4).k_norm_bound(1) == 4.0
    with pytest.raises(ValueError, match="width=2"):
        GroupSums(3, 4).k_norm_bound(2)
    with pytest.raises(ValueError, match="one number"):
        CellSums(6, 2).k_norm_bound(2)
