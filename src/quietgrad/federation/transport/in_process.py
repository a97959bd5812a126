"""All parties in this process: the default, and the place where faults can be rehearsed.

Handlers are called one after another, in the caller's thread. Time is simulated: a party that a fault delays beyond
the timeout is reported missing at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quietgrad.federation.transport import Bytes, Handler

FaultKind = Literal["lose-request", "lose-reply", "delay", "duplicate", "corrupt", "stale", "crash", "leave"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with one party's messages.

    Args:
        party: whom it happens to.
        kind: ``lose-request`` (never arrives), ``lose-reply`` (handled, answer lost), ``delay`` (``seconds`` late),
            ``duplicate`` (the request arrives twice), ``corrupt`` (a bit of the reply flips), ``stale`` (the reply
            to an earlier message comes instead), ``crash`` (gone for good until :meth:`InProcess.replace`),
            ``leave`` (absent as long as the fault lasts).
        first, last: the messages to this party that it lasts for, counted from 0; ``last`` defaults to ``first``.
        seconds: of a delay.
    """

    party: str
    kind: FaultKind
    first: int
    last: int | None = None
    seconds: float = 0.0

    def now(self, number: int) -> bool:
        """Whether the fault is active for a message."""
        return self.first <= number <= (self.first if self.last is None else self.last)


class InProcess:
    """A transport of function calls.

    >>> transport = InProcess({"a": lambda message: message[::-1], "b": lambda message: message},
    ...                       faults=[Fault("b", "lose-reply", first=0)])
    >>> transport.exchange({"a": b"123", "b": b"123"}, timeout=1.0)
    ({'a': b'321'}, ['b'])
    """

    def __init__(self, handlers: Mapping[str, Handler], faults: Sequence[Fault] = ()) -> None:
        self._handlers = dict(handlers)
        self._faults = tuple(faults)
        self._crashed: set[str] = set()
        self._earlier: dict[str, Bytes] = {}
        self._sent: dict[str, int] = dict.fromkeys(handlers, 0)

    def parties(self) -> tuple[str, ...]:
        """Everybody's names."""
        return tuple(self._handlers)

    def replace(self, name: str, handler: Handler) -> None:
        """Put a new party in the place of one that crashed."""
        self._handlers[name] = handler
        self._crashed.discard(name)

    def exchange(self, messages: Mapping[str, Bytes], timeout: float) -> tuple[dict[str, Bytes], list[str]]:
        """Call each handler; see :class:`~quietgrad.federation.transport.Transport`."""
        replies: dict[str, Bytes] = {}
        for name, message in messages.items():
            number = self._sent[name]
            self._sent[name] += 1
            faults = [f for f in self._faults if f.party == name and f.now(number)] if self._faults else []
            reply = (
                self._call(name, message, faults, timeout)
                if faults or self._crashed
                else self._plain(name, message)
            )
            if reply is not None:
                replies[name] = reply
        return replies, [name for name in messages if name not in replies]

    def close(self) -> None:
        """Nothing is open."""

    def _plain(self, name: str, message: Bytes) -> Bytes:
        reply = self._handlers[name](message)
        if self._faults:
            self._earlier[name] = bytes(reply)
        return reply

    def _call(self, name: str, message: Bytes, faults: Sequence[Fault], timeout: float) -> Bytes | None:
        kinds = {fault.kind for fault in faults}
        if "crash" in kinds:
            self._crashed.add(name)
        if name in self._crashed or kinds & {"lose-request", "leave"}:
            return None
        earlier = self._earlier.get(name)
        reply = self._plain(name, message)
        if "duplicate" in kinds:
            reply = self._plain(name, message)
        if "lose-reply" in kinds or any(f.kind == "delay" and f.seconds >= timeout for f in faults):
            return None
        if "stale" in kinds and earlier is not None:
            return earlier
        if "corrupt" in kinds:
            damaged = bytearray(reply)
            damaged[-1] ^= 0x40
            return damaged
        return reply
