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

from quietgrad.objectives.networks.layers import Kernel
from quietgrad.objectives.networks.places import Place, refuse_other_rows

__all__ = [
    "Batch",
    "Call",
    "LossFunction",
    "Recording",
    "Tape",
    "Unit",
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


class Unit:
    """Trainable parameters that meet the examples in one way: where they lie in the flat vector, who computes them.

    A layer (``module``), or an operation that uses parameters outside of one (``module`` is None).
    """

    def __init__(
        self, name: str, module: nn.Module | None, slots: Mapping[str, slice], kernel: Kernel | None, why: str = ""
    ) -> None:
        self.name = name
        self.module = module
        self.slots = slots
        self.kernel = kernel
        self.why = why  # it has no kernel
        self.inputs: tuple[Place | None, ...] = (Place(0),)
        self.outputs: tuple[Place | None, ...] = (Place(0),)


class Call:
    """One call of a unit in the forward pass, with the output gradients as they arrive.

    ``shared`` is for a unit that is an operation: the tensor made of parameters alone which met the examples there.
    Its one "output gradient" is that of the tensor's copy for each example, (examples, *shape).
    """

    def __init__(
        self, unit: Unit, number: int, examples: int, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int,
        shared: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.unit = unit
        self.number = number
        self.examples = examples
        self.args = args
        self.kwargs = kwargs
        self.shared = shared
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


_root: Callable[[Tensor, Tensor], Tensor] = _Root.apply


class Tape:
    """What one forward pass has called, and who is told when gradients arrive."""

    def __init__(self, examples: int, like: Tensor, receive: Callable[[Call], None]) -> None:
        self.examples = examples
        self.anchor = torch.zeros((), device=like.device, dtype=like.dtype, requires_grad=True)
        self.receive = receive
        self.numbers: Counter[Unit] = Counter()
        self.late: list[Call] = []  # received after the backward pass, when all their outputs' gradients are there
        self.copies: list[tuple[Call, Tensor, Callable[[Tensor], Tensor]]] = []
        self.forward = True

    def leave(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A unit was called."""
        outputs: list[Any] = tensors_of(output)
        if not self.forward:  # a checkpointed layer runs again on the way back: gradients come to the first call
            for tensor in outputs:
                if tensor.is_floating_point() and not tensor.requires_grad and torch.is_grad_enabled():
                    _root(tensor, self.anchor)
            return
        refuse_other_rows(unit.name, tensors_of((args, kwargs)), unit.inputs, self.examples)
        refuse_other_rows(unit.name, outputs, unit.outputs, self.examples)
        call = self._call(unit, args, kwargs, len(outputs))
        if unit.kernel is None:
            self.late.append(call)
        for place, tensor in enumerate(outputs):
            if not tensor.is_floating_point():
                continue
            if not tensor.requires_grad:
                _root(tensor, self.anchor)  # in place: the caller holds the same object
            tensor.register_hook(_arrival(call, place, self.receive))

    def copied(
        self, unit: Unit, args: tuple[Any, ...], shared: Tensor, copy: Tensor, rows: Callable[[Tensor], Tensor]
    ) -> None:
        """A tensor made of parameters was copied for each example; ``rows`` brings its gradient in their order."""
        self.copies.append((self._call(unit, args, {}, 1, shared), copy, rows))

    def _call(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int, shared: Tensor | None = None
    ) -> Call:
        call = Call(unit, self.numbers[unit], self.examples, args, kwargs, outputs, shared)
        self.numbers[unit] += 1
        return call

    def backward(self, results: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Send gradients back, and receive what is still to be received."""
        live = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
        if live:
            copies = [copy for _, copy, _ in self.copies]
            _, *found = torch.autograd.grad(
                [result for result, _ in live],
                [self.anchor, *copies],
                [grad for _, grad in live],
                allow_unused=True,
            )
            for (call, _, rows), grad in zip(self.copies, found, strict=True):
                if grad is not None:
                    call.output_grads[0] = rows(grad)
                    self.late.append(call)
        self.copies.clear()
        with torch.no_grad():
            while self.late:
                call = self.late.pop()
                if any(grad is not None for grad in call.output_grads):
                    self.receive(call)


@contextmanager
def hooked(units: Sequence[Unit], enter: Callable[..., Any] | None, leave: Callable[..., Any]) -> Iterator[None]:
    """Call enter(unit, args, kwargs) and leave(unit, args, kwargs, output) around every call of a unit."""
    handles = []
    try:
        for unit in units:
            if unit.module is None:
                continue
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


class Recording:
    """A forward pass whose gradients are taken apart on the way back.

    `receive` gets every call of a kernel unit once its output gradient is known; calls of units without a kernel
    after the backward pass, when all their outputs' gradients have arrived. `counted` is told after the forward
    pass how often each unit was called. `drawing` is the context in which it draws, `meeting` the one
    in which parameters meet examples outside of layers.

    Args:
        run: the forward pass; what it returns is the ``result``.
        at_once: the gradient of the result, a tensor, if it is to be sent back right away.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        examples: int,
        run: Callable[[], Any],
        units: Sequence[Unit],
        receive: Callable[[Call], None],
        counted: Callable[[Mapping[Unit, int]], None],
        drawing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        meeting: Callable[[Tape], AbstractContextManager[Any]] = nullcontext,
        at_once: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._module, self._params, self._units = module, params, units
        self._tape = Tape(examples, next(iter(params.values())), receive)
        with self._running():
            with drawing(), meeting(self._tape):
                self.result = run()
            self._tape.forward = False
            counted(self._tape.numbers)
            if at_once is not None:
                self._tape.backward([self.result], [at_once(self.result)])

    def backward(self, results: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Send the gradients of some results back; once."""
        with self._running():  # a checkpointed layer runs again
            self._tape.backward(results, grads)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with (
            torch.enable_grad(),
            hooked(self._units, None, self._tape.leave),
            with_parameters(self._module, self._params),
        ):
            yield


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
    """The module with other parameters, also while gradients flow back: a checkpointed layer runs again then.

    One that several layers hold is replaced in all of them. `torch.func.functional_call` does the same, and more,
    at the price of a small layer.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    unknown = params.keys() - set(names.values())
    if unknown:
        raise ValueError(f"the module has no parameter {min(unknown)!r}.")
    held = [
        (layer._parameters, key, param, params[names[id(param)]])
        for layer in module.modules()
        for key, param in layer._parameters.items()
        if param is not None and names[id(param)] in params
    ]
    try:
        for store, key, _, other in held:
            store[key] = other  # type: ignore[assignment]
        yield
    finally:
        for store, key, own, _ in held:
            store[key] = own


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], Tensor):
        return [value[0]]  # what most layers are given
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
