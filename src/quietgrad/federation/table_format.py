"""How every party's file becomes features and labels: parsed once, for planning and for each party alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.core.errors import DataError, SettingError
from quietgrad.data.schema import Schema, read_schema

if TYPE_CHECKING:
    from quietgrad.data import Dataset

SETTINGS: dict[str, Any] = {
    "features": int, "classes": list[str | int | float | bool], "label": str, "schema": dict, "person": str,
}  # fmt: skip
"""The settings of ``[data]`` in a plan file, with their types."""
_MOST_FEATURES = 1 << 25
_NAMED_COLUMNS = (".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class TableFormat:
    """The public format of all parties' tables.

    With a ``schema`` all else follows from it: the number of features, the label's column and its classes.
    ``declared`` is the schema as the plan's text has it.
    """

    features: int
    task: str
    classes: tuple[object, ...] | None = None
    label: str | None = None
    person: str | None = None
    schema: Schema | None = None
    declared: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.features <= _MOST_FEATURES:
            raise ValueError(f"[data] features={self.features}: must be between 1 and 2^25.")
        names = self.class_names
        if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
            raise SettingError("[data] {classes}: must be two or more different labels.", classes=names)

    @classmethod
    def of(cls, data: Mapping[str, Any], task: str) -> TableFormat:
        """Read ``[data]``, whose types were checked, for a loss of this ``task``."""
        if "schema" in data:
            return cls._of_schema(data, task)
        if "features" not in data:
            raise ValueError("[data] needs 'features', or a schema that they follow from.")
        classes = data.get("classes", [0, 1] if task == "binary" else None)
        if task == "regression" and classes is not None:
            raise ValueError("[data] classes: the loss is for numbers; leave the classes out.")
        return cls(
            data["features"], task, None if classes is None else tuple(classes), data.get("label"),
            data.get("person"),
        )  # fmt: skip

    @classmethod
    def _of_schema(cls, data: Mapping[str, Any], task: str) -> TableFormat:
        schema, person = read_schema(data["schema"]), data.get("person")
        classes = None if task == "regression" else schema.classes
        if (schema.classes is None) != (task == "regression"):
            kind = "numbers" if schema.classes is None else "classes"
            raise ValueError(f"[data.schema] label: is of {kind}, and the loss is for {task} labels.")
        follows = {
            "features": schema.width, "label": schema.label, "classes": list(classes) if classes else None,
        }  # fmt: skip
        for name, value in follows.items():
            given = [str(each) for each in data[name]] if name == "classes" and name in data else data.get(name)
            if given is not None and given != value:
                raise ValueError(f"[data] {name}={given!r}: the schema says {value!r}; leave {name} out.")
        if person is not None and person in (schema.label, *schema.columns):
            raise ValueError(f"[data] person={person!r}: is the label or a feature of the schema as well.")
        return cls(schema.width, task, classes, schema.label, person, schema, data["schema"])

    @property
    def class_names(self) -> list[str] | None:
        return None if self.classes is None else [str(label) for label in self.classes]

    def load(self, path: str | Path) -> Dataset:
        """Read one party's file."""
        from quietgrad.data import load

        if self.schema is not None and not set(_NAMED_COLUMNS) & set(Path(path).suffixes):
            raise DataError(f"{path}: the plan's schema names columns; give a CSV or parquet file.")
        options: dict[str, Any] = {"person": self.person, "n_features": self.features}
        if self.schema is not None:
            options["schema"] = self.schema
        else:
            options |= {"label": self.label, "classes": self.classes}
            options["task"] = "regression" if self.task == "regression" else None
        data = load(path, **options)
        if data.d != self.features:
            raise DataError(f"{path}: has {data.d} features, the plan {self.features}.")
        return data

    def options(self) -> dict[str, Any]:
        """Return the options, beside the schema, that ``run.json`` keeps for reading files like the parties'."""
        if self.schema is not None:
            return {} if self.person is None else {"person": self.person}
        named = {"label": self.label, "person": self.person, "classes": self.classes and list(self.classes)}
        named["task"] = "regression" if self.task == "regression" else None
        return {name: value for name, value in named.items() if value is not None}

    def schema_text(self) -> str | None:
        """The schema as JSON; dates of TOML become texts."""
        return None if self.schema is None else json.dumps(self.declared, indent=2, default=str) + "\n"
