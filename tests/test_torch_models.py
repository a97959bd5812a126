"""Any module: its clipped sums are those of autograd, one example at a time, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.objectives.networks.engine import PerExampleEngine

BUDGET = qg.Budget(3.0, 1e-5)


def loss(output: Tensor, y: Tensor) -> Tensor:
    flat = output.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return (torch.tanh(flat) * weights).mean(1) * 3 + (flat.mean(1) - y).square()


def by_autograd(module: nn.Module, x: Any, y: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Σ clip(g_i) and the norms, with nothing of ours."""
    total, norms = None, []
    args = x if isinstance(x, tuple) else (x,)
    for i in range(len(y)):
        module.zero_grad()
        torch.autograd.backward(loss(module(*(a[i : i + 1] for a in args)), y[i : i + 1]).sum())
        own = [p for p in module.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own])
        norms.append(flat.norm())
        part = flat * min(1.0, clip / float(flat.norm()))
        total = part if total is None else total + part
    module.zero_grad()
    assert total is not None
    return total, torch.stack(norms)


def agree(module: nn.Module, x: Any) -> None:
    """At the module's parameters, and at others: layers must not look at the ones that stand still."""
    module = module.double()
    count = len(x[0] if isinstance(x, tuple) else x)
    y = torch.linspace(-1, 1, count, dtype=torch.float64)
    engine = PerExampleEngine(module, loss)
    theta = engine.flatten(dict(module.named_parameters()))
    engine.add_clipped_gradients(theta, x, y, 0.5, torch.zeros_like(theta))
    moved = theta + 0.1 * torch.randn(len(theta), dtype=theta.dtype, generator=torch.Generator().manual_seed(0))
    for point in (theta, moved):
        out = torch.zeros_like(theta)
        norms = engine.add_clipped_gradients(point, x, y, 0.5, out)
        with torch.no_grad():
            for name, value in engine.unflatten(point).items():
                dict(module.named_parameters())[name].copy_(value)
        expected, wanted = by_autograd(module, x, y, 0.5)
        with torch.no_grad():
            for name, value in engine.unflatten(theta).items():
                dict(module.named_parameters())[name].copy_(value)
        torch.testing.assert_close(norms, wanted, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-10)


class Wrapped(nn.Module):
    """Parameters before and after the layer, so that it is neither first nor last."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.tensor(0.7))
        self.layer = layer
        self.call = call or (lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.call(self.layer, x * self.before if x.is_floating_point() else x))


class Bags(nn.Module):
    """EmbeddingBag with offsets: the batch is one long list of tokens."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode=mode), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        kept = torch.cat([row[:k] for row, k in zip(tokens, lengths.tolist(), strict=True)])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        output: Tensor = self.head(self.bag(kept, offsets))
        return output


class Packed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.layer(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        return padded


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


TOKENS = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 6], [8, 0, 0, 0]])
LENGTHS = torch.tensor([2, 4, 3])
first: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)[0]  # noqa: E731

LAYERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{
        f"{name}{d}d": (
            lambda kind=kind, d=d: (Wrapped(kind(3, 4, 3, stride=2, padding=1)), r(3, 3, *[5] * d))  # type: ignore[misc]
        )
        for d in (1, 2, 3)
        for name, kind in (("conv", getattr(nn, f"Conv{d}d")), ("transposed", getattr(nn, f"ConvTranspose{d}d")))
    },
    "linear": lambda: (Wrapped(nn.Linear(6, 3)), r(4, 5, 6)),
    "bilinear": lambda: (Wrapped(nn.Bilinear(6, 6, 2), lambda layer, x: layer(x, x.cos())), r(4, 6)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), TOKENS),
    "embedding bag": lambda: (nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)), TOKENS),
    "embedding bag, offsets": lambda: (Bags("mean"), (TOKENS, LENGTHS)),
    "embedding bag, offsets, sum": lambda: (Bags("sum"), (TOKENS, LENGTHS)),
    "rnn": lambda: (Wrapped(nn.RNN(3, 4, batch_first=True), first), r(3, 5, 3)),
    "gru": lambda: (Wrapped(nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True), first), r(3, 5, 3)),
    "lstm": lambda: (Wrapped(nn.LSTM(3, 4, proj_size=2, batch_first=True), first), r(3, 5, 3)),
    "lstm, time first": lambda: (
        Wrapped(nn.LSTM(3, 4), lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1)), r(3, 5, 3)),
    "lstm, packed": lambda: (Packed(nn.LSTM(3, 4, batch_first=True)), (r(3, 4, 3), LENGTHS)),
    "gru, packed": lambda: (Packed(nn.GRU(3, 4, batch_first=True)), (r(3, 4, 3), LENGTHS)),
    "gru cell": lambda: (Wrapped(nn.GRUCell(3, 4)), r(3, 3)),
    "attention": lambda: (
        Wrapped(nn.MultiheadAttention(6, 2, batch_first=True), lambda a, x: a(x, x, x.cos())[0]), r(3, 4, 6)),
    "group norm": lambda: (Wrapped(nn.GroupNorm(2, 4)), r(3, 4, 5)),
    "layer norm": lambda: (Wrapped(nn.LayerNorm(6)), r(3, 4, 6)),
    "rms norm": lambda: (Wrapped(nn.RMSNorm(6)), r(3, 4, 6)),
    **{
        f"instance norm {d}d": (
            lambda d=d: (Wrapped(getattr(nn, f"InstanceNorm{d}d")(4, affine=True)), r(3, 4, *[5] * d))  # type: ignore[misc]
        )
        for d in (1, 2, 3)
    },
    "prelu": lambda: (Wrapped(nn.PReLU(4)), r(3, 4, 5)),
    "frozen batch norm": lambda: (
        Wrapped(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4).eval(), nn.Tanh())), r(3, 4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_that_of_autograd(name: str) -> None:
    torch.manual_seed(1)
    agree(*LAYERS[name]())


class Renamed(nn.Module):
    """Also registers the weights of its cell, as wrappers of recurrent layers do."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.weight = self.cell.weight
        if whole:
            self.bias = self.cell.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.cell(torch.tanh(self.cell(x))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return output


class Kept(nn.Module):
    """Uses a weight through an attribute that is not a parameter of the layer that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3)
        self.tied = [self.left.weight]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.right(torch.tanh(F.linear(self.left(x), self.left.weight)))
        return output


@pytest.mark.parametrize("model", [
    lambda: nn.Sequential(nn.Linear(6, 6), Renamed(True)), lambda: nn.Sequential(nn.Linear(6, 6), Renamed(False)),
    lambda: Checkpointed(False), lambda: Checkpointed(True), Kept,
], ids=["aliased", "half aliased", "checkpoint", "re-entrant checkpoint", "used elsewhere"])  # fmt: skip
def test_models_whose_layers_mislead(model: Callable[[], nn.Module]) -> None:
    """Counted twice, recomputed at other parameters, used behind a layer's back: still autograd's gradients."""
    torch.manual_seed(1)
    agree(model(), r(4, 6))


class Mixing(nn.Module):
    """Batch statistics in training mode only, behind dropout."""

    def __init__(self, scale: float = 1.0, only_gradient: bool = False) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 2), nn.Dropout(0.5)
        self.scale, self.only_gradient = scale, only_gradient

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.mean(0)
            x = x - (mean if not self.only_gradient else mean * 0.01)
        output: Tensor = self.layer(self.drop(x)) * self.scale
        return output


class Faint(nn.Module):
    """Adds 10⁻⁷ of everyone's features, which is nothing unless someone's are 10⁹."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x + 1e-7 * x.sum(0))
        return output


class MixupInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(0.7 * x + 0.3 * x[torch.randperm(len(x))] if self.training else x)
        return output


class RunningMean(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        output: Tensor = self.layer(x)
        return output


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(x) * self.calls
        return output


def shared_memory() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach()[:2])
    made: nn.Module = model
    return made


CE = nn.CrossEntropyLoss(reduction="none")
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "batch statistics": (Mixing, CE, "mixes examples"),
    "batch statistics, tiny losses": (
        lambda: Mixing(1e-6), lambda o, y: o.square().sum(1) * 1e-6, "mixes examples"),
    "faint batch statistics": (lambda: Mixing(only_gradient=True), CE, "mixes examples"),
    "very faint mixing": (Faint, CE, "mixes examples"),
    "mixup inside": (MixupInside, CE, "mixes examples"),
    "loss that mixes": (lambda: nn.Linear(6, 2), lambda o, y: CE(o - o.mean(0), y), "mixes examples"),
    "loss of a mean": (lambda: nn.Linear(6, 2), lambda o, y: CE(o, y) / len(y), "joins the batch"),
    "running mean": (RunningMean, CE, "buffer 'mean' changes"),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2)), CE, "buffers follow the weights"),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(6, 2)), CE, "buffers follow the weights"),
    "doubles": (lambda: nn.Linear(6, 2).double(), CE, "inputs are float32 and the module computes with float64"),
    "counts its calls": (Counter, CE, "asked twice|keeps a state|mixes examples"),
    "compiled": (lambda: torch.compile(nn.Linear(6, 2), backend="eager"), CE, r"torch\.compile"),  # type: ignore[dict-item,return-value]
    "scripted": (lambda: torch.jit.script(nn.Linear(6, 2)), CE, r"torch\.jit"),
    "meta": (lambda: nn.Linear(6, 2, device="meta"), CE, "meta device"),
    "lazy": (lambda: nn.LazyLinear(2), CE, "no shape yet"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(6, 2)), CE, "DataParallel"),
    "shared memory": (shared_memory, CE, "share memory"),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), CE, r"'0' \(BatchNorm1d\)"),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False).eval(), nn.Linear(6, 2)), CE,
        "BatchNorm1d"),
    "bag by frequency": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.EmbeddingBag(3, 2, scale_grad_by_freq=True)), CE, "often"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:`torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_anything_is_spent(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, loss_fn, message = REFUSED[name]
    x = torch.randn(40, 6)
    with pytest.raises(ValueError, match=message):
        qt.fit(
            make(), loss_fn, (x, (x[:, 0] > 0).long()), qg.DPSGD(steps=2, batch_size=10), budget=BUDGET,
            ledger=tmp_path / "ledger.jsonl",
        )  # fmt: skip
    assert not (tmp_path / "ledger.jsonl").exists()


def test_buffers_are_as_they_were_after_a_refusal() -> None:
    model = RunningMean()
    x = torch.randn(40, 6)
    with pytest.raises(ValueError, match="buffer"):
        qt.fit(model, CE, (x, (x[:, 0] > 0).long()), qg.DPSGD(steps=2, batch_size=10), budget=BUDGET)
    assert model.mean.abs().sum() == 0


def test_a_batch_norm_in_evaluation_mode_stays_so() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    before = model[1].running_mean.clone()
    x = torch.randn(40, 6)
    qt.fit(model, CE, (x, (x[:, 0] > 0).long()), qg.DPSGD(steps=2, batch_size=10), budget=BUDGET)
    assert not model[1].training
    assert model.training
    assert torch.equal(model[1].running_mean, before)


def test_autocast_is_refused() -> None:
    x = torch.randn(40, 6)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        qt.fit(nn.Linear(6, 2), CE, (x, torch.zeros(40, dtype=torch.int64)), qg.DPGD(steps=1), budget=BUDGET)
