"""Parties on NVIDIA FLARE 2.9: its network, mutual TLS and jobs; our plans and refusals (extra ``federated``).

A job is two of these objects and no code: :class:`Coordinator` runs in the server's job process, :class:`Site` in
each party's, both from the copy of this package that is installed there. What a site reads and writes (plan, keys,
records, ledger) stands in a file of its own (:class:`~quietgrad.federation.flare.SiteSettings`), never in the job.

FLARE's own call may outlive its timeout by minutes when a site was killed, and leaves out a site that was late.
Here every party has a thread of its own that waits for FLARE; the exchange itself ends at its deadline, counts, and
names who is missing. A party whose earlier call still hangs is not called again, so hung calls never pile up.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvflare.collab import collab

from quietgrad.errors import QuietgradError
from quietgrad.federation import network
from quietgrad.federation.flare import SiteSettings
from quietgrad.federation.provision import Credentials
from quietgrad.federation.toml_plan import PlanFile, read_plan
from quietgrad.federation.transport import Bytes, Handler
from quietgrad.federation.wire import Message, encode

_SERVER = "server"  # how FLARE calls the coordinator's process


@dataclass(eq=False)
class _Task:
    number: int
    message: bytes
    seconds: float


class _Line(threading.Thread):
    """Calls one party, one message at a time."""

    def __init__(self, name: str, proxy: Any, session: str, turn: threading.Condition) -> None:
        super().__init__(name=f"to {name}", daemon=True)
        self._proxy, self._session, self._turn = proxy, session, turn
        self.task: _Task | None = None
        self.reply: bytes | None = None
        self.busy = self.over = False
        self.start()

    def run(self) -> None:
        while True:
            with self._turn:
                while self.task is None and not self.over:
                    self._turn.wait()
                if self.over:
                    return
                task, self.busy = self.task, True
            assert task is not None
            reply = None
            with contextlib.suppress(Exception):  # whatever FLARE raises: this party did not answer
                reply = self._proxy(timeout=task.seconds).answer(self._session, task.number, task.message)
            with self._turn:
                self.busy = False
                if self.task is task:
                    self.task = None
                    self.reply = reply if isinstance(reply, bytes) else None
                self._turn.notify_all()


class CollabTransport:
    """A :class:`~quietgrad.federation.transport.Transport` over FLARE's Collab proxies.

    Args:
        proxies: by name, what ``collab.clients`` gives.
        agreement: digest of the plan file; sites with another one refuse.
    """

    def __init__(self, proxies: Mapping[str, Any], agreement: str) -> None:
        self._turn = threading.Condition()
        self._number = 0
        session = f"{agreement}:{os.urandom(16).hex()}"
        self._proxies = dict(proxies)
        self._lines = {name: _Line(name, proxy, session, self._turn) for name, proxy in proxies.items()}

    def parties(self) -> tuple[str, ...]:
        """Everybody's names."""
        return tuple(self._lines)

    def exchange(self, messages: Mapping[str, Bytes], timeout: float) -> tuple[dict[str, Bytes], list[str]]:
        """Ask everybody at once; see :class:`~quietgrad.federation.transport.Transport`."""
        deadline = time.monotonic() + timeout
        copies: dict[int, bytes] = {}  # one copy of a message that goes to many
        with self._turn:
            self._number += 1
            for name, message in messages.items():
                line = self._lines[name]
                line.reply = None
                if not line.busy:
                    copy = copies.setdefault(id(message), bytes(message))
                    line.task = _Task(self._number, copy, timeout)
            self._turn.notify_all()
            while any(self._lines[name].task is not None for name in messages):
                left = deadline - time.monotonic()
                if left <= 0.0:
                    break
                self._turn.wait(left)
            replies: dict[str, Bytes] = {}
            for name in messages:
                line = self._lines[name]
                line.task = None
                if line.reply is not None:
                    replies[name], line.reply = bytearray(line.reply), None
        return replies, [name for name in messages if name not in replies]

    def finish(self, words: str, parting: Bytes = b"") -> None:
        """Tell everybody who can be reached how it ended, and close."""
        self.close()
        last = bytes(parting)
        threads = [
            threading.Thread(target=_say_goodbye, args=(self._proxies[name], words, last), daemon=True)
            for name, line in self._lines.items()
            if not line.busy
        ]
        for thread in threads:
            thread.start()
        limit = time.monotonic() + 15.0
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def close(self) -> None:
        """Let the threads end."""
        with self._turn:
            for line in self._lines.values():
                line.over = True
            self._turn.notify_all()


def _say_goodbye(proxy: Any, words: str, parting: bytes) -> None:
    with contextlib.suppress(Exception):
        proxy(timeout=10.0).finish(words, parting)


class Coordinator:
    """The server's side of a job: trains through the sites and leaves the model in the coordinator's folder."""

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> str:
        """Coordinate once; how it ended stands in the folder's ``outcome.json``."""
        settings = SiteSettings.read(collab.workspace.get_site_config_dir())
        transport: CollabTransport | None = None
        parting: Bytes = b""
        try:
            file = read_plan(settings.plan)
            credentials = Credentials.read(settings.keys)
            transport = CollabTransport({proxy.name: proxy for proxy in collab.clients}, file.digest)
            result = network.coordinate(
                file, credentials, transport, folder=settings.out, ledger=settings.ledger_for(file),
                account=settings.account, cap=settings.cap_for(file), callback=network.report_rounds(settings.tell),
            )  # fmt: skip
            words, parting = "the run is complete", network.parting(result)
        except (QuietgradError, ValueError, OSError) as error:
            words = f"aborted: {error}"
        if transport is not None:
            transport.finish(words, parting)
        settings.end(words, done=bool(len(parting)))
        return words


class Site:
    """A party's (or sum server's) side of a job: answers the coordinator as its own plan and keys say."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settings: SiteSettings | None = None
        self._file: PlanFile | None = None
        self._handler: Handler | None = None
        self._failure = "is not ready"
        self._asked: tuple[str, int] | None = None
        self._reply = b""

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Read this site's settings, plan, keys and records; what is wrong with them is told when asked."""
        self._settings = SiteSettings.read(collab.workspace.get_site_config_dir())
        try:
            self._file = read_plan(self._settings.plan)
            self._handler = self._settings.handler(self._file)
        except (QuietgradError, ValueError, OSError) as error:
            self._failure = str(error)

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, session: str, number: int, message: bytes) -> bytes:
        """Answer one message; one that comes again gets the same reply."""
        if collab.caller != _SERVER:
            return _refusal("only the coordinator may ask")
        with self._lock:
            if self._handler is None or self._file is None:
                return _refusal(self._failure)
            if session.partition(":")[0] != self._file.digest:
                return _refusal("the coordinator's plan file is not the one that was approved here")
            if self._asked != (session, number):
                self._reply = bytes(self._handler(bytearray(message)))
                self._asked = (session, number)
            return self._reply

    @collab.publish  # type: ignore[untyped-decorator]
    def finish(self, words: str, parting: bytes) -> bool:
        """Hear how it ended and keep the model."""
        if collab.caller != _SERVER or self._settings is None or self._file is None:
            return False
        try:
            done = network.save_parting(parting, self._file, self._settings.out)
        except QuietgradError as error:
            words, done = str(error), False
        self._settings.end(words, done=done)
        return done


def _refusal(reason: str) -> bytes:
    return bytes(encode(Message("refused", {"code": "plan", "reason": reason})))
