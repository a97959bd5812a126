"""The second accountant: ε of the same events by other code, and whose code that is.

Its privacy-loss distributions take Gaussian releases, un-sampled or Poisson-sampled, and pure ones; its Rényi
accountant takes zCDP releases and private search. Both accountants share the walk over compositions
(:mod:`quietgrad.core.accounting.composition`) and no formula. Rényi curves of sampled Gaussians are not used here,
because ours come from dp-accounting: they would be no second proof. Events that dp-accounting has no rule for
get none, except epochs of random allocation. Their losses are computed here in another way than ours, by one power
of one transform on an even grid, and dp-accounting composes them.

Every distribution carries its authors: the names of the code that made it. A composition has the authors of all its
parts, and a proof those of what it was read from, so a proof with a part of ours cannot be called dp-accounting's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.composition import (
    AccountantRefusal,
    approximate_mu,
    bisect,
    count_releases,
    parallel_branches,
    total_failure,
    total_slack,
    total_upfront,
)
from quietgrad.core.accounting.events import (
    ZCDP,
    AllocationSampled,
    Composed,
    Event,
    Gaussian,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    RepeatAndSelect,
    Repeated,
    composed,
    repeated,
)
from quietgrad.core.noise.mechanisms import Mechanism

_LARGEST_LOSS = 40.0  # Δ/σ of a release or, roughly, of all: beyond it the grids would fill the memory
_MOST_RELEASES = 10**6  # kinds of release times how often: un-sampled Gaussians are one, however many
_MOST_ROUNDS = 24  # each is a composition of its own
_MOST_CHOICES = 16
_MOST_ADDED = 10**8  # numbers of a matrix of correlated noise
_MOST_KINDS = 64
_ALLOCATION_POINTS = 1 << 21
_FINEST, _COARSEST = 1e-7, 1e-4  # steps of a grid
_ORDERS = tuple(1.0 + 10 ** (k / 40.0) for k in range(-80, 161))


DP_ACCOUNTING = f"dp-accounting {version('dp-accounting')}"
OURS = "quietgrad"


@dataclass(frozen=True)
class IndependentProof:
    """ε by a second derivation, the authors of its code and its method, or ``None`` and the reason.

    ``authors`` names the code of every part of the proof, or of the attempt where no finite ε was found.
    """

    epsilon: float | None
    authors: frozenset[str]
    by: str = ""
    reason: str = ""

    @property
    def foreign(self) -> bool:
        """Whether no part of the proof is quietgrad's own code."""
        return self.epsilon is not None and OURS not in self.authors

    @property
    def how(self) -> str:
        """The authors of the proof and its method, in words.

        >>> IndependentProof(1.0, frozenset((OURS, "dp-accounting 0.6.0")), "distributions").how
        'quietgrad itself by a second derivation, composed by dp-accounting 0.6.0, distributions'
        """
        others = " and ".join(sorted(self.authors - {OURS}))
        origin = "quietgrad itself by a second derivation" if OURS in self.authors else ""
        whose = f"{origin}, composed by {others}" if origin and others else origin or others or DP_ACCOUNTING
        return f"{whose}, {self.by}" if self.by else whose


@dataclass(frozen=True)
class _Losses:
    """A privacy-loss distribution of dp-accounting's kind, and the authors of what is in it."""

    distribution: Any
    authors: frozenset[str]

    def times(self, count: int, tail: float) -> _Losses:
        if count == 1:
            return self
        return _Losses(
            self.distribution.self_compose(count, tail_mass_truncation=tail), self.authors | {DP_ACCOUNTING}
        )

    def then(self, other: _Losses, tail: float) -> _Losses:
        composed_losses = self.distribution.compose(other.distribution, tail_mass_truncation=tail)
        return _Losses(composed_losses, self.authors | other.authors | {DP_ACCOUNTING})

    def epsilon(self, delta: float) -> float:
        return float(self.distribution.get_epsilon_for_delta(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.distribution.get_delta_for_epsilon(epsilon))


Floats = npt.NDArray[np.float64]
Curve = Callable[[float], float]
"""δ ↦ ε."""


@dataclass(frozen=True)
class _Proved:
    """A curve δ ↦ ε, its authors and its method."""

    curve: Curve
    authors: frozenset[str]
    by: str


class _NoRule(Exception):
    """dp-accounting cannot prove this event."""


def sensitivity_again(mechanism: Mechanism) -> float | None:
    """The sensitivity s of noise that is correlated over a run, added up from the coefficients of S.

    The theorem (:mod:`quietgrad.core.noise.correlated`) asks that these do not rise; then no choice of releases of
    one record moves S·sums by more than its columns do. ``None`` if they do rise, or are too many to add up.
    """
    strategy = mechanism.strategy()
    if strategy is None or len(strategy[0]) * len(strategy[1]) > _MOST_ADDED:
        return None
    c, columns = strategy
    if (c < 0.0).any() or (np.diff(c) > 1e-15).any():
        return None
    moved = sum(np.concatenate([np.zeros(first), c[: len(c) - first]]) for first in columns)
    return float(np.linalg.norm(moved))


def second_proof(event: Event, *, delta: float, relation: Relation) -> IndependentProof:
    """Prove ε of ``event`` at ``delta`` by a second derivation, and name the authors of its code.

    >>> from quietgrad.core.accounting.events import poisson_gaussian
    >>> proof = second_proof(poisson_gaussian(0.01, 1.1, 1000), delta=1e-5, relation=Relation.ADD_REMOVE)
    >>> round(proof.epsilon, 2), proof.how.split(",")[1]
    (1.52, ' privacy-loss distributions')
    >>> sampled = PoissonSampled(0.1, ZCDP(0.1, Relation.ADD_REMOVE))
    >>> second_proof(sampled, delta=1e-5, relation=Relation.ADD_REMOVE).reason
    'it has no rule for a sample of zcdp releases'
    """
    slack, failure, no_authors = total_slack(event), total_failure(event), frozenset[str]()
    rest = delta - failure
    if rest <= 0.0:
        return IndependentProof(None, no_authors, reason="the failures listed use up δ")
    # Without a release to account for, ε is a sum that the shared walk adds up: ours.
    worst = IndependentProof(0.0, frozenset((OURS,)))
    try:
        upfront = total_upfront(event, relation)
        worst = replace(worst, epsilon=upfront)
        choices = parallel_branches(event)
        if len(choices) > _MOST_CHOICES:
            raise _NoRule(f"more than {_MOST_CHOICES} choices of parallel parts are not tried here")
        largest, authors = upfront, no_authors
        for core in choices:
            proved = _curve(core, relation, rest)
            authors |= proved.authors
            epsilon = _with_slack(proved.curve, rest, slack) + upfront - math.log1p(-failure)
            if epsilon >= largest:
                largest, worst = epsilon, IndependentProof(epsilon, proved.authors, proved.by)
    except (_NoRule, AccountantRefusal) as refusal:
        return IndependentProof(None, no_authors, reason=str(refusal))
    except (ValueError, TypeError, ArithmeticError, MemoryError) as error:
        return IndependentProof(None, no_authors, reason=f"it fails on these numbers ({type(error).__name__})")
    if not math.isfinite(largest):
        return replace(worst, epsilon=None, reason="it finds no finite ε at this δ")
    # That the others are no worse is part of the proof, so their authors are too.
    return replace(worst, authors=worst.authors | authors)


def verifier_proof(event: Event, *, delta: float, relation: Relation) -> IndependentProof | None:
    """Prove ε by ``quietgrad-verify``, which shares no code with ours. Return ``None`` if it is not installed."""
    if find_spec("quietgrad_verify") is None:
        return None
    from quietgrad_verify import NoRule, prove

    try:
        proof = prove(json.loads(json.dumps(event.to_json())), delta=delta, relation=str(relation))
    except NoRule as reason:
        return IndependentProof(None, frozenset(("quietgrad-verify",)), reason=str(reason))
    except (ValueError, TypeError, ArithmeticError, MemoryError) as error:
        words = f"it fails on these numbers ({type(error).__name__})"
        return IndependentProof(None, frozenset(("quietgrad-verify",)), reason=words)
    return IndependentProof(proof.epsilon, proof.authors, proof.by)


def _with_slack(epsilon: Curve, delta: float, slack: float) -> float:
    """Return the least ε with δ(ε) + (1 + e^ε)·slack ≤ δ, searched from below. Without slack, skip the search."""
    value = epsilon(delta)
    if slack == 0.0:
        return value
    for _ in range(60):
        rest = delta - (1.0 + math.exp(min(value, 700.0))) * slack
        following = epsilon(rest) if rest > 0.0 else math.inf
        if following <= value * (1.0 + 1e-9) or math.isinf(following):
            return following
        value = following
    return math.inf


def _curve(core: Event, relation: Relation, delta: float) -> _Proved:
    """Return the curve δ ↦ ε of one choice of parallel parts, the authors of its code, and its method."""
    releases, factor = count_releases(core), sensitivity_factor(relation)
    if len(releases) > _MOST_KINDS or sum(releases.values()) > _MOST_RELEASES:
        raise _NoRule(f"more than {_MOST_RELEASES} releases, or {_MOST_KINDS} kinds of them, are not composed here")
    if not max(approximate_mu(core, factor), _rawest(core.to_json(), factor)) <= _LARGEST_LOSS:
        raise _NoRule("the noise is so small that its grids do not hold the losses")
    if any(isinstance(part, ZCDP | RepeatAndSelect) for part in releases):
        from dp_accounting import NeighboringRelation, rdp

        accountant = rdp.RdpAccountant(list(_ORDERS), NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(_translated(core, relation))
        return _Proved(accountant.get_epsilon, frozenset((DP_ACCOUNTING,)), "Rényi divergences")
    rounds = [part for part in releases if isinstance(part, RandomNumberOfReleases)]
    if not rounds:
        losses = _losses(core, relation, delta, _step(core, relation))
        return _Proved(losses.epsilon, losses.authors, "privacy-loss distributions")
    if len(rounds) > 1 or releases[rounds[0]] > 1:
        raise _NoRule("random rounds more than once are not averaged here")
    others = [repeated(part, count) for part, count in releases.items() if part is not rounds[0]]
    return _averaged(rounds[0], others, relation, delta)


def _rawest(event: object, factor: float) -> float:
    """Δ/σ of the least noisy release inside an event as JSON, whatever sampling does for it."""
    if isinstance(event, list):
        return max((_rawest(part, factor) for part in event), default=0.0)
    if not isinstance(event, dict):
        return 0.0
    own_ratio = factor / event["noise_multiplier"] if "noise_multiplier" in event else 0.0
    stated = max(event.get("epsilon", 0.0), math.sqrt(2.0 * event.get("rho", 0.0)))
    return max(own_ratio, float(stated), _rawest(list(event.values()), factor))


def _step(core: Event, relation: Relation) -> float:
    return min(max(approximate_mu(core, sensitivity_factor(relation)) / 500.0, _FINEST), _COARSEST)


def _losses(core: Event, relation: Relation, delta: float, step: float) -> _Losses:
    """The privacy-loss distribution of a composition without random rounds."""
    total, tail = None, min(1e-15, delta * 1e-6)
    for part, count in count_releases(core).items():
        many = _one_loss(part, relation, step, delta).times(count, tail)
        total = many if total is None else total.then(many, tail)
    if total is None:
        raise _NoRule("nothing was released")
    return total


@lru_cache(maxsize=8)
def _one_loss(part: Event, relation: Relation, step: float, delta: float) -> _Losses:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    grid = {"value_discretization_interval": step}
    match part:
        case Gaussian() | PoissonSampled():
            rate, inner = 1.0, list(count_releases(part.inner if isinstance(part, PoissonSampled) else part))
            if isinstance(part, PoissonSampled):
                rate = part.rate
            if len(inner) != 1 or not isinstance(inner[0], Gaussian):
                kinds = " and ".join(sorted({each.kind for each in inner}))
                raise _NoRule(f"it has no rule for a sample of {kinds} releases")
            replaced = relation is Relation.REPLACE_ONE
            neighbours = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
            gaussian = pld.from_gaussian_mechanism(
                inner[0].noise_multiplier,
                sampling_prob=rate,
                neighboring_relation=neighbours,
                log_mass_truncation_bound=min(-50.0, math.log(delta) - 20.0),
                **grid,
            )
            return _Losses(gaussian, frozenset((DP_ACCOUNTING,)))
        case Pure(epsilon=epsilon, relation=proved):
            if proved is not relation:
                raise _NoRule(f"a release was proved under {proved}, and {relation} is claimed")
            pure = pld.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, 0.0), **grid)
            return _Losses(pure, frozenset((DP_ACCOUNTING,)))
        case AllocationSampled(steps_per_epoch=steps, inner=Gaussian(noise_multiplier=z)):
            if relation is not Relation.ADD_REMOVE:
                raise _NoRule("random allocation is understood under add-remove alone")
            return _Losses(_allocation(1.0 / z, steps, step, delta), frozenset((OURS,)))
    raise _NoRule(f"it has no rule for a {part.kind} release here")


def _allocation(mu: float, steps: int, step: float, delta: float) -> Any:
    """The losses of one epoch: the law of S = (Y₁ + … + Y_T)/T, Y = e^{μG − μ²/2}, under Q; log S is the loss.

    Y is rounded to an even grid so that each cell keeps its mass and its mean, and its spectrum raised to the power
    T. What P has above the grid counts as infinite.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy.special import ndtr, ndtri

    far = math.exp(mu * (mu / 2.0 - float(ndtri(delta * 1e-7))))
    reach = steps + 10.0 * math.sqrt(steps * math.expm1(mu * mu)) + 1.2 * far
    h = reach / _ALLOCATION_POINTS
    x = h * np.arange(math.ceil(far / h) + 2)
    with np.errstate(divide="ignore"):
        g = np.log(x) / mu + mu / 2.0

    def between(g: Floats) -> Floats:
        return np.asarray(np.where(g[:-1] > 0.0, ndtr(-g[:-1]) - ndtr(-g[1:]), ndtr(g[1:]) - ndtr(g[:-1])))

    q, p = between(g), between(g - mu)
    right = np.clip((p - x[:-1] * q) / h, 0.0, q)
    mass = np.zeros(_ALLOCATION_POINTS)
    mass[: q.size] += q - right
    mass[1 : q.size + 1] += right
    mass[q.size] += ndtr(-g[-1])
    spectrum = np.fft.rfft(mass)
    law = np.maximum(np.fft.irfft(np.exp(steps * np.log(spectrum)), _ALLOCATION_POINTS), 0.0)
    loss = np.log(h / steps * np.arange(1, law.size))

    def rounded(loss: Floats, mass: Floats, infinite: float) -> Any:
        left = np.floor(loss / step).astype(np.int64)
        share = np.expm1(left * step - loss) / math.expm1(-step)
        first = int(left.min())
        size = int(left.max()) - first + 2
        probabilities = np.bincount(left - first, mass * (1.0 - share), size)
        probabilities += np.bincount(left - first + 1, mass * share, size)
        return pld_pmf.DensePLDPmf(step, first, probabilities, infinite, True)

    present = rounded(loss, law[1:] * np.exp(loss), float(ndtr(mu - g[-1])))
    return pld.PrivacyLossDistribution(present, rounded(-loss, law[1:], float(law[0])))


def _averaged(rounds: RandomNumberOfReleases, others: list[Event], relation: Relation, delta: float) -> _Proved:
    """ε of δ(ε) = E[δ_R(ε)]: R was drawn before the run, so by convexity nothing is lost if it is published."""
    step = _step(composed([*others, rounds.inner]), relation)
    parts = []
    for count, weight in _grouped(rounds.law, _MOST_ROUNDS):
        here = [*others, *([repeated(rounds.inner, count)] if count else [])]
        if here and weight > 0.0:
            parts.append((weight, _losses(composed(here), relation, delta, step)))

    def epsilon(target: float) -> float:
        def at(value: float) -> float:
            return math.fsum(weight * part.delta(value) for weight, part in parts)

        if at(0.0) <= target:
            return 0.0
        most = max(part.epsilon(target) for _, part in parts)
        return bisect(lambda value: at(value) > target, 0.0, most, lambda high: 1e-6 * high)[1]

    authors = frozenset[str]().union(*(part.authors for _, part in parts))
    return _Proved(epsilon, authors, "privacy-loss distributions, averaged over rounds")


def _grouped(law: tuple[tuple[int, float], ...], groups: int) -> list[tuple[int, float]]:
    """Return a law of at most so many rounds: each group counts as its largest, so ε can only grow.

    >>> _grouped(((1, 0.25), (2, 0.25), (3, 0.5)), 2)
    [(2, 0.5), (3, 0.5)]
    """
    size, ordered = math.ceil(len(law) / groups), sorted(law)
    chunks = [ordered[k : k + size] for k in range(0, len(ordered), size)]
    return [(chunk[-1][0], math.fsum(weight for _, weight in chunk)) for chunk in chunks]


def _translated(event: Event, relation: Relation) -> Any:
    from dp_accounting import dp_event as theirs

    # Its Rényi accountant takes z as σ/Δ whatever the relation: ours is σ/C, hence the division by Δ/C.
    factor = sensitivity_factor(relation)
    match event:
        case Gaussian(noise_multiplier=z):
            return theirs.GaussianDpEvent(z / factor)
        case ZCDP(rho=rho, relation=proved) if proved is relation:
            return theirs.ZCDpEvent(rho)
        case Pure(epsilon=epsilon, relation=proved) if proved is relation:
            return theirs.ZCDpEvent(epsilon**2 / 2.0)  # pure ε is ε²/2-zCDP
        case Repeated(inner=inner, count=count):
            return theirs.SelfComposedDpEvent(_translated(inner, relation), count)
        case Composed(parts=parts):
            return theirs.ComposedDpEvent([_translated(part, relation) for part in parts])
        case RepeatAndSelect(inner=inner, mean=mean, shape=shape):
            return theirs.RepeatAndSelectDpEvent(_translated(inner, relation), mean, shape)
    raise _NoRule(f"it has no rule for a {event.kind} release under {relation}")
