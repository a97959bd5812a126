"""Stochastic recursive momentum (paper 000, Algorithm 1): the estimate corrects itself by gradient differences.

v₀ = S₀/b₀ and v_t = (1−γ)v_{t−1} + S_t/b, where S_t is a noisy sum whose terms are
(1−γ) clip_C2(∇fᵢ(θ_t) − ∇fᵢ(θ_{t−1})) + γ clip_C1(∇fᵢ(θ_t)), or with one joint clip
clip_C(∇fᵢ(θ_t) − (1−γ)∇fᵢ(θ_{t−1})).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quietgrad.curators.base import Session
from quietgrad.objectives.base import Gradient, JointMomentum, Query, following_clip
from quietgrad.objectives.base import RecursiveMomentum as RecursiveMomentumQuery
from quietgrad.objectives.queries.asked import Asked
from quietgrad.oracles.base import Estimate, Noise, Oracle, SamplingName, sampling_of, settings_of, slot_of
from quietgrad.plans.schedule import Law, Slot
from quietgrad.vectors import Vector, norm


@dataclass(frozen=True)
class RecursiveMomentum(Oracle):
    """The oracle of DP-SRM.

    Args:
        batch_size: b, expected records per step.
        first_batch_size: b₀ of the first step (default: b).
        gamma: γ, the weight of the fresh gradient; 1 is the plain mini-batch.
        clip: C1, the clip of gradients.
        difference_clip: C2, the clip of gradient differences; of the whole combination when ``joint_clip``.
        joint_clip: clip the combination once instead of its two parts.
        smoothness: if given, C2 follows the public step: smoothness × ‖θ_t − θ_{t−1}‖, at most ``difference_clip``.
        first_noise: noise multiplier of the first release relative to the others.
        cohorts, noise: as in :class:`~quietgrad.algorithms.dp_sgd.DPSGD`. Correlated noise is over all releases,
            the first among them: it is then one of ``next``.
    """

    batch_size: int
    first_batch_size: int | None = None
    gamma: float = 0.1
    clip: float = 1.0
    difference_clip: float = 0.1
    joint_clip: bool = False
    smoothness: float | None = None
    sampling: SamplingName = "poisson"
    first_noise: float = 1.0
    law: Law | None = None
    cohorts: int | None = None
    noise: Noise = "independent"

    def slots(self, n_public: int, steps: int) -> tuple[Slot, ...]:
        then = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        if self._first == "next":
            if self.first_batch_size not in (None, self.batch_size) or self.first_noise != 1.0:
                raise ValueError(
                    "first_batch_size, first_noise: in turns, or under correlated noise, the first release is like "
                    "all others; leave both out."
                )
            return (slot_of("next", then, steps, self.noise, self.law),)
        first = sampling_of(self.sampling, n_public, self.first_batch_size or self.batch_size)
        slots = [Slot("first", first, 1, noise=self.first_noise)]
        if steps > 1:
            slots.append(slot_of("next", then, steps - 1, law=self.law))
        return tuple(slots)

    @property
    def _first(self) -> str:
        """The slot of the first release: its own, unless all releases together are one thing."""
        return "first" if self.noise == "independent" and self.cohorts is None else "next"

    def estimate(self, state: Estimate, params: Vector, door: Session) -> Estimate:
        if state.value is None:
            total = door.release(self._first, Gradient(params, self.clip))
            total *= 1.0 / door.expected_batch(self._first)
            return Estimate(total, params, 0.0, 1)
        total = door.release("next", self._query(params, state.previous))
        total *= 1.0 / door.expected_batch("next")
        total += (1.0 - self.gamma) * state.value
        return Estimate(total, params, 0.0, state.calls + 1)

    def _query(self, params: Vector, previous: Vector) -> Query:
        if self.joint_clip:
            return JointMomentum(params, previous, self.gamma, self.difference_clip)
        difference_clip = self.difference_clip
        if self.smoothness is not None:
            difference_clip = following_clip(min(difference_clip, self.smoothness * norm(params - previous)))
        return RecursiveMomentumQuery(params, previous, self.gamma, self.clip, difference_clip)

    def asks(self, params: Vector, door: Session) -> Iterator[tuple[str, Asked]]:
        yield self._first, Asked(Gradient(params, self.clip))
        varies = {"difference_clip": (0.0, self.difference_clip)}
        adaptive = self.smoothness is not None and not self.joint_clip
        yield "next", Asked(self._query(params, params), varies if adaptive else {})

    def config(self) -> dict[str, Any]:
        return settings_of(self)
