"""Pins: what members read out to each other before they approve a plan, and what a command checks.

A pin is ε, δ, n and 128 bits of the plan's digest. An author of a plan can search for two with the same first
digits: 64 bits were forged in 420 s on one core, with ε = 1 in one plan and 50 in the other. A short pin therefore
always carries the three numbers that decide the guarantee, and no pin has fewer than 32 digits.
"""

from __future__ import annotations

import re

from quietgrad.core.errors import BudgetError
from quietgrad.federation.plan_file import PlanFile

DIGITS = 32
_WHOLE = 64
_NUMBER = re.compile(r"(ε|epsilon|eps|δ|delta|n)\s*=\s*([^\s,;:·]+)", re.IGNORECASE)
_NAMES = {"epsilon": "ε", "eps": "ε", "delta": "δ"}
_FORM = (
    "Give what `quietgrad federate show PLAN` prints as its pin: ε, δ, n and 32 digits of the digest; or all 64 "
    "digits."
)


def readable_digest(digest: str) -> str:
    """The first 128 bits of a digest in groups to read aloud.

    >>> readable_digest("0123456789abcdef" * 4)
    '0123 4567 89ab cdef 0123 4567 89ab cdef'
    """
    return " ".join(digest[k : k + 4] for k in range(0, DIGITS, 4))


def pin_of(file: PlanFile) -> str:
    """Return the pin that members of a plan read out to each other, and give as ``--pin``."""
    budget = file.budget
    promise = "ε=none" if budget is None else f"ε={budget.epsilon!r} δ={budget.delta!r}"
    return f"{promise} n={sum(file.sizes)} {readable_digest(file.digest)}"


def check_pin(pin: str, file: PlanFile) -> None:
    """Raise unless ``pin`` is one of this plan.

    Raises:
        ValueError: it has too few digits, or lacks one of ε, δ and n.
        BudgetError: it is the pin of another plan.
    """
    pin_numbers = {_NAMES.get(name.lower(), name.lower()): number for name, number in _NUMBER.findall(pin)}
    digits = re.sub(r"[\s,;:·]", "", _NUMBER.sub("", pin)).lower()
    if not re.fullmatch("[0-9a-f]*", digits) or len(digits) > _WHOLE:
        raise ValueError(f"{pin!r}: is not a pin. {_FORM}")
    if len(digits) < DIGITS:
        raise ValueError(
            f"{pin!r}: has {len(digits)} digits of the digest, and so few can be the same in two plans. {_FORM}"
        )
    budget = file.budget
    stated = {"ε": None if budget is None else budget.epsilon, "n": sum(file.sizes)}
    stated |= {} if budget is None else {"δ": budget.delta}
    if len(digits) < _WHOLE and (missing := [name for name in stated if name not in pin_numbers]):
        raise ValueError(f"{pin!r}: does not say {' and '.join(missing)}. {_FORM}")
    if not file.digest.startswith(digits) or any(
        name not in stated or _number(number) != stated[name] for name, number in pin_numbers.items()
    ):
        raise BudgetError(f"the plan's pin is {pin_of(file)}, not the approved {pin}; nothing was given.")


def _number(text: str) -> float | str | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        return text
