"""Compiled sums over an index batch: one pass over each row, one call per release. Importing this imports numba.

A kernel reads the ``packed`` view of a :class:`~quietgrad.tables.table.Table` and adds to ``out``
Σ [α·clip_A(rᵢ − βrᵢ′) + γ·clip_B(rᵢ)] ⊗ x̃ᵢ. Features may be float32; every sum is float64. Only inner products
may be reassociated; nothing may assume that numbers are finite, for that is what protects the others from one
broken record.

All in one file: numba's cache is renewed when a function's own file changes, not when one it calls does. A loss's
residual is therefore not called by name: it is compiled by itself, remembered beside the file that declares it, and
reached by its address. One compiled kernel serves every loss, and none can be run with another's formula.

Losses of several scores, and people with several records, are summed in blocks instead
(:mod:`~quietgrad.tables.full_batch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic, overload

from quietgrad.core.session.contributions import Numbers
from quietgrad.tables.table import Packed

_TILE = 32  # rows asked for ahead: random rows of a sparse table are cache misses, and waiting for each costs most

_Array = npt.NDArray[Any]
_Rows = tuple[_Array, ...]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Decorator = Callable[[_Function], _Function]

_SUM: _Decorator[Any] = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
_EXACT: _Decorator[Any] = njit(cache=True, nogil=True, error_model="numpy")
_means: Callable[[Any], _Decorator[Any]] = partial(overload, strict=False)  # lambdas carry no annotations
_emits: _Decorator[Any] = intrinsic

# A dense table is the tuple (X,), a sparse one (indptr, indices, data). These three say what an entry is; all
# that follows is written once and compiled for whichever it meets.


def _span(rows: _Rows, i: int) -> Any:
    """First entry of row i and the one after its last."""


def _column(rows: _Rows, p: int) -> Any:
    """The feature that entry p belongs to."""


def _value(rows: _Rows, i: int, p: int) -> Any:
    """The number at entry p of row i."""


@_means(_span)
def _span_of(rows: _Rows, i: object) -> Any:
    if len(rows) == 1:
        return lambda rows, i: (0, rows[0].shape[1])
    return lambda rows, i: (rows[0][i], rows[0][i + 1])


@_means(_column)
def _column_of(rows: _Rows, p: object) -> Any:
    return (lambda rows, p: p) if len(rows) == 1 else (lambda rows, p: rows[1][p])


@_means(_value)
def _value_of(rows: _Rows, i: object, p: object) -> Any:
    return (lambda rows, i, p: rows[0][i, p]) if len(rows) == 1 else (lambda rows, i, p: rows[2][p])


@_EXACT
def _clipped(r: float, limit: float) -> float:
    """r brought into [−limit, limit]; zero if it is not finite."""
    if not abs(r) < math.inf:
        return 0.0
    return limit if r > limit else (-limit if r < -limit else r)


_FORMULA = types.float64(types.float64, types.float64, types.float64)
_compiled: list[Any] = []  # the code behind every address that was given out must stay


def address_of(residual: Callable[..., object]) -> int:
    """Where the machine code of ``residual(score, y, h)`` begins.

    Raises:
        TypeError: numba cannot compile the formula; index batches then cannot be summed.
    """
    for remember in (True, False):  # a formula typed at a prompt has no file to be remembered beside
        try:
            code = cfunc(_FORMULA, cache=remember, error_model="numpy")(residual)
        except NumbaError as error:
            reason = str(error).splitlines()[0]
            raise TypeError(f"{residual.__qualname__}: cannot be compiled for index batches: {reason}") from None
        except RuntimeError:
            if not remember:
                raise
            continue
        _compiled.append(code)
        return int(code.address)
    raise AssertionError


@_emits
def _residual(typing_context: object, address: object, score: object, y: object, h: object) -> Any:
    """∂f/∂score for one record, by the formula at ``address``."""

    def emit(context: object, builder: ir.IRBuilder, signature: object, arguments: list[ir.Value]) -> Any:
        number = ir.DoubleType()
        formula = builder.inttoptr(arguments[0], ir.FunctionType(number, [number] * 3).as_pointer())
        return builder.call(formula, arguments[1:])

    return types.float64(types.intp, types.float64, types.float64, types.float64), emit


@_SUM
def _score(rows: _Rows, i: int, u: _Array) -> float:
    """⟨xᵢ, u⟩."""
    start, stop = _span(rows, i)
    a = 0.0
    for p in range(start, stop):
        a += _value(rows, i, p) * u[_column(rows, p)]
    return a


@_SUM
def _two_scores(rows: _Rows, i: int, u: _Array, v: _Array) -> tuple[float, float]:
    """⟨xᵢ, u⟩ and ⟨xᵢ, v⟩ in one pass."""
    start, stop = _span(rows, i)
    a = 0.0
    b = 0.0
    for p in range(start, stop):
        x = _value(rows, i, p)
        j = _column(rows, p)
        a += x * u[j]
        b += x * v[j]
    return a, b


@_EXACT
def _lifted(params: _Array, features: int, shift: _Array, scale: _Array) -> tuple[Any, float]:
    """(u, o) such that s∘(x−m) scores ⟨x, u⟩ + o."""
    u = params[:features].copy()
    offset = 0.0
    for j in range(scale.size):
        u[j] *= scale[j]
        offset -= shift[j] * u[j]
    return u, offset


@_EXACT
def add_scalar(
    table: Packed,
    batch: _Array,
    formula: int,
    h: float,
    params: _Array,
    previous: _Array,
    rule: Numbers,
    out: _Array,
) -> None:
    """Add the batch's clipped contributions for the loss of one score whose residual's code is at ``formula``."""
    rows, y, norms, factors, shift, scale, column = table
    alpha, beta, first, gamma, second = rule
    features = out.size - (1 if column != 0.0 else 0)
    u, offset = _lifted(params, features, shift, scale)
    constant = column * params[-1] if column != 0.0 else 0.0
    v, other_offset, other_constant = u, offset, constant
    if beta != 0.0:
        v, other_offset = _lifted(previous, features, shift, scale)
        other_constant = column * previous[-1] if column != 0.0 else 0.0
    total = 0.0
    shortened = 0.0
    now = np.empty(_TILE)
    before = np.empty(_TILE)
    for begin in range(0, batch.size, _TILE):
        tile = batch[begin : begin + _TILE]
        for i in tile:
            if i < 0 or i >= y.size:
                raise IndexError("batch: an index lies outside the table")
        if beta != 0.0:
            for k in range(tile.size):
                now[k], before[k] = _two_scores(rows, tile[k], u, v)
        else:
            for k in range(tile.size):
                now[k] = _score(rows, tile[k], u)
        for k in range(tile.size):
            i = tile[k]
            factor = factors[i] if factors.size else 1.0
            r = _residual(formula, factor * (now[k] + offset) + constant, y[i], h)
            moved = r
            if beta != 0.0:
                score = factor * (before[k] + other_offset) + other_constant
                moved = r - beta * _residual(formula, score, y[i], h)
            weight = alpha * _clipped(moved, first / norms[i])
            if gamma != 0.0:
                weight += gamma * _clipped(r, second / norms[i])
            total += weight
            now[k] = weight * factor
            shortened += now[k]
        for k in range(tile.size):
            weight = now[k]
            if weight == 0.0:
                continue
            start, stop = _span(rows, tile[k])
            if scale.size:
                for p in range(start, stop):
                    j = _column(rows, p)
                    out[j] += weight * _value(rows, tile[k], p) * scale[j]
            else:
                for p in range(start, stop):
                    out[_column(rows, p)] += weight * _value(rows, tile[k], p)
    for j in range(shift.size):
        out[j] -= shortened * shift[j] * scale[j]
    if column != 0.0:
        out[features] += column * total


@_SUM
def row_squares(columns: _Array) -> Any:
    """‖xᵢ‖² of every row, from a matrix whose rows are the columns of the table; four at a time, in float64."""
    features, count = columns.shape
    out = np.zeros(count)
    for start in range(0, count, 1024):
        stop = min(start + 1024, count)
        total = out[start:stop]
        for j in range(0, features - 3, 4):
            a, b = columns[j, start:stop], columns[j + 1, start:stop]
            c, d = columns[j + 2, start:stop], columns[j + 3, start:stop]
            for i in range(total.size):
                p, q, r, s = np.float64(a[i]), np.float64(b[i]), np.float64(c[i]), np.float64(d[i])
                total[i] += p * p + q * q + r * r + s * s
        for j in range(features - features % 4, features):
            a = columns[j, start:stop]
            for i in range(total.size):
                p = np.float64(a[i])
                total[i] += p * p
    return out


@_SUM
def column_scores(columns: _Array, first: int, last: int, weights: _Array) -> Any:
    """Σⱼ wⱼxᵢⱼ of the rows from ``first`` to ``last``, from a matrix whose rows are the columns of the table."""
    features = columns.shape[0]
    out = np.zeros(last - first)
    for start in range(first, last, 1024):
        stop = min(start + 1024, last)
        total = out[start - first : stop - first]
        for j in range(0, features - 3, 4):
            a, b = columns[j, start:stop], columns[j + 1, start:stop]
            c, d = columns[j + 2, start:stop], columns[j + 3, start:stop]
            p, q, r, s = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
            for i in range(total.size):
                total[i] += (
                    p * np.float64(a[i]) + q * np.float64(b[i]) + r * np.float64(c[i]) + s * np.float64(d[i])
                )
        for j in range(features - features % 4, features):
            a = columns[j, start:stop]
            p = weights[j]
            for i in range(total.size):
                total[i] += p * np.float64(a[i])
    return out


@_SUM
def column_sums(columns: _Array, first: int, last: int, factors: _Array) -> Any:
    """Σᵢ fᵢxᵢⱼ over the rows from ``first`` to ``last``, for every column."""
    features = columns.shape[0]
    out = np.zeros(features)
    for start in range(first, last, 1024):
        stop = min(start + 1024, last)
        f = factors[start - first : stop - first]
        for j in range(features):
            a = columns[j, start:stop]
            total = 0.0
            for i in range(f.size):
                total += f[i] * np.float64(a[i])
            out[j] += total
    return out


@_EXACT
def boxed_columns(columns: _Array, low: _Array, high: _Array, centre: _Array, half: _Array, out: _Array) -> None:
    """out = (clip(x, low, high) − c)/h of every number, from a matrix whose rows are the columns of the table."""
    for j in range(columns.shape[0]):
        a, to = columns[j], out[j]
        least, most, middle, reach = low[j], high[j], centre[j], half[j]
        for i in range(a.size):
            x = np.float64(a[i])
            x = least if x < least else (most if x > most else x)  # a NaN stays one, as it does in numpy
            to[i] = (x - middle) / reach


@_EXACT
def add_magnitudes(columns: _Array, chosen: _Array, counts: _Array, lowest: int, highest: int, out: _Array) -> None:
    """Add each row's counts by chosen column, sign and octave, brought to length 1: see ``MagnitudeHistogram``.

    ``columns`` are the bits of float64 numbers: a sign, eleven bits of exponent, 52 of fraction. Where the
    fraction is 0, the number is a power of two and ends its octave.
    """
    octaves = highest - lowest + 1
    fraction, magnitude, infinite = (1 << 52) - 1, (1 << 63) - 1, 0x7FF << 52
    weights = np.empty(1024)
    parts = np.zeros((4, out.size))  # one number is added to while the one before is still on its way
    for start in range(0, columns.shape[1], 1024):
        stop = min(start + 1024, columns.shape[1])
        share = weights[: stop - start]
        share[:] = 0.0
        for j in chosen:
            a = columns[j, start:stop]
            for i in range(share.size):
                share[i] += 1.0 if 0 < (a[i] & magnitude) <= infinite else 0.0  # NaN, a gap, is beyond
        for i in range(share.size):
            share[i] = counts[start + i] / math.sqrt(max(share[i], 1.0))
        for k in range(chosen.size):
            a = columns[chosen[k], start:stop]
            first = k * 2 * octaves
            for i in range(share.size):
                x = a[i] & magnitude
                octave = (x >> 52) - 1022 - ((x & fraction) == 0)
                octave = min(max(octave, lowest), highest) - lowest
                place = first + octave + (octaves if a[i] < 0 else 0)
                parts[i & 3, place] += share[i] if 0 < x <= infinite else 0.0
    for part in parts:
        for k in range(out.size):
            out[k] += part[k]
