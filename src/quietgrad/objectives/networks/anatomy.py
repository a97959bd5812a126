"""How to take a module apart: decided once, on two of its examples, and refused where privacy would break.

A module is planned as a set of units (layers with trainable parameters). Each unit gets a kernel, or the
per-module fallback; if some parameter is used outside its layer, or an axis of examples cannot be told, the
whole model falls back. Layers that mix examples have no per-example gradient and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from quietgrad.objectives.networks.layers import Kernel, kernel_for
from quietgrad.objectives.networks.tape import Batch, Unit, hooked, select, tensors_of

__all__ = ["plan_units", "refuse_mixing_layers", "refuse_mixing_losses"]

Axes = tuple[int | None, ...]
Trace = tuple[Unit, list[torch.Size], list[torch.Size]]  # input and output shapes of a call


def refuse_mixing_layers(module: nn.Module) -> None:
    """Raise ValueError for a layer whose output for one example depends on the others."""
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise ValueError(
                f"{where} stores statistics of the data in its buffers, unprotected. "
                "Build it with track_running_stats=False."
            )
        if isinstance(layer, _BatchNorm) and not isinstance(layer, _InstanceNorm):
            raise ValueError(
                f"{where} mixes the examples of a batch, so no example has a gradient of its own. "
                f"Use torch.nn.GroupNorm(num_groups, {layer.num_features}) or LayerNorm instead."
            )
        if isinstance(layer, nn.Embedding) and layer.scale_grad_by_freq:
            raise ValueError(
                f"{where} scales gradients by how often a token occurs in the whole batch, which mixes "
                "examples. Build it with scale_grad_by_freq=False."
            )
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            raise ValueError(
                f"{where} rescales its weights during the forward pass (max_norm). Build it with "
                "max_norm=None and bound the rows in your optimiser if you need to."
            )


def refuse_mixing_losses(module: nn.Module, losses: Callable[[Batch, Batch], Tensor], x: Batch, y: Batch) -> None:
    """Raise ValueError if an example's loss changes when another example joins the batch."""
    pair = select(x, slice(0, 2)), select(y, slice(0, 2))
    training = [m for m in module.modules() if m.training]
    together = losses(*pair)
    try:
        if not torch.allclose(together, losses(*pair), equal_nan=True):
            module.eval()  # dropout: compare without it
            together = losses(*pair)
        alone = torch.cat([losses(select(x, part), select(y, part)) for part in (slice(0, 1), slice(1, 2))])
    finally:
        for layer in training:
            layer.training = True
    tolerance = 0.05 if together.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not torch.allclose(together, alone, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise ValueError(
            "the loss of an example changes when another example joins the batch: the module or loss_fn mixes "
            "examples (batch statistics, a division by the batch size, a comparison between examples), so no "
            "example has a gradient of its own. Make each example's loss depend on that example alone."
        )


def plan_units(
    module: nn.Module,
    slots: Mapping[nn.Parameter, slice],
    params: Mapping[str, Tensor],
    slices: Mapping[str, slice],
    x: Batch,
) -> list[Unit] | None:
    """The units of the module, or None if only whole-model gradients are sure to be right."""
    units = _units(module, slots)
    if units is None:
        return None
    owners = {id(t): [u for u in units if slices[name] in u.slots.values()] for name, t in params.items()}
    two, one = (_trace(module, params, select(x, slice(0, n)), units, owners) for n in (2, 1))
    if two is None or one is None or [unit for unit, *_ in two] != [unit for unit, *_ in one]:
        return None
    axes: dict[Unit, tuple[Axes, Axes]] = {}
    for (unit, inputs_two, outputs_two), (_, inputs_one, outputs_one) in zip(two, one, strict=True):
        inputs, outputs = _example_axes(inputs_two, inputs_one), _example_axes(outputs_two, outputs_one)
        if inputs is None or outputs is None or axes.setdefault(unit, (inputs, outputs)) != (inputs, outputs):
            return None
        if unit.kernel is not None and not _kernel_fits(unit.kernel, inputs, outputs):
            return None
        unit.input_dims, unit.output_dims = inputs, outputs
    return units


def _kernel_fits(kernel: Kernel, inputs: Axes, outputs: Axes) -> bool:
    if len(inputs) != 1 or inputs != outputs or inputs[0] is None:
        return False
    return inputs[0] == 0 or kernel.any_batch_dim


def _example_axes(two: Sequence[torch.Size], one: Sequence[torch.Size]) -> Axes | None:
    """Which axis of each tensor counts examples: the one that is 2 long for two examples and 1 for one."""
    if [len(a) for a in two] != [len(b) for b in one]:
        return None
    axes: list[int | None] = []
    for a, b in zip(two, one, strict=True):
        grown = [axis for axis, sizes in enumerate(zip(a, b, strict=True)) if sizes[0] != sizes[1]]
        if len(grown) > 1 or any((a[axis], b[axis]) != (2, 1) for axis in grown):
            return None
        axes.append(grown[0] if grown else None)
    return tuple(axes)


def _units(module: nn.Module, slots: Mapping[nn.Parameter, slice]) -> list[Unit] | None:
    units: list[Unit] = []
    inside: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if layer in inside:
            continue
        below = {key: slots[p] for key, p in layer.named_parameters() if p in slots}
        own = {key for key, p in layer.named_parameters(recurse=False) if p in slots}
        if isinstance(layer, nn.MultiheadAttention) and below:
            # Its output projection is a submodule that is used by weight, never called.
            inside.update(layer.modules())
            units.append(Unit(name, layer, below, None))
        elif own and own != set(below):
            return None
        elif own:
            units.append(Unit(name, layer, below, kernel_for(layer)))
    return units


def _trace(
    module: nn.Module,
    params: Mapping[str, Tensor],
    x: Batch,
    units: Sequence[Unit],
    owners: Mapping[int, Sequence[Unit]],
) -> list[Trace] | None:
    """Every call of a unit in one forward pass, or None if the units do not tell the whole story."""
    trace: list[Trace] = []
    inputs: list[tuple[list[Tensor], list[int]]] = []
    watch = _ParameterWatch(owners)
    random = False

    def enter(unit: Unit, args: Any, kwargs: Any) -> None:
        watch.active.append(unit)
        watch.generator = torch.get_rng_state()

    def leave(unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal random
        watch.active.pop()
        # A layer that draws random numbers cannot be run again by the per-module fallback.
        random |= unit.kernel is None and not torch.equal(watch.generator, torch.get_rng_state())
        given, made = tensors_of((args, kwargs)), tensors_of(output)
        inputs.append((given, [t._version for t in given]))
        trace.append((unit, [t.shape for t in given], [t.shape for t in made]))

    with torch.enable_grad(), hooked(units, enter, leave), watch:
        functional_call(module, dict(params), (x,) if isinstance(x, Tensor) else x)
    overwritten = any([t._version for t in given] != versions for given, versions in inputs)
    return None if watch.strayed or random or overwritten else trace


class _ParameterWatch(TorchFunctionMode):
    """Notices a parameter that is used outside the layer that owns it (tied by hand, raw, or re-shaped)."""

    def __init__(self, owners: Mapping[int, Sequence[Unit]]) -> None:
        super().__init__()
        self.owners = owners
        self.active: list[Unit] = []
        self.generator = torch.empty(0)
        self.strayed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if tensors_of(result):  # asking for a shape or a device is no use of the values
            for tensor in tensors_of((args, kwargs)):
                owners = self.owners.get(id(tensor))
                if owners is not None and not (self.active and self.active[-1] in owners):
                    self.strayed = True
        return result
