"""Where a module's weights come from: kept on the module itself, so that no way to its state goes around it.

The user's module is in their hands beside the private one. Its ``state_dict()`` says what it cost in the metadata
of the state, which ``torch.save`` and ``copy.deepcopy`` keep and plain dictionaries and safetensors do not; a state
that says nothing, or holds other tensors than it speaks of, is refused by every module of a private loop, however
it is loaded. Copies and pickles of the module keep what is said here, and so does the next private loop on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quietgrad.errors import BudgetError, DataError
from quietgrad.files import read_json
from quietgrad.privacy.budget import Relation, Unit
from quietgrad.torch.history import LoopCost, origins

if TYPE_CHECKING:
    from quietgrad.torch.own_loop import PrivateLoop

__all__ = ["IN_FOLDERS", "Provenance", "earlier", "loading", "record_in"]

IN_FOLDERS = "quietgrad.json"  # in a folder of weights: what they cost

_SPENT, _TENSORS = "quietgrad", "quietgrad tensors"  # in the metadata of a state
_SAYS_NOTHING = (
    "load_state_dict: this state does not say what it cost: plain dictionaries and safetensors lose it. If it "
    "comes from a private loop, load what state_dict() gave (torch.save and copy.deepcopy keep what it cost) or "
    "use save_checkpoint and load_checkpoint; if it is public, or of other people, load it into a new module "
    "before make_private. Nothing was loaded."
)
_CHANGED = (
    "load_state_dict: tensors of this state are not those that state_dict() gave: some were put in or changed "
    "since, and nobody knows what they cost. Load a state as it was given, or a copy.deepcopy of it; what is "
    "public, or of other people, goes into a new module before make_private. Nothing was loaded."
)


class Provenance:
    """The hooks of one loop on the modules it trains: states that leave are marked, states that come in are read.

    A pickle holds the record alone. A copy shares it, and may be loaded into as its owner likes.
    """

    def __init__(self, loop: PrivateLoop | None, told: str = "") -> None:
        self._loop, self._told = loop, told
        self._own: frozenset[int] = frozenset()  # the loop keeps them alive
        self._last: str | None = None
        self.admitted = False  # whether the state that is being loaded was read already

    @property
    def record(self) -> str:
        """What the weights cost, as JSON."""
        return self._told if self._loop is None else json.dumps(self._loop.state())

    def put(self, *modules: nn.Module) -> None:
        """Take the place of what was known about them."""
        parts = {id(part): part for module in modules for part in module.modules()}
        self._own = frozenset(parts)
        for part in parts.values():
            for hooks in (part._state_dict_hooks, part._load_state_dict_pre_hooks):
                for key in [key for key, hook in hooks.items() if _of(hook) is not None]:
                    del hooks[key]
            part.register_load_state_dict_pre_hook(self.admit)  # type: ignore[no-untyped-call]
        for module in {id(module): module for module in modules}.values():
            module.register_state_dict_post_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        """Write into the metadata of a state what it cost, and of which tensors that is said, part by part."""
        metadata = getattr(state, "_metadata", None)
        if metadata is None:  # a module with a state_dict of its own may have none
            return
        record = self.record
        for name, told in metadata.items():
            if name == prefix[:-1] or name.startswith(prefix):
                told[_SPENT], told[_TENSORS] = record, {}
        for key, value in state.items():
            if key.startswith(prefix):
                part = _part(key, metadata)
                metadata[part][_TENSORS][key.removeprefix(f"{part}.")] = _digest(value)

    def admit(self, module: nn.Module, state: Any, prefix: str, told: Any, *_: Any) -> None:
        """Read what a state cost before it is loaded into a part of the loop's own module, or refuse it."""
        mine = {key: value for key, value in state.items() if key.startswith(prefix)}
        if self._loop is None or id(module) not in self._own or self.admitted or not mine:
            return
        if _SPENT not in told:
            raise BudgetError(_SAYS_NOTHING)
        # All parts at once where the whole state is at hand, so that none is loaded if another is refused.
        metadata = getattr(state, "_metadata", None)
        held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        for key, value in mine.items():
            name = key[len(prefix) :]
            part = prefix[:-1] if metadata is None else _part(key, metadata)
            known = (told if metadata is None else metadata.get(part, {})).get(_TENSORS, {})
            leaf = key.removeprefix(f"{part}.")
            if metadata is None and "." in leaf and leaf not in known:
                continue  # of a part that is asked for itself
            if known.get(leaf) != _digest(value) and not _same(value, held.get(name)):
                raise BudgetError(_CHANGED)
        self.read(told[_SPENT])

    def read(self, record: str) -> None:
        """What a state cost counts from now on."""
        if self._loop is None or record == self._last:
            return
        try:
            self._loop.load_history(json.loads(record))
        except (TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError("load_state_dict: the state's record of its spending cannot be read.") from None
        self._last = record

    def __deepcopy__(self, _: Any) -> Provenance:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Provenance, (None, self.record)


def _part(key: str, metadata: Any) -> str:
    """The part of a module that a key of its state belongs to."""
    while key not in metadata and key:
        key = key.rpartition(".")[0]
    return key


def _digest(value: Any) -> str:
    """What a tensor holds. Nothing is said of shards, which nobody has whole, and of a module's own extra state."""
    if not isinstance(value, Tensor) or value.is_meta or hasattr(value, "full_tensor"):
        return ""
    numbers: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(numbers).hexdigest()[:32]


def _same(value: Any, held: Tensor | None) -> bool:
    """Whether to load ``value`` changes nothing: it is what the module holds, as a state that is no copy does."""
    if held is None or not isinstance(value, Tensor) or hasattr(value, "full_tensor"):
        return False
    return value.data_ptr() == held.data_ptr() and value.shape == held.shape and value.dtype == held.dtype


def _of(hook: Any) -> Provenance | None:
    """Whose hook this is, if it is one of ours."""
    hook = getattr(hook, "hook", hook)
    found = getattr(hook, "__self__", hook)
    return found if isinstance(found, Provenance) else None


def _found(module: nn.Module) -> Iterable[Provenance]:
    """What is known about a module and its parts, each once."""
    hooks = [hook for part in module.modules() for hook in part._load_state_dict_pre_hooks.values()]
    own = module.__dict__.get("_provenance")  # of a private module whose place on its module another has taken
    return {id(found): found for found in map(_of, [*hooks, own]) if found is not None}.values()


def earlier(module: nn.Module, relation: Relation, unit: Unit) -> list[Any]:
    """Records of the loops that a module has been through, for the next one on it."""
    records = []
    for record in [*(json.loads(found.record) for found in _found(module)), *_read_from(module)]:
        costs = [LoopCost.from_json(cost) for cost in record["loops"] if cost["loop"] in origins(record)]
        if all(cost.relation is relation and cost.unit is unit for cost in costs):
            records.append(record)
        elif any(cost.used for cost in costs):
            raise ValueError(
                "the module was trained by a private loop for another relation, or about people instead of "
                "records, and the two do not add up. Make this loop like that one, or load the weights into a new "
                "module if they are of other people. Nothing was spent."
            )
    return records


def record_in(folder: str) -> Any:
    """What the weights in a folder cost."""
    try:
        return read_json(Path(folder) / IN_FOLDERS)
    except (OSError, ValueError):
        raise BudgetError(
            f"{folder}: this checkpoint does not say what it cost ({IN_FOLDERS} is not there or cannot be read). "
            "Resume from one that DPTrainer saved; if its weights are public, or of other people, load them into "
            "the model before it is given to DPTrainer. Nothing was trained."
        ) from None


def _read_from(module: nn.Module) -> list[Any]:
    """What the folders cost that ``from_pretrained`` read a module, or parts of it, from."""
    folders = {str(getattr(part, "name_or_path", None) or "") for part in module.modules()} - {""}
    return [record_in(folder) for folder in sorted(folders) if (Path(folder) / IN_FOLDERS).is_file()]


@contextmanager
def loading(module: nn.Module, record: Any) -> Iterator[None]:
    """Load a state whose cost is told apart from it, as a file does."""
    loops = [found for found in _found(module) if found._loop is not None]
    for found in loops:
        assert found._loop is not None
        found._loop.load_history(record)
        found.admitted = True
    try:
        yield
    finally:
        for found in loops:
            found.admitted = False
