"""From verified file contents to a `Dataset`, one function per kind of registered set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from quietgrad.data.adult import a9a_from_adult, adult_rows
from quietgrad.data.arrays import open_npz, parse_idx
from quietgrad.data.dataset import Dataset, check, encode_labels, hold_out, public_order
from quietgrad.data.libsvm import parse_libsvm
from quietgrad.data.schema import Schema
from quietgrad.data.sources import Contents
from quietgrad.data.tables import parse_csv

Builder: TypeAlias = Callable[[Contents], Dataset]
DIGITS = tuple(str(k) for k in range(10))
CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
KDD_ROWS = 70_000


def libsvm_pair(name: str, d: int, row_bound: float) -> Builder:
    """Training and published test file in LIBSVM text; labels ±1 become 0/1."""

    def build(contents: Contents) -> Dataset:
        X, raw = parse_libsvm(contents[name], d, name=name)
        X_test, raw_test = parse_libsvm(contents[f"{name}.t"], d, name=f"{name}.t")
        y, task, classes, names = encode_labels(name, raw, classes=(-1, 1))
        y_test = encode_labels(name, raw_test, classes=(-1, 1))[0]
        notes = ("LIBSVM text", "published test set")
        return Dataset(name, X, y, X_test, y_test, task, row_bound, classes, notes, names)

    return build


def a9a_rebuilt(contents: Contents) -> Dataset:
    """a9a from Adult's two files: at most one bit for each of 14 columns, so ‖x‖ ≤ √14."""
    X, raw = a9a_from_adult(contents["adult.data"], "adult.data")
    X_test, raw_test = a9a_from_adult(contents["adult.test.csv"], "adult.test.csv")
    y, task, classes, names = encode_labels("a9a", raw, classes=(-1, 1))
    y_test = encode_labels("a9a", raw_test, classes=(-1, 1))[0]
    notes = ("rebuilt exactly from Adult", "published test set")
    return Dataset("a9a", X, y, X_test, y_test, task, float(np.sqrt(14)), classes, notes, names)


def adult(schema: Schema) -> Builder:
    """Adult with its published test file."""

    def build(contents: Contents) -> Dataset:
        data = parse_csv(adult_rows(contents["adult.data"]), schema, name="adult")
        test = parse_csv(adult_rows(contents["adult.test.csv"]), schema, name="adult")
        return replace(data, X_test=test.X, y_test=test.y, notes=(*data.notes, "published test set"))

    return build


def table(name: str, schema: Schema) -> Builder:
    """One or more tables with the same columns (wine: red, then white), and a test part by the public seed."""

    def build(contents: Contents) -> Dataset:
        parts = [parse_csv(content, schema, name=name) for content in contents.values()]
        X: Any = np.concatenate([np.asarray(part.X) for part in parts])
        y: Any = np.concatenate([part.y for part in parts])
        return hold_out(replace(parts[0], X=X, y=y))

    return build


def kdd(schema: Schema) -> Builder:
    """70000 rows of the ten-percent file by the public seed; every attack becomes one class."""

    def build(contents: Contents) -> Dataset:
        lines = contents["kddcup.data_10_percent"].splitlines()
        # Rows are drawn by number before parsing: the whole file as Python strings would need a gigabyte.
        rows = [lines[i] for i in np.sort(public_order(len(lines))[:KDD_ROWS])]
        merged = (line if line.endswith(b",normal.") else line[: line.rindex(b",")] + b",attack" for line in rows)
        text = b"\n".join(line.replace(b",normal.", b",normal") for line in merged)
        data = hold_out(parse_csv(text, schema, name="kddcup99"))
        return replace(data, notes=(*data.notes, f"{KDD_ROWS} of {len(lines)} rows by a fixed public seed"))

    return build


def mnist(name: str, class_names: tuple[str, ...] = DIGITS) -> Builder:
    """The four idx files of MNIST or a set of its shape: pixels in [0, 1], float32.

    `X.reshape(-1, 1, 28, 28)` gives images.
    """

    def build(contents: Contents) -> Dataset:
        parts: list[Any] = []
        for part in ("train", "t10k"):
            pixels = parse_idx(contents[f"{name}-{part}-images-idx3-ubyte"], name)
            parts.append(pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255))
            parts.append(parse_idx(contents[f"{name}-{part}-labels-idx1-ubyte"], name).astype(np.int64))
        X, y, X_test, y_test = parts
        notes = ("published test set",)
        return Dataset(name, X, y, X_test, y_test, "multiclass", 28.0, tuple(range(10)), notes, class_names)

    return build


def cifar10(contents: Contents) -> Dataset:
    """CIFAR-10 pixels in [0, 1], float32, channels first; `X.reshape(-1, 3, 32, 32)` gives images."""
    arrays = open_npz(contents["cifar10.npz"], "cifar10")
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    X, X_test = (
        np.moveaxis(arrays[key], 3, 1).reshape(len(arrays[key]), -1).astype(np.float32) / np.float32(255)
        for key in ("x_train", "x_test")
    )
    y, y_test = (arrays[key].astype(np.int64) for key in ("y_train", "y_test"))
    bound = float(np.sqrt(3072))
    return Dataset(
        "cifar10", X, y, X_test, y_test, "multiclass", bound, tuple(range(10)), ("published test set",), names
    )


# scikit-learn's breast_cancer: ten measurements, each as mean, standard error and worst of a nucleus. Upper bounds
# are rounded from the ranges of this public set.
_NUCLEUS_MEAN = (30, 40, 200, 2500, 0.2, 0.4, 0.5, 0.25, 0.4, 0.1)
_NUCLEUS_ERROR = (3, 5, 25, 500, 0.05, 0.2, 0.5, 0.1, 0.1, 0.05)
_NUCLEUS_WORST = (40, 50, 300, 5000, 0.3, 1.0, 1.5, 0.3, 0.7, 0.25)


def bundled(name: str) -> Builder:
    """A set that comes with scikit-learn, scaled by public bounds, with a test part by the public seed."""

    def build(contents: Contents) -> Dataset:
        from sklearn import datasets

        bunch = {
            "breast-cancer": datasets.load_breast_cancer,
            "digits": datasets.load_digits,
            "diabetes": datasets.load_diabetes,
        }[name]()
        X, raw = np.asarray(bunch.data, dtype=np.float64), np.asarray(bunch.target)
        note = ("bundled with scikit-learn",)
        features = tuple(str(f) for f in bunch.feature_names)
        if name == "diabetes":  # scikit-learn ships the columns centred, with unit sum of squares over 442 rows
            X = np.clip(X, -0.2, 0.2) / 0.2
            data = Dataset(
                name, X, raw.astype(np.float64), task="regression", row_bound=float(np.sqrt(10)), notes=note,
                label_bounds=(0.0, 400.0), feature_names=features,
            )  # fmt: skip
        else:
            high = np.array(_NUCLEUS_MEAN + _NUCLEUS_ERROR + _NUCLEUS_WORST) if name == "breast-cancer" else 16.0
            X = np.clip(X / high, 0, 1)
            names = tuple(str(c) for c in bunch.target_names)
            y, task, classes, _ = encode_labels(name, raw, classes=tuple(range(len(names))))
            data = Dataset(
                name, X, y, task=task, row_bound=float(np.sqrt(X.shape[1])), classes=classes, notes=note,
                class_names=names, feature_names=features,
            )  # fmt: skip
        return hold_out(check(data))

    return build
