"""`quietgrad` that kills itself with -9 at a chosen place: ``python killed.py MODULE:NAME before|after WORDS…``.

The windows between two steps of an ending are microseconds wide; nobody hits them from outside.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

KILLED = __file__
COORDINATOR = {
    "nobody has heard of the end": ("quietgrad.federation.coordinator:AggregateStore.end", "after"),
    "parties have closed, its own ledger has not": ("quietgrad.core.ledger.account:Charge.close", "before"),
    "its ledger is closed and nothing is saved": ("quietgrad.core.ledger.account:Charge.close", "after"),
    "the model is saved and the statement is not": ("quietgrad.methods.result:Result.to_json", "before"),
    "all is saved and nothing cleared away": ("quietgrad.methods.result:Result.save", "after"),
    "nobody has the model yet": ("quietgrad.federation.exchange:Exchange.finish", "before"),
}  # fmt: skip
PARTY = {
    "its ledger is not closed": ("quietgrad.core.ledger.account:Charge.close", "before"),
    "its ledger is closed and its journal does not say so": ("quietgrad.core.ledger.account:Charge.close", "after"),
    "nobody heard that it closed": ("quietgrad.federation.journal:Approval.close", "after"),
    "it has the model and has not saved it": ("quietgrad.federation.approved:Approved.save_model", "before"),
}


def arm(where: str, when: str) -> None:
    """Let the function ``where`` kill this process before it begins, or after it is done."""
    module, _, path = where.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def deadly(*args: Any, **settings: Any) -> None:
        if when == "after":
            real(*args, **settings)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)


if __name__ == "__main__":
    arm(*sys.argv[1:3])
    from quietgrad.cli import main

    sys.exit(main(sys.argv[3:]))
