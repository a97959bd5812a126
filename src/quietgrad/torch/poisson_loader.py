"""The loader of a private loop: Poisson samples in place of an epoch's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from quietgrad.errors import BudgetError
from quietgrad.torch.own_loop import PrivateLoop
from quietgrad.torch.private_module import mapped

__all__ = ["PoissonLoader"]


class PoissonLoader:
    """Poisson samples of a loader's data set, an epoch being as many as the loader had batches.

    ``privacy`` is the :class:`PrivateLoop` that knows what was spent.
    """

    def __init__(self, loader: DataLoader[Any], loop: PrivateLoop, lengths: tuple[int, ...]) -> None:
        self.privacy = loop
        self.dataset: Any = loader.dataset
        self._lengths = lengths  # batches of each epoch; the last one's for all that follow
        self._epoch = 0
        workers: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
        self._loader = DataLoader(
            loader.dataset,
            batch_sampler=_Samples(self),
            collate_fn=_Collate(loader.collate_fn, self.dataset),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            **workers,
        )

    def __len__(self) -> int:
        return self._lengths[min(self._epoch, len(self._lengths) - 1)]

    def __iter__(self) -> Iterator[Any]:
        loop, length = self.privacy, len(self)
        first = loop.drawn
        for batch in self._loader:
            loop.handed_out(len(loop.indices(loop.drawn)))
            yield batch
        self._epoch += 1
        if loop.drawn - first < length:
            raise BudgetError(loop.refusal())


class _Samples:
    """Record numbers of the samples of an epoch; the plan's end ends it early."""

    def __init__(self, loader: PoissonLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        loop = self._loader.privacy
        for number in range(loop.drawn, min(loop.drawn + len(self._loader), loop.total)):
            yield loop.indices(number)

    def __len__(self) -> int:
        return len(self._loader)


class _Collate:
    """The loader's own collate function, and a batch of no records where a sample is empty."""

    def __init__(self, collate: Any, dataset: Any) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        return mapped(self._collate([self._dataset[0]]), lambda tensor: tensor[:0])
