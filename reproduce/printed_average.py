"""WD-DP's Algorithm 1 exactly as printed (paper 002), and what it really gives away: NOT PRIVATE.

    OMP_NUM_THREADS=1 python reproduce/printed_average.py      # on made-up rows; prints the claim and the truth

Party j takes T steps θ ← θ − η(∇F_j(θ) + N(0, σ²I)) with σ² = c·G²T·ln(1/δ)/(n²ε²) and sends θ_j to a server, who
returns Σ w_jθ_j. The proof prices a mechanism that is not run: one with noise σ on the *average* gradient at a
common point. What is run is

* for the **server**, who sees θ_j: T Gaussian releases of party j's mean gradient, μ_j = 2G√T/(n_jσ): n/n_j times
  the μ_c = 2G√T/(nσ) of the proof;
* for an **observer** of Σ w_jθ_j: between s_j√T/(σ‖w‖₂), attained by linear losses, and
  s_jT/(σ√(T·w_j² + Σ_{k≠j}w_k²)), s_j = 2Gw_j/n_j, attained when the other parties' losses are curved and forget
  all their noise but the last (convex losses, η ≤ 2/β).

Equal parties: √m to m times the claim. The noise is numpy's, nothing is charged to any ledger, and no model that
comes of it may be published: it is a script about a paper, not a part of the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.methods.output_perturbation import WeightedAverage, step_size


@dataclass(frozen=True)
class Truth:
    """What the printed noise costs: events of replace-one neighbours for each who looks."""

    sigma: float
    claimed: float
    server: events.Event
    observer: events.Event
    observer_at_least: events.Event

    def epsilons(self, delta: float) -> dict[str, float]:
        """ε at ``delta`` for each view."""
        from quietgrad.core.accounting.accounting import account

        views = {
            "epsilon_server": self.server,
            "epsilon_observer": self.observer,
            "epsilon_observer_at_least": self.observer_at_least,
        }
        true = {name: account(event, delta=delta, relation=Relation.REPLACE_ONE) for name, event in views.items()}
        return {"epsilon_claimed": self.claimed, **true}


def truth(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    lipschitz: float,
    steps: int,
    sigma: float,
    claimed: float,
    contracts: bool = True,
) -> Truth:
    """The true privacy of noise ``sigma`` on every party's mean gradients.

    Args:
        sizes, weights: n_j and w_j.
        contracts: whether local steps do not expand (convex losses, η ≤ 2/β); else an observer is only known to
            see no more than the server.

    >>> equal = truth([100] * 16, [1 / 16] * 16, lipschitz=1.0, steps=50, sigma=2.0, claimed=0.1)
    >>> mu = [2.0 / event.noise_multiplier for event in (equal.observer_at_least, equal.observer)]
    >>> claimed = 2.0 * 50**0.5 / (1600 * 2.0)
    >>> round(mu[0] / claimed, 6), round(mu[1] / claimed, 2)  # √m, and m·√(T/(T+m−1))
    (4.0, 14.03)
    """
    moves = [2.0 * lipschitz * w / n for w, n in zip(weights, sizes, strict=True)]
    squares = [w * w for w in weights]
    server = [2.0 * lipschitz * math.sqrt(steps) / (n * sigma) for n in sizes]
    lower = max(moves) * math.sqrt(steps) / (sigma * math.sqrt(sum(squares)))
    upper = max(
        s * steps / (sigma * math.sqrt(steps * square + sum(squares) - square))
        for s, square in zip(moves, squares, strict=True)
    )
    upper = min(upper, max(server)) if contracts else max(server)
    parties = tuple(events.gaussian(n * sigma / lipschitz, steps) for n in sizes)
    # μ = Δ/σ = 2/z under replace-one.
    return Truth(
        sigma, claimed, events.MaxOverParties(parties), events.Gaussian(2.0 / upper), events.Gaussian(2.0 / lower)
    )


def printed_average(
    algorithm: WeightedAverage,
    objective: Any,
    tables: Sequence[Any],
    budget: Budget,
    *,
    weighted: bool = True,
    constant: float = 16.0,
    seed: int = 0,
) -> tuple[npt.NDArray[np.float64], Truth]:
    """Run Algorithm 1 as printed, or its unweighted form with Jayaraman et al.'s m·n_min in place of n.

    Args:
        algorithm: steps and step size.
        tables: the parties' data.
        budget: the (ε, δ) to take the printed noise from.
        constant: c of the printed noise, which the paper leaves open; its proof needs 16.

    Returns:
        The average, which is not private, and what its noise really costs.
    """
    records = [objective.prepare(table) for table in tables]
    sizes = [len(each) for each in records]
    n, m = sum(sizes), len(sizes)
    weights = [size / n if weighted else 1.0 / m for size in sizes]
    constants = objective.constants()
    if constants.lipschitz is None:
        raise ValueError("objective: its gradients are unbounded, so the printed noise is not defined.")
    rate = step_size(algorithm.learning_rate, objective)
    effective = n if weighted else m * min(sizes)
    printed = constant * constants.lipschitz**2 * algorithm.steps * math.log(1.0 / budget.delta)
    sigma = math.sqrt(printed) / (effective * budget.epsilon)
    smooth = constants.smoothness
    told = truth(
        sizes, weights, lipschitz=constants.lipschitz, steps=algorithm.steps, sigma=sigma, claimed=budget.epsilon,
        contracts=constants.convex and smooth is not None and rate <= 2.0 / smooth,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    total = 0.0 * np.asarray(objective.initial(records[0]))
    for each, weight in zip(records, weights, strict=True):
        params = np.array(objective.initial(each))
        for _ in range(algorithm.steps):
            noise = rng.standard_normal(len(params))
            params = params - rate * (objective.risk_gradient(each, params) + sigma * noise)
        total = total + weight * params
    return total, told


def verdict(told: Truth, delta: float) -> str:
    """What is true of the printed claim.

    >>> verdict(truth([100] * 16, [1 / 16] * 16, lipschitz=1.0, steps=50, sigma=2.0, claimed=0.01), 1e-3)
    'NOT PRIVATE as claimed: ε = 0.01 is false for every observer'
    """
    seen = told.epsilons(delta)
    if seen["epsilon_observer_at_least"] > told.claimed:
        return f"NOT PRIVATE as claimed: ε = {told.claimed:g} is false for every observer"
    if seen["epsilon_server"] > told.claimed:
        return f"NOT PRIVATE as claimed: ε = {told.claimed:g} is false for the server"
    return f"ε = {told.claimed:g} is true here, though not by its proof"


def main() -> None:
    """Print the claim and the truth for parties of equal size."""
    from quietgrad.objectives import L2, Logistic

    rng = np.random.default_rng(0)
    objective = Logistic(regularizer=L2(0.01), row_bound=1.0, rows="clip")
    budget = Budget(0.25, 1e-3, Relation.REPLACE_ONE)
    for parties in (2, 8, 32):
        X = rng.standard_normal((45_216 // parties * parties, 5))
        y = (X[:, 0] > 0.0) * 1.0
        rows = np.array_split(np.arange(len(X)), parties)
        tables = [(X[part], y[part]) for part in rows]
        _, told = printed_average(WeightedAverage(steps=100), objective, tables, budget)
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in told.epsilons(budget.delta).items())
        print(f"{parties} parties: {verdict(told, budget.delta)}; {numbers}")


if __name__ == "__main__":
    main()
