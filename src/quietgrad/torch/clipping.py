"""Clipped sums for your own loop: the two sums every private method is made of, without noise.

`clipped_gradient_sum` is DP-SGD's, `clipped_difference_sum` SPIDER's and DP-SRM's. Neither is private by
itself: noise and accounting are the business of `quietgrad.torch.fit`, or yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.objectives.base import Rule
from quietgrad.objectives.networks.engine import PerExampleEngine, positive
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.tape import Batch, LossFunction, batch_length
from quietgrad.objectives.people import Combine, check_combination
from quietgrad.objectives.person_ids import first_seen

__all__ = ["clipped_difference_sum", "clipped_gradient_sum"]


def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Batch, Batch],
    clip: float,
    *,
    person: Any = None,
    combine: Combine = "mean",
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i clip_C(g_i) by parameter name, and the norms ‖g_i‖ before clipping.

    g_i is the gradient of loss_fn(model(x), y)[i] by all trainable parameters together, and
    clip_C(g) = g·min(1, C/‖g‖). An example whose norm is not finite counts as zero. With ``person`` what is clipped
    is each person's mean, or sum, of the g_i; a person with a norm that is not finite counts as zero.

    Args:
        model: any module whose layers keep examples apart.
        loss_fn: loss_fn(output, y) → one loss per example.
        batch: (x, y); x may be a tuple of tensors for a model with several inputs.
        clip: the bound C > 0.
        person: the id of the person that each example is about; the norms are then those of people, in the order
            of their first examples. All records of a person must be in the batch.
        combine: ``"mean"`` if everybody counts once, ``"sum"`` if records count.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2)
    >>> sums, norms = clipped_gradient_sum(model, lambda output, y: output.squeeze(1), (x, y), clip=1.0)
    >>> norms, sums["weight"]
    (tensor([5.0000, 0.5000], dtype=torch.float64), tensor([[0.9000, 1.2000]]))
    >>> clipped_gradient_sum(model, lambda output, y: output.squeeze(1), (x, y), 1.0, person=["ann", "ann"])
    ({'weight': tensor([[0.6000, 0.8000]])}, tensor([2.7500], dtype=torch.float64))
    """
    engine = PerExampleEngine(model, loss_fn)
    theta = engine.flatten(dict(model.named_parameters()))
    out = torch.zeros_like(theta)
    norms = engine.add(
        (theta,), *batch, positive(Rule.gradient(clip)), out, persons=_persons(person, combine, batch)
    )
    return engine.views(out), norms[:, 0]


def clipped_difference_sum(
    model: nn.Module,
    previous_params: Mapping[str, Tensor],
    loss_fn: LossFunction,
    batch: tuple[Batch, Batch],
    clip: float,
    *,
    person: Any = None,
    combine: Combine = "mean",
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i clip_C(g_i(now) − g_i(previous)) by parameter name, and the norms of the differences.

    `previous_params` maps the trainable parameters' names to their values at the previous iterate. The
    differences are formed without cancellation, so their norms are right however small the step was; both
    points see the same dropout masks. ``person`` and ``combine`` as in :func:`clipped_gradient_sum`.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> previous = {"weight": model.weight.detach() - 0.1}
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.zeros(2)
    >>> square = lambda output, y: (output.squeeze(1) - y).square() / 2
    >>> sums, norms = clipped_difference_sum(model, previous, square, (x, y), clip=10.0)
    >>> norms, sums["weight"]
    (tensor([0.1000, 0.4000], dtype=torch.float64), tensor([[0.5000]]))
    """
    engine = PerExampleEngine(model, loss_fn)
    theta = engine.flatten(dict(model.named_parameters()))
    out = torch.zeros_like(theta)
    points = theta, engine.flatten(previous_params)
    norms = engine.add(
        points, *batch, positive(Rule.difference(clip)), out, persons=_persons(person, combine, batch)
    )
    return engine.views(out), norms[:, 0]


def _persons(person: Any, combine: Combine, batch: tuple[Batch, Batch]) -> Persons | None:
    check_combination(combine, None)
    if person is None:
        return None
    codes, _ = first_seen(person, batch_length(batch[0]))
    return Persons.numbered(codes, mean=combine == "mean")
