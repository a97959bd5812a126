"""Layer L0: the queries of tables asked of hostile neighbours, by brute force.

Ranges, looks, moments, labels, whitened gradients and information, evaluation: every one of them states how far one
record can move its sum. Here one record is replaced, or added, by rows that are huge, tiny, zero, sparse or on an
edge, with targets and scores of every kind, and the sums without noise are compared with the claim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse

from quietgrad.audit.probes import probe_sensitivity
from quietgrad.audit.report import AuditFinding
from quietgrad.objectives.base import Batch, Query
from quietgrad.objectives.queries.evaluation import CellSums, Tabulation
from quietgrad.objectives.queries.labels import LabelCounts, LabelRecords
from quietgrad.objectives.queries.scores import Correct, MeanScore, Scoring
from quietgrad.objectives.tables.features import FeatureMean, FeatureMoments, SecondMoments
from quietgrad.objectives.tables.frame import Frame, Framed
from quietgrad.objectives.tables.glm import Logistic, Squared
from quietgrad.objectives.tables.information import WhitenedInformation
from quietgrad.objectives.tables.ranges import (
    FEW_PIECES,
    Magnitudes,
    MeanOctaves,
    Pieces,
    TargetMagnitudes,
    TargetPieces,
)
from quietgrad.objectives.tables.whitening import (
    MeanSquares,
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    Whitening,
)
from quietgrad.privacy.budget import Relation

Floats = npt.NDArray[np.float64]
_D = 4
_VALUES = (0.0, 1e-300, -1e-12, 0.5, 1.0, -1.0, 3.0, -40.0, 2001.0, 1e5, -1e12, 1e300, -1.7e308)
_TARGETS = (-1e300, -5.0, 0.0, 1.0, 299.0, 1e300)


def hostile_rows(rng: np.random.Generator, count: int = 8) -> Floats:
    """Rows of all sizes: alike, alone in one feature, at both ends of what float64 holds."""
    rows: Floats = rng.choice(_VALUES, (count, _D))
    rows[0], rows[1], rows[2], rows[3] = 0.0, 1e300, -1e300, np.eye(_D)[0] * 1.7e308
    return rows


def hostile_pairs(
    regression: bool, relation: Relation, *, is_sparse: bool, seed: int = 0
) -> Iterator[tuple[Any, Any]]:
    """Tables that differ in their last record; sparse ones keep zeros that are stored and columns out of order."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((5, _D)) * np.array([1e-6, 1.0, 40.0, 1e5])
    rows = hostile_rows(rng)
    targets: Any = rng.choice(_TARGETS, len(rows)) if regression else rng.integers(0, 2, len(rows))
    shared = rng.choice(_TARGETS, 5) if regression else rng.integers(0, 2, 5)

    def table(row: Any = None, target: Any = 0) -> Any:
        X = common if row is None else np.vstack([common, row])
        y = shared if row is None else np.append(shared, target)
        if is_sparse:
            n = len(X)
            columns = np.tile(np.arange(_D)[::-1], n)
            X = sparse.csr_array((X[:, ::-1].ravel(), columns, np.arange(0, n * _D + 1, _D)), shape=(n, _D))
        return X, y

    for i, row in enumerate(rows):
        if relation is Relation.ADD_REMOVE:
            yield table(row, targets[i]), table()
        for other in range(i) if relation is Relation.REPLACE_ONE else ():
            yield table(row, targets[i]), table(rows[other], targets[other])


def table_queries(records: Any, relation: Relation, *, regression: bool) -> Iterator[Query]:
    """Every query that the defaults for tables ask: of all features and of some, of rows as a frame shows them."""
    rng = np.random.default_rng(1)
    every, some = np.arange(_D), np.array([0, 2])
    for chosen in (every, some):
        yield Magnitudes(chosen, relation)
        yield Magnitudes(chosen, relation, pooled=True)
        yield MeanOctaves(chosen, 3.0)
        low = np.array([-1.0, 0.0, -40.0, 1e4])[chosen]
        high = low + np.array([2.0, 3.0, 80.0, 1e5])[chosen]
        yield Pieces(chosen, low, high, relation)
        yield Pieces(chosen, low, high, relation, FEW_PIECES)
    if regression:
        yield TargetMagnitudes(relation)
        yield TargetPieces(-5.0, 300.0, relation)
    frame = Frame(np.full(_D, -2.0), np.array([2.0, 3.0, 40.0, 1e5]), (-5.0, 300.0) if regression else None)
    if not isinstance(records.X, np.ndarray):
        frame = frame.zero_kept()
    A = rng.standard_normal((_D, _D))
    full = Whitening.from_moments(0.1 * A[0], A @ A.T, floor=0.1, column=1.0, outputs=1)
    flat = Whitening.from_moments(0.1 * A[0], np.abs(A[1]), floor=0.1, column=1.0, outputs=1)
    points = [scale * rng.standard_normal(_D + 1) for scale in (0.0, 3.0)]
    within: list[Query] = [
        FeatureMean(1.5),
        SecondMoments(1.5),
        FeatureMoments(1.5),
        SecondMomentMatrix(1.5, relation),
        MeanSquares(1.2, relation=relation),
        RowNormHistogram(relation),
        *(WhitenedGradient(params, 0.5, map_) for params in points for map_ in (full, flat)),
        *(WhitenedInformation(params, 0.4, full, relation) for params in points),
    ]
    yield from (Framed(query, frame) for query in within)


def name_of(query: Query) -> str:
    """What is asked, whichever frame shows the rows."""
    return type(query.query if isinstance(query, Framed) else query).__name__


def _table_findings() -> Iterator[AuditFinding]:
    for relation, regression, is_sparse in itertools.product(Relation, (False, True), (False, True)):
        objective = Squared(intercept=True) if regression else Logistic(intercept=True)
        pairs = list(hostile_pairs(regression, relation, is_sparse=is_sparse))
        kinds = {name_of(q) for q in table_queries(objective.prepare(pairs[0][0]), relation, regression=regression)}
        for kind in sorted(kinds):

            def queries(
                records: Any, kind: str = kind, relation: Relation = relation, regression: bool = regression
            ) -> Iterator[Query]:
                asked = table_queries(records, relation, regression=regression)
                return (query for query in asked if name_of(query) == kind)

            what = f"{kind}, {type(objective).__name__}, {'sparse' if is_sparse else 'dense'}, {relation}"
            with np.errstate(all="ignore"):
                yield probe_sensitivity(objective, pairs, queries, relation, what, whole=True)


def _people(relation: Relation) -> Iterator[tuple[Any, Any]]:
    """People's places in a table of counts: cells that coincide or do not exist, weights that are no weights."""
    odd = [0.0, 0.5, 1.0, 7.0, -3.0, np.nan, np.inf, -np.inf]
    shares = [(1.0, 1.0), *zip(odd, odd[::-1], strict=True)]
    places = list(itertools.product(((0, 1), (1, 1), (3, 9), (-1, 2)), shares))
    common = (np.array([[0, 2], [1, 3]]), np.ones((2, 2)))

    def table(place: Any = None) -> Any:
        if place is None:
            return common
        return np.vstack([common[0], place[0]]), np.vstack([common[1], place[1]])

    for i, place in enumerate(places):
        if relation is Relation.ADD_REMOVE:
            yield table(place), table()
        for other in places[:i] if relation is Relation.REPLACE_ONE else ():
            yield table(place), table(other)


def _cells(relation: Relation, records: Any) -> list[Query]:
    return [CellSums(4, 2, relation)]


def _asked(queries: list[Query], records: Any) -> list[Query]:
    return queries


def _evaluation_findings() -> Iterator[AuditFinding]:
    scores = [0.0, 1.0, 5.0, -2.0, np.nan, np.inf]
    for relation in Relation:
        yield probe_sensitivity(
            Tabulation(), _people(relation), partial(_cells, relation), relation,
            f"CellSums, {relation}", whole=True,
        )  # fmt: skip
        pairs = [
            ((np.array([[a], [0.5]]), np.array([1, 0])), (np.array([[b], [0.5]]), np.array([1, 0])))
            for a, b in itertools.permutations(scores, 2)
        ]
        held = np.array([0, 1])
        queries: list[Query] = [
            MeanScore(lambda X, y: X[:, 0], held),
            Correct(lambda X: np.asarray(X[:, 0] > 0.5, dtype=int), held),
        ]
        if relation is Relation.REPLACE_ONE:  # which records are held out is fixed before: none is added
            yield probe_sensitivity(
                Scoring(), pairs, partial(_asked, queries), relation, "MeanScore and Correct", whole=True
            )


def _label_findings() -> Iterator[AuditFinding]:
    """Counts of labels as one vector over all of them: neighbours differ by 1 in one place, or in two."""
    labels = np.array(["a", "b", "b", "c"])
    from quietgrad.privacy.accounting import sensitivity_factor

    def counted(query: LabelCounts, values: Any) -> dict[str, float]:
        names, counts = query.count(Batch(LabelRecords(np.array(values)), None))
        return dict(zip(names.tolist(), counts.tolist(), strict=True))

    for relation in Relation:
        query, worst = LabelCounts(relation), 0.0
        others = [labels[:-1]] if relation is Relation.ADD_REMOVE else [np.append(labels[:-1], x) for x in "abz"]
        for other in others:
            a, b = counted(query, labels), counted(query, other)
            gap = np.linalg.norm([a.get(k, 0.0) - b.get(k, 0.0) for k in {*a, *b}])
            worst = max(worst, float(gap) / (sensitivity_factor(relation) * query.bound))
        verdict = "violation" if worst > 1.0 + 1e-9 else "pass"
        yield AuditFinding("L0 sensitivity", f"LabelCounts, {relation}", "Δ", 1.0, worst, verdict)  # type: ignore[arg-type]


def table_findings() -> Iterator[AuditFinding]:
    """All of them.

    >>> {finding.verdict for finding in _label_findings()}
    {'pass'}
    """
    yield from _table_findings()
    yield from _evaluation_findings()
    yield from _label_findings()
