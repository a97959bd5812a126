"""Draw the rooms of the library and who imports whom, from the import graph: `python tools/street.py OUT.svg`.

Rows are the layers of the import contract in pyproject.toml, the lowest at the bottom. A line goes from a room to a
room that it imports, unless another line leads there by way of a third room. `make docs` draws it into the site.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quietgrad"
WIDE, HIGH, GAP, ROW, MARGIN = 132, 40, 24, 78, 20


def layers() -> list[list[str]]:
    """The rooms of each layer, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [
        [room.strip().removeprefix("quietgrad.") for room in layer.split(":")] for layer in contracts[0]["layers"]
    ]


def imports() -> Counter[tuple[str, str]]:
    """How many modules of one room import another room."""
    graph = grimp.build_graph("quietgrad", exclude_type_checking_imports=True, cache_dir=None)
    known = {room for layer in layers() for room in layer}
    seen: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        rooms = {room_of(found, known) for found in graph.find_modules_directly_imported_by(module)} - {""}
        seen.update((room_of(module, known), room) for room in rooms if room_of(module, known))
    return Counter({pair: count for pair, count in seen.items() if pair[0] != pair[1]})


def room_of(module: str, known: set[str]) -> str:
    """The room that a module is in, such as assurance.audit; empty for one that is in none."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in known), "")


def direct(pairs: Counter[tuple[str, str]], rooms: set[str]) -> dict[tuple[str, str], int]:
    """The imports that no way round by a third room implies."""
    below = {room: {b for a, b in pairs if a == room and b in rooms} for room in rooms}

    def reached(room: str) -> set[str]:
        return below[room].union(*map(reached, below[room]))

    return {
        (a, b): count
        for (a, b), count in pairs.items()
        if a in rooms and b in below[a] and not any(b in reached(other) for other in below[a] - {b})
    }


def lines(room: str) -> int:
    """Lines of a room."""
    home = SOURCE / room.replace(".", "/")
    files = home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]
    return sum(len(file.read_text().splitlines()) for file in files)


def svg() -> str:
    """The picture; it takes its colours from the page, so that it is readable in the dark."""
    rows = layers()
    width = MARGIN * 2 + max(len(row) for row in rows) * (WIDE + GAP) - GAP
    place = {
        room: (
            width / 2 + (k - (len(row) - 1) / 2 + _aside(level, row)) * (WIDE + GAP),
            MARGIN + HIGH / 2 + level * ROW,
        )
        for level, row in enumerate(rows)
        for k, room in enumerate(row)
    }
    height = MARGIN * 2 + (len(rows) - 1) * ROW + HIGH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
        'font-size="13" role="img"><title>The rooms of quietgrad and who imports whom</title>'
        "<style>line{stroke:#5b7a99;opacity:.7}rect{fill:#eef3f8;stroke:#5b7a99}text{fill:#14212e}"
        "@media(prefers-color-scheme:dark){rect{fill:#1d2a36}text{fill:#e8eef4}}</style>"
    ]
    for (above, below), count in sorted(direct(imports(), set(place)).items()):
        (x1, y1), (x2, y2) = place[above], place[below]
        parts.append(
            f'<line x1="{x1:g}" y1="{y1 + HIGH / 2:g}" x2="{x2:g}" y2="{y2 - HIGH / 2:g}" stroke-width="1.5">'
            f"<title>{escape(above)} → {escape(below)}: {count} modules</title></line>"
        )
    for room, (x, y) in place.items():
        parts.append(
            f'<rect x="{x - WIDE / 2:g}" y="{y - HIGH / 2:g}" width="{WIDE}" height="{HIGH}" rx="5"/>'
            f'<text x="{x:g}" y="{y - 2:g}" text-anchor="middle" font-weight="600">{escape(room)}</text>'
            f'<text x="{x:g}" y="{y + 13:g}" text-anchor="middle" font-size="11">{lines(room):,} lines</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _aside(level: int, row: list[str]) -> float:
    """Rows of one room stand left and right in turn, so that lines past them can be seen."""
    return (-1.5, 0.0, 1.5, 0.6, -0.6)[level % 5] if len(row) == 1 else 0.0


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg())
