"""Authenticated frames between two roles, and the endpoint that every role of a protocol is built on.

A frame is a header and an AES-256-GCM ciphertext. The header (run, round, kind, sender, receiver, counter) is
authenticated with it; each direction of each pair has its own key and counter. A frame that was altered,
replayed, reordered, sent in another run or round, or meant for another is refused by the sender's name.

A noise share is what one role draws on its own, from a key that no other role sees.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from quietgrad.core.noise.rng import SecureStream, fresh_key, seed_key
from quietgrad.federation.secure.discrete_gaussian import Words, discrete_gaussian
from quietgrad.federation.secure.identity import Hello, Identity, ProtocolError, Roster, read_hello, write_hello
from quietgrad.federation.secure.ring import CHUNK, CHUNK_BLOCKS, AnyWords, in_chunks
from quietgrad.federation.secure.terms import SecureSumConfig

_HEADER = struct.Struct("<4sB16sQHHQI")
_MAGIC = b"QGF1"
_TAG_BYTES = 16
FRAME_OVERHEAD = _HEADER.size + _TAG_BYTES
T = TypeVar("T")


class FrameType(IntEnum):
    """Kinds of frames. A frame of one kind is never accepted as another."""

    ENVELOPE = 1  # masks: party to party, through the server: round key and shares
    PREPARE = 2  # masks: party to server: all envelopes
    DELIVER = 3  # masks: server to party: the envelopes for her
    MASKED = 4  # masks: party to server
    SURVIVORS = 5  # masks: server to party: who is in the sum
    REVEAL = 6  # masks: party to server: shares that unmask the sum
    SHARE = 7  # servers, mpc: party to server
    PRESENT = 8  # servers, mpc: server to server: whose shares arrived
    PARTIAL = 9  # servers, mpc: server to the first server
    NOISE = 10  # mpc: server to the previous server


class ReceivedMessage(NamedTuple):
    """One decrypted message that a role received."""

    role: str
    kind: FrameType
    round: int
    sender: str
    payload: bytes


@dataclass
class TranscriptRecorder:
    """Keeps every decrypted message that roles received, for tests."""

    seen: list[ReceivedMessage] = field(default_factory=list)

    def of(self, role: str, kind: FrameType) -> list[ReceivedMessage]:
        return [s for s in self.seen if s.role == role and s.kind == kind]


def derive(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=info).derive(secret)


class Channel:
    """One end of an authenticated channel between two numbered roles; ``limit`` is the largest payload in bytes.

    >>> a = Channel(b"s" * 32, bytes(16), 0, 1, "b", limit=100)
    >>> b = Channel(b"s" * 32, bytes(16), 1, 0, "a", limit=100)
    >>> bytes(b.open(FrameType.SHARE, 7, a.seal(FrameType.SHARE, 7, b"hello")))
    b'hello'
    """

    def __init__(self, secret: bytes, run: bytes, me: int, peer: int, peer_name: str, *, limit: int) -> None:
        self._run, self._me, self._peer, self.peer_name, self._limit = run, me, peer, peer_name, limit
        self._out = AESGCM(derive(secret, salt=run, info=struct.pack("<9sHH", b"direction", me, peer)))
        self._in = AESGCM(derive(secret, salt=run, info=struct.pack("<9sHH", b"direction", peer, me)))
        self._sent, self._received = 0, 0
        self._process = os.getpid()

    def seal(self, kind: FrameType, round: int, payload: bytes | memoryview) -> bytes:
        """A frame with the next counter; no counter is ever used twice."""
        if os.getpid() != self._process:
            # A forked copy would encrypt other text under the same counters, which breaks AES-GCM.
            raise RuntimeError("channel used in a forked process. Set up a new run there.")
        self._sent += 1
        header = _HEADER.pack(
            _MAGIC, kind, self._run, round, self._me, self._peer, self._sent, len(payload) + _TAG_BYTES
        )
        return header + self._out.encrypt(_nonce(self._sent), payload, header)

    def open(self, kind: FrameType, round: int, frame: bytes) -> bytes:
        """Verify and decrypt the peer's next frame, which must be of this kind and round."""
        if not _HEADER.size + _TAG_BYTES <= len(frame) <= FRAME_OVERHEAD + self._limit:
            raise ProtocolError(self.peer_name, f"frame of {len(frame)} bytes is outside the agreed size")
        header = bytes(frame[: _HEADER.size])
        magic, its_kind, run, its_round, sender, receiver, counter, length = _HEADER.unpack(header)
        if magic != _MAGIC or length != len(frame) - _HEADER.size:
            raise ProtocolError(self.peer_name, "frame is malformed")
        if run != self._run:
            raise ProtocolError(self.peer_name, "frame is of another run")
        if (sender, receiver) != (self._peer, self._me):
            raise ProtocolError(self.peer_name, "frame is from or for another role")
        try:
            payload = self._in.decrypt(_nonce(counter), memoryview(frame)[_HEADER.size :], header)
        except InvalidTag as error:
            raise ProtocolError(self.peer_name, "frame was altered or sealed with another key") from error
        if counter <= self._received:
            raise ProtocolError(self.peer_name, f"frame {counter} is a replay or out of order")
        if (its_kind, its_round) != (kind, round):
            what = f"kind {its_kind} of round {its_round}, not {kind.name} of round {round}"
            raise ProtocolError(self.peer_name, f"frame is {what}")
        self._received = counter
        return payload


class Endpoint:
    """A role in a run: its identity, the agreed terms, and a channel to every role it has met.

    Args:
        run: the name of the run; a new one for every run (16 random bytes are good).
        view: a recorder, in tests.
        seed: fixes the noise of a role that adds some, for tests only; masks and neighbours stay fresh.
        noise: this role's noise, if it goes on from an earlier set-up.
        revoked: by name, why members are no longer trusted. This role takes part in no sum with them.
    """

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        terms: SecureSumConfig,
        run: bytes,
        *,
        view: TranscriptRecorder | None = None,
        seed: int | None = None,
        noise: NoiseShare | None = None,
        revoked: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        if len(roster.names) != terms.parties + terms.server_count:
            needed = f"{terms.parties} parties and {terms.server_count} server(s)"
            raise ValueError(f"roster of {len(roster.names)}: must be {needed}.")
        if identity.public != roster.keys[roster.index(identity.name)]:
            raise ValueError(f"{identity.name}: the roster has another key under this name.")
        self.name, self.me, self.roster, self.terms = identity.name, roster.index(identity.name), roster, terms
        self.context = hashlib.sha256(terms.digest(run) + roster.digest).digest()
        self._identity, self._view, self._seed, self._given_noise = identity, view, seed, noise
        self._revoked = revoked
        self._exchange = X25519PrivateKey.generate()
        self._channels: dict[int, Channel] = {}
        self.left_out: dict[str, str] = {}
        """By name, the parties whose frame of the round under way was malformed: they count as absent."""
        self.picks: tuple[int, ...] = ()
        self._begin()
        public = self._exchange.public_key().public_bytes_raw()
        self.hello = write_hello(identity, roster, self.context, public, self.picks)

    @property
    def servers(self) -> range:
        return range(self.terms.parties, len(self.roster.names))

    def meet(self, hellos: Iterable[bytes]) -> None:
        """Verify hellos and derive the keys shared with each of their senders; one's own hello is skipped.

        A role needs the hellos of those it exchanges frames with: a party those of the servers, and with masks
        of its neighbours; a server all of them.
        """
        revoked = self._revoked()
        for hello in hellos:
            parsed_hello = read_hello(hello, self.roster, self.context)
            peer = parsed_hello.sender
            if peer == self.me:
                continue
            if (name := self.roster.names[peer]) in revoked:
                raise ProtocolError(name, f"is revoked here ({revoked[name]})")
            if peer in self._channels:
                raise ProtocolError(self.roster.names[peer], "said hello twice in one run")
            try:
                shared = self._exchange.exchange(X25519PublicKey.from_public_bytes(parsed_hello.exchange_key))
            except ValueError as error:
                raise ProtocolError(self.roster.names[peer], "hello has a degenerate exchange key") from error
            first, second = sorted([self.hello, bytes(hello)])  # both ends hash the two in the same order
            secret = derive(shared, salt=hashlib.sha256(first + second).digest(), info=b"pair")
            # Before the channel is stored: this refuses a hello that the role cannot use.
            self._met(parsed_hello, secret, bytes(hello))
            self._channels[peer] = Channel(
                secret, self.context[:16], self.me, peer, self.roster.names[peer], limit=self._largest_payload()
            )

    @cached_property
    def _noise_share(self) -> NoiseShare:
        return self._given_noise or NoiseShare(self.terms, self.me, self._seed)

    def _begin(self) -> None:
        """Hook: what a role keeps, before any round."""

    def _largest_payload(self) -> int:
        return 8 * self.terms.dimension + 512 * len(self.roster.names) + 1024

    def _met(self, parsed_hello: Hello, secret: bytes, hello: bytes) -> None:
        """Hook: derive more keys from a pair's secret, or remember what a hello says."""

    def _seal(self, peer: int, kind: FrameType, round: int, payload: bytes | memoryview) -> bytes:
        return self._channel(peer).seal(kind, round, payload)

    def _open(self, peer: int, kind: FrameType, round: int, frame: bytes) -> bytes:
        payload = self._channel(peer).open(kind, round, frame)
        if self._view is not None:
            self._view.seen.append(ReceivedMessage(self.name, kind, round, self.roster.names[peer], bytes(payload)))
        return payload

    def _read_all(self, frames: Mapping[int, bytes], read: Callable[[int, bytes], T]) -> dict[int, T]:
        """Read the frames of parties, and return their contents by roster number.

        A party whose frame ``read`` refuses counts as absent and is named in :attr:`left_out`: one malformed frame
        must not end a round that a quorum can finish.
        """
        contents: dict[int, T] = {}
        revoked = self._revoked()  # perhaps since they met
        for i in sorted(frames):
            if not 0 <= i < self.terms.parties:
                raise ProtocolError(self.name, f"frames are keyed by roster numbers below {self.terms.parties}")
            if (name := self.roster.names[i]) in revoked:
                self.left_out[name] = f"is revoked here ({revoked[name]})"
                continue
            try:
                contents[i] = read(i, frames[i])
            except ProtocolError as refused:
                self.left_out[self.roster.names[i]] = refused.reason
        return contents

    def _check_servers(self) -> None:
        """Raise if a server was revoked since this role met it."""
        revoked = self._revoked()
        for name in self.roster.names[self.terms.parties :]:
            if name in revoked:
                raise ProtocolError(name, f"is revoked here ({revoked[name]})")

    def _words(self, sender: int, payload: bytes) -> AnyWords:
        """The d words of a payload, refused by name when there are more or fewer."""
        width = self.terms.ring // 8
        if len(payload) != width * self.terms.dimension:
            raise ProtocolError(self.roster.names[sender], f"vector has {len(payload)} bytes, not {width}d")
        return np.frombuffer(payload, self.terms.words)

    def _channel(self, peer: int) -> Channel:
        if peer not in self._channels:
            raise ProtocolError(self.roster.names[peer], "has not said hello in this run")
        return self._channels[peer]

    def _missing(self, present: Iterable[int]) -> list[str]:
        here = set(present)
        return [self.roster.names[i] for i in range(self.terms.parties) if i not in here]


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")


class NoiseShare:
    """Noise of one role: discrete Gaussian, a fresh block of AES-256-CTR every round, or correlated over rounds.

    A correlated share is a real Gaussian one, made by the recursion of
    :class:`~quietgrad.core.noise.correlated.BufferedToeplitzRecurrence` and rounded to the grid. It belongs to the
    run and not to the keys of one set-up: round t is row t, also if rounds in between were missed or lost. A role
    that restarts with a new key begins an independent share, which protects as well (``docs/correlated.md``,
    absences); one round must never be answered under two keys. With a seed, for tests, the noise hides nothing.
    """

    def __init__(self, terms: SecureSumConfig, role: int, seed: int | None, key: bytes | None = None) -> None:
        if seed is not None:
            key = hashlib.sha256(seed_key(seed) + role.to_bytes(4, "big")).digest()
        key = fresh_key() if key is None else key
        self._stream, self._last, self._correlated = SecureStream(key, "noise share"), -1, terms.correlated
        self.dither = SecureStream(key, "dither")
        """Block t rounds the vector of round t."""
        self._dimension, self._sigma = terms.dimension, terms.share_sigma if terms.sigma > 0.0 else 0.0
        self._rows = None if terms.correlated is None else terms.correlated.rows(key, "noise share")

    def add_to(self, out: npt.NDArray[np.uint32], t: int) -> None:
        """out += the share of round t mod 2^32; a round draws once and rounds only go up."""
        self._turn(t)
        noise = discrete_gaussian(self._sigma)

        def work(first: int, last: int) -> None:
            noise.add_to(out[first:last], self._stream, t + first // CHUNK * CHUNK_BLOCKS)

        in_chunks(len(out), work)

    def draw(self, t: int) -> Words:
        """The share of round t as words mod 2^64; a round draws once and rounds only go up."""
        self._turn(t)
        if not self._sigma:
            return np.zeros(self._dimension, np.uint64)
        if self._rows is not None:
            # Reals are combined first and rounded once: integers combined with fractions would bare residues.
            return np.rint(self._sigma * self._rows.row(t, self._dimension)).astype(np.int64).view(np.uint64)
        return discrete_gaussian(self._sigma).sample(self._stream, t, self._dimension).view(np.uint64)

    def _turn(self, t: int) -> None:
        """Refuse a round whose blocks of the streams were used, or could be."""
        if t >= CHUNK_BLOCKS:
            raise ValueError(
                f"round {t}: must be below 2^48; beyond, chunks of two rounds would share their noise."
            )
        if t <= self._last:
            raise ValueError(f"round {t}: its noise was already drawn; a retried round needs a new number.")
        if self._correlated is not None and t >= self._correlated.releases:
            raise ValueError(f"round {t}: the correlated noise was made for {self._correlated.releases} rounds.")
        self._last = t
