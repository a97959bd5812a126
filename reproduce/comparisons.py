"""What a comparison of two tuned methods must show before a lead is stated, computed from the recorded fits.

A lead that comes from the search is no lead of a method. So a :class:`Contender` holds what was recorded and
nothing else: the settings that were tried with their scores, and what runs of one setting reached in the end.
Everything else is computed: the choice, the ends of its lists, how many settings were tried, the clip that its
updates worked with. No result file has a place for any of these. :meth:`Comparison.faults` names what forbids a
verdict:

- the final runs are not of the setting that the recorded scores choose, or no scores are recorded;
- the best value of an ordered setting is the last that was tried: a longer list could change the result;
- one contender tried more than twice as many settings as another;
- the outcome is that of chance: its standard error is above a tenth of it, or a rerun on other seeds is further
  away than three standard errors. A setting that nearly diverges looks best on few seeds;
- effective clips differ: then the comparison is one of clips. DP-SRM's joint clip γC1 + (1−γ)C2 is applied to
  g − (1−γ)g′, which a constant gradient makes γ·g, so its updates work with gradients of length clip ÷ γ.

``reproduce/compared.py`` lists the comparisons of all studies. Their verdicts are on the page
``docs/reproductions/comparisons.md``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Settings = Mapping[str, Any]
TIE = 2.0
"""Standard errors of the difference below which two methods tie."""


@dataclass(frozen=True)
class Tried:
    """A setting that was searched, its mean score over ``runs``, and that mean's error if the choice allows for it.

    The score is ``None`` for a setting that the first stage of a search left out.
    """

    settings: Settings
    score: float | None
    runs: int = 1
    error: float = 0.0


@dataclass(frozen=True)
class Reached:
    """What runs of one setting reached: their mean and its standard error, and the same on other seeds."""

    settings: Settings
    mean: float
    error: float | None
    again: float | None = None
    again_error: float = 0.0

    @classmethod
    def of(cls, settings: Settings, scores: Sequence[float]) -> Reached:
        """Of the scores of single runs.

        >>> Reached.of({"step": 1.0}, [3.0, 5.0])
        Reached(settings={'step': 1.0}, mean=4.0, error=1.0, again=None, again_error=0.0)
        """
        error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
        return cls(settings, statistics.fmean(scores), error)

    def faults(self) -> Iterator[str]:
        """What makes it one of chance.

        >>> list(Reached({}, 2.0, 0.1, 2.1, 0.1).faults()), len(list(Reached({}, 2.75, 2.5, 0.2, 0.1).faults()))
        ([], 1)
        """
        if self.error is None:
            yield "result is of one run, without a standard error"
        elif not self.error <= 0.1 * abs(self.mean):
            yield f"{self.mean:.3g} ± {self.error:.2g} has a standard error above a tenth of it"
        elif self.again is not None and not (
            abs(self.mean - self.again) <= 3.0 * math.hypot(self.error, self.again_error)
        ):
            yield (
                f"{self.mean:.3g} ± {self.error:.2g} is {self.again:.3g} ± {self.again_error:.2g} on other seeds, "
                "more than three standard errors away"
            )


Score = Callable[[Mapping[str, Any]], float]


def looked_at(rows: Iterable[Settings], names: Sequence[str], score: Score) -> list[Tried]:
    """The settings that rows of a search hold, with the mean score of the rows of each.

    >>> looked_at([{"step": 1, "error": 3.0}, {"step": 1, "error": 5.0}], ["step"], lambda row: row["error"])
    [Tried(settings={'step': 1}, score=4.0, runs=2, error=0.0)]
    """
    return [
        Tried(given, statistics.fmean(scores), len(scores)) for given, scores in _by_setting(rows, names, score)
    ]


def reached_by(rows: Iterable[Settings], names: Sequence[str], score: Score) -> list[Reached]:
    """What the final runs of each setting reached, from one row a run."""
    return [Reached.of(given, scores) for given, scores in _by_setting(rows, names, score)]


def _by_setting(
    rows: Iterable[Settings], names: Sequence[str], score: Score
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    scores: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for row in rows:
        scores.setdefault(tuple((name, row[name]) for name in names if name in row), []).append(score(row))
    yield from ((dict(key), found) for key, found in scores.items())


def no_natural_end(name: str, chosen: Settings) -> float | None:
    """Momentum cannot be below 0; other settings go on."""
    return 0.0 if name == "momentum" else None


def clip_of(algorithm: Any) -> float:
    """The length of the gradients that an algorithm's updates work with.

    >>> import quietgrad as qg
    >>> clip_of(qg.DPSRM(steps=9, batch_size=9, clip=1.5, gamma=0.5, difference_clip=0.5, joint_clip=True))
    2.0
    """
    if getattr(algorithm, "joint_clip", False):
        gamma = float(algorithm.gamma)
        return round(float(algorithm.clip + (1.0 - gamma) * algorithm.difference_clip / gamma), 12)
    return float(algorithm.clip)


@dataclass(frozen=True)
class Contender:
    """A method of a comparison, as its fits were recorded.

    Args:
        tried: every setting that was searched.
        reached: what final runs reached, of one setting or of several.
        clip: the effective clip of a setting, such as :func:`clip_of` of the algorithm that is run.
        natural_end: the value that an ordered setting cannot pass, given its name and the choice.
        imposed: settings that the other method decides, such as its effective clip. The choice is then among the
            settings tried there; if none was, among all, and the imposed values replace what was chosen.
    """

    method: str
    tried: Sequence[Tried]
    reached: Sequence[Reached]
    clip: Callable[[Settings], float]
    natural_end: Callable[[str, Settings], float | None] = no_natural_end
    imposed: Settings = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many settings were tried."""
        return len({tuple(each.settings.items()) for each in self.tried})

    @property
    def chosen(self) -> Settings | None:
        """Of the settings with most runs the best; of those within its standard error the one with fewest steps."""
        scored = [(each.score, each) for each in self.tried if each.score is not None]
        there = [pair for pair in scored if self.imposed.items() <= pair[1].settings.items()]
        scored = there or scored
        if not scored:
            return None
        most = max(each.runs for _, each in scored)
        final = [pair for pair in scored if pair[1].runs == most]
        least, best = min(final, key=lambda pair: pair[0])
        near = [pair for pair in final if pair[0] <= least + best.error]
        winner = min(near, key=lambda pair: (pair[1].settings.get("steps", 0), pair[0]))[1]
        return {**winner.settings, **self.imposed}

    def values(self, name: str) -> list[float]:
        """The values of an ordered setting that were tried, in order; none of a setting without order."""
        found = {each.settings[name] for each in self.tried if name in each.settings}
        ordered = all(isinstance(each, int | float) and not isinstance(each, bool) for each in found)
        return sorted(found) if ordered else []

    @property
    def edges(self) -> list[str]:
        """The ordered settings whose choice is the least or the largest tried, and not where they end by nature."""
        chosen = {} if self.chosen is None else self.chosen
        found = []
        for name, value in chosen.items():
            values = self.values(name)
            ends = {values[0], values[-1]} - {self.natural_end(name, chosen)} if len(values) > 1 else set()
            if value in ends and name not in self.imposed:
                found.append(name)
        return found

    @property
    def outcome(self) -> Reached | None:
        """What runs of the choice reached."""
        return next((each for each in self.reached if each.settings == self.chosen), None)

    @property
    def effective_clip(self) -> float:
        """The clip that the updates of the choice worked with; NaN without a choice."""
        return math.nan if self.chosen is None else self.clip(self.chosen)

    def faults(self) -> Iterator[str]:
        """What forbids a verdict on this method's part."""
        for name in self.edges:
            values = self.values(name)
            yield f"{self.method}'s best {name} is an end of the {len(values)} tried, {_short(values)}"
        if self.outcome is None:
            yield f"no runs of {self.method} are of what its search chose"
        else:
            yield from (f"{self.method}'s {fault}" for fault in self.outcome.faults())


@dataclass(frozen=True)
class Verdict:
    """What a comparison says: who leads by how many standard errors, that it is a tie, or why it says nothing."""

    kind: Literal["lead", "tie", "not comparable"]
    leader: str | None = None
    standard_errors: float | None = None
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "not comparable":
            return f"not comparable: {'; '.join(self.reasons)}"
        if self.kind == "lead":
            return f"**{self.leader}** leads by {self.standard_errors:.1f} standard errors"
        return f"tie ({self.standard_errors:.1f} standard errors)"


@dataclass(frozen=True)
class Comparison:
    """Methods that are compared at one budget; a smaller score is better."""

    what: str
    contenders: Sequence[Contender]
    study: str = ""

    def faults(self, tolerance: float = 0.05) -> Iterator[str]:
        """What forbids a verdict; effective clips may differ by the share ``tolerance``."""
        if unsearched := [each.method for each in self.contenders if each.chosen is None]:
            yield f"no scores of a search here are recorded for {' and '.join(unsearched)}"
            return
        for each in self.contenders:
            yield from each.faults()
        tried = [each.count for each in self.contenders]
        if max(tried) > 2 * min(tried):
            yield f"unequal search, {_each(tried)} settings"
        clips = [each.effective_clip for each in self.contenders]
        if max(clips) > (1.0 + tolerance) * min(clips):
            yield f"effective clips differ, {_each(clips)}"

    def apart(self) -> float:
        """By how many standard errors of their difference the first contender's score is above the second's."""
        first, second = (each.outcome for each in self.contenders[:2])
        assert first is not None
        assert second is not None
        assert first.error is not None
        assert second.error is not None
        return (first.mean - second.mean) / math.hypot(first.error, second.error)

    def verdict(self) -> Verdict:
        """The verdict, without which no page says who is ahead."""
        if reasons := tuple(self.faults()):
            return Verdict("not comparable", reasons=reasons)
        ahead = self.apart()
        if abs(ahead) < TIE:
            return Verdict("tie", None, abs(ahead))
        return Verdict("lead", self.contenders[ahead > 0.0].method, abs(ahead))


def _short(values: Sequence[float]) -> str:
    return f"{values[0]:g} to {values[-1]:g}"


def _each(values: Sequence[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)
