"""Public ways to deal records to parties: even, uneven by a ratio, and label-skewed (Dirichlet)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError


def split_even(n: int, m: int, seed: int | None = None) -> list[npt.NDArray[np.int64]]:
    """Deal n rows to m parties whose sizes differ by at most one; shuffled if a seed is given.

    >>> [part.tolist() for part in split_even(5, 2)]
    [[0, 1, 2], [3, 4]]
    """
    _check_parties(n, m)
    return [part.astype(np.int64) for part in np.array_split(_order(n, seed), m)]


def uneven_sizes(n: int, m: int, u: float) -> list[int]:
    """m sizes that sum to n, falling geometrically from n_max to n_min with n_max/n_min ≈ u.

    Size k is proportional to u^(−k/(m−1)); rounding moves the ratio by less than one row per party.

    >>> uneven_sizes(70, 3, 4)
    [40, 20, 10]
    """
    _check_parties(n, m)
    if not (np.isfinite(u) and u >= 1):
        raise DataError(f"u={u}: must be a finite ratio n_max/n_min of at least 1.")
    shares = u ** (-np.arange(m) / max(m - 1, 1))
    exact = shares / shares.sum() * n
    sizes = np.floor(exact).astype(np.int64)
    # Largest remainders get the rows that rounding down left over.
    for k in np.argsort(sizes - exact, kind="stable")[: n - int(sizes.sum())]:
        sizes[k] += 1
    if sizes.min() < 1:
        raise DataError(f"n={n}, m={m}, u={u}: the smallest party would have no rows; lower m or u.")
    return [int(s) for s in sizes]


def split_uneven(n: int, m: int, u: float, seed: int | None = None) -> list[npt.NDArray[np.int64]]:
    """Deal n rows to m parties of `uneven_sizes(n, m, u)`; shuffled if a seed is given.

    >>> [len(part) for part in split_uneven(70, 3, 4)]
    [40, 20, 10]
    """
    ends = np.cumsum(uneven_sizes(n, m, u))[:-1]
    return [part.astype(np.int64) for part in np.split(_order(n, seed), ends)]


def split_dirichlet(y: npt.ArrayLike, m: int, alpha: float, seed: int) -> list[npt.NDArray[np.int64]]:
    """Deal each class to m parties by shares drawn from Dirichlet(α): small α makes labels differ by party.

    The split looks at labels, so use it to simulate parties, not inside a private run. Every party gets a row.

    >>> parts = split_dirichlet([0, 0, 0, 1, 1, 1], 2, alpha=0.5, seed=0)
    >>> sorted(np.concatenate(parts).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    labels = np.asarray(y)
    _check_parties(len(labels), m)
    if not (np.isfinite(alpha) and alpha > 0):
        raise DataError(f"alpha={alpha}: must be a finite number > 0.")
    rng = np.random.default_rng(seed)
    parties: list[list[int]] = [[] for _ in range(m)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.round(np.cumsum(rng.dirichlet(np.full(m, alpha)))[:-1] * len(rows)).astype(np.int64)
        for party, part in zip(parties, np.split(rows, cuts), strict=True):
            party.extend(part.tolist())
    for party in parties:
        if not party:
            party.append(max(parties, key=len).pop())
    return [np.sort(np.array(party, dtype=np.int64)) for party in parties]


def _order(n: int, seed: int | None) -> npt.NDArray[np.int64]:
    return np.arange(n) if seed is None else np.random.default_rng(seed).permutation(n)


def _check_parties(n: int, m: int) -> None:
    if m < 1 or n < m:
        raise DataError(f"m={m} parties for n={n} rows: need 1 ≤ m ≤ n.")
