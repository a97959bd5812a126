"""The random source on a device: ChaCha20 in torch's integer operations, normals from it, and a digest by it.

A sum on an accelerator would have to travel to the CPU and back in every step to meet its noise. Here the stream
cipher (RFC 8439) and the normals are torch operations on whole numbers and float64, so the same lines run on a CPU,
where they are tested, and on an accelerator. Addressing is that of :mod:`quietgrad.core.noise.rng`: a block serves
one draw only. Whole numbers of 32 bits are kept in int64 and masked, so nothing overflows.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quietgrad.core.noise.rng import KEY_BYTES

if TYPE_CHECKING:
    from torch import Tensor, device

__all__ = ["DeviceStream", "chacha20", "digest"]

_MASK = 0xFFFFFFFF
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_COARSE = 1 << 48  # as in NoiseStream.normal
_PRIME = 2**31 - 1
_DRAW, _MORE = 0, 1  # lanes of a stream: words of draws, and words that continue rare ones


def chacha20(key: bytes, nonce: bytes, counters: Tensor) -> Tensor:
    """The keystream of RFC 8439, one row of 16 words of 32 bits for each of the ``counters`` (int64, below 2³²)."""
    import torch

    public = [*_CONSTANTS, *np.frombuffer(key, "<u4").tolist(), 0, *np.frombuffer(nonce, "<u4").tolist()]
    start = torch.tensor(public, dtype=torch.int64, device=counters.device)[:, None].repeat(1, len(counters))
    start[12] = counters
    # Four rows of four words each: a quarter round works on all columns, or diagonals, at once.
    a, b, c, d = (start[4 * row : 4 * row + 4].clone() for row in range(4))
    for _ in range(10):
        a, b, c, d = _quarter(a, b, c, d)
        a, b, c, d = _quarter(a, b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0))
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return ((torch.cat([a, b, c, d]) + start) & _MASK).T


def _quarter(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for first, second in ((16, 12), (8, 7)):
        a = (a + b) & _MASK
        d = _rotated(d ^ a, first)
        c = (c + d) & _MASK
        b = _rotated(b ^ c, second)
    return a, b, c, d


def _rotated(words: Tensor, by: int) -> Tensor:
    return ((words << by) & _MASK) | (words >> (32 - by))


class DeviceStream:
    """Random numbers addressed by (key, label, block) on a device; the key of a label is not the CPU stream's."""

    def __init__(self, key: bytes, label: str, where: device) -> None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError("key: must be 32 bytes. Use fresh_key(), or seed_key(seed) in tests.")
        self._key = hmac.digest(key, b"quietgrad device stream 1\0" + label.encode(), "sha256")
        self._where = where

    def words(self, block: int, size: int) -> Tensor:
        """The first ``size`` words of 32 bits of a block, as int64."""
        import torch

        rows = -(-size // 16)
        if not (0 <= block < 2**64 and rows <= 2**32):
            raise ValueError(f"block={block}, size={size}: a block of the stream has 2³² rows of 16 words.")
        counters = torch.arange(rows, dtype=torch.int64, device=self._where)
        return chacha20(self._key, _nonce(_DRAW, block), counters).reshape(-1)[:size]

    def normal(self, block: int, size: int) -> Tensor:
        """Independent N(0, 1) numbers in float64, made of words as :meth:`NoiseStream.normal` makes them.

        One bit is the sign, 63 bits are k, the number is ±Φ⁻¹((k + ½)·2⁻⁶⁴), and for k < 2⁴⁸ another 64 bits
        continue k, so that the far tail has no holes. Φ⁻¹ is torch's, whose error is below 10⁻¹⁵(|x| + ⅕) on the
        CPU, as the bound on what rounding costs requires; ``grid.usable`` asks another device to be as
        close to that.
        """
        import torch

        pairs = self.words(block, 2 * size).view(size, 2)
        low, high = pairs[:, 0], pairs[:, 1]
        sign = 1.0 - 2.0 * (low & 1).double()
        k = (high << 31) | (low >> 1)
        x = k.double() + 0.5
        coarse = (k < _COARSE).nonzero().flatten()
        if len(coarse):
            more = chacha20(self._key, _nonce(_MORE, block), coarse)
            rest = more[:, 1].double() * 2.0**32 + more[:, 0].double()  # 64 bits as a float, rounded once
            x[coarse] = k[coarse].double() + (rest + 0.5) * 2.0**-64
        numbers: Tensor = sign * torch.special.ndtri(x * 2.0**-64)
        return numbers


def _nonce(lane: int, block: int) -> bytes:
    return lane.to_bytes(4, "little") + block.to_bytes(8, "little")


def digest(total: Tensor, key: bytes) -> npt.NDArray[np.int64]:
    """Four numbers that two different sums share with probability at most 2⁻¹²⁰ over the secret key.

    Σ_i k_{i+j}·m_i mod 2³¹ − 1 for j = 0 … 3, with the sum's bits m in pieces of 22 bits and a key k as long as
    they are: a Toeplitz matrix, whose four products agree for two given sums with probability 2⁻³⁰ each,
    independently. What leaves the device are 32 bytes, for a MAC.
    """
    import torch

    bits = total.detach().double().contiguous().view(torch.int64)
    pieces = torch.cat([bits & 0x3FFFFF, (bits >> 22) & 0x1FFFFF, (bits >> 43) & 0x1FFFFF])
    secret = DeviceStream(key, "digest", total.device).words(0, len(pieces) + 3) & _PRIME
    sums = [(secret[j : j + len(pieces)] * pieces % _PRIME).sum() % _PRIME for j in range(4)]
    limbs: npt.NDArray[np.int64] = torch.stack(sums).cpu().numpy()
    return limbs
