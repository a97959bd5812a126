"""Exact probes: checks that need no claim of a plan, because they know what every number must be.

They see in milliseconds what statistics would need millions of runs for. ``tests/behaviour/test_probes.py`` asks
them of everything that is registered; the mutation tables ask them of code that was broken on purpose.
"""

from quietgrad.assurance.audit.report import judged as found

__all__ = ["found"]
