"""The audit of one configuration: plan it, attack it in both worlds, compare with what was claimed."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quietgrad.algorithms.base import Algorithm
from quietgrad.audit.canaries import CanaryGame, amplitude, data_game
from quietgrad.audit.confidence_bounds import runs_for
from quietgrad.audit.distinguishers import (
    PrivacyClaim,
    attack_divergence,
    attack_dprime,
    attack_profile,
    learned,
    likelihood,
)
from quietgrad.audit.noise_checks import categories, lengthened, probe_grid, probe_slots
from quietgrad.audit.replicas import CuratorFactory, Game, Pattern, Trial, Views, central
from quietgrad.audit.report import AuditFinding, AuditReport, judged
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.events import ZCDP
from quietgrad.training import plan as make_plan

Floats = npt.NDArray[np.float64]
_DRAWS = 400  # of a random round
_FEWEST = 200
_PATTERNS: tuple[Pattern, ...] = ("growing", "alternating")


def run(
    algorithm: Algorithm,
    *,
    budget: Budget,
    runs: int = 2000,
    n: int | None = None,
    curator: CuratorFactory = central,
    confidence: float = 1.0 - 1e-6,
    game: Game | None = None,
    claimed: Plan | None = None,
    noise_multiplier: float | None = None,
    seed: int | None = None,
) -> AuditReport:
    """Attack a configuration with canaries and compare a lower bound on its ε with the ε it claims.

    The algorithm and the curator are the production ones; only the data are the auditor's. Un-sampled Gaussian
    releases are tested by d′ (L1), everything by Clopper–Pearson bounds on the whole transcript or, end to end, on
    the final model alone (L2), and the noise itself by exact probes (L0).

    Args:
        algorithm: what to audit, with the settings to audit.
        budget: the claim under audit.
        runs: runs in each of the two neighbouring worlds.
        n: public number of records; default the batch size, so that everyone takes part in every release, which is
            the strongest attack. Give the real n to audit the amplification by sampling too.
        curator: what holds the data; a function of (objective, data, key).
        confidence: probability that a correct configuration is not accused.
        game: two worlds of your own instead of the gradient-space canaries.
        claimed: a plan whose claim is compared instead of the configuration's own.
        noise_multiplier: audit this noise instead of what the budget asks for; the claim is then what it proves.
        seed: fixed noise, for tests.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
    >>> report = run(DPGD(steps=4), budget=Budget(6.0, 1e-5), seed=1)
    >>> report.passed, 3.0 < report.epsilon_lower < report.epsilon_claimed
    (True, True)
    """
    started = time.perf_counter()
    if budget is None:
        raise ValueError("budget=None: a run without a budget claims nothing, so there is nothing to audit.")
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence={confidence!r}: must be in [0.5, 1), such as 0.999999.")
    alpha = 1.0 - confidence
    # The least α at which the event "always here, never there" still proves anything: 2(1 − α^(1/trials)) < 1.
    needed = max(_FEWEST, math.ceil(8 * math.log(30 / alpha)))
    if isinstance(runs, bool) or int(runs) != runs or runs < needed:
        raise ValueError(f"runs={runs!r}: must be ≥ {needed} for a confidence of 1−{alpha:.0e}.")
    n = max(3, int(getattr(algorithm, "batch_size", None) or 3)) if n is None else n
    plan = make_plan(algorithm, n=n, budget=budget, noise_multiplier=noise_multiplier)
    claim = PrivacyClaim(claimed or plan)
    findings = [*probe_slots(lengthened(plan), curator, alpha=alpha / 10, seed=seed), probe_grid(curator)]
    game = game or data_game(algorithm, n, budget.relation)
    games = [game] if game is not None else _canary_games(plan, claim, n, budget)
    share, notes = alpha / (3 * len(games)), list[str]()
    for number, worlds in enumerate(games):
        trial = Trial(algorithm, plan, worlds, curator, None if seed is None else seed + number)
        if game is None and number == 0 and trial.law is not None:
            findings.append(probe_rounds(trial, alpha / 10))
        views = trial.collect(0, runs), trial.collect(1, runs)
        if views[0].looped and not notes:
            notes.append("not coordinate-wise arithmetic with white noise, so the runs were made one by one")
        findings += _attack(views, claim, worlds, share)
    report = AuditReport.of(
        algorithm.name, claim.plan, findings, runs=runs, started=started, confidence=confidence, notes=notes
    )
    if report.vacuous:
        enough = runs_for(claim.mu, claim.profile, share)
        advice = "no number of runs would show it" if enough is None else f"about {enough} runs would show it"
        why = f"{runs} runs cannot test this claim: half the noise would pass as well; {advice}, or a larger ε"
        report = replace(report, notes=(*notes, why))
    return report


def _canary_games(plan: Plan, claim: PrivacyClaim, n: int, budget: Budget) -> list[Game]:
    whole = any(slot.sampling.counts_exactly or slot.sampling.fresh for slot in plan.schedule.slots)
    # Sampled background records would only blur the canary; un-sampled ones expose division by the realised batch.
    background = claim.mu is not None and n >= (5 if whole else 3)  # of which four are the background
    return [CanaryGame(n, budget.relation, p, background=background, all_records=whole) for p in _PATTERNS]


def _attack(views: tuple[Views, Views], claim: PrivacyClaim, game: Game, alpha: float) -> list[AuditFinding]:
    """L1 if the transcript is Gaussian; L2 on the likelihood (else a learned direction) and on the model alone."""
    pattern = game.pattern
    what = "neighbouring tables" if pattern is None else f"{pattern} canary"
    found = []
    if claim.mu is not None:
        found.append(attack_dprime(views, claim, f"{what}, all releases", alpha))
    else:
        scores: list[Floats | None] = [None, None]
        if pattern is not None:
            scores = [likelihood(v, claim, lambda t: math.copysign(1.0, amplitude(pattern, t))) for v in views]
        if scores[0] is None or scores[1] is None:
            pair = learned((views[0].transcript, views[1].transcript))
        else:
            pair = scores[0], scores[1]
        found.append(attack_profile(pair, claim, f"{what}, all releases", alpha))
        if isinstance(claim.plan.event, ZCDP):
            found.append(attack_divergence(pair, claim.plan.event.rho, f"{what}, all releases", alpha))
    if pattern != "alternating" and views[0].compared:
        models = learned((views[0].model, views[1].model))
        found.append(attack_profile(models, claim, f"{what}, final model", alpha))
    return found


def probe_rounds(trial: Trial, alpha: float) -> AuditFinding:
    """Whether R follows the law that was priced: as many runs as it takes, each with its own session.

    A price may put rounds together and count each as the last of its group, which only costs more; so do we.
    """
    law = trial.law
    assert law is not None
    name = next(slot.name for slot in trial.plan.schedule.slots if slot.law is not None)
    view = trial.collect(0, _DRAWS, together=False)
    width = view.model.shape[1]
    here = np.array([slot == name for slot in view.slots[::width]])
    rounds = (~np.isnan(view.transcript[:, ::width]) & here).sum(axis=1)
    group = np.searchsorted([r for r, _ in law], rounds)
    seen = np.bincount(group, minlength=len(law) + 1)
    late = int(seen[len(law)])  # rounds beyond what was paid for
    expected = _DRAWS * np.array([p for _, p in law])
    chance = 0.0 if late else categories(seen[: len(law)].astype(np.float64), expected)
    return judged("L0 rounds", "the law of R", "p", alpha, chance, ok=chance >= alpha)
