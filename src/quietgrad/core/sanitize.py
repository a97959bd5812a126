"""Text that was not written here, made fit for a terminal, a log or a page.

Names of columns and accounts, reasons that another party gives and the messages of libraries are all printed
for people. Control characters there can clear a screen, fill a clipboard or rename a window, bidirectional
marks can turn ``ε = 10`` around, and a line break can forge a line of our own. Everything that is printed passes
through here, and so does the text of every error that quietgrad raises.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from html import escape

MOST = 4000  # characters: more is not read, and a message of megabytes hides the others


def sanitize(text: object, *, most: int = MOST) -> str:
    """``text`` on one line, with everything that is not a visible character spelt out.

    >>> sanitize("clinic\\x1b]0;pwned\\x07")
    'clinic\\\\x1b]0;pwned\\\\x07'
    >>> sanitize("ε\\u202e01 = ε"), sanitize("two\\nlines"), sanitize("naïve 数据 ≤ 1"), sanitize("abcdef", most=3)
    ('ε\\\\u202e01 = ε', 'two\\\\nlines', 'naïve 数据 ≤ 1', 'abc… (3 more characters)')
    """
    words = str(text)
    left = len(words) - most
    if left > 0:
        return f"{sanitize(words[:most], most=most)}… ({left} more characters)"
    if words.isascii() and words.isprintable():
        return words
    return "".join(character if _visible(character) else _spelt(character) for character in words)


def sanitize_lines(text: object) -> str:
    """A text of several lines that is laid out here: its line breaks stay, all else is as in :func:`sanitize`.

    >>> sanitize_lines("a\\n\\x1b[2Jb\\n")
    'a\\n\\\\x1b[2Jb\\n'
    """
    return "\n".join(sanitize(line) for line in str(text).split("\n"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question to append to an error if ``name`` is close to one of ``known``, else an empty text.

    >>> did_you_mean("dp-srn", ["dp-srm", "dp-sgd"]), did_you_mean("x", ["dp-srm"])
    (" Did you mean 'dp-srm'?", '')
    """
    near = get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _visible(character: str) -> bool:
    # Cc controls, Cf marks without a shape (bidirectional ones too), Cs halves, Co private, Cn unassigned,
    # Zl and Zp separators of lines. A space of any width is harmless; combining marks belong to scripts.
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _spelt(character: str) -> str:
    code = ord(character)
    escaped = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    return escaped or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")


def html_facts(title: str, rows: Sequence[tuple[str, object]]) -> str:
    """A titled table of names and values as HTML, every text sanitised and escaped.

    >>> html_facts("Budget", [("ε", "1 < 2")]).count("<tr>")
    1
    """
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(sanitize(name))}</th>'
        f'<td style="text-align:left">{escape(sanitize(value))}</td></tr>'
        for name, value in rows
    )
    return f"<strong>{escape(sanitize(title))}</strong><table>{cells}</table>"
