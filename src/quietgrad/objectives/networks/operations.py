"""Operations that taps understand: how each is done for all records at once, and the kernel of its parameters.

An operation is given as the program sees it, for one record; what its tensors hold of all records has the records
in front, (n, …). Work is done on the latter. Whatever is not here, or is called in another way, is left to vmap
with a copy of its parameters for each record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.objectives.networks import compiled_sums
from quietgrad.objectives.networks.kernels import (
    convolution_kernel,
    embedding_kernel,
    linear_kernel,
    matrix_form,
    matrix_kernel,
)
from quietgrad.objectives.networks.recurrent import RECURRENT
from quietgrad.objectives.networks.taps import OPERATIONS, Site, Taps


@dataclass(frozen=True)
class Operation:
    """How it is done; ``always``: also if no parameter of it is trained, because vmap has no good rule for it."""

    handler: Callable[..., Any]
    always: bool = False

    def run(self, taps: Taps, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = self.handler(taps, *args, **kwargs)
        except TypeError as error:
            if "argument" in str(error):  # called in a way that is not known here
                result = NotImplemented
            else:
                raise
        if result is NotImplemented and self.always and not any(map(taps.is_shared, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        return result


def _linear(taps: Taps, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias) or weight.dim() != 2:
        return NotImplemented
    rows = taps.rows(input)
    with taps.outside():
        # As one matrix: of more axes torch returns a view, which a tap would have to copy.
        out = F.linear(rows.reshape(-1, rows.shape[-1]), taps.plain(weight), taps.plain(bias))
        shape = (*rows.shape[:-1], len(weight))
        if taps.is_shared(weight) or taps.is_shared(bias):
            site = taps.use("linear", linear_kernel(*weight.shape), rows, {"weight": weight, "bias": bias})
            site.arrange = lambda grad: grad.reshape(shape)
            out = taps.tap(out, site)
        out = out.view(shape)
    return taps.logical(out)


def _product(taps: Taps, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """x W + b, with W a matrix of parameters, or the transpose of one."""
    if weight.dim() != 2 or taps.is_records(weight) or taps.is_records(bias):
        return NotImplemented
    rows, whole = taps.rows(input), weight._base
    inputs, outputs = weight.shape
    if taps.slot(weight) is None and whole is not None and whole.dim() == 2 and _is_transpose(weight, whole):
        kernel, matrix = linear_kernel(outputs, inputs), whole
    else:
        kernel, matrix = linear_kernel(outputs, inputs, swapped=True), weight
    site = taps.use("matmul", kernel, rows, {"weight": matrix, "bias": bias})
    shape = (*rows.shape[:-1], outputs)
    site.arrange = lambda grad: grad.reshape(shape)
    with taps.outside():
        flat = rows.reshape(-1, inputs)
        out = flat @ taps.plain(weight) if bias is None else torch.addmm(taps.plain(bias), flat, taps.plain(weight))
        out = taps.tap(out, site).view(shape)
    return taps.logical(out)


def _is_transpose(weight: Tensor, whole: Tensor) -> bool:
    same = weight.data_ptr() == whole.data_ptr() and weight.shape == whole.shape[::-1]
    return same and weight.stride() == whole.stride()[::-1]


def _matmul(taps: Taps, input: Tensor, other: Tensor) -> Any:
    if taps.is_records(input) and taps.is_shared(other):
        return _product(taps, input, other)
    if taps.is_shared(input) and taps.is_records(other) and input.dim() == 2:
        if other.dim() == 1:
            return _linear(taps, other, input)
        with taps.outside():
            turned = taps.rows(other).mT
        out = _linear(taps, taps.logical(turned), input)
        return out if out is NotImplemented else out.mT
    return NotImplemented


def _addmm(taps: Taps, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or not taps.is_records(mat1) or not taps.is_shared(mat2) or input.dim() != 1:
        return NotImplemented
    return _product(taps, mat1, mat2, input)


def _einsum(taps: Taps, equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    shared = [taps.is_shared(value) for value in operands]
    if not any(shared) or sum(shared) > 1:
        return NotImplemented
    form = matrix_form(equation, [tuple(value.shape) for value in operands], shared)
    if form is None or taps.slot(operands[form.place]) is None:
        return NotImplemented
    weight = operands[form.place]
    others = [value for place, value in enumerate(operands) if place != form.place]
    with taps:
        x = torch.einsum(form.rest, *others)
        lead = x.dim() - form.arrangement.rows
        x = x.flatten(lead) if x.dim() > lead else x
    if not taps.is_records(x):
        return NotImplemented
    rows = taps.rows(x)
    site = taps.use("einsum", matrix_kernel(tuple(weight.shape), form.arrangement), rows, {"weight": weight})
    with taps.outside():
        out = taps.tap(rows @ form.arrangement.of(weight.detach()), site)
    made = taps.logical(out)
    free = [weight.shape[axis] for axis in form.arrangement.order[form.arrangement.rows :]]
    return made.reshape(*made.shape[:-1], *free).permute(form.result)


def _convolution(spatial: int) -> Callable[..., Any]:
    def each(value: Any) -> tuple[int, ...]:
        return (
            (int(value),) * spatial
            if isinstance(value, int)
            else tuple(int(v) for v in value) * (spatial if len(value) == 1 else 1)
        )

    def run(
        taps: Taps, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias):
            return NotImplemented
        rows, alone = taps.rows(input), input.dim() == spatial + 1
        strides, steps, kernel = each(stride), each(dilation), tuple(weight.shape[2:])
        around: list[int] = []  # as F.pad takes it: of the last axis first
        for axis in reversed(range(spatial)):
            if isinstance(padding, str):
                total = steps[axis] * (kernel[axis] - 1) if padding == "same" else 0
                around += [total // 2, total - total // 2]
            else:
                around += [each(padding)[axis]] * 2
        images = 1 if alone else rows.shape[1]
        made = convolution_kernel(tuple(weight.shape), strides, tuple(around), steps, groups, images)
        with taps.outside():
            folded = rows if alone else rows.flatten(0, 1)
            call = (torch.conv1d, torch.conv2d, torch.conv3d)[spatial - 1]
            out = call(folded, taps.plain(weight), taps.plain(bias), stride, padding, dilation, groups)
            if taps.is_shared(weight) or taps.is_shared(bias):
                given = folded if images == 1 else rows
                site = taps.use(f"conv{spatial}d", made, given, {"weight": weight, "bias": bias})
                if images > 1:
                    site.arrange = lambda grad: torch.unflatten(grad, 0, (-1, images))
                out = taps.tap(out, site)
            out = out if alone else torch.unflatten(out, 0, (-1, images))
        return taps.logical(out)

    return run


def _max_pool2d(
    taps: Taps, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    stride = _pair(kernel_size if stride is None or stride == [] else stride)
    form = _pair(kernel_size), _pair(padding), _pair(dilation)
    if form != ((2, 2), (0, 0), (1, 1)) or ceil_mode or return_indices or input.dim() != 4:
        return NotImplemented
    if not taps.is_records(input) or min(input.shape[2:]) < 2:
        return NotImplemented
    rows = taps.rows(input)
    with taps.outside():
        images = rows.flatten(0, 1).contiguous()
        if not compiled_sums.takes(images.detach()):
            return NotImplemented
        out = torch.unflatten(compiled_sums.max_pool(images, stride), 0, (-1, rows.shape[1]))
    return taps.logical(out)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value),) * 2 if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _embedding(
    taps: Taps, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if not taps.is_records(input) or taps.is_records(weight) or max_norm is not None or weight.dim() != 2:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    rows = taps.rows(input)
    with taps.outside():
        out = torch.embedding(weight.detach(), rows)
        if taps.is_shared(weight):
            kernel = embedding_kernel(len(weight), padding_idx)
            out = taps.tap(out, taps.use("embedding", kernel, rows, {"weight": weight}))
    return taps.logical(out)


def _embedding_bag(
    taps: Taps, input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Of the embeddings themselves: a bag is a sum over the rows it names."""
    if max_norm is not None or mode not in ("sum", "mean"):
        return NotImplemented
    with taps:
        looked_up = F.embedding(input, weight, padding_idx)
        counted = torch.ones(input.shape) if padding_idx is None else (input != padding_idx)
        counted = counted.to(looked_up.dtype)
        looked_up = looked_up * counted.unsqueeze(-1)
        if per_sample_weights is not None:
            looked_up = looked_up * per_sample_weights.unsqueeze(-1)
        if input.dim() == 2:
            total, size = looked_up.sum(1), counted.sum(1)
        else:
            assert offsets is not None
            starts = offsets[:-1] if include_last_offset else offsets
            place = torch.arange(len(input), device=input.device)
            inside = place >= starts.unsqueeze(1)
            ends = torch.cat([starts[1:], torch.full_like(starts[:1], len(input))])
            inside = (inside & (place < ends.unsqueeze(1))).to(looked_up.dtype)
            total, size = inside @ looked_up, inside @ counted
        return total / size.clamp(min=1.0).unsqueeze(-1) if mode == "mean" else total


def _layer_norm(
    taps: Taps, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    shape = list(normalized_shape)
    return _over_last(
        taps, "layer_norm", input, len(shape), weight, bias, lambda x, w, b: F.layer_norm(x, shape, w, b, eps)
    )


def _rms_norm(
    taps: Taps, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    shape = list(normalized_shape)
    return _over_last(
        taps, "rms_norm", input, len(shape), weight, None, lambda x, w, b: F.rms_norm(x, shape, w, eps)
    )


def _over_last(
    taps: Taps, name: str, input: Tensor, axes: int, weight: Any, bias: Any, norm: Callable[..., Tensor]
) -> Any:
    if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias):
        return NotImplemented
    rows = taps.rows(input)
    still = rows.detach()

    def sums(grad: Tensor) -> tuple[Tensor, Tensor]:
        scaled = norm(still, None, None) * grad
        return tuple(_leading(each.flatten(-axes)) for each in (scaled, grad))  # type: ignore[return-value]

    with taps.outside():
        out = norm(rows, taps.plain(weight), taps.plain(bias))
        if taps.is_shared(weight) or taps.is_shared(bias):
            out = taps.tap(out, taps.affine(name, weight, bias, sums))
    return taps.logical(out)


def _group_norm(
    taps: Taps, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    return _over_channels(
        taps, "group_norm", input, weight, bias, lambda x, w, b: F.group_norm(x, num_groups, w, b, eps)
    )


def _instance_norm(
    taps: Taps, input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    return _over_channels(
        taps, "instance_norm", input, weight, bias, lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=eps)
    )


def _batch_norm(
    taps: Taps, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if training or running_mean is None:
        return NotImplemented
    return _over_channels(
        taps, "batch_norm", input, weight, bias,
        lambda x, w, b: F.batch_norm(x, running_mean, running_var, w, b, False, momentum, eps),
    )  # fmt: skip


def _over_channels(
    taps: Taps, name: str, input: Tensor, weight: Any, bias: Any, norm: Callable[..., Tensor]
) -> Any:
    if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias) or input.dim() < 2:
        return NotImplemented
    rows = taps.rows(input)
    still, images = rows.detach(), rows.shape[1]

    def sums(grad: Tensor) -> tuple[Tensor, Tensor]:
        scaled = norm(still.flatten(0, 1), None, None) * grad
        return tuple(  # type: ignore[return-value]
            each.reshape(-1, images, each.shape[1], each[0, 0].numel()).sum((1, 3)) for each in (scaled, grad)
        )

    with taps.outside():
        out = norm(rows.flatten(0, 1), taps.plain(weight), taps.plain(bias))
        if taps.is_shared(weight) or taps.is_shared(bias):
            out = taps.tap(out, taps.affine(name, weight, bias, sums))
        out = torch.unflatten(out, 0, (-1, images))
    return taps.logical(out)


def _leading(values: Tensor) -> Tensor:
    return values.flatten(1, -2).sum(1) if values.dim() > 2 else values


def _attention(
    taps: Taps, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention of all records as one batch; with dropout written out, so that each draws its own."""
    if attn_mask is not None and taps.is_shared(attn_mask):
        attn_mask = taps.copy(attn_mask)
    if any(taps.is_shared(part) for part in (query, key, value)):
        return NotImplemented
    if dropout_p > 0.0 or query.dim() not in (3, 4) or not (query.dim() == key.dim() == value.dim()):
        with taps:
            return _written_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    parts = [_all(taps, part) for part in (query, key, value)]
    with taps.outside():
        lead = max(part.shape[1] for part in parts) if query.dim() == 4 else 0
        folded = [_folded(part, lead) for part in parts]
        mask = attn_mask
        if attn_mask is not None:
            mask = _all(taps, attn_mask)
            while mask.dim() < query.dim() + 1:
                mask = mask.unsqueeze(1)
            mask = _folded(mask, lead)
        q, k, v = folded
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        out = torch.unflatten(out, 0, (taps.count, lead)) if lead else out
    return taps.logical(out)


def _all(taps: Taps, value: Tensor) -> Tensor:
    """(n, …) of a value, also of one that is the same for every record."""
    return taps.rows(value) if taps.is_records(value) else value.expand(taps.count, *value.shape)


def _folded(rows: Tensor, lead: int) -> Tensor:
    if not lead:
        return rows
    return rows.expand(-1, lead, *rows.shape[2:]).flatten(0, 1)


def _written_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def _dropout(taps: Taps, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Each record's own mask, for less than the dispatcher would ask to see the draw."""
    if not training or p == 0.0 or inplace or not 0.0 < p <= 1.0 or taps.draws is None:
        return NotImplemented
    if not taps.is_records(input):
        return NotImplemented
    rows = taps.rows(input)
    with taps.outside():
        kept = taps.draws.mask(rows.shape, 1.0 - p)
        out = rows * (kept.to(rows.dtype) * (0.0 if p == 1.0 else 1.0 / (1.0 - p)))
    return taps.logical(out)


def _multi_head_attention(taps: Taps, *args: Any, **kwargs: Any) -> Any:
    """As torch does it, with its projections seen one by one: they are linear layers."""
    with _looked_into(), taps:
        return F.multi_head_attention_forward(*args, **kwargs)


@contextmanager
def _looked_into() -> Iterator[None]:
    """A function of torch.nn.functional that is written in Python is run, instead of shown as one operation."""
    names = vars(F)
    held = names["has_torch_function"]
    names["has_torch_function"] = lambda *_: False
    try:
        yield
    finally:
        names["has_torch_function"] = held


def _bilinear(taps: Taps, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    with taps:
        out = torch.einsum("bi,oij,bj->bo", input1.flatten(0, -2), weight, input2.flatten(0, -2))
        out = out if bias is None else out + bias
        return torch.unflatten(out, 0, input1.shape[:-1])


def _recurrent(func: Any) -> Callable[..., Any]:
    recur = RECURRENT[func]

    def run(taps: Taps, *args: Any) -> Any:
        if len(args) != 9 or not isinstance(args[0], Tensor) or not taps.is_records(args[0]) or args[0].dim() != 3:
            return NotImplemented  # packed sequences
        return _layers(taps, recur, *args)

    return run


def _layers(
    taps: Taps, recur: Callable[..., Any], x: Tensor, start: Any, weights: Any, biases: bool, layers: int,
    dropout: float, training: bool, both: bool, batch_first: bool,
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
            states.append(_all(taps, value).movedim(1, 0).flatten(1, 2))  # (layers·sides, n·batch, width)
    last: list[list[Tensor]] = [[] for _ in starts]
    for layer in range(layers):
        sides = []
        for side in range(1 + both):
            k = layer * (1 + both) + side
            one = weights[each * k : each * (k + 1)]
            w_ih, w_hh, b_ih, b_hh = one if biases else (*one, None, None)
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
    taps: Taps, recur: Callable[..., Any], x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any,
    start: list[Tensor], count: int,
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
    second: Site | None = None
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


def _cell(recurrence: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        taps: Taps, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        h = hx if isinstance(hx, Tensor) else hx[0]
        with taps:
            return recurrence(F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh), hx)

    return run


def _lstm_cell(z: Tensor, u: Tensor, hx: Any) -> Any:
    i, f, g, o = (z + u).chunk(4, -1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(z: Tensor, u: Tensor, h: Tensor) -> Tensor:
    (zr, zk, zn), (ur, uk, un) = z.chunk(3, -1), u.chunk(3, -1)
    keep, fresh = (zk + uk).sigmoid(), (zn + (zr + ur).sigmoid() * un).tanh()
    return fresh + keep * (h - fresh)


_MATMUL = Operation(_matmul)
OPERATIONS |= {
    F.linear: Operation(_linear, always=True),
    torch.matmul: _MATMUL,
    torch.mm: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    Tensor.__rmatmul__: Operation(lambda taps, other, input: _matmul(taps, input, other)),
    Tensor.mm: _MATMUL,
    torch.addmm: Operation(_addmm),
    torch.einsum: Operation(_einsum),
    torch.conv1d: Operation(_convolution(1), always=True),
    torch.conv2d: Operation(_convolution(2), always=True),
    torch.conv3d: Operation(_convolution(3), always=True),
    F.max_pool2d: Operation(_max_pool2d, always=True),
    torch.max_pool2d: Operation(_max_pool2d, always=True),
    F.embedding: Operation(_embedding, always=True),
    F.embedding_bag: Operation(_embedding_bag, always=True),
    F.layer_norm: Operation(_layer_norm, always=True),
    F.rms_norm: Operation(_rms_norm, always=True),
    F.group_norm: Operation(_group_norm, always=True),
    F.instance_norm: Operation(_instance_norm, always=True),
    F.batch_norm: Operation(_batch_norm, always=True),
    F.scaled_dot_product_attention: Operation(_attention, always=True),
    F.multi_head_attention_forward: Operation(_multi_head_attention),
    F.dropout: Operation(_dropout, always=True),
    F.bilinear: Operation(_bilinear),
    torch.lstm: Operation(_recurrent(torch.lstm), always=True),
    torch.gru: Operation(_recurrent(torch.gru), always=True),
    torch.rnn_tanh: Operation(_recurrent(torch.rnn_tanh), always=True),
    torch.rnn_relu: Operation(_recurrent(torch.rnn_relu), always=True),
    torch.lstm_cell: Operation(_cell(_lstm_cell)),
    torch.gru_cell: Operation(_cell(_gru_cell)),
    torch.rnn_tanh_cell: Operation(_cell(lambda z, u, h: (z + u).tanh())),
    torch.rnn_relu_cell: Operation(_cell(lambda z, u, h: (z + u).relu())),
}
