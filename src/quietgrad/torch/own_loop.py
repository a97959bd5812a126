"""A training loop of the user's own, made private: the model, the loader and the optimizer share one session.

The loader hands out Poisson samples. In training mode the model returns leaves, so that ``loss.backward()`` stops
at its outputs: no gradient of the data ever reaches a parameter. Before ``optimizer.step()`` the engine sends the
outputs' gradients b back through the recorded pass and makes clipped sums of them: the gradient of fᵢ with respect
to θ is that of ⟨b_i, output_i(θ)⟩. The session adds noise, counts, and refuses what the plan does not hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.algorithms.base import Releases
from quietgrad.curators.central import CentralCurator
from quietgrad.curators.session import Drawn
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.objectives.base import Batch, NoRegularizer, Rule
from quietgrad.objectives.networks.checks import (
    made_up,
    refuse_autocast,
    refuse_changed_buffers,
    refuse_mixing_layers,
    refuse_other_types,
)
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.examples import bytes_of, leaves_of, read_record
from quietgrad.objectives.networks.module import private_log
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.randomness import RecordKeys, preserved
from quietgrad.objectives.networks.tape import mapped, select, tensors_of
from quietgrad.objectives.networks.ways import Recorded, joined
from quietgrad.objectives.people import PeopleRecords
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.budget import Unit
from quietgrad.privacy.events import Event
from quietgrad.sampling import Poisson
from quietgrad.torch.rows import Owners, Rows, Sample, plain

__all__ = ["OutputGradients", "OwnLoop", "PrivateLoop", "pairing"]


@dataclass(frozen=True)
class OwnLoop(Releases):
    """The releases of a loop: for each stretch of equal settings its batches, expected batch size and noise.

    A "method" for :func:`quietgrad.plan`, whose update the user writes.

    >>> OwnLoop(((300, 64, 1.0), (100, 64, 0.5)), clip=1.0).schedule(1000).releases
    400
    """

    stretches: tuple[tuple[int, int, float], ...]
    clip: float

    name: ClassVar[str] = "own-loop"
    private: ClassVar[bool] = True

    def schedule(self, n_public: int) -> Schedule:
        """One slot per stretch."""
        return Schedule(
            tuple(
                Slot(f"stretch-{k}", Poisson(batch_size / n_public), count, noise)
                for k, (count, batch_size, noise) in enumerate(self.stretches)
            )
        )

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return {"stretches": [list(stretch) for stretch in self.stretches], "clip": self.clip}


class PrivateLoop:
    """What model, loader and optimizer of one loop share: the open session and the outputs since the last step.

    ``is_private`` is false if the loop's randomness was seeded: its noise can then be subtracted.
    """

    def __init__(
        self,
        plan: Plan,
        curator: CentralCurator,
        engine: PerExampleEngine,
        clip: float,
        mean_reduced: bool,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.clip = clip
        self.mean_reduced = mean_reduced
        self.is_private = not curator.seeded
        self.handed_out = 0  # samples that the loop has seen
        self._session = curator.open(plan)
        self._records = len(curator.records)
        self._people = curator.records.people if isinstance(curator.records, PeopleRecords) else None
        self._ahead: deque[Drawn] = deque()  # drawn for a loader that reads ahead, and not yet handed out
        self.sample = Sample()  # what is known of the rows last handed out
        self._now: Drawn | None = None  # the sample a step may use; None once it has been used
        self._pieces: list[_Piece] = []
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

        A sample counts once the loop has it, stepped on or not: whether to skip it may have depended on it.
        """
        from quietgrad.privacy.accounting import account

        if not self.is_private:
            return math.inf
        event = self.event()
        if event is None:
            return 0.0
        budget = self.plan.budget
        assert budget is not None
        return account(event, delta=budget.delta if delta is None else delta, relation=budget.relation)

    def event(self) -> Event | None:
        """What the samples handed out so far are accounted as; ``None`` before the first."""
        if not self.handed_out:
            return None
        left, counts = self.handed_out, {}
        for slot in self.plan.schedule.slots:
            counts[slot.name] = min(left, slot.count)
            left -= counts[slot.name]
        return self.plan.event_of(counts)

    @property
    def total(self) -> int:
        """Samples the plan allows."""
        return self.plan.schedule.releases

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
        count = len(self.keys(self.handed_out).indices)
        self._now = self._ahead.popleft()
        self.sample = Sample()
        self.handed_out += 1
        # A forward pass nobody differentiated was an evaluation.
        self._pieces = [piece for piece in self._pieces if piece.has_gradient]
        return count

    def clear(self) -> None:
        """Forget the outputs: ``zero_grad()``."""
        self._pieces = []

    def forward(self, args: tuple[Tensor, ...], owners: Owners) -> Any:
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
        keys = self._keys(self._now).rows(owners.places.numpy())
        recorded = self._recorded(args, keys)
        with torch.no_grad():
            output = outputs_of(self.engine, args, keys) if recorded is None else recorded.output
        leaves: list[Tensor] = []

        def leaf(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            if value.dim() < 1 or len(value) != len(keys.indices):
                raise ValueError(
                    f"the model returned shape {tuple(value.shape)} for a batch of examples: they must come first."
                )
            leaves.append(value.detach().requires_grad_())
            return Rows.of(leaves[-1], owners, self.sample, told=True)

        wrapped = mapped(output, leaf)
        state = _state(self._params().values(), tensors_of((args, output))) if recorded is not None else ()
        self._pieces.append(_Piece(args, leaves, owners, keys, recorded, state))
        return wrapped

    def _recorded(self, args: tuple[Tensor, ...], keys: RecordKeys) -> Recorded | None:
        """A forward pass that needs no second one for the step; of one piece of a sample, so that memory holds."""
        if not len(keys.indices) or any(piece.recorded is not None for piece in self._pieces):
            return None
        if not self.engine.planned:
            _plan(self.engine, args)
        return self.engine.record(args, keys)

    def write_gradients(self) -> None:
        """Release the noisy clipped sum of the current sample and make it the parameters' gradients."""
        pieces = [piece for piece in self._pieces if piece.has_gradient]
        self._check(pieces)
        assert self._now is not None
        drawn, self._now, self._pieces = self._now, None, []
        theta = self.engine.flatten(self._params())
        query = _FromOutputs(self, theta, pieces, self._persons(drawn))
        total = self._session.release_drawn(drawn, query)
        if self.handed_out == self.total:
            self._session.close("steps")
        if self.mean_reduced:
            # By the public expected size: the size of the sample itself is private.
            total = total / self._session.expected_batch(drawn.slot)
        params = self._params()
        for name, value in self.engine.unflatten(total).items():
            gradient = value.clone()
            params[name].grad = gradient
            self._released[params[name]] = (gradient, gradient._version)

    def close(self) -> None:
        """End the loop. What it did not use stays spent: when it stopped may have depended on the data."""
        self._session.close("closed by the loop", data_dependent=True)

    def _params(self) -> dict[str, nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def _slot(self, number: int) -> str:
        for slot in self.plan.schedule.slots:
            if number < slot.count:
                return slot.name
            number -= slot.count
        raise ExhaustedError(self.refusal())

    def refusal(self) -> str:
        """Why there is no further sample."""
        spent = f"ε = {self.epsilon():.4g} is spent" if self.is_private else "the loop, seeded, is not private"
        return (
            f"the {self.total} steps that were planned are made, and {spent}. Stop here, or plan a longer loop "
            "from the start."
        )

    def _check(self, pieces: list[_Piece]) -> None:
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
        refuse_autocast(self.engine.device)
        self._refuse_other_parameters()
        for name, param in self._params().items():
            if param.grad is not None:
                known = self._released.get(param)
                if known is None or known[0] is not param.grad or known[1] != param.grad._version:
                    raise BudgetError(
                        f"parameter {name!r} has a gradient that did not pass through the private model: of a "
                        "penalty in the loss (use the optimizer's weight_decay), or of unprotected data."
                    )

    def _refuse_other_parameters(self) -> None:
        """The engine trains the parameters it was made for, and no others would get a gradient."""
        now = {name: param for name, param in self._params().items() if param.requires_grad}
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


@dataclass(eq=False)
class _Piece:
    """One forward pass: inputs, output leaves, whose rows they are, and the secrets its dropout masks came from."""

    args: tuple[Tensor, ...]
    leaves: list[Tensor]
    owners: Owners
    keys: RecordKeys
    recorded: Recorded | None = None
    state: tuple[int, ...] = ()  # of what the recording depends on: a change in place makes it another function's

    @property
    def has_gradient(self) -> bool:
        return any(leaf.grad is not None for leaf in self.leaves)


class _FromOutputs:
    """Σ clip_C(∇fᵢ(θ)) from the gradients that arrived at the outputs."""

    def __init__(
        self, loop: PrivateLoop, theta: Tensor, pieces: list[_Piece], persons: Persons | None = None
    ) -> None:
        self.loop = loop
        self.theta = theta
        self.pieces = pieces
        self.persons = persons

    @property
    def bound(self) -> float:
        return self.loop.clip

    def dim(self, records: Any) -> int:
        return self.loop.engine.dim

    def sum_into(self, objective: Any, batch: Batch, out: Tensor) -> None:
        engine, rule = self.loop.engine, Rule.gradient(self.loop.clip)
        if not all(bool(norms.isfinite().all()) for norms in list(self._sums(engine, rule, out))):
            private_log.info("contributions of a release were not finite and counted as zero")

    def _sums(self, engine: PerExampleEngine, rule: Rule, out: Tensor) -> Iterator[Tensor]:
        """Everyone once: who is in one piece from that piece, others from all theirs before they are clipped."""
        if self.persons is None:
            for piece in self.pieces:
                if not self._add_recorded(piece, out):
                    yield engine.add((self.theta,), piece.args, self._grads(piece), rule, out, piece.keys)
            return
        factors = self.persons.factors
        owners = [self.persons.owners[piece.owners.places.numpy()] for piece in self.pieces]
        everyone, counts = np.unique(np.concatenate([np.unique(own) for own in owners]), return_counts=True)
        several = everyone[counts > 1]
        for piece, own in zip(self.pieces, owners, strict=True):
            rows = np.flatnonzero(~np.isin(own, several))
            if not len(rows):
                continue
            people, number = np.unique(own[rows], return_inverse=True)
            whose = Persons(number.reshape(-1), factors[people])
            if len(rows) < len(own) or not self._add_recorded(piece, out, whose):
                yield engine.add((self.theta,), *self._rows(piece, rows), rule, out, piece.keys.rows(rows), whose)
        for person in several.tolist():
            whole = engine.nothing(rule)
            for piece, own in zip(self.pieces, owners, strict=True):
                if len(rows := np.flatnonzero(own == person)):
                    part = self._rows(piece, rows)
                    engine.add_unclipped((self.theta,), *part, rule, whole, piece.keys.rows(rows))
            yield engine.add_whole(whole, factors[person], rule, out)

    def _grads(self, piece: _Piece) -> tuple[Tensor, ...]:
        # A mean over the piece's examples is undone by its own length, whatever that is.
        scale = float(len(piece.owners.places)) if self.loop.mean_reduced else 1.0
        return tuple(
            torch.zeros_like(leaf) if leaf.grad is None else plain(leaf.grad) * scale for leaf in piece.leaves
        )

    def _rows(self, piece: _Piece, rows: Any) -> tuple[Any, Any]:
        where = torch.from_numpy(rows)
        return select(piece.args, where), select(self._grads(piece), where)

    def _add_recorded(self, piece: _Piece, out: Tensor, persons: Persons | None = None) -> bool:
        recorded, piece.recorded = piece.recorded, None
        if recorded is None:
            return False
        loop = self.loop
        if piece.state != _state(loop._params().values(), tensors_of((piece.args, recorded.output))):
            return False
        return loop.engine.add_recorded(recorded, self._grads(piece), loop.clip, out, persons)


def _state(params: Iterable[Tensor], tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in (*params, *tensors))


def outputs_of(engine: PerExampleEngine, args: tuple[Tensor, ...], keys: RecordKeys) -> Any:
    """The module's output, drawn as the gradient will be; in passes of the engine's micro-batch."""
    count = len(keys.indices)
    if count == 0:
        return engine.module(*args)
    if not engine.planned:
        _plan(engine, args)
    way = engine.way(args, ())
    size = engine.micro_batch or count
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    return joined([way.outputs(tuple(arg[part] for arg in args), keys.rows(part)) for part in parts])


def _plan(engine: PerExampleEngine, args: tuple[Tensor, ...]) -> None:
    """Try the module on made-up examples: their outputs must come first, and be their own."""
    made, _ = made_up(args, args, 0)
    assert isinstance(made, tuple)
    tried: list[Any] = []

    def run() -> None:
        try:
            tried.extend(engine.module(*select(made, slice(0, count))) for count in (3, 4))
        except (RuntimeError, TypeError) as error:
            refuse_other_types(engine.module, made, error)
            raise

    refuse_mixing_layers(engine.module)
    with preserved(), torch.no_grad():
        refuse_changed_buffers(engine.module, run)
    for count, output in zip((3, 4), tried, strict=True):
        if any(t.dim() < 1 or len(t) != count for t in tensors_of(output) if t.is_floating_point()):
            raise ValueError("the model's outputs must have examples first (batch_first), one row per example.")
    engine.way(made, tuple(t for t in tensors_of(tried[1]) if t.is_floating_point()))


def pairing(output: Any, grads: tuple[Tensor, ...]) -> Tensor:
    """⟨b_i, output_i⟩ for each example: its gradient in θ is that of the loss whose output gradients are b."""
    outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    products = [(o * g).reshape(len(o), -1).sum(1) for o, g in zip(outputs, grads, strict=True)]
    return torch.stack(products).sum(0)


@dataclass(frozen=True, eq=False)
class LoopRecords:
    """The records of a loop: counted, and known to a ledger by their content; only the loader reads them."""

    dataset: Any
    dim: int

    def __len__(self) -> int:
        return len(self.dataset)

    def contents(self) -> Iterator[bytes | memoryview]:
        """All that is known here of what a sum depends on."""
        return self.fingerprint_parts()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The records as bytes, read as if nothing were drawn for them."""
        with preserved():
            for index in range(len(self)):
                for value in leaves_of(read_record(self.dataset, index, 0)):
                    yield from bytes_of(value)


class OutputGradients:
    """The objective of a loop: its records are counted here and read by the loader."""

    def __init__(self, engine: PerExampleEngine) -> None:
        self.engine = engine
        self.regularizer = NoRegularizer()
        self.silent_batches = False

    def prepare(self, data: Any) -> LoopRecords:
        """The data set, whatever its samples are; the loader has been checked."""
        return LoopRecords(data, self.engine.dim)

    def initial(self, records: Any) -> Tensor:
        """The module's parameters."""
        return self.engine.flatten(dict(self.engine.module.named_parameters()))
