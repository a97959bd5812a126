"""Raw bytes through a transport, framed as an exchange frames them: for tests of what carries the frames."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quietgrad.federation.approved import Approved
from quietgrad.federation.exchange import ASK, Envelope, Exchange, agreement_of, body
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.transport import Away, Bytes


def toml_plan(
    parties: Mapping[str, int], federation: str = 'trust = "curator"', *, steps: int, features: int,
    coordinator: str = 'address = "127.0.0.1:7443"', data: str = "", delta: str = "1e-5",
) -> str:  # fmt: skip
    """A plan file of DP-GD on a logistic loss at ε = 1."""
    rows = [
        "[federation]", federation, "[coordinator]", coordinator, "[algorithm]", 'name = "dp-gd"',
        f"steps = {steps}", "[objective]", 'name = "logistic"', "[data]", f"features = {features}", data,
        "[budget]", "epsilon = 1.0", f"delta = {delta}",
        *(f'[[party]]\nname = "{name}"\nrecords = {n}' for name, n in parties.items()),
    ]  # fmt: skip
    return "\n".join(["", *(row for row in rows if row), ""])


def approval(text: str, keys: Path, out: Path, **settings: Any) -> Approved:
    """One member's approval of the plan in a text."""
    return Approved(text, parse_plan(text).digest, str(keys), str(out), **settings)


class Talk:
    """A coordinator that says what it likes.

    Args:
        transport: how frames travel.
        agreement: the plan that it claims to go by.
    """

    def __init__(self, transport: Any, agreement: str = "plan") -> None:
        self._transport, self._agreement = transport, agreement
        self._session, self._number = os.urandom(16), 0
        self.why: dict[str, str] = {}

    def exchange(self, messages: Mapping[str, Bytes], timeout: float) -> tuple[dict[str, Bytes], list[str]]:
        """Replies by name, and who did not answer within ``timeout`` seconds."""
        self._number += 1
        envelope = Envelope(ASK, self._number, self._session, agreement_of(self._agreement))
        frames = {name: envelope.around(message) for name, message in messages.items()}
        replies: dict[str, Bytes] = {}
        limit = time.monotonic() + timeout
        while (waiting := {n: f for n, f in frames.items() if n not in replies}) and time.monotonic() < limit:
            for name, reply in self._transport.send(waiting, min(0.3, limit - time.monotonic())).items():
                if isinstance(reply, Away):
                    self.why[name] = str(reply)
                elif Envelope.of(reply).number == self._number:
                    replies[name] = body(reply)
            time.sleep(0.01)
        return replies, [name for name in messages if name not in replies]

    def finish(self, words: str, parting: Bytes = b"") -> None:
        """Tell everybody that it is over, and hang up."""
        Exchange(self._transport, agreement=self._agreement).finish(words, parting, seconds=2.0)
        self._transport.close()
