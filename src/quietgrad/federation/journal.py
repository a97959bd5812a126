"""A party's memory of the one run it approved: which run that is, and which rounds it answered.

One approval is one run. The first run that a coordinator opens is written down here before anything else happens,
and no other is answered, whatever process of this party is asked; a party that restarts continues where it was.
With a folder every line is on the disk before the answer leaves.

The key of the samples stands in the first line: where records are used once (a single pass), which of them were
used follows from it and the rounds, so it must not be lost alone; once the run is over nothing follows from it any
more, and it is blotted out. Noise is drawn from keys that are kept nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quietgrad.curators.kept_file import KeptFile
from quietgrad.errors import DataError, LedgerError
from quietgrad.privacy.rng import KEY_BYTES, fresh_key


class Journal:
    """The run that an approval was used for, and the rounds answered in it; in memory, or also in ``folder``.

    Args:
        folder: where to keep it; one process at a time may hold it.
        name: the party's.
        digest: of the plan; a journal of another plan is refused.

    >>> journal = Journal(None, "clinic", "digest")
    >>> journal.run
    >>> journal.bind("run1")
    >>> journal.record(0, "gradient", 0, None)
    >>> journal.run, journal.last_round, journal.draws("gradient"), journal.ended
    ('run1', 0, 1, False)
    """

    def __init__(self, folder: Path | None, name: str, digest: str) -> None:
        self._name, self._digest = name, digest
        self._forget()
        self._file: KeptFile | None = None
        if folder is not None:
            self._file = KeptFile(folder / f"{name}.journal", f"answers for {name}")
            try:
                self._read(self._file)
            except BaseException:
                self._file.close()
                raise

    def _forget(self) -> None:
        self.run: str | None = None
        """The run that this approval was used for."""
        self.entry = ""
        """Its name in the party's ledger, which nobody else chose."""
        self.key = b""
        """Of its samples."""
        self.ended = False
        self.last_round = -1
        self.rho = 0.0
        self._places = ""  # a MAC of the records in their order
        self._draws: dict[str, int] = {}

    def draws(self, slot: str) -> int:
        """One more than the largest draw of a slot that was answered."""
        return self._draws.get(slot, 0)

    def bind(self, run: str) -> None:
        """Use the approval for ``run``, and for no other from now on."""
        head = {"plan": self._digest, "run": run, "entry": f"{run}.{os.urandom(8).hex()}", "key": fresh_key().hex()}
        self._write(head)
        self._begin(head)

    def record(self, t: int, slot: str, draw: int, rho: float | None) -> None:
        """Round ``t`` is about to be answered."""
        self._write({"round": t, "slot": slot, "draw": draw, "rho": rho})
        self._apply(t, slot, draw, rho)

    def keep_places(self, contents: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Records that take part once, or in turn, go by their places: a party that restarts must hold them alike.

        In another order somebody who was used would have the place of one who was not yet.

        Raises:
            DataError: they are others, or lie otherwise, than when the run began.
        """
        if self._file is None or self.run is None or self.ended:
            return
        mac = hashlib.blake2b(key=self.key, digest_size=16, person=b"records")
        for part in contents():
            mac.update(part)
        found = mac.hexdigest()
        if hmac.compare_digest(self._places, found):
            return
        if self.last_round >= 0:
            raise DataError(
                f"{self._name}: the records, or their order, are not those that this run began with, and somebody "
                "would be used twice; continue with the same table."
            )
        self._write({"places": found})
        self._places = found

    def end(self) -> None:
        """The run is closed and paid for: nothing more is answered in it."""
        if not self.ended:
            self._write({"ended": self.run})
            self.ended = True
            self._blot()

    def unbind(self) -> None:
        """Nothing was asked in the run: the approval was not used."""
        if self.last_round >= 0:
            raise LedgerError(f"{self._name}: rounds were answered, so the approval is used.")
        self._forget()
        if self._file is not None:
            self._file.cut(0)

    def discard(self) -> None:
        """What came out of the run is safe: remove the journal; nothing more is answered in it."""
        self.ended = True
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Let go of the folder; one that no run was opened in is left as it was found."""
        if self._file is not None:
            if self.run is None:
                self._file.remove()
            self._file.close()

    def _blot(self) -> None:
        """Write zeros over the key of a run that is over: which records it used is nobody's business."""
        if self._file is not None and any(self.key):
            self._file.blot(self.key.hex().encode())
        self.key = bytes(KEY_BYTES)

    def _begin(self, head: dict[str, Any]) -> None:
        self.run, self.entry, self.key = str(head["run"]), str(head["entry"]), bytes.fromhex(head["key"])

    def _apply(self, t: int, slot: str, draw: int, rho: float | None) -> None:
        self.last_round = t
        self._draws[slot] = draw + 1
        self.rho += rho or 0.0

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.append(json.dumps(line).encode() + b"\n")

    def _read(self, file: KeptFile) -> None:
        whole, newline, torn = file.content().rpartition(b"\n")
        if torn:  # by a crash, before its answer left
            file.cut(len(whole) + len(newline))
        if not newline:
            return
        try:
            head, *entries = [json.loads(line) for line in whole.split(b"\n")]
            other = head["plan"] != self._digest
            self._begin(head)
            if len(self.key) != KEY_BYTES:
                raise ValueError
            for entry in entries:
                if "ended" in entry:
                    self.ended = True
                elif "places" in entry:
                    self._places = str(entry["places"])
                else:
                    self._apply(int(entry["round"]), str(entry["slot"]), int(entry["draw"]), entry["rho"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise LedgerError(
                f"{file.path}: is damaged, so nobody can tell what was answered; choose another folder, and pay "
                "for a new run."
            ) from None
        if self.ended:
            self._blot()  # killed between the two
        if other:
            raise DataError(
                f"{file.path}: an interrupted run of another plan is kept here; continue that one, or choose "
                "another folder."
            )


def forget(folder: Path, name: str) -> None:
    """Remove a party's journal: for whoever approves runs by calling for them, as a simulation does."""
    path = folder / f"{name}.journal"
    if path.exists():
        KeptFile(path, f"answers for {name}").remove()
