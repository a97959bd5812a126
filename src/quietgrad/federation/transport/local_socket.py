"""Members behind sockets of their own machine: for engines that start a process for every message, and simulations.

The member's process holds its records, keys and ledger; what the engine starts only carries frames to the socket.
If the two run as different users, code that an engine ships cannot read what the member holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from quietgrad.errors import DataError
from quietgrad.federation.exchange import Responder
from quietgrad.federation.transport import Away, Bytes, Calls, Handler
from quietgrad.federation.transport.tls_connection import ASK, REPLY, receive, send
from quietgrad.secure.identity import ProtocolError

_SECONDS = 60.0  # that a caller has to send its frame and to take the reply


def carry(path: str | Path, frame: Bytes, *, most: int, seconds: float | None = None) -> bytearray:
    """Carry one frame to the member behind ``path`` and bring back its reply."""
    with socket.socket(socket.AF_UNIX) as sock:
        deadline = None if seconds is None else time.monotonic() + seconds
        sock.settimeout(seconds)
        try:
            sock.connect(str(path))
        except OSError as error:
            raise Away(f"no member answers at {path} ({error.strerror})") from None
        send(sock, ASK, frame, deadline=deadline)
        return receive(sock, most=most, deadline=deadline)[1]


def serve(site: Responder, path: Path, *, most: int) -> None:
    """Answer at ``path``, which only the owner's group may use, until the run is over."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise DataError(f"{path}: is there and no socket; choose another path for --listen.")
        try:
            with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError, ProtocolError):
                carry(path, b"", most=most, seconds=1.0)
            raise DataError(f"{path}: another process listens there.")
        except Away:
            path.unlink()  # left by a process that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o117)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot listen there ({error.strerror}).") from None
        finally:
            os.umask(before)
        listener.listen(16)
        try:
            while not site.over:
                caller, _ = listener.accept()
                with caller, contextlib.suppress(OSError, ProtocolError):
                    deadline = time.monotonic() + _SECONDS
                    reply = site.answer(receive(caller, most=most, deadline=deadline)[1])
                    send(caller, REPLY, reply, deadline=time.monotonic() + _SECONDS)
        finally:
            path.unlink(missing_ok=True)


Factory = Callable[[], Handler]
"""Makes a party's handler inside its own process; a module-level function, or a ``functools.partial`` of one."""


class Processes(Calls):
    """A transport to child processes, one per party, each behind a socket of its own.

    Only the factories are pickled, by the standard library when a child starts; messages, of at most ``limit``
    bytes, never are.
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
    serve(Responder(factory()), path, most=limit)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)
