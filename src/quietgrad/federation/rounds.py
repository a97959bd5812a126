"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Sums are added up in the open (exact ones for a trusted curator, noisy ones under local trust) or securely: by
masks, with the coordinator as the aggregator, or by shares to servers, whose frames the coordinator only relays. A
round that fails raises :class:`FailedRoundError`. Nothing of it may be used, and asking again is a new release.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.federation.exchange import Enough, Exchange
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.secure.discrete_gaussian import check_length
from quietgrad.federation.secure.identity import (
    HELLO_BYTES,
    DropoutError,
    Identity,
    ProtocolError,
    Roster,
    SumOutOfBoundsError,
)
from quietgrad.federation.secure.masking import MaskingServer
from quietgrad.federation.secure.servers import share_bytes
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

    @property
    def dim(self) -> int:
        return int(self.fields["dim"])

    @property
    def here(self) -> dict[str, Any]:
        return {name: self.fields[name] for name in ("run", "round", "dim")}

    def message(self) -> bytearray:
        return encode(Message("ask", self.fields, self.arrays))

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
        replies = self._exchange.call(dict.fromkeys(ask.invited, ask.message()), ask.faults, self._enough)
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
        said = {word: reply.fields.get(word) for word in ("run", "round")}
        if reply.kind != "sum" or said != {word: ask.fields[word] for word in said}:
            return f"reply is stale or a replay: round {said['round']!r} instead of {ask.fields['round']}"
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
        self, plan: FederatedPlan, exchange: Exchange, identity: Identity | None, roster: Roster | None
    ) -> None:
        self._plan, self._exchange, self._enough = plan, exchange, quorate(plan)
        if not plan.servers and (identity is None or roster is None):
            raise ValueError("secure='masks': the coordinator needs its identity and the roster.")
        self._identity, self._roster = identity, roster
        self._ready: dict[int, MaskingServer | None] = {}  # by length of vectors; servers hold their own state
        self._numbers = {name: len(plan.names) + k for k, name in enumerate(plan.servers)}

    def reset(self) -> None:
        """Begin with new keys: a member restarted."""
        self._ready.clear()

    def collect(self, ask: RoundRequest) -> Floats:
        """As :meth:`PlainRounds.collect`; the sum carries its noise already."""
        try:
            if ask.dim not in self._ready:
                self._ready[ask.dim] = self._set_up(ask)
            server = self._ready[ask.dim]
            total, present = self._shared(ask) if server is None else self._masked(server, ask)
            # In the query's own units, if the records of those in it can have such a sum.
            scale = self._plan.scale(ask.multiplier, ask.bound * self._plan.reach, ask.dim)
            most = longest(self._plan, present, ask.bound) / scale
            check_length(total, self._plan.terms(ask.dim).possible_length(most))
            return total * scale
        except (ProtocolError, WireError) as fault:
            # A failed round leaves roles in different states: begin again with new keys.
            server = self._ready.get(ask.dim)
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
        """The parties without whom a failed round is asked again, so that each costs one round at most.

        Those whose messages were ``seen`` to be malformed or false; else the party that most others accuse, since
        the round failed for want of its accusers.
        """
        parties = [name for name in self._plan.names if name in seen]
        accused = {name: by for name, by in accusations(faults).items() if name in self._plan.numbers}
        if parties or not accused:
            return parties
        return [max(accused, key=lambda name: len(accused[name]))]

    def _set_up(self, ask: RoundRequest) -> MaskingServer | None:
        """Introduce the members of a round to each other, with new keys."""
        epoch, servers, faults = os.urandom(16), self._plan.servers, ask.faults
        here = {**ask.here, "epoch": epoch.hex()}
        enough = quorate(self._plan, *servers)
        hello = dict.fromkeys((*ask.invited, *servers), encode(Message("hello", here)))
        hellos = self._frames(self._exchange.call(hello, faults, enough), ask)
        server = None
        if self._identity is None or self._roster is None or servers:
            short = [name for name, frame in hellos.items() if len(frame) != HELLO_BYTES]
            ask.leave_out(dict.fromkeys(short, "hello has a wrong length"))
            hellos = {name: frame for name, frame in hellos.items() if name not in short}
            of_servers = [hellos[name] for name in servers if name in hellos]  # all that a party needs
            meetings = {name: [*hellos.values()] if name in servers else of_servers for name in hellos}
        else:
            server = MaskingServer(self._identity, self._roster, self._plan.terms(ask.dim), epoch)
            for name, frame in hellos.items():
                try:
                    server.meet([frame])
                except ProtocolError as wrong:
                    ask.leave_out({name: str(wrong).removeprefix(f"{name}: ")})
            meetings = {server.roster.names[i]: frames for i, frames in server.introductions().items()}
        made: dict[int, bytearray] = {}  # one message for those who get the same
        for each in meetings.values():
            if id(each) not in made:
                made[id(each)] = encode(Message("meet", here, blobs({f"{k:04}": f for k, f in enumerate(each)})))
        met = self._exchange.call({name: made[id(each)] for name, each in meetings.items()}, faults, enough)
        said = dict(zip((f"{k:04}" for k in range(len(hellos))), hellos, strict=True))
        for name in servers:
            ask.leave_out(_left_out(met.get(name), name, said))
        return server

    def _masked(self, server: MaskingServer, ask: RoundRequest) -> tuple[Floats, tuple[str, ...]]:
        names, t = server.roster.names, ask.fields["round"]

        def call(messages: Mapping[str, bytearray]) -> dict[int, bytes]:
            replies = self._frames(self._exchange.call(messages, ask.faults, self._enough), ask)
            return {server.roster.index(name): frame for name, frame in replies.items()}

        def each(kind: str, frames: Mapping[int, bytes]) -> dict[str, bytearray]:
            return {names[i]: encode(Message(kind, ask.here, blobs({"frame": f}))) for i, f in frames.items()}

        prepare = encode(Message("prepare", ask.here))
        delivery = server.relay(t, call({name: prepare for name in ask.invited if name not in ask.faults}))
        # Envelopes are opened before a question leaves: whoever sealed false ones costs the others no release.
        ready = self._exchange.call(each("deliver", delivery), ask.faults, self._enough)
        if len(ready) < self._plan.quorum:
            raise FailedRoundError(ask.faults)
        ask.begin()
        questions = server.survivors(t, call(dict.fromkeys(ready, ask.message())))
        total = server.finish(t, call(each("reveal", questions)))
        ask.leave_out(server.left_out)
        ask.faults.update(server.proved)
        return total, tuple(names[i] for i in questions)

    def _shared(self, ask: RoundRequest) -> tuple[Floats, tuple[str, ...]]:
        """Sample the noise (mpc), ask for shares, let the servers add up."""
        if self._plan.secure == "mpc" and self._plan.is_private:
            self._sample(ask)
        parties = [name for name in ask.invited if name not in ask.faults]
        if len(parties) < self._plan.quorum:
            raise FailedRoundError(ask.faults)  # before any party is asked
        ask.begin()
        replies = self._exchange.call(dict.fromkeys(parties, ask.message()), ask.faults, self._enough)
        # A share of another length or type is not relayed: the server would refuse it with all others.
        lengths = share_bytes(self._plan.terms(ask.dim))
        shares = {name: found for name, r in replies.items() if (found := _shares(r, self._numbers, lengths))}
        ask.leave_out({name: "shares have a wrong length or type" for name in replies if name not in shares})
        if len(shares) < self._plan.quorum:
            raise FailedRoundError(ask.faults)  # the servers would refuse, and seem to be at fault
        numbers, places = self._numbers, self._plan.numbers
        received = self._relay("receive", ask, {
            server: {str(places[name]): found[k] for name, found in shares.items()} for server, k in numbers.items()
        })  # fmt: skip
        for server in numbers:
            ask.leave_out(_left_out(received[server], server, {name: name for name in shares}))
        partials = self._relay("partial", ask, {
            server: {str(numbers[name]): r.arrays[str(k)] for name, r in received.items() if str(k) in r.arrays}
            for server, k in numbers.items()
        })  # fmt: skip
        first = self._plan.servers[0]
        summands = {str(numbers[name]): r.arrays["frame"] for name, r in partials.items() if "frame" in r.arrays}
        total = self._relay("finish", ask, {first: summands})[first].arrays.get("total")
        if total is None or total.dtype != np.float64 or total.shape != (ask.dim,) or not np.isfinite(total).all():
            raise ProtocolError(first, "its total is not a finite vector of the agreed length")
        return total, tuple(name for name in shares if name not in ask.malformed)

    def _sample(self, ask: RoundRequest) -> None:
        """Relay the servers' frames around the ring until the noise is shared among them."""
        servers = self._plan.servers
        frames: list[Mapping[str, Array]] = [{}, {}, {}]
        while True:
            inbound = {name: frames[(k + 1) % 3] for k, name in enumerate(servers)}  # i's frame goes to i − 1
            replies = self._relay("noise", ask, inbound)
            frames = [replies[name].arrays for name in servers]
            going = [name for name in servers if replies[name].arrays]
            if not going:
                return
            if len(going) < len(servers):  # all need the same number of steps
                odd = going[0] if len(going) == 1 else next(name for name in servers if name not in going)
                raise ProtocolError(odd, "is out of step in sampling the noise")

    def _relay(self, kind: str, ask: RoundRequest, frames: Mapping[str, Mapping[str, Array]]) -> dict[str, Message]:
        messages = {name: encode(Message(kind, ask.here, each)) for name, each in frames.items()}
        replies = self._exchange.call(messages, ask.faults, lambda good: len(good) == len(messages))
        if len(replies) < len(messages):
            raise FailedRoundError(ask.faults)
        return replies

    @staticmethod
    def _frames(replies: Mapping[str, Message], ask: RoundRequest) -> dict[str, bytes]:
        """Return the one frame of each reply; who sends none is left out."""
        found = {}
        for name, reply in replies.items():
            try:
                found[name] = reply.blob("frame")
            except WireError as wrong:
                ask.leave_out({name: str(wrong)})
        return found


def _shares(reply: Message, numbers: Mapping[str, int], lengths: tuple[int, ...]) -> dict[int, Array] | None:
    """The share for each server by roster number; ``None`` if one is missing or not bytes of its length."""
    found = {k: reply.arrays.get(str(k)) for k in numbers.values()}
    shares = {k: share for k, share in found.items() if share is not None and share.dtype == np.uint8}
    given = tuple(share.size for share in shares.values())
    return shares if given == lengths else None


def _left_out(reply: Message | None, server: str, names: Mapping[str, str]) -> dict[str, str]:
    """Whom a server left out and why, in its words; ``names`` are the parties by what the server calls them."""
    said = None if reply is None else reply.fields.get("left_out")
    if not isinstance(said, dict):
        return {}
    return {names[each]: f"{str(why)[:200]} (so says {server})" for each, why in said.items() if each in names}


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
    known = accusations(faults)
    accusers = {name for reasons in known.values() for name in reasons}
    for name, why in faults.items():
        check, _, reason = why.removeprefix("refuses: ").partition(": ")
        if check == SumOutOfBoundsError.CHECK:  # found by the server that adds up, and not made by it
            out[check] = f"{reason} (so says {name})"
        elif name not in accusers:
            out[name] = why
    for accused, reasons in known.items():
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
    found: dict[str, dict[str, str]] = {}
    for name, why in faults.items():
        accused, colon, reason = why.removeprefix("refuses: ").partition(": ")
        others = accused not in (name, "coordinator", SumOutOfBoundsError.CHECK)
        if why.startswith("refuses: ") and colon and " " not in accused and others:
            found.setdefault(accused, {})[name] = reason
    return found


def named(faults: Mapping[str, str]) -> str:
    """Faults as one line; of many the first few.

    >>> named({str(i): "did not answer" for i in range(9)})
    '0 did not answer; 1 did not answer; 2 did not answer; 3 did not answer; 4 did not answer; and 4 more'
    """
    words = [f"{name} {reason}" for name, reason in faults.items()]
    more = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
    return "; ".join([*words[:_NAMED], *more])
