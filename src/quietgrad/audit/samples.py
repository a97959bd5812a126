"""Layer L0, sampling: who takes part in which release, counted through the real session.

Amplification is paid for by secrecy and chance: every record must be in a Poisson sample with the planned
probability, independently of the others and anew in every release; a sample of fixed size must have that size and
no record twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from quietgrad.audit.mechanisms import AnonymousRecords, EmptyObjective
from quietgrad.audit.noise_checks import check_normals
from quietgrad.audit.replicas import CuratorFactory, central
from quietgrad.audit.report import AuditFinding
from quietgrad.objectives.base import Batch
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import fresh_key
from quietgrad.sampling import FixedSize, Poisson
from quietgrad.vectors import Vector

_RELEASES, _RECORDS, _RATE, _SIZE = 256, 64, 0.3, 16


@dataclass
class RollCall:
    """A query that writes down who was asked."""

    bound: float = 1.0
    present: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def dim(self, records: Any) -> int:
        """One number, which nobody contributes to."""
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        """Remember the batch."""
        indices = np.arange(len(batch.records)) if batch.indices is None else batch.indices
        self.present.append(np.array(indices, np.int64))


def probe_samples(curator: CuratorFactory = central, *, alpha: float = 1e-6) -> list[AuditFinding]:
    """Poisson samples as independent coins, and samples of fixed size as sets of that size.

    >>> {finding.verdict for finding in probe_samples()}
    {'pass'}
    """
    poisson, fixed = (
        Slot("poisson", Poisson(_RATE), _RELEASES),
        Slot("fixed", FixedSize(_RECORDS, _SIZE), _RELEASES),
    )
    calls = {slot.name: _call(slot, curator) for slot in (poisson, fixed)}
    taken = np.zeros((_RELEASES, _RECORDS), bool)
    for row, indices in zip(taken, calls["poisson"], strict=True):
        row[indices] = True
    # A coin of probability q, spread over its part of the unit interval, is uniform.
    u = np.random.default_rng().random(taken.shape)
    z = ndtri(np.clip(np.where(taken, u * _RATE, _RATE + u * (1.0 - _RATE)), 1e-15, 1.0 - 1e-15))
    coins = check_normals(z, "who is in a Poisson sample", alpha)
    findings = [coin._replace(layer="L0 sampling") for coin in coins]
    whole = sum(len(np.unique(i)) == len(i) == _SIZE for i in calls["fixed"])
    exact = "pass" if whole == _RELEASES else "violation"
    return [*findings, AuditFinding("L0 sampling", "sets of fixed size", "right", _RELEASES, whole, exact)]  # type: ignore[arg-type]


def _call(slot: Slot, curator: CuratorFactory) -> list[npt.NDArray[np.int64]]:
    plan = Plan("probe", {}, Schedule((slot,)), _RECORDS, Budget(1.0, 1e-5, Relation.REPLACE_ONE), 20.0)
    session = curator(EmptyObjective(), AnonymousRecords(_RECORDS, 1), fresh_key()).open(plan)
    roll = RollCall()
    for _ in range(slot.count):
        session.release(slot.name, roll)
    return roll.present
