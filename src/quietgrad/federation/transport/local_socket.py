"""Members behind sockets of their own machine: for engines that start a process for every message.

The member's process holds its records, keys and ledger; what the engine starts only carries frames to the socket.
If the two run as different users, code that an engine ships cannot read what the member holds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from pathlib import Path

from quietgrad.core.errors import DataError
from quietgrad.federation.exchange import Responder
from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.transport import Away, Bytes
from quietgrad.federation.transport.tls_connection import ASK, REPLY, receive, send

_SECONDS = 60.0  # that a caller has to send its frame and to take the reply


def _local_socket() -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise DataError("this system has no local sockets (AF_UNIX); run the member on Linux or macOS, or use TLS.")
    return socket.socket(socket.AF_UNIX)


def carry(path: str | Path, frame: Bytes, *, most: int, seconds: float | None = None) -> bytearray:
    """Carry one frame to the member behind ``path`` and bring back its reply."""
    with _local_socket() as sock:
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
            raise DataError(f"{path}: exists and is no socket; choose another path for --listen.")
        try:
            with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError, ProtocolError):
                carry(path, b"", most=most, seconds=1.0)
            raise DataError(f"{path}: another process listens there.")
        except Away:
            path.unlink()  # left by a process that was killed
    with _local_socket() as listener:
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
