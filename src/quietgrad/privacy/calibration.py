"""Calibration: from a budget to the noise multiplier or the number of steps that keep it.

All answers are on the safe side: the ε proved for them is at most the target. A noise multiplier is also at most
0.1 % of ε away from it. Searches start from the central limit (a guess, checked by a proof), follow the secant of
log ε over log z and need few proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypedDict, Unpack

from quietgrad.errors import BudgetError
from quietgrad.privacy.accounting import prove_or_infinite, sensitivity_factor
from quietgrad.privacy.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.privacy.closed_form_accountants import gaussian_mu
from quietgrad.privacy.composition import approximate_mu, root_search
from quietgrad.privacy.events import AllocationSampled, Event, FixedSizeSampled, Gaussian, PoissonSampled, repeated

_TOLERANCE = 1e-3  # of ε
_MOST_NOISE = 1e9
_MOST_STEPS = 10**9
_MOST_FOUND = 256
_FOUND: dict[tuple[Event, Event, Budget], float] = {}


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


def sampled_gaussian(noise_multiplier: float, steps: int, **sampled: Unpack[Sampled]) -> Event:
    """The event of ``steps`` Gaussian releases, sampled as described.

    >>> sampled_gaussian(1.1, 5, n=1000, batch_size=10)
    Repeated(inner=PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1)), count=5)
    """
    one, sampling = Gaussian(noise_multiplier), sampled.get("sampling", "poisson")
    n, batch_size, rate = sampled.get("n"), sampled.get("batch_size"), sampled.get("rate")
    if n is not None and batch_size is not None and not 1 <= batch_size <= n:
        raise ValueError(f"batch_size={batch_size!r}: must be between 1 and n={n}.")
    match sampling:
        case "full":
            if batch_size not in (None, n) or rate not in (None, 1.0):
                raise ValueError("sampling='full': takes neither batch_size nor rate; every record takes part.")
            return repeated(one, steps)
        case "poisson":
            if (rate is None) == (n is None or batch_size is None):
                raise ValueError("sampling='poisson': needs either rate, or both n and batch_size.")
            return repeated(PoissonSampled((batch_size or 0) / (n or 1) if rate is None else rate, one), steps)
        case "fixed-size" | "random-allocation":
            if n is None or batch_size is None or rate is not None:
                raise ValueError(f"sampling={sampling!r}: needs n and batch_size, and no rate.")
            if sampling == "fixed-size":
                return repeated(FixedSizeSampled(n, batch_size, one), steps)
            epoch = -(-n // batch_size)
            return repeated(AllocationSampled(epoch, one), -(-steps // epoch))
    raise ValueError(f"sampling={sampling!r}: must be 'poisson', 'random-allocation', 'fixed-size' or 'full'.")


def calibrate(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    relation: str | Relation = DEFAULT_RELATION,
    **sampled: Unpack[Sampled],
) -> float:
    """Return the least noise multiplier with which ``steps`` Gaussian releases are (ε, δ)-DP.

    Args:
        epsilon, delta, relation: the guarantee.
        steps: number of releases.
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
    # elsewhere, so a remembered number is proved again.
    question = (make_event(1.0), make_event(2.0), budget)
    known = _FOUND.get(question)
    if known is not None and (1 - _TOLERANCE) * budget.epsilon <= epsilon_at(known) <= budget.epsilon:
        return known
    factor = sensitivity_factor(budget.relation)
    guess = _guess_noise(lambda z: approximate_mu(make_event(z), factor), gaussian_mu(budget.epsilon, budget.delta))
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
            f"epsilon={budget.epsilon:g}: steps=1 already costs ε = {epsilon:.4g}. "
            "Use a larger noise multiplier or a larger epsilon."
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


def _guess_noise(mu_at: Callable[[float], float], mu: float) -> float:
    """Where the central limit would put z. Only a place to start from."""
    if not 1e-6 < mu_at(1.0) < 1e6 or mu_at(_MOST_NOISE) > mu or mu_at(1e-6) <= mu:
        return 1.0
    return 1 / root_search(lambda inverse: mu_at(1 / inverse) - mu, 1.0, rtol=1e-3)


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
                    f"epsilon={target:g}: cannot be reached, because releases with fixed noise already cost "
                    f"ε = {epsilon:.4g}. Raise epsilon above that, or remove those releases."
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
