"""The models people train against a plain autograd loop: norms, sums, enormous records, tied tables, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.gradients import GRADIENT, Gradients
from quietgrad.torch.networks.kernels import TiedGradients
from quietgrad.torch.networks.one_record import RecordProgram
from tests.torch.autograd import gradients, grouped, one_at_a_time, ruled, start, summed
from tests.torch.zoo import CASES, Case, continued

CLIP = 0.3
EXACT = 2e-5  # of norms and sums, in float32


def check(case: Case) -> PerExampleEngine:
    """Norms and the clipped sum are those of records one at a time."""
    engine = PerExampleEngine(case.model, case.loss)
    theta, parts = start(engine), (*case.x, case.y)
    found, norms = summed(engine, (theta,), grouped(*parts), ClippingRule.gradient(CLIP))
    expected, lengths = ruled(ClippingRule.gradient(CLIP), gradients(engine, theta, *parts))
    torch.testing.assert_close(norms, lengths, rtol=EXACT, atol=EXACT * float(lengths.max()))
    assert float((found - expected).norm()) <= 3 * EXACT * CLIP * len(case.y)
    (known,) = engine.programs.values()
    assert known.program.alone is None, known.program.alone
    return engine


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("torchvision ResNet-18")])
def test_models_people_train(name: str) -> None:
    torch.manual_seed(0)
    assert not check(CASES[name](4, 1)).fallbacks


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5"])
def test_records_with_and_without_padding_are_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks whether a mask hides anything; records that answer apart would be run apart."""
    torch.manual_seed(0)
    case = CASES[name](4, 1)
    tokens, mask, *others = case.x
    mask[:] = 1
    mask[1:3, -2:] = 0
    engine = check(case._replace(x=(tokens, mask, *others)))
    passes: list[int] = []
    run = RecordProgram._vmapped

    def counted(self: RecordProgram, *args: Any) -> Any:
        passes.append(len(args[4]))
        return run(self, *args)

    monkeypatch.setattr(RecordProgram, "_vmapped", counted)
    summed(engine, (start(engine),), grouped(tokens, mask, *others, case.y), ClippingRule.gradient(CLIP))
    assert passes == [4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("torchvision ResNet-18")])
def test_resnet_18(name: str) -> None:  # eleven million parameters
    torch.manual_seed(0)
    check(CASES[name](2, 1))


class Tied(nn.Module):
    """One table for tokens in and tokens out."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        return self.head(torch.tanh(z.cumsum(1) / 4))  # type: ignore[no-any-return]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The pieces that every pass leaves, as they are measured."""
    seen: list[list[Any]] = []
    norms = Gradients.norms

    def measured_pieces(self: Gradients, *groups: Any) -> Tensor:
        seen.append([piece for _, piece in self.pieces])
        return norms(self, *groups)

    monkeypatch.setattr(Gradients, "norms", measured_pieces)
    return seen


def held(piece: Any) -> int:
    """Bytes of the tensors that per-example vectors keep."""
    if isinstance(piece, Tensor):
        return piece.numel() * piece.element_size()
    if isinstance(piece, list | tuple):
        return sum(map(held, piece))
    return held(list(vars(piece).values())) if type(piece).__module__.startswith("quietgrad") else 0


def test_tied_weights_without_writing_the_table_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tied(500, 40)
    x, y = torch.randint(500, (2, 6, 7))
    x[0], y[1] = 3, 3  # one token only
    engine = check(Case(model, (x,), y, continued))
    seen = watched(monkeypatch)
    summed(engine, (start(engine),), grouped(x, y), ClippingRule.gradient(CLIP))
    (joint,) = [piece for piece in seen[-1] if isinstance(piece, TiedGradients)]
    assert joint._tied() is not None
    assert held(joint) < 6 * 500 * 40 * 4  # less than an example's gradients written out


def test_tied_norms_that_cancel_are_not_below_the_truth() -> None:
    """The parts are 10⁶ times as long as their sum: what is measured is never below it."""
    from quietgrad.torch.networks.outer_products import LinearLayerMap, OuterProducts
    from quietgrad.torch.networks.vectors import LayerCall, TokenSums

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(300, (4, 3), generator=generator)
    values = torch.randn(4, 3, 30, generator=generator)
    picked = F.one_hot(words, 300).float()  # b_t = −e_w, a_t = c_s + a little: the sum is that little
    little = 1e-6 * torch.randn(4, 3, 30, generator=generator)
    joint = TiedGradients(300 * 30)
    joint.add(OuterProducts.of(LinearLayerMap(300, 30), LayerCall(values + little, -picked), None, GRADIENT))
    joint.add(TokenSums(words, values[:, :, None], 300))
    assert joint._tied() is not None
    truth = -torch.einsum("etv,etd->evd", picked.double(), ((values + little).double() - values.double()))
    found = joint.squared_norms()[:, 0].sqrt()
    assert (found >= truth.flatten(1).norm(dim=1)).all()
    assert (found <= truth.flatten(1).norm(dim=1) + 1e-5).all()


@pytest.mark.parametrize(
    "build", [lambda: nn.Bilinear(40, 40, 30), lambda: nn.LSTM(40, 40, batch_first=True, proj_size=9)]
)
def test_memory_budget_holds_without_kernels(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = build(), nn.Parameter(torch.ones(60, 400))

        def forward(self, x: Tensor) -> Tensor:
            gate = torch.sigmoid(self.gate * x.mean()).mean()
            if isinstance(self.layer, nn.Bilinear):
                return self.layer(x[:, 0], x[:, 1]).sum(1) * gate  # type: ignore[no-any-return]
            return self.layer(x)[0].sum((1, 2)) * gate  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, budget = Net(), 24e6
    engine = PerExampleEngine(model, lambda out, y: (out - y).square(), memory_budget=budget)
    count = int(2 * budget / (4 * 24_000)) + 1
    engine.try_out(grouped(torch.randn(1, 4, 40), torch.zeros(1))[0].record)
    seen = watched(monkeypatch)
    groups = grouped(torch.randn(count, 4, 40), torch.zeros(count))
    summed(engine, (start(engine),), groups, ClippingRule.gradient(1.0))
    assert len(seen) > 1
    assert max(sum(map(held, pieces)) for pieces in seen) <= budget


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

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out.squeeze(1) - y).square()

    fast, slow = PerExampleEngine(model, loss, memory_budget=0.0), one_at_a_time(model, loss, grouped(x, y))
    rule = ClippingRule.momentum(0.3, 1.0, 0.1 * apart)
    (found, norms), (wanted, lengths) = (
        summed(each, start(fast, apart), grouped(x, y), rule) for each in (fast, slow)
    )
    torch.testing.assert_close(norms, lengths, rtol=1e-4, atol=1e-7)
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())
