"""Certificates: a run's claim as one file that somebody else can check without the data and without trusting us.

:func:`~quietgrad.certificates.document.issue` makes one from a saved run,
:func:`~quietgrad.certificates.checking.check` proves its ε again, by two accountants, and holds its parts against
each other. Unsigned, a certificate shows that its arithmetic is right and its parts agree, and no more: whoever
wrote it could have made all of it up. Signed, it also shows whose word the releases in it are.
"""

from __future__ import annotations

from quietgrad.certificates.checking import Finding, Verdict, check
from quietgrad.certificates.document import PrivacyCertificate, SigningKey, issue, new_key, public_key, read, schema

__all__ = [
    "PrivacyCertificate",
    "Finding",
    "SigningKey",
    "Verdict",
    "check",
    "issue",
    "new_key",
    "public_key",
    "read",
    "schema",
]
