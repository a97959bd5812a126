"""What a coordinator has released, on the disk before it is used: a killed run resumes from here.

One file: a header line, then records of a JSON line and raw little-endian numbers. *asked* is written before a
round goes out and *done* before its aggregate is used, so after a crash an unfinished round is known to have been
asked: asking again is a new release, which the plan's spare rounds pay for. A record torn by the crash is cut off.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.files import append_privately

FORMAT = 1
Floats = npt.NDArray[np.float64]


class Done(NamedTuple):
    """A completed round."""

    slot: str
    value: Floats


class AggregateStore:
    """The rounds of one run; in memory only if ``path`` is ``None``.

    Args:
        path: the file.
        digest: of the plan; a file of another plan is refused.
        run, public_key: of a new run; a resumed one keeps its own.
    """

    def __init__(self, path: Path | None, *, digest: str, run: str, public_key: bytes) -> None:
        self.run, self.public_key = run, public_key
        self.asked: dict[str, int] = {}
        self.rho = 0.0
        self.last_round = -1
        self.done: list[Done] = []
        self.resumed = False
        self._path = path
        if path is None:
            return
        if path.exists():
            self._read(path, digest)
            self.resumed = True
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            head = {"format": FORMAT, "plan": digest, "run": run, "public_key": public_key.hex()}
            self._append(json.dumps(head).encode() + b"\n")

    def ask(self, t: int, slot: str, rho: float | None) -> None:
        """Round ``t`` is about to be asked."""
        if self._path is not None:
            self._append(json.dumps({"asked": t, "slot": slot, "rho": rho}).encode() + b"\n")
        self._count(t, slot, rho)

    def finish(self, t: int, slot: str, value: Floats) -> None:
        """Round ``t`` gave ``value``, which may be used once this returns."""
        if self._path is None:
            return
        body = np.ascontiguousarray(value, "<f8").tobytes()
        line = {"done": t, "slot": slot, "numbers": len(value), "crc": zlib.crc32(body)}
        self._append(json.dumps(line).encode() + b"\n" + body)

    def remove(self) -> None:
        """The run is closed and its result is safe."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _count(self, t: int, slot: str, rho: float | None) -> None:
        self.last_round = t
        self.asked[slot] = self.asked.get(slot, 0) + 1
        self.rho += rho or 0.0

    def _append(self, data: bytes) -> None:
        assert self._path is not None
        append_privately(self._path, data)

    def _read(self, path: Path, digest: str) -> None:
        with path.open("rb") as file:
            head = _line(file.readline())
            if head is None or head.get("format") != FORMAT:
                raise DataError(f"{path}: not a run of this version; move it away to start anew.")
            if head["plan"] != digest:
                raise DataError(
                    f"{path}: an interrupted run of another plan is kept here; resume it or move it away."
                )
            self.run, self.public_key = head["run"], bytes.fromhex(head["public_key"])
            good = file.tell()
            while (entry := _line(file.readline())) is not None:
                if "asked" in entry:
                    self._count(entry["asked"], entry["slot"], entry["rho"])
                else:
                    body = file.read(8 * entry["numbers"])
                    if len(body) < 8 * entry["numbers"] or zlib.crc32(body) != entry["crc"]:
                        break
                    self.done.append(Done(entry["slot"], np.frombuffer(body, "<f8").astype(np.float64)))
                good = file.tell()
        if good < path.stat().st_size:
            os.truncate(path, good)


def _line(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
