"""The two ends of every conversation, on any transport: a coordinator's exchange and a member's responder.

A frame is an envelope and a message. The envelope names the plan, the coordinator's process and a number. A
responder repeats its reply to a frame that it has answered, so a frame may be sent again at no cost: an outage of a
minute or an hour takes time and nothing else. Numbering, asking again, waiting for a quorum, leaving out revoked
members, readmitting restarted ones, naming faults and the ending are decided here, once for all transports.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quietgrad.core.errors import QuietgradError
from quietgrad.core.files import os_error_text
from quietgrad.federation.secure.identity import Identity, is_signed
from quietgrad.federation.transport import Away, Bytes, Handler, Transport
from quietgrad.federation.wire import Message, WireError, blobs, decode, encode, refusal

ASK, FINISH, WHO = 1, 2, 3
_HEAD = struct.Struct("<3sBQ16s32s4x")  # 64 bytes, so that the message behind it begins on a word
_MAGIC = b"QE2"
PATIENCE = 7200.0  # seconds
_PAUSES = (0.02, 1.0)  # seconds between two attempts to reach a member, first and longest
_SLICE = 5.0  # seconds after which it is looked anew who is revoked and who is back
_TRIES = 3  # of replies that arrive damaged
_FAREWELL = 15.0  # seconds
Enough = Callable[[Collection[str]], bool]
Tell = Callable[[str], None]


class Envelope(NamedTuple):
    """Header of every message and every reply."""

    kind: int
    number: int
    session: bytes
    agreement: bytes

    def around(self, message: Bytes) -> bytearray:
        frame = bytearray(_HEAD.size + len(message))
        _HEAD.pack_into(frame, 0, _MAGIC, *self)
        frame[_HEAD.size :] = message
        return frame

    @staticmethod
    def of(frame: Bytes) -> Envelope:
        if len(frame) < _HEAD.size or bytes(frame[: len(_MAGIC)]) != _MAGIC:
            raise WireError("not a frame of this version")
        return Envelope(*_HEAD.unpack_from(frame)[1:])


class Introduction:
    """A request for a member's identity, which a signature over a nonce proves."""

    def __init__(self) -> None:
        self.frame = Envelope(WHO, 0, os.urandom(16), os.urandom(32)).around(b"")

    @staticmethod
    def signed(name: str, frame: Bytes) -> bytes:
        """Return the bytes that the member of this name signs."""
        return b"quietgrad introduction 1\0" + name.encode() + b"\0" + bytes(frame[: _HEAD.size])

    def is_by(self, name: str, key: bytes, reply: Bytes) -> bool:
        return len(reply) > _HEAD.size and is_signed(key, bytes(body(reply)), self.signed(name, self.frame))


def body(frame: Bytes) -> memoryview:
    return memoryview(frame)[_HEAD.size :]


def agreement_of(digest: str) -> bytes:
    return hashlib.sha256(digest.encode()).digest()


class Exchange:
    """Asks members through a transport until as many as needed have answered.

    Once enough have answered, another has ``timeout`` seconds to answer, or ``grace`` to come back if it cannot be
    reached. As long as too few have, they are waited for ``patience`` seconds.

    Args:
        agreement: digest of the plan file; a member that approved another one refuses.
        most: the largest reply in bytes.
        revoked: by name, why members are no longer trusted; looked at before every frame.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        agreement: str = "",
        timeout: float = 60.0,
        grace: float = 15.0,
        patience: float = PATIENCE,
        most: int | None = None,
        revoked: Callable[[], Mapping[str, str]] = dict,
        tell: Tell = lambda words: None,
    ) -> None:
        if not all(0.0 < seconds < float("inf") for seconds in (timeout, grace, patience)):
            raise ValueError(f"timeout={timeout!r}, grace={grace!r}, patience={patience!r}: must be seconds > 0.")
        self.transport, self.timeout, self.patience, self.most = transport, timeout, patience, most
        self._grace, self._revoked, self._tell = min(grace, timeout), revoked, tell
        self._agreement, self._session, self._number = agreement_of(agreement), os.urandom(16), 0
        self.opening = bytearray()
        """The message to a member that does not know the run."""
        self.admit: Callable[[str, Message], str | None] = lambda name, reply: None
        """Looks at a returning member's ``ready`` before it is asked, and says why it is not taken back."""
        self.away: dict[str, str] = {}
        """By name, why those who did not answer the last time did not."""
        self.refused: dict[str, str] = {}
        """By name, why members say that the plan, or their own approval of it, does not allow what was asked."""
        self._probe: dict[str, tuple[float, float]] = {}  # when to look next for a member, and the pause

    def call(
        self,
        messages: Mapping[str, Bytes],
        faults: dict[str, str],
        enough: Enough | None = None,
        *,
        grace: float | None = None,
        timeout: float | None = None,
        kind: int = ASK,
    ) -> dict[str, Message]:
        """Ask, and ask again, until all have answered or ``enough`` of them have and the others had their time.

        A member without a good answer is named in ``faults``, whatever it says: one that refuses is absent.
        """
        grace = self._grace if grace is None else grace
        timeout = max(grace, self.timeout) if timeout is None else timeout
        patience = max(timeout, self.patience)
        enough = enough or (lambda good: True)
        return _Asking(self, messages, faults, enough, grace, timeout, patience, kind).run()

    def here(self, names: Iterable[str], enough: Enough, faults: dict[str, str]) -> tuple[str, ...]:
        """Those of ``names`` who can be asked now; waits until they are enough.

        Members who were away are looked for first. Those who are still away are named in ``faults``.
        """
        names = tuple(names)
        for name in self.transport.renewed():
            self.away.setdefault(name, "restarted")
            self._probe.pop(name, None)
        if not self.away:
            return names
        now = self.transport.clock.now()
        present = [name for name in names if name not in self.away]
        lost = [name for name in names if name in self.away]
        if enough(present):
            lost = [name for name in lost if now >= self._probe.get(name, (now, 0.0))[0]]
        if lost:
            opening = dict.fromkeys(lost, self.opening)  # which costs nothing
            missing: dict[str, str] = {}
            back = self.call(opening, missing, lambda good: enough([*present, *good]), grace=1e-3, timeout=1.0)
            for name, reply in back.items():
                if (why := self.admit(name, reply)) is None:
                    self._tell(f"{name} is back")
                else:
                    missing[name] = why
            self.away |= missing  # one that refuses the run is as absent as one that cannot be reached
            for name in [name for name in lost if name in self.away]:
                pause = min(2.0 * self._probe.get(name, (0.0, 0.5))[1], self._grace)
                self._probe[name] = (self.transport.clock.now() + pause, pause)
        faults |= {name: self.away[name] for name in names if name in self.away}
        return tuple(name for name in names if name not in self.away)

    def finish(
        self, words: str, parting: Bytes = b"", seconds: float = _FAREWELL, names: Iterable[str] | None = None
    ) -> tuple[str, ...]:
        """Tell members how it ended and hand out ``parting``; return who confirmed that it is safe.

        A member that cannot be reached is waited for, for so many seconds.
        """
        end = encode(Message("end", {"words": words[:2000]}, blobs({"parting": bytes(parting)})))
        last = dict.fromkeys(self.transport.parties() if names is None else names, end)
        replies = self.call(last, {}, grace=seconds, timeout=seconds, kind=FINISH)
        return tuple(name for name, reply in replies.items() if reply.kind == "confirmed")


@dataclass
class _Asking:
    """One call: who is still waited for, and what the others said."""

    over: Exchange
    messages: Mapping[str, Bytes]
    faults: dict[str, str]
    enough: Enough
    grace: float
    timeout: float
    patience: float
    kind: int
    good: dict[str, Message] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    frames: dict[str, bytearray] = field(default_factory=dict)
    away: dict[str, tuple[float, str]] = field(default_factory=dict)  # since when, and why
    damaged: Counter[str] = field(default_factory=Counter)
    readmitted: set[str] = field(default_factory=set)
    told: bool = False

    def run(self) -> dict[str, Message]:
        self.clock = self.over.transport.clock
        self.begun, pause = self.clock.now(), _PAUSES[0]
        self._number(self.messages)
        while self.frames:
            shut = self.over._revoked()
            for name in [name for name in self.frames if name in shut]:
                self._drop(name, f"is revoked here ({shut[name]})")
            before = len(self.good)
            got = self.over.transport.send(self.frames, self._seconds())
            for name, reply in got.items():
                if isinstance(reply, Away):
                    since = self.away[name][0] if name in self.away else self.clock.now()
                    self.away[name] = since, str(reply)
                else:
                    self._take(name, reply)
            if not self.frames or self._is_over():
                break
            self._tell()
            pause = _PAUSES[0] if len(self.good) > before else pause
            if self.frames.keys() <= self.away.keys():  # all are away: pause before asking again
                self.clock.sleep(min(pause, max(1e-3, self._seconds())))
                pause = min(2.0 * pause, _PAUSES[1])
        for name in self.good:
            self.over.away.pop(name, None)
            self.over._probe.pop(name, None)
        waited = self.clock.now() - self.begun
        for name in self.frames:
            words = f"did not answer within {waited:.3g} s"
            if name in self.away:
                words = f"is away ({self.away[name][1]})"
            self.faults[name] = self.over.away[name] = "sends what is no message" if name in self.damaged else words
        return self.good

    def _number(self, messages: Mapping[str, Bytes]) -> None:
        """Frame messages under a new number, because a member may remember its reply to an earlier one."""
        self.over._number += 1
        frame_by_message: dict[int, bytearray] = {}  # one frame for a message that goes to many
        for name, message in messages.items():
            if id(message) not in frame_by_message:
                head = Envelope(self.kind, self.over._number, self.over._session, self.over._agreement)
                frame_by_message[id(message)] = head.around(message)
            self.frames[name], self.numbers[name] = frame_by_message[id(message)], self.over._number

    def _deadline(self, name: str) -> float:
        """Until when a member is waited for once enough others have answered."""
        latest = self.begun + self.timeout
        return min(self.away[name][0] + self.grace, latest) if name in self.away else latest

    def _seconds(self) -> float:
        now = self.clock.now()
        if self.enough(self.good):
            left = max((self._deadline(name) for name in self.frames), default=now) - now
        else:
            left = self.begun + self.patience - now
        return min(max(left, 1e-3), _PAUSES[1] if self.away else _SLICE)

    def _is_over(self) -> bool:
        now = self.clock.now()
        if self.enough(self.good):
            return all(now >= self._deadline(name) for name in self.frames)
        hopeless = not self.enough({*self.good, *self.frames})
        return hopeless or now >= self.begun + self.patience

    def _take(self, name: str, reply: Bytes) -> None:
        self.away.pop(name, None)
        try:
            envelope = Envelope.of(reply)
            if (envelope.session, envelope.number) != (self.over._session, self.numbers[name]):
                raise WireError("it belongs to another question")
            message = decode(body(reply), most=self.over.most)
        except WireError as error:
            self.damaged[name] += 1
            if self.damaged[name] >= _TRIES:  # no accident: asking again would bring the same
                self._drop(name, f"sends what is no message: {error}")
            return
        if message.kind != "refused":
            self.good[name] = message
            del self.frames[name]
            return
        code, reason = message.fields.get("code"), str(message.fields.get("reason", ""))[:500]
        reason = reason.removeprefix(f"{name}: ")
        if code == "plan":
            self.over.refused[name] = reason
        if code != "stranger" or not self.over.opening or name in self.readmitted:
            self._drop(name, f"refuses: {reason}")
            return
        # It does not know the run, so it has restarted: open the run there again, then ask what was asked.
        self.readmitted.add(name)
        replies = self.over.call({name: self.over.opening}, {}, lambda good: bool(good) or self.enough(self.good))
        why = self.over.admit(name, replies[name]) if name in replies else "does not open the run"
        if why is None:
            self.over._tell(f"{name} restarted and is back")
            self._number({name: self.messages[name]})
        else:
            self._drop(name, f"restarted, and {why}")

    def _drop(self, name: str, why: str) -> None:
        self.frames.pop(name, None)
        self.faults[name] = why
        self.over.away.pop(name, None)

    def _tell(self) -> None:
        if self.told or self.enough(self.good) or not self.away or self.clock.now() < self.begun + 1.0:
            return
        self.told = True
        missing = "; ".join(f"{name} ({why})" for name, (_, why) in list(self.away.items())[:5])
        self.over._tell(f"waiting for {missing}, up to {self.patience:g} s; it costs nothing")


class Responder:
    """Answers frames for one member.

    Args:
        handler: what answers messages and never raises, such as ``PartyCurator.handle``.
        agreement: digest of the plan file that was approved here; none if all is refused, whatever the plan.
        finish: is given how the run ended and what was handed out; raises if that is not what was agreed on.
        identity: signs who this member is, for engines that do not know.
    """

    def __init__(
        self,
        handler: Handler,
        agreement: str | None = "",
        finish: Callable[[str, Bytes], None] = lambda words, parting: None,
        identity: Identity | None = None,
    ) -> None:
        self._handler, self._finish, self._identity = handler, finish, identity
        self._agreement = None if agreement is None else agreement_of(agreement)
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
                return Envelope(0, 0, bytes(16), bytes(32)).around(refusal("protocol", str(error)))
            if envelope.kind == WHO and self._identity is not None:
                return envelope.around(self._identity.sign(Introduction.signed(self._identity.name, frame)))
            if self._agreement is None:
                return envelope.around(self._handler(b""))
            if envelope.agreement != self._agreement:
                why = "the coordinator's plan file is not the one that was approved here"
                return envelope.around(refusal("plan", why))
            asked = (envelope.session, envelope.number)
            if self._last is None or self._last[0] != asked[0] or asked[1] > self._last[1]:
                self._reply = envelope.around(self._said(envelope, body(frame)))
                self._last = asked
                self.answered += 1
            elif self._last != asked:
                return envelope.around(refusal("protocol", "asked before, and answered"))
            return self._reply

    def _said(self, envelope: Envelope, message: Bytes) -> Bytes:
        if envelope.kind != FINISH:
            return self._handler(message)
        try:
            end = decode(message)
            self.words = str(end.fields.get("words", ""))[:2000]
            self._finish(self.words, end.blob("parting"))
        except QuietgradError as error:
            self.error = error
        except WireError as error:
            return refusal("protocol", str(error))
        except OSError as error:  # it is not over: the model can be handed out again
            return refusal("failed", f"cannot keep what was handed out ({os_error_text(error)})")
        self.over = True
        return encode(Message("refused", {"code": "model"}) if self.error else Message("confirmed"))


def refusing(reason: str) -> Responder:
    return Responder(lambda message: refusal("plan", reason), agreement=None)
