"""Recurrent layers, taken apart so that their weights are those of linear layers.

With z = x W_ihᵀ + b_ih for all times at once and u_t = h_{t−1} W_hhᵀ + b_hh, the gradients of the weights are
Σ_t ∂L/∂z_t ⊗ x_t and Σ_t ∂L/∂u_t ⊗ h_{t−1}: outer products over positions, as of any linear layer on a sequence.
Only the recurrence itself is written out here, forward and backward, with both gradients as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function

__all__ = ["RECURRENT", "recurrent_use"]


def recurrent_use(states: Tensor, weight: Tensor, bias: Tensor | None, product: Tensor) -> Tensor:
    """Says that ``product`` stands for states·weightᵀ + bias: its gradient is theirs."""
    return product


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
        inputs = torch.stack(by_input[::-1])
        states = inputs if ctx.cell.backward is _lstm_back else torch.stack(by_state[::-1])
        return None, inputs, states, None, None, *grads


def _lstm(z: Tensor, u: Tensor, h: Tensor, c: Tensor) -> tuple[Any, ...]:
    gates = u.add_(z)
    width = c.shape[1]
    gates[:, : 2 * width].sigmoid_()
    gates[:, 2 * width : 3 * width].tanh_()
    gates[:, 3 * width :].sigmoid_()
    i, f, g, o = gates.chunk(4, 1)
    new = torch.addcmul(f * c, i, g)
    bent = new.tanh()
    return o * bent, new, (gates, bent)


def _lstm_back(before: Any, saved: Any, dh: Tensor, dc: Tensor) -> tuple[Any, ...]:
    gates, bent = saved
    i, f, g, o = gates.chunk(4, 1)
    dc = torch.addcmul(dc, dh * o, 1 - bent * bent)
    slopes = gates * (1 - gates)
    width = bent.shape[1]
    slopes[:, 2 * width : 3 * width] = 1 - g * g
    by_gate = slopes.mul_(torch.cat([dc * g, dc * before[1], dc * i, dh * bent], 1))
    return by_gate, by_gate, None, dc * f


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


def _taken_apart(cell: _Steps) -> Callable[..., Any]:
    def run(sharing: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        x, start, weights, biases, layers, dropout, training, both, batch_first = (*args, *[None] * 9)[:9]
        starts = (start,) if isinstance(start, Tensor) else start
        each = (4 if biases else 2) if biases in (True, False) else 0
        if (
            kwargs or len(args) != 9 or not isinstance(x, Tensor) or x.dim() != 3 or (dropout and training)
            or len(weights) != each * layers * (1 + both) or not x.shape[0] or not x.shape[1]
        ):  # fmt: skip
            return sharing.meet(func, args, kwargs)  # packed sequences, projections, dropout between layers
        with sharing:
            z = x.transpose(0, 1) if batch_first else x
            last: list[list[Tensor]] = [[] for _ in starts]
            for layer in range(layers):
                sides = []
                for side in range(1 + both):
                    k = layer * (1 + both) + side
                    w_ih, w_hh, *rest = weights[each * k : each * (k + 1)]
                    b_ih, b_hh = rest or (None, None)
                    hidden, *ends = _one_way(
                        cell, z.flip(0) if side else z, w_ih, w_hh, b_ih, b_hh, [s[k] for s in starts]
                    )
                    sides.append(hidden.flip(0) if side else hidden)
                    for found, end in zip(last, ends, strict=True):
                        found.append(end)
                z = torch.cat(sides, -1) if both else sides[0]
            ends = [torch.stack(found) for found in last]
            return (z.transpose(0, 1) if batch_first else z, *ends)

    return run


def _one_way(
    cell: _Steps, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    start: list[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    z = F.linear(x, w_ih, b_ih)
    u = z * 0  # its numbers are not read: the product stands in its place, and its gradient arrives here
    plain = [None if t is None else t.detach() for t in (w_hh, b_hh)]
    run: Callable[..., tuple[Tensor, ...]] = _Recurrence.apply
    states = [s.expand(z.shape[1], -1).to(z.dtype) for s in start]
    hidden, *ends = run(cell, z, u, *plain, *states)
    before = torch.cat([states[0][None], hidden[:-1]]).detach()
    handle_torch_function(recurrent_use, (w_hh,), before, w_hh, b_hh, u)
    return hidden, *ends


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _taken_apart(_Steps(_lstm, _lstm_back)),
    torch.gru: _taken_apart(_Steps(_gru, _gru_back)),
    torch.rnn_tanh: _taken_apart(_Steps(_tanh, _tanh_back)),
    torch.rnn_relu: _taken_apart(_Steps(_relu, _relu_back)),
}
