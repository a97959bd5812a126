"""Secure sums by additive shares to K ≥ 2 servers, each of which adds the whole noise.

A party sends server k < K − 1 a random seed and the last server her vector minus what the seeds expand to: any K −
1 shares are uniform. Each server adds up the shares of the parties that all servers have, and its own N_Z(0, σ²);
the first server adds the partial sums. Even K − 1 malicious servers see honest data only under the last one's full
noise; the sum has K times the variance. Parties may drop before sending. Cost per party and round: 8d + 100K bytes
sent.

    party.share(t, x) → server.receive(t) → server.partial(t) → first.finish(t)

With ``"mpc"`` three servers sample the noise c·X₂ + Y₀ + Y₁ + Y₂, c = 2^23, together: no server knows it. X₂ ~
N_Z(24²) is sampled inside replicated secret sharing by the alias method: 8 shared random bits choose one of 256
columns, one-hot vectors of their halves select its 56-bit threshold and alias from the public table, a shared
comparison decides between the two, one more bit is the sign (about 260 ANDs, 13 messages per round). Y_i ~
N_Z((1.75c)²/2) is drawn by server i alone. The two that a curious server does not know add up to σ₁ = 1.75c, so
c·X₂ + Y + Y′ is N_Z(c²(24² + 1.75²)) within 2⁻⁸⁰; the third is an excess of 0.27 % of the variance. The adversary
is one **semi-honest** server of the three, with any number of parties: a server that deviates can spoil the noise
unnoticed, and two servers together know everything.

Sharing is replicated (Araki et al. 2016): a bit x = x₀ ⊕ x₁ ⊕ x₂, server i holds (x_i, x_{i+1}). Bits are packed 64
to a word. Random bits, XOR, NOT and public linear maps are free. A sum of products costs one bit per server: the
cross terms that i can compute, masked by a fresh sharing of zero, are its component and go to server i − 1. A
computation is a generator that yields what to send to the previous server and is resumed with what came from the
next.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Mapping
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.federation.secure.channel import FRAME_OVERHEAD, Endpoint, FrameType, derive
from quietgrad.federation.secure.discrete_gaussian import Vector, Words, alias_table, gaussian_masses
from quietgrad.federation.secure.identity import DropoutError, Hello, ProtocolError
from quietgrad.federation.secure.terms import (
    COARSE_SIGMA,
    COARSE_STEP,
    COARSE_TOP,
    COARSE_WORD_BITS,
    SecureSumConfig,
)

_SEED = 32


def share_bytes(terms: SecureSumConfig) -> tuple[int, ...]:
    """The lengths of the frames that a party shares a vector in, one for each server."""
    seeds = (FRAME_OVERHEAD + _SEED,) * (terms.server_count - 1)
    return (*seeds, FRAME_OVERHEAD + 8 * terms.dimension)


class SharingParty(Endpoint):
    """A data holder who splits her vector among servers.

    She adds no noise and may stay away from any round.
    """

    _last = -1

    def share(self, t: int, vector: npt.ArrayLike) -> dict[int, bytes]:
        """One frame per server, by roster number: seeds for all but the last, the rest of the vector for it."""
        if t <= self._last:
            raise ProtocolError(self.name, f"round {t} was already shared; a retried round needs a new number")
        self._check_servers()
        rest = self.terms.encoded(vector)
        self._last = t
        frames = {}
        for k in self.servers[:-1]:
            seed = os.urandom(_SEED)
            rest = rest - _expand(seed, t, self.terms.dimension)
            frames[k] = self._seal(k, FrameType.SHARE, t, seed)
        last = self.servers[-1]
        frames[last] = self._seal(last, FrameType.SHARE, t, rest.astype("<u8").tobytes())
        return frames


class SumServer(Endpoint):
    """One of K servers; the first on the roster also adds up the partial sums."""

    def _begin(self) -> None:
        self._shares: dict[int, bytes] = {}
        self._round, self._last = -1, -1
        self._partial: Words | None = None

    def receive(self, t: int, frames: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take the parties' shares and tell each other server whose arrived.

        A party whose share is malformed is absent at all servers, and named here in :attr:`left_out`.
        """
        if t <= self._round:
            raise ProtocolError(self.name, f"round {t} was already taken; a retried round needs a new number")

        def read(i: int, frame: bytes) -> bytes:
            payload = self._open(i, FrameType.SHARE, t, frame)
            if self.me == self.servers[-1]:
                self._words(i, payload)  # refuses a wrong length
            elif len(payload) != _SEED:
                raise ProtocolError(self.roster.names[i], f"seed has {len(payload)} bytes, not {_SEED}")
            return bytes(payload)

        self.left_out = {}
        shares = self._read_all(frames, read)
        self._round, self._shares, self._partial = t, shares, None
        present = bytes(1 if i in shares else 0 for i in range(self.terms.parties))
        return {k: self._seal(k, FrameType.PRESENT, t, present) for k in self.servers if k != self.me}

    def partial(self, t: int, frames: Mapping[int, bytes]) -> bytes | None:
        """Add the shares of the parties that every server has, and noise; a frame for the first server.

        A server answers once per round, so whatever the others claim about who is present, what they get of
        the honest parties' data in this round is one sum under this server's noise.
        """
        if t != self._round or t <= self._last:
            raise ProtocolError(self.name, f"round {t} has no shares, or its partial sum was already given")
        self._check_servers()
        self._last = t  # before the frames are read: a call that fails below cannot be repeated with other frames
        present = set(self._shares)
        for k in self._others(frames):
            payload = self._open(k, FrameType.PRESENT, t, frames[k])
            if len(payload) != self.terms.parties or not set(payload) <= {0, 1}:
                raise ProtocolError(self.roster.names[k], "list of present parties is malformed")
            present &= {i for i, here in enumerate(payload) if here}
        if len(present) < self.terms.least_parties:
            left = f"{len(present)} present, {self.terms.least_parties} needed"
            raise DropoutError(self._missing(present), f"missing; {left}")
        total = self._noise(t)
        for i in sorted(present):
            share = self._shares[i]  # seeds are expanded when they are needed, so that m of them take no memory
            last = self.me == self.servers[-1]
            total += self._words(i, share) if last else _expand(share, t, self.terms.dimension)
        self._shares = {}
        if self.me == self.servers[0]:
            self._partial = total
            return None
        return self._seal(self.servers[0], FrameType.PARTIAL, t, total.astype("<u8").tobytes())

    def finish(self, t: int, frames: Mapping[int, bytes]) -> Vector:
        if self._partial is None or t != self._last:
            raise ProtocolError(self.name, f"round {t} has no partial sum here")
        total = self._partial
        for k in self._others(frames):
            total = total + self._words(k, self._open(k, FrameType.PARTIAL, t, frames[k]))
        self._partial = None
        return self.terms.released(total)

    def _noise(self, t: int) -> Words:
        return self._noise_share.draw(t)

    def _others(self, frames: Mapping[int, bytes]) -> list[int]:
        others = [k for k in self.servers if k != self.me]
        absent = [self.roster.names[k] for k in others if k not in frames]
        if absent:
            raise DropoutError(absent, "missing; every server must take part")
        return others


def _expand(seed: bytes, t: int, dimension: int) -> Words:
    return SecureStream(seed, "share").uint64(t, dimension)


Shared = Words
"""Shared bits: the two components that a server holds, along a first axis of length 2."""
T = TypeVar("T")
Computation = Generator[bytes, bytes, T]

_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_CALLS = 16  # bits of a block number that count the draws within a round


class ReplicatedSharing:
    """Server i's side of a computation on shared bits, in round t.

    The stream ``own``, shared with server i − 1, is component i of everything random; ``following``, shared with
    server i + 1, is component i + 1. A round uses its own blocks of both.
    """

    def __init__(self, position: int, own: SecureStream, following: SecureStream, t: int, next_name: str) -> None:
        self.position, self._own, self._following, self._next_name = position, own, following, next_name
        self._blocks = iter(range(t << _CALLS, (t + 1) << _CALLS))

    def random(self, *shape: int) -> Shared:
        """Draw uniform bits that no single server knows."""
        block, size = next(self._blocks), int(np.prod(shape))
        words = [stream.uint64(block, size) for stream in (self._own, self._following)]
        return np.stack(words).reshape(2, *shape)

    def invert(self, x: Shared) -> Shared:
        """NOT: the public constant goes into component 0, held by servers 0 and 2."""
        out = x.copy()
        if self.position != 1:
            out[0 if self.position == 0 else 1] ^= _ALL
        return out

    def conjunction(self, x: Shared, y: Shared) -> Computation[Shared]:
        return (yield from self.reshare(self.products(x, y)))

    @staticmethod
    def products(x: Shared, y: Shared) -> Words:
        """This server's cross terms of x·y; add (XOR) as many as the sum has before :meth:`reshare`."""
        terms: Words = (x[0] & (y[0] ^ y[1])) ^ (x[1] & y[0])
        return terms

    def reshare(self, terms: Words) -> Computation[Shared]:
        """Turn the servers' cross terms into a fresh sharing of their sum: one message to the previous server."""
        block = next(self._blocks)
        mine = terms.ravel() ^ self._own.uint64(block, terms.size) ^ self._following.uint64(block, terms.size)
        received = yield mine.astype("<u8", copy=False).tobytes()
        return np.stack([mine, self._words(received, mine.size)]).reshape(2, *terms.shape)

    def one_hot(self, bits: Shared) -> Computation[Shared]:
        """The 2^k indicators [bits = v] of k bits along axis −2 (first bit most significant): k − 1 messages.

        Each new bit b splits an indicator h into h·¬b = h ⊕ h·b and h·b.
        """
        first = bits[..., :1, :]
        hot = np.concatenate([self.invert(first), first], axis=-2)
        for k in range(1, bits.shape[-2]):
            both = yield from self.conjunction(hot, bits[..., k : k + 1, :])
            split = np.empty((*hot.shape[:-2], 2 * hot.shape[-2], hot.shape[-1]), np.uint64)
            split[..., 0::2, :], split[..., 1::2, :] = hot ^ both, both
            hot = split
        return hot

    def less(self, x: Shared, y: Shared) -> Computation[Shared]:
        """[x < y] for numbers given by their bits along axis 1, most significant first: a tree of depth log k."""
        below = yield from self.conjunction(self.invert(x), y)
        equal = self.invert(x ^ y)
        while below.shape[1] > 1:
            half = below.shape[1] // 2
            even = 2 * half
            high = np.concatenate([equal[:, :even:2]] * 2, axis=1)
            low = np.concatenate([below[:, 1:even:2], equal[:, 1:even:2]], axis=1)
            both = yield from self.conjunction(high, low)
            below = np.concatenate([below[:, :even:2] ^ both[:, :half], below[:, even:]], axis=1)
            equal = np.concatenate([both[:, half:], equal[:, even:]], axis=1)
        return below

    def weighted_sum(self, bits: Shared, weights: Words, size: int) -> Computation[Words]:
        """Additive shares mod 2^64 of Σ_j w_j·bit_j for ``size`` coordinates: one message from 0 to 2.

        With a = y₀ ⊕ y₁ (known to server 0) and b = y₂ (known to 1 and 2), a ⊕ b = a(1 − 2b) + b. Server 0
        splits a into r, which server 1 reads from their common stream, and a − r, sent to server 2.
        """
        shape = (bits.shape[1], size)
        block, message = next(self._blocks), b""
        out: Words = np.zeros(size, np.uint64)
        if self.position == 0:
            r = self._following.uint64(block, shape[0] * size).reshape(shape)
            message = (_unpack(bits[0] ^ bits[1], size) - r).astype("<u8", copy=False).tobytes()
        received = yield message
        rest = self._words(received, shape[0] * size if self.position == 2 else 0)
        if self.position == 1:
            r, b = self._own.uint64(block, shape[0] * size).reshape(shape), _unpack(bits[1], size)
            out = weights @ (_times_sign(r, b) + b)
        elif self.position == 2:
            out = weights @ _times_sign(rest.reshape(shape), _unpack(bits[0], size))
        # A fresh sharing of zero: a server's share then says nothing beyond the sum.
        block = next(self._blocks)
        return out + self._own.uint64(block, size) - self._following.uint64(block, size)

    def _words(self, received: bytes, count: int) -> Words:
        if len(received) != 8 * count:
            raise ProtocolError(self._next_name, f"sent {len(received)} bytes of shares, not {8 * count}")
        return np.frombuffer(received, "<u8").astype(np.uint64, copy=False)


def _times_sign(values: Words, bits: Words) -> Words:
    return np.where(bits == 1, np.negative(values), values)


def _unpack(rows: Words, size: int) -> Words:
    """One word (0 or 1) for each of the first ``size`` bits of every row."""
    octets = np.ascontiguousarray(rows).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=size, bitorder="little").astype(np.uint64)


_HALF = 4  # column bits per half: 16 × 16 columns
_BITS = 2 * _HALF
_OUTPUTS = COARSE_WORD_BITS + _BITS
_CHUNK = 256  # words per look-up: the selected rows then stay in the second-level cache


class NoiseServer(SumServer):
    """One of the three servers that sample a secure sum's noise together."""

    def _begin(self) -> None:
        super()._begin()
        self._streams: dict[int, SecureStream] = {}
        self._coarse: dict[int, Words] = {}
        self._prepared = -1
        self._sampling: Computation[None] | None = None  # of the round under way
        self.position = self.me - self.servers[0]
        self.previous = self.servers[(self.position - 1) % 3]  # the roster number of the server it sends to
        self.next = self.servers[(self.position + 1) % 3]  # and of the server it hears from

    def sample_noise(self, t: int, frame: bytes | None) -> bytes | None:
        """One step of sampling together: the next server's frame in, a frame for the previous one out.

        Begins round t without a frame, and returns none when the noise is shared.
        """
        under_way, self._sampling = self._sampling, None  # what fails is not gone on with
        try:
            if frame is None:
                under_way = self.prepare(t)
                following = next(under_way)
            elif under_way is None:
                raise ProtocolError("coordinator", "sends a frame for noise that was not begun")
            else:
                following = under_way.send(frame)
        except StopIteration:
            return None
        self._sampling = under_way
        return following

    def prepare(self, t: int) -> Computation[None]:
        """Sample this round's coarse noise with the other two servers."""
        if t <= self._prepared or not 0 <= t < 1 << 48:
            raise ProtocolError(self.name, f"round {t} was already prepared; a retried round needs a new number")
        self._prepared = t
        self._coarse = dict(list(self._coarse.items())[-1:])  # older ones were aborted
        if self.terms.sigma == 0.0:
            return
        for k in (self.previous, self.next):
            self._channel(k)  # must have said hello
        sharing = ReplicatedSharing(
            self.position, self._streams[self.previous], self._streams[self.next], t, self.roster.names[self.next]
        )
        computation = sample(sharing, self.terms.dimension)
        try:
            payload = next(computation)
            while True:
                received = yield self._seal(self.previous, FrameType.NOISE, t, payload)
                payload = computation.send(bytes(self._open(self.next, FrameType.NOISE, t, received)))
        except StopIteration as done:
            self._coarse[t] = done.value * np.uint64(COARSE_STEP)

    def _met(self, parsed_hello: Hello, secret: bytes, hello: bytes) -> None:
        peer = parsed_hello.sender
        if peer in self.servers:
            # The stream of two neighbours is component i of everything random, i the later of the two.
            key = derive(secret, salt=self.context, info=b"replicated")
            if self._seed is not None:
                pair = min(self.me, peer).to_bytes(4, "big") + max(self.me, peer).to_bytes(4, "big")
                key = hashlib.sha256(seed_key(self._seed) + pair).digest()
            self._streams[peer] = SecureStream(key, "replicated")

    def _largest_payload(self) -> int:
        words = (self.terms.dimension + 63) // 64
        noise = 8 * max(2 * COARSE_WORD_BITS * words, (_BITS + 1) * self.terms.dimension) + 1024
        return max(noise, super()._largest_payload())

    def _noise(self, t: int) -> Words:
        fine = super()._noise(t)
        if self.terms.sigma == 0.0:
            return fine
        if t not in self._coarse:
            raise ProtocolError(self.name, f"round {t}: the noise was not prepared")
        return fine + self._coarse.pop(t)


def sample(sharing: ReplicatedSharing, size: int) -> Computation[Words]:
    """Additive shares mod 2^64 of ``size`` draws of N_Z(24²), of which no server learns anything.

    |X| = column or alias(column), both below 256; X = Σ 2^j (|X|_j ⊕ s) − 255·s for the sign s, because the one's
    complement of |X| is 255 − |X|.
    """
    width = (size + 63) // 64
    columns = sharing.random(2, _HALF, width)
    uniform = sharing.random(COARSE_WORD_BITS, width)
    sign = sharing.random(1, width)
    hot = yield from sharing.one_hot(columns)
    chosen = yield from sharing.reshare(_look_up(sharing, hot, width))
    threshold, change = chosen[:, :COARSE_WORD_BITS], chosen[:, COARSE_WORD_BITS:]
    keep = yield from sharing.less(uniform, threshold)
    changed = yield from sharing.conjunction(sharing.invert(keep), change)
    magnitude = columns.reshape(2, _BITS, width) ^ changed
    bits = np.concatenate([magnitude ^ sign, sign], axis=1)
    weights = [1 << (_BITS - 1 - j) for j in range(_BITS)] + [(1 << 64) - COARSE_TOP]
    return (yield from sharing.weighted_sum(bits, np.array(weights, np.uint64), size))


def _look_up(sharing: ReplicatedSharing, hot: Shared, width: int) -> Words:
    """This server's terms of Σ_{v,w} table[v, w]·[high = v]·[low = w] for every output bit of the table."""
    halves = 1 << _HALF
    out = np.empty((_OUTPUTS, width), np.uint64)
    for start in range(0, width, _CHUNK):
        piece = slice(start, min(start + _CHUNK, width))
        rows = np.zeros((2, halves * _OUTPUTS, piece.stop - start), np.uint64)
        for k in (0, 1):
            for w, ones in enumerate(_table_ones()):
                rows[k, ones] ^= hot[k, 1, w, piece]
        terms = sharing.products(hot[:, 0, :, None, piece], rows.reshape(2, halves, _OUTPUTS, -1))
        np.bitwise_xor.reduce(terms, axis=0, out=out[:, piece])
    return out


@lru_cache(maxsize=1)
def _table_ones() -> list[npt.NDArray[np.intp]]:
    """For every low half w: where the table has a 1, as v·64 + output bit.

    Column 16v + w holds 56 bits of the threshold, then 8 of column ⊕ alias.
    """
    masses = gaussian_masses(COARSE_SIGMA, COARSE_TOP, 1 << (_BITS + COARSE_WORD_BITS), magnitudes=True)
    table = alias_table(masses, COARSE_WORD_BITS)
    ones: list[list[int]] = [[] for _ in range(1 << _HALF)]
    for column, (threshold, alias) in enumerate(zip(table.thresholds.tolist(), table.alias.tolist(), strict=True)):
        v, w = divmod(column, 1 << _HALF)
        text = f"{threshold << _BITS | (column ^ alias):0{_OUTPUTS}b}"
        ones[w] += [v * _OUTPUTS + i for i, bit in enumerate(text) if bit == "1"]
    return [np.array(where, np.intp) for where in ones]
