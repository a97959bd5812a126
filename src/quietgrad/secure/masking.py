"""Secure sums by pairwise masks that cancel, with recovery of parties that drop.

Bonawitz et al. (2017), and Bell et al. (2020) for many parties.

In round t party i sends the one server

    y_i = x_i + e_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij)    (mod 2^64), j over her mask partners,

where e_i is her share of the noise, N_Z(σ²/h); s_ij comes from X25519 keys made for this round only, and b_i is
a random self-mask. Before, she gave her neighbours Shamir shares of her round key and of b_i, sealed end to
end, and the server a signed hash of each (``deals.py``). Of a party in the sum the survivors open b_i; of one
who dropped they open the round key, so that her masks can be taken off the others. A party answers once per
round and gives one of the
two, never both: with T shares needed of k + 1 and 2T > k + 1 + c no server working with c holders can have both.
Who are neighbours and partners: everybody for few parties, drawn by each for many (``graph.py``).

One round, one line per message (all frames go through the server):

    party.prepare(t) → server.relay(t) → party.deliver(t)     may run ahead: it needs no data
    party.submit(t, x) → server.survivors(t) → party.reveal(t) → server.finish(t) → party.result(t)

Cost per party and round with k neighbours and l partners drawn: 8d + 392k + 295l bytes sent, 2l X25519
exchanges and 2l AES streams of 8d bytes. Besides k, which grows with log m, only the m/8 bytes of who is present
depend on m.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from quietgrad.privacy.rng import SecureStream
from quietgrad.secure import shamir
from quietgrad.secure.attendance import WITNESS_BYTES, Witness, pack_members, pack_witness, unpack_members
from quietgrad.secure.channel import FRAME_OVERHEAD, Endpoint, Kind, View, derive
from quietgrad.secure.deals import KEY_BYTES, PAIR_BYTES, Deal, pair_hash
from quietgrad.secure.encoding import Vector, Words, decode, encode
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.secure.graph import Neighbourhood, neighbourhoods
from quietgrad.secure.identity import Hello, Identity, Roster
from quietgrad.secure.noise_share import NoiseShare
from quietgrad.secure.terms import Terms

_SHARES = 2 * shamir.SHARE_BYTES
_ENVELOPE = KEY_BYTES + _SHARES + WITNESS_BYTES
SEALED_BYTES = _ENVELOPE + FRAME_OVERHEAD
_NOTHING = bytes(_SHARES)


@dataclass
class _PartyRound:
    """What a party keeps of one round, from prepare to reveal."""

    key: X25519PrivateKey
    self_mask: bytes
    key_shares: dict[int, bytes]
    self_shares: dict[int, bytes]
    members: tuple[int, ...] = ()
    mask: Words | None = None
    submitted: bool = False


class MaskingParty(Endpoint):
    """A data holder in a masked sum.

    Args:
        identity, roster, terms, run, view: see :class:`~quietgrad.secure.channel.Endpoint`.
        seed: fixes the noise, for tests only; the masks and neighbours stay fresh.
        witness: what the server said of the last round that this party helped to open, with other keys.
        noise: this party's share of the noise if it goes on from an earlier set-up.
    """

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        terms: Terms,
        run: bytes,
        *,
        view: View | None = None,
        seed: int | None = None,
        witness: Witness | None = None,
        noise: NoiseShare | None = None,
    ) -> None:
        super().__init__(identity, roster, terms, run, view=view)
        self._noise = noise or NoiseShare(terms, self.me, seed)
        self._rounds: dict[int, _PartyRound] = {}
        self._prepared = -1
        self._server = terms.parties
        self._picks_of = {self.me: self.picks}
        self.witness = witness

    def _draw(self) -> tuple[int, ...]:
        return self.terms.graph.draw(self.me)

    def _met(self, known: Hello, secret: bytes, hello: bytes) -> None:
        if known.sender < self.terms.parties:
            if not self.terms.graph.is_drawn(known.sender, known.picks):
                raise ProtocolError(self.roster.names[known.sender], "hello names impossible neighbours")
            self._picks_of[known.sender] = known.picks
            self.__dict__.pop("_near", None)

    @cached_property
    def _near(self) -> Neighbourhood:
        return neighbourhoods(self.terms.graph, self._picks_of)[self.me]

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
        deal = Deal.of(
            key.private_bytes_raw(), public, self_mask, threshold=graph.threshold, holders=graph.neighbours + 1
        )
        self._rounds[t] = _PartyRound(key, self_mask, {self.me: deal.key_shares[0]}, {self.me: deal.self_shares[0]})
        witness, holders = pack_witness(self.witness), set(near.holders)
        sealed = []
        for j in near.to:
            shares = _NOTHING
            if j in holders:
                rank = graph.rank(self.me, j, self.picks)
                shares = deal.key_shares[rank] + deal.self_shares[rank]
            sealed.append(self._seal(j, Kind.ENVELOPE, t, public + shares + witness))
        statement = deal.statement.signed(self._identity, self.context, t)
        return self._seal(self._server, Kind.PREPARE, t, b"".join([statement, *sealed]))

    def deliver(self, t: int, frame: bytes) -> None:
        """Open the envelopes of the round's members and compute the round's mask, before there are data."""
        state = self._round(t)
        if state.members:
            raise ProtocolError(self._server_name, f"delivered round {t} twice")
        payload = self._open(self._server, Kind.DELIVER, t, frame)
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
            envelope = self._open(j, Kind.ENVELOPE, t, row[PAIR_BYTES:])
            keys[j] = self._read_envelope(j, t, state, envelope, row[:PAIR_BYTES] if j in dealers else None)
        mask = self_mask_words(state.self_mask, t, self.terms.dimension)
        packed = pack_members(members, self.terms.parties)
        for j in self._near.partners:
            if j in here:
                words = pair_mask_words(self, self.roster.names[j], state.key, keys[j], packed, t)
                mask = mask + words if j > self.me else mask - words
        state.members, state.mask = members, mask

    def _read_envelope(self, j: int, t: int, state: _PartyRound, envelope: bytes, pair: bytes | None) -> bytes:
        """Check what a neighbour sent, keep her shares if she dealt any (``pair``: the hashes), return her key."""
        name = self.roster.names[j]
        if len(envelope) != _ENVELOPE:
            raise ProtocolError(name, "envelope has a wrong length")
        key_share = envelope[KEY_BYTES : KEY_BYTES + shamir.SHARE_BYTES]
        self_share = envelope[KEY_BYTES + shamir.SHARE_BYTES : KEY_BYTES + _SHARES]
        if pair is not None:
            if pair_hash(key_share, self_share) != pair:
                raise ProtocolError(
                    name, f"dealt shares that are not those committed to, or {self._server_name} altered the hashes"
                )
            state.key_shares[j], state.self_shares[j] = key_share, self_share
        theirs = Witness.unpack(envelope[KEY_BYTES + _SHARES :])
        if theirs is not None and theirs.contradicts(self.witness):
            if theirs.is_from(self.roster.keys[self._server]):
                raise ProtocolError(
                    self._server_name,
                    f"signed two lists of survivors of round {theirs.round}, one for us and one for {name}",
                )
            raise ProtocolError(name, f"shows survivors of round {theirs.round} that the server never signed")
        return envelope[:KEY_BYTES]

    def submit(self, t: int, vector: npt.ArrayLike) -> bytes:
        """Encode the vector, add this party's share of the noise and the mask, and seal it for the server."""
        state = self._round(t)
        if state.mask is None or state.submitted:
            raise ProtocolError(self.name, f"round {t} is not delivered yet, or was already submitted")
        words = encode(vector, dimension=self.terms.dimension, bound=self.terms.bound, step=self.terms.step)
        masked = words + self._noise.draw(t) + state.mask
        state.submitted, state.mask = True, None
        return self._seal(self._server, Kind.MASKED, t, masked.astype("<u8").tobytes())

    def reveal(self, t: int, frame: bytes) -> bytes:
        """Give one share of each dealer: of the self-mask if she is in the sum, of the round key if she dropped.

        Refuses when the sum would have fewer parties than the noise was planned for, and answers only once.
        """
        state = self._round(t)
        payload = self._open(self._server, Kind.SURVIVORS, t, frame)
        survivors, signature = self._read_members(payload)
        if not state.submitted or not set(survivors) <= set(state.members):
            raise ProtocolError(self._server_name, f"asks to open round {t} for others than its members")
        told = Witness.of(self.context, t, payload[: -len(signature)] if signature else payload, signature)
        if not told.is_from(self.roster.keys[self._server]):
            raise ProtocolError(self._server_name, f"did not sign the survivors of round {t}")
        del self._rounds[t]
        self.witness, here = told, set(survivors)
        shares = [state.self_shares[j] if j in here else state.key_shares[j] for j in sorted(state.self_shares)]
        return self._seal(self._server, Kind.REVEAL, t, b"".join(shares))

    def result(self, t: int, frame: bytes) -> Vector:
        """The released sum of round t."""
        payload = self._open(self._server, Kind.RESULT, t, frame)
        return decode(self._words(self._server, payload), self.terms.step)

    @property
    def _server_name(self) -> str:
        return self.roster.names[self._server]

    def _round(self, t: int) -> _PartyRound:
        if t not in self._rounds:
            raise ProtocolError(self.name, f"round {t} was not prepared, or is over")
        return self._rounds[t]

    def _read_members(self, payload: bytes) -> tuple[tuple[int, ...], bytes]:
        members, rest = unpack_members(payload, self.terms.parties)
        if self.me not in members:
            raise ProtocolError(self._server_name, "names members who are not on the roster, or leaves us out")
        if len(members) < self.terms.least_parties:
            raise DropoutError(
                self._missing(members),
                f"missing; {len(members)} parties are left and the noise needs {self.terms.least_parties}",
            )
        return members, rest


def self_mask_words(secret: bytes, t: int, dimension: int) -> Words:
    """PRG(b) for round t."""
    return SecureStream(secret, "self mask").uint64(t, dimension)


def pair_mask_words(
    role: Endpoint, peer: str, key: X25519PrivateKey, public: bytes, members: bytes, t: int
) -> Words:
    """PRG(s_ij) for round t; bound to the run and the packed members, so different lists never cancel."""
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError(peer, "round key is degenerate") from error
    seed = derive(shared, salt=role.context, info=b"pair mask" + members)
    return SecureStream(seed, "pair mask").uint64(t, role.terms.dimension)
