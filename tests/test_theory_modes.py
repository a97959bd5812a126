"""Settings that theorems name: they satisfy the printed equations, run, and refuse a loss without constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.algorithms.theorems import bounds
from quietgrad.cli import main
from quietgrad.objectives import L2, Logistic, Nonconvex, Squared

N, D = 4000, 6
REPLACE = qg.Budget(2.0, 1e-5, qg.Relation.REPLACE_ONE)
STRONG = Logistic(regularizer=L2(0.1), row_bound=1.0, rows="clip")
CONVEX = Logistic(row_bound=1.0, rows="clip")
BENT = Logistic(regularizer=Nonconvex(1e-3), row_bound=1.0, rows="clip")
MADE: dict[str, tuple[Any, Callable[[], Any]]] = {
    "000 theorem 4.4": (
        BENT, lambda: qg.DPSRM.theory(BENT.constants(), n=N, dim=D, budget=REPLACE, initial_gap=0.7)),
    "001 theorem 3.2": (
        STRONG, lambda: qg.StagewiseDPSGD.theory(
            STRONG.constants(), n=300, dim=D, budget=REPLACE, batch_size=100, momentum=0.2)),
    "002 theorem 2": (STRONG, lambda: qg.WeightedAverage.theory(STRONG.constants(), n=N, dim=D, budget=REPLACE)),
    "004 theorem 2": (
        STRONG, lambda: qg.OutputPerturbation.theory(STRONG.constants(), n=N, dim=D, budget=REPLACE, distance=1.0)),
    "004 theorem 3": (
        CONVEX, lambda: qg.OutputPerturbation.theory(CONVEX.constants(), n=N, dim=D, budget=REPLACE, distance=2.0)),
    "004 theorem 5": (
        CONVEX, lambda: qg.RRPSGD.theory(
            CONVEX.constants(), n=N, dim=D, budget=REPLACE, initial_gap=0.7, batch_size=200)),
}  # fmt: skip


def table() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.0, 1.0, (N, D)) / math.sqrt(D)
    return X, (X.sum(1) + 0.2 * rng.standard_normal(N) > 0).astype(int)


@pytest.mark.parametrize("theorem", MADE)
def test_a_theorem_runs_and_its_price_is_the_accountants(theorem: str) -> None:
    """The start has risk 0.693; every run must end below it and spend no more than was promised."""
    objective, make = MADE[theorem]
    run = qg.minimize(objective, table(), make(), budget=REPLACE, seed=3)
    assert run.privacy.epsilon is not None
    assert run.privacy.epsilon <= REPLACE.epsilon * (1 + 1e-9)
    assert objective.risk(objective.prepare(table()), run.params) < 0.69


def test_000_theorem_4_4_is_far_from_practice() -> None:
    """What docs/methods/papers.md says: the theorem's run hardly gets away from the start, the practical one
    does.
    """
    records = BENT.prepare(table())
    theory = MADE["000 theorem 4.4"][1]()
    practice = qg.DPSRM(steps=theory.steps, batch_size=theory.batch_size, learning_rate=2.0)

    def risk(method: Any) -> float:
        runs = [qg.minimize(BENT, table(), method, budget=REPLACE, seed=seed) for seed in range(4)]
        return float(np.mean([BENT.risk(records, run.params) for run in runs]))

    assert risk(theory) > risk(practice) + 0.05
    zeta, smooth = theory.zeta, theory.smoothness
    assert theory.mode == "theory"
    assert theory.returns == "random"
    assert theory.clip == 1.0
    assert theory.difference_clip == pytest.approx(zeta)
    assert theory.gamma == pytest.approx(min(1.0, zeta))
    gap = math.sqrt(smooth * 0.7)
    root = math.sqrt(D * math.log(1e5))
    assert zeta == pytest.approx(math.sqrt(gap * root / (N * 2.0)))
    assert theory.steps == round(N * 2.0 * gap / root)


def test_000_steps_of_theory_are_short() -> None:
    """η_t = min{ζ/(L‖v‖), 1/(2L)}: no step is longer than ζ/L, which is what bounds a record's difference."""
    theory = MADE["000 theorem 4.4"][1]()
    run = qg.minimize(BENT, table(), theory, budget=REPLACE, seed=0)
    assert float(np.linalg.norm(run.params)) <= theory.steps * theory.zeta / theory.smoothness


def test_001_theorem_3_2_satisfies_its_equation() -> None:
    made = qg.StagewiseDPSGD.theory(STRONG.constants(), n=N, dim=D, budget=REPLACE, batch_size=100, slack=1.5)
    on, total = made.early_momentum, made.first_steps
    assert made.learning_rate == pytest.approx(0.1**2 / (2 * 0.35))
    reached = made.learning_rate * (total - on + on / (2 * 0.1))
    assert reached == pytest.approx(1 / (1.5 * 0.1), rel=0.02)
    assert 2**made.stages >= (N * 2.0) ** 2 * 0.1 / (D * math.log(1e5)) > 2 ** (made.stages - 1)


def test_002_and_004_follow_their_formulas() -> None:
    beta, mu = 0.35, 0.1
    signal = (N * 2.0) ** 2 / (D * math.log(1e5))
    averaged = MADE["002 theorem 2"][1]()
    assert averaged.learning_rate == pytest.approx(1 / beta)
    assert averaged.steps == round(beta / mu * math.log(signal))
    strong, convex = MADE["004 theorem 2"][1](), MADE["004 theorem 3"][1]()
    assert strong.learning_rate == pytest.approx(1 / (mu + beta))
    assert strong.steps == round((mu**2 + beta**2) / (mu * beta) * math.log(mu**2 * signal))
    assert convex.learning_rate == pytest.approx(4.0)
    assert convex.steps == round((0.25**2 * 4.0 * signal) ** (1 / 3))
    pure = qg.OutputPerturbation.theory(
        CONVEX.constants(), n=N, dim=D, budget=REPLACE, distance=2.0, mechanism="pure"
    )
    assert pure.steps == round((0.25**2 * (N * 4.0) ** 2 / D**2) ** (1 / 3))


def test_004_theorem_5_takes_the_noise_that_is_added() -> None:
    made = MADE["004 theorem 5"][1]()
    z = qg.plan(made, n=N, budget=REPLACE).noise_multiplier
    spread = math.sqrt(4 / 200 + D * (z / 200) ** 2)
    assert made.steps == 400
    assert made.learning_rate == pytest.approx(min(4.0, math.sqrt(2 * 0.7 / 0.25) / (spread * 20)), rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda c: qg.DPSRM.theory(c, n=N, dim=D, budget=REPLACE, initial_gap=1.0),
        lambda c: qg.StagewiseDPSGD.theory(c, n=N, dim=D, budget=REPLACE, batch_size=10, growth=0.1),
        lambda c: qg.WeightedAverage.theory(c, n=N, dim=D, budget=REPLACE),
        lambda c: qg.OutputPerturbation.theory(c, n=N, dim=D, budget=REPLACE, distance=1.0),
        lambda c: qg.RRPSGD.theory(c, n=N, dim=D, budget=REPLACE, initial_gap=1.0),
    ],
)
def test_a_loss_without_constants_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="theory mode needs a finite lipschitz constant"):
        make(Squared(regularizer=L2(0.1), row_bound=1.0).constants())


def test_a_theorem_about_strong_convexity_needs_it() -> None:
    with pytest.raises(ValueError, match="add a regulariser"):
        qg.WeightedAverage.theory(CONVEX.constants(), n=N, dim=D, budget=REPLACE)
    with pytest.raises(ValueError, match=r"growth=0\.0"):
        qg.StagewiseDPSGD.theory(CONVEX.constants(), n=N, dim=D, budget=REPLACE, batch_size=10)


def test_000_a_random_output_is_uniform_on_the_points_that_were_asked_about() -> None:
    """Algorithm 1 chooses from θ⁰ … θᵀ⁻¹. 400 draws of R at T = 4: each share is within 0.1 of 1/4 (fixed seeds; a
    false alarm in 10⁻⁴ of choices of them), and R = 0 releases nothing and returns the start."""
    made = qg.DPSRM(steps=4, batch_size=100, returns="random")
    assert [(slot.name, slot.law) for slot in made.schedule(N).slots] == [
        ("first", None), ("next", ((0, 0.5), (1, 0.25), (2, 0.25))),
    ]  # fmt: skip
    assert qg.DPGD(steps=4, returns="random").schedule(N).slots[0].law == tuple((r, 0.25) for r in range(4))
    assert qg.RRPSGD(steps=4).schedule(N).slots[0].law == tuple((r, 0.25) for r in range(1, 5))
    X, y = table()
    small = X[:200], y[:200]
    runs = [qg.minimize(BENT, small, made, budget=None, seed=seed) for seed in range(400)]
    drawn = np.array([run.history[-1]["step"] for run in runs])
    assert {int(r) for r in drawn} == {0, 1, 2, 3}
    assert np.abs(np.bincount(drawn.astype(int)) / 400 - 0.25).max() < 0.1
    assert all((not run.params.any()) == (r == 0) for run, r in zip(runs, drawn, strict=True))
    with pytest.raises(ValueError, match="steps=1"):
        qg.DPSRM(steps=1, returns="random")


# --- what theorems say of a run, in numbers ----------------------------------------------------------------------


def growing() -> tuple[Any, Any, Any]:
    """A risk that obeys the Polyak–Łojasiewicz inequality: logistic with L2 does, with μ of the penalty."""
    made = qg.WeightedAverage.theory(STRONG.constants(), n=N, dim=D, budget=REPLACE, growth=0.1)
    return STRONG, made, {"initial_gap": 0.7, "growth": 0.1}


SAID: dict[str, tuple[Callable[[], tuple[Any, Any, dict[str, Any]]], tuple[str, ...]]] = {
    "002 theorem 2": (lambda: (STRONG, MADE["002 theorem 2"][1](), {"initial_gap": 0.7}), ("002 theorem 2",)),
    "002 theorem 3": (growing, ("002 theorem 3",)),
    "004 theorem 2": (
        lambda: (STRONG, MADE["004 theorem 2"][1](), {"distance": 2.0}),
        ("004 theorem 2", "004 excess risk, regularised", "004 excess risk, convex"),
    ),
    "004 theorem 3": (lambda: (CONVEX, MADE["004 theorem 3"][1](), {"distance": 10.0}), ("004 theorem 3",)),
    "004 theorem 6": (
        lambda: (CONVEX, qg.RRPSGD.theory(CONVEX.constants(), n=N, dim=D, budget=REPLACE, initial_gap=0.7,
                                          batch_size=200, sampling="fixed-size"), {"initial_gap": 0.7}),
        ("004 theorem 5", "004 theorem 6"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_a_theorem_says_is_true_of_its_runs(case: str) -> None:
    """Twelve runs each; the bounds are far from tight, so none may be exceeded."""
    make, names = SAID[case]
    objective, method, known = make()
    plan = qg.plan(method, n=N, budget=REPLACE)
    found = bounds(method, objective.constants(), plan, dim=D, **known)
    assert tuple(each.theorem for each in found) == names
    assert all(line in plan.explain(found) for line in map(str, found))
    records = objective.prepare(table())
    best = objective.risk(
        records, qg.minimize(objective, table(), qg.GD(steps=400, learning_rate=2.0), budget=None).params
    )
    runs = [qg.minimize(objective, table(), method, budget=REPLACE, seed=seed).params for seed in range(12)]
    for each in found:
        if "‖∇F‖²" in each.what:
            seen = [float(np.linalg.norm(objective.risk_gradient(records, x)) ** 2) for x in runs]
        else:
            seen = [objective.risk(records, x) - best for x in runs]
        assert (max(seen) if each.probability else float(np.mean(seen))) <= each.value, each


def test_numbers_of_theorems_follow_their_formulas() -> None:
    made = MADE["002 theorem 2"][1]()
    plan = qg.plan(made, n=N, budget=REPLACE)
    (found,) = bounds(made, STRONG.constants(), plan, dim=D, initial_gap=0.7)
    left, s = (1 - 0.1 / 0.35) ** made.steps, plan.noise_multiplier / N
    assert found.value == pytest.approx(left * 0.7 + D * s**2 / 0.2 * (1 - left))
    stages = qg.StagewiseDPSGD(stages=1, first_steps=3, batch_size=10, learning_rate=0.5, momentum=0.0)
    plan = qg.plan(stages, n=N, budget=REPLACE)
    stable, order = bounds(stages, STRONG.constants(), plan, dim=D)
    power = (1 - 1 / N) * 0.35 * 0.5 * (3 - 5 + 5 / 2)
    assert stable.value == pytest.approx(2 / ((N - 1) * 0.35) * 6**power + 7 * 10 / N)
    assert order.value == pytest.approx(max(D * math.log(1e5) / (0.1 * (N * 2) ** 2), math.sqrt(1 / (0.1 * N))))
    usual = qg.StagewiseDPSGD()
    assert "says nothing" in str(bounds(usual, STRONG.constants(), qg.plan(usual, n=N, budget=REPLACE), dim=D)[0])
    assert bounds(qg.DPGD(), STRONG.constants(), qg.plan(qg.DPGD(), n=N, budget=REPLACE), dim=D) == ()
    with pytest.raises(ValueError, match="failure=0"):
        bounds(made, STRONG.constants(), plan, dim=D, failure=0)


def test_privacy_bounds_the_generalisation_gap() -> None:
    """μ-GDP is 2Φ(μ/2) − 1 in total variation; under add-remove a replaced record is two changes."""
    exact = qg.plan(qg.DPGD(steps=5), n=N, budget=REPLACE)
    mu = math.sqrt(5) * 2 / exact.noise_multiplier
    assert exact.generalization == pytest.approx(math.erf(mu / 2 / math.sqrt(2)), rel=1e-3)
    loose = qg.plan(qg.DPGD(steps=5), n=N, budget=qg.Budget(2.0, 1e-5), noise_multiplier=exact.noise_multiplier)
    assert loose.generalization == pytest.approx(2 * math.erf(mu / 4 / math.sqrt(2)), rel=1e-3)
    search = qg.plan(qg.DPAGD(), n=N, budget=REPLACE)
    assert 0.0 < search.generalization < 1.0


def test_plan_and_report_say_how_far_new_records_may_differ(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    promise = ["--steps", "5", "--epsilon", "1", "--delta", "1e-5", "--relation", "replace-one"]
    assert main(["plan", "dp-gd", "--n", "4000", *promise]) == 0
    assert "is expected to differ from that on these by at most 0.107" in capsys.readouterr().out
    X, y = table()
    np.savez(tmp_path / "rows.npz", X=X, y=y)
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "rows.npz"), "--algorithm", "dp-gd", *promise, "--out", str(out)]) == 0
    assert qg.load(out).details["generalization"] == pytest.approx(0.1066, abs=2e-3)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "on new records differs by at most" in page
