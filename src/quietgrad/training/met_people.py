"""Who has come to a stream that is kept in a folder: remembered through crashes, as keyed hashes.

The key is derived from the run's own, so the file beside it tells nobody anything without that, and goes with it
when the stream is closed. A batch's people are written down, durably, before anything of them is released. After a
crash, those of a batch that is given again may come in that batch, where the transcript knows whether it is the
same; everybody else who was ever written down is refused.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from quietgrad.errors import DataError
from quietgrad.files import append_privately, read_bytes, reason, sync_folder
from quietgrad.objectives.person_ids import Met

__all__ = ["KeptMet"]

_MOST = 1 << 32  # bytes of a file: a hash is 65 of them


class KeptMet(Met):
    """Those whom a stream has met, in a file with one line per batch: its number, the kind of ids, hashes, a MAC.

    Args:
        path: the file.
        key: the key of the run.
        step: how many batches a stream that goes on has learned from; each must be in the file.
    """

    def __init__(self, path: Path, key: bytes, step: int | None = None) -> None:
        super().__init__(hmac.digest(key, b"people of a stream", "sha256"))
        self._path, self._seal = path, hmac.digest(key, b"people of a stream: lines", "sha256")
        self._step = step or 0
        self._again: dict[int, set[bytes]] = {}  # of batches that will be given again, by number
        if step is not None:
            self._read(step)

    def newcomers(self, ids: Any) -> set[bytes]:
        """The people of the next batch, if nobody of them was in another one."""
        found = super().newcomers(ids)
        if any(found & people for number, people in self._again.items() if number != self._step):
            raise DataError(self.TWICE)
        return found

    def add(self, newcomers: set[bytes], step: int = 0) -> None:
        """They are about to be learned from; once this returns no crash makes anybody forget them."""
        said = " ".join([str(step), self._kind or "-", *sorted(one.hex() for one in newcomers)])
        try:
            first = not self._path.exists()
            # The line before it may have been torn by a crash.
            append_privately(self._path, f"\n{said} {self._mac(said)}\n".encode())
            if first:
                sync_folder(self._path.parent)
        except OSError as error:
            raise DataError(
                f"{self._path}: cannot be written ({reason(error)}), so people would be forgotten; make room. "
                "Nothing was released."
            ) from None
        super().add(newcomers | self._again.pop(step, set()))
        self._step = step + 1

    def _read(self, step: int) -> None:
        seen: set[int] = set()
        try:
            lines = read_bytes(self._path, most=_MOST).decode("ascii", "replace").split("\n")
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({reason(error)}).") from None
        for line in filter(None, lines):
            said, _, mac = line.rpartition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(said).encode()):
                continue  # torn: nothing was released of it. If a batch was, it is missing below.
            number, kind, *people = said.split(" ")
            seen.add(int(number))
            self._kind = self._kind or kind.strip("-")
            known = self._known if int(number) < step else self._again.setdefault(int(number), set())
            known.update(bytes.fromhex(one) for one in people)
        if not set(range(step)) <= seen:
            raise DataError(
                f"{self._path}: does not say who was in every batch so far, so somebody could come twice. Bring "
                "the file back that belongs to the stream's key, or begin a new stream, charged for itself."
            )

    def _mac(self, said: str) -> str:
        return hmac.new(self._seal, said.encode(), "sha256").hexdigest()
