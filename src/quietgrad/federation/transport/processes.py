"""Parties as processes of this machine: real memory boundaries, real kills, no network."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess

from quietgrad.federation.exchange import Site
from quietgrad.federation.transport import Away, Bytes, Calls, Handler
from quietgrad.federation.transport.local_socket import receive, send

Factory = Callable[[], Handler]
"""Makes a party's handler inside its own process; a module-level function, or a ``functools.partial`` of one."""


class Processes(Calls):
    """A transport to child processes, one per party.

    Args:
        factories: by name, what makes the party's handler in its process. Only these are pickled (by the standard
            library, when the child starts); messages never are.
        limit: the largest frame in bytes.
    """

    def __init__(self, factories: Mapping[str, Factory], *, limit: int = 1 << 28) -> None:
        super().__init__(tuple(factories), self._ask)
        self._factories, self._limit = dict(factories), limit
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, tuple[BaseProcess, socket.socket]] = {}
        for name in self._factories:
            self.restart(name)

    def process(self, name: str) -> BaseProcess:
        """The child process of a party."""
        return self._children[name][0]

    def restart(self, name: str) -> None:
        """Start a party's process, again if it has ended."""
        self._stop(name)
        ours, theirs = socket.socketpair()
        process = self._context.Process(
            target=_serve, args=(theirs, self._factories[name], self._limit), name=name, daemon=True
        )
        process.start()
        theirs.close()
        self._children[name] = (process, ours)
        self._renewed.add(name)

    def close(self) -> None:
        """End the children."""
        super().close()
        for name in list(self._children):
            self._stop(name)

    def _stop(self, name: str) -> None:
        if name not in self._children:
            return
        process, ours = self._children.pop(name)
        process.terminate()
        process.join(timeout=5.0)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()

    def _ask(self, name: str, frame: Bytes) -> Bytes:
        if name not in self._children:
            raise Away("has no process")
        ours = self._children[name][1]
        # No deadline: the exchange stops waiting by itself, and half a frame would spoil the socket for good.
        send(ours, frame)
        return receive(ours, self._limit)


def _serve(sock: socket.socket, factory: Factory, limit: int) -> None:
    """The child's loop: one frame in, one reply out, until the coordinator hangs up."""
    site = Site(factory())
    with sock:
        while True:
            try:
                send(sock, site.answer(receive(sock, limit)))
            except OSError:
                return
