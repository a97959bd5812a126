"""What so many runs can show: the least breach that a test of layer L1 or L2 finds, and the runs a claim needs.

A pass says little without it. The yardstick is a Gaussian mechanism that leaks more than was claimed, met by an
attack as strong as there is: what the test would find of *that*, it may still miss of a weaker attack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from quietgrad.privacy.closed_form_accountants import gaussian_delta

Floats = npt.NDArray[np.float64]

TEACH = 0.25  # share of the runs that chooses direction and threshold; the rest is tested
OFTEN = 0.95  # how often what a report calls refutable is refuted
_MOST = 1e9  # runs that nobody makes


def half_width(rate: Floats, trials: int, alpha: float) -> Floats:
    """About how far a bound on a rate seen in ``trials`` trials is from it."""
    z = -float(ndtri(alpha))
    width: Floats = z * np.sqrt(np.maximum(rate * (1 - rate), 1.0 / trials) / trials) + z * z / (3 * trials)
    return width


def dprime_found(mu: float, dprime: float, trials: int, alpha: float, chance: float = 0.5) -> bool:
    """Whether the L1 test of a claimed ``mu`` accuses a true ``dprime`` with probability ``chance`` or more.

    t is within its deviation √(1 + t²/4N) of its centre; the bound is ``alpha`` below t, and t ``chance`` below d′.

    >>> dprime_found(0.25, 0.5, 1500, 1e-6), dprime_found(0.25, 0.5, 500, 1e-6)
    (True, False)
    """
    unit = math.sqrt(2.0 / trials)
    seen = dprime / unit
    seen -= float(ndtri(chance)) * math.sqrt(1 + seen * seen / (4 * trials))
    return (seen + float(ndtri(alpha / 2)) * math.sqrt(1 + seen * seen / (4 * trials))) * unit > mu


def gaussian_found(epsilon: float, delta: float, mu: float, trials: int, alpha: float, chance: float = 0.5) -> bool:
    """Whether the L2 test of a claimed δ(``epsilon``) = ``delta`` accuses a Gaussian mechanism of a true ``mu``."""
    cuts = np.linspace(-6.0, 12.0, 181)
    p, q = np.asarray(ndtr(mu - cuts)), np.asarray(ndtr(-cuts))
    grow = math.exp(epsilon)
    gain = p - half_width(p, trials, alpha / 4) - grow * (q + half_width(q, trials, alpha / 4))
    gain -= float(ndtri(chance)) * np.sqrt((p * (1 - p) + grow**2 * q * (1 - q)) / trials)
    return bool(float(gain.max()) > delta)


def profile_blind(profile: Mapping[float, float], trials: int, alpha: float, chance: float = 0.5) -> bool:
    """Whether a Gaussian mechanism with half the noise of one that meets the profile would pass L2 too."""
    return not any(
        gaussian_found(epsilon, delta, 2.0 * mu_through(epsilon, delta), trials, alpha, chance)
        for epsilon, delta in profile.items()
        if 1e-12 < delta < 1.0
    )


def dprime_refuted(mu: float, trials: int, alpha: float) -> float:
    """The least d′ that L1 nearly always accuses."""
    return _least(lambda dprime: dprime_found(mu, dprime, trials, alpha, OFTEN))


def profile_refuted(profile: Mapping[float, float], trials: int, alpha: float) -> float:
    """The least μ of a Gaussian mechanism that L2 nearly always accuses."""
    points = [(epsilon, delta) for epsilon, delta in profile.items() if delta < 1.0]
    return _least(lambda mu: any(gaussian_found(e, d, mu, trials, alpha, OFTEN) for e, d in points))


def runs_for(mu: float | None, profile: Mapping[float, float], alpha: float) -> int | None:
    """How many runs of each world nearly always show half the noise missing: L1 if there is a ``mu``, else L2.

    ``None`` if no number does: the profile has no point that an attack could reach.

    >>> runs_for(0.25, {}, 1e-6 / 3), runs_for(None, {0.0: 0.1}, 1e-6 / 3)
    (1994, 5912)
    """

    def enough(trials: int) -> bool:
        if mu is not None:
            return dprime_found(mu, 2.0 * mu, trials, alpha, OFTEN)
        return not profile_blind(profile, trials, alpha, OFTEN)

    low, high = 1, 64
    while not enough(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return math.ceil(high / (1.0 - TEACH))


def mu_through(epsilon: float, delta: float) -> float:
    """μ of the Gaussian profile through (ε, δ)."""
    return _least(lambda mu: gaussian_delta(mu, epsilon) >= delta)


def _least(holds: Callable[[float], bool], most: float = 60.0) -> float:
    """The least number up to ``most`` from which on ``holds``, else infinity."""
    if not holds(most):
        return math.inf
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
