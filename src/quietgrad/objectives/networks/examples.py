"""Examples for torch modules: tensors or a map-style data set, checked once and read batch by batch.

An example is (x, y): x is what the module is called with (one tensor or several), y what the loss compares with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from quietgrad.errors import DataError
from quietgrad.objectives.networks.tape import Batch, batch_length, tensors_of

__all__ = ["Collate", "Examples", "examples_of", "replayable_randomness"]

Collate = Callable[[list[Any]], Any]
Reader = Callable[[Sequence[int]], tuple[Batch, Batch]]

_READ = 512  # examples read at a time where all of them are


@dataclass(frozen=True, eq=False)
class Examples:
    """n examples and how to read some of them.

    ``fixed`` are the module's frozen parameters and buffers: gradients depend on them as they do on the examples.
    """

    read: Reader
    length: int
    dim: int
    fixed: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.length

    def parts(self, indices: npt.NDArray[Any] | None, most: int) -> Iterator[tuple[Batch, Batch]]:
        """The examples at ``indices`` (None: all), in equal parts of at most ``most``."""
        total = self.length if indices is None else len(indices)
        pieces = -(-total // most)
        for k in range(pieces):
            where = range(total * k // pieces, total * (k + 1) // pieces)
            yield self.read(where if indices is None else indices[where.start : where.stop].tolist())

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything a sum over these examples depends on, as bytes: a resumed run checks that nothing changed."""
        yield from self.fingerprint_parts()
        for tensor in self.fixed:
            yield from _bytes_of(tensor)

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The examples alone as bytes, whatever module they train: a ledger knows them by it."""
        with replayable_randomness(b"contents"):
            for batch in self.parts(None, _READ):
                for tensor in tensors_of(batch):
                    yield from _bytes_of(tensor)


def examples_of(data: Any, dim: int, collate: Collate | None = None, fixed: tuple[Tensor, ...] = ()) -> Examples:
    """``data`` made ready: (X, y) of tensors or arrays, a ``TensorDataset``, or any map-style data set.

    >>> examples = examples_of((torch.zeros(3, 2), torch.tensor([0, 1, 1])), dim=4)
    >>> len(examples), [y.tolist() for x, y in examples.parts(None, most=2)]
    (3, [[0], [1, 1]])
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, TensorDataset):
        data = _split(data.tensors)
    if isinstance(data, tuple | list):
        return _in_memory(data, dim, fixed)
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(
            f"a data set of type {type(data).__name__} has no length or no positions, so no sample of known "
            "probability can be drawn from it. Use a map-style data set with __len__ and __getitem__."
        )
    length = len(data)
    if length < 1:
        raise DataError("the data set is empty: there is nothing to train on.")
    read = _reader(data, collate or default_collate)
    read([0, length - 1])
    return Examples(read, length, dim, fixed)


def _in_memory(data: Sequence[Any], dim: int, fixed: tuple[Tensor, ...]) -> Examples:
    if len(data) != 2:
        raise DataError(f"data has {len(data)} parts: give (X, y), several inputs as ((X1, X2), y).")
    x, y = (_tensors(part) for part in data)
    lengths = {len(tensor) for tensor in tensors_of((x, y))}
    if len(lengths) != 1 or lengths == {0}:
        raise DataError(f"X and y have lengths {sorted(lengths)}: they must be equal and at least 1.")
    for tensor in tensors_of((x, y)):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DataError("the data hold a number that is not finite; clean them first. Nothing was reserved.")

    def read(indices: Sequence[int]) -> tuple[Batch, Batch]:
        if isinstance(indices, range):
            return _take(x, slice(indices.start, indices.stop)), _take(y, slice(indices.start, indices.stop))
        where = torch.tensor(indices, dtype=torch.int64, device=tensors_of(x)[0].device)
        return _take(x, where), _take(y, where)

    return Examples(read, lengths.pop(), dim, fixed)


def _reader(data: Any, collate: Collate) -> Reader:
    def read(indices: Sequence[int]) -> tuple[Batch, Batch]:
        whole = getattr(data, "__getitems__", None)
        samples = [data[i] for i in indices] if whole is None else whole(list(indices))
        try:
            parts = collate(samples)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"samples of type {type(samples[0]).__name__} cannot be put into one batch ({error}). Each must be "
                "(x, y) of tensors, arrays or numbers of equal shapes; else pass collate_fn."
            ) from None
        if not isinstance(parts, tuple | list) or len(parts) < 2:
            raise DataError("a sample must be (x, y), with several inputs (x1, x2, y).")
        x, y = _split(parts)
        x, y = _tensors(x), _tensors(y)
        if any(tensor.dim() < 1 or len(tensor) != len(indices) for tensor in tensors_of((x, y))):
            raise DataError(f"a batch of {len(indices)} samples must be tensors of that length; see collate_fn.")
        return x, y

    return read


def _split(parts: Sequence[Any]) -> tuple[Any, Any]:
    if len(parts) < 2:
        raise DataError("a sample must be (x, y), with several inputs (x1, x2, y).")
    return (parts[0] if len(parts) == 2 else tuple(parts[:-1])), parts[-1]


def _tensors(value: Any) -> Batch:
    """Tensors of an array, a tensor, or a tuple of them."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.tensor(value)
    if isinstance(value, tuple | list) and value:
        parts = tuple(_tensors(part) for part in value)
        if all(isinstance(part, Tensor) for part in parts):
            return parts  # type: ignore[return-value]
    raise DataError(
        f"a {type(value).__name__} cannot be given to a module: use tensors or arrays of numbers, or a collate_fn "
        "that makes them."
    )


def _take(value: Batch, where: slice | Tensor) -> Batch:
    return value[where] if isinstance(value, Tensor) else tuple(part[where] for part in value)


def _bytes_of(tensor: Tensor) -> Iterator[bytes | memoryview]:
    yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.numel():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def replayable_randomness(*causes: bytes) -> Iterator[None]:
    """Random numbers of torch, numpy and Python that follow from ``causes`` alone; afterwards as if unused.

    Dropout and augmentation are part of what is asked of the data. A resumed run draws the same noise again, which
    is safe only if it asks the same thing again, so they must not depend on how often the program was started.
    """
    from hashlib import blake2b

    digest = blake2b(digest_size=8)
    for cause in causes:
        digest.update(cause)
    seed = int.from_bytes(digest.digest(), "little")
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    # Not torch.manual_seed: for accelerators that are not in use it files a stack trace, 3 ms a step.
    torch.default_generator.manual_seed(seed)
    if cuda:
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def probe(examples: Examples) -> tuple[Batch, Batch]:
    """Two made-up examples of the right shapes, to try a module on before any budget is touched.

    Floats are uniform in [0, 1); whole numbers (tokens, classes) cannot be made up and are those of two records.
    """
    x, y = examples.read([0, len(examples) - 1])
    with replayable_randomness(b"probe"):
        made = [torch.rand_like(t) if t.is_floating_point() else t for t in tensors_of((x, y))]
    count = len(tensors_of(x))
    first = made[0] if isinstance(x, Tensor) else tuple(made[:count])
    last = made[-1] if isinstance(y, Tensor) else tuple(made[count:])
    assert batch_length(first) == 2
    return first, last
