"""A loss that is not what loss_reduction says is refused: the secret size of a sample would be in all gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.errors import BudgetError
from quietgrad.torch import causal_lm_loss, make_private

Loss = Callable[[Any, Any], Any]


def loop(dataset: TensorDataset, module: nn.Module, **settings: Any) -> Any:
    return make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0), noise_multiplier=1e-6,
        data_loader=DataLoader(dataset, batch_size=30), max_grad_norm=0.1, **settings,
    )  # fmt: skip


def steps(loss: Loss, count: int = 3, target: str = "class", **settings: Any) -> None:
    """A few steps of a classifier with two outputs, on batches of different sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=generator)
    y = torch.randint(0, 2, (90,), generator=generator)
    targets = {"class": y, "flag": y.float()[:, None].expand(90, 2).clone(), "tokens": y[:, None].expand(90, 3) * 1}
    torch.manual_seed(0)
    module: Any = nn.Linear(4, 2)
    if target == "tokens":
        module = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)))
    model, optimizer, loader = loop(TensorDataset(x, targets[target]), module, **settings)
    for _, (inputs, labels) in zip(range(count), loader, strict=False):
        value = loss(model(inputs), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def focal(output: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(output, y, reduction="none")
    with torch.no_grad():
        weight = (1 - (-each).exp()) ** 2
    return (weight * each).mean()


def in_place(output: Tensor, y: Tensor) -> Tensor:
    total = F.cross_entropy(output, y, reduction="none").sum()
    total /= len(y)
    return total


MEANS: dict[str, tuple[Loss, str]] = {
    "cross-entropy": (F.cross_entropy, "class"),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), "class"),
    "mean of each": (lambda o, y: F.cross_entropy(o, y, reduction="none").mean(), "class"),
    "sum by len": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y), "class"),
    "in place": (in_place, "class"),
    "sum by size": (lambda o, y: (1.0 / o.size(0)) * F.cross_entropy(o, y, reduction="sum"), "class"),
    "nll": (lambda o, y: F.nll_loss(o.log_softmax(-1), y), "class"),
    "one-hot": (lambda o, y: F.mse_loss(o, F.one_hot(y, 2).float()), "class"),
    "gathered": (lambda o, y: -o.log_softmax(1)[torch.arange(len(y)), y].mean(), "class"),
    "focal": (focal, "class"),
    "halved": (lambda o, y: F.cross_entropy(o, y) / 2 + 0.1 * o.square().mean(), "class"),
    "vector": (lambda o, y: F.binary_cross_entropy_with_logits(o, y), "flag"),
    "squares": (lambda o, y: nn.MSELoss()(o, y), "flag"),
    "probabilities": (lambda o, y: F.binary_cross_entropy(o.sigmoid(), y), "flag"),
    "smooth": (lambda o, y: F.smooth_l1_loss(o[:, 0], y[:, 0]), "flag"),
    "tokens": (lambda o, y: F.cross_entropy(o.view(-1, 2), y.view(-1)), "tokens"),
    "tokens by size": (lambda o, y: F.cross_entropy(o.view(len(o) * 3, 2), y.reshape(len(o) * 3)), "tokens"),
    "language": (causal_lm_loss, "tokens"),
    "tokens by number": (
        lambda o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="sum") / y.numel(), "tokens"
    ),
}  # fmt: skip
SUMS: dict[str, tuple[Loss, str]] = {
    "cross-entropy": (nn.CrossEntropyLoss(reduction="sum"), "class"),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), reduction="sum"), "class"),
    "by a constant": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / 30, "class"),
    "squares": (lambda o, y: ((o - y) ** 2).mean(1).sum(), "flag"),
    "tokens": (lambda o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="none").mean(1).sum(), "tokens"),
}
MIXED: dict[str, tuple[Loss, str]] = {
    "class weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), "class"),
    "ignored": (nn.CrossEntropyLoss(ignore_index=0), "class"),
    "counted": (lambda o, y: (o[:, 0] * y).sum() / y.sum(), "class"),
    "compared": (lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(o))), "class"),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_a_mean(name: str) -> None:
    steps(*_given(MEANS[name]))
    with pytest.raises(BudgetError, match="is a mean over the batch, and loss_reduction is 'sum'"):
        steps(*_given(MEANS[name]), loss_reduction="sum")


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_a_sum(name: str) -> None:
    steps(*_given(SUMS[name]), loss_reduction="sum")
    with pytest.raises(BudgetError, match="is a sum over the batch, and loss_reduction is 'mean'"):
        steps(*_given(SUMS[name]))


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
@pytest.mark.parametrize("name", MIXED)
def test_examples_that_weigh_each_other_are_refused(name: str, reduction: str | None) -> None:
    with pytest.raises(BudgetError, match="depends on the other examples"):
        steps(*_given(MIXED[name]), loss_reduction=reduction)


def _given(case: tuple[Loss, str]) -> Any:
    loss, target = case
    return loss, 3, target


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_record_moves_the_sum_by_no_more_than_its_bound(reduction: str) -> None:
    def released(n: int) -> Tensor:
        module = nn.Linear(8, 2, bias=False)
        nn.init.zeros_(module.weight)
        dataset = TensorDataset(torch.full((n, 8), 1e-3), torch.zeros(n, dtype=torch.long))
        model, optimizer, loader = make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0), noise_multiplier=1e-6,
            data_loader=DataLoader(dataset, batch_size=n), max_grad_norm=0.1, poisson_sampling=False,
        )  # fmt: skip
        x, y = next(iter(loader))
        nn.CrossEntropyLoss(reduction=reduction)(model(x), y).backward()
        optimizer.step()
        assert module.weight.grad is not None
        return module.weight.grad * n

    if reduction == "sum":
        with pytest.raises(BudgetError, match="is a sum"):
            released(49)
    else:
        assert float((released(49) - released(48)).norm()) <= 0.1 + 1e-5


def test_a_loss_that_cannot_be_tried_needs_a_word() -> None:
    def by_rows(output: Tensor, y: Tensor) -> Any:
        return sum(F.cross_entropy(output[k], y[k]) for k in range(len(y))) / len(y)

    with pytest.raises(BudgetError, match="cannot be told"):
        steps(by_rows)
    steps(by_rows, loss_reduction="mean")


def test_backward_with_weights_and_two_losses() -> None:
    class Weighted:
        def __init__(self, each: Any) -> None:
            self.each = each

        def backward(self) -> None:
            self.each.backward(torch.ones_like(self.each) / len(self.each), retain_graph=True)
            (self.each.mean() / 2).backward()

    def loss(output: Tensor, y: Tensor) -> Any:
        return Weighted(F.cross_entropy(output, y, reduction="none"))

    steps(loss)
    with pytest.raises(BudgetError, match="is a mean"):
        steps(loss, loss_reduction="sum")


@pytest.mark.parametrize("power", [1, -1])
def test_sizes_that_come_in_again_are_refused(power: int) -> None:
    def loss(output: Tensor, y: Tensor) -> Any:
        scaled = F.cross_entropy(output, y)
        return scaled * float(len(y)) ** power

    with pytest.raises(BudgetError, match=r"is a sum|depends on the other"):
        steps(loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_differentiated_unseen_is_tried_too(reduction: str) -> None:
    class Unseen:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

        def backward(self) -> None:
            torch.autograd.backward(self.loss)

    def loss(output: Tensor, y: Tensor) -> Any:
        return Unseen(F.cross_entropy(output, y, reduction=reduction))

    steps(loss, loss_reduction=None if reduction == "mean" else "sum")
    with pytest.raises(BudgetError, match=f"the loss is a {reduction}"):
        steps(loss, loss_reduction="sum" if reduction == "mean" else None)


def test_losses_that_are_kept_hold_nothing_of_their_samples() -> None:
    kept: list[Any] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(output, y)
        kept.append(value.detach())
        return value

    steps(loss)
    assert kept[0].made.origin.args is None
    assert pickle.loads(pickle.dumps(kept[0])).item() == kept[0].item()


def test_gradients_of_zero_are_no_leak() -> None:
    model, optimizer, loader = loop(
        TensorDataset(torch.randn(90, 4), torch.randint(0, 2, (90,))), nn.Linear(4, 2), epochs=1
    )
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loader.privacy.handed_out == 3
