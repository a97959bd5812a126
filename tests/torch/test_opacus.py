"""Opacus's verbs: scripts of its shape run to the end, and what they say was spent is true on every path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import quietgrad.torch as qt
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import gaussian, poisson_gaussian
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.ledger import Ledger
from tests.torch.loops import network, table

QUIET = 1e-7  # a noise multiplier that leaves the clipped sum readable
DELTA = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:seed=")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def private(engine: qt.PrivacyEngine | None = None, model: nn.Module | None = None, **settings: Any) -> Any:
    model = network() if model is None else model
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = settings.pop("loader", None)
    if loader is None:
        loader = DataLoader(settings.pop("data", table()), batch_size=settings.pop("batch_size", 15))
    settings = {"noise_multiplier": 1.5, "max_grad_norm": 1.0} | settings
    verbs = engine or qt.PrivacyEngine()
    calibrated = "target_epsilon" in settings and "epochs" in settings
    verb = verbs.make_private_with_epsilon if calibrated else verbs.make_private
    if calibrated:
        del settings["noise_multiplier"]
        settings.setdefault("n_public", 60)
    return verb(module=model, optimizer=optimizer, data_loader=loader, **settings)


def train(made: Any, batches: int = 1_000_000) -> int:
    model, optimizer, loader = made[:3]
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


# --- samples, noise, price ----------------------------------------------------------------------------------------


def test_noise_has_the_declared_scale() -> None:
    """Of 400·34 coordinates the mean square is outside [0.94, 1.06] in less than 1 of 10⁶ runs."""
    model = network()
    made = private(model=model, noise_multiplier=2.0, max_grad_norm=0.5, criterion=lambda out, y: 0.0 * out.sum())
    total, count = 0.0, 0
    for _ in range(100):
        for x, y in made[2]:
            made[1].zero_grad()
            made[3](made[0](x), y).backward()
            made[1].step()
            for param in model.parameters():
                assert param.grad is not None
                total += float((param.grad.double() * 15 / (2.0 * 0.5)).square().sum())
                count += param.numel()
    assert count == 400 * 34
    assert 0.94 < total / count < 1.06


def test_samples_are_poisson_at_the_exact_rate() -> None:
    """q = 4/10, not 1/⌈10/4⌉: mean 4 and variance 2.4 over 3000 samples, each within 5 standard errors."""
    loader = private(data=table(10), batch_size=4, seed=3)[2]
    assert len(loader) == 3
    sizes = [len(loader.loop.sample) for _ in range(1000) for _ in loader]
    assert abs(np.mean(sizes) - 4.0) < 5 * np.sqrt(2.4 / 3000)
    assert abs(np.var(sizes) - 2.4) < 5 * np.sqrt(2 * 2.4**2 / 3000)
    assert 0 in sizes  # an empty sample is released like any other
    assert loader.privacy.condition is None


def test_epsilon_is_met_and_more_epochs_are_refused() -> None:
    made = private(target_epsilon=2.0, target_delta=DELTA, epochs=2)
    assert train(made) + train(made) == 8
    assert 1.99 < made[2].privacy.epsilon <= 2.0
    with pytest.raises(BudgetError, match="8 steps that were planned are made"):
        train(made)


def test_skipped_samples_are_spent_and_an_engine_adds_its_loops_up() -> None:
    """Also those at the end: whether to step on them may have depended on them."""
    engine = qt.PrivacyEngine(secure_mode=False)
    with pytest.raises(RuntimeError, match="make_private first"):
        engine.get_epsilon(DELTA)
    made = private(engine)
    assert engine.get_epsilon(DELTA) == 0.0 == made[2].privacy.epsilon
    train(made, 1)
    assert sum(1 for _ in made[2]) == 4
    assert made[2].privacy.epsilon == pytest.approx(epsilon(5))
    model, optimizer, criterion, loader = private(engine, grad_sample_mode="ghost")  # in Opacus' order
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
    assert loader.privacy.condition is None
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon(9))
    assert engine.accountant.get_epsilon(delta=DELTA) == pytest.approx(epsilon(9))
    assert engine.condition is not None
    seeded = private(engine, seed=3)
    train(seeded, 1)
    assert seeded[2].loop.epsilon() == math.inf
    assert engine.get_epsilon(DELTA) == math.inf
    assert "NOT PRIVATE" in str(seeded[2].privacy)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(5), 0


class _Reversed(BatchSampler):
    """A law of its own."""


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "WeightedRandomSampler": lambda: DataLoader(
        table(), batch_size=15, sampler=WeightedRandomSampler([1.0] * 60, 60)
    ),
    "RandomSampler": lambda: DataLoader(table(), batch_size=15, sampler=RandomSampler(table(), replacement=True)),
    "no length": lambda: DataLoader(Stream(), batch_size=2),
    "have no law": lambda: DataLoader(table(), batch_sampler=_Reversed(SequentialSampler(table()), 15, False)),
    "batch_size=31": lambda: DataLoader(Subset(table(), range(30)), batch_size=31),
    "more than once": lambda: DataLoader(Subset(table(), [1, 2, 1]), batch_size=2),
}


@pytest.mark.parametrize("message", LOADERS)
def test_samplers_that_cannot_be_accounted_for_are_refused(message: str) -> None:
    with pytest.raises(DataError, match=message):
        private(loader=LOADERS[message]())


def test_a_shuffled_loader_becomes_poisson_or_is_accounted_without_amplification() -> None:
    shuffled = DataLoader(table(), batch_size=15, shuffle=True, num_workers=1)
    loader = private(loader=shuffled, noise_multiplier=2.0)[2]
    assert len({len(loader.loop.sample) for _ in range(5) for _ in loader}) > 1
    loader = private(loader=shuffled, noise_multiplier=2.0, poisson_sampling=False)[2]
    for epoch in (1, 2):
        seen = np.concatenate([loader.loop.sample.keys.indices for _ in loader])
        assert np.array_equal(np.sort(seen), np.arange(60))  # everybody, once
        true = account(gaussian(2.0, steps=epoch), delta=DELTA, relation="add-remove")
        assert loader.privacy.epsilon == pytest.approx(true)


@pytest.mark.parametrize(("settings", "message"), [
    ({"grad_sample_mode": "no_op"}, "nothing could bound"), ({"batch_first": False}, "batch to the front"),
    ({"noise_generator": torch.Generator()}, "can be predicted"),
    ({"clipping": "adaptive"}, "second release"), ({"max_grad_norm": [1.0]}, "a list of 1 bounds"),
    ({"loss_reduction": "none"}, "must be 'mean'"), ({"target_epsilon": 1.0}, "give one of them"),
    ({"ledger": "ledger.jsonl"}, "needs the number of epochs"), ({"records_per_person": 3}, "person"),
    ({"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))}, r"'1' \(BatchNorm1d\)"),
    ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "another module"),
    ({"poisson_sampling": False, "sampling": "random-allocation"}, "give one of them"),
    ({"optimizer": 0.1}, "optimizer: must be a torch optimizer"),
])  # fmt: skip
def test_what_is_refused_says_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        private(**settings)


# --- memory, hooks, groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {}, {"criterion": True}, {"person": np.arange(60) // 4, "batch_size": 4},
    {"person": np.arange(60) // 4, "batch_size": 4, "records_per_person": 2, "criterion": True},
])  # fmt: skip
def test_physical_batches_are_one_sample_and_one_step(settings: dict[str, Any]) -> None:
    settings = {**settings, "criterion": nn.CrossEntropyLoss() if "criterion" in settings else None}
    whole, pieces = network(), network()
    a = private(model=whole, seed=3, noise_multiplier=QUIET, **settings)
    engine = qt.PrivacyEngine()
    b = private(engine, pieces, seed=3, noise_multiplier=QUIET, **settings)

    def step(made: Any, x: Tensor, y: Tensor) -> None:
        made[1].zero_grad()
        (made[3] if len(made) > 3 else loss_of)(made[0](x), y).backward()
        made[1].step()

    for x, y in a[2]:
        step(a, x, y)
    sizes, steps = [], []
    b[1].register_step_pre_hook(lambda optimizer, *_: steps.append(optimizer))
    with qt.BatchMemoryManager(data_loader=b[2], max_physical_batch_size=4, optimizer=b[1]) as loader:
        for x, y in loader:
            sizes.append(len(b[2].loop.sample))
            step(b, x, y)
    assert max(sizes) <= 4
    assert len(sizes) > len(a[2]) == len(steps)
    bounded = "person" not in settings or "records_per_person" in settings
    assert not bounded or len(sizes) % len(a[2]) == 0  # how many pieces a sample has is public
    assert (b[2].privacy.condition is None) is (settings["criterion"] is not None and bounded)
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert b[2].loop.handed_out == len(a[2])
    with qt.BatchMemoryManager(data_loader=b[2], max_physical_batch_size=4, optimizer=b[1]) as loader:
        next(iter(loader))
    assert not b[2].loop.partial  # left in the middle of a sample: the next step is a step
    with pytest.raises(ValueError, match="different private loops"):
        qt.BatchMemoryManager(data_loader=a[2], max_physical_batch_size=4, optimizer=b[1])


def test_groups_schedulers_and_hooks_see_released_gradients() -> None:
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1
    )
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # made before the loop is private
    made = private(model=model, optimizer=optimizer)
    late = torch.optim.lr_scheduler.ExponentialLR(made[1], 0.5)
    seen: list[int] = []
    made[1].register_step_pre_hook(
        lambda opt, *_: seen.append(sum(p.grad is not None for g in opt.param_groups for p in g["params"]))
    )
    before = [param.detach().clone() for param in model.parameters()]
    train(made)
    early.step()
    late.step()
    assert seen == [4] * 4
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# --- what was spent -----------------------------------------------------------------------------------------------


def test_states_are_ordinary_and_the_account_keeps_what_was_spent(tmp_path: Path) -> None:
    """Loaded, copied and gone on with twice: the ledger has all of it."""
    ledger = tmp_path / "ledger.jsonl"
    a = private(epochs=1, ledger=ledger)
    train(a)
    for _ in range(2):
        b = private(epochs=1, ledger=ledger)
        b[0].load_state_dict({name: value.clone() for name, value in a[0].state_dict().items()})
        b[1].load_state_dict(a[1].state_dict())
        train(b)
    spent = Ledger(ledger).spent("default", delta=DELTA, relation="add-remove")
    assert spent.epsilon == pytest.approx(epsilon(12), rel=1e-6)
    assert Ledger(ledger).book().conditions("default") == (a[2].privacy.condition,)
    again = private(epochs=1, ledger=ledger, model=b[0], optimizer=b[1], loader=b[2])
    train(again)
    spent = Ledger(ledger).spent("default", delta=DELTA, relation="add-remove")
    assert spent.epsilon == pytest.approx(epsilon(16), rel=1e-6)


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


def test_the_mode_for_sharded_parameters_returns_what_the_ghost_mode_does() -> None:
    model = network()
    made = qt.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(table(), batch_size=20), max_grad_norm=1.0, grad_sample_mode="ghost_fsdp",
    )  # fmt: skip
    assert isinstance(made[2], nn.Module)
    x, y = next(iter(made[3]))
    made[2](made[0](x), y).backward()
    made[1].step()
    assert made[3].privacy.condition is None


def test_a_fixed_batch_norm_of_vectors_normalises_a_record_over_its_channels() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    fixed: Any = qt.ModuleValidator.fix(model)
    alone = fixed[:2](torch.randn(1, 5))  # a group for each channel would be zero, and torch refuses a batch of one
    assert float(alone.detach().std(correction=0)) == pytest.approx(1.0, rel=1e-3)
    assert train(private(model=fixed), 1) == 1
