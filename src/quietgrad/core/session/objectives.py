"""Objectives: data made ready, losses and their constants, public regularisers.

An objective knows the loss and how to add up clipped gradients of single records without ever storing them. A
curator asks it by way of a query (:mod:`quietgrad.core.session.queries`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.vectors import OwnVector, zeros_like, zeros_without_memory

if TYPE_CHECKING:
    from quietgrad.core.session.queries import Query

Indices = npt.NDArray[np.int64]
Summand = Callable[[Any, "Batch", OwnVector], None]


class Records(Sized, Protocol):
    """Data made ready for an objective: validated, contiguous, laid out for its kernels."""

    @property
    def dim(self) -> int:
        """Number of parameters a model for these records has."""
        ...

    def contents(self) -> Iterator[bytes | memoryview]:
        """All that a sum over these records depends on, as bytes: a resumed run checks that nothing changed."""
        ...

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The people as bytes, whatever an objective makes of them: a ledger knows the table by it."""
        ...


class StreamedRecords(ABC, Sized):
    """Records that are read anew for every release, since they are not held in memory."""

    @property
    @abstractmethod
    def leaves_out(self) -> bool:
        """Whether rows may be left out while they are read, so that their exact number is not known."""

    @abstractmethod
    def foresee(self, *queries: Query) -> None:
        """Announce the queries of the next releases: one reading then serves all of them."""

    @abstractmethod
    def answer(self, query: Query, batch: Batch, out: OwnVector) -> None:
        """out += the sum of ``query`` over the batch."""

    @abstractmethod
    def add(self, summand: Summand, batch: Batch, out: OwnVector) -> None:
        """out += Σ over the parts of what ``summand(objective, batch, out)`` adds."""

    @abstractmethod
    def labels(
        self, indices: Indices | None, key: bytes | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """The labels and how often each occurs, a person counting once: secret."""

    def loss_sum(self, batch: Batch, params: OwnVector, bound: float) -> float:
        """Σ min(fᵢ(θ), bound) over the parts."""
        out = np.zeros(1)
        self.add(partial(add_losses, params, bound), batch, out)
        return float(out[0])


UNCOUNTED = (
    "rows with a gap are left out (`drop_incomplete`), so a record's content decides how many there are, and under "
    "replace-one that number is public. Use add-remove with a declared n, or give each column a `fill`."
)


class Batch(NamedTuple):
    """Some records, by position; ``indices=None`` means all of them.

    ``key`` is a secret of this one release for queries that draw randomness (dropout): record i's is PRF(key, i).
    It must not depend on the record's place in the batch or on public values alone: given the key, what a record
    contributes is a function of that record, and that is the whole proof of the sensitivity.
    """

    records: Any  # what this objective's own ``prepare`` returned
    indices: Indices | None
    key: bytes | None = None


@dataclass(frozen=True)
class LossConstants:
    """Constants of a risk F(θ) = (1/n) Σᵢ fᵢ(θ) + r(θ) whose rows are no longer than ``row_bound``.

    ``lipschitz`` G and ``record_smoothness`` M bound every fᵢ alone: what one record can change. All others are
    totals of F with its regulariser: ``smoothness`` β, ``hessian_lipschitz`` ρ, ``strong_convexity`` μ, and
    ``weak_convexity``, the most negative curvature that F can have (0 if it is convex). ``None`` means that no
    finite constant is known. Make them with :meth:`of`, which adds the regulariser's.
    """

    row_bound: float
    lipschitz: float | None
    record_smoothness: float | None
    smoothness: float | None
    hessian_lipschitz: float | None
    strong_convexity: float
    weak_convexity: float | None

    @classmethod
    def of(
        cls,
        regularizer: Regularizer,
        *,
        row_bound: float,
        lipschitz: float | None,
        smoothness: float | None,
        hessian_lipschitz: float | None,
        convex: bool,
    ) -> LossConstants:
        """The constants of a risk: those that bound every fᵢ, and the regulariser's own added to them."""

        def total(constant: float | None, added: float) -> float | None:
            return None if constant is None else constant + added

        return cls(
            row_bound=row_bound,
            lipschitz=lipschitz,
            record_smoothness=smoothness,
            smoothness=total(smoothness, regularizer.smoothness),
            hessian_lipschitz=total(hessian_lipschitz, regularizer.hessian_lipschitz),
            strong_convexity=regularizer.strong_convexity if convex else 0.0,
            weak_convexity=total(0.0 if convex else smoothness, regularizer.weak_convexity),
        )

    @property
    def convex(self) -> bool:
        """Whether F is known to be convex."""
        return self.weak_convexity == 0.0

    def needed(self, *names: str) -> tuple[float, ...]:
        """The constants of these names, for settings that a theorem makes of them; raise if one is not finite."""
        values = [(name, getattr(self, name)) for name in names]
        for name, value in values:
            if value is None or not 0.0 < value < float("inf"):
                raise ValueError(f"theory mode needs a finite {name} constant > 0; this loss states {value!r}.")
        return tuple(float(value) for _, value in values)


@runtime_checkable
class Regularizer(Protocol):
    """A public term of the objective: depends on no record, so it is never clipped and never noised."""

    @property
    def strong_convexity(self) -> float:
        """A curvature that it has everywhere in every direction, or 0."""
        ...

    @property
    def smoothness(self) -> float:
        """A bound on the absolute value of its curvature."""
        ...

    @property
    def hessian_lipschitz(self) -> float:
        """ρ of the term: how fast its curvature can change."""
        ...

    @property
    def weak_convexity(self) -> float:
        """The most negative curvature it can have, as a number ≥ 0; 0 if it is convex."""
        ...

    def value(self, params: OwnVector) -> float: ...
    def gradient(self, params: OwnVector) -> OwnVector: ...
    def curvature(self, params: OwnVector) -> OwnVector:
        """The diagonal of the Hessian; a term whose Hessian is not diagonal does not fit here."""
        ...


@dataclass(frozen=True)
class NoRegularizer:
    """The zero regulariser."""

    strong_convexity: ClassVar[float] = 0.0
    smoothness: ClassVar[float] = 0.0
    hessian_lipschitz: ClassVar[float] = 0.0
    weak_convexity: ClassVar[float] = 0.0

    def value(self, params: OwnVector) -> float:
        return 0.0

    def gradient(self, params: OwnVector) -> OwnVector:
        return zeros_without_memory(params)

    def curvature(self, params: OwnVector) -> OwnVector:
        return zeros_like(params)


class RecordAdapter(Protocol):
    """How a curator reads data: all it needs to know to hold records that queries are asked about."""

    unit: ClassVar[PrivacyUnit] = PrivacyUnit.RECORD
    """The privacy unit: what ``len(records)`` counts and a contribution is bounded for."""

    @property
    def regularizer(self) -> Regularizer:
        """The public term r."""
        ...

    @property
    def silent_batches(self) -> bool:
        """Whether sums over index batches raise no floating-point warning, whatever the records hold."""
        ...

    def prepare(self, data: Any) -> Records:
        """Validate ``data`` and lay it out; raise :class:`~quietgrad.core.errors.DataError` if it is unusable."""
        ...

    def initial(self, records: Any) -> OwnVector:
        """The starting point, which depends on no record."""
        ...


def public_loss(adapter: Any) -> Any:
    """The public loss behind what a curator asks: algorithms read its shape and constants."""
    return adapter if adapter.unit is PrivacyUnit.RECORD else adapter.loss


class Objective(RecordAdapter, Protocol):
    """An empirical risk F(θ) = (1/n) Σᵢ fᵢ(θ) + r(θ) and its clipped sums; defaults: :class:`BaseObjective`."""

    def constants(self) -> LossConstants:
        """Constants of every record's loss; ValueError if there are none, for want of a bound on the rows."""
        ...

    def negative_curvature(self) -> float | None:
        """The most negative curvature that F can have where it matters, as a number ≥ 0; ``None`` if unknown."""
        ...

    def check_domain(self, params: OwnVector) -> None:
        """Raise :class:`~quietgrad.core.errors.DataError` at a point where the constants do not hold."""
        ...

    def add(self, batch: Batch, points: Sequence[OwnVector], rule: ClippingRule, out: OwnVector) -> None:
        """out += Σ over the batch of what the rule makes of each record's gradients at the points (θ, or θ and θ′).

        No record's contribution is longer than ``rule.bound``, whatever its values: kernels clip to C/(1+2e-5) in
        float32 and C/(1+1e-12) in float64, and a contribution that is not finite counts as zero.
        """
        ...

    def loss_sum(self, batch: Batch, params: OwnVector, bound: float) -> float:
        """Σ min(fᵢ(θ), bound), each term in [0, bound]; a loss that is not a number counts as the bound."""
        ...

    def risk(self, records: Any, params: OwnVector) -> float:
        """F(θ) with the regulariser: an evaluation, not private."""
        ...

    def risk_gradient(self, records: Any, params: OwnVector) -> OwnVector:
        """∇F(θ) without clipping: an evaluation, not private."""
        ...


class BaseObjective:
    """Defaults of an objective that knows nothing better."""

    unit: ClassVar[PrivacyUnit] = PrivacyUnit.RECORD

    @property
    def parameter_names(self) -> Sequence[str] | None:
        """The names of its parameters, by which a clipping rule groups them; ``None``: they have none."""
        return None

    @property
    def silent_batches(self) -> bool:
        """Not known: False."""
        return False

    def constants(self) -> LossConstants:
        """None: nothing is known of the losses."""
        return LossConstants(math.inf, None, None, None, None, 0.0, None)

    def negative_curvature(self) -> float | None:
        """The negative curvature by the constants, if they hold."""
        try:
            return self.constants().weak_convexity
        except ValueError:  # none hold without a bound on the rows
            return None

    def check_domain(self, params: OwnVector) -> None:
        """Do nothing: constants, if any, hold everywhere."""

    def risk(self: Objective, records: Any, params: OwnVector) -> float:
        """F(θ) with the regulariser: an evaluation, not private."""
        total = self.loss_sum(Batch(records, None), params, math.inf)
        return total / len(records) + self.regularizer.value(params)

    def risk_gradient(self: Objective, records: Any, params: OwnVector) -> OwnVector:
        """∇F(θ) without clipping: an evaluation, not private."""
        out = zeros_like(params)
        self.add(Batch(records, None), (params,), ClippingRule.gradient(math.inf), out)
        out /= len(records)
        out += self.regularizer.gradient(params)
        return out


@runtime_checkable
class HasHessian(Protocol):
    """An objective that can also sum its records' Hessians."""

    def add_hessians(self, batch: Batch, params: OwnVector, clip: float, out: npt.NDArray[np.float64]) -> None:
        """out += Σ ∇²fᵢ(θ), each shortened to a spectral norm of at most ``clip``; out is (d, d)."""
        ...


def add_gradients(
    points: Sequence[OwnVector], rule: ClippingRule, objective: Objective, batch: Batch, out: OwnVector
) -> None:
    """A summand of streamed records: what ``objective.add`` adds of a part."""
    objective.add(batch, points, rule, out)


def add_hessians(params: OwnVector, clip: float, objective: HasHessian, batch: Batch, out: OwnVector) -> None:
    """A summand of streamed records: what ``objective.add_hessians`` adds of a part."""
    objective.add_hessians(batch, params, clip, out)


def add_losses(params: OwnVector, bound: float, objective: Objective, batch: Batch, out: OwnVector) -> None:
    """A summand of streamed records: the sum of a part's losses, each cut to ``bound``."""
    out += objective.loss_sum(batch, params, bound)
