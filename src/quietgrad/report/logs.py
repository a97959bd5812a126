"""Experiment trackers: what a run tells of itself while it trains, sent to MLflow or TensorBoard.

Only public numbers are sent: the step, the ε spent so far, the norm of the released estimate. Scores are data; they
are sent only with ``metrics=True``. Both loggers are callbacks of :func:`quietgrad.minimize` and of
``quietgrad.torch.fit``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from quietgrad.errors import QuietgradError
from quietgrad.training.progress import SpentSoFar
from quietgrad.training.result import Result
from quietgrad.vectors import norm

__all__ = ["MLflowLog", "TensorBoardLog"]


class _Log(ABC):
    """Takes ``(state, session)`` of a loop over tables or the progress of a loop over modules."""

    def __init__(self, *, every: int = 10, metrics: bool = False) -> None:
        if every < 1:
            raise ValueError(f"every={every!r}: must be a whole number of steps ≥ 1.")
        self._every, self._metrics = every, metrics
        self._spent: SpentSoFar | None = None

    def __call__(self, state: Any, session: Any = None) -> None:
        """Send the public numbers of this step, if one is due."""
        step = int(state.step)
        if step % self._every and not getattr(state, "done", False):
            return
        self._send(step, self._told(state) if session is None else self._public(state, session))

    def _told(self, progress: Any) -> dict[str, float]:
        known = {"epsilon": progress.epsilon, "estimate_norm": progress.estimate_norm}
        scores = dict(progress.metrics) if self._metrics else {}
        return {name: float(value) for name, value in {**known, **scores}.items() if value is not None}

    def _public(self, state: Any, session: Any) -> dict[str, float]:
        if self._spent is None:
            self._spent = SpentSoFar(session.plan)
        epsilon = self._spent.of(session)
        found = {} if epsilon is None else {"epsilon": float(epsilon)}
        if state.estimate.value is not None:
            found["estimate_norm"] = float(norm(state.estimate.value))
        return found

    @abstractmethod
    def _send(self, step: int, numbers: dict[str, float]) -> None: ...


class TensorBoardLog(_Log):
    """Scalars for TensorBoard, without PyTorch; needs the ``tensorboard`` package.

    Args:
        folder: where its event files go.
        every: send every so many steps.
        metrics: also send the scores of an ``evaluate`` function, which are data.
    """

    def __init__(self, folder: str | Path, *, every: int = 10, metrics: bool = False) -> None:
        super().__init__(every=every, metrics=metrics)
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise QuietgradError("TensorBoardLog needs tensorboard: `pip install 'quietgrad[logs]'`.") from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        import time

        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        event = self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class MLflowLog(_Log):
    """Metrics of the active MLflow run; needs the ``mlflow`` package.

    :meth:`finish` also logs what a result states: the settings, and the promise as tags.

    Args:
        every: send every so many steps.
        metrics: also send the scores of an ``evaluate`` function, which are data.
    """

    def __init__(self, *, every: int = 10, metrics: bool = False) -> None:
        super().__init__(every=every, metrics=metrics)
        try:
            import mlflow
        except ImportError:
            raise QuietgradError("MLflowLog needs mlflow: `pip install 'quietgrad[logs]'`.") from None
        self._mlflow = mlflow

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def finish(self, result: Result) -> None:
        """Log the settings and the privacy statement of ``result``; none of its scores."""
        settings = {key: str(value)[:200] for key, value in result.config.items()}
        self._mlflow.log_params({"algorithm": result.algorithm, "n_public": result.n_public, **settings})
        privacy = result.privacy
        stated = {"epsilon": privacy.epsilon, "delta": privacy.delta, "relation": privacy.relation}
        tags = {**stated, "accountant": privacy.accountant, "is_private": privacy.is_private}
        self._mlflow.set_tags({f"privacy.{key}": str(value) for key, value in tags.items()})
