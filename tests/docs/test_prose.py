"""The language of pages and of raised texts: actors are named, and no page is a wall of one sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "quietgrad"
DOCS = ROOT / "docs"
WRITTEN = {DOCS / "api" / "registered.md"}
"""From the registries: certificates hold the texts of adversaries, which therefore stay as they are."""

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(set(DOCS.rglob("*.md")) - WRITTEN)]
LISTS = [page for page in PAGES if "reproductions" in page.parts or page.name == "papers.md"]
"""Pages whose sentences list the numbers of a paper's rows."""

NO_ACTOR = re.compile(
    r"\b(nobody|no one|whoever|whomever|whom|somebody|someone|everybody|anybody)\b", re.IGNORECASE
)
"""Name the actor instead: party, coordinator, user, attacker, person, record."""

CODE = re.compile(r"^ *```.*?^ *```|<svg.*?</svg>|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def literal(node: ast.expr) -> str:
    """The text of a string as it is written; names in braces are left out."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return ""


def raised(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a module raises."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from ((node.lineno, literal(argument)) for argument in node.exc.args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_its_actors(page: Path) -> None:
    assert NO_ACTOR.findall(prose(page)) == []


def test_errors_name_their_actors() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{line}": words
        for path in SOURCE.rglob("*.py")
        for line, text in raised(path)
        if (words := NO_ACTOR.findall(text))
    }
    assert found == {}


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(LISTS)), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_sentence_of_more_than_sixty_words(page: Path) -> None:
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) ?)", prose(page))
    lines = [
        " ".join(part.split()) for part in paragraphs if " · " not in part and not part.lstrip().startswith("|")
    ]
    sentences = [sentence for line in lines for sentence in re.split(r"(?<=[.?!:])\s+", line)]
    assert [sentence for sentence in sentences if len(sentence.split()) > 60] == []
