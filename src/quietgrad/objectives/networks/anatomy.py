"""How to take a module apart: decided once, on two of its examples, and refused where privacy would break.

A module is planned as a set of units (layers with trainable parameters). Each unit gets a kernel, or the
per-module fallback; if some parameter is used outside its layer, or an axis of examples cannot be told, the
whole model falls back. Layers that mix examples have no per-example gradient and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from quietgrad.objectives.networks.layers import Kernel, kernel_for
from quietgrad.objectives.networks.tape import Batch, Unit, hooked, select, tensors_of

__all__ = ["plan_units"]

Axes = tuple[int | None, ...]
Trace = tuple[Unit, list[torch.Size], list[torch.Size]]  # input and output shapes of a call


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
        elif own and (own != set(below) or _owners_below(layer, slots)):
            return None
        elif own:
            units.append(Unit(name, layer, below, kernel_for(layer)))
    return units


def _owners_below(layer: nn.Module, slots: Mapping[nn.Parameter, slice]) -> bool:
    """Whether a layer inside this one has parameters too: its own, or this one's under another name."""
    return any(
        p in slots
        for part in layer.modules()
        if part is not layer
        for p in part._parameters.values()
        if p is not None
    )


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
