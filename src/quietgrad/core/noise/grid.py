"""Gaussian and Laplace noise on a public grid of integers, so that the bits of a float reveal nothing of the sum.

A float sum plus float noise betrays the sum through its last bits (Mironov 2012). Here the sum is rounded to
whole units of a public power of two, the noise is rounded to whole units, and the two integers are added
exactly. Since rint(x + N) = x + rint(N) for an integer x, that is post-processing of the Gaussian (or
Laplace) mechanism on the rounded sum; the only cost is the rounding of the sum itself, which may move two
neighbouring sums apart by one unit per coordinate, √dim units in norm, under either relation. With
σ ≥ 2²⁰ units that is at most z·√dim·2⁻²⁰ of a record's bound, and it is paid: see :func:`grid_bound`.

On an accelerator the noise is added on the device, on the same grid. A device that does not reproduce the CPU's
numbers in a public trial is not used (:func:`usable`); its sums go through the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import SettingError
from quietgrad.core.noise.device import DeviceStream
from quietgrad.core.noise.rng import ZEROS, SecureStream

if TYPE_CHECKING:
    from torch import Tensor, device

__all__ = ["add_gaussian", "usable"]

Floats = npt.NDArray[np.float64]

# Words turned into normals at a time: input, output and scratch then stay in the second-level cache.
_CHUNK = len(ZEROS) // 8
# A probability of fewer than _COARSE steps of 2^-64 gets more bits, from counters no draw itself reaches.
_COARSE, _UPPER = np.uint64(1 << 48), 1 << 63

UNITS = 2**20  # a standard deviation (or scale) is between this many units of the grid and twice as many

# Sums are clamped to this many units. With the noise (< 2^25 units) added, integers stay below 2^53 and
# float64 adds them without rounding.
_CLAMP = np.array(2.0**52)  # an array: numpy takes longer to look at a number than to clamp a short vector
_MINUS_CLAMP = np.array(-(2.0**52))
_FLOAT64 = np.dtype(np.float64)
# Noise narrower than this has a step that float64 cannot divide by; wider noise overflows when squared.
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900


class NoiseStream(SecureStream):
    """A stream of noise: N(0, 1) and Exp(1) numbers addressed by (key, label, block)."""

    __slots__ = ()

    def normal(self, block: int, shape: int | tuple[int, ...]) -> Floats:
        """Return independent N(0, 1) numbers by inversion: no rejection whose duration would tell their size.

        Each takes one 64-bit word: one bit is the sign, the other 63 are k, and the number is ±Φ⁻¹(p) with
        p = (k + ½)·2⁻⁶⁴ in (0, ½), the lower tail, where floats keep p to full relative precision. Of 64
        bits alone the far tail would be porous: beyond 7.6 the possible outputs are further apart than the
        grid they are rounded to, and with 10⁸ draws a hole would be met. So for k < 2⁴⁸ (one draw in
        32768) a second word continues k, and outputs reach 13.

        What is left is float64 rounding. It moves an output by e ≤ 10⁻¹⁵(|x| + ⅕), hence the edges of the
        grid's cells: with σ = s < 2²¹ units (:mod:`quietgrad.core.noise.grid`) a cell's probability is off by
        a *factor* within 1 ± η, η = 2e·s ≤ 4.2·10⁻⁹(|x| + ⅕). The factors' logarithms have mean at most η²
        and add up as independent terms do: N numbers cost at most about 5·10⁻⁹·√(2N ln(1/δ')) in ε, except
        with probability δ'. For N = 5·10⁷ and δ' = 10⁻¹² that is 3·10⁻⁴, in the worst case.
        """
        out = np.empty(shape, np.float64)
        for _ in self.normal_pieces(block, out.size, out.reshape(-1)):
            pass
        return out

    def normal_pieces(self, block: int, size: int, memory: Floats | None = None) -> Iterator[tuple[slice, Floats]]:
        """The numbers of ``normal(block, size)`` and where they belong, a piece at a time.

        They are written to ``memory``. Without it the next piece overwrites the last one: for vectors as long as a
        network's, which would otherwise be written out only to be read once.
        """
        if size < _CHUNK:  # importing numba does not pay for a few numbers; the bits are the same
            yield slice(0, size), self._few(block, size, memory)
            return
        from quietgrad.core.compiled import give_signs

        for where, words, x in self._lower_pieces(block, size, memory):
            give_signs(words, x)
            yield where, x

    def add_normal(self, block: int, total: Floats, sigma: float, step: float) -> None:
        """:func:`add_discretized_gaussian` with ``normal(block, len(total))``, in one pass over a long sum."""
        if sigma == 0.0 or len(total) < _CHUNK or total.dtype != _FLOAT64 or not total.flags.c_contiguous:
            for where, piece in self.normal_pieces(block, len(total)):
                add_discretized_gaussian(total[where], piece, sigma, step)
            return
        from quietgrad.core.compiled import add_on_grid

        for where, words, x in self._lower_pieces(block, len(total)):
            add_on_grid(words, x, sigma / step, step, float(_CLAMP), total[where])

    def _few(self, block: int, size: int, memory: Floats | None) -> Floats:
        from scipy.special import ndtri  # not needed by those who only name a stream

        x = np.empty(size) if memory is None else memory
        words = self.uint64(block, size)
        k = words >> np.uint64(1)
        np.add(k.view(np.int64), 0.5, out=x)
        coarse = np.flatnonzero(k < _COARSE)
        if coarse.size:
            x[coarse] = self._finer(block, k[coarse], coarse)
        x *= 2.0**-64
        ndtri(x, out=x)
        bits = x.view(np.uint64)
        bits ^= words << np.uint64(63)
        return x

    def _lower_pieces(
        self, block: int, size: int, memory: Floats | None = None
    ) -> Iterator[tuple[slice, npt.NDArray[np.uint64], Floats]]:
        """Where each piece belongs, its words, and Φ⁻¹(p) ≤ 0 of these, whose signs are the words' lowest bits."""
        from quietgrad.core.compiled import lower_probabilities, lower_quantiles, quantile_scratch

        room = np.empty(_CHUNK, "<u8")
        piece = np.empty(_CHUNK) if memory is None else memory
        places, scratch = np.empty(_CHUNK, np.int64), quantile_scratch(_CHUNK)
        stream = self._open(block)
        for start in range(0, size, _CHUNK):
            where = slice(start, min(start + _CHUNK, size))
            x = piece[: where.stop - start] if memory is None else piece[where]
            stream.update_into(ZEROS[: 8 * x.size], room[: x.size].view(np.uint8).data)
            words = room[: x.size].astype(np.uint64, copy=False)
            count = lower_probabilities(words, x, places)
            if count:
                coarse = places[:count]
                x[coarse] = self._finer(block, words[coarse] >> np.uint64(1), coarse + start) * 2.0**-64
            lower_quantiles(x, scratch)
            yield where, words, x

    def _finer(self, block: int, k: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> Floats:
        """k + a fraction of 64 more bits, of words that no draw itself reaches."""
        more = self.at(block, places.astype(np.uint64) + np.uint64(_UPPER))
        finer: Floats = k + (more + 0.5) * 2.0**-64
        return finer

    def exponential(self, block: int, size: int) -> Floats:
        """Return independent Exp(1) numbers, both tails to full relative precision.

        One bit chooses the half, 63 bits give p in (0, ½): −ln p in the upper half, −ln(1 − p) in the lower.
        """
        u = self.uint64(block, size)
        p = ((u >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
        upper = (u & np.uint64(1)).astype(bool)
        return np.where(upper, -np.log(p), -np.log1p(-p))


def grid_step(sigma: float) -> float:
    """Return the grid's unit for noise of scale ``sigma``: the largest power of two ≤ sigma / 2²⁰."""
    if not _SMALLEST <= sigma <= _LARGEST:
        raise ValueError(f"sigma={sigma!r}: must be between 2^-900 and 2^900. Rescale the data or the clip.")
    return math.ldexp(0.5, math.frexp(sigma)[1]) / UNITS


def grid_bound(bound: float, dim: int, step: float) -> float:
    """Return the record bound C + √dim·step that covers the rounding of a sum to the grid.

    Rounding moves each coordinate of two sums by at most half a unit each, so their distance grows by at
    most √dim·step: to C + √dim·step under add-remove and to 2C + √dim·step ≤ 2(C + √dim·step) under
    replace-one. One number therefore serves both relations.
    """
    return bound + math.sqrt(dim) * step


@lru_cache(maxsize=256)  # a slot mostly asks for the same again
def sigma_for(noise_multiplier: float, bound: float, dim: int) -> tuple[float, float]:
    """Return (sigma, step): the noise that makes a release worth ``noise_multiplier``, rounding included.

    The step is fixed by z·C first; then sigma = z·(C + √dim·step). A query whose bound is 0 is identically
    zero (SPIDER's difference of two equal iterates): its noise is 0 too, and so is what is released.
    """
    if not 0.0 < noise_multiplier < math.inf:
        raise SettingError(
            "{noise_multiplier}: must be > 0. A non-private run adds no noise.", noise_multiplier=noise_multiplier
        )
    if bound == 0.0:
        return 0.0, 0.0
    if not 0.0 < bound < math.inf:
        raise ValueError(f"bound={bound!r}: must be a finite number ≥ 0; it is one record's L2 bound.")
    step = grid_step(noise_multiplier * bound)
    return noise_multiplier * grid_bound(bound, dim, step), step


def add_discretized_gaussian(
    total: Floats | npt.NDArray[np.float32] | Tensor, unit: Floats, sigma: float, step: float
) -> None:
    """Replace the sum ``total`` by what may be published: (rint(total/step) + rint(unit·σ/step))·step.

    Sums beyond ±2⁵² units are clamped coordinate by coordinate. Clamping is a projection, so it brings
    neighbouring sums no further apart, and no error is raised that would depend on the data. A float32
    ``total`` is noised in float64 and rounded last, which is post-processing.

    Args:
        total: one flat sum, a numpy array or a CPU torch tensor; changed in place.
        unit: as many N(0, 1) numbers, from :meth:`NoiseStream.normal`; not changed.
        sigma: standard deviation on the sum, and ``step`` its grid, both from :func:`sigma_for`.
    """
    if not isinstance(total, np.ndarray):
        try:
            total = total.detach().numpy()  # its memory as an array, without importing torch
        except AttributeError:
            kind = type(total).__name__
            raise TypeError(f"total is a {kind}: must be a numpy array or a CPU torch tensor.") from None
        except TypeError:
            raise TypeError("total is a tensor on another device: move it with total.cpu() first.") from None
    if sigma == 0.0:
        total[...] = 0.0
        return
    wide = total if total.dtype == _FLOAT64 else total.astype(np.float64)
    # Dividing by a power of two is exact, and so is everything after rint: all are integers below 2^53.
    np.multiply(wide, 1.0 / step, out=wide)
    np.rint(wide, out=wide)
    np.minimum(wide, _CLAMP, out=wide)
    np.maximum(wide, _MINUS_CLAMP, out=wide)
    noise = unit * (sigma / step)
    np.rint(noise, out=noise)
    np.add(wide, noise, out=wide)
    np.multiply(wide, step, out=wide)
    if wide is not total:
        total[...] = wide


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0.0 < value < math.inf:
            raise SettingError(f"{{{name}}}: must be a finite number > 0.", **{name: value})


def l2_laplace_for(epsilon: float, sensitivity: float, dim: int) -> tuple[float, float]:
    """Return (scale, step) for a pure ε-DP release of a vector by L2-Laplace noise, rounding included.

    ``sensitivity`` is the L2 distance Δ of the vector on neighbours (the caller's relation is in it);
    scale = (Δ + √dim·step)/ε.
    """
    _check_positive(epsilon=epsilon, sensitivity=sensitivity)
    step = grid_step(sensitivity / epsilon)
    return grid_bound(sensitivity, dim, step) / epsilon, step


def l2_laplace(dim: int, scale: float, stream: NoiseStream, block: int, step: float | None = None) -> Floats:
    """Return noise of density ∝ exp(−‖x‖/scale) on ℝ^dim, rounded to the grid of ``step`` (``grid_step(scale)``).

    Noise for a sum needs the step that the sum is rounded to: on a coarser grid it would leave the sum's last bit
    bare.

    ‖x‖ is Gamma(dim, scale), a sum of ``dim`` exponentials, and the direction is a normalised Gaussian.
    Takes the blocks 2·``block`` and 2·``block`` + 1 of the stream. Its arithmetic is finite, so strictly
    the claim is not (ε, 0) but of the order (ε + 10⁻⁸·dim, 10⁻¹²·dim): see :meth:`NoiseStream.normal`.
    """
    step = grid_step(scale) if step is None else step
    direction = stream.normal(2 * block, dim)
    radius = scale * math.fsum(stream.exponential(2 * block + 1, dim))
    noise = direction * (radius / (float(np.linalg.norm(direction)) * step))
    return np.rint(noise) * step


def release_l2_laplace(total: Floats | Tensor, scale: float, step: float, stream: NoiseStream, block: int) -> None:
    """Replace the vector ``total`` by its ε-DP release on the grid, in place; see :func:`l2_laplace_for`."""
    noise = l2_laplace(math.prod(total.shape), scale, stream, block, step)
    add_discretized_gaussian(total, noise.reshape(tuple(total.shape)), 1.0, step)


def noisy_argmax(scores: npt.ArrayLike, epsilon: float, sensitivity: float, stream: NoiseStream, block: int) -> int:
    """Return the index chosen by the exponential mechanism: P(i) ∝ exp(ε·scores[i] / (2·sensitivity)).

    Drawn as the arg max of ε·score/(2Δ) plus Gumbel noise. It is ε-DP when neighbours change every score by
    at most ``sensitivity``, and, its privacy loss having range ε, also ε²/8-zCDP (Cesar and Rogers 2021).
    Non-finite scores count as the worst one, because an error would tell which record caused it.
    """
    _check_positive(epsilon=epsilon, sensitivity=sensitivity)
    values = np.array(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"scores of shape {values.shape}: must be a non-empty list of numbers.")
    finite = np.isfinite(values)
    values[~finite] = values[finite].min() if finite.any() else 0.0
    gumbel = -np.log(stream.exponential(block, values.size))
    return int(np.argmax(values * (epsilon / (2.0 * sensitivity)) + gumbel))


def add_gaussian(total: Tensor, unit: Tensor, sigma: float, step: float) -> None:
    """:func:`add_discretized_gaussian` on a device."""
    if sigma == 0.0:
        total.zero_()
        return
    # Division by a power of two is exact, and so is what follows: all are whole numbers below 2⁵³.
    total.mul_(1.0 / step).round_().clamp_(-(2.0**52), 2.0**52)
    total.add_((unit * (sigma / step)).round_()).mul_(step)


@cache
def usable(where: device) -> bool:
    """Whether a device gives the CPU's numbers on a public trial: the cipher exactly, Φ⁻¹ within 10⁻¹⁵(|x| + ⅕)."""
    import torch

    try:
        here, there = (DeviceStream(bytes(32), "trial", place) for place in (torch.device("cpu"), where))
        if not torch.equal(here.words(0, 1 << 16), there.words(0, 1 << 16).cpu()):
            return False
        # From the far tail to the middle, on both sides of where Φ⁻¹ changes its formula (e⁻², e⁻³²).
        p = torch.cat([
            torch.logspace(-38, -0.3011, 60_000, dtype=torch.float64),
            torch.linspace(0.1, 0.5, 60_000, dtype=torch.float64),
        ])  # fmt: skip
        wanted, computed = torch.special.ndtri(p), torch.special.ndtri(p.to(where)).cpu()
        close = bool(((wanted - computed).abs() <= 1e-15 * (wanted.abs() + 0.2)).all())
        total, unit = 1e3 * wanted, wanted.flip(0)
        moved = total.to(where)
        add_gaussian(total, unit, 1.37, 2.0**-20)
        add_gaussian(moved, unit.to(where), 1.37, 2.0**-20)
        return close and torch.equal(total, moved.cpu())
    except (RuntimeError, TypeError, NotImplementedError):  # no float64 there, or no whole numbers of 64 bits
        return False
