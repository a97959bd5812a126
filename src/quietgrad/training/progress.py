"""How far a run has come and the ε it has spent, as a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quietgrad.training.callbacks import Progress

if TYPE_CHECKING:
    from quietgrad.plans.schedule import Plan

__all__ = ["Watched", "progress_bar"]


class Watched:
    """The callback of a command: it keeps the plan that the run is on, and draws a bar if there is one to draw."""

    def __init__(self, bar: Any = None) -> None:
        self.plan: Plan | None = None
        self._bar, self._task = bar, None

    def __call__(self, progress: Progress) -> None:
        if progress.plan is not None:
            self.plan = progress.plan
        if self._bar is None or (progress.step % max(1, progress.planned // 200) and not progress.done):
            return  # telling the bar costs more than a small step
        if self._task is None:
            title = "training" if self.plan is None else self.plan.algorithm
            self._task = self._bar.add_task(title, total=progress.planned, spent="")
        spent = "" if progress.epsilon is None else f"ε ≤ {progress.epsilon:.3g}"
        self._bar.update(self._task, total=progress.planned, completed=progress.releases, spent=spent)

    def curve_of(self, epsilon: float | None) -> list[tuple[int, float]] | None:
        """ε against releases of a run that states ``epsilon``; ``None`` if it was charged again, or never begun."""
        return None if self.plan is None else self.plan.curve_of(epsilon)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Watched]:
    """The callback that draws a bar on stderr with releases and ε; quiet, or without a terminal, it draws none."""
    if quiet or not sys.stderr.isatty():
        yield Watched()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), refresh_per_second=10) as bar:
        yield Watched(bar)
