"""quietgrad-verify: checks the ε of a private run without trusting the program that printed it.

:func:`read` reads a claim's file, :func:`check` gives its :class:`Verdict`, :func:`prove` proves ε of releases, and
:mod:`quietgrad_verify.adapters` makes claims of runs of other libraries. It shares no code with quietgrad.
"""

from __future__ import annotations

from quietgrad_verify._version import VERSION as __version__
from quietgrad_verify.document import Claim, Unreadable, read, schema, standing
from quietgrad_verify.events import NoRule
from quietgrad_verify.proof import Proof, prove
from quietgrad_verify.verdict import Finding, Verdict, check

__all__ = [
    "Claim", "Finding", "NoRule", "Proof", "Unreadable", "Verdict", "__version__", "check", "prove", "read",
    "schema", "standing",
]  # fmt: skip
