"""Members of a federation who do not keep to the rules, over real TLS with real keys, against real processes.

Used by ``tests/test_federation_hostile.py`` and by ``benchmarks/federation_faults.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation.exchange import Responder
from quietgrad.federation.plan_file import PlanFile
from quietgrad.federation.provisioning import Credentials
from quietgrad.federation.rounds import largest_reply
from quietgrad.federation.transport import Bytes
from quietgrad.federation.transport.tls import TlsParty, TlsServer
from quietgrad.federation.wire import Message, decode, encode, pack
from tests.federation.talk import Talk


class HostileCoordinator:
    """Says whatever it likes to party b, with the coordinator's own keys.

    Args:
        file: the agreed plan, of full-batch gradients.
        keys: the folder of everybody's keys.
        agreement: the digest it claims to go by, if not the plan's.
    """

    def __init__(self, file: PlanFile, keys: Path, agreement: str = "") -> None:
        self.plan = file.plan
        self._server = TlsServer(
            Credentials.read(keys / "coordinator"), (file.host, file.port), ["a", "b"],
            agreement=agreement or file.digest, most=largest_reply(file.plan),
        )  # fmt: skip
        self._talk = Talk(self._server, agreement or file.digest)

    def say(self, kind: str, arrays: Any = None, **fields: Any) -> Message:
        """Party b's answer to one message."""
        message = Message(kind, {"plan": self.plan.digest, **fields}, arrays or {})
        return decode(self._talk.exchange({"b": encode(message)}, timeout=60.0)[0]["b"])

    def ask(self, run: str, t: int, clip: float = 1.0, **fields: Any) -> Message:
        """Party b's answer to one round."""
        query, arrays = pack(GradientQuery(np.zeros(self.plan.shape.dim), clip))
        words = {"run": run, "round": t, "slot": "gradient", "draw": t, "rho": None, "query": query}
        return self.say("ask", arrays, **{**words, **fields})

    def releases(self, run: str, first: int, count: int) -> int:
        """How many of these rounds party b answers with a vector."""
        return sum(self.ask(run, t).kind == "sum" for t in range(first, first + count))

    def finish(self, words: str) -> None:
        """Send everybody away."""
        self._talk.finish(words)


def lying_party(file: PlanFile, keys: Path) -> TlsParty:
    """Party a, whose every sum is no number."""

    def lie(data: Bytes) -> Bytes:
        message = decode(bytes(data))
        fields = {"run": message.fields["run"], "round": message.fields.get("round")}
        if message.kind == "ask":
            return encode(Message("sum", fields, {"total": np.full(file.plan.shape.dim, np.nan)}))
        return encode(Message("ready", {**fields, "round": -1, "draws": {}}))

    return TlsParty(
        Credentials.read(keys / "a"), (file.host, file.port), Responder(lie, file.digest), agreement=file.digest,
        most=largest_reply(file.plan), patience=60.0,
    )  # fmt: skip
