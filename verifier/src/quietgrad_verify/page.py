"""A verdict as one page of HTML that a person reads: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from quietgrad_verify.document import Claim, leaves, standing
from quietgrad_verify.verdict import Verdict

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}.yes{color:#0a5c2b}.no{color:#9c1c1c}.open{color:#7a4b00}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.3rem .6rem;
border-bottom:1px solid #ddd;overflow-wrap:anywhere}code{overflow-wrap:anywhere}"""
_MEANING = {
    "proved": "follows from the rest of the file, and was derived again",
    "bound": "held fast by a signature or a ledger; without them it stands open",
    "said": "the author's word; nothing checks it",
}
_MARKS = {True: ("yes", "yes"), False: ("no", "NO"), None: ("open", "–")}


def page(claim: Claim, verdict: Verdict, name: str) -> str:
    """The page of a verdict on the file called ``name``."""
    word, kind = ("Proved", "yes") if verdict.ok else ("Not proved", "no")
    sections = [
        f"<h1 class='{kind}'>{word}: {escape(verdict.headline)}</h1>",
        f"<p>File: <code>{escape(name)}</code><br>Digest: <code>{verdict.digest}</code></p>",
        "<h2>Checks</h2>", _table(
            ("check", "", "result"),
            ((f.what, f"<span class='{_MARKS[f.ok][0]}'>{_MARKS[f.ok][1]}</span>", escape(f.words))
             for f in verdict.findings)),
        "<h2>Shown</h2>", _list(verdict.shown),
        "<h2>Not shown</h2>", _list(verdict.not_shown),
        "<h2>Standing of every field</h2>",
        _list(f"{key}: {words}" for key, words in _MEANING.items()),
        _table(("field", "standing", "value"), _rows(claim, verdict)),
    ]  # fmt: skip
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{word}: {escape(name)}</title>"
    return f"{head}<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"


def _rows(claim: Claim, verdict: Verdict) -> Iterable[tuple[str, str, str]]:
    for path, item in leaves(claim):
        name = ".".join(path)
        state = "open" if name in verdict.open else standing(("body", *path))
        text = item if isinstance(item, str) else repr(item)
        shown = text if len(text) <= 300 else text[:299] + "…"
        yield escape(name), f"<span class='{'open' if state == 'open' else ''}'>{state}</span>", escape(shown)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{lines}</table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
