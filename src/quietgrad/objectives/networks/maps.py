"""How linear and convolution layers see their weight as a matrix: inputs as columns, output gradients as rows."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.objectives.networks import passes

__all__ = ["Convolution", "LinearMap", "SeveralRecords"]

_CACHE = 1 << 21  # bytes of unfolded input worked on at a time; two megabytes stay in a core's cache


class LinearMap:
    """A linear layer on vectors or sequences; see :class:`~quietgrad.objectives.networks.outer.OuterLayer`."""

    channel_dim = -1
    groups = 1

    def __init__(self, outputs: int, inputs: int) -> None:
        self.shape = (outputs, inputs)

    def columns(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1, -2).mT if inputs.dim() > 2 else inputs.unsqueeze(2)

    rows = columns

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        torch.bmm(self.rows(grads), self.columns(inputs).mT, out=out)

    def weight_gradient(self, grads: Tensor, inputs: Tensor) -> Tensor:
        return (grads.flatten(0, -2).double().T @ inputs.flatten(0, -2).double()).flatten()

    def block(self, inputs: Tensor, families: int) -> int:
        return max(1, 4 * _CACHE // (families * prod(self.shape) * inputs.element_size()))


class Convolution:
    """A convolution in any number of dimensions; see :class:`~quietgrad.objectives.networks.outer.OuterLayer`."""

    channel_dim = 1

    def __init__(
        self,
        weight: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> None:
        self.groups = groups
        self.shape = (weight[0], prod(weight[1:]))
        self.kernel = weight[2:]
        self.stride, self.dilation = stride, dilation
        self.padding = padding
        before, after = self.padding[::-2], self.padding[-2::-2]
        self.built_in = before if before == after else None
        # oneDNN works in blocks of 16 channels; there, if it has positions enough to be worth it, one
        # convolution with a group per example is fastest.
        self.blocked = groups == 1 and all(c % 16 == 0 for c in weight[:2])
        self.depthwise = weight[1] == 1 and groups == weight[0] and len(self.kernel) == 2

    def _grouped(self, inputs: Tensor) -> bool:
        return self.blocked and inputs[0, 0].numel() >= 256 * prod(self.stride)

    def _padded(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs, self.padding) if any(self.padding) else inputs

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
        elif self._shifted(inputs) and out.is_contiguous():
            self._shift(grads, inputs, out)
        else:
            block = torch.bmm(self.rows(grads), self.columns(inputs).mT)
            block = block.view(len(grads), self.groups, -1, self.shape[0] // self.groups, self.shape[1])
            out.copy_(block.transpose(1, 2).reshape(out.shape))

    def _shifted(self, inputs: Tensor) -> bool:
        """Whether a filter's gradient is taken channel by channel: columns of one channel make no good matrices."""
        return self.depthwise and inputs.device.type == "cpu" and inputs.dtype in (torch.float32, torch.float64)

    def _shift(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        """A filter's entry at (p, q) is ⟨b, x shifted by (p, q)⟩: with b as wide as x, a product of two sequences.

        With a stride of s, x falls into s² images of every s-th row and column, and b is correlated with each.
        Out may have several families of channels, as many as b has.
        """
        x = self._padded(inputs)
        (kernel_h, kernel_w), (stride_h, stride_w), (step_h, step_w) = self.kernel, self.stride, self.dilation
        examples, channels, high, wide = grads.shape
        families = channels // x.shape[1]
        sequences = grads.new_empty(0)
        by_phase: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for p in range(kernel_h):
            for q in range(kernel_w):
                phase = (p * step_h % stride_h, q * step_w % stride_w)
                at = p * step_h // stride_h, q * step_w // stride_w, p * kernel_w + q
                by_phase.setdefault(phase, []).append(at)
        for (top, left), entries in by_phase.items():
            image = x[:, :, top::stride_h, left::stride_w]
            width = image.shape[3]
            if families > 1:
                image = image.repeat(1, families, 1, 1)
            if len(sequences) == 0 or width != sequences.shape[1]:
                sequences = F.pad(grads, (0, width - wide)).reshape(examples * channels, -1)
            length = (high - 1) * width + wide
            shifts = np.array([down * width + right for down, right, _ in entries])
            rows = image.reshape(examples * channels, -1)
            passes.correlate(
                sequences, rows, length, shifts, out.view(examples * channels, -1),
                np.array([place for _, _, place in entries]),
            )  # fmt: skip

    def weight_gradient(self, grads: Tensor, inputs: Tensor) -> Tensor:
        # As a product of matrices: a convolution in float64 is many times slower.
        rows, columns = (
            side.double().reshape(-1, self.groups, *side.shape[1:])
            for side in (self.rows(grads), self.columns(inputs))
        )
        return torch.einsum("egot,egit->goi", rows, columns).flatten()

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
        if self._shifted(inputs):
            return max(1, _CACHE // (inputs[0].numel() * inputs.element_size()))
        positions = inputs[0, 0].numel() // prod(self.stride) * self.groups
        return max(1, _CACHE // (self.shape[1] * positions * inputs.element_size()))


class SeveralRecords:
    """A convolution whose examples are people: (people, records, channels, …), gradients added up over records."""

    channel_dim = 2

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.groups: int = layer.groups
        self.shape: tuple[int, int] = layer.shape

    def _beside(self, sides: Tensor, people: int) -> Tensor:
        """(people·records·groups, channels, positions): all positions of a person's records in one row."""
        records = len(sides) // (people * self.groups)
        split = sides.view(people, records, self.groups, *sides.shape[1:])
        return split.permute(0, 2, 3, 1, 4).reshape(people * self.groups, sides.shape[1], -1)

    def columns(self, inputs: Tensor) -> Tensor:
        return self._beside(self.layer.columns(inputs.flatten(0, 1)), len(inputs))

    def rows(self, grads: Tensor) -> Tensor:
        return self._beside(self.layer.rows(grads.flatten(0, 1)), len(grads))

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        records, most = inputs.shape[1], self._at_once(inputs)
        out.zero_()
        for start in range(0, records, most):
            part = slice(start, min(start + most, records))
            each = out.new_empty((len(out), part.stop - part.start, *out.shape[1:]))
            self.layer.products(grads[:, part].flatten(0, 1), inputs[:, part].flatten(0, 1), each.flatten(0, 1))
            out += each.sum(1)

    def weight_gradient(self, grads: Tensor, inputs: Tensor) -> Tensor:
        gradient: Tensor = self.layer.weight_gradient(grads.flatten(0, 1), inputs.flatten(0, 1))
        return gradient

    def block(self, inputs: Tensor, families: int) -> int:
        return max(1, self._at_once(inputs) // inputs.shape[1])

    def _at_once(self, inputs: Tensor) -> int:
        """Records worked on together: of several people, or a part of one person's."""
        at_once: int = self.layer.block(inputs.flatten(0, 1), 1)
        return at_once
