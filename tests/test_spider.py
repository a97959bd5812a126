"""SPIDER: what it asks, what it costs, and that no record is ever used twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import quietgrad as qg
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.errors import ExhaustedError
from quietgrad.objectives.base import Batch, GradientQuery
from quietgrad.oracles.base import Estimate
from quietgrad.oracles.gradient_estimators import MiniBatch
from quietgrad.plans.schedule import Schedule
from quietgrad.privacy.accounting import account
from quietgrad.privacy.closed_form_accountants import gaussian_epsilon

FALSE_ALARM = 1e-6
Floats = npt.NDArray[np.float64]

HILL = qg.objectives.landscape("strict-saddle", d=6)
BUDGET = qg.Budget(2.0, 1e-6, qg.Relation.REPLACE_ONE)


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

    def __init__(self, seen: list[npt.NDArray[np.int64]]) -> None:
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
    seen: list[npt.NDArray[np.int64]] = []
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
        seen: list[npt.NDArray[np.int64]] = []
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


def test_parallel_composition_needs_fresh_records() -> None:
    slots = MiniBatch(10).slots(100, 5)
    with pytest.raises(ValueError, match="every slot must be a SinglePass"):
        Schedule(slots, "parallel")


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
        seen: list[npt.NDArray[np.int64]] = []
        shadow.release(slot, Spy(seen))
        now = HILL._gradients(records, seen[0], x).mean(axis=0)
        if slot == "o1":
            value, drift = now, 0.0
        else:
            value = value + now - HILL._gradients(records, seen[0], previous).mean(axis=0)
        kinds.append(slot)
        assert state.value is not None
        np.testing.assert_allclose(state.value, value, atol=1e-12)
        assert state.drift == pytest.approx(drift)
        previous, x = x, x + 0.05 * rng.standard_normal(6)
    assert 2 <= kinds.count("o1") < 12
    assert door.used == {"o1": kinds.count("o1"), "o2": kinds.count("o2")}


def test_an_unmoved_point_costs_nothing() -> None:
    oracle = qg.AdaptiveSpider(50, 10, kappa=0.1)
    door = opened(oracle, budget=BUDGET)
    first = oracle.estimate(Estimate(), np.zeros(6), door)
    again = oracle.estimate(first, np.zeros(6), door)
    assert again is first
    assert door.used == {"o1": 1, "o2": 0}


def test_spider_asks_in_full_every_period() -> None:
    oracle = qg.Spider(batch_size=20, difference_batch_size=5, period=4)
    door, state, asked = opened(oracle), Estimate(), []
    for k in range(9):
        state = oracle.estimate(state, np.full(6, 0.01 * k), door)
        asked.append(door.used["o1"])
    assert asked == [1, 1, 1, 1, 2, 2, 2, 2, 3]


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
    noise = 10.0 * (state.value - first - hill.population_gradient(after))
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
    assert float(np.linalg.norm(moved.value - state.value)) == pytest.approx(0.04)
    tight = qg.AdaptiveSpider(100, 100, smoothness=0.1, difference_clip=0.01, clip=1.0, kappa=100.0)
    limited = tight.estimate(state, np.array([0.0, 0.4, 0.0]), opened(tight, 600, objective=steep))
    assert limited.value is not None
    assert float(np.linalg.norm(limited.value - state.value)) == pytest.approx(0.01)


def test_stated_error_covers_the_true_one() -> None:
    """Errors of O1 over 200 runs: their mean square is below ψ², and above the noise's share."""
    oracle = qg.AdaptiveSpider(200, 50, clip=1.5, kappa=0.01)
    errors = []
    for seed in range(200):
        door = opened(oracle, 1000, BUDGET, seed=seed)
        state = oracle.estimate(Estimate(), HILL.saddle(), door)
        assert state.value is not None
        errors.append(float(state.value @ state.value))
    stated = oracle.error(door)
    noise = door.plan.noise_multiplier * 1.5 / 200
    assert 0.8 * 6 * noise**2 < float(np.mean(errors)) < stated.size(6) ** 2


def test_a_fresh_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    algorithm = qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(200, 40, kappa=0.01), chi=0.05, radius=0.2, escape_steps=8, attempts=3,
        mode="practical",
    )  # fmt: skip

    class Interrupted(Exception):
        pass

    whole: list[Floats] = []

    def stop_at(step: int) -> Callable[..., None]:
        def callback(progress: qg.Progress) -> None:
            whole.append(np.array(progress.params))
            if progress.step == step:
                raise Interrupted

        return callback

    with pytest.raises(Interrupted):
        qg.minimize(
            HILL,
            20_000,
            algorithm,
            budget=BUDGET,
            folder=tmp_path / "run",
            checkpoint_seconds=0.0,
            callback=stop_at(25),
        )
    resumed: list[Floats] = []

    def note(progress: qg.Progress) -> None:
        resumed.append(np.array(progress.params))

    result = qg.resume(HILL, 20_000, algorithm, folder=tmp_path / "run", callback=note)
    np.testing.assert_array_equal(resumed[0], whole[-1])
    assert result.stopped_by in ("no-escape", "samples")
    assert result.samples_used <= 20_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qg.AdaptiveSpider(kappa=0.0), "kappa=0.0: must be > 0"),
        (lambda: qg.AdaptiveSpider(batch_size=0), "batch_size=0"),
        (lambda: qg.AdaptiveSpider(clip=-1.0), "clip=-1.0"),
        (lambda: qg.AdaptiveSpider(regime="twice"), "regime='twice'"),  # type: ignore[arg-type]
        (lambda: qg.Spider(period=0), "period=0"),
        (lambda: qg.AdaptiveSpider().slots(59, 10), "n=59: too small for one full query"),
        (lambda: qg.AdaptiveSpider(batch_size=100).slots(50, 10), "n=50: too small for one full query"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_missing_constants_are_named() -> None:
    rng = np.random.default_rng(0)
    data = (rng.standard_normal((600, 6)), np.zeros(600))
    squared = qg.objectives.Squared(row_bound=100.0)
    oracle = qg.AdaptiveSpider()
    with pytest.raises(ValueError, match="clip=None: the objective has no finite lipschitz"):
        oracle.estimate(Estimate(), np.zeros(6), opened(oracle, objective=squared, data=data))


def test_a_gradient_release_still_counts_like_any_other() -> None:
    door = opened(qg.AdaptiveSpider(300, 300), 600, BUDGET)
    door.release("o1", GradientQuery(np.zeros(6), 1.0))
    door.release("o2", GradientQuery(np.zeros(6), 1.0))
    with pytest.raises(ExhaustedError, match="0 of 600 left"):
        door.release("o1", GradientQuery(np.zeros(6), 1.0))
