"""One line that says what a run asked for and what it spent: on its model, and on a score of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from quietgrad.core.files import read_json
from quietgrad.core.session.statement import Privacy

_SAME = 1e-3  # relative: calibration stops this close below the ε that was asked for

LESS_THAN_SUM = (
    "The total is at most the sum of the runs' ε, and mostly less: costs composed together add up more slowly."
)


@dataclass(frozen=True)
class Spending:
    """The ε and δ of everything a page shows of one run, by basic composition, and what was asked for.

    >>> print(Spending(((0.8, 8e-7), (0.2, 2e-7)), (1.0, 1e-6), "add-remove"))
    ε asked 1 = model 0.8 + score 0.2, at δ = 1e-06, add-remove
    >>> print(Spending(((1.0, 1e-6), (0.3, 1e-6)), (1.0, 1e-6), "add-remove"))
    ε asked 1, spent 1.3 = model 1 + score 0.3, at δ = 2e-06, add-remove
    >>> print(Spending(((0.5, 1e-6),), (0.5, 1e-6), "add-remove"))
    ε asked 0.5, spent on the model, at δ = 1e-06, add-remove
    >>> print(Spending(((0.4, 1e-6),), None, "replace-one"))
    ε spent 0.4 on the model, at δ = 1e-06, replace-one
    >>> print(Spending(((0.4, 1e-6),), None, "add-remove", apart=True))
    ε spent 0.4 on the model, at δ = 1e-06, add-remove; the score costs besides, under another guarantee
    """

    parts: tuple[tuple[float, float], ...]
    """(ε, δ) of the model, and of the score if there is one."""
    asked: tuple[float, float] | None
    relation: str
    apart: bool = False
    """Whether there is a score whose relation or unit is another, so that no sum of both exists."""

    @property
    def scored(self) -> bool:
        """Whether a score is in the sum."""
        return len(self.parts) > 1

    @property
    def epsilon(self) -> float:
        return math.fsum(epsilon for epsilon, _ in self.parts)

    @property
    def delta(self) -> float:
        return math.fsum(delta for _, delta in self.parts)

    def __str__(self) -> str:
        names = ("model", "score")
        total = " + ".join(f"{name} {part[0]:.4g}" for name, part in zip(names, self.parts, strict=False))
        if self.asked is None:
            words = f"ε spent {self.epsilon:.4g} on the model" if len(self.parts) == 1 else f"ε spent {total}"
        elif math.isclose(self.epsilon, self.asked[0], rel_tol=_SAME) and len(self.parts) == 1:
            words = f"ε asked {self.asked[0]:.4g}, spent on the model"
        elif math.isclose(self.epsilon, self.asked[0], rel_tol=_SAME):
            words = f"ε asked {self.asked[0]:.4g} = {total}"
        else:
            words = f"ε asked {self.asked[0]:.4g}, spent {self.epsilon:.4g} = {total}"
        besides = "; the score costs besides, under another guarantee" if self.apart else ""
        return f"{words}, at δ = {self.delta:.3g}, {self.relation}{besides}"


def spending_of(model: Privacy, score: Privacy | None, asked: tuple[float, float] | None) -> Spending | None:
    """Return what the two statements add up to; a score under another relation or unit is left out of the sum."""
    if not model.is_private or model.refuted or model.epsilon is None or model.delta is None:
        return None
    parts = [(model.epsilon, model.delta)]
    same = score is not None and (score.relation, score.unit) == (model.relation, model.unit)
    if score is not None and same and score.epsilon is not None and score.delta is not None:
        parts.append((score.epsilon, score.delta))
    return Spending(tuple(parts), asked, str(model.relation), apart=score is not None and len(parts) == 1)


def asked_of(folder: Path) -> tuple[float, float] | None:
    """Return the ε and δ that the options of the run in ``folder`` asked for; ``None`` if there are none."""
    try:
        options = read_json(folder / "run.json")
        epsilon, delta = options.get("whole") or (options["epsilon"], options["delta"])
        return float(epsilon), float(delta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
