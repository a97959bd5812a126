"""Choreographies of secure sums: the frames of each role, one generator per protocol, over any transport.

A choreography is a generator. It yields a :class:`Step`, a kind of message with the frames for each recipient, and
is resumed with the replies. A recipient that did not answer is missing among them. Recipients are roster numbers.

    masks              hello → meet │ prepare → deliver → ask → reveal
    servers, mpc       hello → meet │ (noise → …) ask → receive → partial → finish

Two drivers run it: :class:`~quietgrad.federation.secure.local_session.SecureSession` in one process, and
``quietgrad.federation.rounds`` over a network. What a recipient does at a step stands in :data:`ANSWERS`, which
both use. ``ask`` is the step in which data enter: a driver puts the round's question there, and a party answers it
with :func:`submission`. Everything before it needs no data and may run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.federation.secure.channel import Endpoint
from quietgrad.federation.secure.discrete_gaussian import Vector
from quietgrad.federation.secure.identity import HELLO_BYTES, DropoutError, ProtocolError
from quietgrad.federation.secure.masking import MaskingParty, MaskingServer
from quietgrad.federation.secure.servers import NoiseServer, SharingParty, SumServer, share_bytes
from quietgrad.federation.secure.terms import SecureSumConfig

Frame = bytes | npt.NDArray[Any]
Frames = Mapping[str, Frame]
"""Frames of one message, by name: ``"frame"`` if it is one frame, else roster numbers or places."""
NOTHING: Frames = {}
QUESTION = "ask"
_NO_TOTAL = "its total is not a finite vector of the agreed length"


class Step(NamedTuple):
    """One message to each recipient.

    ``least`` is the number of answers without which the round is lost. A driver that counts fewer recipients sends
    nothing.
    """

    kind: str
    to: Mapping[int, Frames]
    least: int = 0


class Reply(NamedTuple):
    """One recipient's answer. ``left_out`` names the senders whose frames it could not read, and why."""

    frames: Frames = NOTHING
    left_out: Mapping[str, object] = {}


class NoisySum(NamedTuple):
    """The released sum, and the parties that are in it."""

    total: Vector
    parties: tuple[int, ...]


Result = TypeVar("Result")
Choreography = Generator[Step, Mapping[int, Reply], Result]
LeaveOut = Callable[[Mapping[str, str]], None]
"""Hears by name which parties count as absent because of what they sent."""


def drive(
    choreography: Choreography[Result],
    send: Callable[[Step], Mapping[int, Reply]],
    *,
    after: Mapping[int, Reply] | None = None,
) -> Result:
    """Run a choreography to its end with what ``send`` brings back; from its next step on, if given ``after``."""
    replies = after
    while True:
        try:
            step = next(choreography) if replies is None else choreography.send(replies)
        except StopIteration as done:
            result: Result = done.value
            return result
        replies = send(step)


class MaskedSums:
    """Sums by masks: the server is the aggregator, and every frame goes through it."""

    def __init__(self, server: MaskingServer, quorum: int) -> None:
        self.server, self._quorum = server, quorum

    def set_up(self, parties: Iterable[int], leave_out: LeaveOut) -> Choreography[None]:
        """Introduce the parties to the server and to their neighbours."""
        hellos = self._frames((yield Step("hello", dict.fromkeys(parties, NOTHING))), leave_out)
        for i, hello in hellos.items():
            try:
                self.server.meet([hello])
            except ProtocolError as wrong:
                name = self.server.roster.names[i]
                leave_out({name: str(wrong).removeprefix(f"{name}: ")})
        yield Step("meet", {i: _in_places(hellos) for i, hellos in self.server.introductions().items()})

    def sum(self, t: int, parties: Iterable[int], leave_out: LeaveOut) -> Choreography[NoisySum]:
        """One round."""
        server = self.server
        prepared = self._frames((yield Step("prepare", dict.fromkeys(parties, NOTHING))), leave_out)
        delivery = server.relay(t, prepared)
        # Envelopes are opened before a question leaves: whoever sealed false ones costs the others no release.
        ready = yield Step("deliver", _one_each(delivery), least=self._quorum)
        masked = self._frames((yield Step(QUESTION, dict.fromkeys(ready, NOTHING))), leave_out)
        survivors = server.survivors(t, masked)
        revealed = self._frames((yield Step("reveal", _one_each(survivors))), leave_out)
        total = server.finish(t, revealed)
        leave_out(server.left_out)
        return NoisySum(total, tuple(survivors))

    def _frames(self, replies: Mapping[int, Reply], leave_out: LeaveOut) -> dict[int, bytes]:
        """The one frame of each reply; who sends none is left out."""
        frames, names = (
            {i: _bytes(reply.frames.get("frame")) for i, reply in replies.items()},
            self.server.roster.names,
        )
        leave_out({names[i]: "its reply has no frame" for i, frame in frames.items() if frame is None})
        return {i: frame for i, frame in frames.items() if frame is not None}


class SharedSums:
    """Sums by shares to servers, whose frames are only relayed here: no key and no role is needed."""

    def __init__(self, terms: SecureSumConfig, names: Sequence[str]) -> None:
        self._terms, self._names = terms, tuple(names)
        self._servers = range(terms.parties, terms.parties + terms.server_count)

    def set_up(self, parties: Iterable[int], leave_out: LeaveOut) -> Choreography[None]:
        """Introduce the parties to the servers, and the servers to all."""
        replies = yield Step("hello", dict.fromkeys((*parties, *self._servers), NOTHING))
        hellos = {i: hello for i, r in replies.items() if (hello := _bytes(r.frames.get("frame"))) is not None}
        leave_out({self._names[i]: "its reply has no frame" for i in replies if i not in hellos})
        short = [i for i, hello in hellos.items() if len(hello) != HELLO_BYTES]
        leave_out({self._names[i]: "hello has a wrong length" for i in short})
        hellos = {i: hello for i, hello in hellos.items() if i not in short}
        for_parties = _in_places([hellos[k] for k in self._servers if k in hellos])  # all that a party needs
        for_servers = _in_places([*hellos.values()])
        met = yield Step("meet", {i: for_servers if i in self._servers else for_parties for i in hellos})
        senders = dict(zip(for_servers, (self._names[i] for i in hellos), strict=True))
        for k in self._servers:
            leave_out(self._left_out(met.get(k), k, senders))

    def sum(self, t: int, parties: Iterable[int], leave_out: LeaveOut) -> Choreography[NoisySum]:
        """Sample the noise (mpc), ask for shares, let the servers add up."""
        terms, servers, quorum = self._terms, self._servers, self._terms.least_parties
        if terms.mode == "mpc" and terms.sigma > 0.0:
            yield from self._noise()
        replies = yield Step(QUESTION, dict.fromkeys(parties, NOTHING), least=quorum)
        # A share of another length or type is not relayed: the server would refuse it with all others.
        lengths = dict(zip(servers, share_bytes(terms), strict=True))
        shares = {i: reply.frames for i, reply in replies.items() if _has_lengths(reply.frames, lengths)}
        leave_out({self._names[i]: "shares have a wrong length or type" for i in replies if i not in shares})
        if len(shares) < quorum:  # the servers would refuse, and seem to be at fault
            absent = [self._names[i] for i in range(terms.parties) if i not in shares]
            raise DropoutError(absent, f"missing; {len(shares)} present, {quorum} needed")
        received = yield self._to_all(
            "receive", {k: {str(i): f[str(k)] for i, f in shares.items()} for k in servers}
        )
        senders = {self._names[i]: self._names[i] for i in shares}
        unread: dict[str, str] = {}
        for k in servers:
            unread |= self._left_out(received[k], k, senders)
        leave_out(unread)
        frames_by_server = {j: reply.frames for j, reply in received.items()}
        present = {k: {str(j): f[str(k)] for j, f in frames_by_server.items() if str(k) in f} for k in servers}
        partials = yield self._to_all("partial", present)
        summands = {str(k): reply.frames["frame"] for k, reply in partials.items() if "frame" in reply.frames}
        first = servers[0]
        total = (yield self._to_all("finish", {first: summands}))[first].frames.get("total")
        if not isinstance(total, np.ndarray) or total.dtype != np.float64 or total.shape != (terms.dimension,):
            raise ProtocolError(self._names[first], _NO_TOTAL)
        if not np.isfinite(total).all():
            raise ProtocolError(self._names[first], _NO_TOTAL)
        return NoisySum(total, tuple(i for i in shares if self._names[i] not in unread))

    def _noise(self) -> Choreography[None]:
        """Relay the servers' frames around the ring until the noise is shared among them."""
        servers = self._servers
        frames: dict[int, Frames] = dict.fromkeys(servers, NOTHING)
        while True:
            # i's frame goes to i − 1
            replies = yield self._to_all("noise", {k: frames[servers[(k - servers[0] + 1) % 3]] for k in servers})
            frames = {k: replies[k].frames for k in servers}
            going = [k for k in servers if frames[k]]
            if not going:
                return
            if len(going) < len(servers):  # all need the same number of steps
                odd = going[0] if len(going) == 1 else next(k for k in servers if k not in going)
                raise ProtocolError(self._names[odd], "is out of step in sampling the noise")

    @staticmethod
    def _to_all(kind: str, to: Mapping[int, Frames]) -> Step:
        return Step(kind, to, least=len(to))

    def _left_out(self, reply: Reply | None, server: int, senders: Mapping[str, str]) -> dict[str, str]:
        """Return the parties that a server left out, with its reasons; ``senders`` maps its names to ours."""
        reasons = {} if reply is None else reply.left_out
        by = f"(so says {self._names[server]})"
        return {senders[each]: f"{str(why)[:200]} {by}" for each, why in reasons.items() if each in senders}


def _bytes(frame: Frame | None) -> bytes | None:
    if isinstance(frame, np.ndarray):
        return frame.tobytes() if frame.dtype == np.uint8 else None
    return frame


def _one_each(frames: Mapping[int, bytes]) -> dict[int, Frames]:
    return {i: {"frame": frame} for i, frame in frames.items()}


def _in_places(hellos: Sequence[bytes]) -> Frames:
    return {f"{place:04}": hello for place, hello in enumerate(hellos)}


def _has_lengths(frames: Frames, lengths: Mapping[int, int]) -> bool:
    """Whether there are bytes of these lengths, by roster number."""
    for k, length in lengths.items():
        frame = frames.get(str(k))
        # Of an array its size counts, whatever its shape: one without a dimension has no length.
        size = frame.size if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 else -1
        if (len(frame) if isinstance(frame, bytes) else size) != length:
            return False
    return True


# --- what a recipient does at each step ---------------------------------------------------------------------------


class Answer(NamedTuple):
    """How a role answers one kind of message; ``kind`` is the reply's."""

    kind: str
    of: Callable[[Any, int, Frames], Reply]


def _single(frame: bytes | None) -> Reply:
    return Reply() if frame is None else Reply({"frame": frame})


def _only(frames: Frames) -> bytes:
    frame = _bytes(frames.get("frame"))
    if frame is None:
        raise ProtocolError("coordinator", "sends a message without its frame")
    return frame


def _numbered(frames: Frames) -> dict[int, bytes]:
    """Frames by roster number."""
    frame_by_number = {}
    for name, frame in frames.items():
        content = _bytes(frame)
        if content is None or not (name.isascii() and name.isdigit() and len(name) < 6):
            raise ProtocolError("coordinator", "sends frames that have no roster numbers for names")
        frame_by_number[int(name)] = content
    return frame_by_number


def _hellos(frames: Frames) -> dict[str, bytes]:
    """Hellos by place, in order."""
    hello_by_place = {place: _bytes(frames[place]) for place in sorted(frames)}
    if None in hello_by_place.values():
        raise ProtocolError("coordinator", "sends hellos that are not bytes")
    return {place: hello for place, hello in hello_by_place.items() if hello is not None}


def _meet(role: Endpoint, t: int, frames: Frames) -> Reply:
    role.meet(_hellos(frames).values())
    return Reply()


def _meet_each(role: SumServer, t: int, frames: Frames) -> Reply:
    """Take hellos one by one and say whose were refused: a malformed one is its sender's absence."""
    refused = {}
    for place, hello in _hellos(frames).items():
        try:
            role.meet([hello])
        except ProtocolError as wrong:
            refused[place] = wrong.reason
    return Reply(NOTHING, refused)


def _deliver(role: MaskingParty, t: int, frames: Frames) -> Reply:
    role.deliver(t, _only(frames))
    return Reply()


def _receive(role: SumServer, t: int, frames: Frames) -> Reply:
    present = role.receive(t, _numbered(frames))
    return Reply({str(k): frame for k, frame in present.items()}, role.left_out)


def _noise(role: NoiseServer, t: int, frames: Frames) -> Reply:
    return _single(role.sample_noise(t, _only(frames) if frames else None))


_SUM_SERVER = {
    "meet": Answer("ok", _meet_each),
    "receive": Answer("present", _receive),
    "partial": Answer("partial", lambda role, t, frames: _single(role.partial(t, _numbered(frames)))),
    "finish": Answer("total", lambda role, t, frames: Reply({"total": role.finish(t, _numbered(frames))})),
}
ANSWERS: Mapping[type[Endpoint], Mapping[str, Answer]] = {
    MaskingParty: {
        "meet": Answer("ok", _meet),
        "prepare": Answer("frame", lambda role, t, frames: _single(role.prepare(t))),
        "deliver": Answer("delivered", _deliver),
        "reveal": Answer("frame", lambda role, t, frames: _single(role.reveal(t, _only(frames)))),
    },
    SharingParty: {"meet": Answer("ok", _meet)},
    SumServer: _SUM_SERVER,
    NoiseServer: {**_SUM_SERVER, "noise": Answer("noise", _noise)},
}
"""By role and kind of message: how it is answered, in one process and behind a network alike.

``hello`` is not among them: a role is made to answer it, and :attr:`Endpoint.hello` is the answer.
"""


def submission(role: MaskingParty | SharingParty, t: int, vector: npt.ArrayLike) -> Reply:
    """A party's answer to the round's question, which is this vector."""
    if isinstance(role, MaskingParty):
        return _single(role.submit(t, vector))
    return Reply({str(k): frame for k, frame in role.share(t, vector).items()})
