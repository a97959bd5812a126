"""A newcomer's road: four CSV files of the kinds people have, from the file to a checked certificate.

Each file is drafted a schema, which is edited at most once from public knowledge, then trained on, scored,
predicted for, described, reported and certified. Every message is read: none may hold a cell of the data. Cells
carry a mark (an odd suffix, or many decimals), so a cell in a message cannot pass for something else.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quietgrad.cli import main

Rows = list[list[Any]]


@dataclass(frozen=True)
class Case:
    """A file: its header and rows, how it is written, and the one edit of its draft (pattern → replacement)."""

    header: list[str]
    rows: Rows
    edit: tuple[tuple[str, str], ...]
    drafted: tuple[str, ...]  # how the schema is drafted
    trained: tuple[str, ...]  # how the model is trained
    kinds: dict[str, str]
    delimiter: str = ","
    encoding: str = "utf-8"
    public: tuple[str, ...] = ()  # words of the edit: public by the owner's own declaration

    def write(self, path: Path) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.delimiter, lineterminator="\n")
        writer.writerows([self.header, *self.rows])
        path.write_bytes(text.getvalue().encode(self.encoding))

    def secrets(self) -> set[str]:
        """Cells that nothing may show: all but those that were declared and such as 0, 1, yes and no."""
        cells = {str(cell) for row in self.rows for cell in row}
        return {c for c in cells if len(c) >= 4 and c not in self.public and c.lower() not in ("true", "false")}


def coin(rng: random.Random, chance: float) -> bool:
    return rng.random() < chance


def sigmoid(t: float) -> float:
    return 1.0 / (1.0 + math.exp(-t))


def mixed() -> Case:
    """Mixed types with gaps, and ids."""
    rng, rows = random.Random(1), []
    for i in range(4000):
        age, job = rng.uniform(18, 80), rng.choice(["clerk7q", "smith7q", "nurse7q"])
        ill = coin(rng, sigmoid((age - 50) / 8 + 2 * (job == "nurse7q")))
        cells = [f"C{i:05d}x", f"{age:.4f}", job, coin(rng, 0.4), "yes" if ill else "no"]
        rows.append([cell if k in (0, 4) or not coin(rng, 0.05) else "" for k, cell in enumerate(cells)])
    kinds = {"case_id": "id", "age": "number", "job": "category", "smokes": "yes/no", "ill": "yes/no"}
    words = ("clerk7q", "smith7q", "nurse7q")
    edit = ((r"categories = \[\]", f"categories = {json.dumps(words)}"), (r"bounds = \[\]", "bounds = [0, 110]"))
    header = ["case_id", "age", "job", "smokes", "ill"]
    return Case(header, rows, edit, (), ("--model", "linear", "--class-weight", "no=1,yes=2"), kinds, public=words)


def dates() -> Case:
    """Words and dates; the label is a word."""
    rng, rows = random.Random(2), []
    for _ in range(6000):
        day = dt.date(2015, 1, 1) + dt.timedelta(days=rng.randrange(2500))
        plan = rng.choice(["basicq7", "plusq7"])
        left = coin(rng, sigmoid((day.year - 2018) * 1.2 + (1.5 if plan == "plusq7" else -1.0)))
        remark = f"note {rng.random():.9f} of some length"
        rows.append([day.strftime("%d.%m.%Y"), plan, remark, "leftq7" if left else "staysq7"])
    words = ("basicq7", "plusq7")
    edit = (
        (r'(\[columns."joined"\][^\[]*)bounds = \[\]', r'\1bounds = ["2014-01-01", "2024-12-31"]'),
        (r"categories = \[\]", f"categories = {json.dumps(words)}"),
        (r"classes = \[\]", 'classes = ["staysq7", "leftq7"]'),
        (r'"days", "month", "weekday"', '"days", "month"'),
    )
    kinds = {"joined": "date", "plan": "category", "remark": "text", "outcome": "category"}
    header = ["joined", "plan", "remark", "outcome"]
    public = (*words, "staysq7", "leftq7")
    return Case(header, rows, edit, ("--label", "outcome"), (), kinds, public=public)


def money() -> Case:
    """A money column with thousands separators is the target of a regression; bounds of features are not known."""
    rng, rows = random.Random(3), []
    for i in range(20_000):
        rooms, area = rng.randint(1, 8), rng.uniform(20, 200)
        price = 40_000 + 2_500 * area + 15_000 * rooms + rng.gauss(0, 20_000)
        rows.append([f"H-{i:06d}", rooms, f"{area:.5f}", f"${max(price, 1000):,.2f}"])
    kinds = {"house_no": "id", "rooms": "whole number", "area": "number", "price": "number"}
    edit = ((r"(\[label\][^\[]*)bounds = \[\]", r"\1bounds = [0, 700000]"),)
    return Case(
        ["house_no", "rooms", "area", "price"], rows, edit, (), ("--model", "linear", "--score-share", "0.5"), kinds
    )


def small() -> Case:
    """Eight hundred rows, with ; and cp1252 and decimal commas; a score would be noise, and is not released."""
    rng, rows = random.Random(6), []
    for i in range(800):
        dose, town = rng.uniform(0, 10), rng.choice(["Köln", "Genève", "Zürich"])
        better = coin(rng, sigmoid(dose - 5))
        rows.append([f"P{i:04d}é", f"{dose:.4f}".replace(".", ","), town, "TRUE" if better else "FALSE"])
    words = ("Köln", "Zürich", "Genève")
    edit = (
        (r"categories = \[\]", f"categories = {json.dumps(words, ensure_ascii=False)}"),
        (r"bounds = \[\]", "bounds = [0, 12]"),
    )
    kinds = {"Prüfnr": "id", "Dosis": "number", "Ort": "category", "besser": "yes/no"}
    header = ["Prüfnr", "Dosis", "Ort", "besser"]
    return Case(header, rows, edit, ("--keep", "Prüfnr"), (), kinds, ";", "cp1252", words)


CASES: dict[str, Callable[[], Case]] = {"mixed": mixed, "dates": dates, "money": money, "small": small}


@pytest.mark.parametrize("name", CASES)
def test_a_newcomer_gets_a_model_to_answer_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    case = CASES[name]()
    case.write(Path("people.csv"))
    secrets = case.secrets()

    def run(*args: str, code: int = 0) -> tuple[str, str]:
        got = main([str(a) for a in args])
        said = capsys.readouterr()
        assert got == code, said.out + said.err
        everything = said.out + said.err
        assert not [cell for cell in secrets if cell in everything], args[0]
        return said.out, said.err

    # The file alone: refused with every column concerned and no cell, or read as it is.
    words = [column for column, kind in case.kinds.items() if kind in ("category", "id", "date", "text")]
    if words and case.encoding == "utf-8":
        _, why = run("train", "people.csv", "--epsilon", "1", "--out", "runs/no", code=1)
        assert "quietgrad data schema" in why or "neither 0/1" in why or "not numbers" in why
    # The draft: kinds by form, no cell in it.
    out, _ = run("data", "schema", "people.csv", "-o", "schema.toml", *case.drafted)
    assert all(re.search(rf"{re.escape(column)}\s+{re.escape(kind)}", out) for column, kind in case.kinds.items())
    draft = Path("schema.toml").read_text("utf-8")
    assert not [cell for cell in {str(c) for row in case.rows for c in row} if len(cell) >= 4 and cell in draft]
    if any("categories" in pattern or "classes" in pattern for pattern, _ in case.edit):
        _, why = run("train", "people.csv", "--schema", "schema.toml", "--epsilon", "1", "--out", "runs/no", code=1)
        assert "is empty" in why
    # One edit.
    for pattern, better in case.edit:
        draft = re.sub(pattern, better.replace("\\u", "\\\\u"), draft)
    Path("schema.toml").write_text(draft, "utf-8")
    told = ("people.csv", "--schema", "schema.toml", "--epsilon", "2", "--holdout", "0.25", "--out", "runs/first")
    out, _ = run("train", *told, *case.trained, "--explain")
    result = json.loads(Path("runs/first/result.json").read_text())
    assert "privacy" in out
    if name == "small":
        assert "not released" in out
    else:
        assert "privacy in all" in out
        assert result["metrics"]["private"] is True
    if "test_accuracy" in result["metrics"]:
        accuracy, majority = result["metrics"]["test_accuracy"], result["metrics"]["majority_accuracy"]
        assert "always the most frequent class" in out
        assert accuracy > majority - 3 * result["metrics"]["test_accuracy_error"]
    if name == "money":
        assert result["metrics"]["test_r2"] > 0.5
    # Predictions keep ids; the file may lack its labels.
    ids = next((column for column, kind in case.kinds.items() if kind == "id"), None)
    assert main(["predict", "runs/first", "people.csv", "-o", "said.csv"]) == 0
    capsys.readouterr()
    with Path("said.csv").open() as predictions:
        first = next(csv.DictReader(predictions))
    assert "prediction" in first
    assert ids is None or first[ids] == case.rows[0][0]
    label = next(k for k, column in enumerate(case.header) if column == list(case.kinds)[-1])
    bare = Case(
        [c for k, c in enumerate(case.header) if k != label],
        [[c for k, c in enumerate(row) if k != label] for row in case.rows], (), (), (), {},
        case.delimiter, case.encoding,
    )  # fmt: skip
    bare.write(Path("bare.csv"))
    assert main(["predict", "runs/first", "bare.csv", "-o", "bare-said.csv"]) == 0
    capsys.readouterr()
    assert Path("bare-said.csv").read_text().splitlines()[1:] == Path("said.csv").read_text().splitlines()[1:]
    # What may be published is enough to predict.
    Path("published").mkdir()
    for file in ("model.safetensors", "result.json", "schema.toml"):
        shutil.copy(Path("runs/first", file), "published")
    assert main(["predict", "published", "bare.csv", "-o", "published.csv"]) == 0
    capsys.readouterr()
    assert Path("published.csv").read_text() == Path("bare-said.csv").read_text()
    Path("published/schema.toml").unlink()
    if words and case.encoding == "utf-8":
        assert "has no schema.toml" in run("predict", "published", "bare.csv", code=1)[1]
    # Training people are no held-out people, nor are all of them but one.
    _, why = run("evaluate", "runs/first", "people.csv", code=1)
    assert "trained on" in why
    Case(case.header, case.rows[1:], (), (), (), {}, case.delimiter, case.encoding).write(Path("but-one.csv"))
    run("evaluate", "runs/first", "but-one.csv", code=1)
    if name == "mixed":
        run("evaluate", "runs/first", "but-one.csv", "--training-people", "--epsilon", "2")
        run("report", "runs/first", "-o", "training.html")
        page = Path("training.html").read_text("utf-8")
        assert "On training people, privately" in page
        assert "On held-out people, privately</h3>" not in page
        assert "--holdout 0.25" in page  # how to repeat it
    # The whole table described, and the claim proved again.
    run("describe", "people.csv", "--schema", "schema.toml", "--epsilon", "1", "-o", "about.html")
    assert "<svg" in Path("about.html").read_text("utf-8")
    assert json.loads(Path("about.json").read_text())["columns"]
    run("report", "runs/first")
    run("certificate", "runs/first", "-o", "claim.json")
    out, _ = run("verify", "claim.json")
    assert "The claim follows from the file" in out
    for page in ("runs/first/report.html", "runs/first/result.json", "claim.json", "runs/first/schema.toml"):
        text = Path(page).read_text("utf-8")
        tokens = set(re.findall(r"[^\s\"',;:<>()\[\]{}=]+", text))  # numbers hold others' digits
        assert not secrets & tokens, page
        assert not [cell for cell in secrets if not re.fullmatch(r"-?[\d.]+", cell) and cell in text], page


def test_a_run_has_four_faces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command line, TOML, run.json and the command to repeat it say one and the same run."""
    import shlex
    from dataclasses import asdict, replace

    from quietgrad.cli import train as command
    from quietgrad.cli.run_spec import RunSpec

    monkeypatch.chdir(tmp_path)
    for file in ("t.csv", "s.toml", "l.jsonl"):
        Path(file).write_text("x = 1\n")
    seen: list[RunSpec] = []

    def stop(spec: RunSpec, out: Path, **options: Any) -> None:
        seen.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", stop)
    words = shlex.split(
        "train t.csv --schema s.toml --person who --drop a --drop b --keep id --epsilon 0.7 --delta 1e-6 "
        "--model additive --holdout 0.25 --score-share 0.3 --ledger l.jsonl --account people --cap-epsilon 3 "
        "--n-public 900 --combine sum --records-per-person 4 --delimiter ';' --encoding cp1252 --no-intercept "
        "--relation replace-one"
    )
    assert main(words) == 130
    asked = seen[-1]
    assert main(shlex.split(asked.command())[1:]) == 130
    said = {key: value for key, value in asdict(asked).items() if value is not None and key != "split_key"}
    Path("again.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in said.items()))
    assert main(["train", "--from", "again.toml"]) == 130
    asked.save(tmp_path / "run")
    assert main(["train", "--from", "run/run.json"]) == 130
    for spec in [*seen, RunSpec.load(tmp_path / "run")]:
        assert replace(spec, split_key=None) == replace(asked, split_key=None)
    assert (asked.ledger, asked.account, asked.reading["person"]) == (str(tmp_path / "l.jsonl"), "people", "who")
    assert main(["train", "--from", "again.toml", "--epsilon", "9"]) == 2
