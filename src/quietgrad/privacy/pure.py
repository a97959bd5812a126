"""The pure accountant: releases that are ε-DP with δ = 0 simply add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quietgrad.privacy.budget import Relation
from quietgrad.privacy.composition import CannotProve, check_relation
from quietgrad.privacy.events import Composed, Event, Laplace, Pure, Repeated


@dataclass(frozen=True)
class PureProfile:
    """ε-DP: the same ε at every δ."""

    total: float
    name: str = "pure"

    def epsilon(self, delta: float) -> float:
        """ε, whatever δ."""
        return self.total

    def delta(self, epsilon: float) -> float:
        """0 from the total ε on; below it, that of randomised response, the worst ε-DP release."""
        below = max(0.0, self.total - epsilon)
        return -math.expm1(-below) / (1 + math.exp(-self.total))


def pure_profile(event: Event, relation: Relation, factor: float) -> PureProfile:
    """Return the sum of the ε of pure-DP and Laplace releases; ``factor`` is Δ/C. Refuses all others."""
    return PureProfile(_total(event, relation, factor))


def _total(event: Event, relation: Relation, factor: float) -> float:
    match event:
        case Pure(epsilon=epsilon, relation=proved):
            check_relation(event, proved, relation)
            return epsilon
        case Laplace(noise_multiplier=z):
            return factor / z
        case Composed(parts=parts):
            return math.fsum(_total(part, relation, factor) for part in parts)
        case Repeated(inner=inner, count=count):
            return count * _total(inner, relation, factor)
    raise CannotProve(event, f"a {event.kind} event is not pure DP")
