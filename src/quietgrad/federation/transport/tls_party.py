"""A member's end of :mod:`~quietgrad.federation.transport.tls`: calls the coordinator and answers what it asks."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time

from quietgrad.errors import BudgetError
from quietgrad.federation.exchange import PATIENCE
from quietgrad.federation.provision import COORDINATOR, Credentials
from quietgrad.federation.site import Site
from quietgrad.federation.transport.door import alert, refusal
from quietgrad.federation.transport.frames import (
    ASK,
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
from quietgrad.federation.transport.tls import GREETING_BYTES, GREETING_SECONDS, VERSION, Tell
from quietgrad.files import parse_json
from quietgrad.secure.faults import DropoutError, ProtocolError

_LONGEST_PAUSE = 3.0  # seconds between two calls
_SILENCE = 300.0  # seconds after which a silent coordinator is called anew


class TlsParty:
    """A member that answers a coordinator until it says that the run is over.

    Args:
        credentials: this member's.
        address: the coordinator's host and port.
        site: what answers frames.
        agreement: the digest of the plan file that was approved here.
        most: the largest frame in bytes.
        timeout: seconds that sending a reply may take.
        patience: seconds without a coordinator after which this member gives up.
        tell: is told in words what happens.
    """

    def __init__(
        self,
        credentials: Credentials,
        address: tuple[str, int],
        site: Site,
        *,
        agreement: str,
        most: int,
        timeout: float = 60.0,
        patience: float = PATIENCE,
        tell: Tell = lambda words: None,
    ) -> None:
        self._context = context_for(credentials)
        self._address, self._site, self._agreement = address, site, agreement
        self._most, self._timeout, self._patience, self._tell = min(most, LARGEST), timeout, patience, tell
        self._instance = os.urandom(16).hex()

    def run(self) -> str:
        """Answer until the end and return its words; raises if the coordinator refuses or stays away."""
        since, pause, told = time.monotonic(), 0.1, ""
        while True:
            try:
                connection = self._call()
            except OSError as error:
                why = _why(error)
                if told != why:
                    self._tell(f"the coordinator {why}; calling again for up to {self._patience:g} s")
                    told = why
            else:
                if told != "silent":
                    self._tell(f"connected to {self._address[0]}:{self._address[1]}")
                since, pause, told = time.monotonic(), 0.1, ""
                try:
                    return self._answer(connection)
                except TimeoutError:  # it waits for others, or is gone without a word: calling shows which
                    told = "silent"
                    continue
                except OSError as error:
                    why, since = _why(error), time.monotonic()
                    self._tell(f"lost the coordinator ({why}); calling again")
                finally:
                    hang_up(connection)
            if time.monotonic() - since + pause > self._patience:
                raise DropoutError(
                    [COORDINATOR],
                    f"{why} at {self._address[0]}:{self._address[1]} for {self._patience:g} s; give the same "
                    "command again to go on",
                )
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)

    def _call(self) -> ssl.SSLSocket:
        """Connect, prove who both are, and agree on the plan."""
        deadline = time.monotonic() + GREETING_SECONDS
        sock = socket.create_connection(self._address, timeout=GREETING_SECONDS)
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
            kind, said = receive(connection, most=GREETING_BYTES, deadline=deadline)
            if kind == REFUSED:
                raise ProtocolError(COORDINATOR, f"turns this member away: {said.decode(errors='replace')}")
            plan = parse_json(said)["plan"]
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
        return connection

    def _answer(self, connection: ssl.SSLSocket) -> str:
        while True:
            kind, frame = receive(connection, most=self._most, deadline=time.monotonic() + _SILENCE)
            if kind == REFUSED:
                raise ProtocolError(COORDINATOR, f"sends this member away: {frame.decode(errors='replace')}")
            if kind != ASK:
                raise ProtocolError(COORDINATOR, "says something that is not in the protocol")
            reply = self._site.answer(frame)
            try:
                send(connection, REPLY, reply, deadline=time.monotonic() + self._timeout)
            except OSError:
                if not self._site.over:  # else the coordinator does not hear that the model is safe; it is
                    raise
            if self._site.over:
                return self._site.words


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return alert(error)
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, socket.gaierror):
        return "has an address that nobody knows"
    return "cannot be reached" if isinstance(error, ConnectionRefusedError) else "hung up"
