"""Charts as inline SVG: small, printable, readable by screen readers, and coloured by the page's own style.

A chart is a value: lines or intervals, with words for its axes. Colours are CSS classes (``s0`` … ``s6``),
so a drawing follows a page into dark mode and onto paper. In a file or a notebook it carries its own colours.
Everything here is public numbers and text that passes through :func:`quietgrad.core.sanitize.sanitize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from quietgrad.core.sanitize import html_facts, sanitize

_WIDTH, _HEIGHT = 460, 282
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 36, 54
_LETTER, _TALL = 9.6, 16  # a letter at the 16 px of the narrowest pages, where labels are neither cut nor touch
_ROW, _NAMES = 26, 150  # of charts with a row per name
_DASHES = ("", "9 5", "2 5", "12 4 2 4", "", "5 3", "1 3")
_LIGHT = ("#1d4f7c", "#b4541a", "#2b7a52", "#7b4397", "#8a6d00", "#555c66", "#0f7f8f")
_DARK = ("#8dbbe8", "#eda46b", "#7cc9a0", "#c9a0e0", "#dcc462", "#b3bac4", "#6fd0dd")


def _colours(palette: Sequence[str], ink: str, rule: str) -> str:
    lines = "".join(
        f"svg.chart .s{k}{{stroke:{c};stroke-dasharray:{_DASHES[k] or 'none'}}}svg.chart .f{k}{{fill:{c}}}"
        for k, c in enumerate(palette)
    )
    return f"{lines}svg.chart .grid{{stroke:{rule}}}svg.chart text{{fill:{ink}}}"


STYLE = (
    "svg.chart text{font:12.5px system-ui,-apple-system,'Segoe UI',Arial,sans-serif}"
    "svg.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}"
    f"{_colours(_LIGHT, '#5b636d', '#ddd9d0')}"
    f"@media (prefers-color-scheme:dark){{{_colours(_DARK, '#a2a9b3', '#343a42')}}}"
)

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Series:
    """One named line; ``bars`` are standard errors of its points; a ``level`` line runs through the whole chart."""

    name: str
    points: Sequence[tuple[float, float]]
    bars: Sequence[float] = ()
    level: bool = False


@dataclass(frozen=True)
class Lines:
    """Lines over one x axis.

    >>> svg = Lines("T", (Series("a", [(0, 1), (1, 2)]),), "x", "y").svg()
    >>> svg.startswith("<svg") and "polyline" in svg
    True
    """

    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    zero: bool = False

    @property
    def drawn(self) -> dict[int, Series]:
        """The lines that have something to show, by their place in ``series``, which is their colour.

        A line that is not drawn keeps its colour from the others, so one legend fits several charts.
        """
        fits = {}
        for place, line in enumerate(self.series):
            points = [(x, y) for x, y in line.points if (x > 0 or not self.log_x) and (y > 0 or not self.log_y)]
            if points:
                fits[place] = replace(line, points=points)
        return fits

    def svg(self) -> str:
        """The drawing; empty if there is nothing to draw."""
        drawn = self.drawn
        xs = [x for line in drawn.values() for x, _ in line.points]
        ys = [y + side * bar for line in drawn.values() for (_, y), bar in _with_bars(line) for side in (-1, 1)]
        if not xs:
            return ""
        if self.log_y:
            ys = [y for y in ys if y > 0]
        y_ticks = log_ticks(min(ys), max(ys)) if self.log_y else nice_ticks(0.0 if self.zero else min(ys), max(ys))
        if self.log_x:
            x_low, x_high = min(xs), max(max(xs), min(xs) * 1.001)
            x_ticks = [tick for tick in log_ticks(x_low, x_high) if x_low * 0.999 <= tick <= x_high * 1.001]
        else:
            x_low, x_high = min(xs), max(xs)
            if 0.0 <= x_low <= x_high / 2 or x_low == x_high:  # an axis begins at 0 unless all is far from it
                x_low = min(0.0, x_low)
            x_high = x_high if x_high > x_low else x_low + 1.0
            whole = all(x == int(x) for x in xs)
            x_ticks = [tick for tick in nice_ticks(x_low, x_high, whole=whole) if x_low <= tick <= x_high]
        left = max(_LEFT, 8.0 + _LETTER * max(len(_number(tick)) for tick in y_ticks))
        x_at = _scale(x_low, x_high, left, _WIDTH - _RIGHT, log=self.log_x)
        x_ticks = _apart(x_ticks, x_at)
        y_at = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP, log=self.log_y)
        parts = [
            _text("axis-label", _WIDTH - _RIGHT, _HEIGHT - 6, "end", self.x_label),
            _text("axis-label", 0, _TALL, "start", self.y_label),
        ]
        for tick in y_ticks:
            y = y_at(tick)
            parts.append(f'<line class="grid" x1="{left:g}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text("tick", left - 8, y + 4, "end", _number(tick)))
        for tick in x_ticks:
            x, side = x_at(tick), _side(x_at(tick), tick)
            parts.append(_text("tick", x, _HEIGHT - _BOTTOM + 10 + _TALL, side, _number(tick)))
        for place, line in drawn.items():
            parts += _line(line, colour_of(place), x_at, y_at, left)
        ends = "; ".join(f"{line.name} ends at {line.points[-1][1]:.4g}" for line in drawn.values())
        return _svg(f"{self.title}: {self.y_label} over {self.x_label}. {ends}.", _HEIGHT, parts)


@dataclass(frozen=True)
class Intervals:
    """A row per name: a value and how far it may be off on either side.

    >>> "x0: 1 (0.5 to 1.5)" in Intervals("I", (("x0", 1.0, 0.5, 1.5),), "coefficient").svg()
    True
    """

    title: str
    rows: Sequence[tuple[str, float, float, float]]
    label: str
    written: Callable[[float], str] | None = None
    """How values on a scale without a zero are written, such as dates; the axis then begins where they do."""

    def svg(self) -> str:
        """The drawing; empty if there is nothing to draw."""
        if not self.rows:
            return ""
        base = [0.0] if self.written is None else []
        low = min([*base, *(row[2] for row in self.rows)])
        high = max([*base, *(row[3] for row in self.rows)])
        ticks = nice_ticks(low, high, whole=self.written is not None)
        written = self.written or _number
        names = [sanitize(row[0], most=22) for row in self.rows]
        # Room for the names, and on the left for half the first tick's label.
        start = min(_NAMES, max(12.0 + _LETTER * max(map(len, names)), _LETTER * len(written(ticks[0])) / 2.0))
        x_at = _scale(ticks[0], ticks[-1], start, _WIDTH - 14)
        bottom = 8 + _ROW * len(self.rows)
        parts = []
        for tick in ticks:
            x = x_at(tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"/>')
            # A label at the end of the axis would be cut off by the end of the drawing.
            side = "end" if tick == ticks[-1] else "middle"
            parts.append(_text("tick", x + (14 if side == "end" else 0), bottom + 16, side, written(tick)))
        words = []
        for k, (name, value, below, above) in enumerate(self.rows):
            y = 8 + k * _ROW + _ROW / 2
            parts.append(f'<line class="line s0" x1="{x_at(below):.1f}" x2="{x_at(above):.1f}" y1="{y}" y2="{y}"/>')
            parts.append(f'<circle class="f0" cx="{x_at(value):.1f}" cy="{y}" r="4"/>')
            parts.append(_text("tick", start - 8, y + 4, "end", names[k]))
            ends = [self.written(x) if self.written else f"{x:.3g}" for x in (value, below, above)]
            words.append(f"{name}: {ends[0]} ({ends[1]} to {ends[2]})")
        parts.append(_text("axis-label", _WIDTH - 14, bottom + 34, "end", self.label))
        return _svg(f"{self.title}. {'; '.join(words)}.", bottom + 40, parts)


Chart = Lines | Intervals


def to_svg_file(chart: Lines) -> str:
    """Return the drawing with its title, legend and colours, as an SVG file by itself."""
    drawing, lines = chart.svg(), chart.drawn
    if not drawing:
        raise ValueError(f"{chart.title}: there is nothing to draw.")
    head, title = 26 + 20 * len(lines), escape(sanitize(chart.title))
    legend = [f'<text x="0" y="16" style="font-size:15px;font-weight:600">{title}</text>']
    for k, (place, line) in enumerate(lines.items()):
        y = 36 + 20 * k
        legend.append(f'<line class="line s{colour_of(place)}" x1="2" x2="34" y1="{y - 4}" y2="{y - 4}"/>')
        legend.append(f'<text x="42" y="{y}">{escape(sanitize(line.name))}</text>')
    placed = drawing.replace("<svg", f'<svg y="{head}" width="{_WIDTH}" height="{_HEIGHT}"', 1)
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" '
        f'width="{1.5 * _WIDTH:g}" viewBox="-8 -6 {_WIDTH + 16} {_HEIGHT + head + 12}"><style>{STYLE}</style>'
        f"{''.join(legend)}{placed}</svg>\n"
    )


def to_notebook_html(title: str, rows: Sequence[tuple[str, object]], charts: Sequence[Chart] = ()) -> str:
    """Return a table of facts, and drawings under it, as HTML for a notebook.

    >>> to_notebook_html("Budget", [("ε", "1 < 2")]).count("<tr>")
    1
    """
    drawings = "".join(f'<div style="max-width:{_WIDTH}px">{chart.svg()}</div>' for chart in charts if chart.svg())
    style = f"<style>{STYLE}</style>" if drawings else ""
    return f"<div>{html_facts(title, rows)}{style}{drawings}</div>"


def _side(x: float, tick: float) -> str:
    """How a label hangs at its tick: in its middle, or before it where it would leave the drawing."""
    return "end" if x + _LETTER * len(_number(tick)) / 2.0 > _WIDTH - 2 else "middle"


def _apart(ticks: Sequence[float], x_at: Scale) -> list[float]:
    """The ticks whose labels do not touch; the last one stays, and others give way to it.

    >>> _apart([1000.0, 1001.0, 2000.0], lambda tick: tick / 10.0)
    [1000.0, 2000.0]
    """

    def span(tick: float) -> tuple[float, float]:
        x, width = x_at(tick), _LETTER * len(_number(tick))
        return (x - width, x) if _side(x, tick) == "end" else (x - width / 2.0, x + width / 2.0)

    chosen: list[float] = []
    for tick in ticks:
        if not chosen or span(tick)[0] > span(chosen[-1])[1] + _LETTER / 2.0:
            chosen.append(tick)
        elif tick == ticks[-1] and len(chosen) > 1:
            chosen[-1] = tick
    return chosen


def colour_of(place: int) -> int:
    """The colour, ``s0`` … ``s6``, of the line at a place of a chart or a legend."""
    return place % len(_DASHES)


def _with_bars(line: Series) -> list[tuple[tuple[float, float], float]]:
    bars = list(line.bars) if len(line.bars) == len(line.points) else [0.0] * len(line.points)
    return list(zip(line.points, bars, strict=True))


def _line(line: Series, colour: int, x_at: Scale, y_at: Scale, left: float) -> list[str]:
    name = f"<title>{escape(sanitize(line.name))}</title>"
    if line.level:
        y = y_at(line.points[-1][1])
        ends = f'x1="{left:g}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        return [f'<line class="line s{colour}" {ends}>{name}</line>']
    parts = []
    for (x, y), bar in _with_bars(line):
        if bar > 0.0:
            parts.append(
                f'<line class="line s{colour}" style="stroke-dasharray:none;stroke-width:1" x1="{x_at(x):.1f}" '
                f'x2="{x_at(x):.1f}" y1="{y_at(y - bar):.1f}" y2="{y_at(y + bar):.1f}"/>'
            )
    dots = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
    return [*parts, f'<polyline class="line s{colour}" points="{dots}">{name}</polyline>']


def _scale(low: float, high: float, start: float, end: float, *, log: bool = False) -> Scale:
    """Where on a drawing a value is: ``low`` at ``start``, ``high`` at ``end``."""
    first, last = (math.log(low), math.log(high)) if log else (low, high)

    def at(value: float) -> float:
        value = math.log(max(value, 1e-300)) if log else value
        return start + (value - first) / (last - first) * (end - start)

    return at


def nice_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five round numbers that enclose [low, high].

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        high = low + (abs(low) if abs(low) > 1e-300 else 1.0)
    raw = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers 1, 2, 5 × 10ᵏ that enclose [low, high], thinned to powers of ten over wide ranges.

    >>> log_ticks(0.03, 0.4)
    [0.02, 0.05, 0.1, 0.2, 0.5]
    """
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0,) if top - bottom > 3 else (1.0, 2.0, 5.0)
    ticks = [float(f"{m}e{k}") for k in range(bottom, top + 1) for m in steps]
    below = [t for t in ticks if t <= low * 1.0001]
    above = [t for t in ticks if t >= high * 0.9999]
    ticks = [t for t in ticks if below[-1] <= t <= above[0]]
    return ticks if len(ticks) > 1 else [ticks[0], ticks[0] * 10.0]


def _svg(label: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(sanitize(label))}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(kind: str, x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(sanitize(words))}</text>'


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.4g}"
