"""One round of a federation from the coordinator's side: ask, gather, refuse what is wrong by name, add up.

Three ways to add up: plainly (to a trusted curator, or vectors that carry their own noise), by masks with the
coordinator as the aggregator, or by shares to servers that the coordinator only relays to. A round that cannot be
completed raises :class:`LostRound`; nothing of it may be used, and asking again is a new release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.federation.exchange import Enough, Exchange
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.wire import Array, Message, encode, limit
from quietgrad.secure.faults import DropoutError, ImpossibleSum
from quietgrad.secure.identity import Identity, Roster

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
    from quietgrad.federation.secure_rounds import MaskedRounds, SharedRounds

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
