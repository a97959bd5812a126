"""Where one member's run is: lines while it goes on, and what `quietgrad federate status` reads.

Nothing depends on it: it is for the people who run a member, and for their monitoring.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quietgrad.core.errors import DataError
from quietgrad.core.files import read_json, write_atomically
from quietgrad.federation.exchange import Tell
from quietgrad.federation.pins import pin_of
from quietgrad.federation.plan_file import PlanFile
from quietgrad.federation.provisioning import Credentials
from quietgrad.federation.revocation import COORDINATOR
from quietgrad.methods.callbacks import Progress

PROGRESS = "progress.json"
_EVERY = 0.2  # seconds between two lines: faster rounds share one
_SOON = 30  # days before a certificate's end from which on every line says so


class RunStatus:
    """Tells of one member's rounds, a line each, and keeps the last line in its folder.

    ``role`` is the member's: party, server of secure sums, or coordinator. ``away`` are, for a coordinator, the
    members that did not answer the last time, by name with the reason.
    """

    def __init__(
        self,
        folder: Path,
        keys: Credentials,
        file: PlanFile,
        tell: Tell,
        role: str = COORDINATOR,
        away: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._folder, self._tell, self._next = folder, tell, 0.0
        self._revocations, self._away = keys.revocations, away
        spent = "NOT PRIVATE"
        if file.budget is not None:
            spent = f"ε = {file.budget.epsilon:g} (δ = {file.budget.delta:g}) is charged, all of the plan"
        self._facts: dict[str, Any] = {
            "member": keys.name, "role": role, "federation": file.name, "plan": file.digest, "pin": pin_of(file),
            "of": file.plan.schedule.releases, "spent": spent, "rounds": 0, "lost": 0,
            "certificate_until": keys.certificate.not_valid_after_utc.date().isoformat(),
        }  # fmt: skip
        with contextlib.suppress(OSError, ValueError, AttributeError):  # of a run that goes on
            before = read_json(folder / PROGRESS)
            if before.get("plan") == file.digest and before.get("member") == keys.name:
                self._facts |= {key: int(before[key]) for key in ("rounds", "lost") if key in before}

    def callback(self, progress: Progress) -> None:
        if progress.step:
            lost = max(0, progress.releases - progress.planned)  # spare rounds pay for those that were lost
            self.answered(progress.releases - lost, lost)

    def answered(self, rounds: int, lost: int = 0) -> None:
        """Tell how many rounds are complete, or answered by this member."""
        if (rounds, lost) == (self._facts["rounds"], self._facts["lost"]):
            return
        self._facts |= {"rounds": rounds, "lost": lost}
        if rounds >= self._facts["of"] or time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._tell(line(self._facts))
            self.write("running")

    def write(self, words: str) -> None:
        """Keep where the run is; nothing depends on it, so a full disk ends no run here."""
        facts = {**self._facts, "words": words, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError, DataError):
            facts |= {"revoked": self._revocations(), "away": dict(self._away())}
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / PROGRESS, (json.dumps(facts) + "\n").encode())


def line(facts: Mapping[str, object]) -> str:
    lost = f" ({facts['lost']} lost)" if facts["lost"] else ""
    return f"round {facts['rounds']} of {facts['of']}{lost}; {facts['spent']}"


def read_status(folder: Path) -> dict[str, Any]:
    """Read what a member of any role keeps of its run."""
    try:
        facts = dict(read_json(folder / PROGRESS))
        return {**facts, "line": line(facts)}
    except FileNotFoundError:
        raise DataError(f"{folder}: no run was begun here.") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{folder / PROGRESS}: cannot be read; it is made anew with the next round.") from None


def status_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that a terminal shows of :func:`read_status`. Files of earlier versions give fewer."""
    shown = {"role": "role", "federation": "federation", "pin": "plan", "line": "rounds", "words": "words",
             "time": "time"}  # fmt: skip
    rows = [(title, str(facts[key])) for key, title in shown.items() if key in facts]
    with contextlib.suppress(KeyError, ValueError, TypeError):
        until = datetime.date.fromisoformat(facts["certificate_until"])
        left = (until - datetime.datetime.now(datetime.UTC).date()).days
        rows.append(("certificate", f"until {until}, {left} days{'; renew it' if left < _SOON else ''}"))
    for title in ("away", "revoked"):
        reason_by_member = facts.get(title)
        if isinstance(reason_by_member, Mapping) and reason_by_member:
            rows.append((title, "; ".join(f"{name} ({why})" for name, why in reason_by_member.items())))
    return rows
