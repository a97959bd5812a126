"""Layers L1 and L2: can an attacker who saw everything tell the two worlds apart better than was claimed?

A quarter of the runs teaches the attacker what to look at; the rest is the test. L1 measures d′ of Gaussian
transcripts against the claimed μ. L2 makes no assumption on the law and tests the claimed profile δ(ε) where the
attack is strongest, and the budget's own (ε, δ). A claim of ρ-zCDP is also tested as such: no event may have a
Kullback–Leibler divergence above ρ between the worlds. A profile derived from ρ is looser than ρ itself, so this
test sees more with the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, rel_entr

from quietgrad.audit.confidence_bounds import (
    TEACH,
    best_event,
    best_threshold,
    dprime_found,
    dprime_lower,
    epsilon_lower,
    half_width,
    profile_found,
)
from quietgrad.audit.replicas import Views
from quietgrad.audit.report import AuditFinding, Verdict
from quietgrad.errors import UnprovableError
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.accounting import delta_of, gdp_mu
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.closed_form_accountants import gaussian_epsilon

Floats = npt.NDArray[np.float64]

_POINTS = (0.0, 0.5, 1.0, 2.0)  # ε at which the claimed profile may be tested
_FEATURES_PER_RUN = 20  # teaching runs per column below which only summaries of the columns are used


@dataclass(frozen=True)
class PrivacyClaim:
    """What a plan promises: its profile, its μ if it is Gaussian, and ε at the budget's δ."""

    plan: Plan

    @property
    def relation(self) -> Relation:
        assert self.plan.budget is not None
        return self.plan.budget.relation

    @property
    def delta_budget(self) -> float:
        assert self.plan.budget is not None
        return self.plan.budget.delta

    @cached_property
    def mu(self) -> float | None:
        """μ if everything released is un-sampled Gaussian, else ``None``."""
        try:
            return gdp_mu(self.plan.event, relation=self.relation)
        except UnprovableError:
            return None

    @cached_property
    def profile(self) -> dict[float, float]:
        """δ(ε) as the accountant proves it, at a few ε."""
        return {e: delta_of(self.plan.event, epsilon=e, relation=self.relation) for e in _POINTS}


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
    verdict: Verdict = "violation" if low > mu else "pass" if seen else "vacuous"
    shown = gaussian_epsilon(low, claim.delta_budget) if low else 0.0
    return AuditFinding("L1", what, "μ", mu, low, verdict, shown)


def attack_profile(scores: tuple[Floats, Floats], claim: PrivacyClaim, what: str, alpha: float) -> AuditFinding:
    """L2: Clopper–Pearson bounds at the point of the claimed profile where the attack is strongest."""
    taught, tested = _split(scores)
    trials = len(tested[0])
    threshold = best_threshold(taught, claim.delta_budget, alpha / 4, trials)
    low = epsilon_lower(tested, threshold, claim.delta_budget, alpha / 2)

    def gain(epsilon: float) -> Callable[[Floats, Floats], Floats]:
        """How far a bound would stick out of the claimed profile."""

        def at(p: Floats, q: Floats) -> Floats:
            error_p, error_q = (half_width(rate, trials, alpha / 4) for rate in (p, q))
            excess = p - error_p - math.exp(epsilon) * (q + error_q)
            return excess / max(claim.profile[epsilon], 1.0 / trials)

        return at

    chosen = {epsilon: best_event(taught, gain(epsilon)) for epsilon in claim.profile}
    epsilon = max(chosen, key=lambda epsilon: chosen[epsilon][0])
    p_low, q_high = chosen[epsilon][1].bounds(tested, alpha / 2)
    delta_low = max(0.0, p_low - math.exp(epsilon) * q_high)
    claimed = claim.profile[epsilon]
    verdict: Verdict = "pass"
    if delta_low > claimed or low > claim.plan.epsilon():
        verdict = "violation"
    elif not profile_found(claim.profile, trials, alpha):
        verdict = "vacuous"
    return AuditFinding("L2", what, f"δ(ε={epsilon:g})", claimed, delta_low, verdict, low)


def _split(scores: tuple[Floats, Floats]) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """The runs that teach, and those that are tested."""
    teach = int(len(scores[0]) * TEACH)
    return (scores[0][:teach], scores[1][:teach]), (scores[0][teach:], scores[1][teach:])


def likelihood(view: Views, claim: PrivacyClaim, signs: Callable[[int], float]) -> Floats | None:
    """The best possible score for a canary that saturates every clip along axis 0, or ``None`` if not known.

    Σ_t log of (1−q)N(0) + qN(s_t) over the other world's law: zero in the canary's absence (add-remove), its mirror
    image −s_t instead (replace-one). Releases that never happened say nothing.
    """
    schedule = claim.plan.schedule
    known = all(slot.mechanism.white and not slot.mechanism.together for slot in schedule.slots)
    if schedule.composition == "filter" or not known:
        return None
    width = view.model.shape[1]
    x = view.transcript[:, ::width]
    total = np.zeros(len(x))
    for t, name in enumerate(view.slots[::width]):
        slot = schedule[name]
        z, q = claim.plan.noise_multiplier * slot.noise, slot.sampling.probability
        moved = np.where(np.isnan(x[:, t]), 0.0, x[:, t] * signs(t)) / z**2
        half = 0.5 / z**2
        absent = math.log1p(-q) if q < 1.0 else -math.inf
        step = np.logaddexp(absent, math.log(q) + moved - half)
        if claim.relation is Relation.REPLACE_ONE:
            step -= np.logaddexp(absent, math.log(q) - moved - half)
        total += np.where(np.isnan(x[:, t]), 0.0, step)
    return total


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
        """What bounds on these rates would show in so many trials."""
        return binary_divergence(p - half_width(p, trials, alpha / 2), q + half_width(q, trials, alpha / 2))

    _, event = best_event(taught, shown)
    measured = float(binary_divergence(*event.bounds(tested, alpha)))
    # A Gaussian mechanism with half the noise has 4ρ, so d′ = √(8ρ).
    cuts = np.linspace(-6.0, 12.0, 181)
    seen = float(shown(ndtr(math.sqrt(8.0 * rho) - cuts), ndtr(-cuts)).max()) > rho
    verdict: Verdict = "violation" if measured > rho else "pass" if seen else "vacuous"
    return AuditFinding("L2", what, "ρ", rho, measured, verdict)
