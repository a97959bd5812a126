"""Privacy losses on a grid: rounding a dominating pair to it, adding losses by Fourier transform, reading ε and δ.

Rounding *connects the dots* (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): the mass of the losses between
two grid points is split between them so that both P and Q keep theirs. The rounded pair dominates the exact one, so
every ε read off a grid is an upper bound at any step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quietgrad.privacy.composition import bag
from quietgrad.privacy.events import Event, RandomRound
from quietgrad.privacy.pairs import Array, Pair

LARGEST_LOSS = 600.0  # beyond it e^ℓ leaves the range of doubles; such losses count as infinite
Releases = Mapping[Event, int]
Spectrum = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class LossGrid:
    """A discrete pair: P-mass at losses h·(first + i), and the masses P and Q put where the other has none."""

    step: float
    first: int
    mass: Array
    infinite: float
    infinite_reversed: float = 0.0

    @property
    def losses(self) -> Array:
        """The grid's losses."""
        losses: Array = self.step * np.arange(self.first, self.first + self.mass.size, dtype=np.float64)
        return losses

    @property
    def variance(self) -> float:
        """Variance of the finite losses under P."""
        mean = float(np.dot(self.mass, self.losses))
        return float(np.dot(self.mass, (self.losses - mean) ** 2))

    def reversed(self) -> LossGrid:
        """The pair (Q, P): Q-mass at loss −ℓ is e^{−ℓ} times the P-mass at ℓ."""
        mass = (self.mass * np.exp(-self.losses))[::-1]
        first = -(self.first + self.mass.size - 1)
        return LossGrid(self.step, first, mass, self.infinite_reversed, self.infinite)

    def log_moment(self, order: float) -> float:
        """log E_P[e^{order·L}] over the finite losses."""
        exponents = order * self.losses
        largest = float(exponents.max(where=self.mass > 0.0, initial=-np.inf))
        return largest + math.log(float(np.dot(self.mass, np.exp(np.minimum(exponents - largest, 0.0)))))

    def delta(self, epsilon: float) -> float:
        """Infinite mass plus the sum over losses ℓ > ε of (1 − e^{ε−ℓ}) × mass."""
        start = max(0, math.floor(epsilon / self.step) + 1 - self.first)
        gaps = epsilon - self.losses[start:]
        return min(1.0, self.infinite - float(np.dot(self.mass[start:], np.expm1(np.minimum(gaps, 0.0)))))

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``; infinite when the infinite mass alone exceeds it."""
        if self.infinite >= delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        zero = max(0, -self.first)
        mass = self.mass[zero:]
        above = self.infinite + np.cumsum(mass[::-1])[::-1]
        decay = np.exp(-self.step * np.arange(mass.size))
        # δ exceeds ``delta`` at the loss of index low (or low = −1), and not at that of index high.
        low, high = -1, mass.size - 1
        while high - low > 1:
            middle = (low + high) // 2
            if above[middle] - np.dot(mass[middle:], decay[: mass.size - middle]) > delta:
                low = middle
            else:
                high = middle
        # Up to the loss of index high, δ(ε) = above − e^{ε − ℓ_high} Σ_{j ≥ high} mass_j e^{ℓ_high − ℓ_j}.
        seen = float(np.dot(mass[high:], decay[: mass.size - high]))
        return self.step * (self.first + zero + high) + math.log((float(above[high]) - delta) / seen)


Grids = Mapping[Event, LossGrid]


def discretise(pair: Pair, step: float, tail: float) -> LossGrid:
    """Round ``pair`` to the grid by connecting the dots, cutting tails of at most ``tail``.

    >>> from quietgrad.privacy.pairs import GaussianPair
    >>> grid = discretise(GaussianPair(1.0), 1e-2, 1e-12)
    >>> abs(float(grid.mass.sum()) + grid.infinite - 1.0) < 1e-14
    True
    """
    up, infinite, p_up = _half(*pair.above(_points(pair.reach_above(tail), step)), step)
    if pair.symmetric:
        down, infinite_reversed = up, infinite
        p_down = float(pair.above(np.zeros(1))[1][0])
    else:
        p_tail, q_tail = pair.below(_points(pair.reach_below(tail), step))
        down, infinite_reversed, _ = _half(p_tail, q_tail, step)
        p_down = float(q_tail[0])
    # ``down`` holds Q-masses at −ℓ; P's are e^{−ℓ} times those. What neither half holds lies at loss 0.
    mirrored = down * np.exp(-step * np.arange(down.size))
    centre = up[0] + down[0] + max(0.0, 1.0 - p_up - p_down)
    mass = np.concatenate((mirrored[:0:-1], [centre], up[1:]))
    return LossGrid(step, -(down.size - 1), mass, infinite, infinite_reversed)


def _points(reach: float, step: float) -> Array:
    points: Array = step * np.arange(max(1, math.ceil(min(reach, LARGEST_LOSS) / step)) + 1, dtype=np.float64)
    return points


def _half(p_tail: Array, q_tail: Array, step: float) -> tuple[Array, float, float]:
    """Masses at 0, h, 2h, … of the positive losses, the infinite mass, and P{L > 0}."""
    points = step * np.arange(p_tail.size)
    p = np.maximum(-np.diff(p_tail), 0.0)
    q = np.maximum(-np.diff(q_tail), 0.0)
    right = np.clip((p - np.exp(points[:-1]) * q) / -math.expm1(-step), 0.0, p)
    mass = np.zeros(p_tail.size)
    mass[:-1] = p - right
    mass[1:] += right
    last = min(float(p_tail[-1]), float(q_tail[-1]) * math.exp(points[-1]))
    mass[-1] += last
    return mass, float(p_tail[-1]) - last, float(p_tail[0])


def compose(releases: Releases, grids: Grids, window: tuple[float, float], tail: float) -> LossGrid:
    """Add the losses of all ``releases``; ``tail`` bounds the mass above the window of losses.

    Spectra multiply, repetitions are powers, random rounds are averages of powers. The transform is cyclic: losses
    above the window would come back below it, so their bound is added to the infinite mass; losses below it come
    back above, which errs to the safe side.
    """
    step = next(iter(grids.values())).step
    first = math.floor(window[0] / step)
    size = _fast_length(math.ceil(window[1] / step) - first + 2)
    spectra = {leaf: np.fft.rfft(_wrapped(grid, size)) for leaf, grid in grids.items()}
    composed = np.fft.irfft(_spectrum(releases, spectra), size)
    mass = np.maximum(np.roll(composed, -first % size if first >= 0 else -first), 0.0)
    finite = log_character(releases, {leaf: math.log1p(-grid.infinite) for leaf, grid in grids.items()})
    return LossGrid(step, first, mass, -math.expm1(finite) + tail)


def _wrapped(grid: LossGrid, size: int) -> Array:
    places = np.arange(grid.first, grid.first + grid.mass.size) % size
    return np.bincount(places, weights=grid.mass, minlength=size).astype(np.float64, copy=False)


def _spectrum(releases: Releases, spectra: Mapping[Event, Spectrum]) -> Spectrum:
    total = np.ones_like(next(iter(spectra.values())))
    for event, count in releases.items():
        if isinstance(event, RandomRound):
            inner = _spectrum(bag(event.inner), spectra)
            mixed, power, rounds = np.zeros_like(total), np.ones_like(total), 0
            steps: dict[int, Spectrum] = {}  # evenly spaced laws need one power only
            for number, weight in sorted(event.law):
                gap = number - rounds
                if gap not in steps:
                    steps = {gap: _power(inner, gap)}
                power, rounds = power * steps[gap], number
                mixed += weight * power
            total = total * _power(mixed, count)
        else:
            total = total * _power(spectra[event], count)
    return total


def _power(base: Spectrum, exponent: int) -> Spectrum:
    """base**exponent by squaring: much faster than complex powers through logarithms."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base
        exponent >>= 1
        if exponent:
            base = base * base
    return result


def _fast_length(least: int) -> int:
    """The smallest m·2^k ≥ ``least`` with m in {4, 5, 6, 8}: lengths the transform is quick at."""
    scale = 1 << max(0, (least - 1).bit_length() - 3)
    return next(m * scale for m in (4, 5, 6, 8) if m * scale >= least)


def log_character(releases: Releases, values: Mapping[Event, float]) -> float:
    """Extend the logarithm of a multiplicative quantity (a moment, a mass) from releases to their composition."""
    total = 0.0
    for event, count in releases.items():
        if isinstance(event, RandomRound):
            inner = log_character(bag(event.inner), values)
            logs = [math.log(weight) + number * inner for number, weight in event.law if weight > 0]
            largest = max(logs)
            total += count * (largest + math.log(math.fsum(math.exp(value - largest) for value in logs)))
        else:
            total += count * values[event]
    return total


def loss_window(releases: Releases, grids: Grids, deviation: float, tail: float) -> tuple[float, float]:
    """Return losses below and above which the composition has at most ``tail`` mass each, by Chernoff's bound.

    ``deviation`` is about the standard deviation of the total loss; it only tells which orders are worth trying.
    """
    if deviation == 0.0:  # too little noise: all losses are infinite
        return 0.0, 0.0
    need = math.log(1 / tail)
    best = math.sqrt(2 * need) / deviation
    bounds = []
    for sign in (-1, 1):
        reach = math.inf
        # Gaussian losses are best bounded near ``best``; rare large losses of tiny samples at smaller orders.
        orders = [scale * best for scale in (0.12, 0.25, 0.5, 0.8, 1.2)]
        orders += [order for order in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0) if order < orders[0]]
        for order in (sign * magnitude for magnitude in orders):
            moment = log_character(releases, {leaf: grid.log_moment(order) for leaf, grid in grids.items()})
            reach = min(reach, (moment + need) / abs(order))
        bounds.append(sign * reach)
    return min(bounds[0], 0.0), max(bounds[1], 0.0)
