"""Perturbed SGD: the state machine of Algorithm 1, its theory's equations, escapes, and how it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.algorithms import perturbed_sgd_settings
from quietgrad.algorithms.base import State
from quietgrad.cli import main
from quietgrad.curators.central import CentralCurator
from quietgrad.objectives.base import LossConstants
from quietgrad.oracles.base import Estimate, Oracle
from quietgrad.oracles.gradient_estimators import MiniBatch, RecursiveMomentum
from quietgrad.training import checkpoint

Floats = npt.NDArray[np.float64]

BUDGET = qg.Budget(4.0, 1e-6, qg.Relation.REPLACE_ONE)
HILL = qg.objectives.landscape("strict-saddle", d=10)
UNIT = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class Script(Oracle):
    """An oracle that plays back estimates and notes where it was asked."""

    estimates: tuple[float, ...]
    asked: list[float]
    restored: list[Any]
    smoothness: float = 1.0

    def slots(self, n_public: int, steps: int) -> Any:
        return MiniBatch(1, 1.0).slots(n_public, steps)

    def estimate(self, state: Estimate, params: Floats, door: Any) -> Estimate:
        self.asked.append(float(params[0]))
        self.restored.append((state.previous is None or float(state.previous[0]), state.drift))
        index = len(self.asked) - 1
        return Estimate(np.array([self.estimates[index]]), params, state.drift + 1.0, state.calls + 1)

    def asks(self, params: Floats, door: Any) -> Iterator[tuple[str, Any]]:
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


def test_large_gradients_descend() -> None:
    oracle, state = play([10.0, -4.0, 3.5])
    assert oracle.asked == [0.0, -10.0, -6.0]
    assert (state.stopped_by, state.params[0], state.extra["escapes"]) == ("steps", -9.5, 0)


def test_no_attempt_escapes_so_the_point_is_returned() -> None:
    oracle, state = play([10.0, 1.0, 1.0, 0.5, 2.0, 2.0])
    # Descend to −10; there ‖ĝ‖ ≤ 3: two attempts of two steps, both from −10 and with the oracle's state there.
    assert oracle.asked == [0.0, -10.0, -10.0, -11.0, -10.0, -12.0]
    assert oracle.restored[2] == oracle.restored[4] == (-10.0, 2.0)
    assert (state.stopped_by, state.params[0], state.extra["escapes"]) == ("sosp", -10.0, 0)
    assert state.extra["alpha"] == 4.0


def test_the_last_iterate_can_be_returned_as_printed() -> None:
    _, state = play([10.0, 1.0, 1.0, 0.5, 2.0, 2.0], returns="last")
    assert (state.stopped_by, state.params[0]) == ("sosp", -14.0)


def test_leaving_the_ball_is_an_escape_and_descent_goes_on() -> None:
    oracle, state = play([1.0, 2.9, 2.2, 7.0, 3.0, 0.1, 0.1, 0.1, 0.1])
    # Attempt from 0: −2.9, then −5.1: escaped. Descend by 7, then a new try from −12.1 fails twice.
    np.testing.assert_allclose(oracle.asked[:5], [0.0, 0.0, -2.9, -5.1, -12.1])
    assert state.stopped_by == "sosp"
    assert state.extra["escapes"] == 1
    assert state.params[0] == pytest.approx(-12.1)


def test_a_second_attempt_can_escape() -> None:
    oracle, state = play([0.0, 1.0, 1.0, 2.0, 3.5, 9.0])
    np.testing.assert_allclose(oracle.asked, [0.0, 0.0, -1.0, 0.0, -2.0, -5.5])
    assert (state.stopped_by, state.extra["escapes"]) == ("steps", 1)


def test_independent_attempts_ask_afresh() -> None:
    oracle, _ = play([10.0, 1.0, 1.0, 0.5, 2.0, 2.0], independent=True)
    assert oracle.restored[4] == (True, 0.0)


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


# --- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(qg.Relation))
def test_leaves_the_saddle_and_certifies_its_minimum(relation: qg.Relation) -> None:
    """8 fixed seeds; a run fails with probability below ω = 0.05, so two or more do with probability below 0.06."""
    kinds, records = [], HILL.prepare(500_000)
    for seed in range(8):
        result = qg.minimize(HILL, records, qg.PerturbedSGD(), budget=qg.Budget(4.0, 1e-6, relation), seed=seed)
        assert result.stopped_by == "sosp"
        assert result.escapes >= 1
        assert result.samples_used <= 500_000
        kinds.append(qg.certify(HILL, result.params, alpha=result.details["alpha"]).kind)
    assert kinds.count("sosp") >= 7
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)
    assert {"drift", "escapes", "moved"} <= set(result.history[-1])


# --- landscapes whose constants are too large for a claim --------------------------------------------------------


@pytest.mark.parametrize("name", ["matrix-sensing", "phase-retrieval", "two-layer"])
@pytest.mark.parametrize("method", [qg.PerturbedSGD(), qg.ModelSelection()], ids=lambda m: str(m.name))
def test_a_claim_that_a_saddle_would_pass_is_refused(name: str, method: Any, tmp_path: Any) -> None:
    """√(ρα) is 15 to 24 where the saddles curve by 0.5 to 2: "sosp" was said of the saddle itself."""
    land, ledger = qg.objectives.landscape(name), tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError, match=r"not below the curvature .* of its saddles"):
        qg.minimize(land, 1_000_000, method, budget=BUDGET, ledger=ledger)
    assert not ledger.exists()


# η = half of 1/the largest curvature between saddle and minimum, C = where nine tenths of gradients end.
PRACTICAL = {
    "strict-saddle": (0.25, 0.73),
    "matrix-sensing": (0.125, 3.5),
    "phase-retrieval": (0.1, 3.0),
    "two-layer": (0.7, 0.83),
}


@pytest.mark.parametrize("name", PRACTICAL)
def test_a_practical_run_leaves_every_saddle(name: str) -> None:
    """Two drifts of 57 steps, each pushed enough with probability 3/4: both seeds fail with probability < 0.01."""
    land = qg.objectives.landscape(name)
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


def test_a_practical_run_leaves_a_flat_saddle_while_records_last() -> None:
    """η = 0.05 looks for curvature 2 first, which this saddle just has: half of runs that stop there stay."""
    land = qg.objectives.landscape("matrix-sensing", rank=1)
    oracle, records = qg.AdaptiveSpider(clip=3.5), land.prepare(1_000_000)
    for seed in range(4):
        method = qg.PerturbedSGD(oracle, learning_rate=0.05, mode="practical")
        run = qg.minimize(land, records, method, budget=BUDGET, seed=seed)
        assert run.stopped_by == "samples"
        assert run.escapes >= 1
        assert land.population_risk(run.params) - land.population_risk(land.minimum()) < 1e-3
    told = qg.PerturbedSGD(oracle, learning_rate=0.05, mode="practical", curvature=8.0)
    run = qg.minimize(land, records, told, budget=BUDGET, seed=0)
    assert (run.stopped_by, run.escapes, run.details["tolerance"]) == ("no-escape", 0, 8.0)


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
    records = HILL.prepare(500_000)

    def claim(**settings: Any) -> object:
        return qg.minimize(HILL, records, qg.PerturbedSGD(**settings), budget=BUDGET, seed=0).details["claim"]

    assert claim() == "stated constants"
    assert claim(chi=0.015) == "observed"
    assert claim(oracle=qg.AdaptiveSpider(clip=0.5)) == "observed"  # less than G: gradients are bent
    assert claim(oracle=qg.AdaptiveSpider(clip=2.0)) == "stated constants"


def test_a_declared_curvature_is_the_limit() -> None:
    with pytest.raises(ValueError, match=r"not below curvature=0\.3"):
        qg.minimize(HILL, 500_000, qg.PerturbedSGD(curvature=0.3), budget=BUDGET)


def test_without_noise_nothing_leaves_an_exact_saddle() -> None:
    still = qg.objectives.landscape("strict-saddle", d=10, slope_noise=0.0)
    oracle = MiniBatch(None, clip=2.0, sampling="full")
    result = qg.minimize(still, 1000, qg.PerturbedSGD(oracle=oracle, chi=0.01), budget=None)
    assert (result.escapes, float(np.abs(result.params).max())) == (0, 0.0)
    assert qg.certify(still, result.params).kind == "saddle"


def test_any_oracle_will_do() -> None:
    for oracle in (
        MiniBatch(20_000, clip=1.5),
        qg.Spider(period=10, batch_size=20_000, difference_batch_size=5_000),
        qg.AdaptiveSpider(20_000, 5_000, regime="reuse", full_queries=20),
    ):
        algorithm = qg.PerturbedSGD(oracle=oracle, steps=150, chi=0.02, escape_steps=40, attempts=2)
        result = qg.minimize(HILL, 400_000, algorithm, budget=BUDGET, seed=2)
        assert result.escapes >= 1, oracle
        assert qg.certify(HILL, result.params, alpha=0.1).lambda_min > 0.0, oracle


def test_samples_run_out_cleanly() -> None:
    algorithm = qg.PerturbedSGD(oracle=qg.AdaptiveSpider(2_000, 200), chi=0.03)
    result = qg.minimize(HILL, 20_000, algorithm, budget=BUDGET, seed=0)
    assert result.stopped_by == "samples"
    assert 20_000 - 2_000 < result.samples_used <= 20_000
    assert result.privacy.epsilon == pytest.approx(4.0, rel=2e-3)


def test_capped_calls_run_out_cleanly() -> None:
    oracle = qg.AdaptiveSpider(2_000, 200, regime="reuse", full_queries=2, kappa=1e-6)
    result = qg.minimize(HILL, 20_000, qg.PerturbedSGD(oracle=oracle, chi=1e-6), budget=BUDGET, seed=0)
    assert result.stopped_by == "steps"
    assert result.privacy.releases["o1"] == 2


def test_a_run_that_could_mean_nothing_is_not_paid_for(tmp_path: Any) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError, match="n=6000: too small"):
        qg.minimize(HILL, 6000, qg.PerturbedSGD(), budget=BUDGET, ledger=ledger)
    assert not ledger.exists()


def test_the_command_line_trains_on_data(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    method = ["--algorithm", "perturbed-sgd", "--epsilon", "4", "--delta", "1e-6", "--out", str(tmp_path / "data")]
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (4000, 3))
    np.savez(tmp_path / "people.npz", X=X, y=(X[:, 0] > 0).astype(int))
    settings = ["--row-bound", "1", "--set", "chi=0.1", "--set", "oracle.clip=1", "--set", "hessian-lipschitz=0.1"]
    file = str(tmp_path / "people.npz")
    assert main(["train", file, *method, *settings, "--set", "oracle=crystal-ball"]) == 2
    assert "must be one of adaptive-spider" in capsys.readouterr().err
    assert main(["train", file, *method, *settings, "--set", "oracle=adaptive-spider"]) == 0
    assert qg.load(tmp_path / "data").algorithm == "perturbed-sgd"
    assert "saddles left" in (tmp_path / "data" / "report.html").read_text()


# --- settings ----------------------------------------------------------------------------------------------------


def test_theory_satisfies_its_equations() -> None:
    found = perturbed_sgd_settings.solve(
        UNIT, n=10**14, dim=20, budget=qg.Budget(1.0, 1e-6), risk_bound=1.0, scale=2.0
    )
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


def test_theory_improves_with_n_near_the_printed_rate() -> None:
    alphas = [
        perturbed_sgd_settings.solve(UNIT, n=10**k, dim=20, budget=qg.Budget(1.0, 1e-6), risk_bound=1.0).alpha
        for k in (14, 16, 18)
    ]
    slopes = np.diff(np.log10(alphas)) / 2
    assert (slopes > -1 / 3 - 0.02).all()  # logarithms slow it down
    assert (slopes < -0.27).all()


def test_theory_mode_runs_until_its_samples_are_used() -> None:
    algorithm = qg.PerturbedSGD.theory(UNIT, n=10**13, dim=5, budget=BUDGET, risk_bound=1.0)
    assert algorithm.mode == "theory"
    plan = qg.plan(algorithm, n=10**13, budget=BUDGET)
    assert plan.epsilon() == pytest.approx(4.0, rel=2e-3)
    assert algorithm.config()["oracle"]["name"] == "AdaptiveSpider"


def theory(constants: LossConstants = UNIT, **settings: Any) -> object:
    defaults: dict[str, Any] = {"n": 10**14, "dim": 5, "budget": BUDGET, "risk_bound": 1.0}
    return qg.PerturbedSGD.theory(constants, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory(LossConstants(1.0, None, 1.0, 1.0, 1.0, 0.0, 1.0)), r"theory mode needs a finite G"),
        (lambda: theory(LossConstants(1.0, 1.0, 1.0, None, 1.0, 0.0, 1.0)), r"theory mode needs a finite M"),
        (lambda: theory(LossConstants(1.0, 1.0, 1.0, 1.0, None, 0.0, 1.0)), r"theory mode needs a finite ρ"),
        (lambda: theory(n=10**6), r"n=1000000: too small for the paper's settings"),
        (lambda: theory(risk_bound=0.0), "risk_bound=0.0"),
        (lambda: theory(failure=1.0), "failure=1.0"),
        (lambda: qg.PerturbedSGD(mode="theory"), "build it with PerturbedSGD.theory"),
        (lambda: qg.PerturbedSGD(mode="guess"), "mode='guess'"),  # type: ignore[arg-type]
        (lambda: qg.PerturbedSGD(returns="best"), "returns='best'"),  # type: ignore[arg-type]
        (lambda: qg.PerturbedSGD(steps=0), "steps=0"),
        (lambda: qg.PerturbedSGD(chi=-1.0), "chi=-1.0"),
        (lambda: qg.PerturbedSGD(curvature=0.0), "curvature=0.0"),
        (lambda: qg.PerturbedSGD(attempts=0), "attempts=0"),
        (lambda: qg.PerturbedSGD(failure=0.0), "failure=0.0"),
        (lambda: qg.minimize(HILL, 6000, qg.PerturbedSGD(), budget=BUDGET), "n=6000: too small"),
        (lambda: qg.minimize(HILL, 50, qg.PerturbedSGD(), budget=BUDGET), "n=50: too small for one full query"),
        (
            lambda: qg.minimize(HILL, 6000, qg.PerturbedSGD(oracle=RecursiveMomentum(10)), budget=BUDGET),
            "chi=None: RecursiveMomentum states no error",
        ),
    ],
)
def test_bad_settings_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_practical_mode_takes_every_oracle() -> None:
    """An oracle that has no smoothness to be given is left as it is."""
    algorithm = qg.PerturbedSGD(oracle=MiniBatch(100), learning_rate=0.5, mode="practical", steps=5)
    assert algorithm.oracle == MiniBatch(100)
