"""Parties as processes of this machine: real memory boundaries, real kills, no network.

Each party is a fresh Python process with one socket. A reader thread per party takes whole frames off the socket,
so that a slow party can neither block the others nor leave half a frame behind; every frame carries the number of
the exchange it belongs to, and late answers are dropped.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess

from quietgrad.federation.transport import Bytes, Handler
from quietgrad.federation.transport.link import Link
from quietgrad.secure.faults import DropoutError, ProtocolError

Factory = Callable[[], Handler]
"""Makes a party's handler inside its own process; a module-level function, or a ``functools.partial`` of one."""

_NUMBER = struct.Struct("<Q")
_FOREVER = 10.0**6  # seconds


class Processes:
    """A transport to child processes, one per party.

    Args:
        factories: by name, what makes the party's handler in its process. Only these are pickled (by the standard
            library, when the child starts); messages never are.
        limit: the largest message in bytes.
    """

    def __init__(self, factories: Mapping[str, Factory], *, limit: int = 1 << 28) -> None:
        self._factories, self._limit = dict(factories), limit
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, _Child] = {}
        self._exchange = 0
        for name in self._factories:
            self.restart(name)

    def parties(self) -> tuple[str, ...]:
        """Everybody's names."""
        return tuple(self._factories)

    def process(self, name: str) -> BaseProcess:
        """The child process of a party."""
        return self._children[name].process

    def restart(self, name: str) -> None:
        """Start a party's process, again if it has ended."""
        if name in self._children:
            self._children.pop(name).stop()
        ours, theirs = socket.socketpair()
        process = self._context.Process(
            target=_serve, args=(theirs, self._factories[name], self._limit), name=name, daemon=True
        )
        process.start()
        theirs.close()
        self._children[name] = _Child(process, Link(ours, name, limit=self._limit))

    def exchange(self, messages: Mapping[str, Bytes], timeout: float) -> tuple[dict[str, Bytes], list[str]]:
        """Ask the children at once; see :class:`~quietgrad.federation.transport.Transport`."""
        self._exchange += 1
        deadline = time.monotonic() + timeout
        for name, message in messages.items():
            self._children[name].ask(self._exchange, message)
        replies: dict[str, Bytes] = {}
        for name in messages:
            reply = self._children[name].answer(self._exchange, deadline)
            if reply is not None:
                replies[name] = reply
        return replies, [name for name in messages if name not in replies]

    def close(self) -> None:
        """End the children."""
        for child in self._children.values():
            child.stop()
        self._children = {}


class _Child:
    """A child process, its link, and the thread that reads from it."""

    def __init__(self, process: BaseProcess, link: Link) -> None:
        self.process, self._link = process, link
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._gone = False
        threading.Thread(target=self._read, name=f"from {link.peer}", daemon=True).start()

    def ask(self, number: int, message: Bytes) -> None:
        try:
            self._link.send(_NUMBER.pack(number) + bytes(message))
        except DropoutError:
            self._gone = True

    def answer(self, number: int, deadline: float) -> bytearray | None:
        while not self._gone:
            try:
                frame = self._frames.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if frame is None:
                self._gone = True
            elif len(frame) >= _NUMBER.size and _NUMBER.unpack_from(frame)[0] == number:
                return bytearray(memoryview(frame)[_NUMBER.size :])
        return None

    def stop(self) -> None:
        self._gone = True
        self.process.terminate()
        self.process.join(timeout=5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._link.close()

    def _read(self) -> None:
        try:
            while True:
                self._frames.put(self._link.receive(_FOREVER))
        except (ProtocolError, OSError, ValueError):
            self._frames.put(None)


def _serve(sock: socket.socket, factory: Factory, limit: int) -> None:
    """The child's loop: one message in, one reply out, until the coordinator hangs up."""
    handle = factory()
    with Link(sock, "coordinator", limit=limit) as link:
        while True:
            try:
                frame = link.receive(_FOREVER)
            except DropoutError:
                return
            reply = handle(bytearray(memoryview(frame)[_NUMBER.size :]))
            link.send(frame[: _NUMBER.size] + bytes(reply))
