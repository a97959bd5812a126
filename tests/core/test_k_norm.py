"""The K-norm mechanism: its law, its price, what it refuses, and labels found by Laplace counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from quietgrad.assurance.audit.noise_checks import AnonymousRecords, ConstantQuery, EmptyObjective
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.events import Pure
from quietgrad.core.errors import BudgetError
from quietgrad.core.noise.grid import NoiseStream
from quietgrad.core.noise.k_norm import KNormNoise, LaplacePartitionSelection, k_norm_noise
from quietgrad.core.noise.mechanisms import from_json
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.plans.slots import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.curator import CentralCurator
from quietgrad.tables.queries.counts import LabelCounts


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_norm_of_a_block_has_its_law_and_the_numbers_their_variance(width: int) -> None:
    """Kolmogorov's test of the norm: a right program fails with probability 10⁻⁶ for each width."""
    noise = k_norm_noise(40_000, width, 2.0, NoiseStream(bytes(32), "test"), 0)
    norms = np.abs(noise).max(axis=1)
    assert stats.kstest(norms, stats.gamma(width, scale=2.0).cdf).pvalue > 1e-6
    assert stats.kstest(norms, stats.gamma(width, scale=2.1).cdf).pvalue < 1e-6  # the test sees 5 %
    wanted = 4.0 * (width + 1) * (width + 2) / 3.0
    assert noise.var() == pytest.approx(wanted, rel=0.06)
    assert KNormNoise(width).loudness ** 2 == pytest.approx(wanted / 4.0)


@pytest.mark.parametrize("relation", Relation)
def test_the_density_pays_for_the_largest_move_and_for_no_more(relation: Relation) -> None:
    """ε is Δ/b: the log ratio of densities at two neighbours reaches it and never exceeds it."""
    mechanism, z = KNormNoise(3), 4.0
    event = mechanism.once(z, relation)
    assert isinstance(event, Pure)
    far = 1.0 if relation is Relation.ADD_REMOVE else 2.0
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(2000):
        at, move = rng.normal(size=(2, 3)) * 9.0, rng.uniform(-1.0, 1.0, (2, 3))
        move[0, rng.integers(3)] = rng.choice([-1.0, 1.0])
        if relation is Relation.ADD_REMOVE:
            move[1] = 0.0
        worst = max(worst, abs(np.abs(at).max(axis=1).sum() - np.abs(at - move).max(axis=1).sum()) / z)
    assert worst <= event.epsilon * (1 + 1e-12)
    assert event.epsilon == pytest.approx(far / z)


@dataclass(frozen=True)
class OnlyL2:
    """A query that declares no other bound than that in L2."""

    bound: float = 1.0

    def dim(self, records: object) -> int:
        return 4

    def sum_into(self, objective: object, batch: object, out: Any) -> None:
        out += 1.0


def opened(mechanism: Any) -> Any:
    plan = Plan("try", {}, Schedule((Slot("a", FullBatch(), 2, mechanism=mechanism),)), 9, Budget(1.0, 1e-6), 3.0)
    return CentralCurator(EmptyObjective(), AnonymousRecords(9, 4, np.arange(9))).open(plan)


def test_a_query_with_a_bound_in_l2_alone_is_refused() -> None:
    session = opened(KNormNoise(2))
    with pytest.raises(BudgetError, match="declares no bound"):
        session.release("a", OnlyL2())
    assert len(session.release("a", ConstantQuery(5, 1.0))) == 5  # the last block is shorter


def test_labels_by_laplace_counts_pass_as_often_as_the_failure_says() -> None:
    mechanism = LaplacePartitionSelection(0.01)
    assert from_json(mechanism.to_json()) == mechanism
    bound = mechanism.bound_of(LabelCounts(Relation.REPLACE_ONE))
    assert bound == 1.0
    assert mechanism.threshold(3.0, bound) == pytest.approx(1.0 + 3.0 * math.log(50.0), rel=1e-4)
    passed = mechanism.source(bytes(32), "labels", 1).passing(np.ones(200_000), 0, 3.0, bound).sum()
    # Binomial: above 0.01 by six deviations with probability below 10⁻⁸.
    assert 0.0085 * 200_000 < passed <= 0.01 * 200_000 + 6.0 * math.sqrt(2000.0)
