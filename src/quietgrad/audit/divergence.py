"""Layer L2 for claims in zCDP: no event of a ρ-zCDP run may diverge by more than ρ between the worlds.

ρ-zCDP bounds every Rényi divergence of order α by αρ; as α → 1, the Kullback–Leibler divergence by ρ. What an event
S shows of it, p log(p/q) + (1−p) log((1−p)/(1−q)) with p = P(S | one world), q = P(S | other), can only be less. A
profile δ(ε) that is derived from ρ is looser than ρ itself, so this test sees more with the same runs.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, rel_entr

from quietgrad.audit.confidence_bounds import TEACH, clopper_pearson, half_width
from quietgrad.audit.report import AuditFinding, Verdict

Floats = npt.NDArray[np.float64]


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
    teach = int(len(scores[0]) * TEACH)
    taught, tested = [s[:teach] for s in scores], [s[teach:] for s in scores]
    trials = len(tested[0])
    pooled = np.quantile(np.concatenate(taught), np.linspace(0.01, 0.99, 99))
    best, event = -1.0, (1.0, float(pooled[49]), 0)
    for sign in (1.0, -1.0):
        rates = [np.array([np.mean(sign * s > sign * cut) for cut in pooled]) for s in taught]
        for target in (0, 1):
            shown = _shown(rates[target], rates[1 - target], trials, alpha)
            at = int(np.argmax(shown))
            if shown[at] > best:
                best, event = float(shown[at]), (sign, float(pooled[at]), target)
    sign, cut, target = event
    hits = [int(np.sum(sign * s > sign * cut)) for s in (tested[target], tested[1 - target])]
    low, _ = clopper_pearson(hits[0], trials, alpha / 2)
    _, high = clopper_pearson(hits[1], trials, alpha / 2)
    measured = float(binary_divergence(low, high))
    verdict: Verdict = "violation" if measured > rho else "vacuous" if _blind(rho, trials, alpha) else "pass"
    return AuditFinding("L2", what, "ρ", rho, measured, verdict)


def _shown(p: Floats, q: Floats, trials: int, alpha: float) -> Floats:
    """What bounds on these rates would show in ``trials`` trials."""
    return binary_divergence(p - half_width(p, trials, alpha / 2), q + half_width(q, trials, alpha / 2))


def _blind(rho: float, trials: int, alpha: float) -> bool:
    """Whether a Gaussian mechanism with half the noise, 4ρ, would usually pass too."""
    mu, cuts = math.sqrt(8.0 * rho), np.linspace(-6.0, 12.0, 181)
    return float(_shown(ndtr(mu - cuts), ndtr(-cuts), trials, alpha).max()) <= rho
