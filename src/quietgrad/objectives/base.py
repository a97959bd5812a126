"""What a curator is asked: queries, the objectives that answer them, and the regularisers that need no privacy.

A *query* is public and frozen. It says what one record contributes to a sum and bounds that contribution:
``bound`` is C, the L2 norm no record exceeds. It does its work by one call into the objective, which knows the
loss and how to sum clipped per-example gradients without ever storing them.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt

from quietgrad.vectors import Vector, zeros_like

Indices = npt.NDArray[Any]


class Records(Sized, Protocol):
    """Data made ready for an objective: validated, contiguous, laid out for its kernels."""

    @property
    def dim(self) -> int:
        """Number of parameters a model for these records has."""
        ...


class Batch(NamedTuple):
    """Some records, by position; ``indices=None`` means all of them."""

    records: Any
    indices: Indices | None


@dataclass(frozen=True)
class Constants:
    """What is true of every per-example loss whose row norm is at most ``row_bound``.

    ``lipschitz`` G and ``smoothness`` L leave the regulariser out (it cancels between neighbours);
    ``regularizer_smoothness`` and ``strong_convexity`` are the regulariser's. ``hessian_lipschitz`` is ρ.
    ``None`` means no finite constant exists.
    """

    row_bound: float
    lipschitz: float | None
    smoothness: float | None
    hessian_lipschitz: float | None
    strong_convexity: float
    regularizer_smoothness: float
    convex: bool

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
    def strong_convexity(self) -> float: ...
    @property
    def smoothness(self) -> float: ...
    @property
    def convex(self) -> bool: ...
    def value(self, params: Vector) -> float: ...
    def gradient(self, params: Vector) -> Vector: ...


@dataclass(frozen=True)
class NoRegularizer:
    """The zero regulariser."""

    strong_convexity: float = 0.0
    smoothness: float = 0.0
    convex: bool = True

    def value(self, params: Vector) -> float:
        """Return 0."""
        return 0.0

    def gradient(self, params: Vector) -> Vector:
        """Return the zero vector."""
        return zeros_like(params)


class Objective(Protocol):
    """An empirical risk F(θ) = (1/n) Σᵢ fᵢ(θ) + r(θ) and its clipped sums.

    Every ``add_*`` method adds to ``out``. No record's contribution is longer than the clip, whatever its values:
    kernels clip to C/(1+2e-5) in float32 and C/(1+1e-12) in float64, and a non-finite contribution counts as zero.
    """

    @property
    def regularizer(self) -> Regularizer:
        """The public term r."""
        ...

    def prepare(self, data: Any) -> Records:
        """Validate ``data`` and lay it out; raise :class:`~quietgrad.errors.DataError` if it cannot be used."""
        ...

    def initial(self, records: Any) -> Vector:
        """The starting point, which depends on no record."""
        ...

    def add_gradients(
        self, records: Any, indices: Indices | None, params: Vector, clip: float, out: Vector
    ) -> None:
        """out += Σ clip_C(∇fᵢ(θ))."""
        ...

    def add_differences(
        self,
        records: Any,
        indices: Indices | None,
        params: Vector,
        previous: Vector,
        clip: float,
        out: Vector,
    ) -> None:
        """out += Σ clip_C(∇fᵢ(θ) − ∇fᵢ(θ′))."""
        ...

    def add_momentum(
        self,
        records: Any,
        indices: Indices | None,
        params: Vector,
        previous: Vector,
        gamma: float,
        clip: float,
        difference_clip: float,
        out: Vector,
    ) -> None:
        """out += Σ [(1−γ) clip_C2(∇fᵢ(θ) − ∇fᵢ(θ′)) + γ clip_C1(∇fᵢ(θ))]."""
        ...

    def add_joint_momentum(
        self,
        records: Any,
        indices: Indices | None,
        params: Vector,
        previous: Vector,
        gamma: float,
        clip: float,
        out: Vector,
    ) -> None:
        """out += Σ clip_C(∇fᵢ(θ) − (1−γ) ∇fᵢ(θ′))."""
        ...

    def loss_sum(self, records: Any, indices: Indices | None, params: Vector, bound: float) -> float:
        """Σ min(fᵢ(θ), bound), each term in [0, bound]."""
        ...

    def risk(self, records: Any, params: Vector) -> float:
        """F(θ) with the regulariser: an evaluation, not private."""
        ...

    def risk_gradient(self, records: Any, params: Vector) -> Vector:
        """∇F(θ) without clipping: an evaluation, not private."""
        ...


class Query(Protocol):
    """What one record contributes to a release."""

    @property
    def bound(self) -> float:
        """C, the L2 norm that no record's contribution exceeds."""
        ...

    def dim(self, records: Any) -> int:
        """Length of the vector released."""
        ...

    def sum_into(self, objective: Any, batch: Batch, out: Vector) -> None:
        """out += Σ over the batch of each record's contribution."""
        ...


class _ParameterQuery:
    """A query whose answer is as long as the parameters."""

    def dim(self, records: Any) -> int:
        return int(records.dim)


@dataclass(frozen=True, slots=True, eq=False)
class Gradient(_ParameterQuery):
    """Σ clip_C(∇fᵢ(θ)): DP-SGD, DP-GD, the first step of DP-SRM, SPIDER's O1."""

    params: Vector
    clip: float

    @property
    def bound(self) -> float:
        return self.clip

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        objective.add_gradients(batch.records, batch.indices, self.params, self.clip, out)


@dataclass(frozen=True, slots=True, eq=False)
class GradientDifference(_ParameterQuery):
    """Σ clip_C(∇fᵢ(θ) − ∇fᵢ(θ′)): SPIDER's O2."""

    params: Vector
    previous: Vector
    clip: float

    @property
    def bound(self) -> float:
        return self.clip

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        objective.add_differences(batch.records, batch.indices, self.params, self.previous, self.clip, out)


@dataclass(frozen=True, slots=True, eq=False)
class RecursiveMomentum(_ParameterQuery):
    """Σ [(1−γ) clip_C2(∇fᵢ(θ) − ∇fᵢ(θ′)) + γ clip_C1(∇fᵢ(θ))]: DP-SRM with its two clips (Remark 4.3).

    Clipping ∇fᵢ(θ) and ∇fᵢ(θ′) apart and subtracting would not bound the difference: one record could then
    contribute γC1 + (1−γ)·2C1.
    """

    params: Vector
    previous: Vector
    gamma: float
    clip: float
    difference_clip: float

    @property
    def bound(self) -> float:
        return (1.0 - self.gamma) * self.difference_clip + self.gamma * self.clip

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        objective.add_momentum(
            batch.records,
            batch.indices,
            self.params,
            self.previous,
            self.gamma,
            self.clip,
            self.difference_clip,
            out,
        )


@dataclass(frozen=True, slots=True, eq=False)
class JointMomentum(_ParameterQuery):
    """Σ clip_C(∇fᵢ(θ) − (1−γ) ∇fᵢ(θ′)): recursive momentum with one clip, never looser than two."""

    params: Vector
    previous: Vector
    gamma: float
    clip: float

    @property
    def bound(self) -> float:
        return self.clip

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        objective.add_joint_momentum(
            batch.records, batch.indices, self.params, self.previous, self.gamma, self.clip, out
        )


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """Σ min(fᵢ(θ), B): one number per candidate, for a noisy choice between them (DP-AGD)."""

    params: Vector
    clip: float

    @property
    def bound(self) -> float:
        return self.clip

    def dim(self, records: Any) -> int:
        return 1

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        out += objective.loss_sum(batch.records, batch.indices, self.params, self.clip)
