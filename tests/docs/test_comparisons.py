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
from reproduce.comparisons import Comparison, Contender, Outcome, Searched
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


LEAD = re.compile(
    r"\b(ahead|beats?|outperforms?|better by|worse by|errs? less|less error than|loses to|wins? (?:at|in|on)"
    r"|(?:is|are) (?:the )?(?:best|worst))\b|\bby [^.|;]{0,30}standard errors|times smaller",
    re.IGNORECASE,
)
CLAIM = re.compile(r"^\W*The paper claims")
UNTUNED = "both have the same settings, and nothing was searched"
LEADS: dict[tuple[str, str], str] = {
    ("choosing.md", "‖∇F‖ of DP-GD ÷ that of DP-SPIDER"): "valley",
    ("choosing.md", "records whose slopes differ"): "valley",
    ("methods/dp-spider.md", "On a curved valley"): "valley",
    ("reproductions/001.md", "where a constant rate is better by six standard errors"): "stagewise",
    ("reproductions/002.md", "ahead of the unweighted average"): UNTUNED,
    ("reproductions/002.md", "ahead in 54 of 105"): UNTUNED,
    ("reproductions/004.md", "under the printed noises output perturbation beats"): UNTUNED,
}
"""Every sentence that says that a method is ahead: the result file that shows it, or why it needs none."""


def said(path: Path) -> Iterator[str]:
    """The sentences and rows of tables of a page, without code, quotations and what a paper claims."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for part in re.split(r"\n\s*\n|\n(?=[-|#*] |\|)", text):
        line = " ".join(part.split())
        if line.startswith(("#", "<", "- **Claims**")):
            continue
        for sentence in re.split(r"(?<=\w[.:]) (?=[A-Z*])", re.sub(r'"[^"]*"', "", line)):
            if sentence and not CLAIM.match(sentence):
                yield sentence


PAGES = [
    path
    for where in ("choosing.md", "reproductions.md", "reproductions/*.md", "methods/*.md")
    for path in sorted((ROOT / "docs").glob(where))
    if path.name != "rows.md"
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT / "docs").as_posix())
def test_a_page_says_ahead_only_of_a_fair_comparison(path: Path) -> None:
    """A sentence that says who leads is in the list, and its result file holds a comparison without faults."""
    page_name = path.relative_to(ROOT / "docs").as_posix()
    for line in said(path):
        if not LEAD.search(line):
            continue
        reasons = [reason for (page, words), reason in LEADS.items() if page == page_name and words in line]
        assert reasons, f"{page_name} says who is ahead, and no comparison is named for it: {line[:300]}"
        for reason in reasons:
            if reason != UNTUNED:
                assert supported(reason), f"{page_name}: {reason}.json holds no valid comparison"


def supported(stem: str) -> bool:
    """Whether a result file states a lead, and all that it states are of comparisons without faults."""
    record = json.loads((ROOT / "reproduce" / "results" / f"{stem}.json").read_text(encoding="utf-8"))
    found = list(leads(record))
    return bool(found) and all(not list(Comparison.from_json(lead["comparison"]).faults()) for lead in found)


def test_the_list_of_leads_names_what_the_pages_say() -> None:
    for page_name, words in LEADS:
        assert any(words in line and LEAD.search(line) for line in said(ROOT / "docs" / page_name)), words


@pytest.mark.parametrize("words", ["DP-GD is ahead of it by four standard errors", "it beats DP-SGD", "errs less"])
def test_a_lead_without_a_comparison_would_be_found(words: str, tmp_path: Path) -> None:
    page_of_one = tmp_path / "page.md"
    page_of_one.write_text(f"# Title\n\n- **Ranking**: at ε = .2 {words}\n  on both sets.\n", encoding="utf-8")
    (line,) = said(page_of_one)
    assert LEAD.search(line)
    assert not supported("nonconvex_printed")


def contender(
    *, method: str = "a", chosen: float = 3.0, clip: float = 2.0, tried: int = 10, outcome: Outcome | None = None
) -> Contender:
    return Contender(method, [Searched("rate", [1.0, 3.0, 9.0], chosen)], tried, clip, outcome)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"chosen": 9.0}, "search further"),
        ({"clip": 2.4}, "effective clips differ"),
        ({"tried": 30}, "unequal"),
        ({"outcome": Outcome(2.75, 2.5, 2.7, 2.5)}, "above a tenth"),
        ({"outcome": Outcome(math.nan, 0.1, 2.7, 0.1)}, "above a tenth"),
        ({"outcome": Outcome(2.75, 0.1, 0.2, 0.1)}, "more than three standard errors away"),
    ],
)
def test_a_comparison_with_a_fault_is_found(changes: dict[str, Any], fault: str) -> None:
    assert list(Comparison("x", [contender(), contender()]).faults()) == []
    found, *_ = Comparison("x", [contender(), contender(method="b", **changes)]).faults()
    assert fault in found
    again = Comparison.from_json(json.loads(json.dumps(Comparison("x", [contender(**changes)]).to_json())))
    assert again.contenders[0].effective_clip == contender(**changes).effective_clip
    assert list(again.faults()) or not list(Comparison("x", [contender(**changes)]).faults())


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


def test_the_regimes_on_the_page_are_those_measured() -> None:
    """Each row of the table in ``choosing.md``: the ratio, and for each ν the gain and its standard errors."""
    rows = json.loads((ROOT / "reproduce" / "results" / "valley.json").read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for ratio in sorted({row["ratio"] for row in rows}):
        mine = sorted((row for row in rows if row["ratio"] == ratio), key=lambda row: float(row["noise"]))
        cells = [
            f"{row['gain']:.2f} ({row['standard_errors']:+.1f})" if "gain" in row else "no lead stated"
            for row in mine
        ]
        assert f" | {' | '.join(cells)} |".replace("-", "−") in text
    for table in json.loads((ROOT / "reproduce" / "results" / "spider_tables.json").read_text("utf-8"))["rows"]:
        losses = [f"{table[m]['mean']:.4f} ± {table[m]['mean_se']:.4f}" for m in ("dp-gd", "dp-spider")]
        assert all(loss.replace("0.", ".") in text for loss in losses)


def test_no_outcome_of_the_valley_is_one_of_luck() -> None:
    """Every contender was chosen by many seeds and agrees with itself on others; DP-GD's search is shared."""
    rows = json.loads((ROOT / "reproduce" / "results" / "valley.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 12
    for row in rows:
        outcomes = [each.outcome for each in Comparison.from_json(row["comparison"]).contenders]
        assert None not in outcomes
        assert "faults" in row or not [fault for each in outcomes if each for fault in each.faults()]
    for noise in {row["noise"] for row in rows}:
        same = [row["dp-gd"] for row in rows if row["noise"] == noise]
        means = [each["mean"] for each in same]
        assert max(means) - min(means) < 5.0 * max(each["mean_se"] for each in same)


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
