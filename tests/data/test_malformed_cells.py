"""Cells that would reach beyond their record, and gaps that are numbers in every kind of file."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from quietgrad.core.errors import DataError
from quietgrad.data import scan
from quietgrad.data.columns import Categorical, first_date
from quietgrad.data.schema import read_schema
from quietgrad.data.tables import parse_csv
from quietgrad.estimators.raw_frames import encode_raw_frame

SCHEMA = {
    "label": {"column": "l", "classes": ["no", "yes"]},
    "columns": {"a": {"kind": "number", "bounds": [0, 9]}},
}
ROWS = ["4,no", "5,yes", '6,"no"', "7,yes", '8,"yes"']


def dense(rows: Any) -> npt.NDArray[np.float64]:
    return np.asarray(rows, dtype=np.float64)


def _file(changed: str) -> bytes:
    return "\n".join(["a,l", *ROWS[:1], changed, *ROWS[1:], ""]).encode()


@pytest.mark.parametrize("cell", ['4,"no', '"4,no', '4,"no"x', '4, "no', '4,"no""'])
def test_a_quote_that_does_not_end_removes_no_other_record(cell: str, tmp_path: Path) -> None:
    schema = read_schema(SCHEMA)
    with pytest.raises(DataError, match="quoted cell has no closing quote, or text behind it") as refused:
        parse_csv(_file(cell), schema)
    assert "no privacy budget" in str(refused.value).lower()
    path = tmp_path / "rows.csv"
    path.write_bytes(_file(cell))
    with pytest.raises(DataError, match="quoted cell"):
        list(scan(path, schema=schema).blocks())


@pytest.mark.parametrize("cell", ['4,"no"', '"4","no"', '4, "no" ', "4,no", '4,"n""o"', '4,"n\no"', '4,n"o'])
def test_quotes_that_end_are_read(cell: str) -> None:
    assert len(parse_csv(_file(cell), read_schema(SCHEMA)).X) == 6


def test_a_gap_that_is_a_number_is_one_in_a_frame_too() -> None:
    columns = {"dose": {"kind": "number", "bounds": [0, 60], "missing": "indicator"}}
    schema = read_schema({"missing": ["", "999"], "columns": columns, "label": SCHEMA["label"]})
    frame = pd.DataFrame({"dose": [1.0, 999.0, np.nan], "l": ["no", "yes", "no"]})
    encoded = encode_raw_frame(frame, schema)
    text = parse_csv(b"dose,l\n1,no\n999,yes\n,no\n", schema)
    np.testing.assert_allclose(dense(encoded), dense(text.X))
    np.testing.assert_array_equal(dense(text.X)[:, -1], [0.0, 1.0, 1.0])


def test_a_raw_frame_of_numbers_alone_is_encoded() -> None:
    """Features are then named like the columns."""
    schema = read_schema({"columns": {"age": {"kind": "number", "bounds": [0, 120]}}, "label": SCHEMA["label"]})
    encoded = encode_raw_frame(pd.DataFrame({"age": [60.0], "l": ["no"]}), schema)
    np.testing.assert_allclose(dense(encoded), dense(parse_csv(b"age,l\n60,no\n", schema).X))


@pytest.mark.parametrize(
    ("cell", "form"),
    [
        ("05-OCT-2020", "%d-%b-%Y"),
        ("05 Oct 2020", "%d %b %Y"),
        ("05 Oct 2020 12:30", "%d %b %Y"),
        ("05.10.2020T08:00", "%d.%m.%Y"),
    ],
)
def test_dates_are_read_by_their_form(cell: str, form: str) -> None:
    assert first_date(cell, (form,)) == date(2020, 10, 5)


def test_codes_that_a_frame_holds_as_floats_are_their_words() -> None:
    kind = Categorical(("1", "2"), indicator=True)
    floats = kind.encode("c", np.array([1.0, 2.0, np.nan, 2.5]))
    assert floats.tolist() == kind.encode("c", ["1", "2", "", "x"]).tolist()


def test_a_column_of_dates_is_read_under_any_form_of_texts() -> None:
    columns = {"d": {"kind": "date", "format": "%d.%m.%Y", "bounds": ["2020-01-01", "2020-12-31"]}}
    schema = read_schema({"columns": columns, "label": SCHEMA["label"]})
    frame = pd.DataFrame({"d": pd.to_datetime(["2020-10-05"]), "l": ["no"]})
    text = parse_csv(b"d,l\n05.10.2020,no\n", schema)
    np.testing.assert_allclose(dense(encode_raw_frame(frame, schema)), dense(text.X))
