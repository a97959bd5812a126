"""``PrivateLoop``: samples and private gradients for a training loop that the user writes.

The loop hands out samples that cannot be read, and writes private gradients into the parameters. With a folder it
is a run that can be interrupted and continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import DEFAULT
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.clipping import Clipping, ClippingName, read_clipping
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.kept import Run, is_kept, open_run
from quietgrad.core.session.opening import Keeping, followed, reopened
from quietgrad.core.session.queries import GradientQuery
from quietgrad.core.session.session import PendingRelease
from quietgrad.core.session.statement import Privacy
from quietgrad.methods.callbacks import Callback, Progress, begin, together
from quietgrad.methods.custom_loop import LoopSampling
from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule
from quietgrad.methods.minimizing import counting, result_of
from quietgrad.methods.result import over
from quietgrad.tables.privacy_units import Combine, PersonRule, with_privacy_unit
from quietgrad.torch.loops.base import Loop, LoopTerms, finite_clip
from quietgrad.torch.loops.distributed import (
    SharedCurator,
    SharedSession,
    agree_on_keeping,
    all_or_none,
    any_of_us,
    broadcast_from_leader,
    broadcast_loop_key,
    is_distributed,
    is_leader,
    read_by_all,
    unwrapped,
)
from quietgrad.torch.loops.shards import ShardedCurator
from quietgrad.torch.loops.streams import read_stream
from quietgrad.torch.loops.whole_module import WholeModule, gathered, load_whole
from quietgrad.torch.loops.wrappers import check_optimizer
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.records import Collate, Multiple, Padding
from quietgrad.torch.networks.usable import LossFunction

LOOP = "loop"  # the kind of these runs
Parameters = Mapping[str, nn.Parameter]


def _kept_run(folder: str | Path | None, terms: LoopTerms, every: float) -> Run | None:
    """Return the interrupted loop that is kept in ``folder``, or ``None`` if a new one begins."""
    if folder is None:
        return None
    if terms.adds_no_noise:
        raise ValueError(
            "folder: a loop without noise (noise_multiplier=0) is for debugging and is not kept; leave it out."
        )
    if not terms.has_end:
        raise ValueError("folder: a loop that is kept needs its length beforehand; give epochs or steps.")
    if over(folder) is not None:
        raise DataError(
            f"{folder}: the loop that was kept here is over: quietgrad.load reads its result. For a new loop make "
            "the same call again."
        )
    if not is_kept(folder):
        return None
    if terms.seed is not None:
        raise ValueError("seed: the loop that is kept in this folder is private; leave seed out.")
    return open_run(folder, kind=LOOP, ledger=terms.ledger, every=every)


class _Standing(NamedTuple):
    """State of a run that the leader resumes, as the other processes need it."""

    plan: Plan
    used: dict[str, int]
    state: Any
    n_is_declared: bool


def _found(folder: str | Path | None, terms: LoopTerms, every: float) -> Run | None:
    """The kept run, if it goes on here: of several processes the leader alone opens it, or all raise."""
    if not is_distributed() or folder is None:
        return _kept_run(folder, terms, every)
    why = "the leading process cannot go on with the loop in this folder"
    return all_or_none(lambda: _kept_run(folder, terms, every) if is_leader() else None, why)


def _leaders_run(kept: Run | None) -> _Standing | None:
    """Return the state of the leader's kept run on all processes, or ``None`` if a new run begins."""

    def standing() -> _Standing | None:
        if kept is None or not kept.resumed:
            return None
        return _Standing(kept.plan, dict(kept._used), kept.state, bool(kept.header.settings["n_is_declared"]))

    return broadcast_from_leader(standing)


def _agree(kept: Run, settings: Mapping[str, Any], terms: LoopTerms, clip: float) -> None:
    """Raise ``DataError`` unless what the call says is what the folder says."""
    plan = kept.plan
    kept.agree_on_account(None if terms.account == DEFAULT else terms.account, terms.cap)
    for what in ("parameters", "optimizer", "people"):
        kept.agree(what, settings[what] or "none", kept.header.settings[what] or "none")
    said = terms.releases(plan.n_public, clip).config()
    for what in sorted({*said, *plan.config}):
        kept.agree(what, [said.get(what)], [plan.config.get(what)])
    assert plan.budget is not None
    kept.agree("budget", terms.budget.to_json(), plan.budget.to_json())
    kept.agree("noise_multiplier", terms.noise_multiplier, plan.noise_multiplier)
    kept.agree("n_public", terms.n_public, plan.n_public)


def _state(params: Parameters, optimizer: Optimizer | None) -> dict[str, Any]:
    """Where a loop stands between two samples: parameters, gradients that wait for a step, optimizer."""
    return {
        "params": {name: param.detach() for name, param in params.items()},
        "grads": {name: param.grad for name, param in params.items() if param.grad is not None},
        "optimizer": None if optimizer is None else optimizer.state_dict(),
    }


class PrivateBatch:
    """A sample of a :class:`PrivateLoop`: who is in it and what they hold is read by the loop alone."""

    __slots__ = ("_drawn", "_loop")

    def __init__(self, loop: PrivateLoop, drawn: PendingRelease) -> None:
        self._loop: PrivateLoop = loop
        self._drawn: PendingRelease | None = drawn

    def __repr__(self) -> str:
        return "PrivateBatch()"

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise BudgetError(
            "len(batch): the size of a sample is secret, and would tell who is in it. Use loop.expected_batch, "
            "which is public."
        )

    def __iter__(self) -> NoReturn:
        raise BudgetError(
            "a PrivateBatch cannot be unpacked or read: the loop reads its records. Give it to loop.step(batch) or "
            "loop.backward(batch); model and loss are those that the loop was made with. For `x, y = batch` use "
            "qt.make_private."
        )

    def __getitem__(self, _: object) -> NoReturn:
        self.__iter__()

    def to(self, *_: object, **__: object) -> PrivateBatch:
        """The batch itself: its records go to the model's device when the loop reads them."""
        return self

    cuda = cpu = to


class PrivateLoop(Loop):
    """A private training loop: it draws samples and computes private gradients.

    Args:
        model: any torch module; what it does with a record is that record's own, because it is called for one.
        loss: loss(output, target) for records (x, target), ``loss(model, *record)`` or ``loss(model, **record)``:
            written as for a batch, called with batches of one; returns one number.
        data: a map-style data set, a ``TensorDataset``, or tensors. An ``IterableDataset`` is read once into
            memory, to its end; under replace-one ``n_public`` cuts it.
        optimizer: steps the model's parameters in :meth:`step`; not needed for :meth:`backward`.
        batch_size: the expected size of a sample; of people with ``person``.
        max_grad_norm: C, the L2 bound on what one record, or person, adds.
        clipping: as in :class:`quietgrad.DPSGD`: ``"flat"``, ``"automatic"``, ``"per-layer"``, or a rule.
        noise_schedule: what the noise multiplier is multiplied by in each epoch, such as
            ``qt.ExponentialNoise(gamma=0.97)``: part of the plan, and priced with it before the first step.
        clip_schedule: likewise of C, such as ``qt.StepGradClip(step_size=5, gamma=0.5)``. It changes no ε.
        budget: the guarantee; the noise follows from it and from ``epochs`` or ``steps``.
        noise_multiplier: fixes the noise instead of ``budget``; ``delta`` and ``relation`` say what :attr:`privacy`
            is about.
        epochs: length of the loop in epochs. With a noise multiplier and no ledger it may be left out.
        steps: length of the loop in steps, instead of ``epochs``.
        sampling: ``"poisson"``; ``"random-allocation"``: every record is in one secret sample of each epoch, drawn
            independently; ``"turns"``: likewise, accounted without amplification; ``"single-pass"``: every record
            once in the whole loop, at the cost of one release.
        person, combine, records_per_person, views, collate_fn, pad: as in :func:`quietgrad.torch.fit`.
        n_public, ledger, account, cap, seed: as in :func:`quietgrad.minimize`.
        folder: keep the loop here. The same call goes on with it after an interruption, from the parameters and the
            state of ``optimizer`` that were saved last; :attr:`handed_out` says how many samples it has had. In the
            end the result is saved here. Of several processes the leading one (rank 0) keeps it.
        checkpoint_seconds: between saves to ``folder``, which are made between two samples.
        sharded: on several processes, each holds its own records in ``data``, and no record lies on two. How many
            each holds is public, and they are paid for once, as one data set. Without it all hold the same.
        callbacks: called with a :class:`~quietgrad.methods.callbacks.Progress` after each :meth:`step`; a stop by
            one of them costs the whole plan.
        micro_batch: records per pass.
        memory_budget: bytes of per-record gradients kept at a time.

    >>> import torch
    >>> x, model = torch.randn(300, 2), nn.Linear(2, 2)
    >>> data, optimizer = (x, (x[:, 0] > 0).long()), torch.optim.SGD(model.parameters(), lr=0.5)
    >>> loop = PrivateLoop(model, nn.CrossEntropyLoss(), data, optimizer=optimizer, batch_size=30, epochs=1,
    ...                    max_grad_norm=1.0, budget=Budget(2.0, 1e-5), n_public=300)
    >>> for batch in loop:
    ...     loop.step(batch)
    >>> str(loop.privacy)
    '(1.99..., 1e-05)-DP, add-remove, proved by pld-poisson'
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        data: object,
        *,
        batch_size: int,
        max_grad_norm: float,
        clipping: ClippingName | Clipping = "flat",
        noise_schedule: NoiseSchedule | None = None,
        clip_schedule: ClipSchedule | None = None,
        optimizer: Optimizer | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        relation: str | Relation = Relation.ADD_REMOVE,
        epochs: int | None = None,
        steps: int | None = None,
        sampling: LoopSampling = "poisson",
        person: object = None,
        combine: Combine = "mean",
        records_per_person: int | None = None,
        views: int = 1,
        sharded: bool = False,
        collate_fn: Collate | None = None,
        pad: int | Multiple | Padding | None = None,
        n_public: int | None = None,
        micro_batch: int | None = None,
        memory_budget: float = 512e6,
        ledger: Ledger | str | Path | None = None,
        account: str = "default",
        cap: Budget | None = None,
        seed: int | None = None,
        callbacks: Sequence[Callback] = (),
        folder: str | Path | None = None,
        checkpoint_seconds: float = 10.0,
    ) -> None:
        module, clip = unwrapped(model), finite_clip(max_grad_norm)
        shards = WholeModule(module)
        objective = ModuleObjective(
            module, loss, micro_batch=micro_batch, memory_budget=memory_budget, collate_fn=collate_fn, pad=pad,
            views=views,
        )  # fmt: skip
        objective.keeps_frozen = not shards.in_shards
        engine = objective.engine
        engine.parameter_groups(read_clipping(clipping))
        if optimizer is not None:
            check_optimizer(optimizer, shards.parameters().values())
        if sharded and person is not None:
            raise ValueError(
                "sharded, person: a person's records may lie on several processes, and nothing could bound them "
                "together. Bring each person's records to one process as one record, or leave sharded out."
            )
        terms = LoopTerms(
            batch_size=batch_size, epsilon=None if budget is None else budget.epsilon,
            delta=delta if budget is None else budget.delta, noise_multiplier=noise_multiplier,
            relation=relation if budget is None else budget.relation, epochs=epochs, steps=steps,
            sampling=sampling, n_public=n_public, ledger=ledger, account=account,
            cap=cap, seed=seed, clipping=read_clipping(clipping), noise_schedule=noise_schedule,
            clip_schedule=clip_schedule, curator=ShardedCurator if sharded else
            SharedCurator, unit=PrivacyUnit.RECORD if person is None else PrivacyUnit.PERSON,
        )  # fmt: skip
        records = read_by_all(lambda: read_stream(data, n_public, terms.relation))
        asked = with_privacy_unit(objective, records, person, PersonRule(combine, records_per_person))
        self.objective, self.optimizer = objective, optimizer
        self._tell = together(callbacks) if callbacks else None
        # Some processes may have callbacks and others none.
        self._reports = any_of_us(bool(callbacks), engine.device) if is_distributed() else bool(callbacks)
        self._folder = None if folder is None or not is_leader() else Path(folder)
        self._trained = {name: param for name, param in shards.parameters().items() if param.requires_grad}
        said = {
            "parameters": {name: list(param.shape) for name, param in self._trained.items()},
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "people": counting(asked[0]),
            "n_is_declared": terms.n_is_declared,
        }
        agree_on_keeping(folder)
        kept = _found(folder, terms, checkpoint_seconds)
        standing = _leaders_run(kept) if folder is not None and is_distributed() else None

        def tell_first(*_: object) -> None:
            # Before anything is reserved, a count of the records included; the length of epochs follows from that.
            begin(self._tell, steps or 0, engine.flatten(dict(module.named_parameters())), private=seed is None)

        whole = ExitStack()
        try:
            whole.enter_context(shards.whole())
            if kept is not None:
                tell_first()
                _agree(kept, said, terms, clip)
                said = {**kept.header.settings}
                releases = terms.releases(kept.plan.n_public, clip)
                kind = terms.curator if is_distributed() else CentralCurator
                active = reopened(kept, *asked, releases, key=broadcast_loop_key(), curator=kind)
            elif standing is not None:
                releases = terms.releases(standing.plan.n_public, clip)
                active = followed(
                    standing.plan, standing.used, *asked, releases, key=broadcast_loop_key(), curator=terms.curator
                )
                said["n_is_declared"] = standing.n_is_declared
            else:
                keeping = None
                now = {} if folder is None else gathered(_state(self._trained, optimizer))
                if folder is not None and is_leader():
                    keeping = Keeping(folder, LOOP, lambda *_: now, said, checkpoint_seconds)
                active = terms.open(*asked, clip, first=tell_first, keeping=keeping)
                kept = active.kept
            declared = bool(said["n_is_declared"])
            super().__init__(active, terms, engine, clip, n_is_declared=declared, model=shards)
            if folder is not None and isinstance(active.session, SharedSession):
                active.session.leader_draws = True
            if standing is not None or (kept is not None and kept.resumed):
                state = kept.state if kept is not None else standing.state if standing is not None else {}
                shards.assign({name: state["params"][name] for name in self._trained})
                for name, param in self._trained.items():
                    grad = state["grads"].get(name)
                    param.grad = None if grad is None else shards.place(name, grad.to(param.device, param.dtype))
                if optimizer is not None:
                    load_whole(optimizer, state["optimizer"])
        except Exception:
            if kept is not None:
                (kept.close if kept.resumed else kept.discard)()
            raise
        finally:
            whole.close()
        if shards.in_shards:
            self.let_go_of_tensors()
        self._kept = kept
        self._keeps = folder is not None  # on every process

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[PrivateBatch]:
        """All samples that are left."""
        if self.handed_out >= self.total:
            raise BudgetError(self.refusal())
        return self._until(self.total)

    def epochs(self) -> Iterator[Iterator[PrivateBatch]]:
        """The samples that are left, one epoch after the other."""
        if self.handed_out >= self.total:
            raise BudgetError(self.refusal())
        return self._epochs()

    def _epochs(self) -> Iterator[Iterator[PrivateBatch]]:
        while self.handed_out < self.total:
            yield self._until((self.handed_out // self.epoch_length + 1) * self.epoch_length)

    def _until(self, end: int) -> Iterator[PrivateBatch]:
        while self.handed_out < min(end, self.total):
            if self._is_due():
                self.save()
            yield PrivateBatch(self, self.draw())
        if self.handed_out >= self.total:  # and what the loop did with the last one is done
            self._finish()

    def _is_due(self) -> bool:
        here = self._kept is not None and self._kept.due
        # Of shards every process has its own: all take part when the leader saves.
        return broadcast_from_leader(lambda: here) if self._keeps and self.model.in_shards else here

    def save(self) -> None:
        """Save the state of a loop with a folder, between two samples.

        All processes call it.
        """
        if self._folder is None and not (self._keeps and self.model.in_shards):
            return
        state = gathered(_state(self._trained, self.optimizer))
        if self._kept is not None and self._folder is not None:
            self._kept.save(state, self._session, now=True)

    def pause(self) -> None:
        """Save the state of the loop and release its folder.

        The same call continues the loop, in this process or another.
        """
        if self.paused:
            return
        if not self._keeps or (is_leader() and self._kept is None):
            raise ValueError("loop.pause: the loop is not kept; make it with folder=, and without a seed.")
        self.save()
        self.let_go()

    def let_go(self) -> None:
        """Release the loop's folder, if it has one.

        The same call continues from what was saved last.
        """
        if self._kept is not None and self._folder is not None:
            self._kept.close()
        elif is_leader() or not self._keeps:
            return
        self._folder, self._keeps, self.total, self.paused = None, False, self.handed_out, True

    def refusal(self) -> str:
        return "the loop was paused: make it again with the same folder." if self.paused else super().refusal()

    def close(self, *, data_dependent: bool = True) -> Privacy:
        """End the loop and say what it costs. A loop with a folder also saves its result."""
        if self.paused:  # another process may have gone on, and only that one knows what it released
            raise BudgetError(self.refusal())
        if self.handed_out < self.plan.schedule.releases:
            super().close(data_dependent=data_dependent)
        self._finish()
        return self.privacy

    def _finish(self) -> None:
        """Save the result of a loop with a folder, once."""
        keeps, self._keeps = self._keeps, False
        if self._folder is None and not (keeps and self.model.in_shards):
            return
        with self.whole():
            params = self.point()
        if self._folder is None:
            return
        if self._spent is None:
            self._spent = self._session.close("steps")
        params = params.float() if params.dtype == torch.bfloat16 else params  # which numpy does not know
        result = result_of(self._session, params, self.privacy, self._spent.reason)
        if self._kept is None:  # seeded, or paid by no ledger
            result.save(self._folder)
        else:
            self._kept.finish(result)
        self._folder = None

    def backward(self, batch: PrivateBatch) -> Tensor:
        """Add the private gradient of a sample to the parameters' ``grad``.

        It is also returned, as one vector.

        The model is run as it is: in training or evaluation mode, at the parameters that it has.
        """
        if not isinstance(batch, PrivateBatch) or batch._loop is not self:
            raise TypeError("loop.backward(batch): give it a batch that this loop handed out.")
        if batch._drawn is None:
            raise BudgetError(
                "this batch was stepped on already: each sample serves one step. Take the next one of the loop."
            )
        drawn, batch._drawn = batch._drawn, None
        with self.whole():
            return self.release(drawn, GradientQuery(self.point(), self.rule_of(drawn).clip, self.clipping))

    def step(self, batch: PrivateBatch) -> None:
        """:meth:`backward`, ``optimizer.step()`` and ``optimizer.zero_grad()``."""
        if self.optimizer is None:
            raise ValueError("loop.step: the loop was made without an optimizer; give optimizer=, or use backward.")
        gradient = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self._reports:
            return
        done = self.handed_out >= self.total
        with self.whole():
            point = self.point()
        progress = Progress(
            self.handed_out, self.handed_out, self.plan.schedule.releases, point, gradient, done=done,
            spent=lambda: self.epsilon() if self.is_private else None, plan=self.plan,
        )  # fmt: skip
        if self._tell is not None:
            self._tell(progress)
        # One process that went on alone would wait for the others.
        stops = any_of_us(progress.stopped, self.engine.device) if is_distributed() else progress.stopped
        if stops and not done:
            self.close()
