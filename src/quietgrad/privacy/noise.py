"""Noise, and how it is added: on a public grid of integers, so that floating point gives nothing away.

A float sum plus float noise betrays the sum through its last bits (Mironov 2012). Here the sum is rounded to
whole units of a public power of two, the noise is rounded to whole units, and the two integers are added
exactly. Since rint(x + N) = x + rint(N) for an integer x, that is post-processing of the Gaussian (or
Laplace) mechanism on the rounded sum; the only price is the rounding of the sum itself, which may move two
neighbouring sums apart by one unit per coordinate, √dim units in norm, under either relation. With
σ ≥ 2²⁰ units that is at most z·√dim·2⁻²⁰ of a record's bound, and it is paid: see :func:`grid_bound`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.rng import SecureStream

UNITS = 2**20  # a standard deviation (or scale) is between this many units of the grid and twice as many

# Sums are clamped to this many units. With the noise (< 2^25 units) added, integers stay below 2^53 and
# float64 adds them without rounding.
_CLAMP = np.array(2.0**52)  # an array: numpy takes longer to look at a number than to clamp a short vector
_MINUS_CLAMP = np.array(-(2.0**52))
_FLOAT64 = np.dtype(np.float64)
# Noise narrower than this has a step that float64 cannot divide by; wider noise overflows when squared.
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900


def grid_step(sigma: float) -> float:
    """Return the grid's unit for noise of scale ``sigma``: the largest power of two ≤ sigma / 2²⁰.

    >>> grid_step(1.0) == 2.0**-20, grid_step(3.0) == 2.0**-19
    (True, True)
    """
    if not _SMALLEST <= sigma <= _LARGEST:
        raise ValueError(f"sigma={sigma!r}: must be between 2^-900 and 2^900. Rescale the data or the clip.")
    return math.ldexp(0.5, math.frexp(sigma)[1]) / UNITS


def grid_bound(bound: float, dim: int, step: float) -> float:
    """Return the record bound C + √dim·step that covers the rounding of a sum to the grid.

    Rounding moves each coordinate of two sums by at most half a unit each, so their distance grows by at
    most √dim·step: to C + √dim·step under add-remove and to 2C + √dim·step ≤ 2(C + √dim·step) under
    replace-one. One number therefore serves both relations.

    >>> grid_bound(1.0, 4, 0.001)
    1.002
    """
    return bound + math.sqrt(dim) * step


def sigma_for(noise_multiplier: float, bound: float, dim: int) -> tuple[float, float]:
    """Return (sigma, step): the noise that makes a release worth ``noise_multiplier``, rounding included.

    The step is fixed by z·C first; then sigma = z·(C + √dim·step). A query whose bound is 0 is identically
    zero (SPIDER's difference of two equal iterates): its noise is 0 too, and so is what is released.

    >>> sigma, step = sigma_for(2.0, 1.0, dim=100)
    >>> step == 2.0**-19, sigma == 2.0 * (1.0 + 10 * step)
    (True, True)
    """
    if not 0.0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier={noise_multiplier!r}: must be > 0. A non-private run adds no noise.")
    if bound == 0.0:
        return 0.0, 0.0
    if not 0.0 < bound < math.inf:
        raise ValueError(f"bound={bound!r}: must be a finite number ≥ 0; it is one record's L2 bound.")
    step = grid_step(noise_multiplier * bound)
    return noise_multiplier * grid_bound(bound, dim, step), step


def release_gaussian(total: Any, unit: npt.NDArray[np.float64], sigma: float, step: float) -> None:
    """Replace the sum ``total`` by what may be published: (rint(total/step) + rint(unit·σ/step))·step.

    Sums beyond ±2⁵² units are clamped coordinate by coordinate. Clamping is a projection, so it brings
    neighbouring sums no further apart, and no error is raised that would depend on the data. A float32
    ``total`` is noised in float64 and rounded last, which is post-processing.

    Args:
        total: one flat sum, a numpy array or a CPU torch tensor; changed in place.
        unit: as many N(0, 1) numbers, from :meth:`SecureStream.normal`; not changed.
        sigma: standard deviation on the sum, and ``step`` its grid, both from :func:`sigma_for`.

    >>> total = np.array([0.3, -1.0])
    >>> sigma, step = sigma_for(1.0, 1.0, dim=2)
    >>> release_gaussian(total, np.array([0.5, 0.1]), sigma, step)
    >>> total.round(3).tolist(), (total / step % 1).tolist()
    ([0.8, -0.9], [0.0, 0.0])
    """
    if not isinstance(total, np.ndarray):
        total = _numpy_view(total)
    if sigma == 0.0:
        total[...] = 0.0
    elif total.dtype == _FLOAT64:
        _add_on_grid(total, unit, sigma / step, step)
    else:
        wide = total.astype(np.float64)
        _add_on_grid(wide, unit, sigma / step, step)
        total[...] = wide


def _add_on_grid(total: npt.NDArray[np.float64], unit: npt.NDArray[np.float64], scale: float, step: float) -> None:
    # Dividing by a power of two is exact, and so is everything after rint: all are integers below 2^53.
    np.multiply(total, 1.0 / step, out=total)
    np.rint(total, out=total)
    np.minimum(total, _CLAMP, out=total)
    np.maximum(total, _MINUS_CLAMP, out=total)
    noise = unit * scale
    np.rint(noise, out=noise)
    np.add(total, noise, out=total)
    np.multiply(total, step, out=total)


def _numpy_view(total: Any) -> npt.NDArray[Any]:
    """Return the memory of a CPU torch tensor as an array, without importing torch."""
    try:
        view: npt.NDArray[Any] = total.detach().numpy()
    except AttributeError:
        kind = type(total).__name__
        raise TypeError(f"total is a {kind}: must be a numpy array or a CPU torch tensor.") from None
    except TypeError:
        raise TypeError("total is a tensor on another device: move it with total.cpu() first.") from None
    return view


def l2_laplace_for(epsilon: float, sensitivity: float, dim: int) -> tuple[float, float]:
    """Return (scale, step) for a pure ε-DP release of a vector by L2-Laplace noise, rounding included.

    ``sensitivity`` is the L2 distance Δ of the vector on neighbours (the caller's relation is in it);
    scale = (Δ + √dim·step)/ε.

    >>> scale, step = l2_laplace_for(0.5, 1.0, dim=16)
    >>> scale == (1.0 + 4 * step) / 0.5
    True
    """
    for name, value in (("epsilon", epsilon), ("sensitivity", sensitivity)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: must be a finite number > 0.")
    step = grid_step(sensitivity / epsilon)
    return grid_bound(sensitivity, dim, step) / epsilon, step


def l2_laplace(
    dim: int, scale: float, stream: SecureStream, block: int, step: float | None = None
) -> npt.NDArray[np.float64]:
    """Return noise of density ∝ exp(−‖x‖/scale) on ℝ^dim, rounded to the grid of ``step`` (``grid_step(scale)``).

    Noise for a sum needs the step that the sum is rounded to: on a coarser grid it would leave the sum's last bit
    bare.

    ‖x‖ is Gamma(dim, scale), a sum of ``dim`` exponentials, and the direction is a normalised Gaussian.
    Takes the blocks 2·``block`` and 2·``block`` + 1 of the stream. Its arithmetic is finite, so strictly
    the claim is not (ε, 0) but of the order (ε + 10⁻⁸·dim, 10⁻¹²·dim): see :meth:`SecureStream.normal`.

    >>> from quietgrad.privacy.rng import seed_key
    >>> l2_laplace(3, 1.0, SecureStream(seed_key(0), "output"), 0).shape
    (3,)
    """
    step = grid_step(scale) if step is None else step
    direction = stream.normal(2 * block, dim)
    radius = scale * math.fsum(stream.exponential(2 * block + 1, dim))
    noise = direction * (radius / (float(np.linalg.norm(direction)) * step))
    return np.rint(noise) * step


def release_l2_laplace(total: Any, scale: float, step: float, stream: SecureStream, block: int) -> None:
    """Replace the vector ``total`` by its ε-DP release on the grid, in place; see :func:`l2_laplace_for`.

    >>> from quietgrad.privacy.rng import seed_key
    >>> weights = np.zeros(3)
    >>> scale, step = l2_laplace_for(1.0, 1.0, dim=3)
    >>> release_l2_laplace(weights, scale, step, SecureStream(seed_key(0), "output"), 0)
    >>> (weights / step % 1).tolist()
    [0.0, 0.0, 0.0]
    """
    noise = l2_laplace(math.prod(total.shape), scale, stream, block, step)
    release_gaussian(total, noise.reshape(tuple(total.shape)), 1.0, step)


def noisy_argmax(
    scores: npt.ArrayLike, epsilon: float, sensitivity: float, stream: SecureStream, block: int
) -> int:
    """Return the index chosen by the exponential mechanism: P(i) ∝ exp(ε·scores[i] / (2·sensitivity)).

    Drawn as the arg max of ε·score/(2Δ) plus Gumbel noise. It is ε-DP when neighbours change every score by
    at most ``sensitivity``, and, its privacy loss having range ε, also ε²/8-zCDP (Cesar and Rogers 2021).
    Non-finite scores count as the worst one, because an error would tell which record caused it.

    >>> from quietgrad.privacy.rng import seed_key
    >>> noisy_argmax([0.0, 50.0, 0.0], 1.0, 1.0, SecureStream(seed_key(0), "choose"), 0)
    1
    """
    for name, value in (("epsilon", epsilon), ("sensitivity", sensitivity)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: must be a finite number > 0.")
    values = np.array(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"scores of shape {values.shape}: must be a non-empty list of numbers.")
    finite = np.isfinite(values)
    values[~finite] = values[finite].min() if finite.any() else 0.0
    gumbel = -np.log(stream.exponential(block, values.size))
    return int(np.argmax(values * (epsilon / (2.0 * sensitivity)) + gumbel))
