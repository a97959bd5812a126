"""How far a run has come and the ε it has spent: an upper value, proved at a few points beforehand."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
            now = spent.after(used)
            bar.update(task, completed=used, spent="" if now is None else f"ε ≤ {now:.3g}")

        yield tell
