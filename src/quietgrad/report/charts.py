"""Line charts as inline SVG: small, printable, readable by screen readers, and coloured by the page's own style.

Colours are CSS classes (``s0`` … ``s5``), so a chart follows the page into dark mode and onto paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 30, 42


@dataclass(frozen=True)
class Series:
    """One named line."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str, series: Sequence[Series], *, x_label: str, y_label: str, log_y: bool = False, zero: bool = False
) -> str:
    """An SVG of the given lines; ``zero`` starts the y axis at 0, ``log_y`` makes it logarithmic.

    >>> svg = line_chart("T", [Series("a", [(0, 1), (1, 2)])], x_label="x", y_label="y")
    >>> svg.startswith("<svg") and "polyline" in svg
    True
    """
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points if y > 0.0 or not log_y]
    if not xs or not ys:
        return ""
    x_low, x_high = 0.0, max(max(xs), 1.0)
    y_ticks = log_ticks(min(ys), max(ys)) if log_y else nice_ticks(0.0 if zero else min(ys), max(ys))
    x_ticks = [tick for tick in nice_ticks(x_low, x_high, whole=True) if tick <= x_high]
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x_at(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y_at(y: float) -> float:
        low, high, value = (math.log(v) for v in (y_low, y_high, y)) if log_y else (y_low, y_high, y)
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        _text("axis-label", _WIDTH - _RIGHT, _HEIGHT - 4, "end", x_label),
        _text("axis-label", 0, 13, "start", y_label),
    ]
    for tick in y_ticks:
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", _LEFT - 8, y + 4, "end", _number(tick)))
    for tick in x_ticks:
        x = x_at(tick)
        anchor = "end" if x > _WIDTH - 40 else "middle"
        parts.append(_text("tick", x, _HEIGHT - _BOTTOM + 18, anchor, _number(tick)))
    for k, line in enumerate(drawn):
        dots = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points if y > 0.0 or not log_y)
        parts.append(
            f'<polyline class="line s{k % 6}" points="{dots}"><title>{escape(line.name)}</title></polyline>'
        )
    ends = "; ".join(f"{line.name} ends at {line.points[-1][1]:.4g}" for line in drawn)
    label = escape(f"{title}: {y_label} over {x_label}. {ends}.")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def nice_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About ``count`` round numbers that enclose [low, high].

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        high = low + (abs(low) if abs(low) > 1e-300 else 1.0)
    raw = (high - low) / count
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


def _text(kind: str, x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.4g}"
