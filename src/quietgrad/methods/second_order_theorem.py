"""Theorems 2 and 3 of paper 003 in numbers: the settings that equations (4) and (5) ask for."""

from __future__ import annotations

import math
from typing import NamedTuple

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import calibrate_event
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import SettingError
from quietgrad.core.session.objectives import LossConstants
from quietgrad.core.settings import Within
from quietgrad.methods.base import check_known


class TheoremParameters(NamedTuple):
    """Everything equations (4), (5) and Theorem 2 set; ``steps`` is the bound T of (72).

    ``excess`` is the logarithm of 16√C·s·μ²ψ ÷ α: at most 0 where α is consistent.
    """

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
    excess: float


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
    parties: int = 1,
) -> TheoremParameters:
    """Theorem 2 of paper 003: the settings that its equations (4) and (5) ask for.

    All quantities follow from α and a logarithmic factor μ: χ = α/4, ι = sμ, η = √(ρα)/(Mι)², 𝒯 = ι/(sη√(ρα)),
    𝒮 = √(α/ρ)/ι^1.5, b₁ = nκ/(2Uη), b₂ = nηχ²/(2U). These give σ and r (Lemma 7), ψ = √(σ² + r²d), and back
    χ = 4√C·s·μ²·ψ; (5) gives μ from η, ψ and r. The least α that satisfies χ ≥ 4√C·s·μ²·ψ is taken.

    The paper leaves two absolute constants open, "sufficiently large" s and C. Here both default to 1, the least
    they could be; then the settings are consistent with (4) and (5), but Theorem 1 is not claimed for them. Lemma
    7's O(·) has constant 1 too, except for the noise, whose standard deviation is exact: it is the calibrated one.
    At d = 10 and G = M = ρ = U = ε = 1 they need n > 10¹¹ before √(ρα) falls below M.

    The batches of Theorem 2 fit the data up to a constant only: T·b₂ = (5/8)s²μ⁴ log(·)·n exceeds n. A run that
    follows these settings therefore often stops with its samples used up.

    Args:
        constants: G, M and ρ of the loss.
        risk_bound: U ≥ max F − min F.
        failure: ω.
        scale: s. constant: C.
        parties: m, each with n records and noise of its own (theorem 3, under which ĝ is the mean of m estimates).
            Lemma 9 divides σ² and r² of Lemma 7 by m, and κ has mn for n in its first term and √m·n in its second.
            Batches are one party's. The printed √(mn)·ε must be √m·n·ε: r² is divided by m and b² by n² there, and
            the paper's own remark says so.

    >>> hill = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
    >>> found = solve(hill, n=10**14, dim=10, budget=Budget(1.0, 1e-6), risk_bound=1.0)
    >>> found.alpha == 4 * found.chi, found.learning_rate <= 1.0
    (True, True)
    """
    g, m, rho = constants.needed("lipschitz", "smoothness", "hessian_lipschitz")
    s, c, u = scale, constant, risk_bound
    check_known(n, dim, budget, risk_bound=u, scale=s, constant=c)
    Within(0.0, 1.0 - 1e-9, closed=False).check("failure", failure)
    noise = calibrate_event(events.Gaussian, budget=budget)
    Within(1, whole=True).check("parties", parties)
    root = math.sqrt(parties)
    many = g**1.5 * math.sqrt(u * rho / (parties * n)) / m**2.5
    few = (root * n * budget.epsilon) ** 0.8 * m ** (34 / 15)
    kappa = max(many, g ** (14 / 15) * dim**0.4 * u**0.8 * rho ** (8 / 15) / few)
    drift, log_d, quarter = m * math.sqrt(kappa), max(1.0, math.log(dim)), math.sqrt(math.sqrt(c))

    def found(alpha: float) -> TheoremParameters:
        """All numbers at this α, with the fixed point μ of (5), which enters its right-hand side by logarithms."""
        chi, gamma, mu = alpha / 4.0, math.sqrt(rho * alpha), 1.0
        for _ in range(200):
            iota = s * mu
            eta = gamma / (m * iota) ** 2
            b1, b2 = n * kappa / (2.0 * u * eta), n * eta * chi**2 / (2.0 * u)
            r = noise / root * math.hypot(g / b1, drift / b2)  # ψ and r are Lemma 7's, or 9's
            sigma = log_d / root * math.hypot(g / math.sqrt(b1), drift / math.sqrt(b2))
            psi = math.hypot(sigma, r * math.sqrt(dim))
            # the logarithm of (71), of which Q is 2.5 times, and T of (72)
            saddles = math.log(max(math.e, 16.0 * iota**3 * u / (s * failure) * math.sqrt(rho / chi**3)))
            steps = 5.0 * u * s**2 * mu**4 / (4.0 * chi**2 * eta) * saddles
            inner = math.log(max(math.e, 4.0 * quarter / (s * eta * r) * math.sqrt(psi / rho)))
            first = math.log(9.0 * dim * inner / (quarter * eta * math.sqrt(s * rho * psi))) / s
            second = math.log(160.0 * math.sqrt(2.0 * psi / rho) * quarter / (s * math.sqrt(eta * r)))
            log_t = max(0.0, math.log(4.0 * steps / failure))
            third = math.sqrt(math.sqrt(c * log_t)) / math.sqrt(math.sqrt(8.0) * s)
            mu, before = max(first, second, third, 1.0), mu
            if abs(mu - before) <= 1e-12 * before:
                break
        else:
            raise ValueError("equation (5) has no fixed point at these constants; check G, M, ρ, U.")
        return TheoremParameters(
            mu=mu,
            alpha=alpha,
            chi=chi,
            learning_rate=eta,
            escape_steps=math.ceil(iota / (s * eta * gamma)),
            radius=math.sqrt(alpha / rho) / iota**1.5,
            kappa=kappa,
            batch_size=max(1, round(b1)),
            difference_batch_size=min(n, max(1, round(b2))),
            attempts=math.ceil(2.5 * saddles),
            steps=math.ceil(steps),
            excess=math.log(16.0 * math.sqrt(c) * s * mu**2 * psi / alpha),
        )

    low, high = math.log(1e-12), math.log(1e12)  # where α is looked for: on a grid, then by halving
    grid = [low + (high - low) * k / 240.0 for k in range(241)]
    top = next((k for k, x in enumerate(grid) if found(math.exp(x)).excess <= 0.0), None)
    if not top:
        raise ValueError("no α between 1e-12 and 1e12 satisfies equations (4) and (5); check G, M, ρ, U.")
    low, high = grid[top - 1], grid[top]
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if found(math.exp(middle)).excess <= 0.0 else (middle, high)
    settings = found(math.exp(high))
    if (gamma := math.sqrt(rho * settings.alpha)) > m:
        raise SettingError(
            f"{{n}}: too small for the paper's settings, which give α={settings.alpha:.3g} and √(ρα)={gamma:.3g} "
            f"> M={m:.3g}, so that every point of small gradient would pass. Use more records, or practical "
            "settings.",
            n=n,
        )
    if settings.batch_size > n:
        raise SettingError(f"{{n}}: too small for one full query of b₁={settings.batch_size} records.", n=n)
    return settings
