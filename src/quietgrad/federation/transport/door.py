"""The coordinator's door: callers who have not yet proved who they are, few at a time and none for long.

Anybody who can reach the port can open connections and say nothing. Such a caller costs a place here and nothing
else: it is dropped after a few seconds, and when the places of its address or of the whole door are taken, the one
that has waited longest at the busiest address makes room. A member needs a fraction of a second: it gets through.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import OrderedDict

HANDSHAKE_SECONDS = 5.0
PER_ADDRESS = 64  # callers; several members may sit behind one router
ALTOGETHER = 256


class Door:
    """Unauthenticated connections in the order of their arrival, by address.

    >>> door = Door(per_address=2, altogether=3)
    >>> pairs = [socket.socketpair() for _ in range(4)]
    >>> evicted = [door.admit(pair[0], address) for pair, address in zip(pairs, "aaab")]
    >>> evicted, door.waiting
    ([0, 0, 1, 0], 3)
    >>> for pair in pairs:
    ...     _ = [end.close() for end in pair]
    """

    def __init__(self, *, per_address: int = PER_ADDRESS, altogether: int = ALTOGETHER) -> None:
        self._per_address, self._altogether = per_address, altogether
        self._lock = threading.Lock()
        self._callers: dict[str, OrderedDict[int, socket.socket]] = {}

    @property
    def waiting(self) -> int:
        """How many have not yet proved who they are."""
        with self._lock:
            return sum(map(len, self._callers.values()))

    def admit(self, connection: socket.socket, address: str) -> int:
        """Give a caller a place; returns how many others had to go for it."""
        with self._lock:
            self._callers.setdefault(address, OrderedDict())[id(connection)] = connection
            gone = 0
            if len(self._callers[address]) > self._per_address:
                gone += self._evict(address)
            if sum(map(len, self._callers.values())) > self._altogether:
                gone += self._evict(max(self._callers, key=lambda each: len(self._callers[each])))
            return gone

    def leave(self, connection: socket.socket, address: str) -> None:
        """A caller has proved who it is, or is gone."""
        with self._lock:
            callers = self._callers.get(address, OrderedDict())
            callers.pop(id(connection), None)
            if not callers:
                self._callers.pop(address, None)

    def _evict(self, address: str) -> int:
        _, oldest = self._callers[address].popitem(last=False)
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown, which would take the TLS object away from the thread that still uses it.
            socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        return 1


def let_it_read(connection: socket.socket) -> None:
    """Give a refused caller a second to read why: closing over its unread words would wipe the alert out."""
    limit = time.monotonic() + 1.0
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while (left := limit - time.monotonic()) > 0.0:
            connection.settimeout(left)
            if not socket.socket.recv(connection, 1 << 14):  # it hung up
                return


def refusal(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate was not accepted, in words that say what to do."""
    match error.verify_code:
        case 10:
            return "its certificate has expired; provision again"
        case 9:
            return "its certificate is not valid yet; compare the clocks of both machines"
        case 18 | 19 | 20 | 21:
            return "its certificate is foreign: another authority signed it; compare ca.pem on both sides"
        case 62:
            return "its certificate is of another member"
    return f"its certificate is not accepted ({error.verify_message})"


def alert(error: ssl.SSLError) -> str:
    """What the other side's last word means: why it did not accept the certificate of this one."""
    reason = error.reason or "closed"
    words = {
        "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that the certificate here has expired; provision again",
        "SSLV3_ALERT_BAD_CERTIFICATE": "says that the certificate here is not valid (yet?); compare the clocks",
        "TLSV1_ALERT_UNKNOWN_CA": "says that the certificate here is foreign; compare ca.pem on both sides",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "does not accept the certificate here; compare ca.pem on both sides",
        "SSLV3_ALERT_HANDSHAKE_FAILURE": "does not speak TLS 1.3",
        "TLSV1_ALERT_PROTOCOL_VERSION": "does not speak TLS 1.3",
        "TLSV1_ALERT_CERTIFICATE_REQUIRED": "was shown no certificate; see the folder of keys",
    }
    return words.get(reason, f"ends the TLS connection ({reason}); does its authority know this certificate?")
