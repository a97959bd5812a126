"""The audit of one configuration: plan it, run it in both worlds, and compare with what was claimed.

A quarter of the runs teaches the attacker a direction and a threshold; the rest is the test. Layer L1 measures d′
of Gaussian transcripts against the claimed μ. L2 makes no assumption on the law and tests the claimed profile δ(ε)
where the attack is strongest, and the budget's own (ε, δ). A claim of ρ-zCDP is also tested as such: no event may
have a Kullback–Leibler divergence above ρ between the worlds. A profile derived from ρ is looser than ρ itself, so
this test sees more with the same runs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, rel_entr

from quietgrad.assurance.audit.canaries import CanaryGame, amplitude, data_game
from quietgrad.assurance.audit.confidence_bounds import (
    TEACH,
    best_event,
    best_threshold,
    dprime_found,
    dprime_lower,
    epsilon_lower,
    half_width,
    profile_found,
    runs_for,
)
from quietgrad.assurance.audit.noise_checks import categories, lengthened, probe_grid, probe_slots
from quietgrad.assurance.audit.replicas import CuratorFactory, Game, Pattern, Trial, Views, central
from quietgrad.assurance.audit.report import AuditFinding, AuditReport, judged
from quietgrad.core.accounting.accounting import delta_of, gdp_mu
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon
from quietgrad.core.accounting.events import ZCDP
from quietgrad.core.errors import SettingError, UnprovableError
from quietgrad.core.plans.schedule import Plan
from quietgrad.methods import plan as make_plan
from quietgrad.methods.base import Algorithm

Floats = npt.NDArray[np.float64]
_DRAWS = 400  # of a random round
_FEWEST = 200
_PATTERNS: tuple[Pattern, ...] = ("growing", "alternating")
_POINTS = (0.0, 0.5, 1.0, 2.0)  # ε at which the claimed profile may be tested
_FEATURES_PER_RUN = 20  # teaching runs per column below which only summaries of the columns are used


@dataclass(frozen=True)
class PrivacyClaim:
    """The guarantee that a plan claims: its profile, its μ if it is Gaussian, and ε at the budget's δ."""

    plan: Plan

    @property
    def budget(self) -> Budget:
        assert self.plan.budget is not None
        return self.plan.budget

    @cached_property
    def mu(self) -> float | None:
        """μ if everything released is un-sampled Gaussian, else ``None``."""
        try:
            return gdp_mu(self.plan.event, relation=self.budget.relation)
        except UnprovableError:
            return None

    @cached_property
    def profile(self) -> dict[float, float]:
        """δ(ε) as the accountant proves it, at a few ε."""
        return {e: delta_of(self.plan.event, epsilon=e, relation=self.budget.relation) for e in _POINTS}


def attack_dprime(views: tuple[Views, Views], claim: PrivacyClaim, what: str, alpha: float) -> AuditFinding:
    """L1: d′ of the transcripts along the direction that separates them best, against the claim's μ."""
    mu = claim.mu
    if mu is None:
        raise ValueError("L1 needs un-sampled Gaussian releases; use attack_profile for others.")
    a, b = (features(view, claim.plan) for view in views)
    teach = int(len(a) * TEACH)
    direction = discriminant(a[:teach], b[:teach])
    _, low = dprime_lower(a[teach:] @ direction, b[teach:] @ direction, alpha)
    trials = len(a) - teach
    slots = claim.plan.schedule.slots
    in_every_release = all(s.sampling.probability == 1.0 and s.sampling.participation(1) is None for s in slots)
    # A canary that waits for its turn meets less than the claim allows: with half the noise it shows twice as much.
    seen = dprime_found(mu, 2.0 * mu, trials, alpha) and (in_every_release or 2.0 * low > mu)
    shown = gaussian_epsilon(low, claim.budget.delta) if low else 0.0
    return judged("L1", what, "μ", mu, low, ok=low <= mu, seen=seen, epsilon_lower=shown)


def attack_profile(scores: tuple[Floats, Floats], claim: PrivacyClaim, what: str, alpha: float) -> AuditFinding:
    """L2: Clopper–Pearson bounds at the point of the claimed profile where the attack is strongest."""
    taught, tested = _split(scores)
    trials = len(tested[0])
    threshold = best_threshold(taught, claim.budget.delta, alpha / 4, trials)
    low = epsilon_lower(tested, threshold, claim.budget.delta, alpha / 2)

    def gain(epsilon: float, p: Floats, q: Floats) -> Floats:
        """How far a bound would exceed the claimed profile."""
        error_p, error_q = (half_width(rate, trials, alpha / 4) for rate in (p, q))
        excess = p - error_p - math.exp(epsilon) * (q + error_q)
        return excess / max(claim.profile[epsilon], 1.0 / trials)

    chosen = {epsilon: best_event(taught, partial(gain, epsilon)) for epsilon in claim.profile}
    epsilon = max(chosen, key=lambda epsilon: chosen[epsilon][0])
    p_low, q_high = chosen[epsilon][1].bounds(tested, alpha / 2)
    delta_low = max(0.0, p_low - math.exp(epsilon) * q_high)
    claimed = claim.profile[epsilon]
    ok, seen = delta_low <= claimed and low <= claim.plan.epsilon(), profile_found(claim.profile, trials, alpha)
    return judged("L2", what, f"δ(ε={epsilon:g})", claimed, delta_low, ok=ok, seen=seen, epsilon_lower=low)


def _split(scores: tuple[Floats, Floats]) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """The runs that teach, and those that are tested."""
    teach = int(len(scores[0]) * TEACH)
    return (scores[0][:teach], scores[1][:teach]), (scores[0][teach:], scores[1][teach:])


def likelihood(views: tuple[Views, Views], claim: PrivacyClaim, pattern: Pattern) -> tuple[Floats, Floats] | None:
    """Return the best possible scores for a canary that saturates every clip along axis 0; ``None`` if unknown.

    Σ_t log of (1−q)N(0) + qN(s_t) over the other world's law: zero in the canary's absence (add-remove), its mirror
    image −s_t instead (replace-one). Releases that never happened say nothing.
    """
    schedule = claim.plan.schedule
    all_white = all(slot.mechanism.white and not slot.mechanism.together for slot in schedule.slots)
    if schedule.composition == "filter" or not all_white:
        return None

    def score(view: Views) -> Floats:
        width = view.model.shape[1]
        x = view.transcript[:, ::width]
        total = np.zeros(len(x))
        for t, name in enumerate(view.slots[::width]):
            slot, sign = schedule[name], math.copysign(1.0, amplitude(pattern, t))
            z, q = claim.plan.noise_multiplier * slot.noise, slot.sampling.probability
            moved, half = np.nan_to_num(x[:, t] * sign, nan=0.0) / z**2, 0.5 / z**2
            absent = math.log1p(-q) if q < 1.0 else -math.inf
            step = np.logaddexp(absent, math.log(q) + moved - half)
            if claim.budget.relation is Relation.REPLACE_ONE:
                step -= np.logaddexp(absent, math.log(q) - moved - half)
            total += np.where(np.isnan(x[:, t]), 0.0, step)
        return total

    return score(views[0]), score(views[1])


def learned(views: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Scores along the direction that the teaching quarter suggests; for laws without a formula."""
    width = max(v.shape[1] for v in views)  # adaptive runs may release more often in one world
    a, b = (np.pad(np.nan_to_num(v, nan=0.0), ((0, 0), (0, width - v.shape[1]))) for v in views)
    teach = int(len(a) * TEACH)
    direction = discriminant(a[:teach], b[:teach])
    return a @ direction, b @ direction


def features(view: Views, plan: Plan) -> Floats:
    """The transcript's columns, or their sums and alternating sums per axis if they are too many to learn from."""
    x = np.nan_to_num(view.transcript, nan=0.0)
    if x.shape[1] * _FEATURES_PER_RUN <= len(x) * TEACH:
        return x
    width = view.model.shape[1]
    weights = np.array([plan.schedule[name].noise ** -2.0 for name in view.slots[::width]])
    cube = x.reshape(len(x), -1, width)
    turning = weights * (-1.0) ** np.arange(len(weights))
    return np.concatenate([np.einsum("ntd,t->nd", cube, w) for w in (weights, turning)], axis=1)


def discriminant(a: Floats, b: Floats) -> Floats:
    """Fisher's direction, with a ridge that keeps constant columns harmless."""
    gap = a.mean(axis=0) - b.mean(axis=0)
    spread = np.atleast_2d(np.cov(a, rowvar=False)) + np.atleast_2d(np.cov(b, rowvar=False))
    ridge = 1e-9 * max(1e-300, float(np.trace(spread)) / len(spread)) + 1e-300
    direction: Floats = np.linalg.solve(spread + ridge * np.eye(len(spread)), gap)
    size = float(np.abs(direction).max())
    return direction / size if size > 0.0 else np.ones_like(direction)


def binary_divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> Floats:
    """KL divergence of Bernoulli(p) from Bernoulli(q) in nats, 0 where p ≤ q: the event then says nothing.

    >>> binary_divergence([0.5, 0.8, 0.1], [0.5, 0.2, 0.9]).round(4).tolist()
    [0.0, 0.8318, 0.0]
    """
    a, b = np.clip(p, 0.0, 1.0), np.clip(q, 1e-300, 1.0)
    apart = rel_entr(a, b) + rel_entr(1.0 - a, np.maximum(1.0 - b, 1e-300))
    return np.asarray(np.where(a > b, apart, 0.0), np.float64)


def attack_divergence(scores: tuple[Floats, Floats], rho: float, what: str, alpha: float) -> AuditFinding:
    """Test the event that diverges most on the teaching runs against ρ, by Clopper–Pearson bounds on the rest.

    >>> rng = np.random.default_rng(0)
    >>> worlds = rng.normal(2.0, 1.0, 4000), rng.normal(0.0, 1.0, 4000)
    >>> [attack_divergence(worlds, rho, "N(2, 1), N(0, 1)", 1e-6).verdict for rho in (2.0, 0.5)]
    ['pass', 'violation']
    """
    taught, tested = _split(scores)
    trials = len(tested[0])

    def shown(p: Floats, q: Floats) -> Floats:
        """Return the divergence that bounds on these rates would show in so many trials."""
        return binary_divergence(p - half_width(p, trials, alpha / 2), q + half_width(q, trials, alpha / 2))

    _, event = best_event(taught, shown)
    measured = float(binary_divergence(*event.bounds(tested, alpha)))
    # A Gaussian mechanism with half the noise has 4ρ, so d′ = √(8ρ).
    cuts = np.linspace(-6.0, 12.0, 181)
    seen = float(shown(ndtr(math.sqrt(8.0 * rho) - cuts), ndtr(-cuts)).max()) > rho
    return judged("L2", what, "ρ", rho, measured, ok=measured <= rho, seen=seen)


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

    The algorithm and the curator are the production ones; only the data are the auditor's. Exact probes test the
    noise itself (L0). Un-sampled Gaussian releases are tested by d′ (L1). All releases are tested by
    Clopper–Pearson bounds on the whole transcript or, end to end, on the final model alone (L2).

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

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> report = run(DPGD(steps=4), budget=Budget(6.0, 1e-5), seed=1)
    >>> report.passed, 3.0 < report.epsilon_lower < report.epsilon_claimed
    (True, True)
    """
    started = time.perf_counter()
    if budget is None:
        raise SettingError("{budget=None}: a run without a budget claims nothing, so there is nothing to audit.")
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
    # Sampled background records would only blur the canary; un-sampled ones expose division by the realised batch.
    whole = any(slot.sampling.counts_exactly or slot.sampling.fresh for slot in plan.schedule.slots)
    background = claim.mu is not None and n >= (5 if whole else 3)  # of which four are the background
    canaries = (CanaryGame(n, budget.relation, p, background=background, all_records=whole) for p in _PATTERNS)
    games: list[Game] = list(canaries) if game is None else [game]
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


def _attack(views: tuple[Views, Views], claim: PrivacyClaim, game: Game, alpha: float) -> list[AuditFinding]:
    """L1 if the transcript is Gaussian; L2 on the likelihood (else a learned direction) and on the model alone."""
    pattern = game.pattern
    what = "neighbouring tables" if pattern is None else f"{pattern} canary"
    findings = []
    if claim.mu is not None:
        findings.append(attack_dprime(views, claim, f"{what}, all releases", alpha))
    else:
        pair = None if pattern is None else likelihood(views, claim, pattern)
        pair = pair or learned((views[0].transcript, views[1].transcript))
        findings.append(attack_profile(pair, claim, f"{what}, all releases", alpha))
        if isinstance(claim.plan.event, ZCDP):
            findings.append(attack_divergence(pair, claim.plan.event.rho, f"{what}, all releases", alpha))
    if pattern != "alternating" and views[0].compared:
        models = learned((views[0].model, views[1].model))
        findings.append(attack_profile(models, claim, f"{what}, final model", alpha))
    return findings


def probe_rounds(trial: Trial, alpha: float) -> AuditFinding:
    """Test whether R follows the law that was accounted for: as many runs as it takes, each with its own session.

    Accounting may group rounds and count each as the last of its group, which only costs more; so does this test.
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
