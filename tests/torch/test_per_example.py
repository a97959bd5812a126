"""Clipped sums of every layer against plain autograd, one record at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.gradients import recorded
from quietgrad.torch.networks.outer_products import Convolution, LinearLayerMap, OuterProducts, write_gradients
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.vectors import GradientTerms, LayerCall
from tests.torch.autograd import KEY, clipped, gradients, grouped, in_passes_of, one_at_a_time, ruled, start, summed

RULES = [
    ClippingRule.gradient(0.7),
    ClippingRule.difference(0.02),
    ClippingRule.momentum(0.3, 0.7, 0.02),
    ClippingRule.joint(0.3, 0.7),
]
BUDGETS = [512e6, 0.0]  # vectors are written out where that is cheaper, or nothing is and factors are kept


def loss(output: Any, y: Tensor) -> Tensor:
    """Every output influences it differently, and its gradient depends on the parameters."""
    flat = output.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    value: Tensor = (torch.tanh(flat) * weights).mean(1) * 3 + (flat.mean(1) - y).square()
    return value


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def agree(
    module: nn.Module, x: Any, budget: float = 512e6, rules: Any = RULES, most: int | None = None
) -> PerExampleEngine:
    """Sums and norms are autograd's, at the module's own parameters and at others; returns the engine."""
    module = module.double()
    engine = PerExampleEngine(module, loss, memory_budget=budget)
    if most is not None:
        in_passes_of(engine, most)
    points = start(engine, 0.01)
    x = x if isinstance(x, tuple) else (x,)
    parts = (*x, r(len(x[0]), seed=5))
    rows = [gradients(engine, point, *parts) for point in points]
    for rule in rules:
        expected = ruled(rule, rows[0], rows[1] if rule.beta else None)
        found = summed(engine, points, grouped(*parts), rule)
        scale = float(expected[0].abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * scale + 1e-13)
    (known,) = engine.programs.values()
    assert known.program.alone is None, known.program.alone
    return engine


class Head(nn.Module):
    """Something in front, the layer, something behind: it is neither first nor last."""

    def __init__(self, layer: nn.Module, before: nn.Module | None = None, call: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.before = before or nn.Identity()
        self.layer, self.call = layer, call or (lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.call(self.layer, torch.tanh(self.before(x)) * self.scale))


class Reused(nn.Module):
    """One layer called three times, and one whose weight is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.decode = nn.Linear(4, 9, bias=False)
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
        self.embed, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(x))) @ self.embed.weight.T


class Aliased(nn.Module):
    """Registers the weights of its cell a second time, as wrappers of recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.weight, self.bias = self.cell.weight, self.cell.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.cell(torch.tanh(self.cell(x))))


class Own(nn.Module):
    """Parameters of the model itself, in a program of its own."""

    def __init__(self, program: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.own = nn.ParameterList([nn.Parameter(r(*shape, seed=k) / 2) for k, shape in enumerate(shapes)])
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x, *self.own)


class Bags(nn.Module):
    """EmbeddingBag with offsets: the batch is one long list of tokens."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode=mode), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        output: Tensor = self.head(self.bag(tokens.flatten(), torch.cat([torch.zeros_like(start), start])))
        return output.sum(0, keepdim=True)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(6, 6), reentrant
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return output


class Attends(nn.Module):
    """Attention as torch.nn.functional has it, with queries, keys and values of their own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        keys = 4 if options.get("enable_gqa") else 8
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, keys), nn.Linear(6, keys)
        self.mask, self.bias = options.pop("mask", None), options.pop("bias", False)
        self.table = nn.Parameter(r(4, 5, 5) if self.bias else r(1))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask: Tensor | None = self.table if self.bias else None
        if self.mask == "own":
            mask = (x[..., 0] > -0.5)[:, None, None, :]
        elif self.mask == "same":
            mask = torch.ones(5, 5, dtype=torch.bool).tril()
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options).flatten(1) * self.table.mean()
        )


TOKENS = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 6], [0, 0, 0, 0], [5, 4, 2, 8]])
first = lambda layer, x: layer(x)[0]  # noqa: E731


def with_start(layer: nn.Module, x: Tensor) -> Tensor:
    """A hidden state that the record makes, and both results used."""
    state = x[:, 0, :1].expand(-1, 4)[None].expand(2, -1, -1).contiguous()
    out, last = layer(x, (state, 2 * state) if isinstance(layer, nn.LSTM) else state)
    last = last[1] if isinstance(last, tuple) else last
    return torch.cat([out.flatten(1), last.movedim(1, 0).flatten(1)], 1)


def attended(layer: nn.Module, x: Tensor) -> Tensor:
    mixed: Tensor = layer(x, torch.tanh(x), x.cos(), key_padding_mask=x[..., 0] > 1.0)[0]
    return mixed


LAYERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "linear": lambda: (Head(nn.Linear(6, 3), nn.Linear(6, 6)), r(5, 6)),
    "linear, first": lambda: (nn.Linear(6, 3), r(5, 6)),
    "linear, sequence": lambda: (Head(nn.Linear(6, 3, bias=False), nn.Linear(6, 6)), r(4, 7, 6)),
    "linear, 4-d": lambda: (Head(nn.Linear(6, 3), nn.Linear(6, 6)), r(3, 2, 4, 6)),
    "linear, long and narrow": lambda: (Head(nn.Linear(2, 3), nn.Linear(2, 2)), r(3, 40, 2)),
    "bilinear": lambda: (Head(nn.Bilinear(6, 6, 2), call=lambda layer, x: layer(x, x.cos())), r(4, 6)),
    **{
        f"{name}{d}d": (
            lambda kind=kind, d=d: (Head(kind(3, 4, 3, stride=2, padding=1), kind(3, 3, 1)), r(3, 3, *[5] * d))  # type: ignore[misc]
        )
        for d in (1, 2, 3)
        for name, kind in (("conv", getattr(nn, f"Conv{d}d")), ("transposed", getattr(nn, f"ConvTranspose{d}d")))
    },
    "conv2d, blocks of 16": lambda: (Head(nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(2, 16, 1)), r(2, 2, 17, 16)),
    "conv2d, same padding": lambda: (Head(nn.Conv2d(3, 4, 4, padding="same"), nn.Conv2d(3, 3, 1)), r(2, 3, 7, 6)),
    "conv2d, channels last": lambda: (
        Head(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(2, 3, 1)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        r(3, 2, 9, 8).contiguous(memory_format=torch.channels_last)),
    **{
        f"conv2d, {mode}": (
            lambda mode=mode: (  # type: ignore[misc]
                Head(nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), nn.Conv2d(3, 3, 1)), r(2, 3, 6, 6)))
        for mode in ("circular", "reflect")
    },
    "group norm": lambda: (Head(nn.GroupNorm(2, 4), nn.Conv2d(3, 4, 1)), r(3, 3, 5, 5)),
    "layer norm over two axes": lambda: (Head(nn.LayerNorm((4, 6)), nn.Linear(6, 6)), r(3, 2, 4, 6)),
    "rms norm": lambda: (Head(nn.RMSNorm(6), nn.Linear(6, 6)), r(3, 4, 6)),
    **{
        f"instance norm {d}d": (
            lambda d=d: (Head(getattr(nn, f"InstanceNorm{d}d")(4, affine=True)), r(3, 4, *[5] * d)))  # type: ignore[misc]
        for d in (1, 2, 3)
    },
    "frozen batch norm": lambda: (
        Head(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4).eval(), nn.Tanh())), r(3, 4, 5)),
    "prelu": lambda: (Head(nn.PReLU(4)), r(3, 4, 5)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2)), TOKENS),
    "embedding with padding": lambda: (nn.Sequential(nn.Embedding(9, 3, padding_idx=0), nn.Linear(3, 2)), TOKENS),
    "embedding bag": lambda: (nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)), TOKENS),
    "embedding bag, offsets": lambda: (Bags("mean"), (TOKENS, torch.tensor([[1], [2], [3], [1]]).flatten())),
    "embedding bag, offsets, sum": lambda: (Bags("sum"), (TOKENS, torch.tensor([1, 2, 3, 1]))),
    "in-place activations": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.ELU(inplace=True)),
        r(3, 3, 6, 6)),
    "in-place activations of other layers": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ELU(inplace=True), nn.Flatten(2),
            nn.Linear(16, 5), nn.ELU(inplace=True),
            Own(lambda x, w: F.elu_(x @ w), (5, 3))),
        r(3, 3, 6, 6)),
    "reused and tied": lambda: (Reused(), TOKENS),
    "tied by hand": lambda: (HandTied(), TOKENS),
    "aliased": lambda: (nn.Sequential(nn.Linear(6, 6), Aliased()), r(4, 6)),
    "checkpoint": lambda: (Checkpointed(False), r(4, 6)),
    "re-entrant checkpoint": lambda: (Checkpointed(True), r(4, 6)),
    "folded rows": lambda: (nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2), nn.Unflatten(0, (-1, 4))), r(5, 4, 3)),
    # recurrent layers and cells
    "rnn": lambda: (Head(nn.RNN(3, 4, batch_first=True), call=first), r(3, 5, 3)),
    "rnn, relu": lambda: (Head(nn.RNN(3, 4, nonlinearity="relu", bias=False), call=first), r(3, 5, 3)),
    "gru": lambda: (
        Head(nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True), call=first), r(3, 5, 3)),
    "gru, state": lambda: (Head(nn.GRU(3, 4, num_layers=2, batch_first=True), call=with_start), r(3, 5, 3)),
    "lstm, state": lambda: (
        Head(nn.LSTM(3, 4, bidirectional=True, batch_first=True), call=with_start), r(3, 5, 3)),
    "lstm, time first": lambda: (
        Head(nn.LSTM(3, 4), call=lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1)), r(3, 5, 3)),
    "lstm, learned state": lambda: (
        Own(lambda x, w, u, h: torch.lstm(
            x, (h[None, None], h[None, None].tanh()), [w, u], False, 1, 0.0, True, False, True)[0],
            (16, 3), (16, 4), (4,)), r(3, 5, 3)),
    "lstm cell": lambda: (
        Head(nn.LSTMCell(3, 4), call=lambda c, x: c(x, (c(x)[0], x[:, :1].expand(-1, 4)))[0]), r(3, 3)),
    "gru cell": lambda: (Head(nn.GRUCell(3, 4), call=lambda c, x: c(x, x[:, :1].expand(-1, 4))), r(3, 3)),
    "rnn cell": lambda: (Head(nn.RNNCell(3, 4)), r(3, 3)),
    # attention
    "attention": lambda: (Head(nn.MultiheadAttention(6, 2, batch_first=True), call=attended), r(3, 4, 6)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), r(3, 5, 6)),
    "attention, own mask": lambda: (Attends(mask="own"), r(3, 5, 6)),
    "attention, same mask": lambda: (Attends(mask="same"), r(3, 5, 6)),
    "attention, learned bias": lambda: (Attends(bias=True), r(3, 5, 6)),
    "attention, causal, grouped": lambda: (Attends(is_causal=True, enable_gqa=True), r(3, 5, 6)),
    # parameters that are made of others
    "weight norm": lambda: (Head(parametrizations.weight_norm(nn.Linear(6, 3))), r(4, 6)),
    "weight norm of a convolution": lambda: (Head(parametrizations.weight_norm(nn.Conv1d(3, 4, 3))), r(3, 3, 7)),
    "chunks": lambda: (
        Own(lambda x, w, b: sum(F.linear(x, p, q).sin() for p, q in zip(w.chunk(3), b.chunk(3), strict=True)),  # type: ignore[arg-type, return-value]
            (6, 6), (6,)), r(4, 6)),
    "transposes": lambda: (Own(lambda x, w: torch.tanh(x @ w.T) @ w, (5, 6)), r(4, 6)),
    "overlapping views": lambda: (Own(lambda x, w: F.linear(x, w[:4]).sin() + F.linear(x, w[2:]), (6, 6)), r(4, 6)),
    "whole and part": lambda: (Own(lambda x, w: F.linear(F.linear(x, w).tanh(), w[:2]), (6, 6)), r(4, 6)),
    "strided views": lambda: (Own(lambda x, w: F.linear(x, w[::2]) * w[1::2, 0], (6, 6)), r(4, 6)),
    "columns": lambda: (Own(lambda x, w: F.linear(x[:, :3], w[:, :3]).sin() + F.linear(x, w), (4, 6)), r(4, 6)),
    "a scale of a matrix": lambda: (Own(lambda x, s, w: F.linear(x, s.exp() * w), (), (3, 6)), r(4, 6)),
    "twice in one": lambda: (Own(lambda x, w: F.linear(x, w @ w), (6, 6)), r(4, 6)),
    "raw": lambda: (Own(lambda x, w, b: torch.tanh(x * w.exp() + b).cumsum(1), (6,), (6,)), r(4, 6)),
    "written into": lambda: (
        Own(lambda x, w: torch.cat([w.expand(len(x), -1), x], 1).index_fill(1, torch.tensor([0]), 2.0), (3,)),
        r(4, 6)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's, about its own copy
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_that_of_autograd(name: str) -> None:
    torch.manual_seed(1)
    agree(*LAYERS[name]())
    if name.startswith(("linear", "conv", "reused", "tied", "gru", "chunks", "whole")):
        agree(*LAYERS[name](), 0.0, RULES[2:3])


FLOAT32 = {  # weight, stride, side of an image: kernels that are for float32 alone
    "a group for each example": ((32, 16, 3, 3), 1, 16),
    "a group for each example, in several blocks": ((64, 64, 3, 3), 1, 16),
    "a call for each example": ((64, 3, 7, 7), 2, 64),
}


@pytest.mark.parametrize("families", [1, 2])
@pytest.mark.parametrize("name", FLOAT32)
def test_convolutions_in_float32_are_those_in_float64_and_each_record_s_own(name: str, families: int) -> None:
    weight, stride, side = FLOAT32[name]
    layer = Convolution(weight, (stride, stride), (weight[2] // 2,) * 4, (1, 1), 1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((20, weight[1], side, side), generator=generator)
    grads = torch.randn((20, families * weight[0], side // stride, side // stride), generator=generator)
    values = torch.empty((20, families * weight[0], layer.shape[1]))
    squares = write_gradients(layer, LayerCall(x, grads), values)
    wide = torch.bmm(layer.rows(grads.double()), layer.columns(x.double()).mT)
    torch.testing.assert_close(values.double(), wide, rtol=1e-4, atol=1e-4 * float(wide.abs().max()))
    torch.testing.assert_close(squares[:, 0], wide.flatten(1).square().sum(1), rtol=1e-5, atol=0.0)
    before = values.clone()
    x[1:], grads[1:] = 1e20, torch.nan
    write_gradients(layer, LayerCall(x, grads), values)
    assert torch.equal(values[0], before[0])


@pytest.mark.parametrize("name", ["in-place activations", "in-place activations of other layers"])
def test_writing_in_place_copies_nothing_on_the_way_back(name: str) -> None:
    """Autograd copies the whole of a tensor that a view of it was written into; a layer's output is no view."""
    module, x = LAYERS[name]()
    engine = PerExampleEngine(module.double())
    rows = np.arange(len(x))
    (made,) = engine.record([RecordGroup(rows, ((x[:, None],), {}))], RecordSeeds(bytes(32), rows))
    seen, near = set(), [made.outputs.grad_fn]
    while near:
        node = near.pop()
        if node is not None and node not in seen:
            seen.add(node)
            near += [above for above, _ in node.next_functions]
    names = {node.name() for node in seen}
    assert any(each.startswith("EluBackward") for each in names)
    assert "CopySlices" not in names


RANDOM: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: Head(nn.Dropout(0.4), nn.Linear(6, 6)), (6, 6)),
    "recurrent": (lambda: Head(nn.LSTM(6, 4, 2, dropout=0.5, batch_first=True), call=first), (6, 5, 6)),
    "attention": (
        lambda: Head(nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True), call=attended),
        (6, 4, 6),
    ),
    "attention, functional": (lambda: Attends(dropout_p=0.4), (6, 5, 6)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_inside_layers_is_each_record_s_own(name: str) -> None:
    """Together, in other company, or one at a time: the same masks; other keys have others."""
    torch.manual_seed(1)
    make, shape = RANDOM[name]
    module, x, y = make().double(), r(*shape), r(shape[0], seed=5)
    engine, groups = PerExampleEngine(module, loss), grouped(x, y)
    points = start(engine, 0.01)
    whole, _ = summed(engine, points, groups, RULES[2])
    slow, _ = summed(one_at_a_time(module, loss, groups), points, groups, RULES[2])
    torch.testing.assert_close(whole, slow, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(whole, summed(engine, points, groups, RULES[2], key=bytes(32))[0], rtol=1e-3)
    here, _ = summed(engine, (points[0], points[0]), groups, RULES[1])
    assert here.abs().max() == 0  # the same at both points


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("linear, sequence", {"linear"}),
        ("conv2d", {"conv2d"}),
        ("reused and tied", {"linear", "embedding"}),
        ("tied by hand", {"linear", "embedding", "matmul"}),
        ("gru", {"recurrent input", "recurrent state"}),
        ("gru, state", {"recurrent input", "recurrent state"}),
        ("attention", {"linear"}),
        ("transposes", {"matmul"}),
        ("chunks", {"linear"}),
    ],
)
def test_operations_have_kernels(name: str, operations: set[str]) -> None:
    torch.manual_seed(1)
    module, x = LAYERS[name]()
    engine = PerExampleEngine(module.double(), loss)
    engine.try_out(grouped(x, r(len(x), seed=5))[0].record)
    (known,) = engine.programs.values()
    assert {operation for operation, names, _, kernel in known.sites if kernel} == operations
    assert all(copied <= 4 for operation, _, copied, kernel in known.sites if not kernel)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 3),
    width=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mode=st.sampled_from(["zeros", "circular", "replicate"]),
    budget=st.sampled_from(BUDGETS),
    examples=st.integers(1, 4),
)
def test_convolutions_of_every_shape(
    groups: int, width: int, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int],
    padding: tuple[int, int], mode: Literal["zeros", "circular", "replicate"], budget: float, examples: int,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    layer = nn.Conv2d(groups * width, groups * 2, kernel, stride, padding, dilation, groups, True, mode)
    agree(Head(layer, nn.Conv2d(2, groups * width, 1)), r(examples, 2, 7, 6), budget, RULES[2:3])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    outputs=st.integers(1, 5),
    bias=st.booleans(),
    most=st.sampled_from([None, 1, 2]),
    budget=st.sampled_from([0.0, 200.0, 1e6]),
)
def test_linear_of_every_shape(shape: list[int], outputs: int, bias: bool, most: int | None, budget: float) -> None:
    torch.manual_seed(1)
    module = Head(nn.Linear(shape[-1], outputs, bias), nn.Linear(shape[-1], shape[-1]))
    agree(module, r(4, *shape), budget, RULES[2:3], most)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.integers(0, 2),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
    budget=st.sampled_from(BUDGETS),
)
def test_depthwise_convolutions(
    kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], padding: int,
    mode: Literal["zeros", "reflect", "circular"], budget: float,
) -> None:  # fmt: skip
    """Filters of one channel, by shifted products, in every geometry and memory format."""
    layer = nn.Conv2d(3, 3, kernel, stride, padding, dilation, groups=3, padding_mode=mode)
    wide = Head(layer).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    agree(wide, r(4, 3, 9, 8).contiguous(memory_format=torch.channels_last), budget, RULES[2:3])


def einstein(*equations: str) -> Callable[..., Tensor]:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        results = [torch.einsum(equation, *[x] * equation.count(","), weight) for equation in equations]
        return torch.cat([torch.sin(result).reshape(len(x), -1) for result in results], 1)

    return program


@pytest.mark.parametrize(
    ("equations", "shape", "kernel"),
    [
        (("btd,edh->bteh",), (3, 4, 5), True),  # one to many
        (("btd,hde->bhte",), (3, 4, 5), True),  # the result's axes in another order
        (("btd,bsd,dhe->bhse",), (4, 3, 5), True),  # the others first
        (("btd,td->b",), (6, 4), True),  # no free index
        (("btd,edh->bteh", "btd,dhe->bhte"), (4, 4, 4), True),  # one parameter in two arrangements
        (("btd,td->btd",), (6, 4), False),  # an index of all three
        (("btd,dh->bth",), (1, 3), False),  # an axis of one that is repeated
        (("btd,bte,dh->bth",), (4, 3), False),
        (("btd,dhh->bth",), (4, 3, 3), False),  # a diagonal
    ],
)
def test_einstein_sums(equations: tuple[str, ...], shape: tuple[int, ...], kernel: bool) -> None:
    for budget in BUDGETS:
        engine = agree(Own(einstein(*equations), shape), r(5, 6, 4), budget, RULES[2:3])
        (known,) = engine.programs.values()
        assert not kernel or all(has for _, _, _, has in known.sites)


class Idle(nn.Sequential):
    """Has a layer that nothing goes through."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


def test_frozen_parameters_stay_out_and_unused_ones_get_zero() -> None:
    torch.manual_seed(1)
    module = Idle(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4))
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    engine = agree(module, r(4, 6))
    assert engine.names == ["2.bias", "3.weight", "3.bias", "idle.weight", "idle.bias"]
    out, _ = summed(engine, (start(engine),), grouped(r(4, 6), r(4)), RULES[0])
    assert engine.views(out)["idle.weight"].abs().max() == 0


@pytest.mark.parametrize(
    "name", ["linear", "reused and tied", "lstm cell", "overlapping views", "whole and part", "gru"]
)
def test_what_a_loop_of_one_s_own_leaves_is_the_same(name: str) -> None:
    """Two calls of the module add up before they are clipped; norms may be asked for again."""
    torch.manual_seed(1)
    module, x = LAYERS[name]()
    y, engine = r(len(x), seed=5), PerExampleEngine(module.double())
    (group,) = grouped(x)
    calls, keys = [group._replace(record=(group.record, {}))], RecordSeeds(KEY, group.rows)
    recordings = [engine.record(calls, keys) for _ in range(2)]
    for factor, recording in zip((1.0, 2.0), recordings, strict=True):
        (made,) = recording
        torch.autograd.backward(factor * loss(made.outputs.flatten(0, 1), y).sum())
    passes = [made for recording in recordings for made in recording]
    (found,) = recorded(passes, len(x), engine.space)
    rows = 3 * gradients(PerExampleEngine(module, loss), start(engine), x, y)
    out = torch.zeros_like(rows[0])
    for _ in range(2):
        torch.testing.assert_close(found.norms()[:, 0], rows.norm(dim=1), rtol=1e-9, atol=1e-12)
    found.add_weighted((0.1 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0), out)
    torch.testing.assert_close(out, clipped(rows, 0.1).sum(0), rtol=1e-9, atol=1e-12)


def test_inputs_that_are_the_same_at_both_points_need_one_product() -> None:
    """Also where they lie elsewhere in memory, as in passes whose left-over places are filled."""
    layer, mix = LinearLayerMap(3, 4), GradientTerms(gradient=True, change=True)
    x, now, before = r(5, 2, 4), r(5, 2, 3, seed=1), r(5, 2, 3, seed=2)
    alike = OuterProducts.of(layer, LayerCall(x, now), LayerCall(x.clone(), before), mix)
    apart = OuterProducts.of(layer, LayerCall(x, now), LayerCall(x + 1e-9, before), mix)
    assert [len(each.lefts) for each in (alike, apart)] == [1, 2]
    torch.testing.assert_close(alike.squared_norms(), apart.squared_norms(), rtol=1e-6, atol=0.0)
