"""The tape: one forward and one backward pass that hand out each layer's input and output gradient.

The parameters are plain tensors without gradient, so the backward pass computes no weight gradients: it
stops at the layers' outputs, where a hook passes (a, b) on the moment b is known. Whoever receives them can
use and free them at once; nothing is kept for a second pass.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from quietgrad.objectives.networks.layers import Kernel

__all__ = [
    "Batch",
    "Call",
    "LossFunction",
    "Unit",
    "UnplannedRows",
    "backpropagate",
    "batch_length",
    "hooked",
    "mapped",
    "per_example_losses",
    "select",
    "tensors_of",
    "with_parameters",
]

Batch = Tensor | tuple[Tensor, ...]
LossFunction = Callable[[Any, Any], Tensor]


class UnplannedRows(RuntimeError):
    """A layer was called with other rows than one for each example."""


class Unit:
    """A layer with trainable parameters: where they lie in the flat vector, and who computes them."""

    def __init__(self, name: str, module: nn.Module, slots: Mapping[str, slice], kernel: Kernel | None) -> None:
        self.name = name
        self.module = module
        self.slots = slots
        self.kernel = kernel
        self.input_dims: tuple[int | None, ...] = (0,)
        self.output_dims: tuple[int | None, ...] = (0,)


class Call:
    """One call of a unit in the forward pass, with the output gradients as they arrive."""

    def __init__(self, unit: Unit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int):
        self.unit = unit
        self.number = number
        self.args = args
        self.kwargs = kwargs
        self.output_grads: list[Tensor | None] = [None] * outputs
        self._versions = [t._version for t in tensors_of((args, kwargs))]

    def unchanged(self) -> bool:
        """False if an in-place operation has overwritten an input since the call."""
        return self._versions == [t._version for t in tensors_of((self.args, self.kwargs))]


class _Root(torch.autograd.Function):
    """Give a tensor without history one, in place, so that later in-place operations stay legal."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def hooked(units: Sequence[Unit], enter: Callable[..., Any] | None, leave: Callable[..., Any]) -> Iterator[None]:
    """Call enter(unit, args, kwargs) and leave(unit, args, kwargs, output) around every call of a unit."""
    handles = []
    try:
        for unit in units:
            if enter is not None:
                handles.append(unit.module.register_forward_pre_hook(_bound(enter, unit), with_kwargs=True))
            # First in line: the layer's own output, before any hook of the user's replaces it.
            handles.append(unit.module.register_forward_hook(_bound(leave, unit), with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bound(function: Callable[..., Any], unit: Unit) -> Callable[..., Any]:
    return lambda module, *rest: function(unit, *rest)


def backpropagate(
    module: nn.Module,
    loss_fn: LossFunction,
    params: Mapping[str, Tensor],
    x: Batch,
    y: Batch,
    units: Sequence[Unit],
    receive: Callable[[Call], None],
    counted: Callable[[Mapping[Unit, int]], None] | None = None,
    drawing: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Run the module and give `receive` every call of a kernel unit once its output gradient is known.

    Calls of units without a kernel are received after the backward pass, when all their outputs' gradients
    have arrived. `counted` is told between the passes how often each unit was called. `drawing` is the context in
    which the forward pass draws random numbers. Returns the losses, one per example.
    """
    first = next(iter(params.values()))
    anchor = torch.zeros((), device=first.device, dtype=first.dtype, requires_grad=True)
    numbers: Counter[Unit] = Counter()
    calls: list[Call] = []
    examples = batch_length(x)
    forward = True

    root: Callable[[Tensor, Tensor], Tensor] = _Root.apply

    def leave(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        outputs: list[Any] = tensors_of(output)
        if not forward:  # a checkpointed layer runs again on the way back: its gradients come to the first call
            for tensor in outputs:
                if tensor.is_floating_point() and not tensor.requires_grad and torch.is_grad_enabled():
                    root(tensor, anchor)
            return None
        _refuse_other_rows(unit.name, tensors_of((args, kwargs)), unit.input_dims, examples)
        _refuse_other_rows(unit.name, outputs, unit.output_dims, examples)
        call = Call(unit, numbers[unit], args, kwargs, len(outputs))
        numbers[unit] += 1
        calls.append(call)
        for place, tensor in enumerate(outputs):
            if not tensor.is_floating_point():
                continue
            if not tensor.requires_grad:
                root(tensor, anchor)  # in place: the caller holds the same object
            tensor.register_hook(_arrival(call, place, receive))
        return None

    with torch.enable_grad(), hooked(units, None, leave), with_parameters(module, params):
        with drawing():
            losses = per_example_losses(loss_fn, module(*_args(x)), x, y)
        forward = False
        if counted is not None:
            counted(numbers)
        late = [call for call in calls if call.unit.kernel is None]
        calls.clear()  # from here on only the hooks hold the inputs, and they let go one by one
        if losses.requires_grad:
            torch.autograd.grad(losses.sum(), anchor, allow_unused=True)
    with torch.no_grad():
        for call in late:
            if any(grad is not None for grad in call.output_grads):
                receive(call)
    return losses.detach()


def _refuse_other_rows(name: str, tensors: Sequence[Tensor], axes: Sequence[int | None], examples: int) -> None:
    """Raise UnplannedRows unless there is a row for each example where the plan says so."""
    rows = [None if axis is None else tensor.shape[axis] for tensor, axis in zip(tensors, axes, strict=False)]
    if len(tensors) != len(axes) or any(count not in (None, examples) for count in rows):
        raise UnplannedRows(f"layer {name!r} was not called with one row for each of {examples} examples.")


def _arrival(call: Call, place: int, receive: Callable[[Call], None]) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        if not call.unchanged():
            raise RuntimeError(
                f"layer {call.unit.name!r}: its input was changed in place after the call. Use the "
                "out-of-place operation, or PerExampleEngine(..., strategy='functional')."
            )
        call.output_grads[place] = grad
        if call.unit.kernel is not None:
            receive(call)
            call.args, call.kwargs, call.output_grads = (), {}, []

    return hook


def per_example_losses(loss_fn: LossFunction, output: Any, x: Batch, y: Batch) -> Tensor:
    """loss_fn(output, y), refused unless it is one number per example."""
    losses = loss_fn(output, y)
    examples = batch_length(x)
    if losses.shape != (examples,):
        raise ValueError(
            f"loss_fn returned shape {tuple(losses.shape)} for {examples} examples: it must return one loss per "
            f"example, shape ({examples},). Do not average or sum over the batch (reduction='none'); average "
            "over an example's own positions if it has several."
        )
    return losses


@contextmanager
def with_parameters(module: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with other parameters, also while gradients flow back: a checkpointed layer runs again then."""
    with _reparametrize_module(module, dict(params), tie_weights=True):
        yield


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | UserDict):
        value = value.values()
    elif _is_dataclass(value):
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure, of the same types, with every tensor that :func:`tensors_of` finds changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict | UserDict):
        if type(value) is dict:
            return {key: mapped(item, change) for key, item in value.items()}
        filled = copy.copy(value)
        for key, item in value.items():
            filled[key] = mapped(item, change)
        for name, held in getattr(filled, "__dict__", {}).items():  # the same item, kept as an attribute as well
            if name in value and held is value[name]:
                filled.__dict__[name] = filled[name]
        return filled
    if _is_dataclass(value):
        new = {field.name: mapped(getattr(value, field.name, None), change) for field in dataclasses.fields(value)}
        filled = copy.copy(value)
        for name, item in new.items():
            object.__setattr__(filled, name, item)  # a frozen one too
        return filled
    if isinstance(value, tuple | list):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def batch_length(x: Batch) -> int:
    """Number of examples."""
    return len(x if isinstance(x, Tensor) else x[0])


def select(x: Batch, index: slice | Tensor) -> Batch:
    """Some of the examples."""
    return x[index] if isinstance(x, Tensor) else tuple(part[index] for part in x)


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
