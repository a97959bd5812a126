"""Secure sums on three servers that sample one discrete Gaussian together: no server knows the noise.

The parties share their vectors as in ``servers.py``. The noise is c·X₂ + Y₀ + Y₁ + Y₂ with c = 2^23. X₂ ~ N_Z(24²)
is sampled inside replicated secret sharing by the alias method: 8 shared random bits choose one of 256 columns,
one-hot vectors of their halves select its 56-bit threshold and alias from the public table, a shared comparison
decides between the two, one more bit is the sign (about 260 ANDs, 13 messages per round). Y_i ~ N_Z((1.75c)²/2) is
drawn by server i alone. The two that a curious server does not know add up to σ₁ = 1.75c, so c·X₂ + Y + Y′ is
N_Z(c²(24² + 1.75²)) within 2⁻⁸⁰; the third is an excess of 0.27 % of the variance.

Adversary: one **semi-honest** server of the three, with any number of parties. A server that deviates can spoil
the noise unnoticed, and two servers together know everything; where that is not acceptable use ``servers`` or
``masks``.

Sharing is replicated (Araki et al. 2016): a bit x = x₀ ⊕ x₁ ⊕ x₂, server i holds (x_i, x_{i+1}). Bits are packed 64
to a word. Random bits, XOR, NOT and public linear maps are free. A sum of products costs one bit per server: the
cross terms that i can compute, masked by a fresh sharing of zero, are its component and go to server i − 1. A
computation is a generator that yields what to send to the previous server and is resumed with what came from the
next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream, seed_key
from quietgrad.secure.channel import FrameType, TranscriptRecorder, derive
from quietgrad.secure.discrete_gaussian import Words, alias_table, gaussian_masses
from quietgrad.secure.identity import Hello, Identity, ProtocolError, Roster
from quietgrad.secure.servers import SumServer
from quietgrad.secure.terms import COARSE_SIGMA, COARSE_STEP, COARSE_TOP, COARSE_WORD_BITS, SecureSumConfig

Shared = Words
"""Shared bits: the two components that a server holds, along a first axis of length 2."""
T = TypeVar("T")
Computation = Generator[bytes, bytes, T]

_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_CALLS = 16  # bits of a block number that count the draws within a round


class ReplicatedSharing:
    """Server i's side of a computation on shared bits.

    Args:
        position: i, 0 to 2.
        own: the stream shared with server i − 1 (component i of everything random).
        following: the stream shared with server i + 1 (component i + 1).
        t: the round; a round uses its own blocks of both streams.
        next_name: how to call server i + 1 in errors.
    """

    def __init__(self, position: int, own: SecureStream, following: SecureStream, t: int, next_name: str) -> None:
        self.position, self._own, self._following = position, own, following
        self._block = t << _CALLS
        self._end = (t + 1) << _CALLS
        self._next_name = next_name

    def random(self, *shape: int) -> Shared:
        """Draw uniform bits that no single server knows."""
        block, size = self._next_block(), int(np.prod(shape))
        words = [stream.uint64(block, size) for stream in (self._own, self._following)]
        return np.stack(words).reshape(2, *shape)

    def invert(self, x: Shared) -> Shared:
        """NOT: the public constant goes into component 0, held by servers 0 and 2."""
        out = x.copy()
        if self.position != 1:
            out[0 if self.position == 0 else 1] ^= _ALL
        return out

    def conjunction(self, x: Shared, y: Shared) -> Computation[Shared]:
        """x AND y, row by row."""
        return (yield from self.reshare(self.products(x, y)))

    @staticmethod
    def products(x: Shared, y: Shared) -> Words:
        """This server's cross terms of x·y; add (XOR) as many as the sum has before :meth:`reshare`."""
        terms: Words = (x[0] & (y[0] ^ y[1])) ^ (x[1] & y[0])
        return terms

    def reshare(self, terms: Words) -> Computation[Shared]:
        """Turn the servers' cross terms into a fresh sharing of their sum: one message to the previous server."""
        block = self._next_block()
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
        block, message = self._next_block(), b""
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
        block = self._next_block()
        return out + self._own.uint64(block, size) - self._following.uint64(block, size)

    def _words(self, received: bytes, count: int) -> Words:
        if len(received) != 8 * count:
            raise ProtocolError(self._next_name, f"sent {len(received)} bytes of shares, not {8 * count}")
        return np.frombuffer(received, "<u8").astype(np.uint64, copy=False)

    def _next_block(self) -> int:
        if self._block >= self._end:
            raise RuntimeError("a round of the three-server computation has used all its blocks")
        block, self._block = self._block, self._block + 1
        return block


def _times_sign(values: Words, bits: Words) -> Words:
    """values·(1 − 2·bits) mod 2^64."""
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
    """One of the three servers of a secure sum whose noise is sampled inside the computation."""

    def __init__(
        self,
        identity: Identity,
        roster: Roster,
        terms: SecureSumConfig,
        run: bytes,
        *,
        view: TranscriptRecorder | None = None,
        seed: int | None = None,
    ) -> None:
        self._streams: dict[int, SecureStream] = {}
        self._seed = seed
        self._coarse: dict[int, Words] = {}
        self._prepared = -1
        super().__init__(identity, roster, terms, run, view=view, seed=seed)

    @property
    def position(self) -> int:
        """0, 1 or 2."""
        return self.me - self.servers[0]

    @property
    def previous(self) -> int:
        """Roster number of the server that this one sends to."""
        return self.servers[(self.position - 1) % 3]

    @property
    def next(self) -> int:
        """Roster number of the server that this one hears from."""
        return self.servers[(self.position + 1) % 3]

    def prepare(self, t: int) -> Computation[None]:
        """Sample this round's coarse noise with the other two servers."""
        if t <= self._prepared or not 0 <= t < 1 << 48:
            raise ProtocolError(self.name, f"round {t} was already prepared; a retried round needs a new number")
        self._prepared = t
        self._coarse = dict(list(self._coarse.items())[-1:])  # older ones were aborted
        if self.terms.sigma == 0.0:
            return
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

    def _met(self, known: Hello, secret: bytes, hello: bytes) -> None:
        peer = known.sender
        if peer in self.servers:
            # The stream of two neighbours is component i of everything random, i the later of the two.
            key = derive(secret, salt=self.context, info=b"replicated")
            if self._seed is not None:
                pair = min(self.me, peer).to_bytes(4, "big") + max(self.me, peer).to_bytes(4, "big")
                key = hashlib.sha256(seed_key(self._seed) + pair).digest()
            self._streams[peer] = SecureStream(key, "replicated")

    def _noise_limit(self) -> int:
        words = (self.terms.dimension + 63) // 64
        return 8 * max(2 * COARSE_WORD_BITS * words, (_BITS + 1) * self.terms.dimension) + 1024

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


def run_together(computations: Sequence[Computation[None]]) -> None:
    """Run the three servers' generators in step in one process: i's frame goes to i − 1."""
    frames = [next(c, None) for c in computations]
    while all(frame is not None for frame in frames):
        inbound = [frames[(i + 1) % 3] for i in range(3)]
        frames = [_resume(c, frame) for c, frame in zip(computations, inbound, strict=True)]


def _resume(computation: Computation[None], frame: bytes | None) -> bytes | None:
    try:
        return computation.send(frame or b"")
    except StopIteration:
        return None
