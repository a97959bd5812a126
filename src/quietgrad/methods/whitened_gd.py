"""Full-batch descent on privately scaled and whitened features: the default for linear models.

A part of the budget buys estimates of the features: ranges, a mean, second moments. The rest buys a few
full-batch gradient steps in whitened coordinates, where one public step size suits all directions. Every release
is an un-sampled Gaussian, so the composition is exact; every threshold, window, damping and horizon follows from
public numbers and earlier releases. Which releases a table can repay is decided before it is seen:
:func:`~quietgrad.methods.budget_allocation.for_table`. Standard errors come from
:func:`~quietgrad.methods.newton_step.newton_step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from scipy.sparse.linalg import LinearOperator, cg

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.session.contributions import following_clip
from quietgrad.core.session.queries import Asked, Query
from quietgrad.core.settings import Count, Positive, Within
from quietgrad.core.vectors import OwnVector
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.newton_step import newton_step
from quietgrad.methods.range_estimation import (
    Bounds,
    RangeEstimation,
    box_of,
    estimate_box,
    noise_of,
    relation_of,
)
from quietgrad.tables.histogram_decoding import read_norms
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import Logistic, Squared
from quietgrad.tables.range_queries import BoxedQuery
from quietgrad.tables.table import Affine, Floats
from quietgrad.tables.whitening import (
    CentredMoments,
    CentredNormHistogram,
    FeatureMean,
    MeanSquares,
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    Whitening,
)

__all__ = ["Bounds", "RangeEstimation", "WhitenedGD"]


CROWDED = 0.012
"""p^1.5/(nμ) beyond which no Newton step is bought: its curvature would be refused."""
NO_ERRORS = "standard errors are offered for least squares and for logistic regression of two declared classes"


class _DirectionSpread(NamedTuple):
    """Variances of whitened coefficients along ``axes`` (``None``: each by itself), and the features' own there.

    ``constant`` is the variance of the intercept by noise.
    """

    axes: Floats | None
    shares: Floats
    noise: Floats
    sampling: Floats
    constant: float


_BELIEVED = 2.0  # mean squares of the noise: a regression whose scores have less is its constant
_CONSTANT_STEPS = 16
_CAREFUL = 0.5  # of the usual step: a number of records that came out far too small must not make it leap
_SHORTEST, _LONGEST = 6.0, 64.0  # horizons, in steps of the public size
_AMPLE = 4.0  # times the longest distance: signal with which a wider clip costs no accuracy
_WIDE = 2.5  # times the clip: most gradients are shorter; wider still only where signal abounds
_ABOUNDS = 8.0
_LEAPS = 1.6  # times 1 + β: descent diverges at 2
_DOUBTS = 2.0  # standard errors by which a curvature must be too large for the step
_WIDEST_COUNTS = 16.0  # in means of the counts: a clip for the rarest would drown the rest
_LEAST_FREEDOM = 1.0  # degrees of freedom beside the intercept, however little can be learned
_MOST_ROWS = 0.9  # share of centred rows that keep their length
_TYPICAL = 0.4  # length of a row in a box of half-width 1, per √feature, where it could not be found


def _tempered(velocity: Floats, far: float, at: Floats, session: Session, whitening: Whitening) -> Floats:
    """(I + far·H)⁻¹v: the velocity v, shortened where the regulariser is steep; H is its Hessian at ``at``.

    Whitening stretches features that vary little, and the penalty on them with it. Plain steps of the length that
    suits the data would leap over its minimum, further each time. With ``far`` the longest way that momentum goes,
    no direction is leapt over, whatever the strength. H is public, and applied without being written out.
    """
    bend = np.maximum(session.regularizer.curvature(whitening.to_raw(at)), 0.0)
    if not bend.any():
        return velocity
    size = len(velocity)
    system = LinearOperator(
        (size, size),
        matvec=lambda v: v + far * whitening.pull_back(bend * whitening.to_raw(v)),
        dtype=np.float64,
    )
    return np.asarray(cg(system, velocity, rtol=1e-8, maxiter=100)[0])


Share = Annotated[float, Within(0.0, 0.6)]


@dataclass(frozen=True)
class WhitenedGD(Algorithm):
    """DP-GD in coordinates whitened by private first and second moments.

    Args:
        steps: T.
        learning_rate: η in units of 1/(curvature of the loss in its score); default 1.25.
        clip: C in units of the whitened rows' root mean square length.
        row_bound: R for the moments; ``None`` finds the 99 % quantile of row norms privately.
        mean_share: part of the squared budget μ² spent on the mean; 0 leaves the release out.
        moment_share: part of μ² spent on the second moments; 0 leaves the release out.
        norm_share: part of μ² spent on the row norms, without ``row_bound``; 0 leaves the release out.
        centred_share: part of μ² spent on the lengths of rows centred by the released mean. The second moments are
            then those of centred rows, shortened to the length that nine of ten do not exceed; 0: of rows as they
            are.
        damping: τ, in units of the spectral norm that the noise of the second moments is expected to have.
        moments: ``"full"`` matrix, or its ``"diagonal"`` where noise would dominate the matrix.
        look: how the ranges of features and targets are found; ``None`` takes the rows as they are.
        freedom: κ, the degrees of freedom that are kept per unit of signal-to-noise of all gradients together.
        horizon: the distance to go, per unit of signal-to-noise and degree of freedom; a distance longer than T
            steps is gone with momentum, a shorter one with shorter steps. ``None``: T plain steps.
        longest: the longest distance to go, in steps; ``None``: 64, and more for more than eight classes.
        inference_share: part of μ² spent on a Newton step at the end, which gives standard errors.
        constant_share: part of μ² spent on the best constant, from which the descent sets out. Of the model that it
            comes to, only what exceeds noise is added: the less that is, the closer the result to the constant.
        bands: whether the result tells the coefficients' covariance by noise and sampling; costs nothing.

    >>> [(slot.name, slot.count) for slot in WhitenedGD(steps=10, row_bound=1.0).schedule(1000).slots]
    [('mean', 1), ('second-moments', 1), ('gradient', 10)]
    """

    steps: Count = 32
    learning_rate: Positive = 1.25
    clip: Positive = 0.4
    row_bound: Positive | None = None
    mean_share: Share = 0.04
    moment_share: Share = 0.16
    norm_share: Share = 0.02
    damping: Positive = 0.6
    moments: Literal["full", "diagonal"] = "full"
    look: RangeEstimation | None = None
    freedom: Positive | None = None
    horizon: Positive | None = None
    inference_share: Share = 0.0
    bands: bool = False
    constant_share: Share = 0.0
    centred_share: Share = 0.0
    longest: Positive | None = None

    name: ClassVar[str] = "whitened-gd"

    def __post_init__(self) -> None:
        super().__post_init__()
        look: Any = self.look
        if isinstance(look, dict):  # as a saved configuration holds it
            object.__setattr__(self, "look", RangeEstimation(**look))
        if sum(self._shares().values()) >= 1.0:
            raise ValueError("the shares add up to the whole budget; leave some for the gradients.")
        if self.centred_share and not (self.mean_share and self.moment_share and self.moments == "full"):
            raise ValueError("centred_share: needs the mean and a full matrix of second moments; release both.")

    @property
    def needs_means(self) -> bool:
        """The Newton step's curvature is bounded for a mean of records."""
        return self.inference_share > 0.0

    def _shares(self) -> dict[str, float]:
        shares = {} if self.look is None else self.look.shares()
        if self.row_bound is None:
            shares["norms"] = self.norm_share
        shares |= {
            "constant": self.constant_share, "mean": self.mean_share, "centred-norms": self.centred_share,
            "second-moments": self.moment_share,
        }  # fmt: skip
        # Of the Newton step: a regression also pays for its dispersion.
        regression = self.look is not None and self.look.regression
        parts = {"score": 0.45 if regression else 0.5, "information": 0.5, "dispersion": 0.05 * regression}
        shares.update({name: part * self.inference_share for name, part in parts.items()})
        return {name: share for name, share in shares.items() if share}

    def schedule(self, n_public: int) -> Schedule:
        shares = self._shares()
        rest = 1.0 - sum(shares.values())
        everyone = FullBatch()
        # A share s of μ² for k releases means noise ∝ √(k/s) each.
        counts = {"constant": _CONSTANT_STEPS}
        slots = [
            Slot(name, everyone, counts.get(name, 1), noise=math.sqrt(counts.get(name, 1) / share))
            for name, share in shares.items()
        ]
        gradients = Slot("gradient", everyone, self.steps, noise=math.sqrt(self.steps / rest))
        return Schedule((*slots, gradients))

    def asks(self, x0: OwnVector, session: Session) -> Iterator[tuple[str, Asked]]:
        """Yield the queries of a run without range estimates and standard errors, which need one curator.

        Yield nothing for a run that also releases a best constant or the lengths of centred rows.
        """
        if self.look is not None or self.inference_share or self.constant_share or self.centred_share:
            return
        relation = relation_of(session)
        outputs, column = session.objective.outputs, session.objective.column
        features = len(x0) // outputs - bool(session.objective.intercept)
        norms, found = RowNormHistogram(), self.row_bound
        yield "norms", Asked(norms)
        edges = {} if found is not None or not self.norm_share else {"clip": (norms.edges[0], norms.edges[-1])}
        bound = _TYPICAL * math.sqrt(features) if found is None else found
        yield "mean", Asked(FeatureMean(bound), edges)
        if self.moments == "full":
            yield "second-moments", Asked(SecondMomentMatrix(bound, relation), edges)
        else:
            squared = {field: (low * low, high * high) for field, (low, high) in edges.items()}
            yield "second-moments", Asked(MeanSquares(bound * bound, relation=relation), squared)
        shape = (features,) if self.moments == "diagonal" else (features, features)
        radius = math.sqrt(features + column**2) * (1.0 + 1e-9)
        longest = max(self.clip, 1.0) * radius * (1.0 if self.horizon is None else 1e3)
        whitening = Whitening(Affine(np.zeros(features), np.zeros(shape)), column, outputs, radius)
        varies = {"clip": (0.0, longest), "whitening.radius": (0.0, radius)}
        yield "gradient", Asked(WhitenedGradient(x0, longest, whitening), varies)

    def step(self, state: State, session: Session) -> State:
        if state.step == 0:
            self._measure(state, session)
        extra = state.extra
        whitening = self._whitening(state, session)
        curvature = _pace_of(session.objective)
        query = WhitenedGradient(extra["inner"], extra["clip"], whitening)
        gradient = session.release("gradient", self._seen(query, state))
        gradient *= 1.0 / session.expected_batch("gradient")
        gradient += whitening.pull_back(session.regularizer.gradient(whitening.to_raw(extra["inner"])))
        self._calm(state, session, gradient)
        extra["velocity"] = extra["momentum"] * extra["velocity"] + gradient
        extra["rates"] = [*extra.get("rates", ()), extra["rate"]]
        rate = self.learning_rate * extra["rate"] / curvature
        far = rate / (1.0 - extra["momentum"])
        extra["inner"] = extra["inner"] - rate * _tempered(
            extra["velocity"], far, extra["inner"], session, whitening
        )
        state.estimate.value = gradient
        state.step += 1
        if 2 * state.step > self.steps:  # average the second half
            state.averaged += 1
            extra["mean_inner"] = extra["mean_inner"] + (extra["inner"] - extra["mean_inner"]) / state.averaged
        state.done = state.step >= self.steps
        if state.done:
            self._finish(state, session, whitening)
        return state

    def _calm(self, state: State, session: Session, gradient: Floats) -> None:
        """Shorten the steps where they leap over the minimum, further each time.

        Steps are sized for features that whitening makes uncorrelated. A diagonal does not: the steepest direction
        of d correlated features has up to d times the curvature of one. Heavy-ball descent diverges where step
        times curvature exceeds 2(1 + β). The last move Δ and the change of the gradient along it show the curvature
        Δ·(g − g′)/‖Δ‖², which is no larger than the steepest one. Steps become shorter where it is too large by
        more than noise: that of g, that of g′, and what both Δ and g′ have of the latter. Only releases are read,
        so this costs no privacy.
        """
        extra, pace = state.extra, _pace_of(session.objective) / self.learning_rate
        noise = noise_of(session, "gradient", extra["clip"]) / session.expected_batch("gradient")
        if "last_gradient" in extra:
            moved, size = extra["inner"] - extra["last_inner"], len(gradient)
            square = max(float(moved @ moved), 1e-300)
            shared = size * noise * noise * extra["rate"] / pace
            curvature = (float(moved @ (gradient - extra["last_gradient"])) - shared) / square
            doubt = noise * math.sqrt(2.0 / square) + shared * math.sqrt(2.0 / size) / square
            limit = (1.0 + extra["momentum"]) * pace
            if (least := curvature - _DOUBTS * doubt) * extra["rate"] > _LEAPS * limit:
                extra["rate"] = limit / least
                extra["velocity"] = np.zeros_like(gradient)
        extra["last_inner"], extra["last_gradient"] = extra["inner"].copy(), gradient.copy()

    def _finish(self, state: State, session: Session, whitening: Whitening) -> None:
        """Take the Newton step if it was bought. Keep raw parameters and the details of the result."""
        frame, extra = box_of(state.extra), state.extra
        if self.inference_share:
            inner, covariance, raised = newton_step(
                session, lambda query: self._seen(query, state), extra["mean_inner"], whitening
            )
            extra["raised_eigenvalues"], extra["mean_inner"] = raised, inner
            # Raw parameters are an affine map of whitened ones; its matrix, column by column.
            size = len(inner)
            origin = self._to_raw(whitening.to_raw(np.zeros(size)), state, session)
            columns = [self._to_raw(whitening.to_raw(unit), state, session) - origin for unit in np.eye(size)]
            matrix = np.column_stack(columns)
            extra["coefficient_covariance"] = (matrix @ covariance @ matrix.T).tolist()
        elif self.constant_share:
            self._shrink(state, session, whitening)
        state.params = self._to_raw(whitening.to_raw(extra["mean_inner"]), state, session)
        if frame is not None:
            extra["feature_range"] = [frame.low.tolist(), frame.high.tolist()]
            extra["target_range"] = None if frame.target is None else list(frame.target)
        if "mean_noise" in extra:
            centre, half = (0.0, 1.0) if frame is None else (frame.centre, frame.half)
            extra["feature_means"] = (centre + half * extra["mean"]).tolist()
            extra["feature_mean_errors"] = (half * extra["mean_noise"] * np.ones(len(extra["mean"]))).tolist()
        if self.bands:
            extra["noise_covariance"] = self._uncertainty(state, session, whitening).tolist()

    def _uncertainty(self, state: State, session: Session, whitening: Whitening) -> Any:
        """Covariance of the features' coefficients by privacy noise and sampling, if the loss were a parabola."""
        spread, scale = self._spread(state, session, whitening), whitening.transform.scale
        matrix = np.diag(scale) if spread.axes is None else scale @ spread.axes
        return (matrix * (spread.noise + spread.sampling)) @ matrix.T

    def _spread(self, state: State, session: Session, whitening: Whitening) -> _DirectionSpread:
        """How far noise and sampling move the averaged iterate, if the loss were a parabola.

        In whitened coordinates the risk's curvature is h·SΣS, h a little less than the loss's largest and SΣS known
        from the releases. Along each of its eigenvectors the averaged iterate is linear in the T noises and in the
        gradient's own sampling error, with weights that a run without data shows.
        """
        extra, scale = state.extra, whitening.transform.scale
        smooth = _pace_of(session.objective)
        shift, axes = whitening.transform.shift, None
        if scale.ndim == 1:
            shares = np.maximum(extra["second"] - shift * shift, 0.0) * scale**2
        else:
            shares, axes = np.linalg.eigh(scale @ (extra["second"] - np.outer(shift, shift)) @ scale)
        shares = np.clip(shares, 0.0, 1.0)
        curvature = 0.6 * smooth * np.append(shares, 1.0)  # of the constant last
        n, rates = session.expected_batch("gradient"), np.asarray(extra["rates"])
        etas = self.learning_rate / smooth * np.pad(rates, (self.steps - len(rates), 0), mode="edge")
        noisy, reached = np.zeros_like(curvature), np.zeros_like(curvature)
        for hit in range(self.steps):
            place, speed, mean = np.zeros_like(curvature), np.zeros_like(curvature), np.zeros_like(curvature)
            for t in range(hit, self.steps):
                speed = extra["momentum"] * speed + curvature * place + (t == hit)
                place = place - etas[t] * speed
                if 2 * (t + 1) > self.steps:
                    mean += place / (self.steps - self.steps // 2)
            noisy += mean * mean
            reached += mean
        noise = noisy * (noise_of(session, "gradient", extra["clip"]) / n) ** 2
        return _DirectionSpread(axes, shares, noise[:-1], (reached**2 * curvature / n)[:-1], float(noise[-1]))

    def _shrink(self, state: State, session: Session, whitening: Whitening) -> None:
        """Go back towards the constant model as far as the rest of the model is noise (James and Stein 1961).

        Noise adds its own, known, mean square to that of the scores. Where their mean square is no larger than
        noise alone makes it, the scores tell nothing and the model is the constant that was found first.
        """
        extra = state.extra
        moved = (extra["mean_inner"] - extra["constant_inner"]).reshape(-1, whitening.outputs)
        spread = self._spread(state, session, whitening)
        features = moved[:-1]
        along = features if spread.axes is None else spread.axes.T @ features
        size = float(spread.shares @ (along * along).sum(axis=1)) + float((moved[-1] ** 2).sum())
        noise = _BELIEVED * whitening.outputs * (float(spread.shares @ spread.noise) + spread.constant)
        kept = max(0.0, 1.0 - noise / max(size, 1e-300))
        extra["kept_of_scores"] = kept
        extra["mean_inner"] = extra["constant_inner"] + kept * moved.ravel()

    def _constant(self, state: State, session: Session) -> None:
        """Descend on the constant alone, from which the model sets out and to which it may have to return."""
        outputs, column = session.objective.outputs, session.objective.column
        features = len(state.params) // outputs - 1
        alone = Whitening(Affine(np.zeros(features), np.zeros(features)), column, outputs, column)
        clip = following_clip(self.clip * column)
        rate = _CAREFUL * self.learning_rate / (_pace_of(session.objective) * column**2)
        place, mean = np.zeros_like(state.params), np.zeros_like(state.params)
        for t in range(_CONSTANT_STEPS):
            query = WhitenedGradient(place, clip, alone)
            gradient = session.release("constant", self._seen(query, state)) / session.expected_batch("constant")
            gradient[: features * outputs] = 0.0  # noise alone
            place = place - rate * gradient
            if 2 * t >= _CONSTANT_STEPS:
                mean += place / (_CONSTANT_STEPS / 2.0)
        state.extra["constant"] = mean

    def _measure(self, state: State, session: Session) -> None:
        """Release ranges and moments of the table, and keep what follows from them."""
        if self.inference_share and type(session.objective) not in (Logistic, Squared):
            raise ValueError(f"inference_share: {NO_ERRORS}.")
        if self.constant_share and not session.objective.column:
            raise ValueError("constant_share: must be 0 for a model without an intercept.")
        if self.centred_share and not session.objective.column:
            raise ValueError("centred_share: must be 0 for a model without an intercept.")
        relation, extra = relation_of(session), state.extra
        features = len(state.params) // session.objective.outputs - bool(session.objective.intercept)
        if self.look is not None:
            extra.update(estimate_box(self.look, session, features, relation))
        if self.constant_share:
            self._constant(state, session)
        bound = extra["row_bound"] = self._row_bound(state, session, features, relation)
        n, mean = session.expected_batch("gradient"), np.zeros(features)
        if self.mean_share:
            query = FeatureMean(bound)
            mean = session.release("mean", self._seen(query, state)) / n
            extra["mean_noise"] = noise_of(session, "mean", query.bound) / n
            if self.freedom is not None:  # a mean that is mostly noise is no centre (James and Stein 1961)
                noise = features * (noise_of(session, "mean", query.bound) / n) ** 2
                mean *= max(0.0, 1.0 - noise / max(float(mean @ mean), 1e-300))
        extra["mean"] = mean
        second, floor = self._second_moments(state, session, features, bound, relation)
        extra.update(second=second, floor=floor)
        whitening = self._whitening(state, session)
        # Counts differ from their mean by more than residuals of classes and scaled targets do.
        clip = max(self.clip, min(extra.get("target_spread", 0.0), _WIDEST_COUNTS))
        extra["momentum"], extra["rate"], widened = self._pace(whitening, session, clip / self.clip)
        extra["clip"] = following_clip(clip * widened * whitening.radius)
        extra["inner"] = whitening.from_raw(np.asarray(state.params))
        if self.constant_share:
            extra["inner"] = extra["constant_inner"] = whitening.from_raw(extra["constant"])
        for name in ("mean_inner", "velocity"):
            extra[name] = np.zeros_like(state.params)

    def _second_moments(
        self, state: State, session: Session, features: int, bound: float, relation: Relation
    ) -> tuple[Any, float]:
        """Second moments, a matrix or a diagonal, and the least damping that their noise asks for."""
        n = session.expected_batch("gradient")
        least = 1e-9 * bound * bound  # never below float noise of the data
        if self.moments == "full":
            matrix = SecondMomentMatrix(bound, relation)
            mean = state.extra["mean"]
            if self.centred_share:
                centred = CentredNormHistogram(relation, mean, bound + float(np.linalg.norm(mean)))
                counts = session.release("centred-norms", self._seen(centred, state))
                noise = noise_of(session, "centred-norms", centred.bound)
                radius = read_norms(counts, noise, centred.edges, _MOST_ROWS)
                matrix = CentredMoments(radius, relation, mean)
                least = 1e-9 * radius * radius
            total = session.release("second-moments", self._seen(matrix, state)) / n
            # GOE noise of diagonal deviation s has spectral norm about s·√(2d).
            noise = noise_of(session, "second-moments", matrix.bound) / n * math.sqrt(2.0 * features)
            second = matrix.unpack(total, features)
            if self.centred_share:  # about zero, as the uncentred ones are
                second += np.outer(mean, mean)
            return second, max(self.damping * noise, least)
        widest = 1.0 if self.look is not None else bound  # ‖x∘x‖ ≤ max|xⱼ|·‖x‖
        squares = MeanSquares(bound * min(bound, widest), relation=relation)
        total = session.release("second-moments", self._seen(squares, state)) / n
        noise = noise_of(session, "second-moments", squares.bound) / n
        # The largest of d noises is about √(2 ln d) deviations: what is below tells nothing.
        clear = total > math.sqrt(2.0 * math.log(max(features, 2))) * noise
        state.extra["silent_features"] = int((~clear).sum())
        # Each of the others is taken for their average, which is known better than any of them.
        rest = max(0.0, float(total[~clear].mean())) if not clear.all() else 0.0
        return np.where(clear, total, rest), max(2.0 * noise, least)

    def _pace(self, whitening: Whitening, session: Session, wider: float) -> tuple[float, float, float]:
        """Momentum and step size with which T steps go as far as the noise allows, and how far to widen the clip.

        After a distance H the noise of a score is about .8·H·df/A, the signal about .4·H: what can be learned
        grows with A/df, and so does the distance worth going. Where that is further than a fit needs to go, a
        wider clip is affordable: a narrow one makes a classifier too sure of itself. With ever more signal the
        clip widens and the distance grows without end, so that the fit tends to the one without noise. Of k classes
        the curvature is about 1/k, and the way longer. ``wider`` is how much of the signal a clip costs already.
        """
        if self.horizon is None:
            return 0.0, 1.0, 1.0
        freedom = whitening.radius**2 - whitening.column**2
        wanted = self.horizon * self._signal(session) / (freedom + 1.0) / wider
        longest = self.longest or _LONGEST * max(1.0, session.objective.outputs / 8.0)
        ample = wanted / (_AMPLE * longest)
        reach = min(max(wanted, _SHORTEST), longest * max(1.0, (ample / _ABOUNDS) ** 0.25))
        widened = max(min(ample, _WIDE), ample / _ABOUNDS)
        momentum, rate = (1.0 - self.steps / reach, 1.0) if reach > self.steps else (0.0, reach / self.steps)
        return momentum, rate, max(widened, 1.0)

    def _signal(self, session: Session) -> float:
        """A: records per noise of all gradients together, of a difference of two clips; less for more classes."""
        noise = noise_of(session, "gradient", 1.0) / math.sqrt(self.steps)
        if noise == 0.0:
            return 1e9
        return 2.0 * session.expected_batch("gradient") / noise / math.sqrt(max(session.objective.outputs, 2) / 2.0)

    def _row_bound(self, state: State, session: Session, features: int, relation: Relation) -> float:
        frame = box_of(state.extra)
        if self.row_bound is not None:
            return self.row_bound
        if not self.norm_share:
            return _TYPICAL * math.sqrt(features)
        query = RowNormHistogram() if frame is None else RowNormHistogram(relation)
        counts = session.release("norms", self._seen(query, state))
        noise = noise_of(session, "norms", query.bound)
        if frame is None:
            return query.quantile(counts, 0.99, noise)
        return min(read_norms(counts, noise, query.edges), math.sqrt(features))

    def _whitening(self, state: State, session: Session) -> Whitening:
        if "whitening" not in state.memo:
            freedom = (
                math.inf if self.freedom is None else max(_LEAST_FREEDOM, self.freedom * self._signal(session))
            )
            state.memo["whitening"] = Whitening.from_moments(
                state.extra["mean"],
                state.extra["second"],
                floor=state.extra["floor"],
                column=session.objective.column,
                outputs=session.objective.outputs,
                freedom=freedom,
            )
        return cast(Whitening, state.memo["whitening"])

    def _seen(self, query: Query, state: State) -> Query:
        """The query, asked of the rows as the found or declared frame shows them."""
        if self.look is None:
            return query
        if "frame" not in state.memo:
            state.memo["frame"] = box_of(state.extra)
        return BoxedQuery(query, state.memo["frame"])

    def _to_raw(self, params: Floats, state: State, session: Session) -> Floats:
        """Parameters for raw features and targets; they hold for rows inside the frame."""
        frame = box_of(state.extra)
        if frame is None:
            return params
        matrix = params.reshape(-1, session.objective.outputs).copy()
        column, features = session.objective.column, len(frame.low)
        matrix[:features] /= frame.half[:, None]
        if column:
            matrix[-1] -= frame.centre @ matrix[:features] / column
        if session.objective.log_link:
            matrix[-1:] += math.log(frame.target_scale) / column if column else 0.0
            return matrix.ravel()
        matrix *= frame.target_scale
        if column:
            matrix[-1] += frame.target_centre / column
        return matrix.ravel()


def _pace_of(objective: LinearObjective) -> float:
    """The curvature in the score that steps are sized for."""
    if objective.pace is not None:
        return float(objective.pace)
    return float(replace(objective, intercept=False, row_bound=1.0).constants().record_smoothness or 1.0)
