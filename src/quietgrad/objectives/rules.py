"""One rule for all clipped sums: what an objective has to compute, whichever of them a query asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Indices

Floats = npt.NDArray[np.float64]

Rule = tuple[float, float, float, float, float]
"""(α, β, A, γ, B): a record contributes α·clip_A(g − βg′) + γ·clip_B(g), g and g′ its gradients at two points."""


class RuledSums(ABC):
    """The gradient sums of the :class:`~quietgrad.objectives.base.Objective` protocol, each as a :data:`Rule`."""

    @abstractmethod
    def _add(
        self,
        records: Any,
        indices: Indices | None,
        params: Floats,
        previous: Floats,
        rule: Rule,
        out: Floats,
    ) -> None:
        """out += Σ of the rule's contributions at θ and θ′."""

    def add_gradients(
        self, records: Any, indices: Indices | None, params: Floats, clip: float, out: Floats
    ) -> None:
        """out += Σ clip_C(∇fᵢ(θ))."""
        self._add(records, indices, params, params, (1.0, 0.0, clip, 0.0, 0.0), out)

    def add_differences(
        self, records: Any, indices: Indices | None, params: Floats, previous: Floats, clip: float, out: Floats
    ) -> None:
        """out += Σ clip_C(∇fᵢ(θ) − ∇fᵢ(θ′))."""
        self._add(records, indices, params, previous, (1.0, 1.0, clip, 0.0, 0.0), out)

    def add_momentum(
        self,
        records: Any,
        indices: Indices | None,
        params: Floats,
        previous: Floats,
        gamma: float,
        clip: float,
        difference_clip: float,
        out: Floats,
    ) -> None:
        """out += Σ [(1−γ) clip_C2(∇fᵢ(θ) − ∇fᵢ(θ′)) + γ clip_C1(∇fᵢ(θ))]."""
        self._add(records, indices, params, previous, (1.0 - gamma, 1.0, difference_clip, gamma, clip), out)

    def add_joint_momentum(
        self,
        records: Any,
        indices: Indices | None,
        params: Floats,
        previous: Floats,
        gamma: float,
        clip: float,
        out: Floats,
    ) -> None:
        """out += Σ clip_C(∇fᵢ(θ) − (1−γ) ∇fᵢ(θ′))."""
        self._add(records, indices, params, previous, (1.0, 1.0 - gamma, clip, 0.0, 0.0), out)
