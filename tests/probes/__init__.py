"""Exact probes: checks that need no claim of a plan, because they know what every number must be.

They see in milliseconds what statistics would need millions of runs for. ``tests/test_probes.py`` asks them of
everything that is registered; the mutation tables ask them of code that was broken on purpose.
"""

from __future__ import annotations

from quietgrad.audit.report import AuditFinding


def found(
    layer: str, what: str, unit: str, claimed: float, measured: float, *, ok: bool, note: str = ""
) -> AuditFinding:
    """A finding that passes if ``ok``."""
    return AuditFinding(layer, what, unit, claimed, measured, "pass" if ok else "violation", note=note)
