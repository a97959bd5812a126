"""The coordinate search of reproductions: where it stops, what it leaves open, and what its result file says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from reproduce.coordinates import coordinate_search, neighbours

AXES: dict[str, list[Any]] = {"step": [0.1, 0.2, 0.5, 1.0], "batch": [64, 32, 16], "joint": [True, False]}
START = {"step": 0.2, "batch": 32, "joint": True}
RESULT = Path(__file__).parents[2] / "reproduce" / "results" / "image_settings.json"


@pytest.mark.parametrize("best", list(itertools.product(*AXES.values())))
def test_it_ends_where_no_neighbour_is_better_and_fits_nothing_twice(best: tuple[Any, ...]) -> None:
    calls: list[tuple[Any, ...]] = []

    def error(at: dict[str, Any]) -> float:
        calls.append(tuple(at.values()))
        ends = dict(zip(AXES, best, strict=True))
        return float(sum(abs(values.index(at[name]) - values.index(ends[name])) for name, values in AXES.items()))

    found = coordinate_search(AXES, START, error, 30)
    assert tuple(found.best.values()) == best
    assert found.untried == []
    assert found.tried == len(calls) == len(set(calls))


def test_a_search_that_ends_early_says_what_it_left_open() -> None:
    found = coordinate_search(AXES, START, lambda at: -float(at["step"]), 3)
    assert found.tried == 3
    assert found.best == {**START, "step": 1.0}
    assert found.untried == [at for name in ("batch", "joint") for at in neighbours(AXES, found.best, name)]


def test_what_was_run_is_what_the_search_chose() -> None:
    """Each run has the least held-out error of its search, or is DP-SGD at DP-SRM's effective clip."""
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    names = ("batch", "step", "clip", "momentum", "second", "joint")
    assert {row["search"] for row in record["search"]} <= {"grid", "coordinates"}
    for fit in record["fits"]:
        same = [
            row
            for row in record["search"]
            if all(row[k] == fit[k] for k in ("figure", "epsilon", "method", "search"))
        ]
        best = min(same, key=lambda row: float(row["error"]))
        apart = {name for name in names if best.get(name) != fit.get(name)}
        assert apart <= ({"clip"} if fit["method"] == "dp-sgd" else set())
