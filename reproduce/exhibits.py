"""Every table and figure of the papers under its own number, from the result files: charts, and tables.

An exhibit is made of what a script left in ``reproduce/results`` and of nothing else. A figure of curves shows
curves against what the paper has on its axis; where a paper prints no numbers the text says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quietgrad.charts import Lines, Series

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of a paper: ``paper``, ``name`` ("figure 3"), what it shows, and ours beside it."""

    paper: str
    name: str
    title: str
    note: str
    charts: Sequence[Lines] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default=())

    @property
    def anchor(self) -> str:
        """Where it is on the page: 000-figure-3."""
        return f"{self.paper}-{self.name.replace(' ', '-')}"


def results(name: str, folder: str = "reproduce") -> dict[str, Any]:
    """What a script left."""
    path = ROOT / folder / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def averaged(curves: Sequence[Sequence[Sequence[float]]], x: int, y: int) -> tuple[list[Point], list[float]]:
    """The mean over runs of curves at the same places, and its standard errors; places that all runs have."""
    length = min(map(len, curves))
    points, bars = [], []
    for k in range(length):
        values = [curve[k][y] for curve in curves]
        points.append((statistics.fmean(curve[k][x] for curve in curves), statistics.fmean(values)))
        bars.append(statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0)
    return points, bars


def same(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def kinds(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a column in the order in which they come."""
    return list(dict.fromkeys(row[key] for row in rows))


def exhibits() -> Iterator[Exhibit]:
    """All of them, paper by paper."""
    yield Exhibit("000", "table 1", "Rates of methods", "Rates; gradients until a norm are counted above.")
    yield from logistic()
    yield mnist()
    yield from cifar()
    yield from secure_sums()
    yield bands()
    yield stages("figure 1", "MNIST, 2-layer CNN", results("stagewise"))
    yield stages("figure 2", "CIFAR-10, ResNet-20, ε = 10", results("stagewise_resnet"))
    yield from parties()
    yield from second_order()
    rates = "Rates, and the sizes of data sets: there is nothing to run."
    yield from (Exhibit("004", f"table {k}", "Rates and data sets", rates) for k in (1, 2))
    yield output_perturbation()


def logistic() -> Iterator[Exhibit]:
    """Paper 000, tables 2 and 3, figures 1 and 2."""
    record = results("nonconvex_printed")
    columns = ("ε", "method", "runs", "test loss: paper", "ours", "± se", "‖∇F‖: paper", "ours", "± se", "ratio",
               "passes of the paper", "s: paper", "CPU s: ours", "proved ε")  # fmt: skip
    for number, data in ((1, "a9a"), (2, "ijcnn1")):
        mine, rows = same(record["rows"], data=data), []
        for row in mine:
            paper = row["paper"] or {}
            slope = paper.get("gradient_norm")
            rows.append((
                row["epsilon"], row["method"], row["runs"], paper.get("test_loss"), row["test_loss"],
                row["test_loss_se"], slope, row["gradient_norm"], row["gradient_norm_se"],
                row["gradient_norm"] / slope if slope else None, paper.get("passes"), paper.get("cpu_seconds"),
                row["cpu_seconds"], row["epsilon_proved"],
            ))  # fmt: skip
        yield Exhibit(
            "000", f"table {number + 1}", f"Nonconvex logistic regression on {data}",
            "At the paper's settings and passes. DP-AGD chooses its own steps; the passes shown are the paper's.",
            columns=columns, rows=rows,
        )  # fmt: skip
        charts = []
        for epsilon in kinds(mine, "epsilon"):
            kept = [row for row in same(mine, epsilon=epsilon) if row["curves"]]
            for at, label in ((1, "objective"), (2, "gradient norm")):
                lines = [
                    Series(
                        f"{row['method']} ({_runs(row['curves'])})",
                        [(point[0], point[at]) for point in row["curve"]],
                        [spread[at] / row["curves"] ** 0.5 for spread in row["curve_sd"]],
                    )
                    for row in kept
                ]
                title = f"{data}, ε = {epsilon:g}"
                charts.append(Lines(title, lines, "passes over the data", label, log_x=True, log_y=at == 2))
        yield Exhibit(
            "000", f"figure {number}", f"Convergence on {data}",
            "Means of ten runs with standard errors. RRPSGD's is the path of which its random round picks a point; "
            "a run of DP-AGD that has stopped stays where it is. The paper prints no numbers beside its curves.",
            charts=charts,
        )  # fmt: skip


def mnist() -> Exhibit:
    """Paper 000, figure 3."""
    record = results("mnist")
    kept = [fit for fit in record["fits"] if fit.get("curve")]
    rows = [
        (row["epsilon"], row["method"], row["runs"], row["epochs"], row["paper_error"], row["mean_error"],
         row["standard_error"], row["cpu_seconds"])
        for row in record["table"]
    ]  # fmt: skip
    return Exhibit(
        "000", "figure 3", "MNIST, 4-layer CNN",
        "(a)–(f): test error against steps and against CPU seconds; curves of the runs that kept one, the table of "
        f"all. From (j) on: at the paper's own settings and one effective clip. {_first_batches('mnist')}",
        charts=[
            *_image_curves(kept, "MNIST"), *_party_curves("mnist"), _against_epsilon("MNIST", record["table"]),
            *_at_the_settings("mnist"),
        ],
        columns=("ε", "method", "runs", "epochs", "test error %: paper", "ours", "± se", "CPU s a fit"), rows=rows,
    )  # fmt: skip


def cifar() -> Iterator[Exhibit]:
    """Paper 000, figures 4 and 5."""
    record = results("cifar")
    for network, name, table in zip(("cnn5", "cnn6"), ("figure 4", "figure 5"), record["tables"][:2], strict=True):
        kept = [fit for fit in same(record["fits"], network=network) if fit.get("curve")]
        cells = [
            {"epsilon": r[0], "method": r[1], "paper_error": r[2], "mean_error": r[3], "standard_error": r[4]}
            for r in table["rows"]
        ]
        yield Exhibit(
            "000", name, f"CIFAR-10, {network.upper()}",
            f"(a)–(f): test error against steps and against CPU seconds. {_first_batches(network)}"
            + (" Features are of 10 000 CIFAR-10 images, not of CIFAR-100." if name[-1] == "5" else ""),
            charts=[
                *_image_curves(kept, network.upper()), *_party_curves(network),
                _against_epsilon(network.upper(), cells),
            ],
            columns=("ε", "method", "test error %: paper", "ours", "± se", "runs"), rows=table["rows"],
        )  # fmt: skip


def _party_curves(network: str) -> Iterator[Lines]:
    """Panels (g) and (h): DDP-SRM with 1 to 16 parties."""
    rows = same(results("image_parties")["parties"], network=network)
    for epsilon in kinds(rows, "epsilon"):
        lines = [
            Series(f"m = {row['parties']}", [(seconds, error) for _, seconds, error in row["curve"]])
            for row in same(rows, epsilon=epsilon)
        ]
        title = f"{network.upper()}, DDP-SRM with m parties, ε = {epsilon:g}"
        yield Lines(title, lines, "CPU seconds of all parties", "test error, %", log_y=True)


def _at_the_settings(figure: str) -> Iterator[Lines]:
    """Errors over iterations at the paper's clips, batches and epochs, of the settings run more than once."""
    fits = same(results("image_settings")["fits"], figure=figure)
    for epsilon in sorted(set(kinds(fits, "epsilon"))):
        lines = []
        for method in ("dp-sgd", "dp-srm"):
            mine = same(fits, epsilon=epsilon, method=method)
            for clip in kinds(mine, "clip"):
                runs = [fit["curve"] for fit in same(mine, clip=clip)]
                if len(runs) > 1:
                    points, bars = averaged(runs, 0, 1)
                    lines.append(Series(f"{method} ({_runs(len(runs))})", points, bars))
        title = f"{figure.upper()} at the paper's settings, ε = {epsilon:g}"
        yield Lines(title, lines, "iterations", "test error, %", log_y=True)


def _first_batches(network: str) -> str:
    """The held-out errors of DP-SRM by b₀, in words."""
    rows = [row for row in results("image_parties")["tables"][1]["rows"] if row[0] == network.upper()]
    tried = ", ".join(f"b₀ = {row[1]}b {row[2]:.1f} %" for row in rows)
    return f"Held-out error of DP-SRM by its first batch: {tried}."


def _image_curves(fits: Sequence[Row], what: str) -> Iterator[Lines]:
    for epsilon in sorted(set(kinds(fits, "epsilon"))):
        for axis, label in ((0, "steps"), (1, "CPU seconds")):
            lines = []
            for method in ("dp-sgd", "dp-srm"):
                runs = [fit["curve"] for fit in same(fits, epsilon=epsilon, method=method)]
                if runs:
                    points, bars = averaged(runs, axis, 2)
                    lines.append(Series(f"{method} ({_runs(len(runs))})", points, bars))
            yield Lines(f"{what}, ε = {epsilon:g}", lines, label, "test error, %", log_y=True)


def _against_epsilon(what: str, cells: Sequence[Row]) -> Lines:
    lines = []
    for method in kinds(cells, "method"):
        mine = same(cells, method=method)
        ours = [(row["epsilon"], row["mean_error"]) for row in mine]
        lines.append(Series(f"{method}, ours", ours, [row["standard_error"] or 0.0 for row in mine]))
        lines.append(Series(f"{method}, paper", [(row["epsilon"], row["paper_error"]) for row in mine]))
    return Lines(f"{what}, at the end", lines, "ε (δ = 1e-5)", "test error, %", log_x=True, zero=True)


def secure_sums() -> Iterator[Exhibit]:
    """Paper 000, tables 4 to 6: seconds of a secure sum."""
    record = results("secure", "benchmarks")
    ours = [
        Series(
            mode,
            sorted((float(r["dimension"]), float(r["seconds"])) for r in same(record["rows"], mode=mode)),
        )
        for mode in kinds(record["rows"], "mode")
    ]
    paper = sorted(
        {(float(r["dimension"]), float(r["paper_seconds"])) for r in record["rows"] if r["paper_seconds"]}
    )
    chart = Lines("One secure sum of 5 parties", [*ours, Series("paper (Yao)", paper)],
                  "numbers in a sum, d", "seconds", log_x=True, log_y=True)  # fmt: skip
    sums = {
        "table 4": ("a9a and ijcnn1", (22, 123)),
        "table 5": ("MNIST", (26010,)),
        "table 6": ("CIFAR-10", (62006,)),
    }
    for name, (what, sizes) in sums.items():
        keys = ("dimension", "mode", "paper_seconds", "seconds", "bytes_party", "variance_factor")
        rows = [[r[key] for key in keys]
                for r in record["rows"] if r["dimension"] in sizes]  # fmt: skip
        yield Exhibit(
            "000", name, f"Cost of secure sums: {what}",
            "Not the paper's garbled circuits: masks, servers and mpc, for sums of the same length.",
            charts=[chart] if name == "table 4" else (),
            columns=("d", "ours by", "s: paper", "s: ours", "bytes of a party", "noise variance ÷ one curator's"),
            rows=rows,
        )  # fmt: skip


def bands() -> Exhibit:
    """No exhibit of paper 000: its method with one joint clip and noise in bands, beside DP-SGD with the same."""
    table = results("bands")["tables"][0]
    return Exhibit(
        "000", "bands", "DP-SRM and DP-SGD, both with noise in bands",
        "No table or figure of the paper. Test loss on a9a, test error in % on MNIST; as many settings for each.",
        columns=table["columns"], rows=table["rows"],
    )  # fmt: skip


def stages(name: str, title: str, record: dict[str, Any]) -> Exhibit:
    """Paper 001, figures 1 and 2."""
    charts, rows = [], []
    settings = dict.fromkeys((f["epsilon"], f["sampling"], f["relation"]) for f in record["fits"])
    for epsilon, sampling, relation in settings:
        lines: dict[str, Series] = {}  # a schedule's chosen rate was run last
        mine = same(record["fits"], epsilon=epsilon, sampling=sampling, relation=relation)
        for schedule, step in dict.fromkeys((fit["schedule"], fit["step"]) for fit in mine):
            fits = same(mine, schedule=schedule, step=step)
            errors = [fit["error"] for fit in fits]
            spread = statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else None
            rows.append((epsilon, sampling, schedule, len(fits), statistics.fmean(errors), spread, step))
            if curves := [fit["curve"] for fit in fits if fit.get("curve")]:
                name_of = f"{schedule}, {step:g} ({_runs(len(curves))})"
                lines[schedule] = Series(name_of, *averaged(curves, 0, 1))
        stated = "without noise" if epsilon is None else f"ε = {epsilon:g}, {relation}, {sampling}"
        if lines:
            charts.append(
                Lines(stated, list(lines.values()), f"steps of {record['batch_size']}", "test error, %", log_y=True)
            )
    if watched := record.get("training"):
        lines = {row["schedule"]: Series(row["schedule"], row["training_curve"]) for row in watched}
        title, steps = "training images, ε = 8, add-remove, poisson, one run", f"steps of {record['batch_size']}"
        charts.append(Lines(title, list(lines.values()), steps, "training error, %", log_y=True))
    rows.sort(key=lambda row: (-(row[0] or 99.0), row[1], row[4]))
    return Exhibit(
        "001", name, title,
        "The paper shows curves of accuracy and states neither batch, steps, clip nor rates, so no number stands "
        f"beside ours. {record['steps']} steps of {record['batch_size']} images. "
        "Curves are at the chosen rates; the table has every rate that was run.",
        charts=charts,
        columns=("ε", "sampling", "schedule", "runs", "test error %", "± se", "rate"), rows=rows,
    )  # fmt: skip


_SETS = {"kddcup99": "KDD Cup 99", "adult": "Adult", "bank-additional": "Bank", "breast-cancer-wisconsin":
         "Breast Cancer", "credit-fraud": "Credit Card Fraud"}  # fmt: skip
_LINES = (("printed_weighted", "WD-DP as printed"), ("printed_unweighted", "unweighted as printed"),
          ("printed_central", "one place as printed"), ("iv", "(iv), true ε"), ("unweighted", "unweighted, true ε"),
          ("central_one_shot", "one place, one fit, true ε"))  # fmt: skip


def parties() -> Iterator[Exhibit]:
    """Paper 002, figures 1 to 16: every set a chart, accuracy or optimal gap, against ε or unevenness."""
    rows = results("weighted_average")["rows"]
    for number in range(1, 17):
        mine = [row for row in rows if number in row["figures"]]
        axis, gap = mine[0]["axis"], number == max(mine[0]["figures"])
        key, label = ("epsilon", "ε") if axis == "ε" else ("u", "n_max/n_min")
        what = "optimal gap" if gap else "test accuracy"
        charts, cells = [], []
        for data in kinds(mine, "data"):
            points = sorted(same(mine, data=data), key=lambda row: float(row[key]))
            names = [(f"{name}_gap" if gap else name, said) for name, said in _LINES]
            lines = [
                Series(said, [(row[key], row[name]) for row in points if row.get(name) is not None])
                for name, said in names
            ]
            charts.append(Lines(_SETS[data], lines, label, what, log_x=True, log_y=gap))
            cells += [
                (_SETS[data], row[key], *(row.get(name) for name, _ in names), row["epsilon_server"],
                 row["epsilon_proved"])
                for row in points
            ]  # fmt: skip
        fixed = f"m = {mine[0]['m']}" + ("" if axis == "ε" else f", ε = {mine[0]['epsilon']:g}")
        yield Exhibit(
            "002", f"figure {number}", f"{what.capitalize()} against {label}, {fixed}",
            "The paper prints no numbers. The printed runs claim the ε of the axis; the server's column has "
            "their true ε. Ours prove the ε of the axis.",
            charts=charts,
            columns=("data", label, *(said for _, said in _LINES), "printed: server's ε", "true: proved ε"),
            rows=cells,
        )  # fmt: skip


def second_order() -> Iterator[Exhibit]:
    """Paper 003, which has no experiments: its theorems in numbers, and its method from saddles."""
    solved, runs = results("sosp"), results("saddles")
    slopes = [
        Series(f"d = {d}", [(r["n"], r["alpha"]) for r in solved["theorem_2"] if r["d"] == d and "alpha" in r])
        for d in kinds(solved["theorem_2"], "d")
    ]
    names = ("theorem 2", "theorem 3", "lemma 7", "algorithm 4")
    for name, table in zip(names, solved["tables"], strict=True):
        charts = [Lines("α by equations (4) and (5)", slopes, "n", "α", log_x=True, log_y=True)]
        yield Exhibit(
            "003", name, table["title"], "No table or figure of the paper: its formulas in numbers.",
            charts=charts if name == "theorem 2" else (), columns=table["columns"], rows=table["rows"],
        )  # fmt: skip
    for name, table in zip(("algorithm 1", "claims", "data"), runs["tables"], strict=True):
        yield Exhibit(
            "003", name, table["title"], "No table or figure of the paper, which has no experiments.",
            columns=table["columns"], rows=table["rows"],
        )  # fmt: skip


def output_perturbation() -> Exhibit:
    """Paper 004, table 3."""
    record = results("output_perturbation")
    charts = []
    for data, mu in dict.fromkeys((row["data"], row["mu"]) for row in record["rows"]):
        lines = []
        for method in ("output perturbation", "Bassily SGD"):
            mine = same(record["rows"], data=data, mu=mu, method=method)
            for key, said in (("paper_error", "paper"), ("error_paper_noise", "printed noise"),
                              ("error_true_noise", "true noise")):  # fmt: skip
                lines.append(Series(f"{method}, {said}", [(row["epsilon"], row[key]) for row in mine]))
        charts.append(Lines(f"{data}, μ = {mu:g}", lines, "ε (δ = 1e-3)", "F(w) − min F", log_x=True, log_y=True))
    table = record["tables"][0]
    return Exhibit(
        "004", "table 3", "Error and time of output perturbation and Bassily's SGD",
        "All 40 cells of both methods, and RRPSGD, which the table has not. Printed noise has the ε beside it.",
        charts=charts, columns=table["columns"], rows=table["rows"],
    )  # fmt: skip


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
