"""WD-DP's Algorithm 1 exactly as printed (paper 002), and what it really gives away.

Party j takes T steps θ ← θ − η(∇F_j(θ) + N(0, σ²I)) with σ² = c·G²T·ln(1/δ)/(n²ε²) and sends θ_j to a server, who
returns Σ w_jθ_j. The proof prices a mechanism that is not run: one with noise σ on the *average* gradient at a
common point. What is run is

* for the **server**, who sees θ_j: T Gaussian releases of party j's mean gradient, μ_j = 2G√T/(n_jσ): n/n_j times
  the μ_c = 2G√T/(nσ) of the proof;
* for an **observer** of Σ w_jθ_j: between s_j√T/(σ‖w‖₂), attained by linear losses, and
  s_jT/(σ√(T·w_j² + Σ_{k≠j}w_k²)), s_j = 2Gw_j/n_j, attained when the other parties' losses are curved and forget
  all their noise but the last (convex losses, η ≤ 2/β).

Equal parties: √m to m times the claim. Nothing here is offered as private.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.algorithms.weighted_average import WeightedAverage
from quietgrad.errors import DataError
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.training.checkpoint import versions
from quietgrad.training.result import Privacy, Result
from quietgrad.vectors import copy


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
        from quietgrad.privacy.accounting import account

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
        sigma, claimed, events.PerParty(parties), events.Gaussian(2.0 / upper), events.Gaussian(2.0 / lower)
    )


def reproduce(
    algorithm: WeightedAverage,
    objective: Any,
    tables: Sequence[Any],
    *,
    budget: Budget | None,
    weighted: bool = True,
    seed: int | None = None,
) -> Result:
    """Run Algorithm 1 as printed, or its unweighted form with Jayaraman et al.'s m·n_min in place of n.

    Args:
        algorithm: settings, with ``noise="paper"``.
        tables: the parties' data.
        budget: the (ε, δ) to take the printed noise from; the result says what is true instead.
    """
    if budget is None:
        raise ValueError("noise='paper' needs a budget to take the printed noise from.")
    started = time.perf_counter()
    records = [objective.prepare(table) for table in tables]
    sizes = [len(each) for each in records]
    if min(sizes) < 1:
        raise DataError("every party needs at least one record.")
    n, m = sum(sizes), len(sizes)
    weights = [size / n if weighted else 1.0 / m for size in sizes]
    constants = objective.constants()
    if constants.lipschitz is None:
        raise ValueError("objective: its gradients are unbounded, so the printed noise is not defined.")
    rate = algorithm.step_size(objective)
    effective = n if weighted else m * min(sizes)
    printed = algorithm.constant * constants.lipschitz**2 * algorithm.steps * math.log(1.0 / budget.delta)
    sigma = math.sqrt(printed) / (effective * budget.epsilon)
    smooth = None if constants.smoothness is None else constants.smoothness + constants.regularizer_smoothness
    told = truth(
        sizes, weights, lipschitz=constants.lipschitz, steps=algorithm.steps, sigma=sigma, claimed=budget.epsilon,
        contracts=constants.convex and smooth is not None and rate <= 2.0 / smooth,
    )  # fmt: skip
    key = fresh_key() if seed is None else seed_key(seed)
    total = 0.0 * objective.initial(records[0])
    for j, (each, weight) in enumerate(zip(records, weights, strict=True)):
        stream = SecureStream(key, f"printed/{j}")
        params = copy(objective.initial(each))
        for t in range(algorithm.steps):
            noise = stream.normal(t, len(params))
            params = params - rate * (objective.risk_gradient(each, params) + sigma * noise)
        total = total + weight * params
    return Result(
        params=np.asarray(total),
        privacy=_statement(told, budget, algorithm.steps),
        algorithm=algorithm.name,
        config=algorithm.config(),
        n_public=n,
        seconds=time.perf_counter() - started,
        versions=versions(),
        details={"sigma": sigma, "sizes": sizes, "weighted": weighted, **told.epsilons(budget.delta)},
    )


def _statement(told: Truth, budget: Budget, steps: int) -> Privacy:
    from quietgrad.privacy.accounting import prove

    proof = prove(told.server, delta=budget.delta, relation=Relation.REPLACE_ONE)
    seen = told.epsilons(budget.delta)
    verdict = "true here, though not by its proof"
    if proof.epsilon > budget.epsilon:
        verdict = "false for the server"
    if seen["epsilon_observer_at_least"] > budget.epsilon:
        verdict = "false for every observer"
    return Privacy(
        epsilon=proof.epsilon,
        delta=budget.delta,
        relation=Relation.REPLACE_ONE,
        accountant=proof.accountant,
        noise_multiplier=0.0,
        events=told.server,
        releases={"local steps": steps, "model": 1},
        sampling="full batch: every record in every release",
        adversary="the server, who receives every party's model",
        account=None,
        is_private=False,
        notes=(
            f"noise as printed; the claim ε={budget.epsilon:g} is {verdict}: averaged noise is smaller than σ and "
            "the server sees the parties' own models",
            f"true ε: {seen['epsilon_server']:.4g} to the server; to an observer of the average at most "
            f"{seen['epsilon_observer']:.4g}, and {seen['epsilon_observer_at_least']:.4g} for linear losses",
            "for reproduction only; use noise='tight'",
        ),
    )
