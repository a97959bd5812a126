"""Faults of a transport: what goes wrong with the frames to one member, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quietgrad.federation.simulation import Federation, InProcess
from quietgrad.federation.transport import Away, Bytes, Handler

FaultKind = Literal[
    "lose-request", "lose-reply", "delay", "duplicate", "corrupt", "stale", "crash", "leave", "outage", "restart",
    "restart-after",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with one party's frames.

    Args:
        party: whom it happens to.
        kind: ``lose-request`` (never arrives), ``lose-reply`` (handled, answer lost), ``delay`` (``seconds`` late),
            ``duplicate`` (the frame arrives twice), ``corrupt`` (a bit of the reply flips), ``stale`` (the reply
            to an earlier frame comes instead), ``crash`` (gone for good until :meth:`Faulty.replace`),
            ``leave`` (absent as long as the fault lasts), ``outage`` (cannot be reached for ``seconds``, alive),
            ``restart`` (killed when the frame arrives, and back with its folder after ``seconds``),
            ``restart-after`` (killed once it has answered, before the answer has left).
        first, last: the frames to this party that it lasts for, counted from 0; ``last`` defaults to ``first``.
        seconds: of a delay, an outage or a restart.
    """

    party: str
    kind: FaultKind
    first: int
    last: int | None = None
    seconds: float = 0.0

    def now(self, number: int) -> bool:
        """Whether the fault is active for a frame."""
        return self.first <= number <= (self.first if self.last is None else self.last)


def faulty(faults: Sequence[Fault]) -> Callable[[Federation], InProcess]:
    """The transport of a simulated federation in which ``faults`` happen."""
    return lambda federation: Faulty(federation.handlers, faults, federation.again)


class Faulty(InProcess):
    """A transport of function calls in which ``faults`` happen.

    Args:
        handlers: by name, what answers messages.
        faults: what goes wrong.
        restart: makes the handler of a member that was killed anew, for ``restart`` faults.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        faults: Sequence[Fault] = (),
        restart: Callable[[str], Handler] | None = None,
    ) -> None:
        super().__init__(handlers)
        self._faults, self._restart = tuple(faults), restart
        self._gone: dict[str, float] = {}  # until when
        self._earlier: dict[str, bytes] = {}
        self._late: dict[str, tuple[float, bytes]] = {}
        self._sent: dict[str, int] = dict.fromkeys(handlers, 0)

    def replace(self, name: str, handler: Handler) -> None:
        """Put a new party in the place of one that crashed."""
        super().replace(name, handler)
        self._gone.pop(name, None)

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        """Call each handler, with what goes wrong."""
        replies = {name: self._call(name, frame) for name, frame in frames.items()}
        until = self.clock.now() + seconds
        due = [at for name in frames if (at := self._late.get(name, (0.0, b""))[0]) > self.clock.now()]
        if due:  # somebody is still at work: wait for it, as long as the caller would
            self.clock.sleep(min(max(due), until) - self.clock.now())
        found: dict[str, Bytes | Away] = {}
        for name, reply in replies.items():
            if name in self._late and self._late[name][0] <= self.clock.now():
                reply = self._late.pop(name)[1]
            if reply is not None:
                found[name] = reply
        return found

    def _answer(self, name: str, frame: Bytes) -> bytes:
        reply = bytes(self._sites[name].answer(frame))
        self._earlier[name] = reply
        return reply

    def _call(self, name: str, frame: Bytes) -> Bytes | Away | None:
        if name in self._late:
            return None
        if name in self._gone and self.clock.now() < self._gone[name]:
            return Away("cannot be reached")
        self._gone.pop(name, None)
        number = self._sent[name]
        self._sent[name] += 1
        faults = {fault.kind: fault for fault in self._faults if fault.party == name and fault.now(number)}
        for kind in ("crash", "outage", "restart", "restart-after"):
            if (fault := faults.get(kind)) is not None:
                return self._lose(name, frame, fault)
        if faults.keys() & {"lose-request", "leave"}:
            return Away("cannot be reached")
        earlier = self._earlier.get(name)
        reply = self._answer(name, frame)
        if "duplicate" in faults:
            reply = self._answer(name, frame)
        if "lose-reply" in faults:
            return Away("hung up")
        if (late := faults.get("delay")) is not None:
            self._late[name] = (self.clock.now() + late.seconds, reply)
            return None
        if "stale" in faults and earlier is not None:
            return earlier
        if "corrupt" in faults:
            return reply[:-1] + bytes([reply[-1] ^ 0x40])
        return reply

    def _lose(self, name: str, frame: Bytes, fault: Fault) -> Away:
        if fault.kind == "restart-after":
            self._answer(name, frame)
        if fault.kind in ("restart", "restart-after"):
            assert self._restart is not None
            super().replace(name, self._restart(name))
        self._gone[name] = float("inf") if fault.kind == "crash" else self.clock.now() + fault.seconds
        return Away("cannot be reached")
