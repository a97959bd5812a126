"""Checking a certificate: what its parts prove, whether they agree, whose word it is, and what stays unshown.

Nothing is believed because the file says so. ε is proved again from the events by the accountant that is named and
by dp-accounting; the events must be those that the plan's slots and noise give for the releases made, the slots
those that the algorithm has at its settings, and the lines of the ledger must chain and have paid for these events
at this δ under this relation. All that can be rewritten alike by whoever needs no signature: without one, agreement
is all that is shown, and the verdict says so.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.certificates.document import Document, canonical
from quietgrad.certificates.second import SecondProof, second_proof
from quietgrad.certificates.signing import signature_holds
from quietgrad.errors import DataError, LedgerError, QuietgradError, UnprovableError
from quietgrad.files import read_bytes
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.accounting import Proof, prove
from quietgrad.privacy.budget import Relation, Unit, check_delta
from quietgrad.privacy.chain import Entry, anchor, check_anchor
from quietgrad.privacy.events import Composed, Event, PerParty, Slack, composed, repeated
from quietgrad.privacy.ledger import Ledger
from quietgrad.privacy.spending import Book, is_part, total
from quietgrad.training.result import REFUTED, SEEDED, Privacy
from quietgrad.training.statement import ADVERSARY
from quietgrad.training.verification import event_size, unpaid

AGREES = 1e-3  # relative: both accountants round losses up to a grid
_EXACT = 1e-6  # relative: our own accountant on another machine
_MOST_EVENTS = 4096
_MOST_BYTES = 1 << 17  # of an event: a law of 128 groups has five thousand
_MOST_STEPS = 2 * 10**7  # a plan of a stranger is made here: its lists must fit
_MOST_SLOTS = 256
_MOST_SETTING = 10**6  # some plan a slot, or a weight of a law, for each
_MOST_LAW = 512  # rounds that are told apart
_TAKEN = {
    Unit.RECORD: "That the records are what the data are called, and that one record is one person.",
    Unit.PERSON: "That the records are what the data are called, and that everybody has one id in them.",
}
_MOST_KINDS = 200  # different events of one account that are added up here
_ALTERED = (
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
class Finding:
    """One thing that was looked at; ``ok=None`` where there was nothing to look at."""

    what: str
    ok: bool | None
    words: str


@dataclass(frozen=True)
class Verdict:
    """What was found, and in words what is and what is not shown by it."""

    claim: str
    findings: tuple[Finding, ...]
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether ε is proved again by two accountants and nothing was found altered."""
        return all(finding.ok is not False for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {
            "ok": self.ok,
            "claim": self.claim,
            "findings": [vars(finding) for finding in self.findings],
            "shown": list(self.shown),
            "not_shown": list(self.not_shown),
        }


@dataclass(frozen=True)
class _Claim:
    """The parts of a body that were read and are of their kind."""

    privacy: Privacy
    event: Event
    epsilon: float
    delta: float
    relation: Relation


def check(
    document: Document,
    *,
    public_key: str | None = None,
    ledger: str | Path | None = None,
    model: str | Path | None = None,
) -> Verdict:
    """Check a certificate that :func:`~quietgrad.certificates.document.read` has read.

    Args:
        public_key: of whom it must be signed by, as hexadecimal digits; a certificate without a signature, or with
            another's, then fails.
        ledger: the ledger itself, if it is at hand: it must have grown from the one that is certified.
        model: the model file, if it is at hand: it must be the one that is certified.
    """
    findings = [_signature(document, public_key)]
    try:
        claim = _read_claim(document.body)
    except _ALTERED as error:
        words = f"it is not a statement of privacy with its releases ({type(error).__name__})"
        findings.append(Finding("claim", False, words))
        return Verdict("unreadable", tuple(findings), (), ("Anything: the claim cannot be read.",))
    whole_run = False
    try:
        schedule, problems = _plan_problems(document.body, claim)
        whole_run = schedule.composition == "filter" or any(slot.mechanism.whole_run for slot in schedule.slots)
    except _ALTERED as error:
        problems = [f"it cannot be read as a plan ({type(error).__name__})"]
    agrees = "the events are those of its slots and noise, and the slots those of its settings"
    findings.append(Finding("plan", not problems, "; ".join(problems) or agrees))
    ours, first = _first_proof(claim)
    findings.append(first)
    findings.append(_second_finding(claim, ours, whole_run=whole_run))
    try:
        findings += _ledger_findings(document.body, claim, ledger)
    except _ALTERED as error:
        if isinstance(error, DataError):
            raise
        findings.append(Finding("ledger", False, f"its lines are not those of a ledger ({type(error).__name__})"))
    findings.append(_model_finding(document.body, model))
    stated = f"({claim.epsilon:.4g}, {claim.delta:g})-DP per {claim.privacy.unit} under {claim.relation}"
    return Verdict(
        f"{document.body['plan'].get('algorithm')} on {document.body['data'].get('name')}: {stated}",
        tuple(findings),
        *_words(document, claim, findings, public_key),
    )


def _signature(document: Document, demanded: str | None) -> Finding:
    if document.signature is None:
        words = "none: whoever wrote this file could have written any other"
        return Finding("signature", None if demanded is None else False, words)
    if not signature_holds(document):
        return Finding("signature", False, "it does not fit: the file was altered, or never signed")
    signer = document.signature["public_key"]
    if demanded is None:
        return Finding("signature", True, f"it fits the key {signer}; compare that with the signer's own word")
    if not hmac.compare_digest(signer, demanded):
        return Finding("signature", False, f"it is by another key, {signer}")
    return Finding("signature", True, "it fits, by the key that was asked for")


def _read_claim(body: dict[str, Any]) -> _Claim:
    stated, event = body["claim"], body["event"]
    if not isinstance(stated, dict) or "event" in stated:
        raise ValueError("claim")
    if event_size(event) > _MOST_EVENTS or len(canonical(event)) > _MOST_BYTES or _longest(event) > _MOST_LAW:
        raise ValueError("too many events")
    privacy = Privacy.from_json({**stated, "event": event})
    if privacy.to_json() != {**stated, "event": event}:  # nothing was added, and nothing is spelt otherwise
        raise ValueError("claim")
    if privacy.events is None or privacy.relation is None or type(privacy.epsilon) is not float:
        raise ValueError("no ε")
    if not privacy.is_private or not 0.0 < privacy.epsilon < math.inf:
        raise ValueError("not private")
    if SEEDED in privacy.notes or any(str(note).startswith(REFUTED) for note in privacy.notes):
        raise ValueError("not private")
    _check_kinds(body)
    return _Claim(privacy, privacy.events, privacy.epsilon, check_delta(privacy.delta or 0.0), privacy.relation)


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


# ---- the plan ------------------------------------------------------------------------------------------------


def _plan_problems(body: dict[str, Any], claim: _Claim) -> tuple[Schedule, list[str]]:
    plan, privacy = body["plan"], claim.privacy
    expected = {
        "algorithm",
        "composition",
        "config",
        "n_public",
        "noise_multiplier",
        "rounds",
        "slots",
        "stopped_by",
    }
    if (
        set(plan) != expected
        or len(plan["slots"]) > _MOST_SLOTS
        or _largest([plan["config"], plan["slots"]]) > _MOST_STEPS
    ):
        raise ValueError("plan")
    slots = tuple(Slot.from_json(each) for each in plan["slots"])
    if canonical([slot.to_json() for slot in slots]) != canonical(plan["slots"]):
        raise ValueError("slots")
    rounds = None if plan["rounds"] is None else (float(plan["rounds"][0]), float(plan["rounds"][1]))
    schedule = Schedule(slots, plan["composition"], rounds=rounds)
    found = []
    if plan["noise_multiplier"] != privacy.noise_multiplier:
        found.append("the claim states another noise multiplier")
    if plan["n_public"] != body["data"]["n_public"]:
        found.append("the data are stated with another number of records")
    described = "; ".join(f"{slot.name}: {slot.sampling.describe()}" for slot in slots)
    if privacy.sampling != privacy.unit.in_words(described):  # which also says whom it draws: records, or people
        found.append("the claim states another sampling, or another unit")
    found += _federation_problems(body["federation"], plan["n_public"], claim)
    counts = {slot.name: slot.count for slot in slots}
    for name, made in privacy.releases.items():
        if type(made) is not int or not 0 <= made <= counts.get(name, -1):
            found.append("releases are stated that were not planned")
    planned = _planned(plan, claim.relation)
    if not found and (planned is None or not _same(planned, schedule, federated=body["federation"] is not None)):
        found.append("the slots are not those that the algorithm has at its settings")
    if not found and planned is not None:
        fixed = not planned.adaptive and planned.rounds is None and schedule.composition == "sequential"
        if fixed and plan["stopped_by"] == "steps" and body["federation"] is None:
            lawful = {slot.name for slot in slots if slot.law is not None}
            if any(privacy.releases.get(name, 0) < n for name, n in counts.items() if name not in lawful):
                found.append("fewer releases are stated than its steps make")
        parts_count = plan["stopped_by"] in ("steps", "budget") and _may_end_there(planned, schedule, body, claim)
        if not _derived(schedule, claim, body["federation"], parts_count=parts_count):
            found.append("the events are not those that its slots, noise and releases give")
    return schedule, found


def _federation_problems(federation: Any, n_public: Any, claim: _Claim) -> list[str]:
    """Who took part must add up to the records stated, and be told of against whom the claim is made."""
    from quietgrad.federation.coordinator import ADVERSARIES

    if federation is None:
        if isinstance(claim.event, PerParty):
            return ["events of parties are stated without a federation"]
        return [] if claim.privacy.adversary == ADVERSARY else ["the claim states another adversary"]
    if set(federation) != {"trust", "secure", "sizes", "parties_per_person", "plan_file"}:
        raise ValueError("federation")
    found, sizes = [], federation["sizes"]
    if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != n_public:
        found.append("its parties have another number of records together")
    if isinstance(claim.event, PerParty) and len(claim.event.parties) != len(sizes):
        found.append("the events are of another number of parties")
    if federation["trust"] == "local" and not isinstance(claim.event, PerParty):
        found.append("each party's own noise is stated, and events of all parties together")
    if federation["trust"] not in (*ADVERSARIES, "secure"):
        found.append("it states a trust that is not known here")
    elif claim.privacy.adversary != ADVERSARIES.get(federation["trust"], claim.privacy.adversary):
        found.append("the claim states another adversary")
    return found


def _may_end_there(planned: Schedule, stated: Schedule, body: dict[str, Any], claim: _Claim) -> bool:
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


def _longest(event: Any) -> int:
    """How many rounds the longest law in an event has."""
    if isinstance(event, list):
        return max(map(_longest, event), default=0)
    if not isinstance(event, dict):
        return 0
    law = event.get("law")
    return max(len(law) if isinstance(law, list) else 0, *map(_longest, event.values()), 0)


def _derived(schedule: Schedule, claim: _Claim, federation: Any, *, parts_count: bool) -> bool:
    """Whether the stated event follows from the schedule, for the whole plan or for the releases made."""
    parties = _without_slack(claim.event)
    for k, event in enumerate(parties):
        own, times = (schedule, 1) if federation is None else _of_party(schedule, federation, k, len(parties))
        z, relation = claim.privacy.noise_multiplier, claim.relation
        all_of_it = repeated(own.event(z, relation), times)
        made = {name: n for name, n in claim.privacy.releases.items() if n}
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
    for part in event.parties if isinstance(event, PerParty) else (event,):
        if isinstance(part, Composed) and isinstance(part.parts[-1], Slack):
            part = composed(part.parts[:-1])
        found.append(part)
    return found


def _of_party(schedule: Schedule, federation: dict[str, Any], party: int, parties: int) -> tuple[Schedule, int]:
    """The schedule with the local batches of one party, where batches are of fixed size, and how often it counts.

    Both as priced for a person who is known to several parties.
    """
    from dataclasses import replace

    from quietgrad.federation.plan import of_several_parties
    from quietgrad.federation.weights import shares
    from quietgrad.sampling import FixedSize

    known_to = 1 if federation["parties_per_person"] is None else int(federation["parties_per_person"])
    if federation["trust"] != "local":
        schedule, known_to = of_several_parties(schedule, known_to), 1

    sizes = tuple(int(size) for size in federation["sizes"])
    slots = []
    for slot in schedule.slots:
        if isinstance(slot.sampling, FixedSize):
            if parties not in (1, len(sizes)):
                raise ValueError("parties")
            batch = shares(slot.sampling.batch_size, sizes)[party]
            slot = replace(slot, sampling=FixedSize(sizes[party], batch))
        slots.append(slot)
    return replace(schedule, slots=tuple(slots)), known_to


def _planned(plan: dict[str, Any], relation: Relation) -> Schedule | None:
    """What the algorithm plans at its stated settings; ``None`` if there is no such thing."""
    from quietgrad.algorithms.registry import ALGORITHMS, entry

    if plan["algorithm"] not in ALGORITHMS or any(
        type(value) is int and value > _MOST_SETTING and "batch" not in key for key, value in plan["config"].items()
    ):
        return None
    method = entry(plan["algorithm"])
    try:
        try:
            algorithm = method.make(plan["config"])
        except ValueError:  # settings with parts of their own, which only the class itself reads
            algorithm = method.kind(**plan["config"])
        planned: Schedule = algorithm.schedule(int(plan["n_public"])).under(relation)
    except (*_ALTERED, QuietgradError):
        return None
    return planned


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


# ---- the proofs ----------------------------------------------------------------------------------------------


def _first_proof(claim: _Claim) -> tuple[Proof | None, Finding]:
    name = str(claim.privacy.accountant)
    family = next(
        (each for each in ("gaussian-exact", "pure", "pld", "zcdp", "rdp") if name.startswith(each)), None
    )
    if family is None:
        return None, Finding("proof", False, "the claim names no accountant that is known here")
    try:
        proof = prove(claim.event, delta=claim.delta, relation=claim.relation, accountant=family)
    except (UnprovableError, *_ALTERED) as error:
        return None, Finding("proof", False, f"quietgrad proves no ε from the events ({error})")
    if claim.epsilon < proof.epsilon * (1.0 - _EXACT) or proof.accountant != name:
        words = f"the events cost ε = {proof.epsilon:.6g} by {proof.accountant}, not what is claimed"
        return proof, Finding("proof", False, words)
    if claim.epsilon > proof.epsilon * (1.0 + _EXACT):
        words = f"the events cost only ε = {proof.epsilon:.6g}; the claim is of other events"
        return proof, Finding("proof", False, words)
    return proof, Finding("proof", True, f"quietgrad, {proof.accountant}: ε = {proof.epsilon:.6g}")


def _second_finding(claim: _Claim, ours: Proof | None, *, whole_run: bool) -> Finding:
    second: SecondProof = second_proof(claim.event, delta=claim.delta, relation=claim.relation)
    refused = "not proved by a second accountant"
    if second.epsilon is None:
        return Finding("second proof", False, f"{refused}: {second.how}: {second.reason}")
    value = f"{second.how}: ε = {second.epsilon:.6g}"
    if whole_run:
        words = (
            f"{refused}: the event stands for a whole run (correlated noise or a filter), by a theorem that only "
            f"quietgrad applies; from that event, {value}"
        )
        return Finding("second proof", False, words)
    if second.borrowed and ours is not None and ours.accountant == "rdp":
        return Finding("second proof", False, f"{refused}: both take the same curves of sampled releases; {value}")
    if second.epsilon > claim.epsilon * (1.0 + AGREES):
        return Finding("second proof", False, f"{refused}: it proves no less than this; {value}")
    return Finding("second proof", True, value)


# ---- what lies beside it -------------------------------------------------------------------------------------


def _ledger_findings(body: dict[str, Any], claim: _Claim, file: str | Path | None) -> list[Finding]:
    stated = body["ledger"]
    if stated is None:
        found = [Finding("ledger", None, "none: what else was spent on these people is not known")]
        if file is not None:
            found.append(Finding("ledger at hand", False, "the certificate names no ledger to compare it with"))
        return found
    if not isinstance(stated, dict) or set(stated) != {"head", "lines", "run"}:
        raise ValueError("ledger")
    entries = tuple(Entry(**line) for line in stated["lines"])
    problem = _chain_problem(entries, stated["head"])
    whole = [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    book = Book()
    try:
        for entry in entries:
            book.apply(entry)
    except LedgerError as error:
        problem = problem or str(error)
    if not problem:
        of_a_party = body["federation"] is not None
        against = unpaid(claim.privacy, str(stated["run"]), list(book.held.values()), "it", of_a_party=of_a_party)
        problem = "; ".join(against)
    found = []
    if problem:
        found.append(Finding("ledger", False, problem))
    elif whole:
        found.append(Finding("ledger", True, f"{len(entries)} lines that chain up to {stated['head']}"))
        found.append(_account_finding(book, claim))
    else:
        words = f"the {len(entries)} lines of this run; other runs on the same people are not shown"
        found.append(Finding("ledger", True, words))
    if file is not None:
        found.append(_at_hand(file, str(stated["head"]), entries))
    return found


def _chain_problem(entries: tuple[Entry, ...], head: Any) -> str:
    """What is wrong with lines copied from a ledger; '' if nothing."""
    if not entries or not isinstance(head, str):
        raise ValueError("ledger")
    for before, entry in zip((None, *entries), entries, strict=False):
        if type(entry.seq) is not int or not isinstance(entry.body, dict) or entry.hash != entry.digest():
            return "a line was edited (its hash does not fit its content)"
        follows = before is None or entry.seq > before.seq
        if not follows or (before is not None and entry.seq == before.seq + 1 and entry.prev != before.hash):
            return "a line does not follow the line before; one was removed, added or moved"
    if entries[0].seq == 1 and (entries[0].kind != "open" or set(entries[0].prev) != {"0"}):
        return "its first line does not open a ledger"
    seq = head.partition("-")[0]
    if not seq.isdecimal() or len(seq) > 18 or int(seq) < entries[-1].seq:
        return "its head is older than its lines"
    if int(seq) == entries[-1].seq and head != anchor(entries[-1]):
        return "its head is not that of its last line"
    if int(seq) > entries[-1].seq and entries[-1].seq == len(entries):
        return "lines before its head are missing"
    return ""


def _account_finding(book: Book, claim: _Claim) -> Finding:
    parts = book.counted(str(claim.privacy.account))
    if len(set(parts)) > _MOST_KINDS:
        return Finding("account", None, f"{len(parts)} runs of this account: too many kinds to add up here")
    event = total(parts)
    planned = book.relations(str(claim.privacy.account))
    if event is None or (claim.relation is Relation.ADD_REMOVE and Relation.REPLACE_ONE in planned):
        return Finding("account", None, f"{len(parts)} runs of this account, without a common ε")
    try:
        epsilon = prove(event, delta=claim.delta, relation=claim.relation).epsilon
    except (UnprovableError, *_ALTERED):
        return Finding("account", None, f"{len(parts)} runs of this account, without a common ε")
    runs = f"{len(parts)} run{'' if len(parts) == 1 else 's'}"
    words = f"{runs} of {claim.privacy.account!r} in this ledger cost ε = {epsilon:.4g} together at this δ"
    return Finding("account", None, words)


def _at_hand(file: str | Path, head: str, entries: tuple[Entry, ...]) -> Finding:
    path = Path(file)
    if not path.exists():
        raise DataError(f"{path}: there is no such ledger.")
    try:
        theirs = Ledger(path).entries()
    except LedgerError as error:
        return Finding("ledger at hand", False, str(error))
    problem = check_anchor(theirs, head)
    held = {entry.hash for entry in theirs}
    if not problem and any(entry.hash not in held for entry in entries):
        problem = "lines of the certificate are not in it"
    return Finding("ledger at hand", not problem, problem or "it is the one certified, or has grown from it")


def _model_finding(body: dict[str, Any], file: str | Path | None) -> Finding:
    stated = body["model"].get("sha256") if isinstance(body["model"], dict) else None
    if file is None:
        return Finding("model", None, "not at hand; give it with --model to see whether it is the certified one")
    try:
        found = hashlib.sha256(read_bytes(file)).hexdigest()
    except FileNotFoundError:
        raise DataError(f"{file}: there is no such model.") from None
    same = isinstance(stated, str) and hmac.compare_digest(stated.encode(), found.encode())
    return Finding("model", same, "the file is the certified one" if same else "the file is another model")


def _words(
    document: Document, claim: _Claim, findings: list[Finding], demanded: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    good = {finding.what for finding in findings if finding.ok}
    shown, rest = [], []
    if {"proof", "second proof"} <= good:
        shown.append(
            "The releases listed cost no more than the ε claimed, by two accountants with code of their own."
        )
    if "plan" in good:
        shown.append("The releases listed are those that the stated algorithm makes at the stated settings.")
    if "ledger" in good and any(finding.what == "account" for finding in findings):
        shown.append("The ledger's lines chain from the first to the head, and reserve and pay for these releases.")
    elif "ledger" in good:
        shown.append("The lines of this run fit their hashes, and reserve and pay for these releases.")
        rest.append("That these lines stand in a ledger: the lines between them are left out.")
    if document.signature is None:
        rest.append("Who says so: without a signature only agreement is shown; all of it could have been made up.")
    elif "signature" in good and demanded is None:
        shown.append("Nothing was altered since the holder of the key above signed it.")
        rest.append("Whose key it is: give --public-key with one that you had from the signer.")
    elif "signature" in good:
        shown.append("Nothing was altered since the holder of the key you gave signed it.")
    rest += [
        "That the run made these releases and no others, with secret noise: that is the signer's word.",
        _TAKEN[claim.privacy.unit],
        "What was spent on these people outside the ledger lines that are in the file.",
        f"Anything against others than this adversary: {claim.privacy.adversary}.",
    ]
    federation = document.body["federation"]
    if isinstance(federation, dict) and federation.get("trust") == "secure":
        rest.append("That this is the adversary: which parties and servers may be dishonest, the plan file says.")
        rest.append("That secure sums stay within the distance of the stated noise that is counted for them.")
    return tuple(shown), tuple(rest)
