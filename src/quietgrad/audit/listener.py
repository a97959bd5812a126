"""The auditor's ear at the door: a session that passes everything on and writes down what was released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.curators.base import Session, SessionCost
from quietgrad.objectives.base import Query
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]


class NotSeparableError(TypeError):
    """An algorithm computed something across coordinates, so blocks would not be independent runs."""


class Blocks(np.ndarray[Any, Any]):
    """A flat vector of N blocks that refuses inner products."""

    def dot(self, *_: Any, **__: Any) -> Any:
        raise NotSeparableError


class Listener:
    """A session that writes down every number that passes the door, in units of the query's bound."""

    def __init__(self, session: Session, *, blocks: int = 1, number: int = 0, uniform: float | None = None) -> None:
        self._session = session
        self._uniform = uniform  # what every draw is taken to be, where the auditor fixes it
        self._number = number
        self.blocks = blocks
        self.plan = session.plan
        self.objective = session.objective
        self.regularizer = session.regularizer
        self.heard: list[Floats] = []
        self.slots: list[str] = []

    @property
    def rho_left(self) -> float:
        return self._session.rho_left

    @rho_left.setter
    def rho_left(self, value: float) -> None:
        self._session.rho_left = value

    @property
    def used(self) -> dict[str, int]:
        return self._session.used

    def expected_batch(self, slot: str) -> float:
        return self._session.expected_batch(slot)

    def uniform(self, label: str) -> float:
        if self._uniform is not None:
            return self._uniform
        if self.blocks > 1:
            raise NotSeparableError  # one draw would be shared by all runs
        return self._session.uniform(f"{label}/{self._number}")

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        self._tick()
        answer = self._session.release(slot, query, rho=rho)
        if query.bound > 0.0:
            self.heard.append(as_numbers(answer).reshape(self.blocks, -1) / query.bound)
            self.slots.append(slot)
        return answer.view(Blocks) if self.blocks > 1 else answer

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        if self.blocks > 1:
            raise NotSeparableError
        chosen = self._session.choose(slot, queries, rho=rho, offsets=offsets)
        loses = getattr(self.objective, "loses", None)  # an auditor knows what its own record makes of a candidate
        self.heard.append(np.array([[float(chosen if loses is None else loses(chosen))]]))
        self.slots.append(slot)
        return chosen

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        if self.blocks > 1:
            raise NotSeparableError
        found = self._session.first_below(slot, queries, threshold)
        self.heard.append(np.array([[-1.0 if found is None else float(found)]]))
        self.slots.append(slot)
        return found

    @property
    def seeded(self) -> bool:
        return self._session.seeded

    @property
    def run(self) -> str:
        return self._session.run

    @property
    def epochs(self) -> int:
        return self._session.epochs

    def close(self, reason: str, *, data_dependent: bool = False) -> SessionCost:
        return self._session.close(reason, data_dependent=data_dependent)

    def _tick(self) -> None:
        tick = getattr(self.objective, "tick", None)
        if tick is not None:
            tick()


def as_numbers(vector: Vector) -> Floats:
    """A vector, numpy or torch, as float64 numbers of its own."""
    plain = vector if isinstance(vector, np.ndarray) else vector.detach().cpu().numpy()
    return np.array(plain, np.float64)
