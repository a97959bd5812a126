"""Whether a certificate's parts agree: settings plan its slots, slots and noise give its events.

The claim is read as a statement of privacy, or refused, before anything else is compared with it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quietgrad.algorithms.additive_gd import AdditiveGD
from quietgrad.algorithms.custom_loop import LoopReleases
from quietgrad.algorithms.registry import ALGORITHMS, entry
from quietgrad.certificates.document import canonical
from quietgrad.errors import QuietgradError
from quietgrad.plans.counting import COUNT, PublicCount
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.budget import Relation, check_delta
from quietgrad.privacy.events import Composed, Event, MaxOverParties, TotalVariationSlack, composed, repeated
from quietgrad.privacy.ledger_state import is_part
from quietgrad.training.result import ADVERSARY, REFUTED, SEEDED, Privacy, event_size

if TYPE_CHECKING:
    from quietgrad.algorithms.base import HasSchedule


_MOST_EVENTS = 4096
_MOST_BYTES = 1 << 17  # of an event: a law of 128 groups has five thousand
_MOST_LAW = 512  # rounds that are told apart
ALTERED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class CertificateClaim:
    """The parts of a body that were read and are of their kind."""

    privacy: Privacy
    event: Event
    epsilon: float
    delta: float
    relation: Relation


def read_claim(body: dict[str, Any]) -> CertificateClaim:
    stated, event = body["claim"], body["event"]
    if not isinstance(stated, dict) or "event" in stated:
        raise ValueError("claim")
    if event_size(event) > _MOST_EVENTS or len(canonical(event)) > _MOST_BYTES or _longest(event) > _MOST_LAW:
        raise ValueError("too many events")
    privacy = Privacy.from_json({**stated, "event": event})
    if privacy.to_json() != {
        "condition": None,
        **stated,
        "event": event,
    }:  # nothing was added, and nothing is spelt otherwise
        raise ValueError("claim")
    if privacy.events is None or privacy.relation is None or type(privacy.epsilon) is not float:
        raise ValueError("no ε")
    if not privacy.is_private or not 0.0 < privacy.epsilon < math.inf:
        raise ValueError("not private")
    if SEEDED in privacy.notes or any(str(note).startswith(REFUTED) for note in privacy.notes):
        raise ValueError("not private")
    _check_kinds(body)
    return CertificateClaim(
        privacy, privacy.events, privacy.epsilon, check_delta(privacy.delta or 0.0), privacy.relation
    )


_DATA = {
    "name", "n_public", "objective", "regularizer", "intercept", "row_bound", "rows", "features", "task", "classes",
}  # fmt: skip


def _check_kinds(body: dict[str, Any]) -> None:
    """Refuse parts of another kind, wherever nothing else in the file could contradict them."""
    plan, data, model, versions = body["plan"], body["data"], body["model"], body["versions"]
    if not all(isinstance(part, dict) for part in (plan, data, model, versions)):
        raise TypeError("parts")
    good = (
        isinstance(body["issued"], str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", body["issued"]),
        {"name", "n_public"} <= set(data) <= _DATA and isinstance(data["name"], str),
        all(value is None or isinstance(value, str | int | float) for value in data.values()),
        set(model) == {"sha256", "parameters"} and type(model["parameters"]) is int and model["parameters"] > 0,
        isinstance(model.get("sha256"), str) and re.fullmatch(r"[0-9a-f]{64}", model["sha256"]),
        all(isinstance(value, str) for value in versions.values()),
        isinstance(plan.get("stopped_by"), str) and isinstance(plan.get("algorithm"), str),
    )
    if not all(good):
        raise ValueError("parts")


def _longest(event: Any) -> int:
    """How many rounds the longest law in an event has."""
    if isinstance(event, list):
        return max(map(_longest, event), default=0)
    if not isinstance(event, dict):
        return 0
    law = event.get("law")
    return max(len(law) if isinstance(law, list) else 0, *map(_longest, event.values()), 0)


_MOST_STEPS = 2 * 10**7  # a plan of a stranger is made here: its lists must fit
_MOST_SLOTS = 256
_MOST_SETTING = 10**6  # some plan a slot, or a weight of a law, for each


def plan_problems(body: dict[str, Any], claim: CertificateClaim) -> tuple[Schedule, list[str]]:
    plan, privacy = body["plan"], claim.privacy
    expected = {
        "algorithm",
        "composition",
        "config",
        "counted",
        "n_public",
        "noise_multiplier",
        "rounds",
        "slots",
        "stopped_by",
    }
    if (
        {*plan, "counted"} != expected
        or len(plan["slots"]) > _MOST_SLOTS
        or _largest([plan["config"], plan["slots"]]) > _MOST_STEPS
    ):
        raise ValueError("plan")
    slots = tuple(Slot.from_json(each) for each in plan["slots"])
    if canonical([slot.to_json() for slot in slots]) != canonical(plan["slots"]):
        raise ValueError("slots")
    rounds = None if plan["rounds"] is None else (float(plan["rounds"][0]), float(plan["rounds"][1]))
    schedule = Schedule(slots, plan["composition"], rounds=rounds)
    count = PublicCount.from_json(int(plan["n_public"]), plan.get("counted"))
    found = []
    if count.counted and claim.relation is not Relation.ADD_REMOVE:
        found.append("its records were counted privately, and their number is public")
    if plan["noise_multiplier"] != privacy.noise_multiplier:
        found.append("the claim states another noise multiplier")
    if plan["n_public"] != body["data"]["n_public"]:
        found.append("the data are stated with another number of records")
    described = "; ".join(f"{slot.name}: {slot.sampling.describe()}" for slot in slots)
    if privacy.sampling != privacy.unit.in_words(described):  # which also says whom it draws: records, or people
        found.append("the claim states another sampling, or another unit")
    found += _federation_problems(body["federation"], plan["n_public"], claim)
    counts = {slot.name: slot.count for slot in slots} | ({COUNT: 1} if count.counted else {})
    if count.counted and privacy.releases.get(COUNT) != 1:
        found.append("its records were counted privately, and no such release is stated")
    for name, made in privacy.releases.items():
        if type(made) is not int or not 0 <= made <= counts.get(name, -1):
            found.append("releases are stated that were not planned")
    algorithm = _algorithm(plan)
    if algorithm is not None and algorithm.condition != privacy.condition:
        found.append("the claim states another condition than the algorithm has at its settings")
    planned = None if algorithm is None else _planned(algorithm, plan, claim.relation)
    if not found and (planned is None or not _same(planned, schedule, federated=body["federation"] is not None)):
        found.append("the slots are not those that the algorithm has at its settings")
    if not found and planned is not None:
        fixed = not planned.adaptive and planned.rounds is None and schedule.composition == "sequential"
        if fixed and plan["stopped_by"] == "steps" and body["federation"] is None:
            lawful = {slot.name for slot in slots if slot.law is not None}
            if any(privacy.releases.get(name, 0) < n for name, n in counts.items() if name not in lawful):
                found.append("fewer releases are stated than its steps make")
        parts_count = plan["stopped_by"] in ("steps", "budget") and _may_end_there(planned, schedule, body, claim)
        if not _derived(schedule, claim, body["federation"], count, parts_count=parts_count):
            found.append("the events are not those that its slots, noise and releases give")
    return schedule, found


def _federation_problems(federation: Any, n_public: Any, claim: CertificateClaim) -> list[str]:
    """The parties' sizes must add up to the records stated, and the adversary must be that of the trust setting."""
    from quietgrad.federation.plan import MATCHED
    from quietgrad.federation.planning import ADVERSARIES, BUT_FOR_LISTS

    if federation is None:
        if isinstance(claim.event, MaxOverParties):
            return ["events of parties are stated without a federation"]
        return [] if claim.privacy.adversary == ADVERSARY else ["the claim states another adversary"]
    if set(federation) != {"trust", "secure", "sizes", "parties_per_person", "matched", "plan_file"}:
        raise ValueError("federation")
    found, sizes = [], federation["sizes"]
    if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != n_public:
        found.append("its parties have another number of records together")
    if isinstance(claim.event, MaxOverParties) and len(claim.event.parties) != len(sizes):
        found.append("the events are of another number of parties")
    if federation["trust"] == "local" and not isinstance(claim.event, MaxOverParties):
        found.append("each party's own noise is stated, and events of all parties together")
    if federation["trust"] not in (*ADVERSARIES, "secure"):
        found.append("it states a trust that is not known here")
    elif claim.privacy.adversary.removesuffix(BUT_FOR_LISTS) != ADVERSARIES.get(
        federation["trust"], claim.privacy.adversary.removesuffix(BUT_FOR_LISTS)
    ):
        found.append("the claim states another adversary")
    told = (
        any(MATCHED in str(note) for note in claim.privacy.notes),
        claim.privacy.adversary.endswith(BUT_FOR_LISTS),
    )
    if told != (federation["matched"],) * 2:
        found.append(
            "people were matched by lists, and the adversary is not one who has them, or the other way round"
        )
    return found


def _may_end_there(planned: Schedule, stated: Schedule, body: dict[str, Any], claim: CertificateClaim) -> bool:
    """Whether fewer releases than the slots hold may be what is paid for: rounds that a federation kept spare.

    Whoever stops for another reason pays for the whole plan, and so does whose releases follow from data or from a
    secret draw.
    """
    if planned.adaptive or planned.rounds is not None or any(slot.law is not None for slot in stated.slots):
        return False
    made = claim.privacy.releases
    least = {slot.name: slot.count if body["federation"] is None else 1 for slot in stated.slots}
    least |= {slot.name: slot.count for slot in planned.slots}
    return all(made.get(name, 0) >= count for name, count in least.items())


def _largest(value: Any) -> float:
    """The largest whole number in JSON values; what a plan is made of is as long as its numbers say."""
    if isinstance(value, dict | list):
        return max((_largest(item) for item in (value.values() if isinstance(value, dict) else value)), default=0)
    return abs(value) if isinstance(value, int) or (isinstance(value, float) and value.is_integer()) else 0


def _derived(
    schedule: Schedule, claim: CertificateClaim, federation: Any, count: PublicCount, *, parts_count: bool
) -> bool:
    """Whether the stated event follows from the schedule, for the whole plan or for the releases made."""
    parties = _without_slack(claim.event)
    first = count.event(claim.relation)
    for k, event in enumerate(parties):
        if first is not None:
            if not isinstance(event, Composed) or event.parts[0] != first:
                return False
            event = composed(event.parts[1:])
        own, times = (schedule, 1) if federation is None else _of_party(schedule, federation, k, len(parties))
        z, relation = claim.privacy.noise_multiplier, claim.relation
        all_of_it = repeated(own.event(z, relation), times)
        made = {name: n for name, n in claim.privacy.releases.items() if n and name != COUNT}
        follow = {all_of_it}
        if made and parts_count:
            follow.add(repeated(own.event(z, relation, made), times))
        resumed = isinstance(event, Composed) and any(part in follow for part in event.parts)
        # Resumed on other sums: charged once more for what it released then.
        if event not in follow and not (resumed and all(is_part(part, all_of_it) for part in event.parts)):  # type: ignore[attr-defined]
            return False
    return True


def _without_slack(event: Event) -> list[Event]:
    """What each party's records went through, apart from the distance of discrete noise to the stated one."""
    found = []
    for part in event.parties if isinstance(event, MaxOverParties) else (event,):
        if isinstance(part, Composed) and isinstance(part.parts[-1], TotalVariationSlack):
            part = composed(part.parts[:-1])
        found.append(part)
    return found


def _of_party(schedule: Schedule, federation: dict[str, Any], party: int, parties: int) -> tuple[Schedule, int]:
    """The schedule with the local batches of one party, where batches are of fixed size, and how often it counts.

    Both as priced for a person who is known to several parties.
    """
    from quietgrad.federation.plan import of_several_parties

    known_to = 1 if federation["parties_per_person"] is None else int(federation["parties_per_person"])
    if federation["trust"] != "local":
        schedule, known_to = of_several_parties(schedule, known_to), 1

    sizes = tuple(int(size) for size in federation["sizes"])
    slots = []
    for slot in schedule.slots:
        if slot.sampling.counts_exactly and parties not in (1, len(sizes)):
            raise ValueError("parties")
        sampling = slot.sampling.at_party(sizes, party)
        if sampling is not None:
            slots.append(replace(slot, sampling=sampling))
    return replace(schedule, slots=tuple(slots)), known_to


def _algorithm(plan: dict[str, Any]) -> HasSchedule | None:
    """The algorithm at its stated settings; ``None`` if there is no such thing."""
    name, config = plan["algorithm"], plan["config"]
    if any(type(v) is int and v > _MOST_SETTING and "batch" not in key for key, v in config.items()):
        return None
    try:
        if name == LoopReleases.name:
            return LoopReleases.from_config(config)
        if name == AdditiveGD.name:
            return AdditiveGD.from_config(config)
        if name not in ALGORITHMS:
            return None
        try:
            made: HasSchedule = entry(name).make(config)
        except ValueError:  # settings with parts of their own, which only the class itself reads
            made = entry(name).kind(**config)
    except (*ALTERED, QuietgradError):
        return None
    return made


def _planned(algorithm: HasSchedule, plan: dict[str, Any], relation: Relation) -> Schedule | None:
    """What the algorithm plans for its stated number of records; ``None`` if there is no such thing."""
    try:
        return algorithm.schedule(int(plan["n_public"])).under(relation)
    except (*ALTERED, QuietgradError):
        return None


def _same(planned: Schedule, schedule: Schedule, *, federated: bool) -> bool:
    """Whether a plan has the slots of its algorithm; looks before it may stand beside them."""
    stated = {slot.name: slot for slot in schedule.slots}
    if planned.composition != schedule.composition or planned.rounds != schedule.rounds:
        return False
    if not all(slot.name in stated and _same_releases(slot, stated[slot.name]) for slot in planned.slots):
        return False
    # A federation may repeat rounds that were lost: as many spare ones for each slot.
    spare = {stated[slot.name].count - slot.count for slot in planned.slots}
    return spare == {0} or (federated and len(spare) == 1 and min(spare) > 0)


def _same_releases(planned: Slot, stated: Slot) -> bool:
    """Equal, but for how often."""
    ours, theirs = planned.to_json(), stated.to_json()
    return canonical({**ours, "count": 0}) == canonical({**theirs, "count": 0})
