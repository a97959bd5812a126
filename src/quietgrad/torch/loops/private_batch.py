"""The records that a loop has in hand, and the handles that stand for their tensors.

A handle is a tensor that can be given to the private model and the private criterion. These write down what is to
be computed of each record (:mod:`~quietgrad.torch.loops.step_program`), and no record is read before the step.
Whatever else is done to a handle is done to the plain tensor of all rows, and the loop notes it first. From then on
its ε is conditional, because nothing checks what the loop's own code does with the rows, and passes are recorded.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from quietgrad.core.errors import BudgetError, DataError
from quietgrad.torch.loops.step_program import Cast, Leaf, Node, Public
from quietgrad.torch.networks.one_record import Pass
from quietgrad.torch.networks.patched_torch import full_precision
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import (
    Args,
    Called,
    Kwargs,
    Options,
    PyTree,
    applied,
    like,
    mapped,
    outline,
    parts_of,
    refilled,
    tensors_of,
)
from quietgrad.torch.networks.vectors import Rows, UnitAssignment

if TYPE_CHECKING:
    from quietgrad.torch.loops.handle_loop import HandleLoop


class RecordBlock(NamedTuple):
    """Records of one shape: their places in the sample, and their values (n, …), each as in a batch of one."""

    rows: Rows
    values: Tensor


class Call:
    """One forward pass of the private model over records of a sample."""

    def __init__(self, sample: Sample, rows: Rows) -> None:
        self.sample, self.rows = sample, rows
        self.passes: list[Pass] = []
        self._reached = False
        self._averaged: int | None = None

    @property
    def reached(self) -> bool:
        """Whether a gradient came back."""
        return self._reached

    def has_gradient(self) -> None:
        """Note that one came back: parameters have one from here on, which is released when it is read."""
        self._reached = True
        self.sample.loop.announce_gradients()

    @property
    def averaged(self) -> int:
        """Over how many records a loss of this call's outputs is a mean.

        Calls that wait together when a gradient comes back are parts of one loss: pieces that were put together
        again, or two calls on the same records. Each piece that is differentiated by itself has a mean of its own.
        """
        if self._averaged is not None:
            return self._averaged
        waiting = [self, *(call for call in self.sample.calls if call._averaged is None)]
        count = len(np.unique(np.concatenate([call.rows for call in waiting])))
        for call in waiting:
            call._averaged = count
        return count


class Sample:
    """The records in hand: a sample, or a piece of it that holds whole people.

    Where there is none, a conditional loop runs on one synthetic record, ``row_keys``, which is added to no sum.
    """

    def __init__(self, loop: HandleLoop, keys: RecordSeeds, units: UnitAssignment | None) -> None:
        self.loop, self.keys, self.units = loop, keys, units
        self.row_keys = keys if len(keys.indices) else RecordSeeds(keys.key, np.array([0]))
        self.losses: list[LossHandle] = []  # on which the loop called backward(), while it touched nothing
        self.calls: list[Call] = []  # forward passes that were made, once it has
        self._next = 0  # the first row of the next piece that the loop cuts itself
        self._groups: list[RecordGroup] | None = None

    def __len__(self) -> int:
        return len(self.keys.indices)

    def handles(self, form: PyTree) -> Any:
        """Return the structure of ``form``, a collated record, with a handle in the place of each tensor."""
        made = [
            Handle.written(self, Leaf(place), like, partial(self._column, place))
            for place, like in enumerate(tensors_of(form))
        ]
        return _tensors_alone(refilled(form, iter(made)))

    def _column(self, place: int) -> Handle:
        values = [RecordBlock(group.rows, tensors_of(group.record)[place]) for group in self.groups]
        return Handle.of(self, values)

    @property
    def groups(self) -> list[RecordGroup]:
        """The records themselves, read when a loop's own code wants to see them."""
        if self._groups is None:
            self._groups = self.loop.read(self)
            if len({repr(outline(group.record)) for group in self._groups}) > 1:
                raise DataError(
                    "collate_fn gives records of different structure: give all the same keys and parts."
                )
        return self._groups

    @property
    def _forms(self) -> set[torch.Size]:
        """Shapes of a row of its tensors."""
        values = [value for group in self.groups for value in tensors_of(group.record)]
        return {value.shape[2:] for value in values if value.dim() > 1}

    def nodes(self, tensors: Sequence[Tensor]) -> list[Node]:
        """Return the program nodes that stand for tensors given to the model or the criterion."""
        self.refuse_others(tensors)
        return [tensor._node if isinstance(tensor, Handle) else Public(tensor.detach()) for tensor in tensors]

    def refuse_others(self, tensors: Sequence[Tensor]) -> None:
        """Raise BudgetError for handles of another sample."""
        if any(isinstance(tensor, Handle) and tensor._sample is not self for tensor in tensors):
            raise BudgetError(
                "the private model was given another batch than the loader's last, or one that a step was made on: "
                "each step must use one fresh sample of the private loader, and only that."
            )

    def stacked(self, tensors: Sequence[Tensor]) -> tuple[Rows, list[list[RecordBlock]]]:
        """The rows that a call of a conditional loop is about, and each of its tensors cut into records."""
        self.refuse_others(tensors)
        rows = np.arange(len(self.row_keys.indices))
        if not any(isinstance(tensor, Handle) for tensor in tensors):
            rows = self._piece(tensors)
        places = [(len(tensors), place) for place in range(len(tensors))]
        return rows, [self._cut(tensor, rows, place) for tensor, place in zip(tensors, places, strict=True)]

    def _cut(self, leaf: Tensor, rows: Rows, place: tuple[int, int]) -> list[RecordBlock]:
        if isinstance(leaf, Handle):
            if leaf.untouched:
                return leaf.parts
            leaf = leaf.plain()
        count = len(rows)
        # Batches are on the first axis, or on the second as in a recurrent layer's states. What it was before
        # is it again: a public tensor does not become rows because a sample happens to have its length.
        known = self.loop.axes
        axis = known.get(place, 0)
        if axis is not None and (leaf.dim() <= axis or leaf.shape[axis] != count):
            axis = next((axis for axis, size in enumerate(leaf.shape) if size == count), None)
        known[place] = axis
        if axis is not None:
            return [RecordBlock(rows, leaf.movedim(axis, 0).unsqueeze(axis + 1))]
        return [RecordBlock(rows, leaf.expand(count, *leaf.shape))]  # every record's own copy of a public tensor

    def _piece(self, tensors: Sequence[Tensor]) -> Rows:
        """The rows that plain tensors are about: all of them, or the next ones."""
        count = len(self.row_keys.indices)
        if any(tensor.dim() and len(tensor) == count for tensor in tensors) or any(
            list(tensor.shape).count(count) == 1 and tensor.shape[1:] not in self._forms for tensor in tensors
        ):
            self._next = 0
            return np.arange(count)
        length = len(tensors[0]) if tensors and tensors[0].dim() else 0
        first, self._next = self._next, self._next + length
        if not 0 < length <= count - first:
            self._next = 0
            raise BudgetError(
                "the private model was given rows that cannot be matched to this batch's records: give "
                "it the batch whole, or in pieces one after the other (x.split(16)); wrap evaluations in "
                "model.eval() or torch.no_grad()."
            )
        self._next %= count
        return np.arange(first, first + length)


def _tensors_alone(value: PyTree, above: tuple[int, ...] = ()) -> Any:
    """The structure of a record, with ``None`` for what is no tensor: a record's own text is not handed out."""
    if isinstance(value, dict):
        return {key: _tensors_alone(item, above) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return like(value, [_tensors_alone(item, above) for item in value])
    if isinstance(value, UserDict):
        emptied = copy.copy(value)
        vars(emptied).update(dict.fromkeys(vars(emptied)))  # what a tokenizer keeps beside its data is text
        emptied.data = {key: _tensors_alone(item, above) for key, item in value.items()}
        return emptied
    if id(value) not in above and (parts := parts_of(value)) is not None:
        emptied = copy.copy(value)
        for name, item in parts.items():
            object.__setattr__(emptied, name, _tensors_alone(item, (*above, id(value))))
        return emptied
    return value if isinstance(value, Tensor) else None


def aligned(known: Sequence[list[RecordBlock]]) -> Iterator[tuple[Rows, list[Tensor]]]:
    """Groups of rows that are in one part of each value, with their values."""
    if all(len(parts) == 1 for parts in known):  # records of one shape, or none
        yield known[0][0].rows, [_taken(parts[0], known[0][0].rows) for parts in known]
        return
    rows = np.sort(np.concatenate([part.rows for part in known[0]]))
    labels = np.zeros((len(known), len(rows)), np.int64)
    for number, parts in enumerate(known):
        for label, part in enumerate(parts):
            labels[number, np.searchsorted(rows, part.rows)] = label
    kinds, which = np.unique(labels, axis=1, return_inverse=True)
    for kind in range(kinds.shape[1]):
        mine = rows[which.reshape(-1) == kind]
        yield mine, [_taken(parts[label], mine) for parts, label in zip(known, kinds[:, kind], strict=True)]


def _taken(part: RecordBlock, rows: Rows) -> Tensor:
    if np.array_equal(part.rows, rows):
        return part.values
    order = np.argsort(part.rows)
    places = order[np.searchsorted(part.rows[order], rows)]
    return part.values[torch.from_numpy(places).to(part.values.device)]


def together(parts: Sequence[RecordBlock], axis: int | None = None) -> Tensor:
    """One tensor of all rows in their order, records on the axis that is their batch of one."""
    values = [part.values for part in parts]
    if len({value.dim() for value in values}) > 1 or len({value.dtype for value in values}) > 1:
        raise DataError(_RAGGED)
    if values[0].dim() > 1 and axis is None:
        axis = one_axis(values[0])
    rows = np.concatenate([part.rows for part in parts])
    if len({value.shape[1:] for value in values}) == 1:
        whole = values[0] if len(values) == 1 else torch.cat(values)
        if not bool((np.diff(rows) > 0).all()):
            whole = whole[torch.from_numpy(np.argsort(rows)).to(whole.device)]
        return whole if axis is None else whole.movedim(0, axis).flatten(axis, axis + 1)
    each = [record for part in parts for record in part.values.unbind()]
    try:
        return torch.cat([each[place] for place in np.argsort(rows)], axis or 0)
    except RuntimeError:
        raise DataError(_RAGGED) from None


def one_axis(values: Tensor) -> int:
    """The axis of a record's value that is its batch of one: the first of size one, if there is any."""
    return next((axis for axis, size in enumerate(values.shape[1:]) if size == 1), 0)


_RAGGED = (
    "the records of this batch have several shapes, so there is no one tensor of them: give make_private pad= (a "
    "public length, or qt.Multiple), or hand the batch to the private model, and its output to the private "
    "criterion, as they are."
)


class Handle(Tensor):
    """Stands for one tensor of the records in hand, of a size that cannot be read.

    Either it is written down what it is of each record (``_node``), or a conditional loop has its values.
    """

    _sample: Sample
    _node: Node
    _form: Tensor  # of a synthetic record, (1, …): what is known without looking at records
    _compute: Callable[[], Handle] | None  # computes the values of what is written down
    _blocks: list[RecordBlock]
    _make: Callable[[], Tensor]
    _made: Tensor | None
    _made_version: int
    _made_grad: bool

    @classmethod
    def of(cls, sample: Sample, parts: list[RecordBlock], make: Callable[[], Tensor] | None = None) -> Self:
        """A handle of these values; ``make`` makes the plain tensor where that is not only to put them together."""
        new = cls._new(sample, parts[0].values)
        new._blocks, new._make, new._compute = parts, make or (lambda: together(parts)), None
        return new

    @classmethod
    def written(cls, sample: Sample, node: Node, form: Tensor, compute: Callable[[], Handle]) -> Self:
        """Build a handle for the value of ``node`` in each record. ``compute`` gives one with values."""
        new = cls._new(sample, form)
        new._node, new._compute = node, compute
        return new

    @classmethod
    def _new(cls, sample: Sample, form: Tensor) -> Self:
        new: Self = Tensor._make_wrapper_subclass(cls, (0,), dtype=form.dtype, device=form.device)
        new._sample, new._form, new._made = sample, form, None
        return new

    @property
    def parts(self) -> list[RecordBlock]:
        """The records' values, which only a conditional loop has."""
        if self._compute is not None:
            self._sample.loop.rest_on_code()
            computed, self._compute = self._compute(), None
            self._blocks, self._make, self._form = computed._blocks, computed._make, computed._form
        return self._blocks

    @property
    def untouched(self) -> bool:
        """Whether its records' values are still what they were handed out as."""
        made = self._made
        return made is None or (made._version == self._made_version and made.requires_grad == self._made_grad)

    def plain(self) -> Tensor:
        """The plain tensor, which the loop's own code may now do anything with."""
        made = self._made
        if made is None:
            self._sample.loop.rest_on_code()
            assert self.parts  # are computed, and how to put them together is known
            self._made = made = self._make()
            self._made_version, self._made_grad = made._version, made.requires_grad
        return made

    def _answer(self, func: Called, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call without reading records, or return ``NotImplemented``."""
        like = self._form if self._made is None else self._made
        if func in _QUESTIONS:
            return func(like)
        if func in _DIMENSIONS:
            return like.dim() - (self._made is None and not isinstance(self, LossHandle))
        alone = not any(isinstance(each, Handle) for each in tensors_of((args, kwargs)))
        if func in _CASTS and alone and self.untouched and not isinstance(self, LossHandle):
            return self._cast(func, args, kwargs)
        return NotImplemented

    def _cast(self, func: Called, args: Args, kwargs: Kwargs) -> Handle:
        """Each record's values in another type, or elsewhere: the handle itself if that changes nothing."""
        form = func(self._form, *args, **kwargs)
        if form is self._form:
            return self

        def cast() -> Handle:
            blocks = [RecordBlock(part.rows, func(part.values, *args, **kwargs)) for part in self.parts]
            return Handle.of(self._sample, blocks)

        if self._compute is None:
            return cast()
        return Handle.written(self._sample, Cast(self._node, func, args, kwargs), form, cast)

    @classmethod
    def __torch_function__(cls, func: Called, types: object, args: Args = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Handle):
            answer = args[0]._answer(func, args[1:], kwargs)
            if answer is not NotImplemented:
                return answer
        return func(*plain(args), **plain(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Called, types: object, args: Args = (), kwargs: Options = None
    ) -> Any:
        # Where torch does not ask the method above.
        return func(*plain(args), **plain(kwargs or {}))


class LossHandle(Handle):
    """The loss of all records in hand: one number, or one of each record."""

    def _answer(self, func: Called, args: Args, kwargs: Kwargs) -> Any:
        if func is _own.backward and self._form.dim() == 0:
            own = [*args, *(kwargs.get(name) for name in ("gradient", "inputs", "create_graph"))]
            plainly = not any(value is not None and value is not False for value in own)
            if self._compute is not None and self._form.requires_grad and plainly:
                self._sample.losses.append(self)
                self._sample.loop.announce_gradients()
                return None
            self.go_back(*plain(args), **plain(kwargs))
            return None
        if func in _SCALINGS and args in ((1,), (1.0,)) and not kwargs:  # a library's division by 1 step
            return self
        if func in _COPIES and not args and not kwargs:
            return self._copied(func)
        if func in _REDUCTIONS and self._form.dim() and not args and not kwargs:
            if self._compute is None:
                return reduced(self._sample, self.parts, _REDUCTIONS[func])
            return written_loss(self._sample, self._node, _REDUCTIONS[func], lambda: self.parts)
        return super()._answer(func, args, kwargs)

    def _copied(self, func: Called) -> LossHandle:
        """Copy the loss by ``func``. A loss that is not computed yet is copied when it is read."""

        def copied() -> LossHandle:
            parts = [RecordBlock(part.rows, func(part.values)) for part in self.parts]
            return LossHandle.of(self._sample, parts, lambda: func(self._make()))

        if self._compute is None:
            return copied()
        return LossHandle.written(self._sample, self._node, func(self._form), copied)

    def go_back(self, *args: Any, **kwargs: Any) -> None:
        """Send 1 to each record's own loss, which a conditional loop has computed."""
        with full_precision():
            self.parts[0].values.backward(*args, **kwargs)  # type: ignore[no-untyped-call]


def plain(value: PyTree) -> Any:
    """The same with plain tensors in the place of handles."""
    return mapped(value, lambda tensor: tensor.plain() if isinstance(tensor, Handle) else tensor)


def written_loss(sample: Sample, node: Node, reduction: str, losses: Callable[[], list[RecordBlock]]) -> LossHandle:
    """The loss of a sample that is written down; ``losses`` computes the records' own, for a conditional loop."""
    if reduction != "none":
        sample.loop.follow_reduction(reduction)
    form = torch.zeros(1 if reduction == "none" else (), requires_grad=True)
    return LossHandle.written(sample, node, form, lambda: reduced(sample, losses(), reduction))


def reduced(sample: Sample, parts: list[RecordBlock], reduction: str) -> LossHandle:
    """The loss of a sample from one of each record, (n,).

    ``"none"`` keeps them apart. For the others the value shown is their mean or sum, and ``backward()`` sends 1 to
    each record's own loss: what is divided by is the public size of a sample, after clipping and noise.
    """
    if reduction == "none":
        whole: Tensor = together(parts)
        return LossHandle.of(sample, parts, lambda: whole)
    sample.loop.follow_reduction(reduction)
    losses = torch.cat([part.values for part in parts])
    value: Tensor = applied(_Reduced, losses, reduction == "mean")
    return LossHandle.of(sample, [RecordBlock(np.arange(0), value)], lambda: value)


class _Reduced(Function):
    """The mean or sum of losses as it is shown; each record's own gets the gradient that arrives, undivided."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, mean: bool) -> Tensor:
        ctx.count = len(losses)
        return losses.mean() if mean else losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].expand(ctx.count), None


def noted(values: Tensor, call: Call) -> Tensor:
    """The values of an output of a pass; if a gradient comes back to them, the call knows."""
    made: Tensor = applied(_Noted, values, call) if values.requires_grad else values
    return made


def undone(values: Tensor, call: Call, *, outputs: bool) -> Tensor:
    """The outputs or inputs of a call whose loss the loop makes itself: a mean over records is undone between."""
    made: Tensor = applied(_Undone, values, call, outputs) if values.requires_grad else values
    return made


class _Noted(Function):
    """The identity. If the loop goes back inside autocast, all that is behind it goes back in full precision."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, call: Call) -> Tensor:
        ctx.call, ctx.values = call, values
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call.has_gradient()
        if not torch.is_autocast_enabled(ctx.values.device.type):
            return grads[0], None
        with full_precision():
            torch.autograd.backward(ctx.values, grads[0], retain_graph=True)
        return None, None


class _Undone(Function):
    """The identity, with a factor on the way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, call: Call, outputs: bool) -> Tensor:
        ctx.call, ctx.outputs = call, outputs
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        factor = ctx.call.averaged if ctx.call.sample.loop.mean else 1
        return (grads[0] * factor if ctx.outputs else grads[0] / factor), None, None


_own: Any = Tensor  # its properties, as torch names them to a subclass
_QUESTIONS = {
    _own.dtype.__get__, _own.device.__get__, _own.layout.__get__, _own.requires_grad.__get__,
    _own.is_cuda.__get__, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex,
}  # fmt: skip
_DIMENSIONS = {Tensor.dim, _own.ndim.__get__, Tensor.ndimension}
_CASTS = {
    Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.int,
    Tensor.long, Tensor.bool, Tensor.type, Tensor.contiguous, Tensor.clone, Tensor.detach,
}  # fmt: skip
_COPIES = {Tensor.detach, Tensor.clone}
_SCALINGS = {_own.__truediv__, _own.div, _own.__mul__, _own.__rmul__, _own.mul, torch.div, torch.mul}
_REDUCTIONS = {Tensor.mean: "mean", torch.mean: "mean", Tensor.sum: "sum", torch.sum: "sum"}
