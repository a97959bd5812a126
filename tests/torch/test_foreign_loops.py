"""Loops of other libraries' shapes: closures, gradients read before a step, scalers, prepared loaders, streams."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError, DataError, ExhaustedError
from quietgrad.torch.loops.handle_loop import pieces_of
from quietgrad.torch.loops.pending_gradient import PendingGradient
from quietgrad.torch.networks.randomness import RecordSeeds

N, BATCH = 60, 20
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2
DATA = TensorDataset(X, Y)


def made(loader: Any = None, optimizer: Any = torch.optim.SGD, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "criterion": nn.CrossEntropyLoss(), **settings}
    return qt.make_private(
        module=model, optimizer=optimizer(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=BATCH) if loader is None else loader, **settings,
    )  # fmt: skip


def trained(
    settings: dict[str, Any], step: Callable[[Any, Any, Callable[[], Any]], Any], most: int | None = None
) -> list[Tensor]:
    """Parameters after an epoch of ``step(model, optimizer, loss)``, with fixed noise."""
    with pytest.warns(UserWarning, match="seed"):
        model, optimizer, loader, criterion = made(seed=1, **settings)
    batches = loader
    if most is not None:
        batches = qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer)
    for x, y in batches:
        optimizer.zero_grad()

        def loss(x: Any = x, y: Any = y) -> Any:
            return criterion(model(x), y)

        step(model, optimizer, loss)
    assert loader.loop.handed_out == len(loader)
    return [param.detach().clone() for param in model.parameters()]


def plain_step(model: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    loss().backward()
    optimizer.step()


def closure_step(model: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    calls = []

    def closure() -> Any:
        calls.append(1)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    assert isinstance(optimizer.step(closure), Tensor)
    assert calls == [1]


def logged_step(model: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    """The norms that a script logs before it steps are those of what is stepped on."""
    loss().backward()
    assert all(isinstance(param.grad, PendingGradient) for param in model.parameters())
    assert "released by" in repr(next(model.parameters()).grad)
    assert [tuple(param.grad.shape) for param in model.parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    norm = math.sqrt(sum(param.grad.data.norm(2).item() ** 2 for param in model.parameters()))
    assert norm > 0.0
    assert not any(isinstance(param.grad, PendingGradient) for param in model.parameters())
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(norm, rel=1e-5)
    optimizer.step()


def clipped_step(model: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    nn.utils.clip_grad_value_(model.parameters(), 5e-3)
    optimizer.step()


def scaled_and_clipped_step(model: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    nn.utils.clip_grad_value_(model.parameters(), 5e-3)
    scaler.step(optimizer)
    scaler.update()


def scaled_step(model: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.filterwarnings("ignore:a private batch")
@pytest.mark.parametrize("step", [closure_step, logged_step, scaled_step])
def test_a_step_of_another_shape_is_the_plain_step(step: Any) -> None:
    wanted, made_so = trained({}, plain_step), trained({}, step)
    for one, other in zip(wanted, made_so, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:a private batch")
@pytest.mark.parametrize(
    ("step", "whole"),
    [(plain_step, plain_step), (clipped_step, clipped_step), (closure_step, plain_step), (scaled_step, plain_step),
     (scaled_and_clipped_step, clipped_step)],
)  # fmt: skip
def test_in_pieces_of_a_sample_what_asks_for_gradients_waits_for_the_last_one(step: Any, whole: Any) -> None:
    wanted, made_so = trained({}, whole), trained({}, step, most=4)
    for one, other in zip(wanted, made_so, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_pieces_are_full_and_a_record_less_moves_few_others() -> None:
    assert [pieces_of(most, size) for most, size in ((8, 64.0), (32, 256.0), (64, 256.0))] == [12, 10, 5]
    moved = []
    for seed in range(40):
        keys = RecordSeeds(bytes([seed]) * 32, np.arange(64))
        parts = keys.dealt(12, 8)
        assert sorted(np.concatenate(parts)) == list(range(64))
        assert max(map(len, parts)) <= 8
        fewer = RecordSeeds(keys.key, np.arange(63)).dealt(12, 8)
        moved.append(sum({*one} - {63} != {*other} for one, other in zip(parts, fewer, strict=True)))
    assert np.mean(moved) < 1.5  # of 12 pieces
    assert max(map(len, RecordSeeds(bytes(32), np.arange(100)).dealt(12, 8))) == 9  # four deviations and more


def test_what_is_read_before_a_step_is_one_release_and_can_be_clipped() -> None:
    model, optimizer, loader, criterion = made()
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        criterion(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        length = math.sqrt(sum(float(param.grad.square().sum()) for param in model.parameters()))
        assert length == pytest.approx(1e-3, rel=1e-2)
        optimizer.step()
    assert loader.privacy.releases == {"stretch-0": 3}
    assert loader.privacy.condition is None


def test_a_gradient_that_waits_is_forgotten_by_zero_grad_and_added_to_an_earlier_one() -> None:
    model, optimizer, loader, criterion = made()
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is None for param in model.parameters())
    criterion(model(x), y).backward()
    first = [param.grad.clone() for param in model.parameters()]
    x, y = next(batches)
    criterion(model(x), y).backward()
    both = [param.grad.clone() for param in model.parameters()]
    assert not any(torch.equal(one, two) for one, two in zip(first, both, strict=True))
    optimizer.step()
    assert loader.privacy.releases == {"stretch-0": 2}


def test_a_penalty_is_noticed_before_and_after_a_gradient_is_read() -> None:
    for read in (False, True):
        model, optimizer, loader, criterion = made()
        x, y = next(iter(loader))
        criterion(model(x), y).backward()
        if read:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert loader.privacy.condition is None
        penalty = sum(param.square().sum() for param in model.parameters())
        if not read:
            penalty.backward()
        with pytest.warns(UserWarning, match="conditional"):
            penalty.backward() if read else optimizer.step()
        assert loader.privacy.condition is not None


def test_within_pieces_of_a_sample_there_is_no_gradient_to_read() -> None:
    model, optimizer, loader, criterion = made()
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as pieces:
        batches = iter(pieces)
        x, y = next(batches)
        criterion(model(x), y).backward()
        with pytest.raises(BudgetError, match="before the last piece of a sample there is none yet"):
            model[0].weight.grad.norm()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
        assert not loader.loop._pieces


@pytest.mark.filterwarnings("ignore:a private batch")
def test_a_scale_that_cannot_be_undone_is_refused() -> None:
    model, optimizer, loader, criterion = made(clipping="automatic")
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(loader))
    scaler.scale(criterion(model(x), y)).backward()
    with pytest.raises(ValueError, match="GradScaler: a scale of the loss cannot be undone"):
        scaler.unscale_(optimizer)


def test_an_optimizer_that_evaluates_often_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS evaluates its closure many times"):
        made(optimizer=torch.optim.LBFGS)


# --- libraries ---


@pytest.mark.parametrize("prepared", ["first", "last"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_accelerate_may_prepare_before_or_after(prepared: str, shuffle: bool) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs quietgrad[hf]")
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(DATA, batch_size=BATCH, shuffle=shuffle)
    if prepared == "first":
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model, optimizer, loader, criterion = qt.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    assert loader.batch_size == BATCH
    if prepared == "last":
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = [param.detach().clone() for param in model.parameters()]
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(criterion(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert loader.privacy.condition is None
    assert loader.loop.handed_out == 3
    assert all(bool((one != two).any()) for one, two in zip(before, model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_trains_by_its_own_loop(automatic: bool) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    model, optimizer, loader, criterion = made(epochs=2)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            loss = criterion(self.model(x), y)
            if automatic:
                return loss
            steps = self.optimizers()
            steps.zero_grad()
            self.manual_backward(loss)
            return steps.step()

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0 if automatic else None,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    assert loader.privacy.condition is None
    assert loader.loop.handed_out == 6


def test_a_library_may_divide_a_loss_by_one_and_keep_it_for_later() -> None:
    """What Lightning and accelerate do to a loss; only reading the copy makes ε conditional."""
    model, optimizer, loader, criterion = made()
    x, y = next(iter(loader))
    loss = criterion(model(x), y) / 1
    shown = loss.detach().clone()
    (1.0 * loss).backward()
    optimizer.step()
    assert loader.privacy.condition is None
    with pytest.warns(UserWarning, match="conditional"):
        assert math.isfinite(float(shown))
    assert loader.privacy.condition is not None


# --- loaders -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[place] for place in range(N)])


class SizedStream(Stream):
    def __len__(self) -> int:
        return N


def _epoch(private: Any) -> Any:
    model, optimizer, loader, criterion = private
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return loader


def test_a_sampler_of_a_subset_is_the_subset() -> None:
    loader = _epoch(made(DataLoader(DATA, batch_size=10, sampler=SubsetRandomSampler(range(0, 60, 2)))))
    assert loader.loop.plan.n_public == 30
    assert len(loader) == 3
    with pytest.raises(DataError, match="given twice"):
        made(DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([1, 1, 2])))
    with pytest.raises(ValueError, match="person"):
        made(DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([1, 2])), person=[0] * N)


def test_a_batch_sampler_in_the_usual_form_is_its_size() -> None:
    given = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 15, drop_last=False))
    assert _epoch(made(given)).batch_size == 15


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_are_not_in_the_way(workers: int) -> None:
    given = DataLoader(DATA, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    assert _epoch(made(given)).loop.handed_out == 3


def test_a_stream_of_public_length_is_read_once() -> None:
    with pytest.raises(DataError, match=r"Say its public length \(n_public=\)"):
        made(DataLoader(Stream(), batch_size=BATCH))
    loader = _epoch(made(DataLoader(SizedStream(), batch_size=BATCH), epochs=1, sampling="single-pass"))
    assert loader.loop.plan.n_public == N
    assert "Parallel" in repr(loader.loop.plan.event)
    for relation, read in (("add-remove", N), ("replace-one", 40)):
        seen = made(DataLoader(Stream(), batch_size=BATCH), n_public=40, relation=relation)[2].loop
        assert (seen.plan.n_public, len(seen._examples)) == (40, read)
    loop = qt.PrivateLoop(
        nn.Linear(3, 2), nn.CrossEntropyLoss(), SizedStream(), batch_size=10, steps=6, max_grad_norm=1.0,
        noise_multiplier=1.0, sampling="single-pass",
    )  # fmt: skip
    assert loop.plan.n_public == N


def test_a_single_pass_is_refused_a_second_time() -> None:
    with pytest.raises(ValueError, match="every record is used once"):
        made(sampling="single-pass", epochs=2)
    loader = made(sampling="single-pass")[2]
    assert sorted(place for _ in loader for place in loader.loop.sample.keys.indices) != []
    with pytest.raises(ExhaustedError):
        next(iter(loader))


def test_a_distributed_sampler_for_other_processes_is_refused() -> None:
    sampler: Any = DistributedSampler(DATA, num_replicas=2, rank=0)
    with pytest.raises(DataError, match="to 2 processes, and there are 1"):
        made(DataLoader(DATA, batch_size=10, sampler=sampler))
    one: Any = DistributedSampler(DATA, num_replicas=1, rank=0)
    assert _epoch(made(DataLoader(DATA, batch_size=10, sampler=one))).batch_size == 10


# --- without noise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_loop_without_noise_is_not_private_and_says_so(epochs: int | None) -> None:
    with pytest.warns(UserWarning, match="noise_multiplier=0: no noise is added. The loop is not private"):
        private = made(noise_multiplier=0.0, epochs=epochs)
    loader = _epoch(private)
    stated = loader.privacy
    assert str(stated) == "NOT PRIVATE"
    assert not stated.is_private
    assert stated.epsilon == loader.loop.epsilon(1e-5) == math.inf
    assert f"{stated.epsilon:.2f}" == "inf"
    assert dict(stated.facts())["privacy"] == "NOT PRIVATE"
    with pytest.raises(ValueError, match="is not kept"):
        qt.PrivateLoop(
            nn.Linear(3, 2), nn.CrossEntropyLoss(), (X, Y), batch_size=10, steps=2, max_grad_norm=1.0,
            noise_multiplier=0.0, folder="nowhere",
        )  # fmt: skip


def test_a_loop_without_noise_takes_the_exact_clipped_mean() -> None:
    model, x = nn.Linear(3, 2), X[:20]
    with pytest.warns(UserWarning, match="no noise"):
        loop = qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), (x, Y[:20]), batch_size=20, steps=1, max_grad_norm=0.1,
            noise_multiplier=0.0, sampling="turns",
        )  # fmt: skip
    (batch,) = loop
    sums, _ = qt.clipped_gradient_sum(model, nn.CrossEntropyLoss(), (x, Y[:20]), 0.1)
    loop.backward(batch)
    torch.testing.assert_close(model.weight.grad, sums["weight"] / 20)


# --- Opacus' arguments -------------------------------------------------------------------------------------------

ALL = {  # Opacus 1.6: make_private, make_private_with_epsilon, and what adaptive clipping adds
    "module", "optimizer", "criterion", "data_loader", "noise_multiplier", "max_grad_norm", "batch_first",
    "loss_reduction", "poisson_sampling", "clipping", "noise_generator", "grad_sample_mode", "wrap_model",
    "rand_on_empty", "target_epsilon", "target_delta", "epochs", "target_unclipped_quantile",
    "clipbound_learning_rate", "max_clipbound", "min_clipbound", "unclipped_num_std",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "batch_first": False, "noise_generator": torch.Generator(), "rand_on_empty": True,
    "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.1, "max_clipbound": 1.0, "min_clipbound": 0.1,
    "unclipped_num_std": 1.0, "clipping": "adaptive", "grad_sample_mode": "no_op",
}  # fmt: skip
HONOURED: dict[str, Any] = {
    "criterion": nn.CrossEntropyLoss(), "batch_first": True, "loss_reduction": "sum", "poisson_sampling": False,
    "clipping": "per_layer", "noise_generator": None, "grad_sample_mode": "functorch", "wrap_model": False,
    "rand_on_empty": False, "noise_multiplier": 2.0, "max_grad_norm": 0.5, "epochs": 3,
}  # fmt: skip


def engine_made(**settings: Any) -> Any:
    model = nn.Linear(3, 2)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **settings}
    return qt.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=BATCH), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_opacus_that_has_no_place_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        engine_made(**{name: REFUSED[name]})
    with pytest.raises(ValueError, match=name):
        made(**{name: REFUSED[name]})


def test_the_verbs_take_what_the_engine_takes() -> None:
    private = made(grad_sample_mode="ghost", noise_generator=None, batch_first=True, rand_on_empty=False)
    assert isinstance(private[2], nn.Module)  # the criterion, in Opacus' order
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        made(foo=1)
    with pytest.raises(TypeError, match="data_loader: must be a torch DataLoader, not TensorDataset"):
        made(loader=DATA)
    with pytest.raises(TypeError, match="data_loader: must be a torch DataLoader, not list"):
        made(loader=[(X, Y)])
    with pytest.raises(TypeError, match=r"must be a torch module \(nn\.Module\), not function"):
        qt.make_private(
            module=cast(Any, lambda x: x), optimizer=torch.optim.SGD([nn.Parameter(X)], lr=0.1), max_grad_norm=1.0,
            data_loader=DataLoader(DATA, batch_size=BATCH), noise_multiplier=1.0,
        )  # fmt: skip


@pytest.mark.parametrize("wrap", [True, False])
def test_opacus_names_of_model_loader_and_accountant(wrap: bool) -> None:
    engine = qt.PrivacyEngine("prv")
    plain = nn.Linear(3, 2)
    plain.bias.requires_grad_(False)
    model, optimizer, loader, criterion = engine.make_private(
        module=plain, optimizer=torch.optim.SGD([plain.weight], lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(DATA, batch_size=BATCH, shuffle=True, num_workers=0, drop_last=True),
        noise_multiplier=1.5, max_grad_norm=1.0, wrap_model=wrap,
    )  # fmt: skip
    assert list(model.trainable_parameters()) == [plain.weight]
    assert dict(model.trainable_named_parameters()).keys() == {"weight"}
    assert model.to_standard_module() is plain
    model.remove_hooks()
    assert len(engine.accountant) == 0
    assert engine.accountant.history == []
    _epoch((model, optimizer, loader, criterion))
    assert engine.accountant.history == [(1.5, BATCH / N, 3)]
    assert len(engine.accountant) == 3
    assert engine.accountant.mechanism() == "prv"
    with pytest.raises(ValueError, match="no hook is needed"):
        optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=0.1))
    for call in (engine.accountant.step, engine.accountant.state_dict, optimizer.scale_grad):
        with pytest.raises(ValueError, match=": "):
            call(1)
    assert (loader.num_workers, loader.drop_last, loader.sample_rate) == (0, True, BATCH / N)
    assert loader.collate_fn is loader.original.collate_fn
    assert loader.sampler is loader.original.sampler
    assert loader.batch_sampler is loader.original.batch_sampler
    with pytest.raises(AttributeError, match="nothing_known"):
        _ = loader.nothing_known
    with pytest.raises(AttributeError, match="nothing_known"):
        _ = model.nothing_known
    assert (optimizer.loss_reduction, optimizer.secure_mode) == ("mean", True)


def test_a_batch_of_a_private_loop_says_what_it_is_for() -> None:
    model = nn.Linear(3, 2)
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), DATA, batch_size=BATCH, steps=1, max_grad_norm=1.0, noise_multiplier=1.0
    )
    (batch,) = loop
    with pytest.raises(BudgetError, match="cannot be unpacked"):
        tuple(batch)
    with pytest.raises(BudgetError, match="cannot be unpacked"):
        batch[0]
    loop.backward(batch.to("cpu"))


def test_all_arguments_of_opacus_are_honoured_or_refused_and_stand_in_the_table() -> None:
    from pathlib import Path

    engine_made(**{name: value for name, value in HONOURED.items() if name != "criterion"})
    assert len(engine_made(criterion=HONOURED["criterion"])) == 4
    given = {"module", "optimizer", "data_loader", "target_epsilon", "target_delta"}
    assert {*REFUSED, *HONOURED, *given} == ALL
    page = (Path(__file__).parents[2] / "docs" / "opacus-arguments.md").read_text(encoding="utf-8")
    assert {name for name in ALL if f"| `{name}" in page} == ALL


def test_opacus_methods_that_have_no_place_end_in_a_sentence() -> None:
    optimizer = engine_made()[1]
    calls: tuple[tuple[Any, str], ...] = (
        (lambda: optimizer.attach_step_hook(print), "register_step_post_hook"),
        (lambda: optimizer.signal_skip_step(), "BatchMemoryManager"),
        (lambda: optimizer.add_noise(), "optimizer.step"),
        (lambda: optimizer.pre_step(), "optimizer.step"),
        (lambda: optimizer.grad_samples, "never kept"),
        (lambda: qt.PrivacyEngine().save_checkpoint(path="x"), "torch.save"),
        (lambda: qt.PrivacyEngine().load_checkpoint(path="x"), "load_state_dict"),
    )
    for call, words in calls:
        with pytest.raises(ValueError, match=words):
            call()
    assert optimizer.original_optimizer is optimizer


@pytest.mark.filterwarnings("ignore:seed=7")
@pytest.mark.parametrize("with_criterion", [True, False])
def test_a_module_made_private_itself_trains_as_one_in_a_wrapper(with_criterion: bool) -> None:
    def trained(wrap: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2))
        own: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()} if with_criterion else {}
        made = qt.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=1.0, seed=7,
            data_loader=DataLoader(DATA, batch_size=BATCH), max_grad_norm=1.0, wrap_model=wrap, epochs=1, **own,
        )  # fmt: skip
        private = made[0] if wrap else model
        criterion: Any = made[3] if with_criterion else nn.functional.cross_entropy
        for x, y in made[2]:
            made[1].zero_grad()
            criterion(private(x), y).backward()
            made[1].step()
        assert (made[2].privacy.condition is None) == with_criterion
        return model, private, made

    alone, _, _ = trained(True)
    model, private, made = trained(False)
    assert private is model is made[0]
    assert isinstance(model, nn.Sequential)
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(own, other)
    model.zero_grad()
    model.eval()
    x = torch.randn(2, 3, requires_grad=True)
    model(x).sum().backward()  # to the input, and to no parameter
    assert x.grad is not None
    assert all(param.grad is None for param in model.parameters())
    assert type(copy.deepcopy(model)) is nn.Sequential
    for each in (model, trained(True)[1]):
        assert type(pickle.loads(pickle.dumps(each))) is nn.Sequential
        kept = io.BytesIO()
        torch.save(each, kept)
        kept.seek(0)
        assert type(torch.load(kept, weights_only=False)) is nn.Sequential
        assert type(copy.copy(each)) is nn.Sequential
    made[0].cleanup()
    assert type(model) is nn.Sequential
    with pytest.raises(RuntimeError, match=r"no loss\.backward"):
        made[1].step()


def test_a_module_in_a_wrapper_of_torch_is_not_made_private_itself() -> None:
    model = qt.DifferentiallyPrivateDistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="wrap_model=False: the module is in Diff"):
        qt.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(DATA, batch_size=BATCH), max_grad_norm=1.0, wrap_model=False,
        )  # fmt: skip
