"""Coarse grids and 32-bit rings for long vectors: dithered rounding, its sensitivity, and the law's divergence.

A sum mod 2^b is post-processing of the sum, so the width of a ring is a matter of correctness alone. Half the width
means half the bytes and half the mask streams, and σ = 2^20 grid units in place of 2^28. Two things keep that as
private and as accurate (``docs/secure-sums-proof.md``). A party's sum is rounded with a fresh secret dither. The
distance of the discrete from the rounded Gaussian is bounded over the whole run by Pinsker's inequality and the
chain rule of KL. Vectors are worked on a chunk at a time, on all cores, in place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream

Bits = Literal[32, 64]
AnyWords = npt.NDArray[np.uint64] | npt.NDArray[np.uint32]
COARSE_UNITS = 2.0**20
"""σ in grid units of a 32-bit ring."""
CHUNK = 1 << 16
"""Coordinates that are worked on at a time; a multiple of four, so that chunks begin at whole blocks of AES."""
FAILURE = 2.0**-70
"""β: each of the two bounds on a dithered shift fails with at most this probability."""
CHUNK_BLOCKS = 1 << 48
"""Chunk c of round t draws from block t + c·2^48 of its stream."""


def word_type(bits: int) -> npt.DTypeLike:
    return np.dtype("<u4" if bits == 32 else "<u8")


def in_chunks(size: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(first, last)`` for every chunk of ``size`` coordinates, on all cores if there are several."""
    chunks = [(first, min(first + CHUNK, size)) for first in range(0, size, CHUNK)]
    cores = min(len(chunks), os.cpu_count() or 1)
    if cores < 2:
        for first, last in chunks:
            work(first, last)
        return
    with ThreadPoolExecutor(cores) as pool:
        for done in [pool.submit(work, first, last) for first, last in chunks]:
            done.result()


def add_streams(out: AnyWords, streams: Sequence[tuple[SecureStream, int]], t: int) -> None:
    """out += Σ sign·(block t of a stream), mod 2^b, in place."""

    def work(first: int, last: int) -> None:
        part: Any = out[first:last]
        for stream, sign in streams:
            words: Any = stream.words(t, last - first, out.dtype, first)
            if sign > 0:
                part += words
            else:
                part -= words

    in_chunks(len(out), work)


def add_rounded(
    out: npt.NDArray[np.uint32], vector: npt.ArrayLike, *, bound: float, step: float, dither: SecureStream, t: int
) -> None:
    """out += ⌊x/step + u⌋ mod 2^32 with x the vector, shortened to L2 norm ``bound``, and u a fresh secret dither.

    u is a multiple of 2^−32 and block t of ``dither`` is for this vector alone.
    """
    x = np.asarray(vector, np.float64)
    if x.shape != out.shape:
        raise DataError(f"vector of shape {x.shape}: must have shape {out.shape}, as agreed at the start.")
    largest = float(max(x.max(), -x.min()))
    if not math.isfinite(largest):
        raise DataError("vector: has a NaN or an infinity. Count such contributions as zero before summing.")
    # In units of the largest entry, so that no square overflows or vanishes; of zeros too, so that the time taken
    # does not tell them from an update.
    unit = largest if largest > 0.0 else 1.0
    squares = math.fsum(_squares(x[first : first + CHUNK], unit) for first in range(0, len(x), CHUNK))
    length, factor = unit * math.sqrt(squares), 1.0 / step
    if length > bound:
        factor *= bound / length

    from quietgrad.core.compiled import add_dithered  # imports numba

    def work(first: int, last: int) -> None:
        words = dither.words(t, last - first, np.dtype("<u4"), first)
        add_dithered(x[first:last], factor, words, out[first:last])

    in_chunks(len(x), work)


def _squares(x: npt.NDArray[np.float64], unit: float) -> float:
    scaled = x / unit
    return float(np.einsum("i,i->", scaled, scaled))


def dithered_sensitivity(clip: float, dimension: int) -> float:
    """The L2 sensitivity in grid units of a dithered sum of vectors of norm ``clip`` grid units, but for 2β.

    ‖D‖² ≤ C² + d/4 + 2C√(ln(1/β)/2) + √(d·ln(1/β)/2) with C = clip + 1: the one unit covers the dither's own grid
    (√d·2^−32) and the rounding of floating-point numbers below 2^28 units.

    >>> round(dithered_sensitivity(2.0**20, 7_000_000) / 2.0**20, 6)
    1.000006
    """
    c, tail = clip + 1.0, math.sqrt(-math.log(FAILURE) / 2.0)
    return math.sqrt(c * c + dimension / 4.0 + 2.0 * c * tail + math.sqrt(dimension) * tail)


def dithered_clip(multiplier: float, dimension: int) -> float:
    """The clip in grid units whose dithered sensitivity, times ``multiplier``, is σ.

    Raises:
        ValueError: the grid is too coarse, since more than half of the sensitivity would be rounding.

    >>> clip = dithered_clip(2.0, 1000)
    >>> round(2.0 * dithered_sensitivity(clip, 1000) / COARSE_UNITS, 12)
    1.0
    """
    whole, tail = COARSE_UNITS / multiplier, math.sqrt(-math.log(FAILURE) / 2.0)
    left = whole**2 - dimension / 4.0 - math.sqrt(dimension) * tail + tail**2
    clip = (math.sqrt(left) if left > 0.0 else 0.0) - tail - 1.0
    if clip < 0.5 * whole:
        raise ValueError(f"noise multiplier {multiplier:g} in {dimension} dimensions: the grid is too coarse.")
    return clip


def divergence(sigma: float) -> float:
    """KL(N_Z(0, σ²) ‖ rounded N(0, σ²)) of one number, from above, for every σ > 0.

    E U² = 1/12 and E U⁴ = 1/80 for U uniform on ±½, and s_j = 2πσj:

        KL ≤ (1 − E k²/σ²)/24σ² + E k⁴/960σ⁸,
        1 − E k²/σ² ≤ 2 Σ s_j² exp(−s_j²/2),   E k⁴ ≤ σ⁴ (3 + 2 Σ (3 + s_j⁴) exp(−s_j²/2)).

    >>> divergence(2.0**20) * 320 * 2.0**80
    1.0
    """
    waves = [2.0 * math.pi * sigma * j for j in range(1, max(3, math.ceil(8.0 / sigma)))]
    second = 2.0 * math.fsum(s**2 * math.exp(-(s**2) / 2.0) for s in waves)
    fourth = 3.0 + 2.0 * math.fsum((3.0 + s**4) * math.exp(-(s**2) / 2.0) for s in waves)
    return second / (24.0 * sigma**2) + fourth / (960.0 * sigma**4)
