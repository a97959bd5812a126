"""Private training of a torch module by any algorithm of quietgrad: :func:`fit` and :func:`resume`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from quietgrad import methods
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.errors import BudgetError, DataError, SettingError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.clipping import Clipping, ClippingName, read_clipping
from quietgrad.core.session.kept import read_run
from quietgrad.core.session.objectives import Regularizer
from quietgrad.core.session.opening import Terms
from quietgrad.methods.base import Algorithm
from quietgrad.methods.callbacks import Callback, Progress, together
from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule
from quietgrad.methods.minimizing import check_people, progress_bar
from quietgrad.methods.result import Result
from quietgrad.tables.privacy_units import Combine, PersonRule, with_privacy_unit
from quietgrad.torch.loops.distributed import (
    all_or_none,
    any_of_us,
    broadcast_from_leader,
    is_distributed,
    is_leader,
    read_by_all,
    unwrapped,
)
from quietgrad.torch.loops.shared_fit import SharedFit
from quietgrad.torch.loops.streams import read_stream
from quietgrad.torch.loops.whole_module import WholeModule
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.records import Collate, Multiple, Padding
from quietgrad.torch.networks.usable import Errors, LossFunction, modes_kept

log = logging.getLogger("quietgrad")

Evaluate = Callable[[nn.Module], Mapping[str, float]]
Stop = Callable[[Progress], bool]

_REPORTS = 20  # reports of a run if `every` is not given


def fit(
    model: nn.Module,
    loss_fn: LossFunction,
    train_set: object,
    algorithm: Algorithm,
    *,
    budget: Budget | None,
    person: object = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    views: int = 1,
    noise_multiplier: float | None = None,
    clipping: ClippingName | Clipping | None = None,
    noise_schedule: NoiseSchedule | None = None,
    clip_schedule: ClipSchedule | None = None,
    regularizer: Regularizer | None = None,
    evaluate: Evaluate | None = None,
    every: int | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
    progress: bool = True,
    ledger: Ledger | str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    n_public: int | None = None,
    records_public: int | None = None,
    folder: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    micro_batch: int | None = None,
    memory_budget: float = 256e6,
    collate_fn: Collate | None = None,
    pad: int | Multiple | Padding | None = None,
    seed: int | None = None,
    errors: Errors = "zero",
) -> Result:
    """Train ``model`` privately and leave the trained parameters in it.

    The arguments are listed in four groups: data, privacy, training, resources.

    Args:
        model: Any module. It is called with one record at a time; BatchNorm in training mode is refused.
        loss_fn: ``loss(output, target)``, or ``loss(model, *record)`` if its first parameter is ``model``. It is
            written as for a batch and called with batches of one, such as ``nn.CrossEntropyLoss()``.
        train_set: A map-style data set of (x, y), a ``TensorDataset``, or ``(X, y)``. An ``IterableDataset`` is
            read once into memory, to its end; under replace-one ``n_public`` cuts it.
        collate_fn: Makes what model and loss take from a list with **one** sample.
        pad: Pads each record by its own length: to a public length, or to ``qt.Multiple(64)``; see ``qt.Padding``.
            Records of one shape run together, so few shapes are fast.
        views: How often each record of a sample is read and passed through the model, with new random numbers for
            augmentation and dropout. The mean of these gradients is clipped. It costs time and no privacy.
        person: The person of each record: one id per record (a list, an array, a column, a tensor) or a function of
            the record's number. The privacy unit is then a person; ``batch_size`` and n count people.
        combine: ``"mean"``: every person counts once; ``"sum"``: records count, clipped as a whole.
        records_per_person: Largest number of a person's records used in one release.
        budget: (ε, δ) and the neighbouring relation. ``None`` trains without noise, and the result says **not
            private**.
        noise_multiplier: Fixes the noise instead of calibrating it. A run that would exceed ``budget`` is refused.
        clipping: How a gradient is brought to a length of at most C: ``"flat"``, ``"automatic"``, ``"per-layer"``
            or a rule, in the place of the algorithm's own.
        noise_schedule, clip_schedule: What noise and C are multiplied by in each epoch of ⌈n ÷ batch_size⌉ steps,
            such as ``qt.ExponentialNoise(gamma=0.97)``: settings of ``DPSGD`` and ``DPAdam``, in their place.
        ledger: Path of the ledger that is charged before the first step; default the project's own.
        account: Name of the people in the ledger; runs of one account add up.
        cap: Budget that the account as a whole must not exceed.
        n_public: Public number of records or people. Without it they are counted privately under add-remove.
        records_public: With ``person``, the public number of all records, if there is one.
        seed: Fixed randomness for tests; the result is then not private.
        algorithm: Such as ``qg.DPSGD(...)``, ``qg.DPSRM(...)``, ``qg.StagewiseDPSGD(...)``. Its learning rate may
            be a schedule.
        regularizer: A public penalty of :mod:`quietgrad.objectives`, such as ``L2(1e-4)``.
        evaluate: evaluate(model) → scores, in evaluation mode, at step 0 and every ``every`` steps. Scores of
            private records are private; they go to ``callbacks`` and ``result.metrics``, marked.
        every: Steps between evaluations; default a twentieth of the run.
        callbacks: Called with a :class:`~quietgrad.methods.callbacks.Progress` at every evaluation, and at step 0,
            before anything is reserved.
        stop: stop(progress) → whether to stop early. It may see private scores, so the whole ε is charged.
        progress: Shows steps and ε spent on a terminal.
        folder: Keeps checkpoints here, so that :func:`resume` can continue after an interruption. On several
            processes the same call goes on as well, as torchrun repeats it; the leading process (rank 0) keeps it.
        checkpoint_seconds: Least time between two checkpoints.
        micro_batch: Examples per pass; a larger sample takes several passes.
        memory_budget: Bytes of per-example gradients kept at a time.
        errors: ``"zero"``: a record on which model or loss raise an exception counts as zero, as one whose gradient
            is not finite does. ``"raise"`` ends the run there, which tells that such a record is in the data: it is
            for debugging on public data, and refused with a budget.

    >>> import quietgrad as qg
    >>> model = nn.Linear(2, 2)
    >>> x = torch.randn(300, 2)
    >>> result = fit(model, nn.CrossEntropyLoss(), (x, (x[:, 0] > 0).long()),
    ...              qg.DPSGD(steps=5, batch_size=30), budget=Budget(2.0, 1e-5))
    >>> str(result.privacy)
    '(2, 1e-05)-DP, add-remove, proved by pld-poisson'
    >>> bool((result.params[:4].view(2, 2) == model.weight).all())
    True
    """
    if errors == "raise" and budget is not None:
        raise SettingError(
            'errors="raise": a run that ends at a record tells that the record is in the data. It is for debugging '
            "on public data, without privacy: give {budget=None}, or leave errors out. No privacy budget was spent."
        )
    algorithm = _with(algorithm, clipping=clipping, noise_schedule=noise_schedule, clip_schedule=clip_schedule)
    run = _Training(
        model, loss_fn, train_set, algorithm, person=person, combine=combine, records_per_person=records_per_person,
        errors=errors, evaluate=evaluate, every=every, callbacks=callbacks, stop=stop, progress=progress,
        regularizer=regularizer, micro_batch=micro_batch, memory_budget=memory_budget,
        collate_fn=collate_fn, pad=pad, views=views, n_public=n_public,
        relation=Relation.REPLACE_ONE if budget is None else budget.relation,
    )  # fmt: skip

    def minimize(callback: Callback) -> Result:
        planned = None
        if budget is not None and noise_multiplier is not None and n_public is not None:
            planned = methods.plan(
                algorithm, n=n_public, budget=budget, noise_multiplier=noise_multiplier, unit=run.unit,
                records_public=records_public,
            )  # fmt: skip
            if planned.epsilon() > budget.epsilon:
                raise BudgetError(
                    f"{{noise_multiplier}}: the run would cost ε = {planned.epsilon():.4g}, above "
                    f"the budget of {budget.epsilon:g}. Use more noise, fewer steps or a smaller batch, or leave "
                    "the noise to calibration.",
                    noise_multiplier=noise_multiplier,
                )
        if is_distributed():
            terms = Terms.of(
                budget, account=account, ledger=ledger, cap=cap, seed=seed, n_public=n_public,
                records_public=records_public, noise_multiplier=noise_multiplier,
            )  # fmt: skip
            shared = SharedFit(
                run.objective, run.examples, algorithm, callback, folder, checkpoint_seconds=checkpoint_seconds
            )
            return shared.fit(terms, account=account, ledger=ledger)
        return methods.minimize(
            run.objective, run.examples, algorithm, budget=budget, ledger=ledger, account=account, cap=cap,
            n_public=n_public, records_public=records_public, seed=seed, folder=folder, callback=callback,
            checkpoint_seconds=checkpoint_seconds, noise_multiplier=noise_multiplier, planned=planned,
        )  # fmt: skip

    return run.train(minimize)


def resume(
    model: nn.Module,
    loss_fn: LossFunction,
    train_set: object,
    algorithm: Algorithm,
    *,
    folder: str | Path,
    ledger: Ledger | str | Path | None = None,
    account: str | None = None,
    cap: Budget | None = None,
    checkpoint_seconds: float = 10.0,
    clipping: ClippingName | Clipping | None = None,
    noise_schedule: NoiseSchedule | None = None,
    clip_schedule: ClipSchedule | None = None,
    **settings: Any,
) -> Result:
    """Continue an interrupted :func:`fit` with the same arguments and ``folder``.

    See :func:`quietgrad.resume`.

    ``settings`` are those of :func:`fit` that the folder does not hold: ``person``, ``combine``,
    ``records_per_person``, ``views``, ``regularizer``, ``evaluate``, ``every``, ``callbacks``, ``stop``,
    ``progress``, ``micro_batch``, ``memory_budget``, ``collate_fn`` and ``pad``. In an unchanged environment the
    model is bit for bit that of an undisturbed run and nothing is spent twice.
    """
    if "errors" in settings:
        raise ValueError("errors: a resumed run counts a record that raises an exception as zero; leave it out.")
    algorithm = _with(algorithm, clipping=clipping, noise_schedule=noise_schedule, clip_schedule=clip_schedule)
    if isinstance(train_set, IterableDataset):
        n_public, relation = _how_it_was_read(folder)
        settings = {"n_public": n_public, "relation": relation, **settings}
    run = _Training(model, loss_fn, train_set, algorithm, **settings)

    def resume_run(callback: Callback) -> Result:
        if is_distributed():
            shared = SharedFit(
                run.objective, run.examples, algorithm, callback, folder, checkpoint_seconds=checkpoint_seconds
            )
            return shared.resume(ledger=ledger, account=account, cap=cap)
        _, state = read_run(folder)
        if len(state.params) != run.examples.dim:
            raise DataError(
                f"{folder}: the checkpoint is of a model with {len(state.params)} parameters; this one has "
                f"{run.examples.dim}. Resume with the model it was written for."
            )
        return methods.resume(
            run.objective, run.examples, algorithm, folder=folder, ledger=ledger, account=account, cap=cap,
            checkpoint_seconds=checkpoint_seconds, callback=callback,
        )  # fmt: skip

    return run.train(resume_run)


def _how_it_was_read(folder: str | Path) -> tuple[int, Relation]:
    """n and the relation of a kept run, by which a stream was read; all processes call it."""

    def kept() -> tuple[int, Relation] | None:
        if not is_leader():
            return None
        plan = read_run(folder)[0].plan
        return plan.n_public, Relation.REPLACE_ONE if plan.budget is None else plan.budget.relation

    why = "the leading process cannot read the run in this folder"
    found = all_or_none(kept, why) if is_distributed() else kept()
    told = broadcast_from_leader(lambda: found)
    assert told is not None
    return told


_HAVE = {
    "clipping": (
        "clipping rule of its own. Leave clipping out, or use one that has it, such as DPSGD, DPAdam or DPSRM."
    ),
    "noise_schedule": "schedule of its noise. Leave noise_schedule out, or use DPSGD or DPAdam.",
    "clip_schedule": "schedule of its clip. Leave clip_schedule out, or use DPSGD or DPAdam.",
}


def _with(algorithm: Algorithm, **settings: Any) -> Algorithm:
    """The algorithm with those of the settings that were given, in the place of its own."""
    method: Any = algorithm
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in {field.name for field in dataclasses.fields(method)}:
            raise ValueError(f"{name}: {algorithm.name} has no {_HAVE[name]}")
    read_clipping(given.get("clipping", "flat"))
    changed: Algorithm = dataclasses.replace(method, **given) if given else algorithm
    return changed


class _Training:
    """Common part of :func:`fit` and :func:`resume`: the model as an objective, its data, and its callbacks."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, train_set: object, algorithm: Algorithm, *,
        person: object = None, combine: Combine = "mean", records_per_person: int | None = None,
        evaluate: Evaluate | None = None, every: int | None = None, callbacks: Sequence[Callback] = (),
        stop: Stop | None = None, progress: bool = True, n_public: int | None = None,
        relation: Relation = Relation.ADD_REMOVE, **settings: Any,
    ) -> None:  # fmt: skip
        if every is not None and every < 1:
            raise ValueError(f"every={every}: must be a whole number of steps ≥ 1.")
        model = unwrapped(model)
        self.shards = WholeModule(model)
        self.module_objective = ModuleObjective(model, loss_fn, **settings)
        self.module_objective.keeps_frozen = not self.shards.in_shards
        self.progress = progress
        self.evaluate, self.every, self.callbacks, self.stop = evaluate, every, callbacks, stop
        self.scores: dict[str, float] = {}
        self.objective, data = with_privacy_unit(
            self.module_objective, read_stream(train_set, n_public, relation), person,
            PersonRule(combine, records_per_person),
        )  # fmt: skip
        check_people(algorithm, self.objective)
        self.unit = PrivacyUnit.RECORD if person is None else PrivacyUnit.PERSON
        self._values = self.shards.gather()
        with self.shards.whole(self._values), modes_kept(model, training=True):
            self.examples = read_by_all(lambda: self.objective.prepare(data))

    def train(self, run: Callable[[Callback], Result]) -> Result:
        """Train the model, call the callbacks, and leave the parameters in the model."""
        if slow := self.module_objective.engine.fallbacks:
            more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
            log.warning(
                "without a kernel, and slower: %s%s; quietgrad.torch.explain shows what it costs.", slow[0], more
            )
        module = self.module_objective.module
        quiet = not (self.progress and is_leader())
        with self.shards.whole(self._values), modes_kept(module, training=True), progress_bar(quiet=quiet) as bar:
            result = run(together([self._watch, bar]))
        if self.shards.in_shards:
            self._values = {}
            self.module_objective.engine.let_go()
        self.shards.assign(self.module_objective.engine.unflatten(result.params))
        if self.scores:
            metrics = {**self.scores, "private": False, "computed_by": "evaluate, without noise"}
            result = dataclasses.replace(result, metrics=metrics)
        return result

    def _watch(self, progress: Progress) -> None:
        """Score the model now and then, tell the callbacks, and let ``stop`` end the run."""
        if progress.step % (self.every or max(1, progress.planned // _REPORTS)) and not progress.done:
            return
        if self.evaluate is not None:
            module = self.module_objective.module
            self.module_objective.write_back(progress.params)
            with self.module_objective.evaluating(), torch.no_grad():
                self.scores = {name: float(value) for name, value in self.evaluate(module).items()}
        progress.metrics = dict(self.scores)
        for callback in self.callbacks:
            callback(progress)
        stops = self.stop is not None and self.stop(progress)
        if is_distributed():  # one that went on alone would wait for the others
            stops = any_of_us(stops or progress.stopped, self.module_objective.engine.device)
        if stops:
            progress.stop()
