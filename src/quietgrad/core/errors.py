"""The errors a user of quietgrad may meet; each message says what was given, what is allowed, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from quietgrad.core.sanitize import sanitize

_SHOWN = 200  # characters of a value in a message
_ARGUMENT = re.compile(r"\{([a-z][a-z0-9_]*)(?:=([^{}]*))?\}")


class QuietgradError(Exception):
    r"""Base of every error that quietgrad raises on purpose.

    Its text may quote a column, an account or another party, so :func:`quietgrad.core.sanitize.sanitize` cleans it.
    ``code`` names the kind of error in every version; the command line prints it behind the message.

    An argument of the caller's stands in the text as ``{name}``, with its value given by keyword, or as
    ``{name=value}`` where the text recommends a value. Python shows both as ``name=value``. The command line shows
    them as its own options, because it reads the arguments and not the text (:meth:`spelled`).

    >>> print(QuietgradError("no column \x1b[2J"))
    no column \x1b[2J
    >>> DataError.code
    'QG-DATA'
    >>> error = SettingError("{epsilon}: must be > 0. For a non-private run pass {budget=None}.", epsilon=-1.0)
    >>> print(error)
    epsilon=-1.0: must be > 0. For a non-private run pass budget=None.
    >>> error.param
    'epsilon'
    >>> print(error.spelled(lambda name, value: f"--{name} {value}"))
    --epsilon -1.0: must be > 0. For a non-private run pass --budget None.
    """

    code: ClassVar[str] = "QG-ERROR"

    def __init__(self, *args: object, **arguments: object) -> None:
        super().__init__(*args)
        self.arguments = arguments

    @property
    def param(self) -> str | None:
        """The argument that is wrong, if one is: the first that the caller gave a value for."""
        return next(iter(self.arguments), None)

    def spelled(self, spelling: Callable[[str, str], str]) -> str:
        """Return the text with every argument as ``spelling(name, value)``; ``value`` is Python's text of it."""
        arguments = self.arguments

        def argument(match: re.Match[str]) -> str:
            name, value = match[1], match[2]
            if value is None and name not in arguments:
                return match[0]  # braces of somebody's own, such as a file name's
            return spelling(name, sanitize(repr(arguments[name]), most=_SHOWN) if value is None else value)

        return sanitize(_ARGUMENT.sub(argument, super().__str__()))

    def __str__(self) -> str:
        return self.spelled(lambda name, value: f"{name}={value}")


class SettingError(QuietgradError, ValueError):
    """A setting has a value that it may not have. At most a private count of the records was paid for before."""

    code = "QG-SETTING"


class UnprovableError(QuietgradError, ValueError):
    """No accountant can prove a finite ε for this composition; the offending event is named."""

    code = "QG-UNPROVABLE"


class BudgetError(QuietgradError, RuntimeError):
    """The request would spend more privacy than the budget, plan or cap allows; nothing was released."""

    code = "QG-BUDGET"


class ExhaustedError(BudgetError):
    """The plan's fresh records or releases are used up; nothing was released, and a run may end here cleanly."""

    code = "QG-EXHAUSTED"


class LedgerError(QuietgradError, RuntimeError):
    """A ledger is cut, edited, locked or cannot be written; nothing was released."""

    code = "QG-LEDGER"


class LedgerWarning(UserWarning):
    """One account met different tables, or one table two accounts or units: are these the same people?"""


class TooNoisyError(QuietgradError, ValueError):
    """A release that was paid for shows nothing above its noise; the message says what to declare instead."""

    code = "QG-NOISE"


class TooNoisyWarning(UserWarning):
    """A fit could not find something within its budget; the message says what to declare."""


class DeclaredWarning(UserWarning):
    """Something was taken as public because a column's type lists it; the message says what to declare instead."""


class DeltaWarning(UserWarning):
    """The δ of a run is not below 1/n; said before the run is charged."""


class DataError(QuietgradError, ValueError):
    """The data cannot be used as they are; nothing was reserved and nothing was spent."""

    code = "QG-DATA"


class ChangedError(QuietgradError, RuntimeError):
    """A table changed while a run was reading it; the release was not made, and what was reserved stays so."""

    code = "QG-CHANGED"


class ClusterError(QuietgradError, RuntimeError):
    """A cluster could not be reached or gave up; the release was not made, and what was reserved stays so."""

    code = "QG-CLUSTER"


@contextmanager
def boundary(refusal: str) -> Iterator[None]:
    """Turn whatever a foreign parser raises for a file into one ``DataError``.

    Which exceptions a parser has for bytes that are not its own is not documented, and their texts may quote what
    was read. What quietgrad raised on purpose, and a file that is not there, pass as they are.

    >>> with boundary("rows.npz: not a readable npz file."):
    ...     raise IndexError("a person's cell")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: rows.npz: not a readable npz file.
    """
    try:
        yield
    except SettingError:  # a setting in the file, which is not the caller's own
        raise DataError(refusal) from None
    except (QuietgradError, FileNotFoundError):
        raise
    except Exception:
        raise DataError(refusal) from None
