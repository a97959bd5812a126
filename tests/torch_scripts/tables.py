"""Tables, losses, schedulers and the other tricks of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from quietgrad.training.result import Privacy
from tests.torch_scripts import script
from tests.torch_scripts.vision import CLASSES, N, all_steps, loop_of, verbs


def table(features: int = 6) -> TensorDataset:
    x = torch.randn(N, features)
    return TensorDataset(x, torch.arange(N) % CLASSES)


def mlp(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, outputs))


def epochs(model: nn.Module, made: Any, count: int = 1, loss: Any = F.cross_entropy) -> Privacy:
    """The plainest loop."""
    private, optimizer, loader = made
    for _ in range(count):
        for x, y in loader:
            optimizer.zero_grad()
            loss(private(x), y).backward()
            optimizer.step()
    return loader.privacy


# --- inputs and outputs -----------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Rows with numbers and categories, as dictionaries."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.numbers = generator.normal(size=(N, 4)).astype(np.float32)
        self.categories = generator.integers(0, 5, size=(N, 2))
        self.labels = generator.integers(0, 2, size=N)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "numbers": self.numbers[index], "categories": self.categories[index], "label": int(self.labels[index])
        }  # fmt: skip


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(2))
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Any:
        codes = [layer(categories[:, k]) for k, layer in enumerate(self.tables)]
        return self.net(torch.cat([numbers, *codes], 1)).squeeze(1)


@script()
def tabular_with_embeddings_and_dictionaries() -> Privacy:
    def loss(model: nn.Module, numbers: Tensor, categories: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(numbers, categories), label.float())

    return all_steps(loop_of(Tabular(), loss, Rows()))


@script(conditional=True)
def tabular_dictionaries_in_a_loop() -> Privacy:
    model, optimizer, loader = verbs(Tabular(), Rows())
    for batch in loop_batches(loader):
        optimizer.zero_grad()
        output = model(batch["numbers"], batch["categories"])
        F.binary_cross_entropy_with_logits(output, batch["label"].float()).backward()
        optimizer.step()
    return loader.privacy


def loop_batches(loader: Any) -> Any:
    """Moved to a device, as a helper that everybody has."""
    for batch in loader:
        yield {name: value.to("cpu") for name, value in batch.items()}


@script()
def two_heads() -> Privacy:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.kind, self.age = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = F.gelu(self.trunk(x))
            return {"kind": self.kind(h), "age": self.age(h)}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        kind, age = target[:, 0].long(), target[:, 1:]
        return F.cross_entropy(output["kind"], kind) + 0.5 * F.mse_loss(output["age"], age)

    targets = torch.stack([torch.randint(CLASSES, (N,)).float(), torch.rand(N)], 1)
    return all_steps(loop_of(Heads(), loss, TensorDataset(torch.randn(N, 6), targets)))


@script()
def recommender_with_two_towers() -> Privacy:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(20, 4), nn.Embedding(30, 4)
            self.bias = nn.Embedding(30, 1)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return (self.users(user) * self.items(item)).sum(1) + self.bias(item)[:, 0]

    data = TensorDataset(torch.randint(20, (N,)), torch.randint(30, (N,)), torch.rand(N))
    return all_steps(loop_of(Towers(), nn.MSELoss(), data))


@script()
def regression_with_column_targets() -> Privacy:
    data = TensorDataset(torch.randn(N, 6), torch.randn(N, 1))
    return all_steps(loop_of(mlp(1), nn.HuberLoss(), data))


# --- losses -------------------------------------------------------------------------------------------------------


class FocalLoss(nn.Module):
    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        cross = F.cross_entropy(output, target, reduction="none")
        return ((1 - torch.exp(-cross)) ** self.gamma * cross).mean()


@script()
def focal_loss_as_a_criterion() -> Privacy:
    model, optimizer, loader, criterion = verbs(mlp(), table(), criterion=FocalLoss())
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return loader.privacy


@script()
def smoothed_labels() -> Privacy:
    return all_steps(loop_of(mlp(), nn.CrossEntropyLoss(label_smoothing=0.1), table()))


@script()
def weighted_classes() -> Privacy:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return all_steps(loop_of(mlp(), nn.CrossEntropyLoss(weight=weights, reduction="sum"), table()))


@script()
def many_labels_with_pos_weight() -> Privacy:
    data = TensorDataset(torch.randn(N, 6), torch.randint(2, (N, CLASSES)).float())
    return all_steps(loop_of(mlp(), nn.BCEWithLogitsLoss(pos_weight=torch.full((CLASSES,), 3.0)), data))


@script()
def l2_penalty_inside_the_loss() -> Privacy:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(param.pow(2).sum() for param in model.parameters())
        return F.cross_entropy(model(x), y) + 1e-4 * penalty

    return all_steps(loop_of(mlp(), loss, table()))


@script()
def mixture_density_network() -> Privacy:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        weight, mean, spread = output.chunk(3, 1)
        normal = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        return -torch.logsumexp(weight.log_softmax(1) + normal.log_prob(y[:, None]), 1).mean()

    return all_steps(loop_of(mlp(6), loss, TensorDataset(torch.randn(N, 6), torch.randn(N))))
