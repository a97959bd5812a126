"""What can go wrong between parties; every fault names the one it came from, if that is proved."""

from __future__ import annotations

from quietgrad.errors import QuietgradError


class ProtocolError(QuietgradError, RuntimeError):
    """A message or a request that the protocol does not allow; the round is aborted and nothing is released.

    Args:
        party: the name of the one whose message was refused.
        reason: what was wrong with it.

    >>> raise ProtocolError("hospital-2", "frame is a replay")
    Traceback (most recent call last):
    ...
    quietgrad.secure.faults.ProtocolError: hospital-2: frame is a replay
    """

    def __init__(self, party: str, reason: str) -> None:
        super().__init__(f"{party}: {reason}")
        self.party = party
        self.reason = reason


class DropoutError(ProtocolError):
    """Too few parties are left for the promised noise or for recovery; the missing ones are named."""

    def __init__(self, missing: list[str], reason: str) -> None:
        super().__init__(", ".join(missing) or "nobody", reason)
        self.missing = missing


class ImpossibleSum(ProtocolError):
    """A sum that no data within the bounds can have; nobody is named, because nothing proves who made it so."""

    CHECK = "headroom check"

    def __init__(self, length: float, most: float) -> None:
        super().__init__(
            self.CHECK,
            f"the sum has length {length:.3g}, the most that clipped data and noise can have is {most:.3g}; a mask "
            "or share was falsified, or somebody ignored the clip",
        )
