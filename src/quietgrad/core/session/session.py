"""The session of a central curator: it answers one release after another until the plan's counts are used up.

A release draws its sample, sums clipped contributions, writes a MAC of the sum to the run's private transcript if
there is one, and lets the slot's mechanism add the noise. Data meet a mechanism in three places only: here, in the
private count of records (:func:`quietgrad.core.session.curator.public_count`), and in a federation.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import noise_multiplier_for_rho
from quietgrad.core.errors import BudgetError, DataError, ExhaustedError
from quietgrad.core.ledger.account import Charge
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.sampling import Sampler, Sampling
from quietgrad.core.session.base import SessionCost, offsets_above_minimum
from quietgrad.core.session.objectives import (
    Batch,
    RecordAdapter,
    Records,
    Regularizer,
    StreamedRecords,
    public_loss,
)
from quietgrad.core.session.queries import LabelQuery, Query
from quietgrad.core.session.summing import add_batch, batch_sum
from quietgrad.core.session.transcript import Transcript
from quietgrad.core.vectors import OwnVector, zeros_like, zeros_without_memory

Answer = TypeVar("Answer")
Asked = ParamSpec("Asked")
_PLACES = "/places"  # in a transcript, beside the slots: the records in their order
_FILTER_ONLY = "rho must be given exactly in a plan with a zCDP filter."


class PendingRelease(NamedTuple):
    """A release that has begun: its slot, its number there, and where its fresh records start."""

    slot: str
    number: int
    fresh: int


def _serialized(
    verb: Callable[Concatenate[CentralSession, Asked], Answer],
) -> Callable[Concatenate[CentralSession, Asked], Answer]:
    """One release at a time, whichever threads ask."""

    @wraps(verb)
    def locked(self: CentralSession, /, *args: Asked.args, **options: Asked.kwargs) -> Answer:
        with self._lock:
            return verb(self, *args, **options)

    return locked


class CentralSession:
    """The session of a :class:`CentralCurator`; see :class:`quietgrad.core.session.base.Session`."""

    def __init__(
        self,
        plan: Plan,
        objective: RecordAdapter,
        records: Records,
        key: bytes,
        charges: Mapping[str, Charge],
        *,
        run: str,
        transcript: Transcript | None = None,
        again: Callable[[str], Charge] | None = None,
        seeded: bool = False,
    ) -> None:
        self.plan, self.run, self.seeded = plan, run, seeded
        self._key, self._again, self._transcript = key, again, transcript
        self._charges = dict(charges)  # one for each epoch, by nonce: a resumed run states what all of them cost
        self._epoch = 0
        self._process = os.getpid()
        self._resumed = transcript is not None and transcript.resumed
        self._trusted = not charges[""].paid and (transcript is None or transcript.complete)
        self._lock = threading.RLock()  # two threads that drew the same number would use its noise twice
        self._private = plan.budget is not None
        self._filter = plan.schedule.composition == "filter"
        self._closed = False
        self.rho_left = plan.event_rho if self._filter and plan.budget is not None else math.inf
        self._slots = {slot.name: slot for slot in plan.schedule.slots}
        self._multipliers = {slot.name: slot.multiplier(plan.noise_multiplier) for slot in plan.schedule.slots}
        self._used = dict.fromkeys(self._slots, 0)
        self._begun: set[PendingRelease] = set()  # drawn and not yet released
        self._room: OwnVector = None  # memory of a sum that was released
        self._fresh_at = 0  # fresh records taken by single passes
        self._bind(objective, records)
        self._draw_from(key)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an open session cannot be copied or pickled: two would use the same noise.")

    def _bind(self, objective: RecordAdapter, records: Records) -> None:
        self.objective: Any = public_loss(objective)
        self._reading = objective
        self._records = records
        self._streamed = records if isinstance(records, StreamedRecords) else None
        self.regularizer: Regularizer = objective.regularizer
        self._zero = zeros_without_memory(objective.initial(records))
        self._dim = len(self._zero)
        self._compiled = objective.silent_batches

    def _draw_from(self, key: bytes) -> None:
        """Derive samples and noise from ``key``, the slot and the release's number: a replay draws the same."""

        def sampler(sampling: Sampling, label: str) -> Any:
            # A table that is not in memory gets a sampler that keeps no list of all records in memory either.
            make = sampling.scanning if self._streamed is not None else sampling.sampler
            return make(len(self._records), SecureStream(key, f"sample/{label}"))

        # One store of unused records serves all single-pass slots of a plan.
        fresh = next((slot.sampling for slot in self._slots.values() if slot.sampling.fresh), None)
        self._fresh: Any = None if fresh is None else sampler(fresh, "fresh")
        self._samplers: dict[str, Sampler] = {
            name: sampler(slot.sampling, name) for name, slot in self._slots.items() if not slot.sampling.fresh
        }
        self._batches: dict[PendingRelease, Batch] = {}  # of releases that have begun and are not over
        self._inner = {name: SecureStream(key, f"inner/{name}") for name in self._slots}
        self._sources = {name: slot.mechanism.source(key, name, slot.count) for name, slot in self._slots.items()}

    # --- what algorithms ask ----------------------------------------------------------------------------------

    @property
    def used(self) -> dict[str, int]:
        return dict(self._used)

    @property
    def made(self) -> dict[str, int]:
        """The number of releases that count, by slot: those begun here, and those of a process that died.

        If the transcript may have lost some, all planned releases count.
        """
        log, slots = self._transcript, self._slots.values()
        if log is None:
            return self.used
        return {s.name: max(self._used[s.name], log.count(s.name)) if log.complete else s.count for s in slots}

    @property
    def charge(self) -> Charge:
        """The entry that pays for this session."""
        return next(reversed(self._charges.values()))

    @property
    def charged(self) -> tuple[str, ...]:
        """Notes on how the run was charged, which its statement must carry."""
        return tuple(dict.fromkeys(charge.note for charge in self._charges.values() if charge.note))

    def initial(self) -> OwnVector:
        """The starting point, which depends on no record."""
        return self._reading.initial(self._records)

    def expected_batch(self, slot: str) -> float:
        return self.plan.schedule[slot].sampling.expected_batch(self.plan.n_public)

    def uniform(self, label: str) -> float:
        return float(SecureStream(self._key, f"public/{label}").uint64(0, 1)[0] >> np.uint64(11)) * 2.0**-53

    @_serialized
    def draw(self, slot: str) -> PendingRelease:
        """Begin a release, which counts from here on, whether or not it is ever made.

        It serves a loop that reads the records itself (:meth:`batch`): such a loop may act on what it reads.
        """
        begun = self._begin(slot, "release")
        self._begun.add(begun)
        return begun

    def _begin(self, slot: str, verb: str) -> PendingRelease:
        chosen = self._slots.get(slot) or self.plan.schedule[slot]  # raises, naming what the plan holds
        if chosen.mechanism.verb != verb:
            raise BudgetError(
                f"{slot!r} was planned as {chosen.mechanism.what}, which {chosen.mechanism.verb}() releases. "
                f"{verb}() would have another cost; plan a release for it."
            )
        if self._closed:
            raise BudgetError("this session is closed; open a new one for a new plan.")
        self._here()
        for other, spanning in self._slots.items():
            if not spanning.mechanism.together or other == slot or not 0 < self._used[other] < spanning.count:
                continue
            if not (chosen.interleaves and spanning.interleaves):
                raise BudgetError(
                    f"{slot!r}: cannot be released between the releases of {other!r}, whose noise is correlated. "
                    "Release it before them."
                )
        number = self._used[slot]
        if number >= chosen.count:
            raise ExhaustedError(f"the plan allows {chosen.count} releases of {slot!r} and all were made.")
        begun = PendingRelease(slot, number, self._fresh_at)
        if chosen.sampling.fresh:
            self.batch(begun)  # refuses when fresh records are used up, before anything counts
            self._fresh_at += chosen.sampling.fresh
        self._used[slot] = number + 1
        return begun

    @_serialized
    def batch(self, drawn: PendingRelease) -> Batch:
        """The records of a release that has begun, drawn once, and the secret of its own randomness."""
        records = self._batches.get(drawn)
        if records is None:
            records = self._batches[drawn] = self._batch(drawn)
        return records

    def _batch(self, drawn: PendingRelease) -> Batch:
        sampler = self._samplers.get(drawn.slot)
        if sampler is None:
            self._fresh.skip_to(drawn.fresh)
            indices = self._fresh.take(self._slots[drawn.slot].sampling.fresh)
        else:
            indices = sampler.batch(drawn.number)
        # Compiled sums draw no random numbers of their own, and a key would cost as much as they do.
        key = None if self._compiled else self._inner[drawn.slot].bytes(drawn.number, 32)
        return Batch(self._records, indices, key)

    def foresee(self, *queries: Query) -> None:
        if self._streamed is not None:
            self._streamed.foresee(*queries)

    @_serialized
    def release(self, slot: str, query: Query, *, rho: float | None = None) -> OwnVector:
        return self._answer(self._begin(slot, "release"), query, rho)

    @_serialized
    def release_drawn(self, drawn: PendingRelease, query: Query, *, rho: float | None = None) -> OwnVector:
        """The noisy sum of ``query`` over a sample that :meth:`draw` handed out; each serves one release."""
        if drawn not in self._begun:
            raise BudgetError("this sample was released already, or another session drew it. Draw a new one.")
        self._begun.remove(drawn)
        return self._answer(drawn, query, rho)

    @_serialized
    def forget(self, drawn: PendingRelease) -> None:
        """Give up a release that has begun and that another process makes; it stays counted."""
        self._begun.discard(drawn)
        self._batches.pop(drawn, None)

    def _here(self) -> None:
        if os.getpid() != self._process:  # a forked child would draw the same noise as its parent, on other sums
            raise BudgetError("this session was opened by another process; open one here, with a plan of its own.")

    def _answer(self, drawn: PendingRelease, query: Query, rho: float | None) -> OwnVector:
        self._here()
        slot = drawn.slot
        bound = self._slots[slot].mechanism.bound_of(query)
        dim = query.dim(self._records)
        multiplier = self._multiplier(slot, rho) if self._private else 0.0

        def narrow(out: OwnVector) -> OwnVector:  # to the precision of the parameters; sums are wider
            if isinstance(out, np.ndarray):
                return out
            narrowed = out.to(self._zero.dtype)
            # For the next sum: of a network's length, new memory costs as much as noise.
            self._room = out if narrowed is not out else None
            return narrowed

        while True:
            batch = self._batches.pop(drawn, None) or self._batch(drawn)
            if self._private and bound == 0.0:  # zero whatever the data, so no record is read
                return zeros_like(self._zero) if dim == self._dim else np.zeros(dim)
            room, self._room = self._room, None
            out = batch_sum(query, self._reading, batch, self._zero, private=self._private, room=room)
            if not self._private:
                return narrow(out)
            host = isinstance(out, np.ndarray)
            log, source = self._transcript, self._sources[slot]
            if on_accelerator(out) and source.stays(out):  # it meets its noise there
                if log is None or self._settled(drawn, (multiplier, bound), log.digest(out)):
                    source.add(out, drawn.number, multiplier, bound)
                    return narrow(out)
                continue
            held = out if host else out.detach().cpu()
            total = held if host else held.numpy()  # the same memory
            if log is None or self._settled(drawn, (multiplier, bound), total):
                source.add(total, drawn.number, multiplier, bound)
                return total if host else narrow(held.to(out.device))

    @_serialized
    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        begun = self._begin(slot, "choose")
        bound = max(float(query.bound) for query in queries)
        if self._private:
            self._spend(rho)
        while True:
            self.foresee(*queries)
            scores = np.array([self._score(query, begun) for query in queries])
            scores += offsets_above_minimum(offsets, len(queries))
            if not self._private:
                return int(np.argmin(scores))
            if self._settled(begun, (rho, bound), scores):
                return self._sources[slot].choose(scores, begun.number, rho, bound)

    @_serialized
    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        begun = self._begin(slot, "first_below")
        multiplier = self._multiplier(slot, None) if self._private else 0.0
        while True:
            self.foresee(*queries)
            looked: list[float] = []

            def values(seen: list[float] = looked) -> Iterator[tuple[float, float]]:
                for query in queries:
                    seen.append(self._score(query, begun))
                    yield seen[-1], float(query.bound)

            if not self._private:
                return next((k for k, (value, _) in enumerate(values()) if value <= threshold), None)
            place = self._sources[slot].first_below(values(), threshold, begun.number, multiplier)
            bounds = np.array([float(query.bound) for query in queries[: len(looked)]])
            if self._settled(begun, (multiplier, threshold), np.array(looked), bounds):
                return place

    @_serialized
    def discover(self, slot: str, query: LabelQuery) -> npt.NDArray[Any]:
        begun = self._begin(slot, "discover")
        multiplier = self._multiplier(slot, None) if self._private else 0.0
        bound = self._slots[slot].mechanism.bound_of(query)
        while True:
            labels, counts = query.count(self.batch(begun))
            if not self._private:
                return labels
            content = np.frombuffer(repr(labels.tolist()).encode(), np.uint8)
            if self._settled(begun, (multiplier, bound), counts, content):
                return query.kept(labels, self._sources[slot].passing(counts, begun.number, multiplier, bound))

    def reread(self, objective: RecordAdapter, data: object) -> None:
        """Read the same people again by another adapter, which earlier releases (labels, ranges) determined."""
        if objective.unit is not self._reading.unit:
            raise DataError(
                "the privacy unit cannot change within a run. Continue by record or by person, as begun."
            )
        records = objective.prepare(data)
        if len(records) != len(self._records):
            raise DataError("the records changed within a run: go on with the same people in the same order.")
        self._bind(objective, records)

    def close(self, reason: str, *, data_dependent: bool = False) -> SessionCost:
        if self._closed:
            raise BudgetError("this session is closed already; open a new one for a new plan.")
        self._closed = True
        if not self._private:
            return SessionCost(None, self.used, reason, data_dependent)
        # A run that was resumed on other sums has releases under several entries. Each entry is charged whole.
        whole = data_dependent or len(self._charges) > 1
        spent = [
            charge.close(self._spent_event(whole), reason=reason, data_dependent=whole)
            for charge in self._charges.values()
        ]
        return SessionCost(
            events.composed([event for event in spent if event is not None]), self.used, reason, whole
        )

    # --- continuing after an interruption ---------------------------------------------------------------------

    @property
    def epochs(self) -> int:
        """How often the plan was charged: once, and again for each time a resumed run asked something else."""
        return len(self._charges)

    def advance(self, used: Mapping[str, int], rho_left: float | None) -> None:
        """Skip the first ``used`` releases of each slot. Call this before any release."""
        if any(self._used.values()):
            raise BudgetError("this session has made releases; going back would reuse their noise. Open a new one.")
        for name, count in used.items():
            self._used[self.plan.schedule[name].name] = count  # refuses what the plan does not hold
        self._fresh_at = sum(s.sampling.fresh * self._used[s.name] for s in self._slots.values())
        if rho_left is not None:
            self.rho_left = rho_left
        log = self._transcript
        if log is None or not self._private or not any(s.sampling.by_place for s in self._slots.values()):
            return
        # Single passes, epochs and turns address a record by its place, so records must keep the order in which the
        # run began. In another order a used record could take the place of an unused one, and replayed sums need
        # not show it. The guarantee then holds for each part: the rest is a new epoch, with its own charge.
        mac = log.mac_of(self._records.contents())
        if (log.known(_PLACES, 0) or (0, b""))[1] == mac:
            return
        if any(self._used.values()) or log.released_besides(_PLACES):
            self._enter(log.epoch + 1)
        log.record(_PLACES, 0, mac)

    def _settled(self, begun: PendingRelease, settings: tuple[float, ...], *sums: npt.NDArray[np.generic]) -> bool:
        """Whether this release is new, or repeats the very sum that was released under its number before.

        If it is neither, a new epoch with its own samples and noise has begun, and the caller must sum again.
        """
        log = self._transcript
        if log is None:
            return True
        mac = log.mac(begun.slot, begun.number, settings, *sums)
        epoch, before = log.known(begun.slot, begun.number) or (-1, b"")
        if epoch == self._epoch and before == mac:
            return True
        if epoch < self._epoch == log.epoch and self._trusted:  # never asked in this epoch
            log.record(begun.slot, begun.number, mac)
            return True
        self._enter(log.epoch if log.epoch > self._epoch else log.epoch + 1)
        return False

    def _enter(self, epoch: int) -> None:
        """Go on in another epoch, with its own samples and noise, after it is charged."""
        assert self._transcript is not None
        assert self._again is not None
        log = self._transcript
        if epoch > log.epoch:
            nonce = log.intend()
            self._charges[nonce] = self._again(nonce)
            log.fork()
        self._epoch = epoch
        self._trusted = log.complete and not self._charges[log.epochs[epoch - 1]].paid
        self._draw_from(self._transcript.key(epoch))

    # --- one release ------------------------------------------------------------------------------------------

    def _score(self, query: Query, begun: PendingRelease) -> float:
        score = np.zeros(1)
        add_batch(query, self._reading, self.batch(begun), score)
        return float(score[0])

    def _spent_event(self, data_dependent: bool) -> events.Event:
        budget = self.plan.budget
        assert budget is not None
        # This process does not know how much of a filter a process that died had spent.
        if self._filter and self.rho_left < self.plan.event_rho and not self._resumed:
            return events.ZCDP(self.plan.event_rho - self.rho_left, budget.relation)
        counts = self.made
        whole = data_dependent or self._filter or self.plan.whole_only or not any(counts.values())
        return self.plan.event if whole else self.plan.event_of(counts)

    def _multiplier(self, slot: str, rho: float | None) -> float:
        if rho is None:
            if self._filter:
                raise BudgetError(_FILTER_ONLY)
            return self._multipliers[slot]
        self._spend(rho)
        assert self.plan.budget is not None
        return noise_multiplier_for_rho(rho, self.plan.budget.relation)

    def _spend(self, rho: float) -> None:
        if not self._filter:  # where nothing would count it
            raise BudgetError(_FILTER_ONLY)
        if not 0.0 < rho <= self.rho_left:
            raise BudgetError(f"rho={rho:g}: the filter has {self.rho_left:g} left; stop, or ask for less.")
        self.rho_left -= rho


def on_accelerator(out: OwnVector) -> bool:
    """Whether a sum is in the memory of an accelerator."""
    return not isinstance(out, np.ndarray) and bool(out.device.type != "cpu")
