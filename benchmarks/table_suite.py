"""The tables that the defaults are judged on: real ones as people bring them, and synthetic adversities.

Real files come from ``QUIETGRAD_DATA`` (see docs/data.md) or ship with scikit-learn. Categories are one-hot columns
of the published code book; numbers are left raw. Every table has training and test rows; constants are settled on
*held-out* rows, a fifth of the training rows, and test rows are looked at once.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sparse


@dataclass(frozen=True)
class Problem:
    """One table: training and test rows, what its columns mean, and the public bounds somebody could declare."""

    name: str
    X: Any
    y: Any
    X_test: Any
    y_test: Any
    task: str = "binary"
    bounds: Any = None
    numeric: tuple[int, ...] = field(default=())
    frame: Any = None  # the same rows as a DataFrame pair (train, test) with category columns, for additive models

    def held_out(self) -> Problem:
        """Training rows split again: the last fifth takes the place of the test rows."""
        order = np.random.default_rng(7).permutation(self.X.shape[0])
        fit, check = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
        frame = None if self.frame is None else (self.frame[0].iloc[fit], self.frame[0].iloc[check])
        return Problem(
            self.name, self.X[fit], self.y[fit], self.X[check], self.y[check], self.task, self.bounds,
            self.numeric, frame,
        )  # fmt: skip


def _folder() -> Path:
    return Path(os.environ.get("QUIETGRAD_DATA", "../shared/data"))


def _read(name: str, **options: Any) -> Any:
    import pandas as pd

    with gzip.open(_folder() / name, "rt") as file:
        return pd.read_csv(file, skipinitialspace=True, **options)


def outward(values: Any) -> tuple[float, float]:
    """Round limits outward to two digits, as a code book would state them."""

    def digit(value: float, up: bool) -> float:
        if value == 0.0:
            return 0.0
        unit = 10.0 ** (np.floor(np.log10(abs(value))) - 1)
        return float((np.ceil if up else np.floor)(value / unit) * unit)

    low, high = digit(float(np.min(values)), False), digit(float(np.max(values)), True)
    return (low, high) if low < high else (low - 1.0, high + 1.0)


def _split(name: str, table: Any, target: Any, task: str, test: Any = None, seed: int = 0) -> Problem:
    """A DataFrame as a problem: text columns one-hot by vocabulary, numbers raw."""
    import pandas as pd

    target = np.asarray(target)
    if test is None:
        order = np.random.default_rng(seed).permutation(len(table))
        cut = len(table) * 4 // 5
        train, test = table.iloc[order[:cut]], table.iloc[order[cut:]]
        y, y_test = target[order[:cut]], target[order[cut:]]
    else:
        (train, y), (test, y_test) = (table, target), test
    both = pd.concat([train, test])
    names = [c for c in both if not pd.api.types.is_numeric_dtype(both[c])]
    vocabulary = {c: sorted(both[c].astype(str).unique()) for c in names}
    columns, numeric, bounds = [], [], []
    for c in both:
        if c in vocabulary:
            values = both[c].astype(str).to_numpy()
            columns += [(values == v).astype(float) for v in vocabulary[c]]
            bounds += [(0.0, 1.0)] * len(vocabulary[c])
        else:
            numeric.append(len(columns))
            columns.append(both[c].to_numpy(float))
            bounds.append(outward(columns[-1]))
    X = np.column_stack(columns)
    train, test = train.copy(), test.copy()
    for part in (train, test):
        for c, values in vocabulary.items():
            part[c] = pd.Categorical(part[c].astype(str), categories=values)
    n = len(train)
    return Problem(
        name, X[:n], np.asarray(y), X[n:], np.asarray(y_test), task, bounds, tuple(numeric), (train, test)
    )


def adult() -> Problem:
    names = [
        "age", "workclass", "fnlwgt", "education", "education-num", "marital", "occupation", "relationship", "race",
        "sex", "gain", "loss", "hours", "country", "income",
    ]  # fmt: skip
    train = _read("adult.data.gz", header=None, names=names)
    test = _read("adult.test.csv.gz", header=0, names=names)
    y, y_test = ((part.pop("income").str.startswith(">50K").to_numpy() * 1) for part in (train, test))
    return _split("adult", train, y, "binary", (test, y_test))


def bank() -> Problem:
    table = _read("bank-full.csv.gz", sep=";")
    return _split("bank", table, (table.pop("y") == "yes").to_numpy() * 1, "binary")


def bank_additional() -> Problem:
    table = _read("bank-additional-full.csv.gz", sep=";").drop(columns="duration")
    return _split("bank-additional", table, (table.pop("y") == "yes").to_numpy() * 1, "binary")


def credit() -> Problem:
    table = _read("default-credit-card-clients.csv.gz").drop(columns="ID")
    y = table.pop("Default").to_numpy()
    for column in ("SEX", "EDUCATION", "MARRIAGE"):
        table[column] = table[column].astype(str)
    return _split("credit-default", table, y, "binary")


def kdd() -> Problem:
    table = _read("kddcup.data_10_percent.gz", header=None).sample(70_000, random_state=0)
    y = (table.pop(41) == "normal.").to_numpy() * 1
    table.columns = [f"f{c}" for c in table.columns]
    return _split("kdd", table, y, "binary")


def wisconsin() -> Problem:
    table = _read("breast-cancer-wisconsin-699.csv.gz").dropna()
    y = (table.pop("class") == "malignant").to_numpy() * 1
    return _split("wisconsin", table[[f"V{i}" for i in range(1, 10)]], y, "binary")


def fraud() -> Problem:
    table = _read("creditcard-fraud-balanced984.csv.gz")
    return _split("fraud-984", table, table.pop("Class").to_numpy(), "binary")


def _libsvm(name: str) -> Problem:
    os.environ.setdefault("QUIETGRAD_DATA", str(_folder()))
    from quietgrad.data import load

    data = load(name)
    assert data.X_test is not None
    assert data.y_test is not None
    bounds = [(0.0, 1.0) if name == "a9a" else (-1.0, 1.0)] * data.X.shape[1]
    return Problem(name, data.X.tocsr(), data.y.astype(int), data.X_test.tocsr(), data.y_test.astype(int),
                   "binary", bounds)  # fmt: skip


def mnist() -> Problem:
    os.environ.setdefault("QUIETGRAD_DATA", str(_folder()))
    from quietgrad.data import load

    data = load("mnist")
    X, T = (np.asarray(part).reshape(len(part), -1) for part in (data.X, data.X_test))
    return Problem("mnist", X, data.y.astype(int), T, np.asarray(data.y_test).astype(int), "multiclass",
                   [(0.0, float(X.max()))] * 784)  # fmt: skip


def _sklearn(name: str, task: str) -> Problem:
    import pandas as pd
    from sklearn import datasets

    raw = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    return _split(
        name.replace("_", "-"), pd.DataFrame(raw.data, columns=map(str, raw.feature_names)), raw.target, task
    )


def wine_quality() -> Problem:
    import pandas as pd

    table = pd.concat([_read(f"winequality-{c}.csv.gz", sep=";") for c in ("red", "white")], ignore_index=True)
    return _split("wine-quality", table, table.pop("quality").to_numpy(float), "regression")


def bike() -> Problem:
    table = _read("bike-hour.csv.gz").drop(columns=["instant", "dteday", "casual", "registered"])
    y = table.pop("cnt").to_numpy(float)
    for column in ("season", "mnth", "hr", "weekday", "weathersit"):
        table[column] = table[column].astype(str)
    return _split("bike", table, y, "regression")


# --- adversities ------------------------------------------------------------------------------------------------


def _synthetic(name: str, X: Any, y: Any, task: str = "binary") -> Problem:
    cut = X.shape[0] * 4 // 5
    limits = [outward(c) for c in X.T] if isinstance(X, np.ndarray) else None
    return Problem(name, X[:cut], y[:cut], X[cut:], y[cut:], task, limits, tuple(range(X.shape[1])))


def _labels(rng: Any, scores: Any) -> Any:
    return (rng.random(len(scores)) < 1.0 / (1.0 + np.exp(-scores))).astype(int)


def scales(seed: int = 1) -> Problem:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((25_000, 20))
    y = _labels(rng, 1.2 * X @ rng.standard_normal(20) * 0.8)
    X[:, 0] += 5.0
    return _synthetic("ten-orders", X * np.logspace(-5, 5, 20), y)


def million(seed: int = 2) -> Problem:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((25_000, 10))
    y = _labels(rng, 2.0 * X @ rng.standard_normal(10))
    return _synthetic("one-million-column", np.column_stack([X, rng.uniform(0, 1e6, len(X))]), y)


def collinear(seed: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    Z = rng.standard_normal((25_000, 6))
    X = Z @ rng.standard_normal((6, 30)) + 0.01 * rng.standard_normal((25_000, 30))
    return _synthetic("collinear", X * 40.0 + 2000.0, _labels(rng, 2.0 * Z @ rng.standard_normal(6)))


def one_hot(seed: int = 4) -> Problem:
    import pandas as pd

    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, 501) ** 0.8
    codes = rng.choice(500, 25_000, p=weights / weights.sum())
    X = sparse.csr_matrix((np.ones(25_000), codes, np.arange(25_001)), shape=(25_000, 500))
    effect = 1.6 * rng.standard_normal(500)
    problem = _synthetic("one-hot-500", X, _labels(rng, effect[codes]))
    column = pd.DataFrame({"code": pd.Categorical(codes.astype(str), categories=[str(v) for v in range(500)])})
    return replace(
        problem, bounds=[(0.0, 1.0)] * 500, numeric=(), frame=(column.iloc[:20_000], column.iloc[20_000:])
    )


def rare(seed: int = 5) -> Problem:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((50_000, 15))
    return _synthetic("half-percent", X, _labels(rng, 0.5 * X @ rng.standard_normal(15) - 6.7))


def tiny(seed: int = 6) -> Problem:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((375, 8)) * np.array([1, 10, 0.1, 1, 1, 100, 1, 1]) + np.array(
        [0, 50, 0, 0, 0, 0, 3, 0]
    )
    return _synthetic("three-hundred", X, _labels(rng, 3.0 * (X[:, 0] - X[:, 3]) + X[:, 5] / 100.0))


def text(seed: int = 8) -> Problem:
    rng = np.random.default_rng(seed)
    n, d, length = 12_500, 20_000, 60
    weights = 1.0 / np.arange(1, d + 1)
    words = rng.choice(d, (n, length), p=weights / weights.sum())
    tone = np.where(rng.random(d) < 0.2, rng.standard_normal(d), 0.0)
    scores = tone[words].sum(axis=1)
    y = _labels(rng, 0.9 * (scores - scores.mean()))
    X = sparse.csr_matrix((np.ones(n * length), words.ravel(), np.arange(0, n * length + 1, length)), shape=(n, d))
    X.sum_duplicates()
    return _synthetic("zipf-text", X, y)


def raw_regression(seed: int = 9) -> Problem:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((25_000, 12))
    y = 5e4 + 1e4 * (X @ rng.standard_normal(12)) + 2e4 * rng.standard_normal(25_000)
    return _synthetic("raw-regression", X * np.logspace(-3, 4, 12) + 3.0 * np.logspace(-3, 4, 12), y, "regression")


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "adult": adult,
    "a9a": lambda: _libsvm("a9a"),
    "ijcnn1": lambda: _libsvm("ijcnn1"),
    "bank": bank,
    "bank-additional": bank_additional,
    "credit-default": credit,
    "kdd": kdd,
    "breast-cancer": lambda: _sklearn("breast_cancer", "binary"),
    "wisconsin": wisconsin,
    "fraud-984": fraud,
    "digits": lambda: _sklearn("digits", "multiclass"),
    "wine": lambda: _sklearn("wine", "multiclass"),
    "mnist": mnist,
    "ten-orders": scales,
    "one-million-column": million,
    "collinear": collinear,
    "one-hot-500": one_hot,
    "half-percent": rare,
    "three-hundred": tiny,
    "zipf-text": text,
    "wine-quality": wine_quality,
    "bike": bike,
    "diabetes": lambda: _sklearn("diabetes", "regression"),
    "raw-regression": raw_regression,
}
