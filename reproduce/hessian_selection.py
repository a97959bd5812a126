"""Algorithm 4 of paper 003: selecting a second-order point by noisy gradients and Hessians of every candidate.

It trusts no party. For each candidate every party releases its mean
gradient and its mean Hessian under its own noise; the server averages and takes the first candidate that passes
both tests. Noise on a Hessian must cover its Frobenius norm, 2M√d/n under replace-one, and T candidates share the
budget: T(μ_g² + μ_H²) = μ². As printed the noise is an independent triangle; that of the Gaussian orthogonal
ensemble has the same privacy and a spectral norm √2 less.

A released Hessian needs noise for its Frobenius norm, which is up to √d times M; for losses of linear scores, whose
Hessians have rank one, it is M.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.session.contributions import check_clip
from quietgrad.core.session.objectives import Batch, Objective
from quietgrad.core.session.queries import Asked, GradientQuery
from quietgrad.core.settings import Within
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.oracles.base import constant_of, noise_multiplier
from quietgrad.tables.queries.second_order import hessian_total

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedHessian:
    """The upper triangle of Σ ∇²fᵢ(θ), row by row.

    With ``isometric`` off-diagonal entries are multiplied by √2, so that the packed vector is as long as the matrix
    in Frobenius norm; equal noise on all its entries is then noise of the Gaussian orthogonal ensemble, √2 less off
    the diagonal than the independent triangle of paper 003's Algorithm 4 at the same privacy. ``rank`` bounds the
    rank of one record's Hessian (default d).
    """

    params: Vector
    smoothness: float
    isometric: bool = True
    rank: int | None = None

    def __post_init__(self) -> None:
        check_clip("smoothness", self.smoothness)

    @property
    def bound(self) -> float:
        """M·√rank, the Frobenius norm of one record's Hessian; its triangle is no longer."""
        return self.smoothness * math.sqrt(len(self.params) if self.rank is None else self.rank)

    def dim(self, records: Any) -> int:
        """d(d+1)/2."""
        d = len(self.params)
        return d * (d + 1) // 2

    def sum_into(self, objective: Objective, batch: Batch, out: Vector) -> None:
        """out += the packed sum."""
        total = hessian_total(objective, batch, self.params, self.smoothness)
        rows, columns = np.triu_indices(len(self.params))
        packed = total[rows, columns]
        if self.isometric:
            packed[rows != columns] *= math.sqrt(2.0)
        out += packed

    def unpack(self, packed: Floats) -> Floats:
        """The symmetric matrix a packed vector stands for.

        >>> PackedHessian(np.zeros(2), 1.0).unpack(np.array([1.0, math.sqrt(2.0), 3.0])).round(9).tolist()
        [[1.0, 1.0], [1.0, 3.0]]
        """
        d = len(self.params)
        rows, columns = np.triu_indices(d)
        values = np.array(packed)
        if self.isometric:
            values[rows != columns] /= math.sqrt(2.0)
        matrix = np.zeros((d, d))
        matrix[rows, columns] = values
        matrix[columns, rows] = values
        return matrix


HessianNoise = Literal["goe", "triangle"]


@dataclass(frozen=True, eq=False)
class HessianSelection(Algorithm):
    """Algorithm 4 through any session: T noisy mean gradients and Hessians, the first pair that passes is taken.

    Through one curator's session the noise is that of one holder of all records;
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
        Within(0.0, closed=False).check("alpha", self.alpha)
        Within(0.0, 1.0 - 1e-9, closed=False).check("failure", self.failure)
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

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """The candidates are public: each is asked about as it is."""
        clip, smoothness = (constant_of(name, name, None, session) for name in ("lipschitz", "record_smoothness"))
        for x in self.candidates:
            yield "gradient", Asked(GradientQuery(x, clip), pinned=("params",))
            yield "hessian", Asked(PackedHessian(x, smoothness, self.noise == "goe", self.rank), pinned=("params",))

    def init(self, x0: Vector) -> State:
        """Nothing tested yet; ``x0`` is returned if no candidate passes."""
        return State(params=x0, extra={"chosen": -1, "gradient_norms": [], "lambda_mins": []})

    def step(self, state: State, session: Session) -> State:
        """Test one candidate: lines 2–8."""
        x, extra = self.candidates[state.step], state.extra
        clip, smoothness = (constant_of(name, name, None, session) for name in ("lipschitz", "record_smoothness"))
        query = PackedHessian(x, smoothness, self.noise == "goe", self.rank)
        gradient = session.release("gradient", GradientQuery(x, clip)) / session.expected_batch("gradient")
        hessian = query.unpack(session.release("hessian", query) / session.expected_batch("hessian"))
        if session.regularizer.smoothness:
            hessian[np.diag_indices(len(x))] += session.regularizer.curvature(x)
        steep, bent = self.thresholds(session)
        extra["gradient_norms"].append(norm(gradient + session.regularizer.gradient(x)))
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

    def thresholds(self, session: Session) -> tuple[float, float]:
        """Line 7, with the noise's share from its true scale instead of unnamed constants.

        ‖∇‖ ≤ α + G·log(8d/ω′)/√N + s_g(√d + t) and λ_min ≥ −(√(ρα) + M√(log(8d/ω′)/N) + s_H(2√d + t)), N all
        records, t = √(2 log(16T/ω′)), s_g the standard deviation of a coordinate of the mean gradient and s_H that
        of the mean Hessian off the diagonal: ‖GOE‖ is about 2√d·s_H.
        """
        clip, smoothness, rho = (
            constant_of(name, name, given, session)
            for name, given in (("lipschitz", None), ("record_smoothness", None), ("hessian_lipschitz", self.rho))
        )
        dim, records = len(self.candidates[0]), session.expected_batch("gradient")
        log_d = math.log(8.0 * dim / self.failure)
        tail = math.sqrt(2.0 * math.log(16.0 * len(self.candidates) / self.failure))
        scale = noise_multiplier(session, "gradient") / records
        bound = PackedHessian(self.candidates[0], smoothness, rank=self.rank).bound
        spread = scale * bound / (math.sqrt(2.0) if self.noise == "goe" else 1.0)
        steep = self.alpha + clip * log_d / math.sqrt(records) + scale * clip * (math.sqrt(dim) + tail)
        bent = math.sqrt(rho * self.alpha) + smoothness * math.sqrt(log_d / records)
        return steep, -(bent + spread * (2.0 * math.sqrt(dim) + tail))
