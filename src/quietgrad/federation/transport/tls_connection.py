"""Frames over a TLS connection with certificates on both sides, and a bounded queue of unauthenticated callers.

    length (4 bytes, little-endian, of what follows) · kind (1 byte) · payload

One thread owns a connection, sends and then receives; OpenSSL's connections are not made for two threads. A
connection that missed a deadline is thrown away, so no half frame is taken for the beginning of another. A caller
that opens a connection and says nothing occupies a place for a few seconds; when all places are taken, the caller
that has waited longest at the busiest address makes room.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from typing import Any

from cryptography import x509

from quietgrad.core.errors import DataError
from quietgrad.federation.provisioning import Credentials
from quietgrad.federation.revocation import COORDINATOR
from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.transport import Bytes

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
        # An institution's authority may itself be signed by another one, which nobody here needs to know.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        secret = credentials.secret or b""  # without one, a key under a passphrase would ask at the terminal
        context.load_cert_chain(credentials.folder / "cert.pem", credentials.folder / "key.pem", lambda: secret)
    except ssl.SSLError as error:
        raise DataError(f"{credentials.folder}: certificate and key do not fit ({error.reason}).") from None
    return context


def peer_name(connection: ssl.SSLSocket) -> str:
    certificate: Any = connection.getpeercert() or {}
    names = [str(name) for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
    return names[0] if len(names) == 1 else ""


def is_issued(connection: ssl.SSLSocket, name: str, credentials: Credentials) -> bool:
    """Whether the other side's certificate comes from the authority that signs for ``name``."""
    certificate = connection.getpeercert(binary_form=True)
    try:
        return certificate is not None and credentials.is_issued_for(
            name, x509.load_der_x509_certificate(certificate)
        )
    except ValueError:
        return False


def tune(sock: socket.socket) -> None:
    """Send at once, and notice within a minute that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def send(connection: socket.socket, kind: int, frame: Bytes, *, deadline: float | None) -> None:
    """Send one frame before ``deadline`` (of ``time.monotonic``) or raise ``OSError``."""
    for part in (_HEAD.pack(1 + len(frame), kind), frame):
        view, at = memoryview(part).cast("B"), 0
        while at < len(view):
            connection.settimeout(_left(deadline))
            at += connection.send(view[at : at + _PIECE])


def receive(connection: socket.socket, *, most: int, deadline: float | None) -> tuple[int, bytearray]:
    """The next frame's kind and payload; a longer one than ``most`` is refused before memory is taken for it."""
    length, kind = _HEAD.unpack(_read(connection, _HEAD.size, deadline))
    if not 1 <= length <= most + 1:
        name = peer_name(connection) if isinstance(connection, ssl.SSLSocket) else "the other process"
        raise ProtocolError(name, f"announces a frame of {length} bytes; the limit is {most}")
    return kind, _read(connection, length - 1, deadline)


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.close()


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    # Memory follows what has arrived: a frame that is only announced costs its announcer nothing.
    buffer, filled = bytearray(min(size, _PIECE)), 0
    while filled < size:
        if filled == len(buffer):
            buffer.extend(bytes(min(len(buffer), size - filled)))
        connection.settimeout(_left(deadline))
        with memoryview(buffer) as view, view[filled:] as rest:
            count = connection.recv_into(rest)
        if count == 0:
            raise ConnectionResetError("the other side hung up")
        filled += count
    return buffer


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("not in time")
    return left


HANDSHAKE_SECONDS = 5.0
_PLACES = 64  # and one for each member


class HandshakeQueue:
    """Unauthenticated connections in the order of their arrival, by address."""

    def __init__(self, members: int) -> None:
        self._places, self._lock = _PLACES + members, threading.Lock()
        self._callers: dict[socket.socket, str] = {}

    @property
    def waiting(self) -> int:
        return len(self._callers)

    def admit(self, connection: socket.socket, address: str) -> None:
        """Give a caller a place, for which another may have to go."""
        with self._lock:
            self._callers[connection] = address
            if len(self._callers) > self._places:
                busiest = Counter(self._callers.values()).most_common(1)[0][0]
                oldest = next(each for each, its in self._callers.items() if its == busiest)
                del self._callers[oldest]
                interrupt(oldest)

    def leave(self, connection: socket.socket) -> None:
        """A caller has proved who it is, or is gone."""
        with self._lock:
            self._callers.pop(connection, None)


def interrupt(connection: socket.socket) -> None:
    """End a connection that another thread uses; that thread finds out and closes it."""
    with contextlib.suppress(OSError):
        # Not SSLSocket.shutdown, which would take the TLS object away from the thread that still uses it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def let_it_read(connection: socket.socket) -> None:
    """Give a refused caller a second to read why: closing over its unread words would wipe the alert out."""
    limit = time.monotonic() + 1.0
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while (left := limit - time.monotonic()) > 0.0:
            connection.settimeout(left)
            if not socket.socket.recv(connection, 1 << 14):  # it hung up
                return


_ADVICE = "compare ca.pem, the clocks and the dates of the certificates on both sides"


def refusal(error: ssl.SSLCertVerificationError) -> str:
    return f"its certificate is not accepted ({error.verify_message}); {_ADVICE}"


def alert(error: ssl.SSLError) -> str:
    return f"ends the TLS connection ({(error.reason or 'closed').replace('_', ' ').lower()}); {_ADVICE}"
