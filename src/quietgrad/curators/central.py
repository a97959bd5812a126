"""The central curator: one trusted holder of all records.

Each release draws its sample, sums clipped contributions in one compiled call, quantises the sum, adds integer
noise on a public grid, and counts. Samples and unit noise are made in blocks from a cryptographic stream that is
addressed by (slot, number of the release), so that a resumed run replays exactly what an undisturbed one draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.curators.base import Spent
from quietgrad.errors import BudgetError, DataError, ExhaustedError
from quietgrad.objectives.base import Batch, Objective, Query, Regularizer
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.noise import (
    l2_laplace,
    l2_laplace_for,
    noisy_argmax,
    release_gaussian,
    release_l2_laplace,
    sigma_for,
)
from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.sampling import FixedSize, SinglePass
from quietgrad.schedule import Plan, Slot
from quietgrad.vectors import Vector, zeros_like

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger, Reservation
    from quietgrad.sampling.samplers import SlotSampler

_BLOCK_NUMBERS = 2**16  # unit normals made at a time: large enough to amortise a call, small enough for the cache


class CentralCurator:
    """Holds one table; opens a session for a plan after its whole cost is in the ledger.

    Args:
        objective: the loss and its clipped sums.
        data: what ``objective.prepare`` takes; refused if unusable, before anything is reserved.
        ledger: path of a ledger file, a :class:`~quietgrad.privacy.ledger.Ledger`, or ``None`` (nothing durable).
        account: the people the records are about; all runs of one account compose.
        cap: a budget the account as a whole may not exceed.
        run: name of the run in the ledger; needed to resume.
        key: 32 secret bytes for samples and noise; ``None`` draws them from the operating system.
        seed: fixed randomness for tests: the run is then **not private** and says so.
    """

    def __init__(
        self,
        objective: Objective,
        data: Any,
        *,
        ledger: Ledger | str | Path | None = None,
        account: str = "default",
        cap: Budget | None = None,
        run: str | None = None,
        key: bytes | None = None,
        seed: int | None = None,
    ) -> None:
        if cap is not None and ledger is None:
            raise ValueError("cap: needs a ledger that the account's total is kept in; pass ledger=PATH.")
        self.objective = objective
        self.records = objective.prepare(data)
        self.account = account
        self.cap = cap
        self.run = run
        self.seeded = seed is not None
        self._key = seed_key(seed) if seed is not None else (key or fresh_key())
        self._opened = 0
        self._ledger = ledger

    def use_key(self, key: bytes) -> None:
        """Draw samples and noise of the sessions to come from ``key``, that of a key file a run is resumed with."""
        self._key = key

    def initial(self) -> Vector:
        """The starting point, which depends on no record."""
        return self.objective.initial(self.records)

    def open(
        self, plan: Plan, *, used: Mapping[str, int] | None = None, rho_left: float | None = None
    ) -> CentralSession:
        """Reserve the cost of ``plan`` durably, then open its door.

        ``used`` and ``rho_left`` continue an interrupted session of the same plan and key; its reservation, made
        by the first open, is found in the ledger and not made again.
        """
        self._check(plan)
        ledger, reservation = self._reserve(plan, resumed=used is not None)
        session = CentralSession(
            plan, self.objective, self.records, self._session_key(), ledger, reservation, seeded=self.seeded
        )
        session.advance(used or {}, rho_left)
        return session

    def _session_key(self) -> bytes:
        """The curator's key for the first session, a new one for each other: two sessions that drew the same noise
        would let anyone subtract it."""
        self._opened += 1
        if self._opened == 1:
            return self._key
        return SecureStream(self._key, f"session/{self._opened}").bytes(0, len(self._key))

    def _check(self, plan: Plan) -> None:
        exact = plan.budget is not None and plan.budget.relation is Relation.REPLACE_ONE
        fixed = any(isinstance(slot.sampling, FixedSize) for slot in plan.schedule.slots)
        if (exact or fixed) and len(self.records) != plan.n_public:
            why = (
                "under replace-one n is public and must be exact"
                if exact
                else "fixed-size batches need the exact n"
            )
            raise DataError(f"the plan is for n={plan.n_public} but the data has another number of records: {why}.")

    def _reserve(self, plan: Plan, *, resumed: bool) -> tuple[Ledger | None, Reservation | None]:
        if self._ledger is None or plan.budget is None:
            return None, None
        from quietgrad.privacy.ledger import Ledger

        ledger = self._ledger if isinstance(self._ledger, Ledger) else Ledger(self._ledger)
        if resumed and self.run is not None:
            if (found := ledger.find(self.run)) is not None:
                return ledger, found
            if any(held.reservation.run == self.run for held in ledger.book().held.values()):
                return None, None  # the run was closed before its result was saved: it is paid, and only replays
        return ledger, ledger.reserve(
            self.account,
            plan.event,
            delta=plan.budget.delta,
            relation=plan.budget.relation,
            run=self.run or "",
            cap=self.cap,
            note=plan.algorithm,
            fingerprint=self._fingerprint(),
        )

    def _fingerprint(self) -> str | None:
        parts = getattr(self.records, "fingerprint_parts", None)
        if parts is None:
            return None
        from quietgrad.privacy.fingerprint import fingerprint

        return fingerprint(parts())


class _Source:
    """Samples and unit noise of one slot, by number of the release.

    ``fresh`` is the one store of unused records that all single-pass slots of a plan take from.
    """

    def __init__(self, slot: Slot, n_records: int, key: bytes, fresh: SlotSampler | None) -> None:
        self.slot = slot
        self.used = 0
        self._fresh = None
        self._share = 0  # fresh records per release
        if fresh is not None and isinstance(slot.sampling, SinglePass):
            self._fresh, self._share = fresh, slot.sampling.batch_size
        else:
            self._sampler = slot.sampling.sampler(n_records, SecureStream(key, f"sample/{slot.name}"))
        self.stream = SecureStream(key, f"noise/{slot.name}")
        self.choices = SecureStream(key, f"choice/{slot.name}")
        self._key = key
        self._rows = 0
        self._block = -1
        self._units: npt.NDArray[np.float64] = np.empty((0, 0))

    def batch(self) -> npt.NDArray[np.int64] | None:
        """The records of the next release; an :class:`ExhaustedError` if there are no fresh ones left."""
        if self._fresh is None:
            return self._sampler.batch(self.used)
        return self._fresh.take(self._share)

    @property
    def taken(self) -> int:
        """Fresh records that the releases so far have used up."""
        return self.used * self._share

    def unit(self, index: int, dim: int) -> npt.NDArray[np.float64]:
        """N(0, 1) numbers of release ``index``."""
        if self._units.shape[1] != dim:
            # Queries of different lengths must not share words of a stream.
            self._unit_stream = SecureStream(self._key, f"unit/{self.slot.name}/{dim}")
            self._rows = max(1, _BLOCK_NUMBERS // max(dim, 1))
            self._block = -1
        block, row = divmod(index, self._rows)
        if block != self._block:
            self._units = self._unit_stream.normal(block, (self._rows, dim))
            self._block = block
        numbers: npt.NDArray[np.float64] = self._units[row]
        return numbers


class CentralSession:
    """The open door of a :class:`CentralCurator`; see :class:`quietgrad.curators.base.Session`."""

    def __init__(
        self,
        plan: Plan,
        objective: Objective,
        records: Any,
        key: bytes,
        ledger: Ledger | None = None,
        reservation: Reservation | None = None,
        *,
        seeded: bool = False,
    ) -> None:
        self.plan = plan
        self.seeded = seeded
        self.objective = objective
        self.regularizer: Regularizer = objective.regularizer
        self._records = records
        self._key = key
        self._ledger = ledger
        self._reservation = reservation
        self._zero = zeros_like(objective.initial(records))
        self._silent = getattr(objective, "silent_batches", False)
        passes = [slot.sampling for slot in plan.schedule.slots if isinstance(slot.sampling, SinglePass)]
        self._fresh = passes[0].sampler(len(records), SecureStream(key, "sample/fresh")) if passes else None
        self._sources = {slot.name: _Source(slot, len(records), key, self._fresh) for slot in plan.schedule.slots}
        self._scales: dict[tuple[str, float, int], tuple[float, float]] = {}
        self._closed = False
        self._filter = plan.schedule.composition == "filter"
        self.rho_left = plan.event_rho if self._filter and plan.budget is not None else math.inf

    @property
    def used(self) -> dict[str, int]:
        return {name: source.used for name, source in self._sources.items()}

    def advance(self, used: Mapping[str, int], rho_left: float | None) -> None:
        """Continue after the first ``used`` releases of each slot."""
        for name, count in used.items():
            self._source(name).used = count
        if self._fresh is not None:
            self._fresh.skip_to(sum(source.taken for source in self._sources.values()))
        if rho_left is not None:
            self.rho_left = rho_left

    def expected_batch(self, slot: str) -> float:
        return self._source(slot).slot.sampling.expected_batch(self.plan.n_public)

    def uniform(self, label: str) -> float:
        return float(SecureStream(self._key, f"public/{label}").uint64(0, 1)[0] >> np.uint64(11)) * 2.0**-53

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        self._check_mechanism(slot, search=False)
        source, batch = self._take(slot)
        index = source.used - 1
        dim = query.dim(self._records)
        out = zeros_like(self._zero) if dim == len(self._zero) else np.zeros(dim)
        bound = query.bound
        if self.plan.budget is not None and bound == 0.0:
            return out  # zero whatever the data, so nothing needs to look at them
        self._sum(query, batch, out)
        if self.plan.budget is None:
            return out
        multiplier = self._multiplier(source.slot, rho)
        if source.slot.mechanism == "pure":
            # On the grid both C and Δ grow by √d steps, so scale ÷ C = multiplier holds with the growth in it.
            release_l2_laplace(out, *l2_laplace_for(1.0 / multiplier, bound, dim), source.stream, index)
            return out
        scale = self._scales.get((slot, bound, dim)) if rho is None else None
        if scale is None:
            scale = sigma_for(multiplier, bound, dim)
            if rho is None and len(self._scales) < 16:
                self._scales[slot, bound, dim] = scale
        return _noisy(out, source.unit(index, dim), *scale)

    def choose(self, slot: str, queries: Sequence[Query], *, rho: float) -> int:
        source, batch = self._take(slot)
        scores = np.zeros((len(queries), 1))
        for query, score in zip(queries, scores, strict=True):
            self._sum(query, batch, score)
        if self.plan.budget is None:
            return int(np.argmin(scores))
        self._spend(rho)
        # The exponential mechanism of parameter ε has bounded range, so it is ε²/8-zCDP. Scores are sums of numbers
        # in [0, bound], which one record moves by at most the bound under either relation.
        bound = max(query.bound for query in queries)
        return noisy_argmax(-scores[:, 0], float(np.sqrt(8.0 * rho)), bound, source.choices, source.used - 1)

    def first_below(self, slot: str, queries: Iterable[Query], threshold: float) -> int | None:
        """The position of the first scalar query whose sum is, noisily, at most ``threshold``; ``None`` if none is.

        AboveThreshold (Dwork and Roth 2014, Algorithm 1): Laplace noise of twice the release's scale on the
        threshold and of four times on each sum; however many are asked, all of it is one ε-DP release. Sums and
        threshold are rounded to a public grid before they meet the noise, which is on it too.
        """
        self._check_mechanism(slot, search=True)
        source, batch = self._take(slot)
        level, bound = threshold, 0.0
        for position, query in enumerate(queries):
            score = np.zeros(1)
            self._sum(query, batch, score)
            value = float(score[0])
            if self.plan.budget is not None:
                if position == 0:
                    bound = query.bound
                    multiplier = self._multiplier(source.slot, None)
                    scale, step = l2_laplace_for(1.0 / multiplier, bound, 1)
                    first = (source.used - 1) << 32  # blocks of the stream: as many searches as there are releases
                    level = round(threshold / step) * step
                    level += float(l2_laplace(1, 2.0 * scale, source.stream, first, step)[0])
                if query.bound != bound:
                    raise BudgetError("one search compares numbers of one bound; scale the queries to it.")
                # Whatever is not a number counts as far above: an error would tell which record caused it.
                value = round(value / step) * step if math.isfinite(value) else math.inf
                value += float(l2_laplace(1, 4.0 * scale, source.stream, first + position + 1, step)[0])
            if value <= level:
                return position
        return None

    def close(self, reason: str, *, data_dependent: bool = False) -> Spent:
        if self._closed:
            raise BudgetError("this session is closed already; open a new one for a new plan.")
        self._closed = True
        event = self._spent_event(data_dependent)
        if self._ledger is not None and self._reservation is not None:
            event = self._ledger.close(
                self._reservation.id, spent_event=event, reason=reason, data_dependent=data_dependent
            )
        return Spent(event, self.used, reason, data_dependent)

    def _spent_event(self, data_dependent: bool) -> events.Event | None:
        budget = self.plan.budget
        if budget is None:
            return None
        if self._filter and self.rho_left < self.plan.event_rho and not self.plan.extra:
            return events.ZCDP(self.plan.event_rho - self.rho_left, budget.relation)
        # A random round's law already prices every R; a stop that saw data keeps the whole plan.
        whole = data_dependent or any(slot.law is not None for slot in self.plan.schedule.slots)
        return self.plan.event if whole or not any(self.used.values()) else self.plan.event_of(self.used)

    def _source(self, slot: str) -> _Source:
        source = self._sources.get(slot)
        if source is None:
            self.plan.schedule[slot]  # raises, naming what the plan holds
            raise AssertionError
        return source

    def _take(self, slot: str) -> tuple[_Source, Batch]:
        source = self._source(slot)
        if self._closed:
            raise BudgetError("this session is closed; open a new one for a new plan.")
        if source.used >= source.slot.count:
            raise ExhaustedError(f"the plan allows {source.slot.count} releases of {slot!r} and all were made.")
        batch = Batch(self._records, source.batch())
        source.used += 1
        return source, batch

    def _sum(self, query: Query, batch: Batch, out: Vector) -> None:
        if self._silent and batch.indices is not None:  # compiled sums never warn
            query.sum_into(self.objective, batch, out)
            return
        # A warning about an overflow would tell that there is a record that causes it.
        with np.errstate(all="ignore"):
            query.sum_into(self.objective, batch, out)

    def _check_mechanism(self, slot: str, *, search: bool) -> None:
        if (self._source(slot).slot.mechanism == "threshold") != search:
            raise BudgetError(
                f"release {slot!r} was planned {'with noise' if search else 'as a search'}: it costs otherwise."
            )

    def _multiplier(self, slot: Slot, rho: float | None) -> float:
        if self._filter != (rho is not None):
            raise BudgetError("rho must be given exactly in a plan with a zCDP filter.")
        if rho is None:
            return self.plan.noise_multiplier * slot.noise
        from quietgrad.privacy.accounting import noise_multiplier_for_rho

        self._spend(rho)
        assert self.plan.budget is not None
        return noise_multiplier_for_rho(rho, self.plan.budget.relation)

    def _spend(self, rho: float) -> None:
        if not 0.0 < rho <= self.rho_left:
            raise BudgetError(f"rho={rho:g}: the filter has {self.rho_left:g} left; stop, or ask for less.")
        self.rho_left -= rho


def _noisy(out: Vector, unit: npt.NDArray[np.float64], sigma: float, step: float) -> Vector:
    if isinstance(out, np.ndarray):
        release_gaussian(out, unit, sigma, step)
        return out
    total = out.detach().double().cpu().numpy()
    release_gaussian(total, unit, sigma, step)
    return out.new_tensor(total)
