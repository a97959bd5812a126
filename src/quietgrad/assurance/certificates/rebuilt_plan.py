"""The plan of a certificate, built again: its settings give slots, and slots and noise give the stated events."""

from __future__ import annotations

from dataclasses import replace

from quietgrad.assurance.certificates.document import PLAN, Json, canonical
from quietgrad.assurance.certificates.stated_claim import ALTERED, Claim, values_of
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.events import (
    Composed,
    Event,
    MaxOverParties,
    TotalVariationSlack,
    composed,
    repeated,
)
from quietgrad.core.errors import QuietgradError
from quietgrad.core.ledger.state import is_part
from quietgrad.core.plans.counting import COUNT, PublicCount
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.session.statement import ADVERSARY
from quietgrad.federation.plan import of_several_parties
from quietgrad.federation.planning import ADVERSARIES
from quietgrad.methods.additive_gd import AdditiveGD
from quietgrad.methods.custom_loop import LoopReleases
from quietgrad.methods.registry import entry

# Texts of certificates of 0.2, in which parties could match their people by lists of hashed ids.
MATCHED = "ids were matched between the parties by a keyed hash"
BUT_FOR_LISTS = (
    "; the parties matched their people by lists of hashed ids, so ε is not about whether somebody is known to a "
    "party against the other parties, who have its list, but about what is recorded of them"
)
# A plan of a stranger is made here, so it must fit the memory.
_MOST_STEPS, _MOST_SLOTS, _MOST_SETTING = 2 * 10**7, 256, 10**6


def rebuilt(body: Json, claim: Claim) -> tuple[Schedule, list[str]]:
    """Return the stated schedule, and what the parts of the file disagree about."""
    plan, federation, privacy = body["plan"], body["federation"], claim.privacy
    numbers = (v for v in values_of([plan["config"], plan["slots"]]) if isinstance(v, int | float) and v == int(v))
    too_large = len(plan["slots"]) > _MOST_SLOTS or max(map(abs, numbers), default=0) > _MOST_STEPS
    if {*plan, "counted"} != PLAN or too_large:
        raise ValueError("plan")
    slots = tuple(Slot.from_json(each) for each in plan["slots"])
    if canonical([slot.to_json() for slot in slots]) != canonical(plan["slots"]):
        raise ValueError("slots")
    rounds = None if plan["rounds"] is None else (float(plan["rounds"][0]), float(plan["rounds"][1]))
    schedule = Schedule(slots, plan["composition"], rounds=rounds)
    count = PublicCount.from_json(int(plan["n_public"]), plan.get("counted"))
    counts = {slot.name: slot.count for slot in slots} | ({COUNT: 1} if count.counted else {})
    try:
        algorithm = _algorithm(plan)
        planned = algorithm.schedule(count.n).under(claim.relation)
    except (*ALTERED, QuietgradError):
        return schedule, ["the slots and the settings"]
    described = "; ".join(f"{slot.name}: {slot.sampling.describe()}" for slot in slots)
    agreed = {
        "the noise multiplier": plan["noise_multiplier"] == privacy.noise_multiplier,
        "the number of records": plan["n_public"] == body["data"]["n_public"],
        # Which also says what is drawn: records, or people.
        "the sampling or the unit": privacy.sampling == privacy.unit.in_words(described),
        "the private count": _count_agrees(count, claim),
        "the releases": all(type(n) is int and 0 <= n <= counts.get(k, -1) for k, n in privacy.releases.items()),
        "the condition": algorithm.condition == privacy.condition,
        **_federation_agrees(federation, plan["n_public"], claim),
        "the slots and the settings": _same(planned, schedule, federated=bool(federation)),
    }
    if problems := [what for what, ok in agreed.items() if not ok]:
        return schedule, problems
    random_rounds = {slot.name for slot in slots if slot.law is not None}
    fixed = not planned.adaptive and planned.rounds is None and schedule.composition == "sequential"
    fewer = any(privacy.releases.get(name, 0) < n for name, n in counts.items() if name not in random_rounds)
    if fixed and fewer and plan["stopped_by"] == "steps" and federation is None:
        return schedule, ["how many releases its steps make"]
    # Fewer releases than the slots hold may be what is paid for: rounds that a federation kept spare. A run that
    # stops for another reason pays for the whole plan, and so does one whose releases follow from data or a draw.
    least = {slot.name: slot.count if federation is None else 1 for slot in slots}
    least |= {slot.name: slot.count for slot in planned.slots}
    parts_count = (
        plan["stopped_by"] in ("steps", "budget")
        and not (planned.adaptive or planned.rounds is not None or random_rounds)
        and all(privacy.releases.get(name, 0) >= n for name, n in least.items())
    )
    derived = _derived(schedule, claim, federation, count, parts_count=parts_count)
    return schedule, [] if derived else ["the events and its slots, noise and releases"]


def _federation_agrees(federation: Json | None, n_public: object, claim: Claim) -> dict[str, bool]:
    """Whether the parties' sizes add up to the records stated, and the adversary is that of the trust setting."""
    adversary = claim.privacy.adversary
    parties = len(claim.event.parties) if isinstance(claim.event, MaxOverParties) else None
    if federation is None:
        return {"the adversary": adversary == ADVERSARY, "the parties": parties is None}
    if set(federation) != {"trust", "secure", "sizes", "parties_per_person", "matched", "plan_file"}:
        raise ValueError("federation")
    trust, sizes, matched = federation["trust"], federation["sizes"], federation["matched"]
    against = adversary.removesuffix(BUT_FOR_LISTS)
    matching_marks = any(MATCHED in str(note) for note in claim.privacy.notes), adversary.endswith(BUT_FOR_LISTS)
    return {
        "the parties' records": all(type(s) is int and s > 0 for s in sizes) and sum(sizes) == n_public,
        "the parties": trust != "local" if parties is None else parties == len(sizes),
        "the trust": trust in (*ADVERSARIES, "secure"),
        "the adversary": against == ADVERSARIES.get(trust, against) and matching_marks == (matched, matched),
    }


def _of_parties(claim: Claim) -> list[Event]:
    """The releases of each party, without the distance of discrete noise to the stated one, which is no release."""
    stated = claim.event.parties if isinstance(claim.event, MaxOverParties) else (claim.event,)
    return [
        composed(event.parts[:-1])
        if isinstance(event, Composed) and isinstance(event.parts[-1], TotalVariationSlack)
        else event
        for event in stated
    ]


def _count_agrees(count: PublicCount, claim: Claim) -> bool:
    """Whether a count that was a release is stated as one, paid for, and may stand before these releases."""
    if not count.counted:
        return COUNT not in claim.privacy.releases
    try:
        for event in _of_parties(claim):
            count.rest_of(event, claim.relation)
    except ValueError:
        return False
    return claim.relation is Relation.ADD_REMOVE and claim.privacy.releases.get(COUNT) == 1


def _derived(
    schedule: Schedule, claim: Claim, federation: Json | None, count: PublicCount, *, parts_count: bool
) -> bool:
    """Whether the stated event follows from the schedule, for the whole plan or for the releases made."""
    parties, z, relation = _of_parties(claim), claim.privacy.noise_multiplier, claim.relation
    for k, whole_event in enumerate(parties):
        event = count.rest_of(whole_event, relation)
        party_schedule, times = (
            (schedule, 1) if federation is None else _of_party(schedule, federation, k, len(parties))
        )
        all_of_it = repeated(party_schedule.event(z, relation), times)
        release_counts = {name: n for name, n in claim.privacy.releases.items() if n and name != COUNT}
        follow = {all_of_it}
        if release_counts and parts_count:
            follow.add(repeated(party_schedule.event(z, relation, release_counts), times))
        if event in follow:
            continue
        # Resumed on other sums: charged once more for what it released then.
        parts = event.parts if isinstance(event, Composed) else ()
        if not (any(part in follow for part in parts) and all(is_part(part, all_of_it) for part in parts)):
            return False
    return True


def _of_party(schedule: Schedule, federation: Json, party: int, parties: int) -> tuple[Schedule, int]:
    """Return the schedule of one party and how often it counts for a person who is known to several parties."""
    known_to = 1 if federation["parties_per_person"] is None else int(federation["parties_per_person"])
    if federation["trust"] != "local":
        schedule, known_to = of_several_parties(schedule, known_to), 1
    sizes = tuple(int(size) for size in federation["sizes"])
    if parties not in (1, len(sizes)) and any(slot.sampling.counts_exactly for slot in schedule.slots):
        raise ValueError("parties")
    drawn = [(slot, slot.sampling.at_party(sizes, party)) for slot in schedule.slots]
    if federation["trust"] != "curator":  # a coordinator that draws the parties knows whom
        drawn = [(slot, None if scheme is None else scheme.against_coordinator()) for slot, scheme in drawn]
    slots = tuple(replace(slot, sampling=scheme) for slot, scheme in drawn if scheme is not None)
    return replace(schedule, slots=slots), known_to


def _algorithm(plan: Json) -> HasSchedule:
    """Return the algorithm at its stated settings; raise if there is no such thing."""
    name, config = plan["algorithm"], plan["config"]
    if any(type(v) is int and v > _MOST_SETTING and "batch" not in key for key, v in config.items()):
        raise ValueError("settings")
    for kind in (LoopReleases, AdditiveGD):
        if name == kind.name:
            return kind.from_config(config)
    try:
        method: HasSchedule = entry(name).make(config)
    except ValueError:  # settings with parts of their own, which only the class itself reads
        method = entry(name).kind(**config)
    return method


def _same(planned: Schedule, schedule: Schedule, *, federated: bool) -> bool:
    """Whether a plan has the slots of its algorithm; estimates made before may stand beside them."""
    stated = {slot.name: slot for slot in schedule.slots}
    if planned.composition != schedule.composition or planned.rounds != schedule.rounds:
        return False
    spare = set()
    for slot in planned.slots:
        other = stated.get(slot.name)
        if other is None or canonical(slot.to_json()) != canonical({**other.to_json(), "count": slot.count}):
            return False
        spare.add(other.count - slot.count)
    # A federation may repeat rounds that were lost: as many spare ones for each slot.
    return spare == {0} or (federated and len(spare) == 1 and min(spare) > 0)
