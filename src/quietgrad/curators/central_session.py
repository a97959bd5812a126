"""The open door of a central curator: one release after another, until the plan's counts are used up.

Each release draws its sample, sums clipped contributions in one compiled call, quantises the sum, adds integer
noise on a public grid, and counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.curators.base import Spent, relative
from quietgrad.curators.slot_source import SlotSource
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.objectives.base import Batch, Objective, Query, Regularizer
from quietgrad.plans.schedule import Plan
from quietgrad.privacy import events
from quietgrad.privacy.noise import (
    l2_laplace,
    l2_laplace_for,
    noisy_argmax,
    release_gaussian,
    release_l2_laplace,
)
from quietgrad.privacy.rng import SecureStream
from quietgrad.sampling import SinglePass
from quietgrad.vectors import Vector, zeros_like

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger, Reservation

_FILTER_ONLY = "rho must be given exactly in a plan with a zCDP filter."


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
        self._dim = len(self._zero)
        self._private = plan.budget is not None
        self._silent = getattr(objective, "silent_batches", False)
        passes = [slot.sampling for slot in plan.schedule.slots if isinstance(slot.sampling, SinglePass)]
        self._fresh = passes[0].sampler(len(records), SecureStream(key, "sample/fresh")) if passes else None
        self._sources = {
            slot.name: SlotSource(
                slot, plan.noise_multiplier * slot.noise, len(records), plan.n_public, key, self._fresh
            )
            for slot in plan.schedule.slots
        }
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
        return self._source(slot).expected_batch

    def uniform(self, label: str) -> float:
        return float(SecureStream(self._key, f"public/{label}").uint64(0, 1)[0] >> np.uint64(11)) * 2.0**-53

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Vector:
        source, batch = self._take(slot)
        index = source.used - 1
        dim = query.dim(self._records)
        out = zeros_like(self._zero) if dim == self._dim else np.zeros(dim)
        bound = query.bound
        if self._private and bound == 0.0:
            return out  # zero whatever the data, so nothing needs to look at them
        self._sum(query, batch, out)
        if not self._private:
            return out
        multiplier = self._multiplier(source, rho)
        if source.slot.mechanism == "pure":
            # On the grid both C and Δ grow by √d steps, so scale ÷ C = multiplier holds with the growth in it.
            release_l2_laplace(out, *l2_laplace_for(1.0 / multiplier, bound, dim), source.stream, index)
            return out
        sigma, step = source.scale(multiplier, bound, dim)
        return _noisy(out, source.units.row(index, dim), sigma, step)

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        source, batch = self._take(slot)
        scores = np.zeros((len(queries), 1))
        for query, score in zip(queries, scores, strict=True):
            self._sum(query, batch, score)
        scores[:, 0] += relative(offsets, len(queries))
        if not self._private:
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
        source, batch = self._take(slot, search=True)
        level, bound = threshold, 0.0
        for position, query in enumerate(queries):
            score = np.zeros(1)
            self._sum(query, batch, score)
            value = float(score[0])
            if self._private:
                if position == 0:
                    bound = query.bound
                    scale, step = l2_laplace_for(1.0 / self._multiplier(source, None), bound, 1)
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

    def _source(self, slot: str) -> SlotSource:
        source = self._sources.get(slot)
        if source is None:
            self.plan.schedule[slot]  # raises, naming what the plan holds
            raise AssertionError
        return source

    def _take(self, slot: str, *, search: bool = False) -> tuple[SlotSource, Batch]:
        source = self._source(slot)
        if source.is_search != search:
            raise BudgetError(
                f"release {slot!r} was planned {'with noise' if search else 'as a search'}: it costs otherwise."
            )
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

    def _multiplier(self, source: SlotSource, rho: float | None) -> float:
        if rho is None:
            if self._filter:
                raise BudgetError(_FILTER_ONLY)
            return source.multiplier
        from quietgrad.privacy.accounting import noise_multiplier_for_rho

        self._spend(rho)
        assert self.plan.budget is not None
        return noise_multiplier_for_rho(rho, self.plan.budget.relation)

    def _spend(self, rho: float) -> None:
        if not self._filter:  # where nothing would count it
            raise BudgetError(_FILTER_ONLY)
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
