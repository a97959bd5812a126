"""Three tables as an analyst brings them, worked through as the page on estimators says."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.pipeline import make_pipeline

from quietgrad.errors import DataError, TooNoisyWarning
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateLogisticRegression,
    PublicOneHot,
    private_score,
)

WORDS = {"smoker": ["yes", "no"], "city": ["Berlin", "Hamburg", "other"]}
BOUNDS = {"age": (18, 100), "income": (0, 200_000), "year": (1980, 2025), "pressure": (60, 200)}


def patients(path: Path) -> pd.DataFrame:
    """800 rows of a raw file: amounts, years, categories, gaps."""
    rng = np.random.default_rng(0)
    n = 800
    table = pd.DataFrame({"age": rng.integers(18, 95, n), "income": np.exp(rng.normal(10, 1, n)).round()})
    table["year"], table["pressure"] = rng.integers(1990, 2024, n), rng.normal(120, 15, n)
    table["smoker"] = np.array(["yes", "no", None], dtype=object)[rng.choice(3, n, p=[0.3, 0.6, 0.1])]
    table["city"] = rng.choice(["Berlin", "Hamburg", "other"], n)
    score = (table.age - 55) / 15 + (table.pressure - 120) / 15 + 1.5 * (table.smoker == "yes")
    table["sick"] = np.where(score + rng.logistic(size=n) > 0.5, "yes", "no")
    table.loc[rng.random(n) < 0.08, "income"] = np.nan
    table.to_csv(path, index=False)
    return pd.read_csv(path)


def test_a_raw_file_of_800_rows(tmp_path: Path) -> None:
    table = patients(tmp_path / "patients.csv")
    y = table.pop("sick").to_numpy()
    settings: dict[str, Any] = {"epsilon": 2.0, "classes": ["no", "yes"]}
    with pytest.raises(DataError, match="'smoker'"):
        PrivateLogisticRegression(**settings).fit(table, y)
    with pytest.raises(DataError, match="public constant"):
        PrivateAdditiveClassifier(**settings, categories=WORDS).fit(table, y)
    table = table.assign(known=table.income.notna(), income=table.income.fillna(0.0))
    majority = max(np.mean(y == "yes"), np.mean(y == "no"))
    shaped = PrivateAdditiveClassifier(**settings, categories=WORDS, feature_bounds=BOUNDS).fit(
        table[:600], y[:600]
    )
    assert shaped.score(table[600:], y[600:]) > majority + 0.1
    hot = PublicOneHot(WORDS).set_output(transform="pandas")
    linear = make_pipeline(hot, PrivateLogisticRegression(**settings, feature_bounds=BOUNDS))
    assert linear.fit(table[:600], y[:600]).score(table[600:], y[600:]) > majority + 0.1
    # Nothing is found at this ε: in 300 of 300 fits.
    with pytest.warns(TooNoisyWarning, match="declare what is public"):
        PrivateAdditiveClassifier(**{**settings, "epsilon": 0.02}, categories=WORDS).fit(table, y)
    assert "accuracy" in str(private_score(shaped, table[600:], y[600:], epsilon=1.0))


def test_thirty_thousand_rows_of_sixty_columns_far_from_zero() -> None:
    """Scales over six orders, a third of the columns around 50 or 2000 with spreads from a hundredth on."""
    rng = np.random.default_rng(1)
    n, d = 30_000, 60
    Z = rng.standard_normal((n, d))
    X = pd.DataFrame(Z * np.logspace(-2, 4, d) + rng.choice([0, 0, 50, 2000], d))
    X = X.set_axis([f"v{j}" for j in range(d)], axis=1)
    scores = Z @ np.where(rng.random(d) < 0.3, rng.standard_normal(d), 0.0)
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-scores))).astype(int)
    best = float(np.mean((scores > 0) == y))
    model = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(X[:24_000], y[:24_000])
    assert model.score(X[24_000:], y[24_000:]) > best - 0.04  # a single look at offsets leaves 0.12


def test_text_with_a_public_vocabulary() -> None:
    """Paragraphs of two libraries' documentation, hashed: which of the two is it?"""
    import numpy.linalg
    import scipy.signal
    import scipy.stats

    parts: dict[str, int] = {}
    for label, modules in enumerate(((np, numpy.linalg, np.ma), (scipy.stats, scipy.signal))):
        for member in (getattr(module, name) for module in modules for name in dir(module)):
            for part in (inspect.getdoc(member) or "").split("\n\n"):
                if len(part) > 60:
                    parts[part] = label
    order = np.random.default_rng(2).permutation(len(parts))
    texts, y = np.array(list(parts), dtype=object)[order], np.array(list(parts.values()))[order]
    X = HashingVectorizer(n_features=2**14, alternate_sign=False).transform(texts)
    cut = len(y) * 4 // 5
    model = PrivateLogisticRegression(epsilon=3.0, classes=[0, 1], row_bound=1.0).fit(X[:cut], y[:cut])
    assert model.score(X[cut:], y[cut:]) > max(y[cut:].mean(), 1 - y[cut:].mean()) + 0.1
