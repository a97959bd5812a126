"""Parties as processes of this machine: real memory boundaries, real kills, no network."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from quietgrad.federation.exchange import Site
from quietgrad.federation.transport import Bytes, Calls, Handler
from quietgrad.federation.transport.local_socket import carry, serve

Factory = Callable[[], Handler]
"""Makes a party's handler inside its own process; a module-level function, or a ``functools.partial`` of one."""


class Processes(Calls):
    """A transport to child processes, one per party, each behind a socket of its own.

    Args:
        factories: by name, what makes the party's handler in its process. Only these are pickled (by the standard
            library, when the child starts); messages never are.
        limit: the largest frame in bytes.
    """

    def __init__(self, factories: Mapping[str, Factory], *, limit: int = 1 << 28) -> None:
        super().__init__(tuple(factories), self._ask)
        self._factories, self._limit = dict(factories), limit
        self._sockets = tempfile.TemporaryDirectory()
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, BaseProcess] = {}
        for name in self._factories:
            self.restart(name)

    def process(self, name: str) -> BaseProcess:
        """The child process of a party."""
        return self._children[name]

    def restart(self, name: str) -> None:
        """Start a party's process, again if it has ended."""
        if name in self._children:
            _end(self._children[name])
        arguments = (self._factories[name], self._path(name), self._limit)
        self._children[name] = self._context.Process(target=_serve, args=arguments, name=name, daemon=True)
        self._children[name].start()
        self._renewed.add(name)

    def close(self) -> None:
        """End the children."""
        super().close()
        for process in self._children.values():
            _end(process)
        self._sockets.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._sockets.name) / str(self._names.index(name))

    def _ask(self, name: str, frame: Bytes) -> Bytes:
        return carry(self._path(name), frame, most=self._limit)


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join(timeout=5.0)
    if process.is_alive():
        process.kill()
        process.join()


def _serve(factory: Factory, path: Path, limit: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(Site(factory()), path, most=limit)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)
