"""Local SGD of many clients at once, for losses of linear scores.

A step of all clients is three batched products: scores of each client's next records at its own θ, and the gradient
of their mean loss. Clients need not have equally many records; missing ones weigh nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quietgrad.core.session.queries import Batch, Indices
from quietgrad.tables.full_batch import Block
from quietgrad.tables.privacy_units import GroupIndex
from quietgrad.tables.table import Floats, Table, Targets

if TYPE_CHECKING:
    from quietgrad.tables.linear import LinearObjective
    from quietgrad.tables.queries.local_update import LocalTraining

_AT_ONCE = 1 << 21  # numbers of one step's rows, 16 MB


def transformed_rows(records: Table, block: Block) -> Floats:
    """The rows x̃ of a block: shifted, scaled, shortened, with the constant column; (records, width)."""
    rows: Floats = block.rows if isinstance(block.rows, np.ndarray) else block.rows.toarray()
    if records.transform is not None:
        rows = records.transform.apply((rows - records.transform.shift).T).T
    if block.factors is not None:
        rows = rows * block.factors
    if records.intercept:
        rows = np.hstack([rows, np.full((len(rows), 1), records.intercept)])
    return rows


@np.errstate(all="ignore")
def local_updates(
    loss: LinearObjective, batch: Batch, clients: GroupIndex, params: Floats, training: LocalTraining
) -> Iterator[Floats]:
    """θ_local − θ of the clients, as many at a time as fit into a few MB; one row each."""
    from quietgrad.tables.queries.local_update import LocalBatches

    records: Table = batch.records
    batches = LocalBatches.of(clients, batch.key, training.batch_size)
    width = records.dim // loss.outputs
    step = max(1, _AT_ONCE // (width * training.batch_size))
    for first in range(0, len(batches), step):
        some = batches.chosen(np.arange(first, min(first + step, len(batches))))
        X, y, counts = _gathered(loss, records, some.rows, width)
        theta = np.repeat(params.reshape(1, width, loss.outputs), len(some), axis=0)
        for number in range(training.steps):
            places, weights = some.step(number)
            rows, targets = X[places], y[places]
            scores = (rows @ theta).reshape(-1, loss.outputs)
            residuals = loss.residuals(scores, targets.ravel()).reshape(*places.shape, loss.outputs)
            gradient = rows.transpose(0, 2, 1) @ (residuals * (weights * counts[places])[..., None])
            # Penalties are sums over coordinates, which lie along the first axis of what they are given.
            penalty = training.regularizer.gradient(theta.reshape(len(some), -1).T).T
            theta -= training.rate * (gradient + penalty.reshape(theta.shape))
        yield theta.reshape(len(some), -1) - params


def _gathered(loss: LinearObjective, records: Table, rows: Indices, width: int) -> tuple[Floats, Targets, Floats]:
    """The rows x̃ at some positions, in their order, their targets, and what each of them counts."""
    X, y, counts, at = np.empty((len(rows), width)), [], np.empty(len(rows)), 0
    for which, raw in records.blocks(rows):
        block = Block(records, which, raw)
        part = slice(at, at + len(block.y))
        X[part], counts[part], at = transformed_rows(records, block), loss.record_weights(block), part.stop
        y.append(block.y)
    return X, np.concatenate(y) if y else np.zeros(0), counts
