"""Secure sums by additive shares to K ≥ 2 servers, each of which adds the whole noise.

A party sends server k < K − 1 a random seed and the last server her vector minus what the seeds expand to: any K −
1 shares are uniform. Each server adds up the shares of the parties that all servers have, and its own N_Z(0, σ²);
the first server adds the partial sums. Even K − 1 malicious servers see honest data only under the last one's full
noise; the sum has K times the variance. Parties may drop before sending. Cost per party and round: 8d + 100K bytes
sent.

    party.share(t, x) → server.receive(t) → server.partial(t) → first.finish(t) → party.result(t)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream
from quietgrad.secure.channel import Endpoint, FrameType, NoiseShare, TranscriptRecorder
from quietgrad.secure.discrete_gaussian import Vector, Words, decode, encode
from quietgrad.secure.identity import DropoutError, Identity, ProtocolError, Roster
from quietgrad.secure.terms import SecureSumConfig

_SEED = 32


class SharingParty(Endpoint):
    """A data holder who splits her vector among servers; she adds no noise and may stay away from any round."""

    _last = -1

    def share(self, t: int, vector: npt.ArrayLike) -> dict[int, bytes]:
        """One frame per server, by roster number: seeds for all but the last, the rest of the vector for it."""
        if t <= self._last:
            raise ProtocolError(self.name, f"round {t} was already shared; a retried round needs a new number")
        rest = encode(vector, dimension=self.terms.dimension, bound=self.terms.bound, step=self.terms.step)
        self._last = t
        frames = {}
        for k in self.servers[:-1]:
            seed = os.urandom(_SEED)
            rest = rest - _expand(seed, t, self.terms.dimension)
            frames[k] = self._seal(k, FrameType.SHARE, t, seed)
        last = self.servers[-1]
        frames[last] = self._seal(last, FrameType.SHARE, t, rest.astype("<u8").tobytes())
        return frames

    def result(self, t: int, frame: bytes) -> Vector:
        """The released sum of round t, from the first server."""
        first = self.servers[0]
        return decode(self._words(first, self._open(first, FrameType.RESULT, t, frame)), self.terms.step)


class SumServer(Endpoint):
    """One of K servers; the first on the roster also adds up the partial sums and answers the parties.

    One round by hand; in a federation every frame below is a message over the network.

    Args:
        identity, roster, terms, run, view: see :class:`~quietgrad.secure.channel.Endpoint`.
        seed: fixes the noise, for tests only.
        noise: this server's noise if it goes on from an earlier set-up.
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
    ) -> None:
        super().__init__(identity, roster, terms, run, view=view)
        self._noise_share = noise or NoiseShare(terms, self.me, seed)
        self._shares: dict[int, bytes] = {}
        self._round, self._last = -1, -1
        self._partial: Words | None = None
        self._released: Words | None = None

    @property
    def is_first(self) -> bool:
        """Whether this server adds up the partial sums."""
        return self.me == self.servers[0]

    def receive(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take the parties' shares and tell each other server whose arrived."""
        if t <= self._round:
            raise ProtocolError(self.name, f"round {t} was already taken; a retried round needs a new number")
        shares = {}
        for i in sorted(frames):
            if not 0 <= i < self.terms.parties:
                raise ProtocolError(self.name, f"frames are keyed by roster numbers below {self.terms.parties}")
            payload = self._open(i, FrameType.SHARE, t, frames[i])
            if self.me != self.servers[-1]:
                if len(payload) != _SEED:
                    raise ProtocolError(self.roster.names[i], f"seed has {len(payload)} bytes, not {_SEED}")
                shares[i] = bytes(payload)
            else:
                self._words(i, payload)  # refused by name if the length is wrong
                shares[i] = payload
        self._round, self._shares, self._partial, self._released = t, shares, None, None
        present = bytes(1 if i in shares else 0 for i in range(self.terms.parties))
        return {k: self._seal(k, FrameType.PRESENT, t, present) for k in self.servers if k != self.me}

    def partial(self, t: int, frames: Mapping[int, bytes]) -> bytes | None:
        """Add the shares of the parties that every server has, and noise; a frame for the first server.

        A server answers once per round, so whatever the others claim about who is present, what they get of
        the honest parties' data in this round is one sum under this server's noise.
        """
        if t != self._round or t <= self._last:
            raise ProtocolError(self.name, f"round {t} has no shares, or its partial sum was already given")
        self._last = t
        present = set(self._shares)
        for k in self._others(frames):
            payload = self._open(k, FrameType.PRESENT, t, frames[k])
            if len(payload) != self.terms.parties or not set(payload) <= {0, 1}:
                raise ProtocolError(self.roster.names[k], "list of present parties is malformed")
            present &= {i for i, here in enumerate(payload) if here}
        if len(present) < self.terms.least_parties:
            raise DropoutError(
                self._missing(present), f"missing; {len(present)} present, {self.terms.least_parties} needed"
            )
        total = self._noise(t)
        for i in sorted(present):
            total += self._words_of(i, t)
        self._shares = {}
        if self.is_first:
            self._partial = total
            return None
        return self._seal(self.servers[0], FrameType.PARTIAL, t, total.astype("<u8").tobytes())

    def finish(self, t: int, frames: Mapping[int, bytes]) -> Vector:
        """First server: add up the partial sums."""
        if self._partial is None or t != self._last:
            raise ProtocolError(self.name, f"round {t} has no partial sum here")
        total = self._partial
        for k in self._others(frames):
            total = total + self._words(k, self._open(k, FrameType.PARTIAL, t, frames[k]))
        self._partial = None
        self.terms.check_sum_norm(total)
        self._released = total
        return decode(total, self.terms.step)

    def results(self, t: int, to: Collection[int]) -> dict[int, bytes]:
        """First server: the released sum, sealed for each of the given parties."""
        if self._released is None or t != self._last:
            raise ProtocolError(self.name, f"round {t} has no result")
        payload = self._released.astype("<u8").tobytes()
        return {i: self._seal(i, FrameType.RESULT, t, payload) for i in to}

    def _noise(self, t: int) -> Words:
        return self._noise_share.draw(t)

    def _words_of(self, i: int, t: int) -> Words:
        """Party i's share; seeds are expanded when they are needed, so that m of them take no memory."""
        kept = self._shares[i]
        return self._words(i, kept) if self.me == self.servers[-1] else _expand(kept, t, self.terms.dimension)

    def _others(self, frames: Mapping[int, bytes]) -> list[int]:
        others = [k for k in self.servers if k != self.me]
        absent = [self.roster.names[k] for k in others if k not in frames]
        if absent:
            raise DropoutError(absent, "missing; every server must take part")
        return others


def _expand(seed: bytes, t: int, dimension: int) -> Words:
    return SecureStream(seed, "share").uint64(t, dimension)
