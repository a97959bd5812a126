"""Sphinx settings: Markdown pages, tutorials that are run, and the docstrings of the public names."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tools"))
sys.path.insert(0, str(HERE.parent / "src"))

project = "quietgrad"
author = "The quietgrad developers"
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "quietgrad"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"source_repository": "", "top_of_page_buttons": []}
nitpicky = False
suppress_warnings = ["myst.xref_missing", "ref.python"]


def _tutorials(app: object) -> None:
    """Run each tutorial and write its page and its notebook beside it; neither is kept."""
    import tutorials

    for script in sorted((HERE / "tutorials").glob("*.py")):
        page, notebook = script.with_suffix(".md"), script.with_suffix(".ipynb")
        if page.exists() and page.stat().st_mtime > script.stat().st_mtime and notebook.exists():
            continue
        ran = tutorials.run(script)
        page.write_text(tutorials.page(ran, notebook.name), encoding="utf-8")
        notebook.write_text(tutorials.notebook(ran), encoding="utf-8")


def setup(app: object) -> None:
    """Tutorials first: their pages are sources."""
    app.connect("builder-inited", _tutorials)  # type: ignore[attr-defined]
