"""Base of all private loops: the plan, the session, the samples handed out, and the gradient released.

A loop draws one sample after the other, each counted when it is handed out. It releases the noisy sum of clipped
contributions of one sample, which becomes the parameters' gradient. What the loop does with that is free.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.accounting.events import Event, composed
from quietgrad.core.errors import BudgetError, DataError, ExhaustedError, SettingError
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.base import SessionCost
from quietgrad.core.session.clipping import FLAT, Clipping
from quietgrad.core.session.contributions import ClippingRule, check_clip
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.opening import OpenRun, Terms, opening
from quietgrad.core.session.queries import Query
from quietgrad.core.session.session import PendingRelease
from quietgrad.core.session.statement import N_TAKEN, SO_FAR, UNKEPT, Privacy, privacy_statement
from quietgrad.methods.custom_loop import LoopReleases, LoopSampling
from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule, read_schedule
from quietgrad.torch.loops.distributed import (
    SharedCurator,
    any_of_us,
    broadcast_loop_key,
    is_distributed,
    is_leader,
)
from quietgrad.torch.loops.whole_module import WholeModule, is_shard
from quietgrad.torch.networks.engine import PerExampleEngine

CONDITION = (
    "if the loop's own code treats records apart: what the model gets in row k and its term of the loss come from "
    "record k alone, and nothing read from private batches decides what is trained or published (not checked)"
)
_NO_LIMIT = 1e9  # ε of a loop without a limit: Loop.privacy states what it costs so far
_OPEN_END = 10**9  # steps of such a loop
_CLIP_FACTORS = "clip_factors"
"""Of a plan's settings: numbers of steps and what C is multiplied by in them, in their order."""


@dataclass(frozen=True, kw_only=True)
class LoopTerms:
    """Settings that are fixed before a loop begins: its samples, length, noise or budget, and account.

    It has a budget, or a noise multiplier. Without ``epochs`` and ``steps`` it has no end.
    """

    batch_size: int
    epsilon: float | None
    delta: float
    relation: str | Relation
    noise_multiplier: float | None
    epochs: int | None
    steps: int | None = None
    sampling: LoopSampling
    drop_last: bool = False
    clipping: Clipping = FLAT
    noise_schedule: NoiseSchedule | None = None
    clip_schedule: ClipSchedule | None = None
    curator: type[CentralCurator] = SharedCurator
    unit: PrivacyUnit
    n_public: int | None
    ledger: Ledger | str | Path | None
    account: str
    cap: Budget | None
    seed: int | None

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("a private loop needs a budget, or a noise_multiplier; give one of them.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps: give one of them.")
        for name, value in (("epochs", self.epochs), ("steps", self.steps)):
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise SettingError(f"{{{name}}}: must be a whole number ≥ 1.", **{name: value})
        if self.noise_multiplier is None and not self.has_end:
            raise ValueError("a loop whose noise follows from its budget needs epochs= or steps= beforehand.")
        for kind in (NoiseSchedule, ClipSchedule):
            schedule = read_schedule(getattr(self, kind.argument), kind)
            object.__setattr__(self, kind.argument, schedule)
            if schedule is not None and not self.has_end:
                raise ValueError(f"{kind.argument}: is part of the plan, which needs epochs= or steps= beforehand.")

    @property
    def budget(self) -> Budget:
        limit = _NO_LIMIT if self.epsilon is None else self.epsilon
        return Budget(limit, self.delta, Relation.parse(self.relation))

    @property
    def adds_no_noise(self) -> bool:
        """Whether it is a run for debugging, without noise and without privacy."""
        return self.noise_multiplier == 0.0

    @property
    def n_is_declared(self) -> bool:
        """Whether n was not taken from the data."""
        return self.n_public is not None or self.noise_multiplier is None

    @property
    def has_end(self) -> bool:
        return self.epochs is not None or self.steps is not None or self.sampling == "single-pass"

    def epoch_length(self, n: int) -> int:
        """Samples of an epoch: as many as a loader would make batches, with ``drop_last`` without the short one."""
        # Where every record is in one batch of an epoch, none is dropped. A single pass has whole batches alone.
        dropped = (self.drop_last and self.sampling != "random-allocation") or self.sampling == "single-pass"
        return n // self.batch_size if dropped else math.ceil(n / self.batch_size)

    def releases(self, n: int, clip: float) -> LoopReleases:
        if not 1 <= self.batch_size <= n:
            records = self.unit.in_words("records")
            raise DataError(
                f"{{batch_size}}: must be between 1 and the {n} {records} of the data set.",
                batch_size=self.batch_size,
            )
        epochs = 1 if self.epochs is None and self.sampling == "single-pass" else self.epochs
        length = self.epoch_length(n)
        steps = self.steps or (_OPEN_END if epochs is None else epochs * length)
        said: dict[str, Any] = {"clip": clip}
        if self.clipping != FLAT:
            said["clipping"] = self.clipping.config()
        if self.clip_schedule is not None:
            factors = self.clip_schedule.stretches(steps, length)
            for _, factor in factors:
                finite_clip(clip * factor)
            said[_CLIP_FACTORS] = [list(stretch) for stretch in factors]
        noise = ((steps, 1.0),) if self.noise_schedule is None else self.noise_schedule.stretches(steps, length)
        relation = Relation.parse(self.relation) if self.adds_no_noise else None
        stretches = tuple((count, self.batch_size, factor) for count, factor in noise)
        return LoopReleases(stretches, said if len(said) > 1 else clip, self.sampling, relation=relation)

    def run_terms(self) -> Terms:
        """Return the run's terms: the account that pays, and the public facts. Of several processes one pays.

        A ledger reserves beforehand what a loop may spend, so one without an end is counted in this process alone.
        n is the declared number, else counted privately with about 1 % of ε. A noise multiplier has no ε to take
        that from: its cost is stated for the length of the data set, which is thereby declared public.
        """
        if self.seed is not None:
            warnings.warn(f"seed={self.seed}: seeded noise is not private; use it for tests only.", stacklevel=4)
        if self.adds_no_noise:
            warnings.warn(
                "noise_multiplier=0: no noise is added. The loop is not private, its ε is infinite and nothing is "
                "charged; it is for debugging.",
                stacklevel=4,
            )
            bare = Terms(
                None, Account(self.account), n_public=self.n_public, takes_n=self.n_public is None, seed=self.seed
            )
            return replace(bare, key=broadcast_loop_key())
        if not self.has_end and (self.ledger is not None or self.cap is not None):
            raise ValueError("epochs=None: a ledger needs the number of epochs or steps beforehand; give epochs.")
        terms = Terms.of(
            self.budget, account=self.account, ledger=self.ledger, cap=self.cap, seed=self.seed,
            n_public=self.n_public, takes_n=not self.n_is_declared, noise_multiplier=self.noise_multiplier,
            key=broadcast_loop_key(),
        )  # fmt: skip
        if not self.has_end:
            ledger = terms.account.open() if is_leader() else None
            if ledger is not None and ledger.book().bounds(terms.account.name):
                raise BudgetError(
                    f"account {terms.account.name!r} has a cap, and a loop without an end has no cost to hold "
                    "against it; give epochs. Nothing was charged or released."
                )
            unkept = Account(terms.account.name, note=f"{UNKEPT}: the loop has no planned end (give epochs=)")
            terms = replace(terms, account=unkept)
        return terms if is_leader() else replace(terms, account=Account(terms.account.name))

    def open(self, adapter: Any, data: Any, clip: float, **how: Any) -> OpenRun[LoopReleases]:
        """Open the loop's run; on several processes all draw the same samples."""
        kind = self.curator if is_distributed() else CentralCurator
        return opening(adapter, data, lambda n: self.releases(n, clip), self.run_terms(), curator=kind, **how)


def finite_clip(clip: object) -> float:
    """``max_grad_norm`` as a finite number > 0, in the range in which arithmetic keeps a clip."""
    value = float(clip) if isinstance(clip, Real) else 0.0
    if not 0.0 < value < math.inf:
        raise ValueError(f"max_grad_norm={clip!r}: must be a finite number > 0, for all parameters together.")
    check_clip("max_grad_norm", value)
    return value


class Loop:
    """A plan's open session and how far the loop has come."""

    def __init__(
        self, active: OpenRun[LoopReleases], terms: LoopTerms, engine: PerExampleEngine, clip: float, *,
        n_is_declared: bool, model: WholeModule,
    ) -> None:  # fmt: skip
        plan = active.plan
        self.plan, self.engine, self._clip = plan, engine, clip
        self.model = model
        self.clipping = terms.clipping
        self.epoch_length = terms.epoch_length(plan.n_public)  # in samples
        self.account = str(active.account)
        self.is_private = plan.is_private and not active.session.seeded
        self.n_is_declared = n_is_declared
        self.paused = False  # whether it goes on elsewhere
        self.total = plan.schedule.releases  # samples it may have
        self.mean = True  # whether the gradient is divided by the public size of a sample
        self._session: CentralSession = active.session
        self.expected_batch = float(
            self._session.expected_batch(plan.schedule.slots[0].name)
        )  # public; sums are divided by it
        self.handed_out = sum(self._session.used.values())  # samples that the loop has had
        self._spent: SessionCost | None = None
        self._released: dict[nn.Parameter, tuple[Tensor, int]] = {}

    # --- what is guaranteed -------------------------------------------------------------------------------------

    @property
    def condition(self) -> str | None:
        """The clause under which ε holds; ``None``: it holds without one."""
        return self.plan.condition

    def rest_on_code(self) -> None:
        """Make ε conditional on the loop's own code. The ledger notes it before anything more is released."""
        if self.condition is None:
            config = {**self.plan.config, "condition": CONDITION}
            self._session.charge.set_condition(CONDITION)
            self.plan = self._session.plan = replace(self.plan, condition=CONDITION, config=config)

    @property
    def _times(self) -> int:
        """How often the plan was charged: a kept loop that went on with other sums costs it again."""
        return int(self._session.epochs)

    @property
    def used(self) -> int:
        """How many samples count: those handed out, stepped on or not, because one that is skipped may say so.

        All that were planned count if the loop ended early or is paused. Of a loop that goes on, what an earlier
        process released counts too.
        """
        whole = self._times > 1 or self.paused or (self._spent is not None and self._spent.data_dependent)
        return self.plan.schedule.releases if whole else max(self.handed_out, sum(self._session.made.values()))

    @property
    def event(self) -> Event | None:
        """Event that the samples in :attr:`used` are accounted as, or ``None`` before the first one.

        A plan with ``whole_only``, such as one that rests on a private count, is accounted as a whole.
        """
        if self._times > 1:
            return composed([self.plan.total, *[self.plan.event] * (self._times - 1)])
        if self.plan.whole_only:
            return self.plan.total
        return self.plan.event_of(self.plan.first(self.used)) if self.used else None

    def epsilon(self, delta: float | None = None) -> float:
        """ε of the samples handed out so far, at ``delta`` (default: the plan's); infinite if it was seeded."""
        if self.plan.budget is None:
            return math.inf
        return epsilon_of([self], self.plan.budget.delta if delta is None else delta)

    @property
    def privacy(self) -> Privacy:
        """Privacy statement of the samples so far. For a closed loop, it states what the loop was charged.

        Of a loop without noise ε is infinite, as :meth:`epsilon` says.
        """
        plan, counts = self.plan, self.plan.first(self.used)
        if plan.budget is None:  # nothing is charged, and nothing is proved
            bare = privacy_statement(self._session, SessionCost(None, counts, "", False), self.account, ())
            return replace(bare, epsilon=math.inf)
        nothing = self.event is None
        # Before the first sample one stands in, for which nothing is stated below.
        event = plan.event if plan.whole_only else plan.event_of(plan.first(1) if nothing else counts)
        if self._times > 1:
            event = composed([plan.event] * self._times)
        notes = () if self.n_is_declared else (N_TAKEN,)
        if self._spent is None and self.handed_out < plan.schedule.releases < _OPEN_END:
            early = f"a loop that ends early because of what it saw costs the whole plan, ε = {plan.epsilon():.4g}"
            notes = (*notes, f"{self.handed_out} of {plan.schedule.releases} {SO_FAR}; {early}")
        spent = self._spent or SessionCost(event, counts, "", False)
        said = privacy_statement(self._session, spent, self.account, notes)
        return replace(said, epsilon=0.0, events=None) if nothing else said

    def close(self, *, data_dependent: bool = True) -> Privacy:
        """End the loop before its plan does, and say what it costs.

        The whole plan is charged, unless nothing that was seen, released numbers included, had a part in when it
        ends (``data_dependent=False``): then it costs the samples it has had.
        """
        if self._spent is None:
            self._spent = self._session.close("closed by the loop", data_dependent=data_dependent)
            self.total = self.handed_out
        return self.privacy

    # --- noise and C of a step ----------------------------------------------------------------------------------

    @property
    def _in_hand(self) -> int:
        """The place in the plan of the sample that was handed out last, or of the first one before that."""
        return max(0, min(self.handed_out, self.plan.schedule.releases) - 1)

    def _clip_at(self, place: int) -> float:
        factors = self.plan.config.get(_CLIP_FACTORS, ())
        for count, factor in factors:
            if place < count:
                return self._clip * float(factor)
            place -= int(count)
        return self._clip

    @property
    def clip(self) -> float:
        """C of the step in hand."""
        return self._clip_at(self._in_hand)

    @property
    def noise_multiplier(self) -> float:
        """Noise ÷ C of the step in hand."""
        return self.plan.schedule.slot_at(self._in_hand).multiplier(self.plan.noise_multiplier)

    def rule_of(self, drawn: PendingRelease) -> ClippingRule:
        """How records of a sample are clipped."""
        place = self.plan.schedule.place_of(drawn.slot, drawn.number)
        return ClippingRule.gradient(self._clip_at(place), self.clipping)

    # --- samples ------------------------------------------------------------------------------------------------

    def draw(self) -> PendingRelease:
        """The next sample, which counts from here on."""
        self.model.refuse_later_shards()
        if self.handed_out >= self.total:
            raise ExhaustedError(self.refusal())
        drawn: PendingRelease = self._session.draw(self.plan.schedule.slot_at(self.handed_out).name)
        self.handed_out += 1
        return drawn

    def refusal(self) -> str:
        spent = f"ε = {self.epsilon():.4g} is spent" if self.is_private else "the loop is not private"
        if not self.total:
            return f"no step of the plan is left: {spent}. Use the model as it is, or plan a longer loop."
        return (
            f"the {self.total} steps that were planned are made, and {spent}. Stop here, or plan a longer loop "
            "from the start."
        )

    # --- the gradient -------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's parameters as the optimizer holds them, which may be in shards."""
        return self.model.parameters()

    @contextmanager
    def whole(self, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """The module with whole parameters, gathered here or before; afterwards they are freed."""
        outermost = not self.model.is_whole
        with self.model.whole(values):
            yield
        if self.model.in_shards and outermost:
            self.let_go_of_tensors()

    def let_go_of_tensors(self) -> None:
        """Hold no whole parameter."""
        self.engine.let_go()

    def point(self) -> Tensor:
        """The trained parameters of the module, which is whole, as one vector."""
        return self.engine.flatten(dict(self.engine.module.named_parameters()))

    def release(self, drawn: PendingRelease, query: Query) -> Tensor:
        """Release the noisy sum of a sample and add it to the parameters' gradients; returns what was added."""
        self._refuse_other_parameters()
        if is_distributed() and any_of_us(self.condition is not None, self.engine.device):
            self.rest_on_code()
        total = torch.as_tensor(self._session.release_drawn(drawn, query))
        if self.handed_out == self.plan.schedule.releases and self._spent is None:
            self._spent = self._session.close("steps")
        if self.mean:
            total = total / self.expected_batch  # public: the size of the sample itself is private
        total = total.to(self.engine.device, self.engine.dtype)
        params = self.parameters()
        for name, value in self.engine.unflatten(total).items():
            param = params[name]
            gradient = self.model.place(name, value.clone())
            for hook in list((param._backward_hooks or {}).values()):  # register_hook: of what is released
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if param.grad is not None:
                gradient = gradient + param.grad
            param.grad = gradient
            self._released[param] = (gradient, gradient._version)
            for after in list((param._post_accumulate_grad_hooks or {}).values()):
                after(param)
        return total

    def has_other_gradients(self) -> bool:
        """Whether a parameter has a gradient that is not what was released."""
        for param in self.parameters().values():
            if param.grad is not None and bool(_here(param.grad).any()):  # zeros are those of set_to_none=False
                known = self._released.get(param)
                if known is None or known[0] is not param.grad or known[1] != param.grad._version:
                    return True
        return False

    def _refuse_other_parameters(self) -> None:
        """Raise unless the trainable parameters are those the engine was made for. Others would get no gradient."""
        now = [name for name, param in self.parameters().items() if param.requires_grad]
        if now != list(self.engine.names):
            changed = sorted(set(now) ^ set(self.engine.names))[0]
            raise BudgetError(
                f"parameter {changed!r} was frozen, unfrozen, added or removed after the loop was made, which was "
                "planned for the others: change the module first, then make the loop."
            )


def _here(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process holds."""
    held: Tensor = tensor.to_local() if is_shard(tensor) else tensor
    return held


def epsilon_of(loops: Iterable[Loop], delta: float) -> float:
    """ε of loops together, as if all were on the same people; infinite if one was seeded.

    >>> epsilon_of([], 1e-5)
    0.0
    """
    known = list(loops)
    if not all(loop.is_private for loop in known):
        return math.inf
    relations = {loop.plan.budget.relation for loop in known if loop.plan.budget is not None}
    if len(relations) > 1 or len({loop.plan.unit for loop in known}) > 1:
        raise ValueError(
            "get_epsilon: loops of different relations or privacy units do not add up. Use an engine for each."
        )
    events = [event for event in (loop.event for loop in known) if event is not None]
    return account(composed(events), delta=delta, relation=relations.pop()) if events else 0.0
