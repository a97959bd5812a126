"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Three ways to add up: plainly (to a trusted curator, or vectors that carry their own noise), by masks with the
coordinator as the aggregator, or by shares to servers that the coordinator only relays to. A round that cannot be
completed raises :class:`LostRound`; nothing of it may be used, and asking again is a new release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.transport import Transport
from quietgrad.federation.wire import Array, Bytes, Message, WireError, decode, encode, limit
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.secure.identity import Identity, Roster

Floats = npt.NDArray[np.float64]
_ROUNDING = 1.0 + 1e-6


class LostRound(DropoutError):
    """A round without enough good answers; the parties at fault are named, with reasons."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        self.faults = _at_fault(faults)
        super().__init__(list(self.faults), "; ".join(sorted(set(self.faults.values()))) or "lost")


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
            reason = str(reply.fields.get("reason", ""))[:500].removeprefix(f"{name}: ")
            if reply.fields.get("code") == "plan":
                raise ProtocolError(name, f"refuses: {reason}")
            if reply.fields.get("code") == "stranger":
                self.strangers.add(name)
                faults[name] = f"{reason}: it restarted or missed the beginning, and is let in again"
            else:
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
            spread = self._plan.schedule[ask.slot].mechanism.reach(ask.dim)
            noise = ask.multiplier * bound * spread * 2.0
        return (bound * records + noise) * _ROUNDING


class Rounds(Protocol):
    """A way to add up."""

    def collect(self, ask: Ask, faults: dict[str, str]) -> Floats:
        """The sum, of at least a quorum; those who were left out are named in ``faults``."""

    def reset(self) -> None:
        """Someone restarted: forget what was agreed with them."""


def rounds(plan: FederatedPlan, caller: Caller, identity: Identity | None, roster: Roster | None) -> Rounds:
    """The rounds that the plan's trust asks for."""
    if plan.trust != "secure":
        return PlainRounds(plan, caller)
    from quietgrad.federation.secure_rounds import MaskedRounds, SharedRounds

    if plan.secure != "masks":
        return SharedRounds(plan, caller)
    if identity is None or roster is None:
        raise ValueError("secure='masks': the coordinator needs its identity and the roster.")
    return MaskedRounds(plan, caller, identity, roster)


def largest_reply(plan: FederatedPlan) -> int:
    """The most bytes of any reply."""
    return limit(max([1, *plan.dims.values()]), 8 + 64 * len(plan.names))


def _at_fault(faults: Mapping[str, str]) -> dict[str, str]:
    """Without those who refused only because of somebody else who is named too.

    >>> _at_fault({"a": "did not answer within 9 s", "b": "refuses: a: has not said hello in this run"})
    {'a': 'did not answer within 9 s'}
    """
    others = tuple(f"refuses: {name}: " for name in faults)
    return {name: why for name, why in faults.items() if not why.startswith(others)} or dict(faults)


def _require(present: int, quorum: int, faults: Mapping[str, str]) -> None:
    if present < quorum:
        raise LostRound(faults)


def named(faults: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """Faults as one line."""
    return "; ".join(f"{name} {reason}" for name, reason in dict(faults).items())
