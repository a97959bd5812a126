"""Frames over a socket: length-prefixed, bounded, with a sender thread so that rings of roles cannot deadlock.

A link carries frames that are already sealed; it knows no keys. When everybody sends before anybody reads, full
socket buffers would stop all of them: each link therefore writes from its own thread.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from quietgrad.federation.secure.identity import DropoutError, ProtocolError
from quietgrad.federation.secure.servers import Computation

_LENGTH = struct.Struct("<I")


class Link:
    """One connected stream socket to a named peer.

    Args:
        sock: a connected stream socket; the link owns it from now on.
        peer: how to call the other side in errors.
        limit: largest frame accepted, in bytes; a longer one is refused before memory is taken for it.

    >>> a, b = socket.socketpair()
    >>> with Link(a, "b", limit=100) as to_b, Link(b, "a", limit=100) as to_a:
    ...     to_b.send(b"frame")
    ...     to_a.receive(timeout=5.0)
    b'frame'
    """

    def __init__(self, sock: socket.socket, peer: str, *, limit: int) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.sent_bytes = peer, 0
        sock.setblocking(True)
        self._sock, self._limit = sock, limit
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._sender = threading.Thread(target=self._pump, name=f"to {peer}", daemon=True)
        self._sender.start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, frame: bytes) -> None:
        """Hand a frame to the sender thread."""
        if len(frame) > self._limit:
            raise ValueError(f"frame of {len(frame)} bytes: this link carries at most {self._limit}.")
        if self._failure is not None:
            raise DropoutError([self.peer], f"cannot be reached: {self._failure}")
        self.sent_bytes += _LENGTH.size + len(frame)
        self._outbox.put(frame)

    def receive(self, timeout: float) -> bytes:
        """The next frame; a peer who stays silent for ``timeout`` seconds or hangs up is named."""
        deadline = time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline, timeout))
        if length > self._limit:
            raise ProtocolError(self.peer, f"announces a frame of {length} bytes; the limit is {self._limit}")
        return self._read(length, deadline, timeout)

    def close(self) -> None:
        """Send what is still waiting, for a second at most, and hang up."""
        self._outbox.put(None)
        self._sender.join(timeout=1.0)
        self._sock.close()

    def _read(self, size: int, deadline: float, timeout: float) -> bytes:
        buffer = bytearray(size)
        view, filled = memoryview(buffer), 0
        while filled < size:
            left = deadline - time.monotonic()
            if left <= 0.0:
                raise DropoutError([self.peer], f"sent nothing for {timeout:g} s")
            # A socket timeout would also cut the sender thread's writes short: wait for readability instead.
            if not select.select([self._sock], [], [], left)[0]:
                continue
            try:
                count = self._sock.recv_into(view[filled:])
            except OSError as error:
                raise DropoutError([self.peer], f"cannot be reached: {error}") from error
            if count == 0:
                raise DropoutError([self.peer], "hung up")
            filled += count
        return bytes(buffer)

    def _pump(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._sock.sendall(_LENGTH.pack(len(frame)) + frame)
            except OSError as error:
                self._failure = error
                return


def run_over(computation: Computation[None], send: Callable[[bytes], None], receive: Callable[[], bytes]) -> None:
    """Run one server's generator over any transport: ``send`` to the previous, ``receive`` from the next."""
    frame = next(computation, None)
    while frame is not None:
        send(frame)
        try:
            frame = computation.send(receive())
        except StopIteration:
            return
