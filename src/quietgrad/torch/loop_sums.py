"""The sum of a loop's step: from the gradients that arrived at the model's outputs to clipped contributions.

The gradient of fᵢ with respect to θ is that of ⟨b_i, output_i(θ)⟩, b_i being what ``loss.backward()`` left at the
outputs of record i. What is summed is a query like any other; :mod:`quietgrad.torch.own_loop` has it released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quietgrad.objectives.base import Batch, NoRegularizer, Rule
from quietgrad.objectives.networks.checks import (
    made_up,
    refuse_changed_buffers,
    refuse_mixing_layers,
    refuse_other_types,
)
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.examples import bytes_of, leaves_of, read_record
from quietgrad.objectives.networks.module import private_log
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.randomness import RecordKeys, preserved
from quietgrad.objectives.networks.tape import mapped, select, tensors_of
from quietgrad.objectives.networks.ways import Recorded, joined
from quietgrad.torch.call_layout import CallLayout
from quietgrad.torch.clip_rules import FlatClip
from quietgrad.torch.loss_replay import Given
from quietgrad.torch.rows import Owners, plain

if TYPE_CHECKING:
    from quietgrad.torch.own_loop import PrivateLoop

__all__ = [
    "FromOutputs",
    "OutputGradients",
    "Piece",
    "not_by_rows",
    "outputs_of",
    "pairing",
    "try_calls",
    "versions_of",
]


@dataclass(eq=False)
class Piece:
    """One forward pass: inputs, output leaves, whose rows they are, and the secrets its dropout masks came from."""

    args: tuple[Tensor, ...]
    outputs: list[Given]
    owners: Owners
    keys: RecordKeys
    layout: CallLayout
    recorded: Recorded | None = None
    state: tuple[int, ...] = ()  # of the parameters: a change in place makes the recording another function's

    @property
    def leaves(self) -> list[Tensor]:
        return [output.value for output in self.outputs]

    @property
    def has_gradient(self) -> bool:
        return any(leaf.grad is not None for leaf in self.leaves)


class FromOutputs:
    """Σ clip_C(∇fᵢ(θ)) from the gradients that arrived at the outputs."""

    def __init__(
        self,
        loop: PrivateLoop,
        theta: Tensor,
        pieces: list[Piece],
        multiplier: float,
        persons: Persons | None = None,
    ) -> None:
        self.loop = loop
        self.theta = theta
        self.pieces = pieces
        self.multiplier = multiplier
        self.persons = persons

    @property
    def bound(self) -> float:
        return self.loop.rule.bound(self.multiplier)

    def dim(self, records: Any) -> int:
        return self.loop.engine.dim + self.loop.rule.extra

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        out = torch.as_tensor(out)  # of an array: its own memory
        if self.persons is None:
            added = [self._add_piece(piece, out) for piece in self.pieces]
            finite = all(added)
        else:
            norms = list(self._people(self.persons, out))
            finite = all(bool(each.isfinite().all()) for each in norms)
        if not finite:
            private_log.info("contributions of a release were not finite and counted as zero")

    def _add_piece(self, piece: Piece, out: Tensor) -> bool:
        loop, grads = self.loop, self._grads(piece)
        engine = loop._engine(piece.layout)
        with piece.layout.of(engine.module):
            if self._add_recorded(engine, piece, grads, out):
                return True
            norms = loop.rule.add(engine, self.theta, piece.args, grads, out, piece.keys, self.multiplier)
        return bool(norms.isfinite().all())

    def _grads(self, piece: Piece) -> tuple[Tensor, ...]:
        # A mean over the piece's examples is undone by its own length, whatever that is.
        scale = float(len(piece.owners.places)) if self.loop.mean_reduced else 1.0
        return tuple(
            torch.zeros_like(leaf) if leaf.grad is None else plain(leaf.grad) * scale for leaf in piece.leaves
        )

    def _people(self, persons: Persons, out: Tensor) -> Iterator[Tensor]:
        """Everyone once: who is in one piece from that piece, others from all theirs before they are clipped."""
        loop = self.loop
        assert type(loop.rule) is FlatClip  # no other knows people
        rule = Rule.gradient(loop.rule.clip)
        owners = [persons.owners[piece.owners.places.numpy()] for piece in self.pieces]
        everyone, counts = np.unique(np.concatenate([np.unique(own) for own in owners]), return_counts=True)
        several = everyone[counts > 1]
        for piece, own in zip(self.pieces, owners, strict=True):
            rows = np.flatnonzero(~np.isin(own, several))
            if len(rows):
                people, number = np.unique(own[rows], return_inverse=True)
                whose = Persons(number.reshape(-1), persons.factors[people])
                engine = loop._engine(piece.layout)
                with piece.layout.of(engine.module):
                    if len(rows) == len(own) and self._add_recorded(engine, piece, self._grads(piece), out, whose):
                        continue
                    x, y, keys = self._rows(piece, rows)
                    yield engine.add((self.theta,), x, y, rule, out, keys, whose)
        for person in several.tolist():
            whole = loop.engine.nothing(rule)
            for piece, own in zip(self.pieces, owners, strict=True):
                if len(rows := np.flatnonzero(own == person)):
                    x, y, keys = self._rows(piece, rows)
                    engine = loop._engine(piece.layout)
                    with piece.layout.of(engine.module):
                        engine.add_unclipped((self.theta,), x, y, rule, whole, keys)
            yield loop.engine.add_whole(whole, persons.factors[person], rule, out)

    def _rows(self, piece: Piece, rows: Any) -> tuple[Any, Any, RecordKeys]:
        where = torch.from_numpy(rows)
        return select(piece.args, where), select(self._grads(piece), where), piece.keys.rows(rows)

    def _add_recorded(
        self,
        engine: PerExampleEngine,
        piece: Piece,
        grads: tuple[Tensor, ...],
        out: Tensor,
        persons: Persons | None = None,
    ) -> bool:
        recorded, piece.recorded = piece.recorded, None
        if recorded is None:
            return False
        rule = self.loop.rule
        assert type(rule) is FlatClip
        if piece.state != versions_of(self.loop._params().values()):
            return False
        return engine.add_recorded(recorded, grads, rule.clip, out, persons)


def versions_of(params: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(param._version for param in params)


def outputs_of(engine: PerExampleEngine, args: tuple[Tensor, ...], keys: RecordKeys) -> Any:
    """The module's output, drawn as the gradient will be; in passes of the engine's micro-batch."""
    count = len(keys.indices)
    if count == 0:
        # Not every module takes no rows at all; of one that is nobody's no row is left.
        with preserved():
            nobody = engine.module(*(arg.new_zeros((1, *arg.shape[1:])) for arg in args))
        return mapped(nobody, lambda tensor: tensor[:0])
    if not engine.planned:
        try_calls(engine, args)
    way = engine.way(args, ())
    size = engine.micro_batch or count
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    return joined([way.outputs(tuple(arg[part] for arg in args), keys.rows(part)) for part in parts])


def try_calls(engine: PerExampleEngine, args: tuple[Tensor, ...]) -> None:
    """Try the module on made-up examples: their outputs must come first, and be their own."""
    made, _ = made_up(args, args, 0)
    assert isinstance(made, tuple)
    tried: list[Any] = []

    def run() -> None:
        try:
            tried.extend(engine.module(*select(made, slice(0, count))) for count in (3, 4))
        except (RuntimeError, TypeError) as error:
            refuse_other_types(engine.module, made, error)
            raise

    refuse_mixing_layers(engine.module)
    with preserved(), torch.no_grad():
        refuse_changed_buffers(engine.module, run)
    for count, output in zip((3, 4), tried, strict=True):
        for value in tensors_of(output):
            if value.is_floating_point() and (value.dim() < 1 or len(value) != count):
                raise ValueError(not_by_rows(value))
    engine.way(made, tuple(t for t in tensors_of(tried[1]) if t.is_floating_point()))


def not_by_rows(value: Tensor) -> str:
    if value.dim() == 0:
        return (
            "the model returned one number for the whole batch, a loss or a statistic in which examples weigh each "
            "other: leave the labels out of the call and make the loss of the outputs, example by example "
            "(qt.causal_lm_loss for language models), or use DPTrainer."
        )
    return (
        f"the model returned shape {tuple(value.shape)} for a batch of examples: its outputs must have examples "
        "first (batch_first), one row per example."
    )


def pairing(output: Any, grads: tuple[Tensor, ...]) -> Tensor:
    """⟨b_i, output_i⟩ for each example: its gradient in θ is that of the loss whose output gradients are b."""
    outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    # Alone an example may come without its axis, if the module squeezes its output: all of it is its own.
    outputs = [o.reshape(g.shape) if len(g) == 1 else o for o, g in zip(outputs, grads, strict=True)]
    products = [(o * g).reshape(len(o), -1).sum(1) for o, g in zip(outputs, grads, strict=True)]
    return torch.stack(products).sum(0)


@dataclass(frozen=True, eq=False)
class LoopRecords:
    """The records of a loop: counted, and known to a ledger by their content; only the loader reads them."""

    dataset: Any
    dim: int

    def __len__(self) -> int:
        return len(self.dataset)

    def contents(self) -> Iterator[bytes | memoryview]:
        """All that is known here of what a sum depends on."""
        return self.fingerprint_parts()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The records as bytes, read as if nothing were drawn for them."""
        with preserved():
            for index in range(len(self)):
                for value in leaves_of(read_record(self.dataset, index, 0)):
                    yield from bytes_of(value)


class OutputGradients:
    """The objective of a loop: its records are counted here and read by the loader."""

    def __init__(self, engine: PerExampleEngine) -> None:
        self.engine = engine
        self.regularizer = NoRegularizer()
        self.silent_batches = False

    def prepare(self, data: Any) -> LoopRecords:
        """The data set, whatever its samples are; the loader has been checked."""
        return LoopRecords(data, self.engine.dim)

    def initial(self, records: Any) -> Tensor:
        """The module's parameters."""
        return self.engine.flatten(dict(self.engine.module.named_parameters()))
