"""The loop: step an algorithm through an open door until it is done, keep a public history, close the door."""

from __future__ import annotations

import time
from collections.abc import Callable

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.curators.base import Session
from quietgrad.curators.session import CentralSession
from quietgrad.errors import TooNoisyError
from quietgrad.training import checkpoint as checkpoints
from quietgrad.training.result import Result
from quietgrad.training.saving import Saver
from quietgrad.training.statement import statement
from quietgrad.vectors import Vector, norm

Callback = Callable[[State, Session], None]
_HISTORY = 500  # points kept of a run, however long


def run(
    algorithm: Algorithm,
    session: Session,
    x0: Vector,
    *,
    state: State | None = None,
    callback: Callback | None = None,
    saver: Saver | None = None,
    account: str | None = None,
    notes: tuple[str, ...] = (),
) -> Result:
    """Step ``algorithm`` through an open ``session`` until it is done, close, and state what was proved."""
    started = time.perf_counter()
    state = algorithm.init(x0) if state is None else state
    history: list[dict[str, float]] = [] if saver is None else saver.history
    every = int(history[1]["step"] - history[0]["step"]) if len(history) > 1 else 1
    if saver is not None:
        saver.save(state, session, now=True)
    while not state.done:
        state = algorithm.step(state, session)
        if state.step % every == 0 or state.done:
            history.append(_record(state))
            if len(history) > _HISTORY:  # a long run keeps every second point
                every *= 2
                history[:] = [record for record in history if record["step"] % every == 0 or state.done]
        if callback is not None:
            finished = state.done
            callback(state, session)
            if state.done and not finished:  # whatever the callback looked at, its stop may depend on data
                state.stopped_by = "callback"
        if saver is not None:
            saver.save(state, session)
    if saver is not None:
        saver.save(state, session, now=True)  # a crash between closing and saving the result costs nothing
    data_dependent = session.plan.whole_only or state.stopped_by not in ("steps", "budget")
    spent = session.close(state.stopped_by, data_dependent=data_dependent)
    slots = session.plan.to_json()["slots"]
    return Result(
        params=algorithm.output(state),
        privacy=statement(session, spent, account, notes),
        algorithm=algorithm.name,
        config=session.plan.config,
        n_public=session.plan.n_public,
        history=history,
        stopped_by=state.stopped_by,
        seconds=time.perf_counter() - started + (0.0 if saver is None else saver.seconds_before),
        versions=checkpoints.versions(),
        details={
            **{
                key: value for key, value in state.extra.items() if isinstance(value, (int, float, str, bool, list))
            },
            **({} if saver is None else {"run": saver.name}),
            "composition": session.plan.schedule.composition,
            "rounds": session.plan.schedule.rounds,
            "slots": slots,
        },
    )


def refused(session: CentralSession, error: Exception) -> bool:
    """Settle the entry of a run that failed, where that is known to be right: whether it was settled.

    If nothing was asked of the data, the whole entry is given back. That a release shows nothing above its noise
    is a function of released numbers alone: what has left is the releases made, whose cost is the entry's; that the
    rest was not asked for tells nothing more, as it tells nothing when an analyst, having seen one entry's result,
    decides not to make the next. Of any other error that is not known, and the entry stays whole.
    """
    if not any(session.used.values()):
        session.charge.cancel("refused before anything was released")
        return True
    if isinstance(error, TooNoisyError):
        session.close("refused after looking", data_dependent=session.plan.whole_only)
        return True
    return False


def _record(state: State) -> dict[str, float]:
    record: dict[str, float] = {"step": state.step}
    if state.estimate.value is not None:
        record["estimate_norm"] = norm(state.estimate.value)
    record.update(state.extra.get("trace", {}))
    return record
