"""A training loop of the user's own, made private: the model, the loader and the optimizer share one session.

The loader hands out Poisson samples. In training mode the model returns leaves, so that ``loss.backward()`` stops
at its outputs: no gradient of the data ever reaches a parameter. Before ``optimizer.step()`` the engine sends the
outputs' gradients b back through the recorded pass and makes clipped sums of them: the gradient of fᵢ with respect
to θ is that of ⟨b_i, output_i(θ)⟩. The session adds noise, counts, and refuses what the plan does not hold.
"""

from __future__ import annotations

import copy
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.algorithms.base import Releases
from quietgrad.curators.central import CentralCurator
from quietgrad.curators.session import Drawn
from quietgrad.errors import BudgetError, ExhaustedError, UnprovableError
from quietgrad.objectives.networks.checks import (
    refuse_autocast,
)
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.networks.tape import mapped
from quietgrad.objectives.networks.ways import Recorded
from quietgrad.objectives.people import PeopleRecords
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.budget import Unit
from quietgrad.sampling import FullBatch, Poisson, Sampling, Turns
from quietgrad.torch.call_layout import CallLayout
from quietgrad.torch.clip_rules import ClipRule, FlatClip
from quietgrad.torch.history import History, LoopCost, epsilon_of, origins
from quietgrad.torch.loop_processes import SharedSession, several
from quietgrad.torch.loop_sums import FromOutputs, Piece, not_by_rows, outputs_of, try_calls, versions_of
from quietgrad.torch.loss_replay import Given
from quietgrad.torch.loss_weights import LossWeights
from quietgrad.torch.rows import Owners, Rows, Sample
from quietgrad.torch.shards import Shards

__all__ = ["NO_PROMISE", "OwnLoop", "PrivateLoop"]

NO_PROMISE = 1e9  # ε of a loop that nobody limited: what it costs is told by PrivateLoop.epsilon


@dataclass(frozen=True)
class OwnLoop(Releases):
    """The releases of a loop: for each stretch of equal settings its batches, expected batch size and noise.

    A "method" for :func:`quietgrad.plan`, whose update the user writes.

    >>> OwnLoop(((300, 64, 1.0), (100, 64, 0.5)), clip=1.0).schedule(1000).releases
    400
    """

    stretches: tuple[tuple[int, int, float], ...]
    clip: float | Mapping[str, Any]
    poisson: bool = True
    """Whether batches are Poisson samples; else everybody is in one batch of each epoch, without amplification."""

    name: ClassVar[str] = "own-loop"
    private: ClassVar[bool] = True

    def schedule(self, n_public: int) -> Schedule:
        """One slot per stretch."""
        return Schedule(
            tuple(
                Slot(f"stretch-{k}", self._sampling(batch_size, n_public), count, noise)
                for k, (count, batch_size, noise) in enumerate(self.stretches)
            )
        )

    def _sampling(self, batch_size: int, n_public: int) -> Sampling:
        if self.poisson:
            return Poisson(batch_size / n_public)
        cohorts = -(-n_public // batch_size)
        return Turns(cohorts) if cohorts > 1 else FullBatch()

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        clip = {"clip": self.clip} if isinstance(self.clip, float | int) else dict(self.clip)
        return {"stretches": [list(stretch) for stretch in self.stretches], **clip, "poisson": self.poisson}


class PrivateLoop:
    """What model, loader and optimizer of one loop share: the open session and the outputs since the last step.

    ``is_private`` is false if the loop's randomness was seeded: its noise can then be subtracted.
    """

    def __init__(
        self,
        plan: Plan,
        curator: CentralCurator,
        engine: PerExampleEngine,
        rule: ClipRule,
        loss_reduction: str | None,
        history: History | None = None,
        shards: Shards | None = None,
        name: str = "",
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.rule = rule
        self.weights = LossWeights(loss_reduction)
        self.mean_reduced = self.weights.mean
        self.is_private = not curator.seeded
        self.handed_out = 0  # samples that the loop has seen
        self.total = plan.schedule.releases  # samples it may see
        self.partial = False  # whether more pieces of the sample follow: a step then waits for them
        self.waiting = False  # whether one has
        self.name = name or os.urandom(16).hex()
        self.came_from: set[str] = set()  # loops whose states were loaded into this one
        self.shards = shards
        self.history = History() if history is None else history
        self._session: Any = (
            SharedSession(curator, plan, engine.module, engine.device) if several() else curator.open(plan)
        )
        self.history.add(self)
        self.keep_promise()
        self._records = len(curator.records)
        self._people = curator.records.people if isinstance(curator.records, PeopleRecords) else None
        self._ahead: deque[Drawn] = deque()  # drawn for a loader that reads ahead, and not yet handed out
        self.sample = Sample()  # what is known of the rows last handed out
        self._now: Drawn | None = None  # the sample a step may use; None once it has been used
        self._pieces: list[Piece] = []
        self._engines: dict[str, PerExampleEngine] = {}  # by how the model is called
        self._constants: dict[str, str] = {}  # what is no tensor in calls, by where the tensors are
        self._released: dict[nn.Parameter, tuple[Tensor, int]] = {}

    def __str__(self) -> str:
        assert self.plan.budget is not None
        told = f"{self.handed_out} steps"
        if not self.is_private:
            return f"NOT PRIVATE (seeded), {told}"
        whom = " per person" if self.plan.unit is Unit.PERSON else ""
        return f"({self.epsilon():.4g}, {self.plan.budget.delta:g})-DP{whom}, {self.plan.budget.relation}, {told}"

    def epsilon(self, delta: float | None = None) -> float:
        """ε of the samples handed out so far, at ``delta`` (default: the plan's); infinite if the loop was seeded.

        A sample counts once the loop has it, stepped on or not: whether to skip it may have depended on it. What
        states that were loaded had cost counts too.
        """
        if not self.is_private:
            return math.inf
        assert self.plan.budget is not None
        delta = self.plan.budget.delta if delta is None else delta
        return epsilon_of([self.cost, *self.history.others(self)], delta)

    @property
    def cost(self) -> LoopCost:
        """What the samples handed out so far are accounted as."""
        assert self.plan.budget is not None
        return LoopCost(
            self.name, self.plan.schedule.slots, self.plan.noise_multiplier, self.plan.budget.relation,
            self.is_private, self.handed_out, self.plan.unit,
        )  # fmt: skip

    def load_history(self, data: Any) -> None:
        """A state of another loop comes into this one, and what it cost with it; the promise is still kept."""
        self.history.load(data)
        self.came_from |= origins(data) - {self.name}
        self.history.keep_promises()

    def state(self) -> dict[str, Any]:
        """What leaves with a state of this loop: what it cost, and whose releases it is made of."""
        return {**self.history.to_json(), "of": sorted({self.name, *self.came_from})}

    def keep_promise(self) -> None:
        """Plan no more samples than the budget affords after what states that were loaded had cost."""
        budget = self.plan.budget
        others = self.history.others(self)
        if budget is None or budget.epsilon >= NO_PROMISE or not self.is_private or not others:
            return

        def fits(samples: int) -> bool:
            try:
                return epsilon_of([replace(self.cost, used=samples), *others], budget.delta) <= budget.epsilon
            except UnprovableError:
                return False

        low, high = self.handed_out, self.total
        if fits(high):
            return
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        self.total = low

    def keys(self, number: int) -> RecordKeys:
        """Records of sample ``number``, drawn once, and the secrets they draw random numbers by."""
        while self.handed_out + len(self._ahead) <= number:
            self._ahead.append(self._session.draw(self._slot(self.handed_out + len(self._ahead))))
        return self._keys(self._ahead[number - self.handed_out])

    def _keys(self, drawn: Drawn) -> RecordKeys:
        _, indices, key = self._session.batch(drawn)
        if self._people is not None:
            return RecordKeys.of(key, self._people.groups(indices, key).flat()[0])
        return RecordKeys.of(key, np.arange(self._records) if indices is None else indices)

    def _persons(self, drawn: Drawn) -> Persons | None:
        """Whose each row of a sample is."""
        if self._people is None:
            return None
        _, indices, key = self._session.batch(drawn)
        groups = self._people.groups(indices, key)
        sizes = np.diff(groups.flat()[1])
        return Persons.numbered(np.repeat(np.arange(len(sizes)), sizes), mean=groups.mean)

    def hand_out(self) -> int:
        """The next sample goes to the loop; returns how many records it has."""
        if self.handed_out >= self.total:
            raise BudgetError(self.refusal())
        count = len(self.keys(self.handed_out).indices)
        self._refuse_after_others(0)
        self.history.handed_out(self.name, self.handed_out + 1)
        # Told first and looked at again: of two loops that hand out at once at least one sees the other.
        self._refuse_after_others(self.history.told)
        self._now = self._ahead.popleft()
        self.sample.forget()
        self.sample, self.waiting = Sample(), False
        self.handed_out += 1
        # A forward pass nobody differentiated was an evaluation.
        self._pieces = [piece for piece in self._pieces if piece.has_gradient]
        return count

    def _refuse_after_others(self, told: int) -> None:
        """Stop where others, who went on from the same state meanwhile, have left nothing of the promise."""
        if self.history.grew(told):
            self.keep_promise()
            if self.handed_out >= self.total:
                raise BudgetError(self.refusal())

    def clear(self) -> None:
        """Forget the gradients at outputs: ``zero_grad()``. Those of a sample's earlier pieces wait for its step.

        Outputs whose loss is yet to be differentiated stay: many loops call ``zero_grad()`` just before.
        """
        if not self.waiting:
            self._pieces = [piece for piece in self._pieces if not piece.has_gradient]

    def _engine(self, layout: CallLayout) -> PerExampleEngine:
        """The engine of calls of this kind: each is tried on made-up examples for itself."""
        if self._constants.setdefault(layout.shape, layout.name) != layout.name:
            raise BudgetError(
                "the private model was called with another number, flag or text than before: one that changes from "
                "batch to batch may follow its records, and all rows would depend on it. Give such values as "
                "tensors with a row for each record, or keep them the same in all calls."
            )
        found = self._engines.get(layout.name)
        if found is None:
            found = copy.copy(self.engine)
            found._ways = {}
            self._engines[layout.name] = found
        return found

    def forward(self, args: tuple[Tensor, ...], owners: Owners, layout: CallLayout) -> Any:
        """The module's output for some rows of the current sample, as leaves that are remembered for the step."""
        if self._now is None or owners.draw != self.handed_out - 1:
            raise BudgetError(
                "the private model was given rows of another sample than the loader's last, or of one that a step "
                "was made on: each step must use one fresh sample of the private loader, and only that."
            )
        if self.sample.read:
            raise BudgetError(
                "numbers were made of records of this batch before the private model was called on them (item(), "
                "tolist(), float(), numpy(), an if): what they do to the other rows cannot be followed. Scale and "
                "check records one by one in the data set or in the model; look at losses and accuracies after "
                "the call. The next batch may be trained on."
            )
        refuse_autocast(self.engine.device)
        self._refuse_other_parameters()
        # Copies, here and of the outputs: the step reads both again, and what the loop wrote into its own meanwhile
        # (a mean over the rows, say) would put one record into the contributions of all.
        args = tuple(arg.clone() for arg in args)
        keys = self._keys(self._now).rows(owners.places.numpy())
        engine = self._engine(layout)
        with layout.of(engine.module):
            recorded = self._recorded(engine, args, keys)
            with torch.no_grad():
                output = outputs_of(engine, args, keys) if recorded is None else recorded.output
        given: list[Given] = []

        def leaf(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            if value.dim() < 1 or len(value) != len(keys.indices):
                raise ValueError(not_by_rows(value))
            given.append(Given(value.detach().clone().requires_grad_(), owners.places, leaf=True))
            return Rows.of(given[-1].value, owners, self.sample, given[-1])

        wrapped = mapped(output, leaf)
        state = versions_of(self._params().values())
        self._pieces.append(Piece(args, given, owners, keys, layout, recorded, state))
        return wrapped

    def _recorded(self, engine: PerExampleEngine, args: tuple[Tensor, ...], keys: RecordKeys) -> Recorded | None:
        """A forward pass that needs no second one for the step; of one piece of a sample, so that memory holds."""
        if type(self.rule) is not FlatClip or not len(keys.indices):
            return None
        if any(piece.recorded is not None for piece in self._pieces):
            return None
        if not engine.planned:
            try_calls(engine, args)
        return engine.record(args, keys)

    def write_gradients(self) -> None:
        """Release the noisy clipped sum of the current sample and make it the parameters' gradients."""
        pieces = [piece for piece in self._pieces if piece.has_gradient]
        self._check(pieces)
        assert self._now is not None
        self.waiting = False
        drawn, self._now, self._pieces = self._now, None, []
        theta = self.engine.flatten(self._params())
        multiplier = self._multiplier(drawn.slot)
        query = FromOutputs(self, theta, pieces, multiplier, self._persons(drawn))
        total = torch.as_tensor(self._session.release_drawn(drawn, query))
        if self.handed_out == self.plan.schedule.releases:
            self._session.close("steps")
        expected = self._session.expected_batch(drawn.slot)
        if self.rule.extra:
            self.rule.learn(total[-self.rule.extra :], expected, multiplier)
            total = total[: -self.rule.extra].to(theta)
        if self.mean_reduced:
            # By the public expected size: the size of the sample itself is private.
            total = total / expected
        params = self._stepped()
        for name, value in self.engine.unflatten(total).items():
            gradient = value.clone() if self.shards is None else self.shards.cut(name, value)
            params[name].grad = gradient
            self._released[params[name]] = (gradient, gradient._version)

    def close(self) -> None:
        """End the loop. What it did not use stays spent: when it stopped may have depended on the data."""
        self._session.close("closed by the loop", data_dependent=True)

    @property
    def noise_multiplier(self) -> float:
        """That of the next step, as declared."""
        return self._multiplier(self._slot(min(self.handed_out, self.plan.schedule.releases - 1)))

    @property
    def expected_batch(self) -> float:
        """The public size of the next sample."""
        return float(
            self._session.expected_batch(self._slot(min(self.handed_out, self.plan.schedule.releases - 1)))
        )

    def _multiplier(self, slot: str) -> float:
        return self.plan.schedule[slot].multiplier(self.plan.noise_multiplier)

    def _params(self) -> dict[str, nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def _stepped(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the engine's names."""
        return self._params() if self.shards is None else self.shards.params

    def stepped(self) -> None:
        """The optimizer has stepped: what computes follows what is stepped."""
        if self.shards is not None:
            self.shards.gather()

    def _slot(self, number: int) -> str:
        for slot in self.plan.schedule.slots:
            if number < slot.count:
                return slot.name
            number -= slot.count
        raise ExhaustedError(self.refusal())

    def refusal(self) -> str:
        """Why there is no further sample."""
        spent = f"ε = {self.epsilon():.4g} is spent" if self.is_private else "the loop, seeded, is not private"
        if not self.total:
            return (
                f"no step is left of what was promised: {spent}. Samples that were handed out before an "
                "interruption are not given back. Use the model as it is, or plan a longer loop from the start."
            )
        return (
            f"the {self.total} steps that were planned are made, and {spent}. Stop here, or plan a longer loop "
            "from the start."
        )

    def _check(self, pieces: list[Piece]) -> None:
        if not pieces:
            raise RuntimeError(
                "optimizer.step(): no loss.backward() has reached an output of the private model since the last "
                "step. Call the model that make_private returned, in training mode, on a batch of its loader."
            )
        if self._now is None or any(piece.owners.draw != self.handed_out - 1 for piece in pieces):
            raise BudgetError(
                "optimizer.step(): each step must use one fresh sample of the private loader, and only that. A "
                "second step on a sample, or a step on two samples, is not what was accounted for; for larger "
                "batches raise the loader's batch_size and set micro_batch."
            )
        places = torch.cat([piece.owners.places for piece in pieces])
        if len(set(places.tolist())) < len(places):
            raise BudgetError(
                "optimizer.step(): a record went through the model twice since the last step and would contribute "
                "twice. Call the model once per example and step."
            )
        for piece in pieces:
            for output in piece.outputs:
                if output.value.grad is not None:
                    self.weights.check(output, self.sample.losses)
        refuse_autocast(self.engine.device)
        self._refuse_other_parameters()
        for name, param in self._stepped().items():
            if param.grad is not None and bool(param.grad.any()):  # zeros are those of set_to_none=False
                known = self._released.get(param)
                if known is None or known[0] is not param.grad or known[1] != param.grad._version:
                    raise BudgetError(
                        f"parameter {name!r} has a gradient that did not pass through the private model: of a "
                        "penalty in the loss (use the optimizer's weight_decay), or of unprotected data."
                    )

    def _refuse_other_parameters(self) -> None:
        """The engine trains the parameters it was made for, and no others would get a gradient."""
        trained = {name for name, param in self._stepped().items() if param.requires_grad}
        now = {name: param for name, param in self._params().items() if name in trained}
        if list(now) != self.engine.names:
            changed = sorted(set(now) ^ set(self.engine.names))[0]
            raise BudgetError(
                f"parameter {changed!r} was frozen or unfrozen after make_private, which planned for the others: "
                "set requires_grad first, then call make_private."
            )
        if any(param is not self.engine._params[name] for name, param in now.items()):
            raise BudgetError(
                "the module's parameters were replaced after make_private (load_state_dict(assign=True), or a new "
                "layer): neither the optimizer nor the private loop knows them. Call make_private afterwards."
            )
