"""What the pages of reproductions state is computed again from the result files and found in those words."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs_numbers import among, measured, stated

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def results(name: str, folder: str = "reproduce") -> Any:
    return json.loads((ROOT / folder / "results" / f"{name}.json").read_text(encoding="utf-8"))


DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8").replace("**", "")
         for path in [DOCS / "reproductions.md", *sorted((DOCS / "reproductions").glob("*.md"))]}  # fmt: skip
PAGE = re.sub(r"\s+", " ", " ".join(PAGES.values()))


def short(value: float, digits: int) -> str:
    """As the page prints it: no zero before the point."""
    return f"{value:.{digits}f}".removeprefix("0")


def printed_cells() -> dict[tuple[str, float], dict[str, Row]]:
    """Paper 000's tables: rows by method of each data set and ε."""
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in results("nonconvex_printed")["rows"]:
        cells.setdefault((row["data"], row["epsilon"]), {})[row["method"]] = row
    return cells


OWN = ("DP-GD", "DP-AGD", "RRPSGD", "DP-SRM", "DDP-SRM")


def behind(cell: dict[str, Row], method: str, other: str = "DP-SRM") -> float:
    """By how many standard errors ``other``'s loss is above the method's."""
    a, b = cell[other], cell[method]
    return float((a["test_loss"] - b["test_loss"]) / math.hypot(a["test_loss_se"], b["test_loss_se"]))


def of_000() -> Iterator[str]:
    cells = printed_cells()
    central = [m for m in next(iter(cells.values())) if "printed" not in m and m != "DDP-SRM"]
    assert not any(min(central, key=lambda m: cell[m]["test_loss"]) == "DP-SRM" for cell in cells.values())
    yield "DP-SRM is not the best in any of the four cells"
    a9a, ijcnn = cells["a9a", 0.2], cells["ijcnn1", 0.2]
    assert min(behind(a9a, "DP-GD"), behind(ijcnn, "DP-GD"), behind(a9a, "DP-SGD")) > 3.5
    assert 1.8 < behind(ijcnn, "DP-SGD") < 2.5
    yield "DP-GD is ahead of it by four standard errors on both sets, DP-SGD by four on a9a and two on ijcnn1"
    for data in ("a9a", "ijcnn1"):
        assert max(abs(behind(cells[data, 0.5], m)) for m in ("DP-GD", "DP-SGD")) < 1.5
    assert all(abs(behind(cell, "DDP-SRM")) < 2.0 for cell in cells.values())
    yield "DDP-SRM is within two standard errors of DP-SRM everywhere"
    close = {
        (*at, m)
        for at, cell in cells.items() for m in OWN[:4]
        if abs(cell[m]["test_loss"] - cell[m]["paper"]["test_loss"])
        <= 2.0 * math.hypot(cell[m]["test_loss_se"], cell[m]["paper"]["test_loss_sd"] / math.sqrt(10))
    }  # fmt: skip
    assert close == {
        ("a9a", 0.2, "DP-AGD"), ("a9a", 0.5, "DP-AGD"), ("a9a", 0.2, "RRPSGD"), ("a9a", 0.5, "RRPSGD"),
        ("ijcnn1", 0.2, "DP-SRM"),
    }  # fmt: skip
    yield "DP-AGD and RRPSGD on a9a, DP-SRM on ijcnn1 at ε = .2"


def of_002() -> Iterator[str]:
    rows = results("weighted_average")["rows"]
    large = [r for r in rows if r["data"] in ("kddcup99", "adult", "bank-additional")]

    def ahead(name: str, other: str) -> tuple[int, int]:
        return (sum(r[name] > r[other] for r in large), sum(r[f"{name}_gap"] < r[f"{other}_gap"] for r in large))

    true, printed = ahead("iv", "unweighted"), ahead("printed_weighted", "printed_unweighted")
    yield f"ahead of the unweighted average in {true[0]} of {len(large)} points in accuracy, {true[1]} in gap"
    yield f"ahead in {printed[0]} of {len(large)} in accuracy and {printed[1]} in gap"
    wide = next(r for r in rows if (r["m"], r["epsilon"], r["axis"], r["data"]) == (32, 0.25, "ε", "adult"))
    yield f"at a claimed ε = .25 with 32 parties the server's true ε is {wide['epsilon_server']:.0f}"
    yield f"has at least {short(wide['epsilon_observer_at_least'], 2)} there"
    few = next(r for r in rows if (r["m"], r["epsilon"], r["axis"]) == (2, 0.05, "ε"))
    at_least = short(few["epsilon_observer_at_least"], 3)
    yield f"(m = 2, ε = .05: {short(few['epsilon_server'], 3)} for the server, {at_least} at least for an observer)"
    off = {e: max(abs(r["iv"] - r["central_one_shot"]) for r in large if (r["epsilon"] == 0.01) == e)
           for e in (True, False)}  # fmt: skip
    yield f"within {short(100 * off[False], 1)} points on the three large sets ({100 * off[True]:.1f} at ε = .01)"


def of_004() -> Iterator[str]:
    cells: dict[tuple[str, float, float], dict[str, Row]] = {}
    for row in results("output_perturbation")["rows"]:
        cells.setdefault((row["data"], row["mu"], row["epsilon"]), {})[row["method"]] = row

    def wins(key: str) -> int:
        return sum(cell["output perturbation"][key] < cell["Bassily SGD"][key] for cell in cells.values())

    assert (len(cells), wins("paper_error")) == (40, 40)
    yield f"in {wins('error_paper_noise')} of 40 cells (the paper: {wins('paper_error')})"
    yield f"output perturbation has the smaller error in {wins('error_true_noise')} of 40"
    yield f"Bassily's SGD has the smaller error in {40 - wins('error_true_noise')} of 40 cells"
    near = [
        1
        for cell in cells.values() for method in ("output perturbation", "Bassily SGD")
        for noise in ("paper", "true")
        if abs(cell[method]["paper_error"] - cell[method][f"error_{noise}_noise"])
        <= 2.0 * cell[method][f"error_{noise}_noise_se"]
    ]  # fmt: skip
    assert not near
    yield "in no cell is the paper's error within two standard errors of ours"
    at_one = {m: [c[m]["epsilon_of_paper_noise"] for at, c in cells.items() if at[2] == 1.0]
              for m in ("output perturbation", "RRPSGD", "Bassily SGD")}  # fmt: skip
    low, high = min(at_one["output perturbation"]), max(at_one["output perturbation"])
    yield f"at ε = 1 proves ε = {low:.2f} to {high:.2f}"
    yield f"RRPSGD's {min(at_one['RRPSGD']):.2f} to {max(at_one['RRPSGD']):.2f}"
    yield f"Bassily's {statistics.median(at_one['Bassily SGD']):.2f}"
    most = max(row["cpu_seconds"] for cell in cells.values() for row in cell.values())
    yield f"at most {most:.1f} CPU seconds a fit"


SAID: dict[str, Callable[[], Iterator[str]]] = {"000": of_000, "002": of_002, "004": of_004}


@pytest.mark.parametrize("paper", SAID)
def test_verdicts_on_a_paper_are_what_the_files_say(paper: str) -> None:
    missing = [words for words in SAID[paper]() if words not in PAGE]
    assert not missing


FILES = {
    ("000", "Tables 2 and 3"): ("nonconvex_printed", "nonconvex_logistic", "adaptive_descent", "gradient_norms"),
    ("000", "Figure 3"): ("mnist",),
    ("000", "Figures 4"): ("cifar",),
    ("001", "Figure 1"): ("stagewise",),
    ("001", "Figure 2"): ("stagewise_resnet",),
    ("002", "Figures 1 to 16"): ("weighted_average",),
    ("003", "Constants"): ("saddles", "sosp"),
    ("004", "Table 3"): ("output_perturbation",),
    ("studies", "DP-SRM"): ("bands",),
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
