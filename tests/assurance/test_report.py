"""The report: self-contained, truthful about what it shows, and readable by machines that read to people."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quietgrad as qg
from quietgrad.assurance.report import page as pages
from quietgrad.assurance.report.card import card_of
from quietgrad.assurance.report.certificate import detection, privacy_report, release_words
from quietgrad.assurance.report.ledger_page import render_ledger
from quietgrad.assurance.report.model import model_of
from quietgrad.assurance.report.page import read_runs
from quietgrad.assurance.report.spending import spending_of
from quietgrad.charts import (
    Chart,
    Intervals,
    Lines,
    Series,
    to_notebook_html,
    to_svg_file,
)
from quietgrad.cli import main
from quietgrad.core.accounting.accounting import delta_of
from quietgrad.core.accounting.events import gaussian
from quietgrad.core.ledger.ledger import Ledger, project_ledger
from quietgrad.estimators import PrivateLinearRegression, PrivateLogisticRegression, to_run
from quietgrad.methods.registry import EXAMPLES, entry
from quietgrad.methods.result import load

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.images: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.stack.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag == "svg" and values.get("role") == "img":
            self.images.append(values.get("aria-label") or "")
        assert tag not in ("script", "link", "iframe"), tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.stack
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    assert page.stack == []
    return page


def words(page: Page) -> str:
    return " ".join(page.text.split())


def render(folders: list[Path]) -> str:
    return pages.render(read_runs(folders))


def shown(folders: list[Path]) -> str:
    """The words on the page about these runs, whose markup is sound."""
    return words(read(render(folders)))


def rows(n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(1).normal(size=(n, 3))
    return X, (X[:, 0] > 0) * 1.0


@pytest.fixture(autouse=True)
def _private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three finished runs: two private ones of one ledger, and one without noise."""
    methods = {"srm": qg.DPSRM(steps=40, batch_size=50), "gd": qg.DPGD(steps=10), "plain": qg.GD(steps=10)}
    ledger = tmp_path / "ledger.jsonl"
    for name, method in methods.items():
        budget = qg.Budget(1.0, 1e-5) if method.private else None
        loss = qg.objectives.Logistic()
        qg.minimize(loss, rows(), method, budget=budget, ledger=ledger, account="volunteers").save(tmp_path / name)
        (tmp_path / name / "run.json").write_text(json.dumps({"ledger": str(ledger)}))
    return [tmp_path / name for name in methods]


def test_one_run(runs: list[Path]) -> None:
    text = render(runs[:1])
    page = read(text)
    said = words(page)
    for fact in ("differential privacy under add-remove", "account “volunteers”", "hash chain verified",
                 "over 2 runs", "What it does not cover", "Gaussian, σ =", "counted privately", "39"):  # fmt: skip
        assert fact in said
    assert all(link.startswith("#") for link in page.links)  # nothing comes from elsewhere
    assert "url(" not in text
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    assert page.images
    assert all(page.images)


def test_a_private_score_is_not_called_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score with noise is read from its own file; without that file the plain copy of it counts as exact."""
    monkeypatch.chdir(tmp_path)
    X, y = rows(2000)
    np.savez("rows.npz", X=X, y=y.astype(int))
    train = ["train", "rows.npz", "--holdout", "0.25", "--epsilon", "8", "--out", "scored", "--quiet"]
    assert main(train) == 0
    capsys.readouterr()
    folder = tmp_path / "scored"
    assert json.loads((folder / "result.json").read_text())["metrics"]["private"] is True
    for folders in ([folder], [folder, folder]):
        said = shown(folders)
        assert "accuracy, held-out" in said
        assert "computed from records without noise; publishing" not in said
    said = shown([folder])
    order = (
        "ε asked 8 = model 6.4 + score 1.6, at δ = 1e-05, add-remove",  # first of all what was asked and spent
        "eε = 2.98e+03", "The model", "x0", "One noisy table", "majority class alone0", "predicted 1",
        "Calibration", "Privacy certificate", "The course of the run",
    )  # fmt: skip
    assert [part for part in order if part not in said] == []
    assert sorted(order, key=said.index) == list(order)
    (run,) = read_runs([folder])
    assert run.score is not None
    other = replace(run.score.privacy, relation=qg.Relation.REPLACE_ONE)  # which cannot be added
    assert "the score costs besides" in str(spending_of(run.result.privacy, other, run.asked))
    (folder / "evaluation.json").unlink()
    said = shown([folder])
    assert "private score included" not in said
    assert "ε asked 8, spent 6.4 = model 6.4" in said
    assert "test accuracy not private" in said
    assert "computed from records without noise; publishing" in said


def test_coefficients_are_those_of_the_estimator(tmp_path: Path) -> None:
    """In the units of the target, with the intervals of ``summary()``; without errors there is no interval."""
    X = np.random.default_rng(2).uniform(size=(4000, 2))
    y = 1000.0 * X[:, 0] + 100.0 * np.random.default_rng(3).normal(size=4000)
    model = PrivateLinearRegression(
        epsilon=8.0, delta=1e-5, inference=True, feature_bounds=[(0, 1), (0, 1)], target_bounds=(-500, 1500)
    ).fit(X, y)
    fitted = model_of(load(to_run(model, tmp_path / "linear")))
    table = {row["name"]: row for row in model.summary().reset_index().to_dict("records")}
    assert [row.name for row in fitted.rows] == ["x0", "x1", "(intercept)"]
    for row in fitted.rows:
        ends = [float(end) for end in row.interval.split(" to ")]
        assert ends == pytest.approx([table[row.name]["lower"], table[row.name]["upper"]], rel=0.01)
        assert float(row.coefficients[0]) == pytest.approx(table[row.name]["coef"], rel=1e-3)
    assert fitted.rows[0].range == "0 to 1"
    three = PrivateLogisticRegression(epsilon=8.0, delta=1e-5, classes=["a", "b", "c"], feature_bounds=[(0, 1)] * 2)
    three.fit(X, np.array(["a", "b", "c"])[(3 * X[:, 0]).astype(int)])
    several = model_of(load(to_run(three, tmp_path / "several")))
    assert several.outputs == ("a", "b", "c")
    assert not several.has_intervals
    shown_values = {row.name: [float(value) for value in row.coefficients] for row in several.rows}
    assert shown_values["x0"] == pytest.approx(three.coef_[:, 0], rel=1e-3)
    assert "coefficient, b" in shown([tmp_path / "several"])


def test_columns_are_shown_in_their_own_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schema maps a column from its bounds to [0, 1]; the report maps the noisy mean back."""
    monkeypatch.chdir(tmp_path)
    ages = np.random.default_rng(4).integers(40, 61, size=3000)
    lines = [f"{age},{'yes' if age > 50 else 'no'}" for age in ages]
    Path("people.csv").write_text("\n".join(["age,ill", *lines]))
    schema = '[label]\ncolumn = "ill"\nclasses = ["no", "yes"]\n[columns]\nage = {bounds = [0, 100]}\n'
    Path("schema.toml").write_text(schema)
    options = ["--schema", "schema.toml", "--epsilon", "8", "--out", "run", "--quiet"]
    assert main(["train", "people.csv", *options]) == 0
    capsys.readouterr()
    (row, _) = model_of(load("run")).rows
    assert (row.name, row.range) == ("age", "0 to 100")
    mean, error = map(float, row.mean.split(" ± "))
    assert abs(mean - ages.mean()) < 6.0 * error < 10.0  # six standard deviations: false once in 5·10⁸


def test_runs_side_by_side(runs: list[Path]) -> None:
    path = runs[0] / "result.json"
    path.write_text(path.read_text().replace('"data": {', '"data": {"name": "<script>alert(1)</script>",'))
    page = read(render(runs))  # which has no script
    said = words(page)
    assert "Comparison of 3 runs" in said
    assert "These ε do not compare." in said  # one of them has no promise at all
    assert "No noise was added." in said
    assert said.count("What it does not cover") == 1
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "These ε do not compare." not in shown(runs[:2])


def test_a_run_has_the_colour_of_its_legend_where_another_has_no_curve(runs: list[Path]) -> None:
    """A run of one release has no curve and is not in the legend; the others keep their colours."""
    first = runs[0] / "result.json"
    said = json.loads(first.read_text())
    first.write_text(json.dumps({**said, "history": []}))
    page = render([runs[0], runs[1], runs[1]])
    legend = dict(re.findall(r'<line class="line (s\d)"[^>]*/></svg>([^<]+)</li>', page))
    drawn = re.findall(r'<polyline class="line (s\d)"[^>]*><title>([^<]+)</title>', page)
    assert legend.keys() == {"s1", "s2"}
    assert [colour for colour, _ in drawn] == ["s1", "s2"]
    assert all(legend[colour].strip() == name for colour, name in drawn)


def test_no_cell_of_a_table_can_be_printed_over_the_next(runs: list[Path]) -> None:
    """A cell that stays on one line has no greatest width."""
    page = render(runs)
    style = re.sub(r"/\*.*?\*/", "", page[page.index("<style>") : page.index("</style>")], flags=re.DOTALL)
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style[: style.index("@media (max-width")])
    nowrap = {one.strip() for names, body in rules if "nowrap" in body for one in names.split(",")}
    assert {name for name in nowrap if name.startswith(("td", "th"))} == {"td.n"}
    widths = {
        one.strip(): width[1]
        for names, body in rules
        if (width := re.search(r"max-width: ([^;]+)", body))
        for one in names.split(",")
    }
    assert (widths[".scroll td"], widths[".scroll .n"]) == ("30ch", "none")
    assert list(widths).index(".scroll .n") > list(widths).index(".scroll td")  # of equal weight the last one holds


def test_a_seeded_run_an_altered_ledger_and_none_are_told(runs: list[Path], tmp_path: Path) -> None:
    budget = qg.Budget(1.0, 1e-5)
    seeded = qg.minimize(qg.objectives.Logistic(), rows(100), qg.DPGD(), budget=budget, seed=1)
    assert "No privacy certificate" in shown([seeded.save(tmp_path / "seeded")])
    (runs[1] / "run.json").unlink()
    assert "other runs on these people are not known here" in shown(runs[1:2])
    ledger = runs[0].parent / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("volunteers", "villagers", 1))
    said = shown(runs[:1])
    assert "cut or altered" in said
    assert "Nothing is certified" in said


@pytest.mark.parametrize("cap", [False, True])
def test_every_page_states_the_account_at_one_delta(
    tmp_path: Path, cap: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report, card, terminal and the ledger's page: at the cap's δ, else at what was asked for model and score."""
    np.savez(tmp_path / "rows.npz", X=rows(12000)[0], y=rows(12000)[1])
    ledger = Ledger(tmp_path / "ledger.jsonl")
    if cap:
        ledger.set_cap("people", qg.Budget(5.0, 4e-6))
    train = ["train", str(tmp_path / "rows.npz"), "--algorithm", "dp-gd", "--steps", "3", "--holdout", "0.2",
             "--epsilon", "1", "--delta", "1e-6", "--ledger", str(ledger.path), "--account", "people"]  # fmt: skip
    assert main([*train, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert re.search(r"seconds +\d+\n", told), "whole seconds alone may be published"
    delta = 4e-6 if cap else 1e-6
    value = f"{ledger.spent('people', delta=delta, relation='add-remove').epsilon:.4g}"
    assert f"ε = {value} at δ = {delta:g} by 2 runs" in told
    assert main(["ledger", "show", str(ledger.path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["accounts"][0]
    assert (f"{row['epsilon']:.4g}", row["delta"]) == (value, delta)
    report, book = shown([tmp_path / "run"]), words(read(render_ledger(ledger, {})))
    card = card_of(tmp_path / "run").markdown()
    assert f"ε of the account at δ = {delta:g}, 2 runs{value}" in report.replace(" " + value, value)
    assert f"ε = {value} at δ = {delta:g}, add-remove" in report
    assert f"ε = {value}" in book
    assert f"δ = {delta:g}, add-remove, per record" in book
    assert f"ε = {value} at δ = {delta:g}, 2 runs" in card
    assert all("costs composed together add up more slowly" in text for text in (report, book, card))
    # The number of records was a release, and no page calls it declared.
    assert all("(counted privately, within ε)" in text for text in (report, card))
    assert "(a public number)" not in report


def test_the_delta_of_a_run_includes_its_scores_and_no_others(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def reserve(run: str, delta: float, note: str = "dp-gd") -> float:
        ledger.reserve("people", gaussian(9.0), delta=delta, relation="add-remove", run=run, note=note)
        return ledger.book().stated_delta("people")

    assert reserve("a~count", 8e-7, "count") == reserve("a", 8e-7) == 8e-7
    assert reserve("score", 2e-7, "evaluation; n = 9") == pytest.approx(1e-6)
    assert reserve("b", 3e-7) == 3e-7
    assert ledger.book().stated_delta("people", "a") == pytest.approx(1e-6)
    assert ledger.book().stated_delta("people", "score") == pytest.approx(1e-6)
    ledger.reserve("held-out", gaussian(9.0), delta=1e-7, relation="add-remove", run="x", note="evaluation")
    ledger.reserve("held-out", gaussian(9.0), delta=2e-7, relation="add-remove", run="y", note="evaluation")
    assert ledger.book().stated_delta("held-out") == 2e-7, "two scores are no model and its score"


def test_a_ledger_elsewhere_is_named(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of Python's is saved without saying where it was paid: who knows says so, and it is held against it."""
    paid = tmp_path / "elsewhere.jsonl"
    data, budget = rows(), qg.Budget(1.0, 1e-5)
    named = tmp_path / "named"
    result = qg.minimize(qg.objectives.Logistic(), data, qg.DPGD(steps=4), budget=budget, ledger=paid, folder=named)
    result.save(named)
    assert "none at hand" in shown([named])
    assert main(["report", str(named), "--ledger", str(paid), "-o", str(tmp_path / "page.html")]) == 0
    assert "whole, hash chain verified" in words(read((tmp_path / "page.html").read_text()))
    certificate = tmp_path / "c.json"
    assert main(["certificate", str(named), "--ledger", str(paid), "-o", str(certificate)]) == 0
    assert json.loads(certificate.read_text())["body"]["ledger"]["lines"]
    assert main(["certificate", str(named), "--ledger", str(runs[0].parent / "ledger.jsonl"), "-o", "x"]) == 1
    assert "holds no reservation of this run" in capsys.readouterr().err
    assert main(["report", str(named), "--ledger", str(tmp_path / "no.jsonl")]) == 1
    assert "no such ledger" in capsys.readouterr().err
    held = tmp_path / "held in memory"  # such a run has a name too, by which its lines are found
    qg.minimize(qg.objectives.Logistic(), data, qg.DPGD(steps=5), budget=budget, ledger=paid).save(held)
    assert main(["certificate", str(held), "--ledger", str(paid), "-o", str(certificate)]) == 0
    assert json.loads(certificate.read_text())["body"]["ledger"]["lines"]


def test_releases_of_a_filter_and_of_output_noise(tmp_path: Path) -> None:
    X, y = rows(300)
    table = (X / np.linalg.norm(X, axis=1, keepdims=True), y)
    adaptive = qg.minimize(qg.objectives.Logistic(), table, qg.DPAGD(), budget=qg.Budget(1.0, 1e-5))
    certificate = privacy_report(adaptive, None)
    assert {row.noise for row in certificate.releases if row.name != "count"} == {"chosen per release"}
    assert "zCDP filter" in certificate.composition
    objective = qg.objectives.Logistic(row_bound=1.0, rows="clip", regularizer=qg.objectives.L2(0.1))
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    pure = qg.minimize(objective, table, qg.OutputPerturbation(mechanism="pure"), budget=budget)
    row = privacy_report(pure, None).releases[0]
    assert row.noise.startswith("L2-Laplace")
    assert row.sensitivity == "2 C"
    assert row.sampling == "every record"
    for result in (adaptive, pure):
        read(render([result.save(tmp_path / result.algorithm)]))


def test_the_command_writes_where_it_is_told(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    target = runs[0].parent / "deep" / "page.html"
    assert main(["report", *map(str, runs), "-o", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(target)
    read(target.read_text())
    assert main(["report", str(runs[0])]) == 0
    assert (runs[0] / "report.html").exists()
    assert main(["report", str(target.parent)]) == 1
    assert "no result here" in capsys.readouterr().err


def test_the_noise_stated_is_that_of_each_release(tmp_path: Path) -> None:
    """Beside each other and in a certificate: σ/C of a slot, its relative or fixed noise included."""
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    method = qg.WhitenedGD(steps=4, row_bound=2.0)
    result = qg.minimize(qg.objectives.Logistic(), rows(400), method, budget=budget)
    plan = qg.plan(method, n=400, budget=budget)
    expected = [f"{slot.multiplier(plan.noise_multiplier):.4g}" for slot in plan.schedule.slots]
    assert [row.multiplier for row in privacy_report(result, None).releases] == expected
    assert f"{result.privacy.noise_multiplier:.4g}" not in expected
    for name in ("a", "b"):
        result.save(tmp_path / name)
    said = shown([tmp_path / "a", tmp_path / "b"])
    assert all(f"σ = {multiplier} C" in said for multiplier in expected)
    assert "moves what is released by at most 2 C" in said  # a count's record contributes more than its C


def test_a_setting_of_a_thousand_ranges_takes_a_line(runs: list[Path]) -> None:
    (run, *_) = read_runs(runs[:1])
    same, other = [(-3.7416573867739413, 3.7416573867739413)] * 1000, [(0.0, float(j)) for j in range(1000)]
    config = {**run.result.config, "look": {"features": same, "values": other, "octave_share": 0.0, "target": None}}
    text = pages.render([replace(run, result=replace(run.result, config=config))])
    assert "<dt>range estimation: features</dt><dd>[1000 × [-3.74166, 3.74166]]</dd>" in text
    assert "… (1000 in all)]" in text
    assert "[0, 500]" not in text
    assert "octave" not in text  # what is switched off is no setting of the run
    assert "range estimation: target" not in text


def linear_facts(names: list[str], *, intercept: bool) -> dict[str, object]:
    return {
        "objective": "logistic", "features": len(names), "feature_names": names, "intercept": intercept,
        "task": "binary", "classes": 2, "class_names": ["0", "1"], "regularizer": None, "row_bound": None,
        "rows": "clip",
    }  # fmt: skip


def test_a_comparison_shows_each_model_before_certificates_and_curves(runs: list[Path]) -> None:
    for folder in runs[:2]:
        said = json.loads((folder / "result.json").read_text())
        said["details"]["model"] = linear_facts(["age", "bmi", "dose"], intercept=False)
        said["metrics"] = {"test_accuracy": 0.9, "majority_accuracy": 0.6, "private": False}
        (folder / "result.json").write_text(json.dumps(said))
    page = shown(runs[:2])
    order = (
        "Side by side", "The model of dp-srm", "ε spent", "majority class alone not private0.6000", "Features",
        "The model of dp-gd", "Privacy certificate", "For every run above", "The course of the runs",
    )  # fmt: skip
    assert [part for part in order if part not in page] == []
    assert sorted(order, key=page.index) == list(order)
    assert page.count("Features") == 2


def test_flags_of_an_additive_model_are_drawn_at_no_and_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A one-hot feature has a value at 0 and one at 1; bars of other features stand in the middle of their bins."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    cells = zip(rng.integers(18, 90, 2000), rng.choice(["a", "b"], 2000), rng.integers(0, 2, 2000), strict=True)
    Path("rows.csv").write_text("age,kind,ill\n" + "\n".join(f"{a},{k},{i}" for a, k, i in cells) + "\n")
    schema = {
        "label": {"column": "ill", "classes": ["0", "1"]},
        "columns": {"age": {"bounds": [0, 120]}, "kind": {"categories": ["a", "b"]}},
    }
    Path("schema.json").write_text(json.dumps(schema))
    train = [
        "train",
        "rows.csv",
        "--schema",
        "schema.json",
        "--model",
        "additive",
        "--epsilon",
        "4",
        "--out",
        "out",
    ]
    assert main([*train, "--quiet"]) == 0
    capsys.readouterr()
    result = load(tmp_path / "out")
    drawings = dict(model_of(result).shapes)
    shape = next(each for each in result.details["shapes"] if each["name"] == "kind=a")
    assert f"no: {shape['values'][0]:.3g} (" in drawings["kind=a"]
    assert f"yes: {shape['values'][-1]:.3g} (" in drawings["kind=a"]
    assert "polyline" not in drawings["kind=a"]
    assert "polyline" in drawings["age"]
    age = next(each for each in result.details["shapes"] if each["name"] == "age")
    bars = re.findall(r'style="stroke-dasharray:none;stroke-width:1" x1="([\d.]+)"', drawings["age"])
    dots = re.findall(r"([\d.]+),[\d.-]+", re.findall(r'points="([^"]+)"', drawings["age"])[0])
    assert len(dots) == 3 * len(age["values"])
    assert bars == [middle for middle, error in zip(dots[1::3], age["errors"], strict=True) if error > 0.0]


def test_a_run_made_in_python_shows_its_parameters(tmp_path: Path) -> None:
    """It knows its loss as an object, so the page names parameters by number."""
    X, y = rows(500)
    result = qg.minimize(qg.objectives.Logistic(), (X, y), qg.DPGD(steps=3), budget=qg.Budget(1.0, 1e-5))
    result.save(tmp_path / "run")
    fitted = model_of(load(tmp_path / "run"))
    assert [row.name for row in fitted.rows] == [f"θ{k}" for k in range(X.shape[1])]
    said = shown([tmp_path / "run"])
    assert "Parameters" in said
    assert f"{result.params[0]:.4g}" in said
    assert "Coefficients add" not in said


def test_the_largest_coefficients_are_open_and_the_rest_is_folded(tmp_path: Path) -> None:
    X = np.random.default_rng(5).normal(size=(300, 40))
    names = [f"word {k}" for k in range(40)]
    loss = qg.objectives.Logistic(intercept=True)
    result = qg.minimize(loss, (X, (X[:, 7] > 0) * 1.0), qg.GD(steps=20), budget=None)
    result = replace(result, details={**result.details, "model": linear_facts(names, intercept=True)})
    fitted = model_of(result)
    assert [row.name for row in (fitted.rows[0], fitted.rows[-1])] == ["word 7", "(intercept)"]
    assert (len(fitted.rows), len(fitted.folded), fitted.left_out) == (16, 25, 0)
    sizes = [abs(float(row.coefficients[0])) for row in (*fitted.rows[:-1], *fitted.folded)]
    assert sizes == sorted(sizes, reverse=True)
    page = render([result.save(tmp_path / "run")])
    assert "<summary>25 more features, with smaller coefficients</summary>" in page


@pytest.mark.parametrize("name", [name for name in EXAMPLES if entry(name).kind.private])
def test_every_release_of_every_algorithm_has_words(name: str) -> None:
    """A name in a plan is short; the report says what each release is."""
    for example in EXAMPLES[name]:
        method = entry(name).make(dict(example.settings))
        slots = method.schedule(example.n).slots
        assert [slot.name for slot in slots if not release_words(slot.name)] == []


def test_releases_that_are_drawn_alike_share_a_line(tmp_path: Path) -> None:
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    result = qg.minimize(qg.objectives.Logistic(), rows(400), qg.WhitenedGD(steps=4, row_bound=2.0), budget=budget)
    said = shown([result.save(tmp_path / "run")])
    assert said.count("full batch: every record in every release") == 1
    assert "second-moments second moments of the features" in said


def test_a_negative_share_is_explained(tmp_path: Path, runs: list[Path]) -> None:
    (run, *_) = read_runs(runs[:1])
    score = pages.Evaluation(None, run.result.privacy, [], "", ["no", "yes"], [("no", ["1.003", "-0.003"])], [],
                             "held-out", has_negative=True)  # fmt: skip
    note = "Noise can make shares negative."
    assert note in pages.render([replace(run, evaluation=score)])
    assert note not in pages.render([replace(run, evaluation=replace(score, has_negative=False))])


def test_how_to_repeat_it_names_no_folder(tmp_path: Path) -> None:
    secret = tmp_path / "ward 7"
    secret.mkdir()
    np.savez(secret / "rows.npz", X=np.eye(20)[:, :3], y=np.arange(20) % 2)
    args = ["--epsilon", "1", "--algorithm", "dp-gd", "--steps", "3", "--set", "momentum=0.5", "--row-bound", "1"]
    assert main(["train", str(secret / "rows.npz"), "--out", str(tmp_path / "run"), "--quiet", *args]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    command = "quietgrad train rows.npz --epsilon 1 --delta 1e-05 --relation add-remove --algorithm dp-gd --steps 3"
    assert f"{command} --set momentum=0.5 --row-bound 1" in text
    assert "ward 7" not in text


def test_an_audit_of_the_run_is_on_its_page(runs: list[Path]) -> None:
    assert "none was made of this run" in shown(runs[1:2])
    assert main(["audit", str(runs[1]), "--runs", "4000"]) == 0
    assert "attacked, and it stood" in shown(runs[1:2])
    audit = json.loads((runs[1] / "audit.json").read_text())
    # Of another claim, of a run that was here before, of nothing.
    for text in (
        json.dumps({**audit, "epsilon_claimed": 3.0}),
        json.dumps({**audit, "result": "0" * 64}),
        "[" * 99,
    ):
        (runs[1] / "audit.json").write_text(text)
        assert "none was made of this run" in shown(runs[1:2])


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_no_gaussian_attack_beats_the_stated_detection(noise: float) -> None:
    """The likelihood-ratio test of one Gaussian release stays below the bound at every ε on its curve."""
    from scipy.special import ndtr, ndtri

    power = float(ndtr(ndtri(0.05) + 1.0 / noise))  # the best test at 5 % false alarms (Neyman–Pearson)
    for epsilon in (0.1, 0.5, 1.0, 3.0):
        delta = delta_of(gaussian(noise), epsilon=epsilon, relation="add-remove")
        assert power <= detection(epsilon, delta, 0.05) + 1e-9


size = st.floats(1e-6, 1e6) | st.just(0.0)
point = st.tuples(size, size | size.map(lambda y: -y))


@settings(deadline=None)
@given(st.lists(point, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_a_chart_draws_inside_its_frame(points: list[tuple[float, float]], log_x: bool, log_y: bool) -> None:
    chart = Lines("T", [Series("a & b", points), Series("empty", ())], "steps", "y", log_x=log_x, log_y=log_y)
    svg, kept = chart.svg(), [(x, y) for x, y in points if (x > 0 or not log_x) and (y > 0 or not log_y)]
    if not kept:
        assert svg == ""
        return
    dots = svg.split('points="')[1].split('"')[0].split()
    assert len(dots) == len(kept)
    for x, y in (map(float, dot.split(",")) for dot in dots):
        assert 0 <= x <= 460
        assert 0 <= y <= 270
    assert "a &amp; b" in svg
    assert 2 <= svg.count('class="tick"') <= 40


@pytest.mark.parametrize(
    ("method", "law"), [(qg.DPGD(steps=4), "Gaussian, σ ="), (qg.DPSGD(steps=4, batch_size=50), "Laplace, scale")]
)
def test_the_private_count_is_shown_with_its_own_noise(method: qg.DPGD | qg.DPSGD, law: str) -> None:
    result = qg.minimize(qg.objectives.Logistic(), rows(), method, budget=qg.Budget(1.0, 1e-5))
    shown = {row.name: row for row in privacy_report(result, None).releases}
    scale = result.details["counted"]["noise_multiplier"]
    assert shown["count"].noise.startswith(law)
    assert f"{scale:.4g} C" in shown["count"].noise
    assert shown["count"].sampling == "every record"
    assert shown["gradient"].noise != shown["count"].noise


# --- charts and notebooks -----------------------------------------------------------------------------------------

EVIL = "</svg><script>alert(1)</script>\x1b[2J\u202e"
LINES = Lines(EVIL, (Series("a", [(0.1, 0.8), (1, 0.9)], (0.01, 0.02)), Series(EVIL, [(1, 0.95)], level=True)),
              "ε", "y", log_x=True)  # fmt: skip
CHARTS: list[Chart] = [
    LINES,
    Intervals("Coefficients", (("age", 1.0, 0.5, 1.5), (EVIL, -2.0, -3.0, -1.0)), "coefficient"),
]


@pytest.mark.parametrize("text", [to_svg_file(LINES), *(chart.svg() for chart in CHARTS)])
def test_a_chart_is_a_whole_picture(text: str) -> None:
    root = xml.fromstring(text)
    assert root.tag.endswith("svg")
    assert root.get("aria-label")
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    assert not {"\x1b", "\u202e"} & set(text)


def test_plans_results_and_statements_show_themselves() -> None:
    budget = qg.Budget(1.0, 1e-5)
    plan = qg.plan(qg.DPGD(steps=5), n=200, budget=budget)
    result = qg.minimize(qg.objectives.Logistic(), rows(200), qg.DPGD(steps=5), budget=budget)
    said = {
        "5 × gradient": plan._repr_html_(),
        "proved by": result.privacy._repr_html_(),
        "Gradient estimate": result._repr_html_(),
    }
    for fact, text in said.items():
        assert fact in text
        xml.fromstring(text)
    assert "NOT PRIVATE" in qg.plan(qg.GD(steps=2), n=9, budget=None)._repr_html_()
    assert EVIL not in to_notebook_html(EVIL, [(EVIL, EVIL)], CHARTS)


# --- frontier -----------------------------------------------------------------------------------------------------


def test_a_frontier_of_public_data_has_the_line_without_privacy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = rows(400)
    cells = [f"{a:.4f},{b:.4f},{'yes' if t else 'no'}" for (a, b, _), t in zip(X, y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,ill", *cells]) + "\n")
    args = ["frontier", str(tmp_path / "t.csv"), "--label", "ill", "--classes", "no,yes", "--row-bound", "6"]
    args += ["--epsilons", "0.5,8", "--public", "--repeats", "2", "--out", str(tmp_path / "f")]
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["epsilon"] for point in found["points"]] == [0.5, 8.0]
    assert found["non_private"] > 0.9
    assert "without privacy" in (tmp_path / "f" / "frontier.svg").read_text()
    assert not (tmp_path / "f" / "ledger.jsonl").exists()


def test_a_frontier_of_people_is_charged_and_has_no_such_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = rows(400)
    np.savez(tmp_path / "t.npz", X=X, y=y.astype(int))
    args = ["frontier", str(tmp_path / "t.npz"), "--epsilons", "0.5,2", "--out", str(tmp_path / "f"), "--json"]
    args += ["--row-bound", "6"]
    for more, why in (
        (["--cap-epsilon", "2", "--force", "--yes"], "--cap-epsilon"),
        ([], "uncertain by about ± 0."),
        (["--relation", "replace-one"], "more than ± 0.05"),
        (["--force"], "Pass --yes"),
    ):
        assert main([*args, *more]) == 1
        said = capsys.readouterr().err
        assert why in said
        assert "Nothing was spent" in said or "--yes" in why
    assert not (tmp_path / "f").exists()
    assert main([*args, "--force", "--yes"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["non_private"] is None
    spent = project_ledger().spent("t.npz", delta=1e-5, relation="add-remove").epsilon  # fits and scores together
    assert spent == found["spent"]["t.npz"]
    assert spent > 2.0
    # 80 held-out people at ε = 0.3: what noise drowns is neither stated nor drawn.
    assert [point["value"] for point in found["points"]] == [None, None]
    assert all(point["error"] is None or point["error"] > 0.1 for point in found["points"])
    assert not (tmp_path / "f" / "frontier.svg").exists()
