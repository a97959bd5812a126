"""How a party's file becomes records of a network: pictures, a table's rows, or tokens, by the plan's public rules.

A picture is an array of the plan's shape, or a PNG or JPEG file. Bytes become numbers in [0, 1]. A record of tokens
is a list of whole numbers below the plan's vocabulary. What does not fit the plan is refused without saying which
record it was, and nothing is computed from the records of several.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError, SettingError
from quietgrad.data.dataset import encode_labels
from quietgrad.federation.table_format import SETTINGS as TABLE_SETTINGS
from quietgrad.federation.table_format import TableFormat
from quietgrad.tables.person_ids import factorize_ids
from quietgrad.tables.privacy_units import RecordsWithIds

Form = Literal["table", "images", "tokens"]
SETTINGS: dict[str, Any] = {**TABLE_SETTINGS, "form": str, "shape": list[int], "vocabulary": int}
"""The settings of ``[data]`` in a plan file, with their types; those of a table are enough for a table's loss."""
INDEX = "records.csv"
"""What lists the pictures of a folder: columns ``file``, ``label`` and, if the plan names it, the person."""
_PICTURES = (".png", ".jpg", ".jpeg")
_MOST_NUMBERS = 1 << 28


@dataclass(frozen=True)
class PartyRecords:
    """One party's records, as a network takes them; ``person`` says whose each is."""

    X: Any
    y: npt.NDArray[Any]
    person: npt.NDArray[Any] | None = None
    labelled: bool = True

    def __len__(self) -> int:
        return len(self.y)

    @property
    def held(self) -> Any:
        """The records as an objective prepares them."""
        data = (self.X, self.y) if isinstance(self.X, np.ndarray) else _Ragged(self.X, self.y)
        return data if self.person is None else RecordsWithIds(data, self.person)

    def in_words(self, path: str | Path, stated: int) -> str:
        """The exact number of records: for the party alone."""
        people = "" if self.person is None else f"{factorize_ids(self.person)[1]} people, "
        return f"{path}: {people}{len(self)} records (the plan says {stated})"


class _Ragged:
    """Records of different lengths, one by one."""

    def __init__(self, X: list[npt.NDArray[np.int64]], y: npt.NDArray[Any]) -> None:
        self._X, self._y = X, y

    def __len__(self) -> int:
        return len(self._X)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        import torch

        return torch.as_tensor(self._X[place]), torch.as_tensor(self._y[place])


@dataclass(frozen=True)
class RecordFormat:
    """The public format of all parties' records for a network.

    Args:
        form: ``"images"``, ``"table"`` or ``"tokens"``.
        shape: of one picture, channels first.
        classes: the public labels; none: targets are numbers, or for tokens the tokens themselves.
        vocabulary: tokens are whole numbers from 0 to below this.
        label, person: columns of a table or of :data:`INDEX`, arrays of an npz file (``y`` unless named).
        table: the format of a table.
    """

    form: Form
    shape: tuple[int, ...] = ()
    classes: tuple[object, ...] | None = None
    vocabulary: int | None = None
    label: str | None = None
    person: str | None = None
    table: TableFormat | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> RecordFormat:
        """Read ``[data]``, whose types were checked, for a network."""
        form = data.get("form", "table")
        if form not in get_args(Form):
            raise ValueError(f"[data] form={form!r}: must be one of {', '.join(get_args(Form))}.")
        allowed = {
            "table": set(TABLE_SETTINGS), "images": {"shape", "classes", "label", "person"},
            "tokens": {"vocabulary", "classes", "label", "person"},
        }[form]  # fmt: skip
        if extra := sorted(data.keys() - allowed - {"form"}):
            raise ValueError(
                f"[data] {extra[0]}: is not for form={form!r}, which has {', '.join(sorted(allowed))}."
            )
        if form == "table":
            table = _table({name: value for name, value in data.items() if name != "form"})
            return cls("table", (table.features,), table.classes, None, table.label, table.person, table)
        shape, classes = tuple(data.get("shape", ())), data.get("classes")
        if form == "images" and (not 1 <= len(shape) <= 4 or any(n < 1 for n in shape)):
            raise ValueError("[data] shape: must be that of one picture, such as [1, 28, 28].")
        vocabulary = data.get("vocabulary")
        if form == "tokens" and (vocabulary is None or not 1 <= vocabulary < 1 << 31):
            raise ValueError("[data] vocabulary: must be how many different tokens there are.")
        if classes is not None and (len(classes) < 2 or len({str(each) for each in classes}) < len(classes)):
            raise SettingError("[data] {classes}: must be two or more different labels.", classes=classes)
        named = None if classes is None else tuple(classes)
        return cls(form, shape, named, vocabulary, data.get("label"), data.get("person"))

    @property
    def class_names(self) -> list[str] | None:
        return None if self.classes is None else [str(label) for label in self.classes]

    @property
    def features(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 0

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that ``predict`` needs to read other files like the parties'."""
        return {
            "form": self.form, "shape": list(self.shape), "vocabulary": self.vocabulary, "label": self.label,
            "features": self.features, "classes": None if self.classes is None else len(self.classes),
            "class_names": self.class_names, "task": "regression" if self.classes is None else "multiclass",
        }  # fmt: skip

    def load(self, path: str | Path, *, labelled: bool = True) -> PartyRecords:
        """Read one party's file or folder; without ``labelled`` it may lack labels, in whose place are zeros."""
        where = Path(path)
        if self.table is not None:
            return self._rows(where)
        if self.form == "tokens":
            return self._tokens(where, labelled)
        X, labels, person = self._folder(where) if where.is_dir() else self._arrays(where, labelled)
        if X.shape[1:] != self.shape:
            raise DataError(f"{path}: pictures have shape {X.shape[1:]}, the plan says {self.shape}.")
        X = X.astype(np.float32) / np.float32(255) if X.dtype == np.uint8 else X.astype(np.float32, copy=False)
        return self._checked(path, X, labels, person)

    def options(self) -> dict[str, Any]:
        """Return the options that ``run.json`` keeps for reading other files like the parties'."""
        if self.table is not None:
            return self.table.options()
        named = {"label": self.label, "person": self.person, "classes": self.classes and list(self.classes)}
        named["task"] = "regression" if self.classes is None else None
        return {name: value for name, value in named.items() if value is not None}

    def schema_text(self) -> str | None:
        return None if self.table is None else self.table.schema_text()

    def _rows(self, path: Path) -> PartyRecords:
        assert self.table is not None
        data = self.table.load(path)
        X = data.X if isinstance(data.X, np.ndarray) else data.X.toarray()
        y = np.asarray(data.y, np.float32) if self.classes is None else np.asarray(data.y, np.int64)
        return PartyRecords(X.astype(np.float32), y, data.person)

    def _arrays(self, path: Path, labelled: bool) -> tuple[npt.NDArray[Any], Any, Any]:
        """``X``, the labels and the people of an npz file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                held = {
                    name: file[name] for name in ("X", self.label or "y", self.person or "person") if name in file
                }
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: is no npz file of arrays ({type(error).__name__}).") from None
        X = held.get("X")
        if X is None or not X.ndim >= 1 or X.dtype.kind not in "uif" or X.size > _MOST_NUMBERS:
            raise DataError(f"{path}: needs an array 'X' of numbers, one picture after the other.")
        if X.ndim == len(self.shape) and self.shape[:1] == (1,):  # grey pictures without an axis of channels
            X = X[:, None]
        return X, self._named(path, held, labelled), None if self.person is None else held.get(self.person)

    def _named(self, path: Path, held: Mapping[str, Any], labelled: bool) -> Any:
        name = self.label or "y"
        if name not in held and labelled:
            raise DataError(f"{path}: needs an array {name!r} of labels.")
        return held.get(name)

    def _folder(self, path: Path) -> tuple[npt.NDArray[Any], Any, Any]:
        """PNG or JPEG files that :data:`INDEX` lists."""
        try:
            from PIL import Image
        except ImportError:
            raise DataError(f"{path}: reading PNG and JPEG needs Pillow: pip install pillow.") from None
        try:
            with (path / INDEX).open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error):
            raise DataError(f"{path}: needs {INDEX} with columns file and {self.label or 'label'}.") from None
        wanted = ["file", self.label or "label", *([] if self.person is None else [self.person])]
        if not rows or any(row.get(name) in (None, "") for row in rows for name in wanted):
            raise DataError(f"{path / INDEX}: needs rows with {', '.join(wanted)}.")
        mode = "L" if self.shape[0] == 1 else "RGB"
        pictures = np.empty((len(rows), *self.shape), np.uint8)
        for k, row in enumerate(rows):
            file_path = path / row["file"]
            if file_path.suffix.lower() not in _PICTURES or not file_path.resolve().is_relative_to(path.resolve()):
                raise DataError(f"{path / INDEX}: a file is no PNG or JPEG in this folder.")
            try:
                with Image.open(file_path, formats=("PNG", "JPEG")) as picture:
                    array = np.asarray(picture.convert(mode))
            except (OSError, ValueError, Image.DecompressionBombError):
                raise DataError(f"{path}: a picture cannot be read.") from None
            channels_first = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
            if channels_first.shape != self.shape:
                raise DataError(f"{path}: a picture has another shape than the plan's {self.shape}.")
            pictures[k] = channels_first
        labels = [row[self.label or "label"] for row in rows]
        person = None if self.person is None else np.array([row[self.person] for row in rows])
        return pictures, np.array(labels), person

    def _tokens(self, path: Path, labelled: bool) -> PartyRecords:
        """A parquet file with a column ``tokens`` of lists of whole numbers."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        wanted = ["tokens", *(name for name in (self._label_column, self.person) if name is not None)]
        try:
            table = pq.read_table(path)
            held = {name: table.column(name).to_pylist() for name in wanted if name in table.column_names}
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: is no parquet file ({type(error).__name__}).") from None
        try:
            X = [np.asarray(record, np.int64) for record in held["tokens"]]
            good = all(x.ndim == 1 and x.size and x.min() >= 0 and x.max() < (self.vocabulary or 0) for x in X)
        except (KeyError, TypeError, ValueError, OverflowError):
            good = False
        if not good:
            raise DataError(
                f"{path}: needs a column 'tokens' of lists of whole numbers, one at least and below "
                f"vocabulary={self.vocabulary}."
            )
        person = None if self.person is None else np.array(held.get(self.person))
        if self._label_column is None:
            return self._checked(path, X, np.empty(len(X), object), person, targets=X)
        labels = held.get(self._label_column)
        if labels is None and labelled:
            raise DataError(f"{path}: needs a column {self._label_column!r} of labels.")
        return self._checked(path, X, None if labels is None else np.array(labels), person)

    @property
    def _label_column(self) -> str | None:
        return self.label or (None if self.classes is None else "label")

    def _checked(self, path: str | Path, X: Any, labels: Any, person: Any, targets: Any = None) -> PartyRecords:
        """Labels as codes or numbers; as many labels and ids as records."""
        n = len(X)
        if targets is not None:
            y = np.empty(n, object)
            y[:] = targets
        elif labels is None:
            y = np.zeros(n, np.float32 if self.classes is None else np.int64)
        elif self.classes is None:
            try:
                y = np.asarray(labels, np.float32)
            except ValueError:
                raise DataError(f"{path}: labels are not numbers; name the public classes in [data].") from None
        else:
            y = np.asarray(encode_labels(str(path), np.asarray(labels), "multiclass", self.classes).y, np.int64)
        if self.person is not None and (person is None or len(person) != n):
            raise DataError(f"{path}: needs {self.person!r}, one id of a person per record.")
        if len(y) != n or n < 1:
            raise DataError(f"{path}: needs one label per record, and one record at least.")
        if isinstance(X, np.ndarray) and not np.isfinite(X).all():
            raise DataError(f"{path}: holds a number that is not finite; clean the records first.")
        return PartyRecords(X, y, person, labelled=targets is not None or labels is not None)


def _table(data: Mapping[str, Any]) -> TableFormat:
    """The format of a table for a network: classes, or their absence, decide the task."""
    from quietgrad.data.schema import read_schema

    classified = "classes" in data if "schema" not in data else read_schema(data["schema"]).classes is not None
    return TableFormat.of(data, "multiclass" if classified else "regression")
