"""The bound of a local update by brute force: whatever a party's records are, it contributes no more than C."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.summing import batch_sum
from quietgrad.objectives import L2, Huber, Logistic, Multinomial, Squared
from quietgrad.tables.parties import PartyLevelObjective
from quietgrad.tables.privacy_units import GroupIndex, RecordsWithIds, UnitGrouping
from quietgrad.tables.queries.local_update import LocalTraining, LocalUpdateQuery
from quietgrad.tables.table import Affine

LOSSES = [
    (Logistic(), 2), (Huber(1.0), 0), (Squared(), 0), (Multinomial(classes=3, intercept=True), 3),
    (Logistic(regularizer=L2(0.1, unpenalized=1), intercept=True, row_bound=1.0), 2),
]  # fmt: skip


def _sum(loss: Any, X: Any, y: Any, ids: Any, query: LocalUpdateQuery, indices: Any = None) -> Any:
    asked = PartyLevelObjective(loss)
    records = asked.prepare(RecordsWithIds((X, y), ids))
    like = asked.initial(records)
    return batch_sum(query, asked, Batch(records, indices, bytes(32)), like, private=True)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("loss", "classes"), LOSSES)
def test_no_partys_contribution_exceeds_the_bound(loss: Any, classes: int, share: float) -> None:
    rng = np.random.default_rng(1)
    for trial in range(60):
        sizes = rng.integers(1, 30, 4)
        n = int(sizes.sum())
        X = rng.standard_normal((n, 3)) * 10.0 ** rng.integers(-6, 12, (n, 1))
        if trial % 7 == 0:
            X[: sizes[0]] = 1e160  # overflows on the way
        y = rng.integers(0, classes, n) if classes else rng.standard_normal(n) * 10.0 ** rng.integers(-3, 9)
        ids = np.repeat(np.arange(4), sizes)
        dim = loss.initial(loss.prepare((X, y))).size
        query = LocalUpdateQuery(
            rng.standard_normal(dim) * 10.0 ** rng.integers(-3, 3), int(rng.integers(1, 6)),
            10.0 ** rng.integers(-3, 4), int(rng.integers(1, 40)), 10.0 ** rng.integers(-3, 3), share,
        )  # fmt: skip
        with_it, without = (_sum(loss, X, y, ids, query, np.array(there)) for there in ([0, 1, 2, 3], [0, 1, 3]))
        assert np.isfinite(with_it).all()
        slack = 1e-9 * (abs(with_it).max() + query.bound)
        assert np.linalg.norm(with_it - without) <= query.bound + slack


def test_the_bound_is_attained_and_turned_round_by_one_record() -> None:
    query = LocalUpdateQuery(np.zeros(2), 3, 0.1, 20, 1.0)
    X, y = np.array([[1e6, 0.0], [1.0, 0.0]]), np.array([1.0, 1.0])
    ahead = _sum(Logistic(), X, y, [0, 0], query)
    back = _sum(Logistic(), np.vstack([X, [-1e8, 0.0]]), np.append(y, 1.0), [0, 0, 0], query)
    assert np.linalg.norm(ahead - back) == pytest.approx(2.0, rel=1e-9)  # a record's distance is 2C, a party's C


def test_undrawn_parties_add_nothing_and_drawn_ones_their_bit() -> None:
    X, y, ids = np.zeros((6, 2)), np.zeros(6), [0, 0, 1, 1, 2, 2]
    query = LocalUpdateQuery(np.zeros(2), 3, 0.1, 20, 1.0, 0.2)
    none = _sum(Logistic(), X, y, ids, query, np.array([], np.int64))
    two = _sum(Logistic(), X, y, ids, query, np.array([0, 2]))
    assert none.tolist() == [0.0, 0.0, 0.0]
    assert two == pytest.approx([0.0, 0.0, 2 * query.bit])


def test_a_party_trains_alike_whoever_else_takes_part() -> None:
    rng = np.random.default_rng(2)
    X, ids = rng.standard_normal((60, 3)), np.repeat(np.arange(4), [5, 30, 15, 10])
    y = (X[:, 0] > 0) * 1.0
    query = LocalUpdateQuery(np.zeros(3), 7, 0.5, 4, 100.0)
    alone = [_sum(Logistic(), X, y, ids, query, np.array([k])) for k in range(4)]
    assert _sum(Logistic(), X, y, ids, query) == pytest.approx(np.sum(alone, axis=0), rel=1e-12)


def test_training_that_expands_the_last_bit_is_no_other_partys_doing() -> None:
    """Where gradients cancel, rounding decides where an update points: a party of 20 records padded the others.

    With shapes that followed from all parties the sum moved by 7 C.
    """
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((7 * 60 + 20, 1)) * 300.0, rng.standard_normal(7 * 60 + 20)
    ids = np.minimum(np.arange(len(y)) // 7, 60)
    for party in range(61):
        x, mine = X[ids == party, 0], ids == party
        for _ in range(2):
            y[mine] -= x * (x @ y[mine]) / (x @ x)
    query = LocalUpdateQuery(np.zeros(1), 10, 0.1, 20, 1.0)
    alone = _sum(Squared(), X, y, ids, query, np.arange(60))
    assert abs(_sum(Squared(), X, y, ids, query) - alone) <= query.bound


BITWISE = [
    Squared(), Logistic(row_bound=1.0, intercept=True), Logistic(row_bound=1.0, rows="normalize"),
    Squared(transform=Affine(np.full(3, 0.3), np.array([[2.0, 1.0, 0.0], [1.0, 1.0, 0.5], [0.0, 0.5, 3.0]]))),
]  # fmt: skip


@pytest.mark.parametrize("loss", BITWISE)
def test_a_partys_update_is_the_same_to_the_last_bit_beside_any_others(loss: Any) -> None:
    rng = np.random.default_rng(3)
    training = LocalTraining(7, 3.0, 12, loss.regularizer)
    for _ in range(20):
        sizes = rng.integers(1, 30, 6)
        ids = np.repeat(np.arange(6), sizes)
        X, y = rng.standard_normal((len(ids), 3)), rng.integers(0, 2, len(ids)) * 1.0

        def updates(parties: Any, X: Any = X, y: Any = y, ids: Any = ids) -> set[bytes]:
            there = np.isin(ids, parties)
            records, groups = loss.prepare((X[there], y[there])), UnitGrouping.of(ids[there])
            clients = GroupIndex(None, groups.order, groups.starts, True)
            blocks = loss.local_updates(Batch(records, None, None), clients, np.ones(records.dim), training)
            return {row.tobytes() for block in blocks for row in block}

        assert updates(rng.permutation(6)[:3]) < updates(np.arange(6))


class _Centred(Squared):
    """Its residuals are taken from the mean of all rows that it is given."""

    trains_apart = True  # what a loss says of itself counts for nothing

    def residuals(self, scores: Any, y: Any) -> Any:
        found = super().residuals(scores, y)
        return found - 50.0 * found.mean()


class _Crowded(L2):
    """A penalty that pulls every client by the sum of all of them."""

    def gradient(self, params: Any) -> Any:
        pulled: Any = super().gradient(params)
        return pulled - 5.0 * np.sum(params)


@pytest.mark.parametrize("loss", [_Centred(), Squared(regularizer=_Crowded(0.1))], ids=["loss", "penalty"])
def test_code_that_would_mix_clients_is_asked_about_one_at_a_time(loss: Any) -> None:
    rng = np.random.default_rng(4)
    ids = np.repeat(np.arange(30), 4)
    X, y = rng.standard_normal((len(ids), 1)), np.zeros(len(ids))
    y[:4] = 1e3  # one client that would move all others
    query = LocalUpdateQuery(np.zeros(1), 3, 0.1, 4, 1.0)
    rest = np.arange(1, 30)
    assert abs(_sum(loss, X, y, ids, query) - _sum(loss, X, y, ids, query, rest)) <= query.bound * (1 + 1e-9)
