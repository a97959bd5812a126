"""A private description of a table: what it says, how sure it is, what it costs, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.errors import DataError, DeclaredWarning
from quietgrad.estimators import describe
from quietgrad.estimators.described_columns import read_columns

SCHEMA: dict[str, Any] = {
    "age": {"kind": "integer", "bounds": [0, 120]},
    "income": {"kind": "number", "bounds": [0, 1e7], "missing": "indicator"},
    "sex": {"kind": "category", "categories": ["f", "m"]},
    "smoker": {"kind": "bool"},
    "visit": {"kind": "date", "bounds": ["2019-01-01", "2024-01-01"]},
    "name": {"kind": "text"},
}


def people(n: int = 20_000) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 90, n),
            "income": np.exp(rng.normal(10.0, 1.0, n)),
            "sex": rng.choice(["f", "m"], n),
            "smoker": rng.random(n) < 0.3,
            "visit": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), "D"),
            "name": "nobody",
        }
    )
    frame.loc[rng.random(n) < 0.1, "income"] = np.nan
    return frame


def test_numbers_are_right_within_their_errors() -> None:
    frame = people()
    told = describe(frame, SCHEMA, epsilon=1.0)
    table = told.table
    assert list(table.index) == ["age", "income", "sex", "smoker", "visit"]
    # Each is off by more than five of its errors with probability below 10⁻⁵, were the noise alone to blame.
    for name in ("age", "income"):
        row = table.loc[name]
        assert abs(row["count"] - frame[name].notna().sum()) < 5.0 * row["count_error"]
        assert abs(row["mean"] - frame[name].mean()) < 5.0 * row["mean_error"] + 0.02 * frame[name].mean()
        for q in (5, 25, 50, 75, 95):
            assert abs(row[f"q{q:02d}"] - frame[name].quantile(q / 100)) < 5.0 * row[f"q{q:02d}_error"]
    assert (
        abs(table.loc["income", "missing"] - frame.income.isna().sum()) < 5.0 * table.loc["income", "count_error"]
    )
    for cell in told.histograms["sex"][:2]:
        assert abs(cell["count"] - (frame.sex == cell["cell"]).sum()) < 5.0 * cell["error"]
    both = [c for c in told.pairs["sex", "smoker"] if (c["sex"], c["smoker"]) == ("f", "True")]
    assert abs(both[0]["count"] - ((frame.sex == "f") & frame.smoker).sum()) < 5.0 * both[0]["error"]
    assert json.loads(json.dumps(told.to_json()))["columns"][0]["column"] == "age"
    assert len(told.plot(["age", "sex"]).axes) == 2


def test_one_budget_pays_for_all_of_it(tmp_path: Path) -> None:
    told = describe(people(4000), SCHEMA, epsilon=0.5, ledger=tmp_path / "ledger.jsonl", account="people")
    assert told.privacy.epsilon is not None
    assert 0.49 < told.privacy.epsilon <= 0.5
    book = qg.Ledger(tmp_path / "ledger.jsonl")
    assert book.spent("people", delta=1e-6, relation="add-remove").epsilon == pytest.approx(0.5, abs=0.02)
    assert {"histograms", "sums", "pairs"} <= set(told.privacy.releases)


def test_ranges_are_found_where_they_are_not_declared() -> None:
    frame = people()[["age"]].assign(pressure=np.random.default_rng(1).normal(1013.0, 5.0, 20_000))
    told = describe(frame, epsilon=1.0)
    assert told.table.loc["pressure", "q50"] == pytest.approx(1013.0, abs=3.0)
    assert told.table.loc["age", "q50"] == pytest.approx(53.5, abs=4.0)


def test_people_of_several_records_are_promised_to() -> None:
    frame = people(6000).assign(who=np.arange(6000) // 3)
    told = describe(frame, {k: SCHEMA[k] for k in ("age", "sex")}, epsilon=2.0, person="who")
    assert str(told.privacy.unit) == "person"
    assert told.n == pytest.approx(2000.0, abs=300.0)


def test_refusals_come_before_anything_is_spent(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    frame = people(500)
    with pytest.raises(DataError, match="categories"):
        describe(frame, {"sex": {"kind": "category"}}, ledger=ledger)
    with pytest.raises(DataError, match="weight"):
        describe(frame, {"weight": {"kind": "number"}}, ledger=ledger)
    with pytest.raises(DataError, match="text"):
        describe(frame.drop(columns="income"), ledger=ledger)
    with pytest.raises(ValueError, match="height"):
        describe(frame, SCHEMA, pairs=[("age", "height")], ledger=ledger)
    assert not ledger.exists()
    with pytest.warns(DeclaredWarning):
        describe(frame[["sex"]].astype("category"), epsilon=4.0)


@pytest.mark.parametrize("cell", [None, np.nan, np.inf, "n/a", [1, 2]])
def test_a_cell_that_is_no_number_is_a_gap(cell: Any) -> None:
    """One such cell was a refusal, which told that a record has it."""
    values = np.append(np.random.default_rng(0).uniform(0.0, 10.0, 2000).astype(object), [None] * 500)
    for k in range(2000, 2500):
        values[k] = cell
    frame = {"x": values, "when": np.array(["2020-01-02"] * 2000 + ["soon"] * 500, dtype=object)}
    schema = {
        "x": {"kind": "number", "bounds": [0, 10]},
        "when": {"kind": "date", "bounds": ["2020-01-01", "2020-02-01"]},
    }
    told = describe(frame, schema, epsilon=8.0, relation="replace-one").table
    assert told.loc["x", "missing"] == pytest.approx(500.0, abs=50.0)
    assert told.loc["x", "mean"] == pytest.approx(5.0, abs=0.3)
    assert told.loc["when", "missing"] == pytest.approx(500.0, abs=50.0)


@pytest.mark.parametrize("more", ["2020-01-01", "x", None, 7.5])
def test_no_cell_of_a_list_changes_what_the_others_are_worth(more: Any) -> None:
    """numpy makes texts of [5, 6, "2020-01-01"], and years of these: every record would move with one."""
    schema = {"when": {"kind": "date"}, "size": {"kind": "number"}}
    alone = read_columns({"when": [5, 6], "size": [True, 2]}, schema)[1]
    joined = read_columns({"when": [5, 6, more], "size": [True, 2, more]}, schema)[1]
    assert np.array_equal(joined[:2], alone)


def test_a_cell_causes_no_warning() -> None:
    """Warnings are errors here: that of numpy about a time zone would tell of the record that has one."""
    there = pd.Timestamp("2020-01-01 05:00", tz="Asia/Tokyo")
    numbers = read_columns({"when": ["2020-01-01", there, "x"]}, {"when": {"kind": "date"}})[1]
    assert np.isfinite(numbers[:2]).all()
    assert np.isnan(numbers[2, 0])


@pytest.mark.parametrize("cells", [[1, 2], [1, 2.5], [1, "x"]])
def test_a_list_has_no_type_that_one_cell_could_decide(cells: list[Any]) -> None:
    with pytest.raises(DataError, match="is a list: declare its kind"):
        describe({"a": cells})


def test_the_command_writes_a_page_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain install has no matplotlib; the page has each column, its errors, a drawing, and fetches nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    ages = np.random.default_rng(0).integers(18, 90, 2000)
    rows = "\n".join(f"{age},{'yes' if age > 50 else 'no'}" for age in ages)
    Path("people.csv").write_text(f"age,ill\n{rows}\n")
    Path("schema.toml").write_text(
        '[label]\ncolumn = "ill"\nkind = "yes/no"\n[columns."age"]\nkind = "number"\nbounds = [0, 120]\n'
    )
    assert main(["describe", "people.csv", "--schema", "schema.toml", "--epsilon", "2", "-o", "page.html"]) == 0
    capsys.readouterr()
    page, told = Path("page.html").read_text(), json.loads(Path("page.json").read_text())
    age = next(row for row in told["columns"] if row["column"] == "age")
    assert f"<dd>{age['mean']:.4g} ± {age['mean_error']:.2g}</dd>" in page
    assert page.count("<h2>") == page.count("<svg") == 2
    assert re.findall(r"<(title|h1)>(people\.csv)", page) == [("title", "people.csv"), ("h1", "people.csv")]
    assert 'name="viewport"' in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)


@pytest.mark.parametrize("schema", [None, {"x": {"kind": "integer", "bounds": [0, 50]}}], ids=["types", "schema"])
def test_the_first_gap_changes_no_cell(schema: Any) -> None:
    """It makes a column of whole numbers one of floats: what is released must not depend on the type."""
    whole = np.random.default_rng(0).integers(0, 50, 2000)
    gap = np.where(np.arange(2000) == 7, np.nan, whole)
    told = [describe(pd.DataFrame({"x": x}), schema, epsilon=1.0) for x in (whole, gap)]
    kinds = [one.rows[0]["kind"] for one in told]
    assert kinds[0] == kinds[1]
    assert [cells["cell"] for one in told for cells in one.histograms["x"]].count("missing") == 2


def test_types_that_hold_gaps_stay_whole() -> None:
    frame = pd.DataFrame({"x": pd.array([1, 2, None] * 500, dtype="Int64")})
    assert describe(frame, epsilon=1.0).rows[0]["kind"] == "integer"
    table = pa.table({"x": pa.array([1, 2, None] * 500), "b": pa.array([True, None, False] * 500)})
    told = describe(table, epsilon=1.0)
    assert [row["kind"] for row in told.rows] == ["integer", "bool"]
    assert [cell["cell"] for cell in told.histograms["b"]] == ["False", "True", "other"]


@pytest.mark.parametrize("by", [None, "g"])
def test_a_secret_number_of_records_may_be_zero(by: Any) -> None:
    """Under add-remove a table without records and one with a single record are neighbours: both are answered."""
    schema = {"x": {"kind": "number", "bounds": [0, 1]}, "g": {"kind": "category", "categories": ["a", "b"]}}
    frame = {"x": np.zeros(0), "g": np.zeros(0, dtype=object)}
    told = describe(frame, schema, by=by, epsilon=1.0)
    assert told.privacy.epsilon == pytest.approx(1.0, rel=0.01)
    with pytest.raises(DataError, match="no records"):
        describe(frame, schema, by=by, epsilon=1.0, relation="replace-one")


def test_a_gap_in_a_column_without_gaps_tells_nothing() -> None:
    schema = {name: {"kind": "number", "bounds": [0, 1], "missing": False} for name in ("x", "z")}
    column = np.where(np.arange(3000) % 3 == 0, np.nan, 0.99)
    told = describe({"x": column, "z": np.full(3000, 0.99)}, schema, epsilon=50.0, pairs=())
    assert told.histograms["x"][0]["count"] == pytest.approx(1000, abs=30)
    assert told.histograms["z"][0]["count"] == pytest.approx(0, abs=30)


def test_what_noise_drowns_is_unknown_and_counts_are_possible() -> None:
    """Twenty records at a tiny ε: every number would be noise."""
    frame = {"age": np.linspace(20.0, 60.0, 20), "sex": np.array(["f", "m"] * 10, dtype=object)}
    public = {"age": {"kind": "number", "bounds": [0, 100]}, "sex": {"kind": "category", "categories": ["f", "m"]}}
    unknown = 0
    for _ in range(12):
        told = describe(frame, public, epsilon=0.01, delta=1e-6)
        n = max(told.n, 0.0)
        for row in told.rows:
            assert 0.0 <= row["count"] <= n
            assert 0.0 <= row["missing"] <= n
        age, sex = told.rows
        unknown += (age["mean"] is None) + (sex["most_frequent"] is None)
        assert age["mean"] is None or age["mean_error"] < 100.0
    assert unknown >= 12  # of 24; noise has four times the deviation that would tell 20 records


def test_columns_of_one_name_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.zeros((50, 2)), columns=["a", "a"])
    with pytest.raises(DataError, match="two columns have the same name"):
        describe(frame, {"a": {"kind": "number", "bounds": [0, 1]}}, epsilon=1.0)
