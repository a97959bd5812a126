"""What one record can move: sums without noise, asked of adversarial neighbours and of every record alone.

Sensitivity: no two neighbours may differ by more than Δ. Clipping: a record contributes its own gradient, shortened
to the Euclidean ball, and nothing else. The queries of tables are asked of rows at both ends of float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse

from quietgrad.assurance.audit.canaries import shorten
from quietgrad.assurance.audit.replicas import as_numbers
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.noise.rng import seed_key
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import (
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    LossQuery,
    Query,
    RecursiveMomentumQuery,
)
from quietgrad.core.vectors import zeros_like
from quietgrad.objectives import L2, Logistic, Squared
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import LOSSES
from quietgrad.tables.queries.counts import (
    CellSums,
    LabelCounts,
    MeanScore,
    Scoring,
    Tabulation,
    TargetRecords,
)
from quietgrad.tables.queries.groups import Grouping, GroupSums
from quietgrad.tables.queries.second_order import (
    GradientNorm,
    GradientsAndHessians,
    LeastEigenvalue,
    StationarityGap,
)
from quietgrad.tables.range_queries import (
    FEW_PIECES,
    BoxedQuery,
    FeatureBins,
    FeatureBox,
    MagnitudeHistogram,
    MeanOctaves,
    RangeHistogram,
    TargetMagnitudeHistogram,
    TargetRangeHistogram,
)
from quietgrad.tables.whitening import (
    CentredMoments,
    CentredNormHistogram,
    FeatureMean,
    MeanSquares,
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    WhitenedInformation,
    Whitening,
)
from tests.probes import found

Floats = npt.NDArray[np.float64]
Pairs = Iterator[tuple[Any, Any]]
_SLACK = 1e-9
_BENT = 1e-3  # of the bound: float32 kernels clip a little shorter than they may

# --- sensitivity --------------------------------------------------------------------------------------------------


def sums(query: Query, objective: Any, records: Any, indices: Any = None) -> Floats:
    """The query's sum without noise, as float64."""
    like, dim = objective.initial(records), query.dim(records)
    out = zeros_like(like) if len(like) == dim else np.zeros(dim)
    query.sum_into(objective, Batch(records, indices), out)
    return as_numbers(out)


def probe_sensitivity(
    objective: Any,
    neighbours: Iterable[tuple[Any, Any]],
    queries: Callable[[Any], Iterable[Query]],
    relation: Relation,
    what: str = "objective",
    *,
    whole: bool = False,
) -> AuditFinding:
    """The largest ‖q(D) − q(D′)‖/Δ over neighbours and queries; above 1 the claimed bound is false.

    ``queries`` makes what to ask of a pair from the first one's prepared records. Both ways of summing are asked:
    all records at once, and by index unless ``whole``.
    """
    factor, worst = sensitivity_factor(relation), 0.0
    for pair in neighbours:
        a, b = (objective.prepare(data) for data in pair)
        for query in queries(a):
            for by_index in (False,) if whole else (False, True):
                left, right = (
                    sums(query, objective, r, np.arange(len(r), dtype=np.int64) if by_index else None)
                    for r in (a, b)
                )
                gap = float(np.linalg.norm(left - right))
                # A sum that is not a number would be published as such: the worst of all leaks.
                worst = max(worst, gap / (factor * query.bound) if math.isfinite(gap) else math.inf)
    note = "the claimed bound is never nearly reached: noise is wasted" if worst < 0.5 else ""
    return found("L0 sensitivity", what, "Δ", 1.0, worst, ok=worst <= 1.0 + _SLACK, note=note)


def example_loss(kind: type[LinearObjective], **settings: Any) -> LinearObjective:
    return kind(**settings | ({"classes": 3} if kind.task == "multiclass" else {}))


def labels(objective: LinearObjective, rng: np.random.Generator, size: int) -> npt.NDArray[Any]:
    """Targets that the objective accepts; the last two differ as much as they can."""
    if objective.task != "regression":
        classes = max(objective.outputs, 2)
        return np.append(rng.integers(0, classes, size - 2), [0, classes - 1])
    found = np.append(rng.standard_normal(size - 2), [100.0, -100.0])
    return np.maximum(found, 0.0) if objective.log_link else found


def neighbouring_tables(
    objective: Any, relation: Relation, *, features: int = 3, draws: int = 2, seed: int = 0, dtype: Any = np.float64
) -> Pairs:
    """Pairs of (X, y) that differ in their last row: replaced, or absent in the second.

    The row has a length from 1e-2 to 1e3; it is negated, relabelled or zeroed. Other rows are zero or tied.
    """
    rng = np.random.default_rng(seed)
    bound = getattr(objective, "row_bound", None)
    for scale, _ in itertools.product((1e-2, 0.1, 0.5, 1.0, 2.0, 30.0, 1e3), range(draws)):
        common = rng.standard_normal((4, features))
        common[0], common[2] = 0.0, common[1]
        if bound is not None:
            common *= bound / max(bound, float(np.linalg.norm(common, axis=1).max()))
        row = rng.standard_normal(features)
        row *= scale / np.linalg.norm(row)
        y = labels(objective, rng, 6)
        for changed, label in ((-row, y[4]), (row, y[5]), (np.zeros(features), y[4])):
            full = np.vstack([common, row]).astype(dtype), y[:5]
            if relation is Relation.ADD_REMOVE:
                yield full, (common.astype(dtype), y[:4])
            else:
                yield full, (np.vstack([common, changed]).astype(dtype), np.append(y[:4], label))


def every_query(records: Any, *, seed: int = 1) -> Iterator[Query]:
    """All queries on sums of gradients and losses, at the origin, near it and far out."""
    rng = np.random.default_rng(seed)
    points = [np.zeros(records.dim), *(s * rng.standard_normal(records.dim) for s in (0.3, 5.0, 1e3))]
    for i, params in enumerate(points):
        previous = points[i - 1]
        yield GradientQuery(params, 1.0)
        yield GradientQuery(params, 0.01)
        yield GradientDifferenceQuery(params, previous, 0.2)
        yield RecursiveMomentumQuery(params, previous, 0.1, 1.0, 0.2)
        yield RecursiveMomentumQuery(params, -params, 0.5, 1.0, 1.0)
        yield JointMomentumQuery(params, previous, 0.1, 0.28)
        yield LossQuery(params, 3.0)


def probe_losses() -> Iterator[AuditFinding]:
    """Every registered loss on tables, under both relations."""
    for (name, entry), relation in itertools.product(LOSSES.items(), Relation):
        loss = example_loss(entry)
        tables = neighbouring_tables(loss, relation)
        yield probe_sensitivity(loss, tables, every_query, relation, f"{name}, {relation}")


# --- clipping -----------------------------------------------------------------------------------------------------

RULES = (
    ClippingRule.gradient(1.0),
    ClippingRule.gradient(0.05),
    ClippingRule.difference(0.2),
    ClippingRule.momentum(0.1, 1.0, 0.2),
    ClippingRule.joint(0.1, 0.3),
)


def probe_clip(objective: Any, data: Any, what: str = "objective") -> AuditFinding:
    """Ask every record alone: its length in bounds, and how far it is from α·clip(g − βg′) + γ·clip(g)."""
    records = objective.prepare(data)
    longest = bent = 0.0
    for pair, rule in itertools.product(_points(objective, records), RULES):
        wanted = [_contribution(objective, records, i, pair, rule) for i in range(len(records))]
        given = [_sum(objective, records, np.array([i]), pair, rule) for i in range(len(records))]
        together = _sum(objective, records, None, pair, rule)
        longest = max(longest, *(float(np.linalg.norm(g)) / rule.bound for g in given))
        pairs = zip([*given, together], [*wanted, sum(wanted)], strict=True)
        bent = max(bent, *(float(np.linalg.norm(g - w)) / rule.bound for g, w in pairs))
    right = longest <= 1.0 + _SLACK and bent <= _BENT  # NaN is wrong too
    note = "" if right else f"{bent:.2g} of the bound away from what the L2 ball leaves"
    return found("L0 clip", what, "C", 1.0, longest, ok=right, note=note)


def _contribution(objective: Any, records: Any, i: int, points: tuple[Any, Any], rule: ClippingRule) -> Floats:
    """What record ``i`` contributes by the definition, from its two gradients without a clip."""
    now, before = (_sum(objective, records, np.array([i]), (x, x), ClippingRule.gradient(1e30)) for x in points)
    moved = shorten((now - rule.beta * before)[None], rule.clip)[0]
    wanted: Floats = rule.alpha * moved + rule.gamma * shorten(now[None], rule.second_clip)[0]
    return wanted


def _sum(objective: Any, records: Any, indices: Any, points: tuple[Any, Any], rule: ClippingRule) -> Floats:
    out = zeros_like(objective.initial(records))
    objective.add(Batch(records, indices, seed_key(0)), points if rule.beta else points[:1], rule, out)
    return as_numbers(out)


def _points(objective: Any, records: Any) -> Pairs:
    rng, start = np.random.default_rng(3), objective.initial(records)
    for scale in (0.3, 5.0):
        a, b = (scale * rng.standard_normal(len(start)) for _ in range(2))
        if isinstance(start, np.ndarray):
            yield a.astype(start.dtype), b.astype(start.dtype)
        else:
            yield start.new_tensor(a), start.new_tensor(b)


def adversarial_table(objective: Any) -> Any:
    """A few rows of all lengths from 10⁻² to 10³, and labels for them."""
    rng = np.random.default_rng(0)
    lengths = [1e-2, 0.3, 1.0, 3.0, 30.0, 1e3]
    rows = rng.standard_normal((len(lengths), 5))
    rows *= (np.array(lengths) / np.linalg.norm(rows, axis=1) * (1.0 - 1e-9))[:, None]
    return rows, labels(objective, rng, len(lengths))


def probe_clips() -> Iterator[AuditFinding]:
    """Every registered loss on tables, dense and sparse, and a network."""
    import torch

    from quietgrad.torch.networks.module import ModuleObjective

    for name, entry in LOSSES.items():
        for intercept in (False, True):
            objective = example_loss(entry, intercept=intercept)
            X, y = adversarial_table(objective)
            yield probe_clip(objective, (X, y), f"{name}{', intercept' if intercept else ''}")
            if not intercept:
                yield probe_clip(objective, (sparse.csr_array(X), y), f"{name}, sparse")
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    x = torch.randn(5, 4, generator=generator) * torch.tensor([0.01, 0.3, 1.0, 10.0, 1e3])[:, None]
    loss = partial(torch.nn.functional.cross_entropy, reduction="none")
    yield probe_clip(ModuleObjective(module, loss), (x, torch.tensor([0, 1, 0, 1, 1])), "module")


# --- queries of tables --------------------------------------------------------------------------------------------


def _whitening(d: int, column: float) -> tuple[Whitening, Whitening]:
    A = np.random.default_rng(7).standard_normal((d, d))
    moments = (A @ A.T, np.abs(A[1]))
    full, flat = (Whitening.from_moments(0.1 * A[0], m, floor=0.1, column=column, outputs=1) for m in moments)
    return full, flat


SECOND_ORDER: dict[str, Callable[[Any, Relation], Query]] = {
    "feature mean": lambda x, relation: FeatureMean(1.5),
    "second moments": lambda x, relation: SecondMomentMatrix(1.5, relation),
    "centred moments": lambda x, relation: CentredMoments(1.5, relation, 0.7 * np.ones(len(x))),
    "row norms": lambda x, relation: RowNormHistogram(),
    "centred norms": lambda x, relation: CentredNormHistogram(relation, -np.ones(len(x)), 4.0),
    "whitened gradient": lambda x, relation: WhitenedGradient(x, 0.5, _whitening(len(x), 0.0)[0]),
    "gradient norm": lambda x, relation: GradientNorm(x, 0.5, 5.0),
    "least eigenvalue": lambda x, relation: LeastEigenvalue(x, 0.2, 5.0),
    "excess": lambda x, relation: StationarityGap(x, 0.1, 1.0, 0.5, 0.2, 5.0),
    "gradients and Hessians": lambda x, relation: GradientsAndHessians(np.stack([x, -x]), 0.5, 0.2, 1),
}


def probe_second_order() -> Iterator[AuditFinding]:
    """Queries on rows of bounded length that are no sums of gradients."""
    for (name, make), relation, loss in itertools.product(SECOND_ORDER.items(), Relation, (Logistic, Squared)):
        objective = loss(regularizer=L2(0.1), row_bound=2.0, rows="clip")

        def queries(records: Any, make: Any = make, relation: Relation = relation) -> Iterator[Query]:
            rng = np.random.default_rng(0)
            for scale in (0.0, 0.3, 5.0):
                yield make(scale * rng.standard_normal(records.dim), relation)

        tables = neighbouring_tables(objective, relation, draws=1)
        what = f"{name}, {loss.__name__}, {relation}"
        yield probe_sensitivity(objective, tables, queries, relation, what, whole=True)


_D = 4
_VALUES = (0.0, 1e-300, -1e-12, 0.5, 1.0, -1.0, 3.0, -40.0, 2001.0, 1e5, -1e12, 1e300, -1.7e308)
_TARGETS = (-1e300, -5.0, 0.0, 1.0, 299.0, 1e300)


def hostile_pairs(regression: bool, relation: Relation, *, is_sparse: bool) -> Pairs:
    """Tables that differ in their last record: all sizes, alone in a feature, at both ends of float64.

    Sparse tables keep zeros that are stored and columns out of order.
    """
    rng = np.random.default_rng(0)
    common = rng.standard_normal((5, _D)) * np.array([1e-6, 1.0, 40.0, 1e5])
    rows: Floats = rng.choice(_VALUES, (8, _D))
    rows[0], rows[1], rows[2], rows[3] = 0.0, 1e300, -1e300, np.eye(_D)[0] * 1.7e308
    targets: Any = rng.choice(_TARGETS, len(rows)) if regression else rng.integers(0, 2, len(rows))
    shared = rng.choice(_TARGETS, 5) if regression else rng.integers(0, 2, 5)

    def table(record: int | None = None) -> Any:
        X = common if record is None else np.vstack([common, rows[record]])
        y = shared if record is None else np.append(shared, targets[record])
        if is_sparse:
            columns = np.tile(np.arange(_D)[::-1], len(X))
            starts = np.arange(0, len(X) * _D + 1, _D)
            X = sparse.csr_array((X[:, ::-1].ravel(), columns, starts), shape=X.shape)
        return X, y

    return _neighbours(table, len(rows), relation)


def _neighbours(table: Callable[..., Any], count: int, relation: Relation) -> Pairs:
    """Each of ``count`` records against none, or against every other."""
    for i in range(count):
        if relation is Relation.ADD_REMOVE:
            yield table(i), table()
        for other in range(i) if relation is Relation.REPLACE_ONE else ():
            yield table(i), table(other)


def table_queries(records: Any, relation: Relation, *, regression: bool) -> Iterator[Query]:
    """Every query that the defaults for tables ask: of all features and of some, of rows as a frame shows them."""
    for chosen in (np.arange(_D), np.array([0, 2])):
        yield MagnitudeHistogram(chosen, relation)
        yield MagnitudeHistogram(chosen, relation, pooled=True)
        yield MeanOctaves(chosen, 3.0)
        low = np.array([-1.0, 0.0, -40.0, 1e4])[chosen]
        high = low + np.array([2.0, 3.0, 80.0, 1e5])[chosen]
        yield RangeHistogram(chosen, low, high, relation)
        yield RangeHistogram(chosen, low, high, relation, FEW_PIECES)
        yield FeatureBins(chosen, np.linspace(low, high, 5, axis=1), relation)
    if regression:
        yield TargetMagnitudeHistogram(relation)
        yield TargetRangeHistogram(-5.0, 300.0, relation)
    frame = FeatureBox(np.full(_D, -2.0), np.array([2.0, 3.0, 40.0, 1e5]), (-5.0, 300.0) if regression else None)
    if not isinstance(records.X, np.ndarray):
        frame = frame.zero_kept()
    maps, rng = _whitening(_D, 1.0), np.random.default_rng(1)
    points = [scale * rng.standard_normal(_D + 1) for scale in (0.0, 3.0)]
    within: list[Query] = [
        FeatureMean(1.5),
        SecondMomentMatrix(1.5, relation),
        CentredMoments(1.5, relation, np.linspace(-0.5, 0.5, _D)),
        CentredNormHistogram(relation, np.linspace(-0.5, 0.5, _D), 2.0),
        MeanSquares(1.2, relation=relation),
        RowNormHistogram(relation),
        *(WhitenedGradient(params, 0.5, map_) for params in points for map_ in maps),
        *(WhitenedInformation(params, 0.4, maps[0], relation) for params in points),
    ]
    yield from (BoxedQuery(query, frame) for query in within)


def _name(query: Query) -> str:
    return type(query.query if isinstance(query, BoxedQuery) else query).__name__


def probe_table_queries() -> Iterator[AuditFinding]:
    """All queries of tables, scores, cells and labels."""
    for relation, regression, is_sparse in itertools.product(Relation, (False, True), (False, True)):
        objective = Squared(intercept=True) if regression else Logistic(intercept=True)
        pairs = list(hostile_pairs(regression, relation, is_sparse=is_sparse))
        asked = partial(table_queries, relation=relation, regression=regression)
        for kind in sorted({_name(query) for query in asked(objective.prepare(pairs[0][0]))}):

            def queries(records: Any, kind: str = kind, asked: Any = asked) -> Iterator[Query]:
                return (query for query in asked(records) if _name(query) == kind)

            what = f"{kind}, {type(objective).__name__}, {'sparse' if is_sparse else 'dense'}, {relation}"
            with np.errstate(all="ignore"):
                yield probe_sensitivity(objective, pairs, queries, relation, what, whole=True)
    for relation in Relation:
        cells: list[Query] = [CellSums(4, 2, relation)]
        what = f"CellSums, {relation}"
        yield probe_sensitivity(Tabulation(), _cells(relation), lambda _, q=cells: q, relation, what, whole=True)  # type: ignore[misc]
        yield _probe_labels(relation)
        groups: list[Query] = [GroupSums(3, 3, relation)]
        what = f"GroupSums, {relation}"
        yield probe_sensitivity(Grouping(), _groups(relation), lambda _, q=groups: q, relation, what, whole=True)  # type: ignore[misc]
    scores = [0.0, 1.0, 5.0, -2.0, np.nan, np.inf]
    pairs = [
        tuple((np.array([[score], [0.5]]), np.array([1, 0])) for score in pair)  # type: ignore[misc]
        for pair in itertools.permutations(scores, 2)
    ]
    held = np.array([0, 1])
    read: list[Query] = [
        MeanScore(lambda X, y: X[:, 0], held),
    ]
    # Which records are held out is fixed before: none is added.
    relation, what = Relation.REPLACE_ONE, "MeanScore"
    yield probe_sensitivity(Scoring(), pairs, lambda _: read, relation, what, whole=True)


def _cells(relation: Relation) -> Pairs:
    """Cells that coincide or do not exist, and weights that are no weights."""
    odd = [0.0, 0.5, 1.0, 7.0, -3.0, np.nan, np.inf, -np.inf]
    shares = [(1.0, 1.0), *zip(odd, odd[::-1], strict=True)]
    places = list(itertools.product(((0, 1), (1, 1), (3, 9), (-1, 2)), shares))
    cells, weights = np.array([[0, 2], [1, 3]]), np.ones((2, 2))

    def table(i: int | None = None) -> Any:
        return (
            (cells, weights)
            if i is None
            else (np.vstack([cells, places[i][0]]), np.vstack([weights, places[i][1]]))
        )

    return _neighbours(table, len(places), relation)


def _groups(relation: Relation) -> Pairs:
    """Rows at the corners of a group's cube, of no group, and of values that are none."""
    odd = [-1.0, 0.4, 1.0, 9.0, np.nan, -np.inf]
    places = list(itertools.product((0, 2, -1, 5), itertools.product(odd, odd)))

    def table(i: int | None = None) -> Any:
        rows = [(0, (0.1, -0.7)), (1, (0.9, 0.2)), *([] if i is None else [places[i]])]
        return np.array([group for group, _ in rows]), np.array([values for _, values in rows])

    return _neighbours(table, len(places), relation)


def _probe_labels(relation: Relation) -> AuditFinding:
    """Counts of labels as one vector over all of them: neighbours differ by 1 in one place, or in two."""
    query, worst, held = LabelCounts(relation), 0.0, np.array(["a", "b", "b", "c"])

    def counted(values: Any) -> dict[str, float]:
        names, counts = query.count(Batch(TargetRecords(None, np.array(values)), None))
        return dict(zip(names.tolist(), counts.tolist(), strict=True))

    others = [held[:-1]] if relation is Relation.ADD_REMOVE else [np.append(held[:-1], x) for x in "abz"]
    for other in others:
        a, b = counted(held), counted(other)
        gap = np.linalg.norm([a.get(k, 0.0) - b.get(k, 0.0) for k in {*a, *b}])
        worst = max(worst, float(gap) / (sensitivity_factor(relation) * query.bound))
    return found("L0 sensitivity", f"LabelCounts, {relation}", "Δ", 1.0, worst, ok=worst <= 1.0 + _SLACK)
