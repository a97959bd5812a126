"""Second derivatives of generalised linear models: ∇²F(θ)·v without ever forming the Hessian.

A score moves by tᵢ = x̃ᵢᵀv along v, and the residual r = ∂f/∂score by r′(scoreᵢ)·tᵢ, so ∇²F·v = (1/n)Σ (r′tᵢ) ⊗ x̃ᵢ
plus the regulariser's part. At most one multiplication by the table and one by its transpose.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quietgrad.objectives.base import Batch, Objective, Regularizer, rounding_safe_clip
from quietgrad.objectives.tables.full_batch import RowSum, blocks_of, lift
from quietgrad.objectives.tables.table import Floats, Table

if TYPE_CHECKING:
    from quietgrad.objectives.tables.linear import LinearObjective


def covers(objective: Objective) -> bool:
    """Whether :func:`hessian_product` knows this objective, and its regulariser states its curvature."""
    from quietgrad.objectives.tables.linear import LinearObjective

    return isinstance(objective, LinearObjective) and isinstance(objective.regularizer, Regularizer)


def hessian_product(objective: LinearObjective, records: Any, params: Floats, vector: Floats) -> Floats:
    """∇²F(θ)·v of the risk with its regulariser; not private.

    >>> from quietgrad.objectives import L2, Squared
    >>> squared = Squared(regularizer=L2(0.5))
    >>> records = squared.prepare(([[1.0, 0.0], [0.0, 2.0]], [0.0, 0.0]))
    >>> hessian_product(squared, records, np.zeros(2), np.ones(2))
    array([1. , 2.5])
    """
    total, everyone = np.zeros(records.dim), Batch(records, None)
    if isinstance(records, Table):
        _add_products(params, vector, objective, everyone, total)
    else:  # a scan, part by part
        records.add(partial(_add_products, params, vector), everyone, total)
    out: Floats = total / len(records) + objective.regularizer.curvature(params) * vector
    return out


def _add_products(params: Floats, vector: Floats, objective: LinearObjective, batch: Batch, out: Floats) -> None:
    """out += Σ ∇²fᵢ(θ)·v."""
    records: Table = batch.records
    at, along, total = lift(records, params), lift(records, vector), RowSum(records)
    assert records.y is not None
    for block in blocks_of(records):
        total.add(block, objective.bends(at.scores(block), records.y[block.which], along.scores(block)))
    out += total.result()


def add_hessians(
    objective: LinearObjective,
    batch: Batch,
    params: Floats,
    clip: float,
    out: Floats,
    shares: Floats | None = None,
) -> None:
    """out += Σ h(scoreᵢ)·x̃ᵢx̃ᵢᵀ, each shortened to a norm of at most ``clip``; for losses of one score.

    With ``shares`` the row at position i counts ``shares[i]`` times.

    >>> from quietgrad.objectives import Squared
    >>> squared, out = Squared(), np.zeros((2, 2))
    >>> records = squared.prepare(([[1.0, 0.0], [0.0, 3.0]], [0, 0]))
    >>> add_hessians(squared, Batch(records, None), np.zeros(2), 4.0, out)
    >>> out.round(6).tolist()
    [[1.0, 0.0], [0.0, 4.0]]
    """
    if objective.outputs != 1:
        raise ValueError(
            f"{type(objective).__name__}: a summed Hessian is known for landscapes and one-score losses."
        )
    records: Table = batch.records
    at, limit = lift(records, params), rounding_safe_clip(clip)
    assert records.y is not None
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks_of(records, batch.indices):
            scores = at.scores(block)
            bends = objective.bends(scores, records.y[block.which], np.ones_like(scores))
            rows = block.rows if isinstance(block.rows, np.ndarray) else block.rows.toarray()
            if records.transform is not None:
                rows = records.transform.apply((rows - records.transform.shift).T).T
            if block.factors is not None:
                rows = rows * block.factors
            if records.intercept:
                rows = np.hstack([rows, np.full((len(rows), 1), records.intercept)])
            squares = np.einsum("ij,ij->i", rows, rows)[:, None]
            finite = np.isfinite(squares)
            if not finite.all():
                rows = np.where(finite, rows, 0.0)  # not in place: a block may be the table; and 0·∞ is not 0
            reach = limit / np.maximum(squares, 1e-300)
            weights = np.clip(np.nan_to_num(bends), -reach, reach)
            if shares is not None:
                weights = weights * shares[block.which, None]
            out += rows.T @ (weights * rows)
