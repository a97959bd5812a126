"""The ledger's lines in a certificate: whether they chain, pay for the claim and hold it fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quietgrad.assurance.certificates.document import Json, covered
from quietgrad.assurance.certificates.stated_claim import ALTERED, Claim, Finding
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import LedgerError, UnprovableError
from quietgrad.core.ledger.chain import ChainEntry, anchor, check_anchor
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import LedgerState, compose_events
from quietgrad.methods.result import unpaid

_MOST_KINDS = 200  # different events of one account that are added up here


def ledger_findings(body: Json, claim: Claim, file: str | Path | None) -> list[Finding]:
    """Findings on the lines in the certificate, and on the ledger itself if ``file`` names it."""
    stated = body["ledger"]
    if stated is None:
        findings = [Finding("ledger", None, "none: what else was spent on these people is not known")]
        if file is not None:
            findings.append(Finding("ledger at hand", False, "the certificate names no ledger to compare it with"))
        return findings
    if set(stated) != {"head", "lines", "run"}:
        raise ValueError("ledger")
    entries, head = tuple(ChainEntry(**line) for line in stated["lines"]), stated["head"]
    whole = is_whole(stated["lines"])
    problem, book = _chain_problem(entries, head, whole=whole), LedgerState()
    try:
        held = list(book.fold(entries).held.values())
        of_a_party = body["federation"] is not None
        problem = problem or "; ".join(unpaid(claim.privacy, str(stated["run"]), held, "it", of_a_party=of_a_party))
    except LedgerError as error:
        problem = problem or str(error)
    # A part with the ledger's first line has the lines of an account; without it, those of the run alone.
    of_account = not whole and entries[0].kind == "open"
    part = f"the {len(entries)} lines of this run; other runs on the same people are not shown"
    if of_account:
        part = f"the {len(entries)} lines of this account; lines of other accounts are not shown"
    all_lines = f"{len(entries)} lines that chain up to {head}"
    certified = [
        line.body for line in entries if line.kind == "certificate" and line.body.get("run") == stated["run"]
    ]
    bound = "source" in body and any(each.get("digest") == covered(body) for each in certified)
    if certified and not bound:
        problem = problem or "it certifies this run otherwise: a part of the claim was edited"
    findings = [Finding("ledger", not problem, problem or (all_lines if whole else part))]
    # The head holds fast what chains up to it: a line with lines left out behind it is tied to nothing.
    tied = [line for place, line in enumerate(reversed(entries)) if line.seq == _seq(head) - place]
    bound = bound and any(line.kind == "certificate" and line.body.get("digest") == covered(body) for line in tied)
    if bound and not problem:
        findings.append(
            Finding("bound", True, f"its head {head} holds the claim fast; compare it with the ledger's own")
        )
    if (whole or of_account) and not problem:
        where = "in this ledger" if whole else "in these lines"
        findings.append(Finding("account", None, _account_total(book, claim, where)))
    if file is not None:
        try:
            ledger_entries = Ledger(file).entries()
            problem = check_anchor(ledger_entries, str(head))
            if not problem and not {line.hash for line in entries} <= {line.hash for line in ledger_entries}:
                problem = "lines of the certificate are not in it"
        except LedgerError as error:
            problem = str(error)
        words = problem or "it is the one certified, or has grown from it"
        findings.append(Finding("ledger at hand", not problem, words))
    return findings


def is_whole(lines: Sequence[Mapping[str, object]]) -> bool:
    """Whether lines are all of a ledger, from its first on without a gap."""
    return [line["seq"] for line in lines] == list(range(1, len(lines) + 1))


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


def _account_total(book: LedgerState, claim: Claim, where: str) -> str:
    """Say in words what all runs of the account cost together."""
    account = str(claim.privacy.account)
    parts, count = book.counted(account), book.runs(account)
    runs, event = f"{count} run{'' if count == 1 else 's'} of {account!r} {where}", compose_events(parts)
    mixed = claim.relation is Relation.ADD_REMOVE and Relation.REPLACE_ONE in book.relations(account)
    try:
        if event is None or mixed or len(set(parts)) > _MOST_KINDS:
            raise UnprovableError("no common ε")
        epsilon = prove(event, delta=claim.delta, relation=claim.relation).epsilon
    except (UnprovableError, *ALTERED):
        return f"{runs}, without a common ε"
    return f"{runs} cost ε = {epsilon:.4g} together at this δ"
