"""The sum of one batch before its noise: one function for a curator of one table and for a party of many.

The sensitivity of a release is proved for what this function returns, so both add up in the same way.
"""

from __future__ import annotations

import numpy as np

from quietgrad.core.session.objectives import Batch, RecordAdapter, StreamedRecords
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector, wide_zeros


def batch_sum(
    query: Query, objective: RecordAdapter, batch: Batch, like: OwnVector, *, private: bool, room: OwnVector = None
) -> OwnVector:
    """The sum of what the records of ``batch`` contribute to ``query``, in float64.

    In float32 each record changes how all later ones are rounded: one of 300 000 moved such a sum by 1.0156 C. In
    float64 C holds for any number of records. The sum is of the kind of ``like``, the parameters, where it is as
    long as they are, and else an array. A ``private`` one has no NaN and no infinity, which would tell that there
    is a record that causes it. ``room``, a vector of the kind and length of the sum, is overwritten with it.
    """
    dim = query.dim(batch.records)
    out: OwnVector
    if room is not None and len(room) == dim == len(like):
        out = room.zero_()
    else:
        out = wide_zeros(like) if dim == len(like) else np.zeros(dim)
    add_batch(query, objective, batch, out)
    if private and not objective.silent_batches:
        if isinstance(out, np.ndarray):
            np.nan_to_num(out, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        else:
            out.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return out


def add_batch(query: Query, objective: RecordAdapter, batch: Batch, out: OwnVector) -> None:
    """out += the sum of ``batch``, without warnings, which could tell that there is a record that causes one."""
    if isinstance(batch.records, StreamedRecords):
        batch.records.answer(query, batch, out)
    elif objective.silent_batches and batch.indices is not None:  # compiled sums never warn
        query.sum_into(objective, batch, out)
    else:
        with np.errstate(all="ignore"):
            query.sum_into(objective, batch, out)
