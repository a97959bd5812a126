"""Settings that theorems name: they satisfy the printed equations, run, and refuse a loss without constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
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
    """What docs/algorithms.md says: the theorem's run hardly gets away from the start, the practical one does."""
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
