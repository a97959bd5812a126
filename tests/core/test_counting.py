"""Under add-remove the number of records is a secret: it is declared, or the first release of the run."""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad import estimators
from quietgrad.assurance.certificates import PrivacyCertificate, check, issue
from quietgrad.cli import main
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import DEFAULT_RELATION, PrivacyUnit, Relation
from quietgrad.core.errors import BudgetError, DeltaWarning
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.state import run_of
from quietgrad.core.plans.counting import COUNT, PublicCount, count_noise, plans_gaussian
from quietgrad.core.session.curator import CentralCurator, public_count

ADD = Relation.ADD_REMOVE
BUDGET = qg.Budget(1.0, 1e-5)
METHODS = [qg.DPGD(steps=5), qg.DPSGD(steps=5, batch_size=50), qg.DPAGD(), qg.WhitenedGD()]


def rows(n: int) -> tuple[Any, Any]:
    X = np.random.default_rng(0).uniform(-1.0, 1.0, (n, 2))
    return X, (X[:, 0] > 0.0).astype(np.int64)


def counted(n: int, gaussian: bool) -> PublicCount:
    return public_count(n, BUDGET, Account(), gaussian, "run", PrivacyUnit.RECORD, None)


@pytest.mark.parametrize("gaussian", [True, False])
def test_a_count_has_the_noise_that_it_is_priced_for(gaussian: bool) -> None:
    n, runs = 50_000, 2000
    found = np.array([counted(n, gaussian).n for _ in range(runs)], dtype=float) - n
    z = count_noise(BUDGET, gaussian=gaussian)
    spread = z if gaussian else z * math.sqrt(2.0)
    kurtosis = 3.0 if gaussian else 6.0
    # Six standard errors each: a false alarm once in 10⁸ runs.
    assert abs(found.mean()) < 6.0 * spread / math.sqrt(runs)
    assert abs(found.var() / spread**2 - 1.0) < 6.0 * math.sqrt((kurtosis - 1.0) / runs)
    event = PublicCount(n, z, gaussian).event(ADD)
    cost = prove(event, delta=1e-5, relation=ADD).epsilon if event is not None else 0.0
    assert cost == pytest.approx(0.01 if not gaussian else 0.1183, rel=0.01)


def test_what_is_declared_or_public_is_not_counted() -> None:
    curator = CentralCurator(qg.objectives.Logistic(), rows(300))
    assert curator.count(BUDGET, 250, METHODS[0]) == PublicCount(250)
    for budget in (None, qg.Budget(1.0, 1e-5, Relation.REPLACE_ONE)):
        assert curator.count(budget, None, METHODS[0]) == PublicCount(300)
    assert counted(3, True).n >= count_noise(BUDGET, gaussian=True)  # below its noise a count says nothing


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_whole_run_meets_its_budget_for_whatever_count_came_out(method: Any) -> None:
    gaussian = plans_gaussian(method, ADD)
    assert gaussian == (method.name in ("dp-gd", "whitened-gd"))
    z = count_noise(BUDGET, gaussian=gaussian)
    for n in (60, 300, 5000, 10**6):
        plan = qg.plan(method, n=PublicCount(n, z, gaussian), budget=BUDGET)
        declared = qg.plan(method, n=n, budget=BUDGET)
        assert 0.998 <= prove(plan.total, delta=1e-5, relation=ADD).epsilon <= 1.0
        assert prove(plan.event, delta=1e-5, relation=ADD).epsilon < 1.0
        assert 1.0 < plan.noise_multiplier / declared.noise_multiplier < 1.02
        assert plan.whole_only
        if not gaussian:  # the rest holds by itself: no composition of a plan that the count has chosen
            assert prove(plan.event, delta=1e-5, relation=ADD).epsilon <= 0.99
    with pytest.raises(ValueError, match="not Gaussian"):
        qg.plan(qg.DPSGD(steps=5, batch_size=50), n=PublicCount(300, z, True), budget=BUDGET)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_run_states_its_count_and_its_budget(method: Any, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    result = qg.minimize(qg.objectives.Logistic(), rows(1009), method, budget=BUDGET, ledger=path)
    privacy = result.privacy
    assert (privacy.epsilon, privacy.releases[COUNT]) == (1.0, 1)
    assert result.n_public != 1009 or "counted privately" in privacy.notes[0]
    assert f"n = {result.n_public} records were counted privately" in privacy.notes[0]
    held = qg.Ledger(path).book().of("default")
    assert len(held) == 2
    assert {run_of(each.reservation.run) for each in held} == {result.details["run"]}
    spent = qg.Ledger(path).spent("default", delta=1e-5, relation="add-remove").epsilon
    assert 0.9 < spent <= 1.0  # a filter leaves what is too little for another step
    result.save(tmp_path / "run")
    assert not qg.load(tmp_path / "run").privacy.refuted
    body = issue(tmp_path / "run", ledger=path).body
    assert check(PrivacyCertificate(body)).ok
    for edit in (None, {"noise_multiplier": 1e9, "gaussian": True}):
        cheaper = copy.deepcopy(body)
        cheaper["plan"]["counted"] = edit
        findings = check(PrivacyCertificate(cheaper)).findings
        assert "plan" in [finding.what for finding in findings if finding.ok is False]


def test_one_rule_says_which_count_may_stand_before_which_releases(tmp_path: Path) -> None:
    """A Gaussian count before Poisson samples: refused by plan(), and a certificate of it is not proved."""
    z = count_noise(BUDGET, gaussian=True)
    gaussian, method = PublicCount(300, z, True), qg.DPSGD(steps=5, batch_size=50)
    for noise in (None, 3.0):
        with pytest.raises(ValueError, match="not Gaussian"):
            qg.plan(method, n=gaussian, budget=BUDGET, noise_multiplier=noise)
    with pytest.raises(ValueError, match="not Gaussian"):
        gaussian.before(events.poisson_gaussian(0.1, 2.0, 5), ADD)
    qg.minimize(qg.objectives.Logistic(), rows(1009), method, budget=BUDGET).save(tmp_path)
    body = copy.deepcopy(issue(tmp_path, whole_ledger=False).body)
    assert check(PrivacyCertificate(body)).ok
    # The same file as if its records had been counted by the Gaussian release that costs about as much.
    rest = events.from_json(body["event"]["parts"][1])
    body["plan"]["counted"] = {"noise_multiplier": z, "gaussian": True}
    body["event"] = events.Composed((events.Gaussian(z), rest)).to_json()
    proof = prove(events.Composed((events.Gaussian(z), rest)), delta=1e-5, relation=ADD)
    body["claim"] |= {"epsilon": proof.epsilon, "accountant": proof.accountant}
    body["ledger"] = None
    verdict = {finding.what: finding for finding in check(PrivacyCertificate(body)).findings}
    assert verdict["proof"].ok  # the arithmetic is right, of releases that may not be combined so
    assert verdict["plan"].ok is False
    assert "the private count" in verdict["plan"].words


@pytest.mark.parametrize("gaussian", [None, 0, "", "no", 1])
def test_whether_a_count_is_gaussian_is_said_and_not_guessed(gaussian: Any) -> None:
    with pytest.raises(ValueError, match="counted"):
        PublicCount.from_json(90, {"noise_multiplier": 100.0, "gaussian": gaussian})


def test_noise_that_is_fixed_needs_a_declared_number() -> None:
    for method in METHODS[:2]:
        with pytest.raises(ValueError, match="n_public"):
            qg.minimize(qg.objectives.Logistic(), rows(300), method, budget=BUDGET, noise_multiplier=3.0)


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.name)
def test_a_cap_that_does_not_last_is_told_before_anything_is_counted(method: Any, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    settings: dict[str, Any] = {"budget": BUDGET, "ledger": path, "cap": qg.Budget(0.5, 1e-5)}
    with pytest.raises(BudgetError, match="cap"):
        qg.minimize(qg.objectives.Logistic(), rows(300), method, **settings)
    assert not qg.Ledger(path).book().of("default")


def test_a_resumed_run_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    path, data = tmp_path / "ledger.jsonl", rows(1009)

    def stop(progress: qg.Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    method = qg.DPSGD(steps=6, batch_size=50)
    settings: dict[str, Any] = {"budget": BUDGET, "ledger": path, "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        qg.minimize(qg.objectives.Logistic(), data, method, folder=tmp_path / "run", callback=stop, **settings)
    n = [json.loads(line) for line in path.read_text().splitlines()]
    result = qg.resume(qg.objectives.Logistic(), data, method, folder=tmp_path / "run")
    assert result.privacy.epsilon == 1.0
    assert sum(str(line["body"].get("run", "")).endswith("~count") for line in n) == 1
    book = qg.Ledger(path).book()
    assert len(book.of("default")) == 2
    assert book.runs("default") == 1


# 20473 as a number of its own. Five digits inside a longer number, a fraction or a digest are chance:
# a report has some 10^5 of them.
_NUMBER = re.compile(r"(?<![\w.])20[, ]?473(?:\.0+)?(?!\w|\.\d)")


def test_a_number_of_its_own_is_recognised() -> None:
    for text in ("n=20473", "20,473 rows", '"n": 20473}', "20473.0", "20 473.", "(20473)"):
        assert _NUMBER.search(text), text
    for text in ("0.20473", "120473", "a20473f", "20473.51", "204731"):
        assert not _NUMBER.search(text), text


def test_no_exact_number_is_printed_or_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3000 and 2999 rows were told apart with certainty: n was printed, stored and used."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    n = 20_473  # not a number that is likely to stand anywhere by chance
    X, y = rows(n)
    np.savez(tmp_path / "rows.npz", X=X, y=y)
    for name, more in (
        ("usual", []),
        ("sampled", ["--algorithm", "dp-sgd", "--steps", "20", "--batch-size", "64"]),
    ):
        out = tmp_path / name
        args = ["train", str(tmp_path / "rows.npz"), "--epsilon", "1", "--out", str(out), "--row-bound", "2"]
        for attempt in range(5):  # the count itself may be exact, once in fifty runs
            assert main([*args, *more, "--overwrite"]) == 0
            told = capsys.readouterr()
            if json.loads((out / "result.json").read_text())["data"]["n_public"] != n:
                break
            assert attempt < 4
        texts = [told.out, told.err, *(p.read_bytes().decode("latin-1") for p in out.iterdir() if p.is_file())]
        assert not any(_NUMBER.search(text) for text in texts)


def test_one_default_relation_for_all_front_ends() -> None:
    for name in estimators.__all__:
        kind = getattr(estimators, name)
        given = inspect.signature(kind).parameters.get("relation") if callable(kind) else None
        if given is not None:
            assert given.default == DEFAULT_RELATION, name
    assert qg.Budget(1.0, 1e-5).relation is ADD
    assert DEFAULT_RELATION == "add-remove"
    from quietgrad.cli import federate, plan, predict, report, train

    for command in (train.train, plan.plan, report.frontier, predict.evaluate, federate.simulate):
        assert inspect.signature(command).parameters["relation"].default == DEFAULT_RELATION, command


def test_the_estimators_count_people() -> None:
    X, y = rows(3000)
    model: Any = estimators.PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=2.0)
    model.fit(X, y, person=np.arange(3000) // 3)
    assert any("people were counted privately" in note for note in model.privacy_.notes)
    assert abs(model.result_.n_public - 1000) < 200
    assert isinstance(model.privacy_.events, events.Composed)


def _front_ends(path: Path) -> dict[str, Any]:
    """Ways to spend (1, 0.01) on 400 records of replace-one, all charged to one ledger."""
    X = np.random.default_rng(0).uniform(-1.0, 1.0, (400, 2))
    y = (X[:, 0] > 0).astype(int)
    asked: dict[str, Any] = {"epsilon": 1.0, "delta": 0.01, "relation": "replace-one", "ledger": path}
    box: dict[str, Any] = {"feature_bounds": [(-1, 1)] * 2}
    fitted = estimators.PrivateLogisticRegression(classes=[0, 1], epsilon=2.0, **box).fit(X, y)
    budget = qg.Budget(1.0, 0.01, qg.Relation.REPLACE_ONE)
    method = qg.DPGD(steps=3, learning_rate=1.0)
    return {
        "minimize": lambda: qg.minimize(qg.objectives.Logistic(), (X, y), method, budget=budget, ledger=path),
        "estimator": lambda: estimators.PrivateLogisticRegression(classes=[0, 1], **box, **asked).fit(X, y),
        "additive": lambda: estimators.PrivateAdditiveClassifier(classes=[0, 1], **box, **asked).fit(X, y),
        "describe": lambda: estimators.describe({"a": X[:, 0]}, {"a": {"bounds": [-1, 1]}}, **asked),
        "score": lambda: estimators.private_score(fitted, X, y, **asked),
        "scaler": lambda: estimators.PrivateScaler(**asked).fit(X),
    }


@pytest.mark.parametrize("name", ["minimize", "estimator", "additive", "describe", "score", "scaler"])
def test_a_delta_that_is_not_below_one_in_n_is_said_before_anything_is_charged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    spend = _front_ends(path)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeltaWarning)  # stops where it is said
        with pytest.raises(DeltaWarning, match="Nothing is charged yet"):
            spend()
    assert not path.exists() or not qg.Ledger(path).book().held
    with pytest.warns(DeltaWarning):
        spend()
    assert qg.Ledger(path).book().held


def test_a_delta_beside_a_counted_n_is_said_right_after_the_count(tmp_path: Path) -> None:
    """The number of records is secret before: nothing is said of it that was not released."""
    X = np.random.default_rng(0).uniform(-1.0, 1.0, (4000, 2))
    path = tmp_path / "ledger.jsonl"
    model = estimators.PrivateLogisticRegression(
        1.0, 0.01, classes=[0, 1], feature_bounds=[(-1, 1)] * 2, ledger=path
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeltaWarning)
        with pytest.raises(DeltaWarning, match="Nothing but the private count of n"):
            model.fit(X, (X[:, 0] > 0) * 1)
    assert qg.Ledger(path).spent("default", delta=0.01, relation="add-remove").epsilon < 0.25
