"""Sums over all people of a table from the inner products of their rows, which are made once.

A person's vector is Σ rᵢ ⊗ x̃ᵢ, and ‖Σ rᵢ ⊗ x̃ᵢ‖² = Σᵢⱼ ⟨rᵢ, rⱼ⟩⟨x̃ᵢ, x̃ⱼ⟩: with the inner products of a person's own
rows at hand, how much they are shortened follows from their residuals, and what is added is a weighted sum of rows
like any other. No person's vector is made, which for sparse rows and several scores is most of the work. A full
batch asks the same people in every release, so the products pay for themselves after a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from quietgrad.objectives.base import ClippingRule, Indices
from quietgrad.objectives.privacy_units import GroupIndex
from quietgrad.objectives.tables.full_batch import Block
from quietgrad.objectives.tables.layout import csr_around, csr_rows
from quietgrad.objectives.tables.table import Floats, Table

if TYPE_CHECKING:
    from quietgrad.objectives.tables.table import Affine

_EPS = float(np.finfo(np.float64).eps)
_TINY = 1e-290  # as in the norms of rows: squares that underflow are not 0
_BLOCK = 1 << 18  # numbers of rows at a time, as in a table's own blocks
_MOST = 4  # inner products for each number that the table holds


class PersonGrams:
    """The inner products of everybody's rows, a few MB of rows at a time; no person lies in two blocks.

    Build it with :func:`grams_of`.
    """

    def __init__(self, records: Table, groups: GroupIndex) -> None:
        from quietgrad.objectives.tables import kernels

        self._of = _identity(records, groups)
        self._records, self._mean = records, groups.mean
        sizes = np.diff(groups.starts)
        products = np.empty(int((sizes * sizes).sum()))
        self._reach = np.empty(len(records))
        kernels.person_products(records.packed, groups.starts, products, self._reach)
        self._blocks = list(self._cut(groups.starts, sizes, products))

    def is_of(self, records: Table, groups: GroupIndex) -> bool:
        """Whether these are the products of the same rows, seen in the same way, of the same people."""
        return all(a is b for a, b in zip(self._of, _identity(records, groups), strict=True))

    def _cut(self, starts: Indices, sizes: Indices, products: Floats) -> Iterator[tuple[slice, Any, Any, Indices]]:
        """(rows, their raw features if they are sparse, their products, where their people begin)."""
        records, X = self._records, self._records.X
        stored = X.indptr if records.is_sparse else records.features * np.arange(len(records) + 1)
        places = np.concatenate([[0], np.cumsum(sizes * sizes)])
        person = 0
        while person < len(sizes):
            first = int(starts[person])
            last = int(np.searchsorted(stored[starts], stored[first] + _BLOCK, side="right")) - 1
            last = min(max(last, person + 1), len(sizes))
            stop, mine = int(starts[last]), sizes[person:last]
            wide = np.repeat(mine, mine)  # how many products each row has
            begins = np.repeat(starts[person:last] - first, mine)
            columns = np.arange(int(wide.sum())) - np.repeat(np.cumsum(wide) - wide, wide) + np.repeat(begins, wide)
            pointers = np.concatenate([[0], np.cumsum(wide)])
            shape = (stop - first, stop - first)
            gram = csr_around(products[places[person] : places[last]], columns, pointers, shape)
            rows = csr_rows(X, first, stop) if records.is_sparse else None
            yield slice(first, stop), rows, gram, starts[person:last] - first
            person = last

    def blocks(self) -> Iterator[tuple[Block, Any, Indices]]:
        """Rows of whole people, their products, and where each person begins among them."""
        records = self._records
        for which, rows, gram, begins in self._blocks:
            raw = np.asarray(records.X[which], dtype=np.float64) if rows is None else rows
            factors = records.factors[which, None] if records.factors.size else None
            yield Block(which, raw, factors), gram, begins

    def contributions(
        self, block: Block, gram: Any, begins: Indices, residuals: Floats, before: Floats | None, rule: ClippingRule
    ) -> Floats:
        """What each row's x̃ is multiplied by, (rows, outputs): α·clip_A and γ·clip_B act on people.

        A computed inner product is off by no more than (32 + d)·eps times the lengths of both rows, shift and row
        apart, and a sum of k² of them by as much again; so is the vector that is added. That much is added to the
        squared norm.
        """
        alpha, beta, first, gamma, second = rule.numbers
        sizes = np.diff(np.append(begins, len(residuals)))
        shares = np.repeat(1.0 / sizes if self._mean else np.ones(len(sizes)), sizes)[:, None]
        moved = (residuals if before is None else residuals - beta * before) * shares
        out = self._clipped(block, gram, begins, sizes, moved, alpha, first)
        if gamma:
            out += self._clipped(block, gram, begins, sizes, residuals * shares, gamma, second)
        return out

    def _clipped(
        self, block: Block, gram: Any, begins: Indices, sizes: Indices, r: Floats, weight: float, clip: float
    ) -> Floats:
        records = self._records
        lengths = np.abs(r[:, 0]) if r.shape[1] == 1 else np.sqrt(np.einsum("ij,ij->i", r, r))
        squares = np.add.reduceat(np.einsum("ij,ij->i", r, gram @ r), begins)
        spread = np.add.reduceat(lengths * self._reach[block.which], begins)
        slack = (64 + 4 * records.features + 8 * sizes) * _EPS
        squares = np.maximum(squares, 0.0) + slack * spread * spread
        norms = np.sqrt(squares * (1.0 + (32 + records.dim) * _EPS) + records.dim * _TINY)
        factors = np.divide(clip, norms, out=np.ones_like(norms), where=norms > clip)
        finite = np.isfinite(norms)
        out: Floats = r * np.repeat(weight * factors, sizes)[:, None]
        if not finite.all():
            out[np.repeat(~finite, sizes)] = 0.0
        return out


def grams_of(records: Table, groups: GroupIndex) -> PersonGrams | None:
    """The products of the people of a full batch, made at the first asking; ``None`` where they are too many.

    They are if people have more rows than the table is wide, and not to be had if rows do not lie person by person
    or the features are mixed by a matrix. Whether they are used follows from the table alone, so a release that is
    asked again is summed in the same way.
    """
    mixed = records.transform is not None and records.transform.is_matrix
    whole = groups.people is None and groups.starts[-1] == len(groups.order) == len(records)
    if mixed or not whole or not (groups.order[1:] > groups.order[:-1]).all():
        return None
    found: PersonGrams | None = records.grams
    if found is not None and found.is_of(records, groups):
        return found
    sizes = np.diff(groups.starts)
    stored = records.X.nnz if records.is_sparse else records.X.size
    if int((sizes * sizes).sum()) > _MOST * stored:
        return None
    records.grams = found = PersonGrams(records, groups)
    return found


def _identity(records: Table, groups: GroupIndex) -> tuple[Indices, Indices, Any, Affine | None, Floats]:
    return groups.order, groups.starts, records.X, records.transform, records.factors
