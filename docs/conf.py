"""Sphinx settings: Markdown pages and the docstrings of the public names."""

project = "quietgrad"
author = "The quietgrad developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "description"
html_theme = "alabaster"
html_theme_options = {"description": "Private optimisation that proves what it spent", "page_width": "72rem"}
nitpicky = False
suppress_warnings = ["myst.xref_missing"]
