"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Sums are added up in the open (exact ones for a trusted curator, noisy ones under local trust) or securely: by
masks, with the coordinator as the aggregator, or by shares to servers, whose frames the coordinator only relays. A
round that fails raises :class:`FailedRoundError`. Nothing of it may be used, and asking again is a new release.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.federation.exchange import Enough, Exchange
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.secure.discrete_gaussian import check_length
from quietgrad.federation.secure.identity import DropoutError, Identity, ProtocolError, Roster, SumOutOfBoundsError
from quietgrad.federation.secure.masking import MaskingServer
from quietgrad.federation.wire import Array, Message, WireError, blobs, encode, limit

Floats = npt.NDArray[np.float64]
_ROUNDING = 1.0 + 1e-6
_NAMED = 5


class FailedRoundError(DropoutError):
    """A round without enough good answers; names what happened, and marks mere accusations as such.

    An accusation by more than ``colluders``, who may work together, is proved.
    """

    def __init__(self, faults: Mapping[str, str], colluders: float = math.inf) -> None:
        self.faults = proved_faults(faults, colluders)
        super().__init__(list(self.faults), "; ".join(sorted(set(self.faults.values()))) or "lost")


@dataclass(frozen=True)
class RoundRequest:
    """One round: the parties who are present, its public query and its noise.

    ``faults`` takes by name what goes wrong. ``begin`` charges the round when its question leaves.
    """

    invited: tuple[str, ...]
    slot: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, Array]
    bound: float
    multiplier: float
    faults: dict[str, str]
    begin: Callable[[], None]

    @property
    def dim(self) -> int:
        return int(self.fields["dim"])

    @property
    def here(self) -> dict[str, Any]:
        return {name: self.fields[name] for name in ("run", "round", "dim")}

    def message(self, extra: Mapping[str, Array] | None = None) -> bytearray:
        return encode(Message("ask", self.fields, {**self.arrays, **(extra or {})}))


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
            raise FailedRoundError({**named, **ask.faults, **proved}, colluders) from fault

    def _set_up(self, ask: RoundRequest) -> MaskingServer | None:
        """Introduce the members of a round to each other, with new keys."""
        epoch, servers, faults = os.urandom(16), self._plan.servers, ask.faults
        here = {**ask.here, "epoch": epoch.hex()}
        enough = quorate(self._plan, *servers)
        hello = dict.fromkeys((*ask.invited, *servers), encode(Message("hello", here)))
        hellos = _frames(self._exchange.call(hello, faults, enough), faults)
        server = None
        if self._identity is None or self._roster is None or servers:
            of_servers = [hellos[name] for name in servers if name in hellos]  # all that a party needs
            meetings = {name: [*hellos.values()] if name in servers else of_servers for name in hellos}
        else:
            server = MaskingServer(self._identity, self._roster, self._plan.terms(ask.dim), epoch)
            for name, frame in hellos.items():
                try:
                    server.meet([frame])
                except ProtocolError as wrong:
                    faults[name] = str(wrong).removeprefix(f"{name}: ")
            meetings = {server.roster.names[i]: frames for i, frames in server.introductions().items()}
        made: dict[int, bytearray] = {}  # one message for those who get the same
        for each in meetings.values():
            if id(each) not in made:
                made[id(each)] = encode(Message("meet", here, blobs({f"{k:04}": f for k, f in enumerate(each)})))
        self._exchange.call({name: made[id(each)] for name, each in meetings.items()}, faults, enough)
        return server

    def _masked(self, server: MaskingServer, ask: RoundRequest) -> tuple[Floats, tuple[str, ...]]:
        names, t = server.roster.names, ask.fields["round"]

        def call(messages: Mapping[str, bytearray]) -> dict[int, bytes]:
            replies = _frames(self._exchange.call(messages, ask.faults, self._enough), ask.faults)
            return {server.roster.index(name): frame for name, frame in replies.items()}

        prepare = encode(Message("prepare", ask.here))
        delivery = server.relay(t, call({name: prepare for name in ask.invited if name not in ask.faults}))
        asks = {names[i]: ask.message(blobs({"deliver": frame})) for i, frame in delivery.items()}
        ask.begin()
        masked = call(asks)
        questions = server.survivors(t, masked)
        opening = {names[i]: encode(Message("reveal", ask.here, blobs({"frame": f}))) for i, f in questions.items()}
        total = server.finish(t, call(opening))
        ask.faults.update(server.proved)
        return total, tuple(names[i] for i in masked)

    def _shared(self, ask: RoundRequest) -> tuple[Floats, tuple[str, ...]]:
        """Sample the noise (mpc), ask for shares, let the servers add up."""
        if self._plan.secure == "mpc" and self._plan.is_private:
            self._sample(ask)
        parties = [name for name in ask.invited if name not in ask.faults]
        if len(parties) < self._plan.quorum:
            raise FailedRoundError(ask.faults)  # before any party is asked
        ask.begin()
        shares = self._exchange.call(dict.fromkeys(parties, ask.message()), ask.faults, self._enough)
        if len(shares) < self._plan.quorum:
            raise FailedRoundError(ask.faults)  # the servers would refuse, and seem to be at fault
        numbers, places = self._numbers, self._plan.numbers
        received = self._relay("receive", ask, {
            server: {str(places[name]): r.arrays[str(k)] for name, r in shares.items() if str(k) in r.arrays}
            for server, k in numbers.items()
        })  # fmt: skip
        partials = self._relay("partial", ask, {
            server: {str(numbers[name]): r.arrays[str(k)] for name, r in received.items() if str(k) in r.arrays}
            for server, k in numbers.items()
        })  # fmt: skip
        first = self._plan.servers[0]
        summands = {str(numbers[name]): r.arrays["frame"] for name, r in partials.items() if "frame" in r.arrays}
        total = self._relay("finish", ask, {first: summands})[first].arrays.get("total")
        if total is None or total.dtype != np.float64 or total.shape != (ask.dim,) or not np.isfinite(total).all():
            raise ProtocolError(first, "its total is not a finite vector of the agreed length")
        return total, tuple(shares)

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


def _frames(replies: Mapping[str, Message], faults: dict[str, str]) -> dict[str, bytes]:
    """Return the one frame of each reply; a reply without one is a fault."""
    found = {}
    for name, reply in replies.items():
        try:
            found[name] = reply.blob("frame")
        except WireError as wrong:
            faults[name] = str(wrong)
    return found


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
    accusers: dict[str, list[str]] = {}
    out: dict[str, str] = {}
    said: dict[str, str] = {}
    for name, why in faults.items():
        accused, colon, reason = why.removeprefix("refuses: ").partition(": ")
        if accused == SumOutOfBoundsError.CHECK:  # found by the server that adds up, and not made by it
            out[accused] = said[name] = f"{reason} (so says {name})"
        elif why.startswith("refuses: ") and colon and " " not in accused and accused not in (name, "coordinator"):
            accusers.setdefault(accused, []).append(name)
            said[name] = reason
    out |= {name: why for name, why in faults.items() if name not in said}
    for accused, names in accusers.items():
        if len(names) > colluders:
            out[accused] = f"{said[names[0]]} (so say {', '.join(names)})"
        else:
            out.update({name: f"or {accused}: {said[name]}" for name in names})
    return out


def named(faults: Mapping[str, str]) -> str:
    """Faults as one line; of many the first few.

    >>> named({str(i): "did not answer" for i in range(9)})
    '0 did not answer; 1 did not answer; 2 did not answer; 3 did not answer; 4 did not answer; and 4 more'
    """
    words = [f"{name} {reason}" for name, reason in faults.items()]
    more = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
    return "; ".join([*words[:_NAMED], *more])
