"""The loader of a private loop: secret samples in place of an epoch's batches, as handles."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from types import TracebackType
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from quietgrad.errors import BudgetError, DataError
from quietgrad.torch.private_optimizer import PrivateOptimizer
from quietgrad.torch.processes import processes_now
from quietgrad.torch.recorded_loop import RecordedLoop, pieces_of
from quietgrad.training.result import Privacy

__all__ = ["BatchMemoryManager", "PrivateLoader", "checked_loader"]


class PrivateLoader:
    """Secret samples of a loader's data set, an epoch being as many as the loader had batches.

    Records are read here, one by one: ``collate_fn`` is called with one record, and workers are not used. Every
    sample is handed out once: a new iterator goes on where the last one stopped, and ends it.
    """

    def __init__(self, loader: DataLoader[Any], loop: RecordedLoop, lengths: tuple[int, ...]) -> None:
        self.loop = loop
        self.original = loader
        self.dataset: Any = loader.dataset
        self._lengths = lengths  # batches of each epoch; the last one's for all that follow
        self._epoch = 0
        self._iterators = 0

    @property
    def privacy(self) -> Privacy:
        """What is proved of the samples so far."""
        return self.loop.privacy

    @property
    def batch_size(self) -> float:
        """The public size of a sample, as declared; the size of a sample itself is private."""
        return self.loop.expected_batch

    def __len__(self) -> int:
        return self._lengths[min(self._epoch, len(self._lengths) - 1)]

    def __iter__(self) -> Iterator[Any]:
        return self.pieces(None)

    def pieces(self, most: int | None) -> Iterator[Any]:
        """An epoch's samples, whole or in pieces of whole people with at most ``most`` records."""
        self._iterators += 1
        mine, loop = self._iterators, self.loop
        for _ in range(len(self)):
            for batch in loop.batches(most):
                yield batch
                if self._iterators != mine:
                    raise BudgetError(
                        "this iterator ended when a newer one was made on the same private loader: a sample is "
                        "handed out once. Use one iterator at a time."
                    )
        self._epoch += 1


class BatchMemoryManager:
    """Cuts each sample of a private loader into pieces of at most ``max_physical_batch_size`` records.

    The loop calls the model, ``backward()``, ``optimizer.step()`` and ``zero_grad()`` for every piece. A
    piece's clipped sum is kept and its memory let go; the step comes with the last piece of a sample, which
    stays one secret sample and one release. Into how many pieces a sample is cut is public: one that is
    much larger than expected has larger pieces. People are cut so if ``records_per_person`` is given; else by
    how many records they have, and ε is conditional.
    """

    def __init__(self, *, data_loader: Any, max_physical_batch_size: int, optimizer: Optimizer) -> None:
        if not isinstance(data_loader, PrivateLoader) or not isinstance(optimizer, PrivateOptimizer):
            raise TypeError("BatchMemoryManager: give it the loader and the optimizer that make_private returned.")
        if data_loader.loop is not optimizer._loop:
            raise ValueError("BatchMemoryManager: loader and optimizer are of different private loops.")
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size={max_physical_batch_size}: must be ≥ 1.")
        self._loader, self._most = data_loader, int(max_physical_batch_size)

    def __enter__(self) -> BatchMemoryManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.loop.partial = False

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    def __len__(self) -> int:
        """Pieces of an epoch; of people whose numbers of records are not bounded, if all had one."""
        return len(self._loader) * pieces_of(self._most, self._loader.batch_size / processes_now())

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader.pieces(self._most)
        finally:
            self._loader.loop.partial = False


def checked_loader(loader: Any) -> DataLoader[Any]:
    """The loader, or the one that an earlier loop's was made of, if all it wants is to go through its data set."""
    loader = loader.original if isinstance(loader, PrivateLoader) else loader
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise DataError(
            f"a data set of type {type(dataset).__name__} has no length, so no sample of known probability can be "
            "drawn from it. Use a map-style data set."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"batches of {type(loader.batch_sampler).__name__} have no law that can be accounted for. Give the "
            "loader a batch_size instead."
        )
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if not plain:
        raise DataError(
            f"{type(sampler).__name__}: samples drawn by it cannot be accounted for, and it is not replaced behind "
            "your back. Give the loader shuffle=True or nothing; its batches become secret samples."
        )
    known: DataLoader[Any] = loader
    return known
