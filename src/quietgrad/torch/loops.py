"""What all private loops share: the plan, the session, the samples handed out, and the gradient released.

A loop draws one sample after the other, each counted when it is handed out. It releases the noisy sum of clipped
contributions of one sample, which becomes the parameters' gradient. What the loop does with that is free.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad import training
from quietgrad.algorithms.base import Algorithm, State
from quietgrad.algorithms.custom_loop import LoopReleases, LoopSampling
from quietgrad.curators.account import Account
from quietgrad.curators.base import Session, SessionCost
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.curators.session import PendingRelease
from quietgrad.errors import BudgetError, DataError, ExhaustedError
from quietgrad.objectives.base import Query
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.plans.counting import PublicCount
from quietgrad.plans.schedule import Plan, Schedule
from quietgrad.privacy.budget import Budget, PrivacyUnit, Relation
from quietgrad.privacy.calibration import calibrate_steps
from quietgrad.privacy.events import composed
from quietgrad.privacy.ledger import Ledger
from quietgrad.torch.checkpoints import LoopCost, epsilon_of
from quietgrad.torch.clip_rules import FlatClip
from quietgrad.torch.distributed import (
    Shards,
    SharedCurator,
    any_of_us,
    broadcast_from_leader,
    broadcast_loop_key,
    is_distributed,
    is_leader,
)
from quietgrad.training.result import Privacy, privacy_statement
from quietgrad.training.runs import Run

CONDITION = (
    "if the loop's own code treats records apart: what the model gets in row k and its term of the loss come from "
    "record k alone, and nothing read from private batches decides what is trained or published (not checked)"
)
_TAKEN = "n was taken from the data set's length, which is thereby declared public; n_public= declares another"
_NO_LIMIT = 1e9  # ε of a loop without a limit: what it costs so far is told by Loop.privacy
_OPEN_END = 10**9  # steps of such a loop


class TruncatedAlgorithm:
    """An algorithm that ends after so many steps, decided before the run; all else is as it was.

    >>> from quietgrad import DPSGD
    >>> TruncatedAlgorithm(DPSGD(steps=100, batch_size=10), 30).schedule(1000).releases
    30
    """

    def __init__(self, algorithm: Algorithm, steps: int) -> None:
        self._algorithm = algorithm
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def schedule(self, n_public: int) -> Schedule:
        """The first releases of the algorithm's schedule."""
        return _first(self._algorithm.schedule(n_public), self._steps)

    def step(self, state: State, session: Session) -> State:
        """The algorithm's step; the last one says that the budget ended the run."""
        state = self._algorithm.step(state, session)
        if state.step >= self._steps and not state.done:
            state.done, state.stopped_by = True, "budget"
        return state

    def config(self) -> dict[str, Any]:
        """The algorithm's settings and the step it stops after."""
        return {**self._algorithm.config(), "stops_after": self._steps}


def _first(schedule: Schedule, steps: int) -> Schedule:
    slots = []
    for slot in schedule.slots:
        count = min(slot.count, steps)
        steps -= count
        if count:
            slots.append(replace(slot, count=count))
    return replace(schedule, slots=tuple(slots))


def affordable_steps(plan: Plan) -> int | None:
    """How many steps a plan of fixed noise may take within its budget; None: all of them."""
    if plan.budget is None or plan.paper_noise or plan.epsilon() <= plan.budget.epsilon:
        return None
    limit = plan.budget.epsilon
    if plan.schedule.composition != "sequential" or any(slot.law is not None for slot in plan.schedule.slots):
        raise BudgetError(
            f"noise_multiplier={plan.noise_multiplier:g}: the run would cost ε = {plan.epsilon():.4g}, above the "
            f"budget of {limit:g}, and cannot be cut short. Leave the noise to calibration."
        )

    def cost(steps: int) -> float:
        return plan.epsilon_after({slot.name: slot.count for slot in _first(plan.schedule, steps).slots})

    steps = largest(lambda steps: cost(steps) <= limit, 0, plan.schedule.releases)
    if steps == 0:
        raise BudgetError(
            f"noise_multiplier={plan.noise_multiplier:g}: one step costs ε = {cost(1):.4g}, above the budget of "
            f"{limit:g}. Use more noise or a smaller batch."
        )
    return steps


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to ``high`` that fits, if ``low`` does, and all below one that does.

    >>> largest(lambda number: number < 7, 0, 100)
    6
    """
    if high <= low or fits(high):
        return max(low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class LoopTerms:
    """What is settled before a loop begins: its samples, its length, its noise or its budget, and who pays.

    It promises at most ε, or only a noise multiplier, or both. Without ``epochs`` and ``steps`` it has no end.
    """

    batch_size: int
    epsilon: float | None
    delta: float
    relation: str | Relation
    noise_multiplier: float | None
    epochs: int | None
    steps: int | None = None
    noise_schedule: Callable[[int], float] | None
    batch_schedule: Callable[[int], int] | None
    sampling: LoopSampling
    drop_last: bool = False
    unit: PrivacyUnit
    n_public: int | None
    ledger: Ledger | str | Path | None
    account: str
    cap: Budget | None
    seed: int | None

    @property
    def budget(self) -> Budget:
        """The budget that the loop is planned for."""
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("a private loop needs a budget, or a noise_multiplier; give one of them.")
        limit = _NO_LIMIT if self.epsilon is None else self.epsilon
        return Budget(limit, self.delta, Relation.parse(self.relation))

    @property
    def n_is_declared(self) -> bool:
        """Whether n was not taken from the data."""
        return self.n_public is not None or self.noise_multiplier is None

    @property
    def has_end(self) -> bool:
        """Whether its length is planned."""
        return self.epochs is not None or self.steps is not None

    def stretches(self, n: int) -> tuple[tuple[tuple[int, int, float], ...], tuple[int, ...]]:
        """(samples, expected size, noise) of each stretch of equal settings, and the samples of each epoch."""
        for name, value in (("epochs", self.epochs), ("steps", self.steps)):
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"{name}={value!r}: must be a whole number ≥ 1.")
        if self.epochs is None:
            if self.noise_schedule is not None or self.batch_schedule is not None:
                raise ValueError("epochs=None: a schedule needs the number of epochs beforehand; give epochs.")
            return ((self.steps or _OPEN_END, self.batch_size, 1.0),), (self._length(n, self.batch_size),)
        if self.steps is not None:
            raise ValueError("epochs and steps: give one of them.")
        epochs, sizes = range(self.epochs), self._sizes
        if not all(1 <= each <= n for each in sizes):
            raise ValueError(
                f"batch_schedule: gives sizes {min(sizes)} … {max(sizes)}; must be between 1 and n={n}."
            )
        noises = [1.0 if self.noise_schedule is None else float(self.noise_schedule(epoch)) for epoch in epochs]
        lengths = [self._length(n, each) for each in sizes]
        runs = [list(run) for _, run in groupby(epochs, key=lambda epoch: (sizes[epoch], noises[epoch]))]
        return tuple((lengths[r[0]] * len(r), sizes[r[0]], noises[r[0]]) for r in runs), tuple(lengths)

    @property
    def _sizes(self) -> list[int]:
        """The expected sample size of each epoch."""
        schedule = self.batch_schedule or (lambda _: self.batch_size)
        return [int(schedule(epoch)) for epoch in range(self.epochs or 0)]

    def _length(self, n: int, size: int) -> int:
        """Samples of an epoch: as many as a loader would make batches, with ``drop_last`` without the short one."""
        # Where every record is in one batch of an epoch, none is dropped.
        return n // size if self.drop_last and self.sampling != "random-allocation" else math.ceil(n / size)

    def releases(self, n: int, rule: FlatClip) -> LoopReleases:
        """The loop as a method that can be planned."""
        return LoopReleases(self.stretches(n)[0], rule.config(), self.sampling)

    def holder(self, reading: Any, data: Any, kept: Run | None = None) -> CentralCurator:
        """The holder of the data; of several processes one pays, and all draw the same samples.

        A ledger reserves beforehand what a loop may spend, so one without an end is counted in this process alone.
        """
        if self.seed is not None:
            warnings.warn(f"seed={self.seed}: seeded noise is not private; use it for tests only.", stacklevel=4)
        if kept is not None:
            payer = kept.account
        elif self.has_end:
            payer = Account.of(self.account, self.ledger, self.cap, seeded=self.seed is not None)
        elif self.ledger is not None or self.cap is not None:
            raise ValueError("epochs=None: a ledger needs the number of epochs or steps beforehand; give epochs.")
        else:
            payer = Account(self.account, note="kept in no ledger: the loop has no planned end")
        payer = payer if is_leader() else Account(payer.name)
        name, key = None if kept is None else kept.name, broadcast_loop_key()
        kind = SharedCurator if is_distributed() else CentralCurator
        return kind(reading, data, account=payer, run=name, seed=self.seed, key=key)

    def plan(self, curator: CentralCurator, rule: FlatClip) -> Plan:
        """What the loop may release, priced.

        n is the declared number, else counted privately with about 1 % of ε, and at least the largest sample. Noise
        of one's own has no ε to take that from: its price is stated for the length of the data set.
        """
        terms, budget, own = self, self.budget, self.noise_multiplier
        if self.n_public is not None or own is not None:
            count = PublicCount(len(curator.records) if self.n_public is None else self.n_public)
        else:
            found: PublicCount = broadcast_from_leader(lambda: curator.count(budget, None, None))
            count = replace(found, n=max(found.n, self.batch_size, *self._sizes))
        if not 1 <= self.batch_size <= count.n:
            records = self.unit.in_words("records")
            raise DataError(
                f"batch_size={self.batch_size}: must be between 1 and the {count.n} {records} of the data set."
            )
        if not self.has_end:
            if own is None:
                raise ValueError("a loop whose noise follows from its budget needs epochs= or steps= beforehand.")
            if self.epsilon is not None:
                if self.sampling == "turns":
                    raise ValueError("without secret samples a target ε needs the number of epochs; give epochs.")
                steps = calibrate_steps(
                    epsilon=self.epsilon, delta=self.delta, noise_multiplier=own, n=count.n,
                    batch_size=self.batch_size, sampling=self.sampling, relation=budget.relation,
                )  # fmt: skip
                terms = replace(self, steps=steps)
        method: Any = terms.releases(count.n, rule)
        plan = training.plan(method, n=count, budget=budget, noise_multiplier=own, unit=self.unit)
        if own is not None and self.epsilon is not None and (steps_left := affordable_steps(plan)) is not None:
            plan = replace(plan, schedule=_first(plan.schedule, steps_left))
        for slot in plan.schedule.slots:
            rule.bound(slot.multiplier(plan.noise_multiplier))  # refuses one that leaves the gradient no noise
        return plan


def loop_sampling(sampling: LoopSampling, poisson_sampling: bool) -> LoopSampling:
    """How samples are drawn, which has two names: Opacus' ``poisson_sampling=False`` is ``"turns"``."""
    if not poisson_sampling and sampling != "poisson":
        raise ValueError(f"poisson_sampling=False, sampling={sampling!r}: give one of them.")
    return sampling if poisson_sampling else "turns"


class Loop:
    """A plan's open session and how far the loop has come."""

    def __init__(
        self, plan: Plan, lengths: tuple[int, ...], curator: CentralCurator, engine: PerExampleEngine,
        rule: FlatClip, shards: Shards | None, *, n_is_declared: bool, kept: Run | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.engine, self.rule, self.shards = plan, engine, rule, shards
        rule.precision = engine.dtype
        self.lengths = lengths  # samples of each epoch; the last one's of all that follow
        self.name = os.urandom(16).hex()
        self.account = curator.account.asked or curator.account.name
        self.is_private = not curator.seeded
        self.n_is_declared = n_is_declared
        self.paused = False  # whether it goes on elsewhere
        self.total = plan.schedule.releases  # samples it may have
        self.mean = True  # whether the gradient is divided by the public size of a sample
        self._session: CentralSession = curator.open(plan) if kept is None else kept.open(curator)
        self.handed_out = sum(self._session.used.values())  # samples that the loop has had
        self._spent: SessionCost | None = None
        self._released: dict[nn.Parameter, tuple[Tensor, int]] = {}

    # --- what is promised ---------------------------------------------------------------------------------------

    @property
    def condition(self) -> str | None:
        """The clause under which ε holds; ``None``: it holds without one."""
        return self.plan.condition

    def rest_on_code(self) -> None:
        """From now on ε rests on the loop's own code: the ledger is told before anything more is released."""
        if self.condition is None:
            config = {**self.plan.config, "condition": CONDITION}
            self._session.charge.set_condition(CONDITION)
            self.plan = self._session.plan = replace(self.plan, condition=CONDITION, config=config)

    @property
    def open_ended(self) -> bool:
        """Whether what it may cost has no limit."""
        return self.plan.budget is None or self.plan.budget.epsilon >= _NO_LIMIT

    @property
    def cost(self) -> LoopCost:
        """What the samples that were handed out are accounted as, also if one was skipped: it may have said so."""
        return LoopCost.of(self)

    def epsilon(self, delta: float | None = None) -> float:
        """ε of the samples handed out so far, at ``delta`` (default: the plan's); infinite if it was seeded."""
        assert self.plan.budget is not None
        return epsilon_of([self.cost], self.plan.budget.delta if delta is None else delta)

    @property
    def privacy(self) -> Privacy:
        """What is proved of the samples so far; of a loop that was closed, of what it was charged."""
        cost, plan = self.cost, self.plan
        nothing = cost.event is None
        one = {self._slot(0): 1}  # in whose place nothing is stated below
        event = plan.event if plan.whole_only else plan.event_of(one if nothing else cost.counts)
        if cost.times > 1:
            event = composed([plan.event] * cost.times)
        notes = () if self.n_is_declared else (_TAKEN,)
        if self._spent is None and self.handed_out < plan.schedule.releases < _OPEN_END:
            early = "a loop that ends early because of what it saw costs the whole plan"
            notes = (*notes, f"{self.handed_out} of {plan.schedule.releases} planned steps so far; {early}")
        spent = self._spent or SessionCost(event, cost.counts, "", False)
        said = privacy_statement(self._session, spent, self.account, notes)
        return replace(said, epsilon=0.0, events=None) if nothing else said

    def __str__(self) -> str:
        return f"{self.privacy}, {self.handed_out} steps"

    def close(self, *, data_dependent: bool = True) -> Privacy:
        """End the loop before its plan does, and say what it costs.

        The whole plan is charged, unless nothing that was seen, released numbers included, had a part in when it
        ends (``data_dependent=False``): then it costs the samples it has had.
        """
        if self._spent is None:
            self._spent = self._session.close("closed by the loop", data_dependent=data_dependent)
            self.total = self.handed_out
        return self.privacy

    # --- samples ------------------------------------------------------------------------------------------------

    def draw(self) -> PendingRelease:
        """The next sample, which counts from here on."""
        if self.handed_out >= self.total:
            raise ExhaustedError(self.refusal())
        drawn: PendingRelease = self._session.draw(self._slot(self.handed_out))
        self.handed_out += 1
        return drawn

    def refusal(self) -> str:
        """Why there is no further sample."""
        spent = f"ε = {self.epsilon():.4g} is spent" if self.is_private else "the loop, seeded, is not private"
        if not self.total:
            return f"no step is left of what was promised: {spent}. Use the model as it is, or plan a longer loop."
        return (
            f"the {self.total} steps that were planned are made, and {spent}. Stop here, or plan a longer loop "
            "from the start."
        )

    def multiplier(self, slot: str) -> float:
        """The noise multiplier of a stretch, as declared."""
        return self.plan.schedule[slot].multiplier(self.plan.noise_multiplier)

    @property
    def noise_multiplier(self) -> float:
        """That of the next step."""
        return self.multiplier(self._next_slot)

    @property
    def expected_batch(self) -> float:
        """The public size of the next sample, which sums are divided by."""
        return float(self._session.expected_batch(self._next_slot))

    @property
    def _next_slot(self) -> str:
        return self._slot(min(self.handed_out, self.plan.schedule.releases - 1))

    def _slot(self, number: int) -> str:
        for slot in self.plan.schedule.slots:
            if number < slot.count:
                return slot.name
            number -= slot.count
        raise ExhaustedError(self.refusal())

    # --- the gradient -------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is differentiated, by name."""
        return dict(self.engine.module.named_parameters())

    def stepped(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the same names."""
        return self.parameters() if self.shards is None else self.shards.params

    def release(self, drawn: PendingRelease, query: Query) -> Tensor:
        """Release the noisy sum of a sample and add it to the parameters' gradients; returns what was added."""
        self._refuse_other_parameters()
        if is_distributed() and any_of_us(self.condition is not None, self.engine.device):
            self.rest_on_code()
        multiplier = self.multiplier(drawn.slot)
        total = torch.as_tensor(self._session.release_drawn(drawn, query))
        expected = float(self._session.expected_batch(drawn.slot))
        if self.handed_out == self.plan.schedule.releases and self._spent is None:
            self._spent = self._session.close("steps")
        if self.rule.extra:
            self.rule.learn(total[-self.rule.extra :], expected, multiplier)
            total = total[: -self.rule.extra]
        if self.mean:
            total = total / expected  # by the public expected size: the size of the sample itself is private
        total = total.to(self.engine.device, self.engine.dtype)
        params = self.stepped()
        for name, value in self.engine.unflatten(total).items():
            gradient = value.clone() if self.shards is None else self.shards.cut(name, value)
            param = params[name]
            for hook in list((param._backward_hooks or {}).values()):  # register_hook: of what is released
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if param.grad is not None:
                gradient = gradient + param.grad
            param.grad = gradient
            self._released[param] = (gradient, gradient._version)
            for told in list((param._post_accumulate_grad_hooks or {}).values()):
                told(param)
        return total

    def has_other_gradients(self) -> bool:
        """Whether a parameter has a gradient that is not what was released."""
        for param in self.stepped().values():
            if param.grad is not None and bool(param.grad.any()):  # zeros are those of set_to_none=False
                known = self._released.get(param)
                if known is None or known[0] is not param.grad or known[1] != param.grad._version:
                    return True
        return False

    def _refuse_other_parameters(self) -> None:
        """The engine trains the parameters it was made for, and no others would get a gradient."""
        trained = {name for name, param in self.stepped().items() if param.requires_grad}
        now = [name for name in self.parameters() if name in trained]
        if now != list(self.engine.names):
            changed = sorted(set(now) ^ set(self.engine.names))[0]
            raise BudgetError(
                f"parameter {changed!r} was frozen, unfrozen, added or removed after the loop was made, which was "
                "planned for the others: change the module first, then make the loop."
            )
