"""Three accountants without a grid: Rényi (with zCDP in closed form), exact Gaussian, and pure DP.

*Rényi.* An event is (α, r(α))-RDP at every order α of a list; composition adds curves, parallel parts take their
maximum, random rounds R seen by the observer average e^{(α−1)r}, and a curve becomes ε by the conversion of
Canonne, Kamath, Steinke (2020, Prop. 12): ε = r(α) + log(1 − 1/α) − log(δα)/(α − 1), at the best order.

Sampled Gaussians are taken from dp-accounting, with one trap handled here and nowhere else: its Rényi accountant
under replace-one wants σ/Δ while its events are documented as σ/C, so it is given z ÷ (Δ/C).

*Pure.* The ε of releases that are ε-DP with δ = 0 add up.

*Gaussian.* This accountant is exact for un-sampled Gaussian releases. Adaptive releases of sums with multipliers
z_t are, together, as revealing as one draw of N(0, 1) or N(μ, 1) with μ² = Σ (Δ_t/σ_t)² (Dong, Roth, Su 2022, Cor.
3.3), and that pair's profile is known in closed form (Balle, Wang 2018, Thm. 8): δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2
− ε/μ). Nothing is rounded, nothing is loose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.composition import (
    AccountantRefusal,
    bisect,
    check_relation,
    count_releases,
    fold,
    root_search,
)
from quietgrad.core.accounting.events import (
    ZCDP,
    Composed,
    Event,
    FailureProbability,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    RepeatAndSelect,
    Repeated,
    TotalVariationSlack,
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
        a = self.orders
        return max(0.0, float(np.min(self.curve + np.log1p(-1 / a) - np.log(delta * a) / (a - 1))))

    def delta(self, epsilon: float) -> float:
        a = self.orders
        return min(1.0, math.exp(float(np.min((a - 1) * (self.curve - epsilon + np.log1p(-1 / a)) - np.log(a)))))


def zcdp_profile(event: Event, relation: Relation, factor: float) -> RenyiProfile:
    """Return the profile of releases that are all zCDP: Gaussian, pure and ρ-zCDP ones, un-sampled."""

    def leaf(part: Event) -> float:
        match part:
            case ZCDP(rho=rho, relation=proved):
                check_relation(part, proved, relation)
                return rho
            case Gaussian(noise_multiplier=z):
                return (factor / z) ** 2 / 2
            case Pure(epsilon=epsilon, relation=proved):
                check_relation(part, proved, relation)
                return epsilon**2 / 2
            case RandomNumberOfReleases(inner=inner, law=law):
                return max(number for number, _ in law) * fold(inner, leaf)
            case TotalVariationSlack() | FailureProbability() | Upfront():
                return 0.0
        raise AccountantRefusal(part, f"a {part.kind} event is not zCDP")

    return RenyiProfile(_FINE_ORDERS, fold(event, leaf) * _FINE_ORDERS, "zcdp")


def rdp_profile(event: Event, relation: Relation, factor: float) -> RenyiProfile:
    """Return the profile by curves over a list of orders: the widest accountant, and the loosest."""
    curve = _curve(event, relation, factor)
    return RenyiProfile(_ORDERS, np.where(curve >= 0.0, curve, np.inf), "rdp")


def _curve(event: Event, relation: Relation, factor: float) -> Array:
    a = _ORDERS

    def leaf(part: Event) -> Array:
        match part:
            case Gaussian(noise_multiplier=z):
                return a * (factor / z) ** 2 / 2
            case ZCDP(rho=rho, relation=proved):
                check_relation(part, proved, relation)
                return a * rho
            case Pure(epsilon=e, relation=proved):
                check_relation(part, proved, relation)
                # randomised response: log[(e^{αε} + e^{(1−α)ε})/(1 + e^ε)]/(α − 1)
                return np.asarray((np.logaddexp(a * e, (1 - a) * e) - np.logaddexp(0.0, e)) / (a - 1))
            case PoissonSampled() | FixedSizeSampled():
                return _sampled_curve(part, relation, factor)
            case RandomNumberOfReleases(inner=inner, law=law):
                one = (a - 1) * _curve(inner, relation, factor)
                logs = [math.log(weight) + number * one for number, weight in law if weight > 0]
                return np.asarray(np.logaddexp.reduce(logs, axis=0) / (a - 1))
            case RepeatAndSelect(inner=inner, mean=mean, shape=shape):
                return _select(_curve(inner, relation, factor), mean, shape)
            case TotalVariationSlack() | FailureProbability() | Upfront():
                return np.zeros_like(a)
        raise AccountantRefusal(part, f"a {part.kind} event has no Rényi curve")

    return fold(event, leaf)


def _sampled_curve(event: PoissonSampled | FixedSizeSampled, relation: Relation, factor: float) -> Array:
    releases = list(count_releases(event.inner))
    if event.rate == 1.0:
        return _curve(event.inner, relation, factor)
    if len(releases) != 1 or not isinstance(releases[0], Gaussian):
        raise AccountantRefusal(event, "Rényi curves are known for samples of Gaussian releases only")
    noise = releases[0].noise_multiplier / factor
    if isinstance(event, FixedSizeSampled):
        if relation is not Relation.REPLACE_ONE:
            raise AccountantRefusal(event, "Rényi curves of fixed-size samples are known under replace-one only")
        return _dp_accounting_curve(event.rate, (event.n, event.batch_size), noise)
    if relation is Relation.ADD_REMOVE:
        return _dp_accounting_curve(event.rate, None, noise)
    if not isinstance(event.inner, Gaussian):
        raise AccountantRefusal(
            event, "under replace-one only Poisson samples of a single Gaussian release are known"
        )
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
    """Rényi divergences of ``loss_distribution.PoissonReplacePair`` by the trapezoidal rule.

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

    A truncated law of mean 1 is K = 1 for certain and costs one run. A Poisson K of mean 1 is not: it is 0
    or more than 1 in 63 % of all cases, and the result tells of that too.
    """
    a = _ORDERS
    if math.isinf(shape):
        single = RenyiProfile(a, curve, "rdp")
        extra = np.array([mean * single.delta(math.log1p(1 / (order - 1))) for order in a])
    elif mean == 1.0:
        return curve
    else:

        def mean_of(log_gamma: float) -> float:
            odds = math.expm1(-log_gamma)  # 1/γ − 1
            return odds / -log_gamma if shape == 0.0 else shape * odds / -math.expm1(shape * log_gamma)

        # γ of the truncated negative binomial law with E[K] = mean, from below. E[K] falls from ∞ to 1 as γ rises
        # to 1; the search is over −log γ and returns it from above.
        surprise = root_search(lambda x: mean_of(-x) - mean, math.log(mean)) * (1 + 1e-9)
        extra = np.full_like(a, (1 + shape) * np.min((1 - 1 / a) * curve + surprise / a))
    return np.asarray(curve + extra + math.log(mean) / (a - 1))


@dataclass(frozen=True)
class PureProfile:
    """ε-DP: the same ε at every δ."""

    total: float
    name: str = "pure"

    def epsilon(self, delta: float) -> float:
        return self.total

    def delta(self, epsilon: float) -> float:
        below = max(0.0, self.total - epsilon)
        return -math.expm1(-below) / (1 + math.exp(-self.total))


def pure_profile(event: Event, relation: Relation) -> PureProfile:
    """Return the sum of the ε of pure-DP releases. Refuses all others."""

    def leaf(part: Event) -> float:
        if not isinstance(part, Pure):
            raise AccountantRefusal(part, f"a {part.kind} event is not pure DP")
        check_relation(part, part.relation, relation)
        return part.epsilon

    return PureProfile(fold(event, leaf))


# Mixtures of more Gaussians than this are left to the PLD accountant, which mixes them by Fourier transform.
_MOST_COMPONENTS = 20_000


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) of N(0, 1) against N(μ, 1), in full relative precision."""
    if mu == 0.0:
        return 0.0
    above = float(log_ndtr(mu / 2 - epsilon / mu))
    below = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return -math.exp(above) * math.expm1(below - above) if below < above else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε ≥ 0 with δ(ε) ≤ ``delta`` for N(0, 1) against N(μ, 1)."""
    return GaussianProfile(((1.0, mu),)).epsilon(delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ whose Gaussian profile passes through (ε, δ); σ = Δ/μ is then the least noise."""
    log_delta = math.log(delta)
    guess = epsilon / math.sqrt(2 * (epsilon - log_delta))  # where Chernoff's ε(μ) is about right
    return root_search(
        lambda mu: (math.log(d) if (d := gaussian_delta(mu, epsilon)) > 0 else -math.inf) - log_delta, guess
    )


@dataclass(frozen=True)
class GaussianProfile:
    """The privacy profile of a mixture of Gaussian pairs; one component is plain μ-GDP."""

    components: tuple[tuple[float, float], ...]  # (weight, μ)
    name: str = "gaussian-exact"

    def delta(self, epsilon: float) -> float:
        """Σ wᵢ δ(ε, μᵢ): a Gaussian pair drawn at random, its index seen."""
        if len(self.components) == 1:
            return gaussian_delta(self.components[0][1], epsilon)
        weights, mus = np.array([pair for pair in self.components if pair[1] > 0.0]).T
        above = log_ndtr(mus / 2 - epsilon / mus)
        below = np.minimum(epsilon + log_ndtr(-mus / 2 - epsilon / mus), above)
        return float(np.dot(weights, -np.exp(above) * np.expm1(below - above)))

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``."""
        if self.delta(0.0) <= delta:
            return 0.0
        mu = max(mu for _, mu in self.components)
        most = mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta)))  # Chernoff: P(L > most) ≤ δ
        return bisect(lambda x: self.delta(x) > delta, 0.0, most, lambda at: 1e-13 * max(at, 1e-3))[1]


def gaussian_profile(event: Event, factor: float) -> GaussianProfile:
    """Return the exact profile of un-sampled Gaussian releases, also with random rounds.

    ``factor`` is Δ/C. Refuses (``AccountantRefusal``) every other event.
    """
    return GaussianProfile(tuple((weight, math.sqrt(square)) for weight, square in _squares(event, factor)))


def _squares(event: Event, factor: float) -> list[tuple[float, float]]:
    """The law of μ²: pairs (weight, μ²)."""
    match event:
        case Gaussian(noise_multiplier=z):
            return [(1.0, (factor / z) ** 2)]
        case Repeated(inner=inner, count=count):
            law = _squares(inner, factor)
            if len(law) > 1:  # each repetition draws anew
                raise AccountantRefusal(event, "the exact Gaussian accountant does not repeat random rounds")
            return [(weight, square * count) for weight, square in law]
        case Composed(parts=parts):
            law = [(1.0, 0.0)]
            for part in parts:
                other = _squares(part, factor)
                if len(law) * len(other) > _MOST_COMPONENTS:
                    raise AccountantRefusal(event, "too many random rounds for the exact Gaussian accountant")
                law = [(w * v, s + t) for w, s in law for v, t in other]
            return law
        case RandomNumberOfReleases(inner=inner, law=rounds):
            base = _squares(inner, factor)
            if len(base) > 1:
                raise AccountantRefusal(event, "the exact Gaussian accountant does not nest random rounds")
            return [(weight, base[0][1] * count) for count, weight in rounds]
    raise AccountantRefusal(event, "only un-sampled Gaussian releases are exactly Gaussian")
