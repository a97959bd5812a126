"""Checking a claim: what is proved, what is bound and by what, what is only said, and what stands open.

Nothing that the file states is trusted. ε is proved again from the releases. Where neither a signature nor a
ledger's line holds the claim fast, its *bound* fields stand open: the verdict lists them and does not repeat them
as shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quietgrad_verify.correlated import sensitivity
from quietgrad_verify.document import Claim, Json, fields, statement
from quietgrad_verify.events import NoRule
from quietgrad_verify.ledger import Lines, check_lines
from quietgrad_verify.proof import Proof, prove

TOLERANCE = 0.01  # of ε: two bounds of the same loss on two grids
_BROKEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Finding:
    """One check; ``ok=None`` where it does not apply or shows nothing."""

    what: str
    ok: bool | None
    words: str


@dataclass(frozen=True)
class Verdict:
    """What a claim's file shows."""

    headline: str
    digest: str
    findings: tuple[Finding, ...]
    bound_by: tuple[str, ...]
    open: tuple[str, ...]
    """Fields that something should hold fast and nothing does."""
    standing: Mapping[str, tuple[str, ...]]
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether ε is proved and nothing contradicts the claim."""
        proved = any(finding.what == "proof" and finding.ok for finding in self.findings)
        return proved and all(finding.ok is not False for finding in self.findings)

    def to_json(self) -> Json:
        """The verdict as JSON values."""
        return {"ok": self.ok, **asdict(self)}


def check(
    claim: Claim, *, public_key: str | None = None, head: str | None = None, model: str | Path | None = None
) -> Verdict:
    """Check a claim.

    Args:
        public_key: the key that must have signed it, in hexadecimal; a claim without its signature then fails.
        head: the head of the ledger as the reader had it by another way; a claim of another ledger then fails.
        model: the model's file, if it is at hand.
    """
    body, stated = claim.body, claim.body["claim"]
    signer, findings = claim.signer(), [_signature(claim, public_key)]
    findings.append(_statement(claim))
    proof, proof_finding = _proof(claim)
    findings.append(proof_finding)
    lines = Lines("")
    if body["ledger"] is None:
        missing = None if head is None else False
        findings.append(Finding("ledger", missing, "none: what else was spent is not known"))
    else:
        try:
            lines = check_lines(body)
        except _BROKEN as error:
            lines = Lines(f"its lines are not those of a ledger ({type(error).__name__})")
        findings.append(Finding("ledger", not lines.problem, lines.problem or lines.words))
        if head is not None:
            same = body["ledger"].get("head") == head
            findings.append(
                Finding("head", same, "it is the one you gave" if same else "it is not the one you gave")
            )
    findings += [*_agreement(claim), *_correlated(claim)]
    if model is not None:
        findings.append(_model(claim, Path(model)))
    bound_by = _bound_by(claim, signer, lines, public_key, head)
    by = {key: tuple(value) for key, value in fields(claim).items()}
    open_fields = () if bound_by else tuple(by["bound"])
    shown, not_shown = _words(claim, findings, proof, bound_by)
    return Verdict(_headline(stated, proof, bool(bound_by)), claim.digest, tuple(findings), bound_by, open_fields,
                   by, shown, not_shown)  # fmt: skip


def _headline(stated: Json, proof: Proof | None, bound: bool) -> str:
    """The guarantee in the words that the file has earned: the unit only where something binds it."""
    if proof is None:
        return "nothing is proved"
    shown = f"({stated['epsilon']:.4g}, {stated['delta']:g})-DP under {stated['relation']}"
    if not bound:
        return f"the releases listed are {shown}"
    condition = "" if stated.get("condition") is None else f", {stated['condition']}"
    return f"{shown} per {stated['unit']}{condition}"


def _signature(claim: Claim, demanded: str | None) -> Finding:
    if claim.signature is None:
        return Finding(
            "signature", None if demanded is None else False, "none: anybody could have written this file"
        )
    signer = claim.signer()
    if signer is None:
        return Finding("signature", False, "it does not fit: the file was altered, or never signed")
    if demanded is None:
        return Finding("signature", True, f"it fits the key {signer}; compare that with the signer's own word")
    words = "it fits, by the key that was asked for" if signer == demanded else f"it is by another key, {signer}"
    return Finding("signature", signer == demanded, words)


def _statement(claim: Claim) -> Finding:
    if claim.version == 1:
        return Finding("statement", None, "none: the format's version 1 has no statement")
    try:
        same = statement(claim.body) == claim.body["statement"]
    except _BROKEN:
        same = False
    return Finding("statement", same, "it follows from the fields" if same else "it is not what the fields say")


def _proof(claim: Claim) -> tuple[Proof | None, Finding]:
    stated = claim.body["claim"]
    try:
        proof = prove(claim.body["event"], delta=stated["delta"], relation=stated["relation"])
    except NoRule as reason:
        return None, Finding("proof", None, f"no rule here proves these releases: {reason}")
    except _BROKEN as error:
        return None, Finding("proof", False, f"these are no releases with an ε ({error})")
    claimed, counted = stated["epsilon"], (claim.body["plan"] or {}).get("counted")
    value = f"{proof.whose}, {proof.by}: ε ≤ {proof.epsilon:.6g}"
    if proof.epsilon > claimed * (1.0 + TOLERANCE):
        return proof, Finding("proof", False, f"{value}, and {claimed:.6g} is claimed")
    # A run whose records were counted states its budget, which its plan meets to a thousandth.
    if proof.epsilon < claimed / (1.0 + TOLERANCE + (0.002 if counted else 0.0)):
        return proof, Finding("proof", False, f"{value}: the claim of {claimed:.6g} is of other releases")
    above = "" if proof.epsilon <= claimed else f" ({proof.epsilon / claimed - 1.0:.2%} above the claim)"
    return proof, Finding("proof", True, value + above)


def _agreement(claim: Claim) -> list[Finding]:
    """Parts of a file that speak of the same thing."""
    plan, data, stated = claim.body["plan"], claim.body["data"], claim.body["claim"]
    if plan is None:
        return _stated_by_program(claim)
    problems = []
    if plan.get("n_public") != data.get("n_public"):
        problems.append("the number of records")
    if plan.get("noise_multiplier") != stated["noise_multiplier"]:
        problems.append("the noise multiplier")
    if not _count_agrees(plan.get("counted"), claim.body["event"], stated):
        problems.append("the private count")
    words = f"the parts of the file disagree about {', '.join(problems)}" if problems else "its parts agree"
    return [Finding("plan", not problems, words)]


def _count_agrees(counted: object, event: Json, stated: Json) -> bool:
    """Whether a count that was a release stands before the others, and may.

    The others were planned from its outcome. That is covered if all are un-sampled Gaussian releases, whose total
    is one Gaussian for every outcome, or if the count is pure and its ε is added to that of the rest.
    """
    if counted is None:
        return "count" not in stated["releases"]
    kinds = {"noise_multiplier": float, "gaussian": bool}
    if not isinstance(counted, dict) or {key: type(value) for key, value in counted.items()} != kinds:
        return False
    z, relation = counted["noise_multiplier"], stated["relation"]
    parties = event.get("parties", []) if event.get("event") == "per-party" else [event]
    for each in parties:
        parts = each.get("parts", []) if isinstance(each, dict) and each.get("event") == "composed" else []
        if len(parts) < 2 or relation != "add-remove" or stated["releases"].get("count") != 1:
            return False
        if counted["gaussian"]:
            if parts[0] != {"event": "gaussian", "noise_multiplier": z} or not all(map(_only_gaussian, parts[1:])):
                return False
        elif parts[0].get("event") != "upfront" or abs(parts[0].get("epsilon", 0.0) * z - 1.0) > 1e-9:
            return False
    return True


def _only_gaussian(event: Any) -> bool:
    kinds = {"gaussian", "composed", "repeated", "parallel", "per-party", "slack", "failure"}
    if isinstance(event, list):
        return all(map(_only_gaussian, event))
    if not isinstance(event, dict) or event.get("event") not in kinds:
        return False
    return all(_only_gaussian(event[key]) for key in ("parts", "parties", "inner") if key in event)


def _stated_by_program(claim: Claim) -> list[Finding]:
    """What another program printed, held against what the releases cost."""
    source, stated = claim.body["source"], claim.body["claim"]
    printed = source.get("stated")
    name = f"{source.get('program')} {source.get('version')}"
    if not isinstance(printed, dict):
        return [Finding("printed", None, f"{name} printed no ε that the claim holds")]
    epsilon, delta = printed.get("epsilon"), printed.get("delta")
    if not isinstance(epsilon, int | float) or delta != stated["delta"]:
        return [Finding("printed", None, f"{name} printed an ε at another δ")]
    if epsilon < stated["epsilon"] * (1.0 - TOLERANCE):
        return [
            Finding(
                "printed", False, f"{name} printed ε = {epsilon:.6g}; the releases cost {stated['epsilon']:.6g}"
            )
        ]
    return [Finding("printed", True, f"{name} printed ε = {epsilon:.6g}, which is not less than is proved")]


def _correlated(claim: Claim) -> list[Finding]:
    slots, findings = (claim.body["plan"] or {}).get("slots", ()), []
    for slot in slots if isinstance(slots, list) else ():
        mechanism = slot.get("mechanism") if isinstance(slot, dict) else None
        if not isinstance(mechanism, dict) or mechanism.get("kind") not in ("correlated", "banded"):
            continue
        try:
            s, how = sensitivity(mechanism)
        except _BROKEN as error:
            findings.append(Finding("sensitivity", False, f"the correlated noise has no sensitivity ({error})"))
            continue
        findings.append(
            Finding("sensitivity", True, f"the noise must be {s:.6g} times as loud as stated per release, {how}")
        )
    return findings


def _model(claim: Claim, file: Path) -> Finding:
    claimed_digest = (claim.body["model"] or {}).get("sha256")
    same = claimed_digest is not None and hashlib.sha256(file.read_bytes()).hexdigest() == claimed_digest
    return Finding("model", same, "the file is the one of the claim" if same else "the file is another model")


def _bound_by(
    claim: Claim, signer: str | None, lines: Lines, demanded: str | None, head: str | None
) -> tuple[str, ...]:
    ties = []
    if signer is not None and demanded in (None, signer):
        ties.append(
            f"the signature of {signer}" + (" (whose key that is, you must know)" if demanded is None else "")
        )
    if lines.bound and not lines.problem:
        anchor = claim.body["ledger"]["head"]
        ties.append(f"the ledger's head {anchor}" + (" (compare it with the ledger's)" if head is None else ""))
    return tuple(ties)


def _words(
    claim: Claim, findings: list[Finding], proof: Proof | None, bound_by: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    good = {finding.what for finding in findings if finding.ok}
    stated, shown, rest = claim.body["claim"], list[str](), list[str]()
    if "proof" in good and proof is not None:
        shown.append(f"The releases listed cost no more than ε = {max(proof.epsilon, stated['epsilon']):.6g} at "
                     f"δ = {stated['delta']:g} under {stated['relation']}, by {proof.whose}.")  # fmt: skip
    if "ledger" in good:
        shown.append("The ledger's lines fit their hashes, and reserve and pay for these releases.")
    shown += [f"Claim, condition, unit and notes are held fast by {by}." for by in bound_by]
    if not bound_by:
        names = ", ".join(fields(claim)["bound"])
        rest.append(f"Open, because neither a signature nor a ledger holds the file fast: {names}.")
        rest.append(f"The file says: per {stated['unit']}; condition: {stated.get('condition') or 'none'}.")
    if stated.get("condition") is not None:
        rest.append(f"That the condition is met: ε holds {stated['condition']}.")
    rest += [f"What the claim notes: {note}." for note in stated["notes"]]
    rest += [
        "That the run made these releases and no others, with secret noise: that is its author's word.",
        "What was spent on these people outside of the ledger lines in the file.",
        f"Anything against others than this adversary: {stated['adversary']}.",
    ]
    if claim.native:
        rest.append("That the releases follow from the stated settings: `quietgrad verify` derives them.")
    return tuple(shown), tuple(rest)
