"""Whose rows the rows of a batch are, where a person has several, and how their vectors are added up.

A person's vector is v_p = s_p Σ_{i∈p} g_i, with s_p = 1 (records count) or one over the number of records
(everybody counts once). It is linear in the g_i: a person's gradient of a layer's weight is that of one example
with all positions of all their records, so norms and sums come from the same products, of longer sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quietgrad.objectives.networks import passes
from quietgrad.objectives.networks.randomness import RecordKeys

__all__ = ["Alike", "Persons"]

_Numbers = npt.NDArray[np.int64]


class Alike(NamedTuple):
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
class Persons:
    """The person of each row of a batch, 0 … count − 1, and the factor s_p of each.

    >>> persons = Persons.of([7, 3, 7], mean=True)
    >>> persons.owners.tolist(), persons.factors.tolist()
    ([1, 0, 1], [1.0, 0.5])
    """

    owners: _Numbers
    factors: npt.NDArray[np.float64]

    @staticmethod
    def of(ids: Any, *, mean: bool) -> Persons:
        """By any ids, one for each row."""
        _, owners = np.unique(np.asarray(ids), return_inverse=True)
        return Persons.numbered(owners.astype(np.int64).reshape(-1), mean=mean)

    @staticmethod
    def numbered(owners: _Numbers, *, mean: bool) -> Persons:
        """By numbers 0 … count − 1, each of which occurs."""
        sizes = np.bincount(owners)
        return Persons(owners, 1.0 / sizes if mean else np.ones(len(sizes)))

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

    def some(self, people: _Numbers) -> tuple[_Numbers, Persons]:
        """Rows of some people, person by person, and whose they are among these; of everybody, as they are."""
        if len(people) == len(self):
            return np.arange(len(self.owners)), self
        order, starts = self._sorted
        sizes = self.sizes[people]
        before = np.cumsum(sizes) - sizes
        rows = order[np.arange(sizes.sum()) + np.repeat(starts[people] - before, sizes)]
        return rows, Persons(np.repeat(np.arange(len(people)), sizes), self.factors[people])

    def passes(self, keys: RecordKeys, most: int) -> Iterator[_Numbers]:
        """People in passes of at most ``most`` records, each person in one; who has more than that is alone.

        By the secret word of each one's first record, as :meth:`RecordKeys.passes` cuts records.
        """
        first = np.full(len(self), len(self.owners))
        np.minimum.at(first, self.owners, np.arange(len(self.owners)))
        return keys.rows(first).passes(most, self.sizes)

    def alike(self, device: torch.device) -> list[Alike]:
        """Everyone, in groups of about as many records: two groups to a doubling."""
        if device not in self._alike:
            self._alike[device] = list(self._groups(device))
        return self._alike[device]

    @cached_property
    def _alike(self) -> dict[torch.device, list[Alike]]:
        return {}

    @cached_property
    def _sorted(self) -> tuple[_Numbers, _Numbers]:
        """Rows person by person, and where each one's begin among these."""
        return np.argsort(self.owners, kind="stable"), np.concatenate([[0], np.cumsum(self.sizes)])

    def _groups(self, device: torch.device) -> Iterator[Alike]:
        order, starts = self._sorted
        steps = np.ceil(2 * np.log2(self.sizes))
        for step in np.unique(steps):
            people = np.flatnonzero(steps == step)
            sizes = self.sizes[people, None]
            place = np.arange(sizes.max())
            rows, blank = order[starts[people, None] + np.minimum(place, sizes - 1)], place >= sizes
            yield Alike(
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
        if passes.takes(values):
            return torch.stack([passes.sum_rows(family, *self._sorted) for family in values])
        total = values.new_zeros((len(values), len(self), values.shape[2]), dtype=torch.float64)
        return total.index_add_(1, self.numbers(values.device), values.double()).to(values.dtype)


def _run(rows: _Numbers) -> slice | None:
    """Row numbers as a range, if they are one."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if np.array_equal(rows, first + np.arange(len(rows))) else None
