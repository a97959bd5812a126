"""Private statistics by groups: counts, sums, means, quantiles and shares by one or two columns, in one budget.

Groups are public values of the columns, or they are found privately, by partition selection. Each record is in one
group and adds there a point of a cube, (1, values), and one cell of each histogram. Sums get Gaussian or K-norm
noise, whichever gives the narrower intervals; that is decided from the plan alone. Everything shown is arithmetic
on these releases. Intervals hold the number of these records with probability 95 %: they are of the noise. Numbers
are cut to the range of their column, declared or found, so a mean is that of the values after this cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.errors import TooNoisyError
from quietgrad.core.noise.k_norm import KNormNoise, LaplacePartitionSelection
from quietgrad.core.noise.mechanisms import GaussianNoise, GaussianPartitionSelection, PartitionSelection
from quietgrad.core.plans.counting import NOMINAL
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import plan
from quietgrad.core.plans.slots import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.opening import Terms, opened
from quietgrad.core.session.statement import privacy_statement
from quietgrad.estimators.described_columns import (
    DescribedColumn,
    declared_columns,
    for_ranges,
    kind_by_type,
    read_columns,
    refuse_empty,
)
from quietgrad.estimators.grouped_rows import (
    Cut,
    GroupedDescription,
    Row,
    cell_rows,
    count_interval,
    range_notes,
    statistic_row,
    totals,
)
from quietgrad.estimators.validation import PrivacyUnitSpec, codes_in, is_frame, taken_as_public, warn_declared
from quietgrad.methods.budget_allocation import allocate_range_estimation
from quietgrad.methods.described_ranges import find_described_ranges
from quietgrad.methods.noise_intervals import NoiseLaw
from quietgrad.methods.range_estimation import RangeEstimation, noise_of
from quietgrad.tables.losses import Squared
from quietgrad.tables.privacy_units import survey_weights
from quietgrad.tables.queries.counts import CellSums, LabelCounts, LabelSet, Tabulation
from quietgrad.tables.queries.groups import Grouping, GroupSums
from quietgrad.tables.scanned import RowBlock
from quietgrad.tables.table import Floats

Statistic = Literal["count", "sum", "mean", "quantiles", "shares"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
Noise = Literal["gaussian", "k-norm"]

_FIND = {"gaussian": 0.2, "k-norm": 0.25}  # the part that finds groups, of μ² or of ε
_FAILURE = 0.5  # the part of δ with which a group of one record may be found
_MOST_GROUPS, _MOST_WHOLE = 10_000, 64
_OTHER = "other"
_BETWEEN = "\x1f"  # stands between the values of two columns; no text file has it


@dataclass(frozen=True)
class _Groups:
    """The groups of a description: the public values of each column, or ``None`` where they are found."""

    by: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...] | None
    codes: npt.NDArray[np.int64]
    """Each record's group; the last is that of the others. Empty where groups are found."""
    labels: npt.NDArray[Any]
    """Each record's values as one text, where groups are found."""

    @property
    def named(self) -> list[tuple[str, ...]]:
        assert self.values is not None
        return [tuple(map(str, group)) for group in itertools.product(*self.values)]

    def found(self, labels: Sequence[str]) -> tuple[list[tuple[str, ...]], npt.NDArray[np.int64]]:
        """The groups whose labels were released, and each record's place among them or behind them."""
        place = {label: k for k, label in enumerate(sorted(labels))}
        codes = np.array([place.get(label, len(place)) for label in self.labels.tolist()], dtype=np.int64)
        return [tuple(label.split(_BETWEEN)) for label in place], codes


@dataclass(frozen=True)
class _GroupReleases(HasSchedule):
    """The releases of a description by groups: ranges, groups, sums and cells, each if it is needed.

    ``width`` are the numbers of a group's sums, ``tables`` the histograms. Sums and cells share the budget so that
    the variances of their noise add up to the least.
    """

    look: RangeEstimation
    noise: Noise
    width: int
    tables: int
    failure: float | None
    pure_scale: float
    """ε of the budget in units of its Gaussian-DP parameter μ, by which K-norm noise is set beside Gaussian
    noise."""

    name: ClassVar[str] = "describe-groups"

    def schedule(self, n_public: int) -> Schedule:
        slots = [Slot(name, FullBatch(), noise=share**-0.5) for name, share in self.look.shares().items()]
        rest = 1.0 - sum(self.look.shares().values())
        find = 0.0 if self.failure is None else _FIND[self.noise]
        if self.noise == "gaussian":
            weights = (math.sqrt(self.width), math.sqrt(self.tables))
        else:  # variances (d + 1)(d + 2)/3 and 2m², each divided by its squared part of ε
            loud = (math.sqrt((self.width + 1) * (self.width + 2) / 3.0), math.sqrt(2.0) * self.tables)
            weights = (loud[0] ** (2.0 / 3.0), loud[1] ** (2.0 / 3.0))
        for name, part in (("groups", find), *zip(("sums", "cells"), weights, strict=True)):
            share = rest * (part if name == "groups" else (1.0 - find) * part / sum(weights))
            if share:
                slots.append(self._slot(name, share))
        return Schedule(tuple(slots))

    def _slot(self, name: str, share: float) -> Slot:
        if self.noise == "gaussian":
            finder = None if self.failure is None else GaussianPartitionSelection(self.failure)
            chosen = finder if name == "groups" and finder is not None else GaussianNoise()
            return Slot(name, FullBatch(), noise=share**-0.5, mechanism=chosen)
        if name == "groups":
            assert self.failure is not None
            selection = LaplacePartitionSelection(self.failure)
            return Slot(name, FullBatch(), noise=self.pure_scale / share, mechanism=selection)
        laplace = KNormNoise(self.width if name == "sums" else 1)
        return Slot(name, FullBatch(), noise=self.pure_scale / share, mechanism=laplace)

    def law(self, name: str, scale: float) -> NoiseLaw:
        """The noise of a release of sums or cells."""
        if self.noise == "gaussian":
            return NoiseLaw(scale)
        return NoiseLaw(scale, self.width if name == "sums" else 1)

    def looseness(self, budget: Budget) -> float:
        """The mean logarithm of what intervals are wide, and of what a group needs to be found, at ``budget``."""
        made = plan(self, n=NOMINAL, budget=budget)
        logs = []
        for slot in made.schedule.slots:
            z = slot.multiplier(made.noise_multiplier)
            if slot.name in ("sums", "cells"):
                query = (
                    GroupSums(1, self.width, budget.relation)
                    if slot.name == "sums"
                    else CellSums(1, self.tables, budget.relation)
                )
                law = self.law(slot.name, z * slot.mechanism.bound_of(query))
                logs.append(math.log(law.half_width(1.0)))
            elif slot.name == "groups":
                assert isinstance(slot.mechanism, PartitionSelection)
                logs.append(
                    math.log(slot.mechanism.threshold(z, slot.mechanism.bound_of(LabelCounts(budget.relation))))
                )
        return sum(logs) / len(logs)


def describe_groups(
    frame: Any,
    schema: object,
    by: Sequence[str],
    statistics: Sequence[str],
    budget: Budget,
    terms: Terms,
    ids: object,
    weighing: tuple[object, float | None] = (None, None),
) -> GroupedDescription:
    """Release ``statistics`` of the columns by the groups of ``by``; see :func:`quietgrad.estimators.describe`."""
    by = (by,) if isinstance(by, str) else tuple(map(str, by))
    if not 1 <= len(by) <= 2 or len(set(by)) < len(by):
        raise ValueError(f"by={list(by)!r}: must be one column or two different ones.")
    if unknown := sorted(set(map(str, statistics)) - set(STATISTICS)):
        raise ValueError(f"statistics: {', '.join(unknown)}: must be among {', '.join(STATISTICS)}.")
    columns, numbers, notes = read_columns(frame, schema, by)
    groups, more = _read_groups(frame, schema, by)
    notes, rows = (*notes, *more), len(numbers)
    refuse_empty(rows, budget.relation)
    whom = PrivacyUnitSpec.of(ids, rows)._replace(weights=survey_weights(*weighing, rows))
    largest = weighing[1] or 1.0
    numeric = [j for j, column in enumerate(columns) if not column.values]
    summed = numeric if {"sum", "mean"} & set(statistics) else []
    shown = [
        j for j, column in enumerate(columns) if ("shares" if column.values else "quantiles") in statistics
    ]  # the columns with a histogram in each group
    width = 1 + sum(1 + columns[j].gaps for j in summed)
    bounds = [(0.0, 1.0) if j not in numeric else column.bounds for j, column in enumerate(columns)]
    failure = None if groups.values is not None else _FAILURE * budget.delta
    scale = gaussian_mu(budget.epsilon, budget.delta) / budget.epsilon

    def releases(n: int, noise: Noise) -> _GroupReleases:
        look = allocate_range_estimation(n, len(columns), budget=budget, feature_bounds=bounds, whole=True)
        return _GroupReleases(look, noise, width, len(shown), failure, scale)

    noises: tuple[Noise, ...] = get_args(Noise)
    chosen = min(noises, key=lambda noise: releases(NOMINAL, noise).looseness(budget))
    plain = for_ranges(columns, numbers) if columns else groups.codes[:, None].astype(np.float64)
    with opened(
        whom.asks(Squared()), whom.of_data(RowBlock(plain, np.zeros(rows))), lambda n: releases(n, chosen), terms
    ) as active:
        session, relation = active.session, budget.relation
        cuts: dict[int, Cut] = {}
        if columns:
            ranges = find_described_ranges(active.method.look, session, len(columns), relation)
            cuts = {j: Cut.of(ranges, j, columns[j]) for j in numeric}
        names, codes = _named_groups(groups, session, whom, relation)
        laws: dict[str, NoiseLaw] = {}

        def asked(slot: str, adapter: Any, data: Any, query: Any) -> Floats:
            session.reread(whom.asks(adapter), whom.of_data(data))
            bound = session.plan.schedule[slot].mechanism.bound_of(query)
            # Records count with their weight over the largest one: times it, sums are of the weights themselves.
            laws[slot] = active.method.law(slot, largest * noise_of(session, slot, bound))
            return np.asarray(largest * session.release(slot, query))

        limits = {j: (cut.low, cut.high) for j, cut in cuts.items()}
        values = _scaled(numbers, columns, summed, limits)
        sums = asked("sums", Grouping(), (codes, values), GroupSums(len(names), width, relation))
        tables: list[tuple[DescribedColumn, Floats]] = []
        if shown:
            bins = _bins(active.size.n / len(names), active.method, session, relation)
            drawn = [columns[j] if j not in limits else columns[j].binned(*limits[j], bins) for j in shown]
            sizes = [len(names) * len(column.levels) for column in drawn]
            starts = np.concatenate([[0], np.cumsum(sizes)])
            places = [
                start + codes * len(column.levels) + column.cells(numbers[:, j])
                for start, column, j in zip(starts, drawn, shown, strict=False)
            ]
            query = CellSums(int(starts[-1]), len(shown), relation)
            counts = asked("cells", Tabulation(), (np.stack(places, axis=1), None), query)
            parts = np.split(counts, starts[1:-1])
            tables = [(column, part.reshape(len(names), -1)) for column, part in zip(drawn, parts, strict=True)]
        spent = session.close("steps")
    notes = (*notes, *range_notes(columns, cuts))
    privacy = privacy_statement(session, spent, str(active.account), (*whom.notes, *notes))
    blocks = sums.reshape(len(names), width)
    told: list[Row] = []
    for k, name in enumerate(names):
        head = dict(zip(by, name, strict=True))
        if "count" in statistics:
            told.append(statistic_row(head, None, "count", *count_interval(blocks[k, 0], laws["sums"])))
        at = 1
        for j in summed:
            column, (low, high) = columns[j], limits[j]
            held = blocks[k, at] if column.gaps else blocks[k, 0]
            total = blocks[k, at + column.gaps]
            at += 1 + column.gaps
            for statistic, row in totals(held, total, low, high, laws["sums"]).items():
                if statistic in statistics:
                    told.append(statistic_row(head, column.name, statistic, *row, cuts[j]))
        for j, (column, counted) in zip(shown, tables, strict=True):
            told += cell_rows(head, column, counted[k], laws["cells"], cuts.get(j))
    dates = tuple(column.name for column in columns if column.kind == "date")
    return GroupedDescription(privacy, by, told, notes, dates)


def _read_groups(frame: Any, schema: object, by: tuple[str, ...]) -> tuple[_Groups, tuple[str, ...]]:
    """The groups, and notes on what is taken as public by its type."""
    names = [str(name) for name in (frame.columns if is_frame(frame) else frame)]
    if unknown := [name for name in by if name not in names]:
        raise ValueError(f"by: {', '.join(unknown)}: not among the columns.")
    declared = declared_columns(schema) or {}
    typed: list[str] = []
    values = [_public_values(name, frame[name], declared.get(name), typed) for name in by]
    notes = tuple(taken_as_public(f"column {name}", "a schema with its categories") for name in typed)
    warn_declared(notes)
    if all(each is not None for each in values):
        listed = tuple(tuple(each) for each in values if each is not None)
        sizes = [len(each) for each in listed]
        if math.prod(sizes) > _MOST_GROUPS:
            raise ValueError(f"by: {math.prod(sizes)} groups are more than {_MOST_GROUPS}. Group by fewer values.")
        codes = [codes_in(frame[name], each).astype(np.int64) for name, each in zip(by, listed, strict=True)]
        inside = np.all([each >= 0 for each in codes], axis=0)
        joint = np.ravel_multi_index(tuple(np.maximum(each, 0) for each in codes), sizes)
        return _Groups(by, listed, np.where(inside, joint, math.prod(sizes)), np.zeros(0)), notes
    texts = [[_text(cell) for cell in np.asarray(frame[name], dtype=object)] for name in by]
    labels = np.array([_BETWEEN.join(each) for each in zip(*texts, strict=True)], dtype=object)
    return _Groups(by, None, np.zeros(len(labels), np.int64), labels), notes


def _public_values(
    name: str, cells: object, said: Mapping[str, Any] | None, typed: list[str]
) -> tuple[Any, ...] | None:
    """The public values of a column to group by; ``None`` where they are to be found."""
    if said is None:
        dtype = getattr(cells, "dtype", None)  # a list has none: its values are found
        if getattr(dtype, "kind", "O") in "iuOUST" and not hasattr(dtype, "categories"):
            return None
        said = kind_by_type(name, cells, typed)
    kind, values = str(said.get("kind") or ""), tuple(said.get("categories") or ())
    if kind in ("id", "text"):
        raise ValueError(
            f"by: {name}: the schema calls it {'ids' if kind == 'id' else 'free text'}, so each value has few "
            "records and none can be found privately. Group by a column of categories. No privacy budget was spent."
        )
    if kind == "bool":
        return values or (False, True)
    if values:
        return values
    bounds = said.get("bounds")
    if kind in ("integer", "whole number") and bounds and bounds[1] - bounds[0] < _MOST_WHOLE:
        return tuple(range(math.ceil(bounds[0]), math.floor(bounds[1]) + 1))
    if kind in ("number", "date", "whole number", "integer") or bounds:
        raise ValueError(
            f"by: {name}: is a number or a date. Cut it into a few public classes, and group by these."
        )
    return None


def _text(cell: object) -> str:
    gap = cell is None or cell != cell or type(cell).__name__ in ("NAType", "NaTType")
    return "missing" if gap else str(cell).strip().replace(_BETWEEN, " ") or "missing"


def _named_groups(
    groups: _Groups, session: Any, whom: PrivacyUnitSpec, relation: Relation
) -> tuple[list[tuple[str, ...]], npt.NDArray[np.int64]]:
    """The groups, declared or found, with the others last, and each record's group."""
    if groups.values is not None:
        names, codes = groups.named, groups.codes
    else:
        session.reread(whom.asks(LabelSet()), whom.of_data((None, groups.labels)))
        names, codes = groups.found([str(label) for label in session.discover("groups", LabelCounts(relation))])
        if not names:
            raise TooNoisyError(
                "by: no group is large enough to be found privately. If the categories are public, declare them in "
                "a schema. The whole budget of this run was charged, because the stop depends on a release."
            )
    return [*names, (_OTHER,) * len(groups.by)], codes


def _scaled(
    numbers: Floats, columns: list[DescribedColumn], summed: list[int], limits: Mapping[int, tuple[float, float]]
) -> Floats:
    """Scale values to [−1, 1]. Before a column with gaps comes a flag that is 1 where there is a value."""
    parts = [np.zeros((len(numbers), 0))]
    for j in summed:
        low, high = limits[j]
        place = np.clip(2.0 * (numbers[:, j] - low) / (high - low) - 1.0, -1.0, 1.0)
        held = ~np.isnan(place)
        parts += [held.astype(np.float64)[:, None]] * columns[j].gaps + [np.where(held, place, 0.0)[:, None]]
    return np.hstack(parts)


def _bins(per_group: float, method: _GroupReleases, session: Any, relation: Relation) -> int:
    """Return 32 or 16 bins if an equal part of a usual group in each stands out of the noise, else 8."""
    mechanism = session.plan.schedule["cells"].mechanism
    law = method.law("cells", noise_of(session, "cells", mechanism.bound_of(CellSums(1, method.tables, relation))))
    return next((bins for bins in (32, 16) if per_group / bins > 2.0 * law.half_width(1.0)), 8)
