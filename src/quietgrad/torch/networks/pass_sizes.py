"""Sizes of passes at which no bit of a record's numbers depends on what else is in the pass.

A network may expand rounding: a last bit that differs in one layer can decide where a gradient points sixty layers
on. So one record more must not change how the others are rounded, not even in the last bit. In tensors of given
shapes, kernels take the same course whatever the numbers are; the order of their additions may depend on a record's
place in the pass and on the size of the pass. Therefore

- a pass has one of few sizes (`pass_size`), and places that are left over hold copies of one of its own records;
- where products round rows by their alignment in memory (:mod:`quietgrad.torch.networks.same_bits`), a record has 4
  or 16 places, so that its rows begin at multiples of 16 or 64 bytes; all but the first of them hold copies;
- a layout is used only if passes of synthetic records in that very layout have shown that a record's numbers have
  the same bits at every place, and the bits that they have in the reference layout. A pass of one record needs no
  trial.

What a record contributes is then what a pass of copies of it contributes, however the records are put together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quietgrad.torch.networks.same_bits import rounds_rows_alike
from quietgrad.torch.networks.trees import PyTree, mapped, tensors_of
from quietgrad.torch.networks.vectors import Rows

REFERENCE = 16  # the size that others are compared with, unless memory has no room for it
_PLACES = 4, 16  # of a record whose rows are rounded by their alignment
SYNTHETIC = 7  # different records in a trial, again and again
_ALIGNED = 64  # bytes: kernels may add up otherwise in memory that begins elsewhere

Fingerprint = dict[int, bytes]
"""Digests of the bits of all numbers that a pass made of each synthetic record."""


class Layout(NamedTuple):
    """Layout of a pass: for how many records it has room, and how many places in a row each of them has."""

    size: int
    places: int = 1

    def rows(self, rows: Rows) -> Rows:
        """The row at each place; the first row is again where room is left over."""
        return np.repeat(np.concatenate([rows, np.repeat(rows[:1], self.size - len(rows))]), self.places)

    def first_places(self, count: int) -> slice:
        """The first place of each of ``count`` records."""
        return slice(0, count * self.places, self.places)


Trial = Callable[[Layout, Rows, int], "Fingerprint | Rows | None"]
"""Runs some passes with synthetic records, each of which comes to a place that another one had. ``Rows`` are those
that go one way, if not all do; ``None``: a pass failed, or a record's bits depend on its place."""


def pass_size(count: int) -> int:
    """The size of a pass for ``count`` records: at most an eighth more, so that there are few sizes.

    >>> [pass_size(count) for count in (1, 15, 16, 17, 33, 64, 65, 1024)]
    [1, 15, 16, 18, 36, 64, 72, 1024]
    """
    step = 1 if count <= REFERENCE else 1 << (count.bit_length() - 4)
    return -(-count // step) * step


class PassSizes:
    """The layouts that were tried for records of one form."""

    def __init__(self) -> None:
        self._agreed: dict[tuple[Layout, Layout], bool] = {}  # by layout and reference

    def fitting(self, count: int, most: int | None, trial: Trial) -> Layout:
        """The layout of the next pass for ``count`` records; if it has room for fewer, the others wait.

        ``most`` places fit into memory.
        """
        reference = self._reference(most, trial)
        if reference.size == 1:
            return reference
        room = None if most is None else most // reference.places
        if room is not None and pass_size(count) > room:
            count = max(size for size in range(1, room + 1) if pass_size(size) == size)
        larger = (1 << power for power in range(reference.size.bit_length()))  # up to the reference
        for size in (pass_size(count), *(size for size in larger if size > count)):
            layout = Layout(size, reference.places)
            if layout == reference or self._agree(layout, reference, trial):
                return layout
        return reference

    def _reference(self, most: int | None, trial: Trial) -> Layout:
        """The largest layout up to the usual reference, with the fewest places, that memory has room for."""
        choices = (1,) if rounds_rows_alike() else _PLACES
        for size in (REFERENCE, *(1 << power for power in range(REFERENCE.bit_length() - 1, 0, -1))):
            for places in choices:
                layout = Layout(size, places)
                if (most is None or size * places <= most) and self._agree(layout, layout, trial):
                    return layout
        return Layout(1)

    def _agree(self, layout: Layout, reference: Layout, trial: Trial) -> bool:
        """Whether records have the same bits in passes of both layouts, at every place."""
        key = layout, reference
        if key not in self._agreed:
            self._agreed[key] = _same_bits({layout, reference}, trial)
        return self._agreed[key]


def _same_bits(layouts: Collection[Layout], trial: Trial) -> bool:
    """Whether records have the same bits in these layouts, at the present parameters.

    Two passes link the places of the reference. Every place of another layout is compared with the reference.
    """
    records, passes, count = np.arange(SYNTHETIC), [], 2 if len(layouts) == 1 else 1
    for layout in layouts:
        bits = trial(layout, records, count)
        while isinstance(bits, np.ndarray) and len(bits) < len(records):  # the others branch off
            records, bits = bits, trial(layout, bits, count)
        if not isinstance(bits, dict):
            return False
        passes.append(bits)
    return joined(passes) is not None


class BitComparison:
    """Comparison of the numbers of a pass in which synthetic records come again and again.

    Only the first of a record's ``places`` counts.
    """

    def __init__(self, records: Rows, places: int = 1) -> None:
        self.same, self._places, records = True, places, records[::places]
        numbers, first, which = np.unique(records, return_index=True, return_inverse=True)
        self._first = dict(zip(numbers.tolist(), first.tolist(), strict=True))
        self._model = torch.from_numpy(first[which])  # the first place with the same record
        self._digests = {number: hashlib.sha256() for number in self._first}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Numbers of all places, (n, …)."""
        for tensor in tensors:
            if not tensor.numel():
                continue
            tensor = tensor[:: self._places]
            bits = tensor.detach().cpu().contiguous().reshape(len(tensor), -1).view(torch.uint8)
            self.same = self.same and torch.equal(bits, bits[self._model])
            for number, place in self._first.items():
                self._digests[number].update(bits[place].numpy().data)

    def fingerprint(self) -> Fingerprint | None:
        return {number: digest.digest() for number, digest in self._digests.items()} if self.same else None


def joined(fingerprints: Sequence[Fingerprint]) -> Fingerprint | None:
    """One fingerprint of several passes; ``None`` if a record's bits differ between them."""
    whole: dict[int, bytes] = {}
    for each in fingerprints:
        if any(whole.setdefault(number, bits) != bits for number, bits in each.items()):
            return None
    return whole


def placed(tensor: Tensor, rows: Rows) -> Tensor:
    """The records at ``rows``, as every pass holds them: contiguous, from an address as torch allocates."""
    if len(rows) != len(tensor) or not np.array_equal(rows, np.arange(len(tensor))):
        return tensor[torch.from_numpy(rows).to(tensor.device)].contiguous()
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED else tensor


def without_zeros(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters for a trial: products with 0 have the same bits in any order."""
    generator = torch.Generator().manual_seed(0)

    def changed(param: Tensor) -> Tensor:
        zero = param.detach() == 0
        if not bool(zero.any()):
            return param
        small = (torch.rand(param.shape, generator=generator) - 0.5) / 25
        return torch.where(zero, small.to(param), param.detach())

    return {name: changed(param) for name, param in params.items()}


def form_of(record: PyTree) -> tuple[Any, ...]:
    """What decides which kernels run: the record's shapes, and settings of torch's that kernels are chosen by."""
    shapes = tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors_of(record))
    settings = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
    return shapes, *settings


def synthetic_like(record: PyTree, numbers: str, count: int = SYNTHETIC) -> Any:
    """Records of the same shape: floats uniform in [0, 1), whole numbers 0 and 1, all 1, or all 0."""
    generator = torch.Generator().manual_seed(0)

    def synthetic(tensor: Tensor) -> Tensor:
        shape = (count, *tensor.shape[1:])
        if tensor.is_floating_point() or tensor.is_complex():
            # With all the bits of float64: products of shorter numbers are not rounded, so no trial would see it.
            return torch.rand(shape, generator=generator, dtype=torch.float64).to(tensor)
        if numbers == "few":
            return torch.randint(0, 2, shape, generator=generator).to(tensor)
        return (torch.ones(shape) if numbers == "ones" else torch.zeros(shape)).to(tensor)

    return mapped(record, synthetic)
