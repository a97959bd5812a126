"""All studies with the comparisons that their result files hold, and the page of their verdicts.

    python tools/comparisons_page.py          # writes docs/reproductions/comparisons.md

A study that compares tuned methods has a function ``compared`` that makes comparisons of its recorded fits
(:mod:`reproduce.comparisons`). The other studies say here why they have none. A test fails if a result file is in
neither list, if it states a choice or a verdict of its own, or if the page is not what this module makes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from reproduce.comparisons import Comparison, Contender

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproduce" / "results"
PAGE = ROOT / "docs" / "reproductions" / "comparisons.md"
STUDIES = (
    "image_settings", "mnist", "cifar", "adaptive_descent", "stagewise", "stagewise_resnet", "bands",
    "effective_clips", "valley", "spider_tables", "advice",
)  # fmt: skip
UNCOMPARED = {
    "nonconvex_printed": "the scores of its searches are not recorded: numbers without a verdict",
    "nonconvex_logistic": "the scores of its searches are not recorded: numbers without a verdict",
    "saddles": "the scores of its searches are not recorded: numbers without a verdict",
    "output_perturbation": "nothing was searched: the paper's settings, and the same noise for both",
    "weighted_average": "nothing was searched for the methods that it compares",
    "gradient_norms": "one method on two scales of the rows",
    "image_parties": "one method with more and more parties",
    "cohorts": "one federation and one curator with the same settings",
    "sosp": "constants of a theorem",
    "errata": "constants of a theorem",
    "audit_peers": "attacks on claims",
}
"""Studies that compare no tuned methods, and why."""


def record(stem: str) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))
    return found


def comparisons_of(stem: str) -> list[Comparison]:
    """The comparisons of one study, from what its result file recorded."""
    found: list[Comparison] = import_module(f"reproduce.{stem}").compared(record(stem))
    return found


def page() -> str:
    """The page: every comparison with its verdict."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    found = {stem: comparisons_of(stem) for stem in STUDIES}
    kinds = Counter(each.verdict().kind for mine in found.values() for each in mine)
    yield _INTRODUCTION.format(
        total=kinds.total(), leads=kinds["lead"], ties=kinds["tie"], others=kinds["not comparable"]
    )
    for stem, mine in found.items():
        yield f"\n## {stem.replace('_', '-')}\n"
        yield "| what | method: outcome (settings tried, effective clip) | verdict |\n|---|---|---|"
        for each in mine:
            yield f"| {each.what} | {'<br>'.join(map(_outcome, each.contenders))} | {each.verdict()} |"
    yield "\n## Studies without such a comparison\n\n| study | why |\n|---|---|"
    for stem, why in UNCOMPARED.items():
        yield f"| {stem.replace('_', '-')} | {why} |"


_INTRODUCTION = """\
# All comparisons and their verdicts

Every comparison of two methods in the [studies](../reproductions.md), and whether it says who leads. The page is
written by `python tools/comparisons_page.py`. Choices, numbers of settings tried, effective clips and verdicts are
computed from the fits that result files record. No result file states them.

```python
from reproduce.compared import comparisons_of

for comparison in comparisons_of("valley"):
    print(comparison.what, comparison.verdict())
```

Less is better in every column. A lead is one of two standard errors or more. A comparison has no verdict if a best
value is the last that was tried, if one method tried more than twice as many settings, if effective clips differ by
more than 5 %, if scores or runs are missing, or if chance decides. Of {total} comparisons {leads} have a leader,
{ties} are ties and {others} have no verdict."""


def _outcome(contender: Contender) -> str:
    if contender.chosen is None:
        return f"{contender.method}: –"
    outcome = contender.outcome
    reached = "not run" if outcome is None else f"{outcome.mean:.4g}"
    if outcome is not None and outcome.error is not None:
        reached = rounded(outcome.mean, outcome.error)
    return f"{contender.method}: {reached} ({contender.count}, {contender.effective_clip:.4g})"


def rounded(mean: float, error: float) -> str:
    """A mean to the place of its standard error's second digit.

    >>> rounded(0.33213, 0.000238), rounded(12.3456, 1.234), rounded(5.0, 0.0)
    ('0.33213 ± 0.00024', '12.3 ± 1.2', '5 ± 0')
    """
    if error == 0.0:
        return f"{mean:g} ± 0"
    places = max(0, 1 - int(f"{error:e}".partition("e")[2]))
    return f"{mean:.{places}f} ± {error:.{places}f}"
