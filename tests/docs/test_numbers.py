"""Measured numbers on the pages come from the JSON files.

``tools/benchmark_page.py`` writes docs/benchmarks.md, docs/benchmarks-tables.md and the README's table from cells
of the files, so these cannot differ. In other paragraphs that name a file, and the tables below them, each number
must be one of that file's, rounded as it is printed. That cannot tell two numbers of one file that were exchanged.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
benchmark_page: Any = import_module("benchmark_page")

UNITS = (1.0, 100.0, 1000.0)  # as it is, per cent, milliseconds


def test_the_pages_are_written_from_the_files() -> None:
    hint = "run python tools/benchmark_page.py"
    assert benchmark_page.PAGE.read_text(encoding="utf-8") == benchmark_page.page(), hint
    assert benchmark_page.TABLES.read_text(encoding="utf-8") == benchmark_page.tables(), hint
    assert benchmark_page.README.read_text(encoding="utf-8") == benchmark_page.readme(), hint
    assert benchmark_page.COMING_FROM.read_text(encoding="utf-8") == benchmark_page.coming_from(), hint
    assert benchmark_page.TORCH_MORE.read_text(encoding="utf-8") == benchmark_page.torch_more(), hint
    assert benchmark_page.SCALE.read_text(encoding="utf-8") == benchmark_page.scale(), hint


def test_another_result_makes_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = json.loads(json.dumps(benchmark_page.read("accounting")))
    changed["cpu_seconds"]["quietgrad cold"] = 0.0987
    kept = benchmark_page.read
    monkeypatch.setattr(benchmark_page, "read", lambda name: changed if name == "accounting" else kept(name))
    assert "0.099 s CPU" in benchmark_page.page()
    assert benchmark_page.README.read_text(encoding="utf-8") != benchmark_page.readme()


def test_models_are_shown_at_batches_of_64_once_all_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every row above its goal, or above Opacus, is among the losses."""
    small = json.loads(json.dumps(benchmark_page.read("zoo")))
    whole = {"parameters": 1, "sgd_cpu_ms": 1.0, "dp-sgd": 1.2, "dp-srm": 2.0, "opacus": None, "opacus_by": None}
    large: dict[str, Any] = {"batch": 64, "models": {n: dict(whole) for n in small["models"] if "LoRA" not in n}}
    large["models"]["BERT"] |= {"dp-sgd": 1.36, "dp-srm": 2.41, "opacus": 1.35, "opacus_by": "functorch"}
    large["models"]["LSTM language model"]["dp-sgd"] = 1.89
    files = {"zoo": small, "zoo_64": large}
    kept = benchmark_page.read
    monkeypatch.setattr(benchmark_page, "read", lambda name: files.get(name) or kept(name))
    page = benchmark_page.page()
    assert "Batches of 64, all parameters trained (`benchmarks/results/zoo_64.json`)" in page
    assert "Batches of 32, with LoRA adapters alone trained (`benchmarks/results/zoo.json`)" in page
    assert "| BERT | 1.36 | 1.35 (functorch) | 2.41 |" in page
    assert "at batches of 64: BERT 1.36 (1.35) (`benchmarks/results/zoo_64.json`)" in page
    assert "at batches of 64: BERT 2.41 (2.40) (`benchmarks/results/zoo_64.json`)" in page
    assert "BERT 1.35 (here 1.36)" in page
    del large["models"]["T5"]
    assert "Batches of 32, all parameters trained" in benchmark_page.page()


def test_the_readme_has_no_other_measurements() -> None:
    before, _, rest = benchmark_page.README.read_text(encoding="utf-8").partition(benchmark_page.BEGIN)
    text = before + rest.partition(benchmark_page.END)[2]
    assert not re.findall(r"(?<![\w.])\.\d{3}", text)
    assert len((before + rest).splitlines()) <= 110


def measured(value: Any) -> Iterator[float]:
    """All numbers of a JSON value; also those in its texts and names of cells."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(token) for token in re.findall(r"\d*\.?\d+", value))
    else:
        for item in value.items() if isinstance(value, dict) else value:
            yield from (
                number for part in (item if isinstance(item, tuple) else (item,)) for number in measured(part)
            )


def stated(text: str) -> Iterator[str]:
    """The numbers of a text: .844, 0.015, 26 010, 1.24."""
    for whole, rest in re.findall(r"(?<![\w.⁻])(\d{1,3}(?: \d{3})+|\d+|)(\.\d+|)(?![\w.]*\d)", text):
        if whole or rest:
            yield whole.replace(" ", "") + rest


def among(number: str, pool: list[float]) -> bool:
    """Whether it is one of them, rounded to its digits."""
    half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
    return any(abs(unit * value - float(number)) <= half for value in pool for unit in UNITS)


Row = tuple[str, str, tuple[Path, ...]]
GENERATED = {"benchmarks.md", "benchmarks-tables.md"}


def cited(page: Path) -> list[Row]:
    """(page, text, the files) of each paragraph that names result files, with the table below it."""
    found: list[Row] = []
    parts = re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        names = re.findall(r"((?:benchmarks|reproduce)/results/[\w-]+\.json)", part)
        table = after if after.startswith("|") else ""
        if names:
            found.append((page.name, f"{part}\n{table}", tuple(ROOT / name for name in names)))
    return found


ROWS = [row for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED for row in cited(page)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1][:40]}")
def test_a_number_is_one_of_its_file(row: Row) -> None:
    """Numbers with three digits or more after the point are measurements; shorter ones are often settings."""
    _, text, files = row
    pool = [number for file in files for number in measured(json.loads(file.read_text(encoding="utf-8")))]
    exact = [number for number in stated(text) if len(number.partition(".")[2]) > 2]
    missing = [number for number in exact if not among(number, pool)]
    assert not missing, f"{missing} are not in {[file.name for file in files]}"


def test_a_wrong_number_is_told() -> None:
    assert len(ROWS) > 20
    pool = [0.8437, 1.2419]
    assert [among(number, pool) for number in (".844", "84.4", "1.24", ".843", "1.25", "84.3")] == [True] * 3 + [
        False
    ] * 3
    assert list(stated("accuracy .844 / 0.849, 26 010 numbers at 1.24 ± .05")) == [
        ".844", "0.849", "26010", "1.24", ".05",
    ]  # fmt: skip
