"""The tables on the pages of reproductions hold numbers of the result files and no others."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs_numbers import among, measured, stated

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8").replace("**", "")
         for path in sorted((ROOT / "docs" / "reproductions").glob("*.md"))}  # fmt: skip


def results(name: str) -> Any:
    return json.loads((ROOT / "reproduce" / "results" / f"{name}.json").read_text(encoding="utf-8"))


FILES = {
    ("000", "Tables 2 and 3"): ("nonconvex_printed", "nonconvex_logistic", "adaptive_descent", "gradient_norms"),
    ("000", "Figure 3"): ("mnist",),
    ("000", "Figures 4"): ("cifar",),
    ("001", "Figure 1"): ("stagewise",),
    ("001", "Figure 2"): ("stagewise_resnet",),
    ("002", "Figures 1 to 16"): ("weighted_average",),
    ("003", "Constants"): ("saddles", "sosp"),
    ("004", "Table 3"): ("output_perturbation",),
}


@pytest.mark.parametrize("section", FILES, ids=": ".join)
def test_every_number_of_a_table_is_one_of_its_files(section: tuple[str, str]) -> None:
    """The catch-all: a cell that is typed wrong, or older than its file, is found."""
    page, title = section
    mine = next(part for part in re.split(r"^## ", PAGES[page], flags=re.MULTILINE) if part.startswith(title))
    pool = [number for name in FILES[section] for number in measured(results(name))]
    pool += [value / math.sqrt(10.0) for value in pool]  # the paper's deviations as standard errors
    cells = [line for line in mine.splitlines() if line.startswith("|") and not line.startswith("|---")]
    missing = [
        number for line in cells for number in stated(re.sub(r"\w-\d+", "", line)) if not among(number, pool)
    ]
    assert not missing
