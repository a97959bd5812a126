"""Broken clients for the mutation table: each leaks, and the probe or the audit beside it must see that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quietgrad.core.errors import BudgetError
from quietgrad.core.session.objectives import Batch
from quietgrad.core.vectors import Vector
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.public_time import AtOnce
from quietgrad.federation.wire import Message
from quietgrad.tables.queries.local_update import LocalTraining, LocalUpdateQuery


@dataclass(frozen=True, slots=True, eq=False)
class UnpricedBit(LocalUpdateQuery):
    """The bit of the adaptive clip is released beside the update, and the noise is that of the update alone."""

    @property
    def bound(self) -> float:
        return self.clip


@dataclass(frozen=True, slots=True, eq=False)
class NoClip(LocalUpdateQuery):
    """Local steps without a clip: whatever the training moved is handed in."""

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        free = LocalUpdateQuery(self.params, self.steps, self.rate, self.batch_size, 1e6)
        free.sum_into(objective, batch, out)


@dataclass(frozen=True, slots=True, eq=False)
class ClippedSteps(LocalUpdateQuery):
    """Every local step is clipped, and their sum is not: several of them are longer than C."""

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        one = LocalUpdateQuery(self.params, 1, self.rate, self.batch_size, self.clip)
        for _ in range(self.steps):
            one.sum_into(objective, batch, out)


class CoinFirst(PartyCurator):
    """Draws before its presence is settled, and does not bother to come if it was not drawn."""

    def _ask(self, message: Message) -> Message:
        rows = self._samplers["update"](message.fields["draw"])
        if rows is not None and not len(rows):
            raise BudgetError("is not drawn")
        return super()._ask(message)


class LateIsAbsent(PartyCurator):
    """Refuses when its training was not over in time, instead of handing in a masked zero."""

    def _answer_sum(self, slot: str, draw: int, query: Any) -> Any:
        if self._is_slow():
            raise BudgetError("was not ready in time")
        return super()._answer_sum(slot, draw, query)

    def _is_slow(self) -> bool:
        return "slow" in self.name


class PlainZeros(PartyCurator):
    """An undrawn party hands in zeros without noise."""

    def _answer(self, message: Message, slot: str, sum_of: Any, query: Any, multiplier: float) -> Message:
        total = sum_of()
        return super()._answer(message, slot, lambda: total, query, multiplier if total.any() else 0.0)


class OldCoin(PartyCurator):
    """Every retry has the coin of the first draw."""

    def _draw_keys(self) -> None:
        super()._draw_keys()
        first = self._samplers["update"](0)
        self._samplers["update"] = lambda draw: first


class Uncapped(PartyCurator):
    """Takes part as often as the coordinator likes."""

    def _is_drawn(self, message: Message, slot: str) -> bool | None:
        drawn = message.fields.get("drawn")
        return None if drawn is None else bool(drawn)


class WhenReady:
    """A pace that trains only if the party was drawn and answers when that is over."""

    def answer(self, train: Callable[[], Any], coin: Callable[[], bool], zeros: Any, seconds: float) -> Any:
        return train() if coin() else zeros

    def hold(self) -> None:
        pass


class Watching(AtOnce):
    """A sound pace that notes how many answers were made when one is let go."""

    def __init__(self) -> None:
        self.party: PartyCurator | None = None
        self.answered: list[int] = []

    def hold(self) -> None:
        assert self.party is not None
        self.answered.append(self.party.answered()["update"])


class HeldTooEarly(Watching):
    """A pace that lets an answer go when its coin is drawn: masking zeros takes less time than an update."""

    def answer(self, train: Callable[[], Any], coin: Callable[[], bool], zeros: Any, seconds: float) -> Any:
        answer = super().answer(train, coin, zeros, seconds)
        super().hold()
        return answer

    def hold(self) -> None:
        pass


class SlowLogistic:
    """Makes training take some time, so that whether it happened can be seen."""

    def __init__(self, loss: Any, seconds: float) -> None:
        self.loss, self.seconds = loss, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def local_updates(self, batch: Batch, clients: Any, params: Any, training: LocalTraining) -> Any:
        time.sleep(self.seconds)
        return self.loss.local_updates(batch, clients, params, training)
