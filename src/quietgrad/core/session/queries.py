"""Queries to a curator: what one record contributes to a release, and the bound of it.

A *query* is public and frozen. ``bound`` is C, the L2 norm that no record's contribution exceeds. A query does its
work by one call into the objective (:mod:`quietgrad.core.session.objectives`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.core.session.clipping import FLAT, Clipping
from quietgrad.core.session.contributions import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    ClippingRule,
    check_clip,
    following_clip,
    rounding_safe_clip,
)
from quietgrad.core.session.objectives import (
    BaseObjective,
    Batch,
    HasHessian,
    LossConstants,
    NoRegularizer,
    Objective,
    RecordAdapter,
    Records,
    Regularizer,
    StreamedRecords,
    add_losses,
    public_loss,
)
from quietgrad.core.vectors import OwnVector

# What objectives and contributions define was imported from here in earlier versions.
__all__ = [
    "Asked", "BaseObjective", "Batch", "ClippingRule", "GradientDifferenceQuery", "GradientQuery",
    "HasHessian", "JointMomentumQuery", "LARGEST_CLIP", "LabelQuery", "LossConstants", "LossQuery",
    "NoRegularizer", "Objective", "Query", "RecordAdapter", "Records", "RecursiveMomentumQuery",
    "Regularizer", "SMALLEST_CLIP", "StreamedRecords", "check_clip", "following_clip", "public_loss",
    "rounding_safe_clip",
]  # fmt: skip


class Query(Protocol):
    """A query: one record's contribution to a release, and its bound."""

    @property
    def bound(self) -> float:
        """C, the L2 norm that no record's contribution exceeds."""
        ...

    def dim(self, records: Any) -> int:
        """Length of the vector released."""
        ...

    def sum_into(self, objective: Any, batch: Batch, out: OwnVector) -> None:
        """out += Σ over the batch of each record's contribution."""
        ...


class LabelQuery(Protocol):
    """A query that finds labels: how often each occurs, and which of those that passed are released."""

    @property
    def bound(self) -> float:
        """The most that one unit adds to all counts together, in L2."""
        ...

    def count(self, batch: Batch) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """The labels and their exact counts: secret."""
        ...

    def kept(self, labels: npt.NDArray[Any], passed: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """The labels to release, of those whose noisy count passed."""
        ...


@dataclass(frozen=True)
class Asked:
    """A query that an algorithm declares for a slot; parties approve a plan by these declarations.

    A number is fixed unless it is in ``between``. A vector may vary unless it is ``pinned``.

    Args:
        query: an example of the query. It fixes numbers, words and the lengths of vectors.
        between: by field (``"clip"``, ``"whitening.radius"``), the interval in which a number may vary.
        pinned: fields whose vector is fixed too, because it is public before the run.
    """

    query: Query
    between: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _RuledQuery:
    """A sum of gradients at θ: its :class:`ClippingRule` follows from the fields and is looked up once."""

    params: OwnVector
    rule: ClippingRule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", self._rule())

    def _rule(self) -> ClippingRule:
        raise NotImplementedError

    @property
    def bound(self) -> float:
        return self.rule.bound

    def dim(self, records: Records) -> int:
        return int(records.dim)

    def sum_into(self, objective: Objective, batch: Batch, out: OwnVector) -> None:
        objective.add(batch, (self.params,), self.rule, out)


@dataclass(frozen=True, slots=True, eq=False)
class _TwoPointQuery(_RuledQuery):
    """The same at θ and θ′."""

    previous: OwnVector

    def sum_into(self, objective: Objective, batch: Batch, out: OwnVector) -> None:
        objective.add(batch, (self.params, self.previous), self.rule, out)


@dataclass(frozen=True, slots=True, eq=False)
class GradientQuery(_RuledQuery):
    """Σ clip_C(∇fᵢ(θ)): DP-SGD, DP-GD, the first step of DP-SRM, SPIDER's O1."""

    clip: float
    clipping: Clipping = FLAT

    def _rule(self) -> ClippingRule:
        return ClippingRule.gradient(self.clip, self.clipping)


@dataclass(frozen=True, slots=True, eq=False)
class GradientDifferenceQuery(_TwoPointQuery):
    """Σ clip_C(∇fᵢ(θ) − ∇fᵢ(θ′)): SPIDER's O2."""

    clip: float
    clipping: Clipping = FLAT

    def _rule(self) -> ClippingRule:
        return ClippingRule.difference(self.clip, self.clipping)


@dataclass(frozen=True, slots=True, eq=False)
class RecursiveMomentumQuery(_TwoPointQuery):
    """Σ [(1−γ) clip_C2(∇fᵢ(θ) − ∇fᵢ(θ′)) + γ clip_C1(∇fᵢ(θ))]: DP-SRM with its two clips (Remark 4.3).

    Clipping ∇fᵢ(θ) and ∇fᵢ(θ′) apart and subtracting would not bound the difference: one record could then
    contribute γC1 + (1−γ)·2C1.
    """

    gamma: float
    clip: float
    difference_clip: float
    clipping: Clipping = FLAT

    def _rule(self) -> ClippingRule:
        return ClippingRule.momentum(self.gamma, self.clip, self.difference_clip, self.clipping)


@dataclass(frozen=True, slots=True, eq=False)
class JointMomentumQuery(_TwoPointQuery):
    """Σ clip_C(∇fᵢ(θ) − (1−γ) ∇fᵢ(θ′)): recursive momentum with one clip, never looser than two."""

    gamma: float
    clip: float
    clipping: Clipping = FLAT

    def _rule(self) -> ClippingRule:
        return ClippingRule.joint(self.gamma, self.clip, self.clipping)


@dataclass(frozen=True, slots=True, eq=False)
class LossQuery:
    """Σ min(fᵢ(θ), B): one number per candidate, for a noisy choice between them (DP-AGD)."""

    params: OwnVector
    clip: float

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)

    @property
    def bound(self) -> float:
        return self.clip

    def dim(self, records: Records) -> int:
        return 1

    def sum_into(self, objective: Objective, batch: Batch, out: OwnVector) -> None:
        add_losses(self.params, self.clip, objective, batch, out)
