"""Settings that theorems name: they follow the printed formulas, they run, and the theorems' bounds hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.methods.theorems import Always, Bound, bounds
from quietgrad.objectives import L2, Logistic, Nonconvex, Squared

N, D = 4000, 6
BUDGET = qg.Budget(2.0, 1e-5, qg.Relation.REPLACE_ONE)
KNOWN: dict[str, Any] = {"n": N, "dim": D, "budget": BUDGET}
STRONG = Logistic(regularizer=L2(0.1), row_bound=1.0, rows="clip")
CONVEX = Logistic(row_bound=1.0, rows="clip")
BENT = Logistic(regularizer=Nonconvex(1e-3), row_bound=1.0, rows="clip")
HILL = qg.objectives.landscape("strict-saddle", d=5)
# by theorem: loss, method, its settings, what is known of the problem, the bounds that are printed
MODES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "000 4.4": (BENT, qg.DPSRM, {**KNOWN, "initial_gap": 0.7}, {}, ()),
    "001 3.2": (STRONG, qg.StagewiseDPSGD, {**KNOWN, "n": 300, "batch_size": 100, "momentum": 0.2}, {},
                ("001 theorem 3.3", "001 theorem 3.4")),
    "002 2": (STRONG, qg.WeightedAverage, KNOWN, {"initial_gap": 0.7}, ("002 theorem 2",)),
    "002 3": (STRONG, qg.WeightedAverage, {**KNOWN, "growth": 0.1}, {"initial_gap": 0.7, "growth": 0.1},
              ("002 theorem 3",)),
    "004 2": (STRONG, qg.OutputPerturbation, {**KNOWN, "distance": 1.0}, {"distance": 2.0},
              ("004 theorem 2", "004 excess risk, regularised", "004 excess risk, convex")),
    "004 3": (CONVEX, qg.OutputPerturbation, {**KNOWN, "distance": 2.0}, {"distance": 10.0}, ("004 theorem 3",)),
    "004 5": (CONVEX, qg.RRPSGD,
              {**KNOWN, "initial_gap": 0.7, "batch_size": 200, "sampling": "fixed-size"}, {"initial_gap": 0.7},
              ("004 theorem 5", "004 theorem 6")),
}  # fmt: skip


def made(case: str) -> Any:
    return MODES[case][1].theory(MODES[case][0].constants(), **MODES[case][2])


def table() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.0, 1.0, (N, D)) / math.sqrt(D)
    return X, (X.sum(1) + 0.2 * rng.standard_normal(N) > 0).astype(int)


@pytest.mark.parametrize("case", MODES)
def test_every_theory_mode_runs_and_its_bounds_hold(case: str) -> None:
    """The start has risk 0.693: every run ends below it, within the budget, and within the theorem's own bounds."""
    loss, _, _, known, names = MODES[case]
    method, records = made(case), loss.prepare(table())
    plan = qg.plan(method, n=N, budget=BUDGET)
    found = bounds(method, loss.constants(), plan, dim=D, **known)
    assert tuple(each.theorem for each in found) == names
    assert all(f"theorem: {each}" in plan.explain(found) for each in found)
    run = qg.minimize(loss, table(), method, budget=BUDGET, seed=3)
    assert (run.privacy.epsilon or math.inf) <= BUDGET.epsilon * (1 + 1e-9)
    assert (risk := loss.risk(records, run.params)) < 0.69
    best = qg.minimize(loss, table(), qg.GD(steps=400, learning_rate=2.0), budget=None).params
    slope = float(np.linalg.norm(loss.risk_gradient(records, run.params))) ** 2
    for each in found:
        if each.kind != "rate":
            assert (slope if "‖∇F‖²" in each.what else risk - loss.risk(records, best)) <= each.value, each


def test_settings_follow_their_formulas() -> None:
    beta, mu, signal, root = 0.35, 0.1, (N * 2.0) ** 2 / (D * math.log(1e5)), math.sqrt(D * math.log(1e5))
    srm = made("000 4.4")
    gap = math.sqrt(srm.smoothness * 0.7)
    assert (srm.mode, srm.returns, srm.clip, srm.difference_clip) == ("theory", "random", 1.0, srm.zeta)
    assert srm.zeta == pytest.approx(math.sqrt(gap * root / (N * 2.0)))
    assert srm.steps == round(N * 2.0 * gap / root)
    run = qg.minimize(BENT, table(), srm, budget=BUDGET, seed=0)  # no step is longer than ζ/L
    assert float(np.linalg.norm(run.params)) <= srm.steps * srm.zeta / srm.smoothness
    stages = qg.StagewiseDPSGD.theory(STRONG.constants(), **KNOWN, batch_size=100, slack=1.5)
    assert stages.learning_rate == pytest.approx(0.1**2 / (2 * beta))
    reached = stages.learning_rate * (stages.first_steps + 4 * stages.early_momentum)
    assert reached == pytest.approx(1 / (1.5 * mu), rel=0.02)
    assert 2**stages.stages >= mu * signal > 2 ** (stages.stages - 1)
    assert (made("002 2").learning_rate, made("002 2").steps) == (1 / beta, round(beta / mu * math.log(signal)))
    assert made("004 2").steps == round((mu**2 + beta**2) / (mu * beta) * math.log(mu**2 * signal))
    assert made("004 3").steps == round((0.25**2 * 4.0 * signal) ** (1 / 3))
    rounds = made("004 5")
    z = qg.plan(rounds, n=N, budget=BUDGET).noise_multiplier
    spread = math.sqrt(4 / 200 + D * (z / 200) ** 2)
    assert rounds.learning_rate == pytest.approx(min(4.0, math.sqrt(2 * 0.7 / 0.25) / (spread * 20)), rel=1e-3)


def test_bounds_follow_their_formulas() -> None:
    average, stages = (
        made("002 2"),
        qg.StagewiseDPSGD(1, 12, 10, 0.5, momentum=0.0, early_momentum=2, returns="random"),
    )
    plan = qg.plan(average, n=N, budget=BUDGET)
    (found,) = bounds(average, STRONG.constants(), plan, dim=D, initial_gap=0.7)
    left, s = (1 - 0.1 / 0.35) ** average.steps, plan.noise_multiplier / N
    assert found.value == pytest.approx(left * 0.7 + D * s**2 / 0.2 * (1 - left))
    stable, order = bounds(stages, STRONG.constants(), qg.plan(stages, n=N, budget=BUDGET), dim=D)
    power = (1 - 1 / N) * 0.35 * 0.5 * (12 - 2 + 2 / 2)
    assert stable.value == pytest.approx(2 / ((N - 1) * 0.35) * 24**power + 25 * 10 / N)
    assert order.value == pytest.approx(max(D * math.log(1e5) / (0.1 * (N * 2) ** 2), math.sqrt(1 / (0.1 * N))))
    assert {stable.kind, order.kind} == {"rate"}
    assert "at most" not in f"{stable}{order}"
    assert bounds(qg.DPGD(), STRONG.constants(), plan, dim=D) == ()


@pytest.mark.parametrize(
    "broken",
    [
        {"clip": 0.01},
        {"learning_rate": 50.0},
        {"learning_rate": 0.0145, "momentum": 0.9},  # just above (1−ϱ)²/(2β)
        {"returns": "last"},
        {"first_steps": 30},  # η⁰·T⁰ too short for Γ < ½
    ],
)
def test_the_stages_theorems_say_nothing_where_a_hypothesis_fails(broken: dict[str, Any]) -> None:
    """Theorems 3.3 and 3.4 have the settings of 3.2, so no active clip, short steps, random iterates."""
    theory = qg.StagewiseDPSGD.theory(STRONG.constants(), **KNOWN, batch_size=100)
    known: dict[str, Any] = {"dim": D, "initial_gap": 0.7}
    names = [f"001 theorem 3.{k}" for k in (2, 3, 4)]
    short = dataclasses.replace(theory, stages=2)
    assert [each.theorem for each in bounds(short, STRONG.constants(), _planned(short), **known)] == names
    other = dataclasses.replace(short, **broken)
    assert bounds(other, STRONG.constants(), _planned(other), **known) == ()


def _planned(method: Any) -> Any:
    return qg.plan(method, n=N, budget=BUDGET)


@pytest.mark.parametrize("case", ["002 2", "002 3", "004 2", "004 3", "004 5"])
def test_limits_hold_where_the_noise_is_loud(case: str) -> None:
    """At ε = 0.02 a run ends above its start: what is said to be never exceeded, or not on average, is not.

    60 runs. A mean over runs exceeds its limit if it does by 5 standard errors (false alarm below 1e-6); a limit
    with probability 0.95 fails if more than 12 runs exceed it (false alarm below 1e-5).
    """
    loss, method, settings, known, _ = MODES[case]
    loud = qg.Budget(0.02, 1e-5, qg.Relation.REPLACE_ONE)
    theory = method.theory(loss.constants(), **{**settings, "budget": loud})
    found = bounds(theory, loss.constants(), qg.plan(theory, n=N, budget=loud), dim=D, **known)
    records, X, y = loss.prepare(table()), *table()
    least = loss.risk(records, qg.minimize(loss, (X, y), qg.GD(steps=400, learning_rate=2.0), budget=None).params)
    ends = [qg.minimize(loss, (X, y), theory, budget=loud, seed=seed).params for seed in range(60)]
    risks = np.array([loss.risk(records, end) - least for end in ends])
    slopes = np.array([float(np.linalg.norm(loss.risk_gradient(records, end))) ** 2 for end in ends])
    if loss is STRONG:
        assert risks.mean() > loss.risk(records, np.zeros(D)) - least  # worse than the start: no limit is its gap
    for each in found:
        seen = slopes if "‖∇F‖²" in each.what else risks
        if each.always is not None:
            assert seen.max() <= each.always.value
            assert each.always.because in str(dataclasses.replace(each, value=each.always.value))
        if each.kind == "expectation":
            assert seen.mean() <= each.value + 5.0 * seen.std() / math.sqrt(60.0)
        elif "new records" not in each.what:
            assert (seen > each.value).sum() <= 12
        assert ("never above" in str(each)) == (each.always is not None and each.value >= each.always.value)


def test_a_bound_is_said_as_what_it_is() -> None:
    likely = Bound("t", "F", 0.5, "probability", 0.95)
    assert str(likely) == "t: F is at most 0.5 with probability 0.95"
    assert str(Bound("t", "F", 0.5, "expectation")) == "t: F is at most 0.5 in expectation"
    assert "at most" not in str(Bound("t", "F", 0.5, "rate"))
    for wrong in (
        {"kind": "rate", "always": Always(1.0, "it is")},
        {"kind": "expectation", "probability": 0.9},
        {"kind": "probability"},
    ):
        with pytest.raises(ValueError, match=r"^(always|probability)"):
            Bound("t", "F", 0.5, **wrong)


def test_theorem_two_of_paper_003_is_planned_and_its_mode_runs() -> None:
    """Its own settings need n > 10¹²; the mode is run with others that fit on a landscape of 10⁶ records."""
    plain: dict[str, Any] = {"dim": 5, "budget": BUDGET, "risk_bound": 1.0}
    method = qg.PerturbedSGD.theory(HILL.constants(), n=10**13, **plain)
    assert qg.plan(method, n=10**13, budget=BUDGET).epsilon() == pytest.approx(2.0, rel=2e-3)
    small = dataclasses.replace(method, oracle=qg.AdaptiveSpider(), learning_rate=0.3, chi=0.01, steps=30)
    run = qg.minimize(HILL, 10**6, small, budget=BUDGET, seed=0)
    assert (run.stopped_by, run.details["claim"]) == ("steps", "stated constants, with s and C taken as given")
    for settings, word in (({"n": 10**6}, "n=1000000"), ({"n": 10**13, "failure": 1.0}, "failure")):
        with pytest.raises(ValueError, match=word):
            qg.PerturbedSGD.theory(HILL.constants(), **{**plain, **settings})


def test_a_loss_without_constants_is_refused() -> None:
    unknown = Squared(regularizer=L2(0.1), row_bound=1.0).constants()
    for _, method, settings, _, _ in MODES.values():
        with pytest.raises(ValueError, match="finite lipschitz constant"):
            method.theory(unknown, **settings)
    with pytest.raises(ValueError, match="add a regulariser"):
        qg.WeightedAverage.theory(CONVEX.constants(), **KNOWN)
    for method in (qg.DPSRM, qg.PerturbedSGD):
        with pytest.raises(ValueError, match=rf"{method.__name__}\.theory"):
            method(mode="theory")


def test_privacy_bounds_the_generalisation_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """μ-GDP is 2Φ(μ/2) − 1 in total variation; under add-remove a replaced record is two changes."""
    exact = qg.plan(qg.DPGD(steps=5), n=N, budget=BUDGET)
    mu = math.sqrt(5) * 2 / exact.noise_multiplier
    assert exact.generalization == pytest.approx(math.erf(mu / 2 / math.sqrt(2)), rel=1e-3)
    loose = qg.plan(qg.DPGD(steps=5), n=N, budget=qg.Budget(2.0, 1e-5), noise_multiplier=exact.noise_multiplier)
    assert loose.generalization == pytest.approx(2 * math.erf(mu / 4 / math.sqrt(2)), rel=1e-3)
    assert 0.0 < qg.plan(qg.DPAGD(), n=N, budget=BUDGET).generalization < 1.0
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    promise = ["--steps", "5", "--epsilon", "1", "--delta", "1e-5", "--relation", "replace-one"]
    assert main(["plan", "dp-gd", "--n", "4000", *promise]) == 0
    assert "is expected to differ from that on these by at most 0.107" in capsys.readouterr().out
    out, (X, y) = tmp_path / "run", table()
    np.savez(tmp_path / "rows.npz", X=X, y=y)
    assert main(["train", str(tmp_path / "rows.npz"), "--algorithm", "dp-gd", *promise, "--out", str(out)]) == 0
    assert qg.load(out).details["generalization"] == pytest.approx(0.1066, abs=2e-3)
    assert "on new records differs by at most" in (out / "report.html").read_text(encoding="utf-8")


def test_a_run_of_too_many_steps_to_account_for_names_the_batch_that_has_fewer() -> None:
    known = {"n": 100_000, "dim": 5, "budget": qg.Budget(1.0, 1e-5), "initial_gap": 0.7}
    with pytest.raises(ValueError, match=r"batch_size=1: .* Use batch_size=32 or more"):
        qg.RRPSGD.theory(CONVEX.constants(), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", MODES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "n=0: must be a whole number"), ({"n": 2.5}, "n=2.5"), ({"n": math.nan}, "n=nan"),
        ({"dim": 0}, "dim=0: must be a whole number"), ({"dim": -1}, "dim=-1"), ({"budget": None}, "budget=None"),
    ],
    ids=str,
)  # fmt: skip
def test_what_every_theorem_is_told_has_one_range(case: str, wrong: dict[str, Any], message: str) -> None:
    loss, method, known, *_ = MODES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        method.theory(loss.constants(), **{**known, **wrong})
