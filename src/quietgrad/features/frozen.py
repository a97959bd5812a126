"""Features of a public network: a torch module or an ONNX file, pinned by a digest, one record at a time.

A network whose weights are public is a public function. Its outputs cost no privacy if every row of features is a
function of that row alone. :class:`Frozen` asks the network about one record per call, so nothing in the network
can mix records, and a record's features are the same to the last bit wherever it stands. It knows the network by a
SHA-256 digest, which goes into the privacy statement and the certificate. It refuses a network that keeps state, or
that is not the one that was pinned.

What no program can know is where weights come from. A network that was trained or tuned on the private records is
not public, and neither are its features.
"""

from __future__ import annotations

import copy
import hashlib
import math
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.files import read_bytes, write_atomically

if TYPE_CHECKING:
    import torch

Rows = npt.NDArray[np.float32]
ONNX_FILE = "features.onnx"
"""The copy of an ONNX file in the folder of a run."""
MARK = "sha256:"
"""What a digest begins with."""
_LARGEST = 2**31  # bytes: what a protobuf message can be
_NEEDS = "an ONNX file needs onnxruntime: pip install 'quietgrad[onnx]'. A torch module needs torch alone."


class PublicFeatures(Protocol):
    """A public map of single records, which the estimators take as ``features=``."""

    @property
    def row_bound(self) -> float | None: ...

    @property
    def note(self) -> str: ...  # what a privacy statement says of it

    def rows(self, X: Any) -> Rows: ...

    def to_json(self) -> dict[str, Any]: ...

    def save(self, folder: str | Path) -> None: ...  # what a run needs beside those words


class Frozen:
    """A public network as a feature map.

    A row of numbers goes in, a row of float32 features comes out.

    Args:
        source: a torch module, which is copied and put into evaluation mode; or the path of an ONNX file, which is
            read whole. Weights in files beside it are refused, because the digest would not cover them.
        digest: ``"sha256:…"`` of the network that is meant; another one is refused.
        shape: of one record as the network takes it, such as ``(1, 28, 28)``; rows of numbers are reshaped to it.
            ``None`` takes it from the ONNX file; a module gets rows as they are.
        output: name of the ONNX output to use; ``None``: the first.
        unit_rows: divide every row of features by its length. Rows then have a public bound, 1, which spares the
            private estimate of ranges; ``False`` keeps the network's own numbers.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> features = Frozen(net, shape=(1, 2, 2))
    >>> features.rows(np.zeros((5, 4))).shape, features.digest[:7]
    ((5, 3), 'sha256:')
    >>> Frozen(net, shape=(1, 2, 2), digest=features.digest) == features
    True
    """

    def __init__(
        self,
        source: torch.nn.Module | str | Path,
        *,
        digest: str | None = None,
        shape: tuple[int, ...] | None = None,
        output: str | None = None,
        unit_rows: bool = True,
    ) -> None:
        self.unit_rows, self._output = bool(unit_rows), output
        self._module: torch.nn.Module | None = None
        self.content: bytes | None = None
        if isinstance(source, str | Path):
            try:
                self.content = read_bytes(source, most=_LARGEST)
            except FileNotFoundError:
                raise DataError(f"{source}: there is no such file.") from None
            self.digest = MARK + hashlib.sha256(self.content).hexdigest()
            self.name = Path(source).name
        else:
            self._module = _copied(source)
            if output is not None:
                raise ValueError("output: is the name of an output of an ONNX file; a module has one output.")
            self.digest, self.name = module_digest(self._module), type(source).__name__
        if digest is not None and digest != self.digest:
            raise DataError(
                f"{self.name}: is not the pinned network: its digest is {self.digest}, and {digest} was asked for. "
                "Its features would be others. No privacy budget was spent."
            )
        self.shape = self._file_shape() if shape is None and self.content is not None else shape
        if self.shape is not None and not all(isinstance(size, int) and size > 0 for size in self.shape):
            raise ValueError(f"shape={self.shape!r}: must be sizes > 0 of one record, such as (1, 28, 28).")

    # --- what it is -------------------------------------------------------------------------------------------

    @property
    def row_bound(self) -> float | None:
        """A public bound on the length of a row of features, if there is one."""
        return 1.0 if self.unit_rows else None

    @property
    def note(self) -> str:
        """The note in the privacy statement: which public function the features are."""
        return f"features are those of a public network, {self.digest}, asked about one record at a time"

    def to_json(self) -> dict[str, Any]:
        """Public words that pin the network; the weights are in the file or the module."""
        return {
            "features": "frozen", "digest": self.digest, "shape": None if self.shape is None else list(self.shape),
            "output": self._output, "unit_rows": self.unit_rows, "file": self.content is not None,
        }  # fmt: skip

    def save(self, folder: str | Path) -> None:
        """Write the ONNX file into a run's folder, for predictions.

        A module's code cannot be saved there.
        """
        if self.content is not None:
            write_atomically(Path(folder) / ONNX_FILE, self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.digest, self.unit_rows))

    def __repr__(self) -> str:
        return f"Frozen({self.name}, digest={self.digest!r})"

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it never changes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_session"}

    # --- what it does -----------------------------------------------------------------------------------------

    def rows(self, X: Any) -> Rows:
        """Rows of features of a table of records, dense or sparse, each from its own record alone.

        Raises:
            DataError: the rows do not have the network's shape, it changes while it answers, or its answers are
                not finite.
        """
        width = int(X.shape[1])
        shape = (width,) if self.shape is None else self.shape
        if math.prod(shape) != width:
            raise DataError(f"rows of {width} numbers: the network takes records of shape {shape}.")
        # The network's answer about a public record, before and after: one that keeps state or draws random numbers
        # would let one record move the features of another.
        blank = np.zeros((1, *shape), np.float32)
        before = self._answer(blank)
        out = np.empty((X.shape[0], before.size), np.float32)
        for i in range(len(out)):
            row = X[i : i + 1]
            dense = row if isinstance(row, np.ndarray) else row.toarray()
            answer = self._answer(np.array(dense, np.float32).reshape(1, *shape))
            if answer.size != before.size:
                raise DataError(f"{self.name}: gives records of one shape features of several widths.")
            out[i] = answer
        changed = self._module is not None and module_digest(self._module) != self.digest
        if changed or not np.array_equal(before, self._answer(blank), equal_nan=True):
            raise DataError(
                f"{self.name}: changed while it was asked: it keeps state or draws random numbers, so one record "
                "may move another one's features. Freeze it first. No privacy budget was spent."
            )
        if not np.isfinite(out).all():
            raise DataError(
                f"{self.name}: its features of some records are not finite. No privacy budget was spent."
            )
        return unit_length(out) if self.unit_rows else out

    def _answer(self, record: Rows) -> Rows:
        """Return the network's output for one record, flat."""
        try:
            answer = self._session_answer(record) if self._module is None else self._module_answer(record)
        except DataError:
            raise
        except Exception:  # foreign code: its message may show a record
            raise DataError(
                f"{self.name}: fails on a record of shape {record.shape[1:]}. Pass the shape that it takes, such "
                "as shape=(1, 28, 28)."
            ) from None
        return np.asarray(answer, np.float32).ravel()

    def _session_answer(self, record: Rows) -> Any:
        session, name, kind = self._session
        (answer,) = session.run([self._output or session.get_outputs()[0].name], {name: record.astype(kind)})
        return answer

    def _module_answer(self, record: Rows) -> Any:
        import torch

        assert self._module is not None
        kinds = [p.dtype for p in self._module.parameters() if p.is_floating_point()]
        with torch.inference_mode():
            answer = self._module(torch.from_numpy(record).to(kinds[0] if kinds else torch.float32))
        if not isinstance(answer, torch.Tensor):
            raise DataError(f"{self.name}: must return one tensor, returns {type(answer).__name__}.")
        return answer.float().numpy()

    # --- ONNX files -------------------------------------------------------------------------------------------

    @cached_property
    def _session(self) -> tuple[Any, str, Any]:
        """A session of onnxruntime in one thread, its input's name and number type."""
        try:
            runtime: Any = import_module("onnxruntime")
        except ImportError:
            raise DataError(f"{self.name}: {_NEEDS}") from None
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Weights outside the file are sought in a folder that does not exist: the digest would not cover them.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", "/nonexistent")
        try:
            session = runtime.InferenceSession(self.content, options, providers=["CPUExecutionProvider"])
        except Exception:
            raise DataError(
                f"{self.name}: cannot be read as an ONNX file that holds all of its weights. Export it again, with "
                "the weights inside."
            ) from None
        inputs, outputs = session.get_inputs(), [each.name for each in session.get_outputs()]
        kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64}
        if len(inputs) != 1 or inputs[0].type not in kinds:
            raise DataError(f"{self.name}: must have one input of floats.")
        if self._output is not None and self._output not in outputs:
            raise DataError(f"{self.name}: output={self._output!r}: must be one of {', '.join(outputs)}.")
        if isinstance(inputs[0].shape[0], int) and inputs[0].shape[0] != 1:
            raise DataError(f"{self.name}: takes batches of {inputs[0].shape[0]}; export it for a batch of 1.")
        return session, inputs[0].name, kinds[inputs[0].type]

    def _file_shape(self) -> tuple[int, ...] | None:
        """The shape of one record as the file says it; ``None`` for plain rows of any width."""
        sizes = self._session[0].get_inputs()[0].shape[1:]
        if all(isinstance(size, int) for size in sizes):
            return tuple(sizes)
        if len(sizes) == 1:
            return None
        raise DataError(f"{self.name}: does not say the shape of a record; pass shape=, such as (1, 28, 28).")


def _copied(module: Any) -> Any:
    """A copy of a torch module for evaluation, so that training the original later does not change it."""
    if not (hasattr(module, "state_dict") and callable(module)):
        raise ValueError("source: must be a torch module or the path of an ONNX file.")
    try:
        duplicate = copy.deepcopy(module)
    except RuntimeError:
        raise DataError(
            f"{type(module).__name__}: cannot be copied while it holds a graph of gradients; detach its tensors."
        ) from None
    return duplicate.cpu().eval().requires_grad_(False)


def module_digest(module: torch.nn.Module) -> str:
    """``sha256:…`` of a module's parts, as torch prints them, and of all its parameters and buffers.

    It does not cover the code of ``forward``, nor numbers that the code holds: where that matters, export to ONNX,
    whose file holds the whole function.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> first = module_digest(net)
    >>> _ = net.weight.data.add_(1e-6)
    >>> module_digest(net) == first
    False
    """
    total = hashlib.sha256(str(module).encode())
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            plain = tensor.detach().cpu().contiguous()
            total.update(f"\n{kind} {name} {plain.dtype} {tuple(plain.shape)}\n".encode())
            total.update(plain.flatten().view(_bytes()).numpy().tobytes())
    return MARK + total.hexdigest()


def _bytes() -> Any:
    import torch

    return torch.uint8


def unit_length(rows: Rows) -> Rows:
    """Rows of length 1; a row of zeros stays."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    return np.asarray(rows / np.where(lengths > 0.0, lengths, 1.0), np.float32)
