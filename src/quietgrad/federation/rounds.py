"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Sums are added up in the open (exact ones for a trusted curator, noisy ones under local trust) or securely: by
masks, with the coordinator as the aggregator, or by shares to servers, whose frames the coordinator only relays.
The choreography of both stands in :mod:`quietgrad.federation.secure.choreography`; here it is driven over a
network. A round that fails raises :class:`FailedRoundError`. Nothing of it may be used, and asking again is a new
release.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.federation.exchange import Enough, Exchange
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.revocation import Revocations
from quietgrad.federation.secure.choreography import QUESTION, MaskedSums, Reply, SharedSums, Step, drive
from quietgrad.federation.secure.discrete_gaussian import check_length
from quietgrad.federation.secure.identity import (
    DropoutError,
    Identity,
    ProtocolError,
    Roster,
    SumOutOfBoundsError,
)
from quietgrad.federation.secure.masking import MaskingServer
from quietgrad.federation.wire import Array, Message, WireError, blobs, encode, limit

Floats = npt.NDArray[np.float64]
_ROUNDING = 1.0 + 1e-6
_NAMED = 5


class FailedRoundError(DropoutError):
    """A round without enough good answers; names what happened, and marks mere accusations as such.

    An accusation by more than ``colluders``, who may work together, is proved. ``blamed`` are the parties without
    whom the round is asked again.
    """

    def __init__(self, faults: Mapping[str, str], colluders: float = math.inf, blamed: Iterable[str] = ()) -> None:
        self.faults, self.blamed = proved_faults(faults, colluders), tuple(blamed)
        super().__init__(list(self.faults), "; ".join(sorted(set(self.faults.values()))) or "lost")


@dataclass(frozen=True)
class RoundRequest:
    """One round: the parties who are present, its public query and its noise.

    ``faults`` takes by name what goes wrong, ``malformed`` whose messages are not what the protocol has: these
    parties count as absent. ``begin`` charges the round when its question leaves.
    """

    invited: tuple[str, ...]
    slot: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, Array]
    bound: float
    multiplier: float
    faults: dict[str, str]
    begin: Callable[[], None]
    malformed: set[str] = field(default_factory=set)
    drawn: frozenset[str] | None = None
    """The parties that the coordinator drew for the round; ``None`` where it draws none. The others hand in
    zeros."""

    @property
    def dim(self) -> int:
        return int(self.fields["dim"])

    @property
    def here(self) -> dict[str, Any]:
        return {name: self.fields[name] for name in ("run", "round", "dim")}

    def questions(self, names: Iterable[str]) -> dict[str, bytearray]:
        """The question to each of these parties: one message, unless the coordinator drew some of them."""
        if self.drawn is None:
            return dict.fromkeys(names, encode(Message("ask", self.fields, self.arrays)))
        both = [encode(Message("ask", {**self.fields, "drawn": drawn}, self.arrays)) for drawn in (False, True)]
        return {name: both[name in self.drawn] for name in names}

    def leave_out(self, malformed: Mapping[str, str]) -> None:
        """Count parties as absent because of what they sent, by name and reason."""
        self.faults.update(malformed)
        self.malformed.update(malformed)


class PlainRounds:
    """Sums in the open: exact ones for a trusted curator, or noisy ones under local trust."""

    def __init__(self, plan: FederatedPlan, exchange: Exchange) -> None:
        self._plan, self._exchange, self._enough = plan, exchange, quorate(plan)

    def reset(self) -> None:
        """Nothing to forget."""

    def collect(self, ask: RoundRequest) -> Floats:
        """Return the sum of the good answers of at least a quorum; the others are at fault."""
        ask.begin()
        replies = self._exchange.call(ask.questions(ask.invited), ask.faults, self._enough)
        wrong = {name: why for name, reply in replies.items() if (why := self._fault(name, reply, ask)) is not None}
        ask.faults.update(wrong)
        if len(replies) - len(wrong) < self._plan.quorum:
            raise FailedRoundError(ask.faults)
        total = np.zeros(ask.dim)
        for name, reply in replies.items():
            if name not in wrong:
                total += reply.arrays["total"]
        return total

    def _fault(self, name: str, reply: Message, ask: RoundRequest) -> str | None:
        round_fields = {word: reply.fields.get(word) for word in ("run", "round")}
        if reply.kind != "sum" or round_fields != {word: ask.fields[word] for word in round_fields}:
            return f"reply is stale or a replay: round {round_fields['round']!r} instead of {ask.fields['round']}"
        total = reply.arrays.get("total")
        if total is None or total.dtype != np.float64 or total.shape != (ask.dim,):
            return f"vector has a wrong length or type; {ask.dim} numbers were asked"
        # Not BLAS: its threads would cost more than this sum.
        length = math.sqrt(float(np.einsum("i,i->", total, total)))
        if math.isnan(length) or (math.isinf(length) and not np.isfinite(total).all()):
            return "vector has a NaN or an infinity"
        noise, bound = 0.0, ask.bound * self._plan.factors[self._plan.numbers[name]]
        if self._plan.own_noise and ask.multiplier > 0.0 and bound < math.inf:
            noise = ask.multiplier * bound * self._plan.schedule[ask.slot].mechanism.reach(ask.dim) * 2.0
        if length > (longest(self._plan, (name,), ask.bound) + noise) * _ROUNDING:
            return f"vector is longer than all of its records together may be ({length:.3g})"
        return None


class SecureRounds:
    """Secure sums: by masks with the coordinator as the aggregator, or by shares to servers."""

    def __init__(
        self,
        plan: FederatedPlan,
        exchange: Exchange,
        identity: Identity | None,
        roster: Roster | None,
        revocations: Revocations,
    ) -> None:
        self._plan, self._exchange, self._revocations = plan, exchange, revocations
        if not plan.servers and (identity is None or roster is None):
            raise ValueError("secure='masks': the coordinator needs its identity and the roster.")
        self._identity, self._roster = identity, roster
        self._ready: dict[int, MaskedSums | SharedSums] = {}  # by length of vectors
        self._names = (*plan.names, *plan.servers)  # by roster number

    def reset(self) -> None:
        """Begin with new keys: a member restarted."""
        self._ready.clear()

    def collect(self, ask: RoundRequest) -> Floats:
        """Return the sum as :meth:`PlainRounds.collect` does. It carries its noise already."""
        try:
            if ask.dim not in self._ready:
                self._ready[ask.dim] = self._set_up(ask)
            protocol = self._ready[ask.dim]
            total, present = drive(
                protocol.sum(ask.fields["round"], self._numbers_of(ask), ask.leave_out), partial(self._send, ask)
            )
            if isinstance(protocol, MaskedSums):
                ask.faults.update(protocol.server.proved)
            # In the query's own units, if the records of those in it can have such a sum.
            scale = self._plan.scale(ask.multiplier, ask.bound * self._plan.reach, ask.dim)
            most = longest(self._plan, (self._names[i] for i in present), ask.bound) / scale
            check_length(total, self._plan.terms(ask.dim).possible_length(most))
            return total * scale
        except (ProtocolError, WireError) as fault:
            # A failed round leaves roles in different states: begin again with new keys.
            begun = self._ready.get(ask.dim)
            server = begun.server if isinstance(begun, MaskedSums) else None
            proved = {} if server is None else server.proved
            self._ready.clear()
            named: Mapping[str, str] = {}
            if isinstance(fault, FailedRoundError):
                named = fault.faults
            elif isinstance(fault, DropoutError):
                named = dict.fromkeys(fault.missing, fault.reason)
            elif isinstance(fault, ProtocolError) and not proved:
                named = {fault.party: fault.reason}
            colluders = math.inf if self._plan.servers else self._plan.colluders
            faults = {**named, **ask.faults, **proved}
            if server is not None:
                ask.leave_out(server.left_out)
                faults |= server.left_out
            raise FailedRoundError(faults, colluders, self._blamed(faults, {*ask.malformed, *proved})) from fault

    def _blamed(self, faults: Mapping[str, str], seen: Collection[str]) -> list[str]:
        """The parties that are left out when a failed round is asked again, so that each costs one round at most.

        Those whose messages were ``seen`` to be malformed or false; else the party that most others accuse, since
        the round failed for want of its accusers.
        """
        parties = [name for name in self._plan.names if name in seen]
        accused = {name: by for name, by in accusations(faults).items() if name in self._plan.numbers}
        if parties or not accused:
            return parties
        return [max(accused, key=lambda name: len(accused[name]))]

    def _set_up(self, ask: RoundRequest) -> MaskedSums | SharedSums:
        """Introduce the members of a round to each other, with new keys."""
        epoch, terms = os.urandom(16), self._plan.terms(ask.dim)
        protocol: MaskedSums | SharedSums = SharedSums(terms, self._names)
        if not self._plan.servers:
            assert self._identity is not None
            assert self._roster is not None
            protocol = MaskedSums(MaskingServer(self._identity, self._roster, terms, epoch), self._plan.quorum)
        members = protocol.set_up([self._plan.numbers[name] for name in ask.invited], ask.leave_out)
        # With new keys, all hear of those who were revoked meanwhile.
        drive(members, partial(self._send, ask, epoch=epoch.hex(), **self._revocations.handed_out()))
        return protocol

    def _numbers_of(self, ask: RoundRequest) -> list[int]:
        """The parties that can be asked: those invited that nothing went wrong with."""
        return [self._plan.numbers[name] for name in ask.invited if name not in ask.faults]

    def _send(self, ask: RoundRequest, step: Step, **more: Any) -> dict[int, Reply]:
        """Carry one step of a choreography to its recipients and bring back who answered what."""
        if len(step.to) < step.least:
            raise FailedRoundError(ask.faults)  # before any recipient is asked
        to = {self._names[i]: frames for i, frames in step.to.items()}
        if step.kind == QUESTION:
            ask.begin()
            messages = ask.questions(to)
        else:
            frame_by_id: dict[int, bytearray] = {}  # one message for those who get the same
            for frames in to.values():
                if id(frames) not in frame_by_id:
                    frame_by_id[id(frames)] = encode(Message(step.kind, {**ask.here, **more}, blobs(frames)))
            messages = {name: frame_by_id[id(frames)] for name, frames in to.items()}
        servers = [name for name in to if name in self._plan.servers]
        enough = quorate(self._plan, *servers) if len(servers) < len(to) else partial(_all_of, servers)
        replies = self._exchange.call(messages, ask.faults, enough)
        if len(replies) < step.least:
            raise FailedRoundError(ask.faults)
        return {i: _reply(replies[name]) for i in step.to if (name := self._names[i]) in replies}


def _reply(message: Message) -> Reply:
    left_out = message.fields.get("left_out")
    return Reply(message.arrays, left_out if isinstance(left_out, dict) else {})


def _all_of(servers: Sequence[str], good: Collection[str]) -> bool:
    return all(name in good for name in servers)


def quorate(plan: FederatedPlan, *others: str) -> Enough:
    """Return whether those who answered are a quorum of parties, and all of ``others``."""

    def enough(good: Collection[str]) -> bool:
        return len(good) - len(others) >= plan.quorum and all(name in good for name in others)

    return enough


def largest_reply(plan: FederatedPlan) -> int:
    return limit(max([1, *plan.dims.values()]), 8 + 64 * len(plan.names))


def longest(plan: FederatedPlan, names: Iterable[str], bound: float) -> float:
    """The most that the records of these parties can add up to, if each contributes at most ``bound``."""
    places = [plan.numbers[name] for name in names]
    # Under add-remove the true number of records is not public; honest sizes stay within twice the declared.
    return bound * math.fsum(plan.factors[j] * (2 * plan.sizes[j] + 64) for j in places)


def proved_faults(faults: Mapping[str, str], colluders: float = math.inf) -> dict[str, str]:
    """Tell faults from accusations: a member that refuses because of another is right or lies, so both are named.

    If more parties accuse a member than may work together, one of them is honest: the accused alone is at fault.

    >>> proved_faults({"a": "did not answer within 9 s", "b": "refuses: a: dealt false shares"})
    {'a': 'did not answer within 9 s', 'b': 'or a: dealt false shares'}
    >>> proved_faults({"a": "refuses: c: dealt a false share", "b": "refuses: c: dealt a false share"}, colluders=1)
    {'c': 'dealt a false share (so say a, b)'}
    """
    out: dict[str, str] = {}
    reasons_by_accused = accusations(faults)
    accusers = {name for reasons in reasons_by_accused.values() for name in reasons}
    for name, why in faults.items():
        check, _, reason = why.removeprefix("refuses: ").partition(": ")
        if check == SumOutOfBoundsError.CHECK:  # found by the server that adds up, and not made by it
            out[check] = f"{reason} (so says {name})"
        elif name not in accusers:
            out[name] = why
    for accused, reasons in reasons_by_accused.items():
        if len(reasons) > colluders:
            out[accused] = f"{next(iter(reasons.values()))} (so say {', '.join(reasons)})"
        else:
            out.update({name: f"or {accused}: {reason}" for name, reason in reasons.items()})
    return out


def accusations(faults: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By accused member, the members that refuse because of it, with their reasons.

    >>> accusations({"a": "refuses: c: dealt a false share", "b": "did not answer within 9 s"})
    {'c': {'a': 'dealt a false share'}}
    """
    reasons_by_accused: dict[str, dict[str, str]] = {}
    for name, why in faults.items():
        accused, colon, reason = why.removeprefix("refuses: ").partition(": ")
        others = accused not in (name, "coordinator", SumOutOfBoundsError.CHECK)
        if why.startswith("refuses: ") and colon and " " not in accused and others:
            reasons_by_accused.setdefault(accused, {})[name] = reason
    return reasons_by_accused


def named(faults: Mapping[str, str]) -> str:
    """Faults as one line; of many the first few.

    >>> named({str(i): "did not answer" for i in range(9)})
    '0 did not answer; 1 did not answer; 2 did not answer; 3 did not answer; 4 did not answer; and 4 more'
    """
    words = [f"{name} {reason}" for name, reason in faults.items()]
    more = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
    return "; ".join([*words[:_NAMED], *more])
