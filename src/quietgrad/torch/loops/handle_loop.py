"""The loop behind Opacus' verbs: the model and the criterion are run record by record, and autograd goes back.

The loop's own code calls ``model(x)``, ``criterion(output, y)`` and ``loss.backward()``. What each record sends
back to the parameters is kept by the engine, and never reaches a parameter; ``optimizer.step()`` clips, adds up
and releases.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.core.session.session import PendingRelease
from quietgrad.tables.privacy_units import UserLevelRecords
from quietgrad.torch.loops.base import Loop
from quietgrad.torch.loops.distributed import Summed, process_count
from quietgrad.torch.loops.private_batch import (
    Call,
    Handle,
    RecordBlock,
    Sample,
    aligned,
    noted,
    one_axis,
    plain,
    reduced,
    together,
    undone,
)
from quietgrad.torch.networks.gradients import synthetic_like
from quietgrad.torch.networks.one_record import RecordProgram, each_record
from quietgrad.torch.networks.randomness import RecordSeeds, preserved
from quietgrad.torch.networks.records import Examples, RecordGroup
from quietgrad.torch.networks.trees import (
    Args,
    Called,
    Kwargs,
    ModuleState,
    Options,
    PyTree,
    mapped,
    refilled,
    tensors_of,
)
from quietgrad.torch.networks.vectors import UnitAssignment


class CustomLoop(Loop):
    """A loop whose forward passes are recorded, record by record, until its optimizer steps."""

    def __init__(self, *args: Any, warns: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sample: Sample | None = None  # the records in hand; None once they are released
        self.partial = False  # whether more pieces of the sample follow: a step then waits for them
        records: Any = self._session._records
        self._people = records.people if isinstance(records, UserLevelRecords) else None
        self._examples: Examples = records if self._people is None else records.rows
        self._drawn: PendingRelease | None = None
        self._sum: Tensor | None = None  # of the pieces that were differentiated
        self._waiting = False  # whether something was released since the last step
        self._warns = warns
        self.axes: dict[tuple[int, int], int | None] = {}  # where calls with plain tensors have their rows
        self._two: dict[Any, list[torch.Size] | None] = {}

    def rest_on_code(self) -> None:
        """As any loop's; one that began with a criterion warns."""
        if self.condition is None and self._warns:
            warnings.warn(
                "a private batch, an output or a loss was read or changed: from here on its ε is conditional, and "
                "privacy, ledger and reports say so. To keep it unconditional, hand batches to the private model "
                "and outputs to the private criterion as they are, and change records by transform=.",
                stacklevel=2,
            )
        super().rest_on_code()

    # --- samples ------------------------------------------------------------------------------------------------

    def batches(self, most: int | None = None) -> Iterator[Any]:
        """The next sample: whole, or in pieces of whole people with at most ``most`` records."""
        if self._drawn is not None and self._has_gradient:
            self.write_gradients()  # a sample of its own, whose gradient is added to the next one's
        expected = self.expected_batch / process_count()
        self._drawn = self.draw()
        self._sum = None
        sample = self._sample(self._drawn)
        bound = None if self._people is None else self._people.records_per_person
        pieces = [sample] if most is None else _pieces(sample, most, expected, bound)
        for number, piece in enumerate(pieces):
            self.partial = number + 1 < len(pieces)
            self.sample = piece
            yield piece.handles(self._groups(piece))

    def _sample(self, drawn: PendingRelease) -> Sample:
        _, indices, key = self._session.batch(drawn)
        if self._people is None:
            everyone = np.arange(len(self._examples)) if indices is None else indices
            return Sample(self, RecordSeeds.of(key, everyone), None)
        groups = self._people.groups(indices, key)
        rows, starts = groups.flat()
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return Sample(self, RecordSeeds.of(key, rows), UnitAssignment.numbered(owners, mean=groups.mean))

    def _groups(self, sample: Sample) -> list[RecordGroup]:
        groups = self._examples.read(sample.row_keys)
        if not len(sample):  # of that record nothing but its form is left
            groups = [RecordGroup(rows, mapped(record, torch.zeros_like)) for rows, record in groups]
        device = self.engine.device
        return [RecordGroup(rows, mapped(record, lambda t: t.to(device))) for rows, record in groups]

    # --- forward passes -----------------------------------------------------------------------------------------

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """The module's outputs for records in hand, as handles; what comes back to them is kept for the step."""
        sample = self.sample
        assert sample is not None
        self._refuse_other_parameters()
        given = (args, kwargs)
        rows, values = sample.stacked(tensors_of(given))
        call = Call(sample, rows)
        if self.condition is not None:
            values = [[RecordBlock(r, undone(v, call, outputs=False)) for r, v in parts] for parts in values]
        groups = [RecordGroup(mine, refilled(given, iter(own))) for mine, own in aligned(values)]
        call.passes = self.engine.record(groups, sample.row_keys)
        sample.calls.append(call)
        made = []
        for number, column in enumerate(zip(*(tensors_of(each.outputs) for each in call.passes), strict=True)):
            parts = [
                RecordBlock(each.rows, noted(tensor, call, each))
                for each, tensor in zip(call.passes, column, strict=True)
            ]
            made.append(self._output(call, number, parts, groups[0].record))
        return refilled(call.passes[0].outputs, iter(made))

    def _output(self, call: Call, number: int, parts: list[RecordBlock], record: PyTree) -> Handle:
        """A handle of one of the module's outputs, with records on the axis on which a batch would have them."""
        sample, shape, axis = call.sample, parts[0].values.shape[1:], 0
        if not shape or shape[0] != 1:
            two = self._of_two(record)
            several = None if two is None or number >= len(two) else two[number]
            several = shape if several is None else several
            if len(several) == len(shape) + 1 and several[0] == 2:  # the module squeezed its batch of one
                parts = [RecordBlock(rows, values.unsqueeze(1)) for rows, values in parts]
            elif not shape and parts[0].values.is_floating_point():  # the module's own loss of a record
                return reduced(sample, parts, "mean")
            elif len(several) == len(shape):
                axis = next((k for k, size in enumerate(several) if size == 2 * shape[k]), 0)
        return Handle.of(
            sample, parts, lambda: undone(together(parts, axis if shape else None), call, outputs=True)
        )

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
        return self._sum is not None or (
            self.sample is not None and any(call.reached for call in self.sample.calls)
        )

    def clear(self) -> None:
        """Forget what came back to the records in hand: ``zero_grad()``.

        Outputs whose loss is yet to be differentiated stay: many loops call ``zero_grad()`` just before. So
        does the sum of a sample's earlier pieces.
        """
        if self.sample is not None:
            self.sample.calls = [call for call in self.sample.calls if not call.reached]

    def collect(self) -> None:
        """Clip and add up what came back to the records in hand, and let go of it."""
        sample = self.sample
        assert sample is not None
        if self._sum is None:
            self._sum = torch.zeros(self.engine.dim, dtype=torch.float64, device=self.engine.device)
        passes = [each for call in sample.calls if call.reached for each in call.passes]
        sample.calls = []
        if passes and len(sample):
            self.engine.add_recorded(passes, len(sample), sample.units, self.clip, self._sum)

    def write_gradients(self) -> bool:
        """Make the noisy sum of the sample in hand the parameters' gradient; false while pieces of it follow."""
        if not self._has_gradient:
            if self._waiting:  # an earlier sample's gradient
                return True
            raise RuntimeError(
                "optimizer.step(): no loss.backward() has reached an output of the private model since the last "
                "step. Call the model that make_private returned, in training mode, on a fresh batch of its loader."
            )
        self.collect()
        if self.partial:
            return False
        if self.has_other_gradients():  # of a penalty in the loss, or of other data
            self.rest_on_code()
        assert self._drawn is not None
        assert self._sum is not None
        drawn, total = self._drawn, self._sum
        self._drawn = self._sum = self.sample = None
        self._waiting = True
        self.release(drawn, Summed(total, self.clip))
        return True

    def has_stepped(self) -> None:
        self._waiting = False


def _pieces(sample: Sample, most: int, expected: float, records_per_person: int | None) -> list[Sample]:
    """Parts of a sample by secret words: by position, one record less would move all that follow.

    How many there are is public: enough for pieces to be six standard deviations below ``most``. Only without a
    bound on a person's records it follows from the sample, which a loop that counts them learns.
    """
    keys, units = sample.keys, sample.units
    if units is None:
        return [Sample(sample.loop, keys.rows(rows), None) for rows in keys.dealt(pieces_of(most, expected))]
    if records_per_person is None:
        sample.loop.rest_on_code()
        parts = list(units.passes(keys, most))
    else:
        first = np.unique(units.owners, return_index=True)[1]
        parts = keys.rows(first).dealt(pieces_of(max(1, most // records_per_person), expected))
    taken = [units.some(people) for people in parts]
    return [Sample(sample.loop, keys.rows(rows), whose) for rows, whose in taken]


def pieces_of(most: int, expected: float) -> int:
    """Into how many pieces of at most ``most`` a sample of a public expected size is cut.

    >>> pieces_of(128, 512.0), pieces_of(1000, 512.0)
    (7, 1)
    """
    mean = (math.sqrt(9.0 + most) - 3.0) ** 2  # m with m + 6√m = most
    return max(1, math.ceil(expected / mean))


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

    def __init__(self, criterion: Called, loop: CustomLoop, reduction: str) -> None:
        super().__init__()
        self.criterion, self._loop, self.reduction = criterion, loop, reduction
        self._runner = RecordProgram(beside=criterion)
        self._tried = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the records in hand; of plain tensors what the criterion itself gives."""
        sample, given = self._loop.sample, (args, kwargs)
        tensors = tensors_of(given)
        own = [tensor for tensor in tensors if isinstance(tensor, Handle) and tensor.untouched]
        others = len(own) < len(tensors) and self._loop.condition is not None
        if sample is None or not own or others:
            return self.criterion(*plain(args), **plain(kwargs))
        _, values = sample.stacked(tensors)
        parts = []
        for rows, stacked in aligned(values):
            record = refilled(given, iter(stacked))
            self._try_out(record)
            losses = each_record(self._of_one, record, sample.row_keys.rows(rows), self._runner)
            parts.append(RecordBlock(rows, losses))
        return reduced(sample, parts, self.reduction)

    def _try_out(self, record: PyTree) -> None:
        """Raise what the criterion raises on every synthetic record, once: on a real one it counts as zero."""
        runner, failed = self._runner, None
        if self._tried:
            return
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
        self._tried = True

    def _of_one(self, record: PyTree) -> Tensor:
        with _NoParameters():
            loss: Tensor = self.criterion(*record[0], **record[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError(
                "criterion: must give one number for one record; average or sum over its positions there."
            )
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
