"""All members in this process, called one after another in the caller's thread; time is simulated."""

from __future__ import annotations

from collections.abc import Mapping

from quietgrad.federation.exchange import Responder
from quietgrad.federation.transport import Away, Bytes, Clock, Handler


class SimulatedClock(Clock):
    """Time that passes only while the caller waits."""

    _now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


class InProcess:
    """A transport of function calls; ``handlers`` are, by name, what answers messages."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.clock = SimulatedClock()
        self._sites = {name: Responder(handler) for name, handler in handlers.items()}
        self._renewed: set[str] = set()

    def parties(self) -> tuple[str, ...]:
        return tuple(self._sites)

    def renewed(self) -> set[str]:
        found, self._renewed = self._renewed, set()
        return found

    def replace(self, name: str, handler: Handler) -> None:
        """Put a new process in the place of a member."""
        self._sites[name] = Responder(handler)
        self._renewed.add(name)

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        return {name: self._sites[name].answer(frame) for name, frame in frames.items()}

    def close(self) -> None:
        """Do nothing: no connection is open."""
