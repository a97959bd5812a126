"""Private ranges of the columns of a description: wide enough for what is seen, and which columns are hidden.

A fit may cut a tail or move it, because its scale is all that is at stake. A description shows means, so here a
range of one sign reaches 0, thin tails widen it, and a narrower interval is taken only where nothing is seen beyond
it. All of this is arithmetic on the releases that a fit's range estimation makes too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.base import Session
from quietgrad.methods.range_estimation import RangeEstimation, noise_of
from quietgrad.tables.histogram_decoding import middle_octave, read_octaves, read_pieces, read_whole
from quietgrad.tables.range_queries import FEW_PIECES, PIECES, MagnitudeHistogram, MeanOctaves, RangeHistogram
from quietgrad.tables.table import Floats

_NARROWER = 0.25  # part of an interval that a later one must keep to
_DEVIATIONS = 2.0  # by which a limit from a mean octave is raised


@dataclass(frozen=True)
class DescribedRanges:
    """The range [low, high] of each column; ``found`` where it was released, ``hidden`` where noise drowns it."""

    low: Floats
    high: Floats
    found: npt.NDArray[np.bool_]
    hidden: npt.NDArray[np.bool_]


def find_described_ranges(
    look: RangeEstimation, session: Session, columns: int, relation: Relation
) -> DescribedRanges:
    """Make the releases of ``look``, and read the ranges of the columns that have none."""
    declared = look.features if look.features is not None else (None,) * columns
    low = np.array([-1.0 if pair is None else pair[0] for pair in declared])
    high = np.array([1.0 if pair is None else pair[1] for pair in declared])
    found = np.array([pair is None for pair in declared], dtype=bool)
    hidden = np.zeros(columns, dtype=bool)
    unknown = np.flatnonzero(found)
    if not (len(unknown) and look.range_share):
        return DescribedRanges(low, high, found, hidden)
    query = MagnitudeHistogram(unknown, relation, pooled=look.ranges != "each")
    counts = query.counts(session.release("ranges", query))
    read = read_whole(counts, noise_of(session, "ranges", query.bound))
    low[unknown], high[unknown], hidden[unknown] = read.low, read.high, ~read.seen
    if look.ranges == "means":
        means = MeanOctaves(unknown, middle_octave(counts))
        n = session.expected_batch("octaves")
        sigma = noise_of(session, "octaves", means.bound) / n
        reach = read_octaves(session.release("octaves", means) / n, sigma, means.centre)
        # The noise of a mean octave must not cut a column: what all columns keep to limits how far that goes.
        reach = reach * np.exp2(_DEVIATIONS * sigma)
        low[unknown], high[unknown] = np.maximum(read.low, -reach), np.minimum(read.high, reach)
    if look.offset_share and look.ranges == "each":
        seen = unknown[read.seen]
        near, far = _narrowed(look, session, relation, seen if len(seen) else unknown[:1], low, high)
        low[seen], high[seen] = near[: len(seen)], far[: len(seen)]
    return DescribedRanges(low, high, found, hidden)


def _narrowed(
    look: RangeEstimation,
    session: Session,
    relation: Relation,
    chosen: npt.NDArray[np.int64],
    low: Floats,
    high: Floats,
) -> tuple[Floats, Floats]:
    """Narrow the ranges of the ``chosen`` columns by counts in equal bins, release by release.

    Columns are always chosen, also where none is seen: the number of releases must not follow from the data.
    """
    near, far = low[chosen].copy(), high[chosen].copy()
    count = FEW_PIECES if look.closer == 1 else PIECES
    for again, slot in enumerate(look.offset_slots):
        pieces = RangeHistogram(chosen, near, far, relation, count)
        inner = session.release(slot, pieces).reshape(-1, count)
        nearer, closer = read_pieces(inner, noise_of(session, slot, pieces.bound), near, far, whole=True)
        use = (closer - nearer <= _NARROWER * (far - near)) | (again == 0)
        near, far = np.where(use, nearer, near), np.where(use, closer, far)
    return near, far
