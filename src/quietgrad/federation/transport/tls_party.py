"""A member's end of :mod:`~quietgrad.federation.transport.tls`: calls the coordinator and answers what it asks."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from dataclasses import dataclass

from quietgrad.errors import BudgetError
from quietgrad.federation.provision import COORDINATOR, Credentials
from quietgrad.federation.transport import Bytes, Handler
from quietgrad.federation.transport.door import alert, refusal
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
    receive,
    send,
    tune,
)
from quietgrad.federation.transport.tls import GREETING_BYTES, GREETING_SECONDS, NUMBER, VERSION, Tell
from quietgrad.files import parse_json
from quietgrad.secure.faults import DropoutError, ProtocolError


@dataclass(frozen=True)
class Farewell:
    """How a run ended: words, and what the coordinator hands to everybody (a message, or nothing)."""

    words: str
    parting: Bytes


class TlsParty:
    """A member that answers a coordinator until it says that the run is over.

    Args:
        credentials: this member's.
        address: the coordinator's host and port.
        handler: what answers messages, such as ``PartyCurator.handle``.
        agreement: the digest of the plan file that was approved here.
        most: the largest frame in bytes.
        timeout: seconds that sending a reply may take.
        patience: seconds without a coordinator after which this member gives up.
        greeting: seconds to connect in before calling again; less than the plan's grace, or a call that got lost
            costs more rounds than it has to.
        tell: is told in words what happens.
    """

    def __init__(
        self,
        credentials: Credentials,
        address: tuple[str, int],
        handler: Handler,
        *,
        agreement: str,
        most: int,
        timeout: float = 60.0,
        patience: float = 600.0,
        greeting: float = GREETING_SECONDS,
        tell: Tell = lambda words: None,
    ) -> None:
        self._context = context_for(credentials)
        self._address, self._handler, self._agreement = address, handler, agreement
        self._most, self._timeout, self._patience, self._tell = min(most, LARGEST), timeout, patience, tell
        self._greeting = min(greeting, GREETING_SECONDS)
        self._instance = os.urandom(16).hex()
        self._asked: tuple[str, int] | None = None
        self._reply: Bytes = b""
        self.answered = 0

    def run(self) -> Farewell:
        """Answer until the end; raises if the coordinator refuses this member or stays away."""
        since, pause, told = time.monotonic(), 0.1, ""
        while True:
            why = "cannot be reached"
            try:
                connection, session = self._call()
            except OSError as error:
                why = _why(error)
                if told != why:
                    self._tell(f"the coordinator {why}; calling again for up to {self._patience:g} s")
                    told = why
            else:
                self._tell(f"connected to {self._address[0]}:{self._address[1]}")
                since, pause, told = time.monotonic(), 0.1, ""
                try:
                    return self._answer(connection, session)
                except OSError as error:
                    why = _why(error)
                    since = time.monotonic()
                    self._tell(f"lost the coordinator ({why}); calling again")
                finally:
                    hang_up(connection)
            if time.monotonic() - since + pause > self._patience:
                raise DropoutError(
                    [COORDINATOR], f"{why} at {self._address[0]}:{self._address[1]} for {self._patience:g} s"
                )
            time.sleep(pause)
            pause = min(2.0 * pause, 3.0)

    def _call(self) -> tuple[ssl.SSLSocket, str]:
        """Connect, prove who both are, and agree on the plan; returns the connection and the session's name."""
        deadline = time.monotonic() + self._greeting
        sock = socket.create_connection(self._address, timeout=self._greeting)
        try:
            tune(sock)
            connection = self._context.wrap_socket(sock, server_hostname=COORDINATOR)
        except ssl.SSLCertVerificationError as error:
            hang_up(sock)
            raise ProtocolError(COORDINATOR, refusal(error)) from None
        except OSError:
            hang_up(sock)
            raise
        try:
            hello = {"version": VERSION, "plan": self._agreement, "instance": self._instance}
            send(connection, HELLO, json.dumps(hello).encode(), deadline=deadline)
            kind, body = receive(connection, most=GREETING_BYTES, deadline=deadline)
            if kind == REFUSED:
                raise ProtocolError(COORDINATOR, f"turns this member away: {body.decode(errors='replace')}")
            welcome = parse_json(body)
            session, plan = str(welcome["session"]), welcome["plan"]
            if kind != WELCOME:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            hang_up(connection)
            raise ProtocolError(COORDINATOR, "speaks another protocol") from None
        except (OSError, ProtocolError):
            hang_up(connection)
            raise
        if plan != self._agreement:
            hang_up(connection)
            raise BudgetError("the coordinator's plan is not the one that was approved here; nothing was given.")
        return connection, session

    def _answer(self, connection: ssl.SSLSocket, session: str) -> Farewell:
        while True:
            # A coordinator that says nothing for so long is called anew: what it asked it asks again.
            kind, body = receive(connection, most=self._most, deadline=time.monotonic() + self._patience)
            if kind == REFUSED:
                raise ProtocolError(COORDINATOR, f"sends this member away: {body.decode(errors='replace')}")
            if kind == END:
                return _farewell(body)
            if kind != ASK or len(body) < NUMBER.size:
                raise ProtocolError(COORDINATOR, "says something that is not in the protocol")
            number = int(NUMBER.unpack_from(body)[0])
            del body[: NUMBER.size]
            if self._asked != (session, number):
                # An asking that comes again, because its reply was lost, gets the same reply: not a new release.
                self._reply = self._handler(body)
                self._asked = (session, number)
                self.answered += 1
            deadline = time.monotonic() + self._timeout
            send(connection, REPLY, NUMBER.pack(number), self._reply, deadline=deadline)


def _farewell(body: bytearray) -> Farewell:
    if len(body) < NUMBER.size:
        raise ProtocolError(COORDINATOR, "says something that is not in the protocol")
    (length,) = NUMBER.unpack_from(body)
    words = bytes(body[NUMBER.size : NUMBER.size + length])
    return Farewell(words.decode(errors="replace"), body[NUMBER.size + length :])


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return alert(error)
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, socket.gaierror):
        return "has an address that nobody knows"
    return "cannot be reached" if isinstance(error, ConnectionRefusedError) else "hung up"
