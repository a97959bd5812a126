"""Attack configurations: small settings of every registered private algorithm, with enough signal to see a bug."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quietgrad.algorithms.registry import ALGORITHMS
from quietgrad.audit.canaries import table_game
from quietgrad.audit.replicas import Game
from quietgrad.privacy.budget import Budget, Relation


@dataclass(frozen=True)
class Attack:
    """One configuration to audit: a label, the algorithm, its public n and the promise.

    ``share`` of the runs asked for is made where a run is dear; the budget then leaves signal to spare. ``game`` is
    what worlds to tell apart, if not those of gradient-space canaries.
    """

    label: str
    algorithm: Any
    n: int
    budget: Budget
    share: float = 1.0
    game: Game | None = None


def attacked() -> list[str]:
    """The names of algorithms that promise anything.

    >>> "dp-srm" in attacked(), "sgd" in attacked()
    (True, False)
    """
    return [entry.name for entry in ALGORITHMS.values() if entry.attacks]


def attacks_on(name: str) -> list[Attack]:
    """The configurations for an algorithm.

    >>> [attack.label for attack in attacks_on("dp-gd")]
    ['every record', 'every record']
    """
    if name not in attacked():
        raise ValueError(f"algorithm {name!r}: no attack is prepared; there is one for {', '.join(attacked())}.")
    entry = ALGORITHMS[name]
    return [
        Attack(
            example.label,
            entry.make(example.settings),
            example.n,
            Budget(example.epsilon, example.delta, relation),
            example.share,
            None
            if example.space == "gradients"
            else table_game(example.n, relation, only=example.only, every=example.every),
        )
        for example in entry.attacks
        for relation in (Relation.parse(example.relation),)
    ]
