"""The page of reproductions: whole, self-contained, a picture for every result file and a word for each of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAPERS = {"000": 5, "001": 2, "002": 16, "003": 0, "004": 0}  # figures of each


@pytest.fixture(scope="module")
def made() -> tuple[str, dict[str, object]]:
    script = runpy.run_path(str(ROOT / "reproduce" / "page.py"))
    return script["page"](), script["PICTURES"]


def test_the_page_is_one_file_that_fetches_nothing(made: tuple[str, dict[str, object]]) -> None:
    text, _ = made
    assert text.startswith("<!doctype html>")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text


def test_every_picture_is_drawn_once_and_told(made: tuple[str, dict[str, object]]) -> None:
    text, pictures = made
    source = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- picture: (\w+) -->", source)) == set(pictures)
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) >= 6
    for figure in figures:
        told = re.search(r'<svg role="img" aria-label="([^"]{40,})"', figure)
        assert told is not None
        assert "<title>" in figure
        assert "#0a0b0c" not in figure  # ink is the page's own
        assert len(re.findall(r"<path ", figure)) > 10  # no blank chart
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_every_figure_of_the_papers_has_a_row() -> None:
    text = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    table = text.partition("| table or figure |")[2].partition("\n## ")[0]
    for paper, last in PAPERS.items():
        rows = re.findall(rf"^\| {paper} figures? ([^|]*)\|", table, re.MULTILINE)
        named = {number for row in rows for number in _numbers(re.sub(r"\([^)]*\)", "", row))}
        assert named == set(range(1, last + 1)), paper
    for paper, tables in {"000": range(1, 7), "004": range(1, 4)}.items():
        rows = re.findall(rf"^\| {paper} tables? ([^|]*)\|", table, re.MULTILINE)
        assert {number for row in rows for number in _numbers(row)} == set(tables), paper


def _numbers(text: str) -> set[int]:
    found = set()
    for first, last in re.findall(r"(\d+)(?:–(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found
