"""The program of one record that a loop's step is made of, and the query that sums it.

While a loop's own code touches nothing, ``model(x)`` and ``criterion(output, y)`` compute nothing: they write down
what is to be computed. ``optimizer.step()`` then has a program of one record, as
:class:`~quietgrad.torch.PrivateLoop` has from the beginning, and the session's query runs it, clips and adds up.
Nothing of a record leaves before noise is added, so ε holds without a condition.

    Leaf        a tensor of the record
    Cast        a tensor in another type, or elsewhere
    ModelCall   the private model on such values, and on public ones
    Output      one of the tensors that the model returned
    Loss        the criterion on such values: one number
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.one_record import Pass
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import (
    Args,
    Called,
    Kwargs,
    Options,
    PyTree,
    mapped,
    outline,
    refilled,
    tensors_of,
)
from quietgrad.torch.networks.vectors import UnitAssignment


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the record, by its place among them."""

    place: int

    @property
    def key(self) -> Any:
        return self.place


@dataclass(frozen=True, eq=False)
class Public:
    """A tensor of the loop's own, the same for every record: each gets a copy to itself."""

    value: Tensor

    @property
    def key(self) -> Any:
        return "public", self.value.shape, self.value.dtype


@dataclass(frozen=True, eq=False)
class Cast:
    """A value in another type, or elsewhere."""

    of: Node
    func: Called
    args: Args
    kwargs: Kwargs

    @property
    def key(self) -> Any:
        return "cast", self.of.key, self.func, repr(self.args), repr(self.kwargs)


@dataclass(frozen=True, eq=False)
class ModelCall:
    """The model on these arguments, in which nodes stand in the places of tensors."""

    given: tuple[Args, Kwargs]
    nodes: Sequence[Node]

    @property
    def key(self) -> Any:
        return "call", _structure(self.given), tuple(node.key for node in self.nodes)


@dataclass(frozen=True, eq=False)
class Output:
    """A tensor that the model returned; ``squeezed``: the model left out the axis of the batch of one."""

    of: ModelCall
    place: int
    squeezed: bool = False

    @property
    def key(self) -> Any:
        return "output", self.of.key, self.place, self.squeezed


@dataclass(frozen=True, eq=False)
class Loss:
    """The criterion on these arguments."""

    criterion: Called
    given: tuple[Args, Kwargs]
    nodes: Sequence[Node]

    @property
    def key(self) -> Any:
        return "loss", id(self.criterion), _structure(self.given), tuple(node.key for node in self.nodes)


Node = Leaf | Public | Cast | Output | Loss


_HERE = torch.empty(0)


def without_tensors(given: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
    """Arguments with an empty tensor in the place of each: nodes are put there."""
    places: tuple[Args, Kwargs] = mapped(given, lambda _: _HERE)
    return places


def _structure(given: PyTree) -> str:
    """The form of arguments: words and switches by value, numbers by type, so that a counter is no new program."""

    def form(value: PyTree) -> Any:
        if isinstance(value, Mapping):
            return {key: outline(item, form) for key, item in value.items()}
        return value if isinstance(value, bool | str | None) else type(value).__name__

    return repr(outline(given, form))


class StepProgram:
    """The sum of the losses of one record on which a loop called ``backward()``, as a program of that record.

    What it is called with is ``(record, copies of the public tensors)``.
    """

    _program_attributes = ("losses", "module")

    def __init__(self, module: nn.Module, losses: Sequence[Node]) -> None:
        self.module, self.losses = module, [loss.criterion for loss in losses if isinstance(loss, Loss)]
        self._nodes = list(losses)
        public: dict[int, Public] = {}
        for node in losses:
            _find_public(node, public)
        self.public = list(public.values())
        self.key = tuple(node.key for node in losses)

    def follow(self, other: StepProgram) -> None:
        """Be the program of another step of the same form."""
        self.losses, self._nodes, self.public = other.losses, other._nodes, other.public

    def __call__(self, given: PyTree) -> Tensor:
        record, public = given
        values = _Values(self.module, tensors_of(record), dict(zip(map(id, self.public), public, strict=True)))
        total = values.of(self._nodes[0])
        for node in self._nodes[1:]:
            total = total + values.of(node)
        return total

    def groups(self, groups: Sequence[RecordGroup]) -> list[RecordGroup]:
        """Records, each with copies of the public tensors."""

        def copies(count: int) -> list[Tensor]:
            return [node.value.expand(count, *node.value.shape).clone() for node in self.public]

        return [RecordGroup(rows, (record, copies(len(rows)))) for rows, record in groups]


def _find_public(node: Node | ModelCall, public: dict[int, Public]) -> None:
    if isinstance(node, Public):
        public[id(node)] = node
    elif isinstance(node, ModelCall | Loss):
        for part in node.nodes:
            _find_public(part, public)
    elif isinstance(node, Cast | Output):
        _find_public(node.of, public)


class _Values:
    """Values of a program's nodes for one record. The model runs once for each call that the loop made."""

    def __init__(self, module: nn.Module, record: Sequence[Tensor], public: Mapping[int, Tensor]) -> None:
        self._module, self._record, self._public = module, record, public
        self._calls: dict[int, list[Tensor]] = {}

    def of(self, node: Node) -> Tensor:
        if isinstance(node, Leaf):
            return self._record[node.place]
        if isinstance(node, Public):
            return self._public[id(node)]
        if isinstance(node, Cast):
            cast: Tensor = node.func(self.of(node.of), *node.args, **node.kwargs)
            return cast
        if isinstance(node, Output):
            value = self._outputs(node.of)[node.place]
            return value.unsqueeze(0) if node.squeezed else value
        args, kwargs = refilled(node.given, map(self.of, node.nodes))
        return loss_of_one(node.criterion, args, kwargs)

    def _outputs(self, call: ModelCall) -> list[Tensor]:
        if id(call) not in self._calls:
            args, kwargs = refilled(call.given, map(self.of, call.nodes))
            self._calls[id(call)] = tensors_of(self._module(*args, **kwargs))
        return self._calls[id(call)]


def loss_of_one(criterion: Called, args: Args, kwargs: Kwargs) -> Tensor:
    """The criterion's one number for one record."""
    with _NoParameters():
        loss: Tensor = criterion(*args, **kwargs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise DataError("criterion: must give one number for one record; average or sum over its positions there.")
    return loss.reshape(())


class _NoParameters(TorchFunctionMode):
    """Refuses parameters in a criterion: their gradients would be neither clipped nor noisy."""

    def __torch_function__(self, func: Called, types: object, args: Args = (), kwargs: Options = None) -> Any:
        if any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            raise DataError(
                "criterion: uses trained parameters, whose gradients would be neither clipped nor noisy. Make them "
                "part of the module that is made private, or use the optimizer's weight_decay for a penalty."
            )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class ClosedPiece:
    """Records of a sample and the program that is run for each of them, at the parameters that the loop called."""

    keys: RecordSeeds
    units: UnitAssignment | None
    engine: PerExampleEngine
    program: StepProgram
    params: Tensor
    training: Sequence[bool]  # by layer, when the loop called the model

    def add(self, objective: ModuleObjective, batch: Batch, rule: ClippingRule, out: Tensor) -> None:
        """out += Σ of the records' clipped gradients."""
        self.engine.loss_of.follow(self.program)

        def read(part: RecordSeeds) -> list[RecordGroup]:
            return self.program.groups(batch.records.read(part))

        with _in_modes(self.engine.module, self.training):
            rows = np.asarray(self.keys.indices, np.int64)
            objective.add_rows(batch, rows, self.units, (self.params,), rule, out, engine=self.engine, read=read)


@dataclass(frozen=True, eq=False)
class RecordedPiece:
    """Records of a sample and the passes that a conditional loop has made of them, after the way back."""

    keys: RecordSeeds
    units: UnitAssignment | None
    engine: PerExampleEngine
    passes: Sequence[Pass]
    scale: float = 1.0  # undoes a factor of the loss

    def add(self, objective: ModuleObjective, batch: Batch, rule: ClippingRule, out: Tensor) -> None:
        """out += Σ of the records' clipped gradients."""
        count = len(self.keys.indices)
        if not self.passes or not count:
            return
        if self.scale == 1.0:
            self.engine.add_recorded(self.passes, count, self.units, rule, out)
            return
        # clip_C(s·v) = s·clip_{C/s}(v)
        total = torch.zeros_like(out)
        self.engine.add_recorded(
            self.passes, count, self.units, ClippingRule.gradient(rule.clip / self.scale), total
        )
        out += self.scale * total


@dataclass(frozen=True, eq=False)
class SampleQuery:
    """Σ clip_C(gᵢ) over a sample that a loop went through in one piece or in several.

    Gradients are clipped here, when the session asks. Each record is in one piece.
    """

    objective: ModuleObjective
    pieces: Sequence[ClosedPiece | RecordedPiece]
    rule: ClippingRule
    records: Any = field(repr=False)  # the examples: of people, their rows

    @property
    def bound(self) -> float:
        return self.rule.bound

    def dim(self, records: Any) -> int:
        return int(records.dim)

    def sum_into(self, objective: object, batch: Batch, out: Any) -> None:
        everyone = np.concatenate([piece.keys.indices for piece in self.pieces])
        if len(np.unique(everyone)) != len(everyone):
            raise BudgetError(
                "a record is in two pieces of one sample, and would count twice; nothing was released."
            )
        total = torch.as_tensor(out)  # of an array: its own memory
        for piece in self.pieces:
            piece.add(self.objective, batch._replace(records=self.records), self.rule, total)


@contextmanager
def _in_modes(module: nn.Module, training: Sequence[bool]) -> Iterator[None]:
    """Layers in training or evaluation mode as they were when the loop called the model."""
    layers = list(module.modules())
    now = [layer.training for layer in layers]
    try:
        for layer, mode in zip(layers, training, strict=True):
            layer.training = mode
        yield
    finally:
        for layer, mode in zip(layers, now, strict=True):
            layer.training = mode
