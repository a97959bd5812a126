"""Charts as files: SVG as it is, PNG and PDF with matplotlib as the printer of the same drawing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from quietgrad.charts import Chart, in_a_file
from quietgrad.errors import QuietgradError
from quietgrad.files import write_atomically

_INK, _SVG = "#5b636d", "{http://www.w3.org/2000/svg}"
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


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
    root = ElementTree.fromstring(in_a_file(chart))
    left, top, width, height = (float(number) for number in root.attrib["viewBox"].split())
    with mpl.rc_context({"lines.solid_capstyle": "butt", "lines.scale_dashes": False}):
        figure = Figure(figsize=(width / 72, height / 72))
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(left, left + width), ylim=(top + height, top))
        axes.axis("off")
        _draw(axes, root, _rules(root.findtext(f"{_SVG}style") or ""), 0.0)
        figure.savefig(path, dpi=200)
    return path


def _rules(style: str) -> dict[str, dict[str, str]]:
    """What the light part of a drawing's style says of each class."""
    rules: dict[str, dict[str, str]] = {}
    for name, body in re.findall(r"svg\.chart \.(\w+)\{([^}]*)\}", style.partition("@media")[0]):
        rules.setdefault(name, {}).update(part.split(":", 1) for part in body.split(";"))
    return rules


def _draw(axes: Any, parent: Any, rules: dict[str, dict[str, str]], down: float) -> None:
    """The elements of a drawing, one by one; ``down`` is how far a group was moved."""
    for element in parent:
        look: dict[str, str] = {}
        for name in element.get("class", "").split():
            look |= rules.get(name, {})
        look |= dict(part.split(":", 1) for part in element.get("style", "").split(";") if part)
        line = {"color": look.get("stroke", _INK), "linewidth": float(look.get("stroke-width", "1"))}
        if (dashes := look.get("stroke-dasharray", "none")) != "none":
            line["linestyle"] = (0, [float(dash) / 2 for dash in dashes.split()])

        def at(name: str, element: Any = element) -> float:
            return float(element.get(name, "0"))

        match element.tag.removeprefix(_SVG):
            case "g":
                _draw(axes, element, rules, down + float(element.get("transform").split()[-1].rstrip(")")))
            case "line":
                axes.plot([at("x1"), at("x2")], [at("y1") + down, at("y2") + down], **line)
            case "polyline":
                places = [place.split(",") for place in element.get("points").split()]
                axes.plot([float(x) for x, _ in places], [float(y) + down for _, y in places], **line)
            case "rect":
                alpha = float(look.get("fill-opacity", "1"))
                box = ([at("x"), at("x") + at("width")], at("y") + down, at("y") + at("height") + down)
                axes.fill_between(*box, color=look.get("fill", _INK), alpha=alpha, linewidth=0)
            case "circle":
                axes.plot([at("cx")], [at("cy") + down], "o", color=look.get("fill", _INK), markersize=2 * at("r"))
            case "text":
                anchor = _ANCHORS[element.get("text-anchor", "start")]
                size = float(look.get("font-size", "12.5px").removesuffix("px"))
                weight = "bold" if look.get("font-weight") == "600" else "normal"
                axes.text(
                    at("x"), at("y") + down, element.text or "", ha=anchor, va="baseline", color=_INK,
                    fontsize=0.9 * size, fontweight=weight, parse_math=False,
                )  # fmt: skip
