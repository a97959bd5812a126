"""How a model is called: keywords, ``None`` and dictionaries, told to an engine that knows tensors only.

The engine differentiates a module as a function of some tensors with examples first. A call of a Hugging Face model
has them in keywords, beside flags and ``None``. A :class:`CallLayout` is what is left of a call without its
tensors; while the engine works, a hook of the module puts the tensors back into their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from quietgrad.objectives.networks.tape import mapped, tensors_of

__all__ = ["CallLayout"]


class CallLayout:
    """A call without its tensors.

    >>> import torch
    >>> layout = CallLayout((torch.ones(2),), {"mask": None, "flags": {"x": torch.zeros(2)}})
    >>> layout.count, layout.filled((torch.tensor([1]), torch.tensor([2])))
    (2, ((tensor([1]),), {'mask': None, 'flags': {'x': tensor([2])}}))
    >>> CallLayout((torch.zeros(5), 3), {}).shape == CallLayout((torch.ones(2), 4), {}).shape
    True
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        numbers = iter(range(10**6))
        self._call = mapped((args, kwargs), lambda _: _Place(next(numbers)))
        self.count = len(tensors_of((args, kwargs)))
        self.name = repr(self._call)
        """The call, with all that is no tensor."""
        self.shape = repr(_blank(self._call))
        """The call without that: where there are tensors, ``None`` and something else."""

    @property
    def plain(self) -> bool:
        """Whether it is a call with tensors only, one after the other."""
        args, kwargs = self._call
        return not kwargs and all(isinstance(arg, _Place) for arg in args)

    def filled(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with these tensors."""
        args, kwargs = _filled(self._call, tensors)
        return args, kwargs

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Within this context ``module(*tensors)`` is this call with these tensors."""
        if self.plain:
            yield
            return

        def arrange(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.filled(args)

        handle = module.register_forward_pre_hook(arrange, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


class _Place:
    """Where tensor ``number`` of a call goes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<{self.number}>"


def _blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_blank(item) for item in value]
    return value if value is None or isinstance(value, _Place) else ...


def _filled(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_filled(item, tensors) for item in value)
    return value
