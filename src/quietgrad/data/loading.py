"""`load`: a registered name or a file becomes a checked `Dataset`; and the data set of a first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quietgrad.core import files
from quietgrad.core.errors import DataError
from quietgrad.data.address import Address
from quietgrad.data.address import public as public_source
from quietgrad.data.builtin import BUILDERS
from quietgrad.data.dataset import Dataset, Task, check, check_task, encode_labels, normalized
from quietgrad.data.file_formats import parse_libsvm, parse_npz, read_content
from quietgrad.data.registry import entry, fetch, locate, read_verified
from quietgrad.data.schema import Schema, SchemaSource, read_schema

if TYPE_CHECKING:
    from quietgrad.data.tables import ColumnOptions

Format = Literal["libsvm", "csv", "npz", "parquet"]
_SUFFIXES: Mapping[str, Format] = {
    ".csv": "csv", ".tsv": "csv", ".xlsx": "csv", ".npz": "npz", ".parquet": "parquet", ".pq": "parquet",
    ".txt": "libsvm", ".libsvm": "libsvm", ".svm": "libsvm", ".t": "libsvm", ".svmlight": "libsvm",
}  # fmt: skip


def load(
    source: str | Path,
    *,
    schema: SchemaSource | None = None,
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
    """Load a registered data set by name, or a LIBSVM, CSV, npz, parquet or xlsx file.

    An existing file wins over a name. Registered sets are searched in QUIETGRAD_DATA, then in the cache, then
    fetched unless `download=False`; their public facts are in the registry. For a file, declare its public facts:
    `schema` (CSV, parquet), `classes` or `task`, `n_features` (LIBSVM), `label` (CSV, parquet; else the last
    column). `test` is a second file of the same kind. `format` is needed if the suffix does not show it.
    `normalize_rows` scales rows to norm ≤ 1. `person` names the column (CSV, parquet) of the ids of the people that
    rows are about; it is no feature. `keep` names a column of ids to print beside predictions, and `drop` columns
    to leave out. `delimiter` and `encoding` describe delimited text, if the schema does not. `labelled=False` reads
    a file without labels (CSV, parquet); `y` then says nothing.

    >>> data = load("breast-cancer", normalize_rows=True)
    >>> data.X.shape, data.X_test.shape, data.row_bound
    ((456, 30), (113, 30), 1.0)
    """
    check_task(task)
    source, test = public_source(source), public_source(test)
    if isinstance(source, Address) or isinstance(test, Address):
        raise DataError(f"{source if isinstance(source, Address) else test}: is an address; open it with scan().")
    path = Path(source)
    if path.exists() and not path.is_dir():  # a folder may well be called like a registered set
        public = read_schema(schema) if schema is not None else None
        said: ColumnOptions = {
            "label": label, "task": task, "classes": classes, "person": person, "drop": drop, "keep": keep,
            "labelled": labelled,
        }  # fmt: skip
        data = _read(path, format, public, n_features, delimiter, encoding, said)
        if test is not None:
            if not Path(test).exists():
                raise DataError(f"{test}: no such test file.")
            if classes is None and public is None and data.class_names is not None:
                said["classes"] = data.class_names  # the pair of the training file
            other = _read(Path(test), format, public, data.d, delimiter, encoding, said)
            undeclared = data.undeclared + other.undeclared
            data = replace(data, X_test=other.X, y_test=other.y, person_test=other.person, undeclared=undeclared)
            data = check(data)
    elif path.parent != Path(".") or path.suffix:
        raise DataError(f"{source}: no such file.")
    else:
        given = {"schema": schema, "label": label, "task": task, "classes": classes, "test": test, "person": person,
                 "delimiter": delimiter, "encoding": encoding, "keep": keep, "drop": drop or None}  # fmt: skip
        if extra := [k for k, v in given.items() if v is not None]:
            raise DataError(f"{source} is a registered data set; {extra[0]}= applies to files only.")
        name = str(source)
        wanted = entry(name)
        if locate(name) is None:
            if not download:
                raise DataError(
                    f"{name} is not on this machine. Run `quietgrad data fetch {name}` or set QUIETGRAD_DATA."
                )
            fetch(name)
        found = locate(name)
        assert found is not None
        contents, remarks = read_verified(*found)
        data = BUILDERS[wanted.build](wanted, contents)
        data = check(replace(data, notes=(*data.notes, *remarks)))
    if normalize_rows:
        data = normalized(data)
    if dtype not in (None, "float32", "float64"):
        raise DataError(f"dtype={dtype!r}: must be 'float32' or 'float64'.")
    if dtype is not None:
        X: Any = data.X.astype(dtype)
        X_test: Any = None if data.X_test is None else data.X_test.astype(dtype)
        data = replace(data, X=X, X_test=X_test)
    return data


def _read(
    path: Path,
    format: Format | None,
    schema: Schema | None,
    n_features: int | None,
    delimiter: str | None,
    encoding: str | None,
    said: ColumnOptions,
) -> Dataset:
    files.check_regular(path)
    name = path.name
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".bz2")]
    kind = format or _SUFFIXES.get(suffixes[-1] if suffixes else ".libsvm")  # LIBSVM's own have none: a9a.bz2
    if kind is None:
        raise DataError(
            f"{path}: unknown kind of file {suffixes[-1]!r}. Known: {', '.join(_SUFFIXES)} (also .gz, .bz2); "
            "or say format='csv', 'libsvm', 'npz' or 'parquet'."
        )
    if kind in ("csv", "parquet"):
        from quietgrad.data.tables import parse_csv, read_parquet

        if kind == "parquet":
            return read_parquet(path, schema, **said)
        return parse_csv(read_content(path), schema, name=name, delimiter=delimiter, encoding=encoding, **said)
    if said["person"] is not None or said["keep"] is not None or said["drop"]:
        raise DataError(
            f"{name}: people's ids are read from a column of a CSV or parquet file; so are keep and drop."
        )
    content = read_content(path)
    if kind == "npz":
        return parse_npz(content, task=said["task"], classes=said["classes"], name=name)
    X, raw = parse_libsvm(content, n_features, name=name)
    labels = encode_labels(name, raw, said["task"], said["classes"])
    note = "d is the largest feature index seen; declare n_features to make it public"
    notes = () if n_features is not None else (note,)
    return check(Dataset(name, X, labels.y, notes=notes, **labels.facts))


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
