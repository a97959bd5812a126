"""Numbers on the pages come from the JSON beside them: each is one of a cited file's, rounded as it is printed.

It cannot tell two numbers of one file that were exchanged; a number that was typed wrong, or is older than its
file, is found. What a row says that is no measurement stands in ``NOT_MEASURED`` with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNITS = (1.0, 100.0, 1000.0)  # as it is, per cent, milliseconds

NOT_MEASURED = {
    "24 tables × 4 ε": {"5000"},  # which tables are large
    "whole step through": {"17"},  # the difference of two files
    "masked sum of 1000 parties": {"0.22", "16", "1.41"},  # set-up and round together; Flower's version
    "rounds of five real processes": {"1.3", "1.41", "50"},  # TLS's and Flower's versions; a round's number
    "clipped, noisy DP-SGD step": {"1.6"},  # Opacus' version
    "a table, curves that are not": {"14", "18", "20", "21"},  # counts of cells
    "additive models, seven": {"0.7", "8"},  # DP-EBM's version
}


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
    """The numbers in words for people: .844, 0.015, 26 010, 1.24."""
    for whole, rest in re.findall(r"(?<![\w.⁻])(\d{1,3}(?: \d{3})+|\d+|)(\.\d+|)(?![\w.]*\d)", text):
        if whole or rest:
            yield whole.replace(" ", "") + rest


def among(number: str, pool: list[float]) -> bool:
    """Whether it is one of them, rounded to its digits."""
    half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
    return any(abs(unit * value - float(number)) <= half for value in pool for unit in UNITS)


def rows(page: str) -> list[tuple[str, str, tuple[Path, ...]]]:
    """(what, the cells with numbers, the files) of each row that cites files; ``same`` cites those above."""
    found: list[tuple[str, str, tuple[Path, ...]]] = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or len(cells) < 4:
            continue
        folder = "reproduce" if "reproduce/results" in cells[3] else "benchmarks"
        names = re.findall(r"([\w-]+\.json)", cells[3])
        files = tuple(ROOT / folder / "results" / name for name in names)
        if cells[3] == "same":
            files = found[-1][2]
        if files:
            found.append((cells[0], f"{cells[1]} | {cells[2]}", files))
    return found


ROWS = [*rows("README.md"), *rows("docs/choosing.md")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_number_is_one_of_its_file(row: tuple[str, str, tuple[Path, ...]]) -> None:
    what, cells, files = row
    pool = [number for file in files for number in measured(json.loads(file.read_text(encoding="utf-8")))]
    let = {token for name, tokens in NOT_MEASURED.items() if what.startswith(name) for token in tokens}
    missing = [number for number in stated(cells) if number not in let and not among(number, pool)]
    assert not missing, f"{what}: {missing} are not in {[file.name for file in files]}"


def test_the_models_people_train_are_those_of_the_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("### Models people train")[2]
    table = [line for line in text.splitlines() if re.match(r"\| .* \| \d", line)]
    pool = list(measured(json.loads((ROOT / "benchmarks" / "results" / "zoo.json").read_text(encoding="utf-8"))))
    assert len(table) > 10
    assert not [number for line in table for number in stated(line.partition(" | ")[2]) if not among(number, pool)]


def test_a_wrong_number_is_told() -> None:
    assert len(ROWS) > 25
    pool = [0.8437, 1.2419]
    assert [among(number, pool) for number in (".844", "84.4", "1.24", ".843", "1.25", "84.3")] == [True] * 3 + [
        False
    ] * 3
    assert list(stated("accuracy .844 / 0.849, 26 010 numbers at 1.24 ± .05")) == [
        ".844", "0.849", "26010", "1.24", ".05",
    ]  # fmt: skip
