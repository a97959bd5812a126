"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Three ways to add up: plainly (to a trusted curator, or vectors that carry their own noise), by masks with the
coordinator as the aggregator, or by shares to servers that the coordinator only relays to. A round that cannot be
completed raises :class:`LostRound`; nothing of it may be used, and asking again is a new release.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.federation.faults import DropoutError, ProtocolError
from quietgrad.federation.identity import Identity, Roster
from quietgrad.federation.masking_server import MaskingServer
from quietgrad.federation.members import frame_of, frames_of, total_of
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.transport import Transport
from quietgrad.federation.wire import Array, Bytes, Message, WireError, blobs, decode, encode, limit

Floats = npt.NDArray[np.float64]
_ROUNDING = 1.0 + 1e-6


class LostRound(DropoutError):
    """A round without enough good answers; the parties at fault are named, with reasons."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__(list(faults), "; ".join(sorted(set(faults.values()))) or "lost")
        self.faults = dict(faults)


@dataclass(frozen=True)
class Ask:
    """One asking: its number, its public query, and the noise and bound that go with it."""

    round: int
    slot: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, Array]
    dim: int
    bound: float
    multiplier: float

    def message(self, extra: Mapping[str, Array] | None = None, into: bytearray | None = None) -> bytearray:
        """The message to a party."""
        return encode(Message("ask", self.fields, {**self.arrays, **(extra or {})}), into)


@dataclass
class Caller:
    """Sends messages and reads replies; whoever does not answer properly is named in ``faults``."""

    transport: Transport
    timeout: float
    most: int
    strangers: set[str] = field(default_factory=set)

    def call(self, messages: Mapping[str, Bytes], faults: dict[str, str]) -> dict[str, Message]:
        """Exchange, decode, and sort out the refusals; a refusal because of the plan ends the run."""
        answers, missing = self.transport.exchange(messages, self.timeout)
        faults.update(dict.fromkeys(missing, f"did not answer within {self.timeout:g} s"))
        good = {}
        for name, data in answers.items():
            try:
                reply = decode(data, most=self.most)
            except WireError as error:
                faults[name] = f"reply {error}"
                continue
            if reply.kind != "refused":
                good[name] = reply
                continue
            reason = str(reply.fields.get("reason", ""))[:500]
            if reply.fields.get("code") == "plan":
                raise ProtocolError(name, f"refuses: {reason}")
            if reply.fields.get("code") == "stranger":
                self.strangers.add(name)
            faults[name] = f"refuses: {reason}"
        return good


class PlainRounds:
    """Sums in the open: exact ones to a trusted curator, or noisy ones from parties who trust nobody."""

    def __init__(self, plan: FederatedPlan, caller: Caller) -> None:
        self._plan, self._caller = plan, caller
        self._message: bytearray | None = None

    def reset(self) -> None:
        """Nothing to forget."""

    def collect(self, ask: Ask, faults: dict[str, str]) -> Floats:
        """The sum of the good answers of at least a quorum."""
        self._message = ask.message(into=self._message)
        replies = self._caller.call(dict.fromkeys(self._plan.names, self._message), faults)
        total = np.zeros(ask.dim)
        present = 0
        for name, reply in replies.items():
            reason = self._fault(name, reply, ask)
            if reason is None:
                total += reply.arrays["total"]
                present += 1
            else:
                faults[name] = reason
        _require(present, self._plan.quorum, faults)
        return total

    def _fault(self, name: str, reply: Message, ask: Ask) -> str | None:
        if (
            reply.kind != "sum"
            or reply.fields.get("round") != ask.round
            or reply.fields.get("run") != ask.fields["run"]
        ):
            return f"reply is stale or a replay: round {reply.fields.get('round')!r} instead of {ask.round}"
        total = reply.arrays.get("total")
        if total is None or total.dtype != np.float64 or total.shape != (ask.dim,):
            return f"vector has a wrong length or type; {ask.dim} numbers were asked"
        # Not BLAS: its threads would cost more than this sum.
        length = math.sqrt(float(np.einsum("i,i->", total, total)))
        if math.isnan(length) or (math.isinf(length) and not np.isfinite(total).all()):
            return "vector has a NaN or an infinity"
        if length > self._longest(name, ask):
            return f"vector is longer than all of its records together may be ({length:.3g})"
        return None

    def _longest(self, name: str, ask: Ask) -> float:
        place = self._plan.index(name)
        bound = ask.bound * self._plan.factors[place]
        if math.isinf(bound):
            return math.inf
        # Under add-remove the true number of records is not public; honest sizes stay within twice the declared.
        records = 2 * self._plan.sizes[place] + 64
        noise = 0.0
        if self._plan.trust == "local" and ask.multiplier > 0.0:
            spread = ask.dim + 40 if self._plan.schedule[ask.slot].mechanism == "pure" else math.sqrt(ask.dim) + 10
            noise = ask.multiplier * bound * spread * 2.0
        return (bound * records + noise) * _ROUNDING


class MaskedRounds:
    """Sums by masks: the coordinator is the aggregator and sees the noisy sum only."""

    def __init__(self, plan: FederatedPlan, caller: Caller, identity: Identity, roster: Roster) -> None:
        self._plan, self._caller, self._identity, self._roster = plan, caller, identity, roster
        self._servers: dict[int, MaskingServer] = {}

    def reset(self) -> None:
        """Begin with new keys: someone restarted."""
        self._servers.clear()

    def collect(self, ask: Ask, faults: dict[str, str]) -> Floats:
        """Prepare, ask, reveal, add up."""
        try:
            return self._collect(ask, faults)
        except DropoutError as lost:
            self._servers.clear()  # a lost round leaves roles in different states: begin again with new keys
            raise LostRound(faults or dict.fromkeys(lost.missing, lost.reason)) from lost
        except ProtocolError as fault:
            self._servers.clear()
            raise LostRound({**faults, fault.party: fault.reason}) from fault

    def _collect(self, ask: Ask, faults: dict[str, str]) -> Floats:
        if ask.dim not in self._servers:
            self._set_up(ask, faults)
        server, t = self._servers[ask.dim], ask.round
        here = {"run": ask.fields["run"], "round": t, "dim": ask.dim}
        prepare = dict.fromkeys(self._present(faults), encode(Message("prepare", here)))
        prepared = self._numbered(self._caller.call(prepare, faults))
        delivery = server.relay(t, frames_of(prepared))
        asks = {self._name(i): ask.message(blobs({"deliver": frame})) for i, frame in delivery.items()}
        masked = self._numbered(self._caller.call(asks, faults))
        questions = server.survivors(t, frames_of(masked))
        reveals = {
            self._name(i): encode(Message("reveal", here, blobs({"frame": frame})))
            for i, frame in questions.items()
        }
        revealed = self._numbered(self._caller.call(reveals, faults))
        total = server.finish(t, frames_of(revealed))
        return total * self._plan.scale(ask.multiplier, ask.bound * self._plan.largest_factor, ask.dim)

    def _set_up(self, ask: Ask, faults: dict[str, str]) -> None:
        epoch = os.urandom(16)
        server = MaskingServer(self._identity, self._roster, self._plan.terms(ask.dim), epoch)
        here = {"run": ask.fields["run"], "dim": ask.dim, "epoch": epoch.hex()}
        hellos = self._caller.call(dict.fromkeys(self._plan.names, encode(Message("hello", here))), faults)
        frames = [server.hello, *(frame_of(reply) for reply in hellos.values())]
        server.meet(frames)
        meet = encode(Message("meet", here, blobs({f"{i:04}": frame for i, frame in enumerate(frames)})))
        self._caller.call(dict.fromkeys(hellos, meet), faults)
        self._servers[ask.dim] = server

    def _present(self, faults: Mapping[str, str]) -> list[str]:
        return [name for name in self._plan.names if name not in faults]

    def _name(self, i: int) -> str:
        return self._plan.names[i]

    def _numbered(self, replies: Mapping[str, Message]) -> dict[int, Message]:
        return {self._plan.index(name): reply for name, reply in replies.items()}


class SharedRounds:
    """Sums by shares to servers; the coordinator relays sealed frames and receives the noisy sum."""

    def __init__(self, plan: FederatedPlan, caller: Caller) -> None:
        self._plan, self._caller = plan, caller
        self._ready: set[int] = set()
        m = len(plan.names)
        self._number = {name: m + k for k, name in enumerate(plan.servers)}

    def reset(self) -> None:
        """Begin with new keys: someone restarted."""
        self._ready.clear()

    def collect(self, ask: Ask, faults: dict[str, str]) -> Floats:
        """Sample the noise (mpc), ask for shares, let the servers add up."""
        try:
            return self._collect(ask, faults)
        except (ProtocolError, WireError) as fault:
            self._ready.clear()
            named = {fault.party: fault.reason} if isinstance(fault, ProtocolError) else {}
            raise LostRound(faults or named) from fault

    def _collect(self, ask: Ask, faults: dict[str, str]) -> Floats:
        if ask.dim not in self._ready:
            self._set_up(ask, faults)
        here = {"run": ask.fields["run"], "round": ask.round, "dim": ask.dim}
        if self._plan.secure == "mpc" and self._plan.is_private:
            self._sample(here, faults)
        parties = [name for name in self._plan.names if name not in faults]
        shares = self._caller.call(dict.fromkeys(parties, ask.message()), faults)
        received = self._servers("receive", here, faults, lambda server: self._shares_for(server, shares))
        present = self._servers("partial", here, faults, lambda server: self._crossed(server, received))
        partials = {self._number[name]: frame_of(r) for name, r in present.items() if "frame" in r.arrays}
        first = self._plan.servers[0]
        finish = encode(Message("finish", here, blobs(partials)))
        replies = self._caller.call({first: finish}, faults)
        if first not in replies:
            raise LostRound(faults)
        total = total_of(replies[first], ask.dim)
        return total * self._plan.scale(ask.multiplier, ask.bound * self._plan.largest_factor, ask.dim)

    def _set_up(self, ask: Ask, faults: dict[str, str]) -> None:
        here = {"run": ask.fields["run"], "dim": ask.dim, "epoch": os.urandom(16).hex()}
        everyone = [*self._plan.names, *self._plan.servers]
        hellos = self._caller.call(dict.fromkeys(everyone, encode(Message("hello", here))), faults)
        frames = {f"{i:04}": frame_of(reply) for i, reply in enumerate(hellos.values())}
        self._caller.call(dict.fromkeys(hellos, encode(Message("meet", here, blobs(frames)))), faults)
        self._ready.add(ask.dim)

    def _sample(self, here: Mapping[str, Any], faults: dict[str, str]) -> None:
        """Relay the servers' frames around the ring until the noise is shared among them."""
        servers = self._plan.servers
        inbound: dict[str, dict[str, Array]] = {name: {} for name in servers}
        while True:
            replies = self._servers("noise", here, faults, lambda server: inbound[server])  # noqa: B023
            frames = [replies[name].arrays for name in servers]
            if not any(frames):
                return
            # Server i's frame goes to i − 1.
            inbound = {name: dict(frames[(k + 1) % 3]) for k, name in enumerate(servers)}

    def _servers(
        self,
        kind: str,
        here: Mapping[str, Any],
        faults: dict[str, str],
        frames: Callable[[str], Mapping[str, Array]],
    ) -> dict[str, Message]:
        messages = {name: encode(Message(kind, here, frames(name))) for name in self._plan.servers}
        replies = self._caller.call(messages, faults)
        if len(replies) < len(messages):
            raise LostRound({name: why for name, why in faults.items() if name in messages} or faults)
        return replies

    def _shares_for(self, server: str, shares: Mapping[str, Message]) -> dict[str, Array]:
        number = str(self._number[server])
        return {
            str(self._plan.index(name)): reply.arrays[number]
            for name, reply in shares.items()
            if number in reply.arrays
        }

    def _crossed(self, server: str, received: Mapping[str, Message]) -> dict[str, Array]:
        number = str(self._number[server])
        return {str(self._number[name]): r.arrays[number] for name, r in received.items() if name != server}


def rounds(
    plan: FederatedPlan, caller: Caller, identity: Identity | None, roster: Roster | None
) -> PlainRounds | MaskedRounds | SharedRounds:
    """The rounds that the plan's trust asks for."""
    if plan.trust != "secure":
        return PlainRounds(plan, caller)
    if plan.secure != "masks":
        return SharedRounds(plan, caller)
    if identity is None or roster is None:
        raise ValueError("secure='masks': the coordinator needs its identity and the roster.")
    return MaskedRounds(plan, caller, identity, roster)


def largest_reply(plan: FederatedPlan) -> int:
    """The most bytes of any reply."""
    return limit(max([1, *plan.dims.values()]), 8 + 64 * len(plan.names))


def _require(present: int, quorum: int, faults: Mapping[str, str]) -> None:
    if present < quorum:
        raise LostRound(faults)


def named(faults: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """Faults as one line."""
    return "; ".join(f"{name} {reason}" for name, reason in dict(faults).items())
