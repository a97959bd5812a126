"""How far an oracle's estimates are from the gradient, in mean square and with a stated probability.

An estimate is a full query and the differences that were added to it since: a *chain*. Its error is a sum of two
martingales, and both are bounded at all steps of a chain at once, so that a union bound runs over chains (over full
queries) and not over steps.

*Noise.* Release i of a chain adds N(0, sᵢ²I). The scale sᵢ may depend on the past (a difference is noised by its
step), and Σsᵢ² ≤ r². Let W be the sum so far; pad it with Gaussian noise until Σsᵢ² = r². For θ fixed
E exp⟨θ, W⟩ = exp(‖θ‖²r²/2), because exp(⟨θ, W⟩ − ‖θ‖²Σs²/2) is a martingale. Averaging over θ ~ N(0, 2tI) gives
E exp(t‖W‖²) = (1 − 2tr²)^(−d/2), the transform of r²χ²_d. As exp(t‖W‖²) is a submartingale, Doob's inequality gives
the Chernoff bound of χ²_d for the largest ‖W‖ of the chain, and by Laurent and Massart (2000, lemma 1)

    P(max ‖W‖² > r²(d + 2√(dℓ) + 2ℓ)) ≤ e^(−ℓ).

*Sampling* (Pinelis 1994, theorem 3.4, in a Hilbert space). Let S be a sum of increments D with conditional mean
zero, ‖D‖ ≤ a, and conditional E‖D‖² adding up to at most σ². For x fixed let u(t) = ‖x + tD‖. As u′² + u·u″ = ‖D‖²
and sinh λu ≤ λu·cosh λu,

    (cosh λu)″ = λ²u′² cosh λu + λu″ sinh λu ≤ λ²‖D‖² cosh λu,   cosh λu(t) ≤ e^(λt‖D‖) cosh λ‖x‖.

Taylor's formula with E D = 0 gives

    E cosh λ‖x + D‖ ≤ cosh λ‖x‖ · (1 + E[e^(λ‖D‖) − 1 − λ‖D‖]) ≤ cosh λ‖x‖ · exp(E‖D‖² · (e^(λa) − 1 − λa)/a²).

So cosh λ‖S‖ · exp(−ΣE‖D‖²·(e^(λa) − 1 − λa)/a²) is a supermartingale, and by Ville's inequality
P(max ‖S‖ ≥ x) ≤ 2 exp(σ²(e^(λa) − 1 − λa)/a² − λx). With e^y − 1 − y ≤ y²/(2(1 − y/3)) the best λ gives

    P(max ‖S‖ > σ√(2ℓ) + aℓ/3) ≤ 2e^(−ℓ).

What σ² and a are follows from the sampling scheme
(:meth:`~quietgrad.core.sampling.schemes.Sampling.mean_error`): for contributions of length G, G² times its
``variance`` and G times its ``longest``. A chain of SPIDER has G² of its full query and M²‖x − x′‖² of every
difference, and Σ‖x − x′‖² < κ since its full query: a step that would reach κ asks a full query instead.

Confirming each stop by one more full query would let the union run over stops. At 60 full queries and ω = 0.05 that
lowers ℓ from 9.2 to 5.8 and the bound by a fifth, and costs a full query for each stop; it is not done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quietgrad.core.sampling.schemes import MeanError, Risk


@dataclass(frozen=True)
class EstimateError:
    """Bounds on the error of a gradient estimate.

    Args:
        sampling: σ of paper 003, a bound on √E‖·‖² of the sampling error.
        noise: r, the standard deviation of a coordinate of all noise in a chain.
        first_noise: the same of a full query alone.
        longest: a, a bound on what one record adds to the sampling error.
        chains: how many full queries a run may ask.
        odds: by how much probabilities grow because batches are of random size.
        risk: whose gradient is meant; ``None`` if no proof bounds the sampling error.

    >>> error = EstimateError(sampling=0.1, noise=0.0)
    >>> error.size(5), round(error.bound(5, failure=0.05), 3)
    (0.1, 0.296)
    """

    sampling: float
    noise: float
    first_noise: float = 0.0
    longest: float = 0.0
    chains: int = 1
    odds: float = 1.0
    risk: Risk | None = None

    def size(self, dim: int) -> float:
        """ψ = √(σ² + r²d), a bound on √E‖ĝ − ∇F‖²."""
        return math.hypot(self.sampling, self.noise * math.sqrt(dim))

    def bound(self, dim: int, failure: float, chains: int | None = None) -> float:
        """Return a bound on ‖ĝ − ∇F‖ that holds in all estimates of a run with probability 1 − ``failure``.

        Half of ``failure`` is for the noise and half for the sampling error; see the module's text.
        """
        share = failure / (2.0 * (self.chains if chains is None else chains))
        noise, sampling = -math.log(share), math.log(2.0 * self.odds / share)
        tail = math.sqrt(dim + 2.0 * math.sqrt(dim * noise) + 2.0 * noise)
        return self.noise * tail + bernstein(self.sampling, self.longest, sampling)


def bernstein(sampling: float, longest: float, log_odds: float) -> float:
    """σ√(2ℓ) + aℓ/3: what a sampling error stays below with probability 1 − 2e^(−ℓ); see the module's text."""
    return sampling * math.sqrt(2.0 * log_odds) + longest * log_odds / 3.0


class Part(NamedTuple):
    """One kind of release in a chain: its full query, or all of its differences together.

    Args:
        error: that of a batch's mean, for contributions of length 1; ``None`` where no bound is proved.
        size: the expected batch.
        length: of contributions: G, or M√κ for differences, whose squares add up to M²κ at most.
        noise: the slot's noise multiplier.
    """

    error: MeanError | None
    size: float
    length: float
    noise: float

    @property
    def deviation(self) -> float:
        """The standard deviation of a coordinate of its noise in the estimate."""
        return self.noise * self.length / self.size


def chain_error(parts: tuple[Part, ...], *, chains: int) -> EstimateError:
    """Return a chain's error from its parts, the full query first. A run may ask ``chains`` full queries.

    Noises of different multipliers add like those of one: a chain's variance is the sum of its parts'.
    """
    # Without a proof of its own a batch is taken for one of independent draws: a scale, which no claim may rest on.
    errors = [(part.error or MeanError(1.0 / part.size, 2.0 / part.size, None), part.length) for part in parts]
    risks = {error.risk for error, _ in errors}
    return EstimateError(
        sampling=math.sqrt(math.fsum(error.variance * length**2 for error, length in errors)),
        noise=math.hypot(*(part.deviation for part in parts)),
        first_noise=parts[0].deviation,
        longest=max(error.longest * length for error, length in errors),
        chains=chains,
        odds=max(error.odds for error, _ in errors),
        risk=risks.pop() if len(risks) == 1 else None,
    )
