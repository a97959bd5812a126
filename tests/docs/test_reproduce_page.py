"""The page of reproductions: one file, every table and figure of the papers under its number, drawn and told."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {"000": 5, "001": 2, "002": 16, "003": 0, "004": 0}
TABLES = {"000": 6, "001": 0, "002": 0, "003": 0, "004": 3}
NOTHING_TO_RUN = {"000-table-1", "004-table-1", "004-table-2"}  # rates and sizes


@pytest.fixture(scope="module")
def made() -> tuple[str, list[Any]]:
    before = list(sys.path)
    try:
        script = runpy.run_path(str(ROOT / "reproduce" / "page.py"))
    finally:
        sys.path[:] = before
    return script["page"](), list(script["exhibits"]())


def section(text: str, anchor: str) -> str:
    """The markup of one exhibit."""
    return text.partition(f'id="{anchor}"')[2].partition("</section>")[0]


def test_the_page_is_one_file_that_fetches_nothing(made: tuple[str, list[Any]]) -> None:
    text, _ = made
    assert text.startswith("<!doctype html>")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    assert "<script" not in text
    assert "prefers-color-scheme:dark" in text
    assert '<table class="prose">' in text  # sentences are no columns on a narrow screen
    assert 'data-head="state"' in text
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_every_table_and_figure_of_the_papers_is_an_exhibit(made: tuple[str, list[Any]]) -> None:
    text, found = made
    anchors = {exhibit.anchor for exhibit in found}
    wanted = {
        f"{paper}-{kind}-{k}"
        for kind, counts in (("figure", FIGURES), ("table", TABLES))
        for paper, last in counts.items()
        for k in range(1, last + 1)
    }
    assert wanted <= anchors
    for exhibit in found:
        mine = section(text, exhibit.anchor)
        assert mine.count("<figure>") == len(exhibit.charts)
        assert mine.count('role="img"') == len(exhibit.charts)
        assert mine.count("<tr>") == (len(exhibit.rows) + 1 if exhibit.rows else 0)
        if exhibit.anchor in wanted - NOTHING_TO_RUN:
            assert exhibit.charts or exhibit.rows
        if "figure" in exhibit.name:
            assert exhibit.charts


def test_no_chart_is_blank_and_none_is_wider_than_a_phone(made: tuple[str, list[Any]]) -> None:
    text, found = made
    for exhibit in found:
        for chart in exhibit.charts:
            assert any(len(line.points) > 1 for line in chart.drawn.values()), (exhibit.anchor, chart.title)
            assert len(chart.series) <= 7, "colours would come again"
            assert "<polyline" in chart.svg()
    bare = re.findall(r'(?<!<div class="scroll">)<table(?! class="prose")', text)
    assert not bare  # wide tables scroll by themselves, and those of sentences become lists


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Words, left, right, top and bottom of each label at the 16 px that the page gives it."""
    labels = re.findall(r'<text [^>]*x="([^"]+)" y="([^"]+)" text-anchor="(\w+)">([^<]*)</text>', svg)
    spans = []
    for x, y, anchor, words in labels:
        width = (8.0 if re.search("[a-z]", words) else 9.6) * len(words)  # means; digits are wider
        left = float(x) - {"start": 0.0, "middle": width / 2.0, "end": width}[anchor]
        spans.append((words, left, left + width, float(y) - 15.0, float(y) + 4.0))
    return spans


def test_labels_are_neither_cut_nor_touch_on_a_phone(made: tuple[str, list[Any]]) -> None:
    charts = [(exhibit.anchor, chart.svg()) for exhibit in made[1] for chart in exhibit.charts]
    assert len(charts) > 100
    for anchor, svg in charts:
        width, height = map(float, re.findall(r'viewBox="0 0 (\S+) ([^"]+)"', svg)[0])
        spans = boxes(svg)
        assert len(spans) > 4
        for k, (words, left, right, top, bottom) in enumerate(spans):
            assert 0 <= left <= right <= width, (anchor, words)
            assert 0 <= top <= bottom <= height, (anchor, words)
            for other, start, end, above, below in spans[k + 1 :]:
                touch = min(right, end) > max(left, start) and min(bottom, below) > max(top, above) + 1.0
                assert not touch, (anchor, words, other)


def test_panels_are_lettered(made: tuple[str, list[Any]]) -> None:
    text, found = made
    for exhibit in found:
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", section(text, exhibit.anchor))
        if len(captions) > 1:
            assert [caption[:3] for caption in captions] == [
                f"({'abcdefghijklm'[k]})" for k in range(len(captions))
            ]


@pytest.mark.parametrize(
    ("anchor", "column", "value"),
    [
        ("000-table-2", "test loss: paper", 0.3598),
        ("000-figure-4", "test error %: paper", 48.2),
        ("004-table-3", "paper", 0.3983),
    ],
)
def test_printed_numbers_stand_beside_ours(
    made: tuple[str, list[Any]], anchor: str, column: str, value: float
) -> None:
    exhibit = next(each for each in made[1] if each.anchor == anchor)
    assert value in [row[exhibit.columns.index(column)] for row in exhibit.rows]
