"""How a loop clips: over all parameters, each parameter for itself, or at a bound that follows the gradients.

A rule knows the L2 bound of what one record adds to a release, adds the clipped contributions of some rows, and
learns from what was released. A release may hold more than the gradient: the adaptive rule asks, in the same
Gaussian release and for its price, how many records were not clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quietgrad.objectives.networks.engine import clip_weights
from quietgrad.objectives.networks.gradients import Clipping, Gradients


@dataclass
class FlatClip:
    """One bound C over all parameters.

    >>> FlatClip(0.5).bound(1.1)
    0.5
    """

    clip: float
    extra: int = field(default=0, init=False)
    """Numbers that a release holds besides the gradient."""
    precision: torch.dtype = field(default=torch.float32, init=False)
    """That gradients are computed in."""

    def bound(self, multiplier: float) -> float:
        """The L2 norm of what one record adds to a release whose noise multiplier is ``multiplier``, at most."""
        return self.clip

    def at(self, multiplier: float) -> Clipping:
        """What clips for a release of that noise multiplier."""
        return self

    def norms(self, gradients: Gradients) -> Tensor:
        """What is clipped by, of each record or unit: (records, 1), or (records, parameters)."""
        return gradients.norms()

    def add(self, gradients: Gradients, norms: Tensor, out: Tensor) -> None:
        """out += the clipped contributions of some records, or units, whose :meth:`norms` are finite."""
        gradients.add_weighted(clip_weights(norms, self.clip, self.precision), out)

    def learn(self, released: Tensor, expected: float, multiplier: float) -> None:
        """The extra numbers of a release, to go on from."""

    def state(self) -> dict[str, float]:
        """What a rule has learnt from releases; most learn nothing."""
        return {}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on from a :meth:`state` that came with what it cost."""

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return {"clip": self.clip}


@dataclass
class PerParameterClip(FlatClip):
    """A bound for each parameter: together a record is bounded by ‖clips‖ = √ΣC_p², which the noise is for.

    >>> PerParameterClip(5.0, (3.0, 4.0)).bound(1.0)
    5.0
    """

    clips: tuple[float, ...]

    def norms(self, gradients: Gradients) -> Tensor:
        """Those of each parameter."""
        return gradients.parameter_norms()

    def add(self, gradients: Gradients, norms: Tensor, out: Tensor) -> None:
        """Each parameter's gradient is clipped to its own bound."""
        weights = [clip_weights(norms[:, k], clip, self.precision) for k, clip in enumerate(self.clips)]
        gradients.add_weighted_by_parameter(torch.stack(weights, 1), out)

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return {"clip": list(self.clips), "clipping": "per_layer"}


@dataclass
class AdaptiveClip(FlatClip):
    """A bound that follows a quantile of the gradient norms (Andrew et al. 2021), told by a noisy count.

    With b_i = 1 if record i is not clipped, a release is Σ (clip_C(g_i), s·(b_i − ½)). One record adds a vector
    of norm at most B = √(C² + s²/4), so noise z·B on every coordinate is one Gaussian release of multiplier z. s is
    such that the count's noise z·B/s is ``count_noise``: s = z·C/√(count_noise² − z²/4), which exists if
    count_noise > z/2. The share of unclipped records is ½ + count/(expected batch), by the public size of a sample,
    and C ← C·exp(−rate·(share − quantile)).

    >>> import torch
    >>> rule = AdaptiveClip(1.0, quantile=0.5, rate=0.2, lowest=0.1, highest=10.0, count_noise=5.0)
    >>> round(1.0 * rule.bound(1.0) / rule.scale(1.0), 9)
    5.0
    >>> rule.learn(torch.tensor([0.5 * rule.scale(1.0) * 100]), 100.0, 1.0)  # nobody was clipped
    >>> round(rule.clip, 4)
    0.9048
    """

    quantile: float
    rate: float
    lowest: float
    highest: float
    count_noise: float
    extra: int = field(default=1, init=False)
    _multiplier: float = field(default=math.nan, init=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile < 1.0:
            raise ValueError(f"target_unclipped_quantile={self.quantile}: must be between 0 and 1.")
        if not 0.0 < self.lowest <= self.clip <= self.highest < math.inf:
            raise ValueError(
                f"min_clipbound={self.lowest}, max_grad_norm={self.clip}, max_clipbound={self.highest}: must be in "
                "this order, finite and > 0."
            )
        if not (0.0 < self.rate < math.inf and 0.0 < self.count_noise < math.inf):
            raise ValueError("clipbound_learning_rate and unclipped_num_std must be finite numbers > 0.")

    def scale(self, multiplier: float) -> float:
        """s: what one record of difference in the count is in the release."""
        rest = self.count_noise**2 - multiplier**2 / 4.0
        if rest <= 0.0:
            raise ValueError(
                f"unclipped_num_std={self.count_noise:g}: must exceed half the noise multiplier {multiplier:.4g}, "
                "or there is no noise left for the gradient. Use about a twentieth of the batch size."
            )
        return multiplier * self.clip / math.sqrt(rest)

    def bound(self, multiplier: float) -> float:
        """√(C² + s²/4)."""
        return math.hypot(self.clip, self.scale(multiplier) / 2.0)

    def at(self, multiplier: float) -> Clipping:
        """The rule itself."""
        self._multiplier = multiplier
        return self

    def add(self, gradients: Gradients, norms: Tensor, out: Tensor) -> None:
        """Clipped gradients, and behind them s·Σ(b_i − ½)."""
        super().add(gradients, norms, out[:-1])
        unclipped = int((norms <= self.clip).sum())
        out[-1] += self.scale(self._multiplier) * (unclipped - 0.5 * len(norms))

    def learn(self, released: Tensor, expected: float, multiplier: float) -> None:
        """Move the bound by the noisy share of unclipped records."""
        share = 0.5 + float(released[0]) / (self.scale(multiplier) * expected)
        moved = self.clip * math.exp(min(max(-self.rate * (share - self.quantile), -50.0), 50.0))
        self.clip = min(max(moved, self.lowest), self.highest)

    def state(self) -> dict[str, float]:
        """Where the bound is."""
        return {"clip": self.clip}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on from there, within the limits of this rule."""
        if isinstance(clip := state.get("clip"), float) and clip > 0.0:
            self.clip = min(max(clip, self.lowest), self.highest)

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return {
            "clip": self.clip, "clipping": "adaptive", "quantile": self.quantile, "rate": self.rate,
            "lowest": self.lowest, "highest": self.highest, "count_noise": self.count_noise,
        }  # fmt: skip


def clip_rule(
    clipping: str, max_grad_norm: float | Sequence[float], parameters: int, several: str | None = None,
    **settings: float,
) -> FlatClip:  # fmt: skip
    """The rule that Opacus' ``clipping`` names, of so many trained parameters.

    ``several`` names what has several records per privacy unit, which are clipped over all parameters.

    >>> clip_rule("per_layer", 2.0, 4).bound(1.0)
    2.0
    """
    if clipping not in ("flat", "per_layer", "adaptive"):
        raise ValueError(f"clipping={clipping!r}: must be 'flat', 'per_layer' or 'adaptive'.")
    if several is not None and clipping != "flat":
        raise ValueError(f"{several}: records are clipped together over all parameters: use clipping='flat'.")
    names = {
        "target_unclipped_quantile": "quantile", "clipbound_learning_rate": "rate", "min_clipbound": "lowest",
        "max_clipbound": "highest", "unclipped_num_std": "count_noise",
    }  # fmt: skip
    if (clipping != "adaptive" and settings) or not set(settings) <= set(names):
        unknown = sorted(settings)[0] if clipping != "adaptive" else sorted(set(settings) - set(names))[0]
        raise TypeError(f"{unknown}: not a setting of clipping={clipping!r}.")
    given = np.asarray(max_grad_norm, dtype=np.float64)
    bounds = [float(each) for each in given.reshape(-1)]
    if not all(0.0 < each < math.inf for each in bounds):
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r}: must be a finite number > 0, or one for each parameter."
        )
    if clipping == "per_layer":
        if not given.ndim:  # the same bound together, shared evenly
            bounds = [bounds[0] / math.sqrt(parameters)] * parameters
        if len(bounds) != parameters:
            raise ValueError(
                f"max_grad_norm has {len(bounds)} bounds: clipping='per_layer' needs one for each of the "
                f"{parameters} trained parameters, in the order of module.named_parameters()."
            )
        return PerParameterClip(math.hypot(*bounds), tuple(bounds))
    if given.ndim:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: clipping={clipping!r} has one bound; give a number.")
    if clipping == "flat":
        return FlatClip(bounds[0])
    missing = sorted(set(names) - set(settings))
    if missing:
        raise TypeError(f"clipping='adaptive': {missing[0]} is missing.")
    return AdaptiveClip(bounds[0], **{names[key]: float(value) for key, value in settings.items()})
