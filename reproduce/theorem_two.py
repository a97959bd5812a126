"""Theorem 2 of paper 003: the settings of perturbed SGD that its equations (4) and (5) ask for.

They solve equations (4) and (5) and Theorem 2 of paper 003 for α. All quantities follow from α and a
logarithmic factor μ: χ = α/4, ι = sμ, η = √(ρα)/(Mι)², 𝒯 = ι/(sη√(ρα)), 𝒮 = √(α/ρ)/ι^1.5, b₁ = nκ/(2Uη), b₂ =
nηχ²/(2U). These give σ and r (Lemma 7), ψ = √(σ² + r²d), and back χ = 4√C·s·μ²·ψ; (5) gives μ from η, ψ and r.
:func:`solve` returns the least α that satisfies χ ≥ 4√C·s·μ²·ψ.

The paper leaves two absolute constants open, "sufficiently large" s and C. Here both default to 1, the least they
could be; then the settings are consistent with (4) and (5), but Theorem 1 is not claimed for them. Lemma 7's O(·)
has constant 1 too, except for the noise, whose standard deviation is exact: it is the calibrated one. At d = 10 and
G = M = ρ = U = ε = 1 they need n > 10¹¹ before √(ρα) falls below M.

The batches of Theorem 2 fit the data up to a constant only: T·b₂ = (5/8)s²μ⁴ log(·)·n exceeds n. A run that follows
these settings therefore often stops with its samples used up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quietgrad.objectives.base import LossConstants
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.calibration import calibrate_event

_RANGE = (1e-12, 1e12)  # where α is looked for


class TheoremParameters(NamedTuple):
    """Everything equations (4), (5) and Theorem 2 set; ``steps`` is the bound T of (72)."""

    mu: float
    alpha: float
    chi: float
    learning_rate: float
    escape_steps: int
    radius: float
    kappa: float
    batch_size: int
    difference_batch_size: int
    attempts: int
    steps: int
    decrease: float


def solve(
    constants: LossConstants,
    *,
    n: int,
    dim: int,
    budget: Budget,
    risk_bound: float,
    failure: float = 0.05,
    scale: float = 1.0,
    constant: float = 1.0,
) -> TheoremParameters:
    """The settings of Theorem 2.

    Args:
        constants: G, M and ρ of the loss.
        risk_bound: U ≥ max F − min F.
        failure: ω.
        scale: s. constant: C.

    >>> hill = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
    >>> found = solve(hill, n=10**14, dim=10, budget=Budget(1.0, 1e-6), risk_bound=1.0)
    >>> found.alpha == 4 * found.chi, found.learning_rate <= 1.0
    (True, True)
    """
    g, m, rho = constants.lipschitz, constants.smoothness, constants.hessian_lipschitz
    for name, value in (("G (lipschitz)", g), ("M (smoothness)", m), ("ρ (hessian_lipschitz)", rho)):
        if value is None or value <= 0.0:
            raise ValueError(f"theory mode needs a finite {name} > 0; the loss states {value!r}.")
    for name, number in (("risk_bound", risk_bound), ("scale", scale), ("constant", constant)):
        if not 0.0 < number < math.inf:
            raise ValueError(f"{name}={number!r}: must be a finite number > 0.")
    if not 0.0 < failure < 1.0:
        raise ValueError(f"failure={failure!r}: must be in (0, 1).")
    assert g is not None
    assert m is not None
    assert rho is not None
    noise = calibrate_event(events.Gaussian, budget=budget)
    kappa = max(
        g**1.5 * math.sqrt(risk_bound * rho / n) / m**2.5,
        g ** (14 / 15)
        * dim**0.4
        * risk_bound**0.8
        * rho ** (8 / 15)
        / (m ** (34 / 15) * (n * budget.epsilon) ** 0.8),
    )
    problem = _Problem(g, m, rho, risk_bound, n, dim, noise, failure, scale, constant, kappa)
    alpha = problem.least_alpha()
    return problem.settings(alpha)


class _Problem(NamedTuple):
    g: float
    m: float
    rho: float
    u: float
    n: int
    dim: int
    noise: float
    failure: float
    s: float
    c: float
    kappa: float

    def rate(self, alpha: float, mu: float) -> float:
        return math.sqrt(self.rho * alpha) / (self.m * self.s * mu) ** 2

    def batches(self, alpha: float, eta: float) -> tuple[float, float]:
        return self.n * self.kappa / (2.0 * self.u * eta), self.n * eta * (alpha / 4.0) ** 2 / (2.0 * self.u)

    def error(self, alpha: float, eta: float) -> tuple[float, float]:
        """(ψ, r) by Lemma 7."""
        b1, b2 = self.batches(alpha, eta)
        log_d = max(1.0, math.log(self.dim))
        drift = self.m * math.sqrt(self.kappa)
        sigma = log_d * math.hypot(self.g / math.sqrt(b1), drift / math.sqrt(b2))
        r = self.noise * math.hypot(self.g / b1, drift / b2)
        return math.hypot(sigma, r * math.sqrt(self.dim)), r

    def repeats(self, alpha: float, mu: float) -> float:
        """log(16ι³U/(sω)·√(ρ/χ³)) of (71): Q is 2.5 times it."""
        chi, iota = alpha / 4.0, self.s * mu
        saddles = 16.0 * iota**3 * self.u / (self.s * self.failure) * math.sqrt(self.rho / chi**3)
        return math.log(max(saddles, math.e))

    def total(self, alpha: float, mu: float, eta: float) -> float:
        """T of (72)."""
        chi = alpha / 4.0
        return 5.0 * self.u * self.s**2 * mu**4 / (4.0 * chi**2 * eta) * self.repeats(alpha, mu)

    def mu(self, alpha: float) -> float:
        """The fixed point of (5) at this α; μ enters its right-hand side through logarithms only."""
        mu, quarter = 1.0, math.sqrt(math.sqrt(self.c))
        for _ in range(200):
            eta = self.rate(alpha, mu)
            psi, r = self.error(alpha, eta)
            inner = math.log(max(math.e, 4.0 * quarter / (self.s * eta * r) * math.sqrt(psi / self.rho)))
            first = math.log(9.0 * self.dim * inner / (quarter * eta * math.sqrt(self.s * self.rho * psi))) / self.s
            second = math.log(160.0 * math.sqrt(2.0 * psi / self.rho) * quarter / (self.s * math.sqrt(eta * r)))
            log_t = max(0.0, math.log(4.0 * self.total(alpha, mu, eta) / self.failure))
            third = math.sqrt(math.sqrt(self.c * log_t)) / math.sqrt(math.sqrt(8.0) * self.s)
            new = max(first, second, third, 1.0)
            if abs(new - mu) <= 1e-12 * mu:
                return new
            mu = new
        raise ValueError("equation (5) has no fixed point at these constants; check G, M, ρ, U.")

    def excess(self, alpha: float) -> float:
        """log of 16√C·s·μ²ψ ÷ α: at most 0 where α is consistent."""
        mu = self.mu(alpha)
        psi, _ = self.error(alpha, self.rate(alpha, mu))
        return math.log(16.0 * math.sqrt(self.c) * self.s * mu**2 * psi / alpha)

    def least_alpha(self) -> float:
        low, high = math.log(_RANGE[0]), math.log(_RANGE[1])
        grid = [low + (high - low) * k / 240.0 for k in range(241)]
        top = next((k for k, x in enumerate(grid) if self.excess(math.exp(x)) <= 0.0), None)
        if not top:
            raise ValueError("no α between 1e-12 and 1e12 satisfies equations (4) and (5); check G, M, ρ, U.")
        low, high = grid[top - 1], grid[top]
        for _ in range(100):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.excess(math.exp(middle)) <= 0.0 else (middle, high)
        return math.exp(high)

    def settings(self, alpha: float) -> TheoremParameters:
        mu = self.mu(alpha)
        eta, iota, gamma = self.rate(alpha, mu), self.s * mu, math.sqrt(self.rho * alpha)
        if gamma > self.m:
            raise ValueError(
                f"n={self.n}: too small for the paper's settings, which give α={alpha:.3g} and √(ρα)={gamma:.3g} "
                f"> M={self.m:.3g}, so that every point of small gradient would pass. Use more records, or "
                "practical settings."
            )
        b1, b2 = self.batches(alpha, eta)
        if b1 > self.n:
            raise ValueError(f"n={self.n}: too small for one full query of b₁={b1:.3g} records.")
        return TheoremParameters(
            mu=mu,
            alpha=alpha,
            chi=alpha / 4.0,
            learning_rate=eta,
            escape_steps=math.ceil(iota / (self.s * eta * gamma)),
            radius=math.sqrt(alpha / self.rho) / iota**1.5,
            kappa=self.kappa,
            batch_size=max(1, round(b1)),
            difference_batch_size=min(self.n, max(1, round(b2))),
            attempts=math.ceil(2.5 * self.repeats(alpha, mu)),
            steps=math.ceil(self.total(alpha, mu, eta)),
            decrease=self.s / (8.0 * iota**3) * math.sqrt(alpha**3 / self.rho),
        )
