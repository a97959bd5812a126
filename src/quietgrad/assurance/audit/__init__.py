"""Audits: every claim attacked before a user relies on it.

``run`` audits one configuration; ``one_run`` audits a whole training from a single run with many canaries;
:mod:`~quietgrad.assurance.audit.attacks` is the table of everything that is attacked. Four layers:

== =======================================================================================================
L0 exact checks of the noise that leaves: scale, law, independence, over hundreds of releases
L1 d′ of Gaussian transcripts in two neighbouring worlds, against the claimed μ
L2 Clopper–Pearson bounds at the claimed profile: any law, sampled, or the final model alone
L3 one run with many canaries: a real training of a real model
== =======================================================================================================
"""

from __future__ import annotations

from quietgrad.assurance.audit.report import AuditReport
from quietgrad.assurance.audit.running import run
from quietgrad.assurance.audit.single_run import one_run

__all__ = ["run", "one_run", "AuditReport"]
