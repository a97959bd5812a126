"""One format and one ledger for every tool: both programs prove the same claims, and caps hold over all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.certificate_edits import foreign, made, try_edits, variants

import quietgrad as qg
import quietgrad_verify as qv
from quietgrad.assurance.certificates import (
    PrivacyCertificate,
    SigningKey,
    charge_claim,
    check,
    issue,
    new_key,
    read,
)
from quietgrad.assurance.certificates.document import covered, schema, standings, statement
from quietgrad.cli import main
from quietgrad.core.errors import BudgetError, DataError, LedgerError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.methods.registry import ALGORITHMS
from quietgrad_verify.document import covered as covered_again
from quietgrad_verify.document import fields as standings_again
from quietgrad_verify.document import statement as statement_again

CLAIMS = Path(__file__).parents[2] / "benchmarks/results/foreign_claims"
OPACUS, DIFFPRIVLIB = CLAIMS / "opacus-more_noise.json", CLAIMS / "diffprivlib-a_fit.json"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("claims")


def test_both_programs_have_one_format(tmp_path: Path) -> None:
    file = Path(qv.__file__).parent / "schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == schema()
    kinds = {kind["properties"]["event"]["const"] for kind in schema()["$defs"]["event"]["oneOf"]}
    from quietgrad.core.accounting.events import kinds as event_kinds

    assert kinds == set(event_kinds())
    rows, budget = (np.ones((60, 2)), np.ones(60)), qg.Budget(1.0, 1e-5)
    settings: dict[str, Any] = {"budget": budget, "n_public": 60, "ledger": tmp_path / "l"}
    qg.minimize(qg.objectives.Logistic(), rows, qg.DPGD(steps=2), **settings).save(tmp_path / "run")
    body = issue(tmp_path / "run", ledger=tmp_path / "l").body
    assert statement(body) == statement_again(body) == body["statement"]
    assert covered(body) == covered_again(body)
    theirs = standings_again(qv.Claim(body))
    assert {kind: sorted(names) for kind, names in standings(body).items()} == {
        kind: sorted(names) for kind, names in theirs.items()
    }


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.kind.private])
def test_every_algorithm_is_proved_by_both_within_a_hundredth(name: str) -> None:
    for example in ALGORITHMS[name].examples[:1]:
        relation = qg.Relation.parse(example.relation)
        plan = qg.plan(ALGORITHMS[name].make(example.settings), n=example.n, budget=qg.Budget(1.0, 1e-5, relation))
        event = json.loads(json.dumps(plan.event.to_json()))
        proof = qv.prove(event, delta=1e-5, relation=str(relation))
        assert proof.epsilon == pytest.approx(plan.proof.epsilon, rel=0.01)


_LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("counted", "fixed size", "federation")]


@pytest.mark.parametrize("kind", ["gaussian", "poisson", "opacus", *_LONG])
def test_edits_that_pass_are_of_fields_that_are_said(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of the edits of ``benchmarks/certificate_edits.py``; its result file has 2 000 of each kind."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(home / "state"))
    if not (home / "key").exists():
        new_key(home / "key")
    documents: dict[str, PrivacyCertificate | qv.Claim] = {**made(home / "made", (kind,)), **foreign()}
    for words, claim in variants(documents[kind], SigningKey.read(home / "key")):
        assert qv.check(claim).ok, words
        plain, careful = (try_edits(claim, 15, editor, 5) for editor in ("digest", "digest and statement"))
        assert not plain["passed and said to be open"]
        if words.startswith("signed"):
            assert not plain["passed"]
            assert not careful["passed"]
        for passed in (plain, careful):
            for field in passed["passed"]:
                name, mark = re.fullmatch(r"(.*) \[(.*)\]", field).groups()  # type: ignore[union-attr]
                near = passed is careful and name in ("claim.epsilon", "claim.delta")  # 1 % more: within tolerance
                assert mark == "said" or near or (passed is careful and name.startswith("event")), field


def test_edits_of_the_result_file() -> None:
    result = json.loads((CLAIMS.parent / "certificate_edits.json").read_text(encoding="utf-8"))
    assert len(result["kinds"]) >= 60
    for name, found in result["kinds"].items():
        assert found["edits"] >= 2000
        if name.endswith("mends the digest"):
            assert all(field.endswith("[said]") for field in found["passed"]), name
            assert not found["passed and said to be open"]
        if ", signed, " in name:
            assert not found["passed"], name
        never = ("claim.unit", "claim.relation", "claim.condition", "claim.notes")
        assert not any(field.startswith(never) for field in found["passed"]), name


# ---- one ledger for every tool ---------------------------------------------------------------------------------


def quietgrad_run(ledger: Path, epsilon: float, people: str) -> None:
    X = np.random.default_rng(0).normal(size=(200, 2))
    budget = qg.Budget(epsilon, 1e-5, qg.Relation.REPLACE_ONE)
    data = X, (X[:, 0] > 0) * 1
    qg.minimize(qg.objectives.Logistic(), data, qg.DPGD(steps=3), budget=budget, ledger=ledger, account=people)


def test_a_cap_holds_over_runs_of_three_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ε = 3 over a run of quietgrad, one of Opacus and a fit of diffprivlib; what does not fit is refused."""
    file = tmp_path / "ledger.jsonl"
    cap = ["ledger", "cap", str(file), "patients", "--epsilon", "3", "--delta", "1e-5", "--relation", "replace-one"]
    assert main(cap) == 0
    quietgrad_run(file, 0.8, "patients")
    assert main(["ledger", "add", str(file), str(OPACUS), "--account", "patients"]) == 0
    assert "conditional" in capsys.readouterr().out
    assert main(["ledger", "add", str(file), str(DIFFPRIVLIB), "--account", "patients"]) == 0
    spent = Ledger(file).spent("patients", delta=1e-5, relation="replace-one").epsilon
    assert 1.5 < spent <= 3.0
    with pytest.raises(BudgetError, match="cap"):
        quietgrad_run(file, 2.5, "patients")
    capsys.readouterr()
    shuffled = str(CLAIMS / "opacus-a_shuffled_loader.json")
    assert main(["ledger", "add", str(file), shuffled, "--account", "patients"]) == 1
    assert "exceed the cap" in capsys.readouterr().err
    assert Ledger(file).spent("patients", delta=1e-5, relation="replace-one").epsilon == spent
    assert main(["ledger", "show", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ε holds if" in told
    assert "diffprivlib was given are public" in told


def test_a_claim_is_charged_once_and_only_if_it_is_proved(tmp_path: Path) -> None:
    ledger, document = Ledger(tmp_path / "l"), read(OPACUS)
    charged = charge_claim(ledger, document, "people")
    assert charged.condition == document.body["claim"]["condition"]
    with pytest.raises(LedgerError, match="already"):
        charge_claim(ledger, document, "people")
    body = {**document.body, "claim": {**document.body["claim"], "epsilon": 0.1}}
    with pytest.raises(DataError, match="not proved"):
        charge_claim(ledger, type(document)({**body, "statement": statement(body)}), "people")
    misstated = read(CLAIMS / "flower-the_cost_of_one_round.json")  # charged at its own cost, whatever was printed
    assert charge_claim(ledger, misstated, "clients").epsilon == pytest.approx(14.83, rel=1e-3)
    assert not check(misstated).ok


def test_verify_shows_whose_each_proof_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "v.html"
    assert main(["verify", str(OPACUS), "--html", str(page)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "yes quietgrad, pld-poisson" in told
    assert re.search(r"second proof yes .*dp-accounting", told)
    assert "OPEN" in told
    assert "claim.unit" in told
    assert "Standing of every field" in page.read_text(encoding="utf-8")
    assert main(["verify", str(CLAIMS / "opacus-a_shuffled_loader.json")]) == 1
