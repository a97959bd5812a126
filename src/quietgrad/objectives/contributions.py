"""What one batch adds to one parameter: per-example vectors, kept whole or as factors.

Every private step needs two things of the per-example gradients g_i: their norms, and a weighted sum
Σ_i c_i g_i once the norms have decided the weights. A `Contribution` gives both for one parameter. Steps
that compare two points θ and θ′ (SPIDER, DP-SRM) ask for several *families* of vectors at once, so norms
and weights have shape (examples, families):

    gradient   v_i = g_i(θ)
    change     v_i = g_i(θ) − s·g_i(θ′)        s = 1: the difference; s = 1 − γ: joint momentum

The change is never computed by subtracting two large vectors or two large norms. For layers whose gradient
is Σ_t b_t ⊗ a_t it is split as  (a − a′) ⊗ b + a′ ⊗ (b − s·b′), which loses no digits when θ′ → θ.
Where gradient and change are both written out, the change is the difference of two written-out vectors: its
norm is that of the very vector that is summed, and its rounding is that of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "Combination",
    "Contribution",
    "OuterLayer",
    "OuterProducts",
    "Record",
    "Stored",
    "TokenSums",
    "Workspace",
    "same_input",
    "write_gradient_and_change",
]

_SLAB = 1 << 22  # numbers per piece of workspace; untouched pages cost nothing

# A squared norm that comes from Gram matrices is a sum of signed terms; this fraction of their absolute
# sum covers the rounding, so the computed norm is never below the true one.
_ROUNDING = {torch.float32: 2.0**-20, torch.float64: 2.0**-49}


@dataclass(frozen=True)
class Combination:
    """Which families of per-example vectors a query needs."""

    gradient: bool
    change: bool
    scale: float = 1.0

    @property
    def families(self) -> int:
        """Number of vectors per example."""
        return int(self.gradient) + int(self.change)

    def join(self, now: Tensor, change: Tensor | None, dim: int) -> Tensor:
        """The asked-for families one after the other along `dim`."""
        if change is None:
            return now
        return torch.cat([now, change], dim) if self.gradient else change

    def stored(self, now: Tensor, change: Tensor | None) -> Stored:
        """The asked-for families of vectors (examples, size)."""
        return Stored(self.join(now[None], None if change is None else change[None], 0))


class Record(NamedTuple):
    """One call of a layer: its input and the gradient of the summed loss by its output."""

    input: Tensor
    output_grad: Tensor


class Contribution(Protocol):
    """Per-example vectors of one parameter."""

    def squared_norms(self) -> Tensor:
        """‖v_i‖² for every example and family, shape (examples, families)."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out += Σ_i Σ_f weights[i, f] · v_{i,f}; `out` is the parameter's slice of the flat vector."""
        ...


class Workspace:
    """Memory for per-example vectors, kept from step to step so that no step pays for fresh pages.

    Grants requests in order until `limit` bytes are used; what is granted depends on sizes alone.
    """

    def __init__(self, limit: float, like: Tensor) -> None:
        self.dtype = like.dtype
        self._like = like
        self._available = self._capacity = limit // like.element_size()
        self._slabs: list[Tensor] = []
        self._slab = self._offset = 0

    def reset(self) -> None:
        """Take everything back."""
        self._available = self._capacity
        self._slab = self._offset = 0

    def take(self, *shape: int) -> Tensor | None:
        """Uninitialised memory, or None if the limit is reached."""
        size = prod(shape)
        if size > self._available:
            return None
        self._available -= size
        while self._slab < len(self._slabs) and self._offset + size > len(self._slabs[self._slab]):
            self._slab, self._offset = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(self._like.new_empty(max(size, _SLAB)))
        start, self._offset = self._offset, self._offset + size
        return self._slabs[self._slab][start : self._offset].view(shape)


class Stored:
    """Per-example vectors written out: values of shape (families, examples, size)."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def squared_norms(self) -> Tensor:
        """Sums of squares."""
        norms: Tensor = torch.linalg.vector_norm(self.values, dim=2)
        return norms.square().T

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """One matrix–vector product."""
        out.addmv_(self.values.flatten(0, 1).T, weights.T.flatten())


class TokenSums:
    """Embedding rows: each example touches a few rows of the table, each with a sum of output gradients."""

    def __init__(self, tokens: Tensor, values: Tensor, rows: int) -> None:
        self.tokens = tokens  # (examples, positions)
        self.values = values  # (examples, positions, families, width)
        self.rows = rows

    def squared_norms(self) -> Tensor:
        """A token that occurs twice in an example adds up before it is squared."""
        examples = self.tokens.shape[0]
        owner = torch.arange(examples, device=self.tokens.device)[:, None] * self.rows
        keys, where = torch.unique(owner + self.tokens, return_inverse=True)
        sums = self.values.new_zeros((len(keys), *self.values.shape[2:]))
        sums.index_add_(0, where.flatten(), self.values.flatten(0, 1))
        norms = self.values.new_zeros((examples, self.values.shape[2]))
        return norms.index_add_(0, keys // self.rows, sums.square().sum(2))

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Scatter the weighted output gradients into the table."""
        weighted = torch.einsum("ef,epfw->epw", weights, self.values)
        out.view(self.rows, -1).index_add_(0, self.tokens.flatten(), weighted.flatten(0, 1))

    def dense(self) -> Stored:
        """The same vectors written out, for a table that other layers use as well."""
        examples, _, families, width = self.values.shape
        values = self.values.new_zeros((families, examples, self.rows, width))
        index = self.tokens[None, :, :, None].expand(families, -1, -1, width)
        values.scatter_add_(2, index, self.values.permute(2, 0, 1, 3))
        return Stored(values.flatten(2))


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
        """Σ_i Σ_t b_t ⊗ a_t, the ordinary weight gradient, flat."""
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


def write_gradient_and_change(
    layer: OuterLayer, now: Record, before: Record, scale: float, values: Tensor
) -> Stored:
    """g_i(θ) and g_i(θ) − s·g_i(θ′), written into `values` (2, examples, outputs, fan-in)."""
    examples, size = len(now.input), layer.block(now.input, 2)
    for start in range(0, examples, size):
        part = slice(start, min(start + size, examples))
        gradient, change = values[0, part], values[1, part]
        layer.products(now.output_grad[part], now.input[part], gradient)
        layer.products(before.output_grad[part], before.input[part], change)
        torch.sub(gradient, change, alpha=scale, out=change)
    return Stored(values.flatten(2))


def _gram(left: Tensor, right: Tensor) -> Tensor:
    return left.transpose(-2, -1) @ right


def _scale(values: Tensor, weights: Tensor) -> Tensor:
    return values * weights.view(-1, *([1] * (values.dim() - 1)))
