"""The progress of a run: a line for each round, and a file that `federate status` reads."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quietgrad.errors import DataError
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan_file import PlanFile
from quietgrad.federation.secure_roles import Member
from quietgrad.federation.transport import Bytes, Handler
from quietgrad.files import read_json
from quietgrad.training.callbacks import Progress as RunProgress

FILE = "progress.json"
_EVERY = 0.2  # seconds between two lines: faster rounds share one
_WIDTH = 20


class RunStatus:
    """Tells of one member's rounds and keeps the last line in its folder.

    Args:
        folder: the member's.
        name: the member's.
        file: the plan.
        tell: is told the lines.
    """

    def __init__(self, folder: Path, name: str, file: PlanFile, tell: Callable[[str], None]) -> None:
        self._folder, self._tell, self._next = folder, tell, 0.0
        self._facts: dict[str, Any] = {
            "member": name, "federation": file.name, "plan": file.digest, "of": file.plan.schedule.releases,
            "spent": _spent(file), "rounds": 0, "lost": 0, "words": "waiting for the others",
        }  # fmt: skip
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # a run that goes on, or only hands out its model
            before = read_json(folder / FILE)
            if before.get("plan") == file.digest and before.get("member") == name:
                self._facts |= {key: int(before[key]) for key in ("rounds", "lost") if key in before}

    def callback(self, progress: RunProgress) -> None:
        """After every step of the coordinator."""
        if progress.step:
            lost = max(0, progress.releases - progress.planned)  # spare rounds pay for those that were lost
            self._round(progress.releases - lost, lost, last=progress.done)

    def watching(self, member: Member) -> Handler:
        """The member's handler, with a line for every round that it answers."""
        if not isinstance(member, PartyCurator):
            return member.handle

        def handle(message: Bytes) -> Bytes:
            reply = member.handle(message)
            answered = sum(member.answered().values())
            if answered != self._facts["rounds"]:
                self._round(answered, 0, last=answered >= self._facts["of"])
            return reply

        return handle

    def end(self, words: str) -> None:
        """The run is over."""
        self._facts["words"] = words
        self._write()

    def _round(self, rounds: int, lost: int, *, last: bool) -> None:
        self._facts |= {"rounds": rounds, "lost": max(lost, 0), "words": "running"}
        if not last and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        self._tell(line(self._facts))
        self._write()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        facts = {**self._facts, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        fresh = self._folder / f".{FILE}.tmp"
        fresh.write_text(json.dumps(facts) + "\n", encoding="utf-8")  # not synchronised: nothing depends on it
        fresh.replace(self._folder / FILE)


def line(facts: dict[str, Any]) -> str:
    """A round in one line.

    >>> line({"rounds": 15, "of": 60, "lost": 1, "spent": "ε = 1 is charged"})
    'round 15 of 60 [█████···············] 1 lost; ε = 1 is charged'
    """
    done = min(_WIDTH, round(_WIDTH * facts["rounds"] / max(1, facts["of"])))
    lost = f" {facts['lost']} lost;" if facts["lost"] else ""
    return f"round {facts['rounds']} of {facts['of']} [{'█' * done}{'·' * (_WIDTH - done)}]{lost} {facts['spent']}"


def status(folder: Path) -> dict[str, Any]:
    """Where the run in a member's folder is."""
    try:
        facts = dict(read_json(folder / FILE))
        facts["line"] = line(facts)
        return facts
    except FileNotFoundError:
        raise DataError(f"{folder}: no run was begun here.") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{folder / FILE}: cannot be read; it is made anew with the next round.") from None


def _spent(file: PlanFile) -> str:
    if file.budget is None:
        return "NOT PRIVATE"
    return f"ε = {file.budget.epsilon:g} (δ = {file.budget.delta:g}) is charged, all of the plan"
