"""FedAvg with the party as the privacy unit (McMahan et al. 2018), fixed or adaptive clip (Andrew et al. 2021).

In a round each party that takes part makes ordinary SGD steps on its own records and hands in its clipped update;
the mean of the updates, with noise, moves the model. Momentum and Adam at the server (Reddi et al. 2021) are
post-processing. Proofs: ``docs/clients-proof.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import PrivacyUnit, Relation
from quietgrad.core.errors import SettingError, UnprovableError
from quietgrad.core.plans.schedule import Plan, Schedule
from quietgrad.core.sampling import CoordinatorSampled, CyclicCohorts, FullBatch, Poisson, Sampling, SelfSampled
from quietgrad.core.session.base import Session
from quietgrad.core.session.contributions import LARGEST_CLIP, SMALLEST_CLIP
from quietgrad.core.session.queries import Asked
from quietgrad.core.settings import Count, Fraction, Positive, PositiveFraction, Within
from quietgrad.core.vectors import OwnVector, Vector, sqrt, zeros_like
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.oracles.base import slot_of
from quietgrad.tables.queries.local_update import LocalUpdateQuery

UPDATE = "update"
"""The slot of its releases."""
_RANGE = 1e3  # an adaptive clip stays within this factor of its start: a public range
RECORD_NOTE = "one record of a party: "
"""How the note begins that states the record's own ε."""


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: θ ← θ + η·direction(noisy mean of clip_C(θ_local − θ)).

    The privacy unit is what the run counts: a party of a federation, a person of a table, or else a record, which
    then trains alone. Membership and the divisor, the expected number of units in a round, are public.

    Args:
        rounds: T, the number of releases.
        local_steps: SGD steps of a party in a round.
        local_rate: their learning rate.
        local_batch_size: records per local step; a party with fewer uses all of them.
        clip: C, the L2 bound on a party's update; where an adaptive clip starts.
        clip_quantile: follow this quantile of the updates' lengths by noisy estimates; ``None`` keeps C.
        clip_rate: how fast the clip follows, per round.
        clip_share: the part of each release's squared bound that tells of the clip. The number of parties within it
            has noise of z/(2√share); the updates have 1/√(1−share) times as much as with a fixed clip.
        sampling: ``"turns"``: cohorts of parties, one after the other; nothing is secret. ``"poisson"``: a trusted
            curator draws. ``"self"``: each party draws for itself, in secret, and trains in every round.
            ``"coordinator"``: the coordinator draws, which saves work. ``"full"``: all parties in every round.
        sample: the part of the parties that takes part in a round; with turns there are about 1/sample cohorts.
        noise: ``"correlated"`` or ``"independent"``; correlated for turns unless it is given.
        most_rounds: with ``sampling="coordinator"``, how often a party takes part at most. It enforces that itself.
        answer_seconds: with ``sampling="self"``, after how many seconds every party answers, whatever it drew.
        server: ``"sgd"``, or ``"adam"`` with moments of the mean updates.
        server_rate: η.
        server_momentum: weight of the past in the server's momentum, or Adam's β₁.
        beta2: weight of the past in Adam's second moment.
        stabiliser: what Adam adds to its divisor.
        returns: the ``"last"`` model, or the ``"average"`` of the second half of the run.

    >>> FedAvg(rounds=100, sample=0.1).schedule(1000).slots[0].sampling
    CyclicCohorts(cohorts=10, relation=<Relation.REPLACE_ONE: 'replace-one'>)
    """

    rounds: Count = 100
    local_steps: Count = 5
    local_rate: Positive = 0.1
    local_batch_size: Count = 20
    clip: Positive = 0.3
    clip_quantile: PositiveFraction | None = None
    clip_rate: Positive = 0.2
    clip_share: PositiveFraction = 0.01
    sampling: Literal["turns", "poisson", "self", "coordinator", "full"] = "turns"
    sample: Annotated[float, Within(0.0, 1.0, closed=False)] = 0.1
    noise: Literal["independent", "correlated"] | None = None
    most_rounds: Count | None = None
    answer_seconds: Positive = 10.0
    server: Literal["sgd", "adam"] = "sgd"
    server_rate: Positive = 1.0
    server_momentum: Fraction = 0.0
    beta2: Fraction = 0.99
    stabiliser: Positive = 1e-3
    returns: Literal["last", "average"] = "last"

    name: ClassVar[str] = "fedavg"
    by_party: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sampling == "coordinator") != (self.most_rounds is not None):
            raise SettingError(
                "{most_rounds}: say how often a party takes part at most, exactly when {sampling='coordinator'}.",
                most_rounds=self.most_rounds,
            )
        if not SMALLEST_CLIP * _RANGE <= self.clip <= LARGEST_CLIP / _RANGE:
            raise SettingError("{clip}: must be a length at which arithmetic keeps its precision.", clip=self.clip)

    # --- what is released ---------------------------------------------------------------------------------------

    def sampling_of(self, n_public: int) -> Sampling:
        """The scheme by which units take part."""
        if self.sampling == "poisson":
            return Poisson(self.sample)
        if self.sampling == "self":
            return SelfSampled(self.sample, self.answer_seconds)
        if self.sampling == "coordinator":
            assert self.most_rounds is not None
            return CoordinatorSampled(self.sample, self.most_rounds)
        cohorts = min(n_public, round(1.0 / self.sample))
        return FullBatch() if self.sampling == "full" or cohorts < 2 else CyclicCohorts(cohorts)

    def schedule(self, n_public: int) -> Schedule:
        sampling = self.sampling_of(n_public)
        noise = self.noise or ("correlated" if sampling.in_turns else "independent")
        return Schedule.of((slot_of(UPDATE, sampling, self.rounds, noise),))

    @property
    def share(self) -> float:
        """Part of the squared bound that is spent on the clip's quantile. It is 0 with a fixed clip."""
        return 0.0 if self.clip_quantile is None else self.clip_share

    def query(self, params: Vector, clip: float) -> LocalUpdateQuery:
        """Return the query of one round."""
        return LocalUpdateQuery(params, self.local_steps, self.local_rate, self.local_batch_size, clip, self.share)

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        lowest, highest = self.clip / _RANGE, self.clip * _RANGE
        varies = {} if self.clip_quantile is None else {"clip": (lowest, highest)}
        yield UPDATE, Asked(self.query(x0, self.clip), varies)

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """The record's own ε, which is another number than the party's."""
        if plan.unit is PrivacyUnit.RECORD or plan.budget is None:
            return ()
        return (f"{RECORD_NOTE}{record_statement(plan)}",)

    # --- one round ----------------------------------------------------------------------------------------------

    def step(self, state: State, session: Session) -> State:
        """One release of updates, one step of the server."""
        clip = float(state.extra.get("clip", self.clip))
        total = session.release(UPDATE, self.query(state.params, clip))
        size = session.expected_batch(UPDATE)  # public: dividing by how many came would be a release of its own
        if self.clip_quantile is not None:
            state.extra["clip"] = clip = self._next_clip(clip, float(total[-1]) / size)
            state.extra["trace"] = {"clip": clip}
            total = total[:-1]
            params: OwnVector = state.params
            total = total if isinstance(params, type(total)) else params.new_tensor(total)
        state.params = state.params + self.server_rate * self._direction(state, total * (1.0 / size))
        state.step += 1
        if self.returns == "average" and 2 * state.step > self.rounds:
            state.averaged += 1
            state.average = zeros_like(state.params) if state.average is None else state.average
            state.average = state.average + (state.params - state.average) * (1.0 / state.averaged)
        state.done = state.step >= self.rounds
        return state

    def _next_clip(self, clip: float, mean: float) -> float:
        """Move the clip towards the quantile, within its public range. ``mean`` is that of ±bit over parties."""
        assert self.clip_quantile is not None
        bit = clip * math.sqrt(self.clip_share / (1.0 - self.clip_share))
        within = 0.5 + 0.5 * mean / bit
        # A noisy share far outside [0, 1] says no more than its end.
        moved = clip * math.exp(-self.clip_rate * (min(max(within, -1.0), 2.0) - self.clip_quantile))
        return min(max(moved, self.clip / _RANGE), self.clip * _RANGE)

    def _direction(self, state: State, mean: Vector) -> Vector:
        """The mean update, its momentum, or Adam's step: all post-processing."""
        past = self.server_momentum
        if self.server == "sgd":
            if past:
                mean = mean if state.velocity is None else past * state.velocity + mean
                state.velocity = mean
            return mean
        first, second = (1.0 - past) * mean, (1.0 - self.beta2) * (mean * mean)
        state.velocity = first if state.velocity is None else past * state.velocity + first
        state.second = second if state.second is None else self.beta2 * state.second + second
        t = state.step + 1
        mean = state.velocity * (1.0 / (1.0 - past**t))
        root: Vector = sqrt(state.second * (1.0 / (1.0 - self.beta2**t)))
        return mean / (root + self.stabiliser)

    def output(self, state: State) -> Vector:
        return state.params if state.average is None else state.average


def record_statement(plan: Plan) -> str:
    """State in words the guarantee for one record of a unit.

    One record can turn a clipped update round, which moves the sum by 2C under the same coin, as replacing all that
    the unit holds does. So the record's ε is that of replacing the unit: more than the unit's under add-remove.
    """
    assert plan.budget is not None
    if plan.budget.relation is Relation.REPLACE_ONE:
        return f"the ε of its {plan.unit}; no smaller one is proved"
    try:
        proof = prove(plan.total, delta=plan.budget.delta, relation=Relation.REPLACE_ONE)
    except UnprovableError:
        return "no ε is proved"
    return (
        f"({proof.epsilon:.4g}, {plan.budget.delta:g})-DP, added, removed or replaced among what its {plan.unit} "
        f"holds: another number than the {plan.unit}'s ε, and the larger one"
    )
