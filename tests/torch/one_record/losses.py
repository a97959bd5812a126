"""Losses: ordinary ones, and those in which rows of a batch weigh, silence or scale each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch.one_record.cases import CLASSES, Case, of_model
from tests.torch.one_record.modules import Between


def each(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def mined(output: Tensor, y: Tensor) -> Tensor:
    """Hard-example mining: rows silence each other."""
    losses = each(output, y)
    return (losses * (losses >= losses.mean())).mean()


def standardised(output: Tensor, y: Tensor) -> Tensor:
    """Targets scaled by the batch's own numbers."""
    target = y.float()
    target = (target - target.mean().item()) / (target.std(unbiased=False).item() + 1e-3)
    return (output[:, 0] - target).square().mean()


def ranked(output: Tensor, y: Tensor) -> Tensor:
    losses = each(output, y).sort(descending=True).values
    return (losses * torch.arange(1, len(losses) + 1)).sum()


def weighed_by_counts(output: Tensor, y: Tensor) -> Tensor:
    weights = 1.0 / torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(output, y, weight=weights, reduction="sum")


def in_chunks(output: Tensor, y: Tensor) -> Tensor:
    pieces = list(zip(output.split(16), y.split(16), strict=True))
    return sum(each(*piece).sum() for piece in pieces) / len(pieces)  # type: ignore[return-value]


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    """InfoNCE over the batch; of one record there is nothing to tell apart."""
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def triplet(output: Tensor, y: Tensor) -> Tensor:
    """Needs a second record, by index."""
    return (output[0] - output[1]).square().sum()


def by_its_value(output: Tensor, y: Tensor) -> Tensor:
    value = each(output, y).mean()
    return value / (value.item() + 1e-3)


@of_model
def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    penalty: Any = sum(param.square().sum() for param in model.parameters())
    return F.cross_entropy(model(x), y) + 1e-2 * penalty


@of_model
def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    slope = torch.func.grad(lambda x: model(x).logsumexp(1).sum())(x)
    return F.cross_entropy(model(x), y) + 0.1 * slope.square().sum()


@of_model
def adversarial(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """FGSM: a step up the loss first."""
    slope = torch.func.grad(lambda x: F.cross_entropy(model(x), y))(x)
    return F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)


def plain() -> nn.Module:
    return Between()


LOSSES: dict[str, Case] = {
    "mean": Case(plain),
    "sum": Case(plain, loss=nn.CrossEntropyLoss(reduction="sum")),
    "none": Case(plain, loss=nn.CrossEntropyLoss(reduction="none")),
    "hard examples only": Case(plain, loss=mined),
    "the largest": Case(plain, loss=lambda output, y: each(output, y).max()),
    "divided by its own value": Case(plain, loss=by_its_value),
    "divided by its detached value": Case(
        plain, loss=lambda output, y: (v := each(output, y).mean()) / (v.detach() + 1e-3)
    ),
    "outputs over their std": Case(plain, loss=lambda output, y: F.cross_entropy(output / output.std().item(), y)),
    "targets standardised": Case(plain, loss=standardised),
    "ranked": Case(plain, loss=ranked),
    "median": Case(plain, loss=lambda output, y: each(output, y).median()),
    "quantile": Case(plain, loss=lambda output, y: torch.quantile(each(output, y), 0.9)),
    "softmax of losses": Case(plain, loss=lambda output, y: (v := each(output, y)).softmax(0).detach() @ v),
    "weights by counts of classes": Case(plain, loss=weighed_by_counts),
    "divided by the number of chunks": Case(plain, loss=in_chunks),
    "divided by the batch size": Case(plain, loss=lambda output, y: each(output, y).sum() / output.shape[0]),
    "times a power of the batch size": Case(plain, loss=lambda output, y: each(output, y).mean() * len(y) ** 2),
    "contrastive over the batch": Case(plain, loss=contrastive),
    "an L2 penalty": Case(plain, loss=penalised),
    "a gradient penalty": Case(plain, loss=gradient_penalty),
    "adversarial": Case(plain, loss=adversarial, rtol=1e-3),
}  # fmt: skip
