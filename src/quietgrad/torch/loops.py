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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quietgrad import training
from quietgrad.algorithms.base import State
from quietgrad.algorithms.own_loop import LoopSampling, OwnLoop
from quietgrad.curators.account import Account
from quietgrad.curators.base import Session, SessionCost
from quietgrad.curators.central import CentralCurator
from quietgrad.curators.session import PendingRelease
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.objectives.base import Query
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.plans.counting import PublicCount
from quietgrad.plans.schedule import Plan, Schedule
from quietgrad.privacy.budget import Budget, PrivacyUnit, Relation
from quietgrad.privacy.calibration import calibrate_steps
from quietgrad.privacy.events import composed
from quietgrad.torch.checkpoints import LoopCost, epsilon_of
from quietgrad.torch.clip_rules import ClipRule
from quietgrad.torch.distributed import (
    Shards,
    SharedSession,
    any_of_us,
    broadcast_from_leader,
    broadcast_loop_key,
    is_distributed,
    is_leader,
)
from quietgrad.training.result import Privacy, privacy_statement
from quietgrad.training.runs import Run


def truncate_to_budget(plan: Plan) -> Plan:
    """The plan, or the part of it that its budget affords."""
    steps = affordable_steps(plan)
    return plan if steps is None else replace(plan, schedule=_first(plan.schedule, steps))


class TruncatedAlgorithm:
    """An algorithm that ends after so many steps, decided before the run; all else is as it was.

    >>> from quietgrad import DPSGD
    >>> TruncatedAlgorithm(DPSGD(steps=100, batch_size=10), 30).schedule(1000).releases
    30
    """

    def __init__(self, algorithm: Any, steps: int) -> None:
        self._algorithm = algorithm
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def schedule(self, n_public: int) -> Schedule:
        """The first releases of the algorithm's schedule."""
        return _first(self._algorithm.schedule(n_public), self._steps)

    def step(self, state: State, door: Session) -> State:
        """The algorithm's step; the last one says that the budget ended the run."""
        state = self._algorithm.step(state, door)
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
        counts: dict[str, int] = {}
        for slot in plan.schedule.slots:
            counts[slot.name] = min(slot.count, steps)
            steps -= counts[slot.name]
        return plan.epsilon_after(counts)

    low, high = 0, plan.schedule.releases  # cost(low) ≤ limit < cost(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    if low == 0:
        raise BudgetError(
            f"noise_multiplier={plan.noise_multiplier:g}: one step costs ε = {cost(1):.4g}, above the budget of "
            f"{limit:g}. Use more noise or a smaller batch."
        )
    return low


CONDITION = (
    "if the loop's own code treats records apart: what the model gets in row k and its term of the loss come from "
    "record k alone, and nothing read from private batches decides what is trained or published (not checked)"
)
_TAKEN = "n was taken from the data set's length, which is thereby declared public; n_public= declares another"
_NO_LIMIT = 1e9  # ε of a loop that nobody limited: what it costs so far is told by Loop.privacy
_OPEN_END = 10**9  # steps of such a loop


class Pace(NamedTuple):
    """How long a loop is: its epochs, or its steps, and what changes on the way; ``None``, ``None``: no end."""

    epochs: int | None = None
    steps: int | None = None
    noise_schedule: Callable[[int], float] | None = None
    batch_schedule: Callable[[int], int] | None = None
    drop_last: bool = False

    def stretches(self, n: int, size: int) -> tuple[tuple[tuple[int, int, float], ...], tuple[int, ...]]:
        """(samples, expected size, noise) of each stretch of equal settings, and the samples of each epoch.

        >>> Pace(epochs=3, noise_schedule=lambda epoch: 1.0 if epoch < 2 else 0.5).stretches(100, 30)
        (((8, 30, 1.0), (4, 30, 0.5)), (4, 4, 4))
        """
        for name, value in (("epochs", self.epochs), ("steps", self.steps)):
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"{name}={value!r}: must be a whole number ≥ 1.")
        changes = self.noise_schedule is not None or self.batch_schedule is not None
        if self.epochs is None:
            if changes:
                raise ValueError("epochs=None: a schedule needs the number of epochs beforehand; give epochs.")
            return ((self.steps or _OPEN_END, size, 1.0),), (self._length(n, size),)
        if self.steps is not None:
            raise ValueError("epochs and steps: give one of them.")
        epochs = range(self.epochs)
        sizes = [size if self.batch_schedule is None else int(self.batch_schedule(epoch)) for epoch in epochs]
        if not all(1 <= each <= n for each in sizes):
            raise ValueError(
                f"batch_schedule: gives sizes {min(sizes)} … {max(sizes)}; must be between 1 and n={n}."
            )
        noises = [1.0 if self.noise_schedule is None else float(self.noise_schedule(epoch)) for epoch in epochs]
        lengths = [self._length(n, each) for each in sizes]
        runs = [list(run) for _, run in groupby(epochs, key=lambda epoch: (sizes[epoch], noises[epoch]))]
        return tuple((lengths[r[0]] * len(r), sizes[r[0]], noises[r[0]]) for r in runs), tuple(lengths)

    def largest(self, size: int) -> int:
        """The largest expected sample."""
        sizes = (int(self.batch_schedule(e)) for e in range(self.epochs or 0)) if self.batch_schedule else ()
        return max(size, *sizes, 1)

    def payer(self, account: str, ledger: Any, cap: Budget | None, seed: int | None) -> Account:
        """Who pays: the account in the ledger given, else in the project's own.

        A ledger reserves beforehand what a loop may spend, so one without an end is counted in this process alone.
        """
        if self.epochs is not None or self.steps is not None:
            return Account.of(account, ledger, cap, seeded=seed is not None)
        if ledger is not None or cap is not None:
            raise ValueError("epochs=None: a ledger needs the number of epochs or steps beforehand; give epochs.")
        return Account(account, note="kept in no ledger: the loop has no planned end")

    def _length(self, n: int, size: int) -> int:
        """Samples of an epoch: as many as a loader would make batches, with ``drop_last`` without the short one."""
        return n // size if self.drop_last else math.ceil(n / size)


@dataclass(frozen=True)
class Promise:
    """What a loop promises: at most ε, or only a noise multiplier, or both; and how its samples are drawn."""

    epsilon: float | None
    delta: float
    relation: str | Relation = Relation.ADD_REMOVE
    noise_multiplier: float | None = None
    sampling: LoopSampling = "poisson"

    @property
    def budget(self) -> Budget:
        """The budget that the loop is planned for."""
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("a private loop needs a budget, or a noise_multiplier; give one of them.")
        limit = _NO_LIMIT if self.epsilon is None else self.epsilon
        return Budget(limit, self.delta, Relation.parse(self.relation))

    @classmethod
    def of(
        cls, epsilon: float | None, delta: float, relation: str | Relation, noise_multiplier: float | None,
        sampling: LoopSampling, poisson_sampling: bool,
    ) -> Promise:  # fmt: skip
        """The promise of a loop whose sampling has two names: Opacus' ``poisson_sampling=False`` is ``"turns"``."""
        if not poisson_sampling and sampling != "poisson":
            raise ValueError(f"poisson_sampling=False, sampling={sampling!r}: give one of them.")
        return cls(epsilon, delta, relation, noise_multiplier, sampling if poisson_sampling else "turns")

    def paced(self, pace: Pace) -> Pace:
        """The pace of such samples: where every record is in one batch of an epoch, none is dropped."""
        return pace._replace(drop_last=False) if self.sampling == "random-allocation" else pace

    def count(self, curator: CentralCurator, declared: int | None, least: int) -> PublicCount:
        """How many records to plan for: the declared number; else counted privately, with about 1 % of ε.

        A count may come out below the largest sample, which is then the number: ``least``.

        Noise of one's own has no ε to take that from: its price is stated for the length of the data set, which is
        thereby public.
        """
        if declared is not None or self.noise_multiplier is not None:
            return PublicCount(len(curator.records) if declared is None else declared)
        found: PublicCount = broadcast_from_leader(lambda: curator.count(self.budget, None, None))
        return replace(found, n=max(found.n, least))

    def plan(
        self, pace: Pace, count: PublicCount, size: int, rule: ClipRule, unit: PrivacyUnit
    ) -> tuple[Plan, tuple[int, ...]]:
        """What the loop may release, priced, and the samples of each epoch."""
        budget, own, n = self.budget, self.noise_multiplier, count.n
        if pace.epochs is None and pace.steps is None:
            if own is None:
                raise ValueError("a loop whose noise follows from its budget needs epochs= or steps= beforehand.")
            if self.epsilon is not None:
                if self.sampling == "turns":
                    raise ValueError("without secret samples a target ε needs the number of epochs; give epochs.")
                steps = calibrate_steps(
                    epsilon=self.epsilon, delta=self.delta, noise_multiplier=own, n=n, batch_size=size,
                    sampling=self.sampling, relation=budget.relation,
                )  # fmt: skip
                pace = pace._replace(steps=steps)
        stretches, lengths = self.paced(pace).stretches(n, size)
        releases: Any = OwnLoop(stretches, rule.config(), self.sampling)
        plan = training.plan(releases, n=count, budget=budget, noise_multiplier=own, unit=unit)
        if own is not None and self.epsilon is not None:
            plan = truncate_to_budget(plan)
        for slot in plan.schedule.slots:
            rule.bound(
                slot.multiplier(plan.noise_multiplier)
            )  # refuses a count that leaves no noise for the gradient
        return plan, lengths


def holder(reading: Any, data: Any, account: Account, seed: int | None, run: str | None = None) -> CentralCurator:
    """The holder of the data; of several processes one pays, and all draw the same samples."""
    if seed is not None:
        warnings.warn(f"seed={seed}: seeded noise is not private; use it for tests only.", stacklevel=4)
    payer = account if is_leader() else Account(account.name)
    return CentralCurator(reading, data, account=payer, run=run, seed=seed, key=broadcast_loop_key())


class Loop:
    """A plan's open session and how far the loop has come."""

    def __init__(
        self,
        plan: Plan,
        curator: CentralCurator,
        engine: PerExampleEngine,
        rule: ClipRule,
        shards: Shards | None,
        kept: Run | None = None,
    ) -> None:
        self.plan, self.engine, self.rule, self.shards = plan, engine, rule, shards
        rule.precision = engine.dtype
        self.name = os.urandom(16).hex()
        self.account = curator.account.asked or curator.account.name
        self.is_private = not curator.seeded
        self.n_is_declared = True  # else it was taken from the data
        self.paused = False  # whether it goes on elsewhere
        self.total = plan.schedule.releases  # samples it may have
        self.mean = True  # whether the gradient is divided by the public size of a sample
        self._session: Any
        if kept is not None:
            self._session = kept.open(curator)
        elif is_distributed():
            self._session = SharedSession(curator, plan, engine.module, engine.device)
        else:
            self._session = curator.open(plan)
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
        """Whether nobody limited what it may cost."""
        return self.plan.budget is None or self.plan.budget.epsilon >= _NO_LIMIT

    @property
    def cost(self) -> LoopCost:
        """What the samples that were handed out are accounted as, stepped on or not.

        Whether to skip one may have depended on it.
        """
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


def check_person(people: bool, rule: ClipRule) -> None:
    """Refuse clipping that is not known for people whose records are in several passes."""
    if people and rule.config().get("clipping") is not None:
        raise ValueError(
            "person: a person's records are clipped together over all parameters: use clipping='flat'."
        )
