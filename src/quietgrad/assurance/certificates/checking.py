"""Checking a certificate: what its parts prove, whether they agree, who signed it, and what it does not show.

The checks trust nothing that the file states. The stated algorithm at its settings gives the slots, and slots and
noise give the events: both must be those in the file. ε is proved again from the events by the accountant that is
named and, where it has a rule that is as tight, by dp-accounting; a proof names the code that made it. The lines of
the ledger must chain and have paid for these events at this δ under this relation. A forger can rewrite all parts
alike unless the file is signed: without a signature only agreement is shown, and the verdict says so.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quietgrad.assurance.certificates.document import (
    PLAN,
    PUBLIC_MODEL,
    Json,
    PrivacyCertificate,
    canonical,
    covered,
    signature_holds,
    standings,
    statement,
)
from quietgrad.assurance.certificates.independent_accountant import second_proof, sensitivity_again, verifier_proof
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import PrivacyUnit, Relation, check_delta
from quietgrad.core.accounting.events import (
    Composed,
    Event,
    MaxOverParties,
    TotalVariationSlack,
    composed,
    repeated,
)
from quietgrad.core.errors import DataError, LedgerError, QuietgradError, UnprovableError
from quietgrad.core.files import read_bytes
from quietgrad.core.ledger.chain import ChainEntry, anchor, check_anchor
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import LedgerState, compose_events, is_part
from quietgrad.core.plans.counting import COUNT, PublicCount
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import DECLARED, Schedule, Slot
from quietgrad.core.session.statement import ADVERSARY, REFUTED, SEEDED, Privacy, event_size
from quietgrad.federation.plan import of_several_parties
from quietgrad.federation.planning import ADVERSARIES
from quietgrad.methods.additive_gd import AdditiveGD
from quietgrad.methods.custom_loop import LoopReleases
from quietgrad.methods.registry import entry
from quietgrad.methods.result import unpaid

# Texts of certificates of 0.2, in which parties could match their people by lists of hashed ids.
MATCHED = "ids were matched between the parties by a keyed hash"
BUT_FOR_LISTS = (
    "; the parties matched their people by lists of hashed ids, so ε is not about whether somebody is known to a "
    "party against the other parties, who have its list, but about what is recorded of them"
)

AGREES = 1e-3  # relative: both accountants round losses up to a grid
VERIFIER_AGREES = 0.01  # relative: quietgrad-verify says so of itself, and prints both numbers
_EXACT = 1e-6  # relative: our own accountant on another machine
_UNIT = {
    PrivacyUnit.RECORD: "one record is one person",
    PrivacyUnit.PERSON: "every person has one id in them",
    PrivacyUnit.PARTY: "no person's data are held by two parties, of which each is protected as a whole",
}
# A plan of a stranger is made here, and its events are proved: both must fit the memory.
_MOST_EVENTS, _MOST_BYTES, _MOST_LAW = 4096, 1 << 17, 512
_MOST_STEPS, _MOST_SLOTS, _MOST_SETTING = 2 * 10**7, 256, 10**6
_MOST_KINDS = 200  # different events of one account that are added up here
ALTERED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Finding:
    """One check of a certificate; ``ok=None`` where it does not apply."""

    what: str
    ok: bool | None
    words: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking a certificate: findings, what is shown, what is not."""

    claim: str
    findings: tuple[Finding, ...]
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]
    bound_by: tuple[str, ...] = ()
    """What holds the claim fast: a signature, a ledger's head."""
    open: tuple[str, ...] = ()
    """Fields that something should hold fast and nothing does."""
    standing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The fields by standing: proved, bound or said."""

    @property
    def ok(self) -> bool:
        """Whether ε is proved again and nothing was found altered."""
        return all(finding.ok is not False for finding in self.findings)

    @property
    def accountants(self) -> int:
        """By how many accountants with code of their own ε is proved: two, or ours alone."""
        return sum(finding.what in ("proof", "second proof") and finding.ok is True for finding in self.findings)

    def to_json(self) -> Json:
        """Return the verdict as JSON values."""
        return {"ok": self.ok, "accountants": self.accountants, **asdict(self)}


def _statement_finding(body: Json) -> Finding:
    """Whether the statement is what the fields say."""
    try:
        same = statement(body) == body["statement"]
    except ALTERED as error:
        return Finding("statement", False, f"its fields cannot be read ({type(error).__name__})")
    return Finding("statement", same, "it follows from the fields" if same else "it is not what the fields say")


def check(
    document: PrivacyCertificate,
    *,
    public_key: str | None = None,
    ledger: str | Path | None = None,
    model: str | Path | None = None,
) -> Verdict:
    """Check a certificate that :func:`~quietgrad.assurance.certificates.document.read` has read.

    Args:
        public_key: the key that must have signed it, in hexadecimal; a certificate without a signature, or with
            another's, then fails.
        ledger: the ledger itself, if it is at hand: it must have grown from the one that is certified.
        model: the model file, if it is at hand: it must be the one that is certified.
    """
    for file in (ledger, model):
        if file is not None and not Path(file).exists():
            raise DataError(f"{file}: there is no such file.")
    body, findings = document.body, [_signature(document, public_key)]
    try:
        claim = _read_claim(body)
    except ALTERED as error:
        words = f"it is not a statement of privacy with its releases ({type(error).__name__})"
        findings.append(Finding("claim", False, words))
        return Verdict("unreadable", tuple(findings), (), ("Anything: the claim cannot be read.",))
    if document.version > 1:
        findings.append(_statement_finding(body))
    schedule, name = None, f"{body['source']['program']} {body['source']['version']}" if claim.foreign else ""
    if claim.foreign:
        findings.append(Finding("plan", None, f"none: a run of {name}; its releases are its author's word"))
        findings.append(_printed(claim, body["source"]))
    else:
        try:
            schedule, problems = _rebuild(body, claim)
            words = f"the parts of the file disagree about {', '.join(problems)}" if problems else ""
        except ALTERED as error:
            words = f"it cannot be read as a plan ({type(error).__name__})"
        agrees = "the events are those of its slots and noise, and the slots those of its settings"
        findings.append(Finding("plan", not words, words or agrees))
    counted = None if claim.foreign else body["plan"].get("counted")
    findings += [_first_proof(claim, counted), _second_finding(claim, schedule)]
    try:
        findings += _ledger_findings(body, claim, ledger)
    except ALTERED as error:
        findings.append(Finding("ledger", False, f"its lines are not those of a ledger ({type(error).__name__})"))
    findings.append(_model_finding(body, model))
    stated = f"({claim.epsilon:.4g}, {claim.delta:g})-DP per {claim.privacy.unit} under {claim.relation}"
    stated = stated if claim.privacy.condition is None else f"{stated}, {claim.privacy.condition}"
    stated = "; ".join([stated, *(note for note in claim.privacy.notes if note.endswith(DECLARED))])
    stated = f"{name or body['plan'].get('algorithm')} on {body['data'].get('name')}: {stated}"
    bound_by, by = _bound_by(document, findings), standings(body)
    left_open = () if bound_by else by["bound"]
    shown, not_shown = _words(document, claim, findings, public_key)
    if not bound_by:
        open_words = f"What nothing holds fast, neither a signature nor a ledger: {', '.join(left_open)}."
        not_shown = (open_words, *not_shown)
    return Verdict(stated, tuple(findings), shown, not_shown, bound_by, left_open, by)


def _bound_by(document: PrivacyCertificate, findings: list[Finding]) -> tuple[str, ...]:
    """Return what binds the claim: a valid signature, the ledger's head, both or neither."""
    good = {finding.what for finding in findings if finding.ok}
    signer = document.signature["public_key"] if document.signature is not None else ""
    head = (document.body["ledger"] or {}).get("head")
    return (
        *((f"the signature of {signer}",) if "signature" in good else ()),
        *((f"the ledger's head {head}",) if "bound" in good else ()),
    )


def _printed(claim: _Claim, source: Json) -> Finding:
    """The ε that another program printed, held against what its releases cost."""
    printed, name = source["stated"], f"{source['program']} {source['version']}"
    if printed is None or printed["delta"] != claim.delta:
        return Finding("printed", None, f"{name} printed no ε at this δ that the claim holds")
    if printed["epsilon"] < claim.epsilon * (1.0 - VERIFIER_AGREES):
        words = f"{name} printed ε = {printed['epsilon']:.6g}; the releases cost {claim.epsilon:.6g}"
        return Finding("printed", False, words)
    return Finding("printed", True, f"{name} printed ε = {printed['epsilon']:.6g}, no less than is proved")


def _signature(document: PrivacyCertificate, demanded: str | None) -> Finding:
    if document.signature is None:
        words = "none: the author of this file could have written any other"
        return Finding("signature", None if demanded is None else False, words)
    if not signature_holds(document):
        return Finding("signature", False, "it does not fit: the file was altered, or never signed")
    signer = document.signature["public_key"]
    if demanded is None:
        return Finding("signature", True, f"it fits the key {signer}; compare that with the signer's own word")
    if signer != demanded:
        return Finding("signature", False, f"it is by another key, {signer}")
    return Finding("signature", True, "it fits, by the key that was asked for")


@dataclass(frozen=True)
class _Claim:
    """The statement of privacy that a body holds, and its parts that are never ``None``."""

    privacy: Privacy
    event: Event
    epsilon: float
    delta: float
    relation: Relation
    foreign: bool = False
    """Whether it is of another program's run, without a plan."""


def _read_claim(body: Json) -> _Claim:
    """The claim; one of ``ALTERED`` if a part of the body is not of its kind, or no ε is claimed."""
    stated, event = body["claim"], body["event"]
    laws = (len(v["law"]) for v in _values(event) if isinstance(v, dict) and isinstance(v.get("law"), list))
    if event_size(event) > _MOST_EVENTS or len(canonical(event)) > _MOST_BYTES or max(laws, default=0) > _MOST_LAW:
        raise ValueError("too many events")
    privacy = Privacy.from_json({**stated, "event": event})
    # Nothing was added, and nothing is spelt otherwise.
    if "event" in stated or privacy.to_json() != {"condition": None, **stated, "event": event}:
        raise ValueError("claim")
    if privacy.events is None or privacy.relation is None or type(privacy.epsilon) is not float:
        raise ValueError("no ε")
    not_private = SEEDED in privacy.notes or any(str(note).startswith(REFUTED) for note in privacy.notes)
    if not privacy.is_private or not 0.0 < privacy.epsilon < math.inf or not_private:
        raise ValueError("not private")
    # Parts that nothing else in the file could contradict must at least be of their kind.
    data, foreign = body["data"], "source" in body and body["plan"] is None
    plan = {"stopped_by": "", "algorithm": ""} if foreign else body["plan"]
    model: Json = {"sha256": "0" * 64, "parameters": 1} if foreign else body["model"]
    source = body.get("source", {"program": "", "version": "", "object": "", "stated": None})
    good = (
        set(source) == {"program", "version", "object", "stated"} and (body["model"] is None) == foreign,
        all(isinstance(source[key], str) for key in ("program", "version", "object")),
        source["stated"] is None or set(source["stated"]) == {"epsilon", "delta"},
        isinstance(body.get("statement", ""), str),
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", body["issued"]),
        {"name", "n_public"} <= set(data) <= {"name", "n_public", *PUBLIC_MODEL} and isinstance(data["name"], str),
        all(value is None or isinstance(value, str | int | float) for value in data.values()),
        set(model) == {"sha256", "parameters"} and type(model["parameters"]) is int and model["parameters"] > 0,
        re.fullmatch(r"[0-9a-f]{64}", model["sha256"]),
        all(isinstance(value, str) for value in body["versions"].values()),
        isinstance(plan["stopped_by"], str) and isinstance(plan["algorithm"], str),
    )
    if not all(good):
        raise ValueError("parts")
    delta = check_delta(privacy.delta or 0.0)
    return _Claim(privacy, privacy.events, privacy.epsilon, delta, privacy.relation, foreign)


def _values(value: object) -> Iterator[Any]:
    """Every value of a JSON document, containers too."""
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _values(item)


def _rebuild(body: Json, claim: _Claim) -> tuple[Schedule, list[str]]:
    """The stated schedule, and what the parts of the file disagree about."""
    plan, federation, privacy = body["plan"], body["federation"], claim.privacy
    numbers = (v for v in _values([plan["config"], plan["slots"]]) if isinstance(v, int | float) and v == int(v))
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


def _federation_agrees(federation: Json | None, n_public: object, claim: _Claim) -> dict[str, bool]:
    """Whether the parties' sizes add up to the records stated, and the adversary is that of the trust setting."""
    adversary = claim.privacy.adversary
    parties = len(claim.event.parties) if isinstance(claim.event, MaxOverParties) else None
    if federation is None:
        return {"the adversary": adversary == ADVERSARY, "the parties": parties is None}
    if set(federation) != {"trust", "secure", "sizes", "parties_per_person", "matched", "plan_file"}:
        raise ValueError("federation")
    trust, sizes, matched = federation["trust"], federation["sizes"], federation["matched"]
    against = adversary.removesuffix(BUT_FOR_LISTS)
    said = any(MATCHED in str(note) for note in claim.privacy.notes), adversary.endswith(BUT_FOR_LISTS)
    return {
        "the parties' records": all(type(s) is int and s > 0 for s in sizes) and sum(sizes) == n_public,
        "the parties": trust != "local" if parties is None else parties == len(sizes),
        "the trust": trust in (*ADVERSARIES, "secure"),
        "the adversary": against == ADVERSARIES.get(trust, against) and said == (matched, matched),
    }


def _of_parties(claim: _Claim) -> list[Event]:
    """The releases of each party, without the distance of discrete noise to the stated one, which is no release."""
    stated = claim.event.parties if isinstance(claim.event, MaxOverParties) else (claim.event,)
    return [
        composed(event.parts[:-1])
        if isinstance(event, Composed) and isinstance(event.parts[-1], TotalVariationSlack)
        else event
        for event in stated
    ]


def _count_agrees(count: PublicCount, claim: _Claim) -> bool:
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
    schedule: Schedule, claim: _Claim, federation: Json | None, count: PublicCount, *, parts_count: bool
) -> bool:
    """Whether the stated event follows from the schedule, for the whole plan or for the releases made."""
    parties, z, relation = _of_parties(claim), claim.privacy.noise_multiplier, claim.relation
    for k, whole_event in enumerate(parties):
        event = count.rest_of(whole_event, relation)
        own, times = (schedule, 1) if federation is None else _of_party(schedule, federation, k, len(parties))
        all_of_it = repeated(own.event(z, relation), times)
        made = {name: n for name, n in claim.privacy.releases.items() if n and name != COUNT}
        follow = {all_of_it}
        if made and parts_count:
            follow.add(repeated(own.event(z, relation, made), times))
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
    slots = tuple(replace(slot, sampling=sampling) for slot, sampling in drawn if sampling is not None)
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
        made: HasSchedule = entry(name).make(config)
    except ValueError:  # settings with parts of their own, which only the class itself reads
        made = entry(name).kind(**config)
    return made


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


def _first_proof(claim: _Claim, counted: object) -> Finding:
    name = str(claim.privacy.accountant)
    families = ("gaussian-exact", "pure", "pld", "zcdp", "rdp")
    family = "best" if claim.foreign else next((each for each in families if name.startswith(each)), None)
    if family is None:
        return Finding("proof", False, "the claim names no accountant that is known here")
    try:
        proof = prove(claim.event, delta=claim.delta, relation=claim.relation, accountant=family)
    except (UnprovableError, *ALTERED) as error:
        return Finding("proof", False, f"quietgrad proves no ε from the events ({error})")
    proved = f"ε = {proof.epsilon:.6g}"
    if claim.foreign:  # its ε was proved by quietgrad-verify, on a grid of its own
        good = abs(claim.epsilon / proof.epsilon - 1.0) <= VERIFIER_AGREES if proof.epsilon > 0.0 else False
        return Finding("proof", good, f"quietgrad, {proof.accountant}: {proved}")
    if claim.epsilon < proof.epsilon * (1.0 - _EXACT) or proof.accountant != name:
        return Finding("proof", False, f"the events cost {proved} by {proof.accountant}, not what is claimed")
    # A run whose records were counted states its budget, which its plan meets to a thousandth.
    if claim.epsilon > proof.epsilon * (1.0 + (_EXACT if counted is None else 2.0 * AGREES)):
        return Finding("proof", False, f"the events cost only {proved}; the claim is of other events")
    return Finding("proof", True, f"quietgrad, {proof.accountant}: {proved}")


def _second_finding(claim: _Claim, schedule: Schedule | None) -> Finding:
    """Whether code that is not quietgrad's proves ε too. Where none can, one did, and the claim still stands."""
    verified = verifier_proof(claim.event, delta=claim.delta, relation=claim.relation)
    second = verified or second_proof(claim.event, delta=claim.delta, relation=claim.relation)
    agrees = AGREES if verified is None else VERIFIER_AGREES
    if second.epsilon is None:
        return Finding("second proof", None, f"one accountant: {second.how}: {second.reason}")
    value, said = f"{second.how}: ε = {second.epsilon:.6g}", ""
    # An event that stands for many releases rests on a theorem, whose sensitivity is computed again.
    together = [slot.mechanism for slot in schedule.slots if slot.mechanism.together] if schedule else []
    again = [sensitivity_again(each) if each.whole_run else None for each in together]
    known = all(s is not None and s <= m.factor * (1.0 + 1e-9) for s, m in zip(again, together, strict=True))
    if not claim.foreign and (schedule is None or schedule.composition == "filter" or not known):
        words = (
            "one accountant: the event stands for many releases (a filter, or noise in bands), by a theorem that "
            f"only quietgrad applies; from that event, {value}"
        )
        return Finding("second proof", None, words)
    if again:
        said = f"; its correlated releases are one of sensitivity {again[-1]:.4g}, which was computed again"
    if second.epsilon > claim.epsilon * (1.0 + agrees):
        return Finding("second proof", None, f"one accountant: the other's bound is above the claim; {value}")
    if not second.foreign:
        return Finding("second proof", None, f"one accountant, which proves it in two ways: {value}{said}")
    return Finding("second proof", True, f"{value}{said}")


def _ledger_findings(body: Json, claim: _Claim, file: str | Path | None) -> list[Finding]:
    stated = body["ledger"]
    if stated is None:
        found = [Finding("ledger", None, "none: what else was spent on these people is not known")]
        if file is not None:
            found.append(Finding("ledger at hand", False, "the certificate names no ledger to compare it with"))
        return found
    if set(stated) != {"head", "lines", "run"}:
        raise ValueError("ledger")
    entries, head = tuple(ChainEntry(**line) for line in stated["lines"]), stated["head"]
    whole = [line.seq for line in entries] == list(range(1, len(entries) + 1))
    problem, book = _chain_problem(entries, head, whole=whole), LedgerState()
    try:
        held = list(book.fold(entries).held.values())
        of_a_party = body["federation"] is not None
        problem = problem or "; ".join(unpaid(claim.privacy, str(stated["run"]), held, "it", of_a_party=of_a_party))
    except LedgerError as error:
        problem = problem or str(error)
    part = f"the {len(entries)} lines of this run; other runs on the same people are not shown"
    all_lines = f"{len(entries)} lines that chain up to {head}"
    certified = [
        line.body for line in entries if line.kind == "certificate" and line.body.get("run") == stated["run"]
    ]
    bound = "source" in body and any(each.get("digest") == covered(body) for each in certified)
    if certified and not bound:
        problem = problem or "it certifies this run otherwise: a part of the claim was edited"
    found = [Finding("ledger", not problem, problem or (all_lines if whole else part))]
    # The head holds fast what chains up to it: a line with lines left out behind it is tied to nothing.
    tied = [line for place, line in enumerate(reversed(entries)) if line.seq == _seq(head) - place]
    bound = bound and any(line.kind == "certificate" and line.body.get("digest") == covered(body) for line in tied)
    if bound and not problem:
        found.append(
            Finding("bound", True, f"its head {head} holds the claim fast; compare it with the ledger's own")
        )
    if whole and not problem:
        found.append(Finding("account", None, _account_total(book, claim)))
    if file is not None:
        try:
            theirs = Ledger(file).entries()
            problem = check_anchor(theirs, str(head))
            if not problem and not {line.hash for line in entries} <= {line.hash for line in theirs}:
                problem = "lines of the certificate are not in it"
        except LedgerError as error:
            problem = str(error)
        words = problem or "it is the one certified, or has grown from it"
        found.append(Finding("ledger at hand", not problem, words))
    return found


def _seq(head: str) -> int:
    """Return the number of the line that a head names, or 0 if it names none."""
    seq = head.partition("-")[0]
    return int(seq) if seq.isdecimal() and len(seq) <= 18 else 0


def _chain_problem(entries: tuple[ChainEntry, ...], head: str, *, whole: bool) -> str:
    """Return the fault in lines copied from a ledger, all of them or one run's, or '' if there is none."""
    last, seq = entries[-1], head.partition("-")[0]
    for before, line in zip((None, *entries), entries, strict=False):
        if type(line.seq) is not int or not isinstance(line.body, dict) or line.hash != line.digest():
            return "a line was edited (its hash does not fit its content)"
        beside = before is not None and line.seq == before.seq + 1
        if before is not None and (line.seq <= before.seq or (beside and line.prev != before.hash)):
            return "a line does not follow the line before; one was removed, added or moved"
    if whole and (entries[0].kind != "open" or set(entries[0].prev) != {"0"}):
        return "its first line does not open a ledger"
    if not seq.isdecimal() or len(seq) > 18 or int(seq) < last.seq:
        return "its head is older than its lines"
    if (whole or int(seq) == last.seq) and head != anchor(last):
        return "its head is not that of its last line: lines were changed, or are missing"
    return ""


def _account_total(book: LedgerState, claim: _Claim) -> str:
    """Say in words what all runs of the account in the ledger cost together."""
    account = str(claim.privacy.account)
    parts, count = book.counted(account), book.runs(account)
    runs, event = f"{count} run{'' if count == 1 else 's'} of {account!r} in this ledger", compose_events(parts)
    mixed = claim.relation is Relation.ADD_REMOVE and Relation.REPLACE_ONE in book.relations(account)
    try:
        if event is None or mixed or len(set(parts)) > _MOST_KINDS:
            raise UnprovableError("no common ε")
        epsilon = prove(event, delta=claim.delta, relation=claim.relation).epsilon
    except (UnprovableError, *ALTERED):
        return f"{runs}, without a common ε"
    return f"{runs} cost ε = {epsilon:.4g} together at this δ"


def _model_finding(body: Json, file: str | Path | None) -> Finding:
    if file is None:
        return Finding("model", None, "not at hand; give it with --model to see whether it is the certified one")
    same = body["model"]["sha256"] == hashlib.sha256(read_bytes(file)).hexdigest()
    return Finding("model", same, "the file is the certified one" if same else "the file is another model")


def _words(
    document: PrivacyCertificate, claim: _Claim, findings: list[Finding], demanded: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return sentences on what the findings show, and on what they do not show."""
    good, privacy = {finding.what for finding in findings if finding.ok}, claim.privacy
    shown, rest = list[str](), list[str]()
    if "proof" in good:
        two = "second proof" in good
        by = "two accountants with code of their own" if two else "quietgrad's own accountant"
        shown.append(f"The releases listed cost no more than the ε claimed, by {by}.")
        rest += [] if two else ["That a second accountant says so too: none is known for these releases."]
    if "plan" in good:
        shown.append("The releases listed are those that the stated algorithm makes at the stated settings.")
    if "account" in (finding.what for finding in findings):
        shown.append("The ledger's lines chain from the first to the head, and reserve and pay for these releases.")
    elif "ledger" in good:
        shown.append("The lines of this run fit their hashes, and reserve and pay for these releases.")
        rest.append("That these lines stand in a ledger: the lines between them are left out.")
    if document.signature is None:
        rest.append("Who says so: without a signature only agreement is shown; all of it could have been made up.")
    elif "signature" in good:
        key = "the key above" if demanded is None else "the key you gave"
        shown.append(f"Nothing was altered since the holder of {key} signed it.")
        if demanded is None:
            rest.append("Whose key it is: give --public-key with one that you had from the signer.")
    if privacy.condition is not None:
        rest.append(f"That the condition is met: ε holds {privacy.condition}.")
    rest += [
        "That the run made these releases and no others, with secret noise: that is the signer's word.",
        f"That the records are what the data are called, and that {_UNIT[privacy.unit]}.",
        "What was spent on these people outside the ledger lines that are in the file.",
        f"Anything against others than this adversary: {privacy.adversary}.",
        *(f"What the run notes of itself: {note}." for note in privacy.notes),
    ]
    federation = document.body["federation"]
    if isinstance(federation, dict) and federation.get("trust") == "secure":
        rest.append("That this is the adversary: which parties and servers may be dishonest, the plan file says.")
        rest.append("That secure sums stay within the distance of the stated noise that is counted for them.")
    return tuple(shown), tuple(rest)
