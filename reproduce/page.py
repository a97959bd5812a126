"""The page of reproductions with pictures: ``docs/reproductions.md`` and ``reproduce/results`` in one HTML file.

    quietgrad reproduce page                       # or: python reproduce/page.py [FILE]

The text is that of the documentation; a line ``<!-- picture: name -->`` in it becomes a picture drawn from the
result files. Nothing is fetched when the page is opened. Colours are those of Okabe and Ito, which people with any
kind of colour vision can tell apart, and every line has a marker of its own; axes and letters take the page's own
colour, so that one picture serves light and dark.
"""

from __future__ import annotations

import html
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6d31")
MARKERS = "osD^vPX"
INK = "#0a0b0c"  # replaced by the page's colour
Picture = tuple[Figure, str]
LOOK: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quietgrad",
    "font.size": 9,
    "legend.framealpha": 0.0,
    "legend.loc": "upper right",  # "best" warns when it takes long
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1b1f; --paper: #ffffff; --soft: #f2f2f5; --line: #c9c9d1; --link: #0b57a4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6ea; --paper: #16161a; --soft: #222228; --line: #45454f; --link: #8ab8f0 } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
a { color: var(--link) } code { background: var(--soft); padding: 0 .2em; overflow-wrap: anywhere }
pre { background: var(--soft); padding: .7rem; overflow-x: auto } pre code { overflow-wrap: normal; padding: 0 }
td code { overflow-wrap: normal; white-space: nowrap } td:last-child { min-width: 7rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .87rem; margin: .6rem 0 }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top }
th { background: var(--soft) } figure { margin: 1.2rem 0 }
figure svg { width: 100%; height: auto; color: var(--ink) }
figcaption { font-size: .87rem }
"""


def results(name: str, folder: str = "reproduce") -> dict[str, Any] | None:
    """What a script left, or nothing if it has not been run."""
    path = ROOT / folder / "results" / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def axes(number: int, titles: list[str], rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Some panels side by side in the page's ink."""
    columns = number // rows
    figure = Figure(figsize=(4.2 * columns, 3.5 * rows))
    panels = [panel for line in figure.subplots(rows, columns, squeeze=False) for panel in line]
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.25, linewidth=0.6)
    return figure, panels


def band(panel: Axes, at: int, x: Any, y: Any, spread: Any, label: str) -> None:
    """A line with its error band."""
    x, y, spread = (np.asarray(v, float) for v in (x, y, spread))
    colour = COLOURS[at % len(COLOURS)]
    panel.plot(x, y, color=colour, marker=MARKERS[at % len(MARKERS)], markersize=4, linewidth=1.4, label=label)
    panel.fill_between(x, y - spread, y + spread, color=colour, alpha=0.18, linewidth=0)


def convergence() -> Picture | None:
    """Paper 000, figures 1 and 2."""
    record = results("nonconvex_printed")
    rows = [row for row in record["rows"] if len(row["curve"]) > 3 and row["curves"] > 3] if record else []
    cells = list(dict.fromkeys((row["data"], row["epsilon"]) for row in rows))
    cells = [cell for cell in cells if sum((row["data"], row["epsilon"]) == cell for row in rows) > 2]
    if not cells:
        return None
    titles = [f"{data}, ε = {e:g}: {what}" for what in ("objective", "gradient norm") for data, e in cells]
    figure, panels = axes(2 * len(cells), titles, rows=2)
    for column, cell in enumerate(cells):
        for at, row in enumerate(row for row in rows if (row["data"], row["epsilon"]) == cell):
            mean, spread = np.array(row["curve"]), np.array(row["curve_sd"])
            for which in (1, 2):
                panel = panels[column + (which - 1) * len(cells)]
                band(panel, at, mean[:, 0], mean[:, which], spread[:, which], row["method"])
                panel.set_xlabel("passes over the data")
    panels[0].legend(fontsize=8)
    said = "; ".join(
        f"{r['method']} ends at {r['curve'][-1][1]:.3f}" for r in rows if (r["data"], r["epsilon"]) == cells[0]
    )
    told = (
        f"Training objective and gradient norm against passes, mean of 10 runs with one standard deviation. {said}."
    )
    return figure, told


def mnist() -> Picture | None:
    """Paper 000, figure 3."""
    record = results("mnist")
    if record is None:
        return None
    figure, (panel,) = axes(1, ["MNIST, 4-layer CNN"])
    told = []
    for at, method in enumerate(("dp-sgd", "dp-srm")):
        rows = [row for row in record["table"] if row["method"] == method]
        x = [row["epsilon"] for row in rows]
        y, spread = [row["mean_error"] for row in rows], [2 * row["standard_error"] for row in rows]
        band(panel, at, x, y, spread, f"{method}, ours (± 2 se)")
        panel.plot(
            x,
            [row["paper_error"] for row in rows],
            color=COLOURS[at],
            linestyle=":",
            marker=MARKERS[at],
            fillstyle="none",
            label=f"{method}, paper",
        )
        told += [
            f"{method} at ε = {row['epsilon']:g}: {row['mean_error']:.2f} %, paper {row['paper_error']} %"
            for row in rows
        ]
    panel.set(xlabel="ε (δ = 1e-5)", ylabel="test error, %", ylim=(0, None))
    panel.legend(fontsize=8)
    return figure, "Test error against ε. " + "; ".join(told) + "."


def cifar() -> Picture | None:
    """Paper 000, figures 4 and 5."""
    record = results("cifar")
    if record is None or not record["tables"]:
        return None
    figure, panels = axes(len(record["tables"]), [table["title"] for table in record["tables"]])
    for panel, table in zip(panels, record["tables"], strict=True):
        for at, method in enumerate(("dp-sgd", "dp-srm")):
            rows = [row for row in table["rows"] if row[1] == method]
            band(
                panel,
                at,
                [r[0] for r in rows],
                [r[3] for r in rows],
                [2 * (r[4] or 0) for r in rows],
                f"{method}, ours",
            )
            panel.plot(
                [r[0] for r in rows],
                [r[2] for r in rows],
                color=COLOURS[at],
                linestyle=":",
                marker=MARKERS[at],
                fillstyle="none",
                label=f"{method}, paper",
            )
        panel.set(xlabel="ε (δ = 1e-5)", ylabel="test error, %", ylim=(0, 100))
        panel.legend(fontsize=8)
    return figure, "CIFAR-10 test error against ε, ours after few epochs and the paper's."


def stagewise() -> Picture | None:
    """Paper 001, figure 1."""
    record = results("stagewise")
    if record is None:
        return None
    figure, (panel,) = axes(1, ["MNIST, 2-layer CNN, ε = 8, Poisson samples"])
    fits = [r for r in record["fits"] if r["epsilon"] == 8.0 and r["sampling"] == "poisson" and r.get("curve")]
    told = []
    for at, schedule in enumerate(dict.fromkeys(row["schedule"] for row in fits)):
        runs = np.array([row["curve"] for row in fits if row["schedule"] == schedule])
        if len(runs) < 2:
            continue
        errors = runs[:, :, 1]
        band(panel, at, runs[0, :, 0], errors.mean(0), errors.std(0, ddof=1) / len(runs) ** 0.5, schedule)
        told.append(f"{schedule} {errors[:, -1].mean():.2f} %")
    if not told:
        return None
    panel.set(xlabel="steps of 512 images", ylabel="test error, %", yscale="log")
    panel.legend(fontsize=8)
    words = "Test error against steps, mean of the runs whose curve was kept, with one standard error; at the end "
    return figure, f"{words}{', '.join(told)}."


def parties() -> Picture | None:
    """Paper 002: accuracy against ε and against the number of parties."""
    record = results("weighted_average")
    if record is None:
        return None
    names = {"kddcup99": "KDD Cup 99", "adult": "Adult", "bank-additional": "Bank"}
    figure, panels = axes(3, [f"{name}, 32 parties" for name in names.values()])
    lines = (
        ("printed_weighted", "WD-DP as printed"),
        ("printed_unweighted", "unweighted as printed"),
        ("iv", "(iv), true ε"),
        ("unweighted", "unweighted, true ε"),
        ("central_dp_gd", "DP-GD, one place"),
    )
    told = []
    for panel, data in zip(panels, names, strict=True):
        rows = [r for r in record["rows"] if r["data"] == data and r["axis"] == "ε" and r["m"] == 32]
        rows.sort(key=lambda row: float(row["epsilon"]))
        for at, (key, label) in enumerate(lines):
            band(panel, at, [r["epsilon"] for r in rows], [r[key] for r in rows], [0.0] * len(rows), label)
        panel.set(xlabel="ε claimed, or proved", xscale="log")
        told.append(
            f"{names[data]} at ε = {rows[-1]['epsilon']:g}: (iv) {rows[-1]['iv']:.3f}, "
            f"unweighted {rows[-1]['unweighted']:.3f}"
        )
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(fontsize=8, loc="lower right")
    return figure, "Test accuracy against ε with 32 uneven parties. " + "; ".join(told) + "."


def unevenness() -> Picture | None:
    """Paper 002: accuracy against u, and against m at ε = 0.05."""
    record = results("weighted_average")
    rows = [r for r in record["rows"] if r["data"] == "adult"] if record else []
    over_u = sorted((r for r in rows if r["axis"] == "u" and r["m"] == 16), key=lambda r: float(r["u"]))
    over_m = sorted((r for r in rows if r["axis"] == "ε" and r["epsilon"] == 0.05), key=lambda r: int(r["m"]))
    panels_of = [(over_u, "u", "n_max/n_min (16 parties)"), (over_m, "m", "parties m")]
    panels_of = [each for each in panels_of if len(each[0]) > 1]
    if not panels_of:
        return None
    figure, panels = axes(len(panels_of), ["Adult, ε = 0.05"] * len(panels_of))
    lines = (
        ("printed_weighted", "WD-DP as printed"),
        ("printed_unweighted", "unweighted as printed"),
        ("iv", "(iv), true ε"),
        ("unweighted", "unweighted, true ε"),
    )
    for panel, (mine, key, label) in zip(panels, panels_of, strict=True):
        for at, (name, text) in enumerate(lines):
            band(
                panel,
                at,
                [r[key] for r in mine],
                [r[name] for r in mine],
                [r.get(f"{name}_se", 0.0) for r in mine],
                text,
            )
        panel.set_xlabel(label)
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(fontsize=8, loc="lower left")
    last = [(key, mine[-1]) for mine, key, _ in panels_of]
    ends = ", ".join(f"at {k} = {r[k]:.3g} (iv) {r['iv']:.3f}, unweighted {r['unweighted']:.3f}" for k, r in last)
    return figure, f"Adult's test accuracy against unevenness and against the number of parties: {ends}."


def saddles() -> Picture | None:
    """Paper 003: how far above the minimum runs from a saddle end."""
    record = results("saddles")
    if record is None:
        return None
    figure, (panel,) = axes(1, ["From a saddle, n = 10⁶, ε = 4"])
    losses = list(dict.fromkeys(row["loss"] for row in record["saddles"]))
    told = []
    for at, method in enumerate(("derived", "practical", "dp-sgd")):
        rows = [r for r in record["saddles"] if r["method"] == method and "refused" not in r]
        panel.plot(
            [losses.index(r["loss"]) for r in rows],
            [max(1e-6, r["risk_above_minimum"]) for r in rows],
            linestyle="none",
            color=COLOURS[at],
            marker=MARKERS[at],
            label=method,
        )
        told += [f"{r['loss']} {method}: {r['risk_above_minimum']:.2g}" for r in rows]
    panel.set_xticks(range(len(losses)), losses, rotation=20, fontsize=8)
    panel.set(ylabel="F − min F, median", yscale="log")
    panel.legend(fontsize=8)
    return figure, "How far above the minimum runs that start on a saddle end. " + "; ".join(told) + "."


def output() -> Picture | None:
    """Paper 004, table 3."""
    record = results("output_perturbation")
    if record is None:
        return None
    cells = (("bank", 0.1), ("adult", 0.1), ("credit-default", 0.1))
    figure, panels = axes(3, [f"{name}, μ = {mu:g}" for name, mu in cells])
    for panel, (name, mu) in zip(panels, cells, strict=True):
        for at, (method, label) in enumerate(
            (("output perturbation", "output perturbation"), ("Bassily SGD", "Bassily's SGD"))
        ):
            rows = [r for r in record["rows"] if (r["data"], r["mu"], r["method"]) == (name, mu, method)]
            x = [r["epsilon"] for r in rows]
            for key, mark, text in (
                ("paper_error", ":", "paper"),
                ("error_paper_noise", "--", "printed noise"),
                ("error_true_noise", "-", "true noise"),
            ):
                panel.plot(
                    x,
                    [r[key] for r in rows],
                    linestyle=mark,
                    color=COLOURS[at],
                    marker=MARKERS[at],
                    markersize=4,
                    label=f"{label}, {text}",
                )
        panel.set(xlabel="ε (δ = 1e-3)", xscale="log", yscale="log")
    panels[0].set_ylabel("F(w) − min F")
    panels[0].legend(fontsize=7, loc="lower left")
    return figure, "Error against ε on three sets: the paper's, ours under its noise, and ours under true noise."


def cost() -> Picture | None:
    """Paper 000, tables 4 to 6: seconds of a secure sum against d."""
    record = results("secure", "benchmarks")
    if record is None:
        return None
    figure, (panel,) = axes(1, ["One secure sum of 5 parties"])
    for at, mode in enumerate(dict.fromkeys(row["mode"] for row in record["rows"])):
        rows = sorted((r for r in record["rows"] if r["mode"] == mode), key=lambda r: int(r["dimension"]))
        panel.plot(
            [r["dimension"] for r in rows],
            [r["seconds"] for r in rows],
            color=COLOURS[at],
            marker=MARKERS[at],
            label=mode,
        )
    paper = sorted({(r["dimension"], r["paper_seconds"]) for r in record["rows"] if r.get("paper_seconds")})
    panel.plot(*zip(*paper, strict=True), color=INK, linestyle=":", marker="*", label="paper (Yao)")
    panel.set(xlabel="numbers in a sum, d", ylabel="seconds", xscale="log", yscale="log")
    panel.legend(fontsize=8, loc="upper left")
    return figure, "Seconds of one secure sum against its length: ours by masks, servers and mpc, and the paper's."


PICTURES: dict[str, Callable[[], Picture | None]] = {
    each.__name__: each
    for each in (convergence, mnist, cifar, stagewise, parties, unevenness, saddles, output, cost)
}


def svg(figure: Figure, told: str, name: str) -> str:
    """The figure as markup: letters stay letters, ink is the page's colour, a reader that cannot see is told."""
    out = io.StringIO()
    figure.tight_layout()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue().partition("<svg")[2].replace(INK, "currentColor")
    text = re.sub(r'(id="|url\(#|xlink:href="#|href="#)', rf"\g<1>{name}-", "<svg" + text)
    title, inches = f"<title>{html.escape(told)}</title>", figure.get_figwidth()
    size = f"max-width: {130 * inches:.0f}px; min-width: {55 * inches:.0f}px"  # on a phone many panels scroll
    named = f'<svg role="img" aria-label="{html.escape(told, quote=True)}" style="{size}" '
    text = text.replace("<svg ", named, 1)
    text = re.sub(r"(<svg[^>]*>)", lambda found: found[1] + title, text, count=1)
    return f'<figure><div class="scroll">{text}</div><figcaption>{html.escape(told)}</figcaption></figure>'


def page() -> str:
    """The whole document."""
    from markdown_it import MarkdownIt

    source = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    body = MarkdownIt("commonmark").enable("table").render(source)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'href="([\w-]+)\.md', r'href="\1.html', body).replace(" ± ", "&nbsp;±&nbsp;")

    def drawn(found: re.Match[str]) -> str:
        picture = PICTURES[found[1]]()
        return "" if picture is None else svg(*picture, found[1])

    with matplotlib.rc_context(LOOK):
        body = re.sub(r"<!-- picture: (\w+) -->", drawn, body)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>quietgrad: reproductions</title><link rel="icon" '
        f'href="data:,"><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def main() -> None:
    """Write the page; default: ``docs/reproductions.html``."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reproductions.html"
    path.write_text(page(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
