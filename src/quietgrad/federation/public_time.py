"""Answers of parties that draw in secret: trained before the coin is looked at, handed in at a public time.

A sample is worth something only if nothing that can be seen of a party depends on its coin. A party that trains
only when it is drawn answers later then, and a coordinator that watches the clock knows the coin. So every party
trains in every round, draws when that is over, and answers a fixed time after it was asked. Training that fails, or
is not over after nine tenths of that time, counts as zeros: a drawn party then takes part less often than stated,
which costs no privacy. The last tenth is for what comes after the coin: masking zeros takes less time than masking
an update, so the answer is held until it is sealed and written down. An answer that takes longer leaves late, and
how late may tell the coin: the party's own log warns of it, in the same words for either coin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

log = logging.getLogger("quietgrad")

Floats = npt.NDArray[np.float64]

TRAINING = 0.9
"""The part of the public time in which a party trains."""


class Pace(Protocol):
    """When a party's answer leaves."""

    def answer(
        self, train: Callable[[], Floats], coin: Callable[[], bool], zeros: Floats, seconds: float
    ) -> Floats:
        """Return ``train()`` if the coin says so, else ``zeros``. The coin is drawn after the training."""
        ...

    def hold(self) -> None:
        """Wait until the answer may leave."""
        ...


class PublicTime:
    """Answers ``seconds`` after it was asked, whatever happened until then.

    >>> begun, pace = time.monotonic(), PublicTime()
    >>> late = pace.answer(lambda: time.sleep(9.0) or np.ones(1), lambda: True, np.zeros(1), 0.05)
    >>> pace.hold()
    >>> late, 0.05 <= time.monotonic() - begun < 9.0
    (array([0.]), True)
    """

    def __init__(self) -> None:
        self._worker: threading.Thread | None = None
        self._until = 0.0

    def answer(
        self, train: Callable[[], Floats], coin: Callable[[], bool], zeros: Floats, seconds: float
    ) -> Floats:
        begun = time.monotonic()
        trained_by, self._until = begun + TRAINING * seconds, begun + seconds
        done: list[Floats] = []

        def work() -> None:
            try:
                done.append(train())
            except Exception:  # zeros, as when it is late; a party's own notes say why
                return

        if self._worker is None or not self._worker.is_alive():  # else an earlier round is still being trained for
            self._worker = threading.Thread(target=work, name="local training", daemon=True)
            self._worker.start()
            self._worker.join(max(0.0, trained_by - time.monotonic()))
        trained = done[0] if done else zeros
        time.sleep(max(0.0, trained_by - time.monotonic()))
        return trained if coin() else zeros

    def hold(self) -> None:
        left = self._until - time.monotonic()
        if left < 0.0:
            log.warning(
                "an answer was not sealed at its public time and leaves late. How late may show the coordinator "
                "whether this party was drawn: plan with a larger answer_seconds."
            )
        time.sleep(max(0.0, left))


class AtOnce:
    """Answers when it is ready: for simulations, where no role watches the clock."""

    def answer(
        self, train: Callable[[], Floats], coin: Callable[[], bool], zeros: Floats, seconds: float
    ) -> Floats:
        trained = train()
        return trained if coin() else zeros

    def hold(self) -> None:
        """Return at once."""
