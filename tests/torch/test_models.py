"""Any module: refused by name before anything is spent, or run so that nothing of a record stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.clipped_sums import clipped_gradient_sum
from quietgrad.torch.networks import gradients as gathering
from quietgrad.torch.networks import taps
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.randomness import RecordSeeds
from tests.torch.autograd import KEY, gradients, grouped, ruled, start, summed

BUDGET = qg.Budget(3.0, 1e-5)
CE = nn.CrossEntropyLoss()


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def clipped_sum(model: nn.Module, rows: Any, loss: Any = CE) -> Tensor:
    objective = ModuleObjective(model, loss)
    records = objective.prepare(data())
    theta = objective.initial(records)
    out = torch.zeros_like(theta, dtype=torch.float64)
    objective.add(Batch(records, np.asarray(rows), KEY), (theta,), ClippingRule.gradient(0.3), out)
    return out


# --- refusals ------------------------------------------------------------------------------------------------


def shared_memory() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach()[:2])
    made: nn.Module = model
    return made


def complex_one() -> nn.Module:
    model = nn.Linear(6, 2)
    model.turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2)), CE, "buffers follow the weights"),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(6, 2)), CE, "buffers follow the weights"),
    "scripted": (lambda: torch.jit.script(nn.Linear(6, 2)), CE, r"torch\.jit"),
    "meta": (lambda: nn.Linear(6, 2, device="meta"), CE, "meta device"),
    "lazy": (lambda: nn.LazyLinear(2), CE, "no shape yet"),
    "complex": (complex_one, CE, "complex"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(6, 2)), CE, "DataParallel"),
    "shared memory": (shared_memory, CE, "share memory"),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), CE, r"'0' \(BatchNorm1d\)"),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False).eval(), nn.Linear(6, 2)), CE,
        "BatchNorm1d"),
    "statistics": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)), CE,
        "track_running_stats"),
    "renormalised rows": (lambda: nn.Embedding(4, 2, max_norm=1.0), CE, "max_norm"),
    "bag by frequency": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.EmbeddingBag(3, 2, scale_grad_by_freq=True)), CE, "often"),
    "another width": (lambda: nn.Linear(5, 2), CE, r"failed on a batch of one record \(RuntimeError\)"),
    "two records": (
        lambda: nn.Linear(6, 2), lambda o, y: F.triplet_margin_loss(o[0], o[1], o[2]),
        "Other records are not in reach"),
    "many numbers": (lambda: nn.Linear(6, 2), lambda o, y: o, r"shape \(1, 2\): it must be one number"),
    "no tensor": (lambda: nn.Linear(6, 2), lambda o, y: 1.0, "shape float: it must be one number"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:`torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_anything_is_spent(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, loss, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        qt.fit(
            make(), loss, data(), qg.DPSGD(steps=2, batch_size=10), budget=BUDGET, ledger=tmp_path / "ledger.jsonl"
        )
    assert not (tmp_path / "ledger.jsonl").exists()


def test_what_fails_on_a_record_says_nothing_of_it() -> None:
    """On made-up records the model's own error is the cause; of a record it is not told."""

    class Choosy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x == 7.25).any()):
                raise RuntimeError(f"no such value: {x}")
            return super().forward(x)

    x, y = data()
    engine = PerExampleEngine(Choosy(6, 2), CE)
    summed(engine, (start(engine),), grouped(x, y), ClippingRule.gradient(1.0))
    x[3, 2] = 7.25
    total, _ = summed(engine, (start(engine),), grouped(x, y), ClippingRule.gradient(1.0))
    assert total.isfinite().all()  # it counts as zero
    engine = PerExampleEngine(Choosy(6, 2), CE, raises=True)
    with pytest.raises(DataError, match=r"batch of one record \(RuntimeError\)") as told:
        summed(engine, (start(engine),), grouped(x, y), ClippingRule.gradient(1.0))
    assert "7.25" not in str(told.value)
    assert told.value.__cause__ is None


# --- what a module keeps -------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """A module that leaves something of its records in itself, and looks at it in the next call."""

    mean: Tensor

    def __init__(self, keep: Callable[[Keeps, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(6, 2), keep
        self.calls, self.seen, self.last = 0, [0.5], {"mean": 0.5}
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x * (1 + self.keep(self, x)))
        return output


def counts(own: Keeps, x: Tensor) -> Any:
    own.calls += 1
    return own.calls


def appends_and_updates(own: Keeps, x: Tensor) -> Any:
    before = own.last["mean"] + sum(own.seen)
    own.seen.append(float(x.mean()))
    own.last["mean"] = float(x.mean())
    return before


def adds_an_attribute(own: Keeps, x: Tensor) -> Any:
    before = getattr(own, "before", 0.0)
    own.before = x.detach().mean()
    return before


def assigns_a_buffer(own: Keeps, x: Tensor) -> Any:
    own.mean = 0.9 * own.mean + 0.1 * x.detach().mean(0)
    return own.mean


def writes_for_some(own: Keeps, x: Tensor) -> Any:
    """Nothing that made-up records show."""
    if x[0, 1] > 1.0:
        own.mean += 1.0
    return own.mean


def writes_a_buffer(own: Keeps, x: Tensor) -> Any:
    own.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return own.mean


KEEPERS = [counts, appends_and_updates, adds_an_attribute, assigns_a_buffer, writes_a_buffer, writes_for_some]


@pytest.mark.parametrize("keep", KEEPERS)
def test_what_a_module_keeps_is_forgotten(keep: Any) -> None:
    """The next record, pass and release find the module as it was: a record's part is the same in any company."""
    torch.manual_seed(0)
    model = Keeps(keep)
    before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    whole = clipped_sum(model, range(40))
    apart = sum(clipped_sum(model, [row]) for row in range(40))
    torch.testing.assert_close(whole, apart, rtol=1e-4, atol=1e-5)
    assert (model.calls, model.seen, model.last) == (0, [0.5], {"mean": 0.5})
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == before
    assert not model.mean.any()
    qt.fit(model, CE, data(), qg.DPSGD(steps=2, batch_size=10), budget=BUDGET, progress=False)
    assert not model.mean.any()
    assert model.calls == 0


def test_a_batch_norm_in_evaluation_mode_stays_so() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    before = model[1].running_mean.clone()
    qt.fit(model, CE, data(), qg.DPSGD(steps=2, batch_size=10), budget=BUDGET)
    assert not model[1].training
    assert model.training
    assert torch.equal(model[1].running_mean, before)


def test_autocast_does_not_reach_what_is_clipped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = clipped_gradient_sum(model, CE, data(), 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(clipped_gradient_sum(model, CE, data(), 0.3), plain, rtol=0, atol=0)
        engine = PerExampleEngine(model)
        (group,) = grouped(data()[0])
        passes = engine.record([group._replace(record=(group.record, {}))], RecordSeeds(KEY, group.rows))
    torch.autograd.backward(F.cross_entropy(passes[0].outputs[:, 0], data()[1], reduction="sum"))
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.zeros(engine.dim, dtype=torch.float64)
        engine.add_recorded(passes, len(group.rows), None, ClippingRule.gradient(0.3), total)
    expected = torch.cat([each.flatten() for each in plain[0].values()]).double()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_modes_of_layers_are_each_their_own_program() -> None:
    """Found out in evaluation mode is not found out in training mode, where there is dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)).eval()
    engine = PerExampleEngine(model, CE)
    groups, theta = grouped(*data()), start(engine)
    still, _ = summed(engine, (theta,), groups, ClippingRule.gradient(1.0))
    model.train()
    moved, _ = summed(engine, (theta,), groups, ClippingRule.gradient(1.0))
    assert not torch.allclose(still, moved, rtol=1e-2)
    model.eval()
    assert torch.equal(still, summed(engine, (theta,), groups, ClippingRule.gradient(1.0))[0])
    assert len(engine.programs) == 2


# --- the comparison with autograd ----------------------------------------------------------------------------


def lighter(patch: pytest.MonkeyPatch) -> None:
    """A kernel whose norms are two per cent below the truth."""
    put = gathering.Collector._add

    class Lighter:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def squared_norms(self) -> Tensor:
            squares: Tensor = 0.96 * self.inner.squared_norms()
            return squares

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    patch.setattr(
        gathering.Collector, "_add", lambda self, part, slot, piece: put(self, part, slot, Lighter(piece))
    )


def other_rows(patch: pytest.MonkeyPatch) -> None:
    """A tap that keeps another record's gradient."""
    receive = taps.TapSite.receive
    patch.setattr(taps.TapSite, "receive", lambda self, grad: receive(self, grad.flip(0)))


def forgotten(patch: pytest.MonkeyPatch) -> None:
    """A use of a parameter that no tap sees."""
    use = taps.Taps.use

    def without_bias(self: Any, operation: str, kernel: Any, given: Tensor, roles: Any) -> Any:
        return use(self, operation, kernel, given, {role: value for role, value in roles.items() if role != "bias"})

    patch.setattr(taps.Taps, "use", without_bias)


@pytest.mark.parametrize("wrong", [lighter, other_rows, forgotten])
def test_a_wrong_kernel_is_caught_before_it_is_used(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is then run one record at a time, and its sums are right all the same."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), data(6)
    wrong(monkeypatch)
    engine = PerExampleEngine(model, CE)
    engine.try_out(grouped(x, y)[0].record)
    assert "does not agree with autograd" in str(engine.try_out(grouped(x, y)[0].record).program.alone)
    assert "one record at a time" in engine.fallbacks[0]
    monkeypatch.undo()
    found, _ = summed(engine, (start(engine),), grouped(x, y), ClippingRule.gradient(0.3))
    expected, _ = ruled(ClippingRule.gradient(0.3), gradients(engine, start(engine), x, y))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- explain -------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A large parameter in an operation without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Parameter(torch.ones(5000)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x) * torch.sigmoid(self.gate * x[:, :1]).mean()
        return output


class Sorting(nn.Linear):
    """Leaves torch: vmap cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.as_tensor(np.sort(x.detach().numpy())))


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(x.sum()))


def test_explain_says_how_and_why(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    batch = data()
    model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.LayerNorm(8), nn.Linear(8, 2))
    found = qt.explain(model, batch, CE)
    assert [(part.name, part.kind, part.how) for part in found.parts] == [
        ("0.weight, 0.bias", "linear", "kernel"), ("1.weight", "prelu", "kernel"),
        ("2.weight, 2.bias", "layer_norm", "kernel"), ("3.weight, 3.bias", "linear", "kernel"),
    ]  # fmt: skip
    assert not found.fallbacks
    assert sum(part.parameters for part in found.parts) == sum(p.numel() for p in model.parameters())
    assert str(found).splitlines()[1].split() == ["0.weight,", "0.bias", "linear", "kernel", "56", "0"]
    wide = qt.explain(Wide(), batch, CE)
    assert [(part.name, part.how) for part in wide.fallbacks] == [("gate", "copied")]
    assert "mul has no kernel: its parameters are copied for each record" in [part.why for part in wide.fallbacks]
    assert wide.fallbacks[0].memory == 5000
    unused = nn.Sequential(nn.Linear(6, 2))
    unused.idle = nn.Linear(3, 3)
    unused.forward = lambda x: unused[0](x)  # type: ignore[method-assign]
    assert "these records do not use it" in [part.why for part in qt.explain(unused, batch, CE).parts]
    for alone, why in ((Sorting(6, 2), "vmap cannot run it"), (Branching(6, 2), "a number of its own")):
        (part,) = qt.explain(alone, batch, CE).parts
        assert part.how == "one record at a time"
        assert why in part.why
        assert str(qt.explain(alone, batch, CE)).startswith("one record at a time, by plain autograd")
    found = qt.explain(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), batch, CE)
    assert [part.how for part in found.refused] == ["refused"]
    assert str(found).startswith("refused: layer '1' (BatchNorm1d)")
    with caplog.at_level("WARNING", "quietgrad"):
        qt.fit(Wide(), CE, batch, qg.DPSGD(steps=1, batch_size=10), budget=qg.Budget(2.0, 1e-5), progress=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "gate: mul has no kernel" in caplog.text


def test_explain_takes_a_data_set_and_says_what_it_needs() -> None:
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    for given, count in ((data, 32), (DataLoader(data, batch_size=5), 5), (data[:7], 7)):
        assert qt.explain(model, given, nn.CrossEntropyLoss()).records == count
    with pytest.raises(DataError, match=r"the batch must be \(x, y\), records first, and it is a dict"):
        qt.explain(model, {"x": data[:7][0]}, nn.CrossEntropyLoss())
