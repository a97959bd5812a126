"""A party's memory of one run: which rounds it answered, so that none is ever answered twice.

With a folder every line is on the disk before the answer leaves, and a party that restarts continues where it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quietgrad.errors import LedgerError
from quietgrad.files import append_privately, parse_json, read_bytes, write_atomically


class Journal:
    """Rounds and draws answered in a run, in memory and optionally in ``folder``.

    >>> journal = Journal(None, "clinic", "digest")
    >>> journal.start("run1")
    False
    >>> journal.record(0, "gradient", 0, None)
    >>> journal.last_round, journal.draws("gradient")
    (0, 1)
    """

    def __init__(self, folder: Path | None, name: str, digest: str) -> None:
        self._folder, self._name, self._digest = folder, name, digest
        self._path: Path | None = None
        self._run = ""
        self._forget()

    def _forget(self) -> None:
        self.last_round = -1
        self.rho = 0.0
        self._draws: dict[str, int] = {}

    def draws(self, slot: str) -> int:
        """One more than the largest draw of a slot that was answered."""
        return self._draws.get(slot, 0)

    def start(self, run: str) -> bool:
        """Begin or continue ``run``; whether it was known already."""
        self._forget()
        self._run = run
        if self._folder is None:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"{self._name}-{run}.journal"
        known = self._path.exists()
        if known:
            self._replay(self._path)
        else:
            self._write({"plan": self._digest, "run": run})
        return known

    def interrupted(self) -> bool:
        """Whether the folder holds a run of this party that did not end."""
        return self._folder is not None and any(self._folder.glob(f"{self._name}-*.journal"))

    def record(self, t: int, slot: str, draw: int, rho: float | None) -> None:
        """Round ``t`` is about to be answered."""
        self._write({"round": t, "slot": slot, "draw": draw, "rho": rho})
        self._apply(t, slot, draw, rho)

    def key(self, run: str) -> bytes | None:
        """The run's secret key, kept apart from the journal; ``None`` without a folder."""
        if self._path is None:
            return None
        from quietgrad.privacy.keys import KeyFile, KeyFileError

        name = f"{run}-{self._name}"
        try:
            return KeyFile.load(name)
        except KeyFileError:
            return KeyFile.create(name, self._folder)

    def finish(self) -> None:
        """The run is over: remove its journal and its key."""
        if self._path is not None:
            from quietgrad.privacy.keys import KeyFile

            KeyFile.destroy(f"{self._run}-{self._name}")
            self._path.unlink(missing_ok=True)

    def _apply(self, t: int, slot: str, draw: int, rho: float | None) -> None:
        self.last_round = t
        self._draws[slot] = draw + 1
        self.rho += rho or 0.0

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
        append_privately(self._path, json.dumps(line).encode() + b"\n")

    def _replay(self, path: Path) -> None:
        lines = read_bytes(path).split(b"\n")
        try:
            # What follows the last newline was torn by a crash, before its answer left.
            entries = [parse_json(line) for line in lines[:-1]]
        except ValueError:
            raise LedgerError(f"{path}: the journal is damaged; remove it and pay for a new run.") from None
        if not entries or entries[0].get("plan") != self._digest:
            raise LedgerError(f"{path}: the journal is of another plan.")
        for entry in entries[1:]:
            self._apply(entry["round"], entry["slot"], entry["draw"], entry["rho"])
        if lines[-1]:
            write_atomically(path, b"\n".join(lines[:-1]) + b"\n", private=True)
