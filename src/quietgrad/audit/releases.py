"""Whatever releases something and is no algorithm by name: registered here, so that it is attacked.

Looks at labels and targets, the private search, certificates, selection by Hessians, and loops that users write
themselves. Every module that plans a release is named by an algorithm, an oracle, or one of these; a test reads the
source and fails for one that is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.canaries import QueryGame, table_game
from quietgrad.audit.distinguishers import PrivacyClaim, attack_dprime, attack_profile
from quietgrad.audit.mechanisms import AnonymousRecords, ConstantQuery, EmptyObjective
from quietgrad.audit.noise_checks import categories, check_normals, lengthened, probe_slots
from quietgrad.audit.people import people_reports
from quietgrad.audit.replicas import Views
from quietgrad.audit.report import AuditFinding, AuditReport
from quietgrad.audit.running import run
from quietgrad.plans.counting import PublicCount
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.accounting import gdp_mu
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.mechanisms import GaussianPartitionSelection
from quietgrad.privacy.rng import fresh_key
from quietgrad.sampling import FullBatch

Floats = npt.NDArray[np.float64]
_BUDGET = Budget(6.0, 1e-5)
_N = 4


@dataclass(frozen=True)
class Release:
    """A kind of release: its name, the modules that plan it, what attacks it, and what must be installed for it."""

    name: str
    homes: tuple[str, ...]
    attack: Callable[[int], Iterator[AuditReport]]
    needs: str | None = None

    def reports(self, runs: int) -> Iterator[AuditReport]:
        """The attack's reports; none if what it needs is not installed."""
        if self.needs is None or find_spec(self.needs) is not None:
            yield from self.attack(runs)


def _hessians(runs: int) -> Iterator[AuditReport]:
    from quietgrad.algorithms.model_selection import HessianSelection

    for relation in Relation:
        # One candidate: its two releases are always made.
        algorithm: Any = HessianSelection([np.zeros(2)], alpha=1.0, rank=1)
        yield _through_queries(algorithm, relation, runs)


def _certificate(runs: int) -> Iterator[AuditReport]:
    from quietgrad.training.stationarity import StationarityRelease

    for relation in Relation:
        yield _through_queries(StationarityRelease(), relation, runs)


def _through_queries(algorithm: Any, relation: Relation, runs: int) -> AuditReport:
    budget = replace(_BUDGET, relation=relation)
    return run(algorithm, budget=budget, n=_N, runs=max(400, runs // 2), game=table_game(_N, relation))


def _evaluation(runs: int) -> Iterator[AuditReport]:
    from quietgrad.algorithms.tabulate import Tabulate
    from quietgrad.objectives.queries.evaluation import Tabulation

    cells = np.arange(_N)[:, None] % 2
    for relation in Relation:
        game = QueryGame(_N, relation, Tabulation(), (cells, None))
        yield run(
            Tabulate(4), budget=replace(_BUDGET, relation=relation), n=_N, runs=max(400, runs // 2), game=game
        )


def _labels(runs: int) -> Iterator[AuditReport]:
    """One record's label, which it shares with just so many others that its own count decides."""
    from quietgrad.curators.central import CentralCurator
    from quietgrad.objectives.queries.labels import LabelCounts, LabelSet

    started = time.perf_counter()
    others, sigma = 6, 0.8
    # The threshold lies halfway between the counts of the two worlds, where they differ most.
    failure = 0.5 * math.erfc((others - 0.5) / (sigma * math.sqrt(2.0)))
    slot = Slot("labels", FullBatch(), mechanism=GaussianPartitionSelection(failure))
    once = Plan("labels", {}, Schedule((slot,)), _N, _BUDGET, sigma)
    many = replace(once, schedule=Schedule((replace(slot, count=runs),)))
    scores = []
    for count in (others + 1, others):
        y = np.repeat([0, 1], [count, 40])
        session = CentralCurator(LabelSet(), (np.zeros((len(y), 1)), y), account="audit").open(many)
        query = LabelCounts(Relation.ADD_REMOVE)
        scores.append(np.array([float(0 in session.discover("labels", query)) for _ in range(runs)]))
    found = attack_profile((scores[0], scores[1]), PrivacyClaim(once), "one label more or less", 1e-6)
    yield _report("labels", once, [found, *probe_slots(lengthened(once), what="labels")], runs, started)


class _Planned(Exception):
    """Carries the plan that a fit was about to open."""


def _looks(runs: int) -> Iterator[AuditReport]:
    """The plans that estimators make, looks at labels, targets and features included: noise of every slot."""
    from quietgrad import estimators
    from quietgrad.estimators.transformers import plan_scaling

    rng = np.random.default_rng(0)
    X = rng.uniform(-0.5, 0.5, (400, 3))
    for name in ("PrivateLogisticRegression", "PrivateLinearRegression", "PrivateAdditiveClassifier"):
        started = time.perf_counter()
        kind = getattr(estimators, name)
        known = {"row_bound": 1.0} if "row_bound" in kind().get_params() else {}
        plan = _plan_of(kind(epsilon=6.0, n_public=len(X), **known), X, (X[:, 0] > 0).astype(int))
        yield _report(name, plan, probe_slots(lengthened(plan), what=name), runs, started)
    started = time.perf_counter()
    plan = plan_scaling(len(X), X.shape[1], _BUDGET)
    yield _report("PrivateScaler", plan, probe_slots(lengthened(plan), what="PrivateScaler"), runs, started)


def _plan_of(estimator: Any, X: Floats, y: Any) -> Plan:
    """What a fit would release: it is stopped at the door, before anything is charged."""

    def stop(curator: Any, plan: Plan) -> Any:
        raise _Planned(plan)

    estimator._open = stop
    try:
        estimator.fit(X, y)
    except _Planned as planned:
        plan: Plan = planned.args[0]
        return plan
    raise AssertionError(f"{type(estimator).__name__}: a fit that opened no door.")


def _search(runs: int) -> Iterator[AuditReport]:
    """The plan of a search: noise of its scores, and the law of the number of rounds."""
    from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch
    from quietgrad.estimators.search import _rounds
    from quietgrad.plans.schedule import calibrate_plan
    from quietgrad.privacy.rng import SecureStream

    started = time.perf_counter()
    budget = Budget(6.0, 1e-5, Relation.REPLACE_ONE)
    model = PrivateLogisticRegression(classes=[0, 1], row_bound=1.0)
    search = PrivateSearch(model, {"regularization": [0.0]}, mean_rounds=3.0)
    plan = calibrate_plan(lambda z: search._plan(z, PublicCount(50), budget), budget)
    findings = probe_slots(lengthened(plan), what="scores")
    # K ≥ 1 is geometric: P(K > k) = (1 − 1/mean)^k.
    mean = float(search.mean_rounds)
    u = (SecureStream(fresh_key(), "audit").uint64(0, 4000) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    drawn = np.array([_rounds(mean, float(x)) for x in u])
    edges = np.arange(1, 40)
    seen = np.array([*(np.count_nonzero(drawn == k) for k in edges), np.count_nonzero(drawn >= 40)])
    shares = np.array([*((1 - 1 / mean) ** (edges - 1) / mean), (1 - 1 / mean) ** 39])
    chance = categories(seen.astype(np.float64), 4000 * shares)
    verdict = "pass" if chance >= 1e-7 else "violation"
    findings.append(AuditFinding("L0 rounds", "the law of K", "p", 1e-7, chance, verdict))  # type: ignore[arg-type]
    best, rounds = zip(*(_rounds_of(plan, pull, mean, runs) for pull in (1.0, -1.0)), strict=True)
    findings.append(attack_profile((best[0], best[1]), PrivacyClaim(plan), "the best score", 5e-7))
    # A round is priced as one Gaussian release, and the theorem about their number does the rest.
    views = tuple(Views(r[:, None], np.zeros((len(r), 1)), ["round"], True) for r in rounds)
    mu = gdp_mu(plan.schedule.slots[0].event(plan.noise_multiplier, budget.relation, 1), relation=budget.relation)
    inner = attack_dprime((views[0], views[1]), PrivacyClaim(plan), "one round's score", 5e-7, mu=mu)
    findings.append(inner._replace(epsilon_lower=0.0))  # of a round, not of the search
    yield _report("private-search", plan, findings, runs, started)


def _rounds_of(plan: Plan, pull: float, mean: float, runs: int) -> tuple[Floats, Floats]:
    """The best and the first scores of ``runs`` searches in which a record moves every one as far as it may."""
    from quietgrad.curators.central import CentralCurator
    from quietgrad.estimators.search import _rounds

    session = CentralCurator(EmptyObjective(), AnonymousRecords(plan.n_public, 1), account="audit").open(plan)
    query = ConstantQuery(1, 1.0, pull)
    scores = []
    for number in range(runs):
        count = _rounds(mean, session.uniform(f"rounds/{number}"))
        scores.append([float(session.release("round", query)[0]) for _ in range(count)])
    return np.array([max(each) for each in scores]), np.array([each[0] for each in scores])


def _own_loop(runs: int) -> Iterator[AuditReport]:
    """A loop of the user's own: many canaries in one run, and silence for hundreds of steps."""
    from quietgrad.audit.single_run import _judge

    started = time.perf_counter()
    rng = np.random.default_rng()
    count = max(400, runs // 2)
    coins = rng.random(count) < 0.5
    # Every canary has a weight of its own; those that are out have no gradient.
    said, plan = _loop(np.diag(coins.astype(np.float32)), steps=6)
    findings = _judge(said.sum(axis=0), coins, PrivacyClaim(plan), count // 10, 1e-6, gaussian=True)
    silence, longer = _loop(np.zeros((8, 64), np.float32), steps=256)
    findings += check_normals(silence / longer.noise_multiplier, "steps of a loop")
    yield _report("own-loop", plan, findings, 1, started)


def _loop(rows: Floats, steps: int) -> tuple[Floats, Plan]:
    """What a loop over ``rows``, each in every sample, finds in its gradients, in units of the clip."""
    import torch
    from torch.utils.data import TensorDataset

    from quietgrad.torch import PrivateLoop

    plain = torch.nn.Linear(rows.shape[1], 1, bias=False)
    loop = PrivateLoop(
        plain,
        lambda output, _: 1e3 * output.sum(),
        TensorDataset(torch.from_numpy(rows), torch.zeros(len(rows))),
        batch_size=len(rows),
        max_grad_norm=1.0,
        budget=_BUDGET,
        steps=steps,
        account="audit",
    )
    loop.mean = False
    heard = []
    for batch in loop:
        plain.weight.grad = None
        loop.backward(batch)
        heard.append(torch.as_tensor(plain.weight.grad).double().numpy().ravel().copy())
    return np.stack(heard), loop.plan


def _report(name: str, plan: Plan, findings: list[AuditFinding], runs: int, started: float) -> AuditReport:
    assert plan.budget is not None
    return AuditReport(
        algorithm=name,
        relation=plan.budget.relation,
        delta=plan.budget.delta,
        epsilon_claimed=plan.epsilon(),
        epsilon_lower=max(f.epsilon_lower for f in findings),
        confidence=1.0 - 1e-6,
        runs=runs,
        seconds=time.perf_counter() - started,
        findings=tuple(findings),
    )


RELEASES: dict[str, Release] = {
    release.name: release
    for release in (
        Release("hessian-selection", ("algorithms.model_selection",), _hessians),
        Release("private-certificate", ("training.stationarity",), _certificate),
        Release("evaluation", ("algorithms.tabulate",), _evaluation),
        Release("labels", ("objectives.queries.labels",), _labels),
        Release(
            "estimators",
            ("estimators.classifiers", "estimators.regressors", "estimators.additive", "estimators.transformers"),
            _looks,
            "sklearn",
        ),
        Release("private-search", ("estimators.search",), _search, "sklearn"),
        Release("own-loop", ("algorithms.own_loop", "torch.loops"), _own_loop, "torch"),
        Release("people", ("objectives.privacy_units",), people_reports),
    )
}
"""By name; ``quietgrad audit --all`` attacks them all, ``quietgrad audit NAME`` one."""
