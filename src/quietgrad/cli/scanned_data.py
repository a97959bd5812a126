"""Tables that are scanned instead of loaded, for the commands that take data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from quietgrad import data as datasets
from quietgrad.cli.options import usage
from quietgrad.data.dataset import Task
from quietgrad.errors import DataError

if TYPE_CHECKING:
    from quietgrad.data.scanning import Scan  # brings pyarrow, which a loaded table may not need


@dataclass(frozen=True, eq=False)
class ScannedData:
    """What :class:`quietgrad.data.Dataset` says of a loaded table, said of a scan."""

    X: Scan
    task: Task
    class_names: tuple[str, ...] | None
    X_test: Scan | None = None

    y: ClassVar[None] = None
    y_test: ClassVar[None] = None
    person_test: ClassVar[None] = None
    label_bounds: ClassVar[None] = None
    bounded_names: ClassVar[tuple[str, ...]] = ()

    @property
    def person(self) -> Scan | None:
        """The scan, if it says whose its rows are."""
        return None if self.X.person is None else self.X

    @property
    def name(self) -> str:
        """What was scanned."""
        return self.X.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the rows."""
        return self.X.notes

    @property
    def d(self) -> int:
        """Number of features."""
        return self.X.features

    @property
    def feature_bounds(self) -> tuple[tuple[float, float] | None, ...] | None:
        """The public range of each feature by the schema."""
        return self.X.bounds

    @property
    def row_bound(self) -> float | None:
        """The schema's bound on rows."""
        schema = self.X.layout.schema
        return None if schema is None else schema.row_bound

    @property
    def classes(self) -> tuple[int, ...] | None:
        """Codes of the classes."""
        return None if self.class_names is None else tuple(range(len(self.class_names)))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features."""
        return self.X.feature_names


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
    task: Task = "regression" if names is None else "binary" if len(names) == 2 else "multiclass"
    return ScannedData(table, task, names, held_out)
