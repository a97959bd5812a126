"""User-level privacy: records grouped by person, and objectives whose sums bound what one person contributes.

Sampling, n and clipping refer to privacy units. A :class:`UnitGrouping` says which records belong to one unit.
:class:`UserLevelObjective` wraps a loss so that a curator holds people, not rows: samplers draw people, n is their
number, and what one of them contributes to a sum is the
*clipped combination* of theirs, α·clip_A(g − βg′) + γ·clip_B(g) with g the mean or sum of the gradients of their
records. A query that reads rows in another way gets them from :func:`rows_of`, with what each of them counts:
1/k for a person of k records. Contributions of a row lie in a convex set K (a ball, its non-negative part, positive
semi-definite matrices of bounded norm), so their mean lies in K too, and a bound on a row bounds a person, also
where it is about the distance of two. A query that knows neither way is refused: :class:`UserLevelRecords` shows no
rows to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import (
    BaseObjective,
    Batch,
    Indices,
    LossConstants,
    Records,
    Regularizer,
    StreamedRecords,
    add_gradients,
    add_hessians,
)
from quietgrad.core.vectors import OwnVector
from quietgrad.tables.cells import cell_numbers
from quietgrad.tables.person_ids import call_id_function, factorize_ids
from quietgrad.tables.table import Floats, Table

Combine = Literal["mean", "sum"]


@dataclass(frozen=True)
class PersonRule:
    """Rule for how a person's records count in a sum. An invalid rule raises when it is built.

    Args:
        combine: the ``"mean"`` of a person's contributions, so that every person counts once, or their ``"sum"``.
            Either is clipped as a whole.
        records_per_person: the most of a person's records that one release uses; ``None`` for all of them.
    """

    combine: Combine = "mean"
    records_per_person: int | None = None

    def __post_init__(self) -> None:
        if self.combine not in ("mean", "sum"):
            raise ValueError(
                f"combine={self.combine!r}: must be 'mean' (every person counts once) or 'sum' (records count)."
            )
        most: object = self.records_per_person
        if most is not None and (isinstance(most, bool) or not isinstance(most, (int, np.integer)) or most < 1):
            raise ValueError(f"records_per_person={most!r}: must be a whole number ≥ 1, or None for all of them.")

    def __str__(self) -> str:
        return f"combine={self.combine!r}, records_per_person={self.records_per_person!r}"

    @property
    def is_mean_of_all(self) -> bool:
        """Whether a person counts with the mean of all their records: what bounds a record then bounds a person."""
        return self.combine == "mean" and self.records_per_person is None

    def refuse_without_people(self) -> None:
        """Refuse a rule that was given where every record is a unit of its own: it would do nothing."""
        if not self.is_mean_of_all:
            raise ValueError(
                "combine, records_per_person: say how a person's records count; give person= with them."
            )


MEAN_OF_ALL = PersonRule()


class GroupIndex(NamedTuple):
    """The records of some people: person p has ``order[starts[p]:starts[p + 1]]``.

    ``people`` are the positions to visit, ``None`` for all; ``mean`` says whether a record counts 1/k or 1.
    """

    people: Indices | None
    order: Indices
    starts: Indices
    mean: bool

    def flat(self) -> tuple[Indices, Indices]:
        """(rows, starts) of the people to visit, one after the other.

        >>> GroupIndex(np.array([2, 0]), np.arange(4), np.array([0, 1, 2, 4]), True).flat()
        (array([2, 3, 0]), array([0, 2, 3]))
        """
        if self.people is None:
            return self.order, self.starts
        first = self.starts[self.people]
        sizes = self.starts[self.people + 1] - first
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        places = np.arange(starts[-1]) + np.repeat(first - starts[:-1], sizes)
        return self.order[places], starts


class WeightedRows(NamedTuple):
    """Rows to sum over: ``indices`` (``None``: all), and by row position what each counts (``None``: 1)."""

    records: Any
    indices: Indices | None
    shares: Floats | None

    def of(self, which: slice | Indices) -> Any:
        """Return the weights of the rows at ``which``, positions or a slice: an array, or 1."""
        return 1.0 if self.shares is None else self.shares[which]

    def blocks(self) -> Iterator[tuple[Any, Any]]:
        """Yield the rows' raw features, a few MB at a time, and their weights: an array, or 1."""
        for which, block in self.records.blocks(self.indices):
            yield block, self.of(which)


@dataclass(frozen=True, eq=False)
class UnitGrouping:
    """Which records are whose; secret like the records. Build it with :meth:`of`.

    Args:
        order: record positions, person by person, each person's in their given order.
        starts: where each person begins in ``order``; one more than there are people.
        rule: how a person's records count.
        numbers: of people who are part of more, each one's number among all; their positions if not given.

    >>> people = UnitGrouping.of(["ann", "bob", "ann"])
    >>> len(people), people.order.tolist(), people.starts.tolist()
    (2, [0, 2, 1], [0, 2, 3])
    """

    order: Indices
    starts: Indices
    rule: PersonRule = MEAN_OF_ALL
    numbers: Indices | None = None

    @classmethod
    def of(cls, ids: object, rule: PersonRule = MEAN_OF_ALL, *, records: int | None = None) -> UnitGrouping:
        """Group records by the person they are about; people come in the order of their first records.

        Args:
            ids: one per record: whole numbers, texts, bytes or dates, all of one kind. Two are one person's exactly
                if they are equal. Missing ids, and texts that differ only in their Unicode form or in spaces
                around, are refused: one person taken for two would be protected as neither.
            rule: how a person's records count.
            records: how many there must be.

        Raises:
            DataError: the ids cannot be used; the message shows none of them.
        """
        codes, count = factorize_ids(ids, records)
        sizes = np.bincount(codes, minlength=count)
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        order = np.arange(len(codes)) if count == len(codes) else np.argsort(codes, kind="stable")
        order = order.astype(np.int64)
        order.flags.writeable = starts.flags.writeable = False
        return cls(order, starts, rule)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __repr__(self) -> str:
        return f"UnitGrouping({self.rule})"  # no counts

    @cached_property
    def alone(self) -> bool:
        """Whether every person has one record: the arithmetic for rows then does, with the same result."""
        return len(self.order) == len(self)

    @cached_property
    def in_order(self) -> bool:
        """Whether each person's records lie together, person by person."""
        return bool((self.order == np.arange(len(self.order))).all())

    @cached_property
    def sizes(self) -> Indices:
        """Each person's number of records."""
        return np.diff(self.starts)

    @cached_property
    def shares(self) -> Floats:
        """By record position, what a record counts in the mean of its person's."""
        most = self.rule.records_per_person
        used = self.sizes if most is None else np.minimum(self.sizes, most)
        shares = np.empty(len(self.order))
        shares[self.order] = np.repeat(1.0 / used, self.sizes)
        return shares

    def only(self, positions: Indices) -> tuple[Indices, UnitGrouping]:
        """The rows of some of the people, and these people by places among those rows."""
        rows, starts = GroupIndex(positions, self.order, self.starts, True).flat()
        numbers = None if self.numbers is None else self.numbers[positions]
        return rows, UnitGrouping(np.arange(len(rows)), starts, self.rule, numbers)

    def groups(self, indices: Indices | None, key: bytes | None = None) -> GroupIndex:
        """The records of the people at ``indices`` (``None``: all people) that a release with this key uses."""
        mean = self.rule.combine == "mean"
        if indices is not None and len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError("batch: an index lies outside the people.")
        most = self.rule.records_per_person
        if most is None or (not self.sizes.size) or self.sizes.max() <= most:
            return GroupIndex(indices, self.order, self.starts, mean)
        visited = np.arange(len(self)) if indices is None else indices
        rows, starts = self._chosen(visited, most, key)
        return GroupIndex(None if indices is None else np.arange(len(indices)), rows, starts, mean)

    def one_each(self, indices: Indices | None, key: bytes | None) -> Indices:
        """One record of each person at ``indices``, chosen by the key: for what a person may say only once."""
        return self._chosen(np.arange(len(self)) if indices is None else indices, 1, key)[0]

    def _chosen(self, visited: Indices, most: int, key: bytes | None) -> tuple[Indices, Indices]:
        """At most ``most`` records of each, at equal distances from a place that the key draws for the person.

        Of k records the j-th chosen is ⌊(t + jk)/m⌋ with t uniform in 0…k−1. As t and j vary, t + jk takes every
        value below mk once, so each record is chosen with probability m/k exactly; k ≥ m keeps them distinct. The
        draw depends on the secret key and the person, not on who else is in the batch.
        """
        if key is None:
            raise ValueError("records_per_person: the choice of records needs the secret of its release.")
        from quietgrad.core.noise.rng import SecureStream

        sizes = self.sizes[visited]
        numbers = visited if self.numbers is None else self.numbers[visited]
        word = SecureStream(key, "records of a person").at(0, numbers)
        high, low, k = word >> np.uint64(32), word & np.uint64(0xFFFFFFFF), sizes.astype(np.uint64)
        drawn = ((high * k + ((low * k) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)
        used = np.minimum(sizes, most)
        starts = np.concatenate([[0], np.cumsum(used)]).astype(np.int64)
        turn = np.arange(starts[-1]) - np.repeat(starts[:-1], used)
        place = (np.repeat(drawn, used) + turn * np.repeat(sizes, used)) // np.repeat(used, used)
        return self.order[np.repeat(self.starts[visited], used) + place], starts


class UserLevelRecords:
    """People with their rows, as a curator holds them: their number is that of the people.

    A query gets rows only if it asks for them as a person's.
    """

    is_source: ClassVar[bool] = False
    _SHAPE = frozenset({"dim", "features", "outputs", "intercept", "is_sparse"})

    def __init__(self, rows: Records, people: UnitGrouping) -> None:
        self.rows, self.people = rows, people

    def __len__(self) -> int:
        return len(self.people)

    def seen(self, rows: Records) -> UserLevelRecords:
        """The same people with their rows laid out otherwise."""
        return UserLevelRecords(rows, self.people)

    def contents(self) -> Iterator[bytes | memoryview]:
        """All that a sum depends on, as bytes."""
        yield from self.rows.contents()
        yield from self._grouping()
        yield f"{self.people.rule.combine} {self.people.rule.records_per_person}".encode()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The rows alone: a table is the same one whether it is read by record or by person."""
        return self.rows.fingerprint_parts()

    def _grouping(self) -> Iterator[bytes]:
        yield b"people"
        yield self.people.order.tobytes()
        yield self.people.starts.tobytes()

    @property
    def row_bound(self) -> float | None:
        """R, where a person's loss is the mean of all their rows' and so has a row's constants."""
        if not self.people.rule.is_mean_of_all:
            refuse_person("a fit without clipping")
        return getattr(self.rows, "row_bound", None)

    def __getattr__(self, name: str) -> Any:
        if name in UserLevelRecords._SHAPE:
            return getattr(self.rows, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse_person("this query")


def refuse_person(what: str) -> NoReturn:
    """Say that no bound for a person is known."""
    raise PersonRefused(
        f"{what} bounds what one record contributes and not what a person does: it is not offered with person=. "
        "Use another method, or give one record per person."
    )


class PersonRefused(DataError, ValueError):
    """A query or method that knows no bound for a person."""


def rows_of(batch: Batch) -> WeightedRows:
    """The rows of a batch and what each counts; the one way to rows for queries that read them themselves."""
    records = batch.records
    if not isinstance(records, UserLevelRecords):
        return WeightedRows(records, batch.indices, getattr(records, "sample_weights", None))
    people = records.people
    groups = people.groups(batch.indices, batch.key)
    # A weight is at most 1, so what a row counts for its person only shrinks; the bounds are of sets that hold 0.
    weights = getattr(records.rows, "sample_weights", None)
    counted = people.shares if weights is None else people.shares * weights
    if groups.people is None and groups.order is people.order:
        return WeightedRows(records.rows, None, counted)
    rows = groups.flat()[0]
    shares = np.zeros(len(people.order))  # rows outside the batch count nothing, even if a query reads them
    shares[rows] = counted[rows]
    return WeightedRows(records.rows, rows, shares)


class SurveyData(NamedTuple):
    """Data and what each record counts, in [0, 1]: survey weights over the largest that was declared."""

    data: Any
    weights: Floats

    @classmethod
    def of(cls, data: Any) -> SurveyData | tuple[Any, None]:
        """(data, weights) of what a ``prepare`` is given; ``None`` where no weights are."""
        return data if isinstance(data, cls) else (data, None)


def survey_weights(sample_weight: object, max_weight: float | None, rows: int) -> Floats | None:
    """Weights over the largest that is declared, each cut to [0, 1]; what is no number counts 0.

    It is a rule for every record by itself, so no weight tells of another.

    >>> survey_weights([1.0, 8.0, 2.0], 4.0, 3)
    array([0.25, 1.  , 0.5 ])
    """
    if sample_weight is None:
        if max_weight is not None:
            raise ValueError("max_weight: bounds sample_weight; give both, or neither.")
        return None
    if max_weight is None or not 0.0 < max_weight < math.inf:
        raise ValueError(
            "sample_weight: needs max_weight=, the largest weight that a record may have, as a public number. A "
            "record counts with its weight ÷ max_weight. Larger weights are cut. Nothing was spent."
        )
    weights = cell_numbers(sample_weight)
    if weights.shape != (rows,):
        raise DataError("sample_weight: must be one number per record.")
    with np.errstate(all="ignore"):
        return np.clip(np.nan_to_num(weights / max_weight, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)


@runtime_checkable
class SupportsUserLevel(Protocol):
    """A loss that can sum over people."""

    def add_people(
        self, batch: Batch, groups: GroupIndex, points: Sequence[OwnVector], rule: ClippingRule, out: OwnVector
    ) -> None:
        """out += Σ over people of what the rule makes of the mean or sum of their records' gradients.

        ``batch`` holds the rows and the release's key; its indices are not used. No *person's* contribution is
        longer than ``rule.bound``; one that is not finite counts as zero.
        """
        ...

    def row_losses(self, batch: Batch, params: OwnVector) -> Any:
        """The loss of each row of the batch, in its order."""
        ...


class RecordsWithIds(NamedTuple):
    """Data and the id of the person that each record is about; what :meth:`UserLevelObjective.prepare` takes."""

    data: Any
    person: Any


@dataclass(frozen=True)
class UserLevelObjective(BaseObjective):
    """A loss asked about people: an :class:`~quietgrad.core.session.objectives.Objective` whose records are people.

    >>> from quietgrad.objectives import Logistic
    >>> asked = UserLevelObjective(Logistic())
    >>> records = asked.prepare(RecordsWithIds(([[1.0], [2.0], [3.0]], [0, 1, 1]), ["a", "b", "a"]))
    >>> out = np.zeros(1)
    >>> asked.add(Batch(records, None), [np.zeros(1)], ClippingRule.gradient(0.4), out)
    >>> len(records), out  # ann: clip(½(0.5 − 1.5)), bob: clip(−1)
    (2, array([-0.8]))
    """

    unit: ClassVar[PrivacyUnit] = PrivacyUnit.PERSON

    loss: Any
    rule: PersonRule = MEAN_OF_ALL

    def __post_init__(self) -> None:
        if isinstance(self.loss, UserLevelObjective):
            raise ValueError("person: is given twice.")
        if hasattr(self.loss, "add") and not isinstance(self.loss, SupportsUserLevel):
            refuse_person(type(self.loss).__name__)

    @property
    def regularizer(self) -> Regularizer:
        """The loss's own: it counts people, as it counted records."""
        regularizer: Regularizer = self.loss.regularizer
        return regularizer

    @property
    def silent_batches(self) -> bool:
        """Whether the loss's batches are silent and no release chooses records, which needs its secret."""
        return bool(self.loss.silent_batches) and self.rule.records_per_person is None

    def prepare(self, data: object) -> UserLevelRecords:
        """Lay out the rows and group them; the ids are checked before the rows are looked at."""
        if isinstance(data, UserLevelRecords):
            return data.seen(self.loss.prepare(data.rows))
        if not isinstance(data, RecordsWithIds):
            raise DataError("person: the ids must come with the data they are about.")
        if getattr(data.data, "is_source", False):  # the rows say whose they are, block by block
            records: UserLevelRecords = self.loss.prepare(data.data.by_person(self.rule))
            return records
        people, rows = data.person, None
        if callable(people):
            rows = self.loss.prepare(data.data)
            people = call_id_function(people, len(rows))
        if not isinstance(people, UnitGrouping):
            people = UnitGrouping.of(people, self.rule)
        if people.rule != self.rule:
            raise ValueError("person: was grouped with other settings of combine and records_per_person.")
        rows = self.loss.prepare(data.data) if rows is None else rows
        if len(rows) != len(people.order):
            raise DataError("person: must be one id per record; there are more or fewer ids than records.")
        if isinstance(rows, Table) and not people.in_order:  # a copy, once: rows read together lie together
            rows, people = rows.arranged(people.order), replace(people, order=np.arange(len(people.order)))
        return UserLevelRecords(rows, people)

    def initial(self, records: UserLevelRecords) -> OwnVector:
        """The loss's own start."""
        return self.loss.initial(records if isinstance(records, StreamedRecords) else records.rows)

    def constants(self, row_bound: float | None = None) -> LossConstants:
        """The loss's own for a mean of all records; for a sum, which may have any number of terms, none."""
        known: LossConstants = self.loss.constants() if row_bound is None else self.loss.constants(row_bound)
        if self.rule.combine == "mean":
            return known
        weak = known.weak_convexity if known.convex else None
        return LossConstants(math.inf, None, None, None, None, known.strong_convexity, weak)

    def negative_curvature(self) -> float | None:
        """Return the loss's own for a mean. For a sum, which may curve more, return ``None`` unless it is 0."""
        known: float | None = self.loss.negative_curvature()
        return known if self.rule.combine == "mean" or known == 0.0 else None

    def check_domain(self, params: OwnVector) -> None:
        """Raise if the loss's constants do not hold at ``params``."""
        self.loss.check_domain(params)

    def add(self, batch: Batch, points: Sequence[OwnVector], rule: ClippingRule, out: OwnVector) -> None:
        """out += Σ over people of what the rule makes of their combined gradients."""
        records: UserLevelRecords = batch.records
        if isinstance(records, StreamedRecords):
            records.add(partial(add_gradients, tuple(points), rule), batch, out)
            return
        people = records.people
        if people.alone:  # one record is its own mean and sum
            rows = batch.indices if people.in_order or batch.indices is None else people.order[batch.indices]
            self.loss.add(Batch(records.rows, rows, batch.key), points, rule, out)
            return
        groups = people.groups(batch.indices, batch.key)
        self.loss.add_people(Batch(records.rows, None, batch.key), groups, points, rule, out)

    def loss_sum(self, batch: Batch, params: OwnVector, bound: float) -> float:
        """Σ over people of min(their combined loss, bound); what is not a number counts as the bound."""
        records: UserLevelRecords = batch.records
        if isinstance(records, StreamedRecords):
            return records.loss_sum(batch, params, bound)
        rows, starts = records.people.groups(batch.indices, batch.key).flat()
        if len(starts) == 1:
            return 0.0
        losses = np.maximum(self.loss.row_losses(Batch(records.rows, rows, batch.key), params), 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            totals = np.add.reduceat(losses, starts[:-1])
            if self.rule.combine == "mean":
                totals = totals / np.diff(starts)
        return float(np.fmin(totals, bound).sum())  # of a NaN and the bound, the bound

    def add_hessians(self, batch: Batch, params: OwnVector, clip: float, out: Floats) -> None:
        """out += Σ over people of the mean of their records' Hessians, each shortened to ``clip``."""
        if self.rule.combine == "sum" or not hasattr(self.loss, "add_hessians"):
            refuse_person("a summed Hessian")
        if isinstance(batch.records, StreamedRecords):
            batch.records.add(partial(add_hessians, params, clip), batch, out)
            return
        rows = rows_of(batch)
        self.loss.add_hessians(Batch(rows.records, rows.indices, batch.key), params, clip, out, rows.shares)

    def risk(self, records: UserLevelRecords, params: OwnVector) -> float:
        """F(θ), the mean over people of their combined loss: an evaluation, not private."""
        with self._evaluating():
            return super().risk(records, params)

    def risk_gradient(self, records: UserLevelRecords, params: OwnVector) -> OwnVector:
        """∇F(θ) without clipping: an evaluation, not private."""
        with self._evaluating():
            return super().risk_gradient(records, params)

    def _evaluating(self) -> AbstractContextManager[Any]:
        """A network is evaluated in another mode than it is trained in."""
        context: AbstractContextManager[Any] = getattr(self.loss, "evaluating", nullcontext)()
        return context


def with_privacy_unit(objective: Any, data: Any, person: Any, rule: PersonRule = MEAN_OF_ALL) -> tuple[Any, Any]:
    """(objective, data) to give to a curator: as they are if ``person`` is ``None``, else asked about people."""
    if getattr(data, "is_source", False) and (person is not None or data.person is not None):
        data = data.of_people(None if hasattr(person, "source") else person)
        person = data
    if person is None:
        rule.refuse_without_people()
        return objective, data
    return UserLevelObjective(objective, rule), RecordsWithIds(data, person)
