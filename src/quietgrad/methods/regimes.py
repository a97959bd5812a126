"""When gradient differences pay: G/(M·path), from public constants and a stated radius, before a run.

A full gradient is as long as G, a difference as long as M‖θ − θ′‖, and all differences of a walk together as
M·path. Where G is far above M·path, one dear full gradient and many cheap differences beat many dear gradients;
where it is far below, differences are no cheaper than gradients. Where the two are alike it depends on the noise:
with little of it differences are ahead. The limits below are measured (``reproduce/results/valley.json``), on a
curved valley with equal search for both. On tables (``reproduce/results/spider_tables.json``) the walk is long, the
ratio far below the second limit, and the best DP-SPIDER is the one that asks full gradients alone. The advice is as
good as the constants: M too small cuts differences, and a radius too small makes the ratio too large.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from quietgrad.core.errors import SettingError
from quietgrad.core.settings import Within
from quietgrad.methods.oracles.spider import split_for

PAYS, LOSES = 2.0, 0.1
"""On the valley differences won in all cells above the first ratio and in none below the second.

On other risks (``reproduce/results/advice.json``) they won or tied above the first. Below the second they won once,
by 8 %.
"""


@dataclass(frozen=True)
class Regime:
    """The ratio G/(M·path) of a problem, and the method that it recommends.

    Args:
        lipschitz: G, the bound on one record's gradient (the clip).
        smoothness: M, the bound on one record's curvature.
        path: a public bound on the length of the walk, such as the radius that the model is looked for in.

    >>> print(Regime(lipschitz=1.0, smoothness=0.25, path=0.2))
    G/(M·path) = 20: differences pay; use dp-spider with path=0.2 (split 0.95)
    >>> print(Regime(1.0, 0.25, 100.0))
    G/(M·path) = 0.04: differences are as dear as gradients; use dp-gd or dp-sgd
    """

    lipschitz: float
    smoothness: float
    path: float

    def __post_init__(self) -> None:
        for name in ("lipschitz", "smoothness", "path"):
            Within(0.0, sys.float_info.max, closed=False).check(name, getattr(self, name))
        if not 0.0 < self.ratio < math.inf:
            raise SettingError(
                "{path}: too small or too large for G/(M·path) with {lipschitz} and {smoothness}. State the radius "
                "in which the model is looked for.",
                path=self.path, lipschitz=self.lipschitz, smoothness=self.smoothness,
            )  # fmt: skip

    @property
    def ratio(self) -> float:
        """G/(M·path)."""
        return self.lipschitz / self.smoothness / self.path

    @property
    def advice(self) -> str:
        """Recommended method, in one line."""
        use = f"dp-spider with path={self.path:g} (split {split_for(self.ratio):.2g})"
        if self.ratio >= PAYS:
            return f"differences pay; use {use}"
        if self.ratio <= LOSES:
            return "differences are as dear as gradients; use dp-gd or dp-sgd"
        return f"differences pay only if noise is low; compare dp-gd with {use}"

    def __str__(self) -> str:
        return f"G/(M·path) = {self.ratio:.3g}: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """The regime as plain values."""
        return {"ratio": self.ratio, "advice": self.advice}
