"""Messages over NVIDIA FLARE 2.9: its Collab proxies behind our :class:`~quietgrad.federation.transport.Transport`.

FLARE's own call may outlive its timeout by minutes when a site was killed, and leaves out a site that was late.
Here every party has a thread of its own that waits for FLARE; the exchange itself ends at its deadline, counts, and
names who is missing. A party whose earlier call still hangs is not called again, so hung calls never pile up.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quietgrad.federation.transport import Bytes


class Sweep:
    """Frees FLARE's used messages: they refer to themselves, so their vectors stay until Python's collector comes.

    It comes by the number of objects and knows nothing of their size; this one comes by bytes.

    >>> sweep = Sweep(most=100)
    >>> [sweep.passed(60), sweep.passed(60), sweep.passed(60)]
    [False, True, False]
    """

    def __init__(self, most: int = 1 << 26) -> None:
        self._most, self._bytes = most, 0

    def passed(self, size: int) -> bool:
        """Count a message; whether it was time to sweep."""
        self._bytes += size
        if self._bytes < self._most:
            return False
        self._bytes = 0
        gc.collect()
        return True


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
        self._sweep = Sweep()
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
        self._sweep.passed(sum(map(len, messages.values())) + sum(map(len, replies.values())))
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
