"""Examples for torch modules: tensors or a map-style data set, checked once and read batch by batch.

An example is (x, y): x is what the module is called with (one tensor or several), y what the loss compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from quietgrad.errors import DataError
from quietgrad.objectives.networks.randomness import RecordKeys, preserved
from quietgrad.objectives.networks.reading import (
    Collate,
    collated,
    draws_nothing,
    leaves_of,
    read_record,
    refuse_mixing_collate,
    refuse_own_generators,
    refuse_repeated_records,
)
from quietgrad.objectives.networks.tape import Batch, tensors_of

__all__ = ["Collate", "Examples", "bytes_of", "draws_nothing", "examples_of", "leaves_of", "probe", "read_record",
           "refuse_mixing_collate", "refuse_own_generators", "refuse_repeated_records"]  # fmt: skip

Reader = Callable[[RecordKeys], tuple[Batch, Batch]]

_READ = 512  # examples read at a time where all of them are
_PUBLIC = bytes(32)  # augmentation of an evaluation, or of a digest: the same every time


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

    def parts(
        self, indices: npt.NDArray[Any] | None, most: int, key: bytes | None = _PUBLIC
    ) -> Iterator[tuple[Batch, Batch, RecordKeys]]:
        """The examples at ``indices`` (None: all) with their keys, in passes of at most ``most``."""
        keys = RecordKeys.of(key, np.arange(self.length) if indices is None else indices)
        if not len(keys.indices):
            return
        for rows in keys.passes(most):
            part = keys.rows(rows)
            yield *self.read(part), part

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything a sum over these examples depends on, as bytes, in the order of the records."""
        yield from self.fingerprint_parts()
        for tensor in self.fixed:
            yield from bytes_of(tensor)

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The records as bytes, whatever a module makes of them."""
        for start in range(0, self.length, _READ):
            part = RecordKeys(_PUBLIC, np.arange(start, min(start + _READ, self.length)))
            for tensor in tensors_of(self.read(part)):
                yield from bytes_of(tensor)


def examples_of(data: Any, dim: int, collate: Collate | None = None, fixed: tuple[Tensor, ...] = ()) -> Examples:
    """``data`` made ready: (X, y) of tensors or arrays, a ``TensorDataset``, or any map-style data set.

    >>> examples = examples_of((torch.zeros(3, 2), torch.tensor([0, 1, 1])), dim=4)
    >>> len(examples), [y.tolist() for _, y, _ in examples.parts(None, most=3)]
    (3, [[0, 1, 1]])
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
    collate = collate or default_collate
    read = _reader(data, collate)
    refuse_repeated_records(data)
    read(RecordKeys(_PUBLIC, np.array([0, length - 1])))
    refuse_own_generators(data)
    refuse_mixing_collate(data, collate)
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

    def read(keys: RecordKeys) -> tuple[Batch, Batch]:
        indices = keys.indices
        if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all()):
            where: slice | Tensor = slice(int(indices[0]), int(indices[-1]) + 1)
        else:
            where = torch.tensor(indices, dtype=torch.int64, device=tensors_of(x)[0].device)
        return _take(x, where), _take(y, where)

    return Examples(read, lengths.pop(), dim, fixed)


def _reader(data: Any, collate: Collate) -> Reader:
    quiet = draws_nothing(data)

    def read(keys: RecordKeys) -> tuple[Batch, Batch]:
        count = len(keys.indices)
        if quiet:
            samples = [data[int(i)] for i in keys.indices]
        else:
            with preserved():
                samples = [read_record(data, int(i), int(w)) for i, w in zip(keys.indices, keys.reads, strict=True)]
        try:
            parts = collated(collate, samples)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"samples of type {type(samples[0]).__name__} cannot be put into one batch "
                f"({type(error).__name__}). Each must be (x, y) of tensors, arrays or numbers of equal shapes; "
                "else pass collate_fn."
            ) from None
        if not isinstance(parts, tuple | list) or len(parts) < 2:
            raise DataError(
                f"a batch of type {type(parts).__name__}: a sample must be (x, y), with several inputs (x1, x2, y)."
                " For dictionaries pass a collate_fn that returns them in this order."
            )
        x, y = _split(parts)
        x, y = _tensors(x), _tensors(y)
        if any(tensor.dim() < 1 or len(tensor) != count for tensor in tensors_of((x, y))):
            raise DataError(
                f"a batch of {count} samples must be tensors of that length, examples first; see collate_fn."
            )
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


def bytes_of(value: Any) -> Iterator[bytes | memoryview]:
    """Everything about a tensor, an array, a number or a text, as bytes."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        yield value if isinstance(value, bytes) else f"{type(value).__name__} {value!r}".encode()
        return
    tensor = value
    yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.numel():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def probe(examples: Examples) -> tuple[Batch, Batch]:
    """A few records, for the shapes of what a module is tried on before any budget is touched."""
    last = len(examples) - 1
    return examples.read(RecordKeys(_PUBLIC, np.array([0, last, last // 2, 0])))
