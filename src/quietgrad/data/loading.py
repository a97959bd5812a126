"""`load`: a registered name or a file becomes a checked `Dataset`; and the data set of a first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quietgrad import files
from quietgrad.data.dataset import Dataset, Task, check, check_task, encode_labels, normalized
from quietgrad.data.file_formats import parse_libsvm, parse_npz, read_content
from quietgrad.data.registry import entry, fetch, locate, read_verified
from quietgrad.data.schema import Schema, read_schema
from quietgrad.data.tables import parse_csv, read_parquet
from quietgrad.errors import DataError

Format = Literal["libsvm", "csv", "npz", "parquet"]
_SUFFIXES: Mapping[str, Format] = {
    ".csv": "csv", ".tsv": "csv", ".npz": "npz", ".parquet": "parquet", ".pq": "parquet",
    ".txt": "libsvm", ".libsvm": "libsvm", ".svm": "libsvm", ".t": "libsvm", ".svmlight": "libsvm",
}  # fmt: skip


def load(
    source: str | Path,
    *,
    schema: Schema | Mapping[str, Any] | str | Path | None = None,
    label: str | None = None,
    task: Task | None = None,
    classes: Sequence[object] | None = None,
    n_features: int | None = None,
    test: str | Path | None = None,
    format: Format | None = None,
    normalize_rows: bool = False,
    dtype: Literal["float32", "float64"] | None = None,
    download: bool = True,
    person: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    drop: Sequence[str] = (),
    keep: str | None = None,
    labelled: bool = True,
) -> Dataset:
    """Load a registered data set by name, or a LIBSVM, CSV, npz or parquet file.

    An existing file wins over a name. Registered sets are searched in QUIETGRAD_DATA, then in the cache, then
    fetched unless `download=False`; their public facts are in the registry. For a file say what is public:
    `schema` (CSV, parquet), `classes` or `task`, `n_features` (LIBSVM), `label` (CSV, parquet; the last column
    otherwise), `test` (a second file of the same kind), `format` if the suffix does not tell. `normalize_rows`
    scales rows to norm ≤ 1.
    `person` names the column (CSV, parquet) of the ids of the people that rows are about; it is no feature. `keep`
    names a column of ids that stand beside predictions, `drop` columns that are left out; `delimiter` and
    `encoding` say how delimited text is written, if the schema does not.
    `labelled=False` reads a file without labels (CSV, parquet); `y` then says nothing.

    >>> data = load("breast-cancer", normalize_rows=True)
    >>> data.X.shape, data.X_test.shape, data.row_bound
    ((456, 30), (113, 30), 1.0)
    """
    check_task(task)
    path = Path(source)
    if path.exists() and not path.is_dir():  # a folder may well be called like a registered set
        files.check_regular(path)
        public = read_schema(schema) if schema is not None else None
        facts: dict[str, Any] = {
            "schema": public, "label": label, "task": task, "person": person, "drop": drop, "keep": keep,
            "delimiter": delimiter, "encoding": encoding, "labelled": labelled,
        }  # fmt: skip
        data = _read(path, format, classes=classes, n_features=n_features, **facts)
        if test is not None:
            data = _with_test(data, Path(test), format, classes, facts)
    elif path.parent != Path(".") or path.suffix:
        raise DataError(f"{source}: no such file.")
    else:
        given = {"schema": schema, "label": label, "task": task, "classes": classes, "test": test, "person": person,
                 "delimiter": delimiter, "encoding": encoding, "keep": keep, "drop": drop or None}  # fmt: skip
        if extra := [k for k, v in given.items() if v is not None]:
            raise DataError(f"{source} is a registered data set; {extra[0]}= applies to files only.")
        data = _registered(str(source), download)
    if normalize_rows:
        data = normalized(data)
    return data if dtype is None else _cast(data, dtype)


def _registered(name: str, download: bool) -> Dataset:
    wanted = entry(name)
    if locate(name) is None:
        if not download:
            raise DataError(
                f"{name} is not on this machine. Run `quietgrad data fetch {name}` or set QUIETGRAD_DATA."
            )
        fetch(name)
    found = locate(name)
    if found is None:
        raise DataError(f"{name}: the fetched files disappeared from the cache; fetch again.")
    holder, paths = found
    contents, remarks = read_verified(holder, paths)
    data = wanted.build(contents)
    return check(replace(data, notes=(*data.notes, *remarks)))


def _read(
    path: Path,
    format: Format | None,
    *,
    schema: Schema | None,
    label: str | None,
    task: Task | None,
    classes: Sequence[object] | None,
    n_features: int | None,
    person: str | None,
    drop: Sequence[str],
    keep: str | None,
    delimiter: str | None,
    encoding: str | None,
    labelled: bool,
) -> Dataset:
    name = path.name
    kind = format or _guess(path)
    if (person is not None or keep is not None or drop) and kind not in ("csv", "parquet"):
        raise DataError(
            f"{name}: people's ids are read from a column of a CSV or parquet file; so are keep and drop."
        )
    said: dict[str, Any] = {
        "label": label, "task": task, "classes": classes, "name": name, "person": person, "drop": drop,
        "keep": keep, "labelled": labelled,
    }  # fmt: skip
    if kind == "parquet":
        return read_parquet(path, schema, **said)
    content = read_content(path)
    if kind == "npz":
        return parse_npz(content, task=task, classes=classes, name=name)
    if kind == "csv":
        return parse_csv(content, schema, delimiter=delimiter, encoding=encoding, **said)
    X, raw = parse_libsvm(content, n_features, name=name)
    y, found, codes, names = encode_labels(name, raw, task, classes)
    notes = (
        ()
        if n_features is not None
        else ("d is the largest feature index seen; declare n_features to make it public",)
    )
    return check(Dataset(name, X, y, task=found, classes=codes, class_names=names, notes=notes))


def _with_test(
    data: Dataset, path: Path, format: Format | None, classes: Sequence[object] | None, facts: dict[str, Any]
) -> Dataset:
    if not path.exists():
        raise DataError(f"{path}: no such test file.")
    if classes is None and facts["schema"] is None and data.class_names is not None:
        classes = tuple(int(c) for c in data.class_names)  # the test labels must use the training file's pair
    other = _read(path, format, classes=classes, n_features=data.d, **facts)
    return check(replace(data, X_test=other.X, y_test=other.y, person_test=other.person))


def _guess(path: Path) -> Format:
    suffixes = [s for s in path.suffixes if s not in (".gz", ".bz2", ".xz")]
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    if not suffixes:
        return "libsvm"  # LIBSVM's own files carry no suffix: a9a.bz2
    raise DataError(
        f"{path}: unknown kind of file {suffixes[-1]!r}. Known: {', '.join(_SUFFIXES)} (also .gz, .bz2, .xz); "
        "or say format='csv', 'libsvm', 'npz' or 'parquet'."
    )


def _cast(data: Dataset, dtype: Literal["float32", "float64"]) -> Dataset:
    if dtype not in ("float32", "float64"):
        raise DataError(f"dtype={dtype!r}: must be 'float32' or 'float64'.")
    kind = np.dtype(dtype)
    test = None if data.X_test is None else data.X_test.astype(kind)
    return replace(data, X=data.X.astype(kind), X_test=test)


def demo_dataset(*, download: bool = True) -> Dataset:
    """a9a from QUIETGRAD_DATA, the cache, or one small package (Adult, rebuilt exactly); offline breast-cancer.

    `notes` say which was used and why. Never fails for want of data.
    """
    try:
        data = load("a9a", download=download)
        return replace(data, notes=(*data.notes, "demo data: a9a"))
    except DataError as error:
        data = load("breast-cancer")
        return replace(
            data, notes=(*data.notes, f"demo data: breast-cancer, because a9a was not available ({error})")
        )
