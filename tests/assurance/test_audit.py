"""Audits: bounds against references, attacks that find what is there and nothing else, command, bad input.

Seeds are fixed where a verdict is checked; the stated false-alarm rate of each audit is 1e-6.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import quietgrad as qg
from quietgrad.assurance.audit import confidence_bounds as bounds
from quietgrad.assurance.audit import federated
from quietgrad.assurance.audit.attacks import Attack, attacked, attacks_on
from quietgrad.assurance.audit.canaries import CanaryGame
from quietgrad.assurance.audit.federated import TRUSTS, run_federated
from quietgrad.assurance.audit.replicas import Trial
from quietgrad.assurance.audit.running import (
    PrivacyClaim,
    attack_divergence,
    binary_divergence,
    learned,
    likelihood,
    probe_rounds,
    run,
)
from quietgrad.assurance.audit.single_run import PlantedQuery, _Planted
from quietgrad.cli import main
from quietgrad.cli.audit import audit_folder
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon
from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import RecursiveMomentumQuery
from quietgrad.methods.registry import ALGORITHMS
from tests.mutations.broken import Broken

ADD, REPLACE = Relation.ADD_REMOVE, Relation.REPLACE_ONE


# --- bounds -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.data(), st.sampled_from([1e-6, 1e-3, 0.05]))
@settings(max_examples=60, deadline=None)
def test_clopper_pearson_inverts_the_binomial(trials: int, data: st.DataObject, alpha: float) -> None:
    hits = data.draw(st.integers(0, trials))
    low, high = bounds.clopper_pearson(hits, trials, alpha)
    if hits:
        assert stats.binom.sf(hits - 1, trials, low) == pytest.approx(alpha, rel=1e-6)
    if hits < trials:
        assert stats.binom.cdf(hits, trials, high) == pytest.approx(alpha, rel=1e-6)
    assert low <= hits / trials <= high


@pytest.mark.parametrize(("dprime", "size"), [(0.3, 800), (1.2, 1500), (4.0, 300)])
def test_dprime_bound_inverts_the_noncentral_t(dprime: float, size: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(dprime, 1, size), rng.normal(0, 1, size)
    estimate, low = bounds.dprime_lower(a, b, 1e-3)
    unit = math.sqrt(2 / size)
    if low > 0:
        assert stats.nct.sf(estimate / unit, 2 * size - 2, low / unit) == pytest.approx(5e-4, rel=1e-3)
    assert estimate / unit == pytest.approx(abs(stats.ttest_ind(a, b).statistic))


def test_dprime_bound_covers() -> None:
    """At α = 0.1 the bound is above the truth in at most 10 % of 2000 audits; P(> 140) < 1e-8."""
    rng = np.random.default_rng(1)
    over = sum(bounds.dprime_lower(rng.normal(1, 1, 60), rng.normal(0, 1, 60), 0.1)[1] > 1.0 for _ in range(2000))
    assert 60 <= over <= 140  # α/2 each side: expected 100


def test_epsilon_bound_covers_the_gaussian_profile() -> None:
    rng = np.random.default_rng(2)
    truth = gaussian_epsilon(1.5, 0.01)
    over = 0
    for _ in range(300):
        s = rng.normal(1.5, 1, 400), rng.normal(0, 1, 400)
        cut = bounds.best_threshold((s[0][:100], s[1][:100]), 0.01, 0.05, 300)
        over += bounds.epsilon_lower((s[0][100:], s[1][100:]), cut, 0.01, 0.1) > truth
    assert over <= 50  # at most 10 %, and P(> 50) < 1e-3 even then


def test_one_run_bounds_never_exceed_the_truth_at_their_rate() -> None:
    """At α = 0.05 of 100 one-run audits at most 5 may exceed the truth in expectation; P(> 16) < 1e-4.

    Randomised response with ε = 1 on 400 coins, all guessed; and a mechanism of μ = 1, a fifth guessed.
    """
    rng, q = np.random.default_rng(4), 1 / (1 + math.exp(-1.0))
    found = [bounds.one_run_epsilon(400, 400, int(rng.binomial(400, q)), 0.0, 0.05) for _ in range(100)]
    assert sum(epsilon > 1.0 for epsilon in found) <= 16
    assert np.median(found) > 0.7
    over = 0
    for _ in range(100):
        coins = rng.random(400) < 0.5
        order = np.argsort(coins + rng.standard_normal(400))
        correct = int(coins[order[-40:]].sum() + (~coins[order[:40]]).sum())
        over += bounds.one_run_mu(400, 80, correct, 0.05) > 1.0
    assert over <= 16


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_gaussian_worlds_diverge_by_less_than_half_mu_squared(mu: float) -> None:
    """KL of N(μ, 1) from N(0, 1) is μ²/2; what one event shows of it is less, but more than a third."""
    rng = np.random.default_rng(7)
    worlds = rng.normal(mu, 1.0, 200_000), rng.normal(0.0, 1.0, 200_000)
    found = attack_divergence(worlds, mu * mu / 2.0, "normal", 1e-6)
    assert found.verdict == "pass"
    assert found.measured > mu * mu / 6.0
    assert attack_divergence(worlds, mu * mu / 8.0, "half the noise", 1e-6).verdict == "violation"
    few = worlds[0][:300], worlds[1][:300]
    assert attack_divergence(few, 0.005, "few", 1e-6).verdict == ("violation" if mu == 2.0 else "vacuous")
    assert float(binary_divergence(1.0, 0.5)) == pytest.approx(math.log(2.0))
    assert math.isfinite(float(binary_divergence(1.0, 0.0)))


# --- runs side by side --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_blocks_are_independent_runs(sampling: Any) -> None:
    """A canary's presence and the noise of one block say nothing about another's."""
    algorithm = qg.DPSGD(steps=3, batch_size=2, sampling=sampling)
    plan = qg.plan(algorithm, n=4, budget=qg.Budget(40.0, 1e-5, REPLACE))
    game = CanaryGame(4, REPLACE, background=False, all_records=True)
    x = Trial(algorithm, plan, game, seed=5).collect(0, 4000).transcript
    x = x - x.mean(axis=0)
    z = plan.noise_multiplier
    # Half of the releases hold the canary (shift 1): variance ¼ beside the noise's; the other axis is noise.
    assert x[:, 0].var() == pytest.approx(z**2 + 0.25, rel=0.12)
    assert x[:, 1].var() == pytest.approx(z**2, rel=0.12)
    neighbours = (x[:-1] * x[1:]).mean(axis=0) / x.var(axis=0)
    assert np.abs(neighbours).max() < 5.0 / math.sqrt(4000)


def test_blocks_and_loop_agree_without_noise_differences() -> None:
    """Block by block and one by one, transcripts have the same law: means agree within five standard errors."""
    algorithm = qg.DPSRM(steps=4, batch_size=4, difference_clip=0.2)
    plan = qg.plan(algorithm, n=4, budget=qg.Budget(6.0, 1e-5, REPLACE))
    slow = qg.DPSRM(steps=4, batch_size=4, difference_clip=0.2, smoothness=1e12)  # takes a norm: one by one
    game = CanaryGame(4, REPLACE)
    fast_view, slow_view = (Trial(each, plan, game).collect(0, 1500) for each in (algorithm, slow))
    assert not fast_view.looped
    assert slow_view.looped
    error = 5 * plan.noise_multiplier * math.sqrt(2 / 1500)
    assert np.abs(fast_view.transcript.mean(axis=0) - slow_view.transcript.mean(axis=0)).max() < error


def test_likelihood_is_the_log_density_ratio() -> None:
    algorithm = qg.DPSGD(steps=2, batch_size=1)
    plan = qg.plan(algorithm, n=4, budget=qg.Budget(6.0, 1e-5))
    view = Trial(algorithm, plan, CanaryGame(4, ADD, background=False), seed=1).collect(0, 300)
    z, q = plan.noise_multiplier, 0.25
    x = view.transcript[:, ::2]
    ratio = (1 - q) + q * stats.norm.pdf(x, 1, z) / stats.norm.pdf(x, 0, z)
    got = likelihood((view, view), PrivacyClaim(plan), "growing")
    assert got is not None
    np.testing.assert_allclose(got[0], np.log(ratio).sum(axis=1), rtol=1e-9)


def test_learned_scores_take_worlds_that_release_unequally_often() -> None:
    rng = np.random.default_rng(0)
    quiet, talkative = rng.standard_normal((400, 2)), rng.standard_normal((400, 4)) + 1.0
    talkative[:200, 2:] = np.nan  # half of the runs stopped early
    a, b = learned((quiet, talkative))
    assert abs(a.mean() - b.mean()) > 0.5 * a.std()


# --- audits -------------------------------------------------------------------------------------------------------


def test_every_private_algorithm_has_an_attack() -> None:
    missing = {name for name, entry in ALGORITHMS.items() if entry.kind.private and not entry.attacks}
    assert not missing, f"no attack is prepared for {sorted(missing)}"


SLOW = ("whitened-gd", "dp-agd", "perturbed-sgd", "model-selection")
FAST = [(name, attack) for name in attacked() for attack in attacks_on(name) if name not in SLOW]


@pytest.mark.parametrize(("name", "attack"), FAST, ids=[f"{n}-{a.label}-{a.budget.relation}" for n, a in FAST])
def test_correct_algorithms_pass_with_signal(name: str, attack: Attack) -> None:
    """Not accused, and not vacuously: half the noise would have been seen. False-alarm rate 1e-6 each."""
    report = run(attack.algorithm, budget=attack.budget, n=attack.n, runs=800, seed=11, game=attack.game)
    assert report.verdict == "pass", str(report)
    assert report.epsilon_lower <= report.epsilon_claimed
    assert ALGORITHMS[name].kind is type(attack.algorithm)


@pytest.mark.parametrize("name", SLOW)
def test_slow_algorithms_pass(name: str) -> None:
    attack = attacks_on(name)[0]
    report = run(attack.algorithm, budget=attack.budget, n=attack.n, runs=250, seed=11)
    assert report.verdict != "violation", str(report)
    assert any("one by one" in note for note in report.notes)


HALF = [
    *(a for a in attacks_on("dp-sgd") if a.label in ("Poisson", "fixed-size")),
    *attacks_on("dp-agd")[:1],
    *attacks_on("rrpsgd"),
]


@pytest.mark.parametrize("attack", HALF, ids=lambda a: f"{a.algorithm.name}-{a.label}")
def test_half_the_noise_is_seen_in_transcripts_alone(attack: Attack) -> None:
    """Through sampling, through noisy choices (by the test of ρ), and at a random round."""
    runs = round(2000 * attack.share)
    report = run(attack.algorithm, budget=attack.budget, n=attack.n, runs=runs, curator=Broken(noise=0.5), seed=5)
    caught = {f.unit[:1] for f in report.findings if f.verdict == "violation" and f.layer == "L2"}
    assert ("ρ" if attack.algorithm.name == "dp-agd" else "δ") in caught, str(report)
    assert not report.passed


def test_small_claims_are_vacuous_and_say_how_many_runs_would_show_something() -> None:
    method, budget = qg.DPSGD(steps=20, batch_size=4), qg.Budget(1.0, 1e-5)
    claim = PrivacyClaim(qg.plan(method, n=4, budget=budget))
    needed = bounds.runs_for(claim.mu, claim.profile, 1e-6 / 6)
    assert needed is not None
    assert run(method, budget=budget, n=4, runs=needed, seed=0).passed
    few = run(method, budget=budget, n=4, runs=needed // 4, seed=0)
    assert few.vacuous
    assert not few.passed
    assert f"about {needed} runs would show it" in few.notes[-1]


def test_lower_bounds_are_tight_with_more_runs_and_long_runs_are_summarised() -> None:
    budget = qg.Budget(6.0, 1e-5)
    report = run(qg.DPSRM(steps=6, batch_size=4), budget=budget, n=4, runs=20_000, seed=0)
    assert report.passed
    assert report.tightness > 0.85
    assert run(qg.DPSGD(steps=300, batch_size=4), budget=budget, n=4, runs=1000, seed=0).epsilon_lower > 3.0


GD = qg.DPGD(steps=3)
NOTHING: Any = None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(GD, budget=qg.Budget(6.0, 1e-5), runs=50), "runs=50: must be ≥ 200"),
        (lambda: run(GD, budget=qg.Budget(6.0, 1e-5), confidence=1.0), "confidence=1.0"),
        (lambda: run(GD, budget=NOTHING), "claims nothing"),
        (lambda: run_federated(lambda n: qg.DPSGD(steps=3, batch_size=1), budget=qg.Budget(6.0, 1e-5)), "sample"),
        (lambda: bounds.dprime_lower([1.0], [2.0], 0.1), "needs"),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("trust", "secure"), TRUSTS)
def test_federations_pass_and_half_their_noise_is_seen(
    trust: str, secure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def audit() -> Any:
        budget = qg.Budget(6.0, 1e-5, REPLACE)
        return run_federated(lambda n: qg.DPGD(steps=3), budget=budget, trust=trust, secure=secure, runs=1000)

    report = audit()
    assert report.verdict == "pass", str(report)
    from quietgrad.federation.simulation import assemble as whole

    def half(*parts: Any, noise_multiplier: float, **settings: Any) -> Any:
        return whole(*parts, noise_multiplier=noise_multiplier / 2, **settings)

    monkeypatch.setattr(federated, "assemble", half)
    caught = {f.layer for f in audit().findings if f.verdict == "violation"}
    assert caught >= {"L0 noise scale", "L1"}


# --- one run ------------------------------------------------------------------------------------------------------


def table(rng: np.random.Generator, n: int = 300, d: int = 8) -> tuple[Any, Any]:
    X = rng.standard_normal((n, d))
    return X, (X[:, 0] > 0).astype(float)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_one_run_sees_half_the_noise_and_nothing_else(relation: Relation) -> None:
    data = table(np.random.default_rng(0))
    budget = qg.Budget(8.0, 1e-5, relation)
    for noise, verdict in ((1.0, "pass"), (0.5, "violation")):
        report = qg.audit.one_run(
            qg.objectives.Logistic(), data, qg.DPSRM(steps=10, batch_size=2300), budget=budget, canaries=2000,
            curator=Broken(noise=noise), seed=4,
        )  # fmt: skip
        assert report.verdict == verdict, str(report)
    assert report.layer == "L3 d′"
    sampled = qg.DPSGD(steps=10, batch_size=100)  # not Gaussian: guesses alone are judged
    report = qg.audit.one_run(qg.objectives.Logistic(), data, sampled, budget=budget, canaries=200, seed=0)
    assert report.verdict in ("pass", "vacuous")
    with pytest.raises(ValueError, match="≥ 20 canaries"):
        qg.audit.one_run(qg.objectives.Logistic(), data, sampled, budget=budget, canaries=5)


def test_planted_canaries_leave_the_sums_of_the_model_alone() -> None:
    rng, objective = np.random.default_rng(1), qg.objectives.Logistic()
    planted = _Planted(objective, 50, rng.random(50) < 0.5, ADD)
    records = planted.prepare(table(rng))
    now, before = rng.standard_normal((2, 8))
    query = RecursiveMomentumQuery(now, before, 0.1, 1.0, 0.2)
    for indices in (None, np.arange(0, len(records), 2)):
        out, plain = np.zeros(records.dim), np.zeros(8)
        PlantedQuery(query).sum_into(planted, Batch(records, indices), out)
        query.sum_into(objective, Batch(records.inner, indices if indices is None else indices[:150]), plain)
        np.testing.assert_allclose(out[:8], plain, rtol=1e-12)
        assert set(np.unique(out[8:].round(12))) <= {0.0, 0.28}


# --- command ------------------------------------------------------------------------------------------------------


def test_command_prints_lines_and_json_and_exits_1_on_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "dp-gd", "--runs", "500"]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main(["audit", "dp-gd", "--runs", "500", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert {r["verdict"] for r in text["reports"]} == {"pass"}
    assert text["reports"][0]["epsilon_lower"] < text["reports"][0]["epsilon_claimed"]
    monkeypatch.setattr("quietgrad.assurance.audit.attacks.run", partial(run, curator=Broken(noise=0.5)))
    assert main(["audit", "dp-gd", "--runs", "2000"]) == 1
    assert "VIOLATION" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("algorithm", "relation", "runs"),
    [
        (qg.DPSGD(steps=20, batch_size=150, learning_rate="cosine:0.5"), ADD, ["--runs", "1000"]),
        (qg.DPSRM(steps=10, batch_size=300), ADD, []),  # as many runs as its claim needs
        (qg.OutputPerturbation(steps=5), REPLACE, ["--runs", "1000"]),
    ],
    ids=["dp-sgd", "dp-srm", "output-perturbation"],
)
def test_command_audits_a_finished_run(
    algorithm: Any, relation: Relation, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = qg.objectives.Huber(row_bound=1.0, rows="clip")
    data, epsilon = table(np.random.default_rng(0)), 4.0 if runs else 1.0
    budget = qg.Budget(epsilon, 1e-5, relation)
    qg.minimize(objective, data, algorithm, budget=budget, n_public=len(data[1])).save(tmp_path)
    assert main(["audit", str(tmp_path), *runs, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["reports"][0]
    assert report["epsilon_claimed"] == pytest.approx(epsilon, rel=2e-3)
    assert report["verdict"] == "pass"
    assert runs or 1500 < report["runs"] < 3000


def test_command_explains_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for usage in ([], ["dp-gd", "--all"], ["sgd"], ["dp-gd", "--runs", "10"]):
        assert main(["audit", *usage]) == 2
    assert "runs=10: must be" in capsys.readouterr().err
    assert main(["audit", str(tmp_path)]) == 1
    assert "result.json is missing" in capsys.readouterr().err
    result = qg.minimize(qg.objectives.Logistic(), table(np.random.default_rng(0)), qg.GD(steps=2), budget=None)
    result.save(tmp_path)
    assert main(["audit", str(tmp_path)]) == 1
    assert "not private" in capsys.readouterr().err


def test_rounds_that_are_priced_in_groups_are_no_violation() -> None:
    """130 possible rounds, priced as 65: a sound run was accused. False-alarm rate 1e-7."""
    method, budget = qg.RRPSGD(steps=130, batch_size=4), qg.Budget(4.0, 1e-5)
    made = qg.plan(method, n=4, budget=budget)
    game = CanaryGame(4, budget.relation, "growing", background=True)
    found = probe_rounds(Trial(method, made, game, seed=0), 1e-7)
    assert found.verdict == "pass", found
    short = qg.plan(qg.RRPSGD(steps=90, batch_size=4), n=4, budget=budget)
    schedule = replace(made.schedule, slots=(replace(made.schedule.slots[0], law=short.schedule.slots[0].law),))
    less = replace(made, schedule=schedule)  # rounds beyond what was paid for
    assert probe_rounds(Trial(method, less, game, seed=0), 1e-7).verdict == "violation"


def test_releases_that_are_not_attacked_are_named(tmp_path: Path) -> None:
    """The ranges of an additive model are released before its algorithm runs."""
    from quietgrad.estimators import PrivateAdditiveClassifier
    from quietgrad.estimators.runs import to_run

    X = np.random.default_rng(0).normal(size=(2000, 2))
    model = PrivateAdditiveClassifier(epsilon=3.0, delta=1e-5, classes=[0, 1]).fit(X, (X[:, 0] > 0).astype(int))
    report = audit_folder(to_run(model, tmp_path), 200)
    assert report.epsilon_claimed < 2.99
    assert any(note.startswith("not attacked: ranges") for note in report.notes), report.notes


def test_a_run_whose_statement_does_not_hold_is_not_attacked(tmp_path: Path) -> None:
    """With its noise untouched and a smaller ε written over it, or with a known seed, every attack would fail."""
    from tests.methods.common import problem

    data, method, budget = problem(300), qg.DPGD(steps=10), qg.Budget(4.0, 1e-5)
    qg.minimize(qg.objectives.Logistic(), data, method, budget=budget, folder=tmp_path / "seeded", seed=1)
    with pytest.raises(DataError, match="seed"):
        audit_folder(tmp_path / "seeded", 400)
    qg.minimize(qg.objectives.Logistic(), data, method, budget=budget).save(tmp_path / "run")
    assert audit_folder(tmp_path / "run", 400).epsilon_claimed == pytest.approx(4.0, abs=0.01)
    file = tmp_path / "run" / "result.json"
    stated = json.loads(file.read_text())
    stated["privacy"]["epsilon"] = 0.5
    file.write_text(json.dumps(stated))
    with pytest.raises(DataError, match=r"ε = 0.5 is stated"):
        audit_folder(tmp_path / "run", 400)


def test_a_canary_that_waits_for_its_turn_shows_less() -> None:
    """In turns it is not in every release: with half the noise such an audit would still pass, so it is vacuous."""
    turns = qg.DPSGD(steps=32, sampling="turns", cohorts=8)
    assert run(turns, budget=qg.Budget(1.0, 1e-5), n=64, runs=1800, seed=3).vacuous
    assert run(qg.DPGD(steps=4), budget=qg.Budget(1.0, 1e-5), n=4, runs=1800, seed=3).passed
