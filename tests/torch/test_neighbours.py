"""One record less, wherever it stood, moves what a loop releases by one record's bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.torch.loops.streams import read_stream

CLIP = 1.0
RECORDS = torch.tensor([[9.0], [-9.0], [9.0], [-9.0], [-9.0], [9.0]])  # each adds C or -C


class Stream(IterableDataset[Any]):
    def __init__(self, records: Tensor) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return ((record, torch.zeros(())) for record in self.records)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.records)


def table(records: Tensor) -> TensorDataset:
    return TensorDataset(records, torch.zeros(len(records)))


def model() -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(made.weight)
    return made


def loss(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


class Pair:
    """A batch of a class of its own, with a text that differs by record."""

    def __init__(self, rows: list[Any]) -> None:
        self.x, self.y = (torch.stack(list(column)) for column in zip(*rows, strict=True))
        self.text = str(float(self.x.sum()))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.y))


LOADERS: dict[str, Callable[[Tensor, int], DataLoader[Any]]] = {
    "stream": lambda records, size: DataLoader(Stream(records), batch_size=size),
    "sized stream": lambda records, size: DataLoader(SizedStream(records), batch_size=size),
    "stream, drop_last": lambda records, size: DataLoader(Stream(records), batch_size=size, drop_last=True),
    "stream, workers": lambda records, size: DataLoader(Stream(records), batch_size=size, num_workers=2),
    "table": lambda records, size: DataLoader(table(records), batch_size=size, shuffle=True),
    "table, drop_last": lambda records, size: DataLoader(table(records), batch_size=size, drop_last=True),
    "subset": lambda records, size: DataLoader(
        table(records), batch_size=size, sampler=SubsetRandomSampler(range(len(records)))
    ),
    "batch sampler": lambda records, size: DataLoader(
        table(records), batch_sampler=BatchSampler(RandomSampler(table(records)), size, drop_last=True)
    ),
    "objects": lambda records, size: DataLoader(table(records), batch_size=size, collate_fn=Pair),
    "by rank": lambda records, size: DataLoader(
        table(records), batch_size=size, sampler=DistributedSampler(table(records), num_replicas=1, rank=0)
    ),
}  # fmt: skip
SAMPLINGS = ("poisson", "random-allocation", "turns", "single-pass")


def verbs(kind: str, sampling: Any, most: int | None = None) -> Callable[[Tensor, int], float]:
    """The sum that a loop under the verbs releases; every record is in its one sample."""

    def released(records: Tensor, n_public: int) -> float:
        net = model()
        with pytest.warns(UserWarning, match="noise_multiplier=0"):
            private, optimizer, loader, criterion = qt.make_private(
                module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), criterion=loss, n_public=n_public,
                data_loader=LOADERS[kind](records, n_public), noise_multiplier=0, max_grad_norm=CLIP, epochs=1,
                sampling=sampling, loss_reduction="sum",
            )  # fmt: skip
        pieces = loader
        if most is not None:
            pieces = qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer)
        for x, y in pieces:
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()
        assert loader.loop.handed_out == 1
        return float(net.weight.detach())

    return released


def own_loop(data: Callable[[Tensor], Any], sampling: Any) -> Callable[[Tensor, int], float]:
    def released(records: Tensor, n_public: int) -> float:
        net = model()
        with pytest.warns(UserWarning, match="noise_multiplier=0"):
            loop = qt.PrivateLoop(
                net, loss, data(records), batch_size=n_public, n_public=n_public, epochs=1, noise_multiplier=0,
                max_grad_norm=CLIP, sampling=sampling,
            )  # fmt: skip
        (batch,) = loop
        return float(loop.backward(batch)) * n_public

    return released


def second_epoch(sampling: Any) -> Callable[[Tensor, int], float]:
    """The sum of the second epoch, in which C is three times as large, over three."""

    def released(records: Tensor, n_public: int) -> float:
        net = model()
        with pytest.warns(UserWarning, match="noise_multiplier=0"):
            loop = qt.PrivateLoop(
                net, loss, table(records), batch_size=n_public, n_public=n_public, epochs=2, noise_multiplier=0,
                max_grad_norm=CLIP, sampling=sampling, clip_schedule=qt.ExponentialGradClip(gamma=3.0),
                noise_schedule=qt.StepNoise(step_size=1, gamma=0.5),
            )  # fmt: skip
        first, second = (float(loop.backward(batch)) * n_public for batch in loop)
        assert abs(second) <= 3 * abs(first) + CLIP  # large records grow, small ones do not
        return second / 3.0

    return released


def fitted(data: Callable[[Tensor], Any]) -> Callable[[Tensor, int], float]:
    """The first sum of a fit, whose noise is the same in both runs."""

    def released(records: Tensor, n_public: int) -> float:
        net = model()
        qt.fit(
            net, loss, data(records), qg.DPSGD(steps=1, batch_size=n_public, clip=CLIP, learning_rate=1.0),
            budget=qg.Budget(1.0, 1e-5), n_public=n_public, seed=1, progress=False,
        )  # fmt: skip
        return float(net.weight.detach()) * n_public

    return released


DOORS: dict[str, Callable[[Tensor, int], float]] = {
    **{f"verbs, {kind}, {sampling}": verbs(kind, sampling) for kind in LOADERS for sampling in SAMPLINGS},
    "verbs, stream, in pieces": verbs("stream", "poisson", most=2),
    **{f"loop, stream, {sampling}": own_loop(Stream, sampling) for sampling in SAMPLINGS},
    **{f"loop, table, {sampling}": own_loop(table, sampling) for sampling in SAMPLINGS},
    **{f"loop, second epoch, {sampling}": second_epoch(sampling) for sampling in SAMPLINGS[:3]},
    "fit, stream": fitted(Stream),
    "fit, table": fitted(table),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_one_record_less_moves_a_release_by_one_bound(door: str) -> None:
    released = DOORS[door]
    for n_public in (1, 4):  # fewer than there are: public, and only what samples are drawn by
        whole = released(RECORDS, n_public)
        for place in range(len(RECORDS)):
            left = released(torch.cat([RECORDS[:place], RECORDS[place + 1 :]]), n_public)
            assert abs(whole - left) <= CLIP * (1 + 1e-4), (n_public, place)


def test_under_replace_one_an_endless_stream_is_cut(tmp_path: Path) -> None:
    """A record that is replaced moves no other, so the cut changes one record at most."""

    class Endless(Stream):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from super().__iter__()

    net, budget = model(), qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    loop = qt.PrivateLoop(
        net, loss, Endless(RECORDS), batch_size=2, n_public=7, epochs=1, max_grad_norm=CLIP, budget=budget
    )
    for batch in loop:
        loop.backward(batch)
    assert len(read_stream(Endless(RECORDS), 7, "replace-one")) == 7
    algorithm = qg.DPSGD(steps=4, batch_size=2, clip=CLIP)

    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 2:
            raise Killed

    with pytest.raises(Killed):
        qt.fit(
            net, loss, Endless(RECORDS), algorithm, budget=budget, n_public=7, folder=tmp_path / "run", every=1,
            callbacks=[kill], checkpoint_seconds=0.0, ledger=tmp_path / "ledger.jsonl",
        )  # fmt: skip
    done = qt.resume(net, loss, Endless(RECORDS), algorithm, folder=tmp_path / "run")
    assert done.privacy.releases is not None
    assert sum(done.privacy.releases.values()) == 4
