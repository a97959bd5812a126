"""Checkpoints of a run, and its secret key: what is kept while it lasts and destroyed when it is over."""

from __future__ import annotations

import hmac
import json
import time
from pathlib import Path
from typing import Any

from quietgrad.algorithms.base import State
from quietgrad.curators.base import Session
from quietgrad.curators.central import CentralCurator
from quietgrad.plans.schedule import Plan
from quietgrad.training import checkpoint as checkpoints
from quietgrad.training.result import Result, load


class Saver:
    """Writes checkpoints of one run, at most every few seconds, and removes them and the key when it is over."""

    FILE = "checkpoint.safetensors"

    def __init__(
        self,
        folder: Path,
        name: str,
        the_plan: Plan,
        seconds: float,
        notes: tuple[str, ...],
        identity: str | None,
        seeded: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / self.FILE
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
            "budget": None if the_plan.budget is None else the_plan.budget.to_json(),
            "noise_multiplier": the_plan.noise_multiplier,
            "environment": checkpoints.environment(),
            "notes": list(notes),
            "identity": identity,
            "seeded": seeded,
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
        checkpoints.save(self.path, checkpoints.Checkpoint(state, used, rho_left, meta))

    def finish(self, result: Result) -> Result:
        """The run is closed: once its result is safe, its key must not outlive it."""
        result.save(self.path.parent)
        discard(self.name, self.path.parent)
        return result


def make_key(name: str, curator: CentralCurator, folder: str | Path | None = None) -> bytes | None:
    """Make the run's key file and let the curator draw from it; a seeded run has no secret to keep."""
    if curator.seeded:
        return None
    from quietgrad.privacy.keys import KeyFile

    key = KeyFile.create(name, folder)
    curator.use_key(key)
    return key


def identity_of(curator: CentralCurator, key: bytes | None) -> str | None:
    """A hash of records and objective under the run's own key, which tells nobody else anything."""
    contents = getattr(curator.records, "contents", None)
    if key is None or contents is None:
        return None
    mac = hmac.new(key, repr(curator.objective).encode(), "sha256")
    for part in contents():
        mac.update(part)
    return mac.hexdigest()


def discard(name: str, folder: str | Path | None) -> None:
    """Leave neither a key nor a checkpoint of a run that is over or never began; the key goes first."""
    if folder is not None:
        from quietgrad.privacy.keys import KeyFile

        KeyFile.destroy(name)
        (Path(folder) / Saver.FILE).unlink(missing_ok=True)


def finished_result(folder: Path, name: str) -> Result | None:
    """The saved result of the run, if it came so far before it was interrupted."""
    if not (folder / "result.json").exists():
        return None
    result = load(folder)
    return result if result.details.get("run") == name else None


def json_values(config: Any) -> Any:
    """Settings as they read back from a checkpoint."""
    return json.loads(json.dumps(dict(config)))
