"""A torch module as an objective: every algorithm of :mod:`quietgrad.algorithms` trains it unchanged.

The parameters are one flat vector θ; fᵢ(θ) is the loss of example i. Clipped sums come from the per-example engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quietgrad.errors import DataError
from quietgrad.objectives.base import BaseObjective, Indices, NoRegularizer, Regularizer, Rule
from quietgrad.objectives.base import Batch as ReleaseBatch
from quietgrad.objectives.networks import passes
from quietgrad.objectives.networks.checks import made_up, refuse_changed_buffers, refuse_other_types
from quietgrad.objectives.networks.engine import PerExampleEngine, Strategy
from quietgrad.objectives.networks.examples import Collate, Examples, examples_of, probe
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.randomness import RecordKeys, preserved
from quietgrad.objectives.networks.tape import Batch, LossFunction, batch_length
from quietgrad.objectives.people import Groups

__all__ = ["ModuleObjective"]

_MOST_AT_ONCE = 1024  # examples per pass unless micro_batch says otherwise

# What one record did wrong is itself private: the log stays on this machine, and is silent unless someone who
# may see the data attaches a handler.
private_log = logging.getLogger("quietgrad.private")
private_log.addHandler(logging.NullHandler())
private_log.propagate = False


class ModuleObjective(BaseObjective):
    """F(θ) = (1/n) Σᵢ loss_fn(module_θ(xᵢ), yᵢ) + r(θ).

    Args:
        module: any torch module whose examples do not mix.
        loss_fn: loss_fn(output, y) → one loss per example, such as ``nn.CrossEntropyLoss(reduction="none")``.
        regularizer: a public term r.
        micro_batch: examples per pass. A larger batch is a virtual one: its sums add up over passes.
        memory_budget, strategy: as in :class:`~quietgrad.objectives.networks.engine.PerExampleEngine`.
        collate_fn: makes (x, y) of a list of samples.
        views: how often a record is looked at in a release, each time with other random numbers; the mean of these
            gradients is what is clipped.

    >>> from quietgrad import Budget, DPSRM, minimize
    >>> objective = ModuleObjective(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"))
    >>> data = torch.randn(200, 3), torch.randint(0, 2, (200,))
    >>> result = minimize(objective, data, DPSRM(steps=3, batch_size=20), budget=Budget(1.0, 1e-5))
    >>> result.params.shape
    torch.Size([8])
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction,
        *,
        regularizer: Regularizer | None = None,
        micro_batch: int | None = None,
        memory_budget: float = 256e6,
        strategy: Strategy = "auto",
        collate_fn: Collate | None = None,
        views: int = 1,
    ) -> None:
        if isinstance(views, bool) or not isinstance(views, int) or views < 1:
            raise ValueError(f"views={views!r}: must be a whole number ≥ 1.")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: must be ≥ 1, or None.")
        self.engine = PerExampleEngine(module, loss_fn, memory_budget=memory_budget, strategy=strategy)
        self.regularizer: Regularizer = NoRegularizer() if regularizer is None else regularizer
        self.micro_batch = micro_batch or _MOST_AT_ONCE
        self.collate_fn = collate_fn
        self.views = views

    @property
    def module(self) -> nn.Module:
        """The module; its parameters stand still while θ moves, until :meth:`write_back`."""
        return self.engine.module

    def __repr__(self) -> str:
        # A hint for messages and for comparing processes. What a loss or a forward does is not in its name:
        # whether a replayed release is the same is decided by its sum.
        engine = self.engine
        loss = getattr(engine.loss_fn, "__qualname__", None) or repr(engine.loss_fn)
        return (
            f"ModuleObjective({engine.module}, {loss}, {self.regularizer}, {engine.names}, {engine.dtype}, "
            f"micro_batch={self.micro_batch}, memory_budget={engine.memory_budget}, views={self.views})"
        )

    def prepare(self, data: Any) -> Examples:
        """Check examples, module and loss on made-up examples, before anything is reserved."""
        module = self.module
        fixed = [p.detach() for p in module.parameters() if not p.requires_grad]
        examples = examples_of(data, self.engine.dim, self.collate_fn, (*fixed, *module.buffers()))
        x, y = (self._on_device(part) for part in probe(examples))
        with preserved():
            refuse_changed_buffers(module, lambda: self._refuse_unused_parameters(*made_up(x, y, 0)))
            theta = self.initial(examples)
            self.engine.add((theta,), *made_up(x, y, 1), Rule.gradient(1.0), torch.zeros_like(theta))
        return examples

    def initial(self, records: Examples) -> Tensor:
        """The module's parameters as they are."""
        return self.engine.flatten(dict(self.module.named_parameters()))

    def write_back(self, params: Tensor) -> None:
        """Put θ into the module."""
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.engine.unflatten(params.to(self.engine.device)).items():
                own[name].copy_(value)

    def add(self, batch: ReleaseBatch, points: Sequence[Tensor], rule: Rule, out: Tensor) -> None:
        """out += Σ over the batch of what the rule makes of each example's gradients.

        Contributions are computed in the module's precision and added up in float64, passes with compensation. With
        ``out`` in float64 one record moves the sum by its own contribution and by what it changes in the roundings
        of one pass, however many passes there are.
        """
        if rule.bound == 0.0:
            return
        if self.views > 1:  # a record is to its views what a person is to their records
            rows = np.arange(len(batch.records)) if batch.indices is None else batch.indices
            alone = Groups(None, np.asarray(rows, np.int64), np.arange(len(rows) + 1), mean=True)
            self.add_people(batch, alone, points, rule, out)
            return
        broken, total = 0, CompensatedSum(out)
        for x, y, keys in batch.records.parts(batch.indices, self.micro_batch, batch.key):
            with total.term() as part:
                norms = self.engine.add(points, self._on_device(x), self._on_device(y), rule, part, keys)
            broken += int((~norms.isfinite()).any(1).sum())
        total.finish()
        if broken:
            private_log.info("%d contributions of a release were not finite and counted as zero", broken)

    def add_people(
        self, batch: ReleaseBatch, groups: Groups, points: Sequence[Tensor], rule: Rule, out: Tensor
    ) -> None:
        """out += Σ over people of what the rule makes of the mean or sum of their records' gradients.

        A person's records are in one pass. Those of someone who has more than ``micro_batch`` are added up over
        several before they are clipped. A record's gradient is the mean over its views.
        """
        rows, starts = groups.flat()
        if rule.bound == 0.0 or not len(rows):
            return
        total, keys = CompensatedSum(out), RecordKeys.of(batch.key, rows)
        persons = Persons.numbered(np.repeat(np.arange(len(starts) - 1), np.diff(starts)), mean=groups.mean)
        if self.views > 1:
            keys = keys.views(self.views)
            persons = Persons(np.repeat(persons.owners, self.views), persons.factors / self.views)

        def read(some: Indices) -> tuple[Batch, Batch]:
            x, y = batch.records.read(keys.rows(some))
            return self._on_device(x), self._on_device(y)

        norms = self.engine.add_people(points, read, rule, total.add, keys, persons, self.micro_batch)
        total.finish()
        broken = int((~norms.isfinite()).any(1).sum())
        if broken:
            private_log.info("%d contributions of a release were not finite and counted as zero", broken)

    def row_losses(self, batch: ReleaseBatch, params: Tensor) -> npt.NDArray[np.float64]:
        """fᵢ(θ) of each record of the batch, in its order."""
        rows = np.arange(len(batch.records)) if batch.indices is None else batch.indices
        losses, keys = np.empty(len(rows)), RecordKeys.of(batch.key, rows)
        for some in keys.passes(self.micro_batch) if len(rows) else ():
            part = keys.rows(some)
            x, y = (self._on_device(side) for side in batch.records.read(part))
            losses[some] = self.engine.losses(params, x, y, part).double().cpu().numpy()
        return losses

    def loss_sum(self, batch: ReleaseBatch, params: Tensor, bound: float) -> float:
        """Σ min(fᵢ(θ), bound), each term in [0, bound]; a loss that is not a number counts as the bound."""
        total = 0.0
        for losses in self._losses(batch.records, batch.indices, params, batch.key):
            total += float(losses.double().nan_to_num(nan=bound).clamp(0.0, bound).sum())
        return total

    def evaluating(self) -> AbstractContextManager[None]:
        """The module in evaluation mode."""
        return evaluating(self.module)

    def risk(self, records: Examples, params: Tensor) -> float:
        """F(θ) in evaluation mode, with the regulariser: not private."""
        with evaluating(self.module):
            total = sum(float(losses.double().sum()) for losses in self._losses(records, None, params))
        return total / len(records) + self.regularizer.value(params)

    def risk_gradient(self, records: Examples, params: Tensor) -> Tensor:
        """∇F(θ) without clipping, in evaluation mode: not private."""
        total = torch.zeros_like(params)
        with evaluating(self.module):
            self.add(ReleaseBatch(records, None), (params,), Rule.gradient(float("inf")), total)
        total /= len(records)
        total += self.regularizer.gradient(params)
        return total

    def _losses(
        self, records: Examples, indices: Indices | None, params: Tensor, key: bytes | None = bytes(32)
    ) -> Iterator[Tensor]:
        for x, y, keys in records.parts(indices, self.micro_batch, key):
            yield self.engine.losses(params, self._on_device(x), self._on_device(y), keys)

    def _on_device(self, batch: Batch) -> Batch:
        device = self.engine.device
        return batch.to(device) if isinstance(batch, Tensor) else tuple(part.to(device) for part in batch)

    def _refuse_unused_parameters(self, x: Batch, y: Batch) -> None:
        params = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            args = (x,) if isinstance(x, Tensor) else x
            try:
                output = self.module(*args)
            except (RuntimeError, TypeError) as error:
                refuse_other_types(self.module, args, error)
                raise
            losses = self.engine.loss_fn(output, y)
            if losses.shape != (batch_length(x),):
                raise DataError(
                    f"loss_fn returned shape {tuple(losses.shape)} for {batch_length(x)} examples: it must return "
                    "one loss per example. Do not average or sum over the batch: use reduction='none'."
                )
            gradients: Sequence[Tensor | None] = [None] * len(params)
            if losses.requires_grad:
                gradients = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
        unused = [name for name, gradient in zip(params, gradients, strict=True) if gradient is None]
        if unused:
            raise DataError(
                f"parameter {unused[0]!r} has no gradient: the loss does not depend on it, and noise alone would "
                "move it. Freeze it with requires_grad_(False), or remove it."
            )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each layer as it was."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


class CompensatedSum:
    """Adds vectors in float64 to ``out`` and keeps what each addition rounds away (Neumaier 1974).

    Its error is one rounding of the result, however many terms there are. :meth:`finish` ends it.

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
        """What the next term is to be added to: the sum itself the first time, since most samples are one pass."""
        if not self._begun:
            self._begun = True
            yield self._high
            return
        part = torch.zeros_like(self._high)
        yield part
        self.add(part)

    def add(self, term: Tensor) -> None:
        """Add one vector in float64."""
        self._begun = True
        if self._low is None:
            self._low = torch.zeros_like(self._high)
        if passes.takes(term) and passes.takes(self._high):
            passes.add_compensated(self._high, self._low, term)
            return
        total = self._high + term
        part = total - self._high
        self._low += (self._high - (total - part)) + (term - part)
        self._high.copy_(total)

    def finish(self) -> None:
        """Put the sum into ``out``."""
        if self._low is not None:
            self._high += self._low
        if self._high is not self._out:
            self._out += self._high
