"""Per-example gradients of anything: slower than the kernels, with nothing to assume.

`module_gradients`: one module without a kernel (attention, recurrent cells, your own layers) by
vmap(vjp) over its recorded inputs and output gradients. `model_gradients`: the whole model by vmap(grad). Where
vmap has no rule, examples are taken one by one (:func:`quietgrad.objectives.networks.checks.alone`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from quietgrad.objectives.networks.places import parted
from quietgrad.objectives.networks.tape import Batch, Call, LossFunction, mapped, tensors_of, with_parameters

__all__ = ["met_gradients", "model_gradients", "module_gradients", "refilled", "vmapping"]


def module_gradients(call: Call, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-example gradients (examples, *shape) of a unit's parameters, from one recorded call.

    The unit's plan says where the examples lie in each input and output (None: shared by all).
    """
    unit, examples = call.unit, call.examples
    module = unit.module
    assert module is not None
    parts = [parted(t.detach(), place, examples) for t, place in zip(_inputs(call), unit.inputs, strict=True)]
    present = [place for place, g in enumerate(call.output_grads) if g is not None]
    grads = [parted(g, unit.outputs[p], examples) for p, g in enumerate(call.output_grads) if g is not None]

    def one(inputs: list[Tensor], output_grads: list[Tensor]) -> dict[str, Tensor]:
        args, kwargs = refilled((call.args, call.kwargs), iter(inputs))

        def outputs(own: dict[str, Tensor]) -> tuple[Tensor, ...]:
            result = tensors_of(functional_call(module, own, args, kwargs))
            return tuple(result[place] for place in present)

        gradients: dict[str, Tensor] = vjp(outputs, dict(params))[1](tuple(output_grads))[0]
        return gradients

    with torch.enable_grad(), vmapping():
        result: dict[str, Tensor] = vmap(
            one, in_dims=([dim for _, dim in parts], [dim for _, dim in grads]), randomness="error"
        )([t for t, _ in parts], [g for g, _ in grads])
    return {name: value.detach() for name, value in result.items()}


def met_gradients(call: Call, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-example gradients (examples, *shape) of the parameters that a shared tensor was made of.

    v_i = Jᵀ b_i, with J the Jacobian of the tensor in its parameters; if it is one of them, nothing is to be done.
    """
    shared, (grads,) = call.shared, call.output_grads
    assert shared is not None
    assert grads is not None
    sources = dict(params)
    if len(sources) == 1 and (only := next(iter(sources))) and sources[only] is shared:
        return {only: grads}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        made = torch.autograd.grad(
            shared, list(sources.values()), grads.to(shared.dtype), retain_graph=True, allow_unused=True,
            is_grads_batched=True,
        )  # fmt: skip
    return {
        name: value.new_zeros((call.examples, *value.shape)) if gradient is None else gradient
        for (name, value), gradient in zip(sources.items(), made, strict=True)
    }


def _inputs(call: Call) -> list[Tensor]:
    return tensors_of((call.args, call.kwargs))


def model_gradients(
    module: nn.Module,
    loss_fn: LossFunction,
    unflatten: Callable[[Tensor], dict[str, Tensor]],
    theta: Tensor,
    x: Batch,
    y: Batch,
) -> Tensor:
    """Per-example gradients of the whole model as rows of a matrix (examples, dim), by vmap(grad)."""

    def loss(flat: Tensor, xi: Batch, yi: Batch) -> Tensor:
        xs = _unsqueezed(xi)
        args = (xs,) if isinstance(xs, Tensor) else xs
        with with_parameters(module, unflatten(flat)):  # the loss too: it may have a penalty
            return loss_fn(module(*args), _unsqueezed(yi)).sum()

    with vmapping():
        # "different": a draw then has one row per example, in front.
        rows: Tensor = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(theta, x, y)
    return rows.detach()


@contextmanager
def vmapping() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # the fused attention has no vmap rule
        warnings.filterwarnings("ignore", "There is a performance drop")  # what has none is slower, and right
        yield


def _unsqueezed(value: Batch) -> Batch:
    return value[None] if isinstance(value, Tensor) else tuple(part[None] for part in value)


def refilled(value: Any, tensors: Any) -> Any:
    """The same nested structure with its tensors replaced in order."""
    return mapped(value, lambda _: next(tensors))
