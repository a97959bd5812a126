"""Compiled sums over an index batch: one pass over each row, one call per release. Importing this imports numba.

A kernel reads the ``packed`` view of a :class:`~quietgrad.objectives.tables.table.Table` and adds to ``out``
Σ [α·clip_A(rᵢ − βrᵢ′) + γ·clip_B(rᵢ)] ⊗ x̃ᵢ. Features may be float32; every sum is float64. Only inner products
may be reassociated; nothing may assume that numbers are finite, for that is what protects the others from one
broken record.

All in one file: numba's cache is renewed when a function's own file changes, not when one it calls does. A loss's
residual is therefore not called by name: it is compiled by itself, remembered beside the file that declares it, and
reached by its address. One compiled kernel serves every loss, and none can be run with another's formula.

A cache entry names the class of a named tuple that a kernel takes
(:class:`~quietgrad.objectives.privacy_units.GroupIndex`) and is found by the kernel's line. When such a class
moves, the lines of this file must move too: an older entry could not be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic, overload

_TILE = 32  # rows asked for ahead: random rows of a sparse table are cache misses, and waiting for each costs most

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Decorator = Callable[[_Function], _Function]

_SUM: _Decorator[Any] = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
_EXACT: _Decorator[Any] = njit(cache=True, nogil=True, error_model="numpy")
_means: Callable[[Any], _Decorator[Any]] = partial(overload, strict=False)  # lambdas carry no annotations
_emits: _Decorator[Any] = intrinsic

# A dense table is the tuple (X,), a sparse one (indptr, indices, data). These three say what an entry is; all
# that follows is written once and compiled for whichever it meets.


def _span(rows: Any, i: int) -> Any:
    """First entry of row i and the one after its last."""


def _column(rows: Any, p: int) -> Any:
    """The feature that entry p belongs to."""


def _value(rows: Any, i: int, p: int) -> Any:
    """The number at entry p of row i."""


@_means(_span)
def _span_of(rows: Any, i: Any) -> Any:
    if len(rows) == 1:
        return lambda rows, i: (0, rows[0].shape[1])
    return lambda rows, i: (rows[0][i], rows[0][i + 1])


@_means(_column)
def _column_of(rows: Any, p: Any) -> Any:
    return (lambda rows, p: p) if len(rows) == 1 else (lambda rows, p: rows[1][p])


@_means(_value)
def _value_of(rows: Any, i: Any, p: Any) -> Any:
    return (lambda rows, i, p: rows[0][i, p]) if len(rows) == 1 else (lambda rows, i, p: rows[2][p])


@_emits
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index] without waiting for it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args
        view = context.make_array(array_type)(context, builder, arguments[0])
        position = context.cast(builder, arguments[1], index_type, types.intp)
        pointer = builder.bitcast(builder.gep(view.data, [position]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", (), ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        )
        builder.call(prefetch, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), emit


def _fetch_span(rows: Any, i: int) -> Any:
    """Start loading what says where row i lies."""


def _fetch_row(rows: Any, i: int) -> Any:
    """Start loading row i."""


@_means(_fetch_span)
def _fetch_span_of(rows: Any, i: Any) -> Any:
    return (lambda rows, i: None) if len(rows) == 1 else (lambda rows, i: _prefetch(rows[0], i))


@_means(_fetch_row)
def _fetch_row_of(rows: Any, i: Any) -> Any:
    def sparse(rows: Any, i: Any) -> Any:
        for p in range(rows[0][i], rows[0][i + 1] + 7, 8):
            _prefetch(rows[1], p)
            _prefetch(rows[2], p)

    return (lambda rows, i: None) if len(rows) == 1 else sparse  # dense rows need no hint


@_EXACT
def _clipped(r: float, limit: float) -> float:
    """r brought into [−limit, limit]; zero if it is not finite."""
    if not abs(r) < math.inf:
        return 0.0
    return limit if r > limit else (-limit if r < -limit else r)


@_SUM
def row_squares(columns: Any) -> Any:
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
def column_scores(columns: Any, first: int, last: int, weights: Any) -> Any:
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
def column_sums(columns: Any, first: int, last: int, factors: Any) -> Any:
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


_FORMULA = types.float64(types.float64, types.float64, types.float64)
_compiled: list[Any] = []  # the code behind every address that was given out must stay


def address_of(residual: Callable[..., Any]) -> int:
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
def _residual(typing_context: Any, address: Any, score: Any, y: Any, h: Any) -> Any:
    """∂f/∂score for one record, by the formula at ``address``."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.DoubleType()
        formula = builder.inttoptr(arguments[0], ir.FunctionType(number, [number] * 3).as_pointer())
        return builder.call(formula, arguments[1:])

    return types.float64(types.intp, types.float64, types.float64, types.float64), emit


@_SUM
def _score(rows: Any, i: int, u: Any) -> float:
    """⟨xᵢ, u⟩."""
    start, stop = _span(rows, i)
    a = 0.0
    for p in range(start, stop):
        a += _value(rows, i, p) * u[_column(rows, p)]
    return a


@_SUM
def _two_scores(rows: Any, i: int, u: Any, v: Any) -> tuple[float, float]:
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
def _lifted(params: Any, features: int, shift: Any, scale: Any) -> tuple[Any, float]:
    """(u, o) such that s∘(x−m) scores ⟨x, u⟩ + o."""
    u = params[:features].copy()
    offset = 0.0
    for j in range(scale.size):
        u[j] *= scale[j]
        offset -= shift[j] * u[j]
    return u, offset


@_EXACT
def add_scalar(
    table: Any, batch: Any, formula: int, h: float, params: Any, previous: Any, rule: Any, out: Any
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
            _fetch_span(rows, i)
            _prefetch(y, i)
            _prefetch(norms, i)
        for i in tile:
            _fetch_row(rows, i)
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


@_EXACT
def _class_residuals(
    rows: Any, i: int, factor: float, weights: Any, offset: Any, constant: Any, label: int, r: Any
) -> None:
    """r ← softmax(scores) − e_label."""
    classes = r.size
    for c in range(classes):
        r[c] = offset[c]
    start, stop = _span(rows, i)
    for p in range(start, stop):
        x = _value(rows, i, p)
        j = _column(rows, p)
        for c in range(classes):
            r[c] += x * weights[j, c]
    top = -math.inf
    for c in range(classes):
        r[c] = factor * r[c] + constant[c]
        if not r[c] <= top:  # keeps a NaN
            top = r[c]
    total = 0.0
    for c in range(classes):
        r[c] = math.exp(r[c] - top)
        total += r[c]
    for c in range(classes):
        r[c] /= total
    r[label] -= 1.0


@_EXACT
def _clip_factor(r: Any, norm: float, clip: float) -> float:
    """The number in [0, 1] that makes ‖r‖·norm at most clip; zero if r is not finite."""
    square = 0.0
    for c in range(r.size):
        square += r[c] * r[c]
    length = math.sqrt(square) * norm
    if not length < math.inf:
        return 0.0
    return clip / length if length > clip else 1.0


@_EXACT
def _class_lifted(
    params: Any, features: int, classes: int, shift: Any, scale: Any, column: float
) -> tuple[Any, Any, Any]:
    matrix = params.reshape(params.size // classes, classes)
    weights = matrix[:features].copy()
    offset = np.zeros(classes)
    for j in range(scale.size):
        for c in range(classes):
            weights[j, c] *= scale[j]
            offset[c] -= shift[j] * weights[j, c]
    constant = np.zeros(classes)
    if column != 0.0:
        constant[:] = column * matrix[features]
    return weights, offset, constant


@_EXACT
def add_classes(table: Any, batch: Any, classes: int, params: Any, previous: Any, rule: Any, out: Any) -> None:
    """Add the batch's clipped contributions for the softmax loss of ``classes`` scores."""
    rows, y, norms, factors, shift, scale, column = table
    alpha, beta, first, gamma, second = rule
    features = out.size // classes - (1 if column != 0.0 else 0)
    weights, offset, constant = _class_lifted(params, features, classes, shift, scale, column)
    others, other_offset, other_constant = weights, offset, constant
    if beta != 0.0:
        others, other_offset, other_constant = _class_lifted(previous, features, classes, shift, scale, column)
    sums = out.reshape(out.size // classes, classes)
    r, moved, weight = np.empty(classes), np.empty(classes), np.empty(classes)
    total, shortened = np.zeros(classes), np.zeros(classes)
    for k in range(batch.size):
        i = batch[k]
        if i < 0 or i >= y.size:
            raise IndexError("batch: an index lies outside the table")
        factor = factors[i] if factors.size else 1.0
        _class_residuals(rows, i, factor, weights, offset, constant, y[i], r)
        if beta != 0.0:
            _class_residuals(rows, i, factor, others, other_offset, other_constant, y[i], moved)
            for c in range(classes):
                moved[c] = r[c] - beta * moved[c]
        else:
            moved[:] = r
        weight[:] = 0.0
        shrink = _clip_factor(moved, norms[i], first)
        if shrink > 0.0:  # never 0·NaN
            for c in range(classes):
                weight[c] = alpha * shrink * moved[c]
        shrink = _clip_factor(r, norms[i], second) if gamma != 0.0 else 0.0
        if shrink > 0.0:
            for c in range(classes):
                weight[c] += gamma * shrink * r[c]
        largest = 0.0
        for c in range(classes):
            total[c] += weight[c]
            weight[c] *= factor
            shortened[c] += weight[c]
            largest = max(largest, abs(weight[c]))
        if largest == 0.0:  # never 0·∞: a scaled entry may overflow
            continue
        start, stop = _span(rows, i)
        for p in range(start, stop):
            j = _column(rows, p)
            x = _value(rows, i, p) * scale[j] if scale.size else np.float64(_value(rows, i, p))
            for c in range(classes):
                sums[j, c] += weight[c] * x
    for j in range(shift.size):
        for c in range(classes):
            sums[j, c] -= shortened[c] * shift[j] * scale[j]
    if column != 0.0:
        for c in range(classes):
            sums[features, c] += column * total[c]


# --- people: the records of each are combined before they are clipped ---------------------------------------------
#
# A person's Σ rᵢ ⊗ x̃ᵢ has no norm that follows from those of its rows, so it is made, one person at a time, in a
# vector that stays in the cache. Of sparse rows only the columns they touch are looked at; the public shift is then
# summed up apart, as for rows.


@_SUM
def _dense_square(total: Any, t: float, shift: Any, scale: Any) -> float:
    """Move the sum of raw rows to the transformed ones, in place; its squared norm."""
    square = 0.0
    if scale.size:
        for j in range(total.size):
            total[j] = (total[j] - t * shift[j]) * scale[j]
    for j in range(total.size):
        square += total[j] * total[j]
    return square


@_SUM
def _sparse_take(rows: Any, i: int, a: float, total: Any, shift: Any, scale: Any, held: Any) -> None:
    """total += a·x of a sparse row, scaled, and what its norm is made of: ‖g + ax‖² = ‖g‖² + 2a⟨g, x⟩ + a²‖x‖².

    ``held`` is (‖g‖², Σ|a|‖x‖, ⟨g, s∘m⟩). No column is looked at twice.
    """
    dot = 0.0
    own = 0.0
    pull = 0.0
    if scale.size:
        for p in range(rows[0][i], rows[0][i + 1]):
            j = rows[1][p]
            x = rows[2][p] * scale[j]
            g = total[j]
            dot += x * g
            own += x * x
            pull += x * shift[j] * scale[j]
            total[j] = g + a * x
    else:
        for p in range(rows[0][i], rows[0][i + 1]):
            j = rows[1][p]
            x = np.float64(rows[2][p])
            g = total[j]
            dot += x * g
            own += x * x
            total[j] = g + a * x
    held[0] += 2.0 * a * dot + a * a * own
    held[1] += abs(a) * math.sqrt(own)
    held[2] += a * pull


def _take(rows: Any, i: int, a: float, total: Any, shift: Any, scale: Any, held: Any) -> Any:
    """Add a·xᵢ to a person's sum."""


def _take_two(
    rows: Any, i: int, a: float, b: float, total: Any, other: Any, shift: Any, scale: Any, held: Any
) -> Any:
    """Add a·xᵢ to one sum of a person and b·xᵢ to the other."""


@_means(_take)
def _take_of(rows: Any, i: Any, a: Any, total: Any, shift: Any, scale: Any, held: Any) -> Any:
    if len(rows) == 1:
        return lambda rows, i, a, total, shift, scale, held: _accumulate(rows, i, a, total)
    return lambda rows, i, a, total, shift, scale, held: _sparse_take(rows, i, a, total, shift, scale, held[0])


@_means(_take_two)
def _take_two_of(
    rows: Any, i: Any, a: Any, b: Any, total: Any, other: Any, shift: Any, scale: Any, held: Any
) -> Any:
    def sparse(
        rows: Any, i: Any, a: Any, b: Any, total: Any, other: Any, shift: Any, scale: Any, held: Any
    ) -> Any:  # fmt: skip
        _sparse_take(rows, i, a, total, shift, scale, held[0])
        _sparse_take(rows, i, b, other, shift, scale, held[1])

    if len(rows) == 1:
        return lambda rows, i, a, b, total, other, shift, scale, held: _accumulate_two(rows, i, a, b, total, other)
    return sparse


@_EXACT
def _sparse_square(held: Any, t: float, whole: float, slack: float) -> float:
    """‖g − t·s∘m‖², rounded up by what all the sums may have lost; ``whole`` is ‖s∘m‖²."""
    square: float = held[0] - 2.0 * t * held[2] + t * t * whole
    lost: float = slack * (held[1] * held[1] + t * t * whole)
    return max(square, 0.0) + lost if square < math.inf else math.inf  # what is not a number is as bad as infinite


def _settle(
    rows: Any, mine: Any, total: Any, held: Any, t: float, shift: Any, scale: Any, whole: float, slack: float,
    rest: float, weight: float, clip: float, out: Any,
) -> Any:  # fmt: skip
    """out += weight × the person's clipped sum, which is forgotten; the factor. ``rest`` is the square of its
    intercept, which is the caller's to add."""


@_means(_settle)
def _settle_of(
    rows: Any, mine: Any, total: Any, held: Any, t: Any, shift: Any, scale: Any, whole: Any, slack: Any, rest: Any,
    weight: Any, clip: Any, out: Any,
) -> Any:  # fmt: skip
    def dense(
        rows: Any, mine: Any, total: Any, held: Any, t: Any, shift: Any, scale: Any, whole: Any, slack: Any,
        rest: Any, weight: Any, clip: Any, out: Any,
    ) -> Any:  # fmt: skip
        factor = weight * _shrink(_dense_square(total, t, shift, scale) + rest, out.size, clip)
        if factor != 0.0:  # never 0·∞
            for j in range(total.size):
                out[j] += factor * total[j]
        for j in range(total.size):
            total[j] = 0.0
        return factor

    def sparse(
        rows: Any, mine: Any, total: Any, held: Any, t: Any, shift: Any, scale: Any, whole: Any, slack: Any,
        rest: Any, weight: Any, clip: Any, out: Any,
    ) -> Any:  # fmt: skip
        factor = weight * _shrink(_sparse_square(held, t, whole, slack) + rest, out.size, clip)
        held[:] = 0.0
        for i in mine:  # a column that comes again adds nothing: it is 0 by then
            for p in range(rows[0][i], rows[0][i + 1]):
                j = rows[1][p]
                if factor != 0.0:
                    out[j] += factor * total[j]
                total[j] = 0.0
        return factor

    return dense if len(rows) == 1 else sparse


def _shift_is_apart(rows: Any) -> Any:
    """Whether the shift is summed up apart from the rows."""


@_means(_shift_is_apart)
def _shift_is_apart_of(rows: Any) -> Any:
    return (lambda rows: False) if len(rows) == 1 else (lambda rows: True)


@_EXACT
def _shrink(square: float, size: int, clip: float) -> float:
    """The number in [0, 1] that brings a vector of ``size`` numbers to the clip; zero if it is not finite."""
    length = math.sqrt(square * (1.0 + (32 + size) * 2.220446049250313e-16) + size * 1e-290)
    if not length < math.inf:
        return 0.0
    return clip / length if length > clip else 1.0


@_SUM
def _accumulate(rows: Any, i: int, a: float, total: Any) -> None:
    start, stop = _span(rows, i)
    for p in range(start, stop):
        total[_column(rows, p)] += a * _value(rows, i, p)


@_SUM
def _accumulate_two(rows: Any, i: int, a: float, b: float, total: Any, other: Any) -> None:
    start, stop = _span(rows, i)
    for p in range(start, stop):
        x = _value(rows, i, p)
        j = _column(rows, p)
        total[j] += a * x
        other[j] += b * x


@_EXACT
def _look_ahead(rows: Any, y: Any, people: Any, order: Any, starts: Any, k: int) -> None:
    """Start loading the rows of the next person, and where those of the one after lie."""
    if k + 2 < people.size:
        begin = starts[people[k + 2]]
        for place in range(begin, min(begin + _TILE, starts[people[k + 2] + 1])):
            _fetch_span(rows, order[place])
            _prefetch(y, order[place])
    if k + 1 < people.size:
        begin = starts[people[k + 1]]
        for place in range(begin, min(begin + _TILE, starts[people[k + 1] + 1])):
            _fetch_row(rows, order[place])


@_EXACT
def _check_people(people: Any, order: Any, starts: Any, rows: int) -> None:
    """Every position is of a person, and every row of a person is in the table."""
    for person in people:
        if person < 0 or person >= starts.size - 1:
            raise IndexError("batch: an index lies outside the people")
        for place in range(starts[person], starts[person + 1]):
            if order[place] < 0 or order[place] >= rows:
                raise IndexError("batch: a person's record lies outside the table")


@_EXACT
def add_people_scalar(
    table: Any, groups: Any, formula: int, h: float, params: Any, previous: Any, rule: Any, out: Any
) -> None:
    """As :func:`add_scalar`, for people: the rule acts on the mean or sum of a person's rᵢ ⊗ x̃ᵢ."""
    rows, y, _norms, factors, shift, scale, column = table
    people, order, starts, mean = groups
    alpha, beta, first, gamma, second = rule
    features = out.size - (1 if column != 0.0 else 0)
    u, offset = _lifted(params, features, shift, scale)
    constant = column * params[-1] if column != 0.0 else 0.0
    v, other_offset, other_constant = u, offset, constant
    if beta != 0.0:
        v, other_offset = _lifted(previous, features, shift, scale)
        other_constant = column * previous[-1] if column != 0.0 else 0.0
    _check_people(people, order, starts, y.size)
    moved_sum, plain_sum = np.zeros(features), np.zeros(features if gamma != 0.0 else 0)
    held, apart, whole = np.zeros((2, 3)), _shift_is_apart(rows), 0.0
    for j in range(shift.size):
        whole += (shift[j] * scale[j]) ** 2
    shortened = 0.0
    for k in range(people.size):
        _look_ahead(rows, y, people, order, starts, k)
        begin, end = starts[people[k]], starts[people[k] + 1]
        share = 1.0 / (end - begin) if mean else 1.0
        moved_total, moved_short, plain_total, plain_short = 0.0, 0.0, 0.0, 0.0
        for place in range(begin, end):
            i = order[place]
            factor = factors[i] if factors.size else 1.0
            if beta != 0.0:
                now, before = _two_scores(rows, i, u, v)
                r = _residual(formula, factor * (now + offset) + constant, y[i], h)
                score = factor * (before + other_offset) + other_constant
                moved = share * (r - beta * _residual(formula, score, y[i], h))
            else:
                now = _score(rows, i, u)
                r = _residual(formula, factor * (now + offset) + constant, y[i], h)
                moved = share * r
            r *= share
            moved_total += moved
            moved_short += moved * factor
            if gamma != 0.0:
                plain_total += r
                plain_short += r * factor
                _take_two(rows, i, moved * factor, r * factor, moved_sum, plain_sum, shift, scale, held)
            else:
                _take(rows, i, moved * factor, moved_sum, shift, scale, held)
        mine = order[begin:end]
        # Each of the inner products rounds by at most eps times its terms, which are at most (Σ|a|‖x‖)².
        slack = (64 + 4 * features + 8 * mine.size) * 2.220446049250313e-16
        weight = _settle(
            rows, mine, moved_sum, held[0], moved_short, shift, scale, whole, slack,
            (column * moved_total) ** 2, alpha, first, out,
        )  # fmt: skip
        if weight != 0.0:
            shortened += weight * moved_short
            if column != 0.0:
                out[features] += weight * column * moved_total
        if gamma != 0.0:
            weight = _settle(
                rows, mine, plain_sum, held[1], plain_short, shift, scale, whole, slack,
                (column * plain_total) ** 2, gamma, second, out,
            )  # fmt: skip
            if weight != 0.0:
                shortened += weight * plain_short
                if column != 0.0:
                    out[features] += weight * column * plain_total
    if apart:
        for j in range(shift.size):
            out[j] -= shortened * shift[j] * scale[j]


@_SUM
def _raw_product(rows: Any, i: int, spread: Any) -> float:
    start, stop = _span(rows, i)
    total = 0.0
    for p in range(start, stop):
        total += spread[_column(rows, p)] * _value(rows, i, p)
    return total


@_EXACT
def person_products(table: Any, starts: Any, products: Any, reach: Any) -> None:
    """⟨x̃ᵢ, x̃ⱼ⟩ for any two rows of one person, of rows that lie person by person; person after person, by rows.

    ``reach`` gets aᵢ(‖s∘xᵢ‖ + ‖s∘m‖) + c of each row: a product is off by some eps times those of its two rows.
    """
    rows, _y, _norms, factors, shift, scale, column = table
    width = 0
    for i in range(reach.size):
        start, stop = _span(rows, i)
        for p in range(start, stop):
            width = max(width, _column(rows, p) + 1)
    spread = np.zeros(max(width, 1))
    whole = 0.0
    for j in range(shift.size):
        whole += (shift[j] * scale[j]) ** 2
    pulls = np.zeros(reach.size)
    base = 0
    for person in range(starts.size - 1):
        begin, end = starts[person], starts[person + 1]
        size = end - begin
        for a in range(size):
            i = begin + a
            start, stop = _span(rows, i)
            square = 0.0
            for p in range(start, stop):
                j = _column(rows, p)
                s = scale[j] * scale[j] if scale.size else 1.0
                x = _value(rows, i, p)
                spread[j] = s * x
                square += s * x * x
                if shift.size:
                    pulls[i] += s * x * shift[j]
            mine = factors[i] if factors.size else 1.0
            reach[i] = mine * (math.sqrt(square) + math.sqrt(whole)) + column
            for b in range(a + 1):
                k = begin + b
                other = factors[k] if factors.size else 1.0
                product = _raw_product(rows, k, spread) - pulls[i] - pulls[k] + whole
                product = mine * other * product + column * column
                products[base + a * size + b] = product
                products[base + b * size + a] = product
            for p in range(start, stop):
                spread[_column(rows, p)] = 0.0
        base += size * size


def _mark(rows: Any, i: int, marks: Any, touched: Any, count: int) -> Any:
    """Note the columns of a sparse row i among the ``count`` touched ones; how many there are then."""


@_means(_mark)
def _mark_of(rows: Any, i: Any, marks: Any, touched: Any, count: Any) -> Any:
    def sparse(rows: Any, i: Any, marks: Any, touched: Any, count: Any) -> Any:
        for p in range(rows[0][i], rows[0][i + 1]):
            j = rows[1][p]
            if not marks[j]:
                marks[j] = True
                touched[count] = j
                count += 1
        return count

    return (lambda rows, i, marks, touched, count: 0) if len(rows) == 1 else sparse


@_EXACT
def _class_square(total: Any, seen: Any, short: Any, shift: Any, scale: Any, apart: bool, whole: float) -> float:
    """The squared norm of a person's transformed (features × classes) sum, moved in place as for one score."""
    features, classes = total.shape
    square, raw, covered, pull = 0.0, 0.0, 0.0, 0.0
    for c in range(classes):
        pull += short[c] * short[c]
    for place in range(seen.size if apart else features):
        j = seen[place] if apart else place
        s = scale[j] if scale.size else 1.0
        m = shift[j] * s if scale.size else 0.0
        covered += m * m
        for c in range(classes):
            value = total[j, c] * s
            moved = value - short[c] * m
            raw += value * value
            square += moved * moved
            total[j, c] = value if apart else moved
    if apart and scale.size:
        square += pull * max(whole - covered, 0.0)
        square += (32 + features * classes) * 2.220446049250313e-16 * (raw + pull * whole)
    return square


@_EXACT
def _class_put(total: Any, seen: Any, apart: bool, factor: float, sums: Any) -> None:
    features, classes = total.shape
    for place in range(seen.size if apart else features):
        j = seen[place] if apart else place
        for c in range(classes):
            if factor != 0.0:
                sums[j, c] += factor * total[j, c]
            total[j, c] = 0.0


@_EXACT
def add_people_classes(
    table: Any, groups: Any, classes: int, params: Any, previous: Any, rule: Any, out: Any
) -> None:
    """As :func:`add_classes`, for people."""
    rows, y, _norms, factors, shift, scale, column = table
    people, order, starts, mean = groups
    alpha, beta, first, gamma, second = rule
    features = out.size // classes - (1 if column != 0.0 else 0)
    weights, offset, constant = _class_lifted(params, features, classes, shift, scale, column)
    others, other_offset, other_constant = weights, offset, constant
    if beta != 0.0:
        others, other_offset, other_constant = _class_lifted(previous, features, classes, shift, scale, column)
    _check_people(people, order, starts, y.size)
    sums = out.reshape(out.size // classes, classes)
    kinds = 2 if gamma != 0.0 else 1
    totals = np.zeros((kinds, features, classes))
    whole_sums, short_sums = np.zeros((kinds, classes)), np.zeros((kinds, classes))
    marks, touched, apart = np.zeros(features, np.bool_), np.empty(features, np.int64), _shift_is_apart(rows)
    r = np.empty((2, classes))
    shortened = np.zeros(classes)
    whole = 0.0
    for j in range(shift.size):
        whole += (shift[j] * scale[j]) ** 2
    for k in range(people.size):
        _look_ahead(rows, y, people, order, starts, k)
        begin, end = starts[people[k]], starts[people[k] + 1]
        share = 1.0 / (end - begin) if mean else 1.0
        count = 0
        whole_sums[:] = 0.0
        short_sums[:] = 0.0
        for place in range(begin, end):
            i = order[place]
            factor = factors[i] if factors.size else 1.0
            _class_residuals(rows, i, factor, weights, offset, constant, y[i], r[1])
            if beta != 0.0:
                _class_residuals(rows, i, factor, others, other_offset, other_constant, y[i], r[0])
                for c in range(classes):
                    r[0, c] = share * (r[1, c] - beta * r[0, c])
            for c in range(classes):
                r[1, c] *= share
                if beta == 0.0:
                    r[0, c] = r[1, c]
                for kind in range(kinds):
                    whole_sums[kind, c] += r[kind, c]
                    short_sums[kind, c] += r[kind, c] * factor
            start, stop = _span(rows, i)
            for p in range(start, stop):
                j = _column(rows, p)
                x = _value(rows, i, p) * factor
                for kind in range(kinds):
                    for c in range(classes):
                        totals[kind, j, c] += r[kind, c] * x
            count = _mark(rows, i, marks, touched, count)
        seen = touched[:count]
        for kind in range(kinds):
            square = _class_square(totals[kind], seen, short_sums[kind], shift, scale, apart, whole)
            for c in range(classes):
                square += (column * whole_sums[kind, c]) ** 2
            clip = first if kind == 0 else second
            weight = (alpha if kind == 0 else gamma) * _shrink(square, out.size, clip)
            _class_put(totals[kind], seen, apart, weight, sums)
            if weight != 0.0:
                for c in range(classes):
                    shortened[c] += weight * short_sums[kind, c]
                    if column != 0.0:
                        sums[features, c] += weight * column * whole_sums[kind, c]
        for j in seen:
            marks[j] = False
    if apart:
        for j in range(shift.size):
            for c in range(classes):
                sums[j, c] -= shortened[c] * shift[j] * scale[j]
