"""The ways in which per-example gradients are computed; :mod:`~quietgrad.objectives.networks.choosing` takes one.

    layers   one forward and one backward pass for the batch, taken apart layer by layer
    vmap     the whole model by vmap(grad)
    alone    one example at a time: whatever autograd can differentiate

A way also says how random numbers are drawn. If the module draws none, nothing is set up for it. Else each draw of
a batch gets a row from every record's stream; where a draw has no row per record (a coin for the whole batch, a
mask for a weight), examples are taken apart by vmap or alone, so that each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quietgrad.objectives.networks import checks
from quietgrad.objectives.networks.anatomy import Plan
from quietgrad.objectives.networks.collector import Collector, Network, Piece
from quietgrad.objectives.networks.contributions import Combination, Workspace
from quietgrad.objectives.networks.fallback import model_gradients, refilled
from quietgrad.objectives.networks.places import UnplannedRows
from quietgrad.objectives.networks.randomness import (
    RecordDraws,
    RecordKeys,
    UnplannedDraw,
    preserved,
    seed_generators,
    torch_generator,
)
from quietgrad.objectives.networks.tape import (
    Batch,
    Unit,
    per_example_losses,
    select,
    tensors_of,
    with_parameters,
)

__all__ = ["Draws", "Recorded", "Way", "joined", "theta_device"]

Draws = Literal["none", "rows", "record", "generator"]


class Recorded(NamedTuple):
    """What a forward pass gave, and the contributions that follow from its outputs' gradients, once."""

    output: Any
    pieces: Callable[[Sequence[Tensor]], list[Piece]]


@dataclass(frozen=True)
class Way:
    """How a module's per-example gradients are computed, and how its random numbers are drawn.

    ``draws``: "none"; "rows" of a batch, along ``axes``; for one "record" at a time by its stream; or by torch's,
    numpy's and Python's own "generator", seeded for one record at a time.
    """

    network: Network
    space: Workspace
    plan: Plan | None = None
    vectorised: bool = False
    draws: Draws = "none"
    axes: tuple[int, ...] = ()
    why: str = ""  # the module is not taken apart

    @property
    def units(self) -> list[Unit] | None:
        """The module's layers and operations, if it is taken apart."""
        return None if self.plan is None else self.plan.units

    @property
    def alone(self) -> bool:
        """Whether examples are taken one at a time."""
        return self.plan is None and not self.vectorised

    def pieces(
        self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch, mix: Combination, keys: RecordKeys
    ) -> list[Piece]:
        """What every parameter gets from every example."""
        device = theta.device
        before = torch_generator(device)
        try:
            pieces = self._pieces(theta, previous, x, y, mix, keys)
            if torch.equal(before, torch_generator(device)):
                return pieces
        except (UnplannedDraw, UnplannedRows):
            if self.alone:
                raise
        # The module drew, or gave a layer rows, as it did not on made-up examples. One record at a time, by the
        # same streams, each record contributes what it would have contributed without the one that caused this.
        slow = Way(self.network, self.space, draws="record")
        with preserved():
            return slow._pieces(theta, previous, x, y, mix, keys)

    def record(
        self, theta: Tensor, args: tuple[Tensor, ...], mix: Combination, keys: RecordKeys
    ) -> Recorded | None:
        """A forward pass whose gradients can be taken later; None if the module is not taken apart, or not so."""
        if self.plan is None:
            return None
        before = torch_generator(theta.device)
        collector = Collector(self.network, self.plan, mix, self.space, self._drawing(keys, theta.device))
        try:
            recording = collector.record(theta, args)
        except (UnplannedDraw, UnplannedRows):
            return None
        if not torch.equal(before, torch_generator(theta.device)):
            return None
        return Recorded(recording.result, lambda grads: collector.finish(recording, grads))

    def _pieces(
        self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch, mix: Combination, keys: RecordKeys
    ) -> list[Piece]:
        if self.plan is not None:
            drawing = self._drawing(keys, theta.device)
            return Collector(self.network, self.plan, mix, self.space, drawing).collect(theta, previous, x, y)
        change = None
        if previous is not None:
            change = self._rows(previous, x, y, keys).mul_(-mix.scale)
        now = self._rows(theta, x, y, keys)
        if change is not None:
            change += now
        return [(slice(0, len(theta)), mix.stored(now, change))]

    def _drawing(self, keys: RecordKeys, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        if self.draws == "none":
            return nullcontext
        return lambda: RecordDraws(keys.draws, self.axes, device)

    def _rows(self, point: Tensor, x: Batch, y: Batch, keys: RecordKeys) -> Tensor:
        module, loss_fn, unflatten, _ = self.network
        if self.vectorised:
            with self._drawing(keys, point.device)():
                rows = model_gradients(module, loss_fn, unflatten, point, x, y)
            return rows
        found = checks.alone(module, loss_fn, unflatten(point.detach()), x, y, self.one(keys, point.device))
        return torch.stack([torch.cat([g.flatten().to(point.dtype) for g in one.values()]) for _, one in found])

    def one(self, keys: RecordKeys, device: torch.device) -> Callable[[int], AbstractContextManager[Any]]:
        """The context in which row i alone draws."""
        if self.draws == "none":
            return lambda i: nullcontext()
        return lambda i: _seeded(keys, i, None if self.draws == "generator" else device)

    def losses(self, params: dict[str, Tensor], x: Batch, y: Batch, keys: RecordKeys) -> Tensor:
        """The loss of each example, drawn as its gradient is."""
        module, loss_fn = self.network.module, self.network.loss_fn

        def run(xs: Batch, ys: Batch) -> Tensor:
            return per_example_losses(loss_fn, module(*_args(xs)), xs, ys)

        device = theta_device(params)
        with with_parameters(module, params):
            whole: tuple[Tensor] | None = self._together(lambda: run(x, y), keys, device)
            if whole is not None:
                return whole[0]
            return torch.cat([run(select(x, row), select(y, row)) for row in self._apart(keys, device)])

    def outputs(self, args: tuple[Tensor, ...], keys: RecordKeys) -> Any:
        """The module's output with its own parameters, drawn as the gradient is."""
        module = self.network.module
        device = next(module.parameters()).device
        whole = self._together(lambda: module(*args), keys, device)
        if whole is not None:
            return whole[0]
        return joined([module(*select(args, row)) for row in self._apart(keys, device)])

    def _together(self, run: Callable[[], Any], keys: RecordKeys, device: torch.device) -> tuple[Any] | None:
        """What a forward pass of the batch gives, if its draws can be given to its rows."""
        if self.draws != "none" and (self.draws != "rows" or self.plan is None):
            return None
        before = torch_generator(device)
        try:
            with self._drawing(keys, device)():
                result = run()
        except UnplannedDraw:
            return None
        return (result,) if torch.equal(before, torch_generator(device)) else None

    def _apart(self, keys: RecordKeys, device: torch.device) -> Iterator[slice]:
        """Row after row, each within the context of its own draws."""
        for i in range(len(keys.indices)):
            with _seeded(keys, i, None if self.draws == "generator" else device):
                yield slice(i, i + 1)


@contextmanager
def _seeded(keys: RecordKeys, row: int, device: torch.device | None) -> Iterator[Any]:
    """Row ``row`` draws by its own stream (on ``device``), or by the generators, seeded for it."""
    words = keys.draws[row : row + 1]
    with preserved():
        seed_generators(int(words[0]))
        if device is None:
            yield None
        else:
            with RecordDraws(words, None, device) as draws:
                yield draws


def theta_device(params: dict[str, Tensor]) -> torch.device:
    """Where the parameters are."""
    return next(iter(params.values())).device


def joined(parts: list[Any]) -> Any:
    """One output of the outputs of consecutive parts."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(tensors_of(part) for part in parts), strict=True)
    return refilled(parts[0], iter([torch.cat(pieces) for pieces in columns]))


def _args(x: Batch) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x
