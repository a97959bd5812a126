"""Programs that keep tensors of one record for the next, and ordinary ones that vmap or taps might get wrong.

A tensor that a program keeps outside of its module dies with its pass, so its next use ends in an error. Numbers
that a program keeps in closures, classes or globals are its own affair, as docs/torch.md says.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.one_record.cases import CLASSES, FAR, FEATURES, Case, images, of_model, sequences, table


def _linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def mirrored() -> TensorDataset:
    """The table, whose far record is on the other side, where its loss is large."""
    data = table()
    data.tensors[0][FAR] *= -1.0
    return data


def _losses_in_a_list() -> Any:
    """A loss that keeps what it saw in its closure, and scales by it."""
    seen: list[Tensor] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(output, y)
        seen.append(value.detach())
        return value * (1 + torch.stack(seen).sum())

    return loss


def _largest_in_a_dict() -> Any:
    """A loss whose closure remembers the largest loss of all records so far."""
    kept: dict[str, Any] = {"largest": torch.zeros(())}

    def loss(output: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(output, y)
        kept["largest"] = torch.maximum(kept["largest"], value.detach())
        return value * kept["largest"]

    return loss


class _Hooked(nn.Module):
    """A forward hook that keeps activations in a list outside of the module, which forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        kept: list[Tensor] = []
        self.first.register_forward_hook(lambda layer, given, out: kept.append(out.detach()))
        self.last.register_forward_pre_hook(lambda layer, given: (given[0] / torch.stack(kept).abs().sum(),))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x))
        return made


class _Cached(nn.Module):
    """A result that is cached by shape, which all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.scale = functools.lru_cache(maxsize=None)(self._scale)
        self._first: Tensor | None = None

    def _scale(self, shape: tuple[int, ...]) -> Tensor:
        assert self._first is not None
        return self._first.detach().abs().sum()

    def forward(self, x: Tensor) -> Tensor:
        self._first = x
        made: Tensor = self.layer(x / (1 + self.scale(tuple(x.shape))))
        return made


class _Spectral(nn.Module):
    """Complex numbers inside: a filter on the spectrum of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.layer = nn.Parameter(torch.randn(FEATURES // 2 + 1, 2)), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        made: Tensor = self.layer(torch.fft.irfft(spectrum, n=FEATURES))
        return made


class _Masked(nn.Module):
    """Attention with masks that each record makes of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.layer = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.abs().sum(-1) > 4.0
        hidden = hidden & ~hidden.all(1, keepdim=True)
        out, _ = self.attention(x, x, x, key_padding_mask=hidden, attn_mask=torch.ones(5, 5).tril() == 0)
        made: Tensor = self.layer(out.nan_to_num().mean(1))
        return made


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _parametrized() -> nn.Module:
    """Two parametrizations, one after the other."""
    layer = nn.Linear(FEATURES, FEATURES)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return nn.Sequential(layer, nn.Linear(FEATURES, CLASSES))


class _Mapped(nn.Module):
    """vmap over a record's own features, with the parameters inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(3)), nn.Linear(FEATURES * 3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.func.vmap(lambda value: torch.tanh(value * self.weight))(x.flatten())
        made: Tensor = self.layer(each.reshape(len(x), -1))
        return made


@of_model
def _one_step_ahead(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss after a step of the record's own (MAML)."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    value = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
    grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
    ahead = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, ahead, (x,)), y)


def _pooled() -> nn.Module:
    """Overlapping and plain windows of two, of three, and with indices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 + 4 + 16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            once, _ = F.max_pool2d(z, 6, return_indices=True)
            twice = F.max_pool2d(F.max_pool2d(z, 2, stride=1), (2, 2)).amax((2, 3))
            wide = F.max_pool2d(z, 3, 2, 1, ceil_mode=True)[:, :, :2, :2]
            made: Tensor = self.last(torch.cat([once.flatten(1), twice, wide.flatten(1)], 1))
            return made

    return Net()


REMEMBERING: dict[str, Case] = {
    "a list in the loss's closure": Case(_linear, mirrored, loss=_losses_in_a_list()),
    "a dictionary in the loss's closure": Case(_linear, mirrored, loss=_largest_in_a_dict()),
    "a hook that keeps activations": Case(_Hooked, mirrored),
    "a result cached by shape": Case(_Cached, mirrored),
}

ORDINARY: dict[str, Case] = {
    "complex numbers inside": Case(_Spectral),
    "attention with masks of one's own": Case(_Masked, sequences),
    "parametrizations": Case(_parametrized),
    "vmap inside": Case(_Mapped),
    "a step ahead": Case(_linear, mirrored, loss=_one_step_ahead),
    "windows": Case(_pooled, images),
    "cross entropy of a partial": Case(
        _linear, mirrored, loss=functools.partial(F.cross_entropy, label_smoothing=0.1)
    ),
}
