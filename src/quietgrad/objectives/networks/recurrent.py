"""Recurrent layers, taken apart so that their weights are those of linear layers.

With z = x W_ihᵀ + b_ih for all times at once and u_t = h_{t−1} W_hhᵀ + b_hh, the gradients of the weights are
Σ_t ∂L/∂z_t ⊗ x_t and Σ_t ∂L/∂u_t ⊗ h_{t−1}: outer products over positions, as of any linear layer on a sequence.
Only the recurrence itself is written out here, forward and backward, with both gradients as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Steps(NamedTuple):
    """A cell: what it does at one time, and the way back."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]


class _Recurrence(torch.autograd.Function):
    """All times of a layer in one direction: (z, u, h_0, …) → (h_1 … h_T, h_T, …); u is there for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, cell: _Steps, z: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, *start: Tensor
    ) -> tuple[Tensor, ...]:
        transposed = weight.t().contiguous()
        states, kept, hidden = start, [], []
        for now in z.unbind(0):
            before = states
            product = states[0] @ transposed if bias is None else torch.addmm(bias, states[0], transposed)
            *states, saved = cell.forward(now, product, *states)  # type: ignore[assignment]
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


def _lstm(z: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, *start: Tensor) -> Any:
    return _LongShort.apply(z, u, weight, bias, *start)  # type: ignore[no-untyped-call]


def _each_time(cell: _Steps) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return _Recurrence.apply(cell, *args)  # type: ignore[no-untyped-call]

    return run


def _gru(z: Tensor, u: Tensor, h: Tensor) -> tuple[Any, ...]:
    width = h.shape[1]
    gates = (z[:, : 2 * width] + u[:, : 2 * width]).sigmoid_()
    reset, keep = gates.chunk(2, 1)
    fresh = torch.addcmul(z[:, 2 * width :], reset, u[:, 2 * width :]).tanh_()
    return fresh + keep * (h - fresh), (gates, fresh, u[:, 2 * width :])


def _gru_back(before: Any, saved: Any, dh: Tensor) -> tuple[Any, ...]:
    gates, fresh, product = saved
    reset, keep = gates.chunk(2, 1)
    by_fresh = dh * (1 - keep) * (1 - fresh * fresh)
    slopes = gates * (1 - gates)
    by_gates = slopes.mul_(torch.cat([by_fresh * product, dh * (before[0] - fresh)], 1))
    return torch.cat([by_gates, by_fresh], 1), torch.cat([by_gates, by_fresh * reset], 1), dh * keep


def _tanh(z: Tensor, u: Tensor, h: Tensor) -> tuple[Any, ...]:
    new = u.add_(z).tanh_()
    return new, new


def _tanh_back(before: Any, saved: Tensor, dh: Tensor) -> tuple[Any, ...]:
    slope = dh * (1 - saved * saved)
    return slope, slope, None


def _relu(z: Tensor, u: Tensor, h: Tensor) -> tuple[Any, ...]:
    new = u.add_(z).relu_()
    return new, new


def _relu_back(before: Any, saved: Tensor, dh: Tensor) -> tuple[Any, ...]:
    slope = dh * (saved > 0)
    return slope, slope, None


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _each_time(_Steps(_gru, _gru_back)),
    torch.rnn_tanh: _each_time(_Steps(_tanh, _tanh_back)),
    torch.rnn_relu: _each_time(_Steps(_relu, _relu_back)),
}
"""By operation of torch: (z, u, W_hh, b_hh, h_0, …) → (h_1 … h_T, h_T, …), times first."""
