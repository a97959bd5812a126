"""Checkpoints of a run, its transcript and its secret key: kept while it lasts and destroyed when it is over."""

from __future__ import annotations

import hmac
import json
import time
from pathlib import Path
from typing import Any

from quietgrad.algorithms.base import State
from quietgrad.curators.base import Session
from quietgrad.curators.transcript import Transcript
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.keys import KeyFile
from quietgrad.training import checkpoint as checkpoints
from quietgrad.training.result import Result, load


class Saver:
    """Writes checkpoints of one run, at most every few seconds, and removes them and the key when it is over.

    A seeded run has no secret, so it has no key and no transcript and is never resumed.
    """

    FILE = "checkpoint.safetensors"

    def __init__(
        self,
        folder: Path,
        name: str,
        the_plan: Plan,
        seconds: float,
        notes: tuple[str, ...],
        key: bytes | None,
        *,
        resumed: bool = False,
        released: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / self.FILE
        self._key = key
        self.transcript = (
            None if key is None else Transcript(_transcript(name), name, key, resumed=resumed, least=released)
        )
        self.name = name
        self.seconds = seconds
        self.seconds_before = 0.0
        self.history: list[dict[str, float]] = []
        self.started = self.last = time.monotonic()
        self.meta = {
            "run": name,
            "algorithm": the_plan.algorithm,
            "config": json_values(the_plan.config),
            "n_public": the_plan.n_public,
            "unit": str(the_plan.unit),
            "records_public": the_plan.records_public,
            "budget": None if the_plan.budget is None else the_plan.budget.to_json(),
            "noise_multiplier": the_plan.noise_multiplier,
            "notes": list(notes),
            "seeded": key is None,
        }

    def save(self, state: State, session: Session, *, now: bool = False) -> None:
        """Write a checkpoint if one is due."""
        clock = time.monotonic()
        if not now and clock - self.last < self.seconds:
            return
        rho = session.rho_left if session.plan.schedule.composition == "filter" else None
        self.write(state, session.used, rho)
        self.last = clock

    def write(self, state: State, used: dict[str, int], rho_left: float | None) -> None:
        """Write a checkpoint now."""
        seconds = time.monotonic() - self.started + self.seconds_before
        meta = {**self.meta, "history": self.history, "seconds": seconds}
        if self.transcript is not None and self._key is not None:
            self.transcript.sync()
            meta["released"] = self.transcript.length
            meta["seal"] = seal(self._key, used, rho_left, self.transcript.length)
        checkpoints.save(self.path, checkpoints.Checkpoint(state, used, rho_left, meta))

    def finish(self, result: Result) -> Result:
        """The run is closed: once its result is safe, its key must not outlive it."""
        result.save(self.path.parent)
        self.close()
        discard(self.name, self.path.parent)
        return result

    def close(self) -> None:
        """Let go of the transcript, so that another process may resume the run."""
        if self.transcript is not None:
            self.transcript.close()


def seal(key: bytes, used: dict[str, int], rho_left: float | None, released: int) -> str:
    """A MAC of how far a run had come: what a checkpoint says of it is not believed without."""
    said = json.dumps([sorted(used.items()), rho_left, released])
    return hmac.new(key, said.encode(), "sha256").hexdigest()


def discard(name: str, folder: str | Path | None) -> None:
    """Leave neither a key nor a checkpoint of a run that is over or never began; the key goes first."""
    if folder is not None:
        KeyFile.destroy(name)
        for file in (Path(folder) / Saver.FILE, _transcript(name), people_file(name)):
            file.unlink(missing_ok=True)


def _transcript(name: str) -> Path:
    return KeyFile.directory() / f"{name}.transcript"


def people_file(name: str) -> Path:
    """Where a stream remembers whom it has met."""
    return KeyFile.directory() / f"{name}.people"


def finished_result(folder: Path, name: str) -> Result | None:
    """The saved result of the run, if it came so far before it was interrupted."""
    if not (folder / "result.json").exists():
        return None
    result = load(folder)
    return result if result.details.get("run") == name else None


def json_values(config: Any) -> Any:
    """Settings as they read back from a checkpoint."""
    return json.loads(json.dumps(dict(config)))
