"""Ugly files go from draft to certificate with one edit: what is public of them is filled into the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quietgrad.cli import main


def clinic(rng: np.random.Generator) -> tuple[str, dict[str, str]]:
    """Semicolons, cp1252, decimal commas, gaps as -, a yes/no label in two spellings, an empty column."""
    lines = ["Größe (cm);Gewicht;Station;leer;Bemerkung;entlassen"]
    for k in range(4000):
        height = "-" if k % 37 == 0 else f"{rng.normal(172, 9):.1f}".replace(".", ",")
        weight = f"{rng.normal(78, 12):.1f}".replace(".", ",")
        ward = rng.choice(["Süd", "Nord", "Ost"])
        home = rng.random() < (0.8 if ward == "Nord" else 0.25)
        answer = ("Yes" if k % 3 else "yes") if home else "no"
        lines.append(f"{height};{weight};{ward};;Patient kam um {k % 24} Uhr zu uns auf Station;{answer}")
    Path("klinik.csv").write_bytes("\n".join(lines).encode("cp1252"))
    return "klinik.csv", {'[columns."Station"]': 'categories = ["Süd", "Nord", "Ost"]'}


def visits(rng: np.random.Generator) -> tuple[str, dict[str, str]]:
    """Tabs, people with several rows, times with a zone, money, 999 for a gap, words among numbers."""
    lines = ["visit_id\tperson_id\twhen\tpaid\tage\tdose\tback"]
    for k in range(4500):
        person = k // 3
        age = 999 if person % 41 == 0 else 20 + person % 60
        dose = "as needed" if k % 300 == 0 else f"{rng.gamma(2.0):.2f}"
        paid = f"$ {rng.integers(1, 9)},{rng.integers(0, 999):03d}.{rng.integers(0, 99):02d}"
        when = f"2023-{1 + k % 12:02d}-{1 + k % 28:02d}T09:30:00+01:00"
        back = int(rng.random() < (0.85 if age != 999 and age > 50 else 0.2))
        lines.append(f"V{k:05d}\tP{person:04d}\t{when}\t{paid}\t{age}\t{dose}\t{back}")
    Path("visits.tsv").write_text("\n".join(lines) + "\n")
    return "visits.tsv", {'[columns."age"]': "bounds = [0, 120]"}


def flats(rng: np.random.Generator) -> tuple[str, dict[str, str]]:
    """Parquet, a regression, categories of words, a list column that cannot be read, a constant column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = rng.gamma(6.0, 12.0, 12000)
    town = rng.choice(["Lyon", "Lille"], 12000)
    rent = 300.0 + 9.0 * size + 200.0 * (town == "Lyon") + rng.normal(0, 60, 12000)
    floor = [None if k % 29 == 0 else float(k % 8) for k in range(12000)]
    odd = {"tags": [[k] for k in range(12000)], "country": ["FR"] * 12000}
    pq.write_table(pa.table({"m2": size, "town": town, "floor": floor, **odd, "rent": rent}), "flats.parquet")
    return "flats.parquet", {
        '[columns."town"]': 'categories = ["Lyon", "Lille"]', '[columns."country"]': 'categories = ["FR", "BE"]',
        "[label]": "bounds = [0, 3000]",
    }  # fmt: skip


def lab(rng: np.random.Generator) -> tuple[str, dict[str, str]]:
    """A title and a date before the header, a row of units behind it, values below the limit of detection."""
    lines = [
        "Laborbericht Export v3",
        "Erstellt: 01.02.2024 08:15",
        "",
        "Probe;Station;CRP;Hb;Befund",
        "Nr.;;mg/l;g/dl;",
    ]
    for k in range(3000):
        ward, crp = rng.choice(["A-12", "B-07", "C-03"]), rng.gamma(2.0, 6.0)
        told = "<0,5" if crp < 1.2 else f"{crp:.1f}".replace(".", ",")
        bad = rng.random() < 1.0 / (1.0 + np.exp(-(crp - 12.0) / 3.0 - (ward == "B-07")))
        blood = f"{rng.normal(13.5, 1.6):.1f}".replace(".", ",")
        lines.append(f"L{k:05d};{ward};{told};{blood};{'auffällig' if bad else 'unauffällig'}")
    Path("lab.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
    return "lab.csv", {
        "[label]": 'classes = ["unauffällig", "auffällig"]',
        '[columns."Station"]': 'categories = ["A-12", "B-07", "C-03"]',
    }


def bank(rng: np.random.Generator) -> tuple[str, dict[str, str]]:
    """Totals at the end, currency signs, negative amounts in parentheses, dates in two forms, two rows a person."""
    lines, total = ['"Account No","Holder ID","Opened","Balance","Fees","Type","Churned"'], 0.0
    for k in range(3500):
        balance = rng.lognormal(8.0, 1.0) * (1.0 if k % 10 else -0.2)
        total += balance
        iso, slashed = (
            f"{2015 + k % 8}-{1 + k % 12:02d}-{1 + k % 28:02d}",
            f"{1 + k % 28:02d}/{1 + k % 12:02d}/{2015 + k % 8}",
        )
        money = f"€{balance:,.2f}" if balance >= 0.0 else f"(€{-balance:,.2f})"
        kind = rng.choice(["Giro", "Saver", "Joint, family"])
        leaves = rng.random() < 1.0 / (1.0 + np.exp((np.log(abs(balance) + 1.0) - 8.0) * 1.5 + (kind == "Saver")))
        fees = f"{rng.integers(0, 40)}.{rng.integers(0, 99):02d} EUR"
        cells = (
            f"DE{10**9 + k * 7919}",
            f"H{k // 2:05d}",
            iso if k % 4 else slashed,
            money,
            fees,
            kind,
            "Y" if leaves else "N",
        )
        lines.append(",".join(f'"{cell}"' for cell in cells))
    lines += [f'"TOTAL","","","€{total:,.2f}","","",""', '"Rows: 3500","","","","","",""']
    Path("bank.csv").write_text("\n".join(lines) + "\n")
    return "bank.csv", {'[columns."Type"]': 'categories = ["Giro", "Saver", "Joint, family"]'}


def survey(rng: np.random.Generator) -> tuple[str, dict[str, str]]:
    """Questions for headers, cells with several answers, Likert words, "Prefer not to say" among numbers."""
    degrees = ["Strongly disagree", "Disagree", "Neither agree nor disagree", "Agree", "Strongly agree"]
    heads = (
        "Age?",
        "Gender?",
        "What do you use? (select all)",
        "I feel safe here",
        "Household income (k)",
        "Will you stay?",
    )
    lines = ["\t".join(heads)]
    for _ in range(4000):
        safe, used = int(rng.integers(0, 5)), [way for way in ("Bus", "Car", "Bike", "Train") if rng.random() < 0.4]
        income = "Prefer not to say" if rng.random() < 0.12 else str(int(rng.lognormal(3.8, 0.4)))
        age = "Prefer not to say" if rng.random() < 0.03 else str(rng.integers(18, 80))
        gender = rng.choice(["Woman", "Man", "Other", "Prefer not to say"], p=[0.48, 0.46, 0.02, 0.04])
        stays = rng.random() < 1.0 / (1.0 + np.exp(-(safe - 2) * 1.2 - ("Bike" in used)))
        answer = "Yes, definitely" if stays else "Probably not"
        lines.append("\t".join([age, gender, "; ".join(used), degrees[safe], income, answer]))
    Path("survey.tsv").write_text("\n".join(lines) + "\n")
    return "survey.tsv", {
        "[label]": 'classes = ["Probably not", "Yes, definitely"]',
        '[columns."Gender?"]': 'categories = ["Woman", "Man", "Other", "Prefer not to say"]',
        '[columns."What do': 'categories = ["Bus", "Car", "Bike", "Train"]',
        '[columns."I feel': f"categories = {json.dumps(degrees)}",
    }


@pytest.mark.parametrize("make", [clinic, visits, flats, lab, bank, survey], ids=lambda make: str(make.__name__))
def test_an_ugly_file_becomes_a_model_with_a_certificate(
    make: Callable[[np.random.Generator], tuple[str, dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    file, public = make(np.random.default_rng(5))
    assert main(["data", "schema", file, "-o", "schema.toml"]) == 0
    advised = capsys.readouterr().err
    sections = Path("schema.toml").read_text().split("\n\n")
    for head, line in public.items():  # the one edit: open the file, fill in what is public
        place = next(k for k, section in enumerate(sections) if head in section)
        key = line.partition(" ")[0]
        sections[place] = "\n".join(
            line if old.startswith(f"{key} = []") else old for old in sections[place].split("\n")
        )
    Path("schema.toml").write_text("\n\n".join(sections))
    named = re.search(r"Train with --person ('[^']+'|\S+?), so", advised)
    who = ["--person", named[1].strip("'")] if named else []
    asked = [file, "--schema", "schema.toml", "--epsilon", "3", "--holdout", "0.25", "--model", "linear", *who]
    assert main(["check", *asked]) == 0, capsys.readouterr()
    assert main(["train", *asked, "--out", "run", "--quiet"]) == 0, capsys.readouterr().err
    metrics = json.loads(Path("run/result.json").read_text())["metrics"]
    if make is flats:
        assert metrics["test_mae"] < 150.0  # always the mean: 230
    else:
        assert metrics["test_accuracy"] - metrics["majority_accuracy"] > 0.05
    capsys.readouterr()
    assert main(["predict", "run", file]) == 0  # the file may still have its title, its units and its totals
    assert len(capsys.readouterr().out.splitlines()) > 2000
    assert main(["report", "run"]) == 0
    assert main(["certificate", "run", "-o", "claim.json"]) == 0
    assert main(["verify", "claim.json"]) == 0, capsys.readouterr()


def test_a_draft_with_unreadable_cells_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`describe` refused the drafter's own unreadable = "gap", of a column and of the target."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    lines = ["ward,dose,stay"]
    for k in range(600):
        dose, stay = ("see note" if k % 50 == 0 else f"{k % 9 / 2}"), ("open" if k % 60 == 0 else f"{k % 14}.5")
        lines.append(f"{'north' if k % 2 else 'south'},{dose},{stay}")
    Path("stays.csv").write_text("\n".join(lines) + "\n")
    assert main(["data", "schema", "stays.csv", "--label", "ward", "-o", "s.toml"]) == 0
    drafted = Path("s.toml").read_text()
    assert drafted.count('unreadable = "gap"') == 2
    Path("s.toml").write_text(drafted.replace("classes = []", 'classes = ["north", "south"]'))
    asked = ["stays.csv", "--schema", "s.toml", "--epsilon", "2", "-o", "page.html"]
    assert main(["describe", *asked]) == 0, capsys.readouterr().err
    assert main(["describe", *asked, "--by", "ward"]) == 0, capsys.readouterr().err
    Path("s.toml").write_text(
        '[label]\ncolumn = "stay"\nkind = "number"\nunreadable = "gap"\n'
        '[columns.ward]\nkind = "category"\ncategories = ["north", "south"]\n'
    )
    assert main(["describe", *asked, "--by", "ward"]) == 0, capsys.readouterr().err
    assert "mean of stay" in capsys.readouterr().out
