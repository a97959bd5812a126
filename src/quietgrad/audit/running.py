"""The audit of one configuration: plan it, attack it in both worlds, compare with what was claimed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quietgrad.algorithms.base import Algorithm
from quietgrad.audit.canaries import CanaryGame, Pattern, QueryGame, amplitude, data_game
from quietgrad.audit.confidence_bounds import runs_for
from quietgrad.audit.distinguishers import (
    PrivacyClaim,
    attack_divergence,
    attack_dprime,
    attack_profile,
    learned,
    likelihood,
)
from quietgrad.audit.noise_checks import lengthened, probe_grid, probe_slots
from quietgrad.audit.replicas import CuratorFactory, Game, Tick, Views, central, collect, silent
from quietgrad.audit.report import AuditFinding, AuditReport
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget
from quietgrad.sampling import FixedSize, SinglePass

CURATORS: dict[str, CuratorFactory] = {"central": central}
"""Who may hold the data in an audit, by name; every entry is audited by ``quietgrad audit --all``."""

_PATTERNS: tuple[Pattern, ...] = ("growing", "alternating")
_FEWEST = 200
_PILOT = 20


def run(
    algorithm: Algorithm,
    *,
    budget: Budget,
    runs: int = 2000,
    n: int | None = None,
    curator: str | CuratorFactory = "central",
    confidence: float = 1.0 - 1e-6,
    game: Game | None = None,
    claimed: Plan | None = None,
    noise_multiplier: float | None = None,
    seed: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> AuditReport:
    """Attack a configuration with canaries and compare a lower bound on its ε with the ε it claims.

    The algorithm and the curator are the production ones; only the data are the auditor's. Un-sampled Gaussian
    releases are tested by d′ (L1), everything by Clopper–Pearson bounds on the whole transcript or, end to end, on
    the final model alone (L2), and the noise itself by exact probes (L0).

    Args:
        algorithm: what to audit, with the settings to audit.
        budget: the promise under audit.
        runs: runs in each of the two neighbouring worlds.
        n: public number of records; default the batch size, so that everyone takes part in every release, which is
            the strongest attack. Give the real n to audit the amplification by sampling too.
        curator: a name of ``CURATORS`` or a function of (objective, data, key).
        confidence: probability that a correct configuration is not accused.
        game: two worlds of your own instead of the gradient-space canaries.
        claimed: a plan whose claim is compared instead of the configuration's own.
        noise_multiplier: audit this noise instead of what the budget asks for; the claim is then what it proves.
        seed: fixed noise, for tests.
        progress: called with the share of all runs that is done, now and then.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
    >>> report = run(DPGD(steps=4), budget=Budget(6.0, 1e-5), seed=1)
    >>> report.passed, 3.0 < report.epsilon_lower < report.epsilon_claimed
    (True, True)
    """
    started = time.perf_counter()
    alpha = _check(runs, confidence, budget)
    from quietgrad.training import plan as make_plan

    holder = _curator(curator)
    n = _default_n(algorithm) if n is None else n
    plan = make_plan(algorithm, n=n, budget=budget, noise_multiplier=noise_multiplier)
    game = game or data_game(algorithm, n, budget.relation)
    claim = PrivacyClaim(claimed or plan)
    notes: list[str] = []
    findings: list[AuditFinding] = probe_slots(lengthened(plan), holder, alpha=alpha / 10, seed=seed)
    findings.append(probe_grid(holder))
    games = _games(plan, claim, n, budget) if game is None else [_given(game)]
    law = law_of(plan) if game is None else None
    if law is not None:
        first = games[0][2]
        findings.append(probe_rounds(algorithm, plan, first, curator=holder, seed=seed, alpha=alpha / 10))
    tick = _ticker(2 * len(games) * runs, progress)
    for number, (what, pattern, worlds) in enumerate(games):
        if law is not None and pattern is not None and claimed is None:
            findings += attack_rounds(
                algorithm, plan, worlds, pattern, runs, curator=holder, seed=seed, what=what,
                alpha=alpha / (3 * len(games)),
            )  # fmt: skip
            tick(2 * runs)
            continue
        views = tuple(
            _collect(algorithm, plan, worlds, w, runs, holder, None if seed is None else seed + number, tick)
            for w in (0, 1)
        )
        if views[0].looped and not notes:
            notes.append("not coordinate-wise arithmetic with white noise, so the runs were made one by one")
        found = _attack((views[0], views[1]), claim, what, pattern, worlds.gaussian, alpha / (3 * len(games)))
        findings += found
    lower = max(f.epsilon_lower for f in findings)
    report = AuditReport(
        algorithm=algorithm.name,
        relation=budget.relation,
        delta=budget.delta,
        epsilon_claimed=claim.epsilon,
        epsilon_lower=lower,
        confidence=confidence,
        runs=runs,
        seconds=time.perf_counter() - started,
        findings=tuple(findings),
        notes=tuple(notes),
    )
    if report.vacuous:
        needed = runs_for(claim.mu, claim.profile, alpha / (3 * len(games)))
        enough = "no number of runs would show it" if needed is None else f"about {needed} runs would show it"
        why = f"{runs} runs cannot test this claim: half the noise would pass as well; {enough}, or a larger ε"
        report = replace(report, notes=(*notes, why))
    return report


def enough_runs(plan: Plan, confidence: float = 1.0 - 1e-6) -> int | None:
    """How many runs of each world nearly always show that half the noise of a plan is missing.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
    >>> from quietgrad.training import plan
    >>> enough_runs(plan(DPGD(steps=4), n=100, budget=Budget(1.0, 1e-5)))
    1812
    """
    claim = PrivacyClaim(plan)
    return runs_for(claim.mu, claim.profile, (1.0 - confidence) / (3 * len(_PATTERNS)))


def affordable_runs(algorithm: Algorithm, plan: Plan, seconds: float) -> float:
    """How many runs of each world this machine makes in so many seconds of its own; no limit side by side."""
    assert plan.budget is not None
    game = data_game(algorithm, plan.n_public, plan.budget.relation)
    if game is None and law_of(plan) is not None:
        return math.inf
    games = _games(plan, PrivacyClaim(plan), plan.n_public, plan.budget) if game is None else [_given(game)]
    for count in (2, _PILOT):  # the first runs also load what the others use
        started = time.process_time()
        views = _collect(algorithm, plan, games[0][2], 0, count, central, None, silent)
    each = (time.process_time() - started) / _PILOT
    return seconds / (2 * len(games) * each) if views.looped else math.inf


def _ticker(total: int, progress: Callable[[float], None] | None) -> Tick:
    """Adds up runs, and tells ``progress`` at every hundredth of them."""
    if progress is None:
        return silent
    done = told = 0

    def tick(runs: int) -> None:
        nonlocal done, told
        done += runs
        if 100 * done // total > told:
            told = 100 * done // total
            progress(min(1.0, done / total))

    return tick


def _collect(
    algorithm: Algorithm,
    plan: Plan,
    game: Game,
    which: int,
    runs: int,
    curator: CuratorFactory,
    seed: int | None,
    tick: Tick,
) -> Views:
    if isinstance(game, QueryGame):
        return game.collect(algorithm, plan, which, runs, curator, seed, tick)
    return collect(algorithm, plan, game, which, runs, curator=curator, seed=seed, tick=tick)


def _attack(
    views: tuple[Views, Views],
    claim: PrivacyClaim,
    what: str,
    pattern: Pattern | None,
    gaussian: bool,
    alpha: float,
) -> list[AuditFinding]:
    """L1 if the transcript is Gaussian; L2 on the likelihood (else a learned direction) and on the model alone."""
    found = []
    if claim.mu is not None and gaussian:
        found.append(attack_dprime(views, claim, f"{what}, all releases", alpha))
    else:
        signs = (lambda t: math.copysign(1.0, amplitude(pattern, t))) if pattern is not None else None
        scores = None if signs is None else [likelihood(view, claim, signs) for view in views]
        if scores is None or scores[0] is None or scores[1] is None:
            pair = learned((views[0].transcript, views[1].transcript))
        else:
            pair = (scores[0], scores[1])
        found.append(attack_profile(pair, claim, f"{what}, all releases", alpha))
        if claim.rho is not None:
            found.append(attack_divergence(pair, claim.rho, f"{what}, all releases", alpha))
    if pattern != "alternating" and views[0].compared:
        found.append(
            attack_profile(learned((views[0].model, views[1].model)), claim, f"{what}, final model", alpha)
        )
    return found


def _games(plan: Plan, claim: PrivacyClaim, n: int, budget: Budget) -> list[tuple[str, Pattern | None, Game]]:
    whole = any(isinstance(slot.sampling, FixedSize | SinglePass) for slot in plan.schedule.slots)
    # Sampled background records would only blur the canary; un-sampled ones expose division by the realised batch.
    background = claim.mu is not None and n >= 3
    return [
        (f"{p} canary", p, CanaryGame(n, budget.relation, p, background=background, all_records=whole))
        for p in _PATTERNS
    ]


def _given(game: Game) -> tuple[str, Pattern | None, Game]:
    pattern = getattr(game, "pattern", None)
    return ("neighbouring tables" if pattern is None else f"{pattern} canary"), pattern, game


def _default_n(algorithm: Any) -> int:
    return max(3, int(getattr(algorithm, "batch_size", None) or 3))


def _curator(curator: str | CuratorFactory) -> CuratorFactory:
    if not isinstance(curator, str):
        return curator
    if curator not in CURATORS:
        raise ValueError(f"curator={curator!r}: must be one of {', '.join(CURATORS)}, or a function.")
    return CURATORS[curator]


def _check(runs: int, confidence: float, budget: Budget | None) -> float:
    if budget is None:
        raise ValueError("budget=None: a run without a budget claims nothing, so there is nothing to audit.")
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence={confidence!r}: must be in [0.5, 1), such as 0.999999.")
    # The least α at which the event "always here, never there" still proves anything: 2(1 − α^(1/trials)) < 1.
    needed = max(_FEWEST, math.ceil(8 * math.log(30 / (1.0 - confidence))))
    if isinstance(runs, bool) or int(runs) != runs or runs < needed:
        raise ValueError(f"runs={runs!r}: must be ≥ {needed} for a confidence of 1−{1 - confidence:.0e}.")
    return 1.0 - confidence
