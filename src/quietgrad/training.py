"""Plan, run, resume: the sentence "an algorithm asks a curator for noisy gradients until the steps run out".

:func:`plan` needs no data. :func:`minimize` plans, reserves the whole cost, runs, and says what was proved.
:func:`run` is the loop itself, for any algorithm and any curator.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quietgrad import checkpoint as checkpoints
from quietgrad.algorithms.base import Algorithm, State
from quietgrad.curators.base import Session, Spent
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import BudgetError, DataError
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget
from quietgrad.result import Privacy, Result
from quietgrad.schedule import Plan
from quietgrad.vectors import Vector, all_finite, copy, norm

Callback = Callable[[State, Session], None]
_HISTORY = 500  # points kept of a run, however long


def plan(
    algorithm: Algorithm,
    *,
    n: int,
    budget: Budget | None,
    noise_multiplier: float | None = None,
    extra: tuple[events.Event, ...] = (),
) -> Plan:
    """Price ``algorithm`` on ``n`` records without touching any: find the noise that meets ``budget``.

    Args:
        n: the number of records, a public constant.
        budget: the promise, or ``None`` for a run without noise that is not private.
        noise_multiplier: fix the noise instead; the plan's ε is then whatever it proves to be.
        extra: what was released for this run beforehand (such as private feature means); it shares the budget.

    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> p = plan(DPGD(steps=30), n=10000, budget=Budget(1.0, 1e-5))
    >>> round(p.noise_multiplier, 1), round(p.epsilon(), 2)
    (20.4, 1.0)
    """
    if isinstance(n, bool) or int(n) != n or n < 1:
        raise ValueError(f"n={n!r}: must be a whole number ≥ 1.")
    if budget is not None and not algorithm.private:
        raise ValueError(f"{algorithm.name} is a non-private baseline: pass budget=None, or use its private form.")
    schedule = algorithm.schedule(int(n))
    if budget is not None:
        schedule = schedule.under(budget.relation)
    paper, calibrated = None, False
    if budget is None:
        noise_multiplier = 0.0
    else:
        if hasattr(algorithm, "check_budget"):
            algorithm.check_budget(budget)
        printed = algorithm.paper_noise(int(n), budget) if hasattr(algorithm, "paper_noise") else None
        if printed is not None:
            noise_multiplier, paper = printed, algorithm.name
        elif noise_multiplier is None:
            from quietgrad.privacy.calibrate import calibrate_event

            def event(z: float) -> events.Event:
                return events.composed([*extra, schedule.event(z, budget.relation)])

            noise_multiplier = calibrate_event(event, budget=budget)
            calibrated = True
    made = Plan(algorithm.name, algorithm.config(), schedule, int(n), budget, float(noise_multiplier), paper, extra)
    # Calibrations are remembered in files that anybody may have written; the plan's own proof is needed anyway.
    if calibrated and not made.proof.within(budget):
        raise BudgetError(
            f"the remembered noise multiplier {noise_multiplier:g} costs ε = {made.epsilon():.4g}, not the budget: "
            "the calibration cache was altered. Delete it (QUIETGRAD_CACHE, or ~/.cache/quietgrad) and plan again."
        )
    return made


def minimize(
    objective: Any,
    data: Any,
    algorithm: Algorithm,
    *,
    budget: Budget | None,
    ledger: Any = None,
    account: str = "default",
    cap: Budget | None = None,
    n_public: int | None = None,
    start: Vector | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    callback: Callback | None = None,
    noise_multiplier: float | None = None,
) -> Result:
    """Minimise an empirical risk privately.

    Args:
        objective: a loss of :mod:`quietgrad.objectives`.
        data: what the objective takes, ``(X, y)`` for tables.
        algorithm: a method, such as ``qg.DPSRM(steps=1500, batch_size=100)``.
        budget: the promise; ``None`` runs without noise and the result says **not private**.
        ledger: file that the whole cost is reserved in before anything is released.
        account: the people the data are about; runs of one account compose.
        cap: a budget that the account as a whole must not exceed.
        n_public: the public number of records. Under add-remove the true number is private: declare one here, or
            the length of the data is taken and thereby declared public.
        folder: keep checkpoints here so that :func:`resume` can continue after an interruption; in the end the
            result is saved here.
        seed: fixed randomness for tests; the result is then not private.

    >>> import numpy as np
    >>> from quietgrad import objectives
    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> X = np.linspace(-1, 1, 400)[:, None]
    >>> result = minimize(objectives.Logistic(), (X, (X[:, 0] > 0) * 1.0), DPGD(), budget=Budget(1.0, 1e-5))
    >>> result.params.shape, result.privacy.is_private
    ((1,), True)
    """
    name = uuid.uuid4().hex
    if folder is not None and (Path(folder) / _Saver.FILE).exists():
        raise DataError(f"{folder}: an interrupted run is kept here; resume it, or choose another folder.")
    curator = CentralCurator(objective, data, ledger=ledger, account=account, cap=cap, run=name, seed=seed)
    declared = len(curator.records) if n_public is None else n_public
    the_plan = plan(algorithm, n=declared, budget=budget, noise_multiplier=noise_multiplier)
    notes = () if n_public is not None else ("n was taken from the data and is thereby declared public",)
    x0 = curator.initial() if start is None else _check_start(start, curator.initial())
    if hasattr(algorithm, "check_run"):
        algorithm.check_run(objective, the_plan, x0)
    saver = None
    try:
        if folder is not None:
            # Before the reservation, so that a crash at any moment after it finds something to resume.
            identity = _identity(curator, _key(name, curator))
            saver = _Saver(Path(folder), name, the_plan, checkpoint_seconds, notes, identity, curator.seeded)
            saver.write(algorithm.init(x0), {}, None)
        session = curator.open(the_plan)
    except Exception:
        _discard(name, folder)
        raise
    result = run(
        algorithm, session, x0, callback=callback, saver=saver, account=account, seeded=curator.seeded, notes=notes
    )
    return result if saver is None else saver.finish(result)


def resume(
    objective: Any,
    data: Any,
    algorithm: Algorithm,
    *,
    folder: str | Path,
    ledger: Any = None,
    account: str = "default",
    cap: Budget | None = None,
    checkpoint_seconds: float = 10.0,
    callback: Callback | None = None,
) -> Result:
    """Continue an interrupted :func:`minimize` with the same arguments and ``folder``.

    In an unchanged environment the run replays the same samples and noise from its last checkpoint, so the model is
    bit for bit that of an undisturbed run and nothing is spent twice. If versions, threads or kernels changed,
    fresh noise is drawn and the plan is charged again.
    """
    from quietgrad.privacy.keys import KeyFile

    saved = checkpoints.load(Path(folder) / _Saver.FILE)
    meta = saved.meta
    if (finished := _finished(Path(folder), meta["run"])) is not None:
        _discard(meta["run"], folder)
        return finished
    budget = None if meta["budget"] is None else Budget.from_json(meta["budget"])
    if meta["algorithm"] != algorithm.name or meta["config"] != _json(algorithm.config()):
        raise DataError(
            f"{folder}: the checkpoint is of {meta['algorithm']} with other settings; resume with those."
        )
    if meta["seeded"]:
        raise DataError(f"{folder}: the run's randomness was seeded, so it is not private; start it again instead.")
    the_plan = plan(algorithm, n=meta["n_public"], budget=budget, noise_multiplier=meta["noise_multiplier"])
    same = meta["environment"] == checkpoints.environment()
    name = meta["run"] if same else uuid.uuid4().hex
    key = KeyFile.load(meta["run"]) if same else KeyFile.create(name)
    curator = CentralCurator(objective, data, ledger=ledger, account=account, cap=cap, run=name, key=key)
    if same and meta["identity"] != _identity(curator, key):
        raise DataError(
            f"{folder}: the data or the objective are not those that the run was interrupted on; its noise on "
            "others would expose them. Resume with the same, or start a new run in another folder."
        )
    notes = tuple(meta["notes"])
    if not same:
        notes = (*notes, "resumed in another environment: fresh noise was drawn and charged again")
    session = curator.open(the_plan, used=saved.used if same else None, rho_left=saved.rho_left if same else None)
    if not same:
        KeyFile.destroy(meta["run"])
        session.advance(saved.used, saved.rho_left)
    saver = _Saver(Path(folder), name, the_plan, checkpoint_seconds, notes, _identity(curator, key))
    saver.history, saver.seconds_before = meta["history"], meta["seconds"]
    result = run(
        algorithm, session, curator.initial(), state=saved.state, callback=callback, saver=saver, account=account,
        notes=notes,
    )  # fmt: skip
    return saver.finish(result)


def run(
    algorithm: Algorithm,
    session: Session,
    x0: Vector,
    *,
    state: State | None = None,
    callback: Callback | None = None,
    saver: _Saver | None = None,
    account: str | None = None,
    seeded: bool = False,
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
    data_dependent = session.plan.schedule.adaptive or state.stopped_by not in ("steps", "budget")
    spent = session.close(state.stopped_by, data_dependent=data_dependent)
    slots = session.plan.to_json()["slots"]
    return Result(
        params=algorithm.output(state),
        privacy=_privacy(session, spent, account, seeded or getattr(session, "seeded", False), notes),
        algorithm=algorithm.name,
        config=session.plan.config,
        n_public=session.plan.n_public,
        history=history,
        stopped_by=state.stopped_by,
        seconds=time.perf_counter() - started + (0.0 if saver is None else saver.seconds_before),
        versions=checkpoints.versions(),
        details={
            **{key: value for key, value in state.extra.items() if isinstance(value, (int, float, str, bool))},
            **({} if saver is None else {"run": saver.name}),
            "composition": session.plan.schedule.composition,
            "slots": slots,
        },
    )


class _Saver:
    """Writes checkpoints of one run, at most every few seconds, and removes them and the key when it is over."""

    FILE = "checkpoint.safetensors"

    def __init__(
        self,
        folder: Path,
        name: str,
        the_plan: Plan,
        seconds: float,
        notes: tuple[str, ...],
        identity: str | None,
        seeded: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / self.FILE
        self.name = name
        self.seconds = seconds
        self.seconds_before = 0.0
        self.history: list[dict[str, float]] = []
        self.started = self.last = time.monotonic()
        self.meta = {
            "run": name,
            "algorithm": the_plan.algorithm,
            "config": _json(the_plan.config),
            "n_public": the_plan.n_public,
            "budget": None if the_plan.budget is None else the_plan.budget.to_json(),
            "noise_multiplier": the_plan.noise_multiplier,
            "environment": checkpoints.environment(),
            "notes": list(notes),
            "identity": identity,
            "seeded": seeded,
        }

    def save(self, state: State, session: Session, *, now: bool = False) -> None:
        """Write a checkpoint if one is due."""
        clock = time.monotonic()
        if not now and clock - self.last < self.seconds:
            return
        rho = session.rho_left if session.plan.schedule.composition == "filter" else None
        self.write(state, session.used, rho)
        self.last = clock

    def write(self, state: State, used: dict[str, int], rho_left: float | None) -> None:
        """Write a checkpoint now."""
        seconds = time.monotonic() - self.started + self.seconds_before
        meta = {**self.meta, "history": self.history, "seconds": seconds}
        checkpoints.save(self.path, checkpoints.Checkpoint(state, used, rho_left, meta))

    def finish(self, result: Result) -> Result:
        """The run is closed: once its result is safe, its key must not outlive it."""
        result.save(self.path.parent)
        _discard(self.name, self.path.parent)
        return result


def _key(name: str, curator: CentralCurator) -> bytes | None:
    """Make the run's key file and let the curator draw from it; a seeded run has no secret to keep."""
    if curator.seeded:
        return None
    from quietgrad.privacy.keys import KeyFile

    key = KeyFile.create(name)
    curator.use_key(key)
    return key


def _identity(curator: CentralCurator, key: bytes | None) -> str | None:
    """A hash of records and objective under the run's own key, which tells nobody else anything."""
    contents = getattr(curator.records, "contents", None)
    if key is None or contents is None:
        return None
    import hmac

    mac = hmac.new(key, repr(curator.objective).encode(), "sha256")
    for part in contents():
        mac.update(part)
    return mac.hexdigest()


def _discard(name: str, folder: str | Path | None) -> None:
    """Leave neither a key nor a checkpoint of a run that is over or never began; the key goes first."""
    if folder is not None:
        from quietgrad.privacy.keys import KeyFile

        KeyFile.destroy(name)
        (Path(folder) / _Saver.FILE).unlink(missing_ok=True)


def _finished(folder: Path, name: str) -> Result | None:
    """The saved result of the run, if it came so far before it was interrupted."""
    from quietgrad.result import load

    if not (folder / "result.json").exists():
        return None
    result = load(folder)
    return result if result.details.get("run") == name else None


def _json(config: Any) -> Any:
    import json

    return json.loads(json.dumps(dict(config)))


def _check_start(start: Vector, like: Vector) -> Vector:
    if tuple(start.shape) != tuple(like.shape) or not all_finite(start):
        raise DataError(f"start: must be {len(like)} finite numbers, one per parameter.")
    return copy(start)


def _record(state: State) -> dict[str, float]:
    record: dict[str, float] = {"step": state.step}
    if state.estimate.value is not None:
        record["estimate_norm"] = norm(state.estimate.value)
    record.update(state.extra.get("trace", {}))
    return record


def _privacy(session: Session, spent: Spent, account: str | None, seeded: bool, notes: tuple[str, ...]) -> Privacy:
    the_plan = session.plan
    sampling = "; ".join(f"{slot.name}: {slot.sampling.describe()}" for slot in the_plan.schedule.slots)
    adversary = "anyone who sees every released number; the curator and its machine are trusted"
    if the_plan.budget is None or spent.event is None:
        return Privacy(
            None,
            None,
            None,
            None,
            0.0,
            None,
            spent.releases,
            sampling,
            adversary,
            account,
            False,
            ("not private", *notes),
        )
    from quietgrad.privacy.accounting import prove

    budget = the_plan.budget
    # A filter's run is charged what it spent, but how much that is depends on data: what is proved is its total.
    whole = spent.event == the_plan.event or the_plan.schedule.composition == "filter"
    proof = the_plan.proof if whole else prove(spent.event, delta=budget.delta, relation=budget.relation)
    if the_plan.paper_noise:
        notes = (f"noise as printed for {the_plan.paper_noise}; ε is what is proved, not what was claimed", *notes)
    if budget.delta * the_plan.n_public >= 1.0:
        notes = ("δ is not below 1/n: a mechanism that publishes a random record would satisfy it", *notes)
    if seeded:
        notes = ("seeded randomness: not private", *notes)
    return Privacy(
        epsilon=proof.epsilon,
        delta=budget.delta,
        relation=budget.relation,
        accountant=proof.accountant,
        noise_multiplier=the_plan.noise_multiplier,
        events=the_plan.event if whole else spent.event,
        releases=spent.releases,
        sampling=sampling,
        adversary=adversary,
        account=account,
        is_private=not seeded,
        notes=notes,
    )
