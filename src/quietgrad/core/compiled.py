"""Compiled kernels: Gaussian noise, random subsets, and sums of two laws. Importing this imports numba."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., object])
_compiled: Callable[[_Function], _Function] = njit(cache=True, nogil=True, error_model="numpy")

PIECE = 1 << 14  # numbers taken through all loops before the next ones
_EDGE = 0.13533528323661269189  # e⁻²: below it is the tail
_SQRT_2PI = 2.50662827463100050242
_ROOM = 8  # places in the table per displaced record: few collisions, and small batches stay in first-level cache


def quantile_scratch(size: int) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Memory that :func:`lower_quantiles` works in."""
    room = min(PIECE, size) + 1
    return np.empty(room, np.int64), np.empty(room), np.empty(room)


def lower_quantiles(p: Floats, scratch: tuple[npt.NDArray[np.int64], Floats, Floats] | None = None) -> None:
    """Replace p in (0, ½) by Φ⁻¹(p) ≤ 0, in place: scipy's `ndtri`, bit for bit, in a third of its time.

    The rational approximations are those of Cephes, which scipy calls one number at a time. Here a piece that stays
    in the cache goes through loops without branches, which the compiler vectorises. The quarter of the numbers in
    the tail are set apart first, because only they need logarithms. No operation is reordered or fused, and
    logarithms are the C library's, as scipy's are: a test compares all bits.
    """
    scratch = scratch or quantile_scratch(p.size)
    for start in range(0, p.size, PIECE):
        _invert(p[start : start + PIECE], *scratch)


@_compiled
def _invert(p: Floats, places: npt.NDArray[np.int64], tail: Floats, logs: Floats) -> None:
    count = 0
    for i in range(len(p)):
        places[count], tail[count] = i, p[i]  # overwritten by the next one unless it counts
        count += p[i] <= _EDGE
    for i in range(len(p)):
        y = p[i] - 0.5
        s = y * y
        top = -5.99633501014107895267e1 * s + 9.80010754185999661536e1
        top = (top * s - 5.66762857469070293439e1) * s + 1.39312609387279679503e1
        top = top * s - 1.23916583867381258016e0
        low = (s + 1.95448858338141759834e0) * s + 4.67627912898881538453e0
        low = (low * s + 8.63602421390890590575e1) * s - 2.25462687854119370527e2
        low = (low * s + 2.00260212380060660359e2) * s - 8.20372256168333339912e1
        low = (low * s + 1.59056225126211695515e1) * s - 1.18331621121330003142e0
        p[i] = (y + y * (s * top / low)) * _SQRT_2PI
    for k in range(count):
        logs[k] = math.log(tail[k])
    for k in range(count):
        tail[k] = math.sqrt(-2.0 * logs[k])
    for k in range(count):
        logs[k] = math.log(tail[k])
    for k in range(count):
        x = tail[k]
        z = 1.0 / x
        top = (4.05544892305962419923e0 * z + 3.15251094599893866154e1) * z + 5.71628192246421288162e1
        top = (top * z + 4.40805073893200834700e1) * z + 1.46849561928858024014e1
        top = (top * z + 2.18663306850790267539e0) * z - 1.40256079171354495875e-1
        top = (top * z - 3.50424626827848203418e-2) * z - 8.57456785154685413611e-4
        low = (z + 1.57799883256466749731e1) * z + 4.53907635128879210584e1
        low = (low * z + 4.13172038254672030440e1) * z + 1.50425385692907503408e1
        low = (low * z + 2.50464946208309415979e0) * z - 1.42182922854787788574e-1
        low = (low * z - 3.80806407691578277194e-2) * z - 9.33259480895457427372e-4
        # Beyond 8; computed for all, because a branch would cost more.
        far = (3.23774891776946035970e0 * z + 6.91522889068984211695e0) * z + 3.93881025292474443415e0
        far = (far * z + 1.33303460815807542389e0) * z + 2.01485389549179081538e-1
        far = (far * z + 1.23716634817820021358e-2) * z + 3.01581553508235416007e-4
        far = (far * z + 2.65806974686737550832e-6) * z + 6.23974539184983293730e-9
        deep = (z + 6.02427039364742014255e0) * z + 3.67983563856160859403e0
        deep = (deep * z + 1.37702099489081330271e0) * z + 2.16236993594496635890e-1
        deep = (deep * z + 1.34204006088543189037e-2) * z + 3.28014464682127739104e-4
        deep = (deep * z + 2.89247864745380683936e-6) * z + 6.79019408009981274425e-9
        near = x < 8.0
        tail[k] = z * (top if near else far) / (low if near else deep) - (x - logs[k] / x)
    for k in range(count):
        p[places[k]] = tail[k]


@_compiled
def lower_probabilities(words: npt.NDArray[np.uint64], p: Floats, coarse: npt.NDArray[np.int64]) -> int:
    """Write p = (k + ½)·2⁻⁶⁴ of the upper 63 bits k of each word; return how many k are below 2⁴⁸.

    Their places are in ``coarse``.
    """
    count = 0
    for i in range(len(words)):
        p[i] = (np.float64(np.int64(words[i] >> np.uint64(1))) + 0.5) * 2.0**-64
    for i in range(len(words)):
        if words[i] < np.uint64(1 << 49):
            coarse[count] = i
            count += 1
    return count


@_compiled
def give_signs(words: npt.NDArray[np.uint64], x: Floats) -> None:
    """x, which is ≤ 0, with the sign of each word's lowest bit."""
    for i in range(len(x)):
        x[i] = -x[i] if words[i] & np.uint64(1) else x[i]


@_compiled
def add_on_grid(
    words: npt.NDArray[np.uint64], x: Floats, ratio: float, step: float, limit: float, total: Floats
) -> None:
    """total = (rint(total/step), at most ± ``limit``, + rint(±x·ratio))·step, the sign from each word's lowest bit.

    The operations are those of :func:`quietgrad.core.noise.grid.add_discretized_gaussian`, and so are all bits.
    """
    inverse = 1.0 / step
    for i in range(len(x)):
        units = np.rint(total[i] * inverse)
        units = limit if units > limit else units
        units = -limit if units < -limit else units
        noise = -x[i] if words[i] & np.uint64(1) else x[i]
        total[i] = (units + np.rint(noise * ratio)) * step


@_compiled
def draw_subsets(
    words: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], n: int, out: npt.NDArray[np.int64]
) -> None:
    """Write batch j, a uniformly random subset of 0…n−1 in random order, to ``out[starts[j]:starts[j + 1]]``.

    The first b steps of a Fisher–Yates shuffle of 0…n−1: step i swaps position i with a random r ≥ i. Only
    what the swaps displaced is stored: positions below b in the output itself, those above in a small table.
    An entry carries its batch's number, so the next batch finds an empty table, the swaps being undone by
    being forgotten: batch j depends on its own words and on nothing before it, in O(b) time and memory.

    Step i needs r − i uniform on m = n − i values and takes ⌊w·m / 2⁶⁴⌋ of a uniform 64-bit word w. The w
    with a given result r are the integers in [r·2⁶⁴/m, (r+1)·2⁶⁴/m): ⌊2⁶⁴/m⌋ or ⌈2⁶⁴/m⌉ many, so P(r)·m is
    within 1 ± m·2⁻⁶⁴, and within 1 ± 2⁻⁴⁰ for n ≤ 2²⁴. A batch's probability is off by a factor of at most
    (1 + n·2⁻⁶⁴)^b: for 100 of 10⁶ by 6·10⁻¹². With w = 2³²h + l, ⌊(w·m)/2⁶⁴⌋ = ⌊(h·m + ⌊l·m/2³²⌋)/2³²⌋,
    which fits in 64 bits because m < 2³².
    """
    # Unsigned everywhere: a signed index would be tested for being negative at every access.
    low, half, one = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1)
    most = 0
    for j in range(starts.size - 1):
        most = max(most, starts[j + 1] - starts[j])
    room = 1
    while room < _ROOM * most:
        room *= 2
    mask = np.uint64(room - 1)
    keys = np.zeros(room, np.uint64)
    held = np.empty(room, np.int64)
    for j in range(starts.size - 1):
        first = np.uint64(starts[j])
        count = np.uint64(starts[j + 1] - starts[j])
        batch = np.uint64(j + 1) << half  # keys of earlier batches are smaller
        head = out[first : first + count]
        for i in range(count):
            head[i] = i
        for i in range(count):
            word = words[first + i]
            m = np.uint64(n) - i
            r = i + (((word >> half) * m + (((word & low) * m) >> half)) >> half)
            displaced = head[i]
            if r < count:
                head[i] = head[r]
                head[r] = displaced
            else:
                place = r & mask
                key = keys[place]
                while key >= batch and key != batch | r:
                    place = (place + one) & mask
                    key = keys[place]
                head[i] = held[place] if key == batch | r else np.int64(r)
                keys[place] = batch | r
                held[place] = displaced


@_compiled
def add_dithered(x: Floats, factor: float, dither: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32]) -> None:
    """out += ⌊x·factor + u⌋ mod 2³², u = ``dither``·2⁻³²: up with the probability of the fraction, to 2⁻³²."""
    for i in range(len(x)):
        scaled = x[i] * factor
        below = math.floor(scaled)
        up = (scaled - below) * 4294967296.0 > dither[i]
        out[i] = np.uint32((np.int64(out[i]) + np.int64(below) + np.int64(up)) & np.int64(0xFFFFFFFF))


@_compiled
def add_alias_draws(
    columns: npt.NDArray[np.uint16], words: npt.NDArray[np.uint64], thresholds: npt.NDArray[np.uint64],
    alias: npt.NDArray[np.int64], scale: int, middle: int, out: npt.NDArray[np.uint32],
) -> None:  # fmt: skip
    """out += scale·(draw − middle) mod 2³², each draw from its column and word; every draw reads both cells."""
    mask = np.uint16(len(alias) - 1)
    for i in range(len(out)):
        column = columns[i] & mask
        other = alias[column]
        keeps_column = np.int64(words[i] < thresholds[column])
        draw = other + keeps_column * (np.int64(column) - other)
        out[i] = np.uint32((np.int64(out[i]) + scale * (draw - middle)) & np.int64(0xFFFFFFFF))


@_compiled
def convolve(
    x: Floats,
    p: Floats,
    y: Floats,
    q: Floats,
    points: Floats,
    inverse: Floats,
    mass: Floats,
    number: Floats,
    same: bool,
) -> float:
    """Spread the sums x_i + y_j on ``points``, counting each cell's terms; return the mean above the last."""
    last = points.size - 1
    lost = 0.0
    start = 0
    for i in range(x.size):
        k = start
        for j in range(i if same else 0, y.size):
            weight = p[i] * q[j]
            if same and j > i:
                weight *= 2.0
            a, b = x[i], y[j]
            if a < b:
                a, b = b, a
            while k < last and (a - points[k + 1]) + b >= 0.0:
                k += 1
            if j == 0 or (same and j == i):
                start = k
            number[k] += 1.0
            if k == last:
                mass[k] += weight
                lost += weight * ((a - points[k]) + b)
            else:
                mass[k] += weight * ((points[k + 1] - a) - b) * inverse[k]
                mass[k + 1] += weight * ((a - points[k]) + b) * inverse[k]
    return lost
