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
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.objectives.contributions import (
    Combination,
    Contribution,
    OuterLayer,
    OuterProducts,
    Record,
    TokenSums,
    Workspace,
    same_input,
    write_gradient_and_change,
)

__all__ = ["Kernel", "kernel_for"]

_CACHE = 1 << 21  # bytes of unfolded input worked on at a time; two megabytes stay in a core's cache
_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Kernel(Protocol):
    """Contributions of one layer type."""

    any_batch_dim: bool  # the example axis may be any axis but the last

    def contributions(
        self, now: Record, before: Record | None, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Iterator[tuple[str, Contribution]]:
        """(name in the layer, contribution) of each wanted parameter."""
        ...


class _LinearMap:
    channel_dim = -1
    groups = 1

    def __init__(self, module: nn.Linear) -> None:
        self.shape = (module.out_features, module.in_features)

    def columns(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1, -2).mT if inputs.dim() > 2 else inputs.unsqueeze(2)

    rows = columns

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        torch.bmm(self.rows(grads), self.columns(inputs).mT, out=out)

    def weight_gradient(self, grads: Tensor, inputs: Tensor) -> Tensor:
        return (grads.flatten(0, -2).T @ inputs.flatten(0, -2)).flatten()

    def block(self, inputs: Tensor, families: int) -> int:
        return max(1, 4 * _CACHE // (families * prod(self.shape) * inputs.element_size()))


class _Convolution:
    channel_dim = 1

    def __init__(self, module: _Conv) -> None:
        weight = module.weight
        self.groups = module.groups
        self.shape = (weight.shape[0], weight[0].numel())
        self.kernel = tuple(weight.shape[2:])
        self.stride, self.dilation = module.stride, module.dilation
        self.mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self.padding = tuple(module._reversed_padding_repeated_twice)
        before, after = self.padding[::-2], self.padding[-2::-2]
        self.built_in = before if self.mode == "constant" and before == after else None
        # oneDNN works in blocks of 16 channels; there, if it has positions enough to be worth it, one
        # convolution with a group per example is fastest.
        self.blocked = module.groups == 1 and all(c % 16 == 0 for c in weight.shape[:2])

    def _grouped(self, inputs: Tensor) -> bool:
        return self.blocked and inputs[0, 0].numel() >= 256 * prod(self.stride)

    def _padded(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs, self.padding, self.mode) if any(self.padding) else inputs

    def columns(self, inputs: Tensor) -> Tensor:
        x = self._padded(inputs)
        examples, channels, *sizes = x.shape
        axes = list(zip(sizes, self.kernel, self.stride, self.dilation, x.stride()[2:], strict=True))
        places = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d, _ in axes]
        strides = [d * step for *_, d, step in axes] + [s * step for _, _, s, _, step in axes]
        patches = x.as_strided(
            (examples, channels, *self.kernel, *places), (*x.stride()[:2], *strides), x.storage_offset()
        )
        return patches.reshape(examples * self.groups, self.shape[1], prod(places))

    def rows(self, grads: Tensor) -> Tensor:
        if self.groups == 1:
            return grads.flatten(2)
        families = grads.shape[1] // self.shape[0]
        examples, fan_out = len(grads), self.shape[0] // self.groups
        split = grads.reshape(examples, families, self.groups, fan_out, -1).transpose(1, 2)
        return split.reshape(examples * self.groups, families * fan_out, -1)

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        if self._grouped(inputs):
            examples, outputs = grads.shape[:2]
            weight = self._backward(
                grads.reshape(1, -1, *grads.shape[2:]),
                inputs.flatten(0, 1).unsqueeze(0),
                inputs.new_empty((examples * outputs, inputs.shape[1], *self.kernel)),
                examples,
            )
            out.copy_(weight.view_as(out))
        elif self.groups == 1:
            torch.bmm(self.rows(grads), self.columns(inputs).mT, out=out)
        else:
            block = torch.bmm(self.rows(grads), self.columns(inputs).mT)
            block = block.view(len(grads), self.groups, -1, self.shape[0] // self.groups, self.shape[1])
            out.copy_(block.transpose(1, 2).reshape(out.shape))

    def weight_gradient(self, grads: Tensor, inputs: Tensor) -> Tensor:
        weight = inputs.new_empty((self.shape[0], inputs.shape[1] // self.groups, *self.kernel))
        return self._backward(grads, inputs, weight, self.groups).flatten()

    def _backward(self, grads: Tensor, inputs: Tensor, weight: Tensor, groups: int) -> Tensor:
        none = (0,) * len(self.kernel)
        padding = self.built_in
        if padding is None:
            inputs, padding = self._padded(inputs), none
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grads, inputs, weight, None, self.stride, padding, self.dilation, False, none, groups,
            [False, True, False],
        )  # fmt: skip
        return gradients[1]

    def block(self, inputs: Tensor, families: int) -> int:
        if self._grouped(inputs):
            return 64
        positions = inputs[0, 0].numel() // prod(self.stride) * self.groups
        return max(1, _CACHE // (self.shape[1] * positions * inputs.element_size()))


class _OuterKernel:
    """Linear and convolution layers."""

    def __init__(self, layer: OuterLayer, sum_positions: Callable[[Tensor], Tensor]) -> None:
        self.layer = layer
        self.any_batch_dim = layer.channel_dim == -1
        self._sum_positions = sum_positions

    def contributions(
        self, now: Record, before: Record | None, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Iterator[tuple[str, Contribution]]:
        if "weight" in wanted:
            yield "weight", self._weight(now, before, mix, space)
        if "bias" in wanted:
            change = None
            if before is not None:
                change = self._sum_positions(torch.sub(now.output_grad, before.output_grad, alpha=mix.scale))
            yield "bias", mix.stored(self._sum_positions(now.output_grad), change)

    def _weight(self, now: Record, before: Record | None, mix: Combination, space: Workspace) -> Contribution:
        values = None
        if now.output_grad[0].numel() > self.layer.shape[0]:  # more than one position
            values = space.take(mix.families, len(now.input), *self.layer.shape)
        if values is not None and before is not None and mix.gradient and not same_input(now, before):
            return write_gradient_and_change(self.layer, now, before, mix.scale, values)
        factors = OuterProducts.of(self.layer, now, before, mix)
        return factors if values is None else factors.stored(values)


class _AffineKernel:
    """Scale and shift after a normalisation x̂: the gradient of the scale is Σ_t b_t · x̂_t."""

    def __init__(self, normalise: Callable[[Tensor], Tensor], sum_positions: Callable[[Tensor], Tensor],
                 any_batch_dim: bool) -> None:  # fmt: skip
        self.normalise = normalise
        self.any_batch_dim = any_batch_dim
        self._sum_positions = sum_positions

    def contributions(
        self, now: Record, before: Record | None, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Iterator[tuple[str, Contribution]]:
        scale, shift = self._sums(now)
        scale_change = shift_change = None
        if before is not None and mix.gradient:
            old_scale, old_shift = self._sums(before)
            scale_change = torch.sub(scale, old_scale, alpha=mix.scale)
            shift_change = torch.sub(shift, old_shift, alpha=mix.scale)
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

    def __init__(self, module: nn.Embedding) -> None:
        self.rows, self.padding_idx = module.num_embeddings, module.padding_idx

    def contributions(
        self, now: Record, before: Record | None, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Iterator[tuple[str, Contribution]]:
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


def _linear(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.Linear)
    return _OuterKernel(_LinearMap(module), _sum_leading)


def _convolution(module: nn.Module) -> Kernel:
    assert isinstance(module, _Conv)
    return _OuterKernel(_Convolution(module), _sum_trailing)


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
    shape, eps = list(module.normalized_shape), module.eps
    return _AffineKernel(lambda x: F.layer_norm(x, shape, eps=eps), _sum_before(len(shape)), True)


def _rms_norm(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.RMSNorm)
    shape, eps = list(module.normalized_shape), module.eps
    return _AffineKernel(lambda x: F.rms_norm(x, shape, eps=eps), _sum_before(len(shape)), True)


def _embedding(module: nn.Module) -> Kernel:
    assert isinstance(module, nn.Embedding)
    return _EmbeddingKernel(module)


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
