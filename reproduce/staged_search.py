"""A search that luck does not win: a grid is screened on few seeds, the best are told apart on many others.

The mean of a heavy-tailed error over a few seeds is least for settings that nearly diverge. So every stage runs the
best of the stage before on seeds of its own, and of those within one standard error of the best in the last stage
the one with fewest steps is chosen. A list whose last value is chosen grows, and closer values around the best are
tried. A problem says what a setting reaches; settings have ``steps``, and ``average`` for the mean of the second
half of a run, which costs no run of its own.

:meth:`Search.recorded` is what a result file keeps: the lists that were combined, and the scores of every setting
that a later stage ran. :func:`contender` reads it, and what was chosen follows from it alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from reproduce.comparisons import Contender, Reached, Tried
from reproduce.store import Row

Floats = npt.NDArray[np.float64]
Settings = dict[str, Any]
Key = tuple[Any, ...]
NATURAL = {"momentum": 0.0, "full_gradients": 1}  # where a setting itself ends


class Stage(NamedTuple):
    """How many runs of a setting, the seed that decides them, and how many of the stage before are run."""

    runs: int
    seed: int
    kept: int


class Problem(Protocol):
    """What is searched for: what runs of settings reach."""

    def reached(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats]:
        """By setting and run: the error of the last iterate, and that of the average of the second half."""
        ...


def key_of(settings: Settings) -> Key:
    """The settings as something to look up by."""
    return tuple(settings.values())


@dataclass
class Search:
    """The settings of one method that were tried on one problem, and how each stage scored them.

    Args:
        lists: of every setting the values to try; they grow.
        stages: the first screens, the others run the best of the stage before; ``last`` is run once at the end.
        longest: no more steps than this.
    """

    method: str
    problem: Problem
    lists: dict[str, list[Any]]
    stages: tuple[Stage, ...]
    last: Stage
    longest: int
    settings: dict[Key, Settings] = field(default_factory=dict)
    combined: list[dict[str, list[Any]]] = field(default_factory=list)
    scores: dict[tuple[int, Key], tuple[float, float]] = field(default_factory=dict)

    def score(self, stage: Stage, asked: Iterable[Settings]) -> None:
        """Run what has no score of this stage yet: the mean error, and the standard error of that mean."""
        new: dict[Key, Settings] = {}
        for each in asked:
            self.settings.setdefault(key_of(each), each)
            if (stage.seed, key_of(each)) not in self.scores:
                new.setdefault(key_of({**each, "average": None}), each)
        for steps in sorted({each["steps"] for each in new.values()}):
            together = [each for each in new.values() if each["steps"] == steps]
            found = self.problem.reached(self.method, steps, together, stage.seed, stage.runs)
            for average, errors in zip((False, True), found, strict=True):
                spread = errors.std(-1, ddof=min(1, stage.runs - 1)) / math.sqrt(stage.runs)
                for each, mean, error in zip(together, errors.mean(-1), spread, strict=True):
                    self.scores[stage.seed, key_of({**each, "average": average})] = float(mean), float(error)

    def grid(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Screen every combination."""
        self.combined.append({name: list(values) for name, values in lists.items()})
        each_of = itertools.product(*lists.values())
        self.score(self.stages[0], (dict(zip(lists, each, strict=True)) for each in each_of))

    def finalists(self) -> list[Settings]:
        """The settings that the stages left over, best first."""
        kept = list(self.settings)
        for before, stage in itertools.pairwise(self.stages):
            kept = self._best(kept, before)[: stage.kept]
            self.score(stage, [self.settings[key] for key in kept])
        return [self.settings[key] for key in self._best(kept, self.stages[-1])]

    def _best(self, keys: Iterable[Key], stage: Stage) -> list[Key]:
        return sorted(keys, key=lambda key: self.scores[stage.seed, key])

    def chosen(self, finalists: Sequence[Settings], *, finally_: bool = False) -> Settings:
        """Of the finalists within one standard error of the best, the one with fewest steps.

        In the end the best are run once more, and the choice is among all that ever were run so often.
        """
        stage = self.stages[-1]
        self.score(stage, finalists)
        if finally_:
            best = self._best(map(key_of, finalists), stage)[: self.last.kept]
            stage = self.last
            self.score(stage, (self.settings[key] for key in best))
            run = (key for seed, key in self.scores if seed == stage.seed)
            finalists = [self.settings[key] for key in run if key in self.settings]
        scored = [(self.scores[stage.seed, key_of(each)], each) for each in finalists]
        least, error = min(score for score, _ in scored)
        near = (pair for pair in scored if pair[0][0] <= least + error)
        return min(near, key=lambda pair: (pair[1]["steps"], pair[0][0]))[1]

    def run(self) -> list[Settings]:
        """The grid, longer lists where the best is the last of one, and closer values around the best."""
        self.grid(self.lists)
        self._grow()
        near = around(self.chosen(self.finalists()))
        self.grid(near)
        for name, values in near.items():
            self.lists[name] = sorted({*self.lists[name], *values})
        self._grow()
        self._grow(finally_=True)
        return self.finalists()

    def _grow(self, *, finally_: bool = False) -> None:
        while True:
            chosen = self.chosen(self.finalists(), finally_=finally_)
            further = {name: beyond(name, values, chosen, self.longest) for name, values in self.lists.items()}
            grown = {name: each for name, each in further.items() if each is not None}
            if not grown:
                return
            for name, each in grown.items():
                self.grid({**nearby(self.lists, chosen), name: [each]})
                self.lists[name] = sorted([*self.lists[name], each])

    def recorded(self, finalists: Sequence[Settings], runs: int, final: Problem | None = None) -> Row:
        """What was searched, and what the choice reaches with noise that chose nothing, twice.

        Args:
            final: where it is run in the end, if that is not what was searched (test rows).
        """
        problem = self.problem if final is None else final
        chosen = self.chosen(finalists, finally_=True)
        errors = [
            problem.reached(self.method, chosen["steps"], [chosen], seed, runs)[chosen["average"]][0]
            for seed in (20_000, 30_000)
        ]
        return {"search": self._rows(), "fits": made_row(errors, chosen)}

    def _rows(self) -> Row:
        """The lists that were combined, and each later stage: runs, and by setting its values, score and error."""
        names = list(self.lists)
        stages = [
            {
                "runs": stage.runs,
                "rows": [
                    [*(self.settings[key][name] for name in names), *score]
                    for (seed, key), score in self.scores.items()
                    if seed == stage.seed and key in self.settings
                ],
            }
            for stage in (*self.stages[1:], self.last)
        ]
        return {"settings": names, "combined": self.combined, "screened_by": self.stages[0].runs, "stages": stages}


def contender(method: str, row: Row, clip: float | Callable[[Mapping[str, Any]], float]) -> Contender:
    """A method of a comparison, from what :meth:`Search.recorded` made; ``clip`` is its effective clip."""
    search, fits = row["search"], row["fits"]
    names = search["settings"]
    tried = {
        each: Tried(dict(zip(names, each, strict=True)), None, search["screened_by"])
        for lists in search["combined"]
        for each in itertools.product(*(lists[name] for name in names))
    }
    for stage in search["stages"]:
        for *values, score, error in stage["rows"]:
            tried[tuple(values)] = Tried(dict(zip(names, values, strict=True)), score, stage["runs"], error)
    reached = Reached(fits["settings"], fits["mean"], fits["mean_se"], fits["again"], fits["again_se"])
    of_settings = clip if callable(clip) else lambda settings: clip
    return Contender(method, list(tried.values()), [reached], of_settings, natural_end)


def made_row(errors: Sequence[Floats], chosen: Settings) -> Row:
    """What two sets of runs reached, with standard errors."""
    first, again = ((float(each.mean()), float(each.std(ddof=1) / math.sqrt(each.size))) for each in errors)
    return {
        "settings": chosen, "mean": first[0], "mean_se": first[1], "median": float(np.median(errors[0])),
        "again": again[0], "again_se": again[1],
    }  # fmt: skip


def nearby(lists: Mapping[str, Sequence[Any]], chosen: Settings) -> dict[str, list[Any]]:
    """Of every list the values next to the chosen one, and itself."""
    found: dict[str, list[Any]] = {}
    for name, values in lists.items():
        place = sorted(values).index(chosen[name])
        found[name] = sorted(values)[max(0, place - 1) : place + 2]
    return found


def natural_end(name: str, chosen: Mapping[str, Any]) -> float | None:
    """Where a setting itself ends: at 0 momentum, one full gradient, or full gradients alone, which is DP-GD.

    >>> natural_end("split", {"steps": 8, "full_gradients": 8, "split": 0.9})
    0.9
    """
    if name in ("full_gradients", "split") and chosen["full_gradients"] >= chosen["steps"]:
        return float(chosen[name])
    return NATURAL.get(name)


def beyond(name: str, values: Sequence[Any], settings: Settings, longest: int) -> Any:
    """A value further out than the end of the list that was chosen; ``None`` if it is not at an end.

    >>> beyond("learning_rate", [0.1, 0.2], {"learning_rate": 0.2}, longest=100)
    0.4
    """
    chosen = settings[name]
    ends = {min(values), max(values)} - {natural_end(name, settings)}
    if isinstance(chosen, bool) or len(set(values)) == 1 or chosen not in ends:
        return None
    up = chosen == max(values)
    if name in ("split", "momentum"):  # odds of four to one more
        odds = chosen / (1.0 - chosen) * (4.0 if up else 0.25)
        return odds / (1.0 + odds)
    factor = {"learning_rate": 2, "steps": 3, "full_gradients": 4}[name]
    further = chosen * factor if up else chosen / factor
    if name == "learning_rate":
        return further
    return None if further > longest else max(1, round(further))


def around(chosen: Settings) -> dict[str, list[Any]]:
    """Values next to the chosen ones, closer than those of a grid.

    >>> around({"steps": 100, "split": 0.5, "average": True})
    {'steps': [60, 100, 170], 'split': [0.3333333333333333, 0.5, 0.6666666666666666], 'average': [False, True]}
    """
    lists: dict[str, list[Any]] = {}
    for name, each in chosen.items():
        if isinstance(each, bool):
            lists[name] = [False, True]
        elif name == "steps":
            lists[name] = [max(1, round(each * factor)) for factor in (0.6, 1.0, 1.7)]
        elif name == "full_gradients":
            lists[name] = sorted({each, max(1, round(0.75 * each)), round(1.5 * each)})
        elif name == "learning_rate":
            lists[name] = [0.7 * each, each, 1.4 * each]
        else:
            odds = each / (1.0 - each)
            lists[name] = sorted({value / (1.0 + value) for value in (0.5 * odds, 2.0 * odds)} | {each})
    return lists
