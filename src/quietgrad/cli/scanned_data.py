"""Tables that are scanned instead of loaded, for the commands that take data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quietgrad import data as datasets
from quietgrad.cli.options import usage
from quietgrad.core.errors import DataError
from quietgrad.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class ScannedData(Dataset):
    """The public facts of a table that is scanned: ``X`` is the :class:`~quietgrad.data.Scan`, which has ``y``."""

    X: Any
    y: Any = None
    X_test: Any = None
    person: Any = None  # the scan, if a column says whose its rows are


def open_scan(
    data: str, reading: Mapping[str, Any], options: Mapping[str, Any], test: str | None = None
) -> ScannedData:
    """The scan that the options of a command describe; ``reading["pair"]`` are its two labels, if known."""
    for name in ("n_features", "drop", "keep", "delimiter", "encoding"):
        if name in reading:
            raise DataError(f"{data}: --{name.replace('_', '-')} is for files that are loaded and not scanned.")
    with usage():
        table = datasets.scan(
            data, target=reading.get("label"), schema=reading.get("schema"), classes=reading.get("classes"),
            task="regression" if reading.get("task") == "regression" else None, person=reading.get("person"),
            **options,
        )  # fmt: skip
    names: tuple[str, ...] | None = None
    if table.layout.task != "regression":
        if table.classes is None:
            known = reading.get("pair")
            pair = tuple(int(name) for name in known) if known else table.label_pair()
            if pair is None:
                raise DataError(
                    f"{table.name}: labels are neither 0/1 nor -1/+1. For classification pass the public label "
                    "set, --classes no,yes; for regression --task regression. No privacy budget was spent."
                )
            table = replace(table, layout=replace(table.layout, classes=pair))
        names = tuple(str(label) for label in table.classes or ())
    held_out = None if test is None else open_scan(test, {**reading, "pair": names}, options).X
    schema = table.layout.schema
    return ScannedData(
        table.name, table, X_test=held_out, class_names=names, notes=table.notes, feature_bounds=table.bounds,
        task="regression" if names is None else "binary" if len(names) == 2 else "multiclass",
        row_bound=None if schema is None else schema.row_bound, feature_names=table.feature_names,
        classes=None if names is None else tuple(range(len(names))),
        person=None if table.person is None else table,
    )  # fmt: skip
