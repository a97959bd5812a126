"""Charging a claim to a ledger: runs of other programs and places count in the same account as our own.

What is charged is the claim's event, which composes with all others of the account under the caps. The entry is
conditional: that the run made these releases, and what they rest on, is its author's word.
"""

from __future__ import annotations

from quietgrad.assurance.certificates.checking import check
from quietgrad.assurance.certificates.document import PrivacyCertificate
from quietgrad.core.accounting import events
from quietgrad.core.errors import DataError, LedgerError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import Reservation

_PREFIX = "claim-"
_DIGITS = 40  # of the claim's digest: 160 bits, too many to find a second claim for
_STATED = "printed"


def charge_claim(ledger: Ledger, document: PrivacyCertificate, account: str) -> Reservation:
    """Charge what a claim says was released to ``account``, once; ``BudgetError`` if a cap does not allow it.

    ``DataError`` if the claim is not proved. An ε that a program printed too small is no obstacle: what is charged
    are the releases, at their own cost.
    """
    verdict = check(document)
    contrary = [finding for finding in verdict.findings if finding.ok is False and finding.what != _STATED]
    if contrary:
        raise DataError(
            f"the claim is not proved ({contrary[0].what}: {contrary[0].words}), so nothing was charged. Check it "
            "with `quietgrad verify`."
        )
    claim, run = document.body["claim"], _PREFIX + document.digest[:_DIGITS]
    if ledger.find(run) is not None:
        raise LedgerError(f"{ledger.path}: this claim is charged already, as run {run}; nothing was charged again.")
    source = document.body.get("source", {"program": "quietgrad", "version": "0.2"})
    default_condition = f"if the run was as its certificate {document.digest[:16]} says (not checked)"
    reservation = ledger.reserve(
        account,
        events.from_json(document.body["event"]),
        delta=claim["delta"],
        relation=claim["relation"],
        run=run,
        unit=claim["unit"],
        condition=claim.get("condition") or default_condition,
        note=f"{source['program']} {source['version']}; claim {document.digest}",
    )
    ledger.close(reservation.id, reason="claimed", data_dependent=True)
    return reservation
