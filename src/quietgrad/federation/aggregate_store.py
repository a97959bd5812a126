"""What a coordinator has released, on the disk before it is used: a killed run resumes from here.

One file: a header line, then records of a JSON line and raw numbers. *asked* is written when a question leaves,
*done* before its aggregate is used, *ended* before a member hears of the end. A round that was asked and not
finished is a release that a spare round pays for. A record torn by a crash is cut off.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quietgrad.curators.transcript import LockedAppendFile
from quietgrad.errors import DataError

FORMAT = 1
Floats = npt.NDArray[np.float64]


class CompletedRound(NamedTuple):
    """A completed round."""

    slot: str
    value: Floats


class AggregateStore:
    """The rounds of one run of the plan with this digest; in memory only if ``path`` is ``None``.

    ``run`` and ``public_key`` are those of a new run; a resumed one keeps its own.
    """

    def __init__(self, path: Path | None, *, digest: str, run: str, public_key: bytes) -> None:
        self.run, self.public_key = run, public_key
        self.asked: dict[str, int] = {}
        self.last_round = -1
        self.unfinished: str | None = None
        """The slot of the last round, if it was asked and its aggregate is not here."""
        self.done: list[CompletedRound] = []
        self.resumed = False
        self.ended = False
        """Whether the run has ended: no member is asked any more."""
        self._file = None if path is None else LockedAppendFile(path, "coordinates this run")
        try:
            self.resumed = self._file is not None and self._read(self._file, digest)
            if not self.resumed:
                self._write({"format": FORMAT, "plan": digest, "run": run, "public_key": public_key.hex()})
        except BaseException:
            self.close()
            raise

    def ask(self, t: int, slot: str) -> None:
        self._write({"asked": t, "slot": slot})
        self._count(t, slot)

    def finish(self, t: int, slot: str, value: Floats) -> None:
        """Round ``t`` gave ``value``, which may be used once this returns."""
        body = np.ascontiguousarray(value, "<f8").tobytes()
        self._write({"done": t, "slot": slot, "numbers": len(value), "crc": zlib.crc32(body)}, body)
        self.unfinished = None

    def end(self) -> None:
        """Record the end; members may hear of it once this returns."""
        if not self.ended:
            self._write({"ended": True})
            self.ended = True

    def remove(self) -> None:
        """Remove the file: the result is safe."""
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Close the file and leave it for a later process."""
        if self._file is not None:
            self._file.close()

    def _count(self, t: int, slot: str) -> None:
        self.last_round, self.unfinished = t, slot
        self.asked[slot] = self.asked.get(slot, 0) + 1

    def _write(self, line: dict[str, Any], body: bytes = b"") -> None:
        if self._file is not None:
            self._file.append(json.dumps(line).encode() + b"\n" + body)

    def _read(self, kept: LockedAppendFile, digest: str) -> bool:
        with kept.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):  # killed while the file was made: nothing was asked yet
                kept.cut(0)
                return False
            head = _line(first)
            if head is None or head.get("format") != FORMAT or head["plan"] != digest:
                raise DataError(f"{kept.path}: has a run of another plan or version; continue it, or move it away.")
            self.run, self.public_key = head["run"], bytes.fromhex(head["public_key"])
            good = file.tell()
            while (entry := _line(file.readline())) is not None:
                if "ended" in entry:
                    self.ended = True
                elif "asked" in entry:
                    self._count(entry["asked"], entry["slot"])
                else:
                    body = file.read(8 * entry["numbers"])
                    if len(body) < 8 * entry["numbers"] or zlib.crc32(body) != entry["crc"]:
                        break
                    self.done.append(CompletedRound(entry["slot"], np.frombuffer(body, "<f8").astype(np.float64)))
                    self.unfinished = None
                good = file.tell()
            if file.seek(0, 2) > good:
                kept.cut(good)
        return True


def _line(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
