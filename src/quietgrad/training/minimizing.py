"""Minimise an empirical risk on one table, and continue after an interruption."""

from __future__ import annotations

import hmac
import uuid
from pathlib import Path
from typing import Any

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.errors import DataError
from quietgrad.objectives.people import Combine, OfPeople, PersonRefused, of_people
from quietgrad.plans.price import plan
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.keys import KeyFile
from quietgrad.training import checkpoint as checkpoints
from quietgrad.training.result import Result
from quietgrad.training.running import Callback, refused, run
from quietgrad.training.saving import Saver, discard, finished_result, json_values, seal
from quietgrad.vectors import Vector, all_finite, copy


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
    records_public: int | None = None,
    start: Vector | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    callback: Callback | None = None,
    noise_multiplier: float | None = None,
    planned: Plan | None = None,
    person: Any = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
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
        records_public: with ``person``, how many records people have together, if that is public: it is then said
            beside n wherever n is. Without it no number of records is ever shown.
        folder: keep checkpoints here so that :func:`resume` can continue after an interruption; in the end the
            result is saved here.
        seed: fixed randomness for tests; the result is then not private.
        planned: the plan, if it was made already from the same algorithm, budget and number of records.
        person: one id per record, of the person it is about; the promise is then to people with all their records,
            n is their number and batches are of people. Without it a record is a person's only one.
        combine: a person counts with the ``"mean"`` of their records' gradients or with their ``"sum"``, either
            clipped as a whole.
        records_per_person: the most of a person's records that one release looks at, chosen anew for each.

    >>> import numpy as np
    >>> from quietgrad import objectives
    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> X = np.linspace(-1, 1, 400)[:, None]
    >>> result = minimize(objectives.Logistic(), (X, (X[:, 0] > 0) * 1.0), DPGD(), budget=Budget(1.0, 1e-5))
    >>> result.params.shape, result.privacy.is_private
    ((1,), True)
    """
    name = uuid.uuid4().hex
    if folder is not None and (Path(folder) / Saver.FILE).exists():
        raise DataError(f"{folder}: an interrupted run is kept here; resume it, or choose another folder.")
    objective, data = of_people(objective, data, person, combine, records_per_person)
    curator = CentralCurator(objective, data, ledger=ledger, account=account, cap=cap, run=name, seed=seed)
    declared = len(curator.records) if n_public is None else n_public
    the_plan = planned or plan(
        algorithm, n=declared, budget=budget, noise_multiplier=noise_multiplier, unit=curator.unit,
        records_public=records_public,
    )  # fmt: skip
    if (the_plan.budget, the_plan.n_public, the_plan.records_public) != (budget, declared, records_public):
        raise ValueError("planned: is a plan for another budget or another number of records; plan again.")
    notes = () if n_public is not None else ("n was taken from the data and is thereby declared public",)
    notes = (*notes, *how_people_count(objective))
    check_people(algorithm, objective)
    x0 = curator.initial() if start is None else _check_start(start, curator.initial())
    algorithm.check_run(objective, the_plan, x0)
    saver = None
    try:
        if folder is not None:
            # Before the reservation, so that a crash at any moment after it finds something to resume.
            key = None if seed is not None else KeyFile.create(name, folder)
            saver = Saver(Path(folder), name, the_plan, checkpoint_seconds, notes, key)
            saver.write(algorithm.init(x0), {}, None)
        session = curator.open(the_plan, transcript=None if saver is None else saver.transcript)
    except Exception:
        if saver is not None:
            saver.close()
        discard(name, folder)
        raise
    try:
        return _run(algorithm, session, x0, saver, account, notes, callback)
    except Exception as error:
        if refused(session, error):  # then there is nothing to resume either
            discard(name, folder)
        raise


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
    person: Any = None,
    combine: Combine = "mean",
    records_per_person: int | None = None,
) -> Result:
    """Continue an interrupted :func:`minimize` with the same arguments and ``folder``.

    The run replays what it had released since its last checkpoint: where the sums are bit for bit those of before,
    with the same noise, so that the model is that of an undisturbed run and nothing is spent twice. Where they are
    not (other data, an edited loss, other versions or threads), fresh noise is drawn and the plan is charged again,
    and the result says so. Settings that differ publicly are refused.
    """
    saved = checkpoints.load(Path(folder) / Saver.FILE)
    meta = saved.meta
    if (result := finished_result(Path(folder), meta["run"])) is not None:
        discard(meta["run"], folder)
        return result
    budget = None if meta["budget"] is None else Budget.from_json(meta["budget"])
    check_resumable(folder, meta, algorithm)
    objective, data = of_people(objective, data, person, combine, records_per_person)
    unit = meta.get("unit", "record")
    if (unit == "person") != isinstance(objective, OfPeople) or tuple(how_people_count(objective)) != tuple(
        note for note in meta["notes"] if note.startswith(COUNTED)
    ):
        raise DataError(
            f"{folder}: the run counted its people otherwise; resume it with the same person= settings."
        )
    the_plan = plan(
        algorithm, n=meta["n_public"], budget=budget, noise_multiplier=meta["noise_multiplier"], unit=unit,
        records_public=meta.get("records_public"),
    )  # fmt: skip
    name, key, notes = meta["run"], KeyFile.load(meta["run"]), tuple(meta["notes"])
    curator = CentralCurator(objective, data, ledger=ledger, account=account, cap=cap, run=name)
    released = int(meta.get("released", 0))
    if not hmac.compare_digest(str(meta.get("seal")), seal(key, saved.used, saved.rho_left, released)):
        raise DataError(f"{folder}: the checkpoint was altered, so nobody can tell how far the run had come.")
    saver = Saver(Path(folder), name, the_plan, checkpoint_seconds, notes, key, resumed=True, released=released)
    saver.history, saver.seconds_before = meta["history"], meta["seconds"]
    try:
        session = curator.open(the_plan, transcript=saver.transcript, used=saved.used, rho_left=saved.rho_left)
    except Exception:
        saver.close()
        raise
    return _run(algorithm, session, curator.initial(), saver, account, notes, callback, saved.state)


COUNTED = "a person counts with "


def how_people_count(objective: Any) -> tuple[str, ...]:
    """What a statement says of people with several records."""
    if not isinstance(objective, OfPeople):
        return ()
    most = objective.records_per_person
    of = "all their records" if most is None else f"at most {most} of their records, chosen anew for every release"
    return (f"{COUNTED}the {objective.combine} of {of}, clipped as a whole",)


def check_people(algorithm: Algorithm, objective: Any) -> None:
    """Raise, before anything is reserved, if the method asks what is bounded only for a mean of all records."""
    if not isinstance(objective, OfPeople) or not algorithm.needs_means:
        return
    if objective.combine == "sum" or objective.records_per_person is not None:
        raise PersonRefused(
            f"{algorithm.name}: what it asks is bounded for the mean of all of a person's records only: leave out "
            "combine and records_per_person, or use a method that clips."
        )


def check_resumable(folder: str | Path, meta: Any, algorithm: Algorithm) -> None:
    """Raise unless the kept run is one of ``algorithm`` that may go on."""
    if meta["algorithm"] != algorithm.name or meta["config"] != json_values(algorithm.config()):
        raise DataError(
            f"{folder}: the checkpoint is of {meta['algorithm']} with other settings; resume with those."
        )
    if meta["seeded"]:
        raise DataError(f"{folder}: the run's randomness was seeded, so it is not private; start it again instead.")


def _run(
    algorithm: Algorithm,
    session: CentralSession,
    x0: Vector,
    saver: Saver | None,
    account: str,
    notes: tuple[str, ...],
    callback: Callback | None,
    state: State | None = None,
) -> Result:
    try:
        result = run(
            algorithm, session, x0, state=state, callback=callback, saver=saver, account=account, notes=notes
        )
        return result if saver is None else saver.finish(result)
    finally:
        if saver is not None:
            saver.close()


def _check_start(start: Vector, like: Vector) -> Vector:
    if tuple(start.shape) != tuple(like.shape) or not all_finite(start):
        raise DataError(f"start: must be {len(like)} finite numbers, one per parameter.")
    return copy(start)
