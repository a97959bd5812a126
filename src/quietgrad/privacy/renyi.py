"""The Rényi accountant: zCDP in closed form, everything else by curves over orders.

An event is (α, r(α))-RDP at every order α of a list; composition adds curves, parallel parts take their maximum,
random rounds R seen by the observer average e^{(α−1)r}, and a curve becomes ε by the conversion of Canonne, Kamath,
Steinke (2020, Prop. 12): ε = r(α) + log(1 − 1/α) − log(δα)/(α − 1), at the best order.

Sampled Gaussians are taken from dp-accounting, with one trap handled here and nowhere else: its Rényi accountant
under replace-one wants σ/Δ while its events are documented as σ/C, so it is given z ÷ (Δ/C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.budget import Relation
from quietgrad.privacy.composition import CannotProve, bag, check_relation, root_search
from quietgrad.privacy.events import (
    ZCDP,
    Composed,
    Event,
    Failure,
    FixedSize,
    Gaussian,
    Laplace,
    Parallel,
    PerParty,
    Poisson,
    Pure,
    RandomRound,
    RepeatAndSelect,
    Repeated,
    Slack,
    Upfront,
)

Array = npt.NDArray[np.float64]

# zCDP curves are straight lines and cost nothing, so their orders are as good as continuous.
_FINE_ORDERS: Array = 1.0 + np.geomspace(1e-3, 1e7, 8001)
_ORDERS: Array = np.array(
    [1.0 + x / 10 for x in range(1, 100)]
    + list(range(11, 65))
    + [72, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768, 1024],
    dtype=np.float64,
)


@dataclass(frozen=True, eq=False)
class RenyiProfile:
    """The (ε, δ) consequences of a curve of Rényi divergences."""

    orders: Array
    curve: Array
    name: str

    def epsilon(self, delta: float) -> float:
        """ε at ``delta``, at the best order."""
        a = self.orders
        return max(0.0, float(np.min(self.curve + np.log1p(-1 / a) - np.log(delta * a) / (a - 1))))

    def delta(self, epsilon: float) -> float:
        """δ at ``epsilon``, at the best order."""
        a = self.orders
        return min(1.0, math.exp(float(np.min((a - 1) * (self.curve - epsilon + np.log1p(-1 / a)) - np.log(a)))))


def zcdp_profile(event: Event, relation: Relation, factor: float) -> RenyiProfile:
    """Return the profile of releases that are all zCDP: Gaussian, pure and ρ-zCDP ones, un-sampled."""
    return RenyiProfile(_FINE_ORDERS, _rho(event, relation, factor) * _FINE_ORDERS, "zcdp")


def rdp_profile(event: Event, relation: Relation, factor: float) -> RenyiProfile:
    """Return the profile by curves over a list of orders: the widest accountant, and the loosest."""
    curve = _curve(event, relation, factor)
    return RenyiProfile(_ORDERS, np.where(curve >= 0.0, curve, np.inf), "rdp")


def _rho(event: Event, relation: Relation, factor: float) -> float:
    match event:
        case ZCDP(rho=rho, relation=proved):
            check_relation(event, proved, relation)
            return rho
        case Gaussian(noise_multiplier=z):
            return (factor / z) ** 2 / 2
        case Laplace(noise_multiplier=z):
            return (factor / z) ** 2 / 2
        case Pure(epsilon=epsilon, relation=proved):
            check_relation(event, proved, relation)
            return epsilon**2 / 2
        case Repeated(inner=inner, count=count):
            return count * _rho(inner, relation, factor)
        case Composed(parts=parts):
            return math.fsum(_rho(part, relation, factor) for part in parts)
        case Parallel(parts=parts) | PerParty(parties=parts):
            return max(_rho(part, relation, factor) for part in parts)
        case RandomRound(inner=inner, law=law):
            return max(number for number, _ in law) * _rho(inner, relation, factor)
        case Slack() | Failure() | Upfront():
            return 0.0
    raise CannotProve(event, f"a {event.kind} event is not zCDP")


def _curve(event: Event, relation: Relation, factor: float) -> Array:
    a = _ORDERS
    match event:
        case Gaussian(noise_multiplier=z):
            return a * (factor / z) ** 2 / 2
        case ZCDP(rho=rho, relation=proved):
            check_relation(event, proved, relation)
            return a * rho
        case Pure(epsilon=e, relation=proved):
            check_relation(event, proved, relation)
            # randomised response: log[(e^{αε} + e^{(1−α)ε})/(1 + e^ε)]/(α − 1)
            return _array((np.logaddexp(a * e, (1 - a) * e) - np.logaddexp(0.0, e)) / (a - 1))
        case Laplace(noise_multiplier=z):
            e = factor / z
            near, far = np.log(a / (2 * a - 1)) + (a - 1) * e, np.log((a - 1) / (2 * a - 1)) - a * e
            return _array(np.logaddexp(near, far) / (a - 1))
        case Poisson() | FixedSize():
            return _sampled_curve(event, relation, factor)
        case Repeated(inner=inner, count=count):
            return count * _curve(inner, relation, factor)
        case Composed(parts=parts):
            return _array(np.sum([_curve(part, relation, factor) for part in parts], axis=0))
        case Parallel(parts=parts) | PerParty(parties=parts):
            return _array(np.max([_curve(part, relation, factor) for part in parts], axis=0))
        case RandomRound(inner=inner, law=law):
            one = (a - 1) * _curve(inner, relation, factor)
            logs = [math.log(weight) + number * one for number, weight in law if weight > 0]
            return _array(np.logaddexp.reduce(logs, axis=0) / (a - 1))
        case RepeatAndSelect(inner=inner, mean=mean, shape=shape):
            return _select(_curve(inner, relation, factor), mean, shape)
        case Slack() | Failure() | Upfront():
            return np.zeros_like(a)
    raise CannotProve(event, f"a {event.kind} event has no Rényi curve")


def _array(values: npt.ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def _sampled_curve(event: Poisson | FixedSize, relation: Relation, factor: float) -> Array:
    releases = list(bag(event.inner))
    if event.rate == 1.0:
        return _curve(event.inner, relation, factor)
    if len(releases) != 1 or not isinstance(releases[0], Gaussian):
        raise CannotProve(event, "Rényi curves are known for samples of Gaussian releases only")
    noise = releases[0].noise_multiplier / factor
    if isinstance(event, FixedSize):
        if relation is not Relation.REPLACE_ONE:
            raise CannotProve(event, "Rényi curves of fixed-size samples are known under replace-one only")
        return _dp_accounting_curve(event.rate, (event.n, event.batch_size), noise)
    if relation is Relation.ADD_REMOVE:
        return _dp_accounting_curve(event.rate, None, noise)
    if not isinstance(event.inner, Gaussian):
        raise CannotProve(event, "under replace-one only Poisson samples of a single Gaussian release are known")
    return _poisson_replace_curve(event.rate, 1 / noise)


@lru_cache(maxsize=256)
def _dp_accounting_curve(rate: float, size: tuple[int, int] | None, sigma_per_sensitivity: float) -> Array:
    from dp_accounting import NeighboringRelation, dp_event, rdp

    noise = dp_event.GaussianDpEvent(sigma_per_sensitivity)
    if size is None:
        accountant = rdp.RdpAccountant(_ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp_event.PoissonSampledDpEvent(rate, noise))
    else:
        accountant = rdp.RdpAccountant(_ORDERS, NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp_event.SampledWithoutReplacementDpEvent(*size, noise))
    return np.asarray(accountant.rdp, dtype=np.float64)


@lru_cache(maxsize=256)
def _poisson_replace_curve(rate: float, mu: float) -> Array:
    """Rényi divergences of ``pairs.PoissonReplacePair`` by the trapezoidal rule.

    D_α = log ∫ p^α q^{1−α} / (α − 1), p and q the mixtures with the record at ±m, m = μ/2. The integrand is
    analytic, its peaks are at most 2αm from 0 and no narrower than (1 + αm²)^{−1/2}: steps of a tenth of that leave
    rounding errors only. Orders that would need too many steps count as infinite, which can only loosen the bound.
    """
    m = mu / 2
    stay, move = math.log1p(-rate), math.log(rate) - m * m / 2
    curve = np.full_like(_ORDERS, np.inf)
    for i, order in enumerate(_ORDERS):
        step = 0.1 / math.sqrt(1 + order * m * m)
        reach = math.ceil((2 * order * m + 12) / step)
        if reach > 100_000:
            break
        t = step * np.arange(-reach, reach + 1)
        p, q = np.logaddexp(stay, move + m * t), np.logaddexp(stay, move - m * t)
        log_integrand = order * p - (order - 1) * q - t * t / 2
        largest = float(log_integrand.max())
        total = step / math.sqrt(2 * math.pi) * float(np.exp(log_integrand - largest).sum())
        curve[i] = (largest + math.log(total)) / (order - 1)
    return np.maximum(curve, 0.0)


def _select(curve: Array, mean: float, shape: float) -> Array:
    """The curve of the best of K runs (Papernot, Steinke 2022): Thm. 2, or Thm. 6 for a Poisson K.

    A truncated law of mean 1 is K = 1 for certain and costs one run. A Poisson K of mean 1 is not: it is 0 or more
    than 1 in 63 % of all cases, and who sees the result learns from that too.
    """
    a = _ORDERS
    if math.isinf(shape):
        single = RenyiProfile(a, curve, "rdp")
        extra = np.array([mean * single.delta(math.log1p(1 / (order - 1))) for order in a])
    elif mean == 1.0:
        return curve
    else:
        stop = _stopping_probability(mean, shape)
        extra = np.full_like(a, (1 + shape) * np.min((1 - 1 / a) * curve - math.log(stop) / a))
    return _array(curve + extra + math.log(mean) / (a - 1))


def _stopping_probability(mean: float, shape: float) -> float:
    """γ of the truncated negative binomial law with E[K] = ``mean``, from below."""

    def mean_of(log_gamma: float) -> float:
        odds = math.expm1(-log_gamma)  # 1/γ − 1
        return odds / -log_gamma if shape == 0.0 else shape * odds / -math.expm1(shape * log_gamma)

    # E[K] falls from ∞ to 1 as γ rises to 1; the search is over −log γ and returns it from above.
    return math.exp(-root_search(lambda x: mean_of(-x) - mean, math.log(mean)) * (1 + 1e-9))
