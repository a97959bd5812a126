"""Secure sums by pairwise masks that cancel (Bonawitz et al. 2017; Bell et al. 2020 for many parties).

In round t party i sends the one server

    y_i = x_i + e_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij)    (mod 2^64), j over her mask partners,

where e_i is her share of the noise, N_Z(σ²/h); s_ij comes from X25519 keys of this round, and b_i is a random
self-mask. Before, she gave her neighbours sealed Shamir shares of her round key and of b_i. Of a party in the sum
the survivors open b_i; of one who dropped they open the round key, so that her masks can be taken off. A holder
gives one of the two, never both: with 2T > k + 1 + c no server working with c holders has both.

    party.prepare(t) → server.relay(t) → party.deliver(t)     may run ahead: it needs no data
    party.submit(t, x) → server.survivors(t) → party.reveal(t) → server.finish(t)

Cost per party and round with k neighbours and l partners: 8d + 392k + 295l bytes sent, 2l X25519 exchanges and 2l
AES streams of 8d bytes. With 32-bit rings (:mod:`quietgrad.federation.secure.ring`) it is 4d, and mod 2^32.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from quietgrad.core.noise.rng import SecureStream
from quietgrad.federation.secure import secret_sharing
from quietgrad.federation.secure.channel import FRAME_OVERHEAD, Endpoint, FrameType, derive
from quietgrad.federation.secure.discrete_gaussian import Vector
from quietgrad.federation.secure.graph import MaskingNeighbours, masking_neighbours
from quietgrad.federation.secure.identity import (
    WITNESS_BYTES,
    DropoutError,
    Hello,
    ProtocolError,
    pack_members,
    unpack_members,
)
from quietgrad.federation.secure.identity import SurvivorAttestation as Attestation
from quietgrad.federation.secure.ring import add_rounded, add_streams
from quietgrad.federation.secure.secret_sharing import KEY_BYTES, PAIR_BYTES, SHARE_BYTES, ShareCommitments, Shares

_SHARES = 2 * SHARE_BYTES
_ENVELOPE = KEY_BYTES + _SHARES + WITNESS_BYTES
SEALED_BYTES = _ENVELOPE + FRAME_OVERHEAD


@dataclass
class _PartyRound:
    """A party's state of one round, from prepare to reveal."""

    key: X25519PrivateKey
    self_mask: bytes
    shares: dict[int, Shares]
    members: tuple[int, ...] = ()
    mask: Any = None
    submitted: bool = False


class MaskingParty(Endpoint):
    """A data holder in a masked sum."""

    def _begin(self) -> None:
        self._rounds: dict[int, _PartyRound] = {}
        self._prepared, self._server = -1, self.terms.parties
        self._server_name = self.roster.names[self._server]
        self.picks = self.terms.graph.draw(self.me)
        self._picks_of = {self.me: self.picks}
        self.witness: Attestation | None = None
        """What the server said of the last round that this party helped to open, perhaps with other keys."""

    def _met(self, parsed_hello: Hello, secret: bytes, hello: bytes) -> None:
        if parsed_hello.sender < self.terms.parties:
            if not self.terms.graph.is_drawn(parsed_hello.sender, parsed_hello.picks):
                raise ProtocolError(self.roster.names[parsed_hello.sender], "hello names impossible neighbours")
            self._picks_of[parsed_hello.sender] = parsed_hello.picks
            self.__dict__.pop("_near", None)

    @cached_property
    def _near(self) -> MaskingNeighbours:
        return masking_neighbours(self.terms.graph, self._picks_of)[self.me]

    def prepare(self, t: int) -> bytes:
        """Make this round's key and self-mask and share them; rounds only ever go up."""
        if t <= self._prepared:
            raise ProtocolError(self.name, f"round {t} was already prepared; a retried round needs a new number")
        graph, near = self.terms.graph, self._near
        if len(near.holders) + 1 < graph.threshold:
            missing = [j for j in range(self.terms.parties) if j != self.me and j not in self._picks_of]
            raise DropoutError(
                [self.roster.names[j] for j in missing if graph.complete or j in self.picks],
                f"missing; {len(near.holders)} of {graph.neighbours} neighbours are left to hold shares, "
                f"{graph.threshold - 1} needed",
            )
        self._channel(self._server)  # must have said hello
        self._prepared = t
        # The round before may still be under way; older ones were aborted: their secrets are forgotten.
        self._rounds = dict(list(self._rounds.items())[-1:])
        key, self_mask = X25519PrivateKey.generate(), os.urandom(KEY_BYTES)
        public = key.public_key().public_bytes_raw()
        shares, commitments = secret_sharing.deal(
            key.private_bytes_raw(), public, self_mask, threshold=graph.threshold, holders=graph.neighbours + 1
        )
        self._rounds[t] = _PartyRound(key, self_mask, {self.me: shares[0]})
        witness, holders = Attestation.pack(self.witness), set(near.holders)
        sealed = [commitments.signed(self._identity, self.context, t)]
        for j in near.to:
            given = b"".join(shares[graph.rank(self.me, j, self.picks)]) if j in holders else bytes(_SHARES)
            sealed.append(self._seal(j, FrameType.ENVELOPE, t, public + given + witness))
        return self._seal(self._server, FrameType.PREPARE, t, b"".join(sealed))

    def deliver(self, t: int, frame: bytes) -> None:
        """Open the envelopes of the round's members and compute the round's mask, before there are data."""
        state = self._round(t)
        if state.members:
            raise ProtocolError(self._server_name, f"delivered round {t} twice")
        payload = self._open(self._server, FrameType.DELIVER, t, frame)
        members, rest = self._read_members(payload)
        here, graph = set(members), self.terms.graph
        expected = range(self.terms.parties) if graph.complete else self.picks
        if not here.isdisjoint(j for j in expected if j not in self._picks_of):
            raise ProtocolError(self._server_name, "names a neighbour as a member and did not pass her hello on")
        senders = [j for j in self._near.source if j in here]
        size = PAIR_BYTES + SEALED_BYTES
        if len(rest) != size * len(senders):
            raise ProtocolError(self._server_name, "delivered envelopes of a wrong length")
        keys, dealers = {}, set(self._near.dealers)
        for k, j in enumerate(senders):
            row = rest[k * size : (k + 1) * size]
            envelope = self._open(j, FrameType.ENVELOPE, t, row[PAIR_BYTES:])
            keys[j] = self._read_envelope(j, t, state, envelope, row[:PAIR_BYTES] if j in dealers else None)
        streams, packed = [(self_mask(state.self_mask), 1)], pack_members(members, self.terms.parties)
        for j in self._near.partners:
            if j in here:
                stream = pair_mask(self, self.roster.names[j], state.key, keys[j], packed)
                streams.append((stream, 1 if j > self.me else -1))
        mask = np.zeros(self.terms.dimension, self.terms.words)
        add_streams(mask, streams, t)
        state.members, state.mask = members, mask

    def _read_envelope(self, j: int, t: int, state: _PartyRound, envelope: bytes, pair: bytes | None) -> bytes:
        """Check what a neighbour sent, keep her shares if she dealt any (``pair``: the hashes), return her key."""
        name = self.roster.names[j]
        if len(envelope) != _ENVELOPE:
            raise ProtocolError(name, "envelope has a wrong length")
        key_share = envelope[KEY_BYTES : KEY_BYTES + SHARE_BYTES]
        self_share = envelope[KEY_BYTES + SHARE_BYTES : KEY_BYTES + _SHARES]
        if pair is not None:
            if secret_sharing.pair_hash(key_share, self_share) != pair:
                raise ProtocolError(
                    name, f"dealt shares that are not those committed to, or {self._server_name} altered the hashes"
                )
            state.shares[j] = key_share, self_share
        theirs = Attestation.unpack(envelope[KEY_BYTES + _SHARES :])
        if theirs is not None and theirs.contradicts(self.witness):
            if theirs.is_from(self.roster.keys[self._server]):
                two = f"two lists of survivors of round {theirs.round}, one for us and one for {name}"
                raise ProtocolError(self._server_name, f"signed {two}")
            raise ProtocolError(name, f"shows survivors of round {theirs.round} that the server never signed")
        return envelope[:KEY_BYTES]

    def check_delivered(self, t: int) -> None:
        """Raise unless a vector can be submitted in round t."""
        state = self._round(t)
        if state.mask is None or state.submitted:
            raise ProtocolError(self.name, f"round {t} is not delivered yet, or was already submitted")

    def submit(self, t: int, vector: npt.ArrayLike) -> bytes:
        """Encode the vector, add this party's share of the noise and the mask, and seal it for the server."""
        self.add(t, vector)
        return self.sealed(t)

    def add(self, t: int, vector: npt.ArrayLike) -> None:
        """Encode the vector and add it and this party's share of the noise to the round's mask.

        Long vectors are let go of before they are sealed: then no two of them are held.
        """
        self.check_delivered(t)
        state = self._round(t)
        assert state.mask is not None
        masked, terms, share = state.mask, self.terms, self._noise_share
        if terms.ring == 32:
            share.add_to(masked, t)  # first: it refuses a round whose noise or dither was drawn before
            add_rounded(masked, vector, bound=terms.bound, step=terms.step, dither=share.dither, t=t)
        else:
            masked += terms.encoded(vector)
            masked += share.draw(t)
        state.submitted = True

    def sealed(self, t: int) -> bytes:
        """Seal what :meth:`add` made, once."""
        state = self._round(t)
        if state.mask is None or not state.submitted:
            raise ProtocolError(self.name, f"round {t} has no vector to be sealed")
        masked, state.mask = state.mask, None
        return self._seal(self._server, FrameType.MASKED, t, masked.data.cast("B"))

    def reveal(self, t: int, frame: bytes) -> bytes:
        """Give one share of each dealer: of the self-mask if she is in the sum, of the round key if she dropped.

        Refuses when the sum would have fewer parties than the noise was planned for, and answers only once.
        """
        state = self._round(t)
        payload = self._open(self._server, FrameType.SURVIVORS, t, frame)
        survivors, signature = self._read_members(payload)
        if not state.submitted or not set(survivors) <= set(state.members):
            raise ProtocolError(self._server_name, f"asks to open round {t} for others than its members")
        attestation = Attestation.of(self.context, t, payload[: len(payload) - len(signature)], signature)
        if not attestation.is_from(self.roster.keys[self._server]):
            raise ProtocolError(self._server_name, f"did not sign the survivors of round {t}")
        # Deleted before a share leaves: with a second list of survivors, the holders would open both secrets of a
        # dealer, and with them her vector.
        del self._rounds[t]
        self.witness, here = attestation, set(survivors)
        given = [shares[j in here] for j, shares in sorted(state.shares.items())]
        return self._seal(self._server, FrameType.REVEAL, t, b"".join(given))

    def _round(self, t: int) -> _PartyRound:
        if t not in self._rounds:
            raise ProtocolError(self.name, f"round {t} was not prepared, or is over")
        return self._rounds[t]

    def _read_members(self, payload: bytes) -> tuple[tuple[int, ...], bytes]:
        members, rest = unpack_members(payload, self.terms.parties)
        if self.me not in members:
            raise ProtocolError(self._server_name, "names members who are not on the roster, or leaves us out")
        revoked = self._revoked()
        if listed := [name for i in members if (name := self.roster.names[i]) in revoked]:
            # Not only among neighbours: in a sum with a revoked party, her share of the noise would not count.
            raise ProtocolError(listed[0], f"is revoked here ({revoked[listed[0]]}), and a member of the sum")
        if len(members) < self.terms.least_parties:
            left = f"{len(members)} parties are left and the noise needs {self.terms.least_parties}"
            raise DropoutError(self._missing(members), f"missing; {left}")
        return members, rest


def self_mask(secret: bytes) -> SecureStream:
    return SecureStream(secret, "self mask")


def pair_mask(role: Endpoint, peer: str, key: X25519PrivateKey, public: bytes, members: bytes) -> SecureStream:
    """PRG(s_ij), by rounds; bound to the run and the packed members, so different lists never cancel."""
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError(peer, "round key is degenerate") from error
    seed = derive(shared, salt=role.context, info=b"pair mask" + members)
    return SecureStream(seed, "pair mask")


_NO_PAIR = bytes(PAIR_BYTES)


@dataclass
class _ServerRound:
    """The server's state of one round."""

    members: tuple[int, ...]
    statements: dict[int, ShareCommitments]
    total: Any = None
    survivors: tuple[int, ...] = ()


class MaskingServer(Endpoint):
    """The aggregator, which learns only the noisy sum.

    It relays sealed envelopes and adds masked vectors.

    One round by hand; in a federation every frame below is a message over the network.

    >>> from quietgrad.federation import Identity, MaskingParty, MaskingServer, Roster, SecureSumConfig
    >>> people = [Identity("north"), Identity("south"), Identity("server")]
    >>> terms = SecureSumConfig("masks", parties=2, dimension=1, bound=1.0, sigma=0.0)
    >>> roster, run = Roster.of(people), b"a name that is new in every run"
    >>> parties = [MaskingParty(person, roster, terms, run) for person in people[:2]]
    >>> server = MaskingServer(people[2], roster, terms, run)
    >>> server.meet([party.hello for party in parties])
    >>> for party in parties:
    ...     party.meet(server.introductions()[party.me])
    >>> delivery = server.relay(0, {p.me: p.prepare(0) for p in parties})
    >>> for p in parties:
    ...     p.deliver(0, delivery[p.me])
    >>> questions = server.survivors(0, {p.me: p.submit(0, [0.25 + p.me]) for p in parties})
    >>> server.finish(0, {p.me: p.reveal(0, questions[p.me]) for p in parties}).tolist()
    [1.25]
    """

    def _begin(self) -> None:
        self._rounds: dict[int, _ServerRound] = {}
        self._hellos: dict[int, bytes] = {}
        self._picks_of: dict[int, tuple[int, ...]] = {}
        self.proved: dict[str, str] = {}
        """Who returned false shares in the round opened last, by name: proved by what they had accepted."""

    def _met(self, parsed_hello: Hello, secret: bytes, hello: bytes) -> None:
        if not self.terms.graph.is_drawn(parsed_hello.sender, parsed_hello.picks):
            raise ProtocolError(self.roster.names[parsed_hello.sender], "hello names impossible neighbours")
        self._hellos[parsed_hello.sender], self._picks_of[parsed_hello.sender] = hello, parsed_hello.picks
        self.__dict__.pop("_near", None)

    @cached_property
    def _near(self) -> dict[int, MaskingNeighbours]:
        return masking_neighbours(self.terms.graph, self._picks_of)

    def introductions(self) -> dict[int, list[bytes]]:
        """Return the hellos that each party needs: the server's, and those of her neighbours."""
        needed = {i: sorted({*near.to, *near.source}) for i, near in self._near.items()}
        return {i: [self.hello, *(self._hellos[j] for j in others)] for i, others in needed.items()}

    def relay(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take the parties' prepare frames and return what to deliver to each.

        The absent are left out, and so are the senders of malformed frames, who are named in :attr:`left_out`.
        """
        near, graph = self._near, self.terms.graph
        size = ShareCommitments.size(graph.neighbours + 1)

        def read(i: int, frame: bytes) -> tuple[ShareCommitments, dict[int, bytes]]:
            payload = self._open(i, FrameType.PREPARE, t, frame)
            if len(payload) != size + len(near[i].to) * SEALED_BYTES:
                raise ProtocolError(self.roster.names[i], "prepare has a wrong length")
            statement = ShareCommitments.read(payload[:size], self.roster.keys[i], self.context, t)
            if statement is None:
                raise ProtocolError(self.roster.names[i], "did not sign the hashes of her shares")
            starts = range(size, len(payload), SEALED_BYTES)
            return statement, {j: payload[at : at + SEALED_BYTES] for j, at in zip(near[i].to, starts, strict=True)}

        self.left_out = {}
        prepared = self._read_all(frames, read)
        self._require(prepared, self.terms.least_parties, "prepared")
        statements = {i: statement for i, (statement, _) in prepared.items()}
        envelopes = {i: sealed for i, (_, sealed) in prepared.items()}
        members = tuple(statements)
        self._rounds = dict(list(self._rounds.items())[-1:])  # older ones were aborted
        self._rounds[t] = _ServerRound(members, statements)
        head, out = pack_members(members, self.terms.parties), {}
        for i in members:
            rows, dealers = [head], set(near[i].dealers)
            for j in near[i].source:
                if j in statements:
                    rank = graph.rank(j, i, self._picks_of[j]) if j in dealers else 0
                    rows.append(statements[j].pairs[rank] if j in dealers else _NO_PAIR)
                    rows.append(envelopes[j][i])
            out[i] = self._seal(i, FrameType.DELIVER, t, b"".join(rows))
        return out

    def survivors(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Add the masked vectors and return the question, to each survivor, who is in the sum.

        A party whose frame is malformed has dropped, and is named in :attr:`left_out`.
        """
        state = self._round(t)
        members = set(state.members)

        total: Any = np.zeros(self.terms.dimension, self.terms.words)

        def add(i: int, frame: bytes) -> None:
            nonlocal total
            if i not in members:
                raise ProtocolError(self.roster.names[i], f"is not a member of round {t}")
            total += self._words(i, self._open(i, FrameType.MASKED, t, frame))

        # A party whose vector cannot be read has dropped: the survivors open her round key, as Bonawitz et al. do.
        added = self._read_all(frames, add)
        self._require(added, self.terms.parties - self.terms.tolerated_dropouts, "submitted")
        state.total, state.survivors = total, tuple(added)
        packed = pack_members(state.survivors, self.terms.parties)
        payload = packed + Attestation.sign(self._identity, self.context, t, packed)
        return {i: self._seal(i, FrameType.SURVIVORS, t, payload) for i in state.survivors}

    def finish(self, t: int, frames: Mapping[int, bytes]) -> Vector:
        """Open the masks that did not cancel and return the noisy sum.

        A share that is not the one its dealer committed to is left out and its holder named in :attr:`proved`; if
        enough others are left the sum is opened all the same. A party whose frame is malformed revealed nothing.
        """
        state = self._round(t)
        if state.total is None:
            raise ProtocolError(self.name, f"round {t} has no submissions yet")
        self.proved = {}
        revealed = self._revealed(state, t, frames)
        if self.terms.graph.complete:
            self._require(revealed, self.terms.threshold, "revealed")
        shares = self._verified(state, revealed)
        survivors, masks = set(state.survivors), list[tuple[SecureStream, int]]()
        for j in state.members:
            secret = self._opened(j, shares[j], set(revealed))
            if secret is None or not state.statements[j].opens(secret, self_mask=j in survivors):
                self.proved[self.roster.names[j]] = why = (
                    "dealt false shares: they have her hashes and do not open her secret"
                )
                raise ProtocolError(self.roster.names[j], why)
            if j in survivors:
                masks.append((self_mask(secret), -1))
            else:
                masks += self._lost_masks(state, j, X25519PrivateKey.from_private_bytes(secret))
        total = state.total.copy()
        add_streams(total, masks, t)
        released = self.terms.released(total)
        del self._rounds[t]
        return released

    def _revealed(self, state: _ServerRound, t: int, frames: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        """By holder and dealer, the shares that were returned."""
        members, survivors, size = set(state.members), set(state.survivors), SHARE_BYTES

        def read(i: int, frame: bytes) -> dict[int, bytes]:
            if i not in survivors:
                raise ProtocolError(self.roster.names[i], f"is not in the sum of round {t}")
            payload = self._open(i, FrameType.REVEAL, t, frame)
            dealers = sorted([i, *(j for j in self._near[i].dealers if j in members)])
            if len(payload) != size * len(dealers):
                raise ProtocolError(self.roster.names[i], "reveal has a wrong length")
            return {j: payload[k * size : (k + 1) * size] for k, j in enumerate(dealers)}

        return self._read_all(frames, read)

    def _verified(
        self, state: _ServerRound, revealed: Mapping[int, Mapping[int, bytes]]
    ) -> dict[int, dict[int, bytes]]:
        """By dealer and rank, the returned shares that the dealer committed to; false holders are noted."""
        graph, survivors = self.terms.graph, set(state.survivors)
        shares_by_dealer: dict[int, dict[int, bytes]] = {j: {} for j in state.members}
        for i, shares in revealed.items():
            for j, share in shares.items():
                rank, kind = graph.rank(j, i, self._picks_of[j]), b"self" if j in survivors else b"key"
                if state.statements[j].has(rank, kind=kind, share=share):
                    shares_by_dealer[j][rank] = share
                else:
                    whose = "her own" if i == j else f"{self.roster.names[j]}'s"
                    self.proved[self.roster.names[i]] = f"returned a false share of {whose} secret"
        return shares_by_dealer

    def _opened(self, j: int, shares: Mapping[int, bytes], here: set[int]) -> bytes | None:
        if len(shares) >= self.terms.threshold:
            return secret_sharing.reconstruct(shares, self.terms.threshold)
        name, why = self.roster.names[j], f"{len(shares)} true shares of {self.terms.threshold} needed"
        if self.proved:
            raise ProtocolError(", ".join(self.proved), f"returned false shares; of {name}'s there are {why}")
        away = [self.roster.names[i] for i in self._near[j].holders if i not in here]
        raise DropoutError(away, f"missing; of {name}'s secret there are {why}")

    def _lost_masks(
        self, state: _ServerRound, dropped: int, key: X25519PrivateKey
    ) -> list[tuple[SecureStream, int]]:
        """Return the streams and signs that take a dropped party's pair masks off the survivors' vectors."""
        packed, lost = pack_members(state.members, self.terms.parties), []
        for i in set(self._near[dropped].partners) & set(state.survivors):
            stream = pair_mask(self, self.roster.names[i], key, state.statements[i].public, packed)
            lost.append((stream, -1 if dropped > i else 1))
        return lost

    def _round(self, t: int) -> _ServerRound:
        if t not in self._rounds:
            raise ProtocolError(self.name, f"round {t} was not prepared, or is over")
        return self._rounds[t]

    def _require(self, present: Iterable[int], least: int, what: str) -> None:
        here = set(present)
        if len(here) < least:
            left = f"{len(here)} of {self.terms.parties} {what}, {least} needed"
            raise DropoutError(self._missing(here), f"missing; {left}")
