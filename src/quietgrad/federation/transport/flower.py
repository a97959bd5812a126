"""An app on a Flower SuperLink that is there already: the server app coordinates, client apps carry frames.

Flower starts a process for every message, so the party itself waits behind a socket of its machine
(``quietgrad federate party --listen``), and the client app only carries. SuperNodes have numbers, not names: a
party proves by its identity key which node it is behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from quietgrad.core.errors import QuietgradError
from quietgrad.federation.approved import Approved
from quietgrad.federation.exchange import Introduction
from quietgrad.federation.revocation import COORDINATOR
from quietgrad.federation.transport import Away, Bytes, Clock
from quietgrad.federation.transport.local_socket import carry

_LOOK = 0.05  # seconds between two looks for replies; Flower's own waiting takes three
_WHO = 10.0  # seconds between two questions to nodes without a name
_LARGEST = 1 << 31
server_app, client_app = ServerApp(), ClientApp()


class _Sent(NamedTuple):
    """A frame that a node has not answered yet, and the message that carries it."""

    frame: Bytes
    message: str
    at: float


class FlowerTransport:
    """Frames as Flower's messages of type ``query``, to members known by their public identities.

    A message is given up after ``timeout`` seconds, and may be sent again.
    """

    clock = Clock()

    def __init__(self, grid: Grid, names: Mapping[str, bytes], timeout: float) -> None:
        self._grid, self._names, self._timeout = grid, dict(names), timeout
        self._nodes: dict[str, int] = {}
        self._asked: dict[int, float] = {}
        self._introductions: dict[str, tuple[int, Introduction]] = {}
        self._sent: dict[str, _Sent] = {}

    def parties(self) -> tuple[str, ...]:
        return tuple(self._names)

    def renewed(self) -> set[str]:
        """No member: Flower does not tell."""
        return set()

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        """Push what is not under way and pull what has come."""
        deadline, answers = time.monotonic() + seconds, dict[str, Bytes | Away]()
        here = set(self._grid.get_node_ids())
        self._introduce(here)
        while True:
            waiting = [name for name in frames if name not in answers]
            for name in waiting:
                if self._nodes.get(name) not in here:
                    answers[name] = Away("no SuperNode that is connected has proved to be it")
                elif (under_way := self._sent.get(name)) is None or self._is_over(under_way, frames[name]):
                    message = self._push(self._nodes[name], bytes(frames[name]))
                    self._sent[name] = _Sent(frames[name], message, time.monotonic())
            names = {sent.message: name for name, sent in self._sent.items() if name in waiting}
            for reply in self._pull(set(names)):
                name = names[reply.metadata.reply_to_message_id]
                del self._sent[name]
                answers[name] = bytearray(reply.content["q"]["frame"]) if _good(reply) else Away(_reason(reply))
            if len(answers) == len(frames) or time.monotonic() >= deadline:
                return answers
            time.sleep(_LOOK)

    def close(self) -> None:
        """Flower ends the run."""

    def _is_over(self, sent: _Sent, frame: Bytes) -> bool:
        return sent.frame is not frame or time.monotonic() > sent.at + self._timeout

    def _push(self, node: int, frame: bytes) -> str:
        message = Message(
            RecordDict({"q": ConfigRecord({"frame": frame})}), dst_node_id=node, message_type="query",
            ttl=self._timeout,
        )  # fmt: skip
        return str(next(iter(self._grid.push_messages([message]))))

    def _pull(self, messages: set[str]) -> list[Message]:
        return list(self._grid.pull_messages(messages)) if messages else []

    def _introduce(self, here: set[int]) -> None:
        """Ask nodes without a name who is behind them, and believe signatures only."""
        for reply in self._pull(set(self._introductions)):
            node, asked = self._introductions.pop(reply.metadata.reply_to_message_id)
            frame = bytearray(reply.content["q"]["frame"]) if _good(reply) else b""
            name = next((name for name, key in self._names.items() if asked.is_by(name, key, frame)), None)
            if name is not None:
                self._nodes[name] = node
        if len([name for name in self._nodes if self._nodes[name] in here]) == len(self._names):
            return
        for node in here - set(self._nodes.values()):
            if time.monotonic() - self._asked.get(node, -_WHO) >= _WHO:
                self._asked[node] = time.monotonic()
                asked = Introduction()
                self._introductions[self._push(node, bytes(asked.frame))] = (node, asked)


def _good(reply: Message) -> bool:
    return bool(reply.has_content()) and isinstance(reply.content["q"].get("frame"), bytes)


def _reason(reply: Message) -> str:
    return f"Flower says: {reply.error.reason if reply.has_error() else 'an empty reply'}"


@server_app.main()  # type: ignore[untyped-decorator]
def coordinate(grid: Grid, context: Context) -> None:
    path = os.environ.get("QUIETGRAD_APPROVAL") or str(context.run_config.get("approval", ""))
    mine = Approved.read(path)
    publics = {name: mine.credentials.publics[name] for name in mine.file.members if name != COORDINATOR}
    transport = FlowerTransport(grid, publics, mine.file.timeout)
    mine.coordinate(transport, lambda words: print(f"quietgrad: {words}", flush=True))


@client_app.query()  # type: ignore[untyped-decorator]
def relay(message: Message, context: Context) -> Message:
    """Carry a frame to the party's socket and its reply back; this process holds neither records nor keys."""
    frame: Any = message.content["q"]["frame"]
    socket = str(context.node_config.get("quietgrad-socket", ""))
    if not socket:
        raise QuietgradError("give the SuperNode --node-config 'quietgrad-socket=\"PATH\"'.")
    reply = bytes(carry(socket, frame, most=_LARGEST))
    return Message(content=RecordDict({"q": ConfigRecord({"frame": reply})}), reply_to=message)
