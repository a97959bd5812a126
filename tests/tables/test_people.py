"""People with several records: what one of them adds to any sum is bounded, whatever their records hold.

The heart is brute force: two tables that differ in one whole person, of adversarial size and values, and the
difference of the noise-free sums held against the query's bound.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.objectives import Hinge, Huber, Logistic, Multinomial, Squared
from quietgrad.tables import full_batch
from quietgrad.tables.losses import OneVsRestHinge
from quietgrad.tables.person_ids import hashed_ids, kind_of
from quietgrad.tables.privacy_units import PersonRule, RecordsWithIds, UnitGrouping, UserLevelObjective
from quietgrad.tables.table import Affine

SIZES = (1, 7, 500, 1, 3, 2, 12, 90)
SLACK = 1.0 + 1e-9
RULES = {
    "gradient": ClippingRule.gradient(0.3),
    "difference": ClippingRule.difference(0.2),
    "momentum": ClippingRule.momentum(0.3, 0.4, 0.1),
    "joint": ClippingRule.joint(0.2, 0.3),
}


def crowd(rng: np.random.Generator, sizes: tuple[int, ...] = SIZES, d: int = 5) -> tuple[Any, Any, Any]:
    """Rows, ids and who they are, shuffled so that nobody's records lie together."""
    ids = np.repeat(np.arange(len(sizes)), sizes)
    X = rng.normal(size=(len(ids), d)) * (rng.random((len(ids), d)) < 0.6)
    order = rng.permutation(len(ids))
    return X[order], ids[order], rng


def losses() -> dict[str, Any]:
    return {
        "logistic": Logistic(),
        "logistic+intercept": Logistic(intercept=True),
        "huber": Huber(0.7, intercept=True),
        "squared": Squared(),
        "hinge": Hinge(0.5),
        "multinomial": Multinomial(3, intercept=True),
        "bounded rows": Logistic(row_bound=1.0, rows="clip", intercept=True),
        "moved": Squared(transform=Affine(np.arange(5.0), np.full(5, 0.5)), intercept=True),
        "moved classes": Multinomial(3, transform=Affine(np.arange(5.0), np.full(5, 0.5))),
    }


def targets(loss: Any, rng: np.random.Generator, n: int) -> Any:
    if loss.task == "regression":
        return rng.normal(size=n) * 3
    return rng.integers(0, max(loss.outputs, 2), n)


def reference(
    loss: Any, X: Any, y: Any, people: UnitGrouping, points: list[Any], rule: ClippingRule, who: Any
) -> Any:
    """The same sum, one record and one person after the other."""
    table = loss.prepare((X, y))
    rows = X if loss.transform is None else (X - loss.transform.shift) @ np.diag(loss.transform.scale)
    if table.factors.size:
        rows = rows * table.factors[:, None]
    if loss.intercept:
        rows = np.hstack([rows, np.ones((len(rows), 1))])
    grads = []
    for params in points:
        scores = rows @ params.reshape(rows.shape[1], -1)
        r = loss.residuals(scores, table.y)
        grads.append(rows[:, :, None] * r[:, None, :])
    out = np.zeros(table.dim)
    for p in who:
        mine = people.order[people.starts[p] : people.starts[p + 1]]
        combined = [g[mine].reshape(len(mine), -1).sum(axis=0) for g in grads]
        if people.rule.combine == "mean":
            combined = [g / len(mine) for g in combined]
        now, before = combined[0], combined[-1]
        moved = now - rule.beta * before
        out += rule.alpha * moved * min(1.0, rule.clip / max(float(np.linalg.norm(moved)), 1e-300))
        if rule.gamma:
            out += rule.gamma * now * min(1.0, rule.second_clip / max(float(np.linalg.norm(now)), 1e-300))
    return out


@pytest.mark.parametrize("name", losses())
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_sums_are_those_of_combined_records(name: str, combine: Any, layout: str) -> None:
    loss, rng = losses()[name], np.random.default_rng(3)
    X, ids, _ = crowd(rng)
    y = targets(loss, rng, len(X))
    asked = UserLevelObjective(loss, PersonRule(combine))
    records = asked.prepare(RecordsWithIds((X if layout == "dense" else sparse.csr_array(X), y), ids))
    points = [rng.normal(size=records.dim) for _ in range(2)]
    for rule, who in itertools.product(RULES.values(), (None, np.array([2, 0, 5]), np.array([], np.int64))):
        out = np.zeros(records.dim)
        given = points if rule.beta else points[:1]
        asked.add(Batch(records, who), given, rule, out)
        everyone = range(len(records)) if who is None else who
        expected = reference(loss, X, y, UnitGrouping.of(ids, PersonRule(combine)), given, rule, everyone)
        np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loss", [Squared(), OneVsRestHinge(3, intercept=True), Logistic(intercept=True)])
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_full_batches_under_a_matrix_and_in_many_blocks(
    loss: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person whose records lie in several blocks is combined over all of them."""
    from dataclasses import replace

    from quietgrad.tables import table

    rng = np.random.default_rng(4)
    X, ids, _ = crowd(rng)
    scale = rng.normal(size=(5, 5))
    scale = scale @ scale.T
    y = targets(loss, rng, len(X))
    mixed = replace(loss, transform=Affine(np.ones(5), scale))
    asked = UserLevelObjective(mixed)
    records = asked.prepare(RecordsWithIds((X if layout == "dense" else sparse.csr_array(X), y), ids))
    # The same rows, transformed by hand
    by_hand = UserLevelObjective(loss).prepare(RecordsWithIds(((X - 1.0) @ scale, y), ids))
    points = [rng.normal(size=records.dim) for _ in range(2)]
    for size in (1 << 18, 64):
        monkeypatch.setattr(table, "_BLOCK", size)
        monkeypatch.setattr(full_batch, "_AT_ONCE", 1 if size == 64 else 1 << 21)
        for rule in RULES.values():
            out, expected = np.zeros(records.dim), np.zeros(records.dim)
            given = points if rule.beta else points[:1]
            asked.add(Batch(records, None), given, rule, out)
            UserLevelObjective(loss).add(Batch(by_hand, None), given, rule, expected)
            np.testing.assert_allclose(out, expected, rtol=1e-8, atol=1e-10)


def worst(rng: np.random.Generator, size: int, d: int, kind: str) -> Any:
    """All the rows of one person, as hostile as they may be."""
    if kind == "aligned":  # all at the clip in one direction
        return np.tile(rng.normal(size=d) * 1e3, (size, 1))
    if kind == "huge":
        return rng.normal(size=(size, d)) * 1e200
    if kind == "mixed":
        return rng.normal(size=(size, d)) * np.exp2(rng.integers(-300, 300, (size, 1)).astype(float))
    if kind == "cancelling":  # a sum far shorter than its terms: its norm is what rounding leaves
        pairs = rng.normal(size=(size, d)) * 1e7
        pairs[1::2] = -pairs[0 : 2 * (size // 2) : 2] * (1.0 + 1e-9 * rng.normal(size=(size // 2, 1)))
        return pairs
    if kind == "zero":
        return np.zeros((size, d))
    return rng.normal(size=(size, d))


@pytest.mark.parametrize("name", ["logistic", "squared", "multinomial", "bounded rows", "moved", "moved classes"])
@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_one_person_moves_a_gradient_by_no_more_than_the_bound(name: str, layout: str, combine: Any) -> None:
    loss, rng = losses()[name], np.random.default_rng(5)
    X, ids, _ = crowd(rng, (1, 7, 2, 30, 1))
    y = targets(loss, rng, len(X))
    asked = UserLevelObjective(loss, PersonRule(combine))
    points = None
    for size, kind in itertools.product((1, 7, 500), ("plain", "aligned", "huge", "mixed", "cancelling", "zero")):
        sums = []
        for seed in (0, 1, None):  # two people who might be there, and nobody
            own = np.random.default_rng(seed)
            extra = worst(own, size if seed is not None else 0, X.shape[1], kind)
            there = np.vstack([X, extra]), np.concatenate([y, targets(loss, own, len(extra))])
            who = np.concatenate([ids, np.full(len(extra), 99)])
            layed = sparse.csr_array(there[0]) if layout == "csr" else there[0]
            people = _unchecked(who, combine)
            records = asked.prepare(RecordsWithIds((layed, there[1]), people))
            points = [rng.normal(size=records.dim) for _ in range(2)] if points is None else points
            for rule, everyone in itertools.product(RULES.values(), (True, False)):
                out = np.zeros(records.dim)
                batch = Batch(records, None if everyone else np.arange(len(records)))
                asked.add(batch, points if rule.beta else points[:1], rule, out)
                sums.append(out)
        each = 2 * len(RULES)
        for k, rule in enumerate(itertools.chain.from_iterable((r, r) for r in RULES.values())):
            one, other, nobody = sums[k], sums[each + k], sums[2 * each + k]
            assert np.isfinite(one).all()
            assert np.linalg.norm(one - nobody) <= rule.bound * SLACK + 1e-12 * np.linalg.norm(nobody)
            assert np.linalg.norm(one - other) <= 2 * rule.bound * SLACK + 1e-12 * np.linalg.norm(nobody)


def _unchecked(ids: Any, combine: Any = "mean", most: int | None = None) -> UnitGrouping:
    """People without the check that nobody has nearly all records: tests are about one who does."""
    codes = np.unique(ids, return_inverse=True)[1]
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    return UnitGrouping(np.argsort(codes, kind="stable"), starts, PersonRule(combine, most))


def test_records_are_chosen_evenly_and_by_the_key_alone() -> None:
    people = UnitGrouping.of(np.repeat(np.arange(20), 13), PersonRule(records_per_person=4))
    counts = np.zeros(260)
    for k in range(400):
        rows, starts = people.groups(np.arange(20), bytes([k % 256] * 31 + [k // 256])).flat()
        assert (np.diff(starts) == 4).all()
        assert len(set(rows.tolist())) == 80
        counts[rows] += 1
    # 400·4/13 = 123 each, deviation 9.2; six deviations: a false alarm in 10⁶ for all 260 together
    assert np.abs(counts - 400 * 4 / 13).max() < 6 * 9.3
    alone = people.groups(np.array([7]), b"k" * 32).flat()[0]
    among = people.groups(np.array([3, 7, 1]), b"k" * 32).flat()[0][4:8]
    assert alone.tolist() == among.tolist()


@pytest.mark.parametrize("ids", [
    [1, "1", 2], [1, None, 2], [1.0, math.nan, 2.0], ["a", "", "b"], [[1], [2], [3]], [1.5, 2.0, 3.0],
    [True, False, True], ["é", "e\u0301", "x"], ["a", "a ", "b"], [1, 2], [b"a", "a", "b"], np.ones((3, 1)),
    ["a", "a\u200b", "b"], [b"a", b"a ", b"b"], {1, 2, 3}, np.ma.masked_equal([1, 2, 3], 2), ["a b", "a  b", "c"],
    np.array(["2020-01-01", "2020-01-03", "2020-01-02"], "datetime64[D]"), [2.0**60, 1.0, 2.0], "abc", [1, 1.0, 2],
    np.array([b"a", b"b", b"c"]), np.array([1, 2, 3], "m8[s]"), [True, 1, 2],
])  # fmt: skip
def test_ids_that_cannot_be_trusted_are_refused_without_being_shown(ids: Any) -> None:
    with pytest.raises(DataError) as error:
        UnitGrouping.of(ids, records=3)
    message = str(error.value)
    assert message.startswith("person: ")
    assert not any(secret in message for secret in ("é", "NaT", "1.5", "1152921504606846976"))


def test_slots_do_not_know_the_numbers_of_people() -> None:
    """Two words that differ in their lowest bits only are put in their own order, not in that of places."""
    from quietgrad.core.sampling.samplers import permuted_slots

    class Words:
        def uint64(self, block: int, size: int) -> Any:
            return np.array([5 << 20 | 3, 1 << 20, 5 << 20 | 1, 9 << 20], np.uint64)

    stream: Any = Words()
    assert permuted_slots(4, stream).tolist() == [2, 0, 1, 3]


def test_whose_nearly_all_records_are_is_not_told_by_a_refusal() -> None:
    assert len(UnitGrouping.of([7] * 9 + [1])) == 2


def test_kinds_of_ids() -> None:
    pandas = pytest.importorskip("pandas")
    for ids in (["b", "a", "b"], np.array([3, 1, 3]), np.array([3.0, 1.0, 3.0]), [2**80, 1, 2**80],
                pandas.Series(["b", "a", "b"], dtype="string"), pandas.Series(["b", "a", "b"]).astype("category"),
                pandas.Series([5, 1, 5], dtype="Int64")):  # fmt: skip
        people = UnitGrouping.of(ids)
        assert people.order.tolist() == [0, 2, 1]
    with pytest.raises(DataError, match="has no id"):
        UnitGrouping.of(pandas.Series([1, None, 2], dtype="Int64"))


def test_an_id_is_known_again_however_it_is_held() -> None:
    """Across parts and parties: one that is not would be used twice, or counted in one party."""
    key = b"k" * 32
    forms: list[Any] = [
        [1, np.int64(2)], np.array([2, 1], np.uint8), [np.int32(1), 2], [1.0, 2.0],
        pd.Series([1, 2], dtype="Int64"),
    ]  # fmt: skip
    assert len({frozenset(hashed_ids(ids, key)) for ids in forms}) == 1
    assert {kind_of(ids) for ids in forms} == {"number"}
    assert hashed_ids(["1", "2"], key).isdisjoint(hashed_ids([1, 2], key))
