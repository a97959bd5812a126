"""Frames over a TLS connection: a kind, a length that is bounded, bytes; and contexts that insist on certificates.

    length (4 bytes, little-endian, of what follows) · kind (1 byte) · payload

One thread owns a connection: it sends and then receives, never both at once, because OpenSSL's connections are not
made for two threads. Every call has a deadline, and a connection that missed one is thrown away, so no half frame
is ever taken for the beginning of another.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from typing import Any

from quietgrad.errors import DataError
from quietgrad.federation.provision import COORDINATOR, Credentials
from quietgrad.federation.transport import Bytes
from quietgrad.secure.faults import ProtocolError

HELLO, WELCOME, REFUSED, ASK, REPLY = b"hwxar"
_HEAD = struct.Struct("<IB")
_PIECE = 1 << 18
LARGEST = (1 << 32) - 2


def context_for(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 with certificates on both sides; the coordinator's name is checked, whatever its address."""
    credentials.check_dates()
    serving = credentials.name == COORDINATOR
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(credentials.folder / "ca.pem")
        context.load_cert_chain(credentials.folder / "cert.pem", credentials.folder / "key.pem")
    except ssl.SSLError as error:
        raise DataError(f"{credentials.folder}: certificate and key do not fit ({error.reason}).") from None
    return context


def peer_name(connection: ssl.SSLSocket) -> str:
    """The name in the other side's verified certificate."""
    certificate: Any = connection.getpeercert() or {}
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    return str(names[0]) if len(names) == 1 else ""


def tune(sock: socket.socket) -> None:
    """Send at once, and notice within a minute that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send(connection: ssl.SSLSocket, kind: int, *parts: Bytes, deadline: float) -> None:
    """Send one frame before ``deadline`` (of ``time.monotonic``) or raise ``OSError``."""
    _send_all(connection, _HEAD.pack(1 + sum(map(len, parts)), kind), deadline)
    for part in parts:
        _send_all(connection, part, deadline)


def receive(connection: ssl.SSLSocket, *, most: int, deadline: float | None) -> tuple[int, bytearray]:
    """The next frame's kind and payload; a longer one than ``most`` is refused before memory is taken for it."""
    length, kind = _HEAD.unpack(_read(connection, _HEAD.size, deadline))
    if not 1 <= length <= most + 1:
        raise ProtocolError(peer_name(connection), f"announces a frame of {length} bytes; the limit is {most}")
    return kind, _read(connection, length - 1, deadline)


def hang_up(connection: socket.socket) -> None:
    """Close without waiting for the other side."""
    with contextlib.suppress(OSError):
        connection.close()


def _send_all(connection: ssl.SSLSocket, data: Bytes, deadline: float) -> None:
    view = memoryview(data).cast("B")
    at = 0
    while at < len(view):
        connection.settimeout(_left(deadline))
        at += connection.send(view[at : at + _PIECE])


def _read(connection: ssl.SSLSocket, size: int, deadline: float | None) -> bytearray:
    # Memory follows what has arrived: a frame that is only announced costs its announcer nothing.
    buffer, filled = bytearray(min(size, _PIECE)), 0
    while filled < size:
        if filled == len(buffer):
            buffer.extend(bytes(min(len(buffer), size - filled)))
        connection.settimeout(None if deadline is None else _left(deadline))
        with memoryview(buffer) as view, view[filled:] as rest:
            count = connection.recv_into(rest)
        if count == 0:
            raise ConnectionResetError("the other side hung up")
        filled += count
    return buffer


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("not in time")
    return left
