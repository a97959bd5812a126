"""What a run tells while it trains, and two listeners: a CSV file and TensorBoard.

All but the scores of an ``evaluate`` function is public: steps, the ε spent so far, norms of released estimates.
Scores look at records without noise; listeners write them down only with ``metrics=True``, as those of
:mod:`quietgrad.report.logs` do.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CSVLog", "Callback", "Progress", "TensorBoardLog"]


@dataclass(frozen=True)
class Progress:
    """Where a run stands. ``epsilon`` is an upper bound of what was spent; ``None`` if the run is not private."""

    step: int
    steps: int
    epsilon: float | None
    estimate_norm: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def row(self, *, metrics: bool = False) -> dict[str, float]:
        """The public numbers by name; with ``metrics`` the scores too, which are data."""
        known = {"step": self.step, "epsilon": self.epsilon, "estimate_norm": self.estimate_norm}
        public = {name: value for name, value in known.items() if value is not None}
        return public | dict(self.metrics) if metrics else public


Callback = Callable[[Progress], None]


class CSVLog:
    """Append one row per report to a CSV file, at once: an interrupted run leaves all rows but the next.

    Args:
        path: the file.
        metrics: also write the scores of an ``evaluate`` function, which are data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CSVLog(Path(folder) / "log.csv")
    ...     log(Progress(10, 20, 0.5, 1.25, {"accuracy": 0.9}))
    ...     print((Path(folder) / "log.csv").read_text())
    step,epsilon,estimate_norm
    10,0.5,1.25
    <BLANKLINE>
    """

    def __init__(self, path: str | Path, *, metrics: bool = False) -> None:
        self.path, self._metrics = Path(path), metrics
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, progress: Progress) -> None:
        row = progress.row(metrics=self._metrics)
        new = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(row)
            writer.writerow(row.values())


class TensorBoardLog:
    """Write every public number as a scalar for TensorBoard, which must be installed.

    Args:
        folder: where its event files go.
        metrics: also write the scores of an ``evaluate`` function, which are data.
    """

    def __init__(self, folder: str | Path, *, metrics: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoardLog needs the tensorboard package; CSVLog needs nothing.") from None
        self._writer: Any = SummaryWriter(str(folder))
        self._metrics = metrics

    def __call__(self, progress: Progress) -> None:
        for name, value in progress.row(metrics=self._metrics).items():
            if name != "step":
                self._writer.add_scalar(name, value, progress.step)
        self._writer.flush()
