"""The plan that parties agree on before a run: the algorithm's releases, the parties, the trust, every query.

It is public and can be read back from JSON. A party approves it once, pins it, and refuses what is not in it.

======== ======================================================= ==================================================
trust    who sees what                                           noise
======== ======================================================= ==================================================
curator  the coordinator sees each party's exact sums            one, added by the coordinator
secure   no member sees a sum without noise                      inside a secure sum; no member knows it
local    the coordinator sees each party's noisy sums (ICRL-DP)  every party adds its own, enough for its records
======== ======================================================= ==================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from quietgrad.errors import BudgetError
from quietgrad.federation.wire import Template
from quietgrad.objectives.base import Objective
from quietgrad.objectives.privacy_units import Combine, UserLevelObjective, check_combination
from quietgrad.plans.schedule import Plan, Schedule, Slot, check_records_public
from quietgrad.privacy import events
from quietgrad.privacy.accounting import noise_multiplier_for_rho
from quietgrad.privacy.budget import Budget, PrivacyUnit, Relation
from quietgrad.privacy.correlated import BufferedToeplitzNoise
from quietgrad.sampling import Sampling
from quietgrad.secure.terms import Mode, SecureSumConfig

Trust = Literal["curator", "secure", "local"]

MATCHED = "ids were matched between the parties by a keyed hash"
_REACH = 2.0**20  # L2 bound of one party's vector in units of σ: 2^48 grid steps, beyond which it is shortened


class Shape(NamedTuple):
    """The public shape of all parties' records; stands in for them where only lengths matter."""

    dim: int
    features: int = 0


@dataclass(frozen=True)
class FederatedPlan(Plan):
    """A plan for many parties. Build it with :func:`quietgrad.federation.planning.federate`.

    Args:
        trust: ``"curator"``, ``"secure"`` or ``"local"``.
        names: the parties, in order.
        sizes: their public numbers of records; they sum to ``n_public``.
        factors: what each party multiplies its sum by. 1 weighs every record the same (w_j = n_j/n); weights w_j
            give w_j·n/n_j, and one record then counts up to max(factors)·C.
        secure: how sums are made when trust is ``"secure"``.
        quorum, colluders, spare: as in :func:`~quietgrad.federation.simulation.simulate`.
        cohort: how many parties, drawn anew for every round, are asked in it; 0 asks all. Who was
            drawn is public, so ε claims nothing for it: each party is charged as if it were in every round.
        servers: names of the servers that ``"servers"`` and ``"mpc"`` need.
        templates, dims: by slot, the queries that may be asked, and the length of an answer.
        parties_per_person: with people as the unit, how many parties one of them may be known to, at most; public,
            and the parties' word. What a person adds to a sum is then up to that many times what a party lets them
            add, and the noise is as much louder; a party's own noise (``"local"``) is paid for that often instead.
        matched: with people as the unit, the digest of the lists by which parties found who is known to several
            (:mod:`quietgrad.federation.matching`): one party keeps each of them, so parties' people are disjoint.
        combine, records_per_person: how a person's records count, at every party alike.
    """

    trust: Trust = "curator"
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    secure: Mode | None = None
    quorum: int = 0
    colluders: int = 1
    servers: tuple[str, ...] = ()
    spare: int = 0
    cohort: int = 0
    shape: Shape = field(default_factory=lambda: Shape(1))
    templates: Mapping[str, tuple[Template, ...]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    parties_per_person: int = 1
    matched: str = ""
    combine: Combine = "mean"
    records_per_person: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_people()
        if self.trust not in get_args(Trust):
            raise ValueError(f"trust={self.trust!r}: must be 'curator', 'secure' or 'local'.")
        if (self.trust == "secure") != (self.secure is not None):
            named = f"trust={self.trust!r}, secure={self.secure!r}"
            raise ValueError(f"{named}: name 'masks', 'servers' or 'mpc' exactly when trust is 'secure'.")
        m = len(self.names)
        if m < 1 or len(set(self.names)) < m or not len(self.sizes) == len(self.factors) == m:
            raise ValueError(f"parties {self.names}: must have different names, and one size and factor each.")
        if not 0 <= self.cohort <= m:
            raise ValueError(f"cohort={self.cohort}: must be between 1 and the {m} parties, or 0 for all of them.")
        if not 1 <= self.quorum <= self.invited:
            raise ValueError(f"quorum={self.quorum}: must be between 1 and the {self.invited} parties of a round.")
        if self.masked and self.quorum <= self.colluders:
            raise ValueError(
                f"quorum={self.quorum}: {self.colluders} may work with the coordinator (colluders), so masks "
                f"would hide no party; give a quorum of {self.colluders + 1} or more."
            )
        if self.cohort and any(slot.sampling.fresh for slot in self.schedule.slots):
            raise ValueError("cohort: records that are used once need every party in every round; leave it out.")
        for slot in self.schedule.slots:
            if slot.sampling.only_central:
                raise ValueError(slot.sampling.only_central)
        if self.spare < 0:
            raise ValueError(f"spare={self.spare}: must be ≥ 0, the rounds reserved for retries.")
        if not all(0.0 <= factor < math.inf for factor in self.factors) or not any(self.factors):
            raise ValueError(f"factors={self.factors}: must be finite numbers ≥ 0, one at least above 0.")
        if self.secure is not None:
            if self.is_private and not all(slot.mechanism.in_secure_sums for slot in self.schedule.slots):
                raise ValueError("mechanism: secure sums have Gaussian noise only; choose mechanism='gaussian'.")
            if self.correlated is not None and len(set(self.dims.values())) > 1:
                raise ValueError("correlated noise is over vectors of one length; the queries have several.")
            for dim in sorted({*self.dims.values(), 1}):
                self.terms(dim)  # refuses what cannot be summed
            least = self.invited - self.terms(1).tolerated_dropouts
            if self.quorum < least:
                need = f"masks need {least} of {self.invited} parties to open a sum"
                raise ValueError(f"quorum={self.quorum}: {need}; give so many, or use secure='servers'.")

    def _check_people(self) -> None:
        check_combination(self.combine, self.records_per_person)
        check_records_public(self.records_public, self.n_public, self.unit)
        times = self.parties_per_person
        if isinstance(times, bool) or not isinstance(times, int) or not 1 <= times <= max(1, len(self.names)):
            raise ValueError(f"parties_per_person={times!r}: must be from 1 to the number of parties.")
        if self.matched and (times != 1 or not re.fullmatch("[0-9a-f]{64}", self.matched)):
            raise ValueError("matched: is the digest of `quietgrad federate match`; leave out parties_per_person.")
        if self.unit is PrivacyUnit.RECORD:
            if self.matched or times != 1 or self.combine != "mean" or self.records_per_person is not None:
                raise ValueError(
                    "parties_per_person, matched, combine, records_per_person: give every party person=."
                )
            return
        if times == 1 or self.budget is None:
            return
        # A person's parts are drawn by each party on its own. For Poisson samples the mixture over who drew them is
        # dominated by one draw of all of them, which is proved for add-remove alone; for fixed batches nothing is.
        samplings = [slot.sampling for slot in self.schedule.slots]
        if any(sampling.counts_exactly for sampling in samplings):
            raise ValueError("parties_per_person > 1: not with fixed local batches; use sampling='poisson'.")
        sampled = any(sampling.known_to(times) != sampling for sampling in samplings)
        if sampled and not self.own_noise and self.budget.relation is Relation.REPLACE_ONE:
            raise ValueError("parties_per_person > 1: sampled under add-remove only; or use the full batch.")
        if self.own_noise and self.schedule.composition == "filter":
            raise ValueError("parties_per_person > 1: a zCDP filter at every party is not priced; use other trust.")

    # --- who may do what --------------------------------------------------------------------------------------

    @property
    def own_noise(self) -> bool:
        """Whether every party adds noise for its own records."""
        return self.trust == "local"

    @property
    def curator_noise(self) -> bool:
        """Whether the coordinator adds the noise."""
        return self.trust == "curator"

    @property
    def masked(self) -> bool:
        """Whether secure sums are made by masks, without servers."""
        return self.secure == "masks"

    def asks(self, loss: Objective) -> Objective:
        """The loss as a party asks its records about it."""
        if self.unit is PrivacyUnit.RECORD:
            return loss
        return UserLevelObjective(loss, self.combine, self.records_per_person)

    def index(self, name: str) -> int:
        if name not in self._numbers:
            raise ValueError(f"{name!r} is not a party of this plan: {', '.join(self.names)}.")
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: j for j, name in enumerate(self.names)}

    @property
    def invited(self) -> int:
        """How many parties are asked in a round."""
        return self.cohort or len(self.names)

    def limit(self, slot: str) -> int:
        """The most times a slot may be asked, spare rounds included."""
        return self.schedule[slot].count + self.spare

    @property
    def largest_factor(self) -> float:
        """The most that one record's contribution is multiplied by."""
        return max(self.factors)

    @property
    def reach(self) -> float:
        """The most that one record's, or one person's, part in a sum over parties is of a query's bound.

        A party's own noise is about its own sum.
        """
        return self.largest_factor * (1 if self.own_noise else self.parties_per_person)

    # --- noise ------------------------------------------------------------------------------------------------

    def multiplier(self, slot: str, rho: float | None) -> float:
        """The noise multiplier of a release, 0 in a run without noise."""
        if not self.is_private:
            return 0.0
        if (self.schedule.composition == "filter") != (rho is not None):
            raise BudgetError("rho must be given exactly in a plan with a zCDP filter.")
        if rho is None:
            return self.schedule[slot].multiplier(self.noise_multiplier)
        return noise_multiplier_for_rho(rho, self._relation)

    def terms(self, dimension: int) -> SecureSumConfig:
        """The agreed terms of secure sums of a length, in units in which the noise has σ = 1."""
        assert self.secure is not None
        settings: dict[str, Any] = {"servers": len(self.servers), "quorum": self.quorum}
        if self.masked:
            settings = {"honest": self.quorum - self.colluders, "colluders": self.colluders}
        if not self.is_private:
            bound = 2.0 * max(self.largest_factor, 1.0) * sum(self.sizes)
            return SecureSumConfig(self.secure, self.invited, dimension, bound, 0.0, **settings)
        return SecureSumConfig(
            self.secure, self.invited, dimension, _REACH, 1.0, correlated=self.correlated, **settings
        )

    @cached_property
    def correlated(self) -> BufferedToeplitzNoise | None:
        """The noise of a whole run, if its releases are correlated."""
        mechanisms = (slot.mechanism for slot in self.schedule.slots)
        return next((each for each in mechanisms if isinstance(each, BufferedToeplitzNoise)), None)

    def scale(self, multiplier: float, bound: float, dimension: int) -> float:
        """What a party divides its sum by before a secure sum: σ in the query's own units, rounding paid.

        σ = z·(C + √d·step) with step = σ/units, hence σ = zC/(1 − z√d/units). Without noise it is C.
        """
        if not 0.0 < bound < math.inf:
            raise ValueError(f"clip {bound}: a secure sum needs a finite bound on every record.")
        if multiplier == 0.0:
            return bound
        if self.correlated is not None:
            multiplier *= self.correlated.factor
        share = multiplier * math.sqrt(dimension) / self.terms(dimension).noise_units
        if share >= 0.5:
            raise ValueError(f"noise multiplier {multiplier:g} in {dimension} dimensions: the grid is too coarse.")
        return multiplier * bound / (1.0 - share)

    @property
    def variance_factor(self) -> float:
        """Variance of the noise in a sum ÷ that of a trusted curator."""
        if self.secure is not None:
            return self.terms(1).variance_factor if self.is_private else 0.0
        asked = sorted(self.factors)[-self.invited :]
        return sum(f * f for f in asked) / self.largest_factor**2 if self.own_noise else 1.0

    # --- events -----------------------------------------------------------------------------------------------

    def party_schedule(self, party: int) -> Schedule:
        """What one party's records go through: the schedule with its own fixed batches and the spare rounds."""
        slots = []
        for slot in self.schedule.slots:
            sampling = slot.sampling.at_party(self.sizes, party)
            if sampling is None:
                continue
            law = None if slot.law is None else tuple((r + self.spare, p) for r, p in slot.law)
            slots.append(replace(slot, sampling=sampling, count=slot.count + self.spare, law=law))
        return replace(self.schedule, slots=tuple(slots))

    def event_of(self, counts: Mapping[str, int] | None) -> events.Event:
        """What ``counts`` askings of each slot released; of all of them, spare rounds too, if ``None``."""
        parts = self._party_events(counts)
        if counts is not None and len(parts) < len(self._party_events(None)):
            return self.event_of(None)
        same = all(part == parts[0] for part in parts)
        return parts[0] if same and not self.own_noise else events.MaxOverParties(tuple(parts))

    def party_event(self, party: int, counts: Mapping[str, int] | None) -> events.Event | None:
        """What the records of one party gave away; ``None`` if they were never asked."""
        schedule = self.party_schedule(party)
        if not self.own_noise:
            schedule = of_several_parties(schedule, self.parties_per_person)
        named = {slot.name for slot in schedule.slots}
        if not named or (counts is not None and not any(counts.get(name, 0) for name in named)):
            return None
        run = schedule.event(self.noise_multiplier, self._relation, counts)
        slack = [events.TotalVariationSlack(self.slack)] if self.slack else []
        if self.own_noise and self.parties_per_person > 1:  # so many parties' noisy sums are about one person
            return events.repeated(events.composed([run, *slack]), self.parties_per_person)
        return events.composed([run, *slack])

    def filter_event(self, rho: float) -> events.Event:
        """What a run with a zCDP filter released when it spent ``rho`` of it."""
        slack = [events.TotalVariationSlack(self.slack)] if self.slack else []
        part = events.composed([events.ZCDP(rho, self._relation), *slack])
        return events.MaxOverParties((part,) * len(self.names)) if self.own_noise else part

    @cached_property
    def _kinds(self) -> list[tuple[Sampling | None, ...]]:
        """What sets the parties' events apart: how each draws."""
        drawn = [slot.sampling for slot in self.schedule.slots]
        return [tuple(s.at_party(self.sizes, j) for s in drawn) for j in range(len(self.names))]

    def _party_events(self, counts: Mapping[str, int] | None) -> list[events.Event]:
        """Those of all parties who were asked; parties of the same local batches go through the same."""
        places = {key: j for j, key in enumerate(self._kinds)}
        alike = {key: self.party_event(j, counts) for key, j in places.items()}
        return [event for key in self._kinds if (event := alike[key]) is not None]

    @cached_property
    def slack(self) -> float:
        """Total variation that the discrete noise of all secure sums of the run adds up to."""
        if self.secure is None or not self.is_private:
            return 0.0
        return math.fsum(
            self.limit(slot.name) * self.terms(self.dims.get(slot.name, self.shape.dim)).slack()
            for slot in self.schedule.slots
        )

    def proves(self) -> None:
        """Raise unless the plan's own events prove its budget: what a party checks before it approves."""
        if self.budget is None:
            raise BudgetError("this plan adds no noise: its run is not private.")
        if self.epsilon() > self.budget.epsilon * (1.0 + 1e-9):
            raise BudgetError(f"the plan promises ε={self.budget.epsilon:g}; its events cost {self.epsilon():g}.")

    def explain(self) -> str:
        """The plan in words, with who takes part, who is trusted, and what that costs in noise."""
        from quietgrad.federation.planning import explain

        return explain(self)

    # --- agreement --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values: what a party reads, approves and pins."""
        own = {_KEYS.get(name, name): _plain(getattr(self, name)) for name in _OWN}
        if not self.matched:
            del own["matched"]
        return {**super().to_json(), "adaptive": self.schedule.adaptive, **own}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FederatedPlan:
        """Rebuild a plan from :meth:`to_json`; its events are recomputed, not believed."""
        own = {name: data[key] for name in _OWN if (key := _KEYS.get(name, name)) in data}
        own |= {name: tuple(own[name]) for name in ("names", "sizes", "factors", "servers")}
        own["templates"] = {slot: tuple(templates) for slot, templates in own["templates"].items()}
        slots = tuple(Slot.from_json(entry) for entry in data["slots"])
        return cls(
            algorithm=data["algorithm"],
            config=data["config"],
            schedule=Schedule(slots, data["composition"], data["adaptive"]),
            n_public=data["n_public"],
            budget=None if data["budget"] is None else Budget.from_json(data["budget"]),
            noise_multiplier=data["noise_multiplier"],
            unit=PrivacyUnit.parse(data["unit"]),
            records_public=data.get("records_public"),
            **{**own, "shape": Shape(**own["shape"])},
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan: two sides with the same digest agree on every word of it."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), default=list)
        return hashlib.sha256(b"quietgrad federated plan 1\0" + text.encode()).hexdigest()


_OWN = (
    "trust", "names", "sizes", "factors", "secure", "quorum", "colluders", "servers", "spare", "cohort", "shape",
    "templates", "dims", "parties_per_person", "matched", "combine", "records_per_person",
)  # fmt: skip
_KEYS = {"names": "parties", "templates": "queries"}  # as they are called in JSON


def _plain(value: Any) -> Any:
    if isinstance(value, Shape):
        return value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def of_several_parties(schedule: Schedule, times: int) -> Schedule:
    """The schedule as it draws anything of a person whom so many parties know."""
    return replace(schedule, slots=tuple(replace(s, sampling=s.sampling.known_to(times)) for s in schedule.slots))
