"""Clipped sums for your own loop: the two sums every private method is made of, without noise.

`clipped_gradient_sum` is DP-SGD's, `clipped_difference_sum` SPIDER's and DP-SRM's. Neither is private by
itself: noise and accounting are the business of `quietgrad.torch.fit`, or yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.errors import DataError
from quietgrad.objectives.base import ClippingRule
from quietgrad.objectives.networks.engine import LossFunction, PerExampleEngine, positive
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.records import RecordGroup
from quietgrad.objectives.networks.trees import mapped, tensors_of
from quietgrad.objectives.person_ids import factorize_ids
from quietgrad.objectives.privacy_units import Combine, check_combination

__all__ = ["clipped_difference_sum", "clipped_gradient_sum"]

_ENGINES: WeakKeyDictionary[nn.Module, tuple[Any, PerExampleEngine]] = WeakKeyDictionary()


def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, Any],
    clip: float,
    *,
    person: Any = None,
    combine: Combine = "mean",
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i clip_C(g_i) by parameter name, and the norms ‖g_i‖ before clipping.

    g_i is the gradient of the loss of record i, a batch of one, by all trainable parameters together, and
    clip_C(g) = g·min(1, C/‖g‖). A record whose norm is not finite counts as zero. With ``person`` what is clipped
    is each person's mean, or sum, of the g_i; a person with a norm that is not finite counts as zero.

    Args:
        model: any module; it is called with one record at a time.
        loss_fn: loss_fn(output, y), or loss_fn(model, x, y), of a batch of one: one number.
        batch: (x, y); x may be a tuple of tensors for a model with several inputs.
        clip: the bound C > 0.
        person: the id of the person that each record is about; the norms are then those of people, in the order
            of their first records. All records of a person must be in the batch.
        combine: ``"mean"`` if everybody counts once, ``"sum"`` if records count.

    How the model is run is found out in the first call and kept with the model.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2)
    >>> sums, norms = clipped_gradient_sum(model, lambda output, y: output.squeeze(1), (x, y), clip=1.0)
    >>> norms, sums["weight"]
    (tensor([5.0000, 0.5000], dtype=torch.float64), tensor([[0.9000, 1.2000]]))
    >>> clipped_gradient_sum(model, lambda output, y: output.squeeze(1), (x, y), 1.0, person=["ann", "ann"])
    ({'weight': tensor([[0.6000, 0.8000]])}, tensor([2.7500], dtype=torch.float64))
    """
    engine = _engine(model, loss_fn)
    theta = engine.flatten(dict(model.named_parameters()))
    return _sum(engine, (theta,), batch, positive(ClippingRule.gradient(clip)), person, combine)


def clipped_difference_sum(
    model: nn.Module,
    previous_params: Mapping[str, Tensor],
    loss_fn: LossFunction,
    batch: tuple[Any, Any],
    clip: float,
    *,
    person: Any = None,
    combine: Combine = "mean",
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i clip_C(g_i(now) − g_i(previous)) by parameter name, and the norms of the differences.

    `previous_params` maps the trainable parameters' names to their values at the previous iterate. Both points see
    the same dropout masks. ``person`` and ``combine`` as in :func:`clipped_gradient_sum`.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> previous = {"weight": model.weight.detach() - 0.1}
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.zeros(2)
    >>> square = lambda output, y: (output.squeeze(1) - y).square() / 2
    >>> sums, norms = clipped_difference_sum(model, previous, square, (x, y), clip=10.0)
    >>> norms, sums["weight"]
    (tensor([0.1000, 0.4000], dtype=torch.float64), tensor([[0.5000]]))
    """
    engine = _engine(model, loss_fn)
    points = engine.flatten(dict(model.named_parameters())), engine.flatten(previous_params)
    return _sum(engine, points, batch, positive(ClippingRule.difference(clip)), person, combine)


def _engine(model: nn.Module, loss_fn: LossFunction) -> PerExampleEngine:
    """The engine of a model and a loss: made once, and again if other parameters are trained."""
    trained = tuple(id(p) for p in model.parameters() if p.requires_grad)
    hooked = tuple(bool(m._backward_hooks or m._backward_pre_hooks) for m in model.modules())
    known = _ENGINES.get(model)
    if known is None or known[0] != (trained, hooked) or known[1].loss is not loss_fn:
        known = (trained, hooked), PerExampleEngine(model, loss_fn)
        _ENGINES[model] = known
    return known[1]


def _sum(
    engine: PerExampleEngine, points: tuple[Tensor, ...], batch: tuple[Any, Any], rule: ClippingRule, person: Any,
    combine: Combine,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    check_combination(combine, None)
    group = batch_group(batch)
    persons = None
    if person is not None:
        codes, _ = factorize_ids(person, len(group.rows))
        persons = Persons.numbered(codes, mean=combine == "mean")
    out = torch.zeros_like(points[0])
    norms = engine.add(points, [group] if len(group.rows) else [], rule, out, persons=persons)
    return engine.views(out), norms[:, 0]


def batch_group(batch: tuple[Any, Any]) -> RecordGroup:
    """A batch of tensors with records first as records, each a batch of one."""
    lengths = {len(tensor) for tensor in tensors_of(batch)}
    if len(lengths) != 1:
        raise DataError(f"the tensors of a batch have lengths {sorted(lengths)}: they must be equal.")
    return RecordGroup(np.arange(lengths.pop()), mapped(tuple(batch), lambda tensor: tensor.unsqueeze(1)))
