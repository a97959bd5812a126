"""The audit of one configuration: plan it, attack it in both worlds, compare with what was claimed.

A method that stops at a random round R is priced as δ(ε) = E[δ_R(ε)], which holds even if R and all releases before
it are published. So the attacker knows R: each possible round is fixed in turn, and thousands of its runs are made
side by side. A test of its own checks that R follows its law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from quietgrad.algorithms.base import Algorithm
from quietgrad.audit.canaries import CanaryGame, Pattern, amplitude, data_game
from quietgrad.audit.confidence_bounds import TEACH, dprime_refuted, runs_for
from quietgrad.audit.distinguishers import (
    PrivacyClaim,
    attack_divergence,
    attack_dprime,
    attack_profile,
    learned,
    likelihood,
)
from quietgrad.audit.noise_checks import categories, lengthened, probe_grid, probe_slots
from quietgrad.audit.replicas import CuratorFactory, Game, Tick, Trial, Views, central, silent
from quietgrad.audit.report import AuditFinding, AuditReport
from quietgrad.errors import UnprovableError
from quietgrad.plans.schedule import Law, Plan
from quietgrad.privacy.accounting import gdp_mu
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.closed_form_accountants import gaussian_delta
from quietgrad.training import plan as make_plan

Floats = npt.NDArray[np.float64]
_DRAWS = 400


def law_of(plan: Plan) -> Law | None:
    """The law of the random round, if the plan has one."""
    laws = [slot.law for slot in plan.schedule.slots if slot.law is not None]
    return tuple(sorted((r, p) for r, p in laws[0] if p > 0.0)) if len(laws) == 1 else None


def attack_rounds(trial: Trial, pattern: Pattern, runs: int, what: str, alpha: float) -> list[AuditFinding]:
    """L1 for every possible round of un-sampled releases, else L2 on runs of rounds drawn by the auditor."""
    plan, law = trial.plan, law_of(trial.plan)
    assert law is not None
    edges = np.cumsum([0.0, *(p for _, p in law)])
    middles = (edges[:-1] + edges[1:]) / 2
    try:
        mus = [_mu(plan, rounds) for rounds, _ in law]
    except UnprovableError:
        mus = None
    rng = np.random.default_rng(trial.seed)
    sizes = [runs] * len(law) if mus is not None else rng.multinomial(runs, [p for _, p in law]).tolist()

    def views(k: int) -> tuple[Views, Views]:
        made = trial.shifted(1000 * k)
        pair = [made.side_by_side(which, sizes[k], uniform=float(middles[k])) for which in (0, 1)]
        return pair[0], pair[1]

    claim = PrivacyClaim(plan)
    if mus is not None:
        return [_dprimes([views(k) for k in range(len(law))], law, mus, claim, what, alpha)]
    scores: tuple[list[Floats], list[Floats]] = ([], [])
    for k in range(len(law)):
        if sizes[k]:
            for into, view in zip(scores, views(k), strict=True):
                score = likelihood(view, claim, lambda t: math.copysign(1.0, amplitude(pattern, t)))
                assert score is not None
                into.append(score)
    order = rng.permutation(runs)  # the first quarter teaches: it must hold all rounds
    a, b = (np.concatenate(part)[order] for part in scores)
    return [attack_profile((a, b), claim, f"{what}, R and all releases", alpha)]


def _mu(plan: Plan, rounds: int) -> float:
    """μ of a run whose random round is ``rounds``."""
    assert plan.budget is not None
    counts = {slot.name: rounds if slot.law is not None else slot.count for slot in plan.schedule.slots}
    return gdp_mu(plan.event_of(counts), relation=plan.budget.relation)


def _dprimes(
    views: Sequence[tuple[Views, Views]],
    law: Law,
    mus: Sequence[float],
    claim: PrivacyClaim,
    what: str,
    alpha: float,
) -> AuditFinding:
    share = alpha / len(law)
    found = [attack_dprime(pair, claim, what, share, mu=mu) for pair, mu in zip(views, mus, strict=True)]
    worst = max(range(len(law)), key=lambda k: found[k].measured / mus[k])
    verdicts = [f.verdict for f in found]
    verdict = "violation" if "violation" in verdicts else "vacuous" if set(verdicts) == {"vacuous"} else "pass"
    lows = [f.measured for f in found]
    epsilon = mixture_epsilon([(p, low) for (_, p), low in zip(law, lows, strict=True)], claim.delta_budget)
    words = f"{what}, R = {law[worst][0]} and all releases"
    tested = len(views[0][0].transcript) - int(len(views[0][0].transcript) * TEACH)
    least = [(p, dprime_refuted(mu, tested, share)) for (_, p), mu in zip(law, mus, strict=True)]
    known = all(math.isfinite(mu) for _, mu in least)
    refutes = mixture_epsilon(least, claim.delta_budget) if known else math.inf
    return AuditFinding("L1", words, "μ", mus[worst], lows[worst], verdict, epsilon, refutes=refutes)  # type: ignore[arg-type]


def mixture_epsilon(parts: Sequence[tuple[float, float]], delta: float) -> float:
    """ε at which Σ p·δ_μ(ε) = δ: what is proved of a mixture whose part is known.

    >>> from quietgrad.privacy.closed_form_accountants import gaussian_epsilon
    >>> abs(mixture_epsilon([(0.5, 1.0), (0.5, 1.0)], 1e-5) - gaussian_epsilon(1.0, 1e-5)) < 1e-6
    True
    """

    def excess(epsilon: float) -> float:
        return sum(p * gaussian_delta(mu, epsilon) for p, mu in parts if mu > 0.0) - delta

    return float(brentq(excess, 0.0, 200.0, xtol=1e-9)) if excess(0.0) > 0.0 else 0.0


def probe_rounds(trial: Trial, alpha: float) -> AuditFinding:
    """Whether R follows the law that was priced: as many runs as it takes, each with its own session.

    A price may put rounds together and count each as the last of its group, which only costs more; so do we.
    """
    law = law_of(trial.plan)
    assert law is not None
    name = next(slot.name for slot in trial.plan.schedule.slots if slot.law is not None)
    view = trial.collect(0, _DRAWS, together=False)
    width = view.model.shape[1]
    here = np.array([slot == name for slot in view.slots[::width]])
    rounds = (~np.isnan(view.transcript[:, ::width]) & here).sum(axis=1)
    group = np.searchsorted([r for r, _ in law], rounds)
    seen = np.bincount(group, minlength=len(law) + 1)
    strange = int(seen[len(law)])  # later than any round that was paid for
    seen = seen[: len(law)]
    expected = _DRAWS * np.array([p for _, p in law])
    chance = categories(seen.astype(np.float64), expected)
    verdict = "violation" if strange or chance < alpha else "pass"
    return AuditFinding("L0 rounds", "the law of R", "p", alpha, 0.0 if strange else chance, verdict)  # type: ignore[arg-type]


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
        budget: the claim under audit.
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
    trials = [Trial(algorithm, plan, worlds, holder, seed) for _, _, worlds in games]
    if law is not None:
        findings.append(probe_rounds(trials[0], alpha / 10))
    tick, share = _ticker(2 * len(games) * runs, progress), alpha / (3 * len(games))
    for number, (what, pattern, worlds) in enumerate(games):
        if law is not None and pattern is not None and claimed is None:
            findings += attack_rounds(trials[number], pattern, runs, what, share)
            tick(2 * runs)
            continue
        views = tuple(trials[number].shifted(number).collect(w, runs, tick=tick) for w in (0, 1))
        if views[0].looped and not notes:
            notes.append("not coordinate-wise arithmetic with white noise, so the runs were made one by one")
        findings += _attack((views[0], views[1]), claim, what, pattern, worlds.gaussian, share)
    report = AuditReport.of(
        algorithm.name, claim.plan, findings, runs=runs, started=started, confidence=confidence, notes=notes
    )
    if report.vacuous:
        needed = runs_for(claim.mu, claim.profile, share)
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
        views = Trial(algorithm, plan, games[0][2]).collect(0, count)
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
    whole = any(slot.sampling.counts_exactly or slot.sampling.fresh for slot in plan.schedule.slots)
    # Sampled background records would only blur the canary; un-sampled ones expose division by the realised batch.
    background = claim.mu is not None and n >= 3
    return [
        (f"{p} canary", p, CanaryGame(n, budget.relation, p, background=background, all_records=whole))
        for p in _PATTERNS
    ]


def _given(game: Game) -> tuple[str, Pattern | None, Game]:
    pattern = game.pattern if isinstance(game, CanaryGame) else None
    return ("neighbouring tables" if pattern is None else f"{pattern} canary"), pattern, game


def _default_n(algorithm: Algorithm) -> int:
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
