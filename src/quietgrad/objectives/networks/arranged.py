"""Einstein sums with a parameter: products with a matrix, whose entries lie in another order in the parameter.

    bteh,ehd,bte→btd:  y = x W,  x_{bt,eh} = a_{bteh} c_{bte},  W_{eh,d} = w_{ehd}

What is not the parameter is multiplied first. If no index belongs to the parameter, to the rest and to the result
at once, what is left is one product with a matrix: a linear layer, with its kernel. Mixtures of experts are two.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quietgrad.objectives.networks.contributions import Combination, Contribution, Record, Workspace, Written
from quietgrad.objectives.networks.kernels import Kernel, linear_kernel
from quietgrad.objectives.networks.persons import Persons

__all__ = ["Arranged", "Arrangement", "MatrixForm", "matrix_form", "matrix_kernel"]


class Arrangement(NamedTuple):
    """A parameter seen as a matrix: its axes in another order, the first ``rows`` of them being its rows."""

    order: tuple[int, ...]
    rows: int

    def of(self, weight: Tensor) -> Tensor:
        """The matrix."""
        moved = weight.permute(self.order)
        return moved.reshape(prod(moved.shape[: self.rows]), -1)


class Arranged:
    """Vectors of a matrix, added to the parameter where its entries lie; norms do not depend on their order."""

    def __init__(self, matrix: Contribution, shape: Sequence[int], order: tuple[int, ...]) -> None:
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

    def together(self, persons: Persons) -> Arranged:
        """Of people."""
        return self.around(self.matrix.together(persons))

    def around(self, matrix: Contribution) -> Arranged:
        """Other vectors of the same matrix."""
        return Arranged(matrix, self.shape, self.order)

    def held(self) -> int:
        """Bytes."""
        return self.matrix.held()


class _ArrangedKernel:
    def __init__(self, kernel: Kernel, shape: Sequence[int], order: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.shape, self.order = tuple(shape), order

    def remember(
        self, before: Record, mix: Combination, space: Workspace, wanted: Container[str]
    ) -> Record | Written:
        return self.kernel.remember(before, mix, space, wanted)

    def contributions(
        self, now: Record, before: Record | Written | None, mix: Combination, space: Workspace,
        wanted: Container[str],
    ) -> Iterator[tuple[str, Contribution]]:  # fmt: skip
        for name, piece in self.kernel.contributions(now, before, mix, space, wanted):
            yield name, Arranged(piece, self.shape, self.order)


@lru_cache(maxsize=256)
def matrix_kernel(shape: tuple[int, ...], arrangement: Arrangement) -> Kernel:
    """The kernel of x W, W the parameter in that arrangement."""
    sizes = [shape[axis] for axis in arrangement.order]
    inputs, outputs = prod(sizes[: arrangement.rows]), prod(sizes[arrangement.rows :])
    return _ArrangedKernel(linear_kernel(outputs, inputs, swapped=True), shape, arrangement.order)


class MatrixForm(NamedTuple):
    """A sum of products as one product with a matrix."""

    place: int  # of the parameter among the operands
    rest: str  # the equation of the others
    arrangement: Arrangement
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
        Arrangement(tuple(own.index(index) for index in summed + free), len(summed)),
        tuple(made.index(index) for index in result),
    )
