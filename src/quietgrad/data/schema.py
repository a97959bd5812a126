"""Public schemas: which columns of a table are used, and how each becomes numbers.

A vocabulary or a range learnt from private rows is itself a release. So a schema declares it (`schema.toml`,
`schema.json` or the registry) and nothing infers it. A number without declared bounds keeps its own scale, and a
private fit finds its range and pays for it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from quietgrad.core import files
from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import MISSING, SINCE, Categorical, Choices, ColumnKind, Date, Numeric, Range, YesNo
from quietgrad.named_settings import check_types, has_type

Said: TypeAlias = Mapping[str, Any]  # a table of TOML or an object of JSON


@dataclass(frozen=True)
class Schema:
    """The mapping of a table's columns to features and labels.

    Columns that are not listed are left out.

    `label` names the target; `classes` are its public values, or `label_bounds` its public range for regression
    (found privately without). `label_kind` is "yes/no" where any spelling of the two counts. `names` gives the
    columns of a file without a header. `skip_lines` stand before the header of delimited text, `skip_rows` behind
    it (units), and `skip_end` at the end (totals): they hold no records. `ids` are columns that are kept
    beside predictions. `drop_incomplete` removes rows with a missing entry.

    >>> schema = Schema({"age": Numeric((0, 100)), "sex": Categorical(("F", "M"))}, "rich", classes=("no", "yes"))
    >>> schema.width, round(schema.row_bound, 3)
    (3, 1.414)
    """

    columns: Mapping[str, ColumnKind]
    label: str
    classes: tuple[str, ...] | None = None
    label_bounds: tuple[float, float] | None = None
    delimiter: str = ","
    names: tuple[str, ...] | None = None
    missing: tuple[str, ...] = field(default=MISSING)
    drop_incomplete: bool = False
    encoding: str = "utf-8"
    label_kind: Literal["yes/no", "category", "number"] = "category"
    label_format: tuple[str, str] = (".", "")
    """Decimal mark and thousands separator of a numeric label."""
    ids: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """Columns of free text, which are no features."""
    label_lenient: bool = False
    """Whether a cell of a numeric label that is no number counts as missing in a description."""
    skip_lines: int = 0
    skip_rows: int = 0
    skip_end: int = 0

    def __post_init__(self) -> None:
        if not self.columns:
            raise DataError("schema: `columns` is empty; list the feature columns.")
        if self.label in self.columns:
            raise DataError(f"schema: the label {self.label!r} is also listed as a feature column.")
        given = (self.classes is not None) + (self.label_bounds is not None)
        if given == 2 or (given == 0 and self.label_kind != "number"):
            raise DataError("schema: give the label either `classes` (classification) or `bounds` (regression).")
        if self.label_bounds is not None and not -np.inf < self.label_bounds[0] < self.label_bounds[1] < np.inf:
            raise DataError(f"schema: label bounds={list(self.label_bounds)}: must be [low, high], both finite.")

    @property
    def width(self) -> int:
        return sum(c.width for c in self.columns.values())

    @property
    def row_bound(self) -> float | None:
        """The largest possible ‖x‖, with at most 1 for most columns; ``None`` if a column has no bounds."""
        reaches = [c.reach for c in self.columns.values()]
        return None if None in reaches else float(np.sqrt(sum(r for r in reaches if r is not None)))

    @property
    def feature_bounds(self) -> tuple[Range, ...]:
        """The public range of each feature; ``None`` where it is to be found privately."""
        return tuple(pair for column in self.columns.values() for pair in column.ranges)

    @property
    def bounded_names(self) -> tuple[str, ...]:
        """Features of numbers whose values declared bounds may clip."""
        return tuple(name for name, kind in self.columns.items() if isinstance(kind, Numeric) and kind.bounds)

    @property
    def declared_bounds(self) -> dict[str, tuple[float, float]]:
        """The bounds of each column of numbers that is mapped from them to [0, 1] by a straight line."""
        numbers = {name: kind for name, kind in self.columns.items() if isinstance(kind, Numeric)}
        return {name: kind.bounds for name, kind in numbers.items() if kind.bounds and not kind.log}

    @property
    def flags(self) -> tuple[str, ...]:
        """Features that are 0 or 1 by their kind: categories, yes/no, parts of dates, and flags of gaps.

        >>> read_schema({
        ...     "label": {"column": "rich", "classes": ["no", "yes"]},
        ...     "columns": {"age": {"bounds": [0, 100], "missing": "indicator"}, "sex": {"categories": ["F", "M"]}},
        ... }).flags
        ('age missing', 'sex=F', 'sex=M')
        """
        pairs = [(column, kind, name) for column, kind in self.columns.items() for name in kind.names(column)]
        return tuple(
            name for column, kind, name in pairs if kind.zero_one or name not in (column, f"{column} days")
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(n for column, kind in self.columns.items() for n in kind.names(column))


SchemaSource: TypeAlias = Schema | Said | str | Path

# The types of what a schema says, in one place: TOML has dates, JSON has null.
_WORDS: TypeAlias = list[str | int | float | bool]
_TABLE: dict[str, Any] = {
    "label": dict, "columns": dict, "delimiter": str, "names": list[str], "missing": list[str],
    "drop_incomplete": bool, "encoding": str, "skip_lines": int, "skip_rows": int, "skip_end": int,
}  # fmt: skip
_LABEL: dict[str, Any] = {
    "column": str, "kind": str | None, "classes": _WORDS | None, "bounds": list[float | str] | None, "decimal": str,
    "thousands": str, "unreadable": str | None,
}  # fmt: skip
_COLUMN: dict[str, Any] = {
    "kind": str | None, "missing": str | None, "bounds": list[float | str | date], "categories": _WORDS,
    "drop_first": bool, "log": bool, "fill": float | None, "decimal": str, "thousands": str,
    "separator": str, "format": str | list[str], "parts": list[str], "since": str | date, "unreadable": str | None,
}  # fmt: skip


def read_schema(source: SchemaSource) -> Schema:
    """A `Schema` from itself, a mapping, or a TOML or JSON file of the form below.

    Every problem of every column is said at once.

    >>> read_schema({
    ...     "label": {"column": "rich", "classes": ["no", "yes"]},
    ...     "columns": {"age": {"bounds": [0, 100]}, "sex": {"categories": ["F", "M"]}},
    ... }).width
    3
    """
    if isinstance(source, Schema):
        return source
    where = "schema"
    if not isinstance(source, Mapping):
        path, where = Path(source), f"schema {source}"
        try:
            if path.suffix == ".toml":
                source = tomllib.loads(files.read_bytes(path).decode("utf-8-sig"))
            else:
                source = files.read_json(path)
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"{where}: cannot be read ({files.os_error_text(error)}).") from None
        except ValueError as error:
            kind = "TOML" if path.suffix == ".toml" else "JSON"
            raise DataError(f"{where}: not valid {kind} ({sanitize(error, most=120)}).") from None
        if not isinstance(source, Mapping):
            raise DataError(f"{where}: must be a JSON object with `label` and `columns`.")
    try:
        check_types(source, "schema:", _TABLE, others=True)
        label, problems = check_types(source["label"], "label:", _LABEL, others=True), []
        columns: dict[str, ColumnKind] = {}
        aside: dict[str, list[str]] = {"id": [], "text": []}
        for name, column_options in source["columns"].items():
            check_types(column_options, f"column {name!r}:", _COLUMN, others=True)
            if column_options.get("kind") in ("id", "text"):
                aside[column_options["kind"]].append(str(name))
                continue
            try:
                columns[str(name)] = _column(column_options)
            except DataError as error:
                problems.append(f"column {name!r}: {str(error).rstrip('.')}")
        classes, bounds, label_kind = _label(label, problems)
        if problems:
            raise DataError(f"{where}: {'; '.join(problems)}.")
        return Schema(
            columns=columns,
            label=str(label["column"]),
            classes=classes,
            label_bounds=bounds,
            delimiter=source.get("delimiter", ","),
            names=tuple(source["names"]) if "names" in source else None,
            missing=tuple(source.get("missing", MISSING)),
            drop_incomplete=bool(source.get("drop_incomplete", False)),
            encoding=str(source.get("encoding", "utf-8")),
            label_kind=label_kind,
            label_format=(str(label.get("decimal", ".")), str(label.get("thousands", ""))),
            ids=tuple(aside["id"]),
            texts=tuple(aside["text"]),
            label_lenient=label.get("unreadable") == "gap",
            **_skipped(source),
        )
    except DataError:
        raise
    except (KeyError, IndexError, ValueError, OverflowError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else sanitize(error, most=200).rstrip(".")
        raise DataError(
            f"{where}: is not laid out as a schema ({why}). "
            'Expected {"label": {"column": …, "classes": […]}, '
            '"columns": {name: {"bounds": [low, high]} or {"categories": […]}}}.'
        ) from None


_MOST_SKIPPED = 10_000  # lines that hold no records, on each side of them


def _skipped(source: Said) -> dict[str, int]:
    """How many lines of delimited text hold no records: before the header, behind it and at the end."""
    counts = {name: int(source.get(name, 0)) for name in ("skip_lines", "skip_rows", "skip_end")}
    if wrong := [name for name, count in counts.items() if not 0 <= count <= _MOST_SKIPPED]:
        raise DataError(f"schema: {wrong[0]} must be a number of lines between 0 and {_MOST_SKIPPED}.")
    return counts


def _label(options: Said, problems: list[str]) -> tuple[Any, Any, Any]:
    """(classes, bounds, kind) of the label; what is wrong goes to ``problems``."""
    kind, bounds, classes = options.get("kind"), options.get("bounds"), options.get("classes")
    if options.get("unreadable") not in (None, "gap", "refuse"):
        problems.append('label: unreadable must be "gap" or "refuse"')
    if kind == "yes/no":
        return ("no", "yes"), None, kind
    if classes:
        return tuple(str(c) for c in classes), None, "category"
    if bounds:
        return None, (float(bounds[0]), float(bounds[1])), "number"
    if kind in ("number", "whole number"):
        return None, None, "number"
    if kind == "category" or classes is not None:
        problems.append('label: `classes` is empty; list the public class labels, or set kind = "number"')
    return None, None, "category" if not problems else "number"


_KINDS = ("number", "whole number", "category", "choices", "yes/no", "date", "id", "text")


def _column(options: Said) -> ColumnKind:
    kind = options.get("kind")
    gaps = options.get("missing")
    if kind is not None and kind not in _KINDS:
        raise DataError(f"kind = {kind!r} must be one of {', '.join(_KINDS)}")
    if gaps not in (None, "", "indicator", "refuse"):
        raise DataError('missing must be "indicator" or "refuse"')
    flagged = gaps == "indicator"
    if kind == "yes/no":
        return YesNo(flagged)
    if kind == "date":
        ends = [date.fromisoformat(str(end)) for end in options.get("bounds", ()) if str(end)]
        since = date.fromisoformat(str(options.get("since", SINCE)))
        parts = tuple(options.get("parts", ("days", "month", "weekday")))
        if len(ends) not in (0, 2):
            raise DataError("bounds must be two dates such as 2000-01-01, or []")
        form = options.get("format", "%Y-%m-%d")
        forms = form if isinstance(form, str) else tuple(map(str, form))
        return Date((ends[0], ends[1]) if ends else None, forms, parts, flagged, since, _is_lenient(options))
    if kind in ("category", "choices") or "categories" in options:
        if not options.get("categories"):
            raise DataError("`categories` is empty: list its public values, or leave the column out")
        categories = tuple(str(c) for c in options["categories"])
        if kind == "choices":
            return Choices(categories, str(options.get("separator", ";")), flagged)
        return Categorical(categories, bool(options.get("drop_first", False)), flagged)
    if "bounds" in options or kind is not None:
        limits = list(options.get("bounds", ()))
        if len(limits) not in (0, 2) or not has_type(limits, list[float | str]):
            raise DataError("bounds must be [low, high], or [] to have the range found privately")
        pair = (float(limits[0]), float(limits[1])) if limits else None
        written = (str(options.get("decimal", ".")), str(options.get("thousands", "")))
        whole = kind == "whole number"
        lenient = _is_lenient(options)
        return Numeric(
            pair, bool(options.get("log", False)), options.get("fill"), flagged, *written, whole, lenient
        )
    raise DataError("needs `bounds` (numeric) or `categories` (one-hot)")


def _is_lenient(options: Said) -> bool:
    """Whether a cell that is no number or no date counts as a gap."""
    if options.get("unreadable") not in (None, "gap", "refuse"):
        raise DataError('unreadable must be "gap" or "refuse"')
    return options.get("unreadable") == "gap"


def without_comments(content: bytes) -> bytes:
    r"""A TOML schema without its comments, which may tell of cells; unchanged if they are part of what it says.

    >>> without_comments(b'# 3 rows\n[label]\ncolumn = "#y"  # "ill"\n').decode()
    '[label]\ncolumn = "#y"\n'
    """
    try:
        text = content.decode("utf-8-sig")
        lines = [code for line in text.splitlines() if (code := _code_of(line)) or not line.strip()]
        plain = "\n".join(lines) + "\n"
        return plain.encode() if tomllib.loads(plain) == tomllib.loads(text) else content
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        return content


def _code_of(line: str) -> str:
    """A line of TOML up to its comment."""
    quote, place = "", 0
    while place < len(line):
        mark = line[place]
        if quote == '"' and mark == "\\":
            place += 1
        elif quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark == "#":
            return line[:place].rstrip()
        place += 1
    return line
