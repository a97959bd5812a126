"""Functions of torch and transformers that are replaced while a program of one record runs.

Below ``vmap`` the records of a pass lie together, so no code of the user's may run there. Functions by which torch
would call it are replaced, and end the pass: the program is then run one record at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch._functorch.autograd_function as autograd_function
import torch._tensor_str as tensor_text
import torch.utils._python_dispatch as dispatch_modes
import torch.utils.checkpoint as checkpointing
from torch import Tensor

from quietgrad.torch.networks.randomness import PerRecordRNG
from quietgrad.torch.networks.taps import NotTogether, functorch
from quietgrad.torch.networks.trees import Called, replaced


@contextmanager
def full_precision() -> Iterator[None]:
    """Without the autocast that the caller may be in: its roundings depend on how many rows there are."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _run_once(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _NotCheckpointed:
    @staticmethod
    def apply(function: Called, preserve: bool, *args: Any) -> Any:
        return function(*args)


def _refuse_own_rule(note: Callable[[], None], function: type[torch.autograd.Function]) -> bool:
    note()
    if _has_own_rule(function):
        raise NotTogether(f"{function.__name__} has a rule for vmap of its own, which would see all records")
    return False


_has_own_rule = autograd_function.has_overridden_vmap_rule
_push_mode = dispatch_modes._push_mode


def _refuse_mode(mode: Any) -> None:
    if not isinstance(mode, PerRecordRNG):
        raise NotTogether(f"{type(mode).__name__} is a dispatch mode, which would see all records")
    _push_mode(mode)


def _refuse_text(*_: object) -> str:
    raise NotTogether("it makes a text of a tensor, which would show all records")


@contextmanager
def nothing_below() -> Iterator[None]:
    """Code of the user's that torch would call below vmap, with the tensors of all records, ends the pass.

    Dispatch modes, hooks on what autograd saves, and the text of a tensor; tensors of the user's own classes are
    found by the taps.
    """
    hooks = torch._C._autograd
    if hooks._top_saved_tensors_default_hooks(True) is not None:
        raise NotTogether("hooks on saved tensors are active, which would see all records")
    below = replaced(dispatch_modes, {"_push_mode": _refuse_mode})
    texts = replaced(tensor_text, {"_functorch_wrapper_str_intern": _refuse_text})
    with below, texts, torch.autograd.graph.disable_saved_tensors_hooks("they would see all records"):
        yield


@contextmanager
def torch_as_needed(note: Callable[[], None]) -> Iterator[None]:
    """Two things of torch's and one of transformers', while a program runs; ``note`` is told of autograd functions.

    Checkpointed layers are run as they are: run again on the way back, they would be outside of their pass. An
    ``autograd.Function`` with a rule for vmap of its own would see all records; its program is run one by one. And
    transformers leaves a mask away that hides nothing, unless it is traced: records with and without padding would
    be run apart for it.
    """
    once = {"CheckpointFunction": _NotCheckpointed, "_checkpoint_without_reentrant_generator": _run_once}
    own = {"has_overridden_vmap_rule": partial(_refuse_own_rule, note)}
    with ExitStack() as stack:
        stack.enter_context(replaced(checkpointing, once))
        stack.enter_context(replaced(autograd_function, own))
        for name in _ASKS_MASKS:
            asking = sys.modules.get(name)
            if asking is not None and hasattr(asking, "is_tracing"):
                stack.enter_context(replaced(asking, {"is_tracing": partial(_is_traced, asking.is_tracing)}))
        yield


_ASKS_MASKS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils", "transformers.modeling_utils")


def _is_traced(is_tracing: Callable[..., bool], tensor: object = None) -> bool:
    """Whether a tensor has no value to ask for: it has one for each record."""
    return (isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor)) or is_tracing(tensor)
