"""The federated curator: many parties behind one door, so that every algorithm runs on them unchanged.

DP-SRM through this door is DDP-SRM (paper 000, Algorithm 2); SPIDER is its distributed form (paper 003, Algorithm
3, when trust is ``"local"``); a local fit is one-shot weighted averaging (paper 002, repaired). A release is one
round: the public query goes out, each party answers from its own sample, and the noise is where the plan's trust
puts it. A round that lost a party is used only if a quorum is left; else it is asked again as a new release, paid
from the plan's spare rounds, and when those are used up the run ends with the names of those who were missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quietgrad.curators.account import Account
from quietgrad.federation.aggregate_store import AggregateStore
from quietgrad.federation.coordinator_session import FederatedSession
from quietgrad.federation.exchange import Exchange
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.rounds import LostRound, largest_reply, quorate
from quietgrad.federation.transport import Transport
from quietgrad.federation.wire import Message, encode
from quietgrad.objectives.base import Objective
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.rng import fresh_key, seed_key
from quietgrad.secure.faults import ProtocolError
from quietgrad.secure.identity import Identity, Roster

AGGREGATES = "aggregates.bin"
"""What a coordinator keeps of a run that is not over, in its folder."""

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger

Floats = npt.NDArray[np.float64]


class FederatedCurator:
    """Coordinates parties that each hold their own records.

    Args:
        objective: the public loss.
        over: how to reach the parties (and servers): a transport, or an exchange over one.
        ledger, account, cap: the coordinator's own record of what the run releases; each party keeps its own too.
        identity, roster: who is who, for ``secure="masks"``.
        folder: keep every aggregate here before it is used, so that a killed run can be resumed.
        seed: fixed randomness, for tests: the run is then **not private**.
        tell: is told in words, at once, of every round that went wrong.
    """

    def __init__(
        self,
        objective: Objective,
        over: Transport | Exchange,
        *,
        ledger: Ledger | str | Path | None = None,
        account: Account | str = "default",
        cap: Budget | None = None,
        identity: Identity | None = None,
        roster: Roster | None = None,
        folder: str | Path | None = None,
        seed: int | None = None,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.objective = objective
        self.exchange = over if isinstance(over, Exchange) else Exchange(over, tell=tell)
        self._account = account if isinstance(account, Account) else Account(account, ledger, cap)
        self.tell = tell
        self.admitted: Callable[[str, Message], None] = lambda name, reply: None
        """Is told of every party that comes back in mid-run."""
        self.claimed: tuple[int, dict[str, int]] = (-1, {})
        """The last round that a party says it has answered, and the draws of each slot."""
        self.seeded = seed is not None
        self._key = fresh_key() if seed is None else seed_key(seed)
        self._identity, self._roster = identity, roster
        self.folder = None if folder is None else Path(folder)

    def open(self, plan: FederatedPlan, wait: float | None = None) -> FederatedSession:
        """Reserve the plan's whole cost here and at every party, or continue the run kept in the folder.

        Waits for a quorum, and then ``wait`` seconds for the others.
        """
        absent = {*plan.names, *plan.servers} - set(self.exchange.transport.parties())
        if absent:
            raise ProtocolError(", ".join(sorted(absent)), "cannot be reached by this transport")
        path = None if self.folder is None else self.folder / AGGREGATES
        public = self._key if self.seeded else os.urandom(32)
        event = plan.event if plan.is_private else None
        store = AggregateStore(path, digest=plan.digest, run=os.urandom(16).hex(), public_key=public)
        self.exchange.most = largest_reply(plan)
        try:
            charge = (
                self._account.reopen(event, plan.budget, run=store.run, unit=plan.unit) if store.resumed else None
            )
            if charge is not None:
                self._account.resume(store.run)
            if charge is None and event is not None and plan.budget is not None:
                self._account.check(event, plan.budget, plan.unit)  # before anybody else has paid
            if not store.ended:
                self._gather(plan, store, wait)
            if charge is None:
                note = f"{plan.algorithm}, {len(plan.names)} parties, trust {plan.trust}"
                note += "" if plan.records_public is None else f"; {plan.counts}"
                charge = self._account.reserve(event, plan.budget, run=store.run, note=note, unit=plan.unit)
        except BaseException as error:
            if isinstance(error, Exception) and not store.resumed:
                self._call_off(plan, store, str(error))
            store.close()
            raise
        return FederatedSession(plan, self, store, charge)

    def _gather(self, plan: FederatedPlan, store: AggregateStore, wait: float | None) -> None:
        """Open the run at the parties; whoever restarts later hears the same words."""
        faults: dict[str, str] = {}
        message = encode(Message("open", {"run": store.run, "plan": plan.digest}))
        self.exchange.opens(message, lambda name, reply: self.admitted(name, reply))
        replies = self.exchange.call(dict.fromkeys(plan.names, message), faults, quorate(plan), grace=wait)
        faults |= {name: why for name, reply in replies.items() if (why := self._hear(plan, reply)) is not None}
        if len(plan.names) - len(faults) < plan.quorum:
            raise LostRound(faults)

    def _hear(self, plan: FederatedPlan, reply: Message) -> str | None:
        """Note where a party says it is, or why it cannot be there.

        A coordinator whose own file was cut continues from the furthest.
        """
        if reply.kind != "ready":
            return "says that this run is over"
        last, draws = reply.fields.get("round"), reply.fields.get("draws")
        limits = {slot.name: plan.limit(slot.name) for slot in plan.schedule.slots}
        if type(last) is not int or not isinstance(draws, dict) or not -1 <= last < sum(limits.values()):
            return "says that it is ready, and not where it was"
        said = {slot: draws.get(slot, 0) for slot in limits}
        if not all(type(n) is int and 0 <= n <= limits[slot] for slot, n in said.items()):
            return "says that it has answered more than the plan allows"
        known = self.claimed[1]
        self.claimed = max(self.claimed[0], last), {slot: max(n, known.get(slot, 0)) for slot, n in said.items()}
        return None

    def _call_off(self, plan: FederatedPlan, store: AggregateStore, why: str) -> None:
        """The run could not be opened: those who paid get it back, for they were asked nothing."""
        over = encode(Message("close", {"run": store.run, "reason": f"not opened: {why}"[:200]}))
        with contextlib.suppress(ProtocolError):
            self.exchange.call(dict.fromkeys(plan.names, over), {}, grace=1.0)
        store.remove()


ADVERSARIES = {
    "curator": "anyone who sees every released number, other parties included; the coordinator sees each party's "
    "exact sums and is trusted",
    "local": "everyone but the party itself: the coordinator and all other parties together; each party adds noise "
    "for its own records and trusts nobody (ICRL-DP)",
}
BUT_FOR_LISTS = (
    "; the parties matched their people by lists of hashed ids, so ε is not about whether somebody is known to a "
    "party against the other parties, who have its list, but about what is recorded of them"
)


def adversary(plan: FederatedPlan) -> str:
    """Against whom the plan's ε holds, in words."""
    if not plan.is_private:
        return "nobody: NOT PRIVATE, the plan adds no noise and every sum and model is exact"
    if plan.matched:
        return adversary(replace(plan, matched="")) + BUT_FOR_LISTS
    if plan.trust in ADVERSARIES:
        return ADVERSARIES[plan.trust]
    from quietgrad.secure.threat_model import threats

    rows: Mapping[str, str] = dict(threats(plan.terms(max(plan.dims.values()))).rows)
    return "; ".join(f"{question}: {answer}" for question, answer in rows.items())
