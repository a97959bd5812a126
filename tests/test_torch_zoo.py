"""The models people train against a plain autograd loop: norms, sums, masks, enormous records, and mutants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.memory_budget import measured
from torch import Tensor, nn

import quietgrad.torch as qt
from quietgrad.objectives.networks import meetings
from quietgrad.objectives.networks.contributions import Stored
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.joint import Joint
from quietgrad.objectives.networks.ways import Way
from tests.zoo import CASES, Case, LanguageModel, classified, continued

CLIP = 0.3
EXACT = 2e-5  # of norms and sums, in float32


def gradients(case: Case) -> Tensor:
    """Row i: the gradient of example i by plain autograd on that example alone, in float64."""
    params = [p for p in case.model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(case.y)):
        loss = case.loss(case.model(*(part[i : i + 1] for part in case.x)), case.y[i : i + 1])
        found = torch.autograd.grad(loss.sum(), params, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
        rows.append(torch.cat([g.flatten().double() for g in parts]))
    return torch.stack(rows)


def check(case: Case, engine: PerExampleEngine | None = None) -> PerExampleEngine:
    """Norms and the clipped sum are those of the loop."""
    engine = engine or PerExampleEngine(case.model, case.loss)
    theta = engine.flatten(dict(case.model.named_parameters()))
    out = torch.zeros_like(theta, dtype=torch.float64)
    norms = engine.add_clipped_gradients(theta, case.x, case.y, CLIP, out)
    expected = gradients(case)
    lengths = expected.norm(dim=1)
    torch.testing.assert_close(norms, lengths, rtol=EXACT, atol=EXACT * float(lengths.max()))
    total = (expected * (CLIP / lengths).clamp(max=1.0)[:, None]).sum(0)
    assert float((out - total).norm()) <= 3 * EXACT * CLIP * len(case.y)
    return engine


def way_of(engine: PerExampleEngine) -> Way:
    (way,) = engine._ways.values()
    return way


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in CASES if name != "torchvision ResNet-18, GroupNorm"])
def test_models_people_train(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name](4, 1)
    way = way_of(check(case))
    assert way.plan is not None, way.why
    assert [unit.name for unit in way.plan.units if unit.module is not None and unit.kernel is None] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_resnet_18() -> None:  # eleven million parameters: trials of sixteen examples take their time
    torch.manual_seed(0)
    way = way_of(check(CASES["torchvision ResNet-18, GroupNorm"](2, 1)))
    assert way.plan is not None, way.why


class Patches(nn.Module):
    """Everything that used to need vmap: class token, positions, scales, gates, a raw weight and a tied one."""

    def __init__(self, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, length + 1, width))
        self.scale = nn.Parameter(torch.rand(width))
        self.heat = nn.Parameter(torch.ones(()))
        self.mix = nn.Parameter(torch.randn(width, width) / 3)
        self.bias = nn.Parameter(torch.randn(4, 1, 1))
        self.turn = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.lift(x)
        z = torch.cat([self.first.expand(len(z), -1, -1), z], 1) + self.places[:, : x.shape[1] + 1]
        z = z + self.scale * torch.tanh(z @ self.mix) * self.heat
        z += self.scale
        heads = z.view(*z.shape[:2], 4, 2).transpose(1, 2)
        mixed = (heads @ heads.mT + self.bias).softmax(-1) @ heads
        z = self.norm(self.turn(mixed.transpose(1, 2).flatten(2)))
        return torch.einsum("btd,de->bte", z, self.mix).mean(1)[:, :3]


def patches(count: int = 5) -> Case:
    torch.manual_seed(3)
    return Case(Patches(), (torch.randn(count, 5, 3),), torch.randint(3, (count,)), classified)


def test_parameters_of_the_model_itself() -> None:
    case = patches()
    way = way_of(check(case))
    assert way.plan is not None
    assert {"first", "places", "scale", "heat", "mix", "bias"} <= set(way.plan.raw)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
def test_an_enormous_record_stays_within_its_bound(size: float) -> None:
    case = patches()
    case.x[0][2] *= size
    engine = PerExampleEngine(case.model, case.loss)
    theta = engine.flatten(dict(case.model.named_parameters()))
    sums = []
    for rows in (slice(0, 5), [0, 1, 3, 4]):
        sums.append(torch.zeros_like(theta, dtype=torch.float64))
        engine.add_clipped_gradients(theta, (case.x[0][rows],), case.y[rows], CLIP, sums[-1])
    assert float((sums[0] - sums[1]).norm()) <= CLIP * (1 + 1e-6)


def test_two_points_of_raw_parameters() -> None:
    case = patches()
    model = case.model.double()
    case = case._replace(x=(case.x[0].double(),))
    engine, oracle = (PerExampleEngine(model, case.loss, strategy=s) for s in ("auto", "functional"))
    theta = engine.flatten(dict(model.named_parameters()))
    previous = theta + 0.01 * torch.randn_like(theta)
    sums = [torch.zeros_like(theta), torch.zeros_like(theta)]
    norms = [
        each.add_recursive_momentum(theta, previous, case.x, case.y, 0.3, CLIP, 0.02, out)
        for each, out in zip((engine, oracle), sums, strict=True)
    ]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-9, atol=1e-9)
    assert way_of(engine).plan is not None


class Dropped:
    """A contribution that keeps its sum and forgets its norm."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def squared_norms(self) -> Tensor:
        return torch.zeros_like(self.inner.squared_norms())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def mutants() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    kept = meetings.Meetings._keep

    def norm_dropped(patch: pytest.MonkeyPatch) -> None:
        from quietgrad.objectives.networks import collector

        put = collector.Collector._put

        def lighter(self: Any, slot: slice, piece: Any) -> None:
            put(self, slot, Dropped(piece) if slot.stop - slot.start == 8 and isinstance(piece, Stored) else piece)

        patch.setattr(collector.Collector, "_put", lighter)

    def use_forgotten(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            meetings.Meetings, "_keep",
            lambda self, unit, *rest: None if unit.name == "heat" else kept(self, unit, *rest),
        )  # fmt: skip

    def rows_exchanged(patch: pytest.MonkeyPatch) -> None:
        def exchanged(self: Any, unit: Any, shared: Tensor, copy: Tensor, axis: int) -> None:
            kept(self, unit, shared, copy, axis)
            call, value, rows = self.tape.copies[-1]
            self.tape.copies[-1] = (call, value, lambda grad: rows(grad).flip(0))

        patch.setattr(meetings.Meetings, "_keep", exchanged)

    def second_use_alone(patch: pytest.MonkeyPatch) -> None:
        def replaced(self: Any, part: Any) -> None:
            self.parts = [part]

        patch.setattr(Joint, "add", replaced)

    return {f.__name__: f for f in (norm_dropped, use_forgotten, rows_exchanged, second_use_alone)}


@pytest.mark.parametrize("name", mutants())
def test_a_mutant_is_never_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken apart wrongly, the model is differentiated otherwise: the gradients are right all the same."""
    mutants()[name](monkeypatch)
    case = patches()
    way = way_of(check(case))
    assert way.plan is None or any(
        unit.name in ("first", "scale", "heat", "mix") and unit.why for unit in way.plan.units
    )


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


def test_tied_weights_without_writing_the_table_out() -> None:
    torch.manual_seed(0)
    model = Tied(500, 40)
    x, y = torch.randint(500, (2, 6, 7))
    x[0], y[1] = 3, 3  # one token only
    case = Case(model, (x,), y, continued)
    engine = check(case)
    theta = engine.flatten(dict(model.named_parameters()))
    mix = engine_mix()
    pieces = way_of(engine)._pieces(theta, None, (x,), y, mix, keys(6))
    (joint,) = [piece for _, piece in pieces if isinstance(piece, Joint)]
    assert joint._tied() is not None
    assert joint.held() < 6 * 500 * 40 * 4  # less than an example's gradients written out


def engine_mix() -> Any:
    from quietgrad.objectives.networks.contributions import Combination

    return Combination(gradient=True, change=False)


def keys(count: int) -> Any:
    import numpy as np

    from quietgrad.objectives.networks.randomness import RecordKeys

    return RecordKeys(bytes(32), np.arange(count))


def test_tied_norms_that_cancel_are_not_below_the_truth() -> None:
    """The parts are 10⁶ times as long as their sum: what is measured is never below it."""
    from quietgrad.objectives.networks.contributions import Record, TokenSums
    from quietgrad.objectives.networks.maps import LinearMap
    from quietgrad.objectives.networks.outer import OuterProducts

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(300, (4, 3), generator=generator)
    values = torch.randn(4, 3, 30, generator=generator)
    picked = F.one_hot(words, 300).float()  # b_t = −e_w, a_t = c_s + a little: the sum is that little
    little = 1e-6 * torch.randn(4, 3, 30, generator=generator)
    joint = Joint(300 * 30)
    joint.add(OuterProducts.of(LinearMap(300, 30), Record(values + little, -picked), None, engine_mix()))
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
            self.layer = build()

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.layer, nn.Bilinear):
                return self.layer(x[:, 0], x[:, 1]).sum(1)  # type: ignore[no-any-return]
            return self.layer(x)[0].sum((1, 2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, budget = Net(), 24e6
    engine = PerExampleEngine(model, lambda out, y: (out - y).square(), memory_budget=budget)
    theta = engine.flatten(dict(model.named_parameters()))
    held = []
    pieces = Way.pieces

    def watched(self: Way, *args: Any) -> Any:
        found = pieces(self, *args)
        held.append(sum(piece.held() for _, piece in found))
        return found

    monkeypatch.setattr(Way, "pieces", watched)
    count = int(2 * budget / (4 * engine.dim)) + 1
    x, y = torch.randn(count, 4, 40), torch.zeros(count)
    engine.add_clipped_gradients(theta, x, y, 1.0, torch.zeros_like(theta))
    assert len(held) > 1
    assert max(held) <= budget


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_budget_of_64_megabytes_holds_for_an_lstm() -> None:
    """In a process of its own, trials included: its examples' gradients are a gigabyte, its pass takes 120 MB."""
    grown, whole = measured("LSTM", 64e6)
    assert whole > 1000
    assert grown < 400


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_recurrent_layers_have_kernels(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = LanguageModel(kind, 8, **options)
    x, y = torch.randint(48, (2, 3, 6))
    way = way_of(check(Case(model, (x,), y, continued)))
    assert way.plan is not None
    assert all(unit.kernel is not None for unit in way.plan.units)


def test_only_what_does_not_fit_is_demoted() -> None:
    class Odd(nn.Module):
        """Sorts its own weights' products in a way vmap has no rule for."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[:, :] = self.weight
            return out * x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Odd(), nn.Linear(6, 3))
    case = Case(model, (torch.randn(5, 4),), torch.randint(3, (5,)), classified)
    way = way_of(check(case))
    assert way.plan is not None
    assert [unit.name for unit in way.plan.units if unit.kernel is None] == ["1"]


def test_explain_says_how_and_why(caplog: pytest.LogCaptureFixture) -> None:
    import quietgrad as qg

    model = nn.Sequential(nn.Linear(4, 8), nn.PReLU(8), nn.LayerNorm(8), nn.Linear(8, 2))
    batch = torch.randn(60, 4), torch.randint(2, (60,))
    loss = nn.CrossEntropyLoss(reduction="none")
    found = qt.explain(model, batch, loss)
    assert [part.name for part in found.fallbacks] == ["1"]
    assert sum(part.parameters for part in found.parts) == sum(p.numel() for p in model.parameters())
    assert sum(part.time for part in found.parts) + found.passes == pytest.approx(1.0)
    assert sum(part.memory for part in found.parts) == pytest.approx(1.0)
    assert "PReLU has no kernel" in str(found)
    with caplog.at_level("WARNING", "quietgrad"):
        qt.fit(model, loss, batch, qg.DPSGD(steps=1, batch_size=10), budget=qg.Budget(2.0, 1e-5), progress=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'1': PReLU has no kernel" in caplog.text


def test_explain_refuses_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    batch = torch.randn(6, 4), torch.randint(2, (6,))
    found = qt.explain(model, batch, nn.CrossEntropyLoss(reduction="none"))
    assert [(part.name, part.how) for part in found.refused] == [("1", "refused")]
    assert "mixes the examples" in str(found)
    mixing = qt.explain(nn.Linear(4, 2), batch, lambda out, y: (out - out.mean(0)).square().sum(1))
    assert [part.how for part in mixing.parts] == ["refused"]


class Counting(nn.Module):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.shift, self.runs = nn.Linear(4, 3), nn.Parameter(torch.randn(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.lift(x) * self.shift  # type: ignore[no-any-return]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("overflows", [False, True])
def test_an_own_loop_runs_the_model_once(pieces: int, overflows: bool) -> None:
    """The first piece of a sample runs once, later ones twice; records that overflow, and count as zero, again."""
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    if overflows:
        x[::2] = torch.finfo(torch.float32).max
    model = Counting()
    private, optimizer, loader = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1e-3,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=16), loss_reduction="sum",
    )  # fmt: skip
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        parts = [slice(k, None, pieces) for k in range(pieces)] if len(labels) >= 2 else [slice(None)]
        started = model.runs
        for part in parts:
            loss: Any = F.cross_entropy(private(inputs[part]), labels[part], reduction="sum")
            loss.backward()
        before = model.runs
        optimizer.step()
        if number:  # the first one was planned
            assert before - started == len(parts)
            assert overflows or model.runs - before == len(parts) - 1
        if number == 2:
            break
    assert all(p.isfinite().all() for p in model.parameters())
