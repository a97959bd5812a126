"""Where a module's weights come from: kept on the module itself, so that no way to its state goes around it.

The user's module is in their hands beside the private one. Its ``state_dict()`` says what it cost in the metadata
of the state, which ``torch.save`` and ``copy.deepcopy`` keep and plain dictionaries and safetensors do not; a state
that says nothing is refused by every module of a private loop, however it is loaded. Copies and pickles of the
module keep what is said here, and so does the next private loop on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from quietgrad.errors import BudgetError, DataError
from quietgrad.privacy.budget import Relation, Unit
from quietgrad.torch.history import LoopCost, origins

if TYPE_CHECKING:
    from quietgrad.torch.own_loop import PrivateLoop

__all__ = ["Provenance", "earlier", "loading"]

_SPENT = "quietgrad"  # in the metadata of a state
_SAYS_NOTHING = (
    "load_state_dict: this state does not say what it cost: plain dictionaries and safetensors lose it. If it "
    "comes from a private loop, load what state_dict() gave (torch.save and copy.deepcopy keep what it cost) or "
    "use save_checkpoint and load_checkpoint; if it is public, or of other people, load it into a new module "
    "before make_private. Nothing was loaded."
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
        """Write into the metadata of a state what it cost, for each of its parts."""
        metadata, record = getattr(state, "_metadata", None), self.record
        for name, told in (metadata or {}).items():
            if name == prefix[:-1] or name.startswith(prefix):
                told[_SPENT] = record

    def admit(self, module: nn.Module, state: Any, prefix: str, told: Any, *_: Any) -> None:
        """Read what a state cost before it is loaded into a part of the loop's own module."""
        own = self._loop is not None and id(module) in self._own
        if own and not self.admitted and any(key.startswith(prefix) for key in state):
            self.read(told.get(_SPENT))

    def read_state(self, state: Any) -> None:
        """Read what a whole state cost."""
        self.read((getattr(state, "_metadata", None) or {}).get("", {}).get(_SPENT))

    def read(self, record: str | None) -> None:
        """What a state cost counts from now on; one that does not say it is refused."""
        if record is None:
            raise BudgetError(_SAYS_NOTHING)
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
    for found in _found(module):
        record = json.loads(found.record)
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
