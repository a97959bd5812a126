"""Replicated secret sharing of bits among three servers, one of whom may be curious (Araki et al. 2016).

A bit x = x₀ ⊕ x₁ ⊕ x₂; server i holds (x_i, x_{i+1}), so any two have everything and one alone sees uniform bits.
Bits are packed 64 to a word: row r of a shared array holds bit r of 64 coordinates per word.

* Random bits, XOR, NOT and public linear maps are free: x_i is read from a stream that servers i and i − 1 share.
* A sum of products Σ_v x_v·y_v costs one bit per server, however many terms it has: the cross terms that i can
  compute, masked by a fresh sharing of zero, are its component of the result and go to server i − 1.

The computation is written as a generator that yields what to send to the previous server and is resumed with
what came from the next one; it does no input or output itself.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np

from quietgrad.privacy.rng import SecureStream
from quietgrad.secure.encoding import Words
from quietgrad.secure.faults import ProtocolError

Shared = tuple[Words, Words]
T = TypeVar("T")
Exchange = Generator[bytes, bytes, T]

_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_CALLS = 16  # bits of a block number that count the draws within a round


class Replicated:
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
        """Fresh uniform bits that no single server knows."""
        size = int(np.prod(shape))
        block = self._next_block()
        return (
            self._own.uint64(block, size).reshape(shape),
            self._following.uint64(block, size).reshape(shape),
        )

    def invert(self, x: Shared) -> Shared:
        """NOT: the public constant goes into component 0, held by servers 0 and 2."""
        return (x[0] ^ _ALL if self.position == 0 else x[0], x[1] ^ _ALL if self.position == 2 else x[1])

    def conjunction(self, x: Shared, y: Shared) -> Exchange[Shared]:
        """x AND y, row by row."""
        return (yield from self.reshare(self.products(x, y)))

    @staticmethod
    def products(x: Shared, y: Shared) -> Words:
        """This server's cross terms of x·y; add (XOR) as many as the sum has before :meth:`reshare`."""
        terms: Words = (x[0] & (y[0] ^ y[1])) ^ (x[1] & y[0])
        return terms

    def reshare(self, terms: Words) -> Exchange[Shared]:
        """Turn everyone's cross terms into a fresh sharing of their sum: one message to the previous server."""
        block = self._next_block()
        mine = terms.ravel() ^ self._own.uint64(block, terms.size) ^ self._following.uint64(block, terms.size)
        received = yield mine.astype("<u8", copy=False).tobytes()
        if len(received) != 8 * mine.size:
            raise ProtocolError(self._next_name, f"sent {len(received)} bytes of shares, not {8 * mine.size}")
        theirs = np.frombuffer(received, "<u8").astype(np.uint64, copy=False)
        return mine.reshape(terms.shape), theirs.reshape(terms.shape)

    def one_hot(self, bits: Shared) -> Exchange[Shared]:
        """The 2^k indicators [bits = v] of k bits along axis −2 (first bit most significant): k − 1 messages.

        Each new bit b splits an indicator h into h·¬b = h ⊕ h·b and h·b.
        """
        first = (bits[0][..., :1, :], bits[1][..., :1, :])
        negated = self.invert(first)
        hot = (_join(negated[0], first[0]), _join(negated[1], first[1]))
        for k in range(1, bits[0].shape[-2]):
            bit = (bits[0][..., k : k + 1, :], bits[1][..., k : k + 1, :])
            both = yield from self.conjunction(hot, bit)
            hot = (_split(hot[0], both[0]), _split(hot[1], both[1]))
        return hot

    def less(self, x: Shared, y: Shared) -> Exchange[Shared]:
        """[x < y] for numbers given by their bits along axis 0, most significant first: a tree of depth log k."""
        below = yield from self.conjunction(self.invert(x), y)
        equal = self.invert((x[0] ^ y[0], x[1] ^ y[1]))
        while below[0].shape[0] > 1:
            even = below[0].shape[0] // 2 * 2
            high = (equal[0][:even:2], equal[1][:even:2])
            low = (
                np.concatenate([below[0][1:even:2], equal[0][1:even:2]]),
                np.concatenate([below[1][1:even:2], equal[1][1:even:2]]),
            )
            both = yield from self.conjunction(
                (np.concatenate([high[0], high[0]]), np.concatenate([high[1], high[1]])), low
            )
            half = even // 2
            below = (
                np.concatenate([below[0][:even:2] ^ both[0][:half], below[0][even:]]),
                np.concatenate([below[1][:even:2] ^ both[1][:half], below[1][even:]]),
            )
            equal = (
                np.concatenate([both[0][half:], equal[0][even:]]),
                np.concatenate([both[1][half:], equal[1][even:]]),
            )
        return below

    def weighted_sum(self, bits: Shared, weights: Words, size: int) -> Exchange[Words]:
        """Additive shares mod 2^64 of Σ_j w_j·bit_j for ``size`` coordinates: one message from 0 to 2.

        With a = y₀ ⊕ y₁ (known to server 0) and b = y₂ (known to 1 and 2), a ⊕ b = a(1 − 2b) + b. Server 0
        splits a into r, which server 1 reads from their common stream, and a − r, sent to server 2.
        """
        shape = (bits[0].shape[0], size)
        block, message = self._next_block(), b""
        out: Words = np.zeros(size, np.uint64)
        if self.position == 0:
            r = self._following.uint64(block, shape[0] * size).reshape(shape)
            message = (_unpack(bits[0] ^ bits[1], size) - r).astype("<u8", copy=False).tobytes()
        received = yield message
        expected = 8 * shape[0] * size if self.position == 2 else 0
        if len(received) != expected:
            raise ProtocolError(self._next_name, f"sent {len(received)} bytes of shares, not {expected}")
        if self.position == 1:
            r, b = self._own.uint64(block, shape[0] * size).reshape(shape), _unpack(bits[1], size)
            out = weights @ (_times_sign(r, b) + b)
        elif self.position == 2:
            rest = np.frombuffer(received, "<u8").astype(np.uint64, copy=False).reshape(shape)
            out = weights @ _times_sign(rest, _unpack(bits[0], size))
        # A fresh sharing of zero: a server's share then says nothing beyond the sum.
        block = self._next_block()
        return out + self._own.uint64(block, size) - self._following.uint64(block, size)

    def _next_block(self) -> int:
        if self._block >= self._end:
            raise RuntimeError("a round of the three-server computation has used all its blocks")
        block, self._block = self._block, self._block + 1
        return block


def _times_sign(values: Words, bits: Words) -> Words:
    """values·(1 − 2·bits) mod 2^64."""
    return np.where(bits == 1, np.negative(values), values)


def _join(a: Words, b: Words) -> Words:
    return np.concatenate([a, b], axis=-2)


def _split(hot: Words, both: Words) -> Words:
    out = np.empty((*hot.shape[:-2], 2 * hot.shape[-2], hot.shape[-1]), np.uint64)
    out[..., 0::2, :], out[..., 1::2, :] = hot ^ both, both
    return out


def _unpack(rows: Words, size: int) -> Words:
    """One word (0 or 1) for each of the first ``size`` bits of every row."""
    octets = np.ascontiguousarray(rows).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=size, bitorder="little").astype(np.uint64)
