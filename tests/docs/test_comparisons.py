"""What reproductions may publish: comparisons without faults, verdicts on things that exist."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from reproduce import errata
from reproduce.comparisons import Comparison, Contender, Searched
from reproduce.exhibits import exhibits
from reproduce.rows import OTHERS, PAGE, ROWS, page

from quietgrad.methods.regimes import LOSES, PAYS, Regime
from quietgrad.methods.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "reproduce" / "results").glob("*.json"))


def leads(node: Any) -> Iterator[Mapping[str, Any]]:
    """Wherever a result says by how many standard errors one method is ahead of another."""
    if isinstance(node, Mapping):
        if "standard_errors" in node:
            yield node
        for each in node.values():
            yield from leads(each)
    elif isinstance(node, list):
        for each in node:
            yield from leads(each)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_published_lead_is_that_of_a_fair_comparison(path: Path) -> None:
    """No best value at the end of its list, equal search, equal effective clips; else the build fails."""
    record = json.loads(path.read_text(encoding="utf-8"))
    for lead in leads(record):
        assert "comparison" in lead, f"{path.name}: a lead without what was searched"
        assert list(Comparison.from_json(lead["comparison"]).faults()) == []
    for table in record.get("tables", []):
        ahead = [k for k, name in enumerate(table["columns"]) if "ahead by" in name]
        assert not any(row[k] is not None for row in table["rows"] for k in ahead), f"{path.name}: {table['title']}"


def contender(*, method: str = "a", chosen: float = 3.0, clip: float = 2.0, tried: int = 10) -> Contender:
    return Contender(method, [Searched("rate", [1.0, 3.0, 9.0], chosen)], tried, clip)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [({"chosen": 9.0}, "search further"), ({"clip": 2.4}, "effective clips differ"), ({"tried": 30}, "unequal")],
)
def test_a_comparison_with_a_fault_is_found(changes: dict[str, Any], fault: str) -> None:
    assert list(Comparison("x", [contender(), contender()]).faults()) == []
    (found,) = Comparison("x", [contender(), contender(method="b", **changes)]).faults()
    assert fault in found
    again = Comparison.from_json(json.loads(json.dumps(Comparison("x", [contender(**changes)]).to_json())))
    assert again.contenders[0].effective_clip == contender(**changes).effective_clip


def test_the_limits_of_the_advice_are_those_measured() -> None:
    rows = json.loads((ROOT / "reproduce" / "results" / "valley.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if "standard_errors" in row]
    high = [row["standard_errors"] for row in rows if row["ratio"] >= PAYS]
    low = [row["standard_errors"] for row in rows if row["ratio"] <= LOSES]
    between = [row["standard_errors"] for row in rows if LOSES < row["ratio"] < PAYS]
    assert min(high) > 2.0
    assert max(low) < 2.0
    assert min(between) < -2.0 < 2.0 < max(between)
    assert "use dp-spider" in str(Regime(PAYS, 1.0, 1.0))
    assert "use dp-gd" in str(Regime(LOSES, 1.0, 1.0))
    assert "compare" in str(Regime(1.0, 1.0, 1.0))


def test_the_page_of_rows_is_in_step_with_the_registry() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    places = {row.where for row in ROWS}
    anchors = {exhibit.anchor for exhibit in exhibits()}
    for where in places:
        if ":" in where:
            assert resolve_name(f"quietgrad.{where}") is not None
        else:
            assert where in anchors or (ROOT / where).is_file(), where
    classes = {where.partition(":")[2] for where in places}
    for name, entry in ALGORITHMS.items():
        assert (entry.kind.__name__ in classes) != (name in OTHERS), f"{name}: in no row, or in two lists"
    drawn = {anchor for anchor in anchors if re.fullmatch(r"00\d-(table|figure)-\d+", anchor)}
    assert drawn <= places
    source = (ROOT / "src" / "quietgrad" / "methods" / "theorems.py").read_text(encoding="utf-8")
    for paper, number in re.findall(r'Bound\(f?"(00\d) theorem ([\d.]+)', source):
        wanted = f"Theorem {number}"
        assert any(row.paper == paper and row.what.startswith(wanted) for row in ROWS), (paper, wanted)


def test_numbers_of_the_errata_are_those_computed() -> None:
    (table,) = json.loads((ROOT / "reproduce" / "results" / "errata.json").read_text(encoding="utf-8"))["tables"]
    text = (ROOT / "docs" / "methods" / "papers.md").read_text(encoding="utf-8")
    section = text.partition("## Errata of paper 000")[2].partition("\n## ")[0]
    computed = {f"{value:.2f}" for row in table["rows"] for value in row[1:] if isinstance(value, float)}
    printed = re.findall(r"(?<![\w.])\d+\.\d\d(?![\w.])", section)
    assert len(printed) > 25
    assert set(printed) <= computed
    for name, z, needed, epsilon, condition in table["rows"]:
        assert z is None or f"{z:.2f}" in printed or name.startswith("a9a, ε = 0.5: the formula"), name
        if condition == "excludes it":  # else the theorem and its bare formula are the same thing
            assert f"{epsilon:.2f}" in printed or name.startswith("a9a"), name
            assert z < 2.0 * math.sqrt(0.7) or name.startswith("a9a"), name
        if condition == "holds":
            assert z > needed, name  # the theorem is loose, not false


def test_theorem_4_1_is_its_formula_and_its_condition() -> None:
    """σ′² = z²/4 ≥ 0.7: the formula's own least z for MNIST at ε = 7 is below what the theorem admits."""
    n, batch, steps, epsilon = errata.CASES["MNIST, ε = 7"]
    bare, stated = errata.printed(n, batch, steps, epsilon, 1), errata.theorem(n, batch, steps, epsilon)
    assert stated is not None
    assert bare**2 / 4.0 < 0.7 <= stated**2 / 4.0
    assert (round(bare, 2), round(stated, 2)) == (1.57, 2.07)
    assert errata.theorem(*errata.CASES["a9a, ε = 0.5"]) is None
