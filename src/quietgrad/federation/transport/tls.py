"""Real institutions: parties call the coordinator over TLS 1.3, each side proves who it is by its certificate.

Parties need no open port. A party that loses its connection calls again; a message that was under way is then sent
again under the same number, and the party repeats the same reply instead of answering twice, so a broken cable
costs no release. Every exchange ends at its deadline; nothing is kept from one exchange to the next. Callers who
have not proved who they are wait at the :mod:`~quietgrad.federation.transport.door`, briefly.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quietgrad.federation.provision import Credentials
from quietgrad.federation.revocation import revoked
from quietgrad.federation.transport import Bytes
from quietgrad.federation.transport.door import (
    ALTOGETHER,
    HANDSHAKE_SECONDS,
    PER_ADDRESS,
    Door,
    let_it_read,
    refusal,
)
from quietgrad.federation.transport.frames import (
    ASK,
    END,
    HELLO,
    LARGEST,
    REFUSED,
    REPLY,
    WELCOME,
    context_for,
    hang_up,
    peer_name,
    receive,
    send,
    tune,
)
from quietgrad.files import parse_json
from quietgrad.secure.faults import ProtocolError

VERSION = 1
NUMBER = struct.Struct("<Q")
GREETING_BYTES = 4096  # bytes
GREETING_SECONDS = 10.0
_FAREWELL_SECONDS = 10.0
Tell = Callable[[str], None]


@dataclass(eq=False)
class _Task:
    number: int
    message: Bytes
    deadline: float
    begun: float


class _Seat:
    """One member's place: its connection if it has one, what it was asked, what it answered."""

    def __init__(self) -> None:
        self.connection: ssl.SSLSocket | None = None
        self.instance = ""
        self.lost_at = time.monotonic()
        self.task: _Task | None = None
        self.reply: bytearray | None = None
        self.fault = "never called"
        self.answered, self.missed, self.seconds = 0, 0, 0.0


@dataclass(frozen=True)
class Attendance:
    """How one member did: exchanges answered and missed, and the mean seconds that an answer took."""

    name: str
    answered: int
    missed: int
    mean_seconds: float


class TlsServer:
    """The coordinator's transport: listens, seats whoever has a right to a seat, and exchanges messages.

    Args:
        credentials: the coordinator's.
        address: host and port to listen on; port 0 takes a free one.
        names: who may take part.
        agreement: the digest of the plan file; members with another one are turned away.
        most: the largest frame in bytes.
        grace: seconds that an absent member has to come back before it is reported missing.
        tell: is told in words who comes, goes and is turned away.
    """

    def __init__(
        self,
        credentials: Credentials,
        address: tuple[str, int],
        names: Sequence[str],
        *,
        agreement: str,
        most: int,
        grace: float = 15.0,
        tell: Tell = lambda words: None,
    ) -> None:
        self._context = context_for(credentials)
        self._agreement, self._most, self._grace, self._tell = agreement, min(most, LARGEST), grace, tell
        self._session = os.urandom(16).hex()  # numbers start anew in every process of the coordinator
        self._seats = {name: _Seat() for name in names}
        self._turn = threading.Condition()
        self._number = 0
        self._farewell: tuple[bytes, Bytes] | None = None
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._keys = credentials.folder
        self._door = Door(per_address=PER_ADDRESS + len(self._seats), altogether=ALTOGETHER + len(self._seats))
        self._last_refusal = -math.inf
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def parties(self) -> tuple[str, ...]:
        """Everybody's names."""
        return tuple(self._seats)

    def attendance(self) -> list[Attendance]:
        """How every member did so far."""
        return [
            Attendance(name, seat.answered, seat.missed, seat.seconds / max(1, seat.answered))
            for name, seat in self._seats.items()
        ]

    def wait_for_all(self, seconds: float) -> dict[str, str]:
        """Wait until everybody is here; those who are not, with what is known about it."""
        deadline = time.monotonic() + seconds
        with self._turn:
            while True:
                absent = {name: seat.fault for name, seat in self._seats.items() if seat.connection is None}
                left = deadline - time.monotonic()
                if not absent or left <= 0.0:
                    return absent
                self._turn.wait(left)

    def exchange(self, messages: Mapping[str, Bytes], timeout: float) -> tuple[dict[str, Bytes], list[str]]:
        """Ask everybody at once; see :class:`~quietgrad.federation.transport.Transport`."""
        begun = time.monotonic()
        deadline = begun + timeout
        with self._turn:
            self._number += 1
            for name, message in messages.items():
                seat = self._seats[name]
                seat.reply, seat.task = None, _Task(self._number, message, deadline, begun)
            self._turn.notify_all()
            while True:
                now = time.monotonic()
                waits = [self._patience(self._seats[name], begun, deadline) - now for name in messages]
                if now >= deadline or self._closed or not (left := [wait for wait in waits if wait > 0.0]):
                    break
                self._turn.wait(min(left))
            replies: dict[str, Bytes] = {}
            for name in messages:
                seat = self._seats[name]
                seat.task = None  # whoever still works on it finds no taker
                if seat.reply is None:
                    seat.missed += 1
                else:
                    replies[name], seat.reply = seat.reply, None
                    seat.answered += 1
        return replies, [name for name in messages if name not in replies]

    def finish(self, words: str, parting: Bytes = b"") -> None:
        """Tell everybody that the run is over, and what came out, then close."""
        self._farewell = (NUMBER.pack(len(words.encode())) + words.encode(), parting)
        self.close()

    def close(self) -> None:
        """Hang up; members who were not told that the run is over will call again."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            threads = list(self._threads)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread at the door
        hang_up(self._listener)
        limit = time.monotonic() + _FAREWELL_SECONDS
        for thread in threads:
            thread.join(timeout=max(0.0, limit - time.monotonic()))

    def _patience(self, seat: _Seat, begun: float, deadline: float) -> float:
        """Until when to wait for a member: not at all once it answered or broke the protocol."""
        if seat.task is None:
            return 0.0
        return deadline if seat.connection is not None else min(deadline, max(begun, seat.lost_at) + self._grace)

    # --- connections ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, (address, *_) = self._listener.accept()
            except OSError as error:
                if self._closed or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(0.05)  # a caller that hung up, or no descriptors for the moment: the door stays open
                continue
            try:
                tune(sock)
                connection = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self._door.admit(connection, address)
                greet = threading.Thread(
                    target=self._greet, args=(connection, address), name="greeting", daemon=True
                )
                greet.start()
            except (OSError, RuntimeError):  # gone already, or no threads for the moment
                hang_up(sock)

    def _greet(self, connection: ssl.SSLSocket, address: str) -> None:
        """Shake hands, check the name and the plan, and serve the seat until the connection ends."""
        deadline = time.monotonic() + GREETING_SECONDS
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            connection.do_handshake()
            name = peer_name(connection)
            kind, body = receive(connection, most=GREETING_BYTES, deadline=deadline)
            hello = parse_json(body)
            reason = self._stranger(name, kind, hello)
            if reason is not None:
                self._tell_refusal(ProtocolError(name or "a caller", reason), address)
                send(connection, REFUSED, reason.encode(), deadline=deadline)
                raise ConnectionAbortedError
            welcome = json.dumps({"session": self._session, "plan": self._agreement}).encode()
            send(connection, WELCOME, welcome, deadline=deadline)
        except (OSError, ValueError, ProtocolError, AttributeError) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                let_it_read(connection)
            hang_up(connection)
            self._tell_refusal(error, address)
            return
        finally:
            self._door.leave(connection, address)
        self._serve(name, connection, str(hello["instance"]))

    def _tell_refusal(self, error: Exception, address: str) -> None:
        """Say who was turned away and why; of callers without a name at most one a second, or they fill the log."""
        if isinstance(error, ProtocolError):
            if error.party in self._seats:
                self._seats[error.party].fault = error.reason
            self._tell(f"turned away {error}")
            return
        now = time.monotonic()
        if isinstance(error, ssl.SSLCertVerificationError) and now - self._last_refusal > 1.0:
            self._last_refusal = now
            self._tell(f"turned away a caller from {address}: {refusal(error)}")

    def _stranger(self, name: str, kind: int, hello: object) -> str | None:
        if not isinstance(hello, Mapping):
            return "says something that is not in the protocol"
        if name not in self._seats:
            return f"{name or 'the certificate'} is not a member of this federation"
        if name in revoked(self._keys):
            return f"{name} is revoked here"
        if kind != HELLO or hello.get("version") != VERSION or not isinstance(hello.get("instance"), str):
            return f"speaks another version of the protocol than {VERSION}"
        if hello.get("plan") != self._agreement:
            return "its plan file is not the coordinator's: compare the digests that both print"
        return None

    def _serve(self, name: str, connection: ssl.SSLSocket, instance: str) -> None:
        """Send each task and take its reply, as long as this connection is the seat's newest."""
        seat = self._seats[name]
        with self._turn:
            self._threads.add(threading.current_thread())
            seat.connection, seat.instance = connection, instance
            self._turn.notify_all()
        self._tell(f"{name} is connected")
        fault, task = "", None
        try:
            while (task := self._next(name, seat, connection)) is not None:
                send(connection, ASK, NUMBER.pack(task.number), task.message, deadline=task.deadline)
                kind, reply = receive(connection, most=self._most, deadline=task.deadline)
                if kind != REPLY or len(reply) < NUMBER.size or NUMBER.unpack_from(reply)[0] != task.number:
                    raise ProtocolError(name, "answers something that was not asked")
                del reply[: NUMBER.size]
                with self._turn:
                    if seat.task is task:
                        seat.task, seat.reply = None, reply
                        seat.seconds += time.monotonic() - task.begun
                        self._turn.notify_all()
            self._part(seat, connection, instance)
        except (OSError, ValueError, ProtocolError) as error:
            fault = "did not answer in time" if isinstance(error, TimeoutError) else str(error)
            if isinstance(error, ProtocolError):
                with self._turn:
                    if seat.task is task or name in revoked(self._keys):
                        seat.task = None  # asking again would bring the same
        hang_up(connection)
        with self._turn:
            self._threads.discard(threading.current_thread())
            mine = seat.connection is connection
            if mine:
                seat.connection, seat.lost_at, seat.fault = None, time.monotonic(), fault or "left"
                self._turn.notify_all()
        if mine and not self._closed:
            self._tell(f"{name} is gone ({fault})")

    def _next(self, name: str, seat: _Seat, connection: ssl.SSLSocket) -> _Task | None:
        with self._turn:
            while seat.connection is connection and not self._closed:
                if seat.task is not None and time.monotonic() < seat.task.deadline:
                    if name in revoked(self._keys):
                        raise ProtocolError(name, "is revoked here")
                    return seat.task
                self._turn.wait()
        return None

    def _part(self, seat: _Seat, connection: ssl.SSLSocket, instance: str) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS
        if self._farewell is not None:
            send(connection, END, *self._farewell, deadline=deadline)
        elif not self._closed and seat.instance != instance:
            send(connection, REFUSED, b"another process with the same keys took this place", deadline=deadline)
