"""Public ways to deal the records of one table to parties, for simulations and experiments."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.data.splits import split_dirichlet, split_even, split_uneven
from quietgrad.federation.parties import Party


def deal(
    X: Any,
    y: npt.ArrayLike,
    m: int,
    *,
    unevenness: float = 1.0,
    dirichlet: float | None = None,
    seed: int | None = 0,
) -> list[Party]:
    """Split one table among m parties: evenly, with sizes n_max/n_min = ``unevenness``, or with skewed labels.

    Args:
        X, y: the table.
        m: how many parties.
        unevenness: n_max/n_min, sizes between them geometric; 1 is even. (Paper 002's u has two groups of sizes.)
        dirichlet: α of label shares drawn from Dirichlet(α) instead; small α makes the parties' labels differ.
        seed: of the shuffle; ``None`` keeps the order (even and uneven splits only).

    >>> [party.size for party in deal(np.zeros((70, 2)), np.zeros(70), 3, unevenness=4)]
    [40, 20, 10]
    """
    labels = np.asarray(y)
    if dirichlet is not None:
        if unevenness != 1.0 or seed is None:
            raise ValueError(
                "dirichlet: needs a seed, and sizes then follow from the labels; leave unevenness out."
            )
        parts = split_dirichlet(labels, m, dirichlet, seed)
    elif unevenness == 1.0:
        parts = split_even(len(labels), m, seed)
    else:
        parts = split_uneven(len(labels), m, unevenness, seed)
    return [Party(X[part], labels[part], ids=part) for part in parts]
