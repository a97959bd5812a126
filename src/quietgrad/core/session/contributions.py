"""The contribution of one record to a sum of gradients, and the clips that arithmetic keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from quietgrad.core.errors import SettingError
from quietgrad.core.session.clipping import FLAT, Clipping


def rounding_safe_clip(clip: float) -> float:
    """The clip that float64 arithmetic works with: after rounding, what was cut to it is still no longer than C."""
    return clip / (1.0 + 1e-12)


SMALLEST_CLIP, LARGEST_CLIP = 2.0**-60, 2.0**100
"""Between these, products of clips, weights and entries keep their precision, in float32 too: C is then the most
that a record contributes after rounding. Below, a clipped vector could be several times as long as its clip."""
_SMALLEST_WEIGHT = 2.0**-60


def check_clip(name: str, value: float) -> None:
    """Refuse a clip outside of the range in which arithmetic keeps it; 0 lets nothing through, ∞ everything."""
    if not (value == 0.0 or SMALLEST_CLIP <= value <= LARGEST_CLIP or value == math.inf):
        raise SettingError(
            f"{{{name}}}: must be 0, or between {SMALLEST_CLIP:.3g} and {LARGEST_CLIP:.3g}.", **{name: value}
        )


def following_clip(value: float) -> float:
    """A clip that follows from earlier releases: one that is too small for arithmetic lets nothing through.

    >>> following_clip(0.5), following_clip(1e-30)
    (0.5, 0.0)
    """
    return value if value >= SMALLEST_CLIP else 0.0


Numbers = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class ClippingRule:
    """The contribution of one record to a sum of gradients: α·clip_A(g − βg′) + γ·clip_B(g).

    g and g′ are the record's gradients at the two points of a query. Every sum of gradients in this library has
    this form; build it by name. If β = 0, the second point is never read. Rules are few and are made once.
    Compiled kernels read :attr:`numbers`. ``clipping`` defines clip_C, and a new way to clip goes there
    (:mod:`quietgrad.core.session.clipping`); compiled kernels support the flat one only.

    >>> ClippingRule.momentum(0.25, 1.0, 0.5).bound
    0.625

    If the difference is clipped to 0, one point is enough.

    >>> ClippingRule.momentum(0.25, 1.0, 0.0) == ClippingRule(0.25, 0.0, 1.0)
    True
    """

    alpha: float
    beta: float
    clip: float
    gamma: float = 0.0
    second_clip: float = 0.0
    clipping: Clipping = FLAT
    numbers: Numbers = field(init=False, repr=False, compare=False)
    """(α, β, A, γ, B) with both clips made tight."""
    bound: float = field(init=False, repr=False, compare=False)
    """αA + γB, the L2 norm that no record's contribution exceeds."""

    def __post_init__(self) -> None:
        weights = (self.alpha, self.beta, self.gamma)
        if not all(weight == 0.0 or _SMALLEST_WEIGHT <= weight <= 1.0 for weight in weights):
            raise ValueError(
                f"alpha, beta, gamma = {weights}: each must be in [0, 1], and not below {_SMALLEST_WEIGHT:.3g}."
            )
        check_clip("clip", self.clip)
        check_clip("second_clip", self.second_clip)
        if self.clipping != FLAT and math.inf in (self.clip, self.second_clip):
            raise ValueError(f"clipping={self.clipping.kind!r}: needs a finite clip; without one use 'flat'.")
        # A narrow float would round the bound down.
        alpha, beta, clip = float(self.alpha), float(self.beta), float(self.clip)
        gamma, second = float(self.gamma), float(self.second_clip)
        numbers = (alpha, beta, rounding_safe_clip(clip), gamma, rounding_safe_clip(second))
        values = {"alpha": alpha, "beta": beta, "clip": clip, "gamma": gamma, "second_clip": second}
        for name, value in {**values, "numbers": numbers, "bound": alpha * clip + gamma * second}.items():
            object.__setattr__(self, name, value)

    @staticmethod
    @lru_cache
    def gradient(clip: float, clipping: Clipping = FLAT) -> ClippingRule:
        """clip_C(g)."""
        return ClippingRule(1.0, 0.0, clip, clipping=clipping)

    @staticmethod
    @lru_cache
    def difference(clip: float, clipping: Clipping = FLAT) -> ClippingRule:
        """clip_C(g − g′)."""
        return ClippingRule(1.0, 1.0, clip, clipping=clipping)

    @staticmethod
    @lru_cache
    def momentum(gamma: float, clip: float, difference_clip: float, clipping: Clipping = FLAT) -> ClippingRule:
        """(1−γ)·clip_C2(g − g′) + γ·clip_C1(g)."""
        if gamma == 1.0 or difference_clip == 0.0:
            return ClippingRule(gamma, 0.0, clip, clipping=clipping)
        return ClippingRule(1.0 - gamma, 1.0, difference_clip, gamma, clip, clipping)

    @staticmethod
    @lru_cache
    def joint(gamma: float, clip: float, clipping: Clipping = FLAT) -> ClippingRule:
        """clip_C(g − (1−γ)g′)."""
        return ClippingRule(1.0, 1.0 - gamma, clip, clipping=clipping)
