"""How many records a run is planned for: a number that was declared, or one that was counted privately.

Under add-remove the number of records is a secret like any other: two tables that differ in one person differ in
it. A plan needs it, for step sizes, shares of the budget and sampling rates. So it is declared (``n_public=``),
or it is the first release of the run, with about 1 % of ε, and everything after it is planned from what came out.
Under replace-one neighbours have equally many records, and the number is public.

The plan of the rest depends on the count. Two arguments cover that, and which one applies is decided before
anything is counted:

* **Un-sampled Gaussian releases.** The count has Gaussian noise and ``_SHARE`` of μ², the Gaussian-DP parameter
  of the budget. Whatever comes out, the rest is calibrated so that all releases together are μ-GDP, so the rest is
  √(μ² − μ_c²)-GDP for every outcome. Mechanisms that are dominated by one pair for every outcome of those before
  compose as that pair does (Dong, Roth, Su 2022, Thm. 3.2): μ-GDP in all, exactly, although shares and steps
  depend on the count.
* **Everything else** (samples, random rounds, filters, searches). Their dominating pairs differ with the count,
  so no fixed pair serves. The count has Laplace noise and ``_PART`` of ε, as
  :class:`~quietgrad.core.accounting.events.Upfront`; the rest is (ε − ε_c, δ)-DP for every outcome, and basic
  composition adds the two.

Either way ε is the budget's, for whatever count came out: a statement names that and not the last digits of the
plan that happened to be made, and nothing is given back for stopping early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.accounting.composition import AccountantRefusal, count_releases, parallel_branches
from quietgrad.core.accounting.events import Composed, Event, Gaussian, MaxOverParties, Pure, Upfront, composed
from quietgrad.core.errors import SettingError
from quietgrad.core.noise.mechanisms import GaussianNoise, L2LaplaceNoise

if TYPE_CHECKING:
    from quietgrad.core.plans.method import HasSchedule

COUNT = "count"
"""The name of the release."""
_SHARE = 0.02  # of μ²: about 1 % of ε
_PART = 0.01  # of ε
NOMINAL = 10**7
"""Records of a method or a schedule that is only asked for its kinds of release, before they are counted."""


@dataclass(frozen=True)
class PublicCount:
    """The number of records that a run is planned for, and the noise multiplier of the release that found it.

    ``multiplier`` is ``None`` where nothing was released: the number was declared, or is public under replace-one.
    ``gaussian`` says which of the two arguments above pays for it, ``run`` is the name that the ledger has it
    under.
    """

    n: int
    multiplier: float | None = None
    gaussian: bool = True
    run: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or int(self.n) != self.n or self.n < 1:
            raise SettingError("{n}: must be a whole number ≥ 1.", n=self.n)
        if self.multiplier is not None:
            self.event(Relation.ADD_REMOVE)  # refuses what is no multiplier

    def at_least(self, algorithm: HasSchedule) -> PublicCount:
        """This number, doubled until ``algorithm`` has a schedule for it: a count may come out below its batch."""
        n = self.n
        while n < NOMINAL:
            try:
                algorithm.schedule(n)
            except ValueError:
                n *= 2
            else:
                return replace(self, n=n)
        return self  # what is wrong is not the number

    @property
    def counted(self) -> bool:
        """Whether the number is a release."""
        return self.multiplier is not None

    @property
    def mechanism(self) -> GaussianNoise | L2LaplaceNoise:
        """The mechanism that adds the count's noise."""
        return GaussianNoise() if self.gaussian else L2LaplaceNoise()

    def event(self, relation: Relation) -> Event | None:
        """The event of counting; ``None`` if the number was declared."""
        if self.multiplier is None:
            return None
        once = self.mechanism.once(self.multiplier, relation)
        return Upfront(once.epsilon, relation) if isinstance(once, Pure) else once

    def before(self, event: Event, relation: Relation) -> Event:
        """``event`` after the count, if that was a release; of every party's records, if parties are counted apart.

        This is the one place where a count and what was planned from it are put together, and the rule for it is
        here: a Gaussian count stands before un-sampled Gaussian releases alone (``ValueError``).

        >>> PublicCount(1203, 26.0).before(Gaussian(2.0), Relation.ADD_REMOVE)
        Composed(parts=(Gaussian(noise_multiplier=26.0), Gaussian(noise_multiplier=2.0)))
        """
        first = self.event(relation)
        if first is None:
            return event
        if self.gaussian and not only_gaussian(event):
            raise ValueError(
                "the releases are not Gaussian, but the records were counted by a Gaussian release. Count them "
                "with Laplace noise (gaussian=False), whose ε is added to that of any plan."
            )
        if isinstance(event, MaxOverParties):
            return MaxOverParties(tuple(Composed((first, party)) for party in event.parties))
        return Composed((first, event))

    def rest_of(self, event: Event, relation: Relation) -> Event:
        """Split off the events after the count; ``ValueError`` if :meth:`before` cannot have made ``event``.

        >>> count = PublicCount(1203, 26.0)
        >>> count.rest_of(count.before(Gaussian(2.0), Relation.ADD_REMOVE), Relation.ADD_REMOVE)
        Gaussian(noise_multiplier=2.0)
        """
        first = self.event(relation)
        if first is None:
            return event
        if not isinstance(event, Composed) or event.parts[0] != first or len(event.parts) == 1:
            raise ValueError("the event does not begin with the count.")
        rest = composed(event.parts[1:])
        self.before(rest, relation)
        return rest

    def describe(self, unit: PrivacyUnit) -> str:
        """The sentence in which a statement reports a private count.

        >>> PublicCount(1203, 26.4).describe(PrivacyUnit.RECORD)
        'n = 1203 records were counted privately, with Gaussian noise of scale 26.4'
        """
        words = f"{self.mechanism.noise.removeprefix('L2-')} noise of scale {self.multiplier:.4g}"
        return unit.in_words(f"n = {self.n} records were counted privately, with {words}")

    def to_json(self) -> dict[str, Any] | None:
        """How it was counted, as JSON values; ``None`` if it was not. The number itself stands beside it."""
        if self.multiplier is None:
            return None
        return {"noise_multiplier": self.multiplier, "gaussian": self.gaussian}

    @classmethod
    def from_json(cls, n: int, data: object) -> PublicCount:
        """Rebuild a count from the number and :meth:`to_json`.

        >>> PublicCount.from_json(90, PublicCount(90, 100.0, gaussian=False).to_json())
        PublicCount(n=90, multiplier=100.0, gaussian=False)
        """
        if data is None:
            return cls(n)
        named = isinstance(data, dict) and set(data) == {"noise_multiplier", "gaussian"}
        if not isinstance(data, dict) or not named or type(data["gaussian"]) is not bool:
            raise ValueError(f"counted={data!r}: must be a noise multiplier and whether it is Gaussian.")
        return cls(n, float(data["noise_multiplier"]), data["gaussian"])


def count_noise(budget: Budget, *, gaussian: bool) -> float:
    """The noise multiplier with which records are counted, from the budget of the whole run.

    >>> round(count_noise(Budget(1.0, 1e-5), gaussian=True)), count_noise(Budget(1.0, 1e-5), gaussian=False)
    (26, 100.0)
    """
    factor = sensitivity_factor(budget.relation)
    if gaussian:
        return factor / (gaussian_mu(budget.epsilon, budget.delta) * math.sqrt(_SHARE))
    return factor / (_PART * budget.epsilon)


def rest_like(budget: Budget, count: PublicCount) -> Event:
    """About what the rest of a counted run costs, before it is planned: a Gaussian release of what is left.

    Of un-sampled Gaussian releases it is exact. Of others it is a tenth short in ε: a cap that is refused for it
    would be refused for any plan.
    """
    factor = sensitivity_factor(budget.relation)
    assert count.multiplier is not None
    if count.gaussian:
        mu = math.sqrt(gaussian_mu(budget.epsilon, budget.delta) ** 2 - (factor / count.multiplier) ** 2)
    else:
        mu = gaussian_mu(0.9 * budget.epsilon, budget.delta)
    return Gaussian(factor / mu)


def only_gaussian(event: Event) -> bool:
    """Whether an event consists of un-sampled Gaussian releases, whatever fails with a fixed probability beside.

    >>> from quietgrad.core.accounting.events import gaussian, poisson_gaussian
    >>> only_gaussian(gaussian(2.0, 10)), only_gaussian(poisson_gaussian(0.1, 2.0, 10))
    (True, False)
    """
    try:
        return all(isinstance(part, Gaussian) for core in parallel_branches(event) for part in count_releases(core))
    except AccountantRefusal:
        return False


def plans_gaussian(algorithm: HasSchedule, relation: Relation) -> bool:
    """Whether the releases of ``algorithm`` are un-sampled Gaussian ones, whatever the number of records."""
    try:
        return only_gaussian(algorithm.schedule(NOMINAL).under(relation).event(1.0, relation))
    except (ValueError, ArithmeticError, MemoryError):
        return False  # settings for other numbers of records: basic composition holds for all of them
