"""One interface for all accountants: the ε that a composition of events costs.

``account`` gives the number, ``prove`` the number with the name of the accountant that proved it, ``delta_of`` the
other coordinate. Every value is an upper bound with a proof behind it; no central limit is ever taken. What each
accountant takes is in ``docs/accounting.md``.

``best`` is the smallest of what can be proved. An exact answer ends the search, and the Rényi accountants are asked
only when the PLD has no finite answer: it takes the moments of its own losses into account, so a curve of the same
dominating pair cannot give less, and the one curve that comes from another argument, that of fixed-size batches,
was larger in every case tried; ask for it by name.

Calibration finds the noise multiplier or the number of steps that keep a budget. Its answers are on the safe side:
the ε proved for them is at most the target. A noise multiplier is also at most 0.1 % of ε away from it. Searches
start from the central limit (a guess, checked by a proof) and follow the secant of log ε over log z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget, Json, Relation, check_delta
from quietgrad.core.accounting.closed_form_accountants import (
    GaussianProfile,
    PureProfile,
    RenyiProfile,
    gaussian_mu,
    gaussian_profile,
    pure_profile,
    rdp_profile,
    zcdp_profile,
)
from quietgrad.core.accounting.composition import (
    AccountantRefusal,
    approximate_mu,
    count_releases,
    describe,
    parallel_branches,
    root_search,
    total_failure,
    total_slack,
    total_upfront,
)
from quietgrad.core.accounting.events import (
    AllocationSampled,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    repeated,
)
from quietgrad.core.errors import BudgetError, SettingError, UnprovableError

ACCOUNTANTS = ("gaussian-exact", "pure", "pld", "zcdp", "rdp")
_TOLERANCE = 1e-3  # of ε
_MOST_NOISE = 1e9
_MOST_STEPS = 10**9
_MOST_FOUND = 256
_FOUND: dict[tuple[Event, Event, Budget], float] = {}

if TYPE_CHECKING:
    from quietgrad.core.accounting.pld_accountant import ComposedPLD

    PrivacyProfile = GaussianProfile | PureProfile | RenyiProfile | ComposedPLD
    """What an accountant proves about a composition: its ``name``, ``epsilon(delta)`` and ``delta(epsilon)``."""


@dataclass(frozen=True)
class ProvedGuarantee:
    """A proved guarantee: (ε, δ) under a relation, and by which accountant.

    >>> ProvedGuarantee(1.0, 1e-5, Relation.ADD_REMOVE, "pld-poisson").to_json()
    {'epsilon': 1.0, 'delta': 1e-05, 'relation': 'add-remove', 'accountant': 'pld-poisson'}
    """

    epsilon: float
    delta: float
    relation: Relation
    accountant: str

    def to_json(self) -> dict[str, Any]:
        """Return the proof as plain JSON values."""
        return {**vars(self), "relation": str(self.relation)}

    @classmethod
    def from_json(cls, data: Json) -> ProvedGuarantee:
        """Rebuild a proof from :meth:`to_json`."""
        return cls(data["epsilon"], data["delta"], Relation.parse(data["relation"]), data["accountant"])

    def within(self, budget: Budget) -> bool:
        """Whether this proof is within ``budget``: same relation, no larger ε, no larger δ."""
        return self.relation is budget.relation and self.epsilon <= budget.epsilon and self.delta <= budget.delta


def sensitivity_factor(relation: str | Relation) -> float:
    """Return Δ/C: how far one record's change moves a sum of vectors of norm ≤ C, in units of C.

    One record more or less moves it by C; one replaced by another by 2C (g by −g). Nothing else in quietgrad turns
    a record's bound into a sensitivity.

    >>> sensitivity_factor("add-remove"), sensitivity_factor("replace-one")
    (1.0, 2.0)
    """
    return 1.0 if Relation.parse(relation) is Relation.ADD_REMOVE else 2.0


def noise_multiplier_for_rho(rho: float, relation: str | Relation) -> float:
    """Return z such that one Gaussian release with multiplier z is exactly ρ-zCDP: z = (Δ/C)/√(2ρ).

    >>> noise_multiplier_for_rho(0.5, "replace-one")
    2.0
    """
    if not 0.0 < rho < math.inf:
        raise ValueError(f"rho={rho!r}: must be > 0 and finite.")
    return sensitivity_factor(relation) / math.sqrt(2 * rho)


def gdp_mu(event: Event, *, relation: str | Relation) -> float:
    """Return μ of un-sampled Gaussian releases, which together are exactly μ-GDP: μ² = Σ (Δ/σ)².

    >>> from quietgrad.core.accounting.events import Gaussian, Repeated
    >>> gdp_mu(Repeated(Gaussian(10.0), 25), relation="add-remove")
    0.5
    """
    relation = Relation.parse(relation)
    try:
        profile = gaussian_profile(event, sensitivity_factor(relation))
    except AccountantRefusal as refusal:
        raise _unprovable(relation, [refusal]) from None
    if len(profile.components) > 1:
        raise _unprovable(relation, [AccountantRefusal(event, "random rounds are a mixture, not one Gaussian")])
    return profile.components[0][1]


def account(event: Event, *, delta: float, relation: str | Relation, accountant: str = "best") -> float:
    """Return an ε such that ``event`` is (ε, δ)-DP under ``relation``.

    Args:
        event: what was or will be released.
        delta: δ, strictly between 0 and 1.
        relation: ``"add-remove"`` or ``"replace-one"``.
        accountant: ``"best"``, or one of ``ACCOUNTANTS`` to have that one's bound.

    >>> from quietgrad.core.accounting.events import poisson_gaussian
    >>> event = poisson_gaussian(rate=0.01, noise_multiplier=1.1, steps=1000)
    >>> round(account(event, delta=1e-5, relation="add-remove"), 3)
    1.515
    """
    return prove(event, delta=delta, relation=relation, accountant=accountant).epsilon


def prove(event: Event, *, delta: float, relation: str | Relation, accountant: str = "best") -> ProvedGuarantee:
    """Return the smallest proved ε of ``event`` at ``delta``, with the accountant that proved it.

    Arguments as for :func:`account`. Raises ``UnprovableError`` naming the event that no accountant can take.

    >>> from quietgrad.core.accounting.events import Gaussian
    >>> prove(Gaussian(1.0), delta=1e-5, relation="add-remove").accountant
    'gaussian-exact'
    """
    delta = check_delta(delta)
    relation = Relation.parse(relation)
    proof = prove_or_infinite(event, delta, relation, accountant)
    if math.isinf(proof.epsilon):
        slack = total_slack(event)
        cause = (
            f"its outputs may be {slack:g} away in total variation, too much for this δ and this noise"
            if slack > 0.0
            else "its noise is too small for any accountant to give a finite ε; use a larger noise multiplier"
        )
        raise UnprovableError(f"{describe(event)}, δ={delta:g}, {relation}: no finite ε, because {cause}.")
    return proof


@lru_cache(maxsize=512)  # a plan is proved when it is calibrated, explained, reserved and stated
def prove_or_infinite(event: Event, delta: float, relation: Relation, accountant: str = "best") -> ProvedGuarantee:
    """``prove`` for inputs already checked, with ε = ∞ where it raises for too little noise."""
    slack, failure = total_slack(event), total_failure(event)
    upfront, choices = _taken_apart(event, relation)
    rest = delta - failure
    worst = ProvedGuarantee(
        upfront if 2 * slack <= rest else math.inf, delta, relation, "pure" if upfront else "none"
    )
    if rest <= 0.0:
        return worst
    for choice in choices:
        epsilon, name = _best(
            choice, relation, accountant, lambda profile: _epsilon_with_slack(profile, rest, slack), delta=rest
        )
        epsilon += upfront - math.log1p(-failure)
        if epsilon >= worst.epsilon:
            worst = ProvedGuarantee(epsilon, delta, relation, name)
    return worst


def delta_of(event: Event, *, epsilon: float, relation: str | Relation, accountant: str = "best") -> float:
    """Return a δ such that ``event`` is (ε, δ)-DP under ``relation``.

    >>> from quietgrad.core.accounting.events import Gaussian
    >>> round(delta_of(Gaussian(1.0), epsilon=1.0, relation="add-remove"), 6)
    0.126937
    """
    if not isinstance(epsilon, (int, float)) or not 0.0 <= epsilon < math.inf:
        raise SettingError("{epsilon}: must be ≥ 0 and finite.", epsilon=epsilon)
    relation = Relation.parse(relation)
    failure = total_failure(event)
    upfront, choices = _taken_apart(event, relation)
    epsilon -= upfront
    if epsilon < 0.0:
        return 1.0  # what was released before the rest costs more by itself
    epsilon = max(0.0, epsilon + math.log1p(-failure))
    worst = 0.0
    for choice in choices:
        value, _ = _best(choice, relation, accountant, lambda profile: profile.delta(epsilon), epsilon=epsilon)
        worst = max(worst, value)
    return min(1.0, worst + failure + (1 + math.exp(min(epsilon, 700.0))) * total_slack(event))


def _taken_apart(event: Event, relation: Relation) -> tuple[float, list[Event]]:
    """Split off the ε of ``Upfront`` releases; list the choices of parallel parts, of which the worst counts."""
    try:
        upfront = total_upfront(event, relation)
    except AccountantRefusal as refusal:
        raise _unprovable(relation, [refusal]) from None
    try:
        return upfront, parallel_branches(event)
    except AccountantRefusal:
        return upfront, [event]  # too many choices of parallel parts: only curves, which take maxima, can follow


def _epsilon_with_slack(profile: PrivacyProfile, delta: float, slack: float) -> float:
    """The smallest ε with δ(ε) + (1 + e^ε)·slack ≤ δ, approached from below and checked."""
    if slack == 0.0:
        return profile.epsilon(delta)
    epsilon = 0.0
    for _ in range(60):
        rest = delta - (1 + math.exp(min(epsilon, 700.0))) * slack
        following = profile.epsilon(rest) if rest > 0.0 else math.inf
        if following <= epsilon * (1 + 1e-9) or math.isinf(following):
            break
        epsilon = following
    epsilon = max(epsilon, following) * (1 + 1e-6)
    fits = epsilon < 700.0 and profile.delta(epsilon) + (1 + math.exp(epsilon)) * slack <= delta
    return epsilon if fits else math.inf


def _best(
    event: Event,
    relation: Relation,
    accountant: str,
    ask: Callable[[PrivacyProfile], float],
    *,
    delta: float | None = None,
    epsilon: float | None = None,
) -> tuple[float, str]:
    """The smallest answer to ``ask`` among the accountants that can prove ``event``, and whose it is."""
    factor = sensitivity_factor(relation)

    def pld() -> PrivacyProfile:
        from quietgrad.core.accounting.pld_accountant import pld_profile

        return pld_profile(event, relation, factor, delta=delta, epsilon=epsilon)

    attempts: dict[str, Callable[[], PrivacyProfile]] = {
        "gaussian-exact": lambda: gaussian_profile(event, factor),
        "pure": lambda: pure_profile(event, relation),
        "pld": pld,
        "zcdp": lambda: zcdp_profile(event, relation, factor),
        "rdp": lambda: rdp_profile(event, relation, factor),
    }
    if accountant != "best":
        if accountant not in attempts:
            raise SettingError(
                f"{{accountant}}: must be 'best' or one of {', '.join(ACCOUNTANTS)}.", accountant=accountant
            )
        attempts = {accountant: attempts[accountant]}
    best, winner = math.inf, ""
    refusals: list[AccountantRefusal] = []
    for name, attempt in attempts.items():
        # Nothing is below an exact answer, nor below the ε of one pure release that stands alone.
        alone = winner == "pure" and sum(count_releases(event).values()) == 1
        if math.isfinite(best) and (name in ("zcdp", "rdp") or winner == "gaussian-exact" or alone):
            break
        try:
            profile = attempt()
        except AccountantRefusal as refusal:
            refusals.append(refusal)
            continue
        value = ask(profile)
        if value < best or not winner:
            best, winner = value, profile.name
    if not winner:
        raise _unprovable(relation, refusals)
    return best, winner


def _unprovable(relation: Relation, refusals: list[AccountantRefusal]) -> UnprovableError:
    """The error for what no accountant can prove: the reasons of the most capable ones, PLD and Rényi."""
    asked = [refusals[-1]] if len(refusals) < 3 else [refusals[-3], refusals[-1]]
    if asked[0].event == asked[-1].event:
        asked = asked[:1]
    reasons = "; and ".join(f"{describe(refusal.event)}: {refusal.reason}" for refusal in asked)
    return UnprovableError(f"No accountant can prove a finite ε under {relation}. {reasons}.")


class Sampled(TypedDict, total=False):
    """How records enter a release.

    ``sampling`` is ``"poisson"`` (the default), ``"random-allocation"`` (epochs of ⌈n ÷ batch_size⌉ steps, every
    record in one of each; one that was begun is paid for whole), ``"fixed-size"`` or ``"full"``. ``n`` and
    ``batch_size`` describe a sample; ``rate`` may stand for both in Poisson sampling.
    """

    sampling: str
    n: int | None
    batch_size: int | None
    rate: float | None


SAMPLED_NAMES = ("poisson", "random-allocation", "fixed-size", "full")
"""The names of samplings whose cost follows from n, the batch size and the number of steps alone."""


def sampled_gaussian(noise_multiplier: float, steps: int, **sampled: Unpack[Sampled]) -> Event:
    """The event of ``steps`` Gaussian releases, sampled as described.

    >>> sampled_gaussian(1.1, 5, n=1000, batch_size=10)
    Repeated(inner=PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1)), count=5)
    """
    one, sampling = Gaussian(noise_multiplier), sampled.get("sampling", "poisson")
    n, batch_size, rate = sampled.get("n"), sampled.get("batch_size"), sampled.get("rate")
    if n is not None and batch_size is not None and not 1 <= batch_size <= n:
        raise SettingError("{batch_size}: must be between 1 and {n}.", batch_size=batch_size, n=n)
    match sampling:
        case "full":
            if batch_size not in (None, n) or rate not in (None, 1.0):
                raise SettingError("{sampling='full'}: takes neither batch_size nor rate; every record takes part.")
            return repeated(one, steps)
        case "poisson":
            if (rate is None) == (n is None or batch_size is None):
                raise SettingError("{sampling='poisson'}: needs either rate, or both n and batch_size.")
            return repeated(PoissonSampled((batch_size or 0) / (n or 1) if rate is None else rate, one), steps)
        case "fixed-size" | "random-allocation":
            if n is None or batch_size is None or rate is not None:
                raise SettingError("{sampling}: needs n and batch_size, and no rate.", sampling=sampling)
            if sampling == "fixed-size":
                return repeated(FixedSizeSampled(n, batch_size, one), steps)
            epoch = -(-n // batch_size)
            return repeated(AllocationSampled(epoch, one), -(-steps // epoch))
    raise SettingError(f"{{sampling}}: must be one of {', '.join(map(repr, SAMPLED_NAMES))}.", sampling=sampling)


def calibrate(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    relation: str | Relation = DEFAULT_RELATION,
    **sampled: Unpack[Sampled],
) -> float:
    """Return the least noise multiplier for which ``steps`` releases are (ε, δ)-DP.

    The releases are Gaussian.

    Args:
        epsilon: the largest ε that the releases may cost together.
        delta: probability with which the bound e^ε may fail.
        steps: number of releases.
        relation: neighbouring relation, ``"add-remove"`` or ``"replace-one"``.
        sampled: ``sampling``, ``n``, ``batch_size`` and ``rate``, as in :class:`Sampled`.

    >>> z = calibrate(epsilon=1.2, delta=1e-5, n=60000, batch_size=512, steps=2000)
    >>> round(z, 2)
    1.42
    """
    budget = Budget(epsilon, delta, Relation.parse(relation))
    return calibrate_event(lambda z: sampled_gaussian(z, steps, **sampled), budget=budget)


def calibrate_event(make_event: Callable[[float], Event], *, budget: Budget) -> float:
    """Return the least noise multiplier z with ε(``make_event(z)``) ≤ ``budget.epsilon``, to 0.1 % of ε.

    Args:
        make_event: the whole run as a function of z; its ε must not grow with z.
        budget: the budget to keep.

    >>> budget = Budget(1.0, 1e-5)
    >>> round(calibrate_event(lambda z: repeated(Gaussian(z), 100), budget=budget), 1)
    37.3
    """

    def epsilon_at(z: float) -> float:
        return prove_or_infinite(make_event(z), budget.delta, budget.relation).epsilon

    # Fits of one process ask for the same noise again and again. Functions that agree at 1 and 2 may differ
    # elsewhere, so the z of an earlier call is proved again before it is returned.
    question = (make_event(1.0), make_event(2.0), budget)
    earlier_z = _FOUND.get(question)
    if earlier_z is not None and (1 - _TOLERANCE) * budget.epsilon <= epsilon_at(earlier_z) <= budget.epsilon:
        return earlier_z
    factor, mu = sensitivity_factor(budget.relation), gaussian_mu(budget.epsilon, budget.delta)

    def apart(inverse: float) -> float:
        return approximate_mu(make_event(1 / inverse), factor)

    # Where the central limit would put z: only a place to start from.
    central = 1e-6 < apart(1.0) < 1e6 and apart(1 / _MOST_NOISE) <= mu < apart(1e6)
    guess = 1 / root_search(lambda inverse: apart(inverse) - mu, 1.0, rtol=1e-3) if central else 1.0
    answer = _least_noise(epsilon_at, budget, guess)
    if len(_FOUND) >= _MOST_FOUND:
        _FOUND.clear()
    _FOUND[question] = answer
    return answer


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    relation: str | Relation = DEFAULT_RELATION,
    **sampled: Unpack[Sampled],
) -> int:
    """Return the most Gaussian releases that stay (ε, δ)-DP with a given noise multiplier.

    Arguments as for :func:`calibrate`. Raises ``BudgetError`` if not even one does.

    >>> calibrate_steps(epsilon=1.0, delta=1e-5, noise_multiplier=37.31, sampling="full")
    100
    """
    budget = Budget(epsilon, delta, Relation.parse(relation))

    def epsilon_at(count: int) -> float:
        return prove_or_infinite(
            sampled_gaussian(noise_multiplier, count, **sampled), budget.delta, budget.relation
        ).epsilon

    low, high = 1, _MOST_STEPS + 1  # ε(low) ≤ target < ε(high)
    epsilon = epsilon_at(1)
    if epsilon > budget.epsilon:
        raise BudgetError(
            f"{{epsilon}}: {{steps=1}} already costs ε = {epsilon:.4g}. "
            "Use a larger noise multiplier or a larger epsilon.",
            epsilon=budget.epsilon,
        )
    count, tries = 1, 0  # ε grows about like √count
    while high - low > 1:
        ratio = (budget.epsilon / epsilon) ** 2 if 0.0 < epsilon < math.inf else 4.0
        guess = math.floor(count * min(max(ratio, 0.25), 64.0))
        tries += 1
        if tries % 4 == 0 and high <= _MOST_STEPS:  # the guess closes in from one side; halving closes the other
            guess = (low + high) // 2
        count = min(max(guess, low + 1), high - 1)
        epsilon = epsilon_at(count)
        if epsilon <= budget.epsilon:
            low = count
        else:
            high = count
    return low


def _least_noise(epsilon_at: Callable[[float], float], budget: Budget, guess: float) -> float:
    target = budget.epsilon
    aim = math.log(target * (1 - _TOLERANCE / 2))
    low, high = 0.0, math.inf  # ε(low) > target ≥ ε(high)
    z, slope = guess, -1.0
    before: tuple[float, float] | None = None
    while True:
        epsilon = epsilon_at(z)
        if epsilon <= target:
            high = z
            if epsilon >= target * (1 - _TOLERANCE) or high <= low * (1 + 1e-7):
                return z
        else:
            low = z
            if low >= _MOST_NOISE:
                raise BudgetError(
                    f"{{epsilon}}: cannot be reached, because releases with fixed noise already cost "
                    f"ε = {epsilon:.4g}. Raise epsilon above that, or remove those releases.",
                    epsilon=target,
                )
            if high <= low * (1 + 1e-7):
                return high
        if high < 1e-9:
            raise ValueError("make_event: its ε does not depend on the noise multiplier; nothing to calibrate.")
        if 0.0 < epsilon < math.inf:
            point = (math.log(z), math.log(epsilon))
            if before is not None and point[0] != before[0]:
                measured = (point[1] - before[1]) / (point[0] - before[0])
                slope = measured if measured < -0.05 else slope
            before = point
            z = math.exp(point[0] + max(-2.0, min(2.0, (aim - point[1]) / slope)))
        else:
            z = 2 * z if epsilon > target else z / 2
        if not low < z < high:
            z = math.sqrt(low * high) if low > 0.0 and high < math.inf else (2 * low if low else high / 2)
