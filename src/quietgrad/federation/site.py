"""The other end of every transport: one member, the plan it approved, and a memory of its last reply.

A frame of another plan is refused before the member sees it. A frame that comes again gets the same reply, so that
a lost connection never makes a second release. The end of the run is a frame like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quietgrad.errors import QuietgradError
from quietgrad.federation.exchange import (
    FINISH,
    WHO,
    Envelope,
    Introduction,
    agreement_of,
    body,
    read_farewell,
)
from quietgrad.federation.transport import Bytes, Handler
from quietgrad.federation.wire import Message, WireError, encode
from quietgrad.secure.identity import Identity


class Site:
    """Answers frames for one member.

    Args:
        handler: what answers messages and never raises, such as ``PartyCurator.handle``.
        agreement: digest of the plan file that was approved here.
        finish: is given how the run ended and what was handed out; raises if that is not what was agreed on.
        identity: signs who this member is, for engines that do not know.
    """

    def __init__(
        self,
        handler: Handler,
        agreement: str = "",
        finish: Callable[[str, Bytes], None] = lambda words, parting: None,
        identity: Identity | None = None,
    ) -> None:
        self._handler, self._agreement, self._finish = handler, agreement_of(agreement), finish
        self._identity = identity
        self._lock = threading.Lock()
        self._last: tuple[bytes, int] | None = None
        self._reply = bytearray()
        self.answered = 0
        self.over = False
        """Whether the coordinator has said that the run is over."""
        self.words = ""
        """How it ended, in the coordinator's words."""
        self.error: QuietgradError | None = None
        """What was wrong with what it handed out."""

    def answer(self, frame: Bytes) -> Bytes:
        """The reply to a frame; never raises. It stays as it is until the next call."""
        with self._lock:
            try:
                envelope = Envelope.of(frame)
            except WireError as error:
                return Envelope(0, 0, bytes(16), bytes(32)).around(_refused("protocol", str(error)))
            if envelope.kind == WHO and self._identity is not None:
                return envelope.around(Introduction.signed(self._identity, frame))
            if envelope.agreement != self._agreement:
                return envelope.around(
                    _refused("plan", "the coordinator's plan file is not the one that was approved here")
                )
            asked = (envelope.session, envelope.number)
            if self._last is None or self._last[0] != asked[0] or asked[1] > self._last[1]:
                self._reply = envelope.around(self._said(envelope, body(frame)))
                self._last = asked
                self.answered += 1
            elif self._last != asked:
                return envelope.around(_refused("protocol", "asked before, and answered"))
            return self._reply

    def _said(self, envelope: Envelope, message: Bytes) -> Bytes:
        if envelope.kind != FINISH:
            return self._handler(message)
        try:
            self.words, parting = read_farewell(message)
            self._finish(self.words, parting)
        except QuietgradError as error:
            self.error = error
        except WireError as error:
            return _refused("protocol", str(error))
        self.over = True
        return encode(Message("refused", {"code": "model"}) if self.error else Message("confirmed"))


def refusing(reason: str) -> Site:
    """What answers where nobody can, and says why."""
    return _Refusing(lambda message: _refused("plan", reason))


class _Refusing(Site):
    def answer(self, frame: Bytes) -> Bytes:
        try:
            return Envelope.of(frame).around(self._handler(b""))
        except WireError:
            return super().answer(frame)


def _refused(code: str, reason: str) -> bytearray:
    return encode(Message("refused", {"code": code, "reason": reason}))
