"""Transports: how a coordinator's messages reach the parties. One method that matters, and it never hangs.

A transport knows names and bytes, nothing else. :mod:`~quietgrad.federation.transport.in_process` calls functions;
:mod:`~quietgrad.federation.transport.processes` talks to processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from quietgrad.federation.wire import Bytes

__all__ = ["Bytes", "Handler", "Transport"]
Handler = Callable[[Bytes], Bytes]
"""What sits at the other end: takes a message, returns the reply; see ``PartyCurator.handle``.

A reply may be overwritten by the next call: a transport that keeps it copies it. So may a message, once the
exchange it was given to has returned.
"""


class Transport(Protocol):
    """Sends one message to each of some parties and gathers their replies."""

    def parties(self) -> tuple[str, ...]:
        """Names of everybody who can be reached in principle: parties, and servers if there are any."""
        ...

    def exchange(self, messages: Mapping[str, Bytes], timeout: float) -> tuple[dict[str, Bytes], list[str]]:
        """Deliver each message and return (replies by name, names of those who did not answer in time).

        Returns after ``timeout`` seconds at the latest, whatever happened; every name asked is in exactly one of
        the two. A reply that arrives later is thrown away, never handed out as the answer to another message.
        """
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...
