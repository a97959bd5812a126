"""The loop: step an algorithm through an open door until it is done, keep a public history, close the door."""

from __future__ import annotations

import time
from dataclasses import replace

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.curators.base import Session
from quietgrad.curators.session import CentralSession
from quietgrad.errors import TooNoisyError
from quietgrad.training import checkpoint as checkpoints
from quietgrad.training.callbacks import Callback, Reports
from quietgrad.training.result import Privacy, Result
from quietgrad.training.runs import Run
from quietgrad.training.statement import statement
from quietgrad.vectors import Vector, norm

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
    reports = Reports(algorithm, session, callback)
    history: list[dict[str, float]] = [] if kept is None else kept.history
    every = int(history[1]["step"] - history[0]["step"]) if len(history) > 1 else 1
    if kept is not None:
        kept.save(state, session, now=True)
    while not state.done:
        state = algorithm.step(state, session)
        if state.step % every == 0 or state.done:
            history.append(_record(state))
            if len(history) > _HISTORY:  # a long run keeps every second point
                every *= 2
                history[:] = [record for record in history if record["step"] % every == 0 or state.done]
        reports.tell(state)
        if kept is not None:
            kept.save(state, session)
    if kept is not None:
        kept.save(state, session, now=True)  # a crash between closing and saving the result costs nothing
    data_dependent = session.plan.whole_only or state.stopped_by not in ("steps", "budget")
    spent = session.close(state.stopped_by, data_dependent=data_dependent)
    privacy = statement(session, spent, account, notes)
    result = result_of(session, algorithm.output(state), privacy, state.stopped_by)
    told = {key: value for key, value in state.extra.items() if isinstance(value, (int, float, str, bool, list))}
    return replace(
        result,
        algorithm=algorithm.name,
        history=history,
        seconds=time.perf_counter() - started + (0.0 if kept is None else kept.seconds),
        details={**told, **result.details},
    )


def result_of(session: Session, params: Vector, privacy: Privacy, stopped_by: str) -> Result:
    """What a session that was closed leaves, whoever made its steps."""
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


def refused(session: CentralSession, error: Exception) -> bool:
    """Settle the entry of a run that failed, where that is known to be right: whether it was settled.

    If nothing was asked of the data, the whole entry is given back. A run that found nothing above its noise has
    stopped because of what was released: as after every such stop the whole plan stays charged (a zCDP filter,
    whose accounting allows any stopping rule, is charged what it counted). Of any other error nothing is known, and
    the entry stays open, and whole.
    """
    if not any(session.used.values()):
        session.charge.cancel("refused before anything was released")
        return True
    if isinstance(error, TooNoisyError):
        session.close("refused after looking", data_dependent=True)
        return True
    return False


def _record(state: State) -> dict[str, float]:
    record: dict[str, float] = {"step": state.step}
    if state.estimate.value is not None:
        record["estimate_norm"] = norm(state.estimate.value)
    record.update(state.extra.get("trace", {}))
    return record
