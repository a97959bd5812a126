"""Layer L3: audit a whole training from a single run, with many canaries that are each in or out by a coin.

Gradient space: every canary owns one extra parameter and contributes exactly the query's bound there. Real data,
kernels and noise are used, and the canaries' scores are independent because the noise is white. Input space: the
auditor mixes rows of its own into the training set, and a canary's score is how little the final model loses on it.
The coins are then guessed, and the guesses judged by Mahloujifar, Melis and Chaudhuri (2024); un-sampled Gaussian
runs also by the two-sample d′.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.algorithms.base import Algorithm
from quietgrad.audit.confidence_bounds import (
    dprime_found,
    dprime_lower,
    one_run_epsilon,
    one_run_mu,
    one_run_refutes,
)
from quietgrad.audit.distinguishers import PrivacyClaim
from quietgrad.audit.replicas import CuratorFactory, RecordingSession, central
from quietgrad.audit.report import AuditFinding, AuditReport, Verdict
from quietgrad.curators.base import Curator
from quietgrad.objectives.base import BaseObjective, Batch, ClippingRule, LossConstants, Records, Regularizer
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.closed_form_accountants import gaussian_epsilon
from quietgrad.privacy.rng import fresh_key, seed_key
from quietgrad.training import plan as make_plan
from quietgrad.vectors import Vector, copy

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RecordsWithCanaries:
    """Records with canaries behind them: canary j sits on coordinate ``places[j]`` and pulls with ``signs[j]``."""

    inner: Records
    places: npt.NDArray[np.int64]
    signs: Floats
    canaries: int

    def __len__(self) -> int:
        return len(self.inner) + len(self.places)

    @property
    def dim(self) -> int:
        """Parameters of the model and one per canary."""
        return int(self.inner.dim) + self.canaries

    def contents(self) -> Iterator[bytes | memoryview]:
        """The records and where the canaries sit."""
        yield from self.inner.contents()
        yield f"{self.canaries} {self.places.tolist()} {self.signs.tolist()}".encode()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The inner records alone: canaries belong to no person."""
        return self.inner.fingerprint_parts()


class PlantedObjective(BaseObjective):
    """An objective with one more parameter per canary; the model's own sums are the inner objective's."""

    def __init__(self, inner: Any, canaries: int, coins: npt.NDArray[np.bool_], relation: Relation) -> None:
        self.inner = inner
        self.canaries = canaries
        replace = relation is Relation.REPLACE_ONE
        self.places = np.arange(canaries) if replace else np.flatnonzero(coins)
        self.signs = np.where(coins, 1.0, -1.0) if replace else np.ones(len(self.places))
        self.regularizer = _Padded(inner.regularizer, canaries)

    def prepare(self, data: Any) -> RecordsWithCanaries:
        return RecordsWithCanaries(self.inner.prepare(data), self.places, self.signs, self.canaries)

    def initial(self, records: RecordsWithCanaries) -> Vector:
        return _pad(self.inner.initial(records.inner), self.canaries)

    def constants(self) -> LossConstants:
        constants: LossConstants = self.inner.constants()
        return constants

    def add(self, batch: Batch, points: Sequence[Vector], rule: ClippingRule, out: Vector) -> None:
        d = int(batch.records.inner.dim)
        own = self._split(batch, rule.bound, out[d:])
        self.inner.add(own, [point[:d] for point in points], rule, out[:d])

    def loss_sum(self, batch: Batch, params: Vector, bound: float) -> float:
        return float(self.inner.loss_sum(self._ordinary(batch), params[: -self.canaries], bound))

    def risk(self, records: RecordsWithCanaries, params: Vector) -> float:
        return float(self.inner.risk(records.inner, params[: -self.canaries]))

    def risk_gradient(self, records: RecordsWithCanaries, params: Vector) -> Vector:
        return _pad(self.inner.risk_gradient(records.inner, params[: -self.canaries]), self.canaries)

    def _split(self, batch: Batch, pull: float, out: Vector) -> Batch:
        """Add the canaries' pulls; return the batch of ordinary records."""
        records, n = batch.records, len(batch.records.inner)
        present = np.arange(len(records.places)) if batch.indices is None else batch.indices[batch.indices >= n] - n
        pulls = np.zeros(self.canaries)
        pulls[records.places[present]] = pull * records.signs[present]
        out += pulls if isinstance(out, np.ndarray) else out.new_tensor(pulls)
        return self._ordinary(batch)

    def _ordinary(self, batch: Batch) -> Batch:
        inner, indices = batch.records.inner, batch.indices
        return Batch(inner, indices if indices is None else indices[indices < len(inner)], batch.key)


@dataclass(frozen=True)
class _Padded:
    """The model's regulariser; canaries' coordinates have none."""

    inner: Regularizer
    canaries: int

    @property
    def strong_convexity(self) -> float:
        return 0.0  # in the canaries' coordinates

    @property
    def smoothness(self) -> float:
        return self.inner.smoothness

    @property
    def hessian_lipschitz(self) -> float:
        return self.inner.hessian_lipschitz

    @property
    def weak_convexity(self) -> float:
        return self.inner.weak_convexity

    def value(self, params: Vector) -> float:
        return float(self.inner.value(params[: -self.canaries]))

    def gradient(self, params: Vector) -> Vector:
        return _pad(self.inner.gradient(params[: -self.canaries]), self.canaries)

    def curvature(self, params: Vector) -> Vector:
        return _pad(self.inner.curvature(params[: -self.canaries]), self.canaries)


def _pad(vector: Vector, count: int) -> Vector:
    if isinstance(vector, np.ndarray):
        return np.concatenate([vector, np.zeros(count, vector.dtype)])
    longer = vector.new_zeros(len(vector) + count)
    longer[: len(vector)] = vector
    return longer


def one_run(
    objective: Any,
    data: Any,
    algorithm: Algorithm,
    *,
    budget: Budget,
    canaries: int | Any = 1000,
    guesses: int | None = None,
    confidence: float = 0.999,
    curator: CuratorFactory = central,
    seed: int | None = None,
) -> AuditReport:
    """Audit a training of ``objective`` on ``data`` from one run.

    Args:
        objective, data, algorithm, budget: as for :func:`quietgrad.minimize`.
        canaries: how many to plant in gradient space; or records ``(X, y)`` to mix in (input space, add-remove).
        guesses: how many coins to guess, half of them "in"; default a tenth of the canaries.
        confidence: probability that a correct training is not accused.
        curator: who holds the data; a function of (objective, data, key).
        seed: fixed coins and noise, for tests.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
    >>> from quietgrad.objectives import Logistic
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> report = one_run(Logistic(), (X, X[:, 0] > 0), DPGD(steps=5), budget=Budget(8.0, 1e-5), seed=0)
    >>> report.passed, report.epsilon_lower > 4
    (True, True)
    """
    started = time.perf_counter()
    planted = isinstance(canaries, int)
    count = canaries if isinstance(canaries, int) else len(canaries[1])
    guesses = max(2, count // 10) if guesses is None else guesses
    if count < 20 or not 2 <= guesses <= count or not 0.5 <= confidence < 1.0:
        raise ValueError(
            f"canaries={count}, guesses={guesses}, confidence={confidence}: must be ≥ 20 canaries, 2 to as many "
            "guesses, and a confidence in [0.5, 1)."
        )
    if not planted and budget.relation is not Relation.ADD_REMOVE:
        raise ValueError("canaries as records are in or out, which is add-remove: pass a number under replace-one.")
    rng = np.random.default_rng(seed)
    coins = rng.random(count) < 0.5
    key = fresh_key() if seed is None else seed_key(seed)
    train = _planted if planted else _mixed
    scores, plan = train(objective, data, algorithm, budget, canaries, coins, curator, key)
    claim = PrivacyClaim(plan)
    findings = judge_guesses(scores, coins, claim, guesses, 1.0 - confidence, gaussian=planted)
    space = "gradient space" if planted else "input space"
    notes = (f"{count} canaries in {space}, {int(coins.sum())} of them in, {guesses} guessed",)
    name = f"{algorithm.name}, one run"
    return AuditReport.of(name, plan, findings, runs=1, started=started, confidence=confidence, notes=notes)


def _planted(
    objective: Any,
    data: Any,
    algorithm: Algorithm,
    budget: Budget,
    canaries: int,
    coins: npt.NDArray[np.bool_],
    curator: CuratorFactory,
    key: bytes,
) -> tuple[Floats, Plan]:
    """Scores Σ_t of what was released on each canary's coordinate, in units of the bound."""
    holder = curator(PlantedObjective(objective, canaries, coins, budget.relation), data, key)
    session, plan, _ = _train(holder, algorithm, len(objective.prepare(data)) + canaries, budget)
    heard = [part[0, -canaries:] for part in session.heard if part.shape[1] > canaries]
    weights = [plan.schedule[slot].noise ** -2.0 for slot in session.slots]
    return np.einsum("tm,t->m", np.stack(heard), np.array(weights[: len(heard)])), plan


def _mixed(
    objective: Any,
    data: Any,
    algorithm: Algorithm,
    budget: Budget,
    canaries: Any,
    coins: npt.NDArray[np.bool_],
    curator: CuratorFactory,
    key: bytes,
) -> tuple[Floats, Plan]:
    """Scores: minus the final model's loss on each canary record, relative to the starting point's."""
    together = tuple(_stack(part, extra[coins]) for part, extra in zip(data, canaries, strict=True))
    holder = curator(objective, together, key)
    start = copy(holder.initial())
    _, plan, final = _train(holder, algorithm, len(data[1]) + len(coins), budget)
    records = objective.prepare(canaries)

    def losses(params: Vector) -> Floats:
        at = range(len(coins))
        return np.array([objective.loss_sum(Batch(records, np.array([i])), params, 1e300) for i in at])

    return losses(start) - losses(final), plan


def _train(holder: Curator, algorithm: Algorithm, n: int, budget: Budget) -> tuple[RecordingSession, Plan, Vector]:
    plan = make_plan(algorithm, n=n, budget=budget)
    session = RecordingSession(holder.open(plan))
    state = algorithm.init(holder.initial())
    while not state.done:
        state = algorithm.step(state, session)
    return session, plan, algorithm.output(state)


def _stack(part: Any, extra: Any) -> Any:
    if isinstance(part, np.ndarray):
        return np.concatenate([part, extra])
    if hasattr(part, "tocsr"):
        import scipy.sparse as sparse

        return sparse.vstack([part, extra]).tocsr()
    import torch

    return torch.cat([part, extra])


def judge_guesses(
    scores: Floats, coins: npt.NDArray[np.bool_], claim: PrivacyClaim, guesses: int, alpha: float, *, gaussian: bool
) -> list[AuditFinding]:
    """Guesses against the claimed profile, or μ if there is one; and d′ where scores are Gaussian. α is shared."""
    order, half = np.argsort(scores), guesses // 2
    correct = int(coins[order[-half:]].sum() + (~coins[order[:half]]).sum())
    guesses, count, share, delta = 2 * half, len(coins), alpha / 2, claim.delta_budget
    what = f"{correct} of {guesses} guesses right"
    if claim.mu is None:
        curve = _tradeoff(claim)
        refuted = one_run_refutes(curve, count, guesses, correct, share)
        seen = one_run_refutes(curve, count, guesses, guesses, share)
        verdict: Verdict = "violation" if refuted else "pass" if seen else "vacuous"
        shown = one_run_epsilon(count, guesses, correct, delta, share)
        return [AuditFinding("L3 f-DP", what, "profile refuted", 0.0, float(refuted), verdict, shown)]
    mu, most = (one_run_mu(count, guesses, right, share) for right in (correct, guesses))
    found = [_finding("L3 f-DP", what, claim.mu, mu, delta, seen=most > claim.mu)]
    if gaussian:
        _, low = dprime_lower(scores[coins], scores[~coins], share)
        fewer = int(min(coins.sum(), (~coins).sum()))
        seen = dprime_found(claim.mu, 2.0 * claim.mu, fewer, share)
        found.append(_finding("L3 d′", "canaries in and out", claim.mu, low, delta, seen=seen))
    return found


def _finding(layer: str, what: str, claimed: float, mu: float, delta: float, *, seen: bool) -> AuditFinding:
    verdict: Verdict = "violation" if mu > claimed else "pass" if seen else "vacuous"
    return AuditFinding(layer, what, "μ", claimed, mu, verdict, gaussian_epsilon(mu, delta) if mu else 0.0)


def _tradeoff(claim: PrivacyClaim) -> Any:
    """By the claimed profile: the least probability of an event in one world, given that in the other."""
    points = [(np.exp(e), d) for e, d in claim.profile.items()]

    def shrink(r: Floats) -> Floats:
        bounds = [np.maximum((r - d) / grow, 1.0 - grow * (1.0 - r) - d) for grow, d in points]
        least: Floats = np.maximum(0.0, np.max(bounds, axis=0))
        return least

    return shrink
