"""Own loops: whose row is whose, one sample per step, all loops of an engine, and what is said of seeded ones."""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from quietgrad.errors import BudgetError, DataError
from quietgrad.privacy.accounting import account
from quietgrad.privacy.events import composed, poisson_gaussian
from quietgrad.torch.opacus_verbs import make_private
from quietgrad.torch.privacy_engine import PrivacyEngine
from quietgrad.torch.rows import Owners, Rows, owners_of

N = 60


def data() -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def made(model: nn.Module | None = None, dataset: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = model or nn.Linear(4, 2)
    loader: dict[str, Any] = {"batch_size": 20, **settings.pop("loader", {})}
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | settings
    return make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset or data(), **loader), **settings,
    )  # fmt: skip


def loss_of(output: Tensor, y: Tensor) -> Any:
    return nn.functional.cross_entropy(output, y)


def marked(places: list[int]) -> Tensor:
    values = torch.arange(12.0).view(4, 3)[places] if places else torch.zeros(0, 3)
    return Rows.mark(values, Owners(0, torch.tensor(places)))


def cleaned(x: Tensor) -> Tensor:
    x[0, 0] = 0.0
    return x


KEPT: dict[str, tuple[Callable[[Tensor], Any], list[int]]] = {
    "moved": (lambda x: x.to(torch.float64).contiguous(), [0, 1, 2, 3]),
    "scaled": (lambda x: (x - 1.5) / torch.tensor([1.0, 2.0, 3.0]), [0, 1, 2, 3]),
    "in place": (lambda x: x.sub_(0.5).div_(2.0), [0, 1, 2, 3]),
    "one entry": (cleaned, [0, 1, 2, 3]),
    "piece": (lambda x: x[1:3], [1, 2]),
    "chosen": (lambda x: x[torch.tensor([3, 1])], [3, 1]),
    "masked": (lambda x: x[torch.tensor([True, False, False, True])], [0, 3]),
    "columns": (lambda x: x[:, 1:], [0, 1, 2, 3]),
    "flipped": (lambda x: x.flip(0), [3, 2, 1, 0]),
    "split": (lambda x: torch.split(x, 3)[1], [3]),
    "joined": (lambda x: torch.cat([x[2:], x[:1]]), [2, 3, 0]),
    "wider": (lambda x: torch.cat([x, torch.ones(4, 2)], 1), [0, 1, 2, 3]),
    "reshaped": (lambda x: x.view(4, 3, 1).permute(0, 2, 1).flatten(1), [0, 1, 2, 3]),
    "cleaned": (lambda x: torch.where(x > 2, x, torch.zeros(())).clamp(max=5), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_keep_their_owners(name: str) -> None:
    change, places = KEPT[name]
    owners = owners_of((change(marked([0, 1, 2, 3])),))
    assert isinstance(owners, Owners)
    assert owners.places.tolist() == places


def overwritten(x: Tensor) -> Tensor:
    x[0] = x[1]
    return x


def through_a_view(x: Tensor) -> Tensor:
    x.view(-1)[:3].copy_(x[1])
    return x


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "mixup": lambda x: 0.5 * x + 0.5 * x[torch.tensor([1, 2, 3, 0])],
    "centred": lambda x: x - x.mean(0),
    "one for all": lambda x: x + x[0],
    "broadcast": lambda x: x[:, :1] + x[:, 0],
    "product": lambda x: x @ x.T @ x,
    "transposed": lambda x: x.T,
    "reshaped": lambda x: x.reshape(3, 4),
    "noise of a public generator": lambda x: x + torch.randn_like(x),
    "overwritten": overwritten,
    "overwritten through a view": through_a_view,
    "sorted": lambda x: x.sort(0).values,
    "rows of nobody": lambda x: torch.cat([x, torch.zeros(1, 3)]),
    "new data": lambda x: x.data,
    "other tensor": lambda x: torch.zeros(4, 3),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_rows_are_known_as_such(name: str) -> None:
    assert isinstance(owners_of((MIXED[name](marked([0, 1, 2, 3])),)), str)


def test_rows_of_different_records_are_no_arguments_of_one_model() -> None:
    x = marked([0, 1, 2, 3])
    assert isinstance(owners_of((x, x * 2)), Owners)
    assert isinstance(owners_of((x, x.flip(0))), str)


def test_a_piece_that_is_fed_twice_is_refused() -> None:
    """Two halves have as many rows as the sample: only their identity tells that they are the same half."""
    model, optimizer, loader = made()
    x, y = next(iter(loader))
    half = slice(0, len(x) // 2)
    for _ in range(2):
        loss_of(model(x[half]), y[half]).backward()
    with pytest.raises(BudgetError, match="twice"):
        optimizer.step()
    optimizer.zero_grad()
    for part in (half, slice(len(x) // 2, None)):
        loss_of(model(x[part]), y[part]).backward()
    optimizer.step()


def test_mixup_in_the_loop_is_refused() -> None:
    model, _, loader = made()
    x, _ = next(iter(loader))
    with pytest.raises(BudgetError, match="mixed"):
        model(0.7 * x + 0.3 * x.flip(0))
    with pytest.raises(BudgetError, match="did not come from the private loader"):
        model(torch.randn(5, 4))
    model.eval()
    assert model(torch.randn(5, 4)).shape == (5, 2)


def test_a_newer_iterator_ends_the_older() -> None:
    """Both would hand out one sample, which is accounted once."""
    model, optimizer, loader = made()
    old, new = iter(loader), iter(loader)
    x, _ = next(old)
    u, v = next(new)
    with pytest.raises(BudgetError, match="newer one"):
        next(old)
    with pytest.raises(BudgetError, match="another sample"):
        model(x)
    loss_of(model(u), v).backward()
    optimizer.step()
    assert loader.privacy.handed_out == 2
    event = poisson_gaussian(rate=1 / 3, noise_multiplier=1.0, steps=2)
    assert loader.privacy.epsilon() == pytest.approx(account(event, delta=1e-5, relation="add-remove"))


def test_samples_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from quietgrad.sampling.samplers import SubsetSampler

    drawn: list[int] = []
    batch = SubsetSampler.batch

    def noted(self: Any, i: int) -> Any:
        drawn.append(i)
        return batch(self, i)

    monkeypatch.setattr(SubsetSampler, "batch", noted)
    model, optimizer, loader = made()
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    assert drawn == [0, 1, 2]


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.full((20, 4), float(i)), i % 2


def time_first(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples], 1), torch.tensor([y for _, y in samples])


def test_batches_that_are_not_batch_first_are_refused() -> None:
    with pytest.raises(DataError, match="batch_first"):
        made(nn.LSTM(4, 2), Sequences(), loader={"collate_fn": time_first})

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x.transpose(0, 1))
            return output

    model, _, loader = made(TimeFirst(), Sequences())
    x, _ = next(iter(loader))
    with pytest.raises(ValueError, match="examples first"):
        model(x)


def test_an_engine_counts_all_its_loops() -> None:
    engine = PrivacyEngine()
    parts: list[Any] = []
    for noise, epochs in ((1.0, 2), (2.0, 1)):
        model = nn.Linear(4, 2)
        _, _, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=noise,
            data_loader=DataLoader(data(), batch_size=20), max_grad_norm=1.0,
        )  # fmt: skip
        before = engine.get_epsilon(1e-5)
        if parts:
            assert before == pytest.approx(account(composed(parts), delta=1e-5, relation="add-remove"))
        for _ in range(epochs):
            for _ in loader:  # seen, stepped on or not
                pass
        parts.append(poisson_gaussian(rate=1 / 3, noise_multiplier=noise, steps=3 * epochs))
    assert engine.get_epsilon(1e-5) == pytest.approx(account(composed(parts), delta=1e-5, relation="add-remove"))
    model = nn.Linear(4, 2)
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(data(), batch_size=20), max_grad_norm=1.0, relation="replace-one",
    )  # fmt: skip
    with pytest.raises(ValueError, match="different relations"):
        engine.get_epsilon(1e-5)


def test_a_seeded_loop_is_not_private_and_says_so() -> None:
    with pytest.warns(UserWarning, match="not private"):
        _, _, loader = made(seed=1)
    next(iter(loader))
    assert not loader.privacy.is_private
    assert loader.privacy.epsilon() == math.inf
    assert str(loader.privacy).startswith("NOT PRIVATE")
    engine = PrivacyEngine()
    model = nn.Linear(4, 2)
    with pytest.warns(UserWarning, match="not private"):
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, seed=1,
            data_loader=DataLoader(data(), batch_size=20), max_grad_norm=1.0,
        )  # fmt: skip
    assert engine.get_epsilon(1e-5) == math.inf
    assert str(made()[2].privacy).startswith("(0, 1e-05)-DP, add-remove")


def test_parameters_that_changed_afterwards_are_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    private, _, loader = made(model)
    x, _ = next(iter(loader))
    model[0].requires_grad_(True)
    with pytest.raises(BudgetError, match=r"'0\.bias' was frozen or unfrozen"):
        private(x)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="assign"):
        private.load_state_dict(model.state_dict(), assign=True)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(BudgetError, match="replaced"):
        private(x)


def test_an_epoch_is_as_long_as_the_loaders() -> None:
    assert len(made(loader={"batch_size": 25})[2]) == 3
    assert len(made(loader={"batch_size": 25, "drop_last": True})[2]) == 2


def test_a_frozen_batch_norm_may_stay_and_a_training_one_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    private, optimizer, loader = made(model)
    batches = iter(loader)
    x, y = next(batches)
    loss_of(private(x), y).backward()
    optimizer.step()
    private.train()
    x, y = next(batches)
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\)"):
        private(x)


class Jittered(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)]) + torch.rand(1), 0


@pytest.mark.filterwarnings("ignore:seed=5")
def test_augmentation_is_keyed_by_record_with_and_without_workers() -> None:
    def batches(workers: int, torch_seed: int) -> list[list[float]]:
        _, _, loader = made(nn.Linear(1, 2), Jittered(), seed=5, loader={"num_workers": workers})
        torch.manual_seed(torch_seed)
        return [x.flatten().tolist() for x, _ in loader]

    assert batches(0, 1) == batches(0, 2) == batches(1, 3)


def test_parameters_that_join_the_optimizer_later_are_refused() -> None:
    model, optimizer, loader = made()
    x, y = next(iter(loader))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 2))]})
    loss_of(model(x), y).backward()
    with pytest.raises(ValueError, match=r"0 of its group 1, of shape \(3, 2\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    del optimizer.param_groups[1]
    optimizer.step()  # nothing was lost


def test_no_other_parameter_meets_the_records() -> None:
    """A head behind the model, a learnt loss, the module itself: another optimizer would train them, noiseless."""
    module, head = nn.Linear(4, 2), nn.Linear(2, 2)
    model, optimizer, loader = made(module)
    x, y = next(iter(loader))
    temperature = torch.ones((), requires_grad=True)
    uses: list[Callable[[], Any]] = [
        lambda: head(model(x)), lambda: model(x) * temperature, lambda: module(x), lambda: x[:, :2] @ head.weight,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(BudgetError, match="a parameter meets"):
            use()
    with torch.no_grad():
        head(model(x))
    head.requires_grad_(False)
    loss_of(head(model(x)), y).backward()
    optimizer.step()


def test_evaluation_on_records_gives_parameters_no_gradient() -> None:
    model, _, loader = made()
    x, y = next(iter(loader))
    model.eval()
    with pytest.raises(BudgetError, match="evaluation mode"):
        loss_of(model(x), y).backward()
    assert math.isfinite(loss_of(model(x), y).item())
    loss_of(model(x.requires_grad_()), y).backward()  # an attack on the inputs may be computed
    assert x.grad is not None
    assert all(param.grad is None for param in model.parameters())


def copied(x: Tensor) -> Tensor:
    mean = torch.zeros(4)
    mean.copy_(x.mean(0))
    return x - mean


def stored(x: Tensor) -> Tensor:
    mean = torch.zeros(1)
    mean[0] = x.mean()
    return x - mean


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: (x - x.mean().item()) / x.std().item(),
    "float": lambda x: x / float(x.abs().max()),
    "if": lambda x: x / 255 if x.max() > 1 else x * 1.0,
    "list": lambda x: x - sum(x[:, 0].tolist()),
    "numpy": lambda x: x - float(x.numpy().mean()),
    "array": lambda x: x / math.sqrt(x.square().mean()),
    "copied": copied,
    "stored": stored,
}


@pytest.mark.parametrize("name", READ)
def test_batch_statistics_by_way_of_numbers_are_refused(name: str) -> None:
    model, optimizer, loader = made()
    batches = iter(loader)
    x, _ = next(batches)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            changed = READ[name](x)
        with pytest.raises(BudgetError, match=r"numbers were made|that were mixed"):
            model(changed)
    u, v = next(batches)
    loss_of(model(u), v).backward()
    optimizer.step()


def test_a_slice_that_depends_on_records_mixes_them() -> None:
    x = marked([0, 1, 2, 3])
    assert isinstance(owners_of((x[:, : x[:, 0].argmax()],)), str)


def test_losses_and_accuracies_may_be_looked_at() -> None:
    model, optimizer, loader = made()
    hits = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        half = len(x) // 2
        for part in (slice(0, half), slice(half, None)):
            output = model(x[part])
            loss = loss_of(output, y[part])
            loss.backward()
            assert f"{loss:.3f}" == f"{loss.item():.3f}"
            right = output.detach().argmax(1) == y[part]
            assert 0 <= right.sum().item() <= len(right)
            hits.add_(right.sum())
        optimizer.step()
        y.tolist()
        copy.deepcopy(output.detach())


class Named(NamedTuple):
    logits: Tensor


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    hidden: Tensor | None = None


class Mapped(OrderedDict[str, Tensor]):
    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Attributes(dict[str, Tensor]):
    def __init__(self, **items: Tensor) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Answering(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 2), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(logits=self.layer(x))


@pytest.mark.parametrize("micro_batch", [None, 7])
@pytest.mark.parametrize("kind", [Named, Answer, Mapped, Attributes, dict])
def test_outputs_keep_their_type(kind: Any, micro_batch: int | None) -> None:
    model, optimizer, loader = made(Answering(kind), micro_batch=micro_batch)
    x, y = next(iter(loader))
    output = model(x)
    assert type(output) is kind
    loss_of(output["logits"] if kind is dict else output.logits, y).backward()
    optimizer.step()


def test_autocast_is_refused_in_the_loop() -> None:
    model, optimizer, loader = made()
    x, y = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        model(x)
    loss_of(model(x), y).backward()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        optimizer.step()
    optimizer.step()


def test_inputs_of_another_type_are_told() -> None:
    x = torch.arange(4 * N).view(N, 4)
    model, _, loader = made(dataset=TensorDataset(x, x[:, 0] % 2))
    with pytest.raises(DataError, match="inputs are int64 and the module computes with float32"):
        model(next(iter(loader))[0])


def test_sparse_embeddings_are_trained_densely() -> None:
    words = torch.arange(2 * N).view(N, 2) % 5
    model: Any = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    private, optimizer, loader = made(model, TensorDataset(words, words[:, 0] % 2))
    x, y = next(iter(loader))
    loss_of(private(x), y).backward()
    optimizer.step()
    assert not model[0].weight.grad.is_sparse
    with pytest.raises(ValueError, match="SparseAdam"):
        make_private(
            module=model, optimizer=torch.optim.SparseAdam(model.parameters()), noise_multiplier=1.0,
            data_loader=DataLoader(data(), batch_size=20), max_grad_norm=1.0,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of newer Pythons
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("drawn_before", [False, True])
def test_a_forked_loop_releases_nothing(drawn_before: bool) -> None:
    """Two processes would add one noise to two sums, and their difference has none."""
    model, optimizer, loader = made()
    batches = iter(loader)
    sample = next(batches) if drawn_before else None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            x, y = sample or next(batches)
            loss_of(model(x), y).backward()
            optimizer.step()
        except BudgetError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x, y = sample or next(batches)
    loss_of(model(x), y).backward()
    optimizer.step()
