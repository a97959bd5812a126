"""Per-example gradients of one parameter, stored or factored, of records or of privacy units.

Every private step needs two things of the per-example gradients g_i: their norms, and a weighted sum Σ_i c_i g_i
once the norms have decided the weights. `PerExampleVectors` gives both for one parameter. Steps that compare two
points θ and θ′ (SPIDER, DP-SRM) ask for several *families* of vectors at once, so norms and weights have shape
(examples, families):

    gradient   v_i = g_i(θ)
    change     v_i = g_i(θ) − s·g_i(θ′)        s = 1: the difference; s = 1 − γ: joint momentum

The change is never computed by subtracting two large norms. For layers whose gradient is Σ_t b_t ⊗ a_t it is split
as (a − a′) ⊗ b + a′ ⊗ (b − s·b′), which loses no digits when θ′ → θ. Where both families are stored, the change is
the difference of two stored vectors: its norm is that of the very vector that is summed.

A unit with several records has v_p = s_p Σ_{i∈p} g_i, with s_p = 1 or one over its number of records. That is the
gradient of one example with all positions of all its records, so the same products serve, of longer sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quietgrad.objectives.networks import compiled_sums
from quietgrad.objectives.networks.randomness import RecordSeeds

_Numbers = npt.NDArray[np.int64]


class SizeBucket(NamedTuple):
    """People with about as many records, to be worked on as one batch: their records side by side."""

    people: Tensor  # (some,)
    rows: Tensor  # (some, most): rows of the batch; behind a person's last record the last one again …
    blank: Tensor | None  # … where this is True; None: nowhere
    run: slice | None  # the rows as a range, if they are one

    def of(self, values: Tensor, blank: bool = True) -> Tensor:
        """The rows as (some, most, …), zero where they are nobody's.

        Zero by assignment: a product with zero would keep what is not finite.
        """
        if self.run is not None:
            return values[self.run].view(*self.rows.shape, *values.shape[1:])
        taken = values.index_select(0, self.rows.flatten()).view(*self.rows.shape, *values.shape[1:])
        if blank and self.blank is not None:
            taken.masked_fill_(self.blank.view(*self.blank.shape, *[1] * (taken.dim() - 2)), 0.0)
        return taken


@dataclass(frozen=True, eq=False)
class UnitAssignment:
    """The person of each row of a batch, 0 … count − 1, and the factor s_p of each.

    >>> persons = UnitAssignment.of([7, 3, 7], mean=True)
    >>> persons.owners.tolist(), persons.factors.tolist()
    ([1, 0, 1], [1.0, 0.5])
    """

    owners: _Numbers
    factors: npt.NDArray[np.float64]

    @staticmethod
    def of(ids: Any, *, mean: bool) -> UnitAssignment:
        """By any ids, one for each row."""
        _, owners = np.unique(np.asarray(ids), return_inverse=True)
        return UnitAssignment.numbered(owners.astype(np.int64).reshape(-1), mean=mean)

    @staticmethod
    def numbered(owners: _Numbers, *, mean: bool) -> UnitAssignment:
        """By numbers 0 … count − 1, each of which occurs."""
        sizes = np.bincount(owners)
        return UnitAssignment(owners, 1.0 / sizes if mean else np.ones(len(sizes)))

    def __len__(self) -> int:
        return len(self.factors)

    @cached_property
    def sizes(self) -> _Numbers:
        """How many rows each has."""
        return np.bincount(self.owners, minlength=len(self))

    @property
    def single(self) -> bool:
        """Whether everyone has one row, in order, that counts in full: then there is nothing to add up."""
        alone = len(self.owners) == len(self) and bool((self.factors == 1.0).all())
        return alone and bool((np.diff(self.owners) == 1).all())

    def some(self, people: _Numbers) -> tuple[_Numbers, UnitAssignment]:
        """Rows of some people, person by person, and whose they are among these; of everybody, as they are."""
        if len(people) == len(self):
            return np.arange(len(self.owners)), self
        order, starts = self._sorted
        sizes = self.sizes[people]
        before = np.cumsum(sizes) - sizes
        rows = order[np.arange(sizes.sum()) + np.repeat(starts[people] - before, sizes)]
        return rows, UnitAssignment(np.repeat(np.arange(len(people)), sizes), self.factors[people])

    def passes(self, keys: RecordSeeds, most: int) -> Iterator[_Numbers]:
        """People in passes of at most ``most`` records, each person in one; who has more than that is alone.

        By the secret word of each one's first record, as :meth:`RecordSeeds.passes` cuts records.
        """
        first = np.full(len(self), len(self.owners))
        np.minimum.at(first, self.owners, np.arange(len(self.owners)))
        return keys.rows(first).passes(most, self.sizes)

    def alike(self, device: torch.device) -> list[SizeBucket]:
        """Everyone, in groups of about as many records: two groups to a doubling."""
        if device not in self._alike:
            self._alike[device] = list(self._groups(device))
        return self._alike[device]

    @cached_property
    def _alike(self) -> dict[torch.device, list[SizeBucket]]:
        return {}

    @cached_property
    def _sorted(self) -> tuple[_Numbers, _Numbers]:
        """Rows person by person, and where each one's begin among these."""
        return np.argsort(self.owners, kind="stable"), np.concatenate([[0], np.cumsum(self.sizes)])

    def _groups(self, device: torch.device) -> Iterator[SizeBucket]:
        order, starts = self._sorted
        steps = np.ceil(2 * np.log2(self.sizes))
        for step in np.unique(steps):
            people = np.flatnonzero(steps == step)
            sizes = self.sizes[people, None]
            place = np.arange(sizes.max())
            rows, blank = order[starts[people, None] + np.minimum(place, sizes - 1)], place >= sizes
            yield SizeBucket(
                torch.from_numpy(people).to(device),
                torch.from_numpy(rows).to(device),
                torch.from_numpy(blank).to(device) if blank.any() else None,
                None if blank.any() else _run(rows.reshape(-1)),
            )

    def numbers(self, device: torch.device) -> Tensor:
        """The person of each row, on a device."""
        return torch.from_numpy(self.owners).to(device)

    def summed(self, values: Tensor) -> Tensor:
        """(families, rows, size) added up to (families, people, size), in float64 and rounded once.

        Never as a product with a matrix of zeros and ones: it would carry one record's NaN to everybody.
        """
        if compiled_sums.takes(values):
            return torch.stack([compiled_sums.sum_rows(family, *self._sorted) for family in values])
        total = values.new_zeros((len(values), len(self), values.shape[2]), dtype=torch.float64)
        return total.index_add_(1, self.numbers(values.device), values.double()).to(values.dtype)


def _run(rows: _Numbers) -> slice | None:
    """Row numbers as a range, if they are one."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if np.array_equal(rows, first + np.arange(len(rows))) else None


_CACHED = 1 << 17  # numbers of float64 that stay in a core's cache
_SLAB = 1 << 22  # numbers per piece of workspace; untouched pages cost nothing


@dataclass(frozen=True)
class GradientTerms:
    """Which families of per-example vectors a query needs."""

    gradient: bool
    change: bool
    scale: float = 1.0

    @property
    def families(self) -> int:
        """Number of vectors per example."""
        return int(self.gradient) + int(self.change)

    def join(self, now: Tensor, change: Tensor | None, dim: int) -> Tensor:
        """The asked-for families one after the other along `dim`."""
        if change is None:
            return now
        return torch.cat([now, change], dim) if self.gradient else change

    def stored(self, now: Tensor, change: Tensor | None) -> Stored:
        """The asked-for families of vectors (examples, size)."""
        return Stored(self.join(now[None], None if change is None else change[None], 0))


class LayerCall(NamedTuple):
    """One call of a layer: its input and the gradient of the summed loss by its output."""

    input: Tensor
    output_grad: Tensor


class StoredGradients(NamedTuple):
    """The previous point of a layer, reduced to its per-example vectors: the tape behind them is free.

    `vectors` by parameter: (examples, size), or for outer-product weights room for both families,
    (2, examples, outputs, fan-in), whose second half holds g_i(θ′).
    """

    vectors: dict[str, Tensor]


class PerExampleVectors(Protocol):
    """Per-example vectors of one parameter; after :meth:`together` per person."""

    def squared_norms(self) -> Tensor:
        """‖v_i‖² of what `add_weighted` adds, from above, shape (examples, families), in float64."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out += Σ_i Σ_f weights[i, f] · v_{i,f}; `out` is the parameter's slice of the flat vector, in float64.

        In float32 a sum of m vectors is off by up to m·2⁻²⁴·mC, and by another amount without one of them.
        """
        ...

    def together(self, persons: UnitAssignment) -> PerExampleVectors:
        """The vectors Σ_{i∈p} v_i of people whose records these examples are; norms and weights are then theirs.

        What is measured of a person is what is summed, as for an example.
        """
        ...


class Workspace:
    """Memory for per-example vectors, kept from step to step so that no step pays for fresh pages.

    Grants requests in order until `limit` bytes are used; what is granted depends on sizes alone. When batches
    of changing size have left more than half as much idle as they used, it starts afresh.
    """

    def __init__(self, limit: float, like: Tensor) -> None:
        self.dtype = like.dtype
        self.limit = limit
        self._like = like
        self._capacity = limit / like.element_size()
        self._slabs: list[Tensor] = []
        self._used = self._slab = self._offset = self._reserved = 0

    def reset(self, reserved: int = 0) -> None:
        """Take everything back. ``reserved`` numbers are kept elsewhere, and count."""
        if sum(map(len, self._slabs)) > 1.5 * (self._used - self._reserved) + _SLAB:
            self._slabs.clear()
        self._slab = self._offset = 0
        self._used = self._reserved = reserved

    def take(self, *shape: int) -> Tensor | None:
        """Uninitialised memory, or None if the limit is reached."""
        size = prod(shape)
        if self._used + size > self._capacity:
            return None
        self._used += size
        while self._slab < len(self._slabs) and self._offset + size > len(self._slabs[self._slab]):
            self._slab, self._offset = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(self._like.new_empty(max(size + size // 8, _SLAB)))  # the next batch may be larger
        start, self._offset = self._offset, self._offset + size
        return self._slabs[self._slab][start : self._offset].view(shape)


class Stored:
    """Per-example vectors written out: values of shape (families, examples, size), and their norms if known."""

    def __init__(self, values: Tensor, squares: Tensor | None = None) -> None:
        self.values = values
        self._squares = squares

    def join(self, other: Stored) -> None:
        """Add the vectors of another use of the same parameter; only the sums have norms."""
        self.values = self.values + other.values  # not in place: the values may be views of the tape
        self._squares = None

    def squared_norms(self) -> Tensor:
        """Sums of squares."""
        return squares_of(self.values).T if self._squares is None else self._squares

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """A matrix–vector product in float64, some rows at a time so that the wider copy stays in the cache."""
        rows, weights = self.values.flatten(0, 1), weights.T.flatten().double()
        if compiled_sums.takes(rows) and out.is_contiguous():
            compiled_sums.add_rows(rows, weights, out)
            return
        if rows.dtype == torch.float64:
            out.addmv_(rows.T, weights)
            return
        size = max(1, _CACHED // max(1, rows.shape[1]))
        for start in range(0, len(rows), size):
            out.addmv_(rows[start : start + size].double().T, weights[start : start + size])

    def together(self, persons: UnitAssignment) -> Stored:
        """Sums of written-out vectors, which have norms of their own."""
        return Stored(persons.summed(self.values))


class TokenSums:
    """Embedding rows: each example touches a few rows of the table, each with a sum of output gradients."""

    def __init__(self, tokens: Tensor, values: Tensor, rows: int, persons: UnitAssignment | None = None) -> None:
        self.tokens = tokens  # (examples, positions)
        self.values = values  # (examples, positions, families, width)
        self.rows = rows
        self._persons = persons

    def squared_norms(self) -> Tensor:
        """A token that occurs twice in an example, or in a person's records, adds up before it is squared.

        The sums may cancel. In float64, of P terms, they are off by at most γ_P·Σ_t ‖b_t‖: it is added, twice.
        """
        count, terms, owners = self._owners()
        keys, where = torch.unique(owners[:, None] * self.rows + self.tokens, return_inverse=True)
        sums = self.values.new_zeros((len(keys), *self.values.shape[2:]), dtype=torch.float64)
        for part in self._parts():
            sums.index_add_(0, where[part].flatten(), self.values[part].flatten(0, 1).double())
        squares = sums.new_zeros((count, self.values.shape[2]))
        squares.index_add_(0, keys // self.rows, squares_of(sums))
        longest = torch.zeros_like(squares).index_add_(0, owners, squares_of(self.values).sqrt().sum(1))
        return (squares.sqrt() + 2 * (terms + 8) * 2.0**-53 * longest).square()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Scatter the weighted output gradients into the table."""
        # Weighted in float64: where a token's gradients cancel, what rounding leaves of each would count in full.
        table, shares = out.view(self.rows, -1), weights.double()[self._owners()[2], None, :, None]
        for part in self._parts():
            weighted = (self.values[part] * shares[part]).sum(2)
            table.index_add_(0, self.tokens[part].flatten(), weighted.flatten(0, 1))

    def _parts(self) -> list[slice]:
        """A few examples at a time, so that the wider copy stays in the cache."""
        examples, *shape = self.values.shape
        size = max(1, _CACHED // max(1, prod(shape)))
        return [slice(start, start + size) for start in range(0, examples, size)]

    def together(self, persons: UnitAssignment) -> TokenSums:
        """The same rows, looked at person by person."""
        return TokenSums(self.tokens, self.values, self.rows, persons)

    def of(self, group: SizeBucket) -> TokenSums:
        """Those of a group of people: somebody's tokens are those of all their records."""
        tokens, values = group.of(self.tokens, blank=False), group.of(self.values)
        return TokenSums(tokens.flatten(1, 2), values.flatten(1, 2), self.rows)

    def _owners(self) -> tuple[int, int, Tensor]:
        """How many examples or people there are, the most positions one has, and whose each example is."""
        examples, positions = self.tokens.shape
        if self._persons is None:
            return examples, positions, torch.arange(examples, device=self.tokens.device)
        most = int(self._persons.sizes.max())
        return len(self._persons), positions * most, self._persons.numbers(self.tokens.device)

    def dense(self) -> Stored:
        """The same vectors written out, for a table that other layers use as well."""
        examples, _, families, width = self.values.shape
        values = self.values.new_zeros((families, examples, self.rows, width))
        index = self.tokens[None, :, :, None].expand(families, -1, -1, width)
        values.scatter_add_(2, index, self.values.permute(2, 0, 1, 3))
        return Stored(values.flatten(2))


class UnitVectors:
    """Vectors of people, a group with about as many records at a time; only that group's rows are copied.

    Args:
        examples: what they are made of.
        make: the contribution of a group's people.
        from_factors: whether a weighted sum of a group's examples is one of the very vectors measured.
    """

    def __init__(
        self,
        persons: UnitAssignment,
        groups: Sequence[SizeBucket],
        examples: PerExampleVectors,
        make: Callable[[SizeBucket], PerExampleVectors],
        from_factors: Callable[[SizeBucket], bool] = lambda group: False,
    ) -> None:
        self.persons = persons
        self.groups = groups
        self.examples = examples
        self.make = make
        self.from_factors = from_factors

    def squared_norms(self) -> Tensor:
        """Everyone's, from their group."""
        found = [self.make(group).squared_norms() for group in self.groups]
        squares = found[0].new_empty((len(self.persons), found[0].shape[1]))
        for group, part in zip(self.groups, found, strict=True):
            squares[group.people] = part
        return squares

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """All examples of groups whose factors were measured at once; what was written out group after group."""
        whole = [group for group in self.groups if self.from_factors(group)]
        apart = self.groups
        if 2 * sum(group.rows.numel() for group in whole) >= len(self.persons.owners):
            kept = torch.zeros_like(weights)  # times numbers that are finite, since the norms were
            for group in whole:
                kept[group.people] = weights[group.people]
            self.examples.add_weighted(kept[self.persons.numbers(weights.device)], out)
            apart = [group for group in self.groups if not self.from_factors(group)]
        for group in apart:
            self.make(group).add_weighted(weights[group.people], out)

    def together(self, persons: UnitAssignment) -> PerExampleVectors:
        """These are people already."""
        raise TypeError("person: these records are grouped by person already.")


def squares_of(vectors: Tensor) -> Tensor:
    """Sums of squares along the last axis, in float64, a piece at a time so that the wider copy stays in the cache.

    Squares of float32 are exact there, and none vanishes; summed in float32, millions of them lose some per mille.
    """
    rows = vectors.reshape(-1, vectors.shape[-1])
    count, width = rows.shape
    if compiled_sums.takes(rows):
        return compiled_sums.row_squares(rows).view(vectors.shape[:-1])
    squares = rows.new_zeros(count, dtype=torch.float64)
    size = max(1, _CACHED // max(1, width))
    for start in range(0, count, size):
        for left in range(0, width, _CACHED):
            piece = rows[start : start + size, left : left + _CACHED]
            squares[start : start + size] += piece.double().square().sum(1)
    return squares.view(vectors.shape[:-1])
