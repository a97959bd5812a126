"""What is refused before a budget is touched: tried out on made-up examples, by the definition.

An example's gradient must be its own. Three questions are asked of a module and its loss, in the mode (training or
not) that it will be asked in: does an example's loss or gradient move when *another* example is exchanged (mixing)?
does a forward pass write into a buffer? are the engine's sums those of autograd, one example at a time? What cannot
be seen is what happens on real records only: docs/torch-proof.md says what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.errors import DataError
from quietgrad.objectives.networks.randomness import RecordDraws, UnplannedDraw, preserved, seed_generators
from quietgrad.objectives.networks.tape import (
    Batch,
    LossFunction,
    batch_length,
    per_example_losses,
    select,
    tensors_of,
    with_parameters,
)

__all__ = [
    "MadeUp",
    "alone",
    "coarsest",
    "examples_that_fit",
    "made_up",
    "mixing_layers",
    "refuse_crowd",
    "refuse_autocast",
    "refuse_changed_buffers",
    "refuse_mixing",
    "refuse_mixing_layers",
    "refuse_other_losses",
    "refuse_other_types",
    "refuse_unusable_modules",
]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_EXAMPLES, _CROWD = 16, 300
_MEMORY = 1 << 26  # bytes of activations that a trial may keep
_ENORMOUS = 1e12
_FAILS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def refuse_unusable_modules(module: nn.Module) -> None:
    """Raise ValueError for a module whose layers cannot be reached or have no values."""
    for name, layer in module.named_modules():
        where = f"layer {name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ValueError(f"{where} was compiled by torch.jit, which hides its layers: give the Python module.")
        if hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None:
            raise ValueError(
                f"{where} was compiled by torch.compile, which fuses the layers whose inputs and gradients are "
                "needed here. Give the module it was made of (compiled._orig_mod)."
            )
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{where} is {type(layer).__name__}, which sums gradients before they are clipped: give the module "
                "inside it, and use qt.fit under torchrun for several processes."
            )
    spans: list[tuple[int, int, str]] = []
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the module once on an example first.")
        if param.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values: load the module first.")
        if param.is_complex():
            raise ValueError(f"parameter {name!r} is complex: hold its real and imaginary part as two parameters.")
        if param.is_contiguous() and param.numel():
            start = param.data_ptr()
            spans.append((start, start + param.numel() * param.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters {first!r} and {second!r} share memory without being one parameter: each would be "
                "trained as if the other stood still. Register one nn.Parameter under both names."
            )


def refuse_autocast(device: torch.device) -> None:
    """Raise ValueError within autocast."""
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            "autocast would compute the norms that decide the clipping in half precision: leave it, or give "
            "a module in bfloat16."
        )


def refuse_other_types(module: nn.Module, args: tuple[Tensor, ...], error: Exception) -> None:
    """Raise DataError if the module failed on these inputs only because their type is not its parameters'."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None or all(arg.dtype == first.dtype for arg in args):
        return
    for numbers in (False, True):  # tokens stay whole numbers, if that will do
        try:
            with preserved(), torch.no_grad():
                module(*(arg.to(first.dtype) if numbers or arg.is_floating_point() else arg for arg in args))
            break
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
    else:
        return
    given = ", ".join(str(arg.dtype).removeprefix("torch.") for arg in args)
    wanted = str(first.dtype).removeprefix("torch.")
    raise DataError(
        f"the inputs are {given} and the module computes with {wanted}: give inputs of that type "
        f"(X.to(torch.{wanted})), or convert the module."
    ) from error


def refuse_mixing_layers(module: nn.Module) -> None:
    """Raise ValueError for a layer whose output for one example depends on the others."""
    for error in mixing_layers(module):
        raise error


def mixing_layers(module: nn.Module) -> Iterator[ValueError]:
    """What is to be said of each layer whose output for one example depends on the others."""
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        power_iteration = isinstance(layer, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()
        )
        if power_iteration and layer.training:
            yield ValueError(
                f"{where} is or has a spectral_norm, whose buffers follow the weights: every pass in training mode "
                "is a step of its power iteration, so that what an example contributes would depend on how many "
                "passes there were before. Put the layer into evaluation mode after model.train(), which keeps "
                "its singular vectors as they are, or use weight_norm."
            )
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats and layer.training:
            yield ValueError(
                f"{where} stores statistics of the data in its buffers, unprotected. "
                "Build it with track_running_stats=False."
            )
        # In evaluation mode it is a fixed affine map of each example: a frozen backbone may keep it.
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            yield ValueError(
                f"{where} mixes the examples of a batch, so no example has a gradient of its own. "
                f"Use torch.nn.GroupNorm(num_groups, {layer.num_features}) or LayerNorm instead; with fixed "
                "statistics put this layer into evaluation mode after model.train()."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            yield ValueError(
                f"{where} scales gradients by how often a token occurs in the whole batch, which mixes "
                "examples. Build it with scale_grad_by_freq=False."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            yield ValueError(
                f"{where} rescales its weights during the forward pass (max_norm). Build it with "
                "max_norm=None and bound the rows in your optimiser if you need to."
            )


def _enormous(rows: Tensor) -> float:
    return min(_ENORMOUS, torch.finfo(rows.dtype).max / 16)


def _wide(rows: Tensor) -> Tensor:
    sizes = 10.0 ** (4 * torch.rand(len(rows), *[1] * (rows.dim() - 1)) - 2)
    return torch.randn_like(rows) * sizes.to(rows)


# What examples are made of: both signs, sizes from nothing to enormous. A record may be so, and then the faintest
# mixing is a strong one.
_FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": torch.rand_like,
    "normal": torch.randn_like,
    "wide": _wide,
    "zero": torch.zeros_like,
    "up": lambda rows: _enormous(rows) * torch.rand_like(rows),
    "down": lambda rows: -_enormous(rows) * torch.rand_like(rows),
    "far": lambda rows: _enormous(rows) / 8 * torch.randn_like(rows).clamp(-8, 8),
}


def made_up(x: Batch, y: Batch, seed: int, count: int = 4) -> tuple[Batch, Batch]:
    """Examples of the shapes of ``x`` and ``y``: floats uniform in [0, 1), whole numbers of records.

    The whole numbers (tokens, classes) are those of the first, last and middle example; :class:`MadeUp` finds
    others that the module takes.
    """
    places = _places(x, count)

    def make(value: Tensor) -> Tensor:
        rows = value.detach()[places.to(value.device)]
        return torch.rand_like(rows) if rows.is_floating_point() else rows

    with preserved():
        seed_generators(seed)
        return _mapped(x, make), _mapped(y, make)


def _places(x: Batch, count: int) -> Tensor:
    last = batch_length(x) - 1
    return torch.tensor([0, last, last // 2, 0]).repeat(count // 4 + 1)[:count]


class MadeUp:
    """Examples of many kinds that a module takes.

    Which whole numbers it takes is found by trying: from wide ranges to those seen, each input for itself. On
    accelerators, where a wrong index ends the process, they stay between the smallest and largest seen.

    Args:
        x, y: a few examples, for their shapes and the whole numbers in them.
        run: the losses of some examples.
        sizes: numbers that a vocabulary or a set of classes may have.
    """

    def __init__(self, x: Batch, y: Batch, run: Callable[[Batch, Batch], Tensor], sizes: set[int]) -> None:
        self.x, self.y = x, y
        self.ranges: dict[int, tuple[int, int]] = {}
        tensors = tensors_of((x, y))
        finite = int(run(*self(0, _EXAMPLES, vary=False)).isfinite().sum())
        for place, tensor in enumerate(tensors):
            if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
                continue
            for bounds in _ranges(tensor, sizes):
                self.ranges[place] = bounds
                try:
                    with _Bounds():  # type: ignore[no-untyped-call]
                        for kind in ("zero", "up"):  # both ends
                            run(*self(0, _EXAMPLES, kind, parts=""))
                        losses = [run(*self(seed, _EXAMPLES)) for seed in (1, 2)]
                except _FAILS:
                    del self.ranges[place]
                    continue
                if min(int(each.isfinite().sum()) for each in losses) >= finite:
                    break
                del self.ranges[place]

    def __call__(
        self, seed: int, count: int, kind: str = "uniform", *, vary: bool = True, parts: str = "xy"
    ) -> tuple[Batch, Batch]:
        """``count`` examples; the floats of ``parts`` are of the given kind, others uniform."""
        places = _places(self.x, count)
        first = len(tensors_of(self.x))
        number = iter(range(len(tensors_of((self.x, self.y)))))

        def make(value: Tensor) -> Tensor:
            place = next(number)
            rows = value.detach()[places.to(value.device)]
            if rows.is_floating_point():
                return _FLOATS[kind if ("x" if place < first else "y") in parts else "uniform"](rows)
            if not vary:
                return rows
            if place not in self.ranges:
                return rows[torch.randperm(count).to(rows.device)]
            return _whole(rows, *self.ranges[place], kind)

        with preserved():
            seed_generators(seed)
            return _mapped(self.x, make), _mapped(self.y, make)

    def taken(self, seed: int, count: int, kind: str, use: Callable[[Batch, Batch], Any]) -> Any:
        """What ``use`` makes of examples of a kind, as varied as the module takes them; None if it takes none."""
        error: Exception | None = None
        for vary, parts in product((True, False), ("xy", "x", "y")):
            try:
                return use(*self(seed, count, kind, vary=vary, parts=parts))
            except _FAILS as failure:  # no numbers of this module's: indices, probabilities
                error = failure
        if kind == "uniform" and error is not None:
            raise error
        return None


class _Bounds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the classes that torch's CTC loss is given: it reads beyond its memory where there is none such."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ == "_ctc_loss":
            classes, targets = args[0].shape[-1], args[1]
            if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
                raise IndexError("a target of the CTC loss is no class.")
        return func(*args, **(kwargs or {}))


def _ranges(tensor: Tensor, sizes: set[int]) -> Iterator[tuple[int, int]]:
    """From the widest: what whole numbers may lie between, the upper end excluded."""
    if tensor.dtype == torch.bool:
        yield 0, 2
        return
    info = torch.iinfo(tensor.dtype)
    low, high = int(tensor.min()), int(tensor.max()) + 1
    if tensor.device.type == "cpu":
        yield max(info.min, -1000), min(info.max, 1000)
        for top in sorted({*sizes, 1000, 2 * _EXAMPLES, high}, reverse=True):
            if top >= high:
                yield from ((start, min(top, info.max)) for start in (0, 1) if start < top)
    yield low, high


def _whole(rows: Tensor, low: int, high: int, kind: str) -> Tensor:
    if kind == "zero":
        return torch.full_like(rows, low)
    if kind == "up":
        return torch.full_like(rows, high - 1)
    if rows.dim() == 1 and len(rows) <= high - low <= 1 << 20:  # all different, so that they have an order
        return (torch.randperm(high - low)[: len(rows)] + low).to(rows)
    return torch.randint(low, high, rows.shape).to(rows)


def examples_that_fit(
    module: nn.Module, loss_fn: LossFunction, params: Mapping[str, Tensor], x: Batch, y: Batch
) -> int:
    """How many examples a trial can keep the activations of."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    sizes = {value.data_ptr(): 0 for value in leaves.values()}

    def pack(value: Tensor) -> Tensor:
        sizes.setdefault(value.data_ptr(), value.numel() * value.element_size())
        return value

    counted = torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)
    with torch.enable_grad(), with_parameters(module, leaves), counted:
        per_example_losses(loss_fn, module(*_args(x)), x, y)
    return max(4, _MEMORY * batch_length(x) // max(1, sum(sizes.values())))


def alone(
    module: nn.Module,
    loss_fn: LossFunction,
    params: Mapping[str, Tensor],
    x: Batch,
    y: Batch,
    drawing: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The loss and the gradient of one example after the other, by plain autograd: the definition.

    ``drawing(i)`` is the context in which example i draws its random numbers.
    """
    for i in range(batch_length(x)):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
        part = slice(i, i + 1)
        with torch.enable_grad(), with_parameters(module, leaves), drawing(i) as draws:
            loss = per_example_losses(loss_fn, module(*_args(select(x, part))), select(x, part), select(y, part))
            made = draws.number if isinstance(draws, RecordDraws) else 0
            if loss.requires_grad:
                torch.autograd.backward(loss.sum())  # not autograd.grad: a re-entrant checkpoint does not stand it
            if isinstance(draws, RecordDraws) and draws.number != made:
                raise UnplannedDraw("a checkpointed layer draws again on the way back.")
        # Dense, whatever nn.Embedding(sparse=True) makes of it: noise is.
        yield (
            loss.detach(),
            {k: torch.zeros_like(v) if v.grad is None else v.grad.to_dense() for k, v in leaves.items()},
        )


def refuse_mixing(
    module: nn.Module, loss_fn: LossFunction, params: Mapping[str, Tensor], make: MadeUp, fit: int = _EXAMPLES
) -> None:
    """Raise ValueError if the loss or gradient of an example moves when the others are exchanged.

    Both sides draw the same random numbers, so a difference is one in the examples. It is compared with the size of
    what moves, however small losses are. The example is one of three kinds, the others one after another are of
    every kind.
    """
    count = min(_EXAMPLES, fit)
    for number, (kept, base) in enumerate(((0, "uniform"), (1, "normal"), (count - 1, "wide"))):

        def one(x: Batch, y: Batch, kept: int = kept, number: int = number) -> tuple[Batch, Batch, list[Tensor]]:
            with preserved():
                return x, y, _one_of(module, loss_fn, params, x, y, kept, number)

        found = make.taken(number, count, base, one)
        if found is None:
            continue
        x, y, here = found
        rest = [i for i in range(count) if i != kept]
        for k, kind in enumerate(_FLOATS):

            def exchanged(
                x_other: Batch, y_other: Batch, x: Batch = x, y: Batch = y, rest: list[int] = rest, one: Any = one
            ) -> list[Tensor]:
                result: list[Tensor] = one(_exchanged(x, x_other, rest), _exchanged(y, y_other, rest))[2]
                return result

            there = make.taken(100 * (number + 1) + k, count, kind, exchanged)
            if there is None:
                continue
            here_now = here
            if kind != "uniform" and not there[1].isfinite().all():
                here_now, there = (
                    here[:1],
                    there[:1],
                )  # 0 · inf or 0 · nan of the others, not a gradient
            if not all(_same(a, b) for a, b in zip(here_now, there, strict=True)):
                raise ValueError(
                    "the loss or gradient of an example changes when another example of the batch is exchanged: "
                    "the module or loss_fn mixes examples (batch statistics, a comparison between examples, "
                    "mixup), so no example has a gradient of its own. Make each example's loss depend on that "
                    "example alone."
                )


def refuse_crowd(losses: Callable[[Batch, Batch], Tensor], make: MadeUp, fit: int, precision: torch.dtype) -> None:
    """Raise ValueError if losses in a batch of several hundred are not those in small batches, in another order."""
    count = min(_CROWD, fit)
    if count <= _EXAMPLES:
        return
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))

    def both(x: Batch, y: Batch) -> tuple[Tensor, Tensor]:
        apart = torch.cat([losses(select(x, part), select(y, part)) for part in torch.split(order, _EXAMPLES)])
        return losses(x, y)[order.to(apart.device)], apart

    for kind in ("uniform", "normal"):
        found = make.taken(7, count, kind, both)
        if found is not None:
            refuse_other_losses(found[0], found[1], precision)


def refuse_other_losses(together: Tensor, apart: Tensor, precision: torch.dtype) -> None:
    """Raise ValueError unless losses in a batch are those of the examples in another.

    ``precision`` is that of the module: targets in float64 do not make the losses of one in float32 more precise.
    """
    rough = together.dtype == torch.float64 and precision != torch.float64
    tolerance = 1e-3 if rough else {torch.float64: 1e-8, torch.float32: 1e-3}.get(together.dtype, 5e-2)
    together, apart = together.double(), apart.double()
    finite = together.isfinite() & apart.isfinite()
    gap = (together - apart)[finite].norm()
    if not torch.equal(together.isfinite(), apart.isfinite()) or gap > tolerance * together[finite].norm():
        raise ValueError(
            "the loss of an example changes when another example joins the batch: the module or loss_fn mixes "
            "examples (batch statistics, a division by the batch size, a comparison between examples), so no "
            "example has a gradient of its own. Make each example's loss depend on that example alone."
        )


def coarsest(*tensors: Tensor) -> torch.dtype:
    """The lowest precision among them.

    >>> coarsest(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    torch.float32
    """
    return max((t.dtype for t in tensors if t.is_floating_point()), key=lambda dtype: torch.finfo(dtype).eps)


def _one_of(
    module: nn.Module,
    loss_fn: LossFunction,
    params: Mapping[str, Tensor],
    x: Batch,
    y: Batch,
    which: int,
    seed: int,
) -> list[Tensor]:
    """The loss and gradient of one example of a batch."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    seed_generators(seed)
    # The whole batch as if it were one record: what is drawn depends on nothing but its place.
    drawing = RecordDraws(np.array([seed], np.uint64), None, next(iter(leaves.values())).device)
    with torch.enable_grad(), with_parameters(module, leaves), drawing:
        losses = per_example_losses(loss_fn, module(*_args(x)), x, y)
        if losses.requires_grad:
            torch.autograd.backward(losses[which])
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense() for leaf in leaves.values()]
    return [losses[which].detach().reshape(1), torch.cat([g.flatten().to(losses.dtype) for g in grads])]


def _same(a: Tensor, b: Tensor) -> bool:
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    tolerance = _TOLERANCE.get(a.dtype, 1e-2)
    a, b = (t.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for t in (a, b))
    scale = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) <= tolerance * scale


def refuse_changed_buffers(module: nn.Module, run: Callable[[], Any]) -> None:
    """Run something; raise ValueError, with everything put back, if a buffer or frozen parameter has changed."""
    held = {**dict(module.named_buffers()), **{k: p for k, p in module.named_parameters() if not p.requires_grad}}
    before = {name: (value, value.detach().clone()) for name, value in held.items()}
    try:
        run()
        now = dict(module.named_buffers())
        changed = [
            name
            for name, (tensor, value) in before.items()
            if not torch.equal(tensor, value) or (name in now and not torch.equal(now[name], value))
        ]
        changed += [name for name in now if name not in before]
    finally:
        with torch.no_grad():
            for name, (tensor, value) in before.items():
                tensor.copy_(value)
                layer, _, last = name.rpartition(".")
                if last in (buffers := module.get_submodule(layer)._buffers):
                    buffers[last] = tensor
    if changed:
        raise ValueError(
            f"buffer {changed[0]!r} changes in the forward pass: statistics of the data would be in the "
            "state_dict without noise, and what one example contributes would depend on those before it. Remove "
            "the buffer, or put its layer into evaluation mode."
        )


def _exchanged(kept: Batch, other: Batch, rows: list[int]) -> Batch:
    """``kept`` with some rows from ``other``."""

    def change(value: Tensor, new: Tensor) -> Tensor:
        value = value.clone()
        value[rows] = new[rows]
        return value

    if isinstance(kept, Tensor):
        assert isinstance(other, Tensor)
        return change(kept, other)
    return tuple(change(a, b) for a, b in zip(kept, other, strict=True))


def _mapped(value: Batch, make: Callable[[Tensor], Tensor]) -> Batch:
    return make(value) if isinstance(value, Tensor) else tuple(make(part) for part in value)


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
