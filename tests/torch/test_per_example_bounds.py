"""What the clipped sums promise: the bound C in any precision, accurate small differences, and clear refusals."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch import clipped_sums
from quietgrad.torch.clipped_sums import clipped_difference_sum, clipped_gradient_sum
from quietgrad.torch.networks import compiled_sums, operations
from quietgrad.torch.networks.engine import _SLACK, PerExampleEngine
from quietgrad.torch.networks.gradients import Collector, ProgramProfile
from quietgrad.torch.networks.one_record import Pass
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.vectors import GradientTerms, Workspace
from tests.torch.autograd import KEY, gradients, grouped, one_at_a_time, ruled, start, summed

WAYS: dict[str, Callable[..., PerExampleEngine]] = {
    "written out": lambda module, loss, groups: PerExampleEngine(module, loss),
    "from factors": lambda module, loss, groups: PerExampleEngine(module, loss, memory_budget=0.0),
    "one at a time": one_at_a_time,
}
UNCLIPPED = ClippingRule.gradient(math.inf)
cross_entropy = nn.CrossEntropyLoss()


def papers_models() -> Any:
    path = Path(__file__).parents[2] / "reproduce" / "models.py"
    spec = importlib.util.spec_from_file_location("papers_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = papers_models()


def problem(name: str, examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "transformer":
        module = MODELS.Transformer(vocabulary=50, width=16, heads=2, hidden=32, layers=2, length=12)
        return module, torch.randint(50, (examples, 12)), torch.randint(2, (examples,))
    shape = (1, 28, 28) if name.startswith("mnist") else (3, 32, 32)
    return MODELS.MODELS[name](), torch.randn(examples, *shape), torch.randint(10, (examples,))


def test_papers_parameter_counts() -> None:
    counts = {name: MODELS.parameter_count(model()) for name, model in MODELS.MODELS.items()}
    assert counts["mnist-cnn4"] == 26_010
    assert counts["cnn5"] == 62_006
    assert counts == {
        "mnist-cnn4": 26_010, "mnist-cnn2": 8_266, "cnn5": 62_006, "cnn6": 955_914, "resnet20": 272_282,
        "transformer": 5_240_834,
    }  # fmt: skip
    assert MODELS.parameter_count(MODELS.CNN6().freeze_features()) < counts["cnn6"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mnist-cnn4", "cnn5", "transformer"])
def test_no_contribution_exceeds_the_bound_in_float32(name: str, way: str) -> None:
    module, x, y = problem(name, 3)
    engine = WAYS[way](module, cross_entropy, grouped(x, y))
    theta = start(engine)
    for relative in (1e-1, 1e-5):
        previous = theta + relative * theta.norm() * F.normalize(torch.randn(engine.dim), dim=0)
        norms = summed(engine, (theta, previous), grouped(x, y), ClippingRule.momentum(0.5, 1.0, 1.0))[1]
        gradient, change = (0.5 * float(each.min()) for each in norms.unbind(1))
        for i in range(len(x)):
            one = grouped(x[i : i + 1], y[i : i + 1])
            rules = (ClippingRule.difference(change), change), (ClippingRule.gradient(gradient), gradient)
            for rule, bound in rules:
                length = float(summed(engine, (theta, previous), one, rule)[0].norm())
                assert bound * (1 - 1e-4) < length <= bound
            both, _ = summed(engine, (theta, previous), one, ClippingRule.momentum(0.5, gradient, change))
            assert float(both.norm()) <= 0.5 * (change + gradient)


@pytest.mark.parametrize("way", ["written out", "from factors"])
@pytest.mark.parametrize("name", ["mnist-cnn4", "cnn5", "transformer"])
def test_norms_of_small_differences(name: str, way: str) -> None:
    """Against what the same taps kept in float32, subtracted in float64, down to relative steps of 1e-5."""
    module, x, y = problem(name, 8)
    (group,) = groups = grouped(x, y)
    engine = WAYS[way](module, cross_entropy, groups)
    theta, keys = start(engine), RecordSeeds(KEY, group.rows)
    mix = GradientTerms(gradient=False, change=True, scale=1.0)
    for relative in (1e-1, 1e-3, 1e-5):
        previous = theta + relative * theta.norm() * F.normalize(torch.randn(engine.dim), dim=0)
        found = summed(engine, (theta, previous), groups, ClippingRule.difference(1.0))[1][:, 0]
        space = Workspace(math.inf, torch.empty(0, dtype=torch.float64))
        exact = Collector(mix, space, len(x))
        for point in (previous, theta):
            program = engine.try_out(group.record).program
            done = program.together(engine.loss_of, engine._leaves(point), group.record, keys, group.rows)
            assert isinstance(done, Pass)
            torch.autograd.backward(done.outputs.sum())
            exact.begin(done.sites, first=point is previous)
            exact.end(done.sites)
        torch.testing.assert_close(found, exact.gradients()[0].norms()[:, 0], rtol=1e-4, atol=0.0)
        if relative == 1e-5:
            break
        both = summed(engine, (theta, previous), groups, ClippingRule.momentum(0.1, 1.0, 1.0))[1]
        torch.testing.assert_close(both[:, 1], found, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_record_without_a_finite_norm_counts_as_zero(poison: float, way: str) -> None:
    module, x, y = problem("mnist-cnn4", 5)
    engine = WAYS[way](module, cross_entropy, grouped(x, y))
    rest = torch.tensor([0, 1, 3, 4])
    points = start(engine, 0.01)
    for rule in (ClippingRule.gradient(1.0), ClippingRule.momentum(0.3, 1.0, 0.1)):
        expected, _ = summed(engine, points, grouped(x[rest], y[rest]), rule)
        broken = x.clone()
        broken[2, 0, 3, 3] = poison
        found, norms = summed(engine, points, grouped(broken, y), rule)
        assert norms.isfinite().all(1).tolist() == [True, True, False, True, True]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(x).mean(1))
        return output


class Visits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.cell(x)[0][:, -1])
        return output


ROUNDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 3)), (300,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, 2), nn.GroupNorm(4, 8), nn.Flatten(),
            nn.Linear(32, 3),
        ), (3, 8, 8)),
    "attention": (Encoder, (6, 16)),
    "recurrent": (Visits, (5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_by_the_number_of_rows_is_within_the_slack(name: str, dtype: torch.dtype) -> None:
    """One pass of up to 4096 rows, equal ones, whose roundings would change alike, and different ones.

    Measured with one thread: at most 2e-9 over C / (1 + slack) in float32 and 1e-13 in float64.
    """
    torch.manual_seed(1)
    make, shape = ROUNDED[name]
    engine = PerExampleEngine(make().to(dtype), lambda output, y: 10 * cross_entropy(output, y))
    theta, clip, y = start(engine), 1e-3, torch.zeros(4096, dtype=torch.long)
    for x in (
        torch.randn(1, *shape, dtype=dtype).repeat(4096, *[1] * len(shape)),
        torch.randn(4096, *shape, dtype=dtype),
    ):
        for count in (1, 2, 3, 15, 64, 255, 511, 1024, 4095):
            fewer, more = (
                summed(engine, (theta,), grouped(x[:n], y[:n]), ClippingRule.gradient(clip))[0]
                for n in (count, count + 1)
            )
            moved = float((more - fewer).norm()) / clip * (1 + _SLACK[dtype])
            assert 1 - 1e-6 < moved <= 1 + 0.01 * _SLACK[dtype] + 1e-12 * (dtype == torch.float64)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(half: torch.dtype) -> None:
    """A module in half precision gives the sums of the same numbers in float32, and keeps its own precision."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 5)).to(half)
    module.register_buffer("mean", torch.randn(20).to(half))
    module.register_forward_pre_hook(lambda own, args: (args[0] - own.mean,))
    x, y = torch.randn(40, 20).to(half), torch.randint(5, (40,))
    sums, norms = clipped_gradient_sum(module, cross_entropy, (x, y), 0.1)
    assert norms.dtype == torch.float64
    assert {total.dtype for total in sums.values()} == {torch.float32}
    assert {p.dtype for p in (*module.parameters(), *module.buffers())} == {half}
    full, lengths = clipped_gradient_sum(module.float(), cross_entropy, (x.float(), y), 0.1)
    torch.testing.assert_close((sums, norms), (full, lengths), rtol=1e-6, atol=1e-7)


def test_a_float32_module_may_have_float64_targets_or_layers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(30, 16), nn.Linear(16, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).tanh().double())
            return out

    torch.manual_seed(0)
    x, y = torch.randn(6, 30), torch.randn(6, dtype=torch.float64)
    for model in (nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1)), Mixed()):
        engine = PerExampleEngine(model, lambda out, y: (out.squeeze(1) - y).square())
        found, norms = summed(engine, (start(engine),), grouped(x, y), ClippingRule.gradient(0.5))
        expected = ruled(ClippingRule.gradient(0.5), gradients(engine, start(engine), x, y))
        torch.testing.assert_close((found, norms), expected, rtol=1e-4, atol=1e-5)


def test_the_engine_of_a_model_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sum of a model and a loss tries nothing out; other trained parameters, or another loss, do."""
    module, x, y = problem("mnist-cnn4", 3)
    tried: list[Any] = []
    try_out = ProgramProfile.try_out

    def noted(*args: Any) -> None:
        tried.append(args)
        try_out(*args)

    monkeypatch.setattr(ProgramProfile, "try_out", noted)
    previous = {name: p.detach() - 0.1 for name, p in module.named_parameters()}
    first = clipped_gradient_sum(module, cross_entropy, (x, y), 1.0)
    clipped_difference_sum(module, previous, cross_entropy, (x, y), 1.0)
    with torch.no_grad():
        next(module.parameters()).mul_(2.0)
    second = clipped_gradient_sum(module, cross_entropy, (x, y), 1.0)
    assert len(tried) == 1
    assert not torch.equal(first[1], second[1])  # at the parameters as they are now
    next(module.parameters()).requires_grad_(False)
    sums, _ = clipped_gradient_sum(module, cross_entropy, (x, y), 1.0)
    assert len(sums) == len(first[0]) - 1
    clipped_gradient_sum(module, nn.CrossEntropyLoss(), (x, y), 1.0)
    assert len(tried) == 3
    assert module in clipped_sums._ENGINES


def test_a_loss_is_written_as_for_a_batch() -> None:
    """A mean, a sum, one loss for each record, and one that calls the model are the same over a batch of one."""
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2), (torch.randn(3, 4), torch.tensor([0, 1, 0]))

    def calling(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    losses: list[Any] = [
        F.cross_entropy, nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none"),
        lambda output, y: F.cross_entropy(output, y) / len(y), calling,
    ]  # fmt: skip
    found = [clipped_gradient_sum(model, loss, batch, 0.5) for loss in losses]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*one number"):
        clipped_gradient_sum(model, lambda output, y: output, batch, 0.5)


def test_wrong_arguments_are_refused() -> None:
    module, batch = nn.Linear(4, 2), (torch.randn(3, 4), torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="clip=0"):
        clipped_gradient_sum(module, cross_entropy, batch, 0.0)
    with pytest.raises(ValueError, match="'bias' is missing"):
        clipped_difference_sum(module, {"weight": module.weight}, cross_entropy, batch, 1.0)
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        clipped_gradient_sum(module, cross_entropy, (batch[0], batch[1][:2]), 1.0)


class Apart(nn.Module):
    """What a layer makes of the first half of the positions, less what it makes of the second."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if isinstance(self.layer, nn.Conv1d):
            out = out.mT
        first, second = out.chunk(2, 1)
        return first.sum(1) - second.sum(1)


def inner_product(output: Tensor, y: Tensor) -> Tensor:
    return torch.sum(output * y, 1)


def longest(engine: PerExampleEngine, *parts: Tensor) -> float:
    """The longest contribution of a record on its own, at one point or as a change between two, in units of C."""
    theta = start(engine)
    lengths = [
        summed(engine, (theta, 0.999 * theta), grouped(*(part[i : i + 1] for part in parts)), rule)[0].norm()
        for i in range(len(parts[0]))
        for rule in (ClippingRule.gradient(1.0), ClippingRule.difference(1.0))
    ]
    return float(torch.stack(lengths).max())


@pytest.mark.parametrize("way", ["written out", "from factors"])
@pytest.mark.parametrize(
    ("layer", "positions"),
    [
        (nn.Linear(64, 64, bias=False), 2),
        (nn.Linear(16, 16), 8),
        (nn.Conv1d(64, 64, 1), 2),
        (nn.Conv1d(16, 64, 1, groups=2), 8),
    ],
    ids=["linear, few positions", "linear, many", "convolution, few", "convolution, many"],
)
def test_positions_that_cancel_are_measured_as_they_are_summed(
    layer: nn.Linear | nn.Conv1d, positions: int, way: str
) -> None:
    torch.manual_seed(0)
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    common = 1e4 * torch.randn(40, 1, width)
    x = common + torch.randn(40, positions, width)
    x = x.mT.contiguous() if isinstance(layer, nn.Conv1d) else x
    y = torch.randn(40, layer.weight.shape[0])
    engine = WAYS[way](Apart(layer), inner_product, grouped(x, y))
    assert 0.99 < longest(engine, x, y) <= 1.0


def test_tokens_that_cancel_are_measured_as_they_are_summed() -> None:
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(3, 16)

        def forward(self, tokens: Tensor, factors: Tensor) -> Tensor:
            total: Tensor = (self.rows(tokens) * factors).sum(1)
            return total

    factors = 1e6 * torch.randn(60, 1, 1) * (torch.tensor([1.0, -1.0])[:, None] + 1e-7 * torch.randn(60, 2, 1))
    tokens, y = torch.ones(60, 2, dtype=torch.long), 30 * torch.randn(60, 16)
    assert longest(PerExampleEngine(Pair(), inner_product), tokens, factors, y) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["written out", "from factors"])
def test_factors_whose_squares_vanish_still_have_a_norm(dtype: torch.dtype, way: str) -> None:
    small = 2.5e-23 if dtype == torch.float32 else 1e-200
    for layer, shape in ((nn.Linear(64, 64, bias=False), (2, 64)), (nn.Linear(784, 10, bias=False), (784,))):
        module = nn.Sequential(Apart(layer) if len(shape) == 2 else layer).to(dtype)
        x = torch.full((1, *shape), small, dtype=dtype)
        x[:, : shape[0] // 2] *= 3
        y = torch.full((1, layer.out_features), 1e-2 / small, dtype=dtype)
        engine = WAYS[way](module, inner_product, grouped(x, y))
        out, _ = summed(engine, (torch.zeros(engine.dim, dtype=dtype),), grouped(x, y), ClippingRule.gradient(1e-4))
        assert 0.99e-4 < float(out.norm()) <= 1e-4


def test_long_vectors_are_measured_in_float64() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1_000_000))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.sum()

    engine = PerExampleEngine(Wide(), lambda output, y: output[:, 0])
    x, y = torch.full((1, 1), 1.9195979833602905), torch.zeros(1)
    out, _ = summed(engine, (torch.zeros(engine.dim),), grouped(x, y), ClippingRule.gradient(1.0))
    assert 1 - 1e-4 < float(out.norm()) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [((3, 3), (1, 1), (1, 1)), ((2, 3), (2, 1), (1, 2)), ((1, 1), (3, 2), (1, 1))]
)
def test_compiled_unfolding_is_torchs(
    kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], dtype: torch.dtype
) -> None:
    """The columns that Gram matrices and sums of convolutions are made of, in float64, no number changed."""
    images = torch.randn((2, 3, 9, 8), dtype=dtype, generator=torch.Generator().manual_seed(0))
    wanted = torch.nn.functional.unfold(images, kernel, dilation, stride=stride)
    found = compiled_sums.unfold(images, kernel, stride, dilation)
    assert found.dtype == torch.float64
    assert torch.equal(found.mT, wanted.double())
    turned = images.to(memory_format=torch.channels_last)  # not in one piece of memory, row after row
    assert torch.equal(compiled_sums.unfold(turned, kernel, stride, dilation), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [True, False])
def test_scale_and_shift_of_norms_are_autograds(last: bool, dtype: torch.dtype) -> None:
    """Compiled sums over positions, also of inputs far from zero, against the gradient of each example alone."""
    random = torch.Generator().manual_seed(0)
    x = 50 + torch.randn((3, 6, 5), dtype=dtype, generator=random)
    g = torch.randn((3, 6, 5), dtype=dtype, generator=random)
    width = 5 if last else 6
    if last:
        _, mean, rstd = torch.native_layer_norm(x, [5], None, None, 1e-5)
        mean, rstd = mean.flatten(1), rstd.flatten(1)
    else:
        _, mean, rstd = torch.native_group_norm(x, None, None, 3, 6, 5, 2, 1e-5)
    found = compiled_sums.scale_and_shift(g, x, mean, rstd, last=last)
    slow = operations._scale_and_shift(g.clone().requires_grad_(), x, mean, rstd, last=last)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    for k in range(3):
        scale, shift = (torch.full((width,), each, dtype=dtype, requires_grad=True) for each in (1.0, 0.0))
        out = F.layer_norm(x[k], (5,), scale, shift) if last else F.group_norm(x[k, None], 2, scale, shift)[0]
        wanted = torch.autograd.grad((out * g[k]).sum(), [scale, shift])
        only = slice(k, k + 1)
        alone = compiled_sums.scale_and_shift(g[only], x[only], mean[only], rstd[only], last=last)
        for here, there, other, itself in zip(found, wanted, slow, alone, strict=True):
            assert torch.allclose(here[k], there, rtol=tolerance, atol=tolerance)
            assert torch.allclose(here[k], other[k].detach(), rtol=tolerance, atol=tolerance)
            assert torch.equal(here[k], itself[0])  # no bit depends on the other examples
