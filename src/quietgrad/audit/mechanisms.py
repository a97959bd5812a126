"""How a session is asked for the noise of any mechanism, and what makes standard normals of the answers.

A *listener* asks one release whose exact answer is known: zeros, constants, labels that occur a chosen number of
times. What comes back is the noise, or a choice that the noise made. The mechanism's :class:`Probe` maps it to
standard normals by the claimed law, from the plan's numbers and not by the source under audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.audit.replicas import as_numbers
from quietgrad.objectives.base import Batch, NoRegularizer
from quietgrad.objectives.queries.counts import LabelCounts
from quietgrad.plans.schedule import Plan, Slot
from quietgrad.privacy.accounting import noise_multiplier_for_rho
from quietgrad.privacy.mechanisms import Probe
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]
Listen = Callable[[Any, np.random.Generator], Floats]
"""(session, the auditor's own randomness) ↦ standard normals of one release."""

BOUND = 0.75


@dataclass(frozen=True)
class AnonymousRecords:
    """Records of which only the number is known."""

    n: int
    dim: int
    labels: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.n

    def contents(self) -> Iterator[bytes]:
        """Nothing: every answer is the same whatever they are."""
        yield b""

    fingerprint_parts = contents


class EmptyObjective:
    """An objective for queries that ask nothing of it."""

    regularizer = NoRegularizer()
    silent_batches: ClassVar[bool] = False

    def prepare(self, data: AnonymousRecords) -> AnonymousRecords:
        return data

    def initial(self, records: AnonymousRecords) -> Floats:
        return np.zeros(records.dim)


@dataclass(frozen=True)
class ConstantQuery:
    """A query whose sum is known: ``value`` in every coordinate, whatever the records are."""

    size: int
    bound: float
    value: float = 0.0

    def dim(self, records: Any) -> int:
        """Length of the vector released."""
        return self.size

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        """Add the constant."""
        out += self.value


def probe_of(slot: Slot, plan: Plan, rho: float | None = None) -> Probe:
    """What is asked of a slot, at the noise that the plan promises or that spends ρ of a filter."""
    assert plan.budget is not None
    relation = plan.budget.relation
    multiplier = slot.multiplier(plan.noise_multiplier) if rho is None else noise_multiplier_for_rho(rho, relation)
    bound = LabelCounts(relation).bound if slot.mechanism.verb == "discover" else BOUND
    return slot.mechanism.probe(multiplier, bound, relation)


def listener(slot: Slot, plan: Plan, width: int, rho: float | None = None) -> Listen:
    """What asks one release of ``slot`` and returns standard normals, if its claim holds."""
    probe, name = probe_of(slot, plan, rho), slot.name
    queries = [ConstantQuery(1, BOUND, value) for value in probe.values]
    spend = {} if rho is None else {"rho": rho}

    def listen(session: Any, rng: np.random.Generator) -> Floats:
        number = session.used[name]
        answer: Any = None
        match slot.mechanism.verb:
            case "release":
                answer = as_numbers(session.release(name, ConstantQuery(width, BOUND), **spend))
            case "choose":
                answer = session.choose(name, queries, **spend)
            case "first_below":
                found = session.first_below(name, queries, 0.0)
                answer = len(queries) if found is None else found
            case "discover":
                assert plan.budget is not None
                labels = session.discover(name, LabelCounts(plan.budget.relation))
                answer = np.isin(np.arange(width), labels).astype(int)
        return probe.normals(answer, number, rng)

    return listen


def labels_of(slot: Slot, plan: Plan, width: int) -> AnonymousRecords:
    """A table in which ``width`` labels occur as often as the probe asks; other records share one more label."""
    labels = np.repeat(np.arange(width), probe_of(slot, plan).count)
    n = max(plan.n_public, len(labels))
    return AnonymousRecords(n, 1, np.append(labels, np.full(n - len(labels), width)))
