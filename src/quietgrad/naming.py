"""One rule for names that become part of a path, and one for names that are only written down and shown.

A federation, a party, a run or a data set is named by somebody else, and the name becomes a folder or a file here:
``../../etc`` must never arrive there, nor a name that two file systems spell differently.
"""

from __future__ import annotations

import re

from quietgrad.errors import DataError
from quietgrad.shown import shown

_PATH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST = 200
RULE = "must be 1 to 128 letters, digits, dots, dashes or underscores, and begin with a letter or digit"


def is_path_name(name: object) -> bool:
    """Whether ``name`` can be one part of a path, on any system.

    >>> [is_path_name(name) for name in ("five-clinics", "..", "a/b", "", "a\\n", ".hidden", "é", None)]
    [True, False, False, False, False, False, False, False]
    """
    return isinstance(name, str) and _PATH_NAME.fullmatch(name) is not None


def check_path_name(what: str, name: object) -> str:
    """``name`` if it can be one part of a path.

    >>> check_path_name("federation", "../../tmp")
    Traceback (most recent call last):
    quietgrad.errors.DataError: federation='../../tmp': must be 1 to 128 letters, digits, ...
    """
    if not isinstance(name, str) or not is_path_name(name):
        raise DataError(f"{what}={name!r}: {RULE}; it becomes a file's or a folder's name.")
    return name


def check_label(what: str, name: object) -> str:
    """``name`` if it can be shown on a line as it is: an account, whose name never becomes a path.

    >>> check_label("account", "patients of ward 3")
    'patients of ward 3'
    >>> check_label("account", "x\\x1b[2J")
    Traceback (most recent call last):
    quietgrad.errors.DataError: account='x\\x1b[2J': must be one line of visible characters, at most 200.
    """
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{what}={name!r}: must be a name that is not empty.")
    if len(name) > _MOST or shown(name) != name:
        raise DataError(
            f"{what}={shown(repr(name), most=80)}: must be one line of visible characters, at most {_MOST}."
        )
    return name
