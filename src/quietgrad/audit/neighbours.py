"""Adversarial neighbours for objectives on tables: what a kernel's clipping must survive.

Row scales from 1e-2 to 1e3, sign flips, other labels, zero rows, ties, and rows whose gradient is just on the clip;
parameters at the origin, moderate and far out, and pairs of them for gradient differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Gradient, GradientDifference, JointMomentum, Loss, Query, RecursiveMomentum
from quietgrad.objectives.tables.linear import LinearObjective
from quietgrad.privacy.budget import Relation

Floats = npt.NDArray[np.float64]
_SCALES = (1e-2, 0.1, 0.5, 1.0, 2.0, 30.0, 1e3)


def neighbouring_tables(
    objective: Any, relation: Relation, *, features: int = 3, draws: int = 2, seed: int = 0, dtype: Any = np.float64
) -> Iterator[tuple[Any, Any]]:
    """Pairs of (X, y) that differ in their last row: replaced, or absent in the second.

    >>> from quietgrad.objectives import Logistic
    >>> a, b = next(neighbouring_tables(Logistic(), Relation.ADD_REMOVE))
    >>> len(a[0]) - len(b[0])
    1
    """
    rng = np.random.default_rng(seed)
    bound = getattr(objective, "row_bound", None)
    for scale in _SCALES:
        for _ in range(draws):
            common = rng.standard_normal((4, features))
            common[0] = 0.0
            common[2] = common[1]
            if bound is not None:
                common *= bound / max(bound, float(np.linalg.norm(common, axis=1).max()))
            row = rng.standard_normal(features)
            row *= scale / np.linalg.norm(row)
            y = labels(objective, rng, 6)
            for changed, label in ((-row, y[4]), (row, y[5]), (np.zeros(features), y[4])):
                full = np.vstack([common, row]).astype(dtype), y[:5]
                if relation is Relation.ADD_REMOVE:
                    yield full, (common.astype(dtype), y[:4])
                else:
                    yield full, (np.vstack([common, changed]).astype(dtype), np.append(y[:4], label))


def labels(objective: LinearObjective, rng: np.random.Generator, size: int) -> npt.NDArray[Any]:
    """Targets that the objective accepts; the last two differ as much as they can."""
    if objective.task != "regression":
        classes = max(objective.outputs, 2)
        return np.append(rng.integers(0, classes, size - 2), [0, classes - 1])
    return np.append(rng.standard_normal(size - 2), [100.0, -100.0])


def every_query(records: Any, *, seed: int = 1) -> Iterator[Query]:
    """All queries on sums of gradients and losses, at the origin, near it and far out."""
    rng = np.random.default_rng(seed)
    points = [np.zeros(records.dim), *(s * rng.standard_normal(records.dim) for s in (0.3, 5.0, 1e3))]
    for i, params in enumerate(points):
        previous = points[i - 1]
        yield Gradient(params, 1.0)
        yield Gradient(params, 0.01)
        yield GradientDifference(params, previous, 0.2)
        yield RecursiveMomentum(params, previous, 0.1, 1.0, 0.2)
        yield RecursiveMomentum(params, -params, 0.5, 1.0, 1.0)
        yield JointMomentum(params, previous, 0.1, 0.28)
        yield Loss(params, 3.0)
