"""Second order: landscapes, SPIDER, perturbed SGD, its settings, and the search among iterates."""

from __future__ import annotations

import dataclasses
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reproduce.landscapes import landscape
from scipy import special

import quietgrad as qg
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon
from quietgrad.core.errors import BudgetError, ExhaustedError
from quietgrad.core.plans.schedule import Schedule
from quietgrad.core.session import checkpoint
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.objectives import Batch, LossConstants
from quietgrad.core.session.queries import (
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    RecursiveMomentumQuery,
)
from quietgrad.federation import Party, simulate
from quietgrad.methods.base import State
from quietgrad.methods.oracles.base import Estimate, Oracle
from quietgrad.methods.oracles.gradient_estimators import MiniBatch, RecursiveMomentum
from quietgrad.methods.second_order_theorem import solve
from quietgrad.tables.landscapes import SyntheticRecords
from quietgrad.tables.queries.second_order import GradientNorm, LeastEigenvalue, StationarityGap

FALSE_ALARM = 1e-6
ROOT = Path(__file__).parents[2]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

HILL = qg.objectives.landscape("strict-saddle", d=6)
BUDGET = qg.Budget(4.0, 1e-6, qg.Relation.REPLACE_ONE)
UNIT = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
ALL: dict[str, Any] = {
    "strict-saddle": landscape("strict-saddle", d=7, descending=2),
    "matrix-sensing": landscape("matrix-sensing", size=3, rank=2),
    "phase-retrieval": landscape("phase-retrieval", d=5),
    "two-layer": landscape("two-layer", inputs=3, hidden=2),
}
UNBOUNDED = qg.objectives.Squared(row_bound=100.0)
TABLE = np.random.default_rng(0).standard_normal((600, 6)), np.zeros(600)
every = pytest.mark.parametrize("land", list(ALL.values()), ids=list(ALL))


# --- landscapes ------------------------------------------------------------------------------------------------


def numeric(function: Callable[[Floats], Any], at: Floats, h: float = 1e-5) -> Floats:
    return np.array([(function(at + h * e) - function(at - h * e)) / (2 * h) for e in np.eye(len(at))])


def matrix(product: Callable[[Floats], Floats], dim: int) -> Floats:
    return np.array([product(e) for e in np.eye(dim)])


def somewhere(land: Any, seed: int = 1) -> Floats:
    """A point of the domain."""
    x: Floats = np.random.default_rng(seed).standard_normal(land.dim)
    x *= 0.25 * land.radius / float(np.linalg.norm(x))
    assert land.inside(x)
    return x


def rows(land: Any, records: Any, which: Any, x: Floats) -> Floats:
    """The gradient of each record, one by one."""
    out = np.zeros((len(which), land.dim))
    for row, i in zip(out, which, strict=True):
        GradientQuery(x, math.inf).sum_into(land, Batch(records, np.array([i])), row)
    return out


@every
def test_population_derivatives_are_exact(land: Any) -> None:
    x = somewhere(land)
    np.testing.assert_allclose(numeric(land.population_risk, x), land.population_gradient(x), atol=1e-8)
    hessian = matrix(lambda v: land.population_hessian_product(x, v), land.dim)
    np.testing.assert_allclose(numeric(land.population_gradient, x), hessian, atol=1e-8)


@every
def test_empirical_derivatives_are_exact(land: Any) -> None:
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
def test_critical_points_are_what_they_are_said_to_be(land: Any) -> None:
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
def test_records_average_to_the_population(land: Any) -> None:
    """The mean gradient of 40 000 records, each coordinate within 6 standard errors (false alarm below 1e-6)."""
    x, records = somewhere(land), land.prepare(40_000)
    spread = rows(land, records, range(400), x).std(axis=0) * 1.2
    deviation = np.abs(land.risk_gradient(records, x) - land.population_gradient(x))
    assert (deviation <= 6.0 * spread / 200.0 + 1e-12).all()


@every
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), far=st.floats(0.05, 0.999))
def test_constants_hold_on_the_domain(land: Any, seed: int, far: float) -> None:
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
    assert np.linalg.norm(rows(land, records, range(64), x), axis=1).max() <= stated.lipschitz * (1 + 1e-9)
    for k in range(0, 64, 8):
        hessian = np.zeros((land.dim, land.dim))
        land.add_hessians(Batch(records, np.array([k])), x, math.inf, hessian)
        assert np.abs(np.linalg.eigvalsh(hessian)).max() <= stated.smoothness * (1 + 1e-9)
    change = matrix(
        lambda v: land.population_hessian_product(x, v) - land.population_hessian_product(y, v), land.dim
    )
    size = float(np.abs(np.linalg.eigvalsh(change)).max())
    assert size <= stated.hessian_lipschitz * float(np.linalg.norm(x - y)) * (1 + 1e-9) + 1e-12


@every
def test_sums_match_clipping_record_by_record(land: Any) -> None:
    rng = np.random.default_rng(3)
    records, x, y = land.prepare(40), somewhere(land, 1), somewhere(land, 2)
    chosen = rng.permutation(40)[:17]

    def clipped(rows: Floats, clip: float) -> Floats:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows * np.minimum(1.0, clip / np.maximum(lengths, 1e-300)))

    for indices in (None, chosen):
        which = range(40) if indices is None else indices
        now, then = rows(land, records, which, x), rows(land, records, which, y)
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
def test_one_record_never_exceeds_the_clip(land: Any, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    one = dataclasses.replace(land, seed=seed).prepare(1)
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


@every
def test_records_that_are_not_finite_count_as_nothing(land: Any) -> None:
    out, records = np.zeros(land.dim), land.prepare(5)
    GradientQuery(np.full(land.dim, 1e200), 1.0).sum_into(land, Batch(records, None), out)
    assert np.isfinite(out).all()
    hessian = np.zeros((land.dim, land.dim))
    land.add_hessians(Batch(records, None), np.full(land.dim, 1e200), 1.0, hessian)
    assert np.isfinite(hessian).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: landscape("volcano"), "must be 'strict-saddle'"),
        (lambda: landscape("strict-saddle", d=2, descending=3), "descending=3"),
        (lambda: landscape("strict-saddle", curvature=-1.0), "curvature=-1.0"),
        (lambda: landscape("strict-saddle", curvature_noise=1.0), "curvature_noise"),
        (lambda: HILL.prepare(0), "samples its own records"),
        (lambda: HILL.prepare("a9a"), "data 'a9a'"),
        (lambda: HILL.prepare(SyntheticRecords({"x": np.zeros(3)}, 99)), "99 parameters"),
        (lambda: HILL.check_domain(np.full(6, 9.0)), "outside the domain"),
        (lambda: HILL.check_domain(np.zeros(3)), r"shape \(3,\)"),
        (lambda: qg.minimize(HILL, 9000, qg.PerturbedSGD(), budget=BUDGET, start=np.full(6, 0.6)), "outside"),
        (lambda: qg.AdaptiveSpider(kappa=0.0), "kappa=0.0"),
        (lambda: qg.AdaptiveSpider(batch_size=0), "batch_size=0"),
        (lambda: qg.AdaptiveSpider(regime="twice"), "regime='twice'"),  # type: ignore[arg-type]
        (
            lambda: qg.minimize(UNBOUNDED, TABLE, qg.PerturbedSGD(), budget=None),
            "no finite lipschitz",
        ),
        (lambda: qg.AdaptiveSpider().slots(59, 10), "n=59: too small for one full query"),
        (lambda: Schedule(MiniBatch(10).slots(100, 5), "parallel"), "every slot must be a SinglePass"),
        (lambda: qg.PerturbedSGD(mode="guess"), "mode='guess'"),  # type: ignore[arg-type]
        (lambda: qg.PerturbedSGD(returns="best"), "returns='best'"),  # type: ignore[arg-type]
        (lambda: qg.PerturbedSGD(chi=-1.0), "chi=-1.0"),
        (lambda: qg.PerturbedSGD(attempts=0), "attempts=0"),
        (lambda: qg.minimize(HILL, 6000, qg.PerturbedSGD(), budget=BUDGET), "n=6000: too small"),
        (
            lambda: qg.minimize(HILL, 9**6, qg.PerturbedSGD(curvature=0.2), budget=BUDGET),
            "not below curvature",
        ),
        (
            lambda: qg.minimize(HILL, 6000, qg.PerturbedSGD(oracle=RecursiveMomentum(10)), budget=BUDGET),
            "chi=None: RecursiveMomentum states no error",
        ),
        (lambda: qg.ModelSelection(held_out=1.0), "held_out=1.0"),
        (lambda: qg.ModelSelection(oracle=qg.AdaptiveSpider(regime="reuse")), "regime='reuse'"),
        (lambda: qg.ModelSelection(oracle=qg.AdaptiveSpider(900)).schedule(1000), "n=1000: too small"),
    ],
)
def test_bad_settings_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- queries ---------------------------------------------------------------------------------------------------


def asked(query: Any, objective: Any, records: Any, indices: Any) -> Floats:
    out = np.zeros(query.dim(records))
    query.sum_into(objective, Batch(records, indices), out)
    return out


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), which=st.integers(0, 2), exponent=st.floats(-3.0, 1.0))
def test_one_record_moves_no_query_beyond_its_bound(seed: int, which: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    if which == 2:
        objective: Any = qg.objectives.Logistic(intercept=True, regularizer=qg.objectives.Nonconvex(0.1))
        records = objective.prepare(
            (rng.standard_normal((8, 4)) * 10.0 ** rng.uniform(-2, 2), rng.integers(0, 2, 8))
        )
        d = 5
    else:
        objective = landscape(*[("strict-saddle",), ("phase-retrieval",)][which], d=5, seed=seed)
        records, d = objective.prepare(8), 5
    x, size = rng.standard_normal(d), 10.0**exponent
    queries: list[Any] = [
        GradientNorm(x, size, 8.0),
        LeastEigenvalue(x, size, 8.0),
        StationarityGap(x, 0.1, 1.0, size, size, 8.0),
    ]
    everyone, others = np.arange(8), np.delete(np.arange(8), rng.integers(8))
    for query in queries:
        gap = asked(query, objective, records, everyone) - asked(query, objective, records, others)
        assert float(np.linalg.norm(gap)) <= query.bound * (1 + 1e-9), query


def test_excess_is_negative_exactly_at_stationary_points() -> None:
    records = HILL.prepare(50_000)
    at = [(HILL.saddle(), False), (HILL.minimum(), True), (0.5 * HILL.minimum(), False)]
    for x, stationary in at:
        value = asked(StationarityGap(x, 0.03, 6.9, 2.0, 4.0, 50_000.0), HILL, records, None)[0]
        assert (value <= 0.0) == stationary


# --- SPIDER ----------------------------------------------------------------------------------------------------


def opened(
    oracle: Any,
    n: int = 600,
    budget: qg.Budget | None = None,
    objective: Any = HILL,
    data: Any = None,
    seed: int = 0,
) -> CentralSession:
    plan = qg.plan(qg.PerturbedSGD(oracle=oracle, steps=200), n=n, budget=budget)
    return CentralCurator(objective, n if data is None else data, seed=seed).open(plan)


class Spy:
    """A query that notes which records it was given and contributes nothing."""

    def __init__(self, seen: list[Indices]) -> None:
        self.seen = seen
        self.bound = 1.0

    def dim(self, records: Any) -> int:
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        assert batch.indices is not None
        self.seen.append(batch.indices)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(20, 300),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    calls=st.lists(st.booleans(), max_size=60),
    relation=st.sampled_from(list(qg.Relation)),
    seed=st.integers(0, 10),
)
def test_no_record_is_used_twice_across_both_slots(
    n: int, sizes: tuple[int, int], calls: list[bool], relation: qg.Relation, seed: int
) -> None:
    oracle = qg.AdaptiveSpider(batch_size=sizes[0], difference_batch_size=sizes[1], kappa=1.0)
    door = opened(oracle, n, qg.Budget(1.0, 1e-5, relation), seed=seed)
    seen: list[Indices] = []
    for first in calls:
        before = door.used
        try:
            door.release("o1" if first else "o2", Spy(seen))
        except ExhaustedError:
            assert door.used == before  # the refusal counted nothing
    used = np.concatenate(seen) if seen else np.empty(0, np.int64)
    assert np.unique(used).size == used.size <= n
    if relation is qg.Relation.REPLACE_ONE:
        assert used.size == door.used["o1"] * sizes[0] + door.used["o2"] * sizes[1]


def test_removing_a_record_moves_no_other_one_between_releases() -> None:
    def batches(n_records: int) -> list[set[int]]:
        seen: list[Indices] = []
        plan = qg.plan(qg.PerturbedSGD(oracle=qg.AdaptiveSpider(10, 5)), n=100, budget=qg.Budget(1.0, 1e-5))
        door = CentralCurator(HILL, n_records, seed=3).open(plan)
        for slot in ("o1", "o2", "o2", "o1"):
            door.release(slot, Spy(seen))
        return [set(batch.tolist()) for batch in seen]

    assert batches(99) == [batch - {99} for batch in batches(100)]


def test_a_fresh_run_costs_one_gaussian_release_whatever_its_length() -> None:
    for relation, factor in ((qg.Relation.REPLACE_ONE, 2.0), (qg.Relation.ADD_REMOVE, 1.0)):
        budget = qg.Budget(1.3, 1e-6, relation)
        plan = qg.plan(qg.PerturbedSGD(oracle=qg.AdaptiveSpider()), n=10_000, budget=budget)
        assert plan.schedule.composition == "parallel"
        assert plan.schedule.releases > 500
        assert gaussian_epsilon(factor / plan.noise_multiplier, 1e-6) == pytest.approx(1.3, rel=2e-3)


def test_reuse_is_composed_and_an_adaptive_run_gives_nothing_back() -> None:
    oracle = qg.AdaptiveSpider(50, 20, regime="reuse", full_queries=7)
    algorithm = qg.PerturbedSGD(oracle=oracle, steps=30, chi=1e-9, radius=1.0, escape_steps=5)
    plan = qg.plan(algorithm, n=2000, budget=qg.Budget(2.0, 1e-5))
    assert [(slot.name, slot.count) for slot in plan.schedule.slots] == [("o1", 7), ("o2", 30)]
    # All 37 planned releases are priced, though which of them happen depends on the data.
    full = plan.schedule["o1"].event(plan.noise_multiplier, qg.Relation.ADD_REMOVE)
    assert account(full, delta=1e-5, relation=qg.Relation.ADD_REMOVE) < plan.epsilon() <= 2.0
    result = qg.minimize(HILL, 2000, algorithm, budget=qg.Budget(2.0, 1e-5), seed=1, n_public=2000)
    assert sum(result.privacy.releases.values()) < plan.schedule.releases
    assert result.stopped_by == "steps"
    assert result.privacy.epsilon == pytest.approx(plan.epsilon())


def test_estimates_follow_the_recursion() -> None:
    """Against a plain re-computation from the records each release was given, without noise."""
    oracle = qg.AdaptiveSpider(batch_size=50, difference_batch_size=20, kappa=0.05)
    door, shadow = opened(oracle), opened(oracle)
    records = HILL.prepare(600)
    rng, x, state = np.random.default_rng(0), np.zeros(6), Estimate()
    value, previous, drift = np.zeros(6), x, math.inf
    kinds = []
    for _ in range(12):
        state = oracle.estimate(state, x, door)
        drift = drift + float((x - previous) @ (x - previous))
        slot = "o1" if drift >= 0.05 else "o2"
        seen: list[Indices] = []
        shadow.release(slot, Spy(seen))
        now = rows(HILL, records, seen[0], x).mean(axis=0)
        if slot == "o1":
            value, drift = now, 0.0
        else:
            value = value + now - rows(HILL, records, seen[0], previous).mean(axis=0)
        kinds.append(slot)
        assert state.value is not None
        np.testing.assert_allclose(np.asarray(state.value), value, atol=1e-12)
        assert state.drift == pytest.approx(drift)
        previous, x = x, x + 0.05 * rng.standard_normal(6)
    assert 2 <= kinds.count("o1") < 12
    assert door.used == {"o1": kinds.count("o1"), "o2": kinds.count("o2")}


@pytest.mark.parametrize("moved", [1e-3, 0.3])
def test_noise_of_a_difference_scales_with_the_step(moved: float) -> None:
    """σ on the sum is z·M·‖x − x′‖: a chi-square test of 4000 numbers on each side, false alarm 1e-6."""
    hill = qg.objectives.landscape("strict-saddle", d=4000, slope_noise=0.0, curvature_noise=0.0)
    oracle = qg.AdaptiveSpider(50, 10, smoothness=2.0, clip=1.0, kappa=10.0)
    door = opened(oracle, budget=BUDGET, objective=hill)
    before = np.zeros(4000)
    after = before.copy()
    after[1] = moved
    state = oracle.estimate(Estimate(), before, door)
    first = state.value
    state = oracle.estimate(state, after, door)
    assert state.value is not None
    noise = 10.0 * np.asarray(state.value - first - hill.population_gradient(after))
    sigma = door.plan.noise_multiplier * 2.0 * moved
    statistic = float((noise**2).sum()) / sigma**2
    low, high = (float(special.chdtri(4000, p)) for p in (1 - FALSE_ALARM / 2, FALSE_ALARM / 2))
    assert low < statistic < high
    for wrong in (0.8, 1.25):
        assert not low < statistic * wrong**2 < high


def test_differences_are_clipped_to_smoothness_times_the_step() -> None:
    steep = qg.objectives.landscape("strict-saddle", d=3, slope_noise=0.0)
    oracle = qg.AdaptiveSpider(100, 100, smoothness=0.1, clip=1.0, kappa=100.0)
    door = opened(oracle, 600, objective=steep)
    state = oracle.estimate(Estimate(), np.zeros(3), door)
    moved = oracle.estimate(state, np.array([0.0, 0.4, 0.0]), door)
    assert moved.value is not None
    assert float(np.linalg.norm(np.asarray(moved.value - state.value))) == pytest.approx(0.04)
    tight = qg.AdaptiveSpider(100, 100, smoothness=0.1, difference_clip=0.01, clip=1.0, kappa=100.0)
    limited = tight.estimate(state, np.array([0.0, 0.4, 0.0]), opened(tight, 600, objective=steep))
    assert limited.value is not None
    assert float(np.linalg.norm(np.asarray(limited.value - state.value))) == pytest.approx(0.01)


def test_stated_error_covers_the_true_one() -> None:
    """Errors of O1 over 200 runs: their mean square is below ψ², and above the noise's share."""
    oracle = qg.AdaptiveSpider(200, 50, clip=1.5, kappa=0.01)
    errors = []
    for seed in range(200):
        door = opened(oracle, 1000, BUDGET, seed=seed)
        state = oracle.estimate(Estimate(), HILL.saddle(), door)
        assert state.value is not None
        errors.append(float(state.value.dot(state.value)))
    stated = oracle.error(door)
    noise = door.plan.noise_multiplier * 1.5 / 200
    assert 0.8 * 6 * noise**2 < float(np.mean(errors)) < stated.size(6) ** 2


# --- the state machine of Algorithm 1 --------------------------------------------------------------------------


@dataclass(frozen=True)
class Script(Oracle):
    """An oracle that plays back estimates and notes where it was asked."""

    estimates: tuple[float, ...]
    asked: list[float]
    restored: list[Any]
    smoothness: float = 1.0

    def slots(self, n_public: int, steps: int) -> Any:
        return MiniBatch(1, 1.0).slots(n_public, steps)

    def estimate(self, state: Estimate, params: Any, door: Any) -> Estimate:
        self.asked.append(float(params[0]))
        self.restored.append((state.previous is None or float(state.previous[0]), state.drift))
        index = len(self.asked) - 1
        return Estimate(np.array([self.estimates[index]]), params, state.drift + 1.0, state.calls + 1)

    def asks(self, params: Any, door: Any) -> Iterator[tuple[str, Any]]:
        return iter(())

    def config(self) -> dict[str, Any]:
        return {}


def play(estimates: list[float], **settings: Any) -> tuple[Script, State]:
    """Run the state machine on one coordinate with η = 1, 3χ = 3, 𝒮 = 5, 𝒯 = 2, Q = 2."""
    oracle = Script(tuple(estimates), [], [])
    defaults: dict[str, Any] = {
        "learning_rate": 1.0, "chi": 1.0, "radius": 5.0, "escape_steps": 2, "attempts": 2,
        "hessian_lipschitz": 0.01, "steps": len(estimates), "independent": False,
    }  # fmt: skip
    algorithm = qg.PerturbedSGD(oracle=oracle, **{**defaults, **settings})
    hill = qg.objectives.landscape("strict-saddle", d=1)
    plan = qg.plan(algorithm, n=10, budget=None)
    door = CentralCurator(hill, 10, seed=0).open(plan)
    state = algorithm.init(np.zeros(1))
    while not state.done:
        state = algorithm.step(state, door)
    return oracle, state


@pytest.mark.parametrize(
    ("estimates", "settings", "asked", "stopped_by", "ends_at", "escapes"),
    [
        ([10.0, -4.0, 3.5], {}, [0.0, -10.0, -6.0], "steps", -9.5, 0),
        # Descend to −10; there ‖ĝ‖ ≤ 3: two attempts of two steps, both from −10 and with the oracle's state there.
        ([10.0, 1.0, 1.0, 0.5, 2.0, 2.0], {}, [0.0, -10.0, -10.0, -11.0, -10.0, -12.0], "sosp", -10.0, 0),
        ([10.0, 1.0, 1.0, 0.5, 2.0, 2.0], {"returns": "last"}, [0.0, -10.0], "sosp", -14.0, 0),
        # An attempt from 0: −2.9, then −5.1: escaped. Descend by 7, then a new try from −12.1 fails twice.
        ([1.0, 2.9, 2.2, 7.0, 3.0, 0.1, 0.1, 0.1, 0.1], {}, [0.0, 0.0, -2.9, -5.1, -12.1], "sosp", -12.1, 1),
        ([0.0, 1.0, 1.0, 2.0, 3.5, 9.0], {}, [0.0, 0.0, -1.0, 0.0, -2.0, -5.5], "steps", -14.5, 1),
    ],
)
def test_the_state_machine(
    estimates: list[float],
    settings: dict[str, Any],
    asked: list[float],
    stopped_by: str,
    ends_at: float,
    escapes: int,
) -> None:
    oracle, state = play(estimates, **settings)
    np.testing.assert_allclose(oracle.asked[: len(asked)], asked)
    assert (state.stopped_by, state.extra["escapes"], state.extra["alpha"]) == (stopped_by, escapes, 4.0)
    assert state.params[0] == pytest.approx(ends_at)


def test_attempts_restore_the_oracle_or_ask_afresh() -> None:
    estimates = [10.0, 1.0, 1.0, 0.5, 2.0, 2.0]
    assert play(estimates)[0].restored[2] == play(estimates)[0].restored[4] == (-10.0, 2.0)
    assert play(estimates, independent=True)[0].restored[4] == (True, 0.0)


def test_state_inside_an_attempt_survives_a_checkpoint(tmp_path: Any) -> None:
    algorithm = qg.PerturbedSGD(
        chi=0.3, radius=5.0, escape_steps=9, steps=3, learning_rate=0.1, hessian_lipschitz=0.1
    )
    door = CentralCurator(HILL, 10_000, seed=0).open(qg.plan(algorithm, n=10_000, budget=BUDGET))
    state = algorithm.init(HILL.saddle())
    while not state.done:
        state = algorithm.step(state, door)
    assert state.extra["attempt"] == 1
    checkpoint.save(tmp_path / "c", "run", state, bytes(32))
    _, loaded = checkpoint.load(tmp_path / "c", lambda run: bytes(32))
    assert isinstance(loaded.extra["saved"]["estimate"], Estimate)
    np.testing.assert_array_equal(loaded.extra["saved"]["params"], state.extra["saved"]["params"])
    np.testing.assert_array_equal(loaded.extra["saved"]["estimate"].value, state.extra["saved"]["estimate"].value)


# --- whole runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(qg.Relation))
def test_leaves_the_saddle_and_certifies_its_minimum(relation: qg.Relation) -> None:
    """6 fixed seeds; a run fails with probability below ω = 0.05, so two or more do with probability below 0.04."""
    kinds, records = [], HILL.prepare(1_000_000)
    for seed in range(6):
        result = qg.minimize(HILL, records, qg.PerturbedSGD(), budget=qg.Budget(4.0, 1e-6, relation), seed=seed)
        assert result.stopped_by == "sosp"
        assert result.escapes >= 1
        assert result.samples_used <= 1_000_000
        kinds.append(qg.certify(HILL, result.params, alpha=result.details["alpha"]).kind)
    assert kinds.count("sosp") >= 5
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)
    assert {"drift", "escapes", "moved"} <= set(result.history[-1])


@pytest.mark.parametrize("name", ["matrix-sensing", "two-layer"])
@pytest.mark.parametrize("method", [qg.PerturbedSGD(), qg.ModelSelection()], ids=lambda m: str(m.name))
def test_a_claim_that_a_saddle_would_pass_is_refused(name: str, method: Any, tmp_path: Any) -> None:
    """√(ρα) is 15 to 24 where the saddles curve by 0.5 to 2: "sosp" was said of the saddle itself."""
    land, ledger = landscape(name), tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError, match=r"not below the curvature .* of its saddles"):
        qg.minimize(land, 1_000_000, method, budget=BUDGET, ledger=ledger)
    assert not ledger.exists()


PRACTICAL = {
    "strict-saddle": (0.25, 0.73),
    "two-layer": (0.7, 0.83),
}


@pytest.mark.parametrize("name", PRACTICAL)
def test_a_practical_run_leaves_every_saddle(name: str) -> None:
    """Two drifts of 57 steps, each pushed enough with probability 3/4: both seeds fail with probability < 0.01."""
    land = landscape(name)
    rate, clip = PRACTICAL[name]
    method = qg.PerturbedSGD(qg.AdaptiveSpider(clip=clip), learning_rate=rate, mode="practical")
    records = land.prepare(1_000_000)
    for seed in range(2):
        run = qg.minimize(land, records, method, budget=BUDGET, seed=seed)
        assert run.escapes >= 1
        assert run.stopped_by in ("no-escape", "samples")
        assert run.details["claim"] == "observed"
        assert run.details["tolerance"] <= 0.1 / rate * (1 + 1e-9)
        found = qg.certify(land, run.params)
        assert found.lambda_min > 0.2 * land.saddle_curvature
        assert found.gradient_norm < 0.25


def test_a_claim_on_a_table_is_held_against_its_own_curvature() -> None:
    """Only the penalty curves down, by λ/2 at most: a tolerance between that and β says nothing."""
    loss = qg.objectives.Logistic(regularizer=qg.objectives.Nonconvex(0.33), row_bound=1.0, rows="clip")
    assert loss.constants().weak_convexity == loss.negative_curvature() == 0.165
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (20_000, 3))
    data = X, (X[:, 0] > 0).astype(int)
    for method in (qg.PerturbedSGD(oracle=qg.AdaptiveSpider(5000, 100)), qg.ModelSelection(alpha=0.1)):
        with pytest.raises(ValueError, match=r"not below the curvature 0\.165 of its saddles"):
            qg.minimize(loss, data, method, budget=BUDGET)


def test_what_a_stop_rests_on_is_said() -> None:
    records = HILL.prepare(1_000_000)

    def claim(**settings: Any) -> object:
        return qg.minimize(HILL, records, qg.PerturbedSGD(**settings), budget=BUDGET, seed=0).details["claim"]

    assert claim() == "stated constants"
    assert claim(chi=0.015) == "observed"
    assert claim(oracle=qg.AdaptiveSpider(clip=0.5)) == "observed"  # less than G: gradients are bent
    assert claim(oracle=qg.AdaptiveSpider(clip=1.5)) == "stated constants"
    assert claim(returns="last") == "observed"  # not the point that was tested
    assert claim(independent=False) == "observed"  # attempts share one error


def test_samples_run_out_cleanly() -> None:
    algorithm = qg.PerturbedSGD(oracle=qg.AdaptiveSpider(2_000, 200), chi=0.03)
    result = qg.minimize(HILL, 20_000, algorithm, budget=BUDGET, seed=0)
    assert result.stopped_by == "samples"
    assert 20_000 - 2_000 < result.samples_used <= 20_000
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)


# --- the search among iterates ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Constant:
    """A scalar query that ignores the data."""

    value: float
    bound: float = 1.0

    def dim(self, records: Any) -> int:
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        out += self.value


def selecting(seed: int = 0, budget: qg.Budget | None = BUDGET) -> CentralSession:
    plan = qg.plan(qg.ModelSelection(), n=6000, budget=budget)
    return CentralCurator(HILL, 6000, seed=seed).open(plan)


def test_the_search_is_exact_without_noise() -> None:
    door = selecting(budget=None)
    assert door.first_below("select", [Constant(v) for v in (3.0, 0.1, -0.2, -5.0)], 0.0) == 2
    assert selecting(budget=None).first_below("select", [Constant(1.0)], 0.0) is None
    with pytest.raises(ExhaustedError):
        door.first_below("select", [Constant(0.0)], 0.0)


@pytest.mark.parametrize("gap", [0.0, 6.0])
def test_the_search_has_its_noise(gap: float) -> None:
    """P(pass) of one query ``gap`` scales above the threshold, against the law of Lap(2) + Lap(4).

    600 trials within 5 standard deviations: false alarm below 1e-6.
    """
    door = selecting()
    scale = door.plan.noise_multiplier * 0.3
    passed = sum(
        selecting(seed).first_below("select", [Constant(gap * scale)], 0.0) is not None for seed in range(600)
    )
    # X ~ Lap(a), Y ~ Lap(b): P(X + Y ≥ g) = (a²e^{−g/a} − b²e^{−g/b}) / (2(a² − b²)).
    expected = (16.0 * math.exp(-gap / 4.0) - 4.0 * math.exp(-gap / 2.0)) / (2.0 * 12.0)
    assert abs(passed - 600 * expected) <= 5.0 * math.sqrt(600 * expected * (1 - expected))
    louder = (16.0 * math.exp(-gap / 8.0) - 4.0 * math.exp(-gap / 4.0)) / (2.0 * 12.0)
    if gap:
        assert abs(passed - 600 * louder) > 5.0 * math.sqrt(600 * louder * (1 - louder))


def test_a_slot_is_used_as_it_was_planned() -> None:
    door = selecting()
    with pytest.raises(BudgetError, match="first_below"):
        door.release("select", Constant(0.0))
    with pytest.raises(BudgetError, match="which release"):
        door.first_below("o1", [Constant(0.0)], 0.0)
    with pytest.raises(BudgetError, match="numbers of one bound"):
        door.first_below("select", [Constant(1e9), Constant(1.0, bound=2.0)], 0.0)
    assert door.used == {"o1": 0, "o2": 0, "select": 1}


def test_training_and_search_each_spend_the_whole_budget_on_their_own_records() -> None:
    plan = qg.plan(qg.ModelSelection(), n=6000, budget=BUDGET)
    assert plan.schedule.composition == "parallel"
    assert plan.epsilon() == pytest.approx(4.0, rel=2e-3)
    search = 2.0 / (plan.noise_multiplier * 0.3)  # Δ/scale under replace-one
    assert 1.0 < search <= 4.0
    assert "first of many numbers" in plan.explain()


def test_the_pipeline_finds_a_minimum_and_never_uses_a_record_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    hill: Any = landscape("strict-saddle", d=6)
    original = type(hill)._counts

    def spying(self: Any, records: SyntheticRecords, indices: Any) -> Any:
        if indices is not None and not any(indices is other for other in seen):
            seen.append(indices)
        return original(self, records, indices)

    monkeypatch.setattr(type(hill), "_counts", spying)
    result = qg.minimize(hill, 1_000_000, qg.ModelSelection(), budget=BUDGET, seed=0)
    used = np.concatenate(seen)
    assert np.unique(used).size == used.size == result.samples_used <= 1_000_000
    assert result.stopped_by == "sosp"
    assert qg.certify(hill, result.params, alpha=result.details["alpha"]).kind == "sosp"
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)


# --- parties ---------------------------------------------------------------------------------------------------


def parties(m: int, n: int) -> list[SyntheticRecords]:
    return [dataclasses.replace(HILL, seed=j).prepare(n) for j in range(m)]


def uneven(m: int, n: int) -> list[SyntheticRecords]:
    """Parties whose own risks differ: half see slopes tilted up, half down; their mean is the landscape's."""
    hill: Any = HILL
    samples = []
    for j, sample in enumerate(parties(m, n)):
        s, _, coordinate = np.unravel_index(sample["kind"], (2, 2, hill.d))
        tilted = np.ravel_multi_index((s, np.full(n, j % 2), coordinate), (2, 2, hill.d))
        samples.append(SyntheticRecords({"kind": tilted.astype(np.int32)}, hill.d))
    return samples


@pytest.mark.parametrize(("trust", "secure"), [("local", None), ("curator", None), ("secure", "servers")])
def test_perturbed_sgd_on_a_federation_of_uneven_parties(trust: Any, secure: Any) -> None:
    """Algorithm 3 (local), and the same with the noise of one curator, given or inside a secure sum."""
    members = [Party(sample) for sample in uneven(4, 200_000)]
    start = HILL.risk_gradient(members[0].X, HILL.saddle())
    assert float(np.linalg.norm(start)) > 0.1  # the saddle of all is no critical point of one party
    budget = qg.Budget(4.0, 1e-6)
    result = simulate(qg.PerturbedSGD(), HILL, members, budget=budget, trust=trust, secure=secure, seed=0)
    assert result.stopped_by == "sosp"
    assert qg.certify(HILL, result.params, alpha=result.details["alpha"]).kind == "sosp"
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)
    assert result.samples_used <= 800_000


# --- settings --------------------------------------------------------------------------------------------------


def test_theory_satisfies_its_equations() -> None:
    found = solve(UNIT, n=10**14, dim=20, budget=qg.Budget(1.0, 1e-6), risk_bound=1.0, scale=2.0)
    s, mu, alpha, eta = 2.0, found.mu, found.alpha, found.learning_rate
    iota = s * mu
    assert eta == pytest.approx(math.sqrt(alpha) / iota**2)
    assert found.radius == pytest.approx(math.sqrt(alpha) / iota**1.5)
    assert found.escape_steps == math.ceil(iota / (s * eta * math.sqrt(alpha)))
    assert found.batch_size == pytest.approx(10**14 * found.kappa / (2 * eta), rel=1e-6)
    assert found.difference_batch_size == pytest.approx(10**14 * eta * found.chi**2 / 2, rel=1e-6)
    # ψ from the batches gives back χ = 4√C·s·μ²·ψ, and (5) gives back μ.
    z = qg.plan(qg.PerturbedSGD(), n=1000, budget=qg.Budget(1.0, 1e-6)).noise_multiplier
    b1, b2, drift = found.batch_size, found.difference_batch_size, math.sqrt(found.kappa)
    r = z * math.hypot(1 / b1, drift / b2)
    sigma = math.log(20) * math.hypot(1 / math.sqrt(b1), drift / math.sqrt(b2))
    psi = math.hypot(sigma, r * math.sqrt(20))
    assert found.chi == pytest.approx(4 * s * mu**2 * psi, rel=1e-4)
    first = math.log(9 * 20 / (eta * math.sqrt(s * psi)) * math.log(4 / (s * eta * r) * math.sqrt(psi))) / s
    second = math.log(160 * math.sqrt(2) / (s * math.sqrt(eta * r)) * math.sqrt(psi))
    assert mu == pytest.approx(max(first, second, 1.0), rel=1e-4)


@pytest.mark.parametrize(("parties", "alpha"), [(1, 0.220), (4, 0.143), (16, 0.093), (64, 0.061)])
def test_theory_of_parties_satisfies_theorem_3(parties: int, alpha: float) -> None:
    """σ² and r² of one party's batches ÷ m (Lemma 9) give back χ; κ has mn in one term and √m·n in the other."""
    n, dim = 10**14, 10
    found = solve(UNIT, n=n, dim=dim, budget=qg.Budget(1.0, 1e-6), risk_bound=1.0, parties=parties)
    assert found.alpha == pytest.approx(alpha, abs=6e-4)
    kappa = max((parties * n) ** -0.5, dim**0.4 / (math.sqrt(parties) * n) ** 0.8)
    assert found.kappa == pytest.approx(kappa)
    z = qg.plan(qg.PerturbedSGD(), n=1000, budget=qg.Budget(1.0, 1e-6)).noise_multiplier
    b1, b2, drift = found.batch_size, found.difference_batch_size, math.sqrt(found.kappa)
    noise = dim * (z * math.hypot(1 / b1, drift / b2)) ** 2
    sampling = (math.log(dim) * math.hypot(1 / math.sqrt(b1), drift / math.sqrt(b2))) ** 2
    psi = math.sqrt((noise + sampling) / parties)
    assert found.chi == pytest.approx(4 * found.mu**2 * psi, rel=1e-4)


# --- the scripts behind the numbers run, in their small form ----------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said"),
    [("benchmarks/sosp.py", "'method': 'held-out search'"), ("reproduce/sosp.py", "goe")],
)
def test_the_quick_form_runs(
    script: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    monkeypatch.syspath_prepend(str(ROOT))
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert said in capsys.readouterr().out
