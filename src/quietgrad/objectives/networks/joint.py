"""A parameter that several layers use: its vectors add up before they have a norm.

What is summed is the sum of the parts; what is measured is their sum too. A table of tokens that is the last
layer's weight as well (tied weights) is measured by Gram matrices: no vector as large as the table is written out.
Whatever else is used several times is written out a few examples at a time, in float64.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor

from quietgrad.objectives.networks.arranged import Arranged
from quietgrad.objectives.networks.contributions import (
    Combination,
    Contribution,
    PersonGroups,
    Record,
    Stored,
    TokenSums,
    Workspace,
    squares_of,
)
from quietgrad.objectives.networks.kernels import Kernel
from quietgrad.objectives.networks.outer import UNIT, OuterProducts
from quietgrad.objectives.networks.persons import Alike, Persons

__all__ = ["Joint", "kernel_vectors", "written"]

_BLOCK = 1 << 20  # numbers of float64 written out at a time


class Joint:
    """Per-example vectors that are sums of several contributions to one parameter."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Contribution] = []

    def add(self, part: Contribution) -> None:
        """One more use. Uses of a kind are one: positions follow each other, vectors add up."""
        for k, other in enumerate(self.parts):
            if isinstance(part, Stored) and isinstance(other, Stored):
                other.join(part)
                return
            if isinstance(part, TokenSums) and isinstance(other, TokenSums):
                self.parts[k] = TokenSums(
                    torch.cat([other.tokens, part.tokens], 1), torch.cat([other.values, part.values], 1), part.rows
                )
                return
            if isinstance(part, OuterProducts) and isinstance(other, OuterProducts):
                merged = other.followed_by(part)
                if merged is not None:
                    self.parts[k] = merged
                    return
        self.parts.append(part)

    def together(self, persons: Persons) -> Contribution:
        """Uses add up person by person as they do example by example: the same sums, of longer sequences."""
        if len(self.parts) == 1:
            return self.parts[0].together(persons)
        stored = {k: part.together(persons) for k, part in enumerate(self.parts) if isinstance(part, Stored)}

        def make(group: Alike) -> Joint:
            joint = Joint(self.size)
            for k, part in enumerate(self.parts):
                joint.parts.append(
                    Stored(stored[k].values[:, group.people]) if k in stored else _of_people(part, group)
                )
            return joint

        return PersonGroups(persons, persons.alike(_device(self.parts[0])), self, make)

    def held(self) -> int:
        """Bytes."""
        return sum(part.held() for part in self.parts)

    def squared_norms(self) -> Tensor:
        """‖Σ_k v_ik‖², from above."""
        if len(self.parts) == 1:
            return self.parts[0].squared_norms()
        tied = self._tied()
        if tied is not None:
            return _tied_norms(*tied)
        return torch.cat([squares_of(block).T for _, block in self._blocks()])

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """The parts, one after the other, if they were measured by their factors; else what was written out."""
        if len(self.parts) == 1 or self._tied() is not None:
            for part in self.parts:
                part.add_weighted(weights, out)
            return
        for where, block in self._blocks():
            out.addmv_(block.flatten(0, 1).T, weights[where].T.flatten().double())

    def _tied(self) -> tuple[OuterProducts, TokenSums] | None:
        if len(self.parts) != 2:
            return None
        first, second = self.parts
        if isinstance(first, TokenSums):
            first, second = second, first
        if not isinstance(first, OuterProducts) or not isinstance(second, TokenSums) or first.layer.groups != 1:
            return None
        outputs, fan_in = first.layer.shape
        positions = first.positions + second.tokens.shape[1]
        if outputs != second.rows or 2 * positions * (outputs + fan_in) >= outputs * fan_in:
            return None
        first.by_gram = True  # summed by the factors that are measured
        return first, second

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(families, examples, size) of a few examples at a time, in float64."""
        examples = self._length()
        step = max(1, _BLOCK // max(1, self.size))
        for start in range(0, examples, step):
            where = slice(start, min(start + step, examples))
            total: Tensor | None = None
            for part in self.parts:
                block = written(part, where).to(torch.float64, copy=total is None)  # never into a part itself
                total = block if total is None else total.add_(block)
            assert total is not None
            yield where, total

    def _length(self) -> int:
        return _examples(self.parts[0])


def _examples(part: Contribution) -> int:
    if isinstance(part, Arranged):
        return _examples(part.matrix)
    if isinstance(part, OuterProducts):
        return len(part.rights[0])
    if isinstance(part, TokenSums):
        return len(part.tokens)
    assert isinstance(part, Stored)
    return part.values.shape[1]


def _of_people(part: Contribution, group: Alike) -> Contribution:
    if isinstance(part, Arranged):
        return part.around(_of_people(part.matrix, group))
    if isinstance(part, OuterProducts):
        return part.of_people(group)
    assert isinstance(part, TokenSums)
    return part.of(group)


def _device(part: Contribution) -> torch.device:
    if isinstance(part, Arranged):
        return _device(part.matrix)
    if isinstance(part, OuterProducts):
        return part.lefts[0].device
    assert isinstance(part, Stored | TokenSums)
    return part.values.device


def kernel_vectors(kernel: Kernel, record: Record, wanted: Container[str]) -> dict[str, Tensor]:
    """What a kernel makes of one point, written out: (records, size) by role."""
    nothing = Workspace(0.0, torch.empty(0, dtype=record.output_grad.dtype))
    pieces = kernel.contributions(record, None, Combination(gradient=True, change=False), nothing, wanted)
    return {role: written(piece, slice(None)).flatten(2)[0] for role, piece in pieces}


def written(part: Contribution, where: slice) -> Tensor:
    """The vectors of some records, (families, records, …)."""
    if isinstance(part, Arranged):
        return part.placed(written(part.matrix, where).flatten(2))
    if isinstance(part, OuterProducts):
        return part.rows(where).stored().values
    if isinstance(part, TokenSums):
        return TokenSums(part.tokens[where], part.values[where], part.rows).dense().values
    assert isinstance(part, Stored)
    return part.values[:, where]


def _tied_norms(outer: OuterProducts, tokens: TokenSums) -> Tensor:
    """‖Σ_t b_t ⊗ a_t + Σ_s e_{w_s} ⊗ c_s‖² = ‖·‖² + ‖·‖² + 2 Σ_ts b_t[w_s]·⟨a_t, c_s⟩, from above.

    All terms are outer products, so the bound of :meth:`OuterProducts._gram_norms` holds with
    A = Σ_t ‖a_t‖‖b_t‖ + Σ_s ‖c_s‖ over all of them: 4(n + m + N + 8)·u·A² is added, twice what it asks for.
    """
    squares = outer.squared_norms() + tokens.squared_norms()
    result = []
    for part in outer._chunks():
        cross = squares.new_zeros(squares[part].shape)
        longest = squares_of(tokens.values[part]).sqrt().sum(1)
        values, words = tokens.values[part].double(), tokens.tokens[part]
        for k, (left, right) in enumerate(zip(outer.lefts, outer.rights, strict=True)):
            a = outer.layer.columns(right[part]).double()
            b = outer.layer.rows(left[part]).double()
            families = outer.families if k == 0 else 1
            b = b.reshape(len(b), families, -1, b.shape[2])
            picked = b.gather(2, words[:, None, :, None].expand(-1, families, -1, b.shape[3]))
            cross = cross + (picked * torch.einsum("bsfd,bdp->bfsp", values, a)).sum((-2, -1))
            longest = longest + (b.norm(dim=2) * a.norm(dim=1).unsqueeze(1)).sum(-1)
        terms = sum(outer.layer.shape) + (outer.positions * len(outer.lefts) + words.shape[1]) ** 2 + 8
        result.append(squares[part] + 2 * cross + 4 * terms * UNIT * longest.square())
    return torch.cat(result)
