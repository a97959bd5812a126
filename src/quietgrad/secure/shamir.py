"""Shamir's secret sharing of 32-byte secrets over the prime field of 2^257 − 93 (Shamir 1979)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from functools import lru_cache

PRIME = (1 << 257) - 93
SHARE_BYTES = 33
SECRET_BYTES = 32


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Shares for holders 0 … n−1; any ``threshold`` of them give the secret, fewer say nothing about it.

    Holder k's share is the polynomial at k + 1; its constant term is the secret.

    >>> shares = split(b"s" * 32, threshold=2, holders=3)
    >>> join({0: shares[0], 2: shares[2]}, threshold=2) == b"s" * 32
    True
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret of {len(secret)} bytes: must have {SECRET_BYTES}.")
    if not 1 <= threshold <= holders:
        raise ValueError(f"threshold={threshold}: must be between 1 and the {holders} holders.")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for point in range(1, holders + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret of exactly ``threshold`` of the shares by Lagrange interpolation at 0, or None if it is not one.

    Those of the lowest holders are taken and the others ignored: which shares are true is settled before, by what
    the dealer committed to (:mod:`quietgrad.secure.deals`), and what comes out is compared with its own commitment.
    The coefficients depend on the holders only and are kept, so that a complete graph of m parties costs O(m²).

    >>> join({0: bytes(33), 1: bytes(32) + b"\\1"}, threshold=2) is None
    True
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
