"""The one server of a masked sum (Bonawitz et al. 2017); the protocol is described in ``masking.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quietgrad.secure import shamir
from quietgrad.secure.channel import Endpoint, Kind, View
from quietgrad.secure.encoding import Vector, Words, decode
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.secure.identity import Identity, Roster
from quietgrad.secure.masking import (
    KEY_BYTES,
    SEALED_BYTES,
    pack_members,
    pair_mask_words,
    self_mask_words,
)
from quietgrad.secure.terms import Terms


@dataclass
class _ServerRound:
    """What the server keeps of one round."""

    members: tuple[int, ...]
    keys: dict[int, bytes]
    total: Words | None = None
    survivors: tuple[int, ...] = ()
    commitments: dict[int, bytes] = field(default_factory=dict)


class MaskingServer(Endpoint):
    """The aggregator: relays sealed envelopes, adds masked vectors, and learns only the noisy sum.

    One round by hand; in a federation every frame below is a message over the network.

    >>> from quietgrad.federation import Identity, MaskingParty, MaskingServer, Roster, Terms
    >>> people = [Identity("north"), Identity("south"), Identity("server")]
    >>> terms = Terms("masks", parties=2, dimension=1, bound=1.0, sigma=0.0)
    >>> roster, run = Roster.of(people), b"a name that is new in every run"
    >>> parties = [MaskingParty(person, roster, terms, run) for person in people[:2]]
    >>> server = MaskingServer(people[2], roster, terms, run)
    >>> for role in (*parties, server):
    ...     role.meet([other.hello for other in (*parties, server)])
    >>> delivery = server.relay(0, {p.me: p.prepare(0) for p in parties})
    >>> for p in parties:
    ...     p.deliver(0, delivery[p.me])
    >>> questions = server.survivors(0, {p.me: p.submit(0, [0.25 + p.me]) for p in parties})
    >>> server.finish(0, {p.me: p.reveal(0, questions[p.me]) for p in parties}).tolist()
    [1.25]
    >>> answers = server.results(0, to=[0, 1])
    >>> parties[0].result(0, answers[0]).tolist()
    [1.25]
    """

    def __init__(
        self, identity: Identity, roster: Roster, terms: Terms, run: bytes, *, view: View | None = None
    ) -> None:
        super().__init__(identity, roster, terms, run, view=view)
        self._rounds: dict[int, _ServerRound] = {}

    def relay(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take the parties' prepare frames and return what to deliver to each; the absent are left out."""
        m = self.terms.parties
        self._require(frames, self.terms.least_parties, "prepared")
        payloads = {}
        for i in sorted(frames):
            payload = self._open(i, Kind.PREPARE, t, frames[i])
            if len(payload) != KEY_BYTES + (m - 1) * SEALED_BYTES:
                raise ProtocolError(self.roster.names[i], "prepare has a wrong length")
            payloads[i] = payload
        members = tuple(payloads)
        self._rounds = dict(list(self._rounds.items())[-1:])  # older ones were aborted
        self._rounds[t] = _ServerRound(members, {i: p[:KEY_BYTES] for i, p in payloads.items()})
        head = pack_members(members)
        out = {}
        for i in members:
            envelopes = []
            for j in members:
                if j != i:
                    start = KEY_BYTES + (i if i < j else i - 1) * SEALED_BYTES  # j's list has no entry for j
                    envelopes.append(payloads[j][start : start + SEALED_BYTES])
            out[i] = self._seal(i, Kind.DELIVER, t, head + b"".join(envelopes))
        return out

    def survivors(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Add the masked vectors and return the question, to each survivor, who is in the sum."""
        state = self._round(t)
        self._require(frames, max(self.terms.least_parties, self.terms.threshold), "submitted")
        total = np.zeros(self.terms.dimension, np.uint64)
        for i in sorted(frames):
            if i not in state.members:
                raise ProtocolError(self.roster.names[i], f"is not a member of round {t}")
            payload = self._open(i, Kind.MASKED, t, frames[i])
            state.commitments[i] = payload[:KEY_BYTES]
            total += self._words(i, payload[KEY_BYTES:])
        state.total, state.survivors = total, tuple(sorted(frames))
        head = pack_members(state.survivors)
        return {i: self._seal(i, Kind.SURVIVORS, t, head) for i in state.survivors}

    def finish(self, t: int, frames: Mapping[int, bytes]) -> Vector:
        """Open the masks that did not cancel and return the noisy sum."""
        state = self._round(t)
        if state.total is None:
            raise ProtocolError(self.name, f"round {t} has no submissions yet")
        self._require(frames, self.terms.threshold, "revealed")
        size = shamir.SHARE_BYTES
        shares: dict[int, dict[int, bytes]] = {j: {} for j in state.members}
        for i in sorted(frames):
            if i not in state.survivors:
                raise ProtocolError(self.roster.names[i], f"is not in the sum of round {t}")
            payload = self._open(i, Kind.REVEAL, t, frames[i])
            if len(payload) != size * len(state.members):
                raise ProtocolError(self.roster.names[i], "reveal has a wrong length")
            for k, j in enumerate(state.members):
                shares[j][i] = payload[k * size : (k + 1) * size]
        total = state.total.copy()
        for j in state.members:
            secret = shamir.join(shares[j], self.terms.threshold)
            if j in state.survivors:
                if secret is None or hashlib.sha256(secret).digest() != state.commitments[j]:
                    raise ProtocolError(self.roster.names[j], "self-mask cannot be opened: false shares")
                total -= self_mask_words(secret, t, self.terms.dimension)
            else:
                total -= self._lost_masks(state, t, j, secret)
        state.total = total
        return decode(total, self.terms.step)

    def results(self, t: int, to: Collection[int]) -> dict[int, bytes]:
        """The released sum, sealed for each of the given parties; the round is over."""
        state = self._rounds.pop(t, None)
        if state is None or state.total is None:
            raise ProtocolError(self.name, f"round {t} has no result")
        payload = state.total.astype("<u8").tobytes()
        return {i: self._seal(i, Kind.RESULT, t, payload) for i in to}

    def _lost_masks(self, state: _ServerRound, t: int, dropped: int, secret: bytes | None) -> Words:
        """What the pair masks with a dropped party added to the survivors' vectors."""
        name = self.roster.names[dropped]
        key = X25519PrivateKey.from_private_bytes(secret) if secret is not None else None
        if key is None or key.public_key().public_bytes_raw() != state.keys[dropped]:
            raise ProtocolError(name, "round key cannot be opened: false shares")
        lost = np.zeros(self.terms.dimension, np.uint64)
        for i in state.survivors:
            words = pair_mask_words(self, self.roster.names[i], key, state.keys[i], state.members, t)
            lost = lost + words if dropped > i else lost - words
        return lost

    def _round(self, t: int) -> _ServerRound:
        if t not in self._rounds:
            raise ProtocolError(self.name, f"round {t} was not prepared, or is over")
        return self._rounds[t]

    def _require(self, frames: Mapping[int, bytes], least: int, what: str) -> None:
        if any(not 0 <= i < self.terms.parties for i in frames):
            raise ProtocolError(self.name, f"frames are keyed by roster numbers below {self.terms.parties}")
        if len(frames) < least:
            raise DropoutError(
                self._missing(frames), f"missing; {len(frames)} of {self.terms.parties} {what}, {least} needed"
            )
