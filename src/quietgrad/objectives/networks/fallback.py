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

from quietgrad.objectives.networks.tape import Batch, Call, LossFunction, mapped, tensors_of, with_parameters

__all__ = ["model_gradients", "module_gradients", "refilled"]


def module_gradients(call: Call, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-example gradients (examples, *shape) of a unit's parameters, from one recorded call.

    The unit's plan says which axis of each input and output counts examples (None: shared by all).
    """
    unit = call.unit
    tensors = [t.detach() for t in tensors_of((call.args, call.kwargs))]
    grads = [
        (torch.zeros((), device=tensors[0].device) if g is None else g, None if g is None else dim)
        for g, dim in zip(call.output_grads, unit.output_dims, strict=True)
    ]
    present = [place for place, g in enumerate(call.output_grads) if g is not None]

    def one(inputs: list[Tensor], output_grads: list[Tensor]) -> dict[str, Tensor]:
        alone = iter(
            value if dim is None else value.unsqueeze(dim)
            for value, dim in zip(inputs, unit.input_dims, strict=True)
        )
        args, kwargs = refilled((call.args, call.kwargs), alone)

        def outputs(own: dict[str, Tensor]) -> tuple[Tensor, ...]:
            result = tensors_of(functional_call(unit.module, own, args, kwargs))
            return tuple(_squeezed(result[place], unit.output_dims[place]) for place in present)

        gradients: dict[str, Tensor] = vjp(outputs, dict(params))[1](tuple(output_grads))[0]
        return gradients

    with torch.enable_grad(), _vmapping():
        result: dict[str, Tensor] = vmap(
            one, in_dims=(list(unit.input_dims), [grads[p][1] for p in present]), randomness="error"
        )(tensors, [grads[p][0] for p in present])
    return {name: value.detach() for name, value in result.items()}


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

    with _vmapping():
        # "different": a draw then has one row per example, in front.
        rows: Tensor = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(theta, x, y)
    return rows.detach()


@contextmanager
def _vmapping() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # the fused attention has no vmap rule
        warnings.filterwarnings("ignore", "There is a performance drop")  # what has none is slower, and right
        yield


def _unsqueezed(value: Batch) -> Batch:
    return value[None] if isinstance(value, Tensor) else tuple(part[None] for part in value)


def _squeezed(value: Tensor, dim: int | None) -> Tensor:
    return value if dim is None else value.squeeze(dim)


def refilled(value: Any, tensors: Any) -> Any:
    """The same nested structure with its tensors replaced in order."""
    return mapped(value, lambda _: next(tensors))
