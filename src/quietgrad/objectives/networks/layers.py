"""Per-example kernels of the layers that networks are made of.

A kernel turns what the tape recorded of a layer, its input a and output gradient b (at one point or at two),
into one `Contribution` per trainable parameter:

    Linear, Conv1d/2d/3d       weight Σ_t b_t ⊗ a_t, written out, by Gram matrices, or as factors
    GroupNorm, LayerNorm, …    weight Σ_t b_t · x̂_t, small enough to be written out always
    Embedding                  rows touched by the example's tokens
    biases                     Σ_t b_t
Which form a weight takes depends on sizes and the memory budget alone, never on timing: runs reproduce.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.objectives.networks.contributions import (
    Combination,
    Contribution,
    Record,
    Stored,
    TokenSums,
    Workspace,
    Written,
)
from quietgrad.objectives.networks.maps import Convolution, LinearMap
from quietgrad.objectives.networks.outer import OuterLayer, OuterProducts, few_positions, write_gradients

__all__ = ["Kernel", "embedding_kernel", "kernel_for", "layer_norm_kernel", "linear_kernel"]

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Kernel(Protocol):
    """Contributions of one layer type."""

    any_batch_dim: bool  # the example axis may be any axis but the last

    def remember(
        self, before: Record, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Record | Written:
        """What to keep of the previous point: per-example vectors where there is room, or the record itself."""
        ...

    def contributions(
        self,
        now: Record,
        before: Record | Written | None,
        mix: Combination,
        space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, Contribution]]:
        """(name in the layer, contribution) of each wanted parameter."""
        ...


class _OuterKernel:
    """Linear and convolution layers. ``swapped``: the weight is Σ_t a_t ⊗ b_t, as that of x @ W is."""

    def __init__(self, layer: OuterLayer, sum_positions: Callable[[Tensor], Tensor], swapped: bool = False) -> None:
        self.layer = layer
        self.swapped = swapped
        self.any_batch_dim = layer.channel_dim == -1
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
        """Memory for all examples' vectors; with few positions the factors are faster, and none is taken."""
        positions = record.output_grad[0].numel() // self.layer.shape[0]
        if positions == 1 or few_positions(self.layer, positions):
            return None
        return space.take(mix.families, len(record.input), *self.layer.shape)


class _AffineKernel:
    """Scale and shift after a normalisation x̂: the gradient of the scale is Σ_t b_t · x̂_t."""

    def __init__(self, normalise: Callable[[Tensor], Tensor], sum_positions: Callable[[Tensor], Tensor],
                 any_batch_dim: bool) -> None:  # fmt: skip
        self.normalise = normalise
        self.any_batch_dim = any_batch_dim
        self._sum_positions = sum_positions

    def remember(
        self, before: Record, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Record | Written:
        if not mix.gradient:
            return before
        scale, shift = self._sums(before)
        return Written({"weight": scale, "bias": shift})

    def contributions(
        self, now: Record, before: Record | Written | None, mix: Combination, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, Contribution]]:  # fmt: skip
        scale, shift = self._sums(now)
        scale_change = shift_change = None
        if isinstance(before, Written):
            scale_change = torch.sub(scale, before.vectors["weight"], alpha=mix.scale)
            shift_change = torch.sub(shift, before.vectors["bias"], alpha=mix.scale)
        elif before is not None:
            change = torch.sub(now.output_grad, before.output_grad, alpha=mix.scale)
            shift_change = self._sum_positions(change)
            old = self.normalise(before.input)
            step = self.normalise(now.input).sub_(old)
            scale_change = self._sum_positions(step.mul_(now.output_grad).add_(old.mul_(change)))
        if "weight" in wanted:
            yield "weight", mix.stored(scale, scale_change)
        if "bias" in wanted:
            yield "bias", mix.stored(shift, shift_change)

    def _sums(self, record: Record) -> tuple[Tensor, Tensor]:
        scaled = self.normalise(record.input).mul_(record.output_grad)
        return self._sum_positions(scaled), self._sum_positions(record.output_grad)


class _EmbeddingKernel:
    any_batch_dim = True

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
            if torch.equal(now.input, before.input):
                grads = mix.join(grads, torch.sub(grads, old, alpha=mix.scale), 2)
            else:  # the tokens depend on the parameters: both sets of rows move
                tokens = torch.cat([tokens, before.input.flatten(1)], 1)
                gone = mix.join(torch.zeros_like(old), -mix.scale * old, 2)
                grads = torch.cat([mix.join(grads, grads, 2), gone], 1)
        if self.padding_idx is not None:
            grads = grads * (tokens != self.padding_idx)[:, :, None, None]
        yield "weight", TokenSums(tokens, grads, self.rows)


def kernel_for(module: nn.Module) -> Kernel | None:
    """The kernel of a layer, or None if it has none.

    Only the layer types themselves qualify: a subclass with its own `forward`, or a re-parametrised weight,
    may use the parameters in another way.

    >>> from torch import nn
    >>> kernel_for(nn.Linear(3, 2)) is None, kernel_for(nn.Bilinear(3, 3, 2)) is None
    (False, True)
    """
    if not set(module._parameters) <= {"weight", "bias"} or not isinstance(
        module._parameters.get("weight"), Tensor
    ):
        return None
    for kind, build in _KERNELS:
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return build(module)
    return None


def linear_kernel(outputs: int, inputs: int, swapped: bool = False) -> Kernel:
    """Of x Wᵀ, or ``swapped`` of x W: the weight's rows are then the inputs'."""
    layer = LinearMap(inputs, outputs) if swapped else LinearMap(outputs, inputs)
    return _OuterKernel(layer, _sum_leading, swapped)


def layer_norm_kernel(shape: list[int], eps: float) -> Kernel:
    """Of a normalisation over the last axes."""
    return _AffineKernel(lambda x: F.layer_norm(x, shape, eps=eps), _sum_before(len(shape)), True)


def embedding_kernel(rows: int, padding_idx: int | None) -> Kernel:
    """Of a table with so many rows."""
    return _EmbeddingKernel(rows, padding_idx)


def _linear(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.Linear)
    return linear_kernel(module.out_features, module.in_features)


def _convolution(module: nn.Module) -> Kernel:
    assert isinstance(module, _Conv)
    return _OuterKernel(Convolution(module), _sum_trailing)


def _group_norm(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.GroupNorm)
    groups, eps = module.num_groups, module.eps
    return _AffineKernel(lambda x: F.group_norm(x, groups, eps=eps), _sum_trailing, False)


def _instance_norm(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    eps = module.eps
    return _AffineKernel(lambda x: F.instance_norm(x, eps=eps), _sum_trailing, False)


def _layer_norm(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.LayerNorm)
    return layer_norm_kernel(list(module.normalized_shape), module.eps)


def _rms_norm(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.RMSNorm)
    shape, eps = list(module.normalized_shape), module.eps
    return _AffineKernel(lambda x: F.rms_norm(x, shape, eps=eps), _sum_before(len(shape)), True)


def _embedding(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.Embedding)
    return embedding_kernel(module.num_embeddings, module.padding_idx)


_KERNELS: list[tuple[type[nn.Module], Callable[[nn.Module], Kernel]]] = [
    (nn.Linear, _linear),
    (nn.Conv1d, _convolution),
    (nn.Conv2d, _convolution),
    (nn.Conv3d, _convolution),
    (nn.GroupNorm, _group_norm),
    (nn.LayerNorm, _layer_norm),
    (nn.RMSNorm, _rms_norm),
    (nn.InstanceNorm1d, _instance_norm),
    (nn.InstanceNorm2d, _instance_norm),
    (nn.InstanceNorm3d, _instance_norm),
    (nn.Embedding, _embedding),
]


def _sum_trailing(values: Tensor) -> Tensor:
    """(examples, channels, …) summed over the positions."""
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _sum_leading(values: Tensor) -> Tensor:
    """(examples, …, channels) summed over the positions."""
    return values.flatten(1, -2).sum(1) if values.dim() > 2 else values


def _sum_before(trailing: int) -> Callable[[Tensor], Tensor]:
    """(examples, …, *shape) summed over the positions, shape flattened."""

    def sum_positions(values: Tensor) -> Tensor:
        values = values.flatten(-trailing)
        return _sum_leading(values)

    return sum_positions
