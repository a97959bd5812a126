"""Members call the coordinator over TLS 1.3; each side proves by its certificate who it is.

Members need no open port. A member that loses its connection calls again, and is then sent the same frame again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quietgrad.core.errors import BudgetError, QuietgradError
from quietgrad.core.files import parse_json
from quietgrad.federation.exchange import PATIENCE, Responder, Tell
from quietgrad.federation.provisioning import Credentials
from quietgrad.federation.revocation import COORDINATOR, revoked
from quietgrad.federation.secure.identity import DropoutError, ProtocolError
from quietgrad.federation.transport import Away, Bytes, Calls
from quietgrad.federation.transport import tls_connection as link

VERSION = 3
GREETING_BYTES = 4096  # bytes
GREETING_SECONDS = 10.0


@dataclass(eq=False)
class MemberConnection:
    """One member's place: its connection if it has one, and what became of the last."""

    connection: ssl.SSLSocket | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    instance: str = ""
    replaced: set[str] = field(default_factory=set)
    fault: str = "has not called yet"


class TlsServer(Calls):
    """The coordinator's transport: listens, admits members by certificate and plan, and sends frames.

    ``agreement`` is the digest of the plan file. A connection that brings no reply for ``timeout`` seconds is given
    up; the member calls again. Port 0 takes a free one.
    """

    def __init__(
        self,
        credentials: Credentials,
        address: tuple[str, int],
        names: Sequence[str],
        *,
        agreement: str,
        most: int,
        timeout: float = 60.0,
        tell: Tell = lambda words: None,
    ) -> None:
        super().__init__(names, self._ask)
        self._agreement, self._most, self._timeout, self._tell = agreement, min(most, link.LARGEST), timeout, tell
        self._context, self._keys = link.context_for(credentials), credentials.folder
        self._credentials = credentials
        self._seats = {name: MemberConnection() for name in names}
        self._seating = threading.Lock()
        self._door = link.HandshakeQueue(len(self._seats))
        self._last_refusal = -math.inf
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        link.hang_up(self._listener)
        for seat in self._seats.values():
            if seat.connection is not None:
                _end(seat, seat.connection)

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        """Send as every transport does. Disconnect members revoked meanwhile: a new call of theirs is refused."""
        for name in revoked(self._keys):
            seat = self._seats.get(name)
            if seat is not None and seat.connection is not None:
                _end(seat, seat.connection)
                self._let_go(name, seat.connection, "is revoked here")
        return super().send(frames, seconds)

    def _ask(self, name: str, frame: Bytes) -> Bytes:
        """Send one frame on the member's newest connection and take the reply; one that fails is let go."""
        seat = self._seats[name]
        with seat.lock:
            connection, begun = seat.connection, time.monotonic()
            if connection is None:
                raise Away(seat.fault)
            try:
                link.send(connection, link.ASK, frame, deadline=begun + self._timeout)
                kind, reply = link.receive(connection, most=self._most, deadline=begun + self._timeout)
                if kind != link.REPLY:
                    raise ConnectionAbortedError("answers something that was not asked")
            except (OSError, ValueError, ProtocolError) as error:
                why = error.reason if isinstance(error, ProtocolError) else str(error) or "hung up"
                why = "did not answer in time" if isinstance(error, TimeoutError) else why
                link.hang_up(connection)
                self._let_go(name, connection, why)
                raise Away(why) from None
            return reply

    def _let_go(self, name: str, connection: ssl.SSLSocket, why: str) -> None:
        with self._seating:
            seat = self._seats[name]
            mine = seat.connection is connection
            if mine:
                seat.connection, seat.fault = None, why
        if mine and not self._closed:
            self._tell(f"{name} is gone ({why})")

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, (address, *_) = self._listener.accept()
            except OSError as error:
                if self._closed or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(0.05)  # a caller that hung up, or no descriptors for the moment: go on accepting
                continue
            try:
                link.tune(sock)
                connection = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self._door.admit(connection, address)
                threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()
            except (OSError, RuntimeError):  # gone already, or no threads for the moment
                link.hang_up(sock)

    def _greet(self, connection: ssl.SSLSocket, address: str) -> None:
        """Shake hands, check the name and the plan, and give the caller its seat."""
        deadline = time.monotonic() + GREETING_SECONDS
        try:
            connection.settimeout(link.HANDSHAKE_SECONDS)
            connection.do_handshake()
            name = link.peer_name(connection)
            kind, hello_bytes = link.receive(connection, most=GREETING_BYTES, deadline=deadline)
            hello = parse_json(hello_bytes)
            reason = self._stranger(name, kind, hello)
            if reason is None and not link.is_issued(connection, name, self._credentials):
                reason = f"its certificate is not of the authority that signs for {name}"
            if reason is not None:
                self._tell_refusal(ProtocolError(name or "a caller", reason), address)
                link.send(connection, link.REFUSED, reason.encode(), deadline=deadline)
                raise ConnectionAbortedError
            link.send(connection, link.WELCOME, json.dumps({"plan": self._agreement}).encode(), deadline=deadline)
        except (OSError, ValueError, ProtocolError, AttributeError) as error:
            self._tell_refusal(error, address)
            if isinstance(error, ssl.SSLCertVerificationError):
                link.let_it_read(connection)
            link.hang_up(connection)
            return
        finally:
            self._door.leave(connection)
        instance = str(hello["instance"])
        with self._seating:
            seat = self._seats[name]
            old = seat.connection
            if seat.instance not in ("", instance):
                seat.replaced.add(seat.instance)
                self._renewed.add(name)
            seat.connection, seat.instance = connection, instance
        if old is not None:
            _end(seat, old)
        self._tell(f"{name} is connected")

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
            self._tell(f"turned away a caller from {address}: {link.refusal(error)}")

    def _stranger(self, name: str, kind: int, hello: object) -> str | None:
        if not isinstance(hello, Mapping):
            return "says something that is not in the protocol"
        if name not in self._seats:
            return f"{name or 'the certificate'} is not a member of this federation"
        if name in revoked(self._keys):
            return f"{name} is revoked here"
        if kind != link.HELLO or hello.get("version") != VERSION or not isinstance(hello.get("instance"), str):
            return f"speaks another version of the protocol than {VERSION}"
        if hello["instance"] in self._seats[name].replaced:
            return "another process with the same keys took this place"
        if hello.get("plan") != self._agreement:
            return "its plan file is not the coordinator's: compare the digests that both print"
        return None


def _end(seat: MemberConnection, connection: ssl.SSLSocket) -> None:
    """Close a connection, or let the thread that is reading from it find out and close it."""
    if seat.lock.acquire(blocking=False):
        link.hang_up(connection)
        seat.lock.release()
    else:
        link.interrupt(connection)


_LONGEST_PAUSE = 3.0  # seconds between two calls
_SILENCE = 300.0  # seconds after which a silent coordinator is called anew


class TlsParty:
    """A member that answers a coordinator until it says that the run is over.

    It gives up after ``patience`` seconds without a coordinator.
    """

    def __init__(
        self,
        credentials: Credentials,
        address: tuple[str, int],
        site: Responder,
        *,
        agreement: str,
        most: int,
        timeout: float = 60.0,
        patience: float = PATIENCE,
        tell: Tell = lambda words: None,
    ) -> None:
        self._context, self._credentials = link.context_for(credentials), credentials
        self._address, self._site, self._agreement = address, site, agreement
        self._most, self._timeout, self._patience, self._tell = min(most, link.LARGEST), timeout, patience, tell
        self._instance = os.urandom(16).hex()

    def run(self) -> str:
        """Answer until the end and return its words; raises if the coordinator refuses or stays away."""
        since, pause, last_problem = time.monotonic(), 0.1, ""
        while True:
            try:
                connection = self._call()
            except OSError as error:
                why = _why(error)
                if last_problem != why:
                    self._tell(f"the coordinator {why}; calling again for up to {self._patience:g} s")
                    last_problem = why
            else:
                if last_problem != "silent":
                    self._tell(f"connected to {self._address[0]}:{self._address[1]}")
                since, pause, last_problem = time.monotonic(), 0.1, ""
                try:
                    return self._answer(connection)
                except TimeoutError:  # it waits for others, or is gone without a word: calling shows which
                    last_problem = "silent"
                    continue
                except OSError as error:
                    why, since = _why(error), time.monotonic()
                    self._tell(f"lost the coordinator ({why}); calling again")
                finally:
                    link.hang_up(connection)
            if time.monotonic() - since + pause > self._patience:
                where = f"at {self._address[0]}:{self._address[1]} for {self._patience:g} s"
                raise DropoutError([COORDINATOR], f"{why} {where}; give the same command again to go on")
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)

    def _call(self) -> ssl.SSLSocket:
        """Connect, prove who both are, and agree on the plan."""
        deadline = time.monotonic() + GREETING_SECONDS
        hello = {"version": VERSION, "plan": self._agreement, "instance": self._instance}
        with contextlib.ExitStack() as failed:
            sock = socket.create_connection(self._address, timeout=GREETING_SECONDS)
            failed.callback(link.hang_up, sock)
            try:
                link.tune(sock)
                connection = self._context.wrap_socket(sock, server_hostname=COORDINATOR)
                failed.callback(link.hang_up, connection)
                link.send(connection, link.HELLO, json.dumps(hello).encode(), deadline=deadline)
                kind, reply = link.receive(connection, most=GREETING_BYTES, deadline=deadline)
                if kind == link.REFUSED:
                    raise ProtocolError(COORDINATOR, f"turns this member away: {reply.decode(errors='replace')}")
                if not link.is_issued(connection, COORDINATOR, self._credentials):
                    why = "its certificate is not of the authority that signs for the coordinator"
                    raise ProtocolError(COORDINATOR, why)
                if parse_json(reply)["plan"] != self._agreement:
                    raise BudgetError("the coordinator's plan is not the one that was approved here.")
                if kind != link.WELCOME:
                    raise ValueError
            except ssl.SSLCertVerificationError as error:  # which is a ValueError, too
                raise ProtocolError(COORDINATOR, link.refusal(error)) from None
            except (OSError, QuietgradError):
                raise
            except (ValueError, KeyError, TypeError):
                raise ProtocolError(COORDINATOR, "speaks another protocol") from None
            failed.pop_all()
            return connection

    def _answer(self, connection: ssl.SSLSocket) -> str:
        while True:
            kind, frame = link.receive(connection, most=self._most, deadline=time.monotonic() + _SILENCE)
            if kind == link.REFUSED:
                raise ProtocolError(COORDINATOR, f"sends this member away: {frame.decode(errors='replace')}")
            if kind != link.ASK:
                raise ProtocolError(COORDINATOR, "says something that is not in the protocol")
            reply = self._site.answer(frame)
            try:
                link.send(connection, link.REPLY, reply, deadline=time.monotonic() + self._timeout)
            except OSError:
                if not self._site.over:  # else the coordinator does not hear that the model is safe; it is
                    raise
            if self._site.over:
                return self._site.words


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return link.alert(error)
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, socket.gaierror):
        return "has an unknown address"
    return "cannot be reached" if isinstance(error, ConnectionRefusedError) else "hung up"
