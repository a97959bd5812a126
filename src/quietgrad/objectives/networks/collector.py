"""One pass over a batch: run one or two points and gather what every layer contributes.

At two points the previous one runs first. What the current one needs of it is kept layer by layer, as its output
gradients arrive: per-example vectors where there is room, so that its tape is freed, or the layer's input and
output gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quietgrad.objectives.networks.anatomy import Plan
from quietgrad.objectives.networks.contributions import (
    Combination,
    Contribution,
    Record,
    Workspace,
    Written,
)
from quietgrad.objectives.networks.fallback import met_gradients, module_gradients
from quietgrad.objectives.networks.joint import Joint
from quietgrad.objectives.networks.meetings import Meetings
from quietgrad.objectives.networks.places import Place, parted
from quietgrad.objectives.networks.tape import (
    Batch,
    Call,
    LossFunction,
    Recording,
    Unit,
    batch_length,
    per_example_losses,
    tensors_of,
)

__all__ = ["Collector", "Network", "Piece"]

Piece = tuple[slice, Contribution]


class Network(NamedTuple):
    """A module with its loss, and the way from a flat vector to its parameters."""

    module: nn.Module
    loss_fn: LossFunction
    unflatten: Callable[[Tensor], dict[str, Tensor]]
    slices: Mapping[str, slice]


class Collector:
    """Runs one or two points and gathers the contributions of all layers."""

    def __init__(
        self,
        network: Network,
        plan: Plan,
        mix: Combination,
        space: Workspace,
        drawing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.network = network
        self.drawing = drawing  # entered anew at each point: both draw the same
        self.plan = plan
        self.mix = mix
        self.space = space
        self.pieces: list[Piece] = []
        self.no_space = Workspace(0.0, torch.empty(0, dtype=space.dtype))
        self.joint: dict[int, Joint] = {}
        self.uses: dict[int, int] = {}
        self.batch: set[int] = set()
        self.before: dict[tuple[Unit, int], Record | Written | dict[str, Tensor]] = {}

    def collect(self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch) -> list[Piece]:
        """Contributions of all parameters to the combination of g_i(θ) and g_i(θ′)."""
        if previous is not None:
            self._take(previous, x, y, self._remember)
        self._take(theta, x, y, self._receive)
        return self._gathered()

    def record(self, theta: Tensor, x: Batch) -> Recording:
        """A forward pass at one point, whose outputs' gradients are to be given to :meth:`finish`."""
        self.batch = {tensor.data_ptr() for tensor in tensors_of(x)}
        module = self.network.module
        return self._run(theta, x, lambda: module(*_args(x)), self._receive)

    def finish(self, recording: Recording, grads: Sequence[Tensor]) -> list[Piece]:
        """Contributions of all parameters to the gradient of ⟨grads_i, output_i⟩, example by example."""
        outputs = [tensor for tensor in tensors_of(recording.result) if tensor.is_floating_point()]
        recording.backward(outputs, grads)
        return self._gathered()

    def _gathered(self) -> list[Piece]:
        if self.before:
            unit, _ = next(iter(self.before))
            raise RuntimeError(
                f"layer {unit.name!r} was used at one of the two points only: the module's path depends on its "
                "parameters. Use PerExampleEngine(..., strategy='functional')."
            )
        return self.pieces

    def _take(
        self, point: Tensor, x: Batch, y: Batch, receive: Callable[[Call, Mapping[str, Tensor]], None]
    ) -> None:
        module, loss_fn = self.network.module, self.network.loss_fn
        self.batch = {tensor.data_ptr() for tensor in tensors_of((x, y))}
        self._run(point, x, lambda: per_example_losses(loss_fn, module(*_args(x)), x, y), receive, torch.ones_like)

    def _run(
        self,
        point: Tensor,
        x: Batch,
        run: Callable[[], Any],
        receive: Callable[[Call, Mapping[str, Tensor]], None],
        at_once: Callable[[Tensor], Tensor] | None = None,
    ) -> Recording:
        params = self.network.unflatten(point.detach())
        raw = {name: params[name].detach().requires_grad_() for name in self.plan.raw}
        params |= raw
        meetings = self.plan.meetings
        if not self.pieces and not self.before:
            self.space.reset(self.plan.written_out(self.mix.families) * batch_length(x))
        return Recording(
            self.network.module, params, batch_length(x), run, self.plan.layers,
            lambda call: receive(call, params), self._count, self.drawing,
            (lambda tape: Meetings(meetings, raw, tape)) if raw else nullcontext, at_once=at_once,
        )  # fmt: skip

    def _count(self, numbers: Mapping[Unit, int]) -> None:
        self.uses = {}
        for unit, number in numbers.items():
            for slot in unit.slots.values():
                self.uses[slot.start] = self.uses.get(slot.start, 0) + number

    def _remember(self, call: Call, params: Mapping[str, Tensor]) -> None:
        content: Record | Written | dict[str, Tensor] = self._content(call, params)
        # A layer that reads the batch itself sees the same input at both points: cheaper taken together.
        if isinstance(content, Record) and content.input.data_ptr() not in self.batch:
            assert call.unit.kernel is not None
            content = call.unit.kernel.remember(content, self.mix, self._space(call.unit), call.unit.slots)
        self.before[call.unit, call.number] = content

    def _receive(self, call: Call, params: Mapping[str, Tensor]) -> None:
        before = self.before.pop((call.unit, call.number)) if self.mix.change else None
        now = self._content(call, params)
        if isinstance(now, Record):
            assert call.unit.kernel is not None
            assert not isinstance(before, dict)
            kernel, wanted = call.unit.kernel, call.unit.slots
            for name, piece in kernel.contributions(now, before, self.mix, self._space(call.unit), wanted):
                self._put(call.unit.slots[name], piece)
            return
        for name, value in now.items():
            change = None
            if before is not None:
                assert isinstance(before, dict)
                change = torch.sub(value, before[name], alpha=self.mix.scale)
            self._put(call.unit.slots[name], self.mix.stored(value, change))

    def _content(self, call: Call, params: Mapping[str, Tensor]) -> Record | dict[str, Tensor]:
        """What the unit's gradient is made of: input and output gradient, or the fallback's gradients."""
        dtype = self.space.dtype
        unit = call.unit
        if unit.kernel is None:
            if unit.module is None:
                found = met_gradients(call, {name: params[name] for name in unit.slots})
            else:
                found = module_gradients(call, {name: self._own(params, slot) for name, slot in unit.slots.items()})
            return {k: v.to(dtype).reshape(len(v), -1) for k, v in found.items()}
        (grad,) = call.output_grads
        assert grad is not None
        given = call.args[0] if call.args else next(iter(call.kwargs.values()))
        given, grad = _in_front(given.detach(), unit.inputs[0], call), _in_front(grad, unit.outputs[0], call)
        return Record(given.to(dtype) if given.is_floating_point() else given, grad.to(dtype))

    def _own(self, params: Mapping[str, Tensor], slot: slice) -> Tensor:
        return next(params[name] for name, where in self.network.slices.items() if where == slot)

    def _put(self, slot: slice, piece: Contribution) -> None:
        if self.uses[slot.start] == 1:
            self.pieces.append((slot, piece))
            return
        # A parameter that is used several times: its vectors add up before they have a norm.
        if slot.start not in self.joint:
            self.joint[slot.start] = Joint(slot.stop - slot.start)
            self.pieces.append((slot, self.joint[slot.start]))
        self.joint[slot.start].add(piece)

    def _space(self, unit: Unit) -> Workspace:
        """Memory to write vectors out; none where several uses add up: their factors are kept."""
        several = any(self.uses[slot.start] > 1 for slot in unit.slots.values())
        return self.no_space if several else self.space


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x


def _in_front(value: Tensor, place: Place | None, call: Call) -> Tensor:
    """The examples' axis first; an example's k rows, if folded into it, are further positions."""
    assert place is not None
    if not place.folded:
        return value.movedim(place.axis, 0) if place.axis else value
    value, axis = parted(value, place, call.examples)
    assert axis is not None
    return value.movedim(axis, 0)
