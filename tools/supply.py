"""What quietgrad stands on: the packages it was tested with, their licences, and what the index says of them.

    python tools/supply.py lock        write constraints.txt from what is installed here
    python tools/supply.py licences    write docs/licences.md from the installed metadata
    python tools/supply.py check       fail on direct dependencies that are yanked, archived or long unmaintained

``lock`` and ``licences`` need nothing but this environment. ``check`` asks the package index that pip is set up
for; what it does not tell (a project that is abandoned in silence) is judged by the age of its newest release.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("torch", "hf", "federated", "report", "logs", "data", "excel", "onnx", "cluster", "zoo", "docs", "dev")
OLD = 3 * 365  # days without any release: unmaintained as far as the index tells
_STATUS = ("archived", "deprecated", "quarantined")


def direct() -> dict[str, Requirement]:
    """The requirements of pyproject.toml, extras included, by canonical name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(x for name in EXTRAS for x in project["optional-dependencies"][name])]
    wanted = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in wanted if each.name != "quietgrad"}


def closure() -> dict[str, Distribution]:
    """Everything that is installed because of the direct requirements, by canonical name."""
    found: dict[str, Distribution] = {}
    ask = list(direct().values())
    while ask:
        wanted = ask.pop()
        name = canonicalize_name(wanted.name)
        try:
            installed = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        known = name in found
        found[name] = installed
        for line in installed.requires or ():
            needs = Requirement(line)
            extras = wanted.extras or {""}
            applies = needs.marker is None or any(needs.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and (not known or wanted.extras) and canonicalize_name(needs.name) not in found:
                ask.append(needs)
    return dict(sorted(found.items()))


def lock() -> None:
    """Write the tested set; ``pip install -c constraints.txt quietgrad`` takes exactly these."""
    about = "# The set that the tests run with; made by tools/supply.py lock. pip install -c constraints.txt …\n"
    lines = [f"{name}=={found.version.partition('+')[0]}" for name, found in closure().items()]
    (ROOT / "constraints.txt").write_text(about + "\n".join(lines) + "\n")
    print(f"constraints.txt: {len(lines)} packages")


def licence(found: Distribution) -> str:
    """What a package's metadata says about its licence, in a few words."""
    meta = found.metadata
    if expression := meta.get("License-Expression"):
        return str(expression)
    classed = [
        line.rpartition(" :: ")[2] for line in meta.get_all("Classifier") or () if line.startswith("License ::")
    ]
    if classed:
        return ", ".join(dict.fromkeys(classed))
    text = str(meta.get("License") or "").strip().splitlines()
    return text[0][:80] if text else "not stated in its metadata"


def licences() -> None:
    """Write the page of licences."""
    mine = direct()
    lines = [
        "# Licences of what quietgrad stands on",
        "",
        "Made by `python tools/supply.py licences` from the metadata of the installed packages. quietgrad itself",
        "is Apache-2.0. Packages in bold are asked for by quietgrad or an extra; the others come with them.",
        "",
        "| package | version | licence, as its metadata says |",
        "|---|---|---|",
    ]
    for name, found in closure().items():
        shown = f"**{name}**" if name in mine else name
        lines.append(f"| {shown} | {found.version.partition('+')[0]} | {licence(found).replace('|', '/')} |")
    (ROOT / "docs" / "licences.md").write_text("\n".join(lines) + "\n")
    print(f"docs/licences.md: {len(lines) - 7} packages")


def judged(name: str, pages: list[dict[str, Any]], today: datetime.date) -> list[str]:
    """What the index's pages about one project give reason to worry about."""
    files = [file for page in pages for file in page.get("files", ())]
    if not files:
        return [f"{name}: no index has a file of it"]
    said = {str(page.get("project-status", {}).get("status", "")) for page in pages}
    problems = [f"{name}: the index calls it {status}" for status in sorted(said & set(_STATUS))]
    version = distribution(name).version.partition("+")[0]
    mine = [file for file in files if _version_of(name, str(file["filename"])) == version]
    if mine and all(file.get("yanked") for file in mine):
        problems.append(f"{name}: version {version}, with which it was tested, was yanked: {mine[0]['yanked']}")
    days = [str(file["upload-time"])[:10] for file in files if file.get("upload-time")]
    if days and (today - datetime.date.fromisoformat(max(days))).days > OLD:
        problems.append(f"{name}: no release since {max(days)}")
    return problems


def _version_of(name: str, filename: str) -> str | None:
    plain = re.sub(r"\.(tar\.gz|zip|whl)$", "", filename)
    match = re.match(re.sub(r"[-_.]+", "[-_.]+", re.escape(name).replace("\\-", "-")) + r"-([^-]+)", plain, re.I)
    try:
        return str(Version(match[1])) if match else None
    except InvalidVersion:
        return None


class _Files(HTMLParser):
    """The files of a page for people (PEP 503, 592): it has no dates."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[dict[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if tag == "a" and said.get("href"):
            address = urllib.parse.urlparse(str(said["href"])).path
            yanked = "data-yanked" in said and (said["data-yanked"] or True)
            self.files.append({"filename": urllib.parse.unquote(address).rpartition("/")[2], "yanked": yanked})


def parsed(content: bytes) -> dict[str, Any]:
    """A page of an index, whichever of the two kinds it is."""
    try:
        page = json.loads(content)
        return page if isinstance(page, dict) else {}
    except ValueError:
        reader = _Files()
        reader.feed(content.decode(errors="replace"))
        return {"files": reader.files}


def pages_of(name: str, places: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each index says about a project (PEP 691 and 700, else 503); an index may be a folder."""
    for place in places:
        where = f"{place.rstrip('/')}/{name}/"
        try:
            if urllib.parse.urlparse(place).scheme == "file":
                folder = Path(urllib.request.url2pathname(urllib.parse.urlparse(where).path))
                if (folder / "index.html").exists():
                    yield parsed((folder / "index.html").read_bytes())
                elif folder.is_dir():
                    yield {"files": [{"filename": path.name} for path in folder.iterdir()]}
                continue
            kinds = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
            with urllib.request.urlopen(
                urllib.request.Request(where, headers={"Accept": kinds}), timeout=20
            ) as got:
                yield parsed(got.read(64 << 20))
        except (OSError, ValueError):
            continue


def check(places: Sequence[str]) -> int:
    """Judge every direct dependency; 1 if one gives reason to worry, 2 if no index answered."""
    today = datetime.datetime.now(datetime.UTC).date()
    problems: list[str] = []
    asked = 0
    for name in sorted(direct()):
        pages = list(pages_of(name, places))
        asked += bool(pages)
        if pages:
            problems += judged(name, pages, today)
    for problem in problems:
        print(problem)
    print(f"{asked} of {len(direct())} direct dependencies were found on an index; {len(problems)} problems")
    return 1 if problems else 0 if asked else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lock", "licences", "check"))
    what = parser.parse_args().what
    if what == "check":
        from quietgrad.data.download import _places

        return check(_places())
    lock() if what == "lock" else licences()
    return 0


if __name__ == "__main__":
    sys.exit(main())
