"""Local SGD of a module's clients, one after the other, each by plain autograd on its own records alone.

A client's update is a function of its own records, θ and its secret word, to the last bit. Clients that train
together under vmap round each other: a stacked product may round a client otherwise beside others, and training can
expand a last bit until it decides where a clipped update points. What a module could keep is put back
before every step (:mod:`quietgrad.torch.networks.program_state`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quietgrad.core.errors import DataError
from quietgrad.core.session.queries import Batch, Indices, Regularizer
from quietgrad.tables.privacy_units import GroupIndex
from quietgrad.tables.queries.local_update import LocalBatches, LocalTraining
from quietgrad.torch.networks.gradients import synthetic_like
from quietgrad.torch.networks.one_record import RecordProgram, is_out_of_memory
from quietgrad.torch.networks.randomness import RecordSeeds, seed_generators
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import PyTree, mapped

if TYPE_CHECKING:
    from quietgrad.torch.networks.module import ModuleObjective

_Params = dict[str, Tensor]


def local_updates(
    objective: ModuleObjective, batch: Batch, clients: GroupIndex, params: Tensor, training: LocalTraining
) -> Iterator[Tensor]:
    """θ_local − θ of the clients, one at a time; one row each."""
    batches = LocalBatches.of(clients, batch.key, training.batch_size)
    if not len(batches):
        return
    seeds = RecordSeeds.of(batch.key, batches.rows[batches.starts[:-1]])  # a client's word is its first record's
    trainer = _Trainer(objective, params, training)
    for number in range(len(batches)):
        one = np.array([number])
        yield trainer.update(batch, batches.chosen(one), seeds.rows(one))[None]


class _Trainer:
    """Trainer of the clients of one release, from θ."""

    def __init__(self, objective: ModuleObjective, params: Tensor, training: LocalTraining) -> None:
        self.engine, self.training, self.theta = objective.engine, training, params.detach()
        self.objective = objective

    def update(self, batch: Batch, batches: LocalBatches, seeds: RecordSeeds) -> Tensor:
        """Train the one client of ``batches``; its records are read by themselves, so that no other's are near."""
        groups = batch.records.read(RecordSeeds(seeds.key, batches.rows))
        groups = [RecordGroup(group.rows, self.engine.on_device(group.record)) for group in groups]
        return self._trained(self._program(groups[0].record), groups, batches, seeds)

    def _program(self, record: PyTree) -> RecordProgram:
        """The program, after it ran once on a synthetic batch: what cannot train at all is refused here."""
        program = self.engine.try_out(mapped(record, lambda tensor: tensor[:1])).program
        if self.objective.trains_in_batches is None:
            synthetic = mapped(synthetic_like(record, "few"), lambda tensor: tensor.flatten(0, 1))
            try:
                with program.apart(self._leaves(), RecordSeeds(bytes(32), np.arange(1))), torch.enable_grad():
                    self._loss(synthetic)
            except DataError:
                raise
            except Exception as error:
                raise DataError(
                    f"model or loss failed on a batch of several records ({type(error).__name__}): local training "
                    "calls both with batches of one client's records. Nothing was released."
                ) from None
            self.objective.trains_in_batches = True
        return program

    def _leaves(self) -> _Params:
        """The module's parameters at θ, to be differentiated by."""
        return {name: view.clone().requires_grad_() for name, view in self.engine.views(self.theta).items()}

    def _loss(self, record: PyTree) -> Tensor:
        value: Tensor = self.engine.loss_of.mean(record)
        return value

    def _trained(
        self, program: RecordProgram, groups: list[RecordGroup], batches: LocalBatches, seeds: RecordSeeds
    ) -> Tensor:
        """One client by plain autograd; NaN, which counts as zero, if its records make the module fail."""
        leaves = self._leaves()
        try:
            with program.apart({}, seeds), torch.enable_grad():
                seed_generators(int(seeds.draws[0]))  # what it draws follows from its own secret word
                for number in range(self.training.steps):
                    program.state.begin_pass()
                    with program.places.holding(leaves):
                        loss = self._mixed_loss(groups, batches.step(number)[0][0])
                    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                    leaves = self._moved(leaves, gradients)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if is_out_of_memory(error) or program.raises:
                raise
            # Counted as zero: an exception that ended the run would tell that the client is there.
            return torch.full_like(self.theta, torch.nan)
        return self._flat(leaves) - self.theta

    def _mixed_loss(self, groups: list[RecordGroup], places: Indices) -> Tensor:
        """The mean loss of the records at ``places``, which may be of several shapes."""
        parts = []
        for group in groups:
            inside = np.flatnonzero(np.isin(group.rows, places))
            if len(inside):
                where = torch.from_numpy(inside)
                record = mapped(group.record, lambda tensor: tensor[where.to(tensor.device)].flatten(0, 1))  # noqa: B023
                parts.append(self._loss(record) * (len(inside) / len(places)))
        return torch.stack(parts).sum()

    def _moved(self, leaves: Mapping[str, Tensor], gradients: tuple[Tensor | None, ...]) -> _Params:
        """After a step along the gradients and the regulariser's."""
        rate, regularizer = self.training.rate, self.training.regularizer
        moved = {
            name: (leaf if gradient is None else leaf - rate * gradient).detach()
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }
        if _penalizes(regularizer):
            penalty = regularizer.gradient(self._flat(leaves))
            for name, slot in self.engine.slices.items():
                moved[name] = moved[name] - rate * penalty[slot].reshape(moved[name].shape)
        return {name: value.requires_grad_() for name, value in moved.items()}

    def _flat(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([leaves[name].detach().reshape(-1) for name in self.engine.names])


def _penalizes(regularizer: Regularizer) -> bool:
    return regularizer.smoothness > 0.0
