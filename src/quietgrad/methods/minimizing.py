"""Minimise an empirical risk on one table, and continue after an interruption.

:func:`minimize` and :func:`resume` plan a run, open a session and step the algorithm until it is done. The history
they keep is public. A progress bar on stderr shows the steps done and the ε spent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.core.accounting.budget import Budget, PrivacyUnit
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.counting import NOMINAL, PublicCount
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session import checkpoint as checkpoints
from quietgrad.core.session.base import Session
from quietgrad.core.session.kept import Run, open_run
from quietgrad.core.session.opening import Keeping, Terms, opened, reopened
from quietgrad.core.session.statement import Privacy, privacy_statement
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.callbacks import Callback, Progress, report
from quietgrad.methods.callbacks import begin as tell_first
from quietgrad.methods.registry import current_config, entry
from quietgrad.methods.result import Result, over
from quietgrad.tables.parties import PartyLevelObjective
from quietgrad.tables.privacy_units import (
    Combine,
    PersonRefused,
    PersonRule,
    RecordsWithIds,
    UserLevelObjective,
    with_privacy_unit,
)
from quietgrad.tables.registry import facts_of, from_facts

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

__all__ = ["Watched", "progress_bar"]


_HISTORY = 500  # points kept of a run, however long


def run(
    algorithm: Algorithm,
    session: Session,
    x0: Vector,
    *,
    state: State | None = None,
    callback: Callback | None = None,
    kept: Run | None = None,
    account: str | None = None,
    notes: tuple[str, ...] = (),
) -> Result:
    """Step ``algorithm`` through an open ``session`` until it is done, close, and state what was proved."""
    started = time.perf_counter()
    state = algorithm.init(x0) if state is None else state
    history: list[dict[str, float]] = [] if kept is None else kept.history
    every = int(history[1]["step"] - history[0]["step"]) if len(history) > 1 else 1
    if kept is not None:
        kept.save(state, session, now=True)
    while not state.done:
        state = algorithm.step(state, session)
        if state.step % every == 0 or state.done:
            record: dict[str, float] = {"step": state.step}
            if state.estimate.value is not None:
                record["estimate_norm"] = norm(state.estimate.value)
            history.append({**record, **state.extra.get("trace", {})})
            if len(history) > _HISTORY:  # a long run keeps every second point
                every *= 2
                history[:] = [record for record in history if record["step"] % every == 0 or state.done]
        if callback is not None:
            report(algorithm, session, state, callback)
        if kept is not None:
            kept.save(state, session)
    if kept is not None:
        kept.save(state, session, now=True)  # a crash between closing and saving the result costs nothing
    data_dependent = session.plan.whole_only or state.stopped_by not in ("steps", "budget")
    spent = session.close(state.stopped_by, data_dependent=data_dependent)
    privacy = privacy_statement(session, spent, account, (*notes, *algorithm.notes(session.plan)))
    result = result_of(session, algorithm.output(state), privacy, state.stopped_by)
    facts = {key: value for key, value in state.extra.items() if isinstance(value, (int, float, str, bool, list))}
    return replace(
        result,
        algorithm=algorithm.name,
        history=history,
        seconds=time.perf_counter() - started + (0.0 if kept is None else kept.seconds),
        details={**facts, **result.details},
    )


def result_of(session: Session, params: Vector, privacy: Privacy, stopped_by: str) -> Result:
    """The result of a session that was closed."""
    plan = session.plan
    return Result(
        params=params,
        privacy=privacy,
        algorithm=plan.algorithm,
        config=plan.config,
        n_public=plan.n_public,
        stopped_by=stopped_by,
        versions=checkpoints.versions(),
        details={
            "run": session.run,
            "composition": plan.schedule.composition,
            "rounds": plan.schedule.rounds,
            "slots": plan.to_json()["slots"],
            **({} if plan.counted is None else {"counted": plan.counted.to_json()}),
        },
    )


def minimize(
    objective: Any,
    data: object,
    algorithm: Algorithm | Callable[[int], Algorithm],
    *,
    budget: Budget | None,
    ledger: Ledger | str | Path | None = None,
    account: str | Account = "default",
    cap: Budget | None = None,
    n_public: int | PublicCount | None = None,
    records_public: int | None = None,
    start: Vector | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    callback: Callback | None = None,
    noise_multiplier: float | None = None,
    planned: Plan | None = None,
    person: object = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
    party: object = None,
) -> Result:
    """Minimise an empirical risk privately.

    The whole cost of the run is written to the ledger before the first number is released. A run that fails before
    that costs nothing.

    Args:
        objective: a loss of :mod:`quietgrad.objectives`.
        data: what the objective takes, ``(X, y)`` for tables.
        algorithm: a method, such as ``qg.DPSRM(steps=1500, batch_size=100)``, or a function that makes one from
            the public number of records.
        budget: (ε, δ) and the relation; ``None`` runs without noise and the result says **not private**.
        ledger: the file that is charged; without it the project's own (:mod:`quietgrad.core.ledger.ledger`).
        account: the group of people that the data are about; runs of one account compose.
        cap: a budget that the account as a whole must not exceed.
        n_public: the public number of records, if there is one. Under add-remove the true number is private.
            Without a declared number they are counted privately, with about 1 % of ε, and the run is planned
            for that count. Under replace-one it is public and that of the data.
        records_public: with ``person``, how many records people have together, if that is public: it is then said
            beside n wherever n is. Without it no number of records is ever shown.
        folder: keep checkpoints here so that :func:`resume` can continue after an interruption; in the end the
            result is saved here.
        callback: gets a :class:`~quietgrad.methods.callbacks.Progress` at step 0, before anything is reserved, and
            after every step; such as ``CSVLog("log.csv")``.
        seed: fixed randomness for tests; the result is then not private.
        planned: the plan, if it was made already from the same algorithm, budget and number of records.
        person: one id per record, of the person it is about. The privacy unit is then a person with all their
            records; n and batch sizes count people. Without it the unit is a record.
        combine: a person counts with the ``"mean"`` of their records' gradients or with their ``"sum"``, either
            clipped as a whole.
        records_per_person: the most of a person's records that one release uses, chosen anew for each.
        party: one id per record, of the party that holds it. The privacy unit is then a party with all it holds;
            who the parties are is public, so n is their number.

    >>> import numpy as np
    >>> from quietgrad import objectives
    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> X = np.linspace(-1, 1, 400)[:, None]
    >>> result = minimize(objectives.Logistic(), (X, (X[:, 0] > 0) * 1.0), DPGD(), budget=Budget(1.0, 1e-5))
    >>> result.params.shape, result.privacy.is_private
    ((1,), True)
    """
    check_objective(objective)
    objective, data = _of_units(objective, data, person, party, PersonRule(combine, records_per_person))
    terms = Terms.of(
        budget, account=account, ledger=ledger, cap=cap, seed=seed, n_public=n_public,
        records_public=records_public, noise_multiplier=noise_multiplier,
        takes_n=party is not None and n_public is None,
    )  # fmt: skip

    def first(nominal: Algorithm, x0: Vector) -> None:
        check_people(nominal, objective)
        tell_first(callback, nominal.schedule(NOMINAL).releases, x0, private=budget is not None)

    def at(method: Algorithm | Callable[[int], Algorithm], n: int) -> Algorithm:
        return method(n) if callable(method) else method

    keeping = None
    if folder is not None:
        settings = {"objective": facts_of(objective), "people": counting(objective)}
        keeping = Keeping(folder, TABLE, lambda method, x0: method.init(x0), settings, checkpoint_seconds)
    with opened(
        objective,
        data,
        algorithm,
        terms,
        plan=None if planned is None else lambda size: (at(algorithm, size.n), planned),
        start=start,
        first=first,
        check=lambda method, the_plan, x0: method.check_run(objective, the_plan, x0),
        keeping=keeping,
        notes=how_people_count(objective, at(algorithm, NOMINAL)),
    ) as active:
        result = run(
            active.method, active.session, active.start, callback=callback, kept=active.kept,
            account=str(terms.account), notes=active.notes,
        )  # fmt: skip
        if active.kept is not None:
            active.kept.finish(result)
        elif folder is not None:
            result.save(folder)
        return result


def resume(
    objective: Any = None,
    data: object = None,
    algorithm: Algorithm | Callable[[int], Algorithm] | None = None,
    *,
    folder: str | Path,
    ledger: Ledger | str | Path | None = None,
    account: str | None = None,
    cap: Budget | None = None,
    checkpoint_seconds: float = 10.0,
    callback: Callback | None = None,
    person: object = None,
    combine: Combine | None = None,
    records_per_person: int | None = None,
    party: object = None,
) -> Result:
    """Continue an interrupted :func:`minimize` that was kept in ``folder``.

    The folder holds everything but the data (and ``person=`` or ``party=``, which are data too). It has the
    algorithm, the plan, the ledger, the account and the cap, and the loss if it is one of quietgrad's for tables.
    What is given beside it must agree. ``ledger=`` says where the ledger is by now, if it was moved.

    The run repeats its releases since the last checkpoint. Where a sum has the same bits as before it gets the same
    noise, so the model is that of an undisturbed run and nothing is spent twice. Where they are not (other data, an
    edited loss, other versions or threads), fresh noise is drawn and the plan is charged again, and the result says
    so. Settings that differ publicly are refused.
    """
    if data is None:
        raise ValueError("data: must be given, since a folder holds none: resume(folder=..., data=(X, y)).")
    if (result := over(folder)) is not None:
        return result
    saved_run = open_run(folder, kind=TABLE, ledger=ledger, every=checkpoint_seconds)
    try:
        settings, the_plan = saved_run.header.settings, saved_run.plan
        saved_run.agree_on_account(account, cap)
        method: Algorithm
        if algorithm is None:
            try:
                method = entry(the_plan.algorithm).make(the_plan.config)
            except ValueError:
                raise DataError(
                    f"{saved_run.folder}: the method of this run is your own; give algorithm=."
                ) from None
        else:
            method = algorithm(the_plan.n_public) if callable(algorithm) else algorithm
        settled = current_config(the_plan.algorithm, the_plan.config)
        saved_run.agree("algorithm", [method.name, method.config()], [the_plan.algorithm, settled])
        if objective is None:
            if settings["objective"] is None:
                raise DataError(f"{saved_run.folder}: the loss of this run is your own: give it as objective=.")
            objective = from_facts(settings["objective"])
        if person is not None and settings["people"] is not None:  # what the folder says need not be said again
            combine = combine or settings["people"]["combine"]
            records_per_person = records_per_person or settings["people"]["records_per_person"]
        rule = PersonRule(combine or "mean", records_per_person)
        objective, data = _of_units(objective, data, person, party, rule)
        if counting(objective) != settings["people"]:
            raise DataError(
                f"{saved_run.folder}: the run was started with another person= or party=; resume it with the same."
            )
        if settings["objective"] is not None:
            saved_run.agree("objective", facts_of(objective), settings["objective"])
        active = reopened(saved_run, objective, data, method)
        result = run(
            method, active.session, active.start, state=saved_run.state, callback=callback, kept=saved_run,
            account=saved_run.header.asked, notes=saved_run.header.notes,
        )  # fmt: skip
        return saved_run.finish(result)
    finally:
        saved_run.close()


def counting(objective: object) -> dict[str, Any] | None:
    """Return how people with several records count, as a folder keeps it. ``None`` if the unit is a record."""
    if not isinstance(objective, UserLevelObjective):
        return None
    unit = {} if objective.unit is PrivacyUnit.PERSON else {"unit": str(objective.unit)}
    return {**asdict(objective.rule), **unit}


def _of_units(objective: Any, data: Any, person: Any, party: Any, rule: PersonRule) -> tuple[Any, Any]:
    """(objective, data) to give to a curator, asked about records, people or parties."""
    if party is None:
        return with_privacy_unit(objective, data, person, rule)
    if person is not None or rule != PersonRule():
        raise ValueError("party: is the privacy unit; leave out person, combine and records_per_person.")
    return PartyLevelObjective(objective), RecordsWithIds(data, party)


TABLE = "table"  # the kind of these runs
COUNTED = "a person counts with "


def how_people_count(objective: object, algorithm: Algorithm | None = None) -> tuple[str, ...]:
    """Return the notes of a privacy statement on how people with several records, or parties, count."""
    if not isinstance(objective, UserLevelObjective):
        return ()
    if algorithm is not None and algorithm.by_party:
        return (f"a {objective.unit} counts with the update of its own training, clipped as a whole",)
    if objective.unit is PrivacyUnit.PARTY:
        return ("a party counts with the mean of all its records, clipped as a whole",)
    most = objective.rule.records_per_person
    of = "all their records" if most is None else f"at most {most} of their records, chosen anew for every release"
    return (f"{COUNTED}the {objective.rule.combine} of {of}, clipped as a whole",)


def check_people(algorithm: Algorithm, objective: object) -> None:
    """Raise, before anything is reserved, if the method needs the mean of all records and the rule differs."""
    if not isinstance(objective, UserLevelObjective) or not algorithm.needs_means:
        return
    if not objective.rule.is_mean_of_all:
        raise PersonRefused(
            f"{algorithm.name}: its query is bounded for the mean of all of a person's records only. Leave out "
            "combine and records_per_person, or use a method that clips."
        )


def check_objective(objective: object) -> None:
    """Raise ``TypeError`` for a bare torch module, which says nothing of its loss."""
    if hasattr(objective, "named_parameters") and not hasattr(objective, "prepare"):
        raise TypeError(
            f"objective: a {type(objective).__name__} is a bare module; pass "
            "quietgrad.torch.objective(module, loss). No privacy budget was spent."
        )


class Watched:
    """The callback of a command: it keeps the plan that the run is on, and draws a bar if there is one to draw."""

    def __init__(self, bar: Bar | None = None) -> None:
        self.plan: Plan | None = None
        self._bar = bar
        self._task: TaskID | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.plan is not None:
            self.plan = progress.plan
        if self._bar is None or (progress.step % max(1, progress.planned // 200) and not progress.done):
            return  # telling the bar costs more than a small step
        if self._task is None:
            title = "training" if self.plan is None else self.plan.algorithm
            self._task = self._bar.add_task(title, total=progress.planned, spent="")
        spent = "" if progress.epsilon is None else f"ε ≤ {progress.epsilon:.3g}"
        self._bar.update(self._task, total=progress.planned, completed=progress.releases, spent=spent)

    def curve_of(self, epsilon: float | None) -> list[tuple[int, float]] | None:
        """ε against releases of a run that states ``epsilon``; ``None`` if it was charged again, or never begun."""
        return None if self.plan is None else self.plan.curve_of(epsilon)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Watched]:
    """The callback that draws a bar on stderr with releases and ε; quiet, or without a terminal, it draws none."""
    if quiet or not sys.stderr.isatty():
        yield Watched()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), refresh_per_second=10) as bar:
        yield Watched(bar)
