"""How every mechanism is asked for its noise through a session, and what makes standard normals of the answers.

A *listener* asks one release whose exact answer is known: zeros, constants, labels that occur a chosen number of
times. What comes back is the noise, or a choice that the noise made; by its claimed law it is mapped to standard
normals (a discrete choice with uniform numbers of the auditor's own). The scale is worked out from the plan here
again and not asked of the code under audit. A mechanism without a listener cannot be audited, and a test says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import chdtri, gammaincc, ndtr, ndtri

from quietgrad.audit.replicas import as_numbers
from quietgrad.objectives.base import Batch, NoRegularizer
from quietgrad.objectives.queries.counts import LabelCounts
from quietgrad.plans.schedule import Plan, Slot
from quietgrad.privacy.banded import BandedToeplitzNoise
from quietgrad.privacy.correlated import BufferedToeplitzNoise, CorrelatedNoise
from quietgrad.privacy.mechanisms import (
    AboveThreshold,
    ExponentialMechanism,
    GaussianNoise,
    GaussianPartitionSelection,
    L2LaplaceNoise,
    Mechanism,
)
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]
Listen = Callable[[Any, np.random.Generator], Floats]
"""(session, the auditor's own randomness) ↦ standard normals of one release."""

BOUND = 0.75
_CHOICES = (0.0, 0.3, 0.6, 1.0, 1.5)  # in units of what doubles the odds' exponent
_SEARCHED = 6


@dataclass(frozen=True)
class AnonymousRecords:
    """Records of which only the number is known."""

    n: int
    dim: int
    labels: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.n

    def contents(self) -> Any:
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


def listener(slot: Slot, plan: Plan, width: int, rho: float | None = None) -> Listen:
    """What asks one release of ``slot`` and returns ``width`` standard normals, if its claim holds."""
    make = LISTENERS.get(type(slot.mechanism))
    if make is None:
        raise ValueError(f"mechanism {slot.mechanism.kind!r}: no listener is prepared, so it cannot be audited.")
    multiplier = _multiplier(slot, plan, rho)
    return make(slot, multiplier, width, rho, plan)


def _multiplier(slot: Slot, plan: Plan, rho: float | None) -> float:
    """σ ÷ C as the plan promises it: of the slot, or of a release that spends ρ of a filter."""
    assert plan.budget is not None
    if rho is None:
        return slot.multiplier(plan.noise_multiplier)
    factor = {"add-remove": 1.0, "replace-one": 2.0}[str(plan.budget.relation)]
    return factor / math.sqrt(2.0 * rho)


def _gaussian(slot: Slot, multiplier: float, width: int, rho: float | None, plan: Plan) -> Listen:
    def listen(session: Any, rng: np.random.Generator) -> Floats:
        spend = {} if rho is None else {"rho": rho}
        return as_numbers(session.release(slot.name, ConstantQuery(width, BOUND), **spend)) / (multiplier * BOUND)

    return listen


def _correlated(slot: Slot, multiplier: float, width: int, rho: float | None, plan: Plan) -> Listen:
    """The innovations: S·releases ÷ (z·C·s), from the plan's coefficients; releases are not white."""
    assert isinstance(slot.mechanism, CorrelatedNoise)
    column, louder = strategy(slot.mechanism)
    heard: list[Floats] = []

    def listen(session: Any, rng: np.random.Generator) -> Floats:
        # How far the session has come says which release this is.
        del heard[session.used[slot.name] :]
        heard.append(
            as_numbers(session.release(slot.name, ConstantQuery(width, BOUND))) / (multiplier * BOUND * louder)
        )
        return np.asarray(column[: len(heard)][::-1] @ np.stack(heard))

    return listen


def strategy(mechanism: CorrelatedNoise) -> tuple[Floats, float]:
    """The first column of S, and how far a record of bound 1 can move S·sums: in a window, if there are bands."""
    count = mechanism.releases
    if isinstance(mechanism, BandedToeplitzNoise):
        column = np.array([*mechanism.column, *[0.0] * (count - mechanism.bands)])[:count]
        return column, math.hypot(*mechanism.column)
    assert isinstance(mechanism, BufferedToeplitzNoise)
    lam, alpha = np.array(mechanism.lam), np.array(mechanism.alpha)
    column = np.array([1.0, *((alpha * lam**k).sum() for k in range(count - 1))])
    turns = range(0, count, mechanism.separation)[: mechanism.participations]
    worst = sum(np.concatenate([np.zeros(t), column[: count - t]]) for t in turns)
    return column, float(np.linalg.norm(worst))


def _laplace(slot: Slot, multiplier: float, width: int, rho: float | None, plan: Plan) -> Listen:
    def listen(session: Any, rng: np.random.Generator) -> Floats:
        return laplace_units(
            as_numbers(session.release(slot.name, ConstantQuery(width, BOUND))), multiplier * BOUND
        )

    return listen


def laplace_units(noise: Floats, scale: float) -> Floats:
    """Standard normals from L2-Laplace noise: its length is Gamma(d, scale), and becomes that of d normals."""
    length, width = float(np.linalg.norm(noise)), len(noise)
    if length == 0.0:
        return noise
    beyond = max(float(gammaincc(width, length / scale)), 1e-300)
    return noise * (math.sqrt(float(chdtri(width, beyond))) / length)


def _choice(slot: Slot, multiplier: float, width: int, rho: float | None, plan: Plan) -> Listen:
    assert rho is not None
    epsilon = math.sqrt(8.0 * rho)
    queries = [ConstantQuery(1, BOUND, 2.0 * BOUND / epsilon * gap) for gap in _CHOICES]
    weights = np.exp(-np.array(_CHOICES))
    shares = weights / weights.sum()

    def listen(session: Any, rng: np.random.Generator) -> Floats:
        return spread_choice(session.choose(slot.name, queries, rho=rho), shares, rng)

    return listen


def _threshold(slot: Slot, multiplier: float, width: int, rho: float | None, plan: Plan) -> Listen:
    scale = multiplier * BOUND
    values = [scale * 4.0 * step for step in np.linspace(1.5, 0.5, _SEARCHED)]
    shares = search_law([v / scale for v in values])
    queries = [ConstantQuery(1, BOUND, value) for value in values]

    def listen(session: Any, rng: np.random.Generator) -> Floats:
        found = session.first_below(slot.name, queries, 0.0)
        return spread_choice(len(values) if found is None else found, shares, rng)

    return listen


def search_law(values: list[float]) -> Floats:
    """P(the first value to pass is the k-th), and of none, in units of the release's scale.

    Laplace noise of scale 2 on the threshold 0 and of 4 on every value; one integral over the threshold's noise.
    """
    grid = np.linspace(-80.0, 80.0, 64_001)
    density = np.exp(-np.abs(grid) / 2.0) / 4.0
    density /= density.sum()
    alive, shares = np.ones_like(grid), []
    for value in values:
        gap = (grid - value) / 4.0
        passes = np.where(gap < 0.0, 0.5 * np.exp(np.minimum(gap, 0.0)), 1.0 - 0.5 * np.exp(-np.maximum(gap, 0.0)))
        shares.append(float((density * alive * passes).sum()))
        alive = alive * (1.0 - passes)
    return np.array([*shares, float((density * alive).sum())])


def _labels(slot: Slot, multiplier: float, width: int, rho: float | None, plan: Plan) -> Listen:
    assert plan.budget is not None
    query = LabelCounts(plan.budget.relation)
    count = label_count(slot, plan)
    mechanism = slot.mechanism
    assert isinstance(mechanism, GaussianPartitionSelection)
    sigma = multiplier * query.bound
    passes = float(ndtr((count - label_threshold(mechanism, sigma)) / sigma))

    def listen(session: Any, rng: np.random.Generator) -> Floats:
        found = set(session.discover(slot.name, query).tolist())
        inside = np.array([label in found for label in range(width)])
        return spread_choice(inside.astype(int), np.array([1.0 - passes, passes]), rng)

    return listen


def label_threshold(mechanism: GaussianPartitionSelection, sigma: float) -> float:
    """The count that one record's label exceeds with probability ``failure``."""
    return 1.0 - sigma * float(ndtri(mechanism.failure))


def label_count(slot: Slot, plan: Plan) -> int:
    """How often a label must occur to pass the threshold of ``slot`` about two times of three."""
    assert plan.budget is not None
    assert isinstance(slot.mechanism, GaussianPartitionSelection)
    sigma = slot.multiplier(plan.noise_multiplier) * LabelCounts(plan.budget.relation).bound
    # Half a deviation above it: less noise than claimed would let all of them pass.
    return math.ceil(label_threshold(slot.mechanism, sigma) + 0.5 * sigma)


def labels_of(slot: Slot, plan: Plan, width: int) -> AnonymousRecords:
    """A table in which ``width`` labels occur so often; all other records share one more label."""
    count = label_count(slot, plan)
    labels = np.repeat(np.arange(width), count)
    n = max(plan.n_public, len(labels))
    return AnonymousRecords(n, 1, np.append(labels, np.full(n - len(labels), width)))


def spread_choice(chosen: Any, shares: Floats, rng: np.random.Generator) -> Floats:
    """Normals from outcomes of known probabilities: anywhere within the outcome's part of the unit interval."""
    at = np.atleast_1d(np.asarray(chosen))
    edges = np.concatenate([[0.0], np.cumsum(shares)])
    u = edges[at] + shares[at] * rng.random(at.shape)
    return np.asarray(ndtri(np.clip(u, 1e-15, 1.0 - 1e-15)))


LISTENERS: dict[type[Mechanism], Callable[[Slot, float, int, float | None, Plan], Listen]] = {
    GaussianNoise: _gaussian,
    BufferedToeplitzNoise: _correlated,
    BandedToeplitzNoise: _correlated,
    L2LaplaceNoise: _laplace,
    ExponentialMechanism: _choice,
    AboveThreshold: _threshold,
    GaussianPartitionSelection: _labels,
}
"""By mechanism; a new one needs a listener before anything with it can be released as audited."""

SCALAR: tuple[type[Mechanism], ...] = (ExponentialMechanism, AboveThreshold)
"""Mechanisms whose release is one choice: thousands of them tell what hundreds of vectors do."""
