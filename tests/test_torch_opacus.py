"""Opacus's verbs: scripts of its shape run to the end, and what they say was spent is true on every path."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad.torch as qt
from quietgrad.errors import BudgetError, DataError
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.privacy.accounting import account
from quietgrad.privacy.events import composed, poisson_gaussian
from quietgrad.privacy.ledger import Ledger
from quietgrad.torch.clip_rules import AdaptiveClip

QUIET = 1e-7  # a noise multiplier that leaves the clipped sum readable
DELTA = 1e-5


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def table(n: int = 60, seed: int = 0) -> TensorDataset:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def private(engine: qt.PrivacyEngine | None = None, model: nn.Module | None = None, **settings: Any) -> Any:
    model = network() if model is None else model
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(settings.pop("data", table()), batch_size=settings.pop("batch_size", 15))
    settings = {"noise_multiplier": 1.5, "max_grad_norm": 1.0} | settings
    verbs = engine or qt.PrivacyEngine()
    verb = verbs.make_private_with_epsilon if "target_epsilon" in settings else verbs.make_private
    if "target_epsilon" in settings:
        del settings["noise_multiplier"]
    return verb(module=model, optimizer=optimizer, data_loader=loader, **settings)


def train(made: Any, batches: int = 1_000_000) -> int:
    model, optimizer, loader = made[0], made[1], made[-1]
    model.train()
    taken = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        taken += 1
        if taken == batches:
            break
    return taken


def loss_of(output: Tensor, y: Tensor, reduction: str = "mean") -> Any:
    return nn.functional.cross_entropy(output, y, reduction=reduction)


def epsilon(steps: int, multiplier: float = 1.5, rate: float = 0.25) -> float:
    event = poisson_gaussian(rate=rate, noise_multiplier=multiplier, steps=steps)
    return account(event, delta=DELTA, relation="add-remove")


# --- scripts of the shape of Opacus's examples --------------------------------------------------------------------


def test_a_script_of_images_with_an_accountant() -> None:
    x = torch.rand(64, 1, 12, 12)
    data = TensorDataset(x, torch.randint(0, 10, (64,)))
    model: Any = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(64, 10)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    engine = qt.PrivacyEngine(secure_mode=False)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=16, pin_memory=False),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for epoch in (1, 2):
        model.train()
        losses = []
        for images, target in loader:
            images, target = images.to("cpu"), target.to("cpu")
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(images), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert engine.accountant.get_epsilon(delta=DELTA) == pytest.approx(epsilon(4 * epoch, 1.0))
        assert f"{engine.get_epsilon(DELTA):.2f}" == f"{engine.accountant.get_epsilon(delta=DELTA):.2f}"
    assert engine.accountant.history == [(1.0, 0.25, 8)]
    assert len(engine.accountant) == 8
    model.eval()
    with torch.no_grad():
        assert model(x).argmax(1).eq(data.tensors[1]).sum().item() >= 0


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_script_with_clipping_modes_schedules_and_checkpoints(clipping: str, mode: str, tmp_path: Path) -> None:
    model = network()
    count = len(list(model.parameters()))
    engine = qt.PrivacyEngine()
    made = private(
        engine, model, clipping=clipping, grad_sample_mode=mode, criterion=nn.CrossEntropyLoss(),
        max_grad_norm=[1.0 / math.sqrt(count)] * count if clipping == "per_layer" else 1.0,
    )  # fmt: skip
    assert len(made) == (4 if mode == "ghost" else 3)
    optimizer = made[1]
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 ** (epoch + 1)
        assert train(made) == 4
        torch.save({"state_dict": made[0].state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.tar")
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon(8))


class Names(Dataset[Any]):
    """Words of letters, each with the language it is of."""

    def __init__(self) -> None:
        rows = torch.Generator().manual_seed(0)
        self.samples = [(torch.randint(0, 9, (3 + k % 4,), generator=rows), torch.tensor(k % 3)) for k in range(48)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def padded(batch: list[Any]) -> Any:
    return pad_sequence([word for word, _ in batch], batch_first=True), torch.stack([y for _, y in batch])


class Reader(nn.Module):
    """Letters, a recurrent layer, a language."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.letters = nn.Embedding(9, 4)
        self.rnn = kind(4, 5, num_layers=1, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
        read: Tensor = self.out(self.rnn(self.letters(x), hidden)[0][:, -1, :])
        return read


@pytest.mark.parametrize("kind", [qt.DPLSTM, qt.DPGRU])
def test_a_script_of_words_with_a_recurrent_layer(kind: Any) -> None:
    model = Reader(kind)
    engine = qt.PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=2.0), noise_multiplier=1.5,
        data_loader=DataLoader(Names(), batch_size=12, collate_fn=padded), max_grad_norm=1.5,
    )  # fmt: skip
    assert train(made) == 4
    assert engine.accountant.get_epsilon(delta=8e-5) > 0.0


def test_a_script_of_texts_without_poisson_samples() -> None:
    """A pooled embedding that squeezes its output, shuffled batches: accounted without amplification."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.pool, self.out = nn.Embedding(9, 4), nn.AdaptiveAvgPool1d(1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            pooled: Tensor = self.out(self.pool(self.words(x).transpose(1, 2)).squeeze())
            return pooled

    model = Pooled()
    engine = qt.PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.02), noise_multiplier=2.0,
        max_grad_norm=1.0, poisson_sampling=False,
        data_loader=DataLoader(Names(), batch_size=24, collate_fn=padded, shuffle=True),
    )  # fmt: skip
    train(made)
    assert engine.accountant.history == [(2.0, 1.0, 1)]
    assert engine.get_epsilon(DELTA) > epsilon(2, 2.0, rate=0.5)


# --- clipping -----------------------------------------------------------------------------------------------------


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Each example's gradient, by autograd on it alone."""
    out: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for one, label in zip(x, y, strict=True):
        grads = torch.autograd.grad(loss_of(model(one[None]), label[None]), list(model.parameters()))
        for name, grad in zip(out, grads, strict=True):
            out[name].append(grad)
    return {name: torch.stack(rows) for name, rows in out.items()}


@pytest.mark.filterwarnings("ignore:seed=3")
@pytest.mark.parametrize("memory", [{}, {"micro_batch": 4}, {"memory_budget": 0.0}])
def test_per_layer_clipping_clips_each_parameter(memory: dict[str, Any]) -> None:
    plain = network()
    clips = [0.3, 0.1, 0.2, 0.05]
    made = private(model=plain, clipping="per_layer", max_grad_norm=clips, noise_multiplier=QUIET, seed=3, **memory)
    assert made[2].privacy.rule.bound(QUIET) == pytest.approx(math.sqrt(sum(c * c for c in clips)))
    x, y = next(iter(made[2]))
    rows = rows_of(plain, x.as_subclass(Tensor), y.as_subclass(Tensor))
    made[1].zero_grad()
    loss_of(made[0](x), y).backward()
    made[1].step()
    for clip, (name, param) in zip(clips, plain.named_parameters(), strict=True):
        weights = (clip / rows[name].flatten(1).norm(dim=1)).clamp(max=1.0)
        assert float(weights.min()) < 1.0
        expected = torch.einsum("b,b...->...", weights, rows[name]) / 15
        assert param.grad is not None
        torch.testing.assert_close(param.grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("strategy", ["auto", "factored", "functional"])
def test_per_layer_sums_agree_however_gradients_are_made_and_a_broken_example_is_zero(strategy: Any) -> None:
    model = network()
    x, y = table(9).tensors
    clips = [0.3, 0.1, 0.2, 0.05]
    rows = rows_of(model, x, y)
    wanted = []
    for clip, row in zip(clips, rows.values(), strict=True):
        weights = (clip / row.flatten(1).norm(dim=1)).clamp(max=1.0)
        wanted.append(torch.einsum("b,b...->...", weights[1:], row[1:]).flatten())
    x = x.clone()
    x[0, 0] = torch.inf
    engine = PerExampleEngine(
        model, lambda output, labels: loss_of(output, labels, reduction="none"), strategy=strategy, micro_batch=5
    )
    theta = engine.flatten(dict(model.named_parameters()))
    out = torch.zeros(engine.dim, dtype=torch.float64)
    norms = engine.add_clipped_by_parameter(theta, x, y, clips, out)
    assert not norms[0].isfinite()
    assert bool(norms[1:].isfinite().all())
    torch.testing.assert_close(out, torch.cat(wanted).double(), rtol=1e-3, atol=1e-6)


ADAPTIVE: dict[str, Any] = {
    "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0, "min_clipbound": 0.001, "unclipped_num_std": 4.0,
}  # fmt: skip


def test_adaptive_clipping_is_in_the_plan_and_its_price() -> None:
    """One release of multiplier z, gradient and count together: the price is that of DP-SGD, the noise larger."""
    engine = qt.PrivacyEngine()
    made = private(engine, max_grad_norm=5.0, **ADAPTIVE)
    rule = made[2].privacy.rule
    assert isinstance(rule, AdaptiveClip)
    assert 1.5 * rule.bound(1.5) / rule.scale(1.5) == pytest.approx(4.0)  # the count's noise, in records
    noise = 1.5 * rule.bound(1.5) / 5.0  # the gradient's, in C
    assert noise**-2 + 8.0**-2 == pytest.approx(1.5**-2)  # Andrew et al. (2021), Theorem 1
    for _ in range(10):
        train(made)
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon(40))
    assert made[1].max_grad_norm < 4.0  # it began far above all norms
    other = private(max_grad_norm=5.0, **ADAPTIVE)
    other[1].load_state_dict(made[1].state_dict())
    assert other[1].max_grad_norm == made[1].max_grad_norm
    with pytest.raises(ValueError, match="no noise left"):
        private(noise_multiplier=8.0, **ADAPTIVE)
    with pytest.raises(TypeError, match="unclipped_num_std is missing"):
        private(**{key: value for key, value in ADAPTIVE.items() if key != "unclipped_num_std"})


@pytest.mark.filterwarnings("ignore:seed=3")
def test_one_record_moves_an_adaptive_release_by_its_bound_at_most() -> None:
    """The released vector, gradient and count, with and without one record: at most B apart, and nearly B."""
    sums: list[Tensor] = []
    rule = AdaptiveClip(0.1, 0.5, 0.2, 0.01, 1.0, 4.0)
    for n in (60, 59):
        made = private(data=TensorDataset(*(t[:n] for t in table().tensors)), noise_multiplier=1.5, seed=3)
        loop = made[2].privacy
        x, y = table().tensors[0][:n], table().tensors[1][:n]
        output = network()(x).detach().requires_grad_()
        loss_of(output, y, reduction="sum").backward()
        assert output.grad is not None
        out = torch.zeros(loop.engine.dim + 1, dtype=torch.float64)
        theta = loop.engine.flatten(dict(network().named_parameters()))
        rule.add(loop.engine, theta, (x,), (output.grad,), out, RecordKeys(bytes(32), np.arange(n)), 1.5)
        sums.append(out)
    moved = float((sums[0] - sums[1]).norm())
    assert 0.999 * rule.bound(1.5) < moved <= rule.bound(1.5) * (1 + 1e-9)


# --- memory, hooks, groups, schedules -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:seed=3")
def test_physical_batches_are_one_sample_and_one_step() -> None:
    whole, pieces = network(), network()
    a = private(model=whole, seed=3)
    engine = qt.PrivacyEngine()
    b = private(engine, pieces, seed=3)
    train(a)
    sizes, steps = [], []
    b[1].attach_step_hook(lambda optimizer: steps.append(optimizer))
    with qt.BatchMemoryManager(data_loader=b[2], max_physical_batch_size=4, optimizer=b[1]) as loader:
        assert len(loader) == 16
        for x, y in loader:
            sizes.append(len(x))
            b[1].zero_grad()
            loss_of(b[0](x), y).backward()
            b[1].step()
    assert max(sizes) == 4
    assert len(sizes) > 4 == len(steps)
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(engine.accountant) == 4
    with qt.BatchMemoryManager(data_loader=b[2], max_physical_batch_size=4, optimizer=b[1]) as loader:
        next(iter(loader))
    assert not b[2].privacy.partial  # left in the middle of a sample: the next step is a step
    with pytest.raises(ValueError, match="different private loops"):
        qt.BatchMemoryManager(data_loader=a[2], max_physical_batch_size=4, optimizer=b[1])


def test_groups_schedulers_and_hooks_see_released_gradients() -> None:
    model: Any = network()
    optimizer: Any = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1
    )
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # made before the loop is private
    made = private(model=model, optimizer=optimizer)
    late = torch.optim.lr_scheduler.ExponentialLR(made[1], 0.5)
    seen: list[int] = []
    made[1].attach_step_hook(
        lambda opt: seen.append(sum(p.grad is not None for g in opt.param_groups for p in g["params"]))
    )
    made[1].attach_step_hook(lambda opt: seen.append(-1))
    before = [param.detach().clone() for param in model.parameters()]
    train(made)
    early.step()
    late.step()
    assert seen == [4, -1] * 4
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(made[2].privacy.history.costs()) == 1
    assert made[2].privacy.handed_out == 4


def test_noise_and_bounds_are_not_changed_on_the_way() -> None:
    engine = qt.PrivacyEngine()
    made = private(engine, epochs=2, noise_schedule=lambda epoch: 0.8**epoch)
    assert made[1].noise_multiplier == 1.5
    with pytest.raises(BudgetError, match="noise_schedule"):
        made[1].noise_multiplier = 0.1
    with pytest.raises(BudgetError, match="adaptive"):
        made[1].max_grad_norm = 100.0
    train(made)
    assert made[1].noise_multiplier == pytest.approx(1.2)
    train(made)
    assert engine.accountant.history == [(1.5, 0.25, 4), (pytest.approx(1.2), 0.25, 4)]
    parts = [poisson_gaussian(rate=0.25, noise_multiplier=z, steps=4) for z in (1.5, 1.2)]
    assert engine.get_epsilon(DELTA) == pytest.approx(account(composed(parts), delta=DELTA, relation="add-remove"))
    with pytest.raises(BudgetError, match="planned"):
        train(made)


@pytest.mark.parametrize(("settings", "message"), [
    ({"grad_sample_mode": "no_op"}, "nothing could bound"), ({"batch_first": False}, "no record counts twice"),
    ({"noise_generator": torch.Generator()}, "can be predicted"),
    ({"clipping": "per_layer", "max_grad_norm": [1.0]}, "each of the 4"),
    ({"clipping": "layers"}, "must be"), ({"max_grad_norm": -1.0}, "finite number > 0"),
])  # fmt: skip
def test_what_is_refused_says_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(**settings)


# --- what was spent, wherever a state goes ------------------------------------------------------------------------


def test_a_checkpoint_brings_what_it_cost(tmp_path: Path) -> None:
    first = qt.PrivacyEngine()
    a = private(first)
    train(a)
    first.save_checkpoint(
        path=tmp_path / "c", module=a[0], optimizer=a[1], checkpoint_dict={"epoch": 1, "best": (0.5, "x")}
    )
    second = qt.PrivacyEngine()
    b = private(second)
    extra = second.load_checkpoint(path=tmp_path / "c", module=b[0], optimizer=b[1])
    assert (extra["epoch"], extra["best"]) == (1, (0.5, "x"))
    for one, other in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(one, other)
    moved = [s["momentum_buffer"] for s in b[1].state.values()]
    assert all(torch.equal(x, s["momentum_buffer"]) for x, s in zip(moved, a[1].state.values(), strict=True))
    assert second.get_epsilon(DELTA) == pytest.approx(epsilon(4))
    train(b)
    assert second.get_epsilon(DELTA) == pytest.approx(epsilon(8))
    assert b[2].privacy.epsilon() == pytest.approx(epsilon(8))
    assert second.accountant.history == [(1.5, 0.25, 4), (1.5, 0.25, 4)]


def test_two_continuations_of_one_checkpoint_both_count(tmp_path: Path) -> None:
    """Loaded twice, gone on twice: the people have paid for both, and every engine says so."""
    first = qt.PrivacyEngine()
    a = private(first)
    train(a)
    first.save_checkpoint(path=tmp_path / "c", module=a[0], optimizer=a[1])
    engines = [qt.PrivacyEngine() for _ in range(2)]
    loops = [private(engine) for engine in engines]
    for engine, made in zip(engines, loops, strict=True):
        engine.load_checkpoint(path=tmp_path / "c", module=made[0], optimizer=made[1])
        engine.load_checkpoint(path=tmp_path / "c", module=made[0], optimizer=made[1])  # twice is once
        train(made)
    assert {round(engine.get_epsilon(DELTA), 9) for engine in (first, *engines)} == {round(epsilon(12), 9)}
    train(a, 2)  # and the one that saved it goes on as well
    assert engines[0].get_epsilon(DELTA) == pytest.approx(epsilon(14))


def test_a_ledger_never_says_less_than_the_engines(tmp_path: Path) -> None:
    first, second = qt.PrivacyEngine(), qt.PrivacyEngine()
    a = private(first, epochs=2, ledger=tmp_path / "ledger.jsonl")
    train(a)
    first.save_checkpoint(path=tmp_path / "c", module=a[0], optimizer=a[1])
    b = private(second, epochs=1, ledger=tmp_path / "ledger.jsonl")
    second.load_checkpoint(path=tmp_path / "c", module=b[0], optimizer=b[1])
    train(b)
    assert second.get_epsilon(DELTA) == pytest.approx(epsilon(8))
    spent = Ledger(tmp_path / "ledger.jsonl").spent("default", delta=DELTA, relation="add-remove")
    assert spent.epsilon == pytest.approx(epsilon(12), rel=1e-6)  # what was planned, both times


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import quietgrad.torch as qt
x = torch.randn(60, 5)
model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
engine = qt.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), noise_multiplier=1.5,
    data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=15), max_grad_norm=1.0)
engine.load_checkpoint(path=sys.argv[1], module=model, optimizer=optimizer)
for number, (x, y) in enumerate(loader):
    nn.functional.cross_entropy(model(x), y).backward()
    if number == 2:
        import os
        os._exit(9)
    optimizer.step()
"""


def test_a_continuation_in_a_process_that_died_counts(tmp_path: Path) -> None:
    first = qt.PrivacyEngine()
    a = private(first)
    train(a)
    first.save_checkpoint(path=tmp_path / "c", module=a[0], optimizer=a[1])
    died = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "c")], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert died.returncode == 9
    assert first.get_epsilon(DELTA) == pytest.approx(epsilon(4 + 3))


def test_a_target_holds_with_what_was_loaded(tmp_path: Path) -> None:
    """Planned for three epochs, two of them in a checkpoint: one is left."""
    settings: dict[str, Any] = {"target_epsilon": 2.0, "target_delta": DELTA, "epochs": 3}
    first = qt.PrivacyEngine()
    a = private(first, **settings)
    train(a)
    train(a)
    first.save_checkpoint(path=tmp_path / "c", module=a[0], optimizer=a[1])
    second = qt.PrivacyEngine()
    b = private(second, **settings)
    second.load_checkpoint(path=tmp_path / "c", module=b[0], optimizer=b[1])
    assert train(b) == 4
    assert 1.99 < second.get_epsilon(DELTA) <= 2.0
    with pytest.raises(BudgetError, match="planned"):
        train(b)
    third = qt.PrivacyEngine()
    third.load_checkpoint(path=tmp_path / "c", module=network())  # before a loop is made: the same
    c = private(third, **settings)
    assert c[2].privacy.total == 0  # the second continuation has nothing left: the first one took it


def test_an_optimizers_state_brings_what_it_cost() -> None:
    a, b = private(), private()
    train(a)
    b[1].load_state_dict(a[1].state_dict())
    assert b[2].privacy.epsilon() == pytest.approx(epsilon(4))
    train(b)
    assert b[2].privacy.epsilon() == pytest.approx(epsilon(8))
    public = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    for group in public.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    public.step()
    with pytest.raises(BudgetError, match="gradients without noise"):
        b[1].load_state_dict(public.state_dict())
    model = network()
    warm = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model(table().tensors[0]), table().tensors[1]).backward()
    warm.step()
    with pytest.raises(BudgetError, match="stepped before"):
        private(model=model, optimizer=warm)


def test_the_same_objects_again_and_a_second_loader() -> None:
    engine = qt.PrivacyEngine()
    made = private(engine)
    train(made)
    again = engine.make_private(
        module=made[0], optimizer=made[1], data_loader=made[2], noise_multiplier=1.5, max_grad_norm=1.0
    )
    train(again)
    other = engine.make_private(
        module=again[0], optimizer=again[1], noise_multiplier=1.5, max_grad_norm=1.0,
        data_loader=DataLoader(table(seed=1), batch_size=30),
    )  # fmt: skip
    train(other)
    parts = [
        poisson_gaussian(rate=0.25, noise_multiplier=1.5, steps=8),
        poisson_gaussian(rate=0.5, noise_multiplier=1.5, steps=2),
    ]
    assert engine.get_epsilon(DELTA) == pytest.approx(account(composed(parts), delta=DELTA, relation="add-remove"))
    elsewhere = qt.PrivacyEngine()
    late = elsewhere.make_private(
        module=other[0], optimizer=other[1], data_loader=other[2], noise_multiplier=1.5, max_grad_norm=1.0
    )
    assert late[2].privacy.epsilon() == pytest.approx(engine.get_epsilon(DELTA))  # its momentum is theirs


def test_a_models_state_brings_what_it_cost(tmp_path: Path) -> None:
    a, b = private(), private()
    train(a)
    torch.save(a[0].state_dict(), tmp_path / "weights")
    b[0].load_state_dict(torch.load(tmp_path / "weights", weights_only=True))
    train(b, 2)
    assert b[2].privacy.epsilon() == pytest.approx(epsilon(6))
    a[0].load_state_dict(a[0].state_dict())  # its own: nothing new
    assert a[2].privacy.epsilon() == pytest.approx(epsilon(6))  # both go on from one state


compile_model: Any = torch.compile


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_models_and_autocast_are_refused(compiled: bool) -> None:
    made = private()
    x, _ = next(iter(made[2]))
    if compiled:
        with pytest.raises(Exception, match="follow no rows"):
            compile_model(made[0], backend="eager")(x)
    else:
        with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
            made[0](x)


def test_copies_and_exceptions() -> None:
    engine = qt.PrivacyEngine()
    made = private(engine)
    for what in made[:2]:
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(what)
    with pytest.raises(ValueError, match="target"):
        train((made[0], made[1], [(x, y[:0]) for x, y in zip(*[iter(next(iter(made[2])))] * 2, strict=True)]))
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon(1))


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    engine = qt.PrivacyEngine()
    made = private(engine)
    torch.save({"module_state_dict": {}}, tmp_path / "pickled")
    engine.save_checkpoint(path=tmp_path / "c", module=made[0])
    (tmp_path / "half").write_bytes((tmp_path / "c").read_bytes()[:-9])
    for name in ("pickled", "half", "nothing"):
        with pytest.raises(DataError, match="checkpoint"):
            engine.load_checkpoint(path=tmp_path / name, module=made[0])
    with pytest.raises(TypeError, match="nothing is pickled"):
        engine.save_checkpoint(path=tmp_path / "d", module=made[0], checkpoint_dict={"what": object()})
    with pytest.raises(ValueError, match="cannot be checked"):
        engine.accountant.load_state_dict({"history": [(1.0, 0.1, 3)], "mechanism": "prv"})


# --- modules ------------------------------------------------------------------------------------------------------


def test_batch_norms_become_group_norms() -> None:
    tracking = nn.Sequential(nn.InstanceNorm2d(6, track_running_stats=True))
    model: Any = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), tracking, nn.Flatten(), nn.Linear(24, 2))
    nn.init.constant_(model[1].weight, 0.3)
    first, second = qt.ModuleValidator.validate(model)
    assert "'1' (BatchNorm2d)" in str(first)
    assert "'2.0' (InstanceNorm2d)" in str(second)
    with pytest.raises(ValueError, match="BatchNorm2d"):
        qt.ModuleValidator.validate(model, strict=True)
    assert not qt.PrivacyEngine.is_compatible(module=model)
    fixed: Any = qt.PrivacyEngine.get_compatible_module(model.eval())
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1].num_groups == 6
    assert float(fixed[1].weight.detach()[0]) == pytest.approx(0.3)
    made = private(model=fixed.train(), data=TensorDataset(torch.randn(30, 1, 4, 4), torch.randint(0, 2, (30,))))
    assert train(made, 1) == 1


@pytest.mark.parametrize("optimizer", [None, 0.1])
def test_an_optimizer_that_is_none_is_refused_with_a_sentence(optimizer: Any) -> None:
    loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randint(0, 2, (30,))), batch_size=5)
    with pytest.raises(TypeError, match="optimizer: must be a torch optimizer"):
        qt.make_private(
            module=nn.Linear(4, 2), optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
