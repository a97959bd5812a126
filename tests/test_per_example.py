"""Per-example sums of every layer against vmap(grad) in float64, the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quietgrad.objectives.networks.engine import PerExampleEngine, Strategy
from quietgrad.torch.clipping import clipped_difference_sum, clipped_gradient_sum

CLIP, DIFFERENCE_CLIP, GAMMA = 0.7, 0.02, 0.3


def total_loss(output: Tensor, y: Tensor) -> Tensor:
    """A loss that every output influences differently, and whose gradient depends on the parameters."""
    flat = output.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return (torch.tanh(flat) * weights).mean(1) * 3 + (flat.mean(1) - y).square()


class Head(nn.Module):
    """Something in front, the layer, something behind: no layer is first or last."""

    def __init__(self, layer: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(torch.tanh(self.before(x)) if x.is_floating_point() else x))


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def agree(
    module: nn.Module, x: Tensor, strategy: Strategy = "auto", planned: bool | None = True, **options: float
) -> None:
    """All four sums and their norms equal those of vmap(grad) to 1e-9."""
    module = module.double()
    generator = torch.Generator().manual_seed(3)
    engine = PerExampleEngine(module, total_loss, strategy=strategy, **options)  # type: ignore[arg-type]
    oracle = PerExampleEngine(module, total_loss, strategy="functional")
    theta = engine.flatten(dict(module.named_parameters()))
    previous = theta + 0.01 * torch.randn(engine.dim, dtype=theta.dtype, generator=generator)
    y = inputs(len(x), seed=5)
    queries: list[Callable[[PerExampleEngine, Tensor], Tensor]] = [
        lambda e, out: e.add_clipped_gradients(theta, x, y, CLIP, out),
        lambda e, out: e.add_clipped_differences(theta, previous, x, y, DIFFERENCE_CLIP, out),
        lambda e, out: e.add_recursive_momentum(theta, previous, x, y, GAMMA, CLIP, DIFFERENCE_CLIP, out),
        lambda e, out: e.add_joint_momentum(theta, previous, x, y, GAMMA, CLIP, out),
    ]
    for query in queries:
        ours, theirs = torch.zeros_like(theta), torch.zeros_like(theta)
        norms, expected = query(engine, ours), query(oracle, theirs)
        torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))
    if planned is not None:
        assert [way.units is not None for way in engine._ways.values()] == [planned]


class Reused(nn.Module):
    """One layer called three times, and a bias-free one whose weight is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.cell = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 7, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        state = self.embed(x)
        for _ in range(3):
            state = torch.tanh(self.cell(state))
        output: Tensor = self.decode(state)
        return output


class HandTied(nn.Module):
    """The embedding's weight is used outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(x))) @ self.embed.weight.T


class RawParameter(nn.Module):
    """A parameter of the model itself, beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6) / 3)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(torch.tanh(x + self.shift))
        return output


class Scale(nn.Module):
    """A layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.randn(6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log.exp()


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.lift = nn.Linear(6, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        z = self.lift(x if self.batch_first else x.transpose(0, 1))
        mixed: Tensor = self.attend(z, torch.tanh(z), z, need_weights=False)[0]
        return mixed if self.batch_first else mixed.transpose(0, 1)


TOKENS = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 6], [0, 0, 0, 0], [5, 4, 2, 0]])

LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (Head(nn.Linear(6, 3), nn.Linear(6, 6)), inputs(5, 6)),
    "linear, first": lambda: (nn.Linear(6, 3), inputs(5, 6)),
    "linear, no bias": lambda: (Head(nn.Linear(6, 3, bias=False), nn.Linear(6, 6)), inputs(5, 6)),
    "linear, sequence": lambda: (Head(nn.Linear(6, 3), nn.Linear(6, 6)), inputs(4, 7, 6)),
    "linear, sequence, first": lambda: (nn.Linear(6, 3), inputs(4, 7, 6)),
    "linear, 4-d": lambda: (Head(nn.Linear(6, 3), nn.Linear(6, 6)), inputs(3, 2, 4, 6)),
    "linear, long and narrow": lambda: (Head(nn.Linear(2, 3), nn.Linear(2, 2)), inputs(3, 40, 2)),
    "conv1d": lambda: (Head(nn.Conv1d(3, 4, 3, 2, 1), nn.Conv1d(3, 3, 1)), inputs(3, 3, 11)),
    "conv2d": lambda: (Head(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 3, 1)), inputs(3, 3, 9, 8)),
    "conv2d, blocks of 16": lambda: (Head(nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(2, 16, 1)), inputs(2, 2, 17, 16)),
    "conv2d, same padding": lambda: (
        Head(nn.Conv2d(3, 4, 4, padding="same"), nn.Conv2d(3, 3, 1)), inputs(2, 3, 7, 6)),
    "conv2d, channels last": lambda: (
        Head(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(2, 3, 1)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        inputs(3, 2, 9, 8).contiguous(memory_format=torch.channels_last)),
    "conv2d, circular": lambda: (
        Head(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(3, 3, 1)), inputs(3, 3, 6, 6)),
    "conv2d, reflect": lambda: (
        Head(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(3, 3, 1)), inputs(3, 3, 6, 6)),
    "conv3d": lambda: (Head(nn.Conv3d(2, 3, 2, 1, 1), nn.Conv3d(2, 2, 1)), inputs(2, 2, 4, 3, 5)),
    "group norm": lambda: (Head(nn.GroupNorm(2, 4), nn.Conv2d(3, 4, 1)), inputs(3, 3, 5, 5)),
    "layer norm": lambda: (Head(nn.LayerNorm(6), nn.Linear(6, 6)), inputs(3, 4, 6)),
    "layer norm over two axes": lambda: (Head(nn.LayerNorm((4, 6)), nn.Linear(6, 6)), inputs(3, 2, 4, 6)),
    "rms norm": lambda: (Head(nn.RMSNorm(6), nn.Linear(6, 6)), inputs(3, 4, 6)),
    "instance norm": lambda: (Head(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(3, 4, 1)), inputs(3, 3, 5, 5)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), TOKENS),
    "embedding with padding": lambda: (nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Linear(3, 2)), TOKENS),
    "in-place activations": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.ELU(inplace=True)),
        inputs(3, 3, 6, 6)),
    "reused and tied": lambda: (Reused(), TOKENS),
    "own layer": lambda: (nn.Sequential(nn.Linear(6, 6), Scale(), nn.Tanh(), nn.Linear(6, 2)), inputs(4, 6)),
    "transposed convolution": lambda: (Head(nn.ConvTranspose1d(3, 2, 3), nn.Conv1d(3, 3, 1)), inputs(3, 3, 5)),
    "attention": lambda: (Attention(True), inputs(3, 5, 6)),
    "attention, sequence first": lambda: (Attention(False), inputs(3, 5, 6)),
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), inputs(3, 5, 6)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's, about its own copy
@pytest.mark.parametrize("strategy", ["auto", "factored"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_definition(name: str, strategy: Strategy) -> None:
    torch.manual_seed(1)
    agree(*LAYERS[name](), strategy)


@pytest.mark.parametrize(
    "model",
    [HandTied, RawParameter, lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2), nn.Unflatten(0, (-1, 4)))],
)
def test_parameters_outside_of_layers_and_folded_rows(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    module = model()
    x = {"HandTied": TOKENS, "RawParameter": inputs(4, 6)}.get(type(module).__name__, inputs(5, 4, 3))
    agree(module, x, planned=True)


def test_reparametrised_and_subclassed_layers() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight), self.weight, self.bias)

    torch.manual_seed(1)
    agree(nn.Sequential(Twice(6, 6), nn.Tanh(), nn.Linear(6, 2)), inputs(4, 6))
    agree(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), inputs(4, 6), planned=None)


def test_recurrent_network_without_vmap_rule() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.lstm(x)[0]
            return output

    torch.manual_seed(1)
    module, x, y = Recurrent().double(), inputs(3, 4, 3), inputs(3)
    sums, norms = clipped_gradient_sum(module, total_loss, (x, y), CLIP)
    for i in range(3):
        alone = torch.autograd.grad(total_loss(module(x[i : i + 1]), y[i : i + 1]).sum(), list(module.parameters()))
        norm = torch.cat([g.flatten() for g in alone]).norm()
        assert norms[i].item() == pytest.approx(norm.item(), rel=1e-9)
        for total, g in zip(sums.values(), alone, strict=True):
            total -= g * min(1.0, CLIP / norm.item())
    assert all(total.abs().max() < 1e-9 for total in sums.values())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 3),
    width=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mode=st.sampled_from(["zeros", "circular", "replicate"]),
    strategy=st.sampled_from(["auto", "factored"]),
    examples=st.integers(1, 4),
)
def test_convolutions_of_every_shape(
    groups: int,
    width: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    mode: Literal["zeros", "circular", "replicate"],
    strategy: Strategy,
    examples: int,
) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(groups * width, groups * 2, kernel, stride, padding, dilation, groups, True, mode)
    agree(Head(layer, nn.Conv2d(2, groups * width, 1)), inputs(examples, 2, 7, 6), strategy)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    outputs=st.integers(1, 5),
    bias=st.booleans(),
    micro_batch=st.sampled_from([None, 1, 2]),
    memory_budget=st.sampled_from([0.0, 200.0, 1e6]),
)
def test_linear_of_every_shape(
    shape: list[int], outputs: int, bias: bool, micro_batch: int | None, memory_budget: float
) -> None:
    torch.manual_seed(1)
    module = Head(nn.Linear(shape[-1], outputs, bias), nn.Linear(shape[-1], shape[-1]))
    agree(module, inputs(4, *shape), micro_batch=micro_batch, memory_budget=memory_budget)  # type: ignore[arg-type]


def test_frozen_parameters_stay_out() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4))
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    engine = PerExampleEngine(module, total_loss)
    assert engine.names == ["2.bias", "3.weight", "3.bias"]
    agree(module, inputs(4, 6))


def test_parameter_without_influence_gets_zero() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.used(x)
            return output

    sums, _ = clipped_gradient_sum(Idle(), total_loss, (torch.randn(4, 3), torch.zeros(4)), 1.0)
    assert sums["unused.weight"].abs().max() == 0
    assert sums["used.weight"].abs().max() > 0


def test_same_dropout_mask_at_both_points() -> None:
    module = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 1))
    here = {name: p.detach().clone() for name, p in module.named_parameters()}
    _, norms = clipped_difference_sum(module, here, total_loss, (torch.randn(8, 6), torch.zeros(8)), 1.0)
    assert norms.max() == 0


class Sums(nn.Module):
    """Einstein sums with parameters: products with matrices in another order, and two that are none."""

    def __init__(self, *equations: str, shape: tuple[int, ...] = (3, 4, 5)) -> None:
        super().__init__()
        self.equations = equations
        self.weight = nn.Parameter(inputs(*shape, seed=11))

    def forward(self, x: Tensor) -> Tensor:
        results = [torch.einsum(equation, *[x] * equation.count(","), self.weight) for equation in self.equations]
        return torch.cat([torch.sin(result).reshape(len(x), -1) for result in results], 1)


@pytest.mark.parametrize("strategy", ["auto", "factored"])
@pytest.mark.parametrize(
    ("equations", "shape"),
    [
        (("btd,edh->bteh",), (3, 4, 5)),  # one to many
        (("btd,hde->bhte",), (3, 4, 5)),  # the result's axes in another order
        (("btd,bsd,dhe->bhse",), (4, 3, 5)),  # the others first
        (("btd,td->b",), (6, 4)),  # no free index
        (("btd,edh->bteh", "btd,dhe->bhte"), (4, 4, 4)),  # one parameter in two arrangements
        (("btd,btd,btd,tdh->bh",), (6, 4, 3)),
    ],
)
def test_einstein_sums(equations: tuple[str, ...], shape: tuple[int, ...], strategy: Strategy) -> None:
    agree(Sums(*equations, shape=shape), inputs(5, 6, 4), strategy)
    engine = PerExampleEngine(Sums(*equations, shape=shape), total_loss)
    engine.add_clipped_gradients(
        engine.flatten(dict(engine.module.named_parameters())), inputs(5, 6, 4), inputs(5), 1.0,
        torch.zeros(engine.dim, dtype=torch.float64),
    )  # fmt: skip
    assert not engine.fallbacks


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("btd,td->btd", (6, 4)), ("btd,dh->bth", (1, 3)), ("btd,bte,dh->bth", (4, 3)), ("btd,dhh->bth", (4, 3, 3))],
)
def test_einstein_sums_that_are_no_matrix_product(equation: str, shape: tuple[int, ...]) -> None:
    """An index of all three; an axis of one that is repeated; a diagonal."""
    agree(Sums(equation, shape=shape), inputs(5, 6, 4), planned=None)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.integers(0, 2),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
    strategy=st.sampled_from(["auto", "factored"]),
)
def test_depthwise_convolutions(
    kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], padding: int,
    mode: Literal["zeros", "reflect", "circular"], strategy: Strategy,
) -> None:  # fmt: skip
    """Filters of one channel, by shifted products, in every geometry."""
    layer = nn.Conv2d(3, 3, kernel, stride, padding, dilation, groups=3, padding_mode=mode)
    agree(Head(layer), inputs(4, 3, 9, 8), strategy)
    wide = nn.Sequential(layer, nn.Flatten()).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    agree(wide, inputs(4, 3, 9, 8).contiguous(memory_format=torch.channels_last), strategy, planned=None)
