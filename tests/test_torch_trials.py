"""Trials on made-up examples: a gradient that jumps excuses its own example, and no wrong kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.objectives.networks import collector
from quietgrad.objectives.networks.contributions import Combination
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.outer import OuterProducts
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.networks.ways import Way


class Jumping(nn.Module):
    """A network whose gradient, for one example in ten, depends on the last digit of an activation.

    It is not the same alone and in a batch: sums of three hundred products in another order.
    """

    def __init__(self, rare: float = 1.3) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(300, 16), nn.Linear(16, 1), rare

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        digits = (z.detach() * 2**24).round() % 2
        jumping = z.detach() + (z - z.detach()) * digits  # z, with a slope of nought or one
        out: Tensor = self.second(torch.where(x[:, :1] > self.rare, jumping, z).tanh())
        return out


def chosen(model: nn.Module) -> Way:
    engine = PerExampleEngine(model, lambda out, y: (out.squeeze(1) - y).square())
    return engine.way(torch.zeros(4, 300), torch.zeros(4))


def test_an_example_whose_gradient_jumps_says_nothing_about_the_kernels() -> None:
    torch.manual_seed(0)
    way = chosen(Jumping())
    assert way.plan is not None, way.why


def test_if_most_gradients_jump_nothing_is_sure() -> None:
    torch.manual_seed(0)
    assert chosen(Jumping(rare=-0.5)).plan is None


class Off:
    """A contribution with other norms: a little less of all, or nothing of one example."""

    def __init__(self, inner: Any, row: int | None) -> None:
        self.inner, self.row = inner, row

    def squared_norms(self) -> Tensor:
        squares: Tensor = self.inner.squared_norms().clone()
        squares[slice(None) if self.row is None else self.row] *= 0.98 if self.row is None else 0.0
        return squares

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("row", [None, 0, -1])
def test_a_wrong_kernel_is_caught_beside_gradients_that_jump(
    row: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = collector.Collector._put
    monkeypatch.setattr(collector.Collector, "_put", lambda self, slot, piece: put(self, slot, Off(piece, row)))
    torch.manual_seed(0)
    assert chosen(Jumping()).plan is None


def test_a_float32_module_may_have_float64_targets_or_layers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(300, 16), nn.Linear(16, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).tanh().double())
            return out

    torch.manual_seed(0)
    for model in (nn.Sequential(nn.Linear(300, 16), nn.Tanh(), nn.Linear(16, 1)), Mixed()):
        engine = PerExampleEngine(model, lambda out, y: (out.squeeze(1) - y).square())
        way = engine.way(torch.zeros(4, 300), torch.zeros(4, dtype=torch.float64))
        assert way.plan is not None, way.why


class Deep(nn.Module):
    """The last layers of a network for images: many channels on four positions, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.second(self.second(self.first(x).tanh()).tanh())
        out: Tensor = self.head(z.mean((2, 3)))
        return out


@pytest.mark.parametrize("apart", [1e-1, 1e-5])
def test_few_positions_are_clipped_from_factors(apart: float) -> None:
    torch.manual_seed(0)
    model, x, y = Deep(), 3 * torch.randn(5, 64, 2, 2), 5 * torch.randn(5)
    fast, slow = (
        PerExampleEngine(model, lambda out, y: (out.squeeze(1) - y).square(), strategy=strategy)
        for strategy in ("auto", "functional")
    )
    theta = fast.flatten(dict(model.named_parameters()))
    previous = theta + apart * torch.randn_like(theta)
    sums = [torch.zeros_like(theta, dtype=torch.float64) for _ in range(2)]
    norms = [
        engine.add_recursive_momentum(theta, previous, x, y, 0.3, 1.0, 0.1 * apart, out)
        for engine, out in zip((fast, slow), sums, strict=True)
    ]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-7)
    assert float((sums[0] - sums[1]).norm()) <= 1e-5 * float(sums[1].norm())
    mix = Combination(gradient=True, change=False)
    pieces = fast.way(x, y).pieces(theta, None, x, y, mix, RecordKeys(bytes(32), np.arange(5)))
    first = next(piece for where, piece in pieces if where.start == 0)
    assert isinstance(first, OuterProducts)
    assert first.by_gram
