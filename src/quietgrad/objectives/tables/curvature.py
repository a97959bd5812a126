"""Second derivatives of generalised linear models: ∇²F(θ)·v without ever forming the Hessian.

A score moves by tᵢ = x̃ᵢᵀv along v, and the residual r = ∂f/∂score by r′(scoreᵢ)·tᵢ, so ∇²F·v = (1/n)Σ (r′tᵢ) ⊗ x̃ᵢ
plus the regulariser's part. At most one multiplication by the table and one by its transpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quietgrad.objectives.base import Indices
from quietgrad.objectives.regularizers import L2, Nonconvex
from quietgrad.objectives.tables.full_batch import RowSum, blocks_of, lift
from quietgrad.objectives.tables.glm import Hinge, Huber, Logistic, Multinomial, Squared
from quietgrad.objectives.tables.linear import LinearObjective
from quietgrad.objectives.tables.table import Floats, Table


def covers(objective: Any) -> bool:
    """Whether :func:`hessian_product` knows this objective and its regulariser."""
    known = isinstance(objective, (Logistic, Multinomial, Squared, Huber, Hinge))
    return known and (isinstance(objective.regularizer, (L2, Nonconvex)) or not objective.regularizer.smoothness)


def hessian_product(objective: LinearObjective, records: Table, params: Floats, vector: Floats) -> Floats:
    """∇²F(θ)·v of the risk with its regulariser; not private.

    >>> squared = Squared(regularizer=L2(0.5))
    >>> records = squared.prepare(([[1.0, 0.0], [0.0, 2.0]], [0.0, 0.0]))
    >>> hessian_product(squared, records, np.zeros(2), np.ones(2))
    array([1. , 2.5])
    """
    at, along, total = lift(records, params), lift(records, vector), RowSum(records)
    assert records.y is not None
    for block in blocks_of(records):
        total.add(block, _tilted(objective, at.scores(block), records.y[block.which], along.scores(block)))
    out: Floats = total.result() / len(records) + regularizer_curvature(objective, params) * vector
    return out


def add_hessians(
    objective: LinearObjective, records: Table, indices: Indices | None, params: Floats, clip: float, out: Floats
) -> None:
    """out += Σ h(scoreᵢ)·x̃ᵢx̃ᵢᵀ, each shortened to a norm of at most ``clip``; for losses of one score.

    >>> squared = Squared()
    >>> out = np.zeros((2, 2))
    >>> add_hessians(squared, squared.prepare(([[1.0, 0.0], [0.0, 3.0]], [0, 0])), None, np.zeros(2), 4.0, out)
    >>> out.round(6).tolist()
    [[1.0, 0.0], [0.0, 4.0]]
    """
    if not isinstance(objective, LinearObjective) or objective.outputs != 1:
        raise ValueError(
            f"{type(objective).__name__}: a summed Hessian is known for landscapes and one-score losses."
        )
    at, limit = lift(records, params), clip / (1.0 + 1e-12)
    assert records.y is not None
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks_of(records, indices):
            scores = at.scores(block)
            bends = np.nan_to_num(_tilted(objective, scores, records.y[block.which], np.ones_like(scores)))
            rows = block.rows if isinstance(block.rows, np.ndarray) else block.rows.toarray()
            if records.transform is not None:
                rows = records.transform.apply((rows - records.transform.shift).T).T
            if block.factors is not None:
                rows = rows * block.factors
            if records.intercept:
                rows = np.hstack([rows, np.full((len(rows), 1), records.intercept)])
            squares = np.einsum("ij,ij->i", rows, rows)[:, None]
            weights = np.minimum(bends, limit / np.maximum(squares, 1e-300))
            out += rows.T @ (weights * rows)


def _tilted(objective: Any, scores: Floats, y: Any, tilts: Floats) -> Floats:
    """How the residuals move when the scores move by ``tilts``, per unit."""
    if isinstance(objective, Multinomial):
        p = objective._residuals(scores, y)
        p[np.arange(len(y)), y] += 1.0
        return np.asarray(p * (tilts - (p * tilts).sum(axis=1, keepdims=True)))
    target = y[:, None]
    if isinstance(objective, Logistic):
        p = objective._residuals(scores, y) + target
        return np.asarray(p * (1.0 - p) * tilts)
    if isinstance(objective, Huber):
        return np.asarray((np.abs(scores - target) <= objective.threshold) * tilts)
    if isinstance(objective, Hinge):
        gap = 1.0 - (2.0 * target - 1.0) * scores
        return np.asarray(((gap > 0.0) & (gap < objective.smoothing)) * tilts / objective.smoothing)
    return tilts


def regularizer_curvature(objective: Any, params: Floats) -> Floats:
    """The diagonal of the regulariser's Hessian."""
    regularizer = objective.regularizer
    if isinstance(regularizer, L2):
        diagonal = np.full_like(params, regularizer.strength)
    elif isinstance(regularizer, Nonconvex):
        square = params**2
        diagonal = 2.0 * regularizer.strength * (1.0 - 3.0 * square) / (1.0 + square) ** 3
    elif not regularizer.smoothness:
        return np.zeros_like(params)
    else:
        raise ValueError(f"{type(regularizer).__name__}: its second derivative is not known; use L2 or Nonconvex.")
    if regularizer.unpenalized:
        diagonal[len(diagonal) - regularizer.unpenalized :] = 0.0
    return diagonal
