"""Opacus' arguments that have one meaning here, and its accountant by name."""

from __future__ import annotations

from typing import Any, NoReturn

from quietgrad.core.errors import SettingError
from quietgrad.core.sampling import Poisson
from quietgrad.torch.loops.base import epsilon_of
from quietgrad.torch.loops.handle_loop import HandleLoop

_ADAPTIVE = (
    "is of adaptive clipping, whose bound follows the data and is paid for by a second release in each step. Use "
    "clipping='automatic', which needs no bound to be found."
)
# The values that they may have, and why no others.
_ONLY_ARGUMENTS: dict[str, tuple[tuple[object, ...], str]] = {
    "rand_on_empty": (
        (False,),
        "rand_on_empty=True: an empty sample is run on a synthetic record that adds nothing, so it needs no random "
        "one. Leave it out.",
    ),
    "target_unclipped_quantile": ((), f"target_unclipped_quantile {_ADAPTIVE}"),
    "clipbound_learning_rate": ((), f"clipbound_learning_rate {_ADAPTIVE}"),
    "max_clipbound": ((), f"max_clipbound {_ADAPTIVE}"),
    "min_clipbound": ((), f"min_clipbound {_ADAPTIVE}"),
    "unclipped_num_std": ((), f"unclipped_num_std {_ADAPTIVE}"),
}
_MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")
_GHOST = ("ghost", "ghost_fsdp")
_REFUSED_MODES = {
    "no_op": "gradients that the loop sets itself may be of several records, and nothing could bound them",
}


def read_opacus_arguments(given: dict[str, Any]) -> bool:
    """Raise unless all arguments are Opacus' and have a value that is honoured; returns whether a mode is "ghost".

    >>> read_opacus_arguments({"grad_sample_mode": "ghost", "batch_first": True})
    True
    """
    settings = dict(given)
    for name, (allowed, why) in _ONLY_ARGUMENTS.items():
        if name in settings and settings.pop(name) not in allowed:
            raise ValueError(why)
    mode = settings.pop("grad_sample_mode", None) or "hooks"
    if mode not in _MODES:
        why = _REFUSED_MODES.get(mode, "not known")
        raise ValueError(f"grad_sample_mode={mode!r}: {why}; use one of {', '.join(map(repr, _MODES))}.")
    if not settings.pop("batch_first", True):
        raise ValueError(
            "batch_first=False: records lie along the first axis; move the batch to the front and transpose inside "
            "the module."
        )
    if settings.pop("noise_generator", None) is not None:
        raise ValueError(
            "noise_generator: numbers of torch's generators can be predicted and subtracted; noise is AES-256 "
            "here. For tests that repeat use seed=, which says that nothing is private."
        )
    if settings:
        raise TypeError(f"make_private() got an unexpected keyword argument {next(iter(settings))!r}")
    return mode in _GHOST


class Accountant:
    """Accountant of an engine's loops, for the samples so far."""

    def __init__(self, name: str = "prv") -> None:
        self.loops: list[HandleLoop] = []
        self._name = name

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε of all samples so far, as if all were of the same people: the smallest that is proved."""
        return epsilon_of(self.loops, delta)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier, sample rate and number of samples of each stretch of a loop of Poisson samples."""
        entries = []
        for loop in self.loops:
            counts = loop.plan.first(loop.used)
            for slot in loop.plan.schedule.slots:
                if not isinstance(slot.sampling, Poisson):
                    raise SettingError(
                        "accountant.history: a loop whose samples are not Poisson has no sample rate. "
                        "loader.privacy states what it released."
                    )
                if counts[slot.name]:
                    multiplier = slot.multiplier(loop.plan.noise_multiplier)
                    entries.append((multiplier, slot.sampling.rate, counts[slot.name]))
        return entries

    def __len__(self) -> int:
        """Samples so far."""
        return sum(loop.used for loop in self.loops)

    def __bool__(self) -> bool:
        return True

    def mechanism(self) -> str:
        """The name that the engine was made with; ε is the smallest that is proved in any case."""
        return self._name

    def step(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "accountant.step: samples are counted when the loader hands them out, and the ledger is charged "
            "beforehand, so there is nothing to call. Leave it out."
        )

    def get_optimizer_hook_fn(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "accountant.get_optimizer_hook_fn: samples are counted by the loop itself, so no hook is needed. Leave "
            "it and attach_step_hook out; get_epsilon(delta) says what was spent."
        )

    def state_dict(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "accountant.state_dict: the ledger keeps what was spent, for all programs; give make_private ledger= "
            "and account=. A loop that goes on after a crash is qt.PrivateLoop(folder=)."
        )

    load_state_dict = state_dict
