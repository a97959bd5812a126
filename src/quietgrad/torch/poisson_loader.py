"""The loader of a private loop: Poisson samples in place of an epoch's batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from quietgrad.errors import BudgetError, DataError
from quietgrad.objectives.networks.randomness import preserved
from quietgrad.objectives.networks.reading import collated, draws_nothing, read_record
from quietgrad.objectives.networks.tape import mapped
from quietgrad.torch.own_loop import PrivateLoop
from quietgrad.torch.rows import Owners, Rows, Sample

__all__ = ["PoissonLoader"]


class PoissonLoader:
    """Poisson samples of a loader's data set, an epoch being as many as the loader had batches.

    ``privacy`` is the :class:`PrivateLoop` that knows what was spent. Every sample is handed out once: a new
    iterator goes on where the last one stopped, and ends it.
    """

    def __init__(self, loader: DataLoader[Any], loop: PrivateLoop, lengths: tuple[int, ...]) -> None:
        self.privacy = loop
        self.original = loader
        self.dataset: Any = loader.dataset
        self._lengths = lengths  # batches of each epoch; the last one's for all that follow
        self._epoch = 0
        self._iterators = 0
        workers: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
        self._loader: DataLoader[Any] = DataLoader(
            _Records(loader.dataset),
            batch_sampler=_Samples(self),
            collate_fn=_Collate(loader.collate_fn, self.dataset),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            **workers,
        )

    @property
    def batch_size(self) -> float:
        """The public size of a sample, as declared; the size of a sample itself is private."""
        return self.privacy.expected_batch

    def __len__(self) -> int:
        return self._lengths[min(self._epoch, len(self._lengths) - 1)]

    def __iter__(self) -> Iterator[Any]:
        loop, length = self.privacy, len(self)
        self._iterators += 1
        mine, first = self._iterators, loop.handed_out
        batches = iter(self._loader)
        while True:
            if self._iterators != mine:
                raise BudgetError(
                    "this iterator ended when a newer one was made on the same private loader: a sample is handed "
                    "out once. Use one iterator at a time."
                )
            batch = next(batches, None)
            if batch is None:
                break
            count = loop.hand_out()
            owners = Owners(loop.handed_out - 1, torch.arange(count))
            yield mapped(batch, partial(_marked, owners=owners, sample=loop.sample))
        self._epoch += 1
        if loop.handed_out - first < length:
            raise BudgetError(loop.refusal())


def _marked(tensor: torch.Tensor, owners: Owners, sample: Sample) -> torch.Tensor:
    if tensor.dim() < 1 or len(tensor) != len(owners.places):
        raise DataError(
            f"the loader made a tensor of {tensor.dim()} axes whose first is not the examples: batches must be "
            "batch-first, so that it is known which row is whose. Change its collate_fn."
        )
    return Rows.of(tensor, owners, sample)


class _Records(Dataset[Any]):
    """The data set, read by (record, secret word): what augmentation draws for a record is that record's own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._quiet = draws_nothing(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, asked: tuple[int, int]) -> Any:
        if self._quiet:
            return self._dataset[asked[0]]
        with preserved():
            return read_record(self._dataset, *asked)


class _Samples:
    """Record numbers and words of the samples of an epoch; the plan's end ends it early."""

    def __init__(self, loader: PoissonLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        loop = self._loader.privacy
        first = loop.handed_out
        for number in range(first, min(first + len(self._loader), loop.total)):
            keys = loop.keys(number)
            yield list(zip(keys.indices.tolist(), keys.reads.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._loader)


class _Collate:
    """The loader's own collate function, and a batch of no records where a sample is empty."""

    def __init__(self, collate: Any, dataset: Any) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return collated(self._collate, samples)
        with preserved():
            shapes = collated(self._collate, [read_record(self._dataset, 0, 0)])
        return mapped(shapes, lambda tensor: tensor[:0])
