"""An Opacus training script on quietgrad: the import is what changed.

    python examples/mnist_opacus_port.py --digits           # scikit-learn's small digits, seconds
    QUIETGRAD_DATA=... python examples/mnist_opacus_port.py # MNIST

The loop is the usual one: mean-reduced loss, any torch optimizer, a plain DataLoader. Underneath, batches are
Poisson samples, noise is cryptographic, and ε is proved by privacy-loss distributions.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.torch import PrivacyEngine  # was: from opacus import PrivacyEngine


class ConvNet(nn.Module):
    """Two convolutions, two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of ten classes."""
        output: torch.Tensor = self.classifier(self.features(x))
        return output


def images(digits: bool) -> tuple[TensorDataset, TensorDataset]:
    """Training and test sets."""
    if digits:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        small = torch.tensor(x / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
        large, labels = nn.functional.interpolate(small, size=(28, 28), mode="bilinear"), torch.tensor(y)
        return TensorDataset(large[:1500], labels[:1500]), TensorDataset(large[1500:], labels[1500:])
    from quietgrad.data import load

    data = load("mnist")
    pairs = ((data.X, data.y), (data.X_test, data.y_test))
    train, test = (
        TensorDataset((torch.tensor(x).reshape(-1, 1, 28, 28) - 0.1307) / 0.3081, torch.tensor(y)) for x, y in pairs
    )
    return train, test


def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Share of images classified right."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    """Train and say what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", action="store_true", help="small digits instead of MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--sigma", type=float, default=1.1, help="noise multiplier")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    arguments = parser.parse_args()

    train_set, test_set = images(arguments.digits)
    train_loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(train_set, batch_size=arguments.batch_size)
    test_loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(test_set, batch_size=1024)
    torch.manual_seed(0)
    model: nn.Module = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    criterion = nn.CrossEntropyLoss()

    privacy_engine = PrivacyEngine()
    model, optimizer, private_loader, criterion = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=arguments.sigma,
        max_grad_norm=arguments.max_grad_norm,
        criterion=criterion,
    )

    for epoch in range(1, arguments.epochs + 1):
        model.train()
        for data, target in private_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
        epsilon = privacy_engine.get_epsilon(delta=arguments.delta)
        print(
            f"epoch {epoch}: test accuracy {accuracy(model, test_loader):.3f}, "
            f"(ε = {epsilon:.2f}, δ = {arguments.delta:g})",
            flush=True,
        )


if __name__ == "__main__":
    main()
