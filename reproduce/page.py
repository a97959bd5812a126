"""The pages of reproductions in one HTML file: ``docs/reproductions.md``, those below it, and every exhibit.

    quietgrad reproduce page                       # or: python reproduce/page.py [FILE]

The text is that of the documentation; a line ``<!-- exhibits: 000 -->`` in it becomes that paper's tables and
figures, each under its own number, drawn from the result files. The documentation site shows the same drawings.
Nothing is fetched when the page is opened. Charts stand one above the other on a narrow screen and side by side on
a wide one; tables scroll by themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from exhibits import ROOT, Exhibit, exhibits

from quietgrad.charts import STYLE as CHARTS
from quietgrad.charts import Lines, colour_of

PAGE = """
:root { color-scheme: light dark;
  --ink: #1b1b1f; --paper: #ffffff; --soft: #f2f2f5; --line: #c9c9d1; --link: #0b57a4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6ea; --paper: #16161a; --soft: #222228; --line: #45454f; --link: #8ab8f0 } }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
a { color: var(--link) } code { background: var(--soft); padding: 0 .2em; overflow-wrap: anywhere }
pre { background: var(--soft); padding: .7rem; overflow-x: auto } pre code { overflow-wrap: normal; padding: 0 }
td code { overflow-wrap: normal; white-space: nowrap } td:last-child { min-width: 7rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .87rem; margin: .6rem 0 }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top }
th { background: var(--soft) }
@media (max-width: 40rem) {
  .prose thead { display: none } .prose tr { display: block; border-top: 1px solid var(--line); padding: .4rem 0 }
  .prose td { display: block; border: 0; padding: .1rem 0 } .prose td:empty { display: none }
  .prose td:first-child { font-weight: 600 } .prose td code { white-space: normal; overflow-wrap: anywhere }
  .prose td + td::before { content: attr(data-head) ": "; opacity: .7 } }
"""
"""How the one file looks."""
STYLE = """
.exhibit { border-top: 1px solid var(--line, #8888); margin-top: 1.5rem } .exhibit h3 { margin: .6rem 0 .2rem }
.exhibit td { min-width: 0; white-space: nowrap } .exhibit .scroll { overflow-x: auto }
.exhibit table { border-collapse: collapse; font-size: .87rem }
.exhibit th, .exhibit td { border: 1px solid var(--line, #8888); padding: .2rem .5rem; text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem }
figure { margin: .4rem 0; min-width: 0; max-width: 36rem } figcaption { font-weight: 600; font-size: .9rem }
figure > svg.chart { width: 100%; height: auto } figure > svg.chart text { font-size: 16px }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: .2rem 0; padding: 0;
  font-size: .8rem }
.legend svg { width: 2.2rem; height: .7rem; margin-right: .3rem; vertical-align: middle }
.exhibit summary { cursor: pointer; font-size: .9rem }
"""
"""How exhibits look, here and on the documentation site."""
_FEW = 16  # rows of a table that is shown without asking
_SENTENCE = 60  # characters of a cell that is read, not compared


def legend(chart: Lines) -> str:
    """Names of the lines with their colours and dashes."""
    names = (
        f'<li><svg class="chart" viewBox="0 0 36 10" aria-hidden="true"><line class="line s{colour_of(place)}" '
        f'x1="1" x2="35" y1="5" y2="5"/></svg>{escape(line.name)}</li>'
        for place, line in chart.drawn.items()
    )
    return f'<ul class="legend">{"".join(names)}</ul>'


def drawn(exhibit: Exhibit) -> str:
    """An exhibit as markup."""
    figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{chart.svg()}{legend(chart)}</figure>"
        for title, chart in zip(titles(exhibit), exhibit.charts, strict=True)
    )
    head = f"Paper {exhibit.paper}, {exhibit.name}"
    return (
        f'<section class="exhibit" id="{exhibit.anchor}"><h3>{head}: {escape(exhibit.title)}</h3>'
        f"<p>{escape(exhibit.note)}</p>{figures and f'<div class=charts>{figures}</div>'}{table(exhibit)}</section>"
    )


def titles(exhibit: Exhibit) -> list[str]:
    """The titles of its panels, lettered if there are several.

    >>> from quietgrad.charts import Lines
    >>> titles(Exhibit("000", "figure 1", "", "", [Lines("left", [], "", ""), Lines("right", [], "", "")]))
    ['(a) left', '(b) right']
    """
    if len(exhibit.charts) < 2:
        return [chart.title for chart in exhibit.charts]
    return [f"({chr(ord('a') + k)}) {chart.title}" for k, chart in enumerate(exhibit.charts)]


def table(exhibit: Exhibit) -> str:
    """Its numbers; a long table opens when asked."""
    if not exhibit.rows:
        return ""

    errors = {k for k, name in enumerate(exhibit.columns) if name.startswith("± se")}

    def line(cells: Sequence[Any], kind: str) -> str:
        texts = (shown(cell, 2 if k in errors else 4) for k, cell in enumerate(cells))
        return "<tr>" + "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) + "</tr>"

    body = "".join(line(row, "td") for row in exhibit.rows)
    head = f"<thead>{line(exhibit.columns, 'th')}</thead>"
    made = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
    if len(exhibit.rows) <= _FEW:
        return made
    return f"<details><summary>All {len(exhibit.rows)} rows of numbers</summary>{made}</details>"


def shown(cell: Any, digits: int = 4) -> str:
    """A number to four digits, a standard error to two, a dash for none."""
    if cell is None:
        return "–"
    return f"{cell:.{digits}g}" if isinstance(cell, float) else str(cell)


EXHIBITS = re.compile(r"<!-- exhibits: (\d{3}) -->")


def of_paper(number: str) -> str:
    """All tables and figures of one paper, with links to each."""
    mine = [exhibit for exhibit in exhibits() if exhibit.paper == number]
    links = " · ".join(f'<a href="#{exhibit.anchor}">{exhibit.name}</a>' for exhibit in mine)
    return f"<nav>{links}</nav>" + "".join(map(drawn, mine))


def sources() -> list[str]:
    """The texts of the documentation in their order; those below the first one have a name and lower headings."""
    docs = ROOT / "docs"
    first = (docs / "reproductions.md").read_text(encoding="utf-8")
    below = re.findall(r"^reproductions/(\w+)$", first, re.MULTILINE)
    texts = ((name, (docs / "reproductions" / f"{name}.md").read_text(encoding="utf-8")) for name in below)
    start = re.sub(r"^```\{toctree\}\n.*?^```\n", "", first, flags=re.MULTILINE | re.DOTALL)
    return [start, *(f'<a id="paper-{name}"></a>\n\n{_LOWER.sub("#", text)}' for name, text in texts)]


_LOWER = re.compile(r"^(?=#+ )", re.MULTILINE)


def page() -> str:
    """The whole document."""
    from markdown_it import MarkdownIt

    source = "\n".join(sources())
    body = MarkdownIt("commonmark").enable("table").render(source)
    body = re.sub(r"<table>.*?</table>", framed, body, flags=re.DOTALL)
    body = re.sub(
        r'href="(?:(?:\.\./)?reproductions/)?(\d{3}|studies|rows|comparisons)\.md[^"]*', r'href="#paper-\1', body
    )
    body = re.sub(r'href="(?:\.\./)?([\w/-]+)\.md', r'href="\1.html', body).replace(" ± ", "&nbsp;±&nbsp;")
    body = EXHIBITS.sub(lambda found: of_paper(found[1]), body)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>quietgrad: reproductions</title><link rel="icon" '
        f'href="data:,"><style>{CHARTS}{PAGE}{STYLE}</style></head><body>{body}</body></html>\n'
    )


def framed(made: re.Match[str]) -> str:
    """A table of a page: one with sentences in it becomes a list on a narrow screen, others scroll."""
    markup = made[0]
    if not any(len(cell) > _SENTENCE for cell in re.findall(r"<td>(.*?)</td>", markup)):
        return f'<div class="scroll">{markup}</div>'
    heads = re.findall(r"<th>(.*?)</th>", markup)

    def row(cells: re.Match[str]) -> str:
        names = iter(heads)
        return re.sub("<td>", lambda _: f'<td data-head="{escape(next(names))}">', cells[0])

    return re.sub(r"<tr>.*?</tr>", row, markup, flags=re.DOTALL).replace("<table>", '<table class="prose">')


def main() -> None:
    """Write the page; default: ``docs/reproductions.html``."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reproductions.html"
    path.write_text(page(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
