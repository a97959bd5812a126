"""The open door of a federation: a release is a round of messages; a lost one is asked again as a new release."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.curators.account import Charge
from quietgrad.curators.base import Spent, relative
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.federation.aggregate_store import AggregateStore
from quietgrad.federation.cohorts import draw, rescaling
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.queries import Scores, pack
from quietgrad.federation.rounds import Ask, Caller, LostRound, named, rounds
from quietgrad.federation.wire import Message, encode
from quietgrad.objectives.base import Query, Regularizer
from quietgrad.plans.schedule import Plan
from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.rng import SecureStream, run_key
from quietgrad.sampling import SinglePass
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.vectors import Vector, zeros_like

if TYPE_CHECKING:
    from quietgrad.federation.coordinator import FederatedCurator

Floats = npt.NDArray[np.float64]


class FederatedSession:
    """The open door to many parties; see :class:`quietgrad.curators.base.Session`."""

    def __init__(
        self,
        plan: FederatedPlan,
        curator: FederatedCurator,
        store: AggregateStore,
        caller: Caller,
        charge: Charge,
    ) -> None:
        self.plan: Plan = plan
        self._plan = plan
        self.objective: Any = curator.objective
        self.regularizer: Regularizer = curator.objective.regularizer
        self.faults: list[tuple[int, dict[str, str]]] = []
        """Rounds that went wrong, or were completed without someone: number, and by name what happened."""
        self._store, self._caller, self._charge = store, caller, charge
        self.epochs = 1
        self._answered: set[str] = set()
        self._tell = curator.tell
        self.seeded = curator.seeded
        self._key = curator._key if self.seeded else run_key(curator._key, store.run)
        self._rounds = rounds(plan, caller, curator._identity, curator._roster)
        self._zero = zeros_like(curator.objective.initial(plan.shape))
        self._sources = {
            slot.name: slot.mechanism.source(self._key, slot.name, plan.limit(slot.name))
            for slot in plan.schedule.slots
        }
        self._made = {slot.name: 0 for slot in plan.schedule.slots}
        self._draws = dict(self._made)
        self._replay = list(reversed(store.done))
        self._round = store.last_round
        self._filter = plan.schedule.composition == "filter"
        self._rho = plan.event_rho if self._filter and plan.budget is not None else math.inf
        self.rho_left = self._rho
        self.closed = False
        if store.resumed and not store.done:
            self._catch_up()

    @property
    def used(self) -> dict[str, int]:
        """Releases charged so far by slot, lost rounds among them."""
        return dict(self._draws)

    @property
    def made(self) -> int:
        """Rounds completed so far, of all slots."""
        return sum(self._made.values())

    def expected_batch(self, slot: str) -> float:
        return self._plan.schedule[slot].sampling.expected_batch(self._plan.n_public)

    def uniform(self, label: str) -> float:
        word = SecureStream(self._store.public_key, f"public/{label}").uint64(0, 1)[0]
        return float(word >> np.uint64(11)) * 2.0**-53

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        total = self._replayed(slot, rho)
        if total is None:
            total = self._ask(slot, query, rho)
        if isinstance(self._zero, np.ndarray) or len(total) != len(self._zero):
            return total
        return self._zero.new_tensor(total)

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        """The least of several sums: by the exponential mechanism of a trusted curator, else from noisy sums.

        ``offsets`` are added here, once: parties answer for their records only.
        """
        relation = Relation.ADD_REMOVE if self._plan.budget is None else self._plan.budget.relation
        public = relative(offsets, len(queries))
        chosen = self._replayed(slot, rho)
        if chosen is None:
            chosen = self._ask(slot, Scores(tuple(queries), relation), rho, public)
        return int(chosen[0]) if len(chosen) == 1 else int(np.argmin(chosen + public))

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        raise BudgetError("a noisy search needs one curator of all held-out records; parties use Algorithm 4.")

    def close(self, reason: str, *, data_dependent: bool = False) -> Spent:
        """Book the run here and at every party; a run that was interrupted meanwhile may simply close again."""
        if self.closed:
            raise BudgetError("this session is closed already; open a new one for a new plan.")
        self.closed = True
        self._store.end()
        words = {"run": self._store.run, "reason": reason}
        # A party who does not hear of the end keeps the whole plan charged, which is what it books anyway.
        message = encode(Message("close", words))
        self._caller.transport.exchange(dict.fromkeys(self._plan.names, message), self._caller.timeout)
        event = self._charge.close(self._spent_event(), reason=reason, data_dependent=data_dependent)
        return Spent(event, self.used, reason, data_dependent)

    def forget(self) -> None:
        """The result is safe: remove what was kept to continue the run."""
        self._store.remove()

    def leave(self) -> None:
        """Let go of what was kept, for whoever continues the run."""
        self._store.close()

    # --- rounds -----------------------------------------------------------------------------------------------

    def _ask(self, slot: str, query: Query, rho: float | None, offsets: Floats | None = None) -> Floats:
        """Ask until a round is complete, each time as a new release, and keep the aggregate before it is used."""
        if self.closed:
            raise BudgetError("this session is closed; open a new one for a new plan.")
        if self._store.ended:
            raise BudgetError("the kept run had ended and this one asks for more; not the same run.")
        if self._made[slot] >= self._plan.schedule[slot].count:
            raise ExhaustedError(
                f"the plan allows {self._plan.schedule[slot].count} releases of {slot!r} and all were made."
            )
        dim = query.dim(self._plan.shape)
        if query.bound == 0.0:  # exactly zero whatever the data: nobody is asked
            return self._keep(slot, np.zeros(dim), self._begin(slot, rho))
        fields, arrays = pack(query)
        multiplier = self._plan.multiplier(slot, rho)
        while True:
            self._readmit()
            t = self._begin(slot, rho)
            words = {"run": self._store.run, "round": t, "slot": slot, "draw": self._draws[slot] - 1, "rho": rho}
            words |= {"dim": dim, "query": fields}
            ask = Ask(draw(self._plan, self._key, t), t, slot, words, arrays, dim, float(query.bound), multiplier)
            faults: dict[str, str] = {}
            try:
                total, present = self._rounds.collect(ask, faults)
            except LostRound as lost:
                self.faults.append((t, lost.faults))
                left = max(0, self._plan.spare - (self._draws[slot] - self._made[slot]))
                self._tell(f"round {t} is lost ({named(lost.faults)}); {left} spare rounds are left")
                continue
            if faults:
                self.faults.append((t, faults))
                self._tell(f"round {t} is complete without some ({named(faults)})")
            self._answered.update(name for name in ask.invited if name not in faults)
            finished = self._finished(ask, query, total, rho, offsets)
            if not isinstance(query, Scores):
                finished *= rescaling(self._plan, present)
            return self._keep(slot, finished, t)

    def _readmit(self) -> None:
        """Open the run again to those who do not know it: they restarted, and come back with their journal."""
        back = self._caller.strangers & set(self._plan.names)
        if self._caller.strangers:
            self._caller.strangers.clear()
            self._rounds.reset()
        if back:
            message = encode(Message("open", {"run": self._store.run, "plan": self._plan.digest}))
            replies = self._caller.call(dict.fromkeys(back, message), {})
            ready = {name: reply for name, reply in replies.items() if reply.kind == "ready"}
            fresh = any(slot.sampling.participation(1) is not None for slot in self._plan.schedule.slots)
            for name, reply in ready.items():
                if fresh and name in self._answered and reply.fields.get("round", -1) < 0:
                    raise ProtocolError(
                        name, "restarted without its journal and cannot tell used records from fresh"
                    )

    def _begin(self, slot: str, rho: float | None) -> int:
        """Charge a new release of ``slot``, durably, and return its round number."""
        if self._draws[slot] - self._made[slot] > self._plan.spare:
            t, faults = self.faults[-1] if self.faults else (self._store.last_round, {})
            why = named(faults) or "interrupted"
            raise DropoutError(
                list(faults) or ["coordinator"],
                f"round {t} was lost ({why}) and the plan's {self._plan.spare} spare rounds are used up",
            )
        if rho is not None and self._plan.is_private:
            if not 0.0 < rho <= self.rho_left:
                raise BudgetError(f"rho={rho:g}: the filter has {self.rho_left:g} left; stop, or ask for less.")
            self.rho_left -= rho
        sampling = self._plan.schedule[slot].sampling
        if isinstance(sampling, SinglePass) and self._taken() + sampling.batch_size > sampling.n:
            raise ExhaustedError(f"fresh records are used up: {self._taken()} of {sampling.n} were taken.")
        self._round += 1
        self._draws[slot] += 1
        self._store.ask(self._round, slot, rho)
        return self._round

    def _taken(self) -> int:
        slots = self._plan.schedule.slots
        return sum(s.sampling.batch_size * self._draws[s.name] for s in slots if isinstance(s.sampling, SinglePass))

    def _finished(self, ask: Ask, query: Query, total: Floats, rho: float | None, offsets: Floats | None) -> Floats:
        """What leaves: with the curator's noise if it is the one who adds it."""
        if self._plan.trust != "curator" or ask.multiplier == 0.0:
            return total
        source, number = self._sources[ask.slot], self._draws[ask.slot] - 1
        if isinstance(query, Scores):
            assert rho is not None
            most = max(each.bound for each in query.candidates) * self._plan.reach
            scores = total if offsets is None else total + offsets
            return np.array([float(source.choose(scores, number, rho, most))])
        source.add(total, number, ask.multiplier, ask.bound * self._plan.reach)
        return total

    def _keep(self, slot: str, total: Floats, t: int) -> Floats:
        self._store.finish(t, slot, total)
        self._made[slot] += 1
        return total

    def _replayed(self, slot: str, rho: float | None) -> Floats | None:
        """The aggregate that an interrupted run already released here, if there is one."""
        if not self._replay:
            return None
        done = self._replay.pop()
        if done.slot != slot:
            raise BudgetError(
                f"the kept run released {done.slot!r} here and this one asks {slot!r}; not the same run."
            )
        self._made[slot] += 1
        self._draws[slot] += 1
        if rho is not None and self._plan.is_private:
            self.rho_left -= rho
        if not self._replay:
            self._catch_up()
        return done.value

    def _catch_up(self) -> None:
        """Count the rounds that were asked and never finished: they are spent."""
        self._draws = {name: self._store.asked.get(name, 0) for name in self._made}
        if self._filter and self._plan.is_private:
            self.rho_left = self._rho - self._store.rho

    def _spent_event(self) -> events.Event | None:
        """The whole plan, or what its zCDP filter counted.

        Spare rounds that were not needed are not given back: whether a round is lost is up to any member, who has
        seen earlier releases by then.
        """
        if self._plan.budget is None:
            return None
        if self._filter and self.rho_left < self._rho:
            return self._plan.filter_event(self._rho - self.rho_left)
        return self._plan.event

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong on the way, for the result."""
        return tuple(f"round {t}: {named(faults)}" for t, faults in self.faults)
