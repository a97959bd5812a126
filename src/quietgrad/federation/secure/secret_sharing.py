"""Verifiable secret sharing: Shamir's scheme over the prime field of 2^257 − 93, with commitments.

A dealer splits her round key and her self-mask among k + 1 holders, herself first, and signs a hash of every share
beside her public round key and a hash of the self-mask. A holder compares her shares with the hashes before there
are data. From then on a share without its hash was falsified by its **holder**, and T shares that have their
hashes and do not open the secret were falsified by the **dealer**. Shares have 257 uniform bits: their hashes tell
nothing.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quietgrad.federation.secure.identity import Identity, in_round, is_signed

PRIME = (1 << 257) - 93
SHARE_BYTES = 33
SECRET_BYTES = 32


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Shares for holders 0 … n−1; any ``threshold`` of them give the secret, fewer say nothing about it.

    Holder k's share is the polynomial at k + 1; its constant term is the secret.

    >>> shares = split(b"s" * 32, threshold=2, holders=3)
    >>> reconstruct({0: shares[0], 2: shares[2]}, threshold=2) == b"s" * 32
    True
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= holders:
        raise ValueError(f"{len(secret)} bytes, threshold={threshold}: must be 32, and between 1 and {holders}.")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for point in range(1, holders + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def reconstruct(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret of exactly ``threshold`` of the shares by Lagrange interpolation at 0, or None if it is not one.

    Those of the lowest holders are taken and the others ignored: which shares are true is settled before, by what
    the dealer committed to (:class:`ShareCommitments`), and what comes out is compared with its own commitment.
    The coefficients depend on the holders only and are kept, so that a complete graph of m parties costs O(m²).
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares: at least {threshold} are needed.")
    holders = tuple(sorted(shares)[:threshold])
    values = [int.from_bytes(shares[holder], "big") for holder in holders]
    if any(value >= PRIME for value in values):
        return None
    secret = sum(value * weight for value, weight in zip(values, _weights(holders), strict=True)) % PRIME
    return secret.to_bytes(SECRET_BYTES, "big") if secret >> (8 * SECRET_BYTES) == 0 else None


@lru_cache(maxsize=4096)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """λ_i = Π_{j≠i} x_j/(x_j − x_i) at the points x = holder + 1, with one inversion for all of them."""
    points = [holder + 1 for holder in holders]
    whole = math.prod(points)
    below = [x * math.prod(other - x for other in points if other != x) for x in points]
    # Montgomery's trick: invert the product, then peel the factors off from the end.
    before = [1]
    for factor in below:
        before.append(before[-1] * factor % PRIME)
    rest, weights = pow(before[-1], -1, PRIME), [0] * len(points)
    for i in reversed(range(len(points))):
        weights[i] = whole * rest * before[i] % PRIME
        rest = rest * below[i] % PRIME
    return tuple(weights)


KEY_BYTES = 32
HASH_BYTES = 32
SIGNATURE_BYTES = 64
PAIR_BYTES = 2 * HASH_BYTES
_DOMAIN = b"quietgrad deal 1\0"


def share_hash(kind: bytes, share: bytes) -> bytes:
    """The commitment to one share of kind b"key" or b"self", or to the self-mask b"mask"."""
    return hashlib.sha256(b"quietgrad share 1\0" + kind + b"\0" + share).digest()


def pair_hash(key_share: bytes, self_share: bytes) -> bytes:
    return share_hash(b"key", key_share) + share_hash(b"self", self_share)


@dataclass(frozen=True)
class ShareCommitments:
    """Commitments of a dealer: her round key, the hash of her self-mask, and the hashes of all shares by rank."""

    public: bytes
    self_hash: bytes
    pairs: tuple[bytes, ...]

    @staticmethod
    def size(holders: int) -> int:
        return KEY_BYTES + HASH_BYTES + holders * PAIR_BYTES + SIGNATURE_BYTES

    def signed(self, identity: Identity, context: bytes, t: int) -> bytes:
        """The statement and its signature, bound to the run and the round."""
        body = self.public + self.self_hash + b"".join(self.pairs)
        return body + identity.sign(in_round(_DOMAIN, context, t, body))

    @classmethod
    def read(cls, data: bytes, key: bytes, context: bytes, t: int) -> ShareCommitments | None:
        """A statement signed with ``key`` for this run and round, or None."""
        body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        if not is_signed(key, signature, in_round(_DOMAIN, context, t, body)):
            return None
        rest = body[KEY_BYTES + HASH_BYTES :]
        pairs = tuple(rest[i : i + PAIR_BYTES] for i in range(0, len(rest), PAIR_BYTES))
        return cls(body[:KEY_BYTES], body[KEY_BYTES : KEY_BYTES + HASH_BYTES], pairs)

    def has(self, rank: int, *, kind: bytes, share: bytes) -> bool:
        pair = self.pairs[rank]
        return share_hash(kind, share) == (pair[:HASH_BYTES] if kind == b"key" else pair[HASH_BYTES:])

    def opens(self, secret: bytes, *, self_mask: bool) -> bool:
        """Whether ``secret`` is the self-mask, or else the round key, that was committed to."""
        if self_mask:
            return share_hash(b"mask", secret) == self.self_hash
        return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == self.public


Shares = tuple[bytes, bytes]
"""One holder's shares of the round key and of the self-mask."""


def deal(
    key: bytes, public: bytes, self_mask: bytes, *, threshold: int, holders: int
) -> tuple[list[Shares], ShareCommitments]:
    """Split both secrets of a round among k + 1 holders."""
    shares = list(zip(split(key, threshold, holders), split(self_mask, threshold, holders), strict=True))
    pairs = tuple(pair_hash(*pair) for pair in shares)
    return shares, ShareCommitments(public, share_hash(b"mask", self_mask), pairs)
