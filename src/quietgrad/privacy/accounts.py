"""Names of accounts: which spellings mean the same people, and which names are refused.

An account is a group of people by the user's word, and a cap per spelling is no cap. So names are compared by
:func:`identity`, which only ever brings spellings together: too much is then charged, never too little.
"""

from __future__ import annotations

import unicodedata

LONGEST = 120  # characters; a name is a label in tables and messages

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn")  # controls, formats (zero-width, direction marks), what is no character


def identity(name: str) -> str:
    """What two spellings of one account have in common: no case, no width, no spaces around, nothing invisible.

    >>> identity("Patients ") == identity("patients") == identity("Ｐatients")
    True
    """
    # Folding case can undo a normal form and the other way round, so both are repeated until nothing moves.
    before, folded = None, name
    while folded != before:
        before = folded
        visible = (c for c in folded if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
        folded = " ".join(unicodedata.normalize("NFKC", "".join(visible)).casefold().split())
    return folded


def checked(name: object) -> str:
    """Return the name as it is shown, without spaces around; ``ValueError`` says what is wrong with it.

    >>> checked(" patients ")
    'patients'
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"account={name!r}: must be a name that is not empty.")
    shown = name.strip()
    if len(shown) > LONGEST:
        raise ValueError(f"account={shown[:20]!r}…: has {len(shown)} characters; use at most {LONGEST}.")
    if any(unicodedata.category(c) in _INVISIBLE for c in shown):
        raise ValueError(f"account={shown!r}: holds characters that cannot be seen; use letters, digits and signs.")
    if "/" in shown or "\\" in shown or not identity(shown):
        raise ValueError(f"account={shown!r}: name the people, not a file; leave out / and \\.")
    return shown
