"""Lower confidence bounds on privacy loss from samples of what was released, and their power.

============================  =========================================================================
:func:`dprime_lower`          two Gaussian samples: exact bound on μ by the noncentral t law (layer L1)
:func:`epsilon_lower`         two samples of any law: Clopper–Pearson at the best threshold (layer L2)
:func:`one_run_mu`            guesses about many canaries of one run (Mahloujifar et al. 2024)
:func:`runs_for`              how many runs a claim needs
============================  =========================================================================

Each bound holds with probability at least 1 − ``alpha`` and assumes only what its line says. A bound above the
claim proves, at that confidence, that the claim is false. Whether so many runs could show anything is measured on a
Gaussian mechanism with half the noise, under the strongest attack; a weaker attack may still miss it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, nctdtr, ndtr, ndtri

from quietgrad.core.accounting.closed_form_accountants import gaussian_delta
from quietgrad.core.accounting.composition import bisect

Floats = npt.NDArray[np.float64]


def clopper_pearson(hits: int, trials: int, alpha: float) -> tuple[float, float]:
    """Return one-sided bounds (low, high) on a probability, each wrong with probability at most ``alpha``.

    >>> low, high = clopper_pearson(0, 1000, 1e-6)
    >>> low, round(high, 4)
    (0.0, 0.0137)
    """
    low = float(betaincinv(hits, trials - hits + 1, alpha)) if hits else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1.0 - alpha)) if hits < trials else 1.0
    return low, high


def dprime_lower(a: npt.ArrayLike, b: npt.ArrayLike, alpha: float) -> tuple[float, float]:
    """Return (estimate, lower bound) of d′ = |mean a − mean b|/σ for Gaussian samples of one common σ.

    t = d̂′/√(1/n_a + 1/n_b) has the noncentral t law whose centre is d′ in the same units; the bound is the
    centre at which a t so large has probability ``alpha``. The sign is tested both ways.

    >>> rng = np.random.default_rng(0)
    >>> estimate, low = dprime_lower(rng.normal(1.0, 1.0, 5000), rng.normal(0.0, 1.0, 5000), 1e-6)
    >>> 0.85 < low < estimate < 1.1
    True
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.size < 3 or y.size < 3:
        raise ValueError(f"{x.size} and {y.size} numbers: a bound needs at least 3 of each.")
    freedom = x.size + y.size - 2
    spread = math.sqrt((x.var() * x.size + y.var() * y.size) / freedom)
    unit = math.sqrt(1.0 / x.size + 1.0 / y.size)
    gap = abs(float(x.mean() - y.mean()))
    if spread == 0.0:
        return (math.inf, math.inf) if gap else (0.0, 0.0)
    t = gap / (spread * unit)
    if nctdtr(freedom, 0.0, t) <= 1.0 - alpha / 2:
        return t * unit, 0.0
    if t > 1e4:  # beyond the series' reach: a mean this far out is read off with a normal error, widened
        return t * unit, max(0.0, t - 1.1 * -float(ndtri(alpha / 2)) * math.sqrt(1 + t * t / (2 * freedom))) * unit
    low, _ = bisect(lambda d: bool(nctdtr(freedom, d, t) > 1.0 - alpha / 2), 0.0, t, lambda at: 1e-7 * t)
    return t * unit, low * unit


class Threshold(NamedTuple):
    """The event "±score > cut" in the world ``target`` (0 or 1) against the other: what an attacker watches for."""

    sign: float
    cut: float
    target: int

    def bounds(self, scores: tuple[Floats, Floats], alpha: float) -> tuple[float, float]:
        """A lower bound on the event's probability in its world, and an upper one in the other; α is shared."""
        mine, other = (scores[self.target], scores[1 - self.target])
        hits = [int(np.count_nonzero(self.sign * s > self.sign * self.cut)) for s in (mine, other)]
        return clopper_pearson(hits[0], mine.size, alpha / 2)[0], clopper_pearson(hits[1], other.size, alpha / 2)[1]


def best_event(scores: tuple[Floats, Floats], gain: Callable[[Floats, Floats], Floats]) -> tuple[float, Threshold]:
    """The threshold with the largest gain, a function of the event's rates in the two worlds.

    It may be chosen on any sample independent of the one it is then tested on.
    """
    pooled = np.concatenate(scores)
    # The tails matter most for large ε: quantiles down to one sample in the pool.
    tails = np.geomspace(1.0 / pooled.size, 0.002, 20)
    cuts = np.unique(np.quantile(pooled, np.concatenate([np.linspace(0.002, 0.998, 250), tails, 1.0 - tails])))
    best, chosen = -math.inf, Threshold(1.0, float(np.median(pooled)), 0)
    for sign in (1.0, -1.0):
        rates = [np.searchsorted(np.sort(-sign * s), -sign * cuts, side="left") / s.size for s in scores]
        for target in (0, 1):
            gains = gain(rates[target], rates[1 - target])
            tied = np.flatnonzero(gains == gains.max())
            at = int(tied[len(tied) // 2])  # between worlds that do not overlap, not at the edge of one
            if gains[at] > best:
                best, chosen = float(gains[at]), Threshold(sign, float(cuts[at]), target)
    return best, chosen


def best_threshold(scores: tuple[Floats, Floats], delta: float, alpha: float, trials: int) -> Threshold:
    """Return the threshold whose ε bound would be largest if the rates seen here held in ``trials`` trials."""

    def gain(p: Floats, q: Floats) -> Floats:
        low, high = _lower_share(p, trials, alpha), 1.0 - _lower_share(1.0 - q, trials, alpha)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(low > delta, np.log(np.maximum(low - delta, 1e-300) / high), -np.inf)

    return best_event(scores, gain)[1]


def _lower_share(share: Floats, trials: int, alpha: float) -> Floats:
    hits = np.rint(share * trials)
    return np.where(hits > 0, betaincinv(np.maximum(hits, 1.0), trials - hits + 1.0, alpha), 0.0)


def epsilon_lower(scores: tuple[Floats, Floats], threshold: Threshold, delta: float, alpha: float) -> float:
    """Return ε with P(S₀ in A) > e^ε·P(S₁ in A) + δ proved for the threshold's event A, or 0 if nothing is.

    (ε, δ)-DP bounds every event, so any ε below log((p̲ − δ)/q̄) is broken, whatever the law.

    >>> rng = np.random.default_rng(0)
    >>> s = rng.normal(2.0, 1.0, 20000), rng.normal(0.0, 1.0, 20000)
    >>> 2.5 < epsilon_lower(s, Threshold(1.0, 2.0, 0), 1e-5, 1e-6) < 3.2
    True
    """
    low, high = threshold.bounds(scores, alpha)
    return max(0.0, math.log((low - delta) / high)) if low > delta else 0.0


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """Return the largest ε such that (ε, δ)-DP is refuted by ``correct`` of ``guesses`` about ``canaries``.

    >>> one_run_epsilon(1000, 100, 50, 1e-5, 1e-3), one_run_epsilon(1000, 100, 100, 1e-5, 1e-3) > 1.0
    (0.0, True)
    """

    def refuted(epsilon: float) -> bool:
        curve = tradeoff_of({epsilon: delta})
        return one_run_refutes(curve, canaries, guesses, correct, alpha)

    return bisect(refuted, 0.0, 40.0, lambda at: 1e-6)[0] if refuted(0.0) else 0.0


def tradeoff_of(profile: Mapping[float, float]) -> Callable[[float], float]:
    """Return the least probability of an event in one world, given that in the other, by a profile δ(ε)."""
    points = [(math.exp(epsilon), delta) for epsilon, delta in profile.items()]
    return lambda r: max(0.0, *(max((r - d) / grow, 1.0 - grow * (1.0 - r) - d) for grow, d in points))


def one_run_mu(canaries: int, guesses: int, correct: int, alpha: float) -> float:
    """Return the largest μ such that μ-GDP is refuted by the guesses (Mahloujifar, Melis, Chaudhuri 2024).

    >>> one_run_mu(1000, 100, 50, 1e-3), round(one_run_mu(1000, 100, 100, 1e-3), 2)
    (0.0, 0.82)
    """

    def refuted(mu: float) -> bool:
        return one_run_refutes(lambda r: float(ndtr(ndtri(r) - mu)), canaries, guesses, correct, alpha)

    return bisect(refuted, 0.0, 12.0, lambda at: 1e-5)[0] if refuted(0.0) else 0.0


def one_run_refutes(
    tradeoff: Callable[[float], float], canaries: int, guesses: int, correct: int, alpha: float
) -> bool:
    """Return whether the guesses refute a claimed trade-off curve, which need not be Gaussian.

    ``tradeoff(r)`` is the least probability in one world of an event whose probability in the other is r; for
    (ε, δ)-DP it is max(0, (r − δ)e^−ε).

    >>> one_run_refutes(lambda r: max(0.0, (r - 1e-5) * math.exp(-0.1)), 1000, 100, 100, 1e-3)
    True
    """
    # Walk down from ``correct``: r bounds the mass of outcomes with so many right, h of those with one less.
    level = alpha * guesses / canaries
    r, h = level * correct / guesses, level * (guesses - correct) / guesses
    for i in range(correct - 1, -1, -1):
        following = max(h, tradeoff(r))
        r += i / (guesses - i) * (following - h)
        h = following
        if r >= 1.0:
            return True
    return r + h > guesses / canaries


TEACH = 0.25  # share of the runs that chooses direction and threshold; the rest is tested


def half_width(rate: Floats, trials: int, alpha: float) -> Floats:
    """About how far a bound on a rate seen in ``trials`` trials is from it."""
    z = -float(ndtri(alpha))
    width: Floats = z * np.sqrt(np.maximum(rate * (1 - rate), 1.0 / trials) / trials) + z * z / (3 * trials)
    return width


def dprime_found(mu: float, dprime: float, trials: int, alpha: float) -> bool:
    """Whether the L1 test of a claimed ``mu`` accuses a true ``dprime`` in at least half of all audits.

    t is within its deviation √(1 + t²/4N) of its centre, and the bound is ``alpha`` below t.

    >>> dprime_found(0.25, 0.5, 1500, 1e-6), dprime_found(0.25, 0.5, 500, 1e-6)
    (True, False)
    """
    unit = math.sqrt(2.0 / trials)
    seen = dprime / unit
    return (seen + float(ndtri(alpha / 2)) * math.sqrt(1 + seen * seen / (4 * trials))) * unit > mu


def profile_found(profile: Mapping[float, float], trials: int, alpha: float) -> bool:
    """Whether the L2 test accuses a Gaussian mechanism with half the noise of one that meets a claimed δ(ε)."""
    cuts = np.linspace(-6.0, 12.0, 181)
    for epsilon, delta in profile.items():
        if not 1e-12 < delta < 1.0:
            continue
        # μ of the Gaussian profile through (ε, δ), twice.
        mu = 2.0 * bisect(lambda x: gaussian_delta(x, epsilon) < delta, 0.0, 60.0, lambda at: 1e-9 * at)[1]  # noqa: B023
        p, q = np.asarray(ndtr(mu - cuts)), np.asarray(ndtr(-cuts))
        shown = p - half_width(p, trials, alpha / 4) - math.exp(epsilon) * (q + half_width(q, trials, alpha / 4))
        if float(shown.max()) > delta:
            return True
    return False


def runs_for(mu: float | None, profile: Mapping[float, float], alpha: float) -> int | None:
    """About how many runs of each world show half the noise missing: by L1 if there is a ``mu``, else by L2.

    ``None`` if no number does: the profile has no point that an attack could reach.

    >>> runs_for(0.25, {}, 1e-6 / 3), runs_for(None, {0.0: 0.1}, 1e-6 / 3), runs_for(None, {0.0: 1.0}, 1e-6 / 3)
    (1858, 6768, None)
    """
    trials = 64
    while trials < 10**9:
        if dprime_found(mu, 2.0 * mu, trials, alpha) if mu is not None else profile_found(profile, trials, alpha):
            return math.ceil(1.5 * trials / (1.0 - TEACH))  # half as many more, for most audits instead of half
        trials = trials * 9 // 8
    return None
