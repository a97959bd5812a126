"""Minimise an empirical risk on one table, and continue after an interruption."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from quietgrad.algorithms.base import Algorithm
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import DataError
from quietgrad.plans.price import plan
from quietgrad.privacy.budget import Budget
from quietgrad.training import checkpoint as checkpoints
from quietgrad.training.result import Result
from quietgrad.training.running import Callback, run
from quietgrad.training.saving import Saver, discard, finished_result, identity_of, json_values, make_key
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
    if folder is not None and (Path(folder) / Saver.FILE).exists():
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
            identity = identity_of(curator, make_key(name, curator, folder))
            saver = Saver(Path(folder), name, the_plan, checkpoint_seconds, notes, identity, curator.seeded)
            saver.write(algorithm.init(x0), {}, None)
        session = curator.open(the_plan)
    except Exception:
        discard(name, folder)
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

    saved = checkpoints.load(Path(folder) / Saver.FILE)
    meta = saved.meta
    if (result := finished_result(Path(folder), meta["run"])) is not None:
        discard(meta["run"], folder)
        return result
    budget = None if meta["budget"] is None else Budget.from_json(meta["budget"])
    if meta["algorithm"] != algorithm.name or meta["config"] != json_values(algorithm.config()):
        raise DataError(
            f"{folder}: the checkpoint is of {meta['algorithm']} with other settings; resume with those."
        )
    if meta["seeded"]:
        raise DataError(f"{folder}: the run's randomness was seeded, so it is not private; start it again instead.")
    the_plan = plan(algorithm, n=meta["n_public"], budget=budget, noise_multiplier=meta["noise_multiplier"])
    same = meta["environment"] == checkpoints.environment()
    name = meta["run"] if same else uuid.uuid4().hex
    key = KeyFile.load(meta["run"]) if same else KeyFile.create(name, folder)
    curator = CentralCurator(objective, data, ledger=ledger, account=account, cap=cap, run=name, key=key)
    if same and meta["identity"] != identity_of(curator, key):
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
    saver = Saver(Path(folder), name, the_plan, checkpoint_seconds, notes, identity_of(curator, key))
    saver.history, saver.seconds_before = meta["history"], meta["seconds"]
    result = run(
        algorithm, session, curator.initial(), state=saved.state, callback=callback, saver=saver, account=account,
        notes=notes,
    )  # fmt: skip
    return saver.finish(result)


def _check_start(start: Vector, like: Vector) -> Vector:
    if tuple(start.shape) != tuple(like.shape) or not all_finite(start):
        raise DataError(f"start: must be {len(like)} finite numbers, one per parameter.")
    return copy(start)
