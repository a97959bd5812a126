"""Per-record kernels of the operations that networks are made of.

A kernel turns what a tap kept of an operation, its input a and the gradient b at its output (at one point or at
two), into one `Contribution` per parameter:

    linear, matrix products, convolutions   weight Σ_t b_t ⊗ a_t, written out, by Gram matrices, or as factors
    embedding                               rows touched by the record's tokens
    biases                                  Σ_t b_t

Which form a weight takes depends on sizes and the memory budget alone, never on timing: runs reproduce.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from quietgrad.objectives.networks.contributions import (
    Combination,
    Contribution,
    Record,
    Stored,
    TokenSums,
    Workspace,
    Written,
)
from quietgrad.objectives.networks.maps import Convolution, LinearMap, SeveralRecords
from quietgrad.objectives.networks.outer import OuterLayer, OuterProducts, few_positions, write_gradients

__all__ = ["Kernel", "convolution_kernel", "embedding_kernel", "linear_kernel"]


class Kernel(Protocol):
    """Contributions of one kind of operation."""

    def remember(
        self, before: Record, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Record | Written:
        """What to keep of the previous point: per-record vectors where there is room, or the record itself."""
        ...

    def contributions(
        self,
        now: Record,
        before: Record | Written | None,
        mix: Combination,
        space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, Contribution]]:
        """(role, contribution) of each wanted parameter."""
        ...


class _OuterKernel:
    """Matrix products and convolutions. ``swapped``: the weight is Σ_t a_t ⊗ b_t, as that of x @ W is."""

    def __init__(self, layer: OuterLayer, sum_positions: Callable[[Tensor], Tensor], swapped: bool = False) -> None:
        self.layer = layer
        self.swapped = swapped
        self._sum_positions = sum_positions

    def remember(
        self, before: Record, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Record | Written:
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
        return Written(vectors)

    def contributions(
        self, now: Record, before: Record | Written | None, mix: Combination, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, Contribution]]:  # fmt: skip
        if "weight" in wanted:
            yield "weight", self._weight(now, before, mix, space)
        if "bias" in wanted:
            total, change = self._sum_positions(now.output_grad), None
            if isinstance(before, Written):
                change = torch.sub(total, before.vectors["bias"], alpha=mix.scale)
            elif before is not None:
                change = self._sum_positions(torch.sub(now.output_grad, before.output_grad, alpha=mix.scale))
            yield "bias", mix.stored(total, change)

    def _weight(
        self, now: Record, before: Record | Written | None, mix: Combination, space: Workspace
    ) -> Contribution:
        now = self._factors(now)
        if isinstance(before, Written):
            values = before.vectors["weight"]
            squares = write_gradients(self.layer, now, values[0], values[1], mix.scale)
            return Stored(values.flatten(2), squares)
        factors = OuterProducts.of(self.layer, now, before and self._factors(before), mix)
        room = self._room(now, mix, space)
        return factors if room is None else factors.stored(room)

    def _factors(self, record: Record) -> Record:
        return Record(record.output_grad, record.input) if self.swapped else record

    def _room(self, record: Record, mix: Combination, space: Workspace) -> Tensor | None:
        """Memory for all records' vectors; with few positions the factors are faster, and none is taken."""
        positions = record.output_grad[0].numel() // self.layer.shape[0]
        if positions == 1 or few_positions(self.layer, positions):
            return None
        return space.take(mix.families, len(record.input), *self.layer.shape)


class _EmbeddingKernel:
    def __init__(self, rows: int, padding_idx: int | None) -> None:
        self.rows, self.padding_idx = rows, padding_idx

    def remember(self, before: Record, mix: Combination, space: Workspace, wanted: Container[str]) -> Record:
        return before

    def contributions(
        self, now: Record, before: Record | Written | None, mix: Combination, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, Contribution]]:  # fmt: skip
        assert not isinstance(before, Written)
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
    layer = LinearMap(inputs, outputs) if swapped else LinearMap(outputs, inputs)
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
