"""Private selection across parties that trust nobody (paper 003, Algorithm 4), and what its noise costs.

For each candidate every party releases its mean gradient and its mean Hessian under its own noise; the server
averages and takes the first candidate that passes both tests. Noise on a Hessian must cover its Frobenius norm,
2M√d/n under replace-one, and T candidates share the budget: T(μ_g² + μ_H²) = μ². As printed the noise is an
independent triangle; that of the Gaussian orthogonal ensemble has the same privacy and a spectral norm √2 less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from quietgrad.algorithms.base import Algorithm, State, check_range
from quietgrad.curators.base import Session
from quietgrad.objectives.base import Gradient
from quietgrad.objectives.queries.asked import Asked
from quietgrad.objectives.queries.second_order import PackedHessian
from quietgrad.oracles.base import constant_of, noise_multiplier
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.sampling import FullBatch
from quietgrad.vectors import Vector, norm

HessianNoise = Literal["goe", "triangle"]


@dataclass(frozen=True, eq=False)
class HessianSelection(Algorithm):
    """Algorithm 4 through any door: T noisy mean gradients and Hessians, the first pair that passes is taken.

    Through one curator's door the noise is that of one holder of all records;
    ``run_on_parties`` of ``reproduce/local_parties.py`` gives it the doors of parties that each add their own.

    Args:
        candidates: public iterates.
        alpha: the level α that the candidates' algorithm promises.
        rho: ρ (default: the objective's).
        noise: ``"goe"`` or ``"triangle"``, the printed one.
        rank: of one record's Hessian (1 for linear models; default d).
        failure: ω′ of the thresholds.

    >>> HessianSelection([np.zeros(3)] * 4, alpha=0.1).schedule(1000).releases
    8
    """

    candidates: Sequence[Vector]
    alpha: float
    rho: float | None = None
    noise: HessianNoise = "goe"
    rank: int | None = None
    failure: float = 0.05

    name: ClassVar[str] = "hessian-selection"
    needs_means: ClassVar[bool] = True  # a fit or a Hessian of a sum of records has no bound

    def __post_init__(self) -> None:
        if not len(self.candidates):
            raise ValueError("candidates: must hold at least one iterate.")
        check_range("alpha", self.alpha, 0.0, math.inf, closed=False)
        check_range("failure", self.failure, 0.0, 1.0 - 1e-9, closed=False)
        if self.noise not in ("goe", "triangle"):
            raise ValueError(f"noise={self.noise!r}: must be 'goe' or 'triangle' (as printed).")

    def schedule(self, n_public: int) -> Schedule:
        """Gradients and Hessians at one noise multiplier, which splits the budget equally."""
        slots = tuple(Slot(name, FullBatch(), len(self.candidates)) for name in ("gradient", "hessian"))
        return Schedule(slots, adaptive=True)

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return {
            "candidates": len(self.candidates),
            "alpha": self.alpha,
            "rho": self.rho,
            "noise": self.noise,
            "rank": self.rank,
            "failure": self.failure,
        }

    def asks(self, x0: Vector, door: Session) -> Iterator[tuple[str, Asked]]:
        """The candidates are public: each is asked about as it is."""
        clip, smoothness = (constant_of(name, name, None, door) for name in ("lipschitz", "record_smoothness"))
        for x in self.candidates:
            yield "gradient", Asked(Gradient(x, clip), pinned=("params",))
            yield "hessian", Asked(PackedHessian(x, smoothness, self.noise == "goe", self.rank), pinned=("params",))

    def init(self, x0: Vector) -> State:
        """Nothing tested yet; ``x0`` is returned if no candidate passes."""
        return State(params=x0, extra={"chosen": -1, "gradient_norms": [], "lambda_mins": []})

    def step(self, state: State, door: Session) -> State:
        """Test one candidate: lines 2–8."""
        x, extra = self.candidates[state.step], state.extra
        clip, smoothness = (constant_of(name, name, None, door) for name in ("lipschitz", "record_smoothness"))
        query = PackedHessian(x, smoothness, self.noise == "goe", self.rank)
        gradient = door.release("gradient", Gradient(x, clip)) / door.expected_batch("gradient")
        hessian = query.unpack(door.release("hessian", query) / door.expected_batch("hessian"))
        if door.regularizer.smoothness:
            hessian[np.diag_indices(len(x))] += door.regularizer.curvature(x)
        steep, bent = self.thresholds(door)
        extra["gradient_norms"].append(norm(gradient + door.regularizer.gradient(x)))
        extra["lambda_mins"].append(float(np.linalg.eigvalsh(hessian)[0]))
        if extra["gradient_norms"][-1] <= steep and extra["lambda_mins"][-1] >= bent:
            extra["chosen"], state.params = state.step, x
            state.stopped_by, state.done = "sosp", True
        state.step += 1
        state.done = state.done or state.step >= len(self.candidates)
        return state

    def output(self, state: State) -> Vector:
        """The chosen candidate."""
        return state.params

    def thresholds(self, door: Session) -> tuple[float, float]:
        """Line 7, with the noise's share from its true scale instead of unnamed constants.

        ‖∇‖ ≤ α + G·log(8d/ω′)/√N + s_g(√d + t) and λ_min ≥ −(√(ρα) + M√(log(8d/ω′)/N) + s_H(2√d + t)), N all
        records, t = √(2 log(16T/ω′)), s_g the standard deviation of a coordinate of the mean gradient and s_H that
        of the mean Hessian off the diagonal: ‖GOE‖ is about 2√d·s_H.
        """
        clip, smoothness, rho = (
            constant_of(name, name, given, door)
            for name, given in (("lipschitz", None), ("record_smoothness", None), ("hessian_lipschitz", self.rho))
        )
        dim, records = len(self.candidates[0]), door.expected_batch("gradient")
        log_d = math.log(8.0 * dim / self.failure)
        tail = math.sqrt(2.0 * math.log(16.0 * len(self.candidates) / self.failure))
        scale = noise_multiplier(door) / records
        bound = PackedHessian(self.candidates[0], smoothness, rank=self.rank).bound
        spread = scale * bound / (math.sqrt(2.0) if self.noise == "goe" else 1.0)
        steep = self.alpha + clip * log_d / math.sqrt(records) + scale * clip * (math.sqrt(dim) + tail)
        bent = math.sqrt(rho * self.alpha) + smoothness * math.sqrt(log_d / records)
        return steep, -(bent + spread * (2.0 * math.sqrt(dim) + tail))
