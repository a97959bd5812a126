"""The protocol of all oracles: public settings, slots to plan for, and a small state carried between steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from quietgrad.core.noise.mechanisms import GaussianNoise, Mechanism, from_json
from quietgrad.core.plans.method import config_of
from quietgrad.core.plans.schedule import Law, Plan, Slot
from quietgrad.core.sampling import Sampling
from quietgrad.core.session.base import Session
from quietgrad.core.session.checkpoint import kept_state
from quietgrad.core.session.objectives import Objective
from quietgrad.core.session.queries import Asked
from quietgrad.core.settings import check_fields
from quietgrad.core.vectors import Vector
from quietgrad.methods.oracles.error_bounds import EstimateError, Part

Noise = Literal["independent", "correlated"] | Mechanism
"""Independent Gaussian noise, noise that the next releases take back, or a mechanism that releases sums."""


@kept_state
@dataclass(slots=True)
class Estimate:
    """An oracle's state: its current estimate, the point before, the drift since a full query, and its calls."""

    value: Vector | None = None
    previous: Vector | None = None
    drift: float = 0.0
    calls: int = 0


class Oracle(Protocol):
    """Turns releases into an estimate of ∇(1/n)Σfᵢ; regularisers are not its business. Inherit from it."""

    def __post_init__(self) -> None:
        check_fields(self)

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        """The releases that ``steps`` estimates may need."""
        ...

    def estimate(self, state: Estimate, params: Vector, session: Session) -> Estimate:
        """The estimate at ``params``, by one release through the session."""
        ...

    def config(self) -> dict[str, Any]:
        """The oracle's public settings as JSON values; the law of a random round is the algorithm's."""
        return {"name": type(self).__name__, **{k: v for k, v in config_of(self).items() if k != "law"}}

    @property
    def smoothness(self) -> float | None:
        """The bound M on per-record smoothness that was given to it, if it takes one."""
        return None

    def error(self, session: Session) -> EstimateError | None:
        """How far its estimates are from the gradient, if it can say so."""
        return None

    def bound_symbols(self) -> Mapping[str, tuple[str, str]]:
        """What C is in a slot: the symbol of the bound on a record's part, and its meaning."""
        return {}

    def asks(self, params: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """Yield every query that may be asked, with its slot and the fields that may vary.

        Yield nothing if other parties cannot approve the run beforehand.
        """
        return iter(())


def slot_of(
    name: str, sampling: Sampling, steps: int, noise: Noise = "independent", law: Law | None = None
) -> Slot:
    """A slot of ``steps`` releases with the noise that is named.

    >>> from quietgrad.core.sampling import CyclicCohorts
    >>> slot_of("gradient", CyclicCohorts(16), 64, "correlated").mechanism.participations
    4
    """
    sampling.check_count(steps)
    mechanism: Mechanism = GaussianNoise()
    if isinstance(noise, Mechanism) and noise.verb == mechanism.verb:
        mechanism = noise
    elif noise == "correlated":
        mechanism = sampling.correlated_noise(steps)
    elif noise != "independent":
        raise ValueError(f"noise={noise!r}: must be 'independent', 'correlated' or a mechanism of sums.")
    return Slot(name, sampling, steps, law=law, mechanism=mechanism)


def read_noise(given: object) -> Mechanism:
    """A mechanism from the JSON of one, as a plan's settings state it.

    >>> from quietgrad.core.noise.correlated import BandedToeplitzNoise
    >>> read_noise(BandedToeplitzNoise.made(8, 2).to_json()) == BandedToeplitzNoise.made(8, 2)
    True
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"noise={given!r}: must be 'independent', 'correlated' or a mechanism of sums.")
    return from_json(given)


def plan_preview(objective: Objective, plan: Plan) -> Any:
    """Build a stand-in for a session of ``plan``. Settings can be derived from it, but it releases nothing."""
    return SimpleNamespace(
        plan=plan,
        objective=objective,
        regularizer=objective.regularizer,
        expected_batch=lambda slot: plan.schedule[slot].sampling.expected_batch(plan.n_public),
    )


def noise_multiplier(session: Session, slot: str) -> float:
    """Standard deviation of the noise on a sum of ``slot`` ÷ C: the slot's, times what many parties' adds up to.

    Correlated noise is louder in a single release, which is what is asked here.
    """
    plan, own = session.plan, session.plan.schedule[slot]
    return own.multiplier(plan.noise_multiplier) * math.sqrt(plan.variance_factor) * own.mechanism.loudness


def batch_part(session: Session, slot: str, length: float) -> Part:
    """A slot's part in an estimate's error.

    Where several curators of this plan answer as one, their batches together are so much larger than the plan's.
    """
    sampling, size = session.plan.schedule[slot].sampling, session.expected_batch(slot)
    error = sampling.mean_error(session.plan.n_public)
    if error is not None:
        share = sampling.expected_batch(session.plan.n_public) / size
        error = error._replace(variance=share * error.variance, longest=share * error.longest)
    return Part(error, size, length, noise_multiplier(session, slot))


def constant_of(setting: str, name: str, given: float | None, session: Session) -> float:
    """The value ``given`` for a setting, or else the objective's own constant ``name``."""
    if given is not None:
        return given
    try:
        value = getattr(session.objective.constants(), name)
    except ValueError:  # none hold without a bound on the rows
        value = None
    if value is None:
        raise ValueError(f"{setting}=None: the objective has no finite {name} constant; give {setting}.")
    return float(value)


def total_smoothness(oracle: Oracle, session: Session) -> float:
    """β of the whole risk: from the M that the oracle was given and the regulariser, or as the objective states."""
    if oracle.smoothness is not None:
        return oracle.smoothness + session.regularizer.smoothness
    return constant_of("smoothness", "smoothness", None, session)
