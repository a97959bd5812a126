"""Local SGD of a module's clients: many of one size together where vmap can run them, else each by itself.

Clients that train together have parameters of their own, stacked. One forward pass under vmap gives each client's
mean loss, and one backward pass all their gradients. Training may expand a last bit until it decides where a
clipped update points, so a client must have the same bits whoever trains beside it: passes of clients have sizes
for which that was seen, as passes of records have (:mod:`quietgrad.torch.networks.pass_sizes`). A client that
cannot train beside copies of itself trains by plain autograd. What a module could keep is put back before every
step (:mod:`quietgrad.torch.networks.program_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, vmap

from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch, Indices, Regularizer
from quietgrad.tables.privacy_units import GroupIndex
from quietgrad.tables.queries.local_update import LocalBatches, LocalTraining
from quietgrad.torch.networks.one_record import RecordProgram, in_passes, is_out_of_memory
from quietgrad.torch.networks.pass_sizes import (
    SYNTHETIC,
    BitComparison,
    Fingerprint,
    Layout,
    PassSizes,
    form_of,
    joined,
    placed,
    synthetic_like,
    without_zeros,
)
from quietgrad.torch.networks.randomness import RecordSeeds, seed_generators
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import PyTree, carried, mapped, refilled, tensors_of
from quietgrad.torch.networks.vectors import Rows

if TYPE_CHECKING:
    from quietgrad.torch.networks.module import ModuleObjective

_CLIENTS = 32  # that train together at most
_TRIAL_STEPS = 2  # of synthetic clients: a gradient, and one at what the first step made
_Params = dict[str, Tensor]
_At = Callable[[int], list[Tensor]]
"""The records of a step, (clients, records, …)."""


def local_updates(
    objective: ModuleObjective, batch: Batch, clients: GroupIndex, params: Tensor, training: LocalTraining
) -> Iterator[Tensor]:
    """θ_local − θ of the clients, some at a time; one row each, those of clients of one size after the others'."""
    batches = LocalBatches.of(clients, batch.key, training.batch_size)
    if not len(batches):
        return
    seeds = RecordSeeds.of(batch.key, batches.rows[batches.starts[:-1]])  # a client's word is its first record's
    sizes = np.minimum(np.diff(batches.starts), training.batch_size)
    for size in np.unique(sizes).tolist():
        trainer = _Trainer(objective, params, training, batch, int(size))
        alike = np.flatnonzero(sizes == size)
        train = partial(trainer.updates, batches.chosen(alike), seeds.rows(alike))
        for _, rows in in_passes(np.arange(len(alike)), train):
            yield rows


class _Trainer:
    """Trainer of the clients of one release that take steps of one size, from θ."""

    def __init__(
        self, objective: ModuleObjective, params: Tensor, training: LocalTraining, batch: Batch, size: int
    ) -> None:
        self.objective, self.engine, self.training, self.theta = (
            objective,
            objective.engine,
            training,
            params.detach(),
        )
        self.batch, self.size = batch, size
        # By the memory for parameters, gradients and updates.
        self.most = max(1, min(_CLIENTS, int(self.engine.memory_budget // (24 * self.engine.dim))))
        self._next = self.most  # clients to try together: fewer after some could not be

    def updates(self, batches: LocalBatches, seeds: RecordSeeds, rows: Rows) -> Tensor | Rows:
        """Updates of the clients at ``rows``, or which of them to begin with."""
        if len(rows) > self._next:
            return np.arange(self._next)
        some, mine = batches.chosen(rows), seeds.rows(rows)
        groups = self.batch.records.read(RecordSeeds(mine.key, some.rows))
        groups = [RecordGroup(group.rows, self.engine.on_device(group.record)) for group in groups]
        program = self._program(groups[0].record)
        if program.alone is None and not program.draws:
            if len(groups) == 1:
                record = groups[0].record
                layout = self._layout(program, record, len(rows))
                if layout.size < len(rows):
                    return np.arange(layout.size)
                try:
                    program.state.admit(carried(record))
                    made = self._together(program, record, some, mine, layout)
                    self._next = min(self.most, 2 * self._next)
                    return made
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    if is_out_of_memory(error):
                        raise
            if len(rows) > 1:
                # One client's records may have raised it or have another shape: the others do not answer for that.
                self._next = len(rows) // 2
                return np.arange(self._next)
        elif len(rows) > 1:
            self._next = 1
            return np.arange(1)
        return self._alone(program, groups, some, mine)[None]

    def _layout(self, program: RecordProgram, record: PyTree, count: int) -> Layout:
        sizes = self.objective.client_sizes.setdefault((form_of(record), self.size), PassSizes())
        return sizes.fitting(count, self.most, partial(self._trial, program, record))

    def _trial(
        self, program: RecordProgram, record: PyTree, layout: Layout, clients: Rows, passes: int
    ) -> Fingerprint | None:
        """Fingerprint of synthetic clients who train together; ``None``: it cannot be relied on."""
        synthetic = tensors_of(synthetic_like(record, program.synthetic_numbers, SYNTHETIC * self.size))
        fingerprints, leaves = [], without_zeros(self.engine.views(self.theta))
        for first in range(passes):
            which = layout.rows(clients[(np.arange(layout.size) + first) % len(clients)])
            given = [placed(tensor.reshape(SYNTHETIC, self.size, *tensor.shape[2:]), which) for tensor in synthetic]
            keys, compared = RecordSeeds(bytes(32), which), BitComparison(which, layout.places)
            try:
                compared.add([self._steps(program, record, leaves, keys, lambda _: given, _TRIAL_STEPS)])  # noqa: B023
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                return None
            fingerprint = compared.fingerprint()
            if fingerprint is None:
                return None
            fingerprints.append(fingerprint)
        return joined(fingerprints)

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

    def _together(
        self, program: RecordProgram, record: PyTree, batches: LocalBatches, seeds: RecordSeeds, layout: Layout
    ) -> Tensor:
        """One row per client, all steps of all of them at once; the first one fills places that are left over."""
        clients = layout.rows(np.arange(len(batches)))
        tensors = [tensor.flatten(0, 1) for tensor in tensors_of(record)]

        def at(number: int) -> list[Tensor]:
            places = torch.from_numpy(batches.step(number)[0][clients])
            return [tensor[places.to(tensor.device)].contiguous() for tensor in tensors]

        views = self.engine.views(self.theta)
        trained = self._steps(program, record, views, seeds.rows(clients), at, self.training.steps)
        return trained[layout.first_places(len(batches))] - self.theta

    def _steps(
        self, program: RecordProgram, record: PyTree, start: Mapping[str, Tensor], seeds: RecordSeeds, at: _At,
        steps: int,
    ) -> Tensor:  # fmt: skip
        """The parameters of the clients of ``seeds`` after some steps from ``start``, one row each."""
        names, count = self.engine.names, len(seeds.indices)
        leaves = {name: view.expand(count, *view.shape).clone().requires_grad_() for name, view in start.items()}

        def loss(own: list[Tensor], given: list[Tensor]) -> Tensor:
            with program.places.holding(dict(zip(names, own, strict=True))):
                return self._loss(refilled(record, iter(given)))

        with program.apart({}, seeds, together=True), torch.enable_grad():
            for number in range(steps):
                program.state.begin_pass()  # what a step kept is of all clients together: no later one finds it
                held = [leaves[name] for name in names]
                losses = vmap(loss, randomness="error")(held, at(number))
                leaves = self._moved(leaves, torch.autograd.grad(losses.sum(), held, allow_unused=True))
        return self._flat(leaves, count)

    def _alone(
        self, program: RecordProgram, groups: list[RecordGroup], batches: LocalBatches, seeds: RecordSeeds
    ) -> Tensor:
        """One client by plain autograd; NaN, which counts as zero, if its records make the module fail."""
        leaves = self._leaves()
        try:
            program.state.admit([each for group in groups for each in carried(group.record)])
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
        return self._flat(leaves)[0] - self.theta

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
            count = sum(leaf.numel() for leaf in leaves.values()) // self.engine.dim
            flat = self._flat(leaves, count)
            penalty = torch.stack([regularizer.gradient(row) for row in flat])
            for name, slot in self.engine.slices.items():
                moved[name] = moved[name] - rate * penalty[:, slot].reshape(moved[name].shape)
        return {name: value.requires_grad_() for name, value in moved.items()}

    def _flat(self, leaves: Mapping[str, Tensor], count: int = 1) -> Tensor:
        return torch.cat([leaves[name].detach().reshape(count, -1) for name in self.engine.names], 1)


def _penalizes(regularizer: Regularizer) -> bool:
    return regularizer.smoothness > 0.0
