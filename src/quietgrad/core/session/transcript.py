"""The private transcript of a run: a MAC of every sum before its noise, so that replay is by content.

An interrupted run continues from its last checkpoint and asks again for what it had released after it. The same
noise on the same sum tells nothing new; the same noise on any other sum lets anyone subtract the two. So each
release first leaves a MAC of everything that determines it but the noise (slot, number, multiplier, bound, and the
sum itself) here. Asked again, a release whose MAC agrees is a replay and free; one whose MAC differs begins a new
*epoch*: fresh samples, fresh noise, and a new charge. Which of the two happened is private, so nothing
is raised.

Lines are written before a release leaves, and survive a killed process. After a power cut the last ones may be
missing, and a copy or a backup may be older than the run: the file, the run's ledger and its checkpoint each tell
(:class:`~quietgrad.core.ledger.log.SealedLog`). Where one of them does not agree, what is missing here is
not trusted to have never been released, until a new epoch has begun.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import LedgerError
from quietgrad.core.ledger.log import SealedLog
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.vectors import OwnVector


def plan_key(key: bytes, plan: str) -> bytes:
    """The key of one plan's samples and noise in a run whose key is ``key``; ``plan`` is the plan's digest."""
    return SecureStream(key, f"plan/{plan}").bytes(0, len(key))


_MAC_BYTES = 16


class Transcript(SealedLog):
    """MACs of the releases of one run, in a 0600 file that one process at a time may hold.

    The file belongs beside the run's key, not into its folder: a folder is copied, and two copies that are resumed
    must find one transcript.

    Args:
        path: the file.
        run: the run's name.
        key: the run's secret key.
        resumed: whether the run had begun before. Then a file that is missing hides what was released, and
            nothing is trusted to be new.
        least: how many releases it must hold, as the last checkpoint says.

    :meth:`reopen` takes how often the ledger knows the run to have been opened.

    >>> import tempfile
    >>> from quietgrad.core.noise.rng import seed_key
    >>> folder = tempfile.TemporaryDirectory()
    >>> log = Transcript(Path(folder.name) / "transcript", "run", seed_key(0))
    >>> mac = log.mac("gradient", 0, [1.5, 1.0], np.ones(3))
    >>> log.record("gradient", 0, mac)
    >>> log.close()
    >>> again = Transcript(Path(folder.name) / "transcript", "run", seed_key(0), resumed=True)
    >>> again.reopen(1)
    2
    >>> again.known("gradient", 0) == (0, mac), again.known("gradient", 1), again.complete
    (True, None, True)
    >>> again.close()
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, run: str, key: bytes, *, resumed: bool = False, least: int = 0) -> None:
        self.resumed = resumed
        self._run_key = self._key = key
        self._mac_key = SecureStream(key, "transcript").bytes(0, 32)
        self._nonces: list[str] = []  # of the epochs after the first
        self._intended = ""  # the nonce of an epoch that is being charged
        self._known: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.length = 0
        """How many releases were written down, those of all epochs."""
        self.complete = True
        """Whether a release that is not here was certainly never made."""
        super().__init__(path, f"is running run {run}", key, run)
        try:
            if not self._last:  # nothing was ever written
                self.complete = not resumed
                if not resumed:
                    super().reopen(0)
            elif not resumed:  # to begin it anew under the same key would use its noise again
                raise LedgerError(f"{path}: run {run} has begun already; resume it, or start another.")
            for line in self.lines():
                first, _, rest = line.partition(" ")
                if first == _FORK:
                    self._nonces.append(rest)
                    self._intended, self.complete = "", True
                elif first == _INTEND:
                    self._intended = rest
                elif first == _TORN:
                    self.complete = False
                else:
                    mac, _, slot = rest.partition(" ")
                    self._known[slot, int(first)] = (self.epoch, bytes.fromhex(mac))
                    self.length += 1
            self.complete = self.complete and self.untouched and self.same_start and self.length >= least
        except BaseException:
            self.close()
            raise

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return len(self._nonces)

    @property
    def epochs(self) -> tuple[str, ...]:
        """The nonces of the epochs after the first."""
        return tuple(self._nonces)

    def bind(self, plan: str) -> None:
        """Derive the keys of samples, noise and MACs from the digest of a plan's releases.

        Two plans on one transcript draw independent noise, and what one released is no replay for the other.
        """
        self._key = plan_key(self._run_key, plan)
        self._mac_key = SecureStream(self._key, "transcript").bytes(0, 32)

    def key(self, epoch: int) -> bytes:
        """The key of samples and noise of an epoch."""
        if epoch == 0:
            return self._key
        return SecureStream(self._key, f"epoch/{self._nonces[epoch - 1]}").bytes(0, len(self._key))

    def known(self, slot: str, number: int) -> tuple[int, bytes] | None:
        """The epoch and the MAC that a release was last made with."""
        return self._known.get((slot, number))

    def count(self, slot: str) -> int:
        """How many releases of a slot have been made, by this process or by one that died."""
        return max((number + 1 for name, number in self._known if name == slot), default=0)

    def released_besides(self, pin: str) -> bool:
        """Whether anything was released yet; ``pin`` is what a run keeps of itself."""
        return any(slot != pin for slot, _ in self._known)

    def mac(self, slot: str, number: int, settings: Iterable[float], *sums: npt.NDArray[np.generic]) -> bytes:
        """A MAC of a release before its noise."""
        digest = hashlib.blake2b(key=self._mac_key, digest_size=_MAC_BYTES)
        digest.update(f"{slot}\0{number}\0{[float(x).hex() for x in settings]}".encode())
        for total in sums:
            digest.update(f"\0{total.dtype} {total.shape}\0".encode())
            digest.update(np.ascontiguousarray(total).data)
        return digest.digest()

    def mac_of(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """A MAC of records, so that without the run's key it does not show which records they are."""
        digest = hashlib.blake2b(key=self._mac_key, digest_size=_MAC_BYTES, person=b"records")
        for part in parts:
            digest.update(part)
        return digest.digest()

    def digest(self, total: OwnVector) -> npt.NDArray[np.int64]:
        """A keyed digest of a sum on an accelerator, made there, which its MAC covers instead of the sum."""
        from quietgrad.core.noise.device import digest

        return digest(total, self._mac_key)

    def reopen(self, openings: int) -> int:
        """Go on, after the ledger knew of so many openings of this run; the number of this one.

        The caller writes it to the ledger. Where the two disagree, one of them hides releases.
        """
        agreed = self.agrees(openings)
        self.complete = self.complete and agreed
        if not self.complete:  # the next process must know, until a new epoch has begun
            self.add(_TORN)
            self._intended = ""  # it may have begun, where this file does not say so any more
        return super().reopen(openings)

    def record(self, slot: str, number: int, mac: bytes) -> None:
        """The release is about to be made; when this returns, no death of the process can hide it."""
        self.add(f"{number} {mac.hex()} {slot}", durable=False)
        self._known[slot, number] = (self.epoch, mac)
        self.length += 1

    def intend(self) -> str:
        """The nonce of the epoch that will be next: it is charged under it before it begins.

        A process that dies between the two leaves an entry that nothing was released under: it pays for the next.
        """
        if not self._intended:
            self._intended = os.urandom(8).hex()
            self.add(f"{_INTEND} {self._intended}")
        return self._intended

    def fork(self) -> int:
        """Begin the epoch that was intended, durably, and return its number."""
        nonce = self.intend()
        self.add(f"{_FORK} {nonce}")
        self._nonces.append(nonce)
        self._intended, self.complete = "", True
        return self.epoch


_FORK, _INTEND, _TORN = "fork", "intend", "torn"
