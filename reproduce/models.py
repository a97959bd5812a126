"""The networks of the papers' experiments, and a small transformer for the benchmarks.

| class | paper | data | parameters |
|---|---|---|---|
| `MnistCNN4` | DP-SRM, section 6.2 and table 5 (layer shapes) | MNIST | 26 010 |
| `MnistCNN2` | stagewise DP-SGD, section 4.1 ("2-layer CNN", ELU) | MNIST | 8 266 |
| `CNN5` | DP-SRM, section 6.2 and table 6 (layer shapes) | CIFAR-10 | 62 006 |
| `CNN6` | DP-SRM, section 6.2 (3 convolutions of 32, 64, 128 filters, 3 dense layers) | CIFAR-10 | 955 914 |
| `ResNet20` | stagewise DP-SGD, section 4.1 (ELU; GroupNorm, since BatchNorm mixes examples) | CIFAR-10 | 272 282 |
| `Transformer` | none: a 4-layer text classifier | tokens | 5 240 834 |

Shapes that a paper does not state (`MnistCNN2`, the dense layers of `CNN6`) are ours.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CNN5", "CNN6", "MODELS", "MnistCNN2", "MnistCNN4", "ResNet20", "Transformer", "parameter_count"]


class MnistCNN4(nn.Module):
    """Two strided convolutions with overlapping pooling, two dense layers; 28×28 grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, stride=1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, stride=1)
        output: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return output


class MnistCNN2(nn.Module):
    """One convolution and one dense layer with ELU; 28×28 grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.fc = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.elu(self.conv(x)), 2)
        output: Tensor = self.fc(x.flatten(1))
        return output


class CNN5(nn.Module):
    """Two convolutions and three dense layers; 32×32 colour images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        output: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return output


class CNN6(nn.Module):
    """Three convolutions of 32, 64, 128 filters and three dense layers; 32×32 colour images."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.features = nn.Sequential(
            *(
                layer
                for before, after in pairwise(widths)
                for layer in (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            )
        )
        self.classifier = nn.Sequential(
            nn.Linear(128 * 4 * 4, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classifier(self.features(x).flatten(1))
        return output

    def freeze_features(self) -> CNN6:
        """Train the dense layers only, as the paper does after pre-training on public data."""
        self.features.requires_grad_(False)
        return self


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, after)
        same = stride == 1 and before == after
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.elu(self.norm1(self.conv1(x)))))
        return F.elu(inner + self.shortcut(x))


class ResNet20(nn.Module):
    """Nine residual blocks of two 3×3 convolutions; ELU and GroupNorm; 32×32 colour images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        blocks, before = [], 16
        for after, stride in ((16, 1), (32, 2), (64, 2)):
            for number in range(3):
                blocks.append(_Residual(before, after, stride if number == 0 else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.blocks(F.elu(self.norm(self.conv(x)))).mean((2, 3)))
        return output


class _EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        query, key, value = (
            part(normal).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1)
        x = x + self.project((scores @ value).transpose(1, 2).flatten(2))
        output: Tensor = x + self.contract(F.gelu(self.expand(self.norm2(x))))
        return output


class Transformer(nn.Module):
    """Pre-norm encoder over tokens, mean-pooled into a classifier."""

    def __init__(
        self,
        vocabulary: int = 8000,
        width: int = 256,
        heads: int = 4,
        hidden: int = 1024,
        layers: int = 4,
        length: int = 128,
        classes: int = 2,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_EncoderLayer(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand_as(x).contiguous()  # Opacus cannot take a view
        output: Tensor = self.fc(self.norm(self.layers(self.tokens(x) + self.places(places))).mean(1))
        return output


MODELS: dict[str, type[nn.Module]] = {
    "mnist-cnn4": MnistCNN4,
    "mnist-cnn2": MnistCNN2,
    "cnn5": CNN5,
    "cnn6": CNN6,
    "resnet20": ResNet20,
    "transformer": Transformer,
}


def parameter_count(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
