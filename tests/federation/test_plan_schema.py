"""Every key of a documented plan file, through real processes, and what its members' folders say afterwards."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation.plan_file import PARTY, SECTIONS, parse_plan, read_plan
from quietgrad.federation.record_format import SETTINGS as RECORDS
from quietgrad.federation.table_format import SETTINGS as TABLES
from tests.federation.test_network import ended, folder, plan_text, start

__all__ = ["folder", "start"]

PAGE = (Path(__file__).parents[2] / "docs" / "federation-network.md").read_text()
DOCUMENTED, SCHEMA = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[:2]
ROWS = 40


def test_the_page_names_every_key() -> None:
    for section, settings in {**SECTIONS, "party": PARTY}.items():
        missing = [key for key in settings if not re.search(rf"^(# )?\[?(data\.)?{key}( =|\])", PAGE, re.MULTILINE)]
        assert not missing, (section, missing)


def toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def written(plan: Mapping[str, Any]) -> str:
    """A plan file's text."""
    lines = []
    for section, settings in plan.items():
        tables = settings if isinstance(settings, list) else [settings]
        for table in tables:
            lines.append(f"[[{section}]]" if isinstance(settings, list) else f"[{section}]")
            lines += [f"{key} = {toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


COLUMNS = {"age": {"bounds": [0, 110]}, "sex": {"categories": ["f", "m"]}}
LABEL = {"column": "outcome", "classes": ["home", "ward"]}
BASE: dict[str, Any] = {
    "federation": {"name": "two", "trust": "curator", "spare": 1},
    "coordinator": {"address": "127.0.0.1:7443", "timeout": 30, "grace": 15},
    "algorithm": {"name": "dp-gd", "steps": 3},
    "objective": {"name": "logistic"},
    "data": {"features": 2, "label": "ill", "classes": [0, 1]},
    "budget": {"epsilon": 1.0, "delta": 1e-4, "relation": "add-remove"},
    "party": [{"name": "a", "records": ROWS}, {"name": "b", "records": ROWS}],
}
WEIGHED = [{**party, "weight": weight} for party, weight in zip(BASE["party"], (1.0, 2.0), strict=True)]
REGRESSION = {"schema": {"label": {"column": "pulse", "bounds": [0, 200]}, "columns": COLUMNS}}
# One run for each group of keys that go together; together they have every key of the page.
RUNS: dict[str, dict[str, Any]] = {
    "schema": {"data": {"schema": {"label": LABEL, "columns": COLUMNS}, "features": 3}},
    "schema alone": {"data": {"schema": {"label": LABEL, "columns": COLUMNS}}},
    "schema of everything": {
        "data": {
            "schema": {
                "label": {"column": "well", "kind": "yes/no"}, "delimiter": ",", "missing": ["", "NA"],
                "drop_incomplete": True, "encoding": "utf-8",
                "columns": {
                    "age": {"kind": "number", "bounds": [0, 110], "log": True, "fill": 40},
                    "sex": {"kind": "category", "categories": ["f", "m"], "drop_first": True},
                    "well2": {"kind": "yes/no", "missing": "indicator"},
                    "day": {"kind": "date", "bounds": ["2020-01-01", "2021-01-01"], "parts": ["days", "month"]},
                    "patient": {"kind": "id"},
                },
            }
        }
    },
    "regression": {"objective": {"name": "huber"}, "data": REGRESSION},
    "regression without a schema": {"objective": {"name": "squared"}, "data": {"features": 1, "label": "pulse"}},
    "multinomial": {
        "objective": {"name": "multinomial", "regularizer": "l2:0.001", "intercept": True},
        "data": {"features": 1, "label": "ward", "classes": ["x", "y", "z"]},
    },
    "people": {
        "federation": {"trust": "curator", "parties_per_person": 1, "combine": "mean", "records_per_person": 2},
        "data": {"features": 2, "label": "ill", "person": "patient"},
    },
    "public records": {
        "federation": {"trust": "local", "parties_per_person": 2, "records_public": 2 * ROWS},
        "data": {"schema": {"label": LABEL, "columns": COLUMNS}, "person": "patient"},
    },
    "masks": {
        "federation": {"trust": "secure", "secure": "masks", "colluders": 1, "quorum": 2, "weights": "equal",
                       "ring": 32},
    },
    "some parties": {  # so many rounds that a party is asked in none of them in one run of two thousand
        "federation": {"trust": "local", "parties_per_round": 1}, "algorithm": {"name": "dp-gd", "steps": 12},
    },
    "servers": {"federation": {"trust": "secure", "secure": "servers", "servers": 2}, "party": WEIGHED},
    "not private": {"federation": {"trust": "curator", "private": False}, "budget": None},
}  # fmt: skip


def plan_of(name: str) -> dict[str, Any]:
    return {section: each for section, each in {**BASE, **RUNS[name]}.items() if each is not None}


def test_the_runs_have_every_key() -> None:
    seen: dict[str, set[str]] = {section: set() for section in (*SECTIONS, "party")}
    for name in RUNS:
        for section in seen:
            tables = plan_of(name).get(section, {})
            for table in tables if isinstance(tables, list) else [tables]:
                seen[section] |= table.keys()
    of_networks = set(RECORDS) - set(TABLES)  # which have tests of their own
    settings = {section: set(each) - of_networks for section, each in {**SECTIONS, "party": PARTY}.items()}
    assert seen == settings


def table(name: str, seed: int) -> str:
    """A party's CSV with the columns that the plan ``name`` reads."""
    rng = np.random.default_rng(seed)
    age = rng.integers(20, 90, ROWS)
    cells = {
        "age": age, "ill": (age > 55).astype(int), "pulse": 60 + age // 3,
        "sex": np.where(rng.random(ROWS) < 0.5, "f", "m"), "outcome": np.where(age > 55, "ward", "home"),
        "ward": np.array(["x", "y", "z"])[age % 3], "patient": [f"{seed}-{k}" for k in range(ROWS)],
        "well": np.where(age > 55, "yes", "no"), "well2": np.where(age > 70, "yes", ""),
        "day": [f"2020-{1 + k % 12:02}-15" for k in range(ROWS)], "one": rng.random(ROWS).round(3),
    }  # fmt: skip
    kept = {
        "multinomial": ["one", "ward"], "regression without a schema": ["one", "pulse"],
        "people": ["one", "age", "patient", "ill"],
    }.get(name, ["age", "one", "ill"])  # fmt: skip
    if "schema" in plan_of(name)["data"]:
        kept = list(cells)
    rows = zip(*(cells[column] for column in kept), strict=True)
    return "\n".join([",".join(kept), *(",".join(map(str, row)) for row in rows)]) + "\n"


def run_all(folder: Path, start: Any, name: str) -> None:
    """Every member as a process of its own; all must end well."""
    Path("plan.toml").write_text(plan_text(written(plan_of(name))))
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    file = read_plan("plan.toml")
    words: list[tuple[str, ...]] = [
        ("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--wait", "60")
    ]
    words += [("server", "plan.toml", "--keys", f"keys/{each}") for each in file.plan.servers]
    for seed, party in enumerate(file.parties):
        Path(f"{party}.csv").write_text(table(name, seed))
        words.append(("party", "plan.toml", "--keys", f"keys/{party}", "--data", f"{party}.csv", "--out", party))
    outcomes = [ended(process) for process in [start(*each, "--patience", "60") for each in words]]
    assert [code for code, *_ in outcomes] == [0] * len(words), outcomes


_LONG = {"schema alone", "regression without a schema", "people", "public records", "multinomial", "not private"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in _LONG else name for name in RUNS]
)
def test_a_documented_plan_runs_and_its_model_predicts(
    name: str, folder: Path, start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run_all(folder, start, name)
    model, file = qg.load("model"), read_plan("plan.toml")
    for home in ("model", *file.parties):
        np.testing.assert_array_equal(qg.load(home).params, model.params)
        capfd.readouterr()
        assert main(["predict", home, "a.csv", "--json"]) == 0, capfd.readouterr().err
        scores = json.loads(capfd.readouterr().out)["scores"]
        assert scores
        if "accuracy" in scores:
            labels = file.table.class_names
            assert model.details["model"]["class_names"] == labels
    if file.budget is None:
        return
    for home in file.parties:  # the folder names the entry that pays, in that party's own ledger
        entry = Ledger(Path(home) / "ledger.jsonl").find(str(qg.load(home).details["run"]))
        assert entry is not None
        for command in ("report", "certificate", "card"):
            capfd.readouterr()
            words = {"report": ["report", home], "card": ["card", home]}
            words["certificate"] = ["certificate", home, "-o", f"{home}.json"]
            assert main(words[command]) == 0, (command, capfd.readouterr())


@pytest.mark.parametrize("ledger", [None, "books/ledger.jsonl"])
def test_a_partys_own_run_is_borne_out_by_its_own_ledger(
    ledger: str | None, folder: Path, start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under an account of its own naming, in its folder or in a ledger elsewhere."""
    Path("plan.toml").write_text(plan_text(written(plan_of("schema"))))
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    words: list[tuple[str, ...]] = [
        ("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--wait", "60")
    ]
    for seed, party in enumerate("ab"):
        Path(f"{party}.csv").write_text(table("schema", seed))
        party_words = ("party", "plan.toml", "--keys", f"keys/{party}", "--data", f"{party}.csv", "--out", party)
        where = () if ledger is None else ("--ledger", f"{party}-{ledger}")
        words.append((*party_words, "--account", f"patients of {party}", *where))
        Path(f"{party}-books").mkdir()
    outcomes = [ended(process) for process in [start(*each, "--patience", "60") for each in words]]
    assert [code for code, *_ in outcomes] == [0, 0, 0], outcomes
    for party in "ab":
        capfd.readouterr()
        assert main(["report", party]) == 0, capfd.readouterr()
        page = Path(party, "report.html").read_text()
        assert "refuted" not in page
        assert f"patients of {party}" in page
        assert main(["certificate", party, "-o", f"{party}.json"]) == 0
        assert main(["verify", f"{party}.json"]) == 0
        assert main(["card", party]) == 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"features": 4}, "features=4: the schema says 3"),
        ({"label": "ill"}, "label='ill': the schema says 'outcome'"),
        ({"classes": ["home", "street"]}, "classes="),
        ({"person": "age"}, "person='age'"),
    ],
)
def test_what_disagrees_with_the_schema_is_refused_at_planning(data: dict[str, Any], words: str) -> None:
    plan = {**BASE, "data": {"schema": {"label": LABEL, "columns": COLUMNS}, **data}}
    with pytest.raises(DataError, match=re.escape(words)):
        parse_plan(written(plan))


def test_a_schema_of_numbers_is_not_for_a_loss_of_classes() -> None:
    with pytest.raises(DataError, match="is of numbers, and the loss is for binary"):
        parse_plan(written({**BASE, "data": REGRESSION}))
    with pytest.raises(DataError, match="is of classes, and the loss is for regression"):
        parse_plan(written({**BASE, "objective": {"name": "huber"}, "data": RUNS["schema"]["data"]}))


def test_the_schema_of_the_page_plans() -> None:
    content = {**tomllib.loads(DOCUMENTED), "data": tomllib.loads(SCHEMA)["data"]}
    content["party"] = [{"name": f"hospital-{k}", "records": 12000} for k in range(1, 4)]
    file = parse_plan(written(content))
    assert file.features == 3
    assert file.model["class_names"] == ["home", "ward"]
    file.plan.proves()


def test_a_file_without_named_columns_does_not_meet_a_schema(folder: Path) -> None:
    file = parse_plan(written(plan_of("schema")))
    np.savez("a.npz", X=np.zeros((ROWS, 3)), y=np.zeros(ROWS, int))
    with pytest.raises(DataError, match="CSV or parquet"):
        file.table.load("a.npz")
