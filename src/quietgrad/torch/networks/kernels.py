"""Per-example kernels of the operations that networks are made of.

A kernel turns what a tap kept of an operation, its input a and the gradient b at its output (at one point or at
two), into `PerExampleVectors` for each parameter:

    linear, matrix products, convolutions   weight Σ_t b_t ⊗ a_t, stored, by Gram matrices, or as factors
    embedding                               rows touched by the record's tokens
    biases                                  Σ_t b_t

Which form a weight takes depends on sizes and the memory budget alone, never on timing: runs reproduce. Vectors of
a parameter that several operations use (weight tying) add up before they have a norm.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from quietgrad.torch.networks.outer_products import (
    UNIT,
    Convolution,
    LinearLayerMap,
    OuterLayer,
    OuterProducts,
    few_positions,
    write_gradients,
)
from quietgrad.torch.networks.vectors import (
    GradientTerms,
    LayerCall,
    PerExampleVectors,
    Stored,
    StoredGradients,
    TokenSums,
    Workspace,
    squares_of,
)

Contributions = Iterator[tuple[str, PerExampleVectors]]


class Kernel(Protocol):
    """Contributions of one kind of operation."""

    def remember(
        self, before: LayerCall, mix: GradientTerms, space: Workspace, wanted: Container[str]
    ) -> LayerCall | StoredGradients:
        """Return what to keep of the previous point: per-record vectors where there is room, or the call itself."""
        ...

    def contributions(
        self, now: LayerCall, before: LayerCall | StoredGradients | None, mix: GradientTerms, space: Workspace,
        wanted: Container[str],
    ) -> Contributions:  # fmt: skip
        """(role, contribution) of each wanted parameter."""
        ...


class _OuterKernel:
    """Matrix products and convolutions. ``swapped``: the weight is Σ_t a_t ⊗ b_t, as that of x @ W is."""

    def __init__(self, layer: OuterLayer, swapped: bool = False) -> None:
        self.layer = layer
        self.swapped = swapped

    def _sum_positions(self, grads: Tensor) -> Tensor:
        axes = [axis for axis in range(1, grads.dim()) if axis != grads.dim() + self.layer.channel_dim]
        return grads.sum(axes) if axes else grads

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
    ) -> Contributions:  # fmt: skip
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
    ) -> Contributions:  # fmt: skip
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
    """Return the kernel of x Wᵀ, or with ``swapped`` of x W, where the weight's rows are the inputs'."""
    return _OuterKernel(LinearLayerMap(*((inputs, outputs) if swapped else (outputs, inputs))), swapped)


@lru_cache(maxsize=1024)
def convolution_kernel(
    weight: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
    groups: int,
) -> Kernel:  # fmt: skip
    """Return the kernel of a convolution. ``padding`` has the form that F.pad takes."""
    return _OuterKernel(Convolution(weight, stride, padding, dilation, groups))


@lru_cache(maxsize=1024)
def embedding_kernel(rows: int, padding_idx: int | None) -> Kernel:
    return _EmbeddingKernel(rows, padding_idx)


_BLOCK = 1 << 20  # numbers of float64 written out at a time


class TiedGradients:
    """Per-example vectors that are sums of several contributions to one parameter."""

    def __init__(self, size: int, parts: Sequence[PerExampleVectors] = ()) -> None:
        self.size = size
        self.parts = list(parts)

    def __len__(self) -> int:
        return len(self.parts[0])

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

    def squared_norms(self) -> Tensor:
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

    def some(self, rows: Tensor) -> TiedGradients:
        return TiedGradients(self.size, [part.some(rows) for part in self.parts])

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
        step = max(1, _BLOCK // max(1, self.size))
        for start in range(0, len(self), step):
            where = slice(start, min(start + step, len(self)))
            first, *others = (part.written(where).double() for part in self.parts)
            yield where, sum(others, first)

    def written(self, where: slice) -> Tensor:
        first, *others = (part.written(where) for part in self.parts)
        return sum(others, first)


def kernel_vectors(kernel: Kernel, record: LayerCall, wanted: Container[str]) -> dict[str, Tensor]:
    """Write out the vectors that a kernel makes of one point: (records, size) by role."""
    nothing = Workspace(0.0, torch.empty(0, dtype=record.output_grad.dtype))
    pieces = kernel.contributions(record, None, GradientTerms(gradient=True, change=False), nothing, wanted)
    return {role: piece.written(slice(None))[0] for role, piece in pieces}


def _tied_norms(outer: OuterProducts, tokens: TokenSums) -> Tensor:
    """‖Σ_t b_t ⊗ a_t + Σ_s e_{w_s} ⊗ c_s‖² = ‖·‖² + ‖·‖² + 2 Σ_ts b_t[w_s]·⟨a_t, c_s⟩, from above.

    All terms are outer products, so the bound of :meth:`OuterProducts._gram_part` holds with
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
