"""What the pages of reproductions state is computed again from the result files and found in those words."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reproduce.compared import comparisons_of

from tests.docs.test_numbers import among, measured, stated

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def results(name: str, folder: str = "reproduce") -> Any:
    return json.loads((ROOT / folder / "results" / f"{name}.json").read_text(encoding="utf-8"))


DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8").replace("**", "")
         for path in [DOCS / "reproductions.md", *sorted((DOCS / "reproductions").glob("*.md"))]}  # fmt: skip
PAGE = re.sub(r"\s+", " ", " ".join(PAGES.values()))


def short(value: float, digits: int) -> str:
    """As the page prints it: no zero before the point."""
    return f"{value:.{digits}f}".removeprefix("0")


def printed_cells() -> dict[tuple[str, float], dict[str, Row]]:
    """Paper 000's tables: rows by method of each data set and ε."""
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in results("nonconvex_printed")["rows"]:
        cells.setdefault((row["data"], row["epsilon"]), {})[row["method"]] = row
    return cells


OWN = ("DP-GD", "DP-AGD", "RRPSGD", "DP-SRM", "DDP-SRM")


def behind(cell: dict[str, Row], method: str, other: str = "DP-SRM") -> float:
    """By how many standard errors ``other``'s loss is above the method's."""
    a, b = cell[other], cell[method]
    return float((a["test_loss"] - b["test_loss"]) / math.hypot(a["test_loss_se"], b["test_loss_se"]))


def of_000() -> Iterator[str]:
    cells = printed_cells()
    central = [m for m in next(iter(cells.values())) if "printed" not in m and m != "DDP-SRM"]
    assert not any(min(central, key=lambda m: cell[m]["test_loss"]) == "DP-SRM" for cell in cells.values())
    yield "DP-SRM does not have the least loss in any of the four cells"
    (few,), (many,) = ({cell[m]["searched"] for cell in cells.values()} for m in ("DP-GD", "DP-SRM"))
    yield f"DP-GD tried {few} settings where DP-SRM tried {many}"
    assert {at for at, cell in cells.items() if cell["DP-GD"]["choice"] == few - 1} == {
        ("ijcnn1", 0.2), ("ijcnn1", 0.5)
    }  # fmt: skip
    yield "its best step on ijcnn1 is the last of its list"
    assert all(abs(behind(cell, "DDP-SRM")) < 2.0 for cell in cells.values())
    yield "DDP-SRM is within two standard errors of DP-SRM everywhere"
    close = {
        (*at, m)
        for at, cell in cells.items() for m in OWN[:4]
        if abs(cell[m]["test_loss"] - cell[m]["paper"]["test_loss"])
        <= 2.0 * math.hypot(cell[m]["test_loss_se"], cell[m]["paper"]["test_loss_sd"] / math.sqrt(10))
    }  # fmt: skip
    assert close == {
        ("a9a", 0.2, "DP-AGD"), ("a9a", 0.5, "DP-AGD"), ("a9a", 0.2, "RRPSGD"), ("a9a", 0.5, "RRPSGD"),
        ("ijcnn1", 0.2, "DP-SRM"),
    }  # fmt: skip
    yield "DP-AGD and RRPSGD on a9a, DP-SRM on ijcnn1 at ε = .2"


def of_gradients() -> Iterator[str]:
    cells = printed_cells()
    for cell in cells.values():
        assert cell["DP-SRM"]["gradient_norm"] > min(cell[m]["gradient_norm"] for m in OWN[:3])
    yield "DP-SRM's is the smallest of the private methods in none of the four cells"
    ratios = {
        data: sorted(c[m]["gradient_norm"] / c[m]["paper"]["gradient_norm"]
                     for at, c in cells.items() if at[0] == data for m in OWN)
        for data in ("a9a", "ijcnn1")
    }  # fmt: skip
    assert len(ratios["a9a"]) == len(ratios["ijcnn1"]) == 10
    up, down = ratios["a9a"][1:], ratios["ijcnn1"][:-1]
    yield f"On a9a ours are {up[0]:.1f} to {up[-1]:.1f} times the printed ones in {len(up)} of 10 cells"
    yield f"on ijcnn1 they are {short(down[0], 2)} to {short(down[-1], 2)} of them in {len(down)} of 10"
    assert ratios["a9a"][0] < 1.0 < ratios["ijcnn1"][-1]
    rows = {(row["rows"], row["method"]): row for row in results("gradient_norms")["rows"]}
    still = rows["as they are", "descent without noise"]
    yield f"rows are up to {still['longest_row']:.1f} long"
    printed = rows["as they are", "DP-SRM"]["paper_gradient_norm"]
    yield f"noise at ‖∇F‖ = {short(still['gradient_norm'], 3)}, above the {short(printed, 3)} that is printed"
    ends = [short(rows["at most 1 long", m]["gradient_norm"], 3) for m in ("DP-GD", "DP-SRM")]
    yield f"DP-GD and DP-SRM reach {ends[0]} and {ends[1]}"


def of_curves() -> Iterator[str]:
    assert {cell[m]["curves"] for cell in printed_cells().values() for m in OWN[:4]} == {10}
    yield "the four methods, both ε, curves of 10 runs each"
    longest = max(cell["DP-AGD"]["curve"][-1][0] for cell in printed_cells().values())
    yield f"360 passes are the paper's, not ours, which stops after {longest:.0f} steps at most"


def of_pictures() -> Iterator[str]:
    rows = {(r["epsilon"], r["method"]): r for r in results("mnist")["table"]}
    for epsilon in (1.2, 3.0, 7.0):
        a, b = rows[epsilon, "dp-sgd"], rows[epsilon, "dp-srm"]
        apart = (b["mean_error"] - a["mean_error"]) / math.hypot(a["standard_error"], b["standard_error"])
        assert apart > 4.5
        cells = [f"{a['paper_error']:.2f}", f"{a['mean_error']:.2f} ± {short(a['standard_error'], 2)}",
                 f"{b['paper_error']:.2f}", f"{b['mean_error']:.2f} ± {short(b['standard_error'], 2)}",
                 f"{a['cpu_seconds']:.0f} / {b['cpu_seconds']:.0f}"]  # fmt: skip
        yield f"| {epsilon:g} | {' | '.join(cells)} |"
    for table in results("cifar")["tables"][:2]:
        for a, b in zip(table["rows"][::2], table["rows"][1::2], strict=True):
            yield (f"| {a[0]:g} | {a[2]:.1f} | {a[3]:.1f} ± {short(a[4], 1)} | {b[2]:.1f} | "
                   f"{b[3]:.1f} ± {short(b[4], 1)} |")  # fmt: skip


def of_more_pictures() -> Iterator[str]:
    """Panels (g) and (h): parties; and the first batch on held-out images."""
    record = results("image_parties")
    errors: dict[tuple[str, float], list[float]] = {}
    for row in record["parties"]:
        assert row["variance_factor"] == 1.0
        errors.setdefault((row["network"], row["epsilon"]), []).append(row["error"])
    assert {len(found) for found in errors.values()} == {5}
    for (network, epsilon), found in errors.items():
        said = " / ".join(f"{error:.{2 if network == 'mnist' else 1}f}" for error in found)
        yield f"{said} %{'' if network == 'mnist' else f' on {network.upper()}'} at ε = {epsilon:g}"
    fits = {(row["epsilon"], row["method"]): row for row in results("mnist")["table"]}
    for epsilon in (1.2, 3.0):  # runs of the table vary by √5 standard errors of their mean
        alone = fits[epsilon, "dp-srm"]
        worst = max(abs(error - alone["mean_error"]) for error in errors["mnist", epsilon])
        assert worst < 2.0 * 5**0.5 * alone["standard_error"]
    for network, times, error, *_ in record["tables"][1]["rows"]:
        yield f"{error:.{2 if network == 'MNIST' else 1}f} % with {times if times > 1 else ''}b"


def of_bands() -> Iterator[str]:
    """DP-SRM and DP-SGD with the same bands; no lead is stated, because their effective clips differ."""
    rows = results("bands")["tables"][0]["rows"]
    for data, epsilon, batch, ratio, bands, *values in rows:
        digits = 4 if data == "a9a" else 2
        scores = [f"{short(values[k], digits)} ± {short(values[k + 1], digits)}" for k in (0, 2)]
        clips = values[4]
        first, second = map(float, clips.split(" / "))
        assert first != second
        yield f"| {data} | {epsilon:g} | {batch} | {ratio:.1f} | {bands} | {scores[0]} | {scores[1]} | {clips} |"
    yield "No lead is stated, because effective clips differ."
    tried = {(row[0], row[1]): row[11] for row in rows}
    assert tried["a9a", 0.2] == "75 / 75"
    yield "{} settings of DP-SGD and {} of DP-SRM".format(*tried["a9a", 1.0].split(" / "))
    assert all((row[3] > 1.0) == ((row[0], row[1]) != ("a9a", 1.0)) for row in rows)


NAMES = {
    "DPageS": "stages (DPageS)", "DPageEM": "stages, early momentum (DPageEM)",
    "DP-SGD-const": "DP-SGD, constant rate",
    "DP-SGD-c/√t": "DP-SGD, c/√t", "DP-SGD-c/t": "DP-SGD, c/t", "DP-SGDM-const": "DP-SGD, constant, momentum",
    "DP-SGDEM-const": "DP-SGD, constant, early momentum",
}  # fmt: skip


def of_001() -> Iterator[str]:
    record = results("stagewise")
    cell = {(s["schedule"], s["epsilon"], s["sampling"]): s for s in record["summary"]}
    for schedule, name in NAMES.items():
        found = [cell[schedule, *at] for at in ((8.0, "poisson"), (2.0, "poisson"), (8.0, "fixed-size"))]
        said = [f"{s['mean_error']:.2f} ± {short(s['standard_error'], 2)}" for s in found]
        yield f"| {name} | {' | '.join(said)} |"

    def apart(epsilon: float, sampling: str) -> float:
        a, b = cell["DPageS", epsilon, sampling], cell["DP-SGD-const", epsilon, sampling]
        return float((a["mean_error"] - b["mean_error"]) / math.hypot(a["standard_error"], b["standard_error"]))

    verdict = comparisons_of("stagewise")[0].verdict()
    assert (verdict.kind, verdict.leader) == ("lead", "DP-SGD-const")
    assert verdict.standard_errors == pytest.approx(apart(8.0, "poisson"))
    assert 5.5 < apart(8.0, "poisson") < 6.5
    assert abs(apart(8.0, "fixed-size")) < 2.0
    assert abs(apart(2.0, "poisson")) < 2.0
    yield "where a constant rate is better by six standard errors"
    best = cell["DPageS", 8.0, "poisson"]
    yield f"multiplier {best['noise_multiplier']:.3f} under our steps and batch"
    yield f"ε = {best['epsilon_attained']:.0f} in the paper's own setting, where 8 is claimed"
    yield f"({cell['DPageS', 2.0, 'poisson']['epsilon_attained']:.0f} where 2 is)"
    yield f"twice as large ({cell['DPageS', 8.0, 'fixed-size']['noise_multiplier']:.3f})"
    resnet = results("stagewise_resnet")
    for row in resnet["tables"][0]["rows"]:
        spread = f"{row[2]:.1f}" if row[2] >= 0.95 else short(row[2], 1)
        yield f"| {NAMES[row[0]]} | {row[1]:.1f} ± {spread} |"
    yield f"these steps have ε = {resnet['tables'][0]['rows'][0][5]:.0f} in its own setting"
    looked = {name: {r["step"]: r["error"] for r in resnet["search"] if r["schedule"] == name} for name in NAMES}
    best = {name: min(tried, key=lambda step: tried[step]) for name, tried in looked.items()}
    assert all(min(tried) < best[name] < max(tried) for name, tried in looked.items())
    yield "for all seven schedules the chosen rate has tried ones on both sides"
    first, *others = resnet["tables"][0]["rows"]
    assert all(row[1] - first[1] < 2.0 * math.hypot(row[2], first[2]) for row in others)
    yield "All seven schedules are within two standard errors of the best"
    runs: dict[str, dict[float, list[float]]] = {}
    for fit in resnet["fits"]:
        runs.setdefault(fit["schedule"], {}).setdefault(fit["step"], []).append(fit["error"])
    again = {
        name: (statistics.fmean(tried[max(tried)]), statistics.fmean(tried[best[name]]))
        for name, tried in runs.items()
        if len(tried) > 1
    }
    assert {name for name, (larger, chosen) in again.items() if larger > chosen} == {"DP-SGD-c/t"}
    for name, words in (("DP-SGDM-const", "momentum"), ("DP-SGD-c/√t", "c/√t"), ("DPageS", "DPageS")):
        yield f"{words} {again[name][0]:.1f} instead of {again[name][1]:.1f}"
    yield "Only c/t errs more ({:.1f} instead of {:.1f})".format(*again["DP-SGD-c/t"])


def of_002() -> Iterator[str]:
    rows = results("weighted_average")["rows"]
    large = [r for r in rows if r["data"] in ("kddcup99", "adult", "bank-additional")]

    def ahead(name: str, other: str) -> tuple[int, int]:
        return (sum(r[name] > r[other] for r in large), sum(r[f"{name}_gap"] < r[f"{other}_gap"] for r in large))

    true, printed = ahead("iv", "unweighted"), ahead("printed_weighted", "printed_unweighted")
    yield f"ahead of the unweighted average in {true[0]} of {len(large)} points in accuracy, {true[1]} in gap"
    yield f"ahead in {printed[0]} of {len(large)} in accuracy and {printed[1]} in gap"
    wide = next(r for r in rows if (r["m"], r["epsilon"], r["axis"], r["data"]) == (32, 0.25, "ε", "adult"))
    yield f"at a claimed ε = .25 with 32 parties the server's true ε is {wide['epsilon_server']:.0f}"
    yield f"has at least {short(wide['epsilon_observer_at_least'], 2)} there"
    few = next(r for r in rows if (r["m"], r["epsilon"], r["axis"]) == (2, 0.05, "ε"))
    at_least = short(few["epsilon_observer_at_least"], 3)
    yield f"(m = 2, ε = .05: {short(few['epsilon_server'], 3)} for the server, {at_least} at least for an observer)"
    off = {e: max(abs(r["iv"] - r["central_one_shot"]) for r in large if (r["epsilon"] == 0.01) == e)
           for e in (True, False)}  # fmt: skip
    yield f"within {short(100 * off[False], 1)} points on the three large sets ({100 * off[True]:.1f} at ε = .01)"


def of_003() -> Iterator[str]:
    record = results("saddles")
    runs = {(r["loss"], r["method"]): r for r in record["saddles"]}
    losses = list(dict.fromkeys(r["loss"] for r in record["saddles"]))
    assert all(runs[name, method]["left"] == 12 for name in losses for method in ("practical", "dp-sgd"))
    yield "the practical mode leaves all five"
    refused = [name for name in losses if "refused" in runs.get((name, "derived"), {})]
    assert refused == ["matrix-sensing", "phase-retrieval", "two-layer"]
    assert runs["strict-saddle", "derived"]["stopped_by"] == {"sosp": 12}
    for name in losses:
        ours, plain = (runs[name, m]["risk_above_minimum"] for m in ("practical", "dp-sgd"))
        said = [f"{value:.0e}".replace("e-0", "e-") for value in (plain, ours)]
        named = name if name.startswith("two") else name.replace("-", " ")
        yield f"{named} {said[0]} against {said[1]}"
        assert (plain < ours) == (name != "two-layer")
    data = {(r["loss"], r["method"]): r for r in record["data"]}
    a9a = [data["a9a, nonconvex penalty", m] for m in ("practical, re-used", "dp-sgd")]
    yield " against ".join(f"{short(r['test_loss'], 3)} ± {short(r['test_loss_se'], 4)}" for r in a9a)
    for loss in ("mnist, MnistCNN2", "cifar10, CNN5"):
        yield " % against ".join(f"{data[loss, m]['mean_error']:.1f}" for m in ("practical, re-used", "dp-sgd"))
    slope = [r["slope"] for r in results("sosp")["theorem_2"] if "slope" in r]
    yield f"α falls as n^−{abs(statistics.fmean(slope)):.2f}"
    *solved, slope_in_m = results("sosp")["theorem_3"]
    yield "α is " + " / ".join(short(row["alpha"], 3) for row in solved)
    yield f"falls as m^−{abs(slope_in_m['slope']):.2f}"
    one = next(r["c"] for r in results("sosp")["noise_constants"] if r["epsilon"] == 1.0)
    yield f"c₁ = c₂ = {one:.2f} at ε = 1"


def of_004() -> Iterator[str]:
    cells: dict[tuple[str, float, float], dict[str, Row]] = {}
    for row in results("output_perturbation")["rows"]:
        cells.setdefault((row["data"], row["mu"], row["epsilon"]), {})[row["method"]] = row

    def wins(key: str) -> int:
        return sum(cell["output perturbation"][key] < cell["Bassily SGD"][key] for cell in cells.values())

    assert (len(cells), wins("paper_error")) == (40, 40)
    yield f"in {wins('error_paper_noise')} of 40 cells (the paper: {wins('paper_error')})"
    yield f"output perturbation has the smaller error in {wins('error_true_noise')} of 40"
    yield f"Bassily's SGD has the smaller error in {40 - wins('error_true_noise')} of 40 cells"
    near = [
        1
        for cell in cells.values() for method in ("output perturbation", "Bassily SGD")
        for noise in ("paper", "true")
        if abs(cell[method]["paper_error"] - cell[method][f"error_{noise}_noise"])
        <= 2.0 * cell[method][f"error_{noise}_noise_se"]
    ]  # fmt: skip
    assert not near
    yield "in no cell is the paper's error within two standard errors of ours"
    at_one = {m: [c[m]["epsilon_of_paper_noise"] for at, c in cells.items() if at[2] == 1.0]
              for m in ("output perturbation", "RRPSGD", "Bassily SGD")}  # fmt: skip
    low, high = min(at_one["output perturbation"]), max(at_one["output perturbation"])
    yield f"at ε = 1 proves ε = {low:.2f} to {high:.2f}"
    yield f"RRPSGD's {min(at_one['RRPSGD']):.2f} to {max(at_one['RRPSGD']):.2f}"
    yield f"Bassily's {statistics.median(at_one['Bassily SGD']):.2f}"
    most = max(row["cpu_seconds"] for cell in cells.values() for row in cell.values())
    yield f"at most {most:.1f} CPU seconds a fit"


def of_image_settings_at_7() -> Iterator[str]:
    """What was searched at ε = 7, where nothing was run in the end."""
    record = results("image_settings")
    assert {row["epsilon"] for row in record["search"]} == {3.0, 7.0}
    assert {row["epsilon"] for row in record["fits"]} == {3.0}
    plain, reduced = (
        [row for row in record["search"] if (row["epsilon"], row["method"]) == (7.0, method)]
        for method in ("dp-sgd", "dp-srm")
    )
    best = min(plain, key=lambda row: float(row["error"]))
    assert (best["step"], best["batch"], len(plain)) == (0.5, 512, 5)
    assert min(row["step"] for row in plain) < 0.5 < max(row["step"] for row in plain)
    assert min(row["batch"] for row in plain) < 512 < max(row["batch"] for row in plain)
    yield f"with worse ones on both sides: {best['error']:.2f} % on held-out images"
    tried = " and ".join(f"γ = {short(row['second'], 2)} errs on {row['error']:.2f} %" for row in reduced)
    yield f"DP-SRM's search did not finish: {tried}. No final run was made"
    (verdict,) = (each.verdict() for each in comparisons_of("image_settings") if "ε = 7," in each.what)
    assert verdict.kind == "not comparable"


def of_image_settings() -> Iterator[str]:
    """Figure 3 at the paper's settings, as far as it was searched."""
    record = results("image_settings")
    search = [row for row in record["search"] if row["search"] == "coordinates" and row["epsilon"] == 3.0]
    plain, reduced = ([row for row in search if row["method"] == method] for method in ("dp-sgd", "dp-srm"))
    yield f"{len(plain)} fits of DP-SGD and {len(reduced)} of DP-SRM"
    best = min(plain, key=lambda row: float(row["error"]))
    yield f"DP-SGD's best has step {short(best['step'], 1)}, b = {best['batch']} and C = {best['clip']:.1f}"
    by_gamma = {
        row["second"]: row
        for row in reduced
        if (row["step"], row["batch"], row["joint"]) == (best["step"], best["batch"], True)
    }
    assert min(by_gamma, key=lambda gamma: float(by_gamma[gamma]["error"])) == 0.99
    (wild,) = [row for row in reduced if (row["step"], row["second"]) == (0.25, 0.5)]
    (calm,) = [row for row in plain if row["step"] == 0.25 and row["clip"] == 2.0]
    yield f"{wild['error']:.1f} % where DP-SGD has {calm['error']:.2f}"
    two = {
        row["second"]: row["error"]
        for row in record["search"]
        if row["method"] == "dp-srm" and not row["joint"] and row["epsilon"] == 3.0
    }
    yield f"With the paper's two clips (step .5, γ = .5) it settles, at {two[0.5]:.2f} %"
    yield f"γ = .99 errs on {by_gamma[0.99]['error']:.2f} % (with two clips {two[0.99]:.2f}), γ = .9 on"
    yield f"γ = .9 on {by_gamma[0.9]['error']:.2f}, γ = 1 on {by_gamma[1.0]['error']:.2f}"
    assert "ε = 3," in comparisons_of("image_settings")[0].what
    assert comparisons_of("image_settings")[0].verdict().kind == "tie"
    rows = [row for row in record["tables"][1]["rows"] if row[1] == 3.0]
    reduced_row, plain_row, own = rows
    errors = [f"{row[7]:.2f} ± {short(row[8], 2)}" for row in (reduced_row, plain_row)]
    counts = [f"{row[9]:.0f} ± {row[10]:.0f}" for row in (reduced_row, plain_row)]
    yield f"a tie: {errors[0]} against {errors[1]} %, in {counts[0]} against {counts[1]} iterations to the printed"
    share = reduced_row[9] / plain_row[9]
    apart = share * math.hypot(reduced_row[10] / reduced_row[9], plain_row[10] / plain_row[9])
    assert share - 0.3 > 3.0 * apart
    yield f"it is {share:.2f} ± {short(apart, 2)}"
    assert (own[5], own[6]) == (2.2, 1)
    yield f"its own best clip, 2.2, errs on {own[7]:.2f} % by one run"
    tried = sum(row[4] for row in record["tables"][0]["rows"] if row[1] == 3.0)
    yield f"{tried} of {240 + 210} settings searched, three runs: a tie"
    rows = rows[:2]
    for row in rows:
        _, _, method, _, _, clip, runs, error, spread, count, apart, *_, seconds = row
        cells = [f"{clip:.2f}", f"{runs}", f"{error:.2f} ± {short(spread, 2)}", f"{count:.0f} ± {apart:.0f}"]
        yield f"| {method.upper()} | {' | '.join(cells)} | {seconds:.0f} |"


SAID: dict[str, Callable[[], Iterator[str]]] = {
    each.__name__: each
    for each in (
        of_000,
        of_gradients,
        of_curves,
        of_pictures,
        of_more_pictures,
        of_image_settings,
        of_image_settings_at_7,
        of_bands,
        of_001,
        of_002,
        of_003,
        of_004,
    )
}


@pytest.mark.parametrize("section", SAID)
def test_what_is_stated_is_what_the_files_say(section: str) -> None:
    missing = [words for words in SAID[section]() if words not in PAGE]
    assert not missing


FILES = {
    ("000", "Tables 2 and 3"): ("nonconvex_printed", "nonconvex_logistic", "adaptive_descent", "gradient_norms"),
    ("000", "Figure 3"): ("mnist", "image_settings"),
    ("000", "Figures 4"): ("cifar",),
    ("001", "Figure 1"): ("stagewise",),
    ("001", "Figure 2"): ("stagewise_resnet",),
    ("002", "Figures 1 to 16"): ("weighted_average",),
    ("003", "Constants"): ("saddles", "sosp"),
    ("004", "Table 3"): ("output_perturbation",),
    ("studies", "DP-SRM"): ("bands",),
}


@pytest.mark.parametrize("section", FILES, ids=": ".join)
def test_every_number_of_a_table_is_one_of_its_files(section: tuple[str, str]) -> None:
    """The catch-all: a cell that is typed wrong, or older than its file, is found."""
    page, title = section
    mine = next(part for part in re.split(r"^## ", PAGES[page], flags=re.MULTILINE) if part.startswith(title))
    pool = [number for name in FILES[section] for number in measured(results(name))]
    pool += [value / math.sqrt(10.0) for value in pool]  # the paper's deviations as standard errors
    cells = [line for line in mine.splitlines() if line.startswith("|") and not line.startswith("|---")]
    missing = [
        number for line in cells for number in stated(re.sub(r"\w-\d+", "", line)) if not among(number, pool)
    ]
    assert not missing
