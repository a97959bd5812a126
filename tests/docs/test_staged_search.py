"""The search of reproduce/staged_search.py: luck does not win, and a list whose end is chosen grows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reproduce.staged_search import Search, Settings, Stage, contender

Floats = npt.NDArray[np.float64]
STAGES = (Stage(8, 1, 0), Stage(50, 2, 30), Stage(200, 3, 10))


@dataclass
class Heavy:
    """Errors of 0.1 + |log(η/2)|; above η = 5 of less than half the best, but one run in fifty diverges."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def reached(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats]:
        rng, found = np.random.default_rng(seed + steps), []
        self.asked.append((len(settings), runs))
        for each in settings:
            rate = each["learning_rate"]
            error = 0.1 + abs(np.log(rate / 2.0)) + 1e-9 / steps
            lucky = np.where(rng.random(runs) < 0.02, 1e3, 0.04)
            found.append(lucky if rate > 5.0 else error + 0.001 * rng.standard_normal(runs))
        return np.array(found), np.array(found) + 1.0


def searching(rates: list[float], problem: Heavy | None = None) -> Search:
    lists: dict[str, list[Any]] = {"steps": [10, 30], "learning_rate": rates, "average": [False, True]}
    return Search("any", problem or Heavy(), lists, STAGES, Stage(500, 4, 5), 1000)


def test_a_setting_that_nearly_always_does_well_and_else_diverges_is_not_chosen() -> None:
    search = searching([0.5, 1.0, 2.0, 4.0, 6.0, 7.0, 9.0, 12.0])
    finalists = search.run()
    screened = min(search.settings, key=lambda key: search.scores[1, key])
    assert search.settings[screened]["learning_rate"] > 5.0  # what 8 seeds would have chosen
    row = json.loads(json.dumps(search.recorded(finalists, 400)))
    found = contender("any", row, 1.0)
    assert found.outcome is not None
    assert (found.outcome.settings["learning_rate"], found.outcome.settings["average"]) == (2.0, False)
    assert not list(found.outcome.faults())
    assert found.outcome.mean == pytest.approx(0.1, abs=0.01)


def test_what_is_recorded_gives_the_choice_and_the_number_tried() -> None:
    """The file states neither: with another score another setting is the choice, and the runs are none of it."""
    search = searching([0.5, 1.0, 2.0, 4.0, 6.0, 7.0, 9.0, 12.0])
    row = search.recorded(search.run(), 50)
    found = contender("any", row, 1.0)
    assert found.chosen == search.chosen(search.finalists(), finally_=True)
    assert found.count == len(search.settings)
    assert found.values("learning_rate") == sorted({each["learning_rate"] for each in search.settings.values()})
    assert len([each for each in found.tried if each.runs == 500]) >= 5
    last = row["search"]["stages"][-1]["rows"]
    other = next(each for each in last if dict(zip(row["search"]["settings"], each, strict=False)) != found.chosen)
    other[-2] = -1.0
    changed = contender("any", row, 1.0)
    assert changed.outcome is None
    assert "no runs of any are of what its search chose" in list(changed.faults())


def test_a_list_grows_until_its_end_is_not_chosen() -> None:
    search = searching([0.1, 0.2, 0.4])
    finalists = search.run()
    assert search.chosen(finalists, finally_=True)["learning_rate"] == pytest.approx(1.6, rel=0.5)
    assert "learning_rate" not in contender("any", search.recorded(finalists, 50), 1.0).edges


def test_the_average_costs_no_run_of_its_own() -> None:
    problem = Heavy()
    searching([1.0, 2.0, 3.0], problem).grid({"steps": [10], "learning_rate": [1.0, 2.0], "average": [False, True]})
    assert problem.asked == [(2, 8)]
