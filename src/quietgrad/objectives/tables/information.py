"""The curvature of a linear model's risk in whitened coordinates, as one release: what a Newton step divides by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.objectives.base import Batch
from quietgrad.objectives.tables.ranges import pair_bound
from quietgrad.objectives.tables.table import Floats
from quietgrad.objectives.tables.whitening import SecondMomentMatrix, Whitening, whitened_view
from quietgrad.privacy.budget import Relation


@dataclass(frozen=True, eq=False)
class WhitenedInformation:
    """Σ h(scoreᵢ)·x̃ᵢx̃ᵢᵀ with respect to whitened parameters, each shortened to a norm of ``clip``; packed.

    Packed as :class:`~quietgrad.objectives.tables.whitening.SecondMomentMatrix` is, so that equal noise on all
    entries is noise of the Gaussian orthogonal ensemble. A record's matrix has rank one and no negative eigenvalue:
    two of them are at most √2·clip apart.
    """

    params: Floats
    clip: float
    whitening: Whitening
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        """The clip, or clip/√2 where only the distance of two records counts."""
        return pair_bound(self.clip, self.relation)

    def dim(self, records: Any) -> int:
        """p(p+1)/2."""
        return len(self.params) * (len(self.params) + 1) // 2

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the packed sum; all records only, because under replace-one the bound is about pairs."""
        if batch.indices is not None:
            raise ValueError("the information matrix uses all records: plan it with FullBatch() sampling.")
        view, records = whitened_view(objective, batch, self.whitening.transform)
        size = len(self.params)
        total = np.zeros((size, size))
        # Rounding of products over p entries is covered as in the row norms.
        slack = 1.0 + (64 + 4 * size) * float(np.finfo(np.float64).eps)
        view.add_hessians(batch._replace(records=records), self.params, self.clip / slack, total)
        weights = np.where(np.eye(size, dtype=bool), 1.0, math.sqrt(2.0))
        out += np.nan_to_num((total * weights)[np.triu_indices(size)])

    def unpack(self, released: Floats) -> Floats:
        """The symmetric matrix of a released triangle."""
        return SecondMomentMatrix.unpack(released, len(self.params))
