"""What is found out about a program before any record is read: on made-up records of the same shape.

Whether it can be run for many records at once, how much is written out for each, and whether kernels and torch's
rules give what autograd gives for a few records. Mixing needs no trial: other records are not in reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.errors import QuietgradError
from quietgrad.objectives.networks.contributions import Workspace
from quietgrad.objectives.networks.gradients import recorded
from quietgrad.objectives.networks.one_record import Pass, Program, RecordProgram, Rows
from quietgrad.objectives.networks.randomness import RecordKeys, preserved
from quietgrad.objectives.networks.trees import mapped, tensors_of

__all__ = ["Known", "vectors_by_autograd"]

_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}  # between kernels and autograd
_RECORDS = 3


class Known:
    """What is known of a program in one mode of a module's layers."""

    def __init__(self, module: nn.Module, slices: Mapping[str, slice], loss: Any = None) -> None:
        self.program = RecordProgram(module, slices, loss)
        self.slices = slices
        self.sites: list[tuple[str, tuple[str, ...], int, bool]] = []  # operation, names, numbers copied, kernel
        self.copied = 0  # numbers that are written out for each record
        self.failed: QuietgradError | None = None  # on every made-up record

    def try_out(self, program: Program, params: Mapping[str, Tensor], record: Any) -> None:
        """One pass of a few made-up records, compared with plain autograd."""
        runner, keys = self.program, RecordKeys(bytes(32), np.arange(_RECORDS))
        alone, runner.made_up = runner.alone, True
        with preserved(), torch.no_grad():
            for numbers in ("few", "ones", "zeros"):
                try:
                    self._compare(program, params, _made_up(record, numbers), keys)
                except QuietgradError as error:  # numbers that the model does not take, or its own fault
                    self.failed = self.failed or error
                    runner.alone = alone
                else:
                    self.failed = None
                    break
        runner.made_up = False

    def _compare(self, program: Program, params: Mapping[str, Tensor], record: Any, keys: RecordKeys) -> None:
        runner = self.program
        done = runner.together(program, params, record, keys, np.arange(_RECORDS))
        while done is not None and (some := _alike(done)) is not None:  # those that go one way
            record, keys = mapped(record, itemgetter(torch.from_numpy(some))), keys.rows(some)
            done = runner.together(program, params, record, keys, np.arange(len(some)))
        if not isinstance(done, Pass):
            runner.by_itself(program, params, record, keys, 0)  # raises if it cannot be run at all
            return
        self.sites = [(site.operation, site.names, site.copied, site.kernel is not None) for site in done.sites]
        self.copied = sum(site.copied for site in done.sites)
        _go_back(done.outputs)
        first = next(iter(params.values()))
        like = torch.empty(0, dtype=_widest(params), device=first.device)
        fast = recorded([done], len(done.rows), Workspace(0.0, like), list(self.slices.values()))
        slow = vectors_by_autograd(runner, program, params, record, keys, like.dtype).double()
        norms, size = fast.norms().to(slow), slow.norm(dim=1)
        if not (bool(slow.isfinite().all()) and bool(norms.isfinite().all())):
            return  # nothing to compare
        weights = torch.linspace(1.0, 2.0, len(slow), dtype=torch.float64, device=slow.device)
        total, right, most = torch.zeros_like(slow[0]), weights @ slow, size.max()
        fast.add_weighted(weights, total)
        tolerance = _TOLERANCE[like.dtype]
        off = bool(((norms - size).abs() > tolerance * (size + most)).any())
        if off or bool((total - right).norm() > tolerance * (right.norm() + most)):
            runner.alone = "a rule of torch's does not agree with autograd on this model"


def _alike(done: Pass | Rows) -> Rows | None:
    """The records to begin again with; ``None``: all went one way."""
    if isinstance(done, Pass):
        return None if done.valid is None else np.flatnonzero(done.valid.numpy())
    return done


def vectors_by_autograd(
    runner: RecordProgram, program: Program, params: Mapping[str, Tensor], record: Any, keys: RecordKeys,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient of each record by plain autograd, one after the other: (records, numbers)."""
    first, count = next(iter(params.values())), len(keys.indices)
    dim = max(slot.stop for slot in runner.slices.values())
    vectors = torch.zeros((count, dim), dtype=dtype, device=first.device)
    for row in range(count):
        own = runner.by_itself(program, params, record, keys, row)
        _go_back(own.outputs)
        for site in own.sites:
            for slot, values in site.content(dtype) or ():
                vectors[row, slot] = values[0]
    return vectors


def _go_back(outputs: Any) -> None:
    """The way back from every output, each number with a weight of its own, so that nothing cancels by symmetry."""
    with torch.enable_grad():
        floats = [t.reshape(len(t), -1) for t in tensors_of(outputs) if t.requires_grad]
        values = [(t * torch.linspace(1.0, 1.5, t.shape[1]).to(t)).sum() for t in floats]
        if values:
            torch.autograd.backward(values)


def _widest(params: Mapping[str, Tensor]) -> torch.dtype:
    return torch.float64 if any(p.dtype == torch.float64 for p in params.values()) else torch.float32


def _made_up(record: Any, numbers: str) -> Any:
    """A few records of the same shape: floats uniform in [0, 1), whole numbers 0 and 1, all 1, or all 0."""
    generator = torch.Generator().manual_seed(0)

    def made(tensor: Tensor) -> Tensor:
        shape = (_RECORDS, *tensor.shape[1:])
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.rand(shape, generator=generator).to(tensor)
        if numbers == "few":
            return torch.randint(0, 2, shape, generator=generator).to(tensor)
        return (torch.ones(shape) if numbers == "ones" else torch.zeros(shape)).to(tensor)

    return mapped(record, made)
