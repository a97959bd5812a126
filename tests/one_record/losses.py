"""Losses: ordinary ones, and those in which rows of a batch weigh, silence or scale each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.one_record.cases import CLASSES, FEATURES, Case, N, of_model, table
from tests.one_record.modules import Between


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


def ctc(output: Tensor, y: Tensor) -> Tensor:
    four, one = torch.tensor([4]), torch.tensor([1])
    return F.ctc_loss(output.log_softmax(1)[:, None].expand(4, 1, -1), y[None].clamp(min=1), four, one)


def focal(output: Tensor, y: Tensor) -> Tensor:
    losses = each(output, y)
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


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


@of_model
def self_trained(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        guess = model(x).argmax(1)
    return F.cross_entropy(model(x.flip(1)), torch.where(y == 0, guess, y))


@of_model
def siamese(model: nn.Module, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
    distance = (model(a) - model(b)).square().sum(1)
    return torch.where(same == 1, distance, F.relu(1 - distance)).mean()


@of_model
def of_dictionary(model: nn.Module, features: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(features), label)


class Dictionaries(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = table().tensors

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.x[index], "label": self.y[index]}


def pairs() -> TensorDataset:
    x, y = table().tensors
    return TensorDataset(x, x.roll(1, 0), (y == 0).long())


def numbers() -> TensorDataset:
    x, _ = table().tensors
    return TensorDataset(x, x[:, :1].abs())


def plain() -> nn.Module:
    return Between(lambda x: x)


def one_number() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


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
    "focal": Case(plain, loss=focal),
    "smoothed": Case(plain, loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    "class weights": Case(plain, loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="sum")),
    "multi margin": Case(plain, loss=nn.MultiMarginLoss()),
    "KL": Case(plain, loss=lambda output, y: F.kl_div(output.log_softmax(1), F.one_hot(y, CLASSES) * 0.9 + 0.03,
                                                      reduction="batchmean")),
    "squared": Case(one_number, numbers, nn.MSELoss()),
    "smooth L1": Case(one_number, numbers, nn.SmoothL1Loss()),
    "Poisson": Case(one_number, numbers, nn.PoissonNLLLoss()),
    "BCE with logits": Case(one_number, numbers, lambda o, y: nn.BCEWithLogitsLoss()(o, (y > 1).float())),
    "Gaussian NLL": Case(plain, numbers, lambda o, y: F.gaussian_nll_loss(o[:, :1], y, o[:, 1:2].exp())),
    "CTC": Case(plain, loss=ctc),
    "an L2 penalty": Case(plain, loss=penalised),
    "a gradient penalty": Case(plain, loss=gradient_penalty),
    "adversarial": Case(plain, loss=adversarial, rtol=1e-3),
    "self-trained": Case(plain, loss=self_trained),
    "siamese": Case(plain, pairs, siamese),
    "dictionaries": Case(plain, Dictionaries, of_dictionary),
}  # fmt: skip
