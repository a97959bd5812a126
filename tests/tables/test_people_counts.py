"""How many records people have is said where it was declared public, and nowhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.certificates import check, issue
from quietgrad.cli import main
from quietgrad.core.accounting.budget import Budget
from quietgrad.federation.plan import Shape
from quietgrad.federation.planning import federate

WORDS = "300 people, 12 345 records"
LOSS = qg.objectives.Logistic()
BUDGET = Budget(2.0, 1e-5)


def visits() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(300), rng.integers(1, 9, 300))
    X = rng.normal(size=(len(ids), 2))
    return X, (X[:, 0] > 0) * 1, ids


@pytest.mark.parametrize("declared", [None, 12_345])
def test_every_page_of_a_run_says_it_or_none_does(declared: int | None, tmp_path: Path) -> None:
    X, y, ids = visits()
    out, csv = tmp_path / "run", tmp_path / "visits.csv"
    rows = [f"{u},{v},p{i},{t}" for (u, v), t, i in zip(X, y, ids, strict=True)]
    csv.write_text("\n".join(["a,b,patient,y", *rows]) + "\n")
    told = [] if declared is None else ["--records-public", str(declared)]
    told += ["--n-public", "300"]
    asked = ["--person", "patient", "--algorithm", "dp-gd", "--steps", "3", "--epsilon", "2", "--delta", "1e-5"]
    assert main(["train", str(csv), *asked, *told, "--out", str(out), "--quiet"]) == 0
    assert main(["report", str(out)]) == 0
    pages = {path.name: path.read_text() for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".html")}
    document = issue(out)
    assert check(document).ok
    pages["certificate"] = document.to_bytes().decode()
    plan = qg.plan(qg.DPGD(steps=3), n=300, budget=BUDGET, unit="person", records_public=declared)
    pages["explain"] = plan.explain()
    assert {"ledger.jsonl", "result.json", "report.html"} <= pages.keys()
    said = {name for name, text in pages.items() if WORDS in text}
    wanted = {"ledger.jsonl", "result.json", "report.html", "certificate", "explain"}
    assert wanted <= said if declared else not said
    public = [pages[name] for name in wanted - {"report.html"}]  # whose pictures have many digits
    alone = re.compile(rf"(?<![0-9a-f.]){len(ids)}(?![0-9a-f])")  # not within a digest
    assert not any(alone.search(text) for text in public)


def test_in_federations() -> None:
    plan = federate(
        qg.DPGD(steps=2), LOSS, names=["a", "b"], sizes=[100, 200], shape=Shape(2, 2), budget=BUDGET, unit="person",
        parties_per_person=1, records_public=12_345,
    )  # fmt: skip
    assert WORDS in plan.explain()
    assert type(plan).from_json(json.loads(json.dumps(plan.to_json()))).digest == plan.digest


def test_numbers_that_cannot_be_are_refused() -> None:
    for wrong, unit in ((299, "person"), (True, "person"), (1e4, "person"), (12_345, "record")):
        with pytest.raises(ValueError, match="records_public"):
            qg.plan(qg.DPGD(steps=3), n=300, budget=BUDGET, unit=unit, records_public=wrong)  # type: ignore[arg-type]
