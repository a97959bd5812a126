"""Charts as files: SVG by our own hand, PNG and PDF by matplotlib, which is imported when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quietgrad.charts import Bars, Chart, Intervals, Lines, in_a_file
from quietgrad.errors import QuietgradError
from quietgrad.files import write_atomically
from quietgrad.sanitize import sanitize

_COLOURS = ("#1d4f7c", "#b4541a", "#2b7a52", "#7b4397", "#8a6d00", "#555c66")
_STYLES = ("-", "--", ":", "-.", "-", "--")


def save_chart(path: Path, chart: Chart) -> Path:
    """Draw ``chart`` to ``path``, whose suffix says the format: .svg needs nothing, .png and .pdf matplotlib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        write_atomically(path, in_a_file(chart).encode())
        return path
    if path.suffix not in (".png", ".pdf"):
        raise QuietgradError(f"{path}: a picture is a .svg, .png or .pdf file.")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # no pyplot: no window system, no global state
    except ImportError:
        raise QuietgradError(
            f"{path.suffix} needs matplotlib: `pip install 'quietgrad[report]'`, or ask for a .svg file."
        ) from None
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        rows = 0 if isinstance(chart, Lines) else len(chart.rows)
        figure = Figure(figsize=(6.4, max(4.0, 0.35 * rows + 1.2)), layout="constrained")
        axes: Any = figure.add_subplot()
        axes.set_title(sanitize(chart.title), loc="left", fontsize=12)
        match chart:
            case Lines():
                _lines(axes, chart)
            case Bars():
                _bars(axes, chart)
            case Intervals():
                _intervals(axes, chart)
        figure.savefig(path, dpi=160)
    return path


def _lines(axes: Any, chart: Lines) -> None:
    for k, line in enumerate(chart.drawn):
        colour, style = _COLOURS[k % 6], _STYLES[k % 6]
        if line.level:
            axes.axhline(line.points[-1][1], color=colour, linestyle=style, linewidth=2, label=sanitize(line.name))
            continue
        xs, ys = zip(*line.points, strict=True)
        bars = list(line.bars) if len(line.bars) == len(xs) else None
        axes.errorbar(xs, ys, yerr=bars, color=colour, linestyle=style, linewidth=2, label=sanitize(line.name))
    axes.set(xlabel=sanitize(chart.x_label), ylabel=sanitize(chart.y_label))
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    if chart.zero:
        axes.set_ylim(0, None)
    if len(chart.drawn) > 1:
        axes.legend(frameon=False)
    axes.grid(axis="y", color="#d9d9d9", linewidth=0.6)


def _bars(axes: Any, chart: Bars) -> None:
    names = [sanitize(name, most=30) for name, _, _ in chart.rows]
    axes.barh(names, [bound or 0.0 for _, _, bound in chart.rows], color="#ddd9d0")
    axes.barh(names, [value for _, value, _ in chart.rows], color=_COLOURS[0], height=0.5)
    axes.set_xlabel(sanitize(chart.label))
    axes.invert_yaxis()


def _intervals(axes: Any, chart: Intervals) -> None:
    for k, (_, value, low, high) in enumerate(chart.rows):
        axes.plot([low, high], [k, k], color=_COLOURS[0], linewidth=2)
        axes.plot([value], [k], "o", color=_COLOURS[0])
    axes.axvline(0.0, color="#bbbbbb", linewidth=0.8)
    axes.set_yticks(range(len(chart.rows)), [sanitize(name, most=30) for name, *_ in chart.rows])
    axes.set_xlabel(sanitize(chart.label))
    axes.invert_yaxis()
