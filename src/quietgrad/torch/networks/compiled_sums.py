"""Compiled loops over per-example vectors: each number is read once and widened to float64 on the way.

torch would write the wider copy out first. On accelerators, and for vectors that do not lie row after row, it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from quietgrad.torch.networks.trees import applied

Array = npt.NDArray[Any]
Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_EXACT: Decorator = njit(cache=True, nogil=True, error_model="numpy")  # in this order alone
# Sums in any order, as their bounds allow; numbers that are not finite stay so.
_SUM: Decorator = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
_STRIP = 2048  # numbers of the sum that stay in the first cache


def takes(rows: Tensor) -> bool:
    """Whether the compiled passes can read these rows."""
    return (
        rows.device.type == "cpu" and rows.is_contiguous() and rows.dtype in (torch.float32, torch.float64)
        and not rows.requires_grad
    )  # fmt: skip


def row_squares(rows: Tensor) -> Tensor:
    """Σ_j r_ij² in float64."""
    squares = torch.empty(len(rows), dtype=torch.float64)
    _row_squares(rows.numpy(), squares.numpy())
    return squares


def scale_and_shift(grads: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor, *, last: bool) -> list[Tensor]:
    """Σ_p g_p·(x_p − mean)·rstd and Σ_p g_p: what each example's gradient by a norm's scale and shift is.

    Of a norm over the ``last`` axis, (n, positions, width) with a mean for each position; else over groups of
    channels, (n, channels, positions) with a mean for each group. Summed in float64, in one pass over both.

    >>> x, g = torch.tensor([[[1.0, 3.0], [2.0, 6.0]]]), torch.ones(1, 2, 2)
    >>> scale_and_shift(g, x, torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, 0.5]]), last=True)
    [tensor([[-2.,  2.]]), tensor([[2., 2.]])]
    """
    width = grads.shape[2 if last else 1]
    sums = [grads.new_empty((len(grads), width)) for _ in range(2)]
    kernel = _layer_norm if last else _group_norm
    kernel(*(t.contiguous().numpy() for t in (grads, inputs, mean, rstd)), *(t.numpy() for t in sums))
    return sums


def correlate(grads: Tensor, inputs: Tensor, length: int, shifts: Array, out: Tensor, places: Array) -> None:
    """out[m, places[k]] = Σ_l g_ml x_m,l+shifts[k], l < length: one channel's gradient of a filter, shift by shift.

    >>> out, x = torch.zeros(1, 3), torch.tensor([[1.0, 3.0, 5.0]])
    >>> correlate(torch.tensor([[1.0, 2.0]]), x, 2, np.array([0, 1]), out, np.array([0, 2]))
    >>> out
    tensor([[ 7.,  0., 13.]])
    """
    _correlate(grads.numpy(), inputs.numpy(), length, shifts, out.numpy(), places)


def unfold(images: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Return the patch that a filter sees at each position, (n, positions, channels·entries), in float64.

    >>> unfold(torch.arange(6.0).view(1, 1, 2, 3), (2, 2), (1, 1), (1, 1))
    tensor([[[0., 1., 3., 4.],
             [1., 2., 4., 5.]]], dtype=torch.float64)
    """
    steps = zip(images.shape[2:], kernel, stride, dilation, strict=True)
    sides = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in steps]
    out = torch.empty((len(images), *sides, images.shape[1], *kernel), dtype=torch.float64)
    _unfold(images.contiguous().numpy(), out.numpy(), *stride, *dilation)
    return out.flatten(3).flatten(1, 2)


def max_pool(images: Tensor, stride: tuple[int, int]) -> Tensor:
    """The maximum of each 2×2 window of (n, channels, height, width), as torch takes it, in a third of its time.

    >>> max_pool(torch.arange(16.0).view(1, 1, 4, 4), (2, 2)).flatten()
    tensor([ 5.,  7., 13., 15.])
    """
    pooled: Tensor = applied(_MaxPool, images, stride)
    return pooled


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, stride: tuple[int, int]) -> Tensor:
        sides = ((size - 2) // step + 1 for size, step in zip(images.shape[2:], stride, strict=True))
        pooled = images.new_empty((*images.shape[:2], *sides))
        ctx.shape, ctx.places = images.shape, torch.empty(pooled.shape, dtype=torch.int32)
        _max_pool(*(t.detach().flatten(0, 1).numpy() for t in (images, pooled, ctx.places)), *stride)
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = grads[0].new_zeros(ctx.shape)
        _to_places(*(t.reshape(len(back) * back.shape[1], -1).numpy() for t in (grads[0], ctx.places, back)))
        return back, None


@_EXACT
def _max_pool(images: Array, pooled: Array, places: Array, down: int, right: int) -> None:
    wide = images.shape[2]
    for m in range(len(images)):
        for i in range(pooled.shape[1]):
            upper, lower = images[m, i * down], images[m, i * down + 1]
            for j in range(pooled.shape[2]):
                at = j * right
                # Without branches, which would go wrong half the time. What is not a number stays so.
                best, place = upper[at], 0
                value = upper[at + 1]
                larger = (value > best) | (value != value)
                best, place = (value if larger else best), (1 if larger else place)
                value = lower[at]
                larger = (value > best) | (value != value)
                best, place = (value if larger else best), (wide if larger else place)
                value = lower[at + 1]
                larger = (value > best) | (value != value)
                best, place = (value if larger else best), (wide + 1 if larger else place)
                pooled[m, i, j] = best
                places[m, i, j] = i * down * wide + at + place


@_EXACT
def _to_places(grads: Array, places: Array, back: Array) -> None:
    for m in range(len(grads)):
        for j in range(grads.shape[1]):
            back[m, places[m, j]] += grads[m, j]


@_EXACT
def _unfold(images: Array, out: Array, down: int, right: int, step_h: int, step_w: int) -> None:
    examples, high, wide, channels, kernel_h, kernel_w = out.shape
    for m in range(examples):
        for i in range(high):
            for j in range(wide):
                for c in range(channels):
                    for p in range(kernel_h):
                        line = images[m, c, i * down + p * step_h]
                        entries = out[m, i, j, c, p]
                        for q in range(kernel_w):
                            entries[q] = line[j * right + q * step_w]


@_SUM
def _correlate(grads: Array, inputs: Array, length: int, shifts: Array, out: Array, places: Array) -> None:
    zero = grads.dtype.type(0)
    for m in range(grads.shape[0]):
        g = grads[m][:length]
        for k in range(len(shifts)):
            x = inputs[m][shifts[k] : shifts[k] + length]  # a slice: the compiler then knows it lies without gaps
            total = zero
            for j in range(len(g)):
                total += g[j] * x[j]
            out[m, places[k]] = total


@_SUM
def _group_norm(grads: Array, inputs: Array, mean: Array, rstd: Array, scale: Array, shift: Array) -> None:
    per_group = grads.shape[1] // mean.shape[1]
    for i in range(grads.shape[0]):
        for c in range(grads.shape[1]):
            g, x = grads[i, c], inputs[i, c]
            centre = np.float64(mean[i, c // per_group])
            product, total = 0.0, 0.0
            for j in range(len(g)):
                value = np.float64(g[j])
                total += value
                product += value * (np.float64(x[j]) - centre)
            scale[i, c] = product * rstd[i, c // per_group]
            shift[i, c] = total


@_SUM
def _layer_norm(grads: Array, inputs: Array, mean: Array, rstd: Array, scale: Array, shift: Array) -> None:
    product, total = np.empty(grads.shape[2]), np.empty(grads.shape[2])
    for i in range(grads.shape[0]):
        product[:] = 0.0
        total[:] = 0.0
        for t in range(grads.shape[1]):
            g, x = grads[i, t], inputs[i, t]
            centre, factor = np.float64(mean[i, t]), np.float64(rstd[i, t])
            for d in range(len(g)):
                value = np.float64(g[d])
                total[d] += value
                product[d] += value * ((np.float64(x[d]) - centre) * factor)
        scale[i] = product
        shift[i] = total


@_SUM
def _row_squares(rows: Array, squares: Array) -> None:
    for i in range(rows.shape[0]):
        total = 0.0
        for j in range(rows.shape[1]):
            value = np.float64(rows[i, j])
            total += value * value
        squares[i] = total


@_SUM
def add_rows(rows: Array, weights: Array, out: Array) -> None:
    """out_j += Σ_i w_i r_ij, all in float64."""
    count, width = rows.shape
    for start in range(0, width, _STRIP):
        stop = min(start + _STRIP, width)
        i = 0
        while i + 4 <= count:
            a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
            for j in range(start, stop):
                left = a * np.float64(rows[i, j]) + b * np.float64(rows[i + 1, j])
                right = c * np.float64(rows[i + 2, j]) + d * np.float64(rows[i + 3, j])
                out[j] += left + right
            i += 4
        while i < count:
            a = weights[i]
            for j in range(start, stop):
                out[j] += a * np.float64(rows[i, j])
            i += 1
