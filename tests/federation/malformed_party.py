"""`quietgrad` whose party sends malformed vectors: ``python malformed_party.py short|altered WORDS…``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from quietgrad.federation.members import MaskingMember, SharingMember
from quietgrad.federation.wire import Message

HOSTILE = __file__


def spoil(kind: Any, how: str) -> None:
    """Let each vector of a party's secure sums leave shortened, or with one bit changed."""
    real = kind.submit

    def submit(self: Any, message: Message, vector: Any) -> Message:
        reply = real(self, message, vector)
        cut = {name: np.array(frame[:-1] if how == "short" else frame) for name, frame in reply.arrays.items()}
        if how == "altered":
            for frame in cut.values():
                frame[-1] ^= 1
        return Message(reply.kind, reply.fields, cut)

    kind.submit = submit


if __name__ == "__main__":
    for role in (MaskingMember, SharingMember):
        spoil(role, sys.argv[1])
    from quietgrad.cli import main

    sys.exit(main(sys.argv[2:]))
