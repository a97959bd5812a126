"""Schemas drafted from files: the same draft of a text, a parquet file and a spreadsheet, and no column lost."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
import zipfile
from datetime import date
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.data import load
from quietgrad.data.columns import GAP_WORDS, MISSING, NotNumericError, to_numbers
from quietgrad.data.drafting import draft_schema
from quietgrad.data.id_columns import is_called_people
from quietgrad.data.schema import read_schema

HEADER = ("age", "pay", "member", "joined", "town", "ill")
ROWS: list[tuple[Any, ...]] = [
    (20 + k % 60, 1000.5 + 13 * k, k % 3 == 0, date(2020, 1 + k % 12, 1 + k % 28), ("Ulm", "Bonn")[k % 2], k % 2)
    for k in range(40)
]
KINDS = {"age": "whole number", "pay": "number", "member": "yes/no", "joined": "date", "town": "category",
         "ill": "yes/no"}  # fmt: skip


def write_csv(path: Path, rows: list[tuple[Any, ...]], header: tuple[str, ...] = HEADER) -> Path:
    lines = [",".join(header), *(",".join("" if c is None else str(c) for c in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_xlsx(path: Path, sheets: list[list[tuple[Any, ...]]]) -> Path:
    """A workbook as a spreadsheet writes it: numbers and dates as numbers, words in place."""

    def cell(value: Any) -> str:
        if value is None:
            return "<c/>"
        if isinstance(value, bool):
            return f'<c t="b"><v>{int(value)}</v></c>'
        if isinstance(value, date):
            return f'<c s="1"><v>{(value - date(1899, 12, 30)).days}</v></c>'
        if isinstance(value, int | float):
            return f"<c><v>{value}</v></c>"
        return f'<c t="inlineStr"><is><t>{escape(value)}</t></is></c>'

    main_ns = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    numbers = range(1, len(sheets) + 1)
    kinds = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    with zipfile.ZipFile(path, "w") as book:
        book.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
            'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/xl/workbook.xml" ContentType="{kinds}.sheet.main+xml"/>'
            f'<Override PartName="/xl/styles.xml" ContentType="{kinds}.styles+xml"/>'
            + "".join(
                f'<Override PartName="/xl/worksheets/sheet{k}.xml" ContentType="{kinds}.worksheet+xml"/>'
                for k in numbers
            )
            + "</Types>",
        )
        book.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" Type="{office}/officeDocument" '
            'Target="xl/workbook.xml"/></Relationships>',
        )
        book.writestr(
            "xl/workbook.xml",
            f'<workbook {main_ns} xmlns:r="{office}"><sheets>'
            + "".join(f'<sheet name="S{k}" sheetId="{k}" r:id="r{k}"/>' for k in numbers)
            + "</sheets></workbook>",
        )
        book.writestr(
            "xl/_rels/workbook.xml.rels",
            f'<Relationships xmlns="{package}/relationships">'
            + "".join(
                f'<Relationship Id="r{k}" Type="{office}/worksheet" Target="worksheets/sheet{k}.xml"/>'
                for k in numbers
            )
            + f'<Relationship Id="r0" Type="{office}/styles" Target="styles.xml"/></Relationships>',
        )
        book.writestr(
            "xl/styles.xml",
            f'<styleSheet {main_ns}><cellXfs><xf numFmtId="0"/><xf numFmtId="14" applyNumberFormat="1"/></cellXfs>'
            "</styleSheet>",
        )
        for k, rows in zip(numbers, sheets, strict=True):
            lines = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
            book.writestr(
                f"xl/worksheets/sheet{k}.xml",
                f"<worksheet {main_ns}><sheetData>{lines}</sheetData></worksheet>",
            )
    return path


def as_file(folder: Path, kind: str, rows: list[tuple[Any, ...]]) -> Path:
    if kind == "xlsx":
        pytest.importorskip("python_calamine")
        return write_xlsx(folder / "people.xlsx", [[HEADER, *rows]])
    if kind == "csv":
        return write_csv(folder / "people.csv", rows)
    columns = {name: [row[k] for row in rows] for k, name in enumerate(HEADER)}
    pq.write_table(pa.table(columns), folder / "people.parquet")
    return folder / "people.parquet"


def filled_in(draft: str) -> str:
    """The draft with what is public of these people."""
    bounds = {"age": "[0, 100]", "pay": "[0, 5000]", "joined": '["2020-01-01", "2021-01-01"]'}
    for column, pair in bounds.items():
        head, mark, tail = draft.partition(f'[columns."{column}"]')
        draft = head + mark + tail.replace("bounds = []", f"bounds = {pair}", 1)
    return draft.replace("categories = []", 'categories = ["Ulm", "Bonn"]')


@pytest.mark.parametrize("kind", ["csv", "parquet", "xlsx"])
def test_a_draft_is_the_same_for_every_kind_of_file_and_train_reads_it(tmp_path: Path, kind: str) -> None:
    path = as_file(tmp_path, kind, ROWS)
    draft = draft_schema(path)
    assert {column.name: column.kind for column in draft.columns} == KINDS
    assert draft.problems == ()
    assert ("delimiter" in draft.to_toml()) == (kind != "parquet")
    schema = tmp_path / "schema.toml"
    schema.write_text(filled_in(draft.to_toml()))
    data = load(path, schema=schema)
    assert data.feature_names is not None
    features = np.asarray(data.X)
    assert np.allclose(features[:, 0], [row[0] / 100 for row in ROWS])
    assert np.allclose(features[:, 2], [row[2] for row in ROWS])
    days = [(row[3] - date(2020, 1, 1)).days / 366 for row in ROWS]
    assert np.allclose(features[:, data.feature_names.index("joined days")], days)
    assert data.y.tolist() == [row[5] for row in ROWS]


@pytest.mark.parametrize("kind", ["csv", "parquet", "xlsx"])
@pytest.mark.parametrize("gap", ["n/a", "-", ".", "NULL", "none", "?", None])
def test_a_word_for_a_gap_is_a_gap_for_the_draft_and_for_train(tmp_path: Path, kind: str, gap: str | None) -> None:
    """In numbers, yes and no, and dates; every gap sets the column's flag, and every number stays one."""
    rows = [
        (*(gap if k % 5 == place else value for place, value in enumerate(row[:4])), *row[4:])
        for k, row in enumerate(ROWS)
    ]
    if kind == "parquet" and gap is not None:  # words and numbers in one column are words there
        rows = [(*(str(value) for value in row[:4]), *row[4:]) for row in rows]
    path = as_file(tmp_path, kind, rows)
    draft = draft_schema(path)
    assert {column.name: column.kind for column in draft.columns} == KINDS
    assert [column.name for column in draft.columns if column.gaps] == list(HEADER[:4])
    schema = tmp_path / "schema.toml"
    schema.write_text(filled_in(draft.to_toml()))
    data = load(path, schema=schema)
    assert data.feature_names is not None
    features = np.asarray(data.X)
    for place, name in enumerate(HEADER[:4]):
        flags = features[:, data.feature_names.index(f"{name} missing")]
        assert flags.tolist() == [float(k % 5 == place) for k in range(len(ROWS))]
    ages = features[:, data.feature_names.index("age")]
    assert np.allclose(ages, [0 if k % 5 == 0 else row[0] / 100 for k, row in enumerate(ROWS)])


def test_the_draft_lists_gap_words_that_are_known_to_all_and_not_those_of_the_file(tmp_path: Path) -> None:
    rows = [("n/a" if k == 3 else 20 + k, *row[1:]) for k, row in enumerate(ROWS)]
    text = draft_schema(write_csv(tmp_path / "a.csv", rows)).to_toml()
    assert f"missing = [{', '.join(json.dumps(word, ensure_ascii=False) for word in GAP_WORDS)}]" in text
    assert "missing = [" not in draft_schema(write_csv(tmp_path / "b.csv", ROWS)).to_toml()
    assert set(MISSING) < set(GAP_WORDS)


def test_a_word_of_gaps_stays_a_category_where_the_others_are_words(tmp_path: Path) -> None:
    rows = [(*row[:4], "none" if k % 4 == 0 else row[4], row[5]) for k, row in enumerate(ROWS)]
    town = next(c for c in draft_schema(write_csv(tmp_path / "a.csv", rows)).columns if c.name == "town")
    assert (town.kind, town.gaps, town.gap_words) == ("category", False, False)


def test_no_column_is_lost_without_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty columns, ids, texts, types without cells, and numbers among which there are words."""
    monkeypatch.chdir(tmp_path)
    columns = {
        "empty": [None] * 300,
        "code": [f"X{k}" for k in range(300)],
        "note": [f"a note of many words about case {k}" for k in range(300)],
        "age": ["refused" if k % 50 == 0 else str(k % 90) for k in range(300)],
        "seen": [[k] for k in range(300)],
        "y": [k % 2 for k in range(300)],
    }
    pq.write_table(pa.table(columns), "p.parquet")
    assert main(["data", "schema", "p.parquet", "-o", "s.toml"]) == 0
    out, problems = capsys.readouterr()
    for name in ("empty", "code", "note", "age", "seen"):
        assert f"column '{name}'" in problems
        assert f"problem: column '{name}'" in Path("s.toml").read_text()
    assert "6 are words" in problems
    assert "refused" not in out + problems + Path("s.toml").read_text()


def test_a_file_that_is_no_table_is_refused_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_xlsx(tmp_path / "people.xlsx", [[HEADER, *ROWS]])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "python_calamine", None)
        with pytest.raises(DataError, match=r"quietgrad\[excel\]"):
            draft_schema(path)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1\0\0")
    with pytest.raises(DataError, match="not a readable parquet file"):
        draft_schema(tmp_path / "cut.parquet")
    (tmp_path / "old.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600))
    with pytest.raises(DataError, match=r"CSV, \.parquet and \.xlsx"):
        draft_schema(tmp_path / "old.xls")
    pytest.importorskip("python_calamine")
    write_xlsx(tmp_path / "two.xlsx", [[HEADER, *ROWS], [("x",), (1,)]])
    with pytest.raises(DataError, match="2 sheets are filled"):
        draft_schema(tmp_path / "two.xlsx")
    (tmp_path / "cut.xlsx").write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="not a readable"):
        draft_schema(tmp_path / "cut.xlsx")


def test_a_spreadsheet_is_trained_on_and_predicted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    as_file(tmp_path, "xlsx", ROWS * 20)
    Path("schema.toml").write_text(filled_in(draft_schema("people.xlsx").to_toml()))
    run = ["train", "people.xlsx", "--schema", "schema.toml", "--epsilon", "2", "--out", "run", "--quiet"]
    assert main([*run, "--delta", "1e-4", "--ledger", "l.jsonl"]) == 0
    assert main(["predict", "run", "people.xlsx", "-o", "out.csv"]) == 0
    assert Path("out.csv").read_text().count("\n") == 801
    capsys.readouterr()


def test_codes_for_gaps_strays_and_repeated_ids_have_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """999 where it stands alone, two words among numbers, ids with three rows each, money, times with a zone."""
    monkeypatch.chdir(tmp_path)
    lines = ["patient_id,age,rooms,dose,paid,seen,ill"]
    for k in range(120):
        age = 999 if k % 30 == 0 else 20 + k % 60
        dose = "twice" if k in (7, 70) else f"{k % 9 / 2}"
        paid = f'"zł {1 + k % 3},{k % 10:03d}.50"'
        lines.append(f"A{k // 3},{age},{997 + k % 7},{dose},{paid},2021-03-{1 + k % 28:02d}T10:00:00+02:00,{k % 2}")
    Path("p.csv").write_text("\n".join(lines) + "\n")
    drafted = draft_schema("p.csv")
    kinds = {column.name: column.kind for column in drafted.columns}
    assert kinds == {
        "patient_id": "id", "age": "whole number", "rooms": "whole number", "dose": "number", "paid": "number",
        "seen": "date", "ill": "yes/no",
    }  # fmt: skip
    said = " ".join(drafted.problems)
    assert "999" not in said  # it is an ordinary number of rooms
    assert "2 are words and count as gaps" in said
    assert "--person patient_id" in said
    Path("q.csv").write_text("\n".join(line.replace(",999,", ",9999,", 1) for line in lines) + "\n")
    again = draft_schema("q.csv")
    assert "9999 stands alone" in " ".join(again.problems)
    text = again.to_toml().replace("bounds = []", "bounds = [0, 5000]", 4)
    schema = read_schema(tomllib.loads(text))
    data = load("q.csv", schema=schema)
    names = list(data.feature_names or ())
    assert data.X[:, names.index("age missing")].sum() == 4.0
    assert data.X[:, names.index("dose missing")].sum() == 2.0
    assert "twice" not in text


def test_many_columns_are_shown_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"x{k}" for k in range(800)]
    rows = [",".join([*(f"{k}.{r}" for k in range(800)), str(r % 2)]) for r in range(5)]
    Path("wide.csv").write_text("\n".join([",".join([*names, "y"]), *rows]) + "\n")
    assert main(["data", "schema", "wide.csv", "-o", "s.toml"]) == 0
    said = capsys.readouterr().out
    assert "800 columns: x0, x1" in said
    assert len(said.splitlines()) < 12


@pytest.mark.parametrize(
    ("name", "cell", "kind"),
    [
        ("customer", "C{:05d}", "id"),  # codes, whatever the column is called
        ("seen by", "DR-{:04d}", "id"),
        ("patient", "{}", "id"),  # numbers, by the name of the column
        ("visits", "{}", "whole number"),
        ("town", "Town {}", "category"),
    ],
)
def test_ids_that_repeat_are_known_by_their_form_or_name(tmp_path: Path, name: str, cell: str, kind: str) -> None:
    rows = [(cell.format(k // 4), k % 7, k % 2) for k in range(120)]
    draft = draft_schema(write_csv(tmp_path / "t.csv", rows, (name, "size", "ill")))
    assert draft.columns[0].kind == kind
    assert any(f"--person {shlex.quote(name)}" in problem for problem in draft.problems) == (kind == "id")


ORDINARY = (
    "PatientID", "patientid", "patientId", "participant", "Patienten-Nr", "patient_nr", "customer_no",
    "Kundennummer", "MRN", "ssn", "userid", "pid", "subject_nr", "employee", "personnummer", "Case No",
    "household_no", "memberno",
    "Teilnehmer-Nr.", "nhs_number", "StudentCode", "account_no", "Versicherten-Nummer", "id_number_ssn",
)  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ids_of_people_are_known_by_ordinary_names(tmp_path: Path, name: str) -> None:
    """Whole numbers with four rows each: a column of another kind makes the guarantee one per row."""
    rows = [(10_000 + 37 * (k // 4), k % 7, k % 2) for k in range(120)]
    draft = draft_schema(write_csv(tmp_path / "t.csv", rows, (name, "size", "ill")))
    assert draft.columns[0].kind == "id"
    assert any("repeats" in problem for problem in draft.problems)


@pytest.mark.parametrize("name", ["paid", "valid", "no", "unit", "covid", "age", "postcode", "rapid", "period"])
def test_other_names_are_not_those_of_people(name: str) -> None:
    assert not is_called_people(name)


@pytest.mark.parametrize("cell", ["{}", "name {}"])
def test_values_that_repeat_as_ids_do_have_a_line(tmp_path: Path, cell: str) -> None:
    """By form, whatever the name: 150 values with two to four rows each; measured numbers do not have one."""
    rng = np.random.default_rng(0)
    whose = np.repeat(np.arange(150), rng.integers(2, 5, 150))
    rows = [(cell.format(40_000 + 7 * k), 20 + i % 60, f"{rng.normal():.3f}", i % 2) for i, k in enumerate(whose)]
    draft = draft_schema(write_csv(tmp_path / "t.csv", rows, ("fall", "age", "x", "ill")))
    said = [problem for problem in draft.problems if "may be ids of people" in problem]
    assert len(said) == 1
    assert said[0].startswith("column 'fall' may be")


@pytest.mark.parametrize(
    ("cells", "decimal", "thousands", "numbers"),
    [
        (["($238.60)", "$1,200.00"], ".", ",", [-238.6, 1200.0]),
        (["(238.60)", "12.50"], ".", ",", [-238.6, 12.5]),
        (["$(1,238.60)", "-$3"], ".", ",", [-1238.6, -3.0]),
        (["(1.238,60 €)", "5,00 €"], ",", ".", [-1238.6, 5.0]),
        (["238,60-", "1.005,00"], ",", ".", [-238.6, 1005.0]),
    ],
)
def test_negative_amounts_in_parentheses_are_numbers(
    tmp_path: Path, cells: list[str], decimal: str, thousands: str, numbers: list[float]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("pay;ill\n" + "".join(f"{cells[k % 2]};{k % 2}\n" for k in range(40)))
    column = draft_schema(path).columns[0]
    assert (column.kind, column.decimal, column.thousands) == ("number", decimal, thousands)
    assert to_numbers("pay", cells, decimal=decimal, thousands=thousands).tolist() == numbers
    for odd in ("(-5)", "()", "(5", "((5))", "(inf)", "-5-", "-", "inf-"):
        with pytest.raises(NotNumericError):
            to_numbers("pay", [odd], decimal=decimal, thousands=thousands)


def test_times_and_constants_have_a_line(tmp_path: Path) -> None:
    """The time of day was left out silently; a column of one value was drafted as yes/no, or not mentioned."""
    rows = [
        (f"{1 + k % 28:02d}.01.2016 02:0{k % 9}", f"{1 + k % 28:02d}.01.2016 00:00", 1, k % 2) for k in range(40)
    ]
    draft = draft_schema(write_csv(tmp_path / "t.csv", rows, ("seen", "born", "here", "ill")))
    assert [column.kind for column in draft.columns] == ["date", "date", "whole number", "yes/no"]
    said = "\n".join(draft.problems)
    assert "'seen': cells have a time of day" in said
    assert "'born'" not in said
    assert "'here' is the same in every row" in said


def test_a_spreadsheet_is_not_scanned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal says what reads it: leaving --memory out."""
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    assert main(["train", str(tmp_path / "t.xlsx"), "--epsilon", "1", "--memory", "100"]) != 0
    assert "leave --memory out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cells", "formats", "lenient"),
    [
        ([f"2020-01-{1 + k % 28:02d}" for k in range(100)], ("%Y-%m-%d",), False),
        ([*(f"2020-01-{1 + k % 28:02d}" for k in range(99)), "31.31.2020"], ("%Y-%m-%d",), True),
        ([f"2020-01-{1 + k % 28:02d}" if k % 3 else f"{1 + k % 28:02d}.02.2021" for k in range(99)],
         ("%Y-%m-%d", "%d.%m.%Y"), False),
    ],
)  # fmt: skip
def test_dates_in_several_forms_and_a_few_bad_ones_stay_dates(
    tmp_path: Path, cells: list[str], formats: tuple[str, ...], lenient: bool
) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["when;y", *(f"{cell};{k % 2}" for k, cell in enumerate(cells))]))
    (when, _) = draft_schema(path).columns
    assert (when.kind, when.formats, when.lenient) == ("date", formats, lenient)
    (tmp_path / "schema.toml").write_text(draft_schema(path).to_toml())
    table = load(path, schema=tmp_path / "schema.toml")
    gaps = table.X[:, list(table.feature_names or ()).index("when missing")].sum() if lenient else 0
    assert gaps == lenient


def test_a_column_is_not_read_in_both_orders_of_day_and_month(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    lines = [f"{1 + k % 28:02d}/13/2020;{k % 2}" if k % 2 else f"13/{1 + k % 12:02d}/2020;1" for k in range(80)]
    path.write_text("\n".join(["when;y", *lines]))
    assert draft_schema(path).columns[0].kind != "date"


def test_an_unreadable_date_is_refused_unless_the_schema_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("when,y\n2020-01-01,0\nsoon,1\n")
    said = {"label": {"column": "y", "kind": "yes/no"}, "columns": {"when": {"kind": "date"}}}
    with pytest.raises(DataError, match=r"column 'when' holds cells.*unreadable = .gap") as refused:
        load(path, schema=said)
    assert "soon" not in str(refused.value)
    gapped = {**said, "columns": {"when": {"kind": "date", "unreadable": "gap", "missing": "indicator"}}}
    assert np.asarray(load(path, schema=gapped).X)[:, -1].tolist() == [0.0, 1.0]
