"""ε of an event at δ, proved apart from quietgrad: whose code did it, and by which argument.

Un-sampled Gaussian releases have a closed form. Pure releases, samples, epochs and random rounds are composed as
privacy-loss distributions. Where zCDP releases or searches take part, Rényi divergences of dp-accounting are added
up. Every value is an upper bound; what no rule here proves is refused with
:class:`~quietgrad_verify.events.NoRule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quietgrad_verify.events import (
    ZCDP,
    Allocated,
    Branch,
    Gaussian,
    NoRule,
    Pure,
    RandomRounds,
    Release,
    Sampled,
    Selected,
    take_apart,
)
from quietgrad_verify.losses import OURS, THEIRS, Floats, Losses, gaussian_delta, one_loss

_FINEST, _COARSEST = 1e-7, 1e-3
_LARGEST_LOSS = 60.0
_MOST_RELEASES = 10**7
_MOST_ROUNDS = 48  # each is a composition of its own; more are counted as the largest of their group
_ORDERS = np.concatenate([1.0 + 10.0 ** (np.arange(-80, 120) / 40.0), np.geomspace(1e3, 1e7, 40)])
_BOTH = frozenset((OURS, THEIRS))


@dataclass(frozen=True)
class Proof:
    """ε at δ under a relation, the code that proved it and how."""

    epsilon: float
    delta: float
    relation: str
    authors: frozenset[str]
    by: str

    @property
    def whose(self) -> str:
        """The authors in words."""
        return " and ".join(sorted(self.authors))


@dataclass(frozen=True)
class _Curve:
    epsilon: Callable[[float], float]  # of δ
    authors: frozenset[str]
    by: str


def prove(event: object, *, delta: float, relation: str) -> Proof:
    """Prove ε of an event (JSON) at ``delta``; ``NoRule`` where nothing here does, ``ValueError`` for no event.

    >>> step = {"event": "poisson", "rate": 0.01, "inner": {"event": "gaussian", "noise_multiplier": 1.1}}
    >>> proof = prove({"event": "repeated", "inner": step, "count": 1000}, delta=1e-5, relation="add-remove")
    >>> round(proof.epsilon, 2), proof.by
    (1.52, 'privacy-loss distributions')
    """
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0.0 < delta < 1.0:
        raise ValueError(f"delta={delta!r}: must be strictly between 0 and 1.")
    parts = take_apart(event, relation)
    rest = delta - parts.failure
    if rest <= 0.0 or 2.0 * parts.slack > rest:
        raise NoRule("what may fail, or the distance of the noise to the stated one, uses up δ")
    worst = Proof(parts.upfront, delta, relation, frozenset((OURS,)), "a sum of ε that were proved before")
    authors = frozenset[str]()
    for branch in parts.branches:
        if not branch:
            continue
        curve = _curve(branch, relation, rest)
        authors |= curve.authors
        epsilon = _with_slack(curve.epsilon, rest, parts.slack) + parts.upfront - math.log1p(-parts.failure)
        if epsilon >= worst.epsilon:
            worst = Proof(epsilon, delta, relation, curve.authors, curve.by)
    if not math.isfinite(worst.epsilon):
        raise NoRule("no finite ε at this δ is found")
    return replace(worst, authors=worst.authors | authors)


def _with_slack(epsilon: Callable[[float], float], delta: float, slack: float) -> float:
    """An ε with δ(ε) + (1 + e^ε)·slack ≤ δ: a run within τ of an (ε, δ) one is (ε, δ + (1 + e^ε)τ)."""
    value = epsilon(delta)
    if slack == 0.0:
        return value
    for _ in range(80):
        rest = delta - (1.0 + math.exp(min(value, 700.0))) * slack
        following = epsilon(rest) if rest > 0.0 else math.inf
        if following <= value or math.isinf(following):
            return max(following, value)
        value = following * (1.0 + 1e-9)
    return math.inf


def _curve(branch: Branch, relation: str, delta: float) -> _Curve:
    factor = 2.0 if relation == "replace-one" else 1.0
    releases = dict(branch)
    rounds = [release for release in releases if isinstance(release, RandomRounds)]
    inside = [release for each in rounds for release, _ in each.inner]
    if any(isinstance(release, ZCDP | Selected) for release in [*releases, *inside]):
        return _renyi(branch, relation, factor)
    if len(rounds) > 1 or any(releases[each] > 1 for each in rounds):
        raise NoRule("random rounds more than once are not averaged here")
    others = tuple((release, count) for release, count in branch if not isinstance(release, RandomRounds))
    law = rounds[0].law if rounds else ((1, 1.0),)
    inner = rounds[0].inner if rounds else ()
    if all(isinstance(release, Gaussian) for release, _ in (*others, *inner)):
        return _closed_form(others, inner, law, factor)
    return _distributions(others, inner, law, relation, factor, delta)


def _square(branch: Branch, factor: float) -> float:
    """μ² of a branch: exact for un-sampled Gaussians, a central limit for the rest, which only chooses the grid."""
    total = 0.0
    for release, count in branch:
        if isinstance(release, Gaussian):
            total += count * (factor / release.z) ** 2
        elif isinstance(release, Pure):
            total += count * release.epsilon**2
        elif isinstance(release, Sampled | Allocated):
            one = _square(((release.base, 1),), factor)
            hidden = release.rate**2 if isinstance(release, Sampled) else 1.0 / release.steps
            total += count * min(one, hidden * math.expm1(min(one, 600.0)))
    return total


def _closed_form(others: Branch, inner: Branch, law: tuple[tuple[int, float], ...], factor: float) -> _Curve:
    """δ(ε) = E_R[δ of μ_R], μ_R² = Σ(Δ/σ)²: adaptive Gaussian releases are one (Dong, Roth, Su 2022)."""
    base, more = _square(others, factor), _square(inner, factor)
    weights = np.array([chance for _, chance in law])
    mus = np.sqrt([max(base + more * rounds, 1e-300) for rounds, _ in law])

    def delta_at(epsilon: float) -> float:
        at = np.array([epsilon])
        return math.fsum(w * float(gaussian_delta(mu, at)[0]) for w, mu in zip(weights, mus, strict=True))

    by = "the Gaussian profile in closed form" + (", averaged over rounds" if len(law) > 1 else "")
    return _Curve(lambda delta: _least(delta_at, delta, float(mus.max())), frozenset((OURS,)), by)


def _least(delta_at: Callable[[float], float], delta: float, mu: float) -> float:
    """The least ε ≥ 0 with δ(ε) ≤ ``delta``, from above, by halving an interval that ends at Chernoff's bound."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * (mu / 2.0 + math.sqrt(2.0 * math.log(1.0 / delta)))
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
        if high - low <= 1e-10 * high:
            break
    return high


def _distributions(
    others: Branch, inner: Branch, law: tuple[tuple[int, float], ...], relation: str, factor: float, delta: float
) -> _Curve:
    most = max(rounds for rounds, _ in law)
    number = sum(count for _, count in others) + most * sum(count for _, count in inner)
    rawest = max((_rawest(release, factor) for release, _ in (*others, *inner)), default=0.0)
    mu = math.sqrt(_square(others, factor) + most * _square(inner, factor))
    if number > _MOST_RELEASES:
        raise NoRule(f"more than {_MOST_RELEASES} releases are not composed here")
    if max(mu, rawest) > _LARGEST_LOSS:
        raise NoRule("the noise is so small that the grids do not hold the losses")
    # Connecting dots adds at most step²/4 to the variance of each release: a hundredth of that of all of them.
    step = min(max(min(mu / 500.0, mu / (5.0 * math.sqrt(number))), _FINEST), _COARSEST)
    tail = min(1e-15, delta * 1e-6)

    def composed(branch: Branch, start: Losses | None = None) -> Losses | None:
        total = start
        for release, count in branch:
            many = one_loss(release, relation, step, delta).times(count, tail)
            total = many if total is None else total.then(many, tail)
        return total

    fixed = composed(others)
    if not inner:
        if fixed is None:
            raise NoRule("nothing was released")
        return _Curve(fixed.epsilon, fixed.authors, "privacy-loss distributions")
    parts, before = [], 0
    for rounds, weight in _grouped(law):
        if rounds > before:
            fixed, before = composed(tuple((r, c * (rounds - before)) for r, c in inner), fixed), rounds
        if fixed is not None and weight > 0.0:
            parts.append((weight, fixed))

    def delta_at(epsilon: float) -> float:
        return math.fsum(weight * part.delta(epsilon) for weight, part in parts)

    def epsilon_at(target: float) -> float:
        if delta_at(0.0) <= target:
            return 0.0
        low, high = 0.0, max(part.epsilon(target) for _, part in parts)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2.0
            low, high = (middle, high) if delta_at(middle) > target else (low, middle)
        return high

    authors = frozenset[str]((OURS,)).union(*(part.authors for _, part in parts))
    return _Curve(epsilon_at, authors, "privacy-loss distributions, averaged over rounds")


def _rawest(release: Release, factor: float) -> float:
    """Δ/σ of the least noisy release inside, whatever sampling does for it."""
    base = release.base if isinstance(release, Sampled | Allocated) else release
    if isinstance(base, Gaussian):
        return factor / base.z
    return base.epsilon if isinstance(base, Pure) else 0.0


def _grouped(law: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """At most so many rounds: each group counts as its largest, so ε can only grow."""
    size = math.ceil(len(law) / _MOST_ROUNDS)
    groups = [law[start : start + size] for start in range(0, len(law), size)]
    return [(group[-1][0], math.fsum(chance for _, chance in group)) for group in groups]


def _renyi(branch: Branch, relation: str, factor: float) -> _Curve:
    from dp_accounting import rdp

    total = np.zeros_like(_ORDERS)
    for release, count in branch:
        total = total + count * _divergences(release, relation, factor)
    usable = np.isfinite(total)

    def epsilon(delta: float) -> float:
        return float(rdp.compute_epsilon(_ORDERS[usable], total[usable], delta)[0])

    if not usable.any():
        raise NoRule("no order has a finite Rényi divergence")
    return _Curve(epsilon, _BOTH, "Rényi divergences")


def _divergences(release: Release, relation: str, factor: float) -> Floats:
    a = _ORDERS
    match release:
        case Gaussian(z=z):
            return a * (factor / z) ** 2 / 2.0
        case ZCDP(rho=rho):
            return a * rho
        case Pure(epsilon=e):  # randomised response is the worst of all
            return np.asarray((np.logaddexp(a * e, (1.0 - a) * e) - np.logaddexp(0.0, e)) / (a - 1.0))
        case RandomRounds(inner=inner, law=law):
            one = (a - 1.0) * sum(
                (count * _divergences(each, relation, factor) for each, count in inner), np.zeros_like(a)
            )
            logs = [math.log(chance) + rounds * one for rounds, chance in law if chance > 0.0]
            return np.asarray(np.logaddexp.reduce(logs, axis=0) / (a - 1.0))
    return _by_dp_accounting(_translated(release, factor), relation)


def _by_dp_accounting(event: Any, relation: str) -> Floats:
    from dp_accounting import NeighboringRelation, UnsupportedEventError, dp_event, rdp

    fixed = isinstance(event, dp_event.SampledWithoutReplacementDpEvent)
    if (relation == "replace-one") != fixed and not isinstance(event, dp_event.RepeatAndSelectDpEvent):
        raise NoRule(f"Rényi divergences of these samples are not known under {relation}")
    neighbours = NeighboringRelation.REPLACE_ONE if fixed else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = rdp.RdpAccountant(list(_ORDERS[_ORDERS <= 4096.0]), neighbours)
    try:
        accountant.compose(event)
    except UnsupportedEventError:
        raise NoRule("dp-accounting has no Rényi rule for this release") from None
    curve = np.full_like(_ORDERS, np.inf)
    curve[: len(accountant.rdp)] = np.asarray(accountant.rdp)
    return curve


def _translated(release: Release, factor: float) -> Any:
    """The event of dp-accounting; its Rényi accountant takes σ/Δ, ours are σ/C, hence the factor."""
    from dp_accounting import dp_event as theirs

    match release:
        case Gaussian(z=z):
            return theirs.GaussianDpEvent(z / factor)
        case ZCDP(rho=rho):
            return theirs.ZCDpEvent(rho)
        case Pure(epsilon=epsilon):
            return theirs.ZCDpEvent(epsilon**2 / 2.0)
        case Sampled(law="poisson", rate=rate, base=Gaussian(z=z)) if factor == 1.0:
            return theirs.PoissonSampledDpEvent(rate, theirs.GaussianDpEvent(z))
        case Selected(inner=inner, mean=mean, shape=shape):
            parts = [theirs.SelfComposedDpEvent(_translated(each, factor), count) for each, count in inner]
            return theirs.RepeatAndSelectDpEvent(theirs.ComposedDpEvent(parts), mean, shape)
    raise NoRule(f"no Rényi divergence of a {type(release).__name__} release is known here")
