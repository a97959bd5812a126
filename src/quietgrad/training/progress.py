"""How far a run has come and the ε it has spent: an upper value, proved at a few points beforehand."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.curators.base import Session
    from quietgrad.plans.schedule import Plan
    from quietgrad.training import Callback


class SpentSoFar:
    """ε after a number of releases, for a plan whose slots are used in their order.

    >>> from quietgrad import DPGD, Budget, plan
    >>> spent = SpentSoFar(plan(DPGD(steps=8), n=100, budget=Budget(1.0, 1e-5)), points=4)
    >>> [count for count, _ in spent.curve]
    [1, 2, 4, 8]
    >>> spent.after(3) == spent.curve[2][1]
    True
    """

    def __init__(self, plan: Plan, points: int = 10) -> None:
        self.curve: list[tuple[int, float]] = []
        self._plan = plan
        self._again: dict[int, float] = {}  # ε by how often the plan was charged
        if plan.budget is None:
            return
        total = plan.schedule.releases
        if plan.schedule.composition == "sequential" and not any(slot.law for slot in plan.schedule.slots):
            # closer together at first, where ε grows fastest
            marks = sorted({max(1, round(total * (k / points) ** 2)) for k in range(1, points)} - {total})
            self.curve = [(mark, plan.epsilon_after(_first(plan, mark))) for mark in marks]
        self.curve.append((total, plan.epsilon()))

    def after(self, releases: int) -> float | None:
        """ε of the next point at or after ``releases``: never less than what was spent."""
        if not self.curve:
            return None
        at = bisect_left(self.curve, releases, key=lambda point: point[0])
        return self.curve[min(at, len(self.curve) - 1)][1]

    def of(self, session: Session) -> float | None:
        """ε of a session so far; ``None`` if it is not private.

        A run that was charged again, because it was resumed on other sums, has spent its plan as often: which of
        its releases were made before is in its transcript alone, so each charge counts whole.
        """
        if session.seeded:
            return None
        again = session.epochs
        if again == 1 or not self.curve:
            return self.after(sum(session.used.values()))
        if again not in self._again:
            self._again[again] = self._charged(again)
        return self._again[again]

    def curve_of(self, epsilon: float | None) -> list[tuple[int, float]] | None:
        """The curve of a run that states ``epsilon``; ``None`` for one that was charged again and is above it."""
        whole = epsilon is None or not self.curve or epsilon <= self.curve[-1][1] * (1 + 1e-9)
        return self.curve if whole else None

    def _charged(self, times: int) -> float:
        """ε of the whole plan, so many times."""
        from quietgrad.privacy.accounting import account
        from quietgrad.privacy.events import composed

        budget = self._plan.budget
        assert budget is not None
        return account(composed([self._plan.event] * times), delta=budget.delta, relation=budget.relation)


def _first(plan: Plan, releases: int) -> dict[str, int]:
    """The first ``releases`` of a plan, slot by slot."""
    counts: dict[str, int] = {}
    for slot in plan.schedule.slots:
        counts[slot.name] = min(slot.count, releases)
        releases -= counts[slot.name]
    return counts


@contextmanager
def progress(plan: Plan, spent: SpentSoFar, title: str, *, quiet: bool) -> Iterator[Callback]:
    """A bar on stderr with steps and ε; without a terminal, nothing. Yields the callback that a run calls."""
    if quiet or not sys.stderr.isatty():
        yield lambda state, session: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    total = plan.schedule.releases
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=10) as bar:
        task = bar.add_task(title, total=total, spent="")
        every = max(1, total // 200)  # telling the bar costs more than a small step

        def tell(state: Any, session: Any) -> None:
            if state.step % every and not state.done:
                return
            used = sum(session.used.values())
            now = spent.of(session)
            bar.update(task, completed=used, spent="" if now is None else f"ε ≤ {now:.3g}")

        yield tell
