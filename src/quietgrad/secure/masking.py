"""Secure sums by pairwise masks that cancel, with recovery of parties that drop (Bonawitz et al. 2017).

In round t party i sends the one server

    y_i = x_i + e_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij)    (mod 2^64),

where e_i is her share of the noise, N_Z(σ²/h); s_ij comes from X25519 keys made for this round only, and b_i is
a random self-mask. Before, she gave every party a Shamir share of her round key and of b_i, sealed end to end.
Of a party in the sum the survivors open b_i; of one who dropped they open the round key, so that her masks can
be taken off the others. A party answers once per round and gives one of the two, never both: with T shares
needed and 2T > m + c no server working with c parties can have both.

One round, one line per message (all frames go through the server):

    party.prepare(t) → server.relay(t) → party.deliver(t)     may run ahead: it needs no data
    party.submit(t, x) → server.survivors(t) → party.reveal(t) → server.finish(t) → party.result(t)

Cost per party and round: 8d + 192m + 400 bytes sent, m X25519 exchanges, m AES streams of 8d bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from itertools import pairwise

import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from quietgrad.privacy.rng import SecureStream
from quietgrad.secure import shamir
from quietgrad.secure.channel import FRAME_OVERHEAD, Endpoint, Kind, View, derive
from quietgrad.secure.encoding import Vector, Words, decode, encode
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.secure.identity import Identity, Roster
from quietgrad.secure.noise_share import NoiseShare
from quietgrad.secure.terms import Terms

KEY_BYTES = 32
_ENVELOPE = KEY_BYTES + 2 * shamir.SHARE_BYTES
SEALED_BYTES = _ENVELOPE + FRAME_OVERHEAD


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
        seed: fixes the noise, for tests only; the masks stay fresh.
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
    ) -> None:
        super().__init__(identity, roster, terms, run, view=view)
        self._noise = NoiseShare(terms, self.me, seed)
        self._rounds: dict[int, _PartyRound] = {}
        self._prepared = -1
        self._server = terms.parties

    def prepare(self, t: int) -> bytes:
        """Make this round's key and self-mask and share them; rounds only ever go up."""
        if t <= self._prepared:
            raise ProtocolError(self.name, f"round {t} was already prepared; a retried round needs a new number")
        self._prepared = t
        # The round before may still be under way; older ones were aborted: their secrets are forgotten.
        self._rounds = dict(list(self._rounds.items())[-1:])
        key, self_mask = X25519PrivateKey.generate(), os.urandom(KEY_BYTES)
        public = key.public_key().public_bytes_raw()
        m, threshold = self.terms.parties, self.terms.threshold
        key_shares = shamir.split(key.private_bytes_raw(), threshold, m)
        self_shares = shamir.split(self_mask, threshold, m)
        self._rounds[t] = _PartyRound(
            key, self_mask, {self.me: key_shares[self.me]}, {self.me: self_shares[self.me]}
        )
        sealed = [
            self._seal(j, Kind.ENVELOPE, t, public + key_shares[j] + self_shares[j])
            for j in range(m)
            if j != self.me
        ]
        return self._seal(self._server, Kind.PREPARE, t, b"".join([public, *sealed]))

    def deliver(self, t: int, frame: bytes) -> None:
        """Open the envelopes of the round's members and compute the round's mask, before there are data."""
        state = self._round(t)
        if state.members:
            raise ProtocolError(self._server_name, f"delivered round {t} twice")
        payload = self._open(self._server, Kind.DELIVER, t, frame)
        members, rest = self._read_members(payload)
        if len(rest) != SEALED_BYTES * (len(members) - 1):
            raise ProtocolError(self._server_name, "delivered envelopes of a wrong length")
        others = [j for j in members if j != self.me]
        keys = {}
        for k, j in enumerate(others):
            envelope = self._open(j, Kind.ENVELOPE, t, rest[k * SEALED_BYTES : (k + 1) * SEALED_BYTES])
            if len(envelope) != _ENVELOPE:
                raise ProtocolError(self.roster.names[j], "envelope has a wrong length")
            keys[j] = envelope[:KEY_BYTES]
            state.key_shares[j] = envelope[KEY_BYTES : KEY_BYTES + shamir.SHARE_BYTES]
            state.self_shares[j] = envelope[KEY_BYTES + shamir.SHARE_BYTES :]
        d = self.terms.dimension
        mask = self_mask_words(state.self_mask, t, d)
        for j, public in keys.items():
            words = pair_mask_words(self, self.roster.names[j], state.key, public, members, t)
            mask = mask + words if j > self.me else mask - words
        state.members, state.mask = members, mask

    def submit(self, t: int, vector: npt.ArrayLike) -> bytes:
        """Encode the vector, add this party's share of the noise and the mask, and seal it for the server."""
        state = self._round(t)
        if state.mask is None or state.submitted:
            raise ProtocolError(self.name, f"round {t} is not delivered yet, or was already submitted")
        words = encode(vector, dimension=self.terms.dimension, bound=self.terms.bound, step=self.terms.step)
        masked = words + self._noise.draw(t) + state.mask
        state.submitted, state.mask = True, None
        commitment = hashlib.sha256(state.self_mask).digest()
        return self._seal(self._server, Kind.MASKED, t, commitment + masked.astype("<u8").tobytes())

    def reveal(self, t: int, frame: bytes) -> bytes:
        """Give one share per member: of the self-mask if she is in the sum, of the round key if she dropped.

        Refuses when the sum would have fewer parties than the noise was planned for, and answers only once.
        """
        state = self._round(t)
        payload = self._open(self._server, Kind.SURVIVORS, t, frame)
        survivors, rest = self._read_members(payload)
        if rest or not state.submitted or not set(survivors) <= set(state.members):
            raise ProtocolError(self._server_name, f"asks to open round {t} for others than its members")
        del self._rounds[t]
        shares = [state.self_shares[j] if j in survivors else state.key_shares[j] for j in state.members]
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
        members, rest = unpack_members(payload)
        if not members or members[-1] >= self.terms.parties or self.me not in members:
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
    role: Endpoint, peer: str, key: X25519PrivateKey, public: bytes, members: tuple[int, ...], t: int
) -> Words:
    """PRG(s_ij) for round t; bound to the run and to who is in the round, so different lists never cancel."""
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError(peer, "round key is degenerate") from error
    seed = derive(shared, salt=role.context, info=b"pair mask" + pack_members(members))
    return SecureStream(seed, "pair mask").uint64(t, role.terms.dimension)


def pack_members(members: tuple[int, ...]) -> bytes:
    return struct.pack(f"<H{len(members)}H", len(members), *members)


def unpack_members(payload: bytes) -> tuple[tuple[int, ...], bytes]:
    """A strictly increasing list of roster numbers, and what follows it; empty when malformed."""
    count = int.from_bytes(payload[:2], "little")
    end = 2 + 2 * count
    if len(payload) < end or count == 0:
        return (), b""
    members = struct.unpack(f"<{count}H", payload[2:end])
    increasing = all(a < b for a, b in pairwise(members))
    return (members, payload[end:]) if increasing else ((), b"")
