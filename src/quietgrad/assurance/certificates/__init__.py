"""Certificates: a run's claim as one file that a third party can check without the data and without trusting us.

:func:`~quietgrad.assurance.certificates.document.issue` makes one from a saved run.
:func:`~quietgrad.assurance.certificates.checking.check` proves its ε again, by two accountants, and compares its
parts. An unsigned certificate shows that its arithmetic is right and its parts agree, and no more: its author
could have made all of it up. A signed one also shows who vouches for the releases in it.
"""

from __future__ import annotations

from quietgrad.assurance.certificates.charging import charge_claim
from quietgrad.assurance.certificates.checking import Verdict, check
from quietgrad.assurance.certificates.document import (
    PrivacyCertificate,
    SigningKey,
    issue,
    new_key,
    public_key,
    read,
    schema,
)
from quietgrad.assurance.certificates.stated_claim import Finding

__all__ = [
    "Finding",
    "PrivacyCertificate",
    "SigningKey",
    "Verdict",
    "charge_claim",
    "check",
    "issue",
    "new_key",
    "public_key",
    "read",
    "schema",
]
