"""Runs of DP-GD and SPIDER on a chain of curved valleys, many settings and seeds at once.

The risk is F(x) = ½(x₁ − 1)² + ½κ Σ(x_{i+1} − x_i²)² with κ = 10 and d = 5, entered at x = 0 and left at x = 1.
Record (i, ±) adds the slope ±ς·e_i, so every record's gradient is about ς long while the mean is F's own, and all
records have the same Hessian: G = 1.1ς is the clip of full gradients in both methods, and M = 5κ, the largest
curvature along the valley, bounds differences by M‖x − x′‖.

Every release asks all n records, so budgets compose exactly: T releases of DP-GD have noise ς·1.1√T/(nμ) each;
SPIDER's K full gradients spend the share s of μ² and its T − K differences the rest. Sums are those of infinitely
many records of each kind, which saves the records; ``tests/methods/test_spider.py`` runs the library's own method
on real ones and gets the same path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Settings = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., object])
_compiled: Callable[[_Function], _Function] = njit(error_model="numpy")

KAPPA, DIM = 10.0, 5
SMOOTHNESS = 5.0 * KAPPA
FAR = 1e3  # where a run that diverges is left
_CHUNK = 400  # steps whose noise is drawn at once


@dataclass(frozen=True)
class Cell:
    """One place of the picture: how records spread, and the noise of a whole budget's full gradient."""

    spread: float
    noise: float

    @property
    def clip(self) -> float:
        return 1.1 * self.spread

    @property
    def n_mu(self) -> float:
        return self.spread * math.sqrt(DIM) / self.noise


def value(x: Floats) -> Floats:
    """F; points are along the last axis."""
    bends = x[..., 1:] - x[..., :-1] ** 2
    return np.asarray(0.5 * KAPPA * (bends**2).sum(-1) + 0.5 * (x[..., 0] - 1.0) ** 2)


def gradient(x: Floats) -> Floats:
    """∇F."""
    bends = KAPPA * (x[..., 1:] - x[..., :-1] ** 2)
    out = np.zeros_like(x)
    out[..., 1:] = bends
    out[..., :-1] -= 2.0 * bends * x[..., :-1]
    out[..., 0] += x[..., 0] - 1.0
    return out


def norms(points: Floats) -> Floats:
    """‖∇F‖ at the points; a run that diverged counts as far away."""
    return np.asarray(np.minimum(np.linalg.norm(gradient(points), axis=-1), FAR))


def path_length() -> float:
    """How far descent without noise walks from 0 to the minimum: the public radius of this family."""
    x, length = np.zeros(DIM), 0.0
    for _ in range(50_000):
        step = 0.02 * gradient(x)
        x, length = x - step, length + float(np.linalg.norm(step))
    return length


def ends(
    name: str, cell: Cell, steps: int, settings: Sequence[Settings], seed: int, runs: int
) -> tuple[Floats, Floats]:
    """Where each setting's runs end, and their averages of the second half, by setting and run.

    All settings hear the same noise, which ``seed`` decides.
    """
    advance, table = (_descend, _descent_table) if name == "dp-gd" else (_spider, _spider_table)
    given = table(cell, steps, settings)
    rng = np.random.default_rng(seed)
    state = np.zeros((len(settings), 5, DIM, runs))  # point, direction, point and slope before, sum
    for start in range(0, steps, _CHUNK):
        noise = rng.standard_normal((min(_CHUNK, steps - start), DIM, runs))
        advance(state, noise, given, start, steps, cell.spread, cell.clip)
    last, total = (state[:, each].transpose(0, 2, 1) for each in (0, 4))
    return last, total / (steps - (steps + 1) // 2)


def points(name: str, cell: Cell, settings: Settings, seed: int, runs: int) -> Floats:
    """What runs of one setting return."""
    last, average = ends(name, cell, settings["steps"], [settings], seed, runs)
    return np.asarray(average[0] if settings["average"] else last[0])


def _descent_table(cell: Cell, steps: int, settings: Sequence[Settings]) -> Floats:
    """Step size, decay, momentum and noise of each setting."""
    noise = cell.clip * math.sqrt(steps) / cell.n_mu
    return np.array([[s["learning_rate"], s["decay"], s["momentum"], noise] for s in settings], dtype=np.float64)


def _spider_table(cell: Cell, steps: int, settings: Sequence[Settings]) -> Floats:
    """Step size, decay, period and both noises of each setting."""
    rows = []
    for each in settings:
        period = math.ceil(steps / each["full_gradients"])
        full = math.ceil(steps / period)
        share = each["split"] if full < steps else 1.0  # full gradients alone have all of the budget
        first = math.sqrt(full / share) * cell.clip / cell.n_mu
        second = math.sqrt((steps - full) / (1.0 - each["split"])) * SMOOTHNESS / cell.n_mu
        rows.append([each["learning_rate"], each["decay"], period, first, second])
    return np.array(rows, dtype=np.float64)


@_compiled
def _slope(x: Floats, out: Floats, square: Floats) -> None:
    """∇F and its square length; runs are along the last axis, where the compiler vectorises."""
    runs = x.shape[1]
    for r in range(runs):
        out[0, r] = x[0, r] - 1.0
        square[r] = 0.0
    for i in range(DIM - 1):
        for r in range(runs):
            bend = KAPPA * (x[i + 1, r] - x[i, r] * x[i, r])
            out[i + 1, r] = bend
            out[i, r] -= 2.0 * bend * x[i, r]
            square[r] += out[i, r] * out[i, r]
    for r in range(runs):
        square[r] += out[DIM - 1, r] * out[DIM - 1, r]


@_compiled
def _clip_records(slope: Floats, square: Floats, spread: float, clip: float) -> None:
    """Replace ∇F by the mean over the 2d kinds of records of clip_C(∇F ± ς·e_i)."""
    more = np.zeros(DIM)
    for r in range(slope.shape[1]):
        if square[r] <= (clip - spread) * (clip - spread):  # then no record is clipped, and slopes of ±ς cancel
            continue
        weights = 0.0
        for i in range(DIM):
            more[i] = 0.0
            for sign in (-spread, spread):
                length = math.sqrt(max(square[r] + 2.0 * sign * slope[i, r] + spread * spread, 1e-300))
                weight = min(1.0, clip / length)
                weights += weight
                more[i] += sign * weight
        for i in range(DIM):
            slope[i, r] = (weights * slope[i, r] + more[i]) / (2.0 * DIM)


@_compiled
def _move(x: Floats, v: Floats, total: Floats, size: float, weight: float) -> None:
    """One step along the direction; ``weight`` is 1 in the second half, whose points are summed."""
    for i in range(DIM):
        for r in range(x.shape[1]):
            x[i, r] = min(max(x[i, r] - size * v[i, r], -FAR), FAR)
            total[i, r] += weight * x[i, r]


@_compiled
def _descend(
    state: Floats, noise: Floats, given: Floats, start: int, steps: int, spread: float, clip: float
) -> None:
    """DP-GD: v ← mv + (1 − m)(clipped mean + noise), x ← x − ηv."""
    runs = state.shape[3]
    slope, square = np.zeros((DIM, runs)), np.zeros(runs)
    for k in range(state.shape[0]):
        eta, decay, momentum, scale = given[k]
        x, v, total = state[k, 0], state[k, 1], state[k, 4]
        for j in range(noise.shape[0]):
            t = start + j
            _slope(x, slope, square)
            _clip_records(slope, square, spread, clip)
            kept = 0.0 if t == 0 else momentum
            for i in range(DIM):
                for r in range(runs):
                    v[i, r] = kept * v[i, r] + (1.0 - kept) * (slope[i, r] + scale * noise[j, i, r])
            _move(x, v, total, eta * (1.0 - decay * t / steps), 1.0 if 2 * t >= steps else 0.0)


@_compiled
def _spider(
    state: Floats, noise: Floats, given: Floats, start: int, steps: int, spread: float, clip: float
) -> None:
    """SPIDER with split noise: a full gradient at the start of each period, clipped differences in between."""
    runs = state.shape[3]
    slope, square = np.zeros((DIM, runs)), np.zeros(runs)
    moved, change = np.zeros(runs), np.zeros(runs)
    for k in range(state.shape[0]):
        eta, decay, length, first, second = given[k]
        period = round(length)
        x, v, before, slope_before, total = state[k, 0], state[k, 1], state[k, 2], state[k, 3], state[k, 4]
        for j in range(noise.shape[0]):
            t = start + j
            _slope(x, slope, square)
            if t % period == 0:
                slope_before[:] = slope
                _clip_records(slope, square, spread, clip)
                for i in range(DIM):
                    for r in range(runs):
                        v[i, r] = slope[i, r] + first * noise[j, i, r]
            else:
                moved[:] = 0.0
                change[:] = 0.0
                for i in range(DIM):
                    for r in range(runs):
                        moved[r] += (x[i, r] - before[i, r]) ** 2
                        change[r] += (slope[i, r] - slope_before[i, r]) ** 2
                for r in range(runs):
                    moved[r] = math.sqrt(moved[r])
                    change[r] = min(1.0, SMOOTHNESS * moved[r] / max(math.sqrt(change[r]), 1e-300))
                    moved[r] *= second
                for i in range(DIM):
                    for r in range(runs):
                        v[i, r] += change[r] * (slope[i, r] - slope_before[i, r]) + moved[r] * noise[j, i, r]
                        slope_before[i, r] = slope[i, r]
            before[:] = x
            _move(x, v, total, eta * (1.0 - decay * t / steps), 1.0 if 2 * t >= steps else 0.0)
