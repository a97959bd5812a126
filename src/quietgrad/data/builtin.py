"""From verified contents of registered files to a `Dataset`: one function for each `build` of registry.toml.

a9a is rebuilt bit for bit from UCI Adult. It keeps Adult's row order; numeric columns fall into right-closed bins,
categories are one-hot in the order of UCI's attribute list, and an unknown entry ("?") sets no bit: 123 binary
features, at most 14 of them 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.data.columns import Categorical, to_numbers
from quietgrad.data.dataset import Dataset, Matrix, check, encode_labels, hold_out, public_order
from quietgrad.data.file_formats import open_npz, parse_idx, parse_libsvm
from quietgrad.data.schema import read_schema

if TYPE_CHECKING:
    from quietgrad.data.registry import DatasetSpec

Contents: TypeAlias = dict[str, bytes]
Builder: TypeAlias = Callable[["DatasetSpec", Contents], Dataset]
_DIGITS = tuple(str(k) for k in range(10))
_KDD_ROWS = 70_000
_A9A_EDGES: Mapping[str, tuple[float, ...]] = {
    "age": (25, 32, 40, 49),
    "fnlwgt": (106647, 158661, 196337, 259872),
    "education-num": (8, 9, 10, 12),
    "capital-gain": (0,),
    "capital-loss": (0,),
    "hours-per-week": (34, 39, 40, 47),
}


def adult_rows(content: bytes) -> bytes:
    """The rows alone: the header line that some copies carry, and UCI's trailing dot on test labels, removed."""
    lines = content.replace(b"\r\n", b"\n").split(b"\n")
    if lines and (lines[0].startswith(b"age") or lines[0].startswith(b"|")):
        lines = lines[1:]
    return b"\n".join(line.removesuffix(b".") for line in lines)


def a9a_from_adult(content: bytes, name: str = "adult") -> tuple[Matrix, npt.NDArray[np.float64]]:
    """LIBSVM a9a (or a9a.t) rebuilt bit for bit from Adult's text.

    Features are a CSR matrix of ones (n, 123), labels are ±1.

    >>> who = b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male,"
    >>> X, y = a9a_from_adult(who + b" 2174, 0, 40, United-States, <=50K")
    >>> (X.indices[:5] + 1).tolist(), y.tolist()
    ([3, 11, 14, 19, 39], [-1.0])
    """
    from scipy import sparse

    from quietgrad.data.delimited import CSVDialect
    from quietgrad.data.registry import REGISTRY
    from quietgrad.data.tables import text_columns

    schema = read_schema(REGISTRY["adult"].schema or {})
    assert schema.names is not None
    columns = text_columns(adult_rows(content), CSVDialect(",", schema.names, False), schema.names, name)
    hot: list[npt.NDArray[Any]] = []
    for column, kind in schema.columns.items():
        if isinstance(kind, Categorical):
            words = tuple(word for word in kind.categories if word != "?")
            hot.append(Categorical(words).encode(column, columns[column]))
        else:
            edges = _A9A_EDGES[column]
            bins = np.searchsorted(edges, to_numbers(column, columns[column]), side="left")
            hot.append(bins[:, None] == np.arange(len(edges) + 1))
    X: Any = sparse.csr_matrix(np.hstack(hot).astype(np.float64))
    income = np.asarray(columns["income"])
    if not np.isin(income, ("<=50K", ">50K")).all():
        raise DataError(f"{name}: income must be '<=50K' or '>50K'.")
    return X, np.where(income == ">50K", 1.0, -1.0)


def a9a_feature_names() -> tuple[str, ...]:
    """The 123 binary features of a9a in words: a bin of a numeric column, or one word of a category.

    They follow from UCI's attribute list and the bins, and so hold for LIBSVM's own file, too.

    >>> a9a_feature_names()[:6]
    ('age ≤ 25', '25 < age ≤ 32', '32 < age ≤ 40', '40 < age ≤ 49', 'age > 49', 'workclass=Private')
    """
    from quietgrad.data.registry import REGISTRY

    names: list[str] = []
    for column, kind in read_schema(REGISTRY["adult"].schema or {}).columns.items():
        if isinstance(kind, Categorical):
            names += [f"{column}={word}" for word in kind.categories if word != "?"]
        else:
            edges = _A9A_EDGES[column]
            between = [f"{low:g} < {column} ≤ {high:g}" for low, high in pairwise(edges)]
            names += [f"{column} ≤ {edges[0]:g}", *between, f"{column} > {edges[-1]:g}"]
    return tuple(names)


def _parsed(spec: DatasetSpec, text: bytes) -> Dataset:
    from quietgrad.data.tables import parse_csv

    return parse_csv(text, read_schema(spec.schema or {}), name=spec.name)


def _libsvm(spec: DatasetSpec, contents: Contents) -> Dataset:
    """Training and published test file in LIBSVM text, or a9a from Adult's two files; labels ±1 become 0/1."""
    if spec.name in contents:
        names = (spec.name, f"{spec.name}.t")
        parts: list[tuple[Any, Any]] = [parse_libsvm(contents[file], spec.features, file) for file in names]
        note = "LIBSVM text"
    else:
        parts = [a9a_from_adult(contents[file], file) for file in ("adult.data", "adult.test.csv")]
        note = "rebuilt exactly from Adult"
    (X, raw), (X_test, raw_test) = parts
    labels = encode_labels(spec.name, raw, classes=(-1, 1))
    y_test = encode_labels(spec.name, raw_test, classes=(-1, 1)).y
    notes = (note, "published test set")
    features = a9a_feature_names() if spec.name == "a9a" else None
    return Dataset(
        spec.name, X, labels.y, X_test, y_test, row_bound=spec.row_bound, notes=notes, feature_names=features,
        **labels.facts,
    )  # fmt: skip


def _adult(spec: DatasetSpec, contents: Contents) -> Dataset:
    data, test = (_parsed(spec, adult_rows(content)) for content in contents.values())
    return replace(data, X_test=test.X, y_test=test.y, notes=(*data.notes, "published test set"))


def _table(spec: DatasetSpec, contents: Contents) -> Dataset:
    """One or more tables with the same columns (wine: red, then white), and a test part by the public seed."""
    parts = [_parsed(spec, content) for content in contents.values()]
    X: Any = np.concatenate([np.asarray(part.X) for part in parts])
    y: Any = np.concatenate([part.y for part in parts])
    return hold_out(replace(parts[0], X=X, y=y))


def _kddcup99(spec: DatasetSpec, contents: Contents) -> Dataset:
    """70000 rows of the ten-percent file by the public seed; every attack becomes one class."""
    lines = contents["kddcup.data_10_percent"].splitlines()
    # Rows are drawn by number before parsing: the whole file as Python strings would need a gigabyte.
    rows = [lines[i] for i in np.sort(public_order(len(lines))[:_KDD_ROWS])]
    merged = (line if line.endswith(b",normal.") else line[: line.rindex(b",")] + b",attack" for line in rows)
    text = b"\n".join(line.replace(b",normal.", b",normal") for line in merged)
    data = hold_out(_parsed(spec, text))
    return replace(data, notes=(*data.notes, f"{_KDD_ROWS} of {len(lines)} rows by a fixed public seed"))


def _idx_images(spec: DatasetSpec, contents: Contents) -> Dataset:
    """The four idx files of MNIST or its like: pixels in [0, 1]; `X.reshape(-1, 1, 28, 28)` gives images."""
    parts: list[Any] = []
    for part in ("train", "t10k"):
        pixels = parse_idx(contents[f"{spec.name}-{part}-images-idx3-ubyte"], spec.name)
        parts.append(pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255))
        parts.append(parse_idx(contents[f"{spec.name}-{part}-labels-idx1-ubyte"], spec.name).astype(np.int64))
    X, y, X_test, y_test = parts
    names, notes = tuple(spec.class_names or _DIGITS), ("published test set",)
    return Dataset(spec.name, X, y, X_test, y_test, "multiclass", 28.0, tuple(range(10)), notes, names)


def _cifar10(spec: DatasetSpec, contents: Contents) -> Dataset:
    """CIFAR-10 pixels in [0, 1], float32, channels first; `X.reshape(-1, 3, 32, 32)` gives images."""
    arrays = open_npz(contents["cifar10.npz"], "cifar10")
    X, X_test = (
        np.moveaxis(arrays[key], 3, 1).reshape(len(arrays[key]), -1).astype(np.float32) / np.float32(255)
        for key in ("x_train", "x_test")
    )
    y, y_test = (arrays[key].astype(np.int64) for key in ("y_train", "y_test"))
    bound, notes = float(np.sqrt(3072)), ("published test set",)
    names = tuple(spec.class_names or ())
    return Dataset(spec.name, X, y, X_test, y_test, "multiclass", bound, tuple(range(10)), notes, names)


# scikit-learn's breast_cancer: ten measurements, each as mean, standard error and worst of a nucleus. Upper bounds
# are rounded from the ranges of this public set.
_MEAN = (30, 40, 200, 2500, 0.2, 0.4, 0.5, 0.25, 0.4, 0.1)
_ERROR = (3, 5, 25, 500, 0.05, 0.2, 0.5, 0.1, 0.1, 0.05)
_WORST = (40, 50, 300, 5000, 0.3, 1.0, 1.5, 0.3, 0.7, 0.25)


def _bundled(spec: DatasetSpec, contents: Contents) -> Dataset:
    """A set that comes with scikit-learn, scaled by public bounds, with a test part by the public seed."""
    from sklearn import datasets

    name = spec.name
    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")()
    # scikit-learn ships the columns of diabetes centred, with unit sum of squares over 442 rows.
    high = {"diabetes": [0.2], "digits": [16.0], "breast-cancer": [*_MEAN, *_ERROR, *_WORST]}[name]
    X = np.clip(np.asarray(bunch.data, dtype=np.float64) / high, -1 if name == "diabetes" else 0, 1)
    data = Dataset(
        name, X, np.asarray(bunch.target, np.float64), task="regression", row_bound=float(np.sqrt(X.shape[1])),
        notes=("bundled with scikit-learn",), feature_names=tuple(str(f) for f in bunch.feature_names),
    )  # fmt: skip
    if name == "diabetes":
        return hold_out(check(replace(data, label_bounds=(0.0, 400.0))))
    names = tuple(str(c) for c in bunch.target_names)
    labels = encode_labels(name, bunch.target, classes=tuple(range(len(names))))
    return hold_out(check(replace(data, **labels._replace(class_names=names)._asdict())))


BUILDERS: Mapping[str, Builder] = {
    "libsvm": _libsvm,
    "adult": _adult,
    "table": _table,
    "kddcup99": _kddcup99,
    "idx_images": _idx_images,
    "cifar10": _cifar10,
    "bundled": _bundled,
}
