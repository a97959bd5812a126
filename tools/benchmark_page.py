# ruff: noqa: E501  (the texts of pages are as wide as other pages)
"""Write docs/benchmarks.md, the README's five numbers and copied cells and sentences from the JSON files of benchmarks and reproductions.

``python tools/benchmark_page.py`` reads ``benchmarks/results`` and ``reproduce/results`` and writes them. No number is
typed: every one is a named cell of a file, rounded here. ``tests/docs/test_numbers.py`` compares what is committed with
what this script writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import network_costs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
TABLES = ROOT / "docs" / "benchmarks-tables.md"
README = ROOT / "README.md"
COMING_FROM = ROOT / "docs" / "coming-from.md"
TORCH_MORE = ROOT / "docs" / "torch-more.md"
SCALE = ROOT / "docs" / "federation-scale.md"
BEGIN, END = "<!-- numbers: python tools/benchmark_page.py -->\n", "<!-- end of numbers -->\n"


@cache
def read(name: str) -> Any:
    """A result file: ``noise`` is benchmarks/results/noise.json, ``reproduce/mnist`` is reproduce/results/mnist.json."""
    folder, _, stem = name.rpartition("/")
    return json.loads((ROOT / (folder or "benchmarks") / "results" / f"{stem}.json").read_text(encoding="utf-8"))


def short(value: float, digits: int = 3) -> str:
    """A number below one without its zero: .844."""
    return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{digits}f}"


def each(values: Iterable[float], form: str = ".3") -> str:
    """Numbers between slashes; a form that begins with a point leaves the leading zero out."""
    lean = form.startswith(".")
    return " / ".join(short(v, int(form[1:])) if lean else f"{v:{form}}" for v in values)


def file(*names: str) -> str:
    """Where numbers are kept, as the last cell of a row."""
    return ", ".join(
        f"`{(n.rpartition('/')[0] or 'benchmarks')}/results/{n.rpartition('/')[2]}.json`" for n in names
    )


def grid(columns: str, rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = [cell.strip() for cell in columns.split("|")]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- tables -----------------------------------------------------------------------------------------------------


def linear() -> list[str]:
    """The default classifier on three tables."""
    tables = read("tables_linear")["tables"]
    said = [
        each(tables[name][f"as is {e}"]["mean"] for e in ("0.2", "0.5", "1")) for name in ("a9a", "ijcnn1", "adult")
    ]
    return [
        "`PrivateLogisticRegression`, defaults, ε = 0.2 / 0.5 / 1, replace-one: a9a, ijcnn1, Adult",
        f"accuracy {', '.join(said)}",
        "24 tables and their rivals: [tables](benchmarks-tables.md)",
        file("tables_linear"),
    ]


def frontier() -> list[str]:
    """The same under add-remove, as drawn."""
    found = read("frontier")
    at = {point["epsilon"]: point["value"] for point in found["points"]}
    return [
        f"the same on a9a, ε = 0.1 / 0.2 / 0.5 / 1, {found['relation']}",
        f"accuracy {each(at[e] for e in (0.1, 0.2, 0.5, 1.0))}",
        f"without privacy {short(found['non_private'])}",
        file("frontier"),
    ]


def gaps() -> list[str]:
    """How far from the best of all."""
    found = read("tables_report")["gaps"]

    def pair(name: str) -> str:
        return f"{short(found[name]['mean'])} / {short(found[name]['worst'][0][0])}"

    return [
        "24 tables × 4 ε, gap to the best method of each cell: mean / worst",
        f"n ≥ 5000: {pair('large as is')}, with declared bounds {pair('large bounds')}; "
        f"n < 5000 with declared bounds: {pair('small bounds')}, "
        f"against rivals with the same relation {pair('small bounds, rivals under replace-one')}, "
        f"all under add-remove {pair('small bounds, add-remove')}",
        "tuned DP-GD, DP-SGD, DP-Newton; diffprivlib; DP-EBM",
        file("tables_report"),
    ]


def additive() -> list[str]:
    """Additive models against DP-EBM."""
    found = read("tables_report")["additive not behind"]

    def of(name: str) -> str:
        return f"{found[name]['not behind']} of {found[name]['of']}"

    return [
        "additive models, 20 tables × ε = 0.2 / 1 / 4: cells where quietgrad is not behind",
        f"add-remove: accuracy or R² {of('add-remove mean')}, AUC {of('add-remove auc')}; "
        f"replace-one: {of('replace-one mean')} and {of('replace-one auc')}",
        "DP-EBM under add-remove",
        file("tables_report"),
    ]


def coverage() -> list[str]:
    """Intervals of summary()."""
    cells = [cell for cell in read("table_coverage")["cells"].values() if "coverage" in cell]
    low, high = min(c["coverage"] for c in cells), max(c["coverage"] for c in cells)
    fits = [c["fits"] for c in cells]
    refused = len(read("table_coverage")["cells"]) - len(cells)
    return [
        "95 % intervals of `summary()`",
        f"cover {100 * low:.1f} to {100 * high:.1f} % ({min(fits)} to {max(fits)} fits a cell)",
        f"refused before any data in {refused} of {refused + len(cells)} cells, where ε is too small for d",
        file("table_coverage"),
    ]


def people() -> list[str]:
    """User-level privacy."""
    bike, adult = (read(f"people-{name}")["scores"] for name in ("bike", "adult"))
    group = next(name for name in bike if name.startswith("(a)"))
    one = next(name for name in bike if name.startswith("(b)"))

    def cell(name: str) -> str:
        return f"{short(bike[name]['mean'])}, {short(adult[name]['mean'], 4)}"

    return [
        "user-level privacy, ε = 1 per person: bike by day (R²), Adult by a public key (accuracy)",
        cell("by person, sum"),
        f"one record each {cell(one)}; group bound {cell(group)}",
        file("people-bike", "people-adult"),
    ]


def grouped() -> list[str]:
    """Statistics by groups beside OpenDP and diffprivlib: errors over theirs."""
    groups = read("groups")
    tasks = ("count", "count and mean", "count and two means", "count and five means")

    def ratios(peer: str) -> str:
        parts = []
        for task in tasks:
            ratio = groups[task]["ratio"][peer]
            means = [value for key, value in ratio.items() if key != "count"]
            between = each((min(means), max(means)), ".2") if len(means) > 1 else each(means, ".2")
            parts.append(f"{task} {short(ratio['count'], 2)}" + (f" and {between}" if means else ""))
        return "; ".join(parts)

    peers = groups["peers"]
    return [
        f"`describe(by=…)`, ε = 1, add-remove, Adult by education and sex ({groups['cells']} groups): error of counts, and of "
        "means (least / most), over the peer's",
        f"OpenDP: {ratios('opendp')}",
        f"diffprivlib: {ratios('diffprivlib')}. Versions: {peers['opendp']} and {peers['diffprivlib']}",
        file("groups"),
    ]


def group_coverage() -> list[str]:
    """How often intervals of 95 % hold the number, with declared bounds and without."""
    groups = read("groups")
    covered = groups["coverage"]
    declared = ", ".join(
        f"{kind} {short(covered[kind]['covered'], 2)}" for kind in ("count", "sum", "mean", "quantile", "share")
    )
    free = {name: cell for name, cell in groups["undeclared bounds"].items() if name != "repeats"}
    cut = [cell["mean of cut values"] for cell in free.values()]
    true = "; ".join(f"{name} {short(cell['mean'], 2)}" for name, cell in free.items())
    return [
        "`describe(by=…)`, ε = 1: share of intervals of 95 % that hold the number of these records",
        f"declared bounds: {declared}; without bounds, mean of the values as they are cut: {short(min(cut), 2)} to {short(max(cut), 2)}",
        f"without bounds, mean of the values before the cut: {true}",
        file("groups"),
    ]


def counts_noise() -> str:
    """The noise of one table of counts over that of discrete Laplace noise."""
    law = read("groups")["noise of one table of counts"]
    return (
        f"{100.0 * (law['ratio'] - 1.0):.0f} % (± {100.0 * law['standard error'] / law['discrete laplace']:.0f} %)"
    )


def methods() -> list[str]:
    """Every algorithm on a9a."""
    table = read("reproduce/nonconvex_logistic")["tables"][0]
    loss = {row[0]: row[2] for row in table["rows"]}
    paper = next(row[1] for row in table["rows"] if row[0] == "dp-srm")
    named = {"whitened-gd (default)": "whitened-gd, untuned", "stagewise (DPageS)": "DPageS", "dp-sgd": "DP-SGD",
             "dp-srm, joint clip": "DP-SRM with joint clip", "dp-gd": "DP-GD", "dp-srm": "DP-SRM"}  # fmt: skip
    return [
        "test loss on a9a at ε = 0.2, replace-one, settings searched on held-out rows, 20 runs",
        ", ".join(f"{words} {short(loss[name], 4)}" for name, words in named.items()),
        f"DP-SRM in its paper {short(paper, 4)}",
        file("reproduce/nonconvex_logistic"),
    ]


def scan_fit() -> list[str]:
    """Whole fits of scans, in reads of the file."""
    cells = read("scan_fit")["cells"]
    reads = each([cells[name]["reads of cpu"] for name in ("1000000x20:1", "200000x100:1")], ".1")
    large = cells["10000000x20:1"]
    return [
        "a whole default fit of a scan, 10⁶ × 20 / 2·10⁵ × 100, one thread",
        f"{reads} reads of CPU time; with two threads {cells['1000000x20:2']['reads of cpu']:.1f} for the first; "
        f"10⁷ × 20 within 400 MB {large['reads of cpu']:.1f} reads, {large['fit cpu']:.0f} s",
        "one pyarrow read of the file",
        file("scan_fit"),
    ]


def anomalies() -> list[str]:
    """Heavy tails by declaration, and a tiny table against its constant."""
    cells = read("table_anomalies")["cells"]
    areas = [
        each([cells[f"heavy, ε = {epsilon}, {name}"]["mean"] for epsilon in ("0.2", "1", "4")], ".3")
        for name in ("declared", "undeclared")
    ]
    least = min(cell["mean"] for name, cell in cells.items() if "Regressor, ε = 4" in name or "sion, ε = 4" in name)
    return [
        "heavy tails, 14 000 rows, 2 to 3 % positive: AUC at ε = 0.2 / 1 / 4; Hedonic, 354 rows: R² above the constant, ε = 4",
        f"bounds declared {areas[0]}, undeclared {areas[1]}; Hedonic: the worst of four estimators and two declarations {least:.2f}",
        f"without privacy, as it is {cells['heavy, no privacy, as they are']['mean']:.3f}, "
        f"tails cut {cells['heavy, no privacy, cut']['mean']:.3f}",
        file("table_anomalies"),
    ]


def regression_tables() -> list[str]:
    """Regression tables of packages."""
    result = read("regression_tables")
    number = len(result["tables"])
    counts = {name: round(share * number) for name, share in result["share with R² > 0"].items()}
    own = f"linear {counts['linear']}, additive {counts['additive']}"
    peers = ", ".join(f"{name} {counts[name]}" for name in ("AdaSSP", "diffprivlib"))
    return [
        f"{number} regression tables of packages, ε = 1: how many have a median R² > 0",
        own,
        f"{peers} (the first written by us after its paper)",
        file("regression_tables"),
    ]


def scan() -> list[str]:
    """Tables beyond memory."""
    rate, cluster = read("scan")["rate"], read("scan")["cluster"]
    share = [rate[f"threads {k}"]["share_of_pyarrow"]["wall, of its faster way"] for k in (1, 2)]
    return [
        f"a gradient pass over {rate['rows']:.0e} × {rate['columns']} numbers in Parquet, 1 / 2 threads".replace(
            "e+06", "·10⁶"
        ),
        f"{each(share, '.2')} of pyarrow's read rate; {rate['speedup_two_cores']:.2f}× from one core to two, "
        f"memory grows by {rate['memory_growth_mb']:.0f} MB; on Dask {cluster['overhead_ms']:.0f} ms more a release",
        "pyarrow, same threads",
        file("scan"),
    ]


# ---- networks ---------------------------------------------------------------------------------------------------

NETWORKS = ("mnist-cnn4", "cnn5", "resnet20", "transformer")


def engine(method: str, form: str = ".2f") -> str:
    """Step time over plain SGD's."""
    models = read("torch_engine")["models"]
    return each((models[name]["methods"][method]["ratio_to_sgd"] for name in NETWORKS), form)


def batches(name: str, models: tuple[str, ...]) -> str:
    """The batch size of each of these models in a result file."""
    return "B = " + " / ".join(str(read(name)["models"][model]["batch"]) for model in models)


def steps() -> list[list[str]]:
    """Engine and whole steps."""
    whole = read("torch_steps")["models"]

    def through(method: str) -> str:
        return each((whole[name]["ratio_to_sgd"][method] for name in NETWORKS[:3]), "4.2f")

    return [
        [
            "whole DP-SGD step ÷ plain SGD step, sampling and secure noise included, 1 thread: MNIST CNN / CNN5 / ResNet-20, "
            f"{batches('torch_steps', NETWORKS[:3])}",
            f"{through('dp-sgd')}; a custom loop {through('own-loop')}; DP-SRM {through('dp-srm')}",
            f"Opacus 1.6 hooks {through('opacus')}, ghost {through('opacus-ghost')}",
            file("torch_steps"),
        ],
        [
            "clipped sum, noise and update alone ÷ plain SGD step: MNIST CNN / CNN5 / ResNet-20 / transformer, "
            f"{batches('torch_engine', NETWORKS)}",
            engine("quietgrad dp-sgd, secure noise", "4.2f"),
            f"Opacus 1.6 hooks {engine('opacus dp-sgd', '4.2f')}, ghost {engine('opacus ghost dp-sgd', '4.2f')}",
            file("torch_engine"),
        ],
        [
            "the same for DP-SRM",
            engine("quietgrad dp-srm", "4.2f"),
            f"two Opacus passes {engine('opacus dp-srm', '3.1f')}",
            file("torch_engine"),
        ],
    ]


def mnist() -> list[str]:
    """The CNN of the DP-SRM paper."""
    table = read("reproduce/mnist")["table"]
    ours = {
        m: each((row["mean_error"] for row in table if row["method"] == m), "4.2f") for m in ("dp-sgd", "dp-srm")
    }
    paper = each((row["paper_error"] for row in table if row["method"] == "dp-srm"), "4.2f")
    eps = each((row["epsilon"] for row in table if row["method"] == "dp-sgd"), "g")
    return [
        f"MNIST, 4-layer CNN, add-remove, ε = {eps}, five runs",
        f"test error in %: DP-SGD {ours['dp-sgd']}, DP-SRM {ours['dp-srm']}",
        f"DP-SRM in its paper {paper}",
        file("reproduce/mnist"),
    ]


def bands() -> list[str]:
    """Correlated noise on Poisson samples."""
    rows = [row for row in read("network_noise")["tables"][0]["rows"] if row[0] == "bands"]

    def of(method: str) -> str:
        return each((row[4] for row in rows if row[3] == method), "4.2f")

    return [
        "small CNN on MNIST, correlated noise in bands on Poisson samples, ε = 2 / 8, five runs",
        f"test error in %: 4 bands {of('4 bands')}, 16 bands {of('16 bands')}",
        f"independent noise {of('1 bands')}",
        file("network_noise"),
    ]


def pictures() -> list[str]:
    """Scattering features."""
    table = read("pictures")["table"]
    words = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
    said = []
    for data, name in words.items():
        rows = sorted((row for row in table if row["data"] == data), key=lambda row: row["epsilon"])
        eps = each((row["epsilon"] for row in rows), "g")
        said.append(f"{name} at ε = {eps}: " + " / ".join(
            f"{row['test_accuracy']:.2f} ± {short(row['standard_error'], 2)}" for row in rows))  # fmt: skip
    return [
        "linear models on scattering features, five runs",
        f"test accuracy in %: {'; '.join(said)}",
        "",
        file("pictures"),
    ]


def dense() -> list[str]:
    """Ten classes on dense rows."""
    rows = read("dense_classes")["rows"]
    return [
        f"DP-SGD step with ten classes, {each((r['features'] for r in rows), 'd')} features, "
        f"batches of {each((r['batch'] for r in rows), 'd')}",
        f"{each((r['ratio'] for r in rows), '.2')} of the time",
        "the same arithmetic in plain torch, float32",
        file("dense_classes"),
    ]


def wide() -> list[str]:
    """Wide features, ten classes."""
    cells = read("wide_classes")["cells"]

    def best(table: str, name: str) -> float:
        return max(float(cell["accuracy"]) for key, cell in cells.items() if key.startswith(f"{table}, {name}"))

    at = "cifar10-1792, ε = 3"
    own = f"untuned {short(best(at, 'untuned'))}, whitened by public photographs {short(best(at, 'public'))}"
    peers = f"best of the rates tried, by test accuracy: DP-SGD {short(best(at, 'DP-SGD'))}, DP-Adam {short(best(at, 'DP-Adam'))}"
    return [
        "ten classes, 1792 random features of CIFAR-10, ε = 3",
        f"test accuracy {own}; without privacy {short(best('cifar10-1792', 'no privacy'))}",
        peers,
        file("wide_classes"),
    ]


# ---- parties ----------------------------------------------------------------------------------------------------


def cohorts() -> list[list[str]]:
    """Ten parties on a9a."""
    rows = read("reproduce/cohorts")["tables"][0]["rows"]

    def of(how: str, sums: str | None, noise: str, eps: tuple[float, ...] = (0.2, 0.5, 1.0)) -> str:
        at = {row[0]: row[4] for row in rows if row[1:4] == [how, sums, noise]}
        return each((at[e] for e in eps), ".4")

    return [
        [
            "ten parties, 64 cohorts in turn, secure sums by masks, a9a at ε = 0.2 / 0.5 / 1, five runs",
            f"test loss with correlated noise {of('turns', 'masks', 'correlated')}; "
            f"by two servers {of('turns', 'servers', 'correlated')}",
            f"independent noise {of('turns', 'masks', 'independent')}; a trusted curator with secret Poisson samples "
            f"at ε = 1 {of('poisson', None, 'independent', (1.0,))}",
            file("reproduce/cohorts"),
        ],
        [
            "the same, every record used once, DDP-SRM",
            of("pass", "masks", "correlated"),
            f"independent noise {of('pass', 'masks', 'independent')}",
            file("reproduce/cohorts"),
        ],
    ]


def equality() -> list[str]:
    """Parties against one table, by who adds the noise."""
    rows = read("federation")["equality"]
    errors = sorted(row["standard_error"] for row in rows)

    def worst(trust: str) -> float:
        return max(abs(row["in_standard_errors"]) for row in rows if row["trust"] == trust)

    def factor(trust: str) -> float:
        return float(next(row["variance_factor"] for row in rows if row["trust"] == trust))

    return [
        f"DDP-SRM with {rows[0]['parties']} parties against DP-SRM on a9a and ijcnn1, same ε, {rows[0]['steps']} steps, "
        f"{rows[0]['seeds']} seeds: noise by a curator / masks / two servers, of variance 1 / {factor('masks'):.2f} / "
        f"{factor('servers'):.0f}",
        "test losses within "
        + " / ".join(f"{worst(trust):.2f}" for trust in ("curator", "masks", "servers"))
        + f" standard errors, which are {errors[0]:.4f} to {errors[-1]:.4f}",
        "one table",
        file("federation"),
    ]


def secure() -> list[str]:
    """One secure sum between processes."""
    rows = {row["mode"]: row for row in read("secure")["rows"] if row["dimension"] == 62006}
    said = " / ".join(f"{rows[mode]['seconds']:.3f}" for mode in ("masks", "servers", "mpc"))
    return [
        "secure sum with noise inside, 5 parties over sockets, 62 006 numbers: masks / servers / mpc",
        f"{said} s",
        f"the DP-SRM paper's Yao circuits: {rows['masks']['paper_seconds']:.0f} s",
        file("secure"),
    ]


def masked(mode: str, parties: int) -> dict[str, Any]:
    """A row of the scaling benchmark at 1000 numbers."""
    found: dict[str, Any] = next(
        row
        for row in read("secure_scale")["rows"]
        if (row["mode"], row["parties"], row["dimension"]) == (mode, parties, 1000)
    )
    return found


def thousand() -> list[str]:
    """A masked sum of 1000 parties."""
    ours, theirs, like = (
        masked("masks", 1000)["round"],
        masked("Flower SecAgg+", 300)["round"],
        masked("masks", 300),
    )
    with_setup = {k: like["round"][k] + like["set_up"][k] for k in ("cpu_seconds_party", "cpu_seconds_server")}
    return [
        "masked sum of 1000 parties, a tenth dropping, 1000 numbers: CPU of a party / of the server",
        f"{1e3 * ours['cpu_seconds_party']:.1f} ms / {ours['cpu_seconds_server']:.2f} s",
        f"Flower 1.41 SecAgg+ at 300 parties: {1e3 * theirs['cpu_seconds_party']:.0f} ms / "
        f"{theirs['cpu_seconds_server']:.0f} s (quietgrad at 300, key set-up included: "
        f"{1e3 * with_setup['cpu_seconds_party']:.0f} ms / {with_setup['cpu_seconds_server']:.2f} s)",
        file("secure_scale"),
    ]


def rounds() -> list[str]:
    """Rounds between real processes."""
    rows = read("federation_network")["rows"]

    def cpu(engine: str) -> str:
        return each((1e3 * row["cpu_seconds_per_round"] for row in rows if row["engine"] == engine), "1.0f")

    stock = each((row["seconds_per_round"]["flower, no TLS"] for row in read("federation_flower")["rows"]), "3.1f")
    lost = sum(row["lost_rounds"] for row in rows)
    return [
        "rounds of five processes, 123 / 26 010 / 10⁶ numbers: CPU of all processes together",
        f"TLS 1.3: {cpu('tls')} ms; on FLARE with mTLS: {cpu('flare')} ms; on Flower with TLS, 123 numbers: {cpu('flower')} ms; "
        f"{lost} rounds lost",
        f"stock Flower 1.41 without TLS: {stock} s",
        file("federation_network", "federation_flower"),
    ]


# ---- accounting -------------------------------------------------------------------------------------------------


def calibration() -> list[str]:
    """Calibration against dp-accounting."""
    found = read("accounting")
    ours, theirs = found["cpu_seconds"]["quietgrad cold"], found["cpu_seconds"]["dp-accounting"]
    return [
        f"noise for {found['setting']['steps']} Poisson steps at ε = {found['setting']['epsilon']}",
        f"{ours:.3f} s CPU",
        f"dp-accounting, same grid: {theirs:.1f} s ({found['times_faster']['cold']:.0f}×)",
        file("accounting"),
    ]


def normals() -> list[str]:
    """Secure noise."""
    return [
        "cryptographic normals, 10⁶",
        f"{read('noise')['normals']['time_over_numpy']:.1f}× the time",
        "numpy PCG64",
        file("noise"),
    ]


def audits() -> list[str]:
    """Audits of DP-SRM."""
    stages = read("audit")["stages"]
    half = next(row for row in stages["power"]["numbers"] if row["noise"] == 0.5)
    false = stages["false-alarms"]["numbers"]["dp-srm"]
    return [
        f"audit of DP-SRM, {half['runs']} runs",
        f"finds half the noise in {half['caught']} of {half['audits']}, {half['median CPU seconds per audit']:.2f} s each; "
        f"{false['false alarms']} false alarms in {false['audits']}",
        "",
        file("audit"),
    ]


def saddles() -> list[str]:
    """Escapes from a strict saddle."""
    rows = [row for row in read("sosp")["escapes"] if row["method"] == "perturbed-sgd"]
    right = sum(round(row["runs"] * row["said_sosp_and_is"]) for row in rows)
    none = [row["escaped"] for row in read("sosp")["escapes"] if row["method"] == "gd without noise"]
    return [
        f"started at a strict saddle, d = {each((row['d'] for row in rows), 'd')}, {rows[0]['runs']} runs each",
        f"perturbed SGD escapes and states so correctly in {right} of {sum(row['runs'] for row in rows)}",
        f"gradient descent without noise: {sum(none)} of {len(none)}",
        file("sosp"),
    ]


# ---- pages ------------------------------------------------------------------------------------------------------

COLUMNS = "what | quietgrad | beside it | file"


def page() -> str:
    """docs/benchmarks.md."""
    return f"""# Benchmarks

All measured numbers of quietgrad in one place, with what they are compared with. Each row names the JSON file that
holds the command, versions, machine and date. To look at one:

```
python -m json.tool benchmarks/results/accounting.json
```

`tools/benchmark_page.py` writes this page from those files, and a test fails if the two differ. Ratios are taken within one
run. δ = 10⁻⁵ unless a row says otherwise. More detail: [tables and rivals](benchmarks-tables.md),
[peers side by side](peers.md), [federation at scale](federation-scale.md), [correlated noise](correlated-results.md),
[audits](audit-results.md), [paper reproductions](reproductions.md).

## Tables

{grid(COLUMNS, [linear(), frontier(), gaps(), additive(), coverage(), people(), grouped(), group_coverage(), methods(), regression_tables(), anomalies(), scan(), scan_fit()])}

## Networks and images

{grid(COLUMNS, [*steps(), mnist(), bands(), pictures(), dense(), wide()])}

## Many parties

{grid(COLUMNS, [*cohorts(), equality(), secure(), thousand(), rounds()])}

## Accounting, noise, audits

{grid(COLUMNS, [calibration(), normals(), audits(), saddles()])}

## Models that users train

A private step ÷ a plain SGD step. Models are small random configurations with 110 000 to 660 000 parameters
(ResNet-18: 11 million), one thread, CPU time. Images are 64 × 64, texts have 48 tokens. **The batch size matters.** Noise and
sums cost the same per parameter, so smaller batches, smaller inputs and larger models cost relatively more. Two runs on one
machine differ by up to a fifth. Texts of different lengths take different branches of a model, so their step is several smaller
passes. ResNet-18 draws noise for 11 million numbers. Opacus draws its noise by torch.randn, which is cheaper and not
cryptographic.

{network_costs.zoo(read, grid, file)}

## Memory of a step

Peak memory of a whole step over a plain SGD step's, each in a process of its own ({file("memory_steps")}). The goal is
{network_costs.MEMORY:g} for DP-SGD.

{network_costs.memory(read, grid)}

## Where quietgrad loses

- Below 5000 rows with small ε, and under replace-one, tuned DP-SGD is ahead ([tables](benchmarks-tables.md)).
- On ijcnn1 with a nonconvex regulariser, tuned DP-SGD beats the default.
- DP-SRM beats DP-SGD only where its clipping makes it nearly the same method.
- One table of counts alone has {counts_noise()} more noise at ε = 1 than OpenDP's discrete Laplace noise. quietgrad's
  Laplace noise is continuous, which is 4 %, and the private number of records takes 1 % of ε ({file("groups")}).
- Means of heavy tails without declared bounds: the range that is found cuts the tail. The interval is for the mean
  after this cut.
{chr(10).join(f"- {sentence}" for sentence in network_costs.losses(read, file))}

```{{toctree}}
:hidden:

benchmarks-tables
peers
federation-scale
correlated-results
audit-results
reproductions
```
"""


def tables() -> str:
    """docs/benchmarks-tables.md."""
    report = read("tables_report")
    found = report["gaps"]

    def pair(name: str) -> str:
        worst = found[name]["worst"][0]
        table, _, epsilon = worst[1].rpartition(" ")
        return f"{short(found[name]['mean'])} / {short(worst[0])} ({table} at ε = {epsilon})"

    same = ", rivals under replace-one"
    rows = [
        ["n ≥ 5000, nothing declared", pair("large as is"), pair("large as is" + same)],
        ["n ≥ 5000, declared bounds", pair("large bounds"), pair("large bounds" + same)],
        ["n < 5000, declared bounds", pair("small bounds"), pair("small bounds" + same)],
        ["n < 5000, declared bounds, all under add-remove", pair("small bounds, add-remove"), "the same rivals"],
        ["n < 5000, nothing declared", pair("small as is"), pair("small as is" + same)],
    ]
    behind = report["additive not behind"]

    def lost(name: str) -> str:
        cells = "; ".join(f"{cell} by {short(gap)}" for gap, cell in sorted(behind[name]["behind"], reverse=True))
        return f"{behind[name]['not behind']} of {behind[name]['of']}" + (f" (behind: {cells})" if cells else "")

    return f"""# Benchmarks: tables and rivals

How good the estimators are on 24 tables without tuning, and where they lose. `python benchmarks/tables.py report` makes
the numbers; `tools/benchmark_page.py` writes this page from `benchmarks/results/tables_report.json`. To try one cell:

```python
from quietgrad.estimators import PrivateLogisticRegression

model = PrivateLogisticRegression(epsilon=0.5, delta=1e-5, relation="replace-one", classes=[0, 1]).fit(X, y)
```

## Linear models

Each cell is accuracy (R² for regressions) on test rows: nothing declared / with declared bounds / the best rival.
Rivals are DP-GD, DP-SGD and DP-Newton on features scaled by the declared bounds, their settings searched on held-out rows
without charge; diffprivlib, its C searched alike; and DP-EBM as it comes. Classes are declared, δ = 10⁻⁵, replace-one.
DP-SGD and DP-EBM hold under add-remove only, where the same ε allows half the noise. Cells they win are therefore not like
for like; the second table compares by relation.

{chr(10).join(report["table"])}

Gap to the best method of each cell, mean / worst:

{grid("tables | all rivals | rivals with the same relation", rows)}

Raw numbers: {file("tables_linear", "tables_rival", "tables_peers")}. All cells of quietgrad were measured with
today's rules; those of the rivals and peers, which did not change, are a day older.

**Where it is bad.** At ε = 0.2 with fewer than a thousand rows and no declared bounds, little more than the majority class
is learnt. A regression of a few hundred rows is level with the mean at best. Ten classes in 1437 rows (digits) need ε ≥ 1
under replace-one. Text with 20 000 words loses words that are informative but rare. On small tables the relation decides:
under replace-one the noise is twice that of add-remove.

## Additive models

Accuracy / AUC (or R²) with declared bounds: quietgrad under replace-one – quietgrad under add-remove – DP-EBM of interpret
0.7.8 under add-remove, the only relation it offers (3 fits, or 10 of quietgrad on small tables; same bounds and δ).

{chr(10).join(report["additive"])}

Cells in which quietgrad is at least level with DP-EBM, to three digits:

- add-remove, accuracy or R²: {lost("add-remove mean")}
- add-remove, AUC: {lost("add-remove auc")}
- replace-one, accuracy or R²: {lost("replace-one mean")}
- replace-one, AUC: {lost("replace-one auc")}
"""


def numbers() -> str:
    """The README's five rows."""
    front = frontier()
    shapes, sums = additive(), thousand()
    rows = [
        [front[0].replace("the same on a9a", "`PrivateLogisticRegression` on a9a, untuned"), *front[1:3]],
        [shapes[0], shapes[1].partition(";")[0], shapes[2]],
        steps()[0][:3],
        calibration()[:3],
        [*sums[:2], sums[2].partition(" (")[0]],
    ]
    return grid("what | quietgrad | beside it", rows) + "\n"


def readme() -> str:
    """The README with its numbers made anew."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + numbers() + END + rest.partition(END)[2]


def coming_from() -> str:
    """docs/coming-from.md with its sentence about whole steps and the cells of its table about Flower made anew."""
    sums, network = thousand(), rounds()
    party, _, server = sums[1].partition(" / ")
    own = network[1].partition(";")[0].removeprefix("TLS 1.3: ")
    sizes = network[0].partition(", ")[2].partition(" numbers")[0]
    cells = {
        "`SecAggPlusWorkflow`": f'`secure="masks"`, with noise made inside; 1000 parties, a tenth dropping: {party} of a party, '
        f"{server} of the server ({file('secure_scale')})",
        "rounds over gRPC": f"rounds of {own} of CPU, of all processes together, for {sizes} numbers with TLS 1.3; or on "
        f"your Flower, [as an app](flower.md) ({file('federation_network')})",
    }
    text = network_costs.with_sentence(
        COMING_FROM.read_text(encoding="utf-8"), network_costs.STEPS_PATTERN, network_costs.steps_sentence(read)
    )
    for name, cell in cells.items():
        text, made = re.subn(
            rf"^\| {re.escape(name)} \| .* \|$", lambda _, n=name, c=cell: f"| {n} | {c} |", text, flags=re.M
        )
        assert made == 1, f"{COMING_FROM}: has no row {name!r}"
    return text


def between_processes() -> str:
    """Rounds between processes: the table of docs/federation-scale.md, and how it was measured."""
    results = read("federation_network")
    engines = {
        "tls": "own TLS 1.3",
        "flare": "FLARE 2.9, mutual TLS",
        "flower": "Flower 1.41, TLS, node authentication",
    }

    def seconds(value: float) -> str:
        return f"{1e3 * value:.0f} ms" if value < 1.0 else f"{value:.2f} s"

    rows = sorted(results["rows"], key=lambda row: (row["d"], list(engines).index(row["engine"])))
    table = [
        [
            str(row["d"]), engines[row["engine"]], seconds(row["cpu_seconds_per_round"]),
            seconds(row["seconds_per_round"]), str(row["rounds"]), f"{row['load']:g}",
        ]
        for row in rows
    ]  # fmt: skip
    lost = sum(row["lost_rounds"] for row in rows)
    return (
        f"CPU is that of all processes together. {lost} rounds were lost ({file('federation_network')}):\n\n"
        + grid("numbers | transport | CPU | wall | rounds | load", table)
        + "\n"
    )


def scale() -> str:
    """docs/federation-scale.md with its table of rounds made anew."""
    before, _, rest = SCALE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + between_processes() + END + rest.partition(END)[2]


def torch_more() -> str:
    """docs/torch-more.md with what a recorded program could save."""
    return network_costs.with_sentence(
        TORCH_MORE.read_text(encoding="utf-8"), network_costs.REPLAY_PATTERN, network_costs.replay(read)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    TABLES.write_text(tables(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    COMING_FROM.write_text(coming_from(), encoding="utf-8")
    TORCH_MORE.write_text(torch_more(), encoding="utf-8")
    SCALE.write_text(scale(), encoding="utf-8")
