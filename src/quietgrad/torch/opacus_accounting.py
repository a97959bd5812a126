"""Opacus' accountants and ``get_noise_multiplier`` for runs that are counted by hand: what they state is proved."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, NoReturn

from quietgrad.core.accounting.accounting import account, calibrate_event
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.events import composed, poisson_gaussian
from quietgrad.core.errors import SettingError

_NO_BOUND = "a central limit, which is no upper bound on what is spent"


def check_mechanism(mechanism: str) -> str:
    """Return the name of an accountant of Opacus; raise if it is none, or proves nothing."""
    if mechanism not in ("prv", "rdp"):
        why = _NO_BOUND if mechanism == "gdp" else "not known"
        raise SettingError(f"{{accountant}}: {why}; use 'prv' or 'rdp'.", accountant=mechanism)
    return mechanism


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    epsilon_tolerance: float = 0.01,
    **kwargs: object,
) -> float:
    """The least noise multiplier whose run is proved to meet the target, under Opacus' name.

    The steps are Poisson samples of rate ``sample_rate``; ``epochs`` are ⌈epochs ÷ sample_rate⌉ of them. No
    tolerance is needed, because what is returned meets the target itself.

    >>> round(get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, epochs=10), 2)
    0.81
    """
    if kwargs:
        raise TypeError(f"get_noise_multiplier() got an unexpected keyword argument {next(iter(kwargs))!r}")
    check_mechanism(accountant)
    if (epochs is None) == (steps is None):
        raise ValueError("get_noise_multiplier: give epochs= or steps=, one of them.")
    poisson_gaussian(rate=sample_rate, noise_multiplier=1.0, steps=1)  # refuses a rate that is none
    # Rounding alone makes no step more: 3 ÷ (1/75) is 225.00000000000003 or 224.99999999999997.
    count = steps if epochs is None else math.ceil(epochs / sample_rate - 1e-9)
    return calibrate_event(
        lambda z: poisson_gaussian(rate=sample_rate, noise_multiplier=z, steps=_whole(count)),
        budget=Budget(target_epsilon, target_delta, Relation.ADD_REMOVE),
    )


def _whole(count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise SettingError("{steps}: must be a whole number ≥ 1.", steps=count)
    return count


class RDPAccountant:
    """Opacus' accountant by hand, of Poisson samples with Gaussian noise; ε is the smallest that is proved.

    A loop made by ``make_private`` counts itself: see ``loader.privacy`` and ``engine.get_epsilon``.

    >>> accountant = RDPAccountant()
    >>> for _ in range(100):
    ...     accountant.step(noise_multiplier=1.1, sample_rate=0.01)
    >>> round(accountant.get_epsilon(delta=1e-5), 2), len(accountant)
    (0.55, 100)
    """

    _name = "rdp"

    def __init__(self) -> None:
        self.history: list[tuple[float, float, int]] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one sample."""
        poisson_gaussian(rate=sample_rate, noise_multiplier=noise_multiplier, steps=1)  # refuses what is none
        last = self.history[-1] if self.history else (None, None, 0)
        if last[:2] == (noise_multiplier, sample_rate):
            self.history[-1] = (noise_multiplier, sample_rate, last[2] + 1)
        else:
            self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float, **_: object) -> float:
        """ε of all samples so far, add-remove."""
        kinds = groupby(sorted(self.history), key=lambda entry: entry[:2])
        events = [
            poisson_gaussian(rate=rate, noise_multiplier=z, steps=sum(count for *_, count in entries))
            for (z, rate), entries in kinds
        ]
        return account(composed(events), delta=delta, relation=Relation.ADD_REMOVE) if events else 0.0

    def get_privacy_spent(self, *, delta: float, **_: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError("get_privacy_spent: use get_epsilon(delta); there is no order α to be told.")

    def get_optimizer_hook_fn(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "get_optimizer_hook_fn: a private loop counts its own samples: see loader.privacy. Call step() by hand "
            "for any other."
        )

    def __len__(self) -> int:
        return sum(count for *_, count in self.history)

    def __bool__(self) -> bool:
        return True

    @classmethod
    def mechanism(cls) -> str:
        """Opacus' name of it."""
        return cls._name

    def state_dict(self) -> dict[str, Any]:
        """The history."""
        return {"history": list(self.history), "mechanism": self._name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a history; one that Opacus saved too."""
        try:
            history = [(float(z), float(rate), _whole(count)) for z, rate, count in state_dict["history"]]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                "load_state_dict: must be what state_dict() returned: a history of noise multipliers, sample rates "
                "and numbers of steps ≥ 1."
            ) from None
        for z, rate, count in history:
            poisson_gaussian(rate=rate, noise_multiplier=z, steps=count)  # refuses what is none
        self.history = history


class PRVAccountant(RDPAccountant):
    """The same under Opacus' other name."""

    _name = "prv"


class GaussianAccountant:
    """Opacus' ``"gdp"``, which is refused: a central limit is no upper bound on what is spent."""

    def __init__(self) -> None:
        raise ValueError(f"GaussianAccountant: {_NO_BOUND}; use RDPAccountant or PRVAccountant.")


def create_accountant(mechanism: str) -> RDPAccountant:
    """The accountant by hand that Opacus calls ``mechanism``: ``"rdp"`` or ``"prv"``.

    >>> create_accountant("prv").mechanism()
    'prv'
    """
    return PRVAccountant() if check_mechanism(mechanism) == "prv" else RDPAccountant()
