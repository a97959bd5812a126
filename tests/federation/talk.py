"""Raw bytes through a transport, framed as an exchange frames them: for tests of what carries the frames."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.session.queries import Query
from quietgrad.federation import Party, deal
from quietgrad.federation.approved import Approved
from quietgrad.federation.exchange import ASK, Envelope, Exchange, agreement_of, body
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.transport import Away, Bytes, Handler
from quietgrad.federation.wire import Message, decode, encode, pack


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


def people(m: int = 4) -> list[Party]:
    """The parties of a small table."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    return deal(X, (X[:, 0] > 0.0) * 1.0, m)


def say(handle: Handler, kind: str, arrays: Mapping[str, Any] | None = None, **fields: Any) -> Message:
    """What a member answers to one message."""
    return decode(bytes(handle(encode(Message(kind, fields, arrays or {})))))


def ask(handle: Handler, query: Query, /, **fields: Any) -> Message:
    """What a party answers to one question, the first of the run unless ``fields`` say otherwise."""
    packed, arrays = pack(query)
    words = {"run": "r", "round": 0, "slot": "gradient", "draw": 0, "query": packed}
    return say(handle, "ask", arrays, **{**words, **fields})


def opened(party: PartyCurator, run: str = "r") -> PartyCurator:
    """A party that is ready for a run."""
    assert say(party.handle, "open", run=run, plan=party.plan.digest).kind == "ready"
    return party


class Talk:
    """A coordinator that says what it likes, and claims to go by the plan ``agreement``."""

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
