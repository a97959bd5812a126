"""Three exports as they come: from a draft and one edit to a model, a score, a report and a checked certificate."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from quietgrad.cli import main


def write_hospital(path: Path) -> None:
    """cp1252, semicolons, decimal commas, German dates, "k.A." and "<0,6" among numbers, currency."""
    rng = np.random.default_rng(3)
    lines = ["Fall-Nr;Aufnahme am;Geb.Jahr;Geschlecht;Gewicht (kg);CRP mg/l;Station;Kosten;Wiederaufnahme"]
    for k in range(1500):
        day = datetime.date(2022, 1, 1) + datetime.timedelta(int(rng.integers(0, 700)))
        year, crp = int(rng.integers(1930, 2005)), float(np.exp(rng.normal(2.5, 1.0)))
        again = rng.random() < 1 / (1 + np.exp(-(-1 + 0.06 * (1970 - year) + 0.6 * (np.log(crp) - 2.5))))
        weight = "k.A." if rng.random() < 0.06 else f"{rng.normal(78, 14):.1f}".replace(".", ",")
        protein = "" if rng.random() < 0.1 else "<0,6" if crp < 2 else f"{crp:.1f}".replace(".", ",")
        cost = f"{np.exp(rng.normal(8, 0.7)):,.2f}".translate(str.maketrans(",.", ".,"))
        sex, ward = rng.choice(["m", "w", "d"]), rng.choice(["Innere", "Chirurgie", "Gynäkologie"])
        cells = (20220000 + k, f"{day:%d.%m.%Y}", year, sex, weight, protein, ward, f"{cost} €")
        lines.append(";".join(map(str, (*cells, "ja" if again else "nein"))))
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode("cp1252"))


def write_bank(path: Path) -> None:
    """Parquet: money as text, customers with several rows, timestamps, nullable integers, a constant column."""
    rng, n = np.random.default_rng(4), 4000
    balance, late = np.exp(rng.normal(7.0, 1.2, n)), rng.poisson(0.8, n)
    bad = rng.random(n) < 1 / (1 + np.exp(-(-2.0 + 2.0 * late)))
    frame = pd.DataFrame({
        "customer": [f"CUST{j:06d}" for j in rng.integers(0, 2000, n)],
        "opened": pd.to_datetime("2015-01-01") + pd.to_timedelta(rng.integers(0, 3000, n), "D"),
        "balance": [f"${value:,.2f}" for value in balance],
        "age": pd.Series(rng.integers(18, 85, n), dtype="Int64").mask(rng.random(n) < 0.03),
        "late payments": late,
        "product": pd.Categorical(rng.choice(["gold", "basic", "student"], n)),
        "branch": "0042",
        "default": np.where(bad, "Y", "N"),
    })  # fmt: skip
    frame.to_parquet(path)


def write_survey(path: Path) -> None:
    """Tabs, numbered rows, survey weights, 999 and 999999 for no answer, comments, a label from 0 to 10."""
    rng, n = np.random.default_rng(5), 8000
    first, age = rng.integers(1, 6, n), rng.integers(16, 95, n)
    content = np.clip(np.round(5 + 1.2 * (first - 3) + 0.03 * (age - 50) + rng.normal(0, 1, n)), 0, 10)
    frame = pd.DataFrame({
        "respondent": np.arange(1, n + 1),
        "weight": np.exp(rng.normal(0.0, 0.4, n)).round(4),
        "age": np.where(rng.random(n) < 0.05, 999, age),
        "q1": first,
        "income": np.where(rng.random(n) < 0.08, 999999, rng.integers(8, 90, n) * 1000),
        "region": rng.choice(["North", "South", "East", "refused"], n),
        "comment": rng.choice(["", "all is well, thank you so much for asking", "n/a"], n),
        "satisfaction": content.astype(int),
    })  # fmt: skip
    frame.to_csv(path, index=False, sep="\t")


class Export(NamedTuple):
    """A file, what its owner fills into the draft, options of train, and what draft, check and score tell."""

    file: str
    write: Callable[[Path], None]
    label: str
    categories: dict[str, list[str]]
    options: list[str]
    drafted: tuple[str, ...]
    checked: tuple[str, ...]
    score: tuple[str, float]


EXPORTS = (
    Export(
        "faelle.csv", write_hospital, 'kind = "category"\nclasses = ["nein", "ja"]',
        {"Geschlecht": ["m", "w", "d"], "Station": ["Innere", "Chirurgie", "Gynäkologie"]}, [],
        ("'Fall-Nr' is drafted as id", "'CRP mg/l': most cells are numbers"), ("× 'k.A.'", "× '<0,6'"),
        ("test_accuracy", 0.55),
    ),
    Export(
        "loans.parquet", write_bank, 'kind = "yes/no"', {"product": ["gold", "basic", "student"]},
        ["--person", "customer"], ("--person customer",), ("branch: every cell is the same",),
        ("test_accuracy", 0.55),
    ),
    Export(
        "survey.tsv", write_survey, 'kind = "whole number"\nbounds = [0, 10]',
        {"region": ["North", "South", "East", "refused"]}, ["--drop", "weight"],
        ("'respondent' is drafted as id", "999 stands alone", "999999 stands alone", "sample_weight"),
        ("× '999'", "× '999999'"), ("test_r2", 0.0),
    ),
)  # fmt: skip


def edited(draft: str, export: Export) -> str:
    """The draft with its label and categories filled in: one edit."""
    head, label, columns = re.split(r"(\[label\]\ncolumn = .*\n)", draft)
    columns = f"{export.label}\n\n{columns[columns.index('[columns') :]}"
    for name, values in export.categories.items():
        empty = f'[columns."{name}"]\nkind = "category"\ncategories = []'
        assert empty in columns
        columns = columns.replace(empty, empty[:-2] + json.dumps(values, ensure_ascii=False))
    return head + label + columns


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.file)
def test_one_edit_leads_to_a_checked_certificate(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    export.write(Path(export.file))
    assert main(["data", "schema", export.file, "-o", "schema.toml"]) == 0
    told = capsys.readouterr()
    assert [words for words in export.drafted if words not in told.out + told.err] == []
    schema = Path("schema.toml")
    schema.write_text(edited(schema.read_text("utf-8"), export), "utf-8")
    given = [export.file, "--schema", "schema.toml", "--holdout", "0.4", *export.options]
    assert main(["check", *given]) == 0
    told = capsys.readouterr()
    assert [words for words in export.checked if words not in told.out] == []
    spent = ["--epsilon", "6", "--delta", "1e-5", "--score-share", "0.4", "--quiet", "--out", "run"]
    assert main(["train", *given, *spent]) == 0
    name, least = export.score
    metrics = json.loads(Path("run/result.json").read_text())["metrics"]
    assert metrics["private"] is True
    assert metrics[name] > least  # six deviations or more below the mean of 20 runs
    assert "<html" in Path("run/report.html").read_text("utf-8")
    assert main(["certificate", "run", "-o", "claim.json"]) == 0
    assert main(["verify", "claim.json"]) == 0
