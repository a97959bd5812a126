"""A whole noiseless fit as one query: output perturbation, and its one-shot form across parties.

Full-batch gradient descent on a convex risk is stable: replacing one of n records moves the last iterate by at
most Δ. The regulariser cancels between neighbours, so G is the *unregularised* loss's Lipschitz constant, valid on
all of ℝᵈ: no ball, no assumption on the minimiser. With w, w′ the two runs' iterates,

    w⁺ − w′⁺ = [w − w′ − η(∇F(w) − ∇F(w′))] + (η/n)(∇f_i′(w′) − ∇f_i(w′)),

whose bracket has norm at most (1−ημ)‖w−w′‖ for η ≤ 2/(μ+β), or ‖w−w′‖ for μ = 0 and η ≤ 2/β, and whose last
term has norm at most 2ηG/n. Summed over T steps: Δ = (2G/(nμ))(1−(1−ημ)ᵀ), or 2GηT/n (tight versions of Lemmas 2
and 3 of the output-perturbation paper). Clipping per-record gradients would break the first bound, so nothing
here clips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.session.contributions import LARGEST_CLIP, check_clip
from quietgrad.core.session.objectives import Batch, LossConstants, Objective, Records
from quietgrad.core.vectors import OwnVector, copy


@dataclass(frozen=True, slots=True, eq=False)
class LocalFit:
    """T full-gradient steps from a public start; adds (records/n)·θ_T. Build it with :func:`local_fit`.

    Each party of a federation adds its share, weighted by its number of records over the public total ``n``; a
    single curator holds all n. Either way one replaced record moves the sum by at most ``sensitivity``.
    """

    steps: int
    step_size: float
    sensitivity: float
    n: int
    row_bound: float
    start: OwnVector | None = None

    def __post_init__(self) -> None:
        check_clip("sensitivity", self.sensitivity)
        check_clip("row_bound", self.row_bound)
        if self.start is None or not len(self.start):
            return
        # A score is at most R·‖θ‖ ≤ R·√d·max|θ|. One that overflowed would make the whole fit no number because of
        # one record, so such a start is refused before a record is looked at.
        peak = max(abs(float(self.start.max())), abs(float(self.start.min())))
        if not self.row_bound * math.sqrt(len(self.start)) * peak <= LARGEST_CLIP:
            raise ValueError(f"start: has entries up to {peak:.3g}; the scores of records could overflow.")

    @property
    def bound(self) -> float:
        """Δ/2, so that the replace-one sensitivity 2·bound is Δ. No other relation is covered."""
        return self.sensitivity / 2.0

    def dim(self, records: Records) -> int:
        return records.dim

    def sum_into(self, objective: Objective, batch: Batch, out: OwnVector) -> None:
        """out += (records/n)·θ_T."""
        records = batch.records
        if batch.indices is not None:
            raise ValueError("a local fit uses all records: plan it with FullBatch() sampling.")
        if records.row_bound is None or records.row_bound > self.row_bound:
            raise DataError(
                f"records: rows are not bounded by {self.row_bound:g}. "
                f"Give the objective {{row_bound}} before preparing the data.",
                row_bound=self.row_bound,
            )
        params = objective.initial(records) if self.start is None else copy(self.start)
        for _ in range(self.steps):
            params -= self.step_size * objective.risk_gradient(records, params)
        out += (len(records) / self.n) * params


def local_fit(
    objective: Any,
    n: int,
    steps: int,
    step_size: float,
    row_bound: float | None = None,
    start: OwnVector | None = None,
) -> LocalFit:
    """The query for T steps of size η on n records, with its replace-one sensitivity.

    Args:
        objective: a convex, smooth objective with Lipschitz losses, such as ``Logistic`` or ``Huber``.
        n: the public number of records, of all parties together.
        steps: T.
        step_size: η ≤ 2/(μ+β) if strongly convex, else η ≤ 2/β, where β includes the regulariser.
        row_bound: R; the objective's own if not given. The table must enforce it.
        start: a public starting point; the origin if not given.

    Raises:
        ValueError: the objective has no such bound, or the step is too large for it.

    >>> from quietgrad.tables.losses import Logistic
    >>> from quietgrad.tables.regularizers import L2
    >>> fit = local_fit(Logistic(regularizer=L2(0.1), row_bound=1.0), n=1000, steps=10**6, step_size=1.0)
    >>> round(fit.sensitivity, 9), fit.bound == fit.sensitivity / 2
    (0.02, True)
    """
    if n < 1 or steps < 1:
        raise SettingError("{n}, {steps}: both must be >= 1.", n=n, steps=steps)
    if not (math.isfinite(step_size) and step_size > 0.0):
        raise ValueError(f"step_size={step_size!r}: must be a finite number > 0.")
    row_bound = objective.row_bound if row_bound is None else row_bound
    constants: LossConstants = objective.constants(row_bound)
    return LocalFit(steps, step_size, stability(constants, n, steps, step_size), n, row_bound, start)


def stability(constants: LossConstants, n: int, steps: int, step_size: float) -> float:
    """Δ: how far one replaced record of n moves the model after so many steps; ValueError if nothing is proved."""
    if not constants.convex:
        raise ValueError("regularizer: not convex, so a fit has no stability bound. Use L2 or a noisy method.")
    if constants.lipschitz is None:
        raise ValueError("objective: its gradients are unbounded. Use Huber, or a method that clips.")
    if constants.smoothness is None:
        raise ValueError("objective: not smooth, so a gradient step may expand. Use a smoothed loss.")
    mu, beta = constants.strong_convexity, constants.smoothness
    largest = 2.0 / (mu + beta)
    if step_size > largest:
        raise ValueError(
            f"step_size={step_size:g}: must be <= {largest:g} = 2/(μ+β), μ={mu:g}, β={beta:g}. "
            "Larger steps are not stable."
        )
    if mu == 0.0:
        return 2.0 * constants.lipschitz * step_size * steps / n
    contraction = step_size * mu
    forgotten = 1.0 if contraction >= 1.0 else -math.expm1(steps * math.log1p(-contraction))
    return 2.0 * constants.lipschitz / (n * mu) * forgotten
