"""How records are read and put together, and what is refused about a data set before any is.

Row k of a batch must be made of record k alone, with random numbers that are its own, and a person must be one
record. A data set is asked for this once. A collate function is watched in every call: it could mix records with a
small chance, on few batches, or put them into another order, where no trial beforehand sees it.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from quietgrad.errors import DataError
from quietgrad.objectives.networks.held_generators import refuse_held_generators
from quietgrad.objectives.networks.randomness import generators, preserved, seed_generators
from quietgrad.objectives.networks.rows_read import watched

__all__ = ["Collate", "collated", "draws_nothing", "leaves_of", "read_record", "refuse_mixing_collate",
           "refuse_own_generators", "refuse_reading_others", "refuse_repeated_records"]  # fmt: skip

Collate = Callable[[list[Any]], Any]

_RECORDS = 24  # tried beforehand
_ROWS = 16  # of a batch, compared with what they are alone


def draws_nothing(data: Any) -> bool:
    """Whether reading a record is known to draw no random numbers: tensors in memory, and parts of them."""
    while type(data) is Subset:
        data = data.dataset
    return type(data) is TensorDataset


def read_record(data: Any, index: int, word: int) -> Any:
    """Record ``index``, whose augmentation draws from generators seeded for it alone."""
    seed_generators(word)
    return data[index]


def collated(collate: Collate, samples: list[Any]) -> Any:
    """``collate(samples)``, whose row k is made of sample k alone, without random numbers.

    Raises DataError if random numbers were drawn, or if one of the rows looked at is not what it is in a batch of
    its own. It need not be as long: a batch may pad its records to the longest.

    >>> collated(lambda samples: torch.tensor(sorted(samples)), [3.0, 1.0])
    Traceback (most recent call last):
    ...
    quietgrad.errors.DataError: collate_fn gives rows in another order than the samples of its list...
    """
    if collate is default_collate:
        return collate(samples)
    batch = _without_drawing(collate, samples)
    if len(samples) < 2:
        return batch
    for row in _spread(len(samples), _ROWS):
        _compare(collate, batch, samples, row)
    return batch


def _without_drawing(collate: Collate, samples: list[Any]) -> Any:
    # A copy: a list that is sorted, or a dictionary that is emptied, must not be what the rows are compared with.
    given = [dict(sample) if type(sample) is dict else sample for sample in samples]
    with preserved():
        before = _standing()
        batch = collate(given)
        drew = _standing() != before
    if drew:
        raise DataError(
            "collate_fn draws random numbers (mixup, cutmix, a crop of the batch): they would be the batch's and "
            "not each record's own. What augments one record alone belongs into __getitem__, where random "
            "numbers are seeded for that record; mixing records must be left out, there too."
        )
    return batch


def _compare(collate: Collate, batch: Any, samples: list[Any], row: int) -> None:
    single = _without_drawing(collate, [samples[row]])
    together, alone = _arrays(batch), _arrays(single)
    for tensor in (*together, *alone):
        count = len(samples) if any(tensor is one for one in together) else 1
        if tensor.dim() < 1 or len(tensor) != count:
            raise DataError(
                f"collate_fn made a tensor of shape {tuple(tensor.shape)} of {count} samples: examples "
                "must be its first dimension (batch_first), so that it is known which row is whose."
            )

    if _constants(batch) != _constants(single):
        raise DataError(
            "collate_fn makes a number or a text of the whole batch (a mean, a longest length): what a model does "
            "with it would make every row depend on the others. Leave it out, or give each record its own in a "
            "tensor."
        )

    def is_at(place: int) -> bool:
        pairs = zip(together, alone, strict=True)
        return len(together) == len(alone) and all(_begins_alike(a[place], b[0]) for a, b in pairs)

    if is_at(row):
        return
    if any(is_at(other) for other in range(len(samples))):
        raise DataError(
            "collate_fn gives rows in another order than the samples of its list (it sorts them?): random numbers "
            "and gradients would be counted for the wrong records. Leave the order as it is; "
            "pack_padded_sequence(..., enforce_sorted=False) needs no sorted batch."
        )
    raise DataError(
        "collate_fn makes a record's row depend on the other records of its batch (mixup, cutmix, padding in "
        "front), or on what it did before: one record would then be in many contributions. Make each row of its "
        "own sample alone and pad at the end; mixing records must be left out, in __getitem__ too."
    )


def _arrays(batch: Any) -> list[Tensor]:
    """The tensors of a batch, and its arrays of numbers as tensors."""
    leaves = [leaf for leaf in leaves_of(batch) if not isinstance(leaf, np.ndarray) or leaf.dtype.kind in "biuf"]
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]


def _constants(batch: Any) -> list[Any]:
    """Numbers and texts of a batch that are not one for each record, by where they are."""
    if not isinstance(batch, dict | UserDict | tuple | list):
        return []
    items = batch.items() if isinstance(batch, dict | UserDict) else enumerate(batch)
    found: list[Any] = []
    for place, item in items:
        if isinstance(item, bool | int | float | str | np.generic):
            found.append((place, item))
        elif isinstance(item, dict | UserDict):
            found.append((place, _constants(item)))
    return found


def _standing() -> tuple[Any, ...]:
    """Where all generators stand."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = (torch.default_generator.get_state(), *devices)
    return generators(), *(state.numpy().tobytes() for state in states)


def refuse_mixing_collate(data: Any, collate: Collate) -> None:
    """Raise DataError if ``collate`` draws, or makes a record's row depend on the others of its batch."""
    if collate is default_collate:
        return
    refuse_held_generators(collate, "collate_fn")
    places = _spread(len(data), _RECORDS)
    with preserved():
        samples = [read_record(data, place, seed) for seed, place in enumerate(places)]
    for some in (samples, samples[::-1], samples[::2], samples[1::2], samples[:2], samples[-3:], samples * 2):
        if some:
            collated(collate, some)


def refuse_own_generators(data: Any) -> None:
    """Raise DataError if the data set holds a generator, or a record read twice with one seed is not the same."""
    if draws_nothing(data):
        return
    refuse_held_generators(data, "the data set")
    places = _spread(len(data), _RECORDS)
    with preserved():
        first = {place: list(leaves_of(read_record(data, place, 1))) for place in places}
        again = {place: list(leaves_of(read_record(data, place, 1))) for place in reversed(places)}
    refuse_reading_others(data)
    for place in places:
        a, b = first[place], again[place]
        if len(a) != len(b) or not all(_equal(*pair) for pair in zip(a, b, strict=True)):
            raise DataError(
                "the data set gives another sample when a record is read again with the same seed: it draws from a "
                "generator of its own, or keeps a state. Draw from the generators of torch, numpy or random; they "
                "are seeded per record."
            )


def refuse_reading_others(data: Any) -> None:
    """Raise DataError if a record is seen to be read from other records' rows too (mixup, mosaic)."""
    while isinstance(data, Subset):
        data = data.dataset
    if isinstance(data, ConcatDataset):
        for part in data.datasets:
            refuse_reading_others(part)
        return
    if not hasattr(data, "__len__") or type(data) is TensorDataset:
        return
    for place in _spread(len(data), 8):
        with preserved(), watched(data) as rows, suppress(Exception):  # one that cannot be watched is not
            for word in range(4):
                read_record(data, place, word)
        mixed = [name for name, taken in rows.items() if len(taken) > 1]
        if mixed:
            raise DataError(
                f"the data set reads several rows of its {mixed[0]!r} for one record (mixup, mosaic, pairs): one "
                "person would be in many contributions. Make record i of row i alone; keep shapes and public "
                "constants in attributes of their own."
            )


def refuse_repeated_records(data: Any) -> None:
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


def _places(data: Any) -> npt.NDArray[np.int64]:
    """(identity of a data set, place in it) of each record, through subsets and concatenations."""
    if isinstance(data, Subset):
        indices = np.asarray(data.indices, dtype=np.int64).reshape(-1)
        if isinstance(data.dataset, Subset | ConcatDataset):
            return _places(data.dataset)[indices]
        length = len(data.dataset) if hasattr(data.dataset, "__len__") else 0
        return _at(data.dataset, np.where(indices < 0, indices + length, indices))
    if isinstance(data, ConcatDataset):
        return np.concatenate([_places(part) for part in data.datasets])
    return _at(data, np.arange(len(data)))


def _at(data: Any, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # Two TensorDatasets of the same tensors are one.
    identity = data.tensors[0].data_ptr() if type(data) is TensorDataset else id(data)
    return np.stack([np.full(len(indices), identity, np.int64), indices], axis=1)


def _spread(length: int, most: int) -> list[int]:
    """At most ``most`` places among ``length``, the first and the last with them."""
    return sorted({int(place) for place in np.linspace(0, length - 1, min(length, most)).round()})


def _begins_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two rows agree where both have entries: a batch may pad its records to the longest."""
    if a.dim() != b.dim():
        return False
    common = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
    a, b = a[common], b[common]
    if not (a.is_floating_point() and a.dtype == b.dtype):
        return _equal(a, b)
    # The last entries of a tensor are not computed by the same instructions: exp may differ in the last place.
    return torch.allclose(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=0.0, equal_nan=True)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) if a.shape == b.shape else False
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    by: Any = type(a).__eq__
    return by is object.__eq__ or bool(np.all((a == b) | (a != a)))  # the first: there is nothing to compare by


def leaves_of(value: Any) -> Iterator[Any]:
    """What a sample is made of, in order."""
    if isinstance(value, dict | UserDict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value
