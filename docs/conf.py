"""Sphinx settings: Markdown pages, tutorials that are run, and the docstrings of the public names."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tools"))
sys.path.insert(0, str(HERE.parent / "src"))

project = "quietgrad"
author = "The quietgrad developers"
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".py": "tutorial"}
exclude_patterns = ["_build", "conf.py"]
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
smartquotes = False  # it would print "--option" with a dash of another kind
html_theme = "furo"
html_title = "quietgrad"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"source_repository": "", "top_of_page_buttons": []}
nitpicky = False
suppress_warnings = ["myst.xref_missing", "ref.python"]

REDIRECTS = {"algorithms": "methods/index"}
"""Addresses of earlier versions, and where their content is now."""


class TutorialParser(MystParser):
    """A tutorial is a Python script: it is run, and its cells and what they showed are the page."""

    supported = ("tutorial",)
    outdir = HERE / "_build"

    def parse(self, inputstring: str, document: Any) -> None:
        """Run the script, write its notebook beside the built page, and parse the page as Markdown."""
        import tutorials

        script = Path(document["source"])
        ran = tutorials.run(script)
        notebook = self.outdir / script.parent.name / f"{script.stem}.ipynb"
        notebook.parent.mkdir(parents=True, exist_ok=True)
        notebook.write_text(tutorials.notebook(ran), encoding="utf-8")
        super().parse(tutorials.page(ran, notebook.name), document)


def _redirects(app: Any, error: Exception | None) -> None:
    """Leave a page that forwards at every earlier address."""
    if error is not None or app.builder.format != "html":
        return
    for old, new in REDIRECTS.items():
        target = f"{'../' * old.count('/')}{new}.html"
        (Path(app.outdir) / f"{old}.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="0; url={target}"><link rel="canonical" href="{target}">'
            f'<p>This page has moved to <a href="{target}">{new}</a>.</p>\n',
            encoding="utf-8",
        )


def _with_switch(rules: str) -> str:
    """Rules that follow the reader's system, made to follow the switch of the page too."""
    light, asks, dark = rules.partition("@media (prefers-color-scheme:dark){")
    dark = dark.removesuffix("}")
    unless, switched = (
        dark.replace("svg.chart", f"body{state} svg.chart")
        for state in (':not([data-theme="light"])', '[data-theme="dark"]')
    )
    return f"{light}{asks}{unless}}}{switched}"


def _exhibits(app: Any, name: str, source: list[str]) -> None:
    """Draw the papers' tables and figures where a page of reproductions says so."""
    if "<!-- exhibits:" not in source[0]:
        return
    drawing = runpy.run_path(str(HERE.parent / "reproduce" / "page.py"))
    style = f"<style>{_with_switch(drawing['CHARTS'])}{drawing['STYLE']}</style>"
    source[0] = drawing["EXHIBITS"].sub(
        lambda found: f"```{{raw}} html\n{style}{drawing['of_paper'](found[1])}\n```", source[0]
    )


_OPTION = re.compile(r'<span class="pre">(\[?--?[\w-]{1,24}\]?)</span>')


def _options(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Mark options in running text, which a browser would break after a dash."""
    context["body"] = _OPTION.sub(r'<span class="pre option">\1</span>', context.get("body", ""))


def _street(app: Any, error: Exception | None) -> None:
    """Draw the packages and their imports beside the built pages."""
    import street

    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "_static" / "street.svg").write_text(street.svg(), encoding="utf-8")


def setup(app: Any) -> None:
    """Tutorials are sources of their own kind; pages of reproductions get their drawings."""
    TutorialParser.outdir = Path(app.outdir)
    app.add_source_parser(TutorialParser)
    app.connect("source-read", _exhibits)
    app.connect("html-page-context", _options)
    app.connect("build-finished", _redirects)
    app.connect("build-finished", _street)
