"""Operations that taps understand: how each is done for all records at once, and the kernel of its parameters.

An operation is given as the program sees it, for one record; what its tensors hold of all records has the records
in front, (n, …). Work is done on the latter. Whatever is not here, or is called in another way, is left to vmap
with a copy of its parameters for each record.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.torch.networks import compiled_sums
from quietgrad.torch.networks.kernels import Kernel, convolution_kernel, embedding_kernel, linear_kernel
from quietgrad.torch.networks.recurrent import RECURRENT_LAYERS, lstm_cell
from quietgrad.torch.networks.taps import OPERATIONS, Operation, Taps
from quietgrad.torch.networks.trees import replaced

MaybeTensor = Tensor | None
Sizes = int | Sequence[int]  # the same for every axis, or one for each


def _linear(taps: Taps, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias) or weight.dim() != 2:
        return NotImplemented
    rows = taps.rows(input)
    with taps.outside():
        # As one matrix: of more axes torch returns a view, which a tap would have to copy.
        out = F.linear(rows.reshape(-1, rows.shape[-1]), taps.plain(weight), taps.plain(bias))
        out = _shaped(out, (*rows.shape[:-1], len(weight)))
        if taps.is_shared(weight) or taps.is_shared(bias):
            site = taps.use("linear", linear_kernel(*weight.shape), rows, {"weight": weight, "bias": bias})
            out = taps.tap(out, site)
    return taps.logical(out)


def _shaped(out: Tensor, shape: Sequence[int]) -> Tensor:
    """The result of an operation that no other object holds, in another shape, and not as a view of itself.

    Where a program writes into a view (an in-place ReLU), autograd copies the whole three times on the way back.
    """
    shaped: Tensor = torch.ops.aten._unsafe_view(out, shape)
    return shaped


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
    with taps.outside():
        flat = rows.reshape(-1, inputs)
        out = flat @ taps.plain(weight) if bias is None else torch.addmm(taps.plain(bias), flat, taps.plain(weight))
        out = taps.tap(_shaped(out, (*rows.shape[:-1], outputs)), site)
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


_MATRICES = 64  # of one parameter that are multiplied one by one


def _einsum(taps: Taps, equation: object, *operands: Any) -> Any:
    """A sum of products as one product with a matrix of parameters, if these lie in the matrix's order."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    shared = [taps.is_shared(value) for value in operands]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or sum(shared) != 1:
        return NotImplemented
    left, result = equation.replace(" ", "").split("->")
    terms, place = left.split(","), shared.index(True)
    own, weight = terms.pop(place), operands[place]
    others = [value for k, value in enumerate(operands) if k != place]
    seen, sizes = set("".join(terms)), dict(zip(own, weight.shape, strict=True))
    summed, free = ("".join(i for i in own if (i in seen) == inside) for inside in (True, False))
    once = all(len(set(term)) == len(term) for term in (own, *terms, result))
    indices = [
        pair for term, value in zip(terms, others, strict=True) for pair in zip(term, value.shape, strict=True)
    ]
    if any(sizes.get(index, size) != size for index, size in indices):
        return NotImplemented  # an axis of one is repeated
    if not once or not summed or set(summed) & set(result) or not set(free) <= set(result):
        return NotImplemented
    lead = "".join(index for index in result if index in seen)
    with taps:
        x = torch.einsum(f"{','.join(terms)}->{lead}{summed}", *others).flatten(len(lead))
        if own == free + summed:
            out = F.linear(x, weight.reshape(-1, x.shape[-1]))
        else:  # matrices one after the other, such as those of experts
            ahead = own.index(summed[0])
            if own[ahead:] != summed + free[ahead:]:
                return NotImplemented
            matrices = weight.reshape(-1, x.shape[-1], math.prod(weight.shape[ahead + len(summed) :]))
            if len(matrices) > _MATRICES:
                return NotImplemented
            out = torch.stack([x @ matrix for matrix in matrices.unbind()], -2)
            out = out.flatten(-2)
        out = out.reshape(*out.shape[:-1], *(sizes[index] for index in free))
        return out.permute([(lead + free).index(index) for index in result])


@lru_cache(maxsize=1024)
def _kernel_of(
    weight: tuple[int, ...], stride: Sizes, padding: Sizes | str, dilation: Sizes, groups: int
) -> Kernel:
    """The kernel of a convolution that is called in this way."""
    spatial = len(weight) - 2

    def each(value: Sizes) -> tuple[int, ...]:
        return (
            (int(value),) * spatial
            if isinstance(value, int)
            else tuple(int(v) for v in value) * (spatial if len(value) == 1 else 1)
        )

    steps, around = each(dilation), list[int]()  # as F.pad takes it: of the last axis first
    for axis in reversed(range(spatial)):
        if isinstance(padding, str):
            total = steps[axis] * (weight[2 + axis] - 1) if padding == "same" else 0
            around += [total // 2, total - total // 2]
        else:
            around += [each(padding)[axis]] * 2
    return convolution_kernel(weight, each(stride), tuple(around), steps, groups)


def _hashable(value: Sizes | str) -> Any:
    return value if isinstance(value, int | str) else tuple(value)


def _convolution(spatial: int) -> Callable[..., Any]:
    call = (torch.conv1d, torch.conv2d, torch.conv3d)[spatial - 1]

    def run(
        taps: Taps, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
        padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias):
            return NotImplemented
        rows, alone = taps.rows(input), input.dim() == spatial + 1
        images = 1 if alone else rows.shape[1]
        with taps.outside():
            folded = rows if alone else rows.flatten(0, 1)
            out = call(folded, taps.plain(weight), taps.plain(bias), stride, padding, dilation, groups)
            out = out if alone else _shaped(out, (len(rows), images, *out.shape[1:]))
            if taps.is_shared(weight) or taps.is_shared(bias):
                given = folded if images == 1 else rows
                made = _kernel_of(tuple(weight.shape), *map(_hashable, (stride, padding, dilation)), groups)
                site = taps.use(f"conv{spatial}d", made, given, {"weight": weight, "bias": bias})
                if images == 1 and not alone:
                    site.arrange = lambda grad: grad.flatten(0, 1)
                out = taps.tap(out, site)
        return taps.logical(out)

    return run


def _max_pool2d(
    taps: Taps, input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
    dilation: Sizes = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    steps = _pair(kernel_size if stride is None or stride == [] else stride)
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
        out = torch.unflatten(compiled_sums.max_pool(images, steps), 0, (-1, rows.shape[1]))
    return taps.logical(out)


def _pair(value: Sizes) -> tuple[int, int]:
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
    taps: Taps, input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Compute bags from the embeddings themselves. A bag is a sum or a mean over the rows it names."""
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
    taps: Taps, input: Tensor, normalized_shape: Sequence[int], weight: MaybeTensor = None,
    bias: MaybeTensor = None, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias):
        return NotImplemented
    rows = taps.rows(input)
    with taps.outside():
        shape = list(normalized_shape)
        out, mean, rstd = torch.native_layer_norm(rows, shape, taps.plain(weight), taps.plain(bias), eps)
        if taps.is_shared(weight) or taps.is_shared(bias):
            flat, still = (len(rows), -1, math.prod(shape)), rows.detach()

            def sums(grad: Tensor) -> Sequence[Tensor]:
                values = (still.reshape(flat), mean.reshape(len(rows), -1), rstd.reshape(len(rows), -1))
                return _scale_and_shift(grad.reshape(flat), *values, last=True)

            out = taps.tap(out, taps.affine("layer_norm", weight, bias, sums))
    return taps.logical(out)


def _group_norm(
    taps: Taps, input: Tensor, num_groups: int, weight: MaybeTensor = None, bias: MaybeTensor = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias) or input.dim() < 2:
        return NotImplemented
    rows = taps.rows(input)
    images, channels = rows.shape[1:3]
    with taps.outside():
        given = rows.flatten(0, 1)
        if given.dim() != 4 or not given.is_contiguous(memory_format=torch.channels_last):
            given = given.contiguous()
        positions = given[0, 0].numel()
        out, mean, rstd = torch.native_group_norm(
            given, taps.plain(weight), taps.plain(bias), len(given), channels, positions, num_groups, eps
        )
        out = _shaped(out, rows.shape)
        if taps.is_shared(weight) or taps.is_shared(bias):
            flat, still = (len(given), channels, positions), given.detach()

            def sums(grad: Tensor) -> Sequence[Tensor]:
                values = _scale_and_shift(grad.reshape(flat), still.reshape(flat), mean, rstd, last=False)
                return values if images == 1 else [each.view(-1, images, channels).sum(1) for each in values]

            out = taps.tap(out, taps.affine("group_norm", weight, bias, sums))
    return taps.logical(out)


def _scale_and_shift(grads: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor, *, last: bool) -> Sequence[Tensor]:
    """The examples' gradients by a norm's scale and shift; without compiled loops on accelerators."""
    if grads.device.type == "cpu" and grads.dtype == inputs.dtype == mean.dtype and not grads.requires_grad:
        return compiled_sums.scale_and_shift(grads, inputs, mean, rstd, last=last)
    if not last:
        each = inputs.shape[1] // mean.shape[1]
        mean, rstd = (value.repeat_interleave(each, 1) for value in (mean, rstd))
    centred = (inputs - mean.unsqueeze(2)) * rstd.unsqueeze(2)
    axis = 1 if last else 2
    return [(grads * centred).sum(axis), grads.sum(axis)]


def _norm(func: Callable[..., Tensor]) -> Callable[..., Any]:
    """A norm with a scale and a shift of its last axes, or of channels, which follow a record's images."""
    signature = inspect.signature(func)

    def run(taps: Taps, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        input, weight, bias = options.pop("input"), options["weight"], options.get("bias")
        last = len(options.get("normalized_shape", ()))
        if not taps.is_records(input) or taps.is_records(weight) or taps.is_records(bias):
            return NotImplemented
        # Batch norms are done with their own statistics alone, instance norms without any.
        fixed = options.get("running_mean") is not None
        if (not last and input.dim() < 2) or options.get("training") or fixed != (func is F.batch_norm):
            return NotImplemented
        if not options.get("use_input_stats", True):
            return NotImplemented

        def norm(x: Tensor, weight: MaybeTensor, bias: MaybeTensor) -> Tensor:
            own = {"weight": weight} | ({"bias": bias} if "bias" in options else {})
            return func(x, **{**options, **own})

        rows = taps.rows(input)
        given = rows if last else rows.flatten(0, 1)
        still = given.detach()

        def sums(grad: Tensor) -> list[Tensor]:
            grad = grad if last else grad.flatten(0, 1)
            both = [norm(still, None, None) * grad, grad]
            if last:
                flat = [each.flatten(-last) for each in both]
                return [each.flatten(1, -2).sum(1) if each.dim() > 2 else each for each in flat]
            return [each.reshape(-1, rows.shape[1], each.shape[1], each[0, 0].numel()).sum((1, 3)) for each in both]

        with taps.outside():
            out = norm(given, taps.plain(weight), taps.plain(bias))
            out = out if last else _shaped(out, rows.shape)
            if taps.is_shared(weight) or taps.is_shared(bias):
                out = taps.tap(out, taps.affine(func.__name__, weight, bias, sums))
        return taps.logical(out)

    return run


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
    parts = [taps.all_rows(part) for part in (query, key, value)]
    with taps.outside():
        lead = max(part.shape[1] for part in parts) if query.dim() == 4 else 0
        folded = [_folded(part, lead) for part in parts]
        mask = attn_mask
        if attn_mask is not None:
            mask = taps.all_rows(attn_mask)
            while mask.dim() < query.dim() + 1:
                mask = mask.unsqueeze(1)
            mask = _folded(mask, lead)
        q, k, v = folded
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        out = torch.unflatten(out, 0, (taps.count, lead)) if lead else out
    return taps.logical(out)


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
    """Run torch's attention with its projections seen one by one, as linear layers."""
    with replaced(F, {"has_torch_function": lambda *_: False}), taps:  # run, instead of shown as one operation
        return F.multi_head_attention_forward(*args, **kwargs)


def _bilinear(taps: Taps, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    with taps:
        out = torch.einsum("bi,oij,bj->bo", input1.flatten(0, -2), weight, input2.flatten(0, -2))
        out = out if bias is None else out + bias
        return torch.unflatten(out, 0, input1.shape[:-1])


_ALWAYS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    **{func: _norm(func) for func in (F.rms_norm, F.instance_norm, F.batch_norm)},
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    **RECURRENT_LAYERS,
}
_OF_PARAMETERS: dict[Any, Callable[..., Any]] = {
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: lambda taps, other, input: _matmul(taps, input, other),
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.einsum: _einsum,
    F.multi_head_attention_forward: _multi_head_attention,
    F.bilinear: _bilinear,
    torch.lstm_cell: lstm_cell,
}
OPERATIONS |= {func: Operation(handler, always=True) for func, handler in _ALWAYS.items()}
OPERATIONS |= {func: Operation(handler) for func, handler in _OF_PARAMETERS.items()}
