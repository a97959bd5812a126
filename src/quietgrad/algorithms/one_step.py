"""Standard errors for a private fit: one noisy Newton step, and what its noise and the sampling leave uncertain.

From a private start θ₀ the step θ₁ = θ₀ − Ĥ⁻¹ĝ uses a noisy gradient ĝ = g + N_g and a noisy curvature Ĥ = H + N_H.
To first order θ₁ − θ* = −Ĥ⁻¹(g(θ*) + N_g) + Ĥ⁻¹N_H(θ₀ − θ*), so with δ = θ₁ − θ₀ the covariance is

    Ĥ⁻¹ (φĤ/n + σ_g²I + ½σ_H²(‖δ‖²I + δδᵀ)) Ĥ⁻¹,

φ the dispersion: 1 for a likelihood, the residual variance for least squares (Avella-Medina, Bradshaw, Loh 2023;
Wang, Kifer, Lee 2019). It is offered only where the noise of Ĥ is a small part of its least eigenvalue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.algorithms.table_looks import noise_of
from quietgrad.curators.base import Session, SupportsPrefetch
from quietgrad.objectives.base import Loss
from quietgrad.objectives.tables.glm import Logistic, Squared
from quietgrad.objectives.tables.information import WhitenedInformation
from quietgrad.objectives.tables.table import Floats
from quietgrad.objectives.tables.whitening import WhitenedGradient, Whitening
from quietgrad.privacy.budget import Relation

MOST_NOISE = 1.0 / 3.0
"""Of the curvature's least eigenvalue: a noisier inverse tells nothing."""
CROWDED = 0.018
"""p^1.5/(nμ) beyond which no step is bought: its curvature would be refused."""
_SHARES = {"score": 0.45, "information": 0.5, "dispersion": 0.05}


def shares(inference: float, regression: bool) -> dict[str, float]:
    """The slots a Newton step adds to a plan, with their shares of μ²."""
    if not inference:
        return {}
    named = {name: part * inference for name, part in _SHARES.items()}
    if not regression:
        named["score"] += named.pop("dispersion")
    return named


@dataclass(frozen=True, eq=False)
class Step:
    """What a Newton step found, in whitened coordinates; ``refused`` says why its errors would mean nothing."""

    params: Floats
    covariance: Floats
    refused: str = ""


def covers(objective: Any) -> bool:
    """Whether the covariance above is that of this loss."""
    return type(objective) in (Logistic, Squared)


def take(door: Session, seen: Any, start: Floats, whitening: Whitening, relation: Relation) -> Step:
    """Release gradient, curvature and (for squares) dispersion at ``start``, and step.

    ``seen`` turns a query into one about the rows as the frame shows them.
    """
    squares = isinstance(door.objective, Squared)
    radius, n, size = whitening.radius, door.expected_batch("gradient"), len(start)
    gradient = WhitenedGradient(start, (2.0 if squares else 1.25) * radius, whitening)
    information = WhitenedInformation(start, (2.5 if squares else 0.625) * radius**2, whitening, relation)
    loss = Loss(whitening.to_raw(start), 2.0)  # f = r²/2 with targets in ±2: residuals up to 2
    asked = seen(gradient), seen(information), seen(loss)
    if isinstance(door, SupportsPrefetch):
        door.foresee(*asked[: 3 if squares else 2])
    slope = door.release("score", asked[0]) / n
    slope += whitening.pull_back(door.regularizer.gradient(whitening.to_raw(start)))
    curve = information.unpack(door.release("information", asked[1]) / n)
    slope_noise = noise_of(door, "score", gradient.bound) / n
    curve_noise = noise_of(door, "information", information.bound) / n
    dispersion = 1.0
    if squares:  # asked before anything is refused: how many releases a run makes must not follow from the data
        dispersion = max(2.0 * float(door.release("dispersion", asked[2])[0]) / n, 1e-12)
    least = float(np.linalg.eigvalsh(curve)[0])
    spread = curve_noise * math.sqrt(2.0 * size)
    if least <= 0.0 or spread > MOST_NOISE * least:
        return Step(start, np.zeros((size, size)), "the noise on the curvature is not small beside its eigenvalues")
    inverse = np.linalg.inv(curve)
    step = -inverse @ slope
    middle = (
        dispersion * curve / n
        + (slope_noise**2 + 0.5 * curve_noise**2 * float(step @ step)) * np.eye(size)
        + 0.5 * curve_noise**2 * np.outer(step, step)
    )
    return Step(start + step, inverse @ middle @ inverse)
