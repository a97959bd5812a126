"""A torch module as an objective: every algorithm of :mod:`quietgrad.methods` trains it unchanged.

The parameters are one flat vector θ; fᵢ(θ) is the loss of example i. Clipped sums come from the per-example engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import BaseObjective, Indices, NoRegularizer, Regularizer
from quietgrad.core.session.objectives import Batch as ReleaseBatch
from quietgrad.tables.privacy_units import GroupIndex
from quietgrad.tables.queries.local_update import LocalTraining
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.local_steps import local_updates
from quietgrad.torch.networks.pass_sizes import PassSizes
from quietgrad.torch.networks.randomness import RecordSeeds, preserved
from quietgrad.torch.networks.records import (
    Collate,
    Examples,
    Multiple,
    Padding,
    RecordGroup,
    as_padding,
    digest_of,
    examples_of,
)
from quietgrad.torch.networks.trees import ModuleState, mapped, name_of
from quietgrad.torch.networks.usable import Errors, LossFunction, modes_kept, uncompiled, warn_of_divided_weights
from quietgrad.torch.networks.vectors import UnitAssignment

_MOST_AT_ONCE = 1024  # examples per pass unless micro_batch says otherwise


class ModuleObjective(BaseObjective):
    """F(θ) = (1/n) Σᵢ loss(module_θ(xᵢ), yᵢ) + r(θ).

    Args:
        module: called with one record at a time.
        loss: called with one record's output; ``None`` if a loop calls the module.
        regularizer: a public term r.
        micro_batch: records per pass. A larger batch is a virtual one: its sums add up over passes.
        memory_budget, collate_fn, pad, views, errors: as in :func:`quietgrad.torch.fit`.

    >>> from quietgrad import Budget, DPSRM, minimize
    >>> objective = ModuleObjective(nn.Linear(3, 2), nn.CrossEntropyLoss())
    >>> data = torch.randn(200, 3), torch.randint(0, 2, (200,))
    >>> result = minimize(objective, data, DPSRM(steps=3, batch_size=20), budget=Budget(1.0, 1e-5))
    >>> result.params.shape
    torch.Size([8])
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        *,
        regularizer: Regularizer | None = None,
        micro_batch: int | None = None,
        memory_budget: float = 256e6,
        collate_fn: Collate | None = None,
        pad: int | Multiple | Padding | None = None,
        views: int = 1,
        errors: Errors = "zero",
    ) -> None:
        if errors not in ("zero", "raise"):
            raise ValueError(f"errors={errors!r}: must be 'zero' or 'raise'.")
        if isinstance(views, bool) or not isinstance(views, int) or views < 1:
            raise ValueError(f"views={views!r}: must be a whole number ≥ 1.")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: must be ≥ 1, or None.")
        warn_of_divided_weights(loss)
        self.pad = as_padding(pad)
        self.micro_batch = micro_batch or _MOST_AT_ONCE
        self.engine = PerExampleEngine(
            module, loss, memory_budget=memory_budget, raises=errors == "raise", micro_batch=self.micro_batch
        )
        self.regularizer: Regularizer = NoRegularizer() if regularizer is None else regularizer
        self.collate_fn = collate_fn
        self.views = views
        self.keeps_frozen = True
        """Whether frozen parameters stay in the module; else they are there for a pass, and known by digests."""
        self.client_sizes: dict[Any, PassSizes] = {}
        """How many clients train together, by the form of their records and the size of their steps."""
        self.trains_in_batches: bool | None = None
        """Whether module and loss were seen to take batches of several records; ``None`` before they were tried."""

    @property
    def module(self) -> nn.Module:
        """The module; its parameters stand still while θ moves, until :meth:`write_back`."""
        return self.engine.module

    @property
    def parameter_names(self) -> Sequence[str]:
        """The names of the trained parameters."""
        return self.engine.names

    def __repr__(self) -> str:
        # A hint for messages and for comparing processes. What a loss or a forward does is not in its name:
        # whether a replayed release is the same is decided by its sum.
        engine = self.engine
        loss = None if engine.loss is None else name_of(engine.loss)
        return (
            f"ModuleObjective({engine.module}, {loss}, {self.regularizer}, {engine.names}, {engine.dtype}, "
            f"micro_batch={self.micro_batch}, memory_budget={engine.memory_budget}, views={self.views})"
        )

    def prepare(self, data: object) -> Examples:
        """Check records, module and loss on synthetic records, before anything is reserved."""
        module = self.module
        kept = Tensor.detach if self.keeps_frozen else digest_of
        fixed = [kept(p) for p in module.parameters() if not p.requires_grad]
        examples = examples_of(data, self.engine.dim, self.collate_fn, self.pad, (*fixed, *module.buffers()))
        if self.engine.loss is not None:
            with preserved():
                (first,) = examples.read(RecordSeeds(bytes(32), np.array([0])))
            self.engine.try_out(first.record)
        return examples

    def initial(self, records: Examples) -> Tensor:
        return self.engine.flatten(dict(self.module.named_parameters()))

    def write_back(self, params: Tensor) -> None:
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.engine.unflatten(params.to(self.engine.device)).items():
                own[name].copy_(value)

    def add(self, batch: ReleaseBatch, points: Sequence[Tensor], rule: ClippingRule, out: Tensor) -> None:
        """out += Σ over the batch of what the rule makes of each record's gradients.

        Passes are added up in float64 with compensation: with ``out`` in float64 one record moves the sum by its
        own contribution and by what it changes in the roundings of one pass.
        """
        rows = batch_rows(batch)
        units = None if self.views == 1 else UnitAssignment.numbered(np.arange(len(rows)), mean=True)
        self.add_rows(batch, rows, units, points, rule, out)

    def add_people(
        self, batch: ReleaseBatch, groups: GroupIndex, points: Sequence[Tensor], rule: ClippingRule, out: Tensor
    ) -> None:
        """out += Σ over units of what the rule makes of the mean or sum of their records' gradients."""
        rows, starts = groups.flat()
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        units = UnitAssignment.numbered(owners, mean=groups.mean) if len(rows) else None
        self.add_rows(batch, rows, units, points, rule, out)

    def add_rows(
        self, batch: ReleaseBatch, rows: Indices, units: UnitAssignment | None, points: Sequence[Tensor],
        rule: ClippingRule, out: Tensor, *, engine: PerExampleEngine | None = None,
        read: Callable[[RecordSeeds], Sequence[RecordGroup]] | None = None,
    ) -> None:  # fmt: skip
        """out += the sum over these records, or over the units that they are of.

        Units are taken some at a time, each with all its records; a record is to its views what a unit is.
        ``engine`` may run another program on the same module, and ``read`` say what it is called with.
        """
        engine, read = engine or self.engine, read or batch.records.read
        if rule.bound == 0.0 or not len(rows):
            return
        seeds, total = RecordSeeds.of(batch.key, rows), CompensatedSum(out)
        if units is not None and self.views > 1:
            seeds = seeds.views(self.views)
            units = UnitAssignment(np.repeat(units.owners, self.views), units.factors / self.views)
        most = self.micro_batch
        for some in seeds.passes(most) if units is None else units.passes(seeds, most):
            mine, whose = (some, None) if units is None else units.some(some)
            part = seeds.rows(mine)
            with total.term() as term:
                engine.add(points, read(part), rule, term, part, whose)
        total.finish()

    def local_updates(
        self, batch: ReleaseBatch, clients: GroupIndex, params: Tensor, training: LocalTraining
    ) -> Iterator[Tensor]:
        """θ_local − θ of clients that train on their own records, some at a time; one row each.

        Local training is ordinary SGD: module and loss are called with batches of one client's records.
        """
        return local_updates(self, batch, clients, params, training)

    def row_losses(self, batch: ReleaseBatch, params: Tensor) -> npt.NDArray[np.float64]:
        """fᵢ(θ) of each record of the batch, in its order."""
        losses = np.empty(len(batch_rows(batch)))
        for some, part in self.passes(batch):
            losses[some] = self.engine.losses(params, batch.records.read(part), part).double().cpu().numpy()
        return losses

    def loss_sum(self, batch: ReleaseBatch, params: Tensor, bound: float) -> float:
        """Σ min(fᵢ(θ), bound), each term in [0, bound]; a loss that is not a number counts as the bound."""
        losses = np.nan_to_num(self.row_losses(batch, params), nan=bound)
        return float(losses.clip(0.0, bound).sum())

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the module is in evaluation mode. Each layer's mode is restored afterwards."""
        return modes_kept(self.module, training=False)

    def risk(self, records: Examples, params: Tensor) -> float:
        """F(θ) in evaluation mode, with the regulariser: not private."""
        with self.evaluating():
            losses = self.row_losses(ReleaseBatch(records, None, bytes(32)), params)
        return float(losses.mean()) + self.regularizer.value(params)

    def risk_gradient(self, records: Examples, params: Tensor) -> Tensor:
        """∇F(θ) without clipping, in evaluation mode: not private."""
        total = torch.zeros_like(params)
        with self.evaluating():
            self.add(ReleaseBatch(records, None), (params,), ClippingRule.gradient(float("inf")), total)
        total /= len(records)
        total += self.regularizer.gradient(params)
        return total

    def hessian_product(self, records: Examples, params: Tensor, vector: Tensor) -> Tensor:
        """∇²F(θ)·v in evaluation mode, with the regulariser: not private."""
        return _hessian_product(self, records, params, vector)

    def passes(self, batch: ReleaseBatch) -> Iterator[tuple[Indices, RecordSeeds]]:
        """Positions in the batch of the records of each pass, and their seeds."""
        seeds = RecordSeeds.of(batch.key, batch_rows(batch))
        for some in seeds.passes(self.micro_batch) if len(seeds.indices) else ():
            yield some, seeds.rows(some)


def objective(
    module: nn.Module,
    loss: LossFunction,
    *,
    pad: int | Multiple | Padding | None = None,
    regularizer: Regularizer | None = None,
    collate_fn: Collate | None = None,
    micro_batch: int | None = None,
    memory_budget: float = 256e6,
    views: int = 1,
) -> ModuleObjective:
    """Return a torch module and its loss as an objective for ``minimize``, ``simulate`` and federations.

    Args:
        module: called with one record at a time; its trainable parameters are trained.
        loss: ``loss(output, target)`` or ``loss(model, *record)``, of one record.
        pad, regularizer, collate_fn, micro_batch, memory_budget, views: as in :func:`quietgrad.torch.fit`.

    >>> from quietgrad import Budget, DPSGD
    >>> from quietgrad.federation import Party, simulate
    >>> X, y = torch.randn(60, 3), torch.randint(0, 2, (60,))
    >>> parties = [Party((X[::2], y[::2]), n_public=30), Party((X[1::2], y[1::2]), n_public=30)]
    >>> trained = simulate(DPSGD(steps=3, batch_size=10), objective(nn.Linear(3, 2), nn.CrossEntropyLoss()),
    ...                    parties, budget=Budget(1.0, 1e-5), trust="secure", secure="masks")
    >>> trained.params.shape, trained.privacy.is_private
    (torch.Size([8]), True)
    """
    return ModuleObjective(
        uncompiled(module), loss, pad=pad, regularizer=regularizer, collate_fn=collate_fn, micro_batch=micro_batch,
        memory_budget=memory_budget, views=views,
    )  # fmt: skip


def batch_rows(batch: ReleaseBatch) -> Indices:
    return np.arange(len(batch.records)) if batch.indices is None else batch.indices


class CompensatedSum:
    """Adds vectors in float64 to ``out`` and keeps what each addition rounds away (Neumaier 1974).

    >>> out = torch.zeros(1, dtype=torch.float64)
    >>> total = CompensatedSum(out)
    >>> for number in (1e20, 1.0, -1e20):
    ...     with total.term() as term:
    ...         term += number
    >>> total.finish()
    >>> out
    tensor([1.], dtype=torch.float64)
    """

    def __init__(self, out: Tensor) -> None:
        self._out = out
        self._high = out if out.dtype == torch.float64 else torch.zeros_like(out, dtype=torch.float64)
        self._low: Tensor | None = None
        self._begun = False

    @contextmanager
    def term(self) -> Iterator[Tensor]:
        """Yield the vector to which the next term is added.

        The first time it is the sum itself, since most samples are one pass.
        """
        if not self._begun:
            self._begun = True
            yield self._high
            return
        term = torch.zeros_like(self._high)
        yield term
        total = self._high + term
        part = total - self._high
        lost = (self._high - (total - part)) + (term - part)
        self._low = lost if self._low is None else self._low + lost
        self._high.copy_(total)

    def finish(self) -> None:
        if self._low is not None:
            self._high += self._low
        if self._high is not self._out:
            self._out += self._high


def _hessian_product(objective: ModuleObjective, records: Examples, params: Tensor, vector: Tensor) -> Tensor:
    """∇²F(θ)·v in evaluation mode, with the regulariser: v·∇ of the gradient, record by record.

    >>> from torch import nn
    >>> module = nn.Linear(2, 1, bias=False)
    >>> loss = ModuleObjective(module, lambda out, y: 0.5 * (out[:, 0] - y) ** 2)
    >>> records = loss.prepare((torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2)))
    >>> loss.hessian_product(records, torch.zeros(2), torch.ones(2))
    tensor([0.5000, 2.0000])
    """
    engine = objective.engine
    total, theta = torch.zeros_like(params), params.detach().clone().requires_grad_()
    state = ModuleState(objective.module)
    with torch.enable_grad(), objective.evaluating():
        for _, part in objective.passes(ReleaseBatch(records, None, bytes(32))):
            for group in records.read(part):
                for k in range(len(group.rows)):
                    record = mapped(engine.on_device(group.record), itemgetter(k))

                    with state.holding(engine.unflatten(theta)):
                        value = engine.loss_of(record)
                    (slope,) = torch.autograd.grad(value, theta, create_graph=True)
                    total += _derivative(slope, theta, vector)
        total /= len(records)
        total += _derivative(objective.regularizer.gradient(theta), theta, vector)
    return total


def _derivative(slope: Tensor, theta: Tensor, vector: Tensor) -> Tensor:
    """∇(slope·v), zero where the slope does not depend on θ."""
    if not slope.requires_grad:
        return torch.zeros_like(vector)
    (found,) = torch.autograd.grad(slope @ vector, theta, materialize_grads=True)
    return found
