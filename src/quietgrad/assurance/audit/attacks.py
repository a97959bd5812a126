"""The table of attacks: a row for everything that makes a release, with its claim and how it is attacked.

Algorithms come from their registry. The other rows are releases that are no algorithm by name: labels, ranges and
scores of estimators, the private search, certificates, people, custom loops, networks and federations. A test reads
the source and fails for a module that plans a release and stands in no row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quietgrad.assurance.audit.canaries import QueryGame, table_game
from quietgrad.assurance.audit.clients import audit_clients
from quietgrad.assurance.audit.confidence_bounds import dprime_found, dprime_lower
from quietgrad.assurance.audit.federated import attack_shared_person, audit_federations
from quietgrad.assurance.audit.noise_checks import (
    AnonymousRecords,
    ConstantQuery,
    EmptyObjective,
    categories,
    lengthened,
    probe_slots,
)
from quietgrad.assurance.audit.replicas import Game
from quietgrad.assurance.audit.report import AuditFinding, AuditReport, judged
from quietgrad.assurance.audit.running import PrivacyClaim, attack_profile, run
from quietgrad.core.accounting.accounting import gdp_mu
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.noise.k_norm import KNormNoise
from quietgrad.core.noise.mechanisms import GaussianPartitionSelection
from quietgrad.core.noise.rng import SecureStream, fresh_key
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.objectives import Objective, RecordAdapter
from quietgrad.core.session.queries import GradientQuery
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateLinearRegression,
    PrivateLogisticRegression,
)
from quietgrad.estimators.base import PrivateModel
from quietgrad.estimators.describing import _SHARES, _Describe
from quietgrad.estimators.search import SearchReleases, _rounds
from quietgrad.methods import plan as make_plan
from quietgrad.methods.base import Algorithm
from quietgrad.methods.budget_allocation import allocate_range_estimation
from quietgrad.methods.range_estimation import HistogramRelease, Ranges
from quietgrad.methods.registry import ALGORITHMS
from quietgrad.methods.stationarity import StationarityRelease
from quietgrad.objectives import Logistic
from quietgrad.tables.privacy_units import Combine, PersonRule, RecordsWithIds, UnitGrouping, UserLevelObjective
from quietgrad.tables.queries.counts import LabelCounts, LabelSet, Tabulation
from quietgrad.tables.queries.groups import Grouping, GroupSums

Floats = npt.NDArray[np.float64]
_ALPHA = 1e-6
_BUDGET = Budget(6.0, 1e-5)
_N = 4


@dataclass(frozen=True)
class AuditTarget:
    """A row of the table.

    Attributes:
        name: what ``quietgrad audit NAME`` asks for.
        modules: the modules below ``quietgrad`` that plan its releases.
        claim: what is claimed of it.
        attack: makes the reports, given the number of runs of each world.
        needs: a package that must be installed for it.
    """

    name: str
    modules: tuple[str, ...]
    claim: str
    attack: Callable[[int], Iterator[AuditReport]]
    needs: str | None = None

    def reports(self, runs: int) -> Iterator[AuditReport]:
        """Attack; no report if what the attack needs is not installed."""
        if self.needs is None or find_spec(self.needs) is not None:
            yield from self.attack(runs)


# --- algorithms by name -------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    """One configuration of an algorithm: a label, the algorithm, its public n and the budget.

    ``share`` of the runs asked for is made where a run is slow; the budget then leaves signal to spare. ``game``
    has the worlds to tell apart, if not those of gradient-space canaries.
    """

    label: str
    algorithm: Algorithm
    n: int
    budget: Budget
    share: float
    game: Game | None


def attacked() -> list[str]:
    """The names of algorithms that claim privacy.

    >>> "dp-srm" in attacked(), "sgd" in attacked()
    (True, False)
    """
    return [entry.name for entry in ALGORITHMS.values() if entry.attacks]


def attacks_on(name: str) -> list[Attack]:
    """The configurations of an algorithm to attack.

    >>> [attack.label for attack in attacks_on("dp-gd")]
    ['every record', 'every record']
    """
    entry, attacks = ALGORITHMS[name], []
    for example in entry.attacks:
        relation = Relation.parse(example.relation)
        game = None
        if example.space != "gradients":
            game = table_game(example.n, relation, only=example.only, every=example.every)
        budget = Budget(example.epsilon, example.delta, relation)
        attacks.append(Attack(example.label, entry.make(example.settings), example.n, budget, example.share, game))
    return attacks


def _algorithm(name: str) -> AuditTarget:
    def attack(runs: int) -> Iterator[AuditReport]:
        for each in attacks_on(name):
            attack_runs = round(runs * each.share)
            report = run(each.algorithm, budget=each.budget, n=each.n, runs=attack_runs, game=each.game)
            yield replace(report, algorithm=f"{name}: {each.label}")

    home = f"methods.{ALGORITHMS[name].home.partition('.')[0]}"
    return AuditTarget(name, (home,), "(ε, δ) and the whole profile δ(ε) of its plan", attack)


# --- queries ------------------------------------------------------------------------------------------------------


def _tell_apart(
    once: Plan, worlds: Iterable[CentralCurator], ask: Callable[[CentralSession], float], runs: int, what: str
) -> AuditFinding:
    """Attack ``once``, a plan of one release, by the answers of two curators to ``runs`` such releases."""
    many = replace(once, schedule=Schedule((replace(once.schedule.slots[0], count=runs),)))
    a, b = (np.array([ask(session) for _ in range(runs)]) for session in [curator.open(many) for curator in worlds])
    return attack_profile((a, b), PrivacyClaim(once), what, _ALPHA)


def _through_queries(
    make: Callable[[], Algorithm], game: Callable[[Relation], Game] = lambda relation: table_game(_N, relation)
) -> Callable[[int], Iterator[AuditReport]]:
    """An attack in query space, under both relations."""

    def attack(runs: int) -> Iterator[AuditReport]:
        for relation in Relation:
            budget = replace(_BUDGET, relation=relation)
            yield run(make(), budget=budget, n=_N, runs=max(400, runs // 2), game=game(relation))

    return attack


def _cells(relation: Relation) -> Game:
    return QueryGame(_N, relation, Tabulation(), (np.arange(_N)[:, None] % 2, None))


def _labels(runs: int) -> Iterator[AuditReport]:
    """Attack one record's label; its presence moves the label's count past the threshold."""
    started = time.perf_counter()
    others, sigma = 6, 0.8
    # The threshold lies halfway between the counts of the two worlds, where they differ most.
    failure = 0.5 * math.erfc((others - 0.5) / (sigma * math.sqrt(2.0)))
    slot = Slot("labels", FullBatch(), mechanism=GaussianPartitionSelection(failure))
    once = Plan("labels", {}, Schedule((slot,)), _N, _BUDGET, sigma)
    tables = (np.repeat([0, 1], [count, 40]) for count in (others + 1, others))
    curators = (CentralCurator(LabelSet(), (np.zeros((len(y), 1)), y), account="audit") for y in tables)
    query = LabelCounts(Relation.ADD_REMOVE)
    finding = _tell_apart(once, curators, lambda s: float(0 in s.discover("labels", query)), runs, "one label")
    findings = [finding, *probe_slots(lengthened(once), what="labels")]
    yield AuditReport.of("labels", once, findings, runs=runs, started=started)


def _groups(runs: int) -> Iterator[AuditReport]:
    """Attack one record at a corner of its group's cube, which moves all numbers of the group the same way."""
    width, z = 3, 1.0
    for relation in Relation:
        started = time.perf_counter()
        slot = Slot("sums", FullBatch(), mechanism=KNormNoise(width))
        once = Plan("groups", {}, Schedule((slot,)), _N, replace(_BUDGET, relation=relation), z)
        corner, rest = np.ones((1, width - 1)), np.zeros((_N - 1, width - 1))
        replaced = relation is Relation.REPLACE_ONE
        tables = ((np.zeros(_N, int), np.vstack([corner, rest])), (np.zeros(_N - 1, int), rest))
        if replaced:
            tables = (tables[0], (np.zeros(_N, int), np.vstack([-corner, rest])))
        curators = (CentralCurator(Grouping(), table, account="audit") for table in tables)
        query = GroupSums(2, width, relation)

        def ask(session: CentralSession, query: GroupSums = query, replaced: bool = replaced) -> float:
            """The likelihood ratio of the two worlds, the count left out where it is the same in both."""
            counts = np.array([float(_N if replaced else _N - 1), 0.0, 0.0])
            apart = np.array([0.0, 1.0, 1.0]) if replaced else np.ones(3)
            seen = session.release("sums", query)[:width] - counts
            return float(np.abs(seen + replaced * apart).max() - np.abs(seen - apart).max())

        finding = _tell_apart(once, curators, ask, runs, f"a corner of a group, {relation}")
        yield AuditReport.of(
            "groups", once, [finding, *probe_slots(lengthened(once), what="groups")], runs=runs, started=started
        )


# --- estimators ---------------------------------------------------------------------------------------------------


class _Planned(Exception):
    """Carries the plan that a fit was about to open."""


def _stop_when_planned(model: PrivateModel) -> None:
    """Let a fit stop once it has its plan, before its session opens, so that nothing is charged."""
    planned = model._plan

    def stop(*size: Any, **how: Any) -> Plan:
        raise _Planned(planned(*size, **how))

    model.__dict__["_plan"] = stop


def _estimators(runs: int) -> Iterator[AuditReport]:
    """The plans that estimators make, range and label estimates included: noise of every slot."""
    X = np.random.default_rng(0).uniform(-0.5, 0.5, (1000, 3))  # enough for shapes and pairs of an additive model
    y, n = (X[:, 0] > 0).astype(int), len(X)
    ranges = allocate_range_estimation(n, X.shape[1], budget=_BUDGET)
    plans = {
        "PrivateScaler": make_plan(Ranges(ranges), n=n, budget=_BUDGET),
        "describe": make_plan(_Describe(ranges, _SHARES), n=n, budget=_BUDGET),
    }
    for model in (
        PrivateLogisticRegression(epsilon=6.0, n_public=n, row_bound=1.0),
        PrivateLinearRegression(epsilon=6.0, n_public=n, row_bound=1.0),
        PrivateAdditiveClassifier(epsilon=6.0, n_public=n),
    ):
        _stop_when_planned(model)
        try:
            model.fit(X, y)
        except _Planned as planned:
            plans[type(model).__name__] = planned.args[0]
        else:
            raise AssertionError(f"{type(model).__name__}: a fit that opened no session.")
    for name, plan in plans.items():
        started = time.perf_counter()
        findings = probe_slots(lengthened(plan), what=name)
        yield AuditReport.of(name, plan, findings, runs=runs, started=started)


def _search(runs: int) -> Iterator[AuditReport]:
    """The plan of a search: noise of its scores, the law of the number of rounds, and the best score."""
    started = time.perf_counter()
    budget = Budget(6.0, 1e-5, Relation.REPLACE_ONE)
    releases = SearchReleases(3.0)
    plan = make_plan(releases, n=50, budget=budget)
    findings = probe_slots(lengthened(plan), what="scores")
    # K ≥ 1 is geometric: P(K > k) = (1 − 1/mean)^k.
    mean = releases.mean_rounds
    u = (SecureStream(fresh_key(), "audit").uint64(0, 4000) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    drawn = np.array([_rounds(mean, float(x)) for x in u])
    edges = np.arange(1, 40)
    counts = np.bincount(np.minimum(drawn, 40), minlength=41)[1:]
    shares = np.array([*((1 - 1 / mean) ** (edges - 1) / mean), (1 - 1 / mean) ** 39])
    chance = categories(counts.astype(np.float64), 4000 * shares)
    findings.append(judged("L0 rounds", "the law of K", "p", 1e-7, chance, ok=chance >= 1e-7))
    best, first = [], []
    for pull in (1.0, -1.0):  # a record moves every score as far as it may
        session = CentralCurator(EmptyObjective(), AnonymousRecords(plan.n_public, 1), account="audit").open(plan)
        query, scores_by_run = ConstantQuery(1, 1.0, pull), []
        for number in range(runs):
            rounds = _rounds(mean, session.uniform(f"rounds/{number}"))
            scores_by_run.append([float(session.release("round", query)[0]) for _ in range(rounds)])
        best.append(np.array([max(scores) for scores in scores_by_run]))
        first.append(np.array([scores[0] for scores in scores_by_run]))
    findings.append(attack_profile((best[0], best[1]), PrivacyClaim(plan), "the best score", _ALPHA / 2))
    # A round costs one Gaussian release, and the theorem about their number does the rest.
    mu = gdp_mu(plan.schedule.slots[0].event(plan.noise_multiplier, budget.relation, 1), relation=budget.relation)
    low, seen = dprime_lower(first[0], first[1], _ALPHA / 2)[1], dprime_found(mu, 2.0 * mu, runs, _ALPHA / 2)
    findings.append(judged("L1", "one round's score", "μ", mu, low, ok=low <= mu, seen=seen))
    yield AuditReport.of("private-search", plan, findings, runs=runs, started=started)


# --- people -------------------------------------------------------------------------------------------------------

PERSON_SIZES = (1, 7, 500)


def numbered_people(whose: npt.NDArray[np.int64], combine: Combine) -> UnitGrouping:
    """Group people whose numbers are given, so that two worlds number them alike."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(whose))]).astype(np.int64)
    return UnitGrouping(np.argsort(whose, kind="stable"), starts, PersonRule(combine))


def attack_person(
    size: int,
    runs: int,
    asking: Callable[[Objective], RecordAdapter] = UserLevelObjective,
    *,
    relation: Relation,
    noise_multiplier: float = 0.8,
    delta: float = 1e-5,
) -> AuditFinding:
    """Tell from one noisy sum whether a person of ``size`` records, all beyond the clip, is in it."""
    rng = np.random.default_rng(0)

    def holder(sign: float) -> CentralCurator:
        ids = np.repeat(np.arange(4), [size if sign else 0, 2, 5, 600])
        X = rng.standard_normal((len(ids), 2)) * 1e-3
        X[ids == 0] = [1e3 * sign, 0.0]
        people = numbered_people(np.unique(ids, return_inverse=True)[1], "mean")
        records = RecordsWithIds((X, np.zeros(len(ids))), people)
        return CentralCurator(asking(Logistic()), records, account="audit")

    query, worlds = GradientQuery(np.zeros(2), 1.0), (1.0, 0.0 if relation is Relation.ADD_REMOVE else -1.0)
    return _tell_apart(
        _person_plan(relation, noise_multiplier, delta), map(holder, worlds),
        lambda session: float(session.release("gradient", query)[0]), runs,
        f"a person of {size} records, {relation}",
    )  # fmt: skip


def _person_plan(relation: Relation, noise_multiplier: float = 0.8, delta: float = 1e-5) -> Plan:
    schedule, budget = Schedule((Slot("gradient", FullBatch()),)), Budget(6.0, delta, relation)
    return Plan("people", {}, schedule, 4, budget, noise_multiplier, unit=PrivacyUnit.PERSON)


def with_people(report: AuditReport, noise_multiplier: float) -> AuditReport:
    """Add to an audit of a run by person, whose canaries have one record, attacks by people of 1, 7 and 500.

    One release at the run's noise is attacked.
    """
    started, runs, delta = time.perf_counter(), max(400, report.runs // 2), report.delta
    attack = partial(attack_person, relation=report.relation, noise_multiplier=noise_multiplier, delta=delta)
    person_findings = [attack(size, runs) for size in PERSON_SIZES]
    return replace(
        report,
        findings=(*report.findings, *person_findings),
        epsilon_lower=max(report.epsilon_lower, *(f.epsilon_lower for f in person_findings)),
        confidence=report.confidence - len(PERSON_SIZES) * _ALPHA,
        seconds=report.seconds + time.perf_counter() - started,
        notes=(*report.notes, f"claimed per person: {', '.join(map(str, PERSON_SIZES))} records were tried"),
    )


def _people(runs: int) -> Iterator[AuditReport]:
    """People of several records, and people known to two parties."""
    for relation in Relation:
        started = time.perf_counter()
        findings = [attack_person(size, max(400, runs // 2), relation=relation) for size in PERSON_SIZES]
        findings.append(attack_shared_person(max(400, runs // 4), relation=relation))
        yield AuditReport.of("people", _person_plan(relation), findings, runs=runs, started=started)


def _networks(runs: int) -> Iterator[AuditReport]:
    from quietgrad.assurance.audit.networks import audit_networks  # loads PyTorch

    return audit_networks(runs)


def _custom_loop(runs: int) -> Iterator[AuditReport]:
    from quietgrad.assurance.audit.networks import audit_loops  # loads PyTorch

    return audit_loops(runs)


# --- the table ----------------------------------------------------------------------------------------------------

_ESTIMATORS = (
    "methods.additive_gd",
    "estimators.classifiers",
    "estimators.regressors",
    "estimators.additive",
    "estimators.transformers",
    "estimators.describing",
)
_ROWS = (
    *map(_algorithm, attacked()),
    AuditTarget(
        "private-certificate", ("methods.stationarity",), "(ε, δ) of two scalars",
        _through_queries(StationarityRelease),
    ),
    AuditTarget(
        "evaluation", ("methods.range_estimation",), "(ε, δ) of a histogram",
        _through_queries(lambda: HistogramRelease(4), _cells),
    ),
    AuditTarget("labels", ("tables.queries.counts",), "(ε, δ) of finding labels", _labels),
    AuditTarget("groups", ("estimators.grouping", "tables.queries.groups"), "ε of sums by groups", _groups),
    AuditTarget("estimators", _ESTIMATORS, "the noise of every slot", _estimators, "sklearn"),
    AuditTarget("private-search", ("estimators.search",), "δ(ε) of a random number of rounds", _search, "sklearn"),
    AuditTarget("clients", ("methods.fedavg",), "δ(ε) per party of one round of FedAvg", audit_clients),
    AuditTarget("people", ("tables.privacy_units",), "δ(ε) per person of many records or parties", _people),
    AuditTarget(
        "own-loop", ("methods.custom_loop", "torch.loops.base"), "μ of a custom loop", _custom_loop, "torch"
    ),
    AuditTarget("networks", (), "δ(ε) of one release of a network", _networks, "torch"),
    AuditTarget(
        "federations", (), "μ behind every kind of trust", lambda runs: audit_federations(max(1000, runs // 4))
    ),
)  # fmt: skip

ATTACKS: dict[str, AuditTarget] = {row.name: row for row in _ROWS}
"""By name; ``quietgrad audit --all`` attacks them all, ``quietgrad audit NAME`` one."""
