"""Shamir's secret sharing of 32-byte secrets over the prime field of 2^257 − 93 (Shamir 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

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
    """The secret of at least ``threshold`` shares by Lagrange interpolation at 0, or None if they are not of one.

    Shares beyond the threshold are used to check the others: they must lie on the same polynomial.

    >>> join({0: bytes(33), 1: bytes(33), 2: b"\\0" * 32 + b"\\1"}, threshold=2) is None
    True
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares: at least {threshold} are needed.")
    points = {holder + 1: int.from_bytes(share, "big") for holder, share in sorted(shares.items())}
    if any(value >= PRIME for value in points.values()):
        return None
    base = dict(list(points.items())[:threshold])
    if any(_interpolate(base, x) != value for x, value in points.items() if x not in base):
        return None
    secret = _interpolate(base, 0)
    return secret.to_bytes(SECRET_BYTES, "big") if secret >> (8 * SECRET_BYTES) == 0 else None


def _interpolate(points: dict[int, int], at: int) -> int:
    total = 0
    for x, value in points.items():
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * (at - other) % PRIME
                denominator = denominator * (x - other) % PRIME
        total += value * numerator * pow(denominator, -1, PRIME)
    return total % PRIME
