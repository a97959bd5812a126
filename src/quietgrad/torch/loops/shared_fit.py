"""A method's run on several processes, each of which sums its share of every sample.

A run that is kept in a folder is the leading process's: it holds the key, the ledger and the checkpoints, and tells
the others where the run stands. After an interruption the same call goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import DEFAULT
from quietgrad.core.plans.counting import NOMINAL
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.kept import Run, is_kept, open_run
from quietgrad.core.session.opening import Keeping, OpenRun, Terms, followed, opened, reopened
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.callbacks import Callback, begin
from quietgrad.methods.minimizing import TABLE, counting, how_people_count, run
from quietgrad.methods.registry import current_config
from quietgrad.methods.result import Result, over
from quietgrad.tables.registry import facts_of
from quietgrad.torch.loops.distributed import (
    SharedCurator,
    SharedSession,
    agree_on_keeping,
    all_or_none,
    broadcast_from_leader,
    broadcast_loop_key,
    is_leader,
    shared_terms,
)

_WHY = "the leading process cannot go on with the run in this folder"


@dataclass(frozen=True)
class _LeadersFit:
    """Where a kept run stands, as the other processes need it."""

    plan: Plan
    used: dict[str, int]
    state: State
    asked: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SharedFit:
    """A method, the data that it runs on, and the folder that may keep its run; all processes call alike."""

    objective: Any
    examples: Any
    algorithm: Algorithm
    callback: Callback
    folder: str | Path | None = None
    checkpoint_seconds: float = field(default=10.0, kw_only=True)

    def fit(self, terms: Terms, *, account: str, ledger: Ledger | str | Path | None) -> Result:
        """Run the method, or go on with the run that the folder keeps."""
        folder = self.folder
        agree_on_keeping(folder)
        if folder is None or not broadcast_from_leader(lambda: is_kept(folder)):
            return self._begun(shared_terms(terms))

        def agree(kept: Run) -> None:
            if terms.seed is not None:
                raise ValueError("seed: the run that is kept in this folder is private; leave seed out.")
            plan = kept.plan
            wanted, settled = terms.budget, plan.budget
            kept.agree(
                "budget", [None if wanted is None else wanted.to_json()],
                [None if settled is None else settled.to_json()],
            )  # fmt: skip
            kept.agree("noise_multiplier", terms.noise_multiplier, plan.noise_multiplier)
            kept.agree("n_public", terms.n_public, plan.n_public)
            kept.agree("records_public", terms.records_public, plan.records_public)

        name = None if account == DEFAULT else account
        return self.resume(ledger=ledger, account=name, cap=terms.account.cap, agree=agree)

    def resume(
        self, *, ledger: Ledger | str | Path | None, account: str | None, cap: Any,
        agree: Callable[[Run], None] | None = None,
    ) -> Result:  # fmt: skip
        """Go on with the run that the folder keeps; what is given beside it must agree."""
        folder = self.folder
        assert folder is not None
        finished = all_or_none(lambda: over(folder) if is_leader() else None, _WHY)
        if (known := broadcast_from_leader(lambda: finished)) is not None:
            return known

        def opening() -> Run | None:
            if not is_leader():
                return None
            kept = open_run(folder, kind=TABLE, ledger=ledger, every=self.checkpoint_seconds)
            try:
                kept.agree_on_account(account, cap)
                self._agree(kept)
                if agree is not None:
                    agree(kept)
            except BaseException:
                kept.close()
                raise
            return kept

        kept = all_or_none(opening, _WHY)
        try:
            return self._continued(kept)
        finally:
            if kept is not None:
                kept.close()

    def _begun(self, terms: Terms) -> Result:
        def first(method: Algorithm, x0: Tensor) -> None:
            begin(self.callback, method.schedule(NOMINAL).releases, x0, private=terms.budget is not None)

        def check(method: Algorithm, plan: Plan, x0: Tensor) -> None:
            _refuse_choices(method, plan)
            method.check_run(self.objective, plan, x0)

        keeping = None
        if self.folder is not None and is_leader():
            settings = {"objective": facts_of(self.objective), "people": counting(self.objective)}
            keeping = Keeping(
                self.folder, TABLE, lambda method, x0: method.init(x0), settings, self.checkpoint_seconds
            )
        with opened(
            self.objective, self.examples, self.algorithm, terms, curator=SharedCurator, first=first, check=check,
            keeping=keeping, notes=how_people_count(self.objective),
        ) as active:  # fmt: skip
            return self._finished(active, None, str(terms.account))

    def _continued(self, kept: Run | None) -> Result:
        def standing() -> _LeadersFit:
            assert kept is not None
            return _LeadersFit(kept.plan, dict(kept._used), kept.state, kept.header.asked, kept.header.notes)

        stands, key = broadcast_from_leader(standing), broadcast_loop_key()
        if kept is not None:
            active = reopened(kept, self.objective, self.examples, self.algorithm, key=key, curator=SharedCurator)
        else:
            active = followed(
                stands.plan, stands.used, self.objective, self.examples, self.algorithm, key=key,
                curator=SharedCurator,
            )  # fmt: skip
            active.notes = stands.notes
        return self._finished(active, stands.state, stands.asked)

    def _finished(self, active: OpenRun[Algorithm], state: State | None, account: str) -> Result:
        """Run the method to its end. The leader saves its result, which every process returns."""
        if self.folder is not None and isinstance(active.session, SharedSession):
            active.session.leader_draws = True
        result = run(
            active.method, active.session, active.start, state=state, callback=self.callback, kept=active.kept,
            account=account, notes=active.notes,
        )  # fmt: skip
        if self.folder is None:
            return result

        def saved() -> Result:
            if active.kept is not None:
                return active.kept.finish(result)
            assert self.folder is not None
            result.save(self.folder)
            return result

        made = all_or_none(
            lambda: saved() if is_leader() else None, "the leading process could not save the result"
        )
        return broadcast_from_leader(lambda: made) or result

    def _agree(self, kept: Run) -> None:
        """Raise ``DataError`` unless the call is about the run that is kept."""
        plan, settings = kept.plan, kept.header.settings
        _refuse_choices(self.algorithm, plan)
        known = [plan.algorithm, current_config(plan.algorithm, plan.config)]
        kept.agree("algorithm", [self.algorithm.name, self.algorithm.config()], known)
        if counting(self.objective) != settings["people"]:
            raise DataError(f"{kept.folder}: the run was started with another person=; resume it with the same.")
        if len(kept.state.params) != self.examples.dim:
            raise DataError(
                f"{kept.folder}: the checkpoint is of a model with {len(kept.state.params)} parameters; this one "
                f"has {self.examples.dim}. Resume with the model it was written for."
            )


def _refuse_choices(method: Algorithm, plan: Plan) -> None:
    verbs = {slot.mechanism.verb for slot in plan.schedule.slots}
    if verbs != {"release"} or plan.schedule.composition == "filter":
        raise ValueError(
            f"{method.name}: chooses among candidates, or how much to spend, by exact numbers that no single "
            "process has. On several processes use a method that releases sums, such as DPSGD, DPAdam or DPSRM."
        )
