"""The one server of a masked sum; the protocol is described in ``masking.py``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quietgrad.secure import shamir
from quietgrad.secure.attendance import Witness, pack_members
from quietgrad.secure.channel import Endpoint, Kind, View
from quietgrad.secure.deals import PAIR_BYTES, Statement, share_hash
from quietgrad.secure.encoding import Vector, Words, decode
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.secure.graph import Neighbourhood, neighbourhoods
from quietgrad.secure.identity import Hello, Identity, Roster
from quietgrad.secure.masking import SEALED_BYTES, pair_mask_words, self_mask_words
from quietgrad.secure.terms import Terms

_NO_PAIR = bytes(PAIR_BYTES)


@dataclass
class _ServerRound:
    """What the server keeps of one round."""

    members: tuple[int, ...]
    statements: dict[int, Statement]
    total: Words | None = None
    survivors: tuple[int, ...] = ()
    opened: bool = False


class MaskingServer(Endpoint):
    """The aggregator: relays sealed envelopes, adds masked vectors, and learns only the noisy sum.

    One round by hand; in a federation every frame below is a message over the network.

    >>> from quietgrad.federation import Identity, MaskingParty, MaskingServer, Roster, Terms
    >>> people = [Identity("north"), Identity("south"), Identity("server")]
    >>> terms = Terms("masks", parties=2, dimension=1, bound=1.0, sigma=0.0)
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
    >>> answers = server.results(0, to=[0, 1])
    >>> parties[0].result(0, answers[0]).tolist()
    [1.25]
    """

    def __init__(
        self, identity: Identity, roster: Roster, terms: Terms, run: bytes, *, view: View | None = None
    ) -> None:
        super().__init__(identity, roster, terms, run, view=view)
        self._rounds: dict[int, _ServerRound] = {}
        self._hellos: dict[int, bytes] = {}
        self._picks_of: dict[int, tuple[int, ...]] = {}
        self._near: dict[int, Neighbourhood] = {}
        self.proved: dict[str, str] = {}
        """Who returned false shares in the round opened last, by name: proved by what they had accepted."""

    def _met(self, known: Hello, secret: bytes, hello: bytes) -> None:
        if not self.terms.graph.is_drawn(known.sender, known.picks):
            raise ProtocolError(self.roster.names[known.sender], "hello names impossible neighbours")
        self._hellos[known.sender], self._picks_of[known.sender] = hello, known.picks
        self._near = {}

    def introductions(self) -> dict[int, list[bytes]]:
        """Whose hellos each party needs: those of her neighbours, and the server's."""
        near = self._neighbourhoods()
        return {
            i: [self.hello, *(self._hellos[j] for j in sorted({*hood.to, *hood.source}))]
            for i, hood in near.items()
        }

    def _neighbourhoods(self) -> dict[int, Neighbourhood]:
        if not self._near:
            self._near = neighbourhoods(self.terms.graph, self._picks_of)
        return self._near

    def relay(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take the parties' prepare frames and return what to deliver to each; the absent are left out."""
        self._require(frames, self.terms.least_parties, "prepared")
        near, graph, size = (
            self._neighbourhoods(),
            self.terms.graph,
            Statement.size(self.terms.graph.neighbours + 1),
        )
        statements: dict[int, Statement] = {}
        envelopes: dict[int, dict[int, bytes]] = {}
        for i in sorted(frames):
            payload = self._open(i, Kind.PREPARE, t, frames[i])
            if len(payload) != size + len(near[i].to) * SEALED_BYTES:
                raise ProtocolError(self.roster.names[i], "prepare has a wrong length")
            statement = Statement.read(payload[:size], self.roster.keys[i], self.context, t)
            if statement is None:
                raise ProtocolError(self.roster.names[i], "did not sign the hashes of her shares")
            statements[i] = statement
            starts = range(size, len(payload), SEALED_BYTES)
            envelopes[i] = {j: payload[at : at + SEALED_BYTES] for j, at in zip(near[i].to, starts, strict=True)}
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
            out[i] = self._seal(i, Kind.DELIVER, t, b"".join(rows))
        return out

    def survivors(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Add the masked vectors and return the question, to each survivor, who is in the sum."""
        state = self._round(t)
        self._require(frames, self.terms.parties - self.terms.tolerated_dropouts, "submitted")
        total, members = np.zeros(self.terms.dimension, np.uint64), set(state.members)
        for i in sorted(frames):
            if i not in members:
                raise ProtocolError(self.roster.names[i], f"is not a member of round {t}")
            total += self._words(i, self._open(i, Kind.MASKED, t, frames[i]))
        state.total, state.survivors = total, tuple(sorted(frames))
        packed = pack_members(state.survivors, self.terms.parties)
        payload = packed + Witness.signed(self._identity, self.context, t, packed).signature
        return {i: self._seal(i, Kind.SURVIVORS, t, payload) for i in state.survivors}

    def finish(self, t: int, frames: Mapping[int, bytes]) -> Vector:
        """Open the masks that did not cancel and return the noisy sum.

        A share that is not the one its dealer committed to is left out and its holder named in :attr:`proved`; if
        enough others are left the sum is opened all the same.
        """
        state = self._round(t)
        if state.total is None or state.opened:
            raise ProtocolError(self.name, f"round {t} has no submissions yet, or was opened")
        if self.terms.graph.complete:
            self._require(frames, self.terms.threshold, "revealed")
        self.proved = {}
        shares = self._verified(state, t, frames)
        total, survivors = state.total.copy(), set(state.survivors)
        for j in state.members:
            secret = self._opened(state, j, shares[j], set(frames))
            if j in survivors:
                if secret is None or share_hash(b"mask", secret) != state.statements[j].self_hash:
                    raise self._false_dealer(j)
                total -= self_mask_words(secret, t, self.terms.dimension)
            else:
                total -= self._lost_masks(state, t, j, secret, survivors)
        self.terms.require_possible(total)
        state.total, state.opened = total, True
        return decode(total, self.terms.step)

    def results(self, t: int, to: Collection[int]) -> dict[int, bytes]:
        """The released sum, sealed for each of the given parties; the round is over."""
        state = self._rounds.pop(t, None)
        if state is None or state.total is None or not state.opened:
            raise ProtocolError(self.name, f"round {t} has no result")
        payload = state.total.astype("<u8").tobytes()
        return {i: self._seal(i, Kind.RESULT, t, payload) for i in to}

    def _verified(self, state: _ServerRound, t: int, frames: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        """By dealer and rank, the returned shares that the dealer committed to; false holders are noted."""
        near, graph, size = self._neighbourhoods(), self.terms.graph, shamir.SHARE_BYTES
        members, survivors = set(state.members), set(state.survivors)
        found: dict[int, dict[int, bytes]] = {j: {} for j in state.members}
        for i in sorted(frames):
            if i not in survivors:
                raise ProtocolError(self.roster.names[i], f"is not in the sum of round {t}")
            payload = self._open(i, Kind.REVEAL, t, frames[i])
            dealers = sorted([i, *(j for j in near[i].dealers if j in members)])
            if len(payload) != size * len(dealers):
                raise ProtocolError(self.roster.names[i], "reveal has a wrong length")
            for k, j in enumerate(dealers):
                rank, share = graph.rank(j, i, self._picks_of[j]), payload[k * size : (k + 1) * size]
                kind = b"self" if j in survivors else b"key"
                if state.statements[j].has(rank, kind=kind, share=share):
                    found[j][rank] = share
                else:
                    whose = "her own" if i == j else f"{self.roster.names[j]}'s"
                    self.proved[self.roster.names[i]] = f"returned a false share of {whose} secret"
        return found

    def _opened(self, state: _ServerRound, j: int, shares: Mapping[int, bytes], here: set[int]) -> bytes | None:
        if len(shares) >= self.terms.threshold:
            return shamir.join(shares, self.terms.threshold)
        name, why = self.roster.names[j], f"{len(shares)} true shares of {self.terms.threshold} needed"
        if self.proved:
            raise ProtocolError(
                ", ".join(self.proved), f"returned false shares; of {name}'s secret there are {why}"
            )
        away = [self.roster.names[i] for i in self._neighbourhoods()[j].holders if i not in here]
        raise DropoutError(away, f"missing; of {name}'s secret there are {why}")

    def _false_dealer(self, j: int) -> ProtocolError:
        return ProtocolError(
            self.roster.names[j], "dealt false shares: they have her hashes and do not open her secret"
        )

    def _lost_masks(
        self, state: _ServerRound, t: int, dropped: int, secret: bytes | None, survivors: set[int]
    ) -> Words:
        """What the pair masks with a dropped party added to the survivors' vectors."""
        key = X25519PrivateKey.from_private_bytes(secret) if secret is not None else None
        if key is None or key.public_key().public_bytes_raw() != state.statements[dropped].public:
            raise self._false_dealer(dropped)
        lost, packed = np.zeros(self.terms.dimension, np.uint64), pack_members(state.members, self.terms.parties)
        for i in self._neighbourhoods()[dropped].partners:
            if i in survivors:
                public = state.statements[i].public
                words = pair_mask_words(self, self.roster.names[i], key, public, packed, t)
                lost = lost + words if dropped > i else lost - words
        return lost

    def _round(self, t: int) -> _ServerRound:
        if t not in self._rounds:
            raise ProtocolError(self.name, f"round {t} was not prepared, or is over")
        return self._rounds[t]

    def _require(self, frames: Mapping[int, bytes], least: int, what: str) -> None:
        if any(i not in self._picks_of for i in frames):
            raise ProtocolError(self.name, "frames are keyed by roster numbers of parties that said hello")
        if len(frames) < least:
            raise DropoutError(
                self._missing(frames), f"missing; {len(frames)} of {self.terms.parties} {what}, {least} needed"
            )
