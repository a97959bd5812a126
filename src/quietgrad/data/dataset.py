"""Datasets: one frozen `Dataset` from every reader, checked before any budget is touched, and public splits.

Everything said about the data besides the rows themselves (bounds, classes, names) is public: it comes from a
schema, the registry or an argument, never from the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.sanitize import did_you_mean
from quietgrad.tables.labels import ClassLabels

if TYPE_CHECKING:
    from scipy import sparse

    from quietgrad.core.accounting.budget import Budget

# Quoted, so that scipy is not imported with the package.
Matrix: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.float64] | sparse.csr_matrix[Any]"
Task: TypeAlias = Literal["binary", "multiclass", "regression"]
Labels: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]

LABELS_ARE_WORDS = (
    "labels are not numbers. Pass the public label set, {classes=('no', 'yes')}, or a schema. No privacy budget "
    "was spent."
)
SPLIT_SEED = 20190
"""The public seed of every train/test split and subsample in the registry."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A table ready for an objective.

    It has features, labels, and the public facts that a private fit may rely on.

    `X` is a dense array or a scipy CSR matrix of shape (n, d). `y` holds numbers for regression and 0…k−1 for
    classification: codes in the order of this data set's classes, which mean nothing beside other ones. `targets`
    are the labels themselves. `row_bound` is a public bound on ‖x‖₂ or None; `classes` are the values `y` may
    take, `class_names` what they stand for; `label_bounds` limit a regression target. `notes` tell a reader
    where the rows came from and what was done to them. `person` holds the id of the person each training row is
    about, if people have several; it is no feature and as secret as the rows.

    >>> import numpy as np
    >>> data = Dataset("toy", np.eye(2), np.array([0, 1]), task="binary", row_bound=1.0, classes=(0, 1))
    >>> data.n, data.d
    (2, 2)
    """

    name: str
    X: Matrix
    y: Labels
    X_test: Matrix | None = None
    y_test: Labels | None = None
    task: Task = "binary"
    row_bound: float | None = None
    classes: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    label_bounds: tuple[float, float] | None = None
    feature_names: tuple[str, ...] | None = None
    person: npt.NDArray[Any] | None = field(default=None, repr=False)
    person_test: npt.NDArray[Any] | None = field(default=None, repr=False)
    """The id of the person each held-out row is about."""
    ids: tuple[str, ...] | None = field(default=None, repr=False)
    """One id per row to stand beside predictions; no feature, and as secret as the rows."""
    feature_bounds: tuple[tuple[float, float] | None, ...] | None = None
    """The public range of each feature by the schema; ``None`` where it is to be found privately."""
    bounded_names: tuple[str, ...] = ()
    """Features whose values a schema's bounds may clip."""
    leaves_out: bool = False
    """Whether rows were left out for what they hold: how many there are is then a secret of theirs."""
    undeclared: int = field(default=0, repr=False)
    """How many labels are none of the classes: as secret as the rows, for their owner's terminal alone."""

    @property
    def n(self) -> int:
        return int(self.X.shape[0])

    @property
    def d(self) -> int:
        return int(self.X.shape[1])

    @property
    def class_labels(self) -> ClassLabels | None:
        """The classes in the order of the codes in `y`; ``None`` of a regression."""
        return None if self.classes is None else ClassLabels.of(self.class_names or self.classes)

    @property
    def targets(self) -> npt.NDArray[Any]:
        """The target of each row: its label (not its code), or its number."""
        return self._decoded(self.y)

    @property
    def targets_test(self) -> npt.NDArray[Any] | None:
        """The target of each held-out row, or ``None`` if there are none."""
        return None if self.y_test is None else self._decoded(self.y_test)

    def _decoded(self, y: Labels) -> npt.NDArray[Any]:
        return y if self.class_labels is None else self.class_labels.decode(y)

    def refuse_uncounted(self, budget: Budget | None) -> None:
        """Raise DataError if the guarantee fixes the number of records and what they hold decides it."""
        from quietgrad.core.accounting.budget import Relation
        from quietgrad.core.session.objectives import UNCOUNTED

        if self.leaves_out and budget is not None and budget.relation is Relation.REPLACE_ONE:
            raise DataError(f"{self.name}: {UNCOUNTED}")


def check(data: Dataset) -> Dataset:
    """Refuse a data set that no private fit can use: empty, non-finite, mismatched, wrong labels.

    Messages name what is wrong, never a record's value.

    >>> import numpy as np
    >>> check(Dataset("toy", np.array([[np.nan]]), np.array([0]), task="regression"))
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: toy: the features hold NaN or infinite values. ...
    """
    for part, X, y in (("", data.X, data.y), ("test ", data.X_test, data.y_test)):
        if X is None or y is None:
            if (X is None) != (y is None):
                raise DataError(f"{data.name}: test features and test labels must be given together.")
            continue
        if len(X.shape) != 2 or 0 in X.shape:
            raise DataError(f"{data.name}: {part}features have shape {X.shape}; need at least one row and column.")
        if y.shape != (X.shape[0],):
            raise DataError(f"{data.name}: {part}features have {X.shape[0]} rows, labels have shape {y.shape}.")
        if X.shape[1] != data.d:
            raise DataError(f"{data.name}: test rows have {X.shape[1]} features, training rows {data.d}.")
        values = X if isinstance(X, np.ndarray) else X.data
        for what, numbers in (("features", values), ("labels", y)):
            if not np.isfinite(numbers).all():
                raise DataError(
                    f"{data.name}: the {part}{what} hold NaN or infinite values. Remove or fill those rows with "
                    "public values first (a schema's `fill`, or `drop_incomplete`)."
                )
    if data.task != "regression":
        if data.classes is None:
            raise DataError(
                f"{data.name}: a {data.task} data set needs its public classes; pass {{classes=(...)}}."
            )
        for part, y in (("", data.y), ("test ", data.y_test)):
            if y is not None and not np.isin(y, data.classes).all():
                raise DataError(f"{data.name}: the {part}labels hold values outside the classes {data.classes}.")
    return data


def check_task(task: str | None) -> None:
    """Refuse a task that is none, before anything is read."""
    if task is not None and task not in get_args(Task):
        near = did_you_mean(task, get_args(Task))
        raise SettingError(f"{{task}}: must be binary, multiclass or regression.{near}", task=task)


class EncodedLabels(NamedTuple):
    """The labels of a file as numbers, with what is public about them."""

    y: Labels
    task: Task
    classes: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None
    undeclared: int = 0
    """How many labels are of no class: as secret as the records, for their owner's terminal alone."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a `Dataset` besides the labels themselves."""
        return {key: value for key, value in self._asdict().items() if key != "y"}


def encode_labels(
    name: str,
    raw: npt.NDArray[Any],
    task: Task | None = None,
    classes: Sequence[object] | None = None,
) -> EncodedLabels:
    """Turn raw labels into 0…k−1 (or floats), given the public classes; ±1 and 0/1 need no declaration.

    A label that is not among declared classes counts as the first of them.

    >>> import numpy as np
    >>> encode_labels("toy", np.array([-1.0, 1.0, -1.0])).y
    array([0, 1, 0])
    """
    check_task(task)
    if task == "regression":
        return EncodedLabels(_numbers(name, raw), "regression")
    if classes is None:
        numbers = _numbers(name, raw)
        classes = next((p for p in ((0, 1), (-1, 1)) if np.isin(numbers, p).all()), None)
        if classes is None:
            raise DataError(
                f"{name}: labels are neither 0/1 nor -1/+1. For classification pass the public label set, "
                "{classes=(1, 2, 3)}; for regression pass {task='regression'}. No privacy budget was spent."
            )
    try:
        known = ClassLabels.of(classes)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    if task == "binary" and len(known) != 2:
        raise DataError(f"{name}: {{task='binary'}} with {len(known)} classes; use {{task='multiclass'}}.")
    return EncodedLabels(
        known.encode_known(raw), "binary" if len(known) == 2 else "multiclass", tuple(range(len(known))),
        known.names, int(np.sum(known.encode(raw) < 0)),
    )  # fmt: skip


def _numbers(name: str, raw: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(raw).astype(np.float64)
    except (ValueError, TypeError):
        # `from None`: numpy's own message would quote the offending value.
        raise DataError(f"{name}: {LABELS_ARE_WORDS}") from None
    if not np.isfinite(numbers).all():
        raise DataError(f"{name}: the labels hold NaN or infinite values.")
    return numbers


def clip_rows(X: Matrix, bound: float = 1.0) -> Matrix:
    """Scale each row by min(1, bound/‖x‖₂); a per-record map, so it costs no privacy.

    >>> import numpy as np
    >>> clip_rows(np.array([[3.0, 4.0], [0.3, 0.4]]))
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    if isinstance(X, np.ndarray):
        norms = np.linalg.norm(X, axis=1)
        factors = (bound / np.maximum(norms, bound)).astype(X.dtype)
        return cast("Matrix", X * factors[:, None])
    norms = np.sqrt(np.asarray(X.multiply(X).sum(axis=1))).ravel()
    scaled = X.copy()
    scaled.data = (X.data * np.repeat(bound / np.maximum(norms, bound), np.diff(X.indptr))).astype(X.dtype)
    return scaled


def normalized(data: Dataset, bound: float = 1.0) -> Dataset:
    """The same data set with every row (training and test) clipped to norm ≤ `bound`."""
    test = None if data.X_test is None else clip_rows(data.X_test, bound)
    note = f"rows scaled to norm ≤ {bound:g}"
    return replace(data, X=clip_rows(data.X, bound), X_test=test, row_bound=bound, notes=(*data.notes, note))


def public_order(n: int, seed: int = SPLIT_SEED) -> npt.NDArray[np.int64]:
    """A fixed shuffle of 0…n−1 that depends on n and a public seed only, on every numpy version alike."""
    # Raw words of a bit generator are stable by numpy's policy; Generator.permutation is not.
    words = np.random.PCG64(seed).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)


def hold_out(data: Dataset, fraction: float = 0.2) -> Dataset:
    """Split off a test part of ⌊fraction·n⌋ rows by `public_order`; training rows keep their order."""
    order = public_order(data.n)
    size = int(fraction * data.n)
    test, train = np.sort(order[:size]), np.sort(order[size:])
    note = f"test set: {size} of {data.n} rows by a fixed public seed"
    if data.person is not None:
        raise DataError(f"{data.name}: rows of one person would be in both parts; split people before loading.")
    return replace(
        data, X=data.X[train], y=data.y[train], X_test=data.X[test], y_test=data.y[test], notes=(*data.notes, note)
    )


def split_even(n: int, m: int, seed: int | None = None) -> list[npt.NDArray[np.int64]]:
    """Deal n rows to m parties whose sizes differ by at most one.

    With a seed, rows are shuffled.
    """
    _check_parties(n, m)
    return np.array_split(_order(n, seed), m)


def uneven_sizes(n: int, m: int, u: float) -> list[int]:
    """m sizes that sum to n and fall geometrically, with n_max/n_min ≈ u.

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
        raise DataError(f"{{n}}, m={m}, u={u}: the smallest party would have no rows; lower m or u.", n=n)
    return [int(s) for s in sizes]


def split_uneven(n: int, m: int, u: float, seed: int | None = None) -> list[npt.NDArray[np.int64]]:
    """Deal n rows to m parties of `uneven_sizes(n, m, u)`.

    With a seed, rows are shuffled.
    """
    ends = np.cumsum(uneven_sizes(n, m, u))[:-1]
    return np.split(_order(n, seed), ends)


def split_dirichlet(y: npt.ArrayLike, m: int, alpha: float, seed: int) -> list[npt.NDArray[np.int64]]:
    """Deal each class to m parties by shares drawn from Dirichlet(α).

    With a small α labels differ by party.

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
        raise DataError(f"m={m} parties for {{n}} rows: need 1 ≤ m ≤ n.", n=n)
