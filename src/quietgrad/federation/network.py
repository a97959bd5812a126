"""A network of a plan file: a text that stays a text until its plan is approved.

The module's file and the start weights stand beside the plan, and their SHA-256 is part of the plan's digest.
Planning needs the number of parameters only, which the plan states, so ``federate show`` runs no code of the plan.
:class:`NetworkSource` has nothing that a session could ask; :meth:`NetworkSource.build`, which runs the text, is
called by an approval and by ``quietgrad predict --module``. Weights are safetensors; no pickle is read.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.files import is_path_name
from quietgrad.core.session.objectives import BaseObjective, NoRegularizer, Regularizer
from quietgrad.named_settings import check_types

if TYPE_CHECKING:
    from torch import nn

    from quietgrad.torch.networks.module import ModuleObjective

NETWORK = "network"
"""The name of the objective in a plan file."""
SETTINGS: dict[str, Any] = {
    "module": str, "arguments": dict, "loss": str, "start": str, "parameters": int, "seed": int, "pad": int,
}  # fmt: skip
"""The settings of a network in ``[objective]``, with their types."""
LOSSES = {
    "cross-entropy": "torch.nn:CrossEntropyLoss",
    "binary-cross-entropy": "torch.nn:BCEWithLogitsLoss",
    "squared": "torch.nn:MSELoss",
    "causal-lm": "quietgrad.torch.layers:causal_lm_loss",
}
"""Losses by their names in a plan file; any other name is one of the module's file."""
MOST_TEXT = 1 << 20
MOST_PARAMETERS = 1 << 25
_MOST_WEIGHTS = 1 << 30
_MOST_HEADER = 1 << 24
_LONGEST_LINE = 1000

Beside = Callable[[str, int], bytes]
"""Reads a file that stands beside the plan, by its name, of at most so many bytes."""


def nothing_beside(name: str, most: int) -> bytes:
    """Refuse: a plan that came as a text has no files beside it."""
    raise ValueError(f"{name}: a plan that names a network is read from its file, beside which this one stands.")


@dataclass(frozen=True)
class NetworkSource(BaseObjective):
    """A network as its plan describes it, for planning; only :meth:`build` runs its code.

    Args:
        file: the module's file.
        maker: the function in the file that returns the module.
        text: what the file holds.
        parameters: how many numbers are trained.
        loss: a name in :data:`LOSSES`, or of a function in the file.
        arguments: what the function is called with.
        start: the weights to start from, as safetensors; none: the function's own under ``seed``.
        pad: the length that records are padded to.
    """

    file: str
    maker: str
    text: str
    parameters: int
    loss: str = "cross-entropy"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    start: bytes | None = field(default=None, repr=False)
    start_file: str | None = None
    seed: int = 0
    pad: int | None = None

    def __post_init__(self) -> None:
        if not self.file.endswith(".py") or not is_path_name(self.file) or not self.maker.isidentifier():
            raise ValueError(f"[objective] module='{self.file}:{self.maker}': must be FILE.py:FUNCTION.")
        if not 1 <= self.parameters <= MOST_PARAMETERS:
            raise ValueError(f"[objective] parameters={self.parameters}: must be between 1 and 2^25.")
        if self.loss not in LOSSES and not self.loss.isidentifier():
            raise ValueError(f"[objective] loss={self.loss!r}: must be {', '.join(LOSSES)} or a name of the file.")
        if any(len(line) > _LONGEST_LINE for line in self.text.split("\n")):
            raise ValueError(f"[objective] {self.file}: has lines longer than a screen; break them.")
        if self.pad is not None and self.pad < 1:
            raise ValueError(f"[objective] pad={self.pad}: must be a length ≥ 1.")

    @classmethod
    def of(cls, settings: Mapping[str, Any], beside: Beside) -> NetworkSource:
        """Read ``[objective]`` and the files that it names; none of their code is run."""
        given = check_types(dict(settings), "[objective]", SETTINGS)
        if "module" not in given:
            raise ValueError("[objective] needs 'module', such as \"network.py:make\".")
        file, _, maker = given.pop("module").partition(":")
        start_file, start = given.pop("start", None), None
        for name in (file, *(() if start_file is None else (start_file,))):
            if not is_path_name(name):
                raise ValueError(f"[objective] {name!r}: must be the name of a file in the plan's folder.")
        if start_file is not None:
            start = beside(start_file, _MOST_WEIGHTS)
            given.setdefault("parameters", numbers_in(start, start_file))
        elif "parameters" not in given:
            raise ValueError("[objective] needs 'start' (weights), or 'parameters', how many numbers are trained.")
        try:
            text = beside(file, MOST_TEXT).decode()
        except UnicodeDecodeError:
            raise ValueError(f"[objective] {file}: not a text file.") from None
        return cls(file, maker or "make", text, start=start, start_file=start_file, **given)

    @property
    def regularizer(self) -> Regularizer:
        return NoRegularizer()

    def initial(self, records: object) -> npt.NDArray[np.float32]:
        """A vector of the right length; a run starts at :meth:`build`'s."""
        return np.zeros(self.parameters, np.float32)

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file by name, which the plan's digest covers."""
        digest_by_file = {self.file: hashlib.sha256(self.text.encode()).hexdigest()}
        if self.start is not None and self.start_file is not None:
            digest_by_file[self.start_file] = hashlib.sha256(self.start).hexdigest()
        return digest_by_file

    @property
    def facts(self) -> dict[str, Any]:
        """The public facts that a saved model needs, beside the text and the start weights."""
        return {
            "objective": NETWORK, "module": f"{self.file}:{self.maker}", "arguments": dict(self.arguments),
            "loss": self.loss, "seed": self.seed, "pad": self.pad, "start": self.start_file,
            "parameters": self.parameters, "sha256": self.digests,
        }  # fmt: skip

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows that a member reads before it approves."""
        weights = f"made by the file under seed {self.seed}"
        if self.start_file is not None:
            weights = f"{self.start_file}, SHA-256 {self.digests[self.start_file]}"
        return [
            ("code", f"{self.file}, SHA-256 {self.digests[self.file]}; every member that approves this plan runs "
             "this file on its own machine, parties on their own records"),
            ("module", f"{self.maker}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())}), "
             f"{self.parameters} trained parameters, loss {self.loss}"),
            ("start weights", weights),
        ]  # fmt: skip

    def build(self) -> ModuleObjective:
        """Run the file and return the network as an objective, at its start weights."""
        import torch

        from quietgrad.torch.networks.module import objective

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            space = self._executed()
            maker = getattr(space, self.maker, None)
            if not callable(maker):
                raise DataError(f"{self.file}: has no function {self.maker!r}.")
            try:
                module = maker(**self.arguments)
            except Exception as error:  # code of the plan: whatever it raises is its own
                raise DataError(f"{self.file}: {self.maker} raises {type(error).__name__}: {error}") from error
        if not isinstance(module, torch.nn.Module):
            raise DataError(f"{self.file}: {self.maker} returns a {type(module).__name__}, not a torch module.")
        self._start(module)
        network = objective(module, self._loss(space), pad=self.pad)
        if network.engine.dim != self.parameters:
            raise DataError(
                f"{self.file}: the module trains {network.engine.dim} parameters, the plan states "
                f"{self.parameters}. Correct 'parameters' in [objective]."
            )
        return network

    def _executed(self) -> ModuleType:
        """The file as a module of its own, which no import finds."""
        name = f"quietgrad_network_{self.digests[self.file][:16]}"
        space = ModuleType(name)
        space.__file__ = f"<{self.file} of the approved plan>"
        lines = self.text.splitlines(keepends=True)
        linecache.cache[space.__file__] = (len(self.text), None, lines, space.__file__)  # for tracebacks
        sys.modules[name] = space  # dataclasses and pickles of the file look here for their module
        try:
            exec(compile(self.text, space.__file__, "exec"), space.__dict__)
        except Exception as error:
            raise DataError(f"{self.file}: cannot be run: {type(error).__name__}: {error}") from error
        return space

    def _loss(self, space: ModuleType) -> Any:
        if self.loss in LOSSES:
            home, _, name = LOSSES[self.loss].partition(":")
            torch_loss = getattr(__import__(home, fromlist=[name]), name)
            return torch_loss() if isinstance(torch_loss, type) else torch_loss
        loss = getattr(space, self.loss, None)
        if not callable(loss):
            raise DataError(f"{self.file}: has no loss {self.loss!r}; named ones are {', '.join(LOSSES)}.")
        return loss

    def _start(self, module: nn.Module) -> None:
        """Load the start weights; without them nothing that is not trained may differ between members."""
        if self.start is None:
            fixed = [name for name, value in module.named_parameters() if not value.requires_grad]
            fixed += [name for name, _ in module.named_buffers()]
            if fixed:
                raise DataError(
                    f"{self.file}: {fixed[0]!r} is a buffer or a frozen parameter, which must be the same at all "
                    "members. Save the module's state as safetensors and name it in [objective] start."
                )
            return
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            module.load_state_dict(load(self.start))
        except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise DataError(f"{self.start_file}: not the weights of this module: {error}") from None


def numbers_in(weights: bytes, name: str) -> int:
    """How many numbers a safetensors file holds, by its header alone.

    >>> from safetensors.numpy import save
    >>> numbers_in(save({"a": np.zeros((2, 3)), "b": np.zeros(4)}), "start.safetensors")
    10
    """
    try:
        (length,) = struct.unpack_from("<Q", weights)
        if length > min(_MOST_HEADER, len(weights) - 8):
            raise ValueError("header is too long")
        header = json.loads(weights[8 : 8 + length])
        shapes = [entry["shape"] for key, entry in header.items() if key != "__metadata__"]
        return sum(_size(shape) for shape in shapes)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        raise ValueError(f"[objective] {name}: not a safetensors file.") from None


def _size(shape: list[int]) -> int:
    """How many numbers a tensor has; no product that a hostile header makes long is computed."""
    count = 1
    for side in shape:
        if type(side) is not int or not 0 <= side <= _MOST_WEIGHTS or count > _MOST_WEIGHTS:
            raise ValueError("a shape is no list of sizes")
        count *= side
    return count
