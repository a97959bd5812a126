"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Three ways to add up: plainly (to a trusted curator, or vectors that carry their own noise), by masks with the
coordinator as the aggregator, or by shares to servers that the coordinator only relays to. A round that cannot be
completed raises :class:`LostRound`; nothing of it may be used, and asking again is a new release.

Rounds whose sums are secure: by masks with the coordinator as the aggregator, or by shares to servers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.federation.exchange import Enough, Exchange
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.secure_roles import frame_of, frames_of, invitation, roster_of, total_of
from quietgrad.federation.wire import Array, Message, WireError, blobs, encode, limit
from quietgrad.secure.discrete_gaussian import check_length
from quietgrad.secure.identity import DropoutError, Identity, ImpossibleSum, ProtocolError, Roster
from quietgrad.secure.masking import MaskingServer

Floats = npt.NDArray[np.float64]
_ROUNDING = 1.0 + 1e-6
_NAMED = 5
Begin = Callable[[], None]


class LostRound(DropoutError):
    """A round without enough good answers, by name what happened; who only accuses another is named as such.

    Args:
        faults: by name, what went wrong.
        colluders: how many may work together; an accusation by more than that many is proved.
    """

    def __init__(self, faults: Mapping[str, str], colluders: float = math.inf) -> None:
        self.faults = blame(faults, colluders)
        super().__init__(list(self.faults), "; ".join(sorted(set(self.faults.values()))) or "lost")


@dataclass(frozen=True)
class Ask:
    """One asking: its number, whose round it is, who of them is there and asked, its public query and its noise."""

    cohort: tuple[str, ...]
    invited: tuple[str, ...]
    round: int
    slot: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, Array]
    dim: int
    bound: float
    multiplier: float

    def message(self, extra: Mapping[str, Array] | None = None) -> bytearray:
        """The message to a party."""
        return encode(Message("ask", self.fields, {**self.arrays, **(extra or {})}))


class Collected(NamedTuple):
    """A sum, and whose vectors are in it."""

    total: Floats
    present: tuple[str, ...]


class PlainRounds:
    """Sums in the open: exact ones to a trusted curator, or noisy ones from parties who trust nobody."""

    def __init__(self, plan: FederatedPlan, exchange: Exchange) -> None:
        self._plan, self._exchange = plan, exchange

    def reset(self) -> None:
        """Nothing to forget."""

    def collect(self, ask: Ask, faults: dict[str, str], begin: Begin) -> Collected:
        """The sum of the good answers of at least a quorum."""
        if self._plan.cohort:  # its members were perhaps never asked before: look first, for that costs nothing
            enough, patience = quorate(self._plan), self._exchange.timeout
            if not enough(self._exchange.greet(ask.invited, faults, enough, patience=patience)):
                raise LostRound(faults)
        begin()
        asked = dict.fromkeys(ask.invited, ask.message())
        replies = self._exchange.call(asked, faults, quorate(self._plan))
        total = np.zeros(ask.dim)
        present = []
        for name, reply in replies.items():
            reason = self._fault(name, reply, ask)
            if reason is None:
                total += reply.arrays["total"]
                present.append(name)
            else:
                faults[name] = reason
        if len(present) < self._plan.quorum:
            raise LostRound(faults)
        return Collected(total, tuple(present))

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
        bound = ask.bound * self._plan.factors[self._plan.index(name)]
        if math.isinf(bound):
            return math.inf
        noise = 0.0
        if self._plan.trust == "local" and ask.multiplier > 0.0:
            spread = self._plan.schedule[ask.slot].mechanism.reach(ask.dim)
            noise = ask.multiplier * bound * spread * 2.0
        return (longest(self._plan, (name,), ask.bound) + noise) * _ROUNDING


class Rounds(Protocol):
    """A way to add up."""

    def collect(self, ask: Ask, faults: dict[str, str], begin: Begin) -> Collected:
        """The sum, of at least a quorum; those who were left out are named in ``faults``.

        ``begin`` is called when all is ready and the question leaves: only from then on the round costs anything.
        """

    def reset(self) -> None:
        """Someone restarted: forget what was agreed with them."""


def quorate(plan: FederatedPlan, *others: str) -> Enough:
    """Whether those of a round who answered are a quorum, and all of ``others`` among them."""

    def enough(good: Collection[str]) -> bool:
        return len(good) - len(others) >= plan.quorum and all(name in good for name in others)

    return enough


def rounds(plan: FederatedPlan, exchange: Exchange, identity: Identity | None, roster: Roster | None) -> Rounds:
    """The rounds that the plan's trust asks for."""
    if plan.trust != "secure":
        return PlainRounds(plan, exchange)

    if plan.secure != "masks":
        return SharedRounds(plan, exchange)
    if identity is None or roster is None:
        raise ValueError("secure='masks': the coordinator needs its identity and the roster.")
    return MaskedRounds(plan, exchange, identity, roster)


def largest_reply(plan: FederatedPlan) -> int:
    """The most bytes of any reply."""
    return limit(max([1, *plan.dims.values()]), 8 + 64 * len(plan.names))


def longest(plan: FederatedPlan, names: Iterable[str], bound: float) -> float:
    """The most that the records of these parties can add up to, if each contributes at most ``bound``."""
    places = [plan.index(name) for name in names]
    # Under add-remove the true number of records is not public; honest sizes stay within twice the declared.
    return bound * math.fsum(plan.factors[j] * (2 * plan.sizes[j] + 64) for j in places)


def blame(faults: Mapping[str, str], colluders: float = math.inf) -> dict[str, str]:
    """Faults with nobody hidden behind another: an accusation is not a proof, and an absence is no excuse.

    Whoever refuses because of somebody else is either right or lies; both are named. If more parties accuse one
    than may work together, one of them is honest, and the accused alone is at fault.

    >>> blame({"a": "did not answer within 9 s", "b": "refuses: a: dealt shares that are not those committed to"})
    {'a': 'did not answer within 9 s', 'b': 'or a: dealt shares that are not those committed to'}
    >>> blame({"a": "refuses: c: dealt a false share", "b": "refuses: c: dealt a false share"}, colluders=1)
    {'c': 'dealt a false share (so say a, b)'}
    """
    accusers: dict[str, list[str]] = {}
    out: dict[str, str] = {}
    said: dict[str, str] = {}
    for name, why in faults.items():
        accused, colon, reason = why.removeprefix("refuses: ").partition(": ")
        if accused == ImpossibleSum.CHECK:  # found by whoever adds up; that is not who made it so
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


def named(faults: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """Faults as one line; of many the first few.

    >>> named({str(i): "did not answer" for i in range(9)})
    '0 did not answer; 1 did not answer; 2 did not answer; 3 did not answer; 4 did not answer; and 4 more'
    """
    words = [f"{name} {reason}" for name, reason in dict(faults).items()]
    more = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
    return "; ".join([*words[:_NAMED], *more])


class MaskedRounds:
    """Sums by masks: the coordinator is the aggregator and sees the noisy sum only."""

    def __init__(self, plan: FederatedPlan, exchange: Exchange, identity: Identity, roster: Roster) -> None:
        self._plan, self._exchange, self._identity, self._roster = plan, exchange, identity, roster
        self._servers: dict[int, MaskingServer] = {}
        self._enough = quorate(plan)

    def reset(self) -> None:
        """Begin with new keys: someone restarted."""
        self._servers.clear()

    def collect(self, ask: Ask, faults: dict[str, str], begin: Begin) -> Collected:
        """Prepare, ask, reveal, add up."""
        try:
            return self._collect(ask, faults, begin)
        except ProtocolError as fault:
            # A lost round leaves roles in different states: begin again with new keys.
            proved = self._servers.pop(ask.dim).proved if ask.dim in self._servers else {}
            self._servers.clear()
            at_fault = fault.missing if isinstance(fault, DropoutError) else [] if proved else [fault.party]
            named = {**dict.fromkeys(at_fault, fault.reason), **faults, **proved}
            raise LostRound(named, self._plan.colluders) from fault

    def _collect(self, ask: Ask, faults: dict[str, str], begin: Begin) -> Collected:
        known = None if self._plan.cohort else self._servers.get(ask.dim)
        server, t = known or self._set_up(ask, faults), ask.round
        here = {"run": ask.fields["run"], "round": t, "dim": ask.dim}
        names = server.roster.names
        prepare = {name: encode(Message("prepare", here)) for name in ask.invited if name not in faults}
        prepared = self._numbered(server, self._exchange.call(prepare, faults, self._enough))
        delivery = server.relay(t, frames_of(prepared))
        asks = {names[i]: ask.message(blobs({"deliver": frame})) for i, frame in delivery.items()}
        begin()
        masked = self._numbered(server, self._exchange.call(asks, faults, self._enough))
        questions = server.survivors(t, frames_of(masked))
        reveals = {
            names[i]: encode(Message("reveal", here, blobs({"frame": frame}))) for i, frame in questions.items()
        }
        revealed = self._numbered(server, self._exchange.call(reveals, faults, self._enough))
        total = server.finish(t, frames_of(revealed))
        faults.update(server.proved)
        return _checked(self._plan, ask, total, tuple(names[i] for i in masked))

    def _set_up(self, ask: Ask, faults: dict[str, str]) -> MaskingServer:
        epoch, roster = os.urandom(16), roster_of(self._plan, self._roster, ask.cohort)
        server = MaskingServer(self._identity, roster, self._plan.terms(ask.dim), epoch)
        self._servers[ask.dim] = server
        here = {
            "run": ask.fields["run"],
            "dim": ask.dim,
            "epoch": epoch.hex(),
            **invitation(self._plan, ask.cohort),
        }
        hello = encode(Message("hello", here))
        # A cohort that is not there is drawn again; everybody is waited for.
        patience = self._exchange.timeout if self._plan.cohort else None
        hellos = self._exchange.call(dict.fromkeys(ask.invited, hello), faults, self._enough, patience=patience)
        for name, reply in hellos.items():
            try:
                server.meet([frame_of(reply)])
            except (ProtocolError, WireError) as wrong:
                faults[name] = str(wrong).removeprefix(f"{name}: ")
        meets = {
            roster.names[i]: encode(Message("meet", here, blobs({f"{k:04}": f for k, f in enumerate(frames)})))
            for i, frames in server.introductions().items()
        }
        self._exchange.call(meets, faults, self._enough)
        return server

    @staticmethod
    def _numbered(server: MaskingServer, replies: Mapping[str, Message]) -> dict[int, Message]:
        return {server.roster.index(name): reply for name, reply in replies.items()}


class SharedRounds:
    """Sums by shares to servers; the coordinator relays sealed frames and receives the noisy sum."""

    def __init__(self, plan: FederatedPlan, exchange: Exchange) -> None:
        self._plan, self._exchange = plan, exchange
        self._ready: set[int] = set()
        m = plan.invited
        self._number = {name: m + k for k, name in enumerate(plan.servers)}

    def reset(self) -> None:
        """Begin with new keys: someone restarted."""
        self._ready.clear()

    def collect(self, ask: Ask, faults: dict[str, str], begin: Begin) -> Collected:
        """Sample the noise (mpc), ask for shares, let the servers add up."""
        try:
            return self._collect(ask, faults, begin)
        except LostRound as lost:
            self._ready.clear()
            raise LostRound({**lost.faults, **faults}) from lost
        except (ProtocolError, WireError) as fault:
            self._ready.clear()
            named = {fault.party: fault.reason} if isinstance(fault, ProtocolError) else {}
            raise LostRound({**named, **faults}) from fault

    def _collect(self, ask: Ask, faults: dict[str, str], begin: Begin) -> Collected:
        if ask.dim not in self._ready or self._plan.cohort:
            self._set_up(ask, faults)
        here = {"run": ask.fields["run"], "round": ask.round, "dim": ask.dim}
        if self._plan.secure == "mpc" and self._plan.is_private:
            self._sample(here, faults)
        parties = [name for name in ask.invited if name not in faults]
        if len(parties) < self._plan.quorum:
            raise LostRound(faults)  # before anybody is asked
        begin()
        shares = self._exchange.call(dict.fromkeys(parties, ask.message()), faults, quorate(self._plan))
        if len(shares) < self._plan.quorum:
            raise LostRound(faults)  # the servers would refuse, and seem to be at fault
        received = self._servers("receive", here, faults, lambda server: self._shares_for(server, shares, ask))
        present = self._servers("partial", here, faults, lambda server: self._crossed(server, received))
        partials = {self._number[name]: frame_of(r) for name, r in present.items() if "frame" in r.arrays}
        first = self._plan.servers[0]
        finish = encode(Message("finish", here, blobs(partials)))
        replies = self._exchange.call({first: finish}, faults, lambda good: first in good)
        if first not in replies:
            raise LostRound(faults)
        return _checked(self._plan, ask, total_of(replies[first], ask.dim), tuple(shares))

    def _set_up(self, ask: Ask, faults: dict[str, str]) -> None:
        here = {"run": ask.fields["run"], "dim": ask.dim, "epoch": os.urandom(16).hex()}
        here |= invitation(self._plan, ask.cohort)
        everyone = [*ask.invited, *self._plan.servers]
        enough = quorate(self._plan, *self._plan.servers)
        patience = self._exchange.timeout if self._plan.cohort else None
        hello = dict.fromkeys(everyone, encode(Message("hello", here)))
        hellos = self._exchange.call(hello, faults, enough, patience=patience)
        frames = {name: frame_of(reply) for name, reply in hellos.items()}
        # A party needs the servers' hellos only, a server everybody's.
        of_servers = {f"{i:04}": frames[name] for i, name in enumerate(self._plan.servers) if name in frames}
        of_all = {f"{i:04}": frame for i, frame in enumerate(frames.values())}
        to_party, to_server = (encode(Message("meet", here, blobs(each))) for each in (of_servers, of_all))
        servers = set(self._plan.servers)
        meets = {name: to_server if name in servers else to_party for name in hellos}
        self._exchange.call(meets, faults, enough)
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
        replies = self._exchange.call(messages, faults, lambda good: len(good) == len(messages))
        if len(replies) < len(messages):
            raise LostRound({name: why for name, why in faults.items() if name in messages} or faults)
        return replies

    def _shares_for(self, server: str, shares: Mapping[str, Message], ask: Ask) -> dict[str, Array]:
        number, places = str(self._number[server]), {name: str(i) for i, name in enumerate(ask.cohort)}
        return {places[name]: reply.arrays[number] for name, reply in shares.items() if number in reply.arrays}

    def _crossed(self, server: str, received: Mapping[str, Message]) -> dict[str, Array]:
        number = str(self._number[server])
        return {str(self._number[name]): r.arrays[number] for name, r in received.items() if name != server}


def _checked(plan: FederatedPlan, ask: Ask, total: Floats, present: tuple[str, ...]) -> Collected:
    """The sum in the query's own units, if the records of those in it can have such a sum."""
    scale = plan.scale(ask.multiplier, ask.bound * plan.reach, ask.dim)
    check_length(total, plan.terms(ask.dim).possible_length(longest(plan, present, ask.bound) / scale))
    return Collected(total * scale, present)
