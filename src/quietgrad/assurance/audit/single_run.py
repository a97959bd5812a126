"""Layer L3: audit a whole training from a single run, with many canaries that are each in or out by a coin.

Every canary owns one extra coordinate of every sum and contributes exactly the query's bound there. Real data,
kernels and noise are used, and the canaries' scores are independent because the noise is white. The coins are then
guessed, and the guesses judged by Mahloujifar, Melis and Chaudhuri (2024); un-sampled Gaussian runs also by the
two-sample d′.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.assurance.audit.confidence_bounds import (
    dprime_found,
    dprime_lower,
    one_run_epsilon,
    one_run_mu,
    one_run_refutes,
    tradeoff_of,
)
from quietgrad.assurance.audit.replicas import CuratorFactory, RecordingSession, as_numbers, central
from quietgrad.assurance.audit.report import AuditFinding, AuditReport, judged
from quietgrad.assurance.audit.running import PrivacyClaim
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon
from quietgrad.core.noise.rng import fresh_key, seed_key
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import Batch, RecordAdapter, Records
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector
from quietgrad.methods import plan as make_plan
from quietgrad.methods.base import Algorithm

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


class _Planted:
    """The objective's records with canaries behind them, and room for the canaries in every sum."""

    unit: ClassVar[PrivacyUnit] = PrivacyUnit.RECORD
    silent_batches: ClassVar[bool] = False

    def __init__(
        self, inner: RecordAdapter, canaries: int, coins: npt.NDArray[np.bool_], relation: Relation
    ) -> None:
        self.inner, self.canaries, self.regularizer = inner, canaries, inner.regularizer
        replace = relation is Relation.REPLACE_ONE
        self.places = np.arange(canaries) if replace else np.flatnonzero(coins)
        self.signs = np.where(coins, 1.0, -1.0) if replace else np.ones(len(self.places))

    def prepare(self, data: object) -> RecordsWithCanaries:
        return RecordsWithCanaries(self.inner.prepare(data), self.places, self.signs, self.canaries)

    def initial(self, records: RecordsWithCanaries) -> OwnVector:
        start = self.inner.initial(records.inner)
        if isinstance(start, np.ndarray):
            return np.concatenate([start, np.zeros(self.canaries, start.dtype)])
        return start.new_tensor([*start.tolist(), *[0.0] * self.canaries])


@dataclass(frozen=True)
class PlantedQuery:
    """A query of the model's own records, beside whose sum every canary of the batch adds a whole bound."""

    query: Query

    @property
    def bound(self) -> float:
        """The query's own bound. A record is a model's or a canary, never both."""
        return self.query.bound

    def dim(self, records: RecordsWithCanaries) -> int:
        """Return the query's dimension, with room for canaries in sums of the model's size."""
        query_dim = self.query.dim(records.inner)
        return query_dim + records.canaries if query_dim == records.inner.dim else query_dim

    def sum_into(self, objective: _Planted, batch: Batch, out: OwnVector) -> None:
        """Add the ordinary records' sum, and the canaries' pulls to their coordinates."""
        records, indices = batch.records, batch.indices
        n, query_dim = len(records.inner), self.query.dim(records.inner)
        ordinary = indices if indices is None else indices[indices < n]
        self.query.sum_into(objective.inner, Batch(records.inner, ordinary, batch.key), out[:query_dim])
        if len(out) > query_dim:
            present = np.arange(len(records.places)) if indices is None else indices[indices >= n] - n
            pulls = np.zeros(records.canaries)
            pulls[records.places[present]] = self.bound * records.signs[present]
            out[query_dim:] += pulls if isinstance(out, np.ndarray) else out.new_tensor(pulls)


class PlantingSession(RecordingSession):
    """A session that plants canaries in every query; the algorithm sees the model's own coordinates."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.canaries: int = session.objective.canaries
        self.objective = session.objective.inner

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> OwnVector:
        answer = self._session.release(slot, PlantedQuery(query), rho=rho)
        if len(answer) <= self.canaries:
            return answer
        if query.bound > 0.0:
            self._record(slot, as_numbers(answer[-self.canaries :]) / query.bound)
        return answer[: -self.canaries]

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        return self._session.choose(slot, [PlantedQuery(query) for query in queries], rho=rho, offsets=offsets)

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        return self._session.first_below(slot, [PlantedQuery(query) for query in queries], threshold)


def one_run(
    objective: RecordAdapter,
    data: object,
    algorithm: Algorithm,
    *,
    budget: Budget,
    canaries: int = 1000,
    guesses: int | None = None,
    confidence: float = 0.999,
    curator: CuratorFactory = central,
    seed: int | None = None,
) -> AuditReport:
    """Audit a training of ``objective`` on ``data`` from one run.

    Args:
        objective, data, algorithm, budget: as for :func:`quietgrad.minimize`.
        canaries: how many to plant.
        guesses: how many coins to guess, half of them "in"; default a tenth of the canaries.
        confidence: probability that a correct training is not accused.
        curator: who holds the data; a function of (objective, data, key).
        seed: fixed coins and noise, for tests.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> from quietgrad.objectives import Logistic
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> report = one_run(Logistic(), (X, X[:, 0] > 0), DPGD(steps=5), budget=Budget(8.0, 1e-5), seed=0)
    >>> report.passed, report.epsilon_lower > 4
    (True, True)
    """
    started = time.perf_counter()
    guesses = max(2, canaries // 10) if guesses is None else guesses
    if canaries < 20 or not 2 <= guesses <= canaries or not 0.5 <= confidence < 1.0:
        raise ValueError(
            f"canaries={canaries}, guesses={guesses}, confidence={confidence}: must be ≥ 20 canaries, 2 to as many "
            "guesses, and a confidence in [0.5, 1)."
        )
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    planted = _Planted(objective, canaries, coins, budget.relation)
    holder = curator(planted, data, fresh_key() if seed is None else seed_key(seed))
    plan = make_plan(algorithm, n=len(objective.prepare(data)) + canaries, budget=budget)
    session = PlantingSession(holder.open(plan))
    state = algorithm.init(holder.initial()[:-canaries])
    while not state.done:
        state = algorithm.step(state, session)
    # A canary's score is what was released on its coordinate in all steps, weighted by the noise.
    noise = np.array([plan.schedule[slot].noise for slot in session.slots])
    scores = np.einsum("ij,i->j", np.stack(session.heard), noise**-2.0)
    findings = judge_guesses(scores, coins, PrivacyClaim(plan), guesses, 1.0 - confidence)
    notes = (f"{canaries} canaries, {int(coins.sum())} of them in, {guesses} guessed",)
    name = f"{algorithm.name}, one run"
    return AuditReport.of(name, plan, findings, runs=1, started=started, confidence=confidence, notes=notes)


def judge_guesses(
    scores: Floats, coins: npt.NDArray[np.bool_], claim: PrivacyClaim, guesses: int, alpha: float
) -> list[AuditFinding]:
    """Guesses against the claimed profile; or, if all is Gaussian, guesses and d′ against μ. α is shared."""
    order, half = np.argsort(scores), guesses // 2
    correct = int(coins[order[-half:]].sum() + (~coins[order[:half]]).sum())
    guesses, count, share, delta = 2 * half, len(coins), alpha / 2, claim.budget.delta
    what = f"{correct} of {guesses} guesses right"
    if claim.mu is None:
        curve = tradeoff_of(claim.profile)
        refuted, seen = (one_run_refutes(curve, count, guesses, k, share) for k in (correct, guesses))
        low = one_run_epsilon(count, guesses, correct, delta, share)
        unit, measured = "profile refuted", float(refuted)
        return [judged("L3 f-DP", what, unit, 0.0, measured, ok=not refuted, seen=seen, epsilon_lower=low)]
    mu, most = (one_run_mu(count, guesses, right, share) for right in (correct, guesses))
    _, dprime = dprime_lower(scores[coins], scores[~coins], share)
    fewer = int(min(coins.sum(), (~coins).sum()))
    findings = []
    for layer, words, bound, seen in (
        ("L3 f-DP", what, mu, most > claim.mu),
        ("L3 d′", "canaries in and out", dprime, dprime_found(claim.mu, 2.0 * claim.mu, fewer, share)),
    ):
        low = gaussian_epsilon(bound, delta) if bound else 0.0
        ok = bound <= claim.mu
        findings.append(judged(layer, words, "μ", claim.mu, bound, ok=ok, seen=seen, epsilon_lower=low))
    return findings
