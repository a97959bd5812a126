"""Tables that are scanned instead of loaded, for the commands that take data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quietgrad.errors import DataError
from quietgrad.files import is_multi_file

if TYPE_CHECKING:
    from quietgrad.data.scanning import Scan


@dataclass(frozen=True, eq=False)
class ScannedData:
    """What :class:`quietgrad.data.Dataset` says of a loaded table, said of a scan."""

    X: Scan
    task: Any
    class_names: tuple[str, ...] | None
    test: Scan | None = None

    y = None
    y_test = None
    person_test = None
    pictures = None
    bounded_names: tuple[str, ...] = ()
    label_bounds: tuple[float, float] | None = None

    @property
    def table(self) -> Scan:
        """What an objective takes."""
        return self.X

    @property
    def X_test(self) -> Scan | None:
        """Held-out records."""
        return self.test

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
    def n(self) -> int:
        """Number of rows."""
        return len(self.X)

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


def scans(data: str | None, options: dict[str, Any]) -> bool:
    """Whether a table is scanned: it is many files, or scan options are given."""
    return data is not None and (bool(options) or is_multi_file(data))


def open_scan(data: str, reading: dict[str, Any], options: dict[str, Any], test: str | None = None) -> ScannedData:
    """The scan that the options of a command describe."""
    table, task, names = _opened(data, reading, options)
    held_out = None if test is None else _opened(test, {**reading, "pair": names}, options)[0]
    return ScannedData(table, task, names, held_out)


def _opened(data: str, reading: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    from quietgrad.cli.options import usage
    from quietgrad.data import scan

    for name in ("n_features", "drop", "keep", "delimiter", "encoding"):
        if name in reading:
            raise DataError(f"{data}: --{name.replace('_', '-')} is for files that are loaded and not scanned.")
    classes, task = reading.get("classes"), reading.get("task")
    with usage():
        table = scan(
            data, target=reading.get("label"), schema=reading.get("schema"), classes=classes,
            task="regression" if task == "regression" else None, person=reading.get("person"), **options,
        )  # fmt: skip
    if table.layout.task == "regression":
        return table, "regression", None
    if table.classes is None:
        known = reading.get("pair")
        pair = tuple(int(name) for name in known) if known else table.label_pair()
        if pair is None:
            raise DataError(
                f"{table.name}: labels are neither 0/1 nor -1/+1. For classification pass the public label set, "
                "--classes no,yes; for regression --task regression. No privacy budget was spent."
            )
        table = replace(table, layout=replace(table.layout, classes=pair))
    names = tuple(str(label) for label in table.classes or ())
    return table, "binary" if len(names) == 2 else "multiclass", names


def open_columns(data: str, spec: Any, facts: dict[str, Any]) -> Scan:
    """The features of files alone, as the run's model takes them: there may be no labels in them."""
    from quietgrad.data import scan

    schema = spec.reading.get("schema")
    columns = facts["feature_names"] if schema is None else None
    options = {key: value for key, value in spec.scanning.items() if key != "cluster"}
    return scan(data, columns=columns, schema=schema, labelled=False, **options)


def scan_scores(objective: Any, params: Any, table: Scan, task: str, frame: Any) -> dict[str, float]:
    """Loss and accuracy (or rmse) of a model on a scan, without noise: they are data."""
    table = table.by_row()
    view = table if frame is None else table.with_rows(_Clipped(frame))
    records = objective.prepare(view)
    scores = {"loss": float(objective.risk(records, params) - objective.regularizer.value(params))}
    good, seen = 0.0, 0
    for X, y in table.blocks():
        answers = predicted(objective, params, X, frame)
        good += float(((answers - y) ** 2).sum() if task == "regression" else (answers == y).sum())
        seen += len(y)
    scores["rmse" if task == "regression" else "accuracy"] = float(np.sqrt(good / seen)) if (
        task == "regression"
    ) else good / seen  # fmt: skip
    return scores


@dataclass(frozen=True)
class _Clipped:
    """Rows as a model's box keeps them."""

    frame: Any

    def __call__(self, X: Any, y: Any) -> Any:
        from quietgrad.objectives.tables.scanned import Laid

        return Laid(self.frame.clipped(X), y)


def predicted(objective: Any, params: Any, X: Any, frame: Any) -> Any:
    """What a model says of a block of rows."""
    rows = X if frame is None else frame.clipped(X)
    answers = objective.predict(rows, params)
    return answers if frame is None or frame.target is None else np.clip(answers, *frame.target)


def predict_to(objective: Any, params: Any, table: Scan, frame: Any, names: Any, path: Path) -> int:
    """Write a model's predictions for a scan to a file, block by block; how many they are."""
    from quietgrad.cli.predict import cell
    from quietgrad.estimators.validation import write_blocks

    words = None if names is None else np.array([str(cell(name)) for name in names])

    def answers(X: Any) -> dict[str, Any]:
        said = predicted(objective, params, X, frame)
        out = {"prediction": said if words is None else words[said.astype(np.int64)]}
        if hasattr(objective, "probabilities"):
            chances = objective.probabilities(X if frame is None else frame.clipped(X), params)
            one = chances.ndim == 1
            key = "probability_of_" + str(cell(names[1])) if one and names else "probability"
            out[key] = np.round(chances if one else chances.max(axis=1), 6)
        return out

    return write_blocks(path, (answers(X) for X, _ in table.blocks()))
