"""Local SGD of many clients at once, for losses of linear scores.

A step of clients is two batched products: scores of each client's next records at its own θ, and the gradient of
their mean loss. Clients with equally many records in a step train together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quietgrad.core.session.objectives import Batch, Indices
from quietgrad.tables.full_batch import Block, ColumnMajor
from quietgrad.tables.privacy_units import GroupIndex
from quietgrad.tables.table import Floats, Table, Targets

if TYPE_CHECKING:
    from quietgrad.tables.linear import LinearObjective
    from quietgrad.tables.queries.local_update import LocalBatches, LocalTraining

_AT_ONCE = 1 << 21  # numbers of one step's rows, 16 MB


def transformed_rows(records: Table, block: Block) -> Floats:
    """The rows x̃ of a block: shifted, scaled, shortened, with the constant column; (records, width)."""
    if isinstance(block.rows, ColumnMajor) and records.mixes and block.factors is None:
        return _mixed_columns(records, block.rows.T.toarray())
    rows: Floats = block.rows if isinstance(block.rows, np.ndarray) else block.rows.toarray()
    if records.transform is not None:
        rows = records.transform.apply((rows - records.transform.shift).T).T
    if block.factors is not None:
        rows = rows * block.factors
    if records.intercept:
        rows = np.hstack([rows, np.full((len(rows), 1), records.intercept)])
    return rows


def _mixed_columns(records: Table, columns: Floats) -> Floats:
    """The same of a part of a scan by a matrix, without a copy between orders: column-major."""
    assert records.transform is not None
    rows = np.empty((records.features + bool(records.intercept), columns.shape[1]))
    rows[records.features :] = records.intercept
    columns -= records.transform.shift[:, None]
    np.matmul(records.transform.scale, columns, out=rows[: records.features])
    return rows.T


def client_rows(records: Table, block: Block) -> Floats:
    """The same rows, each by itself to the last bit, for training that may expand it.

    A product of the whole block rounds a row by where it stands there, and so do the norms that the table keeps.
    """
    rows: Floats = np.ascontiguousarray(block.rows if isinstance(block.rows, np.ndarray) else block.rows.toarray())
    transform = records.transform
    if transform is not None and transform.is_matrix:
        moved, mixed = (_aligned(len(rows), rows.shape[1], 1) for _ in range(2))
        moved[..., 0] = rows - transform.shift
        rows = np.ascontiguousarray(np.matmul(transform.scale, moved, out=mixed)[..., 0])
    elif transform is not None:
        rows = (rows - transform.shift) * transform.scale
    if records.row_bound is not None:
        lengths = np.sqrt(np.add.reduce(rows * rows, axis=1))
        longest = lengths if records.normalizes else np.maximum(lengths, records.row_bound)
        rows = rows * np.where(longest > 0.0, records.row_bound / longest, 1.0)[:, None]
    if records.intercept:
        rows = np.hstack([rows, np.full((len(rows), 1), records.intercept)])
    return rows


@np.errstate(all="ignore")
def local_updates(
    loss: LinearObjective, batch: Batch, clients: GroupIndex, params: Floats, training: LocalTraining
) -> Iterator[Floats]:
    """θ_local − θ of the clients, as many at a time as fit into a few MB; one row each.

    A row is the same to the last bit, whichever clients train beside this one. SGD may expand what it starts from:
    where a client's gradients cancel, the last bit of their sum decides in which direction its whole update points,
    and a client that changed the bits of the others would move the sum by far more than C. How a product rounds
    follows from its shape and from where it lies in memory: so clients of one shape train together, each in a place
    of its own that begins a cache line.
    """
    from quietgrad.tables.queries.local_update import LocalBatches

    records: Table = batch.records
    batches = LocalBatches.of(clients, batch.key, training.batch_size)
    width = records.dim // loss.outputs
    most = max(1, _AT_ONCE // (width * training.batch_size))
    shapes = np.minimum(np.diff(batches.starts), training.batch_size)
    for shape in np.unique(shapes).tolist():
        alike = np.flatnonzero(shapes == shape)
        for first in range(0, len(alike), most):
            some = batches.chosen(alike[first : first + most])
            yield _trained(loss, records, some, params.reshape(width, loss.outputs), training)


def _trained(
    loss: LinearObjective, records: Table, batches: LocalBatches, params: Floats, training: LocalTraining
) -> Floats:
    """θ_local − θ of clients that have equally many records in a step."""
    width, outputs = params.shape
    X, y, counts = _gathered(loss, records, batches.rows, width)
    count, size = batches.step(0)[0].shape
    rows, theta = _aligned(count, size, width), _aligned(count, width, outputs)
    scores, pulls, gradient = (_aligned(count, *shape) for shape in ((size, outputs),) * 2 + ((width, outputs),))
    theta[:] = params
    for number in range(training.steps):
        places, weights = batches.step(number)
        rows[:] = X[places]
        np.matmul(rows, theta, out=scores)
        residuals = loss.residuals(scores.reshape(-1, outputs), y[places].ravel())
        pulls[:] = residuals.reshape(pulls.shape) * (weights * counts[places])[..., None]
        np.matmul(rows.transpose(0, 2, 1), pulls, out=gradient)
        # Penalties are sums over coordinates, which lie along the first axis of what they are given.
        penalty = training.regularizer.gradient(theta.reshape(count, -1).T).T
        theta -= training.rate * (gradient + penalty.reshape(theta.shape))
    return np.asarray(theta - params).reshape(count, -1)


def _aligned(count: int, *shape: int) -> Floats:
    """Uninitialised arrays, one behind the other, each from the beginning of a cache line of 64 bytes on."""
    size = math.prod(shape)
    stride = -(-size // 8) * 8
    memory = np.empty(count * stride + 8)
    start = -(memory.ctypes.data // 8) % 8
    return memory[start : start + count * stride].reshape(count, stride)[:, :size].reshape(count, *shape)


def _gathered(loss: LinearObjective, records: Table, rows: Indices, width: int) -> tuple[Floats, Targets, Floats]:
    """The rows x̃ at some positions, in their order, their targets, and what each of them counts."""
    X, y, counts, at = np.empty((len(rows), width)), [], np.empty(len(rows)), 0
    for which, raw in records.blocks(rows):
        block = Block(records, which, raw)
        part = slice(at, at + len(block.y))
        X[part], counts[part], at = client_rows(records, block), loss.record_weights(block), part.stop
        y.append(block.y)
    return X, np.concatenate(y) if y else np.zeros(0), counts
