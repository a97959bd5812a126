"""Local SGD of a module's clients: many of one shape together where vmap can run them, else one after the other.

Clients that train together have parameters of their own, stacked; one forward pass under vmap gives each client's
mean loss, and one backward pass all their gradients. What a module could keep between clients is put back before
every step (:mod:`quietgrad.torch.networks.program_state`), and code that would see several clients at once ends the
pass, as it does for records. Whether clients run together is decided by the module, never by a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, vmap

from quietgrad.core.errors import DataError
from quietgrad.core.session.queries import Batch, Indices, Regularizer
from quietgrad.tables.privacy_units import GroupIndex
from quietgrad.tables.queries.local_update import LocalBatches, LocalTraining
from quietgrad.torch.networks.gradients import synthetic_like
from quietgrad.torch.networks.one_record import RecordProgram, is_out_of_memory
from quietgrad.torch.networks.randomness import RecordSeeds, seed_generators
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import PyTree, mapped, refilled, tensors_of

if TYPE_CHECKING:
    from quietgrad.torch.networks.module import ModuleObjective

_CLIENTS = 32  # that train together at most
_Params = dict[str, Tensor]


def local_updates(
    objective: ModuleObjective, batch: Batch, clients: GroupIndex, params: Tensor, training: LocalTraining
) -> Iterator[Tensor]:
    """θ_local − θ of the clients, some at a time; one row each."""
    batches = LocalBatches.of(clients, batch.key, training.batch_size)
    if not len(batches):
        return
    seeds = RecordSeeds.of(batch.key, batches.rows[batches.starts[:-1]])  # a client's word is its first record's
    trainer = _Trainer(objective, params, training)
    most = trainer.clients_at_once()
    sizes = np.minimum(np.diff(batches.starts), training.batch_size)
    for size in np.unique(sizes).tolist():  # clients of one shape together
        alike = np.flatnonzero(sizes == size)
        for some in seeds.rows(alike).passes(most):
            mine = alike[some]
            yield trainer.updates(batch, batches.chosen(mine), seeds.rows(mine))


class _Trainer:
    """Trainer of the clients of one release, from θ."""

    def __init__(self, objective: ModuleObjective, params: Tensor, training: LocalTraining) -> None:
        self.engine, self.training, self.theta = objective.engine, training, params.detach()
        self.objective = objective

    def clients_at_once(self) -> int:
        """Return how many clients train together, by the memory for parameters, gradients and their updates."""
        numbers = 6 * self.engine.dim
        return max(1, min(_CLIENTS, int(self.engine.memory_budget // (numbers * 4))))

    def updates(self, batch: Batch, batches: LocalBatches, seeds: RecordSeeds) -> Tensor:
        groups = batch.records.read(RecordSeeds(seeds.key, batches.rows))
        groups = [RecordGroup(group.rows, self.engine.on_device(group.record)) for group in groups]
        program = self._program(groups[0].record)
        if len(batches) > 1 and len(groups) == 1 and program.alone is None and not program.draws:
            try:
                return self._together(program, groups[0].record, batches, seeds)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if is_out_of_memory(error):
                    raise
                # One client's records may have raised it, and the others do not answer for that.
        rows = [self._alone(program, groups, batches, seeds, number) for number in range(len(batches))]
        return torch.stack(rows)

    def _program(self, record: PyTree) -> RecordProgram:
        """The program, after it ran once on a synthetic batch: what cannot train at all is refused here."""
        program = self.engine.try_out(mapped(record, lambda tensor: tensor[:1])).program
        if self.objective.trains_in_batches is None:
            synthetic = mapped(synthetic_like(record, "few"), lambda tensor: tensor.flatten(0, 1))
            try:
                with program.apart(self._leaves(1), RecordSeeds(bytes(32), np.arange(1))), torch.enable_grad():
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

    def _leaves(self, copies: int) -> _Params:
        """Parameters of the module, stacked for several clients, or as they are for one."""
        views = self.engine.views(self.theta)
        if copies == 1:
            return {name: view.clone().requires_grad_() for name, view in views.items()}
        return {name: view.expand(copies, *view.shape).clone().requires_grad_() for name, view in views.items()}

    def _loss(self, record: PyTree) -> Tensor:
        value: Tensor = self.engine.loss_of.mean(record)
        return value

    def _together(
        self, program: RecordProgram, record: PyTree, batches: LocalBatches, seeds: RecordSeeds
    ) -> Tensor:
        """One row per client, all steps of all of them at once."""
        leaves, names = self._leaves(len(batches)), self.engine.names
        tensors = [tensor.flatten(0, 1) for tensor in tensors_of(record)]

        def loss(own: list[Tensor], given: list[Tensor]) -> Tensor:
            with program.places.holding(dict(zip(names, own, strict=True))):
                return self._loss(refilled(record, iter(given)))

        with program.apart({}, seeds, together=True), torch.enable_grad():
            for number in range(self.training.steps):
                program.state.begin_pass()  # what a step kept is of all clients together: no later one finds it
                places = torch.from_numpy(batches.step(number)[0])
                given = [tensor[places.to(tensor.device)] for tensor in tensors]
                held = [leaves[name] for name in names]
                losses = vmap(loss, randomness="error")(held, given)
                gradients = torch.autograd.grad(losses.sum(), held, allow_unused=True)
                leaves = self._moved(leaves, gradients)
        return self._flat(leaves, len(batches)) - self.theta

    def _alone(
        self, program: RecordProgram, groups: list[RecordGroup], batches: LocalBatches, seeds: RecordSeeds, row: int
    ) -> Tensor:
        """One client by plain autograd; zero beyond the clip if its records make the module fail."""
        leaves, mine = self._leaves(1), seeds.rows(np.array([row]))
        one = batches.chosen(np.array([row]))
        offset = int(batches.starts[row])
        try:
            with program.apart({}, mine), torch.enable_grad():
                seed_generators(int(mine.draws[0]))  # what it draws follows from its own secret word
                for number in range(self.training.steps):
                    program.state.begin_pass()
                    with program.places.holding(leaves):
                        loss = self._mixed_loss(groups, one.step(number)[0][0] + offset)
                    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                    leaves = self._moved(leaves, gradients)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if is_out_of_memory(error) or program.raises:
                raise
            # Counted as zero: an exception that ended the run would tell that the client is there.
            return torch.full_like(self.theta, torch.nan)
        return self._flat(leaves, 1)[0] - self.theta

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
            stacked = next(iter(leaves.values())).dim() > next(iter(self.engine.views(self.theta).values())).dim()
            flat = self._flat(leaves, len(next(iter(leaves.values()))) if stacked else 1)
            penalty = regularizer.gradient(flat.T).T
            for name, slot in self.engine.slices.items():
                moved[name] = moved[name] - rate * penalty[:, slot].reshape(moved[name].shape)
        return {name: value.requires_grad_() for name, value in moved.items()}

    def _flat(self, leaves: Mapping[str, Tensor], count: int) -> Tensor:
        return torch.cat([leaves[name].detach().reshape(count, -1) for name in self.engine.names], 1)


def _penalizes(regularizer: Regularizer) -> bool:
    return regularizer.smoothness > 0.0
