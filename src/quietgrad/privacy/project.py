"""The ledger of a project: what pays where no ledger is named, so that every run has one.

A project is the folder with a file ``quietgrad.toml`` (it may be empty) around the working folder. Without one it
is everything that this user does, and the ledger is in the state folder (``$QUIETGRAD_STATE``, else
``~/.local/state/quietgrad``).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from quietgrad.privacy.keys import KeyFile
from quietgrad.privacy.ledger import Ledger

MARK = "quietgrad.toml"
_open: dict[tuple[int, Path], Ledger] = {}  # kept open: what was read and checked once is not read again
_lock = threading.Lock()


def project_path() -> Path:
    """Where the project's ledger is, or will be."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / MARK).is_file():
            return folder / "ledger.jsonl"
    return KeyFile.directory().parent / "ledger.jsonl"


def project_ledger(timeout: float = 120.0) -> Ledger:
    """The project's ledger; its folder is made, the file with the first entry."""
    path = project_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock:
        place = (os.getpid(), path)
        if place not in _open:
            _open[place] = Ledger(path, timeout=timeout)
        return _open[place]
