"""Dates and durations as features: days for every model and every kind of frame, whatever their unit is."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from quietgrad.core.errors import DataError
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateHuberRegressor,
    PrivateLogisticRegression,
    describe,
)
from quietgrad.estimators.dates import bounds_in_days, dates_as_days, days_since_1970

N = 3000
SECONDS = np.random.default_rng(0).integers(0, 1000 * 86_400, N)
WHEN = (np.datetime64("2020-01-01T00:00:00", "s") + SECONDS).astype("datetime64[us]")
LATE = (SECONDS > 500 * 86_400) * 1
GROUP = np.random.default_rng(1).choice(["x", "y"], N)
BOUNDS = {"when": ("2020-01-01", "2022-12-31")}


def frame(unit: str, *, category: bool) -> Any:
    columns: dict[str, Any] = {"when": pd.Series(WHEN.astype(f"datetime64[{unit}]"))}
    columns["group"] = pd.Categorical(GROUP, ["x", "y"]) if category else GROUP == "x"
    return pd.DataFrame(columns)


@pytest.mark.filterwarnings("ignore:.*seeded noise", "ignore:.*taken as public")
@pytest.mark.parametrize("category", [True, False])
@pytest.mark.parametrize("kind", [PrivateAdditiveClassifier, PrivateAdditiveRegressor, PrivateLogisticRegression])
def test_the_unit_of_time_moves_no_prediction(kind: Any, category: bool) -> None:
    """With a category beside them dates were raw integers: probabilities moved by .92 with the unit."""
    if category and kind is PrivateLogisticRegression:
        pytest.skip("linear models take no categories")
    asked: dict[str, Any] = {"epsilon": 4.0, "relation": "replace-one", "random_state": 1, "feature_bounds": BOUNDS}
    asked |= {"target_bounds": (0, 1)} if kind is PrivateAdditiveRegressor else {"classes": [0, 1]}
    answers = []
    for unit in ("ns", "us", "ms", "s"):
        model = kind(**asked).fit(frame(unit, category=category), LATE)
        answers.append(getattr(model, "predict_proba", model.predict)(frame("s", category=category)))
    assert all(np.array_equal(answers[0], other) for other in answers[1:])
    said = answers[0] if answers[0].ndim == 1 else answers[0][:, 1]
    assert float(np.mean((said > 0.5) == LATE)) > 0.95


def test_days_are_the_same_in_every_kind_of_column() -> None:
    days = days_since_1970(WHEN)
    assert days[0] == pytest.approx(18262.0 + SECONDS[0] / 86_400.0)
    columns: list[Any] = [
        pd.Series(WHEN), pd.Series(WHEN).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"), pl.Series(WHEN),
        WHEN.astype("datetime64[ns]"), pl.Series(WHEN).cast(pl.Datetime("ns")),
    ]  # fmt: skip
    for column in columns:
        assert np.array_equal(days_since_1970(column), days)
    for unit in ("s", "ms", "us", "ns"):
        spans = SECONDS.astype("timedelta64[s]").astype(f"timedelta64[{unit}]")
        assert np.allclose(days_since_1970(spans), SECONDS / 86_400.0, rtol=1e-15)


def test_frames_keep_their_names_and_their_other_columns() -> None:
    for table in (frame("ns", category=False), pl.DataFrame({"when": WHEN, "group": GROUP == "x"})):
        turned = dates_as_days(table)
        assert list(turned.columns) == ["when", "group"]
        assert np.array_equal(np.asarray(turned["when"]), days_since_1970(WHEN))
        assert "when" in table.columns  # what was given is not changed
        assert str(table["when"].dtype).lower().startswith("datetime")


def test_bounds_may_be_dates_of_any_kind() -> None:
    first, last = "2020-01-01", "2022-12-31"
    pairs: list[Any] = [
        (first, last), (date.fromisoformat(first), date.fromisoformat(last)),
        [np.datetime64(first), pd.Timestamp(last)], [np.datetime64(first, "ns"), np.datetime64(last, "s")],
    ]  # fmt: skip
    assert {bounds_in_days(pair) for pair in pairs} == {(18262.0, 19357.0)}
    assert bounds_in_days(("0", "1")) == ("0", "1")


def test_a_gap_among_dates_is_refused_as_any_gap() -> None:
    table = frame("ns", category=True)
    table.loc[5, "when"] = pd.NaT
    with pytest.raises(DataError, match="NaN or infinite"):
        PrivateAdditiveClassifier(classes=[0, 1], categories={"group": ["x", "y"]}).fit(table, LATE)


def test_polars_dates_are_fitted_by_linear_models() -> None:
    table = pl.DataFrame({"when": WHEN, "day": pl.Series(WHEN).cast(pl.Date), "b": (GROUP == "x") * 1.0})
    bounds = {"when": BOUNDS["when"], "day": BOUNDS["when"], "b": (0, 1)}
    model = PrivateLogisticRegression(epsilon=4.0, classes=[0, 1], feature_bounds=bounds, relation="replace-one")
    assert model.fit(table, LATE).score(table, LATE) > 0.95
    line = PrivateHuberRegressor(
        epsilon=4.0, target_bounds=(0, 1000), feature_bounds=bounds, relation="replace-one"
    )
    assert line.fit(table, SECONDS / 86_400.0).score(table, SECONDS / 86_400.0) > 0.9


def test_a_description_counts_the_same_days() -> None:
    schema = {"when": {"kind": "date", "bounds": ["2020-01-01", "2022-12-31"]}}
    told = describe(frame("s", category=False)[["when"]], schema, epsilon=8.0, relation="replace-one").table
    assert told.loc["when", "mean"] == pytest.approx(days_since_1970(WHEN).mean(), abs=30.0)
