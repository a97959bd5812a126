"""Checking a certificate: what its parts prove, whether they agree, who signed it, and what it does not show.

The checks trust nothing that the file states. The stated algorithm at its settings gives the slots, and slots and
noise give the events: both must be those in the file. ε is proved again from the events by the accountant that is
named and, where it has a rule that is as tight, by dp-accounting; a proof names the code that made it. The lines of
the ledger must chain and have paid for these events at this δ under this relation. A forger can rewrite all parts
alike unless the file is signed: without a signature only agreement is shown, and the verdict says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quietgrad.assurance.certificates.document import (
    Json,
    PrivacyCertificate,
    signature_holds,
    standings,
    statement,
)
from quietgrad.assurance.certificates.independent_accountant import second_proof, sensitivity_again, verifier_proof
from quietgrad.assurance.certificates.ledger_lines import is_whole, ledger_findings
from quietgrad.assurance.certificates.rebuilt_plan import rebuilt
from quietgrad.assurance.certificates.stated_claim import ALTERED, Claim, Finding, read_claim
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.errors import DataError, UnprovableError
from quietgrad.core.files import read_bytes
from quietgrad.core.plans.schedule import DECLARED, Schedule

AGREES = 1e-3  # relative: both accountants round losses up to a grid
VERIFIER_AGREES = 0.01  # relative: quietgrad-verify says so of itself, and prints both numbers
_EXACT = 1e-6  # relative: our own accountant on another machine
_UNIT = {
    PrivacyUnit.RECORD: "one record is one person",
    PrivacyUnit.PERSON: "every person has one id in them",
    PrivacyUnit.PARTY: "no person's data are held by two parties, of which each is protected as a whole",
}


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
        claim = read_claim(body)
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
            schedule, problems = rebuilt(body, claim)
            words = f"the parts of the file disagree about {', '.join(problems)}" if problems else ""
        except ALTERED as error:
            words = f"it cannot be read as a plan ({type(error).__name__})"
        agrees = "the events are those of its slots and noise, and the slots those of its settings"
        findings.append(Finding("plan", not words, words or agrees))
    counted = None if claim.foreign else body["plan"].get("counted")
    findings += [_first_proof(claim, counted), _second_finding(claim, schedule)]
    try:
        findings += ledger_findings(body, claim, ledger)
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


def _printed(claim: Claim, source: Json) -> Finding:
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


def _first_proof(claim: Claim, counted: object) -> Finding:
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


def _second_finding(claim: Claim, schedule: Schedule | None) -> Finding:
    """Find whether code that is not quietgrad's proves ε too. If none can, quietgrad's own proof still stands."""
    verified = verifier_proof(claim.event, delta=claim.delta, relation=claim.relation)
    second = verified or second_proof(claim.event, delta=claim.delta, relation=claim.relation)
    agrees = AGREES if verified is None else VERIFIER_AGREES
    if second.epsilon is None:
        return Finding("second proof", None, f"one accountant: {second.how}: {second.reason}")
    value, addition = f"{second.how}: ε = {second.epsilon:.6g}", ""
    # An event that stands for many releases rests on a theorem, whose sensitivity is computed again.
    together = [slot.mechanism for slot in schedule.slots if slot.mechanism.together] if schedule else []
    again = [sensitivity_again(each) if each.whole_run else None for each in together]
    sensitivities_hold = all(
        s is not None and s <= m.factor * (1.0 + 1e-9) for s, m in zip(again, together, strict=True)
    )
    if not claim.foreign and (schedule is None or schedule.composition == "filter" or not sensitivities_hold):
        words = (
            "one accountant: the event stands for many releases (a filter, or noise in bands), by a theorem that "
            f"only quietgrad applies; from that event, {value}"
        )
        return Finding("second proof", None, words)
    if again:
        addition = f"; its correlated releases are one of sensitivity {again[-1]:.4g}, which was computed again"
    if second.epsilon > claim.epsilon * (1.0 + agrees):
        return Finding("second proof", None, f"one accountant: the other's bound is above the claim; {value}")
    if not second.foreign:
        return Finding("second proof", None, f"one accountant, which proves it in two ways: {value}{addition}")
    return Finding("second proof", True, f"{value}{addition}")


def _model_finding(body: Json, file: str | Path | None) -> Finding:
    if file is None:
        return Finding("model", None, "not at hand; give it with --model to see whether it is the certified one")
    same = body["model"]["sha256"] == hashlib.sha256(read_bytes(file)).hexdigest()
    return Finding("model", same, "the file is the certified one" if same else "the file is another model")


def _words(
    document: PrivacyCertificate, claim: Claim, findings: list[Finding], demanded: str | None
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
    if "ledger" in good and is_whole(document.body["ledger"]["lines"]):
        shown.append("The ledger's lines chain from the first to the head, and reserve and pay for these releases.")
    elif "ledger" in good:
        shown.append("The ledger's lines in the file fit their hashes, and reserve and pay for these releases.")
        rest.append("That these lines stand in a ledger, and that its account has no others: lines are left out.")
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
