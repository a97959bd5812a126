"""``PrivacyEngine`` and its ``accountant`` under the names that Opacus users know: a script changes its imports.

What an argument of Opacus would change about the guarantee is either true here or refused with the reason; what it
would change about speed alone is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from quietgrad.errors import DataError
from quietgrad.torch import loop_checkpoint
from quietgrad.torch.history import History
from quietgrad.torch.module_validator import ModuleValidator
from quietgrad.torch.opacus_verbs import Private, make_private, make_private_with_epsilon
from quietgrad.torch.private_module import PrivateModule
from quietgrad.torch.private_optimizer import PrivateOptimizer
from quietgrad.torch.provenance import loading

__all__ = ["Accountant", "PrivacyEngine"]

_MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")


class Accountant:
    """What the loops of an engine have cost, as far as they have come."""

    def __init__(self, history: History) -> None:
        self._history = history

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, steps) of all loops; batches that are no secret samples have rate 1."""
        return [row for cost in self._history.costs() for row in cost.history]

    def __len__(self) -> int:
        return sum(cost.used for cost in self._history.costs())

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε of all samples so far, as if all were of the same people: the smallest that is proved."""
        return self._history.epsilon(delta)

    @staticmethod
    def mechanism() -> str:
        """The name of the accountant: privacy loss distributions, as ``"prv"`` uses."""
        return "prv"

    def state_dict(self) -> dict[str, Any]:
        """What was spent; whoever loads it and goes on is counted here too."""
        return {"quietgrad": self._history.to_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add what another engine spent; nothing that is known here is forgotten."""
        if "quietgrad" not in state_dict:
            raise ValueError(
                "load_state_dict: not the state of an accountant of quietgrad. What another program says was spent "
                "cannot be checked; keep it in a ledger beside this run."
            )
        self._history.load(state_dict["quietgrad"])


class PrivacyEngine:
    """Opacus's entry point by name, so that a script is ported by changing its import.

    ``secure_mode`` is accepted and changes nothing: noise and samples are cryptographic in any case. So is
    ``accountant="prv"`` or ``"rdp"``: ε is the smallest that is proved. The engine remembers every loop it made
    private, and :meth:`get_epsilon` is what all of them cost together.

    >>> PrivacyEngine(accountant="gdp")
    Traceback (most recent call last):
    ValueError: accountant='gdp': a central limit, which is no upper bound on what is spent; use 'prv' or 'rdp'.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = True) -> None:
        if accountant not in ("prv", "rdp"):
            why = (
                "a central limit, which is no upper bound on what is spent" if accountant == "gdp" else "not known"
            )
            raise ValueError(f"accountant={accountant!r}: {why}; use 'prv' or 'rdp'.")
        self._history = History()
        self._made = 0
        self.accountant = Accountant(self._history)

    def make_private(self, **settings: Any) -> Any:
        """See :func:`quietgrad.torch.make_private`; ``grad_sample_mode="ghost"`` returns the criterion too.

        All of Opacus's modes give the same clipped sums here, at the same price. Further arguments of Opacus:
        ``criterion`` is returned as it is, ``batch_first`` must be true and ``noise_generator`` ``None``.
        """
        return self._keep(make_private, settings)

    def make_private_with_epsilon(self, **settings: Any) -> Any:
        """See :func:`quietgrad.torch.make_private_with_epsilon` and :meth:`make_private`."""
        return self._keep(make_private_with_epsilon, settings)

    def get_epsilon(self, delta: float) -> float:
        """ε of all samples that loops of this engine have had so far, as if all were of the same people.

        What states that were loaded had cost counts too, and what others went on to spend from the same states on
        this machine. For loops on other people's records use another engine.
        """
        if not self._made:
            raise RuntimeError("get_epsilon: nothing was made private yet; call make_private first.")
        return self._history.epsilon(delta)

    @staticmethod
    def is_compatible(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        """Whether the module could be made private."""
        return ModuleValidator.is_valid(module)

    @staticmethod
    def validate(
        *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Raise if the module could not be made private."""
        ModuleValidator.validate(module, strict=True)

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy with layers that can be made private; make the optimizer of its parameters."""
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: None = None,
    ) -> None:
        """Write module, optimizer, ``checkpoint_dict`` and what they cost to a safetensors file.

        ``checkpoint_dict`` may hold tensors, numbers, texts, lists and dictionaries: nothing is pickled.
        """
        _refuse(noise_scheduler=noise_scheduler, grad_clip_scheduler=grad_clip_scheduler, pickle=torch_save_kwargs)
        content: dict[str, Any] = {
            **(checkpoint_dict or {}),
            "module_state_dict": dict(module.state_dict(**(module_state_dict_kwargs or {}))),
        }
        if optimizer is not None:
            content["optimizer_state_dict"] = optimizer.state_dict()
        spent = self._history.to_json()
        loops = [
            holder._loop for holder in (module, optimizer) if isinstance(holder, PrivateModule | PrivateOptimizer)
        ]
        if loops:
            spent["of"] = sorted({name for loop in loops for name in (loop.name, *loop.came_from)})
        loop_checkpoint.save(path, content, spent)

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: None = None,
    ) -> dict[str, Any]:
        """Load module and optimizer, and what they cost: it counts here from now on, however often it is loaded.

        Returns what else was in the file. A loop with a target ε stops earlier by what was loaded.
        """
        _refuse(noise_scheduler=noise_scheduler, grad_clip_scheduler=grad_clip_scheduler, pickle=torch_load_kwargs)
        content, spent = loop_checkpoint.load(path)
        if "module_state_dict" not in content:
            raise DataError(f"{path}: holds no state of a module; save one with save_checkpoint.")
        state = content.pop("optimizer_state_dict", None)
        # First what it cost: if something fails below, the state may be in the model already.
        self._history.load(spent)
        if isinstance(optimizer, PrivateOptimizer):
            optimizer._loop.load_history(spent)
        with loading(module, spent):
            module.load_state_dict(content["module_state_dict"], **(module_load_dict_kwargs or {}))
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
        self._history.keep_promises()
        self._made += 1
        return content

    def _keep(self, make: Callable[..., Private], settings: dict[str, Any]) -> Any:
        mode = settings.pop("grad_sample_mode", "hooks")
        criterion = settings.pop("criterion", None)
        if mode not in _MODES:
            why = (
                "gradients that the loop sets itself may be of several records, and nothing could bound them"
                if mode == "no_op"
                else "not known"
            )
            raise ValueError(f"grad_sample_mode={mode!r}: {why}; use one of {', '.join(map(repr, _MODES))}.")
        if not settings.pop("batch_first", True):
            raise ValueError(
                "batch_first=False: rows are followed to their records along the first axis, so that no record "
                "counts twice; move the batch to the front and transpose inside the module."
            )
        if settings.pop("noise_generator", None) is not None:
            raise ValueError(
                "noise_generator: numbers of torch's generators can be predicted and subtracted; noise is AES-256 "
                "here. For tests that repeat use seed=, which says that nothing is private."
            )
        model, optimizer, loader = made = make(**settings, history=self._history)
        self._made += 1
        if "ghost" not in mode:
            return made
        return model, optimizer, nn.CrossEntropyLoss() if criterion is None else criterion, loader


def _refuse(*, noise_scheduler: Any, grad_clip_scheduler: Any, pickle: Any) -> None:
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "noise and clipping bounds have no schedulers here: noise_schedule= is declared and accounted for "
            "beforehand, and clipping='adaptive' follows the gradients."
        )
    if pickle:
        raise ValueError("checkpoints are safetensors files: nothing is pickled, so there is nothing to set.")
