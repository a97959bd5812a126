"""Per-example kernels of the operations that networks are made of.

A kernel turns what a tap kept of an operation, its input a and the gradient b at its output (at one point or at
two), into `PerExampleVectors` for each parameter:

    linear, matrix products, convolutions   weight Σ_t b_t ⊗ a_t, stored, by Gram matrices, or as factors
    einsum                                  the same, of a matrix whose entries lie in another order in the weight
    embedding                               rows touched by the record's tokens
    biases                                  Σ_t b_t

Which form a weight takes depends on sizes and the memory budget alone, never on timing: runs reproduce. Vectors of
a parameter that several operations use (weight tying) add up before they have a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quietgrad.objectives.networks.outer_products import (
    UNIT,
    Convolution,
    LinearLayerMap,
    OuterLayer,
    OuterProducts,
    SeveralRecords,
    few_positions,
    write_gradients,
)
from quietgrad.objectives.networks.vectors import (
    GradientTerms,
    LayerCall,
    PerExampleVectors,
    SizeBucket,
    Stored,
    StoredGradients,
    TokenSums,
    UnitAssignment,
    UnitVectors,
    Workspace,
    squares_of,
)


class Kernel(Protocol):
    """Contributions of one kind of operation."""

    def remember(
        self, before: LayerCall, mix: GradientTerms, space: Workspace, wanted: Container[str]
    ) -> LayerCall | StoredGradients:
        """What to keep of the previous point: per-record vectors where there is room, or the record itself."""
        ...

    def contributions(
        self,
        now: LayerCall,
        before: LayerCall | StoredGradients | None,
        mix: GradientTerms,
        space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, PerExampleVectors]]:
        """(role, contribution) of each wanted parameter."""
        ...


class _OuterKernel:
    """Matrix products and convolutions. ``swapped``: the weight is Σ_t a_t ⊗ b_t, as that of x @ W is."""

    def __init__(self, layer: OuterLayer, sum_positions: Callable[[Tensor], Tensor], swapped: bool = False) -> None:
        self.layer = layer
        self.swapped = swapped
        self._sum_positions = sum_positions

    def remember(
        self, before: LayerCall, mix: GradientTerms, space: Workspace, wanted: Container[str]
    ) -> LayerCall | StoredGradients:
        if not mix.gradient:
            return before  # a change alone is taken in the split form, which needs both points' factors
        vectors = {}
        if "weight" in wanted:
            factors = self._factors(before)
            values = self._room(factors, mix, space)
            if values is None:
                return before
            write_gradients(self.layer, factors, values[1])
            vectors["weight"] = values
        if "bias" in wanted:
            vectors["bias"] = self._sum_positions(before.output_grad)
        return StoredGradients(vectors)

    def contributions(
        self, now: LayerCall, before: LayerCall | StoredGradients | None, mix: GradientTerms, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, PerExampleVectors]]:  # fmt: skip
        if "weight" in wanted:
            yield "weight", self._weight(now, before, mix, space)
        if "bias" in wanted:
            total, change = self._sum_positions(now.output_grad), None
            if isinstance(before, StoredGradients):
                change = torch.sub(total, before.vectors["bias"], alpha=mix.scale)
            elif before is not None:
                change = self._sum_positions(torch.sub(now.output_grad, before.output_grad, alpha=mix.scale))
            yield "bias", mix.stored(total, change)

    def _weight(
        self, now: LayerCall, before: LayerCall | StoredGradients | None, mix: GradientTerms, space: Workspace
    ) -> PerExampleVectors:
        now = self._factors(now)
        if isinstance(before, StoredGradients):
            values = before.vectors["weight"]
            squares = write_gradients(self.layer, now, values[0], values[1], mix.scale)
            return Stored(values.flatten(2), squares)
        factors = OuterProducts.of(self.layer, now, before and self._factors(before), mix)
        room = self._room(now, mix, space)
        return factors if room is None else factors.stored(room)

    def _factors(self, record: LayerCall) -> LayerCall:
        return LayerCall(record.output_grad, record.input) if self.swapped else record

    def _room(self, record: LayerCall, mix: GradientTerms, space: Workspace) -> Tensor | None:
        """Memory for all records' vectors; with few positions the factors are faster, and none is taken."""
        positions = record.output_grad[0].numel() // self.layer.shape[0]
        if positions == 1 or few_positions(self.layer, positions):
            return None
        return space.take(mix.families, len(record.input), *self.layer.shape)


class _EmbeddingKernel:
    def __init__(self, rows: int, padding_idx: int | None) -> None:
        self.rows, self.padding_idx = rows, padding_idx

    def remember(
        self, before: LayerCall, mix: GradientTerms, space: Workspace, wanted: Container[str]
    ) -> LayerCall:
        return before

    def contributions(
        self, now: LayerCall, before: LayerCall | StoredGradients | None, mix: GradientTerms, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, PerExampleVectors]]:  # fmt: skip
        assert not isinstance(before, StoredGradients)
        tokens, grads = now.input.flatten(1), now.output_grad.flatten(1, -2).unsqueeze(2)
        if before is not None:
            old = before.output_grad.flatten(1, -2).unsqueeze(2)
            if now.input.shape == before.input.shape and torch.equal(now.input, before.input):
                grads = mix.join(grads, torch.sub(grads, old, alpha=mix.scale), 2)
            else:  # the tokens depend on the parameters: both sets of rows move
                tokens = torch.cat([tokens, before.input.flatten(1)], 1)
                gone = mix.join(torch.zeros_like(old), -mix.scale * old, 2)
                grads = torch.cat([mix.join(grads, grads, 2), gone], 1)
        if self.padding_idx is not None:
            grads = grads * (tokens != self.padding_idx)[:, :, None, None]
        yield "weight", TokenSums(tokens, grads, self.rows)


@lru_cache(maxsize=1024)
def linear_kernel(outputs: int, inputs: int, swapped: bool = False) -> Kernel:
    """Of x Wᵀ, or ``swapped`` of x W: the weight's rows are then the inputs'."""
    layer = LinearLayerMap(inputs, outputs) if swapped else LinearLayerMap(outputs, inputs)
    return _OuterKernel(layer, _sum_leading, swapped)


@lru_cache(maxsize=1024)
def convolution_kernel(
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    images: int = 1,
) -> Kernel:
    """Of a convolution; ``padding`` as F.pad takes it. With several ``images`` of a record these have an axis."""
    layer = Convolution(weight, stride, padding, dilation, groups)
    if images == 1:
        return _OuterKernel(layer, _sum_trailing)
    return _OuterKernel(SeveralRecords(layer), lambda grads: grads.flatten(3).sum((1, 3)))


@lru_cache(maxsize=1024)
def embedding_kernel(rows: int, padding_idx: int | None) -> Kernel:
    """Of a table with so many rows."""
    return _EmbeddingKernel(rows, padding_idx)


def _sum_trailing(values: Tensor) -> Tensor:
    """(records, channels, …) summed over the positions."""
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _sum_leading(values: Tensor) -> Tensor:
    """(records, …, channels) summed over the positions."""
    return values.flatten(1, -2).sum(1) if values.dim() > 2 else values


class MatrixLayout(NamedTuple):
    """A parameter seen as a matrix: its axes in another order, the first ``rows`` of them being its rows."""

    order: tuple[int, ...]
    rows: int

    def of(self, weight: Tensor) -> Tensor:
        """The matrix."""
        moved = weight.permute(self.order)
        return moved.reshape(prod(moved.shape[: self.rows]), -1)


class PermutedVectors:
    """Vectors of a matrix, added to the parameter where its entries lie; norms do not depend on their order."""

    def __init__(self, matrix: PerExampleVectors, shape: Sequence[int], order: tuple[int, ...]) -> None:
        self.matrix = matrix
        self.shape, self.order = tuple(shape), order

    def squared_norms(self) -> Tensor:
        """Those of the matrix."""
        return self.matrix.squared_norms()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """As the matrix, then each entry to its place."""
        total = torch.zeros_like(out)
        self.matrix.add_weighted(weights, total)
        out += self.placed(total)

    def placed(self, values: Tensor) -> Tensor:
        """(…, size) in the parameter's order."""
        leading = values.dim() - 1
        moved = values.reshape(*values.shape[:-1], *(self.shape[axis] for axis in self.order))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return moved.permute(*range(leading), *(leading + axis for axis in back)).flatten(leading)

    def together(self, persons: UnitAssignment) -> PermutedVectors:
        """Of people."""
        return self.around(self.matrix.together(persons))

    def around(self, matrix: PerExampleVectors) -> PermutedVectors:
        """Other vectors of the same matrix."""
        return PermutedVectors(matrix, self.shape, self.order)


class _ArrangedKernel:
    def __init__(self, kernel: Kernel, shape: Sequence[int], order: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.shape, self.order = tuple(shape), order

    def remember(
        self, before: LayerCall, mix: GradientTerms, space: Workspace, wanted: Container[str]
    ) -> LayerCall | StoredGradients:
        return self.kernel.remember(before, mix, space, wanted)

    def contributions(
        self, now: LayerCall, before: LayerCall | StoredGradients | None, mix: GradientTerms, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, PerExampleVectors]]:  # fmt: skip
        for name, piece in self.kernel.contributions(now, before, mix, space, wanted):
            yield name, PermutedVectors(piece, self.shape, self.order)


@lru_cache(maxsize=256)
def matrix_kernel(shape: tuple[int, ...], arrangement: MatrixLayout) -> Kernel:
    """The kernel of x W, W the parameter in that arrangement."""
    sizes = [shape[axis] for axis in arrangement.order]
    inputs, outputs = prod(sizes[: arrangement.rows]), prod(sizes[arrangement.rows :])
    return _ArrangedKernel(linear_kernel(outputs, inputs, swapped=True), shape, arrangement.order)


class MatrixForm(NamedTuple):
    """A sum of products as one product with a matrix."""

    place: int  # of the parameter among the operands
    rest: str  # the equation of the others
    arrangement: MatrixLayout
    result: tuple[int, ...]  # the order of the result's axes


def matrix_form(equation: Any, shapes: Sequence[tuple[int, ...]], shared: Sequence[bool]) -> MatrixForm | None:
    """The equation as a product with the one operand that is shared, or None."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation or sum(shared) != 1:
        return None
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(shared) or len(terms) < 2 or any(len(set(t)) < len(t) for t in (*terms, result)):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if len(term) != len(shape) or any(sizes.setdefault(i, n) != n for i, n in zip(term, shape, strict=True)):
            return None  # an axis of one is repeated
    place = list(shared).index(True)
    own = terms[place]
    others = [term for k, term in enumerate(terms) if k != place]
    seen = set("".join(others))
    summed = [index for index in own if index in seen]
    free = [index for index in own if index not in seen]
    if not summed or set(summed) & set(result) or not set(free) <= set(result):
        return None  # an index of parameter, rest and result at once; or one that is summed in the parameter alone
    lead = [index for index in result if index in seen]
    made = lead + free
    return MatrixForm(
        place,
        ",".join(others) + "->" + "".join(lead + summed),
        MatrixLayout(tuple(own.index(index) for index in summed + free), len(summed)),
        tuple(made.index(index) for index in result),
    )


_BLOCK = 1 << 20  # numbers of float64 written out at a time


class TiedGradients:
    """Per-example vectors that are sums of several contributions to one parameter."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[PerExampleVectors] = []

    def add(self, part: PerExampleVectors) -> None:
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

    def together(self, persons: UnitAssignment) -> PerExampleVectors:
        """Uses add up person by person as they do example by example: the same sums, of longer sequences."""
        if len(self.parts) == 1:
            return self.parts[0].together(persons)
        stored = {k: part.together(persons) for k, part in enumerate(self.parts) if isinstance(part, Stored)}

        def make(group: SizeBucket) -> TiedGradients:
            joint = TiedGradients(self.size)
            for k, part in enumerate(self.parts):
                joint.parts.append(
                    Stored(stored[k].values[:, group.people]) if k in stored else _of_people(part, group)
                )
            return joint

        return UnitVectors(persons, persons.alike(_device(self.parts[0])), self, make)

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


def _examples(part: PerExampleVectors) -> int:
    if isinstance(part, PermutedVectors):
        return _examples(part.matrix)
    if isinstance(part, OuterProducts):
        return len(part.rights[0])
    if isinstance(part, TokenSums):
        return len(part.tokens)
    assert isinstance(part, Stored)
    return part.values.shape[1]


def _of_people(part: PerExampleVectors, group: SizeBucket) -> PerExampleVectors:
    if isinstance(part, PermutedVectors):
        return part.around(_of_people(part.matrix, group))
    if isinstance(part, OuterProducts):
        return part.of_people(group)
    assert isinstance(part, TokenSums)
    return part.of(group)


def _device(part: PerExampleVectors) -> torch.device:
    if isinstance(part, PermutedVectors):
        return _device(part.matrix)
    if isinstance(part, OuterProducts):
        return part.lefts[0].device
    assert isinstance(part, Stored | TokenSums)
    return part.values.device


def kernel_vectors(kernel: Kernel, record: LayerCall, wanted: Container[str]) -> dict[str, Tensor]:
    """What a kernel makes of one point, written out: (records, size) by role."""
    nothing = Workspace(0.0, torch.empty(0, dtype=record.output_grad.dtype))
    pieces = kernel.contributions(record, None, GradientTerms(gradient=True, change=False), nothing, wanted)
    return {role: written(piece, slice(None)).flatten(2)[0] for role, piece in pieces}


def written(part: PerExampleVectors, where: slice) -> Tensor:
    """The vectors of some records, (families, records, …)."""
    if isinstance(part, PermutedVectors):
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
