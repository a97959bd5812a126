"""Rounds whose sums are secure: by masks with the coordinator as the aggregator, or by shares to servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.federation.members import frame_of, frames_of, total_of
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.rounds import Ask, Caller, LostRound
from quietgrad.federation.wire import Array, Message, WireError, blobs, encode
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.secure.identity import Identity, Roster
from quietgrad.secure.masking_server import MaskingServer

Floats = npt.NDArray[np.float64]


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
