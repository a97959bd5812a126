"""Records for torch modules: read one by one, collated one by one, padded by public rules, grouped by their shape.

A data set and its collate function are the user's, and see one record. Shapes are public: records that have the
same are stacked and run together, so that no record's shape changes what is computed of another.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import struct
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable
from uuid import UUID

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, default_collate

from quietgrad.core.errors import DataError
from quietgrad.torch.networks.randomness import RecordSeeds, preserved, seed_generators
from quietgrad.torch.networks.trees import PyTree, mapped, mapped_leaves, outline, refilled, tensors_of

Collate = Callable[[list[Any]], Any]
Rows = npt.NDArray[np.int64]

_READ = 512  # records read at a time where all of them are
_PUBLIC = bytes(32)  # augmentation of an evaluation, or of a digest: the same every time


class RecordGroup(NamedTuple):
    """Records of one shape: positions among those that were asked for, and their tensors stacked, (n, …)."""

    rows: Rows
    record: PyTree


@dataclass(frozen=True)
class Multiple:
    """A length: the next multiple of ``of`` at or above a record's own."""

    of: int

    def __post_init__(self) -> None:
        _check_length("Multiple", self.of)


def _check_length(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}({value!r}): must be a whole number ≥ 1, or for pad Multiple(k) or Padding(…).")


@dataclass(frozen=True)
class Padding:
    """Padding of each record by its own length, to a public length or a multiple.

    A record's length is the second axis of its first tensor that has two or more axes, after ``collate_fn``; every
    tensor with that length there is padded.

    Args:
        length: a whole number, or :class:`Multiple`.
        value: what inputs are padded with.
        target: what whole-number targets with that length are padded with; losses of torch leave −100 out.
        values: by name, for records that are dictionaries; what is not named gets ``value``.

    >>> pad = Padding(Multiple(4))
    >>> pad.of((torch.ones(1, 3), torch.tensor([1])))
    (tensor([[1., 1., 1., 0.]]), tensor([1]))
    """

    length: int | Multiple
    value: float = 0
    target: int = -100
    values: Mapping[str, float] = field(
        default_factory=lambda: {"labels": -100, "attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.length, Multiple):
            _check_length("pad", self.length)

    def of(self, record: PyTree) -> Any:
        own = next((t.shape[1] for t in tensors_of(record) if t.dim() >= 2), None)
        if own is None:
            return record
        size = self.length if isinstance(self.length, int) else -(-own // self.length.of) * self.length.of
        if isinstance(record, dict | UserDict):
            filled = copy.copy(record)
            for name, item in record.items():
                filled[name] = self._item(item, own, size, self.values.get(name, self.value))
            return filled
        if isinstance(record, tuple | list) and len(record) > 1:
            inputs = [self._item(part, own, size, self.value) for part in record[:-1]]
            return (*inputs, self._item(record[-1], own, size, None))
        return self._item(record, own, size, self.value)

    def _item(self, item: PyTree, own: int, size: int, value: float | None) -> Any:
        """Every tensor with the record's length padded, or cut; ``None``: as a target."""

        def padded(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != own or own >= size:
                return tensor[:, :size] if tensor.dim() >= 2 and tensor.shape[1] == own else tensor
            whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool
            fill = (self.target if whole else self.value) if value is None else value
            return F.pad(tensor, (*([0, 0] * (tensor.dim() - 2)), 0, size - own), value=fill)

        return mapped(item, padded)


def as_padding(pad: int | Multiple | Padding | None) -> Padding | None:
    return pad if pad is None or isinstance(pad, Padding) else Padding(pad)


@dataclass(frozen=True, eq=False)
class Examples:
    """n records and how to read some of them.

    ``fixed`` are the module's frozen parameters and buffers: gradients depend on them as they do on the records.
    """

    read: Callable[[RecordSeeds], list[RecordGroup]]
    length: int
    dim: int
    fixed: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.length

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything a sum over these records depends on, as bytes, in the order of the records."""
        yield from self.fingerprint_parts()
        for tensor in self.fixed:
            yield from bytes_of(tensor)

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The records as bytes, whatever a module makes of them."""
        for start in range(0, self.length, _READ):
            part = RecordSeeds(_PUBLIC, np.arange(start, min(start + _READ, self.length)))
            groups = self.read(part)
            if len(groups) == 1:
                for tensor in tensors_of(groups[0].record):
                    yield from bytes_of(tensor)
                continue
            places = [(int(row), group.record, k) for group in groups for k, row in enumerate(group.rows)]
            for _, record, k in sorted(places, key=lambda place: place[0]):
                for tensor in tensors_of(record):
                    yield from bytes_of(tensor[k])


def examples_of(
    data: object, dim: int, collate: Collate | None = None, pad: Padding | None = None,
    fixed: tuple[Tensor, ...] = (),
) -> Examples:  # fmt: skip
    """``data`` made ready: (X, y) of tensors or arrays, a ``TensorDataset``, or any map-style data set.

    >>> examples = examples_of((torch.zeros(3, 2), torch.tensor([0, 1, 1])), dim=4)
    >>> [group.record[1].tolist() for group in examples.read(RecordSeeds(bytes(32), np.array([0, 2])))]
    [[[0], [1]]]
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, tuple | list) and not (collate and len(data) != 2):
        data = _InMemory(_as_tensors(data))
    if isinstance(data, IterableDataset) or not isinstance(data, _MapStyle):
        raise DataError(
            f"a data set of type {type(data).__name__} has no length or no positions, so no sample of known "
            "probability can be drawn from it. Use a map-style data set with __len__ and __getitem__."
        )
    if len(data) < 1:
        raise DataError("the data set is empty: there is nothing to train on.")
    refuse_repeated_records(data)
    parts = tuple(data.tensors) if isinstance(data, TensorDataset) else None
    parts = data.parts if isinstance(data, _InMemory) else parts
    if any(part.is_floating_point() and not part.isfinite().all() for part in tensors_of(parts)):
        raise DataError("the data hold a number that is not finite; clean them first. Nothing was reserved.")
    if collate in (None, default_collate) and pad is None and type(data) in (TensorDataset, _InMemory):
        assert parts is not None
        read = _whole_rows(parts)
    else:
        read = _reader(data, collate or default_collate, pad)
    examples = Examples(read, len(data), dim, fixed)
    examples.read(RecordSeeds(_PUBLIC, np.array([0])))  # whether one can be read at all
    return examples


@runtime_checkable
class _MapStyle(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


class _InMemory:
    """(X, y), or ((X1, X2), y): records are (x, y), or ((x1, x2), y)."""

    def __init__(self, parts: tuple[PyTree, ...]) -> None:
        if len(parts) < 2 or (len(parts) > 2 and any(isinstance(part, tuple) for part in parts)):
            raise DataError(f"data has {len(parts)} parts: give (X, y), several inputs as ((X1, X2), y).")
        lengths = {len(tensor) for tensor in tensors_of(parts)}
        if len(lengths) != 1 or lengths == {0}:
            raise DataError(f"X and y have lengths {sorted(lengths)}: they must be equal and at least 1.")
        self.parts, self._length = parts, lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Any:
        return mapped(self.parts, lambda tensor: tensor[place])


def _as_tensors(value: PyTree) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.tensor(value)
    if isinstance(value, tuple | list) and value:
        return tuple(_as_tensors(part) for part in value)
    raise DataError(
        f"a {type(value).__name__} cannot be given to a module: use tensors or arrays of numbers, or a data set "
        "with a collate_fn that makes them."
    )


def _whole_rows(parts: tuple[PyTree, ...]) -> Callable[[RecordSeeds], list[RecordGroup]]:
    """Rows of tensors in memory: what the default collate function makes of each, all at once."""

    def read(keys: RecordSeeds) -> list[RecordGroup]:
        indices = keys.indices
        if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all()):
            where: slice | Tensor = slice(int(indices[0]), int(indices[-1]) + 1)
        else:
            where = torch.tensor(indices, dtype=torch.int64, device=tensors_of(parts)[0].device)
        # Copies: a program that writes into its input must not write into the user's data.
        rows = mapped(parts, lambda t: t[where].unsqueeze(1).clone(memory_format=torch.contiguous_format))
        return [RecordGroup(np.arange(len(indices)), rows)]

    return read


def _reader(data: _MapStyle, collate: Collate, pad: Padding | None) -> Callable[[RecordSeeds], list[RecordGroup]]:
    def read(keys: RecordSeeds) -> list[RecordGroup]:
        groups: dict[Any, tuple[list[int], list[list[Tensor]], Any]] = {}
        with preserved():
            for row, (index, word) in enumerate(zip(keys.indices.tolist(), keys.reads.tolist(), strict=True)):
                seed_generators(word)
                record = _one(data, index, collate, pad)
                tensors = tensors_of(record)
                shape = tuple((t.shape, t.dtype, t.device, t.layout) for t in tensors), _constants(record)
                rows, stacks, _ = groups.setdefault(shape, ([], [], record))
                rows.append(row)
                stacks.append(tensors)
        return [
            RecordGroup(np.array(rows), refilled(record, iter([torch.stack(each) for each in zip(*stacks)])))  # noqa: B905
            for rows, stacks, record in groups.values()
        ]

    return read


def _one(data: _MapStyle, index: int, collate: Collate, pad: Padding | None) -> Any:
    try:
        batch = collate([data[index]])
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"a record could not be read ({type(error).__name__}): collate_fn is called with a list of one sample "
            "and returns what model and loss take, tensors in tuples, lists or dictionaries."
        ) from None
    batch = _numbers_to_tensors(batch)
    if not tensors_of(batch):
        raise DataError(
            f"a record became a {type(batch).__name__} without tensors: give a collate_fn that makes tensors of it."
        )
    return batch if pad is None else pad.of(batch)


def _numbers_to_tensors(batch: PyTree) -> Any:
    return mapped_leaves(_data_alone(batch), _number_to_tensor)


def _number_to_tensor(value: object) -> object:
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return torch.as_tensor(value) if is_numbers else value


def _data_alone(batch: PyTree) -> Any:
    """A ``UserDict`` (a tokenizer's ``BatchEncoding``) without what it keeps besides its data: that is text."""
    if not isinstance(batch, UserDict):
        return batch
    made = copy.copy(batch)
    vars(made).update({name: None for name in vars(made) if name != "data"})
    return made


def _constants(value: PyTree) -> Any:
    """Return the parts of a record that are no tensors. Records that differ there, in a type or a bit, run apart.

    ``1 == True == 1.0`` and ``0.0 == -0.0``, and an object's own ``==`` may leave something out.
    """
    return outline(
        value, _constant, aside=lambda each: _Itself(each) if isinstance(each, Tensor) else _constant(each)
    )


def _constant(value: object) -> Any:
    if isinstance(value, Tensor):
        return ...
    if value is None or type(value) in (bool, int, str, bytes):
        return type(value), value
    if type(value) is float:
        return type(value), value.hex() if value == value else struct.pack("d", value)
    if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
        return type(value), tuple(_constant(each) for each in value)  # in the order in which a program meets them
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return type(value), str(value.dtype), value.shape, value.tobytes()
    if type(value) in _WHOLE:
        return type(value), pickle.dumps(value)
    return _Itself(value)


_WHOLE = (complex, range, date, timedelta, Decimal, Fraction, UUID)
"""Types of values of which pickle leaves nothing out; a user's class may say otherwise of its own."""


@dataclass(frozen=True, eq=False)
class _Itself:
    """Any other object, which equals itself alone: two of them may differ in what nobody can see."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def refuse_repeated_records(data: object) -> None:
    """Raise DataError if a ``Subset`` or ``ConcatDataset`` names a record twice: its person would count twice."""
    if not isinstance(data, Subset | ConcatDataset):
        return
    places = _places(data)
    ordered = places[np.lexsort(places.T)]
    if (ordered[1:] == ordered[:-1]).all(axis=1).any():
        raise DataError(
            f"a {type(data).__name__} names records of its data set more than once (repeated indices, or the same "
            "data set concatenated with itself): a person would count more than once, and the noise is for one. "
            "Name each record once; weights belong into the loss."
        )


def _places(data: object) -> Rows:
    """(identity of a data set, place in it) of each record, through subsets and concatenations."""
    if isinstance(data, Subset):
        indices = np.asarray(data.indices, dtype=np.int64).reshape(-1)
        if isinstance(data.dataset, Subset | ConcatDataset):
            return _places(data.dataset)[indices]
        length = len(data.dataset) if isinstance(data.dataset, Sized) else 0
        return _at(data.dataset, np.where(indices < 0, indices + length, indices))
    if isinstance(data, ConcatDataset):
        return np.concatenate([_places(part) for part in data.datasets])
    return _at(data, np.arange(len(data) if isinstance(data, Sized) else 0))


def _at(data: object, indices: Rows) -> Rows:
    # Two TensorDatasets of the same tensors are one.
    identity = data.tensors[0].data_ptr() if type(data) is TensorDataset else id(data)
    return np.stack([np.full(len(indices), identity, np.int64), indices], axis=1)


def digest_of(tensor: Tensor) -> Tensor:
    """32 bytes that stand for a tensor which is not kept."""
    digest = hashlib.sha256()
    for part in bytes_of(tensor):
        digest.update(part)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """Everything about a tensor, as bytes."""
    yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.numel():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
