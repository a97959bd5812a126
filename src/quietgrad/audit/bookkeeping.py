"""Layer L0, exact probes of bookkeeping: fresh records are used once, and rounds that were lost are paid for.

Both claims rest on counting, so both are tested by counting: the objective of the probe writes down which records
it is asked to sum, and how often, while the real door does its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quietgrad.audit.canaries import CanaryObjective, CanaryRecords, Floats
from quietgrad.audit.replicas import CuratorFactory, central
from quietgrad.audit.report import AuditFinding
from quietgrad.errors import ExhaustedError
from quietgrad.objectives.base import Batch, ClippingRule, Gradient
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import fresh_key
from quietgrad.sampling import SinglePass

_RECORDS = 12


class _Register(CanaryObjective):
    """Counts the sums that each record was in."""

    def __init__(self, records: int) -> None:
        super().__init__("constant")
        self.uses = np.zeros(records, np.int64)

    def add(self, batch: Batch, points: Sequence[Floats], rule: ClippingRule, out: Floats) -> None:
        taken = np.arange(len(self.uses)) if batch.indices is None else batch.indices
        np.add.at(self.uses, taken, 1)


def probe_fresh_records(curator: CuratorFactory = central) -> AuditFinding:
    """How often one record was summed in a single pass that two slots share, asked until the door refuses.

    The claim, one release's cost for the whole pass, holds only if no record is used twice.

    >>> probe_fresh_records().verdict
    'pass'
    """
    slots = (Slot("large", SinglePass(_RECORDS, 3), 9), Slot("small", SinglePass(_RECORDS, 2), 9))
    plan = Plan("probe", {}, Schedule(slots), _RECORDS, Budget(1.0, 1e-5, Relation.REPLACE_ONE), 5.0)
    register = _Register(_RECORDS)
    session = curator(register, CanaryRecords(("silent",) * _RECORDS, 1, 2), fresh_key()).open(plan)
    query = Gradient(np.zeros(2), 1.0)
    try:
        for _ in range(9):
            for slot in slots:
                session.release(slot.name, query)
    except ExhaustedError:
        pass
    most = float(register.uses.max())
    return AuditFinding("L0 reuse", "one fresh record", "uses", 1.0, most, "pass" if most <= 1.0 else "violation")


def probe_lost_rounds(*, spare: int = 2) -> AuditFinding:
    """What a federation that lost ``spare`` rounds is charged, against the cost of all sums that were made.

    A party who answered a round that then was lost has given its sum away all the same.

    >>> probe_lost_rounds().verdict
    'pass'
    """
    from quietgrad.algorithms.dp_sgd import DPGD
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.federation.parties import Party
    from quietgrad.federation.simulation import assemble
    from quietgrad.federation.transport.in_process import InProcess
    from quietgrad.federation.wire import Bytes, Message, decode, encode
    from quietgrad.privacy.accounting import account

    steps, budget = 3, Budget(1.0, 1e-5)
    register: Any = _Register(1)
    holders = [Party(CanaryRecords(("silent",), 1, 2), n_public=1) for _ in range(2)]
    plan, people = assemble(
        DPGD(steps=steps), register, holders, budget=budget, trust="curator", spare=spare, noise_multiplier=5.0
    )
    honest, lies = people.handlers["party-2"], iter(range(spare))

    def lying(message: Bytes) -> Bytes:
        """The first answers of the second party are no numbers, so that their rounds are lost."""
        reply = decode(bytes(honest(message)))
        if reply.kind == "sum" and next(lies, None) is not None:
            reply = Message(reply.kind, reply.fields, {"total": np.full_like(reply.arrays["total"], np.nan)})
        return encode(reply)

    curator = FederatedCurator(
        register, InProcess({**people.handlers, "party-2": lying}), identity=people.identity, roster=people.roster
    )
    session = curator.open(plan)
    for _ in range(steps):
        session.release("gradient", Gradient(np.zeros(2), 1.0))
    charged = session.close("steps").event
    assert charged is not None
    answered = int(register.uses[0]) // len(holders)  # each party sums in every round
    made = events.gaussian(plan.noise_multiplier, answered)
    paid, owed = (account(e, delta=budget.delta, relation=budget.relation) for e in (charged, made))
    verdict = "pass" if owed <= paid * (1.0 + 1e-9) else "violation"
    return AuditFinding("L0 charge", f"{answered} sums, {spare} of them lost", "ε", paid, owed, verdict)  # type: ignore[arg-type]
