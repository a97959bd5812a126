"""Callbacks of a training run: one protocol for tables, networks and parties.

A callback is called with a :class:`Progress`: once with step 0, before anything is reserved in a ledger, and then
after steps. Whatever is wrong with a callback shows in that first call, where it costs nothing.

All that a ``Progress`` says is public but the scores of an ``evaluate`` function, which read records without
noise. The logs here write those down only with ``metrics=True``.
"""

from __future__ import annotations

import csv
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import composed
from quietgrad.core.errors import QuietgradError
from quietgrad.core.vectors import OwnVector, norm
from quietgrad.methods.result import Result

if TYPE_CHECKING:
    from quietgrad.core.plans.schedule import Plan
    from quietgrad.core.session.base import Session
    from quietgrad.methods.base import Algorithm, State

__all__ = ["CSVLog", "Callback", "MLflowLog", "Progress", "TensorBoardLog"]


@dataclass
class Progress:
    """Where a run stands.

    ``step`` counts the updates and ``releases`` the charged releases, of ``planned`` ones (rounds that parties lost
    are charged too). ``params`` are the parameters as they are now and ``estimate`` the released gradient estimate;
    ``metrics`` are scores, which are data. ``spent`` proves ε when asked for. ``plan`` is there from step 1 on.
    """

    step: int
    releases: int
    planned: int
    params: OwnVector = field(repr=False)
    estimate: OwnVector | None = field(default=None, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    spent: Callable[[], float | None] = field(default=lambda: None, repr=False)
    plan: Plan | None = field(default=None, repr=False)
    stopped: bool = field(default=False, init=False)

    @cached_property
    def epsilon(self) -> float | None:
        """An upper bound of the ε spent so far; ``None`` if the run is not private."""
        return self.spent()

    @property
    def estimate_norm(self) -> float:
        """The norm of the released estimate; not a number while there is none."""
        return math.nan if self.estimate is None else norm(self.estimate)

    def stop(self) -> None:
        """End the run after this step.

        What led to it may be data, so the whole ε of the plan counts.

        At step 0 it says nothing: the run has not begun.
        """
        self.stopped = self.step > 0

    def row(self, *, metrics: bool = False) -> dict[str, float]:
        """The public numbers by name; with ``metrics`` the scores too, which are data."""
        numbers = {"epsilon": self.epsilon, "estimate_norm": self.estimate_norm}
        public = {name: value for name, value in numbers.items() if value is not None and not math.isnan(value)}
        return {"step": self.step, **public, **(self.metrics if metrics else {})}


class Callback(Protocol):
    """An observer of a run: a function or an object that takes a :class:`Progress`."""

    def __call__(self, progress: Progress, /) -> object:
        """Called with step 0 before anything is reserved, then after steps."""
        ...


def begin(callback: Callback | None, releases: int, x0: OwnVector, *, private: bool) -> None:
    """Report step 0. The caller reserves nothing before this has returned, not even a count of its records."""
    if callback is not None:
        callback(Progress(0, 0, releases, x0, spent=lambda: 0.0 if private else None))


def together(callbacks: Iterable[Callback | None]) -> Callback:
    """Several callbacks as one."""
    those = [callback for callback in callbacks if callback is not None]

    def tell(progress: Progress) -> None:
        for callback in those:
            callback(progress)

    return tell


def report(algorithm: Algorithm, session: Session, state: State, callback: Callback) -> None:
    """Tell of ``state``, which ends if the callback says so."""
    plan, used = session.plan, sum(session.used.values())
    progress = Progress(
        state.step, used, plan.schedule.releases, algorithm.output(state), state.estimate.value, done=state.done,
        spent=lambda: None if session.seeded else _spent(plan, session.epochs, used), plan=plan,
    )  # fmt: skip
    callback(progress)
    if progress.stopped and not state.done:
        state.done, state.stopped_by = True, "callback"


_account = lru_cache(maxsize=8)(account)  # the same event is asked about after every step


def _spent(plan: Plan, charges: int, used: int) -> float | None:
    """ε of a session so far: the plan's next proved point at or after what was used.

    A run that was charged again, because it was resumed on other sums, has spent its plan as often: which of its
    releases were made before is in its transcript alone, so each charge counts whole.
    """
    if plan.budget is None:
        return None
    if charges == 1:
        return plan.epsilon_by(used)
    event = plan.with_count(composed([plan.event] * charges))
    return _account(event, delta=plan.budget.delta, relation=plan.budget.relation)


class _Log(ABC):
    """Writes down the public numbers of a run, at most one line for ``every`` steps and the last one."""

    def __init__(self, *, every: int = 1, metrics: bool = False) -> None:
        if every < 1:
            raise ValueError(f"every={every!r}: must be a whole number of steps ≥ 1.")
        self._every, self._metrics, self._next = every, metrics, 0

    def __call__(self, progress: Progress) -> None:
        """Write the numbers of this step, if it is due."""
        if progress.step == 0:
            self._next = 0  # a new run
        if progress.step >= self._next or progress.done:
            self._next = progress.step + self._every
            numbers = {name: float(value) for name, value in progress.row(metrics=self._metrics).items()}
            self._write(progress.step, {name: value for name, value in numbers.items() if name != "step"})

    @abstractmethod
    def _write(self, step: int, numbers: dict[str, float]) -> None: ...


class CSVLog(_Log):
    """Appends rows to a CSV file, each at once.

    An interrupted run leaves all rows but the next.

    The columns are the step, ε, the norm of the estimate and, with ``metrics``, the scores that the first report
    has; a score of another name that comes later has no column and is left out.

    Args:
        path: the file. It is made now, so that a place that cannot be written to is found out now.
        every: write every so many steps.
        metrics: also write the scores of an ``evaluate`` function, which are data.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CSVLog(Path(folder) / "log.csv")
    ...     log(Progress(10, 10, 20, np.zeros(2), np.array([0.75, 1.0]), {"accuracy": 0.9}, spent=lambda: 0.5))
    ...     print((Path(folder) / "log.csv").read_text())
    step,epsilon,estimate_norm
    10,0.5,1.25
    <BLANKLINE>
    """

    def __init__(self, path: str | Path, *, every: int = 1, metrics: bool = False) -> None:
        super().__init__(every=every, metrics=metrics)
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("a").close()

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        with self.path.open("r", newline="") as file:
            columns = next(csv.reader(file), None)
        new = columns is None
        columns = columns or list(dict.fromkeys(["step", "epsilon", "estimate_norm", *numbers]))
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            if new:
                writer.writeheader()
            writer.writerow({"step": step, **numbers})


class TensorBoardLog(_Log):
    """Scalars for TensorBoard; needs the ``tensorboard`` package and not PyTorch.

    Args:
        folder: where its event files go.
        every: write every so many steps.
        metrics: also write the scores of an ``evaluate`` function, which are data.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, metrics: bool = False) -> None:
        super().__init__(every=every, metrics=metrics)
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise QuietgradError("TensorBoardLog needs tensorboard: `pip install 'quietgrad[logs]'`.") from None
        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder))

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        clock = float(math.ceil(time.time()))  # the time of one step depends on the size of its secret sample
        self._writer.add_event(self._event(step=step, wall_time=clock, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class MLflowLog(_Log):
    """Metrics of the active MLflow run; needs the ``mlflow`` package.

    :meth:`finish` also logs what a result states: the settings, and the guarantee as tags.

    Args:
        every: send every so many steps.
        metrics: also send the scores of an ``evaluate`` function, which are data.
    """

    def __init__(self, *, every: int = 1, metrics: bool = False) -> None:
        super().__init__(every=every, metrics=metrics)
        try:
            import mlflow
        except ImportError:
            raise QuietgradError("MLflowLog needs mlflow: `pip install 'quietgrad[logs]'`.") from None
        self._mlflow: Any = mlflow

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def finish(self, result: Result) -> None:
        """Log the settings and the privacy statement of ``result``; none of its scores."""
        settings = {key: str(value)[:200] for key, value in result.config.items()}
        self._mlflow.log_params({"algorithm": result.algorithm, "n_public": result.n_public, **settings})
        privacy = result.privacy.to_json()
        stated = ("epsilon", "delta", "relation", "condition", "accountant", "is_private")
        self._mlflow.set_tags({f"privacy.{name}": str(privacy[name]) for name in stated})
