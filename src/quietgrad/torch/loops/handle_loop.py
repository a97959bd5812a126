"""The loop behind Opacus' verbs: its own code calls the model, the criterion, ``backward()`` and ``step()``.

While that code gives batches to the private model and outputs to the private criterion as they are, a step is a
program of one record (:mod:`~quietgrad.torch.loops.step_program`), the same thing that ``PrivateLoop`` runs, and ε
holds without a condition. Once it has read or changed a handle, its forward passes are made and recorded, record by
record, and ε is conditional; ``optimizer.step()`` then clips what came back to each record. In both cases clipping
and adding up are done by the session's query.

From ``backward()`` to the release:

1. ``backward()`` puts the loss on the sample's list (``private_batch``). Nothing is computed.
2. ``optimizer.step()`` calls :meth:`HandleLoop.write_gradients` (``wrappers``).
3. :meth:`HandleLoop.collect` makes a program of one record of the listed losses (``step_program``).
4. :meth:`HandleLoop.release` hands a ``SampleQuery`` of these programs to the session (``base``).
5. The session runs the query, which computes, clips and sums the gradients, and adds the noise.
6. The noisy sum becomes the parameters' gradients, and the user's own optimizer steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.core.errors import QuietgradError
from quietgrad.core.session.clipping import FLAT
from quietgrad.core.session.session import PendingRelease
from quietgrad.tables.privacy_units import UserLevelRecords
from quietgrad.torch.loops.base import Loop
from quietgrad.torch.loops.distributed import process_count
from quietgrad.torch.loops.pending_gradient import announce, withdraw
from quietgrad.torch.loops.private_batch import (
    Call,
    Handle,
    LossHandle,
    RecordBlock,
    Sample,
    aligned,
    noted,
    one_axis,
    plain,
    reduced,
    together,
    undone,
    written_loss,
)
from quietgrad.torch.loops.step_program import (
    ClosedPiece,
    Loss,
    ModelCall,
    Output,
    RecordedPiece,
    SampleQuery,
    StepProgram,
    loss_of_one,
    without_tensors,
)
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.one_record import RecordProgram, each_record
from quietgrad.torch.networks.pass_sizes import synthetic_like
from quietgrad.torch.networks.randomness import RecordSeeds, preserved
from quietgrad.torch.networks.records import Examples, RecordGroup
from quietgrad.torch.networks.trees import (
    Args,
    Called,
    Kwargs,
    ModuleState,
    PyTree,
    mapped,
    refilled,
    tensors_of,
)
from quietgrad.torch.networks.vectors import UnitAssignment


class HandleLoop(Loop):
    """A loop whose own code makes the steps of handles, until its optimizer steps."""

    def __init__(
        self, *args: Any, objective: ModuleObjective, warns: bool, reduction: str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._declared_reduction = reduction
        self.follow_reduction(reduction or "mean")
        self.objective = objective
        self.sample: Sample | None = None  # the records in hand; None once they are released
        self.partial = False  # whether more pieces of the sample follow: a step then waits for them
        records: Any = self._session._records
        self._people = records.people if isinstance(records, UserLevelRecords) else None
        self._examples: Examples = records if self._people is None else records.rows
        self._drawn: PendingRelease | None = None
        self.scale = 1.0  # of the loss of a piece, to be undone before clipping
        self._pieces: list[ClosedPiece | RecordedPiece] = []  # those that were differentiated
        self._values: dict[str, Tensor] | None = None  # of parameters in shards, whole, at this sample
        self._point: _Point | None = None  # of the model, when it was called on this sample
        self._waiting = False  # whether something was released since the last step
        self._warns = warns
        self._watched: list[Any] = []
        self._form: PyTree = None
        self._forms: dict[Any, PyTree] = {}  # of the model's outputs, by what it was called with
        self._engines: dict[Any, PerExampleEngine] = {}  # by program
        self.axes: dict[tuple[int, int], int | None] = {}  # where calls with plain tensors have their rows
        self._two: dict[Any, list[torch.Size] | None] = {}

    def rest_on_code(self) -> None:
        """Make ε conditional on the loop's own code. Warn if the loop was made with a criterion."""
        if self.condition is None and self._warns:
            warnings.warn(
                "a private batch, an output or a loss was read or changed: from here on its ε is conditional, and "
                "privacy, ledger and reports say so. To keep it unconditional, hand batches to the private model "
                "and outputs to the private criterion as they are, and change records by transform=.",
                stacklevel=2,
            )
        super().rest_on_code()

    def follow_reduction(self, reduction: str) -> None:
        """Divide sums by the public size of a sample, or not, as a loss does; a declared reduction comes first."""
        self.mean = (self._declared_reduction or reduction) == "mean"

    # --- samples ------------------------------------------------------------------------------------------------

    def batches(self, most: int | None = None) -> Iterator[Any]:
        """The next sample: whole, or in pieces of whole people with at most ``most`` records."""
        if self._drawn is not None and self._has_gradient:
            self.write_gradients()  # a sample of its own, whose gradient is added to the next one's
        bound = None if self._people is None else self._people.rule.records_per_person
        if most is not None and self._people is not None and bound is None and self.model.in_shards:
            raise ValueError(
                "BatchMemoryManager: the pieces of people without a bound on their records differ in number by "
                "process, and all processes of a sharded module make each together. Give records_per_person."
            )
        expected = self.expected_batch / process_count()
        self._drawn = self.draw()
        self._pieces = []
        sample = self._sample(self._drawn)
        pieces = [sample] if most is None else _pieces(sample, most, expected, bound)
        for number, piece in enumerate(pieces):
            self.partial = number + 1 < len(pieces)
            # Here and not in a call: how often the loop's own code calls the model may differ by process.
            self._values = self.model.gather()
            self.sample, self._point, self.scale = piece, None, 1.0
            yield piece.handles(self._record_form())

    def _record_form(self) -> PyTree:
        """Return a collated record, (1, …), with zeros for its values."""
        if self._form is None:
            with preserved():
                (first,) = self._examples.read(RecordSeeds(bytes(32), np.array([0])))
            device = self.engine.device
            self._form = mapped(first.record, lambda tensor: torch.zeros_like(tensor, device=device))
        return self._form

    def _sample(self, drawn: PendingRelease) -> Sample:
        _, indices, key = self._session.batch(drawn)
        if self._people is None:
            everyone = np.arange(len(self._examples)) if indices is None else indices
            return Sample(self, RecordSeeds.of(key, everyone), None)
        groups = self._people.groups(indices, key)
        rows, starts = groups.flat()
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return Sample(self, RecordSeeds.of(key, rows), UnitAssignment.numbered(owners, mean=groups.mean))

    def read(self, sample: Sample) -> list[RecordGroup]:
        """The records of a sample, for a loop that looks at them."""
        groups = self._examples.read(sample.row_keys)
        if not len(sample):  # of that record nothing but its form is left
            groups = [RecordGroup(rows, mapped(record, torch.zeros_like)) for rows, record in groups]
        device = self.engine.device
        return [RecordGroup(rows, mapped(record, lambda t: t.to(device))) for rows, record in groups]

    # --- forward passes -----------------------------------------------------------------------------------------

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """The module's outputs for records in hand, as handles: written down, or computed and recorded."""
        sample, given = self.sample, (args, kwargs)
        assert sample is not None
        self._refuse_other_parameters()
        tensors = tensors_of(given)
        if self.condition is None and any(isinstance(tensor, Handle) for tensor in tensors) and self._is_at_point():
            with self.whole(self._values):
                return self._write_down(sample, given, tensors)
        self.rest_on_code()
        return self.record(sample, given)

    def _is_at_point(self) -> bool:
        """Whether the model's parameters and modes are those of the sample's earlier calls: one program has one."""
        now = _Point.of(self)
        if self._point is None:
            with self.whole(self._values):
                self._point = replace(now, params=self.point())
        return self._point.versions == now.versions and self._point.training == now.training

    def _write_down(self, sample: Sample, given: tuple[Args, Kwargs], tensors: list[Tensor]) -> Any:
        call = ModelCall(without_tensors(given), sample.nodes(tensors))
        forms = [t._form if isinstance(t, Handle) else t.detach()[None] for t in tensors]
        record = refilled(given, iter(forms))
        outputs = self._output_forms(call, record)
        computed: list[Any] = []

        def compute(place: int) -> Handle:
            if not computed:
                computed.append(tensors_of(self.record(sample, given)))
            handle: Handle = computed[0][place]
            return handle

        made: list[Handle] = []
        for place, form in enumerate(tensors_of(outputs)):
            layout = self._layout(record, place, form)
            node = Output(call, place, layout == "squeezed")
            values = partial(compute, place)
            if layout == "loss":
                made.append(LossHandle.written(sample, node, form[0].detach().requires_grad_(), values))
                self.follow_reduction("mean")
            else:
                made.append(Handle.written(sample, node, form[:, None] if node.squeezed else form, values))
        return refilled(outputs, iter(made))

    def _output_forms(self, call: ModelCall, record: PyTree) -> PyTree:
        """The module's outputs for a synthetic record, (1, …): what is handed out besides handles is theirs."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(record))
        key = call.key, shapes, tuple(layer.training for layer in self.engine.module.modules())
        if key not in self._forms:
            keys = RecordSeeds(bytes(32), np.arange(1))
            (made,) = self.engine.record([RecordGroup(np.arange(1), record)], keys)
            self._forms[key] = mapped(made.outputs, _form_of)
        return self._forms[key]

    def record(self, sample: Sample, given: tuple[Args, Kwargs]) -> Any:
        """The module's outputs, computed record by record; what comes back to them is kept for the step."""
        rows, values = sample.stacked(tensors_of(given))
        call = Call(sample, rows)
        values = [[RecordBlock(r, undone(v, call, outputs=False)) for r, v in parts] for parts in values]
        groups = [RecordGroup(mine, refilled(given, iter(own))) for mine, own in aligned(values)]
        made = []
        with self.whole(self._values):
            call.passes = self.engine.record(groups, sample.row_keys)
            sample.calls.append(call)
            for number, column in enumerate(zip(*(tensors_of(each.outputs) for each in call.passes), strict=True)):
                pairs = zip(call.passes, column, strict=True)
                parts = [RecordBlock(each.rows, noted(tensor, call)) for each, tensor in pairs]
                made.append(self._output(call, number, parts, groups[0].record))
        return refilled(call.passes[0].outputs, iter(made))

    def _output(self, call: Call, number: int, parts: list[RecordBlock], record: PyTree) -> Handle:
        """A handle of one of the module's outputs, with records on the axis on which a batch would have them."""
        layout = self._layout(record, number, parts[0].values)
        if layout == "loss":
            return reduced(call.sample, parts, "mean")
        if layout == "squeezed":
            parts = [RecordBlock(rows, values.unsqueeze(1)) for rows, values in parts]
        axis = layout if isinstance(layout, int) else 0 if layout == "squeezed" else None
        return Handle.of(call.sample, parts, lambda: undone(together(parts, axis), call, outputs=True))

    def _layout(self, record: PyTree, number: int, values: Tensor) -> int | str | None:
        """Where the batch of one is in an output, (n, …): its axis, "squeezed", or "loss" for a record's loss."""
        shape = values.shape[1:]
        if shape and shape[0] == 1:
            return 0
        two = self._of_two(record)
        several = shape if two is None or number >= len(two) else two[number]
        if len(several) == len(shape) + 1 and several[0] == 2:  # the module squeezed its batch of one
            return "squeezed"
        if not shape:
            return "loss" if values.is_floating_point() else None
        if len(several) == len(shape):
            return next((k for k, size in enumerate(several) if size == 2 * shape[k]), 0)
        return 0

    def _of_two(self, record: PyTree) -> list[torch.Size] | None:
        """The shapes of the outputs for a synthetic batch of two records like this: they tell where the batch is.

        Only how outputs are laid out for the loop's own code depends on it.
        """
        known = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(record))
        if known not in self._two:
            self._two[known] = _tried(self.engine.module, record)
        return self._two[known]

    # --- the step -----------------------------------------------------------------------------------------------

    @property
    def _has_gradient(self) -> bool:
        sample = self.sample
        return bool(self._pieces) or (
            sample is not None and (bool(sample.losses) or any(call.reached for call in sample.calls))
        )

    def clear(self) -> None:
        """Forget what came back to the records in hand: ``zero_grad()``.

        Outputs whose loss is yet to be differentiated stay: many loops call ``zero_grad()`` just before. So
        do a sample's earlier pieces.
        """
        withdraw(self)
        self.scale = 1.0
        if self.sample is not None:
            self.sample.losses = []
            self.sample.calls = [call for call in self.sample.calls if not call.reached]

    def announce_gradients(self) -> None:
        """Parameters have gradients from here on, which are released when they are read, or by the step."""
        announce(self)

    def collect(self) -> None:
        """Take the step's part in the records in hand: a program of each, or passes that were recorded.

        ``scale`` undoes a factor of the loss.
        """
        scale, self.scale = self.scale, 1.0
        if scale != 1.0:  # of the loop's own code
            self.rest_on_code()
            if self.clipping != FLAT:
                raise ValueError(
                    f"GradScaler: a scale of the loss cannot be undone under clipping={self.clipping.kind!r}. "
                    "What is clipped is computed in float32: leave the scaler out, or use "
                    "GradScaler(enabled=False)."
                )
        sample = self.sample
        assert sample is not None
        if self.condition is None and not sample.calls:
            program = StepProgram(self.engine.module, [loss._node for loss in sample.losses])
            point, engine = self._point, self._engine_of(program)
            assert point is not None
            assert point.params is not None
            piece = ClosedPiece(sample.keys, sample.units, engine, program, point.params, point.training)
            self._pieces.append(piece)
            sample.losses = []  # they refer to the sample: a step leaves no cycle of tensors behind
            return
        for loss in sample.losses:  # which the loop differentiated while it was written down
            loss.go_back()
        withdraw(self)  # the gradients that this announced
        passes = [each for call in sample.calls if call.reached for each in call.passes]
        sample.losses, sample.calls = [], []
        self._pieces.append(RecordedPiece(sample.keys, sample.units, self.engine, passes, scale))

    def _engine_of(self, program: StepProgram) -> PerExampleEngine:
        """The engine of a program, which was tried out on synthetic records when it first came."""
        if program.key not in self._engines:
            engine = PerExampleEngine(
                self.engine.module, program, memory_budget=self.engine.memory_budget,
                micro_batch=self.engine.micro_batch,
            )  # fmt: skip
            engine.loss_of = program
            ((_, record),) = program.groups([RecordGroup(np.arange(1), self._record_form())])
            engine.try_out(record)
            self._engines[program.key] = engine
        return self._engines[program.key]

    def write_gradients(self) -> bool:
        """Make the noisy sum of the sample in hand the parameters' gradient; false while pieces of it follow."""
        withdraw(self)
        self._let_others_be()
        if not self._has_gradient:
            if self._waiting:  # an earlier sample's gradient
                return True
            own = "" if self.model.given else (
                " A method of the module that calls the module itself, such as training_step(batch), needs "
                "make_private(wrap_model=False)."
            )  # fmt: skip
            raise RuntimeError(
                "optimizer.step(): no loss.backward() has reached an output of the private model since the last "
                "step. Call the model that make_private returned (model(x), not its layers or model.forward), in "
                f"training mode, on a fresh batch of its loader.{own}"
            )
        if self.has_other_gradients():  # of a penalty in the loss, or of other data
            self.rest_on_code()
        with self.whole(self._values):
            self.collect()
            if self.partial:
                return False
            assert self._drawn is not None
            drawn, pieces = self._drawn, self._pieces
            self._drawn, self._pieces, self.sample = None, [], None
            self._waiting = True
            self.release(drawn, SampleQuery(self.objective, pieces, self.rule_of(drawn), self._examples))
        return True

    def let_go_of_tensors(self) -> None:
        """Hold no whole parameter but those of the sample in hand."""
        for engine in (self.engine, *self._engines.values()):
            engine.let_go()

    def watch_for_others(self) -> None:
        """Notice what autograd adds to gradients that were read, and thereby released, before the step."""

        def added(_: Tensor) -> None:
            self.rest_on_code()

        trained: list[Any] = [param for param in self.parameters().values() if param.requires_grad]
        self._watched = [param.register_post_accumulate_grad_hook(added) for param in trained]

    def _let_others_be(self) -> None:
        for handle in self._watched:
            handle.remove()
        self._watched = []

    def has_stepped(self) -> None:
        self._waiting = False
        self._let_others_be()


@dataclass(frozen=True)
class _Point:
    """Where a model stands: its parameters, and the modes of its layers."""

    versions: tuple[int, ...]
    training: tuple[bool, ...]
    params: Tensor | None = None

    @staticmethod
    def of(loop: HandleLoop) -> _Point:
        versions = tuple(param._version for param in loop.parameters().values())
        return _Point(versions, tuple(layer.training for layer in loop.engine.module.modules()))


def _form_of(tensor: Tensor) -> Tensor:
    """Zeros in the place of values; of what a gradient goes back to, it can be asked for."""
    return torch.zeros_like(tensor, requires_grad=tensor.requires_grad)


def _pieces(sample: Sample, most: int, expected: float, records_per_person: int | None) -> list[Sample]:
    """Parts of a sample by secret words: by position, one record less would move all that follow.

    How many there are is public (:func:`pieces_of`); in which of them a record is changes no sum. Only without a
    bound on a person's records it follows from the sample, which a loop that counts them learns.
    """
    keys, units = sample.keys, sample.units
    if units is None:
        return [Sample(sample.loop, keys.rows(rows), None) for rows in keys.dealt(pieces_of(most, expected), most)]
    if records_per_person is None:
        sample.loop.rest_on_code()
        parts = list(units.passes(keys, most))
    else:
        first = np.unique(units.owners, return_index=True)[1]
        people = max(1, most // records_per_person)
        parts = keys.rows(first).dealt(pieces_of(people, expected), people)
    taken = [units.some(part) for part in parts]
    return [Sample(sample.loop, keys.rows(rows), whose) for rows, whose in taken]


def pieces_of(most: int, expected: float) -> int:
    """Into how many pieces of at most ``most`` a sample of a public expected size is cut.

    They hold a sample that is four standard deviations larger than expected; a larger one has larger pieces.

    >>> pieces_of(128, 512.0), pieces_of(8, 64.0), pieces_of(1000, 512.0)
    (5, 12, 1)
    """
    return max(1, math.ceil((expected + 4.0 * math.sqrt(expected)) / most))


def _tried(module: nn.Module, record: PyTree) -> list[torch.Size] | None:
    def two(tensor: Tensor, fill: int) -> Tensor:
        shape = list(tensor.shape[1:])
        if shape:
            shape[one_axis(tensor)] *= 2
        return torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)

    for fill in (0, 1):  # a length of zero is not taken by all
        args, kwargs = mapped(record, partial(two, fill=fill))
        with suppress(Exception), preserved(), torch.no_grad(), ModuleState(module).holding({}, torch.clone):
            return [tensor.shape for tensor in tensors_of(module(*args, **kwargs))]
    return None


class PrivateCriterion(nn.Module):
    """The loop's criterion: of batches and outputs as they were handed out it is made record by record."""

    def __init__(self, criterion: Called, loop: HandleLoop, reduction: str) -> None:
        super().__init__()
        self.criterion, self._loop, self.reduction = criterion, loop, reduction
        self._runner = RecordProgram(beside=[criterion])  # whose own parameters are refused, not held fast
        self._tried: set[Any] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the records in hand; of plain tensors what the criterion itself gives."""
        sample, given = self._loop.sample, (args, kwargs)
        tensors = tensors_of(given)
        own = [tensor for tensor in tensors if isinstance(tensor, Handle) and tensor.untouched]
        conditional = self._loop.condition is not None
        if sample is None or not own or (conditional and len(own) < len(tensors)):
            return self.criterion(*plain(args), **plain(kwargs))
        if conditional:
            return reduced(sample, self._losses(sample, given), self.reduction)
        node = Loss(self.criterion, without_tensors(given), sample.nodes(tensors))
        if node.key not in self._tried:
            forms = [t._form if isinstance(t, Handle) else t.detach()[None] for t in tensors]
            self._try_out(refilled(given, iter(forms)))
            self._tried.add(node.key)
        return written_loss(sample, node, self.reduction, lambda: self._losses(sample, given))

    def _losses(self, sample: Sample, given: tuple[Args, Kwargs]) -> list[RecordBlock]:
        """The records' losses, for a loop that looks at them."""
        _, values = sample.stacked(tensors_of(given))
        parts = []
        for rows, stacked in aligned(values):
            record = refilled(given, iter(stacked))
            if self.criterion not in self._tried:
                self._try_out(record)
                self._tried.add(self.criterion)
            losses = each_record(self._of_one, record, sample.row_keys.rows(rows), self._runner)
            parts.append(RecordBlock(rows, losses))
        return parts

    def _try_out(self, record: PyTree) -> None:
        """Raise what the criterion raises on every synthetic record: on a real one it counts as zero."""
        runner, failed = self._runner, None
        runner.synthetic = True
        for numbers in ("few", "ones", "zeros"):
            try:
                each_record(self._of_one, synthetic_like(record, numbers), runner=runner)
            except QuietgradError as error:
                failed = failed or error
            else:
                failed = None
                break
        runner.synthetic = False
        if failed is not None:
            raise failed

    def _of_one(self, record: PyTree) -> Tensor:
        return loss_of_one(self.criterion, *record)


CustomLoop = HandleLoop  # its earlier name
