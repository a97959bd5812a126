"""Per-example gradients of one parameter, stored or factored, of records or of privacy units.

A private step needs the norms of the per-example gradients g_i and, once these have decided the weights, a weighted
sum Σ_i c_i g_i. Steps that compare two points θ and θ′ (SPIDER, DP-SRM) ask for several *families* of vectors:

    gradient   v_i = g_i(θ)
    change     v_i = g_i(θ) − s·g_i(θ′)        s = 1: the difference; s = 1 − γ: joint momentum

The change is never computed by subtracting two large norms. For layers whose gradient is Σ_t b_t ⊗ a_t it is split
as (a − a′) ⊗ b + a′ ⊗ (b − s·b′), which loses no digits when θ′ → θ. Where both families are stored, the norm of
the change is that of the very vector that is summed.

A unit with several records has v_p = s_p Σ_{i∈p} g_i, with s_p = 1 or one over its number of records. That is the
gradient of one example with all positions of all its records: a :class:`SizeBucket` lays records out so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quietgrad.torch.networks import compiled_sums
from quietgrad.torch.networks.randomness import RecordSeeds

Rows = npt.NDArray[np.int64]


class SizeBucket(NamedTuple):
    """Units with about as many records, laid out side by side."""

    units: Rows  # (some,)
    rows: Rows  # (some, most): rows of the batch; behind a unit's last record the last one again …
    blank: npt.NDArray[np.bool_] | None  # … where this is True; None: nowhere

    def of(self, values: Tensor, blank: bool = True) -> Tensor:
        """The rows as (some, most, …), zero behind a unit's last.

        Zero by assignment: a product with zero would keep what is not finite.
        """
        first, flat = int(self.rows[0, 0]), self.rows.reshape(-1)
        if self.blank is None and np.array_equal(flat, first + np.arange(len(flat))):
            return torch.unflatten(values[first : first + len(flat)], 0, self.rows.shape)
        taken = values[torch.from_numpy(self.rows).to(values.device)]
        if blank and self.blank is not None:
            taken[torch.from_numpy(self.blank).to(values.device)] = 0
        return taken


@dataclass(frozen=True, eq=False)
class UnitAssignment:
    """The privacy unit of each row of a batch, 0 … count − 1, and the factor s_p of each.

    >>> units = UnitAssignment.of([7, 3, 7], mean=True)
    >>> units.owners.tolist(), units.factors.tolist()
    ([1, 0, 1], [1.0, 0.5])
    """

    owners: Rows
    factors: npt.NDArray[np.float64]

    @staticmethod
    def of(ids: npt.ArrayLike, *, mean: bool) -> UnitAssignment:
        _, owners = np.unique(np.asarray(ids), return_inverse=True)
        return UnitAssignment.numbered(owners.astype(np.int64).reshape(-1), mean=mean)

    @staticmethod
    def numbered(owners: Rows, *, mean: bool) -> UnitAssignment:
        """By numbers 0 … count − 1, each of which occurs."""
        sizes = np.bincount(owners)
        return UnitAssignment(owners, 1.0 / sizes if mean else np.ones(len(sizes)))

    def __len__(self) -> int:
        return len(self.factors)

    @cached_property
    def sizes(self) -> Rows:
        return np.bincount(self.owners, minlength=len(self))

    @property
    def single(self) -> bool:
        """Whether everyone has one row, in order, that counts in full: then there is nothing to add up."""
        alone = len(self.owners) == len(self) and bool((self.factors == 1.0).all())
        return alone and bool((np.diff(self.owners) == 1).all())

    def some(self, units: Rows) -> tuple[Rows, UnitAssignment]:
        """Rows of some units, one unit after the other, and whose they are among these."""
        if len(units) == len(self):
            return np.arange(len(self.owners)), self
        order, starts = self._sorted
        sizes = self.sizes[units]
        before = np.cumsum(sizes) - sizes
        rows = order[np.arange(sizes.sum()) + np.repeat(starts[units] - before, sizes)]
        return rows, UnitAssignment(np.repeat(np.arange(len(units)), sizes), self.factors[units])

    def whole_in(self, rows: Rows) -> Rows:
        """The units that have all their records among ``rows``."""
        units, inside = np.unique(self.owners[rows], return_counts=True)
        whole: Rows = units[inside == self.sizes[units]]
        return whole

    def passes(self, keys: RecordSeeds, most: int) -> Iterator[Rows]:
        """Units in passes of at most ``most`` records, each unit in one; who has more than that is alone.

        By the secret word of each one's first record, as :meth:`RecordSeeds.passes` cuts records.
        """
        first = np.full(len(self), len(self.owners))
        np.minimum.at(first, self.owners, np.arange(len(self.owners)))
        return keys.rows(first).passes(most, self.sizes)

    @cached_property
    def buckets(self) -> list[SizeBucket]:
        """Everyone, with others of about as many records: two buckets to a doubling."""
        order, starts = self._sorted
        steps = np.ceil(2 * np.log2(self.sizes))
        found = []
        for step in np.unique(steps):
            units = np.flatnonzero(steps == step)
            sizes = self.sizes[units, None]
            place = np.arange(sizes.max())
            rows, blank = order[starts[units, None] + np.minimum(place, sizes - 1)], place >= sizes
            found.append(SizeBucket(units, rows, blank if blank.any() else None))
        return found

    @cached_property
    def _sorted(self) -> tuple[Rows, Rows]:
        """Rows unit by unit, and where each one's begin among these."""
        return np.argsort(self.owners, kind="stable"), np.concatenate([[0], np.cumsum(self.sizes)])


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
    """Per-example vectors of one parameter."""

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def squared_norms(self) -> Tensor:
        """‖v_i‖² of what `add_weighted` adds, from above, shape (examples, families), in float64."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out += Σ_i Σ_f weights[i, f] · v_{i,f}; `out` is the parameter's slice of the flat vector, in float64.

        In float32 a sum of m vectors is off by up to m·2⁻²⁴·mC, and by another amount without one of them.
        """
        ...

    def some(self, rows: Tensor) -> PerExampleVectors:
        """The vectors of some examples, given as a mask."""
        ...

    def written(self, where: slice) -> Tensor:
        """The vectors of some examples, (families, examples, size)."""
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

    def __len__(self) -> int:
        return self.values.shape[1]

    def join(self, other: Stored) -> None:
        """Add the vectors of another use of the same parameter; only the sums have norms."""
        self.values = self.values + other.values  # not in place: the values may be views of the tape
        self._squares = None

    def squared_norms(self) -> Tensor:
        return squares_of(self.values).T if self._squares is None else self._squares

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """A matrix–vector product in float64, some rows at a time so that the wider copy stays in the cache."""
        rows, weights = self.values.flatten(0, 1), weights.T.flatten().double()
        if compiled_sums.takes(rows) and out.is_contiguous():
            compiled_sums.add_rows(rows.numpy(), weights.contiguous().numpy(), out.numpy())
            return
        size = max(1, _CACHED // max(1, rows.shape[1]))
        for start in range(0, len(rows), size):
            out.addmv_(rows[start : start + size].double().T, weights[start : start + size])

    def some(self, rows: Tensor) -> Stored:
        return Stored(self.values[:, rows.to(self.values.device)])

    def written(self, where: slice) -> Tensor:
        return self.values[:, where]


class TokenSums:
    """Embedding rows: each example touches a few rows of the table, each with a sum of output gradients."""

    def __init__(self, tokens: Tensor, values: Tensor, rows: int) -> None:
        self.tokens = tokens  # (examples, positions)
        self.values = values  # (examples, positions, families, width)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.tokens)

    def squared_norms(self) -> Tensor:
        """A token that occurs twice in an example adds up before it is squared.

        The sums may cancel. In float64, of P terms, they are off by at most γ_P·Σ_t ‖b_t‖: it is added, twice.
        """
        examples, positions = self.tokens.shape
        owners = torch.arange(examples, device=self.tokens.device)
        keys, where = torch.unique(owners[:, None] * self.rows + self.tokens, return_inverse=True)
        sums = self.values.new_zeros((len(keys), *self.values.shape[2:]), dtype=torch.float64)
        for part in self._parts():
            sums.index_add_(0, where[part].flatten(), self.values[part].flatten(0, 1).double())
        squares = sums.new_zeros((examples, self.values.shape[2]))
        squares.index_add_(0, keys // self.rows, squares_of(sums))
        longest = squares_of(self.values).sqrt().sum(1)
        return (squares.sqrt() + 2 * (positions + 8) * 2.0**-53 * longest).square()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Scatter the weighted output gradients into the table."""
        # Weighted in float64: where a token's gradients cancel, what rounding leaves of each would count in full.
        table, shares = out.view(self.rows, -1), weights.double()[:, None, :, None]
        for part in self._parts():
            weighted = (self.values[part] * shares[part]).sum(2)
            table.index_add_(0, self.tokens[part].flatten(), weighted.flatten(0, 1))

    def some(self, rows: Tensor) -> TokenSums:
        rows = rows.to(self.tokens.device)
        return TokenSums(self.tokens[rows], self.values[rows], self.rows)

    def _parts(self) -> list[slice]:
        """A few examples at a time, so that the wider copy stays in the cache."""
        examples, *shape = self.values.shape
        size = max(1, _CACHED // max(1, prod(shape)))
        return [slice(start, start + size) for start in range(0, examples, size)]

    def written(self, where: slice) -> Tensor:
        tokens, values = self.tokens[where], self.values[where].permute(2, 0, 1, 3)
        families, examples, _, width = values.shape
        tables = values.new_zeros((families, examples, self.rows, width))
        tables.scatter_add_(2, tokens[None, :, :, None].expand_as(values), values)
        return tables.flatten(2)


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
