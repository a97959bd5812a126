"""Transports: how frames reach members. A transport knows names and bytes, nothing else, and never hangs.

What a frame means, when it is sent again, who is missing and how a run ends is the business of
:class:`~quietgrad.federation.exchange.Exchange` on the coordinator's side and of
:class:`~quietgrad.federation.exchange.Responder` on the other, so that no transport can do it differently.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.wire import Bytes

__all__ = ["Away", "Bytes", "Calls", "Clock", "Handler", "Transport"]
Handler = Callable[[Bytes], Bytes]
"""What sits at the other end: takes a frame or a message and returns the reply, which may change with the next."""


class Away(ConnectionError):
    """A member cannot be reached at this moment; the text says what is known about it."""


class Clock:
    """Real time; a simulation has its own."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Transport(Protocol):
    """Sends one frame to each of some members and gathers their replies."""

    @property
    def clock(self) -> Clock:
        """The time that deadlines are measured by."""

    def parties(self) -> tuple[str, ...]:
        """Names of all members that can be reached in principle: parties, and servers if there are any."""

    def renewed(self) -> set[str]:
        """Members whose process is known to be another one than when this was last asked; they have no keys."""

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        """Deliver each frame and return what came back within ``seconds``, by name.

        A member who cannot be reached now is :class:`Away`, one who is still at work is left out. Returns as soon
        as all have answered. The caller sends a frame again if it likes; a reply says which frame it
        belongs to, so a late one does no harm.
        """

    def close(self) -> None:
        """Let go of all connections."""


class Calls:
    """A transport of calls that block, one thread and one call at a time for each member.

    ``call`` sends a frame to a member and returns the reply; it raises ``OSError`` (:class:`Away` if it knows more)
    when that fails, or has taken too long.
    """

    clock = Clock()

    def __init__(self, names: Sequence[str], call: Callable[[str, Bytes], Bytes]) -> None:
        self._names, self._call = tuple(names), call
        self._lines: dict[str, queue.SimpleQueue[Bytes | None]] = {}
        self._latest: dict[str, Bytes] = {}  # the frame that each thread is at, or is to take next
        self._done: queue.SimpleQueue[tuple[str, Bytes, Bytes | Away]] = queue.SimpleQueue()
        self._renewed: set[str] = set()
        self._closed = False

    def parties(self) -> tuple[str, ...]:
        return self._names

    def renewed(self) -> set[str]:
        names, self._renewed = self._renewed, set()
        return names

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        deadline = time.monotonic() + seconds
        for name, frame in frames.items():
            if self._latest.get(name) is frame:  # its thread is still at this very frame: wait for that
                continue
            self._latest[name] = frame
            if name not in self._lines:
                self._lines[name] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(name,), name=f"to {name}", daemon=True).start()
            self._lines[name].put(frame)
        answers: dict[str, Bytes | Away] = {}
        while len(answers) < len(frames) and not self._closed:
            try:
                name, frame, answer = self._done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if self._latest.get(name) is frame:
                del self._latest[name]
                if frames.get(name) is frame:  # else it came too late
                    answers[name] = answer
        return answers

    def close(self) -> None:
        self._closed = True
        for line in self._lines.values():
            line.put(None)

    def _work(self, name: str) -> None:
        while (frame := self._lines[name].get()) is not None and not self._closed:
            if self._latest.get(name) is not frame:  # a newer one waits already
                continue
            answer: Bytes | Away
            try:
                answer = self._call(name, frame)
            except (OSError, ProtocolError) as error:
                answer = error if isinstance(error, Away) else Away(str(error) or "hung up")
            self._done.put((name, frame, answer))
