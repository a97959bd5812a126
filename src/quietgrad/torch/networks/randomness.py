"""Randomness inside a query: every record draws its own, from a secret of the release and its own number.

A number drawn for record i is a function of (key of the release, i, number of the draw) and of nothing else: the
same at both points of a difference, in one pass or many, on one process or several. Given the key, a record's
contribution is then a function of that record alone (docs/torch-proof.md).

The seeds PRF(key, i) are AES. What is made of a seed need not be: the proof asks that the records' masks be
independent of each other and of the data, and that holds whatever function makes a mask of a secret seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream, fresh_key
from quietgrad.torch.networks.trees import Args, Called, Options, name_of

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.integer[Any]]
Dtype = torch.dtype | None
Device = torch.device | str | None

_DRAW, _READ, _PASS, _SHARE, _RELEASE = range(5)  # blocks of a release's stream: one per purpose
_SIGNED = 1 << 63
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class RecordSeeds:
    """The secrets of some records in one release: record ``indices[k]`` belongs to row k."""

    key: bytes
    indices: Integers
    numbers: Integers | None = None
    """What words are drawn for, where that is not the record itself but one of its views."""

    @staticmethod
    def of(key: bytes | None, indices: Integers) -> RecordSeeds:
        """Keys of a release; without one (an evaluation, your own sums) of a fresh secret."""
        return RecordSeeds(fresh_key() if key is None else key, indices)

    @cached_property
    def draws(self) -> Words:
        """One word per record for what the model draws."""
        return self._words(_DRAW)

    @cached_property
    def reads(self) -> Words:
        """One word per record for what its data set draws: augmentation."""
        return self._words(_READ)

    @cached_property
    def shared(self) -> int:
        """One word of the release, for what all its records share."""
        return int(SecureStream(self.key, "records").at(_RELEASE, np.zeros(1, np.int64))[0])

    def rows(self, where: slice | Integers) -> RecordSeeds:
        return RecordSeeds(self.key, self.indices[where], None if self.numbers is None else self.numbers[where])

    def views(self, count: int) -> RecordSeeds:
        """Every record ``count`` times, one after the other, each time with a word of its own.

        >>> keys = RecordSeeds(bytes(32), np.array([7, 3])).views(2)
        >>> keys.indices.tolist(), len(set(keys.reads.tolist()))
        ([7, 7, 3, 3], 4)
        """
        indices = np.repeat(np.asarray(self.indices, np.int64), count)
        return RecordSeeds(self.key, indices, count * indices + np.tile(np.arange(count), len(self.indices)))

    def passes(self, most: int, sizes: Integers | None = None) -> Iterator[npt.NDArray[np.int64]]:
        """Rows in passes of at most ``most``: the leaves of a binary tree on the records' secret words.

        If these are units with ``sizes`` records each, a pass has at most ``most`` records, or one unit. A leaf
        holds the records whose words begin with its bits, so one record more or less changes the roundings of one
        pass (or joins two of ``most`` + 1 records together); cut by position, it would change all later ones.
        """
        total = len(self.indices)
        if (total if sizes is None else sizes.sum()) <= most:
            yield np.arange(total)
            return
        words = self._words(_PASS)
        order = np.argsort(words, kind="stable")
        before = np.arange(total + 1) if sizes is None else np.concatenate([[0], np.cumsum(sizes[order])])
        nodes = [(0, total, 63)]
        while nodes:
            low, high, bit = nodes.pop()
            if before[high] - before[low] <= most or high - low == 1 or bit < 0:
                if high > low:
                    yield np.sort(order[low:high])
                continue
            ones = (words[order[low:high]] >> np.uint64(bit)) & np.uint64(1)
            middle = low + int(np.searchsorted(ones, 1))
            nodes += [(middle, high, bit - 1), (low, middle, bit - 1)]

    def dealt(self, count: int, most: int) -> list[npt.NDArray[np.int64]]:
        """Rows in ``count`` parts of at most ``most``, by secret words; more where ``count·most`` rows are too few.

        In the order of their words, rows go into the part that their word says, or into the next that has room. One
        record less lets those move up that it had displaced, one in each part, in few parts.
        """
        words = self._words(_PASS)
        wanted, room = (words % np.uint64(count)).tolist(), max(most, -(-len(words) // count))
        parts: list[list[int]] = [[] for _ in range(count)]
        for row in np.argsort(words, kind="stable").tolist():
            part = wanted[row]
            while len(parts[part]) == room:
                part = (part + 1) % count
            parts[part].append(row)
        return [np.sort(np.array(part, np.int64)) for part in parts]

    def share(self, rank: int, world: int) -> npt.NDArray[np.bool_]:
        mine: npt.NDArray[np.bool_] = self._words(_SHARE) % np.uint64(world) == rank
        return mine

    def _words(self, block: int) -> Words:
        numbers = self.indices if self.numbers is None else self.numbers
        return SecureStream(self.key, "records").at(block, np.asarray(numbers, np.int64))


class UnplannedDraw(RuntimeError):
    """A draw that cannot be given to the records of a batch one by one."""


class PerRecordRNG(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws random numbers for each record of a batch from that record's own stream.

    Args:
        words: the records' secret words.
        together: whether the draws are vmap's for all records, which lie on the first axis; else there is one
            record, and all is drawn for it.
    """

    def __init__(self, words: Words, together: bool, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.words = torch.from_numpy(words.view(np.int64).copy()).to(device)
        self.together = together
        self.number = 0

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Args = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # All arguments by name: what equals its default does not arrive.
        schema = func._schema.arguments
        named = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        given = {argument.name: named.get(argument.name, argument.default_value) for argument in schema}
        if given.get("dropout_p") == 0.0 or given.get("dropout") == 0.0:
            return func(*args, **kwargs)  # fused attention and recurrent layers draw for dropout only
        self.number += 1
        refuse_own_generator(func._overloadpacket.__name__, given.values())
        make = _MAKERS.get(func._overloadpacket.__name__)
        if make is not None:
            given.pop("generator", None)
            return make(self, *given.values())
        if self.together:
            raise UnplannedDraw(f"{func} cannot be drawn for each record of a batch.")
        seed_generators(int(_mixed(self.words + _signed(self.number << 40))[0]) % 2**64)
        return func(*args, **kwargs)

    def mask(self, shape: Sequence[int], chance: float) -> Tensor:
        """True with the given chance: what a dropout of this shape would draw."""
        self.number += 1
        return self.below(shape, chance)

    def numbers(self, shape: Sequence[int]) -> Tensor:
        """Words of 64 uniform bits, of the given shape: splitmix64 of (record's word, draw, place)."""
        count, size = len(self.words), prod(shape)
        if self.together and (not shape or shape[0] % count):
            raise UnplannedDraw(f"a draw of shape {tuple(shape)} has no row for each of {count} examples.")
        places = torch.arange(1, size // max(count, 1) + 1, device=self.words.device)
        counters = (places + ((self.number - 1) << 40)) * _signed(0x9E3779B97F4A7C15)
        return _mixed(self.words[:, None] + counters).view(shape)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        bits = _BITS.get(dtype, 53)
        words = _shifted(self.numbers(shape), 64 - bits)
        return words.to(torch.float64 if bits == 53 else dtype) * 2.0**-bits

    def normal(self, shape: Sequence[int]) -> Tensor:
        words = _shifted(self.numbers(shape), 11)
        result: Tensor = torch.special.ndtri((words.double() + 0.5) * 2.0**-53)
        return result

    def below(self, shape: Sequence[int], chance: float | Tensor) -> Tensor:
        words = _shifted(self.numbers(shape), 11)
        if isinstance(chance, Tensor):
            return words.double() * 2.0**-53 < chance
        return words < int(chance * 2**53)


def _dropout(rng: PerRecordRNG, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = rng.below(x.shape, 1.0 - p)
    return x * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


def _bernoulli(rng: PerRecordRNG, x: Tensor, p: float | Tensor | None = None) -> Tensor:
    chance = x if p is None else p
    if isinstance(chance, Tensor):
        chance = chance.expand(x.shape)
    return rng.below(x.shape, chance).to(x.dtype)


def _shaped(draw: Callable[[PerRecordRNG, Sequence[int], torch.dtype], Tensor]) -> Callable[..., Tensor]:
    def make(
        rng: PerRecordRNG, size: Sequence[int], dtype: Dtype = None, _: object = None, device: Device = None,
        *rest: object,
    ) -> Tensor:  # fmt: skip
        dtype = dtype or torch.get_default_dtype()
        return draw(rng, size, dtype).to(device or "cpu", dtype)

    return make


def _alike(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def like(rng: PerRecordRNG, x: Tensor, dtype: Dtype, _: object, device: Device, *rest: object) -> Tensor:
        return make(rng, x.shape, dtype or x.dtype, None, device or x.device)

    return like


_RAND, _RANDN = _shaped(PerRecordRNG.uniform), _shaped(lambda rng, size, _: rng.normal(size))
# By name of the operation, with the arguments of its schema but the generator. What is not here is drawn by torch's
# own generator, seeded for one record at a time.
_MAKERS: dict[str, Callable[..., Any]] = {
    "native_dropout": _dropout,
    "bernoulli": _bernoulli,
    "bernoulli_": lambda rng, x, p: x.copy_(_bernoulli(rng, x, p)),
    "rand": _RAND,
    "randn": _RANDN,
    "rand_like": _alike(_RAND),
    "randn_like": _alike(_RANDN),
    "uniform_": lambda rng, x, low, high: x.copy_(low + (high - low) * rng.uniform(x.shape, x.dtype)),
    "normal_": lambda rng, x, mean, std: x.copy_(mean + std * rng.normal(x.shape)),
    "exponential_": lambda rng, x, rate: x.copy_(-torch.log1p(-rng.uniform(x.shape, torch.float64)) / rate),
}


def refuse_own_generator(name: str, given: Iterable[object]) -> None:
    """Raise DataError if a draw is from a generator that is not seeded for each record."""
    if any(isinstance(value, torch.Generator) for value in given):
        raise DataError(
            f"{name} draws from a torch.Generator of the model's own: what a record gets would depend on who came "
            "before it. Draw from torch's default generator; it is seeded per record."
        )


class OwnGenerators(TorchFunctionMode):
    """Refuses draws from generators of a program's own, where no other mode sees what it draws."""

    def __torch_function__(self, func: Called, types: object, args: Args = (), kwargs: Options = None) -> Any:
        if kwargs:
            refuse_own_generator(name_of(func), kwargs.values())
        return func(*args, **(kwargs or {}))


def _shifted(words: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's own copies the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _mixed(words: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _signed(word: int) -> int:
    word %= 2 * _SIGNED
    return word - 2 * _SIGNED if word >= _SIGNED else word


def seed_generators(word: int) -> None:
    """Let torch, numpy and Python draw what follows from ``word``."""
    # Not torch.manual_seed: for accelerators that are not in use it files a stack trace, 3 ms a call.
    torch.default_generator.manual_seed(word % _SIGNED)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(word % _SIGNED)
    np.random.seed([word % 2**32, word >> 32 & 0xFFFFFFFF])  # noqa: NPY002
    random.seed(word)


@contextmanager
def preserved() -> Iterator[None]:
    """The generators of torch, numpy and Python are afterwards as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
