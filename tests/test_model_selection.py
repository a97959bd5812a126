"""Selection: sensitivities of its queries, the noisy search, data splits, parties, and private certificates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reproduce.local_parties import Doors, run_on_parties

import quietgrad as qg
from quietgrad.algorithms.model_selection import HessianSelection
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.federation import Party, simulate
from quietgrad.objectives.base import Batch
from quietgrad.objectives.landscapes.base import SyntheticRecords, landscape
from quietgrad.objectives.queries.second_order import Excess, GradientNorm, LeastEigenvalue, PackedHessian
from quietgrad.oracles.base import Estimate
from quietgrad.training.stationarity import certify_privately

Floats = npt.NDArray[np.float64]

HILL = landscape("strict-saddle", d=6)
BUDGET = qg.Budget(2.0, 1e-6, qg.Relation.REPLACE_ONE)


# --- queries -------------------------------------------------------------------------------------------------


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
        Excess(x, 0.1, 1.0, size, size, 8.0),
        PackedHessian(x, size),
        PackedHessian(x, size, isometric=False),
    ]
    everyone, others = np.arange(8), np.delete(np.arange(8), rng.integers(8))
    for query in queries:
        gap = asked(query, objective, records, everyone) - asked(query, objective, records, others)
        assert float(np.linalg.norm(gap)) <= query.bound * (1 + 1e-9), query


def test_linear_models_have_hessians_of_rank_one() -> None:
    rng = np.random.default_rng(0)
    logistic = qg.objectives.Logistic()
    records = logistic.prepare((rng.standard_normal((3, 4)), [0, 1, 1]))
    query = PackedHessian(np.zeros(4), 0.2, rank=1)
    for k in range(3):
        assert float(np.linalg.norm(asked(query, logistic, records, np.array([k])))) <= query.bound == 0.2


@pytest.mark.parametrize("isometric", [True, False])
def test_packing_is_undone(isometric: bool) -> None:
    records = landscape("matrix-sensing", size=3, rank=2).prepare(20)
    sensing = landscape("matrix-sensing", size=3, rank=2)
    x = np.random.default_rng(0).standard_normal(6)
    query = PackedHessian(x, math.inf, isometric)
    packed = asked(query, sensing, records, None)
    matrix = query.unpack(packed)
    expected = np.zeros((6, 6))
    sensing.add_hessians(Batch(records, None), x, math.inf, expected)
    np.testing.assert_allclose(matrix, expected, atol=1e-10)
    if isometric:
        assert float(np.linalg.norm(packed)) == pytest.approx(float(np.linalg.norm(matrix)))


def test_goe_noise_is_root_two_quieter_than_the_printed_triangle() -> None:
    rng, d = np.random.default_rng(0), 100
    queries = [PackedHessian(np.zeros(d), 1.0, isometric) for isometric in (True, False)]
    goe, triangle = (
        np.median([np.abs(np.linalg.eigvalsh(q.unpack(rng.standard_normal(5050)))).max() for _ in range(10)])
        for q in queries
    )
    assert triangle / goe == pytest.approx(math.sqrt(2.0), rel=0.06)


def test_excess_is_negative_exactly_at_stationary_points() -> None:
    records = HILL.prepare(50_000)
    at = [(HILL.saddle(), False), (HILL.minimum(), True), (0.5 * HILL.minimum(), False)]
    for x, stationary in at:
        value = asked(Excess(x, 0.03, 6.9, 2.0, 4.0, 50_000.0), HILL, records, None)[0]
        assert (value <= 0.0) == stationary


# --- the noisy search ----------------------------------------------------------------------------------------


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


def test_not_a_number_counts_as_failed() -> None:
    assert selecting().first_below("select", [Constant(math.nan)], 1e9) is None


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
    assert plan.epsilon() == pytest.approx(2.0, rel=2e-3)
    search = 2.0 / (plan.noise_multiplier * 0.3)  # Δ/scale under replace-one
    assert 1.0 < search <= 2.0
    assert "first of many numbers" in plan.explain()


# --- the pipeline --------------------------------------------------------------------------------------------


def test_the_pipeline_finds_a_minimum_and_never_uses_a_record_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    hill: Any = landscape("strict-saddle", d=6)
    original = type(hill)._counts

    def spying(self: Any, records: SyntheticRecords, indices: Any) -> Any:
        if indices is not None and not any(indices is other for other in seen):
            seen.append(indices)
        return original(self, records, indices)

    monkeypatch.setattr(type(hill), "_counts", spying)
    result = qg.minimize(hill, 500_000, qg.ModelSelection(), budget=BUDGET, seed=0)
    used = np.concatenate(seen)
    assert np.unique(used).size == used.size == result.samples_used <= 500_000
    assert result.stopped_by == "sosp"
    assert qg.certify(hill, result.params, alpha=result.details["alpha"]).kind == "sosp"
    assert result.privacy.epsilon == pytest.approx(2.0, rel=2e-3)


def test_nothing_passes_an_impossible_test() -> None:
    result = qg.minimize(HILL, 200_000, qg.ModelSelection(alpha=1e-9), budget=BUDGET, seed=0)
    assert (result.stopped_by, result.details["chosen"]) == ("samples", -1)


# --- parties -------------------------------------------------------------------------------------------------


def parties(m: int, n: int) -> list[SyntheticRecords]:
    return [dataclasses.replace(HILL, seed=j).prepare(n) for j in range(m)]


def test_spider_on_parties_is_the_mean_of_their_own_estimates() -> None:
    """Algorithm 3: each client keeps its ĝ_j; the server's mean of them is SPIDER through the joint door."""
    oracle = qg.AdaptiveSpider(60, 20, kappa=0.05)
    plan = qg.plan(qg.PerturbedSGD(oracle=oracle), n=600, budget=None)

    def doors() -> list[CentralSession]:
        return [CentralCurator(HILL, data, seed=j).open(plan) for j, data in enumerate(parties(3, 600))]

    joint, alone = Doors(doors()), doors()
    state, states = Estimate(), [Estimate() for _ in range(3)]
    rng, x = np.random.default_rng(0), np.zeros(6)
    for _ in range(10):
        state = oracle.estimate(state, x, joint)
        states = [oracle.estimate(own, x, door) for own, door in zip(states, alone, strict=True)]
        mean = sum(own.value for own in states if own.value is not None) / 3
        assert state.value is not None
        np.testing.assert_allclose(state.value, mean, atol=1e-12)
        x = x + 0.05 * rng.standard_normal(6)
    assert joint.used["o1"] >= 2


def test_parties_noise_averages() -> None:
    """Noise of a joint O1 over 4 parties is half a single party's: 1000 numbers, ±20 % (false alarm below 1e-6)."""
    quiet = landscape("strict-saddle", d=1000, slope_noise=0.0)
    oracle = qg.AdaptiveSpider(60, 20, clip=1.0, kappa=0.05)
    plan = qg.plan(qg.PerturbedSGD(oracle=oracle), n=600, budget=BUDGET)
    joint = Doors([CentralCurator(quiet, 600, seed=j).open(plan) for j in range(4)])
    state = oracle.estimate(Estimate(), np.zeros(1000), joint)
    assert state.value is not None
    assert float(state.value.std()) == pytest.approx(plan.noise_multiplier / (60 * 2), rel=0.2)
    assert oracle.error(joint).noise >= plan.noise_multiplier / (60 * 2)


def test_perturbed_sgd_leaves_the_saddle_on_parties() -> None:
    result = run_on_parties(HILL, parties(4, 150_000), qg.PerturbedSGD(), budget=qg.Budget(4.0, 1e-6), seed=0)
    assert result.stopped_by == "sosp"
    assert qg.certify(HILL, result.params, alpha=result.details["alpha"]).kind == "sosp"
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)


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


@pytest.mark.parametrize("noise", ["goe", "triangle"])
def test_algorithm_four_takes_the_first_good_candidate(noise: Any) -> None:
    points = [HILL.saddle(), 0.5 * HILL.minimum(), HILL.minimum(), -HILL.minimum()]
    test = HessianSelection(points, alpha=0.03, noise=noise)
    result = run_on_parties(HILL, parties(4, 50_000), test, budget=BUDGET, seed=0)
    assert (result.stopped_by, result.details["chosen"]) == ("sosp", 2)
    np.testing.assert_array_equal(result.params, HILL.minimum())
    plan = qg.plan(test, n=50_000, budget=BUDGET)
    assert plan.epsilon() == pytest.approx(2.0, rel=2e-3)
    assert plan.schedule.releases == 8


def test_printed_noise_needs_a_wider_threshold() -> None:
    limits = {}
    noises: tuple[Any, ...] = ("goe", "triangle")
    for noise in noises:
        test = HessianSelection([HILL.saddle()], alpha=0.03, noise=noise)
        door = CentralCurator(HILL, 1000, seed=0).open(qg.plan(test, n=1000, budget=BUDGET))
        limits[noise] = test.thresholds(door)
    assert limits["goe"][0] == limits["triangle"][0]
    assert limits["goe"][1] > limits["triangle"][1]


# --- private certificates ------------------------------------------------------------------------------------


def test_a_private_certificate_has_the_noise_it_states(tmp_path: Path) -> None:
    """Both numbers over 120 seeds: their spread is the stated error within 35 % (false alarm below 1e-6)."""
    records = HILL.prepare(20_000)
    found = [
        certify_privately(HILL, HILL.saddle(), records, budget=BUDGET, alpha=0.03, seed=seed) for seed in range(120)
    ]
    exact = qg.certify(HILL, HILL.saddle(), records)
    for number, error, truth in (
        ("gradient_norm", "gradient_error", exact.gradient_norm),
        ("lambda_min", "curvature_error", exact.lambda_min),
    ):
        values = np.array([getattr(f, number) for f in found])
        stated = getattr(found[0], error)
        assert float(values.std()) == pytest.approx(stated, rel=0.35)
        assert float(values.mean()) == pytest.approx(truth, abs=6 * stated / math.sqrt(120))
    assert found[0].kind == "saddle"
    ledger = tmp_path / "ledger.jsonl"
    paid = certify_privately(HILL, HILL.minimum(), records, budget=BUDGET, alpha=0.03, ledger=ledger)
    assert paid.privacy.epsilon == pytest.approx(2.0, rel=2e-3)
    spent = qg.Ledger(ledger).spent("default", delta=1e-6, relation=qg.Relation.REPLACE_ONE)
    assert spent.epsilon == pytest.approx(2.0, rel=2e-3)


def test_a_regularised_model_is_certified_with_its_regulariser() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((5000, 4)) / 4.0
    data = (X, (X[:, 0] > 0).astype(float))
    logistic = qg.objectives.Logistic(regularizer=qg.objectives.Nonconvex(0.5), row_bound=2.0)
    point = np.full(4, 1.5)
    exact = qg.certify(logistic, point, data)
    noisy = certify_privately(logistic, point, data, budget=qg.Budget(1000.0, 1e-6), seed=0)
    assert noisy.gradient_norm == pytest.approx(exact.gradient_norm, rel=1e-2)
    assert noisy.lambda_min == pytest.approx(exact.lambda_min, rel=1e-2)
    assert exact.lambda_min < 0.0  # the penalty bends down there


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qg.ModelSelection(held_out=1.0), "held_out=1.0"),
        (lambda: qg.ModelSelection(alpha=0.0), "alpha=0.0"),
        (lambda: qg.ModelSelection(patience=0), "patience=0"),
        (lambda: qg.ModelSelection(oracle=qg.AdaptiveSpider(regime="reuse")), "regime='reuse'"),
        (lambda: qg.ModelSelection(oracle=qg.AdaptiveSpider(900)).schedule(1000), "n=1000: too small"),
        (lambda: HessianSelection([], alpha=0.1), "candidates"),
        (lambda: HessianSelection([np.zeros(2)], alpha=0.1, noise="white"), "noise='white'"),  # type: ignore[arg-type]
        (lambda: run_on_parties(HILL, [], qg.PerturbedSGD(), budget=BUDGET), "parties"),
        (lambda: run_on_parties(HILL, [600, 700], qg.PerturbedSGD(), budget=BUDGET), "of equal number"),
    ],
)
def test_bad_settings_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
