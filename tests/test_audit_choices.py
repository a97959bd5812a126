"""Attacks on algorithms that choose: DP-AGD with half its noise is seen in its transcripts alone.

Seeds are fixed; the stated false-alarm rate of each audit is 1e-6.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from quietgrad.audit.attacks import Attack, attacks_on
from quietgrad.audit.canaries import CanaryObjective, CanaryRecords
from quietgrad.audit.distinguishers import attack_divergence, binary_divergence
from quietgrad.audit.running import run
from quietgrad.objectives.base import Batch
from tests.broken import Broken


@pytest.mark.parametrize("attack", attacks_on("dp-agd"), ids=lambda a: str(a.budget.relation))
def test_half_the_noise_of_an_adaptive_run_is_seen_without_the_exact_probes(attack: Attack) -> None:
    report = run(
        attack.algorithm,
        budget=attack.budget,
        n=attack.n,
        runs=round(2000 * attack.share),
        curator=Broken(noise=0.5),
        seed=5,
    )
    caught = {(f.layer, f.unit) for f in report.findings if f.verdict == "violation"}
    assert ("L2", "ρ") in caught


def test_canary_and_mirror_lose_at_different_candidates() -> None:
    objective = CanaryObjective()
    lost = {}
    for role in ("canary", "mirror"):
        objective.tick()
        lost[role] = [
            objective.loss_sum(Batch(CanaryRecords((role,), 1, 2), None), np.zeros(2), 3.0) for _ in range(6)
        ]
    assert np.add(lost["canary"], lost["mirror"]).tolist() == [3.0] * 6
    assert lost["canary"] == [3.0 if objective.loses(k) else 0.0 for k in range(6)]
    assert sum(lost["canary"]) == 9.0


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_gaussian_worlds_diverge_by_less_than_half_mu_squared(mu: float) -> None:
    """KL of N(μ, 1) from N(0, 1) is μ²/2; what one event shows of it is less, but more than a third."""
    rng = np.random.default_rng(7)
    worlds = rng.normal(mu, 1.0, 200_000), rng.normal(0.0, 1.0, 200_000)
    found = attack_divergence(worlds, mu * mu / 2.0, "normal", 1e-6)
    assert found.verdict == "pass"
    assert found.measured > mu * mu / 6.0
    assert attack_divergence(worlds, mu * mu / 8.0, "half the noise", 1e-6).verdict == "violation"


def test_too_few_runs_are_vacuous() -> None:
    rng = np.random.default_rng(8)
    worlds = rng.normal(0.1, 1.0, 300), rng.normal(0.0, 1.0, 300)
    assert attack_divergence(worlds, 0.005, "few", 1e-6).verdict == "vacuous"


def test_binary_divergence_at_its_ends() -> None:
    assert float(binary_divergence(1.0, 0.5)) == pytest.approx(math.log(2.0))
    assert math.isfinite(float(binary_divergence(1.0, 0.0)))
    assert float(binary_divergence(0.3, 0.3)) == 0.0
