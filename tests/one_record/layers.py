"""Layers of every kind as people use them, and modules that draw random numbers inside."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from tests.one_record.cases import CLASSES, FEATURES, table
from tests.one_record.modules import Between, H


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, width: int, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.out, self.packed = layer, nn.Linear(width, CLASSES), packed

    def forward(self, x: Tensor) -> Any:
        if self.packed:
            lengths = torch.full((len(x),), x.shape[1])
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        else:
            states = self.layer(x)[0]
        return self.out(states[:, -1])


class Attends(nn.Module):
    """Asks another sequence than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, H))
        self.attention = nn.MultiheadAttention(H, 2, kdim=4, vdim=4, batch_first=True)
        self.out = nn.Linear(2 * H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        queries = self.queries.expand(len(x), -1, -1)
        return self.out(self.attention(queries, x, x)[0].flatten(1))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.inner(x, x.flip(1), tgt_mask=mask).mean(1))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Bilinear(FEATURES, FEATURES, H), nn.Linear(H, CLASSES)
        self.slope = nn.PReLU(H)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.slope(self.both(x, x.flip(1))))


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.back = nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 3, 2, output_padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.out = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Any:
        small, places = self.pool(self.conv(x))
        return self.out(self.back(self.unpool(small, places)).mean((2, 3)))


class Sampled(nn.Module):
    """Looks at its image where it wants to."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.out = nn.Linear(128, 6), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Any:
        theta = self.where(x.flatten(1)).tanh().view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.out(F.interpolate(x, scale_factor=1.0, mode="nearest").flatten(1))


def conv(*layers: nn.Module, width: int) -> Any:
    head = nn.Linear(width, CLASSES)
    return nn.Sequential(*layers, nn.Flatten(), head)


class Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, H, mode=mode, padding_idx=1), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.bag(x))


class Mean(nn.Module):
    """The mean over positions of an embedding, padding and all: Opacus' imdb example."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, H, sparse=sparse), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.table(x).mean(1))


class Draws(Between):
    """Random numbers inside."""

    def __init__(self, how: str) -> None:
        super().__init__(lambda x: x)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        how = self.how
        if how == "python":
            x = x * (1.0 + random.random())
        elif how == "numpy":
            x = x + float(np.random.normal())  # noqa: NPY002
        elif how == "equal masks":
            mask = torch.bernoulli(torch.full((FEATURES,), 0.5))
            x = x * mask
        elif how == "gumbel":
            x = x * F.gumbel_softmax(x.clamp(-3, 3), hard=True)
        elif how == "permutation":
            x = x[:, torch.randperm(FEATURES)]
        elif how == "multinomial":
            x = x * F.one_hot(torch.multinomial(x.clamp(-3, 3).softmax(1), 1)[:, 0], FEATURES)
        elif how == "rrelu":
            x = F.rrelu(x, training=True)
        elif how == "dropout of the batch":
            x = x * F.dropout(torch.ones(x.shape[0], 1), 0.5)
        else:
            x = F.dropout(x, 0.5)
        return super().forward(x)


def half() -> nn.Module:
    return Between(lambda x: x).bfloat16()


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.w).abs()


def frozen() -> nn.Module:
    model = Between(lambda x: x)
    model.first.requires_grad_(False)
    return model


def unused() -> nn.Module:
    model = Between(lambda x: x)
    model.extra = nn.Linear(3, 3)
    return model


def double() -> Any:
    x, y = table().tensors
    return TensorDataset(x.double(), y)


def halves() -> Any:
    x, y = table().tensors
    return TensorDataset(x.bfloat16(), y)
