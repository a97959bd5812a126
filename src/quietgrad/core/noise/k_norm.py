"""The K-norm mechanism: Laplace noise for sums to which a record adds one bounded block, and labels found by it.

A table of K groups has d numbers in each: a count, and sums of values that were scaled to [−1, 1]. A record is in
one group, and adds there a vector of the cube [−1, 1]^d. So two neighbouring tables are close in the norm

    ‖x‖ = Σ over blocks of d numbers of max |xᵢ|,

and noise of density ∝ exp(−‖x‖/b) is ε-DP with ε = Δ/b (Hardt, Talwar 2010). With blocks of one number it is the
Laplace mechanism, and ‖x‖ the L1 norm. With d numbers each of them has the variance b²(d + 1)(d + 2)/3, where
Laplace noise on each, which must pay for every number apart, has 2(bd)².

Both kinds ask a query for its bound in this norm. A query that declares none is refused, because its L2 bound says
nothing about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError
from quietgrad.core.noise.grid import NoiseStream, add_discretized_gaussian, grid_step
from quietgrad.core.noise.mechanisms import Floats, Mechanism, NoiseSource, PartitionSelection, Probe


def k_norm_bound(query: Any, width: int) -> float:
    """The bound that ``query`` declares in the norm of blocks of ``width`` numbers; BudgetError if it has none."""
    declared = getattr(query, "k_norm_bound", None)
    if declared is None:
        raise BudgetError(
            f"{type(query).__name__}: declares no bound in the norm of the K-norm mechanism. Its L2 bound does not "
            "serve; plan Gaussian noise for it. Nothing was released."
        )
    return float(declared(width))


def k_norm_for(multiplier: float, bound: float, blocks: int) -> tuple[float, float]:
    """(scale, step) of noise that makes a release worth ``multiplier``, the rounding of the sum included.

    Rounding moves each number of the difference of two sums by a unit at most, hence each block's norm by a unit.
    As with the L2 norm (:func:`quietgrad.core.noise.grid.grid_bound`) one number serves both relations.
    """
    step = grid_step(multiplier * bound)
    return multiplier * (bound + blocks * step), step


def k_norm_noise(blocks: int, width: int, scale: float, stream: NoiseStream, block: int) -> Floats:
    """Noise of density ∝ exp(−‖x‖/scale), one row per block of numbers.

    A row is r·u with u uniform in the cube [−1, 1]^width and r ~ Gamma(width + 1, scale): then ‖row‖ is
    Gamma(width, scale), as the density asks. Takes the blocks 2·``block`` and 2·``block`` + 1 of the stream.
    """
    words = stream.uint64(2 * block, blocks * width)
    size = ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-63
    u = np.where(words & np.uint64(1), size, -size).reshape(blocks, width)
    radius = stream.exponential(2 * block + 1, blocks * (width + 1)).reshape(blocks, width + 1).sum(axis=1)
    return np.asarray(u * (scale * radius)[:, None])


@dataclass(frozen=True)
class KNormNoise(Mechanism, kind="k-norm"):
    """Noise of density ∝ exp(−‖x‖/(z·C)), ‖x‖ the sum over blocks of ``width`` numbers of their largest: pure ε."""

    width: int

    noise: ClassVar[str] = "K-norm Laplace"
    in_secure_sums: ClassVar[bool] = False
    one_curator: ClassVar[bool] = True
    only_central: ClassVar[str] = "its bound is one record's in a norm that parties do not clip to."

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"width={self.width!r}: must be a whole number ≥ 1.")

    @classmethod
    def example(cls, releases: int) -> KNormNoise:
        return cls(4)

    def bound_of(self, query: Any) -> float:
        return k_norm_bound(query, self.width)

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Pure(sensitivity_factor(relation) / multiplier, relation)

    @property
    def loudness(self) -> float:
        return math.sqrt((self.width + 1) * (self.width + 2) / 3.0)

    def reach(self, dim: int) -> float:
        """Every number is at most its block's radius, and all radii together are Gamma(dim + blocks)."""
        total = dim + math.ceil(dim / self.width)
        return total + 40.0 + 10.0 * math.sqrt(total)

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """Normals of each block: its norm is Gamma(width), its other numbers are uniform up to the norm."""
        from scipy.special import gammainc, ndtri

        def normals(heard: Floats, number: int, rng: np.random.Generator) -> Floats:
            rows = heard[: len(heard) // self.width * self.width].reshape(-1, self.width)
            top = np.abs(rows).argmax(axis=1)
            norms = np.abs(rows).max(axis=1)
            share = rows / np.maximum(norms, 1e-300)[:, None]
            at = np.arange(len(rows))
            share[at, top] = np.sign(rows[at, top]) * gammainc(self.width, norms / (multiplier * bound))
            return np.asarray(ndtri(np.clip((1.0 + share) / 2.0, 1e-15, 1.0 - 1e-15)).reshape(-1))

        return Probe(normals)

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _KNormSource(self.width, key, label)


class _KNormSource(NoiseSource):
    def __init__(self, width: int, key: bytes, label: str) -> None:
        self._width, self._stream = width, NoiseStream(key, f"noise/{label}")

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        blocks = math.ceil(len(total) / self._width)
        scale, step = k_norm_for(multiplier, bound, blocks)
        # The numbers of a last block that the sum does not have are drawn and left out, which is post-processing.
        noise = k_norm_noise(blocks, self._width, scale, self._stream, release).reshape(-1)[: len(total)]
        add_discretized_gaussian(total, noise, 1.0, step)


@dataclass(frozen=True)
class LaplacePartitionSelection(PartitionSelection, kind="laplace-labels"):
    """The labels of a table: a Laplace count per label, and only those above a threshold leave.

    The argument is that of Gaussian counts (:class:`~quietgrad.core.noise.mechanisms.PartitionSelection`) with a
    pure release in the place of the Gaussian one (Korolova et al. 2009).
    """

    noise: ClassVar[str] = "Laplace"

    def bound_of(self, query: Any) -> float:
        return k_norm_bound(query, 1)

    def release(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Pure(sensitivity_factor(relation) / multiplier, relation)

    def counts_noise(self, multiplier: float, bound: float) -> tuple[float, float]:
        """Scale and the grid's step of the counts: neighbours differ in two counts at most."""
        return k_norm_for(multiplier, bound, 2)

    def noise_above(self, chance: float) -> float:
        return -math.log(2.0 * chance) if chance < 0.5 else math.log(2.0 * (1.0 - chance))

    def share_above(self, level: float) -> float:
        return 0.5 * math.exp(-level) if level > 0.0 else 1.0 - 0.5 * math.exp(level)

    def unit_noise(self, stream: NoiseStream, release: int, count: int) -> npt.NDArray[np.float64]:
        return k_norm_noise(count, 1, 1.0, stream, release).reshape(-1)
