"""Recurrent layers, taken apart so that their weights are those of linear layers.

With z = x W_ihᵀ + b_ih for all times at once and u_t = h_{t−1} W_hhᵀ + b_hh, the gradients of the weights are
Σ_t ∂L/∂z_t ⊗ x_t and Σ_t ∂L/∂u_t ⊗ h_{t−1}: outer products over positions, as of any linear layer on a sequence.
Only the recurrence itself is written out here, forward and backward, with both gradients as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.torch.networks.kernels import linear_kernel
from quietgrad.torch.networks.taps import Taps, TapSite
from quietgrad.torch.networks.trees import Called, applied


class _CellFunctions(NamedTuple):
    """A cell: what it does at one time, and the way back."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]


class _Recurrence(torch.autograd.Function):
    """All times of a layer in one direction: (z, u, h_0, …) → (h_1 … h_T, h_T, …); u is there for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, cell: _CellFunctions, z: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, *start: Tensor
    ) -> tuple[Tensor, ...]:
        transposed = weight.t().contiguous()
        states: Sequence[Tensor] = start
        kept, hidden = [], []
        for now in z.unbind(0):
            before = states
            product = states[0] @ transposed if bias is None else torch.addmm(bias, states[0], transposed)
            *states, saved = cell.forward(now, product, *states)
            kept.append((before, saved))
            hidden.append(states[0])
        ctx.cell, ctx.kept, ctx.weight = cell, kept, weight
        return (torch.stack(hidden), *states)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        outputs, *last = given
        grads: Sequence[Tensor] = last
        by_input, by_state = [], []
        for time in range(len(ctx.kept) - 1, -1, -1):
            before, saved = ctx.kept[time]
            dz, du, *rest = ctx.cell.backward(before, saved, grads[0] + outputs[time], *grads[1:])
            # ∂h_t/∂h_{t−1}: through the product, and what the cell passes on.
            grads = [torch.addmm(rest[0], du, ctx.weight) if rest[0] is not None else du @ ctx.weight, *rest[1:]]
            by_input.append(dz)
            by_state.append(du)
        ctx.kept = None
        return None, torch.stack(by_input[::-1]), torch.stack(by_state[::-1]), None, None, *grads


class _LongShort(torch.autograd.Function):
    """The same of an LSTM, (z, u, h_0, c_0) → (h_1 … h_T, h_T, c_T), with little to do at each time.

    Gates i, f, g, o of all times lie in one tensor. On the way back what a gate's gradient is multiplied with does
    not depend on what comes back, so it is made for all times at once:

        ∂i = dc·g·i(1−i)   ∂f = dc·c_{t−1}·f(1−f)   ∂g = dc·i·(1−g²)   ∂o = dh·tanh(c)·o(1−o),
        dc = dc_{t+1}·f_{t+1} + dh·o·(1−tanh²c)
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor
    ) -> tuple[Tensor, ...]:
        times, examples, width = len(z), *h.shape
        transposed = weight.t().contiguous()
        z = z if bias is None else z + bias
        gates = z.new_empty((times, examples, 4, width))
        cells, bent, hidden = (z.new_empty((times, examples, width)) for _ in range(3))
        ctx.save_for_backward(weight, gates, cells, bent, c)
        moments = (part.unbind(0) for part in (z, gates.flatten(2), gates, cells, bent, hidden))
        for now, flat, four, cell, curve, new in zip(*moments, strict=True):
            torch.addmm(now, h, transposed, out=flat)
            four[:, :2].sigmoid_()
            four[:, 2].tanh_()
            four[:, 3].sigmoid_()
            i, f, g, o = four.unbind(1)
            torch.mul(f, c, out=cell).addcmul_(i, g)
            torch.tanh(cell, out=curve)
            h, c = torch.mul(o, curve, out=new), cell
        return hidden, h.clone(), c.clone()

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, dh: Tensor, dc: Tensor) -> Any:
        weight, gates, cells, bent, start = ctx.saved_tensors
        i, f, g, o = gates.unbind(2)
        by_gate = torch.empty_like(gates)
        torch.mul(i, 1 - i, out=by_gate[:, :, 0]).mul_(g)
        torch.mul(f, 1 - f, out=by_gate[:, :, 1])
        by_gate[1:, :, 1].mul_(cells[:-1])
        by_gate[0, :, 1].mul_(start)
        torch.mul(g, g, out=by_gate[:, :, 2]).neg_().add_(1).mul_(i)
        torch.mul(o, 1 - o, out=by_gate[:, :, 3]).mul_(bent)
        through = (1 - bent * bent).mul_(o)
        moments = zip(*(t.unbind(0) for t in (by_gate, by_gate.flatten(2), f, through, outputs)), strict=True)
        dc = dc.clone()
        for four, flat, forget, slope, output in reversed(list(moments)):
            dh = dh + output
            dc.addcmul_(dh, slope)
            four[:, :3].mul_(dc.unsqueeze(1))
            four[:, 3].mul_(dh)
            dh = flat @ weight
            dc.mul_(forget)
        by_gate = by_gate.flatten(2)
        return by_gate, by_gate, None, None, dh, dc


def _gru(z: Tensor, u: Tensor, h: Tensor) -> tuple[Any, ...]:
    width = h.shape[1]
    gates = (z[:, : 2 * width] + u[:, : 2 * width]).sigmoid_()
    reset, keep = gates.chunk(2, 1)
    fresh = torch.addcmul(z[:, 2 * width :], reset, u[:, 2 * width :]).tanh_()
    return fresh + keep * (h - fresh), (gates, fresh, u[:, 2 * width :])


def _gru_back(before: Sequence[Tensor], saved: Sequence[Tensor], dh: Tensor) -> tuple[Any, ...]:
    gates, fresh, product = saved
    reset, keep = gates.chunk(2, 1)
    by_fresh = dh * (1 - keep) * (1 - fresh * fresh)
    slopes = gates * (1 - gates)
    by_gates = slopes.mul_(torch.cat([by_fresh * product, dh * (before[0] - fresh)], 1))
    return torch.cat([by_gates, by_fresh], 1), torch.cat([by_gates, by_fresh * reset], 1), dh * keep


def _activated(activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> _CellFunctions:
    """h_t = activation(z_t + u_t); ``slope`` is its derivative by the value."""

    def forward(z: Tensor, u: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = activation(u.add_(z))
        return new, new

    def backward(before: object, new: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, None]:
        back = dh * slope(new)
        return back, back, None

    return _CellFunctions(forward, backward)


def _recurrent(recur: Called) -> Callable[..., Any]:
    def run(taps: Taps, *args: Any) -> Any:
        if len(args) != 9 or not isinstance(args[0], Tensor) or not taps.is_records(args[0]) or args[0].dim() != 3:
            return NotImplemented  # packed sequences
        return _layers(taps, recur, *args)

    return run


def _layers(
    taps: Taps, recur: Called, x: Tensor, start: Tensor | tuple[Tensor, ...], weights: Sequence[Tensor],
    biases: bool, layers: int, dropout: float, training: bool, both: bool, batch_first: bool,
) -> Any:  # fmt: skip
    starts = (start,) if isinstance(start, Tensor) else start
    each = 4 if biases else 2
    if len(weights) != each * layers * (1 + both) or not all(x.shape) or any(map(taps.is_records, weights)):
        return NotImplemented  # projections
    with taps.outside():
        z = taps.rows(x)  # (n, batch, time, features), or time before batch
        z = z.movedim(2, 0) if batch_first else z.movedim(1, 0)
        count, batch = z.shape[1:3]
        z = z.flatten(1, 2)
    states = []
    for each_start in starts:
        value = taps.copy(each_start) if taps.is_shared(each_start) else each_start
        with taps.outside():
            states.append(taps.all_rows(value).movedim(1, 0).flatten(1, 2))  # (layers·sides, n·batch, width)
    last: list[list[Tensor]] = [[] for _ in starts]
    for layer in range(layers):
        sides = []
        for side in range(1 + both):
            k = layer * (1 + both) + side
            one = weights[each * k : each * (k + 1)]
            (w_ih, w_hh), (b_ih, b_hh) = one[:2], one[2:] if biases else (None, None)
            with taps.outside():
                hidden, *ends = _one_way(
                    taps, recur, z.flip(0) if side else z, w_ih, w_hh, b_ih, b_hh, [s[k] for s in states], count
                )
                sides.append(hidden.flip(0) if side else hidden)
            for found, end in zip(last, ends, strict=True):
                found.append(end)
        with taps.outside():
            z = torch.cat(sides, -1) if both else sides[0]
            if dropout and training and layer < layers - 1:  # records in front, where each draws its own
                z = torch.unflatten(z, 1, (count, batch)).movedim(1, 0)
                z = F.dropout(z.contiguous(), dropout).movedim(0, 1).flatten(1, 2)
    with taps.outside():
        z = torch.unflatten(z, 1, (count, batch)).movedim(1, 0)  # (n, time, batch, width)
        out = z.transpose(1, 2) if batch_first else z
        ends = [torch.unflatten(torch.stack(found), 1, (count, batch)).movedim(1, 0) for found in last]
    return (taps.logical(out), *map(taps.logical, ends))


def _one_way(
    taps: Taps, recur: Called, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
    b_hh: Tensor | None, start: list[Tensor], count: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One layer in one direction, times first; its weights are those of linear layers on sequences."""

    def records_first(values: Tensor) -> Tensor:  # (time, n·batch, features)
        values = torch.unflatten(values, 1, (count, -1)).movedim(1, 0)
        return values.flatten(1, 2)

    z = F.linear(x, taps.plain(w_ih), taps.plain(b_ih))
    if taps.is_shared(w_ih) or taps.is_shared(b_ih):
        kernel = linear_kernel(*w_ih.shape)
        site = taps.use("recurrent input", kernel, records_first(x), {"weight": w_ih, "bias": b_ih})
        site.arrange = records_first
        z = taps.tap(z, site)
    # u stands for h W_hhᵀ + b_hh: its numbers are not read, and the gradient of that product arrives at it.
    u = z.new_zeros(()).expand(z.shape)
    second: TapSite | None = None
    if taps.is_shared(w_hh) or taps.is_shared(b_hh):
        width = w_hh.shape[1]
        blank = z.new_zeros(()).expand(count, z.shape[0] * (z.shape[1] // count), width)
        second = taps.use("recurrent state", linear_kernel(*w_hh.shape), blank, {"weight": w_hh, "bias": b_hh})
        second.arrange = records_first
        u = taps.tap(torch.empty_like(z), second)
    states = [s.to(z.dtype) for s in start]
    hidden, *ends = recur(z, u, taps.plain(w_hh), taps.plain(b_hh), *states)
    if second is not None:
        second.given = records_first(
            torch.cat([states[0][None].expand(1, *hidden.shape[1:]), hidden[:-1]]).detach()
        )
    return hidden, *ends


def lstm_cell(
    taps: Taps, input: Tensor, hx: tuple[Tensor, Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``torch.lstm_cell`` written out: vmap has no rule for it."""
    with taps:
        i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh)).chunk(4, -1)
        c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


RECURRENT_LAYERS: dict[Any, Callable[..., Any]] = {
    torch.lstm: _recurrent(partial(applied, _LongShort)),
    torch.gru: _recurrent(partial(applied, _Recurrence, _CellFunctions(_gru, _gru_back))),
    torch.rnn_tanh: _recurrent(partial(applied, _Recurrence, _activated(Tensor.tanh_, lambda h: 1 - h * h))),
    torch.rnn_relu: _recurrent(partial(applied, _Recurrence, _activated(Tensor.relu_, lambda h: h > 0))),
}
