"""One noisy Newton step at the end of a private descent, from which standard errors come.

From a private start θ₀ the step θ₁ = θ₀ − Ĥ⁻¹ĝ uses a noisy gradient ĝ = g + N_g and a noisy curvature Ĥ = H + N_H.
To first order θ₁ − θ* = −Ĥ⁻¹(g(θ*) + N_g) + Ĥ⁻¹N_H(θ₀ − θ*), so with δ = θ₁ − θ₀ the covariance is

    Ĥ⁻¹ (φĤ/n + σ_g²I + ½σ_H²(‖δ‖²I + δδᵀ)) Ĥ⁻¹,

φ the dispersion: 1 for a likelihood, the residual variance for least squares (Avella-Medina, Bradshaw, Loh 2023;
Wang, Kifer, Lee 2019). Whether the step is bought is decided from public numbers. Eigenvalues of Ĥ that turn out
below three times the spectral norm s of its noise are raised to 3s, which shortens the step there. Their part of
the covariance is that of the least eigenvalue v the noise allows (Ĥ's less s, at least s/4), and holds the error
(1/v − 1/3s)ĝ of the shorter step besides: intervals are wider, and there always are some.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from quietgrad.core.session.base import Session, SupportsPrefetch
from quietgrad.core.session.queries import LossQuery, Query
from quietgrad.methods.range_estimation import noise_of, relation_of
from quietgrad.tables.losses import Squared
from quietgrad.tables.table import Floats
from quietgrad.tables.whitening import WhitenedGradient, WhitenedInformation, Whitening

_CLEAR = 3.0  # spectral norms of its noise: an eigenvalue of the curvature below is raised to it


def newton_step(
    session: Session, seen: Callable[[Query], Query], start: Floats, whitening: Whitening
) -> tuple[Floats, Floats, int]:
    """Release gradient, curvature and (for squares) dispersion at ``start``, and step.

    ``seen`` turns a query into one about the rows as the frame shows them. Returns the whitened parameters, their
    covariance, and how many eigenvalues of the curvature noise hid.
    """
    squares = isinstance(session.objective, Squared)
    radius, n, size = whitening.radius, session.expected_batch("gradient"), len(start)
    gradient = WhitenedGradient(start, (2.0 if squares else 1.25) * radius, whitening)
    information = WhitenedInformation(
        start, (2.5 if squares else 0.625) * radius**2, whitening, relation_of(session)
    )
    loss = LossQuery(whitening.to_raw(start), 2.0)  # f = r²/2 with targets in ±2: residuals up to 2
    asked = seen(gradient), seen(information), seen(loss)
    if isinstance(session, SupportsPrefetch):
        session.foresee(*asked[: 3 if squares else 2])
    slope = session.release("score", asked[0]) / n
    slope += whitening.pull_back(session.regularizer.gradient(whitening.to_raw(start)))
    curve = information.unpack(session.release("information", asked[1]) / n)
    slope_noise = noise_of(session, "score", gradient.bound) / n
    curve_noise = noise_of(session, "information", information.bound) / n
    dispersion = 1.0
    if squares:
        dispersion = max(2.0 * float(session.release("dispersion", asked[2])[0]) / n, 1e-12)
    bend = np.maximum(session.regularizer.curvature(whitening.to_raw(start)), 0.0)
    if bend.any():  # the penalty's part is public
        curve += np.column_stack([whitening.pull_back(bend * whitening.to_raw(unit)) for unit in np.eye(size)])
    seen_bends, axes = np.linalg.eigh(curve)
    spread = curve_noise * math.sqrt(2.0 * size)
    floor = max(_CLEAR * spread, 1e-9 * float(seen_bends[-1]), 1e-300)
    hidden = seen_bends < floor
    bends = np.where(hidden, floor, seen_bends)
    least = np.where(hidden, np.maximum(seen_bends - spread, floor / (4.0 * _CLEAR)), seen_bends)
    along = axes.T @ slope
    step = -axes @ (along / bends)
    middle = (
        dispersion * (axes * bends) @ axes.T / n
        + (slope_noise**2 + 0.5 * curve_noise**2 * float(step @ step)) * np.eye(size)
        + 0.5 * curve_noise**2 * np.outer(step, step)
    )
    inverse = (axes / least) @ axes.T
    shortened = axes * (along * (1.0 / least - 1.0 / bends)) ** 2
    return start + step, inverse @ middle @ inverse + shortened @ axes.T, int(hidden.sum())
