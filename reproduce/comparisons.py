"""The rule for comparisons of tuned methods, which the build enforces on every result file that holds one.

A comparison says something about methods only if each had its best settings, and if nothing but the methods
differed. So a result file states, for every contender, the lists that were searched, what was chosen from them, how
many settings were tried, and the clip that its updates worked with. :meth:`Comparison.faults` names what is wrong:

- the best value of an ordered setting is the last of its list: a longer list could change the result;
- one contender tried more than twice as many settings as another;
- the outcome is that of chance: its standard error is above a tenth of it, or a rerun on other seeds is further
  away than three standard errors. A setting that nearly diverges looks best on few seeds;
- effective clips differ: then the comparison is one of clips. DP-SRM's joint clip γC1 + (1−γ)C2 is applied to
  g − (1−γ)g′, which a constant gradient makes γ·g, so its updates work with gradients of length clip ÷ γ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Searched:
    """An ordered setting: its list, what was chosen, and an end that no list can pass (0 for momentum)."""

    name: str
    values: Sequence[float]
    chosen: float
    natural_end: float | None = None

    def at_an_edge(self) -> bool:
        """Whether the choice is the least or the largest of several, and not where the setting itself ends.

        >>> Searched("steps", [10, 30, 100], 100).at_an_edge(), Searched("momentum", [0, 0.9], 0, 0).at_an_edge()
        (True, False)
        """
        ends = {min(self.values), max(self.values)} - {self.natural_end}
        return len(set(self.values)) > 1 and self.chosen in ends


@dataclass(frozen=True)
class Outcome:
    """What the chosen settings reached on fresh seeds, and on others again, each with its standard error."""

    mean: float
    error: float
    again: float
    again_error: float

    def faults(self) -> Iterator[str]:
        """What makes it one of chance.

        >>> list(Outcome(2.0, 0.1, 2.1, 0.1).faults()), len(list(Outcome(2.75, 2.5, 0.2, 0.1).faults()))
        ([], 1)
        """
        if not self.error <= 0.1 * abs(self.mean):
            yield f"{self.mean:.3g} ± {self.error:.2g} has a standard error above a tenth of it"
        if not abs(self.mean - self.again) <= 3.0 * math.hypot(self.error, self.again_error):
            yield (
                f"{self.mean:.3g} ± {self.error:.2g} is {self.again:.3g} ± {self.again_error:.2g} on other seeds, "
                "more than three standard errors away"
            )


@dataclass(frozen=True)
class Contender:
    """A method of a comparison: what was searched, how many settings were tried, and its effective clip."""

    method: str
    searched: Sequence[Searched]
    tried: int
    effective_clip: float
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Comparison:
    """Methods that are compared at one budget."""

    what: str
    contenders: Sequence[Contender]

    def faults(self, tolerance: float = 0.05) -> Iterator[str]:
        """What keeps it from being published; effective clips may differ by the share ``tolerance``."""
        for each in self.contenders:
            for setting in each.searched:
                if setting.at_an_edge():
                    yield (
                        f"{self.what}: {each.method}'s best {setting.name} = {setting.chosen:g} is at an end of "
                        f"{list(setting.values)}: search further"
                    )
            if each.outcome is not None:
                yield from (f"{self.what}: {each.method}'s {fault}" for fault in each.outcome.faults())
        tried = {each.method: each.tried for each in self.contenders}
        if max(tried.values()) > 2 * min(tried.values()):
            yield f"{self.what}: unequal search, {tried}"
        clips = {each.method: each.effective_clip for each in self.contenders}
        if max(clips.values()) > (1.0 + tolerance) * min(clips.values()):
            yield f"{self.what}: effective clips differ, {clips}: compare at equal ones"

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Rebuild it."""
        contenders = [
            Contender(
                each["method"],
                [Searched(**one) for one in each["searched"]],
                each["tried"],
                each["effective_clip"],
                Outcome(**each["outcome"]) if each.get("outcome") else None,
            )
            for each in data["contenders"]
        ]
        return cls(data["what"], contenders)


def comparisons(node: Any) -> Iterator[Comparison]:
    """Every comparison that a result file holds, wherever it is in it."""
    if isinstance(node, Mapping):
        if "contenders" in node:
            yield Comparison.from_json(node)
        else:
            for each in node.values():
                yield from comparisons(each)
    elif isinstance(node, list):
        for each in node:
            yield from comparisons(each)
