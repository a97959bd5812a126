"""Layer L0: a run that is interrupted and continued gives nothing away for free but what it gave before.

Noise used on two different sums leaves their difference bare. So a release that is asked again with another sum
must carry other noise, and be paid for; one that is asked again as it was must be the same, and costs nothing
more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.audit.mechanisms import BOUND, AnonymousRecords, ConstantQuery, EmptyObjective
from quietgrad.audit.noise_checks import check_normals
from quietgrad.audit.replicas import as_numbers
from quietgrad.audit.report import AuditFinding
from quietgrad.curators.central import CentralCurator
from quietgrad.curators.transcript import Transcript
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.accounting import account
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.rng import fresh_key
from quietgrad.sampling import FullBatch

_RELEASES, _WIDTH = 64, 64
Holder = Callable[..., Any]
"""(objective, data, ledger=, run=, key=) ↦ a curator whose sessions can be continued by a transcript."""


def probe_replay(curator: Holder = CentralCurator, *, alpha: float = 1e-6) -> list[AuditFinding]:
    """Make releases, lose the session, and ask them again: the first half as they were, then something else.

    >>> [finding.verdict for finding in probe_replay()]
    ['pass', 'pass', 'pass', 'pass', 'pass', 'pass']
    """
    from quietgrad.privacy.ledger import Ledger

    budget = Budget(20.0, 1e-5)
    plan = Plan("probe", {}, Schedule((Slot("probe", FullBatch(), _RELEASES),)), 1, budget, 2.0)
    half = _RELEASES // 2
    moved = 3.0 * BOUND
    key = fresh_key()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"

        def ask(values: list[float], *, resumed: bool = False) -> Any:
            log = Transcript(Path(folder) / "transcript", "run", key, resumed=resumed)
            holder = curator(EmptyObjective(), AnonymousRecords(1, _WIDTH), ledger=path, run="run", key=key)
            session = holder.open(plan, transcript=log)
            heard = [as_numbers(session.release("probe", ConstantQuery(_WIDTH, BOUND, value))) for value in values]
            return session, log, np.stack(heard)

        _, log, before = ask([0.0] * _RELEASES)
        log.close()
        session, log, again = ask([0.0] * half + [moved] * half, resumed=True)
        session.close("steps")
        log.close()
        charged = Ledger(path).spent("default", delta=budget.delta, relation=budget.relation).epsilon
    same = float(np.abs(again[:half] - before[:half]).max())
    first = AuditFinding("L0 replay", "the same again", "change", 0.0, same, "pass" if same == 0.0 else "violation")
    z = np.concatenate([before, again[half:] - moved]) / (2.0 * BOUND)
    findings = [first, *check_normals(z, "sums that changed after a resume", alpha)]
    owed = account(plan.schedule.slots[0].event(2.0, budget.relation, _RELEASES + half), **_at(budget))
    verdict = "pass" if owed <= charged * (1.0 + 1e-9) else "violation"
    return [*findings, AuditFinding("L0 charge", "releases asked again", "ε", charged, owed, verdict)]  # type: ignore[arg-type]


def _at(budget: Budget) -> dict[str, Any]:
    return {"delta": budget.delta, "relation": budget.relation}
