"""docs/questions.md: what each row names is in the section it links to; README and front page link to the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_pages import anchors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "questions.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| question")
]


def section(page: Path, anchor: str) -> str:
    """The text below a heading, with its parts; the whole page without an anchor."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start, depth, fenced = 0, 0, False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        head = re.match(r"(#+) (.*)", line)
        if fenced or head is None or not anchor:
            continue
        slug = re.sub(r"[^\w\- ]", "", head[2].replace("`", "")).strip().lower().replace(" ", "-")
        if slug == anchor:
            start, depth = number, len(head[1])
        elif depth and len(head[1]) <= depth:
            return "\n".join(lines[start:number])
    return "\n".join(lines[start:])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_answer_is_in_the_section_that_it_links_to(row: tuple[str, str, str]) -> None:
    question, answer, more = row
    assert question.endswith(("?", "."))
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", more)
    assert links
    for target, anchor in links:
        assert not anchor or anchor in anchors(DOCS / target)
    text = "\n".join(section(DOCS / target, anchor) for target, anchor in links)
    names = re.findall(r"`([^`]+)`", answer)
    words = {word for name in names for word in re.findall(r"--[\w-]+|\w[\w.]+", name)} - {
        "qt",
        "nn",
        "frame",
        "sex",
    }
    assert not {word for word in words if word not in text and word.rpartition(".")[2] not in text}


def test_the_page_is_one_click_from_the_readme_and_from_the_front_page() -> None:
    assert len(ROWS) >= 20
    assert "](docs/questions.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](questions.md)" in (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("room", ["core", "tables", "torch/networks"])
def test_the_size_of_what_must_be_trusted(room: str) -> None:
    """The page of the architecture is right to a tenth."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    stated = re.search(rf"`{room}/` \(([\d ]+)( lines)?\)", page)
    assert stated is not None
    files = (ROOT / "src" / "quietgrad" / room).rglob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert int(stated[1].replace(" ", "")) == pytest.approx(lines, rel=0.1)


def test_every_recipe_that_the_architecture_names_exists() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    recipes = re.findall(r"Recipe: ([\w ]+?) \|", page)
    heads = re.findall(r"^### ([^:\n]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(recipes) >= 6
    assert set(recipes) <= set(heads)
