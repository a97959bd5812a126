"""The exact accountant of un-sampled Gaussian releases: Gaussian differential privacy and its analytic profile.

Adaptive releases of sums with multipliers z_t are, together, as revealing as one look at N(0, 1) or N(μ, 1) with
μ² = Σ (Δ_t/σ_t)² (Dong, Roth, Su 2022, Cor. 3.3), and that pair's profile is known in closed form
(Balle, Wang 2018, Thm. 8): δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ). Nothing is rounded, nothing is loose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr

from quietgrad.privacy.composition import CannotProve, root_search
from quietgrad.privacy.events import Composed, Event, Gaussian, RandomRound, Repeated

Array = npt.NDArray[np.float64]

# Mixtures of more Gaussians than this are left to the PLD accountant, which mixes them by Fourier transform.
_MOST_COMPONENTS = 20_000


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) of N(0, 1) against N(μ, 1), in full relative precision.

    >>> round(gaussian_delta(1.0, 1.0), 6)
    0.126937
    """
    if mu == 0.0:
        return 0.0
    above = float(log_ndtr(mu / 2 - epsilon / mu))
    below = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return -math.exp(above) * math.expm1(below - above) if below < above else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε ≥ 0 with δ(ε) ≤ ``delta`` for N(0, 1) against N(μ, 1).

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    return _smallest_epsilon(lambda epsilon: gaussian_delta(mu, epsilon), mu, delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ whose Gaussian profile passes through (ε, δ); σ = Δ/μ is then the least noise.

    >>> round(1 / gaussian_mu(1.0, 1e-5), 4)
    3.7306
    """
    log_delta = math.log(delta)
    guess = epsilon / math.sqrt(2 * (epsilon - log_delta))  # where Chernoff's ε(μ) is about right
    return root_search(
        lambda mu: (math.log(d) if (d := gaussian_delta(mu, epsilon)) > 0 else -math.inf) - log_delta, guess
    )


def mixture_delta(weights: Array, mus: Array, epsilon: float) -> float:
    """Return Σ wᵢ δ(ε, μᵢ), all μᵢ > 0: a Gaussian pair drawn at random, its index seen."""
    above = log_ndtr(mus / 2 - epsilon / mus)
    below = np.minimum(epsilon + log_ndtr(-mus / 2 - epsilon / mus), above)
    return float(np.dot(weights, -np.exp(above) * np.expm1(below - above)))


def _smallest_epsilon(delta_at: Callable[[float], float], mu: float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ ``delta`` for a profile that is at most that of ``mu``."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta)))  # Chernoff: P(L > high) ≤ δ
    while high - low > 1e-13 * max(high, 1e-3):
        middle = (low + high) / 2
        if delta_at(middle) > delta:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class GaussianProfile:
    """The privacy profile of a mixture of Gaussian pairs; one component is plain μ-GDP."""

    components: tuple[tuple[float, float], ...]  # (weight, μ)
    name: str = "gaussian-exact"

    def delta(self, epsilon: float) -> float:
        """δ at ``epsilon``."""
        return self._delta_at()(epsilon)

    def epsilon(self, delta: float) -> float:
        """ε at ``delta``."""
        return _smallest_epsilon(self._delta_at(), max(mu for _, mu in self.components), delta)

    def _delta_at(self) -> Callable[[float], float]:
        if len(self.components) == 1:
            return lambda epsilon: gaussian_delta(self.components[0][1], epsilon)
        weights, mus = np.array([pair for pair in self.components if pair[1] > 0.0]).T
        return lambda epsilon: mixture_delta(weights, mus, epsilon)


def gaussian_profile(event: Event, factor: float) -> GaussianProfile:
    """Return the exact profile of un-sampled Gaussian releases, also with random rounds.

    ``factor`` is Δ/C. Refuses (``CannotProve``) every other event.
    """
    squares = _squares(event, factor)
    return GaussianProfile(tuple((weight, math.sqrt(square)) for weight, square in squares))


def _squares(event: Event, factor: float) -> list[tuple[float, float]]:
    """The law of μ²: pairs (weight, μ²)."""
    match event:
        case Gaussian(noise_multiplier=z):
            return [(1.0, (factor / z) ** 2)]
        case Repeated(inner=inner, count=count):
            law = _squares(inner, factor)
            if len(law) > 1:  # each repetition draws anew
                raise CannotProve(event, "the exact Gaussian accountant does not repeat random rounds")
            return [(weight, square * count) for weight, square in law]
        case Composed(parts=parts):
            law = [(1.0, 0.0)]
            for part in parts:
                other = _squares(part, factor)
                if len(law) * len(other) > _MOST_COMPONENTS:
                    raise CannotProve(event, "too many random rounds for the exact Gaussian accountant")
                law = [(w * v, s + t) for w, s in law for v, t in other]
            return law
        case RandomRound(inner=inner, law=rounds):
            base = _squares(inner, factor)
            if len(base) > 1:
                raise CannotProve(event, "the exact Gaussian accountant does not nest random rounds")
            return [(weight, base[0][1] * count) for count, weight in rounds]
    raise CannotProve(event, "only un-sampled Gaussian releases are exactly Gaussian")
