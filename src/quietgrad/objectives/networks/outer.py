"""Per-example vectors that are sums of outer products: the weights of linear and convolution layers.

Kept as factors, they are written out a few examples at a time, or their norms come from Gram matrices; see
:mod:`quietgrad.objectives.networks.contributions` for how two points are compared without losing digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quietgrad.objectives.networks.contributions import Combination, Record, Stored, squares_of

__all__ = ["OuterLayer", "OuterProducts", "same_input", "write_gradients"]

# A squared norm that comes from Gram matrices is a sum of signed terms; this fraction of their absolute
# sum covers the rounding, so the computed norm is never below the true one.
_ROUNDING = {torch.float32: 2.0**-20, torch.float64: 2.0**-49}


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
        """Σ_i Σ_t b_t ⊗ a_t, the ordinary weight gradient, flat, in float64."""
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
        outputs, fan_in = layer.shape
        self.layer = layer
        self.positions = lefts[0][0].numel() // (families * outputs)
        self.by_gram = self.positions * (outputs + fan_in) < outputs * fan_in * layer.groups
        self.lefts = lefts
        self.rights = rights
        self.families = families

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

    def squared_norms(self) -> Tensor:
        """By Gram matrices, or from a few examples at a time, whichever multiplies less."""
        return self._gram_norms() if self.by_gram else self._blockwise_norms()

    def _gram_norms(self) -> Tensor:
        """‖Σ_k L_k ⊗ R_k‖² = Σ_kl ⟨R_kᵀR_l, L_kᵀL_l⟩; no vector is written out."""
        columns = [self.layer.columns(right) for right in self.rights]
        rows = [self.layer.rows(left) for left in self.lefts]
        counts = [self.families] + [1] * (len(rows) - 1)
        rows = [r.reshape(len(r), f, -1, r.shape[2]) for r, f in zip(rows, counts, strict=True)]
        terms = []
        for k in range(len(rows)):
            for other in range(k, len(rows)):
                inputs = _gram(columns[k], columns[other]).unsqueeze(1)
                term = (inputs * _gram(rows[k], rows[other])).sum((-2, -1))
                terms.append(term if other == k else 2 * term)
        norms = sum(term + _ROUNDING[term.dtype] * term.abs() for term in terms[1:])
        norms = norms + terms[0] * (1 + _ROUNDING[terms[0].dtype])
        return norms.view(-1, self.layer.groups, self.families).sum(1)

    def _blockwise_norms(self) -> Tensor:
        """By writing out a few examples at a time and forgetting them again."""
        workspace = self._space(min(self._block, len(self.rights[0])))
        norms = []
        for part in self._parts():
            values = workspace[:, : part.stop - part.start]
            self._write(part, values)
            norms.append(Stored(values.flatten(2)).squared_norms())
        return torch.cat(norms)

    def stored(self, values: Tensor | None = None) -> Stored:
        """All vectors written out, into `values` (families, examples, outputs, fan-in) if given."""
        if values is None:
            values = self._space(len(self.rights[0]))
        if self.families == len(self.lefts) == 1:
            squares = write_gradients(self.layer, Record(self.rights[0], self.lefts[0]), values[0])
            return Stored(values.flatten(2), squares)
        for part in self._parts():
            self._write(part, values[:, part])
        return Stored(values.flatten(2))

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """As many ordinary weight gradients as there are factors, with weighted output gradients."""
        dim = self.layer.channel_dim
        for k, (left, right) in enumerate(zip(self.lefts, self.rights, strict=True)):
            parts = left.chunk(self.families, dim) if k == 0 else [left]
            shares = weights.unbind(1) if k == 0 else [weights.sum(1)]
            total = _scale(parts[0], shares[0])
            for part, share in zip(parts[1:], shares[1:], strict=True):
                total += _scale(part, share)
            out += self.layer.weight_gradient(total, right)

    @property
    def _block(self) -> int:
        return self.layer.block(self.rights[0], self.families)

    def _parts(self) -> list[slice]:
        examples = len(self.rights[0])
        return [slice(i, min(i + self._block, examples)) for i in range(0, examples, self._block)]

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


def _gram(left: Tensor, right: Tensor) -> Tensor:
    return left.transpose(-2, -1) @ right


def _scale(values: Tensor, weights: Tensor) -> Tensor:
    return values * weights.view(-1, *([1] * (values.dim() - 1)))
