"""Reading records: row k is record k's alone, its random numbers its own, and a person is one record."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from quietgrad.errors import DataError
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.torch import PrivacyEngine

LOSS = nn.CrossEntropyLoss(reduction="none")
N = 60
KEPT = np.random.default_rng(0)


class Table(Dataset[Any]):
    """(features, class, length)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, 6, generator=generator)
        self.lengths = torch.randint(1, 40, (N,), generator=generator).tolist()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.x[i], i % 2, self.lengths[i]


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


def sometimes_mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = stacked(samples)
    return (x + x[torch.randperm(len(x))] if torch.rand(()) < 0.01 else x), y


def in_place_sort(samples: list[Any]) -> tuple[Tensor, Tensor]:
    samples.sort(key=lambda sample: sample[2])
    return stacked(samples)


def own_coin(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = stacked(samples)
    return (x + x.flip(0) if KEPT.random() < 0.01 else x), y


def arrays_that_mix(samples: list[Any]) -> tuple[Any, Any]:
    x, y = stacked(samples)
    return (x + x.roll(1, 0)).numpy(), y.numpy()


def mixes_large_batches(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = stacked(samples)
    return (x + x.roll(1, 0) if 48 < len(x) < N else x), y


def prepared(data: Any, collate: Any = None, module: nn.Module | None = None) -> Any:
    return ModuleObjective(module or nn.Linear(6, 2), LOSS, collate_fn=collate).prepare(data)


def private(data: Any, collate: Any = None) -> Any:
    model = nn.Linear(6, 2)
    loader = DataLoader(data, batch_size=len(data) * 11 // 12, collate_fn=collate)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )[2]


@pytest.mark.parametrize("door", [prepared, private])
@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (sometimes_mixup, "collate_fn draws random numbers"),
        (in_place_sort, "another order"),
        (arrays_that_mix, "other records of its batch"),
        (own_coin, r"Generator of its own \(at KEPT\)"),
    ],
)
def test_a_collate_function_neither_draws_nor_sorts(door: Callable[..., Any], collate: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        door(Table(), collate)
    door(Table(), stacked)


def test_a_collate_function_is_watched_in_every_call() -> None:
    records = prepared(Table(), mixes_large_batches)
    with pytest.raises(DataError, match="other records of its batch"):
        records.read(RecordKeys(bytes(32), np.arange(N - 1)))
    batches = chain.from_iterable(private(Table(), mixes_large_batches) for _ in range(2))
    with pytest.raises(DataError, match="other records of its batch"):
        list(batches)  # 4 samples of about 55; none of 49 to 59 with chance 1e-8


class Flip:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, x: Tensor) -> Tensor:
        draw = getattr(self.generator, "random", None)
        return x.flip(0) if draw is not None and draw() < 1e-6 else x


class Transformed(Table):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.transforms: list[Any] = [nn.Identity(), Flip(generator)]

    def __getitem__(self, i: int) -> Any:
        x, y, _ = super().__getitem__(i)
        for transform in self.transforms:
            x = transform(x)
        return x, y


GENERATORS = [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
def test_generators_that_are_kept_are_refused_however_seldom_they_are_used(generator: Any) -> None:
    said = type(generator).__name__ + " of its own"
    for door in (prepared, private):
        with pytest.raises(DataError, match=rf"the data set.*{said} \(at .*transforms\[\.\.\.\]\.generator\)"):
            door(Subset(Transformed(generator), range(50)))
    model = nn.Sequential(nn.Linear(6, 2))
    model[0].coin = Flip(generator)  # type: ignore[assignment]
    with pytest.raises(DataError, match=rf"the model holds.*{said} \(at 0\.coin\.generator\)"):
        prepared(Transformed(None), module=model)
    with pytest.raises(DataError, match="the loss holds"):
        ModuleObjective(nn.Linear(6, 2), lambda output, y: LOSS(Flip(generator)(output), y))
    prepared(Transformed(random))  # the module, whose generator is seeded for each record


class Stateful(Transformed):
    """A coin that no scan can see: a hash of how often records were read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reads = 0

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        x, y = super().__getitem__(i)
        return (-x if self.reads % 7 == 0 else x), y


def test_a_state_that_shows_now_and_then_is_found() -> None:
    with pytest.raises(DataError, match="keeps a state"):
        prepared(Stateful())


class Mosaic(Transformed):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__(None)
        self.x = kind(self.x)

    def __getitem__(self, i: int) -> Any:
        other = random.randrange(N) if random.random() < 0.3 else i
        return torch.as_tensor(self.x[i]) + torch.as_tensor(self.x[other]), i % 2


@pytest.mark.parametrize("kind", [Tensor.clone, Tensor.numpy, list], ids=["tensor", "array", "list"])
def test_a_record_that_is_read_from_others_too_is_refused_where_it_is_seen(kind: Callable[[Tensor], Any]) -> None:
    data = Mosaic(kind)
    x = data.x
    for door in (prepared, private):
        with pytest.raises(DataError, match="several rows of its 'x'"):
            door(data)
    assert data.x is x


def test_a_record_that_is_named_twice_is_refused() -> None:
    data = Transformed(None)
    tensors = TensorDataset(data.x, torch.zeros(N, dtype=torch.int64))
    twice: tuple[Any, ...] = (
        Subset(data, [0, 1, 2, 1]),
        Subset(tensors, [N - 1, -1]),
        ConcatDataset([data, data]),
        ConcatDataset([Subset(data, range(9)), Subset(data, range(8, 30))]),
        ConcatDataset([tensors, TensorDataset(*tensors.tensors)]),
        Subset(Subset(tensors, torch.tensor([3, 3])), [0, 1]),  # type: ignore[arg-type]
    )
    for repeated in twice:
        for door in (prepared, private):
            with pytest.raises(DataError, match="more than once"):
                door(repeated)
    prepared(ConcatDataset([Subset(data, range(9)), Subset(data, range(9, 30)), Transformed(None)]))
