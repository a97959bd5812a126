"""Checking a certificate: what its parts prove, whether they agree, whose word it is, and what stays unshown.

Nothing is believed because the file says so. ε is proved again from the events by the accountant that is named and,
where it has a rule that is as tight, by dp-accounting; the events must be those that the plan's slots and noise
give for the releases made, the slots those that the algorithm has at its settings, and the lines of the ledger
must chain and have paid for these events at this δ under this relation. A forger can rewrite all parts alike
unless the file is signed: without a signature agreement is all that is shown, and the verdict says so.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.certificates.consistency import ALTERED, CertificateClaim, plan_problems, read_claim
from quietgrad.certificates.document import PrivacyCertificate, signature_holds
from quietgrad.certificates.independent_accountant import IndependentProof, second_proof, sensitivity_again
from quietgrad.errors import DataError, LedgerError, UnprovableError
from quietgrad.files import read_bytes
from quietgrad.plans.schedule import DECLARED, Schedule
from quietgrad.privacy.accounting import ProvedGuarantee, prove
from quietgrad.privacy.budget import PrivacyUnit, Relation
from quietgrad.privacy.chain import ChainEntry, anchor, check_anchor
from quietgrad.privacy.ledger import Ledger
from quietgrad.privacy.ledger_state import LedgerState, compose_events
from quietgrad.training.result import unpaid

AGREES = 1e-3  # relative: both accountants round losses up to a grid
_EXACT = 1e-6  # relative: our own accountant on another machine
_TAKEN = {
    PrivacyUnit.RECORD: "That the records are what the data are called, and that one record is one person.",
    PrivacyUnit.PERSON: "That the records are what the data are called, and that every person has one id in them.",
}
_MOST_KINDS = 200  # different events of one account that are added up here


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

    @property
    def ok(self) -> bool:
        """Whether ε is proved again and nothing was found altered."""
        return all(finding.ok is not False for finding in self.findings)

    @property
    def accountants(self) -> int:
        """By how many accountants with code of their own ε is proved: two, or ours alone."""
        return sum(finding.what in ("proof", "second proof") and finding.ok is True for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {
            "ok": self.ok,
            "accountants": self.accountants,
            "claim": self.claim,
            "findings": [vars(finding) for finding in self.findings],
            "shown": list(self.shown),
            "not_shown": list(self.not_shown),
        }


def check(
    document: PrivacyCertificate,
    *,
    public_key: str | None = None,
    ledger: str | Path | None = None,
    model: str | Path | None = None,
) -> Verdict:
    """Check a certificate that :func:`~quietgrad.certificates.document.read` has read.

    Args:
        public_key: the key that must have signed it, in hexadecimal; a certificate without a signature, or with
            another's, then fails.
        ledger: the ledger itself, if it is at hand: it must have grown from the one that is certified.
        model: the model file, if it is at hand: it must be the one that is certified.
    """
    findings = [_signature(document, public_key)]
    try:
        claim = read_claim(document.body)
    except ALTERED as error:
        words = f"it is not a statement of privacy with its releases ({type(error).__name__})"
        findings.append(Finding("claim", False, words))
        return Verdict("unreadable", tuple(findings), (), ("Anything: the claim cannot be read.",))
    schedule = None
    try:
        schedule, problems = plan_problems(document.body, claim)
    except ALTERED as error:
        problems = [f"it cannot be read as a plan ({type(error).__name__})"]
    agrees = "the events are those of its slots and noise, and the slots those of its settings"
    findings.append(Finding("plan", not problems, "; ".join(problems) or agrees))
    ours, first = _first_proof(claim, counted=document.body["plan"].get("counted") is not None)
    findings.append(first)
    findings.append(_second_finding(claim, ours, schedule))
    try:
        findings += _ledger_findings(document.body, claim, ledger)
    except ALTERED as error:
        if isinstance(error, DataError):
            raise
        findings.append(Finding("ledger", False, f"its lines are not those of a ledger ({type(error).__name__})"))
    findings.append(_model_finding(document.body, model))
    stated = f"({claim.epsilon:.4g}, {claim.delta:g})-DP per {claim.privacy.unit} under {claim.relation}"
    stated = stated if claim.privacy.condition is None else f"{stated}, {claim.privacy.condition}"
    stated = "; ".join([stated, *(note for note in claim.privacy.notes if note.endswith(DECLARED))])
    return Verdict(
        f"{document.body['plan'].get('algorithm')} on {document.body['data'].get('name')}: {stated}",
        tuple(findings),
        *_words(document, claim, findings, public_key),
    )


def _signature(document: PrivacyCertificate, demanded: str | None) -> Finding:
    if document.signature is None:
        words = "none: the author of this file could have written any other"
        return Finding("signature", None if demanded is None else False, words)
    if not signature_holds(document):
        return Finding("signature", False, "it does not fit: the file was altered, or never signed")
    signer = document.signature["public_key"]
    if demanded is None:
        return Finding("signature", True, f"it fits the key {signer}; compare that with the signer's own word")
    if not hmac.compare_digest(signer, demanded):
        return Finding("signature", False, f"it is by another key, {signer}")
    return Finding("signature", True, "it fits, by the key that was asked for")


# ---- the proofs ----------------------------------------------------------------------------------------------


def _first_proof(claim: CertificateClaim, *, counted: bool) -> tuple[ProvedGuarantee | None, Finding]:
    name = str(claim.privacy.accountant)
    family = next(
        (each for each in ("gaussian-exact", "pure", "pld", "zcdp", "rdp") if name.startswith(each)), None
    )
    if family is None:
        return None, Finding("proof", False, "the claim names no accountant that is known here")
    try:
        proof = prove(claim.event, delta=claim.delta, relation=claim.relation, accountant=family)
    except (UnprovableError, *ALTERED) as error:
        return None, Finding("proof", False, f"quietgrad proves no ε from the events ({error})")
    if claim.epsilon < proof.epsilon * (1.0 - _EXACT) or proof.accountant != name:
        words = f"the events cost ε = {proof.epsilon:.6g} by {proof.accountant}, not what is claimed"
        return proof, Finding("proof", False, words)
    # A run whose records were counted states its budget, which its plan meets to a thousandth.
    if claim.epsilon > proof.epsilon * (1.0 + (2.0 * AGREES if counted else _EXACT)):
        words = f"the events cost only ε = {proof.epsilon:.6g}; the claim is of other events"
        return proof, Finding("proof", False, words)
    return proof, Finding("proof", True, f"quietgrad, {proof.accountant}: ε = {proof.epsilon:.6g}")


def _second_finding(claim: CertificateClaim, ours: ProvedGuarantee | None, schedule: Schedule | None) -> Finding:
    """Whether dp-accounting proves ε too. Where it cannot, one accountant did, which is no fault of the claim."""
    second: IndependentProof = second_proof(claim.event, delta=claim.delta, relation=claim.relation)
    if second.epsilon is None:
        return Finding("second proof", None, f"one accountant: {second.how}: {second.reason}")
    value = f"{second.how}: ε = {second.epsilon:.6g}"
    theorem = _theorem(schedule)
    if theorem is None:
        words = (
            "one accountant: the event stands for many releases (a filter), by a theorem that "
            f"only quietgrad applies; from that event, {value}"
        )
        return Finding("second proof", None, words)
    if second.borrowed and ours is not None and ours.accountant == "rdp":
        return Finding("second proof", None, f"one accountant: both take the same curves of samples; {value}")
    if second.epsilon > claim.epsilon * (1.0 + AGREES):
        return Finding("second proof", None, f"one accountant: the other's bound is above the claim; {value}")
    return Finding("second proof", True, f"{value}{theorem}")


def _theorem(schedule: Schedule | None) -> str | None:
    """What an event that stands for many releases rests on and was computed again; ``None`` if it was not."""
    if schedule is None or schedule.composition == "filter":
        return None
    said = ""
    for slot in schedule.slots:
        mechanism = slot.mechanism
        if not mechanism.together:
            continue
        again = sensitivity_again(mechanism)
        if again is None or not again <= mechanism.factor * (1.0 + 1e-9):
            return None
        said = f"; its correlated releases are one of sensitivity {again:.4g}, which was computed again"
    return said


# ---- what lies beside it -------------------------------------------------------------------------------------


def _ledger_findings(body: dict[str, Any], claim: CertificateClaim, file: str | Path | None) -> list[Finding]:
    stated = body["ledger"]
    if stated is None:
        found = [Finding("ledger", None, "none: what else was spent on these people is not known")]
        if file is not None:
            found.append(Finding("ledger at hand", False, "the certificate names no ledger to compare it with"))
        return found
    if not isinstance(stated, dict) or set(stated) != {"head", "lines", "run"}:
        raise ValueError("ledger")
    entries = tuple(ChainEntry(**line) for line in stated["lines"])
    problem = _chain_problem(entries, stated["head"])
    whole = [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    book = LedgerState()
    try:
        book.fold(entries)
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


def _chain_problem(entries: tuple[ChainEntry, ...], head: Any) -> str:
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


def _account_finding(book: LedgerState, claim: CertificateClaim) -> Finding:
    parts, count = book.counted(str(claim.privacy.account)), book.runs(str(claim.privacy.account))
    if len(set(parts)) > _MOST_KINDS:
        return Finding("account", None, f"{count} runs of this account: too many kinds to add up here")
    event = compose_events(parts)
    planned = book.relations(str(claim.privacy.account))
    if event is None or (claim.relation is Relation.ADD_REMOVE and Relation.REPLACE_ONE in planned):
        return Finding("account", None, f"{count} runs of this account, without a common ε")
    try:
        epsilon = prove(event, delta=claim.delta, relation=claim.relation).epsilon
    except (UnprovableError, *ALTERED):
        return Finding("account", None, f"{count} runs of this account, without a common ε")
    runs = f"{count} run{'' if count == 1 else 's'}"
    words = f"{runs} of {claim.privacy.account!r} in this ledger cost ε = {epsilon:.4g} together at this δ"
    return Finding("account", None, words)


def _at_hand(file: str | Path, head: str, entries: tuple[ChainEntry, ...]) -> Finding:
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
    document: PrivacyCertificate, claim: CertificateClaim, findings: list[Finding], demanded: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    good = {finding.what for finding in findings if finding.ok}
    shown, rest = [], []
    if {"proof", "second proof"} <= good:
        shown.append(
            "The releases listed cost no more than the ε claimed, by two accountants with code of their own."
        )
    elif "proof" in good:
        shown.append("The releases listed cost no more than the ε claimed, by quietgrad's own accountant.")
        rest.append("That a second accountant says so too: none is known for these releases.")
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
    if claim.privacy.condition is not None:
        rest.append(f"That the condition is met: ε holds {claim.privacy.condition}.")
    rest += [
        "That the run made these releases and no others, with secret noise: that is the signer's word.",
        _TAKEN[claim.privacy.unit],
        "What was spent on these people outside the ledger lines that are in the file.",
        f"Anything against others than this adversary: {claim.privacy.adversary}.",
    ]
    rest += [f"What the run notes of itself: {note}." for note in claim.privacy.notes]
    federation = document.body["federation"]
    if isinstance(federation, dict) and federation.get("trust") == "secure":
        rest.append("That this is the adversary: which parties and servers may be dishonest, the plan file says.")
        rest.append("That secure sums stay within the distance of the stated noise that is counted for them.")
    return tuple(shown), tuple(rest)
