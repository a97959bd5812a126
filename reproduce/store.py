"""Rows of a reproduction, written one by one, so that a run that is interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import save

Row = dict[str, Any]
Table = dict[str, Any]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table that can be read on a terminal; what is not known is a dash.

    >>> print_table("Errors", ["method", "ours"], [["a", 0.25], ["b", None]])
    Errors
    method  ours
    a       0.25
    b       –
    """

    def text(value: Any) -> str:
        if value is None:
            return "–"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [list(columns), *([text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


@dataclass(frozen=True)
class Store:
    """The result file of one script: lists of rows by kind, and the tables that are made of them.

    ``about`` is written beside the rows, and so is what ``judged`` makes of them; ``tables`` makes what
    `quietgrad reproduce` shows and may look at all rows.
    """

    path: Path
    command: str
    about: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("search", "fits")
    tables: Callable[[dict[str, list[Row]]], list[Table]] = lambda rows: []
    judged: Callable[[dict[str, list[Row]]], Mapping[str, Any]] = lambda rows: {}

    def rows(self, kind: str) -> list[Row]:
        """The rows of one kind made so far."""
        found: list[Row] = json.loads(self.path.read_text()).get(kind, []) if self.path.exists() else []
        return found

    def find(self, kind: str, **wanted: Any) -> Row | None:
        """The first row whose fields have these values; a list is as good as a tuple."""
        return next(iter(self.having(kind, **wanted)), None)

    def having(self, kind: str, **wanted: Any) -> list[Row]:
        """All rows whose fields have these values."""
        return [row for row in self.rows(kind) if all(row.get(k) == v for k, v in wanted.items())]

    def keep(self, kind: str, *rows: Row) -> None:
        """Write more rows at once; the file is read again, since calls for other parts may run side by side."""
        known = {name: self.rows(name) for name in self.kinds}
        self._write({**known, kind: [*known[kind], *rows]})

    def change(self, kind: str, row: Row, **changes: Any) -> None:
        """Write other values into one row that is there."""
        known = {name: self.rows(name) for name in self.kinds}
        self._write({**known, kind: [{**each, **changes} if each == row else each for each in known[kind]]})

    def _write(self, rows: dict[str, list[Row]]) -> None:
        written = {**self.about, **rows, **self.judged(rows), "tables": self.tables(rows)}
        save(self.path, {"command": self.command, **written})
