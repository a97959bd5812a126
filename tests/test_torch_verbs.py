"""An own loop made private: right gradients, true samples, and refusals where others go on silently."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
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

from quietgrad.errors import BudgetError, DataError
from quietgrad.privacy.accounting import account
from quietgrad.privacy.events import composed, gaussian, poisson_gaussian
from quietgrad.privacy.ledger import Ledger
from quietgrad.torch.opacus_verbs import make_private, make_private_with_epsilon
from quietgrad.torch.privacy_engine import PrivacyEngine

QUIET = 1e-7  # a noise multiplier that leaves the clipped sum readable


def data(n: int = 120, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 6, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3)
    )


def loss_of(output: Tensor, y: Tensor, reduction: str = "mean") -> Any:
    return nn.functional.cross_entropy(output, y, reduction=reduction)


def private(model: nn.Module, *, batch_size: int = 30, n: int = 120, **settings: Any) -> Any:
    settings = {"noise_multiplier": QUIET, "max_grad_norm": 0.5, "seed": 3} | settings
    loader = DataLoader(data(n), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "seed=3")
        return make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, **settings
        )


def clipped_mean(model: nn.Module, x: Tensor, y: Tensor, clip: float, divisor: float) -> dict[str, Tensor]:
    """By the definition: vmap(grad), one clip over all parameters, divided by a public number."""
    params = {name: p.detach().double() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Any:
        return loss_of(functional_call(model, p, (xi[None],)), yi[None])

    rows = vmap(grad(loss), in_dims=(None, 0, 0))(params, x.double(), y)
    norms = torch.stack([row.flatten(1).square().sum(1) for row in rows.values()]).sum(0).sqrt()
    weights = (clip / norms).clamp(max=1.0)
    return {name: torch.einsum("b,b...->...", weights, row) / divisor for name, row in rows.items()}


def one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> None:
    optimizer.zero_grad()
    loss_of(model(x), y, reduction=reduction).backward()
    optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro_batch", [None, 8])
def test_gradients_are_the_clipped_mean_by_the_public_batch_size(reduction: str, micro_batch: int | None) -> None:
    plain = network()
    model, optimizer, loader = private(plain, loss_reduction=reduction, micro_batch=micro_batch)
    x, y = next(iter(loader))
    expected = clipped_mean(plain, x, y, 0.5, 30.0 if reduction == "mean" else 1.0)
    one_step(model, optimizer, x, y, reduction)
    for name, param in plain.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(param.grad.double(), expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("micro_batch", [None, 8])
def test_dropout_masks_of_the_loss_are_those_of_the_gradient(micro_batch: int | None) -> None:
    """With weight 1 the outputs are the masked inputs, and their sum is the gradient."""
    plain: Any = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 1, bias=False), nn.Dropout(0.5), nn.Linear(1, 1, bias=False)
    )
    plain[1].requires_grad_(False)
    nn.init.ones_(plain[3].weight)
    model, optimizer, loader = private(plain, max_grad_norm=1e4, loss_reduction="sum", micro_batch=micro_batch)
    x, _ = next(iter(loader))
    output = model(x)
    output.sum().backward()
    optimizer.step()
    assert 0 < int((output == 0).sum()) < len(x)
    assert plain[3].weight.grad.item() == pytest.approx(output.sum().item(), rel=1e-3, abs=1e-2)


def test_pieces_of_one_sample_add_up() -> None:
    whole, pieces = network(), network()
    a = private(whole)
    b = private(pieces)
    one_step(a[0], a[1], *next(iter(a[2])))
    x, y = next(iter(b[2]))
    b[1].zero_grad()
    for part in (slice(0, 7), slice(7, None)):
        loss_of(b[0](x[part]), y[part]).backward()
    b[1].step()
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_noise_has_the_declared_scale() -> None:
    """Of 40·d = 9640 coordinates the mean square is outside [0.93, 1.07] in 1 of 10⁶ runs."""
    plain = network()
    model, optimizer, loader = private(plain, noise_multiplier=2.0)
    total, count = 0.0, 0
    for _ in range(10):
        for x, _ in loader:
            optimizer.zero_grad()
            (0.0 * model(x)).sum().backward()
            optimizer.step()
            for param in plain.parameters():
                assert param.grad is not None
                total += float((param.grad.double() * 30 / (2.0 * 0.5)).square().sum())
                count += param.numel()
    assert count == 40 * 243
    assert 0.93 < total / count < 1.07


def test_samples_are_poisson_at_the_exact_rate() -> None:
    """q = 4/10, not 1/⌈10/4⌉: mean 4 and variance 2.4 over 3000 samples, each within 5 standard errors."""
    sizes = []
    _, _, loader = private(network(), n=10, batch_size=4)
    assert len(loader) == 3
    for _ in range(1000):
        sizes += [len(y) for _, y in loader]
    assert abs(np.mean(sizes) - 4.0) < 5 * np.sqrt(2.4 / 3000)
    assert abs(np.var(sizes) - 2.4) < 5 * np.sqrt(2 * 2.4**2 / 3000)
    assert 0 in sizes  # an empty sample is released like any other


def test_an_empty_sample_is_a_step_of_pure_noise() -> None:
    model, optimizer, loader = private(network(), n=10, batch_size=1, noise_multiplier=1.0)
    for x, y in loader:
        one_step(model, optimizer, x, y)
        if len(y) == 0:
            break
    else:
        pytest.fail("no empty sample in ten; the seed decides")
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def loop_over(made: Any, epochs: int) -> None:
    model, optimizer, loader = made
    for _ in range(epochs):
        for x, y in loader:
            one_step(model, optimizer, x, y)


def test_epsilon_is_met_and_more_epochs_are_refused() -> None:
    model = network()
    made = make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=DataLoader(data(), batch_size=30),
        target_epsilon=2.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    loop_over(made, 2)
    assert 1.99 < made[2].privacy.epsilon() <= 2.0
    with pytest.raises(BudgetError, match="8 steps that were planned are made"):
        loop_over(made, 1)


def test_a_noise_schedule_is_part_of_the_budget() -> None:
    """Opacus 1.6 reaches ε = 2.35 here when asked for 1.0."""
    model = network()
    made = make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=1.0, epochs=3,
        data_loader=DataLoader(data(), batch_size=30), target_delta=1e-5, max_grad_norm=1.0,
        noise_schedule=lambda epoch: 0.7**epoch,
    )  # fmt: skip
    z = made[2].privacy.plan.noise_multiplier
    loop_over(made, 3)
    parts = [poisson_gaussian(rate=0.25, noise_multiplier=z * 0.7**epoch, steps=4) for epoch in range(3)]
    true = account(composed(parts), delta=1e-5, relation="add-remove")
    assert made[2].privacy.epsilon() == pytest.approx(true)
    assert 0.99 < true <= 1.0


def test_a_batch_schedule_changes_samples_and_accounting() -> None:
    model = network()
    made = make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=1.0, epochs=2,
        data_loader=DataLoader(data(), batch_size=30), target_delta=1e-5, max_grad_norm=1.0,
        batch_schedule=lambda epoch: 30 if epoch == 0 else 60,
    )  # fmt: skip
    assert [slot.sampling.rate for slot in made[2].privacy.plan.schedule.slots] == [0.25, 0.5]  # type: ignore[attr-defined]
    loop_over(made, 1)
    assert len(made[2]) == 2
    loop_over(made, 1)
    assert made[2].privacy.epsilon() <= 1.0


def test_a_fixed_noise_multiplier_stops_at_the_target() -> None:
    made = private(network(), noise_multiplier=1.5, target_epsilon=2.0, seed=None)
    steps = made[2].privacy.total
    rate: dict[str, Any] = {"rate": 0.25, "noise_multiplier": 1.5}
    assert account(poisson_gaussian(**rate, steps=steps), delta=1e-5, relation="add-remove") <= 2.0
    assert account(poisson_gaussian(**rate, steps=steps + 1), delta=1e-5, relation="add-remove") > 2.0
    with pytest.raises(BudgetError, match="planned"):
        loop_over(made, steps)
    assert made[2].privacy.epsilon() <= 2.0


def test_without_a_target_epsilon_is_told_as_it_grows() -> None:
    engine = PrivacyEngine(secure_mode=False)
    with pytest.raises(RuntimeError, match="make_private first"):
        engine.get_epsilon(1e-5)
    model = network()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.1,
        data_loader=DataLoader(data(), batch_size=30), max_grad_norm=1.0,
    )  # fmt: skip
    assert engine.get_epsilon(1e-5) == 0.0
    loop_over(made, 1)
    event = poisson_gaussian(rate=0.25, noise_multiplier=1.1, steps=4)
    assert engine.get_epsilon(1e-5) == pytest.approx(account(event, delta=1e-5, relation="add-remove"))


def test_one_broken_example_counts_as_zero(caplog: pytest.LogCaptureFixture) -> None:
    """Opacus 1.6: every weight is NaN from here on."""
    plain = network()
    model, optimizer, loader = private(plain)
    x, y = next(iter(loader))
    expected = clipped_mean(plain, x[1:], y[1:], 0.5, 30.0)
    x[0, 0, 0, 0] = float("nan")
    one_step(model, optimizer, x, y)
    for name, param in plain.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(param.grad.double(), expected[name], rtol=1e-3, atol=1e-5)
    assert caplog.text == ""  # the private log is not the program's log


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1, 6, 6), 0


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "WeightedRandomSampler": lambda: DataLoader(
        data(), batch_size=30, sampler=WeightedRandomSampler([1.0] * 120, 120)
    ),
    "RandomSampler": lambda: DataLoader(data(), batch_size=30, sampler=RandomSampler(data(), replacement=True)),
    "no length": lambda: DataLoader(Stream(), batch_size=2),
    "have no law": lambda: DataLoader(data(), batch_sampler=_Reversed(SequentialSampler(data()), 30, False)),
    "batch_size=31": lambda: DataLoader(Subset(data(), range(30)), batch_size=31),
}


class _Reversed(BatchSampler):
    """A law of its own."""


@pytest.mark.parametrize("message", LOADERS)
def test_samplers_that_cannot_be_accounted_for_are_refused(message: str) -> None:
    model = network()
    with pytest.raises(DataError, match=message):
        make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=LOADERS[message](), max_grad_norm=1.0,
        )  # fmt: skip


def test_a_shuffled_loader_becomes_poisson_or_is_accounted_without_amplification() -> None:
    settings: dict[str, Any] = {
        "noise_multiplier": 2.0, "max_grad_norm": 1.0,
        "data_loader": DataLoader(data(), batch_size=30, shuffle=True),
    }  # fmt: skip
    model = network()
    _, _, loader = make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    assert len({len(y) for _ in range(5) for _, y in loader}) > 1
    model = network()
    _, _, loader = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings, poisson_sampling=False
    )
    for epoch in (1, 2):
        seen = torch.cat([torch.as_tensor(x).flatten(1)[:, 0] for x, _ in loader])
        assert torch.equal(seen.sort().values, data().tensors[0].flatten(1)[:, 0].sort().values)  # everybody, once
        true = account(gaussian(2.0, steps=epoch), delta=1e-5, relation="add-remove")
        assert loader.privacy.epsilon() == pytest.approx(true)


def test_batch_norm_and_foreign_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\)"):
        private(model)
    good, other = network(), network()
    with pytest.raises(ValueError, match="another module"):
        make_private(
            module=good, optimizer=torch.optim.SGD(other.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(data(), batch_size=30), max_grad_norm=1.0,
        )  # fmt: skip


def test_a_sample_serves_one_step() -> None:
    model, optimizer, loader = private(network())
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(RuntimeError, match=r"no loss\.backward"):
        optimizer.step()
    one_step(model, optimizer, x, y)
    with pytest.raises(BudgetError, match="one fresh sample"):
        one_step(model, optimizer, x, y)
    optimizer.zero_grad()
    u, v = next(batches)
    loss_of(model(u), v).backward()
    loss_of(model(u), v).backward()
    with pytest.raises(BudgetError, match="contribute twice"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model(u), v).backward()
    u, v = next(batches)
    loss_of(model(u), v).backward()
    with pytest.raises(BudgetError, match="two samples"):
        optimizer.step()


def test_raw_gradients_never_reach_the_optimizer() -> None:
    plain = network()
    model, optimizer, loader = private(plain)
    x, y = next(iter(loader))
    loss_of(model(x), y).backward()
    assert all(param.grad is None for param in plain.parameters())
    plain(torch.randn(5, 1, 6, 6)).sum().backward()  # behind the private model's back
    with pytest.raises(BudgetError, match="did not pass through the private model"):
        optimizer.step()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_skipped_samples_are_spent() -> None:
    """Also those at the end: whether to step on them may have depended on them."""
    model, optimizer, loader = private(network(), noise_multiplier=1.0, seed=None)
    for number, (x, y) in enumerate(loader):
        if number == 1:
            one_step(model, optimizer, x, y)
    event = poisson_gaussian(rate=0.25, noise_multiplier=1.0, steps=4)
    assert loader.privacy.epsilon() == pytest.approx(account(event, delta=1e-5, relation="add-remove"))


def test_the_model_keeps_its_names_and_evaluates_as_before() -> None:
    plain = network()
    model, _, _ = private(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    x = torch.randn(5, 1, 6, 6)
    model.eval()
    torch.testing.assert_close(model(x), plain(x))
    model.train()
    with pytest.raises(BudgetError, match="did not come from the private loader"):
        model(input=x)
    with pytest.raises(TypeError, match="takes tensors"):
        model(object(), input=x)


def test_optimizers_and_schedulers_of_torch_work() -> None:
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer, loader = make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data(), batch_size=30, shuffle=True),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        for x, y in loader:
            one_step(model, optimizer, x, y)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0025
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loop_is_reserved_in_the_ledger_and_closed(tmp_path: Any) -> None:
    model = network()
    with pytest.raises(ValueError, match="needs the number of epochs"):
        private(model, ledger=tmp_path / "ledger.jsonl")
    made = private(model, ledger=tmp_path / "ledger.jsonl", noise_multiplier=2.0, epochs=1, account="pupils")
    spent = Ledger(tmp_path / "ledger.jsonl").spent("pupils", delta=1e-5, relation="add-remove")
    assert spent.epsilon == pytest.approx(made[2].privacy.plan.epsilon(), rel=1e-6)  # before the first step
    loop_over(made, 1)
    after = Ledger(tmp_path / "ledger.jsonl").spent("pupils", delta=1e-5, relation="add-remove")
    assert after.epsilon == pytest.approx(spent.epsilon)


@pytest.mark.filterwarnings("ignore:seed=3")
def test_a_loader_with_workers_hands_out_the_same_samples() -> None:
    def labels(workers: int) -> list[list[int]]:
        model = network()
        _, _, loader = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, seed=3,
            data_loader=DataLoader(data(), batch_size=10, num_workers=workers), max_grad_norm=1.0,
        )  # fmt: skip
        first = [y.tolist() for _, (_, y) in zip(range(3), loader, strict=False)]  # leaves batches in the queue
        return first + [y.tolist() for _, y in loader]

    assert labels(0) == labels(1)
