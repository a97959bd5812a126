"""Spreadsheets (.xlsx): the one sheet of a workbook as delimited text, which is read like any other."""

from __future__ import annotations

import csv
import io
import zipfile
from datetime import date, datetime, timedelta

from quietgrad.core.errors import DataError, boundary
from quietgrad.data.file_formats import EXPANSION, budget


def sheet_text(content: bytes, where: str) -> bytes:
    """The filled sheet of a workbook as UTF-8 text with commas between its cells.

    Dates are written as 2020-01-31 and whole numbers without a point. Empty rows are left out, as of a text.

    Raises:
        DataError: the extra ``excel`` is not installed, the file is no workbook, or several sheets are filled.
    """
    try:
        from python_calamine import CalamineWorkbook
    except ImportError:
        raise DataError(
            f"{where}: reading a spreadsheet needs an extra: pip install 'quietgrad[excel]'. Or save the sheet as "
            "CSV."
        ) from None
    with boundary(f"{where}: not a readable .xlsx file; it may be cut short, or locked by a password."):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > budget(len(content)):
                raise DataError(f"{where}: unpacks to more than {EXPANSION} times its size.")
        book = CalamineWorkbook.from_filelike(io.BytesIO(content))
        sheets = [book.get_sheet_by_name(name).to_python() for name in book.sheet_names]
    filled = [rows for rows in sheets if any(cell != "" for row in rows for cell in row)]
    if not filled:
        raise DataError(f"{where}: the file is empty.")
    if len(filled) > 1:
        raise DataError(
            f"{where}: {len(filled)} sheets are filled, and one table is read. Save the sheet that is meant in a "
            "file of its own."
        )
    text = io.StringIO()
    rows = ([_cell(cell) for cell in row] for row in filled[0])
    csv.writer(text, lineterminator="\n").writerows(row for row in rows if any(row))
    return text.getvalue().encode()


def _cell(value: object) -> str:
    """A cell as text; a spreadsheet has one kind of number and writes a date as a time at midnight.

    >>> [_cell(value) for value in (31.0, 0.5, True, "a", datetime(2020, 1, 31), date(2020, 1, 31))]
    ['31', '0.5', 'true', 'a', '2020-01-31', '2020-01-31']
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, datetime) and value - datetime(value.year, value.month, value.day) == timedelta(0):
        return value.date().isoformat()
    return value.isoformat() if isinstance(value, date) else str(value).strip()
