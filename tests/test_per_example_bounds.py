"""What the clipped sums promise: the bound C in float32, accurate small differences, and clear refusals."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.objectives.networks.contributions import Combination, Record, Workspace
from quietgrad.objectives.networks.engine import PerExampleEngine, Strategy
from quietgrad.objectives.networks.layers import kernel_for
from quietgrad.objectives.networks.tape import Call, Recording
from quietgrad.torch.clipping import clipped_difference_sum, clipped_gradient_sum

STRATEGIES: list[Strategy] = ["auto", "factored", "functional"]


def papers_models() -> Any:
    path = Path(__file__).parents[1] / "reproduce" / "models.py"
    spec = importlib.util.spec_from_file_location("papers_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = papers_models()


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mnist-cnn4", "cnn5", "transformer"])
def test_no_contribution_exceeds_the_bound_in_float32(name: str, strategy: Strategy) -> None:
    module, x, y = problem(name, 3)
    engine = PerExampleEngine(module, cross_entropy, strategy=strategy)
    theta = engine.flatten(dict(module.named_parameters()))
    for relative in (1e-1, 1e-3, 1e-5):
        previous = theta + relative * theta.norm() * F.normalize(torch.randn(engine.dim), dim=0)
        norms = engine.add_clipped_differences(theta, previous, x, y, 1.0, torch.zeros_like(theta))
        gradient_norms = engine.add_clipped_gradients(theta, x, y, 1.0, torch.zeros_like(theta))
        clip, gradient_clip = 0.5 * norms.min().item(), 0.5 * gradient_norms.min().item()
        for i in range(len(x)):
            one = slice(i, i + 1)
            out = torch.zeros_like(theta)
            engine.add_clipped_differences(theta, previous, x[one], y[one], clip, out)
            assert clip * (1 - 1e-4) < out.double().norm().item() <= clip * (1 + 1e-9)
            out = torch.zeros_like(theta)
            engine.add_clipped_gradients(theta, x[one], y[one], gradient_clip, out)
            assert gradient_clip * (1 - 1e-4) < out.double().norm().item() <= gradient_clip * (1 + 1e-9)
            out = torch.zeros_like(theta)
            engine.add_recursive_momentum(theta, previous, x[one], y[one], 0.5, gradient_clip, clip, out)
            assert out.double().norm().item() <= 0.5 * (clip + gradient_clip) * (1 + 1e-9)


def recorded(engine: PerExampleEngine, point: Tensor, x: Tensor, y: Tensor) -> list[tuple[nn.Module, Record]]:
    """The tape of one point: each layer's input and output gradient."""
    records: list[tuple[nn.Module, Record]] = []

    def receive(call: Call) -> None:
        (grad,) = call.output_grads
        assert grad is not None
        assert call.unit.module is not None
        records.append((call.unit.module, Record(call.args[0].detach(), grad)))

    units = next(iter(engine._ways.values())).units
    assert units is not None
    recording = Recording(
        engine.module, engine.unflatten(point), len(x), lambda: engine.loss_fn(engine.module(x), y), units, receive,
        lambda numbers: None,
    )  # fmt: skip
    recording.backward([recording.result], [torch.ones(len(x))])
    return records


@pytest.mark.parametrize("strategy", ["auto", "factored"])
@pytest.mark.parametrize("name", ["mnist-cnn4", "cnn5", "transformer"])
def test_norms_of_small_differences(name: str, strategy: Strategy) -> None:
    """Against the same float32 tapes subtracted in float64, down to relative steps of 1e-5."""
    module, x, y = problem(name, 16)
    engine = PerExampleEngine(module, cross_entropy, strategy=strategy)
    theta = engine.flatten(dict(module.named_parameters()))
    mix = Combination(gradient=False, change=True)
    for relative in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        previous = theta + relative * theta.norm() * F.normalize(torch.randn(engine.dim), dim=0)
        out = torch.zeros_like(theta)
        norms = engine.add_clipped_differences(theta, previous, x, y, 1.0, out)
        exact = torch.zeros(len(x), dtype=torch.float64)
        now, before = recorded(engine, theta, x, y), recorded(engine, previous, x, y)
        for (layer, here), (_, there) in zip(now, before, strict=True):
            kernel = kernel_for(layer)
            assert kernel is not None
            here, there = (
                Record(r.input.double() if r.input.is_floating_point() else r.input, r.output_grad.double())
                for r in (here, there)
            )
            space = Workspace(math.inf, torch.empty(0, dtype=torch.float64))
            for _, piece in kernel.contributions(here, there, mix, space, {"weight", "bias"}):
                exact += piece.squared_norms()[:, 0]
        torch.testing.assert_close(norms.double(), exact.sqrt(), rtol=1e-4, atol=0.0)


def test_recursive_momentum_norms_of_small_differences() -> None:
    module, x, y = problem("mnist-cnn4", 16)
    engine = PerExampleEngine(module, cross_entropy)
    theta = engine.flatten(dict(module.named_parameters()))
    for relative in (1e-1, 1e-2, 1e-3, 1e-4):
        previous = theta + relative * theta.norm() * F.normalize(torch.randn(engine.dim), dim=0)
        out = torch.zeros_like(theta)
        split = engine.add_clipped_differences(theta, previous, x, y, 1.0, out)
        both = engine.add_recursive_momentum(theta, previous, x, y, 0.1, 1.0, 1.0, out)
        torch.testing.assert_close(both[:, 1], split, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_example_without_a_finite_norm_counts_as_zero(poison: float, strategy: Strategy) -> None:
    module, x, y = problem("mnist-cnn4", 5)
    engine = PerExampleEngine(module, cross_entropy, strategy=strategy)
    theta = engine.flatten(dict(module.named_parameters()))
    rest, expected = torch.tensor([0, 1, 3, 4]), torch.zeros_like(theta)
    engine.add_clipped_gradients(theta, x[rest], y[rest], 1.0, expected)
    x[2, 0, 3, 3] = poison
    out = torch.zeros_like(theta)
    norms = engine.add_clipped_gradients(theta, x, y, 1.0, out)
    assert norms.isfinite().tolist() == [True, True, False, True, True]
    torch.testing.assert_close(out, expected)


def test_batch_of_nothing() -> None:
    module, x, y = problem("mnist-cnn4", 2)
    engine = PerExampleEngine(module, cross_entropy)
    out = torch.zeros(engine.dim)
    assert len(engine.add_clipped_gradients(torch.zeros(engine.dim), x[:0], y[:0], 1.0, out)) == 0
    assert out.abs().max() == 0


def test_half_precision_norms_are_float64() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).bfloat16()
    x, y = torch.randn(4, 20).bfloat16(), torch.randint(5, (4,))
    sums, norms = clipped_gradient_sum(module, cross_entropy, (x, y), 0.1)
    assert norms.dtype == torch.float64
    assert all(total.dtype == torch.float32 for total in sums.values())
    single = clipped_gradient_sum(module, cross_entropy, (x[:1], y[:1]), 0.1)[0]
    assert torch.cat([g.flatten() for g in single.values()]).double().norm() <= 0.1
    full = clipped_gradient_sum(module.float(), cross_entropy, (x.float(), y), 0.1)[1]
    torch.testing.assert_close(norms, full, rtol=0.03, atol=0.0)


def test_training_state_is_left_alone() -> None:
    module, x, y = problem("mnist-cnn4", 3)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    clipped_difference_sum(module, before, cross_entropy, (x, y), 1.0)
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert not any(layer._forward_hooks for layer in module.modules())


class Centred(nn.Module):
    """Mixes examples without any known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x - x.mean(0))
        return output


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "batch norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), r"layer '1' \(BatchNorm1d\).*GroupNorm"),
    "running statistics": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "track_running_stats"),
    "frequency scaling": (nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "renormalised rows": (nn.Embedding(4, 2, max_norm=1.0), "max_norm"),
    "all frozen": (nn.Linear(4, 2).requires_grad_(False), "no trainable parameter"),
    "own mixing": (Centred(), "mixes examples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_mix_examples_are_refused(case: str) -> None:
    module, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        clipped_gradient_sum(module, cross_entropy, (torch.randn(3, 4), torch.tensor([0, 1, 0])), 1.0)


def test_losses_that_average_are_refused() -> None:
    batch = torch.randn(3, 4), torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match=r"shape \(\).*one loss per example"):
        clipped_gradient_sum(nn.Linear(4, 2), F.cross_entropy, batch, 1.0)
    with pytest.raises(ValueError, match="division by the batch size"):
        clipped_gradient_sum(nn.Linear(4, 2), lambda o, y: cross_entropy(o, y) / len(y), batch, 1.0)


def test_wrong_arguments_are_refused() -> None:
    module, batch = nn.Linear(4, 2), (torch.randn(3, 4), torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="clip=0"):
        clipped_gradient_sum(module, cross_entropy, batch, 0.0)
    with pytest.raises(ValueError, match="'bias' is missing"):
        clipped_difference_sum(module, {"weight": module.weight}, cross_entropy, batch, 1.0)
    engine = PerExampleEngine(module, cross_entropy)
    with pytest.raises(ValueError, match="flat vector of 10 parameters"):
        engine.add_clipped_gradients(torch.zeros(9), *batch, 1.0, torch.zeros(10))
    with pytest.raises(ValueError, match="micro_batch=0"):
        PerExampleEngine(module, cross_entropy, micro_batch=0)
    with pytest.raises(ValueError, match="strategy='ghost'"):
        PerExampleEngine(module, cross_entropy, strategy="ghost")  # type: ignore[arg-type]


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


def longest(engine: PerExampleEngine, x: Tensor, y: Tensor, clip: float = 1.0) -> float:
    """The longest contribution of a record on its own, at one point or as a change between two, over the bound."""
    theta = engine.flatten(dict(engine.module.named_parameters()))
    previous = theta * 0.999
    lengths = []
    for i in range(len(x)):
        one = x[i : i + 1], y[i : i + 1]
        out = torch.zeros(2, engine.dim, dtype=torch.float64)
        engine.add_clipped_gradients(theta, *one, clip, out[0])
        engine.add_clipped_differences(theta, previous, *one, clip, out[1])
        lengths.append(out.norm(dim=1).max())
    return torch.stack(lengths).max().item() / clip


def inner_product(output: Tensor, y: Tensor) -> Tensor:
    return (output * y).sum(1)


@pytest.mark.parametrize("strategy", ["auto", "factored"])
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
    layer: nn.Linear | nn.Conv1d, positions: int, strategy: Strategy
) -> None:
    torch.manual_seed(0)
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    common = 1e4 * torch.randn(40, 1, width)
    x = common + torch.randn(40, positions, width)
    x = x.mT.contiguous() if isinstance(layer, nn.Conv1d) else x
    y = torch.randn(40, layer.weight.shape[0])
    assert longest(PerExampleEngine(Apart(layer), inner_product, strategy=strategy), x, y) <= 1 + 1e-9


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
    engine = PerExampleEngine(Pair(), inner_product)
    theta = engine.flatten(dict(engine.module.named_parameters()))
    for i in range(60):
        one, out = slice(i, i + 1), torch.zeros(engine.dim, dtype=torch.float64)
        engine.add_clipped_gradients(theta, (tokens[one], factors[one]), y[one], 1.0, out)
        assert out.norm() <= 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", ["auto", "factored"])
def test_factors_whose_squares_vanish_still_have_a_norm(dtype: torch.dtype, strategy: Strategy) -> None:
    small = 2.5e-23 if dtype == torch.float32 else 1e-200
    for layer, shape in ((nn.Linear(64, 64, bias=False), (2, 64)), (nn.Linear(784, 10, bias=False), (784,))):
        module = nn.Sequential(Apart(layer) if len(shape) == 2 else layer).to(dtype)
        x = torch.full((2, *shape), small, dtype=dtype)
        x[:, : shape[0] // 2] *= 3
        y = torch.full((2, layer.out_features), 1e-2 / small, dtype=dtype)
        engine = PerExampleEngine(module, inner_product, strategy=strategy)
        theta, out = torch.zeros(engine.dim, dtype=dtype), torch.zeros(engine.dim, dtype=torch.float64)
        engine.add_clipped_gradients(theta, x[:1], y[:1], 1e-4, out)
        assert 0.99e-4 < out.norm().item() <= 1e-4


def test_long_vectors_are_measured_in_float64() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1_000_000))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.sum()

    engine = PerExampleEngine(Wide(), lambda output, y: output[:, 0])
    out = torch.zeros(engine.dim, dtype=torch.float64)
    engine.add_clipped_gradients(
        torch.zeros(engine.dim), torch.full((1, 1), 1.9195979833602905), torch.zeros(1), 1.0, out
    )
    assert 1 - 1e-4 < out.norm().item() <= 1.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_in_the_loss_has_its_gradient(strategy: Strategy) -> None:
    torch.manual_seed(0)
    module, x, y = nn.Linear(12, 2).double(), torch.randn(5, 12).double(), torch.randint(2, (5,))

    def penalised(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y) + 1e-9 * module.weight.square().sum()

    engine = PerExampleEngine(module, penalised, strategy=strategy)
    theta, out = engine.flatten(dict(module.named_parameters())), torch.zeros(26, dtype=torch.float64)
    engine.add_clipped_gradients(theta, x, y, 1e9, out)
    loss = penalised(module(x), y).sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    torch.testing.assert_close(out, torch.cat([g.flatten() for g in gradients]), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_on_the_tensors_themselves_is_refused(strategy: Strategy) -> None:
    module = nn.Linear(12, 2)
    kept = list(module.parameters())
    engine = PerExampleEngine(
        module, lambda output, y: cross_entropy(output, y) + kept[0].square().sum(), strategy=strategy
    )
    with pytest.raises(ValueError, match=r"'weight' is used by loss_fn .*regularizer="):
        engine.way(torch.randn(5, 12), torch.randint(2, (5,)))
