"""Settings of perturbed SGD: derived from the loss and the noise, or practical.

*Derived* numbers follow from what the loss states of every record (G, M, ρ) and from the noise. With σ the sampling
error in norm, r the noise of a coordinate and γ = √(ρα),

    χ = r(√d + √(2 ln(4·steps/ω))) + σ,   α = 4χ,   η = 1/M,   𝒮 = ½√(α/ρ),
    𝒯 = [ln(1 + γ𝒮/(0.32r)) + ln(4/3)] / ln(1 + ηγ),   Q = ⌈2.5 ln(1/ω)⌉.

𝒯 is how long a saddle of curvature −γ takes to carry noise of 0.32r (exceeded with probability 3/4) to distance 𝒮
while the slope falls behind as fast as ρ allows: x′ = γx − ½ρx² reaches 𝒮 = ½γ/ρ later than x′ = γx does by
ln(4/3)/γ. Sampling errors help, but nothing is known of their direction, so they do not count. What a stop then
says, λ_min ≥ −√(ρα), is worth something only if √(ρα) is small against curvature that occurs: see
:func:`check_tolerance`.

*Practical* numbers follow from a step η and a clip C that are chosen, as for DP-SGD, and from γ, the curvature to
be left. Differences are clipped to ‖x − x′‖/η. A point at rest under errors of size χ in every step
is carried about ηχ√𝒯 far in 𝒯 steps; 𝒮 is twice that, and 𝒯 is as long as curvature −γ needs for it:

    𝒮 = 2ηχ√𝒯,   𝒯 = ln(1 + γ𝒮/(0.32r)) / ln(1 + ηγ),   Q = 2.

A stop then says that two drifts did not get away. That is an observation: clipped gradients may lead elsewhere than
the risk's own, and no constant of the loss is known to hold. If γ is not given it is 0.1/η at first. A flatter
saddle is left too slowly for 𝒯, and stopping early saves no privacy; so the last drift goes on, and γ is halved (𝒯
about doubled) whenever it has not got away, until records or steps run out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quietgrad.objectives.base import Objective
from quietgrad.oracles.base import EstimateError

STEP, CLIP, ATTEMPTS = 0.5, 1.0, 2  # what practical runs take if nothing is given: DP-SGD's own defaults
_PUSH = 0.32  # |N(0, 1)| exceeds it with probability 3/4


class EscapeParameters(NamedTuple):
    """χ, η, the curvature that a stop rules out, 𝒮, 𝒯 and Q."""

    chi: float
    eta: float
    tolerance: float
    radius: float
    escape_steps: int
    attempts: int


def derived(
    chi: float,
    push: float,
    *,
    smoothness: float,
    rho: float,
    failure: float,
    eta: float | None,
    radius: float | None,
) -> EscapeParameters:
    """The numbers that G, M and ρ imply; ``push`` is r."""
    alpha = 4.0 * chi
    eta = 1.0 / smoothness if eta is None else eta
    gamma = math.sqrt(rho * alpha)
    radius = 0.5 * math.sqrt(alpha / rho) if radius is None else radius
    late = -math.log1p(-0.5 * min(1.0, rho * radius / gamma))
    growth = math.log1p(gamma * radius / (_PUSH * push)) + late
    steps = math.ceil(growth / math.log1p(eta * gamma))
    return EscapeParameters(chi, eta, gamma, radius, steps, math.ceil(2.5 * math.log(1.0 / failure)))


def practical(
    chi: float, push: float, *, eta: float, curvature: float | None, radius: float | None = None
) -> EscapeParameters:
    """The numbers for leaving curvature −γ by steps of η.

    >>> practical(0.01, 2e-4, eta=0.5, curvature=None).escape_steps
    58
    """
    gamma = 0.1 / eta if curvature is None else curvature
    steps = 1
    for _ in range(100):  # 𝒯 enters its own right-hand side through a logarithm of its root
        far = 2.0 * eta * chi * math.sqrt(steps) if radius is None else radius
        steps, before = math.ceil(math.log1p(gamma * far / (_PUSH * push)) / math.log1p(eta * gamma)), steps
        if steps == before:
            break
    return EscapeParameters(chi, eta, gamma, far, steps, ATTEMPTS)


def check_tolerance(
    n: int, alpha: float, rho: float, smoothness: float, objective: Objective, curvature: float | None = None
) -> float:
    """√(ρα); raise unless it is below the curvature that matters, for else the point of a saddle would pass.

    That curvature is ``curvature`` if given, or the most negative that the risk can have, or β, which bounds it. A
    convex risk has no saddle, so every α is fine.
    """
    gamma, known = math.sqrt(rho * alpha), objective.negative_curvature()
    if curvature is not None:
        limit, what = curvature, f"curvature={curvature:.3g}"
    elif known == 0.0:
        return gamma
    elif known is not None and known < smoothness:
        limit, what = known, f"the curvature {known:.3g} of its saddles"
    else:
        limit, what = smoothness, f"β={smoothness:.3g}"
    if gamma >= limit:
        raise ValueError(
            f"n={n}: too small. α={alpha:.3g} means √(ρα)={gamma:.3g}, not below {what}, so a stop would say "
            "nothing: a saddle would pass. Use more records, a larger ε, larger batches or a smaller clip; or "
            "mode='practical', which leaves saddles but proves nothing."
        )
    return gamma


def estimate_error(error: EstimateError, dim: int, steps: int, failure: float) -> float:
    """χ = r(√d + √(2 ln(4T/ω))) + σ: what ‖ĝ − ∇F‖ stays below, the noise in all T steps with probability 1 − ω/2.

    >>> estimate_error(EstimateError(sampling=0.1, noise=0.0), dim=5, steps=10, failure=0.1)
    0.1
    """
    tail = math.sqrt(dim) + math.sqrt(2.0 * math.log(4.0 * steps / failure))
    return error.noise * tail + error.sampling
