"""How much each party counts, and how a batch is dealt among parties."""

from __future__ import annotations

import math
from collections.abc import Sequence

Weights = str | Sequence[float]
"""``"size"`` (n_j/n), ``"equal"`` (1/m), or one number per party."""


def factors(weights: Weights, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """What party j multiplies its sum by, w_j·n/n_j, so that the average of parties has weights w_j.

    >>> factors("size", (30, 10)), factors("equal", (30, 10))
    ((1.0, 1.0), (0.6666666666666666, 2.0))
    """
    m, n = len(sizes), sum(sizes)
    if weights == "size":
        return (1.0,) * m
    if weights == "equal":
        given: list[float] = [1.0] * m
    elif isinstance(weights, str):
        raise ValueError(f"weights={weights!r}: must be 'size', 'equal' or one number per party.")
    else:
        given = [float(w) for w in weights]
    if len(given) != m or not all(0.0 <= w < math.inf for w in given) or not sum(given) > 0.0:
        raise ValueError(f"weights={weights!r}: must be {m} numbers ≥ 0, one per party, that do not sum to 0.")
    return tuple(w / sum(given) * n / size for w, size in zip(given, sizes, strict=True))


def shares(total: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Whole numbers proportional to ``sizes`` that sum to ``total``, by largest remainders, never above a size.

    >>> shares(10, (70, 20, 10)), shares(2, (50, 30, 20))
    ((7, 2, 1), (1, 1, 0))
    """
    everyone = sum(sizes)
    exact = [total * size / everyone for size in sizes]
    given = [min(int(share), size) for share, size in zip(exact, sizes, strict=True)]
    order = sorted(range(len(sizes)), key=lambda j: given[j] - exact[j])
    for j in order[: total - sum(given)]:
        given[j] += 1
    return tuple(given)
