"""Reading records: each is read, collated and padded by itself, and run with records of its own shape."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import quietgrad.torch as qt
from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import examples_of
from tests.torch.autograd import KEY

CROSS = nn.CrossEntropyLoss()
N = 20


class Texts(Dataset[Any]):
    """Texts of their own lengths, each with a tag for every word; one is long."""

    def __init__(self, n: int = N, form: str = "tuple") -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 7, (n,), generator=generator).tolist()
        lengths[3] = 30
        self.form = form
        self.words = [torch.randint(1, 9, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> Any:
        words = self.words[i]
        if self.form == "tuple":
            return words, words % 3
        record = {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": words % 3,
            "id": torch.tensor(i),
        }
        return record if self.form == "dict" else UserDict(record)


class Tagger(nn.Module):
    """A recurrent tagger, in which every position counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.cell, self.head = nn.GRU(5, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.cell(self.embed(words))[0]).transpose(1, 2)
        return output


def read(data: Any, rows: Any, **settings: Any) -> list[Any]:
    return examples_of(data, 1, **settings).read(RecordSeeds(KEY, np.asarray(rows)))


def clipped_sum(objective: ModuleObjective, data: Any, rows: Any, clip: float = 0.3) -> Tensor:
    records = objective.prepare(data)
    theta = objective.initial(records)
    out = torch.zeros_like(theta, dtype=torch.float64)
    objective.add(Batch(records, np.asarray(rows), KEY), (theta,), ClippingRule.gradient(clip), out)
    return out


@pytest.mark.parametrize("form", ["tuple", "dict", "user dict"])
def test_records_of_one_shape_are_one_group(form: str) -> None:
    data = Texts(form=form)
    groups = read(data, range(N))
    assert len(groups) == len({len(words) for words in data.words})
    assert sorted(row for group in groups for row in group.rows) == list(range(N))
    for group in groups:
        words = group.record["input_ids"] if form != "tuple" else group.record[0]
        assert words.shape == (len(group.rows), 1, len(data.words[group.rows[0]]))  # (n, a batch of one, …)
        assert all(torch.equal(each[0], data.words[row]) for row, each in zip(group.rows, words, strict=True))


def test_what_is_no_tensor_tells_groups_apart() -> None:
    Record = namedtuple("Record", "x y")

    def collate(samples: list[Any]) -> Any:
        (words, tags), *others = samples
        assert not others
        return Record(words[:2], {"tag": tags[:2], "kind": ["even", "odd"][int(words[0]) % 2], "n": np.ones(3)})

    groups = read(Texts(), range(N), collate=collate)
    assert {group.record.y["kind"] for group in groups} == {"even", "odd"}
    assert len(groups) == 2
    assert all(isinstance(group.record, Record) and group.record.y["n"].shape[1:] == (3,) for group in groups)


# --- padding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "long", "short"), [(8, 8, 8), (qt.Multiple(4), 32, 4), (qt.Multiple(7), 35, 7)])
def test_a_record_is_padded_by_its_own_length(length: Any, long: int, short: int) -> None:
    """To a public length, to which longer ones are cut, or to the next multiple at or above its own."""
    data, pad = Texts(), qt.Padding(length)
    for form in ("tuple", "dict"):
        data.form = form
        found: dict[int, Any] = {}
        for group in read(data, range(N), pad=pad):
            each = group.record if form == "tuple" else (group.record["input_ids"], group.record["labels"])
            found |= {int(row): (x[0], y[0]) for row, x, y in zip(group.rows, *each, strict=True)}
        for row, (x, y) in found.items():
            own = data.words[row]
            size = long if row == 3 else short if len(own) <= short else 2 * short
            kept = min(len(own), size)
            assert x.shape == y.shape == (size,)
            assert torch.equal(x[:kept], own[:kept])
            assert torch.equal(y[:kept], (own % 3)[:kept])
            assert (x[kept:] == 0).all()  # inputs with zeros, whole-number targets with what losses leave out
            assert (y[kept:] == -100).all()


def test_values_of_padding() -> None:
    x, y, masked = (
        torch.ones(1, 2, 3),
        torch.ones(1, 2),
        {"attention_mask": torch.ones(1, 2), "pixels": torch.ones(1, 2)},
    )
    padded = qt.Padding(3, value=7.0).of((x, y))
    assert padded[0][0, 2].tolist() == [7.0] * 3
    assert padded[1][0, 2] == 7.0  # targets that are no whole numbers are like inputs
    assert qt.Padding(3, target=-1).of((x, y.long()))[1][0, 2] == -1
    found = qt.Padding(3, value=7.0, values={"attention_mask": 0}).of(masked)
    assert (found["attention_mask"][0, 2], found["pixels"][0, 2]) == (0.0, 7.0)
    assert qt.Padding(4).of((torch.ones(1, 3), torch.ones(1, 2)))[1].shape == (1, 2)  # another length stays
    assert qt.Padding(4).of(torch.ones(1)).shape == (1,)
    assert qt.Padding(2).of([x.repeat(1, 2, 1)])[0].shape == (1, 2, 3)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "8", qt.Padding])
def test_lengths_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"pad=|must be a whole number"):
        ModuleObjective(Tagger(), CROSS, pad=wrong)
    if not isinstance(wrong, type):
        with pytest.raises(ValueError, match="whole number"):
            qt.Multiple(wrong)


@pytest.mark.parametrize("pad", [None, 8, qt.Multiple(4), qt.Padding(qt.Multiple(16))])
def test_a_sum_over_records_of_many_shapes_is_that_of_each_alone(pad: Any) -> None:
    """The long record is there or not: the others contribute the same, and it at most C."""
    torch.manual_seed(0)
    objective, data = ModuleObjective(Tagger(), CROSS, pad=pad), Texts()
    whole = clipped_sum(objective, data, range(N))
    each = [clipped_sum(objective, data, [row]) for row in range(N)]
    torch.testing.assert_close(whole, torch.stack(each).sum(0), rtol=1e-5, atol=1e-6)
    without = clipped_sum(objective, data, [row for row in range(N) if row != 3])
    torch.testing.assert_close(whole - without, each[3], rtol=1e-4, atol=1e-6)
    assert float(each[3].norm()) <= 0.3
    if pad is None or pad == qt.Multiple(4):  # −100 is left out, so that padding behind a text changes little
        assert float(each[3].norm()) > 0.1


# --- collate functions ---------------------------------------------------------------------------------------


def test_a_collate_function_of_a_tensor_data_set_is_honoured() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % 2)

    def doubled(samples: list[Any]) -> tuple[Tensor, Tensor]:
        ((x, y),) = samples
        return 2 * x[None], 1 - y[None]

    (group,) = read(data, [4, 2], collate=doubled)
    assert torch.equal(group.record[0][:, 0], 2 * data.tensors[0][[4, 2]])
    model, other = nn.Linear(6, 2), TensorDataset(2 * data.tensors[0], 1 - data.tensors[1])
    found = clipped_sum(ModuleObjective(model, CROSS, collate_fn=doubled), data, range(N))
    torch.testing.assert_close(found, clipped_sum(ModuleObjective(model, CROSS), other, range(N)))


def fails(samples: list[Any]) -> Any:
    raise KeyError("a secret of the record")


@pytest.mark.parametrize(
    ("collate", "said"), [(fails, r"could not be read \(KeyError\)"), (lambda samples: "text", "became a str")]
)
def test_what_cannot_be_read_is_told_without_the_record(collate: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        examples_of(Texts(), 1, collate)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


# --- which records there are ---------------------------------------------------------------------------------


def private(data: Any) -> Any:
    model = nn.Linear(6, 2)
    return qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(data, batch_size=2),
    )  # fmt: skip


def test_a_record_that_is_named_twice_is_refused() -> None:
    texts, tensors = Texts(), TensorDataset(torch.randn(N, 6), torch.arange(N) % 2)
    twice: tuple[Any, ...] = (
        Subset(texts, [0, 1, 2, 1]),
        Subset(tensors, [N - 1, -1]),
        ConcatDataset([texts, texts]),
        ConcatDataset([Subset(texts, range(9)), Subset(texts, range(8, 15))]),
        ConcatDataset([tensors, TensorDataset(*tensors.tensors)]),
        Subset(Subset(tensors, torch.tensor([3, 3])), [0, 1]),  # type: ignore[arg-type]
    )
    for repeated in twice:
        for door in (lambda data: examples_of(data, 1), private):
            with pytest.raises(DataError, match="more than once"):
                door(repeated)
    examples_of(ConcatDataset([Subset(texts, range(9)), Subset(texts, range(9, 15)), Texts()]), 1)
