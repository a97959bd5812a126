"""``BatchMemoryManager``: a sample in pieces that fit into memory, and one step for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import itemgetter
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from quietgrad.objectives.networks.tape import mapped, tensors_of
from quietgrad.torch.poisson_loader import PoissonLoader
from quietgrad.torch.private_optimizer import PrivateOptimizer

__all__ = ["BatchMemoryManager"]


class BatchMemoryManager:
    """Cuts each sample of a private loader into pieces of at most ``max_physical_batch_size`` records.

    The loop calls the model, ``backward()``, ``optimizer.step()`` and ``zero_grad()`` for every piece. Steps before
    the last piece of a sample wait for it, so the sample stays one true Poisson sample and one release.

    ``micro_batch=`` of ``make_private`` does the same inside, without changing the loop.
    """

    def __init__(self, *, data_loader: Any, max_physical_batch_size: int, optimizer: Optimizer) -> None:
        if not isinstance(data_loader, PoissonLoader) or not isinstance(optimizer, PrivateOptimizer):
            raise TypeError("BatchMemoryManager: give it the loader and the optimizer that make_private returned.")
        if data_loader.privacy is not optimizer._loop:
            raise ValueError("BatchMemoryManager: loader and optimizer are of different private loops.")
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size={max_physical_batch_size}: must be ≥ 1.")
        self._loader, self._most = data_loader, int(max_physical_batch_size)

    def __enter__(self) -> BatchMemoryManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.privacy.partial = False

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    def __len__(self) -> int:
        """Pieces of an epoch if all samples were as large as expected."""
        return len(self._loader) * max(1, math.ceil(self._loader.batch_size / self._most))

    def __iter__(self) -> Iterator[Any]:
        loop = self._loader.privacy
        try:
            for batch in self._loader:
                count = max((len(tensor) for tensor in tensors_of(batch)), default=0)
                for start in range(0, max(count, 1), self._most):
                    part = slice(start, start + self._most)
                    loop.partial = part.stop < count
                    yield mapped(batch, itemgetter(part))
        finally:
            loop.partial = False
