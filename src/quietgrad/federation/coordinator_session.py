"""The open door of a federation: a release is a round of messages; a lost one is asked again as a new release."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.curators.base import Spent, relative
from quietgrad.curators.units import UnitNoise
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.federation.aggregate_store import AggregateStore
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.queries import Scores, pack
from quietgrad.federation.rounds import Ask, Caller, LostRound, named, rounds
from quietgrad.federation.wire import Message, encode
from quietgrad.objectives.base import Query, Regularizer
from quietgrad.plans.schedule import Plan
from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.noise import l2_laplace_for, noisy_argmax, release_gaussian, release_l2_laplace, sigma_for
from quietgrad.privacy.rng import SecureStream, run_key
from quietgrad.sampling import SinglePass
from quietgrad.secure.faults import DropoutError, ProtocolError
from quietgrad.vectors import Vector, zeros_like

if TYPE_CHECKING:
    from quietgrad.federation.coordinator import FederatedCurator
    from quietgrad.privacy.ledger import Ledger, Reservation

Floats = npt.NDArray[np.float64]


class FederatedSession:
    """The open door to many parties; see :class:`quietgrad.curators.base.Session`."""

    def __init__(
        self,
        plan: FederatedPlan,
        curator: FederatedCurator,
        store: AggregateStore,
        caller: Caller,
        held: tuple[Ledger, Reservation] | None,
    ) -> None:
        self.plan: Plan = plan
        self._plan = plan
        self.objective: Any = curator.objective
        self.regularizer: Regularizer = curator.objective.regularizer
        self.faults: list[tuple[int, dict[str, str]]] = []
        """Rounds that went wrong, or were completed without someone: number, and by name what happened."""
        self._store, self._caller, self._held = store, caller, held
        self._answered: set[str] = set()
        self._tell = curator.tell
        self.seeded = curator.seeded
        self._key = curator._key if self.seeded else run_key(curator._key, store.run)
        self._rounds = rounds(plan, caller, curator._identity, curator._roster)
        self._zero = zeros_like(curator.objective.initial(plan.shape))
        self._units = UnitNoise(self._key, "unit")
        self._made = {slot.name: 0 for slot in plan.schedule.slots}
        self._draws = dict(self._made)
        self._replay = list(reversed(store.done))
        self._round = store.last_round
        self._filter = plan.schedule.composition == "filter"
        self._rho = plan.event_rho if self._filter and plan.budget is not None else math.inf
        self.rho_left = self._rho
        self._closed = False
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

    def close(self, reason: str, *, data_dependent: bool = False) -> Spent:
        if self._closed:
            raise BudgetError("this session is closed already; open a new one for a new plan.")
        self._closed = True
        event = self._spent_event(data_dependent)
        words = {"run": self._store.run, "reason": reason, "data_dependent": data_dependent}
        # A party who does not hear of the end keeps the whole plan charged: too much, never too little.
        self._caller.call(dict.fromkeys(self._plan.names, encode(Message("close", words))), {})
        if self._held is not None:
            ledger, held = self._held
            event = ledger.close(held.id, spent_event=event, reason=reason, data_dependent=data_dependent)
        self._store.remove()
        return Spent(event, self.used, reason, data_dependent)

    # --- rounds -----------------------------------------------------------------------------------------------

    def _ask(self, slot: str, query: Query, rho: float | None, offsets: Floats | None = None) -> Floats:
        """Ask until a round is complete, each time as a new release, and keep the aggregate before it is used."""
        if self._closed:
            raise BudgetError("this session is closed; open a new one for a new plan.")
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
            ask = Ask(t, slot, {**words, "dim": dim, "query": fields}, arrays, dim, float(query.bound), multiplier)
            faults: dict[str, str] = {}
            try:
                total = self._rounds.collect(ask, faults)
            except LostRound as lost:
                self.faults.append((t, lost.faults))
                left = max(0, self._plan.spare - (self._draws[slot] - self._made[slot]))
                self._tell(f"round {t} is lost ({named(lost.faults)}); {left} spare rounds are left")
                continue
            if faults:
                self.faults.append((t, faults))
                self._tell(f"round {t} is complete without some ({named(faults)})")
            self._answered.update(name for name in self._plan.names if name not in faults)
            return self._keep(slot, self._finished(ask, query, total, rho, offsets), t)

    def _readmit(self) -> None:
        """Open the run again to those who do not know it: they restarted, and come back with their journal."""
        back = self._caller.strangers & set(self._plan.names)
        if self._caller.strangers:
            self._caller.strangers.clear()
            self._rounds.reset()
        if back:
            message = encode(Message("open", {"run": self._store.run, "plan": self._plan.digest}))
            ready = self._caller.call(dict.fromkeys(back, message), {})
            fresh = any(isinstance(slot.sampling, SinglePass) for slot in self._plan.schedule.slots)
            for name, reply in ready.items():
                if fresh and name in self._answered and reply.fields.get("round", -1) < 0:
                    raise ProtocolError(
                        name, "restarted without its journal and cannot tell used records from fresh"
                    )

    def _begin(self, slot: str, rho: float | None) -> int:
        """Charge a new release of ``slot``, durably, and return its round number."""
        if self._draws[slot] - self._made[slot] > self._plan.spare:
            t, faults = self.faults[-1] if self.faults else (self._store.last_round, {})
            why = named(faults) or "the coordinator was interrupted"
            raise DropoutError(
                list(faults),
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
        bound = ask.bound * self._plan.largest_factor
        if isinstance(query, Scores):
            assert rho is not None
            # ε²/8-zCDP; scores are sums of numbers in [0, B] that one record moves by at most the largest factor·B.
            most = max(each.bound for each in query.candidates) * self._plan.largest_factor
            stream = SecureStream(self._key, f"choice/{ask.slot}")
            scores = total if offsets is None else total + offsets
            return np.array([float(noisy_argmax(-scores, math.sqrt(8.0 * rho), most, stream, ask.round))])
        if self._plan.schedule[ask.slot].mechanism == "pure":
            stream = SecureStream(self._key, f"noise/{ask.slot}")
            release_l2_laplace(total, *l2_laplace_for(1.0 / ask.multiplier, bound, ask.dim), stream, ask.round)
            return total
        unit = self._units.row(ask.round, ask.dim)
        release_gaussian(total, unit, *sigma_for(ask.multiplier, bound, ask.dim))
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

    def _spent_event(self, data_dependent: bool) -> events.Event | None:
        if self._plan.budget is None:
            return None
        if self._filter and self.rho_left < self._rho:
            return self._plan.filter_event(self._rho - self.rho_left)
        whole = data_dependent or any(slot.law is not None for slot in self._plan.schedule.slots)
        return self._plan.event if whole or not any(self._draws.values()) else self._plan.event_of(self._draws)

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong on the way, for the result."""
        return tuple(f"round {t}: {named(faults)}" for t, faults in self.faults)
