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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.errors import BudgetError, SettingError
from quietgrad.core.noise.correlated import BufferedToeplitzNoise
from quietgrad.core.plans.schedule import Plan, Schedule, Slot, check_records_public
from quietgrad.core.sampling import Sampling
from quietgrad.core.session.objectives import Objective, Records
from quietgrad.federation.secure.ring import dithered_clip
from quietgrad.federation.secure.terms import Mode, SecureSumConfig, coarse_reach
from quietgrad.federation.wire import Template
from quietgrad.tables.parties import PartyLevelObjective
from quietgrad.tables.privacy_units import Combine, PersonRule, UserLevelObjective

Trust = Literal["curator", "secure", "local"]

_REACH = 2.0**20  # L2 bound of one party's vector in units of σ: 2^48 grid steps, beyond which it is shortened


class Shape(NamedTuple):
    """The public shape of all parties' records.

    It stands in for them where only lengths matter.
    """

    dim: int
    features: int = 0

    @classmethod
    def of(cls, records: Records) -> Shape:
        return cls(records.dim, getattr(records, "features", 0))


@dataclass(frozen=True)
class FederatedPlan(Plan):
    """A plan for many parties.

    Build it with :func:`quietgrad.federation.planning.federate`.

    Settings are those of :func:`~quietgrad.federation.simulation.simulate`, and:

    Args:
        names: the parties in order.
        sizes: public number of records of each party; they sum to ``n_public``.
        factors: what each party multiplies its sum by. 1 weighs every record the same (w_j = n_j/n); weights w_j
            give w_j·n/n_j, and one record then counts up to max(factors)·C.
        templates: the queries that may be asked, by slot.
        dims: the length of an answer, by slot.
        parties_per_person: with people as the unit, how many parties one of them may be known to, at most; public,
            and the parties' word. What a person adds to a sum is then up to that many times what a party lets them
            add, and the noise is as much louder; a party's own noise (``"local"``) is paid for that often instead.
        ring: bits of a word of a secure sum: 64, or 32 for long vectors (:mod:`quietgrad.federation.secure.ring`).
        parties_per_round: how many parties a round asks, drawn in public; all of them unless given. It saves work
            and buys no privacy: every party is charged for every round.
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
    shape: Shape = field(default_factory=lambda: Shape(1))
    templates: Mapping[str, tuple[Template, ...]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    parties_per_person: int = 1
    ring: int = 64
    parties_per_round: int | None = None
    combine: Combine = "mean"
    records_per_person: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_people()
        if self.trust not in get_args(Trust):
            raise SettingError("{trust}: must be 'curator', 'secure' or 'local'.", trust=self.trust)
        if (self.trust == "secure") != (self.secure is not None):
            raise SettingError(
                "{trust}, {secure}: set secure to 'masks', 'servers' or 'mpc' if trust is 'secure', and leave it "
                "out otherwise.", trust=self.trust, secure=self.secure,
            )  # fmt: skip
        if self.secure is not None and self.secure not in get_args(Mode):
            raise SettingError("{secure}: must be 'masks', 'servers' or 'mpc'.", secure=self.secure)
        m = len(self.names)
        if m < 1 or len(set(self.names)) < m or not len(self.sizes) == len(self.factors) == m:
            raise ValueError(f"parties {self.names}: must have different names, and one size and factor each.")
        if not 1 <= self.quorum <= m:
            raise ValueError(f"quorum={self.quorum}: must be between 1 and the {m} parties.")
        if self.secure == "masks" and self.quorum <= self.colluders:
            raise ValueError(
                f"quorum={self.quorum}: {self.colluders} may work with the coordinator (colluders), so masks "
                f"would hide no party; give a quorum of {self.colluders + 1} or more."
            )
        self._check_rounds()
        for slot in self.schedule.slots:
            if reason := slot.sampling.only_central or slot.mechanism.only_central:
                raise ValueError(reason)
        if self.unit is PrivacyUnit.PARTY:
            self._check_parties()
        if self.spare < 0:
            raise ValueError(f"spare={self.spare}: must be ≥ 0, the rounds reserved for retries.")
        if not all(0.0 <= factor < math.inf for factor in self.factors) or not any(self.factors):
            raise ValueError(f"factors={self.factors}: must be finite numbers ≥ 0, one at least above 0.")
        if self.secure is not None:
            if self.is_private and not all(slot.mechanism.in_secure_sums for slot in self.schedule.slots):
                raise ValueError("mechanism: secure sums have Gaussian noise only; choose mechanism='gaussian'.")
            if self.is_private and self.correlated is not None and len(self.schedule.slots) > 1:
                named = ", ".join(repr(slot.name) for slot in self.schedule.slots)
                raise ValueError(
                    f"noise='correlated' in one of the slots {named}: a secure sum makes one kind of noise in all "
                    "rounds. Use independent noise, or trust='local' or 'curator'."
                )
            if self.correlated is not None and len(set(self.dims.values())) > 1:
                raise ValueError("correlated noise is over vectors of one length; the queries have several.")
            for dim in sorted({*self.dims.values(), 1}):
                self.terms(dim)  # refuses what cannot be summed
            least = m - self.terms(1).tolerated_dropouts
            if self.quorum < least:
                need = f"masks need {least} of {m} parties to open a sum"
                raise ValueError(f"quorum={self.quorum}: {need}; give so many, or use secure='servers'.")

    def _check_rounds(self) -> None:
        asked = self.parties_per_round
        if asked is None:
            return
        if isinstance(asked, bool) or not isinstance(asked, int) or not self.quorum <= asked <= len(self.names):
            raise ValueError(f"parties_per_round={asked!r}: must be from the quorum to the number of parties.")
        if self.uses_records_in_turn or (self.secure is not None and self.correlated is not None):
            raise ValueError(
                "parties_per_round: cannot be combined with turns or correlated noise, which need every party "
                "in every round. Use Poisson samples and independent noise, or ask all parties."
            )

    def _check_parties(self) -> None:
        """Raise unless each party is one unit, and none's coin is worth anything that others can see."""
        if set(self.sizes) != {1} or set(self.factors) != {1.0}:
            raise ValueError("parties are the privacy unit: each counts once; leave out weights.")
        if self.parties_per_round is not None:
            raise ValueError(
                "parties_per_round: is for records; where parties are the unit, the method samples them."
            )
        replaced = self.budget is not None and self.budget.relation is Relation.REPLACE_ONE
        for sampling in (slot.sampling for slot in self.schedule.slots):
            if sampling.coordinator_draws is not None and self.trust == "curator" and replaced:
                # That a cap costs nothing is proved for a party that holds nothing in the other world.
                raise SettingError(
                    "{sampling='coordinator'} with a trusted curator: under add-remove; or use 'poisson'."
                )
            drawn = sampling.probability < 1.0 and not sampling.in_turns
            if drawn and self.trust != "curator" and sampling.answer_after is None is sampling.coordinator_draws:
                raise SettingError(
                    "{trust}: no trusted curator draws the parties. Use {sampling='turns'} (nothing is "
                    "secret), 'self' (each party draws for itself) or 'coordinator' (with most_rounds).",
                    trust=self.trust,
                )

    def _check_people(self) -> None:
        rule = self.person_rule
        check_records_public(self.records_public, self.n_public, self.unit)
        times = self.parties_per_person
        if isinstance(times, bool) or not isinstance(times, int) or not 1 <= times <= max(1, len(self.names)):
            raise ValueError(f"parties_per_person={times!r}: must be from 1 to the number of parties.")
        if self.unit is not PrivacyUnit.PERSON:
            if times != 1 or not rule.is_mean_of_all:
                raise ValueError("parties_per_person, combine, records_per_person: give every party person=.")
            return
        if times == 1 or self.budget is None:
            return
        # A person's parts are drawn by each party on its own. For Poisson samples the mixture over who drew them is
        # dominated by one draw of all of them, which is proved for add-remove alone; for fixed batches nothing is.
        samplings = [slot.sampling for slot in self.schedule.slots]
        if any(sampling.counts_exactly for sampling in samplings):
            raise SettingError(
                "parties_per_person > 1: cannot be combined with fixed local batches; use {sampling='poisson'}."
            )
        sampled = any(sampling.known_to(times) != sampling for sampling in samplings)
        if sampled and not self.own_noise and self.budget.relation is Relation.REPLACE_ONE:
            raise ValueError(
                "parties_per_person > 1: secret samples are proved under add-remove only; use that relation, or "
                "the full batch."
            )

    @property
    def person_rule(self) -> PersonRule:
        """How a person's records count at each party."""
        return PersonRule(self.combine, self.records_per_person)

    @property
    def own_noise(self) -> bool:
        return self.trust == "local"

    @property
    def uses_records_in_turn(self) -> bool:
        """Whether records take part once, or in turn, so that it matters which were used before."""
        return any(slot.sampling.participation(1) is not None for slot in self.schedule.slots)

    def asks(self, loss: Objective) -> Objective:
        if self.unit is PrivacyUnit.RECORD:
            return loss
        if self.unit is PrivacyUnit.PARTY:
            return PartyLevelObjective(loss)
        return UserLevelObjective(loss, self.person_rule)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By name, a party's place."""
        return {name: j for j, name in enumerate(self.names)}

    def limit(self, slot: str) -> int:
        """The most times a slot may be asked, spare rounds included."""
        return self.schedule[slot].count + self.spare

    @property
    def reach(self) -> float:
        """The most that one record's, or one person's, part in a sum over parties is of a query's bound.

        A party's own noise is about its own sum.
        """
        return max(self.factors) * (1 if self.own_noise else self.parties_per_person)

    def multiplier(self, slot: str) -> float:
        """The noise multiplier of a release, 0 in a run without noise."""
        return self.schedule[slot].multiplier(self.noise_multiplier) if self.is_private else 0.0

    def terms(self, dimension: int) -> SecureSumConfig:
        """Return the agreed terms of secure sums of a length, in units in which the noise has σ = 1."""
        assert self.secure is not None
        settings: dict[str, Any] = {"servers": len(self.servers), "quorum": self.quorum}
        if self.secure == "masks":
            settings = {"honest": self.quorum - self.colluders, "colluders": self.colluders}
        if not self.is_private:
            bound = 2.0 * max(1.0, *self.factors) * sum(self.sizes)
            return SecureSumConfig(self.secure, len(self.names), dimension, bound, 0.0, **settings)
        bound = _REACH
        if self.ring == 32 and self.secure == "masks":
            bound = coarse_reach(len(self.names), settings["honest"])
        return SecureSumConfig(
            self.secure, len(self.names), dimension, bound, 1.0, correlated=self.correlated, ring=self.ring,
            **settings,
        )  # fmt: skip

    @cached_property
    def correlated(self) -> BufferedToeplitzNoise | None:
        mechanisms = (slot.mechanism for slot in self.schedule.slots)
        return next((each for each in mechanisms if isinstance(each, BufferedToeplitzNoise)), None)

    def scale(self, multiplier: float, bound: float, dimension: int) -> float:
        """Return the divisor of a party's sum before a secure sum: σ in the query's own units, rounding included.

        σ = z·(C + k√d·step) with step = σ/units and k parties that may know one person, each of which rounds its
        sum; hence σ = zC/(1 − zk√d/units). Without noise it is C. On a 32-bit ring sums are rounded with a dither,
        which adds far less (:func:`dithered_clip`): k parties' parts of C/k each, by the triangle inequality.
        """
        if not 0.0 < bound < math.inf:
            raise ValueError(f"clip {bound}: a secure sum needs a finite bound on every record.")
        if multiplier == 0.0:
            return bound
        if self.correlated is not None:
            multiplier *= self.correlated.factor
        times = self.parties_per_person
        if self.ring == 32:
            clip = times * dithered_clip(times * multiplier, dimension)
            return bound * self.terms(dimension).noise_units / clip
        share = times * multiplier * math.sqrt(dimension) / self.terms(dimension).noise_units
        if share >= 0.5:
            raise ValueError(f"noise multiplier {multiplier:g} in {dimension} dimensions: the grid is too coarse.")
        return multiplier * bound / (1.0 - share)

    @property
    def variance_factor(self) -> float:
        """Variance of the noise in a sum ÷ that of a trusted curator."""
        parties_add_noise = self.own_noise or self.secure == "masks"
        factor = sum(f * f for f in self.factors) / max(self.factors) ** 2 if self.own_noise else 1.0
        if self.secure is not None:
            factor = self.terms(1).variance_factor if self.is_private else 0.0
        # Sums of k of m parties are multiplied by m/k, and parties that are not asked add none of their noise.
        return factor * self.upscaling ** (1 if parties_add_noise else 2)

    @property
    def upscaling(self) -> float:
        """The factor m/k by which the sum of one round's parties is multiplied, so that it stands for all."""
        return 1.0 if self.parties_per_round is None else len(self.names) / self.parties_per_round

    def event_of(self, counts: Mapping[str, int] | None) -> events.Event:
        """Return the event of ``counts`` releases of each slot, or of all, spare rounds too, if ``None``.

        A run in which some party was never asked counts as a whole one.
        """
        parts = self._party_events(counts)
        if counts is not None and len(parts) < len(self._party_events(None)):
            return self.event_of(None)
        same = all(part == parts[0] for part in parts)
        return parts[0] if same and not self.own_noise else events.MaxOverParties(tuple(parts))

    def party_event(
        self, party: int, counts: Mapping[str, int] | None, *, viewers: bool = False
    ) -> events.Event | None:
        """Return the event of one party's records, or ``None`` if they were never asked.

        A coordinator that draws the parties knows which ones it drew. Unless it is trusted, the event is the one
        against it, or if ``viewers``, against those who see released models alone.
        """
        slots = []  # the schedule with the party's own fixed batches and the spare rounds
        for slot in self.schedule.slots:
            sampling = slot.sampling.at_party(self.sizes, party)
            if sampling is not None and self.trust != "curator" and not viewers:
                sampling = sampling.against_coordinator()
            if sampling is not None:
                law = None if slot.law is None else tuple((r + self.spare, p) for r, p in slot.law)
                slots.append(replace(slot, sampling=sampling, count=slot.count + self.spare, law=law))
        if not slots or (counts is not None and not any(counts.get(slot.name, 0) for slot in slots)):
            return None
        schedule = replace(self.schedule, slots=tuple(slots))
        if not self.own_noise:
            schedule = of_several_parties(schedule, self.parties_per_person)
        run = schedule.event(self.noise_multiplier, self._relation, counts)
        slack = [events.TotalVariationSlack(self.slack)] if self.slack else []
        if self.own_noise and self.parties_per_person > 1:  # so many parties' noisy sums are about one person
            return events.repeated(events.composed([run, *slack]), self.parties_per_person)
        return events.composed([run, *slack])

    @property
    def coordinator_draws(self) -> bool:
        """Whether the coordinator, who is not trusted, draws the parties: then there are two statements."""
        drawn = any(slot.sampling.coordinator_draws is not None for slot in self.schedule.slots)
        return drawn and self.trust != "curator"

    @cached_property
    def answer_after(self) -> float | None:
        """After how many seconds parties that draw in secret answer; ``None`` if none does."""
        times = [slot.sampling.answer_after for slot in self.schedule.slots]
        return max((seconds for seconds in times if seconds is not None), default=None)

    @cached_property
    def _kinds(self) -> list[tuple[Sampling | None, ...]]:
        """How each party draws, slot by slot. Parties that draw alike have equal events."""
        drawn = [slot.sampling for slot in self.schedule.slots]
        return [tuple(s.at_party(self.sizes, j) for s in drawn) for j in range(len(self.names))]

    def _party_events(self, counts: Mapping[str, int] | None) -> list[events.Event]:
        places = {kind: j for j, kind in enumerate(self._kinds)}  # alike in their batches, alike in their events
        alike = {kind: self.party_event(j, counts) for kind, j in places.items()}
        return [event for kind in self._kinds if (event := alike[kind]) is not None]

    @cached_property
    def slack(self) -> float:
        """Total variation that the discrete noise of all secure sums of the run adds up to."""
        if self.secure is None or not self.is_private:
            return 0.0
        slot_sums = [
            (self.limit(slot.name), self.terms(self.dims.get(slot.name, self.shape.dim)))
            for slot in self.schedule.slots
        ]
        distance = math.fsum(count * terms.distance() for count, terms in slot_sums)
        return distance + math.sqrt(math.fsum(count * terms.divergence() for count, terms in slot_sums) / 2.0)

    def proves(self) -> None:
        """Raise unless the plan's own events prove its budget: what a party checks before it approves."""
        if self.budget is None:
            raise BudgetError("this plan adds no noise: its run is not private.")
        if self.epsilon() > self.budget.epsilon * (1.0 + 1e-9):
            raise BudgetError(f"the plan states ε={self.budget.epsilon:g}; its events cost {self.epsilon():g}.")

    def explain(self, bounds: Iterable[object] = ()) -> str:
        """The plan in words, with who takes part, who is trusted, and what that costs in noise."""
        from quietgrad.federation.planning import explain

        return "\n".join((explain(self), *(f"theorem: {bound}" for bound in bounds)))

    def to_json(self) -> dict[str, Any]:
        plan_fields = {_KEYS.get(name, name): vars(self)[name] for name in _OWN}
        plan_fields["shape"] = self.shape._asdict()
        plan_fields |= {name: list(each) for name, each in plan_fields.items() if isinstance(each, tuple)}
        plan_fields["queries"] = {slot: list(templates) for slot, templates in self.templates.items()}
        return {**super().to_json(), "adaptive": self.schedule.adaptive, **plan_fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FederatedPlan:
        """Rebuild a plan from :meth:`to_json`; its events are recomputed, not believed."""
        plan_fields = {name: data[key] for name in _OWN if (key := _KEYS.get(name, name)) in data}
        plan_fields |= {name: tuple(plan_fields[name]) for name in ("names", "sizes", "factors", "servers")}
        plan_fields["templates"] = {slot: tuple(templates) for slot, templates in plan_fields["templates"].items()}
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
            **{**plan_fields, "shape": Shape(**plan_fields["shape"])},
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan: two sides with the same digest agree on every word of it."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), default=list)
        return hashlib.sha256(b"quietgrad federated plan 1\0" + text.encode()).hexdigest()


_OWN = (
    "trust", "names", "sizes", "factors", "secure", "quorum", "colluders", "servers", "spare", "shape",
    "templates", "dims", "parties_per_person", "ring", "parties_per_round", "combine", "records_per_person",
)  # fmt: skip
_KEYS = {"names": "parties", "templates": "queries"}  # as they are called in JSON


def of_several_parties(schedule: Schedule, times: int) -> Schedule:
    """The schedule as it samples a person who is known to so many parties."""
    return replace(schedule, slots=tuple(replace(s, sampling=s.sampling.known_to(times)) for s in schedule.slots))
