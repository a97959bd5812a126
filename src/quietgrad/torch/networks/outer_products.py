"""Per-example vectors that are sums of outer products: the weights of linear and convolution layers.

A layer map says how the layer sees its weight as a matrix: inputs as columns, output gradients as rows. What is
measured is what is summed. With few positions both come from the factors in float64: norms by Gram matrices, sums
as weight gradients. With many, the vectors are written out a few examples at a time, for norms and for sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.torch.networks import compiled_sums
from quietgrad.torch.networks.vectors import GradientTerms, LayerCall, Stored, squares_of

_CACHE = 1 << 21  # bytes of unfolded input worked on at a time; two megabytes stay in a core's cache
_CALL = 1 << 23  # multiplications of an example that are worth a call of their own


class LinearLayerMap:
    """A linear layer on vectors or sequences, as an :class:`OuterLayer`."""

    channel_dim = -1
    groups = 1

    def __init__(self, outputs: int, inputs: int) -> None:
        self.shape = (outputs, inputs)

    def columns(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1, -2).mT if inputs.dim() > 2 else inputs.unsqueeze(2)

    rows = columns

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        torch.bmm(self.rows(grads), self.columns(inputs).mT, out=out)

    def wide_columns(self, inputs: Tensor) -> Tensor:
        return self.columns(inputs.double())

    wide_rows = wide_columns

    def add_gradient(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        rows, columns = (side.flatten(0, -2).double() for side in (grads, inputs))
        out.view(self.shape).addmm_(rows.T, columns)

    def block(self, inputs: Tensor, families: int) -> int:
        return max(1, 4 * _CACHE // (families * prod(self.shape) * inputs.element_size()))


class Convolution:
    """A convolution in any number of dimensions, as an :class:`OuterLayer`.

    An example may have several images, (examples, images, channels, …): its gradient is their sum.
    """

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
        self.channel_dim = -1 - len(self.kernel)
        self.stride, self.dilation = stride, dilation
        self.padding = padding
        before, after = self.padding[::-2], self.padding[-2::-2]
        self.built_in = before if before == after else None
        # oneDNN works in blocks of 16 channels; there, if it has positions enough to be worth it, one
        # convolution with a group per example is fastest.
        self.blocked = groups == 1 and all(c % 16 == 0 for c in weight[:2])
        self.depthwise = weight[1] == 1 and groups == weight[0] and len(self.kernel) == 2
        self.few_channels = groups == 1 and weight[1] < 16

    def _grouped(self, inputs: Tensor) -> bool:
        return self.blocked and inputs[0, 0].numel() >= 256 * prod(self.stride)

    def _one_by_one(self, inputs: Tensor) -> bool:
        """Whether oneDNN is called for each example: of few channels, unfolding takes as long as the product.

        A call must be worth it. In float64 oneDNN has no fast convolution.
        """
        if not self.few_channels or inputs.device.type != "cpu" or inputs.dtype != torch.float32:
            return False
        return inputs[0, 0].numel() // prod(self.stride) * prod(self.shape) >= _CALL

    def _padded(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs, self.padding) if any(self.padding) else inputs

    def _images(self, values: Tensor) -> Tensor:
        return values.flatten(0, self.channel_dim - 1) if self._several(values) else values

    def _several(self, values: Tensor) -> bool:
        return values.dim() > 1 - self.channel_dim

    def _beside(self, sides: Tensor, given: Tensor) -> Tensor:
        """(examples·groups, channels, positions): all positions of an example's images in one row."""
        if not self._several(given):
            return sides
        split = sides.view(len(given), -1, self.groups, *sides.shape[1:])
        return split.permute(0, 2, 3, 1, 4).reshape(len(given) * self.groups, sides.shape[1], -1)

    def columns(self, inputs: Tensor) -> Tensor:
        x = self._padded(self._images(inputs))
        examples, channels, *sizes = x.shape
        axes = list(zip(sizes, self.kernel, self.stride, self.dilation, x.stride()[2:], strict=True))
        places = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d, _ in axes]
        strides = [d * step for *_, d, step in axes] + [s * step for _, _, s, _, step in axes]
        patches = x.as_strided(
            (examples, channels, *self.kernel, *places), (*x.stride()[:2], *strides), x.storage_offset()
        )
        return self._beside(patches.reshape(examples * self.groups, self.shape[1], prod(places)), inputs)

    def rows(self, grads: Tensor) -> Tensor:
        images = self._images(grads)
        if self.groups == 1:
            return self._beside(images.flatten(2), grads)
        families = images.shape[1] // self.shape[0]
        examples, fan_out = len(images), self.shape[0] // self.groups
        split = images.reshape(examples, families, self.groups, fan_out, -1).transpose(1, 2)
        return self._beside(split.reshape(examples * self.groups, families * fan_out, -1), grads)

    def products(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        if self._several(inputs):
            grads, inputs = (t.flatten(1, self.channel_dim - 1) for t in (grads, inputs))
            out.zero_()
            for some in range(0, inputs.shape[1], most := self._at_once(inputs)):
                part = slice(some, some + most)
                each = out.new_empty((len(out), inputs[:, part].shape[1], *out.shape[1:]))
                self.products(grads[:, part].flatten(0, 1), inputs[:, part].flatten(0, 1), each.flatten(0, 1))
                out += each.sum(1)
        elif self._grouped(inputs):
            examples, outputs = grads.shape[:2]
            weight = self._backward(
                grads.reshape(1, -1, *grads.shape[2:]),
                inputs.flatten(0, 1).unsqueeze(0),
                inputs.new_empty((examples * outputs, inputs.shape[1], *self.kernel)),
                examples,
            )
            out.copy_(weight.view_as(out))
        elif self._one_by_one(inputs):
            like = inputs.new_empty((grads.shape[1], inputs.shape[1], *self.kernel))
            for example, values in enumerate(out):
                here = slice(example, example + 1)
                values.copy_(self._backward(grads[here], inputs[here], like, 1).flatten(1))
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
            compiled_sums.correlate(
                sequences, rows, length, shifts, out.view(examples * channels, -1),
                np.array([place for _, _, place in entries]),
            )  # fmt: skip

    def wide_columns(self, inputs: Tensor) -> Tensor:
        if not self._unfolded(inputs):
            return self.columns(inputs.double())
        return compiled_sums.unfold(self._padded(inputs), self.kernel, self.stride, self.dilation).mT

    def wide_rows(self, grads: Tensor) -> Tensor:
        if self.groups > 1 or self._several(grads):
            return self.rows(grads.double())
        flat = grads.flatten(2)
        positions_first = flat.new_empty((len(flat), flat.shape[2], flat.shape[1]), dtype=torch.float64)
        return positions_first.copy_(flat.mT).mT

    def _unfolded(self, inputs: Tensor) -> bool:
        flat = self.groups == 1 and len(self.kernel) == 2 and not self._several(inputs)
        return flat and inputs.device.type == "cpu" and inputs.dtype in (torch.float32, torch.float64)

    def add_gradient(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        # As a product of matrices: a convolution in float64 is many times slower.
        rows, columns = self.wide_rows(self._images(grads)), self.wide_columns(self._images(inputs))
        if self.groups == 1:
            both = (side.mT.reshape(-1, side.shape[1]) for side in (rows, columns))
            out.view(self.shape).addmm_(next(both).T, next(both))
            return
        rows, columns = (side.reshape(-1, self.groups, *side.shape[1:]) for side in (rows, columns))
        out += torch.einsum("egot,egit->goi", rows, columns).flatten()

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
        if self._several(inputs):
            return max(1, self._at_once(inputs) // inputs.flatten(1, self.channel_dim - 1).shape[1])
        return self._at_once(inputs)

    def _at_once(self, inputs: Tensor) -> int:
        inputs = self._images(inputs)
        if self._grouped(inputs) or self._one_by_one(inputs):  # what fills the cache is a weight for each example
            return max(1, min(64, _CACHE // (prod(self.shape) * inputs.element_size())))
        if self._shifted(inputs):
            return max(1, _CACHE // (inputs[0].numel() * inputs.element_size()))
        positions = inputs[0, 0].numel() // prod(self.stride) * self.groups
        return max(1, _CACHE // (self.shape[1] * positions * inputs.element_size()))


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

    def wide_columns(self, inputs: Tensor) -> Tensor:
        """The columns in float64, which Gram matrices are taken of."""
        ...

    def wide_rows(self, grads: Tensor) -> Tensor:
        """The rows in float64."""
        ...

    def add_gradient(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        """out += Σ_i Σ_t b_t ⊗ a_t, the ordinary weight gradient, flat, computed in float64."""
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
        outputs, fan_in = layer.shape
        rank_one = self.positions == len(lefts) == 1
        # Gram matrices are taken in float64, at twice the cost of the same numbers in float32.
        self.by_gram = rank_one or 2 * self.positions * (outputs + layer.groups * fan_in) < outputs * fan_in

    def __len__(self) -> int:
        return len(self.rights[0])

    @classmethod
    def of(cls, layer: OuterLayer, now: LayerCall, before: LayerCall | None, mix: GradientTerms) -> OuterProducts:
        """Factors of g_i(θ) and of the change, by the split form."""
        if before is None:
            return cls(layer, [now.output_grad], [now.input], 1)
        change = torch.sub(now.output_grad, before.output_grad, alpha=mix.scale)
        left = mix.join(now.output_grad, change, layer.channel_dim)
        if _same_numbers(now.input, before.input):  # as the first layers see it
            return cls(layer, [left], [now.input], mix.families)
        step = now.input - before.input
        return cls(layer, [left, now.output_grad], [before.input, step], mix.families)

    def followed_by(self, other: OuterProducts) -> OuterProducts | None:
        """The sum of both, as outer products over one sequence of positions; None if the layer has no sequences."""
        if self.layer.channel_dim != -1 or self.layer.shape != other.layer.shape:
            return None

        def both(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
            longest = range(max(len(mine), len(theirs)))
            return [torch.cat([_sequence(t[k]) for t in (mine, theirs) if k < len(t)], 1) for k in longest]

        lefts, rights = both(self.lefts, other.lefts), both(self.rights, other.rights)
        return OuterProducts(self.layer, lefts, rights, self.families)

    def squared_norms(self) -> Tensor:
        if self.by_gram:
            return torch.cat([self._gram_part(part) for part in self._chunks()])
        return torch.cat([written.squared_norms() for _, written in self._blocks()])

    def _gram_part(self, part: slice) -> Tensor:
        """‖Σ_k L_k ⊗ R_k‖² = Σ_kl ⟨R_kᵀR_l, L_kᵀL_l⟩ from above; no vector is written out.

        The terms have signs and may cancel: two positions with large and nearly equal inputs. Let u = 2⁻⁵³, n and m
        the lengths of a_t and b_t, N the number of terms, and γ_n = nu/(1−nu). In any order of summing, an entry
        of a Gram matrix is off by at most γ_n‖a_s‖‖a_t‖ (not γ_n|a_sᵀa_t|: it may have cancelled itself), so all
        by at most γ_{n+m+N+1}·A², A = Σ_t ‖a_t‖‖b_t‖ ≥ ‖v‖. Added is 2(n+m+N+8)u·A², with A from the diagonals,
        where nothing cancels: the computed norm is never below the true one. A vector that has cancelled below
        10⁻⁶·A or so is clipped as if it were that long; more digits float32 inputs do not have.
        """
        factors = [_of_like_size(a[part], b[part]) for a, b in zip(self.lefts, self.rights, strict=True)]
        columns = [self.layer.wide_columns(right) for _, right in factors]
        rows = [self.layer.wide_rows(left) for left, _ in factors]
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

    def _blocks(self) -> Iterator[tuple[slice, Stored]]:
        """A few examples at a time, written out and forgotten again."""
        workspace = self._space(min(self._block, len(self)))
        for part in self._parts(self._block):
            values = workspace[:, : part.stop - part.start]
            self._write(part, values)
            yield part, Stored(values.flatten(2))

    def stored(self, values: Tensor | None = None) -> Stored:
        """All vectors written out, into `values` (families, examples, outputs, fan-in) if given."""
        if values is None:
            values = self._space(len(self))
        if self.families == len(self.lefts) == 1:
            squares = write_gradients(self.layer, LayerCall(self.rights[0], self.lefts[0]), values[0])
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
                self.layer.add_gradient(total, right[part], out)

    def some(self, rows: Tensor | slice) -> OuterProducts:
        rows = rows.to(self.lefts[0].device) if isinstance(rows, Tensor) else rows
        lefts, rights = ([side[rows] for side in sides] for sides in (self.lefts, self.rights))
        return OuterProducts(self.layer, lefts, rights, self.families)

    def written(self, where: slice) -> Tensor:
        return self.some(where).stored().values

    @property
    def _block(self) -> int:
        return self.layer.block(self.rights[0], self.families)

    def _chunks(self) -> list[slice]:
        outputs, fan_in = self.layer.shape
        numbers = self.positions * (self.families * outputs + fan_in * self.layer.groups)
        # Each chunk reads and writes the whole weight; of a large one, a few.
        most = max(_CHUNK, min(outputs * fan_in, 8 * _CHUNK))
        return self._parts(max(1, most // max(1, numbers)))

    def _parts(self, size: int) -> list[slice]:
        return [slice(i, min(i + size, len(self))) for i in range(0, len(self), size)]

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

    Writing W = outputs·fan-in numbers and reading them twice takes as long as about 30 positions' share of a weight
    gradient in float64; beside that Gram matrices take P products per position and side, and their copies as much
    as 50. (Measured on one core.) Deep layers on small images have W in the millions and few positions. A fixed
    model, so that results do not depend on what else a machine does.
    """
    outputs, fan_in = layer.shape
    numbers, sides = outputs * fan_in, outputs + layer.groups * fan_in
    return positions * (numbers + 2 * (positions + 50) * sides) < 30 * numbers


def write_gradients(
    layer: OuterLayer, record: LayerCall, values: Tensor, before: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Write g_i into `values` (examples, outputs, fan-in); turn g_i(θ′) in `before` into g_i − s·g_i(θ′).

    Returns the squared norms, (examples, families), taken while the vectors are still in the cache.
    """
    examples, size = len(record.input), layer.block(record.input, 1)
    squares = values.new_empty((1 if before is None else 2, examples), dtype=torch.float64)
    for start in range(0, examples, size):
        part = slice(start, min(start + size, examples))
        layer.products(record.output_grad[part], record.input[part], values[part])
        squares[0, part] = squares_of(values[part].flatten(1))
        if before is not None:
            change = torch.sub(values[part], before[part], alpha=scale, out=before[part])
            squares[1, part] = squares_of(change.flatten(1))
    return squares.T


def _same_numbers(now: Tensor, before: Tensor) -> bool:
    """Whether two tensors hold the same numbers; the comparison ends where they begin to differ."""
    if now.data_ptr() == before.data_ptr() and now.stride() == before.stride():
        return True
    return now.shape == before.shape and torch.equal(now, before)


def _sequence(values: Tensor) -> Tensor:
    return values.flatten(1, -2) if values.dim() > 2 else values.unsqueeze(1)


def _gram(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[-1] == 1:
        return (left * right).sum(-2, keepdim=True)
    return left.transpose(-2, -1) @ right


def _of_like_size(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same products, of factors whose squares neither vanish nor overflow unless those of the products do.

    Squares of float32 are far inside the range of float64; factors in float64 share their magnitude, exactly.
    """
    if left.dtype != torch.float64:
        return left, right
    _, ours = left.abs().flatten(1).amax(1).frexp()
    _, theirs = right.abs().flatten(1).amax(1).frexp()
    half = 2.0 ** ((theirs - ours) // 2).clamp(-1000, 1000).double()
    return _scale(left, half), _scale(right, 1 / half)


def _scale(values: Tensor, weights: Tensor) -> Tensor:
    return values * weights.view(-1, *([1] * (values.dim() - 1)))
