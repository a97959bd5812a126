"""People of 1, 7 and 500 records under exact probes: what one adds, who is drawn, whose ids are whose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.assurance.audit.attacks import PERSON_SIZES, numbered_people
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting.budget import PrivacyUnit, Relation
from quietgrad.core.errors import DataError
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import Poisson
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientQuery, Query
from quietgrad.objectives import Squared
from quietgrad.tables.losses import LOSSES
from quietgrad.tables.privacy_units import Combine, PersonRule, RecordsWithIds, UnitGrouping, UserLevelObjective
from tests.probes import found
from tests.probes.records import every_query, example_loss, labels, probe_sensitivity

Grouping = Callable[[Any], UnitGrouping]
Asking = Callable[..., Any]
_FEATURES = 3
_OTHERS = (1, 4, 9, 2, 20)  # records of everybody else


def neighbouring_people(
    loss: Any, relation: Relation, *, combine: Combine = "mean", seed: int = 0
) -> Iterator[tuple[RecordsWithIds, RecordsWithIds]]:
    """Pairs of tables that differ in one whole person: absent in the second, or another in their place.

    Their records are all in one direction and far beyond any clip, overflow, differ in scale by hundreds of
    octaves, or are plain; and they lie scattered among those of others.
    """
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(len(_OTHERS)), _OTHERS)
    X, y = rng.standard_normal((len(ids), _FEATURES)), labels(loss, rng, len(ids))
    for size, kind in itertools.product(PERSON_SIZES, ("aligned", "huge", "mixed", "plain")):
        worlds = []
        for one in range(2):
            count = 0 if one and relation is Relation.ADD_REMOVE else size if not one else max(1, size // 3)
            order = rng.permutation(len(ids) + count)
            rows = np.vstack([X, _rows(rng, count, kind)])[order]
            truth = np.concatenate([y, labels(loss, rng, count + 2)[:count]])[order]
            whose = np.concatenate([ids, np.full(count, len(_OTHERS))])[order]
            # People of both worlds are numbered alike, as curators who go by first records would not.
            worlds.append(RecordsWithIds((rows, truth), numbered_people(whose, combine)))
        yield worlds[0], worlds[1]


def _rows(rng: np.random.Generator, size: int, kind: str) -> npt.NDArray[np.float64]:
    if kind == "aligned":
        return np.ones((size, 1)) * (1e3 * rng.standard_normal(_FEATURES))
    scales = {
        "huge": np.full((size, 1), 1e200),
        "mixed": np.exp2(rng.integers(-300, 300, (size, 1)).astype(np.float64)),
        "plain": np.ones((size, 1)),
    }
    return np.asarray(rng.standard_normal((size, _FEATURES)) * scales[kind])


def probe_people(
    asking: Asking = UserLevelObjective,
    losses: dict[str, Any] | None = None,
    relations: Iterable[Relation] = tuple(Relation),
) -> Iterator[AuditFinding]:
    """Brute force over neighbours that differ in a person: every loss on tables, every query of gradients."""
    losses = losses or {name: example_loss(entry) for name, entry in LOSSES.items()}
    combines: tuple[Combine, ...] = ("mean", "sum")
    for (name, loss), relation, combine in itertools.product(losses.items(), relations, combines):
        pairs = neighbouring_people(loss, relation, combine=combine)
        what = f"people, {name}, {combine}, {relation}"
        yield probe_sensitivity(asking(loss, PersonRule(combine)), pairs, _asked, relation, what)


def _asked(records: Any) -> Iterator[Query]:
    """Every kind of query on sums of gradients and losses, seven to a point, at a near or a far point in turn."""
    return itertools.islice(every_query(records), 7, 21, 2)


def probe_drawn_people(
    asking: Asking = UserLevelObjective, grouping: Grouping = UnitGrouping.of, *, releases: int = 64
) -> AuditFinding:
    """Whether a sample holds people with all their records or not at all, each at the rate that was planned.

    Everybody's records point along an axis of their own with a gradient of one bound: a coordinate of the sum is
    then 0 or 1 for whoever is drawn as a whole, and something between for whoever is drawn in parts.
    """
    sizes = np.array([1, 7, 50, 3, 2, 7, 1, 20])
    ids, rate = np.repeat(np.arange(len(sizes)), sizes), 0.5
    X = np.eye(len(sizes))[ids]
    curator = CentralCurator(asking(Squared()), RecordsWithIds((X, -np.ones(len(ids))), grouping(ids)))
    slot = Slot("gradient", Poisson(rate), releases)
    plan = Plan("probe", {}, Schedule((slot,)), len(sizes), None, 0.0, unit=PrivacyUnit.PERSON)
    session = curator.open(plan)
    seen = np.stack(
        [session.release("gradient", GradientQuery(np.zeros(len(sizes)), 1.0)) for _ in range(releases)]
    )
    whole = np.abs(seen - np.round(seen)).max()
    far = float(np.abs(np.round(seen).mean(axis=0) - rate).max())
    # Six deviations of a mean of coins: a false alarm in 10⁷ for all people together.
    wrong = whole > 1e-9 or far > 6.0 * 0.5 / releases**0.5
    note = "people are drawn in parts" if whole > 1e-9 else ""
    return found("L0 sampling", "people", "whole", 0.0, float(whole), ok=not wrong, note=note)


_SUSPICIOUS: tuple[list[Any], ...] = (
    [1, "1", 2], [1, 1.0, 2], [1, None, 2], [1.0, float("nan"), 2.0], ["a", "", "b"], ["é", "e\u0301", "x"],
    ["a", " a", "b"], [True, 1, 2], [b"a", "a", "b"], [1.5, 2.5, 3.5],
)  # fmt: skip
_DISTINCT: tuple[list[Any], ...] = (
    list(range(200)), [f"patient {k}" for k in range(200)], [2**60 + k for k in range(200)], ["a", "A", "b"],
    [2**200 + k for k in range(9)], ["x" * 300 + c for c in "abc"],
)  # fmt: skip


def probe_ids(grouping: Grouping = UnitGrouping.of) -> AuditFinding:
    """Whether ids that may be one person's under two names are refused, and different people are never one."""
    mistaken = 0
    for ids in _SUSPICIOUS:
        try:
            grouping(ids)
        except DataError:
            continue
        mistaken += 1
    mistaken += sum(len(grouping(ids)) != len(ids) for ids in _DISTINCT)
    mistaken += sum(len(grouping([*ids, *ids])) != len(ids) for ids in _DISTINCT)
    return found("L0 ids", "people", "mistaken", 0, mistaken, ok=not mistaken)
