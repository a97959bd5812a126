"""Per-example vectors that are sums of outer products: the weights of linear and convolution layers.

What is measured is what is summed. With few positions both come from the factors in float64: the norms by Gram
matrices, the sums as weight gradients. With many, the vectors are written out a few examples at a time, once for
their norms and once for their sum. See :mod:`quietgrad.objectives.networks.contributions` for how two points are
compared without losing digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quietgrad.objectives.networks.contributions import Combination, PersonGroups, Record, Stored, squares_of
from quietgrad.objectives.networks.maps import SeveralRecords
from quietgrad.objectives.networks.persons import Alike, Persons

__all__ = ["UNIT", "OuterLayer", "OuterProducts", "few_positions", "same_input", "write_gradients"]

_CHUNK = 1 << 20  # numbers of float64 worked on at a time
UNIT = 2.0**-53  # rounding of float64


class OuterLayer(Protocol):
    """A layer whose weight gradient is Σ_t b_t ⊗ a_t over positions t (and groups of channels)."""

    channel_dim: int
    groups: int
    shape: tuple[int, int]  # (outputs, fan-in) of the weight as a matrix

    def columns(self, inputs: Tensor) -> Tensor:
        """Inputs seen by the weight, (examples·groups, fan-in, positions)."""
        ...

    def rows(self, grads: Tensor) -> Tensor:
        """Output gradients, (examples·groups, families·fan-out, positions)."""
        ...

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        """Write Σ_t b_t ⊗ a_t of every example into `out`, (examples, families·outputs, fan-in)."""
        ...

    def weight_gradient(self, grads: Tensor, inputs: Tensor) -> Tensor:
        """Σ_i Σ_t b_t ⊗ a_t, the ordinary weight gradient, flat, computed in float64."""
        ...

    def block(self, inputs: Tensor, families: int) -> int:
        """How many examples to write out at a time, so that the work stays in the cache."""
        ...


class OuterProducts:
    """Per-example vectors Σ_k L_k ⊗ R_k, kept as factors.

    The first left factor carries all families side by side in its channels. A second one, if there is a
    second, is common to all families: v_f = L_0[f] ⊗ R_0 + L_1 ⊗ R_1.
    """

    def __init__(self, layer: OuterLayer, lefts: Sequence[Tensor], rights: Sequence[Tensor], families: int):
        self.layer = layer
        self.positions = lefts[0][0].numel() // (families * layer.shape[0])
        self.lefts = lefts
        self.rights = rights
        self.families = families
        self.by_gram = self._cheap_gram(self.positions)

    def _cheap_gram(self, positions: int) -> bool:
        outputs, fan_in = self.layer.shape
        rank_one = positions == len(self.lefts) == 1
        # Gram matrices are taken in float64, at twice the price of the same numbers in float32.
        return rank_one or 2 * positions * (outputs + self.layer.groups * fan_in) < outputs * fan_in

    @classmethod
    def of(cls, layer: OuterLayer, now: Record, before: Record | None, mix: Combination) -> OuterProducts:
        """Factors of g_i(θ) and of the change, by the split form."""
        if before is None:
            return cls(layer, [now.output_grad], [now.input], 1)
        change = torch.sub(now.output_grad, before.output_grad, alpha=mix.scale)
        left = mix.join(now.output_grad, change, layer.channel_dim)
        if same_input(now, before):
            return cls(layer, [left], [now.input], mix.families)
        step = now.input - before.input
        return cls(layer, [left, now.output_grad], [before.input, step], mix.families)

    def rows(self, where: slice) -> OuterProducts:
        """Those of some examples."""
        return OuterProducts(
            self.layer, [a[where] for a in self.lefts], [b[where] for b in self.rights], self.families
        )

    def followed_by(self, other: OuterProducts) -> OuterProducts | None:
        """The sum of both, as outer products over one sequence of positions; None if the layer has no sequences."""
        if self.layer.channel_dim != -1 or self.layer.shape != other.layer.shape:
            return None

        def both(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
            longest = range(max(len(mine), len(theirs)))
            return [torch.cat([_sequence(t[k]) for t in (mine, theirs) if k < len(t)], 1) for k in longest]

        lefts, rights = both(self.lefts, other.lefts), both(self.rights, other.rights)
        return OuterProducts(self.layer, lefts, rights, self.families)

    def held(self) -> int:
        """Bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.lefts, *self.rights))

    def squared_norms(self) -> Tensor:
        """By Gram matrices, or from a few examples at a time, whichever multiplies less."""
        return self._gram_norms() if self.by_gram else self._blockwise_norms()

    def _gram_norms(self) -> Tensor:
        """‖Σ_k L_k ⊗ R_k‖² = Σ_kl ⟨R_kᵀR_l, L_kᵀL_l⟩ from above; no vector is written out.

        The terms have signs and may cancel: two positions with large and nearly equal inputs. Let u = 2⁻⁵³, n and m
        the lengths of a_t and b_t, N the number of terms, and γ_n = nu/(1−nu). In any order of summing, an entry
        of a Gram matrix is off by at most γ_n‖a_s‖‖a_t‖ (not γ_n|a_sᵀa_t|: it may have cancelled itself), so all
        by at most γ_{n+m+N+1}·A², A = Σ_t ‖a_t‖‖b_t‖ ≥ ‖v‖. Added is 2(n+m+N+8)u·A², with A from the diagonals,
        where nothing cancels: the computed norm is never below the true one. A vector that has cancelled below
        10⁻⁶·A or so is clipped as if it were that long; more digits float32 inputs do not have.
        """
        return torch.cat([self._gram_part(part) for part in self._chunks()])

    def _gram_part(self, part: slice) -> Tensor:
        factors = [_in_float64(a[part], b[part]) for a, b in zip(self.lefts, self.rights, strict=True)]
        columns = [self.layer.columns(right) for _, right in factors]
        rows = [self.layer.rows(left) for left, _ in factors]
        counts = [self.families] + [1] * (len(rows) - 1)
        rows = [r.reshape(len(r), f, -1, r.shape[2]) for r, f in zip(rows, counts, strict=True)]
        squares = longest = columns[0].new_zeros((len(columns[0]), self.families))
        for k in range(len(rows)):
            for other in range(k, len(rows)):
                inputs, outputs = _gram(columns[k], columns[other]).unsqueeze(1), _gram(rows[k], rows[other])
                squares = squares + (1 if other == k else 2) * (inputs * outputs).sum((-2, -1))
                if other == k:
                    lengths = inputs.diagonal(dim1=-2, dim2=-1) * outputs.diagonal(dim1=-2, dim2=-1)
                    longest = longest + lengths.sqrt().sum(-1)
        terms = columns[0].shape[1] + rows[0].shape[2] + (len(rows) * self.positions) ** 2
        squares = squares + 2 * (terms + 8) * UNIT * longest.square()
        return squares.view(-1, self.layer.groups, self.families).sum(1)

    def _blockwise_norms(self) -> Tensor:
        return torch.cat([written.squared_norms() for _, written in self._blocks()])

    def _blocks(self) -> Iterator[tuple[slice, Stored]]:
        """A few examples at a time, written out and forgotten again."""
        workspace = self._space(min(self._block, len(self.rights[0])))
        for part in self._parts(self._block):
            values = workspace[:, : part.stop - part.start]
            self._write(part, values)
            yield part, Stored(values.flatten(2))

    def stored(self, values: Tensor | None = None) -> Stored:
        """All vectors written out, into `values` (families, examples, outputs, fan-in) if given."""
        if values is None:
            values = self._space(len(self.rights[0]))
        if self.families == len(self.lefts) == 1:
            squares = write_gradients(self.layer, Record(self.rights[0], self.lefts[0]), values[0])
            return Stored(values.flatten(2), squares)
        for part in self._parts(self._block):
            self._write(part, values[:, part])
        return Stored(values.flatten(2))

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """The vectors that were measured: written out again, or ordinary weight gradients of the factors."""
        if not self.by_gram:
            for part, written in self._blocks():
                written.add_weighted(weights[part], out)
            return
        # In float64 from the weights on: where positions cancel, what rounding leaves of b_t would count in full.
        weights = weights.double()
        for part in self._chunks():
            for k, (left, right) in enumerate(zip(self.lefts, self.rights, strict=True)):
                families = left[part].chunk(self.families, self.layer.channel_dim) if k == 0 else [left[part]]
                shares = weights[part].unbind(1) if k == 0 else [weights[part].sum(1)]
                total = _scale(families[0], shares[0])
                for family, share in zip(families[1:], shares[1:], strict=True):
                    total += _scale(family, share)
                out += self.layer.weight_gradient(total, right[part])

    def together(self, persons: Persons) -> PersonGroups:
        """A person is one example with all positions of all their records: the same products, of longer sequences.

        What the bound on the Gram matrices' rounding adds is for as many positions as that. Sums from the factors
        are the same in any order, so people measured by Gram matrices are added up from the examples at once.
        """

        def by_gram(group: Alike) -> bool:
            return self._cheap_gram(self.positions * group.rows.shape[1])

        return PersonGroups(persons, persons.alike(self.lefts[0].device), self, self.of_people, by_gram)

    def of_people(self, group: Alike) -> OuterProducts:
        """Those of a group of people."""
        layer = self.layer if self.layer.channel_dim == -1 else SeveralRecords(self.layer)
        rights = [group.of(right, blank=False) for right in self.rights]  # what is beside a zero adds nothing
        return OuterProducts(layer, [group.of(left) for left in self.lefts], rights, self.families)

    @property
    def _block(self) -> int:
        return self.layer.block(self.rights[0], self.families)

    def _chunks(self) -> list[slice]:
        outputs, fan_in = self.layer.shape
        numbers = self.positions * (self.families * outputs + fan_in * self.layer.groups)
        return self._parts(max(1, _CHUNK // max(1, numbers)))

    def _parts(self, size: int) -> list[slice]:
        examples = len(self.rights[0])
        return [slice(i, min(i + size, examples)) for i in range(0, examples, size)]

    def _space(self, examples: int) -> Tensor:
        return self.lefts[0].new_empty((self.families, examples, *self.layer.shape))

    def _write(self, part: slice, values: Tensor) -> None:
        if self.families == 1:
            self.layer.products(self.lefts[0][part], self.rights[0][part], values[0])
        else:
            _, examples, outputs, fan_in = values.shape
            joined = values.new_empty((examples, self.families * outputs, fan_in))
            self.layer.products(self.lefts[0][part], self.rights[0][part], joined)
            values.copy_(joined.view(examples, self.families, outputs, fan_in).transpose(0, 1))
        if len(self.lefts) == 2:
            common = torch.empty_like(values[0])
            self.layer.products(self.lefts[1][part], self.rights[1][part], common)
            values += common


def few_positions(layer: OuterLayer, positions: int) -> bool:
    """Whether factors are faster than vectors written out once, were there room for all of these.

    Writing W = outputs·fan-in numbers and reading them twice takes as long as about 20 positions' share of a weight
    gradient in float64; beside that Gram matrices take P products per position and side, and their copies as much
    as 50. (Measured on one core.) Deep layers on small images have W in the millions and few positions.
    """
    outputs, fan_in = layer.shape
    numbers, sides = outputs * fan_in, outputs + layer.groups * fan_in
    return positions * (numbers + 2 * (positions + 50) * sides) < 20 * numbers


def same_input(now: Record, before: Record) -> bool:
    """Whether the layer saw the same memory at both points, as the first layers do."""
    return now.input.data_ptr() == before.input.data_ptr() and now.input.stride() == before.input.stride()


def write_gradients(
    layer: OuterLayer, record: Record, values: Tensor, before: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Write g_i into `values` (examples, outputs, fan-in); turn g_i(θ′) in `before` into g_i − s·g_i(θ′).

    Returns the squared norms, (examples, families), taken while the vectors are still in the cache.
    """
    examples, size = len(record.input), layer.block(record.input, 1)
    squares = []
    for start in range(0, examples, size):
        part = slice(start, min(start + size, examples))
        layer.products(record.output_grad[part], record.input[part], values[part])
        families = [values[part]]
        if before is not None:
            families.append(torch.sub(values[part], before[part], alpha=scale, out=before[part]))
        squares.append(torch.stack([squares_of(vectors.flatten(1)) for vectors in families], 1))
    return torch.cat(squares)


def _sequence(values: Tensor) -> Tensor:
    return values.flatten(1, -2) if values.dim() > 2 else values.unsqueeze(1)


def _gram(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[-1] == 1:
        return (left * right).sum(-2, keepdim=True)
    return left.transpose(-2, -1) @ right


def _in_float64(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same products, of factors whose squares neither vanish nor overflow unless those of the products do.

    Squares of float32 are far inside the range of float64; factors in float64 share their magnitude, exactly.
    """
    if left.dtype != torch.float64:
        return left.double(), right.double()
    _, ours = left.abs().flatten(1).amax(1).frexp()
    _, theirs = right.abs().flatten(1).amax(1).frexp()
    half = 2.0 ** ((theirs - ours) // 2).clamp(-1000, 1000).double()
    return _scale(left, half), _scale(right, 1 / half)


def _scale(values: Tensor, weights: Tensor) -> Tensor:
    return values * weights.view(-1, *([1] * (values.dim() - 1)))
