"""Private descriptions of a table: counts, means, quantiles, histograms and two-way tables, in one budget.

The ranges of columns that are not declared are found as a fit finds them. Then each record falls into one cell of
every histogram and of every two-way table, and the noisy counts of these cells, with sums of the numbers, are the
releases; everything shown is arithmetic on them. Errors are standard errors of the privacy noise, and of a quantile
of its bin too: how far a number may be from that of these records. Values are cut to the range of their column.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict, Unpack, overload

import numpy as np

from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.core.ledger.account import Account
from quietgrad.core.session.opening import Terms, opened
from quietgrad.core.session.statement import Privacy, privacy_statement
from quietgrad.estimators.described_columns import DescribedColumn, for_ranges, read_columns, refuse_empty
from quietgrad.estimators.grouped_rows import Cut, GroupedDescription, range_notes
from quietgrad.estimators.grouping import STATISTICS, Statistic, describe_groups
from quietgrad.estimators.validation import (
    PrivacyUnitSpec,
    from_arrow,
    take_person_column,
)
from quietgrad.methods.budget_allocation import allocate_range_estimation, budget_mu
from quietgrad.methods.described_ranges import find_described_ranges
from quietgrad.methods.range_estimation import Ranges, noise_of
from quietgrad.tables.cells import day_text
from quietgrad.tables.losses import Squared
from quietgrad.tables.privacy_units import survey_weights
from quietgrad.tables.queries.counts import CellSums, Tabulation
from quietgrad.tables.scanned import RowBlock
from quietgrad.tables.table import Array, Floats

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SHARES = {"histograms": 0.45, "sums": 0.2, "pairs": 0.35}
_PAIR_BINS, _MOST_LEVELS, _MOST_PAIRS = 4, 12, 45
_REDRAWS = 200
_STANDS_OUT = 2.0  # standard errors that a count must have for its column's values to be told


@dataclass(frozen=True)
class Description:
    """A private description of a table, with standard errors of the noise.

    Statistics of a number are of its values cut to [``cut_low``, ``cut_high``]; ``range`` says whether that was
    declared or found privately. Where it is "hidden", no range stands out of the noise and nothing is said of the
    values. A count is between 0 and n, and a statistic that noise alone could have made is None. The cells of
    ``histograms`` and ``pairs`` are the noisy counts themselves, which may be negative and add up without bias.
    ``table`` has a row for each column, with dates as days since 1970.

    ``histograms`` and ``pairs`` have a row for each cell, with its count and
    error. They are data frames if pandas is installed, else lists of mappings.
    """

    privacy: Privacy
    n: float
    rows: list[dict[str, Any]]
    histograms: dict[str, list[dict[str, Any]]]
    pairs: dict[tuple[str, str], list[dict[str, Any]]]
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> Any:
        try:
            import pandas
        except ImportError:
            return self.rows
        return pandas.DataFrame(self.rows).set_index("column")

    def to_json(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "columns": self.written_rows(),
            "histograms": self.histograms,
            "pairs": [{"columns": list(names), "cells": cells} for names, cells in self.pairs.items()],
            "notes": list(self.notes),
            "privacy": self.privacy.to_json(),
        }

    def written_rows(self) -> list[dict[str, Any]]:
        """The rows as files have them: the mean, the quantiles and the range of dates as YYYY-MM-DD."""
        places = ("mean", "cut_low", "cut_high", *(f"q{round(100 * q):02d}" for q in _QUANTILES))
        return [
            row if row["kind"] != "date" else
            {key: day_text(value) if key in places and value is not None else value for key, value in row.items()}
            for row in self.rows
        ]  # fmt: skip

    def plot(self, columns: Sequence[str] | None = None) -> Any:
        """Draw the histograms with bars of two standard errors.

        The matplotlib figure is returned.
        """
        import matplotlib.pyplot as plt

        names = list(self.histograms) if columns is None else [str(name) for name in columns]
        if unknown := [name for name in names if name not in self.histograms]:
            raise ValueError(f"columns: {', '.join(unknown)}: not described.")
        across = min(4, len(names))
        down = math.ceil(len(names) / across)
        figure, grid = plt.subplots(down, across, figsize=(3.2 * across, 2.4 * down), squeeze=False)
        for axis, name in itertools.zip_longest(grid.ravel(), names):
            if name is None:
                axis.set_visible(False)
                continue
            cells = self.histograms[name]
            axis.bar(range(len(cells)), [c["count"] for c in cells], yerr=[2.0 * c["error"] for c in cells])
            axis.set_xticks(range(len(cells)), [c["cell"] for c in cells], rotation=75, fontsize=5)
            axis.set_title(name, fontsize=8)
        figure.tight_layout()
        return figure

    def __str__(self) -> str:
        return f"{self.table}\n{self.privacy}"


class _Describe(Ranges):
    """The releases of a description: what is planned and reserved."""

    name: ClassVar[str] = "describe"


class _DescribeOptions(TypedDict, total=False):
    """Options of :func:`describe` besides the groups."""

    epsilon: float
    delta: float
    relation: str | Relation
    pairs: Sequence[tuple[str, str]] | None
    statistics: Sequence[Statistic]
    ledger: Any
    account: str | Account
    cap: Budget | None
    n_public: int | None
    person: object
    sample_weight: object
    max_weight: float | None


@overload
def describe(
    frame: Any, schema: object = None, *, by: None = None, **asked: Unpack[_DescribeOptions]
) -> Description: ...


@overload
def describe(
    frame: Any, schema: object = None, *, by: Sequence[str] | str, **asked: Unpack[_DescribeOptions]
) -> GroupedDescription: ...


@np.errstate(all="ignore")  # a warning about a value would tell of the record that has it
def describe(
    frame: Any,
    schema: object = None,
    *,
    epsilon: float = 0.5,
    delta: float = 1e-6,
    relation: str | Relation = DEFAULT_RELATION,
    pairs: Sequence[tuple[str, str]] | None = None,
    by: Sequence[str] | str | None = None,
    statistics: Sequence[Statistic] = STATISTICS,
    ledger: Any = None,
    account: str | Account = "default",
    cap: Budget | None = None,
    n_public: int | None = None,
    person: object = None,
    sample_weight: object = None,
    max_weight: float | None = None,
) -> Description | GroupedDescription:
    """Release statistics of a table's columns within (ε, δ).

    These are counts, means, quantiles, histograms and two-way tables, or statistics by groups.

    Args:
        frame: a data frame, or a mapping of names to columns.
        schema: what is public of the columns: a mapping of names to ``{"kind": "number" | "integer" | "category" |
            "bool" | "date", "bounds": [low, high], "categories": [...], "missing": "indicator"}``, a schema of
            :mod:`quietgrad.data`, or the path of one. Columns that it does not list are left out; ``None`` takes
            all columns by their types. Ranges that are not declared are found privately. Numbers are cut to the
            range of their column, and each row says to which. Dates are days since 1970.
            ``"missing": False`` says that a column has no gaps; others have a cell for them.
        pairs: pairs of columns to cross; ``None`` crosses all columns if that makes at most 45 tables.
        by: one column or two to group by; the answer is then a :class:`GroupedDescription`. Groups are the
        categories
            that the schema lists (yes and no, or whole numbers within bounds), or values that are found privately.
        statistics: what is released of each group; the fewer, the less noise.
        epsilon: Privacy budget of the whole description. Smaller is more private and noisier.
        delta: Probability with which the bound e^ε may fail. Choose at most 1/(100 n).
        relation: Neighbouring relation, ``"add-remove"`` or ``"replace-one"``.
        ledger: Path of a ledger file, as in the estimators.
        account: Name of the people in the ledger.
        cap: Refuse the release if the account would exceed this budget.
        n_public: Public number of records; ``None`` counts them privately under add-remove.
        person: one id per record, or the name of a column: a person then counts with shares of their records.

        sample_weight: survey weights, one per record: counts and sums are then weighted, up to the population.
        max_weight: the largest weight, as a public number; larger ones are cut to it. Noise grows with it.

    >>> ages = np.random.default_rng(0).normal(40.0, 10.0, 5000)
    >>> told = describe({"age": ages}, {"age": {"kind": "number", "bounds": [0, 100]}}, epsilon=1.0)
    >>> bool(abs(told.rows[0]["mean"] - 40.0) < 2.0), round(told.privacy.epsilon, 2)
    (True, 1.0)
    """
    budget = Budget(epsilon, delta, Relation.parse(relation))
    frame, ids = take_person_column(from_arrow(frame, typed=True), person)
    terms = Terms.of(
        budget, account=account, ledger=ledger, cap=cap, note="describe", part=True,
        n_public=n_public if budget.relation is Relation.ADD_REMOVE else None,
    )  # fmt: skip
    if by is not None:
        if pairs is not None:
            raise ValueError("pairs: are crossed without groups. Give by= or pairs=, not both.")
        weighing = sample_weight, max_weight
        return describe_groups(frame, schema, by, statistics, budget, terms, ids, weighing)
    columns, numbers, notes = read_columns(frame, schema)
    rows = len(numbers)
    refuse_empty(rows, budget.relation)
    weights = survey_weights(sample_weight, max_weight, rows)
    whom, largest = PrivacyUnitSpec.of(ids, rows)._replace(weights=weights), max_weight or 1.0
    crossed = _crossed(columns, pairs)
    numeric = [j for j, column in enumerate(columns) if not column.values]
    shares = {name: share for name, share in _SHARES.items() if {"sums": numeric, "pairs": crossed}.get(name, True)}
    plain = for_ranges(columns, numbers)
    bounds = [column.bounds if not column.values else (0.0, 1.0) for column in columns]

    def method(n: int) -> _Describe:
        look = allocate_range_estimation(n, len(columns), budget=budget, feature_bounds=bounds)
        return _Describe(replace(look, whole=True), shares)  # no tail may be cut off: means would miss it

    with opened(whom.asks(Squared()), whom.of_data(RowBlock(plain, np.zeros(rows))), method, terms) as active:
        session, size = active.session, active.size
        ranges = find_described_ranges(active.method.look, session, len(columns), budget.relation)
        cuts = {j: Cut.of(ranges, j, columns[j]) for j in numeric}
        # As many bins as let one with an equal part of the records stand out of the noise.
        per_bin = 0.5 * size.n * budget_mu(budget) / math.sqrt(len(columns))
        bins = 32 if per_bin > 32 * 30 else 16 if per_bin > 16 * 20 else 8
        for j in numeric:
            columns[j] = columns[j].binned(cuts[j].low, cuts[j].high, bins)
            inner = 0.5 if columns[j].kind == "integer" else 0.0  # edges lie between whole numbers
            ends = columns[j].edges[[0, -1]].tolist()
            cuts[j] = cuts[j]._replace(low=ends[0] + inner, high=ends[1] - inner)
        tables = _Tables(session, whom, budget.relation, largest)
        released = tables.histograms(columns, numbers)
        sums = tables.sums([columns[j] for j in numeric], numbers[:, numeric]) if numeric else {}
        two_way = tables.pairs(columns, crossed, numbers) if crossed else {}
        spent = session.close("steps")
    n, off = float(size.n), 0.0
    # What the cells of all histograms add up to has less noise than the count, and is of the weights.
    if size.counted or weights is not None:
        parts = np.array([1.0 / len(counts) for counts, _ in released.values()])
        n = float(parts @ [counts.sum() for counts, _ in released.values()] / parts.sum())
        off = next(noise for _, noise in released.values()) / math.sqrt(float(parts.sum()))
    notes = (*notes, *range_notes(columns, cuts))
    privacy = privacy_statement(session, spent, str(account), (*whom.notes, *notes))
    told = [
        _row(column, *released[column.name], sums.get(column.name), (n, off), cuts.get(j))
        for j, column in enumerate(columns)
    ]
    cells = {}
    for column in columns:
        counts, noise = released[column.name]
        rows_of = zip(column.levels, counts, strict=True)
        cells[column.name] = [{"cell": level, "count": float(c), "error": noise} for level, c in rows_of]
    return Description(privacy, n, told, cells, two_way, notes)


class _Tables:
    """Releases sums of cells of the same people, table by table."""

    def __init__(self, session: Any, whom: PrivacyUnitSpec, relation: Relation, largest: float = 1.0) -> None:
        self._session, self._whom, self._relation, self._largest = session, whom, relation, largest

    def _release(self, slot: str, cells: Array, weights: Floats | None, size: int) -> tuple[Floats, float]:
        groups = cells.shape[1]
        self._session.reread(self._whom.asks(Tabulation()), self._whom.of_data((cells, weights)))
        query = CellSums(size, groups, self._relation)
        noise = noise_of(self._session, slot, query.bound)
        # Records count with their weight over the largest one: times it, sums are of the weights themselves.
        return self._largest * self._session.release(slot, query), self._largest * noise

    def _counts(self, slot: str, places: list[Any], sizes: list[int]) -> tuple[list[Floats], float]:
        starts = np.concatenate([[0], np.cumsum(sizes)])
        cells = np.stack([place + start for place, start in zip(places, starts, strict=False)], axis=1)
        released, noise = self._release(slot, cells, None, int(starts[-1]))
        return np.split(released, starts[1:-1]), noise

    def histograms(self, columns: list[DescribedColumn], numbers: Floats) -> dict[str, tuple[Floats, float]]:
        """Counts of each column's cells, and their noise."""
        places = [column.cells(numbers[:, j]) for j, column in enumerate(columns)]
        counts, noise = self._counts("histograms", places, [len(c.levels) for c in columns])
        return {c.name: (part, noise) for c, part in zip(columns, counts, strict=True)}

    def sums(self, columns: list[DescribedColumn], numbers: Floats) -> dict[str, tuple[float, float, float]]:
        """Sums of places in the range and of their squares, and the noise; a gap counts for nothing."""
        low = np.array([c.edges[0] for c in columns])
        high = np.array([c.edges[-1] for c in columns])
        place = np.clip((numbers - low) / (high - low), 0.0, 1.0)
        weights = np.nan_to_num(np.hstack([place, place**2]), nan=0.0)
        cells = np.broadcast_to(np.arange(weights.shape[1]), weights.shape)
        released, noise = self._release("sums", np.ascontiguousarray(cells), weights, weights.shape[1])
        first, second = np.split(released, 2)
        return {c.name: (float(a), float(b), noise) for c, a, b in zip(columns, first, second, strict=True)}

    def pairs(
        self, columns: list[DescribedColumn], crossed: list[tuple[int, int]], numbers: Floats
    ) -> dict[Any, Any]:
        """Counts of the cells of each two-way table, numbers in four bins."""
        coarse = list(columns)
        for j, c in enumerate(columns):
            if not c.values:
                bins = len(c.edges) - 1
                at = np.unique(np.linspace(0, bins, min(bins, _PAIR_BINS) + 1).round().astype(int))
                coarse[j] = replace(c, edges=c.edges[at])
        places = [c.cells(numbers[:, j]) for j, c in enumerate(coarse)]
        levels = [c.levels for c in coarse]
        joint = [places[i] * len(levels[j]) + places[j] for i, j in crossed]
        counts, noise = self._counts("pairs", joint, [len(levels[i]) * len(levels[j]) for i, j in crossed])
        return {
            (columns[i].name, columns[j].name): [
                {columns[i].name: a, columns[j].name: b, "count": float(count), "error": noise}
                for (a, b), count in zip(itertools.product(levels[i], levels[j]), part, strict=True)
            ]
            for (i, j), part in zip(crossed, counts, strict=True)
        }


def _row(
    column: DescribedColumn,
    counts: Floats,
    noise: float,
    sums: tuple[float, float, float] | None,
    everyone: tuple[float, float],
    cut: Cut | None,
) -> dict[str, Any]:
    """Build the row of statistics of one column; nothing is said of values that noise hides.

    Counts are brought into what is possible, from 0 to n. A statistic that the noise could have made alone is None.
    """
    n, off = max(everyone[0], 0.0), everyone[1]
    partial = bool(column.values) or column.gaps
    gaps = min(max(float(counts[-1]), 0.0), n) if partial else None
    held = min(max(everyone[0] - float(counts[-1]), 0.0), n) if partial else n
    row: dict[str, Any] = {"column": column.name, "kind": column.kind, "count": held}
    row |= {"count_error": math.hypot(off, noise * partial), "missing": gaps}
    if cut is not None:
        row["range"] = cut.origin
        unknown = dict.fromkeys(("mean", "std", *(f"q{round(100 * q):02d}" for q in _QUANTILES)))
        if cut.origin == "hidden":
            return row | unknown
        row |= {"cut_low": cut.low, "cut_high": cut.high}
    if sums is None:
        top = int(np.argmax(counts[: len(column.values)]))
        if counts[top] < _STANDS_OUT * noise:
            return {**row, "most_frequent": None, "most_frequent_count": None}
        return {**row, "most_frequent": str(column.values[top]), "most_frequent_count": min(float(counts[top]), n)}
    first, second, shaken = sums
    low, width = column.edges[0], column.edges[-1] - column.edges[0]
    # A mean with the error of a value drawn from the range, or of records that noise alone counts, tells nothing.
    if held < _STANDS_OUT * row["count_error"] or shaken / held > 1.0 / math.sqrt(12.0):
        return row | unknown
    place = min(max(first / held, 0.0), 1.0)
    spread = math.sqrt(max(second / held - place * place, 0.0))
    row |= {"mean": low + width * place, "mean_error": width * shaken / held, "std": width * spread}
    bins = counts[: len(column.edges) - 1]
    value = _quantiles(bins, column.edges)
    rng = np.random.default_rng(0)  # post-processing of what was released: no secret is in it
    drawn = [_quantiles(bins + noise * rng.standard_normal(len(bins)), column.edges) for _ in range(_REDRAWS)]
    # Inside its bin a quantile may be anywhere.
    wide = np.diff(column.edges)[np.clip(np.searchsorted(column.edges, value) - 1, 0, len(bins) - 1)]
    errors = np.hypot(np.std(drawn, axis=0), wide / math.sqrt(12.0))
    for q, at, error in zip(_QUANTILES, value, errors, strict=True):
        row |= {f"q{round(100 * q):02d}": float(at), f"q{round(100 * q):02d}_error": float(error)}
    return row


def _quantiles(counts: Floats, edges: Floats) -> Floats:
    """Quantiles of a histogram, evenly spread inside its bins."""
    sums = np.concatenate([[0.0], np.cumsum(np.maximum(counts, 0.0))])
    return np.asarray(np.interp(np.array(_QUANTILES) * sums[-1], sums + 1e-9 * np.arange(len(sums)), edges))


def _crossed(columns: list[DescribedColumn], pairs: Sequence[tuple[str, str]] | None) -> list[tuple[int, int]]:
    names = [column.name for column in columns]
    if pairs is not None:
        if unknown := sorted({str(name) for pair in pairs for name in pair} - set(names)):
            raise ValueError(f"pairs: {', '.join(unknown)}: not among the columns.")
        return [(names.index(str(a)), names.index(str(b))) for a, b in pairs]
    small = [j for j, column in enumerate(columns) if len(column.values) <= _MOST_LEVELS]
    crossed = list(itertools.combinations(small, 2))
    return crossed if len(crossed) <= _MOST_PAIRS else []
