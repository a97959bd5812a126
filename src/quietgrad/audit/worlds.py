"""Worlds made of data, for methods that need a real loss and not just gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.audit.canaries import query_game
from quietgrad.audit.replicas import Game
from quietgrad.privacy.budget import Relation

_FAR = 1e3  # a target far beyond Huber's threshold: the residual is then constant


@dataclass(frozen=True)
class HuberGame:
    """Two tables of n rows that differ in one target, for methods that need a convex loss with real constants.

    Huber's residual is ∓threshold at targets ±1000, so the record's gradient is ±G·u at every point: the linear
    losses that attain the stability bound. All other rows are zero. Blocks are columns of a sparse table.
    """

    n: int
    dim: int = 2
    row_bound: float = 1.0
    gaussian: bool = True

    def world(self, which: int, runs: int) -> tuple[Any, Any]:
        """(objective, data) of ``runs`` blocks."""
        import scipy.sparse as sparse

        from quietgrad.objectives import Huber

        rows = np.arange(runs) * self.n
        X = sparse.csr_array(
            (np.full(runs, self.row_bound), (rows, np.arange(runs) * self.dim)),
            shape=(runs * self.n, runs * self.dim),
        )
        y = np.zeros(runs * self.n)
        y[rows] = _FAR if which == 0 else -_FAR
        return Huber(1.0, row_bound=self.row_bound), (X, y)


def special_game(algorithm: Any, n: int, relation: Relation) -> Game | None:
    """The worlds for an algorithm that cannot be attacked in gradient space, or ``None``.

    >>> special_game(object(), 4, Relation.ADD_REMOVE) is None
    True
    """
    name = getattr(algorithm, "name", "")
    one_shot = name == "weighted-average" and algorithm.method == "one-shot"
    if name == "output-perturbation" or one_shot:  # stability scales as 1/n: few records stand for any number
        return HuberGame(n, dim=1 if getattr(algorithm, "mechanism", "") == "pure" else 2)
    return query_game(algorithm, n, relation)
